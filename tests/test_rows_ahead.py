"""Long rows that come to shared memory ahead: their values, and that each task finds its own."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import SM_75, SM_80, SM_90A, CudaTarget
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate
from tileloom.runtime.machine_code import variants

Array = np.ndarray[Any, Any]
N = 32768
NORM = """module norm { tile norm(x: bf16[M, N], w: bf16[N], r: bf16[M, N], y: out f32[M, N]) {
    extents M, N
    for m in M parallel {
        for n in N by 32768 carry (s: f32 = fill(0.0)) {
            x_tile: f32[n] = f32(load x[m, n])
            yield s + sum[n](x_tile * x_tile)
        }
        for n in N by 32768 {
            store y[m, n] = f32(load x[m, n]) / s * f32(load w[n]) - f32(load r[m, n])
        }
    }
} }"""
WIDE = NORM.replace("bf16", "f32")


def norm(x: Array, w: Array, r: Array) -> Array:
    x, w, r = (a.astype(float) for a in (x, w, r))
    return x / (x**2).sum(-1, keepdims=True) * w - r


def drawn(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("n", [N, N - 8])
def test_each_task_computes_on_its_own_rows(n: int) -> None:
    """Two blocks take three tasks: one of them goes on with rows that came ahead, the other asks for none."""
    module = parse_module(NORM)
    source = generate(module, SM_90A)
    given = {"x": drawn(3, n), "w": drawn(n), "r": drawn(3, n)}
    ran: list[str] = []
    got = emulate.run_module(module, source, given, {}, blocks=2, ran=ran)["y"]
    assert ran == ["norm" if n == N else "norm_ragged"]
    assert np.abs(got - norm(**given)).max() < 1e-5
    assert np.isfinite(got).all()


@pytest.mark.parametrize("forgotten", ["wait_copies1()", "task_ahead < tasks"])
def test_what_makes_a_row_arrive_is_needed(forgotten: str) -> None:
    """Without waiting, or with copies of the next task's rows left out, a task computes on what is there."""
    module = parse_module(NORM)
    source = generate(module, SM_90A)
    assert forgotten in source
    broken = source.replace(forgotten, "wait_copies3()" if "wait" in forgotten else "False")
    given = {"x": drawn(2, N), "w": drawn(N), "r": drawn(2, N)}
    got = emulate.run_module(module, broken, given, {}, blocks=1)["y"]
    assert not np.abs(got - norm(**given)).max() < 1e-3


def ahead(text: str, target: CudaTarget) -> list[str]:
    """The rows that the preferred variant keeps in shared memory."""
    return re.findall(
        r"(\w+)_row = view", generate(parse_module(text), target).partition("def norm_ragged")[0]
    )


def test_where_rows_come_ahead() -> None:
    (found,) = variants(generate(parse_module(NORM), SM_90A)).values()
    assert [v.blocks_per_sm for v in found] == [1, 1, 0, 0]
    assert ahead(NORM, SM_90A) == ["x", "r", "w"]  # 64 KiB each, of 227
    assert ahead(NORM, SM_80) == ["x", "r"]  # of 163
    assert ahead(WIDE, SM_90A) == ["x"]
    assert ahead(NORM, SM_75) == []  # which has no asynchronous copies


def test_rows_that_share_a_multiprocessor_do_not() -> None:
    """Blocks of 512 threads fit twice where 16 words and 32 values a thread are all they hold."""

    def softmax(dtype: str, n: int) -> list[int]:
        text = f"kernel s(x: {dtype}[M, N]) -> y: {dtype}[M, N] {{\n  y[m, n] = softmax[n](x[m, n])\n}}\n"
        made = compile_kernel(tl.parse(text)["s"], SM_90A, {"M": 4096, "N": n})
        (found,) = variants(made.source).values()
        remarks = [r.message for r in made.remarks if r.name == "rows-ahead"]
        assert len(remarks) == (found[0].blocks_per_sm > 0)
        assert not remarks or "the next task's row of `x` comes to shared memory" in remarks[0]
        return [v.blocks_per_sm for v in found]

    assert softmax("bf16", 32768) == softmax("f32", 32768) == softmax("f32", 16384) == [1, 1, 0, 0]
    assert softmax("bf16", 16384) == softmax("f32", 8192) == [0, 0, 0, 0]
