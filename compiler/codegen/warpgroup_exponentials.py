"""exp(c · (x - r)) for the many x of a row, exact for numbers of any size: one fused multiply-add and one exp2 each where a
rounded shift cancels, a difference, a product and one exp2 where it need not.

With s = c · log2 e and the rounded shift h = r · s, the same for the whole row, exp2(fma(x, s, -h)) has all weights of the
row off by one factor, exp2(r · s - h), which |r| · 2^-24 may bring far from 1 (for r of 10^7 it is 0.8 or 1.3). So the
fused form is for a row that is a running maximum of the loop, in a program whose results do not depend on what that maximum
is (`lazy_maximum.py` proves it: they divide one sum of the row by another, or are log-sum-exps). For an r that is given, as
in exp(s - lse), or that is stored with the sums, as for what two launches merge, differences are subtracted first: exp2((x
- r) · s).

A state that was accumulated under the shift h' of r' moves on by exp2(h' - h), from the same rounded products, and so does
exp(c · (r' - r)) here. Where |h| is 2^30 or more, that rounding could overflow an exponential: there the weight of an x that
differs from r is 2^-64 or less, whatever s is, and s gives way to a power of two, for which x and r are subtracted without
error: 1 or, for an r below 2^32, 2^95 (good for r from 2^-65 on). Below 2^30 the factor of a row lies within 2^-32 and 2^32,
which f32 and bf16 hold, but f16 does not: programs that round weights to f16 subtract first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Const,
    Expr,
    For,
    Load,
    Name,
    Reduce,
    TileProgram,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from .deal import Spread
from .lazy_maximum import rows_that_cancel
from .simt_source import NOWHERE, Value
from .streams import with_named_operands
from .tile_types import rewrite
from .warpgroup_masks import RowMasks

LOG2_E = 1.4426950408889634
HUGE = float(1 << 30)
FLAT, STEEP = 1.0, float(1 << 95)
MOST_BY_STEEP = float(1 << 32)
"""Below it, a number times `STEEP` is no infinity."""


@dataclass(frozen=True)
class Shifted:
    """exp(scale · (x - row)); `scale` is None where there is no factor."""

    scale: Expr | None
    x: Expr
    row: Name


@dataclass(frozen=True)
class Scale:
    """A scale times log2 e, and the powers of two with its sign to which it gives way."""

    by: Name
    flat: Name
    steep: Name


def shifted(e: Expr) -> Shifted | None:
    """An exponential of a difference, recognised."""
    match e:
        case Apply(op="exp", args=(Apply(op="mul", args=(c, Apply(op="sub", args=(x, Name() as r)))),)):
            return Shifted(c, x, r)
        case Apply(op="exp", args=(Apply(op="sub", args=(x, Name() as r)),)):
            return Shifted(None, x, r)
    return None


def subtracted_first(program: TileProgram) -> list[str]:
    """The rows from which exponentials in loops subtract before they multiply, because the shift need not cancel."""
    ready = with_named_operands(program, rounds=True)
    loops = tuple(s for s in statements(ready.body) if isinstance(s, For))
    inside = (e for s in statements(loops) for e in expressions(s))
    found = [x for e in inside for part in subexpressions(e) if (x := shifted(part)) is not None]
    cancelling = rows_that_cancel(ready) if found else frozenset[str]()
    return list(dict.fromkeys(x.row.name for x in found if x.row.name not in cancelling))


class RowExponentials(RowMasks):
    """Exponentials in the steps of a loop."""

    def _give_names(self) -> None:
        super()._give_names()
        self.scales: dict[Expr | None, Scale] = {}
        self.shifts: dict[tuple[Expr | None, Name], tuple[Name, Name]] = {}
        self.cancelling = rows_that_cancel(self.program)

    def before_loop(self, found: Iterable[Expr]) -> None:
        """Compute what the scales of exponentials become, once."""
        self.scales = {}
        for e in found:
            for part in subexpressions(e):
                s = shifted(part)
                if s is not None and s.scale not in self.scales and self._is_known(s.scale):
                    self.scales[s.scale] = self._scale(s.scale)

    def _is_known(self, scale: Expr | None) -> bool:
        """Is a scale one number, known before the loop?"""
        if scale is None:
            return True
        inner = list(subexpressions(scale))
        known = all(not isinstance(x, Name) or x.name in self.values for x in inner)
        plain = known and not any(isinstance(x, Load | Reduce) for x in inner)
        return plain and self._is_shared(scale)

    def _scale(self, scale: Expr | None) -> Scale:
        """scale · log2 e (the scale itself where that is no f32), and what it gives way to."""
        factor: Expr = Const(LOG2_E, DType.F32)
        if scale is not None:
            product = Apply("mul", (scale, factor))
            is_finite = Apply("lt", (Apply("abs", (product,)), Const(math.inf, DType.F32)))
            factor = Apply("where", (is_finite, product, scale))
        by = self._number("scale", factor)
        negative = Apply("lt", (by, Const(0.0, DType.F32)))

        def signed(size: float) -> Expr:
            return Apply("where", (negative, Const(-size, DType.F32), Const(size, DType.F32)))

        return Scale(by, self._number("flat", signed(FLAT)), self._number("steep", signed(STEEP)))

    def _number(self, name: str, e: Expr) -> Name:
        code = self.emit(self.materialise(e), NOWHERE)
        return self.temporary(name, Value(TileType(DType.F32), scalar=self.assign(name, code)))

    def is_row(self, spread: Spread) -> bool:
        """Is an axis dealt over lanes as the rows of products are?"""
        return spread.between

    def with_shifts(self, e: Expr) -> Expr:
        """The same expression with its exponentials of differences in terms of shifts."""
        return rewrite(e, self._with_shift)

    def _with_shift(self, e: Expr) -> Expr:
        s = shifted(e)
        if s is None or s.scale not in self.scales or s.row.name not in self.types:
            return e
        row, own = self.types[s.row.name], self.facts.type_of(s.x, self.types)
        by_rows = len(row.axes) == 1 and self.is_row(self.deal.alone(row.axes[0]))
        if row.dtype is not DType.F32 or own.dtype is not DType.F32 or not by_rows:
            return e
        by = self.scales[s.scale].by
        apart = Apply("mul", (Apply("sub", (s.x, s.row)), by))
        if s.row.name not in self.cancelling:
            return Apply("exp2", (apart,))
        slope, lift = self._shift(s)
        if own.axes == row.axes:
            near = Apply("add", (Apply("mul", (s.x, by)), lift))
            return Apply("exp2", (Apply("where", (self._is_huge(s.row, by), apart, near)),))
        return Apply("exp2", (Apply("fma", (s.x, slope, lift)),))

    def _is_huge(self, row: Name, by: Name) -> Expr:
        return Apply("le", (Const(HUGE, DType.F32), Apply("abs", (Apply("mul", (row, by)),))))

    def _shift(self, s: Shifted) -> tuple[Name, Name]:
        """A row's factor, and what is added: minus the rounded shift."""
        key = (s.scale, s.row)
        if key not in self.shifts:
            own = self.scales[s.scale]
            is_steep = Apply("lt", (Apply("abs", (s.row,)), Const(MOST_BY_STEEP, DType.F32)))
            power = Apply("where", (is_steep, own.steep, own.flat))
            slope = self._row("slope", s.row, Apply("where", (self._is_huge(s.row, own.by), power, own.by)))
            lift = self._row("lift", s.row, Apply("neg", (Apply("mul", (s.row, slope)),)))
            self.shifts[key] = slope, lift
        return self.shifts[key]

    def _row(self, name: str, like: Name, e: Expr) -> Name:
        registers = self.registers(name, self.types[like.name])
        self.map(registers, DType.F32, e)
        return self.temporary(name, Value(self.types[like.name], registers=registers))
