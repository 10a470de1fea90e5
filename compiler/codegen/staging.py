"""What the tier `wgmma` brings to shared memory, and how: boxes of the copy engine, rings of them, and where all lies.

A tile that products read is one box for each 64 of its columns: all its rows, 128 bytes each, swizzled. The last box has no
more columns than the tile, for the copy engine takes longer where a box ends outside its tensor; what products read beyond
them, up to a whole step of 16, is cleared once, when the kernel starts. Boxes that one
product (or several that share an operand) reads at a step of a loop form a ring: so many slots, each with a barrier that
says "full" and one that says "empty". Tiles read before a loop form rings of two slots where there is room, so that those
of a block's next task come while it computes, else of one. A loop that goes on where another of the same axis ended reads
through the same rings.

A tile that a step reads element by element, as a bias, has a ring of its own. Each warpgroup reads its own rows of it, so
these come and go by themselves: a slot has a pair of barriers for each warpgroup. What is read is in registers at once, and
a whole step passes until the next tile is wanted: one slot is enough.

Results have memory of their own on their way out, where there is room for it and for two slots of tiles read before a loop.
Else they leave through the slot of such a tile, of which each warpgroup has read its own rows by then.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Slots, find_all
from ..target import CudaTarget
from ..tile_ir import (
    AxisIndex,
    Cast,
    Dot,
    Expr,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    Name,
    Stmt,
    TileProgram,
    expressions,
    operands,
    statements,
    subexpressions,
)
from .mma import Unfit
from .tile_types import tile_axes

CHUNK = 64  # columns of one box: 128 bytes
ROW_BYTES = 128
ELEMENT_BYTES = 2
STEP = 16  # of the contracted axis, one instruction
EIGHT = 8  # elements, 16 bytes: what boxes are multiples of
LARGEST_BOX = 256  # rows of one box
MOST_RANKS = 5
MOST_STAGES, LEAST_STAGES = 16, 2
BARRIER_BYTES = 8
ALIGNMENT = 1024  # of a box: the swizzle repeats every 8 rows
OUTPUT_BYTES = 64 * ROW_BYTES  # of a warpgroup's chunk of a result on its way out
PART_ROWS = 64  # of a tile that is read element by element: those of one warpgroup
READ = "read "
"""Names that begin so are tiles that a step reads element by element (`warpgroup_reads.with_named_reads`)."""


@dataclass(frozen=True)
class Box:
    """A tile as the copy engine moves it: `sizes` of one box, outermost first, so many `chunks` of 64 columns, of which
    the last has `last` that are brought. `cleared`: are 8 more read as zeros?"""

    load: Load
    row: str
    column: str
    rows: int
    columns: int
    sizes: tuple[int, ...]
    last: int = CHUNK
    cleared: bool = False

    @property
    def chunks(self) -> int:
        return -(-self.columns // CHUNK)

    @property
    def chunk_bytes(self) -> int:
        return self.rows * ROW_BYTES

    @property
    def bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    def sizes_of(self, chunk: int) -> tuple[int, ...]:
        """Of one of its boxes."""
        return (*self.sizes[:-1], self.last if chunk == self.chunks - 1 else CHUNK)

    @property
    def moved_bytes(self) -> int:
        """Less than its place has where rows or columns are few."""
        return sum(math.prod(self.sizes_of(i)) for i in range(self.chunks)) * ELEMENT_BYTES


@dataclass(frozen=True)
class Ring:
    """Boxes that arrive together. `start` is where its slots lie, `barriers` where its pairs of barriers do, in bytes.
    `fixed`: a schedule states `stages`. `parts`: warpgroups whose rows come by themselves, 0 where all rows come at once."""

    boxes: tuple[Box, ...]
    looped: bool
    stages: int = 1
    start: int = 0
    barriers: int = 0
    fixed: bool = False
    parts: int = 0

    @property
    def pairs(self) -> int:
        """Of barriers."""
        return self.stages * max(self.parts, 1)

    @property
    def slot_bytes(self) -> int:
        return sum(b.bytes for b in self.boxes)

    @property
    def moved_bytes(self) -> int:
        """Of what arrives at one barrier."""
        return sum(b.moved_bytes for b in self.boxes)

    @property
    def name(self) -> str:
        return "_".join(dict.fromkeys(b.load.tensor for b in self.boxes))

    def offset(self, box: Box) -> int:
        """Where a box lies in its slot."""
        before = self.boxes[: self.boxes.index(box)]
        return sum(b.bytes for b in before)


@dataclass(frozen=True)
class Staging:
    """`output` is where results wait to be stored, so many chunks of each warpgroup; `names` says which tile of the
    program is which box."""

    rings: tuple[Ring, ...]
    names: dict[str, Load]
    output: int
    output_chunks: int
    bytes: int
    through: Ring | None = None
    """The ring through whose slots results leave, if they have no memory of their own."""

    def ring(self, load: Load) -> Ring:
        return next(r for r in self.rings if any(b.load == load for b in r.boxes))

    def box(self, load: Load) -> Box:
        return next(b for r in self.rings for b in r.boxes if b.load == load)


@dataclass(frozen=True)
class Output:
    """Results on their way out: so many chunks of each warpgroup. `row`: the axis of their rows, "" where results of a task
    are stored before all its tiles have been read, or rows are not the same for all."""

    warpgroups: int
    chunks: int
    row: str = ""

    def bytes(self, chunks: int) -> int:
        """Of shared memory, so many chunks at once."""
        return self.warpgroups * chunks * OUTPUT_BYTES

    @property
    def fewest(self) -> int:
        """One chunk is filled while the other leaves."""
        return min(self.chunks, 2)


def staging(
    program: TileProgram, tiles: dict[str, int], target: CudaTarget, output: Output, tasks_in_turn: bool,
    at_most: Mapping[str, int],
) -> Staging:  # fmt: skip
    """The staged tiles of a program and their places. `tasks_in_turn`: does a block take one task after another? `at_most`:
    what extents are taken not to exceed; rows beyond are not brought, for the copy engine takes longer over rows outside a
    tensor than over others. Raises `Unfit`."""
    names = _operand_tiles(program)
    looped = {
        s.name
        for f in statements(program.body)
        if isinstance(f, For)
        for s in statements(f.body)
        if isinstance(s, Let)
    }
    groups = _grouped(program, names)
    deep = {a for s in statements(program.body) for e in expressions(s) for d in dots(e) for a in d.over}
    rings = []
    for group in groups:
        again = any(n in looped for n, x in names.items() if x in group)
        rings.append(Ring(tuple(box(x, program, tiles, at_most, deep, again) for x in group), again))
    rings += [
        _read_ring(x, program, tiles, output.warpgroups) for x in dict.fromkeys(read_tiles(program).values())
    ]
    names |= read_tiles(program)
    wanted = {x.tensor: x.count for x in find_all(program.attributes, Slots)}
    ordered = [stated(r, wanted) for r in sorted(rings, key=lambda r: r.looped)]
    room = target.shared_per_block_bytes - ALIGNMENT
    slotted, through = _slotted(ordered, target, output, tasks_in_turn)
    if through is not None:
        placed = _placed(slotted, names, output, 0)
        return replace(
            placed, output_chunks=through.boxes[0].chunks, through=placed.ring(through.boxes[0].load)
        )
    left = room - sum(r.stages * r.slot_bytes for r in slotted)
    chunks = output.chunks if output.bytes(output.chunks) <= left else output.fewest
    return _placed(slotted, names, output, chunks)


def _slotted(
    rings: list[Ring], target: CudaTarget, output: Output, tasks_in_turn: bool
) -> tuple[list[Ring], Ring | None]:
    """Rings with slots, and the one through which results leave, if they do. Raises `Unfit`."""
    apart, why = None, None
    try:
        apart = _with_slots(rings, target, output.bytes(output.fewest), tasks_in_turn)
    except Unfit as reason:
        why = reason
    through = next((i for i, r in enumerate(rings) if _can_leave_through(r, output)), None)
    if through is not None and (apart is None or (tasks_in_turn and apart[through].stages == 1)):
        try:
            found = _with_slots(rings, target, 0, tasks_in_turn)
        except Unfit:
            found = None
        if found is not None and (apart is None or found[through].stages > 1):
            return found, found[through]
    if apart is None:
        assert why is not None
        raise why
    return apart, None


def _can_leave_through(r: Ring, output: Output) -> bool:
    """Has a ring a slot of a tile read before a loop, whose rows are those of results and no fewer columns?"""
    (box, *others) = r.boxes
    rows = box.row == output.row and box.rows == PART_ROWS * output.warpgroups
    return not (r.looped or others) and rows and 0 < output.chunks <= box.chunks


def stated(r: Ring, wanted: Mapping[str, int]) -> Ring:
    """A ring with the slots that a schedule states for its tensors, if it does. Raises `Unfit`."""
    counts = {wanted[b.load.tensor] for b in r.boxes if b.load.tensor in wanted}
    if len(counts) > 1:
        raise Unfit(
            f"`{'`, `'.join(b.load.tensor for b in r.boxes)}` come through one ring; it has one number of slots"
        )
    if r.looped and not r.parts and counts and min(counts) < LEAST_STAGES:
        raise Unfit(
            f"`{r.boxes[0].load.tensor}` comes anew in each step of a loop; that takes {LEAST_STAGES} slots"
        )
    return replace(r, stages=counts.pop(), fixed=True) if counts else r


def _operand_tiles(program: TileProgram) -> dict[str, Load]:
    """Named tiles that come from memory for products alone."""
    loaded = {
        s.name: s.value for s in statements(program.body) if isinstance(s, Let) and isinstance(s.value, Load)
    }
    multiplied, others = set[str](), set[str]()
    for e in (e for s in statements(program.body) for e in expressions(s)):
        multiplied |= {x.name for d in dots(e) for x in (d.a, d.b) if isinstance(x, Name)}
        others |= {x.name for x in _outside_operands(e)}
    both = multiplied & others & set(loaded)
    if both:
        raise Unfit(f"`{min(both)}` is an operand of a product and read elsewhere too")
    return {n: x for n, x in loaded.items() if n in multiplied}


def read_tiles(program: TileProgram) -> dict[str, Load]:
    """Named tiles that steps of loops read element by element."""
    return {
        s.name: s.value
        for s in statements(program.body)
        if isinstance(s, Let) and isinstance(s.value, Load) and s.name.startswith(READ)
    }


def _read_ring(load: Load, program: TileProgram, tiles: dict[str, int], warpgroups: int) -> Ring:
    """Of boxes with the rows of one warpgroup each."""
    whole = box(load, program, tiles, {})
    sizes = tuple(PART_ROWS if n == whole.rows else n for n in whole.sizes[:-1])
    return Ring((replace(whole, sizes=(*sizes, CHUNK), last=CHUNK),), looped=True, parts=warpgroups)


def dots(e: Expr) -> list[Dot]:
    return [x for x in subexpressions(e) if isinstance(x, Dot)]


def _outside_operands(e: Expr) -> Iterator[Name]:
    """Names that an expression reads elsewhere than as a product's operand."""
    stack = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Name):
            yield x
        elif isinstance(x, Dot):
            stack += [y for y in (x.a, x.b) if not isinstance(y, Name)]
        else:
            stack += operands(x)


def _grouped(program: TileProgram, names: dict[str, Load]) -> list[list[Load]]:
    """Loads of one loop (or of none) that a product reads together, or products that share one."""
    groups: list[list[Load]] = []
    for body in _bodies(program.body):
        own = {s.name for s in body if isinstance(s, Let) and s.name in names}
        for e in (e for s in body for e in expressions(s)):
            for d in dots(e):
                read = [names[x.name] for x in (d.a, d.b) if isinstance(x, Name) and x.name in own]
                _join(groups, read)
    for load in names.values():
        _join(groups, [load])
    return groups


def _bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """The statements of each scope, a loop's with the loop itself, whose yields are evaluated there."""
    yield body
    for s in statements(body):
        if isinstance(s, For):
            yield (*s.body, s)
        elif isinstance(s, Grid):
            yield s.body


def _join(groups: list[list[Load]], loads: list[Load]) -> None:
    if not loads:
        return
    met = [g for g in groups if any(x in g for x in loads)]
    merged = list(dict.fromkeys([*(x for g in met for x in g), *loads]))
    groups[:] = [g for g in groups if g not in met] + [merged]


def box(
    load: Load,
    program: TileProgram,
    tiles: dict[str, int],
    at_most: Mapping[str, int],
    deep: Collection[str] = (),
    alone: bool = False,
) -> Box:
    """The box of a tile, with whole steps of rows along axes that products contract (`deep`). `alone`: nothing else is ever
    written to its place, so what is cleared there stays. Raises `Unfit` where the copy engine cannot bring it."""
    param, subscripts = program.param(load.tensor), load.subscripts
    spanned = [(i, x.axis) for i, x in enumerate(subscripts) if isinstance(x, AxisIndex) and x.axis in tiles]
    named = [
        a
        for x in subscripts
        for y in subexpressions(x)
        if isinstance(y, AxisIndex)
        for a in [y.axis]
        if a in tiles
    ]
    what = f"the tile of `{load.tensor}`"
    if param.dtype not in (DType.F16, DType.BF16):
        raise Unfit(f"{what} holds {param.dtype}, not f16 or bf16")
    if len(spanned) != 2 or len(named) != 2 or spanned[-1][0] != len(subscripts) - 1:
        raise Unfit(f"{what} is no block of rows and columns")
    if len(subscripts) > MOST_RANKS:
        raise Unfit(
            f"`{load.tensor}` has {len(subscripts)} dimensions; the copy engine takes up to {MOST_RANKS}"
        )
    if any(isinstance(y, Load) for x in subscripts for y in subexpressions(x)):
        raise Unfit(f"where {what} lies depends on a tensor")
    (row_at, row), (_, column) = spanned
    rows = -(-tiles[row] // STEP) * STEP if row in deep else tiles[row]
    if rows > LARGEST_BOX:
        raise Unfit(f"{what} has {rows} rows; a box holds {LARGEST_BOX}")
    extent = tile_axes(program, dict(program.statics))[row].extent
    exist = at_most.get(extent.name, rows) if isinstance(extent, ExtentRef) else rows
    sizes = tuple(min(rows, exist) if i == row_at else 1 for i in range(len(subscripts) - 1))
    left = tiles[column] - (tiles[column] - 1) // CHUNK * CHUNK
    brought, steps = -(-left // EIGHT) * EIGHT, -(-left // STEP) * STEP
    cleared = alone and column in deep and brought < steps
    last = brought if cleared or column not in deep else steps
    return Box(load, row, column, rows, tiles[column], (*sizes, CHUNK), last, cleared)


def _with_slots(rings: list[Ring], target: CudaTarget, output_bytes: int, tasks_in_turn: bool) -> list[Ring]:
    """Two slots for each ring of a loop, one for those that are read element by element; then a second one for rings before
    a loop, where a block has a next task; then as many as fit for the other rings of loops, the same number for each."""
    for b in (b for r in rings for b in r.boxes if b.chunk_bytes % ALIGNMENT):
        raise Unfit(f"the tile of `{b.load.tensor}` has {b.rows} rows; boxes have multiples of 8")
    fixed = sum(r.stages * r.slot_bytes for r in rings if r.fixed or r.parts) + output_bytes
    before = sum(r.slot_bytes for r in rings if not r.looped and not r.fixed)
    step = sum(r.slot_bytes for r in rings if r.looped and not r.fixed and not r.parts)
    room = target.shared_per_block_bytes - fixed - ALIGNMENT
    if before + LEAST_STAGES * step > room:
        raise Unfit(
            f"its rings need {LEAST_STAGES * step + before + fixed + ALIGNMENT} bytes of shared memory with "
            f"{LEAST_STAGES} slots each where none are stated; {target.name} has {target.shared_per_block_bytes}"
        )
    early = 2 if tasks_in_turn and 2 * before + LEAST_STAGES * step <= room else 1
    stages = min(MOST_STAGES, (room - early * before) // step) if step else 1
    return [r if r.fixed or r.parts else replace(r, stages=stages if r.looped else early) for r in rings]


def _placed(rings: list[Ring], names: dict[str, Load], output: Output, chunks: int) -> Staging:
    """Slots one after another, then results on their way out, then barriers."""
    start, placed = 0, []
    for r in rings:
        placed.append(replace(r, start=start))
        start += r.stages * r.slot_bytes
    leaving, start = start, start + output.bytes(chunks)
    final = []
    for r in placed:
        final.append(replace(r, barriers=start))
        start += 2 * BARRIER_BYTES * r.pairs
    return Staging(tuple(final), names, leaving, chunks, start)


def computed(e: Expr) -> Expr:
    """An operand without the cast around it."""
    return e.arg if isinstance(e, Cast) else e
