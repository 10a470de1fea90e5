"""The bounds rule (DESIGN 2.1, "Bounds"): every index is proved, checked at the call, clamped, or refused.

Proved: guards and the ranges of axes keep it inside by form. Checked at the call: it depends on extents and scalars only,
so the ends of its interval are evaluated there. Clamped: it depends on what a tensor holds. Refused: all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce as fold

from ..dsl.diagnostics import Diagnostics
from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType
from .affine import ONE, Intervals, Linear, Range, at_least, extremum, inequalities, linear_forms, uniform
from .spelling import brief
from .tensor_ir import (
    Apply,
    Check,
    Const,
    Definition,
    Graph,
    Index,
    Node,
    Read,
    Reduce,
    When,
    apply,
    const,
    walk,
)


def bounds_checks(graph: Graph, sink: Diagnostics) -> list[Check]:
    """The checks that the indices and integer divisors of a graph need at each call; refusals go to `sink`."""
    work = _Bounds(graph, sink)
    for tensor in (*graph.tensors.values(), *graph.outputs.values()):
        work.shape(tensor.shape)
    work.shape(graph.axes.values())
    for definition in graph.definitions:
        work.definition(definition)
    return [*reversed(work.divisors), *work.checks]


@dataclass(frozen=True)
class Place:
    """Where a node is evaluated: axes in scope, and the conditions that hold there."""

    axes: frozenset[str]
    guards: tuple[Node, ...] = ()

    def under(self, condition: Node | None) -> Place:
        """Where a condition holds, too; one that says nothing about integers is left out."""
        if condition is None or condition in self.guards or not _informative(condition):
            return self
        return Place(self.axes, (*self.guards, condition))

    def inside(self, bound: Iterable[str]) -> Place:
        """Within a reduction: conditions on an axis that is bound anew say nothing about it."""
        names = frozenset(bound)
        return Place(self.axes | names, tuple(g for g in self.guards if not g.axes & names))


def _informative(condition: Node) -> bool:
    return uniform(condition) or any(inequalities([condition]))


PLACES = 64
"""Sets of conditions told apart for one shared expression; beyond them, what all of them have in common."""


def visits(root: Node, place: Place, wanted: set[Node]) -> Iterator[tuple[Node, Place]]:
    """Nodes of `wanted` below `root`, each once for every set of conditions under which it is evaluated."""
    relevant = _above(root, wanted)
    seen: dict[Node, list[Place]] = {}
    stack = [(root, place)]
    while stack:
        node, at = stack.pop()
        places = seen.setdefault(node, [])
        if node not in relevant or at in places:
            continue
        if len(places) >= PLACES:
            at = Place(at.axes, tuple(g for g in at.guards if all(g in p.guards for p in places)))
            if at in places:
                continue
        places.append(at)
        if node in wanted:
            yield node, at
        stack.extend(parts(node, at))


def _above(root: Node, wanted: set[Node]) -> set[Node]:
    relevant: set[Node] = set()
    for n in walk([root]):
        if n in wanted or any(a in relevant for a in n.args):
            relevant.add(n)
    return relevant


def parts(n: Node, place: Place) -> list[tuple[Node, Place]]:
    """The arguments of a node and the conditions under which each is evaluated."""
    match n:
        case Apply(op="where", operands=(c, a, b)):
            return [(c, place), (a, place.under(c)), (b, place.under(apply("not", c)))]
        case Apply(op="and", operands=(a, b)):
            return [(a, place), (b, place.under(a))]
        case Apply(op="or", operands=(a, b)):
            return [(a, place), (b, place.under(apply("not", a)))]
        case Reduce():
            inner = place.inside(n.bound)
            predicate = [(n.predicate, inner)] if n.predicate is not None else []
            return [*predicate, (n.body, inner.under(n.predicate))]
        case When():
            return [(n.predicate, place), (n.value, place.under(n.predicate))]
    return [(a, place) for a in n.args]


def _from_tensors(n: Node) -> bool:
    return any(isinstance(m, Read) for m in walk([n]))


class _Bounds:
    def __init__(self, graph: Graph, sink: Diagnostics) -> None:
        self.graph = graph
        self.sink = sink
        self.checks: list[Check] = []
        self.divisors: list[Check] = []

    def shape(self, entries: Iterable[Node]) -> None:
        for entry in entries:
            for n in walk([entry]):
                if _divides(n):
                    self._divisor(n, Place(frozenset()))

    def definition(self, d: Definition) -> None:
        start = Place(frozenset(d.axes))
        for root in (d.value, *(d.target or ())):
            wanted = {n for n in walk([root]) if self._needs_proof(n)}
            for n, place in visits(root, start, wanted):
                if isinstance(n, Read):
                    self._indices(n.tensor, n.indices, place, n.span)
                else:
                    self._divisor(n, place)
        if d.target is not None:
            self._indices(d.name, d.target, start, d.span)

    def _needs_proof(self, n: Node) -> bool:
        if isinstance(n, Read):
            shape = self.graph.shape_of(n.tensor)
            return any(
                not self._bare(i, s) and not _from_tensors(i) for i, s in zip(n.indices, shape, strict=True)
            )
        return _divides(n)

    def _bare(self, i: Node, extent: Node) -> bool:
        return isinstance(i, Index) and self.graph.axes[i.axis] is extent

    # ------------------------------------------------------------ indices

    def _indices(self, tensor: str, indices: tuple[Node, ...], place: Place, span: Span | None) -> None:
        for k, (i, extent) in enumerate(zip(indices, self.graph.shape_of(tensor), strict=True)):
            if not self._bare(i, extent) and not _from_tensors(i):
                self._index(
                    f"index {k + 1} of `{tensor}`, `{brief(i)}`,",
                    i,
                    extent,
                    place,
                    i.span if i.args else span,
                )

    def _index(self, what: str, i: Node, extent: Node, place: Place, span: Span | None) -> None:
        """0 <= i <= extent - 1"""
        nonempty = frozenset(self.graph.axes[a] for a in place.axes)
        reach = self._intervals(place, nonempty).of(i)
        last = linear_forms(extent)[extent].plus(ONE, -1)
        room = Range(reach.lo, tuple(last.plus(b, -1) for b in reach.hi))
        if not reach.lo or not reach.hi:
            self._cannot_prove(what, i, extent, span)
            return
        sides = [self._side(room.lo, nonempty), self._side(room.hi, nonempty)]
        for good, bounds, words in zip(
            sides, (reach.lo, reach.hi), ("below 0", f"past {brief(last.node())}"), strict=True
        ):
            if good is False:
                self._outside(what, i, extent, bounds, words, span)
                return
        conditions = []
        if sides[0] is None:
            conditions.append(apply("le", const(0, DType.I64), fold(_greater, reach.lo).node()))
        if sides[1] is None:
            conditions.append(apply("le", fold(_lesser, reach.hi).node(), last.node()))
        if conditions:
            message = f"{what} leaves its axis, which has extent {brief(extent)}"
            condition = fold(lambda a, b: apply("and", a, b), conditions)
            self.checks.append(self._check(condition, place, message, span))

    def _intervals(self, place: Place, nonempty: frozenset[Node]) -> Intervals:
        return Intervals(self.graph.axes, *inequalities(place.guards), nonempty)

    def _side(self, room: tuple[Linear, ...], nonempty: frozenset[Node]) -> bool | None:
        """Is one of the bounds >= 0? None where their form does not say."""
        if any(at_least(b, 0, nonempty) for b in room):
            return True
        return False if all(at_least(b.times(-1), 1, nonempty) for b in room) else None

    def _outside(
        self, what: str, i: Node, extent: Node, bounds: tuple[Linear, ...], words: str, span: Span | None
    ) -> None:
        self.sink.error(
            "E0401",
            f"{what} leaves its axis, which has extent {brief(extent)}",
            span,
            note=f"it reaches {brief(bounds[0].node())}, {words}",
            help=f"guard the read: `where({self._guard(i, extent)}, …, 0)`, or cut the range with a predicate",
        )

    def _cannot_prove(self, what: str, i: Node, extent: Node, span: Span | None) -> None:
        self.sink.error(
            "E0402",
            f"{what} cannot be shown to stay in its axis, which has extent {brief(extent)}",
            span,
            note="sums, products, `//`, `%`, `min` and `max` of indices, extents and scalars can be followed",
            help=f"clamp it: `max(0, min({brief(i)}, {brief(extent)} - 1))`",
        )

    def _guard(self, i: Node, extent: Node) -> str:
        text = brief(i)
        return f"0 <= {text} and {text} < {brief(extent)}"

    # ------------------------------------------------------------ divisors

    def _divisor(self, n: Node, place: Place) -> None:
        """An integer divisor of extents and scalars must not be 0; what a tensor holds may be, the quotient is then 0."""
        divisor = n.args[1]
        if isinstance(divisor, Const):
            if divisor.value == 0:
                self.sink.error(
                    "E0403", f"`{brief(n)}` divides by 0", n.span, help="divide by something else"
                )
            return
        if _from_tensors(divisor):
            return
        message = f"`{brief(n)}` divides by `{brief(divisor)}`, which is 0"
        if uniform(divisor):
            self.divisors.append(
                self._check(apply("ne", divisor, const(0, DType.I64)), place, message, n.span)
            )
            return
        nonempty = frozenset(self.graph.axes[a] for a in place.axes)
        reach = self._intervals(place, nonempty).of(divisor)
        above = self._side(tuple(b.plus(ONE, -1) for b in reach.lo), nonempty) if reach.lo else False
        if above is False:
            self.sink.error(
                "E0403",
                f"the divisor `{brief(divisor)}` may be 0",
                divisor.span if divisor.args else n.span,
                help=f"guard the division: `where({brief(divisor)} > 0, …, 0)`",
            )
        elif above is None:
            condition = apply("lt", const(0, DType.I64), fold(_greater, reach.lo).node())
            message = f"`{brief(n)}` divides by `{brief(divisor)}`, which may be 0"
            self.divisors.append(self._check(condition, place, message, n.span))

    # ------------------------------------------------------------ checks

    def _check(self, condition: Node, place: Place, message: str, span: Span | None) -> Check:
        """The condition, needed only where no axis in scope is empty and the guards on extents and scalars hold."""
        extents = dict.fromkeys(self.graph.axes[a] for a in sorted(place.axes))
        excuses = [apply("eq", e, const(0, DType.I64)) for e in extents if not isinstance(e, Const)]
        excuses += [apply("not", g) for g in place.guards if uniform(g)]
        return Check(
            fold(lambda a, b: apply("or", b, a), reversed(excuses), condition), "bounds", message, span
        )


def _greater(a: Linear, b: Linear) -> Linear:
    return extremum("max", a, b)


def _lesser(a: Linear, b: Linear) -> Linear:
    return extremum("min", a, b)


def _divides(n: Node) -> bool:
    return isinstance(n, Apply) and n.op in ("floordiv", "mod") and n.dtype.is_integer
