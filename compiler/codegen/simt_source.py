"""Pieces of generated CUDA source: text, names, and where values live."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from ...dsl.records import dataclass
from ...dsl.types import DType, compute
from ..tile_ir import (
    Const,
    LoopAxis,
    TileType,
)
from .deal import Layout
from .scalar_cuda import (
    MEANT,
    Code,
)
from .shared_memory import Buffer

LINE_BITS = 6
LINE = 1 << LINE_BITS  # 16-bit elements of 128 bytes, all banks of shared memory
OURS = "cuda range min max abs inf nan thread task tasks shared_bool ALL_LANES LAUNCHES"
TYPE_NAMES = "f64 f32 i64 i32 i16 i8 u8 u16 boolean"
RESERVED = frozenset([*keyword.kwlist, *keyword.softkwlist, *OURS.split(), *TYPE_NAMES.split()])


@dataclass(frozen=True)
class Registers:
    """A local array of a thread, its elements of the tile in row-major order of `layout`."""

    array: str
    layout: Layout


@dataclass(frozen=True)
class Staged:
    """A tile in shared memory: element (i, j) at i * pitches[0] + j * pitches[1], and beyond by the text `offset`.

    With `chunked`, a tile of 16-bit elements lies as pieces of LINE columns, each row of one a line of 128 bytes in which
    element j of row i has the place j ^ (i % 8) * 8: eight rows of eight columns are then in different banks.
    """

    buffer: Buffer
    axes: tuple[str, ...]
    pitches: tuple[int, ...]
    offset: str = ""
    chunked: int = 0
    """Elements of one piece; 0: rows lie as they are."""

    def place(self, row: str, column: str) -> str:
        """Where an element of a chunked tile lies."""
        row, column = grouped(row), grouped(column)
        piece = f" + ({column} >> {LINE_BITS}) * {self.chunked}" if self.pitches[0] > LINE else ""
        return f"{row} * {LINE} + (({column} & {LINE - 1}) ^ (({row} & 7) << 3)){piece}{self.offset}"


@dataclass(frozen=True)
class Value:
    """Where a tile value can be read: a scalar variable, registers, shared memory, or both of these."""

    type: TileType
    scalar: str | None = None
    registers: Registers | None = None
    staged: Staged | None = None


@dataclass(frozen=True)
class Point:
    """The element at which code is emitted: the layout whose loops are open, and the counter of each axis."""

    layout: Layout
    counters: dict[str, str]
    by_run: str | None = None
    """The axis whose counter counts runs; the point is the first of one."""

    def element(self, layout: Layout) -> str:
        """The number of this element among those of a layout that serves this one."""
        terms, stride = [], 1
        for axis, spread in reversed(list(zip(layout.axes, layout.spreads, strict=True))):
            each = stride * (spread.run if axis == self.by_run else 1)
            if spread.count > 1 and self.counters[axis] != "0":
                terms.append(self.counters[axis] if each == 1 else f"{self.counters[axis]} * {each}")
            stride *= spread.count
        return " + ".join(reversed(terms)) or "0"


NOWHERE = Point(Layout((), ()), {})


@dataclass
class Text:
    """Lines of a function body."""

    out: list[str] = field(default_factory=list)
    depth: int = 1

    def line(self, text: str) -> None:
        self.out.append("    " * self.depth + text)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1


@dataclass
class Names:
    """Python names for the user's: ASCII, no keyword, no name twice."""

    taken: set[str] = field(default_factory=lambda: set(RESERVED))

    def fresh(self, wanted: str) -> str:
        base = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "_"
        base = f"_{base}" if base[0].isdigit() else base
        name, n = base, 1
        while name in self.taken or MEANT.fullmatch(name):
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class AxisNames:
    """What an axis is called: its index, its tile's first index, its loop counter, whether its lane exists, bounds."""

    index: str
    first: str
    counter: str
    exists: str
    lo: str
    hi: str


def plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def held_bytes(dtype: DType) -> int:
    return compute(dtype).bytes


def held(dtype: DType) -> str:
    """The name of the type that a value of this dtype has in registers."""
    held = compute(dtype)
    return "boolean" if held is DType.BOOL else str(held)


def holding(text: str, dtype: DType) -> Code:
    """A name for a value of a declared type."""
    held = compute(dtype)
    return Code(text, held, narrow=None if held is dtype else dtype)


def local_array(dtype: DType, elements: int) -> str:
    """A thread's own array: a pointer to registers, for an index into an array is checked for being negative each time."""
    held = compute(dtype)
    return f"cuda.local.array({elements}, boolean)" if held is DType.BOOL else f"registers_{held}({elements})"


def arena_part(b: Buffer) -> str:
    """A part of an arena, as a pointer for the same reason."""
    if b.dtype is DType.BOOL:
        return f"shared_{b.dtype}[{b.start} : {b.start + b.size}]"
    return f"view_{arena_type(b.dtype)}(shared_{b.dtype}, {b.start}, {b.start + b.size})"


def arena_type(dtype: DType) -> str:
    """The type of an arena's elements: 16-bit floats lie there as their bits."""
    return "u16" if dtype in (DType.F16, DType.BF16) else held(dtype)


def arena_bytes(dtype: DType) -> int:
    return 2 if dtype in (DType.F16, DType.BF16) else held_bytes(dtype)


def staged_home(value: Value) -> Staged:
    if value.staged is None:
        raise AssertionError("a tile was not prepared for this reader")
    return value.staged


def joined(a: Layout, b: Layout) -> Layout:
    return Layout((*a.axes, *b.axes), (*a.spreads, *b.spreads))


def starts_late(a: LoopAxis) -> bool:
    """Has the axis a lower bound other than 0?"""
    return a.lo is not None and not (isinstance(a.lo, Const) and a.lo.value == 0)
