"""CUDA source assembled on a machine without a GPU: registers, spills, shared memory and instructions of real tile sizes."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tileloom.compiler.codegen.resources import resources
from tileloom.compiler.codegen.simt import generate
from tileloom.compiler.target import cuda_target
from tileloom.compiler.tile_text import parse_module

cases = runpy.run_path(str(Path(__file__).with_name("simt_cases.py")))
LADDER = dict(cases["ladder"]())
TARGETS = ["cuda:sm_80", "cuda:sm_90a"]
needs_toolkit = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)


@cache
def assembled(name: str, target: str) -> Any:
    return first_kernel(LADDER[name], target)


def first_kernel(text: str, target: str) -> Any:
    """The preferred kernel of a program, assembled."""
    from tileloom.runtime.machine_code import machine_code

    return machine_code(*preferred(text, target), cuda_target(target))


def preferred(text: str, target: str) -> tuple[str, str]:
    """The source of a program, and the name of its first kernel there."""
    from tileloom.runtime.machine_code import variants

    source = generate(parse_module(text), cuda_target(target))
    ((first, *_),) = variants(source).values()
    return source, first.name


@cache
def instructions(name: str, target: str) -> Counter[str]:
    """Opcodes of the machine code, without their modifiers."""
    return Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", assembled(name, target).sass, re.M)
    )


MOST_REGISTERS = {"add": 64, "matmul": 168, "softmax": 128, "layernorm": 128, "attention": 224}


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LADDER)
def test_no_spills_and_no_local_memory(name: str, target: str) -> None:
    kernel = assembled(name, target)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert 16 <= kernel.registers <= MOST_REGISTERS[name]
    found = instructions(name, target)
    assert found["STL"] == found["LDL"] == 0
    assert found["LDG"] > 0
    assert found["STG"] > 0
    assert kernel.seconds < 30  # of processor time: other work on the machine does not count


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LADDER)
def test_registers_estimated_from_tiles_are_near_those_assigned(name: str, target: str) -> None:
    """Within a factor of two: what tells occupancies of 1, 2 and 4 blocks apart, and spills from room to spare."""
    (program,) = parse_module(LADDER[name]).programs
    estimate, assigned = resources(program, cuda_target(target)), assembled(name, target)
    assert assigned.registers / 2 <= estimate.registers <= assigned.registers * 2
    assert estimate.threads == assigned.threads
    # the driver's own kilobyte is part of what the assembler reports
    assert 0 <= assigned.shared_bytes + assigned.dynamic_shared_bytes - estimate.shared_bytes <= 1024


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
def test_products_are_fused_multiply_adds_from_shared_memory(target: str) -> None:
    for name, multiplications in (("matmul", 32), ("attention", 64)):
        found = instructions(name, target)
        assert found["FFMA"] >= multiplications
        assert found["LDS"] >= 12
        assert found["STS" if name == "attention" else "LDGSTS"] > 0
        assert found["BAR"] >= 2
    assert 3 * 2 * 16 * 68 * 4 <= assembled("matmul", target).shared_bytes <= 28 * 1024
    assert assembled("attention", target).dynamic_shared_bytes == 3 * 64 * 65 * 4


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
def test_elementwise_code_is_not_contracted(target: str) -> None:
    """exp(s·c - r) near the largest floats needs both roundings."""
    found = instructions("add", target)
    assert found["FFMA"] == 0
    assert found["FADD"] >= 8
    body = "for i in N by 128 parallel { store y[i] = load x[i] * 3.0 - load x[i] }"
    text = cases["module"]("m", "x: f32[N], y: out f32[N]", body, "N")
    kernel = first_kernel(text, target)
    assert re.search(r"\bFMUL\b", kernel.sass)
    assert not re.search(r"\bFFMA\b", kernel.sass)


@needs_toolkit
def test_row_reductions_go_through_shuffles_alone() -> None:
    for name in ("softmax", "layernorm"):
        found = instructions(name, "cuda:sm_80")
        assert found["SHFL"] >= 10
        assert found["BAR"] == found["LDS"] == found["STS"] == 0


@needs_toolkit
@pytest.mark.parametrize("target", ["cuda:sm_75", "cuda:sm_86", "cuda:sm_89", "cuda:sm_100a", "cuda:sm_120"])
def test_every_target_assembles(target: str) -> None:
    from tileloom.runtime.cuda import ptx

    for name in ("add", "softmax"):
        kernel = assembled(name, target)
        assert kernel.registers > 0
        assert kernel.target.sm in ptx(*preferred(LADDER[name], target), cuda_target(target))


OTHERS = [c for c in cases["CASES"] if not c.name.startswith(("attention", "softmax", "layernorm", "add"))]


@needs_toolkit
@pytest.mark.parametrize("case", OTHERS, ids=lambda c: c.name)
def test_every_kind_of_program_assembles(case: Any) -> None:
    from tileloom.runtime.cuda import assemble

    target = cuda_target("cuda:sm_90a")
    for kernel in assemble(generate(parse_module(case.text), target), target).values():
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes + kernel.dynamic_shared_bytes <= target.shared_per_block_bytes


@needs_toolkit
def test_names_in_the_machine_code_are_the_programs() -> None:
    from tileloom.runtime.cuda import ptx

    target = cuda_target("cuda:sm_80")
    assert ".visible .entry attention(" in ptx(*preferred(LADDER["attention"], target.name), target)
    assert ".text.attention" in assembled("attention", "cuda:sm_80").sass


def test_without_the_extra_the_error_says_what_to_install() -> None:
    """Where numba-cuda cannot be found, importing the module fails with that sentence."""
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba_cuda' else real(name, *rest)\n"
        "import tileloom.runtime.cuda"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: CUDA kernels need numba-cuda and the CUDA toolkit" in done.stderr
    assert "pip install '.[cuda]'" in done.stderr


# ---------------------------------------------------------------- wide accesses and matrix units

PRODUCT = """module product {
    tile product(a: bf16[M, K], b: bf16[K, N], c: out bf16[M, N]) {
        extents M, K, N
        tier mma
        for m in M by 64, n in N by 64 parallel {
            for k in K by 64 carry (s: f32[m, n] = fill(0.0)) {
                yield s + dot[k](load a[m, k], load b[k, n])
            }
            store c[m, n] = bf16(s)
        }
    }
}"""
WIDE = re.compile(r"\b(?:LDG|STG)\.E(?:\.\w+)*\.128\b")


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["add", "softmax", "layernorm"])
def test_rows_move_sixteen_bytes_at_a_time(name: str, target: str) -> None:
    found = WIDE.findall(assembled(name, target).sass)
    assert any(x.startswith("LDG") for x in found)
    assert any(x.startswith("STG") for x in found)


@needs_toolkit
@pytest.mark.parametrize("target", TARGETS)
def test_a_product_runs_on_the_matrix_units(target: str) -> None:
    kernel = first_kernel(PRODUCT, target)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    sass = kernel.sass
    assert len(re.findall(r"\bHMMA\.16816\.F32\.BF16", sass)) == 4 * 2 * 4
    depths, slots = 4, 3  # of a step, and of its ring, all of which are asked for before the loop
    assert len(re.findall(r"\bLDSM\.16\.(?:MT88|M88)\.4", sass)) == (1 + depths) * (2 + 2)
    assert len(re.findall(r"\bLDGSTS\.E\.BYPASS(?:\.LTC128B)?\.128", sass)) == (slots + 1) * 8
    assert "LDL" not in sass
    reserved = 1024 if target == "cuda:sm_90a" else 0  # the driver's, which the assembler counts there
    assert kernel.shared_bytes - reserved == 3 * 2 * 64 * 64 * 2


@needs_toolkit
def test_types_are_asked_once_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from tileloom.runtime import cuda

    context = cuda.numba_target.typing_context
    kind, asked = type(context), Counter[Any]()
    resolve = kind.resolve_function_type

    def noted(self: Any, function: Any, args: Any, kws: Any) -> Any:
        found = resolve(self, function, args, kws)
        asked[function, tuple(args), tuple(kws.items())] += found is not None
        return found

    monkeypatch.setattr(kind, "resolve_function_type", noted)
    target = cuda_target("cuda:sm_80")
    source, name = preferred(LADDER["softmax"], target.name)
    cuda._lowered(cuda.load(source), name, target)
    assert set(asked.values()) <= {0, 1}
    assert len(asked) > 20
    assert "resolve_function_type" not in vars(context)


@needs_toolkit
def test_kernels_are_assembled_in_several_threads_at_once() -> None:
    from tileloom.runtime.cuda import assemble_one

    target = cuda_target("cuda:sm_80")
    texts = [preferred(LADDER[name], target.name) for name in ("add", "softmax", "layernorm")]
    with ThreadPoolExecutor(len(texts)) as threads:
        found = list(threads.map(lambda text: assemble_one(*text, target), texts))
    for text, kernel in zip(texts, found, strict=True):
        again = assemble_one(*text, target)
        assert (kernel.name, kernel.registers, code(kernel.sass)) == (
            again.name, again.registers, code(again.sass)
        )  # fmt: skip


def code(sass: str) -> list[str]:
    """Instructions without what names the source."""
    return [line for line in sass.splitlines() if line.lstrip().startswith("/*")]


@needs_toolkit
def test_subscripts_known_when_compiling_are_typed_each_time() -> None:
    """A slice stands in no table, and their keywords are an empty tuple."""
    from tileloom.runtime.generated import types_asked_once

    class Context:
        def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
            return object()

    context = Context()
    with types_asked_once(context):
        for index in (0, slice(1, 2)):
            found = [context.resolve_function_type("static_getitem", (1, index), ()) for _ in range(2)]
            assert found[0] is not found[1]
        assert len({context.resolve_function_type("add", (1, 2), {}) for _ in range(2)}) == 1
        assert len({context.resolve_function_type("add", (1, 2), {"a": 1}) for _ in range(2)}) == 1
