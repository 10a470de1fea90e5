"""derive: what joins one pass, with which repair, and what is refused with which counterexample."""

from __future__ import annotations

import math

import pytest

from tileloom.compiler.passes.derive import Rules, derive
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.spelling import spell
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
    assert {o.name for o in total.obligations} == {"separable", "repair", "commutes", "merge"}
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
    assert "where" not in spell(states.states[1].repair).split("/")[0]  # 0/r' is 0 for an empty old sum


def test_a_maximum_of_differences_is_shifted() -> None:
    states, refused, _ = cascade(over("max", apply("sub", X, over("sum", W))))
    assert not refused
    assert states.states[1].repair_text == "r_sum_n - r_sum_n'"


def sigmoid(x: Node) -> Node:
    return apply("div", const(1.0), apply("add", const(1.0), apply("exp", apply("neg", x))))


def square(x: Node) -> Node:
    return apply("mul", x, x)


REFUSED = {
    "sigmoid": (
        over("sum", sigmoid(apply("sub", X, MAX))),
        (
            "`1.0 / (1.0 + exp(-(x[m, n] - max_n)))` does not split into a part of the element and a part of "
            "`max_n`, so what was summed with an old value of `max_n` cannot be mended when that changes. "
            "When max_n goes from 2.247 to 3.537, the term with x[m, n] = 1.298 is multiplied by 0.3451 and "
            "the one with x[m, n] = 1.185 by 0.3383: no single repair does both"
        ),
    ),
    "tanh": (
        over("sum", apply("tanh", apply("sub", X, MAX))),
        (
            "`tanh(x[m, n] - max_n)` does not split into a part of the element and a part of `max_n`, so "
            "what was summed with an old value of `max_n` cannot be mended when that changes."
        ),
    ),
    "sign": (
        over("max", apply("mul", X, over("sum", W))),
        (
            "the greatest `x[m, n] * sum_n` would be mended by a ratio of values of `sum_n`, which may "
            "change sign, and a negative factor turns a maximum into a minimum: max(1, 2) * -1 is -2, but "
            "max(1 * -1, 2 * -1) is -1"
        ),
    ),
    "condition": (
        over("sum", apply("where", apply("lt", X, MAX), X, const(0.0))),
        (
            "`x[m, n] < max_n` chooses by a comparison with `max_n`, which is not finished before the end of "
            "the pass: an element already counted one way may have to be counted the other way"
        ),
    ),
    "predicate": (
        over("sum", X, apply("lt", X, MAX)),
        "its condition `x[m, n] < max_n` reads `max_n`, which is not finished before the end of the pass.",
    ),
    "rounding": (
        over("sum", apply("mul", apply("round", apply("div", X, MAX)), W)),
        (
            "`round(x[m, n] / max_n)` rounds a value that changes with `max_n`, which is not finished before "
            "the end of the pass: rounded with a scale that still changes it is another number. The option "
            "`quantise_with_running_scale` allows that"
        ),
    ),
    "product": (
        over("prod", apply("sub", X, MAX)),
        (
            "`prod` of a value that changes with `max_n`, which is not finished before the end of the pass: "
            "no repair of a `prod` is known"
        ),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_refusal_tells_a_newcomer_what_blocks(name: str) -> None:
    root, words = REFUSED[name]
    states, refused, remarks = cascade(root)
    assert states.states[0].moved is None
    assert len(states.states) == 1
    assert refused[0].reason.startswith(words), refused[0].reason
    assert [r.name for r in remarks.items] == ["not-one-pass"]


def test_an_option_lets_roundings_follow_the_running_scale() -> None:
    root = REFUSED["rounding"][0]
    reductions = [n for n in walk([root]) if isinstance(n, Reduce)]
    states, refused = derive(reductions, Remarks(), Rules(named=("quantise_with_running_scale",)))
    assert not refused
    assert states.states[1].repair_text == "r_max_n/r_max_n'"
    assert "round(" in spell(states.states[1].g)


def test_squares_of_differences_are_carried_with_their_lower_powers() -> None:
    states, refused, _ = cascade(over("sum", square(apply("sub", X, MAX))))
    assert not refused
    assert [(s.name, s.kind) for s in states.states] == [
        ("max_n", "plain"), ("sum_n_0", "plain"), ("sum_n_1", "matrix"), ("sum_n", "matrix"),
    ]  # fmt: skip
    assert all(o.status == "proved" for s in states.states for o in s.obligations)


def test_what_reads_a_refused_reduction_waits_with_it() -> None:
    blocked = over("sum", apply("tanh", apply("sub", X, MAX)))
    states, refused, _ = cascade(over("sum", apply("mul", X, blocked)))
    assert len(states.states) == 1
    assert len(refused) == 2
    assert refused[1].reason == "it reads sum_n, which needs a pass of its own"


def test_elements_that_equal_the_extremum_start_again_when_it_moves() -> None:
    best = over("max", X)
    states, refused, _ = cascade(reduce("min", ["n"], index("n"), apply("eq", X, best)))
    assert not refused
    assert states.states[1].kind == "restart"
    assert states.states[1].repair_text == "start again where max_n' != max_n"


def test_an_undecided_equation_is_unknown_and_forgotten() -> None:
    import sympy as sp

    from tileloom.compiler.passes import proofs

    x = sp.Symbol("x", real=True)
    left, right = sp.sin(x) ** 2, 1 - sp.cos(x) ** 2
    assert proofs.equal("t", left, right, limit_s=0.0).status == "unknown"
    assert ("t", left, right) not in proofs._known
    assert proofs.equal("t", left, right, limit_s=60.0).status == "proved"
