"""Runs generated CUDA source under CPython, every thread of a block for itself, and watches it.

The source is Python: each kernel is rewritten into a generator that yields at barriers and shuffles, and the threads of a
block take turns from one to the next. Found and raised as `KernelFault`, with kernel, line and thread:

- a barrier or a shuffle that not all threads reach, or that threads reach at different lines;
- two threads of a block touching one element of shared memory between two barriers, one of them writing;
- two threads writing one element of an output with no barrier between them (additions are exempt), or two blocks;
- an index outside a shared array, a local array or a tensor.

Memory that nothing wrote holds NaN (integers: a large number), so that reading it shows. It needs neither a GPU nor
numba-cuda. One element operation costs about a microsecond: it is for tiny sizes.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any

import numpy as np

from ..compiler.interpreter.arithmetic import quiet
from ..compiler.interpreter.elements import NUMPY
from ..compiler.interpreter.tile import bind_extents, integer
from ..compiler.tile_ir import TileModule
from ..dsl.records import dataclass
from ..dsl.types import DType
from .intrinsics.coefficients import TANH_LIMIT, TANH_P, TANH_Q

WARP = 32
Array = np.ndarray[Any, Any]
Thread = Generator[tuple[str, int, Any, int], Any, None]


class KernelFault(RuntimeError):
    """What a kernel did that no kernel may do; the message names kernel, line, thread and place."""


# ---------------------------------------------------------------- entry


def run_module(
    module: TileModule,
    source: str,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, int | float | bool],
    blocks: int | None = None,
    preferred: bool = True,
    backwards: bool = False,
    ran: list[str] | None = None,
) -> dict[str, Array]:
    """Run every program of a module by the kernels of its generated source; outputs and inouts by name, inputs unchanged.

    `blocks`: how many blocks share the tasks; one for each task if None. Of a program's variants the first that sizes and
    strides allow runs, without `preferred` the last, which serves all. `backwards`: of threads with roles the
    last that can go on goes first. The names of the kernels that run are added to `ran`. Raises `KernelFault`.
    """
    kernels = load(source)
    extents = bind_extents(module, tensors, scalars)
    names = {**scalars, **extents}
    memory: dict[str, Array] = {}
    for program in module.programs:
        for p in program.params:
            if p.name not in memory:
                shape = tuple(integer(x, names) for x in p.shape)
                memory[p.name] = memory_for(p.dtype, tensors.get(p.name), shape)
        able = [k for k in kernels.values() if k.program == program.name]
        kernel = next(k for k in able if k.fits(extents, memory)) if preferred else able[-1]
        kernel.state.backwards = backwards
        if ran is not None:
            ran.append(kernel.name)
        arguments: list[Any] = []
        for p in program.params:
            tensor = Tensor(p.name, memory[p.name], kernel.state)
            arguments += [tensor, *tensor.strides]
        arguments += [_scalar(s.dtype, scalars[s.name]) for s in program.scalars]
        sizes = [extents[e] for e in program.extents]
        arguments += [*sizes, *(kernel.map(t, memory[t], box) for t, box in kernel.maps)]
        kernel.run(arguments, kernel.tasks(*sizes) if blocks is None else blocks)
    scratch = {p.name for p in module.scratch}
    written = {p.name for q in module.programs for p in q.params if p.mode != "in"} - scratch
    return {name: memory[name] for name in written}


def _scalar(dtype: DType, value: int | float | bool) -> Any:
    return np.float64(value) if dtype is DType.F64 else np.float32(value) if dtype.is_float else value


@dataclass(frozen=True)
class Kernel:
    """A kernel as a generator function over the arguments, `threads` of them a block."""

    name: str
    generator: Callable[..., Thread]
    state: State
    threads: int
    tasks: Callable[..., int]
    program: str
    multiples: Mapping[str, int]
    wide: Sequence[str]
    at_most: Mapping[str, int]
    names: dict[str, Any] = field(repr=False, default_factory=dict)
    shared_bytes: int = 0
    maps: Sequence[tuple[str, tuple[int, ...]]] = ()
    secondary: bool = False

    def map(self, name: str, values: Array, box: tuple[int, ...]) -> Any:
        """A tensor map as an argument."""
        from .emulate_roles import BoxMap

        return BoxMap(Tensor(name, values, self.state), box)

    def fits(self, extents: Mapping[str, int], memory: Mapping[str, Array]) -> bool:
        """May the kernel run on these sizes and strides?"""
        divisible = all(extents[e] % n == 0 for e, n in self.multiples.items())
        divisible = divisible and all(extents[e] <= n for e, n in self.at_most.items())
        mapped = all(memory[t].size > 0 for t, _ in self.maps)
        return divisible and mapped and all(_is_wide(memory[t]) for t in self.wide)

    def run(self, arguments: Sequence[Any], blocks: int) -> None:
        """Run the blocks one after another."""
        with quiet():
            for block in range(blocks):
                self.state.enter(self.name, block, blocks, self.secondary)
                if self.maps:
                    self._run_roles(arguments)
                else:
                    _Block(self, arguments).run()

    def _run_roles(self, arguments: Sequence[Any]) -> None:
        from .emulate_roles import run

        run(self.generator, self.state, self.names, arguments, self.threads, self.shared_bytes)


def load(source: str) -> dict[str, Kernel]:
    """The kernels of a generated source, by name."""
    state = State()
    from .emulate_roles import EVENTS, factories, made_by

    parsed = ast.parse(source)
    tree = _Rewrite({**EVENTS, **made_by(parsed)}).visit(parsed)
    cuda = _Cuda(state)
    names: dict[str, Any] = {**FUNCTIONS, **cuda.pointers(), **factories(), "cuda": cuda}
    exec(compile(ast.fix_missing_locations(tree), "<emulated>", "exec"), names)
    return {
        name: Kernel(
            name, names[name], state, launch["threads"], launch["tasks"], launch.get("program", name),
            launch.get("multiples", {}), launch.get("wide", ()), launch.get("at_most", {}),
            names, launch["shared_bytes"], launch.get("maps", ()), launch.get("secondary", False),
        )
        for name, launch in names["LAUNCHES"].items()
    }  # fmt: skip


def _is_wide(x: Array) -> bool:
    *outer, last = x.strides
    return last == x.itemsize and all(s % 16 == 0 for s in outer)


class _Rewrite(ast.NodeTransformer):
    """Kernel functions become generators; imports go, for the names are given. `events`: calls that wait, by their name."""

    def __init__(self, events: Mapping[str, str]) -> None:
        self.events = events

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        for a in node.args.args:
            a.annotation = None
        self.generic_visit(node)
        never = ast.parse("if False:\n    yield").body[0]
        node.body.insert(0, never)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match ast.unparse(node.func):
            case "cuda.syncthreads":
                event: list[ast.expr] = [
                    ast.Constant("barrier"),
                    ast.Constant(node.lineno),
                    ast.Constant(None),
                    ast.Constant(0),
                ]
            case "cuda.shfl_xor_sync":
                event = [ast.Constant("shuffle"), ast.Constant(node.lineno), node.args[1], node.args[2]]
            case "cuda.shared.array" | "cuda.local.array":
                node.keywords.append(ast.keyword("line", ast.Constant(node.lineno)))
                return node
            case name if name.startswith("ldmatrix_"):
                node.args = [*node.args[:2], self.event("rows", node, ast.Tuple(node.args[2:], ast.Load()))]
                return node
            case name if name.startswith("mma_"):
                words = ast.Tuple([ast.Constant(name[4:]), *node.args[4:]], ast.Load())
                node.args = [*node.args[:4], self.event("product", node, words)]
                return node
            case name if name in self.events:
                kind = self.events[name]
                own = [node.func] if kind in ("multiply", "settle") else []
                return self.event(kind, node, ast.Tuple([*own, *node.args], ast.Load()))
            case _:
                return node
        return ast.Yield(ast.Tuple(event, ast.Load()))

    def event(self, kind: str, node: ast.Call, value: ast.expr) -> ast.expr:
        """Where a warp meets: each lane gives a value and gets its answer."""
        parts: list[ast.expr] = [ast.Constant(kind), ast.Constant(node.lineno), value, ast.Constant(0)]
        return ast.Yield(ast.Tuple(parts, ast.Load()))


# ---------------------------------------------------------------- a block and its threads


@dataclass
class State:
    """What the running thread sees: its numbers, its block's shared arrays, and the barriers passed so far."""

    kernel: str = ""
    block: int = 0
    blocks: int = 1
    thread: int = 0
    epoch: int = 0
    backwards: bool = False
    shared: dict[int, Shared] = field(default_factory=dict)
    copies: dict[int, list[list[Callable[[], None]]]] = field(default_factory=dict)

    secondary: bool = False
    """May the launch before it still run?"""
    waited: set[int] = field(default_factory=set)
    """Threads that have waited for its end."""

    def touch(self, what: str) -> None:
        """See that the launch before has ended, for what it writes or reads is touched."""
        if self.secondary and self.thread not in self.waited:
            raise self.fault(f"{what} is touched while the launch before may still run")

    def copying(self) -> list[list[Callable[[], None]]]:
        """The running thread's groups of copies under way, the last still open."""
        return self.copies.setdefault(self.thread, [[]])

    def enter(self, kernel: str, block: int, blocks: int, secondary: bool) -> None:
        self.kernel, self.block, self.blocks, self.epoch, self.shared = kernel, block, blocks, 0, {}
        self.copies, self.secondary, self.waited = {}, secondary, set()

    def fault(self, what: str) -> KernelFault:
        return KernelFault(f"{self.kernel}, block {self.block}, thread {self.thread}: {what}")


class _Block:
    """Threads advance warp by warp: through shuffles to the next barrier, then all over it."""

    def __init__(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        self.state = kernel.state
        self.threads = [kernel.generator(*arguments) for _ in range(kernel.threads)]

    def run(self) -> None:
        warps = [range(i, min(i + WARP, len(self.threads))) for i in range(0, len(self.threads), WARP)]
        while True:
            stops = [self.to_barrier(warp) for warp in warps]
            if len(set(stops)) > 1:
                self.diverged("barrier", dict(zip((w[0] for w in warps), stops, strict=True)))
            if stops[0] is None:
                return
            self.state.epoch += 1

    def to_barrier(self, warp: range) -> int | None:
        """Run a warp to its next barrier; gives its line, None at the end."""
        answers: dict[int, Any] = dict.fromkeys(warp)
        while True:
            events = {t: self.advance(t, answers[t]) for t in warp}
            sites = {t: e[:2] if e else None for t, e in events.items()}
            if len(set(sites.values())) > 1:
                self.diverged("barrier or shuffle", {t: s[1] if s else None for t, s in sites.items()})
            first = events[warp[0]]
            if first is None:
                return None
            if first[0] == "barrier":
                return first[1]
            values = {t: e[2] for t, e in events.items() if e}
            if first[0] == "shuffle":
                answers = {t: values[t ^ int(e[3])] for t, e in events.items() if e}
            else:
                answers = dict(zip(warp, _answers(first[0], [values[t] for t in warp]), strict=True))

    def advance(self, thread: int, answer: Any) -> tuple[str, int, Any, int] | None:
        self.state.thread = thread
        try:
            return self.threads[thread].send(answer)
        except StopIteration:
            return None

    def diverged(self, what: str, lines: Mapping[int, int | None]) -> None:
        """Say where the threads are."""
        places: dict[int | None, list[int]] = {}
        for thread, line in lines.items():
            places.setdefault(line, []).append(thread)
        told = "; ".join(
            f"thread {', '.join(map(str, t[:4]))}{' …' if len(t) > 4 else ''} "
            + ("has ended" if line is None else f"waits at line {line}")
            for line, t in places.items()
        )
        raise KernelFault(
            f"{self.state.kernel}, block {self.state.block}: not all threads reach a {what}: {told}"
        )


def _answers(kind: str, lanes: list[Any]) -> list[Any]:
    """What each lane of a warp gets where all have given a value."""
    if kind == "product":
        return _product(lanes)
    return [int(any(own for (own,) in lanes)) if kind == "vote" else lanes] * len(lanes)


def _product(lanes: Sequence[tuple[str, Any, int, Any, int]]) -> list[Array]:
    """mma.sync.m16n8k16: from each lane's six registers the four sums that it gets (PTX ISA 9.0, 9.7.14.5.14)."""
    kind = lanes[0][0]
    a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for lane, (_, words, at, others, its) in enumerate(lanes):
        group, pair = lane >> 2, 2 * (lane & 3)
        for n in range(4):
            a[group + 8 * (n & 1), pair + 8 * (n >> 1) :][:2] = _halves(words[at + n], kind)
        for n in range(2):
            b[pair + 8 * n :, group][:2] = _halves(others[its + n], kind)
    sums = a @ b
    return [
        np.array([sums[(lane >> 2) + 8 * h, 2 * (lane & 3) + p] for h in (0, 1) for p in (0, 1)])
        for lane in range(len(lanes))
    ]


def _halves(word: int, kind: str) -> tuple[Any, Any]:
    """The two 16-bit floats of a register, the lower half first."""
    convert = FUNCTIONS[f"f32_from_{kind}"]
    return convert(int(word) & 0xFFFF), convert(int(word) >> 16 & 0xFFFF)


# ---------------------------------------------------------------- memory


class Shared:
    """A shared array or a slice of one. For each element the last write and the last reads since a barrier are kept."""

    def __init__(
        self, state: State, size: int, cast: Callable[[Any], Any], start: int = 0, root: Shared | None = None
    ) -> None:
        self.state, self.size, self.cast, self.start = state, size, cast, start
        self.root = root or self
        if root is None:
            self.values: dict[int, Any] = {}
            self.writes: dict[int, tuple[int, int]] = {}
            self.reads: dict[int, tuple[int, int]] = {}

    @property
    def told(self) -> str:
        return "a shared array"

    def place(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise self.state.fault(f"index {index} of a shared array of {self.size}")
        return self.start + int(index)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Shared(
                self.state, index.stop - index.start, self.cast, self.start + index.start, self.root
            )
        root, at, now = self.root, self.place(index), self.state.epoch
        epoch, writer = root.writes.get(at, (-1, -1))
        if epoch == now and writer != self.state.thread:
            raise self.race(at, "read", "written", writer)
        before, reader = root.reads.get(at, (-1, -1))
        me = self.state.thread
        root.reads[at] = (now, me if before != now or reader == me else MANY)
        return root.values[at] if at in root.values else _poison(self.cast)

    def __setitem__(self, index: int, value: Any) -> None:
        root, at, now, me = self.root, self.place(index), self.state.epoch, self.state.thread
        for table, word in ((root.writes, "written"), (root.reads, "read")):
            epoch, other = table.get(at, (-1, -1))
            if epoch == now and other != me:
                raise self.race(at, "written", word, other)
        root.writes[at] = (now, me)
        root.values[at] = self.cast(value)

    def reserve(self, index: int) -> None:
        """An element that a copy under way will write: until it is waited for it holds poison."""
        self[index] = _poison(self.cast)

    def race(self, at: int, mine: str, theirs: str, other: int) -> KernelFault:
        who = "several threads" if other == MANY else f"thread {other}"
        return self.state.fault(
            f"shared element {at} is {mine} here and {theirs} by {who} with no barrier between"
        )


class Local:
    """A thread's own array."""

    def __init__(self, state: State, size: int, cast: Callable[[Any], Any]) -> None:
        self.state, self.cast = state, cast
        self.values = [_poison(cast)] * size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.values):
            raise self.state.fault(f"index {index} of a local array of {len(self.values)}")
        return self.values[index]

    def __setitem__(self, index: int, value: Any) -> None:
        if not 0 <= index < len(self.values):
            raise self.state.fault(f"index {index} of a local array of {len(self.values)}")
        self.values[index] = self.cast(value)


class Tensor:
    """A tensor in global memory, seen by a kernel as its elements from (0, …, 0) on; remembers who wrote each."""

    def __init__(self, name: str, values: Array, state: State) -> None:
        self.name, self.values, self.state = name, values, state
        self.writers: dict[int, tuple[int, int, int]] = {}
        stored = values.view(STORED.get(values.dtype, values.dtype))
        self.elements = np.lib.stride_tricks.as_strided(stored, (values.size,), (values.itemsize,))

    @property
    def told(self) -> str:
        return f"tensor `{self.name}`"

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(s // self.values.itemsize for s in self.values.strides)

    def place(self, offset: int) -> int:
        if not 0 <= offset < len(self.elements):
            raise self.state.fault(f"offset {offset} is outside tensor `{self.name}` {self.values.shape}")
        self.state.touch(self.told)
        return int(offset)

    def __getitem__(self, offset: int) -> Any:
        value = self.elements[self.place(offset)]
        return int(value) if self.elements.dtype.kind in "iu" else value

    def __setitem__(self, offset: int, value: Any) -> None:
        at, me = self.place(offset), (self.state.block, self.state.thread, self.state.epoch)
        block, thread, epoch = self.writers.get(at, me)
        if block != me[0] or (thread != me[1] and epoch == me[2]):
            raise self.state.fault(
                f"offset {offset} of tensor `{self.name}` is written here and by block {block}, thread {thread}"
            )
        self.writers[at] = me
        self.elements[at] = value

    def add(self, offset: int, value: Any) -> None:
        """An indivisible addition; f16 and bf16 come and go as their bits."""
        at = self.place(offset)
        if self.elements.dtype is self.values.dtype:
            self.elements[at] += value
        else:
            sixteen = self.elements[at : at + 1].view(self.values.dtype)
            sixteen[0] += np.uint16(value).view(self.values.dtype)


def memory_for(dtype: DType, given: Array | None, shape: tuple[int, ...]) -> Array:
    """A copy of a given array, its axes in the order they lie in memory; poison where none is given."""
    if given is not None:
        return np.array(given, order="K")
    poison = math.nan if dtype.is_float else POISON if dtype is not DType.BOOL else True
    return np.full(shape, 0).astype(NUMPY[dtype]) if poison is True else np.full(shape, poison, NUMPY[dtype])


STORED: dict[Any, Any] = {NUMPY[t]: np.dtype(np.uint16) for t in (DType.F16, DType.BF16)}
STORED[NUMPY[DType.BOOL]] = np.dtype(np.uint8)
POISON = 77
MANY = -2


class _Cuda:
    """What generated source calls `cuda`; barriers and shuffles have become yields before."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.shared, self.local = _Arrays(self.shared_array), _Arrays(self.local_array)

    def shared_array(self, size: int, cast: Callable[[Any], Any], line: int, alignment: int = 1) -> Shared:
        """One array for a block, whichever thread asks first; size 0 is the dynamic one, as large as it is used."""
        return self.state.shared.setdefault(line, Shared(self.state, size or 1 << 30, cast))

    def local_array(self, size: int, cast: Callable[[Any], Any], line: int) -> Local:
        return Local(self.state, size, cast)

    def pointers(self) -> dict[str, Callable[..., Any]]:
        """`registers_t` and `view_t`, pointers on the device, are arrays with bounds here."""
        made: dict[str, Callable[..., Any]] = {}
        for name in ("f64", "f32", "i64", "i32"):
            made[f"registers_{name}"] = partial(Local, self.state, cast=FUNCTIONS[name])
        made |= {"thread_here": lambda: self.state.thread}
        made |= {"commit_copies": lambda: self.state.copying().append([])}
        made |= {
            "release_secondary": lambda: None,
            "await_primary": lambda: self.state.waited.add(self.state.thread),
        }
        made |= {f"wait_copies{n}": partial(self.wait, n) for n in range(4)}
        for name in ("f64", "f32", "i64", "i32", "u16"):
            made[f"view_{name}"] = lambda array, start, stop: array[start:stop]
        return made

    def wait(self, most: int) -> None:
        """Let at most that many committed groups of copies stay under way."""
        groups = self.state.copying()
        while len(groups) - 1 > most:
            for land in groups.pop(0):
                land()

    @property
    def threadIdx(self) -> _Number:
        return _Number(self.state.thread)

    @property
    def blockIdx(self) -> _Number:
        return _Number(self.state.block)

    @property
    def gridDim(self) -> _Number:
        return _Number(self.state.blocks)


@dataclass(frozen=True)
class _Number:
    x: int


@dataclass(frozen=True)
class _Arrays:
    array: Callable[..., Any]


def _poison(cast: Callable[[Any], Any]) -> Any:
    """What unwritten memory holds."""
    return cast(math.nan) if cast in (np.float32, np.float64) else cast(POISON)


# ---------------------------------------------------------------- the functions of generated source


def wrap(bits: int) -> Callable[[Any], int]:
    """Two's complement of that width."""
    half = 1 << bits - 1
    return lambda x: (int(x) + half & (1 << bits) - 1) - half


def _whole(bits: int) -> Callable[[Any], int]:
    """Float to integer: toward zero, saturating, NaN to 0."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def convert(x: Any) -> int:
        return 0 if math.isnan(x) else low if x <= low else high if x >= high else int(x)

    return convert


def _sixteen(dtype: DType) -> dict[str, Callable[[Any], Any]]:
    """Conversions between f32 and the bits of a 16-bit float."""
    kind = NUMPY[dtype].type

    def to_bits(x: Any) -> int:
        return int(np.asarray(x, kind).view(np.uint16))

    def from_bits(bits: Any) -> Any:
        return np.float32(np.asarray(bits, np.uint16).view(kind))

    return {
        f"{dtype}_from_f32": to_bits,
        f"f32_from_{dtype}": from_bits,
        f"round_{dtype}": lambda x: np.float32(np.asarray(x, kind)),
        f"lower_{dtype}": lambda word: from_bits(int(word) & 0xFFFF),
        f"upper_{dtype}": lambda word: from_bits(int(word) >> 16 & 0xFFFF),
    }


def _place_wins(is_better: Callable[[Any, Any], bool]) -> Callable[[Any, int, Any, int], bool]:
    """argmax and argmin: the first NaN, else the best value at its first place; place -1 is nothing."""

    def beats(value: Any, at: int, best: Any, best_at: int) -> bool:
        if at < 0 or best_at < 0:
            return at >= 0
        if value != value or best != best:
            return bool(value != value and (best == best or at < best_at))
        return bool(is_better(value, best) or (value == best and at < best_at))

    return beats


def _floating(kind: Any) -> dict[str, Callable[..., Any]]:
    """Operations of one float type, each rounded to it."""
    one = kind(1)
    return {
        "fma": lambda a, b, c: kind(np.longdouble(a) * np.longdouble(b) + np.longdouble(c)),
        "max": np.maximum, "min": np.minimum, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2,
        "sqrt": np.sqrt, "rsqrt": lambda x: one / np.sqrt(x), "tanh": np.tanh, "erf": lambda x: kind(math.erf(x)),
        "sin": np.sin, "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "abs": np.abs,
        "pow": np.power, "floordiv": lambda a, b: np.floor(a / b), "mod": np.mod,
        "beats_max": _place_wins(lambda a, b: a > b), "beats_min": _place_wins(lambda a, b: a < b),
    }  # fmt: skip


def _loading(dtype: DType, width: int) -> Callable[[Tensor | Shared, int, Local, int], None]:
    """`width` bytes of a tensor, or of a shared array, into a thread's registers."""

    def load(tensor: Tensor | Shared, offset: int, registers: Local, at: int) -> None:
        start = tensor.start if isinstance(tensor, Shared) else 0
        if (start + offset) * dtype.bytes % width:
            raise tensor.state.fault(
                f"offset {start + offset} of {tensor.told} is not aligned to {width} bytes"
            )
        for i in range(width // dtype.bytes):
            value = tensor[offset + i]
            registers[at + i] = FUNCTIONS[f"f32_from_{dtype}"](value) if dtype in SIXTEEN else value

    return load


def _load_words(tensor: Tensor, offset: int, registers: Local, at: int) -> None:
    """Eight 16-bit elements as four words, the first in the lower half."""
    if offset % 8:
        raise tensor.state.fault(f"offset {offset} of tensor `{tensor.name}` is not aligned to 16 bytes")
    for i in range(4):
        low, high = (tensor[offset + 2 * i + n] for n in (0, 1))
        registers[at + i] = np.uint32(high << 16 | low).view(np.int32)


def _add_products(
    sums: Local, rows: int, columns: int,
    a: Shared, a_at: int, a_run: int, a_step: int, b: Shared, b_at: int, b_run: int, b_step: int, steps: int,
) -> None:  # fmt: skip
    """A thread's block of a matrix product, from shared memory in runs of 16 bytes."""
    run, read = 4, FUNCTIONS["load16_f32"]
    left, right = (Local(sums.state, n, np.float32) for n in (rows, columns))
    parts = [(a, a_at, a_run, a_step, left, rows), (b, b_at, b_run, b_step, right, columns)]
    for k in range(steps):
        for side, at, distance, step, part, count in parts:
            for i in range(0, count, run):
                read(side, at + i // run * distance + k * step, part, i)
        for i in range(rows):
            for j in range(columns):
                place = i * columns + j
                sums[place] = FUNCTIONS["fma_f32"](left[i], right[j], sums[place])


def _storing(dtype: DType, width: int) -> Callable[[Tensor, int, Local, int], None]:
    """The same the other way."""

    def store(tensor: Tensor, offset: int, registers: Local, at: int) -> None:
        if offset * dtype.bytes % width:
            raise tensor.state.fault(
                f"offset {offset} of tensor `{tensor.name}` is not aligned to {width} bytes"
            )
        for i in range(width // dtype.bytes):
            value = registers[at + i]
            tensor[offset + i] = FUNCTIONS[f"{dtype}_from_f32"](value) if dtype in SIXTEEN else value

    return store


def _copying(dtype: DType, width: int) -> Callable[[Shared, int, Tensor, int, Any], None]:
    """A copy of `width` bytes, which lands when it is waited for."""
    count = width // dtype.bytes

    def copy(shared: Shared, at: int, tensor: Tensor, offset: int, exists: Any) -> None:
        if exists and offset % count:
            raise tensor.state.fault(
                f"offset {offset} of tensor `{tensor.name}` is not aligned to {width} bytes"
            )
        if (shared.start + at) % count:
            raise tensor.state.fault(f"shared element {shared.start + at} is not aligned to {width} bytes")
        values = [tensor[offset + i] if exists else 0 for i in range(count)]
        for i in range(count):
            shared.reserve(at + i)

        def land() -> None:
            for i in range(count):
                shared[at + i] = values[i]

        tensor.state.copying()[-1].append(land)

    return copy


def _matrices(turned: bool) -> Callable[[Local, int, list[tuple[Shared, int]]], None]:
    """ldmatrix.x4: lane n gives row n % 8 of matrix n / 8, and gets elements 2 (n % 4) and the next of row n / 4 of each."""

    def fetch(part: Local, at: int, rows: list[tuple[Shared, int]]) -> None:
        lane = part.state.thread % WARP
        for matrix in range(4):
            word = 0
            for half in (0, 1):
                row, column = lane >> 2, 2 * (lane & 3) + half
                if turned:
                    row, column = column, row
                shared, start = rows[8 * matrix + row]
                word |= (int(shared[start + column]) & 0xFFFF) << 16 * half
            part[at + matrix] = word

    return fetch


def _add_product(sums: Local, at: int, row: int, column: int, found: Array) -> None:
    for n, spot in enumerate((at, at + column, at + row, at + row + column)):
        sums[spot] = np.float32(sums[spot] + found[n])


def _pack(dtype: DType) -> Callable[[Any, Any], int]:
    return lambda low, high: FUNCTIONS[f"{dtype}_from_f32"](low) | FUNCTIONS[f"{dtype}_from_f32"](high) << 16


def _reciprocal(x: Any) -> Any:
    return np.float32(1) / np.float32(x)


def flat_tanh(y: Any, exp2: Any = np.exp2, reciprocal: Any = _reciprocal) -> Any:
    """What `flat_tanh_f32` computes, on numbers or arrays; `exp2`, `reciprocal`: the instructions that are approximate."""
    one = np.float32(1)
    return one - np.float32(2) * reciprocal(one + exp2(y))


def falling_tanh(y: Any, exp2: Any = np.exp2, reciprocal: Any = _reciprocal) -> Any:
    """What `falling_tanh_f32` computes, likewise."""
    return -reciprocal(np.float32(1) + exp2(y))


def exp_tanh(y: Any, c: Any, exp2: Any = np.exp2, reciprocal: Any = _reciprocal) -> Any:
    """What `exp_tanh_f32` computes."""
    return exp2(
        np.float32(
            np.longdouble(-2 * c) * np.longdouble(reciprocal(np.float32(1) + exp2(y))) + np.longdouble(c)
        )
    )


def tanh_plus_one(y: Any, exp2: Any = np.exp2, reciprocal: Any = _reciprocal) -> Any:
    """What `tanh_plus_one_f32` computes."""
    return np.float32(2) * reciprocal(np.float32(1) + exp2(y))


def logistic(y: Any, exp2: Any = np.exp2, reciprocal: Any = _reciprocal) -> Any:
    """What `logistic_f32` computes."""
    return reciprocal(np.float32(1) + exp2(y))


def near_tanh(x: Any, reciprocal: Any = _reciprocal) -> Any:
    """What `near_tanh_f32` computes."""
    x = np.clip(x, np.float32(-TANH_LIMIT), np.float32(TANH_LIMIT))
    p, q = (_polynomial(c, x * x) for c in (TANH_P, TANH_Q))
    return x * p * reciprocal(q)


def _polynomial(coefficients: Sequence[float], z: Any) -> Any:
    """Σ c_i z^i by fused multiply-adds."""
    total = np.float32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = np.float32(np.longdouble(z) * np.longdouble(total) + np.longdouble(np.float32(c)))
    return total


SIXTEEN = (DType.F16, DType.BF16)
MOVED = [t for t in DType if t is not DType.BOOL]
WIDTHS = (4, 8, 16)
FUNCTIONS: dict[str, Any] = {
    **{f"load{w}_{t}": _loading(t, w) for t in MOVED for w in WIDTHS},
    **{f"store{w}_{t}": _storing(t, w) for t in MOVED for w in WIDTHS},
    **{f"copy16_{t}": _copying(t, 16) for t in (*SIXTEEN, DType.F32)},
    "copy4_f32": _copying(DType.F32, 4),
    **{n: lambda a, b: int(a) // int(b) if b else 0 for n in ("quotient", "quotient_here")},
    "add_products_f32": _add_products,
    "load16_words_u16": _load_words,
    **{f"ldmatrix_{t}": _matrices(False) for t in SIXTEEN},
    **{f"ldmatrix_turned_{t}": _matrices(True) for t in SIXTEEN},
    **{f"mma_{t}": _add_product for t in SIXTEEN},
    **{f"pack_{t}": _pack(t) for t in SIXTEEN},
    **{f"{name}_f32": f for name, f in _floating(np.float32).items()},
    **{f"{name}_f64": f for name, f in _floating(np.float64).items()},
    **_sixteen(DType.F16),
    **_sixteen(DType.BF16),
    **{f"i{bits}_from_f{n}": _whole(bits) for bits in (32, 64) for n in (32, 64)},
    **{f"add_{t}": Tensor.add for t in ("f32", "f64", "i32", "i64", "f16", "bf16")},
    "reciprocal_f32": lambda x: np.float32(1) / np.float32(x), "near_exp_f32": np.exp, "near_exp2_f32": np.exp2,
    "flat_tanh_f32": flat_tanh, "falling_tanh_f32": falling_tanh, "exp_tanh_f32": exp_tanh,
    "tanh_plus_one_f32": tanh_plus_one, "logistic_f32": logistic, "near_tanh_f32": near_tanh,
    **{f"select_{t}": lambda condition, a, b: a if condition else b for t in ("f32", "i32")},
    "max_i32": max, "clamp_i32": lambda x, low, high: min(max(x, low), high),
    "first_bits_i32": lambda n: wrap(32)((1 << min(n, 32)) - 1),
    "where_bit_f32": lambda word, bit, a, b: a if word & bit else b,
    "has_bit_i32": lambda word, bit: word & bit != 0,
    "small_floordiv_i64": lambda a, b: a // b if b else 0,
    "floordiv_i64": lambda a, b: a // b if b else 0,
    "mod_i64": lambda a, b: a % b if b else 0,
    "beats_max_i64": _place_wins(lambda a, b: a > b),
    "beats_min_i64": _place_wins(lambda a, b: a < b),
    "wrap_i16": wrap(16), "wrap_i8": wrap(8), "wrap_u8": lambda x: x & 255,
    "f32": np.float32, "f64": np.float64, "i64": wrap(64), "i32": wrap(32), "i16": wrap(16), "i8": wrap(8),
    "u8": lambda x: int(x) & 255, "u16": lambda x: int(x) & 65535, "boolean": bool,
    "inf": math.inf, "nan": math.nan, "ALL_LANES": 0xFFFFFFFF,
}  # fmt: skip
