"""Examples: each compiles for every target, and those of `ORACLES` give what a NumPy program by hand gives in float64."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileloom as tl
from tileloom.cli.problems import alternatives, settled
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.target import SM_90A
from tileloom.dsl.types import DType
from tileloom.inputs import made

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILES = sorted(EXAMPLES.glob("*.tile"))
Values = dict[str, NDArray[np.float64]]
Oracle = Callable[[Values, dict[str, float]], tuple[NDArray[np.float64], ...]]


def attend(q: Any, k: Any, v: Any, scale: float, seen: Any) -> tuple[Any, Any]:
    scores = np.where(seen, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    safe = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - safe)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total == 0, 1, total), (safe + np.log(total))[..., 0]


def causal(x: Values, s: dict[str, float]) -> tuple[Any, ...]:
    shared = x["q"].shape[1] // x["k"].shape[1]
    k, v = (x[n].repeat(shared, axis=1) for n in "kv")
    m, n = x["q"].shape[2], k.shape[2]
    return attend(x["q"], k, v, s["scale"], np.arange(n) <= np.arange(m)[:, None] + n - m)


def gelu_of_product(x: Values, s: dict[str, float]) -> tuple[Any, ...]:
    y = x["a"] @ x["b"] + x["bias"]
    return (0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))),)


def normalised(x: Values, s: dict[str, float]) -> tuple[Any, ...]:
    centred = x["x"] - x["x"].mean(axis=-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + s["eps"]) * x["weight"] + x["bias"],
    )


ORACLES: dict[str, tuple[Oracle, dict[str, int]]] = {
    "vector_add": (lambda x, s: (x["x"] + x["y"],), {"N": 1001}),
    "matmul_gelu": (gelu_of_product, {"M": 67, "N": 131, "K": 33}),
    "row_softmax": (
        lambda x, s: (np.exp(x["x"]) / np.exp(x["x"]).sum(axis=-1, keepdims=True),),
        {"M": 7, "N": 1100},
    ),
    "row_layernorm": (normalised, {"M": 7, "N": 1100}),
    "plain_attention": (
        lambda x, s: attend(x["q"], x["k"], x["v"], s["scale"], True)[:1],
        {"B": 2, "H": 2, "M": 70, "N": 140, "D": 16, "E": 24},
    ),
    "attention": (causal, {"B": 2, "H": 4, "G": 2, "M": 140, "N": 70, "D": 16, "E": 24}),
    "padded_attention": (
        lambda x, s: attend(x["q"], x["k"], x["v"], s["scale"], x["keep"][:, None, None, :] != 0)[:1],
        {"B": 2, "H": 2, "M": 20, "N": 30, "D": 8, "E": 8},
    ),
}
KERNELS = {name: path for path in FILES if path.stem != "minilm" for name in tl.load(path).kernels}
"""Those of minilm.tile have a test of their own, in place in the whole model."""


def problem(name: str, kernel: tl.CompiledKernel) -> tuple[dict[str, Any], dict[str, float], tuple[Any, ...]]:
    """Inputs, scalars and the expected outputs."""
    oracle, sizes = ORACLES[name]
    graph = kernel.graph({"T": DType.F32})
    scalars = {s: float(graph.example[s]) for s in graph.scalars}
    tensors = made(graph, sizes, scalars, seed=3)
    return tensors, scalars, oracle({n: x.astype(np.float64) for n, x in tensors.items()}, scalars)


@pytest.mark.parametrize("fuse", ["auto", "none"])
@pytest.mark.parametrize("name", ORACLES)
def test_example_equals_numpy_by_hand(name: str, fuse: Any) -> None:
    kernel = tl.compile(tl.load(KERNELS[name])[name], fuse=fuse)
    tensors, scalars, expected = problem(name, kernel)
    results = kernel(**tensors, **scalars)
    for result, wanted in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        assert result.dtype == np.float32
        np.testing.assert_allclose(
            result, wanted, rtol=1e-5, atol=2e-5 * (1 + np.abs(wanted[np.isfinite(wanted)]).max())
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ORACLES)
def test_example_on_the_gpu_equals_numpy_by_hand(name: str) -> None:
    kernel = tl.compile(tl.load(KERNELS[name])[name], target="cuda")
    tensors, scalars, expected = problem(name, kernel)
    results = kernel(**tensors, **scalars)
    for result, wanted in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ORACLES)
def test_interpreter_equals_numpy_by_hand(name: str) -> None:
    kernel = tl.compile(tl.load(KERNELS[name])[name], target="interp")
    tensors, scalars, expected = problem(name, kernel)
    results = kernel(**tensors, **scalars)
    for result, wanted in zip(results if isinstance(results, tuple) else (results,), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_example_compiles_at_its_own_sizes(path: Path, target: str) -> None:
    program = tl.load(path)
    for name in program.kernels:
        stages = tl.compile(program[name], target=target).stages
        compile(stages["source"], str(path), "exec")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_example_compiles_for_hopper_in_16_bits(path: Path) -> None:
    """By default, at its own sizes; a program whose tier is `wgmma` moves its tiles by the copy engine."""
    program = tl.load(path)
    for name in program.kernels:
        floats = {
            n: DType.BF16 for n, types in alternatives(program[name].kernel).items() if DType.BF16 in types
        }
        if not floats:
            continue
        problem = settled(program[name], floats, {})
        compiled = compile_kernel(program[name], SM_90A, problem.extents, dtypes=problem.dtypes)
        compile(compiled.source, str(path), "exec")
        tiers = {p.tier for p in compiled.module.programs}
        assert ("# tier wgmma" in compiled.source) == ("wgmma" in tiers)
        assert ("load_box" in compiled.source) == ("wgmma" in tiers)


# ---------------------------------------------------------------- names mean nothing

NAMES = ["attention", "softmax", "logsumexp", "scale", "lse", *"bhmndeqkvspo", *"BHGMNDE"]


def renamed(text: str) -> str:
    """`attention.tile` and the functions it uses with every name replaced; order among names is kept."""
    prelude = (EXAMPLES.parent / "dsl" / "prelude.tile").read_text(encoding="utf-8")
    used = [
        re.search(rf"^fn {f}\[.*?^}}", prelude, re.MULTILINE | re.DOTALL) for f in ("softmax", "logsumexp")
    ]
    whole = "\n".join([*(found[0] for found in used if found), text])
    table = {name: f"x{i:02}" for i, name in enumerate(sorted(NAMES))}
    return re.sub(r"\b[A-Za-z]\w*\b", lambda m: table.get(m[0], m[0]), re.sub(r"#.*", "", whole))


def test_renaming_every_name_gives_equal_bits() -> None:
    text = (EXAMPLES / "attention.tile").read_text(encoding="utf-8")
    other = renamed(text)
    assert not re.search(r"attention|softmax|logsumexp|lse|scale", other)
    program = tl.parse(other)
    (name,) = program.kernels
    kernel, twin = tl.compile(tl.parse(text)["attention"]), tl.compile(program[name])
    tensors, scalars, _ = problem("attention", kernel)
    ours = kernel(*tensors.values(), *scalars.values())
    theirs = twin(*tensors.values(), *scalars.values())
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


# ---------------------------------------------------------------- programs


def test_story_tells_itself_to_the_end() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "attention_story.py")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for title in (
        "What you write",
        "What the compiler derived",
        "The program",
        "Is it right?",
        "Does it pay?",
    ):
        assert title in done.stdout
    assert "WRONG" not in done.stdout
