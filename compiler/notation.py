"""Notation that the text forms of both IRs share: tokens, numbers, infix operators with the language's precedence.

`Reader` parses with explicit stacks: a long chain of operators costs no recursion, and brackets nest up to `DEPTH`.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Generic, NoReturn, TypeVar

from ..dsl.diagnostics import refuse
from ..dsl.records import dataclass
from ..dsl.source import Source, Span
from ..dsl.types import NAMES, DType

DEPTH = 200
"""Brackets inside brackets; far above what a pass writes."""
SIZE = 16_000_000
"""Characters of one text."""

OR, AND, NOT, COMPARE, SUM, PRODUCT, SIGN, ATOM = range(8)
INFIX: dict[str, tuple[str, int]] = {
    "or": ("or", OR),
    "and": ("and", AND),
    "<": ("lt", COMPARE),
    "<=": ("le", COMPARE),
    "==": ("eq", COMPARE),
    "!=": ("ne", COMPARE),
    "+": ("add", SUM),
    "-": ("sub", SUM),
    "*": ("mul", PRODUCT),
    "/": ("div", PRODUCT),
    "//": ("floordiv", PRODUCT),
    "%": ("mod", PRODUCT),
}
SWAPPED = {">": "<", ">=": "<="}
SIGNS: dict[str, tuple[str, int]] = {op: (sign, level) for sign, (op, level) in INFIX.items()}
RESERVED = frozenset({"and", "or", "not", "true", "false", "inf", "nan"})

# ---------------------------------------------------------------- printing


@dataclass(frozen=True)
class Piece:
    """The text of an expression and how tightly its outermost operator binds."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The text as an operand of an operator of `level`."""
        return self.text if self.level >= level else f"({self.text})"


def infix(op: str, left: Piece, right: Piece) -> Piece:
    """Operators associate to the left; comparisons do not chain."""
    sign, level = SIGNS[op]
    return Piece(f"{left.at(level + (level == COMPARE))} {sign} {right.at(level + 1)}", level)


def prefix(op: str, operand: Piece, is_constant: bool) -> Piece:
    """`-x`, `not x`. `-(1.0)` is the negation of a constant, `-1.0` a constant."""
    if op == "not":
        return Piece(f"not {operand.at(NOT)}", NOT)
    return Piece(f"-({operand.text})" if is_constant else f"-{operand.at(SIGN)}", SIGN)


def call(name: str, arguments: Iterable[Piece]) -> Piece:
    return Piece(f"{name}({', '.join(a.text for a in arguments)})")


def number(value: int | float | bool, dtype: DType) -> Piece:
    """A constant; a suffix states its dtype where it is not f32 for a float, i64 for an integer, bool."""
    if dtype is DType.BOOL:
        return Piece("true" if value else "false")
    if dtype.is_float:
        text = repr(float(value))
        suffix = "" if dtype is DType.F32 else dtype.value
    else:
        text = repr(int(value))
        suffix = "" if dtype is DType.I64 else dtype.value
    return Piece(text + suffix, SIGN if text.startswith("-") else ATOM)


def quote(text: str) -> str:
    """A string token, with JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Token:
    """`kind` is word, number, string, sign, shared (`%1`, where a notation has it) or end."""

    kind: str
    text: str
    start: int
    end: int


_SUFFIX = "(?:" + "|".join(sorted(NAMES, key=len, reverse=True)) + ")"
_TOKEN = re.compile(
    rf"""(?P<skip>[ \t\r\n]+|\#[^\n]*)
    |(?P<number>(?:inf|nan)(?:f64|f16|bf16)?\b|(?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+){_SUFFIX}?(?![\w.]))
    |(?P<word>[^\W\d]\w*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<sign>->|//|<=|>=|==|!=|\+=|[-+*/%<>=()\[\]{{}},:|@.])""",
    re.VERBOSE,
)


def is_word(text: str) -> bool:
    """Does the text read as one name?"""
    found = _TOKEN.fullmatch(text)
    return found is not None and found.lastgroup == "word" and text not in RESERVED


_SHARED = re.compile(r"%\d+")


def tokenize(source: Source, shared: bool = False, part: Span | None = None) -> list[Token]:
    """All tokens of a text, or of `part` of it; `shared` takes `%1` as one (a remainder is then written `a % 1`)."""
    if len(source.text) > SIZE:
        raise refuse("E0602", f"the text has {len(source.text)} characters; at most {SIZE} are read", None)
    tokens: list[Token] = []
    at, end = (part.start, part.end) if part is not None else (0, len(source.text))
    while at < end:
        number = _SHARED.match(source.text, at) if shared else None
        if number is not None:
            tokens.append(Token("shared", number.group(), at, number.end()))
            at = number.end()
            continue
        found = _TOKEN.match(source.text, at)
        if found is None:
            span = Span(source, at, at + 1)
            raise refuse("E0601", f"unexpected character {source.text[at]!r}", span)
        if found.lastgroup != "skip":
            tokens.append(Token(str(found.lastgroup), found.group(), at, found.end()))
        at = found.end()
    tokens.append(Token("end", "", at, at))
    return tokens


_NUMBER = re.compile(rf"(inf|nan|[\d.]+(?:[eE][+-]?\d+)?)({_SUFFIX})?")


def literal(text: str) -> tuple[int | float, DType]:
    """The value and dtype of a number token without sign."""
    found = _NUMBER.fullmatch(text)
    assert found is not None, text
    digits, suffix = found.groups()
    whole = digits.isdigit()
    dtype = NAMES[suffix] if suffix else DType.I64 if whole else DType.F32
    if digits == "nan":
        return math.nan, dtype  # the one object: a NaN equals itself by identity only
    return (float(digits) if dtype.is_float else int(digits)), dtype


# ---------------------------------------------------------------- reading

E = TypeVar("E")


@dataclass(frozen=True)
class Open(Generic[E]):
    """An open bracket: `build` makes the expression from its arguments; `height` counts operands below them.

    `close` is `)`, `]`, or `](`: then another argument in parentheses follows.
    """

    close: str
    build: Callable[[tuple[E, ...]], E]
    height: int
    many: bool
    token: Token


@dataclass(frozen=True)
class Operator:
    """A pending operator; `arity` 1 is a prefix, `swap` exchanges the operands of a `>`."""

    op: str
    level: int
    arity: int
    token: Token
    swap: bool = False


class Words:
    """A cursor over the tokens of a text, or of a part of it."""

    def __init__(self, source: Source, shared: bool = False, part: Span | None = None) -> None:
        self.source = source
        self.tokens = tokenize(source, shared, part)
        self.at = 0

    # -- cursor

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def ahead(self, n: int = 1) -> Token:
        return self.tokens[min(self.at + n, len(self.tokens) - 1)]

    def next(self) -> Token:
        token = self.token
        self.at += token.kind != "end"
        return token

    def accept(self, text: str) -> bool:
        """Step over a sign or keyword if it stands here."""
        if self.token.text != text or self.token.kind == "string":
            return False
        self.at += 1
        return True

    def expect(self, text: str, where: str) -> Token:
        if self.token.text != text or self.token.kind == "string":
            self.fail(f"expected `{text}` {where}, found {self.describe()}")
        return self.next()

    def word(self, what: str) -> str:
        """An identifier; `what` says of what."""
        if self.token.kind != "word" or self.token.text in RESERVED:
            self.fail(f"expected {what}, found {self.describe()}")
        return self.next().text

    def words(self, what: str) -> tuple[str, ...]:
        found = [self.word(what)]
        while self.accept(","):
            found.append(self.word(what))
        return tuple(found)

    def integer(self, what: str) -> int:
        if not (self.token.kind == "number" and self.token.text.isdigit()):
            self.fail(f"expected {what}, found {self.describe()}")
        return int(self.next().text)

    def string(self, what: str) -> str:
        if self.token.kind != "string":
            self.fail(f"expected {what} in quotes, found {self.describe()}")
        try:
            text = str(json.loads(self.token.text))
        except ValueError:
            self.fail("a string holds an unknown escape", help="the escapes are those of JSON")
        self.next()
        return text

    def dtype(self) -> DType:
        if self.token.text not in NAMES:
            known = ", ".join(NAMES)
            self.fail(f"expected an element type, found {self.describe()}", help=f"one of {known}")
        return NAMES[self.next().text]

    def describe(self) -> str:
        return "the end of the text" if self.token.kind == "end" else f"`{self.token.text}`"

    def span(self, token: Token) -> Span:
        return Span(self.source, token.start, token.end)

    def since(self, token: Token) -> Span:
        """From `token` to the last token read."""
        return Span(self.source, token.start, self.tokens[max(self.at - 1, 0)].end)

    def fail(
        self, message: str, code: str = "E0601", token: Token | None = None, help: str | None = None
    ) -> NoReturn:
        raise refuse(code, message, self.span(token or self.token), help=help)


class Reader(Words, Generic[E]):
    """Reads infix expressions; subclasses say what atoms, brackets and operators make."""

    # -- what subclasses say

    @abstractmethod
    def opening(self) -> tuple[str, Callable[[tuple[E, ...]], E]] | None:
        """Step over `name(`, `load t[`, `sum[n](` if one stands here; its closing bracket, and what it makes."""

    @abstractmethod
    def atom(self) -> E:
        """A name or whatever else is an operand in one piece; numbers and truth values are `constant`s."""

    @abstractmethod
    def constant(self, value: int | float | bool, dtype: DType) -> E: ...

    @abstractmethod
    def operation(self, op: str, operands: tuple[E, ...], token: Token) -> E: ...

    # -- expressions

    def expressions(self) -> tuple[E, ...]:
        found = [self.expression()]
        while self.accept(","):
            found.append(self.expression())
        return tuple(found)

    def expression(self) -> E:
        operands: list[E] = []
        pending: list[Operator | Open[E]] = []
        while True:
            if not self._operand(operands, pending):
                continue
            if not self._after(operands, pending):
                return operands[0]

    def _operand(self, operands: list[E], pending: list[Operator | Open[E]]) -> bool:
        """Read towards an operand; False while only a prefix or a bracket was read."""
        token = self.token
        if token.text == "-" and self.ahead().kind != "number":
            pending.append(Operator("neg", SIGN, 1, self.next()))
            return False
        if token.text == "not":
            top = pending[-1] if pending else None
            if isinstance(top, Operator) and top.level > NOT:
                self.fail("`not` binds less than the operator before it", help="put it in parentheses")
            pending.append(Operator("not", NOT, 1, self.next()))
            return False
        if token.text == "(" and token.kind == "sign":
            self._open(pending, Open(")", lambda made: made[0], len(operands), False, self.next()))
            return False
        opened = self.opening()
        if opened is not None:
            self._open(pending, Open(opened[0], opened[1], len(operands), True, token))
            return self.token.text == opened[0]
        operands.append(self._atom())
        return True

    def _open(self, pending: list[Operator | Open[E]], bracket: Open[E]) -> None:
        if len(pending) >= DEPTH and sum(isinstance(p, Open) for p in pending) >= DEPTH:
            self.fail(
                f"brackets nest more than {DEPTH} deep",
                "E0602",
                bracket.token,
                help="give an inner expression a name of its own",
            )
        pending.append(bracket)

    def _atom(self) -> E:
        token = self.token
        sign = -1 if token.text == "-" else 1
        if sign < 0:
            self.next()
        if self.token.kind == "number":
            value, dtype = literal(self.next().text)
            return self.constant(value if math.isnan(value) else sign * value, dtype)
        if token.text in ("true", "false"):
            self.next()
            return self.constant(token.text == "true", DType.BOOL)
        return self.atom()

    def _after(self, operands: list[E], pending: list[Operator | Open[E]]) -> bool:
        """After an operand: close brackets, then step over an operator or comma; False at the expression's end."""
        while True:
            token = self.token
            sign = SWAPPED.get(token.text, token.text)
            if sign in INFIX and token.kind != "string":
                op, level = INFIX[sign]
                self._reduce(operands, pending, level)
                pending.append(Operator(op, level, 2, self.next(), sign != token.text))
                return True
            self._reduce(operands, pending, OR)
            if not pending:
                return False
            bracket = pending[-1]
            assert isinstance(bracket, Open)
            if token.text == "," and bracket.many:
                self.next()
                return True
            self.expect(bracket.close[0], f"to close the bracket of `{bracket.token.text}`")
            if bracket.close == "](":
                self.expect("(", f"after the brackets of `{bracket.token.text}`")
                pending[-1] = replace(bracket, close=")")
                return True
            pending.pop()
            made = tuple(operands[bracket.height :])
            del operands[bracket.height :]
            operands.append(bracket.build(made))

    def _reduce(self, operands: list[E], pending: list[Operator | Open[E]], level: int) -> None:
        """Apply the pending operators of this bracket that bind at least as tightly as `level`."""
        while pending and isinstance(top := pending[-1], Operator) and top.level >= level:
            if top.level == level == COMPARE:
                self.fail("comparisons do not chain here", help="join two comparisons with `and`")
            pending.pop()
            arguments = tuple(operands[-top.arity :])
            del operands[-top.arity :]
            made = self.operation(top.op, arguments[::-1] if top.swap else arguments, top.token)
            operands.append(made)
