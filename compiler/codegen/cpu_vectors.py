"""Which tile expressions the CPU computes LANES elements at a time, and which it leaves to loops over single elements.

A vector runs along the last axis of buffers and tensors. Reads elsewhere, reads that happen only under a condition, integer
division and what only the C library computes go one by one.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Expr,
    Fill,
    Let,
    Load,
    Name,
    ScalarRef,
    TileProgram,
    operands,
    subexpressions,
)
from .numba_text import BY_TYPE, Buffer, held
from .placement import (
    CHEAP,
    MOST_AGAIN,
    Types,
    Use,
    bodies,
    data_dependent,
    depends_on_data,
    uses_of,
    written,
)

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
    """Does the read run along its tensor's last axis, its other subscripts the same for all lanes?"""
    *others, last = e.subscripts
    return last == AxisIndex(axis) and not any(axis in task.types.of(ix).axes for ix in others)


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


def recomputed(program: TileProgram, types: Types, kept: set[str]) -> frozenset[str]:
    """Names of rows that every loop computes where it reads them: reads along a tensor's last dimension in the type that
    they are computed in, and a few additions and products of those and of numbers. A copy would only push them out of the
    nearest cache. Of the `kept` ones, which are read after their loop too, those that depend on no number: it may be
    another there."""
    cheap = _Cheap(types, written(program), data_dependent(program))
    uses = uses_of(program, types)
    for _, body in bodies(program.body):
        for s in body:
            if isinstance(s, Let) and _is_row(s, types) and _read_nearby(s, uses.get(s.name, []), id(body)):
                cheap.add(s, s.name in kept)
    return frozenset(cheap.operations)


def _is_row(s: Let, types: Types) -> bool:
    return len(s.type.axes) == 1 and types.of(s.value).dtype is s.type.dtype


def _read_nearby(s: Let, uses: list[Use], body: int) -> bool:
    """Is it read by loops over its axis alone, in its own body, and by no product?"""
    return all(u.body == body and u.nest == frozenset(s.type.axes) and not u.is_operand for u in uses)


@dataclass
class _Cheap:
    """Rows found worth computing again: how many operations each takes, and which depend on no name but such."""

    types: Types
    stored: frozenset[str]
    tainted: frozenset[str]
    operations: dict[str, int] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)

    def add(self, s: Let, kept: bool) -> None:
        alone = {x.name for x in subexpressions(s.value) if isinstance(x, Name)} <= self.fixed
        taken = self.work(s.value, s.type.axes[0], MOST_AGAIN)
        if taken is None or taken > MOST_AGAIN or (kept and not alone):
            return
        self.operations[s.name] = taken
        if alone:
            self.fixed.add(s.name)

    def work(self, e: Expr, axis: str, most: int) -> int | None:
        """How many operations an expression takes; None where it is not of this kind or goes deeper than `most`."""
        match e:
            case Name(name=n) if n in self.operations:
                return self.operations[n]
            case Name() | Const() | ScalarRef() if axis not in self.types.of(e).axes:
                return 0
            case Load():
                return 0 if self._is_row_read(e, axis) else None
            case Apply(op=op, args=args) if op in CHEAP and most > 0:
                parts = [self.work(x, axis, most - 1) for x in args]
                return None if None in parts else 1 + sum(n for n in parts if n is not None)
        return None

    def _is_row_read(self, e: Load, axis: str) -> bool:
        *others, last = e.subscripts
        dtype = self.types.of(e).dtype
        apart = not any(axis in self.types.of(x).axes or depends_on_data(x, self.tainted) for x in others)
        return e.tensor not in self.stored and held(dtype) is dtype and last == AxisIndex(axis) and apart
