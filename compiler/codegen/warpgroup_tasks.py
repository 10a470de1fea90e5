"""Which tasks a block of tier `wgmma` takes, in which order, and where a task's tile lies.

One block runs on a multiprocessor. It takes tasks of one length in turn (`turns`), groups of rows of a product together,
which read the same tiles, as do heads that share a bias: those of one tile of queries come together. Tasks whose loops
differ in length, as under a causal mask, are sorted by length first, as many of them together as read what fits into the
level 2 cache: of a window, which is all that a task reads, in groups of like size, mostly one. They are then dealt out to
blocks in rounds that run over the blocks forwards and backwards (`balanced`): who got the longest of one round gets the
shortest of the next. For that the lengths have to change little from task to task, so groups fall and rise in turn, and the
last one falls: the tasks that no whole round takes are then the shortest. Where lengths depend on a tensor, a launch before
counts steps and has the tiles by them (`passes/steps_ahead.py`). Where none can, nothing sorts them: each task has a block
of its own, and the device gives the next to the first multiprocessor that is free (`longest`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Ranked, Tasks, find
from ..schedule import TaskOrder
from ..tile_ir import (
    Apply,
    AxisIndex,
    Const,
    Expr,
    For,
    Grid,
    Load,
    LoopAxis,
    Name,
    statements,
    subexpressions,
)
from .scalar_cuda import Code
from .simt_source import NOWHERE, grouped
from .staging import Staging
from .streams import GROUP
from .warpgroup_affine import linear
from .warpgroup_exponentials import Scale
from .warpgroup_form import scalar_values
from .warpgroup_softcaps import RowSoftcaps

STEP = "task += i64(cuda.gridDim.x)"
ONE: Expr = Const(1, DType.I64)
CACHED_BYTES = 32 << 20  # of the level 2 cache that tiles read by several blocks may fill


@dataclass(frozen=True)
class Sorted:
    """Variables of a kernel whose tasks are sorted by length: how many indices the axes before the last have, how many of
    them come together, the tasks and the number of such groups ("" where all of them fall)."""

    others: str
    together: str
    tasks: str
    groups: str


class TaskRounds(RowSoftcaps):
    """The tasks of a kernel. Their numbers are divided in 32 bits: each task starts with several divisions, and those of 64
    bits take four times as long."""

    staging: Staging
    computes = False
    """Is it the role that computes? The other finds indices long before they are needed."""
    grid_axes: tuple[LoopAxis, ...] = ()
    grid_counts: list[str]
    task_lines: list[str]
    """Where the loop over tasks is emitted."""
    number = "task"
    """The variable with the number of the task that indices are decoded of."""
    keeps_indices = False
    """Are the next task's indices found so early that they take registers? They are those of tiles, which boxes start at."""
    next_indices: dict[str, str]
    """Indices of the next task by those of this one, once it is known."""

    # ------------------------------------------------------------ the order

    def order(self) -> TaskOrder:
        """As stated, else by what the lengths of loops depend on."""
        stated = find(self.program.attributes, Tasks)
        if stated is not None:
            return cast(TaskOrder, stated.order)
        bounds = [x for a in self._loops() for x in (a.lo, a.hi) if x is not None]
        if not bounds:
            return "turns"
        grid = next(s for s in self.program.body if isinstance(s, Grid))
        known = self._ranked() is not None or not any(map(self._from_memory, bounds))
        return "balanced" if known and _by_length(grid.axes) else "longest"

    def _ranked(self) -> Ranked | None:
        return find(self.program.attributes, Ranked)

    def _loops(self) -> list[LoopAxis]:
        return [s.axis for s in statements(self.program.body) if isinstance(s, For)]

    def _first_is_longest(self) -> bool:
        """Do loops start where the tile lies and run to the end, so that the first tiles' are the longest?"""
        return any(a.lo is not None and a.hi is None for a in self._loops())

    def _from_memory(self, e: Expr) -> bool:
        """Does a bound depend on what a tensor holds?"""
        values, left = scalar_values(self.program.body), [e]
        while left:
            parts = list(subexpressions(left.pop()))
            if any(isinstance(x, Load) for x in parts):
                return True
            left += [values[x.name] for x in parts if isinstance(x, Name) and x.name in values]
        return False

    @contextmanager
    def tasks(self, count: str) -> Iterator[None]:
        """The loop of a block over its tasks."""
        balanced = self.order() == "balanced"
        self.text.line(f"tasks = {count}")
        self.text.line("task = i64(cuda.blockIdx.x)")
        if balanced:  # from a block's place in one round to that in the next, which runs the other way
            self.text.line("ahead = 2 * (i64(cuda.gridDim.x) - task) - 1")
        self.advancing = ("task += ahead", "ahead = 2 * i64(cuda.gridDim.x) - ahead") if balanced else (STEP,)
        self.next_indices, self.has_next = {}, False
        if self.looks_ahead():
            self._decode()
        self.task_lines, self.loop_line, self.loop_depth = self.text.out, len(self.text.out), self.text.depth
        self.text.line("while task < tasks:")
        with self.text.indented(), self.back_edge():
            yield
            if not self.has_next:
                self.next_task()
            if self.keeps_indices:
                for line in self.advancing:
                    self.text.line(line)
            for now, following in self.next_indices.items():
                self.text.line(
                    f"{now} = uniform({following})" if self.keeps_indices else f"{now} = {following}"
                )

    def looks_ahead(self) -> bool:
        """Are a task's indices found while the last products of the one before run?"""
        return self.computes and all(a.lo is None and a.hi is None for a in self.grid_axes)

    def next_task(self) -> None:
        """The block's next task, if this is the place to find it; its indices in variables of their own, for results still
        need these."""
        if self.keeps_indices:
            self.number = "following"
            self.text.line(self.advancing[0].replace("task +=", "following = task +"))
        else:
            for line in self.advancing:
                self.text.line(line)
        if self.looks_ahead():
            names = [self._index_name(a) for a in self.grid_axes]
            self.next_indices = self.next_indices or {n: self.names.fresh(f"next_{n}") for n in names}
            self._decode()
        self.has_next = True

    def in_task(self) -> bool:
        """Do statements run once in each task?"""
        return self.text.depth == self.loop_depth + 1

    @contextmanager
    def ahead_of_tasks(self) -> Iterator[None]:
        """What is emitted runs once, before the loop over tasks."""
        out, depth = self.text.out, self.text.depth
        self.text.out, self.text.depth = [], self.loop_depth
        yield
        made, self.text.out, self.text.depth = self.text.out, out, depth
        self.task_lines[self.loop_line : self.loop_line] = made
        self.loop_line += len(made)

    def _scale(self, scale: Expr | None) -> Scale:
        """A scale that is the same for all tasks is made ready once."""
        parts = () if scale is None else subexpressions(scale)
        if any(isinstance(x, Name | AxisIndex | Load) for x in parts):
            return super()._scale(scale)
        with self.ahead_of_tasks():
            return super()._scale(scale)

    # ------------------------------------------------------------ where a task's tile lies

    def before_tasks(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """What all tasks share: how many indices other than the last come together, and so how many tasks and groups."""
        self.grid_axes, self.grid_counts = axes, counts
        if not self._sorted():
            return
        others = self.assign("others", Code(" * ".join(counts[:-1]) or "1", DType.I64))
        fit = f"{CACHED_BYTES} // max({self._looped_bytes()}, 1)"
        together = self.assign("together", Code(f"max(min({fit}, {others}), 1)", DType.I64))
        groups = ""
        if self.order() == "balanced":
            text = "quotient({0} + {1} - 1, {1})"
            groups = self.assign("all_groups", Code(text.format(others, together), DType.I32))
            if self._windows():
                even = text.format(others, f"max({groups}, 1)")
                together = self.assign("together", Code(f"max({even}, 1)", DType.I64))
        tasks = self.assign("tasks_together", Code(f"{together} * {grouped(counts[-1])}", DType.I64))
        self.sorted = Sorted(others, together, tasks, groups)

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        if any(a.lo is not None or a.hi is not None for a in axes):
            super()._task_indices(axes, counts)
        elif not self.looks_ahead():
            self._decode()

    def _sorted(self) -> bool:
        """Are tasks of one tile neighbours, and not those of one of the other indices? So where lengths differ, and where
        tasks with other indices read the same tile element by element, which is more than what products read again."""
        if not _by_length(self.grid_axes):
            return False
        return self.order() != "turns" or any(map(self._shares_reads, self.grid_axes[:-1]))

    def _shares_reads(self, a: LoopAxis) -> bool:
        """Do tasks that differ in an index alone read the same tile element by element?"""
        tiles = [b.load for r in self.staging.rings if r.parts for b in r.boxes]
        named = {x for load in tiles for s in load.subscripts for x in subexpressions(s)}
        return bool(tiles) and AxisIndex(a.name) not in named

    def _decode(self) -> None:
        """The indices of a task from its number."""
        axes, counts = self.grid_axes, self.grid_counts
        if self._sorted():
            self._indices_by_length(axes, counts)
        elif len(axes) > 1 and axes[-1].tile is not None and axes[-2].tile is not None:
            self._indices_of_product(axes, counts)
        else:
            self._indices(axes, counts, self.number)

    def _index_name(self, a: LoopAxis) -> str:
        names = self.axis_names[a.name]
        return names.index if a.tile is None else names.first

    def _index_is(self, a: LoopAxis, text: str) -> None:
        """An axis's index, or its tile's first, from the index of the tile."""
        name = self._index_name(a)
        value = text if a.tile is None else f"({text}) * {a.tile}"
        if name in self.next_indices and self.keeps_indices:
            value = f"i32({value})"
        self.text.line(f"{self.next_indices.get(name, name)} = {value}")

    def _indices_by_length(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Tiles with the longest loops first; of the other indices as many together as fit into the level 2 cache with what
        their loops read."""
        found = self.sorted
        group, inside = self._divided(self.number, found.tasks, "group", "inside")
        start = self.assign("start", Code(f"{group} * {found.together}", DType.I64))
        some = self.assign("some", Code(f"min({found.others} - {start}, {found.together})", DType.I64))
        tile, rest = self._divided(inside, some, "tile", "rest")
        falling, rising = tile, f"{grouped(counts[-1])} - 1 - {tile}"
        if not self._first_is_longest() and self._ranked() is None:
            falling, rising = rising, falling
        if found.groups:
            falling = f"{falling} if ({found.groups} - {group}) & 1 else {rising}"
        ranked = self._ranked()
        if ranked is None:
            self._index_is(axes[-1], falling)
        if len(axes) > 1:
            rest = self.assign("rest", Code(f"{start} + {rest}", DType.I64))
            order = sorted(range(len(axes) - 1), key=lambda i: self._shares_reads(axes[i]))
            self._indices(tuple(axes[i] for i in order), [counts[i] for i in order], rest)
        if ranked is not None:
            self._index_is(axes[-1], self._of_rank(ranked, falling))

    def _of_rank(self, ranked: Ranked, place: str) -> str:
        """The tile with a place among all by their lengths; any where no task is left, of which nothing is read."""
        names = [
            self._index_name(a) for unit in ranked.units.split() for a in self.grid_axes if a.name == unit
        ]
        where = [*(self.next_indices.get(n, n) for n in names), f"({place})"]
        at = " + ".join(f"{x} * {s}" for x, s in zip(where, self.strides[ranked.tensor], strict=True))
        found = self.assign("of_rank", Code("i32(0)", DType.I32))
        self.text.line(f"if {self.number} < tasks:")
        self.text.line(f"    {found} = {self.tensors[ranked.tensor]}[{at}]")
        return f"i64({found})"

    def _indices_of_product(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Tiles in groups of `GROUP` rows, rows fastest: blocks that run together read the same tiles. The first group, and
        whole ones, are found without a division: the first copies of a launch wait for its instructions to come from memory.
        """
        rows, columns = counts[-2:]
        rest = self.number
        if len(axes) > 2:
            whole, rest = self._divided(self.number, f"{rows} * {columns}", "others", "tile")
            self._indices(axes[:-2], counts, whole)
        of_group = self.assign("of_group", Code(f"i32({GROUP} * {columns})", DType.I32))
        number = self.assign("number", Code(f"i32({rest})", DType.I32))
        group = self.assign("group", Code("i32(0)", DType.I32))
        self.text.line(f"if {number} >= {of_group}:")
        self.text.line(f"    {group} = quotient({number}, {of_group})")
        inside = self.assign("inside", Code(f"i32({number} - {group} * {of_group})", DType.I32))
        left = self.assign("left", Code(f"i32({rows} - {group} * {GROUP})", DType.I32))
        column = self.assign("column", Code(f"i32({inside} >> {GROUP.bit_length() - 1})", DType.I32))
        high = self.assign("high", Code(f"i32({GROUP})", DType.I32))
        self.text.line(f"if {left} < {GROUP}:")
        self.text.line(f"    {high} = {left}")
        self.text.line(f"    {column} = quotient({inside}, {high})")
        row = self.assign("row", Code(f"i32({inside} - {column} * {high})", DType.I32))
        self._index_is(axes[-2], f"{group} * {GROUP} + {row}")
        self._index_is(axes[-1], column)

    def _indices(self, axes: tuple[LoopAxis, ...], counts: list[str], rest: str) -> None:
        """The last axis fastest."""
        for i in range(len(axes) - 1, -1, -1):
            here = rest
            if i:
                rest = self.assign("rest", Code(f"i64(quotient({here}, {counts[i]}))", DType.I64))
                here = f"{here} - {rest} * {counts[i]}"
            self._index_is(axes[i], here)

    def _count(self, a: LoopAxis) -> str:
        """By a shift where a tile's size is a power of two, because no size is negative."""
        if a.tile is None or a.tile & (a.tile - 1):
            return super()._count(a)
        return f"({self.emit(a.extent, NOWHERE).operand} + {a.tile - 1}) >> {a.tile.bit_length() - 1}"

    def _divided(self, number: str, by: str, *names: str) -> tuple[str, str]:
        """Quotient and remainder, of these names."""
        whole = self.assign(names[0], Code(f"i64(quotient({number}, {by}))", DType.I64))
        return whole, self.assign(names[1], Code(f"{number} - {whole} * {grouped(by)}", DType.I64))

    def _looped_bytes(self) -> str:
        """What the loops of one task read, at most."""
        rows: dict[str, int] = {}
        for b in (b for r in self.staging.rings if r.looped and not r.parts for b in r.boxes):
            rows[b.row] = rows.get(b.row, 0) + 2 * b.columns
        return " + ".join(f"{self._most_visited(a)} * {n}" for a, n in rows.items()) or "1"

    def _most_visited(self, axis: str) -> str:
        """How many indices of an axis one task visits, at most: all, or those of a window that moves with its tile."""
        extent, windows = self.emit(self.axes[axis].extent, NOWHERE).operand, self._windows()
        return f"min({extent}, {windows[axis]})" if axis in windows else extent

    def _windows(self) -> dict[str, int]:
        """By axis, how many indices a task's loops visit at most, where that does not grow with the extent."""
        values, found = scalar_values(self.program.body), {}
        for axis in dict.fromkeys(a.name for a in self._loops()):
            loops = [a for a in self._loops() if a.name == axis]
            lo, hi = loops[0].lo, loops[-1].hi
            if lo is None or hi is None:
                continue
            lows, highs = linear_ends(lo, values, False), linear_ends(hi, values, True)
            known = [w for high in highs for low in lows if (w := _constant(high, low)) is not None]
            if known:
                found[axis] = min(known) + (loops[0].tile or 1) - 1
        return found


def linear_ends(e: Expr, values: Mapping[str, Expr], most: bool) -> list[Counter[Expr]]:
    """Sums of indices and extents that an integer expression does not exceed (`most`) or fall below, as far as they are
    told by its form. `values`: those of scalar names."""
    match e:
        case Name(name=n) if n in values:
            return linear_ends(values[n], values, most)
        case Apply(op="min" | "max" as op, args=args) if most == (op == "min"):
            return [x for a in args for x in linear_ends(a, values, most)]
        case Apply(op="add" | "sub" as op, args=(a, b)):
            left, right = linear_ends(a, values, most), linear_ends(b, values, most == (op == "add"))
            return [_plus(x, y, 1 if op == "add" else -1) for x in left for y in right]
        case Apply(op="mul", args=(Apply(op="floordiv", args=(x, Const(value=n))), Const(value=by))) if (
            n == by
        ):
            less: Counter[Expr] = Counter({ONE: 0 if most else 1 - int(n)})
            return [_plus(found, less, 1) for found in linear_ends(x, values, most)]
    terms = linear(e)
    return [] if terms is None else [terms]


def _plus(a: Counter[Expr], b: Counter[Expr], times: int) -> Counter[Expr]:
    return Counter({x: a[x] + times * b[x] for x in {**a, **b}})


def _constant(high: Counter[Expr], low: Counter[Expr]) -> int | None:
    """How far apart two sums are, where that is a number."""
    apart = _plus(high, low, -1)
    constant = apart.pop(ONE, 0)
    return None if any(apart.values()) else max(constant, 0)


def _by_length(axes: tuple[LoopAxis, ...]) -> bool:
    """Is it the last axis alone that is cut into tiles, so that its tiles tell how long loops are?"""
    return axes[-1].tile is not None and all(a.tile is None for a in axes[:-1])
