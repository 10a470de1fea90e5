"""Tier `mma`, loops that do nothing but add one product: its fragments come from shared memory before they are needed.

`ldmatrix` for one instruction's depth stands before the products of the depth before it, in registers of its own, across
the barrier between two steps as well: else each step would start with a barrier and reads that only another block covers.
Behind that barrier, which stands before the last products of a step, nothing reads the step's slot of the ring any more; so
copies of a later step go there at once, and a ring is as many steps ahead as it has slots.
"""

from __future__ import annotations

from ..tile_ir import Dot, Name, subexpressions
from .mma import STEP, Matrices, MatrixKernel, Multiplied
from .simt_source import Staged
from .streams import Pipeline, only_adds_products

MOST_SLOTS = 4  # of a ring, for there are instructions that let up to three steps' copies stay under way


class FragmentsAhead(MatrixKernel):
    """A kernel whose loops over one product read fragments ahead."""

    def steps_of(self, p: Pipeline) -> set[str]:
        product = self._only_product(p)
        return super().steps_of(p) if product is None else self._steps_ahead(p, product)

    def _only_product(self, p: Pipeline) -> Dot | None:
        """The product that a loop adds, if it does nothing else and its steps have an even number of depths."""
        s = p.last
        if len(p.chain) > 1 or len(s.carries) > 1 or not only_adds_products(s) or self.stages > MOST_SLOTS:
            return None
        (found,) = (x for x in subexpressions(s.yields[0]) if isinstance(x, Dot))
        fed = {x.name for x in (found.a, found.b) if isinstance(x, Name)} <= set(p.rings)
        in_registers = self.values[s.carries[0].name].registers is not None
        return found if fed and in_registers and self.tiles[s.axis.name] % (2 * STEP) == 0 else None

    def _steps_ahead(self, p: Pipeline, d: Dot) -> set[str]:
        s, size = p.last, p.last.axis.tile or 1
        first, sums = self.axis_names[s.axis.name].first, self.values[s.carries[0].name].registers
        assert sums is not None
        self.reads_ahead = True
        self.types |= {let.name: let.type for let, _ in p.streams}
        for stage in range(self.stages):
            self.text.line(f"{first} = {p.start} + {stage * size}")
            self.ask_anyway(p, first, str(stage))
        m = self.multiplied(d, sums)
        parts = [self.parts_of(m), self.parts_of(m)]
        rings = [p.rings[x.name] for x in (d.a, d.b) if isinstance(x, Name)]
        rings.sort(key=lambda x: m.row not in x.axes)
        slot, following = self.names.fresh("slot"), self.names.fresh("slot_next")
        self.text.line(f"{slot} = 0")
        held = set(self.awaited)
        self.arrived(self.stages - 1)
        self._fetch_both(m, self._places_in(m, rings, slot), parts[0], 0)
        visited = self.names.fresh(f"{s.axis.name}_now")
        self.text.line(f"for {visited} in range({p.start}, {p.stop}, {size}):")
        with self.text.indented(), self.back_edge():
            self.text.line(f"{following} = {self.next_slot(slot)}")
            self._step(m, rings, parts, slot, following)
            self.text.line(f"{first} = {visited} + {self.stages * size}")
            self.ask_anyway(p, first, slot)
            self.text.line(f"{slot} = {following}")
        return held

    def _step(
        self, m: Multiplied, rings: list[Staged], parts: list[tuple[str, str]], slot: str, following: str
    ) -> None:
        """The products of a step, before those of each depth the fragments of the next one."""
        places, depths = self._places_in(m, rings, slot), self.tiles[m.over] // STEP
        for k in range(depths):
            if k == depths - 1:
                self.arrived(self.stages - 2)
                places = self._places_in(m, rings, following)
            self._fetch_both(m, places, parts[(k + 1) % 2], (k + 1) % depths)
            self.multiply(m, parts[k % 2])
        for x in rings:
            self.memory.read(x.buffer)

    def _places_in(self, m: Multiplied, rings: list[Staged], slot: str) -> list[Matrices]:
        return [self.matrices_of(m, self.in_slot(x, slot)) for x in rings]

    def _fetch_both(self, m: Multiplied, places: list[Matrices], parts: tuple[str, str], depth: int) -> None:
        self.fetch_matrices(places[0], parts[0], m.rows, m.i, m.element, str(depth))
        self.fetch_matrices(places[1], parts[1], m.columns // 2, m.j, m.element, str(depth))
