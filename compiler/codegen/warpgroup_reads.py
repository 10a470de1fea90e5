"""Tiles that a step of a loop reads element by element, as a bias for each pair, through the copy engine.

A thread that reads its own elements from memory takes many instructions for few bytes of many rows, and waits for them. Here
the loading role brings the tile to shared memory a step ahead, swizzled as operands are, each warpgroup's 64 rows by
themselves. `ldmatrix` hands 8 x 8 matrices to a warp just as sums of `wgmma` lie in it (PTX ISA 9.0, 9.7.14.5.15 and
9.7.15.5.1.1): one instruction for 16 rows of 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..tile_ir import Expr, For, Grid, Let, Load, Name, Stmt, TileProgram, subexpressions
from .mma import Unfit
from .simt_source import Point, Registers, Value, local_array
from .staging import READ, ROW_BYTES, STEP, Ring, box, read_tiles
from .streams import facts_of
from .tile_types import leaves, rewrite, tile_axes
from .warpgroup_products import Products

WARP_BYTES = 16 * ROW_BYTES  # of a chunk of 64 columns: a warp's rows


def with_named_reads(program: TileProgram, row: str) -> tuple[TileProgram, dict[str, str]]:
    """The same program with tiles that steps of loops read element by element named, where the copy engine can bring them;
    and why it cannot, by tensor. `row`: the axis of products' rows."""
    naming = _Naming(program, row)
    return replace(program, body=tuple(naming.block(program.body))), naming.apart


def read_tensors(program: TileProgram) -> set[str]:
    """Tensors of which tiles are named so."""
    return {x.tensor for x in read_tiles(program).values()}


class _Naming:
    def __init__(self, program: TileProgram, row: str) -> None:
        self.program, self.row, self.count = program, row, 0
        self.apart: dict[str, str] = {}
        self.tiles = {a: x.tile or 1 for a, x in tile_axes(program, dict(program.statics)).items()}
        self.facts = facts_of(program, self.tiles)

    def block(self, body: tuple[Stmt, ...], column: str = "") -> Iterator[Stmt]:
        """`column`: the axis of the loop around."""
        made: dict[Expr, Name] = {}
        for s in body:
            match s:
                case Grid():
                    yield replace(s, body=tuple(self.block(s.body)))
                case For():
                    axis = s.axis.name if s.axis.tile is not None else column
                    yield replace(s, body=tuple(self.block(s.body, axis)))
                case Let(value=Load()):
                    yield s  # a product's operand
                case Let() if column:
                    for x in dict.fromkeys(leaves(s.value)):
                        if isinstance(x, Load) and x not in made and self.is_tile(x, column):
                            self.count += 1
                            made[x] = Name(f"{READ}{self.count}")
                            yield Let(made[x].name, self.facts.type_of(x, {}), x)
                    yield replace(s, value=rewrite(s.value, lambda x: made.get(x, x)))
                case _:
                    yield s

    def is_tile(self, e: Load, column: str) -> bool:
        """Is it a tile with a product's rows and columns that the copy engine can bring?"""
        names = any(isinstance(x, Name) for s in e.subscripts for x in subexpressions(s))
        if names or set(self.facts.type_of(e, {}).axes) != {self.row, column}:
            return False
        why = self.why_not(e, column)
        if why:
            self.apart[e.tensor] = why
        return not why

    def why_not(self, e: Load, column: str) -> str:
        """Why the copy engine cannot bring a tile, or `ldmatrix` not read it; "" where both can."""
        try:
            found = box(e, self.program, self.tiles, {})
        except Unfit as reason:
            return str(reason)
        if found.row != self.row:
            return f"the columns of its tile lie along `{found.column}`, the rows of products"
        if self.program.param(e.tensor).mode != "in":
            return "it is written too"
        odd = self.tiles[column] % STEP
        return f"`{column}` by {self.tiles[column]}; matrices are read by {STEP} columns" if odd else ""


class Reads(Products):
    """The computing role's side."""

    def _give_names(self) -> None:
        super()._give_names()
        self.read_words: dict[str, str] = {}  # read but not unpacked, by the tile's name

    def is_read(self, s: Let) -> bool:
        return s.name in self.staging.names and self.staging.ring(self.staging.names[s.name]).parts > 0

    def let(self, s: Let) -> None:
        if self.is_read(s):
            self.types[s.name] = s.type
            return
        super().let(s)

    def fetch_tile(self, s: Let) -> None:
        """A thread's elements of a tile, two in a word, from the next slot of its ring: asked for once a step's products
        run, and needed when the first of these is done."""
        load = self.staging.names[s.name]
        ring = self.staging.ring(load)
        self.take(ring)
        words, block = self.names.fresh(f"{load.tensor}_words"), self.names.fresh("block")
        blocks = self.tiles[self.staging.box(load).column] // STEP
        self.text.line(f"{words} = registers_i32({4 * blocks})")
        self.text.line(f"for {block} in range({blocks}):")
        with self.text.indented():
            self.text.line(f"load_matrices({self._matrix_row(ring, block)}, {words}, 4 * {block})")
        self.read_words[s.name] = words

    def hand_back(self, reads: list[Let]) -> None:
        """What was read is in registers before the copy engine may overwrite it: reads are ordered before its writes by a
        fence alone, an arrival does not wait for them (PTX ISA 9.0, 8.6 on proxies)."""
        if reads:
            self.text.line("publish_shared()")
            self.text.line("meet_warp()")
        for ring in dict.fromkeys(self.staging.ring(self.staging.names[s.name]) for s in reads):
            self.give_back(ring)

    def unpack(self, s: Let) -> None:
        """A tile's elements by themselves."""
        load = self.staging.names[s.name]
        column, layout = self.staging.box(load).column, self.deal.layout(s.type.axes)
        array, block = self.names.fresh(f"{load.tensor}_read"), self.names.fresh("block")
        words, blocks = self.read_words.pop(s.name), self.tiles[column] // STEP
        self.text.line(f"{array} = {local_array(s.type.dtype, layout.elements)}")
        row = next(x for x in layout.axes if x != column)
        self.text.line(f"for {block} in range({blocks}):")
        with self.text.indented():
            for number, (right, half) in enumerate(product((0, 1), (0, 1))):
                for lane, side in enumerate(("lower", "upper")):
                    place = {row: str(half), column: f"(4 * {block} + {2 * right + lane})"}
                    value = f"{side}_{s.type.dtype}({words}[4 * {block} + {number}])"
                    self.text.line(f"{array}[{Point(layout, place).element(layout)}] = {value}")
        self.bind(s.name, Value(s.type, registers=Registers(array, layout)))

    def _matrix_row(self, ring: Ring, block: str) -> str:
        """Where a lane's row of four matrices lies: 16 rows of 16 columns, the lower rows before the right columns."""
        (tile,) = ring.boxes
        text = f"shared + {ring.start} + warp * {WARP_BYTES} + matrix_row"
        if ring.stages > 1:
            text += f" + {self.slots[ring]} * {ring.slot_bytes}"
        if tile.chunks > 1:
            text += f" + ({block} >> 2) * {tile.chunk_bytes}"
        return f"{text} + (((2 * ({block} & 3) + matrix_column) ^ matrix_turn) << 4)"
