"""split: a reduction whose grid has too few tasks for a GPU, or for a CPU's threads, is divided (DESIGN 4.3, 4.6).

    for m in M carry (s = 0) { … yield s + sum[n](…) }        becomes two programs:
    for part in P { for m in M from first to end carry … ; store parts[part] = s }
    for part in P carry (s = 0) { yield s + sum[part](load parts[part]) } ; what stood after the loop

The parts' states meet by the repair that the cascade itself has (`cascade.merge`): an attention's parts as well as a sum's.
Each part is visited by one block (of a CPU: as one task) and parts are merged in one order, so the same call gives the same
bits, on however many threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from .. import tensor_ir as t
from .. import tile_ir as tile
from ..cascade import COMBINE, Cascade, identity
from ..codegen.tile_types import static_value
from ..cost import estimate, predict, rates
from ..layouts import Ranked, find_all
from ..product_tiles import LEAST_PRODUCT_TILES, MOST_PARTS
from ..product_time import Product, parts_of
from ..remarks import Remarks
from ..schedule import stem
from ..target import CPU, CudaTarget, Target
from ..tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Cast,
    Const,
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
    expressions,
    i64,
    statements,
    subexpressions,
)
from .pruned import pruned

PRODUCT_BLOCKS = 2  # blocks a multiprocessor that products of tiles want
OTHER_BLOCKS = 8
LEAST_ELEMENTS = 1 << 15  # elements that a part of another reduction reads at least
THREAD_TASKS = 16  # tasks that a reduction on a CPU is divided into, all in all
LEAST_PART_S = 2.5e-4  # predicted seconds of such a task, at the rate of the nominal machine
ENOUGH_TASKS = 4  # from which on a CPU's reduction is left whole
THIN = 8  # rows or columns of a product that is not worth copying its operands for
LEAST_TILE = 4  # an axis of the merge is not cut smaller
LARGE_STATE = 1024  # elements of a state from which its tile alone keeps a block busy


@dataclass(frozen=True)
class _Chain:
    """The one reduction of a program: what stands before its loops, the loops with what is between, what follows."""

    outside: tuple[Stmt, ...]
    grid: tuple[LoopAxis, ...]
    before: tuple[Stmt, ...]
    loops: tuple[Stmt, ...]
    after: tuple[Stmt, ...]

    @property
    def visits(self) -> list[For]:
        return [s for s in self.loops if isinstance(s, For)]

    @property
    def states(self) -> tuple[Carry, ...]:
        return self.visits[-1].carries


def split(
    program: TileProgram,
    cascades: Sequence[Cascade],
    sizes: Mapping[str, int],
    target: Target,
    remarks: Remarks,
    stated: Mapping[str, int],
) -> tuple[tuple[TileProgram, ...], tuple[Param, ...]]:
    """The programs that take its place, and the tensors between them; the program alone where splitting does not pay, or as
    `stated` says: the number of parts by axis. A key of `stated` that speaks of it is met; the caller checks the others."""
    chain = _chain(program)
    cascade = next((c for c in cascades if chain and c.carries == tuple(s.name for s in chain.states)), None)
    if chain is None or cascade is None or not _mergeable(cascade):
        return (program,), ()
    asked = next((a for a in _nest(chain) if stem(a.name) in stated), None)
    axis = asked or _longest(chain, sizes)
    if asked:
        parts = stated[stem(axis.name)]
    elif isinstance(target, CudaTarget):
        parts = _parts(program, chain, axis, sizes, target)
    else:
        parts = _parts_on_threads(program, chain, axis, sizes)
    if parts < 2:
        return (program,), ()
    remarks.add(
        "applied", "split", "reduction-over-blocks",
        f"{program.name}: {axis.name} is divided over {parts} {'blocks' if target.is_cuda else 'tasks'} for each of "
        f"{_tasks(chain, sizes)}; a second launch merges their states",
        chain.visits[0].span,
    )  # fmt: skip
    programs, scratch = split_into(program, cascade, axis.name, parts)
    overlaps = isinstance(target, CudaTarget) and target.has_dependent_launch
    return (overlapped(programs) if overlaps else programs), scratch


def overlapped(programs: tuple[TileProgram, ...]) -> tuple[TileProgram, ...]:
    """The two programs of a split, whose second launch starts while the first one runs, and waits for its end."""
    marks = (Attribute("primary"), Attribute("secondary"))
    return tuple(
        replace(p, attributes=(*p.attributes, mark)) for p, mark in zip(programs, marks, strict=True)
    )


def splittable(program: TileProgram, cascades: Sequence[Cascade]) -> set[str]:
    """The axes whose loop can be divided over blocks, by their names in the text."""
    chain = _chain(program)
    found = next((c for c in cascades if chain and c.carries == tuple(s.name for s in chain.states)), None)
    return {stem(a.name) for a in _nest(chain)} if chain and found and _mergeable(found) else set()


def split_into(
    program: TileProgram, cascade: Cascade, axis: str, parts: int
) -> tuple[tuple[TileProgram, ...], tuple[Param, ...]]:
    """The program with its reduction's loop over `axis` in so many parts."""
    chain = _chain(program)
    assert chain is not None
    work = _Splitting(program, chain, cascade, axis, parts)
    return (work.visiting(), work.merging()), work.scratch


# ---------------------------------------------------------------- what can be split, and into how many parts


def _chain(program: TileProgram) -> _Chain | None:
    """The parts of a program that is one reduction and what is done with it; None for any other."""
    grids = [s for s in program.body if isinstance(s, Grid)]
    if len(grids) > 1 or (grids and program.body[-1] is not grids[0]):
        return None
    outside = program.body[:-1] if grids else ()
    grid, body = (grids[0].axes, grids[0].body) if grids else ((), program.body)
    places = [i for i, s in enumerate(body) if isinstance(s, For)]
    if not places or not all(isinstance(body[i], For) and body[i].carries for i in places):  # type: ignore[union-attr]
        return None
    chain = _Chain(outside, grid, body[: places[0]], body[places[0] : places[-1] + 1], body[places[-1] + 1 :])
    plain = not any(isinstance(s, Store) for s in statements((*outside, *chain.before, *chain.loops)))
    one = len({s.axis.name for s in chain.visits}) == 1
    linked = all(
        tuple(c.init for c in b.carries) == tuple(Name(c.name) for c in a.carries)
        for a, b in zip(chain.visits, chain.visits[1:], strict=False)
    )
    starts = all(isinstance(c.init, Fill | Const) for c in chain.visits[0].carries)
    # the merge's tiles have all axes of the grid's: a state that is the same along one of them would not fit there
    varies = all(a.name in c.type.axes for a in grid if a.tile for c in chain.states)
    forward = not any(s.reverse for s in chain.visits)
    return chain if plain and one and linked and starts and varies and forward else None


def _mergeable(c: Cascade) -> bool:
    """Have all states a merge, made of arithmetic alone?"""
    plain = (t.Const, t.Scalar, t.Extent, t.Apply, t.Cast, t.Carried)
    return all(
        s.reduction.fn in COMBINE
        and (s.moved is None or all(isinstance(n, plain) for n in t.walk([s.moved])))
        for s in c.states
    )


def _nest(chain: _Chain) -> list[LoopAxis]:
    """The axes of the loops, outermost first; only the first where its loops are several or hold more than one."""
    axes, body = [chain.visits[0].axis], chain.visits[0].body
    while len(chain.visits) == 1:
        inner = [s for s in body if isinstance(s, For)]
        if len(inner) != 1 or not inner[0].carries:
            break
        axes.append(inner[0].axis)
        body = inner[0].body
    return axes


def _longest(chain: _Chain, sizes: Mapping[str, int]) -> LoopAxis:
    return max(_nest(chain), key=lambda a: _tiles(a, sizes))


def _tiles(a: LoopAxis, sizes: Mapping[str, int]) -> int:
    """Tiles of an axis at these sizes; 1 where its extent is not known before the call."""
    return -(-(static_value(a.extent, dict(sizes)) or 1) // (a.tile or 1))


def _tasks(chain: _Chain, sizes: Mapping[str, int]) -> int:
    return math.prod(_tiles(a, sizes) for a in chain.grid)


def _parts(
    program: TileProgram, chain: _Chain, axis: LoopAxis, sizes: Mapping[str, int], target: CudaTarget
) -> int:
    """A power of two: enough blocks for the multiprocessors, none with too little to do; for sums of products by warpgroups,
    what is predicted to take the least time."""
    if program.tier == "wgmma" and len(chain.visits) == 1 and (product := _product(chain, sizes)) is not None:
        row, column = (a.tile or 1 for a in chain.grid if a.tile)
        return parts_of(product, row, column, _tiles(axis, sizes) // LEAST_PRODUCT_TILES, target)
    every = (x for s in statements(chain.loops) for e in expressions(s) for x in subexpressions(e))
    products = any(isinstance(x, tile.Dot) for x in every)
    each = (1 if program.tier == "wgmma" else PRODUCT_BLOCKS) if products else OTHER_BLOCKS
    wanted = (target.sms or 1) * each
    tiles = _tiles(axis, sizes)
    if products:
        if 2 * _tasks(chain, sizes) > (
            target.sms or 1
        ):  # half of the device is busy: parts would only read more
            return 1
        most = tiles // LEAST_PRODUCT_TILES
    else:
        lines = math.prod(a.tile or 1 for a in chain.grid)
        elements = lines * math.prod(static_value(a.extent, dict(sizes)) or 1 for a in _nest(chain))
        most = min(tiles, elements // LEAST_ELEMENTS)
    found = min(wanted // _tasks(chain, sizes), most, MOST_PARTS)
    return 1 << (found.bit_length() - 1) if found > 1 else 1


def _parts_on_threads(program: TileProgram, chain: _Chain, axis: LoopAxis, sizes: Mapping[str, int]) -> int:
    """A power of two: enough tasks for a CPU's threads, whose number is not asked for, since it must not change results;
    none predicted to take less than handing it over is worth."""
    if _tasks(chain, sizes) >= ENOUGH_TASKS:
        return 1  # parts would take memory that the whole does not
    product = _product(chain, sizes) if len(chain.visits) == 1 else None
    if product is not None and min(product.rows, product.columns) > THIN:
        return 1  # copies of its operands are cut along all three axes already
    busy = replace(rates(CPU), units=1)  # as if the reduction's tasks were enough
    seconds = predict(estimate(program, sizes), busy).seconds
    found = min(THREAD_TASKS // _tasks(chain, sizes), _tiles(axis, sizes), int(seconds / LEAST_PART_S))
    return 1 << (found.bit_length() - 1) if found > 1 else 1


def _product(chain: _Chain, sizes: Mapping[str, int]) -> Product | None:
    """The sizes of a loop that only adds products of what it loads; None for any other."""
    (loop,) = chain.visits
    adds = [
        y
        for c, y in zip(loop.carries, loop.yields, strict=True)
        if isinstance(y, Apply) and y.op == "add" and Name(c.name) in y.args
        and any(isinstance(x, tile.Dot) for x in y.args)
    ]  # fmt: skip
    loads = all(isinstance(s, Let) and isinstance(s.value, Load) for s in loop.body)
    tiled = [a for a in chain.grid if a.tile]
    if len(adds) != len(loop.carries) or not loads or len(tiled) != 2:
        return None
    rows, columns = (static_value(a.extent, dict(sizes)) or 1 for a in tiled)
    others = math.prod(_tiles(a, sizes) for a in chain.grid if not a.tile)
    depth = static_value(loop.axis.extent, dict(sizes)) or 1
    return Product(rows, columns, depth, others, len(adds))


# ---------------------------------------------------------------- the two programs


class _Splitting:
    """Writes the two programs of one split."""

    def __init__(self, program: TileProgram, chain: _Chain, cascade: Cascade, axis: str, parts: int) -> None:
        self.program, self.chain, self.cascade, self.axis, self.parts = program, chain, cascade, axis, parts
        self.taken = _names(program)
        self.part = self.fresh("part")
        self.first, self.end = self.fresh(f"{axis}_first"), self.fresh(f"{axis}_end")
        self.whole = {w.name: w.extent for w in program.whole}
        grid = {a.name: a.extent for a in chain.grid}
        tiles = {a.name: a.tile or 1 for a in chain.grid}
        tiles |= {a: static_value(e, dict(program.statics)) or 1 for a, e in self.whole.items()}
        self.largest = max(math.prod(tiles[a] for a in c.type.axes) for c in chain.states)
        self.kept = {c.name: (*grid, *(a for a in c.type.axes if a in self.whole)) for c in chain.states}
        extents = {**grid, **self.whole}
        self.parts_of = {
            c.name: Param(
                self.fresh(f"{program.name}_{c.name}_parts"),
                c.type.dtype,
                (i64(parts), *(extents[a] for a in self.kept[c.name])),
                "out",
            )
            for c in chain.states
        }

    @property
    def scratch(self) -> tuple[Param, ...]:
        return tuple(self.parts_of.values())

    def fresh(self, wanted: str) -> str:
        name, n = wanted, 1
        while name in self.taken:
            n += 1
            name = f"{wanted}_{n}"
        self.taken.add(name)
        return name

    def visiting(self) -> TileProgram:
        """Each block one part of the loop: its states go to memory."""
        chain = self.chain
        stores = tuple(
            Store(
                self.parts_of[c.name].name,
                (AxisIndex(self.part), *(AxisIndex(a) for a in self.kept[c.name])),
                Name(c.name),
            )
            for c in chain.states
        )
        body = (*chain.before, *self.limits(), *(self.limited(s) for s in chain.loops), *stores)
        part = LoopAxis(self.part, i64(self.parts))
        whole = (*chain.outside, Grid((part, *chain.grid), body))
        ranks = {r.tensor for r in find_all(self.program.attributes, Ranked)}
        order = tuple(p for p in self.program.params if p.name in ranks)
        return pruned(self.program, whole, f"{self.program.name}_parts", (*self.scratch, *order))

    def limits(self) -> tuple[Let, Let]:
        """The indices of a part: whole tiles, as many for each as make them all."""
        axis = next(a for a in _nest(self.chain) if a.name == self.axis)
        size = axis.tile or 1
        step = self.parts * size
        count = apply("floordiv", apply("add", axis.extent, i64(step - 1)), i64(step))
        chunk = apply("mul", count, i64(size)) if size > 1 else count
        integer = TileType(DType.I64)
        return (
            Let(self.first, integer, apply("mul", AxisIndex(self.part), chunk)),
            Let(self.end, integer, apply("add", Name(self.first), chunk)),
        )

    def limited(self, s: Stmt) -> Stmt:
        """A loop over the axis within the part's indices."""
        if not isinstance(s, For):
            return s
        if s.axis.name != self.axis:
            return replace(s, body=tuple(self.limited(x) for x in s.body))
        lo, hi = Name(self.first), Name(self.end)
        axis = replace(
            s.axis,
            lo=lo if s.axis.lo is None else apply("max", s.axis.lo, lo),
            hi=apply("min", s.axis.extent if s.axis.hi is None else s.axis.hi, hi),
        )
        return replace(s, axis=axis)

    def merging(self) -> TileProgram:
        """The states of all parts, then what followed the loop."""
        chain = self.chain
        loop = self.merge_loop()
        after = chain.after
        before = _needed(chain.before, after)
        body: tuple[Stmt, ...] = (*before, loop, *after)
        outside = _needed(chain.outside, body)
        grid = self.merge_grid()
        whole = (*outside, Grid(grid, body)) if grid else (*outside, *body)
        between = tuple(replace(p, mode="in") for p in self.scratch)
        return pruned(self.program, whole, self.program.name, between)

    def merge_grid(self) -> tuple[LoopAxis, ...]:
        """Smaller tiles than the loop's: merging is elementwise, and more blocks move more."""
        axes = list(self.chain.grid)
        volume = self.largest
        for i, a in enumerate(axes):
            while volume > LARGE_STATE and (a.tile or 0) > LEAST_TILE:
                a = axes[i] = replace(a, tile=(a.tile or 0) // 2)
                volume //= 2
        return tuple(axes)

    def merge_loop(self) -> For:
        """One step for each part where a state is a large tile, else all parts as lanes of one tile."""
        lanes = self.largest < LARGE_STATE
        states = {s.name: c for s, c in zip(self.cascade.states, self.chain.states, strict=True)}
        body: list[Stmt] = []
        loaded: dict[str, Expr] = {}
        for name, c in states.items():
            read = Load(
                self.parts_of[c.name].name,
                (AxisIndex(self.part), *(AxisIndex(a) for a in self.kept[c.name])),
            )
            axes = ((self.part,) if lanes else ()) + tuple(a for a in self.kept[c.name] if a in c.type.axes)
            let = Let(self.fresh(f"{c.name}_part"), TileType(c.type.dtype, axes), read)
            body.append(let)
            loaded[name] = Name(let.name)
        old: dict[t.Node, Expr] = {s.old: Name(states[s.name].name) for s in self.cascade.states}
        part: dict[t.Node, Expr] = {s.old: loaded[s.name] for s in self.cascade.states}
        yields: list[Expr] = []
        for s in self.cascade.states:
            mine, its = (_expression(s.moved or s.old, table) for table in (old, part))
            if lanes:
                its = Reduce(s.reduction.fn, (self.part,), its)
            new = Let(
                self.fresh(f"{states[s.name].name}_new"),
                states[s.name].type,
                apply(COMBINE[s.reduction.fn], mine, its),
            )
            body.append(new)
            old[s.new] = part[s.new] = Name(new.name)
            yields.append(Name(new.name))
        carries = tuple(
            replace(
                c,
                init=Fill(Const(identity(s.reduction), s.reduction.dtype))
                if c.type.axes
                else Const(identity(s.reduction), s.reduction.dtype),
            )
            for s, c in zip(self.cascade.states, self.chain.states, strict=True)
        )
        axis = LoopAxis(self.part, i64(self.parts), self.parts if lanes else None)
        return For(axis, carries, tuple(body), tuple(yields), span=self.chain.visits[0].span)


def _names(p: TileProgram) -> set[str]:
    """Every name of a program."""
    found = {
        p.name,
        *p.extents,
        *(x.name for x in p.params),
        *(x.name for x in p.scalars),
        *(w.name for w in p.whole),
    }
    for s in statements(p.body):
        match s:
            case Let():
                found.add(s.name)
            case Grid():
                found |= {a.name for a in s.axes}
            case For(axis=axis, carries=carries):
                found |= {axis.name, *(c.name for c in carries)}
    return found


def _needed(before: Iterable[Stmt], after: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Those of `before` that `after` reads, directly or not."""
    kept: list[Stmt] = []
    wanted = _reads(after)
    for s in reversed(tuple(before)):
        if isinstance(s, Let) and s.name in wanted:
            kept.insert(0, s)
            wanted |= _reads((s,))
    return tuple(kept)


def _reads(body: tuple[Stmt, ...]) -> set[str]:
    every = (x for s in statements(body) for e in expressions(s) for x in subexpressions(e))
    return {x.name for x in every if isinstance(x, Name)}


def _expression(root: t.Node, table: Mapping[t.Node, Expr]) -> Expr:
    """Arithmetic on states as an expression; `table` says what the states are called."""
    done: dict[t.Node, Expr] = {}
    for n in t.walk([root]):
        known = table.get(n)
        if known is not None:
            done[n] = known
            continue
        args = tuple(done[a] for a in n.args)
        match n:
            case t.Const():
                done[n] = Const(n.value, n.dtype)
            case t.Scalar():
                done[n] = tile.ScalarRef(n.name)
            case t.Extent():
                done[n] = tile.ExtentRef(n.name)
            case t.Apply(op=op):
                done[n] = Apply(op, args)
            case t.Cast(dtype=dtype):
                done[n] = Cast(dtype, args[0])
            case _:
                raise TypeError(f"{type(n).__name__} is no arithmetic on states")
    return done[root]
