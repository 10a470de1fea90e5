"""derive: cascaded reductions over one index set become one pass over it (DESIGN 4.3).

Let `r = R_j(x_j)` be finished only at the end of the pass and `t = F_j g(r, c_j)` depend on it. If g separates,
g(r, c) = G(c)·H(r) for F = sum (G(c) + H(r) for max and min), a partial t computed with an old r is mended when r becomes
r' by t·H(r')/H(r) (t + H(r') - H(r)), because that factor does not depend on c and F commutes with it. With
g = exp(x - r) this is the rescaling of online softmax (Milakov & Gimelshein, arXiv:1805.02867); nothing below knows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import sympy as sp

from ..cascade import Cascade, Obligation, Refusal, State
from ..remarks import Remarks
from ..tensor_ir import Carried, Node, Reduce, carried, replace, walk
from .algebra import Formula, Untranslatable, equal, to_node

CARRIED_REDUCTIONS = frozenset({"sum", "max", "min", "prod", "any", "all"})
REPAIRED_REDUCTIONS = frozenset({"sum", "max", "min"})


def derive(reductions: Sequence[Reduce], remarks: Remarks) -> tuple[Cascade, tuple[Refusal, ...]]:
    """The longest single pass over `reductions`, which share one index set and stand in dependency order.

    A reduction that cannot join (and whatever reads it) is left out with a `Refusal`; the caller gives it a later pass.
    """
    names = _names(reductions)
    states: list[State] = []
    refused: list[Refusal] = []
    for red in reductions:
        blocked = next((r for r in refused if r.reduction in walk(red.args)), None)
        if blocked is not None:
            refused.append(
                Refusal(red, f"it reads {names[blocked.reduction]}, which needs a pass of its own")
            )
            continue
        joined = {s.reduction: s.name for s in states}
        result = _state(red, names[red], tuple(joined.items()))
        if isinstance(result, Refusal):
            refused.append(result)
            remarks.add("missed", "derive", "not-one-pass", f"{names[red]}: {result.reason}", red.span)
        else:
            states.append(result)
            _remark_state(result, remarks)
    return Cascade(reductions[0].bound, tuple(states)), tuple(refused)


def _names(reductions: Iterable[Reduce]) -> dict[Node, str]:
    """`max_n`, `sum_n`, `sum_n_2`: by function and axis, numbered in dependency order."""
    names: dict[Node, str] = {}
    for r in reductions:
        stem = f"{r.fn}_{'_'.join(r.bound)}"
        count = sum(n == stem or n.startswith(stem + "_") for n in names.values())
        names[r] = stem if not count else f"{stem}_{count + 1}"
    return names


def _remark_state(s: State, remarks: Remarks) -> None:
    if s.repair is not None:
        remarks.add(
            "applied", "derive", "repaired-state",
            f"{s.name} is carried through the pass that computes {', '.join(s.upstream)}; repair {s.repair_text}",
            s.reduction.span, states=len(s.upstream),
        )  # fmt: skip
        remarks.add(
            "note", "derive", "reassociated",
            f"{s.name} is summed in another order than written: equal over the reals, not bit for bit",
            s.reduction.span,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def _state(red: Reduce, name: str, earlier: tuple[tuple[Node, str], ...]) -> State | Refusal:
    """The state for one reduction, given those already in the pass. Memoised: groupings meet the same reductions again."""
    joined = dict(earlier)
    upstream_nodes = [n for n in walk([red.body]) if n in joined]
    if red.fn not in CARRIED_REDUCTIONS:
        if upstream_nodes:
            return Refusal(red, f"{red.fn} of a value that depends on an unfinished reduction has no repair")
        return State(name, red, red.predicate, red.body)
    if red.predicate is not None and any(n in joined for n in walk([red.predicate])):
        return Refusal(red, "its condition reads a reduction that is not finished")
    if not upstream_nodes:
        return State(name, red, red.predicate, red.body)
    if red.fn not in REPAIRED_REDUCTIONS:
        return Refusal(red, f"{red.fn} of a value that depends on an unfinished reduction has no repair")
    g = replace([red.body], lambda n: carried(joined[n], "new", n.axes, n.dtype) if n in joined else None)[0]
    try:
        return _separate(red, name, g, joined)
    except Untranslatable as why:
        return Refusal(red, str(why))


def _separate(red: Reduce, name: str, g: Node, joined: dict[Node, str]) -> State | Refusal:
    """Prove that g separates, find H and the repair, discharge the obligations."""
    leaves = {n: n.name for n in walk([g]) if isinstance(n, Carried)}
    formula = Formula(g, leaves, frozenset(red.bound))
    states = list(formula.symbols.values())
    expr, at = formula.expr, _base_point(formula)
    additive = red.fn != "sum"
    fixed_c = {c: sp.Rational(1, 3) + i for i, c in enumerate(formula.varying)}
    g00, g_r, g_c = expr.subs({**at, **fixed_c}), expr.subs(fixed_c), expr.subs(at)
    left, right = (expr + g00, g_r + g_c) if additive else (expr * g00, g_r * g_c)
    obligations = [equal("separable", left, right)]
    if obligations[0].status != "proved":
        return Refusal(red, _not_separable(obligations[0], leaves), obligations[0])
    h = sp.simplify(g_r - g00) if additive else sp.simplify(sp.powsimp(g_r / g00))
    primed = {s: sp.Symbol(f"{s}'", real=True) for s in states}
    h_new = h.subs(primed)
    repair = sp.simplify(h_new - h) if additive else sp.simplify(sp.powsimp(h_new / h))
    obligations += _repair_obligations(expr, repair, primed, additive)
    open_ones = [o for o in obligations if o.status != "proved"]
    if open_ones:
        return Refusal(red, f"the obligation `{open_ones[0].name}` is {open_ones[0].status}", open_ones[0])
    env = _environment(formula, leaves, primed)
    return State(
        name=name, reduction=red, predicate=red.predicate, g=g,
        upstream=tuple(leaves.values()), guarded=tuple(formula.guarded),
        repair=to_node(repair, env, red), absorbs=None if additive else _absorbing(formula),
        guard_old=_breaks_when_empty(repair, formula, leaves),
        g_text=str(expr), h_text=str(h), repair_text=str(repair), obligations=tuple(obligations),
    )  # fmt: skip


def _base_point(formula: Formula) -> dict[Any, Any]:
    """States at 0, or at 1 where the formula has no finite value or vanishes there."""
    states = list(formula.symbols.values())
    zero = {s: sp.Integer(0) for s in states}
    value = formula.expr.subs(zero)
    bad = value.has(sp.zoo, sp.nan, sp.oo, -sp.oo) or value == 0
    return {s: sp.Integer(1) for s in states} if bad else zero


def _not_separable(o: Obligation, leaves: dict[Node, str]) -> str:
    names = ", ".join(dict.fromkeys(leaves.values()))
    if o.status == "refuted":
        return f"its terms do not split into a part of {names} and a part of the element: {o.how}"
    return f"it could not be shown that its terms split into a part of {names} and a part of the element"


def _repair_obligations(expr: Any, repair: Any, primed: dict[Any, Any], additive: bool) -> list[Obligation]:
    """h(g(r, c), r, r') == g(r', c), and h commutes with the reduction."""
    t, y = sp.symbols("t y", real=True)
    h = (lambda x: x + repair) if additive else (lambda x: x * repair)
    moved = equal("repair", h(expr), expr.subs(primed))
    if additive:
        # max(t, y) + k == max(t + k, y + k) for every k: monotone by form, and k is free of the element by construction
        return [
            moved,
            Obligation(
                "commutes", "max(t, y) + k == max(t + k, y + k)", "proved", "k is free of the element"
            ),
        ]
    return [moved, equal("commutes", h(t + y), h(t) + h(y))]


def _environment(formula: Formula, leaves: dict[Node, str], primed: dict[Any, Any]) -> dict[Any, Node]:
    env: dict[Any, Node] = {symbol: node for node, symbol in formula.opaque.items()}
    for node, name in leaves.items():
        symbol = formula.symbols[name]
        env[symbol] = carried(name, "old", node.axes, node.dtype)
        env[primed[symbol]] = carried(name, "new", node.axes, node.dtype)
    return env


def _absorbing(formula: Formula) -> Node | None:
    """An opaque x of the element with g(x := -inf) == 0 for every finite state, in IEEE arithmetic and not as a limit:
    exp(c)·c at -inf tends to 0 and is NaN on a machine."""
    for node, symbol in formula.opaque.items():
        if not node.axes & formula.bound:
            continue
        others = sorted(formula.expr.free_symbols - {symbol}, key=str)
        f = sp.lambdify([symbol, *others], formula.expr, "numpy")
        with np.errstate(all="ignore"):
            values = [
                f(np.float64(-math.inf), *(np.float64(x + i) for i in range(len(others))))
                for x in (-7.25, 1.5, 5.25)
            ]
        if all(v == 0 for v in values):
            return node
    return None


def _breaks_when_empty(repair: Any, formula: Formula, leaves: dict[Node, str]) -> bool:
    """Is the repair infinite or NaN (IEEE) where an old extremum is still infinite, for some finite new states?"""
    empty = {"max": -math.inf, "min": math.inf}
    old = [formula.symbols[name] for name in leaves.values()]
    starts = [next((v for fn, v in empty.items() if name.startswith(fn)), 0.0) for name in leaves.values()]
    others = sorted(repair.free_symbols - set(old), key=str)
    f = sp.lambdify([*old, *others], repair, "numpy")
    with np.errstate(all="ignore"):
        values = [
            f(*map(np.float64, starts), *(np.float64(x + i) for i in range(len(others))))
            for x in (-7.25, 1.5, 5.25)
        ]
    return not all(np.isfinite(v) for v in values)
