"""The cases of `cpu.py`: what is computed, by whom, and the float64 reference. torch sees the arrays' own memory.

Every case names its variants: `tileloom`, `fuse none` (one kernel a written statement), `numpy` and `torch` where they have
the operation. Inputs are standard normal, drawn anew from the same seed.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import tileloom as tl

try:
    import torch
except ImportError:
    torch = None

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
Call = Callable[[], Any]
rng = np.random.default_rng(0)


@dataclass
class Case:
    """`reference` gives the exact result in float64 where it is not too large to compute; `bound` is the largest
    |result - exact| / |exact| (Frobenius norms) that counts as right."""

    name: str
    variants: dict[str, Call]
    reference: Call
    bound: float
    flops: float | None = None
    moved_bytes: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def f32(*shape: int) -> Any:
    return rng.standard_normal(shape, np.float32)


def drawn(dtype: Any, *shape: int) -> Any:
    return f32(*shape).astype(dtype)


def as_torch(x: Any) -> Any:
    """The same memory as a tensor."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def with_torch(call: Callable[..., Any], *arrays: Any, **options: Any) -> dict[str, Call]:
    """torch's variant, `call` on the arrays; none where it is not installed."""
    if torch is None:
        return {}
    tensors = [as_torch(x) for x in arrays]
    return {"torch": lambda: call(*tensors, **options)}


def ours(kernel: Any, *arguments: Any, naive: bool = True) -> dict[str, Call]:
    """The kernel and, beside it, its plain form."""
    found = {"tileloom": lambda: kernel(*arguments)}
    if naive:
        found["fuse none"] = lambda: kernel.naive(*arguments)
    return found


def compiled(text: str, name: str) -> Any:
    return tl.compile(tl.parse(text)[name])


# ---------------------------------------------------------------- products

PRODUCT = """
kernel product<T: f32 | bf16>(a: T[M, K], b: T[K, N]) -> c: T[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }
kernel narrow(a: i8[M, K], b: i8[K, N]) -> c: i32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }
kernel activated<T: f32 | bf16>(a: T[M, K], b: T[K, N], w: T[N]) -> c: T[M, N] {
    s[m, n] = sum[k](a[m, k] * b[k, n]) + w[n]
    c[m, n] = gelu(s[m, n])
}
"""
SQUARE = (128, 256, 512, 1024, 2048)
RAGGED = (
    # M, N, K, which operands are transposed or strided
    (1, 4096, 4096, ""),
    (4096, 1, 4096, ""),
    (8, 1024, 8192, ""),
    (64, 64, 8192, ""),
    (1024, 64, 1024, ""),
    (33, 2000, 500, ""),
    (1000, 777, 333, ""),
    (2048, 2048, 1, ""),
    (1024, 1024, 1024, "a transposed"),
    (1024, 1024, 1024, "b transposed"),
    (512, 512, 512, "both strided"),
)


def operands(m: int, n: int, k: int, how: str) -> tuple[Any, Any]:
    a = f32(k, m).T if how == "a transposed" else f32(m, k)
    b = f32(n, k).T if how == "b transposed" else f32(k, n)
    return (f32(2 * m, k)[::2], f32(k, n + 96)[:, 32 : n + 32]) if how == "both strided" else (a, b)


def gemm(quick: bool) -> Iterator[Case]:
    kernel = compiled(PRODUCT, "product")
    shapes = [*((n, n, n, "") for n in SQUARE), *RAGGED]
    for m, n, k, how in shapes[1:4] if quick else shapes:
        a, b = operands(m, n, k, how)
        yield Case(
            f"{m}x{n}x{k} {how}".strip(),
            {
                **ours(kernel, a, b, naive=False),  # one statement: `fuse none` is the same kernel
                "numpy": lambda a=a, b=b: a @ b,
                **with_torch(operator.matmul, a, b),
            },
            lambda a=a, b=b: a.astype(np.float64) @ b.astype(np.float64),
            1e-5,
            2.0 * m * n * k,
            4.0 * (m * k + k * n + m * n),
        )


def gelu(x: Any) -> Any:
    """By its tanh form, as the prelude has it."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gemm_bf16(quick: bool) -> Iterator[Case]:
    """NumPy has no bf16 product."""
    plain, activated = (compiled(PRODUCT, n) for n in ("product", "activated"))
    for n in (256,) if quick else (256, 512, 1024, 2048):
        a, b, w = (drawn(ml_dtypes.bfloat16, *s) for s in ((n, n), (n, n), (n,)))
        a64, b64, w64 = (x.astype(np.float64) for x in (a, b, w))
        yield Case(
            f"bf16 {n}x{n}x{n}",
            {**ours(plain, a, b, naive=False), **with_torch(operator.matmul, a, b)},
            lambda a=a64, b=b64: a @ b,
            1e-2,
            2.0 * n**3,
        )
        yield Case(
            f"bf16 {n}x{n}x{n} + bias, gelu",
            {**ours(activated, a, b, w), **with_torch(torch_activated, a, b, w)},
            lambda a=a64, b=b64, w=w64: gelu(a @ b + w),
            2e-2,
            2.0 * n**3,
        )
    n = 256 if quick else 1024
    draw = np.random.default_rng(0).integers
    a, b = (draw(-128, 128, (n, n)).astype(np.int8) for _ in range(2))
    yield Case(
        f"i8 {n}x{n}x{n} into i32",
        {**ours(compiled(PRODUCT, "narrow"), a, b, naive=False), **with_torch(torch_int8, a, b)},
        lambda a=a, b=b: a.astype(np.float64) @ b.astype(np.float64),
        0.0,
        2.0 * n**3,
    )
    a, b, w = f32(n, n), f32(n, n), f32(n)
    yield Case(
        f"f32 {n}x{n}x{n} + bias, gelu",
        {**ours(activated, a, b, w), **with_torch(torch_activated, a, b, w)},
        lambda: gelu(a.astype(np.float64) @ b + w),
        1e-5,
        2.0 * n**3,
    )


def torch_int8(a: Any, b: Any) -> Any:
    return torch._int_mm(a, b)


def torch_activated(a: Any, b: Any, w: Any) -> Any:
    return torch.nn.functional.gelu(torch.addmm(w, a, b), approximate="tanh")


# ---------------------------------------------------------------- attention

ATTENTION = """
kernel attention<T: f32 | bf16 | f16>(q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, E], SCALARS) -> o: T[B, H, M, E] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h, n, e])
}
"""
SETS = {
    "full": "",
    "causal": "| n <= m + N - M",
    "window": "| n <= m and n > m - w",
    "documents": "| of[m] == doc[n]",
}
SCALARS = {
    "full": "scale: f32",
    "causal": "scale: f32",
    "window": "scale: f32, w: i32",
    "documents": "scale: f32, of: i32[M], doc: i32[N]",
}


def attention_kernel(kind: str) -> Any:
    return compiled(ATTENTION.replace("SET", SETS[kind]).replace("SCALARS", SCALARS[kind]), "attention")


def visible(kind: str, m: int, n: int, *extra: Any) -> Any:
    """Which keys each query sees, [M, N]."""
    i, j = np.arange(m)[:, None], np.arange(n)[None]
    if kind == "full":
        return np.ones((m, n), bool)
    if kind == "causal":
        return j <= i + n - m
    return (j <= i) & (j > i - extra[0]) if kind == "window" else extra[0][:, None] == extra[0]


TILE = (64, 128)
"""Queries and keys of a tile."""


def visited(seen: Any) -> float:
    """The share of tiles with a pair that is seen."""
    m, n = TILE
    rows = [seen[i : i + m].any(0) for i in range(0, len(seen), m)]
    return float(np.mean([[r[j : j + n].any() for j in range(0, len(r), n)] for r in rows]))


def exact_attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.empty((*q.shape[:-1], v.shape[-1]))
    for at in np.ndindex(q.shape[:2]):
        s = np.where(seen, q[at] @ k[at].T / math.sqrt(q.shape[-1]), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[at] = (p / p.sum(-1, keepdims=True)) @ v[at]
    return out


def numpy_attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    s = (q * np.float32(1 / math.sqrt(q.shape[-1]))) @ k.swapaxes(-1, -2)
    if not seen.all():
        s = np.where(seen, s, np.float32(-np.inf))
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    s /= s.sum(-1, keepdims=True)
    return s @ v


LARGEST_PLAIN = 2048
"""Longest rows for which NumPy and `fuse none`, which keep all scores in memory, are measured too."""


def attention_case(kind: str, h: int, m: int, n: int, d: int, dtype: Any = np.float32, *extra: Any) -> Case:
    q, k, v = drawn(dtype, 1, h, m, d), drawn(dtype, 1, h, n, d), drawn(dtype, 1, h, n, d)
    seen = visible(kind, m, n, *extra)
    small = n <= LARGEST_PLAIN or m < 64
    variants = ours(attention_kernel(kind), q, k, v, 1 / math.sqrt(d), *extra, naive=small)
    if small and dtype is np.float32:
        variants["numpy"] = lambda: numpy_attention(q, k, v, seen)
    variants |= torch_attention(kind, q, k, v, seen)
    name = "" if dtype is np.float32 else f" {np.dtype(dtype).name}"
    name += {"window": lambda: f" w{extra[0]}", "documents": lambda: f" x{extra[0].max() + 1}"}.get(
        kind, str
    )()
    return Case(
        f"{kind} H{h} {m}x{n} D{d}{name}",
        variants,
        lambda: exact_attention(q, k, v, seen),
        1e-5 if dtype is np.float32 else 2e-2,
        4.0 * h * d * float(seen.sum()),
        float(2 * q.nbytes + 2 * k.nbytes),
        {"share_of_pairs_seen": float(seen.mean()), "share_of_tiles_visited": visited(seen)},
    )


def torch_attention(kind: str, q: Any, k: Any, v: Any, seen: Any) -> dict[str, Call]:
    if torch is None:
        return {}
    attend = torch.nn.functional.scaled_dot_product_attention
    if kind in ("full", "causal") and (kind == "full" or q.shape[-2] == k.shape[-2]):
        return with_torch(attend, q, k, v, is_causal=kind == "causal")
    return with_torch(attend, q, k, v, attn_mask=torch.from_numpy(seen))


def attention(quick: bool) -> Iterator[Case]:
    if quick:
        yield from (attention_case(kind, 4, 1024, 1024, 64) for kind in ("full", "causal"))
        return
    for s, h in ((512, 8), (1024, 4), (2048, 2), (4096, 1), (8192, 1)):
        for d in (64, 128):
            yield from (attention_case(kind, h, s, s, d) for kind in ("full", "causal"))
    for d in (32, 80, 96, 256):
        yield from (attention_case(kind, 4, 1024, 1024, d) for kind in ("full", "causal"))
    for dtype in (ml_dtypes.bfloat16, np.float16):
        yield from (attention_case(kind, 2, 2048, 2048, 64, dtype) for kind in ("full", "causal"))
    for w in (128, 512, 2048):
        yield attention_case("window", 1, 4096, 4096, 64, np.float32, w)
    for count in (2, 8):
        documents = np.repeat(np.arange(count, dtype=np.int32), 4096 // count)
        yield attention_case("documents", 1, 4096, 4096, 64, np.float32, documents, documents)


def decode(quick: bool) -> Iterator[Case]:
    for m, n in ((1, 4096),) if quick else [(m, n) for n in (1024, 8192, 65536) for m in (1, 4, 16)]:
        yield attention_case("full", 8 if n < 65536 else 2, m, n, 64)


# ---------------------------------------------------------------- rows

ROWS = """
kernel soft<T: f32 | bf16>(x: T[M, N]) -> y: T[M, N] { y[m, n] = softmax[n](x[m, n]) }
kernel layer(x: f32[M, N], w: f32[N], b: f32[N], eps: f32) -> y: f32[M, N] {
    require eps > 0
    y[m, n] = layernorm[n](x[m, n], eps) * w[n] + b[n]
}
kernel rms(x: f32[M, N], w: f32[N], eps: f32) -> y: f32[M, N] {
    require eps > 0
    y[m, n] = rmsnorm[n](x[m, n], eps) * w[n]
}
kernel summed(x: f32[M, N]) -> y: f32[M] { y[m] = sum[n](x[m, n]) }
kernel largest(x: f32[M, N]) -> y: f32[M] { y[m] = max[n](x[m, n]) }
kernel biased(x: f32[M, N], w: f32[N]) -> y: f32[M, N] {
    h[m, n] = x[m, n] + w[n]
    y[m, n] = gelu(h[m, n])
}
"""
ELEMENTS = 1 << 20
"""Elements of each input: 4 MB, more than a core's own caches hold."""
EPS = 1e-5


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _layernorm(x: Any, w: Any, b: Any) -> Any:
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + x.dtype.type(EPS)) * w + b


def _rmsnorm(x: Any, w: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(EPS)) * w


def rows(quick: bool) -> Iterator[Case]:
    program = tl.parse(ROWS)
    kernel = {name: tl.compile(program[name]) for name in program.kernels}
    for n in (128, 4096) if quick else (128, 512, 1000, 1024, 4096, 16384, 65536):
        x, w, b = f32(ELEMENTS // n, n), f32(n), f32(n)
        yield row_case("softmax", kernel["soft"], _softmax, torch_softmax, (x,))
        yield row_case("layer norm", kernel["layer"], _layernorm, torch_layer_norm, (x, w, b), EPS)
        yield row_case("rms norm", kernel["rms"], _rmsnorm, torch_rms_norm, (x, w), EPS)
        if n in (128, 4096):
            yield row_case("bias, gelu", kernel["biased"], _biased, torch_biased, (x, w))
            yield row_case("sum", kernel["summed"], lambda x: x.sum(-1), lambda x: x.sum(-1), (x,))
            yield row_case("max", kernel["largest"], lambda x: x.max(-1), lambda x: x.amax(-1), (x,))


def row_case(
    name: str, kernel: Any, numpy: Any, torch_call: Any, arrays: tuple[Any, ...], *numbers: float
) -> Case:
    """A kernel of ROWS on arrays of which the first is the matrix; `numpy` gives the reference too, in float64."""
    m, n = arrays[0].shape
    written = 1 if name in ("sum", "max") else n
    return Case(
        f"{name} {m}x{n}",
        {
            **ours(kernel, *arrays, *numbers, naive=written == n),
            "numpy": lambda: numpy(*arrays),
            **with_torch(torch_call, *arrays),
        },
        lambda: numpy(*(x.astype(np.float64) for x in arrays)),
        1e-5,
        moved_bytes=4.0 * m * (n + written),
    )


def _biased(x: Any, w: Any) -> Any:
    return gelu(x + w)


def torch_softmax(x: Any) -> Any:
    return torch.softmax(x, -1)


def torch_layer_norm(x: Any, w: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, w.shape, w, b, EPS)


def torch_rms_norm(x: Any, w: Any) -> Any:
    return torch.nn.functional.rms_norm(x, w.shape, w, EPS)


def torch_biased(x: Any, w: Any) -> Any:
    return torch.nn.functional.gelu(x + w, approximate="tanh")


# ---------------------------------------------------------------- small calls


def small(quick: bool) -> Iterator[Case]:
    kernel = compiled(PRODUCT, "product")
    for n in (16, 64) if quick else (16, 32, 48, 64, 96):
        a, b = f32(n, n), f32(n, n)
        yield Case(
            f"product {n}x{n}x{n}",
            {
                **ours(kernel, a, b, naive=False),
                "numpy": lambda a=a, b=b: a @ b,
                **with_torch(operator.matmul, a, b),
            },
            lambda a=a, b=b: a.astype(np.float64) @ b,
            1e-5,
            2.0 * n**3,
        )
    for s in (64,) if quick else (16, 32, 64):
        yield attention_case("full", 4, s, s, 64)
        q, k, v = (f32(1, 4, s, 64) for _ in range(3))
        seen = visible("full", s, s)
        yield Case(
            f"tl.attention H4 {s}x{s} D64",
            {
                "tileloom": lambda q=q, k=k, v=v: tl.attention(q, k, v),
                **torch_attention("full", q, k, v, seen),
            },
            lambda q=q, k=k, v=v, seen=seen: exact_attention(q, k, v, seen),
            1e-5,
            16.0 * s * s * 64,
        )
    x = f32(16, 64)
    yield Case(
        "softmax 16x64",
        {**ours(compiled(ROWS, "soft"), x), **with_torch(torch_softmax, x)},
        lambda: _softmax(x.astype(np.float64)),
        1e-5,
    )


# ---------------------------------------------------------------- a model


def minilm(quick: bool) -> Iterator[Case]:
    """The encoder of `examples/minilm.py`, against torch's functions on the same weights."""
    sys.path.insert(0, str(EXAMPLES))
    from minilm import Encoder
    from real_attention import encode, exact_attention, load_weights, model_folder

    exact = load_weights(model_folder())
    weights = {name: w.astype(np.float32) for name, w in exact.items()}
    b, n = (4, 32) if quick else (32, 128)
    ids, keep = rng.integers(1000, 20000, (b, n)), np.ones((b, n), np.bool_)
    encoder = Encoder(weights)
    yield Case(
        f"MiniLM batch {b}, length {n}",
        {
            "tileloom": lambda: encoder(ids, keep),
            **(with_torch(torch_encoder(weights, ids)) if torch else {}),
        },
        lambda: encode(exact, ids, keep, exact_attention),
        1e-4,
        notes={"sentences": b},
    )


def torch_encoder(weights: dict[str, Any], ids: Any) -> Call:
    """The same layers, eager; every token is kept."""
    from real_attention import HEADS, LAYERS, NORM_EPSILON

    t = {name: torch.from_numpy(w) for name, w in weights.items()}
    tokens, fn = torch.from_numpy(ids), torch.nn.functional

    def dense(name: str, x: Any) -> Any:
        return fn.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    def norm(name: str, x: Any) -> Any:
        return fn.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], NORM_EPSILON)

    def layer(here: str, x: Any) -> Any:
        b, n, c = x.shape
        q, k, v = (
            dense(f"{here}.attention.self.{p}", x).view(b, n, HEADS, -1).transpose(1, 2)
            for p in ("query", "key", "value")
        )
        o = fn.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        y = norm(f"{here}.attention.output.LayerNorm", x + dense(f"{here}.attention.output.dense", o))
        z = fn.gelu(dense(f"{here}.intermediate.dense", y))
        return norm(f"{here}.output.LayerNorm", y + dense(f"{here}.output.dense", z))

    @torch.inference_mode()
    def encoder() -> Any:
        e = "embeddings"
        x = t[f"{e}.word_embeddings.weight"][tokens] + t[f"{e}.token_type_embeddings.weight"][0]
        x = norm(f"{e}.LayerNorm", x + t[f"{e}.position_embeddings.weight"][: ids.shape[1]])
        for number in range(LAYERS):
            x = layer(f"encoder.layer.{number}", x)
        return fn.normalize(x.mean(1), dim=-1)

    return encoder


SUITES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "gemm": gemm,
    "gemm_bf16": gemm_bf16,
    "attention": attention,
    "decode": decode,
    "rows": rows,
    "small": small,
    "minilm": minilm,
}
