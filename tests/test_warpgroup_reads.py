"""Tiles that a score reads element by element, through the copy engine (tier `wgmma`): results, shared memory, tasks."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float64_attention import attention64

import tileloom as tl
from tileloom.compiler.codegen import wgmma
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

TEXT = """kernel attention<T: bf16 | f16>(
    q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, D], bias: TYPE[SHAPE], scale: f32
) -> o: T[B, H, M, D] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d]) + f32(bias[INDEX])
    p[b, h, m, n] = softmax[n SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SIZES = {"B": 1, "H": 1, "M": 200, "N": 136, "D": 16}
Array = np.ndarray[Any, Any]


def compiled(
    tiles: str, sizes: dict[str, int], index: str = "m, n", subset: str = "", dtype: DType = DType.F16, type_: str = "T"
) -> Compilation:  # fmt: skip
    text = (
        TEXT.replace("TYPE", type_)
        .replace("INDEX", index)
        .replace("SHAPE", index.upper())
        .replace("SET", subset)
    )
    schedule = parse_schedule(f"schedule s for attention on cuda:sm_90a {{ tier wgmma\n tile {tiles} }}")
    return compile_kernel(tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": dtype}, schedule=schedule)


def inputs(sizes: dict[str, int], index: str = "m, n", dtype: Any = np.float16) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    shapes = {"q": "BHMD", "k": "BHND", "v": "BHND", "bias": index.upper().replace(", ", "")}
    return {t: rng.standard_normal([sizes[a] for a in s]).astype(dtype) for t, s in shapes.items()}


def exact(given: dict[str, Array], index: str, sees: Any = True) -> Array:
    bias = given["bias"].astype(float)
    for at, axis in enumerate("bhmn"):
        if axis not in index:
            bias = np.expand_dims(bias, at)
    return attention64(given["q"], given["k"], given["v"], scale=0.3, sees=sees, bias=bias)[0]


@pytest.mark.parametrize(
    ("tiles", "index", "sizes", "subset", "kernel"),
    [
        ("m by 128, n by 64", "m, n", {"M": 128, "N": 128}, "", "attention_whole"),
        ("m by 64, n by 16", "m, n", {"M": 70, "N": 72, "H": 2}, "", "attention"),
        ("m by 192, n by 80", "h, m, n", {"M": 130, "N": 80}, "", "attention"),
        ("m by 64, n by 96", "b, m, n", {"M": 66, "N": 104, "B": 2}, "", "attention"),
        ("m by 128, n by 32", "b, h, m, n", {"M": 130, "N": 136}, "| n <= m", "attention"),
        ("m by 64, n by 32", "m, n", {"M": 130, "N": 136}, "| n <= m and m - n < 40", "attention"),
        ("m by 64, n by 32\n stage bias by 2", "m, n", {"M": 64, "N": 96}, "", "attention_whole"),
        ("m by 64, n by 32\n skew none", "m, n", {"M": 64, "N": 96}, "", "attention_whole"),
        ("m by 64, n by 16", "m, n", {"M": 70, "N": 39}, "", "attention_apart"),
    ],
)  # fmt: skip
def test_every_pair_gets_its_own_bias(
    tiles: str, index: str, sizes: dict[str, int], subset: str, kernel: str
) -> None:
    """Whole and ragged tiles, each with rings that go round; rows of 78 bytes, which the copy engine cannot address."""
    sizes = {**SIZES, **sizes}
    made, given, ran = compiled(tiles, sizes, index, subset), inputs(sizes, index), list[str]()
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=2, ran=ran)["o"]
    m, n = np.arange(sizes["M"])[:, None], np.arange(sizes["N"])
    sees = {"": n >= 0, "| n <= m": n <= m}.get(subset, (n <= m) & (m - n < 40))
    assert ran == [kernel]
    assert np.abs(got.astype(float) - exact(given, index, sees)).max() < 2e-3


def test_a_bias_of_bf16() -> None:
    sizes = {**SIZES, "M": 64, "N": 64}
    made, given = (
        compiled("m by 64, n by 32", sizes, dtype=DType.BF16),
        inputs(sizes, dtype=ml_dtypes.bfloat16),
    )
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=2)["o"]
    assert np.abs(got.astype(float) - exact(given, "m, n")).max() < 1e-2


def test_steps_that_are_left_out_bring_no_tile() -> None:
    """Both roles leave out tiles of keys that no query of theirs can see, and so take the same slots."""
    text = TEXT.replace("scale: f32", "of: i32[M], at: i32[N], scale: f32").replace("TYPE[SHAPE]", "T[M, N]")
    text = text.replace("SET", "| of[m] == at[n]").replace("INDEX", "m, n")
    sizes = {**SIZES, "M": 130, "N": 136}
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 64, n by 32 }"
    )
    made = compile_kernel(
        tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType.F16}, schedule=schedule
    )
    of, at, ran = np.arange(130, dtype=np.int32) // 40, np.arange(136, dtype=np.int32) // 40, list[str]()
    given = {**inputs(sizes), "of": of, "at": at}
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=2, ran=ran)["o"]
    assert ran[-1] == "attention"
    assert "load_matrices" in made.source
    assert np.abs(got.astype(float) - exact(given, "m, n", of[:, None] == at)).max() < 2e-3


def test_two_tiles_come_through_rings_of_their_own() -> None:
    """One is added, the other one multiplies; each is read once a step though an expression names it twice."""
    text = TEXT.replace("bias: TYPE[SHAPE]", "bias: T[M, N], w: T[H, M, N]").replace("SET", "")
    text = text.replace("f32(bias[INDEX])", "f32(bias[m, n]) * f32(w[h, m, n]) + f32(w[h, m, n])")
    sizes = {**SIZES, "M": 70, "N": 72}
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 64, n by 16 }"
    )
    made = compile_kernel(
        tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType.F16}, schedule=schedule
    )
    given = {**inputs(sizes), "w": np.random.default_rng(8).standard_normal((1, 70, 72)).astype(np.float16)}
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=2)["o"]
    b, w = given["bias"].astype(float), given["w"].astype(float)
    want, _ = attention64(given["q"], given["k"], given["v"], scale=0.3, bias=(b * w + w)[None])
    assert np.abs(got.astype(float) - want).max() < 2e-3
    assert dict(wgmma.choices(made.module.programs[0], SM_90A).stages()) == {
        "q": 2,
        "k": 16,
        "v": 16,
        "bias": 1,
        "w": 1,
    }


def test_what_fills_shared_memory_at_128_columns() -> None:
    """One slot of 32 KiB for the bias and two for queries, and none is left for results."""
    sizes = {"B": 1, "H": 16, "M": 4096, "N": 4096, "D": 128}
    made = compiled("m by 128, n by 128", sizes)
    found = wgmma.choices(made.module.programs[0], SM_90A)
    assert dict(found.stages()) == {"q": 2, "k": 2, "v": 2, "bias": 1}
    assert "q by 2, k by 2, v by 2, bias by 1; results leave through the slots of `q`" in found.told()
    assert made.schedule.stages == (("q", 2), ("k", 2), ("v", 2), ("bias", 1))
    bytes_ = int(re.findall(r"# (\d+) bytes of shared memory", made.source)[0])
    barriers = 2 * 8 * (2 + 2 + 2 + 2)  # a pair for each slot, and for each warpgroup's part of the bias's
    assert bytes_ == (32 << 10) * (2 + 2 + 2 + 1) + barriers
    stated = compiled("m by 128, n by 128\n stage q by 2, k by 2, v by 2, bias by 1", sizes)
    assert stated.source == made.source
    one = compiled("m by 128, n by 128\n stage q by 1", sizes)
    assert "results leave" not in wgmma.choices(one.module.programs[0], SM_90A).told()


@pytest.mark.parametrize(
    ("tiles", "d", "type_", "reason"),
    [
        ("m by 128, n by 64\n stage k by 3", 256, "T", "bytes of shared memory"),
        ("m by 64, n by 32", 16, "f32", "holds f32, not f16 or bf16"),
    ],
)
def test_why_threads_read_by_themselves_is_said(tiles: str, d: int, type_: str, reason: str) -> None:
    made = compiled(tiles, {**SIZES, "M": 256, "N": 256, "D": d}, type_=type_)
    (told,) = (r.message for r in made.remarks if r.name == "roles")
    assert "threads read `bias` by themselves" in told
    assert reason in told
    assert "load_matrices" not in made.source


def test_slots_for_which_there_is_no_room_are_refused() -> None:
    with pytest.raises(TileError, match="bytes of shared memory"):
        compiled("m by 128, n by 64\n stage k by 3, bias by 1", {**SIZES, "M": 256, "N": 256, "D": 256})


@pytest.mark.parametrize(
    ("index", "want"),
    [
        ("m, n", [(b, h) for b in (0, 1) for h in (0, 1)]),
        ("h, m, n", [(b, h) for h in (0, 1) for b in (0, 1)]),
    ],
)
def test_tasks_that_read_the_same_tile_are_neighbours(index: str, want: list[tuple[int, int]]) -> None:
    """All heads of a tile of queries, before the next tile; where a bias has heads of its own, all sequences of a head."""
    made = compiled("m by 64, n by 32", {**SIZES, "B": 2, "H": 2, "M": 128, "N": 64}, index)
    loading = made.source.partition("def attention_whole(")[2].partition(
        "_ring_phase = i32(0)\n            count"
    )[2]
    before, _, after = f"count{loading}".partition("task = i64(cuda.blockIdx.x)")
    inside = after.partition("while task < tasks:\n")[2].partition("await_parity")[0].rpartition("\n")[0]
    names: dict[str, Any] = {
        "B": 2,
        "H": 2,
        "M": 128,
        "N": 64,
        "D": 16,
        "i64": int,
        "quotient": lambda a, b: a // b,
    }
    exec(textwrap.dedent(f"            {before}"), names)
    found = []
    for task in range(names["tasks"]):
        exec(textwrap.dedent(inside), {**names, "task": task}, here := {})
        found.append((here["m_0"], here["b"], here["h"]))
    assert found == [(m, b, h) for m in (64, 0) for b, h in want]


@pytest.mark.parametrize(
    ("sizes", "subset"),
    [
        ({"M": 128, "N": 128, "H": 2}, ""),
        ({"M": 200, "N": 136, "B": 2}, ""),
        ({"M": 200, "N": 136}, "| n <= m"),
    ],
)
def test_results_leave_through_the_slots_of_queries(sizes: dict[str, int], subset: str) -> None:
    """Where shared memory has room for a second slot of queries, or for results: a block's next queries come while it
    computes, and its results lie where these were."""
    sizes = {**SIZES, "D": 64, **sizes}
    slots = (
        2 * 16 + 4 * 4 + 16
    )  # KiB: two of q, 128 rows of 128 bytes, two of k and of v, 32 rows, one of the bias
    small = replace(SM_90A, shared_per_block_bytes=(slots << 10) + 2048)
    text = TEXT.replace("TYPE", "T").replace("INDEX", "m, n").replace("SHAPE", "M, N").replace("SET", subset)
    schedule = parse_schedule(
        "schedule s for attention on cuda:sm_90a { tier wgmma\n tile m by 128, n by 32 }"
    )
    made = compile_kernel(
        tl.parse(text)["attention"], small, sizes, dtypes={"T": DType.F16}, schedule=schedule
    )
    (told,) = (r.message for r in made.remarks if r.name == "roles")
    assert "q by 2, k by 2, v by 2, bias by 1; results leave through the slots of `q`" in told
    given = inputs(sizes)
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.3}, blocks=1)["o"]
    sees = np.arange(sizes["N"]) <= np.arange(sizes["M"])[:, None] if subset else True
    assert np.abs(got.astype(float) - exact(given, "m, n", sees)).max() < 2e-3
