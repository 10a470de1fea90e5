"""Vectors as Numba values: operators, conversions, masked memory and reductions, against NumPy."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from numba import njit

from tileloom.runtime.intrinsics.cpu import f32, fma, maximum, minimum, select
from tileloom.runtime.intrinsics.vectors import (
    LANES,
    WIDE,
    indices,
    lanes_bool,
    lanes_f32,
    lanes_f32_wide,
    lanes_f64,
    lanes_i64,
    larger,
    load,
    load_some,
    load_wide,
    max_lanes,
    min_lanes,
    noting_nan,
    smaller,
    store,
    store_some,
    store_wide,
    sum_lanes,
    within,
)

SPECIAL = np.array([0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 1e-42], np.float32)


def values(n: int) -> np.ndarray:
    return np.resize(SPECIAL, n)


@njit
def arithmetic(x: Any, y: Any, out: Any) -> None:
    a, b = load(x, (0,)), load(y, (0,))
    store(out, (0, 0), a + b)
    store(out, (1, 0), a - f32(2))
    store(out, (2, 0), 3 * b)
    store(out, (3, 0), a / b)
    store(out, (4, 0), -a)
    store(out, (5, 0), fma(a, b, f32(1)))
    store(out, (6, 0), maximum(a, b))
    store(out, (7, 0), minimum(a, f32(0.5)))
    store(out, (8, 0), select(a < b, a, f32(7)))
    store(out, (9, 0), lanes_f32((a <= b) | (a != a)))
    store(out, (10, 0), lanes_f32((a == b) & ~(a > f32(0))))
    store(out, (11, 0), lanes_f32(indices(5)))
    store(out, (12, 0), lanes_f32(lanes_f64(a) * 2.0))
    store(out, (13, 0), lanes_f32(lanes_bool(lanes_i64(3) == indices(0))))


def test_operators_and_conversions_match_numpy() -> None:
    x, y = values(LANES), values(LANES + 3)[3:].copy()
    out = np.empty((14, LANES), np.float32)
    arithmetic(x, y, out)
    where = np.arange(LANES)
    with np.errstate(all="ignore"):
        expected = [
            x + y, x - 2, 3 * y, x / y, -x, x * y + 1, np.maximum(x, y), np.minimum(x, np.float32(0.5)),
            np.where(x < y, x, 7), (x <= y) | np.isnan(x), (x == y) & ~(x > 0), where + 5, x * 2, where == 3,
        ]  # fmt: skip
    for got, want in zip(out, expected, strict=True):
        np.testing.assert_array_equal(got, np.asarray(want, np.float32))


@njit
def copied(x: Any, y: Any, n: Any) -> None:
    for i in range(x.shape[0]):
        for j in range(0, n, LANES):
            store_some(y, (i, j), load_some(x, (i, j), n - j), n - j)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int8, np.bool_])
def test_masked_memory_touches_the_first_lanes_only(dtype: type) -> None:
    n = 2 * LANES + 3
    wide = (np.arange(3 * 2 * (n + 5)) % 100).astype(dtype).reshape(3, -1)
    for x in (wide[:, :n].copy(), wide[:, : 2 * n : 2], wide[::-1, :n]):  # dense, strided, dense rows apart
        y = np.full((3, n + 4), 1, dtype)
        copied(x, y, n)
        np.testing.assert_array_equal(y[:, :n], x)
        assert (y[:, n:] == dtype(1)).all()
        z = np.full((3, 2 * n), 1, dtype)
        copied(x, z[:, ::2], n)
        np.testing.assert_array_equal(z[:, ::2], x)
        assert (z[:, 1::2] == dtype(1)).all()


@njit
def across(x: Any) -> Any:
    v = load(x, (0,))
    return sum_lanes(v), max_lanes(v), min_lanes(v)


def test_reductions_of_the_lanes() -> None:
    x = np.random.default_rng(1).standard_normal(LANES).astype(np.float32)
    total, high, low = across(x)
    assert abs(total - x.astype(np.float64).sum()) < 1e-5
    assert high == x.max()
    assert low == x.min()
    x[LANES // 2] = np.nan
    assert all(np.isnan(v) for v in across(x))


def test_operators_leave_scalars_alone() -> None:
    """The typing of Python's operators is extended, not replaced."""

    @njit
    def plain(a: Any, b: Any) -> Any:
        return operator.add(a, b), a < b, -a

    assert plain(2, 3.5) == (5.5, True, -2)


def test_lanes_beyond_a_count_are_replaced() -> None:
    @njit
    def kept(x, y, n):  # type: ignore[no-untyped-def]
        store(y, (0,), within(load(x, (0,)), n, np.float32(-1)))

    x = np.arange(1, LANES + 1, dtype=np.float32)
    for n in (-3, 0, 1, LANES - 1, LANES, LANES + 5):
        y = np.zeros(LANES, np.float32)
        kept(x, y, n)
        np.testing.assert_array_equal(y, np.where(np.arange(LANES) < n, x, -1))


@njit(error_model="numpy")
def quotients(x: Any, z: Any, out: Any) -> None:
    for i in range(0, x.size, WIDE):
        store_wide(out, (i,), load_wide(x, (i,)) / z)


DIVIDENDS = np.concatenate(
    [
        np.random.default_rng(3).standard_normal(1 << 16).astype(np.float32),
        np.exp2(-90 * np.random.default_rng(4).random(1 << 16)).astype(np.float32),
        np.resize(np.array([0.0, 1.0, 3.0, 2.0**-90, 2.0**100, -5.0], np.float32), 1 << 12),
    ]
)
"""What the reciprocal serves: steps of WIDE without zeros below 0, infinities, NaN or what lies under 2^-90."""
DIVISORS = [
    1,
    3,
    -3,
    7,
    0.1,
    1 / 3,
    2**24,
    2**24 + 2,
    2**-24,
    2**-25,
    1 + 2**-23,
    2 - 2**-22,
    2 - 2**-23,
    1.7777777,
]


@pytest.mark.parametrize("z", [*DIVISORS, 0, -0.0, 1e-45, 3e38, np.inf, np.nan])
def test_a_vector_by_a_number_is_rounded_like_a_division(z: float) -> None:
    every = np.arange(0, 2**32, 65521, dtype=np.uint32).view(np.float32)
    for x in (DIVIDENDS, np.resize(every, every.size // WIDE * WIDE), np.resize(SPECIAL, WIDE)):
        got = np.empty_like(x)
        quotients(x, np.float32(z), got)
        with np.errstate(all="ignore"):
            want = x / np.float32(z)
        odd = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), odd)
        np.testing.assert_array_equal(got[~odd].view(np.uint32), want[~odd].view(np.uint32))


@njit
def extremes(x: Any) -> Any:
    high, low = noting_nan(lanes_f32_wide(-np.inf)), noting_nan(lanes_f32(np.inf))
    for i in range(0, x.size, WIDE):
        high = larger(high, load_wide(x, (i,)))
    for i in range(0, x.size, LANES):
        low = smaller(low, load(x, (i,)))
    return max_lanes(high), min_lanes(low)


@pytest.mark.parametrize("at", [0, LANES - 1, WIDE // 2, WIDE - 1, 3 * WIDE - 1])
def test_extremes_of_many_vectors_keep_a_nan_wherever_it_stands(at: int) -> None:
    x = np.random.default_rng(at).standard_normal(3 * WIDE).astype(np.float32)
    x[at] = 9
    assert extremes(x) == (9, x.min())
    x[at] = -9
    assert extremes(x) == (x.max(), -9)
    for odd in (np.nan, -np.nan):
        x[at] = odd
        assert all(np.isnan(v) for v in extremes(x))
    assert extremes(np.full(WIDE, -np.inf, np.float32)) == (-np.inf, -np.inf)
