"""500 drawn cases over 100 kernels on a real device, against float64, between islands of NaN."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import tileloom as tl

pytestmark = pytest.mark.gpu
samples = runpy.run_path(str(Path(__file__).with_name("device_samples.py")))
DRAWN = samples["draw"](100, 5)


@pytest.mark.parametrize("number", range(len(DRAWN)))
def test_drawn_cases(number: int) -> None:
    torch: Any = pytest.importorskip("torch")
    kernel, cases = DRAWN[number]
    compiled = tl.compile(tl.parse(kernel.text)[kernel.name], target="cuda")
    wrong = [f"{c}: {e}" for c in cases for e in c.errors(torch, compiled, "cuda")]
    assert not wrong, "\n".join(wrong)
