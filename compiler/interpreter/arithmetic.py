"""Arithmetic of the language on NumPy arrays: every operation in the dtype that the language gives it (DESIGN 8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dsl.types import DType, compute, promote
from ..tensor_ir import COMPARISONS, operation_type, reduction_type
from .elements import NUMPY, element_of

Array = npt.NDArray[Any]


def element(x: Array) -> DType:
    """The element type of an array."""
    found = element_of(x.dtype)
    if found is None:
        raise KeyError(x.dtype)
    return found


def quiet() -> np.errstate:
    """NumPy without warnings: overflow, inf - inf and the like have their IEEE or wrapping results."""
    return np.errstate(all="ignore")


# ---------------------------------------------------------------- conversions


def convert(x: Array, dtype: DType) -> Array:
    """Floats round to nearest even; float to integer goes toward zero, saturates, NaN gives 0; integers wrap."""
    source = element(x)
    if source is dtype:
        return x
    if source.is_float and dtype.is_integer:
        return _truncate(x, NUMPY[dtype])
    if dtype is DType.BF16 and source in (DType.F64, DType.I64, DType.I32):
        x = round_to_odd(*_two_part(x))  # ml_dtypes goes through f32: two roundings
    elif dtype is DType.F16 and source is DType.I64:
        x = x.astype(np.float64)
    return x.astype(NUMPY[dtype])


def _truncate(x: Array, to: np.dtype[Any]) -> Array:
    info = np.iinfo(to)
    whole = np.trunc(x.astype(np.float64))
    low, high = whole < float(info.min), whole >= float(info.max) + (info.bits < 64)
    inside = np.where(low | high | np.isnan(whole), 0.0, whole).astype(to)
    return np.asarray(np.where(low, info.min, np.where(high, info.max, inside)), to)


def _two_part(x: Array) -> tuple[Array, Array]:
    """x as an f64 and the error of that conversion."""
    if x.dtype.kind == "f":
        return x.astype(np.float64), np.zeros(x.shape)
    near = x.astype(np.float64)
    rest = np.where(np.abs(near) < 2.0**62, x - near.astype(np.int64), 0)
    return near, rest.astype(np.float64)


def round_to_odd(high: Array, low: Array) -> Array:
    """high + low (|low| at most half a unit of high) as f32, an inexact result with its last bit set.

    Rounding that once more to a narrower type is the single rounding of the sum (Boldo and Melquiond, 2008).
    """
    near = high.astype(np.float32)
    rest = (high - near.astype(np.float64)) + low
    bits = np.atleast_1d(near).view(np.int32)
    step = np.where((rest > 0) == (np.atleast_1d(near) > 0), 1, -1).astype(np.int32)
    move = (np.atleast_1d(rest) != 0) & (bits & 1 == 0) & np.isfinite(np.atleast_1d(near))
    move &= np.atleast_1d(near) != 0
    return np.where(move, bits + step, bits).astype(np.int32).view(np.float32).reshape(np.shape(near))


# ---------------------------------------------------------------- elementwise


def elementwise(op: str, *operands: Array) -> Array:
    """One operation of `tensor_ir.OPERATIONS`, or `fma`, on arrays that broadcast against one another."""
    types = tuple(element(x) for x in operands)
    if op == "fma":
        out = promote(promote(types[0], types[1]), types[2])
        return fused(*(convert(x, out) for x in operands))
    if op == "where":
        out = operation_type(op, types)
        return np.where(operands[0], convert(operands[1], out), convert(operands[2], out))
    if op in LOGIC:
        return np.asarray(LOGIC[op](*operands))
    if op in COMPARISONS:
        work = _common(types)
        return np.asarray(COMPARE[op](*(convert(x, work) for x in operands)))
    out = operation_type(op, types)
    result = OPERATE[op](*(convert(x, out) for x in operands))
    return np.asarray(result, NUMPY[out])


def _common(types: tuple[DType, ...]) -> DType:
    return DType.BOOL if types == (DType.BOOL, DType.BOOL) else promote(*types)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a·b + c, rounded once for f32; f64 through error-free transformations, which is right but for rare ties."""
    if a.dtype.kind != "f":
        return np.asarray(a * b + c)
    if a.dtype == np.float32:
        product = a.astype(np.float64) * b  # exact: 48 bits
        total = product + c
        return _finish(total, _sum_error(product, c.astype(np.float64), total)).reshape(total.shape)
    product = a * b
    total = product + c
    rest = _product_error(a, b, product) + _sum_error(product, c, total)
    return np.asarray(np.where(np.isfinite(total) & np.isfinite(rest), total + rest, total))


def _finish(total: Array, rest: Array) -> Array:
    """total + rest as f32, rounded once: an inexact total gets an odd last bit first (as in `round_to_odd`)."""
    total, rest = np.atleast_1d(total), np.atleast_1d(rest)
    away = np.where(rest > 0, np.inf, -np.inf)
    inexact = (rest != 0) & np.isfinite(rest) & (total.view(np.int64) & 1 == 0)
    return np.where(inexact, np.nextafter(total, away), total).astype(np.float32)


def _sum_error(a: Array, b: Array, total: Array) -> Array:
    """a + b - total, exactly (Knuth's two-sum)."""
    back = total - a
    return np.asarray((a - (total - back)) + (b - back))


def _product_error(a: Array, b: Array, product: Array) -> Array:
    """a·b - product, exactly where nothing overflows (Dekker)."""
    ah, bh = (x * 134217729.0 - (x * 134217729.0 - x) for x in (a, b))
    al, bl = a - ah, b - bh
    return np.asarray(((ah * bh - product) + ah * bl + al * bh) + al * bl)


def _floordiv(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(np.floor(a / b))
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def _mod(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.asarray(np.mod(a, b))
    return np.where(b == 0, 0, a % np.where(b == 0, 1, b))


_erf = np.vectorize(math.erf, otypes=[np.float64])
LOGIC: dict[str, Callable[..., Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
}
COMPARE: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
OPERATE: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": _floordiv,
    "mod": _mod,
    "min": np.minimum,  # NaN propagates
    "max": np.maximum,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x),
    "tanh": np.tanh,
    "erf": lambda x: _erf(x).astype(x.dtype) if x.size else x,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
}

# ---------------------------------------------------------------- reductions and dots


def lowest(dtype: DType) -> int | float:
    """The maximum of nothing."""
    return -math.inf if dtype.is_float else int(np.iinfo(NUMPY[dtype]).min)


def highest(dtype: DType) -> int | float:
    """The minimum of nothing."""
    return math.inf if dtype.is_float else int(np.iinfo(NUMPY[dtype]).max)


def reduced(fn: str, x: Array, axes: tuple[int, ...]) -> Array:
    """A reduction of `tensor_ir.REDUCTIONS` over some axes of an array; argmax and argmin take one axis."""
    if fn in ("any", "all"):
        return np.asarray((np.any if fn == "any" else np.all)(x.astype(np.bool_), axis=axes))
    if fn in ("argmax", "argmin"):
        return _position(fn, x, axes[0])
    dtype = reduction_type(fn, element(x))
    x = convert(x, dtype)
    to = NUMPY[dtype]
    if fn == "sum":
        return np.asarray(np.sum(x, axis=axes, dtype=to))
    if fn == "prod":
        return np.asarray(np.prod(x, axis=axes, dtype=to))
    if fn == "max":
        return np.asarray(np.max(x, axis=axes, initial=lowest(dtype)), to)
    return np.asarray(np.min(x, axis=axes, initial=highest(dtype)), to)


def _position(fn: str, x: Array, axis: int) -> Array:
    """The first index of the extremum, of the first NaN where there is one, -1 in an empty set."""
    if x.shape[axis] == 0:
        return np.full(x.shape[:axis] + x.shape[axis + 1 :], -1, np.int64)
    x = convert(x, compute(element(x))) if x.dtype.kind != "b" else x
    return np.asarray((np.argmax if fn == "argmax" else np.argmin)(x, axis=axis), np.int64)


def contracted(a: Array, b: Array, spec: str) -> Array:
    """A sum of products (`spec` as for `numpy.einsum`) in the accumulator type of the operands."""
    out = promote(element(a), element(b))
    return np.asarray(np.einsum(spec, convert(a, out), convert(b, out), optimize=True), NUMPY[out])
