"""Text with other names, factors and statements in another order gives the same machine code, instruction by instruction."""

from __future__ import annotations

import importlib.util
import re

import pytest

import tileloom as tl
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import SM_80, SM_90A, CudaTarget
from tileloom.dsl.types import DType

needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
PRODUCT = """kernel product<T: f16 | bf16>(a: T[M, K], b: T[N, K]) -> o: T[M, N] {
    s[m, n] = sum[k](a[m, k] * b[n, k])
    o[m, n] = s[m, n]
}
"""
OTHER_PRODUCT = """kernel layer<U: f16 | bf16>(input: U[Rows, Depth], weights: U[Columns, Depth])
    -> result: U[Rows, Columns] {
    result[i, j] = acc[i, j]
    acc[i, j] = sum[z](weights[j, z] * input[i, z])
}
"""
ATTENTION = """kernel attention<T: f16 | bf16>(q: T[H, M, D], k: T[H, N, D], v: T[H, N, D]) -> o: T[H, M, D] {
    s[h, m, n] = sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D)
    p[h, m, n] = softmax[n](s[h, m, n])
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
}
"""
OTHER_ATTENTION = """kernel look<U: f16 | bf16>(queries: U[Heads, X, Size], keys: U[Heads, Y, Size],
    values: U[Heads, Y, Size]) -> found: U[Heads, X, Size] {
    found[g, x, c] = sum[y](values[g, y, c] * weights[g, x, y])
    weights[g, x, y] = softmax[y](scores[g, x, y])
    scores[g, x, y] = sum[c](keys[g, y, c] * queries[g, x, c]) / sqrt(Size)
}
"""
CASES = {
    "product": (PRODUCT, OTHER_PRODUCT, (512, 512, 512)),
    "attention": (ATTENTION, OTHER_ATTENTION, (8, 1024, 64, 1024)),
}
MOST_REGISTERS = {
    ("product", "sm_80"): 255,
    ("attention", "sm_80"): 255,
    ("product", "sm_90a"): 240,  # of 65,536, two warpgroups: so few blocks of 64 rows have one that computes
    ("attention", "sm_90a"): 240,
}


def instructions(text: str, sizes: tuple[int, ...], target: CudaTarget) -> tuple[list[str], int]:
    """Of the preferred kernel, without addresses; and its registers."""
    from tileloom.runtime import machine_code

    program = tl.parse(text)
    (name,) = program.kernels
    kernel = program[name]
    dtypes = {p.name.name: DType.BF16 for p in kernel.kernel.type_params}
    given = dict(zip(elaborate(kernel, dtypes).extents, sizes, strict=True))
    made = compile_kernel(kernel, target, given, dtypes=dtypes)
    ((first, *_),) = machine_code.variants(made.source).values()
    found = machine_code.machine_code(made.source, first.name, target)
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
    sass = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*$", found.sass, re.M)
    return [re.sub(rf"`\(.*?\)|\b{name}\b", "LABEL", x) for x in sass], found.registers


@needs_toolkit
@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=lambda t: t.sm)
@pytest.mark.parametrize("case", CASES)
def test_other_names_and_another_order(case: str, target: CudaTarget) -> None:
    one, other, sizes = CASES[case]
    first, registers = instructions(one, sizes, target)
    second, others = instructions(other, sizes, target)
    assert len(first) > 300
    assert any(x.startswith(("HMMA", "HGMMA")) for x in first)
    assert registers == others <= MOST_REGISTERS[case, target.sm]
    assert first == second
