"""The cost model: what a tile program moves and computes for given extents, and the time a machine's rates predict for it.

Counts come from the tile program itself, so recomputation in a loop nest or per tile is counted as it will happen. Memory
traffic counts each tensor once per program (tiles of one launch share a cache), or what is read of it where that is less;
time is the greater of memory and arithmetic plus the launches; on CUDA both are slowed where too few warps are resident to
hide latency. All figures are estimates for choosing between variants; measuring is `explain --measure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import reduce

from ..dsl.records import dataclass
from . import tile_ir as tile
from .codegen.one_step import in_one_step
from .codegen.placement import distinct
from .codegen.repeats import repeats
from .occupancy import ALL_HIDDEN, Hidden
from .target import CudaTarget, Target
from .tile_ir import Expr

SPECIAL = frozenset({"exp", "exp2", "log", "log2", "tanh", "erf", "sin", "cos", "pow"})
COSTLY = frozenset({"tanh", "erf", "sin", "cos", "pow"})
"""Those that take several times an exponential; their own rate is measured with tanh."""
SLOW = frozenset({"div", "sqrt", "rsqrt", "floordiv", "mod"})


@dataclass(frozen=True)
class Cost:
    """Totals of one or several launches.

    `dots` pairs the columns of a product's second operand (a power of two, at most `WIDE`) with its floating operations;
    `matrix_ops` are those that matrix units do; `reduce_ops` are elements that enter a reduction, `gather_ops` elements that
    a computed index reads one by one, `vector_ops` all other elementwise work. `bytes` is memory traffic, `fresh` the bytes
    of each new array that is written and how many of that size there are, `tasks` how many independent parts there are.
    """

    dots: tuple[tuple[int, float], ...] = ()
    matrix_ops: float = 0.0
    vector_ops: float = 0.0
    reduce_ops: float = 0.0
    gather_ops: float = 0.0
    special_ops: float = 0.0
    costly_ops: float = 0.0
    bytes: float = 0.0
    fresh: tuple[tuple[float, int], ...] = ()
    launches: int = 0
    tasks: float = 1.0
    tier: str = ""
    """Of one launch; of several together it says nothing."""

    @property
    def dot_flops(self) -> float:
        return self.matrix_ops + sum(f for _, f in self.dots)

    @property
    def operations(self) -> float:
        """Everything computed, each counted once."""
        special = self.special_ops + self.costly_ops
        return self.dot_flops + self.vector_ops + self.reduce_ops + self.gather_ops + special

    def __add__(self, other: Cost) -> Cost:
        dots = dict(self.dots)
        for columns, flops in other.dots:
            dots[columns] = dots.get(columns, 0.0) + flops
        return Cost(
            tuple(sorted(dots.items())),
            self.matrix_ops + other.matrix_ops,
            self.vector_ops + other.vector_ops,
            self.reduce_ops + other.reduce_ops,
            self.gather_ops + other.gather_ops,
            self.special_ops + other.special_ops,
            self.costly_ops + other.costly_ops,
            self.bytes + other.bytes,
            (*self.fresh, *other.fresh),
            self.launches + other.launches,
            min(self.tasks, other.tasks),
        )


MATRIX_TIERS = frozenset({"mma", "wgmma"})
"""Tiers whose products run on matrix units."""
WIDE = 128
"""Columns from which a product is as fast as it gets."""


@dataclass(frozen=True)
class Pace:
    """How fast programs of a tier with matrix units are, whose elements stay in registers: `matrix_ops_per_s`, and the
    rates of elementwise work. `exposed` is the share of the lesser of both that the greater does not cover."""

    matrix_ops_per_s: float
    vector_ops_per_s: float
    reduce_ops_per_s: float
    special_ops_per_s: float
    exposed: float


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second with all its `units` (threads, multiprocessors); `launch_s` is the fixed cost of one
    launch and `task_s` that of one task on one unit.

    `dot_rates` pairs a product's columns with its floating operations a second, `copy_rates` a working set in bytes with
    the bytes a second that a copy of that size moves, `fresh_rates` the size of a new array with the bytes of it that are
    touched first in a second (the system hands out pages then); all smallest first. `matrix_ops_per_s` is that of matrix
    units, 0 where there are none, and `paces` has what holds by tier instead. `origin` says where they come from.
    """

    dot_rates: tuple[tuple[float, float], ...]
    vector_ops_per_s: float
    reduce_ops_per_s: float
    gather_ops_per_s: float
    special_ops_per_s: float
    costly_ops_per_s: float
    copy_rates: tuple[tuple[float, float], ...]
    fresh_rates: tuple[tuple[float, float], ...]
    launch_s: float
    task_s: float
    units: int
    origin: str
    matrix_ops_per_s: float = 0.0
    paces: tuple[tuple[str, Pace], ...] = ()


def interpolated(table: tuple[tuple[float, float], ...], x: float) -> float:
    """A rate at x, interpolated in logarithms between the entries; the ends hold beyond them."""
    below = [p for p in table if p[0] <= x]
    above = [p for p in table if p[0] > x]
    if not below or not above:
        return below[-1][1] if below else above[0][1]
    (a, y), (b, z) = below[-1], above[0]
    part = math.log(x / a) / math.log(b / a)
    return math.exp((1 - part) * math.log(y) + part * math.log(z))


CPU_RATES = Rates(
    dot_rates=((16.0, 55e9), (64.0, 110e9), (float(WIDE), 140e9)),
    vector_ops_per_s=25e9,
    reduce_ops_per_s=10e9,
    gather_ops_per_s=1e9,
    special_ops_per_s=3e9,
    costly_ops_per_s=2.5e9,
    copy_rates=((1e6, 10e9), (8e6, 16e9)),
    fresh_rates=((5e5, 20e9), (4e6, 14e9), (3e7, 8e9)),
    launch_s=3e-5,
    task_s=1.5e-8,
    units=2,
    origin="nominal figures of two cores with AVX-512, not of this machine",
)


def rates(target: Target) -> Rates:
    """Rates of a target: nominal for the CPU, data-sheet figures derated to simple kernels for CUDA."""
    if not isinstance(target, CudaTarget):
        return CPU_RATES
    f32 = (target.f32_tflops or 10.0) * 1e12
    bandwidth = (target.dram_gbytes_per_s or 500.0) * 1e9
    return Rates(
        dot_rates=((float(WIDE), 0.5 * f32),),
        vector_ops_per_s=0.25 * f32,
        reduce_ops_per_s=0.1 * f32,
        gather_ops_per_s=0.05 * f32,
        special_ops_per_s=f32 / 16,
        costly_ops_per_s=f32 / 64,
        copy_rates=((1.0, 0.8 * bandwidth),),
        fresh_rates=((1.0, math.inf),),
        launch_s=4e-6,
        task_s=1e-7,
        units=target.sms or 1,
        origin=f"data sheet of {target.name}, derated",
        matrix_ops_per_s=0.45 * (target.bf16_tflops or 0.0) * 1e12,
        paces=_paces(f32, (target.bf16_tflops or 0.0) * 1e12),
    )


def _paces(f32: float, bf16: float) -> tuple[tuple[str, Pace], ...]:
    """Fitted to attention as measured on an H200 (h200-hopper-attention.json, h200-attention.json): within 35% for full
    attention of 64 to 256 columns, 4,096 tokens (`tests/test_grouping_costs.py`)."""
    elementwise = 0.5 * f32, 0.33 * f32, f32 / 14
    return (
        (
            ("mma", Pace(0.45 * bf16, *elementwise, exposed=0.25)),
            ("wgmma", Pace(0.9 * bf16, *elementwise, exposed=0.0)),
        )
        if bf16
        else ()
    )


@dataclass(frozen=True)
class Prediction:
    """A predicted time and the resource that binds it."""

    seconds: float
    binds: str
    parts: dict[str, float] = field(default_factory=dict)


def predict(cost: Cost, r: Rates, hidden: Hidden = ALL_HIDDEN) -> Prediction:
    """The time of one launch. Memory and arithmetic overlap; vector, special and dot work share the same units and add up;
    matrix units have a tier's own pace.
    Fewer tasks than units leave units idle, and the last round of tasks leaves some. `hidden`: the shares of both rates
    that the warps resident at once can keep up."""
    rounds = max(1.0, -(-cost.tasks // r.units))
    busy = (cost.tasks / (rounds * r.units) if cost.tasks else 1.0) * hidden.arithmetic
    pace = dict(r.paces).get(cost.tier)
    at = pace or r
    parts = {
        "memory": cost.bytes / interpolated(r.copy_rates, max(cost.bytes, 1.0)) / hidden.memory,
        "dot": sum(f / interpolated(r.dot_rates, columns) for columns, f in cost.dots) / busy,
        "matrix": cost.matrix_ops / at.matrix_ops_per_s / busy if at.matrix_ops_per_s else 0.0,
        "vector": cost.vector_ops / at.vector_ops_per_s / busy,
        "reduce": cost.reduce_ops / at.reduce_ops_per_s / busy,
        "gather": cost.gather_ops / r.gather_ops_per_s / busy,
        "special": (cost.special_ops / at.special_ops_per_s + cost.costly_ops / r.costly_ops_per_s) / busy,
        "fresh": sum(n * size / interpolated(r.fresh_rates, max(size, 1.0)) for size, n in cost.fresh),
        "tasks": rounds * r.task_s,
        "launch": cost.launches * r.launch_s,
    }
    work = sum(parts[k] for k in ARITHMETIC)
    if pace is not None:
        work -= (1 - pace.exposed) * min(parts["matrix"], work - parts["matrix"])
    return Prediction(max(parts["memory"], work) + parts["launch"], binding(parts), parts)


ARITHMETIC = ("dot", "matrix", "vector", "reduce", "gather", "special", "fresh", "tasks")
"""Terms that share the units, and so add up, but for what a tier's `Pace` says of matrix units."""


def binding(parts: Mapping[str, float]) -> str:
    """The resource that a predicted time is mostly made of."""
    arithmetic = sum(parts[k] for k in ARITHMETIC)
    if parts["launch"] >= max(parts["memory"], arithmetic):
        return "launch"
    return "memory" if parts["memory"] >= arithmetic else max(ARITHMETIC, key=lambda k: parts[k])


def predict_module(
    module: tile.TileModule, extents: Mapping[str, int], r: Rates, target: Target | None = None
) -> Prediction:
    """The time of all launches, one after the other."""
    return predict_launches([estimate(p, extents, target) for p in module.programs], r)


def predict_launches(costs: Sequence[Cost], r: Rates, hidden: Iterable[Hidden] = ()) -> Prediction:
    """As `predict_module`, from the costs of the launches."""
    given = tuple(hidden) or (ALL_HIDDEN,) * len(costs)
    each = [predict(c, r, h) for c, h in zip(costs, given, strict=True)]
    parts = {k: sum(p.parts[k] for p in each) for k in ("memory", *ARITHMETIC, "launch")}
    return Prediction(sum(p.seconds for p in each), binding(parts), parts)


def estimate(program: tile.TileProgram, extents: Mapping[str, int], target: Target | None = None) -> Cost:
    """Cost of one launch at these extents (every extent of the program must be given), by the code that `target` has for
    them."""
    if isinstance(target, CudaTarget) and not tile.has_product(program):
        size = _Estimate(program, extents).value
        program = in_one_step(
            program,
            lambda a: a.tile is not None and a.lo is None and a.hi is None and size(a.extent) <= a.tile,
        )
    return _Estimate(program, extents).cost()


def module_cost(module: tile.TileModule, extents: Mapping[str, int], target: Target | None = None) -> Cost:
    """The costs of all launches, added up."""
    return together([estimate(p, extents, target) for p in module.programs])


def together(costs: Sequence[Cost]) -> Cost:
    """The costs of several launches, added up."""
    return reduce(lambda a, b: a + b, costs) if costs else Cost()


class _Estimate:
    def __init__(self, program: tile.TileProgram, extents: Mapping[str, int]) -> None:
        self.program = program = distinct(program)
        self.repeats = repeats(program)
        self.env: dict[str, float] = {**extents, **dict(program.statics)}
        self.size: dict[str, float] = {}  # lanes of each tile axis
        self.axes: dict[str, frozenset[str]] = {}  # axes of each named value
        for w in program.whole:
            self.size[w.name] = max(0.0, self.value(w.extent))
            self.env.setdefault(w.name, self.size[w.name] / 2)
        self.read: dict[str, float] = {}  # elements that loads take from each tensor
        self.dots: dict[int, float] = {}
        self.matrix_ops = 0.0
        self.vector_ops = self.reduce_ops = self.gather_ops = 0.0
        self.special_ops = self.costly_ops = 0.0
        self.tasks = 1.0

    def cost(self) -> Cost:
        self.body(self.program.body, 1.0)
        traffic = sum(map(self.traffic, self.program.params))
        dots = tuple(sorted(self.dots.items()))
        return Cost(
            dots, self.matrix_ops, self.vector_ops, self.reduce_ops, self.gather_ops, self.special_ops, self.costly_ops,
            traffic, tuple((self.tensor_bytes(p), 1) for p in self.program.params if p.mode == "out"), 1, self.tasks,
            self.program.tier,
        )  # fmt: skip

    def traffic(self, p: tile.Param) -> float:
        """Bytes of a tensor that pass through memory: each once, and no more than are asked for."""
        whole = self.tensor_bytes(p)
        read = min(whole, self.read.get(p.name, 0.0) * p.dtype.bytes)
        return read + (0.0 if p.mode == "in" else whole)

    def tensor_bytes(self, p: tile.Param) -> float:
        n = float(p.dtype.bytes)
        for e in p.shape:
            n *= max(0.0, self.value(e))
        return n

    def body(self, statements: Iterable[tile.Stmt], times: float) -> None:
        for s in statements:
            match s:
                case tile.Let():
                    self.axes[s.name] = frozenset(s.type.axes)
                    if not s.type.axes and s.type.dtype.is_integer:
                        self.env[s.name] = self.value(s.value)  # a loop bound
                    self.work(s.value, times)
                case tile.Store():
                    self.work(s.value, times)
                case tile.Grid():
                    steps = 1.0
                    for a in s.axes:
                        steps *= self.enter(a)
                    self.tasks = steps
                    self.body(s.body, times * steps)
                case tile.For():
                    for c in s.carries:
                        self.axes[c.name] = frozenset(c.type.axes)
                    steps = self.enter(s.axis)
                    # what one tile holds is not computed again
                    again = self.repeats.get(id(s)) if steps <= 1 else None
                    self.body(again.body if again else s.body, times * steps)
                    for y in s.yields:
                        self.work(y, times * steps)

    def enter(self, a: tile.LoopAxis) -> float:
        """Steps of a loop; its tile axis gets the average number of lanes, its index the middle of the range."""
        extent = max(0.0, self.value(a.extent))
        lo = max(0.0, self.value(a.lo)) if a.lo is not None else 0.0
        hi = min(extent, self.value(a.hi)) if a.hi is not None else extent
        span = max(0.0, hi - lo)
        self.env[a.name] = extent / 2
        if a.tile is None:
            return span
        whole = a.lo is None and a.hi is None
        steps = max(1.0, -(-span // a.tile) if whole else span / a.tile + 0.5) if span else 0.0
        self.size[a.name] = span / steps if steps and whole else min(float(a.tile), span)
        return steps

    def lanes(self, axes: frozenset[str]) -> float:
        n = 1.0
        for a in axes:
            n *= self.size.get(a, 1.0)
        return n

    def work(self, root: Expr, times: float) -> frozenset[str]:
        """Count the operations of an expression; answers its tile axes."""
        done: list[frozenset[str]] = []
        for e in reversed(list(tile.subexpressions(root))):  # operands before what they are operands of
            done.append(self.counted(e, [done.pop() for _ in tile.operands(e)], times))
        return done[0]

    def counted(self, e: Expr, axes: list[frozenset[str]], times: float) -> frozenset[str]:
        """Count one operation whose operands have these tile axes; answers its own."""
        below = frozenset[str]().union(*axes)
        match e:
            case tile.Name(name=n):
                return self.axes.get(n, frozenset())
            case tile.AxisIndex(axis=a):
                return frozenset({a}) & self.size.keys()
            case tile.Dot(over=over) if self.program.tier in MATRIX_TIERS:
                self.matrix_ops += 2 * times * self.lanes(below)
                return below - frozenset(over)
            case tile.Dot(over=over):
                columns = self.lanes(axes[1] - frozenset(over))
                width = min(WIDE, 1 << max(0, round(math.log2(columns)))) if columns >= 1 else 1
                self.dots[width] = self.dots.get(width, 0.0) + 2 * times * self.lanes(below)
                return below - frozenset(over)
            case tile.Reduce(over=over):
                self.reduce_ops += times * self.lanes(below)
                return below - frozenset(over)
            case tile.Load(tensor=name, subscripts=places):
                elements = times * self.lanes(below)
                self.read[name] = self.read.get(name, 0.0) + elements
                if _gathers(places, axes):
                    self.gather_ops += elements
                else:
                    self.vector_ops += elements
            case tile.Apply(op=op):
                self.operation(op, times * self.lanes(below))
        return below

    def operation(self, op: str, n: float) -> None:
        if op in COSTLY:
            self.costly_ops += n
        elif op in SPECIAL:
            self.special_ops += n
        else:
            self.vector_ops += n * (4 if op in SLOW else 1)

    def value(self, root: Expr) -> float:
        """A subscript or bound at the middle of the axes; what tensors hold is taken as in the middle of the extent."""
        order, waiting = [], [root]
        while waiting:
            order.append(waiting.pop())
            waiting.extend(_arithmetic(order[-1]))
        done: list[float] = []
        for e in reversed(order):
            args = [done.pop() for _ in _arithmetic(e)][::-1]
            done.append(self.valued(e, args))
        return done[0]

    def valued(self, e: Expr, args: list[float]) -> float:
        match e:
            case tile.Const(value=v):
                return float(v)
            case tile.ExtentRef(name=n) | tile.AxisIndex(axis=n):
                return float(self.env[n])
            case tile.Name(name=n) if n in self.env:
                return float(self.env[n])
            case tile.Reduce() | tile.Cast():
                return args[0]
            case tile.Apply(op=op) if op in _INTEGER:
                return _INTEGER[op](*args)
        return max(self.env.values(), default=0.0) / 2


def _gathers(places: Sequence[Expr], axes: Sequence[frozenset[str]]) -> bool:
    """Do the elements of a read lie where data says, each elsewhere? Rows that data choose lie side by side within.
    `axes`: those of each subscript."""
    if not places:
        return False
    row = axes[-1] if isinstance(places[-1], tile.AxisIndex) else frozenset[str]()
    return any(_from_data(p) and not (row and row.isdisjoint(a)) for p, a in zip(places, axes, strict=True))


def _from_data(place: Expr) -> bool:
    return any(isinstance(x, tile.Load | tile.Name) for x in tile.subexpressions(place))


def _arithmetic(e: Expr) -> tuple[Expr, ...]:
    """The operands that the middle of a value is computed from."""
    known = isinstance(e, tile.Reduce | tile.Cast) or (isinstance(e, tile.Apply) and e.op in _INTEGER)
    return tile.operands(e) if known else ()


def _floordiv(a: float, b: float) -> float:
    return a // b if b else 0.0


_INTEGER: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "min": min,
    "max": max,
    "floordiv": _floordiv,
    "mod": lambda a, b: a % b if b else 0.0,
}
