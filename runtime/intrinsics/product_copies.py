"""Copies of the operands of a product, in the order in which a block of accumulators reads them.

Rows of a go into slivers: the elements of one column of `SLIVER` rows lie together, column after column, so that a block
reads one stream at fixed distances. Columns of b go into panels as wide as a block, row after row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llvmlite import ir

from ...dsl.records import dataclass
from .matrices import Builder, Side, i64, moved, routine, steps
from .vectors import I8, I32, I64, REGISTER_BYTES, call, read_dense, suffix, write_dense

SLIVER = 6
"""Rows of a sliver: those of the greatest block of accumulators."""
COPIED_ROWS = 192
"""Rows of a that are copied at a time: of 256 to 384 columns, they leave room in a second cache of 512 KB."""
TOGETHER = 64
"""Columns of b that are copied at a time: neighbouring lines, which come faster than one from each row."""
ROWS_AHEAD = 4
"""The copy of a row asks for the row so far below: that often lies on a page where the processor asks for nothing."""
LINE = 64
"""Bytes of a cache line."""
GROUP_BYTES = 16
"""Vectors of 32 and 64 bytes are interleaved in groups of so many bytes."""


def multiple(b: Builder, x: Any, of: int) -> Any:
    """x, rounded up to a multiple."""
    return b.mul(b.udiv(b.add(x, i64(of - 1)), i64(of)), i64(of))


def least(b: Builder, x: Any, y: Any) -> Any:
    return call(b, "llvm.smin.i64", I64, [x, y])


def prefetch(b: Builder, address: Any) -> None:
    """Ask for the cache line at an address, which need not exist."""
    words = [ir.Constant(I32, x) for x in (0, 3, 1)]  # to read, to all caches, data
    call(b, "llvm.prefetch.p0", ir.VoidType(), [address, *words])


def size_of(t: Any) -> int:
    """Bytes of an LLVM element type."""
    return 8 if t == ir.DoubleType() else 4 if t == ir.FloatType() else max(1, int(t.width) // 8)


def as_it_lies(
    b: Builder, given: Side, size: Any, along: Way, across: Way, singly: Callable[[], None]
) -> None:
    """Code for a matrix whose rows are dense, one whose columns are, and any other, asked at run time."""
    with b.if_else(b.icmp_signed("==", given.column, size)) as (dense, other):
        with dense:
            along(Side(given.address, given.row, size))
        with other, b.if_else(b.icmp_signed("==", given.row, size)) as (turned, sparse):
            with turned:
                across(Side(given.address, size, given.column))
            with sparse:
                singly()


Way = Callable[[Side], None]


@dataclass(frozen=True)
class Left:
    """The operand whose elements are taken one at a time: a matrix, or its copy in slivers, whose `row` is then a row's
    share of a sliver. `unseen`: is it read for the first time? None where that is all the same."""

    side: Side
    in_slivers: bool = False
    unseen: Any = None

    def block(self, b: Builder, first: Any, rows: int) -> Side:
        """Rows from `first` on, at most so many: in one sliver, where the copy is in slivers."""
        s = self.side
        if not self.in_slivers:
            return s.at(b, first, i64(0))
        place = moved(b, s.address, first, s.row)
        if rows < SLIVER:
            within = b.urem(first, i64(SLIVER))
            whole = b.sub(first, within)
            place = moved(b, s.address, whole, s.row, within, s.column)
        return Side(place, s.column, i64(SLIVER * s.column.constant))

    def moved(self, b: Builder, count: Any, distance: Any) -> Left:
        s = self.side
        return replace(self, side=replace(s, address=moved(b, s.address, count, distance)))


@dataclass(frozen=True)
class Slivers:
    """Copies rows of elements of LLVM type `t` into slivers. What a last sliver has beyond the rows is left as it was or
    repeats a row: no result is computed from it."""

    t: Any

    @property
    def size(self) -> int:
        return size_of(self.t)

    @property
    def lanes(self) -> int:
        return REGISTER_BYTES // self.size

    def copy(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Slivers `SLIVER * to.row` bytes apart from [rows, columns] of `given`."""
        routine(b, f"slivers.{suffix(self.t)}", [to, given], counts, self._copy)

    def _copy(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """The way that suits how the source lies, asked at run time."""
        to, given = sides
        as_it_lies(
            b, given, i64(self.size),
            lambda dense: self.along(b, to, dense, counts),
            lambda turned: self.across(b, to, turned, counts),
            lambda: self.singly(b, to, given, i64(0), i64(0), counts),
        )  # fmt: skip

    def place(self, b: Builder, to: Side, row: Any, column: Any) -> Any:
        """Where the first element of a column of the sliver that starts with `row` lies."""
        return moved(b, to.address, row, to.row, column, i64(SLIVER * self.size))

    def along(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Rows lie densely: a vector of each row of a sliver is interleaved with the others."""
        rows, columns = counts
        with steps(b, i64(0), multiple(b, rows, SLIVER), SLIVER) as first:
            last = b.sub(rows, i64(1))
            lines = [given.at(b, least(b, b.add(first, i64(r)), last), i64(0)) for r in range(SLIVER)]
            with steps(b, i64(0), columns, self.lanes) as c:
                below = b.mul(given.row, i64(SLIVER))
                vectors = []
                for line in lines:
                    at = line.at(b, i64(0), c).address
                    prefetch(b, b.gep(at, [below], source_etype=I8))
                    vectors.append(read_dense(b, at, self.t, self.lanes, None))
                self.interleaved(b, vectors, self.place(b, to, first, c))
            c = b._last_index
            height = least(b, b.sub(rows, first), i64(SLIVER))
            with b.if_then(b.icmp_signed("<", c, columns)):
                self.singly(b, to, given, first, c, [b.add(first, height), columns])

    def interleaved(self, b: Builder, rows: list[Any], to: Any) -> None:
        """Store the columns of as many vectors as a sliver has rows, in pieces of a power of two of them."""
        group, first = GROUP_BYTES // self.size, 0
        while first < len(rows):
            height = min(group, 1 << (len(rows) - first).bit_length() - 1)
            self.pieces(b, transposed_groups(b, rows[first : first + height], group), to, first)
            first += height

    def pieces(self, b: Builder, vectors: list[Any], to: Any, first: int) -> None:
        """Store parts of columns, from row `first` on of their sliver, as `transposed_groups` gives them."""
        height, group = len(vectors), GROUP_BYTES // self.size
        each = group // height
        for column in range(self.lanes):
            number, within = divmod(column, group)
            lane = number * group + within % each * height
            lanes = [ir.Constant(I32, lane + i) for i in range(height)]
            source = vectors[within // each]
            piece = b.shuffle_vector(source, source, ir.Constant(ir.VectorType(I32, height), lanes))
            offset = (column * SLIVER + first) * self.size
            write_dense(b, piece, b.gep(to, [i64(offset)], source_etype=I8))

    def across(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Columns lie densely: what a sliver has of each is copied as it lies."""
        rows, columns = counts
        with steps(b, i64(0), columns, 1) as c:
            line = given.at(b, i64(0), c)
            below = line.at(b, i64(0), i64(ROWS_AHEAD)).address
            with steps(b, i64(0), rows, SLIVER) as first:
                at, out = line.at(b, first, i64(0)).address, self.place(b, to, first, c)
                prefetch(b, moved(b, below, first, i64(self.size)))
                for start, count in ((0, 4), (4, 2)):
                    here = i64(start * self.size)
                    piece = read_dense(b, b.gep(at, [here], source_etype=I8), self.t, count, None)
                    write_dense(b, piece, b.gep(out, [here], source_etype=I8))
        self.singly(b, to, given, b.sub(rows, b.urem(rows, i64(SLIVER))), i64(0), counts)

    def singly(self, b: Builder, to: Side, given: Side, first: Any, column: Any, counts: list[Any]) -> None:
        """Element by element, from a row that starts a sliver and a column on."""
        rows, columns = counts
        with steps(b, first, rows, 1) as r:
            within = b.urem(r, i64(SLIVER))
            sliver = b.sub(r, within)
            with steps(b, column, columns, 1) as c:
                x = b.load(
                    b.bitcast(given.at(b, r, c).address, self.t.as_pointer()), typ=self.t, align=self.size
                )
                out = moved(b, self.place(b, to, sliver, c), within, i64(self.size))
                b.store(x, b.bitcast(out, self.t.as_pointer()), align=self.size)


def transposed_groups(b: Builder, rows: list[Any], group: int) -> list[Any]:
    """Of s rows, s vectors in each group of whose lanes `group // s` columns of that group stand one after another, those of
    the first vector first."""
    if len(rows) == 1:
        return rows
    pairs = zip(*(transposed_groups(b, rows[i::2], group) for i in (0, 1)), strict=True)
    return [v for x, y in pairs for v in (_interleaved(b, x, y, group, half) for half in (0, 1))]


def _interleaved(b: Builder, x: Any, y: Any, group: int, half: int) -> Any:
    """The first or second halves of each group of lanes, elements of x and y in turn."""
    lanes = x.type.count
    places = []
    for start in range(0, lanes, group):
        for i in range(group // 2):
            lane = start + half * (group // 2) + i
            places += [lane, lanes + lane]
    return b.shuffle_vector(
        x, y, ir.Constant(ir.VectorType(I32, lanes), [ir.Constant(I32, p) for p in places])
    )


@dataclass(frozen=True)
class Panels:
    """Copies columns into panels of `wide` vectors; `pack` copies a matrix to one with dense columns."""

    pack: Any
    wide: int

    def copy(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Panels `to.row` bytes apart whose rows are `to.column` apart, from [rows, columns] of `given`; columns that fill
        no panel go to one by themselves."""
        pack, size = self.pack, i64(size_of(self.pack.source))
        name = f"panels.{pack.source}.{pack.t}.{pack.widen.__name__}"
        if pack.runs_along(given):
            routine(b, name, [to, given], counts, self._copy)
        elif isinstance(given.column, ir.Constant):
            self.singly(b, to, given, counts)
        else:
            with b.if_else(b.icmp_signed("==", given.column, size)) as (dense, other):
                with dense:
                    routine(b, name, [to, given], counts, self._copy)
                with other:
                    self.singly(b, to, given, counts)

    def singly(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """One panel after another."""
        pack, (rows, columns), count = self.pack, counts, self.wide * self.pack.lanes
        with steps(b, i64(0), b.add(columns, i64(count - 1)), count) as c:
            place = moved(b, to.address, b.udiv(c, i64(count)), to.row)
            width = least(b, b.sub(columns, c), i64(count))
            pack.call(b, Side(place, to.column, i64(size_of(pack.t))), given.at(b, i64(0), c), [rows, width])

    def _copy(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        pack, (to, given), (rows, columns) = self.pack, sides, counts
        given = Side(given.address, given.row, i64(size_of(pack.source)))
        count = self.wide * pack.lanes
        size = size_of(pack.t)
        with steps(b, i64(0), rows, 1) as r:
            line, out = given.at(b, r, i64(0)), moved(b, to.address, r, to.column)
            with steps(b, i64(0), columns, count) as c:
                at = line.at(b, i64(0), c)
                place = moved(b, out, b.udiv(c, i64(count)), to.row)
                below = at.at(b, i64(ROWS_AHEAD), i64(0)).address
                for there in range(0, count * size_of(pack.source), LINE):
                    prefetch(b, b.gep(below, [i64(there)], source_etype=I8))
                vectors = [
                    pack.read(b, at.at(b, i64(0), i64(v * pack.lanes)), None) for v in range(self.wide)
                ]
                for v, x in enumerate(vectors):
                    write_dense(b, x, b.gep(place, [i64(v * pack.lanes * size)], source_etype=I8))
        left = b.urem(columns, i64(count))
        with b.if_then(b.icmp_signed("!=", left, i64(0))):
            whole = b.sub(columns, left)
            place = moved(b, to.address, b.udiv(columns, i64(count)), to.row)
            pack.call(b, Side(place, to.column, i64(size)), given.at(b, i64(0), whole), [rows, left])
