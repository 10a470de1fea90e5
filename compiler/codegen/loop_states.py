"""What a loop's states are to each other: running maxima, the factors by which sums move on, sums that may stay in parts."""

from __future__ import annotations

import math

from ...dsl.records import dataclass
from ..tile_ir import (
    Apply,
    Carry,
    Const,
    Expr,
    Fill,
    For,
    Let,
    Name,
    Reduce,
    expressions,
    statements,
    subexpressions,
)


@dataclass(frozen=True)
class RunningMaximum:
    """A state that becomes `new` = max(state, …), what is subtracted in its place (`origin`: 0 while it is -inf), and the
    factors exp(c · (state - origin)) by which sums of exponentials move on."""

    state: str
    new: str
    origin: str
    factors: tuple[str, ...]


def running_maxima(s: For) -> list[RunningMaximum]:
    """The running maxima of a loop by which some sum may move on."""
    lets = {x.name: x.value for x in s.body if isinstance(x, Let)}
    found = []
    for c, y in zip(s.carries, s.yields, strict=True):
        match _highest(lets, y, c.name) if isinstance(y, Name) else None:
            case Apply(op="max", args=args) if Name(c.name) in args and isinstance(y, Name):
                for origin in (y.name, *(n for n, e in lets.items() if _without_infinity(e, y))):
                    factors = tuple(n for n, e in lets.items() if _moves_on(e, c.name, origin))
                    if factors:
                        found.append(RunningMaximum(c.name, y.name, origin, factors))
    return found


def _highest(lets: dict[str, Expr], new: Name, state: str) -> Expr | None:
    """What a state becomes, or would if it did not stay where it is while that is not much: where(…, state, highest)."""
    match lets.get(new.name):
        case Apply(op="where", args=(_, Name(old), Name(highest))) if old == state:
            return lets.get(highest)
        case e:
            return e


def _without_infinity(e: Expr, new: Name) -> bool:
    """e = where(new == -inf, 0, new)."""
    match e:
        case Apply(op="where", args=(Apply(op="eq", args=(a, Const(value=low))), Const(value=zero), b)):
            return a == b == new and low == -math.inf and zero == 0
    return False


def _moves_on(e: Expr, state: str, origin: str) -> bool:
    """e = exp(c · (state - origin)), with or without c."""
    return exponent(e)[1:] == (Name(state), Name(origin))


def exponent(e: Expr) -> tuple[Expr | None, Expr | None, Expr | None]:
    """c, x and y of exp(c · (x - y)), None for a c that is not there; no x where it is no such exponential."""
    match e:
        case Apply(op="exp", args=(Apply(op="mul", args=(c, Apply(op="sub", args=(x, y)))),)):
            return c, x, y
        case Apply(op="exp", args=(Apply(op="sub", args=(x, y)),)):
            return None, x, y
    return None, None, None


def only_shifted(loop: For, name: str) -> bool:
    """Does nothing read a value but maxima along the loop's axis, and exponentials of its difference from one that stands
    in for a maximum of -inf?"""
    origins = {Name(m.origin) for m in running_maxima(loop) if m.origin != m.new}
    inside = [e for x in statements(loop.body) for e in expressions(x)]
    every = [x for e in (*inside, *loop.yields, *loop.domain) for x in subexpressions(e)]
    maxima = [x for x in every if isinstance(x, Reduce) and x.fn == "max" and x.over == (loop.axis.name,)]
    exponents = [exponent(x.value) for x in loop.body if isinstance(x, Let)]
    fine = sum(x.arg == Name(name) for x in maxima) + sum(
        x == Name(name) and origin in origins for _, x, origin in exponents
    )
    return fine == every.count(Name(name))


def sums_in_parts(loops: tuple[For, ...]) -> dict[int, Reduce]:
    """The states, by number, of loops in a row (each goes on with those of the one before) that may stay in parts until
    all have ended, one part for each thread that holds some of what is reduced: state + sum(…) or state · factor + sum(…),
    from 0 on, which nothing else reads.

    No part may meet an infinite factor, which would make NaN of a part that is 0: those of a running maximum are at most 1.
    """
    each = [_in_parts(s) for s in loops]
    return {
        i: r for i, r in each[0].items() if all(i in x for x in each) and _is_zero(loops[0].carries[i].init)
    }


def _in_parts(s: For) -> dict[int, Reduce]:
    inside = [e for x in statements(s.body) for e in expressions(x)]
    names = [
        x.name for e in (*inside, *s.yields, *s.domain) for x in subexpressions(e) if isinstance(x, Name)
    ]
    factors = {n for m in running_maxima(s) for n in m.factors}
    added = [_added(c, y, factors) for c, y in zip(s.carries, s.yields, strict=True)]
    return {i: r for i, r in enumerate(added) if r is not None and names.count(s.carries[i].name) == 1}


def _is_zero(e: Expr) -> bool:
    return _is_zero(e.value) if isinstance(e, Fill) else isinstance(e, Const) and e.value == 0


def _added(c: Carry, y: Expr, factors: set[str]) -> Reduce | None:
    """The sum that is added to a state, which may be multiplied by one of some factors before."""
    state = Name(c.name)
    pairs = [(state, Name(f)) for f in factors]
    before = [state, *(Apply("mul", x) for a, b in pairs for x in ((a, b), (b, a)))]
    match y:
        case (
            Apply(op="add", args=(x, Reduce(fn="sum") as r))
            | Apply(op="add", args=(Reduce(fn="sum") as r, x))
        ):
            return r if c.type.dtype.is_float and x in before else None
    return None
