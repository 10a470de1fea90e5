"""Tensor maps: what tells the copy engine of sm_90 and later where a tensor lies and which box of it moves.

CUDA Driver API, "Tensor Map Object Management", cuTensorMapEncodeTiled. Elements are 16 bits wide; rows of 128 bytes are
swizzled (CU_TENSOR_MAP_SWIZZLE_128B), and what lies outside the tensor reads as zero.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cache
from typing import Any

from ..dsl.records import dataclass
from .driver_library import opened

MAP_BYTES, ALIGNMENT = 128, 64
ELEMENT_BYTES = 2
UINT16, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, ZEROS = 1, 0, 3, 3, 0
OPTIONS = UINT16, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, ZEROS
MOST_KNOWN = 64
MOST_STRIDE_BYTES = 1 << 40


@cache
def _encoder() -> Callable[..., int]:
    library = opened(ctypes.CDLL)
    encode: Callable[..., int] = library.cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    library.cuTensorMapEncodeTiled.argtypes = [
        pointer, ctypes.c_int, number, *[pointer] * 5, *[ctypes.c_int] * 4
    ]  # fmt: skip
    return encode


def encoder_address() -> int:
    """Of cuTensorMapEncodeTiled, for native callers."""
    encode: Any = _encoder()
    return ctypes.cast(encode, ctypes.c_void_p).value or 0


def can_be_mapped(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """May the copy engine address a tensor, whose last stride is 1 and whose others (in elements) are multiples of 8?"""
    sizes = all(0 < n < 1 << 32 for n in shape)
    return sizes and all(0 <= s * ELEMENT_BYTES < MOST_STRIDE_BYTES for s in strides)


def dimensions(
    shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> tuple[ctypes.Array[Any], ctypes.Array[Any], ctypes.Array[Any], ctypes.Array[Any]]:
    """As the driver takes them, the innermost first: sizes, strides in bytes, the box, and every how many elements."""
    rank = len(shape)
    return (
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * max(rank - 1, 1))(*(s * ELEMENT_BYTES for s in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
    )


def encoded(address: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> bytes:
    """The map of a tensor; sizes and strides in elements, the outermost dimension first. Raises RuntimeError."""
    memory = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    place = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
    kind, *rest = OPTIONS
    failed = _encoder()(place, kind, len(shape), address, *dimensions(shape, strides, box), *rest)
    if failed:
        raise RuntimeError(
            f"CUDA driver: no tensor map (error {failed}) of {tuple(shape)}, strides {tuple(strides)}, box {tuple(box)}"
        )
    return ctypes.string_at(place, MAP_BYTES)


@dataclass
class MapSlot:
    """A map as an argument of launches; giving it an address makes it that tensor's. Maps made are remembered."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    memory: ctypes.Array[ctypes.c_char] = field(init=False, repr=False)
    known: dict[int, bytes] = field(default_factory=dict, repr=False)
    current: int = 0

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
        self.place = -(-ctypes.addressof(self.memory) // ALIGNMENT) * ALIGNMENT

    @property
    def value(self) -> int:
        return self.current

    @value.setter
    def value(self, address: int) -> None:
        if address == self.current:
            return
        made = self.known.get(address)
        if made is None:
            made = encoded(address, self.shape, self.strides, self.box)
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            self.known[address] = made
        ctypes.memmove(self.place, made, MAP_BYTES)
        self.current = address
