"""Measure kernels on the CUDA device that is here: `python benchmarks/gpu.py SUITE [--json FILE]`, SUITE one of SUITES.

Each case is checked against float64 first; then all variants are timed in turn, with CUDA events around one call and the L2
cache overwritten before it. A row holds the raw samples in ms, their median, and GB/s (bytes that must move: inputs once,
outputs once) or TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit(
        "this benchmark compares with torch, which is not installed: pip install '.[torch]' in the folder of tileloom"
    )

import tileloom as tl
from tileloom.api import CompiledKernel

try:
    import triton_baselines as triton
except ImportError:  # Triton is no dependency: its rows are left out where it is missing
    triton = None

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FLUSH_BYTES = 1 << 30
"""Overwritten before each call. Writing it outlasts the host time of any call, so that none of that is measured."""
SAMPLES = 15
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass
class Case:
    """`variants` are calls that give the same result; `reference` computes it in float64."""

    name: str
    variants: dict[str, Callable[[], Any]]
    reference: Callable[[], Any]
    tolerance: float
    bytes: float = 0.0
    flops: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def error(got: Any, want: torch.Tensor) -> float:
    """|got - want| / |want| in float64 (Frobenius); NaN and unwritten elements show as nan."""
    first = got[0] if isinstance(got, tuple) else got
    first = first.double()
    return float((first - want).norm() / want.norm().clamp_min(1e-30))


def measure(case: Case) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    want = case.reference()
    usable = {}
    for name, call in case.variants.items():
        try:
            started = time.perf_counter()
            got = call()
            torch.cuda.synchronize()
            off = error(got, want)
        except Exception as reason:  # a variant that cannot run is a result too
            rows.append(
                {"case": case.name, "variant": name, "failed": f"{type(reason).__name__}: {reason}"[:300]}
            )
            continue
        first_s = time.perf_counter() - started
        row = {"case": case.name, "variant": name, "error": off, "first_call_s": first_s, **case.notes}
        if not off <= case.tolerance:
            row["failed"] = f"error {off:.2e} exceeds {case.tolerance:.0e}"
        else:
            usable[name] = row
        rows.append(row)
    del want
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in usable}
    for turn in range(SAMPLES + 2):
        for name in usable:
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            case.variants[name]()
            end.record()
            end.synchronize()
            if turn >= 2:
                samples[name].append(start.elapsed_time(end))
    for name, row in usable.items():
        median = statistics.median(samples[name])
        row |= {"ms": median, "samples_ms": samples[name]}
        row |= {"gbytes_per_s": case.bytes / median / 1e6} if case.bytes else {}
        row |= {"tflops": case.flops / median / 1e9} if case.flops else {}
    return rows


def require_device() -> None:
    """Raises `SystemExit` where nothing can be measured."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is here, or torch was built without CUDA: nothing can be measured")


def load(file: str, kernel: str, schedule: str | None = None) -> CompiledKernel:
    stated = f"schedule s for {kernel} on {TARGET} {{\n{schedule}\n}}" if schedule else None
    return tl.compile(
        tl.load(str(EXAMPLES / file))[kernel], target=None if stated else "cuda", schedule=stated
    )


TARGET = "cuda:sm_90a"


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def raced(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """A Triton kernel as a variant, where Triton is installed."""
    return {"triton": call} if triton is not None else {}


# ---------------------------------------------------------------- suites


def copied(dtype: torch.dtype = torch.float32) -> Case:
    """Copying 2^28 elements (1 GiB in f32), the ceiling of what else the same run moves through memory."""
    x = drawn(1 << 28, dtype=dtype)
    z = torch.empty_like(x)
    return Case(
        f"device copy {NAMES[dtype]} 2^28",
        {"torch copy_": lambda: z.copy_(x)},
        lambda: x.double(),
        0,
        2 * x.numel() * x.element_size(),
    )


def elementwise() -> list[Case]:
    cases = []
    for dtype, n in ((torch.float32, 1 << 28), (torch.bfloat16, 1 << 28)):
        x, y, z = drawn(n, dtype=dtype), drawn(n, dtype=dtype), torch.empty(n, device="cuda", dtype=dtype)
        add = load("vector_add.tile", "vector_add")
        moved = 3 * n * x.element_size()
        cases.append(
            Case(
                f"add {NAMES[dtype]} 2^28",
                {
                    "tileloom": lambda x=x, y=y, z=z, add=add: add(x, y, out=z),
                    "torch": lambda x=x, y=y, z=z: torch.add(x, y, out=z),
                },
                lambda x=x, y=y: x.double() + y.double(),
                1e-2 if dtype != torch.float32 else 1e-6,
                moved,
            )
        )
        scale = tl.compile(
            tl.parse("kernel scaled<T: f32 | bf16>(x: T[N], a: f32) -> y: T[N] {\n  y[n] = a * x[n]\n}\n")[
                "scaled"
            ],
            "cuda",
        )
        cases.append(
            Case(
                f"scaled copy {NAMES[dtype]} 2^28",
                {
                    "tileloom": lambda x=x, z=z, scale=scale: scale(x, 1.5, out=z),
                    "torch mul": lambda x=x, z=z: torch.mul(x, 1.5, out=z),
                },
                lambda x=x: 1.5 * x.double(),
                1e-2 if dtype != torch.float32 else 1e-6,
                2 * n * x.element_size(),
            )
        )
        cases.append(copied(dtype))
    return cases


def reduction() -> list[Case]:
    x = drawn(1 << 14, 1 << 14)
    total = load("reductions.tile", "total")
    rows = tl.compile(
        tl.parse("kernel rows(x: f32[M, N]) -> y: f32[M] {\n  y[m] = sum[n](x[m, n])\n}\n")["rows"], "cuda"
    )
    return [
        copied(),
        Case(
            "sum of rows f32 16384x16384",
            {"tileloom": lambda: rows(x), "torch": lambda: x.sum(1)},
            lambda: x.double().sum(1),
            1e-5,
            x.numel() * 4,
        ),
        Case(
            "total f32 2^28",
            {"tileloom": lambda: total(x), "torch": lambda: x.sum()},
            lambda: x.double().sum(),
            1e-3,
            x.numel() * 4,
        ),
    ]


def softmax() -> list[Case]:
    cases = [copied()]
    for dtype in (torch.bfloat16, torch.float32):
        for n in (512, 1024, 4096, 8192, 32768):
            x = drawn((1 << 27) // n, n, dtype=dtype)
            kernel = load("softmax.tile", "row_softmax")
            cases.append(
                Case(
                    f"softmax {NAMES[dtype]} {x.shape[0]}x{n}",
                    {
                        "tileloom": lambda x=x, k=kernel: k(x),
                        "torch": lambda x=x: torch.softmax(x, -1),
                        **raced(lambda x=x: triton.softmax(x)),
                    },
                    lambda x=x: torch.softmax(x.double(), -1),
                    1e-2 if dtype != torch.float32 else 1e-5,
                    2 * x.numel() * x.element_size(),
                )
            )
    return cases


def norm() -> list[Case]:
    text = (
        "kernel rms<T: f32 | bf16>(x: T[M, N], w: T[N], eps: f32) -> y: T[M, N] {\n"
        "  r[m] = rsqrt(sum[n](f32(x[m, n]) * f32(x[m, n])) / f32(N) + eps)\n  y[m, n] = x[m, n] * r[m] * w[n]\n}\n"
    )
    cases = [copied()]
    for n in (512, 1024, 4096, 8192, 32768):
        x, w = drawn((1 << 27) // n, n, dtype=torch.bfloat16), drawn(n, dtype=torch.bfloat16)
        kernel = tl.compile(tl.parse(text)["rms"], "cuda")
        cases.append(
            Case(
                f"rmsnorm bf16 {x.shape[0]}x{n}",
                {
                    "tileloom": lambda x=x, w=w, k=kernel: k(x, w, 1e-5),
                    "torch": lambda x=x, w=w, n=n: torch.nn.functional.rms_norm(x, (n,), w, 1e-5),
                    **raced(lambda x=x, w=w: triton.rms_norm(x, w, 1e-5)),
                },
                lambda x=x, w=w: (
                    x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
                ),
                1e-2,
                2 * x.numel() * 2,
            )
        )
    return cases


PRODUCT = (
    "kernel product<T: f32 | bf16 | f16>(a: T[M, K], b: T[K, N]) -> c: T[M, N] {\n"
    "  c[m, n] = sum[k](a[m, k] * b[k, n])\n}\n"
)


def product(schedule: str | None = None) -> CompiledKernel:
    stated = f"schedule s for product on {TARGET} {{\n{schedule}\n}}" if schedule else None
    return tl.compile(tl.parse(PRODUCT)["product"], target=None if stated else "cuda", schedule=stated)


def gemm() -> list[Case]:
    cases = []
    shapes = [(n, n, n) for n in (512, 1024, 2048, 4096, 8192)] + [
        (4096, 4096, 1000),
        (1000, 1000, 1000),
        (64, 4096, 4096),
        (4001, 4096, 4096),
    ]
    for m, n, k in shapes:
        a, b = drawn(m, k, dtype=torch.bfloat16), drawn(k, n, dtype=torch.bfloat16)
        kernels = {"tileloom": product(), "tileloom mma": product("tier mma")}
        calls: dict[str, Callable[[], Any]] = {t: (lambda a=a, b=b, g=g: g(a, b)) for t, g in kernels.items()}
        cases.append(
            Case(
                f"gemm bf16 {m}x{n}x{k}",
                {
                    **calls,
                    "torch": lambda a=a, b=b: a @ b,
                    **raced(lambda a=a, b=b: triton.product(a, b)),
                },
                lambda a=a, b=b: a.double() @ b.double(),
                1e-2,
                0,
                2.0 * m * n * k,
            )
        )
    for m, n, k in (
        (1024, 1024, 1024),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (4001, 4003, 1001),
        (64, 4096, 4096),
    ):
        a, b, g = drawn(m, k), drawn(k, n), product()
        cases.append(
            Case(
                f"gemm f32 {m}x{n}x{k}",
                {"tileloom": lambda a=a, b=b, g=g: g(a, b), "torch": lambda a=a, b=b: a @ b},
                lambda a=a, b=b: a.double() @ b.double(),
                1e-5,
                0,
                2.0 * m * n * k,
            )
        )
    return cases


ATTENTION = (
    "kernel attention<T: f16 | bf16>(q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, E], scale: f32)"
    " -> o: T[B, H, M, E] {\n"
    "  require scale > 0\n"
    "  s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])\n"
    "  p[b, h, m, n] = softmax[n SET](s[b, h, m, n])\n"
    "  o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h, n, e])\n}\n"
)


def attention_kernel(causal: bool, schedule: str | None = None) -> CompiledKernel:
    text = ATTENTION.replace(" SET", " | n <= m" if causal else "")
    stated = f"schedule s for attention on {TARGET} {{\n{schedule}\n}}" if schedule else None
    return tl.compile(tl.parse(text)["attention"], target=None if stated else "cuda", schedule=stated)


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    out = []
    for i in range(q.shape[1]):
        s = q[:, i].double() @ k[:, i].double().transpose(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
        out.append(torch.softmax(s, -1) @ v[:, i].double())
    return torch.stack(out, 1)


def attention() -> list[Case]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cases = []
    for d, h in ((64, 32), (128, 16)):
        for s in (1024, 4096, 16384):
            for causal in (False, True):
                b = 16384 // s
                q, k, v = (drawn(b, h, s, d, dtype=torch.bfloat16) for _ in range(3))
                scale = d**-0.5

                def flash(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def cudnn(q: Any = q, k: Any = k, v: Any = v, causal: bool = causal) -> Any:
                    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

                kernels = {
                    "tileloom": attention_kernel(causal),
                    "tileloom mma": attention_kernel(causal, "tier mma"),
                }
                if s == 4096 and not causal:
                    kernels["tileloom fuse none"] = kernels["tileloom"].naive
                calls: dict[str, Callable[[], Any]] = {
                    t: (lambda q=q, k=k, v=v, g=g, scale=scale: g(q, k, v, scale)) for t, g in kernels.items()
                }
                cases.append(
                    Case(
                        f"attention bf16 D{d} S{s} {'causal' if causal else 'full'}",
                        {
                            **calls,
                            "torch flash": flash,
                            "torch cudnn": cudnn,
                            **raced(lambda q=q, k=k, v=v, s=scale, c=causal: triton.attention(q, k, v, s, c)),
                        },
                        lambda q=q, k=k, v=v, causal=causal: exact_attention(q, k, v, causal),
                        1e-2,
                        0,
                        4.0 * b * h * s * s * d * (0.5 if causal else 1.0),
                    )
                )
    return cases


def launch_rows() -> list[dict[str, Any]]:
    """Host time of a call, in µs, the device idle; and a CUDA graph of one."""
    x, y = drawn(1024), drawn(1024)
    add = load("vector_add.tile", "vector_add")
    out = torch.empty_like(x)
    attention = attention_kernel(True)
    q = drawn(1, 1, 64, 64, dtype=torch.bfloat16)
    calls = {
        "tileloom add, new output": lambda: add(x, y),
        "tileloom add, out=": lambda: add(x, y, out=out),
        "tileloom attention": lambda: attention(q, q, q, 0.125),
        "torch add": lambda: torch.add(x, y),
        "torch add, out=": lambda: torch.add(x, y, out=out),
        "torch attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
    }
    rows = []
    for name, call in calls.items():
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        best = []
        for _ in range(15):
            start = time.perf_counter()
            for _ in range(100):
                call()
            best.append((time.perf_counter() - start) * 1e4)
            torch.cuda.synchronize()
        rows.append(
            {
                "case": "host time of a call",
                "variant": name,
                "us": statistics.median(best),
                "samples_us": best,
            }
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = add(x, y)
    x.copy_(drawn(1024))
    graph.replay()
    torch.cuda.synchronize()
    rows.append(
        {"case": "CUDA graph", "variant": "tileloom add", "equal": bool(torch.equal(captured, x + y))}
    )
    return rows


SUITES: dict[str, Callable[[], list[Case]]] = {
    "elementwise": elementwise,
    "reduction": reduction,
    "softmax": softmax,
    "norm": norm,
    "gemm": gemm,
    "attention": attention,
}


def facts(suite: str) -> dict[str, Any]:
    def told(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "schema_version": 1,
        "suite": suite,
        "commit": told("git", "rev-parse", "HEAD") or None,
        "command": sys.argv,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tileloom": tl.__version__,
        },
        "device": torch.cuda.get_device_name(),
        "driver": told(
            "nvidia-smi", "--query-gpu=driver_version,clocks.sm,temperature.gpu", "--format=csv,noheader"
        ),
        "conditions": f"{FLUSH_BYTES >> 20} MiB overwritten before each call, {SAMPLES} interleaved samples, medians",
    }


def shown(row: dict[str, Any]) -> str:
    name = f"{row['case']:36} {row['variant']:22}"
    if "failed" in row:
        return f"{name} FAILED {row['failed']}"
    if "ms" not in row:
        return f"{name} {row.get('us', row.get('equal'))}"
    rate = (
        f"{row['gbytes_per_s']:8.0f} GB/s"
        if "gbytes_per_s" in row
        else f"{row.get('tflops', 0):8.1f} TFLOP/s"
    )
    return f"{name} {row['ms']:8.4f} ms {rate} error {row['error']:.1e} first {row['first_call_s']:.1f} s"


def record(path: str, suite: str, rows: list[dict[str, Any]]) -> None:
    Path(path).write_text(json.dumps({**facts(suite), "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, "launch"])
    parser.add_argument("--json", help="where the rows go")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    require_device()
    torch.manual_seed(0)
    if given.suite == "launch":
        rows = launch_rows()
    else:
        rows = []
        cases = [c for c in SUITES[given.suite]() if given.only in c.name]
        while cases:
            rows += measure(cases.pop(0))
            torch.cuda.empty_cache()
            if given.json:  # after each case, so that a run that is stopped leaves what it measured
                record(given.json, given.suite, rows)
            for row in [r for r in rows if r["case"] == rows[-1]["case"]]:
                print(shown(row), flush=True)
    if given.suite == "launch":
        print("\n".join(map(shown, rows)))
    if given.json:
        record(given.json, given.suite, rows)


if __name__ == "__main__":
    main()
