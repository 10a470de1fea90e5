"""Faults that other systems had with mistakes in texts (design's list, kind frontend)."""

from __future__ import annotations

import pytest

import tileloom as tl
from tileloom.dsl.diagnostics import TileError

HEAD = "kernel k(x: f32[M, N], i: i32[M]) -> o: f32[M] {\n"
MISTAKES = [
    ("o[m] = sum[n](x[m, n]", "never closed"),
    ("o[m] == sum[n](x[m, n])", "="),
    ("o[m] = sum[n](y[m, n])", "y"),
    ("o[m] = sum[n](x[m])", "x"),
    ("o[m] = summ[n](x[m, n])", "sum"),
    ("o[m] = x[m, n]", "n"),
    ("o[m] = sum[n](x[m, n]) ** 2", "pow"),
    ("o[m] = exp(x[m, 0], 1)", "exp"),
    ("o[m] = sum[n](x[m, n]) && 1", "and"),
    ("o[m, m] = sum[n](x[m, n])", "m"),
    ("o[m] = where(i[m], 1.0, 2.0)", "where"),
    ("o[m] = max[n](x[m, n], i[m])", "max"),
]


@pytest.mark.parametrize("line", [1, 200])
@pytest.mark.parametrize(("mistake", "word"), MISTAKES)
def test_b112_typical_mistakes_have_reason_and_place(mistake: str, word: str, line: int) -> None:
    text = "\n" * (line - 1) + HEAD + "    " + mistake + "\n}\n"
    with pytest.raises(TileError) as refused:
        tl.compile(tl.parse(text)["k"]).explain(M=2, N=3)
    first = refused.value.diagnostics[0]
    assert first.span is not None
    assert first.span.line in (line, line + 1, line + 2)
    assert any(word in f"{d.message} {d.note} {d.help}" for d in refused.value.diagnostics)


@pytest.mark.parametrize("text", ["fn f(x) = f(x) + 1", "fn f(x) = g(x)\nfn g(x) = f(x)"])
def test_b113_recursion_is_refused(text: str) -> None:
    with pytest.raises(TileError) as refused:
        tl.parse(text + "\nkernel k(x: f32[N]) -> o: f32[N] { o[n] = f(x[n]) }")
    assert "call" in refused.value.diagnostics[0].message
