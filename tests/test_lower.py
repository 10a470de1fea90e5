"""lower and schedule on the examples: what the loops are, what is stored, and that names and order do not matter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tileloom.compiler import tile_ir as tile
from tileloom.compiler.options import Options
from tileloom.compiler.pipeline import Compilation, compile_kernel
from tileloom.compiler.target import CPU, TARGETS
from tileloom.dsl.load import load, parse

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {"B": 1, "H": 4, "G": 2, "M": 200, "N": 300, "D": 64, "E": 32, "K": 70, "R": 9}


def compiled(name: str, kernel: str | None = None, target: str = "cpu", **options: object) -> Compilation:
    program = load(EXAMPLES / f"{name}.tile")
    return compile_kernel(
        program[kernel or name],
        TARGETS[target],
        SIZES,
        options=Options(**options),  # type: ignore[arg-type]
    )


def loops(c: Compilation) -> list[tile.For]:
    return [s for p in c.module.programs for s in tile.statements(p.body) if isinstance(s, tile.For)]


def test_attention_is_one_launch_with_one_pass_and_no_score_matrix() -> None:
    c = compiled("attention")
    assert len(c.module.programs) == 1
    assert c.module.scratch == ()
    full, partial = loops(c)
    for loop in (full, partial):
        assert [x.type.axes for x in loop.carries] == [("m",), ("m",), ("m", "e")]
    assert [x.init for x in partial.carries] == [tile.Name(x.name) for x in full.carries]
    dots = [
        e
        for s in tile.statements(c.module.programs[0].body)
        for x in tile.expressions(s)
        for e in tile.subexpressions(x)
        if isinstance(e, tile.Dot)
    ]
    assert sorted(d.over for d in dots) == [("d",), ("d",), ("n",), ("n",)]


def test_causal_loops_stop_at_the_last_visible_key() -> None:
    full, partial = loops(compiled("attention"))
    assert full.axis.hi == partial.axis.lo
    assert partial.axis.hi is not None
    assert len(partial.domain) == 1


def test_full_tiles_have_no_mask() -> None:
    full, partial = loops(compiled("attention"))
    assert [a.name for a in full.attributes] == ["full"]
    assert selects(full) == ["=="]  # the guard of an empty maximum
    assert selects(partial) == ["<=", "=="]


def selects(loop: tile.For) -> list[str]:
    """The comparisons that selects of a loop's body choose by."""
    signs = {"le": "<=", "eq": "=="}
    found = [
        e.args[0]
        for s in loop.body
        for x in tile.expressions(s)
        for e in tile.subexpressions(x)
        if isinstance(e, tile.Apply) and e.op == "where"
    ]
    return sorted(signs[c.op] for c in found if isinstance(c, tile.Apply))


def test_naive_has_a_launch_for_each_statement_and_stores_the_scores() -> None:
    c = compiled("attention", fuse="none")
    assert len(c.module.programs) == 4
    assert {p.name for p in c.module.scratch} == {"s", "p"}
    assert all(len(p.shape) == 4 for p in c.module.scratch)


def test_a_kept_intermediate_is_stored() -> None:
    c = compiled("attention", keep=("s",))
    assert [p.name for p in c.module.scratch] == ["s"]


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_what_is_chosen_is_a_schedule_that_gives_the_same_program(target: str) -> None:
    c = compiled("attention", target=target)
    program = load(EXAMPLES / "attention.tile")
    again = compile_kernel(program["attention"], TARGETS[target], SIZES, schedule=c.schedule)
    assert again.module == c.module


@pytest.mark.parametrize(
    ("keys", "depth", "bounds", "rows"),
    [(8192, 64, "", 192), (4096, 64, "", 64), (4096, 128, "", 192), (8192, 64, "[n | n <= m]", 64)],
)
def test_many_queries_share_keys_that_no_cache_holds(keys: int, depth: int, bounds: str, rows: int) -> None:
    """4 and 2 MB of keys and values for each head on a CPU; where each query has its own end, tiles stay small."""
    text = (EXAMPLES / "plain_attention.tile").read_text().replace("softmax[n]", f"softmax{bounds or '[n]'}")
    sizes = {"B": 1, "H": 2, "M": 4096, "N": keys, "D": depth, "E": depth}
    c = compile_kernel(parse(text)["plain_attention"], CPU, sizes)
    assert f"m by {rows}," in c.snapshots["schedule"]
    assert (rows > 64) == any("reads 4 MB again" in r.message for r in c.remarks)


NAMES = {
    "q": "queries", "k": "keys", "v": "values", "s": "score", "p": "weight", "o": "result", "lse": "norm", "scale": "factor",
    "b": "batch", "h": "head", "m": "row", "n": "col", "d": "inner", "e": "feature",
    "B": "X1", "H": "X2", "G": "X3", "M": "X4", "N": "X5", "D": "X6", "E": "X7", "T": "Element",
}  # fmt: skip


def test_names_in_attention_do_not_matter() -> None:
    """Another name for everything: the same tile IR and schedule up to names."""
    text = (EXAMPLES / "attention.tile").read_text()
    renamed = re.sub(r"[A-Za-z_]\w*", lambda f: NAMES.get(f.group(), f.group()), re.sub(r"#.*", "", text))
    sizes = {NAMES.get(k, k): v for k, v in SIZES.items()}
    a = compile_kernel(parse(text)["attention"], CPU, SIZES)
    b = compile_kernel(parse(renamed)["attention"], CPU, sizes)
    assert up_to_names(b.snapshots["tile"]) == up_to_names(a.snapshots["tile"])
    assert up_to_names(b.snapshots["schedule"]) == up_to_names(a.snapshots["schedule"])


def up_to_names(text: str) -> str:
    order: dict[str, int] = {}
    text = re.sub(r"[A-Za-z_]\w*", lambda f: f" n{order.setdefault(f.group(), len(order))} ", text)
    return "".join(text.split())  # long lists are broken by their width
