"""Signs and words of other languages, and what this one writes instead: data for the lexer, the parser and the checker."""

from __future__ import annotations

_POWER = ("powers are not written with a sign", "write pow(x, y), or x * x for a square")
_QUOTE = ("texts stand in double quotes, and only after `import`", 'write import "file.tile"')
_NO_ATTRIBUTE = (
    "`.` stands only inside numbers",
    "values have no attributes; a transposed read is written by its indices, x[n, m]",
)

FOREIGN_SIGNS: dict[str, tuple[str, str]] = {
    "^": _POWER,
    "**": _POWER,
    "**=": _POWER,
    "&&": ("`&&` is not an operator here", "write `and`"),
    "&": ("`&` is not an operator here", "write `and`"),
    "||": ("`||` is not an operator here", "write `or`"),
    "!": ("`!` is not an operator here", "write `not`, or `!=` to compare"),
    "~": ("`~` is not an operator here", "write `not`"),
    ":=": ("`:=` is not an operator here", "write `=`; each statement defines one tensor"),
    "-=": ("`-=` is not an operator here", "write x[i] += -(…)"),
    "*=": ("`*=` is not an operator here", "only `=` and `+=` exist"),
    "/=": ("`/=` is not an operator here", "only `=` and `+=` exist"),
    "//=": ("`//=` is not an operator here", "only `=` and `+=` exist"),
    "%=": ("`%=` is not an operator here", "only `=` and `+=` exist"),
    "=>": ("`=>` is not an operator here", "`at least` is written `>=`"),
    "=<": ("`=<` is not an operator here", "`at most` is written `<=`"),
    "?": ("`?` is not an operator here", "a choice is written where(condition, a, b)"),
    "@": ("`@` is not an operator here", "a matrix product is written sum[k](a[m, k] * b[k, n])"),
    ";": ("`;` does not end statements", "a statement ends with its line; put the next on a new line"),
    "\\": ("`\\` is not needed", "a line goes on inside brackets and after an operator"),
    "$": ("`$` has no meaning here", "names are made of letters, digits and `_`"),
    "'": _QUOTE,
    "`": _QUOTE,
    ".": _NO_ATTRIBUTE,
    "≤": ("`≤` is not an operator here", "write `<=`"),
    "≥": ("`≥` is not an operator here", "write `>=`"),
    "≠": ("`≠` is not an operator here", "write `!=`"),
    "×": ("`×` is not an operator here", "write `*`"),
    "·": ("`·` is not an operator here", "write `*`"),
    "÷": ("`÷` is not an operator here", "write `/`"),
    "−": ("this minus is not the plain `-`", "write `-`"),
    "–": ("this dash is not the plain `-`", "write `-`"),
    "∞": ("`∞` is not a name here", "write `inf`"),
    "Σ": ("`Σ` is not a name here", "write sum[i](…)"),
    "∑": ("`∑` is not a name here", "write sum[i](…)"),
    "√": ("`√` is not a name here", "write sqrt(x)"),
    "→": ("`→` is not an operator here", "write `->`"),
    "∧": ("`∧` is not an operator here", "write `and`"),
    "∨": ("`∨` is not an operator here", "write `or`"),
    "¬": ("`¬` is not an operator here", "write `not`"),
    "\u2018": _QUOTE,
    "\u2019": _QUOTE,
    "\u201c": _QUOTE,
    "\u201d": _QUOTE,
}
