"""What `hopper.py` measures: kernels from text for tier `wgmma`, and cases of one call beside those of libraries.

A case seeds the generator, so schedules of one case meet the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpu
import torch
from gpu import Case, drawn
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
        from tileloom.runtime import machine_code

        made = self.compiled()
        for variants in machine_code.variants(made.source).values():
            fits = next(
                v
                for v in variants
                if all(dict(self.sizes)[e] % n == 0 for e, n in v.multiples.items())
                and all(dict(self.sizes)[e] <= n for e, n in v.at_most.items())
            )
            machine_code.machine_code(made.source, fits.name, SM_90A)
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


TRANSPOSITIONS = {
    "NT": ("m, k", "n, k"),
    "NN": ("m, k", "k, n"),
    "TN": ("k, m", "k, n"),
    "TT": ("k, m", "n, k"),
}
"""Subscripts of both operands; the second letter is that of BLAS for a matrix [N, K]."""


def products() -> list[tuple[str, Kernel, tuple[int, int, int]]]:
    wanted = [("bf16", t, (n, n, n)) for t in TRANSPOSITIONS for n in SQUARES]
    wanted += [("f16", "NT", (n, n, n)) for n in SQUARES]
    wanted += [("bf16", "NT", shape) for shape in SHAPES]
    found = []
    for dtype, t, shape in wanted:
        size = str(shape[0]) if len(set(shape)) == 1 else "x".join(map(str, shape))
        kernel = Kernel(product_text(*TRANSPOSITIONS[t]), dtype, sizes(*shape))
        found.append((f"gemm {t} {dtype} {size}", kernel, shape))
    return found


def product_case(name: str, kernel: Kernel, shape: tuple[int, int, int]) -> Case:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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


ATTENTION = """kernel attention<T: bf16 | f16>(
    q: T[B, H, M, D], k: T[B, G, N, D], v: T[B, G, N, E], w: f32[H],MORE scale: f32
) -> o: T[B, H, M, E] {
  require H % G == 0, scale > 0
  s[b, h, m, n] = SCORE
  p[b, h, m, n] = softmax[nSET](s[b, h, m, n])
  o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])
}
"""
PLAIN = "scale * sum[d](q[b, h, m, d] * k[b, h // (H // G), n, d])"
SCORES = {
    "": PLAIN,
    "softcap": f"softcap({PLAIN}, 30.0)",
    "softcap of large": f"softcap(8.0 * {PLAIN}, 30.0)",  # two of ten thousand lie beyond the cap
    "alibi": f"{PLAIN} + w[h] * f32(n - m)",
    "bias": f"{PLAIN} + f32(bias[m, n])",
}
SETS = {
    "full": "",
    "causal": " | n <= m",
    "window": " | n <= m and m - n < 1024",
    "documents": " | of[m] == doc[n] and n <= m",
}
TILE = 128
"""Queries and keys of a tile, for the share of tiles with a pair that is seen."""
DOCUMENTS = 8
"""In one sequence, all of one length."""
HEADS = {64: 32, 96: 16, 128: 16, 256: 8}


def heads(d: int) -> int:
    return HEADS.get(d, 2048 // d)


TOKENS = 16384


MORE = {"bias": " bias: T[M, N],", "documents": " of: i32[M], doc: i32[N],"}
"""Parameters of scores and domains that read a tensor of their own."""


def attention_text(domain: str = "full", score: str = "") -> str:
    text = ATTENTION.replace("SCORE", SCORES[score]).replace("SET", SETS[domain])
    return text.replace("MORE", MORE.get(score, "") + MORE.get(domain, ""))


def attention_kernel(d: int, s: int, domain: str, score: str = "") -> Kernel:
    h = heads(d)
    shape = (("B", TOKENS // s), ("H", h), ("G", h), ("M", s), ("N", s), ("D", d), ("E", d))
    return Kernel(attention_text(domain, score), "bf16", shape)


@dataclass(frozen=True)
class Attended:
    """What an attention case is made of: head size, tokens of a sequence, what a query sees, what is done to scores."""

    d: int
    s: int
    domain: str
    score: str = ""

    @property
    def name(self) -> str:
        return f"attention D{self.d} S{self.s} {self.domain}{f' {self.score}' if self.score else ''}"

    @property
    def kernel(self) -> Kernel:
        return attention_kernel(self.d, self.s, self.domain, self.score)

    def seen(self, of: torch.Tensor) -> torch.Tensor:
        """Which keys each query sees, [M, N]."""
        n = torch.arange(self.s, device="cuda")
        m = n[:, None]
        if self.domain == "full":
            return torch.ones(self.s, self.s, dtype=torch.bool, device="cuda")
        if self.domain == "documents":
            return (of[:, None] == of) & (n <= m)
        return (n <= m) & (m - n < 1024) if self.domain == "window" else n <= m


def attentions() -> list[tuple[str, Kernel, Attended]]:
    plain = [(d, s, x) for d in (64, 128, 256) for s in (1024, 4096, 16384) for x in ("full", "causal")]
    found = [Attended(*x) for x in (*plain, (96, 4096, "full"), (96, 4096, "causal"))]
    return [(x.name, x.kernel, x) for x in found]


DEPTHS = (32, 40, 48, 72, 80, 104, 112, 136, 160, 192, 224, 248)
"""Columns of a head that `attentions` does not have."""


def depths() -> list[tuple[str, Kernel, Attended]]:
    found = [Attended(d, 4096, x) for d in DEPTHS for x in ("full", "causal")]
    return [(x.name, x.kernel, x) for x in found]


def scores() -> list[tuple[str, Kernel, Attended]]:
    """Scores and domains beside plain ones of the same run; beside documents also as many sequences as short."""
    found = [
        Attended(128, s, domain, score)
        for s in (4096, 16384)
        for domain, score in (
            ("full", ""), ("full", "softcap"), ("full", "softcap of large"), ("full", "alibi"), ("full", "bias"),
            ("causal", ""), ("causal", "alibi"), ("window", ""), ("documents", ""),
        )
    ]  # fmt: skip
    found += [Attended(128, s // DOCUMENTS, "causal") for s in (4096, 16384)]
    return [(x.name, x.kernel, x) for x in found]


def attention_case(name: str, kernel: Kernel, what: Attended) -> Case:
    torch.manual_seed(0)
    d, s = what.d, what.s
    b, h, scale = TOKENS // s, heads(d), d**-0.5
    q, k, v = (drawn(b, h, s, d, dtype=torch.bfloat16) for _ in range(3))
    w, out, ours = torch.rand(h, device="cuda"), torch.empty_like(q), kernel.make()
    bias = drawn(s, s, dtype=torch.bfloat16)
    of = torch.arange(s, device="cuda", dtype=torch.int32) // (s // DOCUMENTS)
    more = {"bias": [bias]}.get(what.score, []) + {"documents": [of, of]}.get(what.domain, [])

    def through(backend: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=what.domain == "causal")

        return call

    calls: dict[str, Callable[[], Any]] = {"tileloom": lambda: ours(q, k, v, w, *more, scale, out=out)}
    if not what.score and what.domain in ("full", "causal"):
        calls["cudnn"] = through(SDPBackend.CUDNN_ATTENTION)
        if s >= 4096:
            causal = what.domain == "causal"
            calls["torch flash"] = through(SDPBackend.FLASH_ATTENTION)
            calls |= gpu.raced(lambda: gpu.triton.attention(q, k, v, scale, causal))
    seen = what.seen(of)

    def reference() -> torch.Tensor:
        return exact_scores(q, k, v, w, bias, seen, what.score)

    tiles = seen.view(s // TILE, TILE, s // TILE, TILE).any(3).any(1)
    shares = {"pairs_seen": float(seen.float().mean()), "tiles_visited": float(tiles.float().mean())}
    counted = {"full": 1.0, "causal": 0.5}.get(what.domain, shares["pairs_seen"])
    flops = 4.0 * b * h * s * s * d * counted
    return Case(name, calls, reference, 1e-2, 0, flops, shares)


def exact_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor,
    seen: torch.Tensor,
    score: str,
) -> torch.Tensor:
    """In float64, a head at a time."""
    n = torch.arange(q.shape[2], device="cuda")
    out = []
    for i in range(q.shape[1]):
        s = q[:, i].double() @ k[:, i].double().transpose(-1, -2) * q.shape[-1] ** -0.5
        if score.startswith("softcap"):
            s = 30 * torch.tanh(s * (8 if score == "softcap of large" else 1) / 30)
        elif score == "alibi":
            s += w[i].double() * (n[None] - n[:, None])
        elif score == "bias":
            s += bias
        out.append(torch.softmax(s.masked_fill_(~seen, float("-inf")), -1) @ v[:, i].double())
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
    "default": "",
    "three warpgroups": "warpgroups 1 load + 3 compute\ntile m by 192, n by 128",
    "keys by 64": "tile n by 64",
    "one slot of q": "stage q by 1",
    "not skewed": "skew none",
    "tasks in turn": "order turns",
    "tasks longest first": "order longest",
}
PRODUCT_LINES: dict[tuple[int, int, int], tuple[str, ...]] = {
    (1024, 1024, 1024): ("tile m by 64, n by 128", "tile m by 128, n by 128"),
    (4096, 4096, 4096): ("tile m by 192, n by 192", "stage a, b by 3", "order longest"),
    (2048, 2048, 2048): ("tile m by 192, n by 192", "stage a, b by 3"),
    (1, 4096, 4096): ("tile n by 64\nsplit k by 2", "tile n by 64\nsplit k by 1", "tile n by 16\nsplit k by 1"),
    (64, 4096, 4096): ("tile n by 64\nsplit k by 2", "tile n by 64\nsplit k by 1", "tile n by 16\nsplit k by 1"),
    (1, 4096, 11008): ("tile n by 64\nsplit k by 2", "tile n by 64\nsplit k by 4"),
    (512, 4096, 11008): ("tile m by 128, n by 256\nsplit k by 2",),
    (512, 6144, 4096): ("tile m by 128, n by 256",),
    (2048, 11008, 4096): ("tile m by 192, n by 192", "tile m by 128, n by 256"),
    (4096, 4104, 1000): (
        "tile m by 192, n by 192", "tile m by 128, n by 208", "tile m by 128, n by 256", "stage a, b by 3",
    ),
}  # fmt: skip
"""Lines of a schedule beside the default, by the rows, columns and contracted length of a product."""


def variants() -> dict[str, tuple[dict[str, Kernel], Any]]:
    """Cases with several schedules each: kernels by variant, and what the case is made of."""
    found: dict[str, tuple[dict[str, Kernel], Any]] = {}
    for d in (64, 128):
        for s in (1024, 4096, 16384):
            for domain in ("full", "causal"):
                plain = attention_kernel(d, s, domain)
                kernels = {v: replace(plain, lines=x) for v, x in ATTENTION_LINES.items()}
                if d == 128:  # 160 registers a thread are too few for its sums
                    del kernels["three warpgroups"]
                if domain == "full":  # tasks of one length
                    del kernels["tasks longest first"], kernels["tasks in turn"]
                found[f"variants D{d} S{s} {domain}"] = (kernels, Attended(d, s, domain))
    for shape, lines in PRODUCT_LINES.items():
        plain = Kernel(product_text("m, k", "n, k"), "bf16", sizes(*shape))
        kernels = {"default": plain, **{x.replace("\n", ", "): replace(plain, lines=x) for x in lines}}
        found[f"variants gemm {'x'.join(map(str, shape))}"] = (kernels, shape)
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
        for domain in ("full", "causal"):
            found[f"repeats attention D{d} {domain}"] = (
                attention_kernel(d, 4096, domain),
                Attended(d, 4096, domain),
            )
    biased = Attended(128, 4096, "full", "bias")
    return {**found, "repeats attention D128 full bias": (biased.kernel, biased)}


def small() -> dict[str, tuple[Kernel, Any]]:
    shape = (("B", 1), ("H", 16), ("G", 16), ("M", 1024), ("N", 1024), ("D", 128), ("E", 128))
    return {
        f"small attention B1 H16 S1024 D128 {domain}": (
            Kernel(attention_text(domain), "bf16", shape),
            domain == "causal",
        )
        for domain in ("full", "causal")
    }


@dataclass(frozen=True)
class Decoded:
    """Few queries against many keys: sequences, heads of queries and of keys, queries a head, keys; 128 columns."""

    b: int
    h: int
    g: int
    m: int
    n: int

    @property
    def name(self) -> str:
        return f"decode B{self.b} H{self.h} G{self.g} M{self.m} N{self.n}"

    @property
    def kernel(self) -> Kernel:
        sizes = {"B": self.b, "H": self.h, "G": self.g, "M": self.m, "N": self.n, "D": 128, "E": 128}
        return Kernel(attention_text(), "bf16", tuple(sizes.items()))


DECODED = (
    *((1, 8, 8, m, 65536) for m in (1, 16, 64)), (1, 32, 8, 1, 65536), (8, 32, 8, 1, 8192), (8, 8, 8, 1, 4096),
    (64, 32, 8, 1, 4096), (1, 20, 20, 1024, 1024),
)  # fmt: skip
"""The last has as many queries as keys, and fewer tasks than the device multiprocessors."""


def decode() -> list[tuple[str, Kernel, Decoded]]:
    return [(x.name, x.kernel, x) for x in (Decoded(*sizes) for sizes in DECODED)]


def decode_case(name: str, kernel: Kernel, what: Decoded) -> Case:
    torch.manual_seed(0)
    q = drawn(what.b, what.h, what.m, 128, dtype=torch.bfloat16)
    k, v = (drawn(what.b, what.g, what.n, 128, dtype=torch.bfloat16) for _ in range(2))
    w, out, scale = torch.rand(what.h, device="cuda"), torch.empty_like(q), 128**-0.5
    ours = kernel.make()
    apart = ours.naive

    def through(*backends: Any) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(list(backends)):
                return scaled_dot_product_attention(q, k, v, enable_gqa=what.g != what.h)

        return call

    def reference() -> torch.Tensor:
        several = what.h // what.g
        return gpu.exact_attention(q, *(x.repeat_interleave(several, 1) for x in (k, v)), False)

    return Case(
        name,
        {
            "tileloom": lambda: ours(q, k, v, w, scale, out=out),
            "fuse none": lambda: apart(q, k, v, w, scale),
            "cudnn": through(SDPBackend.CUDNN_ATTENTION),
            "torch flash": through(SDPBackend.FLASH_ATTENTION),
        },
        reference,
        1e-2,
        2.0 * (2 * q.numel() + k.numel() + v.numel()),
        4.0 * what.b * what.h * what.m * what.n * 128,
    )


def naive() -> dict[str, tuple[Kernel, Callable[[], Case]]]:
    """Kernels beside the same text with `fuse none`."""
    found: dict[str, tuple[Kernel, Callable[[], Case]]] = {}
    for domain in ("full", "causal"):
        what = Attended(128, 4096, domain)
        found[f"naive {what.name}"] = (what.kernel, lambda what=what: naive_attention(what))
    kernel = Kernel(GELU, "bf16", sizes(4096, 4096, 4096))
    found["naive gemm + bias + gelu 4096"] = (kernel, lambda: naive_product(kernel, 4096))
    return found


def naive_attention(what: Attended) -> Case:
    fused = attention_case(f"naive {what.name}", what.kernel, what)
    torch.manual_seed(0)  # the same numbers
    b, h, kernel = TOKENS // what.s, heads(what.d), what.kernel.make().naive
    q, k, v = (drawn(b, h, what.s, what.d, dtype=torch.bfloat16) for _ in range(3))
    w = torch.rand(h, device="cuda")
    calls = {
        "tileloom": fused.variants["tileloom"],
        "fuse none": lambda: kernel(q, k, v, w, what.d**-0.5),
    }
    return replace(fused, variants=calls)


def naive_product(kernel: Kernel, n: int) -> Case:
    torch.manual_seed(0)
    a, b = (drawn(n, n, dtype=torch.bfloat16) * n**-0.5 for _ in range(2))
    bias, made = drawn(n, dtype=torch.bfloat16), kernel.make()
    apart = made.naive
    return Case(
        f"naive gemm + bias + gelu {n}",
        {"tileloom": lambda: made(a, b, bias), "fuse none": lambda: apart(a, b, bias)},
        lambda: gelu(a.double() @ b.double().T + bias.double(), approximate="tanh"),
        1e-2,
        0,
        2.0 * n**3,
    )
