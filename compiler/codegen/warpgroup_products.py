"""Products of a warpgroup in tier `wgmma`: operands in rings and registers, groups that run, and waiting for them."""

from __future__ import annotations

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import AxisIndex, Dot, Expr, Let, Name, subexpressions
from .deal import Layout
from .mma import RegisterOperand, Unfit
from .roles import ROWS, Role
from .simt_source import Point, Registers
from .staging import ROW_BYTES, STEP, Box, Ring, computed
from .tile_types import static_value

MOST_COLUMNS = {1: 256, 2: 256, 3: 192}
"""Of one instruction, by the warpgroups that compute: with three of them a thread starts with 128 registers."""
NO_OPERAND = "an operand of a product is neither a tile from memory nor one with the result's rows"


@dataclass
class Group:
    """A product that runs: the registers it writes and reads, and the rings whose slots it reads."""

    sums: str
    count: int
    packed: tuple[str, int] | None
    rings: list[Ring]


@dataclass(frozen=True)
class InRing:
    """A product's operand in shared memory: a box of a ring."""

    box: Box
    ring: Ring

    @property
    def axes(self) -> tuple[str, str]:
        return self.box.row, self.box.column


class Products(Role):
    """The computing role's operands and products."""

    computes = True

    def _give_names(self) -> None:
        super()._give_names()
        self.boxes: dict[str, InRing] = {}
        self.slots: dict[Ring, str] = {}  # taken, by the variable that holds their number
        self.groups: list[Group] = []  # not waited for, the first first
        self.factories: dict[str, str] = {}  # functions that the source makes, by what makes them

    # ------------------------------------------------------------ tiles from memory

    def let(self, s: Let) -> None:
        if s.name in self.staging.names:
            load = self.staging.names[s.name]
            ring = self.staging.ring(load)
            if not ring.looped and ring not in self.slots:
                self.take(ring)
            self.boxes[s.name] = InRing(self.staging.box(load), ring)
            self.types[s.name] = s.type
            return
        super().let(s)

    def take(self, ring: Ring, is_known: bool = True) -> None:
        """Wait until the next slot of a ring is full. `is_known`: the assembler sees that a warp's threads agree on it;
        where it does not, it would move each descriptor of a product from a thread's registers to the warp's."""
        name = self.ring_names[ring]
        at = self.barrier_at(ring, f"{name}_slot", self._own_part(ring))
        self.text.line(f"await_parity({self.full_barrier(ring)}{at}, {name}_phase)")
        if ring.stages > 1:
            number = f"{name}_slot" if is_known else f"uniform({name}_slot)"
            self.text.line(f"{name}_now = {number}")
        self.slots[ring] = f"{name}_now"
        self.advance(ring)

    def give_back(self, ring: Ring, slot: str = "", condition: str = "") -> None:
        """Say that this warpgroup has read a slot, or each warp that it has read its rows."""
        at = self.barrier_at(ring, slot or self.slots[ring], self._own_part(ring))
        self.text.line(f"if {'first_lane' if self.by_warps(ring) else 'leader'}{condition}:")
        self.text.line(f"    arrive({self.empty_barrier(ring)}{at})")
        self.slots.pop(ring, None)

    def by_warps(self, ring: Ring) -> bool:
        """Does each warp hand back its rows of a slot?"""
        return ring.parts > 0 or ring is self.staging.through

    def _own_part(self, ring: Ring) -> str:
        return "warpgroup" if ring.parts > 1 else ""

    # ------------------------------------------------------------ products

    def operand(self, e: Expr) -> InRing | RegisterOperand:  # type: ignore[override]
        if isinstance(e, Name) and e.name in self.boxes:
            return self.boxes[e.name]
        inner = computed(e)
        if isinstance(inner, Name) and inner.name in self.values:
            axes = self.types[inner.name].axes
            if len(axes) == 2 and self.deal.layout(axes).spread(axes[0]).between:
                return RegisterOperand(inner, axes)
        raise Unfit(NO_OPERAND)

    def product(  # type: ignore[override]
        self,
        d: Dot,
        a: InRing | RegisterOperand,
        b: InRing | RegisterOperand,
        target: Registers,
        dtype: DType,
    ) -> None:
        """target += a · b as one group, waited for where it is next touched."""
        left, right = self.sides(a, b, target.layout)
        self.start(d, left if isinstance(left, InRing) else self.packed(d, left), right, target)

    def sides(
        self, a: InRing | RegisterOperand, b: InRing | RegisterOperand, layout: Layout
    ) -> tuple[InRing | RegisterOperand, InRing]:
        """The operand with the result's rows, and the other."""
        row = layout.axes[0] if layout.spread(layout.axes[0]).between else layout.axes[-1]
        left, right = (a, b) if row in a.axes else (b, a)
        if not isinstance(right, InRing):
            raise Unfit("the operand with the columns of a product has to come from memory")
        return left, right

    def packed(self, d: Dot, left: RegisterOperand) -> tuple[str, int]:
        """A computed operand in registers, rounded and packed two to one."""
        array, count = self.names.fresh("packed"), self.packed_count(d)
        self.text.line(f"{array} = registers_i32({count})")
        self.pack(d, left, array)
        return array, count

    def packed_count(self, d: Dot) -> int:
        """How many registers a thread packs a computed operand into."""
        (over,) = d.over
        if self.tiles[over] % STEP:
            raise Unfit(f"`{over}` by {self.tiles[over]}; a computed operand needs a multiple of {STEP}")
        return self.tiles[over] // 4

    def pack(self, d: Dot, left: RegisterOperand, array: str) -> None:
        """Neighbouring values of a row in one register, lanes that do not exist as zeros: what the instruction takes for its
        first operand (PTX ISA 9.7.15.5.1.1)."""
        (over,) = d.over
        element = self.facts.type_of(d.a, self.types).dtype
        layout = self.deal.layout(left.axes)
        row = next(x for x in layout.axes if x != over)
        self.prepare(left.value, layout)
        names = [self.names.fresh(n) for n in (f"{over}_step", "deeper", "half")]
        step, deeper, half = names
        depth = self.text.depth
        for name, count in zip(names, (self.tiles[over] // STEP, 2, 2), strict=True):
            self.text.line(f"for {name} in range({count}):")
            self.text.depth += 1
        pair = [
            self.existing(
                left.value, Point(layout, {row: half, over: f"(4 * {step} + 2 * {deeper} + {n})"}), over
            )
            for n in (0, 1)
        ]
        self.text.line(f"{array}[4 * {step} + 2 * {deeper} + {half}] = pack_{element}({', '.join(pair)})")
        self.text.depth = depth

    def existing(self, e: Expr, at: Point, axis: str) -> str:
        """An element, zero on a lane of an axis that does not exist."""
        is_zero = isinstance(e, Name) and e.name in self.zeroed
        checks = [] if is_zero else self.lane_checks(at, axis)
        code = self.emit(e, at)
        return f"({code.operand} if {' and '.join(checks)} else f32(0.0))" if checks else code.text

    def start(
        self, d: Dot, left: InRing | tuple[str, int], right: InRing, target: Registers, fresh: bool = False
    ) -> None:
        """Start target += left · right (`fresh`: target = left · right) as one group. `left`: a box, or packed registers."""
        (over,) = d.over
        layout = target.layout
        row = next((x for x in layout.axes if layout.spread(x).between), None)
        if row is None or len(layout.axes) != 2:
            raise Unfit("a product whose rows are not those of the others")
        column = next(x for x in layout.axes if x != row)
        columns = self.tiles[column]
        most = MOST_COLUMNS[self.warpgroups]
        if columns % 8 or not 8 <= columns <= most:
            raise Unfit(f"`{column}` by {columns}; a product has 8 to {most} columns in steps of 8")
        for operand in (x for x in (left, right) if isinstance(x, InRing)):
            self.check_depth(operand, over)
        element = self.program.param(right.box.load.tensor).dtype
        rings = list(dict.fromkeys(x.ring for x in (left, right) if isinstance(x, InRing)))
        for ring in (r for r in rings if r not in self.slots):
            self.take(ring, is_known=isinstance(left, InRing))
        strides = [_stride(layout, x) for x in (row, column)]
        first = self._form(left, over) if isinstance(left, InRing) else None
        at_left = self._address(left, over, True) if isinstance(left, InRing) else left[0]
        made = f'wgmma("{element}", {columns}, {first}, {self._form(right, over)}, {strides[0]}, {strides[1]}, {fresh})'
        call = f"{self.factory('multiply', made)}({target.array}, {at_left}, {self._address(right, over, False)})"
        self.text.line(call)
        self.groups.append(
            Group(target.array, columns // 2, None if isinstance(left, InRing) else left, rings)
        )

    def check_depth(self, operand: InRing, over: str) -> None:
        """Instructions multiply whole steps of the contracted axis. What a step has beyond the axis's end is zeros from the
        copy engine if the tensor ends there too; else its end has to lie between tiles. Raises `Unfit`."""
        load, tile = operand.box.load, self.tiles[over]
        if over not in self._whole() and tile % STEP:
            raise Unfit(f"`{over}` by {tile}; products take {STEP} at a time")
        size = self.program.param(load.tensor).shape[load.subscripts.index(AxisIndex(over))]
        if not self.ends_with(over, size) and (tile % STEP or self.has_tail(self.axes[over], tile)):
            raise Unfit(f"`{load.tensor}` goes on where `{over}` ends within a tile")

    def ends_with(self, axis: str, size: Expr) -> bool:
        """Is an axis known to end where a dimension of this size does?"""
        extent = self.axes[axis].extent
        known = static_value(extent, self.statics)
        return extent == size or (known is not None and known == static_value(size, self.statics))

    def _form(self, operand: InRing, over: str) -> str:
        box = operand.box
        return f"k_major({box.rows}, {box.columns})" if box.column == over else f"mn_major({box.rows})"

    def _address(self, operand: InRing, over: str, divided: bool) -> str:
        """Where an operand starts; warpgroups divide the side that has the rows."""
        box, ring = operand.box, operand.ring
        text = f"shared + {ring.start + ring.offset(box)}"
        if ring.stages > 1:
            text += f" + {self.slots[ring]} * {ring.slot_bytes}"
        if divided and self.warpgroups > 1:
            each = ROWS * ROW_BYTES if box.column == over else box.chunk_bytes
            text += f" + warpgroup * {each}"
        return f"matrix_address({text})"

    def factory(self, word: str, made: str) -> str:
        """The name of a function that the source makes once."""
        if made not in self.factories:
            self.factories[made] = f"{self.name}_{word}_{len(self.factories)}"
        return self.factories[made]

    # ------------------------------------------------------------ waiting

    def finish(self, arrays: set[str] | None = None) -> None:
        """Wait for all groups up to the last that has to do with some arrays (with any, if None)."""
        last = max(
            (i for i, g in enumerate(self.groups) if arrays is None or arrays & self._touched(g)), default=-1
        )
        if last < 0:
            return
        done, self.groups = self.groups[: last + 1], self.groups[last + 1 :]
        self._await(len(self.groups), done)
        for g in done:
            for ring in g.rings:
                still = any(ring in other.rings for other in self.groups)
                if ring in self.slots and not still and ring.looped:
                    self.give_back(ring)

    def _touched(self, g: Group) -> set[str]:
        return {g.sums} | ({g.packed[0]} if g.packed else set())

    def _await(self, left: int, done: list[Group]) -> None:
        sums = dict.fromkeys((g.sums, g.count) for g in done)
        packed = dict.fromkeys(g.packed for g in done if g.packed)
        sizes = ", ".join(str(n) for _, n in sums)
        made = f"settled({left}, ({sizes}{',' if len(sums) == 1 else ''})"
        if packed:
            made += f", ({', '.join(str(n) for _, n in packed)}{',' if len(packed) == 1 else ''})"
        name = self.factory("settle", made + ")")
        self.text.line(f"{name}({', '.join([*(a for a, _ in sums), *(a for a, _ in packed)])})")

    def prepare(self, e: Expr, layout: Layout) -> None:
        read = {x.name for x in subexpressions(e) if isinstance(x, Name)}
        values = [self.values[n].registers for n in read if n in self.values]
        self.finish({r.array for r in values if r is not None})
        super().prepare(e, layout)

    def map(self, target: Registers, dtype: DType, e: Expr) -> None:
        if isinstance(e, Name) and self.values[e.name].registers == target:
            return
        self.finish({target.array})
        super().map(target, dtype, e)


def _stride(layout: Layout, axis: str) -> int:
    """How far apart neighbours along an axis lie among a thread's elements."""
    at = Point(layout, {x: "1" if x == axis else "0" for x in layout.axes})
    return int(at.element(layout).rpartition("* ")[2])
