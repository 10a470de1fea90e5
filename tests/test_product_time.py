"""Predicted clocks of products in tier `wgmma`, against counts by hand, and the tiles that follow from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.product_time import SAME_TIME, Product, Tiling, clocks, fastest, parts_of, step_clocks
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import CPU, SM_90A
from tileloom.dsl.types import DType
from tileloom.variants import Variants, size_classes

TEXT = """kernel product<T: bf16 | f16>(a: T[M, K], b: T[B]) -> c: T[M, N] {
  c[m, n] = sum[k](a[m, k] * b[I])
}
"""
LARGE = Product(4096, 4096, 4096)


def compiled(m: int, n: int, k: int, lines: str = "", b: str = "N, K") -> Compilation:
    text = TEXT.replace("[B]", f"[{b}]").replace("[I]", f"[{b.lower()}]")
    stated = parse_schedule(f"schedule s for product on cuda:sm_90a {{\n{lines}\n}}") if lines else None
    return compile_kernel(
        tl.parse(text)["product"], SM_90A, {"M": m, "N": n, "K": k}, dtypes={"T": DType.BF16}, schedule=stated
    )


def tile(c: Compilation) -> tuple[int, int]:
    tiles = dict(c.schedule.tiles)
    return tiles["m"], tiles["n"]


def test_what_binds_a_step() -> None:
    """Products: r·n·64 / 2048. Shared memory: r + n rows of 128 bytes come, each warpgroup reads 64 + n, 128 bytes a clock.
    Cache: r + n rows at 56 bytes a clock, twice that where rows straddle lines."""
    assert step_clocks(LARGE, Tiling(128, 256)) == 1024  # both products and shared memory
    assert step_clocks(LARGE, Tiling(128, 128)) == 2 * (64 + 128) + 256  # shared memory
    assert step_clocks(LARGE, Tiling(64, 64)) == pytest.approx(128 * 128 / 56)  # the cache
    straddling = Product(4096, 4104, 1000, row_lines=2, column_lines=2)
    assert step_clocks(straddling, Tiling(128, 256)) == pytest.approx(2 * 384 * 128 / 56)
    assert step_clocks(Product(1, 4096, 4096), Tiling(64, 16)) == 200  # a round
    gated = Product(4096, 4096, 4096, sums=2)
    assert step_clocks(gated, Tiling(128, 128)) == 1024 + 2 * 64  # rows are read once for each sum


def test_waves_are_whole_and_memory_is_a_floor() -> None:
    one = clocks(Product(128 * 12, 256 * 11, 4096), Tiling(128, 256), SM_90A)[0]
    two = clocks(Product(128 * 12, 256 * 11 + 1, 4096), Tiling(128, 256), SM_90A)[0]
    assert one == 64 * 1024 + 1000 + 8 * 256
    assert two == 2 * one
    thin = Product(1, 4096, 4096)
    bytes_per_clock = 0.75 * 4280e9 / 1.755e9
    assert clocks(thin, Tiling(64, 32), SM_90A)[0] == pytest.approx(
        2 * (4096 * 4098 + 4096 - 4096) / bytes_per_clock
    )


def test_parts_pay_where_tiles_are_few() -> None:
    assert parts_of(Product(64, 1024, 8192), 64, 32, 16, SM_90A) == 4  # 32 tiles for 132 multiprocessors
    assert parts_of(Product(64, 1024, 8192), 64, 32, 2, SM_90A) == 2
    assert parts_of(LARGE, 128, 256, 8, SM_90A) == 1


def test_equally_fast_tilings_are_not_divided() -> None:
    found = fastest(Product(64, 4096, 4096), [Tiling(64, 64, 2), Tiling(64, 64), Tiling(64, 32)], SM_90A)
    assert found[0] == Tiling(64, 32)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4096, 4096, 4096), (128, 256)),
        ((512, 6144, 4096), (128, 192)),  # 128 tiles, not 96 or 192
        ((512, 11008, 4096), (128, 168)),  # 264 tiles: two whole waves of 132
        ((2048, 11008, 4096), (128, 232)),  # 768 tiles in six waves, as 688 of 256 columns
        ((512, 32000, 4096), (128, 248)),  # 520 tiles in four waves, as 500 of 256 columns
        ((64, 11008, 4096), (64, 96)),  # one warpgroup: steps of 16
        ((1, 4096, 4096), (64, 32)),  # 128 multiprocessors read weights
    ],
)  # fmt: skip
def test_tiles_fill_multiprocessors(sizes: tuple[int, int, int], expected: tuple[int, int]) -> None:
    made = compiled(*sizes)
    assert tile(made) == expected
    assert len(made.module.programs) == 1
    (told,) = [r for r in made.remarks if r.name == "product-tiles"]
    assert told.message.startswith(f"c: predicted µs by tile: {expected[0]} x {expected[1]} ")
    assert told.facts["tiles"] == -(-sizes[0] // expected[0]) * -(-sizes[1] // expected[1])


def test_columns_that_lie_densely_come_in_chunks_of_64() -> None:
    """Of b[k, n] a box holds 64 columns: other widths would bring columns that nobody reads."""
    assert tile(compiled(512, 11008, 4096, b="K, N"))[1] % 64 == 0


def test_stated_lines_bound_what_is_compared() -> None:
    assert tile(compiled(512, 6144, 4096, "tile m by 64"))[0] == 64
    assert tile(compiled(512, 6144, 4096, "tile n by 128"))[1] == 128
    three = compiled(512, 6144, 4096, "warpgroups 1 load + 3 compute")
    assert tile(three)[0] == 192
    assert tile(three)[1] <= 192
    assert [p.name for p in compiled(64, 4096, 4096, "split k by 2").module.programs] == [
        "product_parts",
        "product",
    ]


def test_products_of_other_sizes_take_decisions_of_their_own_on_a_device() -> None:
    """Tiles that fill the multiprocessors at 4096³ leave most of them idle at 1024³; on a CPU sizes up to 2048 are
    cut alike."""
    small, large, odd = ({"M": n, "N": n, "K": n} for n in (1024, 4096, 4104))
    device = [size_classes(x, SM_90A) for x in (small, large, odd)]
    assert device[0] != device[1] != device[2]
    middle = {"M": 2048, "N": 2048, "K": 2048}
    assert size_classes(small, CPU) == size_classes(middle, CPU) != size_classes(large, CPU)
    assert size_classes(small, SM_90A) != size_classes(middle, SM_90A)
    assert size_classes({"M": 1, "N": 4096}, SM_90A)["M"] != size_classes({"M": 9, "N": 4096}, SM_90A)["M"]


# ---------------------------------------------------------------- a call's own sizes


def kernel_for_all_sizes() -> tl.CompiledKernel:
    text = TEXT.replace("[B]", "[N, K]").replace("[I]", "[n, k]")
    return tl.compile(tl.parse(text)["product"], "cuda:sm_90a")


def asked(k: tl.CompiledKernel, m: int, n: int) -> Compilation:
    return k.compilation(T="bf16", M=m, N=n, K=4096)


def test_sizes_of_one_class_have_the_tiles_that_each_asks_for() -> None:
    """In either order, and as `explain` says."""
    assert size_classes({"N": 11008}, SM_90A) == size_classes({"N": 12288}, SM_90A)
    pairs = {
        (512, 12288): (128, 192),
        (512, 11008): (128, 168),
        (2048, 11008): (128, 232),
        (2048, 12288): (128, 256),
    }
    for order in (list(pairs), list(pairs)[::-1]):
        k = kernel_for_all_sizes()
        for sizes in order:
            assert tile(asked(k, *sizes)) == pairs[sizes]
        for (m, n), expected in pairs.items():
            told = str(k.explain(T="bf16", M=m, N=n, K=4096))
            assert f"predicted µs by tile: {expected[0]} x {expected[1]} " in told


def test_sizes_that_ask_for_the_same_tiles_share_a_compilation() -> None:
    k = kernel_for_all_sizes()
    first = asked(k, 512, 11008)
    assert asked(k, 512, 10904) is first
    assert asked(k, 500, 11008) is first
    assert asked(k, 512, 12288) is not first
    assert asked(k, 512, 11008) is first


def test_a_sweep_over_sizes_makes_few_kernels() -> None:
    """Of some hundred sizes: tiles are few, and code is that of its tiles."""
    tiles = compiled(512, 11008, 4096).plans[0].product
    assert tiles is not None
    found = {
        tiles.best({"M": m, "N": n, "K": 4096}, SM_90A)
        for m in range(64, 4097, 448)
        for n in range(8200, 12289, 340)
    }
    assert len(found) < 25


def test_the_folder_keeps_a_compilation_for_each_choice_of_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path))
    sizes = [{"M": 512, "N": n, "K": 4096} for n in (12288, 11008)]
    made = [kernel_for_all_sizes()._variants.find({"T": DType.BF16}, s).record for s in sizes]
    assert made[0].source != made[1].source
    monkeypatch.setattr(Variants, "compile", lambda *_: pytest.fail("it is in the folder"))
    again = kernel_for_all_sizes()._variants
    assert [again.find({"T": DType.BF16}, s).record for s in (*sizes[::-1], {**sizes[0], "M": 500})] == [
        *made[::-1],
        made[0],
    ]


def test_classes_that_share_code_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves sizes of another class is asked by the sizes that it was found for."""
    variants, count = kernel_for_all_sizes()._variants, [0]
    compile_ = Variants.compile

    def counted(*args: Any) -> Compilation:
        count[0] += 1
        return compile_(*args)

    monkeypatch.setattr(Variants, "compile", counted)
    monkeypatch.setattr("tileloom.variants.read", lambda *_: None)
    sizes = [{"M": n, "N": n, "K": n} for n in (4096, 8192)]
    first = [variants.find({"T": DType.BF16}, s) for s in sizes]
    assert first[0] is first[1]
    assert [variants.find({"T": DType.BF16}, s) for s in sizes] == first
    assert count == [2]


def test_what_tiles_are_chosen_from_comes_back_from_the_cache_folder() -> None:
    for text in ("N, K", "K, N"):
        (plan,) = compiled(512, 6144, 4096, "tile m by 64\nsplit k by 2", b=text).plans
        assert plan.product is not None
        assert plan.product.row == 64
        assert plan.product.parts == (2,)
        again = pickle.loads(pickle.dumps(plan.product))
        assert again == plan.product
        assert hash(again) == hash(plan.product)


def test_the_best_is_the_first_of_all_and_predicted_alike() -> None:
    tiles = compiled(512, 11008, 4096).plans[0].product
    assert tiles is not None
    for m, n, k in (
        (1, 4096, 4096),
        (64, 11008, 4096),
        (512, 4096, 11008),
        (4096, 4104, 1000),
        (300, 300, 300),
    ):
        sizes = {"M": m, "N": n, "K": k}
        first, *rest = tiles.ranked(sizes, SM_90A)
        assert tiles.best(sizes, SM_90A) == first
        times = [clocks(tiles.product(sizes), t, SM_90A)[0] for t in (first, *rest)]
        assert times[1:] == sorted(times[1:])
        assert times[0] <= SAME_TIME * min(times)
        assert len({first, *rest}) == len(tiles.tilings(tiles.product(sizes)))
