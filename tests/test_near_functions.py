"""tanh without branches, and 1 / (1 + exp(x)): errors over the whole range in emulated f32, and where each form stands."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tileloom.compiler.codegen.near_functions import Exponents, with_near_functions
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import (
    Apply,
    Cast,
    Expr,
    Let,
    Store,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)
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
    assert np.array_equal(got, 2 * emulate.logistic(y, exp2_off(off), reciprocal_off(up)).astype(float))
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
    return {x.op for x in every if isinstance(x, Apply) and ("tanh" in x.op or x.op in ("logistic", "exp"))}


@pytest.mark.parametrize(
    ("value", "dtype", "form"),
    [
        ("bf16(tanh(s))", "bf16", "near_tanh"),
        ("tanh(s)", "f32", "tanh"),
        ("bf16(0.5 * s * (1.0 + tanh(s)))", "bf16", "logistic"),
        ("(tanh(c * s) + 1.0) * (s * 0.5)", "f32", "logistic"),
        ("bf16(0.25 * s * (1.0 + tanh(s)))", "bf16", "tanh_plus_one"),
        ("s * (tanh(c * s) + 1.0)", "f32", "tanh_plus_one"),
        ("exp(30.0 * tanh(s / 30.0))", "f32", "exp flat_tanh"),
        ("exp(100.0 * tanh(s / 30.0))", "f32", "exp tanh"),  # too steep
        ("exp(c * tanh(s / 30.0))", "f32", "exp tanh"),  # of unknown steepness
        ("exp(tanh(s)) + tanh(s)", "f32", "exp tanh"),  # another use as well
        ("bf16(s / (1.0 + exp(-s)))", "bf16", "logistic"),
        ("bf16(1.0 / (exp(c * s) + 1.0))", "bf16", "logistic"),
        ("s / (1.0 + exp(-s))", "f32", "exp"),  # a result of 24 bits
        ("bf16(s / (2.0 + exp(-s)))", "bf16", "exp"),
    ],
)
def test_where_each_form_stands(value: str, dtype: str, form: str) -> None:
    (program,) = parse_module(TEXT.replace("VALUE", value).replace("DTYPE", dtype)).programs
    assert ops(with_near_functions(program)) == set(form.split())


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("0.8 * (s + 0.04 * s * s * s)", "s * fma(s * s, A * 0.032, A * 0.8)"),
        ("s * (0.04 * s) * s + s", "s * fma(s * s, A * 0.04, A)"),
        ("0.8 * (s - 0.04 * s * s * s)", "(s - 0.04 * s * s * s) * (A * 0.8)"),  # differences may cancel
        ("s + 0.04 * s * s", "(s + 0.04 * s * s) * A"),
        ("s + 0.04 * s * c * s * s", "(s + 0.04 * s * c * s * s) * A"),
    ],
)
def test_a_sum_of_a_number_and_its_cube_is_one_product(argument: str, expected: str) -> None:
    """What tanh_plus_one takes, A = -2 log2 e."""
    values = []
    for e in (f"1.0 + tanh({argument})", re.sub(r"A( \* [\d.]+)?", _as_number, expected)):
        text = TEXT.replace("VALUE", f"bf16({e})").replace("DTYPE", "bf16")
        (program,) = parse_module(text).programs
        values.append(stored(with_near_functions(program)))
    (near, plain) = values
    assert isinstance(near, Apply)
    assert near.op == "tanh_plus_one"
    rounded = [re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.6g}", repr(e)) for e in (near.args[0], plain)]
    assert rounded[0] == rounded[1]


def _as_number(found: re.Match[str]) -> str:
    return repr(-DOUBLE_LOG2_E * float((found[1] or " * 1").removeprefix(" * ")))


def stored(program: TileProgram) -> Expr:
    """What a program stores, before it is rounded."""
    (value,) = (s.value for s in statements(program.body) if isinstance(s, Store))
    assert isinstance(value, Cast)
    return value.arg


@pytest.mark.parametrize("up", OFF)
@pytest.mark.parametrize("off", OFF)
def test_gelu_is_no_further_off_than_its_argument_is_rounded(points: Array, off: int, up: int) -> None:
    """As it is written out: x · logistic(x · (b · x² + a)), against float64."""
    x = points[np.abs(points) < 2.0**20]
    a, b = (
        np.float32(-DOUBLE_LOG2_E * 0.7978845608028654),
        np.float32(-DOUBLE_LOG2_E * 0.7978845608028654 * 0.044715),
    )
    slope = np.float32(np.longdouble(x * x) * np.longdouble(b) + np.longdouble(a))
    with np.errstate(over="ignore", under="ignore"):
        y = x * slope
        got = (x * emulate.logistic(y, exp2_off(off), reciprocal_off(up))).astype(float)
    exact = x.astype(float)
    inner = 2 * 0.7978845608028654 * (exact + 0.044715 * exact**3)
    want = exact / (1 + np.exp(np.minimum(-inner, 700)))
    normal = (np.abs(want) > 2.0**-125) & (np.abs(y) < 125)
    bound = 2.0**-20.5 + np.abs(y) * 2.0**-22
    assert (np.abs(got / want - 1) < bound)[normal].all()
    assert (np.abs(got - want) < 2.0**-100)[~normal & (np.abs(want) <= 1)].all()


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
