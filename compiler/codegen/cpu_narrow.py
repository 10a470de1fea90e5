"""Products of narrow operands on a CPU, tier `matrix`: bf16 into f32 and i8 into i32 by the instructions for them.

An operand computed in f32 is rounded to the bf16 of the stored one that it meets (DESIGN 8, "Precision"); two computed
operands stay f32.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...dsl.types import DType
from ..remarks import Remarks
from ..target import CpuTarget
from ..tile_ir import Dot, Expr, Let, Load, Name, TileProgram, statements
from .placement import Types

TIER = "matrix"
VERBS = {DType.BF16: "multiply_bf16", DType.I8: "multiply_i8"}
SUMS = {DType.BF16: DType.F32, DType.I8: DType.I32}
FEWEST = 16
"""A product with fewer rows or columns would leave most of a tile of sums empty."""
LINE_BYTES, PANEL_LINES, SCRATCH_BYTES = 64, 32, 4096
"""How operands are copied: see `runtime.intrinsics.matrix_units`."""


def units(target: CpuTarget) -> dict[DType, str | None]:
    """What multiplies operands of each type; None where the target has nothing for it."""
    return {DType.BF16: target.bf16_products, DType.I8: target.i8_products}


def narrow_type(d: Dot, types: Types, values: Mapping[str, Expr]) -> DType | None:
    """The type of the operands that a product's instruction takes; None where it stays in the type of its sums. `values`
    are those of names."""
    found = {types.of(x).dtype for x in (d.a, d.b)}
    for narrow, sums in SUMS.items():
        if types.of(d).dtype is not sums or narrow not in found:
            continue
        if found == {narrow}:
            return narrow
        stored = any(types.of(x).dtype is narrow and _is_stored(x, values) for x in (d.a, d.b))
        if found == {narrow, DType.F32} and stored:
            return narrow
    return None


def _is_stored(e: Expr, values: Mapping[str, Expr]) -> bool:
    """Is it what a tensor holds?"""
    while isinstance(e, Name) and e.name in values:
        e = values[e.name]
    return isinstance(e, Load)


def definitions(program: TileProgram) -> dict[str, Expr]:
    """The value of each name that a statement of a program defines."""
    return {s.name: s.value for s in statements(program.body) if isinstance(s, Let)}


def space_words(rows: int, columns: int, inner: int, narrow: DType) -> int:
    """Words of 32 bits that a product of these sizes copies its operands into."""
    along = LINE_BYTES // narrow.bytes
    panel = (-(-inner // along) * PANEL_LINES + 1) * LINE_BYTES
    panels = sum(-(-n // PANEL_LINES) for n in (rows, columns))
    return (SCRATCH_BYTES + panel * panels) // 4


def remark(used: Mapping[str, frozenset[str]], target: CpuTarget, remarks: Remarks) -> str | None:
    """Tell which programs multiply how, from the functions that their text calls; why the tier does not fit, if it does
    not."""
    able = {VERBS[dtype]: (dtype, unit) for dtype, unit in units(target).items()}
    lacking = sorted({f"{able[v][0]}" for verbs in used.values() for v in verbs if able[v][1] is None})
    if lacking:
        return f"tier {TIER}: this processor has no instructions for products of {', '.join(lacking)}"
    if not any(used.values()):
        return (
            f"tier {TIER}: there is no product with an operand stored as bf16, or two as i8, whose tiles have {FEWEST} "
            "rows and columns"
        )
    for program, verbs in used.items():
        for verb in sorted(verbs):
            dtype, unit = able[verb]
            text = f"{program}: products of {dtype} through {unit}, both operands copied in its form"
            if dtype is DType.BF16:
                text += "; computed operands are rounded to the type of the stored ones, subnormal numbers count as 0"
            remarks.add("applied", "schedule", "matrix-units", text)
    return None
