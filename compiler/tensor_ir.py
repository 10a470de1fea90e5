"""Tensor IR: whole-tensor definitions over named axes. No order, no place.

A `Graph` is one kernel: parameters, facts, and `Definition`s in dependency order, each giving the value of one tensor at
an index point. Values are a hash-consed expression graph: a node is equal to another exactly if it is the same object, so
common subexpressions exist once, and code that no output reaches does not exist. Contractions are sums of products, gathers
are `Read`s whose indices come from tensors, both recognised by shape where a pass cares.

Nodes are made only through the functions below (`const`, `read`, `apply`, `reduce`, …), which compute axes and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Literal, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType, compute, promote

Axes = frozenset[str]
NO_AXES: Axes = frozenset()
Moment = Literal["old", "new", "final"]

# ---------------------------------------------------------------- nodes


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node:
    """A value at each point of `axes`. `span` is where it came from: its first place in the text compiled last."""

    axes: Axes
    dtype: DType
    span: Span | None = field(repr=False)

    @property
    def args(self) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Const(Node):
    """A literal. Its dtype is the one it adapted to."""

    value: int | float | bool


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Scalar(Node):
    """A scalar parameter."""

    name: str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Extent(Node):
    """An extent bound by a shape or declared; i64."""

    name: str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Index(Node):
    """The position on an axis; i64."""

    axis: str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Read(Node):
    """An element of a parameter or of another definition. Indices that depend on tensors are clamped to the extent."""

    tensor: str
    indices: tuple[Node, ...]

    @property
    def args(self) -> tuple[Node, ...]:
        return self.indices


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Apply(Node):
    """An elementwise operation of `OPERATIONS`."""

    op: str
    operands: tuple[Node, ...]

    @property
    def args(self) -> tuple[Node, ...]:
        return self.operands


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Cast(Node):
    """Explicit conversion to `dtype`: floats round to nearest even, float to integer toward zero, saturating, NaN to 0."""

    operand: Node

    @property
    def args(self) -> tuple[Node, ...]:
        return (self.operand,)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Reduce(Node):
    """`fn[bound | predicate](body)`; `fn` of `REDUCTIONS`. The set is the points of `bound` where `predicate` holds."""

    fn: str
    bound: tuple[str, ...]
    body: Node
    predicate: Node | None

    @property
    def args(self) -> tuple[Node, ...]:
        return (self.body,) if self.predicate is None else (self.body, self.predicate)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class When(Node):
    """`value` where `predicate` holds, absent elsewhere. Removed by canonicalize."""

    value: Node
    predicate: Node

    @property
    def args(self) -> tuple[Node, ...]:
        return (self.value, self.predicate)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Carried(Node):
    """A state of a cascade: before a step (`old`), after it (`new`), after the loop (`final`). Made by derive only."""

    name: str
    moment: Moment


# ---------------------------------------------------------------- operations

ARITHMETIC = frozenset({"add", "sub", "mul", "neg", "abs", "min", "max", "floordiv", "mod"})
FLOATING = frozenset(
    {
        "div",
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "rsqrt",
        "tanh",
        "erf",
        "sin",
        "cos",
        "floor",
        "ceil",
        "round",
        "pow",
    }
)
COMPARISONS = frozenset({"lt", "le", "eq", "ne"})
LOGICAL = frozenset({"and", "or", "not"})
ARITY: dict[str, int] = {
    **dict.fromkeys(("neg", "abs", "not", "exp", "exp2", "log", "log2", "sqrt", "rsqrt"), 1),
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "floor", "ceil", "round"), 1),
    **dict.fromkeys(("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "pow", "and", "or"), 2),
    **dict.fromkeys(("lt", "le", "eq", "ne"), 2),
    "where": 3,
}
OPERATIONS = frozenset(ARITY)
REDUCTIONS = frozenset({"sum", "max", "min", "prod", "any", "all", "argmax", "argmin"})

# ---------------------------------------------------------------- constructors

_interned: WeakValueDictionary[tuple[object, ...], Node] = WeakValueDictionary()
N = TypeVar("N", bound=Node)


def _intern(cls: type[N], key: tuple[object, ...], make: Callable[[], N], span: Span | None = None) -> N:
    """The node of this key. One that another text made stands, from now on, where the latest text has it: what is being
    compiled is what places are asked for."""
    found = _interned.get((cls, *key))
    if found is None:
        found = _interned[(cls, *key)] = make()
    elif span is not None and (found.span is None or found.span.source is not span.source):
        object.__setattr__(found, "span", span)
    return cast(N, found)


def _axes(nodes: Iterable[Node]) -> Axes:
    return NO_AXES.union(*(n.axes for n in nodes))


def const(value: int | float | bool, dtype: DType = DType.F32, span: Span | None = None) -> Const:
    """A literal of `dtype`; -0.0 and NaN keep their identity."""
    if dtype.is_float:
        value = float(value)
    key = value.hex() if isinstance(value, float) else value
    return _intern(Const, (dtype, type(value), key), lambda: Const(NO_AXES, dtype, span, value), span)


def scalar(name: str, dtype: DType, span: Span | None = None) -> Scalar:
    return _intern(Scalar, (name, dtype), lambda: Scalar(NO_AXES, dtype, span, name), span)


def extent(name: str, span: Span | None = None) -> Extent:
    return _intern(Extent, (name,), lambda: Extent(NO_AXES, DType.I64, span, name), span)


def index(axis: str, span: Span | None = None) -> Index:
    return _intern(Index, (axis,), lambda: Index(frozenset({axis}), DType.I64, span, axis), span)


def read(tensor: str, indices: Iterable[Node], dtype: DType, span: Span | None = None) -> Read:
    """`dtype` is the stored element type of the tensor."""
    ix = tuple(indices)
    return _intern(Read, (tensor, ix, dtype), lambda: Read(_axes(ix), dtype, span, tensor, ix), span)


def result_type(op: str, operands: tuple[Node, ...]) -> DType:
    """The dtype of an elementwise operation (DESIGN 8). Literals have adapted to their partners before."""
    return operation_type(op, tuple(o.dtype for o in operands))


def operation_type(op: str, types: tuple[DType, ...]) -> DType:
    """The dtype of an elementwise operation on operands of these dtypes."""
    if op in COMPARISONS or op in LOGICAL:
        return DType.BOOL
    if op == "where":
        a, b = types[1:]
        if a is b:
            return a
        if DType.BOOL in (a, b):
            raise TypeError("where: one side is bool, the other is not")
        return promote(a, b)
    out = compute(types[0]) if len(types) == 1 else promote(types[0], types[1])
    if op in FLOATING and not out.is_float:
        return DType.F32
    return out


def apply(op: str, *operands: Node, span: Span | None = None) -> Node:
    """An elementwise operation; the dtype follows from the operands."""
    if len(operands) != ARITY[op]:
        raise ValueError(f"{op} takes {ARITY[op]} operands, not {len(operands)}")
    dtype = result_type(op, operands)
    return _intern(Apply, (op, operands), lambda: Apply(_axes(operands), dtype, span, op, operands), span)


def cast_to(operand: Node, dtype: DType, span: Span | None = None) -> Node:
    if operand.dtype is dtype:
        return operand
    return _intern(Cast, (operand, dtype), lambda: Cast(operand.axes, dtype, span, operand), span)


def reduce_type(fn: str, body: Node) -> DType:
    return reduction_type(fn, body.dtype)


def reduction_type(fn: str, dtype: DType) -> DType:
    """The dtype of a reduction of values of `dtype`."""
    if fn in ("any", "all"):
        return DType.BOOL
    if fn in ("argmax", "argmin"):
        return DType.I64
    if dtype is DType.BOOL:
        return DType.I64  # a count
    return compute(dtype)


def reduce(
    fn: str, bound: Iterable[str], body: Node, predicate: Node | None = None, span: Span | None = None
) -> Node:
    """A reduction over a set. Sums of f16, bf16 and f32 have dtype f32; a sum over bool counts in i64."""
    over = tuple(bound)
    if fn not in REDUCTIONS:
        raise ValueError(f"unknown reduction {fn}")
    axes = (body.axes | (predicate.axes if predicate is not None else NO_AXES)) - frozenset(over)
    dtype = reduce_type(fn, body)
    return _intern(
        Reduce,
        (fn, over, body, predicate),
        lambda: Reduce(axes, dtype, span, fn, over, body, predicate),
        span,
    )


def when(value: Node, predicate: Node, span: Span | None = None) -> Node:
    axes = value.axes | predicate.axes
    return _intern(When, (value, predicate), lambda: When(axes, value.dtype, span, value, predicate), span)


def carried(name: str, moment: Moment, axes: Axes, dtype: DType) -> Carried:
    return _intern(Carried, (name, moment, axes, dtype), lambda: Carried(axes, dtype, None, name, moment))


# ---------------------------------------------------------------- traversal


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other arguments; dtypes are computed anew where they follow from arguments."""
    if all(a is b for a, b in zip(args, node.args, strict=True)):
        return node
    match node:
        case Read():
            return read(node.tensor, args, node.dtype, node.span)
        case Apply():
            return apply(node.op, *args, span=node.span)
        case Cast():
            return cast_to(args[0], node.dtype, node.span)
        case Reduce():
            return reduce(node.fn, node.bound, args[0], args[1] if len(args) > 1 else None, node.span)
        case When():
            return when(args[0], args[1], node.span)
    raise TypeError(f"{type(node).__name__} has no arguments")


def walk(roots: Iterable[Node]) -> list[Node]:
    """Every node once, arguments before users; iterative, so depth is no limit."""
    roots = list(roots)
    if len(roots) != 1:
        return _walked(roots)
    (root,) = roots
    below = _below.get(root)
    if below is None:
        below = _below[root] = tuple(_walked(roots)[:-1])
    return [*below, root]


_below: WeakKeyDictionary[Node, tuple[Node, ...]] = WeakKeyDictionary()
"""What `walk` finds below a node, which never changes: passes and searches walk over the same few nodes again and again."""


def _walked(roots: list[Node]) -> list[Node]:
    seen: set[Node] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args) if a not in seen)
    return order


def rewrite(roots: Iterable[Node], rule: Callable[[Node], Node]) -> list[Node]:
    """Bottom up: `rule` sees each node after its arguments were rewritten."""
    roots = list(roots)
    done: dict[Node, Node] = {}
    for node in walk(roots):
        done[node] = rule(rebuild(node, tuple(done[a] for a in node.args)))
    return [done[r] for r in roots]


def replace(roots: Iterable[Node], rule: Callable[[Node], Node | None]) -> list[Node]:
    """Outermost first: where `rule` answers, its answer stands and is not visited again."""
    roots = list(roots)
    done: dict[Node, Node] = {}
    stack: list[tuple[Node, bool]] = [(r, False) for r in roots]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done[node] = rebuild(node, tuple(done[a] for a in node.args))
            continue
        answer = rule(node)
        if answer is not None:
            done[node] = answer
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in node.args)
    return [done[r] for r in roots]


def substitute(node: Node, mapping: Mapping[Node, Node]) -> Node:
    """Replace nodes by others, outermost first."""
    return replace([node], mapping.get)[0]


def rename_axes(node: Node, names: Mapping[str, str]) -> Node:
    """Rename axes, free and bound alike."""

    def rule(n: Node) -> Node:
        if isinstance(n, Index) and n.axis in names:
            return index(names[n.axis], n.span)
        if isinstance(n, Reduce) and any(b in names for b in n.bound):
            return reduce(n.fn, (names.get(b, b) for b in n.bound), n.body, n.predicate, n.span)
        return n

    return rewrite([node], rule)[0]


# ---------------------------------------------------------------- graphs


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter. Shape entries are integer nodes over extents and scalars."""

    name: str
    dtype: DType
    shape: tuple[Node, ...]
    inout: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ScalarParam:
    name: str
    dtype: DType
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Definition:
    """`name[axes] = value`, stored as `dtype` where it is stored. An output is one whose name is in `Graph.outputs`.

    `target`: None defines the tensor; otherwise this is an update of the inout parameter `name` at these index
    expressions (free in `axes`), `accumulate` telling `+=` from `=`.
    """

    name: str
    axes: tuple[str, ...]
    value: Node
    dtype: DType
    target: tuple[Node, ...] | None = None
    accumulate: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Check:
    """A condition on extents and scalars to be checked at each call, with the words of its refusal.

    `condition` is a boolean node without axes. Made from `require` (kind "require"), from the bounds rule ("bounds")
    and from shapes that are expressions ("shape").
    """

    condition: Node
    kind: Literal["require", "bounds", "shape"]
    message: str
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Graph:
    """One kernel. `axes` gives each axis's extent; definitions stand in dependency order.

    `order` lists every parameter name (tensors and scalars) as the call takes them; `extents` every extent name, and
    `declared` those that are `C: extent` parameters, which the call takes by name.
    """

    name: str
    order: tuple[str, ...]
    tensors: dict[str, Tensor]
    scalars: dict[str, ScalarParam]
    extents: tuple[str, ...]
    axes: dict[str, Node]
    definitions: tuple[Definition, ...]
    outputs: dict[str, Tensor]
    checks: tuple[Check, ...] = ()
    example: dict[str, int | float] = field(default_factory=dict)
    names: dict[Node, str] = field(default_factory=dict, compare=False, repr=False)
    declared: tuple[str, ...] = ()

    def definition(self, name: str) -> Definition:
        return next(d for d in self.definitions if d.name == name)

    def shape_of(self, name: str) -> tuple[Node, ...]:
        """The shape of any tensor of the graph, intermediate ones included."""
        for table in (self.tensors, self.outputs):
            if name in table:
                return table[name].shape
        return tuple(self.axes[a] for a in self.definition(name).axes)


def positive(node: Node, facts: Iterable[Node]) -> bool:
    """Is the value known to be > 0: by its form, or because `facts` (the required conditions) say so."""
    known = set(_positive_facts(facts))

    def go(n: Node) -> bool:
        match n:
            case Const(value=v):
                return not isinstance(v, bool) and v > 0
            case Apply(op="exp" | "exp2"):
                return False  # may underflow to 0
            case Apply(op="mul" | "div" | "add", operands=(a, b)):
                return go(a) and go(b)
            case Apply(op="sqrt" | "rsqrt", operands=(a,)):
                return go(a)
            case Cast(operand=a):
                return n.dtype.is_float and go(a)
        return n in known

    return go(node)


def _positive_facts(facts: Iterable[Node]) -> Iterable[Node]:
    for f in facts:
        match f:
            case Apply(op="lt", operands=(Const(value=v), x)) if v >= 0:
                yield x
            case Apply(op="le", operands=(Const(value=v), x)) if v > 0:
                yield x


def is_finite_const(node: Node) -> bool:
    return isinstance(node, Const) and not isinstance(node.value, bool) and math.isfinite(node.value)
