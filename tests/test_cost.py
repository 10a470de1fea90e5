"""What the cost model counts, against counts by hand: operations of each kind, bytes, and time by given rates."""

from __future__ import annotations

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.cost import Cost, Rates, interpolated, module_cost, predict
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import CPU
from tileloom.dsl.load import parse


def cost(text: str, fuse: str = "auto", **sizes: int) -> Cost:
    program = parse(text)
    (kernel,) = (program[name] for name in program.kernels)
    return module_cost(compile_kernel(kernel, CPU, sizes, options=Options(fuse=fuse)).module, sizes)  # type: ignore[arg-type]


PRODUCT = "kernel product(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }"
ROWS = "kernel rows(w: f32[V, D], id: i32[T]) -> o: f32[T, D] { o[t, d] = w[id[t], d] * 2.0 }"
COLUMNS = "kernel columns(w: f32[D, V], id: i32[T]) -> o: f32[D, T] { o[d, t] = w[d, id[t]] * 2.0 }"


@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (100, 70, 33)])
def test_a_product_is_two_operations_a_term(m: int, n: int, k: int) -> None:
    found = cost(PRODUCT, M=m, N=n, K=k)
    assert found.dot_flops == pytest.approx(2 * m * n * k)
    assert found.bytes == 4 * (m * k + k * n + m * n)
    assert found.launches == 1


def test_rows_that_data_choose_are_read_as_rows() -> None:
    found = cost(ROWS, V=100, D=64, T=1000)
    assert found.gather_ops == 0
    assert found.bytes == 4 * (100 * 64 + 1000 + 1000 * 64)


def test_elements_that_data_choose_are_gathered() -> None:
    assert cost(COLUMNS, V=100, D=64, T=1000).gather_ops == 64 * 1000


def test_no_more_bytes_are_moved_than_are_read() -> None:
    """Of a table of 30000 rows 10 are read."""
    assert cost(ROWS, V=30000, D=64, T=10).bytes == 4 * (10 * 64 + 10 + 10 * 64)


def test_what_is_stored_between_launches_is_moved_twice() -> None:
    text = "kernel two(x: f32[M, N]) -> o: f32[M, N] { t[m, n] = x[m, n] + 1.0\no[m, n] = t[m, n] * t[m, n] }"
    one, two = (cost(text, fuse, M=50, N=60) for fuse in ("all", "none"))
    assert (one.launches, two.launches) == (1, 2)
    assert two.bytes - one.bytes == 2 * 4 * 50 * 60


RATES = Rates(
    dot_rates=((128.0, 1e9),),
    vector_ops_per_s=1e9,
    reduce_ops_per_s=1e9,
    gather_ops_per_s=1e8,
    special_ops_per_s=1e8,
    costly_ops_per_s=1e7,
    copy_rates=((1.0, 1e9),),
    fresh_rates=((1.0, 1e12),),
    launch_s=1e-6,
    task_s=0.0,
    units=2,
    origin="a test",
)


def test_memory_and_arithmetic_overlap_and_units_stand_idle() -> None:
    assert predict(Cost(vector_ops=1e9, bytes=5e8, launches=1, tasks=2), RATES).seconds == pytest.approx(
        1 + 1e-6
    )
    assert predict(Cost(vector_ops=1e9, bytes=3e9, launches=1, tasks=2), RATES).binds == "memory"
    assert predict(Cost(vector_ops=1e9, launches=1, tasks=1), RATES).seconds == pytest.approx(2 + 1e-6)
    assert predict(Cost(vector_ops=1e9, launches=1, tasks=3), RATES).seconds == pytest.approx(4 / 3 + 1e-6)


def test_rates_between_two_sizes_are_interpolated_in_logarithms() -> None:
    table = ((1e3, 1e9), (1e5, 4e9))
    assert interpolated(table, 1e4) == pytest.approx(2e9)
    assert (interpolated(table, 10), interpolated(table, 1e9)) == (1e9, 4e9)


def test_rows_chosen_by_data_give_the_rows() -> None:
    """By vectors, with indices clamped to the table, ragged rows, strided tables and a table without rows."""
    kernel = tl.compile(parse(ROWS)["rows"])
    rng = np.random.default_rng(3)
    for v, d, t in ((7, 37, 50), (3, 1, 4), (5, 64, 0)):
        table = rng.standard_normal((2 * v, d), np.float32)[::2]
        index = rng.integers(0, v, t, np.int32)
        assert np.array_equal(kernel(table, index), table[index] * 2)
    table = rng.standard_normal((4, 19), np.float32)
    assert np.array_equal(kernel(table, np.array([-5, 99, 3], np.int32)), table[[0, 3, 3]] * 2)
    assert np.array_equal(kernel(np.empty((0, 19), np.float32), np.zeros(3, np.int32)), np.zeros((3, 19)))
