"""What was derived and decided, as data: read from one compilation and its `fuse none` counterpart, printed elsewhere.

Everything here is plain: `dataclasses.asdict` of an `Explanation` is its JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType
from . import tile_ir as tile
from .cascade import Cascade, State
from .codegen import cpu
from .evaluate import evaluate
from .occupancy import Resources, occupancy, spilled
from .passes.fuse import LedgerEntry
from .passes.guards import guarded_state
from .passes.lower import with_scaled
from .pipeline import Compilation
from .remarks import Remark
from .schedule import print_schedule
from .spelling import spell
from .target import CudaTarget
from .tensor_ir import Apply, Carried, Const, Extent, Node, apply, carried, const, extent, walk
from .tile_ir import Expr, For, TileProgram, statements, subexpressions
from .tile_text import print_statement

# ---------------------------------------------------------------- the facts


@dataclass(frozen=True)
class Where:
    """A place in the user's text, and the words there."""

    file: str
    line: int
    column: int
    text: str


@dataclass(frozen=True)
class ObligationFacts:
    """One equation that a derivation rests on: proved, refuted or unknown, and by what."""

    name: str
    formula: str
    status: str
    how: str


@dataclass(frozen=True)
class ExponentFacts:
    """The argument of an exponential, and what keeps it from overflowing, if anything does."""

    text: str
    never_positive: bool
    why: str


@dataclass(frozen=True)
class GuardFacts:
    """One corner case: the running extremum and an element, and the contribution read plainly and through the guard.

    Numbers are texts, since JSON has no infinity.
    """

    case: str
    extremum: str
    element: str
    plain: str
    guarded: str
    meaning: str


@dataclass(frozen=True)
class StateFacts:
    """One reduction of a pass. `name` is its name in the tile program, `where` the user's words for it.

    `g` is the contribution of one element, `h` the part of it that depends on the upstream states only, `repair` what mends
    the old value when those change (`kind`: a factor, a summand, a matrix, or starting again), `step` the recurrence.
    """

    name: str
    reduction: str
    where: Where | None
    upstream: tuple[str, ...]
    kind: str
    g: str
    h: str
    repair: str
    step: str
    obligations: tuple[ObligationFacts, ...]
    exponents: tuple[ExponentFacts, ...]
    guards: tuple[GuardFacts, ...]


@dataclass(frozen=True)
class PassFacts:
    """One pass over an index set, with the states it carries.

    `loops` are its texts in the tile program: one, or one for full and one for partial tiles.
    """

    launch: str
    axes: tuple[str, ...]
    states: tuple[StateFacts, ...]
    loops: tuple[str, ...]


@dataclass(frozen=True)
class MissedFacts:
    """A reduction that needs a pass of its own, and why."""

    message: str
    where: Where | None


@dataclass(frozen=True)
class CandidateFacts:
    """One intermediate: computed where it is used (`fused`) or stored. Times are predicted for the stated sizes."""

    name: str
    where: Where | None
    decision: str
    reason: str
    stored_bytes: int
    chosen_us: float
    chosen_binds: str
    opposite_us: float | None
    opposite_binds: str | None
    chosen_traffic_bytes: float
    opposite_traffic_bytes: float | None


@dataclass(frozen=True)
class RoomFacts:
    """What a block of a launch takes of a multiprocessor, and how many warps fit there: `registers` a thread is an estimate
    from the tiles it holds, `limit` what keeps more blocks out. `without` names the intermediate whose other choice this
    launch belongs to, None for a launch of the choice."""

    launch: str
    without: str | None
    threads: int
    registers: int
    spilled: int
    shared_bytes: int
    warps: int
    share: float
    limit: str


@dataclass(frozen=True)
class FusionFacts:
    """The ledger. `launches` lists what each launch stores; `groupings` counts those that were predicted; `room` is empty
    where the target is no GPU."""

    candidates: tuple[CandidateFacts, ...]
    groupings: int
    launches: tuple[tuple[str, ...], ...]
    naive_launches: tuple[tuple[str, ...], ...]
    predicted_us: float
    binds: str
    naive_predicted_us: float
    naive_binds: str
    rates_origin: str
    room: tuple[RoomFacts, ...]


@dataclass(frozen=True)
class BufferFacts:
    """A tensor that one launch leaves for a later one. `shape` in the user's extents."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class GrowthFacts:
    """Predicted bytes beyond inputs and outputs at other sizes."""

    sizes: dict[str, int]
    bytes: int
    naive_bytes: int


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes beyond inputs and outputs: tensors between launches and, for each thread, the buffers of one task.

    `grows_with` names the extents that the tensors between launches depend on (`naive_…` of `fuse none`).
    """

    buffers: tuple[BufferFacts, ...]
    naive_buffers: tuple[BufferFacts, ...]
    task_bytes: int
    naive_task_bytes: int
    threads: int
    grows_with: tuple[str, ...]
    naive_grows_with: tuple[str, ...]
    growth: tuple[GrowthFacts, ...]


@dataclass(frozen=True)
class RemarkFacts:
    kind: str
    stage: str
    name: str
    message: str
    where: Where | None
    facts: dict[str, int | float | str | bool]


@dataclass(frozen=True)
class Explanation:
    """All facts about one kernel compiled for one target at stated sizes."""

    kernel: str
    target: str
    dtypes: dict[str, str]
    sizes: dict[str, int]
    statics: dict[str, int]
    passes: tuple[PassFacts, ...]
    missed: tuple[MissedFacts, ...]
    fusion: FusionFacts
    memory: MemoryFacts
    schedule: str
    remarks: tuple[RemarkFacts, ...]


def explain(c: Compilation, naive: Compilation, threads: int = 1) -> Explanation:
    """The facts of `c`; `naive` is the same kernel, target and sizes compiled with `fuse none`."""
    return Explanation(
        kernel=c.kernel.kernel.name.name,
        target=c.target.name,
        dtypes={t.name: t.dtype.value for t in (*c.graph.tensors.values(), *c.graph.outputs.values())},
        sizes=dict(c.sizes),
        statics=dict(c.statics),
        passes=tuple(_passes(c)),
        missed=tuple(_missed(c.remarks)),
        fusion=_fusion(c, naive),
        memory=_memory(c, naive, threads),
        schedule=print_schedule(c.schedule),
        remarks=_remarks(c.remarks),
    )


def where(span: Span | None) -> Where | None:
    """The place of a span, with its text on one line."""
    if span is None:
        return None
    return Where(span.source.name, span.line, span.column, " ".join(span.text.split()))


# ---------------------------------------------------------------- derivations


def _passes(c: Compilation) -> Iterator[PassFacts]:
    for region, found in zip(c.regions, c.cascades, strict=True):
        for cascade in found:
            loops = [s for program in c.module.programs for s in _loops(program, cascade)]
            names = {s.name: carry for s, carry in zip(cascade.states, cascade.carries, strict=True)}
            states = tuple(_state(s, cascade, names, with_scaled(dict(region.hints))) for s in cascade.states)
            yield PassFacts(region.name, cascade.bound, states, tuple(map(print_statement, loops)))


def _loops(program: TileProgram, cascade: Cascade) -> list[For]:
    """The loops of a pass in order: full tiles and partial ones may have one each, the last leaves the states."""
    place = cascade.states[0].span
    loops = [s for s in statements(program.body) if isinstance(s, For) and s.span is place]
    return [s for s in loops if len(s.carries) == len(cascade.states)]


def _state(s: State, cascade: Cascade, names: Mapping[str, str], hints: Mapping[Node, str]) -> StateFacts:
    words = _Words(cascade, s, names, hints)
    return StateFacts(
        name=names[s.name],
        reduction=f"{s.reduction.fn}[{', '.join(s.reduction.bound)}{words.such(s)}]",
        where=where(s.span),
        upstream=tuple(names[u] for u in s.upstream),
        kind=s.kind,
        g=words.spell(s.g),
        h=words.rename(s.h_text),
        repair=words.spell(s.repair) if s.repair is not None else words.rename(s.repair_text),
        step=words.step(s),
        obligations=tuple(
            ObligationFacts(o.name, words.rename(o.formula), o.status, o.how) for o in s.obligations
        ),
        exponents=tuple(
            ExponentFacts(words.rename(x.text), x.never_positive, words.rename(x.why)) for x in s.exponents
        ),
        guards=tuple(_guards(s)),
    )


class _Words:
    """Nodes of a pass in the names of its tile program and of the user's statements; x' is the new value of x."""

    def __init__(
        self, cascade: Cascade, state: State, names: Mapping[str, str], hints: Mapping[Node, str]
    ) -> None:
        self.names = names
        self.table = dict(hints)
        for s in cascade.states:
            for moment, mark in (("old", ""), ("new", "'")):
                ref = carried(
                    s.name, "old" if moment == "old" else "new", s.reduction.axes, s.reduction.dtype
                )
                self.table[ref] = names[s.name] + mark
        self.symbols = self._symbols(state)

    def _symbols(self, s: State) -> dict[str, str]:
        """What the symbols of derive's formulas stand for: r_x is the state x, c_0 and k_0 parts of the contribution."""
        found = {f"r_{state}": name for state, name in self.names.items()}
        return found | {symbol: self.spell(n) for symbol, n in s.symbols if symbol not in found}

    def spell(self, node: Node) -> str:
        guards = {n: g for n in walk([node]) if isinstance(g := guarded_state(n) or _still_empty(n), Carried)}
        table = {**self.table, **{n: f"safe({self.table[g]})" for n, g in guards.items()}}
        return table[node] if node in table else spell(node, table)

    def rename(self, text: str) -> str:
        """A formula of derive in the program's names."""

        def name(found: re.Match[str]) -> str:
            base, _, number = found[0].rpartition("_")
            if found[0] not in self.symbols and base in self.symbols:
                return f"{self.symbols[base]}_{number}"  # one more value of a state, as where two parts are merged
            known = self.symbols.get(found[0], found[0])
            return known if re.fullmatch(r"\w+(\[[^\[\]]*\])?", known) else f"({known})"

        return re.sub(r"\b[rcku]_\w+", name, text)

    def such(self, s: State) -> str:
        return f" | {self.spell(s.predicate)}" if s.predicate is not None else ""

    def step(self, s: State) -> str:
        name, r = self.names[s.name], s.reduction
        part = f"{r.fn}[{', '.join(r.bound)}]({self.spell(s.g)})"
        old = self.spell(s.moved) if s.moved is not None else name
        return f"{name}' = {old} + {part}" if r.fn == "sum" else f"{name}' = {r.fn}({old}, {part})"


def _still_empty(n: Node) -> Node | None:
    """`where(t == 0, 1, t)`, the guard against dividing by a sum that is still 0: the t that it guards."""
    match n:
        case Apply(
            op="where", operands=(Apply(op="eq", operands=(a, Const(value=0))), Const(value=1), b)
        ) if a is b:
            return a
    return None


# ---------------------------------------------------------------- guards, shown by numbers

_REAL: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "exp": lambda a: math.inf if a > 709 else math.exp(a),
    "eq": lambda a, b: a == b,
    "where": lambda c, a, b: a if c else b,
}
LOWEST = {DType.F32: -3.4028234663852886e38, DType.F64: -1.7976931348623157e308}
STAND_IN = -1e30
"""A finite value people use for -inf; wrong beside lower scores."""


def _guards(s: State) -> Iterator[GuardFacts]:
    """What a contribution read through a guard is where the extremum is -inf, and for the lowest finite number."""
    x = s.absorbs
    if x is None or len(s.upstream) != 1 or not s.guarded or x.dtype not in LOWEST:
        return
    low = LOWEST[x.dtype]
    cases = (
        ("no element yet, or every element is -inf", -math.inf, -math.inf,
         "without the guard one such row would be NaN; with it the row adds nothing"),
        ("every element is the lowest finite number, as some masks write", low, low,
         "a row like any other: all its elements weigh the same"),
        (f"the same elements, had the extremum started at {STAND_IN:g} instead of -inf", STAND_IN, low,
         "the row would be lost; so the start is -inf and the guard replaces -inf only"),
    )  # fmt: skip
    for case, extremum, element, meaning in cases:
        plain, guarded = (_contribution(s, x, extremum, element, guard) for guard in (False, True))
        if plain is None or guarded is None:
            return
        yield GuardFacts(case, f"{extremum:g}", f"{element:g}", f"{plain:g}", f"{guarded:g}", meaning)


def _contribution(s: State, x: Node, extremum: float, element: float, guard: bool) -> float | None:
    """g at one point, other elements at 1; None where it has an operation without a plain formula."""
    done: dict[Node, float] = {}
    for n in walk([s.g]):
        safe = guarded_state(n)
        if n is x:
            done[n] = element
        elif isinstance(safe, Carried) and not guard:
            done[n] = done[safe]
        elif isinstance(n, Carried):
            done[n] = extremum
        elif isinstance(n, Const):
            done[n] = float(n.value)
        elif isinstance(n, Apply) and any(isinstance(a, Carried) or a is x for a in walk([n])):
            if n.op not in _REAL:
                return None
            done[n] = _REAL[n.op](*(done[a] for a in n.operands))
        else:
            done[n] = 1.0
    return done[s.g]


def _missed(remarks: Iterable[Remark]) -> Iterator[MissedFacts]:
    found = (MissedFacts(r.message, where(r.span)) for r in remarks if r.name == "not-one-pass")
    yield from dict.fromkeys(found)


def _remarks(remarks: Iterable[Remark]) -> tuple[RemarkFacts, ...]:
    """Each once: what a function does to its argument is remarked wherever the function is used."""
    found = [_remark(r) for r in remarks]
    return tuple(r for i, r in enumerate(found) if r not in found[:i])


def _remark(r: Remark) -> RemarkFacts:
    return RemarkFacts(r.kind, r.pass_name, r.name, r.message, where(r.span), dict(r.facts))


# ---------------------------------------------------------------- fusion


def _fusion(c: Compilation, naive: Compilation) -> FusionFacts:
    return FusionFacts(
        candidates=tuple(_candidate(e) for e in c.ledger.entries),
        groupings=c.ledger.considered,
        launches=_launches(c),
        naive_launches=_launches(naive),
        predicted_us=c.prediction.seconds * 1e6,
        binds=c.prediction.binds,
        naive_predicted_us=naive.prediction.seconds * 1e6,
        naive_binds=naive.prediction.binds,
        rates_origin=c.ledger.rates_origin,
        room=tuple(_rooms(c)),
    )


def _rooms(c: Compilation) -> Iterator[RoomFacts]:
    """The launches of the choice, then those of each candidate's other choice that are not the same."""
    if not isinstance(c.target, CudaTarget):
        return
    chosen = c.ledger.resources
    yield from (_room(name, None, r, c.target) for name, r in chosen)
    for e in c.ledger.entries:
        yield from (_room(n, e.name, r, c.target) for n, r in e.opposite_resources if (n, r) not in chosen)


def _room(launch: str, without: str | None, r: Resources, target: CudaTarget) -> RoomFacts:
    fits = occupancy(r, target)
    return RoomFacts(
        launch,
        without,
        r.threads,
        r.registers,
        spilled(r, target),
        r.shared_bytes,
        fits.warps,
        fits.share,
        fits.limit,
    )


def _launches(c: Compilation) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(d.name for d in r.roots) for r in c.regions)


def _candidate(e: LedgerEntry) -> CandidateFacts:
    return CandidateFacts(
        name=e.name,
        where=where(e.span),
        decision="fused" if e.fused else "stored",
        reason=e.reason,
        stored_bytes=e.stored_bytes,
        chosen_us=e.chosen.seconds * 1e6,
        chosen_binds=e.chosen.binds,
        opposite_us=e.opposite.seconds * 1e6 if e.opposite else None,
        opposite_binds=e.opposite.binds if e.opposite else None,
        chosen_traffic_bytes=e.chosen_cost.bytes,
        opposite_traffic_bytes=e.opposite_cost.bytes if e.opposite_cost else None,
    )


# ---------------------------------------------------------------- memory

STEPS = (1, 2, 4, 8)


def _memory(c: Compilation, naive: Compilation, threads: int) -> MemoryFacts:
    naive_grows = _grows_with(naive)
    own, other = task_bytes(c), task_bytes(naive)
    longest = _longest(c, naive_grows)
    growth = []
    for step in STEPS if naive_grows else ():
        varied = {e: c.sizes[e] * step for e in longest}
        sizes = {**c.sizes, **varied}
        row = scratch_bytes(c, sizes) + threads * own, scratch_bytes(naive, sizes) + threads * other
        growth.append(GrowthFacts(varied, *row))
    return MemoryFacts(
        buffers=tuple(_buffers(c)),
        naive_buffers=tuple(_buffers(naive)),
        task_bytes=own,
        naive_task_bytes=other,
        threads=threads,
        grows_with=_grows_with(c),
        naive_grows_with=naive_grows,
        growth=tuple(growth),
    )


def _longest(c: Compilation, extents: Iterable[str]) -> tuple[str, ...]:
    """Those of the run-time extents that share the greatest size: sequence lengths, say, and not the number of heads."""
    free = [e for e in extents if e not in c.statics]
    most = max((c.sizes[e] for e in free), default=0)
    return tuple(e for e in free if c.sizes[e] == most)


def _grows_with(c: Compilation) -> tuple[str, ...]:
    """The extents of the tensors between launches."""
    shapes = [n for p in c.module.scratch for n in _shape(p)]
    used = {n.name for n in walk(shapes) if isinstance(n, Extent)}
    return tuple(e for e in c.graph.extents if e in used)


def _buffers(c: Compilation) -> Iterator[BufferFacts]:
    for p in c.module.scratch:
        shape = _shape(p)
        yield BufferFacts(p.name, p.dtype.value, tuple(map(spell, shape)), _bytes(shape, p.dtype, c.sizes))


def _shape(p: tile.Param) -> tuple[Node, ...]:
    """The extents of a tensor between launches."""
    done: dict[Expr, Node] = {}
    for e in p.shape:
        for x in reversed(tuple(subexpressions(e))):
            match x:
                case tile.Const(value=value, dtype=dtype):
                    done[x] = const(value, dtype)
                case tile.ExtentRef(name=name):
                    done[x] = extent(name)
                case tile.Apply(op=op, args=args):
                    done[x] = apply(op, *(done[a] for a in args))
                case _:
                    raise TypeError(f"{type(x).__name__} is no extent")
    return tuple(done[e] for e in p.shape)


def _bytes(shape: Iterable[Node], dtype: DType, sizes: Mapping[str, int]) -> int:
    return dtype.bytes * math.prod(max(0, int(evaluate(n, sizes, {}))) for n in shape)


def scratch_bytes(c: Compilation, sizes: Mapping[str, int]) -> int:
    """The most that tensors between launches hold at once; each lives from its writer to its last reader."""
    sized = {p.name: _bytes(_shape(p), p.dtype, sizes) for p in c.module.scratch}
    uses = {
        name: [i for i, p in enumerate(c.module.programs) if any(x.name == name for x in p.params)]
        for name in sized
    }
    live = (
        sum(size for name, size in sized.items() if uses[name] and uses[name][0] <= i <= uses[name][-1])
        for i in range(len(c.module.programs))
    )
    return max(live, default=0)


def task_bytes(c: Compilation) -> int:
    """The most that one task of a launch allocates: its tiles, of sizes fixed at compile time. CPU only, else 0."""
    if c.target.is_cuda:
        return 0
    tasks = [task for tasks in cpu.workspace(c.module).values() for task in tasks]
    return max((sum(b.dtype.bytes * math.prod(b.sizes) for b in task) for task in tasks), default=0)
