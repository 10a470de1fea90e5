"""A sample of `benchmarks/emulate.py`: examples in each tier under emulation, and kernels with one wait left out."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

emulated: dict[str, Any] = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "emulate.py"))


@pytest.mark.parametrize("tier", emulated["TIERS"])
@pytest.mark.parametrize(
    "example", ["matmul_gelu", "cross_entropy", "alibi"]
)  # three loops in a row: a window
def test_an_example_in_each_tier(example: str, tier: str) -> None:
    found = emulated["row"](f"{example}.tile", example, tier)
    assert not found.refused
    assert not found.fault
    assert found.ok
    assert 0 < found.error <= found.allowed
    assert found.kernels


def test_every_kernel_of_the_examples_is_a_case() -> None:
    every = set(emulated["kernels"]())
    assert {
        ("attention.tile", "attention"),
        ("paged_decode.tile", "paged_decode"),
        ("reductions.tile", "inner"),
    } <= every
    assert {f for f, _ in every} >= {p.name for p in emulated["EXAMPLES"].glob("*.tile")}


@pytest.mark.parametrize("name", emulated["MUTATED"])
def test_a_wait_left_out_is_caught(name: str) -> None:
    """The first wait for a full slot in the part that computes."""
    lines = emulated["mutated"](name).source.splitlines()
    number = next(
        i for i in emulated["sites"](name) if "await_parity(" in lines[i] and "phase ^ 1" not in lines[i]
    )
    found = emulated["mutant"](name, number)
    assert found.caught
