"""Say what the compiler derived and decided for a kernel, and why."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import ArgumentParser, Namespace
from typing import Any

from ..api import CompiledKernel
from ..arguments import Array
from ..bench import Case, Variant, check_measured, median_ms, memory
from ..compiler.pipeline import Compilation
from ..ledger import MeasuredCandidate, measure
from ..render import SECTIONS, bytes_text, explanation, say, table
from .failures import USAGE, refusals
from .problems import Problem, add_compilation, add_inputs, add_kernel, compiled, problem

TILES = 8
"""Tiles of a tried row: 512 elements in steps of 64."""


def configure(parser: ArgumentParser) -> None:
    add_kernel(parser)
    add_compilation(parser)
    add_inputs(parser)
    parser.add_argument(
        "--derive", action="store_true", help="the passes over reductions, and why each is right"
    )
    parser.add_argument(
        "--fusion", action="store_true", help="the ledger: what is stored, what is not, and why"
    )
    parser.add_argument(
        "--memory", action="store_true", help="bytes beyond inputs and outputs, against fuse none"
    )
    parser.add_argument("--measure", action="store_true", help="run, and measure what was predicted")
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")


def run(arguments: Namespace) -> int:
    found = problem(arguments)
    kernel = compiled(arguments, found.kernel)
    if arguments.measure:
        with refusals(USAGE):
            check_measured(kernel, "--measure")
    with refusals():
        facts = kernel.explain(**found.extents, **found.dtypes).facts
        evidence = _evidence(kernel.compilation(**found.extents, **found.dtypes), found)
    measured = _measured(arguments, found) if arguments.measure else {}
    sides = _sides(kernel, found) if arguments.measure else []
    if arguments.json:
        measured_ledger = [dataclasses.asdict(m) for m in sides]
        everything = {
            **dataclasses.asdict(facts),
            **evidence,
            "measured": measured,
            "measured_ledger": measured_ledger,
        }
        print(json.dumps(everything, indent=2, ensure_ascii=False))
        return 0
    say(explanation(facts, [s for s in SECTIONS if getattr(arguments, s)]))
    if arguments.derive:
        _say_evidence(evidence)
    if measured:
        say(_table(measured))
    if sides:
        _say_sides(sides)
    return 0


def _sides(kernel: CompiledKernel, found: Problem) -> list[MeasuredCandidate]:
    """Each candidate of the ledger run both ways."""
    case = _case(found, found.tensors(0))
    with refusals():
        return measure(kernel, case, kernel.compilation(**case.inputs()))


def _say_sides(sides: list[MeasuredCandidate]) -> None:
    say(
        table(
            ("intermediate", "decision", "measured ms", "the other way", "predicted ms", "the other way", ""),
            (
                (
                    m.name, "fused" if m.fused else "stored", f"{m.chosen_ms:.3f}", f"{m.opposite_ms:.3f}",
                    f"{m.predicted_chosen_ms:.3f}", f"{m.predicted_opposite_ms:.3f}", "" if m.right else "WRONG",
                )
                for m in sides
            ),
            title="\nThe ledger measured: each decision and its opposite",
        )
    )  # fmt: skip
    for m in sides:
        if not m.right:
            say(f"{m.name}: the other way is faster; the model's term that was furthest off: {m.off}")


def _case(found: Problem, tensors: dict[str, Array]) -> Case:
    return Case(found.kernel, found.graph, found.dtypes, found.extents, found.numbers, tensors)


def _evidence(made: Compilation, found: Problem) -> dict[str, list[dict[str, Any]]]:
    """The recurrences tried on rows that break careless ones, and how many tiles the loops visit at these sizes."""
    from ..compiler.interpreter.recurrence import rescale_bound, trials
    from ..compiler.interpreter.visits import visits

    repaired = [c for cascades in made.cascades for c in cascades if any(s.upstream for s in c.states)]
    tried = [
        {**dataclasses.asdict(t), "bound": rescale_bound(TILES, s.reduction.dtype)}
        for c in repaired
        for t in trials(c, elements=64 * TILES, tile=64)
        for s in c.states
        if s.name == t.state
    ]
    try:
        visited = [dataclasses.asdict(v) for v in visits(made.module, found.extents, found.tensors(0))]
    except KeyError:  # a bound reads a tensor that an earlier launch makes
        visited = []
    return {"trials": tried, "tiles": visited}


def _say_evidence(evidence: dict[str, list[dict[str, Any]]]) -> None:
    if evidence["trials"]:
        say(
            table(
                ("rows of 512 elements", "state", "one pass", "as written", "mending adds at most"),
                (
                    (
                        t["rows"],
                        t["state"],
                        _error(t["one_pass"]),
                        _error(t["as_written"]),
                        _error(t["bound"]),
                    )
                    for t in evidence["trials"]
                ),
                title="\nThe recurrence tried in f32 against float64: greatest error, relative to the greatest magnitude",
            )
        )
    if evidence["tiles"]:
        say(
            table(
                ("launch", "axis", "tiles", "never visited", "whole, no condition", "partial", "asked at run time"),
                (
                    (v["program"], v["axis"], str(v["empty"] + v["full"] + v["partial"]), str(v["empty"]),
                     str(v["full"]), str(v["partial"]), str(v["asked"]))
                    for v in evidence["tiles"]
                ),
                title="\nTiles at these sizes",
            )
        )  # fmt: skip


def _error(x: float) -> str:
    return "no number" if math.isnan(x) else f"{x:.1e}"


def _measured(arguments: Namespace, found: Problem) -> dict[str, dict[str, Any]]:
    """Milliseconds and bytes beyond inputs and outputs of one call, compiled and naive."""
    case = _case(found, found.tensors(arguments.seed))
    with refusals():
        both = [
            Variant(name, kernel, kernel.compilation(**case.inputs()))
            for name, kernel in (
                ("compiled", compiled(arguments, found.kernel)),
                ("fuse none", compiled(arguments, found.kernel, "none")),
            )
        ]
        times = median_ms(case, both)
        grown = {v.name: memory(case, v) for v in both}
    return {
        name: {"ms": times[name], "peak_bytes": peak, "resident_bytes": resident}
        for name, (peak, resident) in grown.items()
    }


def _table(measured: dict[str, dict[str, Any]]) -> Any:
    return table(
        ("", "median ms", "beyond in/out", "process grew"),
        (
            (name, f"{r['ms']:.2f}", bytes_text(r["peak_bytes"]), _resident(r["resident_bytes"]))
            for name, r in measured.items()
        ),
        title="\nmeasured on this machine",
    )


def _resident(n: int | None) -> str:
    return "not told by this system" if n is None else bytes_text(n)
