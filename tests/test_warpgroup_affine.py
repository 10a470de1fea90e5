"""Scores that grow with indices in tier `wgmma`: exact in f32, one conversion a step, one multiply-add an element."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.codegen.warpgroup_affine import (
    MOST_CONSTANT,
    MOST_EXTENT,
    MOST_TERMS,
    contracted,
    linear,
)
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import Apply, AxisIndex, Const, Expr, ExtentRef, Name
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

TEXT = """kernel attention(q: f16[B, H, M, D], k: f16[B, H, N, D], v: f16[B, H, N, D], w: f32[H])
    -> o: f16[B, H, M, D] {
    s[b, h, m, n] = 0.3 * sum[d](q[b, h, m, d] * k[b, h, n, d]) SCORE
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""


def attention(score: str, subset: str, sizes: dict[str, int]) -> Compilation:
    text = TEXT.replace("SCORE", score).replace("SET", subset)
    lines = "tier wgmma\n tile m by 64, n by 32"
    schedule = parse_schedule(f"schedule s for attention on cuda:sm_90a {{ {lines} }}")
    return compile_kernel(tl.parse(text)["attention"], SM_90A, sizes, schedule=schedule)


def steps(source: str) -> str:
    """The computing role of the preferred kernel."""
    return source.partition("\ndef attention")[2].partition("_more()")[2].partition("\ndef ")[0]


SCORES: dict[str, tuple[str, Any]] = {
    "+ w[h] * f32(n - m)": (lambda w, m, n, M, N: w * (n - m), 1),
    "- w[h] * f32(abs(n - m - N + M))": (lambda w, m, n, M, N: -w * np.abs(n - m - N + M), 1),
    "- f32(min(m, n)) * w[h]": (lambda w, m, n, M, N: -w * np.minimum(m, n), 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("score", "subset"), [*((x, "") for x in SCORES), ("+ w[h] * f32(n - m)", "| n <= m")]
)
def test_slopes_along_rows_and_columns(score: str, subset: str) -> None:
    """Ragged lengths, two tasks a block; converted once for each sum of indices and copy of a step."""
    value, conversions = SCORES[score]
    sizes = {"B": 1, "H": 1, "M": 72, "N": 69, "D": 16}
    made = attention(score, subset, sizes)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, sizes[x], 16)).astype(np.float16) for x in "MNN")
    w = np.float32([0.37])
    got = emulate.run_module(made.module, made.source, {"q": q, "k": k, "v": v, "w": w}, {}, blocks=2)["o"]
    m, n = np.arange(72)[:, None], np.arange(69)[None]
    bias = value(w.astype(float)[:, None, None], m, n, 72, 69)
    want, _ = attention64(q, k, v, scale=0.3, sees=(n <= m) if subset else True, bias=bias)
    assert np.abs(got.astype(float) - want).max() < 2e-3
    lines = steps(made.source).splitlines()
    converted = [x for x in lines if re.search(r"_start(_\d+)? = f32\(", x)]
    copies = sum(
        re.search(r"_multiply_\d+\(\w+, matrix_address", x) is not None for x in lines
    )  # of a step, and so of its elements' expression
    assert len(converted) == conversions * copies
    assert sum("fma_f32(f32(0.3)" in x or "fma_f32(0.3" in x for x in lines) >= copies


def test_such_kernels_run_where_f32_holds_the_indices() -> None:
    """Larger extents go to the kernel that converts each index."""
    sizes = {"B": 1, "H": 2, "M": 128, "N": 128, "D": 16}
    plain, sloped = attention("", "", sizes), attention("+ w[h] * f32(n - m)", "", sizes)
    told = [x for x in sloped.source.splitlines() if '"threads"' in x]
    assert len(told) == 3
    assert all(f"'M': {MOST_EXTENT}" in x and f"'N': {MOST_EXTENT}" in x for x in told[:2])
    assert '"at_most"' not in told[2]
    assert "attention_any" in told[2]
    assert '"at_most"' not in plain.source


def test_sums_of_bounded_indices_are_exact() -> None:
    """The largest sum, and the value at a thread's first element, which lies up to a tile before it."""
    largest = MOST_TERMS * (MOST_EXTENT + 2 * 256) + MOST_CONSTANT
    assert largest < 1 << 24
    assert np.float32(largest) - np.float32(511) == largest - 511


@pytest.mark.parametrize(
    "score",
    ["+ w[h] * f32(2 * n - m)", "+ w[h] * f32(n + n + n + n - m - m - m)", "+ w[h] * f32(n - 2000000)"],
)
def test_what_may_not_be_exact_is_converted(score: str) -> None:
    sizes = {"B": 1, "H": 2, "M": 128, "N": 128, "D": 16}
    assert not re.search(r"_start(_\d+)? = f32\(", attention(score, "", sizes).source)


def test_coefficients() -> None:
    n, m, size, one = AxisIndex("n"), AxisIndex("m"), ExtentRef("N"), Const(1, DType.I64)
    e = Apply("sub", (Apply("add", (n, Const(3, DType.I64))), Apply("sub", (m, Apply("neg", (size,))))))
    assert linear(e) == {n: 1, m: -1, size: -1, one: 3}
    assert linear(Apply("mul", (n, m))) is None
    assert linear(Name("n")) is None


def test_fused_multiply_adds() -> None:
    a, b, c, d = (Name(x) for x in "abcd")

    def fused(e: Expr, heavy: Expr = a) -> Expr:
        return contracted(e, lambda _: True, lambda x: int(heavy in x.args))  # type: ignore[attr-defined]

    product, other = Apply("mul", (a, b)), Apply("mul", (c, d))
    assert fused(Apply("add", (product, c))) == Apply("fma", (a, b, c))
    assert fused(Apply("add", (c, product))) == Apply("fma", (a, b, c))
    assert fused(Apply("sub", (product, c))) == Apply("fma", (a, b, Apply("neg", (c,))))
    assert fused(Apply("sub", (c, product))) == Apply("fma", (Apply("neg", (a,)), b, c))
    assert fused(Apply("add", (other, product))) == Apply("fma", (a, b, other))
    assert fused(Apply("add", (other, product)), heavy=c) == Apply("fma", (c, d, product))
    assert contracted(Apply("add", (product, c)), lambda _: False, lambda _: 0) == Apply("add", (product, c))
