"""Text to syntax tree: cuts a file into items, parses each with Lark (LALR), and words every failure.

An error costs the statement it stands in, not the file: the statement is reported, left out, and the rest is parsed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import lark
from lark import Lark, Transformer
from lark.exceptions import UnexpectedToken

from . import shelves
from . import syntax as s
from .diagnostics import Diagnostic, Diagnostics, TileError, refuse
from .lex import Token, tokens
from .parse_mistakes import Failure, explain
from .records import dataclass
from .source import MAX_FILE_CHARACTERS, Source, Span

MAX_ERRORS_PER_ITEM = 20
# Words that begin an item only at the start of a line outside brackets, and are ordinary names elsewhere.
VERBATIM = frozenset({"tile", "module", "schedule"})


def parse_file(source: Source) -> s.File:
    """The tree of one file. Raises `TileError` with every syntax error found."""
    if len(source.text) > MAX_FILE_CHARACTERS:
        raise refuse(
            "E0008",
            f"the file has {len(source.text)} characters; at most {MAX_FILE_CHARACTERS} are accepted",
            None,
            note=f"in {source.name}",
        )
    found = Diagnostics()
    items: list[s.Item] = []
    sound = True
    for item in _items(tokens(source)):
        if sound or item[0].type in ("FN", "KERNEL", "IMPORT"):  # what follows a broken item is its rest
            before = len(found.found)
            node = _parse_item(item, found)
            sound = len(found.found) == before
            if node is not None:
                items.append(node)
    found.check()
    return s.File(source, tuple(items))


def parse_expression(source: Source) -> s.Expr:
    """The tree of a text that is one expression, such as the value of an option."""
    found = Diagnostics()
    node = _parse(tokens(source), "expression", found)
    found.check()
    return cast(s.Expr, node)


# ---------------------------------------------------------------- tables

OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "lexer": "basic",
    "start": ["item", "expression"],
    "keep_all_tokens": True,
}


@cache
def _lark() -> Lark:
    """The parser tables, built or read (a tenth of the time) at most once a process. Nodes are built during the parse: no
    tree is walked."""
    grammar = (Path(__file__).parent / "grammar.lark").read_text(encoding="utf-8")
    shelf = shelves.shelf()
    if shelf is None:
        return _built(grammar)
    name = shelves.digest(grammar, repr(OPTIONS), lark.__version__, sys.version)
    kept = shelf.get(shelves.TABLES, name)
    if kept is not None:
        return Lark.load(io.BytesIO(kept))
    made = _built(grammar)
    content = io.BytesIO()
    made.save(content)
    shelf.put(shelves.TABLES, content.getvalue(), name)
    return made


def _built(grammar: str) -> Lark:
    return Lark(grammar, transformer=_Build(), **OPTIONS)


# ---------------------------------------------------------------- items


def _items(stream: list[Token]) -> Iterator[list[Token]]:
    """The tokens of one item each: a newline outside braces ends an item, and so does `fn` or `kernel` at a line's start."""
    item: list[Token] = []
    depth = 0
    for token in stream:
        closed = bool(item) and item[-1].type == "RBRACE" and depth <= 0
        starts = token.type in ("FN", "KERNEL", "IMPORT") and bool(item) and item[-1].type == "NEWLINE"
        if item and (closed or starts or (depth <= 0 and token.type == "NEWLINE")):
            yield item
            item, depth = [], 0
        depth += {"{": 1, "}": -1}.get(token.text, 0)
        if item or token.type != "NEWLINE":
            item.append(token)
    if item:
        yield item


def _parse_item(item: list[Token], found: Diagnostics) -> s.Item | None:
    words = [t.text for t in item[:2]]
    if words[0] in VERBATIM and len(item) > 1 and item[1].type == "NAME":
        return _verbatim(item)
    if words[0] == "grad" and item[0].type == "NAME":
        item = [_soft(t, i) for i, t in enumerate(item)]
    return cast("s.Item | None", _parse(item, "item", found))


def _soft(token: Token, place: int) -> Token:
    """`grad`, `wrt` and `as` are words of the grammar in a `grad` item only."""
    if token.text in ("wrt", "as") or place == 0:
        return token._replace(type=token.text.upper())
    return token


def _verbatim(item: list[Token]) -> s.Verbatim:
    span = item[0].span.to(item[-1].span)
    return s.Verbatim(span, item[0].text, s.Name(item[1].span, item[1].text), span.text)


def _parse(item: list[Token], start: str, found: Diagnostics) -> object:
    """Parse one item, leaving out each statement that has an error; None if an error stands outside statements."""
    item, broken = _without_bad(item, found)
    for _ in range(MAX_ERRORS_PER_ITEM):
        if not item:
            return None
        outcome = _attempt(item, start)
        if not isinstance(outcome, _Stop):
            return None if broken else outcome
        found.add(*outcome.diagnostics)
        broken = True
        shorter = _without_statement(item, outcome.place)
        if shorter is None:
            return None
        item = shorter
    return None


@dataclass(frozen=True)
class _Stop:
    """Where the parse of an item stopped, as an index into its tokens, and why."""

    place: int
    diagnostics: list[Diagnostic]


def _attempt(item: list[Token], start: str) -> object:
    parser = _lark().parse_interactive(start=start)
    last = item[-1].span
    end = Token("$END", "", Span(last.source, last.end, last.end))
    place = -1
    try:
        for token in item:
            place += 1
            parser.feed_token(cast(Any, token))
        place += 1
        return parser.feed_token(cast(Any, end))
    except UnexpectedToken as stop:
        expected = frozenset(stop.expected)
        return _Stop(place, [explain(Failure(tuple(item), end, place, expected))])
    except TileError as stop:  # from a rule of _Build that the grammar cannot say
        return _Stop(place, stop.diagnostics)


def _without_bad(item: list[Token], found: Diagnostics) -> tuple[list[Token], bool]:
    """Report what the lexer found, and leave out the statements that hold it; nothing is left if the heading does."""
    problems = [t.problem for t in item if t.problem is not None]
    if not problems:
        return item, False
    found.add(*problems)
    heading, statements, tail = _split(item)
    bad = [part for part in statements if any(t.problem for t in part)]
    if any(t.problem for t in (*heading, *tail)) or any(_returns(part) for part in bad):
        return [], True
    return _joined(heading, [part for part in statements if part not in bad], tail), True


def _without_statement(item: list[Token], place: int) -> list[Token] | None:
    """`item` without the statement around `place`; None if there is none, or the rest would miss its `return`."""
    heading, statements, tail = _split(item)
    at = len(heading)
    for i, part in enumerate(statements):
        if at <= place < at + len(part) or (place == at + len(part) and i == len(statements) - 1):
            return None if _returns(part) else _joined(heading, statements[:i] + statements[i + 1 :], tail)
        at += len(part)
    return None


def _returns(part: list[Token]) -> bool:
    return any(t.type == "RETURN" for t in part)


def _split(item: list[Token]) -> tuple[list[Token], list[list[Token]], list[Token]]:
    """The tokens up to `{`, those of each statement with the newline that ends it, and the final `}`."""
    body = next((i + 1 for i, t in enumerate(item) if t.type == "LBRACE"), len(item))
    last = len(item) - 1 if body < len(item) and item[-1].type == "RBRACE" else len(item)
    statements: list[list[Token]] = []
    for i in range(body, last):
        if i == body or item[i - 1].type == "NEWLINE":
            statements.append([])
        statements[-1].append(item[i])
    return item[:body], statements, item[last:]


def _joined(heading: list[Token], statements: list[list[Token]], tail: list[Token]) -> list[Token]:
    body = [token for part in statements for token in part]
    if body and body[-1].type == "NEWLINE":
        body.pop()
    return [*heading, *body, *tail]


# ---------------------------------------------------------------- nodes

Parts = list[Any]


def _span(parts: Parts) -> Span:
    first, last = parts[0].span, parts[-1].span
    return Span(first.source, first.start, last.end)


def _nodes(parts: Parts) -> Parts:
    """Without the signs and words of the grammar."""
    return [p for p in parts if p is not None and (not isinstance(p, Token) or p.type == "NAME")]


def _names(parts: Parts) -> tuple[s.Name, ...]:
    return tuple(_name(p) for p in _nodes(parts))


def _name(token: Token) -> s.Name:
    return s.Name(token.span, token.text)


@dataclass(frozen=True)
class _List:
    """Comma-separated parts with the span of what encloses them."""

    span: Span
    parts: tuple[Any, ...]
    predicate: s.Expr | None = None


class _Build(Transformer[Token, Any]):
    """One method a rule of the grammar; `parts` holds tokens and the nodes built so far."""

    def item(self, parts: Parts) -> s.Item:
        return cast(s.Item, parts[0])

    def expression(self, parts: Parts) -> s.Expr:
        return cast(s.Expr, parts[0])

    def import_item(self, parts: Parts) -> s.Import:
        return s.Import(_span(parts), parts[1].text[1:-1])

    # ---- fn

    def fn(self, parts: Parts) -> s.Fn:
        _, name, bracket, _, parameters, _, body = parts
        *inner, result = body.parts
        span = parts[0].span.to(body.span)
        return s.Fn(
            span, _name(name), bracket or (), parameters.parts if parameters else (), tuple(inner), result
        )

    def fn_bracket(self, parts: Parts) -> tuple[s.Name, ...]:
        return cast(tuple[s.Name, ...], parts[1].parts)

    def fn_block(self, parts: Parts) -> _List:
        return _List(_span(parts), tuple(_nodes(parts)))

    fn_short = fn_block

    def local(self, parts: Parts) -> s.Local:
        return s.Local(_span(parts), _name(parts[0]), parts[2])

    # ---- kernel

    def kernel(self, parts: Parts) -> s.Kernel:
        _, name, types, _, params, _, *rest = parts
        outputs = next((p.parts for p in rest if isinstance(p, _Outputs)), ())
        given = params.parts if params else ()

        def every(kind: type) -> tuple[Any, ...]:
            return tuple(p for p in rest if isinstance(p, kind))

        statements = tuple(_with_places(p, given) for p in every(s.Statement))
        return s.Kernel(
            _span(parts),
            _name(name),
            types or (),
            given,
            outputs,
            every(s.Require),
            every(s.Example),
            statements,
        )

    def type_params(self, parts: Parts) -> tuple[s.TypeParam, ...]:
        return tuple(_nodes(parts))

    def type_param(self, parts: Parts) -> s.TypeParam:
        name, *alternatives = _names(parts)
        if [a.name for a in alternatives] == ["extent"]:
            return s.TypeParam(_span(parts), name, "extent", ())
        return s.TypeParam(_span(parts), name, "dtype", tuple(alternatives))

    def params(self, parts: Parts) -> _List:
        kept = [p for p in parts if p is not None]
        return _List(_span(kept), tuple(_nodes(parts)))

    def outputs(self, parts: Parts) -> _Outputs:
        inner = parts[0] if len(parts) == 1 else parts[1]
        return _Outputs(_span(parts), (inner,) if isinstance(inner, s.Param) else inner.parts)

    def param(self, parts: Parts) -> s.Param:
        name, _, inout, dtype, shape = parts
        span = name.span.to((shape or dtype).span)
        return s.Param(span, _name(name), _name(dtype), shape.parts if shape else (), inout is not None)

    def shape(self, parts: Parts) -> _List:
        return _List(_span(parts), parts[1].parts)

    def require(self, parts: Parts) -> s.Require:
        return s.Require(_span(parts), parts[1].parts)

    def example(self, parts: Parts) -> s.Example:
        return s.Example(_span(parts), tuple(_nodes(parts)))

    def setting(self, parts: Parts) -> s.Setting:
        return s.Setting(_span(parts), _name(parts[0]), parts[2])

    def statement(self, parts: Parts) -> s.Statement:
        target, left, op, value = parts
        return s.Statement(_span(parts), _name(target), left.parts if left else (), op.text, value)

    def left(self, parts: Parts) -> _List:
        return _List(_span(parts), tuple(_bound(p) or p for p in _nodes(parts)))

    def assign(self, parts: Parts) -> Token:
        return cast(Token, parts[0])

    # ---- grad

    def grad(self, parts: Parts) -> s.Grad:
        _, kernel, _, wrt, _, name = parts
        return s.Grad(_span(parts), _name(kernel), wrt.parts, _name(name))

    # ---- expressions

    def binary(self, parts: Parts) -> s.Binary:
        left, op, right = parts
        return s.Binary(_span(parts), op.text, left, right)

    def unary(self, parts: Parts) -> s.Unary:
        return s.Unary(_span(parts), parts[0].text, parts[1])

    def compare(self, parts: Parts) -> s.Compare:
        return s.Compare(_span(parts), tuple(parts[::2]), tuple(op.text for op in parts[1::2]))

    def compare_op(self, parts: Parts) -> Token:
        return cast(Token, parts[0])

    def number(self, parts: Parts) -> s.Number:
        text = parts[0].text
        return s.Number(parts[0].span, int(text) if text.isdigit() else float(text), text)

    def boolean(self, parts: Parts) -> s.Boolean:
        return s.Boolean(parts[0].span, parts[0].text == "true")

    def name(self, parts: Parts) -> s.Name:
        return _name(parts[0])

    def parenthesis(self, parts: Parts) -> s.Expr:
        return cast(s.Expr, replace(parts[1], span=_span(parts)))

    def subscript(self, parts: Parts) -> s.Subscript:
        name, bracket = parts
        if bracket.predicate is not None:
            raise refuse(
                "E0036",
                f"`{name.text}[… | …]` is a read, and a read takes no condition",
                bracket.predicate.span,
                help=f"write where(condition, {name.text}[…], 0), or put the condition into a reduction's bracket",
            )
        for index in bracket.parts:
            if isinstance(index, s.BoundIndex):
                raise refuse(
                    "E0034",
                    "`in` gives an index its range only on a left side or in a reduction's bracket",
                    index.span,
                    help=f"here write the index alone: {index.name.name}",
                )
        return s.Subscript(_span(parts), _name(name), bracket.parts)

    def call(self, parts: Parts) -> s.Call:
        return s.Call(_span(parts), _name(parts[0]), parts[2].parts)

    def bracket_call(self, parts: Parts) -> s.BracketCall:
        name, bracket, _, arguments, _ = parts
        bound = []
        for index in bracket.parts:
            one = _bound(index)
            if one is None:
                raise refuse(
                    "E0035",
                    f"`{name.text}[…](…)` runs over indices, and this is not an index name",
                    index.span,
                    help=f"write names in the bracket, such as {name.text}[n](…) or {name.text}[n in N](…)",
                )
            bound.append(one)
        return s.BracketCall(_span(parts), _name(name), tuple(bound), bracket.predicate, arguments.parts)

    def bracket(self, parts: Parts) -> _List:
        predicate = parts[-2] if parts[-2] is not None else None
        inner = parts[1:-3] if predicate is not None else parts[1:-1]
        return _List(_span(parts), tuple(_nodes(inner)), predicate)

    def index(self, parts: Parts) -> s.Expr:
        return cast(s.Expr, parts[0])

    def index_in(self, parts: Parts) -> s.BoundIndex:
        return s.BoundIndex(_span(parts), _name(parts[0]), parts[2])

    def exprs(self, parts: Parts) -> _List:
        return _List(_span(parts), tuple(_nodes(parts)))

    def names(self, parts: Parts) -> _List:
        return _List(_span(parts), _names(parts))


class _Outputs(_List):
    """What stands after `->`."""


def _bound(index: s.Expr | s.BoundIndex) -> s.BoundIndex | None:
    """A bare name, with or without `in`, as the index that it introduces."""
    if isinstance(index, s.BoundIndex):
        return index
    if isinstance(index, s.Name) and index.name != "inf":
        return s.BoundIndex(index.span, index, None)
    return None


def _with_places(statement: s.Statement, params: tuple[s.Param, ...]) -> s.Statement:
    """On the left of an update of an inout parameter, the name of a parameter is a position, not a new index."""
    names = {p.name.name for p in params}
    if not any(p.inout and p.name.name == statement.target.name for p in params):
        return statement
    indices = tuple(
        i.name if isinstance(i, s.BoundIndex) and i.extent is None and i.name.name in names else i
        for i in statement.indices
    )
    return replace(statement, indices=indices)
