"""Tier `mma`: products of 16-bit floats on the matrix units of sm_80 and later, f32 accumulators; the rest is tier `simt`.

Tiles are dealt as `deal.FragmentDeal` says, which is how `mma.sync.m16n8k16` leaves its results, so everything elementwise,
reductions and stores are those of the simt tier. A product takes its operands

- from shared memory through `ldmatrix`: tiles lie there as 16-bit elements, rows padded by 16 bytes, so that the eight
  rows of a matrix lie in different banks; or
- the operand with the result's rows from the registers in which another product left it, rounded.

Tiles that a loop reads from memory for products alone come through `cp.async`, one or two steps ahead, in a ring of buffers.
A computed f32 operand that meets a stored 16-bit one is rounded to its type (DESIGN 8, "Precision").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...dsl.diagnostics import TileError
from ...dsl.records import dataclass
from ...dsl.types import DType
from ..remarks import Kind
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    Cast,
    Const,
    Dot,
    Expr,
    For,
    Let,
    Load,
    LoopAxis,
    Name,
    TileProgram,
    TileType,
    statements,
    subexpressions,
)
from .deal import Deal, Demand, FragmentDeal, Layout, fragment_deal
from .lazy_maximum import with_lazy_maxima
from .remembered import remembered
from .scalar_cuda import Code
from .simt_elements import Wide
from .simt_source import (
    LINE,
    LINE_BITS,
    Point,
    Registers,
    Staged,
    Value,
)
from .streams import (
    SIXTEEN,
    Streams,
    assumptions,
    facts_of,
    only_adds_products,
    with_named_operands,
    with_tiled_axes_last,
)
from .tile_types import Context, contexts, is_product, leaves, rewrite, tile_axes

STEP = 16  # elements of the contracted axis that one instruction takes
EIGHT_WARPS_FROM = 1 << 15  # elements of a product that eight warps share instead of four
CHUNK = 8  # elements that one asynchronous copy moves: 16 bytes
PLAIN_BOUNDS = (9, 0)
"""The first capability for which bounds of loops in closed form pay: assembled for sm_80, a causal attention spills where
its bounds come that way, and does not where they come from a reduction."""
LOG2_E = 1.4426950408889634
LANE_BITS = 5
MANY_STATES = 128
"""Values that a thread carries through loops which compute on partial tiles too, from which on registers are short."""
LINES_WITH_MANY_STATES = (9, 0)
"""The first capability for which the addresses of lines have registers where a loop over full tiles is one of its own:
attention of 128 columns under a causal mask spills nothing for sm_90a; for sm_80 112 bytes, and none with padded rows."""
EIGHT = 8  # rows of a matrix, and its columns: 16 bytes


class Unfit(Exception):
    """Why a program has no code in this tier, in words."""


@dataclass(frozen=True)
class Matrices:
    """An operand's 8 x 8 matrices in shared memory: where a lane's row of the first starts, whether they are transposed, and
    how far apart pairs of tiles and steps are: in elements, but by eights of columns in the direction of lines."""

    staged: Staged
    base: str
    turned: bool
    pair: int
    deep: int
    turn: str = ""
    """Of a tile in lines: the place in the line of the lane's own columns."""
    each: bool = False
    """Is the base an array with the place of each pair?"""

    def across(self, eights: str) -> str:
        """The place of a row's columns, so many eights to the right of a lane's own."""
        pieces = self.staged.pitches[0] > LINE
        piece = f" + ({eights} >> {LINE_BITS - 3}) * {self.staged.chunked}" if pieces else ""
        return f"{self.base} + ({self.turn} ^ (({eights} & {EIGHT - 1}) << 3)){piece}"


@dataclass(frozen=True)
class RegisterOperand:
    """A product's operand with the result's rows that its threads hold already: the expression of an element."""

    value: Expr
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Multiplied:
    """A product as a warp computes it: so many tiles of 16 rows, so many of 8 columns, whose sums lie so far apart in the
    array `sums`; `i` and `j` count them."""

    sums: str
    element: DType
    row: str
    column: str
    over: str
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    i: str
    j: str


@remembered
def variants(program: TileProgram, target: CudaTarget) -> list[MatrixKernel]:
    """The kernels of a program, the preferred first; the last serves any sizes, strides and alignment. Raises `Unfit`."""
    return [_kernel(*x, target) for x in _assuming(program, target)]


def of_any_strides(program: TileProgram, target: CudaTarget) -> MatrixKernel:
    """The last of them."""
    return _kernel(*_assuming(program, target)[-1], target)


def _assuming(program: TileProgram, target: CudaTarget) -> list[tuple[TileProgram, Wide, str]]:
    """The program in this tier's form, what each of its kernels takes for granted, and the end of that one's name."""
    if target.capability < (8, 0):
        raise Unfit(f"{target.name} has no mma.sync for this shape")
    from .warpgroup_form import with_plain_bounds

    program = with_tiled_axes_last(with_named_operands(program, rounds=True))
    check(program)
    if target.capability >= PLAIN_BOUNDS:
        program = with_plain_bounds(program)
    program = with_lazy_maxima(program)
    return [(program, wide, suffix) for wide, suffix in assumptions(program, CHUNK)]


def _kernel(program: TileProgram, wide: Wide, suffix: str, target: CudaTarget) -> MatrixKernel:
    from .mma_cascades import CascadeKernel  # which builds on this module

    return CascadeKernel(program, target, wide, suffix)


def is_lazy(program: TileProgram) -> bool:
    """Do maxima of its loops stay where they are while that is not much (`lazy_maximum.py`)?"""
    ready = with_named_operands(program, rounds=True)
    return with_lazy_maxima(ready) is not ready


def decisions(program: TileProgram, target: CudaTarget) -> Iterator[tuple[Kind, str, str]]:
    """Remarks on the kernels, each as its kind, name and text: which operands lie in lines of 128 bytes and why others
    lie in padded rows, in one sentence for variants that agree; which read fragments ahead."""
    found: dict[str, list[MatrixKernel]] = {}
    for kernel in variants(program, target):
        reasons = sorted(set(kernel.padded.values()))  # "" first
        told = {r: ", ".join(f"`{n}`" for n, x in kernel.padded.items() if x == r) for r in reasons}
        parts = [f"{n} in padded rows: {r}" if r else f"{n} in lines of 128 bytes" for r, n in told.items()]
        found.setdefault("; ".join(parts), []).append(kernel)
    for text, kernels in found.items():
        kind: Kind = "missed" if any(kernels[0].padded.values()) else "applied"
        yield kind, "operand-lines", f"{program.name}: operands in {_named(kernels)}: {text}"
    ahead = [k for kernels in found.values() for k in kernels if k.reads_ahead]
    if ahead:
        text = "fragments are read one instruction's depth ahead, across the barrier between steps"
        yield "applied", "fragments-ahead", f"{program.name}: in {_named(ahead)} {text}"


def _named(kernels: list[MatrixKernel]) -> str:
    return ", ".join(f"`{k.name}`" for k in kernels)


def why_not(program: TileProgram, target: CudaTarget) -> str | None:
    """Why a program has no code in this tier; None where it has."""
    try:
        variants(program, target)
    except Unfit as reason:
        return str(reason)
    except TileError as reason:
        return reason.diagnostics[0].message
    return None


def padded_axes(program: TileProgram, statics: dict[str, int]) -> dict[str, LoopAxis]:
    """Every axis that tiles span; one in one piece is filled up to whole steps of a product, as tiles of others are at their
    axis's end: lanes beyond its extent do not exist."""
    whole = {w.name for w in program.whole}
    axes = tile_axes(program, statics)
    return {a: _filled_up(x) if a in whole and x.tile else x for a, x in axes.items()}


def _filled_up(x: LoopAxis) -> LoopAxis:
    return replace(x, tile=-(-(x.tile or 1) // STEP) * STEP)


def check(program: TileProgram) -> None:
    """Every product must be one of two axes and 16-bit floats. Raises `Unfit`."""
    statics = dict(program.statics)
    axes = padded_axes(program, statics)
    empty = [a for a, x in axes.items() if x.tile == 0]
    if empty:
        raise Unfit(f"`{empty[0]}` is empty")
    tiles = {a: x.tile or 1 for a, x in axes.items()}
    facts = facts_of(program, tiles)
    found = False
    for c in contexts(program, facts):
        for d in (x for x in subexpressions(c.expr) if isinstance(x, Dot)) if c.expr is not None else ():
            a, b = facts.type_of(d.a, c.types), facts.type_of(d.b, c.types)
            if not is_product(d, a, b):
                continue
            found = True
            if a.dtype is not b.dtype or a.dtype not in SIXTEEN:
                raise Unfit(
                    f"a product of {a.dtype} and {b.dtype}; the matrix units take two of f16 or two of bf16"
                )
            if len(a.axes) != 2 or len(b.axes) != 2 or len(d.over) != 1:
                raise Unfit("a product over several axes, or of tiles with more than two")
            if tiles[d.over[0]] % STEP:
                raise Unfit(
                    f"`{d.over[0]}` by {tiles[d.over[0]]}; the contracted axis needs a multiple of {STEP}"
                )
    if not found:
        raise Unfit("it has no product")


# ---------------------------------------------------------------- the kernel


class MatrixKernel(Streams):
    """Emits one program."""

    tier = "mma"
    copied = SIXTEEN
    asks_late = True
    alignment = 2 * LINE

    def _give_names(self) -> None:
        self.rounds = True  # operands and weights are rounded to 16 bits
        self.reads_ahead = False
        """Are fragments read before the products of the depth before theirs?"""
        self.padded: dict[str, str] = {}
        """Operands in shared memory, each with the reason why it lies in padded rows; "" where it lies in lines."""
        super()._give_names()

    # ------------------------------------------------------------ where things lie

    def tile_axes(self) -> dict[str, LoopAxis]:
        return padded_axes(self.program, self.statics)

    def dealt(self, demands: list[Demand]) -> Deal:
        """Two rows of two warps, or four rows of one where a product's result feeds the next one's rows."""
        feeds = any(isinstance(x, Cast | Name) and self._is_result(x, c.types) for c, x in self._operands())
        largest = max(
            (self.tiles[d.axes[0]] * self.tiles[d.axes[-1]] for d in demands if d.kind == "dot"), default=0
        )
        eight = [(3, 0)] if feeds else sorted([(2, 1), (1, 2)], key=lambda w: self._fragments(demands, *w))
        choices = [(2, 0)] if feeds else [(1, 1), (2, 0), (0, 2)]
        choices = [*eight, *choices] if largest >= EIGHT_WARPS_FROM else choices
        for rows, columns in choices:
            found = fragment_deal(demands, self.tiles, rows, columns)
            if all(self._fits(found, d.axes) for d in demands if d.kind == "dot"):
                return found
        axes = dict.fromkeys(a for d in demands if d.kind == "dot" for a in d.axes)
        tiles = ", ".join(f"{a} by {self.tiles[a]}" for a in axes)
        taken = "64 rows and 16 columns" if feeds else "64 x 16, 32 x 32 or 16 x 64"
        raise Unfit(f"tiles of {tiles}: four warps take multiples of {taken}")

    def _fragments(self, demands: list[Demand], row_warps: int, column_warps: int) -> int:
        """Rows and columns of operands that a warp reads for its part of the products."""
        sides = [(self.tiles[d.axes[0]], self.tiles[d.axes[-1]]) for d in demands if d.kind == "dot"]
        return sum((m >> row_warps) + (n >> column_warps) for m, n in sides)

    def _operands(self) -> list[tuple[Context, Expr]]:
        return [(c, c.expr) for c in self.contexts if c.kind == "operand" and c.expr is not None]

    def _is_result(self, e: Expr, types: Mapping[str, TileType]) -> bool:
        """Is an operand computed, not read from memory?"""
        inner = e.arg if isinstance(e, Cast) else e
        return isinstance(inner, Name) and inner.name not in self._from_memory_names()

    def _from_memory_names(self) -> set[str]:
        return {
            s.name for s in statements(self.program.body) if isinstance(s, Let) and isinstance(s.value, Load)
        }

    def _fits(self, d: FragmentDeal, axes: tuple[str, ...]) -> bool:
        if len(axes) != 2:
            return False
        layout = d.layout(axes)
        sides = sorted(layout.spreads, key=lambda s: s.low)
        column, row = sides
        return (
            row.low == 2
            and row.step == 8 << d.row_warps
            and row.tile % (2 * row.step) == 0
            and column.run == 2
            and column.tile % (16 << d.column_warps) == 0
        )

    def _crossing(self) -> frozenset[str]:
        inner = [
            (x.arg if isinstance(x, Cast) else x, self._in_registers(x, c.types)) for c, x in self._operands()
        ]
        held = {x.name for x, in_registers in inner if in_registers and isinstance(x, Name)}
        read = super()._crossing()
        others = {
            x.name
            for c in self.contexts
            if c.expr is not None and c.kind != "operand"
            for x in leaves(c.expr)
            if isinstance(x, Name)
            and not self.deal.layout(c.types[x.name].axes).serves(self.deal.layout(c.axes))
        }
        staged = {
            x.name for c, x in self._operands() if isinstance(x, Name) and not self._in_registers(x, c.types)
        }
        return (read - held) | frozenset(others) | frozenset(staged)

    def _in_registers(self, e: Expr, types: Mapping[str, TileType]) -> bool:
        """Can an operand be taken from the registers it lies in: rows on the result's rows, whole columns in a warp?"""
        inner = e.arg if isinstance(e, Cast) else e
        if not isinstance(inner, Name) or inner.name in self._from_memory_names():
            return False
        axes = types[inner.name].axes
        if len(axes) != 2 or not isinstance(self.deal, FragmentDeal) or self.deal.column_warps:
            return False
        return self._fits(self.deal, axes)

    def place(self, name: str, t: TileType) -> Staged:
        """16-bit tiles lie in lines of 128 bytes where they divide into them, else as they are, each row 16 bytes longer."""
        if t.dtype not in SIXTEEN:
            return super().place(name, t)
        sizes, reason = [self.tiles[a] for a in t.axes], self.why_padded(t)
        self.padded[self._shown(name)] = reason
        if not reason:
            rows, columns = sizes
            buffer = self.memory.allocate(self.names.fresh(name), t.dtype, rows * columns, LINE)
            return Staged(buffer, t.axes, (columns, 1), chunked=rows * LINE)
        sizes[-1] = -(-sizes[-1] // CHUNK) * CHUNK + (CHUNK if len(sizes) > 1 else 0)
        pitches, size = [], 1
        for n in reversed(sizes):
            pitches.append(size)
            size *= n
        buffer = self.memory.allocate(self.names.fresh(name), t.dtype, size)
        return Staged(buffer, t.axes, tuple(reversed(pitches)))

    def _shown(self, name: str) -> str:
        """What a staged tile is called in a remark: its tensor, if it comes from memory."""
        name = name.removesuffix("_ring").removesuffix("_shared")
        loads = (s for s in statements(self.program.body) if isinstance(s, Let) and s.name == name)
        return next((s.value.tensor for s in loads if isinstance(s.value, Load)), name)

    def is_chunked(self, t: TileType) -> bool:
        return not self.why_padded(t)

    def why_padded(self, t: TileType) -> str:
        """Why a tile lies in padded rows, in words; "" where its rows are whole lines, and each round of copies starts at
        the same place of eight rows."""
        if t.dtype not in SIXTEEN or len(t.axes) != 2:
            return "it is no tile of 16-bit floats over two axes"
        rows, columns = (self.tiles[a] for a in t.axes)
        threads, along = self.deal.threads, columns // CHUNK
        if columns % LINE:
            return f"a row of {columns} is no multiple of {LINE}"
        if rows % EIGHT or threads % along or threads // along % EIGHT:
            return f"{threads} threads do not copy {rows} rows of {columns} by eights"
        if self._is_short_of_registers() and not self.spills_places():
            return f"loops that compute on partial tiles carry {self._carried()} values a thread"
        return ""

    def spills_places(self) -> bool:
        """Are registers short where lines are worth it even so?"""
        able = bool(self.continued) and self.target.capability >= LINES_WITH_MANY_STATES
        return able and self._is_short_of_registers()

    def counts_rows(self) -> bool:
        """A loop over full and partial tiles that carries many values has none."""
        return not (self.continued and self._is_short_of_registers())

    def _is_short_of_registers(self) -> bool:
        """Do loops that carry many values compute on partial tiles too?"""
        partial = any(
            s.axis.tile and self.has_tail(s.axis, s.axis.tile) and not only_adds_products(s)
            for s in self._all_loops()
        )
        return self._carried() >= MANY_STATES and bool(self.continued or partial)

    def _carried(self) -> int:
        """The most values that a thread carries through a loop."""
        return max(
            (sum(self.deal.layout(c.type.axes).elements for c in s.carries) for s in self._all_loops()),
            default=0,
        )

    def _all_loops(self) -> list[For]:
        return [s for s in statements(self.program.body) if isinstance(s, For)]

    def materialise(self, e: Expr) -> Expr:
        """exp(c * x) -> exp2(c * log2(e) * x) for a c that all lanes share: one product less an element."""
        return super().materialise(rewrite(e, self._to_base_two))

    def _to_base_two(self, e: Expr) -> Expr:
        match e:
            case Apply(op="exp", args=(Apply(op="mul", args=(c, x)),)) if self._is_shared(c):
                return Apply("exp2", (Apply("mul", (Apply("mul", (c, Const(LOG2_E, DType.F32))), x)),))
        return e

    def _is_shared(self, e: Expr) -> bool:
        t = self.facts.type_of(e, self.types)
        return not t.axes and t.dtype is DType.F32

    # ------------------------------------------------------------ products

    def operand(self, e: Expr) -> Staged | RegisterOperand:  # type: ignore[override]
        if self._in_registers(e, self.types):
            inner = e.arg if isinstance(e, Cast) else e
            assert isinstance(inner, Name)
            return RegisterOperand(inner, self.types[inner.name].axes)
        return super().operand(e)

    def product(
        self,
        d: Dot,
        a: Staged | RegisterOperand,
        b: Staged | RegisterOperand,
        target: Registers,
        dtype: DType,
    ) -> None:
        """target += a · b, one instruction's depth of the contracted axis at a time."""
        over = d.over[0]
        row, _ = _sides(target.layout)
        left, right = (a, b) if row in a.axes else (b, a)
        if not isinstance(right, Staged):
            right = super().operand(right.value)
        if isinstance(left, RegisterOperand):
            left = replace(left, value=self._existing(left, over))
        for staged in (left, right):
            if isinstance(staged, Staged):
                self.settle(staged)
        multiplied = self.multiplied(d, target)
        parts = self.parts_of(multiplied)
        source_a = self.matrices_of(multiplied, left) if isinstance(left, Staged) else None
        source_b = self.matrices_of(multiplied, right)
        in_lines = any(x is not None and x.turn for x in (source_a, source_b))
        for k in self._steps(over, LINE // STEP if in_lines else self.tiles[over] // STEP):
            if source_a is not None:
                self.fetch_matrices(source_a, parts[0], multiplied.rows, multiplied.i, multiplied.element, k)
            else:
                assert isinstance(left, RegisterOperand)
                self._pack(left, parts[0], row, over, multiplied.rows, multiplied.i, multiplied.element, k)
            self.fetch_matrices(
                source_b, parts[1], multiplied.columns // 2, multiplied.j, multiplied.element, k
            )
            self.multiply(multiplied, parts)

    def multiplied(self, d: Dot, target: Registers) -> Multiplied:
        layout = target.layout
        row, column = _sides(layout)
        strides = {
            x: Point(layout, {y: "1" if y == x else "0" for y in layout.axes}).element(layout)
            for x in layout.axes
        }
        return Multiplied(
            target.array, self.facts.type_of(d.a, self.types).dtype, row, column, d.over[0],
            layout.spread(row).count // 2, layout.spread(column).count // 2,
            _stride(strides[row]), _stride(strides[column]),
            self.names.fresh(f"{row}_i"), self.names.fresh(f"{column}_i"),
        )  # fmt: skip

    def parts_of(self, m: Multiplied) -> tuple[str, str]:
        """Registers for the fragments of one instruction's depth of both operands."""
        parts = self.names.fresh(f"{m.row}_part"), self.names.fresh(f"{m.column}_part")
        for part, n in zip(parts, (4 * m.rows, 2 * m.columns), strict=True):
            self.text.line(f"{part} = registers_i32({n})")
        return parts

    def matrices_of(self, m: Multiplied, staged: Staged) -> Matrices:
        """Where a lane reads an operand's matrices."""
        deal = self.deal
        assert isinstance(deal, FragmentDeal)
        lane8, lane3, lane4 = self.lanes(0, 3), self.lanes(3, 1), self.lanes(4, 1)
        if m.row in staged.axes:
            at_row = self.lanes(LANE_BITS, deal.row_warps)
            found = self._matrices(staged, m.row, m.over, lane3, lane4, lane8, at_row, 8 << deal.row_warps)
            return self._across_pairs(found, m.rows)
        at_column = self.lanes(LANE_BITS + deal.row_warps, deal.column_warps)
        found = self._matrices(
            staged, m.column, m.over, lane4, lane3, lane8, at_column, 8 << deal.column_warps
        )
        return self._across_pairs(found, m.columns // 2)

    def multiply(self, m: Multiplied, parts: tuple[str, str]) -> None:
        """Add the products of the fragments in `parts`."""
        self.text.line(f"for {m.i} in range({m.rows}):")
        with self.text.indented():
            self.text.line(f"for {m.j} in range({m.columns}):")
            with self.text.indented():
                at = f"{m.i} * {2 * m.row_stride} + {m.j} * {2 * m.column_stride}"
                self.text.line(
                    f"mma_{m.element}({m.sums}, {at}, {m.row_stride}, {m.column_stride}, "
                    f"{parts[0]}, 4 * {m.i}, {parts[1]}, 2 * {m.j})"
                )

    def _steps(self, over: str, together: int) -> Iterator[str]:
        """The number of a step of a product, in loops over so many: NVVM unrolls short ones whole, and registers cannot be
        indexed."""
        steps, depth = self.tiles[over] // STEP, self.text.depth
        for first in range(0, steps, together):
            count = min(together, steps - first)
            if count == 1:
                yield str(first)
                continue
            k = self.names.fresh(f"{over}_step")
            self.text.line(f"for {k} in range({count}):")
            self.text.depth += 1
            yield f"({k} + {first})" if first else k
            self.text.depth = depth

    def _existing(self, operand: RegisterOperand, over: str) -> Expr:
        """The operand with zeros on lanes of the contracted axis that do not exist."""
        layout = self.deal.layout(operand.axes)
        if not self.lane_checks(Point(layout, dict.fromkeys(operand.axes, "0")), over):
            return operand.value
        t = TileType(DType.F32, operand.axes)
        registers = self.registers("weights", t, layout)
        self.prepare(operand.value, layout)
        for at in self.nest(layout, [operand.value], exists=[over]):
            value = self.emit(operand.value, at).operand
            lanes = " and ".join(self.conditions(at, [over]))
            self.text.line(f"{registers.array}[{at.element(layout)}] = {value} if {lanes} else f32(0.0)")
        return self.temporary("weights", Value(t, registers=registers))

    def lanes(self, low: int, bits: int) -> str:
        """Some bits of the thread's number, under a name."""
        if not bits:
            return "0"
        key = (low, bits, 0, 0, 1 << bits)
        if key not in self.coordinates:
            self.coordinates[key] = self.names.fresh(f"lane{low}" if low < LANE_BITS else f"warp{low}")
        return self.coordinates[key]

    def _matrices(
        self,
        staged: Staged,
        outer: str,
        over: str,
        second: str,
        deeper: str,
        lane8: str,
        warp: str,
        step: int,
    ) -> Matrices:
        """Where a lane's row of an 8 x 8 matrix starts, and how far apart pairs of tiles and steps are.

        `second`: the bit of the lane that selects the second of two tiles; `deeper`: the second half of a step.
        """
        name = f"{outer}_from"
        if staged.chunked:
            return self._chunked_matrices(staged, name, over, second, deeper, lane8, warp, step)
        pitch = dict(zip(staged.axes, staged.pitches, strict=True))
        if pitch[over] == 1:
            base = (
                f"({lane8} + 8 * {warp} + {step} * {second}) * {pitch[outer]} + 8 * {deeper}{staged.offset}"
            )
            pair, deep, turned = 2 * step * pitch[outer], STEP, False
        else:
            base = f"(8 * {deeper} + {lane8}) * {pitch[over]} + 8 * {warp} + {step} * {second}{staged.offset}"
            pair, deep, turned = 2 * step, STEP * pitch[over], True
        return Matrices(staged, self.assign(name, Code(base, DType.I64)), turned, pair, deep)

    def _chunked_matrices(
        self, staged: Staged, name: str, over: str, second: str, deeper: str, lane8: str, warp: str, step: int
    ) -> Matrices:
        """The same of a tile in lines. A lane's row is `lane8` modulo 8; its matrices' columns count by eights, in which a
        lane's own part and that of a pair or step have no bit in common."""
        turned = staged.axes[1] != over
        if turned:
            row, own = f"8 * {deeper} + {lane8}", f"({warp} + {step // EIGHT} * {second})"
            pair, deep = 2 * step // EIGHT, STEP * LINE
        else:
            row, own = f"{lane8} + 8 * {warp} + {step} * {second}", deeper
            pair, deep = 2 * step * LINE, STEP // EIGHT
        base = self.assign(name, Code(f"({row}) * {LINE}{staged.offset}", DType.I64))
        turn = self.assign(f"{name}_turn", Code(f"({own} ^ {lane8}) << 3", DType.I64))
        return Matrices(staged, base, turned, pair, deep, turn)

    def _across_pairs(self, source: Matrices, count: int) -> Matrices:
        """Of a transposed tile in lines each pair's place, which is the same at every step."""
        if not source.turn or not source.turned:
            return source
        places, i = self.names.fresh(f"{source.base}_pairs"), self.names.fresh("pair")
        self.text.line(f"{places} = registers_i64({count})")
        self.text.line(f"for {i} in range({count}):")
        self.text.line(f"    {places}[{i}] = {source.across(f'{i} * {source.pair}')}")
        return replace(source, base=places, turn="", each=True)

    def fetch_matrices(
        self, source: Matrices, part: str, count: int, counter: str, element: DType, k: str
    ) -> None:
        base, deep = source.base, f" + {k} * {source.deep}" if k != "0" else ""
        if source.turn:  # this step's place in the lines
            base, deep = self.assign(f"{base}_at", Code(source.across(f"{k} * {source.deep}"), DType.I64)), ""
        each = f"{base}[{counter}]" if source.each else f"{base} + {counter} * {source.pair}"
        kind = "ldmatrix_turned" if source.turned else "ldmatrix"
        self.text.line(f"for {counter} in range({count}):")
        self.text.line(
            f"    {kind}_{element}({part}, 4 * {counter}, {source.staged.buffer.name}, {each}{deep})"
        )

    def _pack(
        self,
        left: RegisterOperand,
        part: str,
        row: str,
        over: str,
        rows: int,
        counter: str,
        element: DType,
        k: str,
    ) -> None:
        """Two neighbouring values of a row in one register, as the instruction takes them."""
        layout = self.deal.layout(left.axes)
        self.text.line(f"for {counter} in range({rows}):")
        deeper, half = (self.names.fresh(n) for n in ("deeper", "half"))
        depth = self.text.depth
        for name in (deeper, half):
            self.text.depth += 1
            self.text.line(f"for {name} in range(2):")
        self.text.depth += 1
        start = f"2 * {deeper}" if k == "0" else f"4 * {k} + 2 * {deeper}"
        pair = [
            self.emit(
                left.value, Point(layout, {row: f"(2 * {counter} + {half})", over: f"({start} + {n})"})
            ).text
            for n in (0, 1)
        ]
        self.text.line(f"{part}[4 * {counter} + 2 * {deeper} + {half}] = pack_{element}({', '.join(pair)})")
        self.text.depth = depth


def _sides(layout: Layout) -> tuple[str, str]:
    """The axes of a product's result, on rows and on columns of fragments."""
    row = next(x for x in layout.axes if layout.spread(x).low == 2)
    return row, next(x for x in layout.axes if x != row)


def _stride(text: str) -> int:
    """The stride that `Point.element` gives a counter of 1: "1" or "1 * n"."""
    return int(text.rpartition("* ")[2])
