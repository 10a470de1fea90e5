"""tileloom: attention as the textbook writes it; the compiler derives the fast kernel and shows why.

program = tileloom.load("attention.tile")
attention = tileloom.compile(program["attention"])
o, lse = attention(q, k, v, scale=0.125)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .runtime.collecting import collecting_paused

if TYPE_CHECKING:
    from .api import CompiledKernel, TileError, compile, load, parse
    from .functions import attention, layernorm, matmul, rmsnorm, softmax

__version__ = "0.1.0"

FUNCTIONS = ("attention", "layernorm", "matmul", "rmsnorm", "softmax")
__all__ = [
    "CompiledKernel",
    "TileError",
    "__version__",
    "attention",
    "compile",
    "layernorm",
    "load",
    "matmul",
    "parse",
    "rmsnorm",
    "softmax",
]


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `tileloom --help` waits for no compiler."""
    if name not in __all__:
        raise AttributeError(f"module 'tileloom' has no attribute {name!r}")
    with collecting_paused():
        module = import_module(f".{'functions' if name in FUNCTIONS else 'api'}", __name__)
    found = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__]
