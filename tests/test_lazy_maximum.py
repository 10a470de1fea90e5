"""Maxima that stay where they are while new ones are not much larger: which programs may, and what comes out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.lazy_maximum import rows_that_cancel, with_lazy_maxima
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_text import parse_module, print_module
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
TEXT = """module g { tile g(x: f32[M, N], v: f32[M, N], o: out f32[M], r: out f32[M], c: f32) {
    extents M, N
    for m in M by 32 parallel {
        for n in N by 32 carry (top: f32[m] = fill(-inf), z: f32[m] = fill(0.0), a: f32[m] = fill(0.0)) {
            t: f32[m, n] = load x[m, n]
            new: f32[m] = max(top, max[n](t))
            base: f32[m] = where(new == -inf, 0.0, new)
            moved: f32[m] = exp(c * (top - base))
            w: f32[m, n] = exp(c * (t - base))
            yield new, z * moved + sum[n](w), YIELD
        }
        store o[m] = OUT
        store r[m] = OTHER
    }
} }"""
SUM = "a * moved + sum[n](w * load v[m, n])"


@pytest.mark.parametrize(
    ("step", "out", "other", "may"),
    [
        (SUM, "a / z", "where(z == 0.0, 0.0, a / z)", True),
        (SUM, "a / z", "f32(bf16(a)) / z * 3.0 + a / z", True),
        (SUM, "a / z", "z", False),
        (SUM, "a / z", "top", False),
        (SUM, "a / z", "c * top + log(z)", True),  # a log-sum-exp
        (SUM, "a / z", "log(z) + c * where(top == -inf, 0.0, top)", True),
        (SUM, "a / z", "where(z == 0.0, -inf, c * top + log(z))", True),
        (SUM, "a / z", "top + log(z)", False),  # the scale is lacking
        (SUM, "a / z", "c * top - log(z)", False),
        (SUM, "a / z", "2.0 * top + log(z)", False),
        (SUM, "a / z", "c * top + log(z * z)", False),
        (SUM, "a / z", "c * top + log(a / z)", False),
        (SUM, "a / z", "c * where(top < 0.0, 0.0, top) + log(z)", False),
        (SUM, "a / z", "c * (top + top) + log(z)", False),
        (SUM, "a / z", "c * top + log(z) + top", False),
        (SUM, "a / z", "c * top + (log(z) + log(z))", False),
        (SUM, "a / z", "z * top", False),
        (SUM, "a / z", "max(top, 0.0)", False),
        (SUM, "a / z", "log(z)", False),
        (SUM, "a / z", "a / (z + 1.0)", False),
        (SUM, "a / z", "a / z + a", False),
        (SUM, "a * z", "0.0", False),
        (SUM, "a / z", "f32(f16(a)) / z", False),  # f16 may not hold it
        (SUM, "a / z", "where(z < 1.0, 0.0, a / z)", False),
        ("a * moved + sum[n](w * w)", "a / z", "0.0", False),  # of degree 2, moved on as of 1
        ("a + sum[n](w)", "a / z", "0.0", False),  # does not move on
        ("a + moved", "a / z", "0.0", False),
        ("a * moved + sum[n](exp(2.0 * (t - base)))", "a / z", "0.0", False),  # another scale
        ("a * moved + sum[n](max(w, 0.5))", "a / z", "0.0", False),
        ("a * moved + z", "a / z", "0.0", False),  # z is relative to the maximum of the step before
        ("a * moved + sum[n](w * sum[m](w))", "a / z", "0.0", False),  # rows have maxima of their own
        (SUM, "a / z", "z / sum[m](z)", False),
        (SUM, "a / z", "sum[m](a / z)", True),
    ],
)
def test_which_programs_may(step: str, out: str, other: str, may: bool) -> None:
    module = parse_module(TEXT.replace("YIELD", step).replace("OUT", out).replace("OTHER", other))
    (program,) = module.programs
    assert (with_lazy_maxima(program) != program) == may
    assert (
        rows_that_cancel(program)
        == rows_that_cancel(with_lazy_maxima(program))
        == ({"base"} if may else set())
    )


LOOP = """for n in N by 32 carry (topI: f32[m] = fill(-inf), zI: f32[m] = fill(0.0)) {
    tI: f32[m, n] = load x[m, n]
    newI: f32[m] = max(topI, max[n](tI))
    movedI: f32[m] = exp(c * (topI - newI))
    yield newI, zI * movedI + sum[n](exp(c * (tI - newI)))
}
"""


@pytest.mark.parametrize(("second", "may"), [("2", False), ("", True)])
def test_two_loops_with_maxima_of_their_own(second: str, may: bool) -> None:
    """One loop's sum divided by another's says something about both maxima."""
    start, end = TEXT.index("for n in"), TEXT.index("store o")
    loops = LOOP.replace("I", "") + (LOOP.replace("I", "2") if second else "")
    text = TEXT[:start] + loops + TEXT[end:].replace("OUT", f"z / z{second}").replace("OTHER", "0.0")
    (program,) = parse_module(text).programs
    assert (with_lazy_maxima(program) != program) == may


def test_two_scales_by_one_maximum() -> None:
    """Sums that grow by different powers of what the maximum is off by."""
    faster = "faster: f32[m] = exp(2.0 * (top - base))\n            w: f32[m, n] ="
    text = TEXT.replace("w: f32[m, n] =", faster).replace("YIELD", "a * faster + sum[n](w * load v[m, n])")
    (program,) = parse_module(text.replace("OUT", "a / z").replace("OTHER", "0.0")).programs
    assert with_lazy_maxima(program) is program
    assert rows_that_cancel(program) == frozenset()


def test_how_a_maximum_stays() -> None:
    module = parse_module(TEXT.replace("YIELD", SUM).replace("OUT", "a / z").replace("OTHER", "0.0"))
    lazy = print_module(replace(module, programs=(with_lazy_maxima(module.programs[0]),)))
    assert "new_slack: f32 = 5.545177444479562 / abs(c)" in lazy
    assert "new_highest: f32[m] = max(top, max[n](t))" in lazy
    assert "new: f32[m] = where(new_highest <= top + new_slack, top, new_highest)" in lazy


ATTENTION = """kernel attention<T: f16 | bf16>(q: T[M, D], k: T[N, D], v: T[N, E], w: f32[M, N], scale: f32) -> o: T[M, E] {
    require scale > 0
    s[m, n] = SCORE
    p[m, n] = softmax[n](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""
PRODUCT = "scale * sum[d](q[m, d] * k[n, d])"


def compiled(score: str, sizes: dict[str, int], dtype: DType = DType.F16, tier: str = "wgmma") -> Any:
    return compile_kernel(
        tl.parse(ATTENTION.replace("SCORE", score))["attention"], SM_90A, sizes, dtypes={"T": dtype},
        schedule=parse_schedule(f"schedule s for attention on cuda:sm_90a {{ tier {tier}\n tile m by 64, n by 16 }}"),
    )  # fmt: skip


def steps(*heights: float) -> Array:
    """A row of scores that all lie at a height, tile after tile."""
    return np.repeat(np.float32(heights), 16)[:70]


@pytest.mark.parametrize("tier", ["wgmma", "mma"])
def test_rows_that_rise_fall_and_jump(tier: str) -> None:
    """Just below the limit in each step and just above it, down, up by far, from -inf, to inf, and NaN."""
    sizes = {"M": 64, "N": 70, "D": 16, "E": 16}
    made = compiled(f"{PRODUCT} + w[m, n]", sizes, tier=tier)
    assert [p.tier for p in made.module.programs] == [tier]
    assert "new_slack" in made.source
    assert "any_lane" in made.source
    rng = np.random.default_rng(3)
    inputs = {
        n: rng.standard_normal((sizes[a], 16)).astype(np.float16)
        for n, a in (("q", "M"), ("k", "N"), ("v", "N"))
    }
    inputs["q"] *= np.float16(0.01)
    w = np.zeros((64, 70), np.float32)
    w[1], w[2], w[3] = steps(0, 5.4, 5.5, 5.4, 5.5), steps(0, 5.6, 11.2, 16.8, 22.4), steps(0, 3, 6, 9, 12)
    w[4], w[5], w[6] = steps(9, 6, 3, 0, -3), steps(0, 1e30, 0, 2e30, 0), steps(-1e30, -1e4, -10, 0, 5)
    w[7], w[8] = steps(-np.inf, -np.inf, -3, -np.inf, 2), -np.inf
    w[9], w[10] = steps(1e6, 1e6 + 5, 1e6 + 10, 1e6 + 5, 1e6), steps(-3e9, -3e9, -3e9, -3e9, -3e9)
    w[11, 40], w[12, 69] = np.nan, np.inf
    got = emulate.run_module(made.module, made.source, {**inputs, "w": w}, {"scale": 0.3}, blocks=1)["o"]
    q, k, v = (inputs[n].astype(float) for n in "qkv")
    s = 0.3 * q @ k.T + w
    s[9], s[10] = np.float32(s[9]), np.float32(s[10])  # as f32 rounds them
    with np.errstate(invalid="ignore"):
        p = np.exp(s - np.where(np.isinf(s.max(1)) & (s.max(1) < 0), 0, s.max(1))[:, None])
    want = p @ v / np.where(p.sum(1) == 0, 1, p.sum(1))[:, None]
    rows = np.delete(np.arange(64), (9, 11, 12))
    assert np.abs(got.astype(float) - want)[rows].max() < 2e-3
    assert (
        np.abs(got.astype(float) - want)[9].max() < 0.2
    )  # neighbours among numbers of that size are 1/16 apart
    assert np.isnan(got[11]).all()
    assert np.isnan(got[12]).all()


@pytest.mark.parametrize("tier", ["wgmma", "mma"])
@pytest.mark.parametrize("scale", [0.3, 30.0, 1e-30])
def test_scales_of_any_size(scale: float, tier: str) -> None:
    """The limit is one of scores times their scale."""
    sizes = {"M": 64, "N": 70, "D": 16, "E": 16}
    made = compiled(PRODUCT, sizes, DType.BF16, tier)
    rng = np.random.default_rng(4)
    inputs = {
        n: np.float32(rng.standard_normal((sizes[a], 16))).astype("bfloat16")
        for n, a in (("q", "M"), ("k", "N"), ("v", "N"))
    }
    inputs["w"] = np.zeros((64, 70), np.float32)
    got = emulate.run_module(made.module, made.source, inputs, {"scale": scale}, blocks=1)["o"]
    q, k, v = (inputs[n].astype(float) for n in "qkv")
    s = scale * q @ k.T
    p = np.exp(s - s.max(1, keepdims=True))
    assert np.abs(got.astype(float) - p @ v / p.sum(1, keepdims=True)).max() < 0.02


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
def test_no_product_of_the_matrix_units_waits_for_the_branch() -> None:
    """The assembler neither complains nor spills, and the products by factors stand behind a branch of their own."""
    from tileloom.runtime.machine_code import machine_code

    sizes = {"M": 64, "N": 128, "D": 64, "E": 64}
    made = compiled(PRODUCT, sizes, DType.BF16)
    name = next(line for line in made.source.splitlines() if line.startswith("def "))[4:-1]
    kernel = machine_code(made.source, name, SM_90A)
    assert kernel.spill_bytes == 0
    assert "C75" not in kernel.log
    assert "VOTE.ANY" in kernel.sass or "VOTEU.ANY" in kernel.sass
