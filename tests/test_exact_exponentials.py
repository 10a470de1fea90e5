"""exp(c · (x - r)) for rows of huge numbers: no weight may be off where no sum of the same row divides it.

A shift r · c · log2 e of 10^7 that is rounded to f32 is off by up to 0.5, exp2 of which is 0.7 or 1.4.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
TIERS = ("simt", "mma", "wgmma")
SIZES = {"M": 20, "N": 80, "D": 16, "E": 16}
HUGE = 9_984.0 * 1_000.0
SCORES = "s[m, n] = scale * sum[d](q[m, d] * k[n, d])"
GIVEN = f"""kernel weigh(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], c: f32[M], scale: f32) -> o: f32[M, E] {{
    {SCORES}
    p[m, n] = exp(FACTOR(s[m, n] - c[m]))
    o[m, e] = sum[n](p[m, n] * v[n, e])
}}"""
STORED = f"""kernel weigh(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], scale: f32) -> (o: f32[M, E], z: f32[M]) {{
    {SCORES}
    top[m] = max[n](s[m, n])
    p[m, n] = exp(FACTOR(s[m, n] - top[m]))
    z[m] = sum[n](p[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}}"""
DIVIDED = f"""kernel weigh(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], scale: f32) -> o: f32[M, E] {{
    {SCORES}
    p[m, n] = softmax[n](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}}"""


def compiled(text: str, tier: str, lines: str = "tile n by 16", sizes: dict[str, int] = SIZES) -> Compilation:
    asked = parse_schedule(f"schedule s for weigh on cuda:sm_90a {{ tier {tier}\n {lines} }}")
    return compile_kernel(tl.parse(text)["weigh"], SM_90A, sizes, schedule=asked)


def inputs(falling: float = 0.0, columns: Array | None = None) -> dict[str, Array]:
    """Scores of 10^7 · scale, exact in f32, which fall by so much a column; values of 1."""
    m, n, d, e = SIZES.values()
    q, k = np.zeros((m, d)), np.zeros((n, d))
    q[:, 0], k[:, 0] = 9_984.0, 1_000.0
    q[:, 1], k[:, 1] = falling, -np.arange(n) if columns is None else -columns
    bf16 = {"q": q, "k": k, "v": np.ones((n, e))}
    return {name: x.astype(ml_dtypes.bfloat16) for name, x in bf16.items()}


def ran(made: Compilation, tensors: dict[str, Array], **scalars: float) -> dict[str, Array]:
    kernels: list[str] = []
    got = emulate.run_module(made.module, made.source, tensors, scalars, ran=kernels)
    assert len(kernels) == len(made.module.programs)
    return {n: x.astype(float) for n, x in got.items()}


def told(made: Compilation) -> bool:
    return any(r.name == "exact-differences" and r.kind == "missed" for r in made.remarks)


def tiers(made: Compilation) -> set[str]:
    return {p.tier for p in made.module.programs}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("factor", ["", "0.5 * ", "scale * "])
@pytest.mark.parametrize("scale", [0.75, -0.75])
def test_a_given_shift(tier: str, factor: str, scale: float) -> None:
    made = compiled(GIVEN.replace("FACTOR", factor), tier)
    assert tiers(made) == {tier}
    shift = np.full(SIZES["M"], scale * HUGE - 1, np.float32)
    got = ran(made, {**inputs(), "c": shift}, scale=scale)["o"]
    want = SIZES["N"] * np.exp({"": 1.0, "0.5 * ": 0.5, "scale * ": scale}[factor])
    assert np.abs(got - want).max() < want / 200  # weights are rounded to bf16


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("factor", ["", "0.3 * "])
def test_sums_that_are_stored_as_they_are(tier: str, factor: str) -> None:
    made = compiled(STORED.replace("FACTOR", factor), tier)
    assert tiers(made) == {tier}
    assert told(made) == (tier != "simt")
    got = ran(made, inputs(1.0), scale=1.0)
    want = np.exp(-np.arange(SIZES["N"]) * (float(factor[:3]) if factor else 1.0)).sum()
    assert np.abs(got["z"] - want).max() < want * 1e-5
    assert np.abs(got["o"] - want).max() < want / 200


@pytest.mark.parametrize("factor", ["", "0.5 * ", "scale * "])
def test_a_given_shift_on_the_cpu(factor: str) -> None:
    program = tl.parse(GIVEN.replace("FACTOR", factor))["weigh"]
    shift = np.full(SIZES["M"], 0.75 * HUGE - 1, np.float32)
    got = tl.compile(program, target="cpu")(**inputs(), c=shift, scale=0.75)
    want = SIZES["N"] * np.exp({"": 1.0, "0.5 * ": 0.5, "scale * ": 0.75}[factor])
    assert np.abs(got - want).max() < want / 200


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("kind", "size"), [("bf16", 0.125), ("bf16", 0.5), ("f16", 8.0), ("f16", 64.0)])
@pytest.mark.parametrize("scale", [0.25, 1.0, 1000.0, 1e30, 3e38])
def test_huge_scores_by_scales_of_any_size(tier: str, kind: str, size: float, scale: float) -> None:
    """Of sums of 10^6 to 10^9 before the scale, one in eight is the greatest, and others are a unit in the last place below
    it; how much that is in weights is worked out in float64."""
    text = DIVIDED.replace("{\n", "{\n    require scale > 0\n", 1).replace("bf16", kind)
    made = compiled(text, tier)
    assert tiers(made) == {tier}
    assert told(made) == (tier != "simt" and kind == "f16")
    columns = np.arange(SIZES["N"])
    high = np.float32(size * HUGE)
    unit = float(high - np.nextafter(high, np.float32(0)))
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    tensors = {n: np.zeros(x.shape, dtype) for n, x in inputs().items()}
    tensors["q"][:, 0], tensors["k"][:, 0] = 9_984.0, 1_000.0 * size
    tensors["q"][:, 1], tensors["k"][:, 1] = unit, -(columns % 8)
    tensors["v"][:] = (columns % 5)[:, None]
    got = ran(made, tensors, scale=scale)["o"]
    p = np.exp(-(columns % 8) * unit * np.float64(np.float32(scale)))
    want = (p * (columns % 5)).sum() / p.sum()
    assert np.abs(got - want).max() < 0.01


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("text", [DIVIDED, STORED.replace("FACTOR", "")], ids=["divided", "stored"])
@pytest.mark.parametrize("scale", [1e7, 1e9, 1e12, 1e30, 3e38])
def test_scores_of_ordinary_size_by_great_scales(tier: str, text: str, scale: float) -> None:
    """Of scores from -40 to 38 the greatest alone has a weight, whatever its size."""
    made = compiled(text.replace("{\n", "{\n    require scale > 0\n", 1), tier)
    tensors = inputs()
    tensors["q"][:] = tensors["k"][:] = 0.0
    tensors["q"][:, 0] = 0.5
    tensors["q"][0] = 0.0  # a row of zeros: all weigh alike
    tensors["k"][:, 0] = (np.arange(SIZES["N"]) * 7 % SIZES["N"]) * 2.0 - 80.0
    tensors["v"][:] = (np.arange(SIZES["N"]) % 13)[:, None]
    got = ran(made, tensors, scale=scale)["o"]
    assert (got[1:] == np.argmax(tensors["k"][:, 0].astype(float)) % 13).all()
    mean = (np.arange(SIZES["N"]) % 13).mean() * (1 if text == DIVIDED else SIZES["N"])
    assert np.abs(got[0] - mean).max() < mean / 1000


@pytest.mark.parametrize("tier", TIERS)
def test_parts_of_a_row_that_are_merged(tier: str) -> None:
    """The parts' maxima differ, so the roundings of their shifts do."""
    made = compiled(DIVIDED, tier, "tile n by 16\n split n by 5")
    assert len(made.module.programs) == 2
    columns = np.arange(SIZES["N"])
    tensors = inputs(1.0, columns // 16)
    tensors["v"][:] = (columns / 64)[:, None]
    got = ran(made, tensors, scale=1.0)["o"]
    p = np.exp(-(columns // 16))
    want = (p * columns / 64).sum() / p.sum()
    assert np.abs(got - want).max() < want / 200
