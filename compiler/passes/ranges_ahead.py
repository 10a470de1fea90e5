"""ranges-ahead: what a tensor holds over each tile of an axis, found by a small launch before the kernel (tier `wgmma`).

Lowering skips the tiles that a predicate on a tensor's values excludes, by the least and the greatest value of each tile
(`lower.visited`). In tier `wgmma` those who compute would have to exchange these values step by step, and the one thread
that loads would read a whole tile for each. So another launch finds them for all tiles, and the kernel reads two numbers:

    min_doc: i32 = min[n](load doc[n])          becomes     min_doc: i32 = load doc_min[min[n](n) // 64]

    for tile in (N + 63) // 64 parallel {                   the launch before
        for n in N by 64 from tile * 64 to tile * 64 + 64 carry (low: i32 = …) { yield min(low, min[n](load doc[n])) }
        store doc_min[tile] = low
    }

The range of all lanes of a tile contains that of the lanes which exist between a loop's bounds; so where an axis is bounded,
only ranges that decide about skipping a tile are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field, replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..cascade import IDENTITY, typed
from ..remarks import Remarks
from ..tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Expr,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileProgram,
    TileType,
    apply,
    expressions,
    i64,
    is_visit,
    operands,
    rebuild,
    statements,
    subexpressions,
)
from .pruned import pruned
from .steps_ahead import steps_ahead, tile_count
from .sure_steps import with_sure_steps

OVERLAPPED = (Attribute("primary"), Attribute("secondary"))
"""Of launches in a row that each start while the one before ends."""
I64 = TileType(DType.I64)


@dataclass(frozen=True)
class Range:
    """The least or greatest (`fn`) value of an expression over a tile of `axis`, for each index along the `units` axes."""

    fn: str
    value: Expr
    dtype: DType
    axis: LoopAxis
    units: tuple[LoopAxis, ...]

    @property
    def over(self) -> tuple[LoopAxis, tuple[LoopAxis, ...]]:
        """Ranges over the same tiles are found together."""
        return self.axis, self.units


@dataclass(frozen=True)
class Ahead:
    """A program that reads ranges, the launches that find them, and the tensors between."""

    program: TileProgram
    launches: tuple[TileProgram, ...] = ()
    between: tuple[Param, ...] = ()


def ranges_ahead(program: TileProgram, remarks: Remarks) -> Ahead:
    """The program with ranges of tensors over tiles read from memory; the program alone where it has none."""
    found = _Scopes(program).ranges()
    if not found:
        return Ahead(program)
    tensors = _tensors(program, found)
    between = tuple(tensors.values())
    reads = {name: _read(r, tensors[r].name) for name, r in found.items()}
    body = tuple(_reading(s, reads) for s in program.body)
    readers = tuple(replace(p, mode="in") for p in between)
    made = pruned(program, body, program.name, readers)
    own: dict[str, Expr] = {name: Reduce(r.fn, (r.axis.name,), r.value) for name, r in found.items()}
    ends = {name: (r.fn, r.value) for name, r in found.items() if r.dtype.is_integer}  # NaN lies in no range
    steps = steps_ahead(made, own, between)
    left = [r for r in found.values() if steps is None or tensors[r].name not in steps.found]
    launches = tuple(_launch(program, number, group, tensors) for number, group in enumerate(_together(left)))
    if steps is not None:
        made, launches, between = steps.program, (*launches, *steps.launches), (*between, *steps.between)
    made = with_sure_steps(made, ends)
    launches = tuple(replace(p, attributes=(*p.attributes, *OVERLAPPED)) for p in launches)
    names = dict.fromkeys(
        x.tensor for r in found.values() for x in subexpressions(r.value) if isinstance(x, Load)
    )
    remarks.add(
        "applied", "ranges-ahead", "ranges-ahead",
        f"{program.name}: the ranges of {', '.join(names)} over tiles, by which tiles are skipped, are found by "
        f"{len(launches)} small {'launch' if len(launches) == 1 else 'launches'} before",
    )  # fmt: skip
    if steps is not None:
        remarks.add("applied", "ranges-ahead", "steps-ahead", f"{program.name}: {steps.told()}")
    return Ahead(made, launches, between)


# ---------------------------------------------------------------- what can be found before


@dataclass
class _Scopes:
    """A program's scalar ranges with what they stand for; `values` are those of names, `axes` the loops around."""

    program: TileProgram
    values: dict[str, Expr] = field(default_factory=dict)

    def ranges(self) -> dict[str, Range]:
        self.values = {s.name: s.value for s in statements(self.program.body) if isinstance(s, Let)}
        return dict(self.of(self.program.body, {}))

    def of(self, body: tuple[Stmt, ...], axes: dict[str, LoopAxis]) -> Iterator[tuple[str, Range]]:
        for s in body:
            match s:
                case Let(value=Reduce(over=(axis,)) as e) if not s.type.axes and axis in axes:
                    r = self.range_of(s, e, axes)
                    if r is not None:
                        yield s.name, r
                case Grid():
                    yield from self.of(s.body, axes | {a.name: a for a in s.axes})
                case For():
                    yield from self.of(s.body, axes | {s.axis.name: s.axis})

    def range_of(self, s: Let, e: Reduce, axes: dict[str, LoopAxis]) -> Range | None:
        (name,) = e.over
        value, axis = self.expanded(e.arg), axes[name]
        if (
            e.fn not in ("min", "max")
            or value is None
            or not any(isinstance(x, Load) for x in subexpressions(value))
        ):
            return None
        named = {x.axis for x in subexpressions(value) if isinstance(x, AxisIndex)}
        units = tuple(axes[a] for a in axes if a in named and a != name)
        bounded = axis.lo is not None or axis.hi is not None
        if axis.tile is None or not named <= set(axes) or any(u.tile or u.lo or u.hi for u in units):
            return None
        if bounded and not self.only_skips(s.name):
            return None
        return Range(e.fn, value, s.type.dtype, replace(axis, lo=None, hi=None), units)

    def expanded(self, e: Expr) -> Expr | None:
        """The expression in terms of tensors and indices; None where it needs more than elementwise operations."""
        if isinstance(e, Name):
            return self.expanded(self.values[e.name]) if e.name in self.values else None
        if not isinstance(e, Load | Apply | Cast | Const | AxisIndex | ExtentRef | ScalarRef):
            return None
        parts = [self.expanded(x) for x in operands(e)]
        return None if any(x is None for x in parts) else rebuild(e, tuple(x for x in parts if x is not None))

    def only_skips(self, name: str) -> bool:
        """Does a scalar only say how often (once or never) a loop runs?"""
        for s in statements(self.program.body):
            reading = [e for e in expressions(s) if Name(name) in subexpressions(e)]
            match s:
                case Let() if reading:
                    if s.type.axes or not self.only_skips(s.name):
                        return False
                case For(axis=a) if is_visit(a):
                    if any(e is not a.hi for e in reading):
                        return False
                case _ if reading:
                    return False
        return True


# ---------------------------------------------------------------- the launches before


def _together(ranges: Iterable[Range]) -> list[list[Range]]:
    groups: dict[tuple[LoopAxis, tuple[LoopAxis, ...]], list[Range]] = {}
    for r in dict.fromkeys(ranges):
        groups.setdefault(r.over, []).append(r)
    return list(groups.values())


def _tensors(program: TileProgram, found: dict[str, Range]) -> dict[Range, Param]:
    """A tensor for each distinct range, one element a tile."""
    taken = {p.name for p in program.params} | {s.name for s in program.scalars} | set(program.extents)
    made: dict[Range, Param] = {}
    for name, r in found.items():
        if r in made:
            continue
        wanted, n = f"{program.name}_{name}s", 1
        while wanted in taken:
            n += 1
            wanted = f"{program.name}_{name}s_{n}"
        taken.add(wanted)
        made[r] = Param(wanted, r.dtype, (*(u.extent for u in r.units), tile_count(r.axis)), "out")
    return made


def _launch(
    program: TileProgram, number: int, group: list[Range], tensors: dict[Range, Param]
) -> TileProgram:
    """One task for each tile: it goes once over the tile and stores its ranges."""
    axis, units = group[0].over
    size = axis.tile or 1
    part = LoopAxis(f"{axis.name}_tile", tile_count(axis))
    first = apply("mul", AxisIndex(part.name), i64(size))
    loop = replace(axis, lo=first, hi=apply("add", first, i64(size)))
    carries = tuple(
        Carry(f"{r.fn}_{i}", TileType(r.dtype), Const(typed(IDENTITY[r.fn], r.dtype), r.dtype))
        for i, r in enumerate(group)
    )
    yields = tuple(
        apply(r.fn, Name(c.name), Reduce(r.fn, (axis.name,), r.value))
        for c, r in zip(carries, group, strict=True)
    )
    place = (*(AxisIndex(u.name) for u in units), AxisIndex(part.name))
    stores = tuple(Store(tensors[r].name, place, Name(c.name)) for c, r in zip(carries, group, strict=True))
    body = (Grid((*units, part), (For(loop, carries, (), yields), *stores)),)
    name = f"{program.name}_ranges_{axis.name}" + (f"_{number}" if number else "")
    made = pruned(program, body, name, tuple(tensors.values()))
    return replace(made, tier="loops", attributes=())


def _read(r: Range, tensor: str) -> Expr:
    """The range of the tile that is at hand."""
    first = Reduce("min", (r.axis.name,), AxisIndex(r.axis.name))
    tile = apply("floordiv", first, i64(r.axis.tile or 1))
    return Load(tensor, (*(AxisIndex(u.name) for u in r.units), tile))


def _reading(s: Stmt, reads: dict[str, Expr]) -> Stmt:
    match s:
        case Let() if s.name in reads:
            return replace(s, value=reads[s.name])
        case Grid() | For():
            return replace(s, body=tuple(_reading(x, reads) for x in s.body))
    return s
