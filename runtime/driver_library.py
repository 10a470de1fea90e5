"""The library of the CUDA driver."""

from __future__ import annotations

import sys
from typing import Any

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def opened(loader: Any) -> Any:
    """The library. With `ctypes.PyDLL` a call keeps Python's lock, which saves a microsecond; with `CDLL` other threads run
    meanwhile. Raises OSError where there is no driver."""
    return loader(LIBRARY)
