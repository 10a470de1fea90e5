"""Diagnostics: what is wrong, where, why, and what to write instead (DESIGN 2.4).

Codes: E00xx characters, brackets and grammar, E006x files and imports, E01xx names, E02xx ranges of indices, E03xx types,
E04xx bounds; from E06xx on the compiler's own texts and decisions.

Errors are collected in a `Diagnostics` sink and raised once as `TileError`, so that a file shows all its errors at once.
"""

from __future__ import annotations

from dataclasses import field

from .records import dataclass
from .source import Span


@dataclass(frozen=True)
class Diagnostic:
    """One finding. `code` is stable (`E0103`); `note` says why, `help` says what to write instead."""

    code: str
    message: str
    span: Span | None
    note: str | None = None
    help: str | None = None
    severity: str = "error"

    def render(self) -> str:
        """Plain text: headline, location, source line, caret, note, help. Tabs keep their place under the caret."""
        lines = [f"{self.severity}[{self.code}]: {self.message}"]
        if self.span is not None:
            line, column = self.span.source.position(self.span.start)
            text = self.span.source.line(line)
            lines.append(f" --> {self.span.source.name}:{line}:{column}")
            if len(text) > 200:
                lo = max(0, column - 1 - 80)
                text, column = "…" + text[lo : lo + 160] + "…", column - lo + 1
            gutter = " " * len(str(line))
            under = "".join(c if c == "\t" else " " for c in text[: column - 1])
            width = max(1, min(self.span.end - self.span.start, len(text) - (column - 1)))
            lines += [f"{gutter} |", f"{line} | {text}", f"{gutter} | {under}{'^' * width}"]
        if self.note:
            lines.append(f"  note: {self.note}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """The same facts as data (`--json`)."""
        where: dict[str, object] | None = None
        if self.span is not None:
            line, column = self.span.source.position(self.span.start)
            end_line, end_column = self.span.source.position(max(self.span.start, self.span.end))
            where = {
                "file": self.span.source.name,
                "line": line,
                "column": column,
                "end_line": end_line,
                "end_column": end_column,
            }
        return {
            "severity": self.severity,
            "code": self.code,
            "message": self.message,
            "where": where,
            "note": self.note,
            "help": self.help,
        }


class TileError(Exception):
    """One or more diagnostics; what every refusal of text, schedule or options raises."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = diagnostics
        super().__init__("\n".join(d.render() for d in diagnostics))


MAX_SHOWN = 100


@dataclass
class Diagnostics:
    """Collects findings of one text; `check` raises them together. The same finding counts once."""

    found: dict[Diagnostic, None] = field(default_factory=dict)

    def error(
        self, code: str, message: str, span: Span | None, note: str | None = None, help: str | None = None
    ) -> None:
        self.add(Diagnostic(code, message, span, note, help))

    def add(self, *diagnostics: Diagnostic) -> None:
        self.found.update(dict.fromkeys(diagnostics))

    def check(self) -> None:
        """Raise `TileError` if anything was found, in text order; beyond the first `MAX_SHOWN`, only their number."""
        if not self.found:
            return
        ordered = sorted(self.found, key=lambda d: (d.span.source.name, d.span.start) if d.span else ("", -1))
        rest = len(ordered) - MAX_SHOWN
        if rest > 0:
            ordered[MAX_SHOWN:] = [Diagnostic("E0000", f"{rest} more errors are not shown", None)]
        raise TileError(ordered)


def refuse(
    code: str, message: str, span: Span | None, note: str | None = None, help: str | None = None
) -> TileError:
    """One diagnostic as an exception, for passes that stop at the first finding."""
    return TileError([Diagnostic(code, message, span, note, help)])
