"""What a syntax error most likely means, and what to write instead: a table of common mistakes, tried in order."""

from __future__ import annotations

from dataclasses import dataclass

from .diagnostics import Diagnostic
from .lex import Token


@dataclass(frozen=True)
class Failure:
    """The parser met `tokens[place]` (`end` if there is none), and would have accepted the terminals `expected`."""

    tokens: tuple[Token, ...]
    end: Token
    place: int
    expected: frozenset[str]

    @property
    def at(self) -> Token:
        return self.tokens[self.place] if self.place < len(self.tokens) else self.end


def explain(failure: Failure) -> Diagnostic:
    return Diagnostic("E0020", f"`{failure.at.text}` was not expected here", failure.at.span)
