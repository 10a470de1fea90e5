"""Loops that run once, as where one tile holds a row: what only a next step would read is left out.

A mean and a variance that move on from tile to tile carry a count and a sum of differences besides. In a loop of one step no
step reads those again, so they need no sum over the row of their own, and lanes are counted by the axis's extent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Expr,
    Fill,
    For,
    Grid,
    Let,
    LoopAxis,
    Name,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)
from .placement import transform

Held = Callable[[LoopAxis], bool]
"""Does one tile hold all of an axis?"""


def in_one_step(program: TileProgram, held: Held) -> TileProgram:
    """The program for sizes at which the loops over held axes have one step at most: it stores the same, bit for bit."""
    return replace(program, body=_block(program.body, frozenset(), held)[0])


def _block(
    body: tuple[Stmt, ...], after: frozenset[str], held: Held
) -> tuple[tuple[Stmt, ...], frozenset[str]]:
    """Statements of which each is read later, by `after` or by a store, and the names that they read."""
    live, kept = after, list[Stmt]()
    for s in reversed(body):
        match s:
            case Let(name=n) if n not in live:
                continue
            case For(axis=a) if held(a):
                kept.append(_one_step(s, live, held))
            case Grid() | For():
                inside = live | _names(expressions(s))
                kept.append(replace(s, body=_block(s.body, inside, held)[0]))
            case _:
                kept.append(s)
        live |= _read(kept[-1])
    return tuple(reversed(kept)), live


def _one_step(s: For, after: frozenset[str], held: Held) -> For:
    """The loop without the states that nothing reads after it: where its step reads one, that is what it starts from."""
    gone = {c.name: _start(c.init) for c in s.carries if c.name not in after}

    def rule(e: Expr) -> Expr | None:
        if isinstance(e, Name) and e.name in gone:
            return gone[e.name]
        return _counted(e, s.axis) or _decided(e, gone)

    left = [(c, transform(y, rule)) for c, y in zip(s.carries, s.yields, strict=True) if c.name not in gone]
    body = tuple(_rewritten(inner, rule) for inner in s.body)
    yields = tuple(y for _, y in left)
    return replace(
        s,
        carries=tuple(c for c, _ in left),
        yields=yields,
        body=_block(body, after | _names(yields), held)[0],
    )


def _start(init: Expr) -> Expr:
    return init.value if isinstance(init, Fill) else init


def _counted(e: Expr, axis: LoopAxis) -> Expr | None:
    """sum[n](1) -> the extent of n"""
    match e:
        case Reduce(fn="sum", over=(name,), arg=arg) if name == axis.name:
            match _chosen(arg, name):
                case Const(value=1, dtype=dtype):
                    return Cast(dtype, axis.extent)
    return None


def _decided(e: Expr, gone: Mapping[str, Expr]) -> Expr | None:
    """where(0.0 == 0.0, a, b) -> a, as what a state starts from decides it"""
    match e:
        case Apply(op="where", args=(Apply(op="eq", args=(Name(name=n), b)), x, _)) if gone.get(n) == b:
            return x
    return None


def _chosen(e: Expr, axis: str) -> Expr:
    """where(0 <= n, a, b) -> a"""
    match e:
        case Apply(
            op="where", args=(Apply(op="le", args=(Const(value=0), AxisIndex(axis=n))), chosen, _)
        ) if n == axis:
            return chosen
    return e


def _rewritten(s: Stmt, rule: Callable[[Expr], Expr | None]) -> Stmt:
    """The statement with the rule applied to all that it evaluates, inside it as well."""
    match s:
        case Let():
            return replace(s, value=transform(s.value, rule))
        case Store():
            return replace(
                s, subscripts=tuple(transform(x, rule) for x in s.subscripts), value=transform(s.value, rule)
            )
        case Grid():
            return replace(
                s, axes=tuple(_axis(a, rule) for a in s.axes), body=tuple(_rewritten(x, rule) for x in s.body)
            )
        case For():
            return replace(
                s,
                axis=_axis(s.axis, rule),
                carries=tuple(replace(c, init=transform(c.init, rule)) for c in s.carries),
                body=tuple(_rewritten(x, rule) for x in s.body),
                yields=tuple(transform(y, rule) for y in s.yields),
                domain=tuple(transform(d, rule) for d in s.domain),
            )


def _axis(a: LoopAxis, rule: Callable[[Expr], Expr | None]) -> LoopAxis:
    extent, lo, hi = (None if x is None else transform(x, rule) for x in (a.extent, a.lo, a.hi))
    return replace(a, extent=extent or a.extent, lo=lo, hi=hi)


def _names(values: Iterable[Expr]) -> frozenset[str]:
    return frozenset(x.name for e in values for x in subexpressions(e) if isinstance(x, Name))


def _read(s: Stmt) -> frozenset[str]:
    return _names(e for x in statements((s,)) for e in expressions(x))
