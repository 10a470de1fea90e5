"""The CUDA driver API, of which kernels need twenty functions: devices and their contexts, modules, launches (CUDA Driver
API reference; names and types as in cuda.h).

Called through ctypes, whose import takes no time beside that of a binding. Devices are numbered as the driver does, as
torch and CuPy do. Contexts are the primary ones, which those use too.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

from ..compiler.target import TARGETS, CudaTarget
from .driver_library import opened
from .native_call import DLPACK_CUDA, Driver
from .tensor_maps import encoder_address

if TYPE_CHECKING:
    from .launches import Launch

MULTIPROCESSORS, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
"""Of CUdevice_attribute."""
MOST_DYNAMIC_SHARED_BYTES = 8
"""Of CUfunction_attribute."""
DEVICE_ORDINAL = 9
"""Of CUpointer_attribute."""

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuModuleLoadData": (POINTER(c_void_p), c_void_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
}
"""What is called through `done`, with the types of the arguments. Each gives a CUresult."""


@cache
def _library() -> Any:
    library = opened(ctypes.CDLL)
    for name, kinds in FUNCTIONS.items():
        getattr(library, name).argtypes = kinds
    return library


def done(name: str, *given: Any) -> None:
    """Call a function. Raises RuntimeError with the driver's words, OSError where there is no driver."""
    failed = getattr(_library(), name)(*given)
    if failed:
        raise RuntimeError(f"CUDA driver, {name}: {_words(failed)}")


def _words(failed: int) -> str:
    text = c_char_p()
    _library().cuGetErrorString(failed, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {failed}"


# ---------------------------------------------------------------- devices


@cache
def _initialised() -> None:
    done("cuInit", 0)


@cache
def _device(number: int) -> int:
    """The driver's handle of a device."""
    _initialised()
    handle = c_int()
    done("cuDeviceGet", ctypes.byref(handle), number)
    return handle.value


@cache
def _attribute(which: int, number: int) -> int:
    found = c_int()
    done("cuDeviceGetAttribute", ctypes.byref(found), which, _device(number))
    return found.value


def multiprocessors(number: int = 0) -> int:
    """How many a device has."""
    return _attribute(MULTIPROCESSORS, number)


def present(number: int = 0) -> CudaTarget | None:
    """The best target that a device of this machine runs; None where there is no driver or no such device."""
    try:
        capability = _attribute(CAPABILITY_MAJOR, number), _attribute(CAPABILITY_MINOR, number)
    except (OSError, RuntimeError):
        return None
    cuda_targets = (t for t in TARGETS.values() if isinstance(t, CudaTarget))
    runs = [t for t in cuda_targets if runs_on(t, capability)]
    return max(runs, key=lambda t: t.capability, default=None)


def runs_on(target: CudaTarget, capability: tuple[int, int]) -> bool:
    """Code for a target runs on devices of its capability or a later one, of its own only where it is specific."""
    return target.capability == capability or (
        target.capability < capability and not target.architecture_specific
    )


def device_at(address: int) -> int | None:
    """The number of the device that memory belongs to; None where the driver does not know it."""
    found = c_int()
    try:
        done("cuPointerGetAttribute", ctypes.byref(found), DEVICE_ORDINAL, address)
    except (OSError, RuntimeError):
        return None
    return found.value


# ---------------------------------------------------------------- contexts


_making = threading.Lock()


@cache
def _made_context(number: int) -> int:
    context = c_void_p()
    done("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(number))
    return context.value or 0


def context_of(number: int) -> int:
    """The handle of a device's primary context, which is kept as long as the process."""
    with _making:
        return _made_context(number)


class Context:
    """A device's primary context, to be asked often whether it is the current one. One thread at a time."""

    def __init__(self, number: int) -> None:
        self.handle, self.now = context_of(number), c_void_p()
        self.ask, self.place = opened(ctypes.PyDLL).cuCtxGetCurrent, ctypes.byref(self.now)

    def is_current(self) -> bool:
        self.ask(self.place)
        return self.now.value == self.handle


@contextmanager
def device(number: int = 0) -> Iterator[None]:
    """Make a device's primary context current; what was current before is so again after."""
    done("cuCtxPushCurrent_v2", context_of(number))
    try:
        yield
    finally:
        done("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))


def synchronize() -> None:
    """Wait for all work of the current context."""
    done("cuCtxSynchronize")


# ---------------------------------------------------------------- kernels

_loading = threading.Lock()
_functions: dict[tuple[bytes, str, int, int], int] = {}


def function(cubin: bytes, name: str, dynamic_shared_bytes: int, number: int = 0) -> int:
    """The handle of a kernel on a device, loaded there once."""
    key = cubin, name, dynamic_shared_bytes, number
    with _loading:
        found = _functions.get(key)
        if found is None:
            with device(number):
                found = _functions[key] = _loaded(cubin, name, dynamic_shared_bytes)
    return found


def _loaded(cubin: bytes, name: str, dynamic_shared_bytes: int) -> int:
    """Without being told so, a kernel gets 48 KiB of shared memory at most."""
    module, found = c_void_p(), c_void_p()
    done("cuModuleLoadData", ctypes.byref(module), cubin)
    done("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
    if dynamic_shared_bytes:
        done("cuFuncSetAttribute", found, MOST_DYNAMIC_SHARED_BYTES, dynamic_shared_bytes)
    return found.value or 0


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute`, for values that are a number."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


PROGRAMMATIC_STREAM_SERIALIZATION = 6
STARTS_EARLY = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
"""Of a launch that may start while the one before it on its stream still runs."""


class LaunchShape(ctypes.Structure):
    """`CUlaunchConfig`: a launch by it has four arguments, not eleven, each of which costs."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )
    stream: int | None
    attributes: int | None
    attribute_count: int

    @classmethod
    def stream_bytes(cls) -> int:
        """Where it has its stream."""
        field: Any = vars(cls)["stream"]
        return int(field.offset)

    @classmethod
    def of(cls, blocks: int, threads: int, shared_bytes: int, secondary: bool = False) -> LaunchShape:
        """`secondary`: it may start while the launch before it on the stream still runs."""
        plain = cls(blocks, 1, 1, threads, 1, 1, shared_bytes)
        if secondary:
            plain.attributes, plain.attribute_count = ctypes.addressof(STARTS_EARLY), 1
        return plain


def start(launch: Launch, stream: int) -> None:
    """Put a prepared launch on a stream of the current context. Raises RuntimeError naming kernel, sizes and reason."""
    launch.shape.stream = stream
    failed = _launch_by_shape()(launch.reference, launch.function, launch.pointers, None)
    if failed:
        raise refused(failed, launch.what)


@cache
def _launch_by_shape() -> Any:
    """The driver's function, whose arguments are passed as they are prepared."""
    return opened(ctypes.PyDLL).cuLaunchKernelEx


def refused(failed: int, what: str) -> RuntimeError:
    """The error of a launch that the driver refuses."""
    return RuntimeError(f"CUDA driver, at the launch of {what}: {_words(failed)}")


def native_driver(number: int, launches: Sequence[str]) -> Driver:
    """The driver as native code calls it, for launches on a device that are told by these words."""

    def raising(packed: int) -> None:
        launch, failed = packed >> 32, packed & 0xFFFFFFFF
        raise refused(
            failed, launches[launch] if launch >= 0 else "a kernel, whose tensor map it does not make"
        )

    library = opened(ctypes.PyDLL)
    launch, current = (
        ctypes.cast(f, c_void_p).value or 0 for f in (library.cuLaunchKernelEx, library.cuCtxGetCurrent)
    )
    encode = encoder_address() if hasattr(library, "cuTensorMapEncodeTiled") else 0
    return Driver(launch, current, encode, context_of(number), (DLPACK_CUDA, number), raising)
