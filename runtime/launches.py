"""The launches of a call: for each program of a kernel the variant that sizes, strides and alignment allow, its grid and its
arguments.

Arguments stand as `compiler/codegen/simt.py` documents: for each tensor its address and its strides in elements, then
scalars, then extents, 8 bytes each but for 4-byte scalars, then tensor maps (`tensor_maps.py`) where the kernel has some.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from ..compiler.evaluate import Number
from ..compiler.interpreter.elements import NUMPY
from ..compiler.target import CudaTarget
from ..compiler.tile_ir import TileProgram
from ..dsl.records import dataclass
from ..dsl.types import DType
from . import driver, machine_code
from .forks import cached_property
from .machine_code import Assembled, Variant, variants
from .tensor_maps import MapSlot, can_be_mapped

Slot = tuple[Any, int]
"""Where an address goes, and the number of the array it belongs to."""


@dataclass(frozen=True)
class Launch:
    """One launch, settled but for addresses. `pointers` is the argument array that the driver reads, `held` its memory;
    `shape` the grid, the block and the stream."""

    function: Any
    shape: driver.LaunchShape
    pointers: Any
    slots: tuple[Slot, ...]
    held: tuple[Any, ...] = field(repr=False)
    what: str
    reference: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", ctypes.byref(self.shape))


@dataclass(frozen=True)
class Source:
    """Generated source for a target. `spills` is told of a kernel whose threads keep values in memory, and whether it is the
    preferred one of its program; it may refuse."""

    text: str = field(repr=False)
    target: CudaTarget
    spills: Callable[[Assembled, bool], None] | None = field(default=None, repr=False)

    @cached_property
    def variants(self) -> Mapping[str, Sequence[Variant]]:
        """By program, the preferred first."""
        return variants(self.text)

    def machine_code(self, variant: Variant) -> Assembled:
        made = machine_code.machine_code(self.text, variant.name, self.target)
        if made.spill_bytes and self.spills is not None:
            self.spills(made, any(variant is several[0] for several in self.variants.values()))
        return made


HELD: dict[DType, Callable[[Any], Any]] = {
    DType.F64: ctypes.c_double,
    DType.I64: ctypes.c_int64,
    DType.BOOL: ctypes.c_bool,
    **dict.fromkeys((DType.I32, DType.I16, DType.I8, DType.U8), ctypes.c_int32),
}
"""How a scalar is passed; f32, f16 and bf16, rounded to their type, as a float."""


@dataclass(frozen=True)
class Call:
    """What decides about the launches of a call: the source and what it has, the device, sizes, strides in elements and
    alignment to 16 bytes by tensor, numbers. Arrays are counted as `names` has them."""

    source: Source
    device: int
    names: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]]
    strides: Mapping[str, tuple[int, ...]]
    aligned: Mapping[str, bool]
    numbers: Mapping[str, Number]

    def launch(self, program: TileProgram) -> Launch | None:
        """The launch of a program; None where it has no work."""
        variant = next(v for v in self.source.variants[program.name] if self.fits(program, v))
        sizes = [int(self.numbers[e]) for e in program.extents]
        blocks = variant.blocks(sizes, driver.multiprocessors(self.device))
        if blocks <= 0:
            return None
        code = self.source.machine_code(variant)
        tensors = [(ctypes.c_void_p(), self.names.index(p.name)) for p in program.params]
        values: list[Any] = []
        for p, (slot, _) in zip(program.params, tensors, strict=True):
            values += [slot, *map(ctypes.c_int64, self.strides[p.name])]
        values += [self.scalar(self.numbers[s.name], s.dtype) for s in program.scalars]
        values += [ctypes.c_int64(n) for n in sizes]
        maps = [
            (MapSlot(self.shapes[t], self.strides[t], box), self.names.index(t)) for t, box in variant.maps
        ]
        places = [*(ctypes.addressof(v) for v in values), *(m.place for m, _ in maps)]
        pointers = (ctypes.c_void_p * len(places))(*places)
        told = ", ".join(f"{e} = {n}" for e, n in zip(program.extents, sizes, strict=True))
        what = f"`{program.name}` ({told}; {blocks} blocks of {variant.threads} threads, {variant.shared_bytes} bytes of "
        function = driver.function(code.cubin, variant.name, variant.shared_bytes, self.device)
        return Launch(
            ctypes.c_void_p(function),
            driver.LaunchShape.of(blocks, variant.threads, variant.shared_bytes, variant.secondary),
            pointers,
            (*tensors, *maps),
            (*values, *maps),
            what + "dynamic shared memory)",
        )

    def fits(self, program: TileProgram, v: Variant) -> bool:
        """Do sizes, strides and alignment allow the variant?"""
        dtypes = {p.name: p.dtype for p in program.params}
        divisible = all(int(self.numbers[e]) % n == 0 for e, n in v.multiples.items())
        divisible = divisible and all(int(self.numbers[e]) <= n for e, n in v.at_most.items())
        mapped = all(can_be_mapped(self.shapes[t], self.strides[t]) for t, _ in v.maps)
        return divisible and mapped and all(self.is_wide(t, 16 // dtypes[t].bytes) for t in v.wide)

    def is_wide(self, tensor: str, elements: int) -> bool:
        """May rows of a tensor be moved 16 bytes at a time? New arrays are packed and aligned."""
        *outer, last = self.strides[tensor]
        return self.aligned.get(tensor, True) and last == 1 and all(s % elements == 0 for s in outer)

    def scalar(self, value: Number, dtype: DType) -> Any:
        if dtype in (DType.F16, DType.BF16):
            return ctypes.c_float(float(NUMPY[dtype].type(value)))
        kind: Any = HELD.get(dtype, ctypes.c_float)
        return kind(value)


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a packed row-major array."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))
