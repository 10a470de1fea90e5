"""Results of tier `wgmma` on their way out: through shared memory and the copy engine where they are 16 bits wide.

Each warp has its own 16 rows of a warpgroup's 64, its own place for them, and boxes of its own: no warp waits for another.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...dsl.types import DType
from ..tile_ir import AxisIndex, Cast, Expr, Name, Stmt, Store, subexpressions
from .deal import Layout
from .simt_source import NOWHERE, Point
from .staging import CHUNK, OUTPUT_BYTES, ROW_BYTES, STEP
from .warpgroup_loops import Loops

LEAVING = 12  # the first of the named barriers at which a warpgroup's warps meet before results take a slot
WARP_ROWS = 16  # of a warpgroup's 64, those whose sums a warp has
WARPS = 4  # of a warpgroup


class Results(Loops):
    """The computing role's stores."""

    def _give_names(self) -> None:
        super()._give_names()
        self.output_sizes: dict[str, tuple[int, ...]] = {}  # of boxes that leave, by tensor

    # ------------------------------------------------------------ results

    def block(self, body: tuple[Stmt, ...]) -> None:
        super().block(body)
        if any(isinstance(s, Store) for s in body):
            self.after_results()
        self.close_results()

    def after_results(self) -> None:
        self.finish()
        self.asked = {}
        for ring in [r for r in self.slots if not r.looped]:
            if ring is self.staging.through:
                self._read_from(0)
            self.give_back(ring)

    def store(self, s: Store) -> None:
        box = self._output_box(s)
        if box is None:
            super().store(s)
            return
        self.store_boxes(s, box)

    def _output_box(self, s: Store) -> tuple[str, str] | None:
        """Row and column axis of a result that goes out through the copy engine; None where it cannot."""
        param = self.program.param(s.tensor)
        axes = self.facts.type_of(s.value, self.types).axes
        spanned = [x.axis for x in s.subscripts if isinstance(x, AxisIndex) and x.axis in self.tiles]
        named = [
            y.axis
            for x in s.subscripts
            for y in subexpressions(x)
            if isinstance(y, AxisIndex)
            if y.axis in self.tiles
        ]
        if (
            param.dtype not in (DType.F16, DType.BF16)
            or s.mode != "set"
            or len(spanned) != 2
            or spanned != named
        ):
            return None
        row, column = spanned
        layout = self.deal.layout((row, column))
        bounded = any(self.live[a].lo is not None or self.live[a].hi is not None for a in spanned)
        bare = s.subscripts and s.subscripts[-1] == AxisIndex(column)
        ends = all(
            self.ends_with(x.axis, n)
            for x, n in zip(s.subscripts, param.shape, strict=True)
            if isinstance(x, AxisIndex) and x.axis in spanned
        )
        fits = set(axes) == {row, column} and bare and ends and not bounded and layout.spread(row).between
        return (row, column) if fits and self._chunk_starts(column) else None

    def _chunk_starts(self, column: str) -> list[int]:
        """The first columns of the boxes that a tile leaves in, each 64 wide. None goes beyond the tile, where columns of
        another block are: the last one of a ragged tile shares columns with the one before, whose values are the same. An
        axis in one piece ends where the tensor does. Empty where boxes cannot have it."""
        columns = self.tiles[column]
        starts = list(range(0, columns, CHUNK))
        if columns % CHUNK == 0 or column in self._whole():
            return starts
        return [*starts[:-1], columns - CHUNK] if columns > CHUNK and columns % 8 == 0 else []

    def store_boxes(self, s: Store, box: tuple[str, str]) -> None:
        """Chunks of 64 columns: into the warp's shared memory, then out by the copy engine; one after the other where there
        is no room for all at once, or much to compute: one leaves while the next is computed."""
        row, column = box
        value = self.materialise(s.value)
        layout = self.deal.layout((row, column))
        self.prepare(value, layout)
        param = self.program.param(s.tensor)
        self.output_maps.setdefault(s.tensor, self.names.fresh(f"{s.tensor}_map"))
        self.output_sizes[s.tensor] = (
            *(WARP_ROWS if x == AxisIndex(row) else 1 for x in s.subscripts[:-1]),
            CHUNK,
        )
        if isinstance(value, Cast) and value.dtype is param.dtype:
            value = value.arg  # packing rounds
        self._name_output()
        chunks = [(start, self._place(number)) for number, start in enumerate(self._chunk_starts(column))]
        room, computed = self.staging.output_chunks, not isinstance(value, Name)
        at_once = len(chunks) <= room and not (computed and self._ends_anywhere(column))
        depth = self.text.depth
        for number, part in enumerate([chunks] if at_once else [[c] for c in chunks]):
            if computed and number and self._ends_anywhere(column):
                self._if_inside(column, part[0][0])
            if number in (0, *range(room, len(chunks))):
                self._read_from(min(number, room - 1))
            for start, place in part:
                self._fill_chunk(value, layout, row, column, start, place, param.dtype)
            self._leave(s, part, row)
            self.text.depth = depth

    def _ends_anywhere(self, column: str) -> bool:
        """Is it known at run time alone where columns end?"""
        return column not in self._whole()

    def _if_inside(self, column: str, start: int) -> None:
        """What follows is left out where the tensor ends before a chunk. The branch matters to the others as well: without
        one the assembler would compute all chunks before the first of them leaves."""
        end = self.emit(self.live[column].extent, NOWHERE).operand
        self.text.line(f"if {self.axis_names[column].first} + {start} < {end}:")
        self.text.depth += 1

    def _read_from(self, left: int) -> None:
        """Wait until all but so many groups of boxes have been read. The other lanes wait at their next matrix."""
        self.text.line("if first_lane:")
        self.text.line(f"    boxes_read_{left}()")

    def _leave(self, s: Store, chunks: Iterable[tuple[int, str]], row: str) -> None:
        """Each of these chunks as a box of the warp."""
        self.text.line("publish_shared()")
        self.text.line("meet_warp()")
        self.text.line("if first_lane:")
        for start, place in chunks:
            where = self.box_place(s.subscripts, start, row, f"warp * {WARP_ROWS}")
            to = f"{self.output_maps[s.tensor]}_at, {place}, {where}"
            self.text.line(f"    store_box_{len(s.subscripts)}d({to})")
        self.text.line("    commit_boxes()")

    def _name_output(self) -> None:
        """Where a warp's rows of a slot lie, if results leave there: once all of its warpgroup have done with the slot."""
        ring = self.staging.through
        if ring is not None:
            self.text.line(f"meet({LEAVING} + warpgroup, 128)")
            slot = f" + {self.slots[ring]} * {ring.slot_bytes}" if ring.stages > 1 else ""
            self.text.line(f"output = i32(shared + {ring.start}{slot} + warp * {WARP_ROWS * ROW_BYTES})")

    def _place(self, number: int) -> str:
        """Where a chunk waits."""
        ring, number = self.staging.through, number % self.staging.output_chunks
        each = OUTPUT_BYTES // WARPS if ring is None else ring.boxes[0].chunk_bytes
        return f"output + {number * each}"

    def _fill_chunk(
        self, value: Expr, layout: Layout, row: str, column: str, start: int, place: str, dtype: DType
    ) -> None:
        """Four blocks of 16 columns, each four 8 x 8 matrices: two of rows, two of columns."""
        left = min(CHUNK, self.tiles[column] - start)
        quarter = self.names.fresh("quarter")
        self.text.line(f"for {quarter} in range({-(-left // STEP)}):")
        with self.text.indented():
            words = []
            for block in (0, 1):
                for half in (0, 1):
                    pair = []
                    for lane in (0, 1):
                        number = f"({start // 4} + 4 * {quarter} + {2 * block + lane})"
                        if (
                            self.tiles[column] % STEP
                        ):  # the last block is no column of the tensor: any value does
                            number = f"min({number}, {self.tiles[column] // 4 - 1})"
                        at = Point(layout, {row: str(half), column: number})
                        self._point(value, at)
                        pair.append(self.emit(value, at).text)
                    word = self.names.fresh("word")
                    self.text.line(f"{word} = pack_{dtype}({', '.join(pair)})")
                    words.append(word)
            unit = f"((2 * {quarter} + matrix_column) ^ matrix_turn) << 4"
            self.text.line(f"store_matrices({place} + matrix_row + ({unit}), {', '.join(words)})")

    def _point(self, value: Expr, at: Point) -> None:
        """Index and existence of the axes that an element's code names, under names of its own: two elements go into one
        word."""
        indexed, spanned = self._axes_needed([value])
        for axis in at.layout.axes:
            if axis in indexed or axis in spanned:
                self.renew(axis)
            self._index(at, axis, axis in indexed, axis in spanned)
