"""Tile programs as Numba CUDA source, tier `simt`: any program, any CUDA device, ordinary instructions.

One `@cuda.jit` function for each program. A block of threads takes grid tiles ("tasks") in turn, so any number of blocks
does. Tiles lie in registers, dealt to threads as `deal.py` says; a value passes through shared memory where a product or
a tile dealt otherwise reads it. Every barrier stands on the path all threads take. Products are f32 (or f64, or integer)
fused multiply-adds on register blocks fed from shared memory; nothing else is contracted: `runtime/cuda.py` compiles with
contraction off.

**Parameters of a kernel**, in order: for each tensor parameter a pointer to element (0, …, 0), in the element type
`scalar_cuda.storage` names, then its strides in elements (i64); the scalars; the extents (i64), static ones too. A pointer
is anything indexable by a flat offset: a raw address under `runtime/cuda.py`, a flat device array, or a NumPy array in
`runtime/emulate.py`. The annotations of the function state the types; `LAUNCHES` has, for each kernel, the threads of a
block, the bytes of dynamic shared memory and the number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...dsl.diagnostics import refuse
from ...dsl.types import DType, compute
from ..layouts import Primary, Secondary, find
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Carry,
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
    Param,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileModule,
    TileProgram,
    TileType,
    expressions,
    operands,
    statements,
    subexpressions,
)
from .deal import Deal, Layout, Spread
from .loop_states import sums_in_parts
from .near_functions import with_near_functions
from .one_step import in_one_step
from .scalar_cuda import (
    Code,
    cast,
    constant,
    convert,
    intrinsics_in,
    loaded,
    operation,
    storage,
    stored,
)
from .shared_memory import Buffer, SharedMemory
from .simt_elements import NARROW, Elements, Wide
from .simt_reduction import Reduction
from .simt_source import (
    NOWHERE,
    Point,
    Registers,
    Staged,
    Value,
    arena_bytes,
    arena_part,
    arena_type,
    held,
    joined,
    local_array,
    plain,
    staged_home,
    starts_late,
)
from .tile_types import (
    Types,
    is_product,
    leaves,
    merged,
    postorder,
    rebuild,
    rewrite,
    without,
)

SIXTEEN = (DType.F16, DType.BF16)
MOST_VALUES = 128  # elements of one tile a thread may hold in registers


def generate(module: TileModule, target: CudaTarget) -> str:
    """The source of a module's kernels for a target. Raises `TileError` where a tile does not fit, naming the tile."""
    kernels = [k for p in module.programs for k in kernels_of(p, target)]
    bodies = ["\n".join(k.lines()) for k in kernels]
    ours = sorted(set[str]().union(*(intrinsics_in(b) for b in bodies)))
    head = [
        f'"""{plain(module.name)}: made by tileloom for {target.name}."""',
        "",
        "from tileloom.runtime.cuda import ALL_LANES, boolean, cuda, f32, f64, i8, i16, i32, i64, inf, nan, u8, u16",
    ]
    if ours:
        imported = ", ".join(f"portable_{n} as {n}" if _lacks(target, n) else n for n in ours)
        head.append(f"from tileloom.runtime.intrinsics.ptx import {imported}")
    for name in ("mbarrier", "operands", "tma", "warpgroup", "wgmma"):
        if used := sorted(set[str]().union(*(k.imports().get(name, set()) for k in kernels))):
            head.append(f"from tileloom.runtime.intrinsics.{name} import {', '.join(used)}")
    launches = ["LAUNCHES = {", *(f"    {k.launch()}," for k in kernels), "}"]
    return "\n".join([*head, "", "", *("\n\n\n".join(bodies).split("\n")), "", "", *launches, ""])


def kernels_of(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """The kernels of a program by its tier and kind, the preferred first."""
    from . import mma, simt_product, wgmma  # which build on this module

    program = with_near_functions(program)
    if program.tier == "mma":
        return [*mma.variants(program, target)]
    if program.tier == "wgmma":
        return wgmma.variants(program, target)
    return simt_product.variants(program, target) or variants(program, target)


def variants(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """The kernels of a program, the preferred first; the last serves any sizes, strides and alignment."""
    plain = Kernel(program, target)
    wide = wide_assumption(plain)
    if wide is None:
        return [plain]
    preferred = Kernel(program, target, wide)
    if not preferred.wide_tensors:
        return [plain]
    from .row_blocks import with_room  # which builds on this module

    rows = {a.extent.name: a.tile for a in _rows(program) if isinstance(a.extent, ExtentRef) and a.tile}
    if not rows:
        return [preferred, Kernel(program, target, suffix="any")]
    short = replace(wide, at_most=tuple(rows.items()))
    whole = replace(short, multiples=tuple({**dict(wide.multiples), **rows}.items()))
    return [
        with_room(row_kernel(program, target, whole)),
        row_kernel(program, target, short, "ragged"),
        Kernel(program, target, wide, "long"),
        Kernel(program, target, suffix="any"),
    ]


def row_kernel(program: TileProgram, target: CudaTarget, wide: Wide, suffix: str = "") -> Kernel:
    """The kernel of a variant whose tiles hold whole rows."""
    from .rows_ahead import RowsAhead  # which builds on this module

    program = in_one_step(program, wide.holds)
    ahead = RowsAhead(program, target, wide, suffix)
    return ahead if ahead.serves and ahead.fills_a_multiprocessor else Kernel(program, target, wide, suffix)


def _rows(program: TileProgram) -> list[LoopAxis]:
    """Axes that several loops visit: where one tile holds a row, it is read once."""
    loops = [s.axis for s in statements(program.body) if isinstance(s, For)]
    plain = [a for a in loops if a.lo is None and a.hi is None and a.tile is not None]
    return list(dict.fromkeys(a for a in plain if plain.count(a) > 1))


def wide_assumption(plain: Kernel) -> Wide | None:
    """What a variant that moves 16 bytes at a time takes for granted; None where nothing is moved that way."""
    every = [x for s in statements(plain.program.body) for e in expressions(s) for x in subexpressions(e)]
    moved = [(x.tensor, x.subscripts) for x in every if isinstance(x, Load)]
    moved += [(s.tensor, s.subscripts) for s in statements(plain.program.body) if isinstance(s, Store)]
    rows = [(plain.program.param(t), s[-1].axis) for t, s in moved if s and isinstance(s[-1], AxisIndex)]
    rows = [(p, a) for p, a in rows if a in plain.tiles and a not in plain.deal.rows]
    if not rows or any(c.kind == "dot" for c in plain.contexts):
        return None
    run = max(16 // p.dtype.bytes for p, _ in rows)
    run = min(run, MOST_RUN)
    extents = [plain.axes[a].extent for _, a in rows]
    return Wide(
        run,
        tuple(
            {x.name: run for x in extents if isinstance(x, ExtentRef) and x.name not in plain.statics}.items()
        ),
    )


MOST_RUN = 8


def _lacks(target: CudaTarget, intrinsic: str) -> bool:
    """Has the target no instruction for it, so that several have to do?"""
    if intrinsic in ("max_f32", "min_f32"):
        return not target.has_nan_max
    return intrinsic in ("bf16_from_f32", "round_bf16") and not target.has_bf16_convert


class Kernel(Elements):
    """Emits one program. Statements are visited once, in order; what is known about memory goes along."""

    tier = "simt"
    resident = 1
    """Blocks that a multiprocessor must be able to hold, which bounds the registers of a thread."""
    aligned = False
    """Are shared tiles read 16 bytes at a time?"""
    alignment = 16
    """Of arenas that are, in bytes."""
    reduction = Reduction

    def __init__(
        self, program: TileProgram, target: CudaTarget, wide: Wide = NARROW, suffix: str = ""
    ) -> None:
        super().__init__(program, target, wide)
        if suffix:
            self.name = self.names.fresh(f"{self.name}_{suffix}")
        self.memory = SharedMemory()
        self.transient: list[Buffer] = []
        self.temporaries = 0
        self.task = "task"  # the number that a task's indices are decoded from
        self.state = ""  # the carried value that is being updated
        self.parted: dict[
            str, Reduction | None
        ] = {}  # sums that threads hold parts of, with what makes them whole
        self.crossing = self._crossing()
        self.shared_tensors = self._shared_tensors()
        self._emit()

    def _crossing(self) -> frozenset[str]:
        """Values that some computation cannot read from registers: operands of products, and tiles dealt otherwise."""
        found = set()
        for c in self.contexts:
            if c.expr is None:
                continue
            if c.kind == "operand":
                if isinstance(c.expr, Name):
                    found.add(c.expr.name)
                    continue
                layout = self._operand_layout(c.expr, c.types)
            else:
                layout = self.deal.layout(c.axes)
            for x in leaves(c.expr):
                if isinstance(x, Name) and not self.deal.layout(c.types[x.name].axes).serves(layout):
                    found.add(x.name)
        return frozenset(found)

    def _shared_tensors(self) -> frozenset[str]:
        """Tensors the program both reads and writes: a barrier keeps the order among the threads of a block."""
        every = [x for s in statements(self.program.body) for e in expressions(s) for x in subexpressions(e)]
        read = {x.tensor for x in every if isinstance(x, Load)}
        return frozenset(s.tensor for s in statements(self.program.body) if isinstance(s, Store)) & read

    def _emit(self) -> None:
        grids = [s for s in self.program.body if isinstance(s, Grid)]
        if len(grids) > 1:
            raise refuse(
                "E0911",
                f"`{self.program.name}` has {len(grids)} parallel loops in a row; a launch has one",
                None,
                help="write each as a tile program of its own: programs run one after another",
            )
        if grids and any(isinstance(s, Store) for s in self._outside(self.program.body)):
            raise refuse(
                "E0911",
                f"`{self.program.name}` stores outside its parallel loop, where every block would",
                None,
                help="move the store inside, or into a tile program of its own",
            )
        if grids:
            self.block(self.program.body)
        else:
            with self.tasks("1"):
                self.block(self.program.body)
        self._check_shared()

    def _outside(self, body: tuple[Stmt, ...]) -> Iterator[Stmt]:
        for s in body:
            yield s
            if isinstance(s, For):
                yield from self._outside(s.body)

    def _check_shared(self) -> None:
        need, limit = self.shared_bytes(), self.target.shared_per_block_bytes
        if need > limit:
            big = max(self.memory.all_buffers, key=lambda b: b.size * b.dtype.bytes)
            raise refuse(
                "E0912",
                f"`{self.program.name}` needs {need} bytes of shared memory; {self.target.name} has {limit} for a block",
                None,
                note=f"the largest staged tile is `{big.name}`, {big.size * big.dtype.bytes} bytes",
                help="choose smaller tiles in the schedule: " + self._tile_clause(),
            )

    def _tile_clause(self) -> str:
        halves = (
            f"{a} by {max(1, n // 2)}"
            for a, n in self.tiles.items()
            if self.axes[a].tile and a not in self._whole()
        )
        return f"tile {', '.join(halves)}"

    def shared_bytes(self) -> int:
        return sum(n * arena_bytes(t) for t, n in self.memory.arenas().items())

    def dynamic(self) -> DType | None:
        """The arena that has to be dynamic because all together exceed what a launch gets without asking."""
        sizes = {t: n * arena_bytes(t) for t, n in self.memory.arenas().items()}
        return (
            None
            if sum(sizes.values()) <= self.target.static_shared_bytes
            else max(sizes, key=lambda t: sizes[t])
        )

    def imports(self) -> dict[str, set[str]]:
        """Functions that the source takes from modules of intrinsics beside `ptx`, by module."""
        return {}

    def launch(self) -> str:
        """The entry of `LAUNCHES`."""
        arena = self.dynamic()
        dynamic = 0 if arena is None else self.memory.arenas()[arena] * arena_bytes(arena)
        count = self._task_count()
        told = f', "program": {self.program.name!r}' if self.name != self.program.name else ""
        if self.resident > 1:
            told += f', "resident": {self.resident}'
        if self.wide.at_most:
            told += f', "at_most": {dict(self.wide.at_most)!r}'
        if self.wide.multiples:
            told += f', "multiples": {dict(self.wide.multiples)!r}'
        if self.wide_tensors:
            told += f', "wide": {list(self.wide_tensors)!r}'
        if find(self.program.attributes, Secondary) is not None:
            told += ', "secondary": True'
        return (
            f'"{self.name}": {{"threads": {self.deal.threads}, "shared_bytes": {dynamic}, '
            f'"tasks": lambda {", ".join(self.extents.values())}: {count}{told}}}'
        )

    def _task_count(self) -> str:
        grid = next((s for s in self.program.body if isinstance(s, Grid)), None)
        if grid is None:
            return "1"
        return " * ".join(self._upper_count(a) for a in grid.axes) or "1"

    def _upper_count(self, a: LoopAxis) -> str:
        """Tiles of the whole extent; a grid axis's own bounds only make some of them empty."""
        if any(isinstance(x, ScalarRef) for x in subexpressions(a.extent)):
            return "1"  # any number of blocks does
        extent = self.emit(a.extent, NOWHERE, widest=1 << 20)
        return extent.operand if a.tile is None else f"-(-{extent.operand} // {a.tile})"

    def lines(self) -> list[str]:
        """The finished function."""
        arenas = self.memory.arenas()
        dynamic = self.dynamic()
        head = [f"@cuda.jit(launch_bounds=({self.deal.threads}, {self.resident}))", f"def {self.name}("]
        head += [f"    {p}," for p in self._parameters()]
        head.append("):")
        body = [f"    {c}" for c in (*self._comments(), *self.launch_order())]
        body.append("    thread = i64(cuda.threadIdx.x)")
        body += [f"    {line}" for line in self._coordinate_lines()]
        for dtype, size in arenas.items():
            aligned = (
                f", alignment={self.alignment}" if dtype in (DType.F16, DType.BF16) or self.aligned else ""
            )
            kind = arena_type(dtype)
            body.append(
                f"    shared_{dtype} = cuda.shared.array({0 if dtype is dynamic else size}, {kind}{aligned})"
            )
        for b in self.memory.all_buffers:
            body.append(f"    {b.name} = {arena_part(b)}")
        return [*head, *body, *self.text.out]

    def launch_order(self) -> Iterator[str]:
        """What a launch does that overlaps with the one before it or after it, before all else."""
        if find(self.program.attributes, Primary) is not None:
            yield "release_secondary()"
        if find(self.program.attributes, Secondary) is not None:
            yield "await_primary()"

    def _coordinate_lines(self) -> Iterator[str]:
        """Where the thread stands along the sides of the deal."""
        for (low, bits, upper_low, upper_bits, stride), name in self.coordinates.items():
            text = _bits(low, bits)
            if upper_bits:
                text = f"({text}) + ({_bits(upper_low, upper_bits)}) * {stride}"
            yield f"{name} = {text}"

    def _parameters(self) -> Iterator[str]:
        for p in self.program.params:
            strides = "".join(f", {s}: i64" for s in self.strides[p.name]).replace(": i64", ': "i64"')
            yield f'{self.tensors[p.name]}: "*{storage(p.dtype)}"{strides}'
        for s in self.program.scalars:
            yield f'{self.scalars[s.name]}: "{held(s.dtype)}"'
        if self.extents:
            yield ", ".join(f'{e}: "i64"' for e in self.extents.values())

    def _comments(self) -> Iterator[str]:
        d = self.deal
        yield f"# tier {self.tier}, {d.threads} threads: {1 << d.row_bits} rows of {1 << d.column_bits}"
        if self.resident > 1:
            yield f"# registers bounded so that a multiprocessor has room for {self.resident} blocks"
        for axis, tile in self.tiles.items():
            side = "thread rows" if axis in d.rows else "thread columns"
            whole = "in one piece" if axis in self._whole() else f"by {tile}"
            yield f"# {plain(axis)} {whole}, over {side}"
        need = self.shared_bytes()
        if need:
            yield f"# {need} bytes of shared memory" + (", dynamic" if self.dynamic() else "")

    def block(self, body: tuple[Stmt, ...]) -> None:
        """Statements of one scope; a staged value gives its place up after the last statement that reads it."""
        before_values, before_types = dict(self.values), dict(self.types)
        last = _last_uses(body)
        for i, s in enumerate(body):
            self.statement(s)
            self.release()
            for name in [n for n, at in last.items() if at == i and n not in before_values]:
                self.retire(name)
        for name in set(self.values) - set(before_values):
            self.retire(name)
        self.values, self.types = before_values, before_types

    def statement(self, s: Stmt) -> None:
        match s:
            case Let():
                self.let(s)
            case Store():
                self.store(s)
            case For():
                self.loop(s)
            case Grid():
                self.grid(s)

    def retire(self, name: str) -> None:
        value = self.values.get(name)
        if value is not None and value.staged is not None and value.staged.buffer in self.memory.live:
            self.memory.free(value.staged.buffer)

    def release(self) -> None:
        """End the life of buffers that served one statement."""
        for b in self.transient:
            self.memory.free(b)
        self.transient = []
        if not self.wide.at_most:
            self.ahead = {}
        for name, value in self.values.items():
            if value.staged is not None and value.staged.buffer not in self.memory.live:
                self.values[name] = replace(value, staged=None)

    def let(self, s: Let) -> None:
        value = s.value
        if self.depends_on_tensors(value):
            self.from_tensors.add(s.name)
        if not s.type.axes:
            code = cast(self.emit(self.materialise(value), NOWHERE), s.type.dtype)
            self.bind(s.name, Value(s.type, scalar=self.assign(s.name, code)))
        elif s.name in self.crossing and self.from_memory(value):
            self.bind(s.name, Value(s.type, staged=self.stage(s.name, value, s.type)))
        else:
            registers = self.registers(s.name, s.type)
            self.compute(registers, s.type.dtype, value)
            self.bind(s.name, Value(s.type, registers=registers))
            if s.name in self.crossing:
                self.bind(
                    s.name, replace(self.values[s.name], staged=self.stage(s.name, Name(s.name), s.type))
                )

    def bind(self, name: str, value: Value) -> None:
        self.values[name], self.types[name] = value, value.type

    def registers(self, name: str, t: TileType, layout: Layout | None = None) -> Registers:
        """Declare a local array for a tile."""
        layout = layout or self.deal.layout(t.axes)
        self._check_elements(name, layout)
        array = self.names.fresh(name)
        self.text.line(f"{array} = {local_array(t.dtype, layout.elements)}")
        return Registers(array, layout)

    def _check_elements(self, name: str, layout: Layout) -> None:
        if layout.elements > MOST_VALUES:
            sizes = " x ".join(str(s.tile) for s in layout.spreads)
            raise refuse(
                "E0913",
                f"`{name}` of `{self.program.name}` is a tile of {sizes}: {layout.elements} values for each of "
                f"{self.deal.threads} threads; the limit is {MOST_VALUES}",
                None,
                help="choose smaller tiles in the schedule: " + self._tile_clause(),
            )

    def from_memory(self, e: Expr) -> bool:
        """Does the value depend on no registers, so that any thread can make any element?"""
        return not any(
            isinstance(x, Dot | Reduce)
            or (isinstance(x, Name) and self.types[x.name].axes and self.values[x.name].staged is None)
            for x in postorder(e)
        )

    def _operand_layout(self, e: Expr, types: Types) -> Layout:
        axes = self.facts.type_of(e, types).axes
        if any(
            isinstance(x, Dot | Reduce) or (isinstance(x, Name) and types[x.name].axes) for x in postorder(e)
        ):
            return self.deal.layout(axes)
        return self.deal.copying(axes)

    def grid(self, g: Grid) -> None:
        if any(a.name in self.live for a in g.axes):
            raise refuse("E0911", f"`{self.program.name}`: an axis is open twice", None)
        if self.text.depth > 1:
            self._serial_grid(g, g.axes)
            return
        counts = [self._count(a) for a in g.axes]
        if len(counts) > 1:
            counts = [c if c.isidentifier() else self.assign("count", Code(c, DType.I64)) for c in counts]
        self.before_tasks(g.axes, counts)
        with self.tasks(" * ".join(counts) or "1"):
            self._task_indices(g.axes, counts)
            self.live.update({a.name: a for a in g.axes})
            self.block(g.body)
            for a in g.axes:
                del self.live[a.name]

    def before_tasks(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Emit what decoding a task's number needs of all tasks."""

    @contextmanager
    def tasks(self, count: str) -> Iterator[None]:
        """The loop of a block over its tasks. (A range with a step that is not constant divides to count its rounds.)"""
        self.text.line(f"tasks = {count}")
        self.text.line("task = i64(cuda.blockIdx.x)")
        self.text.line("while task < tasks:")
        with self.text.indented(), self.back_edge():
            yield
            self.text.line("task += i64(cuda.gridDim.x)")

    @contextmanager
    def back_edge(self) -> Iterator[None]:
        entered = self.memory.enter_loop()
        yield
        self.memory.leave_loop(entered)

    def _count(self, a: LoopAxis) -> str:
        """Emit an axis's bounds and give the number of its tiles; tiles of a bounded axis start at its first."""
        independent = a.lo is None and a.hi is None
        if a.tile is None and not independent:
            first, end = self.bounds(a)
            return f"max({end} - {first}, 0)"
        extent = self.emit(a.extent, NOWHERE)
        return extent.operand if a.tile is None else f"({extent.operand} + {a.tile - 1}) // {a.tile}"

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Decode the task's number, the last axis fastest."""
        rest = self.task
        if any(isinstance(x, For) and x.axis.hi is not None for x in statements(self.program.body)):
            # later rows often have longer loops: they start first
            rest = f"tasks - 1 - {self.task}"
        for i in range(len(axes) - 1, -1, -1):
            a, names = axes[i], self.axis_names[axes[i].name]
            rest = rest if rest.isidentifier() else self.assign("backwards", Code(rest, DType.I64))
            here = rest if i == 0 else f"{rest} % {counts[i]}"
            if a.tile is not None:
                self.text.line(
                    f"{names.first} = {here} * {a.tile}" if i == 0 else f"{names.first} = ({here}) * {a.tile}"
                )
            else:
                self.text.line(f"{names.index} = " + (f"{names.lo} + {here}" if starts_late(a) else here))
            if i:
                left = self.names.fresh("rest")
                self.text.line(f"{left} = {rest} // {counts[i]}")
                rest = left
        for a in axes:
            if a.tile is not None and (a.lo is not None or a.hi is not None):
                self.bounds(a)

    def _serial_grid(self, g: Grid, axes: tuple[LoopAxis, ...]) -> None:
        """A parallel loop inside a task runs in order."""
        if not axes:
            self.block(g.body)
            return
        with self.visiting(axes[0], reverse=False):
            self._serial_grid(g, axes[1:])

    def bounds(self, a: LoopAxis) -> tuple[str, str]:
        """Emit what is stated of an axis's bounds; gives the text of the first and the past-the-last index visited."""
        names = self.axis_names[a.name]
        first, end = "0", self.emit(a.extent, NOWHERE).operand
        if a.lo is not None and starts_late(a):
            lo = convert(self.emit(self.materialise(a.lo), NOWHERE), DType.I64)
            first = names.lo
            self.text.line(f"{first} = max({lo.text}, 0)")
        if a.hi is not None:
            hi = convert(self.emit(self.materialise(a.hi), NOWHERE), DType.I64)
            self.text.line(f"{names.hi} = min({end}, {hi.text})")
            end = names.hi
        self.release()
        return first, end

    @contextmanager
    def visiting(self, a: LoopAxis, reverse: bool) -> Iterator[None]:
        """The serial loop over an axis's tiles."""
        first, end = self.bounds(a)
        names = self.axis_names[a.name]
        variable = names.index if a.tile is None else names.first
        if self.is_one_tile(a):
            self.text.line(f"{variable} = 0")
            self.live[a.name] = a
            yield
            del self.live[a.name]
            return
        ahead = dict(self.ahead)
        self.text.line(f"for {variable} in range({_visited(a, first, end, reverse)}):")
        with self.text.indented(), self.back_edge():
            self.live[a.name] = a
            yield
            del self.live[a.name]
        self.ahead = ahead

    def is_one_tile(self, a: LoopAxis) -> bool:
        """Does the variant take for granted that one tile holds the whole axis?"""
        return self.wide.holds(a)

    def loop(self, s: For) -> None:
        self.start_carries(s)
        with self.sums_in_parts((s,)), self.visiting(s.axis, s.reverse), self.whole_tiles(s):
            self.loop_body(s)

    @contextmanager
    def sums_in_parts(self, loops: tuple[For, ...]) -> Iterator[None]:
        """In loops in a row, sums that may stay in a part for each thread do, and become whole after them."""
        first, outer = loops[0], self.parted
        own: dict[str, Reduction | None] = {
            s.carries[i].name: None
            for i, r in sums_in_parts(loops).items()
            if self._is_dealt_alike(first, first.carries[i], r)
            for s in loops
        }
        self.parted = {**outer, **own}
        yield
        for i, c in enumerate(
            first.carries
        ):  # the code of one loop may serve another: the state has the name of any
            named = (self.parted.get(s.carries[i].name) for s in loops if s.carries[i].name in own)
            done = next((x for x in named if x is not None), None)
            if done is not None:
                done.join(self.values[c.name])
                self.release()
        self.parted = outer

    def _is_dealt_alike(self, s: For, c: Carry, r: Reduce) -> bool:
        """Do the threads that hold a state's element hold all that a step adds to it, in several tiles?"""
        inside = list(statements((s,)))
        types = {**self.types, **{x.name: x.type for x in inside if isinstance(x, Let)}}
        types |= {x.name: x.type for loop in inside if isinstance(loop, For) for x in loop.carries}
        own = self.facts.type_of(r.arg, types)
        layout = self.deal.layout(own.axes)
        alike = layout.restrict(without(own.axes, r.over)) == self.deal.layout(c.type.axes)
        return alike and set(r.over) <= set(own.axes) and not self.is_one_tile(s.axis)

    def start_carries(self, s: For) -> None:
        for c in s.carries:
            init = c.init
            if not c.type.axes:
                code = cast(self.emit(self.materialise(init), NOWHERE), c.type.dtype)
                self.bind(c.name, Value(c.type, scalar=self.assign(c.name, code)))
            else:
                registers = self.registers(c.name, c.type)
                self.compute(registers, c.type.dtype, init)
                self.bind(c.name, Value(c.type, registers=registers))
            self.release()

    @contextmanager
    def whole_tiles(self, s: For) -> Iterator[None]:
        """In a loop over full tiles every lane exists."""
        is_full = any(a.name == "full" for a in s.attributes)
        self.full |= {s.axis.name} if is_full else set()
        yield
        self.full -= {s.axis.name}

    def loop_body(self, s: For) -> None:
        """The body with its yields in one scope."""
        carried = {c.name for c in s.carries}
        values, types = dict(self.values), dict(self.types)
        last = _last_uses(s.body)
        at_end = {x.name for y in s.yields for x in subexpressions(y) if isinstance(x, Name)}
        for i, inner in enumerate(s.body):
            self.statement(inner)
            self.release()
            for name in [n for n, at in last.items() if at == i and n not in values and n not in at_end]:
                self.retire(name)
        self.yields(s)
        for name in set(self.values) - set(values) - carried:
            self.retire(name)
        self.values, self.types = values, types

    def yields(self, s: For) -> None:
        """Assign the next states: each once no other yield still reads its old value, through a copy where they circle."""
        left = {c.name: (c.type, y) for c, y in zip(s.carries, s.yields, strict=True) if y != Name(c.name)}
        while left:
            name = next(
                (n for n in left if not any(n in names_in(y) for m, (_, y) in left.items() if m != n)), None
            )
            if name is None:
                name = next(iter(left))
                left = {m: (t, self._copied(name, y) if m != name else y) for m, (t, y) in left.items()}
            t, value = left.pop(name)
            self.update(name, t, value)
            self.release()

    def _copied(self, name: str, e: Expr) -> Expr:
        """The expression over a copy of the carried value's old state."""
        copy = f"{name} before"
        if copy not in self.values:
            old = self.values[name]
            if old.scalar is not None:
                self.bind(copy, replace(old, scalar=self.assign(copy, Code(old.scalar, old.type.dtype))))
            else:
                registers = self.registers(copy, old.type)
                self.compute(registers, old.type.dtype, Name(name))
                self.bind(copy, Value(old.type, registers=registers))
        return rewrite(e, lambda x: Name(copy) if x == Name(name) else x)

    def update(self, name: str, t: TileType, e: Expr) -> None:
        value, self.state = self.values[name], name
        if value.scalar is not None:
            code = cast(self.emit(self.materialise(e), NOWHERE), t.dtype)
            self.text.line(f"{value.scalar} = {code.text}")
        elif value.registers is not None:
            self.compute(value.registers, t.dtype, e)
        self.state = ""

    def compute(self, target: Registers, dtype: DType, e: Expr) -> None:
        """Evaluate an expression into registers. A product added to something accumulates in place."""
        match e:
            case Apply(op="add", args=(x, Dot() as d)) | Apply(op="add", args=(Dot() as d, x)) if (
                self.accumulates(d, dtype)
            ):
                a, b = self.operand(d.a), self.operand(d.b)
                self.map(target, dtype, self.materialise(x))
                self.product(d, a, b, target, dtype)
            case Dot() if self.accumulates(e, dtype):
                a, b = self.operand(e.a), self.operand(e.b)
                self.map(target, dtype, Const(0, dtype))
                self.product(e, a, b, target, dtype)
            case _:
                self.map(target, dtype, self.materialise(e))

    def accumulates(self, d: Dot, dtype: DType) -> bool:
        own = self.facts.type_of(d, self.types)
        a, b = self.facts.type_of(d.a, self.types), self.facts.type_of(d.b, self.types)
        return own.dtype is dtype and dtype.is_float and is_product(d, a, b)

    def map(self, target: Registers, dtype: DType, e: Expr) -> None:
        """An elementwise expression over the elements of registers; nothing if it is they themselves."""
        if isinstance(e, Name) and self.values[e.name].registers == target:
            return
        self.prepare(e, target.layout)
        for at in self.nest(target.layout, [e]):
            self.text.line(
                f"{target.array}[{at.element(target.layout)}] = {cast(self.emit(e, at), dtype).text}"
            )

    def map_apart(self, target: Registers, dtype: DType, e: Expr) -> None:
        """The same, where a choice that is one for all of a thread's elements is made once: a softmax of 32 elements a
        thread had a select for each, a twelfth of its instructions."""
        match e:
            case Apply(op="where", args=(Name() as chooses, Const() as constant_side, other)) if (
                self._one_for_all(chooses, target.layout)
            ):
                self.map(target, dtype, other)
                depth, own = self.text.depth, self.deal.layout(self.facts.type_of(chooses, self.types).axes)
                at = self.open(own, [chooses], set(), NOWHERE)
                self.text.line(f"if {self.emit(chooses, at).text}:")
                self.text.depth += 1
                self.map(target, dtype, constant_side)
                self.text.depth = depth
            case _:
                self.map(target, dtype, e)

    def _one_for_all(self, e: Name, layout: Layout) -> bool:
        """Has a thread one element of it beside many of the layout?"""
        own = self.deal.layout(self.facts.type_of(e, self.types).axes)
        value = self.values[e.name]
        return own.elements == 1 < layout.elements and (
            value.scalar is not None or value.registers is not None
        )

    def stage(self, name: str, e: Expr, t: TileType) -> Staged:
        """Write a tile to shared memory; lanes that do not exist are zero there."""
        e = self.materialise(e)
        layout = self.deal.copying(t.axes) if self.from_memory(e) else self.deal.layout(t.axes)
        if isinstance(e, Name):
            registers = self.values[e.name].registers
            layout = registers.layout if registers is not None else layout
        staged = self.place(f"{name}_shared", t)
        self.prepare(e, layout)
        self.note(self.memory.write(staged.buffer))
        for at in self.nest(layout, [e], exists=layout.axes):
            code = cast(self.emit(e, at), t.dtype)
            lanes = self.conditions(at, layout.axes)
            if lanes and not (
                isinstance(e, Load) and set(layout.axes) <= set(self.facts.type_of(e, self.types).axes)
            ):
                code = Code(
                    f"{code.operand} if {' and '.join(lanes)} else {constant(0, t.dtype).text}",
                    code.dtype,
                    False,
                )
            text = stored(code, t.dtype) if staged.buffer.dtype in (DType.F16, DType.BF16) else code.text
            self.guarded(
                self.owners(layout) + self.inside(at, layout.axes), f"{self.spot(staged, at)} = {text}"
            )
        return staged

    def place(self, name: str, t: TileType) -> Staged:
        """A buffer whose rows are padded to odd length: neighbouring rows then start in different banks."""
        sizes = [
            max(s.count * s.step for s in (self.deal.layout(t.axes).spread(a), _alone(self.deal, a)))
            for a in t.axes
        ]
        if len(sizes) > 1:
            sizes[-1] |= 1
        pitches, size = [], 1
        for n in reversed(sizes):
            pitches.append(size)
            size *= n
        buffer = self.memory.allocate(self.names.fresh(name), compute(t.dtype), size)
        return Staged(buffer, t.axes, tuple(reversed(pitches)))

    def settle(self, staged: Staged) -> None:
        """Before a read of a staged tile."""
        self.note(self.memory.read(staged.buffer))

    def note(self, barrier_due: bool) -> None:
        if barrier_due:
            self.text.line("cuda.syncthreads()")

    def prepare(self, e: Expr, layout: Layout) -> None:
        """See that every tile an expression reads can be read at this layout, with a barrier where one is due."""
        for x in dict.fromkeys(x.name for x in leaves(e) if isinstance(x, Name)):
            value = self.values[x]
            if value.scalar is not None or (
                value.registers is not None and value.registers.layout.serves(layout)
            ):
                continue
            if value.staged is None:
                value = replace(value, staged=self.stage(x, Name(x), value.type))
                self.values[x] = value
                self.transient.append(staged_home(value).buffer)
            self.note(self.memory.read(staged_home(value).buffer))
        for x in dict.fromkeys(x.tensor for x in leaves(e) if isinstance(x, Load)):
            if x in self.shared_tensors:
                self.note(self.memory.read(x))
        if self.wide.run > 1:
            for load in dict.fromkeys(x for x in leaves(e) if isinstance(x, Load)):
                if load.tensor not in self.shared_tensors:
                    self.load_ahead(load, layout)

    def materialise(self, e: Expr) -> Expr:
        """The expression with its dots and reductions computed and named, and what is the same for all lanes too."""
        e = rewrite(e, self._named)
        return e if not self.facts.type_of(e, self.types).axes else self.hoisted(e)

    def hoisted(self, e: Expr) -> Expr:
        """Compute scalar parts before the element loops."""
        done: list[tuple[Expr, bool]] = []
        for node in postorder(e):
            arity = len(operands(node))
            args = done[len(done) - arity :]
            del done[len(done) - arity :]
            is_scalar = all(s for _, s in args) and not (
                isinstance(node, AxisIndex | Name) and self.facts.type_of(node, self.types).axes
            )
            if not is_scalar:
                args = [(self._scalar_name(x), True) if s else (x, s) for x, s in args]
            done.append((rebuild(node, tuple(x for x, _ in args)), is_scalar))
        return done[0][0]

    def _scalar_name(self, e: Expr) -> Expr:
        """A composite scalar as a variable."""
        if not operands(e) or all(isinstance(x, Const) for x in operands(e)):
            return e
        t = self.facts.type_of(e, self.types)
        name = self.temporary("t", Value(t, scalar=self.assign("t", self.emit(e, NOWHERE))))
        if self.depends_on_tensors(e):
            self.from_tensors.add(name.name)
        return name

    def _named(self, e: Expr) -> Expr:
        if isinstance(e, Reduce):
            return self.reduce(e)
        if isinstance(e, Dot):
            return self.dot(e)
        return e

    def temporary(self, name: str, value: Value) -> Name:
        """Bind a computed value under a name that no program can have."""
        self.temporaries += 1
        key = f"{name} {self.temporaries}"
        self.bind(key, value)
        return Name(key)

    def dot(self, d: Dot) -> Expr:
        a, b = self.facts.type_of(d.a, self.types), self.facts.type_of(d.b, self.types)
        t = self.facts.type_of(d, self.types)
        if not is_product(d, a, b):
            product = Apply("mul", (Cast(t.dtype, d.a), Cast(t.dtype, d.b)))
            return self.reduce(Reduce("sum", d.over, product))
        left, right = self.operand(d.a), self.operand(d.b)
        target = self.registers("dot", t)
        self.map(target, t.dtype, Const(0, t.dtype))
        self.product(d, left, right, target, t.dtype)
        return self.temporary("dot", Value(t, registers=target))

    def operand(self, e: Expr) -> Staged:
        """A product's operand in shared memory."""
        if isinstance(e, Name) and self.values[e.name].staged is not None:
            return staged_home(self.values[e.name])
        t = self.facts.type_of(e, self.types)
        name = e.name if isinstance(e, Name) else e.tensor if isinstance(e, Load) else "operand"
        staged = self.stage(name, e, t)
        self.transient.append(staged.buffer)
        return staged

    def product(self, d: Dot, a: Staged, b: Staged, target: Registers, dtype: DType) -> None:
        """target += a · b, each thread its block of the result, one step of the contracted axes at a time."""
        self.settle(a)
        self.settle(b)
        layout = target.layout
        parts = [self.fragment(s, layout, dtype) for s in (a, b)]
        over = Layout(d.over, tuple(Spread(self.tiles[x]) for x in d.over))
        for counters in self.steps(d):
            for staged, part in zip((a, b), parts, strict=True):
                self.fetch(staged, part, over, counters, dtype)
            for at in self.nest(layout, []):
                old, x, y = (Code(f"{r.array}[{at.element(r.layout)}]", dtype) for r in (target, *parts))
                self.text.line(f"{old.text} = {operation('fma', [x, y, old]).text}")

    def steps(self, d: Dot) -> Iterator[dict[str, str]]:
        """The loops over the contracted axes, open around what is emitted for the counters given."""
        counters, depth = {}, self.text.depth
        for axis in d.over:
            counters[axis] = self.axis_names[axis].counter
            self.text.line(f"for {counters[axis]} in range({self.tiles[axis]}):")
            self.text.depth += 1
        yield counters
        self.text.depth = depth

    def fetch(
        self, staged: Staged, part: Registers, over: Layout, counters: dict[str, str], dtype: DType
    ) -> None:
        """Read what a thread needs of an operand at one step."""
        for at in self.nest(part.layout, []):
            whole = Point(joined(part.layout, over), {**at.counters, **counters})
            value = convert(Code(self.spot(staged, whole), compute(staged.buffer.dtype)), dtype)
            self.text.line(f"{part.array}[{at.element(part.layout)}] = {value.text}")

    def fragment(self, staged: Staged, layout: Layout, dtype: DType) -> Registers:
        """Registers for what a thread reads of an operand at one step."""
        own = layout.restrict(staged.axes)
        array = self.names.fresh(f"{staged.buffer.name.removesuffix('_shared')}_part")
        self.text.line(f"{array} = {local_array(dtype, own.elements)}")
        return Registers(array, own)

    def reduce(self, e: Reduce) -> Expr:
        """Reduce in each thread, then between lanes, then between warps."""
        arg_type = self.facts.type_of(e.arg, self.types)
        t = self.facts.type_of(e, self.types)
        over = tuple(a for a in arg_type.axes if a in e.over)
        if len(over) < len(e.over):
            e = replace(e, arg=self._widened(e))
            arg_type = self.facts.type_of(e.arg, self.types)
            over = e.over
        kept = without(arg_type.axes, over)
        layout = self.deal.layout(arg_type.axes)
        named = f"{e.fn}_{'_'.join(over)}"
        done = self.reduction(self, e, TileType(t.dtype, kept), layout.restrict(kept), layout.restrict(over))
        if self.state in self.parted:
            done.joins, self.parted[self.state] = False, done
        return self.temporary(e.fn, done.run(named))

    def _widened(self, e: Reduce) -> Expr:
        """An argument free of a reduced axis, spread over it."""
        zero: Expr = Const(False, DType.BOOL)
        for a in e.over:
            zero = Apply("or", (zero, Apply("lt", (AxisIndex(a), Const(0, DType.I64)))))
        return Apply("where", (zero, e.arg, e.arg))

    def store(self, s: Store) -> None:
        axes = merged([self.facts.type_of(x, self.types).axes for x in (*s.subscripts, s.value)])
        subscripts = tuple(self.materialise(x) for x in s.subscripts)
        value = self.materialise(s.value)
        layout = self.deal.layout(axes)
        for x in (*subscripts, value):
            self.prepare(x, layout)
        if s.tensor in self.shared_tensors:
            self.note(self.memory.write(s.tensor))
        param = self.program.param(s.tensor)
        if self._store_runs(s, layout, subscripts, value):
            return
        for at in self.nest(layout, [*subscripts, value], exists=axes):
            where = [convert(self.cut(self.emit(x, at)), DType.I64) for x in subscripts]
            conditions = (
                self.owners(layout)
                + self.conditions(at, axes)
                + self.within(param, s.subscripts, where, [True] * len(where))
            )
            code = self.emit(value, at)
            self.guarded(conditions, self.write(s, param, self.offset(param, where), code))

    def _store_runs(self, s: Store, layout: Layout, subscripts: tuple[Expr, ...], value: Expr) -> bool:
        """Store a run at a time where the variant may; says whether it did."""
        param = self.program.param(s.tensor)
        axis = (
            self.runs_along(s.tensor, s.subscripts, layout) if self.wide.run > 1 and s.mode == "set" else None
        )
        bounded = [a for a in layout.axes if self.live[a].hi is not None or self.live[a].lo is not None]
        plain = all(
            self.covers(x, n) or not self.facts.type_of(x, self.types).axes
            for x, n in zip(s.subscripts, param.shape, strict=True)
        )
        if (
            axis is None
            or bounded
            or not plain
            or (param.dtype is DType.BF16 and not self.target.has_bf16_convert)
        ):
            return False
        registers = self.registers(f"{s.tensor}_out", TileType(param.dtype, layout.axes), layout)
        match value:  # the store rounds
            case Cast(dtype=to, arg=x) if to is param.dtype and to in SIXTEEN:
                if self.facts.type_of(x, self.types).dtype in (DType.F32, to):
                    value = x
        self.map_apart(registers, DType.F32 if param.dtype in SIXTEEN else param.dtype, value)
        self.wide_tensors[s.tensor] = None
        run, width = layout.spread(axis).run, min(16, layout.spread(axis).run * param.dtype.bytes)
        depth = self.text.depth
        at = self.open(layout, [*subscripts], set(layout.axes), NOWHERE, axis)
        where = [convert(self.cut(self.emit(x, at)), DType.I64) for x in subscripts]
        offset = self.cut(Code(self.offset(param, where, packed=True), DType.I64), 0).text
        first = self.cut(Code(at.element(layout), DType.I64), 0).text
        conditions = (
            self.owners(layout)
            + self.conditions(at, layout.axes)
            + self.within(param, s.subscripts, where, [True] * len(where))
        )
        self.guarded(
            conditions,
            *(
                f"store{width}_{param.dtype}({self.tensors[s.tensor]}, {offset} + {i}, {registers.array}, {first} + {i})"
                for i in range(0, run, width // param.dtype.bytes)
            ),
        )
        self.text.depth = depth
        return True

    def write(self, s: Store, param: Param, offset: str, code: Code) -> str:
        """The assignment, or an addition: atomic where two lanes or two tasks may meet in one element."""
        tensor = self.tensors[s.tensor]
        if s.mode == "set":
            return f"{tensor}[{offset}] = {stored(cast(code, param.dtype), param.dtype)}"
        if self.owns_targets(s):
            total = operation("add", [loaded(f"{tensor}[{offset}]", param.dtype), code])
            return f"{tensor}[{offset}] = {stored(cast(total, param.dtype), param.dtype)}"
        self._check_atomic(param)
        return f"add_{param.dtype}({tensor}, {offset}, {stored(cast(code, param.dtype), param.dtype)})"

    def _check_atomic(self, p: Param) -> None:
        lacking = p.dtype in (DType.I16, DType.I8, DType.U8, DType.BOOL)
        if lacking or (p.dtype is DType.BF16 and not self.target.has_bf16_add):
            raise refuse(
                "E0914",
                f"`{p.name}` is {p.dtype}, and {self.target.name} cannot add to {p.dtype} from several threads at once",
                None,
                help="declare it f32 (or i32, i64), or write every element from one grid iteration only",
            )

    def owns_targets(self, s: Store) -> bool:
        """Do different lanes and tasks add to different elements, because every open axis is a subscript itself?"""
        bare = {x.axis for x in s.subscripts if isinstance(x, AxisIndex)}
        axes = self.facts.type_of(s.value, self.types).axes
        return {a for a in self.live if a not in self._whole()} | set(axes) <= bare


def _bits(low: int, count: int) -> str:
    """Some bits of the thread's number."""
    return f"{f'(thread >> {low})' if low else 'thread'} & {(1 << count) - 1}"


def _visited(a: LoopAxis, first: str, end: str, reverse: bool) -> str:
    """The arguments of `range` for the first indices of tiles that meet [first, end)."""
    size = a.tile or 1
    some = f" if {first} < {end} else " if starts_late(a) and size > 1 else ""
    start = f"{first} // {size} * {size}" if some else first
    if reverse:
        last = f"{end} - 1" if size == 1 else f"({end} - 1) // {size} * {size}"
        return f"{last}{some and f'{some}-{size}'}, {start} - 1, -{size}"
    if start == "0" and size == 1:
        return end
    return f"{start}, {end}{some and f'{some}0'}" + (f", {size}" if size > 1 else "")


def _alone(d: Deal, axis: str) -> Spread:
    return d.layout((axis,)).spread(axis)


def names_in(e: Expr) -> set[str]:
    return {x.name for x in subexpressions(e) if isinstance(x, Name)}


def _last_uses(body: tuple[Stmt, ...]) -> dict[str, int]:
    """For each name the last statement of the block that mentions it, itself or inside."""
    last: dict[str, int] = {}
    for i, s in enumerate(body):
        for inner in statements((s,)):
            if isinstance(inner, Let):
                last[inner.name] = i
            for e in expressions(inner):
                last.update(dict.fromkeys(names_in(e), i))
    return last
