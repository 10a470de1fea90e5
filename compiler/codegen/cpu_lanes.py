"""Which axis lies along the lanes of vectors, where products follow one another.

In `o = dot[n](f(dot[d](q, k)), v)` the rows of the first product, an axis m that both products keep, go through the whole
chain. With m last in every tile value the products are Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ: k and v are read where they lie, one
element at a time, and every reduction over n is a vector operation on whole rows. With few rows most lanes would be
empty; then values keep the order that they were written in, with n along the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..remarks import Remarks
from ..tile_ir import (
    Carry,
    Dot,
    Expr,
    For,
    Grid,
    Let,
    LoopAxis,
    Name,
    Stmt,
    TileModule,
    TileProgram,
    TileType,
    statements,
    subexpressions,
)
from .placement import Types

FEWEST_ROWS = 16
"""A chain with a smaller tile of rows keeps them out of the lanes: the widest vectors have as many."""


def oriented(program: TileProgram) -> TileProgram:
    """The program with the rows of its chained products last in every tile value that has them."""
    axis = lane_axis(program)
    return program if axis is None else replace(program, body=_reordered(program.body, axis))


def remark(module: TileModule, remarks: Remarks) -> None:
    """Tell which axis the vectors of each program with chained products run along, and why."""
    for p in module.programs:
        loop = next((s for s in statements(p.body) if isinstance(s, For) and _chain(s)), None)
        if loop is None:
            continue
        axis = lane_axis(p)
        short = [
            a.name for s in p.body if isinstance(s, Grid) for a in s.axes if a.tile and a.tile < FEWEST_ROWS
        ]
        if axis is not None:
            text = f"{axis} lies along the lanes of vectors through the chain of products"
        elif short:
            why = f"tiles of {', '.join(short)} have fewer than {FEWEST_ROWS} rows"
            text = f"the loop's axis lies along the lanes of vectors: {why}"
        else:
            text = "no axis goes through the whole chain of products; vectors run along the last axis of each value"
        place = next((s.span for s in loop.body if isinstance(s, Let) and s.span is not None), loop.span)
        remarks.add("applied", "codegen", "lanes", f"{p.name}: {text}", place)


def lane_axis(program: TileProgram) -> str | None:
    """The grid axis that the products of every chain keep, each in one operand alone; None where there is no chain, or no
    such axis with a tile of enough rows."""
    types = Types(program)
    loops = [s for s in statements(program.body) if isinstance(s, For)]
    dots = [d for s in loops for d in _dots(s)]
    chained = [d for s in loops for d in _chain(s)]
    if not chained:
        return None
    for axis in _tiled(program):
        if all(_kept_in_one(axis, d, types) for d in dots):
            return axis.name
    return None


def _tiled(program: TileProgram) -> Iterator[LoopAxis]:
    for s in statements(program.body):
        if isinstance(s, Grid):
            yield from (a for a in s.axes if a.tile is not None and a.tile >= FEWEST_ROWS)


def _kept_in_one(axis: LoopAxis, d: Dot, types: Types) -> bool:
    return (axis.name in types.of(d.a).axes) != (axis.name in types.of(d.b).axes) and axis.name not in d.over


def _dots(loop: For) -> list[Dot]:
    values = [*loop.yields, *(s.value for s in statements(loop.body) if isinstance(s, Let))]
    return [x for e in values for x in subexpressions(e) if isinstance(x, Dot)]


def _chain(loop: For) -> list[Dot]:
    """Products of a loop's body with an operand that another product went into."""
    from_product: set[str] = set()
    found: list[Dot] = []

    def visit(e: Expr) -> bool:
        inside = list(subexpressions(e))
        found.extend(x for x in inside if isinstance(x, Dot) and any(map(reached, (x.a, x.b))))
        return any(isinstance(x, Dot) for x in inside) or reached(e)

    def reached(e: Expr) -> bool:
        return any(
            isinstance(x, Dot) or (isinstance(x, Name) and x.name in from_product) for x in subexpressions(e)
        )

    for s in loop.body:
        if isinstance(s, Let) and visit(s.value):
            from_product.add(s.name)
    for y in loop.yields:
        visit(y)
    return found


def _reordered(body: tuple[Stmt, ...], axis: str) -> tuple[Stmt, ...]:
    return tuple(_statement(s, axis) for s in body)


def _statement(s: Stmt, axis: str) -> Stmt:
    match s:
        case Let():
            return replace(s, type=_last(s.type, axis))
        case Grid():
            return replace(s, body=_reordered(s.body, axis))
        case For():
            carries = tuple(_carry(c, axis) for c in s.carries)
            return replace(s, carries=carries, body=_reordered(s.body, axis))
    return s


def _carry(c: Carry, axis: str) -> Carry:
    return replace(c, type=_last(c.type, axis))


def _last(t: TileType, axis: str) -> TileType:
    if axis not in t.axes:
        return t
    return TileType(t.dtype, (*(a for a in t.axes if a != axis), axis))
