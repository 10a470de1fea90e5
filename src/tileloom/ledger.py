"""The fusion ledger measured: each candidate's decision and its opposite run side by side, and what the model got wrong."""

from __future__ import annotations

import math
from dataclasses import replace

from .api import CompiledKernel
from .bench import Case, Variant, median_ms
from .compiler.pipeline import Compilation
from .dsl.records import dataclass


@dataclass(frozen=True)
class MeasuredCandidate:
    """One intermediate, both ways, in milliseconds. `right`: the decision was the faster way, or the two are within 10%.

    `off` names the term of the prediction that explains most of the error of the worse predicted side.
    """

    name: str
    fused: bool
    chosen_ms: float
    opposite_ms: float
    predicted_chosen_ms: float
    predicted_opposite_ms: float
    right: bool
    off: str


CLEAR = 1.1
"""Two times closer than this factor are a draw."""


def measure(kernel: CompiledKernel, case: Case, made: Compilation) -> list[MeasuredCandidate]:
    """Both sides of every candidate of the ledger, timed in turn."""
    kept = tuple(e.name for e in made.ledger.entries if not e.fused)
    variants = [_variant("chosen", kernel, case, made, kept)]
    for e in made.ledger.entries:
        other = tuple(n for n in kept if n != e.name) if e.name in kept else (*kept, e.name)
        variants.append(_variant(e.name, kernel, case, made, other))
    times = median_ms(case, variants)
    compilations = {v.name: v.compilation for v in variants if v.compilation is not None}
    chosen = compilations["chosen"]
    return [
        _judged(e.name, e.fused, times["chosen"], times[e.name], chosen, compilations[e.name])
        for e in made.ledger.entries
    ]


def _variant(
    name: str, kernel: CompiledKernel, case: Case, made: Compilation, kept: tuple[str, ...]
) -> Variant:
    """The kernel with exactly these intermediates stored, everything else chosen as usual."""
    schedule = replace(made.schedule, fuse="all", keep=kept, static=(), tiles=())
    other = CompiledKernel(kernel.kernel, kernel.target, kernel.options, schedule)
    return Variant(name, other, other.compilation(**case.inputs()))


def _judged(
    name: str, fused: bool, chosen_ms: float, opposite_ms: float, chosen: Compilation, opposite: Compilation
) -> MeasuredCandidate:
    sides = [(chosen_ms, chosen), (opposite_ms, opposite)]
    worst = max(sides, key=lambda s: abs(math.log(s[0] / (1e3 * s[1].prediction.seconds))))
    return MeasuredCandidate(
        name=name,
        fused=fused,
        chosen_ms=chosen_ms,
        opposite_ms=opposite_ms,
        predicted_chosen_ms=1e3 * chosen.prediction.seconds,
        predicted_opposite_ms=1e3 * opposite.prediction.seconds,
        right=chosen_ms <= CLEAR * opposite_ms,
        off=_term(*worst),
    )


def _term(measured_ms: float, made: Compilation) -> str:
    """The largest term of the prediction, with how far the whole was off: the rate to look at first."""
    parts = made.prediction.parts
    ratio = measured_ms / (1e3 * made.prediction.seconds)
    return f"{max(parts, key=lambda k: parts[k])} ({ratio:.2f} times the prediction)"
