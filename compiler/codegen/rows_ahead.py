"""Long rows: those of a block's next task come to shared memory while it computes this one (`cp.async`, sm_80).

A block that holds a row of 32,768 elements in registers has a multiprocessor to itself, and so has one of 16,384 that reads
f32, or weights too. It would load a row, compute and store in turn, with nothing under way meanwhile. Here a block takes one
task after another. It reads its row from shared memory, each thread what it has copied there itself, and asks for the next
task's row as soon as all threads have this one in registers. A row that is the same for all tasks (the
weights of a norm) is copied once and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    AxisIndex,
    For,
    Grid,
    Load,
    LoopAxis,
    Name,
    Stmt,
    TileProgram,
    expressions,
    subexpressions,
)
from .deal import Layout
from .scalar_cuda import Code, convert
from .shared_memory import Buffer, Touched
from .simt import Kernel
from .simt_elements import Wide
from .simt_source import NOWHERE, AxisNames, Registers, Text, local_array

COPIED = (DType.F16, DType.BF16, DType.F32)
COPY_BYTES, WORD_BYTES = 16, 4
INDICES = 8  # registers of a thread beside what it holds of rows
MOST_ROWS = 3  # different rows of a task: groups of copies that may stay under way while a thread waits for the oldest
RESERVED_BYTES = 4096  # of a block's shared memory: the driver's, and what warps leave each other
FIRST_TASK_LINES = 2  # of the text before the loop over a block's tasks: their number, the first one
ASYNC_COPIES = (8, 0)  # the first capability that has them


@dataclass(frozen=True)
class Row:
    """A row that comes ahead, and where it lies: element i of the tile at i."""

    load: Load
    axis: str
    buffer: Buffer
    changes: bool
    """Does it differ from task to task?"""


class RowsAhead(Kernel):
    """A kernel whose blocks take tasks in turn and have their rows copied ahead."""

    aligned = True

    def __init__(self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str = "") -> None:
        self.rows: dict[Load, Row] = {}
        self.counts: list[str] = []
        self.grid_axes: tuple[LoopAxis, ...] = ()
        self.names_ahead: dict[str, AxisNames] = {}
        self.task_ahead = ""
        self.fetched: list[Row] = []
        super().__init__(program, target, wide, suffix)

    @property
    def serves(self) -> bool:
        """Does a row come ahead, and is each that does read once a task?"""
        return any(r.changes for r in self.rows.values()) and set(self.fetched) == set(self.rows.values())

    @property
    def fills_a_multiprocessor(self) -> bool:
        """Is there no room for the registers of a second block: rows as they are read, a tile computed from them, and
        indices? (Assembled for sm_90a, blocks of 512 threads have 54 registers for a softmax of rows of 16,384 bf16, 80 of
        f32, 71 for a norm with weights.)"""
        threads = self.deal.threads
        rows = self.rows.values()
        words = sum(self.tiles[r.axis] * r.buffer.dtype.bytes for r in rows) // (WORD_BYTES * threads)
        values = max(self.deal.layout((r.axis,)).elements for r in rows)
        return 2 * threads * (words + values + INDICES) > self.target.registers_per_sm

    def launch(self) -> str:
        ahead = [r.load.tensor for r in self.rows.values() if r.changes]
        return super().launch()[:-1] + f', "blocks_per_sm": 1, "ahead": {ahead!r}}}'

    # ------------------------------------------------------------ which rows

    def before_tasks(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Choose what comes ahead, and give it its place."""
        super().before_tasks(axes, counts)
        if self.target.capability < ASYNC_COPIES or any(a.lo is not None or a.hi is not None for a in axes):
            return
        self.counts, self.grid_axes = counts, axes
        (grid,) = (s for s in self.program.body if isinstance(s, Grid))
        left = self.target.shared_per_block_bytes - RESERVED_BYTES
        with self.opened(axes):
            found = {e: r for e in self._plain_loads(grid.body) if (r := self._row(e)) is not None}
        changing = [x for x in found.items() if x[1][1]]
        for e, (axis, changes) in [*changing[:MOST_ROWS], *(x for x in found.items() if not x[1][1])]:
            dtype = self.program.param(e.tensor).dtype
            size = self.tiles[axis]
            if size * dtype.bytes <= left:
                left -= size * dtype.bytes
                buffer = self.memory.allocate(self.names.fresh(f"{e.tensor}_row"), dtype, size)
                self.rows[e] = Row(e, axis, buffer, changes)

    @contextmanager
    def opened(self, axes: tuple[LoopAxis, ...]) -> Iterator[None]:
        """Code for what lies in the axes of the grid and along rows."""
        before = self.live
        self.live = {
            **before, **{a.name: a for a in axes}, **{n: a for n, a in self.axes.items() if self.is_one_tile(a)}
        }  # fmt: skip
        yield
        self.live = before

    def _plain_loads(self, body: tuple[Stmt, ...]) -> Iterator[Load]:
        """What a task reads once: outside of loops that visit several tiles."""
        for s in body:
            if isinstance(s, Grid) or (isinstance(s, For) and not self.is_one_tile(s.axis)):
                continue
            if isinstance(s, For):
                yield from self._plain_loads(s.body)
            yield from (x for e in expressions(s) for x in subexpressions(e) if isinstance(x, Load))

    def _row(self, e: Load) -> tuple[str, bool] | None:
        """The axis of a row that can come ahead, and whether it changes from task to task."""
        parts = [x for s in e.subscripts for x in subexpressions(s)]
        if e.tensor in self.shared_tensors or any(isinstance(x, Load | Name) for x in parts):
            return None
        axes = self.facts.type_of(e, self.types).axes
        if len(axes) != 1 or not self.is_one_tile(self.axes[axes[0]]):
            return None
        layout, dtype = self.deal.layout(axes), self.program.param(e.tensor).dtype
        axis = self.runs_along(e.tensor, e.subscripts, layout)
        inside = all(
            self.covers(x, self.program.param(e.tensor).shape[i]) or not self._spans(x)
            for i, x in enumerate(e.subscripts)
        )
        if axis is None or not inside or dtype not in COPIED or not layout.spread(axis).even:
            return None
        if layout.spread(axis).run * dtype.bytes % COPY_BYTES:
            return None
        of_grid = {a.name for a in self.grid_axes}
        return axis, any(isinstance(x, AxisIndex) and x.axis in of_grid for x in parts)

    # ------------------------------------------------------------ tasks in turn

    @contextmanager
    def tasks(self, count: str) -> Iterator[None]:
        start = len(self.text.out) + FIRST_TASK_LINES
        with super().tasks(count):
            yield
        if self.fetched:
            self.text.out[start:start] = self._first_copies()

    def _first_copies(self) -> list[str]:
        """What stays, then the rows of the first task in the order in which they are read."""
        outer, self.text = self.text, Text()
        with self.opened(self.grid_axes):
            for axis in dict.fromkeys(r.axis for r in self.rows.values()):
                self.text.line(f"{self.axis_names[axis].first} = 0")
            super()._task_indices(self.grid_axes, self.counts)
            staying = [r for r in self.rows.values() if not r.changes]
            for row in staying:
                self._ask(row)
            if staying:
                self.text.line("commit_copies()")
            for row in (r for r in self.fetched if r.changes):
                self.text.line("if task < tasks:")
                with self.text.indented():
                    self._ask(row)
                self.text.line("commit_copies()")
        made, self.text = self.text.out, outer
        return made

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        super()._task_indices(axes, counts)
        if not self.rows:
            return
        own, names = self.task, self.axis_names
        self.names_ahead = {**names, **{a.name: self._renamed(names[a.name]) for a in axes}}
        self.task_ahead = self.assign("task_ahead", Code("task + i64(cuda.gridDim.x)", DType.I64))
        self.task, self.axis_names = self.task_ahead, self.names_ahead
        super()._task_indices(axes, counts)
        self.task, self.axis_names = own, names

    def _renamed(self, names: AxisNames) -> AxisNames:
        """What an axis of the grid is called where the next task is meant."""
        index, first = (self.names.fresh(f"{x}_ahead") for x in (names.index, names.first))
        return replace(names, index=index, first=first)

    def load_ahead(self, e: Load, layout: Layout) -> None:
        """A row that has come ahead is read from shared memory; then the next task's is asked for."""
        row = self.rows.get(e)
        if row is None:
            super().load_ahead(e, layout)
            return
        if e in self.ahead:
            return
        changing = sum(r.changes for r in self.rows.values())
        if row.changes or not self.fetched:
            self.text.line(f"wait_copies{changing - row.changes}()")
        self.fetched.append(row)
        self._fetch_row(row)
        if not row.changes:
            return
        self.text.line("cuda.syncthreads()")  # all have read what the next copies write over
        self.memory.touched = Touched()
        names, self.axis_names = self.axis_names, self.names_ahead
        self.text.line(f"if {self.task_ahead} < tasks:")
        with self.text.indented():
            self._ask(row)
        self.text.line("commit_copies()")
        self.axis_names = names

    def _fetch_row(self, row: Row) -> None:
        """A thread's part of a row, into registers."""
        param, own = self.program.param(row.load.tensor), self.deal.layout((row.axis,))
        array = self.names.fresh(f"{row.load.tensor}_ahead")
        self.text.line(f"{array} = {local_array(param.dtype, own.elements)}")
        depth = self.text.depth
        at = self.open(own, [], set(), NOWHERE, row.axis)
        place, first = (
            self.cut(Code(x, DType.I64), 0).text for x in (self.position(at, row.axis), at.element(own))
        )
        for i in self._pieces(row):
            self.text.line(f"load16_{param.dtype}({row.buffer.name}, {place} + {i}, {array}, {first} + {i})")
        self.text.depth = depth
        self.ahead[row.load] = Registers(array, own)

    def _ask(self, row: Row) -> None:
        """Start the copies of a thread's part of a row; of zeros beyond the tensor."""
        e, own = row.load, self.deal.layout((row.axis,))
        param, depth = self.program.param(e.tensor), self.text.depth
        at = self.open(own, [e], set(own.axes), NOWHERE, row.axis)
        where = [convert(self.cut(self.emit(x, at), 40), DType.I64) for x in e.subscripts]
        offset = self.cut(Code(self.offset(param, where, packed=True), DType.I64), 0).text
        place = self.cut(Code(self.position(at, row.axis), DType.I64), 0).text
        inside = self.conditions(at, own.axes) + self.within(
            param, e.subscripts, where, [not self._spans(x) for x in e.subscripts]
        )
        for i in self._pieces(row):
            self.text.line(
                f"copy16_{param.dtype}({row.buffer.name}, {place} + {i}, {self.tensors[e.tensor]}, "
                f"{offset} + {i}, {' and '.join(inside) or 'True'})"
            )
        self.text.depth = depth
        self.wide_tensors[e.tensor] = None

    def _pieces(self, row: Row) -> range:
        """Where the pieces of a run of neighbouring elements start that one copy moves."""
        run = self.deal.layout((row.axis,)).spread(row.axis).run
        return range(0, run, COPY_BYTES // row.buffer.dtype.bytes)
