"""Each file of cases/diagnostics says on its faulty lines what must be found there: `#! E0101 12` is a code and a column."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tileloom.dsl.diagnostics import MAX_SHOWN, Diagnostic, TileError
from tileloom.dsl.load import parse

CASES = sorted((Path(__file__).parent / "cases" / "diagnostics").glob("*.tile"))
MARK = re.compile(r"#! (.*)$")
KERNEL = "kernel k(x: f32[M, N], a: f32) -> o: f32[M] {{\n{}\n}}\n"


def errors(text: str, name: str = "<text>") -> list[Diagnostic]:
    with pytest.raises(TileError) as caught:
        parse(text, name)
    return caught.value.diagnostics


def marked(text: str) -> list[tuple[int, str, int]]:
    """What the marks of a case ask for: line, code, column."""
    wanted = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.search(line)
        for part in mark.group(1).split(", ") if mark else []:
            code, column = part.split()
            wanted.append((number, code, int(column)))
    return sorted(wanted)


def places(found: list[Diagnostic]) -> list[tuple[int, str, int]]:
    return sorted((d.span.line, d.code, d.span.column) for d in found if d.span is not None)


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.stem)
def test_codes_and_columns(case: Path) -> None:
    text = case.read_text(encoding="utf-8")
    wanted = marked(text)
    assert wanted
    assert places(errors(text)) == wanted


def test_same_places_after_200_lines_and_with_crlf() -> None:
    """Lines and columns are those of the user's text, wherever it stands and however its lines end."""
    for case in CASES:
        text = "#\n" * 199 + case.read_text(encoding="utf-8")
        assert places(errors(text)) == marked(text), case.stem
        assert places(errors(text.replace("\n", "\r\n"))) == marked(text), case.stem


def test_at_least_sixty_different_codes() -> None:
    codes = {code for case in CASES for _, code, _ in marked(case.read_text(encoding="utf-8"))}
    assert len(codes) >= 60


@pytest.mark.parametrize("case", CASES, ids=lambda p: p.stem)
def test_rendered(case: Path, snapshot: SnapshotAssertion) -> None:
    """The whole text as a user reads it; accept changes with `pytest --snapshot-update`."""
    text = MARK.sub("", case.read_text(encoding="utf-8"))
    text = "\n".join(MARK.sub("", line).rstrip() for line in text.split("\n"))
    assert "\n".join(d.render() for d in errors(text, case.name)) == snapshot


@pytest.mark.parametrize(
    ("line", "caret"),
    [
        ("\to[m] = zz[m]", "\t       ^^"),
        ("    o[m] =\tzz[m]", "          \t^^"),
        ("\t\to[m]\t=\ta *\tzz[m]", "\t\t    \t \t   \t^^"),
    ],
)
def test_caret_stands_under_the_token_after_tabs(line: str, caret: str) -> None:
    """Faults B106: tabs are kept under the line, so the caret lines up whatever a tab's width is."""
    (found,) = errors(KERNEL.format(line))
    shown = found.render().splitlines()
    assert shown[3] == f"2 | {line}"
    assert shown[4] == f"  | {caret}"


def test_caret_with_crlf() -> None:
    (found,) = errors(KERNEL.format("    o[m] =\n").replace("\n", "\r\n"))
    assert found.render().splitlines()[3:5] == ["2 |     o[m] =", "  |          ^"]


def test_long_line_is_cut_around_the_caret() -> None:
    (found,) = errors(KERNEL.format("o[m] = " + "a + " * 500 + "zz + " + "a + " * 500 + "a"))
    source, caret = found.render().splitlines()[3:5]
    assert len(source) < 200
    assert source[caret.index("^") :].startswith("zz")


def test_json_has_the_same_facts() -> None:
    (found,) = errors(KERNEL.format("o[m] = zz[m]"), "f.tile")
    data = json.loads(json.dumps(found.as_json()))
    assert data["code"] == "E0102"
    assert data["where"] == {"file": "f.tile", "line": 2, "column": 8, "end_line": 2, "end_column": 10}
    assert "zz" in data["message"]


def test_errors_of_several_statements_and_items_at_once() -> None:
    text = KERNEL.format("o[m] = 2 a\np = a\nq = (a") + "fn f(x) { }\n" + KERNEL.format("r = ^")
    assert [d.code for d in errors(text)] == ["E0027", "E0006", "E0029", "E0002"]


def test_a_flood_of_errors_is_cut() -> None:
    found = errors(KERNEL.format("\n".join(f"t{i} = zz{i}[0]" for i in range(2000))))
    assert len(found) == MAX_SHOWN + 1
    assert found[-1].message == "1901 more errors are not shown"  # 2000, and the output that nothing defines


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("kernel k(x: f32) -> o: f32 {\n    o = x \0\n}", "E0001", "NUL"),
        ("kernel k(x: f32) -> o: f32 {\n    o = x\u200b\n}", "E0001", "U+200B"),
        ('import "abc', "E0005", "closing quote"),
        (f"fn f(x) = {'(' * 10_000}x{')' * 10_000}", "E0007", "200"),
        (f"fn f(x) = {'- ' * 10_000}x", "E0007", "200"),
        (f"fn f(x) = {'x+' * 1_000_000}x", "E0010", "100000"),
        (f"fn {'f' * 300}(x) = x", "E0009", "300"),
        (f"fn f(x) = {'9' * 100_000}", "E0004", "100000"),
        ("x" * 4_000_001, "E0008", "4000000"),
    ],
    ids=["nul", "invisible", "quote", "nesting", "signs", "statement", "name", "number", "file"],
)
def test_bounds_have_their_own_words(text: str, code: str, words: str) -> None:
    (found,) = errors(text)
    assert found.code == code
    assert words in found.message
    assert len(found.render()) < 1000
