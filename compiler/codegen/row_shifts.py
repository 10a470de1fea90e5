"""exp(c · (x - r)) for the many x of a row, recognised; `warpgroup_exponentials.py` says what becomes of it."""

from __future__ import annotations

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import Apply, Const, Expr, Name

LOG2_E = 1.4426950408889634
HUGE = float(1 << 30)


@dataclass(frozen=True)
class Shifted:
    """exp(scale · (x - row)); `scale` is None where there is no factor."""

    scale: Expr | None
    x: Expr
    row: Name


def shifted(e: Expr) -> Shifted | None:
    """An exponential of a difference, recognised."""
    match e:
        case Apply(op="exp", args=(Apply(op="mul", args=(c, Apply(op="sub", args=(x, Name() as r)))),)):
            return Shifted(c, x, r)
        case Apply(op="exp", args=(Apply(op="sub", args=(x, Name() as r)),)):
            return Shifted(None, x, r)
    return None


def slope_and_lift(row: Name) -> tuple[Expr, Expr]:
    """Of exp(x - row) as exp2(fma(x, slope, lift)): exact but for one rounding, and one that is the same for the row."""
    by = Const(LOG2_E, DType.F32)
    product = Apply("mul", (row, by))
    huge = Apply("le", (Const(HUGE, DType.F32), Apply("abs", (product,))))
    slope = Apply("where", (huge, Const(1.0, DType.F32), by))
    return slope, Apply("neg", (Apply("where", (huge, row, product)),))
