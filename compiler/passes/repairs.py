"""The repairs of derive: each looks at one contribution and answers the states that carry it, or why it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as with_fields
from itertools import product as ranges
from math import comb
from typing import Any

import numpy as np
import sympy as sp

from ...dsl.records import dataclass
from ..cascade import Exponent, Obligation, State, identity
from ..region import conjuncts
from ..tensor_ir import Apply, Cast, Node, Reduce, apply, const, reduce, replace, walk
from .algebra import (
    Formula,
    chain,
    factors_of,
    never_negative,
    parted_factor,
    parted_product,
    parted_sum,
    ratio,
    to_node,
)
from .formula_values import Arithmetic, function_of
from .guards import EMPTY, extremum, harmed, reader
from .proofs import equal

LARGEST_MATRIX = 8
HIGHEST_POWER = 3
FLOAT64 = Arithmetic(np.float64, np)


@dataclass(frozen=True)
class Unfit:
    """Why a repair does not fit. `obligation` is the one that failed, if one did."""

    why: str
    obligation: Obligation | None = None


@dataclass(frozen=True)
class Given:
    """What may be taken as given: required conditions, the extent of each axis, whether roundings count as exact."""

    facts: tuple[Node, ...]
    extents: Mapping[str, Node]
    rounds: bool


class Setting:
    """One reduction to be carried over the states `joined` (reduction to name) of the pass so far, and its formula.

    Raises `Untranslatable` where it has none.
    """

    def __init__(self, red: Reduce, name: str, joined: Mapping[Node, str], given: Given) -> None:
        means = running_means(red, joined, given.extents)
        self.red, self.name, self.joined = red, name, dict(joined)
        self.counts = dict.fromkeys(q.args[1] for q in means.values())
        for count in self.counts:
            self.joined.setdefault(count, f"count_{'_'.join(red.bound)}")
        self.body = replace([red.body], means.get)[0]
        self.formula = Formula(self.body, self.joined, frozenset(red.bound), given.facts, given.rounds)
        self.moving = set(self.formula.moving)
        self.varying = set(self.formula.varying)
        self.primed = {s: sp.Symbol(f"{s}'", real=True) for s in self.formula.moving}
        self.zero_harms = harmed(self.body)
        self.nodes: dict[Any, Node] = {s: n for n, s in self.formula.opaque.items()}
        self.nodes |= {s: n for n, s in self.formula.references.items()}
        self.nodes |= {self.formula.states[x]: n for n, x in self.joined.items() if x in self.formula.states}

    @property
    def upstream(self) -> tuple[str, ...]:
        below = set(walk([self.body]))
        return tuple(name for n, name in self.joined.items() if n in below)

    def read(self, n: Node, moment: str = "new", guard: bool = True) -> Node:
        """A node of the text over the carried states; means are taken over the elements seen so far."""
        return reader(self.joined, "new" if moment == "new" else "old", guard, self.zero_harms)(n)

    def count_states(self, known: Mapping[Node, str]) -> tuple[State, ...]:
        """The counts that running means need and that no state of the pass has yet."""
        missing = [n for n in self.counts if n not in known]
        return tuple(State(self.joined[n], n, None, n.body) for n in missing if isinstance(n, Reduce))

    def environment(self, old_guarded: bool) -> dict[Any, Node]:
        """Symbols as nodes: r is the old state, r' the new one, opaque symbols what they stand for."""
        env: dict[Any, Node] = {}
        for s, n in self.nodes.items():
            if s in self.primed:
                env[s] = self.read(n, "old", old_guarded)
                env[self.primed[s]] = self.read(n)
            else:
                env[s] = n
        return env

    def emit(self, e: Any) -> Node:
        """A formula over old and new states as nodes; a factor reads old states plainly where an empty one does no harm.

        An infinite extremum times 0 is NaN, so the factors of one must not vanish either.
        """
        plain, guarded = self.environment(False), self.environment(True)
        nonzero = self.red.fn != "sum"
        if all(self.harmless(f, nonzero) for f in sp.Mul.make_args(e)):
            return to_node(e, plain, self.red)
        parts = [
            to_node(f, plain if self.harmless(f, nonzero) else guarded, self.red) for f in sp.Mul.make_args(e)
        ]
        return chain("mul", parts)

    def reference(self, e: Any, moment: str, guard: bool = True) -> Node:
        """A formula of states only at one moment, in the text's own terms where it has them."""
        env = {
            f: self.read(n, moment, guard)
            for f, n in self.formula.texts.items()
            if not n.axes & self.formula.bound
        }
        env |= {s: self.read(n, moment, guard) if s in self.primed else n for s, n in self.nodes.items()}
        return to_node(e, env, self.red)

    def harmless(self, e: Any, nonzero: bool = False) -> bool:
        """Is e finite in IEEE arithmetic where the old states are still empty, whatever finite the new ones are?"""
        old = [s for s in self.formula.moving if s in e.free_symbols]
        others = sorted(e.free_symbols - set(old), key=str)
        f = function_of([*old, *others], e, FLOAT64)
        starts = [np.float64(self.start(s)) for s in old]
        points = [[np.float64(v) for v in p] for p in sample_points(others)]
        with np.errstate(all="ignore"):
            values = [f(*starts, *p) for p in points]
        return all(np.isfinite(v) and not (nonzero and v == 0) for v in values)

    def start(self, s: Any) -> float:
        n = self.nodes[s]
        fn = extremum(n, self.joined) or (n.fn if isinstance(n, Reduce) else None)
        return EMPTY.get(fn, 0.5) if fn else 0.5


def sample_points(symbols: Sequence[Any]) -> Iterator[list[float]]:
    """Finite values of either sign, positive for symbols known to be."""
    for x in (-7.25, 1.5, 5.25):
        values = [x + i for i in range(len(symbols))]
        yield [abs(v) if s.is_positive else v for s, v in zip(symbols, values, strict=True)]


def _state(s: Setting, **fields: Any) -> State:
    """What all repairs share."""
    f = s.formula
    return State(
        name=s.name, reduction=s.red, predicate=s.red.predicate, g=s.read(s.body), upstream=s.upstream,
        guarded=tuple(f.guarded), symbols=f.symbols(), g_text=str(f.expr), exponents=tuple(exponents(s)), **fields,
    )  # fmt: skip


# ---------------------------------------------------------------- one number


def by_factor(s: Setting) -> tuple[State, ...] | Unfit:
    """g(r, c) = G(c)·H(r): t·H(r')/H(r)"""
    parts = parted_product(s.formula.expr, s.moving, s.varying)
    if parts is None:
        return Unfit("its terms do not split into a factor of the element and a factor of the states")
    g, h = parts
    if s.red.fn != "sum" and not _positive(h, s):
        return Unfit("sign")
    if any(not _never_zero(s.nodes[b]) for b in _multiplied(h, s)):
        return Unfit("zero")
    s.zero_harms |= {n for b in _multiplied(h, s) for n in walk([s.nodes[b]]) if n in s.joined}
    new = h.xreplace(s.primed)
    repair = ratio(new, h)
    t, y = sp.symbols("t y", real=True)
    obligations = (
        Obligation("separable", f"{s.formula.expr} == ({g})*({h})", "proved", "by form: every factor is of one side"),
        equal("repair", s.formula.expr * repair, s.formula.expr.xreplace(s.primed)),
        _scales(s.red.fn, repair) if s.red.fn != "sum" else equal("commutes", (t + y) * repair, t * repair + y * repair),
        _merges(repair, s),
    )  # fmt: skip
    failed = next((o for o in obligations if o.status != "proved"), None)
    if failed is not None:
        return Unfit(f"the obligation `{failed.name}` is {failed.status}", failed)
    factor = s.emit(repair)
    return (
        _state(
            s, moved=apply("mul", _old(s), factor), repair=factor, kind="factor", h_text=str(h),
            absorbs=_absorbing(s) if s.red.fn == "sum" else None, repair_text=str(repair), obligations=obligations,
        ),
    )  # fmt: skip


def by_summand(s: Setting) -> tuple[State, ...] | Unfit:
    """g(r, c) = G(c) + H(r), for a maximum or minimum: t + H(r') - H(r)"""
    parts = parted_sum(s.formula.expr, s.moving, s.varying)
    if parts is None:
        return Unfit("its terms do not split into a summand of the element and a summand of the states")
    g, h = parts
    repair = sp.expand_mul(h.xreplace(s.primed) - h)
    fn = s.red.fn
    obligations = (
        Obligation("separable", f"{s.formula.expr} == ({g}) + ({h})", "proved", "by form: every term is of one side"),
        equal("repair", s.formula.expr + repair, s.formula.expr.xreplace(s.primed)),
        Obligation("commutes", f"{fn}(t, y) + k == {fn}(t + k, y + k)", "proved", "k is free of the element"),
        equal("merge", repair.xreplace(_steps(s)[0]) + repair.xreplace(_steps(s)[1]), repair.xreplace(_steps(s)[2])),
    )  # fmt: skip
    failed = next((o for o in obligations if o.status != "proved"), None)
    if failed is not None:
        return Unfit(f"the obligation `{failed.name}` is {failed.status}", failed)
    shift = s.emit(repair)
    return (
        _state(
            s, moved=apply("add", _old(s), shift), repair=shift, kind="summand", h_text=str(h),
            repair_text=str(repair), obligations=obligations,
        ),
    )  # fmt: skip


def _old(s: Setting) -> Node:
    return State(s.name, s.red, None, s.red.body).old


def _positive(h: Any, s: Setting) -> bool:
    """Is the factor of the states positive, so that a maximum may be taken before it?"""
    for base, power in factors_of(h):
        if base.is_number or base.is_positive or (power.is_integer and power.is_even):
            continue
        n = s.nodes.get(base)
        if n is None or not never_negative(n):
            return False
    return True


def _multiplied(h: Any, s: Setting) -> list[Any]:
    """States that h has as factors with a positive power: where one is 0, what it multiplied is lost."""
    return [b for b, power in factors_of(h) if b in s.primed and not power.could_extract_minus_sign()]


def _never_zero(n: Node) -> bool:
    """Is a state above 0 once it has an element: a sum of exponentials."""
    return (
        isinstance(n, Reduce) and n.fn == "sum" and isinstance(n.body, Apply) and n.body.op in ("exp", "exp2")
    )


def _scales(fn: str, repair: Any) -> Obligation:
    how = f"{repair} is positive by form and free of the element"
    return Obligation("commutes", f"{fn}(t, y)*k == {fn}(t*k, y*k) for k > 0", "proved", how)


def _steps(s: Setting) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Renamings of (r, r') to (r, r1), (r1, r') and (r, r')."""
    middle = {a: sp.Symbol(f"{a}_1", real=True) for a in s.formula.moving}
    return {s.primed[a]: m for a, m in middle.items()}, dict(middle), {}


def _merges(repair: Any, s: Setting) -> Obligation:
    """Mended to r1 and then to r' is mended to r': parts of a set may be mended apart and in any order."""
    first, second, both = _steps(s)
    return equal("merge", repair.xreplace(first) * repair.xreplace(second), repair.xreplace(both))


def _absorbing(s: Setting) -> Node | None:
    """An opaque x of the element with g(x := -inf) == 0 for every finite state, in IEEE arithmetic and not as a limit:
    exp(c)·c at -inf tends to 0 and is NaN on a machine."""
    for node, symbol in s.formula.opaque.items():
        if not node.axes & s.formula.bound or not node.dtype.is_float:
            continue
        others = sorted(s.formula.expr.free_symbols - {symbol}, key=str)
        f = function_of([symbol, *others], s.formula.expr, FLOAT64)
        with np.errstate(all="ignore"):
            values = [f(np.float64(-math.inf), *map(np.float64, p)) for p in sample_points(others)]
        if all(v == 0 for v in values):
            return node
    return None


# ---------------------------------------------------------------- a matrix


@dataclass(frozen=True)
class _Shifted:
    """(c + h)^power with c of the elements and h of the states."""

    base: Any
    h: Any
    power: int


def by_matrix(s: Setting) -> tuple[State, ...] | Unfit:
    """g = U·Π (C + H)^n: the lower powers are carried too, (C + H')^m = Σ_j binom(m, j)·(H' - H)^j·(C + H)^(m - j)"""
    found = _shifted_powers(s)
    if isinstance(found, Unfit):
        return found
    unit, unit_h, shifted = found
    tops = tuple(x.power for x in shifted)
    if math.prod(n + 1 for n in tops) > LARGEST_MATRIX:
        return Unfit(f"it would take more than {LARGEST_MATRIX} sums carried together")
    powers = sorted(ranges(*(range(n + 1) for n in tops)), key=sum)
    rows = {m: _row_holds(s, shifted, m) for m in powers}
    common = _mixing(s, unit, unit_h, shifted)
    failed = next((o for o in (*rows.values(), *common) if o.status != "proved"), None)
    if failed is not None:
        return Unfit(f"the obligation `{failed.name}` is {failed.status}", failed)
    known = dict(s.joined)
    moments = {m: _moment(s, unit, shifted, m) for m in powers}
    for m, red in moments.items():
        s.joined.setdefault(red, s.name if m == tops else f"{s.name}_{''.join(map(str, m))}")
    scale = ratio(unit_h.xreplace(s.primed), unit_h)
    return tuple(
        _carried_moment(s, m, moments, shifted, scale, (rows[m], *common))
        for m in powers
        if moments[m] not in known
    )


def _shifted_powers(s: Setting) -> tuple[Any, Any, list[_Shifted]] | Unfit:
    """g as U·Π (C + H)^n: U, the part of U that is of the states, and the powers."""
    unit = unit_h = sp.Integer(1)
    shifted: list[_Shifted] = []
    for base, power in factors_of(s.formula.expr):
        part = parted_factor(base, power, s.moving, s.varying)
        if part is not None:
            unit, unit_h = unit * base**power, unit_h * part[1]
            continue
        sides = parted_sum(base, s.moving, s.varying) if base.is_Add else None
        if sides is None or not (power.is_Integer and 0 < power <= HIGHEST_POWER):
            return Unfit(f"`{base**power}` is neither of one side nor a small power of a difference of both")
        shifted.append(_Shifted(base, sides[1], int(power)))
    return unit, unit_h, shifted


def _row_holds(s: Setting, shifted: list[_Shifted], m: tuple[int, ...]) -> Obligation:
    """Π (C + H')^m, what an element adds to the mended sum, is the row of the matrix times what it added before."""
    terms = [
        sp.Integer(math.prod(comb(a, b) for a, b in zip(m, j, strict=True)))
        * sp.Mul(*(_shift(x, s) ** k for x, k in zip(shifted, j, strict=True)))
        * sp.Mul(*(x.base ** (a - k) for x, a, k in zip(shifted, m, j, strict=True)))
        for j in ranges(*(range(k + 1) for k in m))
    ]
    after = sp.Mul(*(x.base.xreplace(s.primed) ** k for x, k in zip(shifted, m, strict=True)))
    return equal("repair", _as_written(terms), after)


def _mixing(s: Setting, unit: Any, unit_h: Any, shifted: list[_Shifted]) -> tuple[Obligation, ...]:
    """The matrix is linear in the sums by construction; mending twice is mending once, for its shifts add up; and a factor
    of the states alone is mended as any factor is."""
    first, second, both = _steps(s)
    linear = Obligation(
        "commutes", "A·(t + y) == A·t + A·y", "proved", "by form: A is a matrix, free of the element"
    )
    added = [
        equal(
            "merge",
            _as_written([_shift(x, s).xreplace(first), _shift(x, s).xreplace(second)]),
            _shift(x, s).xreplace(both),
        )
        for x in shifted
    ]
    scale = ratio(unit_h.xreplace(s.primed), unit_h)
    if scale == 1:
        return (linear, *added)
    return (equal("repair", unit * scale, unit.xreplace(s.primed)), linear, *added, _merges(scale, s))


def _as_written(terms: list[Any]) -> Any:
    """A sum whose terms do not cancel before anyone has seen them."""
    return sp.Add(*terms, evaluate=False) if len(terms) > 1 else terms[0]


def _shift(x: _Shifted, s: Setting) -> Any:
    """H(r') - H(r)"""
    return x.h.xreplace(s.primed) - x.h


def _moved_by(x: _Shifted, s: Setting) -> Node:
    """H(r') - H(r) as the difference of the two values that elements were compared with: nothing is added in between, so
    that it is exact where they are close, however great they are."""
    old = s.reference(-x.h, "old", not s.harmless(x.h))
    return apply("sub", old, s.reference(-x.h, "new"))


def _moment(s: Setting, unit: Any, shifted: list[_Shifted], m: tuple[int, ...]) -> Reduce:
    """The sum of U·Π (C + H)^m as a node of the text's kind."""
    if m == tuple(x.power for x in shifted):
        return s.red
    env = {**s.nodes, **s.formula.texts}
    body = to_node(unit * sp.Mul(*(x.base**k for x, k in zip(shifted, m, strict=True))), env, s.red)
    out = reduce("sum", s.red.bound, body, s.red.predicate, s.red.span)
    assert isinstance(out, Reduce)
    return out


def _carried_moment(
    s: Setting,
    m: tuple[int, ...],
    moments: Mapping[tuple[int, ...], Reduce],
    shifted: list[_Shifted],
    scale: Any,
    obligations: tuple[Obligation, ...],
) -> State:
    """One row of the matrix: T_m' = h_U·Σ_j Π binom(m, j)·(H' - H)^j·T_(m - j)"""
    red = moments[m]
    name = s.joined[red]
    plain = State(name, red, red.predicate, s.read(red.body))
    if scale == 1 and not any(m):
        return plain
    terms = [_term(s, j, m, moments, shifted) for j in sorted(ranges(*(range(k + 1) for k in m)), key=sum)]
    moved = chain("add", terms)
    if scale != 1:
        moved = apply("mul", moved, s.emit(scale))
    whole = m == tuple(x.power for x in shifted)
    state = _state(
        s, moved=moved, kind="matrix", obligations=obligations, repair_text=_row_text(s, m, shifted, scale)
    )
    return state if whole else _renamed(state, plain)


def _renamed(state: State, like: State) -> State:
    """The same derivation for a lower power."""
    return with_fields(
        state, name=like.name, reduction=like.reduction, predicate=like.predicate, g=like.g, g_text=""
    )


def _term(
    s: Setting,
    j: tuple[int, ...],
    m: tuple[int, ...],
    moments: Mapping[tuple[int, ...], Reduce],
    shifted: list[_Shifted],
) -> Node:
    red = moments[tuple(a - b for a, b in zip(m, j, strict=True))]
    value: Node = State(s.joined[red], red, None, red.body).old
    shift = sp.Integer(math.prod(comb(a, b) for a, b in zip(m, j, strict=True)))
    factors = [_moved_by(x, s) for x, k in zip(shifted, j, strict=True) for _ in range(k)]
    if shift != 1:
        factors.insert(0, const(float(shift), s.red.dtype))
    return chain("mul", [*factors, value])


def _row_text(s: Setting, m: tuple[int, ...], shifted: list[_Shifted], scale: Any) -> str:
    """The row as a formula; T_m are the sums carried together."""
    row = sp.Integer(0)
    for j in ranges(*(range(k + 1) for k in m)):
        rest = "_".join(str(a - b) for a, b in zip(m, j, strict=True))
        weight = math.prod(comb(a, b) for a, b in zip(m, j, strict=True))
        row += (
            weight
            * sp.Mul(*(_shift(x, s) ** k for x, k in zip(shifted, j, strict=True)))
            * sp.Symbol(f"T_{rest}")
        )
    return str(scale * row)


def running_means(red: Reduce, joined: Mapping[Node, str], extents: Mapping[str, Node]) -> dict[Node, Node]:
    """Quotients sum_j(x) / (extent of j) in `red` -> sum_j(x) / sum_j(1): the same at the end, and near it on the way.

    Any values may be read on the way, since the repair undoes them; those far from the final ones would cost digits.
    """
    found: dict[Node, Node] = {}
    for n in walk([red.body]):
        match n:
            case Apply(op="div", operands=(Reduce(fn="sum", predicate=None) as total, size)):
                if total in joined and _elements(size, red.bound, extents):
                    count = reduce("sum", red.bound, const(1.0, total.dtype))
                    found[n] = apply("div", total, count, span=n.span)
    return found


def _elements(size: Node, bound: tuple[str, ...], extents: Mapping[str, Node]) -> bool:
    """Is this the number of elements of the set: the product of its extents?"""
    if not all(a in extents for a in bound):
        return False
    while isinstance(size, Cast):
        size = size.operand
    total = extents[bound[0]]
    for a in bound[1:]:
        total = apply("mul", total, extents[a])
    return size is total


# ---------------------------------------------------------------- starting again


def by_restart(red: Reduce, name: str, joined: Mapping[Node, str], reading: Sequence[Node]) -> State | None:
    """F over the elements x that equal the extremum r of all x: where r changes, no element seen before equals it."""
    if len(reading) != 1:
        return None
    best = _equals_best(reading[0])
    rest = [p for p in conjuncts(red.predicate) if p is not reading[0]]
    if best is None or best not in joined or set(conjuncts(best.predicate)) != set(rest):
        return None
    plain = reader(joined, "new", guard=False)
    old, new = (reader(joined, m, guard=False)(best) for m in ("old", "new"))
    same = apply("eq", new, old)
    if best.dtype.is_float:
        both = apply("and", apply("ne", new, new), apply("ne", old, old))
        same = apply("or", same, both)
    bare = State(name, red, red.predicate, red.body)
    nothing = const(identity(red), red.dtype)
    r = joined[best]
    obligation = Obligation(
        "restart", f"{r}' != {r} implies x != {r}' for every element x seen before", "proved",
        f"{r} is the {best.fn} of the same elements: x is on this side of {r}, and {r} of {r}'",
    )  # fmt: skip
    predicate = None if red.predicate is None else plain(red.predicate)
    return State(
        name=name, reduction=red, predicate=predicate, g=red.body, upstream=(r,),
        moved=apply("where", same, bare.old, nothing), kind="restart", repair_text=f"start again where {r}' != {r}",
        obligations=(obligation,),
    )  # fmt: skip


def _equals_best(condition: Node) -> Reduce | None:
    """`x == max_j x`, or that `or x != x`: the extremum."""
    match condition:
        case Apply(op="or", operands=(hit, Apply(op="ne", operands=(a, b)))) if a is b:
            best = _equals_best(hit)
            return best if best is not None and best.body is a else None
        case Apply(op="eq", operands=(x, Reduce(fn="max" | "min") as best)) if best.body is x:
            return best
        case Apply(op="eq", operands=(Reduce(fn="max" | "min") as best, x)) if best.body is x:
            return best
    return None


# ---------------------------------------------------------------- numeric safety


def exponents(s: Setting) -> Iterator[Exponent]:
    """Every exponential of the contribution whose argument reads a state, and what bounds the argument."""
    for n in s.formula.texts.values():
        if isinstance(n, Apply) and n.op in ("exp", "exp2"):
            inner = s.formula.texts_of(n.operands[0])
            yield Exponent(str(inner), *_bounded(inner, s))


def _bounded(e: Any, s: Setting) -> tuple[bool, str]:
    """e == a·(c - r) with a > 0 and r a maximum that c takes part in: never positive."""
    e = sp.expand_mul(e)
    for r in s.formula.moving:
        best = s.nodes[r]
        members = _members(best, s)
        for c in members:
            a = e.coeff(c)
            if (a.is_positive or (a.is_number and a > 0)) and sp.expand(e - a * (c - r)) == 0:
                return True, f"{c} takes part in the maximum {r}"
    return False, "no maximum bounds it"


def _members(best: Node, s: Setting) -> list[Any]:
    """Symbols of elements that the running maximum `best` includes."""
    own = set(conjuncts(s.red.predicate))
    found = [n for n in walk([best]) if isinstance(n, Reduce) and n in s.joined and n.fn == "max"]
    inside = [n.body for n in found if set(conjuncts(n.predicate)) <= own]
    if extremum(best, s.joined) != "max":
        return []
    return [s.formula.opaque[n] for n in inside if n in s.formula.opaque]
