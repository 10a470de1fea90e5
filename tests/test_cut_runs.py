"""Bounds of loops that cut a run of elements that is moved at once, in every tier, and tiles of which nothing exists.

What lies outside the bounds is NaN: nothing of it may reach a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.accuracy import compare, longest_sum
from tileloom.cli.problems import settled
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.interpreter import tile
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, TARGETS
from tileloom.compiler.tile_text import parse_module
from tileloom.dsl.types import DType
from tileloom.execution import interpret
from tileloom.runtime import emulate

SUMS = """module g {{ tile g(x: {0}[M, N], s: out f32[M], t: out f32[M]) {{
    extents M, N
    for m in M by 4 parallel {{
        for n in N by 64 from {1} to {2} carry (a: f32[m] = fill(0.0), b: f32[m] = fill(-inf)) {{
            xt: {0}[m, n] = load x[m, n]
            yield a + sum[n](f32(xt)), max(b, max[n](f32(xt)))
        }}
        store s[m] = a
        store t[m] = b
    }}
}} }}"""
PRODUCT = """module g {{ tile g(a: f16[{0}], b: f16[{1}], o: out f32[M, N]) {{
    extents M, K, N
    tier mma
    for m in M by 32, n in N by 32 parallel {{
        for k in K by 32 from {2} to {3} carry (s: f32[m, n] = fill(0.0)) {{
            yield s + dot[k](load a[{4}], load b[{5}])
        }}
        store o[m, n] = s
    }}
}} }}"""
ATTENTION = """kernel attention<T: f16>(q: T[M, D], k: T[K], v: T[V], bias: T[M, N], w: i32) -> o: T[M, E] {
    s[m, n] = sum[d](q[m, d] * k[k]) * 0.25 + 4 * bias[m, n]
    p[m, n] = softmax[n | SET](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[v])
}
"""
ROWS = {"K": "N, D", "V": "N, E", "k[k]": "k[n, d]", "v[v]": "v[n, e]"}
COLUMNS = {"K": "D, N", "V": "E, N", "k[k]": "k[d, n]", "v[v]": "v[e, n]"}


def outside(x: Any, axis: int, lo: int, hi: int) -> Any:
    """The same with NaN beyond these bounds of an axis."""
    there = np.arange(x.shape[axis])
    gone = ((there < lo) | (there >= hi)).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return np.where(gone, np.nan, x).astype(x.dtype)


@pytest.mark.parametrize(("lo", "hi"), [(5, "N"), (69, 99)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_reductions_from_within_a_run(dtype: Any, lo: int, hi: Any) -> None:
    """Below zero everywhere, so that a lane that was not loaded shows in the maximum too."""
    x = -1 - np.random.default_rng(1).integers(0, 20, (7, 160)).astype(dtype)
    if x.dtype.kind == "f":
        x = outside(x, 1, lo, 160 if hi == "N" else hi)
    name = {"float32": "f32", "float16": "f16", "int8": "i8"}[x.dtype.name]
    module, ran = parse_module(SUMS.format(name, lo, hi)), list[str]()
    got = emulate.run_module(module, generate(module, SM_80), {"x": x}, {}, ran=ran)
    assert ran == ["g"]  # not the variant that reads element by element
    part = x[:, lo : 160 if hi == "N" else hi].astype(float)
    np.testing.assert_array_equal(got["s"], part.sum(1))
    np.testing.assert_array_equal(got["t"], part.max(1))


@pytest.mark.parametrize("b", ["k, n", "n, k"])
@pytest.mark.parametrize("a", ["m, k", "k, m"])
def test_products_between_bounds_within_a_chunk(a: str, b: str) -> None:
    sizes, rng = {"m": 32, "k": 96, "n": 32}, np.random.default_rng(1)
    given = {}
    for name, axes in (("a", a.split(", ")), ("b", b.split(", "))):
        x = rng.integers(-3, 4, [sizes[i] for i in axes]).astype(np.float16)
        given[name] = outside(x, axes.index("k"), 37, 83)
    module = parse_module(PRODUCT.format(a.upper(), b.upper(), 37, 83, a, b))
    got = emulate.run_module(module, generate(module, SM_80), given, {})["o"]
    left = np.nan_to_num(given["a"].astype(float) if a == "m, k" else given["a"].astype(float).T)
    right = np.nan_to_num(given["b"].astype(float) if b == "k, n" else given["b"].astype(float).T)
    np.testing.assert_array_equal(got, left @ right)
    np.testing.assert_array_equal(tile.run_module(module, given, {})["o"], left @ right)


def emulated(text: str, target: str, sizes: dict[str, int], schedule: str = "", **scalars: int) -> None:
    """Compile and run a text; every result is compared with float64."""
    program = tl.parse(text)
    (name,) = program.kernels
    dtypes: dict[str, Any] = {"T": DType.F16} if "<T" in text else {}
    found = settled(program[name], {**sizes, **dtypes, **scalars}, {})
    stated = parse_schedule(f"schedule s for {name} on {target} {{ {schedule} }}") if schedule else None
    made = compile_kernel(program[name], TARGETS[target], sizes, dtypes=found.dtypes, schedule=stated)
    tensors = found.tensors()
    want = interpret(found.graph, tensors, found.numbers, precision="float64")
    got = emulate.run_module(made.module, made.source, tensors, {**found.numbers, **sizes})
    longest = longest_sum(found.graph, found.extents, found.scalars)
    assert all(compare(n, got[n], want[n], longest).ok for n in want)


@pytest.mark.parametrize(
    ("target", "tiles"),
    [
        ("cuda:sm_80", "tier mma\n tile m by 64, n by 32"),
        ("cuda:sm_90a", "tier wgmma\n tile m by 64, n by 16"),
    ],
    ids=["mma", "wgmma"],
)
@pytest.mark.parametrize(
    ("lying", "subset"),
    [(ROWS, "m - n < w and n <= m"), (COLUMNS, "n >= w and n < N - 3")],
    ids=["window", "columns"],
)
def test_attention_from_within_a_run(target: str, tiles: str, lying: dict[str, str], subset: str) -> None:
    """A window of an even width starts at an odd index, where a bias is read two elements at a time."""
    text = ATTENTION.replace("SET", subset)
    for old, new in lying.items():
        text = text.replace(old, new) if "[" in old else text.replace(f"T[{old}]", f"T[{new}]")
    emulated(text, target, {"M": 128, "N": 128, "D": 16, "E": 16}, tiles, w=12)


LENGTHS = """kernel lengths<T: f16>(a: T[B, M, K], b: T[B, N, K], len: i32[B], first: i32) -> o: f32[B, M, N] {
    o[z, m, n] = sum[k | k < len[z] and k >= first](a[z, m, k] * b[z, n, k])
}
"""
WINDOWS = """kernel windows(x: f32[M, N]) -> (r: f32[M], p: f32[M, N]) {
    p[m, n] = softmax[n | m - n < 3 and n <= m](x[m, n])
    r[m] = min[n | m - n < 3 and n <= m](x[m, n])
}
"""
EMPTY = """kernel empty<T: f16>(q: T[M, D], k: T[N, D], v: T[N, E]) -> (o: T[M, E], most: f32) {
    s[m, n] = sum[d](q[m, d] * k[n, d])
    p[m, n] = softmax[n | n <= m + N - M](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
    most = max[m](sum[n](s[m, n]))
}
"""


KEPT = """kernel kept(u: f32[M], v: f32[N, E], keep: bool[N]) -> o: f32[M, E] {
    s[m in M, n in N] = u[m]
    p[m, n] = softmax[n | keep[n]](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""


def test_runs_along_an_axis_that_a_tile_does_not_have_last() -> None:
    """A row of v is read at once; the sum over n has its tile by columns."""
    emulated(KEPT, "cuda:sm_80", {"M": 3, "N": 40, "E": 8})


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_programs_whose_loops_start_and_end_within_a_run(target: str) -> None:
    emulated(WINDOWS, target, {"M": 7, "N": 4})
    emulated(LENGTHS, target, {"B": 2, "M": 32, "N": 32, "K": 64}, first=3)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("empty", ["D", "E", "N", "M"])
def test_axes_in_one_piece_that_are_empty(target: str, empty: str) -> None:
    """Nothing of a tensor without elements is read; a sum over nothing is 0."""
    emulated(EMPTY, target, {"M": 5, "N": 6, "D": 8, "E": 4, empty: 0})
