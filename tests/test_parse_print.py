"""Printing a tree gives a text that parses to the same tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileloom.dsl import syntax as s
from tileloom.dsl.format import format_text
from tileloom.dsl.parse import parse_expression, parse_file
from tileloom.dsl.print import print_expr, print_items
from tileloom.dsl.source import Source, Span

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "dsl").glob("*.tile"), *(ROOT / "examples").glob("*.tile")])
AT = Span(Source("<drawn>", ""), 0, 0)


def name(text: str) -> s.Name:
    return s.Name(AT, text)


NAMES = st.sampled_from(["x", "n", "inf", "exp"]).map(name)
LEAVES = st.one_of(
    NAMES,
    st.booleans().map(lambda b: s.Boolean(AT, b)),
    st.integers(0, 2**63 - 1).map(lambda i: s.Number(AT, i, str(i))),
    st.floats(0, 1e300).map(lambda v: s.Number(AT, v, repr(v))),
)
TARGETS = st.sampled_from(["f", "sum", "q_1"]).map(name)


def grow(inner: st.SearchStrategy[s.Expr]) -> st.SearchStrategy[s.Expr]:
    some = st.lists(inner, min_size=1, max_size=3).map(tuple)
    bound = st.builds(s.BoundIndex, st.just(AT), st.sampled_from("ijk").map(name), st.none() | inner)
    compare = st.lists(
        st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner), min_size=1, max_size=3
    )
    return st.one_of(
        st.builds(s.Unary, st.just(AT), st.sampled_from(["-", "not"]), inner),
        st.builds(
            s.Binary, st.just(AT), st.sampled_from(["+", "-", "*", "/", "//", "%", "and", "or"]), inner, inner
        ),
        st.builds(
            lambda first, rest: s.Compare(AT, (first, *(e for _, e in rest)), tuple(op for op, _ in rest)),
            inner,
            compare,
        ),
        st.builds(s.Subscript, st.just(AT), TARGETS, some),
        st.builds(s.Call, st.just(AT), TARGETS, some),
        st.builds(
            s.BracketCall,
            st.just(AT),
            TARGETS,
            st.lists(bound, min_size=1, max_size=2).map(tuple),
            st.none() | inner,
            some,
        ),
    )


@given(st.recursive(LEAVES, grow, max_leaves=25))
def test_any_expression(expr: s.Expr) -> None:
    text = print_expr(expr)
    assert parse_expression(Source("<text>", text)) == expr
    assert print_expr(parse_expression(Source("<text>", text))) == text


@pytest.mark.parametrize(
    "text",
    ["a - (b - c)", "(a or b) and not (c and d)", "-(a + b) * c", "(a < b) == c", "f[n in N | n < m](x, y)"],
)
def test_only_the_parentheses_that_are_needed(text: str) -> None:
    assert print_expr(parse_expression(Source("<text>", text))) == text
    assert print_expr(parse_expression(Source("<text>", f"(({text}))"))) == text


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_our_own_files(path: Path) -> None:
    file = parse_file(Source(path.name, path.read_text(encoding="utf-8")))
    text = print_items(file.items)
    assert parse_file(Source("printed", text)) == file
    assert format_text(text) == text


def test_items_of_every_kind() -> None:
    text = (
        'import "a.tile"\n\nfn f[I, J](x, y) {\n    z = sum[I](x)\n    return z + y\n}\n\nfn g() = 1\n\n'
        "kernel k<T: f16 | f32, C: extent>(x: T[N + 1], c: inout f32[N], p: i32) -> (o: f32, i: i64[C]) {\n"
        "    require N > 0, C < 3\n    example N = 4, C = 2\n    example N = 5, C = -1\n    o = 1.5e-3\n"
        "    i[n in C] = p\n    c[p, n] += x[n]\n}\n\ngrad k wrt x, c as dk\n\nschedule s for k { fuse  all }\n"
    )
    file = parse_file(Source("f", text))
    assert print_items(file.items) == text
