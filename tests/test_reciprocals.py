"""softmax(q kᵀ / √D) as textbooks write it: the divisor leaves the maximum, and no element is divided."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import SM_80, SM_90A
from tileloom.compiler.tile_text import print_module
from tileloom.dsl.types import DType

Array = np.ndarray[Any, Any]
DOT = "sum[d](q[m, d] * k[n, d])"
TEXT = """kernel attend<T: f32 | bf16>(q: T[M, D], k: T[N, D], v: T[N, E], t: f32, u: f32) -> o: T[M, E] {
    require u > 0
    s[m, n] = SCORE
    p[m, n] = softmax[n | n <= m + 2](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""
SCORES = {
    f"{DOT} / sqrt(D)": lambda s, d, t, u, gap: s / np.sqrt(d),
    "sum[d](q[m, d] / sqrt(D) * k[n, d])": lambda s, d, t, u, gap: s / np.sqrt(d),
    f"u * ({DOT} / sqrt(D))": lambda s, d, t, u, gap: u * s / np.sqrt(d),
    f"{DOT} / u / sqrt(D)": lambda s, d, t, u, gap: s / u / np.sqrt(d),
    f"{DOT} / 3.0": lambda s, d, t, u, gap: s / 3,
    f"{DOT} / t": lambda s, d, t, u, gap: s / t,
    f"{DOT} / sqrt(D) + 0.5 * f32(n - m)": lambda s, d, t, u, gap: s / np.sqrt(d) + 0.5 * gap,
    f"softcap({DOT} / sqrt(D), 30.0)": lambda s, d, t, u, gap: 30 * np.tanh(s / np.sqrt(d) / 30),
}
LIFTED = [x for x in SCORES if "/ t" not in x and "f32(" not in x and "softcap" not in x]


def program(score: str) -> Any:
    return tl.parse(TEXT.replace("SCORE", score))["attend"]


def expected(score: str, q: Array, k: Array, v: Array, t: float, u: float) -> Array:
    gap = np.arange(len(k))[None, :] - np.arange(len(q))[:, None]
    s = SCORES[score](q.astype(float) @ k.astype(float).T, q.shape[1], t, u, gap)
    s = np.where(gap <= 2, s, -np.inf)
    w = np.exp(s - s.max(axis=1, keepdims=True))
    return (w / w.sum(axis=1, keepdims=True)) @ v


@pytest.mark.parametrize("target", ["interp", "cpu"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("t", [0.7, -2.5])
def test_values(score: str, target: str, t: float) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((37, 24), (41, 24), (41, 8)))
    got = tl.compile(program(score), target=target)(q, k, v, t, 1.75)
    np.testing.assert_allclose(got, expected(score, q, k, v, t, 1.75), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("score", [s for s in SCORES if " t" not in s])
def test_no_element_is_divided(score: str) -> None:
    sizes = {"M": 1024, "N": 1024, "D": 64, "E": 64}
    made = compile_kernel(program(score), SM_90A, sizes, dtypes={"T": DType.BF16})
    loops = print_module(made.module).split("for n in")[1:]
    divisions = [line for line in "".join(loops).splitlines() if "dot[d]" in line and "/" in line]
    assert made.module.programs[0].tier == "wgmma"
    assert [x for x in divisions if "/ 30.0" not in x] == []  # a cap's own constant joins the exponential's
    if score in LIFTED:
        assert re.search(r"exp\([\w.]+ \* \(\w+ - \w+\)\)", loops[0])


def test_the_same_steps_as_with_a_scale() -> None:
    """Up to the name of the factor, and where it comes from."""
    text = TEXT.replace("t: f32, u: f32", "scale: f32").replace("u > 0", "scale > 0")
    by_scale = tl.parse(text.replace("SCORE", f"scale * {DOT}"))["attend"]
    sizes = {"M": 1024, "N": 1024, "D": 64, "E": 64}
    for target in (SM_80, SM_90A):
        loops = []
        for p in (by_scale, program(f"{DOT} / sqrt(D)")):
            made = compile_kernel(p, target, sizes, dtypes={"T": DType.BF16})
            loops.append(
                print_module(made.module)
                .partition("for n in")[2]
                .partition("store")[0]
                .replace("v_div", "scale")
            )
        assert loops[0] == loops[1]
        assert "exp(scale * (" in loops[0]


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_heads_of_no_columns(target: str) -> None:
    """0/√0 is NaN, for each score and so for each weight."""
    q, k, v = np.ones((3, 0), np.float32), np.ones((4, 0), np.float32), np.ones((4, 2), np.float32)
    got = tl.compile(program(f"{DOT} / sqrt(D)"), target=target)(q, k, v, 1.0, 1.0)
    assert np.isnan(got).all()


def test_a_quotient_of_no_softmax_stays() -> None:
    """Results that are divided, and exponentials of no difference from a maximum, keep the division's rounding."""
    text = "kernel f(x: f32[N], t: f32) -> (a: f32[N], b: f32) {\n a[n] = exp(x[n] / t)\n b = max[n](x[n] / t)\n}"
    x = np.random.default_rng(0).standard_normal(999, dtype=np.float32)
    a, b = tl.compile(tl.parse(text)["f"], target="cpu")(x, 3.0)
    assert b == (x / np.float32(3)).max()
    np.testing.assert_allclose(a, np.exp(x.astype(float) / 3), rtol=3e-7)


def test_it_is_a_remark() -> None:
    made = compile_kernel(program(f"{DOT} / sqrt(D)"), SM_80, {"M": 64, "N": 64, "D": 64, "E": 64})
    assert [r.name for r in made.remarks].count("reciprocal") == 1


def test_a_quotient_that_becomes_an_integer_stays() -> None:
    """3 / 3 is 1; 3 · (1/3) may be less, and cut off it is 0."""
    text = "kernel f(x: f32[N], t: f32) -> p: f32[N] {\n p[n] = softmax[n](f32(i32(x[n] / t)))\n}"
    made = compile_kernel(tl.parse(text)["f"], SM_80, {"N": 64})
    assert not [r for r in made.remarks if r.name == "reciprocal"]
