"""Why a reduction needs a pass of its own, in words for somebody who has not read about derivations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mpmath
import sympy as sp

from ..cascade import Obligation, Refusal
from ..options import RUNNING_SCALE
from ..spelling import spell
from ..tensor_ir import Node, Reduce, walk
from .algebra import ROUNDINGS, Untranslatable
from .proofs import evaluations
from .repairs import Setting, Unfit


def blocked(by: str) -> str:
    return f"it reads {by}, which needs a pass of its own"


def no_repair(red: Reduce, reads: Sequence[Node], joined: Mapping[Node, str]) -> str:
    return (
        f"`{red.fn}` of a value that changes with {_listed(reads, joined)}, which is not finished before the end of "
        f"the pass: no repair of a `{red.fn}` is known"
    )


def unfinished_condition(red: Reduce, condition: Node, joined: Mapping[Node, str]) -> Refusal:
    """A predicate that compares with an unfinished reduction."""
    reads = [n for n in walk([condition]) if n in joined]
    text = spell(condition, joined)
    reason = (
        f"its condition `{text}` reads {_listed(reads, joined)}, which is not finished before the end of the pass. "
        f"Whether an element takes part can change after it was seen: for example an element 0.5 is below a running value "
        f"of 0.9 and not below one of 0.4, and what was left out of a `{red.fn}` cannot be brought back"
    )
    return Refusal(red, reason)


def no_formula(red: Reduce, why: Untranslatable, joined: Mapping[Node, str]) -> Refusal:
    reads = [n for n in walk([why.node or red.body]) if n in joined]
    text = f"`{spell(why.node, joined)}`" if why.node is not None else f"`{why.op}`"
    if why.op in ROUNDINGS or why.op == "cast":
        return Refusal(
            red,
            f"{text} rounds a value that changes with {_listed(reads, joined)}, which is not finished before the end of the "
            f"pass: rounded with a scale that still changes it is another number. The option `{RUNNING_SCALE}` "
            "allows that",
        )
    if why.op in ("where", "lt", "le", "eq", "ne", "and", "or", "not"):
        return Refusal(
            red,
            f"{text} chooses by a comparison with {_listed(reads, joined)}, which is not finished before the end of the "
            "pass: an element already counted one way may have to be counted the other way",
        )
    return Refusal(
        red,
        f"{text} applies `{why.op}` to a value that changes with {_listed(reads, joined)}, which is not finished before "
        "the end of the pass: no repair of that is known",
    )


def no_split(s: Setting, reasons: Sequence[Unfit]) -> Refusal:
    """No repair fits: the term that blocks it, and numbers that show why."""
    failed = next((r.obligation for r in reasons if r.obligation is not None), None)
    names = _listed([n for n in walk([s.red.body]) if n in s.joined], s.joined)
    if failed is not None:
        return Refusal(
            s.red, f"the obligation `{failed.name}` of its repair is {failed.status}: {failed.how}", failed
        )
    if any(r.why == "sign" for r in reasons):
        return _sign(s, names)
    if any(r.why == "zero" for r in reasons):
        return Refusal(
            s.red,
            f"its terms are multiplied by {names}, which may be 0 on the way: what was summed then is 0 and cannot be "
            "brought back when that changes",
        )
    shown = _two_elements(s)
    text = spell(s.red.body, s.joined)
    reason = (
        f"`{text}` does not split into a part of the element and a part of {names}, so what was "
        f"{'summed' if s.red.fn == 'sum' else 'found'} with an old value of {names} cannot be mended when that changes"
    )
    if shown is None:
        return Refusal(s.red, reason)
    return Refusal(
        s.red, f"{reason}. {shown}", Obligation("separable", str(s.formula.expr), "refuted", shown)
    )


def _sign(s: Setting, names: str) -> Refusal:
    fn = s.red.fn
    shown = f"{fn}(1, 2) * -1 is {-2 if fn == 'max' else -1}, but {fn}(1 * -1, 2 * -1) is {-1 if fn == 'max' else -2}"
    reason = (
        f"the {'greatest' if fn == 'max' else 'least'} `{spell(s.red.body, s.joined)}` would be mended by a ratio of values "
        f"of {names}, which may change sign, and a negative factor turns a maximum into a minimum: {shown}"
    )
    return Refusal(s.red, reason, Obligation("commutes", f"{fn}(t, y)*k == {fn}(t*k, y*k)", "refuted", shown))


def _two_elements(s: Setting) -> str | None:
    """Two elements that one and the same change of the states changes by different factors (or summands)."""
    e = s.formula.expr
    other = {c: sp.Symbol(f"{c}_2", real=True) for c in s.varying}
    moved, second = e.subs(s.primed), e.subs(other)
    formulas = [e, moved, second, second.subs(s.primed)]
    names = sorted(set().union(*(f.free_symbols for f in formulas)), key=str)
    rising = dict.fromkeys(s.primed, 1.5) | dict.fromkeys(s.primed.values(), 3.0)  # as a maximum does
    for point, (a, a_new, b, b_new) in evaluations(formulas, names, rising):
        if 0 in (a, b):
            continue
        one, two = (a_new / a, b_new / b) if s.red.fn == "sum" else (a_new - a, b_new - b)
        if abs(one - two) > mpmath.mpf(10) ** -6:
            return _told(s, dict(zip(names, point, strict=True)), other, one, two)
    return None


def _told(s: Setting, at: Mapping[Any, Any], other: Mapping[Any, Any], one: Any, two: Any) -> str:
    words = {sym: spell(n, s.joined) if n not in s.joined else s.joined[n] for sym, n in s.nodes.items()}
    moves = [
        f"{words[r]} goes from {float(at[r]):.4g} to {float(at[p]):.4g}"
        for r, p in s.primed.items()
        if r in at
    ]
    first = ", ".join(f"{words[c]} = {float(at[c]):.4g}" for c in other if c in at)
    then = ", ".join(f"{words[c]} = {float(at[d]):.4g}" for c, d in other.items() if d in at)
    how = "is multiplied by" if s.red.fn == "sum" else "moves by"
    return (
        f"When {' and '.join(moves)}, the term with {first} {how} {float(one):.4g} and the one with {then} by "
        f"{float(two):.4g}: no single repair does both"
    )


def _listed(nodes: Sequence[Node], joined: Mapping[Node, str]) -> str:
    return ", ".join(dict.fromkeys(f"`{joined[n]}`" for n in nodes))
