"""Tile IR: how a kernel runs. Grids, loops, tiles in registers or shared memory, loads, stores, dots, roles, pipelines.

A `TileModule` is what one compiled kernel launches: `TileProgram`s in order, and the scratch tensors between them. A
program is a list of statements over *tile values*: named, single-assignment, each a tile over named axes (an axis without
a tile size is one index: it does not appear in tile types). Expressions are trees over such names, so a name is exactly a
value that is used more than once, or that a back end may want to place (loads, dots, reductions).

Meaning that every back end shares:
- Tiles align by axis name. A lane beyond an axis's extent does not exist: reductions and dots skip it, stores drop it.
- `for` visits the tiles of [lo, hi) in order; carried names hold the current state in the body and the final state after.
- A subscript that depends on a tensor's values is clamped to the extent; a store whose subscript is then outside is dropped.
  Any other subscript lies inside the tensor on every lane that an enclosing `where`, `and`, `or` of the expression selects.
- argmax and argmin over a tile axis give the global index, -1 for no lane.
- Grids do not nest and stand in no loop. No iteration reads what another of the same grid writes. A store that adds needs an
  element that was written before: programs initialise what they accumulate into.
- `domain` of a loop: predicates such that a tile where one of them is false in all lanes contributes nothing (it may be
  skipped) and where all hold in all lanes the body's selects on them are no-ops (they may be folded).
Whatever only says where or when (layouts, rings, roles, tier) never changes a value beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Literal

from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType

# ---------------------------------------------------------------- types and layouts


@dataclass(frozen=True)
class TileType:
    """`f32[mt, nt]`; a scalar has no axes. The order of axes is the order in which a back end stores the tile."""

    dtype: DType
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attribute:
    """`@fragment(row = mt, col = nt, split = mt)`: placement chosen by a pass; `layouts.py` gives each its meaning."""

    name: str
    fields: tuple[tuple[str, str | int | bool], ...] = ()

    def __getitem__(self, key: str) -> str | int | bool:
        return dict(self.fields)[key]


# ---------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Const:
    value: int | float | bool
    dtype: DType


@dataclass(frozen=True)
class Name:
    """A tile value: a `Let`, a carried name, or (after its loop) a final state."""

    name: str


@dataclass(frozen=True)
class ScalarRef:
    name: str


@dataclass(frozen=True)
class ExtentRef:
    name: str


@dataclass(frozen=True)
class AxisIndex:
    """The global index along a grid, loop or whole axis: i64, a tile over that axis, or a scalar for a unit axis."""

    axis: str


@dataclass(frozen=True)
class Load:
    """`load q[b, h, mt, d]`: one subscript for each dimension, any integer expressions; axes are those of the subscripts."""

    tensor: str
    subscripts: tuple[Expr, ...]


@dataclass(frozen=True)
class Apply:
    """An elementwise operation of `tensor_ir.OPERATIONS`, or `fma` (one rounding: a·b + c)."""

    op: str
    args: tuple[Expr, ...]


@dataclass(frozen=True)
class Cast:
    dtype: DType
    arg: Expr


@dataclass(frozen=True)
class Dot:
    """`dot[d](a, b)`: sum over the axes `over` of a·b, accumulated in the accumulator type of the operands."""

    over: tuple[str, ...]
    a: Expr
    b: Expr


@dataclass(frozen=True)
class Reduce:
    """`max[nt](s)`: reduction of a tile over some of its axes; `fn` of `tensor_ir.REDUCTIONS`."""

    fn: str
    over: tuple[str, ...]
    arg: Expr


@dataclass(frozen=True)
class Fill:
    """`fill(-inf)`: a tile of one value; its axes are those of the declared type."""

    value: Expr


Expr = Const | Name | ScalarRef | ExtentRef | AxisIndex | Load | Apply | Cast | Dot | Reduce | Fill

# ---------------------------------------------------------------- statements


@dataclass(frozen=True)
class Let:
    """`s: f32[mt, nt] = scale * dot[d](qt, kt) @fragment(…)`"""

    name: str
    type: TileType
    value: Expr
    attributes: tuple[Attribute, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Store:
    """`store o[b, h, mt, e] = value`; mode "add" accumulates (duplicate targets sum)."""

    tensor: str
    subscripts: tuple[Expr, ...]
    value: Expr
    mode: Literal["set", "add"] = "set"
    attributes: tuple[Attribute, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class LoopAxis:
    """`mt in M by 128 from LO to HI`: tile axis `name` over `extent`; `tile` None makes it a unit axis (one index a step).

    `lo` and `hi` bound the visited indices; tiles start at multiples of `tile`, lanes outside [lo, hi) do not exist, nor do
    those outside [0, extent). In `extent`, `lo` and `hi` an outer tile axis stands for the first index of its current tile
    (`to mt + 128`), unless a reduction in the bound takes it (`to max[mt](mt) + 1`).
    """

    name: str
    extent: Expr
    tile: int | None = None
    lo: Expr | None = None
    hi: Expr | None = None


@dataclass(frozen=True)
class Carry:
    """`m: f32[mt] = fill(-inf)`"""

    name: str
    type: TileType
    init: Expr
    attributes: tuple[Attribute, ...] = ()


@dataclass(frozen=True)
class Grid:
    """`for b in B, mt in M by 128 parallel { … }`: independent iterations, each writing its own elements."""

    axes: tuple[LoopAxis, ...]
    body: tuple[Stmt, ...]
    attributes: tuple[Attribute, ...] = ()


@dataclass(frozen=True)
class For:
    """`for nt in N by 64 where nt <= mt carry (…) { … yield (…) }`; serial, in order (`reverse`: last tile first)."""

    axis: LoopAxis
    carries: tuple[Carry, ...]
    body: tuple[Stmt, ...]
    yields: tuple[Expr, ...]
    domain: tuple[Expr, ...] = ()
    reverse: bool = False
    attributes: tuple[Attribute, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)


Stmt = Let | Store | Grid | For

# ---------------------------------------------------------------- programs


@dataclass(frozen=True)
class Param:
    """A tensor of a program. Shape entries are expressions over extents and scalars."""

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    mode: Literal["in", "out", "inout"] = "in"


@dataclass(frozen=True)
class ScalarParam:
    name: str
    dtype: DType


@dataclass(frozen=True)
class WholeAxis:
    """`whole d = D`: an axis taken in one piece by every tile that has it; its extent is static."""

    name: str
    extent: Expr


@dataclass(frozen=True)
class Ring:
    """`ring kv = kt, vt by 2`: staged copies of these loads, `stages` deep, one full/empty barrier pair a stage."""

    name: str
    loads: tuple[str, ...]
    stages: int


@dataclass(frozen=True)
class Role:
    """`role compute = 2 warpgroups, 232 registers`: a group of threads that runs part of the program."""

    name: str
    warpgroups: int
    registers: int


@dataclass(frozen=True)
class TileProgram:
    """One launch. `statics` gives the extents known at compile time; other extents are run-time values."""

    name: str
    params: tuple[Param, ...]
    scalars: tuple[ScalarParam, ...]
    extents: tuple[str, ...]
    statics: tuple[tuple[str, int], ...]
    whole: tuple[WholeAxis, ...]
    body: tuple[Stmt, ...]
    tier: str = "loops"
    rings: tuple[Ring, ...] = ()
    roles: tuple[Role, ...] = ()
    attributes: tuple[Attribute, ...] = ()

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)


@dataclass(frozen=True)
class TileModule:
    """The launches of one kernel, in order. `scratch` tensors live from their writer to their last reader."""

    name: str
    programs: tuple[TileProgram, ...]
    scratch: tuple[Param, ...] = ()


# ---------------------------------------------------------------- traversal


def apply(op: str, *args: Expr) -> Apply:
    return Apply(op, args)


def i64(value: int) -> Const:
    return Const(value, DType.I64)


def operands(e: Expr) -> tuple[Expr, ...]:
    """The direct subexpressions."""
    match e:
        case Load(subscripts=s):
            return s
        case Apply(args=a):
            return a
        case Cast(arg=a) | Reduce(arg=a):
            return (a,)
        case Dot(a=a, b=b):
            return (a, b)
        case Fill(value=v):
            return (v,)
    return ()


def rebuild(e: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same node over other operands."""
    match e:
        case Load():
            return replace(e, subscripts=args)
        case Apply():
            return replace(e, args=args)
        case Cast() | Reduce():
            return replace(e, arg=args[0])
        case Dot():
            return replace(e, a=args[0], b=args[1])
        case Fill():
            return replace(e, value=args[0])
    return e


def subexpressions(e: Expr) -> Iterator[Expr]:
    """`e` and everything below it, in preorder."""
    stack = [e]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(operands(top)))


def statements(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """All statements, those inside grids and loops included, in text order."""
    for s in body:
        yield s
        if isinstance(s, Grid | For):
            yield from statements(s.body)


def expressions(s: Stmt) -> tuple[Expr, ...]:
    """The expressions a statement evaluates itself (not those of statements nested in it)."""
    match s:
        case Let(value=v):
            return (v,)
        case Store(subscripts=ix, value=v):
            return (*ix, v)
        case Grid(axes=axes):
            return tuple(x for a in axes for x in _bounds(a))
        case For(axis=axis, carries=carries, yields=yields, domain=domain):
            return (*_bounds(axis), *(c.init for c in carries), *domain, *yields)


def _bounds(a: LoopAxis) -> tuple[Expr, ...]:
    return tuple(x for x in (a.extent, a.lo, a.hi) if x is not None)


def has_product(p: TileProgram) -> bool:
    """Does any statement of the program contract two tiles?"""
    return any(
        isinstance(x, Dot) for s in statements(p.body) for e in expressions(s) for x in subexpressions(e)
    )


def is_visit(a: LoopAxis) -> bool:
    """Is it the axis of a loop that runs once or never, as `hi` says?"""
    return a.tile is None and a.extent == Const(1, DType.I64) and a.hi is not None
