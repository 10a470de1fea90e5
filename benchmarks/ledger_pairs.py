"""The (program, shape) pairs on which the fusion ledger is scored: committed before the first scoring.

Each family is one kernel whose intermediates can be stored or computed where they are used. Some lose by fusing: a value
that many tiles need is then computed for each of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ATTENTION = """
kernel weighted(q: f32[M, D], k: f32[N, D], v: f32[N, E]) -> o: f32[M, E] {
    s[m, n] = 0.125 * sum[d](q[m, d] * k[n, d])
    p[m, n] = softmax[n](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""
CAUSAL = ATTENTION.replace("softmax[n]", "softmax[n | n <= m]").replace("weighted", "causal")
EPILOGUE = """
kernel epilogue(a: f32[M, K], b: f32[K, N], c: f32[N]) -> o: f32[M, N] {
    h[m, n] = sum[k](a[m, k] * b[k, n]) + c[n]
    o[m, n] = gelu(h[m, n])
}
"""
TWO_PRODUCTS = """
kernel chain(x: f32[M, K], w: f32[K, J], u: f32[J, N]) -> o: f32[M, N] {
    h[m, j] = gelu(sum[k](x[m, k] * w[k, j]))
    o[m, n] = sum[j](h[m, j] * u[j, n])
}
"""
NORM_PRODUCT = """
kernel normed(x: f32[M, K], w: f32[K, N]) -> o: f32[M, N] {
    y[m, k] = rmsnorm[k](x[m, k], 0.00001)
    o[m, n] = sum[k](y[m, k] * w[k, n])
}
"""
ROW_SCALE = """
kernel rowscale(a: f32[M, K], x: f32[M, N]) -> o: f32[M, N] {
    r[m] = sum[k](exp(a[m, k]))
    o[m, n] = x[m, n] * r[m]
}
"""
ROW_COLUMN = """
kernel outer(x: f32[M, K], y: f32[N, K]) -> o: f32[M, N] {
    a[m] = sum[k](tanh(x[m, k]))
    b[n] = sum[k](tanh(y[n, k]))
    o[m, n] = a[m] * b[n]
}
"""
CHAIN = """
kernel pointwise(x: f32[M, N], y: f32[M, N]) -> o: f32[M, N] {
    t[m, n] = x[m, n] * y[m, n] + 0.5
    u[m, n] = t[m, n] * t[m, n] - x[m, n]
    o[m, n] = u[m, n] * 0.25 + t[m, n]
}
"""
NORMALISE = """
kernel rows(x: f32[M, N]) -> o: f32[M, N] {
    e[m, n] = exp(x[m, n])
    z[m] = sum[n](e[m, n])
    o[m, n] = e[m, n] / z[m]
}
"""
NEIGHBOURS = """
kernel neighbours(x: f32[M, N]) -> o: f32[M, N] {
    g[m, n] = tanh(exp(x[m, n]) + tanh(x[m, n]))
    o[m, n] = g[max(m - 1, 0), n] + g[m, n] + g[min(m + 1, M - 1), n] + g[max(m - 2, 0), n]
}
"""
TWO_VECTORS = """
kernel vectors(a: f32[M, K], w: f32[K, N], x: f32[N]) -> y: f32[M] {
    u[k] = sum[n](w[k, n] * x[n])
    y[m] = sum[k](a[m, k] * u[k])
}
"""
GATHERED = """
kernel gathered(table: f32[V, D], id: i32[T]) -> o: f32[T, D] {
    y[v, d] = layernorm[d](table[v, d], 0.00001)
    o[t, d] = y[id[t], d]
}
"""
NEAREST = """
kernel nearest(x: f32[M, D], c: f32[K, D]) -> o: f32[M] {
    s[m, k] = sum[d](x[m, d] * c[k, d])
    o[m] = max[k](s[m, k])
}
"""
GATED = """
kernel gated(x: f32[M, K], w: f32[K, N], u: f32[K, N]) -> o: f32[M, N] {
    a[m, n] = sum[k](x[m, k] * w[k, n])
    b[m, n] = sum[k](x[m, k] * u[k, n])
    o[m, n] = silu(a[m, n]) * b[m, n]
}
"""
SHARED = """
kernel shared(x: f32[M, K], w: f32[K, N], u: f32[K, J]) -> (o: f32[M, N], p: f32[M, J]) {
    h[m, k] = tanh(exp(x[m, k]))
    o[m, n] = sum[k](h[m, k] * w[k, n])
    p[m, j] = sum[k](h[m, k] * u[k, j])
}
"""


@dataclass(frozen=True)
class Pair:
    """One program at one shape."""

    family: str
    text: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return f"{self.family} " + " ".join(f"{k}={v}" for k, v in self.sizes)


FAMILIES: dict[str, tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "weighted": (
        ATTENTION, ("M", "N", "D", "E"),
        ((512, 512, 64, 64), (2048, 2048, 64, 64), (1024, 1024, 128, 128), (512, 4096, 64, 64), (1024, 1024, 1024, 1024),
         (256, 256, 2048, 2048), (64, 8192, 64, 64)),
    ),
    "causal": (CAUSAL, ("M", "N", "D", "E"), ((512, 512, 64, 64), (2048, 2048, 64, 64), (1024, 1024, 128, 128))),
    "epilogue": (EPILOGUE, ("M", "K", "N"), ((512, 512, 512), (1024, 64, 1024), (2048, 32, 2048), (256, 2048, 256))),
    "chain": (
        TWO_PRODUCTS, ("M", "K", "J", "N"),
        ((512, 512, 512, 512), (1024, 256, 64, 1024), (256, 512, 2048, 512), (2048, 64, 32, 2048), (1024, 1024, 16, 512)),
    ),
    "normed": (NORM_PRODUCT, ("M", "K", "N"), ((512, 512, 512), (1024, 768, 2304), (2048, 256, 64), (256, 4096, 1024))),
    "rowscale": (ROW_SCALE, ("M", "K", "N"), ((1024, 1024, 1024), (512, 4096, 2048), (2048, 64, 2048), (256, 8192, 4096))),
    "outer": (ROW_COLUMN, ("M", "N", "K"), ((512, 512, 512), (1024, 1024, 64), (2048, 2048, 256), (256, 4096, 1024))),
    "pointwise": (CHAIN, ("M", "N"), ((512, 1024), (2048, 2048), (4096, 4096), (64, 64))),
    "rows": (NORMALISE, ("M", "N"), ((512, 1024), (2048, 4096), (64, 65536), (8192, 128))),
    "neighbours": (NEIGHBOURS, ("M", "N"), ((512, 1024), (2048, 2048), (64, 4096), (1024, 256))),
    "vectors": (TWO_VECTORS, ("M", "K", "N"), ((1024, 1024, 1024), (4096, 256, 2048), (64, 512, 512), (2048, 2048, 64))),
    "gathered": (GATHERED, ("V", "D", "T"), ((1000, 384, 4096), (30000, 384, 1024), (64, 1024, 8192), (20000, 128, 2000))),
    "nearest": (NEAREST, ("M", "D", "K"), ((4096, 64, 256), (2048, 128, 4096), (8192, 32, 64), (512, 512, 2048))),
    "gated": (GATED, ("M", "K", "N"), ((512, 512, 512), (1024, 64, 1024), (256, 1024, 1024), (2048, 128, 512))),
    "shared": (SHARED, ("M", "K", "N", "J"), ((512, 512, 512, 512), (1024, 256, 64, 64), (2048, 512, 1024, 64),
               (256, 2048, 1024, 1024))),
}  # fmt: skip

PAIRS: tuple[Pair, ...] = tuple(
    Pair(family, text, tuple(zip(extents, shape, strict=True)))
    for family, (text, extents, shapes) in FAMILIES.items()
    for shape in shapes
)


def drawn(seed: int, count: int = 20) -> tuple[Pair, ...]:
    """Further pairs: a family and extents between 32 and 4096 drawn by a seed, at most 2^33 multiplications each."""
    rng = random.Random(seed)
    out: list[Pair] = []
    while len(out) < count:
        family = rng.choice(sorted(FAMILIES))
        text, extents, _ = FAMILIES[family]
        sizes = tuple((e, int(2 ** rng.uniform(5, 12))) for e in extents)
        work = 1
        for _, n in sizes[:3]:
            work *= n
        if work <= 1 << 31:
            out.append(Pair(family, text, sizes))
    return tuple(out)
