"""What a first call makes Numba and LLVM do: functions compiled, passes run, length of the text that LLVM is given."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import codegen, event

import tileloom as tl
from tileloom.runtime import kernels, stored_code
from tileloom.runtime.generated import PASSES, types_asked_once

ATTENTION = """kernel attention(q: f32[B, H, M, D], k: f32[B, H, N, D], v: f32[B, H, N, E], scale: f32)
    -> o: f32[B, H, M, E] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
    p[b, h, m, n] = softmax[n | n <= m + N - M](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h, n, e])
}"""
PRODUCT = "kernel product(a: f32[M, K], b: f32[K, N]) -> c: f32[M, N] { c[m, n] = sum[k](a[m, k] * b[k, n]) }"
ARGUMENTS = {
    "attention": (*[np.ones((1, 2, 24, 8), np.float32)] * 3, 0.5),
    "product": (np.ones((24, 8), np.float32), np.ones((8, 24), np.float32)),
}
TEXTS = {"attention": ATTENTION, "product": PRODUCT}
MOST_LINES = {"attention": 8_300, "product": 1_700}
"""Of the tasks' own text for LLVM, without what multiplies and copies: 7,560 and 1,400, but with Numba's subscripts 9,220
and 1,750 (of `attention` in benchmarks/cpu_cases.py and of a product)."""


class Log(event.Listener):  # type: ignore[misc]
    """What Numba says that it begins."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def on_start(self, event: Any) -> None:
        self.data.append(event.data)

    def on_end(self, event: Any) -> None:
        pass


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Modules that LLVM is given, as text."""
    found: list[Any] = []
    add = codegen.CPUCodeLibrary.add_ir_module

    def noted(library: Any, module: Any) -> Any:
        found.append(str(module))
        return add(library, module)

    monkeypatch.setattr(codegen.CPUCodeLibrary, "add_ir_module", noted)
    return found


def first_call(name: str) -> None:
    tl.compile(tl.parse(f"# {time.monotonic_ns()}\n" + TEXTS[name])[name])(*ARGUMENTS[name])


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process has compiled."""
    monkeypatch.setattr(kernels, "_modules", {})


@pytest.mark.usefixtures("empty_cache", "no_modules")
@pytest.mark.parametrize("name", TEXTS)
def test_a_first_call_compiles_one_function_in_few_passes(name: str, modules: list[str]) -> None:
    compiled, passes = Log(), Log()
    with event.install_listener("numba:compile", compiled), event.install_listener("numba:run_pass", passes):
        first_call(name)
    assert [d["dispatcher"].py_func.__name__ for d in compiled.data] == [f"{name}_tasks"]
    assert len(passes.data) == len(PASSES)
    task, wrapper = modules[-2:]
    assert "PyArg_UnpackTuple" in wrapper
    own = re.search(rf"^define [^\n]*{name}_tasks.*?^}}", task, re.M | re.S)
    assert own is not None
    assert 1_000 < len(own[0].splitlines()) < MOST_LINES[name]


@pytest.mark.usefixtures("empty_cache", "no_modules")
def test_what_is_left_of_a_product_s_steps_is_not_written_out(modules: list[str]) -> None:
    first_call("product")
    (module,) = (m for m in modules if "multiply" in m)
    marks = [
        line for line in module.splitlines() if line.lstrip().startswith("br label") and "!llvm.loop" in line
    ]
    assert len(marks) == len({line.split("!llvm.loop")[1] for line in marks}) >= 4
    assert module.count('!"llvm.loop.unroll.disable"') == 1


EDITED = """from numba import njit


@njit(nogil=True, error_model="numpy")
def doubled(x, y):
    def twice(v):
        return 2 * v
    if x.shape[0] != y.shape[0]:
        raise ValueError("lengths differ")
    for i in range(x.shape[0]):
        y[i] = twice(x[i])
"""


def test_edited_text_may_use_all_that_numba_knows() -> None:
    doubled = kernels.build(EDITED, edited=True)["doubled"]
    x, y = np.arange(3.0), np.empty(3)
    doubled(x, y)
    assert y.tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="lengths differ"):
        doubled(x, np.empty(4))


def test_types_are_asked_again_after_a_text_compiled_for_another() -> None:
    class Context:
        def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
            return object()

    context = Context()

    def ask() -> Any:
        return context.resolve_function_type("add", (1, 2), {})

    with types_asked_once(context):
        first = ask()
        with types_asked_once(context):
            assert ask() is first
        assert ask() is first
    assert "resolve_function_type" not in vars(context)
    assert ask() is not first


@pytest.mark.usefixtures("empty_cache")
def test_what_the_cache_folder_holds_is_neither_run_as_text_nor_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_modules", {})  # what another test compiled does not lie in this folder
    kernel = tl.compile(tl.parse(f"# {time.monotonic_ns()}\n" + PRODUCT)["product"])
    expected = kernel(*ARGUMENTS["product"])
    source = kernel.compilation(*ARGUMENTS["product"]).source
    monkeypatch.setattr(kernels, "_modules", {})
    again = kernels.build(source)
    task = again["product_tasks"]
    assert "multiply_packing" not in task._text.module.__dict__  # type: ignore[attr-defined]
    a, b = ARGUMENTS["product"]
    compiled, c = Log(), np.zeros_like(expected)
    with event.install_listener("numba:compile", compiled):
        kernels.version(again["product"], [a, b, c, 24, 8, 24])(a, b, c, 24, 8, 24)
    assert not compiled.data
    assert "dispatchers" not in vars(task._text)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(c, expected)
    frame = again["product"].__code__.co_firstlineno
    assert source.splitlines()[frame - 1].startswith("def product(")


def test_a_function_that_needs_a_symbol_of_elsewhere_is_not_linked() -> None:
    assert stored_code._found(("numba_unpickle", "PyErr_Occurred", "NRT_MemInfo_alloc_aligned", "memcpy"))
    assert not stored_code._found(("PyErr_Occurred", "tileloom_has_no_such_symbol"))
