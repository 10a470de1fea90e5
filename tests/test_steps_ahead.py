"""Steps found by launches before a kernel: which tiles each task visits, which task has most, which steps need no mask."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tileloom as tl
from tileloom.compiler.codegen.warpgroup_form import steps_of, without_sure_steps
from tileloom.compiler.interpreter.tile import run_module
from tileloom.compiler.passes import ranges_ahead as passes
from tileloom.compiler.passes.ranges_ahead import ranges_ahead
from tileloom.compiler.pipeline import compile_kernel
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import SM_90A
from tileloom.compiler.tile_ir import For, TileModule, TileProgram, statements
from tileloom.compiler.tile_text import parse_module, print_program
from tileloom.dsl.types import DType
from tileloom.runtime import emulate

Array = np.ndarray[Any, Any]
TEXT = """kernel documents<T: f16 | bf16>(
    q: T[B, H, M, D], k: T[B, H, N, D], v: T[B, H, N, D], of: i32[OF], doc: i32[DOC], scale: f32
) -> o: T[B, H, M, D] {
    require scale > 0
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h, n, d])
    p[b, h, m, n] = softmax[n | SET](s[b, h, m, n])
    o[b, h, m, d] = sum[n](p[b, h, m, n] * v[b, h, n, d])
}
"""
SAME = "of[m] == doc[n]"
EARLIER = "of[m] == doc[n] and n <= m"
EACH = "of[b, m] == doc[b, n] and n <= m"


def text_of(domain: str) -> str:
    batch = "B, " if "[b" in domain else ""
    return TEXT.replace("SET", domain).replace("OF]", f"{batch}M]").replace("DOC]", f"{batch}N]")


def compiled(
    domain: str, sizes: dict[str, int], lines: str = "tile m by 64, n by 16", dtype: DType = DType.F16
) -> Any:
    stated = parse_schedule(f"schedule s for documents on cuda:sm_90a {{ tier wgmma\n {lines} }}")
    return compile_kernel(
        tl.parse(text_of(domain))["documents"], SM_90A, sizes, dtypes={"T": dtype}, schedule=stated
    )


def drawn(sizes: dict[str, int], of: Array, doc: Array, seed: int = 4) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shape = {n: (sizes["B"], sizes["H"], sizes[a], sizes["D"]) for n, a in zip("qkv", "MNN", strict=True)}
    found = {n: rng.standard_normal(s).astype(np.float16) for n, s in shape.items()}
    return {**found, "of": of.astype(np.int32), "doc": doc.astype(np.int32)}


def seen(domain: str, of: Array, doc: Array) -> Array:
    """Which keys each query sees, [M, N] or [B, M, N]."""
    m, n = np.arange(of.shape[-1])[:, None], np.arange(doc.shape[-1])
    same = of[..., :, None] == doc[..., None, :]
    return same & (n <= m) if "n <= m" in domain else same


def exact(x: dict[str, Array], scale: float, domain: str) -> Array:
    """In float64; rows that see nothing give 0."""
    q, k, v = (x[n].astype(float) for n in "qkv")
    mask = seen(domain, x["of"], x["doc"])
    mask = np.broadcast_to(mask if mask.ndim == 2 else mask[:, None], (*q.shape[:2], *mask.shape[-2:]))
    s = np.where(mask, scale * q @ k.swapaxes(-1, -2), -np.inf)
    top = np.where(np.isinf(s.max(-1)), 0, s.max(-1))[..., None]
    p = np.exp(s - top)
    z = p.sum(-1, keepdims=True)
    return p @ v / np.where(z == 0, 1, z)


NUMBERS = {
    "in order": lambda n: np.sort(np.random.default_rng(1).integers(0, 6, n)),
    "here and there": lambda n: np.random.default_rng(2).integers(0, 40, n // 8 + 1).repeat(8)[:n],
    "one": lambda n: np.zeros(n, int),
    "none": lambda n: np.full(n, -7),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("domain", [SAME, EARLIER])
def test_what_the_launches_find(domain: str, numbers: str) -> None:
    """First and end of the tiles that a task visits, and tasks by how many, the most first: against all pairs."""
    sizes = {"B": 1, "H": 1, "M": 500, "N": 333, "D": 16}
    of, doc = np.arange(500) // 90, NUMBERS[numbers](333)
    programs = compiled(domain, sizes).module.programs[:3]
    assert [p.name for p in programs] == ["documents_ranges_n", "documents_steps", "documents_ranks"]
    x = {"of": of.astype(np.int32), "doc": doc.astype(np.int32)}
    got = run_module(TileModule("ahead", programs, ()), x, {})
    rows, columns = -(-500 // 64), -(-333 // 16)
    low = [(of[i * 64 : i * 64 + 64].min(), of[i * 64 : i * 64 + 64].max()) for i in range(rows)]
    high = [(doc[j * 16 : j * 16 + 16].min(), doc[j * 16 : j * 16 + 16].max()) for j in range(columns)]
    for i in range(rows):
        last = min(i * 64 + 63, 499)
        visited = [j for j in range(columns) if low[i][0] <= high[j][1] and high[j][0] <= low[i][1]]
        assert got["documents_first"][i] == (visited[0] if visited else columns)
        assert got["documents_end"][i] == (visited[-1] + 1 if visited else 0)
        assert got["documents_steps"][i] == sum(domain == SAME or j * 16 <= last for j in visited)
        pairs = seen(domain, of, doc)[i * 64 : i * 64 + 64]
        assert set(np.flatnonzero(pairs.any(0)) // 16) <= set(visited)
    order = got["documents_by_length"]
    assert sorted(order) == list(range(rows))
    steps = got["documents_steps"][order]
    assert all(steps[:-1] >= steps[1:])


@pytest.mark.parametrize(
    ("domain", "numbers"),
    [
        (SAME, "in order"),
        (EARLIER, "in order"),
        (EARLIER, "here and there"),
        (EARLIER, "one"),
        (SAME, "none"),
        (EACH, "in order"),
    ],
)
@pytest.mark.parametrize("length", [150, 192])
def test_documents_of_each_kind(domain: str, numbers: str, length: int) -> None:
    """Against float64, with blocks that take several tasks; of each batch other documents."""
    sizes = {"B": 2, "H": 2, "M": length, "N": length, "D": 16}
    made = compiled(domain, sizes)
    of = NUMBERS["one" if numbers == "none" else numbers](length)
    doc = NUMBERS[numbers](length)
    if domain == EACH:
        of, doc = (np.stack([x, x[::-1]]) for x in (of, doc))
    x = drawn(sizes, of, doc)
    got = emulate.run_module(made.module, made.source, x, {"scale": 0.3}, blocks=3)["o"]
    assert np.abs(got.astype(float) - exact(x, 0.3, domain)).max() < 2e-3


def test_maxima_that_rise_far_from_tile_to_tile() -> None:
    """Steps may be left out and maxima stay where they are: scores that rise by far more than 2^8 move them."""
    sizes = {"B": 1, "H": 1, "M": 128, "N": 128, "D": 16}
    made = compiled(EARLIER, sizes)
    (told,) = [r.message for r in made.remarks if r.name == "roles"]
    assert "a maximum moves when it is exceeded by more than 2^8" in told
    x = drawn(sizes, np.arange(128) // 64, np.arange(128) // 64)
    x["k"] = (x["k"] * np.linspace(0.2, 12, 128)[:, None]).astype(np.float16)
    got = emulate.run_module(made.module, made.source, x, {"scale": 1.0}, blocks=1)["o"]
    assert np.abs(got.astype(float) - exact(x, 1.0, EARLIER)).max() < 4e-3


def test_tiles_of_one_document_take_no_mask() -> None:
    """The step without the mask is taken, and the other where a tile has two documents: each left out shows."""
    sizes = {"B": 1, "H": 1, "M": 128, "N": 128, "D": 16}
    made = compiled(SAME, sizes)
    x = drawn(
        sizes, np.arange(128) // 64, (np.arange(128) + 8) // 64
    )  # the boundary lies within a tile of keys
    want = exact(x, 0.3, SAME)

    def off(source: str) -> float:
        got = emulate.run_module(made.module, source, x, {"scale": 0.3}, blocks=1)["o"]
        return float(np.abs(got.astype(float) - want).max())

    assert off(made.source) < 2e-3
    sure = r"sure(_\d+)? = i64\(.*\)"
    never = re.sub(sure, lambda m: m.group(0).partition("=")[0] + "= 0", made.source)
    assert never != made.source
    assert off(never) < 2e-3
    always = re.sub(
        r"sure(_\d+)? = i64\(.*\)", lambda m: f"sure{m[1] or ''} = visits{m[1] or ''}", made.source
    )
    assert off(always) > 1e-2


def test_sure_steps_are_undone() -> None:
    """For threads that have no room for both kinds of steps: the same program as without the pass."""
    sizes = {"B": 1, "H": 1, "M": 128, "N": 128, "D": 16}
    (program,) = (p for p in compiled(SAME, sizes).module.programs if p.tier == "wgmma")
    plain = without_sure_steps(program)
    loops = [s for s in statements(program.body) if isinstance(s, For) and s.axis.tile]
    assert [len(steps_of(s).ways) for s in loops] == [2]
    (loop,) = [s for s in statements(plain.body) if isinstance(s, For) and s.axis.tile]
    assert len(steps_of(loop).ways) == 1
    assert "sure" not in print_program(plain)
    assert without_sure_steps(plain) == plain
    parse_module(f"module documents {{ {print_program(plain)} }}")


PROGRAM = """module g {{ tile g(x: bf16[B, N, D], of: i32[B, N], top: i32[B], o: out i32[B, M]) {{
    extents B, M, N, D
    for b in B, m in M by 64 parallel {{
        {0}
        for n in N by 16 carry (s: i32[m] = fill(0i32)) {{
            least: i32 = min[n](load of[b, n])
            visits: i64 = i64({1})
            for visit in 1 to visits carry (s2: i32[m] = s) {{
                yield s2 + 1i32
            }}
            yield s2
        }}
        store o[b, m] = s
    }}
}} }}"""


def ahead(before: str, condition: str) -> Any:
    return ranges_ahead(parse_module(PROGRAM.format(before, condition)).programs[0], Remarks())


@pytest.mark.parametrize(
    ("before", "condition", "found"),
    [
        (
            "low: i32 = load top[b]",
            "low <= least",
            ["first", "end"],
        ),  # the same for all tiles of rows: no ranks
        ("low: i64 = max[m](m)", "i64(least) <= low", ["first", "end", "by_length"]),
        ("low: i32 = load top[b]", "low <= least and i32(min[n](n)) < low", []),  # of an index, not of a tile
        ("tile: i32[m] = fill(3i32)\n low: i32 = max[m](tile)", "low <= least", []),
    ],
)
def test_which_steps_can_be_found(before: str, condition: str, found: list[str]) -> None:
    made = ahead(before, condition)
    names = [p.name for p in made.program.params]
    assert [x for x in ("first", "end", "by_length") if f"g_{x}" in names] == found
    assert len(made.launches) == (1 if not found else len(found))
    assert [a.name for p in made.launches for a in p.attributes] == ["primary", "secondary"] * len(
        made.launches
    )
    text = print_program(made.program)
    assert ("from n_visited_first" in text) == bool(found)
    assert ("@ranked" in text) == ("by_length" in found)
    for p in made.launches:
        assert isinstance(p, TileProgram)


def test_names_that_a_program_has_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor called as what lies between would be."""
    low = "low: i64 = max[m](m) + i64(load top[b])"
    text = PROGRAM.format(low, "i64(least) <= low").replace("top", "g_first")
    made = ranges_ahead(parse_module(text).programs[0], Remarks())
    assert "load g_first_2[" in print_program(made.program)
    monkeypatch.setattr(passes, "steps_ahead", lambda *_: None)
    assert len(ranges_ahead(parse_module(text).programs[0], Remarks()).launches) == 1
