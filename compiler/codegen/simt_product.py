"""Products of the simt tier on register blocks (f32 of f32 operands): what a GPU's f32 units can do of a matrix product.

A thread holds 8 x 8 results (4 x 8 of small tiles) in runs of 4, `deal.BlockDeal`. Both operands lie in shared memory with
the contracted axis slowest, so that one step of it takes two reads of 16 bytes of each for 64 fused multiply-adds; tiles
come ahead through `streams`, turned round on the way where they lie otherwise in memory.
"""

from __future__ import annotations

import re

from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import Dot, Load, TileProgram, TileType, subexpressions
from .deal import BLOCK_RUN, Deal, Demand, Layout, Spread, block_deal
from .simt import Kernel
from .simt_source import Point, Registers, Staged, joined
from .streams import Streams, assumptions, chunk, facts_of, with_named_operands
from .tile_types import Facts, contexts, is_product, tile_axes

NOTHING = re.compile(r"0|0 \* \d+|\d+ \* 0")
"""Terms of a place that are 0."""


def variants(program: TileProgram, target: CudaTarget) -> list[Kernel] | None:
    """The kernels of a program, the preferred first; None where it has no product for register blocks."""
    if not suits(program):
        return None
    program = with_named_operands(program, rounds=False)
    return [BlockKernel(program, target, wide, suffix) for wide, suffix in assumptions(program, BLOCK_RUN)]


def suits(program: TileProgram) -> bool:
    """Has it products, all f32 of two axes and over one, and no reduction (whose rows would be spread over warps)?"""
    statics = dict(program.statics)
    axes = tile_axes(program, statics)
    if any(a.tile is None for a in axes.values()):
        return False
    tiles = {a: x.tile or 1 for a, x in axes.items()}
    facts = facts_of(program, tiles)
    every = list(contexts(program, facts))
    if any(c.kind == "reduce" for c in every):
        return False
    for c in every:
        products = (x for x in subexpressions(c.expr) if isinstance(x, Dot)) if c.expr is not None else ()
        if any(not _takes(d, facts, c.types) for d in products):
            return False
    demands = [Demand(c.kind, c.axes) for c in every if c.kind != "operand"]
    return block_deal(demands, tiles) is not None


def _takes(d: Dot, facts: Facts, types: dict[str, TileType]) -> bool:
    a, b = facts.type_of(d.a, types), facts.type_of(d.b, types)
    plain = (
        len(a.axes) == len(b.axes) == 2 and len(d.over) == 1 and d.over[0] in a.axes and d.over[0] in b.axes
    )
    return is_product(d, a, b) and plain and a.dtype is b.dtype is DType.F32


class BlockKernel(Streams):
    """Emits one program."""

    copied = (DType.F32,)
    aligned = True

    @property
    def resident(self) -> int:  # type: ignore[override]
        """Two blocks a multiprocessor; before sm_90 the assembler would spill registers for that."""
        return 2 if self.target.capability >= (9, 0) else 1

    def dealt(self, demands: list[Demand]) -> Deal:
        found = block_deal(demands, self.tiles)
        assert found is not None
        self.contracted = {
            d.over[0]
            for c in self.contexts
            if c.expr is not None
            for d in subexpressions(c.expr)
            if isinstance(d, Dot)
        }
        return found

    def load_ahead(self, e: Load, layout: Layout) -> None:
        """Vectors only: a second tile of the result's size would take as many registers as the result."""
        if len(layout.restrict(self.facts.type_of(e, self.types).axes).axes) < 2:
            super().load_ahead(e, layout)

    def _along(self, axes: tuple[str, ...]) -> str | None:
        """The axis along which a tile's neighbours lie side by side: the one that products do not contract."""
        kept = [a for a in axes if a not in self.contracted]
        return kept[0] if len(axes) == 2 and len(kept) == 1 else None

    def runs_in_rows(self, t: TileType, column: str) -> bool:
        return self._along(t.axes) == column

    def place(self, name: str, t: TileType) -> Staged:
        """An operand lies with its contracted axis slowest; rows are 16 bytes longer than they are, for other banks."""
        along = self._along(t.axes)
        if along is None or t.dtype is not DType.F32:
            return super().place(name, t)
        pitch = self._pitch(along)
        slow = next(a for a in t.axes if a != along)
        buffer = self.memory.allocate(self.names.fresh(name), t.dtype, pitch * self.tiles[slow])
        return Staged(buffer, t.axes, tuple(1 if a == along else pitch for a in t.axes))

    def _pitch(self, along: str) -> int:
        four = chunk(DType.F32)
        return -(-self.tiles[along] // four) * four + four

    def _elements(self, t: TileType) -> int:
        along = self._along(t.axes)
        if along is None:
            return super()._elements(t)
        return self._pitch(along) * next(self.tiles[a] for a in t.axes if a != along)

    def product(self, d: Dot, a: Staged, b: Staged, target: Registers, dtype: DType) -> None:
        """One instruction of the source for all steps of a tile: NVVM would keep a loop over them, and each step would wait
        for its own reads; written out step by step they took half a minute to compile."""
        self.settle(a)
        self.settle(b)
        rows, columns = (a, b) if target.layout.axes[0] in a.axes else (b, a)
        sides = [self._side(x, target.layout, d.over[0]) for x in (rows, columns)]
        if any(x is None for x in sides):
            super().product(d, a, b, target, dtype)
            return
        counts = ", ".join(str(s.count) for s in target.layout.spreads)
        self.text.line(f"add_products_f32({target.array}, {counts},")
        self.text.line(f"    {sides[0]},")
        self.text.line(f"    {sides[1]}, {self.tiles[d.over[0]]})")

    def _side(self, x: Staged, layout: Layout, over: str) -> str | None:
        """An operand as `add_products_f32` takes it: where a thread's first run lies at step 0, how far the next run lies,
        and the next step. None where it does not lie in runs of 16 bytes."""
        own = layout.restrict(x.axes)
        if len(own.axes) != 1:
            return None
        (axis,) = own.axes
        pitches, spread = dict(zip(x.axes, x.pitches, strict=True)), own.spread(axis)
        if pitches[axis] != 1 or spread.run != BLOCK_RUN:
            return None
        whole = joined(own, Layout((over,), (Spread(self.tiles[over]),)))
        first = self.spot(x, Point(whole, {axis: "0", over: "0"}, axis))
        terms = first[len(x.buffer.name) + 1 : -1].split(" + ")
        place = " + ".join(t for t in terms if not NOTHING.fullmatch(t)) or "0"
        return f"{x.buffer.name}, {place}, {spread.run * spread.step}, {pitches[over]}"
