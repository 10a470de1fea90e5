"""Products of narrow operands through the instructions that processors have for them.

`multiply_bf16(c, a, b, space, m, n, k, fresh)` is `c[:m, :n] += a[:m, :k] · b[:k, :n]`, or `=` where `fresh`, for operands
in bf16 (f32 ones are rounded to it as they are copied) and sums in f32. `multiply_i8` takes i8 and sums exactly in i32.
Both stand between `start_tiles()` and `stop_tiles()`. Operands lie anywhere; they are copied into `space`, in the form that
the instructions take: words of 32 bits, each with neighbours along k, in tiles of 16 rows of 64 bytes (Intel 64 and IA-32
Architectures Software Developer's Manual, volume 1, chapter 18, "Programming with Intel AMX"). A row of a tile holds words
of one row of a, or the same word of 16 columns of b.

What multiplies is chosen when machine code is made, the first that the processor has: tiles of 16 x 16 sums (AMX),
`vdpbf16ps` on vectors (AVX512_BF16), and for any other vectors of plain arithmetic. The first two take subnormal numbers,
operands and sums, as 0 (the same manual, volume 2, TDPBF16PS and VDPBF16PS).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...dsl.records import dataclass
from ..host import tiles_permitted
from .matrices import Side, call_once, i64, moved, steps
from .tile_products import transposed
from .vectors import (
    I8,
    I32,
    I64,
    REGISTER_BYTES,
    broadcast,
    call,
    constant,
    features,
    first_lanes,
    read_dense,
    write_dense,
)

Builder = Any
I16, F32, VOID, POINTER = ir.IntType(16), ir.FloatType(), ir.VoidType(), I8.as_pointer()
LINES, LINE_BYTES = 16, 64
"""Lines of a tile and the bytes of each: 16 words."""
TILE_BYTES, PANEL_LINES = LINES * LINE_BYTES, 2 * LINES
PANEL_STEP_BYTES = 2 * TILE_BYTES
"""Operands are copied in panels of 32 lines, rows of a or columns of b: two tiles beside each other at every step of k.
Between panels there is a line more, so that their starts do not all fall into the same few sets of a cache."""
SCRATCH_BYTES = PANEL_LINES * PANEL_LINES * 4
"""A block of sums, where only a part of it belongs to c."""
WORDS = ir.VectorType(I32, LINES)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


# ---------------------------------------------------------------- what the processor has


def units() -> tuple[str, ...]:
    """The instruction sets for narrow products that code may use here, in LLVM's names."""
    found = features()
    tiles = "amx-tile" in found and tiles_permitted()
    able = [x for x in ("amx-bf16", "amx-int8") if tiles and x in found]
    return (*able, *(x for x in ("avx512bf16", "avx512vnni") if x in found))


UNITS = units()
"""Asked for when a generated module is imported, so that each process has the permission before its code runs."""


# ---------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """An element type in memory and the type of sums; how many elements a word of 32 bits holds; the instruction that
    multiplies tiles and the feature it belongs to; `step(b, sums, x, y)` multiplies vectors of words on machines without."""

    element: Any
    total: Any
    tiles: str
    feature: str
    step: Callable[[Builder, Any, Any, Any], Any]

    @property
    def group(self) -> int:
        return 32 // int(self.element.width)

    @property
    def along(self) -> int:
        """Elements of a line of a tile: a step along k."""
        return LINES * self.group


def _bf16_step(b: Builder, sums: Any, x: Any, y: Any) -> Any:
    """sums + x[even] · y[even] + x[odd] · y[odd] for words of two bf16."""
    lanes = x.type.count
    if "avx512bf16" in UNITS and lanes == LINES:
        pairs = ir.VectorType(BF16, 2 * lanes)
        args = [sums, b.bitcast(x, pairs), b.bitcast(y, pairs)]
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, args)
    sixteen, high = constant(x.type, 16), constant(x.type, -(1 << 16))
    halves = [[b.shl(v, sixteen) for v in (x, y)], [b.and_(v, high) for v in (x, y)]]
    for half in halves:
        factors = [b.bitcast(v, sums.type) for v in half]
        sums = call(b, f"llvm.fma.v{lanes}f32", sums.type, [*factors, sums])
    return sums


def _i8_step(b: Builder, sums: Any, x: Any, y: Any) -> Any:
    """sums + Σ x[u] · y[u] for words of four i8."""
    last = constant(x.type, 24)
    for u in range(4):
        left, right = (b.ashr(b.shl(v, constant(x.type, 24 - 8 * u)), last) for v in (x, y))
        sums = b.add(sums, b.mul(left, right))
    return sums


BF16_SUMS = Format(I16, F32, "llvm.x86.tdpbf16ps", "amx-bf16", _bf16_step)
I8_SUMS = Format(I8, I32, "llvm.x86.tdpbssd", "amx-int8", _i8_step)


# ---------------------------------------------------------------- copies


@dataclass(frozen=True)
class _Panels:
    """Copies lines of a matrix, elements of LLVM type `source`, into panels of tiles. `across`: a line of a tile is a word
    of each of 16 lines of the matrix (as b's tiles are), else a line of it."""

    form: Format
    source: Any
    across: bool

    def copy(self, b: Builder, to: Any, given: Side, counts: tuple[Any, Any, Any]) -> None:
        """All lines, in the way that suits where the matrix is dense. `counts`: lines, elements of each, which are followed
        by zeros up to a whole tile, and bytes from panel to panel."""
        size = i64(_size(self.source))
        ways = [(given.column, size, self._by_lines), (given.row, size, self._by_words)]
        self._choose(b, ways, to, given, counts)

    def _choose(self, b: Builder, ways: list[tuple[Any, Any, Any]], *args: Any) -> None:
        """The first way whose distance is `size`, known now or asked at run time; element by element where none is."""
        if not ways:
            self._singly(b, *args)
            return
        (distance, size, way), *rest = ways
        if isinstance(distance, ir.Constant):
            if distance.constant == size.constant:
                way(b, *args)
            else:
                self._choose(b, rest, *args)
            return
        with b.if_else(b.icmp_signed("==", distance, size)) as (dense, other):
            with dense:
                way(b, *args)
            with other:
                self._choose(b, rest, *args)

    def _by_lines(self, b: Builder, to: Any, given: Side, counts: tuple[Any, Any, Any]) -> None:
        """Lines are dense: each is read from its first element to its last."""
        lines, k, _ = counts
        with self._lines(b, lines) as line, self._along(b, k) as along:
            self._step(b, self._line_words, False, to, given, counts, (line, along))

    def _by_words(self, b: Builder, to: Any, given: Side, counts: tuple[Any, Any, Any]) -> None:
        """The matrix is dense from line to line: the first words of all lines are read, then the second of all."""
        lines, k, _ = counts
        with self._along(b, k) as along, self._lines(b, lines) as line:
            self._step(b, self._column_words, True, to, given, counts, (line, along))

    def _lines(self, b: Builder, lines: Any) -> Any:
        return steps(b, i64(0), b.add(lines, i64(PANEL_LINES - 1)), PANEL_LINES)

    def _along(self, b: Builder, k: Any) -> Any:
        return steps(b, i64(0), b.add(k, i64(self.form.along - 1)), self.form.along)

    def _place(self, b: Builder, to: Any, panel_bytes: Any, at: tuple[Any, Any]) -> Any:
        """The address of two tiles beside each other."""
        panel = b.udiv(at[0], i64(PANEL_LINES))
        return moved(b, to, panel, panel_bytes, at[1], i64(PANEL_STEP_BYTES // self.form.along))

    def _step(
        self, b: Builder, read: Any, across: bool, to: Any, given: Side, counts: Any, at: tuple[Any, Any]
    ) -> None:
        """Two tiles, whole or ragged, from words of lines as `read` gives them, turned where a tile has them otherwise."""
        tiles, here = self._place(b, to, counts[2], at), given.at(b, *at)
        down, over = (b.sub(n, x) for n, x in zip(counts, at, strict=False))
        whole = b.icmp_signed(">=", down, i64(PANEL_LINES))
        whole = b.and_(whole, b.icmp_signed(">=", over, i64(self.form.along)))
        with b.if_else(whole) as branches:
            for branch, (some, few) in zip(branches, ((None, None), (down, over)), strict=True):
                with branch:
                    for half, rows in enumerate(read(b, here, some, few)):
                        turned = rows if across == self.across else transposed(b, rows)
                        for i, row in enumerate(turned):
                            write_dense(b, row, moved(b, tiles, i64(LINES * half + i), i64(LINE_BYTES)))

    def _line_words(self, b: Builder, given: Side, lines: Any, k: Any) -> Iterator[list[Any]]:
        """The words of each line as a vector, 16 lines and then 16 more."""
        count = self.form.along
        inside = None if k is None else first_lanes(b, k, count)
        for first in (0, LINES):
            rows = []
            for i in range(first, first + LINES):
                mask = inside
                if lines is not None:
                    mask = b.and_(inside, broadcast(b, b.icmp_signed("<", i64(i), lines), count))
                x = read_dense(b, given.at(b, i64(i), i64(0)).address, self.source, count, mask)
                rows.append(b.bitcast(self._narrowed(b, x), WORDS))
            yield rows

    def _column_words(self, b: Builder, given: Side, lines: Any, k: Any) -> Iterator[list[Any]]:
        """The same word of 16 lines, and of 16 more, as a vector, word by word."""
        group = self.form.group
        inside = None if lines is None else first_lanes(b, lines, PANEL_LINES)
        pairs = []
        for word in range(LINES):
            parts = []
            for u in range(word * group, (word + 1) * group):
                mask = inside
                if k is not None:
                    mask = b.and_(inside, broadcast(b, b.icmp_signed("<", i64(u), k), PANEL_LINES))
                at = given.at(b, i64(0), i64(u)).address
                parts.append(self._narrowed(b, read_dense(b, at, self.source, PANEL_LINES, mask)))
            woven = _woven(b, parts)
            pairs.append([_joined(b, x) for x in (woven[: group // 2], woven[group // 2 :])])
        for half in (0, 1):
            yield [b.bitcast(pair[half], WORDS) for pair in pairs]

    def _narrowed(self, b: Builder, x: Any) -> Any:
        """f32 rounded to bf16; narrow elements as they are."""
        if self.source != F32:
            return x
        return _rounded(b, x)

    def _singly(self, b: Builder, to: Any, given: Side, counts: tuple[Any, Any, Any]) -> None:
        """Element by element, where the matrix is dense in neither direction."""
        one, form = ir.VectorType(self.source, 1), self.form
        size = int(form.element.width) // 8
        line_bytes, word_bytes = (4, LINE_BYTES) if self.across else (LINE_BYTES, 4)
        lines, k, panel_bytes = counts
        with self._lines(b, lines) as line, self._along(b, k) as along:
            tiles, here = self._place(b, to, panel_bytes, (line, along)), given.at(b, line, along)
            for i in range(PANEL_LINES):
                write_dense(b, constant(WORDS, 0), moved(b, tiles, i64(i), i64(LINE_BYTES)))
            down = _least(b, b.sub(lines, line), i64(PANEL_LINES))
            over = _least(b, b.sub(k, along), i64(form.along))
            with steps(b, i64(0), down, 1) as i, steps(b, i64(0), over, 1) as u:
                at = b.bitcast(here.at(b, i, u).address, one.as_pointer())
                value = self._narrowed(b, b.load(at, typ=one, align=_size(self.source)))
                tile, row = b.udiv(i, i64(LINES)), b.urem(i, i64(LINES))
                word, part = b.udiv(u, i64(form.group)), b.urem(u, i64(form.group))
                place = moved(b, tiles, tile, i64(TILE_BYTES), row, i64(line_bytes))
                write_dense(b, value, moved(b, place, word, i64(word_bytes), part, i64(size)))


def _rounded(b: Builder, x: Any) -> Any:
    """f32 to the nearest bf16, ties to even. Without an instruction for it LLVM would call a library that is not here; so
    bits are rounded as integers, and a NaN, which that might carry into an infinity, keeps its upper half, made quiet."""
    kind, narrow = (ir.VectorType(t, x.type.count) for t in (I32, I16))
    if "avx512bf16" in features():
        return b.bitcast(b.fptrunc(x, ir.VectorType(BF16, x.type.count)), narrow)

    def all_lanes(n: int) -> Any:
        return ir.Constant(kind, [ir.Constant(I32, n)] * kind.count)

    bits = b.bitcast(x, kind)
    odd = b.and_(b.lshr(bits, all_lanes(16)), all_lanes(1))
    nearest = b.add(bits, b.add(odd, all_lanes(0x7FFF)))
    kept = b.select(b.fcmp_unordered("uno", x, x), b.or_(bits, all_lanes(0x400000)), nearest)
    return b.trunc(b.lshr(kept, all_lanes(16)), narrow)


def _joined(b: Builder, parts: list[Any]) -> Any:
    """One vector, or two as one."""
    if len(parts) == 1:
        return parts[0]
    lanes = 2 * parts[0].type.count
    order = ir.Constant(ir.VectorType(I32, lanes), [ir.Constant(I32, j) for j in range(lanes)])
    return b.shuffle_vector(parts[0], parts[1], order)


def _woven(b: Builder, parts: list[Any]) -> list[Any]:
    """The first elements of all vectors, then the second, and so on, in as many vectors; there are 2 or 4."""
    if len(parts) == 1:
        return parts
    even, odd = _woven(b, parts[::2]), _woven(b, parts[1::2])
    lanes = parts[0].type.count
    kind = ir.VectorType(I32, lanes)
    halves = []
    for x, y in zip(even, odd, strict=True):
        for first in (0, lanes // 2):
            order = [j + lanes * side for j in range(first, first + lanes // 2) for side in (0, 1)]
            halves.append(b.shuffle_vector(x, y, ir.Constant(kind, [ir.Constant(I32, j) for j in order])))
    return halves


def _size(t: Any) -> int:
    """Bytes of an element of f32, i16 or i8."""
    return 4 if t == F32 else int(t.width) // 8


def _least(b: Builder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), x, y)


# ---------------------------------------------------------------- products


@dataclass(frozen=True)
class _Blocks:
    """Writes the product of 32 x 32 sums of a panel of a and a panel of b."""

    form: Format

    @property
    def by_tiles(self) -> bool:
        return self.form.feature in UNITS

    def body(self, b: Builder, panels: tuple[_Panels, _Panels], sides: list[Side], counts: list[Any]) -> None:
        """Both operands are copied; a panel of b then stays in the nearest cache for all rows of a."""
        c, a, right, space = sides
        m, n, k, fresh = counts
        step = self.form.along
        length = b.mul(b.udiv(b.add(k, i64(step - 1)), i64(step)), i64(PANEL_STEP_BYTES))
        panel_bytes = b.add(length, i64(LINE_BYTES))
        scratch = space.address
        rows = moved(b, scratch, i64(1), i64(SCRATCH_BYTES))
        ends = {x: b.add(x, i64(PANEL_LINES - 1)) for x in (m, n)}
        columns = moved(b, rows, b.udiv(ends[m], i64(PANEL_LINES)), panel_bytes)
        panels[0].copy(b, rows, a, (m, k, panel_bytes))
        panels[1].copy(b, columns, Side(right.address, right.column, right.row), (n, k, panel_bytes))
        with steps(b, i64(0), ends[n], PANEL_LINES) as j, steps(b, i64(0), ends[m], PANEL_LINES) as i:
            x = moved(b, rows, b.udiv(i, i64(PANEL_LINES)), panel_bytes)
            y = moved(b, columns, b.udiv(j, i64(PANEL_LINES)), panel_bytes)
            left = tuple(_least(b, b.sub(total, at), i64(PANEL_LINES)) for total, at in ((m, i), (n, j)))
            self._one(b, c.at(b, i, j), (x, y, scratch), (*left, length), fresh)

    def _one(
        self, b: Builder, c: Side, parts: tuple[Any, Any, Any], counts: tuple[Any, Any, Any], fresh: Any
    ) -> None:
        """One block, right in c where it has all of it, else by way of the scratch block."""
        x, y, scratch = parts
        high, wide, length = counts
        whole = b.icmp_signed("==", b.add(high, wide), i64(2 * PANEL_LINES))
        row_bytes = i64(4 * PANEL_LINES)
        to = b.select(whole, c.address, scratch)
        row = b.select(whole, c.row, row_bytes)
        new = b.or_(fresh, b.not_(whole))
        product = self._tiles if self.by_tiles else self._vectors
        product(b, Side(to, row, i64(4)), (x, y), length, new)
        with b.if_then(b.not_(whole)), steps(b, i64(0), high, 1) as i:
            for v in range(0, PANEL_LINES, LINES):
                mask = first_lanes(b, b.sub(wide, i64(v)), LINES)
                at = c.at(b, i, i64(v)).address
                found = read_dense(b, moved(b, scratch, i, row_bytes, i64(v), i64(4)), self.form.total, LINES)
                before = read_dense(b, at, self.form.total, LINES, mask)
                write_dense(b, b.select(fresh, found, self._add(b, before, found)), at, mask)

    def _add(self, b: Builder, x: Any, y: Any) -> Any:
        return b.fadd(x, y) if self.form.total == F32 else b.add(x, y)

    # -- tiles: 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 columns of b

    def _tiles(self, b: Builder, c: Side, parts: tuple[Any, Any], length: Any, fresh: Any) -> None:
        line = i64(LINE_BYTES)
        places = [c.at(b, i64(LINES * (t // 2)), i64(LINES * (t % 2))).address for t in range(4)]
        with b.if_else(fresh) as (new, old):
            with new:
                for t in range(4):
                    call(b, "llvm.x86.tilezero", VOID, [_tile(t)])
            with old:
                for t, at in enumerate(places):
                    call(b, "llvm.x86.tileloadd64", VOID, [_tile(t), at, c.row])
        with steps(b, i64(0), length, PANEL_STEP_BYTES) as at:
            x, y = (moved(b, p, at, i64(1)) for p in parts)
            for tile, p, half in ((6, y, 0), (4, x, 0), (7, y, 1), (5, x, 1)):
                address = moved(b, p, i64(half), i64(TILE_BYTES))
                call(b, "llvm.x86.tileloadd64", VOID, [_tile(tile), address, line])
                for t in {4: (0,), 7: (1,), 5: (2, 3)}.get(tile, ()):
                    call(b, self.form.tiles, VOID, [_tile(t), _tile(4 + t // 2), _tile(6 + t % 2)])
        for t, at in enumerate(places):
            call(b, "llvm.x86.tilestored64", VOID, [_tile(t), at, c.row])

    # -- vectors

    def _vectors(self, b: Builder, c: Side, parts: tuple[Any, Any], length: Any, fresh: Any) -> None:
        """The block by groups of rows whose sums stay in registers."""
        rows = 8 if REGISTER_BYTES == LINE_BYTES else 2
        words = b.sdiv(length, i64(2 * LINE_BYTES))
        with steps(b, i64(0), i64(PANEL_LINES), rows) as i:
            here = c.at(b, i, i64(0)), moved(b, parts[0], i, i64(LINE_BYTES)), parts[1]
            self._group(b, here, rows, words, fresh)

    def _group(self, b: Builder, parts: tuple[Side, Any, Any], rows: int, words: Any, fresh: Any) -> None:
        """Sums of a group of rows over all words along k."""
        c, x, y = parts
        lanes = REGISTER_BYTES // 4
        kind, columns = ir.VectorType(self.form.total, lanes), range(0, PANEL_LINES, lanes)
        places = [c.at(b, i64(r), i64(v)).address for r in range(rows) for v in columns]
        zero = constant(kind, 0)
        start = [b.select(fresh, zero, read_dense(b, p, self.form.total, lanes)) for p in places]
        head, body, after = (b.append_basic_block(n) for n in ("words", "word", "done"))
        before = b.block
        b.branch(head)
        b.position_at_end(head)
        step = b.phi(I64)
        step.add_incoming(i64(0), before)
        sums = [b.phi(kind) for _ in places]
        for phi, first in zip(sums, start, strict=True):
            phi.add_incoming(first, before)
        b.cbranch(b.icmp_signed("<", step, words), body, after)
        b.position_at_end(body)
        tile = b.mul(b.sdiv(step, i64(LINES)), i64(PANEL_STEP_BYTES))
        word = b.and_(step, i64(LINES - 1))
        left, right = (
            moved(b, x, tile, i64(1), word, i64(4)),
            moved(b, y, tile, i64(1), word, i64(LINE_BYTES)),
        )
        now = self._word(b, sums, left, right)
        step.add_incoming(b.add(step, i64(1)), b.block)
        for phi, last in zip(sums, now, strict=True):
            phi.add_incoming(last, b.block)
        b.branch(head)
        b.position_at_end(after)
        for phi, p in zip(sums, places, strict=True):
            write_dense(b, phi, p)

    def _word(self, b: Builder, sums: list[Any], x: Any, y: Any) -> list[Any]:
        """The sums after one word along k: `x` is that of the first row, `y` that of the first column."""
        lanes = REGISTER_BYTES // 4
        right = []
        for v in range(0, PANEL_LINES, lanes):
            at = moved(b, y, i64(v // LINES), i64(TILE_BYTES), i64(v % LINES), i64(4))
            right.append(read_dense(b, at, I32, lanes))
        out: list[Any] = []
        while len(out) < len(sums):
            at = moved(b, x, i64(len(out) // len(right)), i64(LINE_BYTES))
            left = broadcast(b, b.load(b.bitcast(at, I32.as_pointer()), typ=I32, align=4), lanes)
            out += [self.form.step(b, sums[len(out) + v], left, words) for v, words in enumerate(right)]
        return out


def _tile(number: int) -> Any:
    return ir.Constant(I8, number)


def configure(b: Builder) -> None:
    """All eight tiles whole: palette 1, 64 bytes a row, 16 rows (the manual's table of the tile configuration)."""
    name = "tiles.whole"
    found = b.module.globals.get(name)
    if found is None:
        content = [1, *[0] * 15, *[LINE_BYTES, 0] * 8, *[0] * 16, *[LINES] * 8, *[0] * 8]
        kind = ir.ArrayType(I8, len(content))
        found = ir.GlobalVariable(b.module, kind, name)
        found.linkage, found.global_constant = "internal", True
        found.initializer = ir.Constant(kind, content)
    call(b, "llvm.x86.ldtilecfg", VOID, [b.bitcast(found, POINTER)])


# ---------------------------------------------------------------- what generated source calls


def _multiplying(form: Format, total: Any, sources: dict[Any, Any]) -> Any:
    @intrinsic
    def operation(typing: Any, c: Any, a: Any, b: Any, space: Any, m: Any, n: Any, k: Any, fresh: Any) -> Any:
        kinds = [c, a, b, space]
        if c.dtype != total or c.column != 4 or a.dtype not in sources or b.dtype not in sources:
            return None

        def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
            counts = [
                context.cast(builder, x, t, types.int64)
                for x, t in zip(args[4:7], sig.args[4:7], strict=True)
            ]
            panels = _Panels(form, sources[a.dtype], False), _Panels(form, sources[b.dtype], True)

            def write(inner: Builder, sides: list[Side], counts: list[Any]) -> None:
                _Blocks(form).body(inner, panels, sides, counts)

            return call_once(
                context, builder, f"multiply_{form.tiles}", kinds, list(args[:4]), [*counts, args[7]], write
            )

        return types.void(c, a, b, space, m, n, k, types.boolean), emit

    return operation


def _on_tiles(emit: Callable[[Builder], None]) -> Any:
    @intrinsic
    def operation(typing: Any) -> Any:
        def generate(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            if any(form.feature in UNITS for form in (BF16_SUMS, I8_SUMS)):
                emit(b)
            return context.get_dummy_value()

        return types.void(), generate

    return operation


start_tiles = _on_tiles(configure)
"""`start_tiles()`: before the first product of a function, on each thread that runs it."""
stop_tiles = _on_tiles(lambda b: call(b, "llvm.x86.tilerelease", VOID, []))
"""`stop_tiles()`: after the last; the system need not keep the tiles of the thread any longer."""
multiply_bf16 = _multiplying(BF16_SUMS, types.float32, {types.uint16: I16, types.float32: F32})
multiply_i8 = _multiplying(I8_SUMS, types.int32, {types.int8: I8})
