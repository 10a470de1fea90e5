"""Characters to tokens: comments, newlines that end statements, and every problem that can be seen without grammar.

A newline ends a statement except inside `(`, `[`, `<`, after an operator, or before `->` and `{` (DESIGN 2); only such
newlines become NEWLINE tokens. Problems do not stop the lexer: they are BAD tokens that carry their diagnostic, so that
the parser can report them together with the errors of other statements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .diagnostics import Diagnostic
from .foreign import FOREIGN_SIGNS
from .source import Source, Span

MAX_FILE_CHARACTERS = 4_000_000
MAX_NESTING = 200
MAX_NAME_CHARACTERS = 200
MAX_NUMBER_CHARACTERS = 400

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
    | (?P<newline>\r?\n)
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


@dataclass(frozen=True, slots=True)
class Token:
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
    """The tokens that the grammar reads. An opening bracket without its partner, and the reverse, become BAD."""
    out: list[Token] = []
    open_at: list[int] = []
    for token in scan(source):
        match token.type:
            case "COMMENT":
                continue
            case "NEWLINE":
                if _ends_statement(out, open_at):
                    out.append(token)
                continue
            case "FN" | "KERNEL" | "IMPORT" if _at_line_start(out, token):
                _close_all(out, open_at)
                if out and out[-1].type != "NEWLINE":
                    out.append(Token("NEWLINE", "\n", Span(source, token.span.start, token.span.start)))
            case "ARROW" | "LBRACE" | "RBRACE" if out and out[-1].type == "NEWLINE":
                out.pop()
        out.append(token)
        if token.text in OPENERS and token.type != "BAD":
            open_at.append(len(out) - 1)
            if len(open_at) > MAX_NESTING:
                out[-1] = _bad(
                    token.span,
                    "E0007",
                    f"brackets are nested more than {MAX_NESTING} deep",
                    help="name inner parts with statements of their own",
                )
                return out
        elif token.text in CLOSERS and token.type != "BAD":
            _close(out, open_at)
    _close_all(out, open_at)
    if out and out[-1].type == "NEWLINE":
        out.pop()
    return out


def _ends_statement(out: list[Token], open_at: list[int]) -> bool:
    if not out or out[-1].type == "NEWLINE" or out[-1].text in CONTINUES or out[-1].text == "{":
        return False
    return not open_at or out[open_at[-1]].text == "{"


def _at_line_start(out: list[Token], token: Token) -> bool:
    if not out or out[-1].text == "}":
        return True
    text = token.span.source.text
    return not text[text.rfind("\n", 0, token.span.start) + 1 : token.span.start].strip()


def _close(out: list[Token], open_at: list[int]) -> None:
    """Pair the closing bracket that was just added; brackets left open inside the pair are BAD."""
    token = out[-1]
    partner = CLOSERS[token.text]
    if not any(out[i].text == partner for i in open_at):
        out[-1] = _bad(
            token.span,
            "E0006",
            f"`{token.text}` closes no bracket",
            help=f"delete it, or add the `{partner}` that it should close",
        )
        return
    while out[open_at[-1]].text != partner:
        _never_closed(out, open_at.pop())
    open_at.pop()


def _close_all(out: list[Token], open_at: list[int]) -> None:
    while open_at:
        _never_closed(out, open_at.pop())


def _never_closed(out: list[Token], index: int) -> None:
    token = out[index]
    closer = OPENERS[token.text]
    out[index] = _bad(
        token.span, "E0006", f"`{token.text}` is never closed", help=f"add the missing `{closer}`"
    )
