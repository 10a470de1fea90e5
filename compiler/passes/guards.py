"""How states are read while they may still be empty, so that an empty one does no harm.

A maximum that is still -inf is read as 0: every term it enters is then exp(-inf - 0) = 0, and only the new maximum needs it
(exp(old - safe(new)) is 0 for an empty old state). A sum that is still 0 is read as 1. A finite stand-in in place of -inf
would be wrong: it swallows rows of finite scores below it (faults X001). The text's own guard is the same thing, and is
not applied twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..cascade import typed
from ..tensor_ir import Apply, Carried, Const, Moment, Node, Reduce, apply, carried, const, replace, walk

EMPTY = {"max": -math.inf, "min": math.inf, "sum": 0.0}


def guarded_state(n: Node) -> Node | None:
    """`where(r == -inf, finite, r)`, the text's own guard: the r that it guards."""
    match n:
        case Apply(
            op="where",
            operands=(Apply(op="eq", operands=(a, Const(value=v))), Const(value=f), b),
        ) if v == -math.inf and math.isfinite(f) and a is b:
            return a
    return None


def extremum(n: Node, states: Mapping[Node, str]) -> str | None:
    """ "max" or "min" where n is that state, or the greater (lesser) of it and something that no state changes."""
    while True:
        match n:
            case Reduce(fn="max" | "min" as fn) if n in states:
                return fn
            case Apply(op="max" | "min" as fn, operands=(a, b)):
                inside = [x for x in (a, b) if depends(x, states)]
                if len(inside) != 1 or extremum_kind(inside[0]) != fn:
                    return None
                n = inside[0]
            case _:
                return None


def extremum_kind(n: Node) -> str | None:
    match n:
        case Reduce(fn="max" | "min" as fn) | Apply(op="max" | "min" as fn):
            return fn
    return None


def depends(n: Node, states: Mapping[Node, str]) -> bool:
    return any(x in states for x in walk([n]))


DIVIDES = {"div": 1, "log": 0, "log2": 0, "rsqrt": 0, "pow": 0}
"""The operand that must not be 0."""


def harmed(body: Node) -> frozenset[Node]:
    """Sums below `body` that would do harm while they are still 0: they are divided by, or their logarithm is taken."""
    divisors = [n.operands[DIVIDES[n.op]] for n in walk([body]) if isinstance(n, Apply) and n.op in DIVIDES]
    return frozenset(n for n in walk(divisors) if isinstance(n, Reduce) and n.fn == "sum")


def reader(
    states: Mapping[Node, str], moment: Moment, guard: bool = True, zero_harms: frozenset[Node] = frozenset()
) -> Callable[[Node], Node]:
    """Reading: a node with every reduction of `states` in it read as carried state, through the guard it needs."""

    def plain(n: Node) -> Node:
        return replace([n], lambda x: _ref(x, states, moment) if x in states else None)[0]

    def rule(x: Node) -> Node | None:
        inner = guarded_state(x)
        inner = x if inner is None else inner
        fn = extremum(inner, states)
        if fn is not None:
            return safe(plain(inner), fn)
        if x in states:
            return safe(plain(x), "sum") if x in zero_harms else plain(x)
        return None

    if not guard:
        return plain
    return lambda n: replace([n], rule)[0]


def _ref(x: Node, states: Mapping[Node, str], moment: Moment) -> Carried:
    return carried(states[x], moment, x.axes, x.dtype)


def safe(ref: Node, fn: str) -> Node:
    """The state read so that an empty one does no harm: 0 for an infinite extremum, 1 for a zero sum."""
    if fn not in EMPTY or not (ref.dtype.is_float or fn == "sum"):
        return ref
    empty, stand_in = (typed(x, ref.dtype) for x in (EMPTY[fn], 1 if fn == "sum" else 0))
    return apply("where", apply("eq", ref, const(empty, ref.dtype)), const(stand_in, ref.dtype), ref)
