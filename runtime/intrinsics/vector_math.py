"""exp, exp2, log, log2, tanh and erf of float32, each written once, as LLVM operations on a scalar or a vector of any width.

As scalars they are what LLVM vectorises in a loop; on `vectors.Vector` values they compute all lanes. There are no branches.
Errors over all finite arguments, against exact values, in units in the last place of the result (tests/test_vector_math.py
asserts them on more than a million points): exp 0.9, exp2 0.8, log 0.8, log2 1.2, tanh 2.5, erf 1.0; below the normal range
a unit is one subnormal step. Infinities, NaN, signed zeros and the ends of the range are those of the C library.

The polynomials of exp, exp2, tanh and erf have the least largest error (Lawson's iteration of weighted least squares,
coefficients rounded to float32 one after another, the others fitted again); exp is reduced to |r| <= log(2) / 2 as in
W. Cody and W. Waite, "Software Manual for the Elementary Functions" (1980), chapter 6. log follows S. Moshier's Cephes
library (logf).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...dsl.records import dataclass
from .vectors import call, constant, element, features, joined, lanes_from, suffix, vector_of

HAS_SCALE = "avx512f" in features()
"""Does one instruction multiply by a power of two (vscalefps, to which LLVM lowers `ldexp`)?"""
SCALED = 16
"""How many floats that instruction takes."""
CURRENT_ROUNDING = 4
"""Round as the control register says (`_MM_FROUND_CUR_DIRECTION`)."""
SHIFT = 12582912.0
"""1.5 · 2^23: added to a small float it leaves the nearest integer, to even, in the low bits."""
SHIFT_BITS = 0x4B400000
ROOT_BITS = 0x3F3504F3
"""The bits of sqrt(1/2)."""
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""log(2) in two parts, the first short enough for products with small integers to be exact."""
SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Value:
    """An LLVM float or vector of floats, with the operators of arithmetic; numbers stand for constants in all lanes."""

    builder: Any
    llvm: Any

    def of(self, x: Any) -> Any:
        return x.llvm if isinstance(x, Value) else constant(self.llvm.type, x)

    def new(self, llvm: Any) -> Value:
        return Value(self.builder, llvm)

    def __add__(self, x: Any) -> Value:
        return self.new(self.builder.fadd(self.llvm, self.of(x)))

    def __sub__(self, x: Any) -> Value:
        return self.new(self.builder.fsub(self.llvm, self.of(x)))

    def __mul__(self, x: Any) -> Value:
        return self.new(self.builder.fmul(self.llvm, self.of(x)))

    def __truediv__(self, x: Any) -> Value:
        return self.new(self.builder.fdiv(self.llvm, self.of(x)))

    def __lt__(self, x: Any) -> Any:
        return self.builder.fcmp_ordered("<", self.llvm, self.of(x))

    def __gt__(self, x: Any) -> Any:
        return self.builder.fcmp_ordered(">", self.llvm, self.of(x))

    def __ge__(self, x: Any) -> Any:
        return self.builder.fcmp_ordered(">=", self.llvm, self.of(x))

    def equals(self, x: Any) -> Any:
        return self.builder.fcmp_ordered("==", self.llvm, self.of(x))

    def fma(self, x: Any, y: Any) -> Value:
        """self · x + y with one rounding."""
        return self._called("fma", self.of(x), self.of(y))

    def _called(self, name: str, *args: Any) -> Value:
        kind = self.llvm.type
        return self.new(call(self.builder, f"llvm.{name}.{suffix(kind)}", kind, [self.llvm, *args]))

    def size(self) -> Value:
        """|self|"""
        return self._called("fabs")

    def signed(self, sign: Value) -> Value:
        """|self| with the sign of another value."""
        return self._called("copysign", sign.llvm)

    def where(self, condition: Any, other: Any) -> Value:
        """self where the condition holds, else `other`."""
        return self.new(self.builder.select(condition, self.llvm, self.of(other)))

    def at_most(self, high: float) -> Value:
        """The smaller of self and a constant; NaN stays NaN."""
        return self.new(self.of(high)).where(self > high, self)

    # -- bits

    def bits(self) -> Any:
        return self.builder.bitcast(self.llvm, self._words())

    def _words(self) -> Any:
        kind = self.llvm.type
        word = ir.IntType(32)
        return ir.VectorType(word, kind.count) if isinstance(kind, ir.VectorType) else word

    def word(self, x: int) -> Any:
        return constant(self._words(), x)

    def from_bits(self, words: Any) -> Value:
        return self.new(self.builder.bitcast(words, self.llvm.type))

    def times_power(self, shifted: Value, gone: Any = None) -> Value:
        """self · 2^n, rounded once, where `shifted` is n + SHIFT and -300 < n < 300; where `gone` holds 0, whatever self and
        n are."""
        b, kind = self.builder, self.llvm.type
        if HAS_SCALE and isinstance(kind, ir.VectorType) and kind.count % SCALED == 0:
            return self._scaled(shifted - SHIFT, gone)
        if HAS_SCALE:
            n = b.sub(shifted.bits(), self.word(SHIFT_BITS))
            kinds = f"{suffix(kind)}.{suffix(n.type)}"
            scaled = self.new(call(b, f"llvm.ldexp.{kinds}", kind, [self.llvm, n]))
        else:
            n = (
                shifted.bits()
            )  # SHIFT_BITS stays in it: a power takes the lowest 9 bits, which are 0 in that and its half
            half = b.ashr(n, self.word(1))
            scaled = self * self._power(half) * self._power(b.sub(n, half))
        return scaled if gone is None else self.new(self.of(0.0)).where(gone, scaled)

    def _scaled(self, n: Value, gone: Any) -> Value:
        """`times_power` by the instruction that takes n as a float and leaves 0 where a mask says so (`llvm.ldexp` would
        convert n first and select after)."""
        b, kind = self.builder, ir.VectorType(ir.FloatType(), SCALED)
        keep = None if gone is None else b.not_(gone)
        parts = []
        for first in range(0, self.llvm.type.count, SCALED):
            mask = ir.Constant(ir.IntType(SCALED), -1)
            if keep is not None:
                mask = b.bitcast(lanes_from(b, keep, first, SCALED), ir.IntType(SCALED))
            value, power = (lanes_from(b, x.llvm, first, SCALED) for x in (self, n))
            given = [value, power, constant(kind, 0.0), mask, ir.Constant(ir.IntType(32), CURRENT_ROUNDING)]
            parts.append(call(b, "llvm.x86.avx512.mask.scalef.ps.512", kind, given))
        return self.new(joined(b, parts))

    def _power(self, n: Any) -> Value:
        """2^n of integers -127 < n < 128 and multiples of 512 more."""
        b = self.builder
        return self.from_bits(b.shl(b.add(n, self.word(127)), self.word(23)))


def polynomial(x: Value, *coefficients: float) -> Value:
    """Σ c_i · x^i, the highest power first among the coefficients (Horner)."""
    first, second, *rest = coefficients
    total = x.new(x.of(first)).fma(x, second)
    for c in rest:
        total = total.fma(x, c)
    return total


def exp(x: Value) -> Value:
    """e^x, within 0.9 units in the last place."""
    gone = x < -104.0
    shifted, r = _reduced(_present(x, gone).at_most(89.0))
    p = polynomial(r, 0.0013820734, 0.008368677, 0.041668266, 0.16666521, 0.49999994, 1.0, 1.0)
    return p.times_power(shifted, gone)


def _present(x: Value, gone: Any) -> Value:
    """x, with 0 where its power is 0 unless scaling has a mask: a result below the normal range takes some processors
    fifteen times as long, and what a mask excludes is -inf."""
    return x if HAS_SCALE and isinstance(x.llvm.type, ir.VectorType) else x.new(x.of(0.0)).where(gone, x)


def _reduced(x: Value) -> tuple[Value, Value]:
    """(n + SHIFT, r) with x = n · log(2) + r, |r| <= log(2) / 2."""
    shifted = x.fma(math.log2(math.e), SHIFT)
    n = shifted - SHIFT
    return shifted, n.fma(-LN2_LOW, n.fma(-LN2_HIGH, x))


def exp2(x: Value) -> Value:
    """2^x, within 0.8 units in the last place."""
    gone = x < -151.0
    return _exp2_within(_present(x, gone).at_most(129.0), gone)


def _exp2_within(x: Value, gone: Any = None) -> Value:
    """2^x for -152 < x < 130 and NaN; 0 where `gone` holds."""
    shifted = x + SHIFT
    r = x - (shifted - SHIFT)
    p = polynomial(r, 1.5326463e-4, 0.0013390806, 0.009618506, 0.0555036, 0.24022648, 0.6931472, 1.0)
    return p.times_power(shifted, gone)


def tanh(x: Value) -> Value:
    """The hyperbolic tangent, within 2.5 units in the last place: E / (E + 2) where E = exp(2|x|) - 1."""
    doubled = (x.size() * 2.0).at_most(24.0)
    shifted, r = _reduced(doubled)
    p = polynomial(r, 1.9762572e-4, 0.0013932331, 0.008333545, 0.041666493, 0.16666666, 0.5)
    less_one = p.fma(r * r, r)  # exp(r) - 1
    power = x.new(x.of(1.0)).times_power(shifted)
    e = less_one.fma(power, power - 1.0)
    return (e / (e + 2.0)).signed(x)


def erf(x: Value) -> Value:
    """The error function, within 1.0 units in the last place: x + x · P(x²) near 0, elsewhere 1 - 2^-Q(|x|)."""
    a = x.size().at_most(4.0)
    t = a * a
    p = polynomial(
        t, 7.806903e-5, -7.997853e-4, 0.005187162, -0.026853347, 0.11283579, -0.37612626, 0.12837917
    )
    near = p.fma(a, a)
    q = polynomial(
        a, 2.8597735e-4, -0.0044226237, 0.03219423, -0.15020458, -0.918962, -1.6270676, -2.401291e-4
    )
    far = x.new(x.of(1.0)) - _exp2_within(q)
    return near.where(a < 1.0, far).signed(x)


def _split(x: Value) -> tuple[Value, Value]:
    """(e, m - 1) with x = m · 2^e, sqrt(1/2) <= m < sqrt(2), for x > 0, subnormals too."""
    b = x.builder
    tiny = x < SMALLEST_NORMAL
    normal = (x * 2.0**23).where(tiny, x)
    word = b.sub(normal.bits(), x.word(ROOT_BITS))
    e = x.new(b.sitofp(b.ashr(word, x.word(23)), x.llvm.type)) - x.new(x.of(23.0)).where(tiny, 0.0)
    m = x.from_bits(b.add(b.and_(word, x.word(0x7FFFFF)), x.word(ROOT_BITS)))
    return e, m - 1.0


def _log_tail(f: Value) -> Value:
    """log(1 + f) - f for |f| < 0.42."""
    p = polynomial(
        f,
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
    return p * f * (f * f)


def _log_specials(x: Value, y: Value) -> Value:
    """y, but log's values at 0, infinity, negative numbers and NaN."""
    y = x.where(x > 3.4028235e38, y)
    y = y.where(x >= 0.0, math.nan)
    return x.new(x.of(-math.inf)).where(x.equals(0.0), y)


def log(x: Value) -> Value:
    """The natural logarithm, within 0.8 units in the last place."""
    e, f = _split(x)
    y = e.fma(LN2_LOW, _log_tail(f))
    y = (f * f).fma(-0.5, y)
    return _log_specials(x, e.fma(LN2_HIGH, f + y))


def log2(x: Value) -> Value:
    """The logarithm to base 2, within 1.2 units in the last place."""
    e, f = _split(x)
    y = (f * f).fma(-0.5, _log_tail(f))
    rest = math.log2(math.e) - 1.0
    z = f.fma(rest, y * rest)
    return _log_specials(x, ((z + y) + f) + e)


def _exported(function: Callable[[Value], Value]) -> Any:
    """The function as Numba sees it, for float32 and vectors of it."""

    def applied(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Any, sig: Any, args: Sequence[Any]) -> Any:
            return function(Value(b, args[0])).llvm

        if element(x) != types.float32:
            return None
        kind = vector_of(x, types.float32)
        return kind(kind), emit

    applied.__doc__ = function.__doc__
    return intrinsic(applied)


exp_f32, exp2_f32, log_f32, log2_f32, tanh_f32, erf_f32 = map(_exported, (exp, exp2, log, log2, tanh, erf))
