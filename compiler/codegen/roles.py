"""The roles of a kernel of tier `wgmma`: what the warpgroup that loads and those that compute have in common, and the first.

Both walk the same program in the same order: the loader fills slots of rings, the others take them. Loops, bounds and
indices are the same code in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    AxisIndex,
    Expr,
    For,
    Grid,
    Let,
    LoopAxis,
    Name,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    operands,
    statements,
    subexpressions,
)
from .deal import Deal, Demand, warpgroup_deal
from .mma import Unfit
from .scalar_cuda import Code, convert
from .simt_elements import Wide
from .simt_source import NOWHERE, starts_late
from .staging import BARRIER_BYTES, CHUNK, PART_ROWS, ROW_BYTES, Box, Output, Ring, Staging, staging
from .tile_types import tile_axes
from .warpgroup_form import Steps, steps_of
from .warpgroup_tasks import TaskRounds

ROWS = 64  # of a tile, one warpgroup
MODULES = {
    "mbarrier": ("arrive", "await_parity", "expect_bytes", "publish_barriers", "start_barrier"),
    "tma": (
        "boxes_read_0", "boxes_read_1", "commit_boxes", "map_address", "prefetch_map",
        *(f"{way}_box_{n}d" for way in ("load", "store") for n in range(1, 6)),
    ),
    "warpgroup": (
        "announce", "any_lane", "clear_16_bytes", "fewer_registers", "load_matrices", "meet", "meet_warp", "more_registers",
        "opaque", "publish_shared", "quotient", "shared_start", "store_matrices", "uniform",
    ),
    "operands": ("k_major", "mn_major"),
    "wgmma": ("matrix_address", "settled", "wgmma"),
}  # fmt: skip
"""The functions of generated source by the module of `runtime/intrinsics` that has them."""
WORDS = frozenset(n for names in MODULES.values() for n in names)
OURS = frozenset({
    "ahead", "cleared", "first_lane", "following", "leader", "output", "shared", "warp", "warpgroup", "matrix_column",
    "matrix_row", "matrix_turn",
})  # fmt: skip
REGISTERS = {1: (56, 240), 2: (56, 224), 3: (32, 160)}
"""Registers a thread of the warpgroup that loads, and of those that compute, by how many these are."""


class Role(TaskRounds):
    """One role of a kernel."""

    tier = "wgmma"
    joins_loops = False
    narrow_indices = True

    def __init__(
        self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str, warpgroups: int
    ) -> None:
        self.warpgroups = warpgroups
        super().__init__(program, target, wide, suffix)

    def _give_names(self) -> None:
        self.names.taken |= WORDS | OURS
        super()._give_names()
        self.staging = self._staged()
        self.ring_names = {r: self.names.fresh(f"{r.name}_ring") for r in self.staging.rings}
        self.maps: dict[tuple[Box, tuple[int, ...]], str] = {}  # of each kind of box that a tile comes in
        for b in (b for r in self.staging.rings for b in r.boxes):
            for sizes in dict.fromkeys(map(b.sizes_of, range(b.chunks))):
                self.maps[b, sizes] = self.names.fresh(f"{b.load.tensor}_map")
        self.output_maps: dict[str, str] = {}
        self.places: dict[Expr, str] = {}  # subscripts computed before a loop

    def tile_axes(self) -> dict[str, LoopAxis]:
        """Not filled up: boxes have what there is, and what products read beyond is zero."""
        return tile_axes(self.program, self.statics)

    def _staged(self) -> Staging:
        output = Output(self.warpgroups, self._output_chunks(), self._output_row())
        in_turn = self.order() != "longest"
        return staging(self.program, self.tiles, self.target, output, in_turn, dict(self.wide.at_most))

    def _output_chunks(self) -> int:
        """Chunks of the widest result that leaves through shared memory."""
        out = {p.name for p in self.program.params if p.mode != "in" and p.dtype in (DType.F16, DType.BF16)}
        columns = [
            self.tiles[x.axis]
            for s in statements(self.program.body)
            if isinstance(s, Store) and s.tensor in out
            for x in s.subscripts[-1:]
            if isinstance(x, AxisIndex) and x.axis in self.tiles
        ]
        return -(-max(columns, default=0) // CHUNK)

    def _output_row(self) -> str:
        """The axis of the rows of all results, where a task stores them after all its loops; else ""."""
        (grid,) = (s for s in self.program.body if isinstance(s, Grid))
        kinds = [isinstance(s, Store) for s in grid.body]
        stores = [s for s in statements(grid.body) if isinstance(s, Store)]
        after = not any(first and not then for first, then in pairwise(kinds)) and len(stores) == sum(kinds)
        spanned = (
            tuple(x.axis for x in s.subscripts if isinstance(x, AxisIndex) and x.axis in self.tiles)
            for s in stores
        )
        rows = {axes[0] for axes in spanned if len(axes) == 2}
        return rows.pop() if after and len(rows) == 1 else ""

    def dealt(self, demands: list[Demand]) -> Deal:
        return warpgroup_deal(demands, self.tiles, self.warpgroups)

    def _crossing(self) -> frozenset[str]:
        return frozenset()

    def note(self, barrier_due: bool) -> None:
        if barrier_due:
            raise Unfit("a value goes from thread to thread through shared memory")

    # ------------------------------------------------------------ rings

    def ring_lines(self) -> Iterator[str]:
        """Every ring starts at its first slot, in phase 0."""
        for r in self.staging.rings:
            yield f"{self.ring_names[r]}_slot = i32(0)"
            yield f"{self.ring_names[r]}_phase = i32(0)"

    def full_barrier(self, r: Ring) -> str:
        return f"shared + {r.barriers}"

    def empty_barrier(self, r: Ring) -> str:
        return f"shared + {r.barriers + BARRIER_BYTES * r.pairs}"

    def barrier_at(self, r: Ring, slot: str, part: str = "") -> str:
        """What to add to a ring's first barrier for that of a slot, or of a warpgroup's part of it."""
        at = ""
        if r.stages > 1:
            at = f" + {BARRIER_BYTES * max(r.parts, 1)} * {slot}"
        return f"{at} + {BARRIER_BYTES} * {part}" if part else at

    def advance(self, r: Ring) -> None:
        """The next slot; from the last to the first in the other phase."""
        name = self.ring_names[r]
        if r.stages == 1:
            self.text.line(f"{name}_phase = i32({name}_phase ^ 1)")
            return
        self.text.line(f"{name}_slot = i32({name}_slot + 1)")
        self.text.line(f"if {name}_slot == {r.stages}:")
        self.text.line(f"    {name}_slot = i32(0)")
        self.text.line(f"    {name}_phase = i32({name}_phase ^ 1)")

    # ------------------------------------------------------------ loops

    @contextmanager
    def stepping(self, a: LoopAxis, start: str, stop: str) -> Iterator[None]:
        """A loop over tiles that no compiler unrolls: its counter comes from nowhere."""
        name = self.axis_names[a.name].first
        self.text.line(f"{name} = i32({start})")
        self.text.line(f"while {name} < {stop}:")
        with self.text.indented():
            yield
            self.text.line(f"{name} = opaque(i32({name} + {a.tile}))")

    def decided(self, s: Steps, compute: Callable[[For], None]) -> None:
        """What a step computes, under its condition."""
        if s.condition is None:
            compute(s.loop)
            return
        values, types = dict(self.values), dict(self.types)
        for x in s.before:
            self.let(x)
        ways = ((s.condition, s.loop), *s.others)
        if any(isinstance(x, Name) and x.name not in self.values for c, _ in ways for x in subexpressions(c)):
            raise Unfit("whether a step is taken depends on tiles that the role which loads does not have")
        tests = [self.agreed(self.emit(c, NOWHERE)) for c, _ in ways]
        for i, (test, (_, loop)) in enumerate(zip(tests, ways, strict=True)):
            self.text.line(f"{'elif' if i else 'if'} {test} > 0:")
            with self.text.indented():
                compute(loop)
        self.values, self.types = values, types

    def agreed(self, condition: Code) -> str:
        """A number on which all threads of the role agree."""
        return condition.operand

    def range_of(self, a: LoopAxis) -> tuple[str, str]:
        """Emit an axis's bounds; gives the first tile's first index and where tiles end."""
        first, end = self.bounds(a)
        start = first
        if first != "0":
            start = self.assign(f"{a.name}_start", Code(f"i32({first} // {a.tile} * {a.tile})", DType.I64))
        stop = self.assign(f"{a.name}_stop", Code(f"i32({end})", DType.I64))
        if starts_late(a):
            self.text.line(f"{stop} = {stop} if {first} < {end} else {start}")
        return start, stop

    def box_place(self, load_subscripts: tuple[Expr, ...], start: int, row: str = "", extra: str = "") -> str:
        """The coordinates of a box that starts at a column of its tile, the innermost first."""
        texts = []
        for x in load_subscripts:
            code = self.places.get(x) or convert(self.emit(x, NOWHERE, widest=1 << 20), DType.I64).text
            texts.append(f"{code} + {extra}" if extra and x == AxisIndex(row) else code)
        if start:
            texts[-1] = str(start) if texts[-1] == "0" else f"{texts[-1]} + {start}"
        return ", ".join(reversed(texts))


class Loader(Role):
    """One thread of a warpgroup of its own, which asks for boxes as soon as there is an empty slot for them."""

    def let(self, s: Let) -> None:
        if s.name in self.staging.names:
            self.types[s.name] = s.type
            return
        if not s.type.axes and not self._of_tiles(s.value):
            super().let(s)
        else:
            self.types[s.name] = s.type

    def _of_tiles(self, e: Expr) -> bool:
        """Does a scalar come from tiles, which this role does not have?"""
        return any(
            isinstance(x, Reduce) or (isinstance(x, Name) and x.name not in self.values)
            for x in subexpressions(e)
        )

    def store(self, s: Store) -> None:
        pass

    def block(self, body: tuple[Stmt, ...]) -> None:
        if any(isinstance(s, Let) and s.name in self.staging.names for s in body):
            before_values, before_types = dict(self.values), dict(self.types)
            for s in body:
                self.statement(s)
                if isinstance(s, Let) and s.name in self.staging.names and self._is_last(s, body):
                    self.fill(self.staging.ring(self.staging.names[s.name]))
            self.values, self.types = before_values, before_types
        else:
            super().block(body)

    def _is_last(self, s: Let, body: tuple[Stmt, ...]) -> bool:
        """Is it the last tile of its ring in this scope?"""
        ring = self.staging.ring(self.staging.names[s.name])
        mine = [
            x for x in body
            if isinstance(x, Let) and x.name in self.staging.names
            and self.staging.ring(self.staging.names[x.name]) is ring
        ]  # fmt: skip
        return mine[-1] is s

    def bounds(self, a: LoopAxis) -> tuple[str, str]:
        stated = [x for e in (a.lo, a.hi) if e is not None for x in subexpressions(e)]
        if any(isinstance(x, Name) and x.name not in self.values for x in stated):
            raise Unfit(f"the bounds of `{a.name}` depend on tiles that the role which loads does not have")
        return super().bounds(a)

    def loop(self, s: For) -> None:
        self.types.update({c.name: c.type for c in s.carries})
        steps = steps_of(s)
        loads = [
            self.staging.names[x.name]
            for way in steps.ways
            for x in way.body
            if isinstance(x, Let) and x.name in self.staging.names
        ]
        for x in dict.fromkeys(x for load in loads for x in load.subscripts):
            if (
                operands(x)
                and x not in self.places
                and not any(isinstance(y, AxisIndex) and y.axis == s.axis.name for y in subexpressions(x))
            ):
                self.places[x] = self.assign("place", self.emit(x, NOWHERE))
        start, stop = self.range_of(s.axis)
        with self.stepping(s.axis, start, stop):
            self.live[s.axis.name] = s.axis
            self.decided(steps, lambda way: self.block(way.body))
            del self.live[s.axis.name]

    def fill(self, r: Ring) -> None:
        """Wait until the next slot is empty, announce its bytes, and ask for its boxes; for each warpgroup by itself where
        slots have parts."""
        for part in range(max(r.parts, 1)):
            self._fill_part(r, part)
        self.advance(r)

    def _fill_part(self, r: Ring, part: int) -> None:
        name = self.ring_names[r]
        at = self.barrier_at(r, f"{name}_slot", str(part) if part else "")
        self.text.line(f"await_parity({self.empty_barrier(r)}{at}, {name}_phase ^ 1)")
        self.text.line(f"expect_bytes({self.full_barrier(r)}{at}, {r.moved_bytes})")
        for b in r.boxes:
            for chunk in range(b.chunks):
                to = (
                    f"shared + {r.start + r.offset(b) + chunk * b.chunk_bytes + part * PART_ROWS * ROW_BYTES}"
                )
                to += "" if r.stages == 1 else f" + {name}_slot * {r.slot_bytes}"
                below = str(part * PART_ROWS) if part else ""
                where = self.box_place(b.load.subscripts, chunk * CHUNK, b.row, below)
                source = f"{self.maps[b, b.sizes_of(chunk)]}_at"
                self.text.line(
                    f"load_box_{len(b.sizes)}d({to}, {source}, {self.full_barrier(r)}{at}, {where})"
                )
