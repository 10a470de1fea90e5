"""Tile programs as source: inference, located errors, bounds, and equality with what the compiler makes of definitions."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from tileloom.api import compile, load, parse
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.tile_kernel import TilesKernel
from tileloom.compiler.tile_text import print_module
from tileloom.dsl.diagnostics import TileError

ROOT = Path(__file__).parent.parent
TILES = ROOT / "examples" / "tiles"
EXAMPLES = sorted((ROOT / "examples").glob("*.tile"))


def tiles(text: str) -> TilesKernel:
    program = parse(text)
    (name,) = program.tiles
    kernel = program[name]
    assert isinstance(kernel, TilesKernel)
    return kernel


def by_hand(name: str) -> TilesKernel:
    kernel = load(TILES / f"{name}.tile")[f"{name}_tiles"]
    assert isinstance(kernel, TilesKernel)
    return kernel


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return [rng.standard_normal(s, np.float32) for s in shapes]


# ---------------------------------------------------------------- the three by hand


def test_matmul_by_hand_has_the_bits_of_the_compiled_one() -> None:
    text = "kernel matmul(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }"
    schedule = Schedule("s", "matmul", "cpu", tiles=(("m", 64), ("n", 128), ("k", 256)))
    arguments = normal((70, 300), (300, 130))
    for target in ("cpu", "interp"):
        hand = compile(by_hand("matmul"), target=target)(*arguments)
        if target == "cpu":
            made = compile(parse(text)["matmul"], schedule=schedule)(*arguments)
            assert hand.tobytes() == made.tobytes()
        np.testing.assert_allclose(hand, np.float64(arguments[0]) @ arguments[1], rtol=0, atol=1e-4)


def test_attention_by_hand_agrees_with_the_compiled_one() -> None:
    """Within the rounding of the scores, which one scales before and the other after the product."""
    q, k, v = normal((1, 2, 70, 64), (1, 2, 200, 64), (1, 2, 200, 48))
    hand = compile(by_hand("attention"))(q, k, v, 0.125)
    made = compile(load(ROOT / "examples/plain_attention.tile")["plain_attention"])(q, k, v, scale=0.125)
    np.testing.assert_allclose(hand, made, rtol=0, atol=2e-6)
    again = compile(by_hand("attention"), target="interp")(q, k, v, 0.125)
    np.testing.assert_allclose(again, made, rtol=0, atol=2e-6)


def test_softmax_by_hand_agrees_with_the_compiled_one() -> None:
    (x,) = normal((13, 700))
    x[3] = -np.inf
    x[5, 300:] = -np.inf
    hand = compile(by_hand("softmax"))(x)
    made = compile(load(ROOT / "examples/softmax.tile")["row_softmax"])(x)
    np.testing.assert_allclose(hand, made, rtol=1e-6, atol=1e-9)
    assert not hand[3].any()
    assert not hand[5, 300:].any()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_what_the_compiler_prints_is_source(path: Path) -> None:
    """Read as source, the printed module is the same module, for every kernel and for the naive version of it."""
    program = load(path)
    for name, kernel in program.kernels.items():
        if kernel.span.source is not program.file.source:
            continue
        for fuse in ("all", "none"):
            made = compile(program[name], fuse=fuse).compilation()
            read = tiles(print_module(made.module))
            assert read.text.module == made.module
            assert set(read.graph.outputs) == set(made.written.outputs)
            assert set(read.graph.order) == set(made.written.order)


# ---------------------------------------------------------------- inference

SCALE_ROWS = """tile rows(x: f16[M, N], y: out f32[M, N], n: out i64[M]) {
    for mt in M by 2 parallel {
        for nt in N by 4 carry (top = fill(-inf, [mt]), count = fill(0, [mt])) {
            xt = load x[mt, nt]
            yield (max(top, max[nt](xt)), count + sum[nt](xt > 0))
        }
        store n[mt] = count
        half = 0.5 * top
        for nt in N by 4 {
            store y[mt, nt] = load x[mt, nt] - half
        }
    }
}
"""


def test_types_are_inferred() -> None:
    text = print_module(tiles(SCALE_ROWS).text.module)
    assert "carry (top: f32[mt] = fill(-inf), count: i64[mt] = fill(0))" in text
    assert "xt: f16[mt, nt] = load x[mt, nt]" in text
    assert "half: f32[mt] = 0.5 * top" in text
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float16)
    for target in ("cpu", "interp"):
        y, n = compile(tiles(SCALE_ROWS), target=target)(x)
        np.testing.assert_array_equal(n, (x > 0).sum(1))
        np.testing.assert_allclose(y, x - 0.5 * x.max(1, keepdims=True), atol=1e-3)


def test_literals_adapt() -> None:
    text = (
        "tile t(x: f64[N], i: i32[N], y: out f64[N], j: out i32[N]) { for nt in N by 4 parallel {"
        " store y[nt] = 0.1 * load x[nt] + 1  store j[nt] = load i[nt] * 2 + 1 } }"
    )
    kernel = tiles(text)
    assert "0.1f64 * load x[nt] + 1.0f64" in print_module(kernel.text.module)
    y, j = compile(kernel, target="interp")(np.array([3.0, 7.0]), np.array([5, -2], np.int32))
    np.testing.assert_array_equal(y, np.array([3.0, 7.0]) * 0.1 + 1)
    np.testing.assert_array_equal(j, [11, -3])


def test_nested_loops_find_their_types() -> None:
    """Each carried 0 turns out to be f32 only in the innermost loop."""
    depth = 12
    heads = [
        f"for a{i} in N by 2 carry (c{i} = {'fill(0)' if i == 0 else f'c{i - 1}'}) {{" for i in range(depth)
    ]
    text = (
        "tile t(x: f32[N], y: out f32[1]) {\n"
        + "\n".join(heads)
        + f"\nyield c{depth - 1} + sum[a{depth - 1}](load x[a{depth - 1}])\n}}\n"
        + "\n".join(f"yield c{i}\n}}" for i in range(depth - 1, 0, -1))
        + "\nstore y[0] = c0\n}\n"
    )
    kernel = tiles(text)
    assert "carry (c0: f32 = fill(0.0))" in print_module(kernel.text.module)


def test_static_extents_take_the_size_of_each_call() -> None:
    rows = compile(by_hand("attention"), target="interp")
    for d in (8, 24):
        q, k, v = normal((1, 1, 3, d), (1, 1, 5, d), (1, 1, 5, d))
        s = np.float64(q) @ np.swapaxes(k, 2, 3)
        p = np.exp(s - s.max(-1, keepdims=True))
        np.testing.assert_allclose(rows(q, k, v, 1.0), p / p.sum(-1, keepdims=True) @ v, atol=1e-5)
        assert rows.compilation(q, k, v, 1.0).statics == {"D": d, "E": d}


def test_requirements_and_examples_count() -> None:
    kernel = compile(by_hand("attention"), target="interp")
    assert kernel.compilation().sizes["M"] == 200
    q, k, v = normal((1, 1, 3, 8), (1, 1, 5, 8), (1, 1, 5, 8))
    with pytest.raises(ValueError, match=r"requires scale > 0 \(scale = -1"):
        kernel(q, k, v, -1.0)


# ---------------------------------------------------------------- bounds

SHIFT = "tile shift(x: f32[N], y: out f32[N], by: i64) {{ for nt in N by 4 parallel {{ store y[nt] = {} }} }}"


def test_accesses_are_checked_at_each_call() -> None:
    kernel = compile(tiles(SHIFT.format("load x[nt + by]")), target="interp")
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(kernel(x, 0), x)
    with pytest.raises(ValueError, match=r"index 1 of `x`, `nt \+ by`, leaves its axis.*by = 1"):
        kernel(x, 1)


def test_guards_of_the_expression_count() -> None:
    kernel = compile(tiles(SHIFT.format("where(nt + by < N and nt + by >= 0, load x[nt + by], 0)")))
    np.testing.assert_array_equal(kernel(np.arange(5, dtype=np.float32), 2), [2, 3, 4, 0, 0])


@pytest.mark.parametrize(
    ("value", "code"),
    [("load x[nt + 1]", "E0401"), ("load x[i64(exp(f32(nt)))]", "E0402"), ("load x[nt // 0]", "E0403")],
)
def test_accesses_that_leave_a_tensor_are_refused(value: str, code: str) -> None:
    with pytest.raises(TileError) as caught:
        tiles(SHIFT.format(value))
    found = caught.value.diagnostics[0]
    assert found.code == code
    assert found.span is not None


def test_places_that_come_from_tensors_are_clamped() -> None:
    body = "for mt in M by 4 parallel { at = load i[mt] store y[mt] = load x[at] }"
    text = f"tile take(x: f32[N], i: i32[M], y: out f32[M]) {{ {body} }}"
    got = compile(tiles(text))(np.arange(3, dtype=np.float32), np.array([1, -5, 9, 2], np.int32))
    np.testing.assert_array_equal(got, [1, 0, 2, 2])


# ---------------------------------------------------------------- errors, each at its place

GOOD = """tile t<D: static>(x: f32[M, D], s: f32, y: out f32[M]) {
    for mt in M by 8 parallel {
        xt = load x[mt, d = :]
        store y[mt] = s * sum[d](xt)
    }
}
"""
WRONG = {
    "unknown name": ("s * sum", "z * sum", "E0603", "z"),
    "tensor as a value": ("s * sum[d](xt)", "x", "E0603", "x"),
    "tensor without load": ("load x[mt, d = :]", "x[mt, d]", "E0605", "x"),
    "store without store": ("store y[mt]", "y[mt]", "E0605", "y"),
    "input written": ("store y[mt]", "store x[mt, d]", "E0613", "x"),
    "output read": ("load x[mt, d = :]", "load y[mt]", "E0611", "load"),
    "unknown tensor": ("load x[mt", "load w[mt", "E0603", "w"),
    "rank": ("load x[mt, d = :]", "load x[mt]", "E0611", "load"),
    "axis lacking": ("sum[d](xt)", "sum[d](s)", "E0611", "sum"),
    "axis left": ("s * sum[d](xt)", "s * xt", "E0611", "*"),
    "types": ("s * sum[d](xt)", "s and sum[d](xt)", "E0611", "and"),
    "whole axis not static": ("<D: static>", "", "E0612", "d"),
    "colon without a name": ("d = :", ":", "E0612", ":"),
    "kind of an extent": ("D: static", "D: fixed", "E0612", "fixed"),
    "operation": ("sum[d](xt)", "sinus(s)", "E0605", "sinus"),
    "reduction": ("sum[d]", "total[d]", "E0605", "total"),
    "two values of one name": ("        store", "        xt = load x[mt, d]\n        store", "E0616", "xt"),
    "race": ("store y[mt] = s * sum[d](xt)", "store y[0] = s", "E0616", "store"),
    "bracket": ("(xt)", "(xt", "E0601", "}"),
    "character": ("s * sum", "s ? sum", "E0601", "?"),
    "declared type": ("xt = load", "xt: f16[mt, d] = load", "E0611", "load"),
    "bool stored": ("s * sum[d](xt)", "s > 0", "E0611", ">"),
    "tile size": ("by 8", "by D", "E0601", "D"),
}


def test_the_good_one_is_good() -> None:
    tiles(GOOD)


@pytest.mark.parametrize("what", WRONG)
def test_errors_stand_at_their_place(what: str) -> None:
    old, new, code, word = WRONG[what]
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(TileError) as caught:
        tiles(text)
    found = caught.value.diagnostics[0]
    assert found.code == code, found.message
    assert found.span is not None
    assert found.span.text.startswith(word), found.render()
    assert found.span.source.text == text


def test_carried_values_keep_their_type() -> None:
    text = SCALE_ROWS.replace("count + sum[nt](xt > 0)", "xt")
    with pytest.raises(
        TileError, match=r"E0614.*`count` is carried as f16\[mt\], but its next value is f16\[mt, nt\]"
    ):
        tiles(text)
    text = SCALE_ROWS.replace("count = fill(0, [mt])", "count: i32[mt] = fill(0)")
    with pytest.raises(TileError, match=r"E0614.*`count` is carried as i32, but its next value is i64"):
        tiles(text)


def test_mutated_texts_give_programs_or_diagnostics() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sorted(TILES.glob("*.tile"))] + [SCALE_ROWS, GOOD]
    rng = random.Random(7)
    words = [re.findall(r"\w+|[^\w\s]", t) for t in texts]
    refused = 0
    for _ in range(1500):
        i = rng.randrange(len(texts))
        parts = re.split(r"(\w+|[^\w\s])", texts[i])
        for _ in range(rng.randint(1, 3)):
            parts[rng.randrange(len(parts))] = rng.choice([*rng.choice(words), "", "\n", "-1", "1.5", "§"])
        try:
            program = parse("".join(parts))
            for name in program.tiles:
                program[name]
        except TileError:
            refused += 1
    assert refused > 500


def test_gradients_are_accepted_and_say_that_they_are_not_derived() -> None:
    text = "kernel k(x: f32[N]) -> y: f32[N] { y[n] = x[n] * x[n] }\n\ngrad k wrt x as k_grad\n"
    program = parse(text)
    with pytest.raises(
        TileError, match=r"E0701.*`k_grad` is the gradient of `k`, which this version does not derive"
    ):
        program["k_grad"]
