"""The simt tier on a real device: every case, and the ladder at sizes with tails, against float64."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileloom.compiler.codegen.resources import resources
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.interpreter import tile
from tileloom.compiler.occupancy import Resources, occupancy
from tileloom.compiler.target import TARGETS, CudaTarget
from tileloom.compiler.tile_text import parse_module

pytestmark = pytest.mark.gpu
cases = runpy.run_path(str(Path(__file__).with_name("simt_cases.py")))
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    """The facts of the device that is there."""
    from cuda.bindings import driver

    driver.cuInit(0)
    attribute = driver.CUdevice_attribute
    major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0)[1]
    minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0)[1]
    found = [t for t in TARGETS.values() if isinstance(t, CudaTarget) and t.capability <= (major, minor)]
    fitting = [t for t in found if not t.architecture_specific or t.capability == (major, minor)]
    return max(fitting, key=lambda t: t.capability)


def on_device(
    text: str, inputs: dict[str, Array], scalars: dict[str, float], target: CudaTarget
) -> dict[str, Array]:
    from tileloom.runtime.device_copies import run_module
    from tileloom.runtime.launches import Source

    module = parse_module(text)
    return run_module(module, Source(generate(module, target), target), inputs, scalars)


def mismatch(got: Array, want: Array, tolerance: float) -> str:
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= tolerance * np.maximum(1, np.abs(b))
    wrong = np.argwhere(~((a == b) | (np.isnan(a) & np.isnan(b)) | near))
    first = tuple(wrong[0]) if len(wrong) else ()
    return f"{len(wrong)} differ, first at {first}: {a[first]} for {b[first]}" if len(wrong) else ""


@pytest.mark.parametrize("case", cases["CASES"], ids=lambda c: c.name)
def test_case(case: Any, target: CudaTarget) -> None:
    inputs = case.inputs()
    want = tile.run_module(parse_module(case.text), inputs, case.scalars)
    got = on_device(case.text, inputs, case.scalars, target)
    tolerance = max(case.tolerance, 4e-6) if case.tolerance else 0
    assert {k: mismatch(got[k], want[k], tolerance) for k in want} == dict.fromkeys(want, "")


def in_float64(text: str) -> str:
    """The same program computed in f64 throughout: the oracle."""
    return re.sub(r"(?<![\w.])(\d+\.\d+|inf)(?![\w.])", r"\1f64", re.sub(r"\b(f32|f16|bf16)\b", "f64", text))


LADDER = {
    "add": ({"x": (100_003,), "y": (100_003,)}, {}, 1e-7),
    "matmul": ({"a": (333, 200), "b": (200, 517), "bias": (517,)}, {}, 3e-5),
    "softmax": ({"x": (1023, 1025)}, {}, 1e-6),
    "layernorm": ({"x": (511, 1000), "w": (1000,), "b": (1000,)}, {}, 1e-5),
    "attention": ({"q": (2, 4, 300, 64), "k": (2, 2, 301, 64), "v": (2, 2, 301, 64)}, {"scale": 0.125}, 2e-3),
}


@pytest.mark.parametrize("name", LADDER)
def test_ladder_against_float64(name: str, target: CudaTarget) -> None:
    shapes, scalars, tolerance = LADDER[name]
    rng = np.random.default_rng(7)
    kind = np.float16 if name == "attention" else np.float32
    inputs = {k: rng.standard_normal(s).astype(kind) for k, s in shapes.items()}
    text = dict(cases["ladder"]())[name]
    wide = {k: v.astype(np.float64) for k, v in inputs.items()}
    want = tile.run_module(parse_module(in_float64(text)), wide, scalars)
    got = on_device(text, inputs, scalars, target)
    assert {k: mismatch(got[k], want[k], tolerance) for k in want} == dict.fromkeys(want, "")


def test_the_same_call_gives_the_same_bits(target: CudaTarget) -> None:
    text = dict(cases["ladder"]())["matmul"]
    rng = np.random.default_rng(1)
    inputs = {k: rng.standard_normal(s).astype(np.float32) for k, s in LADDER["matmul"][0].items()}
    first, second = (on_device(text, inputs, {}, target) for _ in range(2))
    assert all(np.array_equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", ["add", "matmul", "softmax", "attention"])
def test_occupancy_is_what_the_driver_says(name: str, target: CudaTarget) -> None:
    """The calculator's blocks of a multiprocessor, from the registers that the assembler reports."""
    from cuda.bindings import driver

    from tileloom.runtime.cuda import assemble
    from tileloom.runtime.driver import function

    module = parse_module(dict(cases["ladder"]())[name])
    made = next(iter(assemble(generate(module, target), target).values()))
    shared = resources(module.programs[0], target).shared_bytes
    driver.cuInit(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    handle = driver.CUfunction(function(made.cubin, made.name, made.dynamic_shared_bytes))
    dynamic = made.dynamic_shared_bytes
    error, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(handle, made.threads, dynamic)
    assert int(error) == 0
    assert occupancy(Resources(made.threads, made.registers, shared), target).blocks == blocks
