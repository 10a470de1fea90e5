"""Masks of partial tiles in tier `wgmma`: words of bits, one select an element, nothing asked twice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.codegen.deal import Spread
from tileloom.compiler.codegen.loop_states import only_shifted
from tileloom.compiler.codegen.warpgroup_masks import _bits
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import For, statements
from tileloom.runtime import emulate

TEXT = """kernel attention(q: f16[B, H, M, D], k: f16[B, H, N, D], v: f16[B, H, N, D], of: i32[M], at: i32[N], scale: f32)
    -> o: f16[B, H, M, D] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SIZES = {"B": 1, "H": 1, "M": 72, "N": 69, "D": 16}


def attention(text: str, columns: int = 32) -> Compilation:
    lines = f"tier wgmma\n tile m by 64, n by {columns}"
    schedule = parse_schedule(f"schedule s for attention on cuda:sm_90a {{ {lines} }}")
    return compile_kernel(tl.parse(text)["attention"], SM_90A, SIZES, schedule=schedule)


def inputs(seed: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {
        x: rng.standard_normal((1, 1, SIZES[e], 16)).astype(np.float16)
        for x, e in zip("qkv", "MNN", strict=True)
    }
    return {**made, "of": np.arange(72, dtype=np.int32) // 30, "at": np.arange(69, dtype=np.int32) // 30}


def computing(source: str) -> str:
    """The computing role of the kernel for any sizes."""
    return source.partition("\ndef attention(")[2].partition("_more()")[2].partition("\ndef ")[0]


Seen = Callable[[Any, Any, Any, Any], Any]
MASKS: dict[str, tuple[Seen, int]] = {
    "": (lambda m, n, of, at: n >= 0, 64),
    "| n <= m + 1000000": (lambda m, n, of, at: n >= 0, 64),
    "| n < 3000000 - m": (lambda m, n, of, at: n >= 0, 64),
    "| n + 50 < M - m": (lambda m, n, of, at: n + 50 < 72 - m, 32),
    "| n <= m": (lambda m, n, of, at: n <= m, 32),
    "| n <= m and m - n < 21": (lambda m, n, of, at: (n <= m) & (m - n < 21), 16),
    "| m - 9 <= n and n < m + 13": (lambda m, n, of, at: (m - 9 <= n) & (n < m + 13), 32),
    "| n <= m or n < 5": (lambda m, n, of, at: (n <= m) | (n < 5), 32),
    "| not (n <= m and m - n < 7)": (lambda m, n, of, at: ~((n <= m) & (m - n < 7)), 64),
    "| of[m] == at[n] and n <= m": (lambda m, n, of, at: (of[m] == at[n]) & (n <= m), 32),
}  # fmt: skip


@pytest.mark.parametrize("subset", MASKS)
def test_every_row_sees_what_its_mask_says(subset: str) -> None:
    """Ragged lengths; rows that see nothing are 0."""
    seen, columns = MASKS[subset]
    made, given = attention(TEXT.replace("SET", subset), columns), inputs()
    assert made.module.programs[-1].tier == "wgmma"
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=2)["o"]
    m, n = np.arange(72)[:, None], np.arange(69)[None]
    want, _ = attention64(
        given["q"], given["k"], given["v"], scale=0.3, sees=seen(m, n, given["of"], given["at"])
    )
    assert np.abs(got.astype(float) - want).max() < 2e-3
    body = computing(made.source)
    assert ("where_bit_f32(" in body) == (subset != "")
    if subset and "at[n]" not in subset and "not" not in subset:
        assert not re.search(r"\bn_ok\w* =", body)  # nothing asks an element's existence again


ODD = """kernel attention(q: f16[B, H, M, D], k: f16[B, H, N, D], v: f16[B, H, N, D], scale: f32) -> o: f16[B, H, M, D] {
    s[b, h, m, n] = sum[d](q[b, h, m, d] * k[b, h, n, d])
    r[b, h, m] = max[n](s[b, h, m, n])
    e[b, h, m, n] = exp(scale * (s[b, h, m, n] - where(r[b, h, m] == -inf, 0, r[b, h, m])))
    z[b, h, m] = sum[n](e[b, h, m, n])
    o[b, h, m, d] = sum[n](e[b, h, m, n] * v[b, h, n, d]) / z[b, h, m]
}
"""


def test_a_factor_that_may_be_negative_meets_no_infinity() -> None:
    """exp(-0.25 · -inf) of keys that do not exist would be infinite."""
    made, given = attention(ODD), inputs()
    assert made.module.programs[0].tier == "wgmma"
    got = emulate.run_module(
        made.module, made.source, {x: given[x] for x in "qkv"}, {"scale": -0.25}, blocks=2
    )["o"]
    want, _ = attention64(given["q"], given["k"], given["v"], scale=-0.25)
    assert np.abs(got.astype(float) - want).max() < 2e-3


@pytest.mark.parametrize(("tile", "count"), [(128, 32), (64, 16), (16, 4)])
def test_words_of_places(tile: int, count: int) -> None:
    """Against the elements themselves, for every thread of a row and every limit."""
    spread = Spread(tile, low=0, bits=2, run=2)
    assert spread.count == count
    names: dict[str, Any] = {"first_bits_i32": emulate.FUNCTIONS["first_bits_i32"], "i32": int}
    for thread in range(4):
        places = [8 * (i >> 1) + (i & 1) for i in range(count)]
        own = 2 * thread
        for bound in range(-1, tile + 1):  # a bound of the tile's places, kept inside it
            most = eval(_bits(spread, "<=", "x"), {**names, "x": bound - own})
            assert [bool(most >> i & 1) for i in range(count)] == [own + p <= bound for p in places]
            least = eval(_bits(spread, ">=", "x"), {**names, "x": max(bound, 0) - own})
            assert [bool(least >> i & 1) for i in range(count)] == [own + p >= max(bound, 0) for p in places]


def test_what_else_reads_scores_keeps_their_lanes_apart() -> None:
    """A sum of scores is not one of -inf."""
    summed = TEXT.replace("-> o: f16[B, H, M, D] {", "-> (o: f16[B, H, M, D], t: f32[B, H, M]) {").replace(
        "    p[b", "    t[b, h, m] = sum[n](s[b, h, m, n])\n    p[b", 1
    )
    for text, expected in ((TEXT, True), (summed, False)):
        loops = [
            x
            for p in attention(text.replace("SET", "")).module.programs
            for x in statements(p.body)
            if isinstance(x, For)
        ]
        lets = [s.name for s in loops[0].body if "product" in s.name or s.name.startswith("s")]  # type: ignore[union-attr]
        assert any(only_shifted(loops[0], n) for n in lets) is expected


@pytest.mark.parametrize("tier", ["mma", "wgmma"])
def test_limits_that_a_head_moves(tier: str) -> None:
    """`n <= m + h`: an axis that is not cut into tiles has an index, and no first one of a tile."""
    text = """kernel heads(q: bf16[H, M, D], k: bf16[N, D], v: bf16[N, E]) -> o: f32[H, M, E] {
      p[h, m, n] = softmax[n | n <= m + h](sum[d](q[h, m, d] * k[n, d]))
      o[h, m, e] = sum[n](p[h, m, n] * v[n, e])
    }"""
    schedule = parse_schedule(f"schedule s for heads on cuda:sm_90a {{ tier {tier}\n tile n by 16 }}")
    made = compile_kernel(
        tl.parse(text)["heads"], SM_90A, {"H": 3, "M": 4, "N": 20, "D": 16, "E": 16}, schedule=schedule
    )
    rng = np.random.default_rng(3)
    shapes = {"q": (3, 4, 16), "k": (20, 16), "v": (20, 16)}
    given = {n: rng.integers(-1, 2, s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    q, k, v = (given[n].astype(float) for n in "qkv")
    heads, rows, columns = np.ogrid[:3, :4, :20]
    weights = np.where(columns <= rows + heads, np.exp(q @ k.T), 0)
    want = weights @ v / weights.sum(-1, keepdims=True)
    got = emulate.run_module(made.module, made.source, given, {})["o"]
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
