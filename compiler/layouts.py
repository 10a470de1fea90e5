"""Meaning of the attributes of the tile IR: where a tile lives, how a loop is issued, what is known of sizes and values.

Each attribute `@name(field = value, …)` is one frozen dataclass below; `meaning` decodes it and refuses what is unknown,
`Meaning.attribute` encodes it. No attribute changes a value beyond rounding. Layouts are those of PTX ISA 9, sections
"wgmma.mma_async: register fragments" and "shared memory matrix layout".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import ClassVar, Literal, TypeVar

from ..dsl.records import dataclass
from .tile_ir import Attribute

Place = Literal["value", "store", "loop", "grid", "program"]
"""What an attribute may stand on; a carried value is a "value"."""


@dataclass(frozen=True)
class Meaning:
    """A decoded attribute. `name` is its spelling; `axis_fields` are the fields that name axes."""

    name: ClassVar[str]
    places: ClassVar[frozenset[Place]]
    axis_fields: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[dict[str, tuple[str | int, ...]]] = {}

    def attribute(self) -> Attribute:
        """The attribute as the tile IR holds it; fields at their default are left out."""
        kept = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return Attribute(self.name, tuple((k, v) for k, v in kept if v != _default(self, k)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes it names."""
        return tuple(getattr(self, f) for f in self.axis_fields if getattr(self, f))


def _default(m: Meaning, key: str) -> object:
    return next(f.default for f in fields(m) if f.name == key)


VALUE: frozenset[Place] = frozenset({"value"})
LOOP: frozenset[Place] = frozenset({"loop"})
PROGRAM: frozenset[Place] = frozenset({"program"})

# ---------------------------------------------------------------- where a tile lives


@dataclass(frozen=True)
class Fragment(Meaning):
    """A matrix accumulator in registers of 32 bits, 64 rows a warpgroup (16 a warp).

    `split` is the side that compute warpgroups divide: "row", each has 64 rows and all columns; "col", each has all 64
    rows and its share of the columns.
    """

    name = "fragment"
    places = VALUE
    axis_fields = ("row", "col")
    choices: ClassVar = {"split": ("row", "col")}
    row: str
    col: str
    split: str = "row"

    @staticmethod
    def element(warp: int, lane: int, register: int) -> tuple[int, int]:
        """Row and column of a thread's `register`: 4i + 2h + c is row 16·warp + lane//4 + 8h, column 8i + 2(lane%4) + c."""
        i, h, c = register // 4, register // 2 % 2, register % 2
        return 16 * warp + lane // 4 + 8 * h, 8 * i + 2 * (lane % 4) + c


@dataclass(frozen=True)
class Packed(Meaning):
    """16-bit elements of a fragment, two to a register: the A operand of a dot whose `over` axis is `col`."""

    name = "packed"
    places = VALUE
    axis_fields = ("row", "col")
    row: str
    col: str

    @staticmethod
    def element(warp: int, lane: int, register: int, half: int) -> tuple[int, int]:
        """Row and column of one half of a register; registers 4i to 4i + 3 are the operand of the k16 step i."""
        i, part = register // 4, register % 4
        return 16 * warp + lane // 4 + 8 * (part % 2), 16 * i + 8 * (part // 2) + 2 * (lane % 4) + half


@dataclass(frozen=True)
class Shared(Meaning):
    """In shared memory: chunks of `swizzle` bytes of columns, each of all rows; `buffers` copies used in turn.

    A load with this layout is a staged copy (a ring's, if a ring names it); another value is written there from registers.
    A dot reads the tile K-major where its `over` axis is `col`, MN-major where it is `row`: the same bytes.
    """

    name = "shared"
    places = VALUE
    axis_fields = ("row", "col")
    choices: ClassVar = {"swizzle": (0, 32, 64, 128)}
    row: str
    col: str
    swizzle: int = 128
    buffers: int = 1

    def offset(self, row: int, col: int, rows: int, columns: int, bytes: int) -> int:
        """Byte offset of an element of `bytes` bytes in a tile of `rows` by `columns`; 16-byte units are permuted by row."""
        if not self.swizzle:
            return (row * columns + col) * bytes
        width = self.swizzle
        chunk, inside = divmod(col * bytes, width)
        unit = (row * width // 128) % (width // 16)
        return chunk * rows * width + row * width + (inside ^ (unit * 16))


@dataclass(frozen=True)
class Rows(Meaning):
    """One value a row of a fragment: two registers a thread. `partial` names the reduction over a row's four lanes that is
    still to be done ("sum", "max", …); "" where the value is whole."""

    name = "rows"
    places = VALUE
    axis_fields = ("axis",)
    choices: ClassVar = {"partial": ("", "sum", "max", "min", "prod", "any", "all")}
    axis: str
    partial: str = ""


@dataclass(frozen=True)
class Columns(Meaning):
    """One value a column of a fragment: read from shared or global memory where it is used, never held."""

    name = "columns"
    places = VALUE
    axis_fields = ("axis",)
    axis: str


@dataclass(frozen=True)
class Vector(Meaning):
    """Accessed or computed `width` consecutive lanes of `axis` at a time; the address is a multiple of that many bytes."""

    name = "vector"
    places = frozenset({"value", "store"})
    axis_fields = ("axis",)
    axis: str
    width: int


@dataclass(frozen=True)
class Native(Meaning):
    """A scratch tensor's tile keeps the order of elements that the fragment has; all who access the tensor say so."""

    name = "native"
    places = frozenset({"value", "store"})


@dataclass(frozen=True)
class Staged(Meaning):
    """Stored through shared memory by a bulk copy; each warpgroup has `buffers` buffers of 64 rows by 128 bytes."""

    name = "staged"
    places = frozenset({"store"})
    buffers: int = 1


# ---------------------------------------------------------------- facts about values


@dataclass(frozen=True)
class Rounded(Meaning):
    """The value's outermost operation rounds by itself: it is never contracted with one that uses the value."""

    name = "rounded"
    places = VALUE


@dataclass(frozen=True)
class Range(Meaning):
    """Every element that is not masked is finite; with `below_log2` = n, and |x| < 2ⁿ."""

    name = "range"
    places = VALUE
    below_log2: int = 0


@dataclass(frozen=True)
class Positive(Meaning):
    """The scalar parameter is > 0: required, or the call specialised on it."""

    name = "positive"
    places = PROGRAM
    scalar: str


@dataclass(frozen=True)
class Divisible(Meaning):
    """The extent (or an expression of extents, as text) is a multiple of `by`: a specialisation key."""

    name = "divisible"
    places = PROGRAM
    extent: str
    by: int


@dataclass(frozen=True)
class Alignment(Meaning):
    """A tensor's address and all strides but the innermost, which is 1, are multiples of `bytes`."""

    name = "alignment"
    places = PROGRAM
    tensor: str
    bytes: int


# ---------------------------------------------------------------- loops


@dataclass(frozen=True)
class Skew(Meaning):
    """This dot of the body is issued one step ahead of the rest; it must not depend on carried values."""

    name = "skew"
    places = LOOP
    dot: str


@dataclass(frozen=True)
class Pingpong(Meaning):
    """Compute warpgroups take turns at issuing their dots."""

    name = "pingpong"
    places = LOOP


@dataclass(frozen=True)
class Inflight(Meaning):
    """Groups of matrix instructions that may still run when the next step begins."""

    name = "inflight"
    places = LOOP
    groups: int


@dataclass(frozen=True)
class Full(Meaning):
    """Every tile visited has all its lanes, and the domain holds on all of them: nothing needs a mask."""

    name = "full"
    places = LOOP


@dataclass(frozen=True)
class Nonempty(Meaning):
    """The loop makes at least one step."""

    name = "nonempty"
    places = LOOP


@dataclass(frozen=True)
class Unroll(Meaning):
    """Steps written out in one pass of the emitted loop."""

    name = "unroll"
    places = LOOP
    times: int


@dataclass(frozen=True)
class Issue(Meaning):
    """Order inside a step: `eager` does row and scalar work as soon as it can; `hold` keeps waits for the matrix unit behind
    the row reductions before them."""

    name = "issue"
    places = LOOP
    eager: bool = True
    hold: bool = False


# ---------------------------------------------------------------- grids and programs


@dataclass(frozen=True)
class Order(Meaning):
    """Order in which a grid's tiles are taken: `fast` varies first, `slow` last, from its last tile if `reverse` (under a
    causal domain the longest first). With `l2_bytes`, `fast` runs in groups whose tensors fit in that much cache."""

    name = "order"
    places = frozenset({"grid"})
    axis_fields = ("fast", "slow")
    fast: str = ""
    slow: str = ""
    reverse: bool = False
    l2_bytes: int = 0


@dataclass(frozen=True)
class Split(Meaning):
    """The axis whose rows the compute warpgroups (or warps) divide."""

    name = "split"
    places = PROGRAM
    axis_fields = ("axis",)
    axis: str


@dataclass(frozen=True)
class Persistent(Meaning):
    """One block a multiprocessor takes tile after tile: in order or, `dynamic`, from a counter, whose `ticket` is drawn
    before ("early") or after ("late") the loads of the current tile are issued."""

    name = "persistent"
    places = PROGRAM
    choices: ClassVar = {"ticket": ("early", "late")}
    dynamic: bool = False
    ticket: str = "early"


@dataclass(frozen=True)
class Rings(Meaning):
    """Positions in rings move on when a slot is acquired or at its "release"; kept as counters, or as slot and phase."""

    name = "rings"
    places = PROGRAM
    choices: ClassVar = {"advance": ("acquire", "release")}
    advance: str = "acquire"
    counters: bool = True


@dataclass(frozen=True)
class Threads(Meaning):
    """Threads of a block where the tier has no roles."""

    name = "threads"
    places = PROGRAM
    count: int


@dataclass(frozen=True)
class Slots(Meaning):
    """Slots of the ring through which tiles of a tensor come."""

    name = "slots"
    places = PROGRAM
    tensor: str
    count: int


@dataclass(frozen=True)
class Unskewed(Meaning):
    """A step's products end before the next step's start."""

    name = "unskewed"
    places = PROGRAM


@dataclass(frozen=True)
class Overlapping(Meaning):
    """Tasks that are `together`: a task's last products run with the next one's first; or `apart`."""

    name = "overlapping"
    places = PROGRAM
    choices: ClassVar = {"tasks": ("together", "apart")}
    tasks: str


@dataclass(frozen=True)
class Tasks(Meaning):
    """How blocks take tasks: `longest`, a block for each, the longest first; `turns`, one block a multiprocessor takes task
    after task; `balanced`, the same, the longest first, in rounds that run over the blocks forwards and backwards."""

    name = "tasks"
    places = PROGRAM
    choices: ClassVar = {"order": ("balanced", "longest", "turns")}
    order: str


@dataclass(frozen=True)
class Ranked(Meaning):
    """A tensor has the tiles of the last grid axis, those with the longest loops first, for each index along the grid axes
    `units`."""

    name = "ranked"
    places = PROGRAM
    tensor: str
    units: str = ""


@dataclass(frozen=True)
class Primary(Meaning):
    """The launch lets the next one start as soon as all its own blocks have started."""

    name = "primary"
    places = PROGRAM


@dataclass(frozen=True)
class Secondary(Meaning):
    """The launch may start while the one before it still runs; its threads wait for the end of that before they touch memory
    (CUDA C++ Programming Guide 13.0, "Programmatic Dependent Launch and Synchronization")."""

    name = "secondary"
    places = PROGRAM


KNOWN: dict[str, type[Meaning]] = {m.name: m for m in Meaning.__subclasses__()}

# ---------------------------------------------------------------- decoding


def meaning(a: Attribute) -> Meaning:
    """The decoded attribute. Raises `ValueError` for an unknown name and for a field unknown, missing or of a wrong type."""
    if a.name not in KNOWN:
        raise ValueError(f"unknown attribute @{a.name}; known are {', '.join(sorted(KNOWN))}")
    kind = KNOWN[a.name]
    declared = {f.name: f for f in fields(kind)}
    given = dict(a.fields)
    if len(given) != len(a.fields):
        raise ValueError(f"@{a.name} gives a field twice")
    for key, value in given.items():
        if key not in declared:
            raise ValueError(f"@{a.name} has no field {key}; its fields are {', '.join(declared) or 'none'}")
        _typed(kind, declared[key], value)
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"@{a.name} lacks {', '.join(missing)}")
    return kind(**given)


def _typed(kind: type[Meaning], f: Field[object], value: str | int | bool) -> None:
    wanted = {"str": str, "int": int, "bool": bool}[str(f.type)]
    if type(value) is not wanted:
        raise ValueError(f"@{kind.name}: {f.name} is {value!r}, not of type {f.type}")
    allowed = kind.choices.get(f.name)
    if allowed is not None and value not in allowed:
        raise ValueError(f"@{kind.name}: {f.name} is {value!r}; accepted are {', '.join(map(repr, allowed))}")
    if wanted is int and isinstance(value, int) and value < 0:
        raise ValueError(f"@{kind.name}: {f.name} is {value}; it must not be negative")


M = TypeVar("M", bound=Meaning)


def find(attributes: Iterable[Attribute], kind: type[M]) -> M | None:
    """The first attribute of a kind, decoded."""
    return next(iter(find_all(attributes, kind)), None)


def find_all(attributes: Iterable[Attribute], kind: type[M]) -> list[M]:
    """Every attribute of a kind, decoded."""
    found = (meaning(a) for a in attributes if a.name == kind.name)
    return [m for m in found if isinstance(m, kind)]
