"""tanh(x) that only a softmax sees, without its last step.

`flat_tanh` is 1 - 2 / (1 + 2^y). Where nothing reads it but a maximum m and exp(c · (tanh(x) - m)), and no result depends on
what m is (`lazy_maximum.py`), the one may be left out and the factor given to c: `falling_tanh` is (tanh(x) - 1) / 2 =
-1 / (1 + 2^y), with half the error, and the weights are exp(2c · (…)).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Carry,
    Const,
    Expr,
    Fill,
    For,
    Grid,
    Let,
    Name,
    Reduce,
    Stmt,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)
from .lazy_maximum import with_lazy_maxima
from .loop_states import RunningMaximum, exponent, running_maxima


def with_falling_tanh(program: TileProgram) -> TileProgram:
    """The same program with its scores lowered by one and halved; itself where that could show."""
    return replace(program, body=_rewritten(program.body)) if capped_loops(program) else program


def capped_loops(program: TileProgram) -> list[For]:
    """The loops of a program over scores that are tanh, if nothing but softmaxes sees these and no result depends on what
    is subtracted from them; else none."""
    every = [x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e)]
    capped = sum(isinstance(x, Apply) and x.op == "flat_tanh" for x in every)
    loops = [s for s in statements(program.body) if isinstance(s, For) and running_maxima(s)]
    if not capped or with_lazy_maxima(program) is program:
        return []
    states = {m.state for s in loops for m in running_maxima(s)}
    fits = all(_fits(s, states) for s in loops)
    return loops if fits and capped == sum(map(_capped, loops)) else []


def _capped(s: For) -> int:
    return sum(isinstance(x, Let) and _is_capped(x.value) for x in s.body)


def _is_capped(e: Expr) -> bool:
    return isinstance(e, Apply) and e.op == "flat_tanh"


def scores_of(s: For) -> set[str]:
    """The values of a step that are tanh, or -inf in places."""
    found: set[str] = set()
    for x in s.body:
        if isinstance(x, Let) and (_is_capped(x.value) or unmasked(x.value) in found):
            found.add(x.name)
    return found


def unmasked(e: Expr, beside: float = -math.inf) -> str:
    """The value that is -inf, or another number, where masks say so; empty where it is not that."""
    match e:
        case Apply(op="where", args=(_, x, Const(value=number))) if number == beside:
            return x.name if isinstance(x, Name) else unmasked(x, beside)
    return ""


def _fits(s: For, states: set[str]) -> bool:
    """Are scores read by nothing but masks, the maximum, which is of nothing else, and its exponentials?"""
    (m,) = running_maxima(s)
    scores = scores_of(s)
    every = [x for y in statements(s.body) for e in expressions(y) for x in subexpressions(e)]
    every += [x for e in (*s.yields, *s.domain) for x in subexpressions(e)]
    lets = [x.value for x in s.body if isinstance(x, Let)]
    allowed = [unmasked(e) for e in lets]
    allowed += [
        x.arg.name for x in every if isinstance(x, Reduce) and x.fn == "max" and isinstance(x.arg, Name)
    ]
    weights = [exponent(e) for e in lets]
    weights = [(c, x, origin) for c, x, origin in weights if origin == Name(m.origin)]
    allowed += [x.name for _, x, _ in weights if isinstance(x, Name)]
    read = all(every.count(Name(n)) == allowed.count(n) for n in scores)
    known = all(c is None or isinstance(c, Const) for c, _, _ in weights)
    shifted = all(isinstance(x, Name) and x.name in scores | {m.state} for _, x, _ in weights)
    return read and known and shifted and _is_of(s, m, scores) and _starts_low(s, m, states)


def _is_of(s: For, m: RunningMaximum, scores: set[str]) -> bool:
    """Is a maximum that of a step's scores and of its own state?"""
    new = next(x.value for x in s.body if isinstance(x, Let) and x.name == m.new)
    match new:
        case Apply(op="max", args=args):
            others = [x for x in args if x != Name(m.state)]
            of = [x.arg.name for x in others if isinstance(x, Reduce) and isinstance(x.arg, Name)]
            return len(of) == len(others) == 1 and of[0] in scores
    return False


def _starts_low(s: For, m: RunningMaximum, states: set[str]) -> bool:
    def is_low(c: Carry) -> bool:
        match c.init:
            case Fill(value=Const(value=value)):
                return value == -math.inf
            case Name(name=name):
                return name in states
        return False

    return all(is_low(c) for c in s.carries if c.name == m.state)


def _rewritten(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        match s:
            case For() if running_maxima(s):
                (m,) = running_maxima(s)
                lets = (replace(x, value=_lowered(x.value, m)) if isinstance(x, Let) else x for x in s.body)
                out.append(replace(s, body=tuple(lets)))
            case Grid() | For():
                out.append(replace(s, body=_rewritten(s.body)))
            case _:
                out.append(s)
    return tuple(out)


def _lowered(e: Expr, m: RunningMaximum) -> Expr:
    """flat_tanh(y) -> falling_tanh(y); exp(c · (x - m)) -> exp(2c · (x - m))."""
    c, x, origin = exponent(e)
    if x is not None and origin == Name(m.origin):
        factor = c.value if isinstance(c, Const) else 1.0
        return Apply(
            "exp", (Apply("mul", (Const(2.0 * factor, DType.F32), Apply("sub", (x, Name(m.origin))))),)
        )
    return Apply("falling_tanh", e.args) if isinstance(e, Apply) and e.op == "flat_tanh" else e
