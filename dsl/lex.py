"""Characters to tokens: comments, newlines that end statements, and every problem that can be seen without grammar.

A newline ends a statement except inside `(`, `[`, `<`, after an operator, or before `->` and `{` (DESIGN 2); only such
newlines become NEWLINE tokens. Problems do not stop the lexer: they are BAD tokens that carry their diagnostic, so that
the parser can report them together with the errors of other statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import field
from typing import NamedTuple

from .diagnostics import Diagnostic, TileError, refuse
from .foreign import FOREIGN_SIGNS
from .records import dataclass
from .source import Source, Span

MAX_NESTING = 200
MAX_NAME_CHARACTERS = 200
MAX_NUMBER_CHARACTERS = 400
MAX_STATEMENT_TOKENS = 100_000
MAX_PROBLEMS = 100

KEYWORDS = frozenset({"import", "fn", "kernel", "require", "example", "return", "inout"})
KEYWORDS |= frozenset({"in", "and", "or", "not", "true", "false", "inf"})

# The grammar's terminals of one character or a word are named by Lark, the others in grammar.lark.
TYPES = {
    "(": "LPAR",
    ")": "RPAR",
    "[": "LSQB",
    "]": "RSQB",
    "{": "LBRACE",
    "}": "RBRACE",
    ",": "COMMA",
    ":": "COLON",
    "|": "VBAR",
    "=": "EQUAL",
    "<": "LESSTHAN",
    ">": "MORETHAN",
    "+": "PLUS",
    "-": "MINUS",
    "*": "STAR",
    "/": "SLASH",
    "%": "PERCENT",
    "->": "ARROW",
    "<=": "AT_MOST",
    ">=": "AT_LEAST",
    "==": "EQUALS",
    "!=": "DIFFERS",
    "+=": "ADD_TO",
    "//": "FLOOR",
    **{word: word.upper() for word in KEYWORDS},
}
OPENERS = {"(": ")", "[": "]", "{": "}"}
CLOSERS = {")": "(", "]": "[", "}": "{"}
# After these a line goes on.
CONTINUES = frozenset({"+", "-", "*", "/", "//", "%", "=", "+=", "==", "!=", "<=", ">=", "<", ">", ",", ":"})
CONTINUES |= frozenset({"|", "->", "and", "or", "not", "in", "require", "example", "import", "fn", "kernel"})

_SCAN = re.compile(
    r"""(?P<space>[ \t]+)
    | (?P<newline>(?:\r?\n)+)
    | (?P<comment>\#[^\n]*)
    | (?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<string>"[^"\r\n]*")
    | (?P<foreign>\*\*=?|&&|\|\||:=|[-*/%]=|//=|=>|=<|!(?!=)|[\^;?@~$&\\'`.])
    | (?P<sign>->|<=|>=|==|!=|\+=|//|[-+*/%()\[\]{},:|=<>])
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_MALFORMED_NUMBER = re.compile(r"[A-Za-z_0-9.]+", re.ASCII)


class Token(NamedTuple):
    """`type` is the grammar's terminal name, or COMMENT (only from `scan`), or BAD with the `problem` it stands for."""

    type: str
    text: str
    span: Span
    problem: Diagnostic | None = None


def scan(source: Source) -> Iterator[Token]:
    """Every token with comments and all newlines, in text order; spaces are dropped."""
    text, start = source.text, 0
    while start < len(text):
        match = _SCAN.match(text, start)
        assert match is not None  # the last alternative fits any character
        kind = match.lastgroup
        if kind == "space":
            start = match.end()
            continue
        token = _token(source, str(kind), match.group(), start)
        yield token
        start = token.span.end


def _token(source: Source, kind: str, text: str, start: int) -> Token:
    span = Span(source, start, start + len(text))
    match kind:
        case "sign":
            return Token(TYPES[text], text, span)
        case "name":
            return _name(text, span)
        case "number":
            return _number(text, span)
        case "newline" | "comment" | "string":
            return Token(kind.upper(), text, span)
        case "foreign":
            message, help = FOREIGN_SIGNS[text]
            return _bad(span, "E0002", message, help=help)
    return _stray(text, span)


def _name(text: str, span: Span) -> Token:
    if len(text) > MAX_NAME_CHARACTERS:
        return _bad(
            span, "E0009", f"a name of {len(text)} characters; at most {MAX_NAME_CHARACTERS} are accepted"
        )
    return Token(TYPES.get(text, "NAME"), text, span)


def _number(text: str, span: Span) -> Token:
    """A number must end where its pattern ends: `12ab`, `1.2.3`, `0x10` and `1_000` are one malformed number each."""
    tail = _MALFORMED_NUMBER.match(span.source.text, span.end)
    if tail is not None:
        whole = Span(span.source, span.start, tail.end())
        return _bad(
            whole,
            "E0003",
            f"`{_short(whole.text)}` is not a number",
            help="numbers are written like 12, 0.5 or 1e-6; names start with a letter",
        )
    if len(text) > MAX_NUMBER_CHARACTERS:
        return _bad(
            span, "E0004", f"a number of {len(text)} characters; at most {MAX_NUMBER_CHARACTERS} are accepted"
        )
    if text.isdigit():
        if int(text) >= 2**63:
            return _bad(
                span,
                "E0004",
                f"{_short(text)} does not fit an i64",
                help="the largest integer is 9223372036854775807",
            )
    elif float(text) == float("inf"):
        return _bad(span, "E0004", f"{_short(text)} is larger than any f64", help="infinity is written `inf`")
    return Token("NUMBER", text, span)


def _stray(text: str, span: Span) -> Token:
    """One character that begins no token."""
    if text == '"':
        end = min(i for i in (span.source.text.find("\n", span.start), len(span.source.text)) if i >= 0)
        return _bad(
            Span(span.source, span.start, end),
            "E0005",
            "this text has no closing quote",
            help='close it with `"`',
        )
    if text in FOREIGN_SIGNS:
        message, help = FOREIGN_SIGNS[text]
        return _bad(span, "E0002", message, help=help)
    if text.isprintable():
        return _bad(
            span,
            "E0001",
            f"the character `{text}` has no meaning here",
            help="names are made of the letters a to z and A to Z, digits and `_`; other letters may stand in comments",
        )
    what = "a NUL character" if text == "\0" else f"the invisible character U+{ord(text):04X}"
    return _bad(span, "E0001", f"{what} in the text", help="delete it; the file must be plain UTF-8 text")


def _bad(span: Span, code: str, message: str, note: str | None = None, help: str | None = None) -> Token:
    return Token("BAD", span.text, span, Diagnostic(code, message, span, note, help))


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}…"


def tokens(source: Source) -> list[Token]:
    """The tokens that the grammar reads; an opening bracket without its partner, and the reverse, become BAD.

    Raises `TileError` where a bound is passed: nesting, size of a statement, number of problems.
    """
    stream = _Stream()
    for token in scan(source):
        stream.add(token)
    stream.close_all()
    if stream.out and stream.out[-1].type == "NEWLINE":
        stream.out.pop()
    return stream.out


@dataclass
class _Stream:
    """The tokens so far, and the places in them of brackets that are still open."""

    out: list[Token] = field(default_factory=list)
    open_at: list[int] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    size: int = 0
    signs: int = 0

    def add(self, token: Token) -> None:
        if token.type == "COMMENT" or (token.type == "NEWLINE" and not self._ends_statement()):
            return
        if token.type in ("FN", "KERNEL", "IMPORT") and self._at_line_start(token):
            self.close_all()
            if self.out and self.out[-1].type != "NEWLINE":
                start = token.span.start
                self.out.append(Token("NEWLINE", "", Span(token.span.source, start, start)))
        elif token.type in ("ARROW", "LBRACE", "RBRACE") and self.out and self.out[-1].type == "NEWLINE":
            self.out.pop()
        self.out.append(token)
        self._bound(token)
        if token.type in ("LPAR", "LSQB", "LBRACE"):
            self.open_at.append(len(self.out) - 1)
        elif token.type in ("RPAR", "RSQB", "RBRACE"):
            self._close(token)

    def _ends_statement(self) -> bool:
        if not self.out or self.out[-1].type in ("NEWLINE", "LBRACE") or self.out[-1].text in CONTINUES:
            return False
        return not self.open_at or self.out[self.open_at[-1]].type == "LBRACE"

    def _at_line_start(self, token: Token) -> bool:
        if not self.out or self.out[-1].type == "RBRACE":
            return True
        text = token.span.source.text
        return not text[text.rfind("\n", 0, token.span.start) + 1 : token.span.start].strip()

    def _bound(self, token: Token) -> None:
        """Refuse what is too large to go on with."""
        self.size = 0 if token.type == "NEWLINE" else self.size + 1
        self.signs = self.signs + 1 if token.type in ("MINUS", "NOT") else 0
        if token.problem is not None:
            self.problems.append(token.problem)
            if len(self.problems) == MAX_PROBLEMS:
                raise TileError(self.problems)
        opens = token.text in OPENERS and token.type != "BAD"
        if (opens and len(self.open_at) >= MAX_NESTING) or self.signs > MAX_NESTING:
            what = (
                "`-` and `not` stand in a row"
                if self.signs > MAX_NESTING
                else "brackets stand inside each other"
            )
            raise refuse(
                "E0007",
                f"more than {MAX_NESTING} {what}",
                token.span,
                help="name inner parts with statements of their own",
            )
        if self.size > MAX_STATEMENT_TOKENS:
            raise refuse(
                "E0010",
                f"a statement of more than {MAX_STATEMENT_TOKENS} words and signs",
                token.span,
                help="name parts of it with statements of their own",
            )

    def _close(self, token: Token) -> None:
        """Pair the closing bracket that was just added; brackets left open inside the pair are BAD."""
        partner = CLOSERS[token.text]
        if not any(self.out[i].text == partner for i in self.open_at):
            help = f"delete it, or add the `{partner}` that it should close"
            self.out[-1] = _bad(token.span, "E0006", f"`{token.text}` closes no bracket", help=help)
            return
        while self.out[self.open_at[-1]].text != partner:
            self._never_closed()
        self.open_at.pop()

    def close_all(self) -> None:
        while self.open_at:
            self._never_closed()

    def _never_closed(self) -> None:
        index = self.open_at.pop()
        token = self.out[index]
        closer = OPENERS[token.text]
        self.out[index] = _bad(
            token.span, "E0006", f"`{token.text}` is never closed", help=f"add the missing `{closer}`"
        )
