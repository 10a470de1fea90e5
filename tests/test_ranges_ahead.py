"""Ranges of tensors over tiles, found by a launch before the kernel: what they hold, which steps they leave out."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen import wgmma
from tileloom.compiler.codegen.warpgroup_form import prepared, steps_of
from tileloom.compiler.codegen.warpgroup_overlap import LAST_PRODUCTS
from tileloom.compiler.passes.ranges_ahead import ranges_ahead
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import print_schedule
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import For, statements
from tileloom.compiler.tile_text import parse_module, print_program
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
TEXT = """kernel documents<T: f16 | bf16>(
    q: T[H, M, D], k: T[H, N, D], v: T[H, N, D], of: i32[M], doc: i32[N], scale: f32
) -> o: T[H, M, D] {
    require scale > 0
    s[h, m, n] = scale * sum[d](q[h, m, d] * k[h, n, d])
    p[h, m, n] = softmax[n | SET](s[h, m, n])
    o[h, m, d] = sum[n](p[h, m, n] * v[h, n, d])
}
"""
SETS = {
    "same": ("of[m] == doc[n]", lambda m, n, of, doc: of[m] == doc[n]),
    "same and earlier": ("of[m] == doc[n] and n <= m", lambda m, n, of, doc: (of[m] == doc[n]) & (n <= m)),
    "up to a length": ("n < of[m]", lambda m, n, of, doc: n < of[m]),
}


def compiled(domain: str, sizes: dict[str, int], n: int = 16) -> Any:
    tiles = parse_schedule(
        f"schedule s for documents on cuda:sm_90a {{ tier wgmma\n tile m by 64, n by {n} }}"
    )
    text = TEXT.replace("SET", SETS[domain][0])
    return compile_kernel(tl.parse(text)["documents"], SM_90A, sizes, dtypes={"T": DType.F16}, schedule=tiles)


def exact(x: dict[str, Array], scale: float, domain: str) -> Array:
    """In float64; rows that see nothing give 0."""
    q, k, v = (x[n].astype(float) for n in "qkv")
    m, n = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    s = np.where(SETS[domain][1](m, n, x["of"], x["doc"]), scale * q @ k.swapaxes(1, 2), -np.inf)
    top = np.where(np.isinf(s.max(-1)), 0, s.max(-1))[..., None]
    p = np.exp(s - top)
    z = p.sum(-1, keepdims=True)
    return p @ v / np.where(z == 0, 1, z)


NUMBERS = {
    "in order": lambda n: np.arange(n) * 5 // n,
    "a tile of one, then of all": lambda n: np.where(np.arange(n) < 16, 3, np.arange(n) % 5),
    "none that a query has": lambda n: np.full(n, 9),
    "the ends of the range": lambda n: np.where(np.arange(n) % 2, np.iinfo(np.int32).max, np.iinfo(np.int32).min),
}  # fmt: skip


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("domain", ["same", "same and earlier"])
def test_documents(domain: str, numbers: str) -> None:
    """Ragged lengths, several tasks a block; queries of five documents, keys of other numbers."""
    sizes = {"H": 2, "M": 150, "N": 90, "D": 16}
    made = compiled(domain, sizes)
    assert [p.tier for p in made.module.programs] == ["loops", "loops", "loops", "wgmma"]
    rng = np.random.default_rng(5)
    inputs = {
        n: rng.standard_normal((2, sizes[a], 16)).astype(np.float16)
        for n, a in zip("qkv", "MNN", strict=True)
    }
    inputs |= {
        "of": (np.arange(150) * 5 // 150).astype(np.int32),
        "doc": NUMBERS[numbers](90).astype(np.int32),
    }
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=2)["o"]
    assert np.abs(got.astype(float) - exact(inputs, 0.3, domain)).max() < 2e-3


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("domain", ["same", "same and earlier"])
def test_documents_of_whole_tiles_overlap(domain: str, blocks: int) -> None:
    """Tasks that see nothing come first, between others, or last; what two documents share a tile with is masked."""
    sizes = {"H": 3, "M": 320, "N": 96, "D": 16}
    made = compiled(domain, sizes)
    rng = np.random.default_rng(12)
    inputs = {
        n: rng.standard_normal((3, sizes[a], 16)).astype(np.float16)
        for n, a in zip("qkv", "MNN", strict=True)
    }
    for unseen in ([0], [1, 3], [4], [0, 1, 2, 3, 4]):
        of = np.arange(320) * 5 // 320
        of[np.isin(np.arange(320) // 64, unseen)] = 9
        inputs |= {"of": of.astype(np.int32), "doc": (np.arange(96) * 7 // 96 - 1).astype(np.int32)}
        ran: list[str] = []
        got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=blocks, ran=ran)[
            "o"
        ]
        assert ran[-1] == "documents_whole"
        assert np.abs(got.astype(float) - exact(inputs, 0.3, domain)).max() < 2e-3
    assert LAST_PRODUCTS in made.source.partition("def documents_whole(")[2]


def test_a_printed_schedule_of_documents_gives_the_same_source() -> None:
    program = tl.parse(TEXT.replace("SET", SETS["same and earlier"][0]))["documents"]
    sizes, dtypes = {"H": 16, "M": 4096, "N": 4096, "D": 128}, {"T": DType.BF16}
    made = compile_kernel(program, SM_90A, sizes, dtypes=dtypes)
    assert made.schedule.skew == "all"
    stated = parse_schedule(print_schedule(made.schedule))
    assert compile_kernel(program, SM_90A, sizes, dtypes=dtypes, schedule=stated).source == made.source


@pytest.mark.parametrize("domain", SETS)
def test_what_serves_other_strides_in_shorter_steps(domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program's own tiles have no registers there, as for heads of 128 columns, loops take a part of a tile."""
    monkeypatch.setattr(wgmma, "measured", lambda kernel: kernel)
    monkeypatch.setattr(wgmma, "spilled", lambda kernel, _: kernel.tiles["n"] > 32)
    sizes = {"H": 2, "M": 150, "N": 190, "D": 24}
    made = compiled(domain, sizes, n=64)
    steps = made.source.partition("def documents_any(")[2].partition("\ndef ")[0]
    assert "# tier mma" in steps
    assert "# n by 32" in steps
    rng = np.random.default_rng(9)
    inputs = {
        n: rng.standard_normal((2, sizes[a], 24)).astype(np.float16)
        for n, a in zip("qkv", "MNN", strict=True)
    }
    numbers = rng.integers(0, 190, 150) if domain == "up to a length" else np.arange(150) * 5 // 150
    inputs |= {"of": numbers.astype(np.int32), "doc": (np.arange(190) * 4 // 190).astype(np.int32)}
    ran: list[str] = []
    got = emulate.run_module(
        made.module, made.source, inputs, {"scale": 0.3}, blocks=2, preferred=False, ran=ran
    )["o"]
    assert ran[-1] == "documents_any"
    assert np.abs(got.astype(float) - exact(inputs, 0.3, domain)).max() < 2e-3


def test_lengths_of_rows() -> None:
    """Where loops end is the greatest length of a tile of queries, lengths beyond the keys and of nothing among them."""
    sizes = {"H": 1, "M": 150, "N": 90, "D": 16}
    made = compiled("up to a length", sizes)
    assert made.module.programs[-1].tier == "wgmma"
    rng = np.random.default_rng(6)
    inputs = {
        n: rng.standard_normal((1, sizes[a], 16)).astype(np.float16)
        for n, a in zip("qkv", "MNN", strict=True)
    }
    lengths = rng.integers(-3, 120, 150).astype(np.int32)
    lengths[64:128] = 0
    inputs |= {"of": lengths, "doc": np.zeros(90, np.int32)}
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=2)["o"]
    assert np.abs(got.astype(float) - exact(inputs, 0.3, "up to a length")).max() < 2e-3


def test_tiles_of_other_documents_are_not_asked_for() -> None:
    """Keys and values of a tile that no query of the task can see do not matter, whatever they hold: NaN would spread."""
    sizes = {"H": 1, "M": 128, "N": 128, "D": 16}
    made = compiled("same", sizes)
    rng = np.random.default_rng(8)
    inputs = {n: rng.standard_normal((1, 128, 16)).astype(np.float16) for n in "qkv"}
    inputs |= {"of": (np.arange(128) // 64).astype(np.int32), "doc": (np.arange(128) // 32).astype(np.int32)}
    inputs["k"][:, 64:], inputs["v"][:, 64:] = np.nan, np.nan  # documents 2 and 3, which no query has
    got = emulate.run_module(made.module, made.source, inputs, {"scale": 0.3}, blocks=1)["o"]
    kept = {**inputs, "k": np.nan_to_num(inputs["k"]), "v": np.nan_to_num(inputs["v"])}
    assert np.abs(got.astype(float) - exact(kept, 0.3, "same")).max() < 2e-3


PROGRAM = """module g {{ tile g(x: bf16[B, N, D], of: i32[B, N], o: out i32[B, M]) {{
    extents B, M, N, D
    for b in B, m in M by 64 parallel {{
        low: i32 = {0}
        for n in N by 16 {1} carry (s: i32[m] = fill(0i32)) {{
            least: i32 = min[n](load of[b, n])
            most: i32 = max[n](load of[b, n])
            visits: i64 = i64(least <= most)
            for visit in 1 to visits carry (s2: i32[m] = s) {{
                yield s2 + {2}
            }}
            yield s2
        }}
        store o[b, m] = s
    }}
}} }}"""


def ahead(low: str = "0i32", bounds: str = "", step: str = "1i32") -> Any:
    return ranges_ahead(parse_module(PROGRAM.format(low, bounds, step)).programs[0], Remarks())


def test_ranges_over_the_same_tiles_share_a_launch() -> None:
    """Both ends for each batch, one element a tile of 16."""
    found = ahead()
    launch = found.launches[0]  # the others find steps: `test_steps_ahead.py`
    assert [len(p.shape) for p in found.between] == [2, 2, 1, 1]
    assert "store g_leasts[b, n_tile]" in print_program(launch)
    assert "load g_leasts[b, min[n](n) // 16]" in print_program(found.program)


@pytest.mark.parametrize(
    ("bounds", "step", "replaced"), [("to 40", "1i32", True), ("to 40", "least", False), ("", "least", True)]
)
def test_of_a_bounded_axis_only_what_skips(bounds: str, step: str, replaced: bool) -> None:
    """Lanes beyond a bound belong to the tile: they may widen a range that skips, but not a value that is computed with."""
    text = print_program(ahead(bounds=bounds, step=step).program)
    assert ("load g_leasts" in text) == replaced
    assert "load g_mosts" in text


def test_what_has_no_ranges_stays() -> None:
    program = parse_module(PROGRAM.format("0i32", "", "1i32").replace("load of[b, n]", "i32(n)")).programs[0]
    found = ranges_ahead(program, Remarks())
    assert found.program is program
    assert not found.launches


def test_a_loop_that_runs_once_or_never_is_a_condition() -> None:
    """Its states take the outer names; the step depends on them alone."""
    made = compiled("same", {"H": 1, "M": 128, "N": 128, "D": 16})
    (loop,) = [
        s for s in statements(prepared(made.module.programs[-1]).body) if isinstance(s, For) and s.axis.tile
    ]
    steps = steps_of(loop)
    assert steps.condition is not None
    assert [s.name for s in steps.before][-2:] == ["visits", "sure"]
    assert len(steps.ways) == 2
    for way in steps.ways:
        assert not any(isinstance(s, For) for s in way.body)
        assert [c.name for c in way.carries] == [c.name for c in loop.carries]
        assert steps_of(way).condition is None


@pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="the extra `cuda` is not installed"
)
def test_the_machine_code_has_no_spill() -> None:
    from tileloom.runtime import machine_code

    sizes = {"H": 16, "M": 4096, "N": 4096, "D": 128}
    text = TEXT.replace("SET", SETS["same and earlier"][0])
    made = compile_kernel(tl.parse(text)["documents"], SM_90A, sizes, dtypes={"T": DType.BF16})
    assert made.module.programs[-1].tier == "wgmma"
    for name, instruction in (("documents_whole", "HGMMA"), ("documents_any", "HMMA")):
        code = machine_code.machine_code(made.source, name, SM_90A)
        assert instruction in code.sass
        assert (code.spill_bytes, code.stack_bytes) == (0, 0)
