"""What calls of a hand-written tile program need: its signature, and the checks that keep every access inside its tensor.

The bounds rule of the definition form (`bounds.py`) does the work: reads and writes become reads of the tensor IR over the
axes that are open where they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from ..dsl.diagnostics import Diagnostics, refuse
from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType
from . import tensor_ir as t
from . import tile_ir as tile
from .bounds import bounds_checks
from .codegen.placement import data_dependent
from .tensor_ir import Graph, Node
from .tile_ir import Expr, Param, TileModule, TileProgram
from .tile_source import TileText

DATA = "…"
"""Stands for what tensors hold, in subscripts."""


def signature(text: TileText) -> Graph:
    """The graph of a tile text's parameters: no definitions, but extents, outputs and the checks of each call.

    A tensor is an output if the first program that names it only writes it. Raises `TileError`, E0401 to E0403 for an
    access that may leave its tensor and E0615 for parameters that no call could give.
    """
    module = text.module
    scalars = {s.name: t.ScalarParam(s.name, s.dtype) for p in module.programs for s in p.scalars}
    scratch = {s.name for s in module.scratch}
    inputs: dict[str, t.Tensor] = {}
    outputs: dict[str, t.Tensor] = {}
    for p in (x for program in module.programs for x in program.params if x.name not in scratch):
        _tensor(p, text.span, inputs, outputs)
    extents = tuple(dict.fromkeys(e for p in module.programs for e in p.extents))
    bound = _bound(inputs)
    order = tuple(n for n in text.order if n in inputs or n in scalars)
    graph = Graph(
        name=module.name, order=order, tensors=inputs, scalars=scalars, extents=extents, axes={}, definitions=(),
        outputs=outputs, example=dict(text.example), declared=tuple(e for e in extents if e not in bound),
    )  # fmt: skip
    sink = Diagnostics()
    checks = [check for p in module.programs for check in _Accesses(p, module, graph).checks(sink)]
    sink.check()
    return replace(graph, checks=tuple(dict.fromkeys((*_requirements(text, graph), *checks))))


def _tensor(p: Param, span: Span, inputs: dict[str, t.Tensor], outputs: dict[str, t.Tensor]) -> None:
    if p.name in outputs:
        return
    shape = tuple(size(x) for x in p.shape)
    if p.mode == "out" and p.name not in inputs:
        outputs[p.name] = t.Tensor(p.name, p.dtype, shape)
        return
    if not shape:
        raise refuse("E0615", f"`{p.name}` has no axes: a number is passed as `{p.name}: {p.dtype}`", span)
    written = p.mode != "in" or (p.name in inputs and inputs[p.name].inout)
    inputs[p.name] = t.Tensor(p.name, p.dtype, shape, written)


def size(e: Expr) -> Node:
    """An expression of extents and scalars as a node."""
    return _Convert({}, {}, {}, {}).node(e)


def _bound(inputs: Mapping[str, t.Tensor]) -> frozenset[str]:
    """Extents that some shape gives: bare, or as the one unknown of a sum or a multiple."""
    entries = [n for x in inputs.values() for n in x.shape]
    found = {n.name for n in entries if isinstance(n, t.Extent)}
    for n in entries:
        unknown = {x.name for x in t.walk([n]) if isinstance(x, t.Extent)} - found
        linear = all(not isinstance(x, t.Apply) or x.op in ("add", "sub") for x in t.walk([n]))
        found |= unknown if len(unknown) == 1 and linear else set()
    return frozenset(found)


def _requirements(text: TileText, graph: Graph) -> list[t.Check]:
    return [
        t.Check(_condition(r.condition, graph, r.span), "require", r.span.text, r.span)
        for r in text.requirements
    ]


def _condition(e: Expr, graph: Graph, span: Span) -> Node:
    """A condition whose names were read before anything was declared: each is an extent or a scalar."""
    names: dict[str, Node] = {n: t.scalar(n, s.dtype) for n, s in graph.scalars.items()}
    names |= {n: t.extent(n) for n in graph.extents}
    unknown = [
        x.name for x in tile.subexpressions(e) if isinstance(x, tile.ScalarRef) and x.name not in names
    ]
    if unknown:
        raise refuse("E0603", f"`{unknown[0]}` is neither an extent nor a scalar", span)
    node = _Convert({}, {}, {}, names).node(e)
    if node.dtype is not DType.BOOL:
        raise refuse("E0611", "`require` states a condition", span, help="such as `require H % G == 0`")
    return node


# ---------------------------------------------------------------- expressions as nodes


@dataclass
class _Convert:
    """Tile expressions to nodes: `axes` names each open axis, `values` has the nodes of names."""

    axes: dict[str, str]
    values: dict[str, Node]
    dtypes: Mapping[str, DType]
    scalars: Mapping[str, Node]

    def node(self, root: Expr) -> Node:
        done: list[Node] = []
        stack: list[tuple[Expr, bool]] = [(root, False)]
        while stack:
            e, ready = stack.pop()
            below = tile.operands(e)
            if not ready:
                stack.append((e, True))
                stack.extend((x, False) for x in reversed(below))
                continue
            args = done[len(done) - len(below) :]
            del done[len(done) - len(below) :]
            done.append(self.one(e, args))
        return done[0]

    def one(self, e: Expr, args: list[Node]) -> Node:
        match e:
            case tile.Const(value=v, dtype=dtype):
                return t.const(v, dtype)
            case tile.Name(name=n):
                return self.values[n]
            case tile.ScalarRef(name=n):
                return self.scalars[n] if n in self.scalars else t.scalar(n, DType.I64)
            case tile.ExtentRef(name=n):
                return t.extent(n)
            case tile.AxisIndex(axis=a):
                return t.index(self.axes[a])
            case tile.Load(tensor=name):
                return t.read(name, args, self.dtypes[name])
            case tile.Apply(op="fma"):
                return t.apply("add", t.apply("mul", args[0], args[1]), args[2])
            case tile.Apply(op=op):
                return t.apply(op, *args)
            case tile.Cast(dtype=dtype):
                return t.cast_to(args[0], dtype)
            case tile.Dot(over=over):
                return t.reduce("sum", (self.axes[a] for a in over), t.apply("mul", *args))
            case tile.Reduce(fn=fn, over=over):
                return t.reduce(fn, (self.axes[a] for a in over), args[0])
            case tile.Fill():
                return args[0]


# ---------------------------------------------------------------- accesses


@dataclass
class _Accesses:
    """The statements of one program as definitions over the axes open where they stand."""

    program: TileProgram
    module: TileModule
    graph: Graph
    axes: dict[str, Node] = field(default_factory=dict)
    found: list[t.Definition] = field(default_factory=list)
    data: frozenset[str] = frozenset()

    def checks(self, sink: Diagnostics) -> list[t.Check]:
        self.data = data_dependent(self.program)
        scalars = {s.name: t.scalar(s.name, s.dtype) for s in self.program.scalars}
        dtypes = {p.name: p.dtype for p in self.program.params}
        convert = _Convert({}, {}, dtypes, scalars)
        for w in self.program.whole:
            self.open(w.name, w.extent, convert)
        self.body(self.program.body, convert, ())
        scratch = {s.name: s for s in self.module.scratch}
        known = {**self.graph.tensors, **self.graph.outputs}
        local = {p.name: t.Tensor(p.name, p.dtype, tuple(map(size, p.shape))) for p in self.program.params}
        local[DATA] = t.Tensor(DATA, DType.I64, ())
        tensors = {n: known[n] if n in known and n not in scratch else x for n, x in local.items()}
        work = replace(
            self.graph, tensors=tensors, axes=self.axes, definitions=tuple(self.found), outputs={}, scalars={}
        )
        return [check for d in self.found for check in self.definition(work, d, sink)]

    def definition(self, work: Graph, d: t.Definition, sink: Diagnostics) -> list[t.Check]:
        """The checks of one statement; what is wrong in it stands at that statement."""
        found = Diagnostics()
        checks = bounds_checks(replace(work, definitions=(d,)), found)
        sink.add(*(replace(x, span=d.span) for x in found.found))
        return [replace(c, span=d.span) for c in checks]

    def open(self, name: str, extent: Expr, convert: _Convert) -> Node:
        """A new axis; a name that a sibling loop has too gets a number."""
        unique, i = name, 2
        while unique in self.axes:
            unique, i = f"{name}_{i}", i + 1
        node = convert.node(extent)
        if node.axes or any(isinstance(x, t.Read | t.Carried) for x in t.walk([node])):
            raise refuse("E0615", f"the extent of `{name}` must be made of extents and scalars", None,
                         help="bounds that depend on more go after `from` and `to`")  # fmt: skip
        self.axes[unique] = node
        convert.axes[name] = unique
        return t.index(unique)

    def body(self, body: tuple[tile.Stmt, ...], convert: _Convert, guards: tuple[Node, ...]) -> None:
        for s in body:
            match s:
                case tile.Let(name=name, value=value, span=span):
                    convert.values[name] = self.named(name, self.reads(value, convert, guards, span))
                case tile.Store(tensor=name, subscripts=subscripts, value=value, span=span):
                    self.reads(value, convert, guards, span)
                    self.reads(tile.Load(name, subscripts), convert, guards, span)
                case tile.Grid(axes=axes):
                    inner = self.scope(convert)
                    self.body(s.body, inner, (*guards, *(g for a in axes for g in self.limits(a, inner))))
                case tile.For():
                    self.loop(s, convert, guards)

    def loop(self, s: tile.For, convert: _Convert, guards: tuple[Node, ...]) -> None:
        for c in s.carries:
            self.reads(c.init, convert, guards, s.span)
        inner = self.scope(convert)
        guards = (*guards, *self.limits(s.axis, inner))
        for c in s.carries:
            axes = frozenset(convert.axes[a] for a in c.type.axes)
            convert.values[c.name] = inner.values[c.name] = self.named(
                c.name, t.carried(c.name, "old", axes, c.type.dtype)
            )
        for e in s.domain:
            self.reads(e, inner, guards, s.span)
        self.body(s.body, inner, guards)
        for y in s.yields:
            self.reads(y, inner, guards, s.span)

    def named(self, name: str, node: Node) -> Node:
        """What a name stands for in later subscripts: one that depends on data is clamped there, whatever it is."""
        return t.read(DATA, (), node.dtype) if name in self.data else node

    def scope(self, convert: _Convert) -> _Convert:
        return replace(convert, axes=dict(convert.axes), values=dict(convert.values))

    def limits(self, a: tile.LoopAxis, convert: _Convert) -> list[Node]:
        """Open an axis; what its `from` and `to` say of every lane, where they speak of no other axis."""
        bounds = [None if x is None else convert.node(x) for x in (a.lo, a.hi)]
        i = self.open(a.name, a.extent, convert)
        lo, hi = (None if x is None or x.axes else x for x in bounds)
        found = [t.apply("le", lo, i)] if lo is not None else []
        return [*found, t.apply("lt", i, hi)] if hi is not None else found

    def reads(self, e: Expr, convert: _Convert, guards: tuple[Node, ...], span: Span | None) -> Node:
        """Note what an expression reads; answers its node."""
        node = value = convert.node(e)
        for g in reversed(guards):
            value = t.apply("where", g, value, t.const(False if node.dtype is DType.BOOL else 0, node.dtype))
        if any(isinstance(x, t.Read) or _divides(x) for x in t.walk([node])):
            axes = tuple(a for a in self.axes if a in value.axes)
            self.found.append(t.Definition(f"line {len(self.found)}", axes, value, node.dtype, span=span))
        return node


def _divides(n: Node) -> bool:
    return isinstance(n, t.Apply) and n.op in ("floordiv", "mod")
