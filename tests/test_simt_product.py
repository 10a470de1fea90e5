"""Products of the simt tier on register blocks, without a GPU: emulated threads, then machine code."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tileloom.compiler.codegen.deal import BlockDeal, Demand, block_deal
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.interpreter import tile
from tileloom.compiler.target import SM_75, SM_80, cuda_target
from tileloom.compiler.tile_text import parse_module
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


def product(a: str = "M, K", b: str = "K, N", tiles: tuple[int, int, int] = (64, 32, 8)) -> str:
    """c = 0.5 (a b) + bias, with operands in these orders of axes."""
    m, n, k = tiles
    return f"""module g {{ tile g(a: f32[{a}], b: f32[{b}], bias: f32[N], c: out f32[M, N]) {{
        extents M, K, N
        for m in M by {m}, n in N by {n} parallel {{
            for k in K by {k} carry (s: f32[m, n] = fill(0.0)) {{
                yield s + dot[k](load a[{a.lower()}], load b[{b.lower()}])
            }}
            store c[m, n] = 0.5 * s + load bias[n]
        }}
    }} }}"""


def worst(text: str, inputs: dict[str, Array], target: Any = SM_80, preferred: bool = True) -> float:
    """The largest difference from the tile interpreter's values."""
    module = parse_module(text)
    want = tile.run_module(module, inputs, {})
    got = emulate.run_module(module, generate(module, target), inputs, {}, preferred=preferred)
    return max(float(np.abs(got[n].astype(float) - want[n].astype(float)).max()) for n in want)


def drawn(*shape: int) -> Array:
    """Small integers, whose sums of products are exact."""
    return np.random.default_rng(len(shape) + shape[0]).integers(-4, 5, shape).astype(np.float32)


def inputs(m: int, n: int, k: int, a: str = "M, K", b: str = "K, N") -> dict[str, Array]:
    sizes = {"M": m, "N": n, "K": k}
    shapes = {name: tuple(sizes[x] for x in axes.split(", ")) for name, axes in (("a", a), ("b", b))}
    return {"a": drawn(*shapes["a"]), "b": drawn(*shapes["b"]), "bias": drawn(n)}


@pytest.mark.parametrize("b", ["K, N", "N, K"])
@pytest.mark.parametrize("a", ["M, K", "K, M"])
def test_every_order_of_axes(a: str, b: str) -> None:
    """Whole tiles, then the variant that serves any sizes, on sizes that none divides."""
    assert worst(product(a, b), inputs(64, 32, 24, a, b)) == 0
    assert worst(product(a, b), inputs(70, 37, 13, a, b), preferred=False) == 0


def test_rows_of_whole_chunks() -> None:
    assert worst(product(), inputs(65, 36, 12)) == 0


def test_strided_operands() -> None:
    given = inputs(32, 32, 16)
    given["a"], given["b"] = np.repeat(given["a"], 2, 1)[:, ::2], given["b"][::-1]
    assert worst(product(tiles=(32, 64, 8)), given) == 0


def test_without_asynchronous_copies() -> None:
    assert worst(product(), inputs(40, 36, 12), SM_75) == 0
    assert "copy" not in generate(parse_module(product()), SM_75)


def test_a_missing_barrier_is_a_race() -> None:
    module = parse_module(product())
    source = generate(module, SM_80)
    first = source[: source.index("def g_ragged")]
    cut = first.replace("wait_copies1()\n            cuda.syncthreads()", "wait_copies1()")
    assert cut != first
    with pytest.raises(emulate.KernelFault, match="no barrier between"):
        emulate.run_module(module, cut + source[len(first) :], inputs(64, 32, 24), {})


@pytest.mark.parametrize(
    ("m", "n", "rows", "columns"), [(128, 128, 8, 8), (64, 64, 8, 4), (256, 128, 16, 8), (64, 128, 8, 8)]
)
def test_blocks_are_as_square_as_can_be(m: int, n: int, rows: int, columns: int) -> None:
    found = block_deal([Demand("dot", ("m", "n"))], {"m": m, "n": n})
    assert isinstance(found, BlockDeal)
    layout = found.layout(("m", "n"))
    assert [s.count for s in layout.spreads] in ([rows, columns], [columns, rows])
    assert all(s.run == 4 for s in layout.spreads)
    assert found.threads == (128 if m * n < 128 * 128 else 256)


def main_loop(sass: str) -> Counter[str]:
    """Opcodes of the innermost loop with the most fused multiply-adds."""
    rows: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    best: Counter[str] = Counter()
    for line in sass.split("\n"):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(rows)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\w+)(.*);", line):
            rows.append((found[1], found[2]))
            to = re.search(r"\.L_x_\d+", found[2])
            if found[1] == "BRA" and to and labels.get(to[0], len(rows)) < len(rows):
                here = Counter(op for op, _ in rows[labels[to[0]] :])
                if here["FFMA"] > best["FFMA"] or (
                    here["FFMA"] == best["FFMA"] and here.total() < best.total()
                ):
                    best = here
    return best


@needs_toolkit
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_the_main_loop_is_fused_multiply_adds(target: str) -> None:
    """Two blocks fit a multiprocessor of sm_90, nothing is spilled, operands are read 16 bytes at a time."""
    from tileloom.runtime.machine_code import machine_code

    source = generate(parse_module(product(tiles=(128, 128, 8))), cuda_target(target))
    kernel = machine_code(source, "g", cuda_target(target))
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert kernel.registers <= (128 if target == "cuda:sm_90a" else 200)
    found = main_loop(kernel.sass)
    assert found["FFMA"] == 8 * 64
    assert found["LDS"] == 8 * 4
    assert len(re.findall(r"\bLDS\.128\b", kernel.sass)) == 8 * 4
    assert found["FFMA"] >= 0.75 * found.total()
    assert len(re.findall(r"\bSTG\.E\.128\b", kernel.sass)) == 16
