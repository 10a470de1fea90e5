"""The wgmma tier without a GPU: emulated warpgroups (copies, barriers, matrix units on real values) against float64."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.codegen.wgmma import why_not
from tileloom.compiler.target import SM_80, SM_90A
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]


def product(
    a: str = "m, k",
    b: str = "n, k",
    rows: int = 128,
    columns: int = 64,
    dtype: str = "bf16",
    out: str = "bf16",
) -> str:
    """o = a · b in any transposition, batched."""
    return f"""module g {{ tile g(a: {dtype}[B, {a.upper()}], b: {dtype}[B, {b.upper()}], o: out {out}[B, M, N]) {{
        extents B, M, K, N
        tier wgmma
        for z in B, m in M by {rows}, n in N by {columns} parallel {{
            for k in K by 64 carry (s: f32[m, n] = fill(0.0)) {{
                yield s + dot[k](load a[z, {a}], load b[z, {b}])
            }}
            store o[z, m, n] = {out}(s)
        }}
    }} }}"""


def drawn(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Array:
    return np.random.default_rng(len(shape) + shape[-1]).integers(-3, 4, shape).astype(dtype)


def emulated(
    text: str, inputs: dict[str, Array], scalars: dict[str, float] | None = None, blocks: int = 2
) -> Any:
    module = parse_module(text)
    return emulate.run_module(module, generate(module, SM_90A), inputs, scalars or {}, blocks=blocks)


@pytest.mark.parametrize("b", ["n, k", "k, n"])
@pytest.mark.parametrize("a", ["m, k", "k, m"])
def test_products_in_all_transpositions(a: str, b: str) -> None:
    """Ragged in every dimension, two batches, several tiles a block, so that rings go round."""
    sizes = {"m": 136, "n": 72, "k": 168}
    inputs = {
        "a": drawn(2, *(sizes[x] for x in a.split(", "))),
        "b": drawn(2, *(sizes[x] for x in b.split(", "))),
    }
    left = inputs["a"].astype(float) if a == "m, k" else inputs["a"].astype(float).swapaxes(1, 2)
    right = inputs["b"].astype(float) if b == "k, n" else inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(product(a, b), inputs, blocks=3)["o"]
    assert np.array_equal(got, (left @ right).astype(ml_dtypes.bfloat16))


GATED = """module g { tile g(x: f16[M, K], u: f16[N, K], w: f16[N, K], bias: f32[N], o: out f16[M, N], r: out f32[M, N]) {
    extents M, K, N
    tier wgmma
    for m in M by 64, n in N by 64 parallel {
        for k in K by 64 carry (s: f32[m, n] = fill(0.0), t: f32[m, n] = fill(0.0)) {
            x_tile: f16[m, k] = load x[m, k]
            yield s + dot[k](x_tile, load u[n, k]), t + dot[k](x_tile, load w[n, k])
        }
        v: f32[m, n] = s + load bias[n]
        store o[m, n] = f16(v / (1.0 + exp(-v)) * t)
        store r[m, n] = v
    }
} }"""


def test_two_products_of_one_operand_and_an_epilogue() -> None:
    """One result leaves in boxes, one from registers; the bias is read where it exists."""
    m, k, n = 72, 88, 80
    inputs = {
        "x": drawn(m, k, dtype=np.float16),
        "u": drawn(n, k, dtype=np.float16),
        "w": drawn(n, k, dtype=np.float16),
    }
    inputs |= {"bias": drawn(n, dtype=np.float32)}
    got = emulated(GATED, inputs)
    x, u, w, bias = (inputs[i].astype(float) for i in ("x", "u", "w", "bias"))
    v = x @ u.T + bias
    assert np.array_equal(got["r"], v)
    with np.errstate(over="ignore"):
        want = (v / (1 + np.exp(-v)) * (x @ w.T)).astype(np.float16)
    assert np.allclose(got["o"].astype(float), want.astype(float), rtol=2e-3, atol=1e-4)


WAITS = (
    "await_parity(",
    "arrive(",
    "expect_bytes(",
    "meet(",
    "announce(",
    "publish_shared(",
    "boxes_read_",
    "_settle_",
)


def mutants(source: str, kernel: str) -> list[str]:
    """The source with one wait, arrival or barrier of a kernel left out each."""
    lines = source.splitlines()
    first = next(i for i, x in enumerate(lines) if x.startswith(f"def {kernel}("))
    last = next((i for i in range(first + 1, len(lines)) if lines[i][:1] not in ("", " ", ")")), len(lines))
    found = []
    for i in (i for i in range(first, last) if any(w in lines[i] for w in WAITS)):
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        found.append("\n".join([*lines[:i], f"{indent}pass", *lines[i + 1 :], ""]))
    return found


def test_without_a_wait_arrival_or_barrier_it_fails() -> None:
    """Wrong numbers, or a fault that says what: of the sources without one of them each, at least nine in ten."""
    module = parse_module(product(rows=64))
    source = generate(module, SM_90A)
    inputs = {"a": drawn(1, 72, 320), "b": drawn(1, 136, 320)}
    want = emulate.run_module(module, source, inputs, {}, blocks=2)["o"]
    every = mutants(source, "g")
    missed = [m for m in every if _passes(module, m, inputs, want)]
    assert len(every) >= 12
    assert len(missed) <= len(every) // 10, "\n\n".join(missed)


def _passes(module: Any, source: str, inputs: dict[str, Array], want: Array) -> bool:
    """In both orders of the threads."""
    for backwards in (True, False):
        try:
            got = emulate.run_module(module, source, inputs, {}, blocks=2, backwards=backwards)["o"]
        except emulate.KernelFault:
            return False
        if not np.array_equal(got, want):
            return False
    return True


def test_what_the_copy_engine_cannot_address_goes_another_way() -> None:
    """Rows of 65 elements do not start at multiples of 16 bytes."""
    module = parse_module(product(rows=64))
    inputs = {"a": drawn(1, 64, 65), "b": drawn(1, 64, 65)}
    got = emulate.run_module(module, generate(module, SM_90A), inputs, {}, blocks=1)["o"]
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (product(rows=32), "`m` by 32"),
        (product(columns=12), "has 12 rows; boxes have multiples of 8"),
        (product(dtype="f32"), "a product of f32 and f32"),
        (product().replace("load b[z, n, k]", "load b[z, n, k % 2]"), "no block of rows and columns"),
        (product(rows=128, columns=512), "512"),
    ],
    ids=["rows", "columns", "dtype", "subscripts", "wide"],
)
def test_what_the_tier_does_not_take_is_said(text: str, reason: str) -> None:
    (program,) = parse_module(text).programs
    assert reason in str(why_not(program, SM_90A))
    assert "cuda:sm_80 has no wgmma" in str(why_not(program, SM_80))


def test_a_fitting_program_has_no_reason() -> None:
    (program,) = parse_module(product()).programs
    assert why_not(program, SM_90A) is None


# ---------------------------------------------------------------- machine code

needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


@needs_toolkit
def test_the_machine_code_has_no_spill_and_the_assembler_no_complaint() -> None:
    """The main loop is four matrix instructions for a step of 64, and descriptors stay in uniform registers."""
    from tileloom.runtime.cuda import machine_code

    kernel = machine_code(generate(parse_module(product(columns=256)), SM_90A), "g", SM_90A)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert "C75" not in kernel.log
    sass = kernel.sass
    assert len(re.findall(r"HGMMA\.64x256x16\.F32\.BF16", sass)) == 4
    assert len(re.findall(r"\bUTMALDG\.3D", sass)) == 2
    assert len(re.findall(r"\bUTMASTG\.3D", sass)) == 4
    assert len(re.findall(r"\bUSETMAXREG", sass)) == 2
    first, last = (f(i for i, x in enumerate(sass.splitlines()) if "HGMMA" in x) for f in (min, max))
    assert not [x for x in sass.splitlines()[first:last] if "R2UR" in x or "LDL" in x]
