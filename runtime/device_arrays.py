"""Arrays on a CUDA device: torch, CuPy, Numba, and whatever has `__cuda_array_interface__` or DLPack.

Nothing is copied and nothing waits. torch and CuPy are never imported here: an array that was passed brings them along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..compiler.interpreter.elements import element_of
from ..dsl.records import dataclass
from ..dsl.types import DType
from . import driver
from .arrays import Array, is_torch

CUDA_DLPACK = 2
"""The device type of CUDA memory in DLPack."""


def on_device(value: Any) -> bool:
    """Does an array lie in the memory of a CUDA device?"""
    if is_torch(value):
        return bool(value.is_cuda)
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__cuda_array_interface__"):
        return True
    asked = getattr(value, "__dlpack_device__", None)
    return asked is not None and int(asked()[0]) == CUDA_DLPACK


@dataclass(frozen=True)
class DeviceArray:
    """What the library of a device array says of it. `bits` has its address, shape and strides, and elements as wide as its
    own: for checks, never to be read. `dtype` is a name where the language has no such element type."""

    bits: Array
    dtype: DType | str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def ndim(self) -> int:
        return self.bits.ndim

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(s // self.bits.itemsize for s in self.bits.strides)

    @property
    def address(self) -> int:
        return int(self.bits.__array_interface__["data"][0])

    @property
    def flags(self) -> Any:
        return self.bits.flags

    def reach(self) -> tuple[int, int]:
        """The first and the past-the-last byte, from its first element on."""
        x = self.bits
        ends = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)] if x.size else []
        return sum(min(0, e) for e in ends), sum(max(0, e) for e in ends) + x.itemsize


@dataclass(frozen=True)
class _Memory:
    """Memory described to NumPy, and what keeps it alive."""

    __array_interface__: dict[str, Any]
    holds: Any


def described(value: Any, what: str) -> DeviceArray:
    """A device array, for checks. Raises `TypeError` where `value` is none that kernels can read, `ValueError` where its
    elements do not lie at multiples of their size."""
    if is_torch(value):
        return _torch_described(value, what)
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        raise TypeError(f"{what} is a {type(value).__name__}; an array on the CUDA device is what it takes")
    if facts.get("mask") is not None:
        raise TypeError(f"{what} is a masked array; a kernel sees no mask: pass its values filled")
    plain = {k: facts[k] for k in ("shape", "typestr", "data", "strides") if facts.get(k) is not None}
    try:
        array = np.asarray(_Memory({**plain, "version": 3}, value))
    except (TypeError, ValueError) as reason:
        raise TypeError(f"{what} has a __cuda_array_interface__ that cannot be read: {reason}") from None
    found = DeviceArray(array, element_of(array.dtype) or str(array.dtype))
    steps = [s for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
    if array.size and any(x % array.itemsize for x in (found.address, *steps)):
        raise ValueError(
            f"{what} is not aligned to its elements (address {found.address}, strides {array.strides} bytes, elements of "
            f"{array.itemsize}); a plain array is what it takes"
        )
    return found


TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
"""Attributes of torch; but for bfloat16 also NumPy's names."""
_NAMED = {name: dtype for dtype, name in TORCH_NAMES.items()}


def _torch_described(tensor: Any, what: str) -> DeviceArray:
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"{what} is a sparse tensor ({tensor.layout}); a dense one is what it takes")
    plain = tensor.detach().resolve_conj().resolve_neg()
    size = plain.element_size()
    memory = {
        "shape": tuple(plain.shape),
        "typestr": f"|V{size}",
        "data": (plain.data_ptr() or size, False),
        "strides": tuple(s * size for s in plain.stride()),
        "version": 3,
    }
    name = str(plain.dtype).removeprefix("torch.")
    return DeviceArray(np.asarray(_Memory(memory, plain)), _NAMED.get(name, name))


def imported(value: Any) -> Any:
    """A device array as kernels can read it in place: one that has only DLPack as one of a library that is loaded, and what
    torch has yet to negate negated. Others, and what is no device array, as they are."""
    if is_torch(value):
        return value.resolve_neg() if value.is_neg() else value
    if not on_device(value) or hasattr(value, "__cuda_array_interface__"):
        return value
    for name in ("torch", "cupy"):
        library = sys.modules.get(name)
        if library is not None:
            return library.from_dlpack(value)
    raise TypeError(
        f"a {type(value).__name__} shares its memory through DLPack alone; import torch or cupy first, which read it"
    )


def device_of(value: Any) -> int:
    """The number of the device that an array lies on."""
    if is_torch(value):
        return int(value.device.index)
    number = getattr(getattr(value, "device", None), "id", None)  # CuPy's
    if isinstance(number, int):
        return number
    found = driver.device_at(address_of(value))
    return 0 if found is None else found  # of no element


def stream_of(like: Any, device: int) -> int:
    """The handle of the stream of a device that the library of `like` works on now."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        stream: int = torch._C._cuda_getCurrentRawStream(device)
        return stream
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        return int(cupy.cuda.get_current_stream(device).ptr)
    return 0


Maker = tuple[Callable[[Any], Any], Any]
"""A function that makes an array, and what it is called with; None for the first array of the call."""


def maker(shape: tuple[int, ...], dtype: DType, like: Any) -> Maker:
    """What makes such arrays for calls whose first array is one like `like`."""
    if not is_torch(like):
        return partial(empty, shape, dtype), None
    torch = sys.modules["torch"]
    kind = getattr(torch, TORCH_NAMES[dtype])
    if type(like) is torch.Tensor and like.shape == shape and like.dtype == kind and like.is_contiguous():
        return torch.empty_like, None
    # one element seen as a tensor of that shape: empty_like takes two thirds of the time of empty, which has more arguments
    model = torch.empty((), dtype=kind, device=like.device).expand(shape)
    if torch.empty_like(model).is_contiguous():
        return torch.empty_like, model
    return partial(empty, shape, dtype), None


def empty(shape: tuple[int, ...], dtype: DType, like: Any) -> Any:
    """A new packed array of the kind that `like` is, on its device.

    Raises `TypeError` where that library cannot hold the element type, or none is known to make one.
    """
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, TORCH_NAMES[dtype]), device=like.device)
    if dtype is DType.BF16:
        raise TypeError(f"{type(like).__name__} arrays hold no bfloat16; pass torch tensors")
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        with like.device:
            return cupy.empty(shape, TORCH_NAMES[dtype])
    from numba import cuda

    with cuda.gpus[device_of(like)]:
        return cuda.device_array(shape, TORCH_NAMES[dtype])


def address_of(value: Any) -> int:
    """Where its first element lies."""
    try:
        pointer: int = value.data_ptr()  # torch's
    except AttributeError:
        pointer = int(value.__cuda_array_interface__["data"][0])
    return pointer


def part_of_key(value: Any) -> tuple[object, ...] | None:
    """What of a device array decides checks and code: all but its address, of which only the alignment counts."""
    if is_torch(value):
        # a view that torch has yet to negate is made plain first, which a remembered call would not do
        if not value.is_cuda or value.is_neg():
            return None
        return value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        return None
    try:
        return (
            type(value), tuple(facts["shape"]), facts.get("strides"), facts["typestr"], facts["data"][0] & 15,
            bool(facts["data"][1]), facts.get("mask") is None, device_of(value),
        )  # fmt: skip
    except (KeyError, TypeError, IndexError):  # malformed, which the checks refuse
        return None
