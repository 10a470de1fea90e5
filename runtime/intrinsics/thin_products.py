"""Products of which one side is short: nothing is used often enough to be copied or kept in registers, and what counts is
that memory is read in order, once.

`stream` adds whole rows of b to rows of c, `dots` multiplies rows of both operands lane by lane. Both take rows and columns
in turn for what they are called after, so that a matrix that lies turned is a matrix of another name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from ...dsl.records import dataclass
from .matrices import Builder, Side, folded_steps, i64, routine, steps
from .product_copies import LINE, prefetch
from .vectors import (
    I8,
    REGISTER_BYTES,
    broadcast,
    call,
    constant,
    first_lanes,
    folded,
    is_float,
    read_dense,
    suffix,
    write_dense,
)

ROWS_TOGETHER = 8
"""So many rows of b are added to a row of c at a time."""
TOGETHER_OF_TWO = 4
"""So many rows of b are added to two rows of c at a time."""
STREAMED_TOGETHER = 8
"""So many vectors of a single row of c at a time: with 2, memory came 3 to 10% slower (AVX2, rows of 1,000 to 16,384
columns, a trial in turn)."""
LONG = 16
"""Steps from which on it is worth while to clear c first."""
DOTS_TOGETHER, VECTORS_TOGETHER = 4, 2
"""So many rows are multiplied with one at a time, so many vectors of each."""


@dataclass(frozen=True)
class Thin:
    """Thin products of LLVM element type `t`."""

    t: Any

    @property
    def size(self) -> int:
        return (
            8
            if self.t == ir.DoubleType()
            else 4
            if self.t == ir.FloatType()
            else max(1, int(self.t.width) // 8)
        )

    @property
    def lanes(self) -> int:
        return REGISTER_BYTES // self.size

    @property
    def vector(self) -> Any:
        return ir.VectorType(self.t, self.lanes)

    def dense(self, s: Side) -> Side:
        """The matrix, whose columns the caller knows to be dense."""
        return Side(s.address, s.row, i64(self.size))

    # -- rows of b added to rows of c

    def stream(self, b: Builder, c: Side, a: Side, right: Side, counts: list[Any]) -> None:
        """c (+)= a · right, columns of c and right dense."""
        routine(b, f"stream.{suffix(self.t)}", [c, a, right], counts, self._stream)

    def _stream(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        c, a, right = self.dense(sides[0]), sides[1], self.dense(sides[2])
        m, n, k, fresh = counts
        several = b.and_(b.icmp_signed(">", m, i64(1)), b.icmp_signed(">=", k, i64(LONG)))
        with b.if_then(b.and_(fresh, b.or_(several, b.icmp_signed("==", k, i64(0))))):
            self.clear(b, c, m, n)
        sets = b.and_(fresh, b.not_(several))
        done = b.select(several, b.sub(k, b.urem(k, i64(TOGETHER_OF_TWO))), i64(0))
        self.pairs(b, (c, a, right), m, n, done)
        for group in (ROWS_TOGETHER, 1):
            with steps(b, done, k, group) as step:
                first = b.and_(sets, b.icmp_signed("==", step, i64(0)))
                with steps(b, i64(0), m, 1) as i:
                    row, left, rows = c.at(b, i, i64(0)), a.at(b, i, step), right.at(b, step, i64(0))
                    with b.if_else(first) as (then, otherwise):
                        with then:
                            self.add_rows(b, row, left, rows, (1, group), n, True)
                        with otherwise:
                            self.add_rows(b, row, left, rows, (1, group), n, False)
            done = b._last_index

    def clear(self, b: Builder, c: Side, m: Any, n: Any) -> None:
        """c = 0."""
        with steps(b, i64(0), m, 1) as i:
            self.along(
                b,
                c.at(b, i, i64(0)),
                n,
                lambda at, j, mask: write_dense(b, constant(self.vector, 0), at.address, mask),
            )

    def pairs(self, b: Builder, sides: tuple[Side, Side, Side], m: Any, n: Any, end: Any) -> None:
        """c += a · right over the rows of `right` before `end`, a few of them for two rows of c at a time: where rows lie
        2^n bytes apart, a set of the first cache holds no more."""
        c, a, right = sides
        group = TOGETHER_OF_TWO
        with steps(b, i64(0), end, group) as step:
            rows, following = right.at(b, step, i64(0)), right.at(b, b.add(step, i64(group)), i64(0))
            i = i64(0)
            for tall in (2, 1):
                with steps(b, i, m, tall) as i:
                    # four rows of c that take their turns ask for all of the next rows
                    half = b.udiv(i, i64(2))
                    ahead = [following.at(b, b.add(half, i64(r)), i64(0)) for r in (0, group // 2)]
                    self.add_rows(
                        b, c.at(b, i, i64(0)), a.at(b, i, step), rows, (tall, group), n, False, ahead
                    )
                i = b._last_index

    def add_rows(
        self,
        b: Builder,
        c: Side,
        a: Side,
        right: Side,
        shape: tuple[int, int],
        n: Any,
        sets: bool,
        ahead: Sequence[Side] = (),
    ) -> None:
        """c[i] (+)= Σ a[i, u] · right[u] for so many rows of c and of `right`; rows `ahead` are asked for on the way."""
        tall, group = shape
        left = [[self.spread(b, a.at(b, i64(i), i64(u))) for u in range(group)] for i in range(tall)]

        def add(at: Side, column: Any, mask: Any) -> None:
            places = [at.at(b, i64(i), i64(0)).address for i in range(tall)]
            totals = [
                constant(self.vector, 0) if sets else read_dense(b, p, self.t, self.lanes, mask)
                for p in places
            ]
            for u in range(group):
                y = read_dense(b, right.at(b, i64(u), column).address, self.t, self.lanes, mask)
                totals = [multiply_add(b, x[u], y, total) for x, total in zip(left, totals, strict=True)]
            for p, total in zip(places, totals, strict=True):
                write_dense(b, total, p, mask)

        self.along(b, c, n, add, ahead, VECTORS_TOGETHER if tall > 1 else STREAMED_TOGETHER)

    def along(
        self,
        b: Builder,
        row: Side,
        n: Any,
        body: Callable[[Side, Any, Any], None],
        ahead: Sequence[Side] = (),
        most: int = VECTORS_TOGETHER,
    ) -> None:
        """Visit a row by vectors, so many at a time, the last one through a mask, and ask for the same columns of others."""
        j = i64(0)
        for together in (most, 1):
            count = together * self.lanes
            with steps(b, j, n, count) as j:
                for other in ahead if together > 1 else ():
                    for line in range(0, count * self.size, LINE):
                        prefetch(b, b.gep(other.at(b, i64(0), j).address, [i64(line)], source_etype=I8))
                for v in range(together):
                    column = b.add(j, i64(v * self.lanes))
                    body(row.at(b, i64(0), column), column, None)
            j = b._last_index
        with b.if_then(b.icmp_signed("<", j, n)):
            body(row.at(b, i64(0), j), j, first_lanes(b, b.sub(n, j), self.lanes))

    def spread(self, b: Builder, at: Side) -> Any:
        """An element in all lanes."""
        return broadcast(b, self.element(b, at), self.lanes)

    def element(self, b: Builder, at: Side) -> Any:
        return b.load(b.bitcast(at.address, self.t.as_pointer()), typ=self.t, align=self.size)

    # -- rows of a multiplied with rows of b

    def dots(self, b: Builder, c: Side, a: Side, right: Side, counts: list[Any]) -> None:
        """c (+)= a · rightᵀ, columns of a and right dense."""
        routine(b, f"dots.{suffix(self.t)}", [c, a, right], counts, self._dots)

    def _dots(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        c, a, right = sides[0], self.dense(sides[1]), self.dense(sides[2])
        m, n, k, fresh = counts
        done = i64(0)
        for rows in (DOTS_TOGETHER, 1):
            with steps(b, done, m, rows) as i, steps(b, i64(0), n, 1) as j:
                totals = self.sums(b, a.at(b, i, i64(0)), right.at(b, j, i64(0)), rows, k)
                for r, total in enumerate(totals):
                    self.put(b, c.at(b, b.add(i, i64(r)), j), total, fresh)
            done = b._last_index

    def sums(self, b: Builder, a: Side, right: Side, rows: int, k: Any) -> list[Any]:
        """Σ a[r, :k] · right[0, :k] for each of the rows, several sums of each on the way; what is left over goes by a
        masked vector."""

        def take(together: int, mask: Any, at: Any, sums: list[Any]) -> list[Any]:
            left, across = a.at(b, i64(0), at), right.at(b, i64(0), at)
            return self.multiplied(b, left, across, sums, together, mask)

        at, sums = i64(0), [constant(self.vector, 0)] * (rows * VECTORS_TOGETHER)
        for together in (VECTORS_TOGETHER, 1):
            at, sums = folded_steps(b, at, k, together * self.lanes, sums, partial(take, together, None))
        sums = take(1, first_lanes(b, b.sub(k, at), self.lanes), at, sums)
        return [folded(b, self.sum(b, sums[r::rows]), "sum") for r in range(rows)]

    def multiplied(
        self, b: Builder, a: Side, right: Side, sums: list[Any], together: int, mask: Any
    ) -> list[Any]:
        """The sums, row by row for each vector, with the products of so many vectors added."""
        rows, out = len(sums) // VECTORS_TOGETHER, list(sums)
        for v in range(together):
            there = i64(v * self.lanes)
            y = read_dense(b, right.at(b, i64(0), there).address, self.t, self.lanes, mask)
            for r in range(rows):
                x = read_dense(b, a.at(b, i64(r), there).address, self.t, self.lanes, mask)
                out[v * rows + r] = multiply_add(b, x, y, out[v * rows + r])
        return out

    def sum(self, b: Builder, vectors: list[Any]) -> Any:
        total = vectors[0]
        for x in vectors[1:]:
            total = b.fadd(total, x) if is_float(x.type) else b.add(total, x)
        return total

    def put(self, b: Builder, at: Side, total: Any, fresh: Any) -> None:
        """Write an element, or add to it."""
        pointer = b.bitcast(at.address, self.t.as_pointer())
        with b.if_else(fresh) as (then, otherwise):
            with then:
                b.store(total, pointer, align=self.size)
            with otherwise:
                b.store(self.sum(b, [self.element(b, at), total]), pointer, align=self.size)


def multiply_add(b: Builder, x: Any, y: Any, z: Any) -> Any:
    if not is_float(x.type):
        return b.add(b.mul(x, y), z)
    return call(b, f"llvm.fma.{suffix(x.type)}", x.type, [x, y, z])
