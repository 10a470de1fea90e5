"""The meaning of the language: programs from text against NumPy in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import tensor as interpreter
from tileloom.compiler.interpreter.tensor import run
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.tensor_ir import Graph
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType

INF = math.inf


def graph(text: str, **dtypes: DType) -> Graph:
    program = parse(text)
    return canonicalize(elaborate(program[next(iter(program.kernels))], dtypes), Remarks())


def call(text: str, **arguments: object) -> dict[str, np.ndarray]:
    """The outputs at storage precision, after those at f64 were found close to them."""
    g = graph(text)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
    scalars = {k: v for k, v in arguments.items() if k not in tensors}
    stored = run(g, tensors, scalars)
    exact = run(g, tensors, scalars, precision="float64")
    for name, value in stored.items():
        bound = 1e-2 if value.dtype in (np.float16, ml_dtypes.bfloat16) else 1e-4
        np.testing.assert_allclose(
            value.astype(np.float64), exact[name].astype(np.float64), rtol=bound, atol=bound
        )
    return exact


def normal(*shape: int, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def weights(s: np.ndarray, keep: np.ndarray | bool = True) -> np.ndarray:
    """softmax over the last axis where `keep`; rows without a key are 0."""
    s = np.where(keep, s, -INF)
    top = s.max(-1, keepdims=True, initial=-INF)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    z = e.sum(-1, keepdims=True)
    return np.where(z == 0, 0, e / np.where(z == 0, 1, z))


# ---------------------------------------------------------------- maps, products, rows


def test_vector_add() -> None:
    x, y = normal(1000), normal(1000, seed=1)
    text = "kernel add(x: f32[N], y: f32[N]) -> z: f32[N] { z[i] = x[i] + 2 * y[i] }"
    close(call(text, x=x, y=y)["z"], x.astype(float) + 2.0 * y)


def test_product_with_bias_and_activation() -> None:
    a, b, bias = normal(17, 33), normal(33, 9, seed=1), normal(9, seed=2)
    text = """kernel dense(a: f32[M, K], b: f32[K, N], bias: f32[N]) -> c: f32[M, N] {
        c[m, n] = gelu(sum[k](a[m, k] * b[k, n]) + bias[n])
    }"""
    y = a.astype(float) @ b + bias
    close(
        call(text, a=a, b=b, bias=bias)["c"],
        0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    )


def test_blocks_do_not_change_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(12, 7, 5), normal(12, 5, 6, seed=1)
    text = "kernel mm(a: f32[B, M, K], b: f32[B, K, N]) -> c: f32[M, B, N] { c[m, b, n] = sum[k](a[b, m, k] * b[b, k, n]) }"
    with pytest.raises(Exception, match="b"):
        graph(text)  # b is a tensor and cannot be an index
    text = text.replace("c[m, b, n]", "c[m, i, n]").replace(
        "a[b, m, k] * b[b, k, n]", "a[i, m, k] * b[i, k, n]"
    )
    whole = call(text, a=a, b=b)["c"]
    close(whole, np.einsum("bmk,bkn->mbn", a.astype(float), b.astype(float)))
    monkeypatch.setattr(interpreter, "BLOCK_ELEMENTS", 50)
    close(call(text, a=a, b=b)["c"], whole)


def test_softmax_rows() -> None:
    x = normal(6, 300)
    x[2] = -INF
    x[3, :256] = -INF
    x[4] = np.finfo(np.float32).min
    text = "kernel rows(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = softmax[n](x[m, n]) }"
    y = call(text, x=x)["y"]
    close(y, weights(x.astype(float)))
    assert (y[2] == 0).all()
    close(y[4], np.full(300, 1 / 300))


def test_layernorm_and_rmsnorm() -> None:
    x, w = normal(5, 40), normal(40, seed=1)
    text = """kernel norms(x: f32[R, D], w: f32[D], eps: f32) -> (a: f32[R, D], b: f32[R, D]) {
        a[r, d] = layernorm[d](x[r, d], eps) * w[d]
        b[r, d] = rmsnorm[d](x[r, d], eps) * w[d]
    }"""
    got, f = call(text, x=x, w=w, eps=1e-5), x.astype(float)
    mu, var = f.mean(-1, keepdims=True), f.var(-1, keepdims=True)
    close(got["a"], (f - mu) / np.sqrt(var + 1e-5) * w)
    close(got["b"], f / np.sqrt((f**2).mean(-1, keepdims=True) + 1e-5) * w)


def test_mean_and_count_respect_a_predicate() -> None:
    x, lengths = normal(4, 9), np.array([9, 3, 1, 0], np.int32)
    text = """kernel means(x: f32[B, N], len: i32[B]) -> (m: f32[B], c: i64[B]) {
        m[b] = mean[n | n < len[b]](x[b, n])
        c[b] = sum[n in N | n < len[b]](1)
    }"""
    got = call(text, x=x, len=lengths)
    close(got["m"][:3], np.array([x[b, : lengths[b]].astype(float).mean() for b in range(3)]))
    assert np.isnan(got["m"][3])  # the mean of nothing
    assert got["c"].tolist() == [9, 3, 1, 0]


def test_stencil() -> None:
    x = normal(50)
    text = """kernel blur(x: f32[N]) -> y: f32[N] {
        y[i] = where(i > 0, x[i - 1], 0) + 2 * x[i] + where(i + 1 < N, x[i + 1], 0)
    }"""
    f = np.pad(x.astype(float), 1)
    close(call(text, x=x)["y"], f[:-2] + 2 * f[1:-1] + f[2:])


def test_window_over_offsets() -> None:
    x = normal(20)
    text = """kernel local<W: extent>(x: f32[N]) -> y: f32[N] {
        y[i] = sum[j in W | 0 <= i + j - W // 2 and i + j - W // 2 < N](x[i + j - W // 2])
    }"""
    close(call(text, x=x, W=5)["y"], np.convolve(x.astype(float), np.ones(5), "same"))


# ---------------------------------------------------------------- attention


ATTENTION = """kernel attention(q: f32[B, H, M, D], k: f32[B, G, N, D], v: f32[B, G, N, E], scale: f32{extra})
        -> (o: f32[B, H, M, E], lse: f32[B, H, M]) {{
    require H % G == 0, scale > 0
    s[b, h, m, n] = {score}
    p[b, h, m, n] = softmax[n{such}](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])
    lse[b, h, m] = logsumexp[n{such}](s[b, h, m, n])
}}"""
SCORE = "scale * sum[d](q[b, h, m, d] * k[b, h // (H // G), n, d])"


def attention_text(such: str = "", score: str = SCORE, extra: str = "") -> str:
    return ATTENTION.format(such=f" | {such}" if such else "", score=score, extra=extra)


def heads(batch: int = 2, h: int = 4, g: int = 2, m: int = 7, n: int = 11, d: int = 8, e: int = 6):  # type: ignore[no-untyped-def]
    return normal(batch, h, m, d), normal(batch, g, n, d, seed=1), normal(batch, g, n, e, seed=2)


def reference(q, k, v, scale, keep=True, change=lambda s: s):  # type: ignore[no-untyped-def]
    repeat = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(float), repeat, axis=1) for x in (k, v))
    s = change(scale * np.einsum("bhmd,bhnd->bhmn", q.astype(float), k))
    p = weights(s, keep)
    with np.errstate(divide="ignore"):
        lse = np.log(np.sum(np.where(keep, np.exp(s), 0), -1))
    return {"o": p @ v, "lse": lse}


M, N = np.arange(7)[:, None], np.arange(11)[None, :]


@pytest.mark.parametrize(
    ("such", "keep"),
    [
        ("", True),
        ("n <= m", N <= M),
        ("n <= m + N - M", N <= M + 4),
        ("n <= m and m - n < 3", (N <= M) & (M - N < 3)),
    ],
)
def test_attention(such: str, keep: np.ndarray | bool) -> None:
    q, k, v = heads()
    got, want = call(attention_text(such), q=q, k=k, v=v, scale=0.3), reference(q, k, v, 0.3, keep)
    close(got["o"], want["o"])
    close(got["lse"], want["lse"])


def test_attention_with_a_mask_that_hides_rows() -> None:
    q, k, v = heads()
    mask = np.zeros((7, 11), np.bool_)
    mask[:4, :4] = True
    got = call(attention_text("mask[m, n]", extra=", mask: bool[M, N]"), q=q, k=k, v=v, scale=0.3, mask=mask)
    close(got["o"], reference(q, k, v, 0.3, mask)["o"])
    assert (got["o"][:, :, 4:] == 0).all()
    assert np.isneginf(got["lse"][:, :, 4:]).all()
    few = call(attention_text(), q=q[:, :, :4], k=k[:, :, :4], v=v[:, :, :4], scale=0.3)
    close(got["o"][:, :, :4], few["o"])


def test_a_nan_behind_a_predicate_stays_out() -> None:
    q, k, v = heads()
    clean = call(attention_text("n < m + 1"), q=q, k=k, v=v, scale=0.3)["o"]
    for spoiled in (k, v):
        spoiled[:, :, 7:] = np.nan
    got = call(attention_text("n < m + 1"), q=q, k=k, v=v, scale=0.3)["o"]
    assert np.isfinite(got).all()
    close(got, clean)


def test_a_nan_that_takes_part_propagates() -> None:
    q, k, v = heads()
    v[0, 0, 2] = np.nan
    got = call(attention_text("n <= m"), q=q, k=k, v=v, scale=0.3)["o"]
    assert np.isnan(got[0, :2, 2:]).all()
    assert not np.isnan(got[0, :2, :2]).any()
    assert not np.isnan(got[:, 2:]).any()


def test_scores_with_softcap_and_slopes() -> None:
    q, k, v = heads()
    slope = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    score = f"softcap({SCORE}, 3) + slope[h] * f32(n - m)"
    text = attention_text("n <= m + N - M", score, ", slope: f32[H]")
    change = lambda s: 3 * np.tanh(s / 3) + slope.astype(float)[:, None, None] * (N - M)  # noqa: E731
    close(
        call(text, q=q, k=k, v=v, scale=0.3, slope=slope)["o"],
        reference(q, k, v, 0.3, N <= M + 4, change)["o"],
    )


def test_sinks() -> None:
    x, a = normal(3, 10), normal(3, seed=5)
    text = """kernel sinks(x: f32[H, N], a: f32[H]) -> y: f32[H, N] { y[h, n] = softmax_sink[n](x[h, n], a[h]) }"""
    f = np.concatenate([x, a[:, None]], 1).astype(float)
    close(call(text, x=x, a=a)["y"], weights(f)[:, :-1])


def test_packed_sequences() -> None:
    lengths = [3, 0, 5, 1]
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = normal(9, 2, 4), normal(9, 2, 4, seed=1), normal(9, 2, 4, seed=2)
    text = """kernel packed(q: f32[S, H, D], k: f32[S, H, D], v: f32[S, H, D], cu: i32[B + 1]) -> o: f32[S, H, D] {
        doc[t in S] = sum[i in B | cu[i + 1] <= t](1)
        s[h, t, u] = sum[d](q[t, h, d] * k[u, h, d])
        p[h, t, u] = softmax[u | doc[t] == doc[u] and u <= t](s[h, t, u])
        o[t, h, d] = sum[u](p[h, t, u] * v[u, h, d])
    }"""
    got = call(text, q=q, k=k, v=v, cu=cu)["o"]
    for lo, hi in pairwise(cu):
        s = np.einsum("thd,uhd->htu", q[lo:hi].astype(float), k[lo:hi].astype(float))
        p = weights(s, np.tril(np.ones((hi - lo, hi - lo), bool)))
        close(got[lo:hi], np.einsum("htu,uhd->thd", p, v[lo:hi].astype(float)))


PAGED = """kernel paged(q: f32[B, H, D], k: f32[S, P, G, D], v: f32[S, P, G, D], page: i32[B, Z], len: i32[B])
        -> o: f32[B, H, D] {
    require H % G == 0
    s[b, h, n in Z * P] = sum[d](q[b, h, d] * k[page[b, n // P], n % P, h // (H // G), d])
    p[b, h, n in Z * P] = softmax[n | n < len[b]](s[b, h, n])
    o[b, h, d] = sum[n](p[b, h, n] * v[page[b, n // P], n % P, h // (H // G), d])
}"""


def paged_arguments() -> dict[str, np.ndarray]:
    return {
        "q": normal(2, 4, 8),
        "k": normal(6, 4, 2, 8, seed=1),
        "v": normal(6, 4, 2, 8, seed=2),
        "page": np.array([[5, 0, 2], [1, 9, -1]], np.int32),
        "len": np.array([10, 3], np.int32),
    }


def test_paged_decode() -> None:
    x = paged_arguments()
    # Pages behind the length are not part of what the output depends on, even where they do not exist.
    got = call(PAGED, **x)["o"]
    for b in range(2):
        rows = [(x["page"][b, n // 4], n % 4) for n in range(x["len"][b])]
        k, v = (np.stack([x[t][r] for r in rows]).astype(float).repeat(2, axis=1) for t in "kv")
        p = weights(np.einsum("hd,nhd->hn", x["q"][b].astype(float), k))
        close(got[b], np.einsum("hn,nhd->hd", p, v))


def test_a_page_that_does_not_exist() -> None:
    x = paged_arguments()
    x["len"][1] = 5
    tensors, g = x, graph(PAGED)
    with pytest.raises(
        ValueError, match=r"index 1 of `k`.*outside.*`o` depends on it at b = 1, h = 0, d = 0"
    ):
        run(g, tensors, {})
    clamped = {**x, "page": x["page"].clip(0, 5)}
    free = run(g, tensors, {}, check_indices=False)["o"]
    assert np.array_equal(free, run(g, clamped, {})["o"])


def test_cross_entropy_with_label_gather() -> None:
    x, label = normal(5, 13), np.array([0, 12, 3, 3, 7], np.int64)
    text = """kernel loss(x: f32[B, C], label: i64[B]) -> l: f32[B] {
        l[b] = logsumexp[c](x[b, c]) - x[b, label[b]]
    }"""
    f = x.astype(float)
    close(call(text, x=x, label=label)["l"], np.log(np.exp(f).sum(-1)) - f[np.arange(5), label])


# ---------------------------------------------------------------- specials


def test_argmax() -> None:
    x = np.array(
        [[1, 3, 3, 0], [np.nan, 5, np.nan, 9], [2, np.nan, 9, 9], [-INF, -INF, -INF, -INF]], np.float32
    )
    text = """kernel best(x: f32[M, N], len: i32[M]) -> (a: i64[M], b: i64[M], c: i64[M]) {
        a[m] = argmax[n](x[m, n])
        b[m] = argmin[n | n > 0](x[m, n])
        c[m] = argmax[n | n < len[m]](x[m, n])
    }"""
    got = call(text, x=x, len=np.array([4, 0, 1, 2], np.int32))
    assert got["a"].tolist() == [1, 0, 1, 0]
    assert got["b"].tolist() == [3, 2, 1, 1]
    assert got["c"].tolist() == [1, -1, 0, 0]


def test_maximum_propagates_nan_unless_excluded() -> None:
    x = np.array([[1, np.nan, 2], [np.nan, 1, 2]], np.float32)
    text = """kernel top(x: f32[M, N]) -> (a: f32[M], b: f32[M], c: f32[M]) {
        a[m] = max[n](x[m, n])
        b[m] = min[n | n > 0](x[m, n])
        c[m] = max(x[m, 0], x[m, 1])
    }"""
    text = text.replace("f32[M, N]", "f32[M, 3]").replace("[n]", "[n in 3]").replace("[n |", "[n in 3 |")
    got = call(text, x=x)
    assert np.isnan(got["a"]).all()
    assert np.isnan(got["b"][0])
    assert got["b"][1] == 1
    assert np.isnan(got["c"]).all()


def test_where_lets_nothing_through_from_the_other_side() -> None:
    x = np.array([4, 0, -1, np.nan], np.float32)
    text = "kernel root(x: f32[N]) -> y: f32[N] { y[i] = where(x[i] > 0, log(x[i]) / x[i], -1) }"
    close(call(text, x=x)["y"], np.array([math.log(4) / 4, -1, -1, -1]))


ZERO_SIZES = [
    {"batch": 0},
    {"h": 0},
    {"m": 0},
    {"n": 0},
    {"d": 0},
    {"e": 0},
    {"batch": 0, "m": 0, "n": 0, "d": 0, "e": 0},
]


@pytest.mark.parametrize("sizes", ZERO_SIZES)
def test_zero_sized_axes(sizes: dict[str, int]) -> None:
    q, k, v = heads(**sizes)
    got = call(attention_text(), q=q, k=k, v=v, scale=0.3)
    assert got["o"].shape == (*q.shape[:3], v.shape[3])
    if "n" in sizes:
        assert (got["o"] == 0).all()
        assert np.isneginf(got["lse"]).all()
    if sizes == {"d": 0}:  # every score is 0: the mean of v
        close(got["o"], np.repeat(v.astype(float).mean(2, keepdims=True), 2, 1).repeat(q.shape[2], 2))


def test_no_key_heads_is_refused_in_words() -> None:
    q, k, v = heads(g=0)
    with pytest.raises(
        ValueError, match=r"attention: requires H % G == 0: `H % G` divides by zero \(G = 0, H = 4\)"
    ):
        run(graph(attention_text()), {"q": q, "k": k, "v": v}, {"scale": 0.3})


def test_absent_values() -> None:
    """`+` drops an absent operand, other operations are absent, a store of it is 0."""
    x, y = normal(5, 5), normal(5, 5, seed=1)
    text = """fn kept[J](x) = x
    kernel a(x: f32[M, N], y: f32[M, N]) -> (u: f32[M, N], v: f32[M, N], w: f32[M]) {
        u[m, n] = kept[n | n <= m](x[m, n]) + y[m, n]
        v[m, n] = exp(kept[n | n <= m](x[m, n]))
        w[m] = max[n](kept[n | n <= m](x[m, n]))
    }"""
    got, low = call(text, x=x, y=y), np.tril(np.ones((5, 5), bool))
    f = x.astype(float)
    close(got["u"], np.where(low, f, 0) + y)
    close(got["v"], np.where(low, np.exp(f), 0))
    close(got["w"], np.where(low, f, -INF).max(-1))


# ---------------------------------------------------------------- integers and types


def test_bytes_multiply_into_i32() -> None:
    a = np.full((2, 70000), -128, np.int8)
    text = "kernel dot8(a: i8[M, K], b: i8[M, K]) -> c: i32[M] { c[m] = sum[k](a[m, k] * b[m, k]) }"
    assert call(text, a=a, b=a)["c"].tolist() == [128 * 128 * 70000] * 2


def test_integers_wrap_divide_and_cast() -> None:
    x = np.array([2**31 - 1, -7, 7, -(2**31)], np.int32)
    f = np.array([2.9, -2.9, 1e30, np.nan], np.float32)
    text = """kernel ints(x: i32[N], f: f32[N]) -> (a: i32[N], b: i32[N], c: i32[N], d: i8[N], e: f32[N]) {
        a[i] = x[i] + 1
        b[i] = x[i] // 2
        c[i] = x[i] % -3
        d[i] = i8(f[i])
        e[i] = x[i] / 2
    }"""
    got = call(text, x=x, f=f)
    assert got["a"].tolist() == [-(2**31), -6, 8, -(2**31) + 1]
    assert got["b"].tolist() == [2**30 - 1, -4, 3, -(2**30)]
    assert got["c"].tolist() == [int(v) % -3 for v in x]
    assert got["d"].tolist() == [2, -2, 127, 0]
    close(got["e"], x / 2.0)


def test_empty_integer_extremes() -> None:
    text = """kernel empty(x: i32[M, N]) -> (a: i32[M], b: i32[M], c: i32[M], d: i32[M]) {
        a[m] = max[n](x[m, n])
        b[m] = min[n](x[m, n])
        c[m] = sum[n](x[m, n])
        d[m] = prod[n](x[m, n])
    }"""
    got = call(text, x=np.zeros((1, 0), np.int32))
    assert [int(got[n][0]) for n in "abcd"] == [-(2**31), 2**31 - 1, 0, 1]


def test_division_by_a_zero_from_a_tensor() -> None:
    text = "kernel div(x: i32[N], y: i32[N]) -> z: i32[N] { z[i] = where(i > 0, x[i] // y[i], 0) }"
    x, y = np.array([4, 9], np.int32), np.array([0, 2], np.int32)
    assert call(text, x=x, y=y)["z"].tolist() == [0, 4]
    with pytest.raises(ValueError, match=r"divides by zero, and `z` depends on it at i = 1"):
        run(graph(text), {"x": x, "y": y[::-1].copy()}, {})
    assert run(graph(text), {"x": x, "y": y[::-1].copy()}, {}, check_indices=False)["z"].tolist() == [0, 0]


def test_narrow_floats_compute_in_f32() -> None:
    x = np.array([60000, 60000, -60000], np.float16)
    text = "kernel total<T: f16 | bf16>(x: T[N]) -> (y: T[1], z: f32[1]) { y[i] = sum[n](x[n]) / 3  z[i] = sum[n](x[n]) }"
    text = text.replace(" / 3  z", " / 3\n z")
    got = run(graph(text), {"x": x}, {})
    assert got["y"].dtype == np.float16
    assert got["y"][0] == np.float16(20000)
    assert got["z"][0] == np.float32(float(x.astype(np.float64).sum()))
    bf = run(graph(text, T=DType.BF16), {"x": x.astype(ml_dtypes.bfloat16)}, {})
    assert bf["y"].dtype == ml_dtypes.bfloat16


def test_f64_stays_f64() -> None:
    x = normal(100, dtype=np.float64)
    text = "kernel total(x: f64[N], s: f32) -> y: f64[N] { y[i] = x[i] * s + 0.1 }"
    assert np.array_equal(run(graph(text), {"x": x}, {"s": 0.5})["y"], x * 0.5 + 0.1)


# ---------------------------------------------------------------- updates


def test_accumulation_into_places() -> None:
    text = "kernel hist(c: inout f32[M], page: i32[N], x: f32[N]) -> z: f32[N] { c[page[i]] += x[i]\n z[i] = x[i] }"
    c, page, x = np.ones(4, np.float32), np.array([1, 1, 3], np.int32), np.array([1, 2, 4], np.float32)
    got = call(text, c=c, page=page, x=x)
    assert list(got) == ["z", "c"]
    assert got["c"].tolist() == [1, 4, 1, 5]
    assert c.tolist() == [1, 1, 1, 1]  # arguments are not changed


def test_writes_out_of_range() -> None:
    text = "kernel put(c: inout f32[M, D], page: i32[N], x: f32[N, D]) -> z: f32[1] { c[page[i], d] = x[i, d]\n z[i] = 0 }"
    c, x = np.zeros((3, 2), np.float32), normal(2, 2)
    g = graph(text)
    good = run(g, {"c": c, "page": np.array([2, 0], np.int32), "x": x}, {})["c"]
    assert np.array_equal(good, np.stack([x[1], c[0], x[0]]))
    bad = {"c": c, "page": np.array([3, 0], np.int32), "x": x}
    with pytest.raises(ValueError, match="index 1 of `c` is outside"):
        run(g, bad, {})
    assert np.array_equal(run(g, bad, {}, check_indices=False)["c"], np.stack([x[1], c[0], c[0]]))
    with pytest.raises(ValueError, match="more than once"):
        run(g, {"c": c, "page": np.array([1, 1], np.int32), "x": x}, {})


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": normal(2, 2, 11, 9)}, r"axis 4 of `k` \[B, G, N, D\] is 9, but `D` must be 8; axis 4 of `q`"),
        (
            {"v": normal(2, 2, 10, 6)},
            r"axis 3 of `v` \[B, G, N, E\] is 10, but `N` must be 11; axis 3 of `k`",
        ),
        ({"q": normal(2, 4, 7)}, r"`q` has 3 axes, shape \(2, 4, 7\); it needs 4: \[B, H, M, D\]"),
        ({"q": normal(2, 3, 7, 8)}, r"attention: requires H % G == 0 \(G = 2, H = 3\)"),
        ({"scale": -1.0}, r"attention: requires scale > 0 \(scale = -1.0\)"),
    ],
)
def test_refused_calls(change: dict[str, object], words: str) -> None:
    q, k, v = heads()
    arguments: dict[str, object] = {"q": q, "k": k, "v": v, "scale": 0.3, **change}
    with pytest.raises(ValueError, match=words):
        call(attention_text(), **arguments)


def test_wrong_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="`x` has dtype float32; it needs i32"):
        call("kernel f(x: i32[N]) -> y: i32[N] { y[i] = x[i] }", x=normal(3))


def test_extent_solved_from_a_linear_shape() -> None:
    text = "kernel half(x: f32[2 * N + 1]) -> y: f32[N] { y[i] = x[2 * i] + x[2 * i + 1] }"
    x = normal(9)
    close(call(text, x=x)["y"], x[:-1].astype(float).reshape(4, 2).sum(1))
    with pytest.raises(ValueError, match="is 8; no extent N"):
        call(text, x=normal(8))
