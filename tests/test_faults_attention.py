"""Faults that users of comparable systems reported (see shared/cases/faults.md), with `tl.attention` and `tl.softmax`."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from float64_attention import Array, attention64, normal, positions

import tileloom as tl

INF, LOWEST = np.inf, np.finfo(np.float32).min


def qkv(
    m: int, n: int, d: int, dtype: Any = np.float32, b: int = 1, h: int = 1, seed: int = 0
) -> tuple[Array, Array, Array]:
    shapes = ((b, h, m, d), (b, h, n, d), (b, h, n, d))
    q, k, v = (normal(seed + i, *s, dtype=dtype) for i, s in enumerate(shapes))
    return q, k, v


def close(got: Array, want: Array, error: float = 1e-5) -> None:
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=error, atol=error)


# ---------------------------------------------------------------- masks


def test_B001_rows_that_see_nothing_are_zero() -> None:
    q, k, v = qkv(8, 8, 8)
    mask = np.zeros((8, 8), bool)
    mask[:4, :4] = True
    o, lse = tl.attention(q, k, v, mask=mask, return_lse=True)
    assert not o[:, :, 4:].any()
    assert (lse[:, :, 4:] == -INF).all()
    close(o[:, :, :4], attention64(q[:, :, :4], k[:, :, :4], v[:, :, :4])[0])


def test_B004_one_answer_from_every_path_and_tile_size(capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = qkv(4, 4, 2)
    mask = np.ones((4, 4), bool)
    mask[1] = False
    want = tl.attention(q, k, v, mask=mask, scale=1.0, show=True)
    assert not want[:, :, 1].any()
    close(want, attention64(q, k, v, sees=mask, scale=1.0)[0])
    kernel = tl.parse(capsys.readouterr().out)["attention"]
    tiles = (
        f"schedule s for attention on cpu {{\n    fuse all\n    tile m by {m}, n by {n}\n}}\n"
        for m, n in ((1, 1), (2, 3))
    )
    for options in ({"fuse": "none"}, *({"schedule": t} for t in tiles)):
        got = tl.compile(kernel, **options)(q, k, v, 1.0, mask)
        assert not got[:, :, 1].any()
        close(got, want.astype(np.float64), 1e-6)


def test_B007_rows_that_begin_with_minus_infinity() -> None:
    few = np.array([[1.0, -INF, 2.0]], np.float32)
    close(tl.softmax(few)[:, [0, 2]], np.array([[1, np.e]]) / (1 + np.e), 1e-6)
    late = np.full((2, 1300), -INF, np.float32)
    late[:, 1280:] = normal(1, 2, 20)
    y = tl.softmax(late)
    assert np.isfinite(y).all()
    close(y.sum(1), np.ones(2), 1e-6)
    assert not tl.softmax(np.full((1, 300), -INF, np.float32)).any()


def test_X001_a_row_of_the_lowest_float_is_uniform() -> None:
    q, k, v = qkv(37, 45, 64)
    bias = np.zeros((37, 45), np.float32)
    bias[5] = LOWEST
    o = tl.attention(q, k, v, bias=bias)
    close(o[0, 0, 5], v[0, 0].astype(np.float64).mean(0))
    close(o, attention64(q, k, v, bias=bias)[0])


def test_B008_triangular_minus_infinity() -> None:
    x = normal(2, 8, 12, 71, 71)
    x[..., np.triu(np.ones((71, 71), bool), 1)] = -INF
    y = tl.softmax(x)
    assert np.isfinite(y).all()
    close(y.sum(-1), np.ones((8, 12, 71)))


# ---------------------------------------------------------------- causal


@pytest.mark.parametrize(("causal", "keys"), [("upper_left", 1), ("lower_right", 77)])
def test_B012_one_query_against_many_keys(causal: Any, keys: int) -> None:
    q, k, v = qkv(1, 77, 64, np.float16)
    o = tl.attention(q, k, v, causal=causal)
    close(o, attention64(q, k[:, :, :keys], v[:, :, :keys])[0], 1e-3)
    with pytest.raises(ValueError, match=r'causal="upper_left".* or causal="lower_right"'):
        tl.attention(q, k, v, causal=True)


def test_B016_the_offset_of_the_keys() -> None:
    q, k = np.zeros((1, 1, 2, 16), np.float32), np.zeros((1, 1, 3, 16), np.float32)
    v = np.eye(3, 16, dtype=np.float32)[None, None]
    o = tl.attention(q, k, v, causal="lower_right")[0, 0, :, :3]
    np.testing.assert_allclose(o, [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)


def test_B018_windows_as_wide_as_the_sequence_change_no_bit() -> None:
    q, k, v = qkv(64, 64, 16)
    want = tl.attention(q, k, v, causal=True)
    for window in ((63, 0), (64, 0), (-1, 0)):
        np.testing.assert_array_equal(tl.attention(q, k, v, causal=True, window=window), want)
    i, j = positions(64, 64)
    close(
        tl.attention(q, k, v, causal=True, window=(62, 0)),
        attention64(q, k, v, sees=(j <= i) & (j >= i - 62))[0],
    )


# ---------------------------------------------------------------- sizes


def test_B020_partial_tiles() -> None:
    q, k, v = qkv(192, 192, 16)
    o, want = tl.attention(q, k, v), attention64(q, k, v)[0]
    close(o[:, :, :128], want[:, :, :128])
    close(o[:, :, 128:], want[:, :, 128:])
    q, k, v = qkv(137, 137, 64)
    i, j = positions(137, 137)
    close(tl.attention(q, k, v, causal=True), attention64(q, k, v, sees=j <= i)[0])


def test_B022_head_size_63() -> None:
    q, k, v = qkv(130, 130, 63, np.float16)
    close(tl.attention(q, k, v), attention64(q, k, v)[0], 2e-3)


def test_B026_one_more_than_many_tiles() -> None:
    q, k, v = qkv(1025, 1025, 16)
    i, j = positions(1025, 1025)
    close(tl.attention(q, k, v, causal=True), attention64(q, k, v, sees=j <= i)[0])


def test_B027_head_sizes(slow: bool) -> None:
    for d in range(8, 521, 8) if slow else (8, 192, 520):
        q, k, v = qkv(33, 35, d)
        close(tl.attention(q, k, v), attention64(q, k, v)[0])


@pytest.mark.parametrize("d", [16, 0])
def test_B063_extents_of_zero(d: int) -> None:
    sizes = {"B": 2, "H": 2, "M": 3, "N": 4, "E": 16}
    empty = [frozenset(c) for r in range(4) for c in itertools.combinations("BHMN", r)]
    for zero in (*empty, {"E"}):
        b, h, m, n, e = (0 if name in zero else size for name, size in sizes.items())
        q, k, v = (normal(i, *s) for i, s in enumerate(((b, h, m, d), (b, h, n, d), (b, h, n, e))))
        o = tl.attention(q, k, v, scale=0.5)
        assert o.shape == (b, h, m, e)
        close(o, attention64(q, k, v, scale=0.5)[0])


def test_B063_no_key_heads() -> None:
    q, k, _ = qkv(3, 4, 16, h=2)
    with pytest.raises(ValueError, match="`q` has 2 heads and `k` 0"):
        tl.attention(q, k[:, :0], k[:, :0])
    with pytest.raises(ValueError, match="so `scale` must be given"):
        tl.attention(q[..., :0], k[..., :0], k)


# ---------------------------------------------------------------- strides


def test_B040_views_give_the_bits_of_copies() -> None:
    wide = [normal(i, 2, 50, 3, 32) for i in range(3)]
    heads_second = [x.transpose(0, 2, 1, 3)[..., :16] for x in wide]
    views = (
        heads_second,
        [x[..., ::2].transpose(0, 2, 1, 3) for x in wide],
        [x[:, ::-1].transpose(0, 2, 1, 3)[..., 15::-1] for x in wide],
        [np.broadcast_to(x[:1, :, :1, :16].transpose(0, 2, 1, 3), (2, 3, 50, 16)) for x in wide],
    )
    for q, k, v in views:
        want = tl.attention(*(np.ascontiguousarray(x) for x in (q, k, v)))
        np.testing.assert_array_equal(tl.attention(q, k, v), want)
        close(want, attention64(q, k, v)[0])
    out = np.empty((2, 50, 3, 16), np.float32).transpose(0, 2, 1, 3)
    assert tl.attention(*heads_second, out=out) is out
    np.testing.assert_array_equal(out, tl.attention(*heads_second))


def test_B044_bias_rows_of_any_length() -> None:
    q, k, v = qkv(77, 77, 64, np.float16, b=2, h=2)
    bias = normal(9, 2, 2, 77, 77, dtype=np.float16)
    close(tl.attention(q, k, v, bias=bias), attention64(q, k, v, bias=bias)[0], 3e-3)


# ---------------------------------------------------------------- numbers


def test_B066_scores_beyond_the_range_of_f16() -> None:
    random = np.random.default_rng(3)
    q, k = ((-900 * random.random((1, 1, 33, 64))).astype(np.float16) for _ in range(2))
    v = normal(4, 1, 1, 33, 64, dtype=np.float16)
    o = tl.attention(q, k, v, causal=True)
    assert np.isfinite(o).all()
    assert np.abs(o).max() <= np.abs(v).max()
    i, j = positions(33, 33)
    close(o, attention64(q, k, v, sees=j <= i)[0], 2e-3)


def test_B069_subnormal_values_are_kept() -> None:
    q, k, v = qkv(5, 4, 16)
    v *= np.float32(1e-40)
    want = attention64(q, k, v)[0]
    step = 2.0**-149
    assert np.abs(want).max() > 1000 * step
    assert np.abs(tl.attention(q, k, v) - want).max() <= 4 * step


def test_B071_long_rows() -> None:
    x = normal(5, 1, 30000)
    e = np.exp(x.astype(np.float64) - x.max())
    np.testing.assert_allclose(tl.softmax(x), e / e.sum(), rtol=1e-5)
