"""Tier `mma`: which task a block takes where loops differ in length, and what finding that costs registers."""

from __future__ import annotations

import importlib.util
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.wgmma import choices
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, SM_90A, CudaTarget
from tileloom.dsl.types import DType
from tileloom.runtime import emulate
from tileloom.runtime.emulate import FUNCTIONS

EXAMPLE = Path(__file__).parent.parent / "examples" / "attention.tile"
ROWS = 128  # of a task's tile
CACHED_BYTES = 32 << 20
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


def attention(target: CudaTarget, d: int, g: int = 4) -> Any:
    sizes = {"B": 4, "H": 2048 // d, "G": g, "M": 4096, "N": 4096, "D": d, "E": d}
    stated = parse_schedule(
        f"schedule s for attention on {target.name} {{ tier mma\n tile m by {ROWS}, n by 64 }}"
    )
    kernel = tl.load(str(EXAMPLE))["attention"]
    return compile_kernel(kernel, target, sizes, dtypes={"T": DType.BF16}, schedule=stated)


def decoded(source: str, **extents: int) -> list[tuple[int, int, int]]:
    """b, h and the first row of each task in the order of blocks, by the generated text itself."""
    lines = source.splitlines()
    start = next(i for i, x in enumerate(lines) if x.startswith("    while task < tasks"))
    count = next(x for x in lines[:start] if x.startswith("    count ="))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("        b = "))
    text = textwrap.dedent("\n".join([*lines[start + 1 : end + 1]]))
    found = []
    for task in range(extents["B"] * extents["H"] * -(-extents["M"] // ROWS)):
        names: dict[str, Any] = {**FUNCTIONS, "i32": int, "i64": int, **extents, "task": task}
        exec(f"{count.strip()}\n{text}", names)
        found.append((names["b"], names["h"], names["m_0"]))
    return found


def test_the_order_is_told_where_loops_differ_in_length() -> None:
    assert "task-order" in {r.name for r in attention(SM_80, 64).remarks}
    full = tl.parse(EXAMPLE.read_text().replace(" | n <= m + N - M", ""))["attention"]
    sizes = {"B": 4, "H": 8, "G": 8, "M": 512, "N": 512, "D": 64, "E": 64}
    made = compile_kernel(full, SM_80, sizes, dtypes={"T": DType.BF16})
    assert made.module.programs[0].tier == "mma"
    assert "task-order" not in {r.name for r in made.remarks}


@pytest.mark.parametrize(("n", "d"), [(1000, 128), (8192, 128), (40_000, 128), (1 << 22, 64)])
def test_longest_first_as_many_heads_together_as_the_cache_holds(n: int, d: int) -> None:
    """Each task once; of the heads whose keys and values are read together, the last rows, which see most keys, first."""
    b, h, m = 3, 5, 1000
    order = decoded(attention(SM_90A, d).source, B=b, H=h, G=5, M=m, N=n)
    tiles = [i * ROWS for i in range(-(-m // ROWS))]
    assert sorted(order) == sorted(product(range(b), range(h), tiles))
    together = min(max(CACHED_BYTES // (n * 2 * 2 * d), 1), b * h)
    for start in range(0, b * h, together):
        heads = range(start, min(start + together, b * h))
        group = order[start * len(tiles) : (start + len(heads)) * len(tiles)]
        assert {i * h + j for i, j, _ in group} == set(heads)
        rows = [first for _, _, first in group]
        assert rows == sorted(rows, reverse=True)


HEADS_AFTER_ROWS = """kernel turned<T: f16 | bf16>(
    q: T[B, M, H, D], k: T[B, N, H, D], v: T[B, N, H, E], scale: f32
) -> o: T[B, M, H, E] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, m, h, d] * k[b, n, h, d])
    p[b, h, m, n] = softmax[n | n <= m](s[b, h, m, n])
    o[b, m, h, e] = sum[n](p[b, h, m, n] * v[b, n, h, e])
}
"""


@pytest.mark.parametrize("tier", ["mma", "wgmma"])
def test_heads_after_rows_have_the_order_of_heads_before(tier: str) -> None:
    """As for [B, H, M, E], and right: two sequences, three heads, 150 rows in three tiles, NaN where nothing may be read."""
    stated = parse_schedule(f"schedule s for turned on cuda:sm_90a {{ tier {tier}\n tile m by 64, n by 16 }}")
    sizes = {"B": 2, "H": 3, "M": 150, "N": 160, "D": 16, "E": 32}
    made = compile_kernel(
        tl.parse(HEADS_AFTER_ROWS)["turned"], SM_90A, sizes, dtypes={"T": DType.BF16}, schedule=stated
    )
    if tier == "mma":
        assert "task-order" in {r.name for r in made.remarks}
    else:
        found = choices(made.module.programs[0], SM_90A)
        assert (found.order, found.skew) == ("balanced", "all")
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 150, 3, 16), "k": (2, 160, 3, 16), "v": (2, 160, 3, 32)}
    given = {n: rng.standard_normal(x).astype(ml_dtypes.bfloat16) for n, x in shapes.items()}
    wide = {n: x.astype(float) for n, x in given.items()}
    given["k"][:, 150:], given["v"][:, 150:] = np.nan, 0
    got = emulate.run_module(made.module, made.source, given, {"scale": 0.25})["o"].astype(float)
    s = 0.25 * np.einsum("bmhd,bnhd->bhmn", wide["q"], wide["k"])
    p = np.exp(np.where(np.arange(160) <= np.arange(150)[:, None], s, -np.inf))
    want = np.einsum("bhmn,bnhe->bmhe", p / p.sum(-1, keepdims=True), wide["v"])
    assert np.abs(got - want).max() < 2e-2


@pytest.mark.parametrize("a", [0, 1, 7, 64, 2**31 - 2])
@pytest.mark.parametrize("b", [0, 1, 2, 8, 2**31 - 1, 2**31, 2**40])
def test_a_quotient_of_32_bits_is_the_one_of_64(a: int, b: int) -> None:
    """As the instructions of `small_floordiv_i64` compute it, and as emulation does."""
    less = min((b - 1) % 2**64, 2**31 - 2)
    assert a // (less + 1) == FUNCTIONS["small_floordiv_i64"](a, b) == (a // b if b else 0)


def test_heads_that_share_keys_find_theirs() -> None:
    """Six heads in twos on three, against float64."""
    made = attention(SM_90A, 64)
    assert "small_floordiv_i64(h, small_floordiv_i64(H, G))" in made.source
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 70, 16)).astype(np.float32) for heads in (6, 3, 3))
    stated = parse_schedule("schedule s for attention on cuda:sm_90a { tier mma\n tile m by 64, n by 32 }")
    sizes = {"B": 1, "H": 6, "G": 3, "M": 70, "N": 70, "D": 16, "E": 16}
    given = {n: x.astype(ml_dtypes.bfloat16) for n, x in (("q", q), ("k", k), ("v", v))}
    small = compile_kernel(
        tl.load(str(EXAMPLE))["attention"], SM_90A, sizes, dtypes={"T": DType.BF16}, schedule=stated
    )
    got = emulate.run_module(small.module, small.source, given, {"scale": 0.25})["o"].astype(float)
    wide = {n: x.astype(float) for n, x in given.items()}
    s = 0.25 * np.einsum("bhmd,bhnd->bhmn", wide["q"], wide["k"].repeat(2, 1))
    p = np.exp(np.where(np.tril(np.ones((70, 70))) > 0, s, -np.inf))
    want = np.einsum("bhmn,bhne->bhme", p / p.sum(-1, keepdims=True), wide["v"].repeat(2, 1))
    assert np.abs(got - want).max() < 2e-2


@needs_toolkit
@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=lambda t: t.name)
def test_nothing_is_spilled_for_the_order_of_tasks(target: CudaTarget) -> None:
    """128 columns and heads that share keys: sums, scores and weights leave a thread few registers. Tiles of 128, 2 x 64 and
    2 x 64 rows lie in lines on sm_90a, else in rows that are 16 bytes longer."""
    from tileloom.runtime.machine_code import machine_code

    kernel = machine_code(attention(target, 128).source, "attention", target)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    row_bytes = 2 * 128 if target == SM_90A else 2 * 128 + 16
    assert kernel.dynamic_shared_bytes == (128 + 4 * 64) * row_bytes
