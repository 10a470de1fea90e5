"""Which thread holds which element of a tile: thread distributions as data.

The threads of a block form a grid of rows and columns (columns fastest, so that neighbouring lanes hold neighbouring
columns). Every tile axis is dealt cyclically to one side: thread row `r` of 8 holds positions r, r + 8, r + 16, …; thread
sides a tile has no axis on hold copies. An axis has its side for the whole program, so tiles over the same axes agree
element by element, and a row vector agrees with every tile that has its axis on rows. Where a tile holds two axes of one
side, that tile alone is dealt otherwise, and a value that meets it has to pass through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ...dsl.records import dataclass


@dataclass(frozen=True)
class Spread:
    """An axis of `tile` positions dealt in runs of `run` to 2**(bits + upper_bits) threads, told apart by the bits of the
    thread number from `low` on and, above these in their order, from `upper_low` on.

    The thread with those bits = c holds positions c * run + i % run + i // run * run * step for i < count. No bits: every
    thread holds all. A run longer than 1 needs a tile of whole rounds of runs. With `between`, all positions of a thread lie
    between those that the lower and the upper bits tell apart: lower + 2**bits * (i + count * upper).
    `holders`: how many values the upper bits take, where that is no power of two; 0 where it is.
    """

    tile: int
    low: int = 0
    bits: int = 0
    run: int = 1
    upper_low: int = 0
    upper_bits: int = 0
    between: bool = False
    holders: int = 0

    @property
    def stride(self) -> int:
        """How far apart a thread's neighbouring positions (or runs) are, in positions (or runs)."""
        return 1 << self.bits if self.between else self.step

    @property
    def upper_stride(self) -> int:
        """What the upper bits count."""
        return self.count << self.bits if self.between else 1 << self.bits

    @property
    def step(self) -> int:
        """How many threads the axis is dealt to."""
        return (self.holders or 1 << self.upper_bits) << self.bits

    @property
    def count(self) -> int:
        """Positions that a thread holds; of an empty axis one, which is outside."""
        return max(-(-self.tile // self.step), 1)

    @property
    def even(self) -> bool:
        """Is every dealt position inside the tile?"""
        return self.tile > 0 and self.tile % self.step == 0

    @property
    def mask(self) -> int:
        """The bits of the thread number that tell its holders apart."""
        return ((1 << self.bits) - 1) << self.low | ((1 << self.upper_bits) - 1) << self.upper_low


@dataclass(frozen=True)
class Layout:
    """How a tile over `axes` lies in the registers of a block; elements of a thread are numbered row-major by count."""

    axes: tuple[str, ...]
    spreads: tuple[Spread, ...]

    def spread(self, axis: str) -> Spread:
        return self.spreads[self.axes.index(axis)]

    @property
    def elements(self) -> int:
        """Values a thread holds."""
        return math.prod(s.count for s in self.spreads)

    @property
    def mask(self) -> int:
        """The bits of the thread number that matter; threads that differ elsewhere hold copies."""
        return sum(s.mask for s in self.spreads)

    def restrict(self, axes: Iterable[str]) -> Layout:
        wanted = set(axes)  # which may come one by one
        kept = tuple(a for a in self.axes if a in wanted)
        return Layout(kept, tuple(self.spread(a) for a in kept))

    def with_last(self, axis: str) -> Layout:
        """The same with an axis the innermost."""
        order = (*(a for a in self.axes if a != axis), axis)
        return Layout(order, tuple(self.spread(a) for a in order))

    def serves(self, other: Layout) -> bool:
        """Does each thread hold, of a tile laid so, exactly what its elements of `other` need (broadcast included)?"""
        return all(
            a in other.axes and other.spread(a) == s for a, s in zip(self.axes, self.spreads, strict=True)
        )


def bits_for(tile: int, available: int) -> int:
    """How many of the available bits an axis takes: an even split where a decent one exists, else enough for all."""
    whole = (tile & -tile).bit_length() - 1
    wanted = whole if whole >= 3 else max(0, tile - 1).bit_length()
    return min(available, wanted)


@dataclass(frozen=True)
class Deal:
    """The thread grid of one program and the side of every axis. `tiles` gives the tile size of every tile axis."""

    row_bits: int
    column_bits: int
    tiles: dict[str, int]
    rows: frozenset[str]
    run: int = 1
    """Neighbouring columns of one thread: what it moves at once."""

    @property
    def threads(self) -> int:
        return 1 << (self.row_bits + self.column_bits)

    @property
    def occupied(self) -> int:
        """Threads that hold values; less than `threads` where these are no power of two."""
        return self.threads

    def _row(self, axis: str) -> Spread:
        return Spread(self.tiles[axis], self.column_bits, bits_for(self.tiles[axis], self.row_bits))

    def _column(self, axis: str) -> Spread:
        tile, run = self.tiles[axis], self.run
        if run == 1:
            return Spread(tile, 0, bits_for(tile, self.column_bits))
        bits = min(self.column_bits, max(0, (tile // run).bit_length() - 1))
        whole = tile % (run << bits) == 0
        return Spread(tile, 0, bits, run) if whole else Spread(tile, 0, bits_for(tile, self.column_bits))

    def layout(self, axes: tuple[str, ...]) -> Layout:
        """The layout of every tile over these axes."""
        row, column = self._sides(axes)
        table = {row: self._row, column: self._column}
        return Layout(axes, tuple(table[a](a) if a in table else Spread(self.tiles[a]) for a in axes))

    def _sides(self, axes: tuple[str, ...]) -> tuple[str, str]:
        """The axis on rows and the one on columns: the first and last of their side; a lone side lends one over.

        "" stands for none.
        """
        rows = [a for a in axes if a in self.rows]
        columns = [a for a in axes if a not in self.rows]
        if not rows:
            return columns[0] if len(columns) > 1 else "", columns[-1] if columns else ""
        if not columns:
            return rows[0], rows[-1] if len(rows) > 1 else ""
        return rows[0], columns[-1]

    def alone(self, axis: str) -> Spread:
        """How a tile over this axis alone is dealt."""
        return self.layout((axis,)).spread(axis)

    def copying(self, axes: tuple[str, ...]) -> Layout:
        """A layout for moving a tile from memory: neighbouring threads along the last axis, all threads used."""
        low, spreads = 0, []
        for axis in reversed(axes):
            bits = bits_for(self.tiles[axis], self.row_bits + self.column_bits - low)
            spreads.append(Spread(self.tiles[axis], low, bits))
            low += bits
        return Layout(axes, tuple(reversed(spreads)))


@dataclass(frozen=True)
class Demand:
    """Axes that one computation of the program spans: `kind` "dot" for a matrix product's result, else "map"."""

    kind: str
    axes: tuple[str, ...]


VALUES_PER_THREAD = (
    32  # a block is sized so that its largest product tile leaves each thread about this many values
)
LARGEST_BLOCK_BITS, SMALLEST_BLOCK_BITS = 8, 7  # 256 and 128 threads
LEAST_VALUES = 8
LEAST_OF_ROW = 16
"""Values of a thread from which on a block is large. Threads that reduce a row wait for each other with nothing under way:
more blocks are faster, and more loads of each thread: a norm of 2048 bf16 went from 3.5 to 4.1 TB/s on an H200."""
LONGEST_BLOCK_BITS = 10  # 1024 threads share a long row


@dataclass(frozen=True)
class FragmentDeal(Deal):
    """Tiles lie as the matrix units hold their results (PTX ISA 9.7.14.5, m16n8k16): 8 rows over the lanes, 2 neighbouring
    columns a lane, then over 2**row_warps x 2**column_warps warps, then over a thread's registers."""

    row_warps: int = 0
    column_warps: int = 0

    def _row(self, axis: str) -> Spread:
        tile, bits = self.tiles[axis], 3 + self.row_warps
        return Spread(tile, 2, bits) if tile >= 1 << bits else Spread(tile, 2, bits_for(tile, bits))

    def _column(self, axis: str) -> Spread:
        tile, warps = self.tiles[axis], self.column_warps
        if tile % (8 << warps):
            return Spread(tile, 0, bits_for(tile, 2))
        return Spread(tile, 0, 2, 2, LANE_BITS + self.row_warps, warps)


LANE_BITS = 5


@dataclass(frozen=True)
class WarpgroupDeal(FragmentDeal):
    """Tiles lie as the matrix units hold the results of a warpgroup (PTX ISA 9.7.15.5.1, m64nNk16): 16 rows a warp, 64 a
    warpgroup, all columns in each; a lane has rows r and r + 8 of its warp's."""

    warps: int = 4

    @property
    def occupied(self) -> int:
        return self.warps << LANE_BITS

    def _row(self, axis: str) -> Spread:
        tile = self.tiles[axis]
        if tile != 16 * self.warps:
            return Spread(tile, 2, bits_for(tile, 3))
        holders = 0 if self.warps == 1 << self.row_warps else self.warps
        return Spread(tile, 2, 3, 1, LANE_BITS, self.row_warps, between=True, holders=holders)


@dataclass(frozen=True)
class BlockDeal(Deal):
    """Tiles lie so that a thread reads 16 bytes of each operand of an f32 product at once: runs of RUN along rows and
    columns, a warp 4 threads high and 8 wide (whose reads of either operand are 128 different bytes or fewer), warps
    2**row_warps x 2**column_warps."""

    row_warps: int = 0
    column_warps: int = 0

    def _row(self, axis: str) -> Spread:
        above = LANE_BITS + self.column_warps
        return self._side(axis, Spread(self.tiles[axis], 3, 2, BLOCK_RUN, above, self.row_warps))

    def _column(self, axis: str) -> Spread:
        return self._side(axis, Spread(self.tiles[axis], 0, 3, BLOCK_RUN, LANE_BITS, self.column_warps))

    def _side(self, axis: str, whole: Spread) -> Spread:
        tile = self.tiles[axis]
        if tile % (whole.run * whole.step) == 0:
            return whole
        return Spread(tile, whole.low, bits_for(tile, whole.bits))


BLOCK_RUN = 4
BLOCK_VALUES = 64  # a thread's block of a product: 8 x 8, of which each value read serves 8 products


def block_deal(demands: Iterable[Demand], tiles: dict[str, int]) -> BlockDeal | None:
    """The same sides for products on register blocks; None where a product's tile does not divide into them."""
    wide = _products_first(demands, tiles)
    products = [d for d in wide if d.kind == "dot"]
    if not products or any(len(d.axes) != 2 for d in products):
        return None
    rows = _row_axes(wide)
    if any((d.axes[0] in rows) == (d.axes[1] in rows) for d in products):
        return None
    sizes = [sorted(d.axes, key=lambda a: a not in rows) for d in products]
    able = [
        (r, c)
        for r in range(4)
        for c in range(4)
        if 2 <= r + c <= 3 and all(tiles[m] % (16 << r) == 0 and tiles[n] % (32 << c) == 0 for m, n in sizes)
    ]
    if not able:
        return None
    m, n = (tiles[a] for a in sizes[0])

    def worth(choice: tuple[int, int]) -> tuple[int, int, float]:
        """Enough threads for blocks of BLOCK_VALUES, no more, and blocks as square as can be."""
        r, c = choice
        return (
            max(BLOCK_VALUES, m * n >> (5 + r + c)),
            r + c,
            abs(math.log2((m >> (2 + r)) / (n >> (3 + c)))),
        )

    row_warps, column_warps = min(able, key=worth)
    return BlockDeal(
        2 + row_warps,
        3 + column_warps,
        tiles,
        rows,
        BLOCK_RUN,
        row_warps=row_warps,
        column_warps=column_warps,
    )


def _products_first(demands: Iterable[Demand], tiles: dict[str, int]) -> list[Demand]:
    wide = (d for d in demands if len(d.axes) > 1)
    return sorted(wide, key=lambda d: (d.kind != "dot", -_size(d, tiles)))


def deal(demands: Sequence[Demand], tiles: dict[str, int], run: int = 1) -> Deal:
    """Sides for all axes, products first, and the thread grid that suits the first two-axis tile."""
    wide = _products_first(demands, tiles)
    if not wide:
        largest = max(tiles.values(), default=1)
        least = LEAST_OF_ROW if any(d.kind == "reduce" for d in demands) else LEAST_VALUES
        bits = LARGEST_BLOCK_BITS if largest >= least << LARGEST_BLOCK_BITS else SMALLEST_BLOCK_BITS
        while bits < LONGEST_BLOCK_BITS and largest > VALUES_PER_THREAD << bits:
            bits += 1
        return Deal(0, bits, tiles, frozenset(), run)
    row_bits, column_bits = _grid(wide[0], tiles)
    return Deal(row_bits, column_bits, tiles, _row_axes(wide), run)


def fragment_deal(
    demands: Iterable[Demand], tiles: dict[str, int], row_warps: int, column_warps: int
) -> FragmentDeal:
    """The same sides, laid over warps as matrix units need it."""
    wide = _products_first(demands, tiles)
    return FragmentDeal(
        3 + row_warps,
        2 + column_warps,
        tiles,
        _row_axes(wide),
        2,
        row_warps=row_warps,
        column_warps=column_warps,
    )


def warpgroup_deal(demands: Iterable[Demand], tiles: dict[str, int], warpgroups: int) -> WarpgroupDeal:
    """The same sides, laid over so many warpgroups of four warps."""
    warps = 4 * warpgroups
    plain = fragment_deal(demands, tiles, (warps - 1).bit_length(), 0)
    return WarpgroupDeal(plain.row_bits, 2, tiles, plain.rows, 2, row_warps=plain.row_warps, warps=warps)


def _row_axes(demands: list[Demand]) -> frozenset[str]:
    sides: dict[str, bool] = {}
    for demand in demands:
        _choose_sides(demand.axes, sides)
    return frozenset(a for a, is_row in sides.items() if is_row)


def _size(d: Demand, tiles: dict[str, int]) -> int:
    return math.prod(tiles[a] for a in d.axes)


def _choose_sides(axes: tuple[str, ...], sides: dict[str, bool]) -> None:
    """Give the last two axes opposite sides as far as they are still free."""
    first, last = axes[-2:]
    if first not in sides and last not in sides:
        sides[first], sides[last] = True, False
    sides.setdefault(first, not sides.get(last, False))
    sides.setdefault(last, not sides[first])


def _grid(main: Demand, tiles: dict[str, int]) -> tuple[int, int]:
    """Row and column bits: square thread blocks for products, whole warps along columns for all else."""
    rows, columns = (tiles[a] for a in main.axes[-2:])
    wanted = (rows * columns // VALUES_PER_THREAD).bit_length() - 1
    bits = max(SMALLEST_BLOCK_BITS, min(LARGEST_BLOCK_BITS, wanted))
    if main.kind == "dot":
        column_bits = min(range(3, 6), key=lambda c: (abs(_skew(rows, columns, bits - c, c)), -c))
    else:
        column_bits = max(min(5, bits_for(columns, bits)), bits - bits_for(rows, bits))
    return bits - column_bits, column_bits


def _skew(rows: int, columns: int, row_bits: int, column_bits: int) -> float:
    return math.log2(max(rows / (1 << row_bits), 1)) - math.log2(max(columns / (1 << column_bits), 1))
