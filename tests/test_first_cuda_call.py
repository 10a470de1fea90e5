"""A first call on a CUDA device from a warm cache: what a new process imports for it, and what it launches.

The device is not there: its driver is made of Python functions, which see what a call loads and launches. What such a call
costs is measured by `benchmarks/warm_start.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)

HEAD = """
import json, sys
import pytest
from fake_cuda import install, install_driver
from tileloom.compiler.target import SM_90A
import tileloom as tl
"""
TEXT = """
kernel scaled(x: f32[M, N], by: f32) -> (y: f32[M, N], s: f32[M]) {
    example M = 4, N = 8, by = 2.0
    y[m, n] = x[m, n] * by
    s[m] = sum[n](x[m, n])
}
kernel product(a: bf16[M, K], b: bf16[K, N]) -> c: bf16[M, N] {
    example M = 256, K = 128, N = 256
    c[m, n] = sum[k](a[m, k] * b[k, n])
}
"""
TAIL = """
print(json.dumps({
    "launched": [(x.kernel, x.blocks, x.threads, [p.hex() for p in x.parameters]) for x in fake.launches],
    "encoded": fake.encoded, "calls": fake.calls, "modules": sorted({*sys.modules} - BEFORE),
}))
"""
PLAIN = """
import numpy as np
fake = install_driver(pytest.MonkeyPatch(), SM_90A)
class Array:
    def __init__(self, shape):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f4", "data": (4096, False), "version": 3}
arrays = [Array((4, 8)), Array((4, 8)), Array((4,))]
for i, x in enumerate(arrays):
    x.__cuda_array_interface__["data"] = (4096 * (i + 1), False)
x, *out = arrays
compiled = tl.compile(tl.parse(TEXT)["scaled"], target="cuda")
fake.source = lambda: compiled._variants.latest().record.source
assert compiled(x, 2.0, out=tuple(out)) == tuple(out)
"""
TORCH = """
import torch
from tileloom.runtime import machine_code
assembled = machine_code.machine_code
fake = install(pytest.MonkeyPatch(), SM_90A)
machine_code.machine_code = assembled
a, b = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(128, 256, dtype=torch.bfloat16)
compiled = tl.compile(tl.parse(TEXT)["product"], target="cuda")
fake.source = lambda: compiled._variants.latest().record.source
assert compiled(a, b).shape == (256, 256)
for x in fake.launches:  # addresses differ between processes
    sizes = tuple(p for p in x.parameters if int.from_bytes(p[:8], "little") < 1 << 20)
    object.__setattr__(x, "parameters", sizes)
"""
SYSTEM_TOOLKIT = """
from tileloom.runtime import versions
installed = versions.version
versions.version = lambda package: "none" if package == "nvidia-nvvm" else installed(package)
"""
"""libNVVM comes from no wheel."""
COMPILERS = ("numba", "numba_cuda", "llvmlite", "cuda", "sympy", "mpmath", "tileloom.runtime.cuda")
UNNEEDED = (
    *COMPILERS,
    "ml_dtypes",
    "lark",
    "tileloom.dsl.parse",
    "tileloom.compiler.pipeline",
    "tileloom.runtime.kernels",
)


def run(code: str, cache: Path, before: str = "") -> dict[str, Any]:
    """What a new process notes; of its modules those that were not there after `before`."""
    environment = {
        **os.environ,
        "TILELOOM_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
    }
    text = f"{before}\nimport sys\nBEFORE = {{*sys.modules}}\n{HEAD}\nTEXT = {TEXT!r}\n{code}\n{TAIL}"
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@needs_toolkit
@pytest.mark.parametrize("before", ["", SYSTEM_TOOLKIT], ids=["wheels", "system toolkit"])
def test_a_warm_call_needs_no_compiler(tmp_path: Path, before: str) -> None:
    cold, warm = (run(PLAIN, tmp_path, before) for _ in range(2))
    assert {"numba", "numba_cuda", "tileloom.runtime.cuda"} <= {*cold["modules"]}
    assert [m for m in UNNEEDED if m in warm["modules"]] == []
    assert warm["launched"] == cold["launched"]
    assert warm["calls"] == cold["calls"]
    assert warm["launched"]


@needs_toolkit
def test_a_warm_call_on_tensors_needs_no_compiler(tmp_path: Path) -> None:
    """torch itself may import what it likes."""
    pytest.importorskip("torch")
    cold, warm = (run(TORCH, tmp_path, "import torch") for _ in range(2))
    assert {"numba_cuda", "tileloom.runtime.cuda"} <= {*cold["modules"]}
    assert [m for m in UNNEEDED if m in warm["modules"]] == []
    assert warm["launched"] == cold["launched"]
    assert warm["encoded"] == cold["encoded"] > 0
