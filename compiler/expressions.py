"""Expressions from syntax to tensor IR: names, operations, reductions, and `fn` inlined hygienically.

Names, arity and ranks were checked before (`dsl.check`); what is refused here needs types or extents. Every visit is a
generator that yields the sub-expressions it needs and is sent their values, so that the depth of an expression costs memory
and no recursion.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import field, replace
from functools import reduce as fold
from itertools import pairwise

from ..dsl import syntax
from ..dsl.diagnostics import Diagnostics
from ..dsl.records import dataclass
from ..dsl.source import Source, Span
from ..dsl.types import NAMES, DType
from . import tensor_ir as ir
from .operands import Value, expect_bool, expect_integer, literal, operate, reduction, refused
from .ranges import Use, bare_uses, is_reduction, mentioned, the_extent
from .spelling import brief
from .tensor_ir import Node

BINARY = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "div",
    "//": "floordiv",
    "%": "mod",
    "and": "and",
    "or": "or",
    "<": "lt",
    "<=": "le",
    "==": "eq",
    "!=": "ne",
}
SWAPPED = {">": "lt", ">=": "le"}


@dataclass(frozen=True)
class Set:
    """What a bracket parameter of a `fn` stands for: axes, and the predicate that cuts the set."""

    axes: tuple[str, ...]
    predicate: Node | None


@dataclass(frozen=True)
class Axis:
    """An index in scope and the axis it runs over."""

    name: str


Entry = Value | Axis | Set


@dataclass(frozen=True)
class Scope:
    """Names visible to an expression. `taken` are the axes in scope; `fn` and `call` are set inside an inlined `fn`."""

    names: Mapping[str, Entry]
    taken: frozenset[str]
    fn: str | None = None
    call: Span | None = None

    def with_axes(self, axes: Mapping[str, str]) -> Scope:
        entries = {name: Axis(axis) for name, axis in axes.items()}
        return replace(self, names={**self.names, **entries}, taken=self.taken | frozenset(axes.values()))

    def indices(self) -> list[str]:
        return [n for n, e in self.names.items() if isinstance(e, Axis)]


Visit = Generator[tuple[syntax.Expr, Scope], Value, Value]


@dataclass
class Declared:
    """What a kernel declares, filled while its signature and statements are elaborated."""

    source: Source
    fns: Mapping[str, syntax.Fn]
    dtypes: dict[str, DType]
    sink: Diagnostics
    tensors: dict[str, ir.Tensor] = field(default_factory=dict)
    scalars: dict[str, ir.ScalarParam] = field(default_factory=dict)
    extents: list[str] = field(default_factory=list)
    axes: dict[str, Node] = field(default_factory=dict)
    outputs: dict[str, ir.Tensor] = field(default_factory=dict)
    definitions: dict[str, ir.Definition] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    local_names: dict[Node, str] = field(default_factory=dict)

    def shape_of(self, name: str) -> tuple[Node, ...] | None:
        """The shape of a tensor that can be read, None if it is unknown or was refused."""
        if name in self.tensors:
            return self.tensors[name].shape
        if name not in self.definitions:
            return None
        if name in self.outputs:
            return self.outputs[name].shape
        return tuple(self.axes[a] for a in self.definitions[name].axes)

    def dtype_of(self, name: str) -> DType:
        return self.tensors[name].dtype if name in self.tensors else self.definitions[name].dtype

    def axis_for(self, name: str, extent: Node, taken: frozenset[str]) -> str:
        """The axis of an index: shared where name and extent agree and it is not in use, fresh (`n_1`) otherwise."""
        candidate, count = name, 0
        while (
            candidate in taken
            or self.axes.get(candidate, extent) is not extent
            or self._clashes(candidate, name)
        ):
            count += 1
            candidate = f"{name}_{count}"
        self.axes.setdefault(candidate, extent)
        return candidate

    def _clashes(self, candidate: str, name: str) -> bool:
        """A made-up name must not be one of the user's."""
        return candidate != name and candidate not in self.axes and self.names(candidate)

    def names(self, name: str) -> bool:
        tables = (self.tensors, self.scalars, self.extents, self.outputs, self.definitions, self.failed)
        return any(name in table for table in tables)


class Expressions:
    """Elaborates expressions of one kernel; errors go to `declared.sink`."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.sink = declared.sink

    def evaluate(self, expr: syntax.Expr, scope: Scope) -> Value:
        """The value of an expression; literals stay literals."""
        stack = [(expr, scope, self._visit(expr, scope))]
        sent: Value | None = None
        while stack:
            at, inner, visit = stack[-1]
            try:
                request = next(visit) if sent is None else visit.send(sent)
            except StopIteration as done:
                stack.pop()
                sent = self._placed(done.value, at, inner)
            else:
                stack.append((*request, self._visit(*request)))
                sent = None
        assert sent is not None
        return sent

    def _placed(self, value: Value, expr: syntax.Expr, scope: Scope) -> Value:
        """The value with the place of its text, which equal expressions elsewhere do not share."""
        return value if value.at is not None else replace(value, at=self._span(expr, scope))

    def _visit(self, expr: syntax.Expr, scope: Scope) -> Visit:
        match expr:
            case syntax.Subscript():
                return self._subscript(expr, scope)
            case syntax.Unary():
                return self._unary(expr, scope)
            case syntax.Binary():
                return self._binary(expr, scope)
            case syntax.Compare():
                return self._compare(expr, scope)
            case syntax.Call():
                return self._call(expr, scope)
            case syntax.BracketCall():
                return self._bracket_call(expr, scope)
        return _ready(self._leaf(expr, scope))

    def _span(self, node: syntax.Node, scope: Scope) -> Span:
        """Where a node points to: into a `fn` of the same file, to the call where the `fn` is of another."""
        foreign = scope.call is not None and node.span.source is not self.declared.source
        return scope.call if foreign and scope.call is not None else node.span

    # ------------------------------------------------------------ names and literals

    def _leaf(self, expr: syntax.Expr, scope: Scope) -> Value:
        span = self._span(expr, scope)
        match expr:
            case syntax.Number():
                return literal(expr.value, span)
            case syntax.Boolean():
                return Value(ir.const(expr.value, DType.BOOL, span))
            case syntax.Name():
                return self._name(expr, scope)
        raise TypeError(f"{type(expr).__name__} is no expression")

    def _name(self, expr: syntax.Name, scope: Scope) -> Value:
        """An index or a value in scope; else a scalar, an extent or a tensor without axes. Parameters win over extents."""
        d, span = self.declared, self._span(expr, scope)
        match scope.names.get(expr.name):
            case Value() as value:
                return value
            case Axis(name=axis):
                return Value(ir.index(axis, span))
        if expr.name == "inf":
            return literal(math.inf, span)
        if expr.name in d.scalars:
            return Value(ir.scalar(expr.name, d.scalars[expr.name].dtype, span))
        if expr.name in d.extents:
            return Value(ir.extent(expr.name, span))
        return self._element(expr.name, (), span)

    # ------------------------------------------------------------ reads and operations

    def _subscript(self, expr: syntax.Subscript, scope: Scope) -> Visit:
        indices = []
        for index in expr.indices:
            value = yield index, scope
            indices.append(value)
        return self._element(expr.tensor.name, indices, self._span(expr, scope))

    def _element(self, name: str, indices: Sequence[Value], span: Span) -> Value:
        d = self.declared
        sound = [expect_integer(v, f"an index of `{name}`", self.sink) for v in indices]
        if name in d.failed or not all(sound):
            return refused(span)
        return Value(ir.read(name, (v.node for v in indices), d.dtype_of(name), span))

    def _unary(self, expr: syntax.Unary, scope: Scope) -> Visit:
        value = yield expr.operand, scope
        return operate("not" if expr.op == "not" else "neg", (value,), self._span(expr, scope), self.sink)

    def _binary(self, expr: syntax.Binary, scope: Scope) -> Visit:
        left = yield expr.left, scope
        right = yield expr.right, scope
        return operate(BINARY[expr.op], (left, right), self._span(expr, scope), self.sink)

    def _compare(self, expr: syntax.Compare, scope: Scope) -> Visit:
        values = []
        for operand in expr.operands:
            value = yield operand, scope
            values.append(value)
        span = self._span(expr, scope)
        links = [self._link(op, *pair, span) for op, pair in zip(expr.ops, pairwise(values), strict=True)]
        return fold(lambda a, b: operate("and", (a, b), span, self.sink), links)

    def _link(self, op: str, left: Value, right: Value, span: Span) -> Value:
        if op in SWAPPED:
            return operate(SWAPPED[op], (right, left), span, self.sink)
        return operate(BINARY[op], (left, right), span, self.sink)

    def _call(self, expr: syntax.Call, scope: Scope) -> Visit:
        values = []
        for argument in expr.arguments:
            value = yield argument, scope
            values.append(value)
        name, span = expr.function.name, self._span(expr, scope)
        if name in self.declared.fns:
            result = yield from self._inline(self.declared.fns[name], values, (), scope, span)
            return result
        if name in (NAMES if scope.fn else self.declared.dtypes):
            dtype = self.declared.dtypes[name]
            return values[0] if values[0].bad else Value(ir.cast_to(values[0].node, dtype, span))
        if name in ("min", "max"):
            return fold(lambda a, b: operate(name, (a, b), span, self.sink), values)
        return operate(name, values, span, self.sink)

    # ------------------------------------------------------------ brackets

    def _bracket_call(self, expr: syntax.BracketCall, scope: Scope) -> Visit:
        reducing = is_reduction(expr, self.declared.fns)
        inner, sets = self._bind(expr, scope, reducing)
        span, name = self._span(expr, scope), expr.function.name
        predicate: Value | None = None
        if expr.predicate is not None:
            predicate = yield expr.predicate, inner
            if not expect_bool(predicate, "a predicate", self.sink):
                predicate = refused(span)
        values = []
        for argument in expr.arguments:
            value = yield argument, inner
            values.append(value)
        if sets is None or (predicate is not None and predicate.bad):
            return refused(span)
        sets = [Set(s.axes, conjunction(s.predicate, predicate.node if predicate else None)) for s in sets]
        if reducing:
            axes = [a for s in sets for a in s.axes]
            return reduction(name, axes, values[0], _predicate(sets), span, self.sink)
        result = yield from self._inline(self.declared.fns[name], values, sets, inner, span)
        return _cut(result, sets, span)

    def _bind(self, call: syntax.BracketCall, scope: Scope, reducing: bool) -> tuple[Scope, list[Set] | None]:
        """The scope inside the brackets, and what each bound name stands for; None after an error.

        A reduction binds anew. A `fn` leaves an index that is in scope to whoever bound it.
        """
        sets: dict[str, Set] = {}
        new: dict[str, str] = {}
        failed = False
        ranges = self._inferred(call, scope, reducing)
        for bound in call.bound:
            name = bound.name.name
            entry = scope.names.get(name)
            if isinstance(entry, Set):
                sets[name] = entry
            elif isinstance(entry, Axis) and not reducing:
                sets[name] = Set((entry.name,), None)
                self._agrees(bound, entry.name, scope)
            else:
                extent = self._range(bound, ranges.get(name), scope)
                failed = failed or extent is None
                taken = scope.taken | frozenset(new.values())
                new[name] = self.declared.axis_for(name, extent or ir.const(1, DType.I64), taken)
                sets[name] = Set((new[name],), None)
        return scope.with_axes(new), None if failed else list(sets.values())

    def _inferred(
        self, call: syntax.BracketCall, scope: Scope, reducing: bool
    ) -> dict[str, list[Use] | None]:
        wanted = [
            b.name.name
            for b in call.bound
            if b.extent is None and (reducing or not isinstance(scope.names.get(b.name.name), Axis))
        ]
        roots = [*call.arguments, *([call.predicate] if call.predicate is not None else [])]
        return self.uses(wanted, roots) if wanted else {}

    def uses(self, names: list[str], roots: Sequence[syntax.Expr]) -> dict[str, list[Use] | None]:
        """What each index subscripts bare; None where that may be a tensor that was refused, so that all is said."""
        d = self.declared
        found = bare_uses(names, roots, d.fns, d.shape_of)
        silent = mentioned(names, roots, d.fns, d.failed) if d.failed else set()
        return {n: None if n in silent and not u else u for n, u in found.items()}

    def _range(self, bound: syntax.BoundIndex, uses: list[Use] | None, scope: Scope) -> Node | None:
        if bound.extent is not None:
            return self.extent(bound.extent, scope, f"the range of `{bound.name.name}`")
        return self.only_extent(bound.name, uses)

    def only_extent(self, name: syntax.Name, uses: list[Use] | None) -> Node | None:
        """The one extent of what an index subscripts, None after an error."""
        return None if uses is None else the_extent(name, uses, self.declared.extents, brief, self.sink)

    def _agrees(self, bound: syntax.BoundIndex, axis: str, scope: Scope) -> None:
        """An explicit range on an index that is bound already must repeat its extent."""
        if bound.extent is None:
            return
        have = self.declared.axes[axis]
        extent = self.extent(bound.extent, scope, f"the range of `{bound.name.name}`")
        if extent is not None and extent is not have:
            self.sink.error(
                "E0202",
                f"index `{bound.name.name}` has two ranges: {brief(have)} and {brief(extent)}",
                bound.span,
                help="use another name for the index here",
            )

    def extent(self, expr: syntax.Expr, scope: Scope, what: str) -> Node | None:
        """An integer expression of extents and scalars, or None after an error."""
        value = self.evaluate(expr, scope)
        return value.node if expect_integer(value, what, self.sink) else None

    # ------------------------------------------------------------ fn

    def _inline(
        self, fn: syntax.Fn, values: Sequence[Value], sets: Sequence[Set], scope: Scope, span: Span
    ) -> Generator[tuple[syntax.Expr, Scope], Value, Value]:
        """The body of `fn` with its parameters replaced by values and its brackets by sets; its locals are its own."""
        call = scope.call if scope.call is not None and span.source is not self.declared.source else span
        body = Scope(_parameters(fn, values, sets), scope.taken, fn.name.name, call)
        for local in fn.locals:
            value = yield local.value, body
            body = replace(body, names={**body.names, local.name.name: value})
            if value.node.args:
                self.declared.local_names.setdefault(value.node, local.name.name)
        result = yield fn.result, body
        return result


def _parameters(fn: syntax.Fn, values: Sequence[Value], sets: Sequence[Set]) -> dict[str, Entry]:
    """What the names of a `fn` stand for. Its only bracket parameter stands for all indices of the call."""
    names: dict[str, Entry] = {p.name: v for p, v in zip(fn.parameters, values, strict=True)}
    if len(fn.bracket) == 1:
        sets = [Set(tuple(a for s in sets for a in s.axes), _predicate(sets))]
    return {**names, **{b.name: s for b, s in zip(fn.bracket, sets, strict=True)}}


def _cut(result: Value, sets: Sequence[Set], span: Span) -> Value:
    """A result that still runs over the indices of a call's bracket is absent outside their set."""
    predicate = _predicate(sets)
    free = any(a in result.node.axes for s in sets for a in s.axes)
    if result.bad or predicate is None or not free:
        return result
    return Value(ir.when(result.node, predicate, span))


def _predicate(sets: Sequence[Set]) -> Node | None:
    """The condition of all sets together, None where there is none."""
    return fold(conjunction, dict.fromkeys(s.predicate for s in sets), None)


def _ready(value: Value) -> Visit:
    """A visit that needs nothing."""
    yield from ()
    return value


def conjunction(a: Node | None, b: Node | None) -> Node | None:
    """`a and b`, where None is true."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return ir.apply("and", a, b, span=a.span)
