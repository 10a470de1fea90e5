"""Absent values become predicates (DESIGN 2.1, `fn`): after this no `When` is left.

`+` and `-` drop an absent operand, every other operation on one is absent, reductions skip it, and where it is stored it is
0 (false). A definition that is absent somewhere keeps the form `where(P, x, 0)`. Stored or inlined, it then means the same:
`zero_outside` finds factors that are 0 outside a predicate, so a sum over them skips what they exclude, and a NaN that
another factor holds there stays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce as fold

from ..tensor_ir import (
    Apply,
    Cast,
    Const,
    Node,
    Read,
    Reduce,
    When,
    apply,
    cast_to,
    const,
    rebuild,
    reduce,
    rewrite,
    walk,
    when,
)


def resolve(roots: Iterable[Node]) -> list[Node]:
    """Values to be stored, without absence inside."""
    return [stored(r) for r in rewrite(roots, lift)]


def lift(n: Node) -> Node:
    """Absence moves from the arguments of a node to the node, or ends in it. Arguments were lifted before."""
    if not any(isinstance(a, When) for a in n.args):
        return n
    match n:
        case When(value=When(value=x, predicate=p), predicate=q):
            return lift(when(x, _both(p, q), n.span))
        case When(value=x, predicate=When(value=q, predicate=p)):
            return when(x, _both(p, q), n.span)
        case Apply(op="add" | "sub", operands=(a, b)):
            return _dropped(n, a, b)
        case Reduce():
            return _skipped(n)
    parts = [a.value if isinstance(a, When) else a for a in n.args]
    predicates = dict.fromkeys(a.predicate for a in n.args if isinstance(a, When))
    return when(rebuild(n, tuple(parts)), fold(_both, predicates), n.span)


def _dropped(n: Apply, a: Node, b: Node) -> Node:
    """when(x, p) + y -> where(p, x, 0) + y;  when(x, p) + when(y, q) -> when(where(p, x, 0) + where(q, y, 0), p or q)"""
    if not (isinstance(a, When) and isinstance(b, When)):
        return rebuild(n, (stored(a), stored(b)))
    if a.predicate is b.predicate:
        return when(rebuild(n, (a.value, b.value)), a.predicate, n.span)
    return when(rebuild(n, (stored(a), stored(b))), apply("or", a.predicate, b.predicate), n.span)


def _skipped(n: Reduce) -> Node:
    """R[j | q](when(x, p)) -> R[j | q and p](x);  R[j | when(q, p)](x) -> R[j | p and q](x)"""
    body, predicate = n.body, n.predicate
    if isinstance(predicate, When):
        predicate = _both(predicate.predicate, predicate.value)
    if isinstance(body, When):
        predicate = body.predicate if predicate is None else _both(predicate, body.predicate)
        body = body.value
    return reduce(n.fn, n.bound, body, predicate, n.span)


def stored(n: Node) -> Node:
    """when(x, p) -> where(p, x, 0)"""
    if not isinstance(n, When):
        return n
    zero = const(False if not (n.dtype.is_float or n.dtype.is_integer) else 0, n.dtype, n.span)
    return apply("where", n.predicate, n.value, zero, span=n.span)


def _both(p: Node, q: Node) -> Node:
    return p if p is q else apply("and", p, q, span=p.span)


# ---------------------------------------------------------------- sums of what is 0 outside a predicate

Support = Callable[[Read], "Node | None"]


def support_of(value: Node) -> Node | None:
    """The predicate outside which a stored value is 0: its form is `where(P, x, 0)`."""
    match value:
        case Apply(op="where", operands=(p, _, Const(value=z))) if z == 0 and _mask_like(p):
            return p
    return None


def _mask_like(p: Node) -> bool:
    """Made of indices, extents, scalars, integers and bools: a mask, not a comparison of computed floats."""
    return not any(n.dtype.is_float and not isinstance(n, Const) for n in walk([p]))


def skip_zeros(n: Reduce, support: Support) -> Node:
    """sum_j where(P, x, 0)·y -> sum_j[P] x·y, for a P that depends on j; the same for a read that is 0 outside P."""
    if n.fn != "sum":
        return n
    conjuncts = {} if n.predicate is None else dict.fromkeys(_conjuncts(n.predicate))
    found = _Factors(n, support)
    body = found.strip(n.body)
    extra = [p for p in found.predicates if any(c not in conjuncts for c in _conjuncts(p))]
    if body is n.body and not extra:
        return n
    predicate = (
        fold(_both, extra, n.predicate) if n.predicate is not None else fold(_both, extra) if extra else None
    )
    return reduce("sum", n.bound, body, predicate, n.span)


def _conjuncts(p: Node) -> list[Node]:
    """The conditions that `and` joins, each once."""
    joined = {p}
    for n in reversed(walk([p])):  # users first
        if n in joined and isinstance(n, Apply) and n.op == "and":
            joined.update(n.operands)
    return [n for n in walk([p]) if n in joined and not (isinstance(n, Apply) and n.op == "and")]


class _Factors:
    """Walks down the factors of a sum's body: products, numerators, negation, casts."""

    def __init__(self, n: Reduce, support: Support) -> None:
        self.bound = frozenset(n.bound)
        self.support = support
        self.predicates: dict[Node, None] = {}

    def strip(self, body: Node) -> Node:
        """The body without its selects; what they asked for is in `predicates`, outer ones first."""
        order = self._path(body)
        for n in order:
            p = self._asked(n)
            if p is not None:
                self.predicates[p] = None
        done: dict[Node, Node] = {}
        for n in reversed(order):
            done[n] = self._stripped(n, done)
        return done[body]

    def _path(self, body: Node) -> list[Node]:
        """The factors, each after all its users."""
        found = {body}
        stack = [body]
        while stack:
            new = [f for f in self._factors(stack.pop()) if f not in found]
            found.update(new)
            stack.extend(new)
        return [n for n in reversed(walk([body])) if n in found]

    def _factors(self, n: Node) -> tuple[Node, ...]:
        match n:
            case Apply(op="mul"):
                return n.operands
            case Apply(op="div", operands=(a, _)) | Apply(op="neg", operands=(a,)) | Cast(operand=a):
                return (a,)
            case Apply(op="where", operands=(_, x, _)) if self._asked(n) is not None:
                return (x,)
        return ()

    def _asked(self, n: Node) -> Node | None:
        p = self.support(n) if isinstance(n, Read) else support_of(n)
        return p if p is not None and p.axes & self.bound else None

    def _stripped(self, n: Node, done: Mapping[Node, Node]) -> Node:
        factors = self._factors(n)
        if isinstance(n, Apply) and n.op == "where" and factors:
            return cast_to(done[factors[0]], n.dtype)
        return rebuild(n, tuple(done.get(a, a) if a in factors else a for a in n.args)) if factors else n
