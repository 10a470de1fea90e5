"""exp(c · tanh(x)) for the many x of a row, in fewer instructions where all of them are small.

For |x| < a, tanh(x) is x · q(x²) with a polynomial q of few terms and an error that `near_functions.py` allows: no special
function but the exponential's. Factors of x and c go into its coefficients. A row's elements take the shortest polynomial
that is good for the largest of them that a warp holds.

To ask for the largest costs some of what a polynomial saves. A warp for which there was none does not ask in its next steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import Apply, Const, Expr, Name, TileType, subexpressions
from .near_functions import DOUBLE_LOG2_E
from .simt_source import Point, Registers, Value
from .tile_types import rewrite
from .warpgroup_exponentials import RowExponentials


@dataclass(frozen=True)
class Series:
    """q for |x| < `bound`: the coefficients of 1, x², x⁴ … of least |x · q(x²) - tanh(x)| (Remez exchange)."""

    bound: float
    terms: tuple[float, ...]


SERIES = (
    Series(0.5625, (0.9999944114007094, -0.33309101903528676, 0.13046908519779762, -0.041045961975894815)),
    Series(
        1.0,
        (
            0.9999968538854493, -0.33324003813203107, 0.132535253703308, -0.0509728657723469, 0.016114183362049703,
            -0.0028394663863603466,
        ),
    ),
    Series(
        1.5,
        (
            0.9999960249519577, -0.33324061335320854, 0.13269627736807205, -0.05195877449449675, 0.018363987550386495,
            -0.005111020269247187, 0.0009264030284958429, -7.818270830313362e-05,
        ),
    ),
)  # fmt: skip
"""The shortest first; errors below 2^-21."""
LEAST_FACTOR, MOST_FACTOR = 2.0**-16, 2.0**16
"""Of x, for which powers in coefficients and bounds lie well inside f32."""
CHAINS = 4
"""Of maxima, that need not wait for each other."""
STEPS_WITHOUT_ASKING = 15
"""Of a warp, after one in which some element was too large for all of `SERIES`."""


@dataclass(frozen=True)
class Capped:
    """exp_tanh(x · factor, scale), an `e`: 2^(scale · tanh(x · factor / (2 log2 e)))."""

    e: Expr
    x: Name
    factor: Expr
    scale: Const

    @property
    def key(self) -> tuple[Expr, Const]:
        return self.factor, self.scale


def capped_in(e: Expr) -> Iterator[Capped]:
    """The exponentials of softcapped names in an expression."""
    for part in subexpressions(e):
        match part:
            case Apply(op="exp_tanh", args=(Apply(op="mul", args=(Name() as x, factor)), Const() as scale)):
                yield Capped(part, x, factor, scale)


class RowSoftcaps(RowExponentials):
    """Exponentials of softcapped scores in the steps of a loop."""

    def _give_names(self) -> None:
        super()._give_names()
        self.series: dict[tuple[Expr, Const], list[list[Name]]] = {}  # by factor and scale
        self.steps_left: dict[tuple[Expr, Const], str] = {}  # without asking, likewise

    def before_loop(self, found: Iterable[Expr]) -> None:
        """Compute the bound and the coefficients of each softcap, once."""
        found = list(found)
        super().before_loop(found)
        self.series, self.steps_left = {}, {}
        for e in found:
            for c in capped_in(e):
                if c.key not in self.series and self._is_known(c.factor):
                    factor = self._number("factor", _product(c.factor, _f32(1 / DOUBLE_LOG2_E)))
                    self.series[c.key] = [self._terms(s, factor, c.scale) for s in SERIES]
                    self.steps_left[c.key] = self.names.fresh("steps_left")
                    self.text.line(f"{self.steps_left[c.key]} = i32(0)")

    def _terms(self, s: Series, factor: Name, scale: Const) -> list[Name]:
        """The bound in terms of what stands in registers, and the coefficients, the first first."""
        size = Apply("abs", (factor,))
        fits = Apply("and", (Apply("le", (_f32(LEAST_FACTOR), size)), Apply("le", (size, _f32(MOST_FACTOR)))))
        bound = Apply("where", (fits, Apply("div", (_f32(s.bound), size)), _f32(0.0)))  # nothing is below 0
        found, power = [self._number("bound", bound)], _product(scale, factor)
        for q in s.terms:
            found.append(self._number("term", _product(power, _f32(q))))
            power = _product(power, _product(factor, factor))
        return found

    def compute(self, target: Registers, dtype: DType, e: Expr) -> None:
        capped = next((c for c in capped_in(e) if c.key in self.series), None)
        if capped is None or len(target.layout.axes) != 2:
            super().compute(target, dtype, e)
            return
        self._compute_rows(target, capped)
        if e != capped.e:
            weights = self.temporary("weights", Value(TileType(dtype, target.layout.axes), registers=target))
            super().compute(target, dtype, rewrite(e, lambda x: weights if x == capped.e else x))

    def _compute_rows(self, target: Registers, c: Capped) -> None:
        """Each row by itself, for its elements share a bound."""
        whole, left = self.materialise(c.e), self.steps_left[c.key]
        self.prepare(whole, target.layout)
        row, column = target.layout.axes
        rows = [
            Point(target.layout, {row: str(i), column: self.names.fresh(f"{column}_i")})
            for i in range(target.layout.spread(row).count)
        ]
        self.text.line(f"if {left} > 0:")
        with self.text.indented():
            self.text.line(f"{left} = i32({left} - 1)")
            for at in rows:
                self._as_a_whole(target, whole, at, column)
        self.text.line("else:")
        with self.text.indented():
            for at in rows:
                self._compute_row(target, c, whole, at, column)

    def _compute_row(self, target: Registers, c: Capped, whole: Expr, at: Point, column: str) -> None:
        """By the first of the series that serves all of a row's elements, or as a whole."""
        largest = self._largest(self.emit(c.x, at).text, at, column)
        choice = "if"
        for numbers in self.series[c.key]:
            bound, *terms = (self.emit(n, at).text for n in numbers)
            self.text.line(f"{choice} any_lane(i32({largest} >= {bound})) == 0:")
            with self.text.indented():
                self._by_series(target, c, terms, at, column)
            choice = "elif"
        self.text.line("else:")
        with self.text.indented():
            self.text.line(f"{self.steps_left[c.key]} = i32({STEPS_WITHOUT_ASKING})")
            self._as_a_whole(target, whole, at, column)

    def _as_a_whole(self, target: Registers, whole: Expr, at: Point, column: str) -> None:
        with self._each(at, column):
            self.text.line(f"{target.array}[{at.element(target.layout)}] = {self.emit(whole, at).text}")

    def _by_series(self, target: Registers, c: Capped, terms: list[str], at: Point, column: str) -> None:
        x, square = self.emit(c.x, at).text, self.names.fresh("square")
        polynomial = terms.pop()
        for q in reversed(terms):
            polynomial = f"fma_f32({square}, {polynomial}, {q})"
        with self._each(at, column):
            self.text.line(f"{square} = {x} * {x}")
            self.text.line(f"{target.array}[{at.element(target.layout)}] = near_exp2_f32({x} * {polynomial})")

    def _largest(self, x: str, at: Point, column: str) -> str:
        """The largest |x| of a row's elements; NaN where one is NaN, which any polynomial leaves NaN."""
        count, counter = at.layout.spread(column).count, at.counters[column]
        largest = [self.names.fresh("largest") for _ in range(min(CHAINS, count))]
        element = f"abs_f32({x})"
        for i, name in enumerate(largest):
            self.text.line(f"{name} = f32(0.0)")
            self.text.line(f"for {counter} in range({i}, {count}, {len(largest)}):")
            with self.text.indented():
                self.text.line(f"{name} = max_f32({name}, {element})")
        found = largest[0]
        for name in largest[1:]:
            found = f"max_f32({found}, {name})"
        self.text.line(f"{largest[0]} = {found}")
        return largest[0]

    @contextmanager
    def _each(self, at: Point, column: str) -> Iterator[None]:
        """A loop over a row's elements."""
        self.text.line(f"for {at.counters[column]} in range({at.layout.spread(column).count}):")
        with self.text.indented():
            yield


def _f32(value: float) -> Const:
    return Const(value, DType.F32)


def _product(x: Expr, y: Expr) -> Expr:
    return Apply("mul", (x, y))
