"""Tile programs that the tests of the simt tier run: under emulation at tiny sizes, and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
TYPES = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "i64": np.int64, "i32": np.int32, "i16": np.int16, "i8": np.int8, "u8": np.uint8, "bool": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A module's text, shapes of the tensors it reads (`f32 7 300`), scalars, and the error allowed in outputs.

    `special` replaces values of an input: (tensor, index, value).
    """

    name: str
    text: str
    tensors: dict[str, str]
    scalars: dict[str, float] = field(default_factory=dict)
    tolerance: float = 2e-6
    special: tuple[tuple[str, Any, Any], ...] = ()

    def inputs(self, seed: int = 0) -> dict[str, Array]:
        made = {}
        for i, (name, words) in enumerate(self.tensors.items()):
            kind, *shape = words.split()
            made[name] = _values(np.random.default_rng((seed, i)), TYPES[kind], tuple(map(int, shape)))
        for name, index, value in self.special:
            made[name][index] = value
        return made


def _values(rng: np.random.Generator, kind: Any, shape: tuple[int, ...]) -> Array:
    if kind is np.bool_:
        return rng.random(shape) < 0.6
    if np.issubdtype(kind, np.integer):
        low = 0 if kind is np.uint8 else -5
        return rng.integers(low, 6, shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def module(name: str, signature: str, body: str, extents: str, head: str = "") -> str:
    return f"module {name} {{ tile {name}({signature}) {{\n extents {extents}\n {head}\n{body}\n}} }}"


# ---------------------------------------------------------------- the five that must assemble


def vector_add(tile: int) -> str:
    return module(
        "add", "x: f32[N], y: f32[N], z: out f32[N]",
        f"for i in N by {tile} parallel {{ store z[i] = load x[i] + load y[i] }}", "N",
    )  # fmt: skip


def matmul_gelu(m: int, n: int, k: int, kind: str = "f32") -> str:
    return module(
        "matmul", f"a: {kind}[M, K], b: {kind}[K, N], bias: f32[N], c: out f32[M, N]",
        f"""for mt in M by {m}, nt in N by {n} parallel {{
            for kt in K by {k} carry (acc: f32[mt, nt] = fill(0.0)) {{
                yield acc + dot[kt](load a[mt, kt], load b[kt, nt])
            }}
            x: f32[mt, nt] = acc + load bias[nt]
            store c[mt, nt] = 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
        }}""", "M, N, K",
    )  # fmt: skip


def row_softmax(m: int, n: int) -> str:
    return module(
        "softmax", "x: f32[M, N], y: out f32[M, N]",
        f"""for mt in M by {m} parallel {{
            for nt in N by {n} carry (r: f32[mt] = fill(-inf), l: f32[mt] = fill(0.0)) {{
                xt: f32[mt, nt] = load x[mt, nt]
                r1: f32[mt] = max(r, max[nt](xt))
                r0: f32[mt] = where(r1 == -inf, 0.0, r1)
                yield r1, l * exp(r - r0) + sum[nt](exp(xt - r0))
            }}
            m0: f32[mt] = where(r == -inf, 0.0, r)
            for nu in N by {n} {{ store y[mt, nu] = where(l == 0.0, 0.0, exp(load x[mt, nu] - m0) / l) }}
        }}""", "M, N",
    )  # fmt: skip


def layernorm(m: int, n: int) -> str:
    return module(
        "layernorm", "x: f32[M, N], w: f32[N], b: f32[N], y: out f32[M, N]",
        f"""for mt in M by {m} parallel {{
            for nt in N by {n} carry (total: f32[mt] = fill(0.0)) {{ yield total + sum[nt](load x[mt, nt]) }}
            mu: f32[mt] = total / f32(N)
            for nv in N by {n} carry (square: f32[mt] = fill(0.0)) {{
                delta: f32[mt, nv] = load x[mt, nv] - mu
                yield square + sum[nv](delta * delta)
            }}
            scale: f32[mt] = rsqrt(square / f32(N) + 0.00001)
            for nu in N by {n} {{ store y[mt, nu] = (load x[mt, nu] - mu) * scale * load w[nu] + load b[nu] }}
        }}""", "M, N",
    )  # fmt: skip


def attention(m: int, n: int, d: int, kind: str = "f16", bias: bool = False) -> str:
    """Causal to the lower right, grouped heads; `bias` adds a matrix instead of the mask."""
    keep = "load bias[mt, nt] + scale * dot[d](qt, kt)" if bias else (
        "where(nt <= mt + N - M, scale * dot[d](qt, kt), -inf)"
    )  # fmt: skip
    until = "" if bias else f"from 0 to mt + {m} + N - M"
    return module(
        "attention", f"q: {kind}[B, H, M, D], k: {kind}[B, G, N, D], v: {kind}[B, G, N, E], scale: f32, "
        + ("bias: f32[M, N], " if bias else "") + f"o: out {kind}[B, H, M, E], lse: out f32[B, H, M]",
        f"""for b in B, h in H, mt in M by {m} parallel {{
            qt: {kind}[mt, d] = load q[b, h, mt, d]
            for nt in N by {n} {until}
                carry (r: f32[mt] = fill(-inf), l: f32[mt] = fill(0.0), acc: f32[mt, e] = fill(0.0)) {{
                kt: {kind}[nt, d] = load k[b, h // (H // G), nt, d]
                s: f32[mt, nt] = {keep}
                r1: f32[mt] = max(r, max[nt](s))
                r0: f32[mt] = where(r1 == -inf, 0.0, r1)
                p: f32[mt, nt] = exp(s - r0)
                c: f32[mt] = exp(r - r0)
                yield r1, l * c + sum[nt](p), acc * c + dot[nt]({kind}(p), load v[b, h // (H // G), nt, e])
            }}
            store o[b, h, mt, e] = {kind}(where(l == 0.0, 0.0, acc / l))
            store lse[b, h, mt] = where(r == -inf, r, r + log(l))
        }}""", "B, H, G, M, N, D, E", f"static D = {d}, E = {d}\n whole d = D, e = E",
    )  # fmt: skip


def ladder() -> Iterator[tuple[str, str]]:
    """The five at sizes worth running, by name."""
    yield "add", vector_add(1024)
    yield "matmul", matmul_gelu(64, 64, 16)
    yield "softmax", row_softmax(4, 256)
    yield "layernorm", layernorm(4, 256)
    yield "attention", attention(64, 64, 64)


# ---------------------------------------------------------------- every kind of program, small

ELEMENTWISE = [
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "tanh",
    "erf",
    "sin",
    "cos",
    "floor",
    "ceil",
    "round",
    "abs",
]
LOWEST = np.finfo(np.float32).min


def every_function(kind: str) -> str:
    outs = ", ".join(f"o{i}: out {kind}[N]" for i in range(len(ELEMENTWISE)))
    stores = "\n".join(f"store o{i}[i] = {f}(xt)" for i, f in enumerate(ELEMENTWISE))
    return module(
        "functions", f"x: {kind}[N], {outs}",
        f"for i in N by 32 parallel {{ xt: {kind}[i] = load x[i]\n{stores}\n }}", "N",
    )  # fmt: skip


CASES = [
    Case("add", vector_add(256), {"x": "f32 1000", "y": "f32 1000"}, tolerance=0),
    Case("add of nothing", vector_add(256), {"x": "f32 0", "y": "f32 0"}, tolerance=0),
    Case(
        "matmul",
        matmul_gelu(16, 16, 8),
        {"a": "f32 20 19", "b": "f32 19 37", "bias": "f32 37"},
        tolerance=5e-6,
    ),
    Case("matmul of nothing", matmul_gelu(16, 16, 8), {"a": "f32 5 0", "b": "f32 0 3", "bias": "f32 3"}),
    Case(
        "matmul bf16",
        matmul_gelu(16, 16, 8, "bf16"),
        {"a": "bf16 9 11", "b": "bf16 11 17", "bias": "f32 17"},
        tolerance=5e-6,
    ),
    Case(
        "matmul f64",
        module(
            "product",
            "a: f64[M, K], b: f64[N, K], c: out f64[M, N]",
            """for mt in M by 16, nt in N by 32 parallel {
            for kt in K by 8 carry (acc: f64[mt, nt] = fill(0.0f64)) { yield acc + dot[kt](load a[mt, kt], load b[nt, kt]) }
            store c[mt, nt] = acc
        }""",
            "M, N, K",
        ),
        {"a": "f64 18 13", "b": "f64 33 13"},
        tolerance=1e-14,
    ),
    Case(
        "matmul i8",
        module(
            "product",
            "a: i8[K, M], b: i8[K, N], c: out i32[M, N]",
            """for mt in M by 16, nt in N by 16 parallel {
            for kt in K by 8 carry (acc: i32[mt, nt] = fill(0i32)) { yield acc + dot[kt](load a[kt, mt], load b[kt, nt]) }
            store c[mt, nt] = acc
        }""",
            "M, N, K",
        ),
        {"a": "i8 13 18", "b": "i8 13 33"},
        tolerance=0,
    ),
    Case(
        "two products in one sum",
        module(
            "products",
            "a: f32[M, K], b: f32[K, N], x: f32[M, L], y: f32[L, N], c: out f32[M, N]",
            """for mt in M by 16, nt in N by 16 parallel {
            for kt in K by 8 carry (acc: f32[mt, nt] = fill(0.0)) { yield acc + dot[kt](load a[mt, kt], load b[kt, nt]) }
            for lt in L by 8 carry (more: f32[mt, nt] = acc) { yield more + 2.0 * dot[lt](load x[mt, lt], load y[lt, nt]) }
            store c[mt, nt] = more
        }""",
            "M, N, K, L",
        ),
        {"a": "f32 17 9", "b": "f32 9 19", "x": "f32 17 5", "y": "f32 5 19"},
        tolerance=5e-6,
    ),
    Case(
        "chained products",
        module(
            "chain",
            "a: f32[M, K], b: f32[K, N], w: f32[N, L], c: out f32[M, L]",
            """for mt in M by 16 parallel {
            s: f32[mt, n] = dot[k](load a[mt, k], load b[k, n])
            store c[mt, l] = dot[n](max(s, 0.0), load w[n, l])
        }""",
            "M, N, K, L",
            "static N = 21, K = 12, L = 9\n whole n = N, k = K, l = L",
        ),
        {"a": "f32 20 12", "b": "f32 12 21", "w": "f32 21 9"},
        tolerance=5e-6,
    ),
    Case(
        "batched product",
        module(
            "batched",
            "a: f32[H, M, K], b: f32[H, K, N], c: out f32[H, M, N]",
            """for ht in H by 2, mt in M by 8, nt in N by 16 parallel {
            store c[ht, mt, nt] = dot[k](load a[ht, mt, k], load b[ht, k, nt])
        }""",
            "H, M, N, K",
            "static K = 5\n whole k = K",
        ),
        {"a": "f32 3 9 5", "b": "f32 3 5 17"},
        tolerance=5e-6,
    ),
    Case(
        "matrix times vector",
        module(
            "matvec",
            "q: f32[D], k: f32[N, D], s: out f32[N]",
            "for nt in N by 32 parallel { store s[nt] = dot[d](load q[d], load k[nt, d]) }",
            "N, D",
            "static D = 40\n whole d = D",
        ),
        {"q": "f32 40", "k": "f32 50 40"},
        tolerance=5e-6,
    ),
    Case(
        "softmax",
        row_softmax(4, 64),
        {"x": "f32 7 150"},
        special=(
            ("x", (1, slice(0, 64)), -np.inf),
            ("x", 2, -np.inf),
            ("x", 3, LOWEST),
            ("x", (4, 5), np.nan),
        ),
    ),
    Case(
        "softmax of one row a block",
        module(
            "softmax",
            "x: f32[M, N], y: out f32[M, N]",
            """for m in M parallel {
            for nt in N by 256 carry (r: f32 = -inf, l: f32 = 0.0) {
                xt: f32[nt] = load x[m, nt]
                r1: f32 = max(r, max[nt](xt))
                yield r1, l * exp(r - r1) + sum[nt](exp(xt - r1))
            }
            for nu in N by 256 { store y[m, nu] = exp(load x[m, nu] - r) / l }
        }""",
            "M, N",
        ),
        {"x": "f32 3 600"},
    ),
    Case("layernorm", layernorm(4, 64), {"x": "f32 6 100", "w": "f32 100", "b": "f32 100"}, tolerance=5e-6),
    Case(
        "attention",
        attention(16, 16, 16),
        {"q": "f16 1 2 21 16", "k": "f16 1 1 29 16", "v": "f16 1 1 29 16"},
        {"scale": 0.25},
        tolerance=2e-3,
    ),
    Case(
        "attention D 24, rows without keys",
        attention(16, 32, 24, "f32"),
        {"q": "f32 1 1 40 24", "k": "f32 1 1 21 24", "v": "f32 1 1 21 24"},
        {"scale": 0.2},
        tolerance=5e-6,
    ),
    Case(
        "attention with the lowest bias",
        attention(16, 16, 8, "f32", bias=True),
        {"q": "f32 1 1 20 8", "k": "f32 1 1 33 8", "v": "f32 1 1 33 8", "bias": "f32 20 33"},
        {"scale": 0.3},
        tolerance=5e-6,
        special=(
            ("bias", 3, LOWEST),
            ("bias", (4, slice(0, 16)), LOWEST),
            ("bias", (5, slice(0, 16)), -np.inf),
            ("bias", 6, -np.inf),
        ),
    ),
    Case(
        "sums over rows, columns and all",
        module(
            "sums",
            "x: f32[M, N], rows: out f32[N], columns: out f32[M], most: out f32[]",
            """xt: f32[m, n] = load x[m, n]
           store rows[n] = sum[m](xt)
           store columns[m] = sum[n](xt)
           store most[] = max[m, n](xt)""",
            "M, N",
            "static M = 19, N = 37\n whole m = M, n = N",
        ),
        {"x": "f32 19 37"},
        tolerance=5e-6,
    ),
    Case(
        "all reductions",
        module(
            "reductions",
            "x: f32[M, N], c: bool[M, N], k: i8[M, N], a: out f32[M], b: out f32[M], d: out i64[M], e: out i64[M], "
            "f: out bool[M], g: out bool[M], h: out i64[M], i: out i32[M], j: out i32[M], p: out i64[M]",
            """for mt in M by 8 parallel {
            xt: f32[mt, n] = load x[mt, n]
            ct: bool[mt, n] = load c[mt, n]
            kt: i8[mt, n] = load k[mt, n]
            store a[mt] = min[n](xt)
            store b[mt] = prod[n](xt)
            store d[mt] = argmax[n](xt)
            store e[mt] = argmin[n](kt)
            store f[mt] = any[n](ct)
            store g[mt] = all[n](ct)
            store h[mt] = sum[n](ct)
            store i[mt] = sum[n](kt)
            store j[mt] = max[n](kt)
            store p[mt] = argmax[n](ct)
        }""",
            "M, N",
            "static N = 21\n whole n = N",
        ),
        {"x": "f32 13 21", "c": "bool 13 21", "k": "i8 13 21"},
        special=(
            ("x", (2, 5), np.nan),
            ("x", (2, 9), np.nan),
            ("x", 3, 1.0),
            ("c", 4, True),
            ("c", 5, False),
        ),
        tolerance=1e-5,
    ),
    Case(
        "argmax between warps",
        module(
            "place",
            "x: f32[M, N], at: out i64[M]",
            "for m in M parallel { xt: f32[n] = load x[m, n]\n store at[m] = argmax[n](xt) }",
            "M, N",
            "static N = 300\n whole n = N",
        ),
        {"x": "f32 4 300"},
        tolerance=0,
        special=(("x", (0, slice(100, 110)), 9.0), ("x", (1, 290), np.nan), ("x", 2, -np.inf)),
    ),
    Case(
        "functions f32",
        every_function("f32"),
        {"x": "f32 50"},
        tolerance=1e-6,
        special=(("x", slice(0, 6), [0.0, -0.0, np.inf, -np.inf, np.nan, 90.0]),),
    ),
    Case("functions f64", every_function("f64"), {"x": "f64 50"}, tolerance=1e-13),
    Case(
        "float operations",
        module(
            "binary",
            "x: f32[N], y: f32[N], a: out f32[N], b: out f32[N], c: out f32[N], d: out f32[N], e: out f32[N], "
            "f: out f32[N], g: out f64[N], h: out f32[N], i: out f32[N]",
            """for i in N by 64 parallel {
            xt: f32[i] = load x[i]
            yt: f32[i] = load y[i]
            store a[i] = xt / yt
            store b[i] = xt // yt
            store c[i] = xt % yt
            store d[i] = min(xt, yt)
            store e[i] = pow(abs(xt), yt)
            store f[i] = fma(xt, yt, -xt)
            store g[i] = f64(xt) * f64(yt) - 1.0f64
            store h[i] = where(xt < yt and not (yt <= 0.0) or xt == 0.0, xt, -yt)
            store i[i] = xt * yt - xt
        }""",
            "N",
        ),
        {"x": "f32 70", "y": "f32 70"},
        tolerance=2e-6,
        special=(
            ("x", slice(0, 5), [np.nan, 1.0, 0.0, -0.0, np.inf]),
            ("y", slice(0, 5), [1.0, np.nan, 0.0, 5.0, 2.0]),
        ),
    ),
    Case(
        "integer operations",
        module(
            "integers",
            "x: i32[N], y: i32[N], z: i64[N], s: i8[N], a: out i32[N], b: out i32[N], c: out i32[N], d: out i64[N], "
            "e: out f32[N], f: out i32[N], g: out i8[N], h: out u8[N], i: out i32[N]",
            """for i in N by 64 parallel {
            xt: i32[i] = load x[i]
            yt: i32[i] = load y[i]
            store a[i] = xt // yt
            store b[i] = xt % yt
            store c[i] = xt * 1000000000i32 + yt
            store d[i] = load z[i] * 5000000000 - xt
            store e[i] = xt / yt
            store f[i] = max(abs(xt), -yt)
            store g[i] = i8(xt * 100i32)
            store h[i] = u8(load s[i])
            store i[i] = load s[i] * load s[i]
        }""",
            "N",
        ),
        {"x": "i32 70", "y": "i32 70", "z": "i64 70", "s": "i8 70"},
        tolerance=0,
        special=(("y", slice(0, 5), 0),),
    ),
    Case(
        "casts",
        module(
            "casts",
            "x: f32[N], a: out f16[N], b: out bf16[N], c: out i32[N], d: out i64[N], e: out i8[N], f: out u8[N], "
            "g: out bool[N], h: out i16[N], i: out f32[N], j: out f32[N]",
            """for i in N by 64 parallel {
            xt: f32[i] = load x[i]
            store a[i] = f16(xt)
            store b[i] = bf16(xt)
            store c[i] = i32(xt)
            store d[i] = i64(xt)
            store e[i] = i8(xt)
            store f[i] = u8(xt)
            store g[i] = bool(xt)
            store h[i] = i16(xt * 10000.0)
            store i[i] = f32(f16(xt)) + f32(bf16(xt))
            store j[i] = f32(xt < 0.0)
        }""",
            "N",
        ),
        {"x": "f32 70"},
        tolerance=0,
        special=(
            (
                "x",
                slice(0, 12),
                [np.nan, np.inf, -np.inf, 1e20, -1e20, 300.0, -300.0, 0.0, -0.0, 65520.0, 1e-7, 3.5],
            ),
        ),
    ),
    Case(
        "transpose",
        module(
            "transpose",
            "x: f32[M, N], y: out f32[N, M]",
            "for mt in M by 16, nt in N by 32 parallel { store y[nt, mt] = load x[mt, nt] }",
            "M, N",
        ),
        {"x": "f32 21 37"},
        tolerance=0,
    ),
    Case(
        "outer sum of one vector",
        module(
            "outer",
            "x: f32[M, K], y: out f32[M, M]",
            """for mt in M by 16, nt in M by 16 parallel {
            a: f32[mt] = sum[k](load x[mt, k])
            b: f32[nt] = sum[k](load x[nt, k])
            store y[mt, nt] = a - b
        }""",
            "M, K",
            "static K = 9\n whole k = K",
        ),
        {"x": "f32 20 9"},
        tolerance=5e-6,
    ),
    Case(
        "values that change sides",
        module(
            "sides",
            "x: f32[M, M], y: out f32[M, M]",
            """r: f32[i] = max[j](load x[i, j])
           t: f32[j, k] = load x[j, k] * 2.0
           u: f32[i, k] = dot[j](load x[i, j], t)
           c: f32[k] = sum[j](t)
           store y[i, k] = u + r * c""",
            "M",
            "static M = 18\n whole i = M, j = M, k = M",
        ),
        {"x": "f32 18 18"},
        tolerance=2e-5,
    ),
    Case(
        "gather and guarded reads",
        module(
            "gather",
            "x: f32[N, D], at: i32[M], y: out f32[M, D], z: out f32[M]",
            """for mt in M by 16 parallel {
            store y[mt, d] = load x[load at[mt], d]
            store z[mt] = where(1 <= mt, f32(load at[mt - 1]), 0.0) + where(mt + 1 < M, f32(load at[mt + 1]), 0.0)
        }""",
            "N, M, D",
            "static D = 5\n whole d = D",
        ),
        {"x": "f32 4 5", "at": "i32 21"},
        tolerance=0,
        special=(("at", slice(0, 3), [100, -100, 3]),),
    ),
    Case(
        "scattered sums",
        module(
            "histogram",
            "at: i32[M], w: f32[M], h: inout f32[N], k: inout i32[N]",
            """for mt in M by 64 parallel {
            i: i32[mt] = load at[mt]
            store h[i] += load w[mt]
            store k[i] += 1i32
        }""",
            "N, M",
        ),
        {"at": "i32 150", "w": "f32 150", "h": "f32 5", "k": "i32 5"},
        tolerance=2e-5,
    ),
    Case(
        "scattered stores and sums in place",
        module(
            "scatter",
            "at: i32[M], w: f16[M], y: inout f16[N], c: inout f16[M]",
            "for mt in M by 32 parallel { store y[load at[mt]] = load w[mt]\n store c[mt] += load w[mt] }",
            "N, M",
        ),
        {"at": "i32 6", "w": "f16 6", "y": "f16 8", "c": "f16 6"},
        tolerance=0,
        special=(("at", slice(0, 6), [7, 0, 9, -1, 3, 2]),),
    ),
    Case(
        "loops of all forms",
        module(
            "loops",
            "x: f32[M, N], lens: i64[M], a: out f32[M], b: out f32[M], c: out i64[M], d: out f32[M]",
            """for m in M parallel {
            for nt in N by 16 from 5 to load lens[m] reverse carry (s: f32 = 0.0, last: i64 = -1) {
                yield s * 0.5 + sum[nt](load x[m, nt]), max[nt](nt)
            }
            for n in N from 1 to N - 2 carry (u: f32 = 0.0, v: f32 = 1.0) { yield v, u + load x[m, n] }
            for i in M carry (t: f32 = 0.0) {
                for nu in N by 32 carry (w: f32 = t) { yield w + sum[nu](load x[i, nu]) }
                yield w * 0.25
            }
            store a[m] = s
            store b[m] = u - v
            store c[m] = last
            store d[m] = t
        }""",
            "M, N",
        ),
        {"x": "f32 5 70", "lens": "i64 5"},
        tolerance=2e-5,
        special=(("lens", slice(0, 5), [70, 3, 33, 0, 17]),),
    ),
    Case(
        "one axis in two loops",
        module(
            "split",
            "x: f32[M, N], y: out f32[M]",
            """for mt in M by 8 parallel {
            for n in N by 16 from 0 to 21 carry (s: f32[mt] = fill(0.0)) { yield s + sum[n](load x[mt, n]) }
            for n in N by 16 from 21 to N carry (t: f32[mt] = s) { yield t * 0.5 + sum[n](load x[mt, n]) }
            store y[mt] = t
        }""",
            "M, N",
        ),
        {"x": "f32 9 50"},
        tolerance=5e-6,
    ),
    Case(
        "tiles that trade places",
        module(
            "trade",
            "x: f32[N], y: f32[N], a: out f32[N], b: out f32[N]",
            """for i in N by 64 parallel {
            for k in N carry (p: f32[i] = load x[i], q: f32[i] = load y[i]) { yield q, p + 1.0 }
            store a[i] = p
            store b[i] = q
        }""",
            "N",
        ),
        {"x": "f32 7", "y": "f32 7"},
        tolerance=0,
    ),
    Case(
        "names of Python",
        module(
            "lambda",
            "cuda: f32[class], exp_f32: f32[class], thread: out f32[class]",
            "for for_ in class by 64 parallel { task: f32[for_] = exp(load cuda[for_])\n"
            " store thread[for_] = task + load exp_f32[for_] }",
            "class",
        ),
        {"cuda": "f32 70", "exp_f32": "f32 70"},
    ),
    Case(
        "two programs",
        """module two {
        scratch s: f32[M]
        tile first(x: f32[M, N], s: out f32[M]) { extents M, N
            for mt in M by 8 parallel {
                for nt in N by 32 carry (t: f32[mt] = fill(0.0)) { yield t + sum[nt](load x[mt, nt]) }
                store s[mt] = t } }
        tile second(x: f32[M, N], s: f32[M], y: out f32[M, N]) { extents M, N
            for mt in M by 8, nt in N by 32 parallel { store y[mt, nt] = load x[mt, nt] - load s[mt] } }
    }""",
        {"x": "f32 11 40"},
        tolerance=1e-5,
    ),
]
