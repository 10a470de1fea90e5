"""A CUDA device that is not there: torch's CPU tensors lie on it, and its driver notes what is launched.

The call path runs as it does on a device, from the call to the driver's functions, and those are Python functions here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tileloom.compiler.target import CudaTarget

CONTEXT = 7
BYTES = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "boolean": 1, "map": 128}
CPU_DEVICE = 1
"""kDLCPU of DLPack."""


@dataclass(frozen=True)
class Launched:
    """One launch as the driver sees it; parameters in bytes."""

    kernel: str
    blocks: int
    threads: int
    stream: int | None
    parameters: tuple[bytes, ...]

    def address(self, place: int) -> int:
        return int.from_bytes(self.parameters[place], "little")


@dataclass
class FakeCuda:
    """What the driver has seen, and what it answers."""

    launches: list[Launched] = field(default_factory=list)
    encoded: int = 0
    context: int = CONTEXT
    stream: int = 0
    answer: int = 0
    run: Callable[[Launched], None] = lambda launched: None
    kernels: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    held: tuple[Any, ...] = ()
    native_launch: int = 0
    """The address of what native calls launch by; by default `launch`, in which Python may go on in another thread."""

    def function(self, source: str, name: str) -> int:
        """The handle of a kernel, which tells the sizes of its parameters."""
        from tileloom.runtime import cuda

        annotations = tuple(cuda.load(source)[name].py_func.__annotations__.values())
        self.kernels.append((name, annotations))
        return len(self.kernels)

    def launch(self, shape: int, function: int, parameters: int, _: int) -> int:
        from tileloom.runtime.cuda import LaunchShape

        name, annotations = self.kernels[function - 1]
        told = LaunchShape.from_address(shape)
        places = (ctypes.c_void_p * len(annotations)).from_address(parameters)
        values = tuple(
            ctypes.string_at(p or 0, 8 if a.startswith("*") else BYTES[a])
            for a, p in zip(annotations, places, strict=True)
        )
        launched = Launched(name, told.grid_x, told.block_x, told.stream, values)
        self.launches.append(launched)
        self.run(launched)
        return self.answer

    def encode(self, place: int, kind: int, rank: int, address: int, *rest: int) -> int:
        """A map is its tensor's address, then its rank."""
        self.encoded += 1
        ctypes.memmove(place, address.to_bytes(8, "little") + rank.to_bytes(120, "little"), 128)
        return 0

    def write_context(self, place: int) -> int:
        ctypes.c_int64.from_address(place).value = self.context
        return 0

    def write_stream(self, device_type: int, device: int, place: int) -> int:
        ctypes.c_int64.from_address(place).value = self.stream
        return 0


def install(patch: pytest.MonkeyPatch, target: CudaTarget, multiprocessors: int = 132) -> FakeCuda:
    """Put the device in place until the test ends."""
    import torch

    from tileloom.runtime import cuda, device_arrays, device_kernel, native_call, tensor_maps

    fake = FakeCuda()
    place, word = ctypes.c_void_p, ctypes.c_int
    launch = ctypes.PYFUNCTYPE(word, place, place, place, place)(fake.launch)
    current = ctypes.PYFUNCTYPE(word, place)(fake.write_context)
    stream = ctypes.PYFUNCTYPE(word, word, word, place)(fake.write_stream)
    kinds = [place, word, ctypes.c_uint32, *[place] * 5, *[word] * 4]
    encode = ctypes.PYFUNCTYPE(word, *kinds)(fake.encode)
    fake.held = launch, current, stream, encode
    known = native_call._exchange(torch)
    assert known is not None
    exchange = (*known[:6], ctypes.cast(stream, place).value)

    def native_driver(number: int, launches: Any) -> Any:
        made = cuda_driver(number, launches)
        at = [ctypes.cast(f, place).value or 0 for f in (launch, current, encode)]
        at[0] = fake.native_launch or at[0]
        return native_call.Driver(*at, CONTEXT, (CPU_DEVICE, number), made.refused)

    library = SimpleNamespace(cuLaunchKernelEx=launch, cuCtxGetCurrent=current)
    patch.setattr(
        ctypes, "PyDLL", lambda name, real=ctypes.PyDLL: library if name == cuda.LIBRARY else real(name)
    )
    cuda_driver = cuda.native_driver
    for module, name, value in [
        (torch.Tensor, "is_cuda", True),
        (torch.Tensor, "get_device", lambda tensor: 0),
        (device_arrays, "device_of", lambda x: 0),
        (device_kernel, "device_of", lambda x: 0),
        (device_kernel, "stream_of", lambda like, device: fake.stream),
        (native_call, "_exchange", lambda torch: exchange),
        (tensor_maps, "_encoder", lambda: encode),
        (cuda, "present", lambda number=0: target),
        (cuda, "multiprocessors", lambda number=0: multiprocessors),
        (cuda, "machine_code", lambda source, name, target: SimpleNamespace(cubin=source)),
        (cuda, "function", lambda source, name, shared, number: fake.function(source, name)),
        (cuda, "current", lambda number: nullcontext()),
        (cuda, "device", lambda number: nullcontext()),
        (cuda, "_context_handle", lambda number: CONTEXT),
        (cuda, "_launch_by_shape", lambda: launch),
        (cuda, "native_driver", native_driver),
    ]:
        patch.setattr(module, name, value)
    return fake
