"""Syntax trees that outlive a process: as parsed, of the source that they are wanted for, and none of a wrong text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileloom.dsl import parse, shelves, trees
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.load import load
from tileloom.dsl.source import Source
from tileloom.runtime.cache import Store

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.tile"))
TEXT = "kernel copied(x: f32[N]) -> y: f32[N] { y[n] = x[n] }\n"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store(tmp_path / "cache")
    monkeypatch.setattr(shelves, "_shelf", lambda: store)
    return store


def refused() -> None:
    raise AssertionError("parsed again")


def test_a_text_seen_before_needs_no_parser(shelf: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [Source(str(f), f.read_text(encoding="utf-8")) for f in EXAMPLES]
    first = [trees.tree(s) for s in files]
    monkeypatch.setattr(parse, "_lark", refused)
    again = [trees.tree(s) for s in files]
    assert again == first
    assert len(shelf.names(shelves.TREES)) == len(files) > 10
    with pytest.raises(AssertionError, match="parsed again"):
        trees.tree(Source("other", TEXT))


def test_spans_name_the_source_that_is_asked_for(shelf: Store) -> None:
    one, other = Source("one.tile", TEXT), Source("other.tile", TEXT)
    (first,), (second,) = trees.tree(one).items, trees.tree(other).items
    assert (first.span.source, second.span.source) == (one, other)
    assert [str(x.span) for x in (first, second)] == ["one.tile:1:1", "other.tile:1:1"]
    assert len(shelf.names(shelves.TREES)) == 1
    (entry,) = (shelf.folder / shelves.TREES).glob("*.entry")
    assert TEXT.encode() not in entry.read_bytes()


def test_a_wrong_text_is_refused_each_time(shelf: Store) -> None:
    source = Source("wrong", "kernel k(x: f32[N]) -> y: f32[N] { y[n] = x[n }\n")
    for _ in range(2):
        with pytest.raises(TileError):
            trees.tree(source)
    assert shelf.names(shelves.TREES) == []


def test_trees_are_kept_for_the_text_that_parses(shelf: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.tree(Source("a", TEXT))
    monkeypatch.setattr(trees, "_own_text", lambda: "another grammar")
    trees.tree(Source("a", TEXT))
    assert len(shelf.names(shelves.TREES)) == 2


def test_trees_are_kept_for_the_parser_that_made_them(shelf: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.tree(Source("a", TEXT))
    monkeypatch.setattr(shelves, "_parser", "another Lark")
    trees.tree(Source("a", TEXT))
    assert len(shelf.names(shelves.TREES)) == 2


def test_what_is_nested_too_deeply_is_not_kept(shelf: Store) -> None:
    text = f"kernel k(x: f32[N]) -> y: f32[N] {{ y[n] = x[n]{' + x[n]' * 2000} }}\n"
    made = trees.tree(Source("deep", text))
    assert trees.written(made.items) is None
    assert shelf.names(shelves.TREES) == []
    assert trees.tree(Source("deep", text)).items[0].name.name == "k"  # type: ignore[union-attr]


def test_a_program_of_kept_trees_is_the_same(shelf: Store) -> None:
    parsed, kept = (load(EXAMPLES[0]) for _ in range(2))
    assert parsed.kernels.keys() == kept.kernels.keys()
    assert list(parsed.kernels.values()) == list(kept.kernels.values())
