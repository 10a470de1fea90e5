"""Programs that nobody would write first: each gives the tensor interpreter's result however it is grouped and cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.__main__ import main
from tileloom.arguments import bind
from tileloom.compiler.calls import extents_of
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import tensor, tile
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule import Fuse, Schedule
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import CPU, SM_80, SM_90A, Target
from tileloom.compiler.tensor_text import parse_graph, print_graph
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

RNG = np.random.default_rng(5)
FUSE: tuple[Fuse, ...] = ("none", "all", "auto")
Tiles = tuple[tuple[str, int], ...]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def agree(
    text: str, given: Mapping[str, Any], *cuts: Tiles, targets: tuple[Target, ...] = (CPU, SM_80)
) -> dict[str, Any]:
    """The tensor interpreter's results, after comparing those of every grouping and cut with them."""
    program = tl.parse(text)
    kernel = program[next(iter(program.kernels))]
    call = bind(kernel.kernel, (), given)
    graph = elaborate(kernel, call.dtypes)
    assert parse_graph(print_graph(graph)) == graph
    extents = extents_of(graph, call.shapes, call.scalars)
    wanted = tensor.run(graph, call.tensors, call.scalars)
    for target in targets:
        for fuse in FUSE:
            for tiles in ((), *cuts):
                schedule = Schedule("k", kernel.kernel.name.name, target.name, fuse, tiles=tiles)
                made = compile_kernel(
                    kernel, target, extents, dtypes=call.dtypes, options=Options(fuse=fuse), schedule=schedule
                )
                got = tile.run_module(made.module, call.tensors, {**call.scalars, **extents})
                for name, want in wanted.items():
                    np.testing.assert_allclose(
                        got[name],
                        want,
                        rtol=1e-5,
                        atol=1e-5,
                        err_msg=f"{name}, fuse {fuse}, {tiles} on {target.name}",
                    )
    return wanted


def test_a_launch_stands_after_all_that_it_reads() -> None:
    """e shares its sum with b, and reads o, which reads b: with b stored, e must not join the launch of b."""
    x = normal(5, 7)
    found = agree(
        "kernel k(x: f64[M, N]) -> (o: f64[M], e: f64[M]) {\n    o[m] = b[m] + 1\n    e[m] = o[m] * a[m]\n"
        "    b[m] = a[m] * 2\n    a[m] = sum[n](x[m, n])\n}\n",
        {"x": x},
    )  # fmt: skip
    a = x.sum(1)
    np.testing.assert_allclose(found["e"], (2 * a + 1) * a, rtol=1e-12)


@pytest.mark.parametrize(
    "such", ["b + d > f", "b <= d and d <= f and a < b + 1", "f - b >= 0 and d - f > -3", "b - f < e - d"]
)
def test_predicates_that_join_several_reduced_axes(such: str) -> None:
    """A loop's bound may use the axes opened before it, and only those."""
    agree(
        "kernel k(x: f64[A, B, D, E, F], y: f64[F, B, D]) -> (q: f64[A, E], r: f64[A, E]) {\n"
        f"    q[a, e] = logsumexp[d, f, b | {such}](x[a, b, d, e, f])\n"
        f"    r[a, e] = sum[b, d, f](softmax[b, d, f | {such}](x[a, b, d, e, f]) * y[f, b, d])\n}}\n",
        {"x": normal(2, 3, 2, 3, 5), "y": normal(5, 3, 2)},
        (("f", 2), ("b", 2)),
        (("d", 1), ("f", 3)),
        targets=(CPU,),
    )


def test_a_kernel_of_declared_extents_only() -> None:
    found = agree(
        "kernel k<N: extent>(d: i32) -> (o: i64[N], p: i64[N]) {\n    o[i] = (i - 5) // d\n    p[i] = (i - 5) % d\n}\n",
        {"N": 11, "d": -3},
    )  # fmt: skip
    steps = np.arange(11) - 5
    np.testing.assert_array_equal(found["o"], steps // -3)
    np.testing.assert_array_equal(found["p"], steps % -3)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("c[n] = c[N - 1 - n]", lambda c: c[::-1]),
        ("before[n] = c[n]\n    c[n] = before[N - 1 - n] + before[n]", lambda c: c[::-1] + c),
        ("c[n] += c[n] + sum[j in N | j < n](c[j])", lambda c: 2 * c + np.cumsum(c) - c),
        ("c[n] = softmax[n](c[n])", lambda c: np.exp(c) / np.exp(c).sum()),
        ("c[n] += 1\n    d[n] = c[N - 1 - n]", lambda c: c + 1),
        ("c[n] = d[N - 1 - n]\n    d[n] = c[n]", lambda c: 3 * c[::-1]),
    ],
)
def test_reads_of_an_updated_parameter_see_what_it_held_before(body: str, wanted: Any) -> None:
    c = normal(9)
    other = "" if "d[n]" in body else "    d[n] = 0\n"
    head = "kernel k(c: inout f64[N], d: inout f64[N]) -> s: f64[N] {\n    s[n] = 2 * c[n]\n"
    text = f"{head}    {body}\n{other}}}\n"
    given = {"c": c.copy(), "d": 3 * c}
    found = agree(text, given, (("n", 4),))
    np.testing.assert_array_equal(given["c"], c)
    np.testing.assert_allclose(found["c"], wanted(c), rtol=1e-12)
    np.testing.assert_allclose(found["s"], 2 * c, rtol=1e-12)
    kernel = tl.compile(tl.parse(text)["k"], target="cpu")
    np.testing.assert_allclose(kernel(**given), 2 * c, rtol=1e-12)
    np.testing.assert_allclose(given["c"], found["c"], rtol=1e-12)
    np.testing.assert_allclose(given["d"], found["d"], rtol=1e-12)


def test_the_schedule_of_a_kernel_with_a_copy_can_be_given_back() -> None:
    text = "kernel k(c: inout f64[N]) {\n    c[n] = softmax[n](c[n]) + c[N - 1 - n]\n}\n"
    kernel = tl.parse(text)["k"]
    shown = compile_kernel(kernel, CPU, {"N": 9}).snapshots["schedule"]
    c = normal(9)
    wanted = np.exp(c) / np.exp(c).sum() + c[::-1]
    tl.compile(kernel, schedule=shown)(c)
    np.testing.assert_allclose(c, wanted, rtol=1e-12)


def test_long_expressions_compile() -> None:
    """No pass recurses over the depth of an expression."""
    terms = " + ".join(f"x[n] * {i}.5" for i in range(700))
    many = " + ".join(["m"] * 700)
    text = (
        "kernel k(x: f64[N]) -> (o: f64[N], s: f64[N]) {\n"
        f"    o[n] = {terms}\n    s[m] = sum[n | n <= {many}](x[n])\n}}\n"
    )
    x = normal(5)
    found = agree(text, {"x": x}, targets=(CPU,))
    np.testing.assert_allclose(found["o"], x * sum(i + 0.5 for i in range(700)), rtol=1e-12)


@pytest.mark.parametrize("target", ["cpu", "interp", "cuda:sm_80"])
def test_an_extent_that_only_an_unused_parameter_has(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The tile program has no such parameter."""
    text = "kernel k(x: f32[M, N], u: f32[M]) -> p: f32[M, N] {\n    example M = 3, N = 5\n    p[m, n] = u[m]\n}\n"
    given = {"x": normal(3, 5).astype(np.float32), "u": normal(3).astype(np.float32)}
    if target == "cuda:sm_80":
        monkeypatch.setattr("tileloom.runtime.machine_code.toolkit_installed", lambda: True)
        monkeypatch.setattr("tileloom.runtime.driver.present", lambda number=0: SM_80)
        monkeypatch.setattr(
            "tileloom.runtime.device_copies.run_module",
            lambda module, source, tensors, scalars: emulate.run_module(
                module, source.text, tensors, scalars
            ),
        )
    got = tl.compile(tl.parse(text)["k"], target=target)(**given)
    np.testing.assert_array_equal(got, np.broadcast_to(given["u"][:, None], (3, 5)))
    if target == "cpu":
        path = tmp_path / "k.tile"
        path.write_text(text)
        assert main(["run", str(path), "--verify-each"]) == 0
        assert "after lower" in capsys.readouterr().out


MANY = "kernel k<T: f16>(a: T[M, K], {0}) -> o: T[M, N] {{\n    o[m, n] = {1}\n}}\n"
ATTENTION = """kernel k<T: f16>(q: T[M, D], k: T[N, D], v: T[N, E]) -> o: T[M, E] {
    p[m, n] = softmax[n | n <= m](sum[d](q[m, d] * k[n, d]))
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""


@pytest.mark.parametrize("clause", ["tile m by 1", "tile n by 1", "tile m by 1, n by 1"])
def test_tiles_of_one_element(clause: str) -> None:
    sizes = {"M": 5, "N": 6, "D": 8, "E": 4}
    schedule = parse_schedule(f"schedule s for k on cuda:sm_90a {{ {clause} }}")
    made = compile_kernel(tl.parse(ATTENTION)["k"], SM_90A, sizes, dtypes={"T": DType.F16}, schedule=schedule)
    given = {
        n: normal(sizes[s[0]], sizes[s[1]]).astype(np.float16)
        for n, s in zip("qkv", ("MD", "ND", "NE"), strict=True)
    }
    wanted = tensor.run(made.written, given, {}, precision="float64")["o"]
    np.testing.assert_allclose(
        emulate.run_module(made.module, made.source, given, {})["o"], wanted, rtol=1e-2, atol=1e-2
    )


def test_more_products_than_one_tile_has_columns_for() -> None:
    """Rows of 64 columns come together, of each operand."""
    sizes, names = {"M": 20, "N": 24, "K": 16}, [f"b{i}" for i in range(5)]
    products = [f"tanh(sum[k](a[m, k] * {b}[k, n]))" for b in names]
    text = MANY.format(", ".join(f"{b}: T[K, N]" for b in names), " + ".join(products))
    made = compile_kernel(tl.parse(text)["k"], SM_90A, sizes, dtypes={"T": DType.F16})
    given = {"a": normal(20, 16).astype(np.float16), **{b: normal(16, 24).astype(np.float16) for b in names}}
    wanted = tensor.run(made.written, given, {}, precision="float64")["o"]
    np.testing.assert_allclose(
        emulate.run_module(made.module, made.source, given, {})["o"], wanted, rtol=1e-2, atol=1e-2
    )
