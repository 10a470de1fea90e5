"""Kernels on NumPy arrays, which are copied to the device and back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..compiler.evaluate import Number
from ..compiler.interpreter.elements import NUMPY
from ..compiler.interpreter.tile import bind_extents, integer
from ..compiler.tile_ir import TileModule, TileProgram
from .driver import device, done, start, synchronize
from .launches import Call, Source, packed_strides

HostArray = np.ndarray[Any, Any]


def run_module(
    module: TileModule,
    source: Source,
    tensors: Mapping[str, HostArray],
    scalars: Mapping[str, Number],
    number: int = 0,
) -> dict[str, HostArray]:
    """Run every program of a module on a device on copies of NumPy arrays; outputs and inouts by name."""
    names = {**scalars, **bind_extents(module, tensors, scalars)}
    with device(number), _Copies(tensors) as copies:
        for program in module.programs:
            copies.hold(program, names)
        shapes = {n: x.shape for n, x in copies.arrays.items()}
        strides = {n: packed_strides(s) for n, s in shapes.items()}
        call = Call(source, number, [*shapes], shapes, strides, {}, names)
        for launch in filter(None, map(call.launch, module.programs)):
            for slot, i in launch.slots:
                slot.value = copies.addresses[call.names[i]]
            start(launch, 0)
        synchronize()
        scratch = {p.name for p in module.scratch}
        written = {p.name for q in module.programs for p in q.params if p.mode != "in"} - scratch
        return {name: copies.back(name) for name in written}


class _Copies:
    """Device copies of host arrays, packed and aligned, freed at the end."""

    def __init__(self, given: Mapping[str, HostArray]) -> None:
        self.given = given
        self.arrays: dict[str, HostArray] = {}
        self.addresses: dict[str, int] = {}

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        for address in self.addresses.values():
            done("cuMemFree_v2", address)

    def hold(self, program: TileProgram, names: Mapping[str, Number]) -> None:
        """Copy what a program reads and make what it writes, where that is not there yet."""
        for p in program.params:
            if p.name in self.arrays:
                continue
            shape = tuple(integer(x, names) for x in p.shape)
            host = np.array(self.given[p.name]) if p.name in self.given else np.zeros(shape, NUMPY[p.dtype])
            host = np.ascontiguousarray(host).reshape(shape)
            address = ctypes.c_uint64()
            done("cuMemAlloc_v2", ctypes.byref(address), max(host.nbytes, 1))
            self.arrays[p.name], self.addresses[p.name] = host, address.value
            if host.nbytes:
                done("cuMemcpyHtoD_v2", address.value, host.ctypes.data, host.nbytes)

    def back(self, name: str) -> HostArray:
        host = self.arrays[name]
        if host.nbytes:
            done("cuMemcpyDtoH_v2", host.ctypes.data, self.addresses[name], host.nbytes)
        return host
