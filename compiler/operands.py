"""Typing of elaborated expressions: literals that adapt to their partners, and what each operation accepts (DESIGN 8)."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Sequence

from ..dsl.diagnostics import Diagnostics
from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType, compute
from .tensor_ir import COMPARISONS, LOGICAL, REDUCTIONS, Node, apply, const, reduce


@dataclass(frozen=True)
class Value:
    """An elaborated expression. `literal` is the number of a literal that has not met a partner yet, `sides` the condition
    and the literals of a `where` between literals, which adapts as they do; `bad` marks an expression that was refused
    already, so that its users stay silent. `at` is its text: equal expressions share a node, and the node's span."""

    node: Node
    literal: int | float | None = None
    bad: bool = False
    sides: tuple[Node, Value, Value] | None = None
    at: Span | None = None

    @property
    def adapts(self) -> bool:
        return self.literal is not None or self.sides is not None


SYMBOLS = {
    "add": "+",
    "sub": "-",
    "neg": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
}
_FOLD: dict[str, Callable[..., int | float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
}
INTEGER_RANGES = {
    DType.I64: (-(2**63), 2**63 - 1),
    DType.I32: (-(2**31), 2**31 - 1),
    DType.I16: (-(2**15), 2**15 - 1),
    DType.I8: (-128, 127),
    DType.U8: (0, 255),
}


def literal(value: int | float, span: Span | None) -> Value:
    """A literal on its own: integers are i64, floats f32."""
    return Value(const(value, DType.I64 if isinstance(value, int) else DType.F32, span), value)


def refused(span: Span | None) -> Value:
    return Value(const(0, DType.I64, span), bad=True)


def exact(value: int | float, dtype: DType) -> bool:
    """Is the literal representable in `dtype` as it is?"""
    if dtype.is_integer:
        lo, hi = INTEGER_RANGES[dtype]
        return isinstance(value, int) and lo <= value <= hi
    if not dtype.is_float or dtype is DType.F64:
        return dtype.is_float
    x = float(value)
    if not math.isfinite(x):
        return True
    try:
        bits = struct.pack("<e" if dtype is DType.F16 else "<f", x)
    except OverflowError:
        return False
    narrow = bits[:2] == b"\0\0" if dtype is DType.BF16 else True
    return narrow and struct.unpack("<e" if dtype is DType.F16 else "<f", bits)[0] == x


def adapt(value: Value, partner: DType, *, keep_narrow: bool = False) -> Node:
    """The operand as a node, a literal taking the computing type of its partner.

    A float literal beside an integer is f32; an integer literal that does not fit its partner is i64. With
    `keep_narrow` (the sides of a `where`) a literal that the partner's own type holds exactly takes that type.
    """
    if value.sides is not None and partner is not DType.BOOL:
        condition, *sides = value.sides
        a, b = (adapt(v, partner, keep_narrow=keep_narrow) for v in sides)
        return apply("where", condition, a, b, span=value.node.span)
    number, span = value.literal, value.node.span
    if number is None or partner is DType.BOOL:
        return value.node
    if keep_narrow and exact(number, partner):
        return const(number, partner, span)
    wide = compute(partner)
    if wide.is_float:
        return const(float(number), wide, span)
    if isinstance(number, float):
        return const(number, DType.F32, span)
    return const(number, wide if exact(number, wide) else DType.I64, span)


def aligned(values: Sequence[Value], *, keep_narrow: bool = False) -> tuple[Node, ...]:
    """Operands of one operation, literals adapted to the first operand that is none."""
    partner = next((v.node.dtype for v in values if not v.adapts), None)
    if partner is None and any(v.node.dtype.is_float for v in values):
        partner = DType.F32
    if partner is None:
        return tuple(v.node for v in values)
    return tuple(adapt(v, partner, keep_narrow=keep_narrow) for v in values)


def operate(op: str, values: Sequence[Value], span: Span | None, sink: Diagnostics) -> Value:
    """An operation of `OPERATIONS` on elaborated operands; two literals make a literal."""
    if any(v.bad for v in values):
        return refused(span)
    numbers = [v.literal for v in values if v.literal is not None]
    if len(numbers) == len(values) and op in _FOLD:
        try:
            return literal(_FOLD[op](*numbers), span)
        except (ZeroDivisionError, OverflowError):
            pass  # IEEE at run time for floats; the bounds rule refuses an integer divisor of 0
    if not _accepts(op, values, span, sink):
        return refused(span)
    if op == "where":
        sides = aligned(values[1:], keep_narrow=True)
        between = (values[0].node, values[1], values[2]) if values[1].adapts and values[2].adapts else None
        return Value(apply(op, values[0].node, *sides, span=span), sides=between)
    return Value(apply(op, *aligned(values), span=span))


def _shown(value: Value) -> str:
    text = value.at.text if value.at is not None else ""
    return f"`{text}`" if 0 < len(text) <= 40 and "\n" not in text else "an operand"


def _accepts(op: str, values: Sequence[Value], span: Span | None, sink: Diagnostics) -> bool:
    name = SYMBOLS.get(op, op)
    if op in LOGICAL:
        return all(expect_bool(v, f"`{name}`", sink) for v in values)
    if op == "where" and not expect_bool(values[0], "the condition of `where`", sink):
        return False
    bools = [v for v in values[1 if op == "where" else 0 :] if v.node.dtype is DType.BOOL]
    if not bools:
        return True
    if op == "where" or op in COMPARISONS:
        return _same_kind(op, name, bools, values, span, sink)
    shown = _shown(bools[0])
    sink.error(
        "E0301",
        f"`{name}` takes numbers, but {shown} is bool",
        bools[0].at or span,
        note="bool is no number here, so that a mask is never added by accident",
        help=f"select with `where({shown.strip('`')}, …, 0)`, or cast with `f32({shown.strip('`')})`",
    )
    return False


def _same_kind(
    op: str, name: str, bools: list[Value], values: Sequence[Value], span: Span | None, sink: Diagnostics
) -> bool:
    """Two bools, compared for equality only, or two numbers."""
    sides = 2
    if len(bools) == sides and op not in ("lt", "le"):
        return True
    if len(bools) == sides:
        sink.error(
            "E0303",
            f"`{name}` orders numbers, but both sides are bool",
            span,
            help="write `and`, `or`, `not`",
        )
        return False
    number = next(v for v in values[-sides:] if v.node.dtype is not DType.BOOL)
    sink.error(
        "E0303",
        f"`{name}` has bool on one side ({_shown(bools[0])}) and {number.node.dtype} on the other ({_shown(number)})",
        span,
        help="make both bool with a comparison such as `x != 0`, or both numbers with a cast such as `f32(…)`",
    )
    return False


def expect_bool(value: Value, what: str, sink: Diagnostics) -> bool:
    """Report a number where a condition belongs."""
    if value.bad or value.node.dtype is DType.BOOL:
        return not value.bad
    shown = _shown(value)
    sink.error(
        "E0302",
        f"{what} needs a condition, but {shown} is {value.node.dtype}",
        value.at,
        help=f"compare it, for example `{shown.strip('`') if shown != 'an operand' else 'x'} != 0`",
    )
    return False


def expect_integer(value: Value, what: str, sink: Diagnostics) -> bool:
    """Report anything but an integer where an index or an extent belongs."""
    if value.bad or value.node.dtype.is_integer:
        return not value.bad
    sink.error(
        "E0304",
        f"{what} must be an integer, but {_shown(value)} is {value.node.dtype}",
        value.at,
        help="divide with `//`, or cast with `i64(…)`",
    )
    return False


def reduction(
    fn: str, bound: Sequence[str], body: Value, predicate: Node | None, span: Span | None, sink: Diagnostics
) -> Value:
    """`fn[bound | predicate](body)` for `fn` of `REDUCTIONS`."""
    assert fn in REDUCTIONS
    if body.bad:
        return refused(span)
    is_bool = body.node.dtype is DType.BOOL
    if fn in ("any", "all"):
        if not expect_bool(body, f"`{fn}`", sink):
            return refused(span)
    elif is_bool and fn != "sum":
        sink.error(
            "E0305",
            f"`{fn}` takes numbers, but {_shown(body)} is bool",
            body.at or span,
            help="`any` and `all` reduce conditions, and `sum` counts them",
        )
        return refused(span)
    if fn in ("argmax", "argmin") and len(bound) != 1:
        sink.error(
            "E0306", f"`{fn}` takes one index, not {len(bound)}", span, help="reduce the indices one by one"
        )
        return refused(span)
    return Value(reduce(fn, bound, body.node, predicate, span))


def stored(value: Value, dtype: DType, name: str, sink: Diagnostics) -> Node | None:
    """The value as it is stored in `name` of `dtype`; floats round, integers widen, everything else wants a cast."""
    if value.bad:
        return None
    if value.adapts and (dtype.is_float or _fits(value, dtype)):
        return adapt(value, dtype, keep_narrow=dtype.is_integer)
    have = value.node.dtype
    if have is dtype or (have.is_float and dtype.is_float):
        return value.node
    if have.is_integer and dtype.is_integer and _contains(dtype, have):
        return value.node
    why = "a stored value is rounded between floats and widened between integers, never changed otherwise"
    cast = f"cast it: `{dtype}(…)`"
    if dtype is DType.BOOL:
        cast = "compare it, for example `… != 0`"
    elif have is DType.BOOL:
        cast = f"select: `where(…, 1, 0)`, or cast it: `{dtype}(…)`"
    elif have.is_float:
        cast += " rounds toward zero, `floor`, `ceil` and `round` before it otherwise"
    sink.error("E0307", f"`{name}` is {dtype}, but its value is {have}", value.at, note=why, help=cast)
    return None


def _fits(value: Value, dtype: DType) -> bool:
    """Are all literals of a value integers that `dtype` holds?"""
    if value.sides is not None:
        return all(_fits(v, dtype) for v in value.sides[1:])
    return value.literal is not None and exact(value.literal, dtype)


def _contains(wide: DType, narrow: DType) -> bool:
    (a, b), (c, d) = INTEGER_RANGES[wide], INTEGER_RANGES[narrow]
    return a <= c and d <= b
