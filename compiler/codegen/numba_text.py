"""What generated Numba text is made of: names, expressions with their types, storage, and tables of spellings."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Mapping

from ...dsl.records import dataclass
from ...dsl.types import DType, compute, promote
from ..tile_ir import Expr, TileProgram

ATOM, UNARY, NOT = 20, 18, 4
"""How tightly an expression binds: names and calls, signs, `not`; other levels stand in `INFIX`."""
HELD = {DType.F64: "f64", DType.F32: "f32", DType.I64: "i64", DType.I32: "i32", DType.BOOL: "bool_"}
"""How a computed value is held; narrower types are held in the type they compute in."""
INFIX = {
    "mul": ("*", 16), "div": ("/", 16), "add": ("+", 14), "sub": ("-", 14), "and": ("&", 10), "or": ("|", 8),
    "lt": ("<", 6), "le": ("<=", 6), "eq": ("==", 6), "ne": ("!=", 6),
}  # fmt: skip
CALLS = {
    "min": "minimum", "max": "maximum", "floordiv": "floordiv", "mod": "mod", "fma": "fma", "abs": "abs",
    "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "rint", "sin": "sin", "cos": "cos",
    "rsqrt": "rsqrt", "pow": "power",
}  # fmt: skip
BY_TYPE = frozenset({"exp", "exp2", "log", "log2", "tanh", "erf"})
LINE_BYTES = 64
"""What the start of a buffer is a multiple of: a cache line."""
LOWEST = {DType.F64: -math.inf, DType.F32: -math.inf, DType.I64: -(2**63), DType.I32: -(2**31)}
HIGHEST = {DType.F64: math.inf, DType.F32: math.inf, DType.I64: 2**63 - 1, DType.I32: 2**31 - 1}
LANES = {
    DType.F64: "lanes_f64", DType.F32: "lanes_f32", DType.I64: "lanes_i64", DType.I32: "lanes_i32",
    DType.BOOL: "lanes_bool",
}  # fmt: skip
"""Like `HELD`, for vectors."""
FOLDS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}
"""What takes the next element into a reduction."""
WHOLE_WIDE = 64
"""A multiple of the number of elements in a wide vector anywhere."""
SIZED = frozenset(
    {"load", "load_some", "store", "store_some", "prefetch", "prefetch_read", "indices", *LANES.values()}
)
"""Functions whose results have LANES lanes; each has a twin for WIDE."""
NOTING = {"max": "larger", "min": "smaller"}
"""What takes the next vector of floats into an extreme that notes NaN aside."""
VECTORS = frozenset(
    {"LANES", "WIDE", "within", "noting_nan", *NOTING.values(), *SIZED}
    | {f"{name}_wide" for name in SIZED}
    | {f"{fn}_lanes" for fn in FOLDS}
)
"""Names a generated file may import from the module of vectors."""
EXPORTS = frozenset(
    {
        "at",
        "clamp",
        "select",
        "fabs",
        "inf",
        "nan",
        "floordiv_float",
        "mod_float",
    }
    | {*HELD.values(), *CALLS.values()} - {"abs"}
    | {f"{op}_{t}" for op in BY_TYPE for t in ("f32", "f64")}
    | {f"{verb}_{t}" for verb in ("widen", "narrow", "round") for t in ("f16", "bf16")}
    | {f"to_{t}" for t in ("i64", "i32", "i16", "i8", "u8")}
)
"""Names a generated file may import from the intrinsics."""
PRODUCTS = frozenset(
    {"multiply", "multiply_whole", "multiply_packing", "multiply_packing_f16", "multiply_packing_bf16"}
    | {"multiply_packing_several", "multiply_packing_several_f16", "multiply_packing_several_bf16"}
    | {"pack", "pack_f16", "pack_bf16", "unpack"}
)
"""Names it may import from the module of products."""
NARROW_PRODUCTS = frozenset({"multiply_bf16", "multiply_i8", "start_tiles", "stop_tiles"})
"""Names it may import from the module of matrix units."""
MATRICES = frozenset({"matrix"})
"""Names it may import from the module of matrices."""
STORAGE = frozenset({"workspace", "part"})
"""Names it may import from the module of storage."""
TASKS = frozenset({"take_first", "take_next"})
"""Names it may import from the module of tasks."""
OURS = frozenset({"njit", "run_tasks", "space", "first", "last", "queue", "task"})
RESERVED = (
    OURS
    | EXPORTS
    | VECTORS
    | TASKS
    | PRODUCTS
    | NARROW_PRODUCTS
    | MATRICES
    | STORAGE
    | {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
)


def held(dtype: DType) -> DType:
    return compute(dtype)


class Names:
    """Python names for the program's: validated, never a keyword, a builtin, an import or each other."""

    def __init__(self, taken: frozenset[str] | set[str] = RESERVED) -> None:
        self._taken = set(taken)

    def inner(self) -> Names:
        """Names of a scope inside this one."""
        return Names(self._taken)

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


@dataclass(frozen=True)
class Code:
    """A Python expression: its text, how tightly its outermost operator binds, the dtype of its value, and whether that is
    a vector of lanes."""

    text: str
    dtype: DType
    level: int = ATOM
    lanes: bool = False

    def within(self, level: int) -> str:
        """The text as an operand of an operator of this level."""
        return self.text if self.level >= level else f"({self.text})"


@dataclass(frozen=True)
class Buffer:
    """Storage of a tile value for the task in hand. `sizes` are those of its axes, the last rounded up."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    sizes: tuple[int, ...]


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
class Signature:
    """A program and the Python names of what its functions take, in that order: tensors, scalars, free extents."""

    program: TileProgram
    names: Names
    tensors: Mapping[str, str]
    scalars: Mapping[str, str]
    extents: Mapping[str, str]

    @property
    def arguments(self) -> str:
        statics = {name for name, _ in self.program.statics}
        free = [name for e, name in self.extents.items() if e not in statics]
        return ", ".join([*self.tensors.values(), *self.scalars.values(), *free])


def operand_type(op: str, types: list[DType]) -> DType:
    """The type in which an operation computes."""
    out = types[0] if op in ("eq", "ne") and all(t is DType.BOOL for t in types) else compute(types[0])
    for t in types[1:]:
        out = out if out is t else promote(out, t)
    floating = op not in ("add", "sub", "mul", "neg", "abs", "min", "max", "floordiv", "mod", "fma")
    if floating and op not in ("lt", "le", "eq", "ne") and not out.is_float:
        return DType.F32
    return out


def in_python(op: str, args: list[Code]) -> Code:
    """An operation where the launching function, plain Python, computes its number of tasks."""
    if op in ("floordiv", "mod"):
        sign = "//" if op == "floordiv" else "%"
        return Code(f"{args[0].within(16)} {sign} {args[1].within(17)}", args[0].dtype, 16)
    return Code(f"{op}({', '.join(a.text for a in args)})", args[0].dtype)


def wrapped(c: Code) -> Code:
    """Numba computes int32 in int64: cut back, so that it wraps. Vectors keep their type."""
    return Code(f"i32({c.text})", c.dtype) if c.dtype is DType.I32 and not c.lanes else c


def identity(fn: str, dtype: DType) -> Code:
    """What a reduction of nothing is."""
    first: int | float | bool = {"any": False, "all": True, "sum": 0, "prod": 1}.get(fn, 0)
    if fn in ("max", "min"):
        first = (LOWEST if fn == "max" else HIGHEST)[dtype]
    return constant(first, dtype)


def constant(value: int | float | bool, dtype: DType) -> Code:
    if dtype is DType.BOOL:
        return Code(str(bool(value)), dtype)
    if dtype in (DType.F16, DType.BF16):
        return Code(f"round_{dtype}({constant(float(value), DType.F64).text})", dtype)
    text = repr(float(value) if dtype.is_float else int(value))
    if text == str(-(2**63)):
        return Code(f"{-(2**63) + 1} - 1", dtype, 14)
    if dtype is DType.I64 or dtype is DType.F64:
        return Code(text, dtype, UNARY if text.startswith("-") else ATOM)
    return Code(f"{HELD[held(dtype)]}({text})", dtype)
