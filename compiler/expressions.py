"""Expressions from syntax to tensor IR: names, operations, reductions, and `fn` inlined hygienically.

Every visit is a generator that yields the sub-expressions it needs and is sent their values, so that the depth of an
expression costs memory and no recursion.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce as fold
from itertools import pairwise

from ..dsl import syntax
from ..dsl.diagnostics import Diagnostics
from ..dsl.source import Source, Span
from ..dsl.types import NAMES, DType
from . import tensor_ir as ir
from .operands import Value, expect_bool, expect_integer, literal, operate, reduction, refused
from .ranges import Use, bare_uses, is_reduction, mentioned, the_extent
from .spelling import spell
from .tensor_ir import ARITY, Node

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
        stack = [self._visit(expr, scope)]
        sent: Value | None = None
        while True:
            try:
                request = next(stack[-1]) if sent is None else stack[-1].send(sent)
            except StopIteration as done:
                stack.pop()
                sent = done.value
                if not stack:
                    assert isinstance(sent, Value)
                    return sent
            else:
                stack.append(self._visit(*request))
                sent = None

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
        span = self._span(expr, scope)
        match scope.names.get(expr.name):
            case Value() as value:
                return value
            case Axis(name=axis):
                return Value(ir.index(axis, span))
            case Set():
                self.sink.error(
                    "E0205",
                    f"`{expr.name}` stands for a set of indices, not for a value",
                    span,
                    help=f"use it in brackets: `sum[{expr.name}](…)`",
                )
                return refused(span)
        known = None if scope.fn else self._kernel_name(expr.name, span)
        if known is None and expr.name == "inf":
            return literal(math.inf, span)
        return known or self._unknown(expr.name, span, scope)

    def _kernel_name(self, name: str, span: Span) -> Value | None:
        """A scalar parameter, an extent or a tensor without indices; declared parameters win over extents."""
        d = self.declared
        if name in d.scalars:
            return Value(ir.scalar(name, d.scalars[name].dtype, span))
        if name in d.extents:
            return Value(ir.extent(name, span))
        if name in d.failed:
            return refused(span)
        shape = d.shape_of(name)
        if shape is None:
            return None
        if shape:
            return self._rank_error(name, 0, len(shape), span)
        return Value(ir.read(name, (), d.dtype_of(name), span))

    def _unknown(self, name: str, span: Span, scope: Scope) -> Value:
        inside = f" inside `{scope.fn}`" if scope.fn else ""
        known = scope.indices() or ["none"]
        self.sink.error(
            "E0203",
            f"`{name}` is neither an index in scope nor a declared name{inside}",
            span,
            note=f"indices in scope: {', '.join(known)}",
            help=f"bind it on the left side, or in a reduction: `sum[{name}](…)`",
        )
        return refused(span)

    # ------------------------------------------------------------ reads and operations

    def _subscript(self, expr: syntax.Subscript, scope: Scope) -> Visit:
        name, d, span = expr.tensor.name, self.declared, self._span(expr, scope)
        indices = []
        for index in expr.indices:
            value = yield index, scope
            indices.append(value)
        if name in d.failed:
            return refused(span)
        shape = None if scope.fn else d.shape_of(name)
        if shape is None:
            return self._no_tensor(name, span, scope)
        if len(shape) != len(indices):
            return self._rank_error(name, len(indices), len(shape), span)
        sound = [expect_integer(v, f"an index of `{name}`", span, self.sink) for v in indices]
        if not all(sound):
            return refused(span)
        return Value(ir.read(name, (v.node for v in indices), d.dtype_of(name), span))

    def _no_tensor(self, name: str, span: Span, scope: Scope) -> Value:
        why = f"`fn {scope.fn}` sees its own parameters only" if scope.fn else "only tensors take indices"
        self.sink.error("E0206", f"`{name}` is no tensor here", span, note=why)
        return refused(span)

    def _rank_error(self, name: str, have: int, want: int, span: Span) -> Value:
        self.sink.error(
            "E0207",
            f"`{name}` has {want} {'axis' if want == 1 else 'axes'}, but {have or 'no'} "
            f"{'index is' if have == 1 else 'indices are'} given",
            span,
            help=f"write `{name}[{', '.join('ijkabcdefgh'[:want])}]`" if want else f"write `{name}`",
        )
        return refused(span)

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
            return self._cast(self.declared.dtypes[name], values, span)
        return self._operation(name, values, span)

    def _cast(self, dtype: DType, values: Sequence[Value], span: Span) -> Value:
        if len(values) != 1:
            self.sink.error("E0208", f"a cast takes one value, not {len(values)}", span)
            return refused(span)
        value = values[0]
        return value if value.bad else Value(ir.cast_to(value.node, dtype, span))

    def _operation(self, name: str, values: list[Value], span: Span) -> Value:
        if name not in ARITY or name in _WORDLESS:
            self.sink.error("E0209", f"`{name}` is no function, operation or element type", span)
            return refused(span)
        if name in ("min", "max") and len(values) > 2:
            return fold(lambda a, b: operate(name, (a, b), span, self.sink), values)
        if len(values) != ARITY[name]:
            self.sink.error("E0208", f"`{name}` takes {ARITY[name]} values, not {len(values)}", span)
            return refused(span)
        return operate(name, values, span, self.sink)

    # ------------------------------------------------------------ brackets

    def _bracket_call(self, expr: syntax.BracketCall, scope: Scope) -> Visit:
        reducing = is_reduction(expr, self.declared.fns)
        inner, sets = self._bind(expr, scope, reducing)
        span, name = self._span(expr, scope), expr.function.name
        predicate: Value | None = None
        if expr.predicate is not None:
            predicate = yield expr.predicate, inner
            if not expect_bool(predicate, "a predicate", predicate.node.span, self.sink):
                predicate = refused(span)
        values = []
        for argument in expr.arguments:
            value = yield argument, inner
            values.append(value)
        if sets is None or (predicate is not None and predicate.bad):
            return refused(span)
        sets = [Set(s.axes, conjunction(s.predicate, predicate.node if predicate else None)) for s in sets]
        if reducing:
            return self._reduce(name, sets, values, span)
        if name not in self.declared.fns:
            self.sink.error("E0209", f"`{name}` is no function or reduction", span)
            return refused(span)
        result = yield from self._inline(self.declared.fns[name], values, sets, inner, span)
        return self._closed(result, sets, scope, name, span)

    def _reduce(self, name: str, sets: Sequence[Set], values: list[Value], span: Span) -> Value:
        if len(values) != 1:
            self.sink.error("E0208", f"`{name}` reduces one value, not {len(values)}", span)
            return refused(span)
        axes = [a for s in sets for a in s.axes]
        predicate = fold(conjunction, (s.predicate for s in sets), None)
        return reduction(name, axes, values[0], predicate, span, self.sink)

    def _closed(self, result: Value, sets: Sequence[Set], scope: Scope, name: str, span: Span) -> Value:
        """A result that still runs over the bracket's indices: absent outside the set, and in need of a binder."""
        free = [a for s in sets for a in s.axes if a in result.node.axes]
        if result.bad or not free:
            return result
        loose = [a for a in free if a not in scope.taken]
        if loose:
            self.sink.error(
                "E0210",
                f"the result of `{name}` still depends on index `{loose[0]}`, which nothing binds",
                span,
                help=f"put `{loose[0]}` on the left side, or reduce it: `sum[{loose[0]}]({name}[…](…))`",
            )
            return refused(span)
        predicate = fold(conjunction, dict.fromkeys(s.predicate for s in sets), None)
        return result if predicate is None else Value(ir.when(result.node, predicate, span))

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
            if name in sets:
                self.sink.error("E0211", f"index `{name}` is bound twice in one bracket", bound.name.span)
            elif isinstance(entry, Set):
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
        if uses is None:
            return None
        return the_extent(bound.name, uses, self.declared.extents, spell, self.sink)

    def _agrees(self, bound: syntax.BoundIndex, axis: str, scope: Scope) -> None:
        """An explicit range on an index that is bound already must repeat its extent."""
        if bound.extent is None:
            return
        extent, have = (
            self.extent(bound.extent, scope, f"the range of `{bound.name.name}`"),
            self.declared.axes[axis],
        )
        if extent is not None and extent is not have:
            self.sink.error(
                "E0202",
                f"index `{bound.name.name}` has two ranges: {spell(have)} and {spell(extent)}",
                bound.span,
                help="use another name for the index here",
            )

    def extent(self, expr: syntax.Expr, scope: Scope, what: str) -> Node | None:
        """An integer expression of extents and scalars, or None after an error."""
        value = self.evaluate(expr, scope)
        if value.bad or not expect_integer(value, what, expr.span, self.sink):
            return None
        if value.node.axes or any(isinstance(n, ir.Read) for n in ir.walk([value.node])):
            self.sink.error(
                "E0212",
                f"{what} depends on an index or a tensor",
                expr.span,
                help="a range is made of extents and scalars; cut the set with a predicate: `n | n < length[b]`",
            )
            return None
        return value.node

    # ------------------------------------------------------------ fn

    def _inline(
        self, fn: syntax.Fn, values: Sequence[Value], sets: Sequence[Set], scope: Scope, span: Span
    ) -> Generator[tuple[syntax.Expr, Scope], Value, Value]:
        """The body of `fn` with its parameters replaced by values and its brackets by sets; its locals are its own."""
        names = self._parameters(fn, values, sets, span)
        if names is None:
            return refused(span)
        call = scope.call if scope.call is not None and span.source is not self.declared.source else span
        body = Scope(names, scope.taken, fn.name.name, call)
        for local in fn.locals:
            value = yield local.value, body
            body = replace(body, names={**body.names, local.name.name: value})
            if value.node.args:
                self.declared.local_names.setdefault(value.node, local.name.name)
        result = yield fn.result, body
        return result

    def _parameters(
        self, fn: syntax.Fn, values: Sequence[Value], sets: Sequence[Set], span: Span
    ) -> dict[str, Entry] | None:
        if len(values) != len(fn.parameters) or not _bracket_fits(fn, sets):
            self.sink.error(
                "E0208",
                f"`{fn.name.name}` takes {len(fn.parameters)} values and {len(fn.bracket)} bracket indices, "
                f"not {len(values)} and {len(sets)}",
                span,
            )
            return None
        names: dict[str, Entry] = {p.name: v for p, v in zip(fn.parameters, values, strict=True)}
        if len(fn.bracket) == 1:
            predicate = fold(conjunction, dict.fromkeys(s.predicate for s in sets), None)
            return {**names, fn.bracket[0].name: Set(tuple(a for s in sets for a in s.axes), predicate)}
        return {**names, **{b.name: s for b, s in zip(fn.bracket, sets, strict=True)}}


def _bracket_fits(fn: syntax.Fn, sets: Sequence[Set]) -> bool:
    return bool(sets) if len(fn.bracket) == 1 else len(sets) == len(fn.bracket)


def _ready(value: Value) -> Visit:
    """A visit that needs nothing."""
    yield from ()
    return value


def conjunction(a: Node | None, b: Node | None) -> Node | None:
    """`a and b`, where None is true."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return ir.apply("and", a, b, span=a.span)


_WORDLESS = frozenset(
    {"add", "sub", "mul", "div", "floordiv", "mod", "neg", "lt", "le", "eq", "ne", "and", "or", "not"}
)
