"""Arrays on a CUDA device: torch, CuPy, Numba, and whatever has `__cuda_array_interface__` or DLPack.

Nothing is copied and nothing waits. torch and CuPy are never imported here: an array that was passed brings them along.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

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
class _Memory:
    """Memory described to NumPy, and what keeps it alive."""

    __array_interface__: dict[str, Any]
    holds: Any


def described(value: Any, what: str) -> Array:
    """A NumPy array with the address, shape, strides and element type of a device array: for checks, never to be read.

    Raises `TypeError` where `value` is no device array.
    """
    if is_torch(value):
        return _torch_described(value)
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        raise TypeError(f"{what} is a {type(value).__name__}; an array on the CUDA device is what it takes")
    plain = {k: facts[k] for k in ("shape", "typestr", "data", "strides") if facts.get(k) is not None}
    return np.asarray(_Memory({**plain, "version": 3}, value))


def _torch_described(tensor: Any) -> Array:
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_conj().resolve_neg()
    size = plain.element_size()
    is_bf16 = plain.dtype == torch.bfloat16
    kind = np.dtype(np.int16) if is_bf16 else torch.empty(0, dtype=plain.dtype).numpy().dtype
    memory = {
        "shape": tuple(plain.shape),
        "typestr": kind.str,
        "data": (plain.data_ptr() or size, False),
        "strides": tuple(s * size for s in plain.stride()),
        "version": 3,
    }
    array: Array = np.asarray(_Memory(memory, plain))
    return array.view(ml_dtypes.bfloat16) if is_bf16 else array


def imported(value: Any) -> Any:
    """An array that has only DLPack, as one of a library that is loaded; others as they are."""
    if is_torch(value) or hasattr(value, "__cuda_array_interface__"):
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
    device = getattr(value, "device", None)
    number = getattr(device, "id", None)
    return int(number) if isinstance(number, int) else 0


def stream_of(like: Any, device: int) -> int:
    """The handle of the stream that the library of `like` works on now."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        stream: int = torch._C._cuda_getCurrentRawStream(device)
        return stream
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        return int(cupy.cuda.get_current_stream().ptr)
    return 0


Maker = tuple[Callable[[Any], Any], Any]
"""A function that makes an array, and what it is called with; None for the first array of the call."""


def maker(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Maker:
    """What makes such arrays for calls whose first array is one like `like`."""
    if not is_torch(like):
        return partial(empty, shape, dtype), None
    torch = sys.modules["torch"]
    kind = torch_dtype(dtype)
    if type(like) is torch.Tensor and like.shape == shape and like.dtype == kind and like.is_contiguous():
        return torch.empty_like, None
    # one element seen as a tensor of that shape: empty_like takes two thirds of the time of empty, which has more arguments
    model = torch.empty(1, dtype=kind, device=like.device).expand(shape)
    if torch.empty_like(model).is_contiguous():
        return torch.empty_like, model
    return partial(empty, shape, dtype), None


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    """A new packed array of the kind that `like` is, on its device.

    Raises `TypeError` where that library cannot hold the element type, or none is known to make one.
    """
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=torch_dtype(dtype), device=like.device)
    if dtype == ml_dtypes.bfloat16:
        raise TypeError(f"{type(like).__name__} arrays hold no bfloat16; pass torch tensors")
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        return cupy.empty(shape, dtype)
    from numba import cuda

    return cuda.device_array(shape, dtype)


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    torch = sys.modules["torch"]
    return torch.bfloat16 if dtype == ml_dtypes.bfloat16 else getattr(torch, dtype.name)


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
    return (
        type(value), facts["shape"], facts.get("strides"), facts["typestr"], facts["data"][0] & 15, device_of(value),
    )  # fmt: skip
