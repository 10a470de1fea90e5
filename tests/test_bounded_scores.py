"""Softcaps in tier `wgmma` whose softmax needs no maximum, and the short way for small scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.codegen import warpgroup_softcaps
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

TEXT = """kernel attention<T: f16 | bf16>(q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, D], a: f32[H])
    -> (o: T[B, H, M, D]MORE) {
    s[b, h, m, n] = softcap(0.5 * sum[d](q[b, h, m, d] * k[b, h, n, d]), CAP)
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SIZES = {"B": 1, "H": 1, "M": 72, "N": 69, "D": 16}
Array = np.ndarray[Any, Any]


def attention(subset: str = "", cap: float = 6.0, text: str = TEXT, more: str = "", dtype: str = "bf16") -> Compilation:
    text = text.replace("SET", subset).replace("MORE", more).replace("CAP", str(cap))
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 64, n by 32 }"
    )
    return compile_kernel(
        tl.parse(text)["attention"], SM_90A, SIZES, dtypes={"T": DType(dtype)}, schedule=schedule
    )


def roles(made: Compilation) -> str:
    """The kernel of the tier, without the one for any strides."""
    return made.source.partition("\ndef attention_any")[0].partition("\n\n")[2]


def inputs(q: Array, k: Array, v: Array) -> dict[str, Array]:
    halves = {n: np.float32(x).astype("bfloat16") for n, x in (("q", q), ("k", k), ("v", v))}
    return {**halves, "a": np.zeros(1, np.float32)}


def error(made: Compilation, given: dict[str, Array], cap: float, subset: str) -> float:
    got = emulate.run_module(made.module, made.source, given, {}, blocks=2)["o"]
    m, n = np.arange(72)[:, None], np.arange(69)[None]
    sees = (n <= m) & (m - n < 40) if subset else True
    want, _ = attention64(*(given[x] for x in "qkv"), scale=0.5, sees=sees, softcap=cap)
    return float(np.abs(got.astype(float) - want).max())


WINDOW = "| n <= m and m - n < 40"


@pytest.mark.parametrize("cap", [6.0, 55.0])
@pytest.mark.parametrize("subset", ["", WINDOW])
def test_weights_need_no_maximum(subset: str, cap: float) -> None:
    """Scores from far below -cap to far above it, rows of one sign in all of their elements, and small ones."""
    made = attention(subset, cap)
    assert "exp_tanh_f32(" in roles(made)
    assert "near_exp2_f32(product" in roles(made)
    assert "max_f32(" not in roles(made)
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 1, SIZES[x], 16)) for x in "MNN")
    q[..., :9, 0], k[..., 0] = -300, 1 + np.abs(k[..., 0])
    q[..., 9:16, 0] = 300
    q[..., 16:32, :] *= 0.05
    assert error(made, inputs(q, k, v), cap, subset) < 0.02


if __name__ == "__main__":
    pass
