"""The cost model: what a tile program moves and computes for given extents, and the time a machine's rates predict for it.

Counts come from the tile program itself, so recomputation in a loop nest or per tile is counted as it will happen. Memory
traffic counts each tensor once per program (tiles of one launch share a cache); time is the greater of memory and
arithmetic plus the launches. All figures are estimates for choosing between variants; measuring is `explain --measure`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from . import tile_ir as tile
from .target import CudaTarget, Target
from .tile_ir import Expr

SPECIAL = frozenset({"exp", "exp2", "log", "log2", "tanh", "erf", "sin", "cos", "pow"})
SLOW = frozenset({"div", "sqrt", "rsqrt", "floordiv", "mod"})


@dataclass(frozen=True)
class Cost:
    """Totals of one or several launches. `bytes` is memory traffic, `tasks` how many independent parts there are."""

    dot_flops: float = 0.0
    vector_ops: float = 0.0
    special_ops: float = 0.0
    bytes: float = 0.0
    launches: int = 0
    tasks: float = 1.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.dot_flops + other.dot_flops,
            self.vector_ops + other.vector_ops,
            self.special_ops + other.special_ops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            min(self.tasks, other.tasks),
        )


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second with all its `units` (threads, multiprocessors); `launch_s` is the fixed cost of one
    launch. `copy_rates` pairs a working set in bytes with the bytes a second that a copy of that size moves, smallest
    first: caches make small ones faster. `origin` says where the figures come from."""

    dot_flops_per_s: float
    vector_ops_per_s: float
    special_ops_per_s: float
    copy_rates: tuple[tuple[float, float], ...]
    launch_s: float
    units: int
    origin: str

    def bytes_per_s(self, working_set: float) -> float:
        """The copy rate at a working set, interpolated in the logarithm of the size; the ends hold beyond them."""
        below = [x for x in self.copy_rates if x[0] <= working_set]
        above = [x for x in self.copy_rates if x[0] > working_set]
        if not below or not above:
            return (below or above)[-1 if below else 0][1]
        (a, x), (b, y) = below[-1], above[0]
        part = math.log(working_set / a) / math.log(b / a)
        return math.exp((1 - part) * math.log(x) + part * math.log(y))


CPU_RATES = Rates(
    60e9, 8e9, 1e9, ((1.0, 15e9),), 5e-6, 2, "nominal figures of two cores, not of this machine"
)


def rates(target: Target) -> Rates:
    """Rates of a target: nominal for the CPU, data-sheet figures derated to simple kernels for CUDA."""
    if not isinstance(target, CudaTarget):
        return CPU_RATES
    f32 = (target.f32_tflops or 10.0) * 1e12
    bandwidth = (target.dram_gbytes_per_s or 500.0) * 1e9
    origin = f"data sheet of {target.name}, derated"
    return Rates(0.5 * f32, 0.25 * f32, f32 / 16, ((1.0, 0.8 * bandwidth),), 4e-6, target.sms or 1, origin)


@dataclass(frozen=True)
class Prediction:
    """A predicted time and the resource that binds it."""

    seconds: float
    binds: str
    parts: dict[str, float] = field(default_factory=dict)


def predict(cost: Cost, r: Rates) -> Prediction:
    """The time of one launch. Memory and arithmetic overlap; vector, special and dot work share the same units and add up.
    Fewer tasks than units leave units idle, and the last round of tasks leaves some."""
    rounds = -(-cost.tasks // r.units)
    busy = cost.tasks / (rounds * r.units) if cost.tasks else 1.0
    parts = {
        "memory": cost.bytes / r.bytes_per_s(cost.bytes),
        "dot": cost.dot_flops / r.dot_flops_per_s / busy,
        "vector": cost.vector_ops / r.vector_ops_per_s / busy,
        "special": cost.special_ops / r.special_ops_per_s / busy,
        "launch": cost.launches * r.launch_s,
    }
    arithmetic = parts["dot"] + parts["vector"] + parts["special"]
    return Prediction(max(parts["memory"], arithmetic) + parts["launch"], binding(parts), parts)


def binding(parts: Mapping[str, float]) -> str:
    """The resource that a predicted time is mostly made of."""
    arithmetic = parts["dot"] + parts["vector"] + parts["special"]
    if parts["launch"] >= max(parts["memory"], arithmetic):
        return "launch"
    return (
        "memory"
        if parts["memory"] >= arithmetic
        else max(("dot", "vector", "special"), key=lambda k: parts[k])
    )


def predict_module(module: tile.TileModule, extents: Mapping[str, int], r: Rates) -> Prediction:
    """The time of all launches, one after the other."""
    each = [predict(estimate(p, extents), r) for p in module.programs]
    parts = {k: sum(p.parts[k] for p in each) for k in ("memory", "dot", "vector", "special", "launch")}
    return Prediction(sum(p.seconds for p in each), binding(parts), parts)


def estimate(program: tile.TileProgram, extents: Mapping[str, int]) -> Cost:
    """Cost of one launch at these extents (every extent of the program must be given)."""
    return _Estimate(program, extents).cost()


def module_cost(module: tile.TileModule, extents: Mapping[str, int]) -> Cost:
    total = Cost()
    for p in module.programs:
        total += estimate(p, extents)
    return total


class _Estimate:
    def __init__(self, program: tile.TileProgram, extents: Mapping[str, int]) -> None:
        self.program = program
        self.env: dict[str, float] = {**extents, **dict(program.statics)}
        self.size: dict[str, float] = {}  # lanes of each tile axis
        self.axes: dict[str, frozenset[str]] = {}  # axes of each named value
        for w in program.whole:
            self.size[w.name] = max(0.0, self.value(w.extent))
            self.env.setdefault(w.name, self.size[w.name] / 2)
        self.dot_flops = self.vector_ops = self.special_ops = 0.0
        self.tasks = 1.0

    def cost(self) -> Cost:
        self.body(self.program.body, 1.0)
        traffic = sum(self.tensor_bytes(p) * (2 if p.mode == "inout" else 1) for p in self.program.params)
        return Cost(self.dot_flops, self.vector_ops, self.special_ops, traffic, 1, self.tasks)

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
                    self.body(s.body, times * steps)
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

    def work(self, e: Expr, times: float) -> frozenset[str]:
        """Count the operations of an expression; answers its tile axes."""
        match e:
            case tile.Name(name=n):
                return self.axes.get(n, frozenset())
            case tile.AxisIndex(axis=a):
                return frozenset({a}) & self.size.keys()
            case tile.Dot(a=a, b=b, over=over):
                axes = self.work(a, times) | self.work(b, times)
                self.dot_flops += 2 * times * self.lanes(axes)
                return axes - frozenset(over)
            case tile.Reduce(arg=x, over=over):
                axes = self.work(x, times)
                self.vector_ops += times * self.lanes(axes)
                return axes - frozenset(over)
        below: frozenset[str] = frozenset().union(*(self.work(x, times) for x in tile.operands(e)))
        if isinstance(e, tile.Load):
            self.vector_ops += times * self.lanes(below)
        elif isinstance(e, tile.Apply):
            self.operation(e.op, times * self.lanes(below))
        return below

    def operation(self, op: str, n: float) -> None:
        if op in SPECIAL:
            self.special_ops += n
        else:
            self.vector_ops += n * (4 if op in SLOW else 1)

    def value(self, e: Expr) -> float:
        """A subscript or bound at the middle of the axes; what tensors hold is taken as in the middle of the extent."""
        match e:
            case tile.Const(value=v):
                return float(v)
            case tile.ExtentRef(name=n) | tile.AxisIndex(axis=n):
                return float(self.env[n])
            case tile.Reduce(arg=x) | tile.Cast(arg=x):
                return self.value(x)
            case tile.Apply(op=op, args=args) if op in _INTEGER:
                return _INTEGER[op](*(self.value(x) for x in args))
        return max(self.env.values(), default=0.0) / 2


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
