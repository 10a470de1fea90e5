"""How long a step takes, whatever ran before it in the same process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(step: Callable[..., object], *given: object) -> float:
    """Seconds of this process. What earlier tests left behind is not searched for garbage meanwhile: after thousands of
    tests that alone would take longer than a step that makes many objects."""
    gc.collect()
    gc.freeze()
    try:
        start = time.process_time()
        step(*given)
        return time.process_time() - start
    finally:
        gc.unfreeze()
