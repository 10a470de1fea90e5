"""Scalar functions of the CPU back end: exact conversions, reductions of rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from tileloom.runtime.intrinsics import cpu

EVERY = np.arange(0, 2**32, 1021, dtype=np.uint32).view(np.float32)
"""One float32 in a thousand, over all bit patterns: both signs, subnormals, infinities, NaN."""


def over_array(function):  # type: ignore[no-untyped-def]
    @njit(error_model="numpy")
    def loop(x, y):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            y[i] = function(x[i])

    return loop


HALVES = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_widening_is_exact(name: str, dtype: type) -> None:
    got = np.empty(HALVES.size, np.float32)
    over_array(getattr(cpu, f"widen_{name}"))(HALVES, got)
    np.testing.assert_array_equal(got, HALVES.view(dtype).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), HALVES >= 0x8000)


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_narrowing_rounds_to_nearest_even(name: str, dtype: type) -> None:
    middle = HALVES.view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([EVERY, middle, (middle[1:] + middle[:-1]) / 2])
        want = x.astype(dtype)
    got = np.empty(x.size, np.uint16)
    over_array(getattr(cpu, f"narrow_{name}"))(x, got)
    nan = np.isnan(x)
    assert np.isnan(got[nan].view(dtype).astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nan], want[~nan].view(np.uint16))
