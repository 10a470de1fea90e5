"""Explanations as data: derivations in the user's words, guards by numbers, the ledger, memory as a function of sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import tileloom as tl
from tileloom.__main__ import main
from tileloom.compiler.explain import Explanation
from tileloom.dsl.load import parse

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALLER = """
kernel k(x: f32[M, N]) -> y: f32[M] {
    t[m] = max[n](x[m, n])
    y[m] = sum[n | x[m, n] < 0.5 * t[m]](x[m, n])
}
"""
SIZES = {"B": 1, "H": 4, "G": 2, "M": 2048, "N": 2048, "D": 64, "E": 64}


def facts(name: str, kernel: str, **sizes: int) -> Explanation:
    return tl.compile(tl.load(EXAMPLES / f"{name}.tile")[kernel]).explain(**sizes).facts


@pytest.fixture(scope="module")
def attention() -> Explanation:
    return facts("attention", "attention", **SIZES)


def test_three_reductions_become_one_pass(attention: Explanation) -> None:
    (one,) = attention.passes
    assert one.axes == ("n",)
    assert [s.reduction for s in one.states] == [
        "max[n | n <= m + N - M]",
        "sum[n | n <= m + N - M]",
        "sum[n | n <= m + N - M]",
    ]


def test_states_are_told_in_the_users_words(attention: Explanation) -> None:
    largest, total, weighted = attention.passes[0].states
    assert largest.where is not None
    assert largest.where.text == "softmax[n | n <= m + N - M](s[b, h, m, n])"
    assert weighted.where is not None
    assert weighted.where.text == "sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])"
    assert weighted.where.file.endswith("attention.tile")
    assert weighted.where.line == 10
    m = largest.name
    assert largest.step == f"{m}' = max({m}, max[n](s_unscaled))"
    assert total.g == f"exp(scale * (s_unscaled - safe({m}')))"
    assert total.h == f"exp(-scale*{m})"
    assert total.repair == f"exp(scale * ({m} - safe({m}')))"
    assert total.step == f"{total.name}' = {total.name} * {total.repair} + sum[n]({total.g})"
    assert weighted.g == f"{total.g} * v[b, h // (H // G), n, e]"


def test_obligations_are_stated_and_proved(attention: Explanation) -> None:
    for state in attention.passes[0].states[1:]:
        assert [(o.name, o.status) for o in state.obligations] == [
            ("separable", "proved"),
            ("repair", "proved"),
            ("commutes", "proved"),
            ("merge", "proved"),
        ]
        m = attention.passes[0].states[0].name
        assert f"exp(scale*({m} - {m}'))" in state.obligations[1].formula
        assert "r_max" not in state.obligations[1].formula
        assert "c_0" not in state.obligations[1].formula


def test_guards_are_shown_by_numbers(attention: Explanation) -> None:
    empty, lowest, stand_in = attention.passes[0].states[1].guards
    assert (empty.extremum, empty.element, empty.plain, empty.guarded) == ("-inf", "-inf", "nan", "0")
    assert (lowest.plain, lowest.guarded) == ("1", "1")
    assert lowest.extremum == lowest.element == "-3.40282e+38"
    assert (stand_in.extremum, stand_in.plain) == ("-1e+30", "0")


def test_loops_are_those_of_the_tile_program(attention: Explanation) -> None:
    kernel = tl.compile(tl.load(EXAMPLES / "attention.tile")["attention"])
    program = kernel.compilation(**SIZES).snapshots["tile"]
    inside = [line.strip() for line in program.splitlines()]
    lines = [line.strip() for loop in attention.passes[0].loops for line in loop.splitlines()]
    start = inside.index(lines[0])
    assert inside[start : start + len(lines)] == lines
    assert sum(line.startswith("for n in N") for line in lines) == sum(
        line.startswith("for n in N") for line in inside
    )


def test_ledger_has_both_choices(attention: Explanation) -> None:
    fusion = attention.fusion
    assert [(c.name, c.decision) for c in fusion.candidates] == [("s", "fused"), ("p", "fused")]
    for c in fusion.candidates:
        assert c.stored_bytes == 4 * 4 * 2048 * 2048
        assert c.opposite_us is not None
        assert c.opposite_us > c.chosen_us
        assert c.opposite_traffic_bytes is not None
        # written whole, read up to the diagonal and a little more
        assert 1.5 <= (c.opposite_traffic_bytes - c.chosen_traffic_bytes) / c.stored_bytes <= 1.75
    assert fusion.groupings == 4
    assert fusion.launches == (("o", "lse"),)
    assert fusion.naive_launches == (("s",), ("p",), ("o",), ("lse",))


def test_fused_memory_does_not_grow(attention: Explanation) -> None:
    memory = attention.memory
    assert memory.buffers == ()
    assert memory.grows_with == ()
    assert memory.naive_grows_with == ("B", "H", "M", "N")
    assert len({g.bytes for g in memory.growth}) == 1
    assert [g.sizes for g in memory.growth] == [{"M": 2048 * f, "N": 2048 * f} for f in (1, 2, 4, 8)]
    scores = [2 * 4 * 4 * g.sizes["M"] * g.sizes["N"] for g in memory.growth]
    assert [g.naive_bytes - s for g, s in zip(memory.growth, scores, strict=True)] == [
        memory.threads * memory.naive_task_bytes
    ] * 4


def test_predicted_memory_is_what_the_runtime_counts() -> None:
    from tileloom.runtime.memory import workspace_bytes

    kernel = tl.compile(tl.load(EXAMPLES / "attention.tile")["attention"])
    memory = kernel.explain(**SIZES).facts.memory
    for compiled, found in ((kernel, memory.growth[0].bytes), (kernel.naive, memory.growth[0].naive_bytes)):
        made = compiled.compilation(**SIZES)
        assert found >= workspace_bytes(made.module, SIZES, memory.threads) > 0.9 * found


def test_missed_passes_say_why() -> None:
    kernel = tl.compile(tl.parse(SMALLER)["k"], fuse="all")
    (missed,) = kernel.explain(M=8, N=64).facts.missed
    assert "not finished before the end" in missed.message
    assert missed.where is not None
    assert missed.where.text == "sum[n | x[m, n] < 0.5 * t[m]](x[m, n])"


def test_variance_is_one_pass_mended_by_a_matrix() -> None:
    (one,) = facts("layernorm", "row_layernorm").passes
    squares = one.states[-1]
    assert squares.kind == "matrix"
    assert "safe(" in squares.g
    assert all(o.status == "proved" for s in one.states for o in s.obligations)


def test_kernel_without_reductions_or_intermediates() -> None:
    found = facts("vector_add", "vector_add")
    assert found.passes == ()
    assert found.missed == ()
    assert found.fusion.candidates == ()
    assert found.memory.growth == ()


def test_a_plain_sum_needs_no_repair() -> None:
    found = facts("matmul_gelu", "matmul_gelu")
    (product,) = (s for p in found.passes for s in p.states)
    assert product.upstream == ()
    assert product.repair == ""
    assert product.obligations == ()
    assert product.g == "a[m, k] * b[k, n]"


def test_facts_are_plain_json(attention: Explanation) -> None:
    text = json.dumps(dataclasses.asdict(attention), allow_nan=False)
    assert json.loads(text)["statics"] == {"D": 64, "E": 64}


def test_decisions_are_remarked_with_their_place(attention: Explanation) -> None:
    names = {(r.stage, r.name) for r in attention.remarks}
    assert {("derive", "repaired-state"), ("fuse", "computed-in-place"), ("schedule", "tiles")} <= names
    assert all(r.where is not None for r in attention.remarks)


def test_measured_ledger_has_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """`--fusion --measure` runs each decision and its opposite; at this shape recomputing `h` five times must lose."""
    path = str(EXAMPLES / "feed_forward.tile")
    assert main(["explain", path, "-D", "M=512", "--fusion", "--measure", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measured_ledger"]
    assert (row["name"], row["fused"], row["right"]) == ("h", False, True)
    assert row["opposite_ms"] > row["chosen_ms"]
    assert row["predicted_opposite_ms"] > row["predicted_chosen_ms"]


def test_places_are_those_of_the_text_being_explained() -> None:
    """Two texts share the nodes of what they both say; each explanation points into its own."""
    text = """kernel k(x: f32[M, N]) -> y: f32[M, N] {
    e[m, n] = exp(x[m, n] - max[n](x[m, n]))
    y[m, n] = e[m, n] / sum[n](e[m, n])
}
"""
    first = parse(text, "first.tile")
    second = parse("# one line more\n" + text, "second.tile")
    made = [tl.compile(p["k"]) for p in (first, second)]
    for _ in range(2):  # explained in turn, and again
        for kernel, file, line in zip(made, ("first.tile", "second.tile"), (2, 3), strict=True):
            facts = kernel.explain(M=64, N=100000).facts
            places = [s.where for p in facts.passes for s in p.states]
            places += [c.where for c in facts.fusion.candidates]
            places += [r.where for r in facts.remarks]
            found = {(w.file, w.line) for w in places if w is not None}
            assert {f for f, _ in found} == {file}
            assert (file, line) in found
