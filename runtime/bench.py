"""Measuring: right first, then time. Variants of a case are timed in turn (A B A B …) in one process, and quoted as medians.

A recorded result is a JSON document: `schema_version`, commit, command, versions, device, conditions, and `rows`.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dsl.records import dataclass
from .memory import measure
from .threads import threads

SCHEMA_VERSION = 1
SHORTEST_SAMPLE_S = 20e-3
"""A shorter call is repeated within one sample, whose time is then divided: the first call after a rest, which finds caches
cold and threads asleep, takes up to 1 ms more, and is to count little. All variants of a case are repeated as often as the
shortest, so that it counts as much for each."""
LONGEST_SAMPLE_S = 80e-3
"""Longer samples than that are not made for a slow variant's sake."""
GAP_S = 2e-3
"""Rest after each sample: thread pools of other libraries spin after a call and would spoil the next one. Variants of a case
rest as long as the one that needs the most, for each sample begins colder the longer the processors have slept."""
VERSIONS = ("tileloom", "numpy", "numba", "llvmlite", "torch")


class WrongResult(AssertionError):
    """A variant's result lies outside its bound; nothing was timed."""


@dataclass(frozen=True)
class Variant:
    """A way to compute a case. `call` returns the result; `bound` is the largest error that counts as right; `rest_s` is
    how long its threads may go on spinning after a call."""

    name: str
    call: Callable[[], Any]
    bound: float
    rest_s: float = GAP_S


@dataclass(frozen=True)
class Row:
    """Timings of one variant of one case, in milliseconds a call; `samples_ms` in the order they were taken.

    `flops` and `moved_bytes` are the work of one call where known; `peak_bytes` what it needed beyond inputs and outputs.
    """

    case: str
    variant: str
    samples_ms: tuple[float, ...]
    error: float
    flops: float | None = None
    moved_bytes: float | None = None
    peak_bytes: int | None = None
    prediction: dict[str, float | str] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    def percentile_ms(self, p: float) -> float:
        return float(np.percentile(self.samples_ms, p))

    def as_json(self) -> dict[str, Any]:
        """The row as data, with what follows from it: median, p20, p80, TFLOP/s, GB/s."""
        derived: dict[str, Any] = {
            "median_ms": self.median_ms,
            "p20_ms": self.percentile_ms(20),
            "p80_ms": self.percentile_ms(80),
        }
        if self.flops is not None:
            derived["tflops"] = self.flops / self.median_ms / 1e9
        if self.moved_bytes is not None:
            derived["gb_s"] = self.moved_bytes / self.median_ms / 1e6
        return {**asdict(self), **derived}


def relative_error(result: Any, reference: Sequence[npt.NDArray[Any]]) -> float:
    """The largest |result - reference| / max(1, |reference|) over all outputs; infinite where NaN or infinities differ."""
    results = result if isinstance(result, tuple | list) else (result,)
    if len(results) != len(reference):
        return float("inf")
    return max((_error(np.asarray(a), b) for a, b in zip(results, reference, strict=True)), default=0.0)


def _error(result: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    if result.shape != reference.shape:
        return float("inf")
    a, b = result.astype(np.float64), reference.astype(np.float64)
    odd = ~(np.isfinite(a) & np.isfinite(b))
    if not np.array_equal(a[odd], b[odd], equal_nan=True):
        return float("inf")
    plain = np.abs(a[~odd] - b[~odd]) / np.maximum(1.0, np.abs(b[~odd]))
    return float(plain.max(initial=0.0))


def compare(
    case: str,
    variants: Sequence[Variant],
    reference: Sequence[npt.NDArray[Any]],
    *,
    rounds: int = 15,
    flops: float | None = None,
    moved_bytes: float | None = None,
    error: Callable[[Any, Sequence[npt.NDArray[Any]]], float] = relative_error,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Check every variant against `reference` (float64), then time them in turn. The check is the warm-up. On one thread
    `clock` may be `time.process_time`, which does not count what other processes take.

    Raises `WrongResult` naming variant, error and bound, before anything is timed, and ValueError where two have one name.
    """
    names = [v.name for v in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"{case}: two variants have one name, of {', '.join(names)}")
    errors = {}
    for v in variants:
        errors[v.name] = error(v.call(), reference)
        if not errors[v.name] <= v.bound:
            raise WrongResult(f"{case}: {v.name} errs by {errors[v.name]:.3g}; {v.bound:.3g} is allowed")
    peaks = {v.name: _peak_bytes(v) for v in variants}
    rest_s = max(v.rest_s for v in variants)
    repeats = _calls_a_sample({v.name: sample_s(v.call, 1, rest_s, clock) for v in variants})
    samples: dict[str, list[float]] = {v.name: [] for v in variants}
    for _ in range(rounds):
        for v in variants:
            samples[v.name].append(sample_s(v.call, repeats[v.name], rest_s, clock) * 1e3)
    return [
        Row(case, v.name, tuple(samples[v.name]), errors[v.name], flops, moved_bytes, peaks[v.name])
        for v in variants
    ]


def _peak_bytes(v: Variant) -> int | None:
    growth = measure(v.call)
    return growth.resident_bytes if growth.resident_bytes is not None else growth.scratch_bytes


def _calls_a_sample(once_s: Mapping[str, float]) -> dict[str, int]:
    """From how long one call of each variant takes: as many calls for all, fewer for those that then exceed a sample."""
    most = max(map(repeats_of, once_s.values()))
    return {n: max(1, min(most, int(LONGEST_SAMPLE_S / max(s, 1e-9)))) for n, s in once_s.items()}


def repeats_of(once_s: float, shortest_s: float = SHORTEST_SAMPLE_S) -> int:
    """How often a call that takes so long is repeated within one sample."""
    return max(1, int(shortest_s / max(once_s, 1e-9)))


def sample_s(
    call: Callable[[], object],
    repeats: int,
    rest_s: float = GAP_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """One sample: the seconds of a call, from so many in a row; then a rest."""
    start = clock()
    for _ in range(repeats):
        call()
    taken = clock() - start
    time.sleep(rest_s)
    return taken / repeats


# ---------------------------------------------------------------- documents


def document(rows: Sequence[Row], command: Sequence[str] | None = None) -> dict[str, Any]:
    """The rows with everything that is needed to judge or repeat them."""
    made = circumstances(command)
    made["conditions"] |= {"order": "interleaved", "gap_s": GAP_S, "sample_s": SHORTEST_SAMPLE_S}
    return {**made, "rows": [r.as_json() for r in rows]}


def circumstances(command: Sequence[str] | None = None) -> dict[str, Any]:
    """What was run, of which commit, by which versions, where and when."""
    return {
        "schema_version": SCHEMA_VERSION,
        "commit": commit(),
        "command": list(sys.argv if command is None else command),
        "versions": {"python": platform.python_version(), **_versions()},
        "device": {"kind": "cpu", "model": processor(), "logical_cpus": os.cpu_count()},
        "conditions": _conditions(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _conditions() -> dict[str, Any]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "threads": threads(),
        "load_average": list(load) if load else None,
    }


def processor() -> str:
    """The processor's model as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str | None:
    """The commit of the checkout this package runs from, with `+` for uncommitted changes; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        done = [
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")
