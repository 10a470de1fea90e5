"""Tier `wgmma`: products of 16-bit floats on the matrix units of sm_90a, by warpgroups with roles (design: one lowering).

One warpgroup loads: it asks the copy engine for tiles and waits for empty slots of rings (`roles.py`, `staging.py`). The
others compute, 64 rows of a tile each: their sums lie in registers as `deal.WarpgroupDeal` says, so everything elementwise,
reductions along rows and epilogues are those of the simt tier. A product takes one operand from shared memory and the other,
which has the result's rows, from there or from the registers in which another product left it, rounded. Products run
asynchronously: each is a group, and what touches its sums or its operands waits for it first. Results of 16 bits go to
memory through shared memory and the copy engine, which leaves out what lies beyond the tensor.

What this tier does not take it refuses with the reason, `Unfit`; the program then stays with another tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace

from ...dsl.diagnostics import TileError
from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Slots, Unskewed, find, find_all
from ..occupancy import spilled
from ..schedule import Skew, TaskOrder
from ..target import CudaTarget
from ..tile_ir import (
    AxisIndex,
    Dot,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    Reduce,
    Stmt,
    TileProgram,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from . import mma
from .bounded_scores import with_bounded_scores
from .falling_tanh import with_falling_tanh
from .lazy_maximum import with_lazy_maxima
from .mma import Unfit
from .near_functions import with_near_functions
from .remembered import remembered
from .resources import measured
from .roles import MODULES, REGISTERS, ROWS, Loader
from .simt import Kernel
from .simt_elements import Wide
from .simt_source import plain
from .staging import BARRIER_BYTES, EIGHT, OUTPUT_BYTES, ROW_BYTES
from .streams import facts_of, only_adds_products, tile_multiples
from .tile_types import contexts, is_product, tile_axes
from .warpgroup_affine import exact_extents
from .warpgroup_form import prepared, without_sure_steps
from .warpgroup_loops import TURNS
from .warpgroup_reads import read_tensors, with_named_reads
from .warpgroup_results import WARPS, Results
from .warpgroup_softcaps import SERIES, STEPS_WITHOUT_ASKING

THREADS = 128  # of a warpgroup
TOLD_OF_TASKS = "a task's last products run with the next task's first, and its results are made meanwhile"
COLUMNS = 2  # side by side in one thread (PTX ISA 9.7.15.5.1, registers of wgmma)
ORDERS: dict[TaskOrder, str] = {
    "balanced": "one block a multiprocessor takes tasks, the longest first, in rounds forwards and backwards over blocks",
    "longest": "a block for each task, the longest first",
    "turns": "one block a multiprocessor takes tasks in turn, those that share tiles together",
}


@remembered
def variants(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """The kernels of a program, the preferred first: whole tiles, ragged ones, and those of tier `mma`, which serve tensors
    that the copy engine cannot address. Raises `Unfit`."""
    if not target.has_wgmma:
        raise Unfit(f"{target.name} has no wgmma; it is sm_90a's")
    ready = prepared(program)
    warpgroups = _warpgroups(ready)
    ready = with_lazy_maxima(with_falling_tanh(_bounded(ready, warpgroups)))
    made: list[WarpgroupKernel] = []
    whole, exact = tuple(tile_multiples(ready).items()), exact_extents(ready)
    ragged, even = Wide(exact=exact), Wide(COLUMNS, whole, exact=exact)
    boxed, _ = with_reads(ready, target)
    plain = without_sure_steps(
        ready
    )  # threads that look at each index by itself have no registers for two kinds of steps
    ways = [(plain, ragged, ""), (ready, even, "whole")]
    if boxed is not ready:
        ways = [(plain, ragged, "apart"), (without_sure_steps(boxed), ragged, ""), (boxed, even, "whole")]
    for own, wide, suffix in ways:
        found = WarpgroupKernel(own, target, wide, suffix, warpgroups)
        if not made or found.unnamed() != made[0].unnamed():
            made.insert(0, found)
    few = [
        WarpgroupKernel(ready, target, Wide(at_most=((extent, n),)), f"few{n}", warpgroups)
        for extent in _rows_that_may_lack(ready, warpgroups)
        for n in FEW_ROWS
    ]
    return [*few, *made, *_fallback(without_sure_steps(program), target)]


FEW_ROWS = (8, 16, 32)
"""Most rows of a result for which a variant brings no more rows of the first operand than these."""


def _rows_that_may_lack(program: TileProgram, warpgroups: int) -> list[str]:
    """The extent of the rows of one warpgroup's sums of products, of which those that do not exist may hold anything,
    because nothing is computed across rows; none where rows are many, or are the columns of their operand's boxes."""
    loops = [s for s in statements(program.body) if isinstance(s, For)]
    rows = {c.type.axes[:1] for s in loops for c in s.carries}
    if warpgroups > 1 or len(rows) != 1 or not all(map(only_adds_products, loops)):
        return []
    row = rows.pop()[0]
    every = [x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e)]
    across = any(isinstance(x, Reduce) and row in x.over for x in every)
    dense = any(isinstance(x, Load) and x.subscripts[-1:] == (AxisIndex(row),) for x in every)
    extent = tile_axes(program, dict(program.statics))[row].extent
    is_open = isinstance(extent, ExtentRef) and extent.name not in dict(program.statics)
    return [extent.name] if isinstance(extent, ExtentRef) and is_open and not across and not dense else []


@dataclass(frozen=True)
class Choices:
    """How a program runs in this tier: warpgroups that compute, slots of each ring by its tensors, the tensor through whose
    slots results leave ("" where they have memory of their own), how blocks take tasks, whether it has loops that compute
    between products, whether steps and tasks overlap there, whether maxima stay where they are while that is not much
    (`lazy_maximum`), whether there are none, because tanh bounds scores (`bounded_scores`), and tensors of which threads
    read tiles by themselves, each with the reason."""

    warpgroups: int
    rings: tuple[tuple[tuple[str, ...], int], ...]
    through: str
    order: TaskOrder
    cascades: bool
    skewed: bool
    overlapped: bool
    lazy: bool
    bounded: bool
    apart: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def skew(self) -> Skew:
        """As a schedule says it."""
        return ("all" if self.overlapped else "steps") if self.skewed else "none"

    def stages(self) -> tuple[tuple[str, int], ...]:
        """Of each tensor's ring."""
        return tuple((t, n) for tensors, n in self.rings for t in tensors)

    def told(self) -> str:
        rings = ", ".join(f"{' and '.join(tensors)} by {n}" for tensors, n in self.rings)
        steps = (
            "a step's first products start with the last step's second ones"
            if self.skewed
            else ("a step's products end before the next step's start")
        )
        return (
            f"1 warpgroup loads and {self.warpgroups} compute, 64 rows each; slots of shared memory: {rings}; "
            f"{f'results leave through the slots of `{self.through}`; ' if self.through else ''}"
            f"{f'{steps}; ' if self.cascades else ''}"
            f"{f'{TOLD_OF_TASKS}; ' if self.overlapped else ''}"
            f"{''.join(f'threads read `{t}` by themselves ({why}); ' for t, why in self.apart)}"
            f"{'a maximum moves when it is exceeded by more than 2^8; ' if self.lazy else ''}"
            f"{_told_of_softcaps() if self.bounded else ''}{ORDERS[self.order]}"
        )


def choices(program: TileProgram, target: CudaTarget) -> Choices:
    """What is stated by a program's attributes, and what is chosen where they say nothing. Raises `Unfit`."""
    ready, apart = with_reads(prepared(program), target)
    loader = Loader(ready, target, Wide(1, ()), "", _warpgroups(ready))
    rings = tuple(
        (tuple(dict.fromkeys(b.load.tensor for b in r.boxes)), r.stages) for r in loader.staging.rings
    )
    loops = [s for s in statements(ready.body) if isinstance(s, For)]
    cascades = any(
        not all(isinstance(x, Let) and x.name in loader.staging.names for x in s.body) for s in loops
    )
    skewed = cascades and find(program.attributes, Unskewed) is None
    near = prepared(with_near_functions(program))
    bounded = _bounded(near, loader.warpgroups) is not near
    lazy = not bounded and with_lazy_maxima(ready) is not ready
    through = loader.staging.through
    return Choices(
        loader.warpgroups,
        rings,
        through.name if through else "",
        loader.order(),
        cascades,
        skewed,
        skewed and _overlap(with_near_functions(program), target),
        lazy,
        bounded,
        tuple(apart.items()),
    )


def _overlap(program: TileProgram, target: CudaTarget) -> bool:
    """Do a task's last products run with the next one's first?"""
    preferred = variants(program, target)[0]
    return isinstance(preferred, WarpgroupKernel) and preferred.overlap is not None


def _bounded(program: TileProgram, warpgroups: int) -> TileProgram:
    """Without maxima of scores that tanh bounds. Three warpgroups keep them: their registers did not hold a row's squares,
    which polynomials once took, and none have been tried there since."""
    return with_bounded_scores(program) if warpgroups < max(REGISTERS) else program


def _told_of_softcaps() -> str:
    *shorter, longest = (f"{s.bound:g}" for s in SERIES)
    bounds = f"{', '.join(shorter)} or {longest}"
    return (
        f"no maximum, because tanh bounds scores, and a polynomial where all that a warp has of a row lies below {bounds} "
        f"of the cap before it (where some of it does not, the warp asks again after {STEPS_WITHOUT_ASKING} steps); "
    )


def _fallback(program: TileProgram, target: CudaTarget) -> list[Kernel]:
    """What serves strides and alignments of any kind, under a name of its own: threads of tier `mma`, with shorter steps,
    then fewer rows, where these are too few for the registers that the program's tiles take. Rows come last, for fewer of
    them ask for more of what each step reads, element by element (`docs/hopper.md`)."""
    found: Kernel | None = None
    for smaller in (x for tiles in _smaller(program, LEAST_TILE) for x in _shorter(tiles)):
        try:
            made = mma.of_any_strides(replace(smaller, tier="mma"), target)
        except (Unfit, TileError):
            continue
        fits = spilled(measured(made), target) == 0
        found = made if fits or found is None else found
        if fits:
            break
    found = found or _without_products(program, target)
    if found.name == plain(program.name):  # it serves all sizes itself, so nothing told it from others
        found = type(found)(found.program, target, found.wide, "any")
    return [found]


def _shorter(program: TileProgram) -> Iterator[TileProgram]:
    """The program, then with the tiles of its loops halved, down to LEAST_TILE. Bounds stay, for what is a multiple of a
    tile is one of its half."""

    def halved(s: Stmt) -> Stmt:
        if not isinstance(s, Grid | For):
            return s
        body = tuple(map(halved, s.body))
        if isinstance(s, Grid):
            return replace(s, body=body)
        size = s.axis.tile or 0
        shorter = size >= 2 * LEAST_TILE and size % 2 == 0
        return replace(s, body=body, axis=replace(s.axis, tile=size // 2) if shorter else s.axis)

    steps: list[int | None] = []
    while steps != (now := [s.axis.tile for s in statements(program.body) if isinstance(s, For)]):
        yield program
        steps, program = now, replace(program, body=tuple(map(halved, program.body)))


LEAST_TILE = 32
"""Rows, columns or steps that are not divided for want of registers."""
LEAST_TILE_OF_THREADS = 8
"""Of tier `simt`, where columns that are no power of two, as 136, leave a thread many values of each row."""


def _without_products(program: TileProgram, target: CudaTarget) -> Kernel:
    """A kernel of tier `simt`, with the largest tiles that its threads can hold. Raises `TileError` where
    they can hold none."""
    from . import simt

    refused: TileError | None = None
    for smaller in _smaller(program, LEAST_TILE_OF_THREADS):
        try:
            return simt.variants(replace(smaller, tier="simt"), target)[-1]
        except TileError as reason:
            refused = refused or reason
    assert refused is not None
    raise refused


def _smaller(program: TileProgram, least: int) -> Iterator[TileProgram]:
    """The program, then with its parallel loop's tiles down to powers of two, then with the largest halved, and again."""
    yield program
    (grid,) = (s for s in program.body if isinstance(s, Grid))
    axes = [replace(a, tile=1 << a.tile.bit_length() - 1) if a.tile else a for a in grid.axes]
    while True:
        yield replace(
            program, body=tuple(replace(s, axes=tuple(axes)) if s is grid else s for s in program.body)
        )
        largest = max(range(len(axes)), key=lambda i: axes[i].tile or 0)
        tile = axes[largest].tile or 0
        if tile <= least:
            return
        axes[largest] = replace(axes[largest], tile=tile // 2)


def why_not(program: TileProgram, target: CudaTarget) -> str | None:
    """Why a program has no code in this tier; None where it has."""
    try:
        variants(program, target)
    except Unfit as reason:
        return str(reason)
    except TileError as reason:
        return reason.diagnostics[0].message
    return None


def with_reads(program: TileProgram, target: CudaTarget) -> tuple[TileProgram, dict[str, str]]:
    """The same program with tiles that it reads element by element through the copy engine, where that and shared memory
    can have them; and why threads read a tensor by themselves. Raises `Unfit`."""
    named, apart = with_named_reads(program, min(_rows(program)))
    tensors = read_tensors(named)
    if not tensors:
        return program, apart
    try:
        Loader(named, target, Wide(1, ()), "", _warpgroups(program))
    except Unfit as reason:
        if {x.tensor for x in find_all(program.attributes, Slots)} & tensors:
            raise
        return program, {**apart, **dict.fromkeys(sorted(tensors), str(reason))}
    return named, apart


def _warpgroups(program: TileProgram) -> int:
    """How many warpgroups divide the rows of every product: 64 rows each. Raises `Unfit`."""
    rows = _rows(program)
    sizes = sorted(set(rows.values()))
    if len(rows) > 1 or sizes[0] not in (ROWS, 2 * ROWS, 3 * ROWS):
        told = ", ".join(f"`{a}` by {n}" for a, n in rows.items())
        raise Unfit(
            f"the rows of its products are {told}; one axis by {ROWS}, {2 * ROWS} or {3 * ROWS} is what it takes"
        )
    return sizes[0] // ROWS


def _rows(program: TileProgram) -> dict[str, int]:
    """The axes of the rows of products, with their tiles. Raises `Unfit`."""
    if not any(isinstance(s, Grid) for s in program.body):
        raise Unfit("it has no parallel loop")
    tiles = {a: x.tile or 1 for a, x in tile_axes(program, dict(program.statics)).items()}
    facts = facts_of(program, tiles)
    rows: dict[str, int] = {}
    for c in contexts(program, facts):
        for d in (x for x in subexpressions(c.expr) if isinstance(x, Dot)) if c.expr is not None else ():
            a, b = facts.type_of(d.a, c.types), facts.type_of(d.b, c.types)
            if is_product(d, a, b):
                _check_types(d, a, b)
                row = facts.type_of(d, c.types).axes[0]
                rows[row] = tiles[row]
    if not rows:
        raise Unfit("it has no product")
    return rows


def _check_types(d: Dot, a: TileType, b: TileType) -> None:
    if a.dtype is not b.dtype or a.dtype not in (DType.F16, DType.BF16):
        raise Unfit(f"a product of {a.dtype} and {b.dtype}; the matrix units take two of f16 or two of bf16")
    if len(a.axes) != 2 or len(b.axes) != 2 or len(d.over) != 1:
        raise Unfit("a product over several axes, or of tiles with more than two")


class WarpgroupKernel(Results):
    """The computing role, and the whole kernel around both."""

    def __init__(
        self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str, warpgroups: int
    ) -> None:
        super().__init__(program, target, wide, suffix, warpgroups)
        loader = Loader(program, target, wide, suffix, warpgroups)
        self.loading = loader.text.out
        self.wide_tensors = dict.fromkeys(
            [*(b.load.tensor for b, _ in self.maps), *self.output_maps, *self.wide_tensors]
        )

    def unnamed(self) -> list[str]:
        """What it computes, without its own name."""
        return [x.replace(f"{self.name}_", "") for x in self.text.out]

    # ------------------------------------------------------------ the function

    def launch(self) -> str:
        """The entry of `LAUNCHES`: what every kernel states, one block a multiprocessor, and the tensor maps."""
        told = f', "program": {self.program.name!r}' if self.name != self.program.name else ""
        if at_most := {**dict(self.wide.exact), **dict(self.wide.at_most)}:
            told += f', "at_most": {at_most!r}'
        if self.wide.multiples:
            told += f', "multiples": {dict(self.wide.multiples)!r}'
        maps = [(b.load.tensor, sizes) for b, sizes in self.maps] + [
            (t, self.output_sizes[t]) for t in self.output_maps
        ]
        told += f', "wide": {list(self.wide_tensors)!r}, "maps": {maps!r}, "secondary": True'
        if (
            self.order() != "longest"
        ):  # else the device gives the next task to the multiprocessor that is free
            told += ', "blocks_per_sm": 1'
        return (
            f'"{self.name}": {{"threads": {THREADS * (self.warpgroups + 1)}, "shared_bytes": {self.staging.bytes}, '
            f'"tasks": lambda {", ".join(self.extents.values())}: {self._task_count()}{told}}}'
        )

    def imports(self) -> dict[str, set[str]]:
        """Functions that the source takes from the modules of intrinsics beside `ptx`."""
        text = "\n".join(self.lines())
        return {m: {n for n in names if f"{n}(" in text} for m, names in MODULES.items()}

    def lines(self) -> list[str]:
        fewer, more = REGISTERS[self.warpgroups]
        made = [f"{name} = {text}" for text, name in self.factories.items()]
        made += [
            f"{self.name}_fewer = fewer_registers({fewer})",
            f"{self.name}_more = more_registers({more})",
        ]
        threads = THREADS * (self.warpgroups + 1)
        head = [f"@cuda.jit(launch_bounds=({threads}, 1))", f"def {self.name}("]
        head += [f"    {p}," for p in self._parameters()]
        head += [f'    {m}: "map",' for m in (*self.maps.values(), *self.output_maps.values())]
        head.append("):")
        body = [*self._comments(), *self._opening()]
        body += [f"if warpgroup == {self.warpgroups}:", f"    {self.name}_fewer()"]
        body += [f"    if thread == {THREADS * self.warpgroups}:"]
        body += [f"        {x}" for x in self.ring_lines()]
        lines = [f"    {x}" for x in body] + [f"        {x}" for x in self.loading]
        rest = ["else:", f"    {self.name}_more()", *(f"    {x}" for x in self._compute_opening())]
        lines += [f"    {x}" for x in rest] + [f"    {x}" for x in self.text.out]
        if self.output_maps:
            lines += ["        if first_lane:", "            boxes_read_0()"]
        return [*made, "", "", *head, *lines]

    def _comments(self) -> Iterator[str]:
        loads = ", ".join(f"{r.name} by {r.stages}" for r in self.staging.rings)
        yield f"# tier wgmma: {self.warpgroups} warpgroups compute, 64 rows each, and one loads; rings: {loads}"
        for axis, tile in self.tiles.items():
            yield f"# {plain(axis)} " + ("in one piece" if axis in self._whole() else f"by {tile}")
        yield f"# {self.staging.bytes} bytes of shared memory"

    def _opening(self) -> Iterator[str]:
        """A launch opens while the one before it on its stream ends: no thread touches memory until that has ended."""
        yield "release_secondary()"
        yield "thread = i64(cuda.threadIdx.x)"
        yield "warpgroup = uniform(i32(thread >> 7))"
        yield "shared = shared_start()"
        for name in (*self.maps.values(), *self.output_maps.values()):
            yield f"{name}_at = map_address({name})"
        yield f"if thread == {THREADS * self.warpgroups}:"  # which loads, and finds them there after the barrier
        for name in (*self.maps.values(), *self.output_maps.values()):
            yield f"    prefetch_map({name}_at)"
        yield from self._clearing()
        yield "if thread == 0:"
        for r in self.staging.rings:
            for i in range(r.pairs):
                readers = WARPS if self.by_warps(r) else 1
                readers *= 1 if r.parts else self.warpgroups
                yield f"    start_barrier({self.full_barrier(r)} + {BARRIER_BYTES * i}, 1)"
                yield f"    start_barrier({self.empty_barrier(r)} + {BARRIER_BYTES * i}, {readers})"
        yield "    publish_barriers()"
        yield "cuda.syncthreads()"
        yield "await_primary()"

    def _clearing(self) -> Iterator[str]:
        """Zeros beyond the columns of tiles whose last step of products has more than is brought."""
        found = [(r, b) for r in self.staging.rings for b in r.boxes if b.cleared]
        for r, b in found:
            start = r.start + r.offset(b) + (b.chunks - 1) * b.chunk_bytes
            row = (
                f"shared + {start} + cleared // {b.rows} * {r.slot_bytes} + cleared % {b.rows} * {ROW_BYTES}"
            )
            yield "cleared = i32(thread)"
            yield f"while cleared < {r.stages * b.rows}:"
            yield f"    clear_16_bytes({row} + (({b.last // EIGHT} ^ (cleared & 7)) << 4))"
            yield f"    cleared = i32(cleared + {THREADS * (self.warpgroups + 1)})"
        if found:
            yield "publish_shared()"

    def _compute_opening(self) -> Iterator[str]:
        yield from self._coordinate_lines()
        yield "leader = thread & 127 == 0"
        yield from self.ring_lines()
        for r in self.staging.rings:
            if r.looped and r.stages > 1:
                yield f"{self.ring_names[r]}_before = i32(0)"
        if any(f"meet({TURNS} + warpgroup" in x for x in self.text.out):
            yield f"if warpgroup == {self.warpgroups - 1}:"
            yield f"    announce({TURNS}, 256)"
        if self.output_maps or any(map(self.by_warps, self.staging.rings)):
            yield "first_lane = thread & 31 == 0"
            yield "warp = uniform(i32(thread >> 5))"
            yield f"matrix_row = i32((thread & 15) * {ROW_BYTES})"
            yield "matrix_column = i32(thread >> 4 & 1)"
            yield "matrix_turn = i32(thread & 7)"
        if self.output_maps and self.staging.through is None:
            place = self.staging.output_chunks * OUTPUT_BYTES // WARPS
            yield f"output = i32(shared + {self.staging.output} + warp * {place})"

    def shared_bytes(self) -> int:
        return self.staging.bytes
