"""lower: a region and its axis plan become a tile program.

Reductions whose axes are all available become loops, cascades of them one loop (derive decides how many may join);
the others are met again inside those loops, so the same step lowers a product inside a score inside a normalised sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from dataclasses import replace as with_fields
from typing import Literal

from ...dsl.records import dataclass
from ...dsl.source import Span
from ...dsl.types import DType
from .. import tensor_ir as t
from .. import tile_ir as tile
from ..cascade import COMBINE, IDENTITY, Cascade, State, identity, typed
from ..region import AxisPlan, Region, conjuncts, contraction, factors
from ..remarks import Remarks
from ..tensor_ir import Axes, Graph, Node
from ..tile_ir import Expr
from .derive import PLAIN, Rules, derive
from .guards import harmed, reader
from .loop_domain import Limit, LoopDomain, loop_domain


def lower(
    graph: Graph,
    region: Region,
    plan: AxisPlan,
    statics: dict[str, int],
    remarks: Remarks,
    rules: Rules = PLAIN,
) -> tuple[tile.TileProgram, tuple[Cascade, ...]]:
    """The tile program of one region, and the cascades its loops run. `rules` are what derive may take as given."""
    return _Lowering(graph, region, plan, statics, remarks, rules).program()


@dataclass
class _Frame:
    """One nesting level: the statements emitted so far, what nodes are called here, which axes are open."""

    parent: _Frame | None
    open: Axes
    loop: Axes = frozenset()
    statements: list[tile.Stmt] = field(default_factory=list)
    memo: dict[Node, Expr] = field(default_factory=dict)
    uses: dict[Node, int] = field(default_factory=dict)
    states: frozenset[Node] = frozenset()
    ends: dict[tuple[Node, str], Expr] = field(default_factory=dict)
    conditional: bool = False

    def find(self, n: Node) -> Expr | None:
        f: _Frame | None = self
        while f is not None:
            if n in f.memo:
                return f.memo[n]
            f = f.parent
        return None


@dataclass(frozen=True)
class _Partial:
    """A reduction within the current tile, ready to emit: a dot of two operands, or a reduction of one."""

    fn: str
    over: tuple[str, ...]
    operands: tuple[Node, ...]


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        region: Region,
        plan: AxisPlan,
        statics: dict[str, int],
        remarks: Remarks,
        rules: Rules,
    ) -> None:
        self.graph, self.region, self.plan, self.statics, self.remarks = graph, region, plan, statics, remarks
        self.hints = with_scaled(dict(region.hints))
        stored_first = dict.fromkeys([*(a for d in region.roots for a in d.axes), *graph.axes])
        self.order = {a: i for i, a in enumerate(stored_first)}
        stored = {n.tensor for n in t.walk(region.values) if isinstance(n, t.Read)} | {
            d.name for d in region.roots
        }
        self.taken = {*graph.axes, *graph.extents, *graph.scalars, *graph.tensors, *stored}
        self.cascades: list[Cascade] = []
        self.rules = with_fields(rules, extents=tuple(graph.axes.items()))
        self.state_sets: dict[Node, frozenset[Node]] = {}

    # ------------------------------------------------------------ the program

    def program(self) -> tuple[tile.TileProgram, tuple[Cascade, ...]]:
        top = _Frame(None, frozenset(self.plan.whole))
        inside = _Frame(top, frozenset(self.plan.grid) | frozenset(self.plan.whole))
        self.roots(inside)
        body = tuple(inside.statements)
        if self.plan.grid:
            axes = tuple(self.loop_axis(a, top) for a in self.plan.grid)
            body = (tile.Grid(axes, body),)
        body = (*top.statements, *body)
        used = _axes_used(body)
        whole = tuple(
            tile.WholeAxis(a, self.expr(top, self.graph.axes[a])) for a in self.plan.whole if a in used
        )
        params = self.params(body)
        names = _names_used(body) | {n for p in params for e in p.shape for n in _leaf_names(e)}
        names |= {n for w in whole for n in _leaf_names(w.extent)}
        extents = tuple(e for e in self.graph.extents if e in names)
        scalars = (s for s in self.graph.scalars.values() if s.name in names)
        return tile.TileProgram(
            name=self.region.name, params=params, scalars=tuple(tile.ScalarParam(s.name, s.dtype) for s in scalars),
            extents=extents, statics=tuple((e, self.statics[e]) for e in extents if e in self.statics),
            whole=whole, body=body,
        ), tuple(self.cascades)  # fmt: skip

    def roots(self, frame: _Frame) -> None:
        """All loops that the roots share, then their stores, in serial loops over the axes that are left."""
        self.realise(frame, self.region.values)
        for rest in dict.fromkeys(self.rest(d, frame) for d in self.region.roots):
            group = [d for d in self.region.roots if self.rest(d, frame) == rest]
            self.store_loop(frame, rest, group)

    def rest(self, d: t.Definition, frame: _Frame) -> tuple[str, ...]:
        return tuple(a for a in d.axes if a not in frame.open)

    def store_loop(self, frame: _Frame, rest: tuple[str, ...], group: list[t.Definition]) -> None:
        if not rest:
            values = [d.value for d in group]
            self.count_uses(frame, [*values, *(i for d in group for i in d.target or ())])
            frame.statements += [self.store(frame, d) for d in group]
            return
        inner = _Frame(frame, frame.open | {rest[0]}, frozenset({rest[0]}))
        self.realise(inner, [d.value for d in group])
        self.store_loop(inner, rest[1:], group)
        frame.statements.append(tile.For(self.loop_axis(rest[0], frame), (), tuple(inner.statements), ()))

    def store(self, frame: _Frame, d: t.Definition) -> tile.Store:
        value = self.expr(frame, d.value)
        if d.dtype is not d.value.dtype:
            value = tile.Cast(d.dtype, value)
        where = [t.index(a) for a in d.axes] if d.target is None else list(d.target)
        subscripts = tuple(self.expr(frame, i) for i in where)
        return tile.Store(d.name, subscripts, value, "add" if d.accumulate else "set", span=d.span)

    def params(self, body: tuple[tile.Stmt, ...]) -> tuple[tile.Param, ...]:
        stored = {s.tensor for s in tile.statements(body) if isinstance(s, tile.Store)}
        loaded = {
            e.tensor
            for s in tile.statements(body)
            for x in tile.expressions(s)
            for e in tile.subexpressions(x)
            if isinstance(e, tile.Load)
        }
        names = [*self.graph.tensors, *(d.name for d in self.graph.definitions)]
        return tuple(
            self.param(n, n in stored, n in loaded) for n in dict.fromkeys(names) if n in stored | loaded
        )

    def param(self, name: str, stored: bool, loaded: bool) -> tile.Param:
        shape = tuple(self.expr(_Frame(None, frozenset()), x) for x in self.graph.shape_of(name))
        inout = name in self.graph.tensors and self.graph.tensors[name].inout
        mode: Literal["in", "out", "inout"] = "in"
        if stored:
            mode = "inout" if inout or loaded else "out"
        return tile.Param(name, stored_dtype(self.graph, name), shape, mode)

    def loop_axis(
        self, axis: str, frame: _Frame, lo: Expr | None = None, hi: Expr | None = None
    ) -> tile.LoopAxis:
        return tile.LoopAxis(axis, self.expr(frame, self.graph.axes[axis]), self.plan.tile(axis), lo, hi)

    # ------------------------------------------------------------ reductions as loops

    def realise(self, frame: _Frame, values: Iterable[Node]) -> None:
        """Emit a loop for every reduction below `values` that can run here and is not a reduction of whole axes."""
        pending = [
            n for n in self.below(frame, values) if isinstance(n, t.Reduce) and self.runs_here(frame, n)
        ]
        while pending:
            group = _one_pass(pending)
            cascade, _ = derive(
                group, self.remarks, self.rules
            )  # a refused reduction stays pending, for a later loop
            self.cascade(frame, cascade)
            done = {s.reduction for s in cascade.states}
            pending = [n for n in pending if n not in done]

    def runs_here(self, frame: _Frame, n: t.Reduce) -> bool:
        return n.axes <= frame.open and not frozenset(n.bound) <= frozenset(self.plan.whole)

    def cascade(self, frame: _Frame, c: Cascade) -> None:
        """One loop nest over the cascade's index set; its states are named values afterwards."""
        names = {s.name: self.state_name(s) for s in c.states}
        c = with_fields(c, carries=tuple(names.values()))
        self.cascades.append(c)
        loops = [a for a in c.bound if a not in self.plan.whole]
        self.cascade_loop(frame, c, names, loops, {})
        for s in c.states:
            frame.memo[s.reduction] = tile.Name(names[s.name])

    def state_name(self, s: State) -> str:
        """The user's name for the reduction where there is one and it is free."""
        hint = self.hints.get(s.reduction, s.name)
        return self.fresh(f"{hint}_{s.reduction.fn}" if hint in self.taken else hint)

    def cascade_loop(
        self, frame: _Frame, c: Cascade, names: dict[str, str], loops: list[str], start: dict[str, Expr]
    ) -> None:
        axis, rest = loops[0], loops[1:]
        if not rest:
            self.segments(frame, c, names, axis, start)
            return
        body = _Frame(frame, frame.open | {axis}, frozenset({axis}))
        bounds = loop_domain(axis, [conjuncts(s.predicate) for s in c.states], frame.open)
        lo, hi = (self.edge(frame, x, fn, axis) for x, fn in ((bounds.lo, "min"), (bounds.hi, "max")))
        c = without(
            c, [x.predicate for x in bounds.limits if not self.tile_axes(x.axes)]
        )  # the loop's bounds say it
        inner = {s: self.fresh(n) for s, n in names.items()}
        self.cascade_loop(body, c, inner, rest, {s: tile.Name(names[s]) for s in names})
        yields = tuple(tile.Name(inner[s.name]) for s in c.states)
        loop = self.loop_axis(axis, frame, lo, hi)
        carries = self.carries(c, names, start)
        frame.statements.append(
            tile.For(loop, carries, tuple(body.statements), yields, span=c.states[0].span)
        )

    # ------------------------------------------------------------ empty, full and partial tiles

    def segments(
        self, frame: _Frame, c: Cascade, names: dict[str, str], axis: str, start: dict[str, Expr]
    ) -> None:
        """The innermost loop of a cascade, divided by its predicates: no empty tile is visited, full ones have no selects.

        A predicate that bounds the axis alike for every lane is the loop's bound, which cuts lanes as well; one whose bound
        differs between lanes leaves a loop of partial tiles before or after the loop of full ones.
        """
        bounds = loop_domain(axis, [conjuncts(s.predicate) for s in c.states], frame.open)
        alike = [x.predicate for x in bounds.limits if not self.tile_axes(x.axes)]
        differing = [x for x in bounds.limits if self.tile_axes(x.axes) and (x.lo is None or x.hi is None)]
        c = without(c, alike)
        lo, hi = (self.edge(frame, x, fn, axis) for x, fn in ((bounds.lo, "min"), (bounds.hi, "max")))
        uneven = [x.predicate for x in differing]
        rest = [p for p in bounds.domain if p not in alike and p not in uneven]
        domain = with_fields(bounds, domain=[*uneven, *rest])
        if not differing:
            self.segment(frame, c, names, start, self.loop_axis(axis, frame, lo, hi), domain)
            return
        first, last = self.full_tiles(
            frame, [x for x in bounds.limits if x in differing or x.predicate in alike], axis
        )
        pieces = [(without(c, uneven), first or lo, last, True)]
        if first is not None:
            pieces.insert(0, (c, lo, _least(first, hi), False))
        if last is not None:
            pieces.append((c, last if first is None else _greatest(first, last), hi, False))
        for k, (part, low, high, whole) in enumerate(pieces):
            last_one = k == len(pieces) - 1
            stems = names if last_one else {s: self.fresh(f"{n}_{k}") for s, n in names.items()}
            here = domain if not whole or last is not None else with_fields(domain, domain=rest)
            loop = self.loop_axis(axis, frame, low, high)
            self.segment(frame, part, stems, start, loop, here, whole and last is not None)
            start = {s: tile.Name(stems[s]) for s in names}

    def full_tiles(self, frame: _Frame, limits: list[Limit], axis: str) -> tuple[Expr | None, Expr | None]:
        """The first index of the full tiles and the first after them; None where they reach to the end of the axis."""
        size = self.plan.tile(axis) or 1
        lows = [x.lo for x in limits if x.lo is not None]
        highs = [x.hi for x in limits if x.hi is not None]
        first = last = None
        if lows:
            low = self.inner_edge(frame, lows, "max", axis)
            first = self.rounded(frame, f"{axis}_full", tile.Apply("add", (low, tile.i64(size - 1))), size)
        if highs:
            high = self.inner_edge(frame, highs, "min", axis)
            last = self.rounded(frame, f"{axis}_full_end", high, size)
        return first, last

    def inner_edge(self, frame: _Frame, bounds: list[Node], fn: str, axis: str) -> Expr:
        """The bound that holds for every lane, kept in the axis."""
        extent = self.expr(frame, self.graph.axes[axis])
        limit: Expr = extent if fn == "min" else tile.i64(0)
        for b in bounds:
            limit = tile.Apply(fn, (limit, self.over_lanes(frame, b, fn, f"{axis}_{fn}")))
        return tile.Apply("max", (tile.i64(0), limit)) if fn == "min" else limit

    def rounded(self, frame: _Frame, stem: str, e: Expr, size: int) -> Expr:
        """e rounded down to whole tiles, as a scalar."""
        if size > 1:
            e = tile.Apply("mul", (tile.Apply("floordiv", (e, tile.i64(size))), tile.i64(size)))
        return self.let(frame, stem, tile.TileType(DType.I64), e, None)

    def segment(
        self,
        frame: _Frame,
        c: Cascade,
        names: dict[str, str],
        start: dict[str, Expr],
        axis: tile.LoopAxis,
        domain: LoopDomain,
        full: bool = False,
    ) -> None:
        """One loop over tiles of one kind."""
        body = _Frame(frame, frame.open | frozenset(c.bound), frozenset({axis.name}))
        carries = self.carries(c, names, start)
        conditions = tuple(unnamed(p) for p in domain.domain)  # it stands outside the body
        yields = self.visited(body, c, names, domain.scattered)
        attributes = (tile.Attribute("full"),) if full else ()
        span = c.states[0].span
        loop = tile.For(axis, carries, tuple(body.statements), yields, conditions, False, attributes, span)
        frame.statements.append(loop)

    def visited(
        self, body: _Frame, c: Cascade, names: dict[str, str], scattered: list[Node]
    ) -> tuple[Expr, ...]:
        """The step inside a loop that runs once, or never where bounds of what the tile's tensors hold exclude all of it."""
        if not scattered or not any(_heavy(s) for s in c.states):
            return self.steps(body, c, names)
        self.realise(body, [a for p in scattered for a in p.args])
        meets: Expr | None = None
        for p in scattered:
            for test in self.may_hold(body, p):
                meets = test if meets is None else tile.Apply("and", (meets, test))
        assert meets is not None
        once = self.let(body, "visits", tile.TileType(DType.I64), tile.Cast(DType.I64, meets), None)
        inner = _Frame(body, body.open, frozenset({"visit"}), conditional=True)
        inner_names = {s: self.fresh(n) for s, n in names.items()}
        carries = self.carries(c, inner_names, {s: tile.Name(names[s]) for s in names})
        yields = self.steps(inner, c, inner_names)
        axis = tile.LoopAxis(self.fresh("visit"), tile.i64(1), None, None, once)
        body.statements.append(tile.For(axis, carries, tuple(inner.statements), yields))
        return tuple(tile.Name(inner_names[s.name]) for s in c.states)

    def may_hold(self, frame: _Frame, p: Node) -> list[Expr]:
        """Conditions on the ranges of both sides over the tile, true wherever p holds in some lane."""
        assert isinstance(p, t.Apply)
        a, b = p.operands
        ends = {
            (x, fn): self.over_lanes(frame, x, fn, f"{fn}_{_stem(x)}")
            for x in (a, b)
            for fn in ("min", "max")
        }
        tests = [tile.Apply("lt" if p.op == "lt" else "le", (ends[a, "min"], ends[b, "max"]))]
        if p.op == "eq":
            tests.append(tile.Apply("le", (ends[b, "min"], ends[a, "max"])))
        return list(tests)

    def over_lanes(self, frame: _Frame, n: Node, fn: str, stem: str) -> Expr:
        """The least or greatest value of n over the lanes of its tile axes, as a scalar."""
        value = self.expr(frame, n)
        over = self.tile_axes(n.axes)
        if not over:
            return value
        home = self.home(frame, n)
        if (n, fn) not in home.ends:
            end = tile.Reduce(fn, over, value)
            home.ends[n, fn] = self.let(home, stem, tile.TileType(n.dtype), end, n.span)
        return home.ends[n, fn]

    def carries(self, c: Cascade, names: dict[str, str], start: dict[str, Expr]) -> tuple[tile.Carry, ...]:
        """The carried names of a loop; `start` has what states start from, the reduction's identity where it is silent."""
        return tuple(
            tile.Carry(
                names[s.name],
                self.type_of(s.reduction),
                start.get(s.name, tile.Fill(identity_of(s.reduction))),
            )
            for s in c.states
        )

    def edge(self, frame: _Frame, bounds: list[Node], fn: str, axis: str) -> Expr | None:
        """A loop bound for the whole tile: the least lower or greatest upper bound of its lanes, kept in the axis."""
        if not bounds:
            return None
        limit: Expr = tile.Const(0, DType.I64) if fn == "min" else self.expr(frame, self.graph.axes[axis])
        stem = f"{axis}_first" if fn == "min" else f"{axis}_end"
        for b in bounds:
            value = self.over_lanes(frame, b, fn, stem)
            limit = tile.Apply("max" if fn == "min" else "min", (limit, value))
        return limit

    # ------------------------------------------------------------ one step of a cascade

    def steps(self, body: _Frame, c: Cascade, names: dict[str, str]) -> tuple[Expr, ...]:
        """The recurrence: for each state, mend the old value and combine it with this tile's part."""
        body.states = frozenset(x for s in c.states for x in (s.old, s.new))
        parts = {s.name: self.state_part(s) for s in c.states}
        for s in c.states:
            body.memo[s.old] = tile.Name(names[s.name])
        self.hints |= self.names_inside(c)
        operands = [x for p in parts.values() for x in p.operands]
        self.realise(body, operands)
        self.count_uses(body, [*operands, *(s.moved for s in c.states if s.moved is not None)])
        read = {u for s in c.states for u in s.upstream}
        yields: list[Expr] = []
        for s in c.states:
            value = self.update(body, s, names[s.name], parts[s.name])
            if s.name in read:
                value = self.let(body, f"{names[s.name]}_new", self.type_of(s.reduction), value, s.span)
            body.memo[s.new] = value
            yields.append(value)
        return tuple(yields)

    def names_inside(self, c: Cascade) -> dict[Node, str]:
        """The text's names for what is computed in the loop, where reductions are read as running states."""
        names = {s.name: carried for s, carried in zip(c.states, c.carries, strict=True)}
        joined: dict[Node, str] = {s.reduction: s.name for s in c.states}
        found: dict[Node, str] = {reader(joined, "new")(r): f"{names[n]}_safe" for r, n in joined.items()}
        for s in c.states:
            if s.absorbs in self.hints and s.predicate is not None:
                found[hidden(s)] = f"{self.hints[s.absorbs]}_masked"
            read = reader(joined, "new", True, harmed(s.reduction.body))
            for n in t.walk([s.reduction.body]) if s.upstream else ():
                if n in self.hints and n not in joined:
                    found[shown(s, read(n))] = self.hints[n]
            if s.repair is not None:
                found[s.repair] = f"{names[s.upstream[0]]}_repair"
        return {n: name for n, name in found.items() if n not in self.hints}

    def update(self, body: _Frame, s: State, name: str, part: _Partial) -> Expr:
        old: Expr = tile.Name(name) if s.moved is None else self.expr(body, s.moved)
        return tile.Apply(COMBINE[s.reduction.fn], (old, self.emit_partial(body, part)))

    def state_part(self, s: State) -> _Partial:
        predicates = conjuncts(s.predicate)
        if s.absorbs is None:
            return self.partial(s.reduction.fn, s.reduction.bound, s.g, predicates)
        g = shown(s, s.g)
        return self.partial(s.reduction.fn, s.reduction.bound, g, [], predicates, hidden(s))

    def partial(
        self,
        fn: str,
        bound: tuple[str, ...],
        g: Node,
        predicates: list[Node],
        absorbed: list[Node] | None = None,
        hidden: Node | None = None,
    ) -> _Partial:
        """How this tile's part is computed: a contraction where it is one, with predicates on the operands they fit.

        `absorbed` predicates already stand on `hidden` inside g and make its factor 0. What a predicate excludes for every
        row must contribute nothing, NaN included (DESIGN 8, "Specials"): 0·NaN in another factor is kept out as well,
        wherever the predicate varies over no axis that the factor lacks.
        """
        over = tuple(a for a in bound if a not in self.plan.units)
        absorbed = absorbed or []
        # a value free of a reduced axis counts once for each index of it: an always true predicate gives it the axis
        present = g.axes.union(*(p.axes for p in predicates))
        predicates = [
            *predicates,
            *(t.apply("le", t.const(0, DType.I64), t.index(a)) for a in over if a not in present),
        ]
        split = contraction(g, frozenset(over), self.plan.units) if fn == "sum" else None
        if split is not None:
            a, b = (product(x) for x in self._rows_first(*split))
            if all(self._fits(a, p) or self._fits(b, p) for p in predicates):
                a, b = (self._zeroed(x, predicates, absorbed, hidden) for x in (a, b))
                return _Partial("dot", over, (a, b))
        several = sum(bool(f.axes & frozenset(bound)) for f in factors(g)) > 1
        mask = [*predicates, *absorbed] if several else predicates
        return _Partial(fn, over, (masked(mask, g, IDENTITY.get(fn, 0)),))

    def _rows_first(self, a: list[Node], b: list[Node]) -> tuple[list[Node], list[Node]]:
        """The operand with the result's rows before the one with its columns, in whichever order the text has the factors
        (a · b = b · a to the bit)."""
        place = {axis: i for i, axis in enumerate(self.region.roots[0].axes)}
        mine, its = ({x for f in side for x in f.axes} for side in (a, b))
        first, second = (
            min((place.get(x, len(place)) for x in own), default=0) for own in (mine - its, its - mine)
        )
        return (b, a) if second < first else (a, b)

    def _zeroed(
        self, operand: Node, predicates: list[Node], absorbed: list[Node], hidden: Node | None
    ) -> Node:
        here = [p for p in predicates if self._fits(operand, p)]
        if hidden is not None and hidden not in t.walk([operand]):
            here += [p for p in absorbed if self._fits(operand, p)]
        return masked(here, operand, 0)

    def _fits(self, operand: Node, predicate: Node) -> bool:
        return predicate.axes - self.plan.units <= operand.axes - self.plan.units

    def emit_partial(self, frame: _Frame, p: _Partial) -> Expr:
        if not p.over:  # every reduced axis is one index: the element itself
            return self.expr(frame, p.operands[0])
        if p.fn == "dot":
            a, b = (self.operand(frame, x) for x in p.operands)
            return tile.Dot(p.over, a, b)
        return tile.Reduce(p.fn, p.over, self.expr(frame, p.operands[0]))

    def operand(self, frame: _Frame, n: Node) -> Expr:
        """A dot's operand: a stored tile gets a name, so that passes can place it."""
        e = self.expr(frame, n)
        if isinstance(e, tile.Load):
            e = self.bind(self.home(frame, n), n, f"{e.tensor}_tile", e)
        return e

    # ------------------------------------------------------------ expressions

    def expr(self, frame: _Frame, root: Node) -> Expr:
        """The tile expression of a node; shared and invariant parts become names on the way. Iterative."""
        stack: list[tuple[_Frame, Node, bool]] = [(frame, root, False)]
        while stack:
            f, n, ready = stack.pop()
            if f.find(n) is not None or _leaf(n) is not None:
                continue
            home = self.home(f, n)
            if ready:
                self.finish(home, n, home is not f)
                continue
            stack.append((f, n, True))
            if not isinstance(n, t.Reduce):
                stack.extend((home, a, False) for a in reversed(n.args))
        found = frame.find(root)
        return found if found is not None else _known_leaf(root)

    def finish(self, frame: _Frame, n: Node, invariant: bool) -> None:
        """Build one node whose arguments are done, and name it if it is worth a name: read more than once, computed
        outside the loop that reads it, or a statement of the user's."""
        e = self.build(frame, n)
        hint = self.hints.get(n)
        shared = frame.uses.get(n, 0) > 1 or invariant or (hint is not None and bool(self.tile_axes(n.axes)))
        if shared and not isinstance(e, tile.Name) and not self.is_subscript(n):
            self.bind(frame, n, hint or _stem(n), e)
        else:
            frame.memo[n] = e

    def build(self, frame: _Frame, n: Node) -> Expr:
        def arg(a: Node) -> Expr:
            found = frame.find(a)
            return found if found is not None else _known_leaf(a)

        match n:
            case t.Read():
                return tile.Load(n.tensor, tuple(arg(i) for i in n.indices))
            case t.Apply():
                for a in n.operands:
                    self.name_broadcast(frame, a, n)
                return tile.Apply(n.op, tuple(arg(a) for a in n.operands))
            case t.Cast():
                return tile.Cast(n.dtype, arg(n.operand))
            case t.Reduce():
                return self.emit_partial(frame, self.partial(n.fn, n.bound, n.body, conjuncts(n.predicate)))
        raise TypeError(f"{type(n).__name__} has no place in a tile program")

    def name_broadcast(self, frame: _Frame, a: Node, user: Node) -> None:
        """Arithmetic on fewer axes than its user has is done once, not for each of the user's elements."""
        e = frame.find(a)
        fewer = set(self.tile_axes(a.axes)) < set(self.tile_axes(user.axes))
        if isinstance(e, tile.Apply) and fewer and not self.is_subscript(a):
            self.bind(self.home(frame, a), a, self.hints.get(a) or _stem(a), e)

    def bind(self, frame: _Frame, n: Node, stem: str, e: Expr) -> Expr:
        name = self.let(frame, stem, self.type_of(n), e, n.span)
        frame.memo[n] = name
        return name

    def let(self, frame: _Frame, stem: str, type: tile.TileType, e: Expr, span: Span | None) -> tile.Name:
        name = self.fresh(stem)
        frame.statements.append(tile.Let(name, type, e, span=span))
        return tile.Name(name)

    def home(self, frame: _Frame, n: Node) -> _Frame:
        """The outermost frame in which a node can be computed: where its axes are open and its states are known. What a
        conditional frame needs only because of its condition stays in it."""
        kept = None
        while (
            frame.parent is not None
            and frame.loop
            and not n.axes & frame.loop
            and not self.states(n) & frame.states
        ):
            kept = frame if frame.conditional else None
            frame = frame.parent
        return frame if kept is None else kept

    def states(self, n: Node) -> frozenset[Node]:
        """The carried states below a node."""
        if n not in self.state_sets:
            for x in t.walk([n]):
                own = frozenset({x}) if isinstance(x, t.Carried) else frozenset[Node]()
                self.state_sets[x] = own.union(*(self.state_sets[a] for a in x.args))
        return self.state_sets[n]

    def below(self, frame: _Frame, values: Iterable[Node]) -> list[Node]:
        """Every node still to be computed below `values`, arguments first."""
        seen: set[Node] = set()
        order: list[Node] = []
        stack = [(v, False) for v in reversed(list(values))]
        while stack:
            n, done = stack.pop()
            if done:
                order.append(n)
            elif n not in seen and frame.find(n) is None:
                seen.add(n)
                stack.append((n, True))
                stack.extend((a, False) for a in reversed(n.args))
        return order

    def count_uses(self, frame: _Frame, values: list[Node]) -> None:
        """How many places read each node, counted where the node will be computed."""
        counts: dict[Node, int] = {}
        for v in values:
            counts[v] = counts.get(v, 0) + 1
        for n in self.below(frame, values):
            for a in n.args:
                counts[a] = counts.get(a, 0) + 1
        for n, count in counts.items():
            home = self.home(frame, n)
            home.uses[n] = max(home.uses.get(n, 0), count)

    def is_subscript(self, n: Node) -> bool:
        """Integer arithmetic on indices and extents is cheaper than a name."""
        return n.dtype.is_integer and not any(isinstance(x, t.Read | t.Reduce) for x in t.walk([n]))

    def type_of(self, n: Node) -> tile.TileType:
        """A stored tile keeps the order of its dimensions; a computed one the order of the graph's axes."""
        axes = self.tile_axes(n.axes)
        if isinstance(n, t.Read):
            first = list(dict.fromkeys(a for i in n.indices for a in self.tile_axes(i.axes)))
            axes = tuple(first)
        return tile.TileType(n.dtype, axes)

    def tile_axes(self, axes: Axes) -> tuple[str, ...]:
        return tuple(sorted(axes - self.plan.units, key=lambda a: self.order[a]))

    def fresh(self, stem: str) -> str:
        name, i = stem, 1
        while name in self.taken:
            i += 1
            name = f"{stem}_{i}"
        self.taken.add(name)
        return name


def with_scaled(hints: dict[Node, str]) -> dict[Node, str]:
    """A statement k·x whose factor left it: x is called after it."""
    raw = {}
    for n, name in hints.items():
        match n:
            case t.Apply(op="mul", operands=(k, x)) if not k.axes and isinstance(x, t.Reduce | t.Apply):
                raw[x] = f"{name}_unscaled"
    return raw | hints


def hidden(s: State) -> Node:
    """The absorbing subexpression, -inf where the predicate is false."""
    assert s.absorbs is not None
    return masked(conjuncts(s.predicate), s.absorbs, -math.inf)


def shown(s: State, n: Node) -> Node:
    """n with the predicate on the absorbing subexpression."""
    return n if s.absorbs is None else t.substitute(n, {s.absorbs: hidden(s)})


def product(parts: list[Node]) -> Node:
    out = parts[0]
    for p in parts[1:]:
        out = t.apply("mul", out, p)
    return out


def masked(predicates: list[Node], x: Node, other: float) -> Node:
    """x where all predicates hold, `other` elsewhere."""
    fill = t.const(typed(other, x.dtype), x.dtype)
    for p in predicates:
        x = t.apply("where", p, x, fill)
    return x


def unnamed(root: Node) -> Expr:
    """Arithmetic of indices, extents, scalars and reads as one expression."""
    done: dict[Node, Expr] = {}
    for n in t.walk([root]):
        args = tuple(done[a] for a in n.args)
        match n:
            case t.Read(tensor=name):
                done[n] = tile.Load(name, args)
            case t.Apply(op=op):
                done[n] = tile.Apply(op, args)
            case t.Cast(dtype=dtype):
                done[n] = tile.Cast(dtype, args[0])
            case _:
                done[n] = _known_leaf(n)
    return done[root]


def without(c: Cascade, settled: list[Node]) -> Cascade:
    """The cascade where these predicates are known to hold."""
    states = tuple(with_fields(s, predicate=_conjunction(s.predicate, settled)) for s in c.states)
    return with_fields(c, states=states)


def _heavy(s: State) -> bool:
    """Is a product computed for each tile, so that skipping one saves more than asking costs?"""
    inner = any(isinstance(n, t.Reduce) for n in t.walk([s.reduction.body]))
    return inner or contraction(s.reduction.body, frozenset(s.reduction.bound)) is not None


def _conjunction(predicate: Node | None, settled: list[Node]) -> Node | None:
    rest: Node | None = None
    for p in conjuncts(predicate):
        if p not in settled:
            rest = p if rest is None else t.apply("and", rest, p)
    return rest


def _least(a: Expr, b: Expr | None) -> Expr:
    return a if b is None else tile.Apply("min", (a, b))


def _greatest(a: Expr, b: Expr) -> Expr:
    return tile.Apply("max", (a, b))


def identity_of(r: t.Reduce) -> tile.Const:
    return tile.Const(identity(r), r.dtype)


def _one_pass(pending: list[t.Reduce]) -> list[t.Reduce]:
    """The first pending reduction, with all others over the same set that wait for nothing outside this group."""
    group: list[t.Reduce] = []
    waiting = set(pending)
    for n in pending:
        needs = (x for x in t.walk(n.args) if x in waiting)
        if n.bound == pending[0].bound and all(x in group for x in needs):
            group.append(n)
    return group


def _leaf(n: Node) -> Expr | None:
    match n:
        case t.Const():
            return tile.Const(n.value, n.dtype)
        case t.Scalar():
            return tile.ScalarRef(n.name)
        case t.Extent():
            return tile.ExtentRef(n.name)
        case t.Index():
            return tile.AxisIndex(n.axis)
    return None


def _known_leaf(n: Node) -> Expr:
    leaf = _leaf(n)
    if leaf is None:
        raise AssertionError(f"{type(n).__name__} was not computed before its use")
    return leaf


def _stem(n: Node) -> str:
    match n:
        case t.Read():
            return f"{n.tensor}_tile"
        case t.Apply():
            return f"v_{n.op}"
        case t.Reduce():
            return f"v_{n.fn}"
    return "v"


def _axes_used(body: tuple[tile.Stmt, ...]) -> set[str]:
    """Axes that some subscript, type or reduction mentions."""
    used: set[str] = set()
    for s in tile.statements(body):
        if isinstance(s, tile.Let):
            used.update(s.type.axes)
        for x in tile.expressions(s):
            used.update(e.axis for e in tile.subexpressions(x) if isinstance(e, tile.AxisIndex))
    return used


def _names_used(body: tuple[tile.Stmt, ...]) -> set[str]:
    """Extents and scalars that the statements read."""
    return {n for s in tile.statements(body) for x in tile.expressions(s) for n in _leaf_names(x)}


def _leaf_names(e: Expr) -> set[str]:
    return {x.name for x in tile.subexpressions(e) if isinstance(x, tile.ExtentRef | tile.ScalarRef)}


def stored_dtype(graph: Graph, name: str) -> DType:
    """The element type of any tensor of the graph in memory."""
    for table in (graph.tensors, graph.outputs):
        if name in table:
            return table[name].dtype
    return graph.definition(name).dtype
