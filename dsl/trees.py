"""Syntax trees as bytes, and back. The source that all their spans name is not part of them."""

from __future__ import annotations

import io
import pickle
from typing import Any, cast

from . import syntax as s
from .source import Source


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
