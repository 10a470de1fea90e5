"""Memory of a call beyond its inputs and outputs: scratch tensors, what generated code holds, growth of the process."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compiler.tile_ir import Expr, TileModule
from ..dsl.records import dataclass

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Counter:
    """Bytes of scratch tensors: allocated now, and at most."""

    now_bytes: int = 0
    peak_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self.now_bytes += n_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)


_counters: list[Counter] = []


@contextmanager
def counting() -> Iterator[Counter]:
    """Count the scratch tensors of all kernels that run inside the `with`."""
    counter = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


class Scratch:
    """Scratch tensors of one call, by name."""

    def __init__(self) -> None:
        self._held: dict[str, npt.NDArray[Any]] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        made = self._held[name] = np.empty(shape, dtype)
        for c in _counters:
            c.add(made.nbytes)
        return made

    def release(self, name: str) -> None:
        gone = self._held.pop(name)
        for c in _counters:
            c.add(-gone.nbytes)

    def release_all(self) -> None:
        for name in list(self._held):
            self.release(name)


def workspace_bytes(module: TileModule, extents: Mapping[str, int], threads: int) -> int:
    """What a call needs beyond inputs and outputs, from the module's text: the buffers of `threads` tasks at once, and
    the scratch tensors that live at the same time."""
    from ..compiler.codegen import cpu  # the whole code generator, which a call does without

    buffers = cpu.workspace(module)
    live: dict[str, int] = {}
    peak = 0
    for i, program in enumerate(module.programs):
        for s in module.scratch:
            if any(p.name == s.name for p in program.params):
                live[s.name] = _bytes(s.shape, s.dtype.bytes, extents)
        tasks = (sum(b.dtype.bytes * math.prod(b.sizes) for b in task) for task in buffers[program.name])
        peak = max(peak, sum(live.values()) + threads * max(tasks, default=0))
        for name in [n for n in live if last_use(module, n) == i]:
            del live[name]
    return peak


def _bytes(sizes: tuple[int | Expr, ...], itemsize: int, extents: Mapping[str, int]) -> int:
    from ..compiler.interpreter.tile import integer

    return math.prod(s if isinstance(s, int) else integer(s, extents) for s in sizes) * itemsize


def last_use(module: TileModule, name: str) -> int:
    """The position of the last program that takes a tensor."""
    return max(i for i, p in enumerate(module.programs) if any(x.name == name for x in p.params))


@dataclass(frozen=True)
class Growth:
    """Peak bytes of one call beyond what existed before it. `resident_bytes` is None where the system does not tell."""

    scratch_bytes: int
    resident_bytes: int | None


def measure(call: Callable[[], object]) -> Growth:
    """Run `call` once and measure; its results count too while it holds them. Compile before, or that is measured.

    Garbage is collected before: were it collected during the call, the process could shrink by as much as the call
    takes, and its growth would seem to be nothing.
    """
    gc.collect()
    can_reset = _reset_peak()
    before = _status_bytes("VmRSS")
    with counting() as counter:
        call()
    peak = _status_bytes("VmHWM") if can_reset else None
    resident = None if peak is None or before is None else max(0, peak - before)
    return Growth(counter.peak_bytes, resident)


def _reset_peak() -> bool:
    """Start the process's peak resident size anew (proc(5), clear_refs, value 5)."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith(f"{key}:"))
    return next((int(words[1]) * 1024 for words in found), None)
