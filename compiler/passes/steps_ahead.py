"""steps-ahead: which tiles of a loop are visited, and how many, found by a small launch before the kernel (tier `wgmma`).

Where what tensors hold decides whether a step is taken (`lower.visited`), a loop over all tiles asks at each. A launch that
has the ranges of all tiles (`ranges_ahead`) finds the first and the last that is visited, for each task, so the loop runs
between these. It counts the steps as well, and another one ranks tasks by that, so that the longest come first:

    for n in N by 128 to n_end { visits = …        becomes     for n in N by 128 from first[tile] * 128 to min(n_end, end[tile] * 128)

    for m in M by 128 parallel {                   the launch before
        for j in (N + 127) // 128 by 128 to (n_end + 127) // 128 carry (first, end, steps) {
            yield min(first, min[j](where(visits, j, …))), max(end, max[j](where(visits, j + 1, 0))), steps + sum[j](where(visits, 1, 0))
        }
        store first[tile] = first, …
    }

    for m_tile in (M + 127) // 128 parallel {      and the one after it
        store by_length[rank] = m_tile             rank: how many tiles have more steps, or as many and come before
    }
"""

from __future__ import annotations

from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Dot,
    Expr,
    Fill,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    TileType,
    apply,
    i64,
    is_visit,
    operands,
    rebuild,
    statements,
    subexpressions,
)
from .pruned import pruned

I32 = TileType(DType.I32)


@dataclass(frozen=True)
class Visits:
    """Loops in a row whose steps are taken where `condition` holds, in terms of `tile`, the index of a tile of their axis;
    `lets` are what it and the loops' bounds need of the scalars of a task."""

    loops: tuple[For, ...]
    condition: Expr
    tile: LoopAxis
    lets: tuple[Let, ...]
    axes: tuple[LoopAxis, ...]


@dataclass(frozen=True)
class StepsAhead:
    """A program whose loops run between the tiles that are visited, the launches that find them, the tensors between."""

    program: TileProgram
    launches: tuple[TileProgram, ...]
    between: tuple[Param, ...]
    found: frozenset[str]
    """Tensors of ranges that these launches find."""
    axis: str
    ranked: bool

    def told(self) -> str:
        sorts = ", and which tasks have most, which come first" if self.ranked else ""
        return f"a launch before finds the first and the last tile of {self.axis} that each task visits{sorts}"


def steps_ahead(program: TileProgram, found: dict[str, Expr], between: tuple[Param, ...]) -> StepsAhead | None:
    """None where no launch can find a program's steps. `found`: names that read ranges of a task's tile, with what they stand
    for, which the launch finds itself and stores; `between`: tensors of such ranges."""
    visits = _visits(program)
    if visits is None:
        return None
    axis = visits.loops[0].axis
    taken = {p.name for p in (*program.params, *between)} | {s.name for s in program.scalars}
    units = tuple(a for a in visits.axes if a.tile is None)
    tiled = [a for a in visits.axes if a.tile is not None]
    shape = (*(u.extent for u in units), *(_tiles(a) for a in tiled))
    tensors = {
        what: Param(_fresh(f"{program.name}_{what}", taken), DType.I32, shape, "out")
        for what in ("first", "end", "steps", "by_length")
    }
    launches = [_finding(program, visits, tensors, found, between)]
    own = [*(tensors[x] for x in ("first", "end"))]
    if _ranked(program, visits):
        launches.append(_ranking(program, units, tiled[0], tensors))
        own.append(tensors["by_length"])
    place = _place(visits.axes)
    taken |= {s.name for s in statements(program.body) if isinstance(s, Let)}
    read = {
        x: Let(
            _fresh(f"{axis.name}_visited_{x}", taken), TileType(DType.I64),
            apply("mul", Cast(DType.I64, Load(tensors[x].name, place)), i64(axis.tile or 1)),
        )
        for x in ("first", "end")
    }  # fmt: skip
    body = tuple(_between(s, visits, read) for s in program.body)
    readers = tuple(replace(p, mode="in") for p in own)
    made = replace(program, body=body, params=(*program.params, *readers))
    if len(own) > 2:
        ranked = Attribute("ranked", (("tensor", tensors["by_length"].name), ("units", " ".join(u.name for u in units))))
        made = replace(made, attributes=(*made.attributes, ranked))
    wanted = (*own, tensors["steps"]) if len(own) > 2 else tuple(own)
    written = frozenset(p.name for p in launches[0].params if p.mode == "out") & {p.name for p in between}
    return StepsAhead(made, tuple(launches), wanted, written, axis.name, len(own) > 2)


def _fresh(wanted: str, taken: set[str]) -> str:
    n, name = 1, wanted
    while name in taken:
        n, name = n + 1, f"{wanted}_{n + 1}"
    taken.add(name)
    return name


def _tiles(a: LoopAxis) -> Expr:
    return apply("floordiv", apply("add", a.extent, i64((a.tile or 1) - 1)), i64(a.tile or 1))


def _place(axes: tuple[LoopAxis, ...]) -> tuple[Expr, ...]:
    """Where the tensors have what belongs to a task."""
    tiles = [apply("floordiv", Reduce("min", (a.name,), AxisIndex(a.name)), i64(a.tile)) for a in axes if a.tile]
    return (*(AxisIndex(a.name) for a in axes if a.tile is None), *tiles)


# ---------------------------------------------------------------- what can be found


def _visits(program: TileProgram) -> Visits | None:
    grids = [s for s in program.body if isinstance(s, Grid)]
    if len(grids) != 1 or any(a.lo is not None or a.hi is not None for a in grids[0].axes):
        return None
    (grid,) = grids
    loops = tuple(s for s in grid.body if isinstance(s, For))
    scalars = {s.name: s for s in grid.body if isinstance(s, Let) and not s.type.axes}
    if not loops or len({(s.axis.name, s.axis.tile) for s in loops}) > 1 or loops[0].axis.tile is None:
        return None
    taken = {a.name for a in grid.axes} | {s.axis.name for s in statements(grid.body) if isinstance(s, For)}
    tile = LoopAxis(_fresh(f"{loops[0].axis.name}_tile", taken), _tiles(loops[0].axis), loops[0].axis.tile)
    conditions = {_condition(s, tile) for s in loops}
    (condition,) = conditions if len(conditions) == 1 else (None,)
    if condition is None:
        return None
    bounds = [x for x in (loops[0].axis.lo, loops[-1].axis.hi) if x is not None]
    lets = _needed([condition, *bounds], scalars)
    if lets is None:
        return None
    named = {x.axis for e in (condition, *bounds, *(s.value for s in lets)) for x in subexpressions(e) if isinstance(x, AxisIndex)}
    axes = tuple(a for a in grid.axes if a.name in named)
    known = {a.name for a in axes} | {tile.name}
    if not axes or len([a for a in axes if a.tile]) > 1 or not named <= known:
        return None
    return Visits(loops, condition, tile, lets, axes)


def _condition(s: For, tile: LoopAxis) -> Expr | None:
    """Whether a loop's step is taken, by the index of its tile; None where its steps are not conditional, or by other things."""
    *before, last = s.body or (None,)
    if not isinstance(last, For) or not is_visit(last.axis) or s.axis.tile is None or last.axis.hi is None:
        return None
    inner = {x.name: x.value for x in before if isinstance(x, Let) and not x.type.axes}
    index = apply("floordiv", Reduce("min", (s.axis.name,), AxisIndex(s.axis.name)), i64(s.axis.tile))

    def of_tile(e: Expr) -> Expr:
        if e == index:
            return AxisIndex(tile.name)
        if isinstance(e, Name) and e.name in inner:
            return of_tile(inner[e.name])
        return rebuild(e, tuple(of_tile(x) for x in operands(e)))

    found = of_tile(last.axis.hi)
    if any(isinstance(x, AxisIndex) and x.axis == s.axis.name for x in subexpressions(found)):
        return None
    match found:
        case Cast(dtype=DType.I64, arg=test):
            return test
    return apply("lt", i64(0), found)


def _needed(roots: list[Expr], scalars: dict[str, Let]) -> tuple[Let, ...] | None:
    """The scalars that expressions need, in their order; None where they need more than scalars."""
    wanted, left = set[str](), list(roots)
    while left:
        for x in subexpressions(left.pop()):
            if isinstance(x, Dot | Fill) or (isinstance(x, Name) and x.name not in scalars):
                return None
            if isinstance(x, Name) and x.name not in wanted:
                wanted.add(x.name)
                left.append(scalars[x.name].value)
    return tuple(s for n, s in scalars.items() if n in wanted)


def _ranked(program: TileProgram, v: Visits) -> bool:
    """Is the one tiled axis of a task the last of the grid's axes, whose tiles tasks are sorted by?"""
    (grid,) = (s for s in program.body if isinstance(s, Grid))
    *others, last = grid.axes
    return last.tile is not None and last in v.axes and all(a.tile is None for a in others)


# ---------------------------------------------------------------- the launches


def _finding(
    program: TileProgram, v: Visits, tensors: dict[str, Param], found: dict[str, Expr], between: tuple[Param, ...]
) -> TileProgram:
    tile, size = v.tile, v.loops[0].axis.tile or 1
    lo, hi = v.loops[0].axis.lo, v.loops[-1].axis.hi
    index, one = Cast(DType.I32, AxisIndex(tile.name)), Const(1, DType.I32)
    nothing, far = Const(0, DType.I32), Cast(DType.I32, tile.extent)
    axis = replace(
        tile,
        lo=None if lo is None else apply("floordiv", apply("max", lo, i64(0)), i64(size)),
        hi=None if hi is None else apply("floordiv", apply("add", hi, i64(size - 1)), i64(size)),
    )
    over = (tile.name,)
    visited = Name("visited")
    seen = Let(visited.name, TileType(DType.BOOL, over), v.condition)

    def where(then: Expr, otherwise: Expr) -> Expr:
        return apply("where", visited, then, otherwise)

    yields = {
        "first": apply("min", Name("first"), Reduce("min", over, where(index, far))),
        "end": apply("max", Name("end"), Reduce("max", over, where(apply("add", index, one), nothing))),
        "steps": apply("add", Name("steps"), Reduce("sum", over, where(one, nothing))),
    }
    starts = {"first": far, "end": nothing, "steps": nothing}
    wanted = [x for x in yields if x != "steps" or _ranked(program, v)]
    loop = For(axis, tuple(Carry(x, I32, starts[x]) for x in wanted), (seen,), tuple(yields[x] for x in wanted))
    lets = tuple(replace(s, value=found.get(s.name, s.value)) for s in v.lets)
    own = [(s.value, Name(s.name)) for s in v.lets if s.name in found]
    targets = [(e.tensor, e.subscripts, name) for e, name in own if isinstance(e, Load)]
    targets += [(tensors[x].name, _place(v.axes), Name(x)) for x in wanted]
    where = dict.fromkeys(x for _, subscripts, _ in targets for x in subscripts if not isinstance(x, AxisIndex))
    places = [Let(f"place_{i}", TileType(DType.I64), x) for i, x in enumerate(where)]
    known = {x: Name(s.name) for x, s in zip(where, places, strict=True)}
    stores = [Store(t, tuple(known.get(x, x) for x in subscripts), name) for t, subscripts, name in targets]
    body = (Grid(v.axes, (*places, *lets, loop, *stores)),)
    written = {s.tensor for s in stores}
    params = tuple(replace(p, mode="out" if p.name in written else "in") for p in (*between, *tensors.values()))
    base = replace(program, params=tuple(p for p in program.params if p.name not in {x.name for x in between}))
    made = pruned(base, body, f"{program.name}_steps", params)
    return replace(made, tier="loops", attributes=())


def _ranking(
    program: TileProgram, units: tuple[LoopAxis, ...], tiled: LoopAxis, tensors: dict[str, Param]
) -> TileProgram:
    """One task for each tile: its rank among all."""
    mine, other = LoopAxis(f"{tiled.name}_tile", _tiles(tiled)), LoopAxis(f"{tiled.name}_other", _tiles(tiled), 128)
    unit = tuple(AxisIndex(u.name) for u in units)
    steps = tensors["steps"].name
    own, theirs = Name("own"), Load(steps, (*unit, AxisIndex(other.name)))
    before = apply("and", apply("le", own, theirs), apply("lt", AxisIndex(other.name), AxisIndex(mine.name)))
    longer = apply("or", apply("lt", own, theirs), before)
    count = Reduce("sum", (other.name,), apply("where", longer, Const(1, DType.I32), Const(0, DType.I32)))
    body: tuple[Stmt, ...] = (
        Let(own.name, I32, Load(steps, (*unit, AxisIndex(mine.name)))),
        For(other, (Carry("rank", I32, Const(0, DType.I32)),), (), (apply("add", Name("rank"), count),)),
        Store(tensors["by_length"].name, (*unit, Cast(DType.I64, Name("rank"))), Cast(DType.I32, AxisIndex(mine.name))),
    )
    params = (replace(tensors["steps"], mode="in"), tensors["by_length"])
    made = pruned(replace(program, params=()), (Grid((*units, mine), body),), f"{program.name}_ranks", params)
    return replace(made, tier="loops", attributes=())


def _between(s: Stmt, v: Visits, read: dict[str, Let]) -> Stmt:
    """The program's loops from the first tile that is visited to the last."""
    if not isinstance(s, Grid):
        return s
    first = next(i for i, x in enumerate(s.body) if x is v.loops[0])
    body: list[Stmt] = [*s.body[:first], *read.values(), *s.body[first:]]
    for i, x in enumerate(body):
        if isinstance(x, For):
            a = x.axis
            lo, hi = Name(read["first"].name), Name(read["end"].name)
            made = replace(
                a,
                lo=lo if a.lo is None else apply("max", a.lo, lo),
                hi=apply("min", a.extent if a.hi is None else a.hi, hi),
            )
            body[i] = replace(x, axis=made)
    return replace(s, body=tuple(body))
