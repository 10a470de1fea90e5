"""The elementwise operations of the tile IR as Numba CUDA text, one value at a time (DESIGN 8, "Types", "Integers").

Values live in the type they compute in: f16 and bf16 tiles as f32 that hold 16-bit values, i8, i16 and u8 as i32. Names
that are no Python operators are intrinsics of `runtime/intrinsics/ptx.py`.
"""

from __future__ import annotations

import math
import re

from ...dsl.records import dataclass
from ...dsl.types import DType, compute, promote
from ..tensor_ir import COMPARISONS, FLOATING, LOGICAL

INTRINSIC = re.compile(
    r"(?<![.\w])(?:[a-z][a-z0-9_]*_(?:f64|f32|f16|bf16|i64|i32|i16|i8|u16|u8)|commit_copies|wait_copies\d|release_secondary|await_primary)(?=\()"
)
MEANT = re.compile(
    r".*_(f64|f32|f16|bf16|i64|i32|i16|i8|u16|u8)|commit_copies|wait_copies\d|release_secondary|await_primary"
)
"""A name that looks like an intrinsic's."""


@dataclass(frozen=True)
class Code:
    """A Python expression and the computing type of its value; `atom`: it needs no parentheses.

    `narrow`: the value is one of this 16- or 8-bit type, held in the wider type.
    """

    text: str
    dtype: DType
    atom: bool = True
    narrow: DType | None = None

    @property
    def operand(self) -> str:
        return self.text if self.atom else f"({self.text})"


def constant(value: int | float | bool, dtype: DType) -> Code:
    """A literal; floats are rounded to their type by the cast around them."""
    held = compute(dtype)
    if held is DType.BOOL:
        return Code(str(bool(value)), held)
    if held.is_float:
        return Code(f"{held}({_float(float(value))})", held)
    return Code(str(int(value)) if held is DType.I64 and value >= 0 else f"{held}({int(value)})", held)


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


LOWEST = {DType.I64: -(2**63), DType.I32: -(2**31), DType.I16: -(2**15), DType.I8: -(2**7), DType.U8: 0}
HIGHEST = {
    DType.I64: 2**63 - 1,
    DType.I32: 2**31 - 1,
    DType.I16: 2**15 - 1,
    DType.I8: 2**7 - 1,
    DType.U8: 2**8 - 1,
}


def convert(x: Code, dtype: DType) -> Code:
    """The value in another computing type, as arithmetic between the two needs it."""
    to = compute(dtype)
    return x if x.dtype is to else Code(f"{to}({x.text})", to)


def cast(x: Code, dtype: DType) -> Code:
    """The language's cast: floats round to nearest even; float to integer toward zero, saturating, NaN to 0."""
    if dtype in (x.dtype, x.narrow):
        return x
    if dtype is DType.BOOL:
        return Code(f"{x.operand} != {constant(0, x.dtype).text}", dtype, False)
    if dtype in (DType.F16, DType.BF16):
        return Code(f"round_{dtype}({convert(x, DType.F32).text})", DType.F32, narrow=dtype)
    if dtype.is_float or x.dtype is DType.BOOL:
        return convert(x, dtype)
    return _to_integer(x, dtype)


def _to_integer(x: Code, dtype: DType) -> Code:
    held = compute(dtype)
    narrow = dtype is not held
    if not x.dtype.is_float:
        return Code(f"wrap_{dtype}({x.text})", held, narrow=dtype) if narrow else convert(x, dtype)
    whole = f"{held}_from_{x.dtype}({x.text})"
    if not narrow:
        return Code(whole, held)
    return Code(f"i32(min(max({whole}, {LOWEST[dtype]}), {HIGHEST[dtype]}))", held, narrow=dtype)


def loaded(text: str, dtype: DType) -> Code:
    """An element as read from memory: f16 and bf16 lie there as u16, bool as u8."""
    if dtype in (DType.F16, DType.BF16):
        return Code(f"f32_from_{dtype}({text})", DType.F32, narrow=dtype)
    if dtype is DType.BOOL:
        return Code(f"{text} != 0", DType.BOOL, False)
    return Code(text, dtype) if compute(dtype) is dtype else Code(f"i32({text})", DType.I32, narrow=dtype)


def stored(x: Code, dtype: DType) -> str:
    """A value as written to memory."""
    if dtype in (DType.F16, DType.BF16):
        return f"{dtype}_from_f32({convert(x, DType.F32).text})"
    if dtype is DType.BOOL:
        return f"u8({cast(x, dtype).text})"
    held = convert(x, dtype)
    return held.text if compute(dtype) is dtype else f"{dtype}({held.text})"


def storage(dtype: DType) -> str:
    """The name of the type whose pointer a kernel takes for a tensor of `dtype`."""
    return {DType.F16: "u16", DType.BF16: "u16", DType.BOOL: "u8"}.get(dtype, str(dtype))


# ---------------------------------------------------------------- operations

SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}


def operating_type(op: str, operands: list[Code]) -> DType:
    """The type in which operands meet: that of the arithmetic, or of a comparison's two sides."""
    types = [o.dtype for o in (operands[1:] if op == "where" else operands)]
    if op in LOGICAL or all(t is DType.BOOL for t in types):
        return DType.BOOL
    met = types[0] if len(types) == 1 else promote(types[0], types[1])
    for t in types[2:]:
        met = promote(met, t)
    return DType.F32 if op in FLOATING and not met.is_float else met


def operation(op: str, operands: list[Code]) -> Code:
    """One elementwise operation on computed values."""
    meet = operating_type(op, operands)
    if op == "where":
        chosen, other = (convert(o, meet) for o in operands[1:])
        if meet is DType.F32 and (intrinsics_in(chosen.text) or intrinsics_in(other.text)):
            # both sides are computed: a branch would keep what they share with other code from being computed once
            return Code(f"select_f32({operands[0].text}, {chosen.text}, {other.text})", meet)
        return Code(f"{chosen.operand} if {operands[0].operand} else {other.operand}", meet, False)
    a = [convert(o, meet) if meet is not DType.BOOL else o for o in operands]
    if op in COMPARISONS:
        return Code(f"{a[0].operand} {SYMBOLS[op]} {a[1].operand}", DType.BOOL, False)
    if op in LOGICAL:
        return _logical(op, a)
    return _wrapped(_float_text(op, a, meet) if meet.is_float else _integer_text(op, a), meet)


def _logical(op: str, a: list[Code]) -> Code:
    if op == "not":
        return Code(f"not {a[0].operand}", DType.BOOL, False)
    return Code(f"{a[0].operand} {'&' if op == 'and' else '|'} {a[1].operand}", DType.BOOL, False)


def _wrapped(text: Code, dtype: DType) -> Code:
    """Numba widens i32 arithmetic to i64; the cast wraps it back."""
    return Code(f"i32({text.text})", dtype) if dtype is DType.I32 else text


def _float_text(op: str, a: list[Code], dtype: DType) -> Code:
    if op in ("add", "sub", "mul", "div"):
        return Code(f"{a[0].operand} {SYMBOLS.get(op, '/')} {a[1].operand}", dtype, False)
    if op == "neg":
        return Code(f"-{a[0].operand}", dtype, False)
    return Code(f"{op}_{dtype}({', '.join(x.text for x in a)})", dtype)


def _integer_text(op: str, a: list[Code]) -> Code:
    dtype = a[0].dtype
    match op:
        case "add" | "sub" | "mul":
            return Code(f"{a[0].operand} {SYMBOLS[op]} {a[1].operand}", dtype, False)
        case "neg":
            return Code(f"-{a[0].operand}", dtype, False)
        case "min" | "max" | "abs":
            return Code(f"{op}({', '.join(x.text for x in a)})", dtype)
        case "fma":
            return Code(f"{a[0].operand} * {a[1].operand} + {a[2].operand}", dtype, False)
    return Code(f"{op}_i64({', '.join(x.text for x in a)})", dtype)


# ---------------------------------------------------------------- reductions


def identity(fn: str, dtype: DType) -> Code:
    """What a reduction over nothing gives; `dtype` is that of the reduced values."""
    held = compute(dtype)
    match fn:
        case "sum" | "prod":
            return constant(int(fn == "prod"), held if held is not DType.BOOL else DType.I64)
        case "any" | "all":
            return constant(fn == "all", DType.BOOL)
        case "max" if held.is_float:
            return constant(-math.inf, held)
        case "min" if held.is_float:
            return constant(math.inf, held)
    if held is DType.BOOL:
        return constant(fn == "min", held)
    return constant((LOWEST if fn == "max" else HIGHEST)[dtype], held)


OF_REDUCTION = {"sum": "add", "prod": "mul", "any": "or", "all": "and", "max": "max", "min": "min"}


def combine(fn: str, a: Code, b: Code) -> Code:
    """One step of a reduction."""
    if a.dtype is DType.BOOL and fn in ("max", "min"):
        return operation("or" if fn == "max" else "and", [a, b])
    return operation(OF_REDUCTION[fn], [a, b])


def intrinsics_in(text: str) -> set[str]:
    """Names called in generated text that the source has to import."""
    return set(INTRINSIC.findall(text))
