"""Tiles that come from memory ahead of their use: `cp.async` into shared memory, one or two steps of a loop early (sm_80).

A loop's tiles that only products read fill a ring of buffers. Each round waits for its own step's copies, starts those of a
later step, and computes. A copy moves 16 bytes where memory and shared memory run along the same axis and the variant takes
rows for granted as `simt_elements.Wide` says; else 4, which also turns a tile round and serves any strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import prod

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Dot,
    Expr,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Stmt,
    Store,
    TileProgram,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from .deal import Layout, Spread
from .scalar_cuda import Code, convert
from .shared_memory import ALIGN, Touched
from .simt import Kernel
from .simt_elements import Wide
from .simt_source import LINE, NOWHERE, Point, Staged, Value, arena_bytes, starts_late
from .tile_types import Facts, leaves, rewrite, static_value, tile_axes

SIXTEEN = (DType.F16, DType.BF16)
MOST_STAGES, LEAST_STAGES = 3, 2
BLOCKS_PER_SM = 2  # a deeper ring than lets so many blocks share a multiprocessor does not pay
BESIDE_STATES = 90  # registers of a thread for fragments and indices, beside what its loop carries
RESERVED_BYTES = 2048  # of each block's shared memory: the driver's, and small tiles
CACHED_BYTES = 32 << 20  # of the level 2 cache that tiles read by several blocks may fill
GROUP = 8  # rows of tiles that are visited together
ASYNC_COPIES = (8, 0)  # the first capability that has them


def chunk(dtype: DType) -> int:
    """Elements that one asynchronous copy of 16 bytes moves."""
    return 16 // dtype.bytes


# ---------------------------------------------------------------- what a variant takes for granted


def packed_extents(program: TileProgram) -> dict[str, int]:
    """Extents, known at run time only, of the axes along which rows lie in memory, with the elements of 16 bytes."""
    statics = dict(program.statics)
    found: dict[str, int] = {}
    for t, subscripts in accesses(program):
        param = program.param(t)
        axis = subscripts[-1] if subscripts else None
        extent = param.shape[-1] if subscripts else None
        is_open = isinstance(extent, ExtentRef) and extent.name not in statics
        if is_open and isinstance(axis, AxisIndex) and axis.axis in tile_axes(program, statics):
            assert isinstance(extent, ExtentRef)
            found[extent.name] = max(found.get(extent.name, 1), chunk(param.dtype))
    return found


def accesses(program: TileProgram) -> list[tuple[str, tuple[Expr, ...]]]:
    every = [x for s in statements(program.body) for e in expressions(s) for x in subexpressions(e)]
    moved = [(x.tensor, x.subscripts) for x in every if isinstance(x, Load)]
    return moved + [(s.tensor, s.subscripts) for s in statements(program.body) if isinstance(s, Store)]


def tile_multiples(program: TileProgram) -> dict[str, int]:
    """Extents that are cut into tiles, each with its tile's size."""
    statics = dict(program.statics)
    found: dict[str, int] = {}
    for a in tile_axes(program, statics).values():
        if isinstance(a.extent, ExtentRef) and a.extent.name not in statics and a.tile is not None:
            found[a.extent.name] = max(a.tile, found.get(a.extent.name, 1))
    return found


def assumptions(program: TileProgram, run: int) -> list[tuple[Wide, str]]:
    """Variants by how much they take for granted: whole tiles, whole rows of chunks, nothing; each with its name's end."""
    packed = packed_extents(program)
    ragged = Wide(run, tuple(packed.items()))
    whole = Wide(run, tuple({**packed, **tile_multiples(program)}.items()))
    made: list[tuple[Wide, str]] = []
    for wide, suffix in ((whole, ""), (ragged, "ragged"), (Wide(), "any")):
        if not made or wide != made[-1][0]:
            made.append((wide, suffix))
    return made


# ---------------------------------------------------------------- operands under names


def with_named_operands(program: TileProgram, rounds: bool = True) -> TileProgram:
    """The same program: operands of products that are read from memory are named tiles. `rounds`: a computed f32 operand is
    rounded to the type of the stored 16-bit one it meets."""
    statics = dict(program.statics)
    facts = facts_of(program, {a: x.tile or 1 for a, x in tile_axes(program, statics).items()})
    return replace(program, body=_Naming(facts, rounds).block(program.body, {}))


def facts_of(program: TileProgram, tiles: dict[str, int]) -> Facts:
    return Facts({p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, tiles)


class _Naming:
    def __init__(self, facts: Facts, rounds: bool) -> None:
        self.facts, self.rounds, self.count = facts, rounds, 0

    def block(self, body: tuple[Stmt, ...], types: dict[str, TileType]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            match s:
                case Let():
                    out.append(replace(s, value=self.named(s.value, types, out)))
                    types[s.name] = s.type
                case Store():
                    out.append(replace(s, value=self.named(s.value, types, out)))
                case Grid():
                    out.append(replace(s, body=self.block(s.body, dict(types))))
                case For():
                    types.update({c.name: c.type for c in s.carries})
                    inside = dict(types)
                    inner = list(self.block(s.body, inside))
                    yields = tuple(self.named(y, inside, inner) for y in s.yields)
                    out.append(replace(s, body=tuple(inner), yields=yields))
        return tuple(out)

    def named(self, e: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        def rule(x: Expr) -> Expr:
            if not isinstance(x, Dot):
                return x
            return replace(x, a=self.operand(x.a, x.b, types, out), b=self.operand(x.b, x.a, types, out))

        return rewrite(e, rule)

    def operand(self, e: Expr, other: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        mine, its = self.facts.type_of(e, types), self.facts.type_of(other, types)
        if isinstance(e, Load):
            self.count += 1
            name = f"{e.tensor} operand {self.count}"
            out.append(Let(name, mine, e))
            types[name] = mine
            return Name(name)
        if self.rounds and mine.dtype is DType.F32 and its.dtype in SIXTEEN:
            return Cast(its.dtype, e)
        return e


# ---------------------------------------------------------------- copies


@dataclass(frozen=True)
class Copy:
    """How a tile is copied: `column` is the axis of its last subscript, `row` the other; `width` elements at once."""

    load: Load
    row: str
    column: str
    width: int


@dataclass(frozen=True)
class Pipeline:
    """Loops in a row over one axis whose products' operands come ahead, through `rings` by the names of the last loop's
    tiles. Steps are visited from `start` up to `stop`; those for which `test` holds are whole, where it says anything."""

    chain: tuple[For, ...]
    each: list[list[tuple[Let, Copy]]]
    streams: list[tuple[Let, Copy]]
    rings: Mapping[str, Staged]
    start: str
    stop: str
    test: str

    @property
    def last(self) -> For:
        return self.chain[-1]


def with_tiled_axes_last(program: TileProgram) -> TileProgram:
    """The same program: a grid's order is nothing but the one in which tasks are numbered. A result with heads after rows,
    [B, M, H, E], has its axes in that order, and the last ones tell how long tasks are."""

    def ordered(s: Stmt) -> Stmt:
        if not isinstance(s, Grid) or any(a.lo is not None or a.hi is not None for a in s.axes):
            return s
        return replace(s, axes=tuple(sorted(s.axes, key=lambda a: a.tile is not None)))

    return replace(program, body=tuple(map(ordered, program.body)))


def lengths_differ(program: TileProgram) -> bool:
    """Do tiles of the only axis of the grid that is cut into tiles tell how long loops are?"""
    inside = list(statements(with_tiled_axes_last(program).body))
    axes = next((s.axes for s in inside if isinstance(s, Grid)), ())
    free = all(a.lo is None and a.hi is None for a in axes)
    plain = bool(axes) and free and axes[-1].tile is not None and all(a.tile is None for a in axes[:-1])
    return plain and any(s.axis.lo is not None or s.axis.hi is not None for s in inside if isinstance(s, For))


class Streams(Kernel):
    """A kernel whose loops have their products' operands copied ahead."""

    joins_loops = True
    """Is one pipeline to serve a loop over full tiles and the one over partial tiles that follows?"""
    copied: tuple[DType, ...]
    """Element types whose tiles may be copied."""
    asks_late = False
    """Are copies for a loop that only adds products started after these?"""

    def __init__(self, program: TileProgram, target: CudaTarget, wide: Wide, suffix: str) -> None:
        self.streamed: set[str] = set()
        self.awaited: set[str] = set()  # buffers that copies under way are filling
        self.stages = MOST_STAGES
        self.continued = continued(program.body) if self.joins_loops else set()
        self.waiting: list[For] = []
        self.grid_axes: tuple[LoopAxis, ...] = ()
        self.shared_scalars: dict[Expr, Expr] | None = None
        self.copier = "thread"
        self.summed = summed_from_memory(program)
        super().__init__(program, target, wide, suffix)

    def before_tasks(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        self.grid_axes = axes

    def _looped_bytes(self) -> str:
        """What the loops of one task read, at most."""
        read: dict[str, str] = {}
        for s in (x for x in statements(self.program.body) if isinstance(x, For)):
            extent = self.emit(s.axis.extent, NOWHERE).operand
            for x in s.body:
                if isinstance(x, Let) and isinstance(x.value, Load) and s.axis.name in x.type.axes:
                    row = prod(self.tiles[a] for a in x.type.axes if a != s.axis.name) * x.type.dtype.bytes
                    read[x.value.tensor] = f"{extent} * {row}"
        return " + ".join(read.values()) or "1"

    def _longest_first(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """The tiles with the longest loops first, of as many of the other indices together as read what fits into the level
        2 cache: a device gives its next block to the first multiprocessor that has room, and short ones fill the end.

        All of this is 32 bits wide, and `quotient_here` keeps it inside the task, for a loop that carries the sums of an
        attention has no register for what all tasks share.
        """
        loops = [s.axis for s in statements(self.program.body) if isinstance(s, For)]
        others = self._small("others", " * ".join(counts[:-1]) or "1")
        fit = f"quotient_here({CACHED_BYTES}, {self._looped_bytes()})"
        together = self._small("together", f"max(min({fit}, {others}), 1)")
        count = self._small("rounds", counts[-1])
        group, inside = self._divided("task", f"i32({together} * {count})", "group", "inside")
        start = self._small("start", f"{group} * {together}")
        some = self._small("some", f"min(i32({others} - {start}), {together})")
        tile, rest = self._divided(inside, some, "tile", "rest")
        first_is_longest = any(a.lo is not None and a.hi is None for a in loops)
        number = f"i64({tile})" if first_is_longest else f"(i64({count}) - 1 - i64({tile}))"
        self.text.line(f"{self.axis_names[axes[-1].name].first} = {number} * {axes[-1].tile}")
        rest = self._small("other", f"{start} + {rest}")
        for i in range(len(axes) - 2, -1, -1):
            here = rest
            if i:
                rest = self._small("rest", f"quotient({here}, {counts[i]})")
                here = f"{here} - {rest} * {counts[i]}"
            self.text.line(f"{self.axis_names[axes[i].name].index} = i64({here})")

    def _divided(self, number: str, by: str, *names: str) -> tuple[str, str]:
        """Quotient and remainder, of these names."""
        whole = self._small(names[0], f"quotient({number}, {by})")
        return whole, self._small(names[1], f"{number} - {whole} * {by}")

    def _small(self, name: str, text: str) -> str:
        """A variable of 32 bits."""
        return self.assign(name, Code(f"i32({text})", DType.I32))

    def imports(self) -> dict[str, set[str]]:
        text = "\n".join(self.text.out)
        return {"warpgroup": {x for x in ("quotient", "quotient_here", "thread_here") if f"{x}(" in text}}

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Tiles of a product in groups of GROUP rows, rows fastest: blocks that run together read the same tiles."""
        if lengths_differ(self.program):
            self._longest_first(axes, counts)
            return
        two = axes[-2:]
        plain = len(two) == 2 and all(a.tile is not None and a.lo is None and a.hi is None for a in two)
        if not plain or any(
            isinstance(s, For) and s.axis.hi is not None for s in statements(self.program.body)
        ):
            super()._task_indices(axes, counts)
            return
        names = [self.axis_names[a.name] for a in two]
        rows, columns = counts[-2:]
        rest = "task"
        if len(axes) > 2:
            inner = self.assign("tiles", Code(f"{rows} * {columns}", DType.I64))
            rest = self.assign("tile", Code(f"task % {inner}", DType.I64))
            for a, count in reversed(list(zip(axes[:-2], counts[:-2], strict=True))):
                left = self.assign("rest", Code(f"task // {inner}", DType.I64))
                here = f"{left} % {count}"
                name = self.axis_names[a.name]
                self.text.line(f"{name.index if a.tile is None else name.first} = ({here}) * {a.tile or 1}")
                inner = self.assign("tiles", Code(f"{inner} * {count}", DType.I64))
        group = self.assign("group", Code(f"{rest} // ({GROUP} * {columns}) * {GROUP}", DType.I64))
        inside = self.assign("inside", Code(f"{rest} % ({GROUP} * {columns})", DType.I64))
        high = self.assign("high", Code(f"min({rows} - {group}, {GROUP})", DType.I64))
        self.text.line(f"{names[0].first} = ({group} + {inside} % {high}) * {two[0].tile}")
        self.text.line(f"{names[1].first} = {inside} // {high} * {two[1].tile}")

    def copying_of(self, e: Load, t: TileType) -> Copy | None:
        """How a tile can be copied asynchronously; None where it cannot."""
        last = e.subscripts[-1] if e.subscripts else None
        if self.target.capability < ASYNC_COPIES or t.dtype not in self.copied or len(t.axes) != 2:
            return None
        if not isinstance(last, AxisIndex) or last.axis not in t.axes or last.axis not in self.live:
            return None
        param, column = self.program.param(e.tensor), last.axis
        row = next(a for a in t.axes if a != column)
        spans = [self.facts.type_of(x, self.types).axes for x in e.subscripts]
        inside = all(
            not axes or self.covers(x, n) for x, axes, n in zip(e.subscripts, spans, param.shape, strict=True)
        )
        free = not any(self.depends_on_tensors(x) for x in e.subscripts)
        if not inside or not free or e.tensor in self.shared_tensors or param.dtype is not t.dtype:
            return None
        by_chunks = self._by_chunks(t, column) and not self._is_cut_in_chunks(column)
        width = chunk(t.dtype) if by_chunks else 1
        return Copy(e, row, column, width) if width > 1 or t.dtype.bytes == 4 else None

    def _by_chunks(self, t: TileType, column: str) -> bool:
        """Do rows lie in memory and in shared memory alike, and are they of whole chunks?"""
        width, extent = chunk(t.dtype), self.live[column].extent
        static = static_value(extent, self.statics)
        whole = static % width == 0 if static is not None else self.wide.divides(extent, width)
        return (
            self.wide.run > 1 and whole and self.tiles[column] % width == 0 and self.runs_in_rows(t, column)
        )

    def _is_cut_in_chunks(self, axis: str) -> bool:
        """May a loop's bound lie inside a chunk, of which a product of tiles from memory would then add too much? Computed
        operands are zero where lanes do not exist."""
        from .warpgroup_form import ends_tile, scalar_values  # which builds on this module

        a = self.live[axis]
        bounds = [x for x in (a.lo, a.hi) if x is not None]
        values = scalar_values(self.program.body) if bounds else {}
        return axis in self.summed and not all(ends_tile(x, a, values) for x in bounds)

    def runs_in_rows(self, t: TileType, column: str) -> bool:
        """Do neighbours along this axis lie side by side in the tile's place in shared memory?"""
        return t.axes[-1] == column

    def let(self, s: Let) -> None:
        if s.name in self.streamed:
            return
        copy = self.copying_of(s.value, s.type) if isinstance(s.value, Load) else None
        if s.name in self.crossing and copy is not None:
            staged = self.place(f"{s.name}_shared", s.type)
            self.note(self.memory.write(staged.buffer))
            self.copy(replace(copy, load=self._with_scalars(copy.load)), s.type, staged)
            self.text.line("commit_copies()")
            self.awaited.add(staged.buffer.name)
            self.bind(s.name, Value(s.type, staged=staged))
            return
        super().let(s)

    def _with_scalars(self, e: Load) -> Load:
        """The same with what its lanes share computed before."""
        found = self.hoisted(e)
        assert isinstance(found, Load)
        return found

    def _scalar_name(self, e: Expr) -> Expr:
        """What the subscripts of a loop's tensors share is one variable: a loop has no register for it twice."""
        if self.shared_scalars is None:
            return super()._scalar_name(e)
        if e not in self.shared_scalars:
            self.shared_scalars[e] = super()._scalar_name(e)
        return self.shared_scalars[e]

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        """Quotients of indices that the grid counts take 32 bits: after a call of the division of 64 bits, the assembler
        takes the threads of a warp for diverged, and writes a loop with shuffles anew for each of them (sm_80)."""
        match e:
            case Apply(op="floordiv", args=(a, b)) if self._is_counted(a) and self._is_extent(b):
                return Code(f"small_floordiv_i64({args[0].text}, {args[1].text})", DType.I64)
        return super()._node(e, args, at)

    def _is_counted(self, e: Expr) -> bool:
        """Is it an index or an extent of an axis of the grid, or a quotient of one? A launch has fewer than 2^31 blocks."""
        match e:
            case AxisIndex(axis=axis):
                return any(a.name == axis and a.tile is None and a.lo is None for a in self.grid_axes)
            case ExtentRef():
                return any(a.extent == e and a.tile is None and a.hi is None for a in self.grid_axes)
            case Apply(op="floordiv", args=(a, b)):
                return self._is_counted(a) and self._is_extent(b)
        return False

    def _is_extent(self, e: Expr) -> bool:
        return isinstance(e, ExtentRef) or self._is_counted(e)

    def copy(self, c: Copy, t: TileType, staged: Staged, conditions: tuple[str, ...] = ()) -> None:
        """Start copying a tile; chunks that do not exist, or for which a condition fails, become zero."""
        if c.width > 1:
            self.wide_tensors[c.load.tensor] = None
        depth, param = self.text.depth, self.program.param(c.load.tensor)
        along = self.tiles[c.column] // c.width
        pieces, threads = self.tiles[c.row] * along, self.deal.threads
        at = Point(Layout(t.axes, tuple(Spread(self.tiles[a]) for a in t.axes)), dict.fromkeys(t.axes, "0"))
        where = {a: self.names.fresh(f"{a}_at") for a in (c.row, c.column)}
        bare = [i for i, x in enumerate(c.load.subscripts) if x == AxisIndex(c.row)]
        others = [x for x in c.load.subscripts if x != AxisIndex(c.row)]
        stepping = len(bare) == 1 and not any(_mentions(x, c.row) for x in others)
        even = threads % along == 0 and pieces % threads == 0 and stepping
        piece = self.names.fresh("piece")
        if even:  # rounds differ by whole rows: one address, and a step
            self._first_piece(c, where, along, staged)
        else:
            self.text.line(f"for {piece} in range({-(-pieces // threads)}):")
            self.text.depth += 1
            if pieces % threads:
                self.text.line(f"if {self.copier} + {threads} * {piece} < {pieces}:")
                self.text.depth += 1
            self.text.line(f"{where[c.row]} = ({self.copier} + {threads} * {piece}) // {along}")
            self.text.line(
                f"{where[c.column]} = ({self.copier} + {threads} * {piece}) % {along}" + _times(c.width)
            )
        for a in t.axes:
            self.text.line(f"{self.axis_names[a].index} = {self._first(a)}{where[a]}")
        subscripts = [convert(self.cut(self.emit(x, at), 40), DType.I64) for x in c.load.subscripts]
        loose = [not self.facts.type_of(x, self.types).axes for x in c.load.subscripts]
        offset = self.offset(param, subscripts, packed=c.width > 1)
        pitch = dict(zip(staged.axes, staged.pitches, strict=True))
        place = " + ".join(where[a] + _times(pitch[a]) for a in (c.row, c.column)) + staged.offset
        if staged.chunked:
            place = staged.place(where[c.row], where[c.column])
        outside = self.within(param, c.load.subscripts, subscripts, loose)
        checks: list[str] = []
        together = {c.column: c.width}
        lanes = {a: self.lane_checks(at, a, together.get(a, 1)) for a in t.axes}
        if even:
            rows = threads // along
            offset = self.cut(Code(offset, DType.I64), 0).text
            place = self.cut(Code(place, DType.I64), 0).text
            step = self.cut(Code(f"{rows} * {self.strides[param.name][bare[0]]}", DType.I64), 0).text
            end = self._row_end(c.row) if self.counts_rows() else ""
            if end:
                apart_from_rows = [*conditions, *lanes[c.column], *outside]
                checks = [self._rows_left(c.row, end, apart_from_rows, piece, rows)]
            self.text.line(f"for {piece} in range({pieces // threads}):")
            self.text.depth += 1
            apart = rows * (LINE if staged.chunked else pitch[c.row])
            place, offset = f"{place} + {apart} * {piece}", f"{offset} + {step} * {piece}"
            if lanes[c.row] and not checks:
                self.text.line(
                    f"{self.axis_names[c.row].index} = {self._first(c.row)}{where[c.row]} + {rows} * {piece}"
                )
        if not checks:  # in this order: another has cost registers
            checks = [*conditions, *(x for a in t.axes for x in lanes[a]), *outside]
        self.text.line(
            f"copy{c.width * t.dtype.bytes}_{t.dtype}({staged.buffer.name}, {place}, "
            f"{self.tensors[param.name]}, {offset}, {' and '.join(checks) or 'True'})"
        )
        self.text.depth = depth

    def counts_rows(self) -> bool:
        """Has a thread registers for how many rows of a tile are left?"""
        return True

    def _row_end(self, axis: str) -> str:
        """Where the rows of a tile end that may not all exist, if that alone says which do; "" otherwise."""
        a, names = self.live[axis], self.axis_names[axis]
        if axis in self._whole() or axis in self.full or starts_late(a):
            return ""
        if a.hi is not None:
            return names.hi
        return self.emit(a.extent, NOWHERE).operand if self.has_tail(a, self.tiles[axis]) else ""

    def _rows_left(self, axis: str, end: str, others: list[str], piece: str, rows: int) -> str:
        """The condition under which a thread's piece of a tile exists: one comparison with a number of 32 bits, how many
        rows there are from the first piece's on, or none where the pieces lack something that they have in common."""
        index = self.axis_names[axis].index
        left = self.assign("rows_left", Code(f"i32(min({end} - {index}, {self.tiles[axis]}))", DType.I32))
        if others:
            left = self.assign("rows_there", Code(f"{left} if {' and '.join(others)} else i32(0)", DType.I32))
        return f"i32({rows} * {piece}) < {left}"

    def _first(self, axis: str) -> str:
        return "" if axis in self._whole() else f"{self.axis_names[axis].first} + "

    def _first_piece(self, c: Copy, where: Mapping[str, str], along: int, staged: Staged) -> None:
        """The row and column of a thread's first piece.

        Where a tile is turned round, a warp takes 8 columns of 4 rows: whole 32-byte sectors of memory, and 32 different
        banks, for neighbouring columns lie a row of the buffer apart, whose length is 4 modulo 32 banks.
        """
        turned = c.width == 1 and not self.runs_in_rows(TileType(DType.F32, staged.axes), c.column)
        if turned and along % 8 == 0 and self.deal.threads % (4 * along) == 0:
            self.text.line(f"{where[c.row]} = (thread >> 3 & 3) + 4 * ((thread >> 5) // {along // 8})")
            self.text.line(f"{where[c.column]} = (thread & 7) + 8 * ((thread >> 5) % {along // 8})")
            return
        self.text.line(f"{where[c.row]} = {self.copier} // {along}")
        self.text.line(f"{where[c.column]} = {self.copier} % {along}" + _times(c.width))

    def settle(self, staged: Staged) -> None:
        """Before a read: wait for what is being copied there."""
        if staged.buffer.name in self.awaited:
            self.text.line("wait_copies0()")
            self.text.line("cuda.syncthreads()")
            self.awaited.clear()
            self.memory.touched = Touched()
        super().settle(staged)

    def prepare(self, e: Expr, layout: Layout) -> None:
        for x in dict.fromkeys(x.name for x in leaves(e) if isinstance(x, Name)):
            staged = self.values[x].staged
            if staged is not None and staged.buffer.name in self.awaited:
                self.settle(staged)
        super().prepare(e, layout)

    # ------------------------------------------------------------ loops over tiles that come ahead

    def statement(self, s: Stmt) -> None:
        """A loop that goes on in the next one waits for it, so that one pipeline serves both."""
        if isinstance(s, For) and id(s) in self.continued:
            self.waiting.append(s)
            return
        super().statement(s)

    def loop(self, s: For) -> None:
        chain, self.waiting = (*self.waiting, s), []
        each = [[] if x.reverse else self._streams(x) for x in chain]
        if not each[-1] or any({c.load for _, c in x} != {c.load for _, c in each[-1]} for x in each):
            for x in chain:
                super().loop(x)
            return
        self.start_carries(chain[0])
        for x in chain[1:]:
            for before, c in zip(chain[0].carries, x.carries, strict=True):
                self.bind(c.name, self.values[before.name])
        with self.sums_in_parts(chain):
            self._pipelined(chain, each)

    def _pipelined(self, chain: tuple[For, ...], each: list[list[tuple[Let, Copy]]]) -> None:
        """One loop over the tiles of all loops of a chain, copies ahead."""
        last, size = chain[-1], chain[-1].axis.tile or 1
        whole = next((x for x in chain if is_full(x)), None) if len(chain) > 1 else None
        self.shared_scalars = {}
        streams = [(let, replace(c, load=self._with_scalars(c.load))) for let, c in each[-1]]
        self.shared_scalars = None
        lets = [let for let, _ in streams]
        self.stages = self._depth(lets, last)
        rings = {let.name: self._ring(let) for let in lets}
        test = self._whole_range(whole) if whole is not None else ""
        axis = replace(last.axis, lo=chain[0].axis.lo)
        first, end = self.bounds(axis)
        start = (
            self.assign(f"{axis.name}_start", Code(f"{first} // {size} * {size}", DType.I64))
            if first != "0"
            else "0"
        )
        stop = self.assign(f"{axis.name}_stop", Code(end, DType.I64))
        if starts_late(axis):
            self.text.line(f"{stop} = {stop} if {first} < {stop} else {start}")
        self.live[axis.name] = axis
        self.full |= {axis.name} if len(chain) == 1 and is_full(last) else set()
        held = self.steps_of(Pipeline(chain, each, streams, rings, start, stop, test))
        self.text.line("wait_copies0()")
        self.awaited |= held
        del self.live[axis.name]
        self.full -= {axis.name}
        for let, _ in (y for x in each for y in x):
            self.values.pop(let.name, None)
            self.streamed.discard(let.name)
        for let in lets:
            self.memory.free(rings[let.name].buffer)

    def steps_of(self, p: Pipeline) -> set[str]:
        """The steps of a pipeline, first copies included; gives the buffers of other copies that were under way."""
        last, size = p.last, p.last.axis.tile or 1
        names = self.axis_names[last.axis.name]
        for stage in range(self.stages - 1):
            self.text.line(f"{names.first} = {p.start} + {stage * size}")
            self._ask(p, names.first, str(stage))
        slot, ahead = self.names.fresh("slot"), self.names.fresh("slot_ahead")
        self.text.line(f"{slot} = 0")
        self.text.line(f"{ahead} = {self.stages - 1}")
        visited = self.names.fresh(f"{last.axis.name}_now")
        self.text.line(f"for {visited} in range({p.start}, {p.stop}, {size}):")
        held = set(self.awaited)
        with self.text.indented(), self.back_edge():
            self.arrived(self.stages - 2)
            late = (
                self.asks_late
                and self.stages > LEAST_STAGES
                and len(p.chain) == 1
                and only_adds_products(last)
            )
            further = f"{visited} + {(self.stages - 1) * size}"
            if not late:
                self.text.line(f"{names.first} = {further}")
                with self.places_found_anew():
                    self._ask(p, names.first, ahead)
            self.text.line(f"{names.first} = {visited}")
            given = {c.load: let.name for let, c in p.each[-1]}
            for let, c in (y for x in p.each for y in x):
                self.bind(let.name, Value(let.type, staged=self.in_slot(p.rings[given[c.load]], slot)))
                self.streamed.add(let.name)
            whole = next((x for x in p.chain if is_full(x)), None) if len(p.chain) > 1 else None
            self._bodies(whole, last, p.test, visited)
            if late:  # into the slot that the step before has read, which the barrier has seen to
                self.text.line(f"{names.first} = {further}")
                self.ask_anyway(p, names.first, ahead)
            for variable in (slot, ahead):
                self.text.line(f"{variable} = {self.next_slot(variable)}")
        return held

    def arrived(self, pending: int) -> None:
        """Wait until all but the last so many steps' copies have landed, those of all threads."""
        self.text.line(f"wait_copies{pending}()")
        self.text.line("cuda.syncthreads()")
        self.memory.touched = Touched()
        self.awaited.clear()

    def in_slot(self, ring: Staged, slot: str) -> Staged:
        each = ring.buffer.size // self.stages
        return replace(ring, offset=f" + {int(slot) * each}" if slot.isdigit() else f" + {slot} * {each}")

    def next_slot(self, slot: str) -> str:
        return f"{slot} + 1 if {slot} < {self.stages - 1} else 0"

    @contextmanager
    def places_found_anew(self) -> Iterator[None]:
        """Where registers are short in a loop over full and partial tiles, a step finds anew which pieces the thread copies:
        kept through the loop, these places are spilled."""
        if self.spills_places():
            self.copier = self.assign("here", Code("i64(thread_here())", DType.I64))
        yield
        self.copier = "thread"

    def spills_places(self) -> bool:
        return False

    def _whole_range(self, s: For) -> str:
        """The condition under which a tile of a chain belongs to its loop over full tiles; `{}` is the tile."""
        first, end = self.bounds(s.axis)
        low = "" if first == "0" else f"{self.assign(f'{s.axis.name}_full_from', Code(first, DType.I64))} <= "
        return f"{low}{{}} < {self.assign(f'{s.axis.name}_full_to', Code(end, DType.I64))}"

    def _bodies(self, whole: For | None, last: For, test: str, visited: str) -> None:
        """The body; of a chain the one that suits the tile, which all threads of a block agree on."""
        if whole is None:
            self.loop_body(last)
            return
        touched, axis = self.memory.touched, last.axis.name
        self.text.line(f"if {test.format(visited)}:")
        with self.text.indented():
            self.full |= {axis}
            self.loop_body(whole)
            self.full -= {axis}
        one, self.memory.touched = self.memory.touched, touched
        self.text.line("else:")
        with self.text.indented():
            self.loop_body(last)
        self.memory.touched = self.memory.touched.joined(one)

    def _streams(self, s: For) -> list[tuple[Let, Copy]]:
        """Tiles of the loop that come from memory and that products alone read."""
        self.live[s.axis.name] = s.axis
        inside = {x.name for x in statements(s.body) if isinstance(x, Let)}
        found = []
        for let in s.body:
            if not isinstance(let, Let) or not isinstance(let.value, Load) or let.name not in self.crossing:
                continue
            free = not any(isinstance(x, Name) and x.name in inside for x in subexpressions(let.value))
            copy = self.copying_of(let.value, let.type)
            if free and s.axis.name in let.type.axes and copy is not None:
                found.append((let, copy))
        del self.live[s.axis.name]
        return found

    def _depth(self, lets: list[Let], s: For) -> int:
        """Steps that a ring holds: three where two blocks with such rings fit a multiprocessor, or where states leave
        registers for one block alone."""
        states = sum(self.deal.layout(c.type.axes).elements for c in s.carries)
        registers = self.deal.threads * (states + BESIDE_STATES)
        blocks = BLOCKS_PER_SM if BLOCKS_PER_SM * registers <= self.target.registers_per_sm else 1
        one = sum(arena_bytes(x.type.dtype) * self._elements(x.type) for x in lets)
        held = sum(arena_bytes(b.dtype) * b.size for b in self.memory.live)
        room = self.target.shared_per_sm_bytes // blocks - RESERVED_BYTES
        return MOST_STAGES if held + MOST_STAGES * one <= room else LEAST_STAGES

    def _elements(self, t: TileType) -> int:
        """What one tile takes in shared memory."""
        row, column = (self.tiles[a] for a in t.axes)
        return row * column if self.is_chunked(t) else row * (column + chunk(t.dtype))

    def is_chunked(self, t: TileType) -> bool:
        """Does a tile lie in lines of 128 bytes, as `Staged` says?"""
        return False

    def _ring(self, let: Let) -> Staged:
        one = self.place(f"{let.name}_ring", let.type)
        self.memory.free(one.buffer)
        self.memory.all_buffers.remove(one.buffer)
        align = LINE if one.chunked else ALIGN
        buffer = self.memory.allocate(one.buffer.name, one.buffer.dtype, one.buffer.size * self.stages, align)
        self.note(self.memory.write(buffer))
        return replace(one, buffer=buffer)

    def _ask(self, p: Pipeline, first: str, slot: str) -> None:
        """Start the copies of one step, if there is one."""
        self.text.line(f"if {first} < {p.stop}:")
        with self.text.indented():
            self._copy_all(p, slot)
        self.text.line("commit_copies()")

    def ask_anyway(self, p: Pipeline, first: str, slot: str) -> None:
        """The same without a branch, of zeros where there is no such step: products that run go on beside it."""
        checked = self._row_end(p.last.axis.name)  # its lanes tell whether there is such a step
        more = () if checked else (self.assign("more", Code(f"{first} < {p.stop}", DType.BOOL)),)
        self._copy_all(p, slot, more)
        self.text.line("commit_copies()")

    def _copy_all(self, p: Pipeline, slot: str, conditions: tuple[str, ...] = ()) -> None:
        for let, copy in p.streams:
            self.copy(copy, let.type, self.in_slot(p.rings[let.name], slot), conditions)


def only_adds_products(s: For) -> bool:
    """Does a loop do nothing but add products of tiles from memory to what it carries? Then its copies are started after its
    products: indices are computed while these run, and the step between has time for the copies to land."""
    loads = {x.name for x in s.body if isinstance(x, Let) and isinstance(x.value, Load)}
    adds = [
        y
        for c, y in zip(s.carries, s.yields, strict=True)
        if isinstance(y, Apply) and y.op == "add" and Name(c.name) in y.args
        and any(isinstance(x, Dot) and {x.a, x.b} <= {Name(n) for n in loads} for x in y.args)
    ]  # fmt: skip
    return len(loads) == len(s.body) and len(adds) == len(s.carries)


def summed_from_memory(program: TileProgram) -> frozenset[str]:
    """Axes over which products of two tiles from memory go."""
    inside = list(statements(program.body))
    loads = {Name(x.name) for x in inside if isinstance(x, Let) and isinstance(x.value, Load)}
    products = (x for s in inside for e in expressions(s) for x in subexpressions(e) if isinstance(x, Dot))
    return frozenset(a for d in products if {d.a, d.b} <= loads for a in d.over)


def is_full(s: For) -> bool:
    """Does a loop visit full tiles only?"""
    return any(a.name == "full" for a in s.attributes)


def continued(body: tuple[Stmt, ...]) -> set[int]:
    """The ids of loops that the next statement goes on with: over full tiles between partial ones, or before them."""
    found: set[int] = set()
    for inner in (body, *(s.body for s in statements(body) if isinstance(s, Grid | For))):
        for i in range(len(inner)):
            for length in (3, 2):
                chain = [s for s in inner[i : i + length] if isinstance(s, For)]
                if len(chain) == length and _is_chain(chain) and not any(id(s) in found for s in chain):
                    found |= {id(s) for s in chain[:-1]}
    return found


def _is_chain(loops: list[For]) -> bool:
    """Do they visit one axis in order, carrying the same states, full tiles second to last?"""
    full = [is_full(s) for s in loops]
    linked = all(
        tuple(c.init for c in b.carries) == tuple(Name(c.name) for c in a.carries) for a, b in pairwise(loops)
    )
    plain = len({s.axis.name for s in loops}) == 1 and not any(s.reverse for s in loops)
    return linked and plain and full == [False] * (len(loops) - 2) + [True, False]


def _mentions(e: Expr, axis: str) -> bool:
    return any(isinstance(x, AxisIndex) and x.axis == axis for x in subexpressions(e))


def _times(n: int) -> str:
    return "" if n == 1 else f" * {n}"
