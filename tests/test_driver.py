"""The driver's functions as `runtime/driver.py` calls them: against cuda.h, and on a device that is not there."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import CONTEXT, Launched, install_driver

import tileloom as tl
from tileloom.compiler.target import SM_80
from tileloom.runtime import driver, machine_code

POINTER, INT, UNSIGNED, WORD = "pointer", "4 bytes", "4 bytes without sign", "8 bytes"
KINDS = {ctypes.c_int: INT, ctypes.c_uint: UNSIGNED, ctypes.c_uint64: WORD, ctypes.c_size_t: WORD}
HANDLES = ("CUcontext", "CUmodule", "CUfunction")


def header() -> str | None:
    """cuda.h of the toolkit's wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations if spec else None) or []
    found = (Path(root) / "cu13" / "include" / "cuda.h" for root in roots)
    return next((p.read_text() for p in found if p.exists()), None)


def kind_in_c(parameter: str) -> str:
    if "*" in parameter or parameter.split()[0] in HANDLES:
        return POINTER
    if parameter.startswith("unsigned int"):
        return UNSIGNED
    return WORD if parameter.split()[0] in ("size_t", "CUdeviceptr") else INT


def test_functions_have_the_types_of_the_header() -> None:
    text = header()
    if text is None:
        pytest.skip("the toolkit's headers are not installed")
    for name, kinds in driver.FUNCTIONS.items():
        plain = name.removesuffix("_v2")
        renamed = re.search(rf"#define {plain}\s+(?:__CUDA_API_PTDS\()?(\w+)", text)
        assert (renamed[1] if renamed else plain) == name
        prototype = re.search(rf"CUresult CUDAAPI {plain}\(([^;]*?)\);", text)
        assert prototype is not None, name
        wanted = [kind_in_c(p.strip()) for p in prototype[1].split(",") if p.strip() != "void"]
        assert [KINDS.get(k, POINTER) for k in kinds] == wanted, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", driver.MULTIPROCESSORS),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", driver.CAPABILITY_MAJOR),
        ("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR", driver.CAPABILITY_MINOR),
        ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", driver.MOST_DYNAMIC_SHARED_BYTES),
        ("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL", driver.DEVICE_ORDINAL),
    ],
)
def test_numbers_are_those_of_the_header(name: str, value: int) -> None:
    text = header()
    if text is None:
        pytest.skip("the toolkit's headers are not installed")
    assert re.search(rf"\b{name}\s*=\s*{value}\b", text)


def test_a_refusal_is_told_in_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, SM_80)
    with pytest.raises(RuntimeError, match=r"^CUDA driver, cuDeviceGet: told by the driver$"):
        driver.multiprocessors(3)


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch)

    def missing(loader: Any) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "opened", missing)
    assert driver.present() is None
    assert driver.device_at(4096) is None


def test_a_kernel_is_allowed_the_shared_memory_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_driver(monkeypatch, SM_80, SM_80)
    source = "def f(x: '*f32'):\n    pass\n"
    assert driver.function(source.encode(), "f", 100_000, 1) == driver.function(
        source.encode(), "f", 100_000, 1
    )
    (loaded,) = fake.kernels
    assert (loaded.name, loaded.context, loaded.dynamic_shared_bytes) == ("f", CONTEXT + 1, 100_000)
    assert fake.stack == [CONTEXT]


UPDATED = """
kernel updated(x: inout f32[N], y: f32[N], by: f32) -> z: f32[N] {
    example N = 100, by = 2.0
    x[i] = x[i] + y[i]
    z[i] = y[i] * by
}
"""


def test_arrays_in_the_hosts_memory_are_copied_to_the_device_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = install_driver(monkeypatch, SM_80)
    monkeypatch.setattr(
        machine_code,
        "machine_code",
        lambda source, name, target: SimpleNamespace(spill_bytes=0, cubin=source.encode()),
    )
    ran: list[str] = []

    def run(launched: Launched) -> None:
        """Arguments: each tensor's address and stride, `by` where it stands among them, then N."""
        (loaded,) = [k for k in fake.kernels if k.name == launched.kernel]
        places = [i for i, a in enumerate(loaded.annotations) if a.startswith("*")]
        (count,) = np.frombuffer(launched.parameters[-1], np.int64)
        arrays = [
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(launched.address(i))) for i in places
        ]
        ran.append(launched.kernel)
        for floats in (p for p in launched.parameters if len(p) == 4):
            arrays[-1][:] = arrays[0] * np.frombuffer(floats, np.float32)
            return
        arrays[0][:] += arrays[1]

    fake.run = run
    x, y = np.arange(100, dtype=np.float32), np.full(100, 3, np.float32)
    compiled = tl.compile(tl.parse(UPDATED)["updated"], target="cuda", fuse="none")
    with pytest.warns(UserWarning, match="each call copies them"):
        z = compiled(x, y, 2.0)
    assert len(ran) == 2
    np.testing.assert_array_equal(z, np.full(100, 6, np.float32))
    np.testing.assert_array_equal(x, np.arange(100) + 3)
    assert fake.memory == {}
    assert fake.stack == [CONTEXT]
