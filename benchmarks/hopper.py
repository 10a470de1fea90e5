"""Tier `wgmma` on an sm_90a device against cuBLAS, cuDNN, torch, Triton: `python benchmarks/hopper.py SUITE [--json FILE]`.

Kernels come from text with the default schedule. `variants` sets schedules beside each other, `shapes` are products of real
transformers, `repeats` runs a kernel 100 times and compares bits, `small` times a short call on the host and in a graph of
calls, `all` is everything. `gpu.py` says how a case is checked, timed and recorded; `--only` works here too. Machine code is
made first, in several processes, so that a run's device time goes to measuring. `--list` needs no device: it shows every
case with its tier and what its schedule comes to.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import gpu
import torch
from gpu import Case, drawn, exact_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.dsl.types import DType

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Kernel:
    """A kernel's text, its element type, and the sizes it is compiled for."""

    text: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    lines: str = ""

    @property
    def name(self) -> str:
        return self.text.split()[1].partition("<")[0]

    @property
    def program(self) -> Any:
        return tl.parse(self.text)[self.name]

    @property
    def schedule(self) -> str | None:
        """With the lines of a variant; None for the default."""
        return f"schedule s for {self.name} on {SM_90A.name} {{\n{self.lines}\n}}" if self.lines else None

    def make(self) -> Any:
        return tl.compile(self.program, target=None if self.lines else "cuda", schedule=self.schedule)

    def compiled(self) -> Compilation:
        stated = parse_schedule(self.schedule) if self.schedule else None
        return compile_kernel(
            self.program, SM_90A, dict(self.sizes), dtypes={"T": DType(self.dtype)}, schedule=stated
        )

    def told(self) -> str:
        """The tier, and how its programs run."""
        made = self.compiled()
        return "; ".join(
            [made.module.programs[0].tier, *(r.message for r in made.remarks if r.name == "roles")]
        )

    def assemble(self) -> str:
        """Into the cache folder; gives the tier."""
        from tileloom.runtime import cuda

        made = self.compiled()
        for variants in cuda.variants(made.source).values():
            fits = next(
                v for v in variants if all(dict(self.sizes)[e] % n == 0 for e, n in v.multiples.items())
            )
            cuda.machine_code(made.source, fits.name, SM_90A)
        return made.module.programs[0].tier


def product_text(a: str, b: str) -> str:
    return (
        f"kernel product<T: bf16 | f16>(a: T[{a.upper()}], b: T[{b.upper()}]) -> c: T[M, N] {{\n"
        f"  c[m, n] = sum[k](a[{a}] * b[{b}])\n}}\n"
    )


GELU = """kernel biased<T: bf16 | f16>(a: T[M, K], b: T[N, K], bias: T[N]) -> c: T[M, N] {
  s[m, n] = sum[k](a[m, k] * b[n, k])
  c[m, n] = gelu(s[m, n] + bias[n])
}
"""
GATED = """kernel gated<T: bf16 | f16>(a: T[M, K], g: T[N, K], u: T[N, K]) -> c: T[M, N] {
  s[m, n] = sum[k](a[m, k] * g[n, k])
  t[m, n] = sum[k](a[m, k] * u[n, k])
  c[m, n] = silu(s[m, n]) * t[m, n]
}
"""
SQUARES = (1024, 2048, 4096, 8192)
SHAPES = ((64, 4096, 4096), (512, 6144, 4096), (2048, 11008, 4096), (4096, 4104, 1000), (16384, 1024, 4096))


def sizes(m: int, n: int, k: int) -> tuple[tuple[str, int], ...]:
    return (("M", m), ("N", n), ("K", k))


def products() -> list[tuple[str, Kernel, tuple[int, int, int]]]:
    found = [
        (f"gemm NT bf16 {n}", Kernel(product_text("m, k", "n, k"), "bf16", sizes(n, n, n)), (n, n, n))
        for n in SQUARES
    ]
    for name, a, b in (("NN", "m, k", "k, n"), ("TN", "k, m", "k, n"), ("TT", "k, m", "n, k")):
        found.append(
            (
                f"gemm {name} bf16 4096",
                Kernel(product_text(a, b), "bf16", sizes(4096, 4096, 4096)),
                (4096,) * 3,
            )
        )
    found.append(
        (
            "gemm NT f16 4096",
            Kernel(product_text("m, k", "n, k"), "f16", sizes(4096, 4096, 4096)),
            (4096,) * 3,
        )
    )
    for m, n, k in SHAPES:
        found.append(
            (
                f"gemm NT bf16 {m}x{n}x{k}",
                Kernel(product_text("m, k", "n, k"), "bf16", sizes(m, n, k)),
                (m, n, k),
            )
        )
    return found


def product_case(name: str, kernel: Kernel, shape: tuple[int, int, int]) -> Case:
    m, n, k = shape
    dtype = DTYPES[kernel.dtype]
    turned_a, turned_b = "a: T[K, M]" in kernel.text, "b: T[N, K]" in kernel.text
    a = drawn(*((k, m) if turned_a else (m, k)), dtype=dtype)
    b = drawn(*((n, k) if turned_b else (k, n)), dtype=dtype)
    left, right = a.T if turned_a else a, b.T if turned_b else b
    ours, out, other = (
        kernel.make(),
        torch.empty(m, n, device="cuda", dtype=dtype),
        torch.empty(m, n, device="cuda", dtype=dtype),
    )
    calls = {
        "tileloom": lambda: ours(a, b, out=out),
        "cublas": lambda: torch.mm(left, right, out=other),
        **gpu.raced(lambda: gpu.triton.product(left, right)),
    }
    return Case(name, calls, lambda: left.double() @ right.double(), 1e-2, 0, 2.0 * m * n * k)


def epilogue_cases() -> list[Case]:
    cases = []
    for n in (2048, 4096, 8192):
        a, b, u = (drawn(n, n, dtype=torch.bfloat16) * n**-0.5 for _ in range(3))
        bias = drawn(n, dtype=torch.bfloat16)
        one, two = Kernel(GELU, "bf16", sizes(n, n, n)).make(), Kernel(GATED, "bf16", sizes(n, n, n)).make()
        cases.append(
            Case(
                f"gemm + bias + gelu NT bf16 {n}",
                {
                    "tileloom": lambda a=a, b=b, bias=bias, one=one: one(a, b, bias),
                    "cublasLt fused": lambda a=a, b=b, bias=bias: torch._addmm_activation(
                        bias, a, b.T, use_gelu=True
                    ),
                },
                lambda a=a, b=b, bias=bias: gelu(
                    a.double() @ b.double().T + bias.double(), approximate="tanh"
                ),
                1e-2,
                0,
                2.0 * n**3,
            )
        )
        cases.append(
            Case(
                f"silu(a·g) a·u NT bf16 {n}",
                {
                    "tileloom": lambda a=a, b=b, u=u, two=two: two(a, b, u),
                    "cublas twice + torch": lambda a=a, b=b, u=u: silu(a @ b.T) * (a @ u.T),
                },
                lambda a=a, b=b, u=u: silu(a.double() @ b.double().T) * (a.double() @ u.double().T),
                1e-2,
                0,
                4.0 * n**3,
            )
        )
    return cases


ATTENTION = """kernel attention<T: bf16 | f16>(q: T[B, H, M, D], k: T[B, G, N, D], v: T[B, G, N, E], w: f32[H], scale: f32)
    -> o: T[B, H, M, E] {
  require H % G == 0, scale > 0
  s[b, h, m, n] = SCORE
  p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
  o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])
}
"""
PLAIN = "scale * sum[d](q[b, h, m, d] * k[b, h // (H // G), n, d])"
SCORES = {"": PLAIN, "softcap": f"softcap({PLAIN}, 30.0)", "alibi": f"{PLAIN} + w[h] * f32(n - m)"}
HEADS = {64: 32, 96: 16, 128: 16, 256: 8}
TOKENS = 16384


def attention_kernel(d: int, s: int, causal: bool, score: str = "") -> Kernel:
    text = ATTENTION.replace("SCORE", SCORES[score]).replace("SET", "| n <= m" if causal else "")
    h = HEADS[d]
    return Kernel(
        text, "bf16", (("B", TOKENS // s), ("H", h), ("G", h), ("M", s), ("N", s), ("D", d), ("E", d))
    )


def attentions() -> list[tuple[str, Kernel, tuple[int, int, bool, str]]]:
    plain = [(d, s, c, "") for d in (64, 128, 256) for s in (1024, 4096, 16384) for c in (False, True)]
    others = [
        (96, 4096, False, ""),
        (96, 4096, True, ""),
        (128, 4096, False, "softcap"),
        (128, 4096, True, "alibi"),
    ]
    return [
        (
            f"attention D{d} S{s} {'causal' if c else 'full'}{f' {x}' if x else ''}",
            attention_kernel(d, s, c, x),
            (d, s, c, x),
        )
        for d, s, c, x in plain + others
    ]


def attention_case(name: str, kernel: Kernel, facts: tuple[int, int, bool, str]) -> Case:
    d, s, causal, score = facts
    b, h, scale = TOKENS // s, HEADS[d], d**-0.5
    q, k, v = (drawn(b, h, s, d, dtype=torch.bfloat16) for _ in range(3))
    w, out, ours = torch.rand(h, device="cuda"), torch.empty_like(q), kernel.make()

    def through(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    calls: dict[str, Callable[[], Any]] = {"tileloom": lambda: ours(q, k, v, w, scale, out=out)}
    if not score:
        calls["cudnn"] = through(SDPBackend.CUDNN_ATTENTION)
        if s == 4096:
            calls["torch flash"] = through(SDPBackend.FLASH_ATTENTION)
            calls |= gpu.raced(lambda: gpu.triton.attention(q, k, v, scale, causal))

    def reference() -> torch.Tensor:
        return exact_scores(q, k, v, w, causal, score) if score else exact_attention(q, k, v, causal)

    return Case(name, calls, reference, 1e-2, 0, 4.0 * b * h * s * s * d * (0.5 if causal else 1.0))


def exact_scores(q: Any, k: Any, v: Any, w: Any, causal: bool, score: str) -> torch.Tensor:
    """In float64, a head at a time."""
    n = torch.arange(q.shape[2], device="cuda")
    out = []
    for i in range(q.shape[1]):
        s = q[:, i].double() @ k[:, i].double().transpose(-1, -2) * q.shape[-1] ** -0.5
        s = 30 * torch.tanh(s / 30) if score == "softcap" else s + w[i].double() * (n[None] - n[:, None])
        s = s.masked_fill(n[None] > n[:, None], float("-inf")) if causal else s
        out.append(torch.softmax(s, -1) @ v[:, i].double())
    return torch.stack(out, 1)


WEIGHTS = {
    "qkv": (12288, 4096),
    "out": (4096, 4096),
    "up": (11008, 4096),
    "down": (4096, 11008),
    "logits": (32000, 4096),
}
"""Columns and contracted length of a 7-billion-parameter transformer's products."""
ROWS = (1, 16, 64, 512, 2048, 16384)


def shapes() -> list[tuple[str, Kernel, tuple[int, int, int]]]:
    return [
        (f"gemm {what} {m}x{n}x{k}", Kernel(product_text("m, k", "n, k"), "bf16", sizes(m, n, k)), (m, n, k))
        for what, (n, k) in WEIGHTS.items()
        for m in ROWS
    ]


ATTENTION_LINES = {
    "default": "", "one warpgroup": "warpgroups 1 load + 1 compute", "three warpgroups": "warpgroups 1 load + 3 compute",
    "two slots": "stage k, v by 2", "three slots": "tile n by 64\nstage k, v by 3", "not skewed": "skew none",
    "tasks in turn": "order turns", "tasks longest first": "order longest",
}  # fmt: skip
PRODUCT_LINES = {
    "default": "", "two slots": "stage a, b by 2", "three slots": "stage a, b by 3",
    "one warpgroup": "warpgroups 1 load + 1 compute",
    "three warpgroups": "warpgroups 1 load + 3 compute\ntile n by 128", "a block for each task": "order longest",
}  # fmt: skip


def variants() -> dict[str, tuple[dict[str, Kernel], Any]]:
    """Cases with several schedules each: kernels by variant, and what the case is made of."""
    found: dict[str, tuple[dict[str, Kernel], Any]] = {}
    for d in (64, 128):
        for s in (4096, 16384):
            for causal in (False, True):
                plain = attention_kernel(d, s, causal)
                kernels = {v: replace(plain, lines=x) for v, x in ATTENTION_LINES.items()}
                if d == 128:  # 160 registers a thread are too few for its sums
                    del kernels["three warpgroups"]
                found[f"variants D{d} S{s} {'causal' if causal else 'full'}"] = (kernels, (d, s, causal, ""))
    for n in (1024, 4096):
        plain = Kernel(product_text("m, k", "n, k"), "bf16", sizes(n, n, n))
        found[f"variants gemm {n}"] = (
            {v: replace(plain, lines=x) for v, x in PRODUCT_LINES.items()},
            (n, n, n),
        )
    few = Kernel(product_text("m, k", "n, k"), "bf16", sizes(64, 4096, 4096))
    split = {"default": "", "not split": "split k by 1", "by 2": "split k by 2", "by 4": "split k by 4"}
    found["variants gemm 64x4096x4096"] = (
        {v: replace(few, lines=x) for v, x in split.items()},
        (64, 4096, 4096),
    )
    return found


def variant_case(name: str) -> Case:
    """The case of its default schedule, with each schedule as a call beside the libraries."""
    kernels, what = variants()[name]
    make = product_case if "gemm" in name else attention_case
    cases = {v: make(name, k, what) for v, k in kernels.items()}  # each draws the same numbers
    first = cases["default"]
    calls = {v: c.variants["tileloom"] for v, c in cases.items()}
    return replace(first, variants={**calls, **{n: c for n, c in first.variants.items() if n != "tileloom"}})


def repeats() -> dict[str, tuple[Kernel, Any]]:
    """Kernels whose results must be the same, bit for bit, each time."""
    n, few = (4096,) * 3, (64, 4096, 4096)
    text = product_text("m, k", "n, k")
    found: dict[str, tuple[Kernel, Any]] = {
        "repeats gemm 4096": (Kernel(text, "bf16", sizes(*n)), n),
        "repeats gemm 64x4096x4096": (Kernel(text, "bf16", sizes(*few)), few),
    }
    for d in (64, 128):
        for causal in (False, True):
            kind = "causal" if causal else "full"
            found[f"repeats attention D{d} {kind}"] = (
                attention_kernel(d, 4096, causal),
                (d, 4096, causal, ""),
            )
    return found


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


def small() -> dict[str, tuple[Kernel, Any]]:
    text = ATTENTION.replace("SCORE", PLAIN)
    shape = (("B", 1), ("H", 16), ("G", 16), ("M", 1024), ("N", 1024), ("D", 128), ("E", 128))
    return {
        f"small attention B1 H16 S1024 D128 {kind}": (Kernel(text.replace("SET", subset), "bf16", shape), kind == "causal")
        for kind, subset in (("full", ""), ("causal", "| n <= m"))
    }  # fmt: skip


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


SUITES = ("gemm", "attention", "shapes", "variants", "repeats", "small")


def kernels_of(suite: str) -> dict[str, Kernel]:
    """Every kernel of a suite, by case and variant."""
    if suite in ("gemm", "attention", "shapes"):
        made = {"gemm": products, "attention": attentions, "shapes": shapes}[suite]()
        found = {n: k for n, k, _ in made}
        if suite == "gemm":
            found |= {
                f"epilogues {x[7:13]}": Kernel(x, "bf16", sizes(4096, 4096, 4096)) for x in (GELU, GATED)
            }
        return found
    if suite == "variants":
        return {f"{n}: {v}": k for n, (kernels, _) in variants().items() for v, k in kernels.items()}
    return {n: k for n, (k, _) in (repeats() if suite == "repeats" else small()).items()}


def rows_of(suite: str) -> Mapping[str, Callable[[], list[dict[str, Any]]]]:
    """What measures each case, by its name."""

    def through(make: Callable[[], list[Case]]) -> Callable[[], list[dict[str, Any]]]:
        return lambda: [row for case in make() for row in gpu.measure(case)]

    if suite == "attention":
        return {n: through(lambda n=n, k=k, f=f: [attention_case(n, k, f)]) for n, k, f in attentions()}
    if suite == "variants":
        return {n: through(lambda n=n: [variant_case(n)]) for n in variants()}
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
    torch.manual_seed(0)
    gpu.FLUSH_BYTES = 1 << 30  # the host is ready long before that is written, also where a call takes 10 µs
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
