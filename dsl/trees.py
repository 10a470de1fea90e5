"""Syntax trees of texts: kept ones, for which no parser is imported, and parsed ones.

As bytes, a tree does not hold the source that all its spans name."""

from __future__ import annotations

import io
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any, cast

from . import shelves
from . import syntax as s
from .source import Source


def tree(source: Source) -> s.File:
    """The tree of one file. Raises `TileError` with every syntax error found."""
    shelf = shelves.shelf()
    if shelf is None:
        return _parsed(source)
    name = shelves.digest(_own_text(), shelves.parser_version(), sys.version, source.text)
    kept = shelf.get(shelves.TREES, name)
    if kept is not None:
        return s.File(source, read(kept, source))
    made = _parsed(source)
    content = written(made.items)
    if content is not None:
        shelf.put(shelves.TREES, content, name)
    return made


def _parsed(source: Source) -> s.File:
    from .parse import parse_file  # with Lark

    return parse_file(source)


@cache
def _own_text() -> str:
    """What decides which tree a text has: the grammar and the modules beside it."""
    files = sorted(f for f in Path(__file__).parent.iterdir() if f.suffix in (".py", ".lark"))
    return shelves.digest(*(part for f in files for part in (f.name, f.read_text(encoding="utf-8"))))


class _Writer(pickle.Pickler):
    """The source stands for itself, so that a tree read back names the one it is wanted for."""

    def persistent_id(self, value: object) -> str | None:
        return "source" if isinstance(value, Source) else None


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, source: Source) -> None:
        super().__init__(io.BytesIO(content))
        self._source = source

    def persistent_load(self, name: Any) -> Source:
        return self._source


def written(items: tuple[s.Item, ...]) -> bytes | None:
    """The items of a file as bytes; None where they are nested too deeply for that."""
    content = io.BytesIO()
    try:
        _Writer(content, protocol=5).dump(items)
    except RecursionError:
        return None
    return content.getvalue()


def read(content: bytes, source: Source) -> tuple[s.Item, ...]:
    """Items that `written` wrote, as items of this source; only this user may be able to write what is read."""
    return cast("tuple[s.Item, ...]", _Reader(content, source).load())
