"""Faults that other systems had with matrix products (kind matmul): small whole numbers, so results are exact."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (registers bf16 with NumPy)
import numpy as np
import pytest

import tileloom as tl

TEXT = """
kernel product<T: f16 | f32>(a: T[M, K], b: T[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }
kernel two<T: f32>(a: T[M, K], b: T[K, N], d: T[M, J], e: T[J, N]) -> c: T[M, N] {
    c[m, n] = sum[k](a[m, k] * b[k, n]) + sum[j](d[m, j] * e[j, n])
}
"""
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def product() -> Any:
    return tl.compile(tl.parse(TEXT)["product"])


def whole(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.integers(-2, 3, shape).astype(dtype)


def exact(a: Array, b: Array) -> Array:
    return a.astype(np.int64) @ b.astype(np.int64)


def test_b028_the_tail_of_the_sum_is_exact(product: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = whole(rng, 1000, 1001, dtype=np.float16), whole(rng, 1001, 999, dtype=np.float16)
    np.testing.assert_array_equal(product(a, b), exact(a, b))


@pytest.mark.parametrize("size", [500, 511])
def test_b030_odd_sizes_and_repeated_calls_are_equal(product: Any, size: int) -> None:
    rng = np.random.default_rng(size)
    a, b = whole(rng, size, size, dtype=np.float16), whole(rng, size, size, dtype=np.float16)
    calls = [product(a, b) for _ in range(3)]
    np.testing.assert_array_equal(calls[0], exact(a, b))
    assert calls[0].tobytes() == calls[1].tobytes() == calls[2].tobytes()


def test_b031_hundreds_of_shapes_between_islands_of_nan(product: Any) -> None:
    rng = np.random.default_rng(31)
    for _ in range(300):
        m, n, k = (int(x) for x in rng.integers(1, 201, 3))
        a, b = island(whole(rng, m, k)), island(whole(rng, k, n))
        out, around = with_margin(m, n)
        product(a, b, out=out)
        np.testing.assert_array_equal(out, exact(a, b))
        out[...] = np.nan
        assert np.isnan(around).all()  # nothing was written outside


def island(x: Array) -> Array:
    """The same values with NaN on all sides in memory."""
    view, _ = with_margin(*x.shape)
    view[...] = x
    return view


def with_margin(rows: int, columns: int) -> tuple[Array, Array]:
    around = np.full((rows + 6, columns + 10), np.nan, np.float32)
    return around[3:-3, 5:-5], around


def test_b034_every_column_is_written(product: Any) -> None:
    rng = np.random.default_rng(34)
    a, b = whole(rng, 16, 64), whole(rng, 64, 104)
    out = np.full((16, 104), np.nan, np.float32)
    product(a, b, out=out)
    np.testing.assert_array_equal(out, exact(a, b))


def test_b038_two_products_into_one_accumulator() -> None:
    rng = np.random.default_rng(38)
    a, b, d, e = whole(rng, 70, 33), whole(rng, 33, 51), whole(rng, 70, 90), whole(rng, 90, 51)
    kernel = tl.compile(tl.parse(TEXT)["two"], fuse="all")
    np.testing.assert_array_equal(kernel(a, b, d, e), exact(a, b) + exact(d, e))


@pytest.mark.parametrize("rest", range(16))
def test_b039_all_remainders_and_orders(product: Any, rest: int) -> None:
    rng = np.random.default_rng(rest)
    m, k, n = 32 + rest, 16 + rest, 48 + rest
    wide = whole(rng, m, 2 * k)
    for a in (whole(rng, m, k), np.asfortranarray(whole(rng, m, k)), wide[:, ::2], wide[::-1, 1::2]):
        b = np.asfortranarray(whole(rng, k, n))
        np.testing.assert_array_equal(product(a, b), exact(a, b))
        np.testing.assert_array_equal(product(a, b[:, ::-1]), exact(a, b[:, ::-1]))
