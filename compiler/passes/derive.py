"""derive: cascaded reductions over one index set become one pass over it (DESIGN 4.3).

Let `r = R_j(x_j)` be finished only at the end of the pass and `t = F_j g(r, c_j)` depend on it. What was computed with an
old r is mended when r becomes r':

- by a factor, if g(r, c) = G(c)·H(r) and F is a sum: t·H(r')/H(r). With g = exp(x - r) this is the rescaling of online
  softmax (Milakov & Gimelshein, arXiv:1805.02867); nothing below knows it. A maximum is mended so where the factor is
  positive, otherwise by the summand H(r') - H(r) if g(r, c) = G(c) + H(r).
- by a matrix, if g = U·(C - p(r))^n with U of the form above: the powers (C - p)^m, m <= n, carried beside it, mend one
  another by the binomial theorem, since C - p' = (C - p) + (p - p'). With n = 2 this is the one-pass variance (Chan,
  Golub & LeVeque 1979).
- by starting again, if F runs over the elements that equal the extremum r: when r changes, none seen before does.

Guards against states that are still empty are in `guards`, proofs in `proofs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ...dsl.records import dataclass
from ..cascade import Cascade, Refusal, State
from ..options import RUNNING_SCALE
from ..region import conjuncts
from ..remarks import Remarks
from ..tensor_ir import Graph, Node, Reduce, walk

if TYPE_CHECKING:
    from .repairs import Unfit

# `repairs` and `refusals` bring sympy along, which takes half a second to import: only what needs them does
CARRIED_REDUCTIONS = frozenset({"sum", "max", "min", "prod", "any", "all"})


@dataclass(frozen=True)
class Rules:
    """What derive may take as given: required conditions, the extent of each axis, options switched on by name."""

    facts: tuple[Node, ...] = ()
    extents: tuple[tuple[str, Node], ...] = ()
    named: tuple[str, ...] = ()


PLAIN = Rules()


def rules_of(graph: Graph, named: tuple[str, ...] = ()) -> Rules:
    """What `require` states and what the axes are."""
    facts = (p for c in graph.checks if c.kind == "require" for p in conjuncts(c.condition))
    return Rules(tuple(facts), tuple(graph.axes.items()), named)


def derive(
    reductions: Sequence[Reduce], remarks: Remarks, rules: Rules = PLAIN
) -> tuple[Cascade, tuple[Refusal, ...]]:
    """The longest single pass over `reductions`, which share one index set and stand in dependency order.

    A reduction that cannot join (and whatever reads it) is left out with a `Refusal`; the caller gives it a later pass. A
    matrix repair adds states that the text does not have.
    """
    names = _names(reductions)
    states: list[State] = []
    refused: list[Refusal] = []
    for red in reductions:
        if any(s.reduction is red for s in states):
            continue
        first = next((r for r in refused if r.reduction in walk(red.args)), None)
        if first is not None:
            from .refusals import blocked

            refused.append(Refusal(red, blocked(names[first.reduction])))
            continue
        result = _joined(red, names[red], tuple((s.reduction, s.name) for s in states), rules)
        if isinstance(result, Refusal):
            refused.append(result)
            remarks.add("missed", "derive", "not-one-pass", f"{names[red]}: {result.reason}", red.span)
        else:
            here = [
                replace(s, span=red.span) for s in result
            ]  # what is remembered may come from another text
            states += here
            _remark_states(here, remarks)
    return Cascade(reductions[0].bound, tuple(states)), tuple(refused)


def joins(red: Reduce, rules: Rules = PLAIN) -> bool:
    """Can `red` be computed in one pass with every reduction over its set that it reads?"""
    group = [n for n in walk([red]) if isinstance(n, Reduce) and n.bound == red.bound]
    return not derive(group, Remarks(), rules)[1]


def _names(reductions: Iterable[Reduce]) -> dict[Node, str]:
    """`max_n`, `sum_n`, `sum_n_2`: by function and axis, numbered in dependency order."""
    names: dict[Node, str] = {}
    for r in reductions:
        stem = f"{r.fn}_{'_'.join(r.bound)}"
        count = sum(n == stem or n.startswith(stem + "_") for n in names.values())
        names[r] = stem if not count else f"{stem}_{count + 1}"
    return names


def _remark_states(states: Sequence[State], remarks: Remarks) -> None:
    for s in states:
        if s.moved is None:
            continue
        how = f"; repair {s.repair_text}" if s.repair_text else ""
        remarks.add(
            "applied", "derive", "repaired-state",
            f"{s.name} is carried through the pass that computes {', '.join(s.upstream)}{how}",
            s.span, states=len(s.upstream),
        )  # fmt: skip
        if s.kind != "restart":
            remarks.add(
                "note", "derive", "reassociated",
                f"{s.name} is summed in another order than written: equal over the reals, not bit for bit",
                s.span,
            )  # fmt: skip


@lru_cache(maxsize=1024)
def _joined(
    red: Reduce, name: str, earlier: tuple[tuple[Reduce, str], ...], rules: Rules
) -> tuple[State, ...] | Refusal:
    """The states for one reduction, given those already in the pass. Memoised: groupings meet the same reductions again."""
    joined: dict[Node, str] = dict(earlier)
    reads = [n for n in walk([red.body]) if n in joined]
    condition = [p for p in conjuncts(red.predicate) if any(n in joined for n in walk([p]))]
    if not reads and not condition:
        return (State(name, red, red.predicate, red.body),)
    from .refusals import no_repair, unfinished_condition
    from .repairs import by_restart

    if red.fn not in CARRIED_REDUCTIONS:
        return Refusal(red, no_repair(red, reads or condition, joined))
    if condition:
        found = by_restart(red, name, joined, condition) if not reads else None
        return (found,) if found is not None else unfinished_condition(red, condition[0], joined)
    return _repaired(red, name, joined, rules)


def _repaired(
    red: Reduce, name: str, joined: Mapping[Node, str], rules: Rules
) -> tuple[State, ...] | Refusal:
    from .algebra import Untranslatable
    from .refusals import no_formula, no_repair, no_split
    from .repairs import Given, Setting, Unfit, by_factor, by_matrix, by_summand

    given = Given(rules.facts, dict(rules.extents), RUNNING_SCALE in rules.named)
    try:
        setting = Setting(red, name, joined, given)
    except Untranslatable as why:
        return no_formula(red, why, joined)
    ways = (by_summand, by_factor) if red.fn in ("max", "min") else (by_factor, by_matrix)
    reasons: list[Unfit] = []
    for way in ways if red.fn in ("sum", "max", "min") else ():
        found = way(setting)
        if not isinstance(found, Unfit):
            return (*setting.count_states(joined), *found)
        reasons.append(found)
    if not reasons:
        return Refusal(red, no_repair(red, [n for n in walk([red.body]) if n in joined], joined))
    return no_split(setting, reasons)
