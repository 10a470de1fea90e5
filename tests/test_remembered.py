"""Kernels that were generated a moment ago are the same, whoever asks for them and how often."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom import variants
from tileloom.compiler import pipeline
from tileloom.compiler.codegen.remembered import MOST, remembered
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import SM_80, SM_90A, CudaTarget
from tileloom.compiler.tile_ir import TileProgram
from tileloom.compiler.tile_text import print_module
from tileloom.variants import Record, restored, stored

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("target", [SM_80, SM_90A])
def test_the_same_source_each_time(target: CudaTarget) -> None:
    kernel = tl.compile(tl.load(EXAMPLES / "matmul_gelu.tile")["matmul_gelu"], target=target.name)
    made = kernel.compilation(M=1024, N=1024, K=1024, T="bf16")
    assert made.module.programs[0].tier == ("wgmma" if target.has_wgmma else "mma")
    assert {generate(made.module, target) for _ in range(3)} == {made.source}


def test_programs_are_told_apart_by_what_they_show() -> None:
    asked: list[Any] = []

    @remembered
    def generated(program: Any, target: Any) -> list[Any]:
        asked.append((program, target))
        return [repr(program)]

    def ask(program: Any, target: Any = SM_80) -> list[Any]:
        return generated(program, target)

    assert [ask(x) for x in (0.0, -0.0, True, 1, 0.0)] == [["0.0"], ["-0.0"], ["True"], ["1"], ["0.0"]]
    assert len(asked) == 4
    ask(0.0, SM_90A)
    assert len(asked) == 5
    ask(0.0).clear()
    assert ask(0.0) == ["0.0"]
    for n in range(100, 100 + MOST):
        ask(n)
    asked.clear()
    ask(0.0)
    assert len(asked) == 1


def test_what_a_block_takes_is_found_once_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each grouping of the statements has three launches or so, most of which others have too."""
    asked: Counter[str] = Counter()

    def taken(program: TileProgram, target: CudaTarget) -> Any:
        asked[repr(program)] += 1
        return found(program, target)

    found = pipeline.taken
    monkeypatch.setattr(pipeline, "taken", taken)
    kernel = tl.load(EXAMPLES / "rotary_pairs.tile")["rotary_pairs"]
    made = pipeline.compile_kernel(kernel, SM_80, {"H": 4, "M": 128, "D": 32, "E": 32})
    assert set(asked.values()) == {1}
    assert made.ledger.considered > 5
    assert len(asked) > 5


def test_what_is_refused_is_refused_again() -> None:
    @remembered
    def generated(program: Any, target: Any) -> list[Any]:
        raise ValueError(program)

    for _ in range(2):
        with pytest.raises(ValueError, match="7"):
            generated(7, SM_80)  # type: ignore[arg-type]


TERMS = 600
LONG = f"kernel long_sum(x: f32[N]) -> y: f32[N] {{ y[i] = {' + '.join(f'x[i] * {k}.0' for k in range(1, TERMS + 1))} }}"


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80"])
def test_a_sum_of_hundreds_of_terms(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python allows a thousand calls in one another, and each term of a sum lies in the one after it."""
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path))
    kernel = tl.compile(tl.parse(LONG)["long_sum"], target=target)
    source = kernel.compilation(N=1000).source
    assert source.count("*") >= TERMS
    if target == "cpu":
        x = np.array([1.0, -2.0, 0.5], np.float32)
        assert np.allclose(kernel(x=x), x * (TERMS * (TERMS + 1) // 2), rtol=1e-5)


def test_a_stored_module_too_deep_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """How deep that is depends on Python's version."""
    whole = pickle.dumps

    def shallow(what: object) -> bytes:
        if isinstance(what, Record):
            raise RecursionError
        return whole(what)

    made = tl.compile(tl.parse(LONG)["long_sum"], target="cuda:sm_80").compilation(N=1000)
    record = Record({"N": 1000}, {}, made.module, made.source)
    monkeypatch.setattr(variants.pickle, "dumps", shallow)
    back = restored(stored(record))
    assert (back.sizes, back.statics, back.source) == (record.sizes, record.statics, record.source)
    assert print_module(back.module) == print_module(record.module)
