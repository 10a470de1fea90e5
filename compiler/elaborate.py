"""From syntax tree to tensor IR: parameters and extents, ranges, axes, statements, facts (DESIGN 2.1).

`elaborate` reports all errors of a kernel at once. Its graph still has absent values (`When`); canonicalize removes them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from ..dsl import syntax
from ..dsl.diagnostics import Diagnostics, refuse
from ..dsl.types import NAMES, DType
from . import tensor_ir as ir
from .affine import never_negative
from .bounds import bounds_checks
from .expressions import Declared, Expressions, Scope
from .operands import expect_bool, expect_integer, stored
from .ranges import Use, visible
from .spelling import brief
from .tensor_ir import Check, Definition, Graph, Node, ScalarParam, Tensor

NOWHERE = Scope({}, frozenset())


def elaborate(kernel: syntax.ProgramKernel, dtypes: Mapping[str, DType] | None = None) -> Graph:
    """The tensor IR of a checked kernel (`dsl.check`).

    `dtypes` chooses dtype parameters (`{"T": DType.F16}`), the first alternative otherwise.
    Raises `TileError` with every error of the kernel (codes E02xx ranges and indices, E03xx types, E04xx bounds).
    """
    sink = Diagnostics()
    declared = Declared(
        source=kernel.kernel.span.source,
        fns=kernel.program.fns,
        dtypes={**NAMES, **_chosen(kernel.kernel, dtypes or {})},
        sink=sink,
    )
    work = _Kernel(kernel.kernel, declared)
    work.signature()
    work.statements()
    checks = [*work.requirements(), *work.positive_extents()]
    example = work.example()
    sink.check()
    graph = work.graph(tuple(checks), example)
    bounds = bounds_checks(graph, sink)
    sink.check()
    return replace(graph, checks=_distinct([*graph.checks, *bounds]))


def _chosen(kernel: syntax.Kernel, dtypes: Mapping[str, DType]) -> dict[str, DType]:
    """The element type of each dtype parameter."""
    chosen: dict[str, DType] = {}
    parameters = {p.name.name: p for p in kernel.type_params if p.kind == "dtype"}
    for name in dtypes:
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            raise refuse(
                "E0308",
                f"`{kernel.name.name}` has no dtype parameter `{name}`; it has: {known}",
                kernel.name.span,
            )
    for name, parameter in parameters.items():
        allowed = [NAMES[a.name] for a in parameter.alternatives]
        chosen[name] = dtypes.get(name, allowed[0])
        if chosen[name] not in allowed:
            raise refuse(
                "E0308",
                f"`{name}` cannot be {chosen[name]}",
                parameter.span,
                help=f"choose one of {', '.join(map(str, allowed))}",
            )
    return chosen


def _distinct(checks: Iterable[Check]) -> tuple[Check, ...]:
    return tuple({(c.condition, c.kind): c for c in reversed(list(checks))}.values())[::-1]


# ---------------------------------------------------------------- order of statements


def in_order(
    statements: Sequence[syntax.Statement], fns: Iterable[str], given: Container[str]
) -> list[syntax.Statement]:
    """Statements after those they read; text order otherwise. Cycles were refused by check. What is read of a `given`
    parameter is what it held before the call, so nobody waits for its update."""
    owners = {s.target.name: s for s in statements if s.target.name not in given}
    done: dict[int, syntax.Statement] = {}
    open_: set[int] = set()
    stack = [(s, False) for s in reversed(statements)]
    while stack:
        statement, ready = stack.pop()
        if ready:
            done[id(statement)] = statement
        elif id(statement) not in open_:
            open_.add(id(statement))
            stack.append((statement, True))
            needed = dict.fromkeys(_reads(statement, fns))
            stack.extend((owners[n], False) for n in reversed(needed) if n in owners)
    return list(done.values())


def _reads(statement: syntax.Statement, fns: Iterable[str]) -> Iterable[str]:
    left = [i for i in statement.indices if not isinstance(i, syntax.BoundIndex)]
    for expr, _ in visible([statement.value, *left], fns):
        if isinstance(expr, syntax.Subscript):
            yield expr.tensor.name
        elif isinstance(expr, syntax.Name):
            yield expr.name


# ---------------------------------------------------------------- the kernel


class _Kernel:
    def __init__(self, kernel: syntax.Kernel, declared: Declared) -> None:
        self.kernel = kernel
        self.declared = declared
        self.sink = declared.sink
        self.expressions = Expressions(declared)
        self.updates: list[Definition] = []
        self.declared_extents = [p.name.name for p in kernel.type_params if p.kind == "extent"]

    # ------------------------------------------------------------ signature

    def signature(self) -> None:
        """Fills the tables of parameters, extents and outputs."""
        d = self.declared
        for p in self.kernel.params:
            if not p.shape:
                d.scalars[p.name.name] = ScalarParam(p.name.name, d.dtypes[p.dtype.name], p.span)
        shaped = [p for p in self.kernel.params if p.shape]
        d.extents.extend(self._bound_extents(shaped))
        for p in shaped:
            d.tensors[p.name.name] = Tensor(
                p.name.name, d.dtypes[p.dtype.name], self._shape(p), p.inout, p.span
            )
        for p in self.kernel.outputs:
            d.outputs[p.name.name] = Tensor(
                p.name.name, d.dtypes[p.dtype.name], self._shape(p), False, p.span
            )

    def _bound_extents(self, shaped: Sequence[syntax.Param]) -> list[str]:
        """Names that shapes bind, in text order: bare ones, then each alone in a linear expression; then declared ones."""
        names = dict.fromkeys(e.name for p in shaped for e in p.shape if isinstance(e, syntax.Name))
        bare = [n for n in names if n not in self.declared.scalars]
        solved: list[str] = []
        for entry in (e for p in shaped for e in p.shape if not isinstance(e, syntax.Name)):
            known = {*bare, *solved, *self.declared.scalars, *self.declared_extents}
            free = dict.fromkeys(
                e.name for e, _ in visible([entry], ()) if isinstance(e, syntax.Name) and e.name not in known
            )
            solved.extend(free)
        return list(dict.fromkeys([*bare, *solved, *self.declared_extents]))

    def _shape(self, param: syntax.Param) -> tuple[Node, ...]:
        what = f"the shape of `{param.name.name}`"
        nodes = [self.expressions.extent(e, NOWHERE, what) for e in param.shape]
        return tuple(n or ir.const(1, DType.I64) for n in nodes)

    # ------------------------------------------------------------ statements

    def statements(self) -> None:
        for statement in in_order(self.kernel.statements, self.declared.fns, self.declared.tensors):
            self._statement(statement)
            name = statement.target.name
            if name not in self.declared.definitions and name not in self.declared.tensors:
                self.declared.failed.add(name)

    def _statement(self, statement: syntax.Statement) -> None:
        d, name = self.declared, statement.target.name
        updates = name in d.tensors
        axes = self._update_axes(statement) if updates else self._definition_axes(statement)
        if axes is None:
            return
        scope = NOWHERE.with_axes(axes)
        value = self.expressions.evaluate(statement.value, scope)
        elements = self._elements(statement, scope) if updates else None
        declared = d.tensors.get(name) or d.outputs.get(name)
        dtype = declared.dtype if declared is not None else value.node.dtype
        node = stored(value, dtype, name, self.sink)
        if node is None or (updates and elements is None):
            return
        definition = Definition(
            name, tuple(axes.values()), node, dtype, elements, statement.op == "+=", statement.span
        )
        if updates:
            self.updates.append(definition)
            self._spreads(definition)
        else:
            d.definitions[name] = definition

    def _definition_axes(self, statement: syntax.Statement) -> dict[str, str] | None:
        """Axes of a definition; an output's declared shape gives the ranges, explicit ones must repeat it."""
        output = self.declared.outputs.get(statement.target.name)
        bound = [i for i in statement.indices if isinstance(i, syntax.BoundIndex)]
        return self._axes(statement, bound, dict(enumerate(output.shape)) if output is not None else {})

    def _axes(
        self, statement: syntax.Statement, bound: Sequence[syntax.BoundIndex], given: Mapping[int, Node]
    ) -> dict[str, str] | None:
        """The axis of each left index, by its name; `given` are extents that shapes give, by position."""
        wanted = [b.name.name for k, b in enumerate(bound) if b.extent is None and k not in given]
        uses = self.expressions.uses(wanted, [statement.value, *_left(statement)]) if wanted else {}
        axes: dict[str, str] = {}
        sound = True
        for k, b in enumerate(bound):
            extent = self._left_extent(b, given.get(k), uses)
            sound = sound and extent is not None
            if extent is not None:
                taken = frozenset(axes.values())
                axes[b.name.name] = self.declared.axis_for(b.name.name, extent, taken)
        return axes if sound else None

    def _left_extent(
        self, bound: syntax.BoundIndex, given: Node | None, uses: Mapping[str, list[Use] | None]
    ) -> Node | None:
        name = bound.name.name
        if bound.extent is None and given is not None:
            return given
        if bound.extent is None:
            return self.expressions.only_extent(bound.name, uses.get(name))
        explicit = self.expressions.extent(bound.extent, NOWHERE, f"the range of `{name}`")
        if explicit is not None and given is not None and explicit is not given:
            self.sink.error(
                "E0202",
                f"index `{name}` has two ranges: {brief(given)} and {brief(explicit)}",
                bound.span,
                note=f"the output's declared shape gives it the range {brief(given)}",
                help=f"leave the range out, or write `{name} in {brief(given)}`",
            )
            return None
        return explicit

    # ------------------------------------------------------------ updates

    def _update_axes(self, statement: syntax.Statement) -> dict[str, str] | None:
        """Axes of an update: its bare left indices, then the other indices that stand in left expressions."""
        d = self.declared
        shape = d.tensors[statement.target.name].shape
        bound: dict[str, syntax.BoundIndex] = {}
        given: dict[str, Node] = {}
        for entry, extent in zip(statement.indices, shape, strict=True):
            if isinstance(entry, syntax.BoundIndex) and not self._is_value(entry):
                bound.setdefault(entry.name.name, entry)
                given.setdefault(entry.name.name, extent)
        for expr, rebound in visible(_left(statement), d.fns):
            if isinstance(expr, syntax.Name) and expr.name not in rebound and not d.names(expr.name):
                bound.setdefault(expr.name, syntax.BoundIndex(expr.span, expr, None))
        order = list(bound.values())
        return self._axes(
            statement, order, {k: given[b.name.name] for k, b in enumerate(order) if b.name.name in given}
        )

    def _is_value(self, entry: syntax.BoundIndex) -> bool:
        """A bare name on the left of an update that is a scalar or an extent: a place, no index."""
        return entry.extent is None and (
            entry.name.name in self.declared.scalars or entry.name.name in self.declared.extents
        )

    def _elements(self, statement: syntax.Statement, scope: Scope) -> tuple[Node, ...] | None:
        nodes = []
        for entry in statement.indices:
            expr = entry.name if isinstance(entry, syntax.BoundIndex) else entry
            value = self.expressions.evaluate(expr, scope)
            what = f"an index of `{statement.target.name}`"
            nodes.append(value.node if expect_integer(value, what, self.sink) else None)
        return tuple(n for n in nodes if n is not None) if None not in nodes else None

    def _spreads(self, update: Definition) -> None:
        """`=` through a target that leaves out an axis writes one element many times."""
        assert update.target is not None
        used = ir.NO_AXES.union(*(n.axes for n in update.target))
        missing = [a for a in update.axes if a not in used]
        if missing and not update.accumulate:
            self.sink.error(
                "E0219",
                f"`{update.name}` is written several times: index `{missing[0]}` is not in its place",
                update.span,
                help="use `+=` to sum the values, or reduce them on the right side",
            )

    # ------------------------------------------------------------ facts

    def requirements(self) -> list[Check]:
        checks = []
        for require in self.kernel.requires:
            for condition in require.conditions:
                value = self.expressions.evaluate(condition, NOWHERE)
                if expect_bool(value, "`require`", self.sink):
                    checks.append(Check(value.node, "require", condition.span.text, condition.span))
        return checks

    def positive_extents(self) -> list[Check]:
        """Ranges that could be negative, differences and scalars, are checked at the call."""
        checks = []
        for axis, extent in self.declared.axes.items():
            if not never_negative(extent):
                condition = ir.apply("le", ir.const(0, DType.I64), extent)
                message = f"the range `{brief(extent)}` of index `{axis}` must not be negative"
                checks.append(Check(condition, "shape", message, extent.span))
        return checks

    def example(self) -> dict[str, int | float]:
        """Extents and scalars of the first `example` line; dtypes are the caller's choice."""
        settings: dict[str, int | float] = {}
        for setting in (s for e in self.kernel.examples[:1] for s in e.settings):
            if not (isinstance(setting.value, syntax.Name) and setting.value.name in NAMES):
                value = self.expressions.evaluate(setting.value, NOWHERE)
                if value.literal is not None:
                    settings[setting.name.name] = value.literal
                elif isinstance(value.node, ir.Const):  # true and false
                    settings[setting.name.name] = value.node.value
        return settings

    # ------------------------------------------------------------ the graph

    def graph(self, checks: tuple[Check, ...], example: dict[str, int | float]) -> Graph:
        d = self.declared
        live = _live([*d.definitions.values(), *self.updates], d.outputs)
        used = {n.axis for x in live for n in ir.walk(_roots(x)) if isinstance(n, ir.Index)}
        used |= {b for x in live for n in ir.walk(_roots(x)) if isinstance(n, ir.Reduce) for b in n.bound}
        used |= {a for x in live for a in x.axes}
        return Graph(
            name=self.kernel.name.name,
            order=tuple(p.name.name for p in self.kernel.params),
            tensors=d.tensors,
            scalars=d.scalars,
            extents=tuple(d.extents),
            declared=tuple(self.declared_extents),
            axes={a: e for a, e in d.axes.items() if a in used},
            definitions=tuple(live),
            outputs=d.outputs,
            checks=checks,
            example=example,
            names=d.local_names,
        )


def _left(statement: syntax.Statement) -> list[syntax.Expr]:
    return [i for i in statement.indices if not isinstance(i, syntax.BoundIndex)]


def _roots(definition: Definition) -> list[Node]:
    return [definition.value, *(definition.target or ())]


def _live(definitions: Sequence[Definition], outputs: Iterable[str]) -> list[Definition]:
    """Definitions that an output or an update needs, in the given order."""
    table = {d.name: d for d in definitions if d.target is None}
    wanted = [*(table[o] for o in outputs), *(d for d in definitions if d.target is not None)]
    seen: set[int] = set()
    while wanted:
        definition = wanted.pop()
        if id(definition) not in seen:
            seen.add(id(definition))
            reads = {n.tensor for n in ir.walk(_roots(definition)) if isinstance(n, ir.Read)}
            wanted.extend(table[r] for r in reads if r in table)
    return [d for d in definitions if id(d) in seen]
