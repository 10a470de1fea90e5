"""Schedules as source: each legal one gives the oracle's numbers, each illegal one is refused before code generation, with
its place in the text."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_programs import DrawnProgram, programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tileloom.api import compile, parse
from tileloom.compiler.interpreter import tensor as tensor_interpreter
from tileloom.compiler.interpreter import tile as tile_interpreter
from tileloom.compiler.pipeline import compile_kernel, front
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule, print_schedule
from tileloom.compiler.schedule_text import parse_schedule
from tileloom.compiler.target import CPU, SM_80
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.syntax import ProgramKernel

ATTENTION = """kernel attention(q: f32[M, D], k: f32[N, D], v: f32[N, E], scale: f32) -> o: f32[M, E] {
    example M = 40, N = 50, D = 8, E = 6, scale = 0.3
    s[m, n] = scale * sum[d](q[m, d] * k[n, d])
    p[m, n] = softmax[n | n <= m + N - M](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
"""


def attention() -> ProgramKernel:
    return parse(ATTENTION)["attention"]


def schedule(lines: str, target: str = "cpu", kernel: str = "attention") -> Schedule:
    return parse_schedule(f"schedule mine for {kernel} on {target} {{\n    {lines}\n}}\n")


def made(lines: str):  # type: ignore[no-untyped-def]
    return compile(attention(), schedule=schedule(lines)).compilation()


# ---------------------------------------------------------------- what the lines do


def test_fuse_names_what_is_computed_in_place() -> None:
    assert [r.name for r in made("fuse s, p").regions] == ["o"]
    assert [r.statements for r in made("fuse none").regions] == [("s",), ("p",), ("o",)]
    assert [r.name for r in made("fuse s\n keep p").regions] == ["p", "o"]
    reasons = {e.name: e.reason for e in made("fuse s\n keep p").ledger.entries}
    assert reasons == {
        "s": "computed in place because the schedule says `fuse`",
        "p": "stored because the schedule says `keep`",
    }


def test_a_size_for_a_statement_goes_before_a_size_for_all() -> None:
    text = print_schedule(made("fuse none\n tile n by 16, p.n by 8").schedule)
    assert "s.n by 16" in text
    assert "p.n by 8" in text
    assert "o.n by 16" in text


def test_a_whole_axis_can_be_cut() -> None:
    assert made("fuse all").schedule.static == ("d", "e")
    cut = made("fuse all\n tile d by 4, e by 1")
    assert cut.schedule.static == ()
    assert {"d by 4", "e by 1"} <= set(
        print_schedule(cut.schedule).partition("tile ")[2].strip("\n }").split(", ")
    )


def test_static_extents_are_compiled_in() -> None:
    assert made("fuse all\n static m").statics == {"M": 40, "D": 8, "E": 6}


def test_what_was_chosen_can_be_given_back() -> None:
    for lines in ("fuse none", "fuse all", "fuse auto", "keep p", "tile m by 1, n by 3"):
        first = made(lines)
        again = compile(attention(), schedule=print_schedule(first.schedule)).compilation()
        assert again.module == first.module
        assert again.schedule == first.schedule


def test_axes_of_one_name_are_told_apart_by_statements() -> None:
    text = """kernel two(x: f32[M, N], y: f32[N, K]) -> (o: f32[M], r: f32[K]) {
        example M = 5, N = 6, K = 7
        o[m] = sum[n](x[m, n] * 2)
        r[n] = sum[i](y[i, n])
    }"""
    kernel = parse(text)["two"]
    got = compile(kernel, schedule=schedule("tile o.n by 3, r.n by 2", kernel="two")).compilation()
    assert dict(got.plans[0].tiles)["n"] == 3
    assert dict(got.plans[1].tiles)[got.graph.definition("r").axes[0]] == 2
    assert "o.n by 3" in print_schedule(got.schedule)
    assert "r.n by 2, r.i by" in print_schedule(got.schedule)
    with pytest.raises(
        TileError, match=r"E0610.*`n` is the name of several axes(.|\n)*say which: `o.n`, `r.n`"
    ):
        compile(kernel, schedule=schedule("tile n by 3", kernel="two")).compilation()


# ---------------------------------------------------------------- refusals

ILLEGAL = {
    "tile m by 0": ("E0609", "0"),
    "tile m by -4": ("E0609", "-"),
    "tile m by 2.5": ("E0609", "2.5"),
    "tile m by many": ("E0609", "many"),
    "tile m by 99999999999": ("E0609", "99999999999"),
    "tile m by 4, m by 5": ("E0609", "m"),
    "tile m by 1048576, n by 1048576": ("E0609", "m"),
    "fuse all\n tile s.n by 4, p.n by 5": ("E0609", "p.n"),
    "tile x by 4": ("E0610", "x"),
    "tile t.n by 4": ("E0610", "t.n"),
    "tile p.f by 4": ("E0610", "p.f"),
    "fuse none\n tile s.e by 4": ("E0610", "s.e"),
    "tile n_7 by 4": ("E0610", "n_7"),
    "static f": ("E0610", "f"),
    "keep o": ("E0618", "o"),
    "keep t": ("E0618", "t"),
    "fuse q": ("E0618", "q"),
    "fuse o, s": ("E0618", "o"),
    "fuse s\n keep s": ("E0618", "s"),
    "tier wgmma": ("E0607", "wgmma"),
    "tier fast": ("E0607", "fast"),
    "unroll 4": ("E0608", "unroll"),
    "stage k by 2": ("E0607", "k"),
    "fuse all\n fuse none": ("E0608", "fuse"),
    "keep p, p": ("E0608", "p"),
    "fuse 3": ("E0608", "3"),
}


@pytest.mark.parametrize("lines", ILLEGAL)
def test_illegal_lines_are_refused_at_their_place(lines: str) -> None:
    code, word = ILLEGAL[lines]
    with pytest.raises(TileError) as caught:
        made(lines)
    found = caught.value.diagnostics[0]
    assert found.code == code, found.render()
    assert found.span is not None
    assert found.span.text.startswith(word), found.render()


def test_static_needs_an_extent() -> None:
    text = (
        "kernel k(x: f32[N], w: i64) -> o: f32[N] { o[n] = sum[i in 3](x[n] * f32(i)) + sum[j in w](x[n]) }"
    )
    kernel = parse(text)["k"]
    for axis, words in (("i", "a number of the text"), ("j", "not known when the code is made")):
        with pytest.raises(TileError, match=f"E0619.*`{axis}` cannot be static: its extent, .*, is {words}"):
            compile(kernel, schedule=schedule(f"static {axis}", kernel="k")).compilation(N=4)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(TileError) as caught:
        made("fuse q\n keep o\n tile x by 4\n static f\n tier fast")
    assert [d.code for d in caught.value.diagnostics] == ["E0618", "E0618", "E0610", "E0610", "E0607"]


def test_tiers_of_a_gpu() -> None:
    graph = front(attention(), None, Remarks())[1]
    sizes = {"M": 40, "N": 50, "D": 8, "E": 6}
    with pytest.raises(TileError, match=r"E0607.*`loops` does not exist on cuda:sm_80"):
        compile_kernel(attention(), SM_80, sizes, schedule=schedule("tier loops", "cuda:sm_80"))
    with pytest.raises(TileError, match=r"E0915.*`tier wgmma`: .*cuda:sm_80 has no wgmma"):
        compile_kernel(attention(), SM_80, sizes, schedule=schedule("tier wgmma", "cuda:sm_80"))
    assert graph.name == "attention"


# ---------------------------------------------------------------- properties

AXES = ("m", "n", "k", "e", "x")
STATEMENTS = ("dotted", "s", "r", "p", "o", "z", "q")
names = st.sampled_from(STATEMENTS)
keys = st.one_of(st.sampled_from(AXES), st.builds("{}.{}".format, names, st.sampled_from(AXES)))
LINES = {
    "fuse": st.one_of(
        st.sampled_from(("all", "none", "auto")),
        st.lists(names, min_size=1, max_size=2, unique=True).map(", ".join),
    ),
    "keep": st.lists(names, min_size=1, max_size=2, unique=True).map(", ".join),
    "static": st.lists(st.sampled_from(AXES), min_size=1, max_size=2, unique=True).map(", ".join),
    "tile": st.dictionaries(keys, st.integers(0, 12), min_size=1, max_size=3).map(
        lambda t: ", ".join(f"{a} by {n}" for a, n in t.items())
    ),
    "tier": st.sampled_from(("loops", "loops", "simt")),
}


@st.composite
def texts(draw: st.DrawFn) -> str:
    chosen = draw(st.lists(st.sampled_from(sorted(LINES)), max_size=4, unique=True))
    return "\n    ".join(f"{word} {draw(LINES[word])}" for word in chosen)


counts = {"legal": 0, "refused": 0}


@given(drawn=programs(), lines=texts())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_schedule_is_refused_or_gives_the_numbers(drawn: DrawnProgram, lines: str) -> None:
    """Whatever it says, it cannot change a result; what is refused is refused with a diagnostic."""
    kernel = parse(drawn.text)["drawn"]
    wanted = tensor_interpreter.run(front(kernel, None, Remarks())[0], drawn.tensors(), drawn.scalars())
    try:
        stated = schedule(lines, kernel="drawn")
        compilation = compile_kernel(kernel, CPU, drawn.sizes, schedule=stated)
    except TileError as reason:
        counts["refused"] += 1
        assert {d.code for d in reason.diagnostics} <= {"E0607", "E0608", "E0609", "E0610", "E0618", "E0619"}  # noqa: PT017
        return
    counts["legal"] += 1
    got = tile_interpreter.run_module(compilation.module, drawn.tensors(), {**drawn.scalars(), **drawn.sizes})
    for name, want in wanted.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-11, atol=1e-11, err_msg=f"{name}\n{lines}")
    again = parse_schedule(print_schedule(compilation.schedule))
    assert again == compilation.schedule
    assert compile_kernel(kernel, CPU, drawn.sizes, schedule=again).module == compilation.module


def test_both_kinds_were_drawn() -> None:
    """The property above is about something: it runs first, in this file's order."""
    if sum(counts.values()):
        assert min(counts.values()) > 20
