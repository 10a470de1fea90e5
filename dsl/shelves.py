"""Where bytes outlive the process: trees of texts and the parser's tables, which take long to make and little to read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

TABLES, TREES = "tables", "trees"
"""The groups of entries that hold tables, and trees of texts without errors."""


class Shelf(Protocol):
    """What it gives back is unpickled, so only this user may be able to write there."""

    def get(self, group: str, name: str) -> bytes | None: ...

    def put(self, group: str, content: bytes, name: str) -> None: ...


_shelf: Callable[[], Shelf] | None = None
_parser = ""


def keep(shelf: Callable[[], Shelf], parser: str) -> None:
    """Keep tables and trees there. `parser` is the version of Lark, which is not imported to ask for it."""
    global _shelf, _parser
    _shelf, _parser = shelf, parser


def shelf() -> Shelf | None:
    """None where nothing is kept."""
    return _shelf() if _shelf is not None else None


def parser_version() -> str:
    return _parser


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:40]
