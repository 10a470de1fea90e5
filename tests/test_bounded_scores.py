"""Softcaps in tier `wgmma` whose softmax needs no maximum, and polynomials for small scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.codegen import warpgroup_softcaps
from tileloom.compiler.codegen.warpgroup_softcaps import SERIES, Series
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

TEXT = """kernel attention<T: f16 | bf16>(q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, D], a: f32[H], scale: f32)
    -> (o: T[B, H, M, D]MORE) {
    s[b, h, m, n] = softcap(scale * sum[d](q[b, h, m, d] * k[b, h, n, d]), CAP)
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SIZES = {"B": 1, "H": 1, "M": 72, "N": 69, "D": 16}
WINDOW = "| n <= m and m - n < 40"
Array = np.ndarray[Any, Any]


def attention(subset: str = "", cap: float = 6.0, text: str = TEXT, dtype: str = "bf16") -> Compilation:
    text = text.replace("SET", subset).replace("MORE", "").replace("CAP", str(cap))
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 64, n by 32 }"
    )
    return compile_kernel(
        tl.parse(text)["attention"], SM_90A, SIZES, dtypes={"T": DType(dtype)}, schedule=schedule
    )


def roles(made: Compilation) -> str:
    """The kernel of the tier, without the one for any strides."""
    return made.source.partition("\ndef attention_any")[0].partition("\n\n")[2]


def drawn() -> dict[str, Array]:
    """Scores below all bounds of a cap of 6 or more, below the second, the third, and above; rows of one sign."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, SIZES[x], 16)) for x in "MNN")
    k[..., 0] = 1 + np.abs(k[..., 0])
    q[..., :9, 0], q[..., 9:16, 0] = -300, 300
    q[..., 16:32, :] *= 0.4
    q[..., 32:48, :] *= 0.85
    q[..., 48:64, :] *= 1.15
    made = {n: np.float32(x).astype("bfloat16") for n, x in (("q", q), ("k", k), ("v", v))}
    return {**made, "a": np.zeros(1, np.float32)}


def errors(
    made: Compilation, given: dict[str, Array], cap: float, subset: str = "", scale: float = 0.5
) -> Array:
    """The largest of each row."""
    got = emulate.run_module(made.module, made.source, given, {"scale": scale}, blocks=2)["o"]
    m, n = np.arange(72)[:, None], np.arange(69)[None]
    sees = (n <= m) & (m - n < 40) if subset else True
    with np.errstate(invalid="ignore"):
        want, _ = attention64(*(given[x] for x in "qkv"), scale=scale, sees=sees, softcap=cap)
    return np.asarray(np.abs(got.astype(float) - want).max(-1)[0, 0])


@pytest.mark.parametrize("cap", [6.0, 55.0])
@pytest.mark.parametrize("subset", ["", WINDOW])
def test_weights_need_no_maximum(subset: str, cap: float) -> None:
    """They differ by up to 2^158."""
    made = attention(subset, cap)
    assert "exp_tanh_f32(" in roles(made)
    asks = "any_lane(i32(largest"
    assert roles(made).count(asks) > 0
    assert roles(made).count(asks) % len(SERIES) == 0
    others = (
        x
        for x in roles(made).splitlines()
        if "max_f32(" in x and "largest" not in x and "= max_f32(scale" not in x
    )
    assert not list(others)
    assert errors(made, drawn(), cap, subset).max() < 0.01
    told = next(r.message for r in made.remarks if r.name == "roles")
    assert "no maximum, because tanh bounds scores" in told
    assert "below 0.5625, 1 or 1.5 of the cap" in told
    assert "exceeded" not in told


@pytest.mark.parametrize(("scale", "cap"), [(-0.5, 6.0), (3e-8, 6.0), (1e8, 6.0), (0.0, 6.0)])
def test_scales_of_any_size_and_sign(scale: float, cap: float) -> None:
    assert errors(attention(cap=cap), drawn(), cap, scale=scale).max() < 0.01


def test_numbers_that_are_not_finite_take_the_whole_function() -> None:
    """An infinite score is the cap; NaN spoils its own row and no other."""
    given = drawn()
    given["q"][..., 40, 0], given["q"][..., 41, 3] = np.inf, np.nan
    off = errors(attention(), given, 6.0)
    assert np.isnan(off[41])
    assert np.delete(off, 41).max() < 0.01


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_which_rows_take_which_series(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """One series without coefficients gives weights of 1, in the rows that it serves."""
    spoiled = tuple(
        replace(s, terms=(0.0,) * len(s.terms)) if i == wrong else s for i, s in enumerate(SERIES)
    )
    monkeypatch.setattr(warpgroup_softcaps, "SERIES", spoiled)
    cap, given = 7.0 + wrong / 64, drawn()  # a program of its own: generated kernels are remembered
    x = 0.5 / cap * given["q"][0, 0].astype(float) @ given["k"][0, 0].astype(float).T
    tiles = (
        np.abs(np.pad(x, ((0, 0), (0, 27)))).reshape(9, 8, 3, 32).max((1, 3))
    )  # what a warp has of a row, twice
    assert tiles[2:4].max() < SERIES[0].bound < tiles[4:6].min()
    assert tiles[4:6].max() < SERIES[1].bound < tiles[6:8].max(1).min()
    assert tiles[6:8].max() < SERIES[2].bound < tiles[:2].min()
    off = errors(attention(cap=cap), given, cap)
    assert (off[16:32].max() > 0.05) == (wrong == 0)
    assert (off[32:48].max() > 0.05) == (wrong == 1)
    if wrong != 1:  # which serves some tiles of these rows
        assert (off[48:64].max() > 0.05) == (wrong == 2)
    assert off[:16].max() < 0.01


@pytest.mark.parametrize(("rest", "asks"), [(15, False), (1, True)])
def test_a_warp_without_a_series_does_not_ask_for_some_steps(
    monkeypatch: pytest.MonkeyPatch, rest: int, asks: bool
) -> None:
    """Scores of the first step are far below 0, those of the two after it small: there series without coefficients show."""
    spoiled = tuple(replace(s, terms=(0.0,) * len(s.terms)) for s in SERIES)
    monkeypatch.setattr(warpgroup_softcaps, "SERIES", spoiled)
    monkeypatch.setattr(warpgroup_softcaps, "STEPS_WITHOUT_ASKING", rest)
    cap, given = 9.0 + rest, drawn()  # a program of its own, as above
    given["q"][..., 0], given["k"][..., 0] = 4, 0.25
    given["k"][..., :32, 0] = -40
    off = errors(attention(cap=cap), given, cap)
    assert (off.max() > 0.01) == asks


@pytest.mark.parametrize("score", ["softcap(2.0 * scale * SUM, CAP)", "softcap(a[h] * SUM, CAP)"])
def test_numbers_that_all_elements_share_join_the_cap(score: str) -> None:
    """A factor that is computed or loaded: polynomials take it too."""
    total = "sum[d](q[b, h, m, d] * k[b, h, n, d])"
    text = TEXT.replace(f"softcap(scale * {total}, CAP)", score.replace("SUM", total))
    made, given = attention(text=text), drawn()
    given["a"][:] = 1.0
    assert "any_lane(i32(largest" in roles(made)
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.5}, blocks=2)["o"]
    want, _ = attention64(*(given[x] for x in "qkv"), scale=1.0, sees=True, softcap=6.0)
    assert np.abs(got.astype(float) - want).max() < 0.01


def polynomial(terms: Sequence[float], u: Array) -> Array:
    """By fused multiply-adds in f32 (float64 holds a product of two f32)."""
    total = np.full_like(u, np.float32(terms[-1]))
    for q in reversed(terms[:-1]):
        total = np.float32(np.float64(u) * np.float64(total) + np.float64(np.float32(q)))
    return total


@pytest.mark.parametrize("series", SERIES, ids=lambda s: str(s.bound))
def test_errors_of_series(series: Series) -> None:
    """What `flat_tanh` promises, beside 1: at a million points, with coefficients for a factor and a scale."""
    scale, factor = np.float32(43.28085), np.float32(0.0029462783)
    x = np.float32(np.linspace(-series.bound, series.bound, 1_000_001) / np.float64(factor))
    u = np.float32(np.float64(x) * np.float64(x))
    terms, power = [], scale * factor
    for q in series.terms:
        terms.append(float(power * np.float32(q)))
        power = power * (factor * factor)
    y = x * polynomial(terms, u)
    exact = np.float64(scale) * np.tanh(np.float64(x) * np.float64(factor))
    assert np.abs(y - exact).max() < scale * 2**-20.8
    assert np.abs(y - exact).max() > scale * 2**-25  # f32 is no better, so this has been measured


STORED = TEXT.replace("MORE", ", lse: f32[B, H, M]").replace(
    "\n}", "\n    lse[b, h, m] = logsumexp[n SET](s[b, h, m, n])\n}"
)
ADDED = TEXT.replace("CAP)", "CAP) + a[h] * f32(n - m)")
MET = TEXT.replace("softmax[n SET](s[b, h, m, n])", "softmax_sink[n SET](s[b, h, m, n], a[h])")


@pytest.mark.parametrize(
    ("text", "cap", "dtype"),
    [
        (STORED, 6.0, "bf16"),
        (ADDED, 6.0, "bf16"),
        (MET, 6.0, "bf16"),
        (TEXT, 56.0, "bf16"),
        (TEXT, 6.0, "f16"),
    ],
)
def test_where_maxima_stay(text: str, cap: float, dtype: str) -> None:
    """A stored sum of exponentials, a bias, a score that it is compared with; weights that their type may not hold."""
    assert "exp_tanh_f32(" not in attention(cap=cap, text=text, dtype=dtype).source


def test_three_warpgroups_keep_maxima() -> None:
    """Squares beside scores and weights have no registers there, and what would spill is not fused."""
    sizes = {"B": 4, "H": 32, "M": 4096, "N": 4096, "D": 64}
    text = TEXT.replace("SET", "").replace("MORE", "").replace("CAP", "30.0")
    made = compile_kernel(tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType("bf16")})
    assert len(made.module.programs) == 1
    told = next(r.message for r in made.remarks if r.name == "roles")
    assert ("3 compute" in told) == ("exceeded by more" in told) != ("no maximum" in told)
