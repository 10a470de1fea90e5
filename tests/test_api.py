"""The Python interface: calls, dtype parameters, one compilation for many sizes, refusals, stages, benchmark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileloom as tl
from tileloom.bench import Case, Variant, WrongResult, run_case, variants
from tileloom.compiler.schedule import print_schedule
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_80, CudaTarget
from tileloom.dsl.types import DType
from tileloom.inputs import made
from tileloom.numpy_program import NumpyProgram

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

SCALED = """
kernel scaled<T: f32 | f64>(x: T[N], y: T[N], a: f32) -> (total: T[N], twice: T[N]) {
    require N > 0
    example N = 5, a = 2
    total[i] = a * x[i] + y[i]
    twice[i] = 2 * x[i]
}
"""
COUNT = "kernel count(c: inout i32[K], label: i32[N]) {\n    c[label[i]] += 1\n}\n"
CHOSEN = "kernel chosen(table: f32[R], at: i32[N]) -> y: f32[N] {\n    y[i] = table[at[i]]\n}\n"


def kernel(text: str, **options: Any) -> tl.CompiledKernel:
    program = tl.parse(text)
    (name,) = (k for k in program.kernels)
    return tl.compile(program[name], **options)


@pytest.fixture(scope="module")
def scaled() -> tl.CompiledKernel:
    return kernel(SCALED)


def vectors(n: int = 5, dtype: Any = np.float32) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.arange(n, dtype=dtype), np.ones(n, dtype)


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_outputs_come_in_declared_order(target: str) -> None:
    x, y = vectors()
    total, twice = kernel(SCALED, target=target)(x, y, a=3)
    np.testing.assert_array_equal(total, 3 * x + y)
    np.testing.assert_array_equal(twice, 2 * x)


def test_arguments_go_by_place_or_name(scaled: tl.CompiledKernel) -> None:
    x, y = vectors()
    for result in (scaled(x, y, 3), scaled(a=3, y=y, x=x), scaled(x, a=3, y=y)):
        np.testing.assert_array_equal(result[0], 3 * x + y)


def test_any_strides(scaled: tl.CompiledKernel) -> None:
    x, y = vectors(10)
    np.testing.assert_array_equal(scaled(x[::-2], y[::2], 3)[0], 3 * x[::-2] + y[::2])


def test_the_sign_of_zero_is_a_number_of_its_own(scaled: tl.CompiledKernel) -> None:
    x, y = np.ones(5, np.float32), np.full(5, -0.0, np.float32)
    for a in (0.0, 0.0, -0.0, -0.0, 0.0, np.float32(0), np.float32(-0.0)):
        assert (np.signbit(scaled(x, y, a)[0]) == np.signbit(a)).all(), a


@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_out_takes_the_results(target: str) -> None:
    x, y = vectors()
    outs = np.zeros_like(x), np.zeros_like(x)
    returned = kernel(SCALED, target=target)(x, y, a=3, out=outs)
    assert all(a is b for a, b in zip(returned, outs, strict=True))
    np.testing.assert_array_equal(outs[1], 2 * x)


@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_inout_is_updated_in_place(target: str) -> None:
    c = np.zeros(4, np.int32)
    assert kernel(COUNT, target=target)(c, np.array([1, 3, 3], np.int32)) is None
    np.testing.assert_array_equal(c, [0, 1, 0, 2])


def test_dtype_parameters_follow_the_arrays(scaled: tl.CompiledKernel) -> None:
    assert scaled(*vectors(), a=3)[0].dtype == np.float32
    assert scaled(*vectors(dtype=np.float64), a=3)[0].dtype == np.float64


def test_one_compilation_serves_many_sizes() -> None:
    k = kernel(SCALED)
    for n in (1, 5, 1000):
        x, y = vectors(n)
        np.testing.assert_array_equal(k(x, y, 2)[0], 2 * x + y)
    assert (
        len({id(v) for several in k._variants._made.values() for _, v in several}) == 1
    )  # one code for all classes


def test_compile_time_extents_make_variants() -> None:
    k = tl.compile(tl.load(EXAMPLES / "plain_attention.tile")["plain_attention"])
    sizes = [(1, 2, 4, 8), (1, 2, 7, 8), (1, 2, 4, 16)]
    made_ = [k.compilation(B=b, H=h, M=m, N=m, D=d, E=d) for b, h, m, d in sizes]
    assert made_[0] is made_[1]
    assert made_[0] is not made_[2]
    assert [c.statics for c in made_[1:]] == [{"D": 8, "E": 8}, {"D": 16, "E": 16}]


def test_the_first_sizes_do_not_decide_for_all() -> None:
    """Few queries keep keys along the lanes, many do not: after a call with few, one with many has its own code and bits."""
    kernel_ = tl.load(EXAMPLES / "plain_attention.tile")["plain_attention"]
    rng = np.random.default_rng(5)
    few, many = (rng.standard_normal((3, 1, 2, n, 16)).astype(np.float32) for n in (2, 64))
    alone, after = (tl.compile(kernel_) for _ in range(2))
    want = alone(*many, scale=0.25)
    after(*few, scale=0.25)
    np.testing.assert_array_equal(after(*many, scale=0.25), want)
    assert len({id(v) for several in after._variants._made.values() for _, v in several}) == 2


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda k: k(*vectors()), TypeError, "argument `a` is missing; it takes x, y, a"),
        (lambda k: k(*vectors(), 1, 2), TypeError, "takes 3 arguments (x, y, a), 4 are given"),
        (lambda k: k(*vectors(), 1, x=1), TypeError, "`x` is given twice"),
        (lambda k: k(*vectors(), 1, z=1), TypeError, "no parameter `z`"),
        (lambda k: k([1, 2], vectors()[0], 1), TypeError, "`x` is a list; an array is what it takes"),
        (lambda k: k(*vectors(), "1"), TypeError, "`a` is a str; a number is needed"),
        (
            lambda k: k(vectors()[0], vectors(dtype=np.float64)[1], 1),
            TypeError,
            "`x` holds f32 and `y` holds f64, but both are T; convert one of them",
        ),
        (lambda k: k(*vectors(dtype=np.float16), 1), TypeError, "`x` holds f16; T can be f32, f64"),
        (lambda k: k(*vectors(dtype=np.complex64), 1), TypeError, "`x` holds complex64"),
        (lambda k: k(vectors(5)[0], vectors(4)[1], 1), ValueError, "`y`"),
        (lambda k: k(np.ones((2, 2), np.float32), vectors()[1], 1), ValueError, "`x` has 2 axes"),
        (lambda k: k(*vectors(0), 1), ValueError, "requires N > 0 (N = 0)"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "interp"])
def test_refusals_name_argument_and_value(target: str, call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        call(kernel(SCALED, target=target))


def test_refusal_writes_nothing() -> None:
    out = np.full(5, 7.0, np.float32), np.full(4, 7.0, np.float32)
    with pytest.raises(ValueError, match="twice"):
        kernel(SCALED, target="interp")(*vectors(), a=1, out=out)
    assert (out[0] == 7).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": "tpu"}, "no target is called 'tpu'"),
        ({"fuse": "some"}, "it is 'auto', 'all' or 'none'"),
        ({"options": ("fast",)}, "no option is called 'fast'; there is quantise_with_running_scale"),
        ({"check_indices": True, "target": "cpu"}, "only the target 'interp' checks indices"),
        (
            {"schedule": "schedule s for other on cpu { fuse all }"},
            "for the kernel `other`, not for `scaled`",
        ),
        ({"schedule": "schedule s for scaled on cpu { fuse all }", "fuse": "none"}, "says `fuse all`"),
        (
            {"schedule": "schedule s for scaled on cuda:sm_80 { fuse all }", "target": "cpu"},
            "is for cuda:sm_80",
        ),
    ],
)
def test_options_that_do_not_go(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        kernel(SCALED, **options)


def test_compile_takes_kernels_only() -> None:
    with pytest.raises(TypeError, match=r'program\["name"\], not a Program'):
        tl.compile(tl.parse(SCALED))  # type: ignore[arg-type]


def test_indices_are_clamped_or_checked() -> None:
    table, at = np.array([1.0, 2.0], np.float32), np.array([0, 5], np.int32)
    np.testing.assert_array_equal(kernel(CHOSEN)(table, at), [1, 2])
    with pytest.raises(ValueError, match="`table`"):
        kernel(CHOSEN, check_indices=True)(table, at)


# ---------------------------------------------------------------- looking


def test_stages_before_and_after_a_call(scaled: tl.CompiledKernel) -> None:
    assert set(scaled.stages) >= {"tensor", "canonicalize", "fuse", "schedule", "tile", "source"}
    assert scaled.stages["tensor"].startswith("kernel scaled(")


def test_stages_need_sizes_from_somewhere() -> None:
    with pytest.raises(ValueError, match="extent `R` is missing"):
        _ = kernel(CHOSEN).stages


def test_stages_for_a_gpu_target_and_no_call() -> None:
    assert "cuda" in kernel(SCALED, target="cuda:sm_80").stages["source"]


def emulate(patch: pytest.MonkeyPatch, found: CudaTarget | None) -> None:
    """A device of this architecture whose threads run under CPython, or none."""
    from tileloom.runtime.emulate import run_module

    patch.setattr("tileloom.runtime.machine_code.toolkit_installed", lambda: True)
    patch.setattr("tileloom.runtime.driver.present", lambda number=0: found)
    patch.setattr(
        "tileloom.runtime.device_copies.run_module",
        lambda module, source, tensors, scalars: run_module(module, source.text, tensors, scalars),
    )


def test_gpu_code_runs_where_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, SM_80)
    x, y = vectors()
    k = kernel(SCALED, target="cuda")
    assert k.machine is SM_80
    out = np.zeros(5, np.float32), np.zeros(5, np.float32)
    assert k(x, y, a=3, out=out)[0] is out[0]
    np.testing.assert_array_equal(out[0], 3 * x + y)
    with pytest.raises(ValueError, match=re.escape("requires N > 0")):
        k(*vectors(0), a=3)


def test_gpu_code_is_kept_in_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path))
    emulate(monkeypatch, SM_80)
    x, y = vectors()
    first = kernel(SCALED, target="cuda:sm_80")(x, y, a=3)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("tileloom.compiler.pipeline.compile_kernel", refuse)
    for found, want in zip(kernel(SCALED, target="cuda:sm_80")(x, y, a=3), first, strict=True):
        np.testing.assert_array_equal(found, want)
    for other in (kernel(SCALED, target="cuda:sm_80", precise=True), kernel(SCALED, target="cuda:sm_90a")):
        with pytest.raises(AssertionError, match="compiled again"):
            other(x, y, a=3)


def test_gpu_code_is_not_run_where_no_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, None)
    with pytest.raises(ValueError, match="there is no CUDA device here, so code for cuda:sm_80 can be"):
        kernel(SCALED, target="cuda:sm_80")(*vectors(), a=1)
    with pytest.raises(ValueError, match="target 'cuda': there is no CUDA device here; name the target"):
        kernel(SCALED, target="cuda")
    monkeypatch.setattr("tileloom.runtime.driver.present", lambda number=0: SM_80)
    monkeypatch.setattr("tileloom.runtime.machine_code.toolkit_installed", lambda: False)
    with pytest.raises(ValueError, match=r"target 'cuda': the extra `cuda` is not installed: pip install"):
        kernel(SCALED, target="cuda")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("cuda:sm_90", "cuda:sm_90a"), ("cuda:sm_100", "cuda:sm_100a"), ("sm_80", "cuda:sm_80"), ("CPU", "cpu")],
)
def test_target_by_almost_its_name(wrong: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'{wrong}' (did you mean `{meant}`?); targets are")):
        kernel(SCALED, target=wrong)


def test_schedule_prints_parses_and_compiles_to_the_same() -> None:
    scaled = kernel(SCALED)
    text = print_schedule(scaled.schedule)
    assert parse_schedule(text) == scaled.schedule
    again = kernel(SCALED, schedule=text)
    assert again.stages["tile"] == scaled.stages["tile"]


@pytest.mark.parametrize(
    ("text", "line", "column", "says"),
    [
        ("schedule s for k on gpu {\n}", 1, 21, "no target is called `gpu`"),
        ("schedule s for k on cpu {\n    fuse 3\n}", 2, 10, "expected what to fuse, found `3`"),
        ("schedule s for k on cpu {\n    tile m by 0\n}", 2, 15, "a tile of 0 elements"),
        ("schedule s for k on cpu {\n    tile m by 8, m by 9\n}", 2, 18, "`m` has two tile sizes"),
        ("schedule s for k on cpu {\n    keep s\n    keep p\n}", 3, 5, "`keep` stands twice"),
        ("schedule s for k on cpu {\n    colour red\n}", 2, 5, "has no line `colour`"),
        ("schedule s for k on cpu {\n    fuse all\n", 3, 1, "to close the schedule"),
        ("schedule s for k on cpu {\n} }", 2, 3, "expected the end of the text"),
    ],
)
def test_schedule_errors_have_places(text: str, line: int, column: int, says: str) -> None:
    with pytest.raises(tl.TileError) as refused:
        parse_schedule(text)
    (found,) = refused.value.diagnostics
    assert says in found.message
    assert found.span is not None
    assert (found.span.line, found.span.column) == (line, column)


def test_explain_by_sizes_and_by_arrays(scaled: tl.CompiledKernel) -> None:
    assert scaled.explain(N=77).facts.sizes == {"N": 77}
    x, y = vectors(9)
    assert scaled.explain(x, y, a=1).facts.sizes == {"N": 9}
    assert "scaled" in str(scaled.explain(N=77, T="f64"))
    with pytest.raises(ValueError, match="no extent `Q`"):
        scaled.explain(Q=1)


# ---------------------------------------------------------------- measuring


def test_benchmark_measures_and_prints(scaled: tl.CompiledKernel) -> None:
    found = scaled.benchmark(*vectors(100), a=2, against=("naive", "numpy"))
    assert [m.row.variant for m in found.rows] == ["compiled", "naive", "numpy"]
    assert "median ms" in str(found)
    assert found.as_json()["rows"][0]["sizes"] == {"N": 100}


def test_benchmark_against_functions_of_one_name_and_words_twice(
    scaled: tl.CompiledKernel, tmp_path: Path
) -> None:
    for folder, wait in (("a", 0), ("b", 0.005)):
        (tmp_path / folder).mkdir()
        text = f"import time\ndef f(x, y, a):\n    time.sleep({wait})\n    return a * x + y, 2 * x\n"
        (tmp_path / folder / "f.py").write_text(text)
    quick, slow = (f"{tmp_path / folder / 'f.py'}:f" for folder in "ab")
    rows = [m.row for m in scaled.benchmark(*vectors(100), a=2, against=(quick, "numpy", slow, "numpy")).rows]
    assert [r.variant for r in rows] == ["compiled", quick, "numpy", slow]
    assert rows[1].median_ms < 5 <= min(rows[3].samples_ms)
    (row,) = (m.row for m in scaled.benchmark(*vectors(100), a=2, against=(quick,)).rows[1:])
    assert row.variant == "f"


@pytest.mark.parametrize("body", ["None", "(x, y, x)", "(x[None], y)", "('a', 'b')", "(x + 1, 2 * x)"])
def test_benchmark_against_what_is_wrong(scaled: tl.CompiledKernel, tmp_path: Path, body: str) -> None:
    (tmp_path / "f.py").write_text(f"def wrong(x, y, a):\n    return {body}\n")
    with pytest.raises(WrongResult, match="N = 100: wrong errs by"):
        scaled.benchmark(*vectors(100), a=2, against=(f"{tmp_path / 'f.py'}:wrong",))


def test_benchmark_of_a_tile_program() -> None:
    kernel = tl.compile(tl.load(EXAMPLES / "tiles" / "softmax.tile")["softmax_tiles"])
    x = np.linspace(-3, 3, 30, dtype=np.float32).reshape(3, 10)
    (found,) = kernel.benchmark(x).rows
    assert found.row.variant == "compiled"
    assert 0 < found.row.error < 1e-6
    with pytest.raises(ValueError, match=r"softmax_tiles is a tile program, .* no numpy version"):
        kernel.benchmark(x, against=["numpy"])


def case(text: str, **sizes: int) -> tuple[tl.CompiledKernel, Case]:
    k = kernel(text)
    graph = k.graph({"T": DType.F32})
    numbers = {"a": 2.0}
    return k, Case(k.kernel, graph, {"T": DType.F32}, sizes, numbers, made(graph, sizes, numbers))


def test_wrong_results_are_not_timed() -> None:
    k, c = case(SCALED, N=50)
    wrong = Variant("wrong", lambda x, y, a: (a * x, 2 * x))
    with pytest.raises(WrongResult, match="wrong errs by"):
        run_case(c, [*variants(k, k.naive, c, ()), wrong])


def test_large_cases_are_checked_smaller_and_against_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileloom.bench.ORACLE_ELEMENTS", 30)
    k, c = case(SCALED, N=100)
    found = run_case(c, variants(k, k.naive, c, ("numpy",)))
    assert [m.checked_at for m in found] == [{"N": 25}] * 2
    wrong = Variant("wrong", lambda x, y, a: (a * x + y + (len(x) > 50), 2 * x))
    with pytest.raises(WrongResult, match="N = 100: wrong errs"):
        run_case(c, [*variants(k, k.naive, c, ()), wrong])


NUMPY_CASES = [
    "kernel k(x: f32[M, N]) -> y: f32[M] {\n y[m] = sum[n | n <= m](x[m, n])\n}",
    "kernel k(x: f32[M, N]) -> y: i64[M] {\n y[m] = argmax[n | n < m](x[m, n])\n}",
    "kernel k(x: f32[M, N], z: f32[N, M]) -> y: f32[M, M] {\n y[m, l] = sum[n | n <= m](x[m, n] * z[n, l])\n}",
    "kernel k(x: f32[M, N], z: f32[N]) -> y: f32[N, M] {\n y[n, m] = x[m, n] * z[n] + N\n}",
    "kernel k(x: f32[M, N], at: i32[M]) -> y: f32[M, N] {\n y[m, n] = x[at[m], n]\n}",
    "kernel k(x: f32[M, N], at: i32[M]) -> y: f32[M] {\n y[m] = x[m, at[m] % N]\n}",
    "kernel k(x: f32[M, N], c: inout f32[M]) {\n c[m // 2] += x[m, 1] + m\n}",
    "kernel k(x: f16[M, N]) -> y: f16[M, N] {\n y[m, n] = softmax[n | n <= m](x[m, n])\n}",
    "kernel k(x: f32[M, N]) -> y: f32[M] {\n y[m] = max[n | n < m - 3](x[m, n])\n}",
    "kernel k(x: f32[M, N]) -> y: f32 {\n y = sum[m, n](x[m, n])\n}",
]


@pytest.mark.parametrize("text", NUMPY_CASES)
def test_numpy_program_means_what_the_interpreter_means(text: str) -> None:
    k = kernel(text, target="interp")
    graph = k.graph({})
    sizes = {e: {"M": 6, "N": 4}[e] for e in graph.extents}
    tensors = made(graph, sizes, {})
    given = {n: x.copy() for n, x in tensors.items()}
    results = NumpyProgram(graph)(tensors, {})
    expected = k(**given)
    if expected is None:
        (expected,) = (given[n] for n, t in graph.tensors.items() if t.inout)
    (found,) = results.values()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=1e-3, atol=1e-5)


def test_made_inputs_suit_what_they_index() -> None:
    graph = kernel(CHOSEN).graph({})
    at = made(graph, {"R": 3, "N": 1000}, {})["at"]
    assert at.dtype == np.int32
    assert set(at) == {0, 1, 2}
    mask = kernel("kernel k(m: bool[N], h: bf16[N]) -> y: i64 {\n y = sum[i](m[i])\n}")
    found = made(mask.graph({}), {"N": 1000}, {})
    assert 800 < found["m"].sum() < 1000
    assert found["h"].dtype == ml_dtypes.bfloat16
