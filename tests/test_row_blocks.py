"""Rows of softmax and norms: a choice made once a row, two rows a block, registers that leave room for more blocks."""

from __future__ import annotations

import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import CudaTarget, cuda_target
from tileloom.compiler.tile_ir import TileModule
from tileloom.runtime import emulate
from tileloom.runtime.machine_code import machine_code

Array = np.ndarray[Any, Any]
SOFTMAX = "kernel rows(x: bf16[M, N]) -> y: bf16[M, N] { y[m, n] = softmax[n](x[m, n]) }"
NORM = """kernel norm(x: bf16[M, N], w: bf16[N], b: bf16[N]) -> y: bf16[M, N] {
    y[m, n] = layernorm[n](x[m, n], 0.001) * w[n] + b[n]
}"""
RESIDUAL = """kernel residual(x: bf16[M, N], r: bf16[M, N], w: bf16[N]) -> y: bf16[M, N] {
    s[m, n] = f32(x[m, n]) + f32(r[m, n])
    y[m, n] = s[m, n] * rsqrt(sum[k](s[m, k] * s[m, k]) / f32(N) + 0.001) * f32(w[n])
}"""
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


def lowered(text: str, m: int, n: int, target: str = "cuda:sm_90a") -> TileModule:
    return tl.compile(tl.parse(text)[name(text)], target).compilation(M=m, N=n).module


def name(text: str) -> str:
    return text.partition("(")[0].removeprefix("kernel ")


@pytest.mark.parametrize("n", [1024, 1000, 4096, 4088])
def test_rows_without_weight_are_zero_and_no_others(n: int) -> None:
    """Where all scores are -inf the weights are 0; a row's neighbours in its block keep theirs. (512 to 1024 elements: two
    rows a block; more: one.)"""
    module = lowered(SOFTMAX, 5, n)
    source = generate(module, cuda_target("cuda:sm_90a"))
    x = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32) * 3
    x[1] = x[4] = -np.inf
    x[2, : n // 2] = -np.inf
    x = x.astype(ml_dtypes.bfloat16)
    ran: list[str] = []
    got = emulate.run_module(module, source, {"x": x}, {}, blocks=2, ran=ran)["y"].astype(float)
    assert ran == ["rows" if n % 1024 == 0 else "rows_ragged"]
    e = np.exp(x.astype(float) - np.where(np.isin(np.arange(5), (1, 4)), 0, x.astype(float).max(-1))[:, None])
    want = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
    assert not got[[1, 4]].any()
    assert not got[2, : n // 2].any()
    assert np.abs(got - want).max() <= want.max() / 256
    assert np.allclose(got[[0, 2, 3]].sum(-1), 1, atol=1e-2)


def test_a_choice_of_a_whole_row_is_made_once() -> None:
    source = generate(lowered(SOFTMAX, 5, 4096), cuda_target("cuda:sm_90a"))
    wide = source.partition("def rows_long")[0]
    assert wide.count("        if v_eq:\n") == 2  # `rows` and `rows_ragged`
    assert "select_f32(" not in wide


@pytest.mark.parametrize(("n", "rows"), [(512, 4), (1024, 2), (2048, 1)])
def test_a_block_takes_as_many_rows_as_leave_its_threads_sixteen_values(n: int, rows: int) -> None:
    source = generate(lowered(SOFTMAX, 64, n), cuda_target("cuda:sm_90a"))
    first = source.partition("def rows_ragged")[0]
    assert "@cuda.jit(launch_bounds=(128, 1))" in first
    assert "x_ahead = registers_f32(16)" in first
    assert f"# tier simt, 128 threads: {rows} rows of {128 // rows}" in first


@needs_toolkit
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "cuda:sm_120"])
@pytest.mark.parametrize("n", [2048, 4096])
def test_norms_leave_room_for_three_quarters_of_a_multiprocessors_threads(target: str, n: int) -> None:
    """Without the bound a layer norm of 4096 has 56 registers a thread for sm_90a."""
    on = cuda_target(target)
    kernel = first(NORM, 64, n, on)
    assert kernel.registers * 1536 <= on.registers_per_sm
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


@needs_toolkit
@pytest.mark.parametrize(("text", "n"), [(RESIDUAL, 4096), (NORM, 8192), (NORM.replace("bf16", "f32"), 4096)])
def test_what_the_bound_would_spill_is_left_alone(text: str, n: int) -> None:
    """Two rows to hold, 32 values a thread, or f32."""
    on = cuda_target("cuda:sm_90a")
    kernel = first(text, 64, n, on)
    assert kernel.registers * 1536 > on.registers_per_sm
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


def first(text: str, m: int, n: int, target: CudaTarget) -> Any:
    """The preferred kernel, assembled."""
    source = generate(lowered(text, m, n, target.name), target)
    return machine_code(source, name(text), target)


def test_weights_of_scores_of_any_size() -> None:
    """Up to the largest, where x · log2 e overflows. Scores that differ are then far apart."""
    n = 1024
    random = np.random.default_rng(5)
    x = random.standard_normal((8, n)).astype(np.float32)
    x *= np.array([1, 30, 1e4, 1e9, 1e30, 2e37, 1e-30, 1])[:, None]
    x[5, :3] = 3.3e38, -3.3e38, 3.3e38
    x[7, 3] = np.inf
    x[7, n // 2] = np.nan
    x = x.astype(ml_dtypes.bfloat16)
    module = lowered(SOFTMAX, 8, n)
    source = generate(module, cuda_target("cuda:sm_90a"))
    got = emulate.run_module(module, source, {"x": x}, {}, blocks=2)["y"].astype(float)
    wide = x.astype(float)
    e = np.exp(wide[:7] - wide[:7].max(-1, keepdims=True))
    want = e / e.sum(-1, keepdims=True)
    assert np.abs(got[:7] - want).max() <= 2**-8
    assert (np.abs(got[:7] - want) <= want * 2**-8 + 1e-9).all()
    assert np.isnan(got[7]).all()


def test_an_exponential_that_no_sum_divides_is_of_an_exact_difference() -> None:
    """exp(x - d) for d near x and 10^7: computed as exp2(x log2 e - d log2 e), where the second term is rounded, it would be
    2.33 and not e. In a softmax that cancels; here nothing divides by a sum of the same."""
    text = """kernel away(x: f32[M, N], c: f32[M]) -> y: bf16[M, N] {
      s[m] = max[n](x[m, n])
      d[m] = c[m] + 0.0 * s[m]
      y[m, n] = exp(x[m, n] - d[m]) * (s[m] * 0.0000001)
    }"""
    module = tl.compile(tl.parse(text)["away"], "cuda:sm_90a", fuse="all").compilation(M=3, N=1024).module
    x, c = np.full((3, 1024), 1e7, np.float32), np.full(3, 1e7 - 1, np.float32)
    source = generate(module, cuda_target("cuda:sm_90a"))
    ran: list[str] = []
    got = emulate.run_module(module, source, {"x": x, "c": c}, {}, ran=ran)["y"].astype(float)
    assert ran == ["away"]
    assert np.abs(got - np.e).max() < np.e / 256
