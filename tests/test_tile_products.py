"""Products of tiles and the copies around them, against NumPy: every way an operand can lie, and every ragged edge."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from tileloom.runtime.intrinsics.matrices import matrix
from tileloom.runtime.intrinsics.tile_products import (
    BLOCKS,
    multiply,
    multiply_packing,
    multiply_packing_bf16,
    multiply_packing_several,
    multiply_whole,
    pack,
    pack_f16,
    unpack,
)
from tileloom.runtime.intrinsics.vectors import REGISTER_BYTES

SIZES = [(1, 1, 1), (3, 16, 0), (8, 32, 5), (17, 70, 33), (13, 7, 64), (30, 33, 9)]
ROW = 96
WIDE_ROW = 4 * ROW


@njit
def onto(c: Any, a: Any, b: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply(
        matrix(c, (1, 0), 0, 1, ROW), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, ROW), m, n, k, fresh
    )


@njit
def onto_turned(c: Any, a: Any, b: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply(
        matrix(c, (1, 0), 0, 1, ROW), matrix(a, (0, 0), 1, 0, 0), matrix(b, (0, 0), 0, 1, ROW), m, n, k, fresh
    )


@njit
def onto_whole(c: Any, a: Any, b: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply_whole(
        matrix(c, (1, 0), 0, 1, ROW), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, ROW), m, n, k, fresh
    )


@njit
def packing(c: Any, a: Any, b: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply_packing(
        matrix(c, (1, 0), 0, 1, ROW), matrix(a, (0, 0), 1, 0, 0), matrix(b, (0, 0), 1, 0, 0), None,
        matrix(panel, (0, 0), 0, 1, 64), m, n, k, fresh,
    )  # fmt: skip


@njit
def packing_wide(c: Any, a: Any, b: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply_packing(
        matrix(c, (1, 0), 0, 1, WIDE_ROW), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0), None,
        matrix(panel, (0, 0), 0, 1, 64), m, n, k, fresh,
    )  # fmt: skip


@njit
def packing_bf16(c: Any, a: Any, b: Any, panel: Any, m: Any, n: Any, k: Any) -> None:
    multiply_packing_bf16(
        matrix(c, (1, 0), 0, 1, ROW), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0), None,
        matrix(panel, (0, 0), 0, 1, 64), m, n, k, True,
    )  # fmt: skip


def laid_out(x: np.ndarray) -> list[np.ndarray]:
    """The same matrix dense, transposed, and with gaps in both directions."""
    gaps = np.full((2 * x.shape[0], 2 * x.shape[1]), 7, x.dtype)[::2, ::2]
    gaps[:] = x
    return [x, np.asfortranarray(x), gaps]


def drawn(dtype: Any, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(-4, 5, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_product_sets_or_adds_and_touches_nothing_else(dtype: Any) -> None:
    """Small integers: every order of summing gives the exact result."""
    for m, n, k in SIZES:
        a, b = drawn(dtype, m, k), np.zeros((k, ROW), dtype)
        b[:, :n] = drawn(dtype, k, n)
        c = np.full((m + 2, ROW), 7, dtype)
        want = a @ b[:, :n]
        for fresh, expected in ((True, want), (False, 2 * want)):
            onto(c, a, b, m, n, k, fresh)
            np.testing.assert_array_equal(c[1 : m + 1, :n], expected)
            c[1 : m + 1, :n] -= 0 if fresh else want
            onto_turned(c, np.ascontiguousarray(a.T), b, m, n, k, fresh)
            np.testing.assert_array_equal(c[1 : m + 1, :n], expected)
            assert (c[1 : m + 1, n:] == 7).all()
            assert (c[[0, m + 1]] == 7).all()


def test_what_is_read_in_place_is_asked_for_and_what_is_copied_is_not() -> None:
    a, b, c = (np.zeros(s, np.float32) for s in ((16, 24), (24, ROW), (18, ROW)))
    for product, left in ((onto, a), (onto_turned, np.ascontiguousarray(a.T))):
        product(c, left, b, 16, 16, 24, True)
        text = product.inspect_llvm()[product.signatures[0]]
        assert text.count("call void @llvm.prefetch") > 0
    gaps = np.zeros((32, 48), np.float32)[::2, ::2]
    onto(c, gaps, b, 16, 16, 24, True)
    assert "call void @llvm.prefetch" not in onto.inspect_llvm()[onto.signatures[-1]]


def test_every_number_of_rows_is_cut_into_blocks() -> None:
    for m in range(1, 26):
        a, b = drawn(np.float32, m, 5), drawn(np.float32, 5, ROW)
        c = np.full((m + 2, ROW), 7, np.float32)
        onto(c, a, b, m, 40, 5, True)
        np.testing.assert_array_equal(c[1 : m + 1, :40], a @ b[:, :40])
        assert (c[1 : m + 1, 40:] == 7).all()
        assert (c[[0, m + 1]] == 7).all()


def test_whole_panels_take_the_highest_blocks_on_every_machine() -> None:
    for blocks in BLOCKS.values():
        assert blocks.heights(blocks.wide, False) == blocks.rows
        assert blocks.heights(1, False) == blocks.narrow
        assert all(blocks.heights(n, slivers)[0] > 0 for n in (1, blocks.wide) for slivers in (False, True))


def test_every_number_of_columns_is_cut_into_vectors() -> None:
    """Two at a time and one, of which the last is masked, whether columns are read in place or from a panel."""
    panel = np.empty((65, 64), np.float32)
    for n in range(1, 81):
        a, b = drawn(np.float32, 13, 9), drawn(np.float32, 9, ROW)
        for product in (
            lambda c, a=a, b=b, n=n: onto(c, a, b, 13, n, 9, True),
            lambda c, a=a, b=b, n=n: packing(c, a.T, np.ascontiguousarray(b.T), panel, 13, n, 9, True),
        ):
            c = np.full((15, ROW), 7, np.float32)
            product(c)
            np.testing.assert_array_equal(c[1:14, :n], a @ b[:, :n])
            assert (c[1:14, n:] == 7).all()
            assert (c[[0, 14]] == 7).all()


def test_whole_panels_have_columns_beyond_the_last() -> None:
    """As many as fill a block, and no more."""
    block = BLOCKS[REGISTER_BYTES].wide * REGISTER_BYTES // 4
    for m, n in ((1, 1), (13, block - 1), (13, block), (7, ROW - block)):
        a, b = drawn(np.float32, m, 9), drawn(np.float32, 9, ROW)
        c = np.full((m + 2, ROW), 7, np.float32)
        columns = -(-n // block) * block
        for fresh, expected in ((True, a @ b), (False, 2 * (a @ b))):
            onto_whole(c, a, b, m, n, 9, fresh)
            np.testing.assert_array_equal(c[1 : m + 1, :columns], expected[:, :columns])
        assert (c[1 : m + 1, columns:] == 7).all()
        assert (c[[0, m + 1]] == 7).all()
    text = onto_whole.inspect_llvm()[onto_whole.signatures[0]]
    assert "llvm.masked" not in text  # there is no code for fewer


def test_packed_operand_may_lie_anywhere() -> None:
    panel = np.empty((65, 64), np.float32)
    for m, n, k in SIZES:
        a, b = drawn(np.float32, m, k), drawn(np.float32, k, n)
        for x in laid_out(a):
            for y in laid_out(b):
                c = np.full((m + 2, ROW), 7, np.float32)
                packing(c, x.T, y.T, panel, m, n, k, True)
                np.testing.assert_array_equal(c[1 : m + 1, :n], a @ b)
                assert (c[1 : m + 1, n:] == 7).all()
                assert (c[[0, m + 1]] == 7).all()


def test_a_few_rows_take_the_operand_where_it_lies() -> None:
    """Eight rows do, nine do not; columns fill whole groups of vectors and leave some over."""
    panel = np.empty((65, 64), np.float32)
    for m, n, k in ((1, 300, 64), (8, 150, 20), (9, 150, 20)):
        a, b = drawn(np.float32, m, k), drawn(np.float32, k, n)
        c = np.full((m + 2, WIDE_ROW), 7, np.float32)
        for fresh, expected in ((True, a @ b), (False, 2 * (a @ b))):
            packing_wide(c, a, b, panel, m, n, k, fresh)
            np.testing.assert_array_equal(c[1 : m + 1, :n], expected)
        assert (c[1 : m + 1, n:] == 7).all()
        assert (c[[0, m + 1]] == 7).all()


@njit("void(f4[:,:], f4[:,:], f4[:,:], f4[:,::1], f4[:,::1], i8, i8, i8, b1)")
def anywhere(c: Any, a: Any, b: Any, left: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply_packing(
        matrix(c, (1, 0), 0, 1, 0), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0),
        matrix(left, (0, 0), 0, 1, 112), matrix(panel, (0, 0), 0, 1, 64), m, n, k, fresh,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 40, 99),
        (5, 70, 20),
        (8, 3, 33),
        (40, 1, 99),
        (71, 5, 20),
        (20, 40, 1),
        (20, 30, 0),
        (9, 530, 18),
        (33, 64, 100),
        (3, 40, 19),
        (400, 150, 21),
    ],
)
def test_all_layouts_of_all_operands(m: int, n: int, k: int) -> None:
    """One code, which asks at run time: thin products by rows and by columns, copies of both operands, rows in several
    parts that share the copy of b, a result whose columns lie apart. Rooms hold NaN where nothing was copied."""
    a, b = drawn(np.float32, m, k), drawn(np.float32, k, n)
    left = np.full((192, 112), np.nan, np.float32)
    panel = np.full((113, -(-n // 64) * 64), np.nan, np.float32)
    for c in laid_out(np.zeros((m + 2, n + 1), np.float32)):
        for x in laid_out(a):
            for y in laid_out(b):
                c[:] = 7
                for fresh, expected in ((True, a @ b), (False, 2 * (a @ b))):
                    anywhere(c, x, y, left, panel, m, n, k, fresh)
                    np.testing.assert_array_equal(c[1 : m + 1, :n], expected)
                assert (c[1 : m + 1, n] == 7).all()
                assert (c[[0, m + 1]] == 7).all()


@njit("void(f8[:,::1], f8[:,:], f8[:,::1], f8[:,::1], f8[:,::1], i8, i8, i8)")
def wider(c: Any, a: Any, b: Any, left: Any, panel: Any, m: Any, n: Any, k: Any) -> None:
    multiply_packing(
        matrix(c, (0, 0), 0, 1, 0), matrix(a, (0, 0), 0, 1, 0), matrix(b, (0, 0), 0, 1, 0),
        matrix(left, (0, 0), 0, 1, 0), matrix(panel, (0, 0), 0, 1, 0), m, n, k, True,
    )  # fmt: skip


def test_slivers_of_wider_elements() -> None:
    """Fewer of them fill a vector and the pieces of a sliver's columns; nothing is written behind the room."""
    m, n, k = 200, 140, 37
    a, b = drawn(np.float64, m, k), drawn(np.float64, k, n)
    panel = np.full((k + 2, 192), np.nan)
    for x in laid_out(a):
        c, left = np.empty((m, n)), np.full((193, k), np.nan)
        left[192] = 7
        wider(c, x, b, left, panel, m, n, k)
        np.testing.assert_array_equal(c, a @ b)
        assert (left[192] == 7).all()


@njit("void(f4[:,:,:], f4[:,:,:,:], f4[:,:,:], f4[:,::1], f4[:,::1], i8, i8, i8, b1)")
def several(c: Any, a: Any, b: Any, left: Any, panel: Any, m: Any, n: Any, k: Any, fresh: Any) -> None:
    multiply_packing_several(
        matrix(c, (0, 1, 0), 1, 2, 0), matrix(a, (0, 0, 0, 0), 2, 3, 0), matrix(b, (0, 0, 0), 1, 2, 0),
        matrix(left, (0, 0), 0, 1, 112), matrix(panel, (0, 0), 0, 1, 64), m, n, k, fresh,
        (a.shape[0], c.strides[0], a.strides[0]), (a.shape[1], a.strides[1], b.strides[0]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "n", "k"),
    [((3, 5), 70, 20), ((1, 1), 40, 33), ((4, 3), 5, 7), ((2, 4), 530, 9), ((7, 2), 64, 16), ((2, 3), 3, 0)],
)
def test_stacked_and_chained_matrices(shape: tuple[int, int], n: int, k: int) -> None:
    """Every result of a stack is the sum of the products of its chain, in all layouts, and nothing else is written: not
    between the results of a stack, nor where pieces of a chain, whose lengths fill no vector, meet."""
    m, (stack, chain) = 11, shape
    a, b = drawn(np.float32, stack, chain, m, k), drawn(np.float32, chain, k, n)
    want = np.einsum("schk,ckn->shn", a, b)
    left, panel = np.full((96, 112), np.nan, np.float32), np.full((113, 64), np.nan, np.float32)
    turned = [np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (a, b)]
    rows_first = np.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    room = np.empty((stack, m + 2, 2 * n + 1), np.float32)
    for c in (room[:, :, : n + 1], room[:, :, : 2 * n + 1 : 2]):
        for x in (a, turned[0], rows_first, np.repeat(np.repeat(a, 2, 3), 2, 2)[:, :, ::2, ::2]):
            for y in (b, turned[1], np.repeat(b, 2, 2)[:, :, ::2]):
                c[:] = 7
                for fresh, expected in ((True, want), (False, 2 * want)):
                    several(c, x, y, left, panel, m, n, k, fresh)
                    np.testing.assert_array_equal(c[:, 1 : m + 1, :n], expected)
                assert (c[:, 1 : m + 1, n] == 7).all()
                assert (c[:, [0, m + 1]] == 7).all()


def test_a_stack_of_adjoining_rows_is_one_matrix() -> None:
    a, b = drawn(np.float32, 4, 1, 13, 30), drawn(np.float32, 1, 30, 40)
    left, panel = np.empty((96, 112), np.float32), np.empty((113, 64), np.float32)
    c = np.full((6 * 13, 40), 7, np.float32)
    inner = c[12:-14].reshape(4, 13, 40)  # results begin at row 1 of each
    several(inner, a, b, left, panel, 13, 40, 30, True)
    np.testing.assert_array_equal(c[13:-13], (a[:, 0] @ b[0]).reshape(-1, 40))
    assert (c[:13] == 7).all()
    assert (c[-13:] == 7).all()


def test_packed_operand_is_widened() -> None:
    a, b = drawn(np.float32, 9, 40), drawn(np.float32, 40, 45)
    c, panel = np.zeros((11, ROW), np.float32), np.empty((64, 64), np.float32)
    packing_bf16(c, a, b.astype(ml_dtypes.bfloat16).view(np.uint16), panel, 9, 45, 40)
    np.testing.assert_array_equal(c[1:10, :45], a @ b)


@njit
def copied(to: Any, given: Any, rows: Any, columns: Any) -> None:
    pack(matrix(to, (1, 0), 0, 1, 0), matrix(given, (0, 0), 0, 1, 0), rows, columns)


@njit
def copied_out(to: Any, given: Any, rows: Any, columns: Any) -> None:
    unpack(matrix(to, (1, 0), 0, 1, 0), matrix(given, (0, 0), 0, 1, 0), rows, columns)


@njit
def copied_f16(to: Any, given: Any, rows: Any, columns: Any) -> None:
    pack_f16(matrix(to, (1, 0), 0, 1, 0), matrix(given, (0, 0), 0, 1, 0), rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (33, 21), (5, 48), (40, 40)])
def test_copies_turn_and_widen(rows: int, columns: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    for given in laid_out(x):
        to = np.full((rows + 2, ROW), 7, np.float32)
        copied(to, given, rows, columns)
        np.testing.assert_array_equal(to[1 : rows + 1, :columns], x)
        assert (to[[0, rows + 1]] == 7).all()
        for out in (
            np.full((rows + 2, ROW), 7, np.float32),
            np.full((rows + 2, 2 * ROW), 7, np.float32)[:, ::2],
        ):
            copied_out(out, given, rows, columns)
            np.testing.assert_array_equal(out[1 : rows + 1, :columns], x)
            assert (out[1 : rows + 1, columns:] == 7).all()
            assert (out[[0, rows + 1]] == 7).all()
        half = given.astype(np.float16)
        copied_f16(to, half.view(np.uint16), rows, columns)
        np.testing.assert_array_equal(to[1 : rows + 1, :columns], half.astype(np.float32))
