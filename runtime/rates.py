"""Machine facts for the cost model, measured once with kernels of the language itself, so that they are rates which the
generated code reaches. No figure here is fitted to any program."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ..compiler.cost import Cost, Rates, module_cost
from ..compiler.pipeline import Compilation, compile_kernel
from ..compiler.target import CPU
from ..dsl.load import parse
from .kernels import build
from .launch import Kernel
from .threads import threads

PROBES = """
kernel copied(x: f32[N]) -> y: f32[N] { y[n] = x[n] }
kernel arithmetic(x: f32[M, N]) -> y: f32[M, N] {
    a[m, n] = x[m, n] * 0.5 + 1.5
    b[m, n] = a[m, n] * a[m, n] - 0.25
    c[m, n] = b[m, n] * 0.75 + a[m, n]
    d[m, n] = c[m, n] * c[m, n] - b[m, n]
    y[m, n] = d[m, n] * 0.125 + c[m, n] * a[m, n]
}
kernel special(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = exp(x[m, n]) + exp(-x[m, n]) }
kernel product(x: f32[M, K], w: f32[K, N]) -> y: f32[M, N] { y[m, n] = sum[k](x[m, k] * w[k, n]) }
"""
"""One probe for each rate. `arithmetic` works on tiles that stay in the cache; `copied` on far more than fits."""
SIZES = {
    "copied": {"N": 1 << 26},
    "arithmetic": {"M": 512, "N": 1024},
    "special": {"M": 512, "N": 1024},
    "product": {"M": 1024, "N": 1024, "K": 1024},
}
SAMPLES = 15


def measure() -> Rates:
    """The rates of this machine with all threads of the runtime; about ten seconds, most of it compiling."""
    launch_s = _seconds("copied", {"N": 16})[0]
    copy_s, copied = _seconds("copied", SIZES["copied"])
    product_s, product = _seconds("product", SIZES["product"])
    vector_s, arithmetic = _seconds("arithmetic", SIZES["arithmetic"])
    vector_rate = arithmetic.vector_ops / (vector_s - launch_s)
    special_s, special = _seconds("special", SIZES["special"])
    special_rate = special.special_ops / max(special_s - launch_s - special.vector_ops / vector_rate, 1e-9)
    return Rates(
        dot_flops_per_s=product.dot_flops / (product_s - launch_s),
        vector_ops_per_s=vector_rate,
        special_ops_per_s=special_rate,
        bytes_per_s=copied.bytes / copy_s,
        launch_s=launch_s,
        units=threads(),
        origin=f"measured on {platform.processor() or platform.machine()} with {threads()} threads",
    )


def _seconds(name: str, sizes: dict[str, int]) -> tuple[float, Cost]:
    """Median time of a probe, and its cost by the model."""
    compilation = compile_kernel(parse(PROBES)[name], CPU, sizes)
    call = _call(compilation, sizes)
    call()
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples), module_cost(compilation.module, sizes)


def _call(compilation: Compilation, sizes: dict[str, int]) -> Callable[[], object]:
    kernel = Kernel(compilation.graph, compilation.module, build(compilation.source))
    rng = np.random.default_rng(0)
    shape = {name: tuple(sizes[e.name] for e in t.shape) for name, t in compilation.graph.tensors.items()}  # type: ignore[attr-defined]
    tensors = [rng.standard_normal(s, np.float32) for s in shape.values()]
    outputs = [
        np.zeros(tuple(sizes[e.name] for e in t.shape), np.float32)
        for t in compilation.graph.outputs.values()
    ]  # type: ignore[attr-defined]
    return lambda: kernel(*tensors, out=outputs[0])


def save(rates: Rates, path: Path) -> None:
    path.write_text(json.dumps(asdict(rates), indent=2) + "\n")


def load(path: Path) -> Rates:
    return replace(Rates(**json.loads(path.read_text())))
