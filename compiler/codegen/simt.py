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

import keyword
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ...dsl.diagnostics import refuse
from ...dsl.types import DType, compute
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Dot,
    Expr,
    ExtentRef,
    Fill,
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
from .deal import Deal, Demand, Layout, Spread, deal
from .scalar_cuda import (
    MEANT,
    Code,
    cast,
    combine,
    constant,
    convert,
    identity,
    intrinsics_in,
    loaded,
    operation,
    storage,
    stored,
)
from .shared_memory import Buffer, SharedMemory
from .tile_types import (
    Facts,
    Types,
    contexts,
    is_product,
    leaves,
    loop_axes,
    merged,
    postorder,
    rebuild,
    rewrite,
    static_value,
    tile_axes,
    without,
)

WIDEST_LINE = 76  # a longer expression is cut into named parts
# How many instructions of a loop nest NVVM still unrolls, about; what comes for sm_100 and later unrolls less.
LONGEST_UNROLLED_BEFORE_LLVM_20, LONGEST_UNROLLED = 3000, 1000
WORK = {
    "erf": 60,
    "pow": 120,
    "tanh": 40,
    "sin": 120,
    "cos": 120,
    "exp": 20,
    "exp2": 8,
    "log": 30,
    "log2": 30,
    "div": 10,
}
MOST_VALUES = 128  # elements of one tile a thread may hold in registers
RESERVED = frozenset(
    {
        *keyword.kwlist,
        *keyword.softkwlist,
        "shared_bool",
        "cuda",
        "range",
        "min",
        "max",
        "abs",
        "inf",
        "nan",
        "thread",
        "task",
        "tasks",
    }
    | {
        "f64",
        "f32",
        "i64",
        "i32",
        "i16",
        "i8",
        "u8",
        "u16",
        "boolean",
        "LAUNCHES",
        "True",
        "False",
        "math",
        "ALL_LANES",
    }
)


def generate(module: TileModule, target: CudaTarget) -> str:
    """The source of a module's kernels for a target. Raises `TileError` where a tile does not fit, naming the tile."""
    kernels = [_Kernel(p, target) for p in module.programs]
    bodies = ["\n".join(k.lines()) for k in kernels]
    ours = sorted(set[str]().union(*(intrinsics_in(b) for b in bodies)))
    head = [
        f'"""{_plain(module.name)}: made by tileloom for {target.name}, tier simt."""',
        "",
        "from tileloom.runtime.cuda import ALL_LANES, boolean, cuda, f32, f64, i8, i16, i32, i64, inf, nan, u8, u16",
    ]
    if ours:
        imported = ", ".join(f"portable_{n} as {n}" if _lacks(target, n) else n for n in ours)
        head.append(f"from tileloom.runtime.intrinsics.ptx import {imported}")
    launches = ["LAUNCHES = {", *(f"    {k.launch()}," for k in kernels), "}"]
    return "\n".join([*head, "", "", *("\n\n\n".join(bodies).split("\n")), "", "", *launches, ""])


def _lacks(target: CudaTarget, intrinsic: str) -> bool:
    """Has the target no instruction for it, so that several have to do?"""
    if intrinsic in ("max_f32", "min_f32"):
        return not target.has_nan_max
    return intrinsic in ("bf16_from_f32", "round_bf16") and not target.has_bf16_convert


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


# ---------------------------------------------------------------- values in the generated source


@dataclass(frozen=True)
class Registers:
    """A local array of a thread, its elements of the tile in row-major order of `layout`."""

    array: str
    layout: Layout


@dataclass(frozen=True)
class Staged:
    """A tile in shared memory: element (i, j) at i * pitches[0] + j * pitches[1]."""

    buffer: Buffer
    axes: tuple[str, ...]
    pitches: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """Where a tile value can be read: a scalar variable, registers, shared memory, or both of these."""

    type: TileType
    scalar: str | None = None
    registers: Registers | None = None
    staged: Staged | None = None


@dataclass(frozen=True)
class Point:
    """The element at which code is emitted: the layout whose loops are open, and the counter of each axis."""

    layout: Layout
    counters: dict[str, str]
    checked: frozenset[str] = frozenset()

    def element(self, layout: Layout) -> str:
        """The number of this element among those of a layout that serves this one."""
        terms, stride = [], 1
        for axis, spread in reversed(list(zip(layout.axes, layout.spreads, strict=True))):
            if spread.count > 1:
                terms.append(self.counters[axis] if stride == 1 else f"{self.counters[axis]} * {stride}")
            stride *= spread.count
        return " + ".join(reversed(terms)) or "0"


NOWHERE = Point(Layout((), ()), {})


@dataclass
class _Text:
    """Lines of a function body."""

    out: list[str] = field(default_factory=list)
    depth: int = 1

    def line(self, text: str) -> None:
        self.out.append("    " * self.depth + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1


@dataclass
class _Names:
    """Python names for the user's: ASCII, no keyword, no name twice."""

    taken: set[str] = field(default_factory=lambda: set(RESERVED))

    def fresh(self, wanted: str) -> str:
        base = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "_"
        base = f"_{base}" if base[0].isdigit() else base
        name, n = base, 1
        while name in self.taken or MEANT.fullmatch(name):
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class _AxisNames:
    """What an axis is called: its index, its tile's first index, its loop counter, whether its lane exists, bounds."""

    index: str
    first: str
    counter: str
    exists: str
    lo: str
    hi: str


# ---------------------------------------------------------------- one kernel


class _Kernel:
    """Emits one program. Statements are visited once, in order; what is known about memory goes along."""

    def __init__(self, program: TileProgram, target: CudaTarget) -> None:
        self.program, self.target = program, target
        self.statics = dict(program.statics)
        self.axes = tile_axes(program, self.statics)
        self.tiles = {a: self._tile_size(x) for a, x in self.axes.items()}
        self.facts = Facts(
            {p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, self.tiles
        )
        self.contexts = list(contexts(program, self.facts))
        self.deal = deal((Demand(c.kind, c.axes) for c in self.contexts if c.kind != "operand"), self.tiles)
        self.crossing = self._crossing()
        self.names, self.text, self.memory = _Names(), _Text(), SharedMemory()
        self.name = self.names.fresh(program.name)
        self.extents = {e: self.names.fresh(e) for e in program.extents}
        self.scalars = {s.name: self.names.fresh(s.name) for s in program.scalars}
        self.tensors = {p.name: self.names.fresh(p.name) for p in program.params}
        self.strides = {
            p.name: tuple(self.names.fresh(f"{p.name}_s{i}") for i in range(len(p.shape)))
            for p in program.params
        }
        every = dict.fromkeys(a.name for a in [*loop_axes(program), *self.axes.values()])
        self.axis_names = {a: self._name_axis(a) for a in every}
        self.live: dict[str, LoopAxis] = {w.name: self.axes[w.name] for w in program.whole}
        self.values: dict[str, Value] = {}
        self.types: Types = {}
        self.from_tensors: set[str] = {
            c.name for s in statements(program.body) if isinstance(s, For) for c in s.carries
        }
        self.transient: list[Buffer] = []
        self.temporaries = 0
        self.coordinates: dict[tuple[int, int], str] = {}
        self.shared_tensors = self._shared_tensors()
        self._emit()

    def _tile_size(self, a: LoopAxis) -> int:
        if a.tile is None:
            raise refuse(
                "E0910", f"axis `{a.name}` is whole, but its extent is not known at compile time", None,
                help=f"name its extent under `static` in the schedule, or give `tile {a.name} by …`",
            )  # fmt: skip
        return a.tile

    def _name_axis(self, axis: str) -> _AxisNames:
        fresh = self.names.fresh
        return _AxisNames(
            fresh(axis),
            fresh(f"{axis}_0"),
            fresh(f"{axis}_i"),
            fresh(f"{axis}_ok"),
            fresh(f"{axis}_lo"),
            fresh(f"{axis}_hi"),
        )

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

    # ------------------------------------------------------------ the function

    def _emit(self) -> None:
        grids = [s for s in self.program.body if isinstance(s, Grid)]
        if len(grids) > 1:
            raise refuse(
                "E0911", f"`{self.program.name}` has {len(grids)} parallel loops in a row; a launch has one", None,
                help="write each as a tile program of its own: programs run one after another",
            )  # fmt: skip
        if grids and any(isinstance(s, Store) for s in self._outside(self.program.body)):
            raise refuse(
                "E0911", f"`{self.program.name}` stores outside its parallel loop, where every block would", None,
                help="move the store inside, or into a tile program of its own",
            )  # fmt: skip
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
                "E0912", f"`{self.program.name}` needs {need} bytes of shared memory; {self.target.name} has {limit} for a block", None,
                note=f"the largest staged tile is `{big.name}`, {big.size * big.dtype.bytes} bytes",
                help="choose smaller tiles in the schedule: " + self._tile_clause(),
            )  # fmt: skip

    def _tile_clause(self) -> str:
        halves = (
            f"{a} by {max(1, n // 2)}"
            for a, n in self.tiles.items()
            if self.axes[a].tile and a not in self._whole()
        )
        return f"tile {', '.join(halves)}"

    def _whole(self) -> set[str]:
        return {w.name for w in self.program.whole}

    def shared_bytes(self) -> int:
        return sum(n * held_bytes(t) for t, n in self.memory.arenas().items())

    def dynamic(self) -> DType | None:
        """The arena that has to be dynamic because all together exceed what a launch gets without asking."""
        sizes = {t: n * held_bytes(t) for t, n in self.memory.arenas().items()}
        return (
            None
            if sum(sizes.values()) <= self.target.static_shared_bytes
            else max(sizes, key=lambda t: sizes[t])
        )

    def launch(self) -> str:
        """The entry of `LAUNCHES`."""
        arena = self.dynamic()
        dynamic = 0 if arena is None else self.memory.arenas()[arena] * held_bytes(arena)
        count = self._task_count()
        return (
            f'"{self.name}": {{"threads": {self.deal.threads}, "shared_bytes": {dynamic}, '
            f'"tasks": lambda {", ".join(self.extents.values())}: {count}}}'
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
        head = [f"@cuda.jit(launch_bounds=({self.deal.threads}, 1))", f"def {self.name}("]
        head += [f"    {p}," for p in self._parameters()]
        head.append("):")
        body = [f"    {c}" for c in self._comments()]
        body.append("    thread = i64(cuda.threadIdx.x)")
        for (low, bits), name in self.coordinates.items():
            shifted = f"(thread >> {low})" if low else "thread"
            body.append(f"    {name} = {shifted} & {(1 << bits) - 1}")
        for dtype, size in arenas.items():
            body.append(
                f"    shared_{dtype} = cuda.shared.array({0 if dtype is dynamic else size}, {_held(dtype)})"
            )
        for b in self.memory.all_buffers:
            body.append(f"    {b.name} = {_view(b)}")
        return [*head, *body, *self.text.out]

    def _parameters(self) -> Iterator[str]:
        for p in self.program.params:
            strides = "".join(f", {s}: i64" for s in self.strides[p.name]).replace(": i64", ': "i64"')
            yield f'{self.tensors[p.name]}: "*{storage(p.dtype)}"{strides}'
        for s in self.program.scalars:
            yield f'{self.scalars[s.name]}: "{_held(s.dtype)}"'
        if self.extents:
            yield ", ".join(f'{e}: "i64"' for e in self.extents.values())

    def _comments(self) -> Iterator[str]:
        d = self.deal
        yield f"# {d.threads} threads: {1 << d.row_bits} rows of {1 << d.column_bits}"
        for axis, tile in self.tiles.items():
            side = "thread rows" if axis in d.rows else "thread columns"
            whole = "in one piece" if axis in self._whole() else f"by {tile}"
            yield f"# {_plain(axis)} {whole}, over {side}"
        need = self.shared_bytes()
        if need:
            yield f"# {need} bytes of shared memory" + (", dynamic" if self.dynamic() else "")

    # ------------------------------------------------------------ statements

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

    def assign(self, name: str, code: Code) -> str:
        variable = self.names.fresh(name)
        self.text.line(f"{variable} = {code.text}")
        return variable

    def registers(self, name: str, t: TileType, layout: Layout | None = None) -> Registers:
        """Declare a local array for a tile."""
        layout = layout or self.deal.layout(t.axes)
        self._check_elements(name, layout)
        array = self.names.fresh(name)
        self.text.line(f"{array} = {_local(t.dtype, layout.elements)}")
        return Registers(array, layout)

    def _check_elements(self, name: str, layout: Layout) -> None:
        if layout.elements > MOST_VALUES:
            sizes = " x ".join(str(s.tile) for s in layout.spreads)
            raise refuse(
                "E0913", f"`{name}` of `{self.program.name}` is a tile of {sizes}: {layout.elements} values for each of {self.deal.threads} threads; the limit is {MOST_VALUES}", None,
                help="choose smaller tiles in the schedule: " + self._tile_clause(),
            )  # fmt: skip

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

    # ------------------------------------------------------------ loops

    def grid(self, g: Grid) -> None:
        if any(a.name in self.live for a in g.axes):
            raise refuse("E0911", f"`{self.program.name}`: an axis is open twice", None)
        if self.text.depth > 1:
            self._serial_grid(g, g.axes)
            return
        counts = [self._count(a) for a in g.axes]
        if len(counts) > 1:
            counts = [c if c.isidentifier() else self.assign("count", Code(c, DType.I64)) for c in counts]
        with self.tasks(" * ".join(counts) or "1"):
            self._task_indices(g.axes, counts)
            self.live.update({a.name: a for a in g.axes})
            self.block(g.body)
            for a in g.axes:
                del self.live[a.name]

    @contextmanager
    def tasks(self, count: str) -> Iterator[None]:
        """The loop of a block over its tasks."""
        self.text.line(f"tasks = {count}")
        self.text.line("for task in range(i64(cuda.blockIdx.x), tasks, i64(cuda.gridDim.x)):")
        with self.text.indented(), self.back_edge():
            yield

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
        rest = "task"
        for i in range(len(axes) - 1, -1, -1):
            a, names = axes[i], self.axis_names[axes[i].name]
            here = rest if i == 0 else f"{rest} % {counts[i]}"
            if a.tile is not None:
                self.text.line(
                    f"{names.first} = {here} * {a.tile}" if i == 0 else f"{names.first} = ({here}) * {a.tile}"
                )
            else:
                self.text.line(f"{names.index} = " + (f"{names.lo} + {here}" if _starts_late(a) else here))
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
        if a.lo is not None and _starts_late(a):
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
        self.text.line(f"for {variable} in range({_visited(a, first, end, reverse)}):")
        with self.text.indented(), self.back_edge():
            self.live[a.name] = a
            yield
            del self.live[a.name]

    def loop(self, s: For) -> None:
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
        with self.visiting(s.axis, s.reverse):
            self.loop_body(s)

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
                (n for n in left if not any(n in _read(y) for m, (_, y) in left.items() if m != n)), None
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
        value = self.values[name]
        if value.scalar is not None:
            code = cast(self.emit(self.materialise(e), NOWHERE), t.dtype)
            self.text.line(f"{value.scalar} = {code.text}")
        elif value.registers is not None:
            self.compute(value.registers, t.dtype, e)

    # ------------------------------------------------------------ tiles into registers and shared memory

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
            self.guarded(
                self.owners(layout) + self.inside(at, layout.axes), f"{self.spot(staged, at)} = {code.text}"
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

    def spot(self, staged: Staged, at: Point) -> str:
        """The element of a staged tile at a point."""
        terms = []
        for axis, pitch in zip(staged.axes, staged.pitches, strict=True):
            position = self.position(at, axis)
            terms.append(position if pitch == 1 else f"{_grouped(position)} * {pitch}")
        return f"{staged.buffer.name}[{' + '.join(terms)}]"

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
                self.transient.append(_staged(value).buffer)
            self.note(self.memory.read(_staged(value).buffer))
        for x in dict.fromkeys(x.tensor for x in leaves(e) if isinstance(x, Load)):
            if x in self.shared_tensors:
                self.note(self.memory.read(x))

    # ------------------------------------------------------------ products and reductions

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
            return _staged(self.values[e.name])
        t = self.facts.type_of(e, self.types)
        name = e.name if isinstance(e, Name) else e.tensor if isinstance(e, Load) else "operand"
        staged = self.stage(name, e, t)
        self.transient.append(staged.buffer)
        return staged

    def product(self, d: Dot, a: Staged, b: Staged, target: Registers, dtype: DType) -> None:
        """target += a · b, each thread its block of the result, one step of the contracted axes at a time."""
        self.note(self.memory.read(a.buffer))
        self.note(self.memory.read(b.buffer))
        layout = target.layout
        parts = [self.fragment(s, layout, dtype) for s in (a, b)]
        counters = {}
        depth = self.text.depth
        for axis in d.over:
            counters[axis] = self.axis_names[axis].counter
            self.text.line(f"for {counters[axis]} in range({self.tiles[axis]}):")
            self.text.depth += 1
        over = Layout(d.over, tuple(Spread(self.tiles[x]) for x in d.over))
        for staged, part in zip((a, b), parts, strict=True):
            for at in self.nest(part.layout, []):
                whole = Point(_joined(part.layout, over), {**at.counters, **counters})
                value = convert(Code(self.spot(staged, whole), compute(staged.buffer.dtype)), dtype)
                self.text.line(f"{part.array}[{at.element(part.layout)}] = {value.text}")
        for at in self.nest(layout, []):
            old, x, y = (Code(f"{r.array}[{at.element(r.layout)}]", dtype) for r in (target, *parts))
            self.text.line(f"{old.text} = {operation('fma', [x, y, old]).text}")
        self.text.depth = depth

    def fragment(self, staged: Staged, layout: Layout, dtype: DType) -> Registers:
        """Registers for what a thread reads of an operand at one step."""
        own = layout.restrict(staged.axes)
        array = self.names.fresh(f"{staged.buffer.name.removesuffix('_shared')}_part")
        self.text.line(f"{array} = {_local(dtype, own.elements)}")
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
        done = _Reduction(self, e, TileType(t.dtype, kept), layout.restrict(kept), layout.restrict(over))
        return self.temporary(e.fn, done.run(named))

    def _widened(self, e: Reduce) -> Expr:
        """An argument free of a reduced axis, spread over it."""
        zero: Expr = Const(False, DType.BOOL)
        for a in e.over:
            zero = Apply("or", (zero, Apply("lt", (AxisIndex(a), Const(0, DType.I64)))))
        return Apply("where", (zero, e.arg, e.arg))

    # ------------------------------------------------------------ stores

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
        for at in self.nest(layout, [*subscripts, value], exists=axes):
            where = [convert(self.cut(self.emit(x, at)), DType.I64) for x in subscripts]
            conditions = (
                self.owners(layout)
                + self.conditions(at, axes)
                + self.within(param, s.subscripts, where, [True] * len(where))
            )
            code = self.emit(value, at)
            self.guarded(conditions, self.write(s, param, self.offset(param, where), code))

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
                "E0914", f"`{p.name}` is {p.dtype}, and {self.target.name} cannot add to {p.dtype} from several threads at once", None,
                help="declare it f32 (or i32, i64), or write every element from one grid iteration only",
            )  # fmt: skip

    def owns_targets(self, s: Store) -> bool:
        """Do different lanes and tasks add to different elements, because every open axis is a subscript itself?"""
        bare = {x.axis for x in s.subscripts if isinstance(x, AxisIndex)}
        axes = self.facts.type_of(s.value, self.types).axes
        return {a for a in self.live if a not in self._whole()} | set(axes) <= bare

    def guarded(self, conditions: list[str], *actions: str) -> None:
        """Lines under conditions."""
        if conditions:
            self.text.line(f"if {' and '.join(conditions)}:")
        self.text.depth += bool(conditions)
        for action in actions:
            self.text.line(action)
        self.text.depth -= bool(conditions)

    def owners(self, layout: Layout) -> list[str]:
        """Of threads that hold copies one acts."""
        spare = (self.deal.threads - 1) & ~layout.mask
        if not spare:
            return []
        return ["thread == 0"] if spare == self.deal.threads - 1 else [f"thread & {spare} == 0"]

    # ------------------------------------------------------------ element loops

    def nest(self, layout: Layout, exprs: Iterable[Expr], exists: Iterable[str] = ()) -> Iterator[Point]:
        """The loops over a thread's elements, opened for each point given.

        Long bodies get several points: their outermost loops are written out, for otherwise NVVM would keep them as
        loops, and registers cannot be indexed.
        """
        depth, exprs = self.text.depth, list(exprs)
        for fixed in self._written_out(layout, exprs):
            yield self.open(layout, exprs, set(exists), replace(NOWHERE, counters=fixed))
            self.text.depth = depth

    def _written_out(self, layout: Layout, exprs: list[Expr]) -> Iterator[dict[str, str]]:
        """Counters of the loops that are written out, one set for each copy of the rest."""
        limit = LONGEST_UNROLLED_BEFORE_LLVM_20 if self.target.capability < (10, 0) else LONGEST_UNROLLED
        work = layout.elements * sum(_work(x) for e in exprs for x in leaves(e))
        copies: list[dict[str, str]] = [{}]
        for axis, spread in zip(layout.axes, layout.spreads, strict=True):
            if work <= limit:
                break
            copies = [{**c, axis: str(i)} for c in copies for i in range(spread.count)]
            work //= spread.count
        yield from copies

    def open(self, layout: Layout, exprs: list[Expr], exists: set[str], outer: Point) -> Point:
        """Open the loops of a layout, with the index and existence of each axis that the expressions need."""
        indexed, loaded_over = self._axes_needed(exprs)
        counters = dict(outer.counters)
        for axis, spread in zip(layout.axes, layout.spreads, strict=True):
            if axis not in counters:
                counters[axis] = self.axis_names[axis].counter if spread.count > 1 else "0"
                if spread.count > 1:
                    self.text.line(f"for {counters[axis]} in range({spread.count}):")
                    self.text.depth += 1
            self._index(Point(layout, counters), axis, axis in indexed, axis in exists | loaded_over)
        return Point(_joined(outer.layout, layout), counters)

    def _axes_needed(self, exprs: list[Expr]) -> tuple[set[str], set[str]]:
        """Axes whose index the expressions name, and axes that loads span."""
        every = [x for e in exprs for x in leaves(e)]
        loads = [x for x in every if isinstance(x, Load)]
        spanned = {a for x in loads for a in self.facts.type_of(x, self.types).axes}
        return {x.axis for x in every if isinstance(x, AxisIndex)}, spanned

    def _index(self, at: Point, axis: str, indexed: bool, exists: bool) -> None:
        names, parts = self.axis_names[axis], self.lane_checks(at, axis) if exists else []
        uses = any(names.index in p for p in parts)
        if indexed or uses:
            first = "" if axis in self._whole() else f"{names.first} + "
            self.text.line(f"{names.index} = {first}{self.position(at, axis)}")
        if parts:
            self.text.line(f"{names.exists} = {' and '.join(parts)}")

    def lane_checks(self, at: Point, axis: str) -> list[str]:
        """What has to hold for the lane to exist; empty where it always does."""
        a, spread, names = self.axes[axis], at.layout.spread(axis), self.axis_names[axis]
        checks = [] if spread.even else [f"{_grouped(self.position(at, axis))} < {spread.tile}"]
        if axis in self._whole():
            return checks
        extent = static_value(a.extent, self.statics)
        if a.hi is not None:
            checks.append(f"{names.index} < {names.hi}")
        elif extent is None or extent % spread.tile:
            checks.append(f"{names.index} < {self.emit(a.extent, NOWHERE).operand}")
        if _starts_late(a):
            checks.append(f"{names.index} >= {names.lo}")
        return checks

    def conditions(self, at: Point, axes: Iterable[str]) -> list[str]:
        """The existence flags of those axes that have one."""
        return [self.axis_names[a].exists for a in axes if a in at.layout.axes and self.lane_checks(at, a)]

    def inside(self, at: Point, axes: Iterable[str]) -> list[str]:
        """Positions past the tile's size, which uneven spreads have, have no place in a buffer."""
        uneven = [a for a in axes if not at.layout.spread(a).even]
        return [f"{_grouped(self.position(at, a))} < {at.layout.spread(a).tile}" for a in uneven]

    def position(self, at: Point, axis: str) -> str:
        """The position within the tile."""
        spread = at.layout.spread(axis)
        if not spread.bits:
            return at.counters[axis]
        coordinate = self.coordinate(spread)
        return coordinate if spread.count == 1 else f"{coordinate} + {spread.step} * {at.counters[axis]}"

    def coordinate(self, spread: Spread) -> str:
        key = (spread.low, spread.bits)
        if key not in self.coordinates:
            side = {0: "column", self.deal.column_bits: "row"}.get(spread.low, f"part{spread.low}_")
            self.coordinates[key] = self.names.fresh(f"{side}{spread.step}")
        return self.coordinates[key]

    # ------------------------------------------------------------ expressions

    def cut(self, code: Code, at_most: int = WIDEST_LINE) -> Code:
        """A long expression becomes a variable."""
        if len(code.text) <= at_most:
            return code
        name = self.names.fresh("t")
        self.text.line(f"{name} = {code.text}")
        return replace(code, text=name, atom=True)

    def emit(self, e: Expr, at: Point, widest: int = WIDEST_LINE) -> Code:
        """The value of an elementwise expression at a point; loads and long parts become lines before it."""
        done: list[Code] = []
        for node in postorder(e):
            arity = len(operands(node))
            args = done[len(done) - arity :]
            del done[len(done) - arity :]
            done.append(self.cut(self._node(node, args, at), widest))
        return done[0]

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        match e:
            case Const(value=value, dtype=dtype):
                return constant(value, dtype)
            case ScalarRef(name=name):
                return _holding(self.scalars[name], self.facts.scalars[name])
            case ExtentRef(name=name):
                return Code(
                    str(self.statics[name]) if name in self.statics else self.extents[name], DType.I64
                )
            case AxisIndex(axis=axis):
                return Code(self._axis_index(axis, at), DType.I64)
            case Name(name=name):
                return self._read(self.values[name], at)
            case Load():
                return self._load(e, args, at)
            case Cast(dtype=dtype):
                return cast(args[0], dtype)
            case Fill():
                return args[0]
            case Apply(op=op):
                return operation(op, args)
        raise TypeError(f"{type(e).__name__} is not elementwise")

    def _axis_index(self, axis: str, at: Point) -> str:
        """A lane's index; outside the axis's loops (in bounds) a tile's first."""
        names = self.axis_names[axis]
        is_tile = axis in self.tiles and axis not in at.layout.axes
        return ("0" if axis in self._whole() else names.first) if is_tile else names.index

    def _read(self, value: Value, at: Point) -> Code:
        if value.scalar is not None:
            text = value.scalar
        elif value.registers is not None and value.registers.layout.serves(at.layout):
            text = f"{value.registers.array}[{at.element(value.registers.layout)}]"
        else:
            text = self.spot(_staged(value), at)
        return _holding(text, value.type.dtype)

    def _load(self, e: Load, args: list[Code], at: Point) -> Code:
        """An element of a tensor, 0 on lanes that do not exist or fall outside it."""
        param = self.program.param(e.tensor)
        where = [
            self.clamped(param, i, x, a) for i, (x, a) in enumerate(zip(e.subscripts, args, strict=True))
        ]
        axes = self.facts.type_of(e, self.types).axes
        loose = [not self.depends_on_tensors(x) for x in e.subscripts]
        conditions = self.conditions(at, axes) + self.within(param, e.subscripts, where, loose)
        conditions += self.nonempty(param, e.subscripts)
        value = loaded(f"{self.tensors[e.tensor]}[{self.offset(param, where)}]", param.dtype)
        name = self.names.fresh(f"{e.tensor}_value")
        if not conditions:
            self.text.line(f"{name} = {value.text}")
        else:
            self.text.line(f"{name} = {constant(0, param.dtype).text}")
            self.guarded(conditions, f"{name} = {value.text}")
        return _holding(name, param.dtype)

    def clamped(self, p: Param, i: int, subscript: Expr, code: Code) -> Code:
        """A subscript from a tensor's value is clamped to the extent."""
        code = convert(code, DType.I64)
        if not self.depends_on_tensors(subscript):
            return self.cut(code, 40)
        size = self.emit(p.shape[i], NOWHERE)
        return self.cut(Code(f"min(max({code.text}, 0), {size.text} - 1)", DType.I64), 0)

    def depends_on_tensors(self, subscript: Expr) -> bool:
        return any(
            isinstance(x, Load) or (isinstance(x, Name) and x.name in self.from_tensors)
            for x in subexpressions(subscript)
        )

    def nonempty(self, p: Param, subscripts: tuple[Expr, ...]) -> list[str]:
        """A clamped subscript finds nothing in an empty tensor."""
        sizes = [p.shape[i] for i, x in enumerate(subscripts) if self.depends_on_tensors(x)]
        dynamic = [s for s in sizes if not static_value(s, self.statics)]
        return [f"{self.emit(s, NOWHERE).operand} > 0" for s in dynamic]

    def within(
        self, p: Param, subscripts: tuple[Expr, ...], where: list[Code], loose: list[bool]
    ) -> list[str]:
        """Bounds checks of the loose subscripts that are not an axis over the same extent."""
        checks = []
        for i, (x, code) in enumerate(zip(subscripts, where, strict=True)):
            if not loose[i] or self.covers(x, p.shape[i]):
                continue
            size = self.emit(p.shape[i], NOWHERE)
            checks.append(f"0 <= {code.operand} < {size.operand}")
        return checks

    def covers(self, subscript: Expr, size: Expr) -> bool:
        """Is an existing lane's index always inside a dimension of this size?"""
        if not isinstance(subscript, AxisIndex):
            return False
        axis = self.live.get(subscript.axis)
        if axis is None:
            return False
        mine, its = static_value(axis.extent, self.statics), static_value(size, self.statics)
        return axis.extent == size or (mine is not None and its is not None and mine <= its)

    def offset(self, p: Param, where: list[Code]) -> str:
        """The flat offset in elements, 64 bits wide."""
        terms = [f"{c.operand} * {s}" for c, s in zip(where, self.strides[p.name], strict=True)]
        return " + ".join(terms) or "0"


def held_bytes(dtype: DType) -> int:
    return compute(dtype).bytes


def _held(dtype: DType) -> str:
    """The name of the type that a value of this dtype has in registers."""
    held = compute(dtype)
    return "boolean" if held is DType.BOOL else str(held)


def _holding(text: str, dtype: DType) -> Code:
    """A name for a value of a declared type."""
    held = compute(dtype)
    return Code(text, held, narrow=None if held is dtype else dtype)


def _starts_late(a: LoopAxis) -> bool:
    """Has the axis a lower bound other than 0?"""
    return a.lo is not None and not (isinstance(a.lo, Const) and a.lo.value == 0)


def _work(e: Expr) -> int:
    """Instructions of one node, about."""
    if isinstance(e, Load):
        return 10
    return WORK.get(e.op, 1) if isinstance(e, Apply) else 0


def _visited(a: LoopAxis, first: str, end: str, reverse: bool) -> str:
    """The arguments of `range` for the first indices of tiles that meet [first, end)."""
    size = a.tile or 1
    some = f" if {first} < {end} else " if _starts_late(a) and size > 1 else ""
    start = f"{first} // {size} * {size}" if some else first
    if reverse:
        last = f"{end} - 1" if size == 1 else f"({end} - 1) // {size} * {size}"
        return f"{last}{some and f'{some}-{size}'}, {start} - 1, -{size}"
    if start == "0" and size == 1:
        return end
    return f"{start}, {end}{some and f'{some}0'}" + (f", {size}" if size > 1 else "")


def _grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _local(dtype: DType, elements: int) -> str:
    """A thread's own array: a pointer to registers, for an index into an array is checked for being negative each time."""
    held = compute(dtype)
    return f"cuda.local.array({elements}, boolean)" if held is DType.BOOL else f"registers_{held}({elements})"


def _view(b: Buffer) -> str:
    """A part of an arena, as a pointer for the same reason."""
    if b.dtype is DType.BOOL:
        return f"shared_{b.dtype}[{b.start} : {b.start + b.size}]"
    return f"view_{b.dtype}(shared_{b.dtype}, {b.start}, {b.start + b.size})"


def _staged(value: Value) -> Staged:
    if value.staged is None:
        raise AssertionError("a tile was not prepared for this reader")
    return value.staged


def _alone(d: Deal, axis: str) -> Spread:
    return d.layout((axis,)).spread(axis)


def _joined(a: Layout, b: Layout) -> Layout:
    return Layout((*a.axes, *b.axes), (*a.spreads, *b.spreads))


def _read(e: Expr) -> set[str]:
    return {x.name for x in subexpressions(e) if isinstance(x, Name)}


def _last_uses(body: tuple[Stmt, ...]) -> dict[str, int]:
    """For each name the last statement of the block that mentions it, itself or inside."""
    last: dict[str, int] = {}
    for i, s in enumerate(body):
        for inner in statements((s,)):
            if isinstance(inner, Let):
                last[inner.name] = i
            for e in expressions(inner):
                last.update(dict.fromkeys(_read(e), i))
    return last


# ---------------------------------------------------------------- reductions

ACCUMULATORS = {
    "sum": "total",
    "prod": "product",
    "max": "highest",
    "min": "lowest",
    "any": "some",
    "all": "every",
}
LANE_BITS = 5


class _Reduction:
    """One reduction: within a thread, between the lanes of a warp (shuffles), between warps (shared memory)."""

    def __init__(self, kernel: _Kernel, e: Reduce, t: TileType, kept: Layout, over: Layout) -> None:
        self.k, self.e, self.t, self.kept, self.over = kernel, e, t, kept, over
        self.argument = compute(kernel.facts.type_of(e.arg, kernel.types).dtype)
        self.finds_place = e.fn in ("argmax", "argmin")
        self.held = self.argument if self.finds_place else t.dtype
        self.name = kernel.names.fresh(ACCUMULATORS.get(e.fn, "best"))
        self.place = kernel.names.fresh(f"{self.name}_at") if self.finds_place else ""

    def run(self, name: str) -> Value:
        k = self.k
        k.prepare(self.e.arg, _joined(self.kept, self.over))
        if not self.kept.axes:
            self.whole(NOWHERE)
            if self.warps():
                self.between_warps([self.name, self.place])
            return Value(self.t, scalar=self.place or self.name)
        values = k.registers(name, TileType(self.held, self.kept.axes), self.kept)
        places = (
            k.registers(f"{name}_at", TileType(DType.I64, self.kept.axes), self.kept) if self.place else None
        )
        for at in k.nest(self.kept, [self.e.arg]):
            self.whole(at)
            k.text.line(f"{values.array}[{at.element(self.kept)}] = {self.name}")
            if places:
                k.text.line(f"{places.array}[{at.element(self.kept)}] = {self.place}")
        if self.warps():
            self.between_warps([values.array, places.array if places else ""])
        return Value(self.t, registers=places or values)

    # ------------------------------------------------------------ one element of the result

    def whole(self, at: Point) -> None:
        """A thread's own elements, then its warp's."""
        k, depth = self.k, self.k.text.depth
        k.text.line(f"{self.name} = {self.start().text}")
        if self.place:
            k.text.line(f"{self.place} = -1")
        inner = k.open(self.over, [self.e.arg], set(self.over.axes), at)
        value = self.converted(k.emit(self.e.arg, inner))
        index = k.axis_names[self.e.over[0]].index if self.place else ""
        self.fold(value, index, k.conditions(inner, self.over.axes))
        k.text.depth = depth
        for bit in self.lanes():
            self.shuffle(1 << bit)

    def start(self) -> Code:
        if self.finds_place:
            return constant(0, self.held)
        return identity(self.e.fn, self.held)

    def converted(self, x: Code) -> Code:
        return cast(x, DType.BOOL) if self.held is DType.BOOL else convert(x, self.held)

    def fold(self, value: Code, index: str, conditions: list[str]) -> None:
        k = self.k
        if self.place:
            name = k.cut(value, 0).text
            beats = f"beats_{self.e.fn[3:]}_{self.held if self.held.is_float else 'i64'}"
            test = f"{beats}({name}, {index}, {self.name}, {self.place})"
            k.guarded([*conditions, test], f"{self.name} = {name}", f"{self.place} = {index}")
        else:
            step = combine(self.e.fn, Code(self.name, self.held), value)
            k.guarded(conditions, f"{self.name} = {step.text}")

    def shuffle(self, distance: int) -> None:
        k = self.k
        index = k.cut(Code(self.exchanged(self.place, distance), DType.I64), 0).text if self.place else ""
        if self.held is DType.BOOL:
            value = f"({self.exchanged(f'i32({self.name})', distance)} != 0)"
        else:
            value = self.exchanged(self.name, distance)
        self.fold(Code(value, self.held), index, [])

    def exchanged(self, value: str, distance: int) -> str:
        return f"cuda.shfl_xor_sync(ALL_LANES, {value}, {distance})"

    def lanes(self) -> Iterator[int]:
        """Bits of the lane number that tell apart threads with parts of one element, largest first."""
        for bit in reversed(range(LANE_BITS)):
            if self.over.mask >> bit & 1:
                yield bit

    # ------------------------------------------------------------ between warps

    def warps(self) -> list[int]:
        """Bits of the thread number beyond the lane's that do so."""
        return [b for b in range(LANE_BITS, 11) if self.over.mask >> b & 1]

    def between_warps(self, arrays: list[str]) -> None:
        """Every warp leaves its part in shared memory; every thread folds all parts in the same order."""
        k, bits = self.k, self.warps()
        sizes = [TileType(d, self.kept.axes) for d in (self.held, DType.I64)][: 1 + bool(self.place)]
        parts = [self.parts(t, 1 << len(bits)) for t in sizes]
        stride = parts[0].buffer.size >> len(bits)
        slot = k.cut(Code(self.slot(bits), DType.I64), 0).text
        for p in parts:
            k.note(k.memory.write(p.buffer))
        for at in k.nest(self.kept, []):
            writer = self.writers() + k.inside(at, self.kept.axes)
            k.guarded(
                writer,
                *(
                    f"{self.spot(p, at, slot, stride)} = {self.element(a, at)}"
                    for p, a in zip(parts, arrays, strict=False)
                ),
            )
        for p in parts:
            k.note(k.memory.read(p.buffer))
        for at in k.nest(self.kept, []):
            self.fold_parts(parts, stride, 1 << len(bits), at)
            if self.kept.axes:
                for name, array in zip((self.name, self.place), arrays, strict=True):
                    if name:
                        k.text.line(f"{self.element(array, at)} = {name}")

    def fold_parts(self, parts: list[Staged], stride: int, count: int, at: Point) -> None:
        k = self.k
        for name, p in zip((self.name, self.place), parts, strict=False):
            k.text.line(f"{name} = {self.spot(p, at, '0', stride)}")
        counter = k.names.fresh("warp")
        k.text.line(f"for {counter} in range(1, {count}):")
        with k.text.indented():
            index = (
                k.cut(Code(self.spot(parts[1], at, counter, stride), DType.I64), 0).text if self.place else ""
            )
            self.fold(Code(self.spot(parts[0], at, counter, stride), self.held), index, [])

    def parts(self, t: TileType, count: int) -> Staged:
        """Room for one tile of parts a warp."""
        k = self.k
        one = k.place("warp_parts", t)
        k.memory.free(one.buffer)
        k.memory.all_buffers.remove(one.buffer)
        buffer = k.memory.allocate(one.buffer.name, compute(t.dtype), one.buffer.size * count)
        k.transient.append(buffer)
        return replace(one, buffer=buffer)

    def spot(self, p: Staged, at: Point, slot: str, stride: int) -> str:
        inner = self.k.spot(p, at)[len(p.buffer.name) + 1 : -1]
        base = slot if stride == 1 else f"{slot} * {stride}"
        return f"{p.buffer.name}[{base if not inner else f'{base} + {inner}'}]"

    def element(self, array: str, at: Point) -> str:
        return f"{array}[{at.element(self.kept)}]" if self.kept.axes else array

    def slot(self, bits: list[int]) -> str:
        """The warp's number among those with parts of one element: the bits packed together."""
        runs: list[tuple[int, int, int]] = []
        for place, bit in enumerate(bits):
            if runs and bit == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
            else:
                runs.append((bit, 1, place))
        return " | ".join(
            f"((thread >> {low}) & {(1 << n) - 1})" + (f" << {at}" if at else "") for low, n, at in runs
        )

    def writers(self) -> list[str]:
        """One lane of each warp writes, for each element."""
        spare = (self.k.deal.threads - 1) & ~self.kept.mask & ~sum(1 << b for b in self.warps())
        return [f"thread & {spare} == 0"] if spare else []
