"""The functions of the facade against float64 NumPy: options alone and together, refusals, kinds of arrays."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float64_attention import attention64, normal, positions

import tileloom as tl

B, H, G, M, N, D, E = 2, 4, 2, 37, 45, 16, 24
Q, K, V = normal(0, B, H, M, D), normal(1, B, G, N, D), normal(2, B, G, N, E)
BIAS, SLOPES, SINKS = normal(3, H, M, N), np.abs(normal(4, H)), normal(5, H)
KEEP = np.random.default_rng(6).random((B, 1, 1, N)) < 0.7
LOWER, KEY = positions(M, N)
UPPER, _ = positions(M, N, "upper_left")
ALIBI = -SLOPES[:, None, None] * np.abs(LOWER - KEY)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"scale": -0.3}, {"scale": -0.3}),
    "upper left": ({"causal": "upper_left"}, {"sees": KEY <= UPPER}),
    "lower right": ({"causal": "lower_right"}, {"sees": KEY <= LOWER}),
    "window": ({"window": (5, 3)}, {"sees": (KEY - LOWER >= -5) & (KEY - LOWER <= 3)}),
    "window of causal": (
        {"window": (5, 9), "causal": "upper_left"},
        {"sees": (KEY - UPPER >= -5) & (KEY <= UPPER)},
    ),
    "everything": (
        {
            "bias": BIAS,
            "softcap": 3.0,
            "mask": KEEP,
            "causal": "lower_right",
            "alibi_slopes": SLOPES,
            "scale": 0.5,
        },
        {"bias": BIAS + ALIBI, "softcap": 3.0, "sees": KEEP & (KEY <= LOWER), "scale": 0.5},
    ),
    "sinks": ({"sinks": SINKS, "causal": "lower_right"}, {"sinks": SINKS, "sees": KEY <= LOWER}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_options(name: str) -> None:
    given, meant = CASES[name]
    o, lse = tl.attention(Q, K, V, return_lse=True, **given)
    want, want_lse = attention64(Q, K, V, **meant)
    np.testing.assert_allclose(o, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(N,), (M, N), (B, 1, M, N), (1, H, 1, 1), (B, H, M, N), (1, 1)])
def test_bias_is_broadcast(shape: tuple[int, ...]) -> None:
    bias = normal(7, *shape)
    o = tl.attention(Q, K, V, bias=bias, target="interp")
    np.testing.assert_allclose(o, attention64(Q, K, V, bias=bias)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "error"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2), (np.float64, 1e-13)]
)
def test_attention_in_other_types(dtype: Any, error: float) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    o = tl.attention(q, k, v, causal="lower_right")
    assert o.dtype == dtype
    want, _ = attention64(q, k, v, sees=KEY <= LOWER)
    np.testing.assert_allclose(o.astype(np.float64), want, rtol=error, atol=error)


def test_repeated_attention_sees_what_changes() -> None:
    q, k, v = (normal(i, 1, 2, 3, 4) for i in range(3))
    for scale in (None, 0.5, 0.0, -0.0):
        for array in (q, 2 * q):
            want = tl.attention(array, k, v, scale=scale, target="interp")
            np.testing.assert_allclose(tl.attention(array, k, v, scale=scale), want, atol=1e-6)
            np.testing.assert_allclose(tl.attention(array, k, v, scale=scale), want, atol=1e-6)
    out = np.zeros_like(q)
    assert tl.attention(q, k, v, causal=True, out=out) is out
    np.testing.assert_array_equal(out, tl.attention(q, k, v, causal=True))


def test_out_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    out = np.empty((B, H, M, E), np.float32), np.empty((B, H, M), np.float32)
    returned = tl.attention(Q, K, V, return_lse=True, out=out, show=True)
    assert returned[0] is out[0]
    assert returned[1] is out[1]
    np.testing.assert_array_equal(out[0], tl.attention(Q, K, V, return_lse=True)[0])
    text = capsys.readouterr().out
    assert "p[b, h, m, n] = softmax[n](s[b, h, m, n])" in text
    assert list(tl.parse(text).kernels) == ["attention"]  # what is shown is a program


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"causal": True},
        ValueError,
        'write causal="upper_left" (query i sees keys up to i) or causal="lower_right"',
    ),
    ({"causal": "left"}, ValueError, "`causal` is 'left'"),
    ({"window": (1,)}, ValueError, "`window` is (1,); it is (left, right)"),
    ({"window": (-2, 0)}, ValueError, "`window` is (-2, 0)"),
    ({"mask": np.ones((M, N), np.float32)}, TypeError, "`mask` holds float32; it holds booleans"),
    ({"mask": np.ones((N, M), bool)}, ValueError, "`mask` has shape (45, 37)"),
    ({"bias": np.ones((M, N), np.int32)}, TypeError, "`bias` holds int32"),
    ({"bias": np.ones((1, B, H, M, N), np.float32)}, ValueError, "`bias` has shape (1, 2, 4, 37, 45)"),
    ({"softcap": 0}, ValueError, "`softcap` is 0; a number above 0"),
    ({"scale": "1"}, TypeError, "`scale` is '1'; a number"),
    ({"alibi_slopes": np.ones(3, np.float32)}, ValueError, "`alibi_slopes` has shape (3,)"),
    ({"sinks": np.ones((B, H), np.float32)}, ValueError, "`sinks` has shape (2, 4)"),
    ({"target": "abacus"}, ValueError, "no target is called 'abacus'"),
]


@pytest.mark.parametrize(("options", "error", "says"), REFUSED, ids=[s for _, _, s in REFUSED])
def test_refusals(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        tl.attention(Q, K, V, **options)


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "says"),
    [
        (Q[0], K, V, ValueError, "`q` has shape (4, 37, 16); it takes [B, H, M, D]"),
        (Q[:, :3], K, V, ValueError, "`q` has 3 heads and `k` 2"),
        (Q, K.astype(np.float64), V, TypeError, "`k` holds f64; it must hold f32"),
        (Q, K[:, :, 1:], V, ValueError, "N"),
        (Q.astype(np.int32), K, V, TypeError, "`q` holds int32"),
        ([1], K, V, TypeError, "`q` is a list"),
    ],
)
def test_refused_arrays(q: Any, k: Any, v: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        tl.attention(q, k, v)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(axis: int) -> None:
    x = 5 * normal(8, 7, 33, 5)
    e = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    np.testing.assert_allclose(tl.softmax(x, axis), e / e.sum(axis, keepdims=True), rtol=1e-5, atol=1e-7)


def test_softmax_refuses_an_axis_that_is_none() -> None:
    with pytest.raises(ValueError, match="`axis` is 2; x has 2 axes"):
        tl.softmax(Q[0, 0], 2)


def test_norms() -> None:
    x, w, b = normal(9, 3, 11, 50), normal(10, 50), normal(11, 50)
    y = x.astype(np.float64)
    centred = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(tl.layernorm(x, w, b), centred * w + b, rtol=1e-5, atol=1e-5)
    rms = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(tl.rmsnorm(x, w), rms * w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tl.rmsnorm(x[0], target="interp"), rms[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("left", "right"), [((3, 33, 20), (20, 17)), ((2, 1, 9, 20), (3, 20, 5)), ((9, 20), (20, 17))]
)
def test_matmul_broadcasts_like_numpy(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = normal(12, *left), normal(13, *right)
    np.testing.assert_allclose(
        tl.matmul(a, b), a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5
    )


def test_matmul_of_small_integers_is_exact() -> None:
    a, b = (np.random.default_rng(s).integers(-128, 128, (21, 21), np.int8) for s in (1, 2))
    c = tl.matmul(a, b)
    assert c.dtype == np.int32
    np.testing.assert_array_equal(c, a.astype(np.int32) @ b.astype(np.int32))


def test_torch_tensors_come_back_as_torch() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    o, lse = tl.attention(q, k, v, return_lse=True)
    assert isinstance(o, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    np.testing.assert_array_equal(o.numpy(), tl.attention(Q, K, V, return_lse=True)[0])
