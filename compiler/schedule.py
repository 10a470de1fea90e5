"""Schedules: how a kernel is cut up, as plain data beside its definition (DESIGN 2.3). A schedule cannot change a result
beyond rounding: it names tile sizes, what is fused, which extents are compile-time, and the tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..dsl.source import Span

Fuse = Literal["auto", "all", "none"]
LARGEST_TILE = 1 << 20
"""Elements along one axis; no back end keeps more in one piece."""
LARGEST_VALUE = 1 << 22
"""Elements of one value of a launch, all its axes together."""

_COPY = re.compile(r"(.+)_\d+")


@dataclass(frozen=True)
class Schedule:
    """`tiles` maps an axis, or `statement.axis` where a name alone is ambiguous, to its tile size (0: a unit axis).

    `static` lists axes whose extents are fixed at compile time. `fuse` is for all intermediates; `fused` are computed in
    place and `keep` are stored, whatever it says. `spans` tells where a line's word and name stand (`tile m`, `tier`).
    """

    name: str
    kernel: str
    target: str
    fuse: Fuse = "auto"
    keep: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    tiles: tuple[tuple[str, int], ...] = ()
    tier: str | None = None
    fused: tuple[str, ...] = ()
    spans: Mapping[str, Span] = field(default_factory=dict, compare=False, repr=False)


def stem(axis: str) -> str:
    """The name that an axis has in the text, where a pass told it from another by a number: `n` of `n_1`."""
    found = _COPY.fullmatch(axis)
    return found.group(1) if found else axis


def print_schedule(s: Schedule) -> str:
    """The schedule as source text."""
    lines = [f"schedule {s.name} for {s.kernel} on {s.target} {{", f"    fuse {', '.join(s.fused) or s.fuse}"]
    if s.keep:
        lines.append(f"    keep {', '.join(s.keep)}")
    if s.static:
        lines.append(f"    static {', '.join(s.static)}")
    if s.tiles:
        lines.append("    tile " + ", ".join(f"{a} by {n}" if n else f"{a} by 1" for a, n in s.tiles))
    if s.tier:
        lines.append(f"    tier {s.tier}")
    return "\n".join([*lines, "}", ""])
