"""Syntax tree to tensor IR: extents, ranges, axes, inlining, types; refusals with code, line and column."""

from __future__ import annotations

import numpy as np
import pytest

from tileloom.compiler import tensor_ir as t
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter.tensor import run
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.spelling import spell
from tileloom.compiler.tensor_ir import Graph
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType


def graph(text: str, **dtypes: DType) -> Graph:
    program = parse(text)
    return elaborate(program[next(iter(program.kernels))], dtypes)


def value(g: Graph, name: str) -> str:
    return spell(g.definition(name).value)


def kernel(
    body: str, parameters: str = "x: f32[M, N], k: i32[N], ok: bool[M, N]", outputs: str = "y: f32[M, N]"
) -> str:
    return f"kernel f({parameters}) -> ({outputs}) {{\n    {body}\n}}\n"


# ---------------------------------------------------------------- extents


def test_extents_in_order_of_their_shapes() -> None:
    g = graph(
        "kernel f<C: extent>(x: f32[M, 3], cu: i32[B + 1], y: f32[M + B]) -> z: f32[C, M] { z[c, m] = x[m, 0] }"
    )
    assert g.extents == ("M", "B", "C")
    assert g.declared == ("C",)
    assert g.order == ("x", "cu", "y")
    assert [spell(s) for s in g.tensors["y"].shape] == ["M + B"]


def test_a_declared_scalar_wins_over_an_extent() -> None:
    g = graph("kernel f(x: f32[n], n: i64) -> y: f32[n] { y[i] = x[i] }")
    assert g.extents == ()
    assert g.tensors["x"].shape == (t.scalar("n", DType.I64),)


def test_dtype_parameters() -> None:
    text = "kernel f<T: f16 | f32>(x: T[N]) -> y: T[N] { y[i] = x[i] }"
    assert graph(text).tensors["x"].dtype is DType.F16
    assert graph(text, T=DType.F32).outputs["y"].dtype is DType.F32
    with pytest.raises(TileError, match=r"`T` cannot be f64[\s\S]*choose one of f16, f32"):
        graph(text, T=DType.F64)
    with pytest.raises(TileError, match="no dtype parameter `U`; it has: T"):
        graph(text, U=DType.F64)


def test_facts_and_example() -> None:
    g = graph("""kernel f(x: f32[M, N], scale: f32) -> y: f32[M, N] {
        require M % N == 0, 0 < scale <= 2
        example M = 8, N = 4, scale = -0.5
        y[m, n] = scale * x[m, n]
    }""")
    assert [(c.message, spell(c.condition)) for c in g.checks if c.kind == "require"] == [
        ("M % N == 0", "M % N == 0"),
        ("0 < scale <= 2", "0.0 < scale and scale <= 2.0"),
    ]
    assert g.example == {"M": 8, "N": 4, "scale": -0.5}


# ---------------------------------------------------------------- ranges and axes


def test_axes_are_shared_by_name_and_extent() -> None:
    g = graph("""kernel f(x: f32[M, N], w: f32[N, M]) -> (y: f32[M], z: f32[N]) {
        y[m] = sum[n](x[m, n])
        z[n] = sum[m](x[m, n]) + sum[k in 3](k * w[n, 0])
    }""")
    assert {a: spell(e) for a, e in g.axes.items()} == {"m": "M", "n": "N", "k": "3"}


def test_another_extent_or_a_rebinding_gets_a_fresh_axis() -> None:
    g = graph("""kernel f(x: f32[N], w: f32[M], n_1: f32) -> (y: f32[N], z: f32[M]) {
        y[n] = x[n] / sum[n](x[n]) + n_1
        z[n] = w[n] - sum[n in N](x[n])
    }""")
    assert value(g, "y") == "x[n] / sum[n_2](x[n_2]) + n_1"
    assert value(g, "z") == "w[n_3] - sum[n](x[n])"
    assert {a: spell(e) for a, e in g.axes.items()} == {"n": "N", "n_2": "N", "n_3": "M"}


def test_ranges_from_intermediates_and_explicit_ones() -> None:
    g = graph("""kernel f(x: f32[M, N]) -> y: f32[M] {
        y[m] = sum[j](s[m, j])
        s[a, b in N // 2] = x[a, 2 * b]
    }""")
    assert [d.name for d in g.definitions] == ["s", "y"]
    assert [spell(e) for e in g.shape_of("s")] == ["M", "N // 2"]
    assert spell(g.axes["j"]) == "N // 2"


def test_an_output_gives_its_indices_their_ranges() -> None:
    g = graph("kernel f(x: f32[M]) -> y: f32[M] { y[i] = x[M - 1 - i] }")
    assert spell(g.axes["i"]) == "M"


def test_what_no_output_needs_is_gone() -> None:
    g = graph(kernel("unused[m] = x[m, 0]\n    y[m, n] = x[m, n]"))
    assert [d.name for d in g.definitions] == ["y"]


# ---------------------------------------------------------------- fn


def test_locals_are_hygienic() -> None:
    g = graph("""fn twice(a) {
        x = a + 1
        n = x * x
        return n
    }
    kernel f(x: f32[N]) -> y: f32[N] { y[n] = twice(x[n]) + n }""")
    assert value(g, "y") == "(x[n] + 1.0) * (x[n] + 1.0) + n"


def test_a_bound_index_inside_a_fn_does_not_capture() -> None:
    g = graph("""fn threefold(a) = sum[n in 3](a * n)
    kernel f(x: f32[N]) -> y: f32[N] { y[n] = threefold(x[n]) }""")
    assert value(g, "y") == "sum[n_1](x[n] * n_1)"


def test_brackets_stand_for_several_indices_and_pass_on() -> None:
    g = graph("""fn inner[J](a) = sum[J](a)
    fn outer[J](a) = a / inner[J](a)
    kernel f(x: f32[M, N]) -> y: f32[M, N] { y[m, n] = outer[m, n | n <= m](x[m, n]) }""")
    assert value(g, "y") == "x[m, n] / sum[m, n | n <= m](x[m, n])"
    assert isinstance(g.definition("y").value, t.When)


def test_a_result_free_of_the_set_is_not_absent() -> None:
    g = graph("kernel f(x: f32[M, N]) -> y: f32[M] { y[m] = logsumexp[n | n < 3](x[m, n]) }")
    assert not isinstance(g.definition("y").value, t.When)


def test_the_users_names_win_where_they_may() -> None:
    g = graph("kernel f(x: f32[N], tanh: f32) -> y: f32[N] { y[n] = tanh * tanh(x[n]) }")
    assert value(g, "y") == "tanh * tanh(x[n])"


def test_a_long_chain_needs_no_recursion() -> None:
    terms = 10_000
    g = graph(f"kernel f(x: f32[N]) -> y: f32[N] {{ y[i] = {' + '.join(['x[i]'] * terms)} }}")
    adds = sum(isinstance(n, t.Apply) for n in t.walk([g.definition("y").value]))
    assert adds == terms - 1


@pytest.mark.parametrize(
    ("step", "use"),
    [
        ("y * y", "g(x[i], i)"),
        ("y % 7 + y // 3", "x[g(i, i) * 0]"),
        ("where(i > {k}, y, y + 1)", "where(i > 0, g(x[i - 1], i), 0)"),
        (
            "(y and i > {k}) and (y and i < {k} + 40)",
            "sum[j | g(i > 0, j)](where(g(j > 2, i), x[i - 1] * x[j], 0))",
        ),
    ],
)
def test_doubling_costs_no_doubled_time(step: str, use: str) -> None:
    """A chain of fns that use their value twice is small as a graph and 2^40 terms as a tree."""
    fns = ["fn twice0(x, i) = x"]
    fns += [
        f"fn twice{k}(x, i) {{ y = twice{k - 1}(x, i)\n return {step.format(k=k)} }}" for k in range(1, 41)
    ]
    text = "\n".join([*fns, f"kernel f(x: f32[N]) -> o: f32[N] {{ o[i] = {use.replace('g(', 'twice40(')} }}"])
    g = canonicalize(graph(text), Remarks())
    got = run(g, {"x": np.ones(3, np.float32)}, {})["o"]
    assert got.shape == (3,)
    assert len(spell(g.definition("o").value)) < 10_000


def test_names_of_locals_are_kept() -> None:
    g = graph("kernel f(x: f32[N]) -> y: f32[N] { y[n] = softmax[n](x[n]) }")
    assert {"m", "m0", "e", "z"} <= set(g.names.values())


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("expression", "dtype", "text"),
    [
        ("h[n] * 2", DType.F32, "h[n] * 2.0"),
        ("h[n]", DType.F16, "h[n]"),
        ("k[n] + 1", DType.I32, "k[n] + 1i32"),
        ("b[n] * b[n]", DType.I32, "b[n] * b[n]"),
        ("b[n] + 5000000000", DType.I64, "b[n] + 5000000000"),
        ("k[n] / 2", DType.F32, "k[n] / 2i32"),
        ("k[n] * 0.5", DType.F32, "k[n] * 0.5"),
        ("d[n] * 0.1", DType.F64, "d[n] * 0.1f64"),
        ("h[n] * d[n]", DType.F64, "h[n] * d[n]"),
        ("n * k[n]", DType.I64, "n * k[n]"),
        ("2 * 3 + n", DType.I64, "6 + n"),
        ("1 / 4 * h[n]", DType.F32, "0.25 * h[n]"),
        ("-3 % 2 + n", DType.I64, "1 + n"),
        ("where(n > 2, h[n], 0)", DType.F16, "where(2 < n, h[n], 0.0f16)"),
        ("where(n > 2, h[n], 0.1)", DType.F32, "where(2 < n, h[n], 0.1)"),
        ("where(n > 2, -inf, d[n])", DType.F64, "where(2 < n, -inff64, d[n])"),
        ("max(h[n], 0)", DType.F32, "max(h[n], 0.0)"),
        ("exp(2)", DType.F32, "exp(2)"),
        ("sum[j in 4](1)", DType.I64, "sum[j](1)"),
        ("argmax[j](h[j])", DType.I64, "argmax[j](h[j])"),
        ("0 <= n < 3", DType.BOOL, "0 <= n and n < 3"),
        ("k[n] == 1.5", DType.BOOL, "k[n] == 1.5"),
        ("f16(h[n] * 2)", DType.F16, "f16(h[n] * 2.0)"),
    ],
)
def test_types_and_literals(expression: str, dtype: DType, text: str) -> None:
    parameters = "h: f16[N], k: i32[N], b: i8[N], d: f64[N]"
    body = f"t[n in N] = {expression}\n    y[n] = where(t[n] == t[n], 1, 0)"
    g = graph(kernel(body, parameters, "y: f32[N]"))
    assert g.definition("t").dtype is dtype
    assert value(g, "t") == text


def test_an_update_has_a_target() -> None:
    g = graph(
        "kernel f(c: inout f32[M, N], p: i32[S], x: f32[S, N]) -> z: f32[1] { c[p[s], n] += x[s, n]\n z[i] = 0 }"
    )
    update = next(d for d in g.definitions if d.target is not None)
    assert (update.name, set(update.axes), update.accumulate) == ("c", {"s", "n"}, True)
    assert [spell(i) for i in update.target or ()] == ["p[s]", "n"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "code", "column", "help_"),
    [
        ("y[m, n] = sum[j](1)", "E0201", 19, "write its range: `j in M`"),
        ("y[m, n] = sum[j](x[j, j])", "E0202", 19, "`j in M`"),
        ("y[m in N, n] = x[m, n]", "E0202", 7, "`m in M`"),
        ("y[m, n] = x[m, n] * ok[m, n]", "E0301", 25, "where(ok[m, n], …, 0)"),
        ("y[m, n] = where(x[m, n], 1, 0)", "E0302", 21, "x[m, n] != 0"),
        ("y[m, n] = sum[j | k[j]](x[m, j])", "E0302", 23, "k[j] != 0"),
        ("y[m, n] = where(n > 0, ok[m, n], x[m, n])", "E0303", 15, "cast"),
        ("y[m, n] = x[m, n / 2]", "E0304", 20, "`//`"),
        ("y[m, n] = max[j](ok[m, j]) + 0", "E0305", 22, "any"),
        ("y[m, n] = argmax[i, j](x[i, j])", "E0306", 15, "one by one"),
        ("y[m, n] = k[n]", "E0307", 15, "`f32(…)`"),
        ("y[m, n] = ok[m, n]", "E0307", 15, "where(…, 1, 0)"),
        ("y[m, n] = x[m, n]\n    z[n] = 1", "E0201", None, "n in N"),
        ("require M + N\n    y[m, n] = 1", "E0302", 13, "M + N != 0"),
    ],
)
def test_refusals(body: str, code: str, column: int | None, help_: str | None) -> None:
    with pytest.raises(TileError) as caught:
        graph(kernel(body))
    found = [d for d in caught.value.diagnostics if d.code == code]
    assert found, [d.code for d in caught.value.diagnostics]
    assert found[0].span is not None
    if column is not None:
        assert (found[0].span.line, found[0].span.column) == (2, column)
    assert help_ is None or help_ in (found[0].help or "")


def test_a_float_in_an_integer_is_refused() -> None:
    """B111"""
    with pytest.raises(TileError) as caught:
        graph("kernel f(x: inout i32[N]) -> y: f32[1] {\n\tx[n] = 0.9\n y[i] = 0 }")
    (only,) = caught.value.diagnostics
    assert (only.code, only.span and (only.span.line, only.span.column)) == ("E0307", (2, 9))
    assert "`x` is i32, but its value is f32" in only.message


def test_all_errors_at_once_without_echoes() -> None:
    with pytest.raises(TileError) as caught:
        graph(
            "kernel f(x: f32[M, N], ok: bool[N]) -> (y: f32[M], z: f32[N]) {\n"
            "    t[m, n] = x[m, n] + ok[n]\n"  # refused here
            "    y[m] = sum[n](t[m, n])\n"  # reads what was refused: no error of its own
            "    z[n] = ok[n]\n"
            "}\n"
        )
    assert [(d.code, d.span and d.span.line) for d in caught.value.diagnostics] == [
        ("E0301", 2),
        ("E0307", 4),
    ]


def test_an_error_inside_the_prelude_points_at_the_call() -> None:
    with pytest.raises(TileError) as caught:
        graph(kernel("y[m, n] = softmax[n](ok[m, n])"))
    assert all(d.span is not None and d.span.line == 2 for d in caught.value.diagnostics)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("c[k[n]] = x[m, n]\n    y[m, n] = 0", "E0219"),
        ("x[m, n] = 1\n    y[m, n] = 0", "E0215"),
        ("y[m, n] += 1", "E0215"),
    ],
)
def test_refused_updates(body: str, code: str) -> None:
    parameters = "x: f32[M, N], k: i32[N], c: inout f32[M]"
    with pytest.raises(TileError) as caught:
        graph(kernel(body, parameters))
    assert code in [d.code for d in caught.value.diagnostics] or "E01" in caught.value.diagnostics[0].code


def test_examples_of_truth_values() -> None:
    text = "kernel k(x: f32[M], c: bool) -> o: f32[M] {\n    example M = 5, c = true\n    o[m] = where(c, x[m], 0)\n}\n"
    assert graph(text).example == {"M": 5, "c": True}
