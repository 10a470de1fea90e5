"""The call path of a kernel compiled for a CUDA device, on arrays that lie there (DESIGN 6).

A first call checks everything, chooses for each program of the kernel the variant that sizes, strides and alignment allow,
and prepares its launches; later calls of the same shapes fill in addresses and launch, on the stream that the arrays'
library works on. Nothing is copied and nothing waits, so a call can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..compiler.evaluate import Number
from ..compiler.interpreter.elements import NUMPY
from ..compiler.target import CudaTarget
from ..compiler.tensor_ir import Graph
from ..compiler.tile_ir import TileModule, TileProgram
from ..dsl.types import DType
from . import cuda
from .arrays import Array, overlaps
from .device_arrays import (
    Maker,
    address_of,
    described,
    device_of,
    empty,
    imported,
    maker,
    on_device,
    part_of_key,
    stream_of,
)
from .launch import Kernel, Plan
from .native_call import Call, Settled, native_call
from .ready import NUMBERS
from .tensor_maps import MapSlot, can_be_mapped

Slot = tuple[Any, int]
"""Where an address goes, and the number of the array it belongs to."""


def recognised(
    positional: Sequence[Any], named: Mapping[str, Any], outs: Sequence[Any]
) -> tuple[tuple[object, ...], list[int]] | None:
    """The same for calls that need the same checks and launches, and the addresses of this one's arrays (0 for numbers):
    positional, named, then `outs`. None where a call cannot be remembered."""
    key: list[Any] = [len(outs), *named]
    addresses: list[int] = []
    torch = sys.modules.get("torch")
    plain = torch.Tensor if torch is not None else None
    values = (*positional, *named.values(), *outs) if named or outs else positional
    for x in values:
        kind = type(x)
        if kind is plain:  # asked for nothing twice: this is most of what a call costs on the host
            device = x.get_device()
            if device < 0 or x.is_neg():  # a view that torch has yet to negate is made plain by the checks
                return None
            address: int = x.data_ptr()
            key.append((x.shape, x.stride(), x.dtype, device, address & 15))
        elif kind in NUMBERS:
            address = 0
            key.append((kind, x or str(x)))  # 0.0 and -0.0 are equal
        else:
            part = part_of_key(x)
            if part is None:
                return None
            address = address_of(x)
            key.append(part)
        addresses.append(address)
    return tuple(key), addresses


@dataclass(frozen=True)
class Launch:
    """One launch, settled but for addresses. `pointers` is the argument array that the driver reads, `held` its memory;
    `shape` the grid, the block and the stream."""

    function: Any
    shape: cuda.LaunchShape
    pointers: Any
    slots: tuple[Slot, ...]
    held: tuple[Any, ...] = field(repr=False)
    what: str
    reference: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", ctypes.byref(self.shape))


@dataclass
class DeviceReady:
    """A call that is settled but for addresses. `places` says where among its values each array stands; `made` what is
    allocated: outputs, then tensors between launches."""

    device: int
    places: tuple[int, ...]
    made: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    outputs: int
    launches: tuple[Launch, ...]
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    makers: tuple[Maker, ...] | None = field(default=None, repr=False)
    written: tuple[int, ...] = ()
    """Which of the arrays that are given are written."""
    reach: tuple[tuple[int, int], ...] = ()
    """The bytes that each of them spans, from its first element on."""
    native: tuple[Call | None] | None = field(default=None, repr=False)
    """The native function of such calls, None where there is no way to one; not looked for yet."""

    def __post_init__(self) -> None:
        self.context = cuda.Context(self.device)
        self.seen_apart: Sequence[int] = ()  # the latest addresses found so

    def apart(self, addresses: Sequence[int]) -> bool:
        """Does what is written lie apart from all else? Addresses decide that, which a key does not hold."""
        if not self.written or addresses == self.seen_apart:
            return True
        starts = [addresses[i] for i in self.places]
        spans = [(a + low, a + high) for a, (low, high) in zip(starts, self.reach, strict=True)]
        found = all(
            i == j or spans[i][1] <= low or high <= spans[i][0]
            for i in self.written
            for j, (low, high) in enumerate(spans)
        )
        if found:
            self.seen_apart = addresses
        return found

    def __call__(self, values: Sequence[Any], addresses: Sequence[int]) -> Any:
        """Run on these values, whose addresses were asked for already."""
        like = values[self.places[0]]
        if self.makers is None:  # all calls of one key give arrays of one kind
            self.makers = tuple(maker(shape, dtype, like) for shape, dtype in self.made)
        where = [addresses[i] for i in self.places]
        if not self.makers:
            self.start(where, stream_of(like, self.device))
            return None
        made = [make(like if model is None else model) for make, model in self.makers]
        where += map(address_of, made)
        self.start(where, stream_of(like, self.device))
        return made[0] if self.outputs == 1 else tuple(made[: self.outputs]) or None

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on arrays at these addresses. The driver copies the arguments, so the lock is held for microseconds."""
        with self.lock:
            if self.context.is_current():
                self._start(addresses, stream)
                return
            with cuda.device(self.device):
                self._start(addresses, stream)

    def _start(self, addresses: Sequence[int], stream: int) -> None:
        for launch in self.launches:
            for slot, i in launch.slots:
                slot.value = addresses[i]
            cuda.start(launch, stream)


class DeviceKernel(Kernel):
    """A compiled kernel for arrays on a device: call it with the parameters of `graph.order`, by position or by name.

    Results are new arrays of the first array argument's kind, on its device; `out=` takes the array (or tuple) to write
    instead. Raises `TypeError` and `ValueError` before anything is launched, `RuntimeError` with the driver's words.
    """

    def __init__(self, graph: Graph, module: TileModule, source: str, target: CudaTarget) -> None:
        self.graph = graph
        self.module = module
        self.source = source
        self.target = target
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._variants = cuda.variants(source)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        given = self._bind(args, kwargs)
        tensors = {n: self._device_array(given[n], self._what(n)) for n in self.graph.tensors}
        outs = self._outs(out)
        ready = self._settled_call(tensors, self._scalars(given), outs)
        first = next(iter(tensors.values()))
        arrays = [*tensors.values()]
        made = [empty(shape, dtype, first) for shape, dtype in ready.made]
        made[: len(outs)] = outs
        ready.start([address_of(x) for x in (*arrays, *made)], stream_of(first, ready.device))
        results = made[: ready.outputs]
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def device_ready(
        self, positional: Sequence[Any], named: Mapping[str, Any], outs: Sequence[Any] = ()
    ) -> DeviceReady:
        """What runs calls that are `recognised` as this one, which has succeeded; `outs` come after their other values."""
        given = self._bind(tuple(positional), dict(named))
        order = [*self.graph.order[: len(positional)], *named]
        ready = self._settled_call({n: given[n] for n in self.graph.tensors}, self._scalars(given), outs)
        places = tuple(order.index(n) for n in self.graph.tensors)
        places += tuple(range(len(order), len(order) + len(outs)))
        updated = [i for i, t in enumerate(self.graph.tensors.values()) if t.inout]
        arrays = [given[n] for n in self.graph.tensors] + list(outs)
        return DeviceReady(
            ready.device, places, ready.made[len(outs) :], ready.outputs - len(outs), ready.launches,
            written=(*updated, *range(len(self.graph.tensors), len(arrays))),
            reach=tuple(_reach(described(x, "an array")) for x in arrays),
        )  # fmt: skip

    def native(self, positional: Sequence[Any], named: Mapping[str, Any], out: Any) -> Call | None:
        """The native function of calls like this one, which has succeeded; None where there is no way to one."""
        several = type(out) is tuple
        outs: tuple[Any, ...] = out if several else () if out is None else (out,)
        ready = self.device_ready(positional, named, outs)
        values = (*positional, *named.values(), *outs)
        like = values[ready.places[0]]
        made = tuple(maker(shape, dtype, like) for shape, dtype in ready.made)
        settled = Settled(
            values=values,
            names=tuple(named),
            outs=len(outs),
            out_is_tuple=several,
            like=ready.places[0],
            makers=made,
            results=ready.outputs,
            launches=ready.launches,
            numbering=(*ready.places, *range(len(values), len(values) + len(made))),
            spans=dict(zip(ready.places, ready.reach, strict=True)),
            written=frozenset(ready.places[i] for i in ready.written),
        )
        return native_call(settled, cuda.native_driver(ready.device, [x.what for x in ready.launches]))

    def _small(self, extents: Mapping[str, int]) -> tuple[bool, ...]:
        return ()  # a device's threads need no waking

    # -- checks

    def _device_array(self, value: Any, what: str) -> Any:
        if not on_device(value):
            raise TypeError(
                f"{what} is {'a NumPy array' if isinstance(value, np.ndarray) else f'a {type(value).__name__}'} in the "
                "host's memory, and other arguments lie on the device; move it there first"
            )
        return imported(value)

    def _outs(self, out: Any) -> list[Any]:
        if out is None:
            return []
        given = list(out) if isinstance(out, tuple | list) else [out]
        if len(given) != len(self.graph.outputs):
            names = ", ".join(self.graph.outputs)
            raise ValueError(
                f"{self.graph.name}: out holds {len(given)} arrays; it takes {len(self.graph.outputs)}, for {names}"
            )
        return [
            self._device_array(x, f"{self.graph.name}: out for `{n}`")
            for x, n in zip(given, self.graph.outputs, strict=True)
        ]

    def _settled_call(
        self, tensors: Mapping[str, Any], scalars: Mapping[str, Number], outs: Sequence[Any]
    ) -> DeviceReady:
        """Check everything, choose variants and prepare the launches."""
        if not tensors:
            raise TypeError(
                f"{self.graph.name} takes no array, so nothing says on which device it should run"
            )
        device = self._one_device({**tensors, **dict(zip(self.graph.outputs, outs, strict=False))})
        views = {n: self._view(n, x) for n, x in tensors.items()}
        plan = self._plan({n: x.shape for n, x in views.items()}, scalars)
        targets = {n: described(x, f"out for `{n}`") for n, x in zip(self.graph.outputs, outs, strict=False)}
        self._check_targets(views, targets, plan)
        made = [(s, NUMPY[self.graph.outputs[n].dtype]) for n, s in plan.outputs.items()]
        made += [(plan.scratch[s.name], NUMPY[s.dtype]) for s in self.module.scratch]
        names = [*views, *plan.outputs, *(s.name for s in self.module.scratch)]
        shapes = {**dict(zip(names[len(views) :], made, strict=True))}
        strides = {n: tuple(s // x.itemsize for s in x.strides) for n, x in {**views, **targets}.items()}
        strides |= {n: cuda.packed_strides(s) for n, (s, _) in shapes.items() if n not in targets}
        aligned = {n: x.__array_interface__["data"][0] % 16 == 0 for n, x in {**views, **targets}.items()}
        sizes = {n: x.shape for n, x in {**views, **targets}.items()} | {n: s for n, (s, _) in shapes.items()}
        call = _Call(self, device, names, sizes, strides, aligned, {**plan.extents, **scalars})
        launches = [call.launch(p) for p in self.module.programs]
        return DeviceReady(
            device,
            tuple(range(len(views))),
            tuple(made),
            len(plan.outputs),
            tuple(x for x in launches if x is not None),
        )

    def _one_device(self, arrays: Mapping[str, Any]) -> int:
        devices = {n: device_of(x) for n, x in arrays.items()}
        if len(set(devices.values())) > 1:
            told = ", ".join(f"`{n}` on device {d}" for n, d in devices.items())
            raise ValueError(f"{self.graph.name}: all arrays have to lie on one device; here {told}")
        return next(iter(devices.values()))

    def _view(self, name: str, value: Any) -> Array:
        tensor, view = self.graph.tensors[name], described(value, self._what(name))
        if view.dtype != NUMPY[tensor.dtype]:
            raise TypeError(f"{self._what(name)} holds {view.dtype}; {NUMPY[tensor.dtype]} is what it takes")
        if view.ndim != len(tensor.shape):
            raise ValueError(
                f"{self._what(name)} has {view.ndim} axes, shape {view.shape}; it takes {len(tensor.shape)}"
            )
        return view

    def _check_targets(self, views: Mapping[str, Array], targets: Mapping[str, Array], plan: Plan) -> None:
        for name, x in targets.items():
            dtype = NUMPY[self.graph.outputs[name].dtype]
            if x.shape != plan.outputs[name] or x.dtype != dtype:
                raise ValueError(
                    f"{self.graph.name}: out for `{name}` is {x.dtype} {x.shape}; the result is {dtype} "
                    f"{plan.outputs[name]}"
                )
        written = {f"`{n}`": views[n] for n, t in self.graph.tensors.items() if t.inout}
        written |= {f"out for `{n}`": x for n, x in targets.items()}
        for what, array in written.items():
            if not array.flags.writeable:
                raise ValueError(f"{self.graph.name}: {what} is read-only; a writable array is what it takes")
            for name, other in {**{f"`{n}`": x for n, x in views.items()}, **written}.items():
                if name != what and overlaps(array, other):
                    raise ValueError(
                        f"{self.graph.name}: {what} shares memory with {name}; a separate array is what it takes"
                    )


def _reach(x: Array) -> tuple[int, int]:
    """The first and the past-the-last byte of an array, from its first element on."""
    ends = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)] if x.size else []
    return sum(min(0, e) for e in ends), sum(max(0, e) for e in ends) + x.itemsize


HELD: dict[DType, Callable[[Any], Any]] = {
    DType.F64: ctypes.c_double,
    DType.I64: ctypes.c_int64,
    DType.BOOL: ctypes.c_bool,
    **dict.fromkeys((DType.I32, DType.I16, DType.I8, DType.U8), ctypes.c_int32),
}
"""How a scalar is passed; f32, f16 and bf16, rounded to their type, as a float."""


@dataclass(frozen=True)
class _Call:
    """What decides about the launches of a call: sizes, strides in elements and alignment to 16 bytes by tensor, numbers."""

    kernel: DeviceKernel
    device: int
    names: list[str]
    shapes: Mapping[str, tuple[int, ...]]
    strides: Mapping[str, tuple[int, ...]]
    aligned: Mapping[str, bool]
    numbers: Mapping[str, Number]

    def launch(self, program: TileProgram) -> Launch | None:
        """The launch of a program; None where it has no work."""
        variant = next(v for v in self.kernel._variants[program.name] if self.fits(program, v))
        sizes = [int(self.numbers[e]) for e in program.extents]
        blocks = variant.blocks(sizes, cuda.multiprocessors(self.device))
        if blocks <= 0:
            return None
        code = cuda.machine_code(self.kernel.source, variant.name, self.kernel.target)
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
        with cuda.current(self.device):
            function = cuda.function(code.cubin, variant.name, variant.shared_bytes, self.device)
        return Launch(
            ctypes.c_void_p(function),
            cuda.LaunchShape.of(blocks, variant.threads, variant.shared_bytes, variant.secondary),
            pointers,
            (*tensors, *maps),
            (*values, *maps),
            what + "dynamic shared memory)",
        )

    def fits(self, program: TileProgram, v: cuda.Variant) -> bool:
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
