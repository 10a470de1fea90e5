"""Text form of schedules: `parse_schedule(print_schedule(s)) == s`.

    schedule attention for attention on cpu {
        fuse all
        keep s
        static d, e
        tile m by 64, n by 128, o.b by 1
        tier loops
    }

and, for tier `wgmma`:

        warpgroups 1 load + 2 compute
        stage k by 3, v by 2
        skew all
        order longest
        split n by 4

Lines may stand in any order, each at most once; `#` starts a comment. `fuse all`, `none` or `auto` is for every
intermediate; `fuse a, b` computes these in place and leaves the others to the cost model; `keep` stores. An axis is cut
into tiles of `by` elements, `by 1` means one index at a time. `o.b` is the axis b of the launch that computes o, where b
alone would mean every launch's. `stage` gives the slots of the ring through which an operand's tiles come; `skew none` ends
a step's products before the next step's start, `skew steps` a task's last ones before the next task's; `order longest`
gives each task a block, the longest first, `order turns` lets one block a multiprocessor take task after task, `order
balanced` too, the longest first, in rounds forwards and backwards over the blocks; `split` divides a reduction's axis over
so many blocks, or tasks of a CPU (1: over none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, cast, get_args

from ..dsl.source import Source, Span
from ..dsl.suggest import did_you_mean
from .notation import Token, Words
from .schedule import (
    LARGEST_TILE,
    LEAST_SLOTS,
    MOST_PARTS,
    MOST_SLOTS,
    MOST_WARPGROUPS,
    Fuse,
    Schedule,
    Skew,
    TaskOrder,
)
from .target import TARGETS


def parse_schedule(text: str, name: str = "<text>") -> Schedule:
    """Read one schedule. `name` is the path that diagnostics show. Raises `TileError` with codes E0601 to E0609."""
    return _ScheduleReader(Source(name, text)).schedule()


def parse_item(span: Span) -> Schedule:
    """Read the schedule that is an item of a larger text; diagnostics point into that text."""
    return _ScheduleReader(span.source, part=span).schedule()


class _ScheduleReader(Words):
    """Reads statements only: a schedule has no expressions."""

    def schedule(self) -> Schedule:
        self.spans: dict[str, Span] = {}
        self.fused: tuple[str, ...] = ()
        self.expect("schedule", "at the start of a schedule")
        name = self.word("the name of the schedule")
        self.expect("for", "and the kernel's name")
        self.spans["kernel"] = self.span(self.token)
        kernel = self.word("the name of the kernel")
        self.expect("on", "and the target")
        target = self._target()
        self.expect("{", "to open the schedule")
        fields = self._statements()
        self.expect("}", "to close the schedule")
        if self.token.kind != "end":
            self.fail(f"expected the end of the text after the schedule, found {self.describe()}")
        return Schedule(name, kernel, target, **fields, fused=self.fused, spans=self.spans)  # type: ignore[arg-type]

    def _target(self) -> str:
        token = self.token
        name = self.word("the name of a target")
        if self.accept(":"):
            name += ":" + self.word("the architecture")
        self.spans["target"] = self.since(token)
        if name not in TARGETS:
            self.fail(f"no target is called `{name}`", "E0607", token, help="one of " + ", ".join(TARGETS))
        return name

    def _statements(self) -> dict[str, object]:
        readers: dict[str, Callable[[], object]] = {
            "fuse": self._fuse,
            "keep": lambda: self._names("keep", "the name of an intermediate"),
            "static": lambda: self._names("static", "the name of an axis"),
            "tile": self._tiles,
            "tier": self._tier,
            "warpgroups": self._warpgroups,
            "stage": lambda: self._numbers("stage", "the name of a tensor", LEAST_SLOTS, MOST_SLOTS),
            "skew": lambda: self._one_of("skew", get_args(Skew)),
            "order": lambda: self._one_of("order", get_args(TaskOrder)),
            "split": lambda: self._numbers("split", "the name of an axis", 1, MOST_PARTS),
        }
        fields: dict[str, object] = {}
        while self.token.text != "}" and self.token.kind != "end":
            token = self.token
            word = self.word("a line of the schedule")
            if word not in readers:
                self._refuse_line(word, token, list(readers))
            key = {"tile": "tiles", "stage": "stages", "split": "splits"}.get(word, word)
            if key in fields:
                self.fail(f"`{word}` stands twice", "E0608", token, help="put both into one line")
            fields[key] = readers[word]()
        return fields

    def _refuse_line(self, word: str, token: Token, known: list[str]) -> NoReturn:
        help = did_you_mean(word, known) or "one of " + ", ".join(known)
        self.fail(f"a schedule has no line `{word}`", "E0608", token, help=help)

    def _names(self, line: str, what: str) -> tuple[str, ...]:
        found: dict[str, None] = {}
        while True:
            token = self.token
            name = self.word(what)
            if name in found:
                self.fail(f"`{name}` stands twice in `{line}`", "E0608", token)
            found[name] = None
            self.spans[f"{line} {name}"] = self.span(token)
            if not self.accept(","):
                return tuple(found)

    def _fuse(self) -> Fuse:
        for choice in get_args(Fuse):
            if self.token.text == choice and self.ahead().text != ",":
                self.next()
                return cast(Fuse, choice)
        if self.token.kind != "word":
            help = "`fuse all`, `fuse none`, `fuse auto`, or the names of intermediates"
            self.fail(f"expected what to fuse, found {self.describe()}", "E0608", help=help)
        self.fused = self._names("fuse", "the name of an intermediate")
        return "auto"

    def _tier(self) -> str:
        self.spans["tier"] = self.span(self.token)
        return self.word("the name of a tier")

    def _one_of(self, line: str, choices: tuple[str, ...]) -> str:
        token = self.token
        self.spans[line] = self.span(token)
        found = self.word(" or ".join(choices))
        if found not in choices:
            self.fail(
                f"`{line} {found}` is not possible", "E0608", token, help=f"one of {', '.join(choices)}"
            )
        return found

    def _warpgroups(self) -> int:
        """`1 load + 2 compute`."""
        start = self.token
        self._number("of warpgroups that load", 1, 1)
        self.expect("load", "after the number of warpgroups that load")
        self.expect("+", "and the number of warpgroups that compute")
        count = self._number("of warpgroups that compute", 1, MOST_WARPGROUPS)
        self.expect("compute", "after the number of warpgroups that compute")
        self.spans["warpgroups"] = self.since(start)
        return count

    def _numbers(self, line: str, what: str, least: int, most: int) -> tuple[tuple[str, int], ...]:
        """`k by 3, v by 2`, or `k, v by 2`."""
        found: dict[str, int] = {}
        while True:
            waiting: list[str] = []
            while True:
                token = self.token
                name = self.word(what)
                if name in found or name in waiting:
                    self.fail(f"`{name}` stands twice in `{line}`", "E0608", token)
                waiting.append(name)
                self.spans[f"{line} {name}"] = self.span(token)
                if not self.accept(","):
                    break
            self.expect("by", "and a number")
            found |= dict.fromkeys(waiting, self._number(f"in `{line}`", least, most))
            if not self.accept(","):
                return tuple(found.items())

    def _number(self, what: str, least: int, most: int) -> int:
        token = self.token
        sign = "-" if self.accept("-") else ""
        range_ = f"from {least} to {most}" if most > least else str(least)
        if self.token.kind != "number":
            self.fail(
                f"expected a number {what}, found {self.describe()}", "E0609", help=f"a number {range_}"
            )
        text = sign + self.next().text
        if not text.isdigit() or not least <= int(text) <= most:
            self.fail(f"{text} {what}: not possible", "E0609", token, help=f"a whole number, {range_}")
        return int(text)

    def _tiles(self) -> tuple[tuple[str, int], ...]:
        tiles: dict[str, int] = {}
        while True:
            token = self.token
            axis = self.word("the name of an axis")
            if self.accept("."):
                axis += "." + self.word("the name of an axis")
            if axis in tiles:
                self.fail(f"`{axis}` has two tile sizes", "E0609", token)
            self.spans[f"tile {axis}"] = self.since(token)
            self.expect("by", "and a tile size")
            tiles[axis] = self._size()
            if not self.accept(","):
                return tuple(tiles.items())

    def _size(self) -> int:
        """A tile size; `by 1`, one index at a time, is 0 in the schedule."""
        token = self.token
        sign = "-" if self.accept("-") else ""
        if self.token.kind != "number":
            self.fail(
                f"expected a tile size, found {self.describe()}",
                "E0609",
                help=f"a number from 1 to {LARGEST_TILE}",
            )
        text = sign + self.next().text
        if not text.isdigit() or not 1 <= int(text) <= LARGEST_TILE:
            self.fail(
                f"a tile of {text} elements is not possible",
                "E0609",
                token,
                help=f"a whole number from 1 (one index at a time) to {LARGEST_TILE}",
            )
        return int(text) if int(text) > 1 else 0
