"""Lines of a schedule about warpgroups, copies and blocks (tier `wgmma`): text, refusals, results, machine code."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule import print_schedule
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, SM_90A, CudaTarget
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
ATTENTION = """kernel attention<T: f16 | bf16>(q: T[H, M, D], k: T[H, N, D], v: T[H, N, D]) -> o: T[H, M, D] {
    p[h, m, n] = softmax[n | n <= m](sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D))
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
}
"""
PRODUCT = """kernel product<T: f16 | bf16>(a: T[M, K], b: T[N, K]) -> o: T[M, N] {
    o[m, n] = sum[k](a[m, k] * b[n, k])
}
"""
SIZES = {"H": 1, "M": 200, "N": 80, "D": 16}


def compiled(
    lines: str, text: str = ATTENTION, sizes: dict[str, int] = SIZES, target: CudaTarget = SM_90A
) -> Compilation:
    program = tl.parse(text)
    (name,) = program.kernels
    schedule = parse_schedule(f"schedule s for {name} on {target.name} {{\n{lines}\n}}")
    return compile_kernel(program[name], target, sizes, dtypes={"T": DType.F16}, schedule=schedule)


def test_lines_print_as_they_are_read() -> None:
    text = (
        "schedule s for attention on cuda:sm_90a {\n    fuse all\n    tier wgmma\n"
        "    warpgroups 1 load + 3 compute\n    stage k by 3, v by 2\n    skew none\n    order turns\n    split n by 4\n}\n"
    )
    assert print_schedule(parse_schedule(text)) == text
    assert parse_schedule(text.replace("k by 3, v by 2", "k, v by 2")).stages == (("k", 2), ("v", 2))


@pytest.mark.parametrize(
    ("line", "message", "at"),
    [
        ("stage k by 17", "17 in `stage`: not possible", "17"),
        ("stage k by 0", "0 in `stage`: not possible", "0"),
        ("stage k by 1", "`k` comes anew in each step of a loop; that takes 2 slots", "k"),
        ("tile n by 256\nstage q by 7", "bytes of shared memory", "q"),
        ("stage x by 2", "`stage x`: there is no tensor `x`", "x"),
        ("stage o by 2", "`o` does not come through a ring", "o"),
        ("warpgroups 1 load + 4 compute", "4 of warpgroups that compute: not possible", "4"),
        ("warpgroups 2 load + 1 compute", "2 of warpgroups that load: not possible", "2"),
        ("warpgroups 1 load + 2 compute\ntile m by 64", "rows for 1 warpgroups", "1 load + 2 compute"),
        ("skew some", "`skew some` is not possible", "some"),
        ("order fast", "`order fast` is not possible", "fast"),
        ("split x by 2", "`x` is no axis of `attention`", "x"),
        ("tier mma\ntile m by 512, n by 512", "the limit is 128", "mma"),
        ("tier simt\nfuse none\ntile n by 64, m by 1024", "the limit is 128", "m"),
        ("split m by 2", "the loop over `m` cannot be divided", "m"),
        ("split n by 65", "65 in `split`: not possible", "65"),
        ("tier mma\nstage k by 2", "`stage` is for tier `wgmma`", "k"),
        ("tile n by 256\nstage k by 6, v by 6", "bytes of shared memory", "k"),
    ],
)
def test_what_is_impossible_is_refused_where_it_stands(line: str, message: str, at: str) -> None:
    with pytest.raises(TileError) as refused:
        compiled(line, sizes={**SIZES, "D": 128})
    found = refused.value.diagnostics[0]
    assert message in found.message
    assert found.span is not None
    assert found.span.text == at


def test_lines_of_warpgroups_need_their_tier() -> None:
    with pytest.raises(
        TileError, match="`order` is for tier `wgmma`: attention, tier wgmma: cuda:sm_80 has no wgmma"
    ):
        compiled("order turns", target=SM_80)
    with pytest.raises(TileError, match="computes between two products"):
        compiled("skew none", PRODUCT, {"M": 256, "N": 256, "K": 256})


def test_the_schedule_says_what_was_chosen_and_can_be_given_back() -> None:
    first = compiled("", sizes={"H": 8, "M": 4096, "N": 4096, "D": 64})
    text = print_schedule(first.schedule)
    assert (
        "warpgroups 1 load + 3 compute\n    stage q by 2, k by 4, v by 4\n    skew all\n    order balanced"
        in text
    )
    program = tl.parse(ATTENTION)
    again = compile_kernel(
        program["attention"], SM_90A, first.sizes, dtypes={"T": DType.F16}, schedule=parse_schedule(text)
    )
    assert again.source == first.source
    told = [r.message for r in first.remarks if r.name == "roles"]
    assert told
    assert "q by 2, k by 4, v by 4" in told[0]
    assert "the longest first, in rounds forwards and backwards over blocks" in told[0]


@pytest.mark.parametrize(
    ("size", "order", "slots"),
    [
        (64, "balanced", {"q": 2, "k": 4, "v": 4}),  # 24,576 and 16,384 bytes each
        (128, "balanced", {"q": 2, "k": 2, "v": 2}),  # 65,536 bytes each, and 32,768 on their way out
        (256, "balanced", {"q": 1, "k": 2, "v": 2}),
        (128, "longest", {"q": 1, "k": 2, "v": 2}),
    ],
)
def test_a_second_slot_for_the_next_task_where_there_is_room(
    size: int, order: str, slots: dict[str, int]
) -> None:
    made = compiled(f"order {order}", sizes={"H": 8, "M": 4096, "N": 4096, "D": size})
    assert dict(made.schedule.stages) == slots


@pytest.mark.parametrize("text", [ATTENTION, PRODUCT])
def test_the_next_task_is_found_while_the_last_products_run(text: str) -> None:
    """Its indices lie between the start of products and the wait for them; what all tasks share comes before them all."""
    sizes = {"H": 8, "M": 1024, "N": 1024, "D": 64, "K": 256}
    source = compiled("tile m by 128, n by 128", text, sizes).source
    computing = source[source.index("else:") : source.index("cuda.jit", source.index("else:"))]
    assert "log2_f32" not in computing[computing.index("while task < tasks") :]
    before, after = computing.split("next_m_0 = ", 1)
    started, settled = before.rindex("_multiply_"), before.rfind("_settle_")
    assert started > settled or text == PRODUCT
    assert re.search(r"_settle_\d+\(\w", after[: after.index("boxes_read_0")])
    assert computing.count("task += ") == 1


def test_a_task_starts_while_the_one_before_ends() -> None:
    """Its first scores are under way when the results before it are made; `skew steps` leaves tasks apart."""
    sizes = {"H": 8, "M": 1024, "N": 1024, "D": 64}
    made = compiled("tile m by 128, n by 128", sizes=sizes)
    assert made.schedule.skew == "all"
    first = made.source[made.source.index("if started == 0 and") :]
    starts = [m.start() for m in re.finditer(r"_multiply_\d+\(", first)]
    waits = [m.start() for m in re.finditer(r"_settle_\d+\(", first)]
    stored = first.index("store_box_")
    assert starts[1] < waits[0] < stored < waits[1]
    apart = compiled("tile m by 128, n by 128\nskew steps", sizes=sizes)
    assert apart.schedule.skew == "steps"
    assert "if waits" not in apart.source
    told = [next(r.message for r in x.remarks if r.name == "roles") for x in (made, apart)]
    assert ["a task's last products run with the next task's first" in x for x in told] == [True, False]


def test_names_of_the_user_are_not_those_of_tasks() -> None:
    """The number of the next task has a variable of its own beside a scalar of the same name."""
    text = ATTENTION.replace("v: T[H, N, D])", "v: T[H, N, D], following: f32)").replace(
        "sum[n](p[h, m, n] *", "following * sum[n](p[h, m, n] *"
    )
    sizes = {"H": 2, "M": 192, "N": 80, "D": 16}
    made, rng = compiled("tile m by 64, n by 16\nskew all", text, sizes), np.random.default_rng(5)
    given = {
        x: rng.standard_normal((2, n, 16)).astype(np.float16) for x, n in (("q", 192), ("k", 80), ("v", 80))
    }
    got = emulate.run_module(made.module, made.source, given, {"following": 0.5}, blocks=1)["o"].astype(float)
    q, k, v = (given[x].astype(float) for x in "qkv")
    p = np.where(np.tri(192, 80, dtype=bool), np.exp(q @ k.swapaxes(1, 2) / 4), 0)
    assert np.abs(got - 0.5 * p @ v / p.sum(-1, keepdims=True)).max() < 2e-3


def test_tasks_are_apart_where_that_was_measured_to_be_faster() -> None:
    wide = {"H": 8, "M": 4096, "N": 4096, "D": 256}
    assert compiled("", sizes=wide).schedule.skew == "steps"
    assert compiled("skew all", sizes=wide).schedule.skew == "all"


def test_blocks_of_one_task_have_none_to_overlap_with() -> None:
    with pytest.raises(TileError, match="no task of `attention` can start"):
        compiled("skew all\norder longest", sizes={"H": 8, "M": 4096, "N": 4096, "D": 128})


def test_few_rows_take_one_warpgroup() -> None:
    made = compiled("", PRODUCT, {"M": 64, "N": 4096, "K": 4096})
    assert made.schedule.warpgroups == 1
    assert dict(made.schedule.tiles)["m"] == 64
    assert dict(made.schedule.tiles)["n"] == 32  # 128 tiles: no need to divide K over blocks
    assert len(made.module.programs) == 1
    fewer = compiled("", PRODUCT, {"M": 64, "N": 1024, "K": 8192})
    assert [p.name for p in fewer.module.programs] == ["product_parts", "product"]


@pytest.mark.parametrize(
    ("heads", "length", "subset", "warpgroups", "steps"),
    [
        (16, 1024, "", 2, "16.0 steps with tiles of 64 rows, each in 0.71 of the time, 8.0 with"),
        (16, 1024, "| n <= m", 1, "8.7 steps with tiles of 64 rows, each in 0.71 of the time, 8.0 with"),
        (28, 1024, "| n <= m", 2, "15.3 steps with tiles of 64 rows, each in 0.71 of the time, 8.0 with"),
        (16, 512, "", 1, "4.0 steps with tiles of 64 rows, each in 0.71 of the time, 4.0 with"),
    ],
)
def test_one_or_two_warpgroups_by_the_busiest_multiprocessor(
    heads: int, length: int, subset: str, warpgroups: int, steps: str
) -> None:
    """128 tasks of one length are one round of 132 multiprocessors, 256 are two; under a mask the longest task counts."""
    text = ATTENTION.replace("| n <= m", subset)
    sizes = {"H": heads, "M": length, "N": length, "D": 128}
    made = compile_kernel(tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType.F16})
    assert made.schedule.warpgroups == warpgroups
    assert any(steps in r.message for r in made.remarks if r.name == "cascade-tiles")


VARIANTS = {
    "three warpgroups": "warpgroups 1 load + 3 compute",
    "slots": "stage k by 4, v by 2",
    "one slot before the loop": "stage q by 1",
    "one step after the other": "skew none",
    "tasks in turn": "order turns",
    "a block for each task": "order longest",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_gives_the_same_numbers(variant: str) -> None:
    """Two blocks, so that each has several tasks; rows and keys that fill no tile."""
    made = compiled(f"tile n by 32\n{VARIANTS[variant]}")
    rng = np.random.default_rng(3)
    x = {
        n: rng.standard_normal((1, rows, 16)).astype(np.float16)
        for n, rows in zip("qkv", (200, 80, 80), strict=True)
    }
    got = emulate.run_module(made.module, made.source, x, {}, blocks=2)["o"][0].astype(float)
    q, k, v = (x[n][0].astype(float) for n in "qkv")
    s = np.where(np.tri(200, 80, dtype=bool), q @ k.T / 4, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    assert np.abs(got - p / p.sum(-1, keepdims=True) @ v).max() < 2e-3


def tasks_of_blocks(made: Compilation, sizes: dict[str, int], blocks: int) -> list[list[tuple[int, ...]]]:
    """The head and the first row of every task, by block: the loader's own lines, run under CPython."""
    lines = made.source[made.source.index("if thread == 256:") :].splitlines()
    first = next(i for i, x in enumerate(lines) if "count = " in x)
    last = next(i for i, x in enumerate(lines) if re.match(r" *h = ", x))
    steps = [x for x in lines if re.match(r" *(task \+=|ahead = )", x)]
    body = [*lines[first : last + 1], " " * 16 + "visited.append((h, m_0))", *steps[1:3]]
    code = compile(textwrap.dedent("\n".join(body)), "loader", "exec")
    found = []
    for block in range(blocks):
        cuda = SimpleNamespace(blockIdx=SimpleNamespace(x=block), gridDim=SimpleNamespace(x=blocks))
        names: dict[str, Any] = {"cuda": cuda, "i64": int, "quotient": lambda a, b: a // b, "visited": []}
        exec(code, names | sizes, visited := {"visited": names["visited"]})
        found.append(visited["visited"])
    return found


@pytest.mark.parametrize(("length", "heads"), [(1024, 256), (4096, 64), (16384, 16), (1000, 3), (200, 1)])
@pytest.mark.parametrize("seen", ["n <= m", "n >= m", "n <= m and m - n < 1024"])
def test_balanced_rounds_visit_every_task_once_and_give_blocks_like_work(
    length: int, heads: int, seen: str
) -> None:
    """A task costs as much as its loop has tiles, and two more; what comes last is short. Of windows, whose loops differ at
    the start alone, all heads fit into the cache together, or in groups of like size."""
    sizes = {"H": heads, "M": length, "N": length, "D": 128}
    text = ATTENTION.replace("n <= m", seen)
    given = tasks_of_blocks(compiled("tile m by 128, n by 128", text, sizes), sizes, 132)
    tiles = -(-length // 128)
    every = sorted(x for tasks in given for x in tasks)
    assert every == [(h, 128 * m) for h in range(heads) for m in range(tiles)]
    most = 9 if "1024" in seen else tiles
    steps = [
        [min(m // 128 + 1 if "n <= m" in seen else tiles - m // 128, most) for _, m in tasks]
        for tasks in given
    ]
    loads = [sum(x + 2 for x in tasks) for tasks in steps]
    if len(every) > 132:
        assert max(loads) <= 1.035 * sum(loads) / 132
        assert "1024" in seen or max(tasks[-1] for tasks in steps) <= tiles / 2


@pytest.mark.parametrize("parts", [1, 3])
def test_a_stated_split(parts: int) -> None:
    made = compiled(f"split k by {parts}\ntile m by 64, n by 64", PRODUCT, {"M": 72, "N": 64, "K": 328})
    assert len(made.module.programs) == (1 if parts == 1 else 2)
    rng = np.random.default_rng(3)
    x = {n: rng.integers(-3, 4, (m, 328)).astype(np.float16) for n, m in (("a", 72), ("b", 64))}
    got = emulate.run_module(made.module, made.source, x, {}, blocks=2)["o"]
    assert np.array_equal(got, (x["a"].astype(float) @ x["b"].astype(float).T).astype(np.float16))


needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


@needs_toolkit
@pytest.mark.parametrize("variant", [*VARIANTS, "default"])
def test_each_variant_assembles_without_spills(variant: str) -> None:
    from tileloom.runtime import machine_code

    size = 128 if variant == "three warpgroups" else 64
    made = compiled(VARIANTS.get(variant, ""), sizes={"H": 8, "M": 4096, "N": 4096, "D": size})
    ((first, *others),) = machine_code.variants(made.source).values()
    assert first.name not in [v.name for v in others]
    kernel = machine_code.machine_code(made.source, first.name, SM_90A)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert "C75" not in kernel.log
    assert re.search(r"\bHGMMA\.64x\d+x16", kernel.sass)
    assert kernel.sass.count("UTMACCTL.PF") == len(
        first.maps
    )  # tensor maps are asked for before the first barrier


@pytest.mark.parametrize(
    ("d", "rows", "subset", "warpgroups"),
    [
        (64, 4096, "", 3),
        (64, 1024, "| n <= m", 2),
        (64, 16384, "| n <= m", 3),
        (128, 4096, "", 2),
        (64, 64, "", 1),
    ],
)
def test_three_warpgroups_where_their_tiles_visit_little_more(
    d: int, rows: int, subset: str, warpgroups: int
) -> None:
    """Under a diagonal of 1,024 rows six tiles of 192 visit 32 steps of 128 keys, 6,144 rows in all; eight of 128 visit 36,
    4,608 rows: a quarter less. Of 16,384 rows it is two hundredths."""
    text = f"""kernel attention<T: bf16>(q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, D], scale: f32)
        -> o: T[B, H, M, D] {{
        require scale > 0
        s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
        p[b, h, m, n] = softmax[n {subset}](s[b, h, m, n])
        o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
    }}"""
    sizes = {"B": 16, "H": 32, "M": rows, "N": rows, "D": d}
    made = compile_kernel(tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType.BF16})
    (roles,) = [r.message for r in made.remarks if r.name == "roles"]
    assert f"1 warpgroup loads and {warpgroups} compute" in roles
    told = [r.message for r in made.remarks if r.name == "cascade-tiles"]
    if (d, rows) == (64, 1024):
        pairs = f"tiles of 128 rows visit {36 * 128 * 128:,} pairs, tiles of 192 rows {32 * 192 * 128:,}"
        assert told == [f"o: {pairs}, each in 0.88 of the time"]
    assert bool(told) == (d == 64 and rows > 64)
    assert "a maximum moves when it is exceeded by more than 2^8" in roles


TWO_VALUES = """kernel two<T: f16 | bf16>(
    q: T[H, M, D], k: T[H, N, D], v: T[H, N, D], w: T[H, N, D]
) -> (o: T[H, M, D], u: T[H, M, D]) {
    p[h, m, n] = softmax[n](sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D))
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
    u[h, m, d] = sum[n](p[h, m, n] * w[h, n, d])
}
"""


@needs_toolkit
@pytest.mark.parametrize(("target", "d"), [(SM_90A, 64), (SM_90A, 128), (SM_80, 128)])
def test_tiles_have_room_for_all_sums_of_a_loop(target: CudaTarget, d: int) -> None:
    """Weights of one softmax for two tensors of values."""
    from tileloom.runtime.machine_code import machine_code

    sizes = {"H": 64, "M": 4096, "N": 4096, "D": d}
    made = compile_kernel(tl.parse(TWO_VALUES)["two"], target, sizes, dtypes={"T": DType.BF16})
    (program,) = made.module.programs
    tier, instruction, names = (
        ("wgmma", "HGMMA", ("two_whole", "two"))
        if target is SM_90A
        else ("mma", "HMMA", ("two", "two_ragged"))
    )
    assert program.tier == tier
    told = f"o_u: tiles leave registers for sums of {d} and {d} columns"
    assert [r.message for r in made.remarks if r.name == "cascade-tiles"].count(told) == 1
    for name in names:
        code = machine_code(made.source, name, target)
        assert instruction in code.sass
        assert (code.spill_bytes, code.stack_bytes) == (0, 0)


def test_a_tanh_in_another_form_is_told() -> None:
    """Where results have 16 bits, and not where they are f32."""
    text = "kernel f<T: f32 | bf16>(x: T[N]) -> y: T[N] { y[n] = tanh(2 * f32(x[n])) }"
    for dtype, count in ((DType.BF16, 1), (DType.F32, 0)):
        made = compile_kernel(tl.parse(text)["f"], SM_90A, {"N": 4096}, dtypes={"T": dtype})
        assert sum(r.name == "near-functions" for r in made.remarks) == count


MASKED = """kernel attention<T: f16 | bf16>(q: T[H, M, D], k: T[H, N, D], v: T[H, N, D], keep: bool[N]) -> o: T[H, M, D] {
    p[h, m, n] = softmax[n | keep[n]](sum[d](q[h, m, d] * k[h, n, d]) / sqrt(D))
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
}
"""


def test_values_that_a_mask_guards_are_no_operand_from_memory() -> None:
    """Their products are refused in words where tasks overlap too, and stay with tier `mma` where nothing is stated."""
    with pytest.raises(TileError, match="neither a tile from memory nor one with the result's rows"):
        compiled("tier wgmma", MASKED)
    assert [p.tier for p in compiled("fuse all", MASKED).module.programs] == ["mma"]
