"""The part of an axis that a loop has to visit, read off the predicates of what it reduces."""

from __future__ import annotations

from ...dsl.records import dataclass
from ..tensor_ir import Apply, Axes, Const, Index, Node, Read, apply, const, walk


@dataclass(frozen=True)
class Limit:
    """A predicate that says lo <= i < hi of the axis, no more and no less (a bound may be missing)."""

    predicate: Node
    lo: Node | None
    hi: Node | None

    @property
    def axes(self) -> Axes:
        return frozenset().union(*(b.axes for b in (self.lo, self.hi) if b is not None))


@dataclass(frozen=True)
class LoopDomain:
    """What the predicates common to all reductions of a loop say about its axis.

    limits      those that are bounds which can be computed before the loop
    domain      those that read no tensor: where they are false nothing contributes
    scattered   integer comparisons that read tensors at the axis: bounds of the tensors over a tile may exclude all of it
    """

    limits: list[Limit]
    domain: list[Node]
    scattered: list[Node]

    @property
    def lo(self) -> list[Node]:
        return [b.lo for b in self.limits if b.lo is not None]

    @property
    def hi(self) -> list[Node]:
        return [b.hi for b in self.limits if b.hi is not None]


def loop_domain(axis: str, predicates: list[list[Node]], open_axes: Axes) -> LoopDomain:
    """`predicates` are the conjuncts of each reduction in the loop; only those common to all bound it.

    A bound must be computable before the loop: it may use `open_axes` only.
    """
    common = [p for p in predicates[0] if all(p in other for other in predicates[1:])]
    limits = [x for p in common if (x := _limit(p, axis, open_axes)) is not None]
    solved = [x.predicate for x in limits]
    about = [p for p in common if axis in p.axes]
    scattered = [p for p in about if p not in solved and not _affine(p) and _compares_integers(p)]
    return LoopDomain(limits, [p for p in about if _affine(p)], scattered)


def _limit(p: Node, axis: str, open_axes: Axes) -> Limit | None:
    lo, hi = None, None
    for low, high in _solve(p, axis):
        lo, hi = low if low is not None else lo, high if high is not None else hi
    found = Limit(p, lo, hi)
    return found if (lo is not None or hi is not None) and found.axes <= open_axes else None


def _compares_integers(p: Node) -> bool:
    return isinstance(p, Apply) and p.op in ("eq", "le", "lt") and all(a.dtype.is_integer for a in p.operands)


def _affine(p: Node) -> bool:
    """No tensor is read: the predicate is arithmetic of indices, extents and scalars."""
    return all(not isinstance(n, Read) for n in walk([p]))


def _solve(p: Node, axis: str) -> list[tuple[Node | None, Node | None]]:
    """Bounds (lo inclusive, hi exclusive) on the axis that `p` implies, where it is linear in it with coefficient ±1."""
    match p:
        case Apply(op="le" | "lt", operands=(a, b)) if a.dtype.is_integer and b.dtype.is_integer:
            return [_less(a, b, axis, int(p.op == "lt"))]
        case Apply(op="eq", operands=(a, b)) if a.dtype.is_integer and b.dtype.is_integer:
            return [_less(a, b, axis, 0), _less(b, a, axis, 0)]
    return []


def _less(a: Node, b: Node, axis: str, strict: int) -> tuple[Node | None, Node | None]:
    """The bound that a + strict <= b puts on the axis, which stands on one side only."""
    if (axis in a.axes) == (axis in b.axes):
        return None, None
    left = axis in a.axes
    linear = _linear(a if left else b, axis)
    if linear is None:
        return None, None
    sign, rest = linear
    # left:  sign·i + rest + strict <= b;   right:  a + strict <= sign·i + rest
    if left == (sign > 0):
        limit = _fold("sub", b, rest) if left else _fold("sub", rest, a)
        return None, _fold("add", limit, const(1 - strict, limit.dtype))
    limit = _fold("sub", rest, b) if left else _fold("sub", a, rest)
    return _fold("add", limit, const(strict, limit.dtype)), None


def _linear(n: Node, axis: str) -> tuple[int, Node] | None:
    """n as ±1·axis + rest, rest free of the axis."""
    match n:
        case Index(axis=a) if a == axis:
            return 1, const(0, n.dtype)
        case Apply(op="neg", operands=(a,)):
            inner = _linear(a, axis)
            return None if inner is None else (-inner[0], apply("neg", inner[1]))
        case Apply(op="add" | "sub", operands=(a, b)):
            in_a, in_b = axis in a.axes, axis in b.axes
            if in_a == in_b:
                return None
            inner = _linear(a if in_a else b, axis)
            if inner is None:
                return None
            sign, rest = inner
            if in_a:
                return sign, _fold(n.op, rest, b)
            return (sign if n.op == "add" else -sign), _fold(n.op, a, rest)
    return None


def _fold(op: str, a: Node, b: Node) -> Node:
    """Integer a ± b without additions of 0."""
    if isinstance(b, Const) and b.value == 0:
        return a
    if op == "add" and isinstance(a, Const) and a.value == 0:
        return b
    return apply(op, a, b)
