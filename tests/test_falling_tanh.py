"""Softcaps in tier `wgmma`: one step of tanh less where only a softmax sees it."""

from __future__ import annotations

import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.runtime import emulate

TEXT = """kernel attention(q: f16[B, H, M, D], k: f16[B, H, N, D], v: f16[B, H, N, D], a: f32[H])
    -> (o: f16[B, H, M, D]MORE) {
    s[b, h, m, n] = softcap(0.5 * sum[d](q[b, h, m, d] * k[b, h, n, d]), 6.0)
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SIZES = {"B": 1, "H": 1, "M": 72, "N": 69, "D": 16}


def attention(subset: str = "", more: str = "", text: str = TEXT) -> Compilation:
    text = text.replace("SET", subset).replace("MORE", more)
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 64, n by 32 }"
    )
    return compile_kernel(tl.parse(text)["attention"], SM_90A, SIZES, schedule=schedule)


@pytest.mark.parametrize("subset", ["", "| n <= m and m - n < 40"])
def test_weights_are_those_of_the_whole_function(subset: str) -> None:
    """Scores from far below -6 to far above 6; rows of one sign in all of their elements, too."""
    made = attention(subset)
    assert "falling_tanh_f32(" in made.source.partition("\ndef attention_any")[0]
    assert "flat_tanh_f32(" not in made.source.partition("\ndef attention_any")[0].partition("\n\n")[2]
    rng = np.random.default_rng(3)
    q, k, v = (2 * rng.standard_normal((1, 1, SIZES[x], 16)) for x in "MNN")
    q[..., :9, 0], k[..., 0] = -30, 1 + np.abs(k[..., 0])  # all scores of these rows at -6
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "a": np.zeros(1, np.float32)}
    got = emulate.run_module(made.module, made.source, given, {}, blocks=2)["o"]
    m, n = np.arange(72)[:, None], np.arange(69)[None]
    sees = (n <= m) & (m - n < 40) if subset else True
    want, _ = attention64(q, k, v, scale=0.5, sees=sees, softcap=6.0)
    assert np.abs(got.astype(float) - want).max() < 4e-3


STORED = TEXT.replace("\n}", "\n    lse[b, h, m] = logsumexp[n SET](s[b, h, m, n])\n}")
ADDED = TEXT.replace("6.0)", "6.0) + a[h] * f32(n - m)")
MET = TEXT.replace("softmax[n SET](s[b, h, m, n])", "softmax_sink[n SET](s[b, h, m, n], a[h])")


@pytest.mark.parametrize(("text", "more"), [(STORED, ", lse: f32[B, H, M]"), (ADDED, ""), (MET, "")])
def test_where_the_number_itself_is_seen_it_is_whole(text: str, more: str) -> None:
    """A stored sum of exponentials, a bias beside it, a score that it is compared with."""
    assert "falling_tanh_f32(" not in attention("", more, text).source
