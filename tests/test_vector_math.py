"""Elementary functions of the CPU: their stated errors on a million points and all specials, as scalars and as vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numba import njit

from tileloom.runtime.intrinsics import vector_math
from tileloom.runtime.intrinsics.vectors import LANES, load, store

EVERY = np.arange(0, 2**32, 4093, dtype=np.uint32).view(np.float32)
"""A million float32, spread over all bit patterns: both signs, subnormals, infinities, NaN."""
NEAR = np.concatenate([np.linspace(-110, 130, 200_001), np.linspace(-4.5, 4.5, 400_001)]).astype(np.float32)
SPECIAL = np.array(
    [0, -0.0, np.inf, -np.inf, np.nan, 88.72283, 88.72284, -103.97, -103.98, 128, -149, -150, 1, -1, 1e-45],
    np.float32,
)
BOUNDS = {"exp": 0.9, "exp2": 0.8, "log": 0.8, "log2": 1.2, "tanh": 2.5, "erf": 1.0}
"""In units in the last place, as the module's text states them."""


def points() -> np.ndarray:
    x = np.concatenate([EVERY, NEAR, SPECIAL])
    return np.resize(x, -(-x.size // LANES) * LANES)


def exact(name: str, x: np.ndarray) -> np.ndarray:
    if name == "erf":
        return np.fromiter(map(math.erf, x.astype(np.float64).tolist()), np.float64, x.size)
    with np.errstate(all="ignore"):
        found: np.ndarray = getattr(np, name)(x.astype(np.float64))
        return found


@pytest.mark.parametrize("name", list(BOUNDS))
def test_errors_and_specials(name: str) -> None:
    function = getattr(vector_math, f"{name}_f32")

    @njit(error_model="numpy")
    def scalars(x, y):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            y[i] = function(x[i])

    @njit(error_model="numpy")
    def vectors(x, y):  # type: ignore[no-untyped-def]
        for i in range(0, x.size, LANES):
            store(y, (i,), function(load(x, (i,))))

    x = points()
    want = exact(name, x)
    with np.errstate(all="ignore"):
        rounded = want.astype(np.float32)
    got = np.empty_like(x)
    for loop in (scalars, vectors):
        got[:] = 7
        loop(x, got)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        zero = (got == 0) & (want == 0)
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]))
        odd = np.isinf(rounded) | np.isinf(got)
        np.testing.assert_array_equal(got[odd], rounded[odd])
        plain = np.isfinite(rounded)
        unit = np.spacing(np.abs(rounded[plain])).astype(np.float64)
        assert (np.abs(got[plain] - want[plain]) / unit).max() <= BOUNDS[name]


def test_a_loop_over_scalars_is_vectorised() -> None:
    function = vector_math.exp_f32

    @njit(error_model="numpy")
    def loop(x, y):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            y[i] = function(x[i])

    x = np.zeros(64, np.float32)
    loop(x, x.copy())
    (assembly,) = loop.inspect_asm().values()
    if not any(r in assembly for r in ("ymm", "zmm")):
        pytest.skip("no vectors of 256 bits on this machine")
    packed = [w for w in assembly.split("\n") if "ps\t" in w and ("ymm" in w or "zmm" in w)]
    assert len(packed) > 20
    assert "expf" not in assembly
