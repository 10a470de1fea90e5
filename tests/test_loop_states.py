"""Sums of loop states that stay in a part for each thread until the loop has ended."""

from __future__ import annotations

import numpy as np
import pytest

from tileloom.compiler.codegen.loop_states import running_maxima, sums_in_parts
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import SM_80, SM_90A
from tileloom.compiler.tile_ir import For, statements
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate


def program(body: str, carries: str, stores: str, outputs: str, tile: int = 32) -> str:
    return f"""module g {{ tile g(x: f32[M, N], {outputs}, c: f32) {{
        extents M, N
        for m in M by 32 parallel {{
            for n in N by {tile} carry ({carries}) {{ {body} }}
            {stores}
        }}
    }} }}"""


SUM = program("yield z + sum[n](load x[m, n])", "z: f32[m] = fill(0.0)", "store o[m] = z", "o: out f32[M]")
SOFTMAX = program(
    """t: f32[m, n] = load x[m, n]
    new: f32[m] = max(top, max[n](t))
    base: f32[m] = where(new == -inf, 0.0, new)
    moved: f32[m] = exp(c * (top - base))
    yield new, FACTOR""",
    "top: f32[m] = fill(-inf), z: f32[m] = fill(START)",
    "store o[m] = z\n store r[m] = top",
    "o: out f32[M], r: out f32[M]",
)
FACTORS = ("z * moved + sum[n](exp(c * (t - base)))", "sum[n](exp(c * (t - base))) + moved * z")


def loop(text: str) -> For:
    (program,) = parse_module(text).programs
    return next(s for s in statements(program.body) if isinstance(s, For))


@pytest.mark.parametrize("factor", FACTORS)
def test_a_running_maximum_and_the_sum_that_it_moves(factor: str) -> None:
    found = loop(SOFTMAX.replace("FACTOR", factor).replace("START", "0.0"))
    (top,) = running_maxima(found)
    assert (top.state, top.new, top.origin, top.factors) == ("top", "new", "base", ("moved",))
    assert list(sums_in_parts((found,))) == [1]


@pytest.mark.parametrize(
    ("factor", "start"),
    [
        (FACTORS[0], "1.0"),  # every part would start with it
        ("z * c + sum[n](t)", "0.0"),  # c may be infinite
        ("z * moved + sum[n](t + z)", "0.0"),  # the whole is read
        ("max(z, max[n](t))", "0.0"),
    ],
)
def test_sums_that_become_whole_in_each_step(factor: str, start: str) -> None:
    assert not sums_in_parts((loop(SOFTMAX.replace("FACTOR", factor).replace("START", start)),))


@pytest.mark.parametrize("target", [SM_80, SM_90A])
@pytest.mark.parametrize("size", [(33, 100), (5, 7), (64, 0)])
def test_parts_become_whole_after_the_loop(size: tuple[int, int], target: object) -> None:
    """Ragged rows and columns; whole numbers, so that the order of adding does not matter."""
    x = np.random.default_rng(1).integers(-9, 10, size).astype(np.float32)
    source = generate(parse_module(SUM), target)  # type: ignore[arg-type]
    got = emulate.run_module(parse_module(SUM), source, {"x": x}, {"c": 1.0})["o"]
    assert np.array_equal(got, x.sum(1))
    lines = source.partition("for n_0 in range")[2].splitlines()[1:]
    end = next(i for i, x in enumerate(lines) if not x.startswith(12 * " "))
    assert not any("shfl" in x for x in lines[:end])
    assert any("shfl" in x for x in lines[end:])


def test_a_row_of_nothing_and_of_infinities() -> None:
    """Rows of -inf keep weights of 1 for what is no number's distance; a later number makes the sum start afresh."""
    text = SOFTMAX.replace("FACTOR", FACTORS[0]).replace("START", "0.0")
    x = np.full((32, 96), -np.inf, np.float32)
    x[1, 70], x[2, 3], x[2, 95] = 2.0, 1.0, 3.0
    x[3], x[4, 50] = np.linspace(-300, 300, 96), np.nan
    got = emulate.run_module(parse_module(text), generate(parse_module(text), SM_90A), {"x": x}, {"c": 2.0})
    top = np.where(np.isinf(x.max(1)), 0.0, x.max(1)).astype(float)
    want = np.exp(2.0 * (x.astype(float) - top[:, None])).sum(1)
    assert np.allclose(got["o"], want, rtol=1e-6, atol=0, equal_nan=True)
    assert np.array_equal(got["r"], x.max(1), equal_nan=True)
