"""`tileloom bisect` names the guilty pass: a fault is planted in each in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tileloom.__main__ import main
from tileloom.compiler import pipeline
from tileloom.compiler import tensor_ir as t
from tileloom.compiler import tile_ir as tile
from tileloom.compiler.passes import fuse

ATTENTION = str(Path(__file__).parent.parent / "examples" / "attention.tile")
SIZES = ["-D", "M=5", "-D", "N=150", "-D", "D=4", "-D", "E=3"]


def doubled(values: list[t.Node]) -> list[t.Node]:
    """The first value is twice what it should be."""
    return [t.apply("add", values[0], values[0]), *values[1:]]


def plant_in_graph(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = getattr(pipeline, name)

    def wrong(*args: Any) -> t.Graph:
        graph: t.Graph = original(*args)
        new = doubled([d.value for d in graph.definitions[::-1]])[::-1]
        changed = (dataclasses.replace(d, value=v) for d, v in zip(graph.definitions, new, strict=True))
        return dataclasses.replace(graph, definitions=tuple(changed))

    monkeypatch.setattr(pipeline, name, wrong)


def plant_in_values(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    table = [
        (n, (lambda v, g, r, k, f=f: doubled(f(v, g, r, k))) if n == name else f)
        for n, f in fuse.VALUE_PASSES
    ]
    monkeypatch.setattr(fuse, "VALUE_PASSES", tuple(table))
    monkeypatch.setattr("tileloom.stages.VALUE_PASSES", tuple(table))


def plant_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running sum forgets what it held: only the last tile counts."""
    original = fuse.lower

    def wrong(*args: Any) -> Any:
        program, cascades = original(*args)
        return dataclasses.replace(program, body=tuple(forget(s) for s in program.body)), cascades

    def forget(s: tile.Stmt) -> tile.Stmt:
        if isinstance(s, tile.Grid):
            return dataclasses.replace(s, body=tuple(forget(x) for x in s.body))
        if isinstance(s, tile.For) and len(s.carries) == 3:
            first, second, third = s.yields
            assert isinstance(second, tile.Apply)
            return dataclasses.replace(s, yields=(first, second.args[1], third))
        return s

    monkeypatch.setattr(fuse, "lower", wrong)


def plant_in_source(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., str] = pipeline.cpu.generate
    monkeypatch.setattr(
        pipeline.cpu, "generate", lambda *args: original(*args).replace("sum_lanes(", "f32(2.0) * sum_lanes(")
    )


PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "canonicalize": lambda m: plant_in_graph(m, "canonicalize"),
    "simplify": lambda m: plant_in_values(m, "simplify"),
    "normalize": lambda m: plant_in_values(m, "normalize"),
    "shield": lambda m: plant_in_values(m, "shield"),
    "lower": plant_in_tiles,
    "codegen": plant_in_source,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A planted fault is not in the cache's key."""
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("guilty", PLANTS)
def test_the_guilty_pass_is_named(
    guilty: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PLANTS[guilty](monkeypatch)
    assert main(["bisect", ATTENTION, *SIZES]) == 1
    assert f"wrong after `{guilty}`" in capsys.readouterr().out


def test_a_right_kernel_has_no_guilty_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", ATTENTION, *SIZES]) == 0
    assert "every pass preserves the result" in capsys.readouterr().out
