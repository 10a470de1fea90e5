"""Tile IR to Numba source for the CPU: one file a module, one function a program, loops that LLVM vectorises.

A program becomes `NAME_tasks(first, last, …)`, compiled, which runs a range of the tasks of its grid, and
`NAME(tensors, scalars, extents)`, which hands all of them out to threads. Tile values that need storage are small arrays
allocated once a range; everything else is computed inside the loop nest of its consumer. Matrix products go through
`multiply_add` on operands packed so that the innermost loop runs over contiguous memory. No lane beyond an extent is ever
visited, so nothing is masked.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...dsl.types import DType, compute, promote
from ..target import Target
from ..tile_ir import (
    Apply,
    AxisIndex,
    Carry,
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
    operands,
    statements,
    subexpressions,
)
from .placement import (
    Steps,
    Types,
    data_dependent,
    depends_on_data,
    distinct,
    inlined,
    merge,
    rebuild,
    run,
    transform,
)

INTRINSICS = "tileloom.runtime.intrinsics.cpu"
THREADS = "tileloom.runtime.threads"
LINE = 96
"""A longer expression is broken by naming a part of it."""

# ---------------------------------------------------------------- tables

HELD = {DType.F64: "f64", DType.F32: "f32", DType.I64: "i64", DType.I32: "i32", DType.BOOL: "bool_"}
"""How a computed value is held; narrower types are held in the type they compute in."""
INFIX = {
    "mul": ("*", 16), "div": ("/", 16), "add": ("+", 14), "sub": ("-", 14), "and": ("&", 10), "or": ("|", 8),
    "lt": ("<", 6), "le": ("<=", 6), "eq": ("==", 6), "ne": ("!=", 6),
}  # fmt: skip
ATOM, UNARY, NOT = 20, 18, 4
CALLS = {
    "min": "minimum", "max": "maximum", "floordiv": "floordiv", "mod": "mod", "fma": "fma", "abs": "abs",
    "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "rint", "erf": "erf", "sin": "sin", "cos": "cos",
    "rsqrt": "rsqrt", "pow": "power",
}  # fmt: skip
BY_TYPE = frozenset({"exp", "exp2", "log", "log2", "tanh"})
LOWEST = {DType.F64: -math.inf, DType.F32: -math.inf, DType.I64: -(2**63), DType.I32: -(2**31)}
HIGHEST = {DType.F64: math.inf, DType.F32: math.inf, DType.I64: 2**63 - 1, DType.I32: 2**31 - 1}
ROWS = {"sum": "sum_of", "max": "max_of", "min": "min_of"}
EXPORTS = frozenset(
    {
        "at",
        "clamp",
        "select",
        "fabs",
        "multiply_add",
        "multiply_row",
        "inf",
        "nan",
        "floordiv_float",
        "mod_float",
    }
    | {*HELD.values(), *CALLS.values(), *ROWS.values()} - {"abs"}
    | {f"{op}_{t}" for op in BY_TYPE for t in ("f32", "f64")}
    | {f"{verb}_{t}" for verb in ("widen", "narrow", "round") for t in ("f16", "bf16")}
    | {f"to_{t}" for t in ("i64", "i32", "i16", "i8", "u8")}
)
"""Names a generated file may import from the intrinsics."""
OURS = frozenset({"njit", "run_tasks", "empty", "first", "last", "task"})
RESERVED = OURS | EXPORTS | {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)}


def held(dtype: DType) -> DType:
    return compute(dtype)


# ---------------------------------------------------------------- names


class Names:
    """Python names for the program's: validated, never a keyword, a builtin, an import or each other."""

    def __init__(self) -> None:
        self._taken: set[str] = set(RESERVED)

    def new(self, wanted: str) -> str:
        """A fresh identifier that reads like `wanted`. Raises `ValueError` for anything but an identifier."""
        if not wanted.isidentifier():
            raise ValueError(f"{wanted!r} is no name: letters, digits and _ are accepted, not first a digit")
        plain = re.sub(r"[^A-Za-z0-9_]", lambda m: f"u{ord(m[0]):x}", wanted)
        plain = plain.lstrip("_") or "blank"
        name, n = plain, 1
        while name in self._taken:
            n += 1
            name = f"{plain}_{n}"
        self._taken.add(name)
        return name


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Code:
    """A Python expression: its text, how tightly its outermost operator binds, and the dtype of its value."""

    text: str
    dtype: DType
    level: int = ATOM

    def within(self, level: int) -> str:
        """The text as an operand of an operator of this level."""
        return self.text if self.level >= level else f"({self.text})"


@dataclass(frozen=True)
class Buffer:
    """Storage of a tile value for the task in hand. A size is a number, or an extent where an axis is taken whole."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    sizes: tuple[int | Expr, ...]


@dataclass(frozen=True)
class Variable:
    """A scalar value."""

    name: str
    dtype: DType


@dataclass(frozen=True)
class Inline:
    """A value that its one consumer computes."""

    value: Expr


Place = Buffer | Variable | Inline


@dataclass(frozen=True)
class Axis:
    """A loop axis in scope. `lane` counts from 0 to `count` within the tile, which starts at index `start` of the extent;
    `origin` is the tile's own first index. A unit axis has no lane: its index is `start`."""

    name: str
    extent: Expr
    size: int | Expr
    start: str
    origin: str
    lane: str
    count: str

    @property
    def index(self) -> str:
        return self.lane if self.start == "0" else f"{self.start} + {self.lane}" if self.lane else self.start


@dataclass(frozen=True)
class Function:
    """Text of one task function and what it allocates."""

    lines: tuple[str, ...]
    buffers: tuple[Buffer, ...]


# ---------------------------------------------------------------- the generator


def generate(module: TileModule, target: Target | None = None) -> str:
    """Numba source of a module: for each program a function of its name that takes tensors (f16 and bf16 as uint16),
    scalars, then the extents that are not static, in the program's order. Deterministic; the same for every CPU."""
    names = Names()
    constants = _constants(module, names)
    written = [_Program(p, names, constants) for p in module.programs]
    body = [line for w in written for line in w.text()]
    used = set(re.findall(r"[A-Za-z_]\w*", "\n".join(line.split("#")[0] for line in body)))
    head = [f'"""Module `{module.name}` for the CPU, written by tileloom."""', ""]
    head.append("from numba import njit")
    if "empty" in used:
        head.append("from numpy import empty")
    head += _imports(sorted(used & EXPORTS))
    if "run_tasks" in used:
        head.append(f"from {THREADS} import run_tasks")
    head += ["", *(f"{name} = {value}" for (_, value), name in constants.items() if name in used)]
    return "\n".join([*head, *(body if head[-1] else body[1:]), ""])


def workspace(module: TileModule) -> dict[str, tuple[tuple[Buffer, ...], ...]]:
    """By program name, the buffers of a task of each of its grids, which run one after another."""
    names = Names()
    constants = _constants(module, names)
    return {p.name: _Program(p, names, constants).buffers() for p in module.programs}


def function_names(module: TileModule) -> dict[str, str]:
    """The name of each program's function in the generated source, by program name."""
    names = Names()
    constants = _constants(module, names)
    return {p.name: _Program(p, names, constants).name for p in module.programs}


def _constants(module: TileModule, names: Names) -> dict[tuple[str, int], str]:
    pairs = dict.fromkeys(pair for p in module.programs for pair in p.statics)
    return {pair: names.new(pair[0]) for pair in pairs}


def _imports(names: list[str]) -> list[str]:
    line = f"from {INTRINSICS} import {', '.join(names)}"
    if not names:
        return []
    if len(line) <= 110:
        return [line]
    lines, row = [f"from {INTRINSICS} import ("], "   "
    for n in names:
        if len(row) + len(n) > 104:
            lines, row = [*lines, row], "   "
        row += f" {n},"
    return [*lines, row, ")"]


class _Program:
    """One program: its parameters, and a task function for each grid at its top."""

    def __init__(self, program: TileProgram, names: Names, constants: Mapping[tuple[str, int], str]) -> None:
        self.program = distinct(program)
        self.name = names.new(program.name)
        self.names = names
        statics = dict(program.statics)
        self.tensors = {p.name: names.new(p.name) for p in program.params}
        self.scalars = {s.name: names.new(s.name) for s in program.scalars}
        self.extents = {
            e: constants[e, statics[e]] if e in statics else names.new(e) for e in program.extents
        }
        free = [name for e, name in self.extents.items() if e not in statics]
        self.arguments = ", ".join([*self.tensors.values(), *self.scalars.values(), *free])
        self.tasks = [_Task(self, g, before) for g, before in _grids(self.program.body)]

    def buffers(self) -> tuple[tuple[Buffer, ...], ...]:
        return tuple(t.function().buffers for t in self.tasks)

    def text(self) -> list[str]:
        lines: list[str] = []
        for t in self.tasks:
            lines += ["", "", *t.function().lines]
        lines += ["", "", f"def {self.name}({self.arguments}):"]
        return lines + [line for t in self.tasks for line in t.launch()]


def _grids(body: tuple[Stmt, ...]) -> list[tuple[Grid, tuple[Stmt, ...]]]:
    """The grids at the top of a program, each with the values defined before it; any other program is one task."""
    if any(not isinstance(s, Grid | Let) for s in body) or not any(isinstance(s, Grid) for s in body):
        return [(Grid((), body), ())]
    return [
        (s, tuple(x for x in body[:i] if isinstance(x, Let)))
        for i, s in enumerate(body)
        if isinstance(s, Grid)
    ]


def _parallel(grid: Grid, tainted: frozenset[str]) -> tuple[tuple[LoopAxis, ...], tuple[LoopAxis, ...]]:
    """The axes that tasks divide, and those that stay serial inside a task, so that no two tasks write one element:
    where a store accumulates, or goes where a tensor's value says, an axis is parallel only if it is a subscript."""
    shared = [
        {ix.axis for ix in s.subscripts if isinstance(ix, AxisIndex)}
        for s in statements(grid.body)
        if isinstance(s, Store)
        and (s.mode == "add" or any(depends_on_data(ix, tainted) for ix in s.subscripts))
    ]
    free = tuple(a for a in grid.axes if _is_plain(a) and all(a.name in axes for axes in shared))
    return free, tuple(a for a in grid.axes if a not in free)


def _is_plain(a: LoopAxis) -> bool:
    """Do the bounds of an axis depend on extents and scalars only?"""
    bounds = [x for b in (a.extent, a.lo, a.hi) if b is not None for x in subexpressions(b)]
    return all(isinstance(x, Const | ExtentRef | ScalarRef | Apply | Cast) for x in bounds)


class _Task:
    """Writes the function that runs one task of a grid."""

    def __init__(self, owner: _Program, grid: Grid, before: tuple[Stmt, ...]) -> None:
        self.owner, self.program, self.names = owner, owner.program, owner.names
        self.name = self.names.new(f"{owner.program.name}_tasks")
        self.types = Types(self.program)
        self.inlined = inlined(self.program, self.types)
        self.tainted = data_dependent(self.program)
        self.params = {p.name: p for p in self.program.params}
        self.axes: dict[str, Axis] = {}
        self.places: dict[str, Place] = {}
        self.buffers: list[Buffer] = []
        self.lines: list[str] = []
        self.depth = 1
        self.guarded: dict[int, tuple[Expr, bool]] = {}
        self.grid = grid
        self.before = before
        self.parallel, self.serial = _parallel(grid, self.tainted)
        self.in_python = False
        self._last_nest: tuple[tuple[str, ...], int, int] | None = None
        self._written: Function | None = None
        for w in self.program.whole:
            lane = self.names.new(w.name)
            size = self.scalar(w.extent)
            self.axes[w.name] = Axis(w.name, w.extent, w.extent, "0", "0", lane, size.text)

    # -- lines

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text)
        self.depth += 1

    # -- the function and its launch

    def function(self) -> Function:
        """The task function; written once."""
        if self._written is None:
            self._write()
        assert self._written is not None
        return self._written

    def _write(self) -> None:
        if self.parallel:
            self._divide()
        self._body((*self.before, Grid(self.serial, self.grid.body)))
        bounds = ("first", "last") if self.parallel else ()
        head = ['@njit(nogil=True, error_model="numpy")']
        head.append(f"def {self.name}({', '.join(filter(None, (*bounds, self.owner.arguments)))}):")
        self._written = Function(
            (*head, *map(self._allocation, self.buffers), *self.lines), tuple(self.buffers)
        )

    def _allocation(self, b: Buffer) -> str:
        sizes = [str(s) if isinstance(s, int) else self.scalar(s).text for s in b.sizes]
        shape = f"({', '.join(sizes)})" if len(sizes) > 1 else sizes[0]
        return f"    {b.name} = empty({shape}, {HELD[b.dtype]})  # {b.dtype}[{', '.join(b.axes)}]"

    def _divide(self) -> None:
        """Open the loop over tasks and find the position on each axis, the last one fastest."""
        bound = [self._bind(a) for a in self.parallel]
        self.open("for task in range(first, last):")
        rest = "task"
        for i, (a, axis) in reversed(list(enumerate(zip(self.parallel, bound, strict=True)))):
            steps = self._tiles(a).within(17)
            self._start(a, axis, f"{rest} % {steps}" if i else rest)
            rest = f"{rest} // {steps}"

    def _start(self, a: LoopAxis, axis: Axis, number: str) -> None:
        first = self._first(a)
        plus = "" if first.text == "0" else f"{first.within(14)} + "
        if a.tile is None:
            self.line(f"{axis.start} = {plus}{number}")
        else:
            self.line(f"{axis.origin} = {plus}{number} * {a.tile}")
            self._lanes(a, axis)

    def launch(self) -> list[str]:
        """Lines of the program's function that run the tasks of this grid."""
        arguments = self.owner.arguments
        self.in_python = True
        if not self.parallel:
            return [f"    # {self._describe(self.serial)} in order", f"    {self.name}({arguments})"]
        count = " * ".join(self._tiles(a).within(17) for a in self.parallel)
        later = f"; inside each, {self._describe(self.serial)} in order" if self.serial else ""
        return [
            f"    # {self._describe(self.parallel)} in parallel{later}",
            f"    run_tasks({', '.join(filter(None, (self.name, count, arguments)))})",
        ]

    def _describe(self, axes: Iterable[LoopAxis]) -> str:
        parts = (a.name if a.tile is None else f"{a.name} by {a.tile}" for a in axes)
        return "grid " + (", ".join(parts) or "of one point")

    # -- axes and bounds

    def scalar(self, e: Expr) -> Code:
        """A bound: outside reductions, a tiled axis stands for its tile's first index."""
        return self.value(self._prepare(self._expand(e), "bound", ()), bound=True)

    def _first(self, a: LoopAxis) -> Code:
        """The first visited index of a unit axis, the origin of the first tile of another."""
        if a.lo is None:
            return Code("0", DType.I64)
        lo = f"max({self.scalar(a.lo).text}, 0)"
        return Code(lo, DType.I64) if a.tile is None else Code(f"{lo} // {a.tile} * {a.tile}", DType.I64, 16)

    def _end(self, a: LoopAxis) -> Code:
        extent = self.scalar(a.extent)
        if isinstance(a.hi, Apply) and a.hi.op == "min" and a.extent in a.hi.args:
            return self.scalar(a.hi)
        return extent if a.hi is None else Code(f"min({self.scalar(a.hi).text}, {extent.text})", DType.I64)

    def _tiles(self, a: LoopAxis) -> Code:
        """How many steps an axis takes."""
        first, end = self._first(a), self._end(a)
        if a.tile is None:
            span = end if first.text == "0" else Code(f"max({end.text} - {first.within(15)}, 0)", DType.I64)
            return span
        span_text = end.within(14) if first.text == "0" else f"{end.text} - {first.within(15)}"
        text = f"({span_text} + {a.tile - 1}) // {a.tile}"
        return Code(text, DType.I64, 16) if first.text == "0" else Code(f"max({text}, 0)", DType.I64)

    def _bind(self, a: LoopAxis) -> Axis:
        """Bring a loop axis into scope under fresh names."""
        base = self.names.new(a.name)
        if a.tile is None:
            bound = Axis(a.name, a.extent, 1, base, base, "", "1")
        else:
            origin = self.names.new(f"{a.name}_0")
            start = origin if a.lo is None else self.names.new(f"{a.name}_start")
            lane, count = self.names.new(f"{a.name}_i"), self.names.new(f"{a.name}_n")
            bound = Axis(a.name, a.extent, a.tile, start, origin, lane, count)
        self.axes[a.name] = bound
        return bound

    def _lanes(self, a: LoopAxis, axis: Axis) -> None:
        """Lines that set the lanes of a tile from its origin."""
        if a.lo is not None:
            self.line(f"{axis.start} = max({axis.origin}, {self.scalar(a.lo).text}, 0)")
        self.line(f"{axis.count} = min({axis.origin} + {a.tile}, {self._end(a).text}) - {axis.start}")

    def _loop(self, a: LoopAxis, reverse: bool = False) -> None:
        """Open a serial loop over the steps of an axis."""
        axis = self._bind(a)
        first, end = self._first(a).text, self._end(a).text
        if reverse:
            last = f"{first} + ({self._tiles(a).text} - 1) * {a.tile or 1}"
            self.open(f"for {axis.origin} in range({last}, {first} - 1, -{a.tile or 1}):")
        elif a.tile is None:
            self.open(f"for {axis.start} in range({end if first == '0' else f'{first}, {end}'}):")
        else:
            self.open(f"for {axis.origin} in range({first}, {end}, {a.tile}):")
        if a.tile is not None:
            self._lanes(a, axis)

    def _nest(self, axes: Iterable[str]) -> int:
        """Open loops over the lanes of tile axes; returns how many."""
        count = 0
        for name in axes:
            axis = self.axes[name]
            self.open(f"for {axis.lane} in range({axis.count}):")
            count += 1
        return count

    # -- statements

    def _body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case Let():
                    self._let(s)
                case Store():
                    self._store(s)
                case Grid():
                    depth = self.depth
                    for a in s.axes:
                        self._loop(a)
                    self._body(s.body)
                    self.depth = depth
                case For():
                    self._for(s)

    def _declare(self, name: str, type_: TileType) -> Buffer | Variable:
        dtype = held(type_.dtype)
        place = self._buffer(name, dtype, type_.axes) if type_.axes else self._variable(name, type_.dtype)
        self.places[name] = place
        return place

    def _variable(self, name: str, dtype: DType) -> Variable:
        return Variable(self.names.new(name), dtype)

    def _buffer(self, name: str, dtype: DType, axes: tuple[str, ...]) -> Buffer:
        made = Buffer(self.names.new(name), dtype, axes, tuple(self.axes[a].size for a in axes))
        self.buffers.append(made)
        return made

    def _let(self, s: Let) -> None:
        value = s.value if self.types.of(s.value).dtype is s.type.dtype else Cast(s.type.dtype, s.value)
        if s.name in self.inlined:
            self.places[s.name] = Inline(self._expand(value))
            return
        value = self._expand(value)
        if not s.type.axes:
            code = self.value(self._prepare(value, s.name, ()))
            self.line(f"{self._declare(s.name, s.type).name} = {code.text}")
            return
        place = self._declare(s.name, s.type)
        assert isinstance(place, Buffer)
        self._fill(place, value, s.name)

    def _store(self, s: Store) -> None:
        axes = merge(*(self.types.of(ix).axes for ix in s.subscripts))
        value = self._prepare(self._expand(s.value), s.tensor, axes)
        subscripts = tuple(self._prepare(self._expand(ix), s.tensor, ()) for ix in s.subscripts)
        depth, param = self.depth, self.params[s.tensor]
        self._nest(axes)
        texts = []
        for i, ix in enumerate(subscripts):
            text = self._subscript(ix)
            if not self._fits(ix, param.shape[i]):
                plain = self._named(self.value(ix)).text
                self.open(f"if 0 <= {plain} < {self.tensor(s.tensor)}.shape[{i}]:")
                text = f"at({plain})"
            texts.append(text)
        self._store_element(
            f"{self.tensor(s.tensor)}[{', '.join(texts) or '()'}]", param.dtype, value, s.mode
        )
        self.depth = depth

    def _store_element(self, target: str, dtype: DType, value: Expr, mode: str) -> None:
        code = self._convert(self.value(value), dtype if dtype is DType.F64 else held(dtype), narrow=True)
        if dtype in (DType.F16, DType.BF16):
            old = f"widen_{dtype}({target}) + " if mode == "add" else ""
            self.line(f"{target} = narrow_{dtype}({old}{code.within(15) if old else code.text})")
        else:
            self.line(f"{target} {'+=' if mode == 'add' else '='} {code.text}")

    def tensor(self, name: str) -> str:
        return self.owner.tensors[name]

    # -- loops with carried values

    def _for(self, s: For) -> None:
        places = []
        for c in s.carries:
            init = self._expand(c.init)
            if c.type.axes:
                place = self._declare(c.name, c.type)
                assert isinstance(place, Buffer)
                self._fill(place, init, c.name)
            else:
                code = self._convert(self.value(self._prepare(init, c.name, ())), c.type.dtype)
                place = self._declare(c.name, c.type)
                self.line(f"{place.name} = {code.text}")
            places.append(place)
        depth = self.depth
        self._loop(s.axis, s.reverse)
        self._body(s.body)
        self._update(s.carries, s.yields)
        self.depth = depth

    def _update(self, carries: tuple[Carry, ...], yields: tuple[Expr, ...]) -> None:
        """Replace all carried values at once: products and reductions are taken first, then each carry is overwritten
        when no other update still reads it; in a cycle one waits in a copy."""
        pending: dict[str, _Update] = {}
        for c, y in zip(carries, yields, strict=True):
            value = self._expand(y)
            if not (isinstance(value, Name) and value.name == c.name):
                pending[c.name] = self._plan(c, value, {x.name for x in carries})
        late: list[tuple[_Update, str]] = []
        while pending:
            free = [
                n for n, u in pending.items() if not any(n in v.reads for m, v in pending.items() if m != n)
            ]
            update = pending.pop(free[0] if free else next(iter(pending)))
            if free:
                self._apply(update, update.place)
            else:
                late.append((update, self._postpone(update)))
        for update, temporary in late:
            self._copy_back(update.place, temporary)

    def _plan(self, c: Carry, value: Expr, carries: set[str]) -> _Update:
        place = self.places[c.name]
        assert not isinstance(place, Inline)
        base, products = (value, []) if isinstance(place, Variable) else self._split(place, value)
        base = self._prepare(base, c.name, c.type.axes)
        ready = [self._operands(place, p, carries) for p in products if isinstance(place, Buffer)]
        reads = {x.name for x in subexpressions(base) if isinstance(x, Name)}
        return _Update(c.name, place, base, tuple(ready), frozenset(reads))

    def _apply(self, u: _Update, place: Buffer | Variable) -> None:
        if isinstance(place, Variable):
            self.line(f"{place.name} = {self._convert(self.value(u.base), place.dtype).text}")
            return
        self._elementwise(place, u.base)
        for p in u.products:
            self._multiply(replace(p, c=place))

    def _postpone(self, u: _Update) -> str:
        if isinstance(u.place, Variable):
            place: Buffer | Variable = self._variable(f"{u.name}_next", u.place.dtype)
        else:
            place = self._buffer(f"{u.name}_next", u.place.dtype, u.place.axes)
        self._apply(u, place)
        return place.name

    def _copy_back(self, place: Buffer | Variable, temporary: str) -> None:
        if isinstance(place, Variable):
            self.line(f"{place.name} = {temporary}")
            return
        depth = self.depth
        self._nest(place.axes)
        lanes = ", ".join(self.axes[a].lane for a in place.axes)
        self.line(f"{place.name}[{lanes}] = {temporary}[{lanes}]")
        self.depth = depth

    # -- tile values

    def _expand(self, e: Expr) -> Expr:
        """Put inlined values in the place of their names."""

        def rule(x: Expr) -> Expr | None:
            if isinstance(x, Name):
                place = self.places.get(x.name)
                if isinstance(place, Inline):
                    return place.value
            return None

        return transform(e, rule)

    def _fill(self, place: Buffer, value: Expr, hint: str) -> None:
        """Compute a tile value into its buffer; products accumulate there directly."""
        base, products = self._split(place, value)
        ready = [self._operands(place, p, set()) for p in products]
        base = self._prepare(base if products else self._dot_in_place(place, base, hint), hint, place.axes)
        self._elementwise(place, base)
        for p in ready:
            self._multiply(p)

    def _dot_in_place(self, place: Buffer, value: Expr, hint: str) -> Expr:
        """An elementwise function of a product, with the product computed in the buffer that the function overwrites."""
        found = next(
            (x for x in subexpressions(value) if isinstance(x, Dot) and self._accumulates(place, x)), None
        )
        if found is None:
            return value
        self._fill(place, found, hint)
        name = self._bound(place.name, TileType(place.dtype, place.axes), place)
        return transform(value, lambda x: name if x is found else None)

    def _elementwise(self, place: Buffer, value: Expr) -> None:
        """Lines that set each lane of a buffer; a row joins the loop that ends just above if it runs over the same axis."""
        if isinstance(value, Name) and self.places.get(value.name) == place:
            return
        depth = self.depth
        if self._last_nest == (place.axes, depth, len(self.lines)):
            self.depth += 1
        else:
            self._nest(place.axes)
        lanes = ", ".join(self.axes[a].lane for a in place.axes)
        self.line(f"{place.name}[{lanes}] = {self._convert(self.value(value), place.dtype).text}")
        self.depth = depth
        self._last_nest = (place.axes, depth, len(self.lines)) if len(place.axes) == 1 else None

    def _prepare(self, e: Expr, hint: str, nest: tuple[str, ...]) -> Expr:
        """Compute the products and reductions inside `e`, leaving an expression that a nest over `nest` can evaluate."""
        return run(self._prepared(e, hint, frozenset(nest)))

    def _prepared(self, e: Expr, hint: str, nest: frozenset[str]) -> Steps[Expr]:
        if isinstance(e, Dot):
            return self._temporary_dot(e, hint)
        if isinstance(e, Reduce):
            return self._reduction(e, hint, nest)
        args: list[Expr] = []
        for x in operands(e):
            args.append((yield self._prepared(x, hint, nest)))
        return rebuild(e, args)

    def _bound(self, name: str, type_: TileType, place: Place) -> Name:
        """A value of our own making as an expression; `%` keeps it apart from the program's names."""
        name = f"%{name}"
        self.places[name] = place
        self.types.names[name] = type_
        return Name(name)

    # -- products

    def _split(self, place: Buffer, value: Expr) -> tuple[Expr, list[Dot]]:
        """`x + dot(…)` as x and the products that the buffer can accumulate after it."""
        products: list[Dot] = []
        while True:
            match value:
                case Apply(op="add", args=(x, Dot() as d)) if self._accumulates(place, d):
                    value = x
                case Apply(op="add", args=(Dot() as d, x)) if self._accumulates(place, d):
                    value = x
                case Dot() as d if self._accumulates(place, d):
                    products.insert(0, d)
                    return Const(0.0 if place.dtype.is_float else 0, place.dtype), products
                case _:
                    return value, products
            products.insert(0, d)

    def _accumulates(self, place: Buffer, d: Dot) -> bool:
        return self.types.of(d).dtype is place.dtype and self._roles(place.axes, d) is not None

    def _roles(self, axes: tuple[str, ...], d: Dot) -> tuple[Expr, Expr, str | None, str] | None:
        """(a, b, i, j) such that the buffer's last axis j belongs to b alone and i, if any, stands before it and belongs
        to a alone; None where its last axis is shared or there is none."""
        if not axes or not d.over:
            return None
        in_a, in_b = set(self.types.of(d.a).axes), set(self.types.of(d.b).axes)
        j = axes[-1]
        if set(axes) != (in_a | in_b) - set(d.over) or (j in in_a) == (j in in_b):
            return None
        a, b, own, other = (d.a, d.b, in_a, in_b) if j in in_b else (d.b, d.a, in_b, in_a)
        i = axes[-2] if len(axes) > 1 and axes[-2] in own and axes[-2] not in other else None
        return a, b, i, j

    def _operands(self, c: Buffer, d: Dot, carries: set[str]) -> _Product:
        """Bring the operands of a product into buffers: a over (…, i, k), b over (…, k, j)."""
        roles = self._roles(c.axes, d)
        assert roles is not None
        a, b, i, j = roles
        k = d.over[-1]
        outer = (*(x for x in c.axes if x not in (i, j)), *d.over[:-1])
        return _Product(
            c,
            self._packed(a, (*self._shared(a, outer), *([i] if i else []), k), c, carries),
            self._packed(b, (*self._shared(b, outer), k, j), c, carries),
            outer,
            i,
            j,
            k,
        )

    def _shared(self, e: Expr, outer: tuple[str, ...]) -> list[str]:
        own = self.types.of(e).axes
        return [x for x in outer if x in own]

    def _packed(self, e: Expr, axes: tuple[str, ...], c: Buffer, carries: set[str]) -> Buffer:
        """A buffer that holds `e` over these axes in this order: its own, or a copy."""
        value = self._expand(e)
        if isinstance(value, Name) and value.name not in carries:
            place = self.places[value.name]
            if isinstance(place, Buffer) and place.axes == axes and place.dtype is c.dtype:
                return place
        hint = f"{value.tensor}_tile" if isinstance(value, Load) else f"{c.name}_operand"
        value = self._prepare(value, hint, axes)
        made = self._buffer(hint, c.dtype, axes)
        self._elementwise(made, value)
        return made

    def _multiply(self, p: _Product) -> None:
        depth = self.depth
        self._nest(p.outer)
        views = [self._view(b, p.outer) for b in (p.c, p.a, p.b)]
        count = {x: self.axes[x].count for x in (p.i, p.j, p.k) if x}
        if p.i:
            self.line(f"multiply_add({', '.join(views)}, {count[p.i]}, {count[p.j]}, {count[p.k]})")
        else:
            self.line(f"multiply_row({', '.join(views)}, {count[p.j]}, {count[p.k]})")
        self.depth = depth

    def _view(self, b: Buffer, outer: tuple[str, ...]) -> str:
        """The part of a buffer at the current position of the outer axes, which come first in it."""
        lanes = [self.axes[x].lane for x in b.axes if x in outer]
        return f"{b.name}[{', '.join(lanes)}]" if lanes else b.name

    def _temporary_dot(self, d: Dot, hint: str) -> Expr:
        type_ = self.types.of(d)
        for axes in _orders(type_.axes):
            if self._roles(axes, d):
                place = self._buffer(f"{hint}_dot", type_.dtype, axes)
                self._fill(place, d, hint)
                return self._bound(place.name, replace(type_, axes=axes), place)
        product = Apply("mul", (Cast(type_.dtype, d.a), Cast(type_.dtype, d.b)))
        return self._reduction(Reduce("sum", d.over, self._expand(product)), hint, frozenset())

    # -- reductions

    def _reduction(self, r: Reduce, hint: str, nest: frozenset[str]) -> Expr:
        """A reduction whose operand is ready: of a buffer's rows in place, where the nest is over just those rows."""
        type_ = self.types.of(r)
        over = tuple(a for a in self.types.of(r.arg).axes if a in r.over)
        arg = self._expand(r.arg)
        if len(over) == len(r.over) == 1 and r.fn in ROWS and self.types.of(arg).dtype is not DType.BOOL:
            place = self._rows(arg, (*type_.axes, *over), f"{hint}_{r.fn}", held(self.types.of(arg).dtype))
            name = self._bound(place.name, TileType(place.dtype, place.axes), place)
            rows = Reduce(r.fn, r.over, name)
            if frozenset(type_.axes) == nest:
                return rows
            if not type_.axes:
                total = self._variable(f"{hint}_{r.fn}", type_.dtype)
                self.line(f"{total.name} = {self.value(rows).text}")
                return self._bound(total.name, type_, total)
            result = self._buffer(f"{hint}_{r.fn}", type_.dtype, type_.axes)
            self._elementwise(result, rows)
            return self._bound(result.name, type_, result)
        return self._fold(replace(r, arg=self._prepare(arg, hint, (*type_.axes, *over))), type_, hint)

    def _rows(self, arg: Expr, axes: tuple[str, ...], hint: str, dtype: DType) -> Buffer:
        if isinstance(arg, Name):
            place = self.places[arg.name]
            if isinstance(place, Buffer) and place.axes[-1] == axes[-1] and place.dtype is dtype:
                return place
        made = self._buffer(f"{hint}_of", dtype, axes)
        self._fill(made, arg, hint)
        return made

    def _fold(self, r: Reduce, type_: TileType, hint: str) -> Expr:
        """Any reduction, element by element into a variable."""
        depth = self.depth
        result = self._buffer(f"{hint}_{r.fn}", type_.dtype, type_.axes) if type_.axes else None
        self._nest(type_.axes)
        total = self.names.new(f"{hint}_{r.fn}")
        fold = _Fold(self, r, total, type_.dtype)
        fold.start()
        inner = self.depth
        self._nest(r.over)
        fold.step()
        self.depth = inner
        if result is None:
            return self._bound(total, type_, Variable(total, type_.dtype))
        self.line(f"{result.name}[{', '.join(self.axes[a].lane for a in result.axes)}] = {total}")
        self.depth = depth
        return self._bound(result.name, type_, result)

    # -- expressions

    def value(self, e: Expr, bound: bool = False) -> Code:
        """The expression at the current lanes. May first write lines that name its parts."""
        return run(self._value(e, "", bound))

    def _named(self, c: Code) -> Code:
        """`c` under a name of its own."""
        if c.text.isidentifier():
            return c
        name = self.names.new("t")
        self.line(f"{name} = {c.text}")
        return Code(name, c.dtype)

    def _value(self, e: Expr, guard: str, bound: bool) -> Steps[Code]:
        if isinstance(e, Apply) and e.op in ("where", "and", "or") and not bound and self._needs_guard(e):
            guarded: Code = yield self._guarded(e, guard)
            return guarded
        args: list[Code] = []
        if not isinstance(e, Load | Reduce):
            for x in operands(e):
                args.append((yield self._value(x, guard, bound)))
        code = self._code(e, args, guard, bound)
        return self._named(code) if len(code.text) > LINE and not bound else code

    def _code(self, e: Expr, args: list[Code], guard: str, bound: bool) -> Code:
        match e:
            case Const(value=v, dtype=dtype):
                return _constant(v, dtype)
            case Name(name=n):
                return self._read(n)
            case ScalarRef(name=n):
                return Code(self.owner.scalars[n], self.types.scalars[n])
            case ExtentRef(name=n):
                return Code(self.owner.extents[n], DType.I64)
            case AxisIndex(axis=a):
                return self._position(self.axes[a], bound)
            case Load():
                return self._load(e, guard)
            case Reduce(fn=fn, arg=Name(name=n)):
                return self._row(fn, n)
            case Cast(dtype=dtype):
                return self._cast(args[0], dtype)
            case Fill():
                return args[0]
            case Apply(op=op):
                return self._apply_operation(op, args)
        raise TypeError(f"{type(e).__name__} is no elementwise expression")

    def _position(self, axis: Axis, bound: bool) -> Code:
        if bound or not axis.lane:
            return Code(axis.origin, DType.I64)
        return Code(axis.index, DType.I64, ATOM if axis.start == "0" else 14)

    def _read(self, name: str) -> Code:
        place = self.places[name]
        assert not isinstance(place, Inline)
        dtype = self.types.names[name].dtype
        if isinstance(place, Variable):
            return Code(place.name, dtype)
        return Code(f"{place.name}[{', '.join(self.axes[a].lane for a in place.axes)}]", dtype)

    def _row(self, fn: str, name: str) -> Code:
        """A reduction of a buffer's last axis at the current lanes of the others."""
        b = self.places[name]
        assert isinstance(b, Buffer)
        count = self.axes[b.axes[-1]].count
        row = self._view(b, b.axes[:-1])
        if fn == "sum":
            return Code(f"sum_of({row}, {count})", b.dtype)
        start = _constant((LOWEST if fn == "max" else HIGHEST)[b.dtype], b.dtype)
        return Code(f"{ROWS[fn]}({row}, {count}, {start.text})", b.dtype)

    # -- reads

    def _load(self, e: Load, guard: str) -> Code:
        param, tensor = self.params[e.tensor], self.tensor(e.tensor)
        texts = [
            self._subscript(self._expand(ix), f"{tensor}.shape[{i}]") for i, ix in enumerate(e.subscripts)
        ]
        text = f"{tensor}[{', '.join(texts) or '()'}]"
        if param.dtype in (DType.F16, DType.BF16):
            text = f"widen_{param.dtype}({text})"
        elif held(param.dtype) is not param.dtype:
            text = f"{HELD[held(param.dtype)]}({text})"
        condition = guard if guard and not self._always_inside(e, param) else ""
        if any(depends_on_data(ix, self.tainted) for ix in e.subscripts):
            condition = f"{tensor}.size and {condition}" if condition else f"{tensor}.size"
        if not condition:
            return Code(text, param.dtype)
        zero = _constant(
            0.0 if param.dtype.is_float else False if param.dtype is DType.BOOL else 0, held(param.dtype)
        )
        return Code(f"({text} if {condition} else {zero.text})", param.dtype)

    def _subscript(self, ix: Expr, extent: str = "") -> str:
        if isinstance(ix, AxisIndex):
            axis = self.axes[ix.axis]
            return f"at({axis.index})" if axis.lane and axis.start != "0" else axis.index
        code = self.value(ix)
        if extent and depends_on_data(ix, self.tainted):
            return f"at(clamp({code.text}, {extent}))"
        return code.text if isinstance(ix, Const) else f"at({code.text})"

    def _fits(self, ix: Expr, extent: Expr) -> bool:
        """Is the subscript an axis over just this extent?"""
        return isinstance(ix, AxisIndex) and self.axes[ix.axis].extent == extent

    def _always_inside(self, e: Load, param: Param) -> bool:
        return all(map(self._fits, e.subscripts, param.shape))

    def _needs_guard(self, e: Expr) -> bool:
        """Does `e` read an element that may lie outside its tensor where a condition does not hold?"""
        known = self.guarded.get(id(e))
        if known is None:
            loads = (x for x in subexpressions(e) if isinstance(x, Load))
            known = e, any(not self._always_inside(x, self.params[x.tensor]) for x in loads)
            self.guarded[id(e)] = known
        return known[1]

    def _guarded(self, e: Apply, guard: str) -> Steps[Code]:
        """`where`, `and`, `or` around such a read: the reads happen only where the condition selects them."""
        condition = self._named((yield self._value(e.args[0], guard, False))).text
        also = f"{guard} and " if guard else ""
        sides = (condition, f"not {condition}") if e.op == "where" else ("", condition)
        if e.op == "or":
            sides = ("", f"not {condition}")
        args = [Code(condition, DType.BOOL)]
        for x, side in zip(e.args[1:], sides[-len(e.args) + 1 :], strict=True):
            args.append((yield self._value(x, also + side, False)))
        return self._apply_operation(e.op, args)

    # -- operations

    def _apply_operation(self, op: str, args: list[Code]) -> Code:
        if op == "where" and self.in_python:
            return Code(f"({args[1].text} if {args[0].text} else {args[2].text})", args[1].dtype)
        if op == "where":
            dtype = args[1].dtype if args[1].dtype is args[2].dtype else promote(args[1].dtype, args[2].dtype)
            sides = ", ".join(self._convert(a, held(dtype)).text for a in args[1:])
            return Code(f"select({args[0].text}, {sides})", dtype)
        if op == "not":
            return Code(f"not {args[0].within(NOT)}", DType.BOOL, NOT)
        if op in ("and", "or"):
            sign, level = INFIX[op]
            return Code(f"{args[0].within(level)} {sign} {args[1].within(level + 1)}", DType.BOOL, level)
        return self._arithmetic(op, args)

    def _arithmetic(self, op: str, args: list[Code]) -> Code:
        dtype = _operand_type(op, [a.dtype for a in args])
        args = [self._convert(a, dtype) for a in args]
        if op in ("lt", "le", "eq", "ne"):
            sign, level = INFIX[op]
            return Code(f"{args[0].within(level + 1)} {sign} {args[1].within(level + 1)}", DType.BOOL, level)
        if op in INFIX:
            sign, level = INFIX[op]
            return _wrapped(Code(f"{args[0].within(level)} {sign} {args[1].within(level + 1)}", dtype, level))
        if op == "neg":
            return _wrapped(Code(f"-{args[0].within(UNARY)}", dtype, UNARY))
        name = f"{op}_{dtype}" if op in BY_TYPE else CALLS[op]
        if dtype.is_float and op in ("floordiv", "mod"):
            name = f"{op}_float"
        if dtype.is_float and op == "abs":
            name = "fabs"
        if self.in_python:
            return _in_python(op, args)
        code = Code(f"{name}({', '.join(a.text for a in args)})", dtype)
        return _wrapped(code) if op == "abs" else code

    def _convert(self, c: Code, dtype: DType, narrow: bool = False) -> Code:
        """The value held as `dtype` (implicit conversions only: to a wider type, or a float to a float)."""
        source = held(c.dtype)
        if source is held(dtype) or (narrow and c.dtype is DType.BOOL):
            return replace(c, dtype=dtype) if not narrow or dtype is source else c
        return Code(f"{HELD[held(dtype)]}({c.text})", dtype)

    def _cast(self, c: Code, dtype: DType) -> Code:
        if c.dtype is dtype:
            return c
        if dtype is DType.BOOL:
            return Code(f"{c.within(7)} != {_constant(0, held(c.dtype)).text}", dtype, 6)
        if dtype in (DType.F16, DType.BF16):
            wide = c if c.dtype.is_float else self._convert(c, DType.F64)
            return Code(f"round_{dtype}({wide.text})", dtype)
        if dtype.is_float or (c.dtype is DType.I32 and dtype is DType.I64):
            return replace(self._convert(c, dtype), dtype=dtype)
        return Code(f"to_{dtype}({c.text})", dtype)


@dataclass(frozen=True)
class _Product:
    """`c[…, i, j] += a[…, i, k] · b[…, k, j]` at every position of the outer axes."""

    c: Buffer
    a: Buffer
    b: Buffer
    outer: tuple[str, ...]
    i: str | None
    j: str
    k: str


@dataclass(frozen=True)
class _Update:
    """The next state of a carry: an elementwise base, products accumulated on it, and the names that the base reads."""

    name: str
    place: Buffer | Variable
    base: Expr
    products: tuple[_Product, ...]
    reads: frozenset[str]


@dataclass(frozen=True)
class _Fold:
    """Lines of a reduction into the variable `total`."""

    task: _Task
    reduce: Reduce
    total: str
    dtype: DType

    def start(self) -> None:
        fn = self.reduce.fn
        if fn in ("argmax", "argmin"):
            table = LOWEST if fn == "argmax" else HIGHEST
            self.task.line(f"{self.total} = -1")
            self.task.line(f"{self._best} = {_constant(table[self._compared], self._compared).text}")
            return
        first: int | float | bool = {"any": False, "all": True, "sum": 0, "prod": 1}.get(fn, 0)
        if fn in ("max", "min"):
            first = (LOWEST if fn == "max" else HIGHEST)[self.dtype]
        self.task.line(f"{self.total} = {_constant(first, self.dtype).text}")

    @property
    def _compared(self) -> DType:
        """The type in which values are compared for argmax and argmin."""
        dtype = held(self.task.types.of(self.reduce.arg).dtype)
        return DType.I32 if dtype is DType.BOOL else dtype

    @property
    def _best(self) -> str:
        return f"{self.total}_value"

    def step(self) -> None:
        fn, task = self.reduce.fn, self.task
        code = task.value(self.reduce.arg)
        if fn in ("argmax", "argmin"):
            self._step_index(task._named(task._convert(code, self._compared)))
            return
        op = {"any": "or", "all": "and", "sum": "add", "prod": "mul"}.get(fn, fn)
        code = task._cast(code, DType.BOOL) if fn in ("any", "all") else task._convert(code, self.dtype)
        task.line(f"{self.total} = {task._apply_operation(op, [Code(self.total, self.dtype), code]).text}")

    def _step_index(self, x: Code) -> None:
        """The first index of the extreme value, or of the first NaN."""
        task, best = self.task, self._best
        sign = ">" if self.reduce.fn == "argmax" else "<"
        nan = f" or ({x.text} != {x.text} and {best} == {best})" if x.dtype.is_float else ""
        task.open(f"if {self.total} < 0 or {x.text} {sign} {best}{nan}:")
        task.line(f"{best} = {x.text}")
        task.line(f"{self.total} = {task.axes[self.reduce.over[0]].index}")
        task.depth -= 1


def _orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes as they are, then with each other one last."""
    return [axes, *((*(x for x in axes if x != a), a) for a in reversed(axes[:-1]))]


def _operand_type(op: str, types: list[DType]) -> DType:
    """The type in which an operation computes."""
    out = types[0] if op in ("eq", "ne") and all(t is DType.BOOL for t in types) else compute(types[0])
    for t in types[1:]:
        out = out if out is t else promote(out, t)
    floating = op not in ("add", "sub", "mul", "neg", "abs", "min", "max", "floordiv", "mod", "fma")
    if floating and op not in ("lt", "le", "eq", "ne") and not out.is_float:
        return DType.F32
    return out


def _in_python(op: str, args: list[Code]) -> Code:
    """An operation where the launching function, plain Python, computes its number of tasks."""
    if op in ("floordiv", "mod"):
        sign = "//" if op == "floordiv" else "%"
        return Code(f"{args[0].within(16)} {sign} {args[1].within(17)}", args[0].dtype, 16)
    return Code(f"{op}({', '.join(a.text for a in args)})", args[0].dtype)


def _wrapped(c: Code) -> Code:
    """Numba computes int32 in int64: cut back, so that it wraps."""
    return Code(f"i32({c.text})", c.dtype) if c.dtype is DType.I32 else c


def _constant(value: int | float | bool, dtype: DType) -> Code:
    if dtype is DType.BOOL:
        return Code(str(bool(value)), dtype)
    if dtype in (DType.F16, DType.BF16):
        return Code(f"round_{dtype}({_constant(float(value), DType.F64).text})", dtype)
    text = repr(float(value) if dtype.is_float else int(value))
    if text == str(-(2**63)):
        return Code(f"{-(2**63) + 1} - 1", dtype, 14)
    if dtype is DType.I64 or dtype is DType.F64:
        return Code(text, dtype, UNARY if text.startswith("-") else ATOM)
    return Code(f"{HELD[held(dtype)]}({text})", dtype)
