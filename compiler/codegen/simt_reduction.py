"""Reductions of the simt tier: within a thread, between the lanes of a warp (shuffles), between warps (shared memory)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...dsl.types import DType, compute
from ..tile_ir import (
    Reduce,
    TileType,
)
from .deal import Layout
from .scalar_cuda import (
    Code,
    cast,
    combine,
    constant,
    convert,
    identity,
)
from .simt_source import (
    NOWHERE,
    Point,
    Staged,
    Value,
    joined,
)

if TYPE_CHECKING:
    from .simt import Kernel

ACCUMULATORS = {
    "sum": "total",
    "prod": "product",
    "max": "highest",
    "min": "lowest",
    "any": "some",
    "all": "every",
}
LANE_BITS = 5
MANY_WARPS = 8


class Reduction:
    """One reduction: within a thread, between the lanes of a warp (shuffles), between warps (shared memory)."""

    def __init__(self, kernel: Kernel, e: Reduce, t: TileType, kept: Layout, over: Layout) -> None:
        self.k, self.e, self.t, self.kept, self.over = kernel, e, t, kept, over
        self.argument = compute(kernel.facts.type_of(e.arg, kernel.types).dtype)
        self.finds_place = e.fn in ("argmax", "argmin")
        self.held = self.argument if self.finds_place else t.dtype
        self.name = kernel.names.fresh(ACCUMULATORS.get(e.fn, "best"))
        self.place = kernel.names.fresh(f"{self.name}_at") if self.finds_place else ""
        self.joins = True
        """Does every thread get the whole? Otherwise each keeps its part until `join`."""

    def run(self, name: str) -> Value:
        k = self.k
        k.prepare(self.e.arg, joined(self.kept, self.over))
        if not self.kept.axes:
            self.whole(NOWHERE)
            if self.warps():
                self.between_warps([self.name, self.place])
            return Value(self.t, scalar=self.place or self.name)
        values = k.registers(name, TileType(self.held, self.kept.axes), self.kept)
        places = (
            k.registers(f"{name}_at", TileType(DType.I64, self.kept.axes), self.kept) if self.place else None
        )
        for at in k.nest(self.kept, [self.e.arg]):
            self.whole(at)
            k.text.line(f"{values.array}[{at.element(self.kept)}] = {self.name}")
            if places:
                k.text.line(f"{places.array}[{at.element(self.kept)}] = {self.place}")
        if self.warps():
            self.between_warps([values.array, places.array if places else ""])
        return Value(self.t, registers=places or values)

    def join(self, parts: Value) -> None:
        """What threads hold the parts of becomes whole, in its place."""
        self.joins = True
        k, registers = self.k, parts.registers
        for at in k.nest(self.kept, []):
            element = f"{registers.array}[{at.element(self.kept)}]" if registers else parts.scalar
            k.text.line(f"{self.name} = {element}")
            for bit in self.lanes():
                self.shuffle(1 << bit)
            k.text.line(f"{element} = {self.name}")
        if self.warps():
            self.between_warps([registers.array if registers else str(parts.scalar), ""])
            if not registers:
                k.text.line(f"{parts.scalar} = {self.name}")

    # ------------------------------------------------------------ one element of the result

    def whole(self, at: Point) -> None:
        """A thread's own elements, then its warp's."""
        k, depth = self.k, self.k.text.depth
        k.text.line(f"{self.name} = {self.start().text}")
        if self.place:
            k.text.line(f"{self.place} = -1")
        inner = k.open(self.over, [self.e.arg], set(self.over.axes), at)
        value = self.converted(k.emit(self.e.arg, inner))
        index = k.axis_names[self.e.over[0]].index if self.place else ""
        self.fold(value, index, k.conditions(inner, self.over.axes))
        k.text.depth = depth
        for bit in self.lanes():
            self.shuffle(1 << bit)

    def start(self) -> Code:
        if self.finds_place:
            return constant(0, self.held)
        return identity(self.e.fn, self.held)

    def converted(self, x: Code) -> Code:
        return cast(x, DType.BOOL) if self.held is DType.BOOL else convert(x, self.held)

    def fold(self, value: Code, index: str, conditions: list[str]) -> None:
        k = self.k
        if self.place:
            name = k.cut(value, 0).text
            beats = f"beats_{self.e.fn[3:]}_{self.held if self.held.is_float else 'i64'}"
            test = f"{beats}({name}, {index}, {self.name}, {self.place})"
            k.guarded([*conditions, test], f"{self.name} = {name}", f"{self.place} = {index}")
        else:
            step = combine(self.e.fn, Code(self.name, self.held), value)
            k.guarded(conditions, f"{self.name} = {step.text}")

    def shuffle(self, distance: int) -> None:
        k = self.k
        index = k.cut(Code(self.exchanged(self.place, distance), DType.I64), 0).text if self.place else ""
        if self.held is DType.BOOL:
            value = f"({self.exchanged(f'i32({self.name})', distance)} != 0)"
        else:
            value = self.exchanged(self.name, distance)
        self.fold(Code(value, self.held), index, [])

    def exchanged(self, value: str, distance: int) -> str:
        return f"cuda.shfl_xor_sync(ALL_LANES, {value}, {distance})"

    def lanes(self) -> Iterator[int]:
        """Bits of the lane number that tell apart threads with parts of one element, largest first."""
        for bit in reversed(range(LANE_BITS)):
            if self.joins and self.over.mask >> bit & 1:
                yield bit

    # ------------------------------------------------------------ between warps

    def warps(self) -> list[int]:
        """Bits of the thread number beyond the lane's that do so."""
        return [b for b in range(LANE_BITS, 11) if self.joins and self.over.mask >> b & 1]

    def between_warps(self, arrays: list[str]) -> None:
        """Every warp leaves its part in shared memory; every thread folds all parts in the same order."""
        k, bits = self.k, self.warps()
        sizes = [TileType(d, self.kept.axes) for d in (self.held, DType.I64)][: 1 + bool(self.place)]
        parts = [self.parts(t, 1 << len(bits)) for t in sizes]
        stride = parts[0].buffer.size >> len(bits)
        slot = k.cut(Code(self.slot(bits), DType.I64), 0).text
        for p in parts:
            k.note(k.memory.write(p.buffer))
        for at in k.nest(self.kept, []):
            writer = self.writers() + k.inside(at, self.kept.axes)
            k.guarded(
                writer,
                *(
                    f"{self.spot(p, at, slot, stride)} = {self.element(a, at)}"
                    for p, a in zip(parts, arrays, strict=False)
                ),
            )
        for p in parts:
            k.note(k.memory.read(p.buffer))
        for at in k.nest(self.kept, []):
            self.fold_parts(parts, stride, 1 << len(bits), at)
            if self.kept.axes:
                for name, array in zip((self.name, self.place), arrays, strict=True):
                    if name:
                        k.text.line(f"{self.element(array, at)} = {name}")

    def fold_parts(self, parts: list[Staged], stride: int, count: int, at: Point) -> None:
        """Fold the warps' parts of one element: of many a part a lane, then between lanes that share elements."""
        k = self.k
        if count >= MANY_WARPS and not self.kept.mask & (count - 1):
            for name, p in zip((self.name, self.place), parts, strict=False):
                k.text.line(f"{name} = {self.spot(p, at, f'(thread & {count - 1})', stride)}")
            for bit in reversed(range(count.bit_length() - 1)):
                self.shuffle(1 << bit)
            return
        for name, p in zip((self.name, self.place), parts, strict=False):
            k.text.line(f"{name} = {self.spot(p, at, '0', stride)}")
        counter = k.names.fresh("warp")
        k.text.line(f"for {counter} in range(1, {count}):")
        with k.text.indented():
            index = (
                k.cut(Code(self.spot(parts[1], at, counter, stride), DType.I64), 0).text if self.place else ""
            )
            self.fold(Code(self.spot(parts[0], at, counter, stride), self.held), index, [])

    def parts(self, t: TileType, count: int) -> Staged:
        """Room for one tile of parts a warp."""
        k = self.k
        one = k.place("warp_parts", t)
        k.memory.free(one.buffer)
        k.memory.all_buffers.remove(one.buffer)
        buffer = k.memory.allocate(one.buffer.name, compute(t.dtype), one.buffer.size * count)
        k.transient.append(buffer)
        return replace(one, buffer=buffer)

    def spot(self, p: Staged, at: Point, slot: str, stride: int) -> str:
        inner = self.k.spot(p, at)[len(p.buffer.name) + 1 : -1]
        base = slot if stride == 1 else f"{slot} * {stride}"
        return f"{p.buffer.name}[{base if not inner else f'{base} + {inner}'}]"

    def element(self, array: str, at: Point) -> str:
        return f"{array}[{at.element(self.kept)}]" if self.kept.axes else array

    def slot(self, bits: list[int]) -> str:
        """The warp's number among those with parts of one element: the bits packed together."""
        runs: list[tuple[int, int, int]] = []
        for place, bit in enumerate(bits):
            if runs and bit == runs[-1][0] + runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
            else:
                runs.append((bit, 1, place))
        return " | ".join(
            f"((thread >> {low}) & {(1 << n) - 1})" + (f" << {at}" if at else "") for low, n, at in runs
        )

    def writers(self) -> list[str]:
        """One lane of each warp writes, for each element."""
        spare = (self.k.deal.threads - 1) & ~self.kept.mask & ~sum(1 << b for b in self.warps())
        return [f"thread & {spare} == 0"] if spare else []
