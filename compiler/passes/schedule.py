"""schedule: where each axis of a region goes and how it is cut (DESIGN 4.5).

Roles follow from the index structure alone, so that no kernel needs to be known by name:
- grid: an axis of every root that no reduction of the region runs over;
- whole: an axis inside a loop that a tile must have in one piece: the reduced axis of a reduction inside another one's
  loop, and an axis of a root that some state of the same cascade lacks;
- the rest are serial loops: reduced axes, and axes of roots that are reduced as well.
A grid axis is cut into tiles where an operand of a contraction has it for itself; other grid axes are one index a task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from ...dsl.diagnostics import refuse
from ...dsl.records import dataclass
from ...dsl.types import DType
from ..codegen.cpu_narrow import TIER as MATRIX_TIER
from ..codegen.staging import CHUNK
from ..layouts import Positive
from ..product_tiles import Length, Operand, ProductTiles
from ..product_time import WARPGROUP_ROWS, microseconds
from ..region import AxisPlan, Region, contraction, reductions
from ..remarks import Remarks
from ..schedule import LARGEST_VALUE, Schedule, stem
from ..schedule_check import stated_tile
from ..target import CudaTarget, Target
from ..tensor_ir import (
    Apply,
    Axes,
    Cast,
    Const,
    Extent,
    Graph,
    Index,
    Node,
    Read,
    Reduce,
    Scalar,
    positive,
    walk,
)
from ..tile_ir import Attribute, TileProgram, has_product

WHOLE_LIMIT = 512


@dataclass(frozen=True)
class TileSizes:
    """Default tile sizes of a target, by what the axis is for.

    row, column, inner: a contraction's output rows and columns and its reduced axis; query, key: rows and loop axis of a
    cascade around a contraction; line, lines: the loop axis and the grid axis of row reductions; flat: elementwise;
    volume: the most elements that one tile may have; stack: matrices of a contraction that share its other operand.
    """

    row: int
    column: int
    inner: int
    query: int
    key: int
    line: int
    lines: int
    flat: int
    volume: int
    stack: int | None = None


CPU_TILES = TileSizes(
    row=512, column=512, inner=256, query=64, key=128, line=8192, lines=1, flat=1024, volume=1 << 18
)
CPU_MATRIX_TILES = replace(CPU_TILES, row=512, column=512, inner=512, query=128, volume=1 << 18)
"""Products on matrix units: each task copies its operands, from beyond its own caches, so both sides of a tile are long."""
CUDA_TILES = TileSizes(
    row=64, column=64, inner=16, query=32, key=32, line=1024, lines=4, flat=2048, volume=1 << 12
)


MATRIX_TILES = TileSizes(
    row=128, column=128, inner=64, query=128, key=64, line=1024, lines=4, flat=2048, volume=1 << 14
)
SMALL_MATRIX_TILES = TileSizes(
    row=64, column=64, inner=64, query=64, key=64, line=1024, lines=4, flat=2048, volume=1 << 13
)
WARPGROUP_TILES = TileSizes(
    row=128, column=256, inner=64, query=128, key=128, line=1024, lines=4, flat=2048, volume=1 << 15
)
MATRIX_TIERS = ("mma", "wgmma")
BLOCK_TILES = TileSizes(
    row=128, column=128, inner=16, query=32, key=32, line=1024, lines=4, flat=2048, volume=1 << 14
)
"""Products on f32 units: 256 threads of 8 x 8 results, where they make a block for each multiprocessor."""
LINE_PADDING = 8  # elements between rows of shared memory that are read as matrices
SIXTEEN = (DType.F16, DType.BF16)


def tile_sizes(target: Target) -> TileSizes:
    return CUDA_TILES if target.is_cuda else CPU_TILES


def region_tiles(
    graph: Graph, region: Region, roles: Roles, schedule: Schedule, target: Target, sizes: Mapping[str, int],
    product: ProductTiles | None, remarks: Remarks,
) -> TileSizes:  # fmt: skip
    """The target's tiles; those of the matrix units for products that they take, smaller where large ones are too few for
    the device's multiprocessors."""
    if not isinstance(target, CudaTarget):
        return _cpu_tiles(graph, region, roles, schedule, sizes, remarks)
    if schedule.tier not in MATRIX_TIERS or not _on_matrix_units(region):
        if _is_plain_product(region) and _tasks(graph, roles, sizes, BLOCK_TILES) >= (target.sms or 1):
            return BLOCK_TILES
        return _row_tiles(graph, region, roles, sizes)
    if schedule.tier == "wgmma":
        if product is not None:
            return _product_tiles(product, region, sizes, target, remarks)
        return _cascade_tiles(graph, region, roles, sizes, target, schedule, remarks)
    widest = max((axis_size(graph, a, sizes) or 0 for a in roles.whole), default=0)
    if NARROW_ROWS < max(widest, _columns_of_sums(graph, region, roles, sizes, remarks)) <= WIDE_ROWS:
        return replace(
            SMALL_MATRIX_TILES, key=SMALL_MATRIX_TILES.key // 2, volume=SMALL_MATRIX_TILES.row * widest
        )
    few = _tasks(graph, roles, sizes, MATRIX_TILES) < (target.sms or 1)
    found = SMALL_MATRIX_TILES if few or widest > NARROW_ROWS else MATRIX_TILES
    taken = _copied_bytes(found, widest)
    if taken <= target.shared_per_block_bytes:
        return found
    remarks.add(
        "note", "schedule", "cascade-tiles",
        f"{region.name}: {found.key // 2} keys a step, for {found.key} take {taken} bytes of shared memory and "
        f"{target.name} has {target.shared_per_block_bytes} a block",
        region.roots[0].span,
    )  # fmt: skip
    return replace(found, key=found.key // 2)


def _copied_bytes(s: TileSizes, widest: int) -> int:
    """Shared memory of a cascade in padded rows: its queries, and two tiles of keys and of values on their way."""
    return 2 * (s.query + 2 * 2 * s.key) * (widest + LINE_PADDING)


def _tasks(graph: Graph, roles: Roles, sizes: Mapping[str, int], s: TileSizes) -> int:
    """Blocks that have work at these tiles."""
    count = 1
    for axis in roles.grid:
        size = axis_size(graph, axis, sizes) or 1
        tile = s.query if roles.contraction_inside else s.row
        count *= -(-size // tile) if axis in roles.tiled else size
    return count


def _is_plain_product(region: Region) -> bool:
    """Are its reductions all contractions, none inside another, of f32 operands?"""
    found = reductions(region.values)
    reads = (n for r in found for n in walk([r.body]) if isinstance(n, Read))
    return (
        bool(found)
        and all(r.fn == "sum" and contraction(r.body, frozenset(r.bound)) for r in found)
        and not any(isinstance(n, Reduce) for r in found for n in walk([r.body]))
        and all(n.dtype is DType.F32 for n in reads)
    )


COLUMN_STEP = 8
"""Of a tile: an instruction's step."""
NARROW_COLUMNS = 64
"""Columns of a cascade's sums up to which three warpgroups have registers for a step of WARPGROUP_TILES.key keys."""
ONE_WARPGROUP = 0.71
"""Time of a step of one warpgroup by that of two, which does twice as much (128 columns, likewise)."""
THIRD_WARPGROUP = 0.88
"""Time of a row in a step of three warpgroups by that of two (64 columns, `variants` of benchmarks/hopper.py): a third of
the tiles of keys and values less comes from memory, and one more warp a scheduler hides waiting."""


def _cascade_tiles(
    graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int], target: CudaTarget, schedule: Schedule,
    remarks: Remarks,
) -> TileSizes:  # fmt: skip
    """Tiles for products of warpgroups, 64 rows for each of them, where a cascade has one inside: fewer keys beside wide
    accumulators."""
    widest = max((axis_size(graph, a, sizes) or 0 for a in roles.whole), default=0)
    widest = max(widest, _columns_of_sums(graph, region, roles, sizes, remarks))
    rows = (axis_size(graph, roles.tiled[0], sizes) if roles.tiled else None) or 2 * WARPGROUP_ROWS
    warpgroups = schedule.warpgroups or _warpgroups_of_cascade(
        graph, region, roles, sizes, target, widest, rows, remarks
    )
    keys = WARPGROUP_TILES.key
    if widest > NARROW_ROWS or (warpgroups == 3 and widest > NARROW_COLUMNS):  # 160 registers a thread
        keys //= 2
    tile = WARPGROUP_ROWS * warpgroups
    if schedule.warpgroups is None and warpgroups == 2:
        others = _cascade_tasks(graph, roles, sizes, rows)
        tile = _rows_of_cascade(graph, region, roles, sizes, target, rows, keys, others, remarks)
    elif schedule.warpgroups is None and _cascade_tasks(graph, roles, sizes, tile) < (target.sms or 1):
        tile = WARPGROUP_ROWS
    return replace(WARPGROUP_TILES, row=WARPGROUP_ROWS * warpgroups, key=keys, query=tile)


def _columns_of_sums(
    graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int], remarks: Remarks
) -> int:
    """Of all sums together that a cascade's loop keeps in registers, as of two tensors of values."""
    sums = [r for r in dict.fromkeys(reductions(region.values)) if r.fn == "sum"]
    columns = [n for r in sums for a in r.axes if a in roles.whole and (n := axis_size(graph, a, sizes))]
    if len(columns) > 1:
        remarks.add(
            "note", "schedule", "cascade-tiles",
            f"{region.name}: tiles leave registers for sums of {' and '.join(map(str, columns))} columns",
            region.roots[0].span,
        )  # fmt: skip
    return sum(columns)


def _rows_of_cascade(
    graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int], target: CudaTarget, rows: int, step: int,
    others: int, remarks: Remarks,
) -> int:  # fmt: skip
    """Rows of a tile, for one warpgroup or two: what gives the busiest multiprocessor the least to do. `others`: tasks that
    each of the tiles makes."""
    keys = next((axis_size(graph, a, sizes) or rows for a in roles.reduced if a not in roles.whole), rows)
    bounded, sms = _is_bounded(region, roles), target.sms or 1
    one, two = (
        _busiest(_steps(rows, keys, n * WARPGROUP_ROWS, step, bounded), others, bounded, sms) for n in (1, 2)
    )
    best = WARPGROUP_ROWS if ONE_WARPGROUP * one < two else 2 * WARPGROUP_ROWS
    if others * -(-rows // WARPGROUP_ROWS) < 4 * sms:
        remarks.add(
            "note", "schedule", "cascade-tiles",
            f"{region.name}: the busiest multiprocessor takes {one:.1f} steps with tiles of 64 rows, each in "
            f"{ONE_WARPGROUP} of the time, {two:.1f} with tiles of 128 rows",
            region.roots[0].span,
        )  # fmt: skip
    return best


def _busiest(steps: list[int], others: int, by_length: bool, multiprocessors: int) -> float:
    """Steps of the multiprocessor that takes the most, where each tile makes so many tasks; `by_length`: tasks differ in
    length, and the longest come first."""
    if by_length:
        return max(max(steps), others * sum(steps) / multiprocessors)
    return -(-others * len(steps) // multiprocessors) * steps[0]


def _warpgroups_of_cascade(
    graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int], target: CudaTarget, widest: int, rows: int,
    remarks: Remarks,
) -> int:  # fmt: skip
    """One for up to 64 rows; three where their larger tile visits little more than two would, and there are registers: for
    sums up to NARROW_COLUMNS wide and no tensor that is read for each score."""
    if rows <= WARPGROUP_ROWS:
        return 1
    few = _cascade_tasks(graph, roles, sizes, 3 * WARPGROUP_ROWS) < (target.sms or 1)
    loop = {a for a in roles.reduced if a not in roles.whole}
    operands = _operands(region)
    others = [n for n in walk(region.values) if isinstance(n, Read) and loop & n.axes and n not in operands]
    if widest > NARROW_COLUMNS or few or others:
        return 2
    keys = next((axis_size(graph, a, sizes) or rows for a in roles.reduced if a not in roles.whole), rows)
    bounded = _is_bounded(region, roles)
    visited = [_visited_pairs(rows, keys, n * WARPGROUP_ROWS, WARPGROUP_TILES.key, bounded) for n in (2, 3)]
    remarks.add(
        "note", "schedule", "cascade-tiles",
        f"{region.name}: tiles of 128 rows visit {visited[0]:,} pairs, tiles of 192 rows {visited[1]:,}, each in "
        f"{THIRD_WARPGROUP} of the time",
        region.roots[0].span,
    )  # fmt: skip
    return 3 if THIRD_WARPGROUP * visited[1] < visited[0] else 2


def _is_bounded(region: Region, roles: Roles) -> bool:
    """Does a row's place decide which steps of the loop it takes part in?"""
    predicates = [r.predicate for r in reductions(region.values) if r.predicate is not None]
    return any(
        roles.tiled and {roles.tiled[0], *roles.reduced} & p.axes > {roles.tiled[0]} for p in predicates
    )


def _visited_pairs(rows: int, keys: int, tile: int, step: int, bounded: bool) -> int:
    """Pairs of rows and keys in the tiles that are visited, all or (`bounded`) those under a diagonal."""
    return tile * step * sum(_steps(rows, keys, tile, step, bounded))


def _steps(rows: int, keys: int, tile: int, step: int, bounded: bool) -> list[int]:
    """Steps of each tile of rows."""
    most = -(-keys // step)
    return [min(most, -(-tile * (i + 1) // step)) if bounded else most for i in range(-(-rows // tile))]


def _cascade_tasks(graph: Graph, roles: Roles, sizes: Mapping[str, int], tile: int) -> int:
    return math.prod(
        -(-(axis_size(graph, a, sizes) or 1) // (tile if a in roles.tiled else 1)) for a in roles.grid
    )


def _product_tiles(
    product: ProductTiles, region: Region, sizes: Mapping[str, int], target: CudaTarget, remarks: Remarks
) -> TileSizes:
    """Rows and columns of a product's tile by the time that each choice is predicted to take."""
    at = product.product(sizes)
    best, *rest = product.ranked(sizes, target)
    told = [f"{t.told()} {microseconds(at, t, target):.1f}" for t in (best, *rest[:3])]
    remarks.add(
        "note", "schedule", "product-tiles", f"{region.name}: predicted µs by tile: {', '.join(told)}",
        region.roots[0].span, considered=len(rest) + 1, tiles=at.tiles(best.rows, best.columns) * best.parts,
    )  # fmt: skip
    volume = max(WARPGROUP_TILES.volume, best.rows * best.columns)
    return replace(WARPGROUP_TILES, row=best.rows, query=best.rows, column=best.columns, volume=volume)


def product_tiles(
    graph: Graph, region: Region, roles: Roles, schedule: Schedule, stated: Mapping[str, int]
) -> ProductTiles | None:
    """What the tiles of a product by warpgroups are chosen from; None where it is none, or has another inside."""
    if schedule.tier != "wgmma" or roles.contraction_inside or not _on_matrix_units(region):
        return None
    row, column = (*roles.tiled[:2], "", "")[:2]
    length = {a: _length(graph, a) for a in graph.axes}
    dense = _dense_axes(region)
    sums = sum(1 for r in reductions(region.values) if r.fn == "sum")
    plain = all(isinstance(v.operand if isinstance(v, Cast) else v, Reduce) for v in region.values)
    reduced = set(map(stem, roles.reduced))
    return ProductTiles(
        rows=length.get(row, 1),
        columns=length.get(column, 1),
        depth=tuple(length[a] for a in roles.reduced),
        others=tuple(length[a] for a in roles.grid if a not in (row, column)),
        operands=tuple(Operand(length[x], row in axes, column in axes) for x, axes in dense),
        sums=sums,
        plain=plain and sums == 1,
        step=CHUNK if column in {x for x, _ in dense} else COLUMN_STEP,
        row=stated[row] or 1 if row in stated else None,  # a tile of 1 is stated as none
        column=stated[column] or 1 if column in stated else None,
        warpgroups=schedule.warpgroups,
        parts=tuple(n for a, n in schedule.splits if a in reduced),
    )


def _length(graph: Graph, axis: str) -> Length:
    """Of an axis, as far as it is known before a call."""
    match graph.axes[axis]:
        case Const(value=v):
            return int(v)
        case Extent(name=n):
            return n
    return 1


def _dense_axes(region: Region) -> list[tuple[str, frozenset[str]]]:
    """The axis along which rows of each operand of a product lie in memory, with all axes of the operand."""
    reads = [f for f in _operands(region) if f.indices]
    return [(f.indices[-1].axis, frozenset(f.axes)) for f in reads if isinstance(f.indices[-1], Index)]


def _operands(region: Region) -> list[Read]:
    """What products read from memory."""
    sums = [r for r in reductions(region.values) if r.fn == "sum"]
    splits = [contraction(r.body, frozenset(r.bound)) for r in sums]
    return [f for split in splits if split for side in split for f in side if isinstance(f, Read)]


def _cpu_tiles(
    graph: Graph, region: Region, roles: Roles, schedule: Schedule, sizes: Mapping[str, int], remarks: Remarks
) -> TileSizes:
    """Row reductions take one row at a time, all of it in one tile where a core's own cache holds it; reductions across
    rows take many columns at a time, since those lie densely."""
    loops = (*roles.reduced, *roles.serial)
    if roles.contraction_inside or roles.contraction_outside:
        on_units = schedule.tier == MATRIX_TIER
        best = CPU_MATRIX_TILES if on_units else CPU_TILES
        return _cpu_product_tiles(graph, region, roles, best, sizes, remarks)
    if not loops:
        return CPU_TILES
    if not _along_rows(region, loops[-1]):
        return replace(CPU_TILES, lines=CPU_COLUMNS, line=CPU_COLUMN_ROWS)
    is_long = (axis_size(graph, loops[-1], sizes) or 0) > CPU_TILES.line
    return replace(CPU_TILES, line=CPU_LONGEST_LINE) if is_long else CPU_TILES


CPU_LONGEST_LINE = 1 << 16
CPU_COLUMNS, CPU_COLUMN_ROWS = 256, 64
FEW_ROWS = 8
CPU_QUERIES = (FEW_ROWS, 16, 32, CPU_TILES.query)
"""Rows of a cascade's tile: few, or along the lanes of one vector, two or four."""
FEWEST_TASKS = 4
CPU_MANY_QUERIES = 192
CPU_LONG_STREAM = 3 << 20
"""Bytes that a cascade reads again for each tile of rows, from which on more rows should share them: they then come from
beyond the caches. Where a row's place bounds its loop, larger tiles visit more that is masked, and gain nothing."""


def _bytes_read_again(graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int]) -> int:
    """Bytes of the products' operands that each tile of rows reads in its loop."""
    inside = {*roles.reduced, *roles.whole}
    looped = inside - set(roles.whole)
    reads = {n for n in _operands(region) if looped & n.axes}
    return sum(
        n.dtype.bytes * math.prod(axis_size(graph, a, sizes) or 1 for a in inside & n.axes) for n in reads
    )


def _cpu_product_tiles(
    graph: Graph, region: Region, roles: Roles, best: TileSizes, sizes: Mapping[str, int], remarks: Remarks
) -> TileSizes:
    """Few rows of a cascade make a short tile, which leaves the lanes of vectors to its loop axis; some more, one that they
    fill. A product that would make fewer than `FEWEST_TASKS` tasks is cut smaller, its columns first, since each column is
    copied once for all rows; but not into tasks that cost less than handing them out."""
    lengths = [axis_size(graph, a, sizes) or 0 for a in roles.tiled]
    if roles.contraction_inside:
        rows = lengths[0] if lengths and lengths[0] else best.query
        again = _bytes_read_again(graph, region, roles, sizes)
        many = rows >= FEWEST_TASKS * CPU_MANY_QUERIES and again >= CPU_LONG_STREAM
        if best is CPU_TILES and many and not _is_bounded(region, roles):
            remarks.add(
                "note", "schedule", "cascade-tiles",
                f"{region.name}: tiles of {CPU_MANY_QUERIES} rows, not {best.query}: each reads {again >> 20} MB again",
                region.roots[0].span,
            )  # fmt: skip
            return replace(best, query=CPU_MANY_QUERIES)
        return replace(best, query=next((n for n in CPU_QUERIES if n >= rows), best.query))
    if len(lengths) != 2:
        return best
    others = math.prod(axis_size(graph, a, sizes) or 1 for a in roles.grid if a not in roles.tiled)
    depth = math.prod(axis_size(graph, a, sizes) or 1 for a in roles.reduced)
    even = best is CPU_MATRIX_TILES  # copies both operands for each task
    thin = _thin_tiles(lengths, depth)
    best = thin or (best if even else _wide_tiles(region))
    if thin is None and not even:
        best = _deep_tiles(_narrow_tiles(best, lengths[1]), depth)
        matrices = axis_size(graph, roles.stacked, sizes) or 1 if roles.stacked is not None else 1
        stack = _stack(lengths, matrices, others)
        if stack > 1:
            return replace(best, row=_whole(lengths[0]), stack=stack)
    row, column = best.row, best.column
    fewest = FEWEST_THIN_TASKS if thin is not None and lengths[0] <= FEW_ROWS else FEWEST_TASKS
    if fewest == FEWEST_THIN_TASKS and lengths[0] * min(column, lengths[1]) * depth >= SPLIT_TASK:
        return best  # its sum is divided (passes/split.py), and each part reads whole rows
    while others * -(-lengths[0] // row) * -(-lengths[1] // column) < fewest and max(row, column) > 64:
        if min(row, lengths[0]) * min(column, lengths[1]) * depth < LARGEST_TASK:
            break
        row, column = (row, column // 2) if column > (row - 1 if even else 64) else (row // 2, column)
    return replace(best, row=row, column=column)


STACKED_ROWS = 256
"""So many rows are enough for one copy of a panel; their other operand still fits into a core's own cache."""


def _stack(lengths: list[int], matrices: int, tasks: int) -> int:
    """How many matrices of few rows share the copies of the other operand; `tasks` there are without that."""
    if not 0 < lengths[0] <= STACKED_ROWS // 2 or lengths[1] <= CPU_COLUMNS // 4:
        return 1
    return min(STACKED_ROWS // _whole(lengths[0]), matrices, max(1, tasks // (2 * FEWEST_TASKS)))


def _narrow_tiles(s: TileSizes, columns: int) -> TileSizes:
    """A tile says when columns are too few for a copy of the rows that meet them (`cpu_values.COPY_COLUMNS`): fewer than
    that many are cut smaller."""
    if not columns:
        return s
    return replace(s, column=min(s.column, 64 if columns < 128 else 1 << (columns - 1).bit_length()))


def _deep_tiles(s: TileSizes, depth: int) -> TileSizes:
    """A sum that is a little longer than a tile takes one all the same: the results are then read and written once."""
    return replace(s, inner=_whole(depth)) if s.inner < depth <= s.inner * 3 // 2 else s


def _whole(length: int) -> int:
    return -(-length // 32) * 32


LARGEST_TASK = 1 << 21
"""Products of a task that is not cut further: some 30 µs."""
SPLIT_TASK = LARGEST_TASK
"""Products of a task of few rows whose sum is long enough to be divided, which leaves rows whole: a row of 1,000 columns
and a sum of 8,000 took 1.5 times as long in halves of rows (AVX2, one thread and two, a trial)."""
THIN_COLUMNS = 4096
"""Rows of the other operand that lie one after another in memory come faster the longer they are."""
FEWEST_THIN_TASKS = 2
THIN_VOLUME = 1 << 20
"""The most elements of an operand's tile in a product with few rows or columns."""


def _thin_tiles(lengths: list[int], depth: int) -> TileSizes | None:
    """Tiles of a product with few rows or columns: memory is read in order and once, long rows of the other operand."""
    if not 0 < min(lengths) <= FEW_ROWS:
        return None
    short = lengths[0] <= FEW_ROWS
    row, column = (FEW_ROWS, THIN_COLUMNS) if short else (CPU_TILES.row // 2, FEW_ROWS)
    whole = -(-depth // CPU_TILES.inner) * CPU_TILES.inner
    inner = min(THIN_VOLUME // max(row, column), whole)
    return replace(CPU_TILES, row=row, column=column, inner=inner, volume=THIN_VOLUME)


def _wide_tiles(region: Region) -> TileSizes:
    """Twice as many columns share the copy of a row where sums are stored as they are, and so need no storage of their
    own beside it in the second cache."""
    plain = all(isinstance(v, Reduce) for v in region.values)
    return (
        replace(CPU_TILES, column=2 * CPU_TILES.column, volume=2 * CPU_TILES.volume) if plain else CPU_TILES
    )


def _row_tiles(graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int]) -> TileSizes:
    """A block takes several short rows, or a longer one in one piece where that is possible."""
    loops = (*roles.reduced, *roles.serial)
    if (
        not loops
        or roles.contraction_inside
        or roles.contraction_outside
        or not _along_rows(region, loops[-1])
    ):
        return CUDA_TILES
    size = axis_size(graph, loops[-1], sizes) or CUDA_TILES.line
    line = min(LONGEST_LINE, max(SHORTEST_LINE, 1 << (size - 1).bit_length()))
    lines = min(CUDA_TILES.lines, max(1, LINES_OF_A_BLOCK // line))
    return replace(CUDA_TILES, line=line, lines=lines, volume=LONGEST_LINE)


SHORTEST_LINE, LONGEST_LINE = 256, 32768
LINES_OF_A_BLOCK = 2048
"""Elements of a block's rows where it takes several. 16 are left to each of 128 threads: two rows of 1024 bf16 were 2 to 3%
faster than four, and 8% faster than one (softmax and rms norm on an H200)."""


def _along_rows(region: Region, axis: str) -> bool:
    """Is some tensor read along its last dimension by the axis itself?"""
    reads = (n for n in walk(region.values) if isinstance(n, Read) and n.indices)
    return any(isinstance(n.indices[-1], Index) and n.indices[-1].axes == {axis} for n in reads)


NARROW_ROWS = 128  # beyond, accumulators of 128 rows leave too few registers
WIDE_ROWS = 256  # beyond, those of 64 rows do


def _on_matrix_units(region: Region) -> bool:
    """Has a contraction of the region an operand stored as a 16-bit float?"""
    for r in reductions(region.values):
        split = contraction(r.body, frozenset(r.bound)) if r.fn == "sum" else None
        if split and any(isinstance(f, Read) and f.dtype in SIXTEEN for side in split for f in side):
            return True
    return False


TASKS = {"all": "together", "steps": "apart"}
"""What `skew` says of tasks."""


def pipeline_attributes(
    schedule: Schedule, program: TileProgram, facts: tuple[Node, ...]
) -> tuple[Attribute, ...]:
    """What a schedule states of copies and tasks of tier `wgmma`, and the scalars that are required to be positive, as
    attributes of the programs with products."""
    if schedule.tier not in MATRIX_TIERS or not has_product(program):
        return program.attributes
    found: list[Attribute] = []
    if schedule.tier == "wgmma":
        read = {p.name for p in program.params}
        found += [Attribute("slots", (("tensor", t), ("count", n))) for t, n in schedule.stages if t in read]
        found += [Attribute("unskewed")] if schedule.skew == "none" else []
        if schedule.skew in TASKS:
            found.append(Attribute("overlapping", (("tasks", TASKS[schedule.skew]),)))
        found += [Attribute("tasks", (("order", schedule.order),))] if schedule.order else []
    scalars = {s.name for s in program.scalars}
    required = {x.name for x in walk(facts) if isinstance(x, Scalar) and positive(x, facts)}
    found += [Positive(n).attribute() for n in sorted(scalars & required)]
    return (*program.attributes, *found)


@dataclass(frozen=True)
class Roles:
    """The structure that a plan is made from."""

    grid: tuple[str, ...]
    whole: tuple[str, ...]
    reduced: tuple[str, ...]
    serial: tuple[str, ...]
    tiled: tuple[str, ...]
    contraction_inside: bool
    contraction_outside: bool
    stacked: str | None = None
    """A grid axis of the first tiled axis' operand, which the other one lacks: matrices side by side."""


def axis_plan(
    graph: Graph,
    region: Region,
    schedule: Schedule,
    target: Target,
    sizes: Mapping[str, int],
    remarks: Remarks,
) -> AxisPlan:
    """The plan of one region: the schedule's tile sizes where it states them, the target's defaults elsewhere."""
    axes = tuple(dict.fromkeys(a for n in walk(region.values) for a in _named(n)))
    stated = {a: n for a in axes if (n := stated_tile(schedule, region, a, axes)) is not None}
    cut = {a for a, n in stated.items() if n < (axis_size(graph, a, sizes) or 0)}
    roles = axis_roles(graph, region, sizes, cut)
    chosen = {a: max(1, axis_size(graph, a, sizes) or 1) for a in roles.whole}
    product = product_tiles(graph, region, roles, schedule, stated)
    limits = region_tiles(graph, region, roles, schedule, target, sizes, product, remarks)
    default = _default_tiles(region, roles, limits)
    if not isinstance(target, CudaTarget) and schedule.tier != MATRIX_TIER and roles.contraction_outside:
        default |= _chained(graph, region, roles, sizes, limits.inner)
    free = {a: n for a, n in default.items() if a not in stated}
    fixed = {**{a: n or 1 for a, n in stated.items()}, **chosen}
    bounded = _bounded(free, fixed, region, limits.volume, _in_order(graph))
    tiles: list[tuple[str, int | None]] = []
    for axis in (*roles.grid, *roles.whole, *roles.reduced, *roles.serial):
        size = (stated[axis] or None) if axis in stated else bounded.get(axis)
        tiles.append((axis, chosen.get(axis, size)))
    _within_limits(schedule, region, dict(tiles), set(stated))
    shown = ", ".join(f"{a} by {n}" if n else f"{a} by 1" for a, n in tiles)
    remarks.add(
        "applied", "schedule", "tiles", f"{region.name}: grid {', '.join(roles.grid) or 'none'}; tiles {shown}",
        region.roots[0].span,
    )  # fmt: skip
    return AxisPlan(roles.grid, roles.whole, tuple(dict(tiles).items()), product)


def _named(n: Node) -> Iterable[str]:
    """Axes of a node, those that it binds included, in a fixed order."""
    return (*sorted(n.axes), *n.bound) if isinstance(n, Reduce) else sorted(n.axes)


def _within_limits(
    schedule: Schedule, region: Region, tiles: Mapping[str, int | None], stated: set[str]
) -> None:
    """Refuse stated sizes by which one value has more elements than any back end keeps. Raises `TileError`, E0609."""
    products = _products(region)
    for n in (n for n in walk(region.values) if n not in products):
        mine = [a for a in sorted(n.axes) if a in stated]
        size = math.prod(tiles.get(a) or 1 for a in n.axes)
        if mine and size > LARGEST_VALUE:
            product = " · ".join(f"{a} by {tiles[a]}" for a in sorted(n.axes) if tiles.get(a))
            spans = (schedule.spans.get(f"tile {a}") for a in mine)
            raise refuse(
                "E0609", f"`{region.name}` would compute {size} elements at once: {product}",
                next((s for s in spans if s is not None), None), help=f"at most {LARGEST_VALUE} are possible",
            )  # fmt: skip


def axis_roles(
    graph: Graph, region: Region, sizes: Mapping[str, int], cut: Collection[str] = frozenset()
) -> Roles:
    """The roles of a region's axes; `cut` axes are taken in tiles, never whole."""
    reds = reductions(region.values)
    bound = {a for r in reds for a in r.bound}
    root_axes = [frozenset(d.axes) for d in region.roots]
    everywhere = frozenset.intersection(*root_axes)
    inner = [r for r in reds if r.axes & bound]
    outer = [r for r in reds if not r.axes & bound]
    small = {
        a
        for a in graph.axes
        if (axis_size(graph, a, sizes) or 0) <= WHOLE_LIMIT and _static_able(graph, a) and a not in cut
    }
    lacking = _lacking(outer)
    whole = {a for r in inner for a in r.bound if a in small and not any(a in o.bound for o in outer)}
    whole |= {
        a
        for axes in root_axes
        for a in axes
        if a in small and a not in bound and (a in lacking or a not in everywhere)
    }
    order = _in_order(graph)
    # as the first root has them: its last axis lies densest in memory
    grid = tuple(a for a in region.roots[0].axes if a in everywhere and a not in bound and a not in whole)
    reduced = order(a for a in bound if a not in whole)
    serial = order(a for axes in root_axes for a in axes if a not in {*grid, *whole, *reduced})
    tiled, inside, outside = _tiled(region, outer, grid)
    stacked = _stacked(region, outer, grid, tiled) if len(tiled) == 2 else None
    return Roles(grid, order(whole), reduced, serial, tiled, inside, outside, stacked)


def _in_order(graph: Graph) -> Callable[[Iterable[str]], tuple[str, ...]]:
    """Axes in the graph's order: never in the order of a set, which differs between processes."""

    def order(axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(a for a in graph.axes if a in wanted)

    return order


def axis_size(graph: Graph, axis: str, sizes: Mapping[str, int]) -> int | None:
    """The extent of an axis where it is a literal or one extent of known size."""
    match graph.axes[axis]:
        case Const(value=v):
            return int(v)
        case Extent(name=n):
            return sizes.get(n)
    return None


def _static_able(graph: Graph, axis: str) -> bool:
    return isinstance(graph.axes[axis], Const | Extent)


def _lacking(outer: list[Reduce]) -> frozenset[str]:
    """Axes that one reduction over a set has and another over the same set lacks."""
    found: Axes = frozenset()
    for r in outer:
        for s in outer:
            if r.bound == s.bound:
                found |= r.axes - s.axes
    return found


def _tiled(region: Region, outer: list[Reduce], grid: tuple[str, ...]) -> tuple[tuple[str, ...], bool, bool]:
    """Grid axes to cut into tiles: the last private one of each operand of a contraction, else the last grid axis."""
    tiled: list[str] = []
    inside = outside = False
    for r in reductions(region.values):
        split = contraction(r.body, frozenset(r.bound)) if r.fn == "sum" else None
        if split is None:
            continue
        inside |= r not in outer
        outside |= r in outer
        a, b = (frozenset().union(*(f.axes for f in side)) for side in split)
        for mine, other in ((a, b), (b, a)):
            private = [x for x in grid if x in mine - other and not _in_index_arithmetic(region.values, x)]
            tiled += [x for x in private[-1:] if x not in tiled]
    tiled.sort(key=grid.index)  # rows before columns, in whichever order the text has the factors
    if not tiled and grid:
        tiled = [next((x for x in reversed(grid) if not _in_index_arithmetic(region.values, x)), grid[-1])]
    return tuple(tiled), inside, outside


def _stacked(
    region: Region, outer: list[Reduce], grid: tuple[str, ...], tiled: tuple[str, ...]
) -> str | None:
    """The last grid axis beside the first tiled one that its operand has and the other lacks, if it is a plain subscript."""
    for r in outer:
        split = contraction(r.body, frozenset(r.bound)) if r.fn == "sum" else None
        if split is None:
            continue
        a, b = (frozenset().union(*(f.axes for f in side)) for side in split)
        mine, other = (a, b) if tiled[0] in a else (b, a)
        found = [x for x in grid if x in mine - other and x not in tiled and _is_plain(region.values, x)]
        return found[-1] if found else None
    return None


def _is_plain(values: list[Node], axis: str) -> bool:
    """Does the axis stand in subscripts only as it is?"""
    indices = (i for n in walk(values) if isinstance(n, Read) for i in n.indices if axis in i.axes)
    return all(isinstance(i, Index) for i in indices)


def _in_index_arithmetic(values: list[Node], axis: str) -> bool:
    """Does the axis occur in a subscript through a division (a shared head, a page)? One index a task keeps that scalar."""
    return any(
        axis in x.axes and isinstance(x, Apply) and x.op in ("floordiv", "mod")
        for n in walk(values)
        if isinstance(n, Read)
        for i in n.indices
        for x in walk([i])
    )


def _default_tiles(region: Region, roles: Roles, s: TileSizes) -> dict[str, int | None]:
    out: dict[str, int | None] = dict.fromkeys(roles.grid)
    loops = (*roles.reduced, *roles.serial)
    if roles.contraction_inside:
        out.update(dict.fromkeys(roles.tiled, s.query))
        out.update(dict.fromkeys(loops, s.key))
    elif roles.contraction_outside:
        out.update(zip(roles.tiled, [s.row] + [s.column] * len(roles.tiled), strict=False))
        out.update(dict.fromkeys(loops, s.inner))
        if roles.stacked is not None:
            out[roles.stacked] = s.stack
    elif loops:
        out.update(dict.fromkeys(roles.tiled, s.lines if s.lines > 1 else None))
        out.update(dict.fromkeys(loops, s.line))
        # of several axes reduced together, or written together, only the last is a line
        sets = [r.bound for r in reductions(region.values)]
        sets += [tuple(a for a in d.axes if a in roles.serial or a in roles.reduced) for d in region.roots]
        out.update({a: None for axes in sets for a in axes[:-1]})
    else:
        out.update(dict.fromkeys(roles.tiled, s.flat))
    return out


def _chained(
    graph: Graph, region: Region, roles: Roles, sizes: Mapping[str, int], inner: int
) -> dict[str, int | None]:
    """Tiles of axes that a contraction sums over together: those of the last one follow one another up to `inner` steps."""
    out: dict[str, int | None] = {}
    for r in reductions(region.values):
        axes = [a for a in r.bound if a in roles.reduced]
        if r.fn != "sum" or len(axes) < 2 or contraction(r.body, frozenset(r.bound)) is None:
            continue
        length = axis_size(graph, axes[-1], sizes)
        if not length:
            continue
        out.update(dict.fromkeys(axes))
        out[axes[-1]] = last = min(inner, 1 << (length - 1).bit_length())
        count = axis_size(graph, axes[-2], sizes) or 1
        passes = -(-count // max(1, inner // last))
        out[axes[-2]] = -(-count // passes) if passes < count else None
    return out


def _products(region: Region) -> set[Node]:
    """What contractions sum: never a value of its own."""
    sums = (r for r in reductions(region.values) if r.fn == "sum")
    return {r.body for r in sums if contraction(r.body, frozenset(r.bound))}


def _bounded(
    tiles: dict[str, int | None],
    fixed: Mapping[str, int],
    region: Region,
    volume: int,
    order: Callable[[Iterable[str]], tuple[str, ...]],
) -> dict[str, int | None]:
    """Halve the greatest of `tiles` until no value of the region fills more than `volume` elements; `fixed` sizes stay."""
    products = _products(region)
    for axes in dict.fromkeys(order(n.axes) for n in walk(region.values) if n not in products):
        while True:
            sizes = {a: tiles.get(a) or fixed.get(a, 1) for a in axes}
            largest = max((a for a in axes if (tiles.get(a) or 1) > 1), key=sizes.__getitem__, default=None)
            if math.prod(sizes.values()) <= volume or largest is None:
                break
            tiles[largest] = sizes[largest] // 2 if sizes[largest] > 2 else None
    return tiles
