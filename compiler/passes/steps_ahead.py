"""steps-ahead: which tiles of a loop are visited, and how many, found by a small launch before the kernel (tier `wgmma`).

Where what tensors hold decides whether a step is taken (`lower.visited`), a loop over all tiles asks at each. A launch that
has the ranges of all tiles (`ranges_ahead`) finds the first and the last that is visited, for each task, so the loop runs
between these. It counts the steps as well, and another one ranks tasks by that, so that the longest come first:

    for n in N by 128 to n_end {                   becomes     for n in N by 128 from first[tile] * 128
        visits = …                                                                to min(n_end, end[tile] * 128) {

    for m in M by 128 parallel {                   the launch before
        for j in (N + 127) // 128 by 128 to (n_end + 127) // 128 carry (first, end, steps) {
            yield min(first, min[j](where(visits, j, …))),
                max(end, max[j](where(visits, j + 1, 0))),
                steps + sum[j](where(visits, 1, 0))
        }
        store first[tile] = first, …
    }

    for m_tile in (M + 127) // 128 parallel {      and the one after it
        store by_length[rank] = m_tile             rank: how many tiles have more steps, or as many and come before
    }

Where a step of the loop reads the ranges of the task's own tile, the first of these launches finds them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Tasks, find
from ..tile_ir import (
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
        return (
            f"a launch before finds the first and the last tile of {self.axis} that each task visits{sorts}"
        )


def steps_ahead(
    program: TileProgram, found: Mapping[str, Expr], between: tuple[Param, ...]
) -> StepsAhead | None:
    """None where no launch can find a program's steps. `found`: names that read ranges of a task's tile, with what these
    stand for, which the launch finds itself and stores; `between`: tensors of such ranges."""
    visits = _visits(program)
    if visits is None:
        return None
    axis = visits.loops[0].axis
    taken = {p.name for p in (*program.params, *between)} | {s.name for s in program.scalars}
    taken |= set(program.extents)
    units = tuple(a for a in visits.axes if a.tile is None)
    tiled = [a for a in visits.axes if a.tile is not None]
    shape = (*(u.extent for u in units), *(tile_count(a) for a in tiled))
    tensors = {
        what: Param(unused(f"{program.name}_{what}", taken), DType.I32, shape, "out")
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
            unused(f"{axis.name}_visited_{x}", taken), TileType(DType.I64),
            apply("mul", Cast(DType.I64, Load(tensors[x].name, place)), i64(axis.tile or 1)),
        )
        for x in ("first", "end")
    }  # fmt: skip
    body = tuple(_between(s, visits, read) for s in program.body)
    readers = tuple(replace(p, mode="in") for p in own)
    made = replace(program, body=body, params=(*program.params, *readers))
    if len(own) > 2:
        ranked = Attribute(
            "ranked", (("tensor", tensors["by_length"].name), ("units", " ".join(u.name for u in units)))
        )
        made = replace(made, attributes=(*made.attributes, ranked))
    wanted = (*own, tensors["steps"]) if len(own) > 2 else tuple(own)
    written = frozenset(p.name for p in launches[0].params if p.mode == "out") & {p.name for p in between}
    return StepsAhead(made, tuple(launches), wanted, written, axis.name, len(own) > 2)


def unused(wanted: str, taken: set[str]) -> str:
    """A name like `wanted`, which is then taken."""
    n, name = 1, wanted
    while name in taken:
        n, name = n + 1, f"{wanted}_{n + 1}"
    taken.add(name)
    return name


def tile_count(a: LoopAxis) -> Expr:
    """How many tiles an axis has."""
    return apply("floordiv", apply("add", a.extent, i64((a.tile or 1) - 1)), i64(a.tile or 1))


def _place(axes: tuple[LoopAxis, ...]) -> tuple[Expr, ...]:
    """Where the tensors have what belongs to a task."""
    tiles = [
        apply("floordiv", Reduce("min", (a.name,), AxisIndex(a.name)), i64(a.tile)) for a in axes if a.tile
    ]
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
    taken = {a.name for a in grid.axes} | set(program.extents) | {s.name for s in program.scalars}
    for s in statements(grid.body):
        taken |= {s.name} if isinstance(s, Let) else {s.axis.name} if isinstance(s, For) else set()
    tile = LoopAxis(
        unused(f"{loops[0].axis.name}_tile", taken), tile_count(loops[0].axis), loops[0].axis.tile
    )
    conditions = {_condition(s, tile) for s in loops}
    (condition,) = conditions if len(conditions) == 1 else (None,)
    if condition is None:
        return None
    bounds = [x for x in (loops[0].axis.lo, loops[-1].axis.hi) if x is not None]
    lets = _needed([condition, *bounds], scalars)
    if lets is None:
        return None
    named = {
        x.axis
        for e in (condition, *bounds, *(s.value for s in lets))
        for x in subexpressions(e)
        if isinstance(x, AxisIndex)
    }
    axes = tuple(a for a in grid.axes if a.name in named)
    known = {a.name for a in axes} | {tile.name}
    if not axes or len([a for a in axes if a.tile]) > 1 or not named <= known:
        return None
    return Visits(loops, condition, tile, lets, axes)


def _condition(s: For, tile: LoopAxis) -> Expr | None:
    """Whether a loop's step is taken, by the index of its tile; None where all are, or other things decide as well."""
    *before, last = s.body or (None,)
    if (
        not isinstance(last, For)
        or not is_visit(last.axis)
        or s.axis.tile is None
        or not isinstance(last.axis.hi, Name)
    ):
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
    stated = find(program.attributes, Tasks)
    if stated is not None and stated.order == "turns":
        return False
    return last.tile is not None and last in v.axes and all(a.tile is None for a in others)


# ---------------------------------------------------------------- the launches


def _finding(
    program: TileProgram,
    v: Visits,
    tensors: dict[str, Param],
    found: Mapping[str, Expr],
    between: tuple[Param, ...],
) -> TileProgram:
    """One task for each of the program's: what it reads of its own tile, then once over all tiles of the loops' axis."""
    taken = {s.name for s in v.lets} | {a.name for a in (*v.axes, v.tile)} | set(program.extents)
    taken |= {s.name for s in program.scalars}
    lets = [replace(s, value=found.get(s.name, s.value)) for s in v.lets]
    targets = [(s.value, s.name) for s in v.lets if s.name in found]
    index, one, nothing = Cast(DType.I32, AxisIndex(v.tile.name)), Const(1, DType.I32), Const(0, DType.I32)
    over, visited, far = (v.tile.name,), Name(unused("visited", taken)), Cast(DType.I32, v.tile.extent)
    body = [Let(visited.name, TileType(DType.BOOL, over), v.condition)]
    states: list[tuple[str, str, Expr, Expr]] = [
        ("first", "min", far, apply("where", visited, index, far)),
        ("end", "max", nothing, apply("where", visited, apply("add", index, one), nothing)),
    ]
    if _ranked(program, v):
        tests = [apply("le", low, AxisIndex(v.tile.name)) for low in _edge(v, v.loops[0].axis.lo, 0)]
        tests += [apply("lt", AxisIndex(v.tile.name), high) for high in _edge(v, v.loops[-1].axis.hi, -1)]
        counted: Expr = visited
        for t in tests:
            counted = apply("and", counted, t)
        states.append(("steps", "sum", nothing, apply("where", counted, one, nothing)))
    names = {what: unused(what, taken) for what, *_ in states}
    loop = For(
        v.tile,
        tuple(Carry(names[what], I32, start) for what, _, start, _ in states),
        tuple(body),
        tuple(apply(COMBINE[fn], Name(names[what]), Reduce(fn, over, each)) for what, fn, _, each in states),
    )
    place = _place(v.axes)
    stored = [(e.tensor, e.subscripts, name) for e, name in targets if isinstance(e, Load)]
    stored += [(tensors[what].name, place, name) for what, name in names.items()]
    tiles = dict.fromkeys(x for _, where, _ in stored for x in where if not isinstance(x, AxisIndex))
    places = {x: Let(unused("tile", taken), TileType(DType.I64), x) for x in tiles}
    stores = [
        Store(tensor, tuple(Name(places[x].name) if x in places else x for x in where), Name(name))
        for tensor, where, name in stored
    ]
    written = {s.tensor for s in stores}
    params = tuple(
        replace(p, mode="out" if p.name in written else "in") for p in (*between, *tensors.values())
    )
    ranges = {p.name for p in between}
    base = replace(program, params=tuple(p for p in program.params if p.name not in ranges))
    grid = Grid(v.axes, (*places.values(), *lets, loop, *stores))
    return replace(pruned(base, (grid,), f"{program.name}_steps", params), tier="loops", attributes=())


COMBINE = {"min": "min", "max": "max", "sum": "add"}


def _edge(v: Visits, bound: Expr | None, rounds: int) -> list[Expr]:
    """The tile that a loop starts in, or (`rounds`: -1) before which it ends."""
    if bound is None:
        return []
    size = v.loops[0].axis.tile or 1
    tiled = {a.name for a in v.axes if a.tile}

    def first(e: Expr) -> Expr:
        """In a bound an axis stands for the first index of its tile."""
        if isinstance(e, AxisIndex) and e.axis in tiled:
            return Reduce("min", (e.axis,), e)
        return e if isinstance(e, Reduce) else rebuild(e, tuple(map(first, operands(e))))

    up = i64(size - 1) if rounds else i64(0)
    return [apply("floordiv", apply("add", first(bound), up), i64(size))]


def _ranking(
    program: TileProgram, units: tuple[LoopAxis, ...], tiled: LoopAxis, tensors: dict[str, Param]
) -> TileProgram:
    """One task for each tile: its rank among all."""
    taken = {u.name for u in units} | set(program.extents)
    mine = LoopAxis(unused(f"{tiled.name}_tile", taken), tile_count(tiled))
    other = LoopAxis(unused(f"{tiled.name}_other", taken), tile_count(tiled), 128)
    unit = tuple(AxisIndex(u.name) for u in units)
    steps = tensors["steps"].name
    own, rank = Name(unused("own", taken)), Name(unused("rank", taken))
    theirs = Load(steps, (*unit, AxisIndex(other.name)))
    before = apply("and", apply("le", own, theirs), apply("lt", AxisIndex(other.name), AxisIndex(mine.name)))
    longer = apply("or", apply("lt", own, theirs), before)
    count = Reduce("sum", (other.name,), apply("where", longer, Const(1, DType.I32), Const(0, DType.I32)))
    body: tuple[Stmt, ...] = (
        Let(own.name, I32, Load(steps, (*unit, AxisIndex(mine.name)))),
        For(other, (Carry(rank.name, I32, Const(0, DType.I32)),), (), (apply("add", rank, count),)),
        Store(
            tensors["by_length"].name,
            (*unit, Cast(DType.I64, rank)),
            Cast(DType.I32, AxisIndex(mine.name)),
        ),
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
