"""A program of some of another's statements, with the parameters, extents and scalars that they use."""

from __future__ import annotations

from dataclasses import replace

from .. import tile_ir as tile
from ..layouts import Ranked, find
from ..tile_ir import (
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
    """`p` with other statements under another name; `more` are parameters that it may use beside its own. An order of tasks
    that a tensor gives goes with that tensor."""
    used = [x for s in statements(body) for e in expressions(s) for x in subexpressions(e)]
    tensors = {x.tensor for x in used if isinstance(x, Load)}
    tensors |= {s.tensor for s in statements(body) if isinstance(s, Store)}
    ranked = find(p.attributes, Ranked)
    if ranked is not None and ranked.tensor in {x.name for x in more}:
        tensors.add(ranked.tensor)
    params = tuple({x.name: x for x in (*p.params, *more) if x.name in tensors}.values())
    attributes = tuple(
        a for a in p.attributes if a.name != Ranked.name or (ranked and ranked.tensor in tensors)
    )
    axes = {x.axis for x in used if isinstance(x, AxisIndex)}
    axes |= {a for s in statements(body) if isinstance(s, Let) for a in s.type.axes}
    whole = tuple(w for w in p.whole if w.name in axes)
    shapes = [e for x in params for e in x.shape] + [w.extent for w in whole]
    used += [x for e in shapes for x in subexpressions(e)]
    extents = {x.name for x in used if isinstance(x, tile.ExtentRef)}
    scalars = {x.name for x in used if isinstance(x, tile.ScalarRef)}
    return replace(
        p,
        name=name,
        params=params,
        scalars=tuple(s for s in p.scalars if s.name in scalars),
        extents=tuple(e for e in p.extents if e in extents),
        statics=tuple((e, n) for e, n in p.statics if e in extents),
        whole=whole,
        attributes=attributes,
        body=body,
    )
