"""Tier `wgmma` on an sm_90a device against cuBLAS, cuDNN, torch, Triton: `python benchmarks/hopper.py SUITE [--json FILE]`.

Kernels come from text with the default schedule. `depths` has heads of 32 to 248 columns, `decode` few queries against
many keys, `scores` score functions and domains beside plain attention, `shapes` are products of real transformers,
`naive` sets the same text with `fuse none` beside, with the memory that a call takes, `variants` sets schedules beside
each other, `repeats` runs a kernel 100 times and compares bits, `small` times a short call on the host and in a graph
of calls, `all` is everything. `gpu.py` says how a case is checked, timed and recorded; `--only` works here too. Machine
code is made first, in several processes, so that a run's device time goes to measuring. `--list` needs torch but no
device: it shows every case with its tier and what its schedule comes to.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import gpu  # first: it says what to do where torch is missing
import torch
from gpu import Case, drawn, exact_attention
from hopper_cases import (
    GATED,
    GELU,
    Kernel,
    attention_case,
    attentions,
    decode,
    decode_case,
    depths,
    epilogue_cases,
    naive,
    product_case,
    products,
    repeats,
    scores,
    shapes,
    sizes,
    small,
    variant_case,
    variants,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def repeated(name: str, kernel: Kernel, what: Any) -> list[dict[str, Any]]:
    """100 runs against the first."""
    case = (product_case if "gemm" in name else attention_case)(name, kernel, what)
    call = case.variants["tileloom"]
    off = gpu.error(call(), case.reference())
    first = call().clone()
    different = sum(not torch.equal(call(), first) for _ in range(100))
    row = {"case": name, "variant": "tileloom", "error": off, "runs": 100, "different": different}
    if different or not off <= case.tolerance:
        row["failed"] = f"{different} of 100 runs differ, error {off:.2e}"
    return [row]


def against_naive(make: Callable[[], Case]) -> list[dict[str, Any]]:
    """The derived kernel and the same text with `fuse none`: times, and the bytes that a call allocates."""
    case = make()
    rows = gpu.measure(case)
    for row in rows:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if "failed" not in row:
            case.variants[row["variant"]]()
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return rows


def timed_small(name: str, kernel: Kernel, causal: bool) -> list[dict[str, Any]]:
    """Host time of a call that waits for nothing, and device time of a call in a CUDA graph of 20, a median of 15 each."""
    q, k, v = (drawn(1, 16, 1024, 128, dtype=torch.bfloat16) for _ in range(3))
    w, out, ours, scale = torch.rand(16, device="cuda"), torch.empty_like(q), kernel.make(), 128**-0.5

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    want, rows = exact_attention(q, k, v, causal), []
    for variant, call in {"tileloom": lambda: ours(q, k, v, w, scale, out=out), "cudnn": cudnn}.items():
        off = gpu.error(call(), want)
        row = {
            "case": name,
            "variant": variant,
            "error": off,
            "host_us": host_us(call),
            "graph_us": graph_us(call),
        }
        rows.append(row if off <= 1e-2 else {**row, "failed": f"error {off:.2e}"})
    return rows


def host_us(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        found.append((time.perf_counter() - start) / 20 * 1e6)
    return statistics.median(found)


def graph_us(call: Callable[[], Any]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    found = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 20 * 1e3)
    return statistics.median(found)


SUITES = (
    "gemm",
    "attention",
    "depths",
    "decode",
    "scores",
    "shapes",
    "naive",
    "variants",
    "repeats",
    "small",
)


ATTENDED = {"attention": attentions, "scores": scores, "depths": depths}


def kernels_of(suite: str) -> dict[str, Kernel]:
    """Every kernel of a suite, by case and variant."""
    if suite in ATTENDED or suite in ("gemm", "shapes", "decode"):
        made: Any = {**ATTENDED, "gemm": products, "shapes": shapes, "decode": decode}[suite]()
        found = {n: k for n, k, _ in made}
        if suite == "gemm":
            found |= {
                f"epilogues {x[7:13]}": Kernel(x, "bf16", sizes(4096, 4096, 4096)) for x in (GELU, GATED)
            }
        return found
    if suite == "naive":
        return {n: k for n, (k, _) in naive().items()}
    if suite == "variants":
        return {f"{n}: {v}": k for n, (kernels, _) in variants().items() for v, k in kernels.items()}
    return {n: k for n, (k, _) in (repeats() if suite == "repeats" else small()).items()}


def rows_of(suite: str) -> Mapping[str, Callable[[], list[dict[str, Any]]]]:
    """What measures each case, by its name."""

    def through(make: Callable[[], list[Case]]) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [row for case in make() for row in gpu.measure(case)]

    if suite in ATTENDED:
        return {n: through(lambda n=n, k=k, f=f: [attention_case(n, k, f)]) for n, k, f in ATTENDED[suite]()}
    if suite == "decode":
        return {n: through(lambda n=n, k=k, f=f: [decode_case(n, k, f)]) for n, k, f in decode()}
    if suite == "variants":
        return {n: through(lambda n=n: [variant_case(n)]) for n in variants()}
    if suite == "naive":
        return {n: (lambda make=make: against_naive(make)) for n, (_, make) in naive().items()}
    if suite == "repeats":
        return {n: (lambda n=n, k=k, w=w: repeated(n, k, w)) for n, (k, w) in repeats().items()}
    if suite == "small":
        return {n: (lambda n=n, k=k, c=c: timed_small(n, k, c)) for n, (k, c) in small().items()}
    made = {
        n: through(lambda n=n, k=k, f=f: [product_case(n, k, f)])
        for n, k, f in (shapes() if suite == "shapes" else products())
    }
    return made if suite == "shapes" else {**made, "epilogues": through(epilogue_cases)}


def assembled(kernel: Kernel) -> str:
    try:
        return kernel.assemble()
    except Exception as reason:  # the case itself will say it again
        return f"{type(reason).__name__}: {reason}"[:200]


def shown(row: dict[str, Any]) -> str:
    more = [f"{k} {row[k]:.1f}" for k in ("host_us", "graph_us") if k in row]
    more += [f"{row['different']} of {row['runs']} runs differ"] if "runs" in row else []
    return f"{row['case']:40} {row['variant']:20} {', '.join(more)}" if more else gpu.shown(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, "all"])
    parser.add_argument("--json", help="where the rows go; of `all`, a folder")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--list", action="store_true", help="show the cases; needs no device")
    given = parser.parse_args()
    suites = SUITES if given.suite == "all" else (given.suite,)
    kernels = {n: k for suite in suites for n, k in kernels_of(suite).items() if given.only in n}
    if given.list:
        for name, kernel in kernels.items():
            print(f"{name}: {kernel.told()}", flush=True)
        return
    gpu.require_device()
    torch.manual_seed(0)
    distinct = dict.fromkeys(kernels.values())
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        tiers = dict(zip(distinct, pool.map(assembled, distinct), strict=True))
    print({n: tiers[k] for n, k in kernels.items()}, flush=True)
    for suite in suites:
        path = given.json and (
            os.path.join(given.json, f"h200-hopper-{suite}.json") if given.suite == "all" else given.json
        )
        measure_suite(suite, given.only, path)


def measure_suite(suite: str, only: str, path: str | None) -> None:
    rows: list[dict[str, Any]] = []
    for name, measure in rows_of(suite).items():
        if only not in name:
            continue
        found = measure()
        rows += found
        if path:  # after each case, so that a run that is stopped leaves what it measured
            gpu.record(path, f"hopper-{suite}", rows)
        for row in found:
            print(shown(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
