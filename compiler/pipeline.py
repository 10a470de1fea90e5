"""The pipeline on one screen: syntax -> tensor -> canonicalize -> fuse (derive inside) -> schedule -> tile -> source.

`compile_kernel` keeps every stage in one record; show, explain, test and edit work on that record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from ..dsl.diagnostics import TileError, refuse
from ..dsl.records import dataclass
from ..dsl.syntax import ProgramKernel
from ..dsl.types import DType
from .cascade import Cascade
from .codegen import cpu, cpu_lanes, cpu_narrow, mma, simt, wgmma
from .codegen.mma import is_lazy
from .codegen.near_functions import with_near_functions
from .codegen.remembered import Key, told_apart
from .codegen.resources import resources
from .codegen.streams import lengths_differ
from .codegen.variants_told import ahead_told, told
from .codegen.warpgroup_exponentials import subtracted_first
from .cost import Cost, Prediction, Rates, module_cost, predict_module, rates
from .elaborate import elaborate
from .occupancy import Resources, most_registers, spilled
from .options import Options
from .passes.canonicalize import canonicalize
from .passes.fuse import OVERESTIMATE, Fused, Ledger, Measure, fuse, launches, with_ranges_ahead
from .passes.preserve import copies, preserve
from .passes.split import split
from .region import AxisPlan, Region
from .remarks import Remark, Remarks
from .schedule import Schedule, print_schedule, stem
from .schedule_check import alike, check_schedule, key_of, refuse_tiles, tiles_placed
from .target import CpuTarget, CudaTarget, Target
from .tensor_ir import Extent, Graph, walk
from .tensor_text import print_graph
from .tile_ir import TileModule, TileProgram, has_product
from .tile_kernel import TilesKernel
from .tile_text import print_module
from .verify import verify_graph, verify_module
from .warpgroup_schedule import check_roles, check_splits, lines_of, role_line, roles_of

STAGES = ("syntax", "tensor", "canonicalize", "fuse", "schedule", "tile", "source")


@dataclass(frozen=True)
class Compilation:
    """Everything about one kernel compiled for one target: the graph as written and as canonicalised, the launches with
    their cascades, the decisions, the schedule, the tile module and the generated source.

    `sizes` are the extents the decisions were predicted for; `statics` those whose value is compiled in.
    """

    kernel: ProgramKernel
    options: Options
    target: Target
    written: Graph
    graph: Graph
    regions: tuple[Region, ...]
    plans: tuple[AxisPlan, ...]
    cascades: tuple[tuple[Cascade, ...], ...]
    ledger: Ledger
    schedule: Schedule
    module: TileModule
    source: str
    cost: Cost
    prediction: Prediction
    remarks: tuple[Remark, ...]
    sizes: dict[str, int]
    statics: dict[str, int]
    rates: Rates
    snapshots: dict[str, str] = field(default_factory=dict)


def front(kernel: ProgramKernel, dtypes: Mapping[str, DType] | None, remarks: Remarks) -> tuple[Graph, Graph]:
    """Text to verified tensor IR: as written, and canonical."""
    written = elaborate(kernel, dtypes)
    graph = preserve(canonicalize(written, remarks))
    verify_graph(graph, "canonicalize")
    return written, graph


def compile_kernel(
    kernel: ProgramKernel,
    target: Target,
    sizes: Mapping[str, int],
    *,
    dtypes: Mapping[str, DType] | None = None,
    options: Options | None = None,
    schedule: Schedule | None = None,
    machine: Rates | None = None,
) -> Compilation:
    """Compile one kernel. `sizes` gives every extent: the decisions are predicted for them (with the measured rates of
    `machine`, else nominal ones), and extents of whole axes are compiled in (`statics`); all others stay run-time values.
    Raises `TileError` for what the text, the schedule or the target does not allow."""
    options = options or Options()
    if isinstance(kernel, TilesKernel):
        return compile_tiles(kernel, target, sizes, options)
    remarks = Remarks()
    written, graph = front(kernel, dtypes, remarks)
    name = kernel.kernel.name.name
    asked = schedule or Schedule(name, name, target.name, options.fuse, options.keep)
    plain = check_schedule(asked, written, graph, target)
    measure = measuring(target) if isinstance(target, CudaTarget) else None
    refused: list[str] = []
    line = role_line(asked)
    default = ("wgmma",) if line else default_tiers(graph, target, options)
    for tier in (plain.tier,) if plain.tier else default:
        plain = replace(plain, tier=tier)
        with tiles_placed(asked):
            fused, ledger = fuse(graph, plain, target, sizes, remarks, options.named, machine, measure)
        if tier == "wgmma" and measure is not None:
            fused = with_ranges_ahead(fused, target, sizes, machine or rates(target), measure, remarks)
            ledger = replace(ledger, resources=launches(fused))
        reason = None if asked.tier else slower_on_units(fused, target, tier)
        reason = reason or choose_tier(fused, target, tier, remarks)
        if reason is None:
            break
        if schedule is not None and (schedule.tier is not None or line):
            says = (
                f"the schedule `{schedule.name}` says `tier {tier}`"
                if schedule.tier
                else (f"`{line.partition(' ')[0]}` is for tier `wgmma`")
            )
            span = schedule.spans.get(line or "tier")
            leave = "leave it out, or state other tiles" if schedule.tiles else "leave it out"
            raise refuse("E0915", f"{says}: {reason}", span, help=leave)
        remarks = Remarks()  # its tiles suit that tier alone
        front(kernel, dtypes, remarks)
        refused.append(reason)
    for reason in refused:
        remarks.add("missed", "schedule", "matrix-units", reason)
    if asked.tier in MATRIX_UNITS and not any(map(has_product, fused.module.programs)):
        remarks.add(
            "missed", "schedule", "matrix-units", f"`tier {asked.tier}` changes nothing: {WITHOUT_PRODUCT}"
        )
    if isinstance(target, CudaTarget):
        refuse_spills(asked, fused, target)
    running = roles_of(fused.module, target)
    check_roles(asked, running, target)
    for name, found in running.items():
        remarks.add("applied", "schedule", "roles", f"{name}: {found.told()}")
    for p in fused.module.programs if target.is_cuda else ():
        if with_near_functions(p) != p:
            form = (
                "tanh and 1 / (1 + exp(x)) in fewer steps, with an error that results of 16 bits or an exponential "
                "do not show"
            )
            remarks.add("applied", "codegen", "near-functions", f"{p.name}: {form}")
        if p.tier == "mma" and is_lazy(p):
            remarks.add(
                "applied", "codegen", "lazy-maximum",
                f"{p.name}: a maximum moves when it is exceeded by more than 2^8",
            )  # fmt: skip
        if p.tier == "mma" and lengths_differ(p):
            remarks.add(
                "applied", "codegen", "task-order",
                f"{p.name}: tasks with the longest loops first, of as many other indices as the level 2 cache holds",
            )  # fmt: skip
    fused = over_blocks(fused, asked, target, sizes, machine or rates(target), remarks)
    if not target.is_cuda:
        cpu_lanes.remark(fused.module, remarks)
    verify_module(fused.module, "lower")
    stated = final_schedule(plain, written, fused, running)
    with tiles_placed(asked):
        source = generate(fused.module, target)
    if isinstance(target, CudaTarget):
        for text in told(source):
            remarks.add("note", "codegen", "variants", text)
        for text in ahead_told(source):
            remarks.add("applied", "codegen", "rows-ahead", text)
        for p in (p for p in fused.module.programs if p.tier in MATRIX_UNITS):
            if rows := subtracted_first(p):
                told_rows = ", ".join(f"`{r}`" for r in rows)
                remarks.add(
                    "missed", "codegen", "exact-differences",
                    f"{p.name}: exponentials subtract {told_rows} first, one instruction more an element: a stored result "
                    "depends on the difference itself, or weights are rounded to f16",
                )  # fmt: skip
        for p in (with_near_functions(p) for p in fused.module.programs if p.tier == "mma"):
            for kind, name, text in mma.decisions(p, target):
                remarks.add(kind, "codegen", name, text)
    statics = {e: n for p in fused.module.programs for e, n in p.statics}
    snapshots = {
        "tensor": print_graph(written),
        "canonicalize": print_graph(graph),
        "fuse": print_regions(fused),
        "schedule": print_schedule(stated),
        "tile": print_module(fused.module),
        "source": source,
    }
    return Compilation(
        kernel=kernel, options=options, target=target, written=written, graph=fused.graph, regions=fused.regions,
        plans=fused.plans, cascades=fused.cascades, ledger=ledger, schedule=stated, module=fused.module, source=source,
        cost=fused.cost, prediction=fused.prediction, remarks=tuple(remarks.items), sizes=dict(sizes), statics=statics,
        rates=machine or rates(target), snapshots=snapshots,
    )  # fmt: skip


def refuse_spills(asked: Schedule, fused: Fused, target: CudaTarget) -> None:
    """Tiles that a schedule states must fit the registers of a thread. Raises `TileError` naming the largest of them."""
    if not asked.tiles or not fused.spilled:
        return
    name, taken = next(
        (p.name, r)
        for p, r in zip(fused.module.programs, fused.resources, strict=True)
        if r is not None and spilled(r, target) > OVERESTIMATE
    )
    raise refuse_tiles(
        asked,
        f"`{name}` needs about {taken.registers} registers a thread with the tiles of `{asked.name}`; "
        f"{target.name} has {most_registers(taken.threads, target)}",
    )


def over_blocks(
    fused: Fused,
    asked: Schedule,
    target: Target,
    sizes: Mapping[str, int],
    machine: Rates,
    remarks: Remarks,
) -> Fused:
    """Reductions with too few tasks for the device divided over blocks, or as stated; tiers follow from what each program
    holds."""
    check_splits(asked, fused)
    programs: list[TileProgram] = []
    scratch = list(fused.module.scratch)
    for p, cascades in fused.launched():
        found, between = split(p, cascades, sizes, target, remarks, dict(asked.splits))
        tiered = [replace(q, tier=p.tier if q is p or has_product(q) else "loops") for q in found]
        programs += tiered
        scratch += between
    if len(programs) == len(fused.module.programs):
        return fused
    module = replace(fused.module, programs=tuple(programs), scratch=tuple(scratch))
    cost, time = module_cost(module, sizes, target), predict_module(module, sizes, machine, target)
    return replace(fused, module=module, cost=cost, prediction=time)


def default_tiers(graph: Graph, target: Target, options: Options) -> tuple[str | None, ...]:
    """The tiers to try: matrix units where the target has them and there are operands of their types, but not where every
    product has to be f32."""
    if isinstance(target, CpuTarget):
        found = {t.dtype for t in graph.tensors.values()}
        able = {dtype for dtype, unit in cpu_narrow.units(target).items() if unit}
        return ("matrix", None) if found & able and not options.precise else (None,)
    sixteen = any(t.dtype in (DType.F16, DType.BF16) for t in graph.tensors.values())
    if not isinstance(target, CudaTarget) or not sixteen or options.precise or target.capability < (8, 0):
        return (None,)
    return ("wgmma", "mma", None) if target.has_wgmma else ("mma", None)


VECTORS_OF_BF16 = "avx512_bf16"
"""What multiplies bf16 where there are no tiles: twice as many products an instruction as of f32."""
WITHOUT_PRODUCT = (
    "no launch multiplies two tiles with rows and columns (a sum of products by single rows is none)"
)
MATRIX_UNITS = {
    "mma": (mma.why_not, "mma.sync"),
    "wgmma": (
        wgmma.why_not,
        "wgmma, by warpgroups with roles (mma.sync where a tensor's rows do not start at multiples of 16 bytes)",
    ),
}
"""Tiers with matrix units: why a program does not fit one, and what its products run through."""


def slower_on_units(fused: Fused, target: Target, tier: str | None) -> str | None:
    """Why `vdpbf16ps` is not worth its copies: of products that follow one another both operands of each are copied in every
    step, and what is computed between them is rounded first. Tiles of AMX, many times as fast, are."""
    if (
        tier != cpu_narrow.TIER
        or not isinstance(target, CpuTarget)
        or target.bf16_products != VECTORS_OF_BF16
    ):
        return None
    chains = [p.name for p in fused.module.programs if cpu_lanes.lane_axis(p)]
    if not chains:
        return None
    return (
        f"{', '.join(chains)}: products that follow one another stay in f32, which is 1.5 to 1.7 times as fast as "
        f"{VECTORS_OF_BF16} (measured at 32 to 256 columns); `tier {tier}` in a schedule takes it"
    )


def choose_tier(fused: Fused, target: Target, tier: str | None, remarks: Remarks) -> str | None:
    """Can each program with a product run in a tier? None if so, and a remark; else why not."""
    if tier == cpu_narrow.TIER and isinstance(target, CpuTarget):
        return cpu_narrow.remark(cpu.narrow_products(fused.module), target, remarks)
    if tier not in MATRIX_UNITS:
        return None
    assert isinstance(target, CudaTarget)
    why_not, through = MATRIX_UNITS[tier]
    for p in fused.module.programs:
        reason = why_not(p, target) if has_product(p) else None
        if reason is not None:
            return f"{p.name}, tier {tier}: {reason}"
    on = [p.name for p in fused.module.programs if has_product(p)]
    if on:
        remarks.add(
            "applied", "schedule", "matrix-units",
            f"{', '.join(on)}: products through {through}; computed operands are rounded to the type of the stored ones",
        )  # fmt: skip
    return None


def measuring(target: CudaTarget) -> Measure:
    """`taken` for the programs of one kernel: the groupings of its statements share most of them."""
    known: dict[Key, Resources | None] = {}

    def measure(program: TileProgram) -> Resources | None:
        key = told_apart(program)
        if key not in known:
            known[key] = taken(program, target)
        return known[key]

    return measure


def taken(program: TileProgram, target: CudaTarget) -> Resources | None:
    """What a block of a program takes; None where the matrix units cannot run it, which `choose_tier` finds and says."""
    try:
        return resources(program, target)
    except mma.Unfit:
        return None
    except TileError:
        if program.tier in MATRIX_UNITS:
            return None
        raise


def compile_tiles(
    kernel: TilesKernel, target: Target, sizes: Mapping[str, int], options: Options
) -> Compilation:
    """Compile a hand-written tile program: nothing is decided, only the `static` extents take the values of `sizes`."""
    module = kernel.module(sizes)
    source = generate(module, target)
    cost = module_cost(module, sizes, target)
    statics = {e: n for p in module.programs for e, n in p.statics}
    return Compilation(
        kernel=kernel, options=options, target=target, written=kernel.graph, graph=kernel.graph, regions=(), plans=(),
        cascades=(), ledger=Ledger((), 0, dict(sizes), rates(target).origin),
        schedule=Schedule(module.name, module.name, target.name), module=module, source=source, cost=cost,
        prediction=predict_module(module, sizes, rates(target), target), remarks=(), sizes=dict(sizes), statics=statics,
        rates=rates(target), snapshots={"tile": print_module(module), "source": source},
    )  # fmt: skip


def generate(module: TileModule, target: Target) -> str:
    """Source for the target."""
    return simt.generate(module, target) if isinstance(target, CudaTarget) else cpu.generate(module)


def final_schedule(
    asked: Schedule, written: Graph, fused: Fused, running: Mapping[str, wgmma.Choices]
) -> Schedule:
    """The schedule with every choice filled in, as it could be given back."""
    several, axes = len(fused.regions) > 1, fused.graph.axes
    tiles: list[tuple[str, int]] = []
    tier = next((p.tier for p in fused.module.programs if p.tier in (*MATRIX_UNITS, cpu_narrow.TIER)), None)
    for region, plan in zip(fused.regions, fused.plans, strict=True):
        for axis, size in plan.tiles:
            if axis not in plan.whole:
                unclear = len({axes[a] for a in alike(stem(axis), axes)}) > 1
                key = key_of(written, fused.graph, region, axis) if several or unclear else axis
                tiles.append((key, size or 0))
    static = tuple(dict.fromkeys((*asked.static, *(a for p in fused.plans for a in p.whole))))
    public = {*fused.graph.outputs, *fused.graph.tensors, *copies(fused.graph)}
    kept = tuple(d.name for d in fused.graph.definitions if d.name in fused.stored and d.name not in public)
    keep = kept if asked.fuse != "none" else ()
    return replace(
        asked,
        fuse=asked.fuse if asked.fuse != "auto" else "all",
        fused=(),
        keep=keep,
        static=static,
        tiles=tuple(tiles),
        tier=tier,
        **lines_of(running),  # type: ignore[arg-type]
    )


def print_regions(fused: Fused) -> str:
    """The launches as tensor IR: what each stores, with its producers inlined."""
    parts = []
    for region in fused.regions:
        names = {d.name for d in region.roots}
        outputs = {n: t for n, t in fused.graph.outputs.items() if n in names}
        part = replace(fused.graph, name=region.name, definitions=region.roots, outputs=outputs, checks=())
        parts.append(print_graph(part))
    return "\n".join(parts)


def static_extents(graph: Graph, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The extents that the sizes of these axes are made of."""
    names = {n.name for a in axes for n in walk([graph.axes[a]]) if isinstance(n, Extent)}
    return tuple(e for e in graph.extents if e in names)
