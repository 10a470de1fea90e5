"""tanh without branches: errors over the whole range in emulated f32, and where each form stands."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tileloom.compiler.codegen.near_functions import Exponents, with_near_functions
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import Apply, Let, TileProgram, expressions, statements, subexpressions
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
DOUBLE_LOG2_E = 2.8853900817779268
OFF = (-1, 0, 1)
"""An approximate instruction is off by all that the PTX ISA allows it, down, not, or up."""


def exp2_off(sign: int) -> Any:
    """ex2.approx.ftz.f32 [PTX ISA 9.0, 9.7.3]: relative error of at most 2^-22, denormal results 0."""

    def exp2(y: Array) -> Array:
        with np.errstate(over="ignore"):
            exact = np.float32(np.exp2(y.astype(float)) * (1 + sign * 2.0**-22))
        return np.where(exact < 2.0**-126, np.float32(0), exact)

    return exp2


def reciprocal_off(sign: int) -> Any:
    """rcp.approx.ftz.f32 [9.7.3]: one unit in the last place, denormal results 0."""

    def reciprocal(x: Array) -> Array:
        exact = np.float32(1 / x.astype(float))
        off = np.float32(np.nextafter(exact, np.float32(sign * np.inf))) if sign else exact
        return np.where(np.isinf(x) | (exact < 2.0**-126), np.float32(0), off)

    return reciprocal


@pytest.fixture(scope="module")
def points() -> Array:
    """A million: all sizes, both signs, and the interval where tanh bends, evenly."""
    sizes = np.float32(2.0 ** np.linspace(-40, 40, 300_000))
    return np.concatenate([sizes, -sizes, np.linspace(-12, 12, 600_001, dtype=np.float32)])


@pytest.mark.parametrize("up", OFF)
@pytest.mark.parametrize("off", OFF)
def test_the_error_beside_one(points: Array, off: int, up: int) -> None:
    y = points * np.float32(DOUBLE_LOG2_E)
    got = emulate.flat_tanh(y, exp2_off(off), reciprocal_off(up))
    assert np.abs(got - np.tanh(points.astype(float))).max() < 2.0**-20.8
    lowered = emulate.falling_tanh(y, exp2_off(off), reciprocal_off(up))
    assert np.abs(lowered - (np.tanh(points.astype(float)) - 1) / 2).max() < 2.0**-21.8
    for c in np.float32([43.28, -8.66, 80.0]):
        raised = emulate.exp_tanh(y, c, exp2_off(off), reciprocal_off(up)).astype(float)
        want = np.exp2(float(c) * np.tanh(points.astype(float)))
        assert np.abs(raised / want - 1).max() < 2.0**-21 + abs(c) * 2.0**-21.1


@pytest.mark.parametrize("up", OFF)
@pytest.mark.parametrize("off", OFF)
def test_the_error_of_one_more(points: Array, off: int, up: int) -> None:
    y = points * np.float32(-DOUBLE_LOG2_E)
    got = emulate.tanh_plus_one(y, exp2_off(off), reciprocal_off(up)).astype(float)
    want = 2 / (1 + np.exp(-2 * np.maximum(points.astype(float), -350)))
    normal = want > 2.0**-125
    bound = 2.0**-20.8 + np.abs(y) * 2.0**-24
    assert (np.abs(got / want - 1) < bound)[normal].all()
    assert (got[~normal] <= 2.0**-124).all()


@pytest.mark.parametrize("up", OFF)
def test_the_error_beside_the_result(points: Array, up: int) -> None:
    got = emulate.near_tanh(points, reciprocal_off(up)).astype(float)
    assert np.abs(got / np.tanh(points.astype(float)) - 1).max() < 2.0**-18
    assert np.abs(got).max() <= 1


def test_special_values() -> None:
    x = np.float32([0.0, np.inf, -np.inf, np.nan])
    with np.errstate(all="ignore"):
        for f, factor in ((emulate.flat_tanh, DOUBLE_LOG2_E), (emulate.near_tanh, 1)):
            got = f(x * np.float32(factor))
            assert np.allclose(got, np.tanh(x), rtol=0, atol=2.0**-18, equal_nan=True)
        got = emulate.tanh_plus_one(x * np.float32(-DOUBLE_LOG2_E))
        assert np.array_equal(got, np.float32([1, 2, 0, np.nan]), equal_nan=True)


# ---------------------------------------------------------------- which form stands where

TEXT = """module g { tile g(x: bf16[M, K], y: bf16[N, K], o: out DTYPE[M, N], c: f32) {
    extents M, N, K
    tier mma
    for m in M by 64, n in N by 64 parallel {
        for k in K by 32 carry (s: f32[m, n] = fill(0.0)) { yield s + dot[k](load x[m, k], load y[n, k]) }
        store o[m, n] = VALUE
    }
} }"""


def ops(program: TileProgram) -> set[str]:
    every = [x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e)]
    return {x.op for x in every if isinstance(x, Apply) and "tanh" in x.op}


@pytest.mark.parametrize(
    ("value", "dtype", "form"),
    [
        ("bf16(tanh(s))", "bf16", "near_tanh"),
        ("tanh(s)", "f32", "tanh"),
        ("bf16(0.5 * s * (1.0 + tanh(s)))", "bf16", "tanh_plus_one"),
        ("s * (tanh(c * s) + 1.0)", "f32", "tanh_plus_one"),
        ("exp(30.0 * tanh(s / 30.0))", "f32", "flat_tanh"),
        ("exp(100.0 * tanh(s / 30.0))", "f32", "tanh"),  # too steep
        ("exp(c * tanh(s / 30.0))", "f32", "tanh"),  # of unknown steepness
        ("exp(tanh(s)) + tanh(s)", "f32", "tanh"),  # another use as well
    ],
)
def test_where_each_form_stands(value: str, dtype: str, form: str) -> None:
    (program,) = parse_module(TEXT.replace("VALUE", value).replace("DTYPE", dtype)).programs
    assert ops(with_near_functions(program)) == {form}


ATTENTION = """module g { tile g(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], o: out bf16[M, E], l: out f32[M], c: f32) {
    extents M, N, D, E
    static D = 32, E = 32
    whole d = D, e = E
    tier TIER
    for m in M by 64 parallel {
        t: bf16[m, d] = load q[m, d]
        for n in N by 32 carry (top: f32[m] = fill(-inf), z: f32[m] = fill(0.0), acc: f32[m, e] = fill(0.0)) {
            u: bf16[n, d] = load k[n, d]
            s: f32[m, n] = tanh(c * dot[d](t, u) / 30.0)
            new: f32[m] = max(top, max[n](s))
            base: f32[m] = where(new == -inf, 0.0, new)
            moved: f32[m] = exp(30.0 * (top - base))
            w: f32[m, n] = exp(30.0 * (s - base))
            r: bf16[n, e] = load v[n, e]
            yield new, z * moved + sum[n](w), acc * moved + dot[n](w, r)
        }
        store o[m, e] = bf16(acc / z)
        store l[m] = VALUE
    }
} }"""


def test_scores_that_go_nowhere_but_into_weights() -> None:
    text = ATTENTION.replace("TIER", "mma")
    (program,) = parse_module(text.replace("VALUE", "z")).programs
    scores = next(s.value for s in statements(program.body) if isinstance(s, Let) and s.name == "s")
    assert scores in Exponents(program).only
    (program,) = parse_module(text.replace("VALUE", "top")).programs
    assert scores not in Exponents(program).only


@pytest.mark.parametrize("tier", ["mma", "wgmma"])
def test_capped_scores_give_what_float64_gives(tier: str) -> None:
    """Scores from far below the cap to far above it; one factor is left of the scale, the cap and the base of exp2."""
    text = ATTENTION.replace("TIER", tier).replace("VALUE", "log(z)")
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (70, 75, 75))
    q[:10] *= 20
    q[10:20] *= 1e-3
    inputs = {n: np.float32(x).astype("bfloat16") for n, x in (("q", q), ("k", k), ("v", v))}
    source = generate(parse_module(text), SM_90A)
    assert len(re.findall(r"flat_tanh_f32\(\w+\[.*\] \* \w+\)", source)) >= 1
    got = emulate.run_module(parse_module(text), source, inputs, {"c": 2.0})
    q, k, v = (inputs[n].astype(float) for n in "qkv")
    scores = 30 * np.tanh(2 * q @ k.T / 30)
    w = np.exp(scores - scores.max(1, keepdims=True))
    assert np.allclose(got["l"], np.log(w.sum(1)), rtol=0, atol=5e-5)
    assert np.abs(got["o"].astype(float) - w @ v / w.sum(1, keepdims=True)).max() < 0.02
