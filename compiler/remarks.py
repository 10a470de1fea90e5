"""Remarks: every decision a pass takes, with the numbers it was taken on. `explain` only reads these."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ..dsl.records import dataclass
from ..dsl.source import Span

Kind = Literal["applied", "missed", "note"]


@dataclass(frozen=True)
class Remark:
    """`name` is a stable kebab-case word; `facts` are the figures, keys carrying their unit (`saved_bytes`)."""

    kind: Kind
    pass_name: str
    name: str
    message: str
    span: Span | None = field(default=None, compare=False, repr=False)
    facts: dict[str, int | float | str | bool] = field(default_factory=dict)

    def render(self) -> str:
        facts = " ".join(f"{k}={v}" for k, v in self.facts.items())
        where = f"{self.span}: " if self.span else ""
        return f"{where}{self.kind} [{self.pass_name}] {self.name}: {self.message}" + (
            f" ({facts})" if facts else ""
        )


@dataclass
class Remarks:
    """Collects remarks of one compilation, in order."""

    items: list[Remark] = field(default_factory=list)

    def add(
        self,
        kind: Kind,
        pass_name: str,
        name: str,
        message: str,
        span: Span | None = None,
        **facts: int | float | str | bool,
    ) -> None:
        self.items.append(Remark(kind, pass_name, name, message, span, facts))
