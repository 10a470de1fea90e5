"""The simt tier without a GPU: generated source under emulation against the tile interpreter, and what it looks like."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tileloom.compiler.codegen.deal import Demand, Spread, deal
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.interpreter import tile
from tileloom.compiler.target import SM_75, SM_80, cuda_target
from tileloom.compiler.tile_text import parse_module
from tileloom.dsl.diagnostics import TileError
from tileloom.runtime import emulate

HERE = Path(__file__).parent
cases = runpy.run_path(str(HERE / "simt_cases.py"))
CASES = cases["CASES"]


def named(name: str) -> Any:
    return next(c for c in CASES if c.name == name)


def mismatch(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: float) -> str:
    """Where two outputs differ by more than the tolerance (absolute below 1, relative above); "" if nowhere."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= tolerance * np.maximum(1, np.abs(b))
    wrong = np.argwhere(~(same | near))
    return (
        ""
        if not len(wrong)
        else f"{len(wrong)} differ, first at {wrong[0]}: {a[tuple(wrong[0])]} for {b[tuple(wrong[0])]}"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_emulated_source_gives_the_interpreters_values(case: Any) -> None:
    module, inputs = parse_module(case.text), case.inputs()
    want = tile.run_module(module, inputs, case.scalars)
    source = generate(module, SM_80)
    assert want
    for preferred in (True, False) if "_any(" in source else (True,):
        got = emulate.run_module(module, source, inputs, case.scalars, preferred=preferred)
        assert {k: mismatch(got[k], want[k], case.tolerance) for k in want} == dict.fromkeys(want, "")


@pytest.mark.parametrize(
    "name", ["matmul", "attention", "softmax of one row a block", "layernorm", "scattered sums"]
)
def test_any_number_of_blocks_and_any_strides(name: str) -> None:
    case = named(name)
    module, inputs = parse_module(case.text), case.inputs()
    source = generate(module, SM_80)
    want = emulate.run_module(module, source, inputs, case.scalars)
    turned = {k: np.asfortranarray(v) for k, v in inputs.items()}
    for blocks in (1, 2, 100):
        got = emulate.run_module(module, source, turned, case.scalars, blocks=blocks)
        assert all(not mismatch(got[k], want[k], 1e-6) for k in want), blocks


# ---------------------------------------------------------------- mistakes that emulation finds


def without_line(source: str, number: int) -> str:
    lines = source.split("\n")
    lines[number] = lines[number].replace("cuda.syncthreads()", "pass")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "name", ["matmul", "two products in one sum", "softmax of one row a block", "batched product"]
)
def test_every_barrier_taken_away_is_a_race(name: str) -> None:
    case = named(name)
    module = parse_module(case.text)
    source = generate(module, SM_80)
    sites = [i for i, line in enumerate(source.split("\n")) if "cuda.syncthreads()" in line]
    assert len(sites) >= 2
    for site in sites:
        with pytest.raises(emulate.KernelFault, match="no barrier between"):
            every_variant(module, without_line(source, site), case)


def every_variant(module: Any, source: str, case: Any) -> None:
    for preferred in (True, False):
        emulate.run_module(module, source, case.inputs(), case.scalars, blocks=1, preferred=preferred)


def faulty(body: str, arguments: list[Any], threads: int = 64) -> str:
    """The message of a hand-written kernel's fault."""
    source = "def k(x):\n" + "\n".join(f"    {line}" for line in body.split("\n"))
    source += f"\nLAUNCHES = {{'k': {{'threads': {threads}, 'shared_bytes': 0, 'tasks': lambda: 1}}}}\n"
    kernel = emulate.load(source)["k"]
    tensors = [emulate.Tensor("x", a, kernel.state) if isinstance(a, np.ndarray) else a for a in arguments]
    with pytest.raises(emulate.KernelFault) as fault:
        kernel.run(tensors, 1)
    return str(fault.value)


def test_a_barrier_in_a_divergent_branch_is_named() -> None:
    body = "if cuda.threadIdx.x < 40:\n    cuda.syncthreads()"
    assert "thread 32, 33, 34, 35 … waits at line 3; thread 40, 41, 42, 43 … has ended" in faulty(body, [0])
    body = "if cuda.threadIdx.x < 32:\n    cuda.syncthreads()"
    assert "thread 0 waits at line 3; thread 32 has ended" in faulty(body, [0])


def test_a_shuffle_not_all_lanes_reach_is_named() -> None:
    body = "v = 1\nif cuda.threadIdx.x & 1 == 0:\n    v = cuda.shfl_xor_sync(ALL_LANES, v, 2)"
    assert "not all threads reach a barrier or shuffle" in faulty(body, [0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x[cuda.threadIdx.x] = f32(1.0)", "thread 8: offset 8 is outside tensor `x` (8,)"),
        ("x[3] = f32(cuda.threadIdx.x)", "thread 1: offset 3 of tensor `x` is written here and by block 0, thread 0"),
        ("s = cuda.shared.array(4, f32)\nt = s[1:3]\nt[2] = f32(0.0)", "index 2 of a shared array of 2"),
        ("a = cuda.local.array(4, f32)\na[-1] = f32(0.0)", "index -1 of a local array of 4"),
        (
            "s = cuda.shared.array(4, f32)\ns[cuda.threadIdx.x & 3] = f32(0.0)",
            "thread 4: shared element 0 is written here and written by thread 0",
        ),
        (
            "s = cuda.shared.array(64, f32)\ns[cuda.threadIdx.x] = f32(0.0)\ny = s[0]",
            "thread 1: shared element 0 is read here and written by thread 0",
        ),
    ],
)  # fmt: skip
def test_wild_and_racing_accesses_are_named(body: str, message: str) -> None:
    assert message in faulty(body, [np.zeros(8, np.float32)])


def test_unwritten_memory_shows() -> None:
    source = "def k(x):\n    s = cuda.shared.array(4, f32)\n    a = cuda.local.array(2, f32)\n"
    source += "    if cuda.threadIdx.x == 0:\n        x[0] = s[1]\n        x[1] = a[0]\n"
    source += "LAUNCHES = {'k': {'threads': 32, 'shared_bytes': 0, 'tasks': lambda: 1}}\n"
    kernel, x = emulate.load(source)["k"], np.zeros(2, np.float32)
    kernel.run([emulate.Tensor("x", x, kernel.state)], 1)
    assert np.isnan(x).all()


# ---------------------------------------------------------------- the source


@pytest.mark.parametrize("name", ["add", "softmax"])
def test_golden_source(name: str) -> None:
    """tests/golden/simt_<name>.py is the source; write it anew with the last line's call after a wanted change."""
    source = generate(parse_module(dict(cases["ladder"]())[name]), SM_80)
    golden = HERE / "golden" / f"simt_{name}.py.txt"
    assert source == golden.read_text(encoding="utf-8")


def test_barriers_stand_on_the_common_path() -> None:
    """B096: under `if` or in a loop over a thread's elements no barrier; serial loops run the same for all threads."""
    for case in CASES:
        tree = ast.parse(generate(parse_module(case.text), SM_80))
        for node in ast.walk(tree):
            if isinstance(node, ast.If):
                assert "syncthreads" not in ast.unparse(node), case.name


def test_products_use_fused_multiply_adds_and_nothing_else_does() -> None:
    source = generate(parse_module(cases["attention"](64, 64, 64)), SM_80)
    fused = [line for line in source.split("\n") if "fma_f32(" in line]
    assert len(fused) == 2
    assert all("_part[" in line for line in fused)


def test_a_target_without_nan_max_gets_the_portable_one() -> None:
    module = parse_module(cases["row_softmax"](4, 64))
    assert ", portable_max_f32 as max_f32," in generate(module, SM_75)
    assert ", max_f32," in generate(module, SM_80)


def test_annotations_and_launches_state_the_parameters() -> None:
    namespace: dict[str, Any] = {}
    source = generate(parse_module(cases["attention"](64, 64, 64)), SM_80)
    exec(source[source.index("LAUNCHES") :], namespace)
    launch = namespace["LAUNCHES"]["attention"]
    assert launch["threads"] == 128
    assert launch["shared_bytes"] == 4 * 3 * 64 * 65
    assert launch["tasks"](2, 3, 1, 65, 10, 64, 64) == 12
    assert 'q: "*u16", q_s0: "i64", q_s1: "i64", q_s2: "i64", q_s3: "i64",' in source
    assert 'scale: "f32",\n    B: "i64"' in source


def test_user_names_cannot_meet_ours() -> None:
    source = generate(parse_module(named("names of Python").text), SM_80)
    assert 'cuda_1: "*f32"' in source
    assert 'exp_f32_1: "*f32"' in source
    assert "def lambda_1(" in source


# ---------------------------------------------------------------- refusals


def refusal(text: str, target: str = "cuda:sm_80") -> str:
    with pytest.raises(TileError) as found:
        generate(parse_module(text), cuda_target(target))
    return str(found.value)


def test_a_tile_that_overflows_shared_memory_is_refused_with_smaller_tiles() -> None:
    text = cases["attention"](64, 64, 128)
    message = refusal(text, "cuda:sm_75")
    assert "needs 82688 bytes of shared memory; cuda:sm_75 has 65536 for a block" in message
    assert "choose smaller tiles in the schedule: tile mt by 32, nt by 32" in message
    assert '"shared_bytes": 82688' in generate(parse_module(text), SM_80)


def test_a_tile_that_overflows_registers_is_refused_with_its_name() -> None:
    message = refusal(cases["matmul_gelu"](256, 512, 16))
    assert (
        "`acc` of `matmul` is a tile of 256 x 512: 512 values for each of 256 threads; the limit is 128"
        in message
    )
    assert "tile mt by 128, nt by 256, kt by 8" in message


def test_a_whole_axis_of_unknown_extent_is_refused() -> None:
    text = cases["module"]("w", "x: f32[N]", "a: f32[n] = load x[n]", "N", "whole n = N")
    assert "axis `n` is whole, but its extent is not known at compile time" in refusal(text)


def test_two_grids_in_one_program_are_refused() -> None:
    loop = "for i in N by 64 parallel { store y[i] = 1.0 }"
    assert "has 2 parallel loops in a row" in refusal(
        cases["module"]("w", "y: out f32[N]", f"{loop}\n{loop}", "N")
    )
    stray = "store y[0] = 1.0\n"
    assert "stores outside its parallel loop" in refusal(
        cases["module"]("w", "y: out f32[N]", stray + loop, "N")
    )


def test_an_axis_of_two_sizes_is_refused() -> None:
    body = "for i in N by 64 parallel { store y[i] = 1.0\n for k in N by 8 { }\n for k in N by 16 { } }"
    assert "visits `k` by 8 and by 16" in refusal(cases["module"]("w", "y: out f32[N]", body, "N"))


def test_adding_bf16_from_several_threads_needs_sm_90() -> None:
    text = cases["module"](
        "w", "at: i32[M], y: inout bf16[N]", "for i in M by 64 parallel { store y[load at[i]] += 1.0 }", "M, N"
    )  # fmt: skip
    assert "cuda:sm_80 cannot add to bf16 from several threads at once" in refusal(text)
    generate(parse_module(text), cuda_target("cuda:sm_90a"))


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(TileError, match="no target is called `cuda:sm_42`"):
        cuda_target("cuda:sm_42")
    with pytest.raises(TileError, match="`cpu` is not a CUDA target"):
        cuda_target("cpu")


# ---------------------------------------------------------------- distributions


def holders(spreads: tuple[Spread, ...], threads: int) -> dict[tuple[int, ...], set[int]]:
    """Which threads hold each element of a two-axis tile."""
    held: dict[tuple[int, ...], set[int]] = {}
    for t in range(threads):
        places = [[((t & s.mask) >> s.low) + i * s.step for i in range(s.count)] for s in spreads]
        for i in places[0]:
            for j in places[1]:
                held.setdefault((i, j), set()).add(t)
    return held


@pytest.mark.parametrize(("m", "n"), [(64, 64), (16, 16), (128, 128), (63, 40), (3, 256), (1, 7)])
def test_every_element_has_a_holder_and_copies_are_spare_bits(m: int, n: int) -> None:
    d = deal([Demand("dot", ("i", "j"))], {"i": m, "j": n})
    layout = d.layout(("i", "j"))
    held = holders(layout.spreads, d.threads)
    assert {(i, j) for i in range(m) for j in range(n)} <= held.keys()
    spare = (d.threads - 1) & ~layout.mask
    assert {len(h) for h in held.values()} == {1 << spare.bit_count()}


def test_sides_make_row_vectors_agree_with_their_tiles() -> None:
    tiles = {"mt": 64, "nt": 64, "d": 64, "e": 64}
    d = deal([Demand("map", ("mt", "d")), Demand("dot", ("mt", "nt")), Demand("dot", ("mt", "e"))], tiles)
    assert d.rows == {"mt"}
    assert d.layout(("mt",)).serves(d.layout(("mt", "nt")))
    assert d.layout(("e",)).serves(d.layout(("mt", "e")))
    assert not d.layout(("nt",)).serves(d.layout(("nt", "d")))  # two column axes: nt goes to rows there
    assert d.layout(("mt", "nt")).elements == 32


COLUMNS = """module g { tile g(x: f32[N, M], s: out f32[M], t: out f32[M]) {
    extents M, N
    for m in M by 64 parallel {
        for n in N by 128 carry (a: f32[m] = fill(0.0), b: f32[m] = fill(-inf)) {
            xt: f32[n, m] = load x[n, m]
            yield a + sum[n](xt), max(b, max[n](xt))
        }
        store s[m] = a
        store t[m] = b
    }
} }"""


@pytest.mark.parametrize("preferred", [True, False])
def test_columns_that_eight_warps_reduce(preferred: bool) -> None:
    """A warp's lanes have columns of their own, so none may fold another's parts."""
    x = np.random.default_rng(1).integers(-99, 99, (136, 72)).astype(np.float32)
    module = parse_module(COLUMNS)
    got = emulate.run_module(module, generate(module, SM_80), {"x": x}, {}, preferred=preferred)
    np.testing.assert_array_equal(got["s"], x.sum(0))
    np.testing.assert_array_equal(got["t"], x.max(0))
