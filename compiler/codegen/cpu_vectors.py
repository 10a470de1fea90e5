"""Which tile expressions the CPU computes LANES elements at a time, and which it leaves to loops over single elements.

A vector runs along the last axis of buffers and tensors. Reads elsewhere, reads that happen only under a condition, integer
division and what only the C library computes go one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...dsl.types import DType
from ..tile_ir import Apply, AxisIndex, Cast, Expr, Fill, Load, Name, operands
from .numba_text import BY_TYPE, Buffer, held
from .placement import depends_on_data

if TYPE_CHECKING:
    from .cpu_expressions import Expressions

ARITHMETIC = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "min",
        "max",
        "lt",
        "le",
        "eq",
        "ne",
        "and",
        "or",
        "not",
        "where",
        "fma",
    }
)
"""Operations on vectors of any element type."""
FLOATING = frozenset({"abs", "sqrt", "floor", "ceil", "round", "rsqrt"})
"""Those on vectors of floats."""


def computes_lanes(task: Expressions, e: Expr, axis: str) -> bool:
    """Can the value be computed for several indices of the axis at once?"""
    pending = [e]
    while pending:
        x = pending.pop()
        if axis not in task.types.of(x).axes:
            continue  # one number for all lanes
        match x:
            case AxisIndex():
                continue
            case Name(name=n):
                place = task.places.get(n)
                if not isinstance(place, Buffer) or place.axes[-1] != axis:
                    return False
            case Load():
                if not _along(task, x, axis):
                    return False
            case Cast(dtype=dtype, arg=arg) if _converts(held(task.types.of(arg).dtype), dtype):
                pending.append(arg)
            case Fill() | Apply() if isinstance(x, Fill) or _applies(task, x):
                pending += operands(x)
            case _:
                return False
    return True


def _along(task: Expressions, e: Load, axis: str) -> bool:
    """Does the read run along its tensor's last axis, its other subscripts the same for all lanes and within bounds?"""
    *others, last = e.subscripts
    return (
        last == AxisIndex(axis)
        and not any(axis in task.types.of(ix).axes for ix in others)
        and not any(depends_on_data(ix, task.tainted) for ix in others)
    )


def _converts(source: DType, to: DType) -> bool:
    """Is there a conversion of vectors? Of floats to integers there is none."""
    if to in (DType.F16, DType.BF16):
        return source is DType.F32
    return to.is_float or to is DType.BOOL or (source, to) == (DType.I32, DType.I64)


def _applies(task: Expressions, e: Apply) -> bool:
    if task._needs_guard(e) and e.op in ("where", "and", "or"):
        return False
    if e.op in ARITHMETIC:
        return True
    wide = any(task.types.of(x).dtype is DType.F64 for x in e.args)
    return (e.op in BY_TYPE and not wide) or (
        e.op in FLOATING and all(task.types.of(x).dtype.is_float for x in e.args)
    )
