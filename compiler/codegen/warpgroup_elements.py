"""Element code of tier `wgmma`: what many elements of a row in one thread make worth writing otherwise than in `simt`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import Apply, Expr, Load, LoopAxis
from .deal import Layout, Spread
from .mma import MatrixKernel
from .scalar_cuda import Code, combine
from .simt_reduction import Reduction
from .simt_source import NOWHERE, Point, starts_late
from .tile_types import leaves
from .warpgroup_form import ends_tile, scalar_values, slope


class RowReduction(Reduction):
    """A thread's neighbouring columns go to two chains, whose steps need not wait for each other."""

    k: RowElements

    def whole(self, at: Point) -> None:
        spread = self.over.spreads[0]
        if self.finds_place or len(self.over.axes) != 1 or spread.run != 2 or spread.count < 4:
            super().whole(at)
            return
        k, depth, (axis,) = self.k, self.k.text.depth, self.over.axes
        names = [self.name, k.names.fresh(self.name)]
        joined = Layout((*at.layout.axes, axis), (*at.layout.spreads, spread))
        exist = not k.conditions(Point(joined, {**at.counters, axis: "0"}), [axis])
        for lane, name in enumerate(names):
            if exist:  # the first elements, not the identity: one operation less in each chain
                self.element_at(Point(joined, {**at.counters, axis: str(lane)}), axis, name, first=True)
            else:
                k.text.line(f"{name} = {self.start().text}")
        k.renew(axis)
        counter = k.axis_names[axis].counter
        k.text.line(f"for {counter} in range({int(exist)}, {spread.count // 2}):")
        k.text.depth += 1
        for lane, name in enumerate(names):
            self.element_at(Point(joined, {**at.counters, axis: f"(2 * {counter} + {lane})"}), axis, name)
        k.text.depth = depth
        both = combine(self.e.fn, Code(names[0], self.held), Code(names[1], self.held))
        k.text.line(f"{self.name} = {both.text}")
        for bit in self.lanes():
            self.shuffle(1 << bit)

    def element_at(self, inner: Point, axis: str, name: str, first: bool = False) -> None:
        """Fold an element into a chain, or start the chain with it."""
        k = self.k
        indexed, _ = k._axes_needed([self.e.arg])
        k._index(Point(self.over, inner.counters), axis, axis in indexed, True)
        value = self.converted(k.emit(self.e.arg, inner))
        step = value if first else combine(self.e.fn, Code(name, self.held), value)
        k.guarded(k.conditions(inner, [axis]), f"{name} = {step.text}")


class RowElements(MatrixKernel):
    """Comparisons of indices along a row are of small numbers: a thread's place in the tile, and a bound that its elements
    share, kept inside the tile's size."""

    reduction = RowReduction

    def _give_names(self) -> None:
        super()._give_names()
        self.limits: dict[tuple[str, Spread], list[tuple[str, str]]] = {}

    def nest(self, layout: Layout, exprs: Iterable[Expr], exists: Iterable[str] = ()) -> Iterator[Point]:
        exprs = list(exprs)
        return super().nest(self._for_loads(layout, exprs), exprs, exists)

    def _for_loads(self, layout: Layout, exprs: list[Expr]) -> Layout:
        """A thread's rows inside its columns where something is read for each column: all rows use it at once. Else it would
        be kept from row to row, a register for each column."""
        loads = [x for e in exprs for x in leaves(e) if isinstance(x, Load)]
        spans = {self.facts.type_of(x, self.types).axes for x in loads}
        if len(layout.axes) != 2 or layout.axes[-1:] not in spans:
            return layout
        return Layout(layout.axes[::-1], layout.spreads[::-1])

    def open(
        self, layout: Layout, exprs: list[Expr], exists: set[str], outer: Point, by_run: str | None = None
    ) -> Point:
        for axis in (a for a in layout.axes if a not in outer.counters):
            self.renew(axis)
        return super().open(layout, exprs, exists, outer, by_run)

    def renew(self, axis: str) -> None:
        """Other names for an axis's counter, index and existence: Numba's time grows with names that are assigned twice."""
        fresh, old = self.names.fresh, self.axis_names[axis]
        made = [fresh(n) for n in (f"{axis}_i", axis, f"{axis}_ok")]
        self.axis_names[axis] = replace(old, counter=made[0], index=made[1], exists=made[2])

    def lane_checks(self, at: Point, axis: str) -> list[str]:
        spread = at.layout.spread(axis)
        plain = axis in self._whole() or axis in self.full or spread.run != 2 or at.by_run is not None
        if plain or not spread.even:
            return super().lane_checks(at, axis)
        limits = self.limits.get((axis, spread)) or self._limits(axis, spread)
        return [self._place_check(at, axis, sign, limit) for sign, limit in limits]

    def name_limits(self, axis: str, spread: Spread) -> None:
        """Give the limits of a tile's elements names, until its step ends."""
        self.limits[axis, spread] = [
            (sign, self.assign(f"{axis}_{'most' if sign == '<=' else 'least'}", Code(limit, DType.I64)))
            for sign, limit in self._limits(axis, spread)
        ]

    def _limits(self, axis: str, spread: Spread) -> list[tuple[str, str]]:
        """What bounds the places of elements that exist."""
        names, a, found = self.axis_names[axis], self.live[axis], []
        if a.hi is not None:
            found.append(("<=", f"{names.hi} - {names.first} - 1"))
        elif self.has_tail(a, spread.tile):
            found.append(("<=", f"{self.emit(a.extent, NOWHERE).operand} - {names.first} - 1"))
        if starts_late(a) and not self._starts_a_tile(a):
            found.append((">=", f"{names.lo} - {names.first}"))
        return [(sign, self._limit(spread, sign, bound)) for sign, bound in found]

    def _starts_a_tile(self, a: LoopAxis) -> bool:
        return a.lo is not None and ends_tile(a.lo, a, scalar_values(self.program.body))

    def _limit(self, spread: Spread, sign: str, bound: str) -> str:
        """A bound of 64 bits as one of a thread's places in a tile."""
        low = -1 if sign == "<=" else 0
        own = self.coordinate(spread)
        return f"i32(min(max({bound}, {low}), {spread.tile}) - {own} * {spread.run})"

    def _place_check(self, at: Point, axis: str, sign: str, limit: str) -> str:
        """Compare a lane's place in its tile with a limit."""
        spread, i = at.layout.spread(axis), at.counters[axis]
        return f"i32({spread.run * spread.step} * ({i} >> 1) + ({i} & 1)) {sign} {limit}"

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        compared = self._compared(e, at)
        return compared or super()._node(e, args, at)

    def _compared(self, e: Expr, at: Point) -> Code | None:
        """A comparison of indices of which one side grows along the row with the element's place."""
        if not isinstance(e, Apply) or e.op not in ("lt", "le") or at.by_run is not None:
            return None
        x, y = e.args
        if not all(self.facts.type_of(z, self.types).dtype.is_integer for z in (x, y)):
            return None
        for axis in at.layout.axes:
            spread = at.layout.spread(axis)
            if spread.run != 2 or axis not in self.live or axis in self._whole():
                continue
            grows, other = slope(x, axis), slope(y, axis)
            if grows is None or other is None or abs(grows - other) != 1:
                continue
            rest = Point(at.layout.restrict(a for a in at.layout.axes if a != axis), at.counters)
            left, right = (self.emit(z, rest).operand for z in (x, y))
            sign = "<=" if grows > other else ">="
            bound = f"{right} - {left}" if sign == "<=" else f"{left} - {right}"
            step = {"<=": " - 1", ">=": " + 1"}[sign] if e.op == "lt" else ""
            text = self._place_check(at, axis, sign, self._limit(spread, sign, bound + step))
            return Code(text, self.facts.type_of(e, self.types).dtype, False)
        return None
