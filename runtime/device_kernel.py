"""The call path of a kernel compiled for a CUDA device, on arrays that lie there (DESIGN 6).

A first call checks everything, chooses for each program of the kernel the variant that sizes, strides and alignment allow,
and prepares its launches; later calls of the same shapes fill in addresses and launch, on the stream that the arrays'
library works on. Nothing is copied and nothing waits, so a call can be captured into a CUDA graph.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ..compiler.evaluate import Number
from ..compiler.tensor_ir import Graph
from ..compiler.tile_ir import TileModule
from ..dsl.records import dataclass
from ..dsl.types import DType
from . import driver
from .arrays import is_array, is_torch, overlaps, writable
from .device_arrays import (
    DeviceArray,
    Maker,
    address_of,
    described,
    device_of,
    imported,
    maker,
    on_device,
    part_of_key,
    stream_of,
)
from .launches import Call, Launch, Source, packed_strides
from .native_call import Call as NativeCall
from .native_call import Settled, native_call
from .parameters import Parameters, Plan
from .ready import NUMBERS


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
            try:
                address: int = x.data_ptr()
                key.append((x.shape, x.stride(), x.dtype, device, address & 15))
            except RuntimeError:  # a sparse one, which the checks refuse
                return None
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


@dataclass
class DeviceReady:
    """A call that is settled but for addresses. `places` says where among its values each array stands; `made` what is
    allocated: outputs, then tensors between launches."""

    device: int
    places: tuple[int, ...]
    made: tuple[tuple[tuple[int, ...], DType], ...]
    outputs: int
    launches: tuple[Launch, ...]
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    makers: tuple[Maker, ...] | None = field(default=None, repr=False)
    written: tuple[int, ...] = ()
    """Which of the arrays that are given are written."""
    reach: tuple[tuple[int, int], ...] = ()
    """The bytes that each of them spans, from its first element on."""
    native: tuple[NativeCall | None] | None = field(default=None, repr=False)
    """The native function of such calls, None where there is no way to one; not looked for yet."""

    def __post_init__(self) -> None:
        self.context = driver.Context(self.device)
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
            with driver.device(self.device):
                self._start(addresses, stream)

    def _start(self, addresses: Sequence[int], stream: int) -> None:
        for launch in self.launches:
            for slot, i in launch.slots:
                slot.value = addresses[i]
            driver.start(launch, stream)


class DeviceKernel(Parameters):
    """A compiled kernel for arrays on a device: call it with the parameters of `graph.order`, by position or by name.

    Results are new arrays of the first array argument's kind, on its device; `out=` takes the array (or tuple) to write
    instead. Raises `TypeError` and `ValueError` before anything is launched, `RuntimeError` with the driver's words.
    """

    def __init__(self, graph: Graph, module: TileModule, source: Source) -> None:
        super().__init__(graph, module)
        self.source = source

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        outs = () if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        ready = self.device_ready(args, kwargs, outs)
        values = tuple(map(imported, (*args, *kwargs.values(), *outs)))
        found = ready(values, [address_of(x) if on_device(x) else 0 for x in values])
        return found if out is None else out

    def device_ready(
        self, positional: Sequence[Any], named: Mapping[str, Any], outs: Sequence[Any] = ()
    ) -> DeviceReady:
        """What runs calls that are `recognised` as this one: everything is checked, variants are chosen and launches
        prepared. `outs` are to be written, and come after a call's other values."""
        given = self._bind(tuple(positional), dict(named))
        if not self.graph.tensors:
            raise TypeError(
                f"{self.graph.name} takes no array, so nothing says on which device it should run"
            )
        tensors = {
            n: self._device_array(given[n], self._what(n), t.inout) for n, t in self.graph.tensors.items()
        }
        targets = self._targets(outs)
        device = self._one_device({**tensors, **targets})
        views = {n: self._view(n, x) for n, x in tensors.items()}
        written = {n: described(x, f"{self.graph.name}: out for `{n}`") for n, x in targets.items()}
        scalars = self._scalars(given)
        plan = self._plan({n: x.shape for n, x in views.items()}, scalars)
        self._check_targets(views, written, plan)
        order = [*self.graph.order[: len(positional)], *named]
        return DeviceReady(
            device,
            places=(*map(order.index, tensors), *range(len(order), len(order) + len(outs))),
            made=tuple(self._made(plan, given=written)),
            outputs=len(plan.outputs) - len(outs),
            launches=self._launches(device, {**views, **written}, plan, scalars),
            written=tuple(
                i for i, n in enumerate((*views, *written)) if n in written or self.graph.tensors[n].inout
            ),
            reach=tuple(x.reach() for x in (*views.values(), *written.values())),
        )

    def native(self, positional: Sequence[Any], named: Mapping[str, Any], out: Any) -> NativeCall:
        """The native function of calls like this one, which has succeeded. Raises `NoWay`."""
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
        return native_call(settled, driver.native_driver(ready.device, [x.what for x in ready.launches]))

    # -- checks

    def _device_array(self, value: Any, what: str, written: bool) -> Any:
        if not is_array(value):
            raise TypeError(
                f"{what} is a {type(value).__name__}; an array on the CUDA device is what it takes"
            )
        if not on_device(value):
            raise TypeError(
                f"{what} is {'a NumPy array' if isinstance(value, np.ndarray) else f'a {type(value).__name__}'} in the "
                "host's memory, and other arguments lie on the device; move it there first"
            )
        if written and is_torch(value) and value.is_neg():
            raise ValueError(
                f"{what} is a view that torch has yet to negate; a plain tensor is what it takes"
            )
        return imported(value)

    def _targets(self, outs: Sequence[Any]) -> dict[str, Any]:
        """The arrays to write, by output."""
        if not outs:
            return {}
        if len(outs) != len(self.graph.outputs):
            names = ", ".join(self.graph.outputs)
            raise ValueError(
                f"{self.graph.name}: out holds {len(outs)} arrays; it takes {len(self.graph.outputs)}, for {names}"
            )
        return {
            n: self._device_array(x, f"{self.graph.name}: out for `{n}`", written=True)
            for x, n in zip(outs, self.graph.outputs, strict=True)
        }

    def _made(self, plan: Plan, given: Mapping[str, DeviceArray]) -> Iterator[tuple[tuple[int, ...], DType]]:
        """What a call allocates: outputs that are not given, then tensors between launches."""
        yield from ((s, self.graph.outputs[n].dtype) for n, s in plan.outputs.items() if n not in given)
        yield from ((plan.scratch[s.name], s.dtype) for s in self.module.scratch)

    def _launches(
        self, device: int, known: Mapping[str, DeviceArray], plan: Plan, scalars: Mapping[str, Number]
    ) -> tuple[Launch, ...]:
        """Arrays are counted as they come: those that are known, then those that are made, which are packed."""
        made = {n: s for n, s in {**plan.outputs, **plan.scratch}.items() if n not in known}
        call = Call(
            self.source,
            device,
            names=[*known, *made],
            shapes={**{n: x.shape for n, x in known.items()}, **made},
            strides={n: x.strides for n, x in known.items()}
            | {n: packed_strides(s) for n, s in made.items()},
            aligned={n: x.address % 16 == 0 for n, x in known.items()},
            numbers={**plan.extents, **scalars},
        )
        return tuple(filter(None, map(call.launch, self.module.programs)))

    def _one_device(self, arrays: Mapping[str, Any]) -> int:
        devices = {n: device_of(x) for n, x in arrays.items()}
        if len(set(devices.values())) > 1:
            told = ", ".join(f"`{n}` on device {d}" for n, d in devices.items())
            raise ValueError(f"{self.graph.name}: all arrays have to lie on one device; here {told}")
        return next(iter(devices.values()))

    def _view(self, name: str, value: Any) -> DeviceArray:
        tensor, view = self.graph.tensors[name], described(value, self._what(name))
        if view.dtype is not tensor.dtype:
            raise TypeError(f"{self._what(name)} holds {view.dtype}; {tensor.dtype} is what it takes")
        if view.ndim != len(tensor.shape):
            raise ValueError(
                f"{self._what(name)} has {view.ndim} axes, shape {view.shape}; it takes {len(tensor.shape)}"
            )
        return view

    def _check_targets(
        self, views: Mapping[str, DeviceArray], targets: Mapping[str, DeviceArray], plan: Plan
    ) -> None:
        for name, x in targets.items():
            dtype = self.graph.outputs[name].dtype
            if x.shape != plan.outputs[name] or x.dtype is not dtype:
                raise ValueError(
                    f"{self.graph.name}: out for `{name}` is {x.dtype} {x.shape}; the result is {dtype} "
                    f"{plan.outputs[name]}"
                )
        written = {f"`{n}`": views[n] for n, t in self.graph.tensors.items() if t.inout}
        written |= {f"out for `{n}`": x for n, x in targets.items()}
        for what, array in written.items():
            writable(array.bits, f"{self.graph.name}: {what}")
            for name, other in {**{f"`{n}`": x for n, x in views.items()}, **written}.items():
                if name != what and overlaps(array.bits, other.bits):
                    raise ValueError(
                        f"{self.graph.name}: {what} shares memory with {name}; a separate array is what it takes"
                    )
