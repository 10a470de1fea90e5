"""The words that have a meaning of their own: operations, reductions, casts, and what the language leaves out."""

from __future__ import annotations

from .types import NAMES

REDUCTIONS = frozenset({"sum", "max", "min", "prod", "any", "all", "argmax", "argmin"})

_ONE = (
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "tanh",
    "erf",
    "sin",
    "cos",
    "abs",
    "floor",
    "ceil",
    "round",
)

# Fewest and most arguments; None where there is no most.
FUNCTIONS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(_ONE, (1, 1)),
    "where": (3, 3),
    "pow": (2, 2),
    "min": (2, None),
    "max": (2, None),
}
CASTS = frozenset(NAMES)
BUILT_IN = frozenset(FUNCTIONS) | REDUCTIONS | CASTS

# Refused as outside the language (DESIGN 2.1), whatever they are called with.
OUTSIDE = frozenset(
    {"sort", "argsort", "topk", "top_k", "scan", "cumsum", "cumprod", "cummax", "dropout", "random"}
)
OUTSIDE |= frozenset({"rand", "prefix_sum"})

LATER_DTYPES = frozenset({"f8e4m3", "f8e5m2"})
