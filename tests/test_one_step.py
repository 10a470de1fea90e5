"""Loops of one step: what only a next step would read costs nothing, and every value stays what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.one_step import in_one_step
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.cost import estimate
from tileloom.compiler.target import CPU, SM_90A
from tileloom.compiler.tile_ir import Reduce, TileModule, expressions, statements, subexpressions
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
LAYER = """kernel layer(x: f32[M, N]) -> y: f32[M, N] {
    mean[m] = sum[n](x[m, n]) / f32(N)
    c[m, n] = x[m, n] - mean[m]
    y[m, n] = c[m, n] * rsqrt(sum[n](c[m, n] * c[m, n]) / f32(N) + 0.001)
}
schedule whole for layer on cuda:sm_90a { fuse all  tile m by 1, n by 512 }
"""
KEPT = """module kept { tile kept(x: f32[M, N], y: out f32[M, N], z: out f32[M]) {
    extents M, N
    for m in M parallel {
        for n in N by 256 carry (s: f32 = fill(0.0), unread: f32 = fill(5.0), count: f32 = fill(0.0)) {
            x_tile: f32[n] = load x[m, n]
            lost: f32 = sum[n](x_tile * 3.0)
            yield s + sum[n](x_tile * unread), unread + lost, count + sum[n](where(0 <= n, 1.0, 0.0))
        }
        for n in N by 256 {
            store y[m, n] = load x[m, n] / s
        }
        store z[m] = count
    }
} }"""


def layer() -> TileModule:
    program = tl.parse(LAYER)
    made = tl.compile(program["layer"], schedule=program.schedules["whole"])
    return made.compilation(M=3, N=500).module


def reductions(module: TileModule) -> int:
    return sum(
        isinstance(x, Reduce)
        for s in statements(module.programs[0].body)
        for e in expressions(s)
        for x in subexpressions(e)
    )


def test_a_mean_and_a_variance_need_two_sums() -> None:
    """From step to step a count and a sum of differences are carried too."""
    (program,) = (module := layer()).programs
    assert reductions(module) == 4
    assert reductions(TileModule("one", (in_one_step(program, lambda a: a.tile is not None),))) == 2
    assert in_one_step(program, lambda _: False) == program


@pytest.mark.parametrize("n", [512, 500, 600])
def test_values_of_each_variant(n: int) -> None:
    module, ran = layer(), list[str]()
    x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32) + 10
    got = emulate.run_module(module, generate(module, SM_90A), {"x": x}, {}, blocks=2, ran=ran)["y"]
    assert ran == [{512: "layer", 500: "layer_ragged", 600: "layer_long"}[n]]
    c = x.astype(float) - x.mean(-1, keepdims=True, dtype=float)
    assert np.abs(got - c / np.sqrt((c**2).mean(-1, keepdims=True) + 0.001)).max() < 1e-5


@pytest.mark.parametrize(("n", "kernel"), [(256, "kept"), (200, "kept_ragged"), (264, "kept_long")])
def test_states_that_are_read_stay_and_others_start_where_they_did(n: int, kernel: str) -> None:
    module, ran = parse_module(KEPT), list[str]()
    source = generate(module, SM_90A)
    x = np.random.default_rng(0).uniform(1, 2, (2, n)).astype(np.float32)
    got = emulate.run_module(module, source, {"x": x}, {}, ran=ran)
    assert ran == [kernel]
    first, rest = x[:, :256].astype(float), x[:, 256:].astype(float)
    total = 5 * first.sum(-1) + (5 + 3 * first.sum(-1)) * rest.sum(-1)
    assert np.allclose(got["y"], x / total[:, None], rtol=1e-5)
    assert (got["z"] == n).all()
    assert ("lost" in source.split("@cuda.jit")[1]) is False
    assert "lost" in source


def test_only_a_device_keeps_rows_in_registers() -> None:
    (program,) = layer().programs
    sizes = {"M": 1000, "N": 512}
    assert estimate(program, sizes, SM_90A).reduce_ops == 2 * 1000 * 512
    assert estimate(program, sizes, CPU).reduce_ops == 4 * 1000 * 512
    assert estimate(program, {"M": 1000, "N": 5120}, SM_90A).reduce_ops == 4 * 1000 * 5120


@pytest.mark.parametrize(("size", "threads"), [(1024, 128), (2048, 128), (4096, 256), (32768, 1024)])
def test_threads_of_a_row(size: int, threads: int) -> None:
    """A row that a block reduces leaves a thread 16 values and more where it can; an elementwise tile of 2048 has 256."""
    rows = KEPT.replace("by 256", f"by {size}")
    assert f"launch_bounds=({threads}, 1)" in generate(parse_module(rows), SM_90A)
    copy = parse_module("""module copy { tile copy(x: f32[N], y: out f32[N]) {
        extents N
        for n in N by 2048 parallel {
            store y[n] = load x[n]
        }
    } }""")
    assert "launch_bounds=(256, 1)" in generate(copy, SM_90A)
