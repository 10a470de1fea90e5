"""The wgmma tier without a GPU: emulated warpgroups (copies, barriers, matrix units on real values) against float64."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.codegen.wgmma import why_not
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, SM_90A
from tileloom.compiler.tile_text import parse_module
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
EMULATED = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "emulate.py"))


def product(
    a: str = "m, k",
    b: str = "n, k",
    rows: int = 128,
    columns: int = 64,
    dtype: str = "bf16",
    out: str = "bf16",
) -> str:
    """o = a · b in any transposition, batched."""
    return f"""module g {{ tile g(a: {dtype}[B, {a.upper()}], b: {dtype}[B, {b.upper()}], o: out {out}[B, M, N]) {{
        extents B, M, K, N
        tier wgmma
        for z in B, m in M by {rows}, n in N by {columns} parallel {{
            for k in K by 64 carry (s: f32[m, n] = fill(0.0)) {{
                yield s + dot[k](load a[z, {a}], load b[z, {b}])
            }}
            store o[z, m, n] = {out}(s)
        }}
    }} }}"""


def drawn(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Array:
    return np.random.default_rng(len(shape) + shape[-1]).integers(-3, 4, shape).astype(dtype)


def emulated(
    text: str, inputs: dict[str, Array], scalars: dict[str, float] | None = None, blocks: int = 2
) -> Any:
    module = parse_module(text)
    return emulate.run_module(module, generate(module, SM_90A), inputs, scalars or {}, blocks=blocks)


@pytest.mark.parametrize("b", ["n, k", "k, n"])
@pytest.mark.parametrize("a", ["m, k", "k, m"])
def test_products_in_all_transpositions(a: str, b: str) -> None:
    """Ragged in every dimension, two batches, several tiles a block, so that rings go round."""
    sizes = {"m": 136, "n": 72, "k": 168}
    inputs = {
        "a": drawn(2, *(sizes[x] for x in a.split(", "))),
        "b": drawn(2, *(sizes[x] for x in b.split(", "))),
    }
    left = inputs["a"].astype(float) if a == "m, k" else inputs["a"].astype(float).swapaxes(1, 2)
    right = inputs["b"].astype(float) if b == "k, n" else inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(product(a, b), inputs, blocks=3)["o"]
    assert np.array_equal(got, (left @ right).astype(ml_dtypes.bfloat16))


def test_a_launch_waits_for_the_one_before_it_ahead_of_memory() -> None:
    """Barriers start and tensor maps come while that ends; then every thread waits, whatever its role."""
    module = parse_module(product())
    source = generate(module, SM_90A)
    entries = [x for x in source.splitlines() if '"maps": ' in x]
    assert entries
    assert all('"secondary": True' in x for x in entries)
    bodies = [x.partition("\n\n\n")[0] for x in source.split("@cuda.jit(launch_bounds=(384, 1))")[1:]]
    assert len(bodies) == len(entries)
    for body in bodies:
        opening, roles = body.split("    await_primary()\n")
        assert "    release_secondary()\n" in opening
        assert roles.startswith("    if warpgroup == 2:\n")
        assert not re.search(r"_box_|_s0\b(?!:)", opening.partition("):\n")[2])
    inputs = {"a": drawn(1, 72, 64), "b": drawn(1, 72, 64)}
    with pytest.raises(emulate.KernelFault, match="touched while the launch before may still run"):
        emulate.run_module(module, source.replace("await_primary()", "pass"), inputs, {}, blocks=2)


def test_an_odd_number_of_chunks_leaves_task_after_task() -> None:
    """Three chunks of columns take turns at two buffers."""
    inputs = {"a": drawn(1, 64, 64), "b": drawn(1, 400, 64)}
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(product(rows=64, columns=192), inputs, blocks=1)["o"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("rows", [64 * 8, 64 * 10 + 8])
def test_tasks_of_whole_and_ragged_groups_of_rows(rows: int) -> None:
    """Tiles come in groups of eight rows of them; the last group has what is left."""
    inputs = {"a": drawn(2, rows, 64), "b": drawn(2, 24, 64)}
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(product(rows=64, columns=8), inputs, blocks=3)["o"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("tile", "columns"), [(256, 72), (256, 264), (128, 64)])
def test_computed_results_leave_chunk_by_chunk(tile: int, columns: int) -> None:
    """What is stored is computed from sums: each chunk is left out where the tensor ends before it, and leaves before the
    next is computed; so it does where there is room for two."""
    text = product(rows=64, columns=tile).replace("bf16(s)", "bf16(2.0 * s)")
    source = generate(parse_module(text), SM_90A)
    inside = re.findall(
        r"if n_0 \+ (\d+) < N:\n +(if first_lane|for quarter)", source.partition("def g_any(")[0]
    )
    chunks = tile // 64
    assert [(int(x), then) for x, then in inside[: chunks - 1]] == [
        (64 * i, "for quarter" if i < 2 else "if first_lane") for i in range(1, chunks)
    ]
    inputs = {"a": drawn(1, 72, 64), "b": drawn(1, columns, 64)}
    want = 2 * inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(text, inputs, blocks=1)["o"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


VECTORS = """module g { tile g(a: bf16[M, K], b: bf16[N, K], u: bf16[N], v: bf16[N], o: out bf16[M, N]) {
    extents M, K, N
    tier wgmma
    for m in M by 64, n in N by COLUMNS parallel {
        for k in K by 64 carry (s: f32[m, n] = fill(0.0)) { yield s + dot[k](load a[m, k], load b[n, k]) }
        t: f32[m, n] = s + f32(load u[n])
        store o[m, n] = bf16(max(t, 0.0 - t) + f32(load v[n]))
    }
} }"""


@pytest.mark.parametrize(("columns", "ahead"), [(128, ["u", "v"]), (256, ["u"])])
def test_vectors_of_results_are_asked_for_while_products_run(columns: int, ahead: list[str]) -> None:
    """As many as registers have room for; the others come when results are computed."""
    text = VECTORS.replace("COLUMNS", str(columns))
    inputs = {
        "a": drawn(64, 128),
        "b": drawn(2 * columns, 128),
        "u": drawn(2 * columns),
        "v": drawn(2 * columns),
    }
    source = generate(parse_module(text), SM_90A)
    whole = source.partition("def g_whole(")[2].partition("\n\n\n")[0]
    waiting, _, rest = whole.partition("def g_whole")[0].rpartition("g_whole_settle_2(s)")
    assert re.findall(r"load4_bf16\((\w),", waiting) == ahead
    assert re.findall(r"load4_bf16\((\w),", rest) == [x for x in "uv" if x not in ahead]
    wide = {n: x.astype(float) for n, x in inputs.items()}
    want = np.abs(wide["a"] @ wide["b"].T + wide["u"]) + wide["v"]
    ran: list[str] = []
    got = emulate.run_module(parse_module(text), source, inputs, {}, blocks=1, ran=ran)["o"]
    assert ran == ["g_whole"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("added", ["f32(n - m)", "f32(n % 3)", "where(n % 2 == 0, f32(load v[n]), f32(m))"])
def test_results_that_leave_in_words_have_an_index_for_each_half(added: str) -> None:
    text = VECTORS.replace("COLUMNS", "64").replace("+ f32(load v[n])", f"+ {added}")
    inputs = {"a": drawn(72, 64), "b": drawn(80, 64), "u": drawn(80), "v": drawn(80)}
    wide = {x: y.astype(float) for x, y in inputs.items()}
    n, m = np.arange(80), np.arange(72)[:, None]
    wanted = {"-": n - m, "%": n % 3, "=": np.where(n % 2 == 0, wide["v"], m)}
    more = wanted[next(x for x in ("=", "%", "-") if x in added)]
    want = np.abs(wide["a"] @ wide["b"].T + wide["u"]) + more
    assert np.array_equal(emulated(text, inputs)["o"], want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("rows", "columns"), [("J", "N"), ("M", "J"), ("J", "J")])
def test_results_that_are_a_part_of_their_tensor_leave_the_rest_as_it_is(rows: str, columns: str) -> None:
    """Boxes end where the tensor does, not where the axis does."""
    text = product().replace("B, M, K, N\n", "B, M, K, N, J\n    static M = 80, K = 64, N = 88, J = 40\n")
    text = text.replace("m in M", f"m in {rows}").replace("n in N", f"n in {columns}")
    text = text.replace("o: out", "o: inout")
    inputs = {"a": drawn(1, 80, 64), "b": drawn(1, 88, 64), "o": drawn(1, 80, 88)}
    want = inputs["o"].copy()
    part = (0, slice(40 if rows == "J" else 80), slice(40 if columns == "J" else 88))
    every = inputs["a"][0].astype(float) @ inputs["b"][0].astype(float).T
    want[part] = every[part[1:]].astype(want.dtype)
    assert why_not(parse_module(text).programs[0], SM_90A) is None
    assert np.array_equal(emulated(text, inputs)["o"], want)


def test_vectors_are_not_asked_for_ahead_of_another_loop() -> None:
    """Its sums need the registers."""
    loop = (
        "for k in K by 64 carry (s: f32[m, n] = fill(0.0)) { yield s + dot[k](load a[m, k], load b[n, k]) }"
    )
    text = VECTORS.replace("COLUMNS", "64").replace(
        loop, loop + "\n" + loop.replace("(s:", "(r:").replace("yield s", "yield r")
    )
    source = generate(parse_module(text.replace("f32(load u[n])", "f32(load u[n]) + r")), SM_90A)
    whole = source.partition("def g_whole(")[2].partition("\n\n\n")[0]
    first = whole.index("_settle_2(s)")
    assert "load4_bf16(u" in whole[first:]
    assert "load4_bf16(u" not in whole[:first]


@pytest.mark.parametrize("columns", [48, 72, 96, 176])
def test_tiles_that_are_no_whole_chunks_stay_inside_themselves(columns: int) -> None:
    """Each tile by a block of its own: a box that reached into a neighbour's columns would be a fault."""
    inputs = {"a": drawn(1, 64, 64), "b": drawn(1, 2 * columns + 40, 64)}
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    got = emulated(product(rows=64, columns=columns), inputs, blocks=3)["o"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


def test_what_serves_other_strides_keeps_to_matrix_units() -> None:
    """Its warps take tiles of 128 x 128, for they have no room for those of the warpgroups."""
    module = parse_module(product(rows=192, columns=176))
    source = generate(module, SM_90A)
    assert "# tier mma" in source.partition("def g_any(")[2]
    inputs = {"a": drawn(1, 40, 24), "b": drawn(1, 136, 24)}
    ran: list[str] = []
    got = emulate.run_module(module, source, inputs, {}, preferred=False, ran=ran)["o"]
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    assert ran == ["g_any"]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("m", "kernel"), [(1, "g_few8"), (8, "g_few8"), (9, "g_few16"), (32, "g_few32"), (33, "g")]
)
def test_few_rows_come_alone(m: int, kernel: str) -> None:
    """Boxes of no more rows than that; the rest of a slot holds NaN, which no result shows."""
    inputs = {"a": drawn(1, m, 200), "b": drawn(1, 72, 200)}
    module = parse_module(product(rows=64, columns=32))
    source = generate(module, SM_90A)
    ran: list[str] = []
    got = emulate.run_module(module, source, inputs, {}, blocks=2, ran=ran)["o"]
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    assert ran == [kernel]
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))
    rows = int(kernel.removeprefix("g_few")) if "few" in kernel else 64
    (bytes_,) = re.findall(
        r"expect_bytes\(.*, (\d+)\)", source.partition(f"def {kernel}(")[2].partition("\ndef ")[0]
    )
    assert int(bytes_) == 128 * (rows + 32)


GATED = """module g { tile g(x: f16[M, K], u: f16[N, K], w: f16[N, K], bias: f32[N], o: out f16[M, N], r: out f32[M, N]) {
    extents M, K, N
    tier wgmma
    for m in M by 64, n in N by 64 parallel {
        for k in K by 64 carry (s: f32[m, n] = fill(0.0), t: f32[m, n] = fill(0.0)) {
            x_tile: f16[m, k] = load x[m, k]
            yield s + dot[k](x_tile, load u[n, k]), t + dot[k](x_tile, load w[n, k])
        }
        v: f32[m, n] = s + load bias[n]
        store o[m, n] = f16(v / (1.0 + exp(-v)) * t)
        store r[m, n] = v
    }
} }"""


def test_two_products_of_one_operand_and_an_epilogue() -> None:
    """One result leaves in boxes, one from registers; the bias is read where it exists."""
    m, k, n = 72, 88, 80
    inputs = {
        "x": drawn(m, k, dtype=np.float16),
        "u": drawn(n, k, dtype=np.float16),
        "w": drawn(n, k, dtype=np.float16),
    }
    inputs |= {"bias": drawn(n, dtype=np.float32)}
    got = emulated(GATED, inputs)
    x, u, w, bias = (inputs[i].astype(float) for i in ("x", "u", "w", "bias"))
    v = x @ u.T + bias
    assert np.array_equal(got["r"], v)
    with np.errstate(over="ignore"):
        want = (v / (1 + np.exp(-v)) * (x @ w.T)).astype(np.float16)
    assert np.allclose(got["o"].astype(float), want.astype(float), rtol=2e-3, atol=1e-4)


def mutants(source: str, kernel: str) -> list[str]:
    """The source with one wait, arrival or barrier of a kernel left out each."""
    return [EMULATED["without"](source, i) for i in EMULATED["waits"](source, kernel)]


def test_without_a_wait_arrival_or_barrier_it_fails() -> None:
    """Wrong numbers, or a fault that says what: of the sources without one of them each, at least nine in ten."""
    module = parse_module(product(rows=64))
    source = generate(module, SM_90A)
    inputs = {"a": drawn(1, 72, 320), "b": drawn(1, 136, 320)}
    want = emulate.run_module(module, source, inputs, {}, blocks=2)["o"]
    every = mutants(source, "g")
    missed = [m for m in every if _passes(module, m, inputs, want)]
    assert len(every) >= 11
    assert len(missed) <= len(every) // 10, "\n\n".join(missed)


def _passes(
    module: Any, source: str, inputs: dict[str, Array], want: Array, scalars: dict[str, float] | None = None
) -> bool:
    """In both orders of the threads."""
    for backwards in (True, False):
        try:
            got = emulate.run_module(module, source, inputs, scalars or {}, blocks=2, backwards=backwards)[
                "o"
            ]
        except emulate.KernelFault:
            return False
        if not np.array_equal(got, want):
            return False
    return True


ATTENTION = """kernel attention<T: f16 | bf16>(q: T[H, M, D], k: T[G, N, D], v: T[G, N, E], w: f32[H], scale: f32)
    -> (o: T[H, M, E], lse: f32[H, M]) {
    require H % G == 0, scale > 0
    s[h, m, n] = SCORE
    p[h, m, n] = softmax[n SET](s[h, m, n])
    o[h, m, e] = sum[n](p[h, m, n] * v[h // (H // G), n, e])
    lse[h, m] = logsumexp[n SET](s[h, m, n])
}
"""
PRODUCT = "scale * sum[d](q[h, m, d] * k[h // (H // G), n, d])"
BIASED = f"{PRODUCT} + w[h] * f32(n - m)"


def attention(score: str, subset: str, tiles: str, sizes: dict[str, int]) -> Any:
    return attention_of(ATTENTION.replace("SCORE", score).replace("SET", subset), tiles, sizes)


def attention_of(text: str, tiles: str, sizes: dict[str, int]) -> Any:
    return compile_kernel(
        tl.parse(text)["attention"], SM_90A, sizes, dtypes={"T": DType.F16},
        schedule=parse_schedule(f"schedule s for attention on cuda:sm_90a {{ tier wgmma\n tile {tiles} }}"),
    )  # fmt: skip


def attention_inputs(sizes: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    shapes = {"q": "HMD", "k": "GND", "v": "GNE"}
    made = {n: rng.standard_normal([sizes[a] for a in x]).astype(np.float16) for n, x in shapes.items()}
    return {**made, "w": np.float32([0.05, 0.2])[: sizes["H"]]}


def exact(x: dict[str, Array], scale: float, biased: bool, seen: Any) -> tuple[Array, Array]:
    """In float64; rows that see nothing give 0 and -inf."""
    heads = len(x["q"]) // len(x["k"])
    q, k, v = x["q"].astype(float), *(np.repeat(x[n], heads, 0).astype(float) for n in "kv")
    m, n = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    s = scale * q @ k.swapaxes(1, 2) + (x["w"].astype(float)[:, None, None] * (n - m) if biased else 0)
    s = np.where(seen(m, n, q.shape[1], k.shape[1]), s, -np.inf)
    top = np.where(np.isinf(s.max(-1)), 0, s.max(-1))
    p = np.exp(s - top[..., None])
    z = p.sum(-1)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(z == 0, 1, z)[..., None], np.where(z == 0, -np.inf, top + np.log(z))


CASCADES = {
    "full": (PRODUCT, "", lambda m, n, M, N: m >= 0, "m by 64, n by 32", (72, 69, 32, 24)),
    "causal": (PRODUCT, "| n <= m + N - M", lambda m, n, M, N: n <= m + N - M, "m by 128, n by 16", (72, 67, 16, 24)),
    "window": (
        BIASED, "| n <= m and m - n < 40", lambda m, n, M, N: (n <= m) & (m - n < 40), "m by 64, n by 16", (70, 67, 16, 16)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASCADES)
def test_products_with_a_softmax_between(case: str) -> None:
    """Odd lengths, heads that share keys, more query than key rows (so some see nothing), several tiles a block."""
    score, subset, seen, tiles, (m, n, d, e) = CASCADES[case]
    sizes = {"H": 2, "G": 1, "M": m, "N": n, "D": d, "E": e}
    made, inputs = attention(score, subset, tiles, sizes), attention_inputs(sizes)
    assert made.module.programs[0].tier == "wgmma"
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=3)
    o, lse = exact(inputs, 0.3, score == BIASED, seen)
    assert np.abs(got["o"].astype(float) - o).max() < 2e-3
    assert np.array_equal(np.isinf(got["lse"]), np.isinf(lse))
    assert np.abs(np.where(np.isinf(lse), 0, got["lse"] - np.where(np.isinf(lse), 0, lse))).max() < 1e-5


OVERLAPPING = {
    "some see nothing": (PRODUCT, "| n + 70 <= m", (200, 67)),
    "most see nothing": (PRODUCT, "| n + 140 <= m", (260, 67)),
    "all see nothing": (PRODUCT, "| n + 300 <= m", (130, 67)),
    "a window": (BIASED, "| n <= m and m - n < 40", (200, 67)),
    "tanh bounds scores": (f"softcap({PRODUCT}, 9.0)", "| n + 70 <= m", (200, 67)),
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_tasks_that_overlap_give_the_same_bits(case: str, blocks: int) -> None:
    """As tasks apart, and what is exact; with tasks that see nothing first, last and between others."""
    score, subset, (m, n) = OVERLAPPING[case]
    sizes, inputs = {"H": 2, "G": 1, "M": m, "N": n, "D": 16, "E": 24}, dict[str, Any]()
    found = []
    for skew in ("all", "steps"):
        made = attention(score, subset, f"m by 64, n by 16\n skew {skew}", sizes)
        inputs = inputs or attention_inputs(sizes)
        assert made.schedule.skew == skew
        found.append(emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=blocks))
    for x, y in zip(found[0].values(), found[1].values(), strict=True):
        assert np.array_equal(x, y, equal_nan=True)
    if score == PRODUCT:
        low = int(subset.split()[3])
        o, lse = exact(inputs, 0.3, False, lambda m, n, M, N: n + low <= m)
        assert np.abs(found[0]["o"].astype(float) - o).max() < 2e-3
        assert np.array_equal(np.isinf(found[0]["lse"]), np.isinf(lse))


def test_results_that_keep_a_slot_of_q_keep_tasks_apart() -> None:
    """Tasks that see nothing would wait for the slot that the results of the task before them leave through."""
    text = ATTENTION.replace("SCORE", PRODUCT).replace("SET", "| n <= m + N - M")
    sizes = {"H": 1, "G": 1, "M": 640, "N": 150, "D": 128, "E": 128}
    made = attention_of(text, "m by 128, n by 128\n stage k by 3", sizes)
    assert any("results leave through the slots of `q`" in r.message for r in made.remarks)
    assert made.schedule.skew == "steps"


def test_of_a_skewed_loop_without_a_wait() -> None:
    """Every fourth of the waits, arrivals and barriers, left out; rings go round, tasks overlap, and one sees nothing."""
    sizes = {"H": 1, "G": 1, "M": 320, "N": 187, "D": 16, "E": 16}
    tiles = "m by 64, n by 16\n stage q by 1, k, v by 2"
    made, inputs = attention(PRODUCT, "| n + 70 <= m", tiles, sizes), attention_inputs(sizes)
    want = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=2)["o"]
    every = mutants(made.source, "attention")[::4]
    missed = [x for x in every if _passes(made.module, x, inputs, want, {"scale": 0.3})]
    assert len(every) >= 12
    assert len(missed) <= 1


def test_scores_of_any_size() -> None:
    """Rows that a mask fills with the lowest number come out uniform beside ordinary and huge ones."""
    text = (
        ATTENTION.replace("w: f32[H]", "w: f32[M, N]")
        .replace("SET", "")
        .replace("SCORE", f"{PRODUCT} + w[m, n]")
    )
    sizes = {"H": 1, "G": 1, "M": 64, "N": 48, "D": 16, "E": 16}
    made = attention_of(text, "m by 64, n by 16", sizes)
    inputs = attention_inputs(sizes)
    inputs["w"] = np.zeros((64, 48), np.float32)
    inputs["w"][3], inputs["w"][7, ::2], inputs["w"][9] = np.finfo(np.float32).min, 1e30, -3e9
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=1)["o"][0].astype(float)
    v = inputs["v"][0].astype(float)
    assert np.abs(got[3] - v.mean(0)).max() < 2e-3
    assert np.abs(got[7] - v[::2].mean(0)).max() < 2e-3
    assert (
        np.abs(got[9] - v.mean(0)).max() < 2e-3
    )  # scores differ by less than the spacing of numbers at -3e9
    plain = exact({**inputs, "w": np.zeros(1)}, 0.3, False, lambda m, n, M, N: m >= 0)[0][0]
    assert np.abs(np.delete(got - plain, (3, 7, 9), 0)).max() < 2e-3


@pytest.mark.parametrize(
    ("m", "n", "tile", "access"),
    [(128, 64, 32, "load16_words_u16"), (128, 64, 16, "load4_f16"), (100, 55, 16, "load4_f16")],
)
def test_a_bias_that_the_copy_engine_cannot_address(m: int, n: int, tile: int, access: str) -> None:
    """Of six dimensions. In whole tiles two columns, or by four threads 32, come with one access, asked for while a step's
    first products run; else one by one."""
    text = (
        ATTENTION.replace("w: f32[H]", "w: T[H, H, H, H, M, N]")
        .replace("SET", "| n <= m")
        .replace("SCORE", f"{PRODUCT} + f32(w[h, h, h, h, m, n])")
    )
    sizes = {"H": 1, "G": 1, "M": m, "N": n, "D": 16, "E": 16}
    made, inputs = attention_of(text, f"m by 64, n by {tile}", sizes), attention_inputs(sizes)
    inputs["w"] = np.random.default_rng(9).standard_normal((1, 1, 1, 1, m, n)).astype(np.float16)
    body = made.source.partition("def attention_whole(")[2].partition("\ndef ")[0]
    starts = [i for i, x in enumerate(body.splitlines()) if f"{access}(w," in x]
    awaits = [i for i, x in enumerate(body.splitlines()) if "_settle_" in x]
    assert starts
    assert min(starts) < min(awaits)
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=2)["o"][0]
    q, k, v = (inputs[x][0].astype(float) for x in "qkv")
    s = np.where(np.tri(m, n, dtype=bool), 0.3 * q @ k.T + inputs["w"][0, 0, 0, 0].astype(float), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    assert np.abs(got.astype(float) - p @ v / p.sum(-1, keepdims=True)).max() < 2e-3


def test_what_the_copy_engine_cannot_address_goes_another_way() -> None:
    """Rows of 65 elements do not start at multiples of 16 bytes."""
    module = parse_module(product(rows=64))
    inputs = {"a": drawn(1, 64, 65), "b": drawn(1, 64, 65)}
    got = emulate.run_module(module, generate(module, SM_90A), inputs, {}, blocks=1)["o"]
    want = inputs["a"].astype(float) @ inputs["b"].astype(float).swapaxes(1, 2)
    assert np.array_equal(got, want.astype(ml_dtypes.bfloat16))


ROW_SUMS = """module g { tile g(a: bf16[M, K], b: bf16[N, K], o: out f32[M, N]) {
    extents M, K, N
    tier wgmma
    for m in M by 128, n in N by 64 parallel {
        for k in K by 64 carry (s: f32[m, n] = fill(0.0), t: f32[m] = fill(0.0)) {
            x: bf16[m, k] = load a[m, k]
            y: bf16[n, k] = load b[n, k]
            w: bf16[m, k] = load a[m, k]
            yield s + dot[k](x, y), t + sum[k](f32(w))
        }
        store o[m, n] = s + t
    }
} }"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (product(rows=32), "`m` by 32"),
        (product(columns=12), "has 12 rows; boxes have multiples of 8"),
        (product(dtype="f32"), "a product of f32 and f32"),
        (product().replace("load b[z, n, k]", "load b[z, n, k % 2]"), "no block of rows and columns"),
        (product(rows=128, columns=512), "512"),
        (product().replace("K by 64", "K by 64 to m + 1"), "bounds of `k`"),
        (product().replace("K by 64", "K by 24"), "`k` by 24; products take 16 at a time"),
        (product().replace("M, K, N", "M, K, N, J").replace("in K", "in J"), "`a` goes on where `k` ends"),
        (ROW_SUMS, "a sum of products of tiles from memory in a loop that computes"),
    ],
    ids=["rows", "columns", "dtype", "subscripts", "wide", "bounds", "depth", "part of a tensor", "row sums"],
)
def test_what_the_tier_does_not_take_is_said(text: str, reason: str) -> None:
    (program,) = parse_module(text).programs
    assert reason in str(why_not(program, SM_90A))
    assert "cuda:sm_80 has no wgmma" in str(why_not(program, SM_80))


def test_a_fitting_program_has_no_reason() -> None:
    (program,) = parse_module(product()).programs
    assert why_not(program, SM_90A) is None


PART = """kernel part<T: bf16>(a: T[M, K], b: T[K, N], w: f32[J]) -> (o: f32[M, N], u: f32[J]) {
    o[m, n] = sum[k in J](a[m, k] * b[k, n])
    u[k] = w[k]
}
"""


def test_a_sum_over_a_part_of_its_tensors_leaves_the_rest_out() -> None:
    """What lies behind the part, within the last tile, is in the way of the copy engine alone."""
    kernel = tl.parse(PART)["part"]
    inputs = {"a": drawn(72, 64), "b": drawn(64, 80), "w": drawn(24, dtype=np.float32)}
    made = compile_kernel(kernel, SM_90A, {"M": 72, "N": 80, "K": 64, "J": 24}, dtypes={"T": DType.BF16})
    got = emulate.run_module(made.module, made.source, inputs, {})["o"]
    assert np.array_equal(got, inputs["a"][:, :24].astype(float) @ inputs["b"][:24].astype(float))


@pytest.mark.parametrize("b", ["d, n", "n, d"])
@pytest.mark.parametrize("a", ["m, d", "d, m"])
def test_axes_in_one_piece_that_end_within_a_step(a: str, b: str) -> None:
    """Instructions take 16 elements of the contracted axis; behind its 24 there are zeros."""
    text = ATTENTION.replace("q: T[H, M, D], k: T[G, N, D]", f"q: T[H, {a.upper()}], k: T[G, {b.upper()}]")
    score = PRODUCT.replace("q[h, m, d]", f"q[h, {a}]").replace("n, d]", f"{b}]")
    sizes = {"H": 1, "G": 1, "M": 72, "N": 40, "D": 24, "E": 16}
    made = attention_of(text.replace("SCORE", score).replace("SET", ""), "m by 64, n by 32", sizes)
    given, ran = attention_inputs(sizes), list[str]()
    turned = {
        x: np.ascontiguousarray(given[x].swapaxes(1, 2)) for x, axes in (("q", a), ("k", b)) if axes[0] == "d"
    }
    got = emulate.run_module(made.module, made.source, {**given, **turned}, {"scale": 0.3}, blocks=1, ran=ran)
    want, _ = exact(given, 0.3, False, lambda m, n, M, N: m >= 0)
    assert ran == ["attention"]
    assert np.abs(got["o"].astype(float) - want).max() < 2e-3


WEIGHTS = """kernel weights(s: bf16[M, N], v: bf16[N, E]) -> (p: bf16[M, N], o: bf16[M, E]) {
    p[m, n] = softmax[n | n <= m + N - M](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""
LENGTHS = """kernel lengths(u: bf16[M], v: bf16[N, E], len: i32[M]) -> o: bf16[M, E] {
    s[m in M, n in N] = u[m]
    p[m, n] = softmax[n | n < len[m]](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""


@pytest.mark.parametrize(
    ("text", "sizes"),
    [(WEIGHTS, {"M": 70, "N": 75, "E": 8}), (LENGTHS, {"M": 70, "N": 20, "E": 8})],
    ids=["full tiles only add, partial ones are masked", "bounds of tiles that one role lacks"],
)
def test_products_that_stay_with_another_tier(text: str, sizes: dict[str, int]) -> None:
    """Weights that are a result too, and a product of a matrix whose rows end somewhere."""
    program = tl.parse(text)
    (name,) = program.kernels
    for fuse in ("auto", "none"):
        found = EMULATED["settled"](program[name], sizes, {})
        made = compile_kernel(program[name], SM_90A, sizes, dtypes=found.dtypes, options=Options(fuse=fuse))
        assert all(x.ok for x in EMULATED["emulated"](found, made, []))


COMPUTED = """kernel computed(a: bf16[M, K], b: bf16[N, K]) -> o: f32[{result}] {{
    o[{index}] = sum[k]({a} * {b})
}}
"""
SIDES = {"a": ("bf16(a[m, k] + 1)", "b[n, k]"), "b": ("a[m, k]", "bf16(where(n < k + 3, b[n, k] + 1, 0))")}


@pytest.mark.parametrize("index", ["m, n", "n, m"])
@pytest.mark.parametrize("side", SIDES)
def test_a_computed_operand_has_the_rows_of_the_result(index: str, side: str) -> None:
    """In tiles that are as wide as they are high, where either operand would fit; with the columns it is refused."""
    a, b = SIDES[side]
    kernel = tl.parse(COMPUTED.format(index=index, result=index.upper(), a=a, b=b))["computed"]
    stated = "schedule s for computed on cuda:sm_90a { tier wgmma\n tile m by 64, n by 64, k by 16 }"
    sizes, inputs = {"M": 80, "N": 72, "K": 56}, {"a": drawn(80, 56), "b": drawn(72, 56)}
    if (side == "a") != (index == "m, n"):
        with pytest.raises(tl.TileError, match="with the columns of a product has to come from memory"):
            compile_kernel(kernel, SM_90A, sizes, schedule=parse_schedule(stated))
        return
    made = compile_kernel(kernel, SM_90A, sizes, schedule=parse_schedule(stated))
    got = emulate.run_module(made.module, made.source, inputs, {}, blocks=2)["o"]
    left, right = inputs["a"].astype(float), inputs["b"].astype(float)
    seen = np.arange(72)[:, None] < np.arange(56) + 3
    want = (left + 1) @ right.T if side == "a" else left @ np.where(seen, right + 1, 0).T
    assert np.array_equal(got, want if index == "m, n" else want.T)


# ---------------------------------------------------------------- machine code

needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


@needs_toolkit
def test_the_machine_code_has_no_spill_and_the_assembler_no_complaint() -> None:
    """The main loop is four matrix instructions for a step of 64, and descriptors stay in uniform registers."""
    from tileloom.runtime.machine_code import machine_code

    kernel = machine_code(generate(parse_module(product(columns=256)), SM_90A), "g", SM_90A)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert "C75" not in kernel.log
    sass = kernel.sass
    assert len(re.findall(r"HGMMA\.64x256x16\.F32\.BF16", sass)) == 4
    assert len(re.findall(r"\bUTMALDG\.3D", sass)) == 2
    assert len(re.findall(r"\bUTMASTG\.3D", sass)) == 4
    assert len(re.findall(r"\bUSETMAXREG", sass)) == 2
    first, last = (f(i for i, x in enumerate(sass.splitlines()) if "HGMMA" in x) for f in (min, max))
    assert not [x for x in sass.splitlines()[first:last] if "R2UR" in x or "LDL" in x]


def test_two_loops_read_one_tile_of_queries() -> None:
    """A mask that no cascade takes: a pass for the maximum, another for the sums. The queries stay until the second."""
    text = ATTENTION.replace("SCORE", PRODUCT).replace("SET", "| not (n <= m and m - n < 7)")
    sizes = {"H": 2, "G": 1, "M": 72, "N": 69, "D": 16, "E": 16}
    made, inputs = attention_of(text, "m by 64, n by 32", sizes), attention_inputs(sizes)
    assert made.source.count("while n_0 < ") > 4
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=3)
    o, _ = exact(inputs, 0.3, False, lambda m, n, M, N: ~((n <= m) & (m - n < 7)))
    assert np.abs(got["o"].astype(float) - o).max() < 2e-3


WIDE_HEADS = """kernel wide<T: bf16>(q: T[M, D], k: T[N, D], v: T[N, E]) -> o: T[M, E] {
  p[m, n] = softmax[n SET](sum[d](q[m, d] * k[n, d]) / sqrt(D))
  o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""


@pytest.mark.parametrize("subset", ["", "| n <= m"])
@pytest.mark.parametrize("columns", [72, 104, 136, 152, 184, 248])
def test_heads_of_any_multiple_of_eight_columns(columns: int, subset: str) -> None:
    """Those of 136 and more had no variant for strides that the copy engine cannot address, and so no code in the tier."""
    sizes = {"M": 4096, "N": 4096, "D": columns, "E": columns}
    program = tl.parse(WIDE_HEADS.replace("SET", subset))
    made = compile_kernel(program["wide"], SM_90A, sizes, dtypes={"T": DType.BF16})
    assert [p.tier for p in made.module.programs] == [
        "wgmma",
        "loops",
    ]  # and the merge of a split, for one head


@pytest.mark.parametrize("preferred", [True, False])
def test_a_head_of_136_columns(preferred: bool) -> None:
    sizes = {"M": 70, "N": 40, "D": 136, "E": 136}
    program = tl.parse(WIDE_HEADS.replace("SET", "| n <= m"))
    made = compile_kernel(program["wide"], SM_90A, sizes, dtypes={"T": DType.BF16})
    random = np.random.default_rng(6)
    q, k, v = (random.standard_normal((n, 136)).astype(ml_dtypes.bfloat16) for n in (70, 40, 40))
    ran: list[str] = []
    got = emulate.run_module(
        made.module, made.source, {"q": q, "k": k, "v": v}, {}, preferred=preferred, ran=ran
    )["o"]
    assert any("any" in name for name in ran) is not preferred
    s = q.astype(float) @ k.astype(float).T / 136**0.5
    s[np.arange(40) > np.arange(70)[:, None]] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    want = p / p.sum(-1, keepdims=True) @ v.astype(float)
    assert np.abs(got.astype(float) - want).max() < 0.02
