"""Types of tile expressions: what each operation makes of its operands, for the verifier and for inference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..dsl.records import dataclass
from ..dsl.types import DType, promote
from . import tile_ir as tile
from .tensor_ir import ARITY, COMPARISONS, LOGICAL, REDUCTIONS, operation_type, reduction_type
from .tile_ir import Expr, Param, TileType
from .tile_text import TILE_ARITY, print_type


class Mistyped(ValueError):
    """An expression without a type; the message says why. `at` is the subexpression that is wrong."""

    def __init__(self, message: str, at: Expr) -> None:
        super().__init__(message)
        self.at = at


@dataclass(frozen=True)
class Names:
    """What expressions may name: tensors, scalars and extents of the program, and the values and axes that are visible.

    `axes` tells which axes span tiles (False: a unit axis, one index at a time).
    """

    params: Mapping[str, Param]
    scalars: Mapping[str, DType]
    extents: Collection[str]
    values: Mapping[str, TileType]
    axes: Mapping[str, bool]


def expression_type(e: Expr, names: Names, bound: bool = False) -> TileType:
    """The type of an expression. In a loop's `bound` a tile axis that no reduction takes is its first index. Raises
    `Mistyped`."""
    done: list[TileType] = []
    for x, over in postorder(e):
        n = len(tile.operands(x))
        args = done[len(done) - n :]
        del done[len(done) - n :]
        done.append(node_type(x, args, names, over if bound else None))
    return done[0]


def postorder(e: Expr) -> Iterator[tuple[Expr, frozenset[str]]]:
    """Operands before users, each with the axes that reductions around it take."""
    stack: list[tuple[Expr, frozenset[str], bool]] = [(e, frozenset(), False)]
    while stack:
        top, over, ready = stack.pop()
        if ready:
            yield top, over
            continue
        stack.append((top, over, True))
        inner = over | frozenset(top.over) if isinstance(top, tile.Dot | tile.Reduce) else over
        stack.extend((x, inner, False) for x in reversed(tile.operands(top)))


def node_type(e: Expr, args: list[TileType], names: Names, taken: frozenset[str] | None = None) -> TileType:
    """The type of one node whose operands have these types. `taken`: the node stands in a loop's bound, below reductions
    that take these axes."""
    if taken is not None and isinstance(e, tile.AxisIndex) and e.axis in names.axes and e.axis not in taken:
        return TileType(DType.I64)
    return _Node(e, names).type(args)


@dataclass(frozen=True)
class _Node:
    e: Expr
    names: Names

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Mistyped(what, self.e)

    def type(self, args: list[TileType]) -> TileType:
        names = self.names
        axes = tuple(dict.fromkeys(a for x in args for a in x.axes))
        match self.e:
            case tile.Const(value=value, dtype=dtype):
                self.expect(fits(value, dtype), f"{value!r} is no {dtype}")
                return TileType(dtype)
            case tile.Name(name=n):
                self.expect(n in names.values, f"{n} is not defined here")
                return names.values[n]
            case tile.ScalarRef(name=n):
                self.expect(n in names.scalars, f"{n} is no scalar of the program")
                return TileType(names.scalars[n])
            case tile.ExtentRef(name=n):
                self.expect(n in names.extents, f"{n} is no extent of the program")
                return TileType(DType.I64)
            case tile.AxisIndex(axis=a):
                self.expect(a in names.axes, f"axis {a} is not open here")
                return TileType(DType.I64, (a,) if names.axes[a] else ())
            case tile.Load(tensor=t):
                return self.load(t, args)
            case tile.Apply(op=op):
                return TileType(self.applied(op, [a.dtype for a in args]), axes)
            case tile.Cast(dtype=dtype):
                return TileType(dtype, axes)
            case tile.Dot(over=over):
                return self.dot(over, *args)
            case tile.Reduce(fn=fn, over=over):
                return self.reduction(fn, over, args[0])
            case tile.Fill():
                self.expect(not axes, "a fill of a tile: its value must be a scalar")
                return args[0]

    def load(self, tensor: str, subscripts: list[TileType]) -> TileType:
        p = self.names.params.get(tensor)
        if p is None:
            raise Mistyped(f"{tensor} is no tensor of the program", self.e)
        self.expect(p.mode != "out", f"{tensor} is only written; declare it inout to read it")
        try:
            return TileType(p.dtype, subscripted(tensor, p, subscripts))
        except ValueError as reason:
            raise Mistyped(str(reason), self.e) from None

    def applied(self, op: str, types: list[DType]) -> DType:
        problem = operation_problem(op, types, TILE_ARITY)
        self.expect(problem is None, problem or "")
        if op == "fma":
            return promote(promote(types[0], types[1]), types[2])
        return operation_type(op, tuple(types))

    def dot(self, over: tuple[str, ...], a: TileType, b: TileType) -> TileType:
        self.over("dot", over)
        for side, x in (("left", a), ("right", b)):
            for axis in over:
                self.expect(axis in x.axes, f"dot over {axis}: its {side} operand {print_type(x)} lacks it")
            self.expect(x.dtype is not DType.BOOL, "dot of bool")
        axes = tuple(x for x in dict.fromkeys(a.axes + b.axes) if x not in over)
        return TileType(promote(a.dtype, b.dtype), axes)

    def reduction(self, fn: str, over: tuple[str, ...], arg: TileType) -> TileType:
        self.expect(fn in REDUCTIONS, f"unknown reduction {fn}")
        self.over(fn, over)
        for axis in over:
            self.expect(axis in arg.axes, f"{fn} over {axis}: its operand {print_type(arg)} lacks it")
        if fn in ("any", "all"):
            self.expect(arg.dtype is DType.BOOL, f"{fn} of {arg.dtype}")
        if fn in ("argmax", "argmin"):
            self.expect(len(over) == 1, f"{fn} over {len(over)} axes; over one it has a meaning")
        return TileType(reduction_type(fn, arg.dtype), tuple(a for a in arg.axes if a not in over))

    def over(self, fn: str, over: tuple[str, ...]) -> None:
        self.expect(len(set(over)) == len(over) > 0, f"{fn} over the axes {over}")


def subscripted(tensor: str, p: Param, subscripts: list[TileType]) -> tuple[str, ...]:
    """The axes of a tensor read or written at these subscripts. Raises ValueError."""
    if len(subscripts) != len(p.shape):
        raise ValueError(f"{tensor} has rank {len(p.shape)}, not {len(subscripts)}")
    for x in subscripts:
        if not x.dtype.is_integer:
            raise ValueError(f"a subscript of {tensor} is {x.dtype}")
    return tuple(dict.fromkeys(a for x in subscripts for a in x.axes))


def disagreement(name: str, e: Expr, found: TileType, declared: TileType) -> str | None:
    """How a value's type differs from its declaration: dtypes must be equal, axes may stand in any order, and a fill takes
    every axis."""
    if found.dtype is not declared.dtype:
        return f"{name} is declared {declared.dtype}, is {found.dtype}"
    if not isinstance(e, tile.Fill) and set(found.axes) != set(declared.axes):
        return f"{name} is declared {print_type(declared)}, its value is {print_type(found)}"
    return None


def store_problem(p: Param, axes: tuple[str, ...], value: TileType) -> str | None:
    """Why a value cannot be stored where subscripts span `axes`."""
    loose = [a for a in value.axes if a not in axes]
    if loose:
        return f"the value has axis {', '.join(loose)}, which no subscript mentions"
    rounds = value.dtype.is_float and p.dtype.is_float
    same = value.dtype.is_integer and p.dtype.is_integer
    if not (rounds or same or value.dtype is p.dtype):
        return f"{value.dtype} cannot be stored as {p.dtype} without a cast"
    return None


def fits(value: int | float | bool, dtype: DType) -> bool:
    """Is a constant's value one of its type?"""
    if dtype is DType.BOOL or isinstance(value, bool):
        return dtype is DType.BOOL and isinstance(value, bool)
    if dtype.is_float:
        return True
    low = 0 if dtype is DType.U8 else -(1 << dtype.bits - 1)
    return isinstance(value, int) and low <= value < low + (1 << dtype.bits)


def operation_problem(op: str, types: list[DType], arity: Mapping[str, int] = ARITY) -> str | None:
    """What is wrong with an operation on operands of these types."""
    if op not in arity:
        return f"unknown operation {op}"
    if len(types) != arity[op]:
        return f"{op} has {len(types)} operands, takes {arity[op]}"
    bools = [x is DType.BOOL for x in types]
    if op in LOGICAL:
        return None if all(bools) else f"{op} of {', '.join(map(str, types))}"
    if op == "where":
        if not bools[0]:
            return f"the condition of where is {types[0]}"
        return "where mixes bool and numbers" if bools[1] != bools[2] else None
    if op in COMPARISONS:
        return f"{op} of {types[0]} and {types[1]}" if bools[0] != bools[1] else None
    return f"{op} of bool" if any(bools) else None
