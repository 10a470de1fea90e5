"""Element code of tier `wgmma`: what many elements of a row in one thread make worth writing otherwise than in `simt`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import Apply, Expr, Load, LoopAxis, Name
from .deal import Layout, Spread
from .mma import MatrixKernel
from .scalar_cuda import Code, combine, convert
from .simt_reduction import Reduction
from .simt_source import NOWHERE, Point, Registers, holding, starts_late
from .tile_types import leaves
from .warpgroup_form import ends_tile, scalar_values, slope

QUAD_COLUMNS = 32
"""Columns of a row that four threads read together, 16 bytes each."""


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
        exist = not self.asks(Point(joined, {**at.counters, axis: "0"}), axis)
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
        k._index(Point(self.over, inner.counters), axis, axis in indexed, bool(self.asks(inner, axis)))
        value = self.converted(k.emit(self.e.arg, inner))
        step = value if first else combine(self.e.fn, Code(name, self.held), value)
        k.guarded(self.asks(inner, axis), f"{name} = {step.text}")

    def asks(self, at: Point, axis: str) -> list[str]:
        """The conditions under which an element counts; none where others change nothing: 0 in a sum, -inf in a maximum."""
        neutral = {"sum": self.k.zeroed, "max": self.k.lowest}.get(self.e.fn, set())
        is_neutral = isinstance(self.e.arg, Name) and self.e.arg.name in neutral
        return [] if is_neutral else self.k.conditions(at, [axis])


class RowElements(MatrixKernel):
    """Comparisons of indices along a row are of small numbers: a thread's place in the tile, and a bound that its elements
    share, kept inside the tile's size."""

    reduction = RowReduction
    narrow_indices = False
    """Do 32 bits hold every index, for the copy engine takes no others?"""

    def _give_names(self) -> None:
        super()._give_names()
        self.limits: dict[tuple[str, Spread], list[tuple[str, str]]] = {}
        self.zeroed: set[str] = set()  # values that are 0 on lanes that do not exist
        self.lowest: set[str] = set()  # values that are -inf there

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

    def load_ahead(self, e: Load, layout: Layout) -> None:
        """A tile of 16-bit elements by 16 bytes: the four threads that share rows read 64 bytes of one together, a quarter
        of the accesses that two columns at a time are, and hand each other what the layout gives them."""
        own = layout.restrict(self.facts.type_of(e, self.types).axes)
        if e in self.ahead or not self._in_quads(e, own):
            super().load_ahead(e, layout)
            return
        row, column = own.axes
        param = self.program.param(e.tensor)
        self.wide_tensors[e.tensor] = None
        array, words, t = (self.names.fresh(n) for n in (f"{e.tensor}_ahead", f"{e.tensor}_words", "turn"))
        self.text.line(f"{array} = registers_f32({own.elements})")
        self.text.line(f"{words} = registers_i32(4)")
        depth = self.text.depth
        rows = self.open(own.restrict((row,)), [e], set(), NOWHERE)
        self.renew(column)
        lane = self.coordinate(own.spread(column))
        self.text.line(f"{self.axis_names[column].index} = {self._first(column)}8 * {lane}")
        at = Point(own, {**rows.counters, column: "0"})
        where = [convert(self.cut(self.emit(x, at), 40), DType.I64) for x in e.subscripts]
        offset = self.cut(Code(self.offset(param, where, packed=True), DType.I64), 0).text
        group = self.names.fresh("group")
        self.text.line(f"for {group} in range({own.spread(column).tile // QUAD_COLUMNS}):")
        self.text.depth += 1
        self.text.line(
            f"load16_words_u16({self.tensors[e.tensor]}, {offset} + {QUAD_COLUMNS} * {group}, {words}, 0)"
        )
        for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
            for low, high in pairs:  # a thread keeps one word of each pair and trades the other
                mine = f"{lane} & {bit} != 0"
                sent = f"select_i32({mine}, {words}[{low}], {words}[{high}])"
                self.text.line(f"{t} = cuda.shfl_xor_sync(ALL_LANES, {sent}, {bit})")
                self.text.line(f"{words}[{low}] = select_i32({mine}, {t}, {words}[{low}])")
                self.text.line(f"{words}[{high}] = select_i32({mine}, {words}[{high}], {t})")
        first = f"{at.element(own)} + 8 * {group}"
        for i in range(4):
            for half in (0, 1):
                value = f"{'upper' if half else 'lower'}_{param.dtype}({words}[{i}])"
                self.text.line(f"{array}[{first} + {2 * i + half}] = {value}")
        self.text.depth = depth
        self.ahead[e] = Registers(array, own)

    def _loaded_ahead(self, e: Load, at: Point) -> Code:
        """An element from registers. On lanes that do not exist it is what lies there, and nothing comes of it: whoever
        reduces, multiplies or stores a tile asks which lanes exist."""
        registers = self.ahead[e]
        return holding(
            f"{registers.array}[{at.element(registers.layout)}]", self.program.param(e.tensor).dtype
        )

    def _in_quads(self, e: Load, own: Layout) -> bool:
        """Does a tile lie in memory as whole rows of whole chunks, its columns last?"""
        param = self.program.param(e.tensor)
        if param.dtype not in (DType.F16, DType.BF16) or len(own.axes) != 2:
            return False
        column = own.axes[1]
        along = own.spread(column)
        whole = all(self.wide.divides(self.live[a].extent, own.spread(a).tile) for a in own.axes)
        dealt = (along.run, along.step, along.tile % QUAD_COLUMNS) == (2, 4, 0) and along.even
        free = not any(self.depends_on_tensors(x) for x in e.subscripts)
        return whole and dealt and free and self.runs_along(e.tensor, e.subscripts, own) == column

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

    def lane_checks(self, at: Point, axis: str, together: int = 1) -> list[str]:
        spread = at.layout.spread(axis)
        plain = axis in self._whole() or axis in self.full or spread.run != 2 or at.by_run not in (None, axis)
        if plain or not spread.even:
            return super().lane_checks(at, axis, together)
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
            found.append(("<=", self._narrow(f"{names.hi} - {names.first} - 1")))
        elif self.has_tail(a, spread.tile):
            found.append(("<=", self._narrow(f"{self.emit(a.extent, NOWHERE).operand} - {names.first} - 1")))
        if starts_late(a) and not self._starts_a_tile(a):
            found.append((">=", self._narrow(f"{names.lo} - {names.first}")))
        return [(sign, self._limit(spread, sign, bound)) for sign, bound in found]

    def _narrow(self, difference: str) -> str:
        """A difference of an axis's indices."""
        return f"i32({difference})" if self.narrow_indices else difference

    def _starts_a_tile(self, a: LoopAxis) -> bool:
        return a.lo is not None and ends_tile(a.lo, a, scalar_values(self.program.body))

    def _limit(self, spread: Spread, sign: str, bound: str) -> str:
        """A bound of 64 bits as one of a thread's places in a tile."""
        low = -1 if sign == "<=" else 0
        own = f"{self.coordinate(spread)} * {spread.run}"
        if bound.startswith("i32("):
            return f"i32(clamp_i32({bound}, {low}, {spread.tile}) - {own})"
        return f"i32(min(max({bound}, {low}), {spread.tile}) - {own})"

    def _place_check(self, at: Point, axis: str, sign: str, limit: str) -> str:
        """Compare a lane's place in its tile with a limit; of a run, where one of its lanes is on the right side."""
        spread, i = at.layout.spread(axis), at.counters[axis]
        if at.by_run == axis:
            last = f" + {spread.run - 1}" if sign == ">=" else ""
            return f"i32({spread.run * spread.step} * {i}{last}) {sign} {limit}"
        return f"i32({spread.run * spread.step} * ({i} >> 1) + ({i} & 1)) {sign} {limit}"

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        compared = self._compared(e, at)
        return compared or super()._node(e, args, at)

    def _compared(self, e: Expr, at: Point) -> Code | None:
        """A comparison of indices of which one side grows along the row with the element's place."""
        if not isinstance(e, Apply) or at.by_run is not None:
            return None
        for axis in at.layout.axes:
            spread = at.layout.spread(axis)
            if spread.run == 2 and self.sign_along(e, axis) is not None:
                rest = Point(at.layout.restrict(a for a in at.layout.axes if a != axis), at.counters)
                text = self._place_check(at, axis, *self.bound(e, axis, spread, rest))
                return Code(text, self.facts.type_of(e, self.types).dtype, False)
        return None

    def sign_along(self, e: Apply, axis: str) -> str | None:
        """Does a comparison of indices bound the places of an axis from above, "<=", or from below, ">="?"""
        if e.op not in ("lt", "le") or axis not in self.live or axis in self._whole():
            return None
        x, y = e.args
        if not all(self.facts.type_of(z, self.types).dtype.is_integer for z in (x, y)):
            return None
        grows, other = slope(x, axis), slope(y, axis)
        if grows is None or other is None or abs(grows - other) != 1:
            return None
        return "<=" if grows > other else ">="

    def bound(self, e: Apply, axis: str, spread: Spread, rest: Point) -> tuple[str, str]:
        """What a comparison asks of a thread's places along an axis, at a point of the others."""
        left, right = (self.emit(z, rest).operand for z in e.args)
        sign = self.sign_along(e, axis) or ""
        bound = f"{right} - {left}" if sign == "<=" else f"{left} - {right}"
        step = {"<=": " - 1", ">=": " + 1"}[sign] if e.op == "lt" else ""
        return sign, self._limit(spread, sign, bound + step)
