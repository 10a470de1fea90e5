"""normalize: what does not depend on the reduced element leaves the reduction. Exposes cascades to derive, contractions to
lower. Equal over the reals, not bit for bit: each use is a remark, and `fuse none` kernels go through it as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...dsl.types import DType
from ..remarks import Remarks
from ..tensor_ir import (
    Apply,
    Const,
    Node,
    Reduce,
    apply,
    const,
    index,
    rebuild,
    reduce,
    rename_axes,
    replace,
    rewrite,
)


def normalize(roots: list[Node], axes: Mapping[str, Node], remarks: Remarks) -> list[Node]:
    """Move factors and selects out of sums, wherever they are free of the summed set. `axes` gives the extents."""

    def rule(n: Node) -> Node:
        if isinstance(n, Reduce):
            n = by_position(aligned(n, axes))
        if not isinstance(n, Reduce) or n.fn != "sum":
            return n
        out = _hoist(n)
        if out is not n:
            remarks.add(
                "applied",
                "normalize",
                "factor-moved-out",
                "a factor free of the summed index leaves the sum",
                n.span,
            )
        return out

    return rewrite(roots, rule)


def aligned(n: Reduce, axes: Mapping[str, Node]) -> Node:
    """sum_j f(max_i x_i) -> sum_j f(max_j x_j)   where max_i x_i is free of j and i and j have one extent"""

    def rule(r: Node) -> Node | None:
        if not isinstance(r, Reduce) or r.bound == n.bound or len(r.bound) != len(n.bound):
            return None
        if not _free(n, r) or any(axes[i] is not axes[j] for i, j in zip(r.bound, n.bound, strict=True)):
            return None
        return rename_axes(r, dict(zip(r.bound, n.bound, strict=True)))

    return rebuild(n, tuple(replace(n.args, rule)))


def by_position(n: Node) -> Node:
    """argmax_j x -> min_j[x == max_j x or x is NaN] j, -1 for an empty set; argmin alike

    The maximum is NaN exactly if an element is, and then the first NaN is the answer (DESIGN 8, "Specials").
    """
    if not isinstance(n, Reduce) or n.fn not in ("argmax", "argmin") or len(n.bound) != 1:
        return n
    best = reduce(n.fn.removeprefix("arg"), n.bound, n.body, n.predicate, n.span)
    hit = apply("eq", n.body, best)
    if n.body.dtype.is_float:
        hit = apply("or", hit, apply("ne", n.body, n.body))
    here = hit if n.predicate is None else apply("and", n.predicate, hit)
    first = reduce("min", n.bound, index(n.bound[0]), here, n.span)
    nothing = const(2**63 - 1, DType.I64)
    return apply("where", apply("eq", first, nothing), const(-1, DType.I64), first, span=n.span)


def _hoist(n: Reduce) -> Node:
    """Apply the rules below until none fits; the part left inside is strictly smaller each time."""
    for rule in RULES:
        out = rule(n)
        if out is not None:
            return out
    return n


def _resum(n: Reduce, body: Node) -> Node:
    inner = reduce("sum", n.bound, body, n.predicate, n.span)
    return _hoist(inner) if isinstance(inner, Reduce) else inner


def _free(n: Reduce, x: Node) -> bool:
    return not x.axes & frozenset(n.bound)


def _zero(x: Node) -> bool:
    return isinstance(x, Const) and not isinstance(x.value, bool) and x.value == 0


def factor_out(n: Reduce) -> Node | None:
    """sum_j k·x -> k·sum_j x;  sum_j x/k -> (sum_j x)/k   for k free of j"""
    match n.body:
        case Apply(op="mul", operands=(a, b)) if _free(n, b) and not _free(n, a):
            return apply("mul", _resum(n, a), b)
        case Apply(op="mul", operands=(a, b)) if _free(n, a) and not _free(n, b):
            return apply("mul", a, _resum(n, b))
        case Apply(op="div", operands=(a, b)) if _free(n, b) and not _free(n, a):
            return apply("div", _resum(n, a), b)
    return None


def factor_surfaces(n: Reduce) -> Node | None:
    """sum_j (k·x)·y -> sum_j k·(x·y);  sum_j (x/k)·y -> sum_j (x·y)/k   for k free of j"""
    match n.body:
        case Apply(op="mul", operands=(a, b)) if not _free(n, a) and not _free(n, b):
            for x, y in ((a, b), (b, a)):
                match x:
                    case Apply(op="mul", operands=(u, k)) if _free(n, k):
                        return _hoist_body(n, apply("mul", apply("mul", u, y), k))
                    case Apply(op="mul", operands=(k, u)) if _free(n, k):
                        return _hoist_body(n, apply("mul", apply("mul", u, y), k))
                    case Apply(op="div", operands=(u, k)) if _free(n, k):
                        return _hoist_body(n, apply("div", apply("mul", u, y), k))
    return None


def select_out(n: Reduce) -> Node | None:
    """sum_j where(c, a, b) -> where(c, sum_j a, sum_j b)   for c free of j"""
    match n.body:
        case Apply(op="where", operands=(c, a, b)) if _free(n, c) and not (_free(n, a) and _free(n, b)):
            return apply("where", c, _branch(n, a), _branch(n, b))
    return None


def select_surfaces(n: Reduce) -> Node | None:
    """sum_j where(c, 0, a)·y -> sum_j where(c, 0, a·y)   for c free of j, one branch zero"""
    match n.body:
        case Apply(op="mul", operands=(a, b)):
            for x, y in ((a, b), (b, a)):
                match x:
                    case Apply(op="where", operands=(c, u, v)) if _free(n, c) and (_zero(u) or _zero(v)):
                        return _hoist_body(n, apply("where", c, _times(u, y), _times(v, y)))
    return None


def _times(x: Node, y: Node) -> Node:
    return x if _zero(x) else apply("mul", x, y)


def _branch(n: Reduce, x: Node) -> Node:
    return const(0.0, n.dtype) if _zero(x) and n.dtype.is_float else _resum(n, x)


def _hoist_body(n: Reduce, body: Node) -> Node:
    return _resum(n, body)


RULES: tuple[Callable[[Reduce], Node | None], ...] = (
    factor_out,
    factor_surfaces,
    select_out,
    select_surfaces,
)
