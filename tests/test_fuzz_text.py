"""Any text gives a program or diagnostics: random text, random tokens, and broken copies of real programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.lex import KEYWORDS, TYPES
from tileloom.dsl.load import load, parse
from tileloom.dsl.syntax import Program

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    p.read_text(encoding="utf-8")
    for folder in ("dsl", "examples")
    for p in sorted((ROOT / folder).rglob("*.tile"))
]
TEXTS += [p.read_text(encoding="utf-8") for p in sorted((ROOT / "tests" / "cases").rglob("*.tile"))]
WORDS = [
    *sorted({*KEYWORDS, *TYPES}),
    "x",
    "n",
    "N",
    "f32",
    "softmax",
    "sum",
    "max",
    "1",
    "0.5",
    "\n",
    "#",
    '"a"',
]
WORDS += ["grad", "wrt", "as", "tile"]
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def answer(text: str) -> Program | TileError:
    """A program or an error whose every diagnostic can be shown; anything else raises."""
    try:
        return parse(text)
    except TileError as error:
        found = error
    assert found.diagnostics
    for diagnostic in found.diagnostics:
        assert diagnostic.render()
        assert diagnostic.as_json()["message"]
    return found


@given(st.text(max_size=200))
@example("\0")
@example("\ufeff")
@example("\ud800")
@example("\r")
@example("{")
@example("}")
@example("fn")
@example("kernel k(")
@example("grad")
@example("tile x")
@example("import")
def test_any_text(text: str) -> None:
    answer(text)


@settings(suppress_health_check=SLOW, max_examples=300)
@given(st.lists(st.sampled_from(WORDS), max_size=60))
def test_any_words(words: list[str]) -> None:
    answer(" ".join(words))
    answer("kernel k(x: f32[N]) -> o: f32[N] {\n o[n] = " + " ".join(words) + "\n}\n")


@settings(suppress_health_check=SLOW, max_examples=300)
@given(st.data())
def test_broken_programs(data: st.DataObject) -> None:
    """Cut out, double, swap or insert pieces of a real program."""
    text = data.draw(st.sampled_from(TEXTS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        to = data.draw(st.integers(0, len(text)))
        piece = data.draw(st.sampled_from(["", text[at : at + length], data.draw(st.sampled_from(WORDS))]))
        text = text[:at] + text[at + length :]
        text = text[:to] + piece + text[to:]
    answer(text)


@settings(suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.binary(max_size=60))
@example(b"\xff\xfe\x00")
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.tile"
    path.write_bytes(data)
    with suppress(TileError):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10_000,
        ")" * 10_000,
        "{" * 10_000,
        "[" * 10_000 + "]" * 10_000,
        "fn f(x) = " + "(" * 10_000 + "x" + ")" * 10_000,
        "fn f(x) = " + "f(" * 10_000 + "x" + ")" * 10_000,
        "fn f(x) = " + "not " * 10_000 + "x",
        "fn f(x) = " + "x < " * 20_000 + "x",
        "fn f(x) = " + "x or " * 20_000 + "x",
        "fn f(x) = g(" + "x, " * 20_000 + "x)",
        "x" * 2_000_000,
        "@" * 2_000_000,
        "#" * 2_000_000,
        " " * 2_000_000,
        "\n" * 2_000_000,
        "1" * 2_000_000,
        "1 " * 1_000_000,
        "-" * 2_000_000,
        '"' * 1_000_000,
        "fn " * 100_000,
        "fn f(x) = x\n" * 2_000,
        "kernel k(x: f32[N]) -> o: f32 {\n" + "o = x + \n" * 5_000 + "}",
        "kernel k(x: f32[N]) -> o: f32 {\n" + "o = x y\n" * 5_000 + "}",
        "kernel k(" + "x: f32[N], " * 5_000 + ") -> o: f32 { o = 1 }",
        "kernel k(x: f32[N]) -> o: f32 { o = x[0" + " + q[0]" * 2_000 + "] }",
    ],
    ids=lambda text: f"{text[:24]!r}…{len(text)}",
)
def test_huge_texts(text: str) -> None:
    assert isinstance(answer(text), Program | TileError)
