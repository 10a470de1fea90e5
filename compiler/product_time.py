"""The time of a product in tier `wgmma`, by its tile and by the blocks that share a sum: what tiles are chosen by.

A multiprocessor works on one tile at a time. A step of 64 along the contracted axis takes as long as the slowest of

- the matrix units: `PRODUCTS_PER_CLOCK`;
- shared memory, through which both operands come and from which each warpgroup reads its rows and all columns;
- the level 2 cache, from which the tile's rows and columns of the step come, whole lines of them;
- one round of waiting, starting products and handing slots back.

All tiles together take no less than memory needs for every operand and result once. Figures are clocks of a multiprocessor.
Sources: CUDA C++ Programming Guide 13.0, "Compute Capabilities" (shared memory: 32 banks of 4 bytes a clock); "NVIDIA H100
Tensor Core GPU Architecture" (2022), table 2 (products); the others are fitted to products as measured on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .target import CudaTarget

WARPGROUP_ROWS = 64
STEP = 64
"""Of the contracted axis: 128 bytes of a row."""
ROW_BYTES = 128
PRODUCTS_PER_CLOCK = 2048
"""Of 16-bit floats on one multiprocessor."""
SHARED_BYTES_PER_CLOCK = 128
CACHE_BYTES_PER_CLOCK = 56
"""From the level 2 cache to one multiprocessor."""
ROUND_CLOCKS = 200
"""A step takes this long at least: waiting for a slot, starting its products, handing the last one's slot back."""
FIRST_CLOCKS, COLUMN_CLOCKS = 1000, 8
"""What a tile takes beside its steps: its first copies, and for each column its results on their way out."""
LAUNCH_CLOCKS = 3500
"""A second launch that merges the sums of several blocks: 2 µs."""
CLOCKS_PER_S = 1.755e9
MEMORY_SHARE = 0.75
"""Of the rate of a copy that a product's operands come at, when they are read once."""
STORED_PER_CLOCK = 4
"""Sums that a multiprocessor stores for the launch that merges them: each by itself, from registers."""
SAME_TIME = 1.05
"""Predictions closer than this are taken as equal."""


@dataclass(frozen=True)
class Product:
    """The sizes of a product: `others` counts tasks for each tile beside its own rows and columns (a batch), `sums` the
    products that share the first operand. A row of an operand that starts in the middle of a cache line takes two lines for
    each 128 bytes: `row_lines` and `column_lines` say how many each operand's take."""

    rows: int
    columns: int
    depth: int
    others: int = 1
    sums: int = 1
    row_lines: int = 1
    column_lines: int = 1

    def tiles(self, rows: int, columns: int) -> int:
        return self.others * -(-self.rows // rows) * -(-self.columns // columns)

    @property
    def bytes(self) -> int:
        """Operands and results, once."""
        operands = self.rows * self.depth + self.sums * self.columns * self.depth
        return 2 * self.others * (operands + self.rows * self.columns)


@dataclass(frozen=True, order=True)
class Tiling:
    """Rows and columns of a tile, and how many blocks divide its sum."""

    rows: int
    columns: int
    parts: int = 1

    def told(self) -> str:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"{self.rows} x {self.columns}{parts}"


def step_clocks(p: Product, t: Tiling) -> float:
    """One step of 64 along the contracted axis."""
    warpgroups, columns = t.rows // WARPGROUP_ROWS, p.sums * t.columns
    products = t.rows * columns * STEP / PRODUCTS_PER_CLOCK
    read = warpgroups * (p.sums * WARPGROUP_ROWS + columns) + t.rows + columns
    lines = min(t.rows, p.rows) * p.row_lines + p.sums * min(t.columns, p.columns) * p.column_lines
    return max(
        products,
        read * ROW_BYTES / SHARED_BYTES_PER_CLOCK,
        lines * ROW_BYTES / CACHE_BYTES_PER_CLOCK,
        ROUND_CLOCKS,
    )


def clocks(p: Product, t: Tiling, target: CudaTarget) -> tuple[float, float]:
    """Of the whole product; and of the multiprocessors alone, if memory were no limit."""
    return _clocks(p, target)(t)


def _clocks(p: Product, target: CudaTarget) -> Callable[[Tiling], tuple[float, float]]:
    """`clocks` of one product: what all its tilings share, and those of the same rows and columns, is computed once.

    Sums of several blocks have to be stored, and merged in a second launch.
    """
    sms = target.sms or 1
    memory_clock = MEMORY_SHARE * (target.dram_gbytes_per_s or math.inf) * 1e9 / CLOCKS_PER_S
    floor, all_steps = p.bytes / memory_clock, -(-p.depth // STEP)
    part = 8 * p.others * p.sums * p.rows * p.columns / (sms * CACHE_BYTES_PER_CLOCK)
    known: dict[tuple[int, int], tuple[int, float, int, float]] = {}

    def of(t: Tiling) -> tuple[float, float]:
        shape, parts = (t.rows, t.columns), t.parts
        if shape not in known:
            beside = FIRST_CLOCKS + COLUMN_CLOCKS * p.sums * t.columns
            stored = p.sums * min(t.rows, p.rows) * t.columns / STORED_PER_CLOCK
            known[shape] = p.tiles(*shape), step_clocks(p, t), beside, LAUNCH_CLOCKS + stored
        tiles, step, beside, merged = known[shape]
        busy = -(-tiles * parts // sms) * (-(-all_steps // parts) * step + beside)
        merge = merged + part * parts if parts > 1 else 0.0
        return max(busy, floor) + merge, busy + merge

    return of


def fastest(p: Product, tilings: Iterable[Tiling], target: CudaTarget) -> list[Tiling]:
    """The tilings by predicted time. First of all stands, among those as fast as any, one that is not divided, has no third
    warpgroup, which leaves few slots, and gives multiprocessors the least to do."""
    of = _clocks(p, target)
    timed = [(of(t), i, t) for i, t in enumerate(tilings)]
    best = _first(timed)
    return [best, *(t for _, _, t in sorted(timed) if t is not best)]


def best_of(p: Product, tilings: Iterable[Tiling], target: CudaTarget) -> Tiling:
    """The first of the `fastest`."""
    of = _clocks(p, target)
    return _first([(of(t), i, t) for i, t in enumerate(tilings)])


def _first(timed: list[tuple[tuple[float, float], int, Tiling]]) -> Tiling:
    most = SAME_TIME * min(c for (c, _), _, _ in timed)
    rows = 2 * WARPGROUP_ROWS
    equal = ((t.parts, t.rows > rows, busy, i, t) for (c, busy), i, t in timed if c <= most)
    return min(equal)[-1]


def parts_of(p: Product, rows: int, columns: int, most: int, target: CudaTarget) -> int:
    """Into how many parts, a power of two, the sum of such tiles is divided; `most` at most."""
    able = [Tiling(rows, columns, 1 << i) for i in range(max(most, 1).bit_length())]
    return best_of(p, able, target).parts


def microseconds(p: Product, t: Tiling, target: CudaTarget) -> float:
    return clocks(p, t, target)[0] / CLOCKS_PER_S * 1e6
