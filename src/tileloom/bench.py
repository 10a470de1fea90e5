"""A kernel against others: right first, then time in turn, then memory (DESIGN 9). The clockwork is `runtime.bench`."""

from __future__ import annotations

import os
import runpy
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from .accuracy import DERIVATION, compare, largest_tensor, longest_sum, relative_tolerance
from .api import CompiledKernel, threads_of
from .arguments import Array, Scalar
from .compiler.calls import check_call
from .compiler.cost import Prediction, module_cost, predict_module
from .compiler.explain import task_bytes
from .compiler.pipeline import Compilation
from .compiler.tensor_ir import Graph
from .compiler.tile_kernel import TilesKernel
from .dsl.records import dataclass
from .dsl.syntax import ProgramKernel
from .dsl.types import DType
from .execution import interpret, interpret_module
from .inputs import made, shape_of
from .numpy_program import NumpyProgram
from .runtime import bench as clockwork
from .runtime.bench import WrongResult
from .runtime.memory import measure

ORACLE_ELEMENTS = 1 << 25
"""Elements of the largest intermediate up to which the oracle runs at the measured size: 256 MiB in float64."""
FEWEST_ROUNDS, MOST_ROUNDS = 5, 30
SECONDS = 1.5
"""Measuring time for each variant at each size, unless the fewest rounds take longer."""

Call = Callable[..., Any]
Outputs = tuple[Array, ...]


@dataclass(frozen=True)
class Case:
    """One kernel at one choice of sizes, with inputs. `numbers` are scalars and declared extents."""

    kernel: ProgramKernel
    graph: Graph
    dtypes: Mapping[str, DType]
    extents: Mapping[str, int]
    numbers: Mapping[str, Scalar]
    tensors: Mapping[str, Array]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.extents)

    def words(self) -> str:
        return ", ".join(f"{n} = {v}" for n, v in self.extents.items())

    def inputs(self) -> dict[str, Any]:
        """Arguments of one call; parameters that it updates are fresh copies."""
        tensors = {n: x.copy() if self.graph.tensors[n].inout else x for n, x in self.tensors.items()}
        return {**tensors, **self.numbers}

    def outputs(self, call: Call) -> Outputs:
        """What one call gives: results, then updated parameters."""
        arguments = self.inputs()
        returned = call(**arguments)
        several = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
        return (*several, *(arguments[n] for n, t in self.graph.tensors.items() if t.inout))

    def oracle(self) -> Outputs:
        """The same in float64; of a tile program, as it is written."""
        if isinstance(self.kernel, TilesKernel):
            module = self.kernel.module(self.extents)
            return tuple(interpret_module(module, self.tensors, self.numbers).values())
        found = interpret(self.graph, self.tensors, self.numbers, precision="float64")
        return tuple(found.values())

    def longest_sum(self) -> int:
        """Of a tile program, whose loops say nothing of sums, the longest extent."""
        if isinstance(self.kernel, TilesKernel):
            return max(self.extents.values(), default=1)
        return longest_sum(self.graph, self.extents, self.numbers)

    def output_bytes(self) -> int:
        shapes = ((t, shape_of(t.shape, self.extents, self.numbers)) for t in self.graph.outputs.values())
        return sum(t.dtype.bytes * int(np.prod(shape, dtype=np.int64)) for t, shape in shapes)


@dataclass(frozen=True)
class Variant:
    """Something to measure, `call(**arguments)`; `compilation` where it is tileloom's own code."""

    name: str
    call: Call
    compilation: Compilation | None = None


@dataclass(frozen=True)
class Measured:
    """One variant at one size. `row` has the times of a call, its error relative to the largest output and, as `peak_bytes`,
    what it needs beyond inputs and outputs: tensors between launches and the tiles of all threads, or what NumPy allocates.

    `resident_bytes` is what the process grew by, outputs deducted; `first_call_s` includes compiling; `checked_at` has the
    sizes at which it was compared with float64.
    """

    sizes: dict[str, int]
    row: clockwork.Row
    first_call_s: float
    resident_bytes: int | None
    checked_at: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        own = {
            "sizes": self.sizes,
            "first_call_s": self.first_call_s,
            "resident_bytes": self.resident_bytes,
            "checked_at": self.checked_at,
        }
        return {**self.row.as_json(), **own}


def busy() -> str | None:
    """Why times would say little now: others use the machine. A library whose threads spin suffers most."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    processors = os.cpu_count() or 1
    if load <= processors:
        return None
    return (
        f"{processors} processors with {load:.1f} programs waiting for them: do not trust these times, "
        "NumPy's least of all"
    )


@dataclass
class Benchmark:
    """All rows of one benchmark. As text, a table, after a warning where the machine was busy before."""

    kernel: str
    rows: list[Measured] = field(default_factory=list)
    busy: str | None = field(default_factory=busy)

    def as_json(self, command: Sequence[str] | None = None) -> dict[str, Any]:
        """The recorded form (DESIGN 9)."""
        made = clockwork.document([m.row for m in self.rows], command)
        made["conditions"] |= {"tolerance": DERIVATION, "warm_up": "one call at the measured size"}
        return {**made, "kernel": self.kernel, "rows": [m.as_json() for m in self.rows]}

    def __str__(self) -> str:
        from .render import bench_table, plain

        warning = f"warning: {self.busy}\n" if self.busy else ""
        return warning + plain(bench_table(self.rows))


# ---------------------------------------------------------------- what to measure


def check_measured(kernel: CompiledKernel, what: str) -> None:
    """Raises ValueError where a kernel's times would not be those of compiled code on this machine's processor."""
    if kernel.target == "interp" or kernel.machine.is_cuda:
        gpu = " (benchmarks/gpu.py measures on a GPU)" if kernel.machine.is_cuda else ""
        raise ValueError(
            f"{what} runs compiled code on this machine's processor; the target is {kernel.target}: "
            f"leave it out or give `cpu`{gpu}"
        )


def check_names(against: Sequence[str]) -> None:
    """Raises ValueError for a word that names nothing to compare with; reads no file."""
    for name in against:
        if name not in ("naive", "numpy") and not name.rpartition(":")[0].endswith(".py"):
            raise ValueError(
                f"there is nothing called {name!r} to compare with; naive, numpy or FILE.py:FUNCTION"
            )


def variants(
    kernel: CompiledKernel, naive: CompiledKernel, case: Case, against: Sequence[str] | None
) -> list[Variant]:
    """The kernel itself, then `naive`, `numpy` or a function of a Python file (`FILE.py:FUNCTION`), as asked for.

    None stands for `naive` and `numpy` where there are such: not of a tile program. A word that comes twice counts once, and
    functions of one name are called as they were asked for. Raises ValueError for another word.
    """
    by_hand = isinstance(case.kernel, TilesKernel)
    if against is None:
        against = () if by_hand else ("naive", "numpy")
    check_names(against)
    absent = [name for name in against if by_hand and name in ("naive", "numpy")]
    if absent:
        raise ValueError(
            f"{kernel.name} is a tile program, written by hand: there is no {absent[0]} version of it; compare with "
            "FILE.py:FUNCTION"
        )
    own = Variant("compiled", kernel, kernel.compilation(**case.inputs()))
    others = {word: _other(word, naive, case) for word in against}
    seen = Counter(v.name for v in (own, *others.values()))
    return [own, *(v if seen[v.name] == 1 else replace(v, name=word) for word, v in others.items())]


def _other(name: str, naive: CompiledKernel, case: Case) -> Variant:
    if name == "naive":
        return Variant(name, naive, naive.compilation(**case.inputs()))
    if name == "numpy":
        return Variant(name, NumpyProgram(case.graph).called)
    file, _, function = name.rpartition(":")
    return Variant(function, function_of(file, function))


def function_of(file: str, name: str) -> Call:
    """A function of a Python file. Raises ValueError where there is none."""
    try:
        found = runpy.run_path(file).get(name)
    except OSError as reason:
        raise ValueError(f"cannot read {file}: {reason.strerror}") from None
    if not callable(found):
        raise ValueError(f"{file} defines no function {name!r}")
    return found  # type: ignore[no-any-return]


# ---------------------------------------------------------------- one case


def run_case(
    case: Case, chosen: Sequence[Variant], say: Callable[[str], None] = lambda text: None
) -> list[Measured]:
    """Compare every variant with float64, then measure. Raises `WrongResult` before anything is timed.

    Where the oracle would need too much memory it runs at a smaller size, and at the measured size the variants are
    compared with the first one.
    """
    say("compiling")
    started = {v.name: _seconds(lambda v=v: case.outputs(v.call)) for v in chosen}  # type: ignore[misc]
    say("comparing with float64")
    small = checked_case(case)
    if small is not case:
        clockwork.compare(
            small.words(), _timed(small, chosen, 1), small.oracle(), rounds=1, error=scaled_error
        )
    reference = case.oracle() if small is case else case.outputs(chosen[0].call)
    say("measuring")
    again = max(_seconds(lambda v=v: case.outputs(v.call)) for v in chosen)  # type: ignore[misc]
    rows = clockwork.compare(
        case.words(),
        _timed(case, chosen, 1 if small is case else 2),
        reference,
        rounds=max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(SECONDS / again))),
        error=scaled_error,
        moved_bytes=sum(x.nbytes for x in case.tensors.values()) + case.output_bytes(),
    )
    return [_measured(case, v, row, started[v.name], small) for v, row in zip(chosen, rows, strict=True)]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed(case: Case, chosen: Sequence[Variant], margin: float) -> list[clockwork.Variant]:
    bound = margin * relative_tolerance(
        (t.dtype for t in (*case.graph.outputs.values(), *case.graph.tensors.values()) if t.dtype.is_float),
        case.longest_sum(),
    )
    return [clockwork.Variant(v.name, lambda v=v: case.outputs(v.call), bound) for v in chosen]  # type: ignore[misc]


def scaled_error(result: Any, reference: Sequence[Array]) -> float:
    """The largest error of each output over its largest magnitude plus 1; infinite where infinities, NaN or shapes
    differ."""
    arrays = [np.asarray(x) for x in result]
    if [x.shape for x in arrays] != [x.shape for x in reference] or any(
        x.dtype.kind in "OSU" for x in arrays
    ):
        return float("inf")
    found = [compare("", a, b, 1) for a, b in zip(arrays, reference, strict=True)]
    return max((float("inf") if c.mismatches else c.error / (c.largest + 1) for c in found), default=0.0)


def checked_case(case: Case) -> Case:
    """The case itself, or one with its longest extents halved until float64 is cheap enough."""
    extents = dict(case.extents)
    while largest_tensor(case.graph, extents, case.numbers) > ORACLE_ELEMENTS:
        longest = max(extents.values())
        extents = {e: n // 2 if n == longest else n for e, n in extents.items()}
    if extents == dict(case.extents):
        return case
    check_call(case.graph, extents, case.numbers)
    numbers = {n: extents.get(n, v) for n, v in case.numbers.items()}
    return replace(case, extents=extents, numbers=numbers, tensors=made(case.graph, extents, numbers))


def _measured(case: Case, v: Variant, row: clockwork.Row, first_s: float, small: Case) -> Measured:
    peak, resident = memory(case, v)
    predicted = _prediction(case, v)
    facts: dict[str, float | str] = {}
    if predicted is not None:
        facts = {"ms": predicted.seconds * 1e3, "binds": predicted.binds}
    complete = replace(row, flops=_flops(case, v), peak_bytes=peak, prediction=facts)
    return Measured(case.sizes, complete, first_s, resident, small.sizes)


def _flops(case: Case, v: Variant) -> float | None:
    """Of the products, as this variant runs them."""
    if v.compilation is None:
        return None
    return module_cost(v.compilation.module, case.extents, v.compilation.target).dot_flops or None


def _prediction(case: Case, v: Variant) -> Prediction | None:
    if v.compilation is None:
        return None
    c = v.compilation
    return predict_module(c.module, case.extents, c.rates, c.target)


# ---------------------------------------------------------------- memory


def memory(case: Case, v: Variant) -> tuple[int, int | None]:
    """Peak bytes of one call beyond inputs and outputs, and what the process grew by beyond them."""
    growth = measure(lambda: case.outputs(v.call))
    own = case.output_bytes()
    resident = None if growth.resident_bytes is None else max(0, growth.resident_bytes - own)
    if v.compilation is not None:
        return growth.scratch_bytes + threads_of(v.compilation.target) * task_bytes(v.compilation), resident
    return max(0, _allocated(lambda: case.outputs(v.call)) - own), resident


def _allocated(call: Callable[[], object]) -> int:
    """The most that Python and NumPy hold during a call."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def median_ms(case: Case, chosen: Sequence[Variant]) -> dict[str, float]:
    """Milliseconds a call of each variant, measured in turn, results unchecked."""
    timed = [replace(t, bound=float("inf")) for t in _timed(case, chosen, 1)]
    for v in timed:
        v.call()  # compiles
    rows = clockwork.compare(
        case.words(), timed, (), rounds=FEWEST_ROUNDS, error=lambda result, reference: 0.0
    )
    return {r.variant: r.median_ms for r in rows}


__all__ = [
    "Benchmark",
    "Case",
    "Measured",
    "Variant",
    "WrongResult",
    "check_measured",
    "check_names",
    "median_ms",
    "memory",
    "run_case",
    "variants",
]
