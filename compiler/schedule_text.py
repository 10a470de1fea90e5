"""Text form of schedules: `parse_schedule(print_schedule(s)) == s`.

    schedule attention for attention on cpu {
        fuse all
        keep s
        static d, e
        tile m by 64, n by 128, o.b by 1
        tier loops
    }

Lines may stand in any order, each at most once; `#` starts a comment. An axis is cut into tiles of `by` elements, `by 1`
means one index at a time. `o.b` is the axis b of the launch that stores o, where b alone would mean every launch's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import get_args

from ..dsl.diagnostics import refuse
from ..dsl.source import Source, Span
from .notation import Token, Words
from .schedule import Fuse, Schedule
from .target import TARGETS

LARGEST_TILE = 1 << 20
"""Elements along one axis; no back end keeps more in one piece."""


def parse_schedule(text: str, name: str = "<text>") -> Schedule:
    """Read one schedule. `name` is the path that diagnostics show. Raises `TileError` with codes E0601 to E0609."""
    return _ScheduleReader(Source(name, text)).schedule()


def parse_item(span: Span) -> Schedule:
    """Read the schedule that is an item of a larger text; diagnostics point into that text."""
    return _ScheduleReader(span.source, part=span).schedule()


class _ScheduleReader(Words):
    """Reads statements only: a schedule has no expressions."""

    def schedule(self) -> Schedule:
        self.expect("schedule", "at the start of a schedule")
        name = self.word("the name of the schedule")
        self.expect("for", "and the kernel's name")
        kernel = self.word("the name of the kernel")
        self.expect("on", "and the target")
        target = self._target()
        self.expect("{", "to open the schedule")
        fields = self._statements()
        self.expect("}", "to close the schedule")
        if self.token.kind != "end":
            self.fail(f"expected the end of the text after the schedule, found {self.describe()}")
        return Schedule(name, kernel, target, **fields)  # type: ignore[arg-type]

    def _target(self) -> str:
        token = self.token
        name = self.word("the name of a target")
        if self.accept(":"):
            name += ":" + self.word("the architecture")
        if name not in TARGETS:
            self.fail(f"no target is called `{name}`", "E0607", token, help="one of " + ", ".join(TARGETS))
        return name

    def _statements(self) -> dict[str, object]:
        readers: dict[str, Callable[[], object]] = {
            "fuse": self._fuse,
            "keep": lambda: self.words("the name of an intermediate"),
            "static": lambda: self.words("the name of an axis"),
            "tile": self._tiles,
            "tier": lambda: self.word("the name of a tier"),
        }
        fields: dict[str, object] = {}
        while self.token.text != "}" and self.token.kind != "end":
            token = self.token
            word = self.word("a line of the schedule")
            if word not in readers:
                self.fail(
                    f"a schedule has no line `{word}`", "E0608", token, help="one of " + ", ".join(readers)
                )
            key = "tiles" if word == "tile" else word
            if key in fields:
                self.fail(f"`{word}` stands twice", "E0608", token, help="put both into one line")
            fields[key] = readers[word]()
        return fields

    def _fuse(self) -> Fuse:
        token = self.token
        word = self.word("auto, all or none")
        for choice in get_args(Fuse):
            if word == choice:
                return choice  # type: ignore[no-any-return]
        self.fail(
            f"`fuse {word}` is not known",
            "E0608",
            token,
            help="`auto` lets the cost model choose, `all` fuses everything, `none` stores every intermediate",
        )

    def _tiles(self) -> tuple[tuple[str, int], ...]:
        tiles: dict[str, int] = {}
        while True:
            token = self.token
            axis = self.word("the name of an axis")
            if self.accept("."):
                axis += "." + self.word("the name of an axis")
            if axis in tiles:
                self.fail(f"`{axis}` has two tile sizes", "E0609", token)
            self.expect("by", "and a tile size")
            tiles[axis] = self._size()
            if not self.accept(","):
                return tuple(tiles.items())

    def _size(self) -> int:
        """A tile size; `by 1`, one index at a time, is 0 in the schedule."""
        token = self.token
        size = self.integer("a tile size")
        if not 1 <= size <= LARGEST_TILE:
            self._refuse_size(size, token)
        return size if size > 1 else 0

    def _refuse_size(self, size: int, token: Token) -> None:
        self.fail(
            f"a tile of {size} elements is not possible",
            "E0609",
            token,
            help=f"a number from 1 (one index at a time) to {LARGEST_TILE}",
        )


def check_names(s: Schedule, axes: Collection[str], launches: Collection[str]) -> None:
    """Refuse tile sizes of axes or launches that a kernel does not have. Raises `TileError`, code E0610."""
    known = {*axes, *(f"{launch}.{a}" for launch in launches for a in axes)}
    for axis, _ in s.tiles:
        if axis not in known:
            raise refuse(
                "E0610",
                f"the schedule `{s.name}` cuts `{axis}`, which is no axis of `{s.kernel}`",
                None,
                help=f"its axes are {', '.join(axes)}; its launches {', '.join(launches)}",
            )
