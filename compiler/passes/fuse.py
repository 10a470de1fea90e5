"""fuse: which intermediates are stored in memory, and which are computed where they are used (DESIGN 4.4).

Every subset of stored intermediates is one grouping. Groupings are lowered to tile programs and compared by the cost
model's predicted time, so recomputation, traffic and launches count as they will happen; the ledger keeps, for each
intermediate, the prediction of the choice and of its opposite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as with_fields
from itertools import combinations

from ...dsl.diagnostics import TileError
from ...dsl.records import dataclass
from ...dsl.source import Span
from .. import tile_ir as tile
from ..cascade import Cascade
from ..cost import MATRIX_TIERS, Cost, Prediction, Rates, estimate, predict_launches, rates, together
from ..inline import Inliner
from ..occupancy import ALL_HIDDEN, Hidden, Resources, hidden, spilled
from ..region import AxisPlan, Region, reductions
from ..remarks import Kind, Remarks
from ..schedule import Schedule
from ..schedule_check import check_used
from ..target import CudaTarget, Target
from ..tensor_ir import (
    Definition,
    Extent,
    Graph,
    Node,
    Read,
    Reduce,
    walk,
)
from .canonicalize import simplify
from .derive import PLAIN, Rules, rules_of
from .lower import lower
from .normalize import normalize
from .preserve import always_stored
from .ranges_ahead import ranges_ahead
from .reciprocals import reciprocals
from .schedule import axis_plan, pipeline_attributes
from .shield import shield
from .split import split

EXHAUSTIVE = 5
OVERESTIMATE = 40
"""Registers of a thread by which the estimate may exceed what the assembler needs: rows of 32,768 in one piece, which are
assembled without spills, were estimated 40 too high, more than any other kernel looked at."""


ANOTHER_LAUNCH = 1.05
"""By which one more launch beside products on matrix units lengthens a prediction: results that leave while the next tile's
products run cost less than predicted, and a launch drains and fills all multiprocessors."""


@dataclass(frozen=True)
class Fused:
    """A grouping carried through to tile programs."""

    graph: Graph
    stored: frozenset[str]
    regions: tuple[Region, ...]
    plans: tuple[AxisPlan, ...]
    cascades: tuple[tuple[Cascade, ...], ...]
    module: tile.TileModule
    cost: Cost
    prediction: Prediction
    costs: tuple[Cost, ...] = ()
    """Of each launch."""
    resources: tuple[Resources | None, ...] = ()
    """What a block of each launch takes of a CUDA device; None where that is not known."""
    spilled: int = 0
    """Registers a thread beyond those it can have, summed over the launches."""
    ahead: frozenset[str] = frozenset()
    """Launches that only find ranges of tensors for others (`ranges_ahead`)."""

    def launched(self) -> Iterator[tuple[tile.TileProgram, tuple[Cascade, ...]]]:
        """The programs with their cascades."""
        own = iter(self.cascades)
        for p in self.module.programs:
            yield p, () if p.name in self.ahead else next(own)


Measure = Callable[[tile.TileProgram], Resources | None]
"""What a block of a program takes of the target; raises `TileError` where a tile does not fit."""


@dataclass(frozen=True)
class LedgerEntry:
    """One candidate: the intermediate `name`, computed in place (`fused`) or stored. Times are predicted, for `sizes`."""

    name: str
    span: Span | None
    fused: bool
    reason: str
    stored_bytes: int
    chosen: Prediction
    opposite: Prediction | None
    chosen_cost: Cost
    opposite_cost: Cost | None
    opposite_resources: tuple[tuple[str, Resources], ...] = ()
    """Launches of the other choice, with what their blocks take of a CUDA device."""


@dataclass(frozen=True)
class Ledger:
    entries: tuple[LedgerEntry, ...]
    considered: int
    sizes: dict[str, int]
    rates_origin: str
    resources: tuple[tuple[str, Resources], ...] = ()
    """Launches of the choice, with what their blocks take of a CUDA device."""


def fuse(
    graph: Graph,
    schedule: Schedule,
    target: Target,
    sizes: Mapping[str, int],
    remarks: Remarks,
    named: tuple[str, ...] = (),
    machine: Rates | None = None,
    measure: Measure | None = None,
) -> tuple[Fused, Ledger]:
    """The grouping that the schedule asks for, or the one with the least predicted time at `sizes`.

    The schedule has passed `check_schedule`. `named` are the inexact rules switched on; `machine` are measured rates, else
    the target's nominal ones; `measure` tells what the code of a program takes of a CUDA target, and a grouping that spills
    registers is chosen only where all do. Raises `TileError` where a tile size finds no axis in what is grouped.
    """
    rules = rules_of(graph, named)
    return _Search(graph, schedule, target, sizes, rules, machine or rates(target), measure).run(remarks)


class _Search:
    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        target: Target,
        sizes: Mapping[str, int],
        rules: Rules,
        machine: Rates,
        measure: Measure | None,
    ) -> None:
        self.rules, self.machine, self.measure = rules, machine, measure
        self.graph, self.schedule, self.target, self.sizes = graph, schedule, target, sizes
        self.outputs = always_stored(graph)
        self.names = tuple(d.name for d in graph.definitions if d.name not in self.outputs)
        self.tried: dict[frozenset[str], Fused] = {}
        """By what they store, before a device is asked what they take of it."""
        self.measured: dict[frozenset[str], Fused] = {}
        self.lowered: Lowered = {}

    def run(self, remarks: Remarks) -> tuple[Fused, Ledger]:
        forced = frozenset(self.schedule.keep)
        if self.schedule.fuse == "none":
            best = self.grouping(frozenset(self.names))
        elif self.schedule.fuse == "all":
            best = self.grouping(forced)
        else:
            best = self.search(forced)
        check_used(self.schedule, best.regions, best.plans)
        # once more, now with the remarks of the passes it goes through
        chosen = measured(self.build(best.stored, remarks), self.target, self.machine, self.measure)
        entries = tuple(self.entry(n, chosen, forced) for n in self.names)
        for e in entries:
            _remark(e, remarks)
        return chosen, Ledger(
            entries, len(self.tried), dict(self.sizes), self.machine.origin, launches(chosen)
        )

    def grouping(self, kept: frozenset[str]) -> Fused:
        if kept not in self.measured:
            self.measured[kept] = measured(self.sketch(kept), self.target, self.machine, self.measure)
        return self.measured[kept]

    def sketch(self, kept: frozenset[str]) -> Fused:
        """A grouping as on a device that hides all latencies and has registers for everything: no faster is possible."""
        if kept not in self.tried:
            self.tried[kept] = self.build(kept | self.outputs, Remarks(), self.lowered)
        return self.tried[kept]

    def possible(self, kept: frozenset[str]) -> Fused | None:
        """A grouping, or None where the schedule's tile sizes do not allow it."""
        try:
            return self.grouping(kept)
        except TileError:
            return None

    def fastest(self, groups: Iterable[frozenset[str]]) -> Fused:
        """The possible grouping with the least predicted time, the first of several. Raises `TileError` where none is
        possible. To ask what a grouping takes of a device costs the most, so the most promising are asked first, and none
        that no answer could make the fastest."""
        several = list(groups)
        refused: dict[int, TileError] = {}
        sketches: list[tuple[tuple[int, float], int]] = []
        for place, kept in enumerate(several):
            try:
                sketches.append((_preference(self.sketch(kept)), place))
            except TileError as reason:
                refused[place] = reason
        best: tuple[tuple[int, float], int] | None = None
        for least, place in sorted(sketches):
            if best is not None and least > best[0]:
                break
            try:
                found = _preference(self.grouping(several[place])), place
            except TileError as reason:
                refused[place] = reason
                continue
            best = min(best, found) if best is not None else found
        if best is None:
            raise refused[max(refused)]
        return self.grouping(several[best[1]])

    def build(self, stored: frozenset[str], remarks: Remarks, lowered: Lowered | None = None) -> Fused:
        return build(
            self.graph,
            stored,
            self.schedule,
            self.target,
            self.sizes,
            remarks,
            self.rules,
            self.machine,
            lowered,
        )

    def search(self, forced: frozenset[str]) -> Fused:
        """All groupings where they are few, else single flips from the fully fused one until none helps."""
        free = [n for n in self.names if n not in forced and n not in self.schedule.fused]
        if len(free) <= EXHAUSTIVE:
            subsets = (forced | frozenset(c) for k in range(len(free) + 1) for c in combinations(free, k))
            return self.fastest(subsets)
        best = self.fastest((forced, forced | frozenset(free)))
        while True:
            kept = best.stored - self.outputs
            better = self.fastest((kept, *(kept ^ {n} for n in free)))
            if _preference(better) >= _preference(best):
                return best
            best = better

    def entry(self, name: str, chosen: Fused, forced: frozenset[str]) -> LedgerEntry:
        kept = chosen.stored - self.outputs
        other = self.possible(kept ^ {name})
        d = self.graph.definition(name)
        fused = name not in kept
        size = d.dtype.bytes
        for e in self.graph.shape_of(name):
            size *= max(0, _known(e, self.sizes))
        return LedgerEntry(
            name, d.span, fused, _reason(self.schedule, name, forced, fused, chosen, other), size,
            chosen.prediction, other.prediction if other else None, chosen.cost, other.cost if other else None,
            launches(other) if other else (),
        )  # fmt: skip


def _preference(f: Fused) -> tuple[int, float]:
    """The least is best: no spills, then the least predicted time."""
    on_units = any(p.tier in MATRIX_TIERS for p in f.module.programs)
    seconds = f.prediction.seconds
    return f.spilled, seconds * ANOTHER_LAUNCH ** len(f.module.programs) if on_units else seconds


def launches(f: Fused) -> tuple[tuple[str, Resources], ...]:
    """The launches whose resources are known, by name."""
    named = zip(f.module.programs, f.resources, strict=True)
    return tuple((p.name, r) for p, r in named if r is not None)


def _known(extent: Node, sizes: Mapping[str, int]) -> int:
    from ..evaluate import evaluate

    return int(evaluate(extent, sizes, {}))


def _reason(
    schedule: Schedule, name: str, forced: frozenset[str], fused: bool, chosen: Fused, other: Fused | None
) -> str:
    if name in forced:
        return "stored because the schedule says `keep`"
    if name in schedule.fused:
        return "computed in place because the schedule says `fuse`"
    if schedule.fuse != "auto":
        return f"the schedule says `fuse {schedule.fuse}`"
    if other is None:
        return "the schedule's tile sizes do not allow the other choice"
    a, b = chosen.prediction, other.prediction
    ratio = b.seconds / a.seconds if a.seconds else 1.0
    if other.spilled > chosen.spilled:
        return f"the other choice would spill about {other.spilled - chosen.spilled} registers a thread"
    what = "computing it where it is used" if fused else "storing it"
    if fused:
        saved = other.cost.bytes - chosen.cost.bytes
        why = f"saves {saved:,.0f} bytes of traffic" if saved > 0 else "costs no more traffic"
    else:
        again, now = other.cost.operations, chosen.cost.operations
        why = (
            f"avoids {again - now:,.0f} operations done again" if again > now else "keeps each launch simple"
        )
    more = ", to which its other launch adds" if fused and ratio < 1 else ""
    return f"{what} {why}; the other choice is predicted {ratio:.2f} times as long{more}"


def _remark(e: LedgerEntry, remarks: Remarks) -> None:
    kind: Kind = "applied" if e.fused else "missed"
    remarks.add(
        kind, "fuse", "computed-in-place" if e.fused else "stored", f"{e.name}: {e.reason}", e.span,
        stored_bytes=e.stored_bytes, chosen_us=round(e.chosen.seconds * 1e6, 3),
        opposite_us=round(e.opposite.seconds * 1e6, 3) if e.opposite else -1,
    )  # fmt: skip


# ---------------------------------------------------------------- one grouping


def build(
    graph: Graph,
    stored: frozenset[str],
    schedule: Schedule,
    target: Target,
    sizes: Mapping[str, int],
    remarks: Remarks,
    rules: Rules = PLAIN,
    machine: Rates | None = None,
    lowered: Lowered | None = None,
) -> Fused:
    """Inline what is not stored, group what is into regions, plan and lower each. `lowered`: what was lowered of other
    groupings with these arguments, of which there are no remarks again."""
    graph, parts = regions(graph, stored, schedule.fuse != "none", remarks, rules)
    plans = tuple(axis_plan(graph, r, schedule, target, sizes, remarks) for r in parts)
    found: list[_Part] = []
    for r, plan in zip(parts, plans, strict=True):
        name = graph.name if len(parts) == 1 else f"{graph.name}_{r.name}"
        key = name, r.name, r.roots, plan, tuple(graph.axes.items())
        part = lowered.get(key) if lowered is not None else None
        if part is None:
            part = _part(name, graph, r, plan, schedule, target, sizes, remarks, rules)
        if lowered is not None:
            lowered[key] = part
        found.append(part)
    programs, costs = [x.program for x in found], [x.cost for x in found]
    module = tile.TileModule(graph.name, tuple(programs), _scratch(graph, programs))
    return Fused(
        graph, stored, parts, plans, tuple(x.cascades for x in found), module, together(costs),
        predict_launches(costs, machine or rates(target)), costs=tuple(costs), resources=(None,) * len(costs),
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """One region lowered, and what its launch costs."""

    program: tile.TileProgram
    cascades: tuple[Cascade, ...]
    cost: Cost


Lowered = dict[tuple[object, ...], _Part]
"""By name, roots and plan of a region, and the axes of its graph. What nodes are called is not among that: it decides names
in the text alone."""


def _part(
    name: str,
    graph: Graph,
    region: Region,
    plan: AxisPlan,
    schedule: Schedule,
    target: Target,
    sizes: Mapping[str, int],
    remarks: Remarks,
    rules: Rules,
) -> _Part:
    fixed = (*plan.whole, *(a for a in schedule.static if a in graph.axes))
    needed = {x.name for a in fixed for x in walk([graph.axes[a]]) if isinstance(x, Extent)}
    statics = {e: sizes[e] for e in graph.extents if e in needed}
    program, cascades = lower(graph, region, plan, statics, remarks, rules)
    tier = schedule.tier if schedule.tier and tile.has_product(program) else program.tier
    stated = pipeline_attributes(schedule, program, rules.facts)
    program = with_fields(program, name=name, tier=tier, attributes=stated)
    return _Part(program, cascades, _cost(program, cascades, schedule, target, sizes))


def _cost(
    program: tile.TileProgram,
    cascades: tuple[Cascade, ...],
    schedule: Schedule,
    target: Target,
    sizes: Mapping[str, int],
) -> Cost:
    """What a program costs, its reduction divided over the blocks of a device if it will be: else a grouping with few tasks
    looks slower than it is."""
    found: tuple[tile.TileProgram, ...] = (program,)
    if isinstance(target, CudaTarget) and (program.tier != "wgmma" or target.has_wgmma):
        found, _ = split(program, cascades, sizes, target, Remarks(), dict(schedule.splits))
    first, *merge = (estimate(p, sizes, target) for p in found)
    return with_fields(sum(merge, first), tasks=first.tasks, tier=first.tier)


def measured(f: Fused, target: Target, machine: Rates, measure: Measure | None) -> Fused:
    """The same with what its launches take of a device, as far as that can be told."""
    if measure is None:
        return f
    taken = tuple(measure(p) for p in f.module.programs)  # a `map` would end early at a StopIteration
    time = predict_launches(f.costs, machine, _hidden(taken, target))
    return with_fields(f, resources=taken, prediction=time, spilled=_spilled(taken, target))


def with_ranges_ahead(
    f: Fused, target: Target, sizes: Mapping[str, int], machine: Rates, measure: Measure, remarks: Remarks
) -> Fused:
    """The same with launches before that find what programs compare of tensors tile by tile."""
    found = [ranges_ahead(p, remarks) for p in f.module.programs]
    ahead = frozenset(p.name for x in found for p in x.launches)
    if not ahead:
        return f
    programs = tuple(p for x in found for p in (*x.launches, x.program))
    between = (*f.module.scratch, *(t for x in found for t in x.between))
    module = with_fields(f.module, programs=programs, scratch=between)
    taken = tuple(None if p.name in ahead else measure(p) for p in programs)
    costs = tuple(estimate(p, sizes, target) for p in programs)
    time = predict_launches(costs, machine, _hidden(taken, target))
    return with_fields(
        f, module=module, cost=together(costs), costs=costs, prediction=time, resources=taken,
        spilled=_spilled(taken, target), ahead=ahead,
    )  # fmt: skip


def _hidden(taken: tuple[Resources | None, ...], target: Target) -> list[Hidden]:
    if not isinstance(target, CudaTarget):
        return []
    return [hidden(r, target) if r else ALL_HIDDEN for r in taken]


def _spilled(taken: tuple[Resources | None, ...], target: Target) -> int:
    assert isinstance(target, CudaTarget) or not any(taken)
    found = [spilled(r, target) for r in taken if r and isinstance(target, CudaTarget)]
    return sum(n for n in found if n > OVERESTIMATE)


def _scratch(graph: Graph, programs: list[tile.TileProgram]) -> tuple[tile.Param, ...]:
    """Tensors that one launch writes and no caller sees."""
    public = {*graph.tensors, *graph.outputs}
    found = {
        p.name: p for program in programs for p in program.params if p.name not in public and p.mode != "in"
    }
    return tuple(with_fields(p, mode="out") for p in found.values())


def regions(
    graph: Graph, stored: frozenset[str], merge: bool, remarks: Remarks, rules: Rules = PLAIN
) -> tuple[Graph, tuple[Region, ...]]:
    """The launches of a grouping, in an order that respects what they read, and the graph with the axes they use.

    `merge`: roots that share reductions run in one launch; without it each stored tensor has a launch of its own.
    """
    expanded = inlined(graph, stored)
    for _, change in VALUE_PASSES:
        expanded = expanded.changed(change, remarks, rules)
    # what is read of a parameter is what it held before the call
    roots = sorted(expanded.graph.definitions, key=lambda d: d.target is not None)
    groups = _merge_siblings(roots) if merge else [[d] for d in roots]
    hints = tuple(expanded.named)
    within = {d.name: _computed_within(graph, d.name, stored) for d in roots}
    out = tuple(
        Region(
            "_".join(d.name for d in g),
            tuple(g),
            hints,
            tuple(dict.fromkeys(n for d in g for n in within[d.name])),
        )
        for g in groups
    )
    return with_fields(graph, axes=expanded.graph.axes), out


ValuePass = Callable[[list[Node], Graph, Remarks, Rules], list[Node]]
VALUE_PASSES: tuple[tuple[str, ValuePass], ...] = (
    ("simplify", lambda values, graph, remarks, rules: simplify(values, graph.axes)),
    ("normalize", lambda values, graph, remarks, rules: _normalized(values, graph, remarks, rules)),
    ("shield", lambda values, graph, remarks, rules: simplify(shield(values, graph), graph.axes)),
)
"""What happens to the values of a grouping once everything unstored is inlined, in order."""


def _normalized(values: list[Node], graph: Graph, remarks: Remarks, rules: Rules) -> list[Node]:
    """Twice where a divisor left a sum that an exponential sees."""
    once = normalize(reciprocals(values, remarks), graph.axes, remarks, rules)
    again = reciprocals(once, remarks)
    return once if again is once else normalize(again, graph.axes, remarks, rules)


@dataclass(frozen=True)
class Expanded:
    """A graph of stored definitions only, with the names that the text gave to nodes of it."""

    graph: Graph
    named: tuple[tuple[Node, str], ...]

    def changed(self, change: ValuePass, remarks: Remarks, rules: Rules) -> Expanded:
        """All values changed at once, so that what is shared stays shared and names follow their nodes."""
        definitions = self.graph.definitions
        together = [*(d.value for d in definitions), *(n for n, _ in self.named)]
        values = change(together, self.graph, remarks, rules)
        new = tuple(with_fields(d, value=v) for d, v in zip(definitions, values, strict=False))
        names = zip(values[len(definitions) :], (name for _, name in self.named), strict=True)
        return Expanded(with_fields(self.graph, definitions=new), tuple(names))


def inlined(graph: Graph, stored: frozenset[str]) -> Expanded:
    """The stored definitions with every other one computed in them."""
    inliner = Inliner(graph, stored)
    kept = [d for d in graph.definitions if d.name in stored or d.target is not None]
    expanded = tuple(inliner.definition(d) for d in kept)
    named = [(inliner.value(n), name) for n, name in graph.names.items()]
    named += [(v, n) for n, v in inliner.expanded.items()]
    return Expanded(with_fields(graph, axes=inliner.axes, definitions=expanded), tuple(named))


def _computed_within(graph: Graph, root: str, stored: frozenset[str]) -> list[str]:
    """A stored statement with those that are computed in its place."""
    written = {d.name: d for d in graph.definitions}
    found: dict[str, None] = {root: None}
    waiting = [root]
    while waiting:
        d = written[waiting.pop()]
        reads = (n.tensor for n in walk([d.value, *(d.target or ())]) if isinstance(n, Read))
        new = {n: None for n in reads if n in written and n not in stored and written[n].target is None}
        waiting += [n for n in new if n not in found]
        found.update(new)
    return list(found)


def _merge_siblings(roots: list[Definition]) -> list[list[Definition]]:
    """Roots that share a reduction run in one launch, which stands after every launch that one of them reads."""
    groups: list[list[Definition]] = []
    for d in roots:
        mine = set(reductions([d.value]))
        reads = {n.tensor for n in walk([d.value]) if isinstance(n, Read)}
        first = max((i + 1 for i, g in enumerate(groups) if any(x.name in reads for x in g)), default=0)
        home = next((g for g in groups[first:] if _can_join(d, mine, g)), None)
        if home is None:
            groups.append([d])
        else:
            home.append(d)
    return groups


def _can_join(d: Definition, mine: set[Reduce], group: list[Definition]) -> bool:
    if d.target is not None or any(x.target is not None for x in group):
        return False
    shared = any(mine & set(reductions([x.value])) for x in group)
    return shared and _compatible(d, group)


def _compatible(d: Definition, group: Iterable[Definition]) -> bool:
    """One root's axes contain the other's, so that one grid serves both."""
    return all(set(d.axes) <= set(x.axes) or set(x.axes) <= set(d.axes) for x in group)
