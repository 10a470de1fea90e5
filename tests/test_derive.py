"""derive: what joins one pass, with which repair, and what is refused with which counterexample."""

from __future__ import annotations

import math

import pytest

from tileloom.compiler.passes.derive import derive
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.tensor_ir import Node, Reduce, apply, const, index, read, reduce, walk
from tileloom.dsl.types import DType

F32 = DType.F32
X = read("x", [index("m"), index("n")], F32)
V = read("v", [index("n"), index("e")], F32)
W = read("w", [index("n")], F32)


def over(fn: str, body: Node, predicate: Node | None = None) -> Node:
    return reduce(fn, ["n"], body, predicate)


def guarded(m: Node) -> Node:
    return apply("where", apply("eq", m, const(-math.inf)), const(0.0), m)


def exp_shifted(m: Node) -> Node:
    return apply("exp", apply("sub", X, m))


def cascade(*roots: Node):  # type: ignore[no-untyped-def]
    remarks = Remarks()
    reductions = [n for n in walk(roots) if isinstance(n, Reduce)]
    states, refused = derive(reductions, remarks)
    return states, refused, remarks


MAX = over("max", X)


@pytest.mark.parametrize("m", [MAX, guarded(MAX)], ids=["plain", "guarded"])
def test_a_shifted_exponential_sum_is_rescaled(m: Node) -> None:
    states, refused, _ = cascade(over("sum", exp_shifted(m)))
    assert not refused
    total = states.states[1]
    assert total.upstream == ("max_n",)
    assert total.h_text == "exp(-r_max_n)"
    assert total.repair_text == "exp(r_max_n - r_max_n')"
    assert total.absorbs is X
    assert {o.name for o in total.obligations} == {"separable", "repair", "commutes"}
    assert all(o.status == "proved" for o in total.obligations)


def test_weighted_sums_share_the_pass_and_the_repair() -> None:
    e = exp_shifted(guarded(MAX))
    states, refused, _ = cascade(over("sum", e), over("sum", apply("mul", e, V)))
    assert [s.name for s in states.states] == ["max_n", "sum_n", "sum_n_2"]
    assert not refused
    assert states.states[1].repair is states.states[2].repair


def test_a_product_with_an_unfinished_sum_is_repaired_by_its_ratio() -> None:
    total = over("sum", W)
    states, refused, _ = cascade(over("sum", apply("mul", X, apply("div", const(1.0), total))))
    assert not refused
    assert states.states[1].repair_text == "r_sum_n/r_sum_n'"
    assert not states.states[1].guard_old  # 0/r' is 0 for an empty old sum


def test_a_maximum_of_differences_is_shifted() -> None:
    states, refused, _ = cascade(over("max", apply("sub", X, over("sum", W))))
    assert not refused
    assert states.states[1].repair_text == "r_sum_n - r_sum_n'"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda m: apply("div", const(1.0), apply("add", const(1.0), apply("exp", apply("sub", m, X)))), "do not split"),
        (lambda m: apply("mul", apply("sub", X, m), apply("sub", X, m)), "do not split"),
        (lambda m: apply("where", apply("lt", X, m), X, const(0.0)), "not finished"),
    ],
    ids=["sigmoid", "variance", "condition"],
)
def test_what_does_not_separate_is_refused_with_the_reason(body, words: str) -> None:  # type: ignore[no-untyped-def]
    states, refused, remarks = cascade(over("sum", body(MAX)))
    assert [s.name for s in states.states] == ["max_n"]
    assert words in refused[0].reason
    assert any(r.name == "not-one-pass" for r in remarks.items)


def test_a_refutation_names_a_point_that_refutes() -> None:
    _, refused, _ = cascade(over("sum", apply("mul", apply("sub", X, MAX), apply("sub", X, MAX))))
    o = refused[0].obligation
    assert o is not None
    assert o.status == "refuted"
    left, right = (float(x) for x in o.how.split(" gives ")[1].split(" and "))
    assert left != right


def test_what_reads_a_refused_reduction_waits_with_it() -> None:
    squared = over("sum", apply("mul", apply("sub", X, MAX), apply("sub", X, MAX)))
    states, refused, _ = cascade(over("sum", apply("mul", X, squared)))
    assert len(states.states) == 1
    assert len(refused) == 2
    assert "needs a pass of its own" in refused[1].reason


def test_a_predicate_on_an_unfinished_reduction_is_refused() -> None:
    states, refused, _ = cascade(over("sum", X, apply("lt", X, MAX)))
    assert "condition reads a reduction" in refused[0].reason
    assert len(states.states) == 1
