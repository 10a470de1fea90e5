"""Generated text in LLVM's form: what its loops and divisions compute, folded to numbers by NVVM, and how little is said."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module

import pytest

from tileloom.compiler.target import SM_80, SM_90A

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
HEAD = (
    "from tileloom.runtime.cuda import *\nfrom tileloom.runtime.intrinsics.ptx import floordiv_i64, mod_i64\n"
)
KERNEL = """
@cuda.jit
def folded(o: "*i64", n: "i64"):
    low, high = {low}, {high}
    o[1] = n
    if n > 3:
        o[2] = n
    total = i64(0)
{body}
    o[0] = total


LAUNCHES = {{"folded": {{"threads": 32, "shared_bytes": 0}}}}
"""
RANGES = [(0, 4, 1), (1, 16, 1), (7, 3, 1), (5, 5, 1), (5, 40, 7), (-9, 3, 4), (0, 96, 32), (9, -4, -3)]


def ptx(body: str, low: int = 0, high: int = 0) -> str:
    from tileloom.runtime import cuda

    indented = "\n".join("    " + line for line in body.splitlines())
    return cuda.ptx(HEAD + KERNEL.format(body=indented, low=low, high=high), "folded", SM_80)


def value(text: str) -> int:
    """What the kernel stores first in its output, a number in its PTX."""
    (place,) = re.findall(r"ld\.param\.u64\s+(%rd\d+), \[\w+_param_0\]", text)
    (address,) = re.findall(rf"cvta\.to\.global\.u64\s+(%rd\d+), {place};", text)
    (register,) = re.findall(rf"st\.global\.u64\s+\[{address}\], (%rd\d+);", text)
    (found,) = re.findall(rf"mov\.u64\s+{register}, (-?\d+);", text)
    return int(found)


@pytest.mark.parametrize(("low", "high", "step"), RANGES)
@pytest.mark.parametrize("given", ["numbers", "names"])
def test_a_loop_takes_the_values_of_its_range(low: int, high: int, step: int, given: str) -> None:
    """Of numbers, which a loop counts with alone, and of names, whose values are known to NVVM only."""
    called = f"{low}, {high}, {step}" if given == "numbers" else f"low, high, {step}"
    body = f"for i in range({called}):\n    total = total * 3 + i + 7"
    expected = 0
    for i in range(low, high, step):
        expected = expected * 3 + i + 7
    assert value(ptx(body, low, high)) == expected


def test_loops_in_loops_and_after_another_and_left_early() -> None:
    body = """
for i in range(3):
    for j in range(1, 5, 2):
        if j == 3:
            continue
        for k in range(2):
            total = total * 5 + i + 10 * j + k
for i in range(10):
    if i == 6:
        break
    total += i
""".strip()
    names: dict[str, int] = {"total": 0}
    exec(body, names)
    assert value(ptx(body)) == names["total"]


def test_a_range_that_is_kept() -> None:
    assert (
        value(ptx("steps = range(4)\nfor i in steps:\n    total += i\nfor i in steps:\n    total += i")) == 12
    )


@pytest.mark.parametrize("a", [-9, -8, -1, 0, 1, 7, 8, 2**40])
@pytest.mark.parametrize("b", [-3, -1, 0, 1, 4, 5])
def test_quotients_and_rests_are_pythons(a: int, b: int) -> None:
    quotient, rest = (a // b, a % b) if b else (0, 0)
    body = f"total = floordiv_i64({a}, {b}) * 64 + mod_i64(low, high) + 100"
    assert value(ptx(body, a, b)) == quotient * 64 + rest + 100


def test_equal_divisions_are_one() -> None:
    body = "for i in range(3):\n    total += floordiv_i64(n, low * n + 5) * i + mod_i64(n, low * n + 5)"
    assert len(re.findall(r"\bdiv\.s64", ptx(body, 3))) == 1
    assert "rem.s64" not in ptx(body, 3)


def test_a_loop_is_a_few_lines_of_text() -> None:
    from tileloom.runtime import cuda

    loop = "for i in range(4):\n    total += i"
    lengths = []
    for loops in (2, 12):
        body = "\n".join("    " + line for line in "\n".join([loop] * loops).splitlines())
        source = HEAD + KERNEL.format(body=body, low=0, high=0)
        library, _ = cuda._lowered(cuda.load(source), "folded", SM_80)
        lengths.append(sum(t.count("\n") for t in library.llvm_strs))
    assert (lengths[1] - lengths[0]) / 10 < 45  # 115 of numba-cuda's own


PRODUCT = """kernel product<T: f16 | bf16>(a: T[M, K], b: T[N, K]) -> o: T[M, N] {
    o[m, n] = sum[k](a[m, k] * b[n, k])
}
"""


def test_the_machine_code_is_that_of_numba_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import tileloom as tl
    from tileloom.compiler.pipeline import compile_kernel
    from tileloom.dsl.types import DType
    from tileloom.runtime import cuda, cuda_passes

    sizes = {"M": 512, "N": 512, "K": 512}
    made = compile_kernel(tl.parse(PRODUCT)["product"], SM_90A, sizes, dtypes={"T": DType.BF16})
    name = next(iter(cuda.load(made.source)["LAUNCHES"]))

    def instructions() -> list[str]:
        return re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*)$", cuda.assemble_one(made.source, name, SM_90A).sass, re.M
        )

    ours = instructions()
    monkeypatch.setattr(
        cuda_passes._Lowering, "lowering_class", import_module("numba.cuda.lowering").CUDALower
    )
    assert len(ours) > 300
    assert instructions() == ours
