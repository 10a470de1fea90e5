"""What generated CPU source imports: element types, exact scalar operations, vectorisable mathematics, tile kernels.

Everything here is a Numba function or intrinsic that inlines into the loops of a generated kernel; LLVM vectorises the
loops. Tile values of f16 and bf16 are held as float32 that has been rounded to the narrow type, those of i8, i16 and u8 as
int32 within range; only tensors in memory are narrow (`widen_*`, `narrow_*`).

The float32 functions `exp`, `exp2`, `log`, `log2`, `tanh` and `erf` are those of `vector_math`; float64 functions are the C
library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_math import erf_f32 as erf_f32
from .vector_math import exp2_f32 as exp2_f32
from .vector_math import exp_f32 as exp_f32
from .vector_math import log2_f32 as log2_f32
from .vector_math import log_f32 as log_f32
from .vector_math import tanh_f32 as tanh_f32
from .vectors import broadcast, constant, converted, element, extreme, is_vector, suffix, vector_of

bool_, f32, f64, i32, i64 = np.bool_, np.float32, np.float64, np.int32, np.int64
u16 = np.uint16
at = np.uint64
"""A subscript known not to be negative: Numba then does not test for indexing from the end."""
inf, nan = math.inf, math.nan

Builder = Any
Emit = Callable[[Any, Builder, Any, Any], Any]
_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

# ---------------------------------------------------------------- LLVM operations

_unliteral: Any = types.unliteral
_declare: Any = cgutils.get_or_insert_function


def _emitted(function: Callable[..., Any]) -> Any:
    """A Numba intrinsic; to its callers it is a function of the arguments after the typing context."""
    return intrinsic(function)


def _call(b: Builder, name: str, result: Any, args: list[Any]) -> Any:
    """A call of an LLVM intrinsic; `name` carries the type suffixes."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(_declare(b.module, kind, name), args)


def _common(*kinds: Any) -> Any:
    """The type in which an operation computes: that of its vectors, where one takes part."""
    return next((k for k in kinds if is_vector(k)), _unliteral(kinds[0]))


def _unary(name: str) -> Any:
    """The LLVM intrinsic `name` on one float or a vector of them."""

    @_emitted
    def operation(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            return _call(b, f"llvm.{name}.{suffix(args[0].type)}", args[0].type, list(args))

        return x(x), emit

    return operation


sqrt, floor, ceil, rint, fabs = map(_unary, ("sqrt", "floor", "ceil", "rint", "fabs"))


@_emitted
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c with one rounding; integers wrap."""
    kind = _common(a, b, c)

    def emit(context: Any, bd: Builder, sig: Any, args: Any) -> Any:
        x, y, z = (converted(context, bd, v, t, kind) for v, t in zip(args, sig.args, strict=True))
        if not isinstance(element(kind), types.Float):
            return bd.add(bd.mul(x, y), z)
        return _call(bd, f"llvm.fma.{suffix(x.type)}", x.type, [x, y, z])

    return kind(*(k if is_vector(k) else element(kind) for k in (a, b, c))), emit


@_emitted
def select(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    """`a` if `condition` else `b`, lane by lane and without a branch: all are evaluated."""
    kind = vector_of(_common(condition, a, b), element(_common(a, b)))

    def emit(context: Any, bd: Builder, sig: Any, args: Any) -> Any:
        x, y = (converted(context, bd, v, t, kind) for v, t in zip(args[1:], sig.args[1:], strict=True))
        # one condition for all lanes: LLVM would branch for each register
        alike = is_vector(kind) and not is_vector(condition)
        return bd.select(broadcast(bd, args[0], kind.lanes) if alike else args[0], x, y)

    sides = (k if is_vector(k) else element(kind) for k in (a, b))
    return kind(condition if is_vector(condition) else types.boolean, *sides), emit


def _extreme(symbol: str, summary: str) -> Any:
    @_emitted
    def operation(typing: Any, a: Any, b: Any) -> Any:
        kind = _common(a, b)

        def emit(context: Any, bd: Builder, sig: Any, args: Any) -> Any:
            x, y = (converted(context, bd, v, t, kind) for v, t in zip(args, sig.args, strict=True))
            return extreme(bd, x, y, symbol)

        return kind(*(k if is_vector(k) else element(kind) for k in (a, b))), emit

    operation.__doc__ = summary
    return operation


maximum = _extreme(">", "The larger; NaN if either is.")
minimum = _extreme("<", "The smaller; NaN if either is.")


def _division(remainder: bool) -> Any:
    """Integer `//` or `%`, rounding toward minus infinity; by zero 0; the one overflow wraps."""

    @_emitted
    def operation(typing: Any, a: Any, b: Any) -> Any:
        def emit(context: Any, bd: Builder, sig: Any, args: Any) -> Any:
            x, y = args
            zero, one = ir.Constant(x.type, 0), ir.Constant(x.type, 1)
            special = bd.or_(bd.icmp_signed("==", y, zero), bd.icmp_signed("==", y, ir.Constant(x.type, -1)))
            divisor = bd.select(special, one, y)
            quotient, rest = bd.sdiv(x, divisor), bd.srem(x, divisor)
            opposite = bd.icmp_signed("<", bd.xor(rest, divisor), zero)
            down = bd.and_(bd.icmp_signed("!=", rest, zero), opposite)
            if remainder:
                ordinary, odd = bd.select(down, bd.add(rest, divisor), rest), zero
            else:
                ordinary = bd.select(down, bd.sub(quotient, one), quotient)
                odd = bd.select(bd.icmp_signed("==", y, zero), zero, bd.sub(zero, x))
            return bd.select(special, odd, ordinary)

        kind = _unliteral(a)
        return kind(kind, kind), emit

    return operation


floordiv, mod = _division(False), _division(True)


@njit(error_model="numpy", forceinline=True)
def clamp(index: Any, extent: Any) -> Any:
    """The nearest index within [0, extent): what a read through a tensor's value uses."""
    return maximum(minimum(i64(index), extent - 1), 0)


# ---------------------------------------------------------------- conversions


def _integer(bits: int, signed: bool) -> Any:
    """Conversion to an integer: of a float toward zero, saturating, NaN to 0; of an integer wrapping. The result is held
    in int32, for 64 bits in int64."""
    held: Any = types.int64 if bits == 64 else types.int32

    @_emitted
    def convert(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            value, narrow, wide = args[0], ir.IntType(bits), ir.IntType(held.bitwidth)
            if not isinstance(value.type, ir.IntType):
                name = f"llvm.fpto{'s' if signed else 'u'}i.sat.i{bits}.{suffix(value.type)}"
                value = _call(b, name, narrow, [value])
            elif value.type.width > bits:
                value = b.trunc(value, narrow)
            if value.type.width == wide.width:
                return value
            is_signed = signed and sig.args[0] != types.boolean
            return (b.sext if is_signed else b.zext)(value, wide)

        return held(x), emit

    return convert


to_i64, to_i32, to_i16, to_i8 = (_integer(n, True) for n in (64, 32, 16, 8))
to_u8 = _integer(8, False)


def _like(t: Any, element_type: Any) -> Any:
    """The LLVM type of this element type, a vector where `t` is one."""
    return ir.VectorType(element_type, t.count) if isinstance(t, ir.VectorType) else element_type


def _word(b: Builder, x: Any, value: int) -> Any:
    """A constant in an i32, or in all lanes where `x` is a vector."""
    return constant(_like(x.type, _I32), value)


def _to_odd_f32(b: Builder, x: Any) -> Any:
    """f64 as f32 rounded to odd, so that a second rounding to 16 bits is as if done at once (Boldo, Melquiond 2005)."""
    single, double, word = (_like(x.type, t) for t in (_F32, _F64, _I32))
    near = b.fptrunc(x, single)
    back = b.fpext(near, double)
    size = [_call(b, f"llvm.fabs.{suffix(double)}", double, [v]) for v in (back, x)]
    below = b.sub(b.bitcast(near, word), b.zext(b.fcmp_ordered(">", size[0], size[1]), word))
    inexact = b.zext(b.fcmp_ordered("!=", back, x), word)
    return b.bitcast(b.or_(below, inexact), single)


def _f16_word(b: Builder, x: Any) -> Any:
    """The bits of f32 `x` rounded to f16, nearest even, in an i32 (F. Giesen, float_to_half_fast3_rtne)."""
    single, integer = x.type, _like(x.type, _I32)
    word = b.bitcast(x, integer)
    sign = b.and_(word, _word(b, x, 0x80000000))
    size = b.xor(word, sign)
    odd = b.and_(b.lshr(size, _word(b, x, 13)), _word(b, x, 1))
    rounding = _word(b, x, ((15 - 127) << 23) + 0xFFF)
    normal = b.lshr(b.add(b.add(size, rounding), odd), _word(b, x, 13))
    magic = _word(b, x, 0x3F000000)
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, single), b.bitcast(magic, single)), integer), magic)
    is_nan = b.icmp_unsigned(">", size, _word(b, x, 0x7F800000))
    large = b.select(is_nan, _word(b, x, 0x7E00), _word(b, x, 0x7C00))
    out = b.select(b.icmp_unsigned("<", size, _word(b, x, 113 << 23)), small, normal)
    out = b.select(b.icmp_unsigned(">=", size, _word(b, x, 0x47800000)), large, out)
    return b.or_(out, b.lshr(sign, _word(b, x, 16)))


def _f16_value(b: Builder, word: Any) -> Any:
    """The f32 value of f16 bits in an i32."""
    single, integer = _like(word.type, _F32), word.type
    sign = b.shl(b.and_(word, _word(b, word, 0x8000)), _word(b, word, 16))
    size = b.shl(b.and_(word, _word(b, word, 0x7FFF)), _word(b, word, 13))
    scaled = b.bitcast(b.fmul(b.bitcast(size, single), constant(single, 2.0**112)), integer)
    special = b.icmp_unsigned(">=", size, _word(b, word, 0x7C00 << 13))
    out = b.select(special, b.or_(size, _word(b, word, 0x7F800000)), scaled)
    return b.bitcast(b.or_(out, sign), single)


def _bf16_word(b: Builder, x: Any) -> Any:
    """The bits of f32 `x` rounded to bf16, nearest even, in an i32; a NaN stays one."""
    word = b.bitcast(x, _like(x.type, _I32))
    odd = b.and_(b.lshr(word, _word(b, x, 16)), _word(b, x, 1))
    near = b.lshr(b.add(b.add(word, _word(b, x, 0x7FFF)), odd), _word(b, x, 16))
    quiet = b.or_(b.lshr(word, _word(b, x, 16)), _word(b, x, 0x40))
    return b.select(b.fcmp_unordered("uno", x, x), quiet, near)


def _bf16_value(b: Builder, word: Any) -> Any:
    return b.bitcast(b.shl(word, _word(b, word, 16)), _like(word.type, _F32))


def _narrow(to_word: Callable[[Builder, Any], Any]) -> Any:
    @_emitted
    def narrow(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            wide = element(sig.args[0]) == types.float64
            value = _to_odd_f32(b, args[0]) if wide else args[0]
            return b.trunc(to_word(b, value), _like(value.type, _I16))

        return vector_of(x, types.uint16)(x), emit

    return narrow


def _widen(to_value: Callable[[Builder, Any], Any]) -> Any:
    @_emitted
    def widen(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            return to_value(b, b.zext(args[0], _like(args[0].type, _I32)))

        kind = vector_of(x, types.uint16)
        return vector_of(x, types.float32)(kind), emit

    return widen


narrow_f16, widen_f16 = _narrow(_f16_word), _widen(_f16_value)
narrow_bf16, widen_bf16 = _narrow(_bf16_word), _widen(_bf16_value)


@njit(error_model="numpy", forceinline=True)
def round_f16(x: Any) -> Any:
    """The f16 nearest to x, as f32."""
    return widen_f16(narrow_f16(x))


@njit(error_model="numpy", forceinline=True)
def round_bf16(x: Any) -> Any:
    """The bf16 nearest to x, as f32."""
    return widen_bf16(narrow_bf16(x))


# ---------------------------------------------------------------- mathematics


@njit(error_model="numpy", forceinline=True)
def exp_f64(x: Any) -> Any:
    return math.exp(x)


@njit(error_model="numpy", forceinline=True)
def exp2_f64(x: Any) -> Any:
    return np.exp2(x)


@njit(error_model="numpy", forceinline=True)
def log_f64(x: Any) -> Any:
    return np.log(x)


@njit(error_model="numpy", forceinline=True)
def log2_f64(x: Any) -> Any:
    return np.log2(x)


@njit(error_model="numpy", forceinline=True)
def tanh_f64(x: Any) -> Any:
    return math.tanh(x)


@njit(error_model="numpy", forceinline=True)
def erf_f64(x: Any) -> Any:
    return math.erf(x)


@njit(error_model="numpy", forceinline=True)
def sin(x: Any) -> Any:
    return math.sin(x)


@njit(error_model="numpy", forceinline=True)
def cos(x: Any) -> Any:
    return math.cos(x)


@njit(error_model="numpy", forceinline=True)
def power(x: Any, y: Any) -> Any:
    return math.pow(x, y)


@njit(error_model="numpy", forceinline=True)
def floordiv_float(x: Any, y: Any) -> Any:
    """floor(x / y)"""
    return floor(x / y)


@njit(error_model="numpy", forceinline=True)
def mod_float(x: Any, y: Any) -> Any:
    """The remainder with the sign of y."""
    return x % y


@njit(error_model="numpy", forceinline=True)
def rsqrt(x: Any) -> Any:
    """1 / sqrt(x), both steps rounded."""
    return f32(1) / sqrt(x)
