"""Groupings with few tasks: a reduction is divided as it will be, and products run beside elementwise work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.cost import rates
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_75, SM_80, SM_90A, CudaTarget
from tileloom.dsl.diagnostics import TileError

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
TEXT = """kernel attend(q: bf16[B, H, M, D], k: bf16[B, H, N, D], v: bf16[B, H, N, E], scale: f32) -> o: bf16[B, H, M, E] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
    p[b, h, m, n] = softmax[n](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h, n, e])
}
"""


def sizes(b: int, h: int, m: int, n: int, d: int) -> dict[str, int]:
    return {"B": b, "H": h, "M": m, "N": n, "D": d, "E": d}


@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=lambda t: t.name)
@pytest.mark.parametrize("m", [1, 16, 64])
def test_decoding_is_one_pass_over_keys(target: CudaTarget, m: int) -> None:
    """Few queries against many keys, fewer tasks than multiprocessors: no score goes to memory."""
    made = compile_kernel(tl.parse(TEXT)["attend"], target, sizes(1, 8, m, 65536, 128))
    assert all(e.fused for e in made.ledger.entries)
    assert [p.name for p in made.module.programs] == ["attend_parts", "attend"]
    for e in made.ledger.entries:  # what the ledger compares is what will run
        assert e.chosen.seconds == pytest.approx(made.prediction.seconds, rel=0.25)


@pytest.mark.parametrize("h", [16, 20])
def test_a_round_that_is_not_full_is_fused_too(h: int) -> None:
    made = compile_kernel(tl.parse(TEXT)["attend"], SM_90A, sizes(1, h, 1024, 1024, 128))
    assert all(e.fused for e in made.ledger.entries)


@pytest.mark.parametrize(
    ("file", "case", "variant", "shape"),
    [
        ("hopper-attention", "attention D64 S4096 full", "tileloom", (4, 32, 4096, 4096, 64)),
        ("hopper-attention", "attention D128 S4096 full", "tileloom", (4, 16, 4096, 4096, 128)),
        ("hopper-attention", "attention D128 S16384 full", "tileloom", (1, 16, 16384, 16384, 128)),
        ("hopper-attention", "attention D256 S4096 full", "tileloom", (4, 8, 4096, 4096, 256)),
        ("attention", "attention bf16 D64 S4096 full", "tileloom mma", (4, 32, 4096, 4096, 64)),
        ("attention", "attention bf16 D128 S4096 full", "tileloom mma", (4, 16, 4096, 4096, 128)),
    ],
)
def test_predictions_beside_what_was_measured(
    file: str, case: str, variant: str, shape: tuple[int, int, int, int, int]
) -> None:
    rows = json.loads((RESULTS / f"h200-{file}.json").read_text())["rows"]
    (found,) = [r["ms"] for r in rows if (r["case"], r["variant"]) == (case, variant)]
    tier = "mma" if variant.endswith("mma") else "wgmma"
    stated = parse_schedule(f"schedule s for attend on {SM_90A.name} {{\n tier {tier}\n}}")
    made = compile_kernel(tl.parse(TEXT)["attend"], SM_90A, sizes(*shape), schedule=stated)
    assert made.prediction.seconds * 1e3 == pytest.approx(found, rel=0.35)


def test_matrix_tiers_have_a_pace_where_there_are_units() -> None:
    assert rates(SM_75).paces == ()
    for line in ("tier mma", "tier wgmma", "stage q by 2", "skew all"):
        stated = parse_schedule(f"schedule s for attend on {SM_75.name} {{\n {line}\n}}")
        with pytest.raises(TileError, match="E09"):
            compile_kernel(tl.parse(TEXT)["attend"], SM_75, sizes(1, 2, 64, 64, 64), schedule=stated)


@pytest.mark.parametrize("target", [SM_80, None], ids=["sm_80", "cpu"])
def test_a_state_that_all_rows_share_is_not_divided(target: CudaTarget | None) -> None:
    text = "kernel g(len: i32[H], x: f32[H, M], y: f32[N]) -> c: i64[H, M] {\n c[h, m] = sum[n in N | n < len[0]](1)\n}"
    if target is not None:
        made = compile_kernel(tl.parse(text)["g"], target, {"H": 1, "M": 1, "N": 1 << 24}, options=Options())
        assert len(made.module.programs) == 1
        return
    x, y = np.zeros((1, 1), np.float32), np.zeros(1 << 20, np.float32)
    assert tl.compile(tl.parse(text)["g"], target="cpu")(np.array([777], np.int32), x, y) == 777


@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_what_is_required_of_a_scalar_is_asked_of_the_number_a_kernel_gets(target: str) -> None:
    text = "kernel f(x: f32[N], c: f32) -> y: f32[N] {\n require c > 0\n y[n] = x[n] / c\n}"
    f, x = tl.compile(tl.parse(text)["f"], target=target), np.ones(3, np.float32)
    with pytest.raises(ValueError, match="c > 0"):
        f(x, 1e-60)
    with pytest.raises(ValueError, match="beyond what f32 holds"):
        f(x, 1e60)
    assert np.isinf(f(x, 1e-40)[0])  # the largest f32 is 3.4e38
