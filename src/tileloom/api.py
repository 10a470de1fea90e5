"""The Python interface: load a program, compile a kernel, call it, ask it why (DESIGN 6)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .arguments import Arguments, Array, alternatives, bind
from .compiler.calls import check_call, extents_of
from .compiler.interpreter.elements import NUMPY
from .compiler.options import RUNNING_SCALE, Options
from .compiler.remarks import Remark
from .compiler.schedule import Fuse, Schedule
from .compiler.target import CPU, CudaTarget, Target, target
from .compiler.target import TARGETS as NAMED_TARGETS
from .compiler.tensor_ir import Graph
from .compiler.tile_kernel import TilesKernel
from .dsl.diagnostics import TileError
from .dsl.records import dataclass
from .dsl.suggest import did_you_mean
from .dsl.syntax import ProgramKernel, Verbatim
from .dsl.types import NAMES, DType
from .execution import CannotRun, Run, gpu_target, interpret, interpret_module, why_no_gpu
from .programs import load, parse
from .runtime.arrays import deliver
from .runtime.forks import ForkedLock, cached_property
from .runtime.host import host
from .runtime.ready import CallKey, Ready, call_key
from .variants import Variant, Variants

if TYPE_CHECKING:
    from .bench import Benchmark
    from .compiler.explain import Explanation
    from .compiler.pipeline import Compilation
    from .runtime.device_kernel import DeviceKernel, DeviceReady
    from .runtime.launch import Kernel
    from .runtime.native_call import Call as NativeCall

__all__ = ["CompiledKernel", "Explained", "TileError", "compile", "load", "parse"]

CUDA_NAMES = "cuda:sm_ followed by 75, 80, 86, 89, 90a, 100a or 120"
TARGETS = f"`cpu`, `interp`, `cuda` for the GPU that is here, or one by name: {CUDA_NAMES}"
NAMED_OPTIONS = (RUNNING_SCALE,)
"""Inexact rules that are off unless named."""
REMEMBERED_CALLS, NATIVE_CALLS = 256, 8
Recognising = Callable[
    [Sequence[Any], Mapping[str, Any], Sequence[Any]], tuple[tuple[object, ...], list[int]] | None
]


def compile(
    kernel: ProgramKernel,
    target: str | None = None,
    schedule: Schedule | Verbatim | str | None = None,
    fuse: Fuse = "auto",
    precise: bool = False,
    deterministic: bool = False,
    check_indices: bool = False,
    options: Sequence[str] = (),
) -> CompiledKernel:
    """A callable for one kernel; code is made at its first call, for the element types of the arrays.

    `target` is `cpu` (the default), `interp` (the interpreter) or a CUDA target; `schedule` a `Schedule`, one of a program's
    `schedules`, or its text. Raises `TileError` for what the text or the schedule does not allow and ValueError for
    contradicting options.
    """
    if not isinstance(kernel, ProgramKernel):
        raise TypeError(f'compile takes a kernel, program["name"], not a {type(kernel).__name__}')
    if fuse not in ("auto", "all", "none"):
        raise ValueError(f"fuse={fuse!r}; it is 'auto', 'all' or 'none'")
    unknown = [name for name in options if name not in NAMED_OPTIONS]
    if unknown:
        raise ValueError(f"no option is called {unknown[0]!r}; there is {', '.join(NAMED_OPTIONS)}")
    if check_indices and target not in (None, "interp"):
        raise ValueError(
            f"check_indices=True: only the target 'interp' checks indices so far, not {target!r}"
        )
    stated = _stated(schedule)
    chosen = Options(
        fuse=fuse,
        precise=precise,
        deterministic=deterministic,
        check_indices=check_indices,
        named=tuple(options),
    )
    if stated is not None:
        stated = _agreed(stated, kernel, fuse)
        target = target or stated.target
    return CompiledKernel(kernel, target or ("interp" if check_indices else "cpu"), chosen, stated)


def _stated(schedule: Schedule | Verbatim | str | None) -> Schedule | None:
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    from .compiler.schedule_text import parse_item, parse_schedule

    return parse_schedule(schedule) if isinstance(schedule, str) else parse_item(schedule.span)


def _agreed(schedule: Schedule, kernel: ProgramKernel, fuse: Fuse) -> Schedule:
    """The schedule with `fuse` filled in. Raises ValueError where it says otherwise or is for another kernel."""
    name = kernel.kernel.name.name
    if schedule.kernel != name:
        raise ValueError(
            f"the schedule `{schedule.name}` is for the kernel `{schedule.kernel}`, not for `{name}`"
        )
    if fuse != "auto" and schedule.fuse not in ("auto", fuse):
        raise ValueError(
            f"fuse={fuse!r}, but the schedule `{schedule.name}` says `fuse {schedule.fuse}`; leave one out"
        )
    return replace(schedule, fuse=fuse) if fuse != "auto" else schedule


@dataclass(frozen=True)
class Explained:
    """Facts about a compilation; as text, what `tileloom explain` prints."""

    facts: Explanation

    def __str__(self) -> str:
        from .render import explanation_text

        return explanation_text(self.facts)


@dataclass
class CompiledKernel:
    """A kernel that can be called with NumPy arrays and CPU tensors; one for a CUDA target also with arrays that lie on
    the device (torch, CuPy, Numba, `__cuda_array_interface__`), in place and on their library's current stream.

    Code is made for the element types and the compile-time extents of a call, and used again for every other size.
    """

    kernel: ProgramKernel
    target: str
    options: Options
    stated_schedule: Schedule | None = None
    _ready: dict[CallKey | None, Ready] = field(default_factory=dict, repr=False)
    _kernels: dict[CallKey, Kernel] = field(default_factory=dict, repr=False)
    _device_ready: dict[CallKey, DeviceReady] = field(default_factory=dict, repr=False)
    _native: tuple[NativeCall, ...] = field(default=(), repr=False)
    """The latest calls on a device that came again, each of which says itself whether a call is like it."""
    _lock: ForkedLock = field(default_factory=ForkedLock, repr=False)
    _told_of_copies: bool = field(default=False, repr=False)
    call_remarks: tuple[Remark, ...] = field(default=(), repr=False)
    """What was found of calls on a device, which `explain` tells after what was decided of the code."""

    def __post_init__(self) -> None:
        self.machine = machine(self.target)
        _check_schedule(self.stated_schedule, self.machine)
        self._variants = Variants(self.kernel, self.machine, self.options, self.stated_schedule)
        self._of_others: dict[Target, Variants] = {}

    @cached_property
    def naive(self) -> CompiledKernel:
        """The same kernel with `fuse none`: one launch for each statement, intermediates in memory."""
        return CompiledKernel(self.kernel, self.target, replace(self.options, fuse="none"))

    def __repr__(self) -> str:
        return f"<{self.name} for {self.target}, of {self.kernel.program.file.source.name}>"

    @property
    def name(self) -> str:
        return self.kernel.kernel.name.name

    # ------------------------------------------------------------ calling

    def __call__(self, /, *positional: Any, out: Any = None, **named: Any) -> Any:
        """Run on arrays and numbers, by place or by name; outputs in their declared order, one alone as itself.

        Parameters declared `inout` are updated in place; `out=` takes the array, or tuple of arrays, to write instead.
        Raises TypeError and ValueError, naming argument, value and what is accepted, before anything is written.
        """
        for native in self._native:
            found = native(positional, named, out)
            if found is not NotImplemented:
                return found
        if self.machine.is_cuda:
            return self._on_device(positional, named, out)
        outs = () if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        key = call_key(positional, named, outs) if out is None or outs else None
        ready = self._ready.get(key)
        if ready is not None:
            values = (*positional, *named.values())
            if out is None:
                return ready(values)
            if ready.into(values, outs):
                return outs if len(outs) > 1 else outs[0]
        result = self._checked(positional, named, out)
        if key is not None and ready is None and self.target == "cpu":
            self._remember(key, positional, named, outs)
        return result

    def _on_device(self, positional: Sequence[Any], named: Mapping[str, Any], out: Any) -> Any:
        """A call for a CUDA target: on the device's own arrays in place, on others by way of copies."""
        values = (*positional, *named.values()) if named else positional
        outs = () if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        if out is not None and not outs and self.kernel.kernel.outputs:
            raise ValueError(f"{self.name}: out holds no array; leave it out for new ones")
        known = self._recognised(positional, named, outs)
        if known is not None:
            ready = self._device_ready.get(known[0])
            if ready is not None and ready.apart(known[1]):
                found = ready(values, known[1])
                self._make_native(ready, positional, named, out)
                return found if out is None else out
        from .runtime.device_arrays import on_device

        if not any(on_device(x) for x in values):
            self._tell_of_copies()
            return self._checked(positional, named, out)
        kernel = self._device_kernel(positional, named)
        if known is None:
            return kernel(*positional, out=out, **named)
        ready = kernel.device_ready(positional, named, outs)
        _bounded(self._device_ready)[known[0]] = ready
        result = ready((*values, *outs), known[1])
        return result if out is None else out

    def _make_native(
        self, ready: DeviceReady, positional: Sequence[Any], named: Mapping[str, Any], out: Any
    ) -> None:
        """A call that came twice will come again: from now on by a native function, if there is a way to one."""
        if ready.native is None:
            ready.native = (self._native_of(positional, named, out),)
        (native,) = ready.native
        if native is not None and native not in self._native:
            self._native = (native, *self._native[: NATIVE_CALLS - 1])

    def _native_of(self, positional: Sequence[Any], named: Mapping[str, Any], out: Any) -> NativeCall | None:
        from .runtime.native_call import NoWay

        try:
            return self._device_kernel(positional, named).native(positional, named, out)
        except NoWay as reason:
            text = f"{self.name}: calls go through Python, which takes 5 µs longer: {reason}"
            remark = Remark("missed", "call", "native-call", text)
            if remark not in self.call_remarks:
                self.call_remarks = (*self.call_remarks, remark)
            return None

    def _tell_of_copies(self) -> None:
        """Once for each kernel."""
        if self._told_of_copies:
            return
        self._told_of_copies = True
        warnings.warn(
            f"{self.name}: its arrays lie in the host's memory, so each call copies them to the device and the results "
            "back; arrays on the device (torch, CuPy, Numba) are used in place",
            stacklevel=4,
        )

    @cached_property
    def _recognised(self) -> Recognising:
        from .runtime.device_kernel import recognised

        return recognised

    def _device_kernel(self, positional: Sequence[Any], named: Mapping[str, Any]) -> DeviceKernel:
        """What runs calls with device arrays of these shapes and element types."""
        from .runtime.device_arrays import described, device_of, imported, on_device

        call = bind(self.kernel.kernel, positional, named, lambda x, what: described(imported(x), what))
        number = next(device_of(x) for x in (*positional, *named.values()) if on_device(x))
        return self._settled(call, self._variants_on(number)).on_device(number)

    def _variants_on(self, number: int) -> Variants:
        """For the target `cuda`, those of the architecture of this device, which need not be the first one's."""
        found = gpu_target(number) if self.target == "cuda" else None
        if found is None or found == self.machine:
            return self._variants
        _check_schedule(self.stated_schedule, found)
        with self._lock:
            made = Variants(self.kernel, found, self.options, self.stated_schedule)
            return self._of_others.setdefault(found, made)

    def _checked(self, positional: Sequence[object], named: Mapping[str, object], out: object) -> Any:
        """A call of which nothing is known yet."""
        call = bind(self.kernel.kernel, positional, named)
        if self.target == "cpu":
            return self._kernel(call)(*positional, out=out, **named)
        graph = self.graph(call.dtypes)
        if self.target == "interp":
            return self._on_copies(graph, self._interpreter(graph, call), call, out)
        return self._on_copies(graph, self._settled(call).on_gpu, call, out)

    def _interpreter(self, graph: Graph, call: Arguments) -> Run:
        if not isinstance(self.kernel, TilesKernel):
            return partial(interpret, graph, check_indices=True)
        module = self.kernel.module(extents_of(graph, call.shapes, call.scalars))
        return partial(interpret_module, module, check_indices=True)

    def _settled(self, call: Arguments, variants: Variants | None = None) -> Variant:
        """The variant for a call, after the checks; from those for this target, or others."""
        graph = self.graph(call.dtypes)
        extents = extents_of(graph, call.shapes, call.scalars)
        check_call(graph, extents, call.scalars)
        return self._variant(call.dtypes, extents, variants)

    def _kernel(self, call: Arguments) -> Kernel:
        """What runs calls with arrays of these shapes and element types on the CPU."""
        key = (*call.shapes.values(), *call.dtypes.values(), *call.scalars.items())
        found = self._kernels.get(key)
        if found is None:
            found = self._settled(call).on_cpu
            _bounded(self._kernels)[key] = found
        return found

    def _remember(
        self, key: CallKey, positional: Sequence[object], named: Mapping[str, object], outs: Sequence[object]
    ) -> None:
        """Calls like this one, which has succeeded, need no checks again."""
        ready = self._kernel(bind(self.kernel.kernel, positional, named)).ready(positional, named, outs)
        if ready is not None:
            _bounded(self._ready)[key] = ready

    def _on_copies(self, graph: Graph, run: Run, call: Arguments, out: object) -> Any:
        extents = extents_of(graph, call.shapes, call.scalars)
        check_call(graph, extents, call.scalars)
        targets = _outputs(graph, extents, call, out)
        results = run(call.tensors, {**call.scalars, **extents})
        for name, tensor in graph.tensors.items():
            if tensor.inout:
                np.copyto(call.tensors[name], results[name])
        for name, array in targets.items():
            np.copyto(array, results[name])
        outputs = tuple(targets.get(name, deliver(results[name], call.first)) for name in graph.outputs)
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    # ------------------------------------------------------------ compiling

    def graph(self, dtypes: Mapping[str, DType]) -> Graph:
        """The kernel's tensor IR as written, for these dtype parameters."""
        return self._variants.graph(dtypes)

    def compilation(self, *positional: object, **named: object) -> Compilation:
        """The compilation that a call with these arguments would use: arrays, or extents (and dtype parameters) by name.

        Extents not given come from the kernel's `example`. Raises ValueError where one is missing.
        """
        dtypes, extents = self._sizes(positional, named)
        return self._variant(dtypes, extents).compilation

    def _sizes(
        self, positional: Sequence[object], named: Mapping[str, object]
    ) -> tuple[dict[str, DType], dict[str, int]]:
        if positional or any(isinstance(v, np.ndarray) for v in named.values()):
            call = bind(self.kernel.kernel, positional, named)
            return call.dtypes, extents_of(self.graph(call.dtypes), call.shapes, call.scalars)
        return self._stated_sizes(named)

    def _stated_sizes(self, named: Mapping[str, object]) -> tuple[dict[str, DType], dict[str, int]]:
        allowed = alternatives(self.kernel.kernel)
        dtypes = {t: choices[0] for t, choices in allowed.items()}
        dtypes |= {t: _dtype(t, named[t]) for t in allowed if t in named}
        graph = self.graph(dtypes)
        known = {*graph.extents, *graph.scalars, *allowed}
        unknown = [n for n in named if n not in known]
        if unknown:
            raise ValueError(f"{self.name} has no extent `{unknown[0]}`; it has {', '.join(graph.extents)}")
        values = {**graph.example, **named}
        missing = [e for e in graph.extents if e not in values]
        if missing:
            raise ValueError(
                f"{self.name}: extent `{missing[0]}` is missing, and no `example` line states it"
            )
        return dtypes, {e: _extent(self.name, e, values[e]) for e in graph.extents}

    def _variant(
        self, dtypes: Mapping[str, DType], extents: Mapping[str, int], variants: Variants | None = None
    ) -> Variant:
        """The variant for these element types and sizes, made where there is none."""
        with self._lock:
            return (variants or self._variants).find(dtypes, extents)

    # ------------------------------------------------------------ looking

    @property
    def stages(self) -> Mapping[str, str]:
        """The text of every stage, by name, of the latest compilation; for the `example` sizes where nothing ran yet."""
        return self._latest().snapshots

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest compilation, with every choice filled in."""
        return self._latest().schedule

    def _latest(self) -> Compilation:
        latest = self._variants.latest()
        return latest.compilation if latest else self.compilation()

    def explain(self, *positional: object, **named: object) -> Explained:
        """What was derived and decided for a call with these arguments: arrays, or extents by name."""
        if isinstance(self.kernel, TilesKernel):
            raise ValueError(
                f"{self.name} is a tile program, written by hand: nothing was derived or decided that could be explained"
            )
        dtypes, extents = self._sizes(positional, named)
        from .compiler.explain import explain
        from .compiler.pipeline import compile_kernel

        made = self._variant(dtypes, extents).compilation
        if made.sizes != extents:  # a variant serves many sizes; predictions are for the ones asked about
            made = self._variants.compile(dtypes, extents)
        naive = compile_kernel(
            self.kernel, self.machine, extents, dtypes=dtypes, options=replace(self.options, fuse="none")
        )
        told = replace(made, remarks=(*made.remarks, *self.call_remarks))
        return Explained(explain(told, naive, threads_of(self.machine)))

    def benchmark(
        self, *positional: object, against: Sequence[str] | None = None, **named: object
    ) -> Benchmark:
        """Measure a call against others: `naive`, `numpy` or `FILE.py:FUNCTION`; print the result for a table.

        By default these are `naive` and `numpy`, of which a tile program has neither.

        Raises ValueError for targets that run no compiled code here, and `bench.WrongResult` where a result is wrong.
        """
        from .bench import Benchmark, Case, check_measured, run_case, variants

        check_measured(self, "benchmark")
        call = bind(self.kernel.kernel, positional, named)
        graph = self.graph(call.dtypes)
        extents = extents_of(graph, call.shapes, call.scalars)
        check_call(graph, extents, call.scalars)
        case = Case(self.kernel, graph, call.dtypes, extents, call.scalars, call.tensors)
        result = Benchmark(self.name)
        result.rows += run_case(case, variants(self, self.naive, case, against))
        return result


# ---------------------------------------------------------------- details

Held = TypeVar("Held")


def _check_schedule(stated: Schedule | None, machine: Target) -> None:
    """Raises ValueError where a schedule is for another target."""
    if stated is not None and stated.target != machine.name:
        raise ValueError(f"the schedule `{stated.name}` is for {stated.target}, the target is {machine.name}")


def _bounded(remembered: dict[Any, Held]) -> dict[Any, Held]:
    """The same, emptied where it has grown long: calls whose numbers change each time are not worth remembering."""
    if len(remembered) >= REMEMBERED_CALLS:
        remembered.clear()
    return remembered


def machine(name: str) -> Target:
    """The target whose code is generated; the interpreter's stages are those of the CPU. Raises ValueError."""
    if name == "interp":
        return CPU
    if name == CPU.name:
        return host()
    if name == "cuda":
        found = gpu_target()
        if found is None:
            raise CannotRun(
                f"target 'cuda': {why_no_gpu()}; name the target, as in 'cuda:sm_90a', to look at its code"
            )
        return found
    try:
        return target(name)
    except TileError:
        near = did_you_mean(name, (*NAMED_TARGETS, "interp", "cuda"))
        meant = f" ({near})" if near else ""
        raise ValueError(f"no target is called {name!r}{meant}; targets are {TARGETS}") from None


def threads_of(machine: Target) -> int:
    """Threads that run a kernel at once; on a GPU, whose blocks keep nothing in memory, 1."""
    if isinstance(machine, CudaTarget):
        return 1
    from .runtime.threads import threads

    return threads()


def _outputs(graph: Graph, extents: Mapping[str, int], call: Arguments, out: object) -> dict[str, Array]:
    """The arrays that `out=` gives for the outputs. Raises TypeError and ValueError."""
    if out is None:
        return {}
    arrays = out if isinstance(out, tuple | list) else (out,)
    if len(arrays) != len(graph.outputs):
        raise TypeError(
            f"{graph.name}: out= has {len(arrays)} arrays; the outputs are {', '.join(graph.outputs)}"
        )
    return dict(_checked_outputs(graph, extents, call, arrays))


def _checked_outputs(
    graph: Graph, extents: Mapping[str, int], call: Arguments, arrays: Sequence[object]
) -> Iterator[tuple[str, Array]]:
    from .inputs import shape_of

    for (name, tensor), array in zip(graph.outputs.items(), arrays, strict=True):
        shape = shape_of(tensor.shape, extents, call.scalars)
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{graph.name}: out= for `{name}` is a {type(array).__name__}; a NumPy array is needed"
            )
        if array.shape != shape or array.dtype != NUMPY[tensor.dtype]:
            raise ValueError(
                f"{graph.name}: out= for `{name}` is {array.dtype} {array.shape}; {NUMPY[tensor.dtype]} {shape} is needed"
            )
        if not array.flags.writeable:
            raise ValueError(f"{graph.name}: out= for `{name}` is read-only")
        yield name, array


def _dtype(name: str, value: object) -> DType:
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    raise ValueError(f"`{name}` is {value!r}; an element type is needed: {', '.join(NAMES)}")


def _extent(kernel: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{kernel}: extent `{name}` is {value!r}; an integer of at least 0 is needed")
    return int(value)
