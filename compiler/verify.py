"""Verifiers of both IRs: what every pass leaves behind must hold. A failure is a mistake of the compiler, never the user's.

`verify_graph` and `verify_module` raise `VerifyError`, which names the pass, the statement and what is violated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import NoReturn

from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType
from . import layouts
from . import tensor_ir as t
from . import tile_ir as tile
from .tensor_ir import (
    REDUCTIONS,
    Definition,
    Graph,
    Node,
    operation_type,
    reduction_type,
)
from .tile_ir import Expr, For, Grid, Let, LoopAxis, Param, Store, TileModule, TileProgram, TileType
from .tile_text import print_expression, print_head, print_type
from .tile_types import (
    Mistyped,
    Names,
    disagreement,
    expression_type,
    fits,
    operation_problem,
    store_problem,
    subscripted,
)


class VerifyError(Exception):
    """An IR breaks one of its rules. The message names the pass after which it was found; `what` is violated at `span`."""

    def __init__(self, message: str, what: str = "", span: Span | None = None) -> None:
        super().__init__(message)
        self.what, self.span = what or message, span


# ---------------------------------------------------------------- tensor IR


def verify_graph(graph: Graph, after: str, *, absence: bool = False) -> None:
    """Check a graph. `after` names the pass that made it; `absence` allows `When`, as before canonicalize."""
    _GraphCheck(graph, after, absence).run()


@dataclass
class _GraphCheck:
    graph: Graph
    after: str
    absence: bool
    ranks: dict[str, tuple[int, DType]] = field(default_factory=dict)
    known: set[Node] = field(default_factory=set)

    def fail(self, where: str, what: str) -> NoReturn:
        raise VerifyError(f"after {self.after}: kernel {self.graph.name}: {where}: {what}")

    def run(self) -> None:
        g = self.graph
        for name in (*g.tensors, *g.scalars):
            if name not in g.order:
                self.fail(f"parameter {name}", "is not in the order of parameters")
        for axis, extent in g.axes.items():
            self.size(f"axis {axis}", extent)
        for table in (g.tensors, g.outputs):
            for p in table.values():
                for x in p.shape:
                    self.size(f"shape of {p.name}", x)
        self.ranks = {p.name: (len(p.shape), p.dtype) for p in g.tensors.values()}
        for c in g.checks:
            self.values(f"check `{c.message}`", [c.condition])
            self.expect(c.condition.dtype is DType.BOOL, f"check `{c.message}`", "is no condition")
            self.expect(not c.condition.axes, f"check `{c.message}`", "depends on an index")
        for d in g.definitions:
            self.definition(d)
        self.outputs()

    def expect(self, holds: bool, where: str, what: str) -> None:
        if not holds:
            self.fail(where, what)

    def size(self, where: str, x: Node) -> None:
        """Sizes are integer expressions of extents and scalars."""
        self.values(where, [x])
        self.expect(x.dtype.is_integer, where, f"is {x.dtype}, not an integer")
        self.expect(not x.axes, where, f"depends on the index {', '.join(sorted(x.axes))}")

    def outputs(self) -> None:
        for name, p in self.graph.outputs.items():
            found = [d for d in self.graph.definitions if d.name == name and d.target is None]
            where = f"output {name}"
            if not found:
                self.fail(where, "has no definition")
            self.expect(len(found[0].axes) == len(p.shape), where, "has another rank than its definition")
            self.expect(found[0].dtype is p.dtype, where, f"is {p.dtype}, its definition {found[0].dtype}")

    def definition(self, d: Definition) -> None:
        where = f"definition of {d.name}"
        self.expect(len(set(d.axes)) == len(d.axes), where, "an axis stands twice on its left side")
        for a in d.axes:
            self.expect(a in self.graph.axes, where, f"axis {a} has no extent")
        self.values(where, [d.value, *(d.target or ())])
        used = d.value.axes.union(*(x.axes for x in d.target or ()))
        loose = sorted(used - set(d.axes))
        self.expect(not loose, where, f"its value depends on {', '.join(loose)}, which its left side lacks")
        if d.value.dtype is not d.dtype:
            self.expect(
                d.value.dtype.is_float == d.dtype.is_float, where, f"{d.value.dtype} stored as {d.dtype}"
            )
        if d.target is None:
            self.expect(d.name not in self.ranks, where, "is defined twice")
            self.ranks[d.name] = (len(d.axes), d.dtype)
        else:
            self.update(d, where, d.target)

    def update(self, d: Definition, where: str, target: tuple[Node, ...]) -> None:
        p = self.graph.tensors.get(d.name)
        if p is None or not p.inout:
            self.fail(where, "updates what is no inout parameter")
        self.expect(
            len(target) == len(p.shape), where, f"has {len(target)} subscripts for rank {len(p.shape)}"
        )
        self.expect(p.dtype is d.dtype, where, f"is {d.dtype}, the parameter {p.dtype}")
        for x in target:
            self.expect(x.dtype.is_integer, where, f"a subscript is {x.dtype}")

    def values(self, where: str, roots: list[Node]) -> None:
        """Every node below, each once."""
        stack = list(roots)
        while stack:
            n = stack.pop()
            if n not in self.known:
                self.known.add(n)
                self.node(where, n)
                stack.extend(n.args)
            elif isinstance(n, t.Read):
                self.read(where, n)

    def node(self, where: str, n: Node) -> None:
        axes = t.NO_AXES.union(*(a.axes for a in n.args))
        dtype: DType = n.dtype
        match n:
            case t.Const():
                self.expect(fits(n.value, n.dtype), where, f"{n.value!r} is no {n.dtype}")
            case t.Scalar():
                p = self.graph.scalars.get(n.name)
                self.expect(p is not None and p.dtype is n.dtype, where, f"unknown {n.dtype} scalar {n.name}")
            case t.Extent():
                self.expect(n.name in self.graph.extents, where, f"unknown extent {n.name}")
            case t.Index():
                self.expect(n.axis in self.graph.axes, where, f"axis {n.axis} has no extent")
                axes = frozenset({n.axis})
            case t.Read():
                self.read(where, n)
            case t.Apply():
                dtype = self.apply(where, n)
            case t.Reduce():
                axes, dtype = self.reduce(where, n, axes)
            case t.When():
                self.expect(self.absence, where, "absence is still there (When)")
                self.expect(n.predicate.dtype is DType.BOOL, where, "a predicate is no bool")
            case t.Carried():
                self.fail(where, f"reads the carried state {n.name} outside a cascade")
            case _:
                pass
        self.expect(axes == n.axes, where, f"{_kind(n)} claims axes {sorted(n.axes)}, has {sorted(axes)}")
        self.expect(dtype is n.dtype, where, f"{_kind(n)} claims {n.dtype}, is {dtype}")

    def read(self, where: str, n: t.Read) -> None:
        if n.tensor not in self.ranks:
            self.fail(where, f"reads {n.tensor}, which is no parameter and not defined before")
        rank, dtype = self.ranks[n.tensor]
        self.expect(
            len(n.indices) == rank, where, f"reads {n.tensor} with {len(n.indices)} indices, rank {rank}"
        )
        self.expect(dtype is n.dtype, where, f"reads {n.tensor} as {n.dtype}, it is {dtype}")
        for x in n.indices:
            self.expect(x.dtype.is_integer, where, f"an index of {n.tensor} is {x.dtype}")

    def apply(self, where: str, n: t.Apply) -> DType:
        problem = operation_problem(n.op, [a.dtype for a in n.operands])
        if problem:
            self.fail(where, problem)
        return operation_type(n.op, tuple(a.dtype for a in n.operands))

    def reduce(self, where: str, n: t.Reduce, below: frozenset[str]) -> tuple[frozenset[str], DType]:
        self.expect(n.fn in REDUCTIONS, where, f"unknown reduction {n.fn}")
        self.expect(len(set(n.bound)) == len(n.bound) > 0, where, f"{n.fn} binds {n.bound}")
        for a in n.bound:
            self.expect(a in self.graph.axes, where, f"axis {a} has no extent")
        if n.predicate is not None:
            self.expect(n.predicate.dtype is DType.BOOL, where, f"the predicate of {n.fn} is no bool")
        return below - frozenset(n.bound), reduction_type(n.fn, n.body.dtype)


def _kind(n: Node) -> str:
    return f"{type(n).__name__}({getattr(n, 'op', getattr(n, 'fn', ''))})"


# ---------------------------------------------------------------- tile IR: modules


def verify_module(module: TileModule, after: str) -> None:
    """Check every program of a module and what they share. `after` names the pass that made it."""

    def fail(what: str) -> NoReturn:
        raise VerifyError(f"after {after}: module {module.name}: {what}", what)

    shared: dict[str, Param] = {}
    for s in module.scratch:
        if s.name in shared:
            fail(f"scratch {s.name} is declared twice")
        shared[s.name] = s
    names: set[str] = set()
    written: set[str] = set()
    for p in module.programs:
        if p.name in names:
            fail(f"two programs are named {p.name}")
        names.add(p.name)
        for x in p.params:
            known = shared.setdefault(x.name, x)
            if (known.dtype, known.shape) != (x.dtype, x.shape):
                fail(f"program {p.name}: tensor {x.name} differs from its declaration elsewhere")
            if x.mode != "out" and x.name not in written and x.name in {s.name for s in module.scratch}:
                fail(f"program {p.name}: scratch {x.name} is read before any program writes it")
            written |= {x.name} if x.mode != "in" else set()
        _ProgramCheck(p, after).run()


@dataclass(frozen=True)
class _Scope:
    """What is visible at a statement: values with their types, and which axes span tiles (False: a unit axis)."""

    values: dict[str, TileType]
    axes: dict[str, bool]
    grid: frozenset[str] = frozenset()
    in_grid: bool = False
    in_loop: bool = False

    def copy(self) -> _Scope:
        return _Scope(dict(self.values), dict(self.axes), self.grid, self.in_grid, self.in_loop)


@dataclass
class _ProgramCheck:
    program: TileProgram
    after: str
    statement: str = "header"
    span: Span | None = None
    mentions: dict[str, frozenset[str]] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    scalars: dict[str, DType] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def fail(self, what: str) -> NoReturn:
        where = f"after {self.after}: program {self.program.name}: `{self.statement}`"
        raise VerifyError(f"{where}: {what}", what, self.span)

    def expect(self, holds: bool, what: str | Callable[[], str]) -> None:
        if not holds:
            self.fail(what if isinstance(what, str) else what())

    # -- header

    def run(self) -> None:
        p = self.program
        self.params = {x.name: x for x in p.params}
        self.scalars = {s.name: s.dtype for s in p.scalars}
        self.unique("tensor", [x.name for x in p.params])
        self.fixed = [*p.extents, *self.scalars, *(w.name for w in p.whole)]
        self.unique("extent, scalar or axis", self.fixed)
        for name, size in p.statics:
            self.expect(name in p.extents, f"static {name} is no extent")
            self.expect(size >= 0, f"static {name} is {size}")
        self.unique("static extent", [n for n, _ in p.statics])
        for x in p.params:
            for e in x.shape:
                self.over_extents(f"shape of {x.name}", e, set(p.extents), scalars=True)
        for w in p.whole:
            self.over_extents(f"whole {w.name}", w.extent, {n for n, _ in p.statics}, scalars=False)
        self.attributes(p.attributes, "program", None)
        self.body(p.body, _Scope({}, {w.name: True for w in p.whole}))
        self.statement, self.span = "header", None
        self.rings_and_roles()

    def unique(self, what: str, names: list[str]) -> None:
        for n in names:
            self.expect(names.count(n) == 1, f"{what} {n} is declared twice")

    def over_extents(self, where: str, e: Expr, extents: set[str], *, scalars: bool) -> None:
        """An expression of constants and of these extents: sizes, and the static sizes of whole axes."""
        for x in tile.subexpressions(e):
            match x:
                case tile.ExtentRef(name=n):
                    self.expect(n in extents, f"{where}: {n} is no {'' if scalars else 'static '}extent")
                case tile.ScalarRef(name=n):
                    self.expect(scalars and n in self.scalars, f"{where}: {n} is no size")
                case tile.Const() | tile.Apply() | tile.Cast():
                    pass
                case _:
                    self.fail(f"{where}: {print_expression(x)} is no expression of extents")

    def rings_and_roles(self) -> None:
        p = self.program
        self.unique("ring", [r.name for r in p.rings])
        self.unique("ring's load", [n for r in p.rings for n in r.loads])
        for r in p.rings:
            self.expect(r.stages >= 1, f"ring {r.name} has {r.stages} stages")
            homes = {self.home(n) for n in r.loads}
            self.expect(len(homes) == 1, f"ring {r.name} stages loads of different loops")
        self.unique("role", [r.name for r in p.roles])
        for role in p.roles:
            self.expect(role.warpgroups >= 1, f"role {role.name} has {role.warpgroups} warpgroups")
            good = 24 <= role.registers <= 256 and role.registers % 8 == 0
            self.expect(
                good, f"role {role.name}: {role.registers} registers; a multiple of 8 from 24 to 256 is"
            )

    def home(self, name: str) -> int:
        """Identity of the body in which a load is named."""
        bodies = [self.program.body]
        bodies += [s.body for s in tile.statements(self.program.body) if isinstance(s, Grid | For)]
        for body in bodies:
            for s in body:
                if isinstance(s, Let) and s.name == name and isinstance(s.value, tile.Load):
                    return id(body)
        self.fail(f"a ring names {name}, which is no load")

    # -- attributes

    def attributes(
        self, attributes: Iterable[tile.Attribute], place: layouts.Place, type_: TileType | None
    ) -> None:
        for a in attributes:
            try:
                m = layouts.meaning(a)
            except ValueError as error:
                self.fail(str(error))
            self.expect(place in m.places, f"@{a.name} has no meaning on a {place}")
            axes = set(type_.axes) if type_ is not None else self.all_axes()
            for x in m.axes:
                where = f"the tile {print_type(type_)}" if type_ is not None else "the program"
                self.expect(x in axes, f"@{a.name} names {x}, which is no axis of {where}")
            self.names_known(m)

    def all_axes(self) -> set[str]:
        found = {w.name for w in self.program.whole}
        for s in tile.statements(self.program.body):
            if isinstance(s, Grid | For):
                found.update(a.name for a in _loop_axes(s))
        return found

    def names_known(self, m: layouts.Meaning) -> None:
        match m:
            case layouts.Positive(scalar=n):
                self.expect(n in self.scalars, f"@positive names {n}, which is no scalar")
            case layouts.Alignment(tensor=n):
                self.expect(n in self.params, f"@alignment names {n}, which is no tensor")
            case layouts.Divisible(extent=n):
                known = not n.isidentifier() or n in self.program.extents
                self.expect(known, f"@divisible names {n}, which is no extent")
            case _:
                pass

    # -- statements

    def body(self, body: tuple[tile.Stmt, ...], scope: _Scope) -> None:
        for s in body:
            self.statement = print_head(s)
            self.span = None if isinstance(s, Grid) else s.span
            match s:
                case Let():
                    self.let(s, scope)
                case Store():
                    self.store(s, scope)
                case Grid():
                    self.grid(s, scope.copy())
                case For():
                    self.loop(s, scope)

    def define(self, name: str, type_: TileType, scope: _Scope) -> None:
        taken = name in scope.values or name in scope.axes or name in self.fixed
        self.expect(not taken, f"{name} is defined where another {name} is visible")
        self.expect(len(set(type_.axes)) == len(type_.axes), f"{name}: an axis stands twice in its type")
        for a in type_.axes:
            self.expect(a in scope.axes, f"{name}: axis {a} is not open here")
            self.expect(scope.axes[a], f"{name}: {a} is one index and cannot be an axis of a tile")
        scope.values[name] = type_

    def matches(self, name: str, e: Expr, type_: TileType, scope: _Scope) -> None:
        """Declared and computed type agree."""
        problem = disagreement(name, e, self.infer(e, scope), type_)
        if problem:
            self.fail(problem)

    def let(self, s: Let, scope: _Scope) -> None:
        self.matches(s.name, s.value, s.type, scope)
        self.define(s.name, s.type, scope)
        self.mentions[s.name] = self.mentioned(s.value, scope)
        self.attributes(s.attributes, "value", s.type)

    def mentioned(self, e: Expr, scope: _Scope) -> frozenset[str]:
        """The axes that a value depends on, through names."""
        found: set[str] = set()
        for x in tile.subexpressions(e):
            if isinstance(x, tile.AxisIndex):
                found.add(x.axis)
            elif isinstance(x, tile.Name):
                found |= self.mentions.get(x.name, frozenset())
        return frozenset(found)

    def store(self, s: Store, scope: _Scope) -> None:
        p = self.params.get(s.tensor)
        if p is None:
            self.fail(f"{s.tensor} is no tensor of the program")
        self.expect(p.mode != "in", f"{s.tensor} is an input")
        axes = self.subscripts(s.tensor, p, s.subscripts, scope)
        problem = store_problem(p, axes, self.infer(s.value, scope))
        if problem:
            self.fail(problem)
        if s.mode == "set":
            mentioned = frozenset().union(*(self.mentioned(x, scope) for x in s.subscripts))
            absent = sorted(scope.grid - mentioned)
            self.expect(
                not absent, f"no subscript mentions the grid axis {', '.join(absent)}: iterations race"
            )
        self.attributes(s.attributes, "store", None)

    def subscripts(self, name: str, p: Param, subscripts: tuple[Expr, ...], scope: _Scope) -> tuple[str, ...]:
        try:
            return subscripted(name, p, [self.infer(x, scope) for x in subscripts])
        except ValueError as reason:
            self.fail(str(reason))

    def open_axis(self, a: LoopAxis, scope: _Scope) -> None:
        """Check an axis's bounds in `scope`, then open it there."""
        for what, e in (("extent", a.extent), ("lower bound", a.lo), ("upper bound", a.hi)):
            if e is not None:
                found = self.infer(e, scope, bound=True)
                self.expect(found.dtype.is_integer, f"the {what} of {a.name} is {found.dtype}")
                self.expect(not found.axes, f"the {what} of {a.name} is a tile over {', '.join(found.axes)}")
        self.expect(a.tile is None or a.tile >= 1, f"{a.name} has a tile size of {a.tile}")
        taken = a.name in scope.axes or a.name in scope.values or a.name in self.fixed
        self.expect(not taken, f"axis {a.name} is opened where another {a.name} is visible")
        scope.axes[a.name] = a.tile is not None

    def grid(self, g: Grid, scope: _Scope) -> None:
        self.expect(not scope.in_grid, "a grid stands inside another")
        self.expect(not scope.in_loop, "a grid stands inside a loop")
        for a in g.axes:
            self.open_axis(a, scope)
        self.attributes(g.attributes, "grid", None)
        several = frozenset(a.name for a in g.axes if a.extent != tile.Const(1, DType.I64))
        self.body(g.body, _Scope(scope.values, scope.axes, several, True, False))

    def loop(self, s: For, scope: _Scope) -> None:
        self.expect(len(s.carries) == len(s.yields), "yields and carried values differ in number")
        for c in s.carries:
            self.matches(c.name, c.init, c.type, scope)
        inner = scope.copy()
        self.open_axis(s.axis, inner)
        for e in s.domain:
            found = self.infer(e, inner)
            self.expect(found.dtype is DType.BOOL, f"the domain has a predicate of type {found.dtype}")
        for c in s.carries:
            self.define(c.name, c.type, scope)
            self.expect(
                s.axis.name not in c.type.axes, f"{c.name} is carried along its own axis {s.axis.name}"
            )
            self.define(c.name, c.type, inner)
            self.attributes(c.attributes, "value", c.type)
        self.carried_mentions(s, inner)
        self.attributes(s.attributes, "loop", None)
        head, span = self.statement, self.span
        inside = _Scope(inner.values, inner.axes, inner.grid, inner.in_grid, True)
        self.body(s.body, inside)
        self.statement, self.span = head, span
        for c, y in zip(s.carries, s.yields, strict=True):
            self.yielded(c, y, inside)
        self.carried_mentions(s, inside)
        self.skewed(s)

    def carried_mentions(self, s: For, scope: _Scope) -> None:
        for c, y in zip(s.carries, s.yields, strict=True):
            self.mentions[c.name] = self.mentioned(c.init, scope) | self.mentioned(y, scope)

    def yielded(self, c: tile.Carry, y: Expr, scope: _Scope) -> None:
        """A yielded name hands its registers over, so its order of axes is that of the carried value."""
        self.matches(f"the yield of {c.name}", y, c.type, scope)
        if isinstance(y, tile.Name) and scope.values[y.name].axes != c.type.axes:
            found = print_type(scope.values[y.name])
            self.fail(f"the yield of {c.name} is {found}, carried as {print_type(c.type)}: order of axes")

    def skewed(self, s: For) -> None:
        for a in layouts.find_all(s.attributes, layouts.Skew):
            found = [x.value for x in s.body if isinstance(x, Let) and x.name == a.dot]
            is_dot = any(isinstance(e, tile.Dot) for v in found for e in tile.subexpressions(v))
            self.expect(is_dot, f"@skew names {a.dot}, which is no dot of the loop's body")

    # -- expressions

    def infer(self, e: Expr, scope: _Scope, bound: bool = False) -> TileType:
        """The type of an expression; in a loop's `bound` a tile axis that no reduction takes is its first index."""
        names = Names(self.params, self.scalars, self.program.extents, scope.values, scope.axes)
        try:
            return expression_type(e, names, bound)
        except Mistyped as reason:
            self.fail(str(reason))


def _loop_axes(s: Grid | For) -> tuple[LoopAxis, ...]:
    return s.axes if isinstance(s, Grid) else (s.axis,)
