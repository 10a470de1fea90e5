"""Generated source text to callable kernels. Numba is imported here and in `intrinsics` only.

A source is run as a module of its own that `linecache` knows, so that a traceback shows its lines whether or not it was
ever a file. What `build` takes is exactly what `tileloom show --emit source` prints: an edited file runs the same way.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Kernel = Callable[..., Any]


def build(source: str, path: str | Path | None = None) -> dict[str, Kernel]:
    """The functions of a generated source, by name; each compiles at its first call for the types it is given.

    `path` is the file that tracebacks name; without it the source gets a name made of its digest. Raises `SyntaxError`
    and whatever else the text raises when it is run.
    """
    name = str(path) if path is not None else f"<tileloom {digest(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(f"tileloom_generated_{digest(source)}")
    module.__file__ = name
    exec(compile(source, name, "exec"), module.__dict__)
    return {n: f for n, f in vars(module).items() if getattr(f, "__module__", None) == module.__name__}


def load(path: str | Path) -> dict[str, Kernel]:
    """`build` from a file of source text, such as one that a user has edited."""
    return build(Path(path).read_text(encoding="utf-8"), path)


def digest(source: str) -> str:
    """A short name for a text: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]
