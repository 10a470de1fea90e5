"""tileloom: attention as the textbook writes it; the compiler derives the fast kernel and shows why.

program = tileloom.load("attention.tile")
attention = tileloom.compile(program["attention"])
o, lse = attention(q, k, v, scale=0.125)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import CompiledKernel, TileError, compile, load, parse

__version__ = "0.1.0"

__all__ = ["CompiledKernel", "TileError", "__version__", "compile", "load", "parse"]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `tileloom --help` waits for no compiler."""
    if name not in __all__:
        raise AttributeError(f"module 'tileloom' has no attribute {name!r}")
    from . import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*__all__]
