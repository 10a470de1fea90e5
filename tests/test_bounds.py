"""The bounds rule: proved, checked at the call, clamped, or refused."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileloom.compiler.calls import check_call, extents_of
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter.tensor import run
from tileloom.compiler.tensor_ir import Graph
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.load import parse


def graph(text: str) -> Graph:
    program = parse(text)
    return elaborate(program[next(iter(program.kernels))])


def reading(index: str, shape: str = "N", extra: str = "") -> str:
    return f"kernel f(x: f32[{shape}], k: i32[N], ok: bool[N], s: i64{extra}) -> y: f32[N] {{\n    y[i] = {index}\n}}\n"


def bounds(g: Graph) -> list[str]:
    return [c.message for c in g.checks if c.kind == "bounds"]


@pytest.mark.parametrize(
    "expression",
    [
        "x[i]",
        "x[N - 1 - i]",
        "where(i > 0, x[i - 1], 0)",
        "where(i >= 1, x[i - 1], 0)",
        "where(i == 0, 0, x[i - 1])",
        "where(i + 1 < N, x[i + 1], 0)",
        "where(not (i + 1 >= N), x[i + 1], 0)",
        "where(i > 1 and ok[i], x[i - 2], 0)",
        "where(i > 0 and x[i - 1] > 0, 1, 0)",
        "where(i == 0 or x[i - 1] > 0, 1, 0)",
        "sum[j in 5 | 0 <= i + j - 2 and i + j - 2 < N](x[i + j - 2])",
        "sum[j in N | j <= i](x[i - j])",
        "x[min(i + 3, N - 1)]",
        "x[max(i - 3, 0)]",
        "x[i // 2]",
        "x[i % N]",
        "x[abs(i)]",
        "x[where(i > 0, i, 0)]",
        "x[k[i]]",
        "x[k[i] + i - 7]",
        "x[i64(i)]",
    ],
)
def test_proved_or_clamped(expression: str) -> None:
    assert [m for m in bounds(graph(reading(expression))) if "leaves" in m] == []


@pytest.mark.parametrize(
    ("expression", "sizes", "good"),
    [
        ("x[i + s]", {"s": 0}, True),
        ("x[i + s]", {"s": 1}, False),
        ("x[i * s]", {"s": 1}, True),
        ("x[i * s]", {"s": -1}, False),
        ("x[(i * s) // 4]", {"s": 5}, True),
        ("x[(i * s) // 4]", {"s": 8}, False),
        ("x[i % s]", {"s": 4}, True),
        ("x[i % s]", {"s": 5}, False),
        ("where(i < s, x[i + 1], 0)", {"s": 3}, True),
        ("where(i < s, x[i + 1], 0)", {"s": 4}, False),
        ("where(s > 0, x[i + s - 1], 0)", {"s": 1}, True),
        ("where(s > 0, x[i + s - 1], 0)", {"s": -9}, True),
    ],
)
def test_checked_at_the_call(expression: str, sizes: dict[str, int], good: bool) -> None:
    g = graph(reading(expression))
    assert bounds(g)
    if good:
        check_call(g, {"N": 4}, sizes)
    else:
        with pytest.raises(
            ValueError, match=r"f: index 1 of `x`, .* leaves its axis, which has extent N \(N = 4, s = "
        ):
            check_call(g, {"N": 4}, sizes)
        check_call(g, {"N": 0}, sizes)  # an empty axis reads nothing


HEADS = "kernel f(q: f32[H, D], k: f32[G, D]) -> y: f32[H] { y[h] = sum[d](q[h, d] * k[h // (H // G), d]) }"


@pytest.mark.parametrize("h", range(7))
@pytest.mark.parametrize("g", range(5))
def test_grouped_heads_are_exact_without_require(h: int, g: int) -> None:
    """Refused exactly where a head would read outside, or divide by zero."""
    heads = graph(HEADS)
    sound = h == 0 or (g > 0 and h // g > 0 and (h - 1) // (h // g) < g)
    if sound:
        check_call(heads, {"H": h, "G": g, "D": 2}, {})
    else:
        with pytest.raises(ValueError, match=r"\(.*G = \d"):
            check_call(heads, {"H": h, "G": g, "D": 2}, {})


@pytest.mark.parametrize(
    ("expression", "code", "column"),
    [
        ("x[i + 1]", "E0401", 14),
        ("x[i - 1]", "E0401", 14),
        ("x[N]", "E0401", 12),
        ("where(ok[i], x[i + 1], 0)", "E0401", 27),
        ("where(i < N, x[i + 1], 0)", "E0401", 27),
        ("x[i - 1] * where(i > 0, 1, 0)", "E0401", 14),
        ("sum[j in N | j <= i](x[i - j - 1])", "E0401", 35),
        ("x[i // (i + 1)]", "E0402", 14),
        ("x[sum[j in N](j)]", "E0402", 14),
        ("k[i] // 0", "E0403", 12),
        ("where(i > 0, k[i] // i, 0) + i // i", "E0403", None),
    ],
)
def test_refused(expression: str, code: str, column: int | None) -> None:
    with pytest.raises(TileError) as caught:
        graph(reading(f"f32({expression})" if code == "E0403" else expression))
    (only,) = caught.value.diagnostics
    assert only.code == code
    assert only.help is not None
    assert only.span is not None
    assert only.span.line == 2
    if column is not None:
        assert only.span.column == column + 4 * (code == "E0403")


def test_the_help_of_a_refusal_is_accepted() -> None:
    with pytest.raises(TileError) as caught:
        graph(reading("x[i + 1]"))
    help_ = caught.value.diagnostics[0].help or ""
    guard = help_.split("`")[1].replace("…", "x[i + 1]")
    assert bounds(graph(reading(guard))) == []


def test_ranges_that_are_differences_must_not_be_negative() -> None:
    g = graph("kernel f(x: f32[M], y: f32[N]) -> z: f32[1] { z[i] = sum[j in N - M](y[j + M]) }")
    check_call(g, {"M": 3, "N": 3}, {})
    with pytest.raises(
        ValueError, match=r"the range `N - M` of index `j` must not be negative \(M = 4, N = 3\)"
    ):
        check_call(g, {"M": 4, "N": 3}, {})


def test_a_linear_shape_has_room_for_its_neighbours() -> None:
    g = graph("kernel f(cu: i32[B + 1]) -> n: i32[B] { n[b] = cu[b + 1] - cu[b] }")
    assert bounds(g) == []
    assert extents_of(g, {"cu": (5,)}, {}) == {"B": 4}


# Expressions over i in N, j in 3 and a scalar s; every leaf may be any of them.
LEAVES = st.sampled_from(["i", "j", "s", "N", "1", "2"])


def expressions() -> st.SearchStrategy[str]:
    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        infix = st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "+", "-"]), inner)
        divided = st.builds(
            "({} {} {})".format, inner, st.sampled_from(["//", "%"]), st.sampled_from(["2", "3", "s"])
        )
        extreme = st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner)
        return infix | divided | extreme

    return st.recursive(LEAVES, extend, max_leaves=5)


def test_what_is_accepted_never_reads_outside() -> None:
    """Sound: whatever passes the compiler and the checks of the call runs in an interpreter that checks every index."""
    outcomes = Counter[str]()

    @given(expressions(), expressions(), st.integers(0, 3), st.sampled_from([-2, -1, 0, 1, 2, 3]))
    @settings(
        max_examples=400, deadline=None, derandomize=True
    )  # the same draws each time: the counts below stand
    def holds(index: str, bound: str, n: int, s: int) -> None:
        text = f"""kernel f(x: f32[N], s: i64) -> y: f32[N] {{
            y[i] = sum[j in 3 | 0 <= {bound} and {bound} < N](x[{index}]) +
                sum[j in 3](where({index} >= 0, x[min({index}, N - 1)], 0))
        }}"""
        try:
            g = graph(text)
            check_call(g, {"N": n}, {"s": s})
        except TileError:
            outcomes["refused"] += 1
        except ValueError:
            outcomes["refused at the call"] += 1
        else:
            run(g, {"x": np.arange(n, dtype=np.float32)}, {"s": s})
            outcomes["ran"] += n > 0

    holds()
    assert min(outcomes[o] for o in ("refused", "refused at the call", "ran")) > 5, outcomes


def test_intervals_reach_their_ends() -> None:
    """Exact for sums of independent indices: accepted exactly where every index is inside."""
    g = graph("kernel f<M: extent, N: extent>(x: f32[K]) -> y: f32[M, N] { y[m, n] = x[2 * m + 3 * n] }")
    for m, n, k in itertools.product(range(4), range(4), range(14)):
        inside = m == 0 or n == 0 or 2 * (m - 1) + 3 * (n - 1) < k
        try:
            check_call(g, {"M": m, "N": n, "K": k}, {})
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == inside, (m, n, k)
