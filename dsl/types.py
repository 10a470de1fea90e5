"""Element types of the language and the rules by which they combine (DESIGN 8, "Types")."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type. `value` is its spelling in the language; `bits` is its width in memory."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def bytes(self) -> int:
        return _BITS[self] // 8

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_integer(self) -> bool:
        return self in _INTEGERS

    def __str__(self) -> str:
        return self.value


_BITS = {
    DType.F64: 64,
    DType.F32: 32,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I64: 64,
    DType.I32: 32,
    DType.I16: 16,
    DType.I8: 8,
    DType.U8: 8,
    DType.BOOL: 8,
}
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_INTEGERS = frozenset({DType.I64, DType.I32, DType.I16, DType.I8, DType.U8})

NAMES: dict[str, DType] = {t.value: t for t in DType}


def compute(dtype: DType) -> DType:
    """The type in which a stored value computes: f16 and bf16 widen to f32; i8, i16 and u8 to i32."""
    if dtype in (DType.F16, DType.BF16):
        return DType.F32
    if dtype in (DType.I8, DType.I16, DType.U8):
        return DType.I32
    return dtype


def promote(a: DType, b: DType) -> DType:
    """The type of arithmetic between two (non-literal) operands; bool counts as no arithmetic operand.

    Any f64 makes f64, an integer with a float takes the float's computing type, two integers take the wider one.
    """
    x, y = compute(a), compute(b)
    if x.is_float and y.is_float:
        return DType.F64 if DType.F64 in (x, y) else DType.F32
    if x.is_float:
        return x
    if y.is_float:
        return y
    return DType.I64 if DType.I64 in (x, y) else DType.I32
