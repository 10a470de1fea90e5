"""Functions that generated CUDA source calls, each named operation_type. PTX ISA 9.0 sections in brackets.

Rounding is IEEE's everywhere; exp and its like are libdevice's, accurate to 1 or 2 units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import libdevice as _libdevice

from ..cuda import boolean, f32, f64, i32, i64, intrinsic, pointer_to, types, u16

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
            return builder.asm(kind, text, constraints, values, False)

        return result(*arguments), generate

    return intrinsic(_with_arguments(names, implement))


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
view_f64, view_f32, view_i64, view_i32 = (_view(t) for t in (f64, f32, i64, i32))

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


@_function(i64(i64, i64))
def floordiv_i64(a: Any, b: Any) -> Any:
    return i64(0) if b == 0 else i64(a // b)


@_function(i64(i64, i64))
def mod_i64(a: Any, b: Any) -> Any:
    return i64(0) if b == 0 else i64(a % b)


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
_f32_bits = _instruction(i32, (f32,), "mov.b32 $0, $1;")
_i32_saturated_f32 = _instruction(i32, (f32,), "cvt.rzi.s32.f32 $0, $1;")  # [9.7.9 cvt]: integers saturate
_i32_saturated_f64 = _instruction(i32, (f64,), "cvt.rzi.s32.f64 $0, $1;")
_i64_saturated_f32 = _instruction(i64, (f32,), "cvt.rzi.s64.f32 $0, $1;")
_i64_saturated_f64 = _instruction(i64, (f64,), "cvt.rzi.s64.f64 $0, $1;")


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
