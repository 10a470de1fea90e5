"""Products of tiles and the copies that ready their operands, each one LLVM function that a generated module calls.

An operand is a `Matrix` (see `matrices`).

`multiply(c, a, b, m, n, k, fresh)` keeps a block of `c` in registers, one accumulator for each of its vectors, while it
walks along k: rows of `b` are loaded as vectors, elements of `a` one at a time into all lanes (K. Goto and R. van de Geijn,
"Anatomy of High-Performance Matrix Multiplication", 2008). Every element of `c` is summed in order of k, whatever block
it falls into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...dsl.records import dataclass
from .matrices import Matrix, Side, folded_steps, routine
from .matrices import call_once as _call_once
from .matrices import i64 as _i64
from .matrices import moved as _moved
from .matrices import steps as _steps
from .product_copies import (
    COPIED_ROWS,
    LINE,
    SLIVER,
    TOGETHER,
    Left,
    Panels,
    Slivers,
    as_it_lies,
    least,
    multiple,
    prefetch,
)
from .product_copies import size_of as _size
from .thin_products import Thin, multiply_add
from .vectors import (
    I8,
    I32,
    I64,
    REGISTER_BYTES,
    broadcast,
    call,
    constant,
    first_lanes,
    read_apart,
    read_dense,
    write_apart,
    write_dense,
)

Builder = Any
Masks = tuple[Any, ...]
"""Of the vectors of a block, left to right; None: all lanes."""


@dataclass(frozen=True)
class Blocking:
    """Blocks of accumulators: `rows` of the blocks of `wide` vectors in a row, and of those of one vector (`narrow`), which
    take the columns left over, greatest first; of these columns two vectors at a time and `double` rows where there are as
    many (0: none are so wide). Loops along k take `unroll` steps at a time."""

    rows: tuple[int, ...]
    wide: int
    narrow: tuple[int, ...]
    double: int = 0
    unroll: int = 4

    def heights(self, vectors: int, in_slivers: bool) -> tuple[int, ...]:
        """Rows of the blocks of so many vectors, greatest first; of those in slivers none is higher."""
        every = {1: self.narrow, 2: (self.double,), self.wide: self.rows}[vectors]
        if not in_slivers or every[0] == SLIVER:
            return every
        return (SLIVER, *(x for x in every if x < SLIVER))


BLOCKS = {
    64: Blocking((6, 4, 2, 1), 4, (16, 4, 1), 8),
    32: Blocking((6, 4, 2, 1), 2, (6, 1)),
    16: Blocking((6, 4, 2, 1), 2, (6, 1)),
}
"""By bytes of a register. A block of r x w accumulators costs r·w + r + w instructions a step; of those that fit into 32
registers with what they wait for 6 x 4 costs fewest a product, of those that fit into 16, 6 x 2."""
IN_FLIGHT = 8
"""Two multiply-adds start in a clock, and a sum can be added to after four: blocks of fewer accumulators wait."""
EVEN = (6, 4)
"""Heights of blocks of which two of the second kind take two rows more than one of the first."""
FEW = 8
"""Products of so few rows, columns or steps are thin: no operand is copied."""
ASKING = 8
"""Steps along k after which a block asks for memory."""


# ---------------------------------------------------------------- products


@dataclass(frozen=True)
class Stack:
    """Matrices c and a, so many of each and so many bytes apart, to be multiplied with one b: its panels are copied once."""

    count: Any = None
    c_apart: Any = None
    a_apart: Any = None


@dataclass(frozen=True)
class Chain:
    """Matrices a and b, so many of each, of `length` steps and so many bytes apart, whose products are added up: copied one
    after another they are one product of more steps."""

    count: Any = None
    length: Any = None
    a_apart: Any = None
    b_apart: Any = None


@dataclass(frozen=True)
class _Part:
    """Some rows of a product: the first, how many, their operand and the stack whose matrices have them. `copies` where the
    panels are still to be copied, `several` where other parts use the copies too (None: there are no parts)."""

    first: Any
    rows: Any
    left: Left
    stack: Stack | None
    copies: Any = None
    several: Any = None


@dataclass(frozen=True)
class _Product:
    """Writes `c (+)= a · b` for element type `t`. `pack` readies panels of b, which then lies anywhere; without it b's
    columns are dense."""

    t: Any
    pack: _Pack | None
    blocks: Blocking
    stack: Stack | None = None
    chain: Chain | None = None
    whole: bool = False
    """Are there as many columns as fill panels?"""

    @property
    def lanes(self) -> int:
        return REGISTER_BYTES // _size(self.t)

    @property
    def vector(self) -> Any:
        return ir.VectorType(self.t, self.lanes)

    @property
    def no_masks(self) -> Masks:
        """Those of a whole panel."""
        return (None,) * self.blocks.wide

    @property
    def several(self) -> bool:
        return self.stack is not None or self.chain is not None

    def of_several(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """`body` for matrices that are stacked or chained; what `Stack` and `Chain` say stands behind the other counts."""
        (m, n, k, fresh), rest, made = counts[:4], counts[4:], self
        if self.stack is not None:
            stacked, c_apart, a_apart = rest[:3]
            pairs = ((sides[0].row, c_apart), (sides[1].row, a_apart))
            tall = b.and_(*(b.icmp_signed("==", apart, b.mul(m, row)) for row, apart in pairs))
            made = replace(made, stack=Stack(b.select(tall, _i64(1), stacked), c_apart, a_apart))
            m = b.select(tall, b.mul(m, stacked), m)
        if self.chain is not None:
            made = replace(made, chain=Chain(rest[-3], k, *rest[-2:]))
            k = b.mul(k, rest[-3])
        made.body(b, sides, [m, n, k, fresh])

    def body(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """The way that suits where operands lie and how many rows and columns there are, asked at run time."""
        c, size = sides[0], _i64(_size(self.t))
        done = b.append_basic_block("done")
        if self.pack is not None and self.pack.source == self.t and not self.several:
            self.thin(b, sides, counts, done)
        if _is_known(c.column, size):
            self.panels(b, sides, counts)
        else:
            dense = b.icmp_signed("==", c.column, size)
            with b.if_else(dense) as (then, otherwise):
                with then:
                    self.panels(b, [Side(c.address, c.row, size), *sides[1:]], counts)
                with otherwise:
                    self.singly(b, sides, counts)
        b.branch(done)
        b.position_at_end(done)

    def thin(self, b: Builder, sides: list[Side], counts: list[Any], done: Any) -> None:
        """Products of a few rows, columns or steps: nothing is copied but what is short and lies across."""
        thin, (c, a, right), (m, n, k, fresh) = Thin(self.t), sides[:3], counts
        few_m, few_n, few_k = (b.icmp_signed("<=", x, _i64(FEW)) for x in (m, n, k))
        size = _i64(_size(self.t))

        def is_dense(distance: Any) -> Any:
            return b.icmp_signed("==", distance, size)

        def row_dots() -> None:
            thin.dots(b, c, a, self.along(b, right.turned, sides[3], n, k), [m, n, k, fresh])

        def column_dots() -> None:
            thin.dots(b, c.turned, right.turned, self.along(b, a, sides[3], m, k), [n, m, k, fresh])

        streams = b.and_(b.or_(few_m, few_k), b.and_(is_dense(right.column), is_dense(c.column)))
        turned = b.and_(is_dense(a.row), is_dense(c.row))
        ways: tuple[tuple[Any, Any, Callable[[], None]], ...] = (
            (few_n, is_dense(a.column), row_dots),
            (few_m, is_dense(right.row), column_dots),
            (streams, streams, lambda: thin.stream(b, c, a, right, [m, n, k, fresh])),
            (few_n, turned, lambda: thin.stream(b, c.turned, right.turned, a.turned, [n, m, k, fresh])),
        )
        for few, fits, compute in ways:
            with b.if_then(b.and_(few, fits)):
                compute()
                b.branch(done)

    def along(self, b: Builder, few: Side, space: Side, rows: Any, k: Any) -> Side:
        """A few rows with dense columns: where they lie, or a copy."""
        size = _i64(_size(self.t))
        apart = b.icmp_signed("!=", few.column, size)
        lanes = _i64(self.lanes)
        row = b.mul(b.mul(b.udiv(b.add(k, b.sub(lanes, _i64(1))), lanes), lanes), size)
        copy = Side(space.address, row, size)
        assert self.pack is not None
        with b.if_then(apart):
            self.pack.call(b, copy, few, [rows, k])
        return Side(b.select(apart, copy.address, few.address), b.select(apart, row, few.row), size)

    def panels(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """In each part of the rows, panels of columns, and in each of those blocks of rows; columns left over go by masked
        vectors. All parts read the same panels, which the first of them has copied."""
        c, (_, n, k, fresh), count = sides[0], counts, self.blocks.wide * self.lanes
        whole = b.sub(n, b.srem(n, _i64(count)))
        with self.parts(b, sides, counts) as part:
            out, counted = c.at(b, part.first, _i64(0)), ((_i64(0), part.rows), k, fresh)
            with _steps(b, _i64(0), n, count) as j:
                panel = self.panel(b, sides, j, k, part, whole)
                ahead = self.ahead(b, sides[2].at(b, _i64(0), j), panel, k, part)
                left = replace(part.left, unseen=b.icmp_signed("==", j, _i64(0)))
                self.matrices(b, (out.at(b, _i64(0), j), left, panel), counted, None, ahead, part.stack)
            j = b._last_index
            if not self.whole:
                with b.if_then(b.icmp_signed("<", j, n)):
                    self.vectors(b, [out, *sides[1:]], counts, j, part)

    def singly(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """All columns by masked vectors, for a c whose columns lie apart."""
        count = self.blocks.wide * self.lanes
        with self.parts(b, sides, counts) as part:
            out = sides[0].at(b, part.first, _i64(0))
            with _steps(b, _i64(0), b.add(counts[1], _i64(count - 1)), count) as j:
                self.vectors(b, [out, *sides[1:]], counts, j, part)

    def vectors(self, b: Builder, sides: list[Side], counts: list[Any], j: Any, part: _Part) -> None:
        """The columns from j on, a panel at most: of two vectors together the rows that fill blocks, else vector by vector;
        the last is masked."""
        _, n, k, fresh = counts
        count = _i64(self.blocks.wide * self.lanes)
        width = call(b, "llvm.smin.i64", I64, [b.sub(n, j), count])
        panel, out = (
            self.panel(b, sides, j, k, part, b.add(j, width), single=True),
            sides[0].at(b, _i64(0), j),
        )
        end, paired, tall = b.add(width, _i64(self.lanes - 1)), _i64(0), _i64(0)

        def blocks(v: Any, rows: tuple[Any, Any], vectors: int) -> None:
            last = b.sub(b.sub(width, v), _i64((vectors - 1) * self.lanes))
            masks = (*[None] * (vectors - 1), first_lanes(b, last, self.lanes))
            left = replace(part.left, unseen=b.icmp_signed("==", b.add(j, v), _i64(0)))
            narrow = out.at(b, _i64(0), v), left, panel.at(b, _i64(0), v)
            self.matrices(b, narrow, (rows, k, fresh), masks, None, part.stack)

        if self.blocks.double:
            (height,) = self.blocks.heights(2, part.left.in_slivers)
            tall = b.sub(part.rows, b.urem(part.rows, _i64(height)))
            with _steps(b, _i64(0), end, 2 * self.lanes) as v:
                blocks(v, (_i64(0), tall), 2)
            paired = b._last_index
        with _steps(b, _i64(0), end, self.lanes) as v:
            first = b.select(b.icmp_signed("<", v, paired), tall, _i64(0))
            blocks(v, (first, part.rows), 1)

    # -- the operand whose elements are taken one at a time

    @contextmanager
    def parts(self, b: Builder, sides: list[Side], counts: list[Any]) -> Iterator[_Part]:
        """A loop over parts of the rows whose copy a core's own cache holds; all rows at once where a is read in place."""
        m, _, k, _ = counts
        if len(sides) < 5:
            yield _Part(_i64(0), m, Left(sides[1]), self.stack)
            return
        parts = b.udiv(b.add(m, _i64(COPIED_ROWS - 1)), _i64(COPIED_ROWS))
        several = b.icmp_signed(">", parts, _i64(1))
        even = b.udiv(b.add(m, b.sub(parts, _i64(1))), b.select(several, parts, _i64(1)))
        height = multiple(b, even, SLIVER)
        with _steps(b, _i64(0), parts, 1) as number:
            first = b.mul(number, height)
            rows = least(b, height, b.sub(m, first))
            left, stack = self.copied(b, sides[4], sides[1].at(b, first, _i64(0)), rows, k)
            yield _Part(first, rows, left, stack, b.icmp_signed("==", number, _i64(0)), several)

    def copied(self, b: Builder, space: Side, a: Side, m: Any, k: Any) -> tuple[Left, Stack | None]:
        """Copy a in slivers: those of a stack one below the other, those of a chain as one matrix of more columns."""
        size, stack = _i64(_size(self.t)), self.stack
        row = b.mul(k, size)
        apart = b.mul(multiple(b, m, SLIVER), row)
        to, steps = Side(space.address, row, size), k
        with ExitStack() as loops:
            if stack is not None:
                s = loops.enter_context(_steps(b, _i64(0), stack.count, 1))
                a = replace(a, address=_moved(b, a.address, s, stack.a_apart))
                to = replace(to, address=_moved(b, to.address, s, apart))
            if self.chain is not None:
                p, steps = loops.enter_context(_steps(b, _i64(0), self.chain.count, 1)), self.chain.length
                a = replace(a, address=_moved(b, a.address, p, self.chain.a_apart))
                to = replace(to, address=_moved(b, to.address, b.mul(p, steps), _i64(SLIVER * _size(self.t))))
            Slivers(self.t).copy(b, to, a, [m, steps])
        stack = None if stack is None else replace(stack, a_apart=apart)
        return Left(Side(space.address, row, size), in_slivers=True), stack

    # -- the operand that is read by vectors

    def panel(
        self, b: Builder, sides: list[Side], j: Any, k: Any, part: _Part, end: Any, single: bool = False
    ) -> Side:
        """The panel of b's column j, with dense rows; several whole ones before `end` are copied at a time, or a `single`
        one that may have fewer columns."""
        given = sides[2].at(b, _i64(0), j)
        if self.pack is None:
            return given
        run, columns = _i64(self.run), self.blocks.wide * self.lanes
        stride = b.add(b.mul(k, run), _i64(LINE))  # not 2^n apart, which would be the same sets of a cache
        together = 1 if single else self.together(given)
        number = b.udiv(j, _i64(columns))
        among = b.urem(number, _i64(together))
        place = among if part.several is None else b.select(part.several, number, among)
        room = Side(_moved(b, sides[3].address, place, stride), run, _i64(_size(self.t)))
        due = b.icmp_signed("==", among, _i64(0))
        with b.if_then(due if part.copies is None else b.and_(due, part.copies)):
            width = least(b, b.sub(end, j), _i64(together * columns))
            self.copy_panels(b, Side(room.address, stride, run), given, k, width)
        return room

    def copy_panels(self, b: Builder, to: Side, given: Side, k: Any, width: Any) -> None:
        """Copy columns of b, those of a chain as one matrix of more rows, to panels `to.row` bytes apart, whose rows are
        `to.column` apart."""
        assert self.pack is not None
        panels = Panels(self.pack, self.blocks.wide)
        with ExitStack() as loops:
            if self.chain is not None:
                p, k = loops.enter_context(_steps(b, _i64(0), self.chain.count, 1)), self.chain.length
                given = replace(given, address=_moved(b, given.address, p, self.chain.b_apart))
                to = replace(to, address=_moved(b, to.address, b.mul(p, k), to.column))
            panels.copy(b, to, given, [k, width])

    def ahead(
        self, b: Builder, given: Side, panel: Side, k: Any, part: _Part
    ) -> Callable[[Any], Runs] | None:
        """By rows of c, what to ask for, a share for each block of rows: of the next panel, or where that is still to be
        copied of what it will be copied from, if its rows are dense."""
        if self.pack is None:
            return None
        run, height = _i64(self.run), _i64(self.blocks.rows[0])
        source = given.at(b, _i64(0), _i64(self.together(given) * self.blocks.wide * self.lanes))
        dense = b.icmp_signed("==", given.column, _i64(_size(self.pack.source)))
        copies = dense if part.copies is None else b.and_(dense, part.copies)
        following = _moved(b, panel.address, k, run, _i64(1), _i64(LINE))
        first = b.select(copies, source.address, following)
        distance = b.select(copies, source.row, run)
        blocks = b.add(b.udiv(part.rows, height), _i64(1))
        share = b.udiv(b.add(k, b.sub(blocks, _i64(1))), blocks)

        def wanted(i: Any) -> Runs:
            return Runs(_moved(b, first, b.mul(b.udiv(i, height), share), distance), distance)

        return wanted

    def together(self, given: Side) -> int:
        """How many panels of an operand are copied at a time."""
        assert self.pack is not None
        lies_across = isinstance(given.column, ir.Constant) and not self.pack.runs_along(given)
        return 1 if lies_across else max(1, TOGETHER // (self.blocks.wide * self.lanes))

    @property
    def run(self) -> int:
        """Bytes of a row of a block."""
        return self.blocks.wide * self.lanes * _size(self.t)

    def matrices(
        self,
        b: Builder,
        sides: tuple[Side, Left, Side],
        counts: tuple[tuple[Any, Any], Any, Any],
        masks: Masks | None,
        ahead: Callable[[Any], Runs] | None,
        stack: Stack | None,
    ) -> None:
        """The rows of each matrix of a stack."""
        if stack is None:
            self.rows(b, sides, counts, masks, ahead)
            return
        c, a, panel = sides
        with _steps(b, _i64(0), stack.count, 1) as s:
            out = replace(c, address=_moved(b, c.address, s, stack.c_apart))
            self.rows(b, (out, a.moved(b, s, stack.a_apart), panel), counts, masks, ahead)

    def rows(
        self,
        b: Builder,
        sides: tuple[Side, Left, Side],
        counts: tuple[tuple[Any, Any], Any, Any],
        masks: Masks | None,
        ahead: Callable[[Any], Runs] | None,
    ) -> None:
        """Blocks of the rows from the first to the last of `counts`: of whole panels, or with masks of fewer vectors."""
        c, a, right = sides
        (done, m), k, fresh = counts
        wide = self.blocks.wide if masks is None else len(masks)
        heights = self.blocks.heights(wide, a.in_slivers)
        even = self.pack is None and heights[:2] == EVEN and 2 * wide < IN_FLIGHT
        for height in heights if not even else (*EVEN, 1):
            end = _in_even_blocks(b, m) if even and height == heights[0] else m
            with _steps(b, done, end, height) as i:
                wanted = None
                if self.pack is not None and masks is None and height == heights[0]:
                    beneath = Runs(c.at(b, b.add(i, _i64(height)), _i64(0)).address, c.row)
                    wanted = (beneath, ahead(i) if ahead is not None else beneath)
                operands = a.block(b, i, height), right
                coming = self.coming(b, a, i, height, (m, k)) if height == heights[0] else None
                places = self.places(b, c.at(b, i, _i64(0)), height, wide)
                self.block(b, places, operands, (k, fresh), masks or self.no_masks, wanted, coming)
            done = b._last_index

    def places(self, b: Builder, c: Side, rows: int, wide: int) -> list[Side]:
        """The vectors of a block, row by row."""
        return [c.at(b, _i64(i), _i64(v * self.lanes)) for i in range(rows) for v in range(wide)]

    def read(self, b: Builder, at: Side, mask: Any) -> Any:
        """A vector of c."""
        if _is_known(at.column, _i64(_size(self.t))):
            return read_dense(b, at.address, self.t, self.lanes, mask)
        return read_apart(b, at.address, at.column, self.t, self.lanes, mask)

    def write(self, b: Builder, value: Any, at: Side, mask: Any) -> None:
        if _is_known(at.column, _i64(_size(self.t))):
            write_dense(b, value, at.address, mask)
        else:
            write_apart(b, value, at.address, at.column, mask)

    def block(
        self,
        b: Builder,
        places: list[Side],
        operands: tuple[Side, Side],
        counts: tuple[Any, Any],
        masks: Masks,
        wanted: tuple[Runs, Runs] | None,
        coming: Coming | None,
    ) -> None:
        """One block of accumulators, in registers through loops along k, which ask for memory on the way: the greatest of
        those that copy for what is `wanted`, those that read a in place for what is `coming` of it."""
        k, fresh = counts
        wide = len(masks)
        sums = self.start(b, places, fresh, masks)
        at: tuple[Any, list[Any]] = (_i64(0), sums)
        if wanted is not None:
            at = self.asking(b, at, operands, k, wanted)
        elif coming is not None:
            at = self.asking_for(b, at, operands, k, masks, coming)
        elif wide > 1:
            at = self.along_k(b, at, operands, k, masks, self.blocks.unroll)
        alone = wide == 1 and wanted is None and coming is None and len(places) > 1
        _, sums = self.along_k(b, at, operands, k, masks, 1, written_out=alone)
        for x, p, mask in zip(sums, places, cycle(masks), strict=False):
            self.write(b, x, p, mask)

    def start(self, b: Builder, places: list[Side], fresh: Any, masks: Masks) -> list[Any]:
        """What a block holds, or zeros where nothing is there yet: it is then not read."""
        before = b.block
        with b.if_then(b.not_(fresh)):
            held = [self.read(b, p, mask) for p, mask in zip(places, cycle(masks), strict=False)]
            inside = b.block
        sums = []
        for x in held:
            phi = b.phi(self.vector)
            phi.add_incoming(x, inside)
            phi.add_incoming(constant(self.vector, 0), before)
            sums.append(phi)
        return sums

    def asking(
        self,
        b: Builder,
        start: tuple[Any, list[Any]],
        operands: tuple[Side, Side],
        k: Any,
        wanted: tuple[Runs, Runs],
    ) -> tuple[Any, list[Any]]:
        """The loop along k; after every `ASKING` steps it asks for one run, of the first kind as many as the block has rows,
        then of the second. All at once they would hold up the reads of b for as long as one takes."""
        rows = len(start[1]) // self.blocks.wide
        first, then = wanted

        def ask(step: Any, values: list[Any]) -> list[Any]:
            *sums, address, distance, count = values
            for at in range(0, self.run, LINE):
                prefetch(b, b.gep(address, [_i64(at + LINE - 1)], source_etype=I8))
            sums = self.unrolled(b, step, sums, operands, self.no_masks, ASKING)
            count = b.add(count, _i64(1))
            turn = b.icmp_signed("==", count, _i64(rows))
            following = b.gep(address, [distance], source_etype=I8)
            return [
                *sums,
                b.select(turn, then.address, following),
                b.select(turn, then.distance, distance),
                count,
            ]

        values = [*start[1], first.address, first.distance, _i64(0)]
        step, values = folded_steps(b, start[0], k, ASKING, values, ask)
        return step, values[:-3]

    def coming(self, b: Builder, a: Left, i: Any, height: int, counts: tuple[Any, Any]) -> Coming | None:
        """What of an a that is read where it lies the blocks after the one of row i need first, for the first panel: later
        ones find it near."""
        (m, k), size = counts, _i64(_size(self.t))
        if self.pack is not None or a.unseen is None:
            return None
        if _is_known(a.side.column, size):
            return Coming(a.side.at(b, b.add(i, _i64(height)), _i64(0)), a.unseen, height)
        if not _is_known(a.side.row, size):
            return None
        line = _i64(LINE // _size(self.t))
        following = b.add(i, line)
        inside = b.icmp_signed("<", following, m)
        at = (b.select(inside, x, y) for x, y in ((following, _i64(0)), (_i64(0), k)))
        first = b.icmp_signed("<", b.urem(i, line), _i64(height))
        return Coming(a.side.at(b, *at), b.and_(a.unseen, first))

    def asking_for(
        self,
        b: Builder,
        start: tuple[Any, list[Any]],
        operands: tuple[Side, Side],
        k: Any,
        masks: Masks,
        coming: Coming,
    ) -> tuple[Any, list[Any]]:
        """The loop along k, which after every few steps asks for as many columns of what is coming."""
        few = ASKING if masks == self.no_masks else self.blocks.unroll
        turns = max(1, LINE // (few * _size(self.t))) if coming.rows else 1
        rows, columns = (-(-coming.rows // turns), 1) if coming.rows else (1, few)

        def ask(step: Any, sums: list[Any]) -> list[Any]:
            turn = b.urem(b.udiv(step, _i64(few)), _i64(turns))
            first = coming.side.at(b, b.mul(turn, _i64(rows)), step)
            with b.if_then(coming.due):
                for i, j in product(range(rows), range(columns)):
                    prefetch(b, first.at(b, _i64(i), _i64(j)).address)
            return self.unrolled(b, step, sums, operands, masks, few)

        return folded_steps(b, start[0], k, few, start[1], ask, written_out=False)

    def along_k(
        self,
        b: Builder,
        start: tuple[Any, list[Any]],
        operands: tuple[Side, Side],
        k: Any,
        masks: Masks,
        together: int,
        written_out: bool = True,
    ) -> tuple[Any, list[Any]]:
        """A loop along k while `together` steps fit: from the first step and the accumulators to those behind it. LLVM
        writes it out, unless it takes what a loop of more steps has left, or waits for one sum anyway."""

        def step(at: Any, sums: list[Any]) -> list[Any]:
            return self.unrolled(b, at, sums, operands, masks, together)

        return folded_steps(b, start[0], k, together, start[1], step, written_out)

    def unrolled(
        self,
        b: Builder,
        at: Any,
        sums: list[Any],
        operands: tuple[Side, Side],
        masks: Masks,
        together: int,
    ) -> list[Any]:
        """The accumulators after so many steps along k."""
        a, right = operands
        for u in range(together):
            here = b.add(at, _i64(u))
            sums = self.products(b, sums, a.at(b, _i64(0), here), right.at(b, here, _i64(0)), masks)
        return sums

    def products(self, b: Builder, sums: list[Any], a: Side, right: Side, masks: Masks) -> list[Any]:
        """The accumulators after one step along k."""
        thin, wide = Thin(self.t), len(masks)
        size = _i64(_size(self.t))
        if self.pack is not None:
            masks = (None,) * wide  # panels are whole vectors
        vectors = [
            read_dense(b, _moved(b, right.address, _i64(v * self.lanes), size), self.t, self.lanes, mask)
            for v, mask in enumerate(masks)
        ]
        out = []
        for i in range(len(sums) // wide):
            left = thin.spread(b, a.at(b, _i64(i), _i64(0)))
            out += [multiply_add(b, left, vectors[v], sums[i * wide + v]) for v in range(wide)]
        return out


def _in_even_blocks(b: Builder, m: Any) -> Any:
    """How many of m rows are for blocks of 6: where 2 or 3 are left over, one less, since two blocks of 4 take them."""
    tall, short = EVEN
    left = b.urem(m, _i64(tall))
    few = b.and_(b.icmp_signed(">=", left, _i64(2 * short - tall)), b.icmp_signed("<", left, _i64(short)))
    return b.select(few, b.sub(m, _i64(tall)), m)


@dataclass(frozen=True)
class Runs:
    """Pieces of memory of one length that will be wanted soon, so far apart (in bytes)."""

    address: Any
    distance: Any


@dataclass(frozen=True)
class Coming:
    """Part of an operand that will be wanted soon, to be asked for where that is `due`: so many rows of dense columns,
    or (none) one whose columns lie apart, of which a line holds the next rows as well. A core sees no pattern in pieces of a
    few lines, and waits for each from a far cache."""

    side: Side
    due: Any
    rows: int = 0


# ---------------------------------------------------------------- copies


@dataclass(frozen=True)
class _Pack:
    """Writes `to[r, c] = widened(from[r, c])`; columns of `to` are dense. `widen` makes a vector of elements of LLVM type
    `t` from one of the elements in memory. `exact`: whole vectors are not written where a row ends before them."""

    source: Any
    t: Any
    widen: Callable[[Builder, Any], Any]
    exact: bool

    @property
    def lanes(self) -> int:
        return REGISTER_BYTES // _size(self.t)

    def runs_along(self, given: Side) -> bool:
        """Are the source's columns known to be dense?"""
        return _is_known(given.column, _i64(_size(self.source)))

    def call(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """`body` for a `to` with dense columns, as a function of the module."""
        size, wide = _i64(_size(self.source)), _i64(_size(self.t))
        known = next((n for n, x in (("column", given.column), ("row", given.row)) if _is_known(x, size)), "")
        name = f"copy.{self.source}.{self.t}.{self.widen.__name__}.{known}{'.exact' * self.exact}"

        def write(b: Builder, sides: list[Side], counts: list[Any]) -> None:
            to, given = Side(sides[0].address, sides[0].row, wide), sides[1]
            self.body(b, [to, replace(given, **{known: size}) if known else given], counts)

        routine(b, name, [to, given], counts, write)

    def body(self, b: Builder, sides: list[Side], counts: list[Any]) -> None:
        """The way that suits where the source is dense: known when the code is made, or else asked at run time."""
        to, given = sides
        size, wide = _i64(_size(self.source)), _i64(_size(self.t))
        if not _is_known(to.column, wide):
            with b.if_else(b.icmp_signed("==", to.column, wide)) as (dense, sparse):
                with dense:
                    self.body(b, [Side(to.address, to.row, wide), given], counts)
                with sparse:
                    self.singly(b, to, given, counts)
        elif _is_known(given.column, size):
            self.along(b, to, given, counts)
        elif _is_known(given.row, size):
            self.across(b, to, given, counts)
        else:
            self.ask(b, to, given, counts, size)

    def ask(self, b: Builder, to: Side, given: Side, counts: list[Any], size: Any) -> None:
        as_it_lies(
            b, given, size,
            lambda dense: self.along(b, to, dense, counts),
            lambda turned: self.across(b, to, turned, counts),
            lambda: self.singly(b, to, given, counts),
        )  # fmt: skip

    def read(self, b: Builder, at: Side, mask: Any) -> Any:
        return self.widen(b, read_dense(b, at.address, self.source, self.lanes, mask))

    def along(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Row after row; the last vector of a row is filled up with zeros."""
        rows, columns = counts
        zero = _i64(0)
        with _steps(b, zero, rows, 1) as r:
            c = zero
            for together in (4, 1):
                with _steps(b, c, columns, together * self.lanes) as c:
                    at = [b.add(c, _i64(v * self.lanes)) for v in range(together)]
                    for x, column in [(self.read(b, given.at(b, r, x), None), x) for x in at]:
                        write_dense(b, x, to.at(b, r, column).address)
                c = b._last_index
            with b.if_then(b.icmp_signed("<", c, columns)):
                mask = first_lanes(b, b.sub(columns, c), self.lanes)
                filled = self.read(b, given.at(b, r, c), mask)
                write_dense(b, filled, to.at(b, r, c).address, mask if self.exact else None)

    def across(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """A transposition in square blocks, each in registers."""
        rows, columns = counts
        whole = _i64(self.lanes)
        with _steps(b, _i64(0), b.add(rows, _i64(self.lanes - 1)), self.lanes) as r:
            down = b.sub(rows, r)
            with _steps(b, _i64(0), b.add(columns, _i64(self.lanes - 1)), self.lanes) as c:
                over = b.sub(columns, c)
                full = b.and_(b.icmp_signed(">=", down, whole), b.icmp_signed(">=", over, whole))
                with b.if_else(full) as (then, otherwise):
                    with then:
                        self.square(b, to.at(b, r, c), given.at(b, r, c), None, None)
                    with otherwise:
                        self.square(b, to.at(b, r, c), given.at(b, r, c), down, over)

    def square(self, b: Builder, to: Side, given: Side, down: Any, over: Any) -> None:
        """A block of `lanes` rows and columns, of which the first `down` and `over` exist (None: all)."""
        mask = None if down is None else first_lanes(b, down, self.lanes)
        columns = []
        for c in range(self.lanes):
            there = mask
            if over is not None:
                exists = b.icmp_signed("<", _i64(c), over)
                there = b.and_(mask, broadcast(b, exists, self.lanes))
            columns.append(self.read(b, given.at(b, _i64(0), _i64(c)), there))
        there = first_lanes(b, over, self.lanes) if over is not None and self.exact else None
        for r, row in enumerate(transposed(b, columns)):
            if down is None:
                write_dense(b, row, to.at(b, _i64(r), _i64(0)).address)
            else:
                with b.if_then(b.icmp_signed("<", _i64(r), down)):
                    write_dense(b, row, to.at(b, _i64(r), _i64(0)).address, there)

    def singly(self, b: Builder, to: Side, given: Side, counts: list[Any]) -> None:
        """Element by element, where neither rows nor columns are dense."""
        rows, columns = counts
        one = ir.VectorType(self.source, 1)
        with _steps(b, _i64(0), rows, 1) as r, _steps(b, _i64(0), columns, 1) as c:
            at = b.bitcast(given.at(b, r, c).address, one.as_pointer())
            value = self.widen(b, b.load(at, typ=one, align=_size(self.source)))
            write_dense(b, value, to.at(b, r, c).address)


def transposed(b: Builder, rows: list[Any]) -> list[Any]:
    """The transpose of as many vectors as one has lanes: in step d elements d lanes apart change places between rows d
    apart."""
    lanes = len(rows)
    distance = 1
    while distance < lanes:
        rows = list(rows)
        for i in (i for i in range(lanes) if not i & distance):
            x, y = rows[i], rows[i + distance]
            low = [j if not j & distance else lanes + j - distance for j in range(lanes)]
            high = [j + distance if not j & distance else lanes + j for j in range(lanes)]
            rows[i], rows[i + distance] = (b.shuffle_vector(x, y, _places(p)) for p in (low, high))
        distance *= 2
    return rows


def _places(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, j) for j in lanes])


def _is_known(distance: Any, size: Any) -> bool:
    return isinstance(distance, ir.Constant) and distance.constant == size.constant


def _same(b: Builder, x: Any) -> Any:
    return x


def _from_bf16(b: Builder, x: Any) -> Any:
    lanes = x.type.count
    wide = b.shl(b.zext(x, ir.VectorType(I32, lanes)), constant(ir.VectorType(I32, lanes), 16))
    return b.bitcast(wide, ir.VectorType(ir.FloatType(), lanes))


def _from_f16(b: Builder, x: Any) -> Any:
    lanes = x.type.count
    return b.fpext(b.bitcast(x, ir.VectorType(ir.HalfType(), lanes)), ir.VectorType(ir.FloatType(), lanes))


def _widened(source: Any, to: Any) -> Callable[[Builder, Any], Any] | None:
    """How elements of a matrix become those of a wider one of the same kind; None where they do not."""
    if source == to:
        return _same
    integers = isinstance(source, types.Integer) and isinstance(to, types.Integer)
    if integers and source.bitwidth < to.bitwidth:
        t = ir.IntType(to.bitwidth)
        extend = "sext" if source.signed else "zext"
        return lambda b, x: getattr(b, extend)(x, ir.VectorType(t, x.type.count))
    if source == types.float32 and to == types.float64:
        return lambda b, x: b.fpext(x, ir.VectorType(ir.DoubleType(), x.type.count))
    return None


# ---------------------------------------------------------------- what generated source calls


def _counts(context: Any, b: Builder, kinds: Any, args: Any) -> list[Any]:
    return [context.cast(b, x, t, types.int64) for x, t in zip(args, kinds, strict=True)]


def _in_place(whole: bool) -> Any:
    @intrinsic
    def operation(typing: Any, c: Any, a: Any, b: Any, m: Any, n: Any, k: Any, fresh: Any) -> Any:
        kinds = [c, a, b]
        dense = b.column is not None and (c.column is not None or not whole)
        if any(x.dtype != c.dtype for x in kinds) or not dense:
            return None

        def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
            rows, columns, steps = _counts(context, builder, sig.args[3:6], args[3:6])
            made = _Product(context.get_data_type(c.dtype), None, BLOCKS[REGISTER_BYTES], whole=whole)
            if whole:
                columns = multiple(builder, columns, made.blocks.wide * made.lanes)
            counts, name = [rows, columns, steps, args[6]], f"multiply{'_whole' * whole}"
            return _call_once(context, builder, name, kinds, list(args[:3]), counts, made.body)

        return types.void(c, a, b, m, n, k, types.boolean), emit

    return operation


multiply, multiply_whole = _in_place(False), _in_place(True)
"""`multiply(c, a, b, m, n, k, fresh)`: c[:m, :n] += a[:m, :k] · b[:k, :n], or = where `fresh`; columns of b are dense.
`multiply_whole` takes n for the next multiple of the columns that a block has; those of c are dense too."""


def _multiplication(
    widen: Callable[[Builder, Any], Any] | None, operands: list[Any], several: list[Any]
) -> Any:
    """Signature and code of a product that packs, for the types of its arguments; `several`: those of stack and chain."""
    c, a, b, left, panel = operands[:5]
    kinds = [c, a, b, panel, *([left] if isinstance(left, Matrix) else [])]
    way = _widened(b.dtype, panel.dtype) if widen is None else widen
    if any(x.dtype != c.dtype for x in kinds if x is not b) or way is None:
        return None
    stacked, chained = (isinstance(x, types.BaseTuple) for x in several or (None, None))
    name = (
        f"multiply_packing{'' if widen is None else widen.__name__}{'_stack' * stacked}{'_chain' * chained}"
    )

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        counts = [*_counts(context, builder, sig.args[5:8], args[5:8]), args[8]]
        for kind, value in zip(sig.args[9:], args[9:], strict=True):
            if isinstance(kind, types.BaseTuple):
                parts = [builder.extract_value(value, i) for i in range(len(kind))]
                counts += _counts(context, builder, kind, parts)
        t = context.get_data_type(c.dtype)
        copy = _Pack(context.get_data_type(b.dtype), t, way, False)
        made = _Product(
            t, copy, BLOCKS[REGISTER_BYTES], Stack() if stacked else None, Chain() if chained else None
        )
        sides = [*args[:3], args[4], *([args[3]] if isinstance(left, Matrix) else [])]
        write = made.of_several if several else made.body
        return _call_once(context, builder, name, kinds, sides, counts, write)

    return types.void(*operands, types.boolean, *several), emit


def _multiplying(widen: Callable[[Builder, Any], Any] | None) -> tuple[Any, Any]:
    @intrinsic
    def one(
        typing: Any, c: Any, a: Any, b: Any, left: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any
    ) -> Any:
        return _multiplication(widen, [c, a, b, left, panel, m, n, k], [])

    @intrinsic
    def several(
        typing: Any, c: Any, a: Any, b: Any, left: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any,
        stack: Any, chain: Any,
    ) -> Any:  # fmt: skip
        return _multiplication(widen, [c, a, b, left, panel, m, n, k], [stack, chain])

    return one, several


multiply_packing, multiply_packing_several = _multiplying(None)
multiply_packing_bf16, multiply_packing_several_bf16 = _multiplying(_from_bf16)
multiply_packing_f16, multiply_packing_several_f16 = _multiplying(_from_f16)
"""`multiply_packing(c, a, b, left, panel, m, n, k, fresh)`: `multiply` for an `a` and a `b` that lie anywhere. Columns of b
are copied into `panel` just before they are used, so many at a time as a block of c has; there they stay in a near cache for
all rows. `left` is room for a copy of a, made where that pays; None: a is read where it lies.

`multiply_packing_several(…, fresh, stack, chain)`: the matrices are the first of several. stack = (count, bytes from c to c,
bytes from a to a) for matrices of one b, chain = (count, bytes from a to a, bytes from b to b) for products added up; one of
the two may be None. `left` has room for all of a, and `panel` for all steps."""


def _packing(widen: Callable[[Builder, Any], Any] | None, exact: bool) -> Any:
    @intrinsic
    def operation(typing: Any, to: Any, given: Any, rows: Any, columns: Any) -> Any:
        way = _widened(given.dtype, to.dtype) if widen is None else widen
        if way is None or (to.column is None and not exact):
            return None

        def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
            counts = _counts(context, builder, sig.args[2:], args[2:])
            write = _Pack(
                context.get_data_type(given.dtype), context.get_data_type(to.dtype), way, exact
            ).body
            name = f"{'unpack' if exact else 'pack'}{'' if widen is None else widen.__name__}"
            return _call_once(context, builder, name, [to, given], list(args[:2]), counts, write)

        return types.void(to, given, rows, columns), emit

    return operation


pack, pack_bf16, pack_f16 = (_packing(way, False) for way in (None, _from_bf16, _from_f16))
"""`pack(to, given, rows, columns)`: a copy in which columns are dense, and elements wide enough to compute with. What a
row has beyond its columns, up to a whole vector, may be written."""
unpack = _packing(None, True)
"""Like `pack`, into a tensor: nothing beyond rows and columns is written."""
