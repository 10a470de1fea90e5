"""Generated CPU code against the tile interpreter and float64 NumPy: every kind of program, ragged, strided, empty."""

from __future__ import annotations

import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from drawn_programs import DrawnProgram, programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tile_runner import both, close, compiled, functions_of, module_of

import tileloom as tl
from tileloom.compiler.codegen import cpu
from tileloom.compiler.interpreter.elements import NUMPY
from tileloom.compiler.interpreter.tile import integer, run_module
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule import Fuse
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import CPU
from tileloom.compiler.tile_ir import TileModule
from tileloom.dsl.load import parse
from tileloom.runtime import kernels
from tileloom.runtime.launch import Kernel
from tileloom.runtime.threads import thread_limit

RNG = np.random.default_rng(20)
TILE = 32
RAGGED = (1, 17, TILE - 1, TILE, TILE + 1, 3 * TILE + 5)
FLOATS = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCE = {"f32": 3e-6, "f64": 1e-13, "f16": 2e-3, "bf16": 2e-2}


def drawn_alone(*shape: int) -> np.ndarray:
    """Like `normal`, without a change of what later tests draw."""
    return np.random.default_rng(21).standard_normal(shape).astype(np.float32)


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


# ---------------------------------------------------------------- matrix products

MATMUL = """module m {
    tile product(a: T[M, K], b: T[K, N], bias: T[N], c: out OUT[M, N]) {
        extents M, K, N
        for m in M by 32, n in N by 32 parallel {
            for k in K by 16 carry (acc: ACC[m, n] = fill(ZERO)) {
                yield acc + dot[k](load a[m, k], load b[k, n])
            }
            store c[m, n] = acc + load bias[n]
        }
    }
}"""


def matmul(dtype: str) -> str:
    integer = dtype == "i8"
    acc = "f64" if dtype == "f64" else "i32" if integer else "f32"
    zero = "0i32" if integer else "0.0f64" if dtype == "f64" else "0.0"
    text = MATMUL.replace("OUT", "i32" if integer else dtype)
    return text.replace("T[", f"{dtype}[").replace("ACC", acc).replace("ZERO", zero)


@pytest.mark.parametrize("m", RAGGED)
def test_matmul_f32_at_ragged_sizes(m: int) -> None:
    for k, n in ((1, TILE), (16, 1), (35, TILE + 1)):
        a, b, bias = normal(m, k), normal(k, n), normal(n)
        got = both(matmul("f32"), {"a": a, "b": b, "bias": bias})
        close(got["c"], (a.astype(np.float64) @ b + bias).astype(np.float32), 1e-5)


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_matmul_in_each_float(dtype: str) -> None:
    t = FLOATS[dtype]
    args = {"a": normal(45, 19, dtype=t), "b": normal(19, 37, dtype=t), "bias": normal(37, dtype=t)}
    both(matmul(dtype), args, TOLERANCE[dtype])


def test_matmul_of_small_integers_is_exact() -> None:
    a = RNG.integers(-128, 128, (45, 300), np.int8)
    b = RNG.integers(-128, 128, (300, 37), np.int8)
    bias = RNG.integers(-128, 128, 37, np.int8)
    got = both(matmul("i8"), {"a": a, "b": b, "bias": bias})
    np.testing.assert_array_equal(got["c"], a.astype(np.int32) @ b.astype(np.int32) + bias)


def test_any_strides_give_the_bits_of_a_contiguous_copy() -> None:
    """But where a tile has so few rows or columns that operands are read as they lie."""
    a, b = normal(2 * 50, 3 * 40), normal(45, 40)
    views = {"a": a[::-2, ::3], "b": b.T, "bias": np.broadcast_to(normal(1), (45,))}
    plain = {n: np.ascontiguousarray(x) for n, x in views.items()}
    np.testing.assert_array_equal(both(matmul("f32"), views, 1e-5)["c"], compiled(matmul("f32"), plain)["c"])


def test_a_few_columns_or_rows_of_any_strides() -> None:
    for m, n in ((50, 33), (33, 50)):
        a, b = normal(2 * m, 3 * 40)[::-2, ::3], normal(n, 40).T
        got = both(matmul("f32"), {"a": a, "b": b, "bias": np.zeros(n, np.float32)}, 1e-5)
        close(got["c"], (a.astype(np.float64) @ b).astype(np.float32), 1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)])
def test_zero_extents(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    got = both(matmul("f32"), {"a": normal(m, k), "b": normal(k, n), "bias": normal(n)})
    assert got["c"].shape == (m, n)


def test_another_size_compiles_nothing() -> None:
    task = functions_of(matmul("f32"))["product_tasks"]
    both(matmul("f32"), {"a": normal(5, 6), "b": normal(6, 7), "bias": normal(7)})
    before = len(task.signatures)  # type: ignore[attr-defined]
    both(matmul("f32"), {"a": normal(77, 66), "b": normal(66, 55), "bias": normal(55)}, 1e-5)
    assert len(task.signatures) == before  # type: ignore[attr-defined]


SUMS = """module s {
    tile sums(a: f32[B, M, K], b: f32[K, N], c: out f32[B, M, N], d: out f32[B, M, N]) {
        extents B, M, K, N
        for z in B, m in M by 32, n in N by 32 parallel {
            for k in K by 16 carry (total: f32[m, n] = fill(0.0)) {
                yield total + dot[k](load a[z, m, k], load b[k, n])
            }
            store c[z, m, n] = total
            for j in K by 16 carry (other: f32[m, n] = fill(0.0)) {
                yield other + dot[j](load a[z, m, j], load b[j, n])
            }
            store d[z, m, n] = other * 2.0
        }
    }
}"""


@pytest.mark.parametrize("k", [0, 16, 45])
def test_a_sum_that_is_stored_as_it_is_grows_in_the_output(k: int) -> None:
    """It has no storage of its own; one that is changed on the way does. No element beside the tiles is touched."""
    a, b = normal(2, 45, k), normal(k, 37)
    got = both(SUMS, {"a": a, "b": b}, 1e-5)
    close(got["c"], (a.astype(np.float64) @ b).astype(np.float32), 1e-5)
    close(got["d"], 2 * (a.astype(np.float64) @ b).astype(np.float32), 1e-5)
    source = cpu.generate(module_of(SUMS))
    assert "other = part(" in source
    assert "total = part(" not in source
    assert "matrix(c, (z, m_0, n_0), 1, 2, 0)," in source


def test_a_sum_in_an_output_of_any_strides() -> None:
    made = compile_kernel(parse(PRODUCT)["product"], CPU, {"M": 70, "K": 33, "N": 51})
    kernel = Kernel(made.graph, made.module, kernels.build(made.source))
    a, b = normal(70, 33), normal(33, 51)
    for order in ("C", "F"):
        space = np.full((140, 102), 7, np.float32, order=order)
        kernel(a, b, out=space[::2, ::2])
        close(space[::2, ::2].copy(), (a.astype(np.float64) @ b).astype(np.float32), 1e-5)
        assert (space[1::2] == 7).all()
        assert (space[:, 1::2] == 7).all()


PRODUCT = "kernel product(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }"


PRODUCTS = """module p {
    tile p(a: f32[B, M, K], b: f32[B, N, K], w: f32[K], u: f32[M, K], rows: out f32[B, M], outer: out f32[B, N, M],
           both: out f32[B, M], all: out f32[B], sums: out f32[M, N], batch: out f32[B, M, N]) {
        extents B, M, N, K
        static K = 24
        whole k = K
        for b0 in B parallel {
            for m in M by 8 {
                x: f32[m, k] = load a[b0, m, k]
                store rows[b0, m] = dot[k](x, load w[k])
                store both[b0, m] = 2.0 * dot[k](x, load u[m, k]) - 1.0
                for n in N by 8 {
                    y: f32[n, k] = load b[b0, n, k]
                    store outer[b0, n, m] = dot[k](x, y)
                }
            }
            store all[b0] = dot[k](load a[b0, 0, k], load w[k])
        }
        for m in M by 8, n in N by 8 parallel {
            for bt in B by 2 carry (acc: f32[m, n] = fill(0.0)) {
                yield acc + dot[k, bt](load a[bt, m, k], load b[bt, n, k])
            }
            store sums[m, n] = acc
        }
        for bt in B by 2, m in M by 8, n in N by 8 parallel {
            store batch[bt, m, n] = dot[k](load a[bt, m, k], load b[bt, n, k])
        }
    }
}"""


def test_products_of_every_shape() -> None:
    a, b, w, u = normal(3, 11, 24), normal(3, 13, 24), normal(24), normal(11, 24)
    got = both(PRODUCTS, {"a": a, "b": b, "w": w, "u": u}, 1e-5)
    close(got["rows"], a @ w, 1e-5)
    close(got["outer"], np.einsum("bmk,bnk->bnm", a, b), 1e-5)
    close(got["both"], 2 * np.einsum("bmk,mk->bm", a, u) - 1, 1e-5)
    close(got["all"], a[:, 0] @ w, 1e-5)
    close(got["sums"], np.einsum("bmk,bnk->mn", a, b), 1e-5)
    close(got["batch"], np.einsum("bmk,bnk->bmn", a, b), 1e-5)


STACKED = """
kernel heads(o: f32[B, H, N, D], w: f32[C, H, D], x: f32[B, N, C]) -> y: f32[B, N, C] {
    y[b, n, c] = sum[h, d](o[b, h, n, d] * w[c, h, d]) + x[b, n, c]
}
kernel dense(x: f32[B, N, C], w: f32[F, C], bias: f32[F]) -> y: f32[B, N, F] {
    y[b, n, f] = gelu(sum[c](x[b, n, c] * w[f, c]) + bias[f])
}
"""


@pytest.mark.parametrize(("b", "n", "tasks"), [(32, 20, 8), (9, 33, 9), (1, 20, 1)])
def test_matrices_that_share_an_operand_share_its_panels(b: int, n: int, tasks: int) -> None:
    """As many matrices a task as leave eight tasks; columns fill no whole tile, depths no whole vector."""
    program, (h, d, c) = tl.parse(STACKED), (5, 13, 150)
    o, w, x = normal(b, h, n, d), normal(c, h, d) / 8, normal(b, n, c)
    kernel = tl.compile(program["heads"])
    want = np.einsum("bhnd,chd->bnc", o.astype(np.float64), w) + x
    close(kernel(o, w, x), want.astype(np.float32), 1e-5)
    text = kernel._variants.latest().record.source  # type: ignore[union-attr]
    assert ("# along b" in text) == (b > tasks)
    assert "# along h" in text
    f, bias = normal(c, c) / 12, normal(c)
    t = np.einsum("bnc,fc->bnf", x.astype(np.float64), f) + bias
    want = t / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))
    kernel = tl.compile(program["dense"])
    close(kernel(x, f, bias), want.astype(np.float32), 1e-5)
    # other strides, and fewer rows than the tile was made for
    wide = normal(b, 2 * n, c)
    np.testing.assert_array_equal(
        kernel(wide[:, ::2], f, bias), kernel(np.ascontiguousarray(wide[:, ::2]), f, bias)
    )
    np.testing.assert_array_equal(kernel(x[:, : n - 1], f, bias)[:, :9], kernel(x, f, bias)[:, :9])


TWO_PRODUCTS = """module t {
    tile t(a: f32[M, K], b: f32[K, N], d: f32[M, K], e: f32[K, N], c: inout f32[M, N]) {
        extents M, K, N
        for m in M by 16, n in N by 16 parallel {
            x: f32[m, n] = 0.5 * (load c[m, n])
            for k in K by 8 carry (acc: f32[m, n] = x) {
                yield acc + dot[k](load a[m, k], load b[k, n]) + dot[k](load d[m, k], load e[k, n])
            }
            store c[m, n] = acc
        }
    }
}"""


def test_two_products_into_one_accumulator() -> None:
    a, b, d, e, c = normal(21, 9), normal(9, 18), normal(21, 9), normal(9, 18), normal(21, 18)
    got = both(TWO_PRODUCTS, {"a": a, "b": b, "d": d, "e": e, "c": c}, 1e-5)
    close(got["c"], 0.5 * c + a @ b + d @ e, 1e-5)
    source = cpu.generate(module_of(TWO_PRODUCTS))
    assert source.count("# x += ") == 2  # in place of what it begins as, no buffer of the accumulator's size
    assert "# f32[m, n], then acc" in source


TENANTS = """module t {
    tile t(a: f32[M, N], b: f32[M, N], y: out f32[M, N], z: out f32[M]) {
        extents M, N
        for m in M by 8 parallel {
            for n in N by 32 carry (s: f32[m] = fill(0.0), most: f32[m] = fill(-inf)) {
                x: f32[m, n] = 0.5 * (load a[m, n])
                w: f32[m, n] = x - (load b[m, n])
                u: f32[m, n] = exp(w - max[n](w))
                store y[m, n] = u + sum[n](u) + KEPT
                yield s + sum[n](u * x), max(most, max[n](u))
            }
            z0: f32[m] = s * most
            for n in N by 32 carry (t: f32[m] = z0, t0: f32[m] = z0) {
                yield t + max[n](load a[m, n]), t0 + 1.0
            }
            store z[m] = t - t0 + s
        }
    }
}"""


@pytest.mark.parametrize(("kept", "then"), [("x", [("most", "z0"), ("w", "u")]), ("w", [("most", "z0")])])
def test_a_value_takes_the_place_of_one_that_nothing_reads_after(
    kept: str, then: list[tuple[str, str]]
) -> None:
    """u may overwrite w, unless w is read again; nothing overwrites x, s or a value that two begin as."""
    a, b = drawn_alone(2, 21, 70)
    text = TENANTS.replace("KEPT", kept)
    got = both(text, {"a": a, "b": b}, 1e-5)
    x = 0.5 * a.astype(np.float64)
    w = x - b
    tiles = [slice(i, i + 32) for i in (0, 32, 64)]
    u = np.concatenate([np.exp(w[:, t] - w[:, t].max(1, keepdims=True)) for t in tiles], 1)
    sums = np.concatenate([u[:, t] + u[:, t].sum(1, keepdims=True) for t in tiles], 1)
    close(got["y"], (sums + (x if kept == "x" else w)).astype(np.float32), 1e-5)
    s, most = (u * x).sum(1), sum(a[:, t].max(1).astype(np.float64) for t in tiles)
    close(got["z"], (most - 3 + s).astype(np.float32), 1e-4)
    assert re.findall(r"(\w+) = part.*, then (.*)", cpu.generate(module_of(text))) == then


NESTED = """module t {
    tile t(a: f32[M, N], y: out f32[M]) {
        extents M, N
        for m in M by 8 parallel {
            for n in N by 32 carry (s: f32[m] = fill(0.0), r: f32[m] = fill(1.0)) {
                for k in 2 carry (u: f32[m] = s) {
                    yield u + sum[n](load a[m, n])
                }
                yield u, r + ENDS
            }
            store y[m] = s + r
        }
    }
}"""


@pytest.mark.parametrize(("ends", "then"), [("1.0", [("s", "u")]), ("u", []), ("s", [])])
def test_an_inner_loop_goes_on_where_the_outer_one_keeps_its_value(
    ends: str, then: list[tuple[str, str]]
) -> None:
    """u may overwrite s only if r needs neither the old s nor the new one."""
    a = drawn_alone(21, 70)
    text = NESTED.replace("ENDS", ends)
    sums = np.stack([a[:, t].astype(np.float64).sum(1) for t in (slice(32), slice(32, 64), slice(64, 70))])
    s = np.vstack([np.zeros(21), 2 * np.cumsum(sums, 0)])
    r = 1 + {"1.0": 3, "u": s[1:].sum(0), "s": s[:-1].sum(0)}[ends]
    close(both(text, {"a": a}, 1e-5)["y"], (s[-1] + r).astype(np.float32), 1e-4)
    assert re.findall(r"(\w+) = part.*, then (.*)", cpu.generate(module_of(text))) == then


# ---------------------------------------------------------------- online softmax

ATTENTION = """module attention {
    tile attention(q: T[B, H, M, D], k: T[B, G, N, D], v: T[B, G, N, E], o: out T[B, H, M, E], lse: out f32[B, H, M],
                   scale: f32) {
        extents B, H, G, M, N, D, E
        static D = 24, E = 20
        whole d = D, e = E
        for b in B, h in H, m in M by 32 parallel {
            q_tile: T[m, d] = load q[b, h, m, d]
            for n in N by 16 from max(0, m - 40) to m + 32 where n <= m, m - 40 <= n carry (
                r: f32[m] = fill(-inf), l: f32[m] = fill(0.0), acc: f32[m, e] = fill(0.0)
            ) {
                x: f32[m, n] = scale * dot[d](q_tile, load k[b, h // (H // G), n, d])
                s: f32[m, n] = where(n <= m and m - 40 <= n, x, -inf)
                r1: f32[m] = max(r, max[n](s))
                r0: f32[m] = where(r1 == -inf, 0.0, r1)
                p: f32[m, n] = exp(s - r0)
                c: f32[m] = exp(r - r0)
                yield r1, l * c + sum[n](p), acc * c + dot[n](PCAST(p), load v[b, h // (H // G), n, e])
            }
            store o[b, h, m, e] = where(l == 0.0, 0.0, acc / l)
            store lse[b, h, m] = where(l == 0.0, -inf, r + log(l))
        }
    }
}"""


def windowed_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    m, n = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    s = np.where((n <= m) & (m - 40 <= n), scale * (q @ k.swapaxes(2, 3)), -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(top), 0, top))
    z = p.sum(-1, keepdims=True)
    return (p @ v) / np.where(z == 0, 1, z)


@pytest.mark.parametrize("m", RAGGED)
def test_attention_with_a_window(m: int) -> None:
    text = ATTENTION.replace("T[", "f32[").replace("PCAST(p)", "p")
    q, k, v = normal(2, 4, m, 24), normal(2, 2, 71, 24), normal(2, 2, 71, 20)
    got = both(text, {"q": q, "k": k, "v": v}, 1e-5, scale=0.2)
    close(got["o"].astype(np.float64), windowed_attention(q, k, v, 0.2), 1e-5)


def test_attention_in_f16() -> None:
    text = ATTENTION.replace("T[", "f16[").replace("PCAST", "f16")
    q, k, v = (normal(1, h, n, d, dtype=np.float16) for h, n, d in ((2, 70, 24), (1, 65, 24), (1, 65, 20)))
    got = both(text, {"q": q, "k": k, "v": v}, 3e-3, scale=0.2)
    close(got["o"].astype(np.float64), windowed_attention(q, k, v, 0.2), 5e-3)


def test_one_and_two_threads_give_the_same_bits() -> None:
    text = ATTENTION.replace("T[", "f32[").replace("PCAST(p)", "p")
    args = {"q": normal(2, 4, 101, 24), "k": normal(2, 2, 101, 24), "v": normal(2, 2, 101, 20)}
    results = []
    for n in (1, 2, 5):
        with thread_limit(n):
            results.append(compiled(text, args, scale=0.2))
    for r in results[1:]:
        np.testing.assert_array_equal(r["o"], results[0]["o"])
        np.testing.assert_array_equal(r["lse"], results[0]["lse"])


# ---------------------------------------------------------------- reductions

REDUCTIONS = """module r {
    tile r(x: T[M, N], sum_: out ACC[M], max_: out ACC[M], min_: out ACC[M], prod_: out ACC[M], any_: out bool[M],
           all_: out bool[M], argmax_: out i64[M], argmin_: out i64[M], total: out ACC[1], high: out ACC[1]) {
        extents M, N
        static M = 19, N = 37
        whole m = M, n = N
        for parallel {
            v: T[m, n] = load x[m, n]
            store sum_[m] = sum[n](v)
            store max_[m] = max[n](v)
            store min_[m] = min[n](v)
            store prod_[m] = prod[n](v)
            store any_[m] = any[n](v < ZERO)
            store all_[m] = all[n](v < ZERO)
            store argmax_[m] = argmax[n](v)
            store argmin_[m] = argmin[n](v)
            store total[0] = sum[m, n](v)
            store high[0] = max[m, n](v)
        }
    }
}"""


def reductions(dtype: str, acc: str, zero: str) -> str:
    return (
        REDUCTIONS.replace("x: T", f"x: {dtype}")
        .replace("v: T", f"v: {dtype}")
        .replace("ACC", acc)
        .replace("ZERO", zero)
    )


def test_reductions_of_floats_propagate_nan() -> None:
    text = reductions("f32", "f32", "0.0")
    x = RNG.uniform(0.5, 1.5, (19, 37)).astype(np.float32) * RNG.choice([-1, 1], (19, 37)).astype(np.float32)
    x[3, 30], x[4, 5], x[4, 9], x[5], x[6] = np.nan, np.nan, -np.inf, -np.inf, -1
    got = both(text, {"x": x})
    assert np.isnan(got["max_"][3])
    assert np.isnan(got["min_"][4])
    assert got["argmax_"][3] == 30
    assert got["argmin_"][4] == 5
    assert got["all_"][6]
    assert got["max_"][5] == -np.inf
    assert got["argmax_"][5] == 0


def test_a_total_is_complete_before_its_terms_are_changed() -> None:
    text = """module t { tile t(x: f32[N], y: out f32[N]) { extents N static N = 50 whole n = N
        for parallel {
            a: f32[n] = exp(load x[n])
            b: f32[n] = a / sum[n](a)
            c: f32[n] = b - max[n](b) * a
            store y[n] = b + c
        } } }"""
    x = normal(50)
    a = np.exp(x.astype(np.float64))
    b = a / a.sum()
    close(both(text, {"x": x})["y"].astype(np.float64), 2 * b - b.max() * a, 1e-5)
    assert cpu.generate(module_of(text)).count("sum_lanes(") == 1


def test_reductions_of_integers() -> None:
    x = RNG.integers(-3, 4, (19, 37), np.int8)
    got = both(reductions("i8", "i32", "0i32"), {"x": x})
    np.testing.assert_array_equal(got["sum_"], x.sum(1, dtype=np.int32))
    np.testing.assert_array_equal(got["argmin_"], x.argmin(1))


# ---------------------------------------------------------------- reads and writes through tensors

GATHER = """module g {
    tile g(x: f32[N, K], ix: i32[M], y: out f32[M, K], stencil: out f32[M], both: out bool[M]) {
        extents M, N, K
        for m in M by 8 parallel {
            at: i32[m] = load ix[m]
            for k in K by 8 { store y[m, k] = load x[at, k] }
            store stencil[m] = where(0 < m and m < N, load x[m - 1, 0] + load x[m, 0], -1.0)
            store both[m] = m < N and load x[m, 0] > 0.0 or m >= N
        }
    }
}"""


def test_reads_outside_a_tensor() -> None:
    x, ix = normal(11, 9), np.array([3, -5, 10, 11, 2**31 - 1, -(2**31), 0, 4, 5, 6, 7, 8, 9], np.int32)
    got = both(GATHER, {"x": x, "ix": ix})
    np.testing.assert_array_equal(got["y"], x[np.clip(ix, 0, 10)])
    assert got["stencil"][0] == -1
    assert got["stencil"][10] == x[9, 0] + x[10, 0]
    empty = compiled(GATHER, {"x": normal(0, 9), "ix": ix})  # nothing to read: no wild access
    assert (empty["stencil"] == -1).all()


SCATTER = """module h {
    tile zero(count: out i64[K]) {
        extents K
        for k in K by 8 parallel { store count[k] = fill(0) }
    }
    tile h(ix: i32[N], w: f32[N, D], count: inout i64[K], total: inout f32[K, D]) {
        extents N, K, D
        for n in N by 8, d in D parallel { store total[load ix[n], d] += load w[n, d] }
        for n in N by 8 parallel { store count[load ix[n]] += 1 }
    }
}"""


def test_scatter_adds_duplicates_and_drops_what_is_outside() -> None:
    ix = RNG.integers(-2, 7, 61, np.int32)
    w, total = normal(61, 3), normal(5, 3)
    got = both(SCATTER, {"ix": ix, "w": w, "total": total}, 1e-5)
    inside = (ix >= 0) & (ix < 5)
    np.testing.assert_array_equal(got["count"], np.bincount(ix[inside], minlength=5))
    source = cpu.generate(module_of(SCATTER))
    assert "grid d in parallel; inside each, grid n by 8 in order" in source


# ---------------------------------------------------------------- carried values

CARRIES = """module c {
    tile c(x: f32[M], a: out f32[M], b: out f32[M], p: out i64[1], q: out i64[1], last: out f32[M]) {
        extents M
        for m in M by 8 parallel {
            v: f32[m] = load x[m]
            for i in 7 carry (s: f32[m] = v, t: f32[m] = 2.0 * v, u: f32[m] = fill(0.0)) {
                yield t, s + t, u + s
            }
            store a[m] = s
            store b[m] = t
            store last[m] = u
        }
        for one in 1 parallel {
            for i in 10 carry (f: i64 = 0, g: i64 = 1) { yield g, f + g }
            store p[0] = f
            store q[0] = g
        }
    }
}"""


def test_carries_change_all_at_once() -> None:
    x = normal(19)
    got = both(CARRIES, {"x": x})
    s, t, u = x, 2 * x, 0 * x
    for _ in range(7):
        s, t, u = t, s + t, u + s
    np.testing.assert_array_equal(got["a"], s)
    np.testing.assert_array_equal(got["b"], t)
    np.testing.assert_array_equal(got["last"], u)
    assert (got["p"][0], got["q"][0]) == (55, 89)


SIBLINGS = """module s {
    scratch t: f32[M, N]
    tile first(x: f32[M, N], t: out f32[M, N]) {
        extents M, N
        for m in M by 8 parallel {
            for n in N by 16 reverse { v: f32[n, m] = load x[m, n]  store t[m, n] = v * v }
        }
    }
    tile second(t: f32[M, N], y: out f32[M], z: out f64[M]) {
        extents M, N
        for m in M by 8 parallel {
            for n in N by 16 carry (a: f32[m] = fill(0.0)) { v: f32[m, n] = load t[m, n]  yield a + sum[n](v) + v_0 * 0.0 }
            store y[m] = a
            for n in N carry (c: f64[m] = fill(0.0f64)) { v: f64[m] = f64(load t[m, n])  yield c + v * v }
            store z[m] = c
        }
    }
}""".replace(" + v_0 * 0.0", "")


def test_sibling_scopes_may_share_names() -> None:
    x = normal(21, 35)
    got = both(SIBLINGS, {"x": x}, 1e-5)
    close(got["y"], (x * x).sum(1), 1e-5)
    close(got["z"], ((x * x).astype(np.float64) ** 2).sum(1), 1e-12)


# ---------------------------------------------------------------- elementwise

FUNCTIONS = (
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
)
OUTPUTS = ", ".join(f"{f}_: out T[N]" for f in FUNCTIONS)
STORES = "\n".join(f"store {f}_[n] = {f}(v)" for f in FUNCTIONS)
ELEMENTWISE = f"""module e {{
    tile e(x: T[N], y: T[N], {OUTPUTS}, pow_: out T[N], mod_: out T[N], div_: out T[N], fma_: out T[N], max_: out T[N],
           neg_: out T[N]) {{
        extents N
        for n in N by 64 parallel {{
            v: T[n] = load x[n]
            w: T[n] = load y[n]
            {STORES}
            store pow_[n] = pow(v, w)
            store mod_[n] = v % w
            store div_[n] = v // w
            store fma_[n] = fma(v, w, v)
            store max_[n] = max(v, min(w, v))
            store neg_[n] = -v
        }}
    }}
}}"""


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_elementwise_functions(dtype: str) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 2.5, -2.5, 1e-40, 88.8, -104.0, 3e38]
    x = np.concatenate([special, RNG.normal(0, 3, 200)]).astype(FLOATS[dtype])
    y = np.concatenate([special[::-1], RNG.normal(0, 3, 200)]).astype(FLOATS[dtype])
    got = both(ELEMENTWISE.replace("T[", f"{dtype}["), {"x": x, "y": y}, TOLERANCE[dtype])
    np.testing.assert_array_equal(np.signbit(got["neg_"]), ~np.signbit(x))


CASTS = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")
CAST_STORES = "\n".join(
    f"store from_{a}_{b}[n] = {b}(v_{a})" for a in ("f64", "f32", "i64", "i8") for b in CASTS
)
CAST_OUTPUTS = ", ".join(f"from_{a}_{b}: out {b}[N]" for a in ("f64", "f32", "i64", "i8") for b in CASTS)
CONVERSIONS = f"""module k {{
    tile k(a: f64[N], i: i64[N], {CAST_OUTPUTS}) {{
        extents N
        for n in N by 64 parallel {{
            v_f64: f64[n] = load a[n]
            v_f32: f32[n] = f32(v_f64)
            v_i64: i64[n] = load i[n]
            v_i8: i8[n] = i8(v_i64)
            {CAST_STORES}
        }}
    }}
}}"""


def test_conversions_between_all_element_types() -> None:
    halves = np.array(
        [1 + 2**-11, 1 + 2**-11 + 2**-40, 65519.99, 65520, 2**-25, 2**-25 + 2**-50, 1 + 2**-8 + 2**-30]
    )
    a = np.concatenate(
        [halves, -halves, [np.nan, np.inf, -np.inf, 300.7, -300.7, 1e30, -1e30, 0.0, -0.0, 0.9]]
    )
    i = RNG.integers(-(2**63), 2**63 - 1, a.size)
    i[:6] = 127, 128, -129, 256, 2**31, -(2**31) - 1
    both(CONVERSIONS, {"a": a, "i": i}, 0.0)


INTEGERS = """module i {
    tile i(a: i32[N], b: i32[N], s: i8[N], q: out i32[N], r: out i32[N], p: out i32[N], n_: out i32[N], f: out f32[N],
           t: out i32[N], c: out bool[N], w: out i64[N]) {
        extents N
        for n in N by 8 parallel {
            x: i32[n] = load a[n]
            y: i32[n] = load b[n]
            z: i8[n] = load s[n]
            store q[n] = x // y
            store r[n] = x % y
            store p[n] = x * y + x
            store n_[n] = -x - abs(y)
            store f[n] = x / y
            store t[n] = z * z + z
            store c[n] = not (x < y) and (x != y or n == 3)
            store w[n] = n * x - 9223372036854775807
        }
    }
}"""


def test_integers_wrap_and_divide_by_zero_to_zero() -> None:
    low = -(2**31)
    a = np.array([7, -7, 7, -7, low, low, 5, 0, 2**31 - 1, -1], np.int32)
    b = np.array([2, 2, -2, -2, -1, 3, 0, 0, 2**31 - 1, low], np.int32)
    s = np.array([-128, 127, 0, 1, 2, 3, 4, 5, 6, 7], np.int8)
    got = both(INTEGERS, {"a": a, "b": b, "s": s})
    assert got["q"].tolist()[:8] == [3, -4, -4, 3, low, low // 3, 0, 0]
    assert got["r"].tolist()[:8] == [1, 1, -1, -1, 0, low % 3, 0, 0]
    assert got["t"][0] == 128 * 128 - 128


def test_no_contraction_of_multiply_and_add() -> None:
    text = """module f { tile f(a: f32[N], b: f32[N], c: f32[N], y: out f32[N]) { extents N
        for n in N by 64 parallel { store y[n] = load a[n] * load b[n] + load c[n] } } }"""
    a = np.full(64, 1 + 2**-12, np.float32)
    got = compiled(text, {"a": a, "b": a, "c": -(a * a)})
    assert (got["y"] == 0).all()  # contracted, it would be the rounding error of a · a


# ---------------------------------------------------------------- names and text


NAMES = """module lambda {
    tile exp(def: f32[numpy, _x], at: out f32[numpy, _x], None: f32, task: f32) {
        extents numpy, _x
        for import in numpy by 4, first in _x by 4 parallel {
            f32_: f32[import, first] = exp(load def[import, first]) * None
            select: f32[import, first] = f32_ + f32_ + task
            import_0: f32[import] = sum[first](select)
            store at[import, first] = select - 0.0 * import_0
        }
    }
}"""


def test_names_that_mean_something_in_python() -> None:
    x = normal(5, 6)
    got = both(NAMES, {"def": x}, **{"None": 2.0, "task": 1.0})
    close(got["at"], 4 * np.exp(x) + 1, 1e-5)


def test_only_identifiers_reach_the_source() -> None:
    module = module_of(NAMES)
    bad = TileModule(
        "x", (module.programs[0].__class__(**{**vars(module.programs[0]), "name": "x(): import os #"}),)
    )
    with pytest.raises(ValueError, match="is no name"):
        cpu.generate(bad)


def test_deep_expressions_are_broken_into_parts() -> None:
    terms = " + ".join(["load x[n] * 0.001"] * 3000)
    body = f"extents N for n in N by 8 parallel {{ store y[n] = {terms} }}"
    text = f"module d {{ tile d(x: f32[N], y: out f32[N]) {{ {body} }} }}"
    source = cpu.generate(module_of(text))
    assert max(map(len, source.splitlines())) < 250
    compile(source, "deep", "exec")


def test_source_is_deterministic_and_runs_again_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    source = cpu.generate(module_of(matmul("f32")))
    assert source == cpu.generate(module_of(matmul("f32")))
    path = tmp_path / "edited.py"
    path.write_text(source.replace("load_some(bias, (n_0 + n_i,), n_n - n_i)", "f32(7.0)"))
    a, b, c = normal(3, 4), normal(4, 5), np.empty((3, 5), np.float32)
    kernels.load(path)["product"](a, b, normal(5), c, 3, 4, 5)
    close(c, a @ b + 7, 1e-5)


def test_loops_are_vectorised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TILELOOM_CACHE_DIR", str(tmp_path)
    )  # what comes from the cache has no assembly to look at
    text = """module v { tile v(x: f32[M, N], y: out f32[M, N]) { extents M, N
        for m in M by 8, n in N by 256 parallel { store y[m, n] = exp(load x[m, n]) } } }"""
    compiled(text, {"x": normal(3, 300)})
    task = functions_of(text)["v_tasks"]
    (assembly,) = task.dispatcher.inspect_asm().values()  # type: ignore[attr-defined]
    body = assembly.split("v_tasks")[1]
    vectors = [r for r in ("zmm", "ymm", "xmm", "v0.4s") if r in assembly]
    assert vectors, body[:200]
    assert "expf" not in assembly
    if "zmm" in assembly or "ymm" in assembly:
        packed = [line for line in assembly.splitlines() if "vfmadd" in line and "ps" in line.split()[0]]
        assert any("ymm" in line or "zmm" in line for line in packed)


# ---------------------------------------------------------------- programs of others

GENERATE = (Phase.explicit, Phase.generate)  # shrinking would compile hundreds of programs
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.tileir"))
SIZES = {"B": 1, "H": 4, "G": 2, "M": 150, "N": 133, "D": 64, "E": 64, "K": 128, "S": 4}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_hand_written_programs(path: Path) -> None:
    """Attributes, rings and roles of another target change nothing here."""
    text = path.read_text()
    launches = module_of(text).programs
    sizes = {**SIZES, **{name: value for p in launches for name, value in p.statics}}
    scratch = {s.name for s in module_of(text).scratch}
    tensors = {
        p.name: 0.3 * normal(*(integer(e, sizes) for e in p.shape))
        for q in launches
        for p in q.params
        if p.mode != "out" and p.name not in scratch
    }
    dtypes = {p.name: NUMPY[p.dtype] for q in launches for p in q.params}
    scalars = {s.name: 0.125 for q in launches for s in q.scalars}
    both(text, {n: x.astype(dtypes[n]) for n, x in tensors.items()}, 4e-3, **scalars, **sizes)


@given(drawn=programs(), mode=st.sampled_from(["all", "none", "auto"]))
@settings(max_examples=5, deadline=None, phases=GENERATE, suppress_health_check=list(HealthCheck))
def test_drawn_programs_equal_the_interpreter(drawn: DrawnProgram, mode: Fuse) -> None:
    kernel = parse(drawn.text)["drawn"]
    made = compile_kernel(kernel, CPU, drawn.sizes, options=Options(fuse=mode))
    tensors = {n: x for n, x in drawn.tensors().items() if n in made.graph.tensors}
    scalars = {n: x for n, x in drawn.scalars().items() if n in made.graph.scalars}
    got = Kernel(made.graph, made.module, kernels.build(made.source)).run(tensors, scalars)
    for name, want in run_module(made.module, tensors, {**scalars, **drawn.sizes}).items():
        close(got[name], want, 1e-6, name)  # a function of a literal alone is f32


ROWS = """module r { tile r(x: f32[M, N], s: out f32[M], t: out f32[N], any: out bool[M]) { extents M, N
    for m in M by 40 parallel {
        for n in N by 24 carry (a: f32[m] = fill(0.0), b: bool[m] = fill(false)) {
            v: f32[m, n] = load x[m, n]
            yield a + sum[n](v * v), b or any[n](2.0 < v)
        }
        store s[m] = a
        store any[m] = b
    }
    for n in N by 24 parallel {
        for m in M by 40 carry (c: f32[n] = fill(-inf)) { yield max(c, max[m](load x[m, n])) }
        store t[n] = c
    } } }"""
"""Reductions along the last axis of a tensor and across it."""


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (41, 25), (80, 48), (7, 0)])
def test_reductions_along_and_across_the_lanes(shape: tuple[int, int]) -> None:
    x = normal(*shape)
    plain = both(ROWS, {"x": x}, 1e-5)
    close(plain["s"], np.square(x.astype(np.float64)).sum(1).astype(np.float32), 1e-5)
    np.testing.assert_array_equal(plain["t"], x.max(0, initial=-np.inf))
    np.testing.assert_array_equal(plain["any"], (x > 2).any(1))
    wide = np.full((2 * shape[0], 3 * shape[1] + 1), np.nan, np.float32)[::2, : 3 * shape[1] : 3]
    wide[:] = x
    strided = compiled(ROWS, {"x": wide})
    for name, value in plain.items():
        np.testing.assert_array_equal(strided[name], value)
    if x.size:
        x[shape[0] // 2, -1] = np.nan
        spoiled = compiled(ROWS, {"x": x})
        np.testing.assert_array_equal(np.isnan(spoiled["s"]), np.isnan(x).any(1))
        np.testing.assert_array_equal(np.isnan(spoiled["t"]), np.isnan(x).any(0))


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("kernel", ["softmax", "layernorm"])
def test_a_second_pass_uses_what_one_tile_left(kernel: str, tile: int) -> None:
    text = {
        "softmax": "kernel k(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = softmax[n](x[m, n]) }",
        "layernorm": "kernel k(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = layernorm[n](x[m, n], 0.25) }",
    }[kernel]
    tiles = parse_schedule(f"schedule s for k on cpu {{ tile m by 1, n by {tile} }}")
    made = compile_kernel(parse(text)["k"], CPU, {"M": 3, "N": tile}, schedule=tiles)
    assert made.source.count("# one tile, whose values are still there") == (kernel == "softmax")
    run_it = Kernel(made.graph, made.module, kernels.build(made.source))
    for n in (0, 1, tile - 1, tile, tile + 1, 2 * tile + 8):
        x = normal(3, n)
        wide = x.astype(np.float64)
        if kernel == "softmax":
            e = np.exp(wide - wide.max(1, keepdims=True, initial=-np.inf))
            want = e / e.sum(1, keepdims=True)
        else:
            c = wide - wide.mean(1, keepdims=True) if n else wide
            want = c / np.sqrt((c * c).mean(1, keepdims=True) + 0.25) if n else wide
        close(run_it(x).astype(np.float64), want, 1e-5)


WIDE_ROWS = """module w { tile w(
    x: f32[M, N], w: f32[N], high: out f32[M], low: out f32[M], ones: out f32[M], y: out f32[M, N]
) {
    extents M, N
    for m in M parallel {
        for n in N by 128 carry (a: f32 = fill(-inf), b: f32 = fill(inf), c: f32 = fill(0.0), d: f32 = fill(0.0)) {
            v: f32[n] = load x[m, n]
            u: f32[n] = v + load w[n]
            yield max(a, max[n](u)), min(b, min[n](u)), c + sum[n](where(0 <= n, 1.0, 0.0)), d + sum[n](u * u)
        }
        store high[m] = a
        store low[m] = b
        store ones[m] = c
        for n in N by 128 {
            u: f32[n] = load x[m, n] + load w[n]
            store y[m, n] = where(c == 7.0, 0.5, u * u / d)
        }
    } } }"""
"""Tiles of whole wide vectors."""


@pytest.mark.parametrize("n", [0, 1, 7, 64, 127, 128, 129, 300])
def test_rows_by_wide_vectors(n: int) -> None:
    x, w = normal(5, n), normal(n)
    if n > 1:
        x[1, n // 2], x[2, n - 1], x[3] = np.nan, np.inf, 0
        x[4] *= np.float32(1e-19)  # squares below the normal range
        w[0] = 0
    got = both(WIDE_ROWS, {"x": x, "w": w}, 1e-5)
    u = x + w
    np.testing.assert_array_equal(got["high"], u.max(1, initial=-np.inf))
    np.testing.assert_array_equal(got["low"], u.min(1, initial=np.inf))
    np.testing.assert_array_equal(got["ones"], np.full(5, n))
    strided = np.full((5, 3 * n + 1), np.nan, np.float32)[:, : 3 * n : 3]
    strided[:] = x
    for name, value in compiled(WIDE_ROWS, {"x": strided, "w": w}).items():
        np.testing.assert_array_equal(value, got[name], name)


def test_what_a_row_needs_shares_one_loop_and_no_copy_of_it() -> None:
    source = cpu.generate(module_of(WIDE_ROWS))
    assert "one tile" not in source  # nothing is kept: the row is read again
    assert "part(" not in source
    assert source.count("for n_i in range(0, n_n, WIDE)") == 1
    assert source.count(" = noting_nan(") == 2
    assert "= f32(n_n)" in source


def test_a_row_is_asked_for_while_what_it_holds_is_computed() -> None:
    text = "kernel k(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = softmax[n](x[m, n]) }"
    tiles = parse_schedule("schedule s for k on cpu { tile m by 1, n by 64 }")
    made = compile_kernel(parse(text)["k"], CPU, {"M": 3, "N": 64}, schedule=tiles)
    lines = [line.strip() for line in made.source.splitlines()]
    place = lines.index("prefetch_wide(y, (m, n_0 + n_i))")
    assert lines[place - 2].startswith("store_wide(e, ")
    assert lines[place + 1].startswith("z_sum = sum_lanes(")


def test_the_next_row_is_asked_for_while_one_is_stored() -> None:
    """Of the tensor that each task reads another row of, and of no other; nothing where a task has several rows."""
    text = """kernel k(x: f32[B, M, N], w: f32[N], t: f32[M, B, N]) -> y: f32[B, M, N] {
        y[b, m, n] = softmax[n](x[b, m, n] + w[n] + t[m, b, n])
    }"""

    def asked(tile: str) -> list[str]:
        stated = parse_schedule(f"schedule s for k on cpu {{ tile {tile} }}")
        made = compile_kernel(parse(text)["k"], CPU, {"B": 2, "M": 3, "N": 64}, schedule=stated)
        lines = [line.strip() for line in made.source.splitlines()]
        places = [i for i, line in enumerate(lines) if line.startswith("prefetch_read")]
        assert all(any(x.startswith("store_some_wide(y, ") for x in lines[i + 1 : i + 4]) for i in places)
        return [lines[i] for i in places]

    rows = asked("m by 1, n by 64")
    assert rows[0] == "prefetch_read_wide(x, (b, at(m + 1), n_0 + n_i))"
    assert all("(x, (b, at(m + 1), " in line for line in rows)
    assert asked("m by 2, n by 64") == []
    x, w, t = drawn_alone(2, 3, 64), drawn_alone(64), drawn_alone(3, 2, 64)
    kernel = tl.compile(parse(text)["k"], schedule="schedule s for k on cpu { tile m by 1, n by 64 }")
    e = np.exp(x.astype(np.float64) + w + t.swapaxes(0, 1))
    close(kernel(x, w, t), (e / e.sum(-1, keepdims=True)).astype(np.float32), 1e-5)


def test_a_second_pass_over_other_values_computes_its_own() -> None:
    """The later loop reads the tensor that the earlier one changed, or differs in what it starts from."""
    text = """module r { tile r(x: inout f32[N], y: out f32[N]) { extents N
        for parallel {
            for n in N by 16 carry (a: f32 = fill(0.0)) {
                v: f32[n] = load x[n]
                w: f32[n] = exp(v - a)
                store x[n] = w
                yield a + sum[n](v)
            }
            for k in N by 16 { store y[k] = exp(load x[k] - a) }
        } } }"""
    x = normal(11)
    once = np.exp(x.astype(np.float64))
    got = compiled(text, {"x": x.copy()})
    close(got["y"].astype(np.float64), np.exp(once - x.astype(np.float64).sum()), 1e-5)
    assert "one tile" not in cpu.generate(module_of(text))


def test_an_operand_is_computed_in_the_order_that_vectors_can() -> None:
    """Masked values keep their tensor's order, whose last axis is dense, though the product sums over another."""
    text = """kernel k(q: f32[M, D], k: f32[N, D], v: f32[N, D], keep: bool[N]) -> o: f32[M, D] {
        s[m, n] = sum[d](q[m, d] * k[n, d])
        p[m, n] = softmax[n | keep[n]](s[m, n])
        o[m, d] = sum[n](p[m, n] * v[n, d])
    }"""
    made = compile_kernel(parse(text)["k"], CPU, {"M": 64, "N": 70, "D": 20})
    lines = [line.strip() for line in made.source.splitlines()]
    (stored,) = (i for i, line in enumerate(lines) if "store(" in line and "_some(v, " in line)
    assert lines[stored].startswith("store(sum_n_2_operand, (n_i, d), select(keep_tile[n_i], ")
    q, k, v = drawn_alone(64, 20), drawn_alone(70, 20) * np.float32(0.3), drawn_alone(70, 20)
    keep = np.arange(70) % 3 != 1
    v[~keep] = np.nan  # what is not kept does not count, whatever it is
    e = np.exp(q.astype(np.float64) @ k[keep].T)
    want = e / e.sum(-1, keepdims=True) @ v[keep]
    close(tl.compile(parse(text)["k"])(q, k, v, keep), want.astype(np.float32), 1e-5)


def test_lanes_that_nobody_has_hold_numbers() -> None:
    """Chained products take the lanes of a last tile that lie beyond its rows too; what memory happens to hold there may be
    numbers that take hundreds of clocks each."""
    text = """kernel k(q: f32[M, D], k: f32[N, D], v: f32[N, D]) -> o: f32[M, D] {
        s[m, n] = sum[d](q[m, d] * k[n, d])
        p[m, n] = softmax[n](s[m, n])
        o[m, d] = sum[n](p[m, n] * v[n, d])
    }"""
    made = compile_kernel(parse(text)["k"], CPU, {"M": 100, "N": 70, "D": 20})
    lines = [line.strip() for line in made.source.splitlines()]
    place = lines.index("if m_n < 64:")
    assert lines[place + 3] == "store_wide(q_tile, (d, m_i), f32(0.0))"
    assert lines[place + 4].startswith("pack(matrix(q_tile, ")
    assert lines.count("multiply_whole(") == 2
    few = compile_kernel(parse(text)["k"], CPU, {"M": 16, "N": 70, "D": 20}).source
    assert "multiply_whole" not in few  # its tiles are narrower than a panel
    q, k, v = drawn_alone(100, 20), drawn_alone(70, 20) * np.float32(0.3), drawn_alone(70, 20)
    e = np.exp(q.astype(np.float64) @ k.T)
    close(tl.compile(parse(text)["k"])(q, k, v), (e / e.sum(-1, keepdims=True) @ v).astype(np.float32), 1e-5)
