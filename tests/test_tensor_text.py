"""Text form of the tensor IR: exact round trips, sharing shown once, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileloom.compiler import tensor_ir as t
from tileloom.compiler.tensor_ir import Check, Definition, Graph, Node, ScalarParam, Tensor
from tileloom.compiler.tensor_text import parse_graph, print_graph
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.types import DType

F32, F16, I64, I32, BOOL = DType.F32, DType.F16, DType.I64, DType.I32, DType.BOOL
M, N = t.extent("M"), t.extent("N")
m, n = t.index("m"), t.index("n")
SCALE = t.scalar("scale", F32)
X = t.read("x", (m, n), F16)
ZERO = t.const(0.0)


def graph(*definitions: Definition, checks: tuple[Check, ...] = ()) -> Graph:
    return Graph(
        name="rows",
        order=("x", "page", "c", "scale"),
        tensors={
            "x": Tensor("x", F16, (M, N)),
            "page": Tensor("page", I32, (t.apply("floordiv", N, t.const(2, I64)),)),
            "c": Tensor("c", F32, (M,), inout=True),
        },
        scalars={"scale": ScalarParam("scale", F32)},
        extents=("M", "N"),
        axes={"m": M, "n": N},
        definitions=definitions,
        outputs={"y": Tensor("y", F32, (M, N))},
        checks=checks,
        example={"M": 8, "scale": 0.125},
    )


def softmax() -> Graph:
    """y = softmax[n | n <= m](scale · x) as the prelude's text gives it, and an update."""
    s = t.apply("mul", SCALE, X)
    seen = t.apply("le", n, m)
    top = t.reduce("max", ("n",), s, seen)
    safe = t.apply("where", t.apply("eq", top, t.const(-math.inf)), ZERO, top)
    e = t.apply("exp", t.apply("sub", s, safe))
    z = t.reduce("sum", ("n",), e, seen)
    value = t.apply("where", t.apply("eq", z, ZERO), ZERO, t.apply("div", e, z))
    page = t.read("page", (t.apply("mod", n, M),), I32)
    return graph(
        Definition("y", ("m", "n"), value, F32),
        Definition("c", ("n",), t.const(1.0), F32, (page,), accumulate=True),
        checks=(Check(t.apply("lt", ZERO, SCALE), "require", 'scale > 0, "always"'),),
    )


def test_canonical_text() -> None:
    assert (
        print_graph(softmax())
        == """\
kernel rows(x, page, c, scale) {
    scalar scale: f32
    extents M, N
    axis m in M
    axis n in N
    tensor x: f16[M, N]
    tensor page: i32[N // 2]
    tensor c: inout f32[M]
    output y: f32[M, N]
    example M = 8, scale = 0.125
    check require 0.0 < scale: "scale > 0, \\"always\\""
    %1 = max[n | n <= m](scale * x[m, n])
    %2 = exp(scale * x[m, n] - where(%1 == -inf, 0.0, %1))
    %3 = sum[n | n <= m](%2)
    y[m, n]: f32 = where(%3 == 0.0, 0.0, %2 / %3)
    update c[page[n % M]] over [n]: f32 += 1.0
}
"""
    )


def test_round_trip() -> None:
    g = softmax()
    assert parse_graph(print_graph(g)) == g
    assert print_graph(parse_graph(print_graph(g))) == print_graph(g)


def test_text_of_a_doubling_chain_is_linear() -> None:
    """x + x, forty times: 2^40 leaves as a tree."""
    value: Node = t.apply("mul", X, SCALE)
    for _ in range(40):
        value = t.apply("exp", t.apply("add", value, value))
    g = graph(Definition("y", ("m", "n"), value, F32))
    text = print_graph(g)
    assert len(text) < 4000
    assert parse_graph(text) == g


def test_depth_is_no_limit() -> None:
    value: Node = t.apply("mul", X, SCALE)
    for _ in range(5000):
        value = t.apply("exp", value)
    chain: Node = X
    for i in range(3000):
        chain = t.apply("sub", chain, t.const(float(i)))
    g = graph(Definition("y", ("m", "n"), t.apply("add", value, chain), F32))
    assert parse_graph(print_graph(g)) == g


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (t.const(0.1, DType.F64), "0.1f64"),
        (t.const(-0.0), "-0.0"),
        (t.const(math.nan), "nan"),
        (t.const(7, I32), "7i32"),
        (t.cast_to(m, F32), "f32(m)"),
        (t.when(X, t.apply("lt", n, m)), "when(x[m, n], n < m)"),
        (t.carried("r", "old", frozenset({"n", "m"}), F32), "old(r[m, n]: f32)"),
        (t.carried("r", "final", t.NO_AXES, F32), "final(r[]: f32)"),
        (t.reduce("sum", ("m", "n"), X), "sum[m, n](x[m, n])"),
        (t.reduce("sum", ("n",), X, t.reduce("any", ("m",), t.apply("lt", m, n))), None),
        (t.extent("scale"), "extent(scale)"),
        (t.index("M"), "index(M)"),
        (t.apply("not", t.apply("and", t.apply("lt", m, n), t.apply("ne", m, n))), "not (m < n and m != n)"),
        (t.apply("neg", t.const(1.0)), "-(1.0)"),
    ],
)
def test_node(node: Node, text: str | None) -> None:
    g = graph(Definition("y", ("m", "n"), node, node.dtype))
    printed = print_graph(g)
    if text is not None:
        assert f"y[m, n]: {node.dtype} = {text}\n" in printed
    assert parse_graph(printed) == g


def test_constants_keep_sign_of_zero() -> None:
    minus, plus = (graph(Definition("y", (), t.const(z), F32)) for z in (-0.0, 0.0))
    assert parse_graph(print_graph(minus)) == minus
    assert print_graph(minus) != print_graph(plus)


def test_tensor_named_like_a_reduction() -> None:
    g = graph(
        Definition("sum", ("m",), t.reduce("sum", ("n",), X), F32),
        Definition("y", ("m", "n"), t.apply("add", t.read("sum", (m,), F32), X), F32),
    )
    assert parse_graph(print_graph(g)) == g


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("y[m]: f32 = q[m]", "E0603", "`q` is no tensor"),
        ("y[m]: f32 = w", "E0603", "`w` is not declared"),
        ("y[m]: f32 = %7", "E0603", "`%7` is not defined"),
        ("y[m]: f32 = exp(m, m)", "E0605", "takes 1 argument, not 2"),
        ("y[m]: f32 = frob(m)", "E0605", "no operation"),
        ("y[m]: f32 = where(m < m, m, m < m)", "E0605", "one side is bool"),
        ("y[m] = m", "E0601", "expected `:`"),
        ("check wish m < m: 1", "E0601", "expected require, bounds or shape"),
    ],
)
def test_refusal(line: str, code: str, words: str) -> None:
    text = f"kernel k() {{\n    extents M\n    axis m in M\n    {line}\n}}\n"
    with pytest.raises(TileError) as caught:
        parse_graph(text, "k.ir")
    (found,) = caught.value.diagnostics
    assert (found.code, words in found.message) == (code, True), found.render()
    assert found.span is not None
    assert found.span.line == 4


# ---------------------------------------------------------------- random graphs

NUMERIC = [
    op for op in sorted(t.OPERATIONS) if op not in t.LOGICAL and op not in t.COMPARISONS and op != "where"
]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs grown by constructors from a pool, so that nodes are shared; numbers and conditions in turn."""
    numbers: list[Node] = [m, n, M, SCALE, X, t.read("page", (m,), I32)]
    numbers += [t.carried("r", "old", frozenset({"m"}), F32), t.index("M")]
    floats = st.floats() | st.just(-0.0)
    numbers.append(t.const(draw(floats), draw(st.sampled_from([F32, DType.F64, F16]))))
    numbers.append(t.const(draw(st.integers(-99, 99)), draw(st.sampled_from([I64, I32, DType.I8]))))
    conditions: list[Node] = [t.apply("lt", m, n), t.const(True, BOOL)]
    for _ in range(draw(st.integers(0, 25))):
        number, condition = st.sampled_from(numbers), st.sampled_from(conditions)
        kind = draw(st.integers(0, 6))
        a, b, c = draw(number), draw(number), draw(condition)
        if kind == 0:
            op = draw(st.sampled_from(NUMERIC))
            numbers.append(t.apply(op, *(a, b)[: t.ARITY[op]]))
        elif kind == 1:
            numbers.append(t.apply("where", c, a, b))
        elif kind == 2:
            numbers.append(t.cast_to(a, draw(st.sampled_from([d for d in DType if d is not BOOL]))))
        elif kind == 3:
            bound = draw(st.sampled_from([("m",), ("n",), ("n", "m")]))
            numbers.append(
                t.reduce(
                    draw(st.sampled_from(["sum", "max", "argmin"])), bound, a, draw(st.none() | condition)
                )
            )
        elif kind == 4:
            conditions.append(t.apply(draw(st.sampled_from(sorted(t.COMPARISONS))), a, b))
        elif kind == 5:
            conditions.append(t.apply(draw(st.sampled_from(["and", "or"])), c, draw(condition)))
        else:
            numbers.append(
                draw(st.sampled_from([t.when(a, c), t.read("x", (a, b), F16), t.read("x", (b, b), F16)]))
            )
    values = draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=3))
    definitions = [Definition(f"y{i}", ("m",) * (i % 2), v, F32) for i, v in enumerate(values)]
    definitions.append(Definition("c", ("n",), values[0], F32, (values[-1],), draw(st.booleans())))
    checks = (Check(draw(st.sampled_from(conditions)), "shape", draw(st.text(max_size=8))),)
    return graph(*definitions, checks=checks)


@given(graphs())
def test_random_graphs_round_trip(g: Graph) -> None:
    text = print_graph(g)
    assert parse_graph(text) == g
    assert print_graph(parse_graph(text)) == text
