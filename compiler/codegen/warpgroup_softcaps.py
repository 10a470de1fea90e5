"""exp(c · tanh(x)) for the many x of a row, in fewer instructions where all of them are small.

For |x| < a, tanh(x) is x · q(x² - a²) with a polynomial q of few terms and an error that `near_functions.py` allows: no
special function but the exponential's. Factors of x and c go into its coefficients. It takes t = x² - a² because the sign
of t says whether it may be used: a row's elements take this way where t is negative for all that a warp holds of it. NaN
and infinities are not.

To ask costs much of what a polynomial saves. A warp for which there was none does not ask in its next steps.
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
    """q for |x| < `bound`: the coefficients of 1, u, u² … of least |x · q(u) - tanh(x)|, u = x² - bound² (Remez exchange
    over odd polynomials)."""

    bound: float
    terms: tuple[float, ...]


SERIES = (
    Series(0.5625, (0.9063637852598322, -0.26285624378024336, 0.091507488379436, -0.04104596222657123)),
    Series(
        1.0,
        (
            0.7615939206598004, -0.17082872651880793, 0.04790709279687365,
            -0.014910795834162903, 0.0019168518905887033, -0.002839466182384677,
        ),
    ),
)  # fmt: skip
"""The shortest first; errors below 2^-21."""
LEAST_FACTOR, MOST_FACTOR = 2.0**-16, 2.0**16
"""Of x, for which powers in coefficients and bounds lie well inside f32."""
CHAINS = 4
"""Of signs, that need not wait for each other."""
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
        """-a² in terms of what stands in registers, and the coefficients, the first first."""
        size = Apply("abs", (factor,))
        fits = Apply("and", (Apply("le", (_f32(LEAST_FACTOR), size)), Apply("le", (size, _f32(MOST_FACTOR)))))
        limit = Apply("div", (_f32(s.bound), factor))
        minus = Apply("where", (fits, Apply("neg", (_product(limit, limit),)), _f32(1.0)))
        found, power = [self._number("minus_square", minus)], _product(scale, factor)
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
        """Each row by itself, so that its t have registers."""
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
                self._compute_row(target, c, whole, at, column, [])
        self.text.line("else:")
        with self.text.indented():
            for at in rows:
                self._compute_row(target, c, whole, at, column, self.series[c.key])

    def _compute_row(
        self, target: Registers, c: Capped, whole: Expr, at: Point, column: str, series: list[list[Name]]
    ) -> None:
        """By the first of the series that serves all of a row's elements, or as a whole."""
        element = f"{target.array}[{at.element(target.layout)}]"
        if not series:
            with self._each(at, column):
                self.text.line(f"{element} = {self.emit(whole, at).text}")
            return
        minus, *terms = (self.emit(n, at).text for n in series[0])
        x = self.emit(c.x, at).text
        square, signs = self._squares(x, minus, at, column)
        polynomial = terms.pop()
        for q in reversed(terms):
            polynomial = f"fma_f32({square}, {polynomial}, {q})"
        self.text.line(f"if any_lane(i32({signs} >= 0)) == 0:")
        with self.text.indented(), self._each(at, column):
            self.text.line(f"{element} = near_exp2_f32({x} * {polynomial})")
        self.text.line("else:")
        with self.text.indented():
            if not series[1:]:
                self.text.line(f"{self.steps_left[c.key]} = i32({STEPS_WITHOUT_ASKING})")
            self._compute_row(target, c, whole, at, column, series[1:])

    def _squares(self, x: str, minus: str, at: Point, column: str) -> tuple[str, str]:
        """t of a row's elements, and a number that is negative where all of them are."""
        count, counter = at.layout.spread(column).count, at.counters[column]
        squares, signs = self.names.fresh("squares"), self.names.fresh("signs")
        self.text.line(f"{squares} = registers_f32({count})")
        with self._each(at, column):
            self.text.line(f"{squares}[{counter}] = fma_f32({x}, {x}, {minus})")
        chains = min(CHAINS, count // 2)
        self.text.line(f"{signs} = registers_i32({chains})")
        for i in range(0, count, 2):
            chain = f"{signs}[{i // 2 % chains}]"
            before = chain if i >= 2 * chains else "i32(-1)"
            self.text.line(f"{chain} = both_signs_f32({before}, {squares}[{i}], {squares}[{i + 1}])")
        return f"{squares}[{counter}]", f"({' & '.join(f'{signs}[{i}]' for i in range(chains))})"

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
