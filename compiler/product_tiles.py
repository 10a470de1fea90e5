"""The tiles compared for a product in tier `wgmma`, at any sizes: a schedule asks for the best at those of one call, and
whoever has code for some sizes asks whether its tiles are the best at others too.

Everything here follows from sizes alone, so it can be kept beside generated code and asked again without the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..dsl.records import dataclass
from .product_time import ROW_BYTES, STEP, WARPGROUP_ROWS, Product, Tiling, best_of, fastest
from .target import CudaTarget

Length = int | str
"""A number of indices, or the extent that is one."""

WARPGROUP_COLUMNS = {1: 256, 2: 256, 3: 192}
"""The most columns of a tile by the warpgroups that share it: sums of more leave no registers."""
MOST_COLUMNS = 256
RAGGED_COLUMNS = 192
"""The most columns of a tile that does not divide them all, where results are computed from sums: checks of which columns
exist take registers."""
WIDER_STEP = 16
"""Of a tile whose results are computed from sums, for their registers; and of a tile of one warpgroup: few rows take as long
as memory does, and 64 by 11,008 and 32,000 columns took 1.016 of the time in tiles of 88 and 248 columns, not 96 and 256."""
LEAST_PRODUCT_TILES = 8
"""Tiles of the loop that a part of a product has at least."""
MOST_PARTS = 1024


@dataclass(frozen=True)
class Operand:
    """The length of the rows in which an operand lies in memory, and whether its axes include the product's rows and
    columns."""

    dense: Length
    has_rows: bool
    has_columns: bool


@dataclass(frozen=True)
class ProductTiles:
    """One product of a kernel: its lengths, and what a schedule leaves open of its tiles.

    `others` counts tasks beside the tiles; `plain`: a sum is all there is to a result; `step`: tiles have a multiple of so
    many columns. `row`, `column`, `warpgroups` and `parts` (none: open) are what a schedule states.
    """

    rows: Length
    columns: Length
    depth: tuple[Length, ...]
    others: tuple[Length, ...]
    operands: tuple[Operand, ...]
    sums: int
    plain: bool
    step: int
    row: int | None = None
    column: int | None = None
    warpgroups: int | None = None
    parts: tuple[int, ...] = ()

    def product(self, sizes: Mapping[str, int]) -> Product:
        def length(x: Length) -> int:
            return (sizes.get(x) or 1) if isinstance(x, str) else x

        def lines(own: Iterator[Operand]) -> int:
            """Of the cache, for each 128 bytes of a row."""
            return max((1 + (2 * length(o.dense) % ROW_BYTES > 0) for o in own), default=1)

        return Product(
            length(self.rows),
            length(self.columns),
            math.prod(map(length, self.depth)),
            math.prod(map(length, self.others)),
            self.sums,
            lines(o for o in self.operands if o.has_rows),
            lines(o for o in self.operands if o.has_columns),
        )

    def tilings(self, p: Product) -> tuple[Tiling, ...]:
        """All that the schedule leaves open and registers allow."""
        warpgroups = (self.warpgroups,) if self.warpgroups else (1, 2, 3) if self.plain else (1, 2)
        able = tuple(WARPGROUP_ROWS * w for w in warpgroups)
        rows = (self.row,) if self.row else tuple(r for r in able if r - WARPGROUP_ROWS < p.rows) or able
        widths = range(self.step, MOST_COLUMNS + 1, self.step)
        whole = tuple(n for n in widths if self.plain or n <= RAGGED_COLUMNS or p.columns % n == 0)
        most = p.depth // (STEP * LEAST_PRODUCT_TILES) if self.plain else 1
        parts = self.parts or tuple(1 << i for i in range(max(1, min(most, MOST_PARTS)).bit_length()))
        return _tilings(self, rows, (self.column,) if self.column else whole, parts)

    def ranked(self, sizes: Mapping[str, int], target: CudaTarget) -> list[Tiling]:
        """The best first."""
        p = self.product(sizes)
        return fastest(p, self.tilings(p), target)

    def best(self, sizes: Mapping[str, int], target: CudaTarget) -> Tiling:
        """The first of the `ranked`; a new call asks for it, so it is remembered."""
        return _best(self, self.product(sizes), target)


@lru_cache
def _tilings(
    tiles: ProductTiles, rows: tuple[int, ...], columns: tuple[int, ...], parts: tuple[int, ...]
) -> tuple[Tiling, ...]:
    """The smallest where registers allow none, as for many sums: what generates code then says so."""
    able = tuple(
        Tiling(r, n, count)
        for r in rows
        for n in columns
        for count in parts
        if n * tiles.sums <= WARPGROUP_COLUMNS.get(r // WARPGROUP_ROWS, MOST_COLUMNS) or tiles.column
        if (tiles.plain and r > WARPGROUP_ROWS) or n % WIDER_STEP == 0 or tiles.column
    )
    return able or (Tiling(rows[0], columns[0], parts[0]),)


@lru_cache(maxsize=1024)
def _best(tiles: ProductTiles, p: Product, target: CudaTarget) -> Tiling:
    return best_of(p, tiles.tilings(p), target)
