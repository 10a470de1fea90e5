"""Products of narrow operands: the tier `matrix` of the CPU, and the instructions below it, against NumPy and float64."""

from __future__ import annotations

import multiprocessing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding, ir
from numba import njit

import tileloom as tl
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU, CpuTarget
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.types import DType
from tileloom.runtime.intrinsics import matrix_units
from tileloom.runtime.intrinsics.matrices import Side, i64, matrix
from tileloom.runtime.intrinsics.matrix_units import multiply_bf16, multiply_i8, start_tiles, stop_tiles
from tileloom.runtime.threads import thread_limit

BF16: Any = ml_dtypes.bfloat16
SIZES = [(1, 1, 1), (3, 16, 0), (17, 70, 33), (32, 32, 64), (50, 33, 129)]
UNITS = {
    "tiles": ("amx-bf16", "amx-int8"),
    "vectors of bf16": ("avx512bf16",),
    "plain vectors": (),
}
AMX = CpuTarget("cpu", ("amx_bf16", "amx_int8", "avx512_bf16"))
KERNELS = """
kernel product<T: f32 | bf16 | i8>(a: T[M, K], b: T[K, N], w: f32[N]) -> c: f32[M, N] {
    c[m, n] = max(0, f32(sum[k](a[m, k] * b[k, n])) + w[n])
}
kernel attention<T: f32 | bf16>(q: T[B, M, D], k: T[B, N, D], v: T[B, N, D]) -> o: T[B, M, D] {
    o[b, m, e] = sum[n](softmax[n](sum[d](q[b, m, d] * k[b, n, d])) * v[b, n, e])
}
kernel chained(a: f32[M, K], b: bf16[K, N], c: f32[N, L]) -> o: f32[M, L] {
    o[m, l] = sum[n](exp(sum[k](a[m, k] * b[k, n])) * c[n, l])
}
"""


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Code made in the test uses these instructions alone."""
    wanted = UNITS[request.param]
    lacking = set(wanted) - set(matrix_units.units())
    if lacking:
        pytest.skip(f"this processor, or its system, has no {', '.join(sorted(lacking))}")
    monkeypatch.setattr(matrix_units, "UNITS", wanted)
    return str(request.param)


def functions() -> tuple[Any, Any]:
    """Both products, compiled anew, for operands that lie anywhere: c starts at its second row."""

    @njit
    def bf16(c: Any, a: Any, b: Any, space: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
        start_tiles()
        multiply_bf16(
            matrix(c, (1, 0), 0, 1, 0), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0),
            matrix(space, (0,), 0, 0, 0), m, n, k, fresh,
        )  # fmt: skip
        stop_tiles()

    @njit
    def i8(c: Any, a: Any, b: Any, space: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
        start_tiles()
        multiply_i8(
            matrix(c, (1, 0), 0, 1, 0), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0),
            matrix(space, (0,), 0, 0, 0), m, n, k, fresh,
        )  # fmt: skip
        stop_tiles()

    return bf16, i8


SPACE = np.zeros(1 << 15, np.int32)


def strided(x: np.ndarray) -> np.ndarray:
    """Dense in neither direction, of an array type that leaves that open."""
    gaps = np.full((2 * x.shape[0], 2 * x.shape[1]), 7, x.dtype)[::2, ::2]
    gaps[:] = x
    return gaps


def laid_out(x: np.ndarray) -> list[np.ndarray]:
    """The same matrix dense along rows, along columns and along neither, all of one array type."""
    rows = np.full((x.shape[0], 2 * x.shape[1] + 2), 7, x.dtype)[:, : x.shape[1]]
    rows[:] = x
    columns = np.full((x.shape[1], 2 * x.shape[0] + 2), 7, x.dtype)[:, : x.shape[0]]
    columns[:] = x.T
    return [rows, columns.T, strided(x)]


def bits(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).view(np.uint16)


def test_exact_products_wherever_operands_lie(unit: str) -> None:
    """Small integers and i8: each order of summing gives the exact result; nothing beside it is written."""
    bf16, i8 = functions()
    draw = np.random.default_rng(0).integers
    for m, n, k in SIZES:
        narrow = draw(-128, 128, (m, k)).astype(np.int8), draw(-128, 128, (k, n)).astype(np.int8)
        small = draw(-8, 9, (m, k)).astype(np.float32), draw(-8, 9, (k, n)).astype(np.float32)
        cases = [
            (i8, narrow, narrow[0].astype(np.int32) @ narrow[1].astype(np.int32)),
            (bf16, (bits(small[0]), bits(small[1])), small[0] @ small[1]),
            (bf16, (bits(small[0]), small[1]), small[0] @ small[1]),
        ]
        for function, (left, right), want in cases:
            for a, b in zip(laid_out(left) * 3, [y for y in laid_out(right) for _ in range(3)], strict=True):
                c = np.full((m + 2, n + 5), 3, want.dtype)
                for fresh, expected in ((True, want), (False, 2 * want)):
                    function(c, a, b, SPACE, m, n, k, fresh)
                    np.testing.assert_array_equal(c[1 : m + 1, :n], expected)
                assert (c[[0, -1]] == 3).all()
                assert (c[:, n:] == 3).all()


def test_rounding_specials_and_subnormals(unit: str) -> None:
    """f32 operands are rounded to nearest even; NaN and infinities reach their own sums alone; subnormals may count as 0."""
    bf16, _ = functions()
    m, n, k = 33, 17, 35
    draw = np.random.default_rng(1).standard_normal
    left, right = draw((m, k)).astype(np.float32), draw((k, n)).astype(np.float32)
    left[:4, 0] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 3.4e38  # ties, and beyond the largest bf16
    left[5, 2], left[6, 3], left[7, 4], left[8, 5] = np.nan, np.inf, -np.inf, 1e-39
    right[34, 3], right[7, 1] = np.inf, 1e-40
    c = np.zeros((m + 2, n), np.float32)
    bf16(c, left, bits(right), SPACE, m, n, k, True)
    with np.errstate(over="ignore", invalid="ignore"):
        want = left.astype(BF16).astype(np.float64) @ right.astype(BF16).astype(np.float64)
    np.testing.assert_allclose(c[1:-1], want, rtol=1e-5, atol=1e-5)
    assert np.isnan(c[6]).all()
    assert np.isinf(c[7, [0, 1, 2, 4]]).all()


def test_a_sum_of_negative_zeros_set_or_kept(unit: str) -> None:
    """Without steps along k a fresh result is 0 and another stays what it was."""
    bf16, _ = functions()
    c = np.full((4, 40), -0.0, np.float32)
    none = np.zeros((2, 0), np.uint16), np.zeros((0, 40), np.uint16)
    bf16(c, strided(none[0]), strided(none[1]), SPACE, 2, 40, 0, False)
    assert np.signbit(c[[0, -1]]).all()
    bf16(c, strided(none[0]), strided(none[1]), SPACE, 2, 40, 0, True)
    assert not c[1:3].any()


def assembly(monkeypatch: pytest.MonkeyPatch, form: Any, units: tuple[str, ...], features: str) -> str:
    """Assembly of a product for a stated processor, whatever this machine is."""
    monkeypatch.setattr(matrix_units, "UNITS", units)
    module = ir.Module()
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(64)
    kinds = [*[pointer] * 4, *[number] * 3, ir.IntType(1)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "product")
    b = ir.IRBuilder(function.append_basic_block())
    size = form.element.width // 8
    sides = [Side(x, i64(1024), i64(s)) for x, s in zip(function.args, (4, size, size, 4), strict=False)]
    panels = [matrix_units._Panels(form, form.element, across) for across in (False, True)]
    if form.feature in units:
        matrix_units.configure(b)
    matrix_units._Blocks(form).body(b, (panels[0], panels[1]), sides, list(function.args[4:]))
    b.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this build of LLVM makes no code for x86-64")
    module.triple = "x86_64-unknown-linux-gnu"
    machine = target.create_target_machine(cpu="x86-64-v4", features=features, opt=2)
    return str(machine.emit_assembly(binding.parse_assembly(str(module))))


@pytest.mark.skipif(matrix_units.REGISTER_BYTES != 64, reason="vectors here are narrower than what is stated")
def test_the_instructions_of_a_stated_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = "+amx-tile,+amx-bf16,+amx-int8"
    for form, instruction in ((matrix_units.BF16_SUMS, "tdpbf16ps"), (matrix_units.I8_SUMS, "tdpbssd")):
        text = assembly(monkeypatch, form, ("amx-bf16", "amx-int8"), tiles)
        assert text.count(instruction) == 4
        assert text.count("ldtilecfg") == 1
    text = assembly(monkeypatch, matrix_units.BF16_SUMS, ("avx512bf16",), "+avx512bf16")
    assert "vdpbf16ps" in text
    assert "tdpbf16ps" not in text


# ---------------------------------------------------------------- the tier


def made(name: str, dtype: DType, target: CpuTarget, **options: Any) -> Compilation:
    sizes = {"product": {"M": 100, "N": 70, "K": 65}, "attention": {"B": 2, "M": 64, "N": 100, "D": 64}}
    sizes["chained"] = {"M": 64, "N": 64, "K": 64, "L": 64}
    kernel = tl.parse(KERNELS)[name]
    return compile_kernel(
        kernel, target, sizes[name], dtypes={"T": dtype} if name != "chained" else None, **options
    )


def tier_of(c: Compilation) -> str:
    return c.module.programs[0].tier


def test_the_tier_is_chosen_where_the_target_and_the_operands_have_it() -> None:
    assert tier_of(made("product", DType.BF16, AMX)) == "matrix"
    assert "multiply_i8(" in made("product", DType.I8, AMX).source
    assert tier_of(made("product", DType.I8, CpuTarget("cpu", ("avx512_bf16",)))) == "loops"
    for other in (made("product", DType.BF16, CPU), made("product", DType.F32, AMX)):
        assert tier_of(other) == "loops"
        assert "matrix_units" not in other.source
    precise = made("attention", DType.BF16, AMX, options=Options(precise=True))
    assert tier_of(precise) == "loops"


def test_products_that_follow_one_another_stay_in_f32_without_tiles() -> None:
    vectors = CpuTarget("cpu", ("avx512_bf16",))
    c = made("attention", DType.BF16, vectors)
    assert tier_of(c) == "loops"
    (remark,) = [r for r in c.remarks if r.name == "matrix-units"]
    assert remark.kind == "missed"
    assert "`tier matrix` in a schedule takes it" in remark.message
    stated = Schedule("s", "attention", "cpu", tier="matrix")
    for other in (
        made("attention", DType.BF16, vectors, schedule=stated),
        made("product", DType.BF16, vectors),
    ):
        assert tier_of(other) == "matrix"
    assert tier_of(made("attention", DType.BF16, AMX)) == "matrix"


def test_both_products_of_attention_and_the_remark() -> None:
    c = made("attention", DType.BF16, AMX)
    assert c.source.count("multiply_bf16(") >= 2
    assert " multiply(" not in c.source
    (remark,) = [r for r in c.remarks if r.name == "matrix-units"]
    assert "amx_bf16" in remark.message
    assert "rounded" in remark.message


def test_two_computed_operands_stay_f32() -> None:
    """a · b meets a stored bf16; exp(…) · c does not."""
    source = made("chained", DType.F32, AMX).source
    assert source.count("multiply_bf16(") == 1
    assert "multiply(" in source.replace("multiply_bf16(", "")


def test_a_tier_that_the_target_lacks_is_refused() -> None:
    schedule = Schedule("s", "product", "cpu", tier="matrix")
    with pytest.raises(TileError, match="no instructions for products of bf16"):
        made("product", DType.BF16, CPU, schedule=schedule)
    with pytest.raises(TileError, match="no product with an operand stored as bf16"):
        made("product", DType.F32, AMX, schedule=schedule)
    loops = made("product", DType.BF16, AMX, schedule=Schedule("s", "product", "cpu", tier="loops"))
    assert tier_of(loops) == "loops"


def product() -> tuple[Any, tuple[np.ndarray, ...], np.ndarray]:
    """A compiled product, arguments and the result in float64."""
    draw = np.random.default_rng(3).standard_normal
    a, b = (draw(s).astype(BF16) for s in ((300, 131), (131, 90)))
    w = draw(90).astype(np.float32)
    want = np.maximum(0, a.astype(np.float64) @ b.astype(np.float64) + w)
    return tl.compile(tl.parse(KERNELS)["product"]), (a, b, w), want


def test_products_on_several_threads_and_in_a_fork() -> None:
    """Tiles are state of a thread, and the permission to use them one of the process and its children."""
    kernel, arguments, want = product()
    with thread_limit(2):
        first = kernel(*arguments)
        np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-4)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(_again), first)


def _again() -> Any:
    kernel, arguments, _ = product()
    return kernel(*arguments)
