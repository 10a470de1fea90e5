"""Tier `wgmma` on an sm_90a device against cuBLAS, cuDNN and torch: `python benchmarks/hopper.py SUITE [--json FILE]`.

Kernels come from text with the default schedule. `gpu.py` says how a case is checked, timed and recorded; its `--only` works
here too. Machine code is made first, in several processes, so that a run's device time goes to measuring.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import gpu
import torch
from gpu import Case, drawn, exact_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

import tileloom as tl
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import SM_90A
from tileloom.dsl.types import DType

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Kernel:
    """A kernel's text, its element type, and the sizes it is compiled for."""

    text: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def program(self) -> Any:
        name = self.text.split()[1].partition("<")[0]
        return tl.parse(self.text)[name]

    def make(self) -> Any:
        return tl.compile(self.program, target="cuda")

    def assemble(self) -> str:
        """Into the cache folder; gives the tier."""
        from tileloom.runtime import cuda

        made = compile_kernel(self.program, SM_90A, dict(self.sizes), dtypes={"T": DType(self.dtype)})
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


def cases_of(suite: str) -> Mapping[str, Callable[[], list[Case]]]:
    """Each case by its name, made when it is measured."""
    if suite == "attention":
        return {n: (lambda n=n, k=k, f=f: [attention_case(n, k, f)]) for n, k, f in attentions()}
    made = {n: (lambda n=n, k=k, f=f: [product_case(n, k, f)]) for n, k, f in products()}
    return {**made, "epilogues": epilogue_cases}


def assembled(kernel: Kernel) -> str:
    try:
        return kernel.assemble()
    except Exception as reason:  # the case itself will say it again
        return f"{type(reason).__name__}: {reason}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=["gemm", "attention"])
    parser.add_argument("--json", help="where the rows go")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    torch.manual_seed(0)
    gpu.FLUSH_BYTES = 1 << 30  # the host is ready long before that is written, also where a call takes 10 µs
    kernels = {n: k for n, k, _ in (products() if given.suite == "gemm" else attentions()) if given.only in n}
    if given.suite == "gemm":
        kernels |= {
            f"{x[7:13]} {n}": Kernel(x, "bf16", sizes(n, n, n)) for x in (GELU, GATED) for n in (4096,)
        }
    distinct = dict.fromkeys(kernels.values())
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        tiers = dict(zip(distinct, pool.map(assembled, distinct), strict=True))
    print({n: tiers[k] for n, k in kernels.items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for name, make in cases_of(given.suite).items():
        if given.only not in name:
            continue
        for case in make():
            found = gpu.measure(case)
            rows += found
            if given.json:  # after each case, so that a run that is stopped leaves what it measured
                gpu.record(given.json, f"hopper-{given.suite}", rows)
            for row in found:
                print(gpu.shown(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
