"""exp(c · tanh(x)) for the many x of a row, in fewer instructions where all of them are small.

For |x| < a, tanh(x) is x · q(x² - a²) with a polynomial q of few terms and an error that `near_functions.py` allows: no
special function but the exponential's. Factors of x and c go into its coefficients. It takes t = x² - a² because the sign
of t says whether it may be used: a row's elements take this way where t is negative for all that a warp holds of it. NaN
and infinities are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...dsl.types import DType
from ..tile_ir import Apply, Const, Expr, Name, TileType, subexpressions
from .near_functions import DOUBLE_LOG2_E
from .simt_source import Point, Registers, Value
from .tile_types import rewrite
from .warpgroup_exponentials import RowExponentials

NEAR = 0.3125
"""|x| up to which the polynomial stands for tanh."""
SERIES = (0.9686718533659832, -0.3085832398775285, 0.12457081785809668)
"""q of least |x · q(x² - NEAR²) - tanh(x)| on [-NEAR, NEAR], 2^-22.0 (Remez exchange, odd polynomials; the tests measure it)."""
LEAST_FACTOR, MOST_FACTOR = 2.0**-16, 2.0**16
"""Of x, for which powers in coefficients and bounds lie well inside f32."""
CHAINS = 4
"""Of signs, that need not wait for each other."""


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
        self.series: dict[tuple[Expr, Const], list[Name]] = {}  # by factor and scale

    def before_loop(self, found: Iterable[Expr]) -> None:
        """Compute the bound and the coefficients of each softcap, once."""
        found = list(found)
        super().before_loop(found)
        self.series = {}
        for e in found:
            for c in capped_in(e):
                if c.key not in self.series and self._is_known(c.factor):
                    self.series[c.key] = self._series(c)

    def _series(self, c: Capped) -> list[Name]:
        """-a² in terms of what stands in registers, and the coefficients, the first first."""
        factor = self._number("factor", _product(c.factor, _f32(1 / DOUBLE_LOG2_E)))
        size = Apply("abs", (factor,))
        fits = Apply("and", (Apply("le", (_f32(LEAST_FACTOR), size)), Apply("le", (size, _f32(MOST_FACTOR)))))
        limit = Apply("div", (_f32(NEAR), factor))
        minus = Apply("where", (fits, Apply("neg", (_product(limit, limit),)), _f32(1.0)))
        found, power = [self._number("minus_near", minus)], _product(c.scale, factor)
        for q in SERIES:
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
        whole = self.materialise(c.e)
        self.prepare(whole, target.layout)
        row, column = target.layout.axes
        for i in range(target.layout.spread(row).count):
            at = Point(target.layout, {row: str(i), column: self.names.fresh(f"{column}_i")})
            x, element = self.emit(c.x, at).text, f"{target.array}[{at.element(target.layout)}]"
            _, *terms = (self.emit(n, at).text for n in self.series[c.key])
            near, signs = self._squares(c, at, column)
            polynomial = terms[-1]
            for q in reversed(terms[:-1]):
                polynomial = f"fma_f32({near}, {polynomial}, {q})"
            self.text.line(f"if any_lane(i32({signs} >= 0)) == 0:")
            with self.text.indented(), self._each(at, column):
                self.text.line(f"{element} = near_exp2_f32({x} * {polynomial})")
            self.text.line("else:")
            with self.text.indented(), self._each(at, column):
                self.text.line(f"{element} = {self.emit(whole, at).text}")

    def _squares(self, c: Capped, at: Point, column: str) -> tuple[str, str]:
        """t of a row's elements, and a number that is negative where all of them are."""
        count, counter = at.layout.spread(column).count, at.counters[column]
        near, signs = self.names.fresh("near"), self.names.fresh("signs")
        minus, x = self.emit(self.series[c.key][0], at).text, self.emit(c.x, at).text
        self.text.line(f"{near} = registers_f32({count})")
        with self._each(at, column):
            self.text.line(f"{near}[{counter}] = fma_f32({x}, {x}, {minus})")
        chains = min(CHAINS, count // 2)
        self.text.line(f"{signs} = registers_i32({chains})")
        for i in range(0, count, 2):
            chain = f"{signs}[{i // 2 % chains}]"
            before = chain if i >= 2 * chains else "i32(-1)"
            self.text.line(f"{chain} = both_signs_f32({before}, {near}[{i}], {near}[{i + 1}])")
        return f"{near}[{counter}]", f"({' & '.join(f'{signs}[{i}]' for i in range(chains))})"

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
