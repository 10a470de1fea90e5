"""`tileloom fmt`: one layout for all texts, comments kept. It changes spaces and line ends only, so the tree stays.

Four spaces a level; a statement begins a line; lines that the writer broke inside a statement stay broken and are indented;
`{` stands on its heading's line; at most one blank line, one after each `}` of an item. `tile` and `schedule` items are left
as they are.
"""

from __future__ import annotations

from dataclasses import field

from .lex import Token, scan, tokens
from .parse import parse_file
from .records import dataclass
from .source import Source
from .syntax import Verbatim

INDENT = "    "
_VALUE_ENDS = frozenset({"NAME", "NUMBER", "TRUE", "FALSE", "INF", "RPAR", "RSQB"})
_NO_SPACE_BEFORE = frozenset({"RPAR", "RSQB", "COMMA", "COLON"})
_NO_SPACE_AFTER = frozenset({"LPAR", "LSQB"})
_OPENS = frozenset({"LPAR", "LSQB"})
_CLOSES = frozenset({"RPAR", "RSQB"})


def format_text(text: str, name: str = "<text>") -> str:
    """`text` in the canonical layout, with `\\n` line ends. Raises `TileError` if it has syntax errors."""
    source = Source(name, text.removeprefix("\ufeff"))
    kept = [item for item in parse_file(source).items if isinstance(item, Verbatim)]
    layout = _Layout(_pieces(source, kept), _statement_ends(source))
    return layout.run()


def _statement_ends(source: Source) -> frozenset[int]:
    """Where statements end: at these newlines, and before items that share a line with another."""
    return frozenset(t.span.start for t in tokens(source) if t.type == "NEWLINE")


def _pieces(source: Source, kept: list[Verbatim]) -> list[Token]:
    """All tokens with comments and newlines; a kept item is one token, spaces around type parameters are decided."""
    starts = {item.span.start: item for item in kept}
    out: list[Token] = []
    skip_to = 0
    for token in scan(source):
        if token.span.start < skip_to:
            continue
        item = starts.get(token.span.start)
        if item is not None:
            out.append(Token("VERBATIM", item.text, item.span))
            skip_to = item.span.end
        else:
            out.append(_retyped(token, out))
    return out


def _retyped(token: Token, before: list[Token]) -> Token:
    """Signs that are written without spaces: brackets of type parameters, and a minus with nothing on its left."""
    last = [t for t in before[-8:] if t.type not in ("NEWLINE", "COMMENT")]
    if token.type == "LESSTHAN" and [t.type for t in last[-2:]] == ["KERNEL", "NAME"]:
        return Token("LPAR", token.text, token.span)
    if token.type == "MORETHAN" and _in_type_params(before):
        return Token("RPAR", token.text, token.span)
    if token.type == "MINUS" and not (last and last[-1].type in _VALUE_ENDS):
        return Token("NEGATIVE", token.text, token.span)
    return token


def _in_type_params(before: list[Token]) -> bool:
    for token in reversed(before):
        if token.type == "LPAR":
            return token.text == "<"
        if token.type in ("RPAR", "LBRACE", "RBRACE"):
            return False
    return False


def _space(left: Token, right: Token) -> bool:
    """Whether a space stands between two tokens of one line."""
    if left.type in _NO_SPACE_AFTER or right.type in _NO_SPACE_BEFORE or left.type == "NEGATIVE":
        return False
    if right.type in _OPENS:
        return left.type not in ("NAME", "RSQB") and left.text != ">"
    return True


@dataclass
class _Layout:
    """Lays out tokens one after the other; `line` is the line under work, `depth` its open brackets."""

    pieces: list[Token]
    ends: frozenset[int]
    out: list[str] = field(default_factory=list)
    line: list[Token] = field(default_factory=list)
    level: int = 0  # of open braces
    depth: int = 0  # of open brackets where the statement stands
    line_depth: int = 0  # the same at the start of the line
    begun: bool = False  # the statement has a line already
    blank: bool = False  # a blank line stands before the next statement
    inline: bool = False  # inside braces that stand on one line

    def run(self) -> str:
        newlines = 0
        for place, token in enumerate(self.pieces):
            if token.type == "NEWLINE":
                newlines += token.text.count("\n")
                self._newline(token, place)
                continue
            self.blank |= newlines > 1
            newlines = 0
            if token.span.start in self.ends and self.line:
                self._end_statement()
            self._add(token, place)
        self._flush()
        return "\n".join(self.out) + "\n" if self.out else ""

    def _newline(self, token: Token, place: int) -> None:
        if token.span.start in self.ends or self._next(place, "NEWLINE", "COMMENT").type == "RBRACE":
            self._end_statement()
        elif self.line and self._next(place, "NEWLINE").type != "LBRACE":
            self._flush()

    def _next(self, place: int, *passed: str) -> Token:
        """The next token that is none of the types passed over; the last one at the end."""
        while place + 1 < len(self.pieces) and self.pieces[place + 1].type in passed:
            place += 1
        return self.pieces[min(place + 1, len(self.pieces) - 1)]

    def _add(self, token: Token, place: int) -> None:
        match token.type:
            case "COMMENT":
                self._comment(token)
            case "VERBATIM":
                self.line.append(token)
                self._end_statement()
                self.blank = token.text.endswith("}")
            case "LBRACE":
                self._open(token, place)
            case "RBRACE":
                self._close(token)
            case _:
                self.line.append(token)
                self.depth += (token.type in _OPENS) - (token.type in _CLOSES)

    def _comment(self, token: Token) -> None:
        """After something on its line, or on a line of its own."""
        if not self.line and self.out and self._shares_line(token) and "#" not in self.out[-1]:
            self.out[-1] += f"  {token.text.rstrip()}"
            return
        self.line.append(token)
        self._flush()

    def _shares_line(self, token: Token) -> bool:
        text = token.span.source.text
        return bool(text[text.rfind("\n", 0, token.span.start) + 1 : token.span.start].strip())

    def _open(self, token: Token, place: int) -> None:
        self.line.append(token)
        self.inline = self._fits_inline(place)
        if not self.inline:
            self._flush()
            self.level += 1
            self.begun = False
            self.blank = False

    def _fits_inline(self, place: int) -> bool:
        """Whether the block that opens at `place` was written on one line."""
        for token in self.pieces[place + 1 :]:
            if token.type in ("NEWLINE", "COMMENT", "LBRACE"):
                return False
            if token.type == "RBRACE":
                return True
        return False

    def _close(self, token: Token) -> None:
        if self.inline:
            self.line.append(token)
            self.inline = False
        else:
            self._end_statement()
            self.level -= 1
            self.blank = False
            self.line.append(token)
        self._end_statement()
        self.blank = self.level == 0 and self.out[-1] == "}"

    def _end_statement(self) -> None:
        self._flush()
        self.depth = self.line_depth = 0
        self.begun = False

    def _flush(self) -> None:
        """Finish the line under work."""
        if not self.line:
            return
        if not self.begun and self.blank and self.out:
            self.out.append("")
        comment_only = self.line[0].type == "COMMENT"
        self.out.append(self._margin() + self._text())
        self.blank = self.blank and self.begun
        self.begun = self.begun or not comment_only
        self.line = []
        self.line_depth = self.depth

    def _margin(self) -> str:
        if not self.begun:
            return INDENT * self.level
        first = self.line[0]
        closing = first.type in _CLOSES
        inner = (
            0 if first.type == "LBRACE" else self.line_depth - closing if closing else max(1, self.line_depth)
        )
        return INDENT * (self.level + inner)

    def _text(self) -> str:
        out = self.line[0].text
        for left, right in zip(self.line, self.line[1:], strict=False):
            gap = "  " if right.type == "COMMENT" else " " if _space(left, right) else ""
            out += gap + right.text
        return out.rstrip()
