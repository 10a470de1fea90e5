"""Tier `mma` with heads whose columns are no multiple of 16: tiles filled up to whole steps, with lanes left out."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, CudaTarget, cuda_target
from tileloom.runtime import emulate
from tileloom.runtime.machine_code import machine_code

Array = np.ndarray[Any, Any]
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
# Statistics along both padded axes: a lane that does not exist must not be the greatest or least, nor counted.
TEXT = """kernel attention(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], w: f32[D], u: f32[E])
    -> (o: bf16[M, E], high: f32[M], low: f32[M], total: f32[M]) {
  a[m, d] = bf16(f32(q[m, d]) * rsqrt(sum[c](f32(q[m, c]) * f32(q[m, c])) / f32(D) + 0.001) * w[d])
  s[m, n] = sum[d](a[m, d] * k[n, d]) / sqrt(D)
  p[m, n] = softmax[n](s[m, n])
  r[m, e] = sum[n](p[m, n] * v[n, e])
  o[m, e] = r[m, e] * u[e] + f32(e)
  high[m] = max[e](r[m, e] - 5.0)
  low[m] = min[e](r[m, e] + 5.0)
  total[m] = sum[e](exp(r[m, e]))
}"""
PLAIN = """kernel attention(q: bf16[H, M, D], k: bf16[H, N, D], v: bf16[H, N, E]) -> o: bf16[H, M, E] {
  s[h, m, n] = sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D)
  p[h, m, n] = softmax[n](s[h, m, n])
  o[h, m, e] = sum[n](p[h, m, n] * v[h, n, e])
}"""


def compiled(text: str, sizes: dict[str, int], target: CudaTarget = SM_80) -> Compilation:
    lines = "fuse all\n tier mma\n tile m by 64, n by 16"
    asked = parse_schedule(f"schedule s for attention on {target.name} {{ {lines} }}")
    return compile_kernel(tl.parse(text)["attention"], target, sizes, schedule=asked)


def drawn(d: int, e: int, m: int, n: int) -> dict[str, Array]:
    random = np.random.default_rng(d * e)
    shapes = {"q": (m, d), "k": (n, d), "v": (n, e)}
    bf16 = {x: random.standard_normal(s).astype(ml_dtypes.bfloat16) for x, s in shapes.items()}
    return {**bf16, "w": random.random(d, np.float32) + 0.5, "u": random.random(e, np.float32)}


@pytest.mark.parametrize(
    ("d", "e", "m", "n"),
    [(40, 24, 64, 48), (20, 12, 70, 50), (33, 17, 70, 50), (72, 48, 128, 64), (104, 16, 70, 50)],
)
def test_lanes_that_do_not_exist(d: int, e: int, m: int, n: int) -> None:
    made, tensors = compiled(TEXT, {"M": m, "N": n, "D": d, "E": e}), drawn(d, e, m, n)
    ran: list[str] = []
    got = emulate.run_module(made.module, made.source, tensors, {}, ran=ran)
    assert [p.tier for p in made.module.programs] == ["mma"]
    assert len(ran) == 1
    q, k, v = (tensors[x].astype(float) for x in "qkv")
    a = (q / np.sqrt((q * q).mean(1, keepdims=True) + 0.001) * tensors["w"]).astype(ml_dtypes.bfloat16)
    s = a.astype(float) @ k.T / np.sqrt(d)
    p = np.exp(s - s.max(1, keepdims=True))
    r = p / p.sum(1, keepdims=True) @ v
    wanted = {"high": r.max(1) - 5, "low": r.min(1) + 5, "total": np.exp(r).sum(1)}
    for name, want in wanted.items():
        assert np.abs(got[name] - want).max() < 0.01 * max(1.0, np.abs(want).max()), name
    assert (np.abs(got["o"].astype(float) - (r * tensors["u"] + np.arange(e))) < 0.01 + e / 256).all()


@pytest.mark.parametrize(("d", "e"), [(8, 8), (24, 40), (104, 72), (72, 136)])
def test_every_step_of_eight(d: int, e: int) -> None:
    made = compiled(PLAIN, {"H": 2, "M": 100, "N": 50, "D": d, "E": e})
    random = np.random.default_rng(d)
    q, k, v = (
        random.standard_normal((2, n, x)).astype(ml_dtypes.bfloat16) for n, x in ((100, d), (50, d), (50, e))
    )
    q[0, 3] = np.nan
    ran: list[str] = []
    got = emulate.run_module(made.module, made.source, {"q": q, "k": k, "v": v}, {}, ran=ran)["o"]
    assert ran == ["attention_ragged"]
    s = np.einsum("hmd,hnd->hmn", q.astype(float), k.astype(float)) / np.sqrt(d)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v.astype(float)
    assert np.isnan(got[0, 3].astype(float)).all()
    assert np.isnan(got.astype(float)).sum() == e
    assert np.nanmax(np.abs(got.astype(float) - want)) < 0.02


@needs_toolkit
def test_forty_columns_by_default() -> None:
    """Copies of 16 bytes that do not wait, matrices, no products beyond those that are needed, and no spill."""
    sizes = {"H": 64, "M": 1024, "N": 1024, "D": 40, "E": 40}
    made = compile_kernel(tl.parse(PLAIN)["attention"], SM_80, sizes)
    assert [p.tier for p in made.module.programs] == ["mma"]
    code = machine_code(made.source, "attention", SM_80)
    assert code.spill_bytes == 0
    text = code.sass
    assert re.search(r"\bLDGSTS\.E\.BYPASS(?:\.LTC128B)?\.128", text)
    assert text.count("LDSM") > 10
    scores, sums = (64 // 8) * (48 // 16), (64 // 16) * (40 // 8)  # the last eight columns of sums go nowhere
    assert text.count("HMMA.16816.F32.BF16") % (scores + sums) == 0


@needs_toolkit
@pytest.mark.parametrize(
    ("target", "d", "tiles"),
    [
        ("sm_80", 128, (128, 64)),
        ("sm_86", 64, (128, 64)),
        ("sm_86", 128, (128, 32)),  # 101,376 bytes a block; 64 keys at a time would take 104,448
        ("sm_89", 128, (128, 32)),
        ("sm_89", 160, (64, 32)),
        ("sm_89", 256, (64, 32)),
    ],
)
def test_tiles_by_default_fit_the_shared_memory_of_each_target(
    target: str, d: int, tiles: tuple[int, int]
) -> None:
    sizes = {"H": 64, "M": 1024, "N": 1024, "D": d, "E": d}
    made = compile_kernel(tl.parse(PLAIN)["attention"], cuda_target(f"cuda:{target}"), sizes)
    (program,) = made.module.programs
    assert program.tier == "mma"
    assert not [r for r in made.remarks if r.name == "matrix-units" and r.kind == "missed"]
    halved = [
        r.message for r in made.remarks if r.name == "cascade-tiles" and "32 keys a step, for 64" in r.message
    ]
    assert bool(halved) == (tiles == (128, 32))
    assert dict(made.schedule.tiles) == {"h": 0, "m": tiles[0], "n": tiles[1]}
    spilled = machine_code(made.source, "attention", made.target).spill_bytes
    assert spilled <= (256 if (target, d) == ("sm_80", 128) else 0)  # docs/performance.md has what that costs
