"""Arrays in and out: NumPy, anything with `__array_interface__` or DLPack, CPU tensors of torch.

`receive` turns what a caller passed into a NumPy array over the same memory; `deliver` turns a result into the caller's
kind. torch is never imported here: a tensor that was passed brings it along.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compiler.interpreter.elements import NUMPY, element_of
from ..dsl.records import dataclass
from ..dsl.types import DType

Array = npt.NDArray[Any]
NARROW_FLOATS = frozenset({DType.F16, DType.BF16})


@dataclass(frozen=True)
class Received:
    """An argument as NumPy sees it. `given` is what the caller passed; its kind is the kind of the results."""

    array: Array
    given: Any


def receive(value: Any, what: str, dtype: DType, rank: int) -> Received:
    """`value` as an array without a copy. Raises `TypeError` for no array or another dtype, `ValueError` for another
    rank; `what` names the argument in the message."""
    array = as_numpy(value, what)
    if array.dtype != NUMPY[dtype]:
        raise TypeError(
            f"{what} holds {array.dtype}; {NUMPY[dtype]} is what it takes{_conversion(array, dtype)}"
        )
    if array.ndim != rank:
        raise ValueError(f"{what} has {array.ndim} axes, shape {array.shape}; it takes {rank}")
    return Received(array, value)


def _conversion(array: Array, dtype: DType) -> str:
    if array.dtype == NUMPY[dtype].newbyteorder():
        return " in this machine's byte order"
    return f": convert it first, as by .astype({str(NUMPY[dtype])!r})" if array.dtype.kind in "fiub" else ""


def as_numpy(value: Any, what: str) -> Array:
    """`value` as an array over the same memory. Raises `TypeError` where it is no array, `ValueError` where it lies on
    another device."""
    if _is_masked(value):
        raise TypeError(
            f"{what} is a masked array; a kernel sees no mask: pass x.filled(…), or x.data to ignore it"
        )
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        return _from_torch(value, what)
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{what} cannot be read as a CPU array: {error}") from error
    raise TypeError(
        f"{what} is {_article(type(value).__name__)}; an array is what it takes: NumPy, torch, or any with DLPack"
    )


def _is_masked(value: Any) -> bool:
    """NumPy imports masked arrays for those who make one."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return masked is not None and isinstance(value, masked)


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Is it an array, here or on a device?"""
    interfaces = "__array_interface__", "__cuda_array_interface__", "__dlpack__"
    return is_torch(value) or any(hasattr(value, x) for x in interfaces)


def _from_torch(tensor: Any, what: str) -> Array:
    """The memory of a CPU tensor; bfloat16, which NumPy lacks, by way of int16."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{what} lies on {tensor.device}; this kernel was compiled for the CPU: pass it as .cpu(), or "
            f"compile with target='cuda' to compute there"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        array: Array = plain.view(torch.int16).numpy().view(NUMPY[DType.BF16])
        return array
    try:
        array = plain.numpy()
    except TypeError as error:
        raise TypeError(f"{what} cannot be read as an array: {error}") from error
    return array


def deliver(result: Array, like: Any) -> Any:
    """`result` as the kind of array that `like` is, over the same memory."""
    if isinstance(like, np.ndarray):
        return result
    if is_torch(like):
        torch = sys.modules["torch"]
        if element_of(result.dtype) is DType.BF16:
            return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(result)
    if hasattr(like, "__array_namespace__") and element_of(result.dtype) is not DType.BF16:
        return like.__array_namespace__().from_dlpack(result)
    return result


def writable(array: Array, what: str) -> Array:
    """Refuse, with `ValueError`, memory that a kernel cannot write each element of on its own."""
    if not array.flags.writeable:
        raise ValueError(f"{what} is read-only; a writable array is what it takes")
    if not array.flags.aligned:
        raise ValueError(f"{what} is not aligned to its elements; a plain array is what it takes")
    inner = sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    reach = array.itemsize
    for stride, n in inner if array.size else ():
        if stride < reach:
            raise ValueError(
                f"{what} has elements that share memory (strides {array.strides}); a plain array is what it takes"
            )
        reach = stride * (n - 1) + reach
    return array


def overlaps(a: Array, b: Array) -> bool:
    """May the two share an element? Exact where that is quick to tell, else what their address ranges say."""
    if not np.may_share_memory(a, b):
        return False
    exact: Any = np.shares_memory
    try:
        return bool(exact(a, b, max_work=10_000))
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """Memory described anew: how a read-only array becomes one that Numba types like any other."""

    def __init__(self, array: Array) -> None:
        described = dict(array.__array_interface__)
        described["data"] = (described["data"][0], False)
        self.__array_interface__ = described
        self.holds = array


def to_kernel(array: Array, dtype: DType) -> Array:
    """The array as generated code takes it: f16 and bf16 as their bits, aligned (else a copy), and never read-only, so that
    one compiled version serves all. The kernel does not write what it declares as an input."""
    if not array.flags.aligned:
        array = array.copy()
    if dtype in NARROW_FLOATS:
        array = array.view(np.uint16)
    return array if array.flags.writeable else np.asarray(_Interface(array))
