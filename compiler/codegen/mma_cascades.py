"""Tier `mma`, loops that compute between products: as in tier `wgmma` but for what runs at the same time there.

Exponentials along a row are one fused multiply-add and one exp2 each (`warpgroup_exponentials.py`); maxima move only when
they have to (`lazy_maximum.py`); a sum of products is multiplied by its factors only where some row of a warp has one that
is not 1; what a row may see is bits of a word (`warpgroup_masks.py`), and weights of columns that do not exist are 0 once,
for their sum and their product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...dsl.records import dataclass
from ..tile_ir import (
    Apply,
    Dot,
    Expr,
    For,
    Let,
    Load,
    Name,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from .deal import Spread
from .fragments_ahead import FragmentsAhead
from .loop_states import exponent, running_maxima
from .mma import RegisterOperand
from .simt_source import Point, Registers
from .warpgroup_exponentials import RowExponentials, shifted

VOTE = "any_lane"
COLUMNS = 2  # side by side in one thread, of which limits are small numbers


@dataclass(frozen=True)
class Move:
    """A state by its number, the factor by which it moves on, and what becomes of it then: a product is added."""

    number: int
    state: str
    factor: str
    sum: Expr


def _move(number: int, state: str, y: Expr) -> Move | None:
    match y:
        case (
            Apply(op="add", args=(Apply(op="mul", args=(Name(a), Name(b))), Dot() as d))
            | Apply(op="add", args=(Dot() as d, Apply(op="mul", args=(Name(a), Name(b)))))
        ) if state in (a, b) and a != b:
            return Move(number, state, b if a == state else a, Apply("add", (Name(state), d)))
    return None


class CascadeKernel(FragmentsAhead, RowExponentials):
    """Emits one program."""

    def _give_names(self) -> None:
        self.names.taken.add(VOTE)
        self.stepping: For | None = None  # the loop whose step is emitted
        self.moves: list[Move] = []
        super()._give_names()

    def imports(self) -> dict[str, set[str]]:
        votes = {VOTE} if any(f"{VOTE}(" in x for x in self.text.out) else set[str]()
        return {"warpgroup": votes | super().imports().get("warpgroup", set())}

    def is_row(self, spread: Spread) -> bool:
        """Rows lie over the lanes of a warp, above the two bits that tell a row's columns apart."""
        return spread.low == 2

    # ------------------------------------------------------------ loops

    def loop(self, s: For) -> None:
        """With the scales of exponentials computed before it."""
        outer = self.scales
        self.before_loop(self._along_rows((*self.waiting, s)))
        self.scales = {**outer, **self.scales}
        super().loop(s)
        self.scales = outer

    def _along_rows(self, loops: tuple[For, ...]) -> Iterator[Expr]:
        """Exponentials of differences to a value that each row has."""
        inside = list(statements(loops))
        types: dict[str, TileType] = {**self.types, **{x.name: x.type for x in inside if isinstance(x, Let)}}
        types |= {c.name: c.type for x in inside if isinstance(x, For) for c in x.carries}
        for part in (x for s in inside for e in expressions(s) for x in subexpressions(e)):
            found = shifted(part)
            axes = types[found.row.name].axes if found is not None else ()
            if len(axes) == 1 and self.is_row(self.deal.alone(axes[0])):
                yield part

    def loop_body(self, s: For) -> None:
        outer = self.stepping, self.moves, self.shifts
        known = self.limits, self.existing_words, self.gaps, self.zeroed, self.lowest
        self.stepping, self.moves, self.shifts = s, self._moves(s), {}
        self.limits, self.existing_words, self.gaps, self.zeroed, self.lowest = {}, {}, {}, set(), set()
        for spread in dict.fromkeys(self._spreads(s)):
            self.name_limits(s.axis.name, spread)
        super().loop_body(s)
        self.limits, self.existing_words, self.gaps, self.zeroed, self.lowest = known
        self.stepping, self.moves, self.shifts = outer

    def _spreads(self, s: For) -> Iterator[Spread]:
        """How columns that may not exist are dealt in what a step computes."""
        for x in s.body:
            if isinstance(x, Let) and s.axis.name in x.type.axes and not isinstance(x.value, Load):
                layout = self.deal.layout(x.type.axes)
                if self.lane_checks(Point(layout, dict.fromkeys(layout.axes, "0")), s.axis.name):
                    yield from (y for y in [layout.spread(s.axis.name)] if y.run == COLUMNS and y.even)

    def let(self, s: Let) -> None:
        loop = None if s.name in self.crossing else self.stepping  # what crosses is staged as it is computed
        made = s
        if loop is not None and not isinstance(s.value, Load | Dot):
            made = self.with_masks(s, loop)
        super().let(replace(made, value=self.with_shifts(made.value)) if self.scales else made)
        if loop is not None and isinstance(s.value, Dot):
            self._lower(s, loop)
        if loop is not None and exponent(s.value)[1] is not None:
            self.zero_beyond(s, loop.axis.name)
        moved = [m for m in self.moves if m.factor == s.name]
        if moved:
            self._move_on(moved)

    # ------------------------------------------------------------ columns that do not exist

    def _lower(self, product: Let, loop: For) -> None:
        """Products of columns that do not exist are -inf where masks would make them so."""
        itself = Name(product.name)
        lowered = self.with_masks(replace(product, value=itself), loop).value
        if lowered != itself:
            self.map(self._held(product.name), product.type.dtype, lowered)

    def _existing(self, operand: RegisterOperand, over: str) -> Expr:
        is_zero = isinstance(operand.value, Name) and operand.value.name in self.zeroed
        return operand.value if is_zero else super()._existing(operand, over)

    # ------------------------------------------------------------ sums that move on

    def yields(self, s: For) -> None:
        sums = {m.number: m.sum for m in self.moves}
        super().yields(replace(s, yields=tuple(sums.get(i, y) for i, y in enumerate(s.yields))))

    def _moves(self, s: For) -> list[Move]:
        """The states to which a step adds a product and that nothing else reads."""
        factors = {f for m in running_maxima(s) for f in m.factors}
        every = [*s.yields, *(e for x in statements(s.body) for e in expressions(x))]
        reads = [x.name for e in every for x in subexpressions(e) if isinstance(x, Name)]
        found = (_move(i, c.name, y) for i, (c, y) in enumerate(zip(s.carries, s.yields, strict=True)))
        return [
            m
            for m in found
            if m is not None
            and m.factor in factors
            and reads.count(m.state) == 1
            and self._serves(m.factor, s.carries[m.number].type.axes, s)
        ]

    def _serves(self, factor: str, axes: tuple[str, ...], s: For) -> bool:
        own = next(x.type.axes for x in s.body if isinstance(x, Let) and x.name == factor)
        return self.deal.layout(own).serves(self.deal.layout(axes))

    def _move_on(self, moved: list[Move]) -> None:
        """Multiply states by their factors where some row of a warp has one that is not 1."""
        found = self._held(moved[0].factor)
        tests = " | ".join(f"({found.array}[{i}] != f32(1.0))" for i in range(found.layout.elements))
        self.text.line(f"if {VOTE}(i32({tests})) != 0:")
        with self.text.indented():
            for m in moved:
                product = Apply("mul", (Name(m.state), Name(m.factor)))
                self.map(self._held(m.state), self.types[m.state].dtype, product)

    def _held(self, name: str) -> Registers:
        registers = self.values[name].registers
        assert registers is not None
        return registers
