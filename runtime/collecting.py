"""Python's search for cycles, which imports and compilation do without: they make much that stays, and each search goes
through all that there is, for a third of an import's time and a fifth of a compilation's."""

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
