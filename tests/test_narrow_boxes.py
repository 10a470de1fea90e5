"""Heads whose columns are no multiple of 16 or 64: boxes of what there is, and zeros behind it that are written once."""

from __future__ import annotations

import re
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
ATTENTION = """kernel attention(q: bf16[H, M, D], k: bf16[H, N, D], v: bf16[H, N, E]) -> o: bf16[H, M, E] {
    s[h, m, n] = sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D)
    p[h, m, n] = softmax[n](s[h, m, n])
    o[h, m, e] = sum[n](p[h, m, n] * v[h, n, e])
}"""
HEADS, QUERIES, KEYS = 2, 200, 50


def compiled(d: int, e: int, tiles: str = "m by 64, n by 16") -> Compilation:
    asked = parse_schedule(f"schedule s for attention on cuda:sm_90a {{ tier wgmma\n tile {tiles} }}")
    sizes = {"H": HEADS, "M": QUERIES, "N": KEYS, "D": d, "E": e}
    return compile_kernel(tl.parse(ATTENTION)["attention"], SM_90A, sizes, schedule=asked)


def inputs(d: int, e: int) -> dict[str, Array]:
    random = np.random.default_rng(d)
    shapes = {"q": (HEADS, QUERIES, d), "k": (HEADS, KEYS, d), "v": (HEADS, KEYS, e)}
    return {n: random.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}


def attended(tensors: dict[str, Array]) -> Array:
    q, k, v = (tensors[n].astype(float) for n in "qkv")
    s = np.einsum("hmd,hnd->hmn", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True))
    found: Array = p / p.sum(-1, keepdims=True) @ v
    return found


def run(made: Compilation, tensors: dict[str, Array], source: str | None = None) -> Array:
    ran: list[str] = []
    source = source or made.source
    got: Array = emulate.run_module(made.module, source, tensors, {}, blocks=1, ran=ran)["o"].astype(float)
    assert ran == ["attention"]
    return got


@pytest.mark.parametrize(("d", "e"), [(8, 24), (40, 8), (104, 72), (72, 104), (136, 16), (48, 136)])
def test_every_step_of_eight(d: int, e: int) -> None:
    """One block takes all tasks: a row that is NaN leaves through what the next task's queries come to."""
    tensors = inputs(d, e)
    tensors["q"][0, 3] = np.nan
    got, want = run(compiled(d, e), tensors), attended(tensors)
    assert np.isnan(got[0, 3]).all()
    assert np.isnan(got).sum() == e
    assert np.nanmax(np.abs(got - want)) < 0.02


def test_a_box_has_the_columns_of_its_tile() -> None:
    source = compiled(104, 72, "m by 128, n by 128").source
    (maps,) = {m for m in re.findall(r'"maps": (\[.*?\)\])', source) if "128, 64" in m}
    assert eval(maps) == [
        ("q", (1, 128, 64)), ("q", (1, 128, 48)), ("k", (1, 128, 64)), ("k", (1, 128, 40)),
        ("v", (1, 128, 64)), ("v", (1, 128, 8)), ("o", (1, 16, 64)),
    ]  # fmt: skip
    arriving = {int(n) for n in re.findall(r"expect_bytes\(.*, (\d+)\)", source)}
    assert {128 * (64 + columns) * 2 for columns in (48, 40, 8)} <= arriving


def test_what_is_not_cleared_or_not_published_is_found() -> None:
    made, tensors = compiled(40, 32), inputs(40, 32)
    cleared = re.compile(r"^ {8}clear_16_bytes\(.*$", re.MULTILINE)
    assert np.isnan(
        run(made, tensors, cleared.sub("        pass", made.source))
    ).any()  # the memory starts as NaN
    published = re.compile(r"^ {4}publish_shared\(\)$", re.MULTILINE)
    with pytest.raises(
        emulate.KernelFault, match=r"a product reads what thread .* wrote and did not publish"
    ):
        run(made, tensors, published.sub("    pass", made.source))


def test_nothing_is_cleared_where_a_step_is_whole() -> None:
    assert "clear_16_bytes(" not in compiled(112, 104).source
