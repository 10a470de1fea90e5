"""Vectors as Numba values: a type that LLVM holds in registers, its operators, and loads and stores of tensors and buffers.

`Vector(dtype, lanes)` has an LLVM vector as its data model; `float32` vectors fill one register (`LANES` lanes), other
element types have as many lanes in more or fewer registers, so that all values of a loop nest align lane by lane. The
operators `+ - * /`, comparisons and `& | ^ ~` take vectors and, on either side, a scalar, which stands for all lanes: one
expression text serves scalars and vectors. Comparisons give vectors of bool.

Subscripts of `load` and `store` are those of the first lane; the others follow along the last axis. Whether that axis is
dense in memory is part of an array's type where it is C-contiguous, and asked at run time elsewhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, imputils
from numba.core import config as _settings
from numba.core.typing import templates
from numba.extending import intrinsic, models, register_model

Builder = Any
Emit = Callable[[Any, Builder, Any, Any], Any]
I1, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)

# Numba's own types for these are partial or none.
_declare: Any = cgutils.get_or_insert_function
_unliteral: Any = types.unliteral
_tuple: Any = types.Tuple
_lower: Any = imputils.lower_builtin
_infer: Any = templates.infer_global
_signature: Any = templates.signature
_Template: Any = templates.AbstractTemplate
_primitive: Any = models.PrimitiveModel
_tools: Any = cgutils
config: Any = _settings


def features() -> frozenset[str]:
    """Instruction sets that code is compiled for, in LLVM's names: the host's, or those that Numba's settings name."""
    if config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+"))
    if config.CPU_NAME == "generic":
        return frozenset()
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def _register_bytes() -> int:
    """Width of a vector register: AVX-512 64, AVX 32, any other machine 16 (SSE, NEON)."""
    found = features()
    return 64 if "avx512f" in found else 32 if "avx" in found else 16


REGISTER_BYTES = _register_bytes()
LANES = REGISTER_BYTES // 4
WIDE = 4 * LANES
"""Lanes of wide vectors: four registers of float32, so that operations that wait for each other leave room for others."""


# ---------------------------------------------------------------- the type


class Vector(types.Type):
    """`lanes` values of one element type."""

    def __init__(self, dtype: Any, lanes: int = LANES) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(_primitive):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        element = I1 if kind.dtype == types.boolean else manager.lookup(kind.dtype).get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, kind.lanes))


def is_vector(kind: Any) -> bool:
    return isinstance(kind, Vector)


def vector_of(kind: Any, dtype: Any) -> Any:
    """The type with the shape of `kind`, a vector or a scalar, and this element type."""
    return Vector(dtype, kind.lanes) if is_vector(kind) else dtype


def element(kind: Any) -> Any:
    """The element type of a vector, the type itself of a scalar."""
    return kind.dtype if is_vector(kind) else _unliteral(kind)


def suffix(t: Any) -> str:
    """How the names of LLVM intrinsics spell a type: `f32`, `v16f32`."""
    if isinstance(t, ir.VectorType):
        return f"v{t.count}{suffix(t.element)}"
    if isinstance(t, ir.IntType):
        return f"i{t.width}"
    return "f32" if t == ir.FloatType() else "f64"


def call(b: Builder, name: str, result: Any, args: Sequence[Any]) -> Any:
    """A call of an LLVM intrinsic; `name` carries the type suffixes."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(_declare(b.module, kind, name), list(args))


def constant(t: Any, value: Any) -> Any:
    """A constant of an LLVM type, the same in all lanes of a vector."""
    if isinstance(t, ir.VectorType):
        return ir.Constant(t, [ir.Constant(t.element, value)] * t.count)
    return ir.Constant(t, value)


def broadcast(b: Builder, scalar: Any, lanes: int) -> Any:
    """A vector with a scalar in all lanes."""
    t = ir.VectorType(scalar.type, lanes)
    blank = ir.Constant(t, ir.Undefined)
    first = b.insert_element(blank, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, blank, constant(ir.VectorType(I32, lanes), 0))


def is_float(t: Any) -> bool:
    """Is an LLVM type, or a vector's element, a floating-point one?"""
    return not isinstance(t.element if isinstance(t, ir.VectorType) else t, ir.IntType)


# ---------------------------------------------------------------- conversions


def converted(context: Any, b: Builder, value: Any, source: Any, target: Any) -> Any:
    """A value of Numba type `source` as `target`, which may be a vector of it: numbers convert as in C, bool is 0 or 1."""
    if is_vector(target) and not is_vector(source):
        scalar = context.cast(b, value, source, target.dtype)
        if target.dtype == types.boolean and scalar.type != I1:
            scalar = b.trunc(scalar, I1)
        return broadcast(b, scalar, target.lanes)
    if not is_vector(target):
        return context.cast(b, value, source, target)
    return _elements(b, value, source.dtype, target.dtype, context.get_value_type(target))


def _elements(b: Builder, value: Any, source: Any, target: Any, to: Any) -> Any:
    """Convert the elements of a vector; `to` is the LLVM type of the result."""
    if source == target:
        return value
    if isinstance(target, types.Float):
        if isinstance(source, types.Float):
            return (b.fpext if target.bitwidth > source.bitwidth else b.fptrunc)(value, to)
        return (b.sitofp if getattr(source, "signed", False) else b.uitofp)(value, to)
    if isinstance(source, types.Float):
        raise TypeError("a float becomes an integer by a named conversion only")
    if target == types.boolean:
        return b.icmp_signed("!=", value, constant(value.type, 0))
    width = value.type.element.width
    if width > target.bitwidth:
        return b.trunc(value, to)
    return (b.sext if getattr(source, "signed", False) else b.zext)(value, to)


def _lanes_of(dtype: Any, count: int) -> Any:
    """`x` as a vector of this element type: a scalar in so many lanes, a vector converted."""

    @intrinsic
    def lanes(typing: Any, x: Any) -> Any:
        kind = Vector(dtype, x.lanes if is_vector(x) else count)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            return converted(context, b, args[0], sig.args[0], kind)

        return kind(_unliteral(x)), emit

    return lanes


_ELEMENTS = (types.float32, types.float64, types.int32, types.int64, types.boolean)
lanes_f32, lanes_f64, lanes_i32, lanes_i64, lanes_bool = (_lanes_of(t, LANES) for t in _ELEMENTS)
lanes_f32_wide, lanes_f64_wide, lanes_i32_wide, lanes_i64_wide, lanes_bool_wide = (
    _lanes_of(t, WIDE) for t in _ELEMENTS
)


def _indices(count: int) -> Any:
    """start + 0, start + 1, …: an int64 vector."""

    @intrinsic
    def operation(typing: Any, start: Any) -> Any:
        kind = Vector(types.int64, count)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            first = converted(context, b, args[0], sig.args[0], kind)
            return b.add(first, counting(kind.lanes))

        return kind(_unliteral(start)), emit

    return operation


indices, indices_wide = _indices(LANES), _indices(WIDE)


def counting(lanes: int, width: int = 64) -> Any:
    """0, 1, …: an LLVM constant."""
    t = ir.IntType(width)
    return ir.Constant(ir.VectorType(t, lanes), [ir.Constant(t, i) for i in range(lanes)])


# ---------------------------------------------------------------- operators


def _float_operation(name: str) -> Any:
    return lambda b, x, y: getattr(b, f"f{name}" if is_float(x.type) else name)(x, y)


def _comparison(symbol: str) -> Any:
    """Ordered, so false where a side is NaN, but for `!=`. Comparing integers is signed; all integers here are."""

    def emit(b: Builder, x: Any, y: Any) -> Any:
        if not is_float(x.type):
            return b.icmp_signed(symbol, x, y)
        return b.fcmp_unordered(symbol, x, y) if symbol == "!=" else b.fcmp_ordered(symbol, x, y)

    return emit


def _divided(b: Builder, x: Any, y: Any) -> Any:
    return b.fdiv(x, y)


ARITHMETIC = {
    operator.add: _float_operation("add"),
    operator.sub: _float_operation("sub"),
    operator.mul: _float_operation("mul"),
    operator.truediv: _divided,
    operator.and_: lambda b, x, y: b.and_(x, y),
    operator.or_: lambda b, x, y: b.or_(x, y),
    operator.xor: lambda b, x, y: b.xor(x, y),
}
COMPARISONS = {
    operator.lt: _comparison("<"),
    operator.le: _comparison("<="),
    operator.gt: _comparison(">"),
    operator.ge: _comparison(">="),
    operator.eq: _comparison("=="),
    operator.ne: _comparison("!="),
}


def _operand(x: Any, y: Any) -> Any:
    """The vector type in which an operation of these types computes; None where no vector takes part or types differ."""
    kind = x if is_vector(x) else y
    if not is_vector(kind):
        return None
    for other in (x, y):
        fits = other == kind if is_vector(other) else isinstance(other, types.Number | types.Boolean)
        if not fits:
            return None
    return kind


def _binary(function: Any, emit_lanes: Any, gives_bool: bool) -> None:
    """Type and lower a binary operator on vectors."""

    @_infer(function)
    class _Typed(_Template):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            kind = _operand(*args) if len(args) == 2 else None
            if kind is None:
                return None
            return _signature(vector_of(kind, types.boolean) if gives_bool else kind, *args)

    def lowered(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        kind = _operand(*sig.args)
        x, y = (converted(context, b, a, t, kind) for a, t in zip(args, sig.args, strict=True))
        return emit_lanes(b, x, y)

    for scalar in (types.Number, types.Boolean):
        _lower(function, scalar, Vector)(lowered)
        if function is not operator.truediv:
            _lower(function, Vector, scalar)(lowered)
    _lower(function, Vector, Vector)(lowered)


def _unary(function: Any, emit_lanes: Any) -> None:
    @_infer(function)
    class _Typed(_Template):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            return _signature(args[0], *args) if len(args) == 1 and is_vector(args[0]) else None

    @_lower(function, Vector)
    def lowered(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        return emit_lanes(b, args[0])


for _function, _emit in ARITHMETIC.items():
    _binary(_function, _emit, False)
for _function, _emit in COMPARISONS.items():
    _binary(_function, _emit, True)
_unary(operator.neg, lambda b, x: b.fneg(x) if is_float(x.type) else b.neg(x))
_unary(operator.invert, lambda b, x: b.not_(x))


# ---------------------------------------------------------------- division by one number

FUSES = bool({"fma", "avx512f", "neon"} & features())
"""Does one instruction multiply and add with one rounding?"""
DIVISORS = (2.0**-24, 2.0**24)
LEAST_DIVIDED = 2.0**-90
"""Divisors and dividends for which nothing below falls under the normal range."""


@_lower(operator.truediv, Vector, types.Number)
@_lower(operator.truediv, Vector, types.Boolean)
def _by_one(context: Any, b: Builder, sig: Any, args: Any) -> Any:
    """A vector by a number that is the same for all lanes; correctly rounded, like a division."""
    kind = sig.args[0]
    number = context.cast(b, args[1], sig.args[1], kind.dtype)
    if not FUSES or kind.dtype != types.float32:
        return b.fdiv(args[0], broadcast(b, number, kind.lanes))
    return _quotient(b, args[0], number)


def _quotient(b: Builder, x: Any, z: Any) -> Any:
    """x / z by the reciprocal of z, which a loop computes once, where no rounding goes wrong; else by dividing.

    r is the rounded reciprocal of z, s the rest of it. q = x·r + x·s lies within one unit of x / z; then q + (x - q·z)·r,
    whose bracket is exact, rounds to what x / z rounds to (P. Markstein, "Computation of elementary functions on the IBM
    RISC System/6000 processor", IBM J. Res. Dev. 34 (1990), theorem 8).
    """
    lanes, kind = x.type.count, x.type
    fma = f"llvm.fma.{suffix(kind)}"
    one = ir.Constant(z.type, 1.0)
    r = b.fdiv(one, z)
    s = b.fmul(call(b, "llvm.fma.f32", z.type, [b.fneg(r), z, one]), r)
    by, over, rest = (broadcast(b, v, lanes) for v in (z, r, s))
    near = call(b, fma, kind, [x, over, b.fmul(x, rest)])
    missing = call(b, fma, kind, [b.fneg(near), by, x])
    found = call(b, fma, kind, [missing, over, near])
    with b.if_else(b.or_(_any_tiny(b, x, z), _any_nan(b, found)), likely=False) as (then, otherwise):
        with then:
            divided, one_way = b.fdiv(x, by), b.block
        with otherwise:
            other_way = b.block
    chosen = b.phi(kind)
    chosen.add_incoming(divided, one_way)
    chosen.add_incoming(found, other_way)
    return chosen


def _any_tiny(b: Builder, x: Any, z: Any) -> Any:
    """Is a lane of x too small for `_quotient`, but not +0, or is z out of range? One comparison for all registers: the
    bits with the sign turned to the lowest place, less one, are the least for what is small."""
    words = b.bitcast(x, ir.VectorType(I32, x.type.count))
    turned = b.or_(b.shl(words, constant(words.type, 1)), b.lshr(words, constant(words.type, 31)))
    least = b.sub(turned, constant(words.type, 1))
    while least.type.count > LANES:
        low, high = halves(b, least)
        least = b.select(b.icmp_unsigned("<", low, high), low, high)
    fits = b.and_(
        *(b.fcmp_ordered(s, z, ir.Constant(z.type, v)) for s, v in zip((">=", "<="), DIVISORS, strict=True))
    )
    bits = 2 * int(np.float32(LEAST_DIVIDED).view(np.uint32)) - 1
    bound = b.select(fits, ir.Constant(I32, bits), ir.Constant(I32, 2**32 - 1))
    small = b.icmp_unsigned("<", least, broadcast(b, bound, least.type.count))
    return _any_flag(b, small)


def _any_nan(b: Builder, x: Any) -> Any:
    """Is a lane NaN? Halves of a wide vector share the comparison."""
    pair = halves(b, x) if x.type.count > LANES else (x, x)
    return _any_flag(b, b.fcmp_unordered("uno", *pair))


def _any_flag(b: Builder, flags: Any) -> Any:
    word = b.bitcast(flags, ir.IntType(flags.type.count))
    return b.icmp_unsigned("!=", word, ir.Constant(word.type, 0))


# ---------------------------------------------------------------- reductions of the lanes


def _across(name: str) -> Any:
    """All lanes of a vector as one number; sums in an order that the number of lanes alone decides."""

    @intrinsic
    def across(typing: Any, x: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            return folded(b, args[0], name)

        return x.dtype(x), emit

    return across


def folded(b: Builder, x: Any, name: str) -> Any:
    """Halves of the lanes combined until one is left."""
    while x.type.count > 1:
        x = COMBINE[name](b, *halves(b, x))
    return b.extract_element(x, ir.Constant(I32, 0))


def lanes_from(b: Builder, x: Any, first: int, count: int) -> Any:
    """Lanes first, first + 1, …, so many, of an LLVM vector."""
    which = [ir.Constant(I32, i) for i in range(first, first + count)]
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, count), which))


def halves(b: Builder, x: Any) -> tuple[Any, Any]:
    """The first and the second half of the lanes of an LLVM vector."""
    count = x.type.count // 2
    return lanes_from(b, x, 0, count), lanes_from(b, x, count, count)


def joined(b: Builder, parts: Sequence[Any]) -> Any:
    """The lanes of LLVM vectors of one type, a power of two of them, one after another in one vector."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        every = ir.Constant(ir.VectorType(I32, count), [ir.Constant(I32, i) for i in range(count)])
        parts = [b.shuffle_vector(x, y, every) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def extreme(b: Builder, x: Any, y: Any, symbol: str) -> Any:
    """The larger (`>`) or smaller (`<`) value; NaN if either is."""
    if not is_float(x.type):
        return b.select(b.icmp_signed(symbol, x, y), x, y)
    chosen = b.select(b.fcmp_ordered(symbol, x, y), x, y)  # y where either is NaN
    return b.select(b.fcmp_unordered("uno", x, x), x, chosen)


COMBINE: dict[str, Callable[[Builder, Any, Any], Any]] = {
    "sum": ARITHMETIC[operator.add],
    "prod": ARITHMETIC[operator.mul],
    "max": lambda b, x, y: extreme(b, x, y, ">"),
    "min": lambda b, x, y: extreme(b, x, y, "<"),
    "any": lambda b, x, y: b.or_(x, y),
    "all": lambda b, x, y: b.and_(x, y),
}
sum_lanes, prod_lanes, any_lanes, all_lanes = (_across(name) for name in ("sum", "prod", "any", "all"))

# ---------------------------------------------------------------- extremes of many vectors

SYMBOL = {"max": ">", "min": "<"}


def _noting(kind: Any) -> Any:
    """The type of an extreme in the making: the largest or smallest number so far in each lane, and flags of whether a NaN
    came. A NaN does not enter the numbers, so that each step waits for one instruction, not for three; in wide vectors two
    lanes share a flag, so that one comparison serves both."""
    return _tuple((kind, Vector(types.boolean, kind.lanes // 2 if kind.lanes > LANES else kind.lanes)))


@intrinsic
def noting_nan(typing: Any, x: Any) -> Any:
    """An extreme that starts from the vector x, which holds no NaN."""
    noting = _noting(x)

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        none = constant(context.get_value_type(noting.types[1]), 0)
        return context.make_tuple(b, noting, (args[0], none))

    return noting(x), emit


def _closer(b: Builder, x: Any, best: Any, symbol: str) -> Any:
    """x where it lies beyond `best`, else, and where it is NaN, `best`: one instruction on x86."""
    compared = b.fcmp_ordered if is_float(x.type) else b.icmp_signed
    return b.select(compared(symbol, x, best), x, best)


def _taking(symbol: str, summary: str) -> Any:
    @intrinsic
    def operation(typing: Any, so_far: Any, x: Any) -> Any:
        kind = so_far.types[0]

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            best, odd = _tools.unpack_tuple(b, args[0], 2)
            value = converted(context, b, args[1], sig.args[1], kind)
            pair = (value, value) if odd.type.count == kind.lanes else halves(b, value)
            odd = b.or_(odd, b.fcmp_unordered("uno", *pair))
            return context.make_tuple(b, so_far, (_closer(b, value, best, symbol), odd))

        return so_far(so_far, x if is_vector(x) else element(x)), emit

    operation.__doc__ = summary
    return operation


larger = _taking(">", "The extreme after one more vector, or a number for all lanes, for the largest value.")
smaller = _taking("<", "The same for the smallest value.")


def _extreme_across(name: str) -> Any:
    @intrinsic
    def across(typing: Any, x: Any) -> Any:
        """The extreme of all lanes of a vector, or of one in the making; NaN if one is among them."""
        kind = x if is_vector(x) else x.types[0]

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            if is_vector(x):
                return folded(b, args[0], name)
            best, odd = _tools.unpack_tuple(b, args[0], 2)
            while best.type.count > 1:
                best = _closer(b, *halves(b, best), SYMBOL[name])
            best = b.extract_element(best, ir.Constant(I32, 0))
            return b.select(_any_flag(b, odd), ir.Constant(best.type, math.nan), best)

        return kind.dtype(x), emit

    return across


max_lanes, min_lanes = _extreme_across("max"), _extreme_across("min")


@intrinsic
def within(typing: Any, x: Any, n: Any, other: Any) -> Any:
    """The first n lanes of a vector, or of a number in all lanes, and `other` in the rest."""
    kind = x if is_vector(x) else Vector(_unliteral(x))

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        value = converted(context, b, args[0], sig.args[0], kind)
        rest = converted(context, b, args[2], sig.args[2], kind)
        n = context.cast(b, args[1], sig.args[1], types.int64)
        return _whole_or_some(
            b, n, kind.lanes, lambda mask: value if mask is None else b.select(mask, value, rest)
        )

    return kind(_unliteral(x), _unliteral(n), element(kind)), emit


def _whole_or_some(b: Builder, n: Any, lanes: int, emit: Callable[[Any], Any]) -> Any:
    """What `emit` makes of a mask, in two branches: all lanes (None), the usual one, or the first n of them."""
    whole = b.icmp_signed(">=", n, ir.Constant(I64, lanes))
    with b.if_else(whole) as (then, otherwise):
        with then:
            usual, one = emit(None), b.block
        with otherwise:
            rare, two = emit(first_lanes(b, n, lanes)), b.block
    if usual is None:
        return None
    chosen = b.phi(usual.type)
    chosen.add_incoming(usual, one)
    chosen.add_incoming(rare, two)
    return chosen


# ---------------------------------------------------------------- memory


def array_models() -> Any:
    """Numba's module of arrays, which takes a quarter of a second to import: only where something is compiled."""
    from numba.np import arrayobj

    return arrayobj


def array_item(
    context: Any, b: Builder, kind: Any, array: Any, index_kind: Any, index: Any
) -> tuple[Any, Callable[[int], Any]]:
    """The address of an element and, by axis, its array's strides in bytes; subscripts are not negative and not checked.

    Numba's own way copies the array's description to the stack for each element, in three times as many instructions.
    """
    description = context.data_model_manager[kind]
    places = {name: i for i, name in enumerate(description._fields)}

    def part(name: str, axis: int) -> Any:
        return b.extract_value(array, (places[name], axis))

    tuple_of = isinstance(index_kind, types.BaseTuple)
    raw = _tools.unpack_tuple(b, index, len(index_kind)) if tuple_of else [index]
    kinds: list[Any] = list(iter(index_kind)) if tuple_of else [index_kind]
    subscripts = [context.cast(b, x, t, types.intp) for x, t in zip(raw, kinds, strict=True)]
    data, stride = description.get(b, array, "data"), partial(part, "strides")
    if not subscripts:
        return data, stride
    if kind.layout == "C":
        offset, step = subscripts[-1], None
        for axis in reversed(range(1, kind.ndim)):
            length = part("shape", axis)
            step = length if step is None else b.mul(step, length)
            offset = b.add(b.mul(subscripts[axis - 1], step), offset)
        return b.gep(data, [offset]), stride
    distances = [b.mul(x, stride(axis)) for axis, x in enumerate(subscripts)]
    first = b.gep(b.bitcast(data, I8.as_pointer()), [reduce(b.add, distances)])
    return b.bitcast(first, data.type), stride


def _is_dense(kind: Any) -> bool:
    return bool(kind.layout == "C")


def first_lanes(b: Builder, n: Any, lanes: int) -> Any:
    """True in the first n lanes; n is an i64 and may exceed their number."""
    return b.icmp_signed("<", counting(lanes), broadcast(b, n, lanes))


def read_dense(b: Builder, pointer: Any, t: Any, lanes: int, mask: Any = None) -> Any:
    """Consecutive elements of LLVM type `t`; 0 where the mask is false, and no memory is touched there."""
    vector = ir.VectorType(t, lanes)
    at = b.bitcast(pointer, vector.as_pointer())
    align = _bytes(t)
    if mask is None:
        return b.load(at, align=align)
    name = f"llvm.masked.load.{suffix(vector)}.p0"
    return call(b, name, vector, [at, ir.Constant(I32, align), mask, constant(vector, 0)])


def write_dense(b: Builder, value: Any, pointer: Any, mask: Any = None) -> None:
    """Store consecutive elements, where the mask holds."""
    at = b.bitcast(pointer, value.type.as_pointer())
    align = _bytes(value.type.element)
    if mask is None:
        b.store(value, at, align=align)
        return
    call(
        b,
        f"llvm.masked.store.{suffix(value.type)}.p0",
        ir.VoidType(),
        [value, at, ir.Constant(I32, align), mask],
    )


def _bytes(t: Any) -> int:
    return 8 if t == ir.DoubleType() else 4 if t == ir.FloatType() else max(1, t.width // 8)


def _addresses(b: Builder, pointer: Any, stride: Any, lanes: int) -> Any:
    """Addresses of elements that lie `stride` bytes apart."""
    base = broadcast(b, b.ptrtoint(pointer, I64), lanes)
    places = b.add(base, b.mul(counting(lanes), broadcast(b, stride, lanes)))
    return b.inttoptr(places, ir.VectorType(pointer.type, lanes))


def _gathered(b: Builder, pointer: Any, stride: Any, t: Any, lanes: int, mask: Any) -> Any:
    """`read_dense` for elements that lie `stride` bytes apart."""
    vector = ir.VectorType(t, lanes)
    given = [_addresses(b, pointer, stride, lanes), ir.Constant(I32, _bytes(t)), mask, constant(vector, 0)]
    return call(b, f"llvm.masked.gather.{suffix(vector)}.v{lanes}p0", vector, given)


def _scatter(b: Builder, value: Any, pointer: Any, stride: Any, mask: Any) -> None:
    """`write_dense` for elements that lie `stride` bytes apart."""
    lanes = value.type.count
    given = [value, _addresses(b, pointer, stride, lanes), ir.Constant(I32, _bytes(value.type.element)), mask]
    call(b, f"llvm.masked.scatter.{suffix(value.type)}.v{lanes}p0", ir.VoidType(), given)


def _read(b: Builder, pointer: Any, stride: Any, dense: bool, t: Any, lanes: int, mask: Any) -> Any:
    """Elements along the last axis, wherever they lie."""
    if dense:
        return read_dense(b, pointer, t, lanes, mask)
    whole = constant(ir.VectorType(I1, lanes), 1) if mask is None else mask
    is_dense = b.icmp_signed("==", stride, ir.Constant(I64, _bytes(t)))
    with b.if_else(is_dense) as (then, otherwise):
        with then:
            near, one = read_dense(b, pointer, t, lanes, mask), b.block
        with otherwise:
            far, two = _gathered(b, pointer, stride, t, lanes, whole), b.block
    found = b.phi(near.type)
    found.add_incoming(near, one)
    found.add_incoming(far, two)
    return found


def _write(b: Builder, value: Any, pointer: Any, stride: Any, dense: bool, mask: Any) -> None:
    if dense:
        write_dense(b, value, pointer, mask)
        return
    whole = constant(ir.VectorType(I1, value.type.count), 1) if mask is None else mask
    is_dense = b.icmp_signed("==", stride, ir.Constant(I64, _bytes(value.type.element)))
    with b.if_else(is_dense) as (then, otherwise):
        with then:
            write_dense(b, value, pointer, mask)
        with otherwise:
            _scatter(b, value, pointer, stride, whole)


def read_apart(b: Builder, pointer: Any, stride: Any, t: Any, lanes: int, mask: Any) -> Any:
    """Elements `stride` bytes apart where the mask holds, else 0; nothing is read there."""
    return _read(b, b.bitcast(pointer, t.as_pointer()), stride, False, t, lanes, mask)


def write_apart(b: Builder, value: Any, pointer: Any, stride: Any, mask: Any) -> None:
    """Store elements `stride` bytes apart, where the mask holds."""
    _write(b, value, b.bitcast(pointer, value.type.element.as_pointer()), stride, False, mask)


def _loading(masked: bool, lanes: int = LANES) -> Callable[[Any, Any, Any], Any]:
    def typed(x: Any, index: Any, n: Any) -> Any:
        kind = Vector(x.dtype, lanes)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            pointer, stride = array_item(context, b, x, args[0], sig.args[1], args[1])
            t, last = context.get_data_type(x.dtype), None if _is_dense(x) else stride(x.ndim - 1)

            def read(mask: Any) -> Any:
                return _read(b, pointer, last, _is_dense(x), t, kind.lanes, mask)

            if masked:
                n = context.cast(b, args[2], sig.args[2], types.int64)
                out = _whole_or_some(b, n, kind.lanes, read)
            else:
                out = read(None)
            return b.icmp_signed("!=", out, constant(out.type, 0)) if x.dtype == types.boolean else out

        return kind(x, index, *((_unliteral(n),) if masked else ())), emit

    return typed


def _storing(masked: bool, lanes: int = LANES) -> Callable[[Any, Any, Any, Any], Any]:
    def typed(x: Any, index: Any, v: Any, n: Any) -> Any:
        kind = Vector(x.dtype, v.lanes if is_vector(v) else lanes)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            pointer, stride = array_item(context, b, x, args[0], sig.args[1], args[1])
            last = None if _is_dense(x) else stride(x.ndim - 1)
            value = converted(context, b, args[2], sig.args[2], kind)
            if x.dtype == types.boolean:
                value = b.zext(value, ir.VectorType(I8, kind.lanes))

            def write(mask: Any) -> None:
                _write(b, value, pointer, last, _is_dense(x), mask)

            if masked:
                _whole_or_some(b, context.cast(b, args[3], sig.args[3], types.int64), kind.lanes, write)
            else:
                write(None)
            return context.get_dummy_value()

        more = (_unliteral(n),) if masked else ()
        return types.void(x, index, _unliteral(v), *more), emit

    return typed


@intrinsic
def load(typing: Any, x: Any, index: Any) -> Any:
    """The vector at these subscripts, a tuple: LANES elements along the last axis."""
    return _loading(False)(x, index, None)


@intrinsic
def load_some(typing: Any, x: Any, index: Any, n: Any) -> Any:
    """Like `load` for the first n lanes; the others are 0, and nothing is read for them."""
    return _loading(True)(x, index, n)


@intrinsic
def store(typing: Any, x: Any, index: Any, v: Any) -> Any:
    """Write a vector, or a scalar LANES times, along the last axis from these subscripts."""
    return _storing(False)(x, index, v, None)


@intrinsic
def store_some(typing: Any, x: Any, index: Any, v: Any, n: Any) -> Any:
    """Like `store` for the first n lanes; nothing else is touched."""
    return _storing(True)(x, index, v, n)


@intrinsic
def load_wide(typing: Any, x: Any, index: Any) -> Any:
    """`load` of WIDE elements."""
    return _loading(False, WIDE)(x, index, None)


@intrinsic
def load_some_wide(typing: Any, x: Any, index: Any, n: Any) -> Any:
    """`load_some` of WIDE elements."""
    return _loading(True, WIDE)(x, index, n)


@intrinsic
def store_wide(typing: Any, x: Any, index: Any, v: Any) -> Any:
    """`store` in which a scalar is written WIDE times."""
    return _storing(False, WIDE)(x, index, v, None)


@intrinsic
def store_some_wide(typing: Any, x: Any, index: Any, v: Any, n: Any) -> Any:
    """`store_some` in which a scalar is written WIDE times."""
    return _storing(True, WIDE)(x, index, v, n)


# ---------------------------------------------------------------- asking for memory

LINE_BYTES, DATA = 64, 1
FOR_READING, FOR_WRITING = (0, 2), (1, 3)
"""Of a cache line, and what `llvm.prefetch` is told: whether to write, and how near to keep it (2: in the second cache)."""


def _prefetching(lanes: int, purpose: tuple[int, int]) -> Any:
    @intrinsic
    def operation(typing: Any, x: Any, index: Any) -> Any:
        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            if _is_dense(x):
                pointer, _ = array_item(context, b, x, args[0], sig.args[1], args[1])
                size = lanes * _bytes(context.get_data_type(x.dtype))
                _ask(b, b.bitcast(pointer, I8.as_pointer()), size, purpose)
            return context.get_dummy_value()

        return types.void(x, index), emit

    return operation


def _ask(b: Builder, pointer: Any, size: int, purpose: tuple[int, int]) -> None:
    """Ask for the lines of the `size` bytes from an address, of which part may not exist."""
    told = [ir.Constant(I32, v) for v in (*purpose, DATA)]
    for offset in range(0, size, LINE_BYTES):
        call(b, "llvm.prefetch.p0", ir.VoidType(), [b.gep(pointer, [ir.Constant(I64, offset)]), *told])


prefetch, prefetch_wide = (_prefetching(n, FOR_WRITING) for n in (LANES, WIDE))
"""Ask for the memory of a vector that will be stored at these subscripts soon; nothing where its elements lie apart."""
prefetch_read, prefetch_read_wide = (_prefetching(n, FOR_READING) for n in (LANES, WIDE))
"""Ask for the memory of a vector that will be read from these subscripts soon, which need not exist."""
