"""Facts as text for people: diagnostics, tables, explanations, with colour where the output is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from .dsl.diagnostics import Diagnostic

SEVERITY = {"error": "bold red", "warning": "bold yellow"}


def print_diagnostics(found: Iterable[Diagnostic]) -> None:
    """Diagnostics on standard error; plain text where that is no terminal."""
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    for d in found:
        console.print(_coloured(d))


def _coloured(d: Diagnostic) -> Text:
    text = Text(d.render())
    text.highlight_regex(rf"^{d.severity}\[\w+\]", SEVERITY.get(d.severity, "bold"))
    text.highlight_regex(r"(?m)^ *--> .*$", "cyan")
    text.highlight_regex(r"(?m)^ *\d+ \|", "blue")
    text.highlight_regex(r"(?m)^ *\| *\^+$", "bold red")
    text.highlight_regex(r"(?m)^  (note|help):", "bold green")
    return text
