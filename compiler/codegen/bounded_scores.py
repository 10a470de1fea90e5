"""Softmaxes of softcapped scores, which need no maximum: tanh bounds them.

Where scores are c · tanh(y), or -inf in places, the weights exp(c · (tanh(y) - m)) may be taken relative to m = 0 instead of
a running maximum, if no result depends on what m is (`lazy_maximum.py`): they then lie between 2^-MOST and 2^MOST, which
f32 and bf16 hold as well as numbers near 1, and no sum ever has to move on. Sums over a row overflow only where the
elements that the weights multiply sum up to 2^(127 - MOST). f16 does not hold such weights.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Cast,
    Const,
    Expr,
    For,
    Grid,
    Let,
    Load,
    Name,
    Stmt,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)
from .falling_tanh import capped_loops, scores_of, unmasked
from .loop_states import RunningMaximum, exponent, running_maxima
from .tile_types import rewrite

MOST = 80.0
"""The largest c · log2 e: for softcaps of up to 55."""
LOG2_E = 1 / math.log(2)
ZERO = Const(0.0, DType.F32)


def with_bounded_scores(program: TileProgram) -> TileProgram:
    """The same program without maxima of scores that tanh bounds; itself where it has none, or that could show."""
    loops = capped_loops(program)
    if not loops or not all(_fits(s) for s in loops) or _has_f16(program):
        return program
    made = replace(program, body=_rewritten(program.body, _dropped(loops)))
    return made if not _dropped(loops) & _names(made) else program


def _fits(s: For) -> bool:
    """Is there one set of weights, of scores themselves, with a scale that bounds them?"""
    (m,) = running_maxima(s)
    weights = [x for x in s.body if isinstance(x, Let) and _is_weight(x, s, m)]
    capped = [x for x in s.body if isinstance(x, Let) and _y(x.value) is not None]
    if len(weights) != 1 or len(capped) != 1:
        return False
    scale, x, _ = exponent(weights[0].value)
    last = [n for n in scores_of(s) if not any(unmasked(y.value) == n for y in s.body if isinstance(y, Let))]
    return abs(_number(scale)) * LOG2_E <= MOST and [x] == [Name(n) for n in last]


def _has_f16(program: TileProgram) -> bool:
    """May weights be rounded to f16?"""
    every = [
        x
        for s in statements(program.body)
        if isinstance(s, For)
        for e in _inside(s)
        for x in subexpressions(e)
    ]
    loads = {x.tensor for x in every if isinstance(x, Load)}
    casts = any(isinstance(x, Cast) and x.dtype is DType.F16 for x in every)
    return casts or any(program.param(t).dtype is DType.F16 for t in loads)


def _inside(s: For) -> list[Expr]:
    return [*(e for x in statements(s.body) for e in expressions(x)), *s.yields]


def _number(scale: Expr | None) -> float:
    return float(scale.value) if isinstance(scale, Const) else 1.0


def _is_weight(x: Let, s: For, m: RunningMaximum) -> bool:
    return exponent(x.value)[2] == Name(m.origin) and x.name not in m.factors


def _y(e: Expr) -> Expr | None:
    """y of tanh as `near_functions.py` writes it: y = 2 log2 e · x."""
    return e.args[0] if isinstance(e, Apply) and e.op == "flat_tanh" else None


def _dropped(loops: list[For]) -> set[str]:
    """The names of maxima, and of what is computed from them alone."""
    found: set[str] = set()
    for s in loops:
        for m in running_maxima(s):
            found |= {m.state, m.new, m.origin, *m.factors}
    return found


def _names(program: TileProgram) -> set[str]:
    every = (x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e))
    return {x.name for x in every if isinstance(x, Name)}


def _rewritten(body: tuple[Stmt, ...], dropped: set[str]) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        match s:
            case For() if running_maxima(s):
                out.append(_unlifted(s, dropped))
            case Grid() | For():
                out.append(replace(s, body=_rewritten(s.body, dropped)))
            case _:
                out.append(s)
    return tuple(out)


def _unlifted(s: For, dropped: set[str]) -> For:
    """A loop without its maximum. Its scores are weights at once, masked by 0; the name of the weights stays."""
    (m,) = running_maxima(s)
    weight = next(x for x in s.body if isinstance(x, Let) and _is_weight(x, s, m))
    scale, last, _ = exponent(weight.value)
    scores = scores_of(s)
    renamed = {last: Name(weight.name)}
    body: list[Stmt] = []
    for x in s.body:
        if not isinstance(x, Let) or x is weight or x.name in dropped:
            body += [] if isinstance(x, Let) else [x]
        elif x.name in scores:
            value = _weights(x.value, _number(scale))
            body.append(replace(x, name=weight.name if Name(x.name) == last else x.name, value=value))
        else:
            body.append(replace(x, value=rewrite(x.value, lambda e: renamed.get(e, e))))
    kept = [(c, y) for c, y in zip(s.carries, s.yields, strict=True) if c.name not in dropped]
    return replace(
        s,
        body=tuple(body),
        carries=tuple(c for c, _ in kept),
        yields=tuple(rewrite(y, lambda e: _still(e, dropped)) for _, y in kept),
    )


def _weights(e: Expr, scale: float) -> Expr:
    """tanh(y) -> exp(scale · tanh(y)); where(a, x, -inf) -> where(a, x, 0)."""
    y = _y(e)
    if y is not None:
        return Apply("exp_tanh", (y, Const(scale * LOG2_E, DType.F32)))
    match e:
        case Apply(op="where", args=(a, x, _)):
            return Apply("where", (a, x if isinstance(x, Name) else _weights(x, scale), ZERO))
    return e


def _still(e: Expr, dropped: set[str]) -> Expr:
    """x · factor -> x, for the factor of a maximum that does not move."""
    match e:
        case Apply(op="mul", args=(x, Name(f))) | Apply(op="mul", args=(Name(f), x)) if f in dropped:
            return x
    return e


def weights_of_tanh(s: For) -> set[str]:
    """The values of a step that are exp(c · tanh(y)), or 0 in places, and not what others of them are made of."""
    found: set[str] = set()
    for x in s.body:
        if not isinstance(x, Let):
            continue
        masked = unmasked(x.value, 0.0)
        if masked in found or (isinstance(x.value, Apply) and x.value.op == "exp_tanh"):
            found = (found - {masked}) | {x.name}
    return found
