"""Element code of tier `wgmma`: what many elements of a row in one thread make worth writing otherwise than in `simt`."""

from __future__ import annotations

from dataclasses import replace

from ..tile_ir import Apply, AxisIndex, Expr, subexpressions
from .deal import Layout
from .mma import MatrixKernel
from .scalar_cuda import Code, combine
from .simt_reduction import Reduction
from .simt_source import NOWHERE, Point, starts_late


def slope(e: Expr, axis: str) -> int | None:
    """How an expression grows with an axis's index; None where that is no whole number."""
    match e:
        case AxisIndex(axis=a):
            return int(a == axis)
        case Apply(op="add" | "sub" as op, args=(a, b)):
            x, y = slope(a, axis), slope(b, axis)
            return None if x is None or y is None else x + y if op == "add" else x - y
    return None if any(x == AxisIndex(axis) for x in subexpressions(e)) else 0


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
        for name in names:
            k.text.line(f"{name} = {self.start().text}")
        k.renew(axis)
        counter = k.axis_names[axis].counter
        k.text.line(f"for {counter} in range({spread.count // 2}):")
        k.text.depth += 1
        for lane, name in enumerate(names):
            joined = Layout((*at.layout.axes, axis), (*at.layout.spreads, spread))
            inner = Point(joined, {**at.counters, axis: f"(2 * {counter} + {lane})"})
            indexed, _ = k._axes_needed([self.e.arg])
            k._index(Point(self.over, inner.counters), axis, axis in indexed, True)
            value = self.converted(k.emit(self.e.arg, inner))
            step = combine(self.e.fn, Code(name, self.held), value)
            k.guarded(k.conditions(inner, [axis]), f"{name} = {step.text}")
        k.text.depth = depth
        both = combine(self.e.fn, Code(names[0], self.held), Code(names[1], self.held))
        k.text.line(f"{self.name} = {both.text}")
        for bit in self.lanes():
            self.shuffle(1 << bit)


class RowElements(MatrixKernel):
    """Comparisons of indices along a row are of small numbers: a thread's place in the tile, and a bound that its elements
    share, kept inside the tile's size."""

    reduction = RowReduction

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
        spread, a = at.layout.spread(axis), self.live[axis]
        plain = axis in self._whole() or axis in self.full or spread.run != 2 or at.by_run is not None
        if plain or not spread.even:
            return super().lane_checks(at, axis)
        names, checks = self.axis_names[axis], []
        if a.hi is not None:
            checks.append(self._place_check(at, axis, "<=", f"{names.hi} - {names.first} - 1"))
        elif self.has_tail(a, spread.tile):
            end = self.emit(a.extent, NOWHERE).operand
            checks.append(self._place_check(at, axis, "<=", f"{end} - {names.first} - 1"))
        if starts_late(a):
            checks.append(self._place_check(at, axis, ">=", f"{names.lo} - {names.first}"))
        return checks

    def _place_check(self, at: Point, axis: str, sign: str, bound: str) -> str:
        """Compare a lane's place in its tile with a bound of 64 bits."""
        spread, i = at.layout.spread(axis), at.counters[axis]
        low = -1 if sign == "<=" else 0
        own = self.coordinate(spread)
        place = f"i32({spread.run * spread.step} * ({i} >> 1) + ({i} & 1))"
        return f"{place} {sign} i32(min(max({bound}, {low}), {spread.tile}) - {own} * {spread.run})"

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
            strict = e.op == "lt"
            if grows > other:
                text = self._place_check(at, axis, "<=", f"{right} - {left}{' - 1' if strict else ''}")
            else:
                text = self._place_check(at, axis, ">=", f"{left} - {right}{' + 1' if strict else ''}")
            return Code(text, self.facts.type_of(e, self.types).dtype, False)
        return None
