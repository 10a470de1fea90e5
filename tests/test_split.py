"""Reductions divided over blocks: the tile interpreter, emulated threads and float64 agree, and sizes decide."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.interpreter import tile
from tileloom.compiler.passes.split import split_into
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import CPU, SM_80, SM_90A
from tileloom.compiler.tile_ir import TileModule
from tileloom.compiler.tile_text import parse_module, print_module
from tileloom.compiler.verify import verify_module
from tileloom.dsl.types import DType
from tileloom.runtime import emulate
from tileloom.runtime.threads import thread_limit

Array = np.ndarray[Any, Any]
TOTAL = "kernel total(x: f32[M, N]) -> y: f32 {\n  y = sum[m, n](x[m, n])\n}\n"
LARGEST = "kernel largest(x: f32[M, N]) -> y: f32[M] {\n  y[m] = max[n](x[m, n])\n}\n"
PRODUCT = "kernel product(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] {\n  c[m, n] = 2 * sum[k](a[m, k] * b[k, n])\n}\n"
ATTENTION = """kernel attention(q: f32[M, D], k: f32[N, D], v: f32[N, E], scale: f32) -> (o: f32[M, E], lse: f32[M]) {
  s[m, n] = scale * sum[d](q[m, d] * k[n, d])
  p[m, n] = softmax[n | n <= m](s[m, n])
  o[m, e] = sum[n](p[m, n] * v[n, e])
  lse[m] = logsumexp[n | n <= m](s[m, n])
}
"""


def compiled(text: str, sizes: dict[str, int], tiles: str = "", target: Any = SM_80) -> Compilation:
    (name,) = [w.partition("(")[0] for w in text.split() if "(" in w][:1]
    stated = (
        parse_schedule(f"schedule s for {name} on {target.name} {{\n fuse all\n {tiles}\n}}")
        if tiles
        else None
    )
    return compile_kernel(tl.parse(text)[name], target, sizes, schedule=stated)


def divided(c: Compilation, axis: str, parts: int) -> TileModule:
    programs, scratch = split_into(c.module.programs[0], c.cascades[0][-1], axis, parts)
    module = TileModule(c.module.name, programs, scratch)
    verify_module(module, "split")
    return module


def agrees(module: TileModule, want: dict[str, Array], tensors: dict[str, Array], **scalars: float) -> None:
    """Both the interpreter's and the emulated values are those of float64."""
    emulated = emulate.run_module(module, generate(module, SM_80), tensors, scalars)
    for got in (tile.run_module(module, tensors, scalars), emulated):
        for name, exact in want.items():
            np.testing.assert_allclose(got[name], exact, rtol=2e-6, atol=2e-6)


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_one_sum_over_either_axis(axis: str) -> None:
    x = drawn(7, 300)
    module = divided(compiled(TOTAL, {"M": 7, "N": 300}, "tile n by 64"), axis, 4)
    agrees(module, {"y": x.astype(float).sum()}, {"x": x})


def test_more_parts_than_there_is_to_read() -> None:
    """Parts without an element leave what the reduction starts from."""
    x = drawn(3, 70) - 9
    module = divided(compiled(LARGEST, {"M": 3, "N": 70}, "tile n by 64"), "n", 8)
    agrees(module, {"y": x.max(1)}, {"x": x})


@pytest.mark.parametrize("parts", [2, 4])
def test_products(parts: int) -> None:
    a, b = np.rint(drawn(33, 40)), np.rint(drawn(40, 36))
    module = divided(
        compiled(PRODUCT, {"M": 33, "N": 36, "K": 40}, "tile m by 64, n by 32, k by 8"), "k", parts
    )
    agrees(module, {"c": 2 * a.astype(float) @ b.astype(float)}, {"a": a, "b": b})


def test_a_cascade_merges_by_its_own_repair() -> None:
    """Causal attention: full and partial tiles, parts that some rows see nothing of."""
    q, k, v = drawn(20, 8), drawn(40, 8), drawn(40, 4)
    sizes = {"M": 20, "N": 40, "D": 8, "E": 4}
    module = divided(compiled(ATTENTION, sizes, "tile m by 16, n by 8"), "n", 4)
    s = 0.3 * q.astype(float) @ k.astype(float).T
    s[np.triu_indices(20, 1, 40)] = -np.inf
    weights = np.exp(s - s.max(1, keepdims=True))
    total = weights.sum(1)
    want = {"o": weights @ v / total[:, None], "lse": np.log(total) + s.max(1)}
    agrees(module, want, {"q": q, "k": k, "v": v}, scale=0.3)


@pytest.mark.parametrize("tier", ["mma", "wgmma"])
def test_what_a_merge_does_not_read_is_not_said_of_it(tier: str) -> None:
    """Rows of either sign keep `scale` inside the sums: the merge has no such scalar, nor is told that it is positive."""
    text = """kernel rows(q: bf16[M, D], k: bf16[N, D], v: bf16[N, E], w: f32[M], scale: f32) -> o: f32[M, E] {
      require scale > 0
      p[m, n] = softmax[n](w[m] * (scale * sum[d](q[m, d] * k[n, d])))
      o[m, e] = sum[n](p[m, n] * v[n, e])
    }"""
    made = compiled(
        text, {"M": 5, "N": 40, "D": 16, "E": 16}, f"tier {tier}\n tile n by 16\n split n by 2", SM_90A
    )
    parts, merge = made.module.programs
    assert "@positive" in print_module(made.module)
    assert [s.name for s in parts.scalars] == ["scale"]
    assert not merge.scalars
    given = {"q": drawn(5, 16), "k": drawn(40, 16), "v": drawn(40, 16)[::-1]}
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in given.items()} | {"w": drawn(5)}
    q, k, v = (tensors[n].astype(float) for n in "qkv")
    weights = np.exp(tensors["w"][:, None] * 0.25 * (q @ k.T))
    want = weights @ v / weights.sum(1, keepdims=True)
    got = emulate.run_module(made.module, made.source, tensors, {"scale": 0.25})["o"]
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("text", "sizes", "parts"),
    [
        (TOTAL, {"M": 1 << 14, "N": 1 << 14}, 1024),
        (TOTAL, {"M": 64, "N": 64}, 1),
        (LARGEST, {"M": 8, "N": 1 << 22}, 128),
        (LARGEST, {"M": 1 << 14, "N": 1 << 14}, 1),
        (PRODUCT, {"M": 64, "N": 256, "K": 1 << 14}, 64),
        (PRODUCT, {"M": 4096, "N": 4096, "K": 4096}, 1),
    ],
)
def test_sizes_decide(text: str, sizes: dict[str, int], parts: int) -> None:
    made = compiled(text, sizes, target=SM_90A)
    found = [p.shape[0].value for p in made.module.scratch]  # type: ignore[union-attr]
    assert found == ([parts] if parts > 1 else [])
    told = [r for r in made.remarks if r.pass_name == "split"]
    assert len(told) == (parts > 1)
    assert all(f"over {parts} blocks" in r.message for r in told)


@pytest.mark.parametrize(
    ("text", "sizes", "parts"),
    [
        (TOTAL, {"M": 1 << 13, "N": 1 << 13}, 16),
        (TOTAL, {"M": 64, "N": 64}, 1),  # it takes less than handing it over
        (LARGEST, {"M": 8, "N": 1 << 22}, 1),
        (LARGEST, {"M": 1 << 13, "N": 1 << 13}, 1),  # a task a row is enough
        (PRODUCT, {"M": 8, "N": 1024, "K": 8192}, 8),
        (PRODUCT, {"M": 64, "N": 64, "K": 8192}, 1),  # rows enough to copy operands for
        (ATTENTION.replace("n <= m", "n >= m"), {"M": 1, "N": 1 << 18, "D": 64, "E": 64}, 16),
    ],
)
def test_sizes_decide_on_a_cpu(text: str, sizes: dict[str, int], parts: int) -> None:
    made = compiled(text, sizes, target=CPU)
    assert {p.shape[0].value for p in made.module.scratch} == ({parts} if parts > 1 else set())  # type: ignore[union-attr]
    told = [r.message for r in made.remarks if r.pass_name == "split"]
    assert len(told) == (parts > 1)
    assert all(f"over {parts} tasks" in message for message in told)


def test_parts_on_a_cpu_give_the_same_bits_on_any_number_of_threads() -> None:
    """Attention of one query and a product of few rows, with fewer keys than parts too, against float64."""
    attend = tl.compile(tl.parse(ATTENTION.replace(" | n <= m", ""))["attention"], schedule=SPLIT_ATTENTION)
    for n in (1, 5, 700, 3000):
        q, k, v = drawn(1, 64), drawn(n, 64), drawn(n, 64)
        s = 0.3 * q.astype(float) @ k.astype(float).T
        weights = np.exp(s - s.max())
        with thread_limit(1):
            o, lse = attend(q, k, v, scale=0.3)
        with thread_limit(3):
            again = attend(q, k, v, scale=0.3)
        assert np.array_equal(o, again[0])
        assert np.array_equal(lse, again[1])
        np.testing.assert_allclose(o, weights @ v / weights.sum(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, np.log(weights.sum(1)) + s.max(1), rtol=1e-6)
    multiply = tl.compile(tl.parse(PRODUCT)["product"])
    a, b = np.rint(drawn(8, 8192)), np.rint(drawn(8192, 1024))
    with thread_limit(2):
        assert np.array_equal(multiply(a, b), 2 * a.astype(float) @ b)
    assert multiply.stages["tile"].count("product_parts") >= 1


SPLIT_ATTENTION = (
    "schedule s for attention on cpu {\n    fuse all\n    tile m by 8, n by 64\n    split n by 16\n}"
)
DIVIDED = {"M": 16, "N": 8, "K": 16384}


def test_a_merge_starts_early_and_waits() -> None:
    """The second launch may start before the first has ended, where a target has that, and touches nothing before."""
    made = compiled(PRODUCT, DIVIDED, "tile m by 16, n by 8, k by 16\nsplit k by 2", target=SM_90A)
    assert [[a.name for a in p.attributes] for p in made.module.programs] == [["primary"], ["secondary"]]
    assert verify_module(parse_module(print_module(made.module)), "split") is None
    a, b = np.rint(drawn(16, 48)), np.rint(drawn(48, 8))
    run = emulate.run_module(made.module, made.source, {"a": a, "b": b}, {})
    assert np.array_equal(run["c"], 2 * a @ b)
    with pytest.raises(emulate.KernelFault, match="touched while the launch before may still run"):
        emulate.run_module(made.module, made.source.replace("await_primary()", "pass"), {"a": a, "b": b}, {})
    for target in (SM_80, SM_90A):
        source = compiled(
            PRODUCT, DIVIDED, "tile m by 16, n by 8, k by 16\nsplit k by 2", target=target
        ).source
        assert ('"secondary": True' in source) == (target is SM_90A)
        assert ("release_secondary()" in source) == (target is SM_90A)


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
def test_the_driver_is_told_that_a_launch_starts_early() -> None:
    from cuda.bindings import driver

    from tileloom.runtime import machine_code
    from tileloom.runtime.driver import LaunchAttribute, LaunchShape

    kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert (
        ctypes.sizeof(LaunchAttribute) == 72
    )  # CUlaunchAttribute: an id, 4 bytes of padding, a union of 64 bytes
    assert ctypes.sizeof(LaunchShape) == 56
    early, plain = (LaunchShape.of(4, 128, 0, x) for x in (True, False))
    assert (plain.attributes, plain.attribute_count) == (None, 0)
    assert early.attribute_count == 1
    told = LaunchAttribute.from_address(early.attributes or 0)
    assert (told.kind, told.value) == (int(kind), 1)
    made = compiled(PRODUCT, DIVIDED, "tile m by 16, n by 8, k by 16\nsplit k by 2", target=SM_90A)
    variants = {p: {v.secondary for v in found} for p, found in machine_code.variants(made.source).items()}
    assert variants == {"product_parts": {False}, "product": {True}}
    sass = machine_code.machine_code(made.source, "product", SM_90A).sass
    assert sass.index("ACQBULK") < sass.index("LDG")  # griddepcontrol.wait
    assert (
        "PREEXIT" in machine_code.machine_code(made.source, "product_parts", SM_90A).sass
    )  # griddepcontrol.launch_dependents


def test_variants_are_told_with_the_tiers_that_they_have() -> None:
    kernel = tl.load(Path(__file__).parent.parent / "examples" / "matmul_gelu.tile")["matmul_gelu"]
    sizes = {"M": 1024, "N": 1024, "K": 1024}
    made = compile_kernel(kernel, SM_90A, sizes, dtypes={"T": DType.BF16})
    (told,) = [r.message for r in made.remarks if r.name == "variants"]
    first, *_, last = told.split("; else ")
    assert first.startswith("matmul_gelu: a call runs `matmul_gelu_whole` of tier wgmma where ")
    assert last == "`matmul_gelu_any` of tier mma for any sizes, strides and alignment"


def test_variants_are_told() -> None:
    """Which kernel a call runs is a remark: the preferred one, and the one that serves all."""
    made = compiled(PRODUCT, {"M": 256, "N": 256, "K": 64})
    (told,) = [r.message for r in made.remarks if r.name == "variants"]
    assert told.startswith("product: a call runs `product` where ")
    assert "N is a multiple of 64" in told
    assert "rows of" in told
    assert told.endswith("else `product_any` for any sizes, strides and alignment")
    assert not [
        r
        for r in compile_kernel(tl.parse(PRODUCT)["product"], CPU, made.sizes).remarks
        if r.name == "variants"
    ]
