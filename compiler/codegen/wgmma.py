"""Tier `wgmma`: products of 16-bit floats on the matrix units of sm_90a, by warpgroups with roles (design: one lowering).

One warpgroup loads: it asks the copy engine for tiles and waits for empty slots of rings (`roles.py`, `staging.py`). The
others compute, 64 rows of a tile each: their sums lie in registers as `deal.WarpgroupDeal` says, so everything elementwise,
reductions along rows and epilogues are those of the simt tier. A product takes one operand from shared memory and the other,
which has the result's rows, from there or from the registers in which another product left it, rounded. Products run
asynchronously: each is a group, and what touches its sums or its operands waits for it first. Results of 16 bits go to
memory through shared memory and the copy engine, which leaves out what lies beyond the tensor.

What this tier does not take it refuses with the reason, `Unfit`; the program then stays with another tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...dsl.diagnostics import TileError
from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Dot,
    Expr,
    For,
    Grid,
    Let,
    Load,
    Name,
    Stmt,
    Store,
    TileProgram,
    TileType,
    subexpressions,
)
from . import mma
from .deal import Layout
from .mma import RegisterOperand, Unfit
from .roles import MODULES, REGISTERS, ROWS, Loader, Role, with_plain_bounds
from .simt import Kernel
from .simt_elements import Wide
from .simt_source import Point, Registers, Staged, Value, plain
from .staging import BARRIER_BYTES, CHUNK, ROW_BYTES, Box, Ring, computed
from .streams import facts_of, tile_multiples, with_named_operands
from .tile_types import contexts, is_product, tile_axes

STEP = 16
MOST_COLUMNS = 256  # of one instruction
MOST_SUMS = 208  # registers for sums and packed operands that a computing thread may hold
THREADS = 128  # of a warpgroup
FIRST_BARRIER = 1  # named barriers of the warpgroups; 0 is the block's


def variants(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """The kernels of a program, the preferred first: whole tiles, ragged ones, and those of tier `mma`, which serve tensors
    that the copy engine cannot address. Raises `Unfit`."""
    if not target.has_wgmma:
        raise Unfit(f"{target.name} has no wgmma; it is sm_90a's")
    prepared = with_plain_bounds(with_named_operands(program))
    warpgroups = _warpgroups(prepared)
    made: list[WarpgroupKernel] = []
    whole = tuple(tile_multiples(prepared).items())
    for multiples, suffix in (((), ""), (whole, "whole")):
        found = WarpgroupKernel(prepared, target, Wide(1, multiples), suffix, warpgroups)
        if not made or found.unnamed() != made[0].unnamed():
            made.insert(0, found)
    return [*made, *_fallback(program, target)]


def _fallback(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """What serves strides and alignments of any kind."""
    from . import simt

    try:
        return mma.variants(replace(program, tier="mma"), target)[-1:]
    except (Unfit, TileError):
        return simt.variants(replace(program, tier="simt"), target)[-1:]


def why_not(program: TileProgram, target: CudaTarget) -> str | None:
    """Why a program has no code in this tier; None where it has."""
    try:
        variants(program, target)
    except Unfit as reason:
        return str(reason)
    except TileError as reason:
        return reason.diagnostics[0].message
    return None


def _warpgroups(program: TileProgram) -> int:
    """How many warpgroups divide the rows of every product: 64 rows each. Raises `Unfit`."""
    if not any(isinstance(s, Grid) for s in program.body):
        raise Unfit("it has no parallel loop")
    tiles = {a: x.tile or 1 for a, x in tile_axes(program, dict(program.statics)).items()}
    facts = facts_of(program, tiles)
    rows: dict[str, int] = {}
    for c in contexts(program, facts):
        for d in (x for x in subexpressions(c.expr) if isinstance(x, Dot)) if c.expr is not None else ():
            a, b = facts.type_of(d.a, c.types), facts.type_of(d.b, c.types)
            if is_product(d, a, b):
                _check_types(d, a, b)
                row = facts.type_of(d, c.types).axes[0]
                rows[row] = tiles[row]
    if not rows:
        raise Unfit("it has no product")
    sizes = sorted(set(rows.values()))
    if len(rows) > 1 or sizes[0] not in (ROWS, 2 * ROWS):
        told = ", ".join(f"`{a}` by {n}" for a, n in rows.items())
        raise Unfit(f"the rows of its products are {told}; one axis by {ROWS} or {2 * ROWS} is what it takes")
    return sizes[0] // ROWS


def _check_types(d: Dot, a: TileType, b: TileType) -> None:
    if a.dtype is not b.dtype or a.dtype not in (DType.F16, DType.BF16):
        raise Unfit(f"a product of {a.dtype} and {b.dtype}; the matrix units take two of f16 or two of bf16")
    if len(a.axes) != 2 or len(b.axes) != 2 or len(d.over) != 1:
        raise Unfit("a product over several axes, or of tiles with more than two")


@dataclass
class Group:
    """A product that runs: the registers it writes and reads, and the rings whose slots it reads."""

    sums: str
    count: int
    packed: tuple[str, int] | None
    rings: list[Ring]


class WarpgroupKernel(Role):
    """The computing role, and the whole kernel around both."""

    def __init__(
        self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str, warpgroups: int
    ) -> None:
        self.groups: list[Group] = []
        self.held: dict[Ring, str] = {}  # slots taken, by the variable that holds their number
        self.readers: dict[Ring, int] = {}  # products still to come that read a slot taken
        self.factories: dict[str, str] = {}
        self.output_sizes: dict[str, tuple[int, ...]] = {}  # of boxes that leave, by tensor
        super().__init__(program, target, wide, suffix, warpgroups)
        loader = Loader(program, target, wide, suffix, warpgroups)
        self.loading = loader.text.out
        self.wide_tensors = dict.fromkeys(
            [*(b.load.tensor for b in self.maps), *self.output_maps, *self.wide_tensors]
        )

    def unnamed(self) -> list[str]:
        """What it computes, without its own name."""
        return [x.replace(f"{self.name}_", "") for x in self.text.out]

    # ------------------------------------------------------------ tiles from memory

    def let(self, s: Let) -> None:
        if s.name in self.staging.names:
            load = self.staging.names[s.name]
            ring = self.staging.ring(load)
            if not ring.looped and ring not in self.held:
                self.take(ring)
            self.bind(s.name, Value(s.type, staged=self._in_ring(load, ring)))
            return
        super().let(s)

    def _in_ring(self, load: Load, ring: Ring) -> Staged:
        """Stands for a box; products find it by its tensor."""
        box = self.staging.box(load)
        return Staged(_Boxed(box, ring), (box.row, box.column), (0, 0))  # type: ignore[arg-type]

    def take(self, ring: Ring) -> None:
        """Wait until the next slot of a ring is full."""
        name = self.ring_names[ring]
        at = f" + {BARRIER_BYTES} * {name}_slot" if ring.stages > 1 else ""
        self.text.line(f"await_parity({self.full_barrier(ring)}{at}, {name}_phase)")
        if ring.stages > 1:
            self.text.line(f"{name}_now = {name}_slot")
        self.held[ring] = f"{name}_now"
        self.advance(ring)

    def give_back(self, ring: Ring, slot: str = "", condition: str = "") -> None:
        """Say that this warpgroup has read a slot."""
        at = f" + {BARRIER_BYTES} * {slot or self.held[ring]}" if ring.stages > 1 else ""
        self.text.line(f"if leader{condition}:")
        self.text.line(f"    arrive({self.empty_barrier(ring)}{at})")
        self.held.pop(ring, None)

    # ------------------------------------------------------------ products

    def operand(self, e: Expr) -> Staged | RegisterOperand:  # type: ignore[override]
        inner = computed(e)
        if isinstance(inner, Name) and inner.name in self.values:
            staged = self.values[inner.name].staged
            if staged is not None and inner is e:
                return staged
            axes = self.types[inner.name].axes
            if len(axes) == 2 and self.deal.layout(axes).spread(axes[0]).between:
                return RegisterOperand(inner, axes)
        raise Unfit("an operand of a product is neither a tile from memory nor one with the result's rows")

    def product(
        self,
        d: Dot,
        a: Staged | RegisterOperand,
        b: Staged | RegisterOperand,
        target: Registers,
        dtype: DType,
    ) -> None:
        """target += a · b as one group, waited for where it is next touched."""
        packed = self.packed_operand(d, a, b, target)
        self.issue(d, a, b, target, packed)

    def sides(
        self, a: Staged | RegisterOperand, b: Staged | RegisterOperand, layout: Layout
    ) -> tuple[Staged | RegisterOperand, Staged]:
        """The operand with the result's rows, and the other."""
        row = layout.axes[0] if layout.spread(layout.axes[0]).between else layout.axes[-1]
        left, right = (a, b) if row in a.axes else (b, a)
        if not isinstance(right, Staged):
            raise Unfit("the operand with the columns of a product has to come from memory")
        return left, right

    def packed_operand(
        self, d: Dot, a: Staged | RegisterOperand, b: Staged | RegisterOperand, target: Registers
    ) -> tuple[str, int] | None:
        """The registers of a computed operand, rounded and packed two to one; None where it lies in shared memory."""
        left, _ = self.sides(a, b, target.layout)
        if isinstance(left, Staged):
            return None
        (over,) = d.over
        depth = self.tiles[over]
        if depth % STEP:
            raise Unfit(f"`{over}` by {depth}; a computed operand needs a multiple of {STEP}")
        count = depth // 4
        array = self.names.fresh("packed")
        self.text.line(f"{array} = registers_i32({count})")
        self.pack(d, left, array)
        return array, count

    def pack(self, d: Dot, left: RegisterOperand, array: str) -> None:
        """Neighbouring values of a row in one register, lanes that do not exist as zeros: what the instruction takes for its
        first operand (PTX ISA 9.7.15.5.1.1)."""
        (over,) = d.over
        element = self.facts.type_of(d.a, self.types).dtype
        layout = self.deal.layout(left.axes)
        row = next(x for x in layout.axes if x != over)
        self.prepare(left.value, layout)
        step = self.names.fresh(f"{over}_step")
        self.text.line(f"for {step} in range({self.tiles[over] // STEP}):")
        with self.text.indented():
            for piece in range(4):
                half, deeper = piece & 1, piece >> 1
                values = []
                for lane in (0, 1):
                    at = Point(layout, {row: str(half), over: f"(4 * {step} + {2 * deeper + lane})"})
                    values.append(self.existing(left.value, at, over))
                self.text.line(f"{array}[4 * {step} + {piece}] = pack_{element}({', '.join(values)})")

    def existing(self, e: Expr, at: Point, axis: str) -> str:
        """An element, zero on a lane of an axis that does not exist."""
        checks = self.lane_checks(at, axis)
        if checks:
            self._index(at, axis, True, True)
        code = self.emit(e, at)
        return f"({code.operand} if {self.axis_names[axis].exists} else f32(0.0))" if checks else code.text

    def issue(
        self,
        d: Dot,
        a: Staged | RegisterOperand,
        b: Staged | RegisterOperand,
        target: Registers,
        packed: tuple[str, int] | None,
    ) -> None:
        (over,) = d.over
        layout = target.layout
        left, right = self.sides(a, b, layout)
        row = next(x for x in layout.axes if layout.spread(x).between)
        column = next(x for x in layout.axes if x != row)
        columns = self.tiles[column]
        if columns % 8 or not 8 <= columns <= MOST_COLUMNS:
            raise Unfit(f"`{column}` by {columns}; a product has 8 to {MOST_COLUMNS} columns in steps of 8")
        element = self.facts.type_of(d.a, self.types).dtype
        boxes = [x.buffer for x in (left, right) if isinstance(x, Staged)]
        for x in boxes:
            if x.ring not in self.held:  # type: ignore[attr-defined]
                self.take(x.ring)  # type: ignore[attr-defined]
        strides = {
            x: int(
                Point(layout, {y: "1" if y == x else "0" for y in layout.axes})
                .element(layout)
                .rpartition("* ")[2]
            )
            for x in layout.axes
        }
        first = "None" if packed else self._form(left, over)
        made = f'wgmma("{element}", {columns}, {first}, {self._form(right, over)}, {strides[row]}, {strides[column]})'
        name = self.factory("multiply", made)
        at_left = packed[0] if packed else self._address(left, over, True)
        self.text.line(f"{name}({target.array}, {at_left}, {self._address(right, over, False)})")
        rings = list(dict.fromkeys(x.ring for x in boxes))  # type: ignore[attr-defined]
        self.groups.append(Group(target.array, columns // 2, packed, rings))

    def _form(self, staged: Staged | RegisterOperand, over: str) -> str:
        assert isinstance(staged, Staged)
        box: Box = staged.buffer.box  # type: ignore[attr-defined]
        return f"k_major({box.rows}, {box.columns})" if box.column == over else f"mn_major({box.rows})"

    def _address(self, staged: Staged | RegisterOperand, over: str, divided: bool) -> str:
        """Where an operand starts; warpgroups divide the side that has the rows."""
        assert isinstance(staged, Staged)
        box, ring = staged.buffer.box, staged.buffer.ring  # type: ignore[attr-defined]
        text = f"shared + {ring.start + ring.offset(box)}"
        if ring.stages > 1:
            text += f" + {self.held[ring]} * {ring.slot_bytes}"
        if divided and self.warpgroups > 1:
            each = ROWS * ROW_BYTES if box.column == over else box.chunk_bytes
            text += f" + warpgroup * {each}"
        return f"matrix_address({text})"

    def factory(self, word: str, made: str) -> str:
        """The name of a function that the source makes once."""
        if made not in self.factories:
            self.factories[made] = f"{self.name}_{word}_{len(self.factories)}"
        return self.factories[made]

    # ------------------------------------------------------------ waiting

    def finish(self, arrays: set[str] | None = None) -> None:
        """Wait for all groups up to the last that has to do with some arrays (with any, if None)."""
        last = max(
            (i for i, g in enumerate(self.groups) if arrays is None or arrays & self._touched(g)), default=-1
        )
        if last < 0:
            return
        done, self.groups = self.groups[: last + 1], self.groups[last + 1 :]
        self._await(len(self.groups), done)
        for g in done:
            for ring in g.rings:
                still = any(ring in other.rings for other in self.groups)
                if ring in self.held and not still and ring.looped:
                    self.give_back(ring)

    def _touched(self, g: Group) -> set[str]:
        return {g.sums} | ({g.packed[0]} if g.packed else set())

    def _await(self, left: int, done: list[Group]) -> None:
        sums = dict.fromkeys((g.sums, g.count) for g in done)
        packed = dict.fromkeys(g.packed for g in done if g.packed)
        sizes = ", ".join(str(n) for _, n in sums)
        made = f"settled({left}, ({sizes}{',' if len(sums) == 1 else ''})"
        if packed:
            made += f", ({', '.join(str(n) for _, n in packed)}{',' if len(packed) == 1 else ''})"
        name = self.factory("settle", made + ")")
        self.text.line(f"{name}({', '.join([*(a for a, _ in sums), *(a for a, _ in packed)])})")

    def prepare(self, e: Expr, layout: Layout) -> None:
        read = {x.name for x in subexpressions(e) if isinstance(x, Name)}
        values = [self.values[n].registers for n in read if n in self.values]
        self.finish({r.array for r in values if r is not None})
        super().prepare(e, layout)

    def map(self, target: Registers, dtype: DType, e: Expr) -> None:
        if isinstance(e, Name) and self.values[e.name].registers == target:
            return
        self.finish({target.array})
        super().map(target, dtype, e)

    # ------------------------------------------------------------ loops

    def loop(self, s: For) -> None:
        if not self._only_sums(s):
            raise Unfit("a loop that is more than sums of products")
        self.start_carries(s)
        self.sums_loop(s)

    def _only_sums(self, s: For) -> bool:
        """Does a loop do nothing but add products of tiles from memory to what it carries?"""
        staged = all(isinstance(x, Let) and x.name in self.staging.names for x in s.body)
        return staged and all(
            self._product_added_to(y, Name(c.name)) is not None
            for c, y in zip(s.carries, s.yields, strict=True)
        )

    def _product_added_to(self, e: Expr, x: Expr) -> Dot | None:
        match e:
            case Apply(op="add", args=(y, Dot() as d)) | Apply(op="add", args=(Dot() as d, y)) if y == x:
                return d if all(isinstance(o, Name) for o in (d.a, d.b)) else None
        return None

    def sums_loop(self, s: For) -> None:
        """Each step issues its products and then waits for those of the step before, whose slots it gives back."""
        start, stop = self.range_of(s.axis)
        self.live[s.axis.name] = s.axis
        rings = [r for r in self.staging.rings if r.looped and self._read_in(s, r)]
        name = self.axis_names[s.axis.name].first
        with self.stepping(s.axis, start, stop):
            values, types = dict(self.values), dict(self.types)
            for inner in s.body:
                self.statement(inner)
            for c, y in zip(s.carries, s.yields, strict=True):
                d = self._product_added_to(y, Name(c.name))
                registers = self.values[c.name].registers
                assert d is not None
                assert registers is not None
                self.issue(d, self.operand(d.a), self.operand(d.b), registers, None)
            running, self.groups = self.groups, []
            self.text.line(f"{self.factory('settle', f'settled({len(running)}, ())')}()")
            for r in rings:
                now, before = self.held[r], f"{self.ring_names[r]}_before"
                self.give_back(r, before, f" and {name} != {start}")
                self.text.line(f"{before} = {now}")
            self.values, self.types = values, types
        self._await(0, running)
        for r in rings:
            self.give_back(r, f"{self.ring_names[r]}_before", f" and {start} < {stop}")
        del self.live[s.axis.name]

    def _read_in(self, s: For, r: Ring) -> bool:
        return any(
            isinstance(x, Let)
            and x.name in self.staging.names
            and self.staging.ring(self.staging.names[x.name]) is r
            for x in s.body
        )

    # ------------------------------------------------------------ results

    def block(self, body: tuple[Stmt, ...]) -> None:
        super().block(body)
        if any(isinstance(s, Store) for s in body):
            self.finish()
            for ring in [r for r in self.held if not r.looped]:
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
        if set(axes) != {row, column} or bounded or not bare or not inside or not layout.spread(row).between:
            return None
        return row, column

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
        chunks = -(-self.tiles[column] // CHUNK)
        if isinstance(value, Cast) and value.dtype is param.dtype:
            value = value.arg  # packing rounds
        for chunk in range(chunks):
            self.text.line("if leader:")
            self.text.line(f"    boxes_read_{int(chunks > 1)}()")
            self.text.line(f"meet({FIRST_BARRIER} + warpgroup, {THREADS})")
            buffer = f"output + {(chunk & 1) * ROWS * ROW_BYTES}"
            self._fill_chunk(value, layout, row, column, chunk, buffer, param.dtype)
            self.text.line("publish_shared()")
            self.text.line(f"meet({FIRST_BARRIER} + warpgroup, {THREADS})")
            where = self.box_place(
                s.subscripts, chunk, row, f"warpgroup * {ROWS}" if self.warpgroups > 1 else ""
            )
            self.text.line("if leader:")
            self.text.line(
                f"    store_box_{len(param.shape)}d({self.output_maps[s.tensor]}_at, {buffer}, {where})"
            )
            self.text.line("    commit_boxes()")

    def _fill_chunk(
        self, value: Expr, layout: Layout, row: str, column: str, chunk: int, buffer: str, dtype: DType
    ) -> None:
        """Four blocks of 16 columns, each four 8 x 8 matrices: two of rows, two of columns."""
        left = min(CHUNK, self.tiles[column] - chunk * CHUNK)
        quarter = self.names.fresh("quarter")
        self.text.line(f"for {quarter} in range({-(-left // STEP)}):")
        with self.text.indented():
            words = []
            for block in (0, 1):
                for half in (0, 1):
                    pair = []
                    for lane in (0, 1):
                        number = f"({chunk * CHUNK // 4} + 4 * {quarter} + {2 * block + lane})"
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

    # ------------------------------------------------------------ the function

    def launch(self) -> str:
        """The entry of `LAUNCHES`: what every kernel states, one block a multiprocessor, and the tensor maps."""
        told = f', "program": {self.program.name!r}' if self.name != self.program.name else ""
        if self.wide.multiples:
            told += f', "multiples": {dict(self.wide.multiples)!r}'
        maps = [(b.load.tensor, b.sizes) for b in self.maps] + [
            (t, self.output_sizes[t]) for t in self.output_maps
        ]
        told += f', "wide": {list(self.wide_tensors)!r}, "maps": {maps!r}, "blocks_per_sm": 1'
        return (
            f'"{self.name}": {{"threads": {THREADS * (self.warpgroups + 1)}, "shared_bytes": {self.staging.bytes}, '
            f'"tasks": lambda {", ".join(self.extents.values())}: {self._task_count()}{told}}}'
        )

    def imports(self) -> dict[str, set[str]]:
        """Functions that the source takes from the modules of intrinsics beside `ptx`."""
        text = "\n".join(self.lines())
        return {m: {n for n in names if f"{n}(" in text} for m, names in MODULES.items()}

    def lines(self) -> list[str]:
        fewer, more = REGISTERS[self.warpgroups]
        made = [f"{name} = {text}" for text, name in self.factories.items()]
        made += [
            f"{self.name}_fewer = fewer_registers({fewer})",
            f"{self.name}_more = more_registers({more})",
        ]
        threads = THREADS * (self.warpgroups + 1)
        head = [f"@cuda.jit(launch_bounds=({threads}, 1))", f"def {self.name}("]
        head += [f"    {p}," for p in self._parameters()]
        head += [f'    {m}: "map",' for m in (*self.maps.values(), *self.output_maps.values())]
        head.append("):")
        body = [*self._comments(), *self._opening()]
        body += [f"if warpgroup == {self.warpgroups}:", f"    {self.name}_fewer()"]
        body += [f"    if thread == {THREADS * self.warpgroups}:"]
        body += [f"        {x}" for x in self.ring_lines()]
        lines = [f"    {x}" for x in body] + [f"        {x}" for x in self.loading]
        rest = ["else:", f"    {self.name}_more()", *(f"    {x}" for x in self._compute_opening())]
        lines += [f"    {x}" for x in rest] + [f"    {x}" for x in self.text.out]
        if self.output_maps:
            lines += ["        if leader:", "            boxes_read_0()"]
        return [*made, "", "", *head, *lines]

    def _comments(self) -> Iterator[str]:
        loads = ", ".join(f"{r.name} by {r.stages}" for r in self.staging.rings)
        yield f"# tier wgmma: {self.warpgroups} warpgroups compute, 64 rows each, and one loads; rings: {loads}"
        for axis, tile in self.tiles.items():
            yield f"# {plain(axis)} " + ("in one piece" if axis in self._whole() else f"by {tile}")
        yield f"# {self.staging.bytes} bytes of shared memory"

    def _opening(self) -> Iterator[str]:
        yield "thread = i64(cuda.threadIdx.x)"
        yield "warpgroup = uniform(i32(thread >> 7))"
        yield "shared = shared_start()"
        for name in (*self.maps.values(), *self.output_maps.values()):
            yield f"{name}_at = map_address({name})"
        yield "if thread == 0:"
        for r in self.staging.rings:
            for i in range(r.stages):
                yield f"    start_barrier({self.full_barrier(r)} + {BARRIER_BYTES * i}, 1)"
                yield f"    start_barrier({self.empty_barrier(r)} + {BARRIER_BYTES * i}, {self.warpgroups})"
        yield "    publish_barriers()"
        yield "cuda.syncthreads()"

    def _compute_opening(self) -> Iterator[str]:
        yield from self._coordinate_lines()
        yield "leader = thread & 127 == 0"
        yield from self.ring_lines()
        for r in self.staging.rings:
            if r.looped and r.stages > 1:
                yield f"{self.ring_names[r]}_before = i32(0)"
        if self.output_maps:
            yield f"output = i32(shared + {self.staging.output} + warpgroup * {self.staging.output_bytes})"
            yield "matrix_row = i32(((thread >> 5 & 3) * 16 + (thread & 15)) * 128)"
            yield "matrix_column = i32(thread >> 4 & 1)"
            yield "matrix_turn = i32(thread & 7)"

    def shared_bytes(self) -> int:
        return self.staging.bytes


@dataclass(frozen=True)
class _Boxed:
    """Where a staged tile lies: a box of a ring."""

    box: Box
    ring: Ring
