"""CUDA devices that are not there: torch's CPU tensors lie on them, and their driver notes what is launched.

The call path runs as it does on a device, from the call to the driver's functions, and those are Python functions here.
"""

from __future__ import annotations

import ast
import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tileloom.compiler.target import CudaTarget

CONTEXT = 7
"""The handle of the first device's context; the others' follow."""
BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "boolean": 1, "map": 128}
CPU_DEVICE = 1
"""kDLCPU of DLPack."""
FAILED = 1
"""CUDA_ERROR_INVALID_VALUE."""
ATTRIBUTES = {16: "multiprocessors", 75: "major", 76: "minor"}
"""Of CUdevice_attribute."""


@dataclass(frozen=True)
class Launched:
    """One launch as the driver sees it; parameters in bytes, `context` what was current."""

    kernel: str
    blocks: int
    threads: int
    stream: int | None
    parameters: tuple[bytes, ...]
    context: int = CONTEXT

    def address(self, place: int) -> int:
        return int.from_bytes(self.parameters[place], "little")


@dataclass
class Loaded:
    """A kernel in a device's memory: its name, the annotations of its parameters, the context, and the bytes of shared
    memory that it may have."""

    name: str
    annotations: tuple[str, ...]
    context: int
    dynamic_shared_bytes: int = 0


def _int_at(place: Any) -> Any:
    return ctypes.cast(place, POINTER(c_int)).contents


@dataclass
class FakeCuda:
    """What the driver has seen, and what it answers."""

    devices: Sequence[CudaTarget]
    multiprocessors: int = 132
    launches: list[Launched] = field(default_factory=list)
    encoded: int = 0
    stream: int = 0
    answer: int = 0
    run: Callable[[Launched], None] = lambda launched: None
    modules: list[tuple[str, int]] = field(default_factory=list)
    """Images and contexts."""
    kernels: list[Loaded] = field(default_factory=list)
    source: Callable[[], str] | None = None
    """Gives the source of the kernels, where it is not their machine code that is loaded."""
    placed: dict[int, int] = field(default_factory=dict)
    """Devices of memory by its address; what is not among it lies on the first."""
    native_launch: int = 0
    """The address of what native calls launch by; by default `launch`, in which Python may go on in another thread."""
    held: Sequence[Any] = ()
    calls: list[str] = field(default_factory=list)
    """The driver's functions, as they were called, but for questions for the current context."""

    def __post_init__(self) -> None:
        self.thread = threading.local()
        place, word = c_void_p, c_int
        kinds = {
            "cuGetErrorString": (word, POINTER(c_char_p)),
            "cuInit": (c_uint,),
            "cuDeviceGet": (place, word),
            "cuDeviceGetAttribute": (place, word, word),
            "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), word),
            "cuCtxPushCurrent_v2": (place,),
            "cuCtxPopCurrent_v2": (place,),
            "cuCtxGetCurrent": (POINTER(c_void_p),),
            "cuCtxSynchronize": (),
            "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
            "cuModuleGetFunction": (POINTER(c_void_p), place, c_char_p),
            "cuFuncSetAttribute": (place, word, word),
            "cuPointerGetAttribute": (place, word, c_uint64),
            "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
            "cuMemFree_v2": (c_uint64,),
            "cuMemcpyHtoD_v2": (c_uint64, place, c_size_t),
            "cuMemcpyDtoH_v2": (place, c_uint64, c_size_t),
            "cuLaunchKernelEx": (place, place, place, place),
            "cuTensorMapEncodeTiled": (place, word, c_uint, *[place] * 5, *[word] * 4),
        }
        self.functions: dict[str, Any] = {n: self._made(n, kind) for n, kind in kinds.items()}
        self.memory: dict[int, Any] = {}

    @property
    def context(self) -> int:
        """What is current in this thread."""
        return self.stack[-1]

    @context.setter
    def context(self, handle: int) -> None:
        self.stack[-1] = handle

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack = [CONTEXT]
        stack: list[int] = self.thread.stack
        return stack

    def _made(self, name: str, kinds: tuple[Any, ...]) -> Any:
        body = getattr(self, "_" + name.removeprefix("cu").removesuffix("_v2"))

        def called(*given: Any) -> int:
            if name != "cuCtxGetCurrent":
                self.calls.append(name)
            return body(*given) or 0

        return ctypes.PYFUNCTYPE(c_int, *kinds)(called)

    def library(self) -> Any:
        """What `ctypes.CDLL` gives of the driver's library."""
        return SimpleNamespace(**self.functions)

    # -- the driver's functions; each gives a CUresult, None for success

    def _GetErrorString(self, error: int, place: Any) -> None:
        place[0] = b"told by the driver"

    def _Init(self, flags: int) -> None:
        pass

    def _DeviceGet(self, place: int, number: int) -> int:
        if not 0 <= number < len(self.devices):
            return FAILED
        _int_at(place).value = number
        return 0

    def _DeviceGetAttribute(self, place: int, which: int, number: int) -> None:
        major, minor = self.devices[number].capability
        told = {"multiprocessors": self.multiprocessors - number, "major": major, "minor": minor}
        _int_at(place).value = told[ATTRIBUTES[which]]

    def _DevicePrimaryCtxRetain(self, place: Any, number: int) -> None:
        place[0] = CONTEXT + number

    def _CtxPushCurrent(self, context: int) -> None:
        self.stack.append(context)

    def _CtxPopCurrent(self, place: int) -> None:
        self.stack.pop()

    def _CtxGetCurrent(self, place: Any) -> None:
        place[0] = self.context

    def _CtxSynchronize(self) -> None:
        pass

    def _ModuleLoadData(self, place: Any, image: bytes) -> None:
        self.modules.append((self.source() if self.source else image.decode(), self.context))
        place[0] = len(self.modules)

    def _ModuleGetFunction(self, place: Any, module: int, name: bytes) -> None:
        source, context = self.modules[module - 1]
        self.kernels.append(Loaded(name.decode(), annotations(source, name.decode()), context))
        place[0] = len(self.kernels)

    def _FuncSetAttribute(self, function: int, which: int, value: int) -> None:
        self.kernels[function - 1].dynamic_shared_bytes = value

    def _PointerGetAttribute(self, place: int, which: int, address: int) -> None:
        _int_at(place).value = self.placed.get(address, 0)

    def _MemAlloc(self, place: Any, size: int) -> None:
        memory = ctypes.create_string_buffer(size)
        place[0] = ctypes.addressof(memory)
        self.memory[place[0]] = memory

    def _MemFree(self, address: int) -> None:
        del self.memory[address]

    def _MemcpyHtoD(self, to: int, of: int, size: int) -> None:
        ctypes.memmove(to, of, size)

    def _MemcpyDtoH(self, to: int, of: int, size: int) -> None:
        ctypes.memmove(to, of, size)

    def _LaunchKernelEx(self, shape: int, function: int, parameters: int, _: int) -> int:
        from tileloom.runtime.driver import LaunchShape

        kernel = self.kernels[function - 1]
        told = LaunchShape.from_address(shape)
        if kernel.context != self.context or told.shared_bytes > max(kernel.dynamic_shared_bytes, 48 << 10):
            return FAILED
        places = (c_void_p * len(kernel.annotations)).from_address(parameters)
        values = tuple(
            ctypes.string_at(p or 0, 8 if a.startswith("*") else BYTES[a])
            for a, p in zip(kernel.annotations, places, strict=True)
        )
        launched = Launched(kernel.name, told.grid_x, told.block_x, told.stream, values, context=self.context)
        self.launches.append(launched)
        self.run(launched)
        return self.answer

    def _TensorMapEncodeTiled(self, place: int, kind: int, rank: int, address: int, *rest: int) -> None:
        """A map is its tensor's address, then its rank."""
        self.encoded += 1
        ctypes.memmove(place, address.to_bytes(8, "little") + rank.to_bytes(120, "little"), 128)

    # -- torch

    def device_of(self, tensor: Any) -> int:
        """Of what has no address that torch tells, the first."""
        try:
            return self.placed.get(tensor.data_ptr(), 0)
        except (AttributeError, RuntimeError):
            return 0

    def place(self, tensor: Any, number: int) -> Any:
        """The same tensor, on this device from now on."""
        self.placed[tensor.data_ptr()] = number
        return tensor

    def write_stream(self, device_type: int, device: int, place: int) -> int:
        ctypes.c_int64.from_address(place).value = self.stream_on(device)
        return 0

    def stream_on(self, device: int) -> int:
        """The current stream of a device: each has its own."""
        return self.stream + 1000 * device


def annotations(source: str, name: str) -> tuple[str, ...]:
    """Those of the parameters of a kernel in generated source."""
    functions = (x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef) and x.name == name)
    return tuple(ast.literal_eval(a.annotation) for f in functions for a in f.args.args if a.annotation)


def install_driver(patch: pytest.MonkeyPatch, *targets: CudaTarget, multiprocessors: int = 132) -> FakeCuda:
    """Put devices of these architectures in place until the test ends, for arrays of libraries other than torch."""
    from tileloom.runtime import driver, machine_code, tensor_maps

    fake = FakeCuda(targets, multiprocessors)
    for cached in (
        driver._library, driver._launch_by_shape, driver._initialised, driver._device, driver._attribute,
        driver._made_context, tensor_maps._encoder,
    ):  # fmt: skip
        cached.cache_clear()
    patch.setattr(machine_code, "toolkit_installed", lambda: True)
    patch.setattr(driver, "_functions", {})
    for module in (driver, tensor_maps):
        patch.setattr(module, "opened", lambda loader: fake.library())
    return fake


def install(
    patch: pytest.MonkeyPatch, target: CudaTarget, *others: CudaTarget, multiprocessors: int = 132
) -> FakeCuda:
    """Put devices in place until the test ends, on which torch's tensors lie. What they load is not assembled: its machine
    code is its source."""
    import torch

    from tileloom.runtime import device_arrays, device_kernel, driver, machine_code, native_call

    fake = install_driver(patch, target, *others, multiprocessors=multiprocessors)
    known = native_call._exchange(torch)
    assert known is not None
    place, word = c_void_p, c_int
    describe = ctypes.PYFUNCTYPE(word, place, place)(known[5])

    def described(tensor: Any, view: int) -> int:
        failed = describe(id(tensor), view)
        data, device = (ctypes.c_int64.from_address(view + 8 * i) for i in range(2))
        device.value = CPU_DEVICE | fake.placed.get(data.value, 0) << 32
        return cast(int, failed)

    fake.held = (
        ctypes.PYFUNCTYPE(word, ctypes.py_object, place)(described),
        ctypes.PYFUNCTYPE(word, word, word, place)(fake.write_stream),
    )
    exchange = (*known[:5], *(ctypes.cast(f, place).value for f in fake.held))
    real = driver.native_driver

    def native_driver(number: int, launches: Any) -> Any:
        made = real(number, launches)
        at = fake.native_launch or made.launch
        return native_call.Driver(
            at, made.current_context, made.encode_map, made.context, (CPU_DEVICE, number), made.refused
        )

    for module, name, value in [
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "get_device", lambda tensor: fake.device_of(tensor)),
        (device_arrays, "device_of", fake.device_of),
        (device_kernel, "device_of", fake.device_of),
        (device_kernel, "stream_of", lambda like, device: fake.stream_on(device)),
        (native_call, "_exchange", lambda torch: exchange),
        (
            machine_code,
            "machine_code",
            lambda source, name, target: SimpleNamespace(spill_bytes=0, cubin=source.encode()),
        ),
        (driver, "native_driver", native_driver),
    ]:
        patch.setattr(module, name, value)
    return fake
