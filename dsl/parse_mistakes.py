"""What a syntax error most likely means, and what to write instead: a table of common mistakes, tried in order."""

from __future__ import annotations

from collections.abc import Callable

from .diagnostics import Diagnostic
from .foreign import CONTROL_WORDS, ITEM_WORDS
from .lex import KEYWORDS, TYPES, Token
from .records import dataclass
from .source import Span
from .suggest import did_you_mean
from .types import NAMES
from .vocabulary import REDUCTIONS

ITEMS = ("import", "fn", "kernel", "grad", "tile", "schedule")
OPERATORS = frozenset({"+", "-", "*", "/", "//", "%", "==", "!=", "<=", ">=", "<", ">", "and", "or"})
CLOSING = frozenset({")", "]", "}"})
_TEXT_OF = {name: text for text, name in TYPES.items()}
_TEXT_OF |= {"NAME": "a name", "NUMBER": "a number", "STRING": 'a "text"', "NEWLINE": "a new line"}
_TEXT_OF |= {"WRT": "wrt", "AS": "as", "GRAD": "grad", "$END": "the end"}


# The parser's tables say what may follow in any bracket; these cannot follow in the one that is open.
_IMPOSSIBLE = {
    "(": frozenset({"RSQB", "RBRACE", "NEWLINE", "$END", "VBAR", "IN"}),
    "[": frozenset({"RPAR", "RBRACE", "NEWLINE", "$END"}),
    "{": frozenset({"RPAR", "RSQB", "VBAR", "IN", "$END"}),
    "": frozenset({"RPAR", "RSQB", "RBRACE", "IN"}),
}


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

    @property
    def before(self) -> Token:
        """The token before; `at` itself at the start."""
        return self.tokens[self.place - 1] if self.place else self.at

    @property
    def after(self) -> Token:
        return self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else self.end

    @property
    def item(self) -> str:
        """The word that begins the item."""
        return self.tokens[0].text

    @property
    def in_body(self) -> bool:
        return any(t.type == "LBRACE" for t in self.tokens[: self.place])

    @property
    def statement(self) -> tuple[Token, ...]:
        """The tokens of this statement, up to `at`."""
        lo = self.place
        while lo > 0 and self.tokens[lo - 1].type not in ("NEWLINE", "LBRACE"):
            lo -= 1
        return self.tokens[lo : self.place]

    @property
    def open_bracket(self) -> str:
        """The innermost bracket that is open: `(`, `[`, `{`, or nothing."""
        depth = 0
        for token in reversed(self.tokens[: self.place]):
            if token.text in CLOSING:
                depth += 1
            elif token.text in ("(", "[", "{"):
                if depth == 0:
                    return token.text
                depth -= 1
        return ""

    @property
    def found(self) -> str:
        """`at` in words."""
        match self.at.type:
            case "NEWLINE":
                return "the line ends"
            case "$END":
                return (
                    "the text ends"
                    if self.at.span.end == len(self.at.span.source.text)
                    else f"`{self.item}` ends"
                )
        text = self.at.text
        return f"`{text if len(text) <= 40 else text[:37] + '…'}` stands"


# A code, a message, a help, and where, if not at the token that stopped the parser.
Finding = tuple[str, str, str | None] | tuple[str, str, str | None, Span]


def explain(failure: Failure) -> Diagnostic:
    """The diagnostic of the first mistake of the table that fits."""
    for mistake in MISTAKES:
        finding = mistake(failure)
        if finding is not None:
            code, message, help, *where = finding
            return Diagnostic(code, message, where[0] if where else failure.at.span, help=help)
    return Diagnostic("E0020", f"{failure.found} where {_expected(failure)} is expected", failure.at.span)


def _expected(f: Failure) -> str:
    """What would be accepted, a few words of it."""
    names = set(f.expected) - _IMPOSSIBLE[f.open_bracket]
    if {"NAME", "NUMBER", "LPAR"} <= names:
        names -= {"NAME", "NUMBER", "LPAR", "MINUS", "NOT", "TRUE", "FALSE", "INF"}
        words = ["an expression"]
    elif {"PLUS", "STAR", "EQUALS"} <= names:
        names -= {_TYPE for _TYPE in names if _TEXT_OF.get(_TYPE) in OPERATORS} | {"LSQB", "LPAR"}
        words = ["an operator"]
    else:
        words = []
    rest = sorted(_TEXT_OF.get(n, n) for n in names)
    words += [w if " " in w else f"`{w}`" for w in rest]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ---------------------------------------------------------------- around items


def _no_item(f: Failure) -> Finding | None:
    """`def f(x)`, `kernal k(…)`, a statement outside braces."""
    if f.place or f.at.text in ITEMS:
        return None
    if f.at.text in OPERATORS:
        return _operator_first(f)
    if f.at.text in ITEM_WORDS:
        help = ITEM_WORDS[f.at.text]
    elif f.after.text in ("=", "[", "+="):
        help = "statements stand between the braces of a kernel or a `fn`"
    else:
        near = did_you_mean(f.at.text, ITEMS)
        help = near or "a file holds `import`, `fn`, `kernel` and `grad` items"
    return "E0021", f"`{_cut(f.at.text)}` begins no item", help


def _no_import_text(f: Failure) -> Finding | None:
    if f.item == "import" and f.place == 1:
        return "E0046", "`import` needs the name of a file in double quotes", 'write import "file.tile"'
    return None


def _grad_form(f: Failure) -> Finding | None:
    if f.item == "grad" and f.tokens[0].type == "GRAD":
        return "E0045", f"{f.found} where {_expected(f)} is expected", "write grad KERNEL wrt x, y as NAME"
    return None


def _no_brace(f: Failure) -> Finding | None:
    if f.at.type == "$END" and "LBRACE" in f.expected:
        body = (
            "= expression, or its statements in braces"
            if f.item == "fn"
            else "its statements in braces: { … }"
        )
        return "E0040", f"this {f.item} has no body", f"write {body}"
    return None


def _no_arrow(f: Failure) -> Finding | None:
    if f.item == "kernel" and "ARROW" in f.expected and f.at.type not in ("LBRACE", "$END"):
        return "E0028", "the outputs of a kernel stand after `->`", "write kernel k(…) -> o: f32[M] { … }"
    return None


def _no_output(f: Failure) -> Finding | None:
    """`-> f32[M]`: the output has a type and no name."""
    if f.item == "kernel" and not f.in_body and "COLON" in f.expected:
        name = f.before.text
        if f.tokens[f.place - 2].text == "->":
            return "E0031", "an output has a name and a type", f"write -> o: {name}[…]", f.before.span
        if name in NAMES and f.at.type == "NAME":
            return (
                "E0031",
                "the name stands before the type",
                f"write {f.at.text}: {name}",
                f.before.span.to(f.at.span),
            )
        if f.tokens[f.place - 2].text == "<":
            return (
                "E0031",
                f"`{_cut(name)}` does not say what it stands for",
                f"write <{name}: f16 | f32>",
                f.before.span,
            )
        return (
            "E0031",
            f"`{_cut(name)}` has no type",
            f"write {name}: f32, or {name}: f32[M, N] for a tensor",
            f.before.span,
        )
    return None


def _fn_result_type(f: Failure) -> Finding | None:
    if f.item == "fn" and f.at.text in ("->", ":") and not f.in_body:
        return (
            "E0048",
            "a `fn` states no types",
            "write fn f[J](x, y) { … }: names only; types follow from the call",
        )
    return None


# ---------------------------------------------------------------- statements


def _control_word(f: Failure) -> Finding | None:
    """`for i in N {`, `if x:`, `let y = 1`."""
    first = f.statement[0] if f.statement else f.at
    if f.in_body and first.text in CONTROL_WORDS and "EQUAL" in f.expected:
        return "E0032", f"`{first.text}` begins no statement", CONTROL_WORDS[first.text], first.span
    return None


def _return_in_kernel(f: Failure) -> Finding | None:
    if f.at.text == "return" and f.item == "kernel":
        return "E0042", "a kernel has no `return`", "define each output by a statement: o[m] = …"
    return None


def _no_return(f: Failure) -> Finding | None:
    ends = f.at.type in ("RBRACE", "$END") and not any(t.type == "RETURN" for t in f.tokens)
    if f.item == "fn" and ends and {"RETURN", "NEWLINE"} & f.expected:
        return "E0029", "this `fn` has no `return`", "its last line says what it is: return x"
    return None


def _after_return(f: Failure) -> Finding | None:
    if f.item == "fn" and f.at.type == "NEWLINE" and any(t.type == "RETURN" for t in f.statement):
        return (
            "E0030",
            "`return` is the last line of a `fn`",
            "move it below the other lines, or delete those",
            f.after.span,
        )
    return None


def _update_in_fn(f: Failure) -> Finding | None:
    if f.item == "fn" and f.in_body and len(f.statement) == 1 and f.at.text in ("+=", "["):
        return (
            "E0049",
            "a line of a `fn` names one value: name = expression",
            "indices belong where the `fn` is called",
        )
    return None


def _left_side(f: Failure) -> Finding | None:
    """`f(x) = …`, `2 = x`, `-x = …`, `(a, b) = …`."""
    if not f.in_body or f.open_bracket != "{" or len(f.statement) > 1:
        return None
    first = f.statement[0] if f.statement else f.at
    if f.at.text == "(" and f.statement and first.type == "NAME":
        return (
            "E0050",
            "the left side of `=` is a name, or a name with indices",
            f"write {first.text}[…] = …",
            first.span,
        )
    if not f.statement and "NAME" in f.expected and f.at.type in ("NUMBER", "LPAR", "LSQB", "STRING"):
        return "E0050", "a statement begins with the name that it defines", "write o[m] = …"
    return None


def _equals_in_expression(f: Failure) -> Finding | None:
    if f.at.text not in ("=", "+=") or "EQUALS" not in f.expected:
        return None
    opened = next((t for t in f.statement if t.text in ("=", "+=")), None)
    if opened is not None and f.open_bracket == "{":
        line = f.at.span.line
        head = next((i for i, t in enumerate(f.statement) if t.span.line == line), 0)
        if head and opened.span.line < line:
            last = f.statement[head - 1]
            return (
                "E0026",
                f"the line ends with `{last.text}`, so the next line is read as its rest",
                ("write what is missing at its end"),
                last.span,
            )
        return (
            "E0024",
            "one statement has one `=`",
            "to compare write `==`; a second definition goes on its own line",
        )
    if f.at.text == "+=":
        return "E0024", "`+=` stands after the left side of a statement only", None
    return "E0024", "`=` does not compare", "write `==`"


def _no_equals(f: Failure) -> Finding | None:
    if not f.in_body or not {"EQUAL", "ADD_TO"} & f.expected or not f.statement:
        return None
    if f.statement[0].type == "EXAMPLE":
        return (
            "E0023",
            f"`{_cut(f.before.text)}` has no value",
            f"write {_cut(f.before.text)} = 64",
            f.before.span,
        )
    span = f.statement[0].span.to(f.statement[-1].span)
    if f.at.text == ":":
        return "E0023", "a statement states no type", f"write {span.text} = …; convert with a cast, f32(…)"
    if f.at.text == "==":
        return "E0023", "`==` compares; a definition is written with `=`", f"write {_cut(span.text)} = …"
    return "E0023", f"`{_cut(span.text)}` has no `=` and no value", f"write {_cut(span.text)} = …", span


# ---------------------------------------------------------------- expressions


def _operator_first(f: Failure) -> Finding | None:
    """A line that begins with an operator: the line before ended its statement."""
    begins = f.place == 0 or f.before.type == "NEWLINE"
    if begins and (f.at.text in OPERATORS or f.at.text in (",", "|", "=", ")", "]")):
        return (
            "E0025",
            f"a line begins with `{f.at.text}`: the line before it has ended its statement",
            ("end the line before with the operator, or put the whole expression in parentheses"),
        )
    return None


def _nothing_after(f: Failure) -> Finding | None:
    """`a + )`, `a * / b`, `f(x, )`, `return }`."""
    text = f.before.text
    if not f.place or "NUMBER" not in f.expected:
        return None
    if f.at.text == "+":
        return "E0039", "`+` stands between two values", "delete it, or write the value before it"
    if text in ("(", "[") and f.at.text in CLOSING:
        return (
            "E0033",
            f"nothing stands between `{text}` and `{f.at.text}`",
            "write what belongs there, or drop the brackets",
        )
    if text == "," and f.at.text in CLOSING:
        return "E0037", f"nothing follows the `,` before `{f.at.text}`", "delete the comma", f.before.span
    if f.at.text == "not":
        return "E0051", f"`not` after `{text}` needs parentheses", f"write {text} (not …)"
    if text in OPERATORS or text in ("=", "+=", "not", "in", "|", "return", "require"):
        if f.at.text in OPERATORS:
            return (
                "E0026",
                f"`{text}` and `{f.at.text}` stand next to each other",
                "a value is missing between them",
            )
        if f.at.type in ("NEWLINE", "$END") or f.at.text in CLOSING or f.at.text in KEYWORDS:
            return "E0026", f"a value is missing after `{text}`", None, f.before.span
    return None


def _empty_brackets(f: Failure) -> Finding | None:
    pair = f.before.text + f.at.text
    if pair in ("<>", "[]", "()"):
        return (
            "E0033",
            f"nothing stands between `{f.before.text}` and `{f.at.text}`",
            ("write what belongs there, or drop the brackets"),
        )
    return None


def _slice(f: Failure) -> Finding | None:
    if f.at.text == ":" and f.in_body and f.open_bracket == "[":
        return (
            "E0041",
            "an axis is not read as a slice",
            ("write an index for each axis, x[m, d], and reduce over those that should vanish, sum[d](…)"),
        )
    return None


def _condition_outside(f: Failure) -> Finding | None:
    if f.at.text == "|" and f.in_body:
        return (
            "E0038",
            "`|` stands in the bracket of a reduction, between its indices and one condition",
            ("write sum[n | n <= m](x[n]); join conditions with the words `and`, `or`"),
        )
    return None


def _text_in_expression(f: Failure) -> Finding | None:
    if f.at.type == "STRING":
        return "E0047", "a text in quotes stands only after `import`", None
    return None


def _side_by_side(f: Failure) -> Finding | None:
    """`2 x`, `x[n] y`, `a = 1 b = 2`."""
    ends = f.before.type in ("NAME", "NUMBER", "TRUE", "FALSE", "INF") or f.before.text in (")", "]")
    begins = f.at.type in ("NAME", "NUMBER", "TRUE", "FALSE", "INF") or f.at.text in (
        "(",
        "[",
        "not",
        "require",
        "example",
    )
    if not f.place or not ends or not begins or not {"PLUS", "COMMA", "COLON"} & f.expected:
        return None
    left, right = _cut(f.before.text), _cut(f.at.text)
    if f.in_body and f.open_bracket == "{" and (f.at.text in KEYWORDS or _another_statement(f)):
        return "E0027", "two statements stand on one line", f"begin a new line before `{right}`"
    if "PLUS" not in f.expected:
        return "E0027", f"a `,` is missing between `{left}` and `{right}`", None
    return "E0027", f"an operator or a `,` is missing between `{left}` and `{right}`", _joining(left, right)


def _joining(left: str, right: str) -> str | None:
    """What to write for two values that stand side by side."""
    if right in CONTROL_WORDS:
        return CONTROL_WORDS[right]
    if left in REDUCTIONS:
        return f"a reduction has its indices in brackets: {left}[{right}](…)"
    if left == "]" and right == "[":
        return "write all indices in one bracket: x[m, n]"
    if left in (")", "]"):
        return None
    return f"write `*` for a product: {left} * {'(…)' if right == '(' else right}"


def _another_statement(f: Failure) -> bool:
    """Whether what follows on the line looks like `name = ` or `name[…] = `."""
    depth = 0
    for token in f.tokens[f.place :]:
        if token.type == "NEWLINE":
            return False
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
        if depth == 0 and token.text in ("=", "+="):
            return True
    return False


def _keyword_as_name(f: Failure) -> Finding | None:
    if f.at.text in KEYWORDS and "NAME" in f.expected:
        return (
            "E0022",
            f"`{f.at.text}` is a word of the language and cannot be a name here",
            (f"choose another name, such as {f.at.text}_"),
        )
    return None


def _no_name(f: Failure) -> Finding | None:
    if f.expected == frozenset({"NAME"}):
        what = {"fn": "the new `fn`", "kernel": "the new kernel"}.get(
            f.before.text, f"something after `{f.before.text}`"
        )
        return "E0052", f"{f.found} where the name of {what} is expected", None
    return None


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "…"


MISTAKES: tuple[Callable[[Failure], Finding | None], ...] = (
    _no_item,
    _no_import_text,
    _grad_form,
    _no_brace,
    _no_arrow,
    _fn_result_type,
    _no_output,
    _control_word,
    _return_in_kernel,
    _no_return,
    _after_return,
    _update_in_fn,
    _operator_first,
    _left_side,
    _equals_in_expression,
    _text_in_expression,
    _empty_brackets,
    _nothing_after,
    _slice,
    _condition_outside,
    _side_by_side,
    _no_equals,
    _keyword_as_name,
    _no_name,
)
