"""A program of some of another's statements, with the parameters, extents and scalars that they use."""

from __future__ import annotations

from dataclasses import replace

from .. import tile_ir as tile
from ..layouts import Alignment, Divisible, Positive, Ranked, find, meaning
from ..tile_ir import (
    Attribute,
    AxisIndex,
    Let,
    Load,
    Param,
    Stmt,
    Store,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)


def pruned(p: TileProgram, body: tuple[Stmt, ...], name: str, more: tuple[Param, ...] = ()) -> TileProgram:
    """`p` with other statements under another name; `more` are parameters that it may use beside its own. What is
    said of a tensor, an extent or a scalar goes with it."""
    used = [x for s in statements(body) for e in expressions(s) for x in subexpressions(e)]
    tensors = {x.tensor for x in used if isinstance(x, Load)}
    tensors |= {s.tensor for s in statements(body) if isinstance(s, Store)}
    ranked = find(p.attributes, Ranked)
    if ranked is not None and ranked.tensor in {x.name for x in more}:
        tensors.add(ranked.tensor)
    params = tuple({x.name: x for x in (*p.params, *more) if x.name in tensors}.values())
    axes = {x.axis for x in used if isinstance(x, AxisIndex)}
    axes |= {a for s in statements(body) if isinstance(s, Let) for a in s.type.axes}
    whole = tuple(w for w in p.whole if w.name in axes)
    shapes = [e for x in params for e in x.shape] + [w.extent for w in whole]
    used += [x for e in shapes for x in subexpressions(e)]
    extents = {x.name for x in used if isinstance(x, tile.ExtentRef)}
    scalars = {x.name for x in used if isinstance(x, tile.ScalarRef)}
    known = tensors | extents | scalars
    return replace(
        p,
        name=name,
        params=params,
        scalars=tuple(s for s in p.scalars if s.name in scalars),
        extents=tuple(e for e in p.extents if e in extents),
        statics=tuple((e, n) for e, n in p.statics if e in extents),
        whole=whole,
        attributes=tuple(a for a in p.attributes if _speaks_of(a) <= known),
        body=body,
    )


def _speaks_of(a: Attribute) -> set[str]:
    """The tensor, extent or scalar without which an attribute says nothing."""
    match meaning(a):
        case Ranked(tensor=name) | Alignment(tensor=name) | Positive(scalar=name):
            return {name}
        case Divisible(extent=name) if name.isidentifier():
            return {name}
    return set()
