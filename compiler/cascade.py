"""Cascades: reductions over one index set that run as one pass, each with the repair that keeps it right while those it
depends on still change. The result of derive, read by lower and by `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .tensor_ir import Node, Reduce

Status = Literal["proved", "refuted", "unknown"]


@dataclass(frozen=True)
class Obligation:
    """One equation a derivation rests on. `how` says by what it was proved, or gives the refuting point."""

    name: str
    formula: str
    status: Status
    how: str


@dataclass(frozen=True)
class State:
    """A reduction t = F_j g(r, c_j) carried through the pass.

    name        the carried name
    reduction   the node it stands for (its dtype and axes are the state's)
    predicate   the set: elements where it is false do not take part
    g           the contribution of one element; upstream states appear as `Carried(name, "new")`
    upstream    names of the states g reads
    guarded     those of them that g reads through the text's own guard against -inf
    repair      t is repaired by `t·repair` (sum) or `t + repair` (max, min) over `Carried(r, "old")` and `(r, "new")`;
                None where g reads no state
    absorbs     a subexpression x of g with g(x := -inf) == 0 in IEEE arithmetic for every finite state: the predicate may
                stand on x, and be shared with a maximum of x
    guard_old   the repair is not finite for an empty old state, so that one is read through a guard as well
    """

    name: str
    reduction: Reduce
    predicate: Node | None
    g: Node
    upstream: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    repair: Node | None = None
    absorbs: Node | None = None
    guard_old: bool = False
    g_text: str = ""
    h_text: str = ""
    repair_text: str = ""
    obligations: tuple[Obligation, ...] = ()


@dataclass(frozen=True)
class Cascade:
    """`states` in topological order, all reduced over the index set `bound`."""

    bound: tuple[str, ...]
    states: tuple[State, ...]

    def state(self, name: str) -> State:
        return next(s for s in self.states if s.name == name)


@dataclass(frozen=True)
class Refusal:
    """Why a reduction cannot join a pass: the blocking reduction, the reason in words, the counterexample if any."""

    reduction: Reduce
    reason: str
    obligation: Obligation | None = None
