"""Which libNVVM assembles kernels, as keys of the cache folder name it.

A wheel tells its version. The library of an installed toolkit has to be looked for as numba-cuda does, whose import takes a
second, so where it was found is kept: for the same packages, variables and loader's cache it is there again, and a file that
has changed since says so itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .cache import digest, store
from .versions import version

WHEEL = "nvidia-nvvm"
SEARCHERS = ("numba-cuda", "cuda-pathfinder", "cuda-bindings", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc")
VARIABLES = ("CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "NUMBA_CUDA_DRIVER")
LOADER_CACHE = "/etc/ld.so.cache"
"""Where the dynamic loader of Linux keeps the paths of libraries (ld.so(8))."""
FOUND = "libnvvm"
"""The group of entries that hold the path of a library."""


def libnvvm() -> str:
    """What tells the library from others. Raises ImportError where it has to be looked for and numba-cuda is not
    installed."""
    packaged = version(WHEEL)
    if packaged != "none":
        return packaged
    folder, place = store(), digest(*_searched())
    kept = folder.get(FOUND, place)
    told = _file(kept.decode()) if kept is not None else None
    if told is None:
        from .cuda import libnvvm_path

        path = libnvvm_path()
        told = _file(path)
        if told is None:
            return path
        folder.put(FOUND, path.encode(), place)
    return told


def _searched() -> list[str]:
    """What decides where the library is found."""
    packages = [version(p) for p in SEARCHERS]
    variables = [os.environ.get(name, "") for name in VARIABLES]
    return [sys.prefix, *packages, *variables, _file(LOADER_CACHE) or ""]


def _file(path: str) -> str | None:
    """A file by name, size and time of its last change; None where there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return f"{Path(path).resolve()} {facts.st_size} {facts.st_mtime_ns}"
