"""`format_text`: a fixed point, the same tree, comments kept, whatever the layout it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.format import format_text
from tileloom.dsl.lex import scan
from tileloom.dsl.parse import parse_file
from tileloom.dsl.source import Source

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "dsl").glob("*.tile"), *(ROOT / "examples").rglob("*.tile")])
CASES = sorted((ROOT / "tests" / "cases").rglob("*.tile"))

UNTIDY = """\
\ufeff# head

import   "a.tile"
fn f[ J ](x,y)=sum[J]( x )+ -y   # short
fn g(x)  { return x*2 } fn h(x) = x
# about k


kernel k < T:f16|bf16 > (x:T[M,N],  # the x
   y : inout f32 [ N+1 ],
)
   -> o:T[M]
{
# first


   require M%2==0,   not N<3  \t

   o[m]=sum[ n in N|n<=m and x[m,n]>-1 ](x[m,n]*
      (2- -3)
        +4
   )
   # last
}
grad k wrt x,y as dk
tile t(x: f16[N])  {   for n in N by 1.0f64   @s(a = 1) { }
}
kernel e(c: inout f32[N]) {}
"""
TIDY = """\
# head

import "a.tile"
fn f[J](x, y) = sum[J](x) + -y  # short
fn g(x) { return x * 2 }
fn h(x) = x
# about k

kernel k<T: f16 | bf16>(x: T[M, N],  # the x
    y: inout f32[N + 1],
)
    -> o: T[M] {
    # first

    require M % 2 == 0, not N < 3

    o[m] = sum[n in N | n <= m and x[m, n] > -1](x[m, n] *
        (2 - -3)
        + 4
    )
    # last
}

grad k wrt x, y as dk
tile t(x: f16[N])  {   for n in N by 1.0f64   @s(a = 1) { }
}

kernel e(c: inout f32[N]) { }
"""


def comments(text: str) -> list[str]:
    return [t.text.rstrip() for t in scan(Source("f", text)) if t.type == "COMMENT"]


def check(text: str) -> str:
    """The formatted text, after the three promises are checked."""
    tidy = format_text(text)
    assert format_text(tidy) == tidy
    assert parse_file(Source("f", tidy)) == parse_file(Source("f", text.removeprefix("\ufeff")))
    assert comments(tidy) == comments(text)
    return tidy


def test_layout() -> None:
    assert check(UNTIDY) == TIDY
    assert check(UNTIDY.replace("\n", "\r\n")).splitlines() == TIDY.splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_our_own_files_are_in_canonical_layout(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert check(text) == text


def test_every_case_that_parses() -> None:
    checked = 0
    for path in CASES:
        text = path.read_text(encoding="utf-8")
        try:
            parse_file(Source("f", text))
        except TileError:
            continue
        check(text)
        checked += 1
    assert checked > 40


def test_errors_are_refused() -> None:
    with pytest.raises(TileError):
        format_text("fn f(x) = ")


def test_empty() -> None:
    assert format_text("") == ""
    assert format_text("\n\n# only this\n\n\n") == "# only this\n"


BREAKS = ["", " ", "   ", "\t", "\n", "\n\n\n", "  # note\n", "\n    # note\n", "\r\n"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layout_of_a_program(data: st.DataObject) -> None:
    """Spaces, line ends and comments put where the language allows them, or not: then it is no program to format."""
    tokens = [t.text for t in scan(Source("f", TIDY.replace("\n\n", "\n")))]
    text = ""
    for token in tokens:
        text += (
            token
            if token == "\n"
            else token
            + data.draw(
                st.sampled_from([" ", *BREAKS]) if data.draw(st.integers(0, 9)) == 0 else st.just(" ")
            )
        )
    try:
        parse_file(Source("f", text))
    except TileError:
        return
    check(text)
