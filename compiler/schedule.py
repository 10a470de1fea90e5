"""Schedules: how a kernel is cut up, as plain data beside its definition (DESIGN 2.3). A schedule cannot change a result
beyond rounding: it names tile sizes, what is fused, which extents are compile-time, and the tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from ..dsl.records import dataclass
from ..dsl.source import Span

Fuse = Literal["auto", "all", "none"]
TaskOrder = Literal["balanced", "longest", "turns"]
Skew = Literal["all", "steps", "none"]
MOST_SLOTS, LEAST_SLOTS = 16, 1
"""Of a ring, through which tiles of an operand come."""
MOST_WARPGROUPS = 3
"""That compute; one more loads."""
MOST_PARTS = 64
"""Of a split reduction."""
LARGEST_TILE = 1 << 20
"""Elements along one axis; no back end keeps more in one piece."""
LARGEST_VALUE = 1 << 22
"""Elements of one value of a launch, all its axes together."""

_COPY = re.compile(r"(.+)_\d+")


@dataclass(frozen=True)
class Schedule:
    """`tiles` maps an axis, or `statement.axis` where a name alone is ambiguous, to its tile size (0: a unit axis).

    `static` lists axes whose extents are fixed at compile time. `fuse` is for all intermediates; `fused` are computed in
    place and `keep` are stored, whatever it says. `stages` gives the slots of the ring through which tiles of a tensor come,
    `warpgroups` how many compute, `skew` whether a step's first products start before the last step's have ended (`steps`),
    and a task's before the last task's (`all`), `order` how blocks take tasks, `splits` into how many parts a reduction's
    axis is divided (1: none). `spans` tells where a line's word and name stand (`tile m`, `tier`).
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
    warpgroups: int | None = None
    stages: tuple[tuple[str, int], ...] = ()
    skew: Skew | None = None
    order: TaskOrder | None = None
    splits: tuple[tuple[str, int], ...] = ()
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
    if s.warpgroups:
        lines.append(f"    warpgroups 1 load + {s.warpgroups} compute")
    if s.stages:
        lines.append("    stage " + ", ".join(f"{t} by {n}" for t, n in s.stages))
    if s.skew:
        lines.append(f"    skew {s.skew}")
    if s.order:
        lines.append(f"    order {s.order}")
    if s.splits:
        lines.append("    split " + ", ".join(f"{a} by {n}" for a, n in s.splits))
    return "\n".join([*lines, "}", ""])
