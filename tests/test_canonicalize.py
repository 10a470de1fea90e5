"""canonicalize: absence, axes, exact algebra; the same values, the same graph for other names."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileloom.compiler import tensor_ir as t
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter.arithmetic import elementwise, quiet
from tileloom.compiler.interpreter.elements import NUMPY
from tileloom.compiler.interpreter.tensor import run
from tileloom.compiler.passes.canonicalize import RULES, canonicalize, fixpoint, simplify
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.spelling import spell
from tileloom.compiler.tensor_ir import Graph, Node
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType

F32, F16, I64, I32, BOOL = DType.F32, DType.F16, DType.I64, DType.I32, DType.BOOL
M, N = t.extent("M"), t.extent("N")
m, n = t.index("m"), t.index("n")
X, Y = t.read("x", (m, n), F32), t.read("y", (m, n), F32)
H, K = t.read("h", (n,), F16), t.read("k", (n,), I32)
A, B = t.read("a", (m,), BOOL), t.read("b", (n,), BOOL)


def graph(text: str) -> Graph:
    program = parse(text)
    return canonicalize(elaborate(program[next(iter(program.kernels))]), Remarks())


def value(g: Graph, name: str) -> str:
    return spell(g.definition(name).value)


def number(x: float, dtype: DType = F32) -> Node:
    return t.const(x, dtype)


# ---------------------------------------------------------------- absence


ABSENT = """fn kept[J](x) = x
kernel f(x: f32[M, N], y: f32[M, N]) -> o: f32[M, N] {{ o[m, n] = {} }}"""


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("kept[n | n < m](x[m, n])", "where(n < m, x[m, n], 0.0)"),
        ("kept[n | n < m](x[m, n]) + y[m, n]", "where(n < m, x[m, n], 0.0) + y[m, n]"),
        ("y[m, n] - kept[n | n < m](x[m, n])", "y[m, n] - where(n < m, x[m, n], 0.0)"),
        ("exp(kept[n | n < m](x[m, n])) * y[m, n]", "where(n < m, exp(x[m, n]) * y[m, n], 0.0)"),
        (
            "kept[n | n < m](x[m, n]) * kept[n | n > 1](y[m, n])",
            "where(n < m and 1 < n, x[m, n] * y[m, n], 0.0)",
        ),
        ("kept[n | n < m](x[m, n]) + kept[n | n < m](y[m, n])", "where(n < m, x[m, n] + y[m, n], 0.0)"),
        (
            "kept[n | n < m](x[m, n]) + kept[n | n > 1](y[m, n])",
            "where(n < m or 1 < n, where(n < m, x[m, n], 0.0) + where(1 < n, y[m, n], 0.0), 0.0)",
        ),
        ("kept[n | n < m](kept[n | n > 1](x[m, n]))", "where(1 < n and n < m, x[m, n], 0.0)"),
        ("where(kept[n | n < m](x[m, n]) > 0, 1, 2)", "where(n < m, where(0.0 < x[m, n], 1.0, 2.0), 0.0)"),
    ],
)
def test_absence(expression: str, text: str) -> None:
    assert value(graph(ABSENT.format(expression)), "o") == text


def test_reductions_skip_what_is_absent() -> None:
    g = graph("""fn kept[J](x) = x
    kernel f(x: f32[M, N]) -> (a: f32[M], b: f32[M]) {
        a[m] = max[n](exp(kept[n | n < m](x[m, n])))
        b[m] = sum[n | n > 1](kept[n | n < m](x[m, n]))
    }""")
    assert value(g, "a") == "max[n | n < m](exp(x[m, n]))"
    assert value(g, "b") == "sum[n | 1 < n and n < m](x[m, n])"


def test_a_sum_skips_stored_zero_weights() -> None:
    """Stored or inlined, what a predicate excludes contributes nothing."""
    text = """kernel f(s: f32[M, N], v: f32[N, E]) -> o: f32[M, E] {
        p[m, n] = softmax[n | n <= m](s[m, n])
        o[m, e] = sum[n](2 * p[m, n] * v[n, e])
    }"""
    remarks = Remarks()
    g = canonicalize(elaborate(parse(text)["f"]), remarks)
    assert value(g, "o") == "sum[n | n <= m](2.0 * p[m, n] * v[n, e])"
    assert [r.name for r in remarks.items] == ["zero-weights-skipped"]
    inlined = t.substitute(g.definition("o").value, {t.read("p", (m, n), F32): g.definition("p").value})
    (kept,) = simplify([inlined])
    assert isinstance(kept, t.Reduce)
    assert kept.predicate is g.definition("o").value.args[1]
    assert "where(n <= m" not in spell(kept)


def test_skipping_needs_a_mask_that_cuts_the_sum() -> None:
    relu = t.apply("where", t.apply("lt", number(0.0), X), X, number(0.0))
    free = t.apply("where", A, X, number(0.0))
    for body in (relu, free):
        total = t.reduce("sum", ("n",), t.apply("mul", body, Y))
        assert simplify([total]) == [total]
    masked = t.reduce("sum", ("n",), t.apply("mul", t.apply("where", B, X, number(0.0)), Y))
    assert simplify([masked]) == [t.reduce("sum", ("n",), t.apply("mul", X, Y), B)]
    under = t.reduce("max", ("n",), t.apply("where", B, X, number(0.0)))
    assert simplify([under]) == [under]


# ---------------------------------------------------------------- axes


def test_readers_take_the_axes_of_what_they_read() -> None:
    g = graph("""kernel f(q: f32[B, M, D], k: f32[B, N, D]) -> (l: f32[B, M], p: f32[B, M, N]) {
        s[b, m, n] = sum[d](q[b, m, d] * k[b, n, d])
        l[x, y] = logsumexp[j](s[x, y, j])
        p[u, v, w] = softmax[w](s[u, v, w])
    }""")
    assert g.definition("l").axes == ("b", "m")
    assert g.definition("p").axes == ("b", "m", "n")
    assert set(g.axes) == {"b", "m", "n", "d"}
    top = spell(t.reduce("max", ("n",), t.read("s", (t.index("b"), m, n), F32)))
    assert top in value(g, "l")
    assert top in value(g, "p")


def test_a_bound_index_takes_the_name_that_is_free_in_it() -> None:
    g = graph("""kernel f(x: f32[M, N]) -> y: f32[M, N] {
        y[m, n] = exp(x[m, n] - max[j](x[m, j])) / sum[k](exp(x[m, k] - max[u](x[m, u])))
    }""")
    assert value(g, "y") == "exp(x[m, n] - max[n](x[m, n])) / sum[n](exp(x[m, n] - max[n](x[m, n])))"


def test_axes_in_another_order_and_squares_stay_apart() -> None:
    g = graph("""kernel f(x: f32[N, N]) -> (y: f32[N, N], z: f32[N, N], w: f32[N]) {
        t[i, j] = x[i, j] * 2
        y[i, j] = t[j, i]
        z[i, j] = sum[k](t[i, k] * t[k, j])
        w[i] = t[i, i]
    }""")
    x = np.arange(9, dtype=np.float32).reshape(3, 3)
    got = run(g, {"x": x}, {})
    assert np.array_equal(got["y"], 2 * x.T)
    assert np.array_equal(got["z"], 4 * x @ x)
    assert np.array_equal(got["w"], 2 * np.diag(x))


NAMED = """kernel f(q: f32[B, M, D], k: f32[B, N, D], v: f32[B, N, E]) -> (o: f32[B, M, E], l: f32[B, M], r: f32[N, M]) {
    s[b1, m1, n1] = sum[d1](q[b1, m1, d1] * k[b1, n1, d1])
    p[b2, m2, n2] = softmax[n2 | n2 <= m2](s[b2, m2, n2])
    o[b3, m3, e3] = sum[n3](p[b3, m3, n3] * v[b3, n3, e3])
    l[b4, m4] = logsumexp[n4 | n4 <= m4](s[b4, m4, n4])
    r[n5, m5] = max[b5](s[b5, m5, n5]) - sum[b6](p[b6, m5, n5] * max[n6](s[b6, m5, n6]))
}"""


def test_names_of_indices_do_not_matter() -> None:
    """One name per extent, or another name in every statement: the same graph up to names."""
    same = graph(re.sub(r"\b([bmnde])[1-6]\b", r"\1", NAMED))
    other = graph(NAMED)
    renamed = {a: re.sub(r"\d", "", a) for a in other.axes}
    assert len(set(renamed.values())) == len(renamed) == len(same.axes)
    for mine, theirs in zip(same.definitions, other.definitions, strict=True):
        assert tuple(renamed[a] for a in theirs.axes) == mine.axes
        assert t.rename_axes(theirs.value, renamed) is mine.value


# ---------------------------------------------------------------- algebra


ZERO, ONE, MINUS = number(0.0), number(1.0), number(-0.0)
i0, i1 = number(0, I32), number(1, I32)
LESS = t.apply("lt", n, m)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (t.apply("mul", X, ONE), X),
        (t.apply("mul", ONE, X), X),
        (t.apply("div", X, ONE), X),
        (t.apply("mul", H, ONE), t.cast_to(H, F32)),
        (t.apply("add", X, MINUS), X),
        (t.apply("sub", X, ZERO), X),
        (t.apply("neg", t.apply("neg", X)), X),
        (t.apply("max", X, X), X),
        (t.apply("add", K, i0), K),
        (t.apply("sub", i0, K), t.apply("neg", K)),
        (t.apply("mul", K, i0), i0),
        (t.apply("sub", K, K), i0),
        (t.apply("floordiv", K, i1), K),
        (t.apply("mod", K, i1), i0),
        (t.apply("and", A, t.const(True, BOOL)), A),
        (t.apply("or", t.const(True, BOOL), A), t.const(True, BOOL)),
        (t.apply("and", A, A), A),
        (t.apply("not", t.apply("not", A)), A),
        (t.apply("not", LESS), t.apply("le", m, n)),
        (t.apply("not", t.apply("eq", X, Y)), t.apply("ne", X, Y)),
        (t.apply("le", n, n), t.const(True, BOOL)),
        (t.apply("where", t.const(False, BOOL), X, Y), Y),
        (t.apply("where", A, X, X), X),
        (t.apply("where", t.apply("not", A), X, Y), t.apply("where", A, Y, X)),
        (t.apply("where", A, t.apply("where", A, X, Y), ZERO), t.apply("where", A, X, ZERO)),
        (t.apply("add", number(2**31 - 1, I32), i1), number(-(2**31), I32)),
        (t.apply("floordiv", number(-7, I64), number(2, I64)), number(-4, I64)),
        (t.apply("mul", number(3.0), number(4.0)), number(12.0)),
        (t.apply("neg", number(0.0)), number(-0.0)),
        (t.apply("eq", number(-math.inf), number(-math.inf)), t.const(True, BOOL)),
        (t.cast_to(number(2, I64), F32), number(2.0)),
        (t.cast_to(t.cast_to(H, F32), F16), H),
        (t.reduce("sum", ("n",), X, t.const(True, BOOL)), t.reduce("sum", ("n",), X)),
    ],
)
def test_rules(before: Node, after: Node) -> None:
    assert fixpoint(before) is after


@pytest.mark.parametrize(
    "kept",
    [
        t.apply("add", X, ZERO),  # -0.0 + 0.0 is 0.0
        t.apply("sub", ZERO, X),
        t.apply("mul", X, ZERO),  # inf, nan, the sign
        t.apply("sub", X, X),
        t.apply("eq", X, X),  # nan
        t.apply("not", t.apply("lt", X, Y)),
        t.apply("div", X, X),
        t.apply("add", number(0.1), number(0.2)),  # would round
        t.apply("sub", number(1.0), number(1.0)),  # exact, but zeros are left to the machine
        t.apply("floordiv", K, i0),
        t.cast_to(t.cast_to(X, F16), F32),
        t.cast_to(number(0.1), F16),
        t.apply("exp", ZERO),
    ],
)
def test_what_would_change_a_bit_stays(kept: Node) -> None:
    assert fixpoint(kept) is kept


def test_a_count_is_its_extent() -> None:
    g = graph("kernel f(x: f32[M, N]) -> y: f32[M] { y[m] = mean[n](x[m, n]) }")
    assert value(g, "y") == "sum[n](x[m, n]) / N"


VALUES = [0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, math.nan, 3e38]


def drawn_nodes() -> st.SearchStrategy[Node]:
    """Expressions over x, y (f32), k (i32) and a (bool) with the constants that rules look for."""
    floats = st.sampled_from([X, Y, H, ZERO, ONE, MINUS, number(-math.inf), number(2.0)])

    def extend(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        binary = st.builds(t.apply, st.sampled_from(["add", "sub", "mul", "div", "min", "max"]), inner, inner)
        conditions = st.builds(t.apply, st.sampled_from(["lt", "le", "eq", "ne"]), inner, inner) | st.just(A)
        negated = conditions | st.builds(lambda c: t.apply("not", c), conditions)
        both = negated | st.builds(lambda p, q: t.apply("and", p, q), negated, negated)
        select = st.builds(lambda c, p, q: t.apply("where", c, p, q), both, inner, inner)
        cast = st.builds(t.cast_to, inner, st.sampled_from([F16, F32, DType.F64]))
        return binary | select | cast | st.builds(lambda p: t.apply("neg", p), inner)

    return st.recursive(floats, extend, max_leaves=8)


def evaluate(node: Node) -> np.ndarray:
    """Every combination of special values for x and y."""
    x, y = (np.asarray(v, np.float32).ravel() for v in np.meshgrid(VALUES, VALUES))
    with quiet():
        leaves = {X: x, Y: y, H: x.astype(np.float16), A: x > y}
    done: dict[Node, np.ndarray] = {}
    with quiet():
        for p in t.walk([node]):
            args = [done[a] for a in p.args if a in done]
            match p:
                case t.Const():
                    done[p] = np.full(x.shape, p.value, NUMPY[p.dtype])
                case t.Apply():
                    done[p] = elementwise(p.op, *args)
                case t.Cast():
                    done[p] = args[0].astype(NUMPY[p.dtype])
                case _ if p in leaves:
                    done[p] = leaves[p]
    return done[node]


@given(drawn_nodes())
def test_rules_are_exact(node: Node) -> None:
    (after,) = simplify([node])
    assert after.dtype is node.dtype
    before, changed = evaluate(node), evaluate(after)
    assert before.dtype == changed.dtype
    nan = np.isnan(before.astype(np.float64))
    assert np.array_equal(nan, np.isnan(changed.astype(np.float64)))
    assert before[~nan].tobytes() == changed[~nan].tobytes()


def test_each_rule_has_its_formula() -> None:
    assert all(rule.__doc__ for rule in RULES)


def test_a_long_chain_needs_no_recursion() -> None:
    terms = 10_000
    g = graph(f"kernel f(x: f32[N]) -> y: f32[N] {{ y[i] = {' + '.join(['x[i]'] * terms)} }}")
    assert run(g, {"x": np.ones(2, np.float32)}, {})["y"].tolist() == [terms, terms]


def test_the_values_tell_a_wrong_rule() -> None:
    """x + 0.0 -> x, x - x -> 0 and x * 0 -> 0 are the wrong variants that `test_rules_are_exact` must catch."""
    for before, after in [
        (t.apply("add", X, ZERO), X),
        (t.apply("sub", X, X), ZERO),
        (t.apply("mul", X, ZERO), ZERO),
    ]:
        assert evaluate(before).tobytes() != evaluate(after).tobytes()
