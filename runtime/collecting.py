"""Python's search for cycles, which compilation does without: it makes large graphs and keeps them until it ends, and each
search goes through all of them, for a fifth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_paused() -> Iterator[None]:
    """No cycles are searched for meanwhile; other threads' have to wait, too."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
