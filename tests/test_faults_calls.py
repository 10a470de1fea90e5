"""Faults of kinds stride and numba (shared/cases/faults.md), and what a repeated call costs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from float64_attention import normal

import tileloom as tl
from tileloom.runtime.threads import thread_limit

ROOT = Path(__file__).resolve().parent.parent
SUMS = """
kernel sums(total: inout f32[K], label: i64[M], x: f32[M, N]) -> row: f32[M] {
    example M = 37, N = 130, K = 3
    row[m] = sum[n](x[m, n])
    total[label[m]] += row[m]
}
"""
UNARY = (
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "tanh",
    "erf",
    "sin",
    "cos",
    "abs",
    "floor",
    "ceil",
    "round",
)
BINARY = ("min({}, {})", "max({}, {})", "pow({}, {})", "{} + {}", "{} - {}", "{} * {}", "{} / {}")
REDUCED = ("sum", "max", "min", "prod")


def every_operation(t: str) -> str:
    """A kernel with one output for each operation of the language on elements of type `t`."""
    values = [f"{f}(x[m, n])" for f in UNARY] + [b.format("x[m, n]", "y[m, n]") for b in BINARY]
    values.append("where(x[m, n] < y[m, n] and not (x[m, n] == 1), x[m, n], -y[m, n])")
    rows = [f"{f}[n](x[m, n])" for f in REDUCED] + ["sum[n](x[m, n] * y[m, n])"]
    outputs = [f"a{i}: {t}[M, N]" for i in range(len(values))] + [f"b{i}: {t}[M]" for i in range(len(rows))]
    lines = [f"a{i}[m, n] = {v}" for i, v in enumerate(values)] + [
        f"b{i}[m] = {v}" for i, v in enumerate(rows)
    ]
    counts = ["first: i64[M]", "some: bool[M]"]
    lines += ["first[m] = argmax[n](x[m, n])", "some[m] = any[n](x[m, n] > y[m, n])"]
    body = "\n    ".join(lines)
    return f"kernel ops(x: {t}[M, N], y: {t}[M, N])\n    -> ({', '.join([*outputs, *counts])}) {{\n    {body}\n}}\n"


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_B099_every_operation_on_narrow_floats(name: str, dtype: Any) -> None:
    kernel = tl.parse(every_operation(name))["ops"]
    x, y = (np.abs(normal(s, 5, 19)).astype(dtype) + dtype(0.25) for s in (0, 1))
    results, oracle = tl.compile(kernel)(x, y), tl.compile(kernel, target="interp")(x, y)
    step = float(ml_dtypes.finfo(dtype).eps)
    for got, want in zip(results, oracle, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=2 * step, atol=step / 4
        )


def test_B094_shared_targets_are_summed_alike_by_any_number_of_threads() -> None:
    sums = tl.compile(tl.parse(SUMS)["sums"])
    x, label = normal(0, 37, 130), np.random.default_rng(1).integers(0, 3, 37)
    with thread_limit(1):
        serial = np.zeros(3, np.float32)
        rows = sums(serial, label, x)
    np.testing.assert_allclose(rows, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(serial, [rows[label == i].sum() for i in range(3)], rtol=1e-5, atol=1e-5)
    for n in (1, 2, 4):
        with thread_limit(n):
            for _ in range(200):
                total = np.zeros(3, np.float32)
                np.testing.assert_array_equal(sums(total, label, x), rows)
                np.testing.assert_array_equal(total, serial)


def test_B096_more_threads_than_work() -> None:
    with thread_limit(8):
        for m in (1, 17):
            a, b = normal(m, m, 33), normal(2, 33, 19)
            np.testing.assert_allclose(tl.matmul(a, b), a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
            q, k = normal(m, 1, 1, m, 16), normal(3, 1, 1, 5, 16)
            alone = tl.attention(q, k, k)
            assert np.isfinite(alone).all()


def test_B043_a_layout_that_cannot_be_written_is_refused_in_one_line() -> None:
    x = normal(0, 4, 6)
    shared = np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (4, 6), (8, 4))
    for out, says in (
        (
            shared,
            r"out for `y` has elements that share memory \(strides \(8, 4\)\); a plain array is what it takes",
        ),
        (np.broadcast_to(np.float32(0), (4, 6)), "out for `y` is read-only"),
        (x, "out for `y` shares memory with `x`"),
        (np.zeros((4, 5), np.float32), r"out for `y` has shape \(4, 5\); the result has \(4, 6\)"),
        (np.zeros((4, 6), np.float64), "out for `y` holds float64"),
    ):
        before = out.copy()
        with pytest.raises((ValueError, TypeError), match=says) as refused:
            tl.softmax(x, out=out)
        assert "\n" not in str(refused.value)
        np.testing.assert_array_equal(out, before)


def test_arrays_that_are_not_aligned() -> None:
    raw = np.zeros(4 * 24 + 1, np.uint8)
    x = raw[1:].view(np.float32).reshape(4, 6)
    x[:] = normal(0, 4, 6)
    np.testing.assert_array_equal(tl.softmax(x), tl.softmax(x.copy()))
    with pytest.raises(ValueError, match="out for `y` is not aligned"):
        tl.softmax(x.copy(), out=x)


def test_a_repeated_call_takes_microseconds() -> None:
    add = tl.compile(tl.load(ROOT / "examples" / "vector_add.tile")["vector_add"])
    x = np.ones(16, np.float32)
    best = min(_seconds(add, x) for _ in range(50))
    assert best < 50e-6  # 3 µs on an idle machine


def _seconds(add: Any, x: Any, out: Any = None) -> float:
    start = time.perf_counter()
    for _ in range(100):
        add(x, x, out=out)
    return (time.perf_counter() - start) / 100


def test_remembered_calls_still_see_what_changes() -> None:
    add = tl.compile(tl.load(ROOT / "examples" / "vector_add.tile")["vector_add"])
    x, y = normal(0, 16), normal(1, 16)
    first = add(x, y)
    kept = first.copy()
    x[:] = 3
    np.testing.assert_array_equal(add(x, y), 3 + y)
    np.testing.assert_array_equal(first, kept)  # results are not reused
    np.testing.assert_array_equal(add(x[::-2], y[::2]), 3 + y[::2])
    np.testing.assert_array_equal(add(y=y, x=-y), np.zeros(16, np.float32))
    with pytest.raises(ValueError, match="`y`"):
        add(x, y[1:])


@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_numbers_and_arrays_that_no_target_takes(target: str) -> None:
    program = tl.parse("kernel k(x: f32[N], s: f32, n: i32) -> y: f32[N] { y[i] = x[i] * s + f32(n) }")
    kernel, x = tl.compile(program["k"], target=target), np.ones(3, np.float32)
    for _ in range(2):
        assert kernel(x, 2.0, 1).tolist() == [3, 3, 3]
    for arguments, failure, says in (
        ((x, 10**400, 1), ValueError, "`s` is an integer beyond 1.8e.308"),
        ((x, 2.0, 2**31), ValueError, "`n` is 2147483648; i32 holds"),
        ((x, 2.0, np.uint64(2**63)), ValueError, "`n` is 9223372036854775808"),
        ((x, 2.0, True), TypeError, "`n` is True"),
        ((np.ma.masked_array(x), 2.0, 1), TypeError, "`x` is a masked array"),
    ):
        with pytest.raises(failure, match=says):
            kernel(*arguments)
    with pytest.raises((TypeError, ValueError), match="0 arrays"):
        kernel(x, 2.0, 1, out=())


def test_remembered_calls_that_write_to_given_arrays() -> None:
    add = tl.compile(tl.load(ROOT / "examples" / "vector_add.tile")["vector_add"])
    x, y, out = normal(0, 16), normal(1, 16), np.zeros(16, np.float32)
    for scale in (1, 2, 3):
        assert add(scale * x, y, out=out) is out
        np.testing.assert_array_equal(out, scale * x + y)
        assert add(x, y) is not out
    best = min(_seconds(add, x, out) for _ in range(50))
    assert best < 50e-6  # 5 µs on an idle machine
    store = np.zeros(24, np.float32)
    with pytest.raises(ValueError, match="out for `z` shares memory with `x`"):
        add(store[:16], y, out=store[8:])
    apart = np.zeros(32, np.float32)
    add(x, y, out=apart[::2])
    np.testing.assert_array_equal(apart[::2], x + y)
    np.testing.assert_array_equal(apart[1::2], 0)
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out for `z` is read-only"):
        add(x, y, out=frozen)
    with pytest.raises(ValueError, match="out for `z` has shape"):
        add(x, y, out=out[1:])


def test_a_warm_start_needs_no_derivation() -> None:
    program = f"""
import sys
import numpy as np, tileloom as tl
k = tl.compile(tl.load({str(ROOT / "examples" / "softmax.tile")!r})["row_softmax"])
k(np.ones((3, 5), np.float32))
print("sympy" in sys.modules, "tileloom.compiler.pipeline" in sys.modules)
"""
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[1].stdout.split() == ["False", "False"]
