"""Results of tier `wgmma` on their way out: through shared memory and the copy engine where they are 16 bits wide."""

from __future__ import annotations

from ...dsl.types import DType
from ..tile_ir import AxisIndex, Cast, Expr, Stmt, Store, subexpressions
from .deal import Layout
from .roles import ROWS
from .simt_source import Point
from .staging import CHUNK, ROW_BYTES
from .warpgroup_loops import Loops
from .warpgroup_products import STEP

FIRST_BARRIER = 1  # named barriers of the warpgroups; 0 is the block's
THREADS = 128  # of a warpgroup


class Results(Loops):
    """The computing role's stores."""

    def _give_names(self) -> None:
        super()._give_names()
        self.output_sizes: dict[str, tuple[int, ...]] = {}  # of boxes that leave, by tensor

    # ------------------------------------------------------------ results

    def block(self, body: tuple[Stmt, ...]) -> None:
        super().block(body)
        if any(isinstance(s, Store) for s in body):
            self.finish()
            for ring in [r for r in self.slots if not r.looped]:
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
        inside = all(
            self.covers(x, n)
            for x, n in zip(s.subscripts, param.shape, strict=True)
            if isinstance(x, AxisIndex) and x.axis in spanned
        )
        fits = set(axes) == {row, column} and bare and inside and not bounded and layout.spread(row).between
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
        """A chunk of 64 columns at a time: into the warpgroup's shared memory, then out by the copy engine."""
        row, column = box
        value = self.materialise(s.value)
        layout = self.deal.layout((row, column))
        self.prepare(value, layout)
        param = self.program.param(s.tensor)
        self.output_maps.setdefault(s.tensor, self.names.fresh(f"{s.tensor}_map"))
        self.output_sizes[s.tensor] = (
            *(ROWS if x == AxisIndex(row) else 1 for x in s.subscripts[:-1]),
            CHUNK,
        )
        if isinstance(value, Cast) and value.dtype is param.dtype:
            value = value.arg  # packing rounds
        for chunk, start in enumerate(self._chunk_starts(column)):
            self.text.line("if leader:")
            self.text.line(
                f"    boxes_read_{min(chunk, 1)}()"
            )  # two buffers, the first free for the first chunk
            self.text.line(f"meet({FIRST_BARRIER} + warpgroup, {THREADS})")
            buffer = f"output + {(chunk & 1) * ROWS * ROW_BYTES}"
            self._fill_chunk(value, layout, row, column, start, buffer, param.dtype)
            self.text.line("publish_shared()")
            self.text.line(f"meet({FIRST_BARRIER} + warpgroup, {THREADS})")
            where = self.box_place(
                s.subscripts, start, row, f"warpgroup * {ROWS}" if self.warpgroups > 1 else ""
            )
            self.text.line("if leader:")
            self.text.line(
                f"    store_box_{len(param.shape)}d({self.output_maps[s.tensor]}_at, {buffer}, {where})"
            )
            self.text.line("    commit_boxes()")

    def _fill_chunk(
        self, value: Expr, layout: Layout, row: str, column: str, start: int, buffer: str, dtype: DType
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
            self.text.line(f"store_matrices({buffer} + matrix_row + ({unit}), {', '.join(words)})")

    def _point(self, value: Expr, at: Point) -> None:
        """Index and existence of the axes that an element's code names."""
        indexed, spanned = self._axes_needed([value])
        for axis in at.layout.axes:
            self._index(at, axis, axis in indexed, axis in spanned)
