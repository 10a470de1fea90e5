"""Schedules: how a kernel is cut up, as plain data beside its definition (DESIGN 2.3). A schedule cannot change a result
beyond rounding: it names tile sizes, what is fused, which extents are compile-time, tier and pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fuse = Literal["auto", "all", "none"]


@dataclass(frozen=True)
class Schedule:
    """`tiles` maps an axis, or `statement.axis` where a name alone is ambiguous, to its tile size (0: a unit axis).

    `static` lists extents fixed at compile time; `fuse` and `keep` say which statements are stored in memory.
    """

    name: str
    kernel: str
    target: str
    fuse: Fuse = "auto"
    keep: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    tiles: tuple[tuple[str, int], ...] = ()
    tier: str | None = None

    def tile(self, statement: str, axis: str) -> int | None:
        """The tile size stated for an axis of a statement, if any; 0 is a unit axis."""
        table = dict(self.tiles)
        return table.get(f"{statement}.{axis}", table.get(axis))


def print_schedule(s: Schedule) -> str:
    """The schedule as source text."""
    lines = [f"schedule {s.name} for {s.kernel} on {s.target} {{", f"    fuse {s.fuse}"]
    if s.keep:
        lines.append(f"    keep {', '.join(s.keep)}")
    if s.static:
        lines.append(f"    static {', '.join(s.static)}")
    if s.tiles:
        lines.append("    tile " + ", ".join(f"{a} by {n}" if n else f"{a} by 1" for a, n in s.tiles))
    if s.tier:
        lines.append(f"    tier {s.tier}")
    return "\n".join([*lines, "}", ""])
