"""The compilations of one kernel: made where there is none for a call, kept in memory and in the cache folder.

A variant is made for the element types of a call, for the values of the extents that are compiled in and for the classes of
all other sizes; its decisions are predicted for the first sizes of these classes. Tiles of products by warpgroups, on which
depends how many multiprocessors the last tasks leave idle, are those of each call's own sizes. Classes and tiles whose
decisions come to the same code share it. The folder holds what is needed to run a variant; what explains it is made again
when somebody asks.
"""

from __future__ import annotations

import pickle
import platform
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any

from . import __version__
from .compiler.options import Options
from .compiler.schedule import Schedule, print_schedule
from .compiler.target import CudaTarget, Target
from .compiler.tensor_ir import Graph
from .compiler.tensor_text import print_graph
from .compiler.tile_kernel import TilesKernel
from .dsl.records import dataclass
from .dsl.syntax import ProgramKernel
from .dsl.types import DType
from .execution import Run, on_gpu, runnable
from .programs import graph_of
from .runtime.cache import Store, digest, digest_of_files, store
from .runtime.collecting import collecting_paused
from .runtime.forks import cached_property
from .runtime.versions import version

if TYPE_CHECKING:
    from .compiler.pipeline import Compilation
    from .compiler.product_tiles import ProductTiles
    from .compiler.product_time import Tiling
    from .compiler.tile_ir import TileModule
    from .runtime.device_kernel import DeviceKernel
    from .runtime.launch import Kernel
    from .runtime.machine_code import Assembled

SIZE_CLASSES = (0, 1, 8, 64, 512, 2048, 4096, 8192)
"""The largest size of each class; one more holds what is beyond."""
DEVICE_SIZE_CLASSES = (0, 1, 8, 16, 32, *(n << i for i in range(11) for n in (64, 96)))
"""The same on a device, where tiles have to suit the number of multiprocessors: up to 64 · 2^10 two for each doubling."""
LONGEST_NAME = 200


@dataclass(frozen=True)
class Record:
    """What the cache folder keeps of a compilation: the tile program as its text says it, which takes six times as long to
    parse as to unpickle, the code, the sizes it was predicted for, and what tiles of its products were chosen from."""

    sizes: dict[str, int]
    statics: dict[str, int]
    module: TileModule
    source: str
    products: tuple[ProductTiles, ...] = ()

    def fits(self, extents: Mapping[str, int], machine: Target) -> bool:
        """Are the values compiled in those of a call, and the tiles of products those that its sizes ask for?"""
        if any(extents[e] != n for e, n in self.statics.items()):
            return False
        return self.sizes == extents or self.tilings(self.sizes, machine) == self.tilings(extents, machine)

    def tilings(self, sizes: Mapping[str, int], machine: Target) -> list[Tiling]:
        """Of each product, the tiles chosen at these sizes."""
        return [p.best(sizes, machine) for p in self.products] if isinstance(machine, CudaTarget) else []


@dataclass
class Variant:
    """One compilation, made ready to run when it first runs."""

    graph: Graph
    machine: Target
    record: Record
    compile: Callable[[Mapping[str, int]], Compilation] = field(repr=False)
    schedule: Schedule | None = None

    @cached_property
    def compilation(self) -> Compilation:
        return self.compile(self.record.sizes)

    @property
    def module(self) -> TileModule:
        return self.record.module

    @cached_property
    def on_gpu(self) -> Run:
        return on_gpu(self.module, self.record.source, self.machine, self._spills)

    def _spills(self, made: Assembled, preferred: bool) -> None:
        """Refused where a schedule's tiles come to that in the preferred code, and told of else."""
        told = refuse_spilled(made, self.schedule if preferred else None)
        help = (
            "smaller tiles in a schedule may be faster"
            if preferred
            else "other sizes, or arrays that are packed and aligned to 16 bytes, run other code"
        )
        warnings.warn(f"{told}; {help}", stacklevel=2)

    def on_device(self, number: int) -> DeviceKernel:
        """For arrays that lie on the device of this number. Raises `CannotRun`."""
        runnable(self.machine, number)
        return self._device_kernel

    @cached_property
    def _device_kernel(self) -> DeviceKernel:
        from .runtime.device_kernel import DeviceKernel
        from .runtime.launches import Source

        assert isinstance(self.machine, CudaTarget)
        return DeviceKernel(self.graph, self.module, Source(self.record.source, self.machine, self._spills))

    @cached_property
    def on_cpu(self) -> Kernel:
        from .runtime.kernels import build
        from .runtime.launch import Kernel

        return Kernel(self.graph, self.module, build(self.record.source))


def refuse_spilled(made: Assembled, schedule: Schedule | None) -> str:
    """What machine code keeps in memory, in words. Raises `TileError` where a schedule states its tiles."""
    from .compiler.schedule_check import refuse_tiles

    told = f"`{made.name}` keeps values of a thread in memory: {made.spill_bytes} bytes written and read"
    if schedule is not None and schedule.tiles:
        raise refuse_tiles(schedule, f"{told}, with the tiles of `{schedule.name}`")
    return told


@dataclass
class Variants:
    """All variants of a kernel under one set of options. Not for several threads at once: the caller locks."""

    kernel: ProgramKernel
    machine: Target
    options: Options
    schedule: Schedule | None
    _graphs: dict[tuple[DType, ...], Graph] = field(default_factory=dict, repr=False)
    _made: dict[tuple[tuple[DType, ...], tuple[int, ...]], list[tuple[Record, Variant]]] = field(
        default_factory=dict, repr=False
    )
    """By element types and classes of sizes: what was compiled for them, and the variant that has its code."""
    _last: Variant | None = field(default=None, repr=False)

    def graph(self, dtypes: Mapping[str, DType]) -> Graph:
        """The kernel's tensor IR as written, for these dtype parameters."""
        key = tuple(dtypes.values())
        if key not in self._graphs:
            self._graphs[key] = graph_of(self.kernel, dtypes)
        return self._graphs[key]

    def latest(self) -> Variant | None:
        return self._last

    def find(self, dtypes: Mapping[str, DType], extents: Mapping[str, int]) -> Variant:
        """The variant for these element types and sizes: from memory, from the cache folder, or compiled."""
        kinds, classes = tuple(dtypes.values()), tuple(size_classes(extents, self.machine).values())
        several = self._made.setdefault((kinds, classes), [])
        found = next((v for record, v in several if record.fits(extents, self.machine)), None)
        if found is None:
            made = self._stored_or_made(dtypes, extents)
            self._last = found = self._with_code_of(made, kinds)
            several.append((made.record, found))
        return found

    def _with_code_of(self, made: Variant, kinds: tuple[DType, ...]) -> Variant:
        """A variant of other classes that has the same code, which then is not compiled again; else the new one."""
        others = (v for (k, _), several in self._made.items() if k == kinds for _, v in several)
        same = (made.record.source, made.record.statics)
        return next((v for v in others if (v.record.source, v.record.statics) == same), made)

    def compile(self, dtypes: Mapping[str, DType], extents: Mapping[str, int]) -> Compilation:
        from .compiler.pipeline import compile_kernel  # with sympy, which a stored variant does not wait for

        with collecting_paused():
            return compile_kernel(
                self.kernel,
                self.machine,
                extents,
                dtypes=dtypes,
                options=self.options,
                schedule=self.schedule,
            )

    def _stored_or_made(self, dtypes: Mapping[str, DType], extents: Mapping[str, int]) -> Variant:
        graph = self.graph(dtypes)
        folder, group = store(), self._group(graph, size_classes(extents, self.machine))
        with folder.making(group):
            record = read(folder, group, extents, self.machine)
            if record is not None:
                return Variant(
                    graph, self.machine, record, lambda sizes: self.compile(dtypes, sizes), self.schedule
                )
            made = self._made_variant(graph, dtypes, extents)
            write(folder, group, made.record, self.machine)
        return made

    def _made_variant(self, graph: Graph, dtypes: Mapping[str, DType], extents: Mapping[str, int]) -> Variant:
        from .compiler.tile_text import parse_module

        made = self.compile(dtypes, extents)
        products = tuple(p.product for p in made.plans if p.product is not None)
        module = parse_module(made.snapshots["tile"])
        record = Record(made.sizes, made.statics, module, made.source, products)
        variant = Variant(
            graph, self.machine, record, lambda sizes: self.compile(dtypes, sizes), self.schedule
        )
        variant.compilation = made
        return variant

    def _group(self, graph: Graph, classes: Mapping[str, int]) -> str:
        """All that a compilation depends on but the values compiled in, digested."""
        stated = print_schedule(self.schedule) if self.schedule is not None else ""
        by_hand = _text_of(self.kernel) if isinstance(self.kernel, TilesKernel) else ""
        text = (
            print_graph(graph),
            by_hand,
            repr(self.options),
            stated,
            repr(self.machine),
            repr(sorted(classes.items())),
        )
        return f"kernel-{digest(*text, *_facts())}"


def _text_of(kernel: TilesKernel) -> str:
    from .compiler.tile_text import print_module

    return print_module(kernel.text.module)


def size_classes(extents: Mapping[str, int], machine: Target) -> dict[str, int]:
    """The class of each extent: sizes of one class share their decisions."""
    largest = DEVICE_SIZE_CLASSES if machine.is_cuda else SIZE_CLASSES
    return {e: bisect_left(largest, n) for e, n in extents.items()}


# ---------------------------------------------------------------- the cache folder


def read(folder: Store, group: str, extents: Mapping[str, int], machine: Target) -> Record | None:
    """The stored variant for these sizes. Its name states the values compiled in."""
    for name in folder.names(group):
        if _fits(name, extents):
            content = folder.get(group, name)
            record = None if content is None else restored(content)
            if record is not None and record.fits(extents, machine):
                return record
    return None


def write(folder: Store, group: str, record: Record, machine: Target) -> None:
    """Under a name that tells variants of a group apart: the values compiled in, then tiles."""
    stated = [f"{e}={n}" for e, n in record.statics.items()]
    tiles = [f"{t.rows}x{t.columns}x{t.parts}" for t in record.tilings(record.sizes, machine)]
    name = ",".join([*stated, *tiles]) or "any"
    if len(name.encode()) < LONGEST_NAME:
        folder.put(group, stored(record), name)


def stored(record: Record) -> bytes:
    """What the folder keeps. A module nested too deeply for `pickle` stands there as its text, which is parsed again."""
    try:
        return pickle.dumps(record)
    except RecursionError:
        from .compiler.tile_text import print_module

        module = print_module(record.module)
        return pickle.dumps((record.sizes, record.statics, module, record.source, record.products))


def restored(content: bytes) -> Record:
    """What `stored` wrote; only this user may be able to write what is read."""
    kept: Record | tuple[Any, ...] = pickle.loads(content)
    if isinstance(kept, Record):
        return kept
    from .compiler.tile_text import parse_module

    sizes, statics, module, source, products = kept
    return Record(sizes, statics, parse_module(module), source, products)


def _fits(name: str, extents: Mapping[str, int]) -> bool:
    """Are the values that a name states those of a call?"""
    stated = (x.partition("=") for x in name.split(",") if "=" in x)
    return all(str(extents.get(e)) == n for e, _, n in stated)


@cache
def _facts() -> tuple[str, ...]:
    """What decides how a text is compiled, besides the text."""
    versions = (f"{name} {version(name)}" for name in ("sympy", "mpmath", "numpy"))
    python = platform.python_implementation(), platform.python_version()
    own = digest_of_files("dsl/**/*.py", "compiler/**/*.py")
    return __version__, *versions, *python, own
