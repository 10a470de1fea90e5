"""Shared memory of one block at code generation: where buffers lie, and where barriers must stand.

Buffers of one element type share an arena; a buffer whose life has ended leaves its place to the next. A barrier is due
before a read of a place written since the last barrier, and before a write to a place read or written since then. On
entering a loop everything counts as read and written, for the back edge leads there from the loop's end.
"""

from __future__ import annotations

from dataclasses import field

from ...dsl.records import dataclass
from ...dsl.types import DType

ALIGN = 8  # buffers start at multiples of 8 elements: 16 bytes for 16-bit floats


@dataclass(frozen=True)
class Buffer:
    """Elements [start, start + size) of the arena of `dtype`, under a name of its own in the source."""

    name: str
    dtype: DType
    start: int
    size: int

    def overlaps(self, other: Buffer) -> bool:
        return (
            self.dtype is other.dtype
            and self.start < other.start + other.size
            and other.start < self.start + self.size
        )


@dataclass(frozen=True)
class Touched:
    """What happened to places since the last barrier; `anything` stands for the unknown past of a loop's entry."""

    reads: frozenset[Buffer | str] = frozenset()
    writes: frozenset[Buffer | str] = frozenset()
    anything: bool = False

    def joined(self, other: Touched) -> Touched:
        return Touched(self.reads | other.reads, self.writes | other.writes, self.anything or other.anything)


@dataclass
class SharedMemory:
    """Places and pending accesses. A place is a `Buffer`, or the name of a tensor in global memory."""

    all_buffers: list[Buffer] = field(default_factory=list)
    live: list[Buffer] = field(default_factory=list)
    touched: Touched = Touched()

    def allocate(self, name: str, dtype: DType, size: int, align: int = ALIGN) -> Buffer:
        """First fit among the live buffers of the type; it starts at a multiple of `align` elements."""
        start = 0
        for b in sorted((b for b in self.live if b.dtype is dtype), key=lambda b: b.start):
            if start + size <= b.start:
                break
            start = max(start, -(-(b.start + b.size) // align) * align)
        made = Buffer(name, dtype, start, size)
        self.live.append(made)
        self.all_buffers.append(made)
        return made

    def free(self, buffer: Buffer) -> None:
        self.live.remove(buffer)

    def arenas(self) -> dict[DType, int]:
        """Elements needed for each type."""
        sizes: dict[DType, int] = {}
        for b in self.all_buffers:
            sizes[b.dtype] = max(sizes.get(b.dtype, 0), b.start + b.size)
        return sizes

    def read(self, place: Buffer | str) -> bool:
        """Note a read; is a barrier due before it?"""
        due = self.touched.anything or _meets(place, self.touched.writes)
        before = Touched() if due else self.touched
        self.touched = Touched(before.reads | {place}, before.writes)
        return due

    def write(self, place: Buffer | str) -> bool:
        """Note a write; is a barrier due before it?"""
        due = self.touched.anything or _meets(place, self.touched.writes | self.touched.reads)
        before = Touched() if due else self.touched
        self.touched = Touched(before.reads, before.writes | {place})
        return due

    def enter_loop(self) -> Touched:
        """Forget what is known; gives what has to be joined again after the loop."""
        entered, self.touched = self.touched, Touched(anything=True)
        return entered

    def leave_loop(self, entered: Touched) -> None:
        self.touched = self.touched.joined(entered)


def _meets(place: Buffer | str, places: frozenset[Buffer | str]) -> bool:
    if isinstance(place, str):
        return place in places
    return any(isinstance(p, Buffer) and place.overlaps(p) for p in places)
