"""Operands of warpgroup products in shared memory, as data: where their pieces lie, and what describes them.

A tile lies as chunks of 64 columns of 16 bits, each of all its rows of 128 bytes, swizzled by 128 bytes. It is K-major where
its columns are the contracted axis, MN-major where its rows are [PTX ISA 9.0, 9.7.15.5.1.2 shared memory layout].
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dsl.records import dataclass

STEP = 16  # of the contracted axis, one instruction
ROW_BYTES = 128
SWIZZLE_128B = 1
EIGHT_ROWS = 8 * ROW_BYTES


@dataclass(frozen=True)
class Operand:
    """`offsets` in bytes of each step of 16; `leading_bytes` from one chunk of 64 columns to the next (MN-major only)."""

    offsets: tuple[int, ...]
    leading_bytes: int
    transposed: bool

    @property
    def high(self) -> int:
        """The upper word of the matrix descriptor: swizzle, and the bytes from 8 rows to the next 8 [9.7.15.5.1.2.2]."""
        return SWIZZLE_128B << 30 | EIGHT_ROWS >> 4

    @property
    def low(self) -> int:
        """What the lower word holds beside the address, which is in units of 16 bytes."""
        return max(self.leading_bytes >> 4, 1) << 16


def k_major(rows: int, depth: int) -> Operand:
    """A tile of `rows` rows whose columns are `depth` elements of the contracted axis."""
    steps = range(-(-depth // STEP))
    return Operand(tuple(k // 4 * rows * ROW_BYTES + k % 4 * 2 * STEP for k in steps), 16, False)


def mn_major(depth: int) -> Operand:
    """A tile whose rows are `depth` elements of the contracted axis."""
    return Operand(tuple(k * STEP * ROW_BYTES for k in range(-(-depth // STEP))), depth * ROW_BYTES, True)


def places(columns: int, row: int, column: int) -> Sequence[int]:
    """Where a thread's sums lie in its array: register 4i + 2h + c is row 8h, column 8i + c from the thread's own
    [9.7.15.5.1.1.3]; neighbours along rows and columns are `row` and `column` elements apart."""
    return [h * row + (2 * i + c) * column for i in range(columns // 8) for h in (0, 1) for c in (0, 1)]
