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

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...dsl.diagnostics import TileError
from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Dot,
    Expr,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Stmt,
    Store,
    TileProgram,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from .deal import Deal, Demand, FragmentDeal, Layout, Spread, fragment_deal
from .scalar_cuda import Code, convert
from .shared_memory import Touched
from .simt import Kernel
from .simt_elements import NARROW, Wide
from .simt_source import (
    Point,
    Registers,
    Staged,
    Value,
    arena_bytes,
    starts_late,
)
from .tile_types import Context, Facts, contexts, is_product, leaves, rewrite, static_value, tile_axes

SIXTEEN = (DType.F16, DType.BF16)
STEP = 16  # elements of the contracted axis that one instruction takes
EIGHT_WARPS_FROM = 1 << 15  # elements of a product that eight warps share instead of four
CHUNK = 8  # elements that one asynchronous copy moves: 16 bytes
MOST_STAGES, LEAST_STAGES = 3, 2
BLOCKS_PER_SM = 2  # a deeper ring than lets so many blocks share a multiprocessor does not pay
GROUP = 8
LOG2_E = 1.4426950408889634
LANE_BITS = 5
RESERVED_BYTES = 2048  # of each block's shared memory: the driver's, and small tiles


class Unfit(Exception):
    """Why a program has no code in this tier, in words."""


@dataclass(frozen=True)
class RegisterOperand:
    """A product's operand with the result's rows that its threads hold already: the expression of an element."""

    value: Expr
    axes: tuple[str, ...]


def variants(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """The kernels of a program, the preferred first; the last serves any sizes, strides and alignment. Raises `Unfit`."""
    if target.capability < (8, 0):
        raise Unfit(f"{target.name} has no mma.sync for this shape")
    program = with_named_operands(program)
    check(program)
    ragged = Wide(CHUNK, tuple(dict.fromkeys(packed_extents(program), CHUNK).items()))
    whole = Wide(CHUNK, tuple({**dict(ragged.multiples), **tile_multiples(program)}.items()))
    made: list[Kernel] = []
    for wide, suffix in ((whole, ""), (ragged, "ragged"), (NARROW, "any")):
        if not made or wide != made[-1].wide:
            made.append(MatrixKernel(program, target, wide, suffix))
    return made


def why_not(program: TileProgram, target: CudaTarget) -> str | None:
    """Why a program has no code in this tier; None where it has."""
    try:
        variants(program, target)
    except Unfit as reason:
        return str(reason)
    except TileError as reason:
        return reason.diagnostics[0].message
    return None


def packed_extents(program: TileProgram) -> list[str]:
    """Extents, known at run time only, of the axes along which tiles are copied by chunks."""
    statics = dict(program.statics)
    found = []
    for t, subscripts in accesses(program):
        axis = subscripts[-1] if subscripts else None
        extent = program.param(t).shape[-1] if subscripts else None
        is_open = isinstance(extent, ExtentRef) and extent.name not in statics
        if is_open and isinstance(axis, AxisIndex) and axis.axis in tile_axes(program, statics):
            assert isinstance(extent, ExtentRef)
            found.append(extent.name)
    return found


def accesses(program: TileProgram) -> list[tuple[str, tuple[Expr, ...]]]:
    every = [x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e)]
    moved = [(x.tensor, x.subscripts) for x in every if isinstance(x, Load)]
    return moved + [(s.tensor, s.subscripts) for s in statements(program.body) if isinstance(s, Store)]


def tile_multiples(program: TileProgram) -> dict[str, int]:
    """Extents that are cut into tiles, each with its tile's size."""
    statics = dict(program.statics)
    found: dict[str, int] = {}
    for a in tile_axes(program, statics).values():
        if isinstance(a.extent, ExtentRef) and a.extent.name not in statics and a.tile is not None:
            found[a.extent.name] = max(a.tile, found.get(a.extent.name, 1))
    return found


def check(program: TileProgram) -> None:
    """Every product must be one of two axes and 16-bit floats. Raises `Unfit`."""
    statics = dict(program.statics)
    tiles = {a: x.tile or 1 for a, x in tile_axes(program, statics).items()}
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


def facts_of(program: TileProgram, tiles: dict[str, int]) -> Facts:
    return Facts({p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, tiles)


# ---------------------------------------------------------------- the program in the form this tier takes


def with_named_operands(program: TileProgram) -> TileProgram:
    """The same program: operands read from memory are named tiles, and both operands of a product have one type."""
    statics = dict(program.statics)
    facts = facts_of(program, {a: x.tile or 1 for a, x in tile_axes(program, statics).items()})
    return replace(program, body=_Naming(facts).block(program.body, {}))


class _Naming:
    def __init__(self, facts: Facts) -> None:
        self.facts, self.count = facts, 0

    def block(self, body: tuple[Stmt, ...], types: dict[str, TileType]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            match s:
                case Let():
                    out.append(replace(s, value=self.named(s.value, types, out)))
                    types[s.name] = s.type
                case Store():
                    out.append(replace(s, value=self.named(s.value, types, out)))
                case Grid():
                    out.append(replace(s, body=self.block(s.body, dict(types))))
                case For():
                    types.update({c.name: c.type for c in s.carries})
                    inside = dict(types)
                    inner = list(self.block(s.body, inside))
                    yields = tuple(self.named(y, inside, inner) for y in s.yields)
                    out.append(replace(s, body=tuple(inner), yields=yields))
        return tuple(out)

    def named(self, e: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        def rule(x: Expr) -> Expr:
            if not isinstance(x, Dot):
                return x
            return replace(x, a=self.operand(x.a, x.b, types, out), b=self.operand(x.b, x.a, types, out))

        return rewrite(e, rule)

    def operand(self, e: Expr, other: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        mine, its = self.facts.type_of(e, types), self.facts.type_of(other, types)
        if isinstance(e, Load):
            self.count += 1
            name = f"{e.tensor} operand {self.count}"
            out.append(Let(name, mine, e))
            types[name] = mine
            return Name(name)
        if mine.dtype is DType.F32 and its.dtype in SIXTEEN:
            return Cast(its.dtype, e)
        return e


# ---------------------------------------------------------------- the kernel


class MatrixKernel(Kernel):
    """Emits one program."""

    tier = "mma"

    def __init__(self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str) -> None:
        self.streamed: set[str] = set()
        self.awaited: set[str] = set()  # buffers that copies under way are filling
        self.stages = MOST_STAGES
        super().__init__(program, target, wide, suffix)

    def _give_names(self) -> None:
        self.rounds = True  # operands and weights are rounded to 16 bits
        super()._give_names()

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Tiles of a product in groups of GROUP rows, rows fastest: blocks that run together read the same tiles."""
        two = axes[-2:]
        plain = len(two) == 2 and all(a.tile is not None and a.lo is None and a.hi is None for a in two)
        if not plain or any(
            isinstance(s, For) and s.axis.hi is not None for s in statements(self.program.body)
        ):
            super()._task_indices(axes, counts)
            return
        names = [self.axis_names[a.name] for a in two]
        rows, columns = counts[-2:]
        rest = "task"
        if len(axes) > 2:
            inner = self.assign("tiles", Code(f"{rows} * {columns}", DType.I64))
            rest = self.assign("tile", Code(f"task % {inner}", DType.I64))
            for a, count in reversed(list(zip(axes[:-2], counts[:-2], strict=True))):
                left = self.assign("rest", Code(f"task // {inner}", DType.I64))
                here = f"{left} % {count}"
                name = self.axis_names[a.name]
                self.text.line(f"{name.index if a.tile is None else name.first} = ({here}) * {a.tile or 1}")
                inner = self.assign("tiles", Code(f"{inner} * {count}", DType.I64))
        group = self.assign("group", Code(f"{rest} // ({GROUP} * {columns}) * {GROUP}", DType.I64))
        inside = self.assign("inside", Code(f"{rest} % ({GROUP} * {columns})", DType.I64))
        high = self.assign("high", Code(f"min({rows} - {group}, {GROUP})", DType.I64))
        self.text.line(f"{names[0].first} = ({group} + {inside} % {high}) * {two[0].tile}")
        self.text.line(f"{names[1].first} = {inside} // {high} * {two[1].tile}")

    # ------------------------------------------------------------ where things lie

    def dealt(self, demands: list[Demand]) -> Deal:
        """Two rows of two warps, or four rows of one where a product's result feeds the next one's rows."""
        feeds = any(isinstance(x, Cast | Name) and self._is_result(x, c.types) for c, x in self._operands())
        largest = max(
            (self.tiles[d.axes[0]] * self.tiles[d.axes[-1]] for d in demands if d.kind == "dot"), default=0
        )
        eight = [(3, 0)] if feeds else [(2, 1), (1, 2)]
        choices = [(2, 0)] if feeds else [(1, 1), (2, 0), (0, 2)]
        choices = [*eight, *choices] if largest >= EIGHT_WARPS_FROM else choices
        for rows, columns in choices:
            found = fragment_deal(demands, self.tiles, rows, columns)
            if all(self._fits(found, d.axes) for d in demands if d.kind == "dot"):
                return found
        raise Unfit("its tiles do not divide into 16 rows and 16 columns a warp")

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
        """16-bit tiles lie as they are, each row 16 bytes longer than it is."""
        if t.dtype not in SIXTEEN:
            return super().place(name, t)
        sizes = [self.tiles[a] for a in t.axes]
        sizes[-1] = -(-sizes[-1] // CHUNK) * CHUNK + (CHUNK if len(sizes) > 1 else 0)
        pitches, size = [], 1
        for n in reversed(sizes):
            pitches.append(size)
            size *= n
        buffer = self.memory.allocate(self.names.fresh(name), t.dtype, size)
        return Staged(buffer, t.axes, tuple(reversed(pitches)))

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

    # ------------------------------------------------------------ copies

    def let(self, s: Let) -> None:
        if s.name in self.streamed:
            return
        if s.name in self.crossing and isinstance(s.value, Load) and self._copies(s.value, s.type):
            staged = self.place(f"{s.name}_shared", s.type)
            self.note(self.memory.write(staged.buffer))
            self.copy(self._with_scalars(s.value), s.type, staged)
            self.text.line("commit_copies()")
            self.awaited.add(staged.buffer.name)
            self.bind(s.name, Value(s.type, staged=staged))
            return
        super().let(s)

    def _copies(self, e: Load, t: TileType) -> bool:
        """Can a tile be copied in chunks of 16 bytes?"""
        last = e.subscripts[-1] if e.subscripts else None
        if (
            self.wide.run == 1
            or t.dtype not in SIXTEEN
            or len(t.axes) != 2
            or not isinstance(last, AxisIndex)
        ):
            return False
        if last.axis != t.axes[-1] or self.tiles[last.axis] % CHUNK or last.axis not in self.live:
            return False
        param, live = self.program.param(e.tensor), self.live
        extent = static_value(live[last.axis].extent, self.statics)
        whole = (
            extent % CHUNK == 0 if extent is not None else self.wide.divides(live[last.axis].extent, CHUNK)
        )
        spans = [self.facts.type_of(x, self.types).axes for x in e.subscripts]
        inside = all(
            not axes or self.covers(x, n) for x, axes, n in zip(e.subscripts, spans, param.shape, strict=True)
        )
        free = not any(self.depends_on_tensors(x) for x in e.subscripts)
        return whole and inside and free and e.tensor not in self.shared_tensors

    def _with_scalars(self, e: Load) -> Load:
        """The same with what its lanes share computed before."""
        found = self.hoisted(e)
        assert isinstance(found, Load)
        return found

    def copy(self, e: Load, t: TileType, staged: Staged) -> None:
        """Start copying a tile; chunks that do not exist become zero."""
        self.wide_tensors[e.tensor] = None
        row, column = t.axes
        along = self.tiles[column] // CHUNK
        pieces, threads = self.tiles[row] * along, self.deal.threads
        names = {a: self.axis_names[a] for a in t.axes}
        at = Point(Layout(t.axes, tuple(Spread(self.tiles[a]) for a in t.axes)), dict.fromkeys(t.axes, "0"))
        param, depth = self.program.param(e.tensor), self.text.depth
        where = {a: self.names.fresh(f"{a}_at") for a in t.axes}
        bare = [i for i, x in enumerate(e.subscripts) if x == AxisIndex(row)]
        others = [x for x in e.subscripts if x != AxisIndex(row)]
        stepping = len(bare) == 1 and not any(self._mentions(x, row) for x in others)
        even = threads % along == 0 and pieces % threads == 0 and stepping
        piece = self.names.fresh("piece")
        if even:  # rounds differ by whole rows: one address, and a step
            rows = threads // along
            self.text.line(f"{where[row]} = thread // {along}")
            self.text.line(f"{where[column]} = thread % {along} * {CHUNK}")
        else:
            self.text.line(f"for {piece} in range({-(-pieces // threads)}):")
            self.text.depth += 1
            if pieces % threads:
                self.text.line(f"if thread + {threads} * {piece} < {pieces}:")
                self.text.depth += 1
            self.text.line(f"{where[row]} = (thread + {threads} * {piece}) // {along}")
            self.text.line(f"{where[column]} = (thread + {threads} * {piece}) % {along} * {CHUNK}")
        for a in t.axes:
            first = "" if a in self._whole() else f"{names[a].first} + "
            self.text.line(f"{names[a].index} = {first}{where[a]}")
        subscripts = [convert(self.cut(self.emit(x, at), 40), DType.I64) for x in e.subscripts]
        loose = [not self.facts.type_of(x, self.types).axes for x in e.subscripts]
        offset = self.offset(param, subscripts, packed=True)
        place = f"{where[row]} * {staged.pitches[0]} + {where[column]}{staged.offset}"
        outside = self.within(param, e.subscripts, subscripts, loose)
        if even:
            offset = self.cut(Code(offset, DType.I64), 0).text
            place = self.cut(Code(place, DType.I64), 0).text
            step = self.cut(Code(f"{rows} * {self.strides[e.tensor][bare[0]]}", DType.I64), 0).text
            self.text.line(f"for {piece} in range({pieces // threads}):")
            self.text.depth += 1
            place, offset = f"{place} + {rows * staged.pitches[0]} * {piece}", f"{offset} + {step} * {piece}"
            self.text.line(
                f"{names[row].index} = {names[row].first} + {where[row]} + {rows} * {piece}"
                if row not in self._whole()
                else f"{names[row].index} = {where[row]} + {rows} * {piece}"
            )
        checks = [x for a in t.axes for x in self.lane_checks(at, a)] + outside
        self.text.line(
            f"copy16_{t.dtype}({staged.buffer.name}, {place}, {self.tensors[e.tensor]}, "
            f"{offset}, {' and '.join(checks) or 'True'})"
        )
        self.text.depth = depth

    def _mentions(self, e: Expr, axis: str) -> bool:
        return any(isinstance(x, AxisIndex) and x.axis == axis for x in subexpressions(e))

    def settle(self, staged: Staged) -> None:
        """Before a read: wait for what is being copied there."""
        if staged.buffer.name in self.awaited:
            self.text.line("wait_copies0()")
            self.text.line("cuda.syncthreads()")
            self.awaited.clear()
            self.memory.touched = Touched()
        self.note(self.memory.read(staged.buffer))

    def prepare(self, e: Expr, layout: Layout) -> None:
        for x in dict.fromkeys(x.name for x in leaves(e) if isinstance(x, Name)):
            staged = self.values[x].staged
            if staged is not None and staged.buffer.name in self.awaited:
                self.settle(staged)
        super().prepare(e, layout)

    # ------------------------------------------------------------ loops over tiles that come ahead

    def loop(self, s: For) -> None:
        streams = [] if s.reverse else self._streams(s)
        if not streams:
            super().loop(s)
            return
        self.start_carries(s)
        streams = [
            replace(x, value=self._with_scalars(x.value)) for x in streams if isinstance(x.value, Load)
        ]
        self.stages = self._depth(streams)
        rings = {let.name: self._ring(let) for let in streams}
        first, end = self.bounds(s.axis)
        size = s.axis.tile or 1
        names = self.axis_names[s.axis.name]
        start = (
            self.assign(f"{s.axis.name}_start", Code(f"{first} // {size} * {size}", DType.I64))
            if first != "0"
            else "0"
        )
        stop = self.assign(f"{s.axis.name}_stop", Code(end, DType.I64))
        if starts_late(s.axis):
            self.text.line(f"{stop} = {stop} if {first} < {stop} else {start}")
        self.live[s.axis.name] = s.axis
        with self.whole_tiles(s):
            for stage in range(self.stages - 1):
                self.text.line(f"{names.first} = {start} + {stage * size}")
                self._ask(streams, rings, stop, names.first, str(stage))
            slot, ahead = self.names.fresh("slot"), self.names.fresh("slot_ahead")
            self.text.line(f"{slot} = 0")
            self.text.line(f"{ahead} = {self.stages - 1}")
            visited = self.names.fresh(f"{s.axis.name}_now")
            self.text.line(f"for {visited} in range({start}, {stop}, {size}):")
            held = set(self.awaited)
            with self.text.indented(), self.back_edge():
                self.text.line(f"wait_copies{self.stages - 2}()")
                self.text.line("cuda.syncthreads()")
                self.memory.touched = Touched()
                self.awaited.clear()
                self.text.line(f"{names.first} = {visited} + {(self.stages - 1) * size}")
                self._ask(streams, rings, stop, names.first, ahead)
                self.text.line(f"{names.first} = {visited}")
                for let in streams:
                    ring = rings[let.name]
                    each = ring.buffer.size // self.stages
                    self.bind(let.name, Value(let.type, staged=replace(ring, offset=f" + {slot} * {each}")))
                self.streamed |= {let.name for let in streams}
                self.loop_body(s)
                for variable in (slot, ahead):
                    self.text.line(f"{variable} = {variable} + 1 if {variable} < {self.stages - 1} else 0")
            self.text.line("wait_copies0()")
            self.awaited |= held
        del self.live[s.axis.name]
        self.streamed -= {let.name for let in streams}
        for let in streams:
            del self.values[let.name]
            self.memory.free(rings[let.name].buffer)

    def _streams(self, s: For) -> list[Let]:
        """Tiles of the loop that come from memory and that products alone read."""
        self.live[s.axis.name] = s.axis
        inside = {x.name for x in statements(s.body) if isinstance(x, Let)}
        found = []
        for let in s.body:
            if not isinstance(let, Let) or not isinstance(let.value, Load) or let.name not in self.crossing:
                continue
            free = not any(isinstance(x, Name) and x.name in inside for x in subexpressions(let.value))
            if free and s.axis.name in let.type.axes and self._copies(let.value, let.type):
                found.append(let)
        del self.live[s.axis.name]
        return found

    def _depth(self, streams: list[Let]) -> int:
        """Steps that a ring holds: three where two blocks with such rings fit a multiprocessor."""
        one = sum(arena_bytes(x.type.dtype) * self._elements(x.type) for x in streams)
        held = sum(arena_bytes(b.dtype) * b.size for b in self.memory.live)
        room = self.target.shared_per_sm_bytes // BLOCKS_PER_SM - RESERVED_BYTES
        return MOST_STAGES if held + MOST_STAGES * one <= room else LEAST_STAGES

    def _elements(self, t: TileType) -> int:
        row, column = (self.tiles[a] for a in t.axes)
        return row * (column + CHUNK)

    def _ring(self, let: Let) -> Staged:
        one = self.place(f"{let.name}_ring", let.type)
        self.memory.free(one.buffer)
        self.memory.all_buffers.remove(one.buffer)
        buffer = self.memory.allocate(one.buffer.name, one.buffer.dtype, one.buffer.size * self.stages)
        self.note(self.memory.write(buffer))
        return replace(one, buffer=buffer)

    def _ask(self, streams: list[Let], rings: Mapping[str, Staged], stop: str, first: str, slot: str) -> None:
        """Start the copies of one step, if there is one."""
        self.text.line(f"if {first} < {stop}:")
        with self.text.indented():
            for let in streams:
                ring = rings[let.name]
                each = ring.buffer.size // self.stages
                assert isinstance(let.value, Load)
                offset = f" + {int(slot) * each}" if slot.isdigit() else f" + {slot} * {each}"
                self.copy(let.value, let.type, replace(ring, offset=offset))
        self.text.line("commit_copies()")

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
        layout, (over,) = target.layout, d.over
        row = next(x for x in layout.axes if layout.spread(x).low == 2)
        column = next(x for x in layout.axes if x != row)
        left, right = (a, b) if row in a.axes else (b, a)
        if not isinstance(right, Staged):
            right = super().operand(right.value)
        element = self.facts.type_of(d.a, self.types).dtype
        if isinstance(left, RegisterOperand):
            left = replace(left, value=self._existing(left, over))
        for staged in (left, right):
            if isinstance(staged, Staged):
                self.settle(staged)
        rows, columns = layout.spread(row).count // 2, layout.spread(column).count // 2
        parts = [self.names.fresh(n) for n in (f"{row}_part", f"{column}_part")]
        for part, n in zip(parts, (4 * rows, 2 * columns), strict=True):
            self.text.line(f"{part} = registers_i32({n})")
        deal = self.deal
        assert isinstance(deal, FragmentDeal)
        row_step, column_step = 8 << deal.row_warps, 8 << deal.column_warps
        lane8, lane3, lane4 = self.lanes(0, 3), self.lanes(3, 1), self.lanes(4, 1)
        at_row = self.lanes(LANE_BITS, deal.row_warps)
        at_column = self.lanes(LANE_BITS + deal.row_warps, deal.column_warps)
        here = right if isinstance(left, RegisterOperand) else left
        assert isinstance(here, Staged)
        source_a = None
        if isinstance(left, Staged):
            source_a = self._matrices(left, row, over, lane3, lane4, lane8, at_row, row_step)
        source_b = self._matrices(right, column, over, lane4, lane3, lane8, at_column, column_step)
        strides = {
            x: Point(layout, {y: "1" if y == x else "0" for y in layout.axes}).element(layout)
            for x in layout.axes
        }
        row_stride, column_stride = (_times(strides[x]) for x in (row, column))
        i, j = self.names.fresh(f"{row}_i"), self.names.fresh(f"{column}_i")
        for k in range(self.tiles[over] // STEP):
            if source_a is not None:
                self._fetch(source_a, parts[0], rows, i, element, k)
            else:
                assert isinstance(left, RegisterOperand)
                self._pack(left, parts[0], row, over, rows, i, element, k)
            self._fetch(source_b, parts[1], columns // 2, j, element, k)
            self.text.line(f"for {i} in range({rows}):")
            with self.text.indented():
                self.text.line(f"for {j} in range({columns}):")
                with self.text.indented():
                    at = f"{i} * {2 * row_stride} + {j} * {2 * column_stride}"
                    self.text.line(
                        f"mma_{element}({target.array}, {at}, {row_stride}, {column_stride}, "
                        f"{parts[0]}, 4 * {i}, {parts[1]}, 2 * {j})"
                    )

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
    ) -> tuple[Staged, str, int, int, bool]:
        """Where a lane's row of an 8 x 8 matrix starts, what one more pair of tiles and one more step add, transposed?

        `second`: the bit of the lane that selects the second of two tiles; `deeper`: the second half of a step.
        """
        pitch = dict(zip(staged.axes, staged.pitches, strict=True))
        if pitch[over] == 1:
            base = (
                f"({lane8} + 8 * {warp} + {step} * {second}) * {pitch[outer]} + 8 * {deeper}{staged.offset}"
            )
            pair, deep, turned = 2 * step * pitch[outer], STEP, False
        else:
            base = f"(8 * {deeper} + {lane8}) * {pitch[over]} + 8 * {warp} + {step} * {second}{staged.offset}"
            pair, deep, turned = 2 * step, STEP * pitch[over], True
        return staged, self.assign(f"{outer}_from", Code(base, DType.I64)), pair, deep, turned

    def _fetch(
        self,
        source: tuple[Staged, str, int, int, bool],
        part: str,
        count: int,
        counter: str,
        element: DType,
        k: int,
    ) -> None:
        staged, base, pair, deep, turned = source
        kind = "ldmatrix_turned" if turned else "ldmatrix"
        self.text.line(f"for {counter} in range({count}):")
        offset = f"{base} + {counter} * {pair}" + (f" + {k * deep}" if k else "")
        self.text.line(f"    {kind}_{element}({part}, 4 * {counter}, {staged.buffer.name}, {offset})")

    def _pack(
        self,
        left: RegisterOperand,
        part: str,
        row: str,
        over: str,
        rows: int,
        counter: str,
        element: DType,
        k: int,
    ) -> None:
        """Two neighbouring values of a row in one register, as the instruction takes them."""
        layout = self.deal.layout(left.axes)
        self.text.line(f"for {counter} in range({rows}):")
        with self.text.indented():
            for piece in range(4):
                half, deeper = piece & 1, piece >> 1
                values = []
                for lane in (0, 1):
                    counters = {row: f"(2 * {counter} + {half})", over: str(4 * k + 2 * deeper + lane)}
                    values.append(self.emit(left.value, Point(layout, counters)).text)
                self.text.line(f"{part}[4 * {counter} + {piece}] = pack_{element}({', '.join(values)})")


def _times(text: str) -> int:
    """The stride that `Point.element` gives a counter of 1: "1" or "1 * n"."""
    return int(text.rpartition("* ")[2])
