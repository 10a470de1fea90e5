"""Machine facts for the cost model, measured once with kernels of the language itself, so that they are rates which the
generated code reaches. No figure here is fitted to any program."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from pathlib import Path

import numpy as np

from ..compiler.cost import WIDE, Cost, Rates, module_cost
from ..compiler.evaluate import evaluate
from ..compiler.pipeline import Compilation, compile_kernel
from ..compiler.target import CPU
from ..compiler.tensor_ir import Tensor
from ..dsl.load import parse
from ..dsl.records import dataclass
from .bench import processor, repeats_of, sample_s
from .kernels import build
from .launch import Kernel
from .threads import threads


def _chain(name: str, steps: int) -> str:
    """A kernel of 5 + 4 steps elementwise operations, reads of tensors counted, on values that are needed twice."""
    pairs = [
        f"a{i}[m, n] = b{i - 1}[m, n] * 0.75 + a{i - 1}[m, n]\nb{i}[m, n] = a{i}[m, n] * a{i}[m, n] - b{i - 1}[m, n]"
        for i in range(1, steps + 1)
    ]
    first = "a0[m, n] = x[m, n] * 0.5 + 1.5\nb0[m, n] = a0[m, n] * a0[m, n] - 0.25"
    last = f"y[m, n] = b{steps}[m, n] * 0.125 + a{steps}[m, n]"
    return f"kernel {name}(x: f32[M, N]) -> y: f32[M, N] {{\n" + "\n".join([first, *pairs, last]) + "\n}\n"


PROBES = """
kernel copied(x: f32[N]) -> y: f32[N] { y[n] = x[n] }
kernel special(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = exp(x[m, n]) + exp(-x[m, n]) }
kernel costly(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = tanh(x[m, n]) + tanh(x[m, n] + 1) }
kernel summed(x: f32[N], s: f32[M]) -> y: f32[M] { y[m] = sum[n](max(x[n], s[m])) }
kernel gathered(x: f32[V], id: i32[N]) -> y: f32[N] { y[n] = x[id[n]] }
kernel small(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = x[m, n] }
kernel product(x: f32[M, K], w: f32[K, N]) -> y: f32[M, N] { y[m, n] = sum[k](x[m, k] * w[k, n]) }
"""
PROBES += _chain("short_chain", 1) + _chain("long_chain", 9)
"""What is timed. The rate of elementwise work is that of the operations which one chain has more than the other, both
moving the same bytes; `special` and `summed` work on tiles that stay in the cache."""
SIZES = {
    "short_chain": {"M": 512, "N": 1024},
    "long_chain": {"M": 512, "N": 1024},
    "special": {"M": 512, "N": 1024},
    "costly": {"M": 512, "N": 1024},
    "summed": {"M": 4096, "N": 1024},
    "gathered": {"N": 1 << 19, "V": 512},
    "small": {"M": 1 << 15, "N": 4},
}
COLUMNS = (16, 64, 1024)
"""Columns of the products, of 1024 rows and 1024 terms each."""
COPIED = (1 << 17, 1 << 20, 1 << 23, 1 << 26)
"""Elements copied: from what a core's cache holds to far more than any cache."""
SAMPLE_S = 5e-3
ROUNDS = 16
"""Every probe has a sample in each round, so that a slow moment of the machine does not make one rate slow."""


@dataclass
class Probe:
    """One kernel at one size: its cost by the model, a call of it, whether that makes new arrays, and seconds taken."""

    cost: Cost
    call: Callable[[], object]
    fresh: bool
    taken: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The lower quartile: what else runs on the machine only ever adds."""
        return statistics.quantiles(self.taken, n=4)[0]


def measure() -> Rates:
    """The rates of this machine with all threads of the runtime; about ten seconds, most of it compiling."""
    tiny = _probe("copied", {"N": 16}, fresh=True)
    into = _probe("copied", {"N": 16})
    copies = [_probe("copied", {"N": n}) for n in COPIED]
    fresh = [_probe("copied", {"N": n}, fresh=True) for n in COPIED]
    products = [_probe("product", {"M": 1024, "K": 1024, "N": n}) for n in COLUMNS]
    named = {name: _probe(name, sizes) for name, sizes in SIZES.items()}
    _time([tiny, into, *copies, *fresh, *products, *named.values()])

    def beyond_launch(p: Probe) -> float:
        return max(p.seconds - (tiny if p.fresh else into).seconds, 1e-9)

    short, long = named["short_chain"], named["long_chain"]
    more = long.cost.vector_ops - short.cost.vector_ops
    vector_rate = more / max(long.seconds - short.seconds, 1e-9)

    def rate(name: str, counted: Callable[[Cost], float]) -> float:
        """Operations a second, what is neither launch nor plain elementwise work."""
        p = named[name]
        return counted(p.cost) / max(beyond_launch(p) - p.cost.vector_ops / vector_rate, 1e-9)

    return Rates(
        dot_rates=tuple(
            (float(min(n, WIDE)), p.cost.dot_flops / beyond_launch(p))
            for n, p in zip(COLUMNS, products, strict=True)
        ),
        vector_ops_per_s=vector_rate,
        # With the read and the one operation before it, so that no difference of two small times decides.
        reduce_ops_per_s=named["summed"].cost.reduce_ops / beyond_launch(named["summed"]),
        gather_ops_per_s=rate("gathered", lambda c: c.gather_ops),
        special_ops_per_s=rate("special", lambda c: c.special_ops),
        costly_ops_per_s=rate("costly", lambda c: c.costly_ops),
        copy_rates=tuple((p.cost.bytes, p.cost.bytes / beyond_launch(p)) for p in copies),
        fresh_rates=tuple(
            (4.0 * n, 4.0 * n / max(beyond_launch(new) - beyond_launch(old), 1e-9))
            for n, old, new in zip(COPIED, copies, fresh, strict=True)
        ),
        launch_s=tiny.seconds,
        task_s=beyond_launch(named["small"]) * threads() / named["small"].cost.tasks,
        units=threads(),
        origin=f"measured on {processor()} with {threads()} threads",
    )


def _time(probes: Sequence[Probe]) -> None:
    for p in probes:
        p.call()
    repeats = [repeats_of(sample_s(p.call, 1), SAMPLE_S) for p in probes]
    for _ in range(ROUNDS):
        for p, times in zip(probes, repeats, strict=True):
            p.taken.append(sample_s(p.call, times))


def _probe(name: str, sizes: dict[str, int], fresh: bool = False) -> Probe:
    """`fresh`: it writes to a new array each time."""
    compilation = compile_kernel(parse(PROBES)[name], CPU, sizes)
    return Probe(module_cost(compilation.module, sizes), _call(compilation, sizes, fresh), fresh)


def _call(compilation: Compilation, sizes: dict[str, int], fresh: bool) -> Callable[[], object]:
    kernel = Kernel(compilation.graph, compilation.module, build(compilation.source))
    rng = np.random.default_rng(0)

    def shape(t: Tensor) -> tuple[int, ...]:
        return tuple(int(evaluate(e, sizes, {})) for e in t.shape)

    tensors = [
        rng.standard_normal(shape(t), np.float32)
        if t.dtype.is_float
        else rng.integers(0, 512, shape(t), np.int32)
        for t in compilation.graph.tensors.values()
    ]
    outputs = tuple(np.zeros(shape(t), np.float32) for t in compilation.graph.outputs.values())
    into = outputs if len(outputs) > 1 else outputs[0]
    return lambda: kernel(*tensors) if fresh else kernel(*tensors, out=into)


def save(rates: Rates, path: Path) -> None:
    path.write_text(json.dumps(asdict(rates), indent=2) + "\n")


def load(path: Path) -> Rates:
    facts = json.loads(path.read_text())
    tables = {
        k: tuple((float(a), float(b)) for a, b in facts[k])
        for k in ("copy_rates", "dot_rates", "fresh_rates")
    }
    return Rates(**{**facts, **tables})
