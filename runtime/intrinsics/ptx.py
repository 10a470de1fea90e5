"""Functions that generated CUDA source calls, each named operation_type. PTX ISA 9.0 sections in brackets.

Rounding is IEEE's everywhere; exp and its like are libdevice's, accurate to 1 or 2 units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import libdevice as _libdevice

from ..cuda import boolean, f32, f64, i8, i16, i32, i64, intrinsic, pointer_to, types, u8, u16
from .coefficients import TANH_LIMIT, TANH_P, TANH_Q

libdevice: Any = _libdevice
CONSTRAINT = {"i16": "h", "i32": "r", "i64": "l", "float": "f", "double": "d"}


def _instruction(result: Any, arguments: tuple[Any, ...], text: str) -> Any:
    """One PTX instruction on values as a callable; `$0` is the result."""
    names = ", ".join(f"a{i}" for i in range(len(arguments)))

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            kind = ir.FunctionType(context.get_value_type(result), [v.type for v in values])
            constraints = ",".join(
                ["=" + CONSTRAINT[str(kind.return_type)], *(CONSTRAINT[str(v.type)] for v in values)]
            )
            return _pure(builder.asm(kind, text, constraints, values, False))

        return result(*arguments), generate

    return intrinsic(_with_arguments(names, implement))


def _pure(call: Any) -> Any:
    """Says that an instruction touches no memory: NVVM then moves it out of loops and computes equal ones once."""
    call.attributes.add("readnone")
    call.attributes.add("nounwind")
    return call


def _with_arguments(names: str, implement: Callable[..., Any]) -> Callable[..., Any]:
    """numba reads an intrinsic's arity off its parameter list."""
    namespace: dict[str, Any] = {"implement": implement}
    exec(f"def typed(typing_context, {names}):\n    return implement({names})\n", namespace)
    typed: Callable[..., Any] = namespace["typed"]
    typed.__module__ = __name__
    return typed


def _function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A Python function as a callable of fixed types. (numba-cuda's own device functions need a GPU to compile.)"""

    def decorate(body: Callable[..., Any]) -> Any:
        def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
            def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
                return context.compile_internal(builder, body, signature, values)

            return signature, generate

        return intrinsic(_with_arguments(", ".join(_argument_names(body)), implement))

    return decorate


def _argument_names(body: Callable[..., Any]) -> tuple[str, ...]:
    return body.__code__.co_varnames[: body.__code__.co_argcount]


# ---------------------------------------------------------------- arrays as pointers


def _registers(element: Any) -> Any:
    """`registers_t(n)`: a thread's own n values. Loops over them of constant length unroll, and they live in registers."""

    def implement(count: Any) -> tuple[Any, Callable[..., Any]] | None:
        if not isinstance(count, types.IntegerLiteral):
            return None  # numba asks again with the literal's type

        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            kind = ir.ArrayType(context.get_value_type(element), count.literal_value)
            with builder.goto_entry_block():
                place = builder.alloca(kind)
            zero = ir.Constant(ir.IntType(32), 0)
            return builder.gep(place, [zero, zero])

        return pointer_to(element)(count), generate

    return intrinsic(_with_arguments("count", implement))


def _view(element: Any) -> Any:
    """`view_t(array, start, stop)`: elements [start, stop) of a shared array."""

    def implement(array: Any, start: Any, stop: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            data = context.make_array(signature.args[0])(context, builder, values[0]).data
            return builder.gep(data, [values[1]])

        return pointer_to(element)(array, i64, i64), generate

    return intrinsic(_with_arguments("array, start, stop", implement))


registers_f64, registers_f32, registers_i64, registers_i32 = (_registers(t) for t in (f64, f32, i64, i32))
view_f64, view_f32, view_i64, view_i32, view_u16 = (_view(t) for t in (f64, f32, i64, i32, u16))

# ---------------------------------------------------------------- several neighbouring elements at once


def _moved(element: Any, dtype: str, width: int, loads: bool) -> Any:
    """`load16_t(pointer, offset, registers, at)`: 16 (or 8, 4) bytes of a tensor, whose address is a multiple of that, to or
    from a thread's registers; f16 and bf16 lie there as f32, small integers as i32."""
    held = {"f16": f32, "bf16": f32, "i16": i32, "i8": i32, "u8": i32}.get(dtype, element)

    def implement(pointer: Any, offset: Any, registers: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            kind = context.get_value_type(element)
            count = width * 8 // kind.width if isinstance(kind, ir.IntType) else width // SIZES[str(kind)]
            pairs = dtype in ("f16", "bf16")  # two of them are one word
            vector = ir.VectorType(ir.IntType(32), count // 2) if pairs else ir.VectorType(kind, count)
            place = builder.bitcast(builder.gep(values[0], [values[1]]), vector.as_pointer())
            own = [
                builder.gep(values[2], [builder.add(values[3], ir.Constant(values[3].type, i))])
                for i in range(count)
            ]
            lane = [ir.Constant(ir.IntType(32), i) for i in range(vector.count)]
            if loads:
                whole = builder.load(place, align=width)
                parts = [builder.extract_element(whole, n) for n in lane]
                found = [x for w in parts for x in _halves(builder, w, dtype)] if pairs else parts
                for place, x in zip(own, found, strict=True):
                    builder.store(x if pairs else _widened(builder, x, dtype), place)
            else:
                given = [builder.load(x) for x in own]
                if pairs:
                    parts = [_joined(builder, given[i], given[i + 1], dtype) for i in range(0, count, 2)]
                else:
                    parts = [_narrowed(builder, x, dtype) for x in given]
                whole = ir.Constant(vector, ir.Undefined)
                for n, x in zip(lane, parts, strict=True):
                    whole = builder.insert_element(whole, x, n)
                builder.store(whole, place, align=width)
            return context.get_dummy_value()

        return types.void(pointer_to(element), i64, pointer_to(held), i64), generate

    return intrinsic(_with_arguments("pointer, offset, registers, at", implement))


SIZES = {"float": 4, "double": 8}


def _halves(builder: Any, word: Any, dtype: str) -> list[Any]:
    """The two 16-bit floats of a word as f32, the lower first."""
    if dtype == "bf16":  # the upper half of an f32
        low = builder.shl(word, ir.Constant(word.type, 16))
        high = builder.and_(word, ir.Constant(word.type, 0xFFFF0000))
        return [builder.bitcast(x, ir.FloatType()) for x in (low, high)]
    halves = [
        builder.trunc(x, ir.IntType(16)) for x in (word, builder.lshr(word, ir.Constant(word.type, 16)))
    ]
    kind = ir.FunctionType(ir.FloatType(), [ir.IntType(16)])
    return [_pure(builder.asm(kind, "cvt.f32.f16 $0, $1;", "=f,h", [x], False)) for x in halves]


def _joined(builder: Any, low: Any, high: Any, dtype: str) -> Any:
    """Two f32 rounded to 16-bit floats in one word."""
    if dtype == "bf16":  # [9.7.9 cvt]: the first operand goes to the upper half
        kind = ir.FunctionType(ir.IntType(32), [low.type, high.type])
        return _pure(builder.asm(kind, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], False))
    kind = ir.FunctionType(ir.IntType(16), [low.type])  # the form for two needs sm_80
    halves = [_pure(builder.asm(kind, "cvt.rn.f16.f32 $0, $1;", "=h,f", [x], False)) for x in (low, high)]
    words = [builder.zext(x, ir.IntType(32)) for x in halves]
    return builder.or_(words[0], builder.shl(words[1], ir.Constant(words[1].type, 16)))


def _widened(builder: Any, x: Any, dtype: str) -> Any:
    """An element as it is computed with."""
    if dtype in ("i16", "i8"):
        return builder.sext(x, ir.IntType(32))
    return builder.zext(x, ir.IntType(32)) if dtype == "u8" else x


def _narrowed(builder: Any, x: Any, dtype: str) -> Any:
    """A computed value as it lies in memory."""
    if dtype in ("i16", "i8", "u8"):
        return builder.trunc(x, ir.IntType(16 if dtype == "i16" else 8))
    return x


MOVED = {
    "f64": f64,
    "f32": f32,
    "f16": u16,
    "bf16": u16,
    "i64": i64,
    "i32": i32,
    "i16": i16,
    "i8": i8,
    "u8": u8,
}
for _name, _element in MOVED.items():
    for _width in (4, 8, 16):
        globals()[f"load{_width}_{_name}"] = _moved(_element, _name, _width, True)
        globals()[f"store{_width}_{_name}"] = _moved(_element, _name, _width, False)


def _load16_words(pointer: Any, offset: Any, registers: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """`load16_words_u16(pointer, offset, registers, at)`: 16 bytes of a tensor of 16-bit elements, whose address is a
    multiple of that, as four words of two elements each."""

    def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
        vector = ir.VectorType(ir.IntType(32), 4)
        place = builder.bitcast(builder.gep(values[0], [values[1]]), vector.as_pointer())
        whole = builder.load(place, align=16)
        for i in range(4):
            own = builder.gep(values[2], [builder.add(values[3], ir.Constant(values[3].type, i))])
            builder.store(builder.extract_element(whole, ir.Constant(ir.IntType(32), i)), own)
        return context.get_dummy_value()

    return types.void(pointer_to(u16), i64, pointer_to(i32), i64), generate


load16_words_u16 = intrinsic(_with_arguments("pointer, offset, registers, at", _load16_words))

# ---------------------------------------------------------------- products on register blocks

RUN = 4
"""Neighbouring f32 that one read moves: 16 bytes."""


def _add_products(*given: Any) -> tuple[Any, Callable[..., Any]] | None:
    """`add_products_f32(sums, rows, columns, a, a_at, a_run, a_step, b, b_at, b_run, b_step, steps)`: a thread's block of a
    matrix product, sums[i * columns + j] += Σ_k a(i, k) · b(j, k) in order of k, each a fused multiply-add.

    a(i, k) lies at a[a_at + i % 4 + i // 4 * a_run + k * a_step] in shared memory, 16 bytes of it aligned; b likewise.
    """
    if not all(isinstance(given[i], types.IntegerLiteral) for i in (1, 2, 5, 6, 9, 10, 11)):
        return None  # numba asks again with the literals' types
    rows, columns, steps = (given[i].literal_value for i in (1, 2, 11))

    def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
        word = ir.IntType(32)
        quad = ir.VectorType(ir.FloatType(), RUN)

        def read(side: int, count: int, k: int) -> list[Any]:
            pointer, at, (run, step) = (
                values[side],
                values[side + 1],
                (given[side + i].literal_value for i in (2, 3)),
            )
            found = []
            for i in range(count // RUN):
                place = builder.add(at, ir.Constant(at.type, i * run + k * step))
                whole = builder.load(
                    builder.bitcast(builder.gep(pointer, [place]), quad.as_pointer()), align=16
                )
                found += [builder.extract_element(whole, ir.Constant(word, n)) for n in range(RUN)]
            return found

        places = [builder.gep(values[0], [ir.Constant(word, i)]) for i in range(rows * columns)]
        sums = [builder.load(p) for p in places]
        for k in range(steps):
            a, b = read(3, rows, k), read(7, columns, k)
            sums = [builder.fma(a[n // columns], b[n % columns], x) for n, x in enumerate(sums)]
        for place, x in zip(places, sums, strict=True):
            builder.store(x, place)
        return context.get_dummy_value()

    shared = (pointer_to(f32), i64, given[5], given[6])
    return types.void(
        pointer_to(f32), given[1], given[2], *shared, pointer_to(f32), i64, given[9], given[10], given[11]
    ), generate  # fmt: skip


add_products_f32 = intrinsic(
    _with_arguments(
        "sums, rows, columns, a, a_at, a_run, a_step, b, b_at, b_run, b_step, steps", _add_products
    )
)

# ---------------------------------------------------------------- floating arithmetic

fma_f32 = _instruction(f32, (f32, f32, f32), "fma.rn.f32 $0, $1, $2, $3;")  # [9.7.3 fma]
fma_f64 = _instruction(f64, (f64, f64, f64), "fma.rn.f64 $0, $1, $2, $3;")  # [9.7.3 fma]
max_f32 = _instruction(f32, (f32, f32), "max.NaN.f32 $0, $1, $2;")  # [9.7.3 max], sm_80 or later
min_f32 = _instruction(f32, (f32, f32), "min.NaN.f32 $0, $1, $2;")  # [9.7.3 min], sm_80 or later

exp_f32, exp_f64 = libdevice.expf, libdevice.exp
exp2_f32, exp2_f64 = libdevice.exp2f, libdevice.exp2
log_f32, log_f64 = libdevice.logf, libdevice.log
log2_f32, log2_f64 = libdevice.log2f, libdevice.log2
sqrt_f32, sqrt_f64 = libdevice.sqrtf, libdevice.sqrt
rsqrt_f32 = libdevice.rsqrtf
tanh_f32, tanh_f64 = libdevice.tanhf, libdevice.tanh
erf_f32, erf_f64 = libdevice.erff, libdevice.erf
sin_f32, sin_f64 = libdevice.sinf, libdevice.sin
cos_f32, cos_f64 = libdevice.cosf, libdevice.cos
floor_f32, floor_f64 = libdevice.floorf, libdevice.floor
ceil_f32, ceil_f64 = libdevice.ceilf, libdevice.ceil
round_f32, round_f64 = libdevice.rintf, libdevice.rint
abs_f32, abs_f64 = libdevice.fabsf, libdevice.fabs
pow_f32, pow_f64 = libdevice.powf, libdevice.pow


# [9.7.3 rcp.approx: within 1 unit in the last place]
reciprocal_f32 = _instruction(f32, (f32,), "rcp.approx.f32 $0, $1;")
# [9.7.3 ex2.approx: within 2 units]; results below 2^-126 are 0, which saves a comparison and two products each
near_exp2_f32 = _instruction(f32, (f32,), "ex2.approx.ftz.f32 $0, $1;")


@_function(f32(f32))
def near_exp_f32(x: Any) -> Any:
    """Relative error below 2^-22 + |x| 2^-24, 0 below 2^-126: for results that are rounded to 16 bits."""
    return near_exp2_f32(x * f32(1.4426950408889634))


# the same with 0 for what is denormal
_flat_reciprocal_f32 = _instruction(f32, (f32,), "rcp.approx.ftz.f32 $0, $1;")


@_function(f32(f32))
def flat_tanh_f32(y: Any) -> Any:
    """tanh(x) of y = 2 x log2(e) as 1 - 2 / (1 + 2^y). Absolute error below 2^-20.8."""
    return fma_f32(f32(-2.0), _flat_reciprocal_f32(f32(1.0) + near_exp2_f32(y)), f32(1.0))


@_function(f32(f32))
def falling_tanh_f32(y: Any) -> Any:
    """(tanh(x) - 1) / 2 of y = 2 x log2(e) as -1 / (1 + 2^y). Absolute error below 2^-21.8."""
    return _flat_reciprocal_f32(f32(-1.0) - near_exp2_f32(y))


@_function(f32(f32, f32))
def exp_tanh_f32(y: Any, c: Any) -> Any:
    """2^(c tanh(x)) of y = 2 x log2(e) as 2^(c - 2c / (1 + 2^y)). Relative error below 2^-21 + |c| 2^-21.1."""
    return near_exp2_f32(fma_f32(f32(-2.0) * c, _flat_reciprocal_f32(f32(1.0) + near_exp2_f32(y)), c))


@_function(f32(f32))
def tanh_plus_one_f32(y: Any) -> Any:
    """1 + tanh(x) of y = -2 x log2(e) as 2 / (1 + 2^y). Relative error below 2^-20.8 + |y| 2^-24, 0 below 2^-125."""
    return f32(2.0) * _flat_reciprocal_f32(f32(1.0) + near_exp2_f32(y))


@_function(f32(f32))
def logistic_f32(y: Any) -> Any:
    """1 / (1 + 2^y). Relative error below 2^-20.8 + |y| 2^-24, 0 below 2^-126."""
    return _flat_reciprocal_f32(f32(1.0) + near_exp2_f32(y))


@_function(f32(f32))
def near_tanh_f32(x: Any) -> Any:
    """Relative error below 2^-18: for results that are rounded to 16 bits. Beyond the limit it is what it is there."""
    x = f32(TANH_LIMIT) if x > f32(TANH_LIMIT) else x  # NaN stays
    x = f32(-TANH_LIMIT) if x < f32(-TANH_LIMIT) else x
    z = x * x
    p = fma_f32(z, f32(TANH_P[3]), f32(TANH_P[2]))
    p = fma_f32(z, fma_f32(z, p, f32(TANH_P[1])), f32(TANH_P[0]))
    q = fma_f32(z, f32(TANH_Q[3]), f32(TANH_Q[2]))
    q = fma_f32(z, fma_f32(z, q, f32(TANH_Q[1])), f32(TANH_Q[0]))
    return x * p * _flat_reciprocal_f32(q)


def _select(element: Any) -> Any:
    """`select_t(condition, a, b)`: a where the condition holds, else b, both computed [9.7.7 selp]."""

    def implement(condition: Any, a: Any, b: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            bit = context.cast(builder, values[0], signature.args[0], boolean)
            return builder.select(
                builder.trunc(bit, ir.IntType(1)) if bit.type.width > 1 else bit, *values[1:]
            )

        return element(boolean, element, element), generate

    return intrinsic(_with_arguments("condition, a, b", implement))


select_f32, select_i32 = _select(f32), _select(i32)


@_function(f64(f64))
def rsqrt_f64(x: Any) -> Any:
    return f64(1.0) / libdevice.sqrt(x)


@_function(f64(f64, f64))
def max_f64(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


@_function(f64(f64, f64))
def min_f64(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


@_function(f32(f32, f32))
def portable_max_f32(a: Any, b: Any) -> Any:
    """Before sm_80."""
    return a if a > b or a != a else b


@_function(f32(f32, f32))
def portable_min_f32(a: Any, b: Any) -> Any:
    """Before sm_80."""
    return a if a < b or a != a else b


@_function(f32(f32, f32))
def floordiv_f32(a: Any, b: Any) -> Any:
    return libdevice.floorf(a / b)


@_function(f64(f64, f64))
def floordiv_f64(a: Any, b: Any) -> Any:
    return libdevice.floor(a / b)


@_function(f32(f32, f32))
def mod_f32(a: Any, b: Any) -> Any:
    rest = libdevice.fmodf(a, b)
    if rest == f32(0.0):
        return libdevice.copysignf(rest, b)
    return rest + b if (rest < f32(0.0)) != (b < f32(0.0)) else rest


@_function(f64(f64, f64))
def mod_f64(a: Any, b: Any) -> Any:
    rest = libdevice.fmod(a, b)
    if rest == f64(0.0):
        return libdevice.copysign(rest, b)
    return rest + b if (rest < f64(0.0)) != (b < f64(0.0)) else rest


# ---------------------------------------------------------------- integer arithmetic


def _division(remainder: bool) -> Any:
    """Python's `a // b` and `a % b`, 0 for b = 0. Numba's own has branches; without them NVVM takes equal divisions for one,
    and a division of 64 bits, which has no instruction, is a hundred."""

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            a, b = values
            zero = a.type(0)
            by = builder.select(builder.icmp_signed("==", b, zero), a.type(1), b)
            quotient = builder.sdiv(a, by)
            rest = builder.sub(a, builder.mul(quotient, by))
            signs_differ = builder.icmp_signed("<", builder.xor(rest, by), zero)
            above = builder.and_(builder.icmp_signed("!=", rest, zero), signs_differ)
            if remainder:  # of 1 it is 0
                return builder.add(rest, builder.select(above, by, zero))
            quotient = builder.sub(quotient, builder.zext(above, a.type))
            return builder.select(builder.icmp_signed("==", b, zero), zero, quotient)

        return i64(i64, i64), generate

    return intrinsic(_with_arguments("a, b", implement))


floordiv_i64, mod_i64 = _division(remainder=False), _division(remainder=True)

small_floordiv_i64 = _instruction(
    i64,
    (i64, i64),
    "{.reg .b32 whole, by; .reg .b64 less; add.s64 less, $2, -1; min.u64 less, less, 2147483646; add.s64 less, less, 1; "
    "cvt.u32.u64 whole, $1; cvt.u32.u64 by, less; div.u32 whole, whole, by; cvt.u64.u32 $0, whole;}",
)
"""floor(a / b), for 0 <= a < 2^31 - 1 and 0 <= b; 0 for b = 0, which is taken for 2^31 - 1 as what is larger is."""


@_function(i32(i64))
def wrap_i16(x: Any) -> Any:
    return i32(((x + 32768) & 65535) - 32768)


@_function(i32(i64))
def wrap_i8(x: Any) -> Any:
    return i32(((x + 128) & 255) - 128)


@_function(i32(i64))
def wrap_u8(x: Any) -> Any:
    return i32(x & 255)


# ---------------------------------------------------------------- conversions

f32_from_f16 = _instruction(f32, (u16,), "cvt.f32.f16 $0, $1;")  # [9.7.9 cvt]
f16_from_f32 = _instruction(u16, (f32,), "cvt.rn.f16.f32 $0, $1;")  # [9.7.9 cvt]
bf16_from_f32 = _instruction(u16, (f32,), "cvt.rn.bf16.f32 $0, $1;")  # [9.7.9 cvt], sm_80 or later
f32_from_bf16 = _instruction(f32, (u16,), "mov.b32 $0, {0, $1};")  # [9.7.9 mov]: the upper half of an f32
# [9.7.1.11 min, 9.7.1.12 max]: LLVM would compare and select
max_i32 = _instruction(i32, (i32, i32), "max.s32 $0, $1, $2;")
clamp_i32 = _instruction(i32, (i32, i32, i32), "{.reg .s32 t; max.s32 t, $1, $2; min.s32 $0, t, $3;}")
# [9.7.8 bmsk], sm_70 or later: a word with its n lowest bits set, all of them for an n above 32; n is not negative
first_bits_i32 = _instruction(i32, (i32,), "bmsk.clamp.b32 $0, 0, $1;")
# [9.7.7 selp]: a where a word has a bit, else b. All in assembly: LLVM would move the bits of several such tests one by one,
# and the assembler sets seven predicates at once
where_bit_f32 = _instruction(
    f32,
    (i32, i32, f32, f32),
    "{.reg .pred p; .reg .b32 t; and.b32 t, $1, $2; setp.ne.b32 p, t, 0; selp.f32 $0, $3, $4, p;}",
)
# a word's lower and upper half as f32
lower_bf16 = _instruction(f32, (i32,), "{.reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t;}")
upper_bf16 = _instruction(f32, (i32,), "{.reg .b32 t; and.b32 t, $1, 0xffff0000; mov.b32 $0, t;}")
lower_f16 = _instruction(f32, (i32,), "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a;}")
upper_f16 = _instruction(f32, (i32,), "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b;}")
_f32_bits = _instruction(i32, (f32,), "mov.b32 $0, $1;")
_i32_saturated_f32 = _instruction(i32, (f32,), "cvt.rzi.s32.f32 $0, $1;")  # [9.7.9 cvt]: integers saturate
_i32_saturated_f64 = _instruction(i32, (f64,), "cvt.rzi.s32.f64 $0, $1;")
_i64_saturated_f32 = _instruction(i64, (f32,), "cvt.rzi.s64.f32 $0, $1;")
_i64_saturated_f64 = _instruction(i64, (f64,), "cvt.rzi.s64.f64 $0, $1;")


@_function(boolean(i32, i32))
def has_bit_i32(word: Any, bit: Any) -> Any:
    return i32(word & bit) != 0


@_function(u16(f32))
def portable_bf16_from_f32(x: Any) -> Any:
    """Before sm_80: round to nearest even on the bits; a NaN becomes the quiet one."""
    bits = i64(_f32_bits(x)) & 0xFFFFFFFF
    return u16(0x7FC0) if x != x else u16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@_function(f32(f32))
def round_f16(x: Any) -> Any:
    return f32_from_f16(f16_from_f32(x))


@_function(f32(f32))
def round_bf16(x: Any) -> Any:
    return f32_from_bf16(bf16_from_f32(x))


@_function(f32(f32))
def portable_round_bf16(x: Any) -> Any:
    return f32_from_bf16(portable_bf16_from_f32(x))


@_function(i32(f32))
def i32_from_f32(x: Any) -> Any:
    return i32(0) if x != x else _i32_saturated_f32(x)


@_function(i32(f64))
def i32_from_f64(x: Any) -> Any:
    return i32(0) if x != x else _i32_saturated_f64(x)


@_function(i64(f32))
def i64_from_f32(x: Any) -> Any:
    return i64(0) if x != x else _i64_saturated_f32(x)


@_function(i64(f64))
def i64_from_f64(x: Any) -> Any:
    return i64(0) if x != x else _i64_saturated_f64(x)


# ---------------------------------------------------------------- argmax and argmin


@_function(boolean(f64, i64, f64, i64))
def beats_max_f64(value: Any, at: Any, best: Any, best_at: Any) -> Any:
    """Is (value, at) before (best, best_at): the first NaN, else the largest, first index first? Place -1 is nothing."""
    if at < 0 or best_at < 0:
        return at >= 0
    if value != value or best != best:
        return value != value and (best == best or at < best_at)
    return value > best or (value == best and at < best_at)


@_function(boolean(f64, i64, f64, i64))
def beats_min_f64(value: Any, at: Any, best: Any, best_at: Any) -> Any:
    return beats_max_f64(-value, at, -best, best_at)


@_function(boolean(i64, i64, i64, i64))
def beats_max_i64(value: Any, at: Any, best: Any, best_at: Any) -> Any:
    if at < 0 or best_at < 0:
        return at >= 0
    return value > best or (value == best and at < best_at)


@_function(boolean(i64, i64, i64, i64))
def beats_min_i64(value: Any, at: Any, best: Any, best_at: Any) -> Any:
    if at < 0 or best_at < 0:
        return at >= 0
    return value < best or (value == best and at < best_at)


beats_max_f32, beats_min_f32 = beats_max_f64, beats_min_f64

# ---------------------------------------------------------------- additions to memory from several threads


def _addition(element: Any, text: str) -> Any:
    """`add_t(pointer, offset, value)`: one indivisible addition to an element in global memory [9.7.13 red]."""

    def implement(pointer: Any, offset: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            address = builder.ptrtoint(builder.gep(values[0], [values[1]]), ir.IntType(64))
            kind = ir.FunctionType(ir.VoidType(), [address.type, values[2].type])
            builder.asm(
                kind, text, f"l,{CONSTRAINT[str(values[2].type)]},~{{memory}}", [address, values[2]], True
            )
            return context.get_dummy_value()

        return types.void(pointer_to(element), i64, element), generate

    return intrinsic(_with_arguments("pointer, offset, value", implement))


add_f32 = _addition(f32, "red.global.add.f32 [$0], $1;")
add_f64 = _addition(f64, "red.global.add.f64 [$0], $1;")
add_i32 = _addition(i32, "red.global.add.s32 [$0], $1;")
add_i64 = _addition(i64, "red.global.add.u64 [$0], $1;")
add_f16 = _addition(u16, "red.global.add.noftz.f16 [$0], $1;")
add_bf16 = _addition(u16, "red.global.add.noftz.bf16 [$0], $1;")  # sm_90 or later

# ---------------------------------------------------------------- asynchronous copies (sm_80 or later)


def _shared_address(builder: Any, pointer: Any, offset: Any) -> Any:
    """The 32-bit address of an element of shared memory."""
    place = builder.gep(pointer, [offset])
    inner = builder.addrspacecast(place, place.type.pointee.as_pointer(3))
    return builder.ptrtoint(inner, ir.IntType(32))


def _effect(text: str) -> Any:
    """One instruction without operands that memory accesses do not pass."""

    def implement() -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            builder.asm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", [], True)
            return context.get_dummy_value()

        return types.void(), generate

    namespace: dict[str, Any] = {"implement": implement}
    exec("def typed(typing_context):\n    return implement()\n", namespace)
    namespace["typed"].__module__ = __name__
    return intrinsic(namespace["typed"])


commit_copies = _effect("cp.async.commit_group;")  # [9.7.9.25.3.2 cp.async.commit_group]
release_secondary = _effect("griddepcontrol.launch_dependents;")  # [9.7.13.7 griddepcontrol], sm_90 or later
await_primary = _effect("griddepcontrol.wait;")
wait_copies0, wait_copies1, wait_copies2, wait_copies3 = (  # [9.7.9.25.3.3 cp.async.wait_group]
    _effect(f"cp.async.wait_group {n};") for n in range(4)
)


def _copied(element: Any, width: int) -> Any:
    """`copy16_t(shared, at, pointer, offset, exists)`: start a copy of 16 (or 4) bytes, of zeros where they do not exist.

    [9.7.9.25.3.1 cp.async]
    """
    kind_of_cache = "cg.shared.global.L2::128B" if width == 16 else "ca.shared.global"

    def implement(
        shared: Any, at: Any, pointer: Any, offset: Any, exists: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            to = _shared_address(builder, values[0], values[1])
            source = builder.ptrtoint(builder.gep(values[2], [values[3]]), ir.IntType(64))
            whole = ir.Constant(ir.IntType(32), width)
            is_there = context.cast(builder, values[4], signature.args[4], boolean)
            is_there = builder.trunc(is_there, ir.IntType(1)) if is_there.type.width > 1 else is_there
            size = builder.select(is_there, whole, ir.Constant(ir.IntType(32), 0))
            kind = ir.FunctionType(ir.VoidType(), [to.type, source.type, size.type])
            text = f"cp.async.{kind_of_cache} [$0], [$1], {width}, $2;"
            builder.asm(kind, text, "r,l,r,~{memory}", [to, source, size], True)
            return context.get_dummy_value()

        return types.void(pointer_to(element), i64, pointer_to(element), i64, boolean), generate

    return intrinsic(_with_arguments("shared, at, pointer, offset, exists", implement))


copy16_f16 = copy16_bf16 = _copied(u16, 16)
copy16_f32, copy4_f32 = _copied(f32, 16), _copied(f32, 4)

# ---------------------------------------------------------------- matrix units (sm_80 or later)


def _at(builder: Any, pointer: Any, index: Any, plus: int) -> Any:
    return builder.gep(pointer, [builder.add(index, ir.Constant(index.type, plus))])


def _ldmatrix(turned: bool) -> Any:
    """`ldmatrix_t(part, at, shared, offset)`: four 8 x 8 matrices of 16-bit elements into four registers; each lane gives
    the place of one row [9.7.14.5.15 ldmatrix]."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' if turned else ''}.shared.b16 {{$0, $1, $2, $3}}, [$4];"

    def implement(part: Any, at: Any, shared: Any, offset: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.LiteralStructType([word] * 4), [word])
            address = _shared_address(builder, values[2], values[3])
            got = builder.asm(kind, text, "=r,=r,=r,=r,r,~{memory}", [address], True)
            for n in range(4):
                builder.store(builder.extract_value(got, n), _at(builder, values[0], values[1], n))
            return context.get_dummy_value()

        return types.void(pointer_to(i32), i64, pointer_to(u16), i64), generate

    return intrinsic(_with_arguments("part, at, shared, offset", implement))


ldmatrix_f16 = ldmatrix_bf16 = _ldmatrix(False)
ldmatrix_turned_f16 = ldmatrix_turned_bf16 = _ldmatrix(True)


def _mma(dtype: str) -> Any:
    """`mma_t(sums, at, row, column, a, a_at, b, b_at)`: 16 x 8 sums += 16 x 16 · 16 x 8 [9.7.14.5.14 mma.m16n8k16]. A lane's
    four sums lie at `at`, one `column` on, one `row` on, and both."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$0, $1, $2, $3};"
    )

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            sums, at, row, column, a, a_at, b, b_at = values
            spots = [
                at,
                builder.add(at, column),
                builder.add(at, row),
                builder.add(builder.add(at, row), column),
            ]
            places = [builder.gep(sums, [s]) for s in spots]
            old = [builder.load(p) for p in places]
            words = [builder.load(_at(builder, a, a_at, n)) for n in range(4)]
            words += [builder.load(_at(builder, b, b_at, n)) for n in range(2)]
            single = ir.FloatType()
            kind = ir.FunctionType(ir.LiteralStructType([single] * 4), [x.type for x in (*old, *words)])
            constraints = "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r"
            new = builder.asm(kind, text, constraints, [*old, *words], False)
            for n, place in enumerate(places):
                builder.store(builder.extract_value(new, n), place)
            return context.get_dummy_value()

        return types.void(
            pointer_to(f32), i64, i64, i64, pointer_to(i32), i64, pointer_to(i32), i64
        ), generate

    return intrinsic(_with_arguments("sums, at, row, column, a, a_at, b, b_at", implement))


mma_f16, mma_bf16 = _mma("f16"), _mma("bf16")
pack_f16 = _instruction(
    i32, (f32, f32), "cvt.rn.f16x2.f32 $0, $2, $1;"
)  # [9.7.9 cvt]: the first in the lower half
pack_bf16 = _instruction(i32, (f32, f32), "cvt.rn.bf16x2.f32 $0, $2, $1;")
