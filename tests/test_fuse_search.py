"""The search for a grouping: what is lowered once and not asked of a device changes no choice.

Every grouping is also built by itself here and asked what it takes; devices are made up, so that programs that are predicted
to be fast spill or hide little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, combinations
from pathlib import Path
from zlib import crc32

import pytest

from tileloom.compiler.cost import rates
from tileloom.compiler.occupancy import Resources
from tileloom.compiler.passes import fuse as fusing
from tileloom.compiler.passes.derive import rules_of
from tileloom.compiler.passes.fuse import Fused, Ledger, Measure, build, fuse, measured
from tileloom.compiler.pipeline import front
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU, SM_80, Target
from tileloom.compiler.tensor_ir import Graph
from tileloom.compiler.tile_ir import TileProgram
from tileloom.dsl.diagnostics import TileError, refuse
from tileloom.programs import load

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KERNELS = {
    "rotary_pairs": {"H": 4, "M": 128, "D": 32, "E": 32},
    "cross_entropy": {"T": 64, "V": 512, "D": 64},
    "layernorm_product": {"M": 64, "K": 128, "N": 96},
}


def graph_of(name: str) -> Graph:
    kernel = load(EXAMPLES / f"{name}.tile")[name]
    return front(kernel, None, Remarks())[1]


def device(salt: int, asked: list[str] | None = None) -> Measure:
    """A device on which what a program takes depends on its text, in no way that the search could know."""

    def measure(program: TileProgram) -> Resources | None:
        text = repr(program)
        if asked is not None:
            asked.append(text)
        drawn = crc32(text.encode(), salt)
        if drawn % 7 == 0:
            raise refuse("E0910", f"no room {drawn}", None)
        if drawn % 5 == 0:
            return None
        return Resources(64 << drawn % 4, 24 + drawn % 331, drawn % 90_000, 1 + drawn % 3)

    return measure


def subsets(names: Iterable[str]) -> Iterable[frozenset[str]]:
    every = [*names]
    return map(frozenset, chain.from_iterable(combinations(every, k) for k in range(len(every) + 1)))


def best_of_all(graph: Graph, schedule: Schedule, target: Target, measure: Measure | None) -> Fused | str:
    """The first grouping that none is better than, or the words of the last refusal."""
    sizes, rules, machine = KERNELS[graph.name], rules_of(graph), rates(target)
    outputs = fusing.always_stored(graph)
    found: list[Fused] = []
    refused = ""
    for kept in subsets(d.name for d in graph.definitions if d.name not in outputs):
        try:
            plain = build(graph, kept | outputs, schedule, target, sizes, Remarks(), rules, machine)
            found.append(measured(plain, target, machine, measure))
        except TileError as reason:
            refused = str(reason)
    return min(found, key=fusing._preference) if found else refused


def searched(
    graph: Graph, schedule: Schedule, target: Target, measure: Measure | None
) -> tuple[Fused, Ledger]:
    return fuse(graph, schedule, target, KERNELS[graph.name], Remarks(), measure=measure)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("salt", range(6))
def test_the_choice_is_the_best_of_all_groupings(name: str, salt: int) -> None:
    graph, schedule = graph_of(name), Schedule(name, name, SM_80.name)
    best = best_of_all(graph, schedule, SM_80, device(salt))
    if isinstance(best, str):
        with pytest.raises(TileError) as told:
            searched(graph, schedule, SM_80, device(salt))
        assert str(told.value) == best
        return
    found, _ = searched(graph, schedule, SM_80, device(salt))
    assert (found.stored, found.module, found.cost, found.prediction, found.resources, found.spilled) == (
        best.stored, best.module, best.cost, best.prediction, best.resources, best.spilled
    )  # fmt: skip


def test_without_a_device() -> None:
    graph, schedule = graph_of("rotary_pairs"), Schedule("rotary_pairs", "rotary_pairs", CPU.name)
    best = best_of_all(graph, schedule, CPU, None)
    found, _ = searched(graph, schedule, CPU, None)
    assert isinstance(best, Fused)
    assert (found.stored, found.module, found.prediction) == (best.stored, best.module, best.prediction)


def test_both_sides_of_the_ledger_are_asked() -> None:
    """The opposite of each choice is told with what it takes, whether the search came by it or not."""
    graph, schedule = graph_of("rotary_pairs"), Schedule("rotary_pairs", "rotary_pairs", SM_80.name)
    rules, machine = rules_of(graph), rates(SM_80)

    def measure(program: TileProgram) -> Resources:
        return Resources(32, 200, 100_000 + crc32(program.name.encode()) % 9)

    found, ledger = searched(graph, schedule, SM_80, measure)
    for entry in ledger.entries:
        stored = found.stored ^ {entry.name}
        plain = build(graph, stored, schedule, SM_80, KERNELS["rotary_pairs"], Remarks(), rules, machine)
        other = measured(plain, SM_80, machine, measure)
        assert entry.opposite == other.prediction != plain.prediction
        assert entry.opposite_resources == fusing.launches(other)


def test_each_region_is_lowered_once_and_few_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[str] = []
    lower: Callable[..., tuple[TileProgram, object]] = fusing.lower

    def noted(*given: object) -> tuple[TileProgram, object]:
        program, cascades = lower(*given)
        lowered.append(repr(program))
        return program, cascades

    monkeypatch.setattr(fusing, "lower", noted)
    graph, schedule = graph_of("rotary_pairs"), Schedule("rotary_pairs", "rotary_pairs", SM_80.name)
    asked: list[str] = []
    plain = Resources(128, 64, 0)
    found, ledger = searched(graph, schedule, SM_80, lambda p: asked.append(repr(p)) or plain)
    assert ledger.considered == 32
    again = len(found.module.programs)  # the choice, for its remarks
    assert len(lowered) == len({*lowered}) + again
    groupings = 32 * 3
    assert len(lowered) < groupings / 2
    assert len({*asked}) < len({*lowered})
