"""What a tile expression is: its type, the tile axes it spans, and the computations of a program with their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

from ...dsl.records import dataclass
from ...dsl.types import DType, promote
from ..tensor_ir import operation_type, reduction_type
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
    Load,
    LoopAxis,
    Name,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileProgram,
    TileType,
    operands,
    statements,
)
from ..tile_ir import Let as LetStmt
from ..tile_ir import (
    rebuild as rebuild,
)

Types = dict[str, TileType]


def postorder(e: Expr) -> list[Expr]:
    """Every node of the tree, operands before users."""
    out: list[Expr] = []
    stack = [e]
    while stack:
        node = stack.pop()
        out.append(node)
        stack.extend(operands(node))
    return out[::-1]


def rewrite(e: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Bottom up: `rule` sees each node after its operands were rewritten."""
    done: list[Expr] = []
    for node in postorder(e):
        arity = len(operands(node))
        args = tuple(done[len(done) - arity :])
        del done[len(done) - arity :]
        done.append(rule(rebuild(node, args)))
    return done[0]


def merged(groups: list[tuple[str, ...]]) -> tuple[str, ...]:
    """All axes, each where it first occurs."""
    return tuple(dict.fromkeys(a for g in groups for a in g))


def without(axes: tuple[str, ...], over: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if a not in over)


@dataclass(frozen=True)
class Facts:
    """What types of expressions depend on: the tensors and scalars of a program and its tile axes with their sizes."""

    tensors: dict[str, DType]
    scalars: dict[str, DType]
    tiles: dict[str, int]

    def type_of(self, e: Expr, types: Types) -> TileType:
        """The type of an expression; f16 and bf16 stay as such only as stored or cast values."""
        done: list[TileType] = []
        for node in postorder(e):
            arity = len(operands(node))
            args = done[len(done) - arity :]
            del done[len(done) - arity :]
            done.append(self._node(node, args, types))
        return done[0]

    def _node(self, e: Expr, args: list[TileType], types: Types) -> TileType:
        axes = merged([a.axes for a in args])
        match e:
            case Const(dtype=dtype):
                return TileType(dtype)
            case Name(name=name):
                return types[name]
            case ScalarRef(name=name):
                return TileType(self.scalars[name])
            case ExtentRef():
                return TileType(DType.I64)
            case AxisIndex(axis=axis):
                return TileType(DType.I64, (axis,) if axis in self.tiles else ())
            case Load(tensor=tensor):
                return TileType(self.tensors[tensor], axes)
            case Cast(dtype=dtype):
                return TileType(dtype, axes)
            case Dot(over=over):
                free = [without(a.axes, over) for a in args]
                return TileType(promote(args[0].dtype, args[1].dtype), merged(free))
            case Reduce(fn=fn, over=over):
                return TileType(reduction_type(fn, args[0].dtype), without(axes, over))
            case Apply(op=op):
                return TileType(applied_type(op, [a.dtype for a in args]), axes)
        return args[0]


def applied_type(op: str, types: list[DType]) -> DType:
    """As for the tensor IR's operations; `fma` meets in the type of all three."""
    return reduce(promote, types) if op == "fma" else operation_type(op, tuple(types))


def is_product(e: Dot, a: TileType, b: TileType) -> bool:
    """Has each side an axis of its own? Otherwise a dot is better a reduction of elementwise products."""
    return bool(set(a.axes) - set(b.axes)) and bool(set(b.axes) - set(a.axes))


# ---------------------------------------------------------------- the computations of a program


@dataclass(frozen=True)
class Context:
    """An elementwise computation: `expr` evaluated over `axes`, `cuts` standing for the dots and reductions in it.

    kind: "map", "reduce" (the argument of a reduction), "operand" (an operand of a product, read from shared memory),
    or "dot" (the result of a product; it has no expression).
    """

    kind: str
    axes: tuple[str, ...]
    expr: Expr | None
    types: Types


def contexts(program: TileProgram, facts: Facts) -> Iterator[Context]:
    """All computations of a program in text order, each with the types of the names in scope."""
    yield from _block(program.body, {}, facts)


def _block(body: tuple[Stmt, ...], types: Types, facts: Facts) -> Iterator[Context]:
    scope = dict(types)
    for s in body:
        match s:
            case LetStmt(name=name, type=type_, value=value):
                yield from _split(value, type_.axes, scope, facts)
                scope[name] = type_
            case Store(subscripts=subscripts, value=value):
                axes = merged([facts.type_of(x, scope).axes for x in (*subscripts, value)])
                for x in (*subscripts, value):
                    yield from _split(x, axes, scope, facts)
            case Grid(body=inner):
                yield from _block(inner, scope, facts)
            case For(carries=carries):
                for c in carries:
                    yield from _split(c.init, c.type.axes, scope, facts)
                scope.update({c.name: c.type for c in carries})
                yield from _loop(s, dict(scope), facts)


def _loop(s: For, scope: Types, facts: Facts) -> Iterator[Context]:
    yield from _block(s.body, scope, facts)
    inside = dict(scope)
    for x in statements(s.body):
        if isinstance(x, LetStmt):
            inside[x.name] = x.type
        elif isinstance(x, For):
            inside.update({c.name: c.type for c in x.carries})
    for c, value in zip(s.carries, s.yields, strict=True):
        yield from _split(value, c.type.axes, inside, facts)


def _split(e: Expr, axes: tuple[str, ...], types: Types, facts: Facts) -> Iterator[Context]:
    """Cut an expression at its dots and reductions; each piece is one elementwise computation."""
    pieces: list[tuple[str, tuple[str, ...], Expr]] = [("map", axes, e)]
    while pieces:
        kind, span, root = pieces.pop()
        yield Context(kind, span, root, types)
        for cut in cuts(root):
            pieces.extend(_under(cut, types, facts))
            if isinstance(cut, Dot) and is_product(
                cut, facts.type_of(cut.a, types), facts.type_of(cut.b, types)
            ):
                yield Context("dot", facts.type_of(cut, types).axes, None, types)


def _under(cut: Dot | Reduce, types: Types, facts: Facts) -> list[tuple[str, tuple[str, ...], Expr]]:
    if isinstance(cut, Reduce):
        return [("reduce", facts.type_of(cut.arg, types).axes, cut.arg)]
    a, b = facts.type_of(cut.a, types), facts.type_of(cut.b, types)
    if is_product(cut, a, b):
        return [("operand", a.axes, cut.a), ("operand", b.axes, cut.b)]
    both = merged([a.axes, b.axes])
    return [("reduce", both, cut.a), ("reduce", both, cut.b)]


def cuts(e: Expr) -> list[Dot | Reduce]:
    """The outermost dots and reductions below (or at) a node."""
    found: list[Dot | Reduce] = []
    stack = [e]
    while stack:
        node = stack.pop()
        if isinstance(node, Dot | Reduce):
            found.append(node)
        else:
            stack.extend(operands(node))
    return found


def leaves(e: Expr) -> list[Expr]:
    """The nodes of an elementwise computation: everything above and outside its dots and reductions."""
    found: list[Expr] = []
    stack = [e]
    while stack:
        node = stack.pop()
        found.append(node)
        if not isinstance(node, Dot | Reduce):
            stack.extend(operands(node))
    return found


def tile_axes(program: TileProgram, statics: dict[str, int]) -> dict[str, LoopAxis]:
    """Every axis that tiles span: whole axes and loop or grid axes with a tile size."""
    found = {w.name: LoopAxis(w.name, w.extent, static_value(w.extent, statics)) for w in program.whole}
    for a in loop_axes(program):
        if a.tile is not None:
            found[a.name] = a
    return found


def loop_axes(program: TileProgram) -> Iterator[LoopAxis]:
    for s in statements(program.body):
        if isinstance(s, Grid):
            yield from s.axes
        elif isinstance(s, For):
            yield s.axis


def static_value(e: Expr, statics: dict[str, int]) -> int | None:
    """The value of an integer expression over constants and static extents, if it is one."""
    done: list[int | None] = []
    for node in postorder(e):
        arity = len(operands(node))
        args = done[len(done) - arity :]
        del done[len(done) - arity :]
        done.append(_static_node(node, args, statics))
    return done[0]


_FOLD: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else 0,
    "min": min,
    "max": max,
}


def _static_node(e: Expr, args: list[int | None], statics: dict[str, int]) -> int | None:
    match e:
        case Const(value=value) if not isinstance(value, float):
            return int(value)
        case ExtentRef(name=name):
            return statics.get(name)
        case Apply(op=op) if op in _FOLD:
            a, b = args
            return None if a is None or b is None else _FOLD[op](a, b)
    return None
