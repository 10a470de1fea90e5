"""The mma tier without a GPU: emulated warps (ldmatrix, mma.sync, cp.async on real values) against the tile interpreter."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.mma import why_not
from tileloom.compiler.codegen.shared_memory import Buffer
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.codegen.simt_source import Staged
from tileloom.compiler.interpreter import tile
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_75, SM_80, SM_90A, CudaTarget
from tileloom.compiler.tile_text import parse_module
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]


def product(b: str, subscript: str, batch: bool = False) -> str:
    z, extent, loop = ("z, ", "B, ", "z in B, ") if batch else ("", "", "")
    return f"""module g {{ tile g(a: bf16[{extent}M, K], b: bf16[{extent}{b}], c: out f32[{extent}M, N]) {{
        extents {extent}M, K, N
        tier mma
        for {loop}m in M by 32, n in N by 32 parallel {{
            for k in K by 16 carry (s: f32[m, n] = fill(0.0)) {{
                yield s + dot[k](load a[{z}m, k], load b[{z}{subscript}])
            }}
            store c[{z}m, n] = s
        }}
    }} }}"""


ATTENTION = """module t { tile t(q: f16[M, D], k: f16[N, D], v: f16[N, D], o: out f16[M, D], scale: f32) {
    extents M, N, D
    static D = 32
    whole d = D, e = D
    tier mma
    for m in M by 64 parallel {
        qt: f16[m, d] = load q[m, d]
        for n in N by 32 to m + 64 carry (r: f32[m] = fill(-inf), l: f32[m] = fill(0.0), acc: f32[m, e] = fill(0.0)) {
            s: f32[m, n] = where(n <= m, dot[d](qt, load k[n, d]), -inf)
            r1: f32[m] = max(r, max[n](s))
            r0: f32[m] = where(r1 == -inf, 0.0, r1)
            p: f32[m, n] = exp(scale * (s - r0))
            c: f32[m] = exp(scale * (r - r0))
            yield r1, l * c + sum[n](p), acc * c + dot[n](p, load v[n, e])
        }
        store o[m, e] = f16(where(l == 0.0, 0.0, acc / l))
    }
} }"""


def worst(text: str, inputs: dict[str, Array], scalars: dict[str, float], preferred: bool) -> float:
    module = parse_module(text)
    want = tile.run_module(module, inputs, scalars)
    got = emulate.run_module(module, generate(module, SM_80), inputs, scalars, preferred=preferred)
    return max(float(np.abs(got[n].astype(float) - want[n].astype(float)).max()) for n in want)


def drawn(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Array:
    return np.random.default_rng(len(shape) + shape[0]).integers(-4, 5, shape).astype(dtype)


@pytest.mark.parametrize("preferred", [True, False])
@pytest.mark.parametrize("size", [(32, 32, 32), (40, 24, 48), (288, 32, 16)], ids=str)
@pytest.mark.parametrize("b", ["K, N", "N, K"])
def test_products_are_exact_on_small_integers(size: tuple[int, int, int], b: str, preferred: bool) -> None:
    m, n, k = size
    inputs = {"a": drawn(m, k), "b": drawn(*((k, n) if b == "K, N" else (n, k)))}
    assert worst(product(b, b.lower()), inputs, {}, preferred) == 0


def test_a_batch_of_products() -> None:
    inputs = {"a": drawn(2, 64, 16), "b": drawn(2, 16, 96)}
    assert worst(product("K, N", "k, n", batch=True), inputs, {}, True) == 0


@pytest.mark.parametrize("preferred", [True, False])
@pytest.mark.parametrize("size", [(64, 64), (70, 52)], ids=str)
def test_weights_go_from_product_to_product_in_registers(size: tuple[int, int], preferred: bool) -> None:
    m, n = size
    inputs = {name: drawn(rows, 32, dtype=np.float16) for name, rows in (("q", m), ("k", n), ("v", n))}
    assert worst(ATTENTION, inputs, {"scale": 0.125}, preferred) <= 4e-3
    source = generate(parse_module(ATTENTION), SM_80)
    assert "pack_f16(" in source
    assert "p_shared" not in source


LINES = """module g { tile g(a: bf16[A], b: bf16[B], c: out f32[M, N]) {
    extents M, K, N
    tier mma
    for m in M by 64, n in N by 128 parallel {
        for k in K by 64 carry (s: f32[m, n] = fill(0.0)) {
            yield s + dot[k](load a[a], load b[b])
        }
        store c[m, n] = s
    }
} }"""


@pytest.mark.parametrize("preferred", [True, False])
@pytest.mark.parametrize("b", ["K, N", "N, K"])
@pytest.mark.parametrize("a", ["M, K", "K, M"])
def test_products_of_tiles_in_lines(a: str, b: str, preferred: bool) -> None:
    """Tiles of 64 and 128 columns lie in lines of 128 bytes, rows or columns along the sum."""
    text = LINES.replace("[A]", f"[{a}]").replace("[B]", f"[{b}]")
    text = text.replace("a[a]", f"a[{a.lower()}]").replace("b[b]", f"b[{b.lower()}]")
    source = generate(parse_module(text), SM_80)
    tiles = {"M": 64, "N": 128, "K": 64}
    size = sum(tiles[x[0]] * tiles[x[1]] for x in (a.split(", "), b.split(", ")))
    assert f"# {3 * 2 * size} bytes of shared memory" in source  # three slots without padding
    sizes = {"M": 72, "N": 40, "K": 136} if preferred else {"M": 40, "N": 100, "K": 70}
    inputs = {n: drawn(*(sizes[x] for x in own.split(", "))) for n, own in (("a", a), ("b", b))}
    assert worst(text, inputs, {}, preferred) == 0


def test_a_line_has_each_element_once_and_eight_rows_meet_no_bank_twice() -> None:
    rows, columns = 16, 128
    tile_of = Staged(Buffer("t", DType.BF16, 0, 3 * rows * columns), ("m", "k"), (columns, 1), "", rows * 64)
    places = np.array([[eval(tile_of.place(str(i), str(j))) for j in range(columns)] for i in range(rows)])
    assert sorted(places.ravel()) == list(range(rows * columns))
    sixteen_bytes = places[:, ::8] * 2 // 16
    assert np.array_equal(places[:, ::8] + 7, places[:, 7::8])  # eight columns lie side by side
    for first in (0, 8):
        for column in range(columns // 8):
            assert len(set(sixteen_bytes[first : first + 8, column] % 8)) == 8
    lines = places * 2 // 128
    assert all(len(set(lines[i, j : j + 64])) == 1 for i in range(rows) for j in (0, 64))


@pytest.mark.parametrize("columns", [64, 128])
def test_attention_on_tiles_in_lines(columns: int) -> None:
    text = ATTENTION.replace("D = 32", f"D = {columns}").replace("N by 32", "N by 64")
    inputs = {
        name: drawn(rows, columns, dtype=np.float16) for name, rows in (("q", 70), ("k", 80), ("v", 80))
    }
    assert worst(text, inputs, {"scale": 0.0625}, True) <= 4e-3


UNMASKED = (
    ATTENTION.replace(" to m + 64", "").replace("n <= m", "n <= m + 100").replace("fill(-inf)", "fill(0.0)")
)
"""A mask that lets all columns through that exist, and a maximum that is no less than 0."""


def test_columns_that_do_not_exist_weigh_nothing_whatever_the_scale() -> None:
    """exp(c · (-inf - r)), which stands in for them, is 0 for a positive c alone."""
    inputs = {name: drawn(rows, 32, dtype=np.float16) for name, rows in (("q", 70), ("k", 52), ("v", 52))}
    for scale in (0.0125, -0.0125):
        assert worst(UNMASKED, inputs, {"scale": scale}, True) <= 4e-3
    known = UNMASKED.replace("tier mma", "tier mma\n    attributes @positive(scalar = scale)")
    assert worst(known, inputs, {"scale": 0.125}, True) <= 4e-3
    asks = [generate(parse_module(x), SM_80).count("select_f32(n_ok") for x in (UNMASKED, known)]
    assert asks[0] > asks[1] == 0


def test_required_conditions_reach_the_tile_program() -> None:
    text = """kernel attention<T: bf16>(q: T[M, D], k: T[N, D], v: T[N, E], scale: f32) -> o: T[M, E] {
  require scale > 0
  p[m, n] = softmax[n](scale * sum[d](q[m, d] * k[n, d]))
  o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""
    for line, known in (("require scale > 0", True), ("require scale > -1", False)):
        schedule = parse_schedule("schedule s for attention on cuda:sm_80 { tier mma }")
        made = compile_kernel(
            tl.parse(text.replace("require scale > 0", line))["attention"], SM_80,
            {"M": 64, "N": 64, "D": 32, "E": 32}, dtypes={"T": DType.BF16}, schedule=schedule,
        )  # fmt: skip
        assert any(a.name == "positive" for p in made.module.programs for a in p.attributes) == known


@pytest.mark.parametrize("preferred", [True, False])
def test_two_axes_are_compared_with_what_a_tensor_holds(preferred: bool) -> None:
    """A count over one axis of what lies before each index of another."""
    text = """module g { tile g(a: bf16[M, K], b: bf16[K, N], cu: i32[B], c: out f32[M, N]) {
        extents M, K, N, B
        tier mma
        for m in M by 32, n in N by 32 parallel {
            for i in B by 32 carry (count: i64[n] = fill(0)) {
                yield count + sum[i](where(load cu[i] <= n, 1, 0))
            }
            for k in K by 16 carry (s: f32[m, n] = fill(0.0)) {
                yield s + dot[k](load a[m, k], load b[k, n])
            }
            store c[m, n] = s + f32(count)
        }
    } }"""
    inputs = {"a": drawn(32, 32), "b": drawn(32, 64), "cu": np.array([3, 7, 20, 33, 60], np.int32)}
    assert worst(text, inputs, {}, preferred) == 0


def test_a_missing_wait_shows() -> None:
    """The copies land too late: among reads of the elements they are for."""
    module, inputs = parse_module(product("K, N", "k, n")), {"a": drawn(32, 64), "b": drawn(64, 32)}
    source = generate(module, SM_80).replace("wait_copies1()", "wait_copies3()")
    with pytest.raises(emulate.KernelFault, match="no barrier between"):
        emulate.run_module(module, source, inputs, {})


AHEAD = LINES.replace("[A]", "[M, K]").replace("[B]", "[K, N]").replace("a[a]", "a[m, k]")
AHEAD = AHEAD.replace("b[b]", "b[k, n]").replace("m in M by 64, n in N by 128", "m in M by 32, n in N by 64")
"""Four depths a step, tiles in lines: fragments are read ahead."""


@pytest.mark.parametrize("k", [0, 64, 192, 320])
def test_fragments_are_read_ahead_through_the_ring(k: int) -> None:
    """No step, fewer than there are slots, as many, and more."""
    inputs = (
        {"a": drawn(32, k), "b": drawn(k, 64)} if k else {"a": drawn(32, 8)[:, :0], "b": drawn(8, 64)[:0]}
    )
    assert "slot_next" in generate(parse_module(AHEAD), SM_80)
    assert worst(AHEAD, inputs, {}, True) == 0


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("wait_copies1()", "wait_copies3()"),
        ("wait_copies1()\n            cuda.syncthreads()", "wait_copies1()"),
        ("wait_copies2()", "wait_copies3()"),
        ("wait_copies2()\n        cuda.syncthreads()", "wait_copies2()"),
    ],
)
def test_fragments_ahead_need_each_wait_and_barrier(text: str, instead: str) -> None:
    module, inputs = parse_module(AHEAD), {"a": drawn(32, 320), "b": drawn(320, 64)}
    source = generate(module, SM_80)
    assert text in source
    with pytest.raises(emulate.KernelFault, match="no barrier between"):
        emulate.run_module(module, source.replace(text, instead), inputs, {})


def test_where_operands_lie_is_a_remark() -> None:
    told = {(r.name, r.kind): r.message for r in layer("").remarks}
    assert told["operand-lines", "applied"].endswith("`layer_any`: `a`, `b` in lines of 128 bytes")
    assert "`layer`, `layer_ragged`" in told["fragments-ahead", "applied"]
    short = {(r.name, r.kind): r.message for r in layer("tile k by 48").remarks}
    assert "`a`, `b` in padded rows: a row of 48 is no multiple of 64" in short["operand-lines", "missed"]
    assert ("fragments-ahead", "applied") not in short


def test_a_missing_barrier_is_a_race() -> None:
    module, inputs = parse_module(product("K, N", "k, n")), {"a": drawn(32, 64), "b": drawn(64, 32)}
    source = generate(module, SM_80)
    first = source[: source.index("def g_")] if "def g_" in source else source
    cut = (
        first.replace("wait_copies1()\n            cuda.syncthreads()", "wait_copies1()")
        + source[len(first) :]
    )
    assert cut != source
    with pytest.raises(emulate.KernelFault, match="no barrier between"):
        emulate.run_module(module, cut, inputs, {})


LAYER = """kernel layer<T: bf16 | f16>(a: T[M, K], b: T[N, K]) -> c: T[M, N] {
  c[m, n] = sum[k](a[m, k] * b[n, k])
}
"""


NEEDS_TOOLKIT = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


def layer(lines: str, target: CudaTarget = SM_90A) -> Compilation:
    schedule = parse_schedule(f"schedule s for layer on {target.name} {{ tier mma\n {lines} }}")
    sizes = {"M": 4096, "N": 4096, "K": 4096}
    return compile_kernel(
        tl.parse(LAYER)["layer"], target, sizes, dtypes={"T": DType.BF16}, schedule=schedule
    )


@NEEDS_TOOLKIT
@pytest.mark.parametrize(("tiles", "copies"), [("m by 128, n by 128", 16), ("m by 128, n by 256", 12)])
def test_a_step_of_a_product_is_little_else(tiles: str, copies: int) -> None:
    """Of a step of 64: 128 products of a warp of 64 x 64 and 32 reads of fragments, each well before its products: those of
    the next step follow the one barrier, behind which products that need none of them are left; copies start among these."""
    from tileloom.runtime import machine_code

    kernel = machine_code.machine_code(layer(f"tile {tiles}").source, "layer", SM_90A)
    assert kernel.spill_bytes == 0
    step = main_loop(kernel.sass)
    names = ("HMMA", "LDSM", "LDGSTS", "BAR.SYNC", "")
    kinds = [next(k for k in names if k in x) for x in step]
    assert [kinds.count(k) for k in names[:-1]] == [128, 32, copies, 1]
    assert kinds.count("") < 130
    barrier = kinds.index("BAR.SYNC")
    behind = kinds[barrier:]
    assert behind.count("HMMA") > 24
    assert behind.count("LDSM") == 8
    assert kinds[:barrier].count("LDSM") == 24
    assert "HMMA" in behind[behind.index("LDGSTS") :]
    assert kinds[: kinds.index("LDSM")].count("HMMA") > 0  # a step does not start with reads


@NEEDS_TOOLKIT
@pytest.mark.parametrize("target", [SM_80, SM_90A], ids=lambda t: t.name)
def test_a_step_of_a_ragged_product_is_little_more(target: CudaTarget) -> None:
    """Whether a row exists is one comparison of 32 bits a copy, 16 in all, and a few a step."""
    from tileloom.runtime import machine_code

    kernel = machine_code.machine_code(layer("", target).source, "layer_ragged", target)
    assert kernel.spill_bytes == 0
    step = main_loop(kernel.sass)
    assert sum("HMMA" in x for x in step) == 128
    assert sum("ISETP" in x for x in step) <= 32
    assert len(step) < 320


def main_loop(sass: str) -> list[str]:
    """The instructions of the innermost loop that multiplies."""
    found: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*$", line):
            found.append(code[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", code[1])
            if back and back[1] in labels:
                loops.append((labels[back[1]], len(found)))
    multiplies = [(a, b) for a, b in loops if any("HMMA" in x for x in found[a:b])]
    start, end = min(multiplies, key=lambda x: x[1] - x[0])
    return found[start:end]


def test_what_the_tier_does_not_take_is_said() -> None:
    (program,) = parse_module(product("K, N", "k, n")).programs
    assert why_not(program, SM_80) is None
    assert "sm_75" in str(why_not(program, SM_75))
    (single,) = parse_module(product("K, N", "k, n").replace("bf16", "f32")).programs
    assert "a product of f32 and f32" in str(why_not(single, SM_80))
    (narrow,) = parse_module(product("K, N", "k, n").replace("N by 32 p", "N by 8 p")).programs
    assert "tiles of m by 32, n by 8: four warps take multiples of 64 x 16" in str(why_not(narrow, SM_80))
    (short,) = parse_module(product("K, N", "k, n").replace("K by 16", "K by 8")).programs
    assert "multiple of 16" in str(why_not(short, SM_80))


def test_a_stated_tier_that_changes_nothing_is_said() -> None:
    """Single rows of a tile are no product for matrix units: the kernel runs without them, and a remark says so."""
    text = """kernel p(a: bf16[M, K], b: bf16[K, N]) -> o: f32[M, N] { o[m, n] = sum[k](a[m, k] * b[k, n]) }
    schedule rows for p on cuda:sm_80 { tier mma  tile m by 1, n by 32, k by 16 }
    schedule tiles for p on cuda:sm_80 { tier mma  tile m by 64, n by 64, k by 32 }
    """
    program = tl.parse(text)
    for schedule, said in (("rows", True), ("tiles", False)):
        made = tl.compile(program["p"], schedule=program.schedules[schedule]).compilation(M=64, N=64, K=64)
        assert any("`tier mma` changes nothing" in r.message for r in made.remarks) is said
