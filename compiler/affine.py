"""Intervals of integer expressions, as expressions: what an index can reach, given ranges of axes and guards.

A `Linear` is a sum of coefficient · atom + constant, atoms being nodes that are not sums. The ends of an interval are
`Linear`s over extents and scalars, so that they can be compared when a program is compiled where that is decided by form,
and evaluated at the call where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import reduce as fold
from itertools import islice, product

from ..dsl.records import dataclass
from ..dsl.types import DType
from .tensor_ir import Apply, Cast, Const, Extent, Index, Node, Read, Reduce, apply, const, walk

CANDIDATES = 4
"""Bounds kept of one expression: each is valid on its own, more of them make the test sharper."""


@dataclass(frozen=True)
class Linear:
    """Σ coefficient · atom + constant."""

    terms: Mapping[Node, int]
    constant: int = 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """self + factor · other"""
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            terms[atom] = terms.get(atom, 0) + factor * c
        return Linear({a: c for a, c in terms.items() if c}, self.constant + factor * other.constant)

    def times(self, factor: int) -> Linear:
        return Linear({}).plus(self, factor)

    def node(self) -> Node:
        """The sum as an expression, positive terms first."""
        out: Node | None = None
        for atom, c in sorted(self.terms.items(), key=lambda t: t[1] < 0):
            term = atom if abs(c) == 1 else apply("mul", const(abs(c), DType.I64), atom)
            signed = term if c > 0 else apply("neg", term)
            out = signed if out is None else apply("add" if c > 0 else "sub", out, term)
        if out is None:
            return const(self.constant, DType.I64)
        if not self.constant:
            return out
        return apply("add" if self.constant > 0 else "sub", out, const(abs(self.constant), DType.I64))


ZERO = Linear({})
ONE = Linear({}, 1)


def whole(n: Node) -> Linear:
    """An expression as one atom."""
    return Linear({n: 1})


@dataclass(frozen=True)
class Range:
    """Lower and upper bounds, each of them valid; none where nothing is known."""

    lo: tuple[Linear, ...] = ()
    hi: tuple[Linear, ...] = ()


UNKNOWN = Range()


def uniform(n: Node) -> bool:
    """Made of extents, scalars and constants only."""
    return not n.axes and not any(isinstance(m, Read | Reduce) for m in walk([n]))


def never_negative(n: Node) -> bool:
    """Is a uniform expression >= 0 by its form. Extents are."""
    good: set[Node] = set()
    for m in walk([n]):
        match m:
            case Extent() | Cast(dtype=DType.I64, operand=Extent()):
                good.add(m)
            case Const(value=v) if v >= 0:
                good.add(m)
            case Apply(op="add" | "mul" | "floordiv" | "mod" | "min" | "max") if all(
                a in good for a in m.operands
            ):
                good.add(m)
    return n in good


def at_least(a: Linear, low: int, nonempty: frozenset[Node], splits: int = 6) -> bool:
    """Is `a >= low` by its form; the extents of `nonempty` are at least 1, and `//` has no divisor of 0.

    `min`, `max` and `//` are taken apart, at most `splits` of them.
    """
    least = a.constant
    for atom, c in a.terms.items():
        if splits and isinstance(atom, Apply) and atom.op in ("min", "max", "floordiv"):
            return any(
                all(at_least(part, low, nonempty, splits - 1) for part in way)
                for way in _ways(a, atom, c, nonempty, splits - 1)
            )
        if c < 0 or not never_negative(atom):
            return False
        least += c * (atom in nonempty)
    return least >= low


def _ways(a: Linear, atom: Apply, c: int, nonempty: frozenset[Node], splits: int) -> list[list[Linear]]:
    """Ways to bound `a` from below without `atom`: it is enough if every part of one way is large enough."""
    rest = a.plus(whole(atom), -c)
    x, y = (linear_forms(n)[n] for n in atom.operands)
    if atom.op != "floordiv":
        parts = [rest.plus(x, c), rest.plus(y, c)]
        return [parts] if (atom.op == "min") == (c > 0) else [[p] for p in parts]
    if not never_negative(atom.operands[1]) or not at_least(x, 0, nonempty, splits):
        return []
    return [[rest]] if c > 0 else [[rest.plus(x, c)]]  # 0 <= x // y <= x


def linear_forms(n: Node, forms: dict[Node, Linear] | None = None) -> dict[Node, Linear]:
    """The linear form of every node below `n`, added to `forms`."""
    forms = {} if forms is None else forms
    if n not in forms:
        for m in walk([n]):
            forms[m] = forms.get(m) or _form(m, forms)
    return forms


def _form(n: Node, forms: Mapping[Node, Linear]) -> Linear:
    """The linear form of a node, given those of its arguments."""
    match n:
        case Const(value=v) if n.dtype.is_integer:
            return Linear({}, int(v))
        case Apply(op="add", operands=(a, b)):
            return forms[a].plus(forms[b])
        case Apply(op="sub", operands=(a, b)):
            return forms[a].plus(forms[b], -1)
        case Apply(op="neg", operands=(a,)):
            return forms[a].times(-1)
        case Apply(op="mul", operands=(a, b)):
            return _scaled(n, forms[a], forms[b])
        case Cast(operand=a) if n.dtype.is_integer and a.dtype.is_integer and n.dtype.bits >= a.dtype.bits:
            return forms[a]
    return whole(n)


def _scaled(n: Node, a: Linear, b: Linear) -> Linear:
    if not a.terms:
        return b.times(a.constant)
    return a.times(b.constant) if not b.terms else whole(n)


# ---------------------------------------------------------------- guards


def inequalities(conditions: Iterable[Node]) -> tuple[list[Linear], list[Linear]]:
    """Integer conditions that hold: some as `linear >= 0`, some as `linear != 0`."""
    out: list[Linear] = []
    distinct: list[Linear] = []
    stack = [(c, True) for c in conditions]
    seen: set[tuple[Node, bool]] = set()
    while stack:
        item = stack.pop()
        if item in seen:
            continue
        seen.add(item)
        n, holds = item
        match n:
            case Apply(op="and", operands=parts) if holds:
                stack.extend((p, True) for p in parts)
            case Apply(op="or", operands=parts) if not holds:
                stack.extend((p, False) for p in parts)
            case Apply(op="not", operands=(a,)):
                stack.append((a, not holds))
            case Apply(op="lt" | "le", operands=(a, b)) if a.dtype.is_integer and b.dtype.is_integer:
                out.append(_ordered(n, holds))
            case Apply(op="eq" | "ne" as op, operands=(a, b)) if a.dtype.is_integer and b.dtype.is_integer:
                form = linear_forms(a)[a].plus(linear_forms(b)[b], -1)
                (out if holds == (op == "eq") else distinct).append(form)
                if holds == (op == "eq"):
                    out.append(form.times(-1))
    return out, distinct


def _ordered(n: Apply, holds: bool) -> Linear:
    """a < b, a <= b or their negation as `linear >= 0`"""
    a, b = (linear_forms(x)[x] for x in n.operands)
    if holds:
        return b.plus(a, -1).plus(ONE, -int(n.op == "lt"))
    return a.plus(b, -1).plus(ONE, -int(n.op == "le"))


# ---------------------------------------------------------------- intervals


@dataclass
class Intervals:
    """Ranges of expressions where the `guards` (each >= 0) hold. `axes` gives each axis's extent."""

    axes: Mapping[str, Node]
    guards: list[Linear]
    distinct: list[Linear] = field(default_factory=list)
    nonempty: frozenset[Node] = frozenset()
    atoms: dict[Node, Range] = field(default_factory=dict)
    forms: dict[Node, Linear] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """`x != 0` cuts an end of an interval off: with x >= 0 it is x >= 1."""
        for form in self.distinct:
            for sign in (1, -1):
                side = form.times(sign)
                self._fill(side.terms)
                if any(at_least(b, 0, self.nonempty) for b in self._linear(side).lo):
                    self.guards = [*self.guards, side.plus(ONE, -1)]
                    self.atoms.clear()

    def of(self, n: Node) -> Range:
        """What an integer expression can reach; its tensor-dependent parts are unknown."""
        self._fill([n, *(a for g in self.guards for a in g.terms)])
        return self._part(n)

    def _fill(self, nodes: Iterable[Node]) -> None:
        """Ranges of all atoms below, arguments first, so that no recursion is needed."""
        order = walk(nodes)
        for m in order:
            self.forms[m] = self.forms.get(m) or _form(m, self.forms)
        needed = {a for m in order for a in self.forms[m].terms} - self.atoms.keys()
        simple = {m for m in needed if isinstance(m, Index) or uniform(m)}
        for m in sorted((m for m in order if m in needed), key=lambda m: m not in simple):
            self.atoms[m] = self._atom(m)

    def _linear(self, form: Linear) -> Range:
        forms = list(self._shifted(form, 1)), list(self._shifted(form, -1))
        lo = [b for f in forms[1] for b in self._direct(f).lo]
        hi = [b for f in forms[0] for b in self._direct(f).hi]
        return Range(tuple(lo[: 2 * CANDIDATES]), tuple(hi[: 2 * CANDIDATES]))

    def _shifted(self, form: Linear, sign: int) -> Iterator[Linear]:
        """form, and form + sign · k · guard where that cancels an atom that varies: bounds of it are bounds of form.

        A guard about an atom whose range is being found waits until it is known.
        """
        yield form
        for guard in (g for g in self.guards if g.terms.keys() <= self.atoms.keys()):
            for atom, c in form.terms.items():
                g = guard.terms.get(atom, 0) * sign
                if atom.axes and g * c < 0 and c % g == 0:
                    yield form.plus(guard, sign * (-c // g))
                    break

    def _direct(self, form: Linear) -> Range:
        """Σ of the ends of each atom."""
        lo, hi = [Linear({}, form.constant)], [Linear({}, form.constant)]
        for atom, c in form.terms.items():
            r = self.atoms[atom]
            low, high = (r.lo, r.hi) if c > 0 else (r.hi, r.lo)
            lo = [a.plus(b, c) for a, b in islice(product(lo, low), CANDIDATES)]
            hi = [a.plus(b, c) for a, b in islice(product(hi, high), CANDIDATES)]
        return Range(tuple(lo), tuple(hi))

    def _part(self, n: Node) -> Range:
        return self._linear(linear_forms(n, self.forms)[n])

    def _atom(self, n: Node) -> Range:
        if uniform(n):
            return Range((whole(n),), (whole(n),)) if n.dtype.is_integer else UNKNOWN
        match n:
            case Index():
                return Range((ZERO,), (whole(self.axes[n.axis]).plus(ONE, -1),))
            case Apply(op="min" | "max", operands=(a, b)):
                return _extremum(n.op, self._part(a), self._part(b))
            case Apply(op="where", operands=(_, a, b)) if n.dtype.is_integer:
                return _either(self._part(a), self._part(b))
            case Apply(op="floordiv", operands=(a, b)) if uniform(b) and n.dtype.is_integer:
                return self._quotient(self._part(a), b)
            case Apply(op="mod", operands=(a, b)) if uniform(b) and n.dtype.is_integer:
                return self._remainder(self._part(a), b)
            case Apply(op="mul", operands=(a, b)) if n.dtype.is_integer:
                return self._product(self._part(a), self._part(b))
            case Apply(op="abs", operands=(a,)) if n.dtype.is_integer:
                r = self._part(a)
                return Range((ZERO,), _all("max", r.hi, tuple(b.times(-1) for b in r.lo)))
            case Cast(operand=a) if n.dtype.is_integer and a.dtype is DType.BOOL:
                return Range((ZERO,), (ONE,))
            case Cast(operand=a) if (
                n.dtype.is_integer and a.dtype.is_integer and n.dtype.bits >= a.dtype.bits
            ):
                return self._part(a)
        return self._part(n) if isinstance(n, Apply) and n.op in ("add", "sub", "neg") else UNKNOWN

    def _quotient(self, a: Range, divisor: Node) -> Range:
        """Floor division keeps order for a positive divisor and turns it for a negative one; 0 is refused elsewhere."""
        if never_negative(divisor):
            return Range(*(tuple(_divided(b, divisor) for b in side) for side in (a.lo, a.hi)))
        ends = tuple(_divided(b, divisor) for side in (a.lo[:1], a.hi[:1]) for b in side)
        return Range(_all("min", ends[:1], ends[1:]), _all("max", ends[:1], ends[1:]))

    def _remainder(self, a: Range, divisor: Node) -> Range:
        """0 <= x % u < u for u > 0, u < x % u <= 0 for u < 0, and x % u <= x for x >= 0"""
        last = (
            whole(divisor).plus(ONE, -1)
            if not isinstance(divisor, Const)
            else Linear({}, int(divisor.value) - 1)
        )
        if not never_negative(divisor):
            return Range(_all("min", (ZERO,), (last.plus(Linear({}, 2)),)), _all("max", (ZERO,), (last,)))
        positive = any(at_least(b, 0, self.nonempty) for b in a.lo)
        return Range((ZERO,), (last, *(a.hi if positive else ())))

    def _product(self, a: Range, b: Range) -> Range:
        """The least and the greatest of the products of ends; for factors >= 0 the products of like ends."""
        if all(any(at_least(x, 0, self.nonempty) for x in r.lo) for r in (a, b)):
            lo = [_times(x, y) for x, y in islice(product(a.lo, b.lo), CANDIDATES)]
            return Range((ZERO, *lo), tuple(_times(x, y) for x, y in islice(product(a.hi, b.hi), CANDIDATES)))
        sides = (a.lo[:1], a.hi[:1]), (b.lo[:1], b.hi[:1])
        ends = [(_times(x, y),) for p in sides[0] for q in sides[1] for x in p for y in q]
        return Range(_all("min", *ends), _all("max", *ends)) if len(ends) == 4 else UNKNOWN


def _extremum(op: str, a: Range, b: Range) -> Range:
    """max(a, b) is at least any lower bound of either, at most the greater of an upper bound of each; min mirrored."""
    if op == "max":
        return Range((*a.lo, *b.lo), _all("max", a.hi, b.hi))
    return Range(_all("min", a.lo, b.lo), (*a.hi, *b.hi))


def _either(a: Range, b: Range) -> Range:
    return Range(_all("min", a.lo, b.lo), _all("max", a.hi, b.hi))


def _all(op: str, *sides: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """One bound that covers a bound of every side; none where a side has none."""
    if not all(sides):
        return ()
    return (fold(lambda x, y: extremum(op, x, y), (side[0] for side in sides)),)


def extremum(op: str, a: Linear, b: Linear) -> Linear:
    """min or max; decided here where the difference is a number."""
    difference = a.plus(b, -1)
    if not difference.terms:
        return a if (difference.constant >= 0) == (op == "max") else b
    return whole(apply(op, a.node(), b.node()))


def _divided(a: Linear, divisor: Node) -> Linear:
    if isinstance(divisor, Const) and divisor.value != 0 and not a.terms:
        return Linear({}, a.constant // int(divisor.value))
    return ZERO if a == ZERO else whole(apply("floordiv", a.node(), divisor))


def _times(a: Linear, b: Linear) -> Linear:
    if not a.terms or not b.terms:
        return b.times(a.constant) if not a.terms else a.times(b.constant)
    return whole(apply("mul", a.node(), b.node()))
