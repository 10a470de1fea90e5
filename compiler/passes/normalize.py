"""normalize: what does not depend on the reduced element leaves the reduction. Exposes cascades to derive, contractions to
lower. Equal over the reals, not bit for bit: each use is a remark, and `fuse none` kernels go through it as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace as replace_fields

from ...dsl.types import DType
from ..cascade import typed
from ..region import contraction
from ..remarks import Remarks
from ..tensor_ir import (
    Apply,
    Cast,
    Const,
    Node,
    Reduce,
    apply,
    const,
    index,
    positive,
    rebuild,
    reduce,
    rename_axes,
    replace,
    rewrite,
    walk,
)
from .derive import PLAIN, Rules, joins
from .guards import guarded_state


def normalize(
    roots: list[Node], axes: Mapping[str, Node], remarks: Remarks, rules: Rules = PLAIN
) -> list[Node]:
    """Move factors and selects out of reductions, wherever they are free of the reduced set, and split sums where that
    makes one pass or a contraction of them. `axes` gives the extents."""
    order = {a: i for i, a in enumerate(axes)}
    rules = replace_fields(rules, extents=tuple(axes.items()))

    def rule(n: Node) -> Node:
        if isinstance(n, Reduce):
            n = by_position(aligned(_in_order(n, order), axes))
        scaled = lift_scale(n, rules.facts, axes)
        if scaled is not n:
            remarks.add("applied", "normalize", "scale-moved-out", SCALE, n.span)
        if not isinstance(scaled, Reduce) or scaled.fn != "sum":
            return scaled
        out = _hoist(scaled)
        if out is not scaled:
            remarks.add("applied", "normalize", "factor-moved-out", FACTOR, n.span)
        return (
            rewrite([out], lambda x: _split_where_useful(x, rules, remarks))[0]
            if out is not scaled
            else (_split_where_useful(out, rules, remarks))
        )

    return rewrite(roots, rule)


FACTOR = "a factor free of the summed index leaves the sum"
SCALE = "a positive factor leaves a maximum: equal over the reals, and where nothing overflows bit for bit"


def _in_order(n: Reduce, order: Mapping[str, int]) -> Reduce:
    """One order of axes for one set."""
    bound = tuple(sorted(n.bound, key=order.__getitem__))
    if bound == n.bound or n.fn in ("argmax", "argmin"):
        return n
    out = reduce(n.fn, bound, n.body, n.predicate, n.span)
    assert isinstance(out, Reduce)
    return out


# ---------------------------------------------------------------- positive factors


def lift_scale(n: Node, facts: tuple[Node, ...], axes: Mapping[str, Node]) -> Node:
    """max_j k·x -> k·max_j x;  max(k·x, k·y) -> k·max(x, y);  where(c, k·x, -inf) -> k·where(c, x, -inf);
    k·x - k·r -> k·(x - r) for a reduction r: for k > 0 without axes. exp(k·(l·x)) -> exp((k·l)·x) for any k and l"""
    guarded = guarded_state(n)
    if guarded is not None:
        k, r = _scaled(guarded, facts, axes)
        return n if k is None else apply("mul", k, _guard_like(n, r), span=n.span)
    match n:
        case Reduce(fn="max" | "min", body=body) if n.dtype.is_float:
            k, x = _scaled(body, facts, axes)
            return (
                n
                if k is None
                else apply("mul", k, reduce(n.fn, n.bound, x, n.predicate, n.span), span=n.span)
            )
        case Apply(op="where", operands=(c, a, Const(value=v) as end)) if n.dtype.is_float and math.isinf(v):
            k, x = _scaled(a, facts, axes)
            return n if k is None else apply("mul", k, apply("where", c, x, end), span=n.span)
        case Apply(op="max" | "min" | "sub" as op, operands=(a, b)) if n.dtype.is_float:
            (k, x), (k_b, y) = _scaled(a, facts, axes), _scaled(b, facts, axes)
            if k is not None and k is k_b and (op != "sub" or _has_reduction(y)):
                return apply("mul", k, apply(op, x, y), span=n.span)
        case Apply(op="exp", operands=(Apply(op="mul", operands=(k, Apply(op="mul", operands=(other, x)))),)):
            if not k.axes and not other.axes and x.axes:
                return apply("exp", apply("mul", apply("mul", k, other), x), span=n.span)
    return n


def _scaled(n: Node, facts: tuple[Node, ...], axes: Mapping[str, Node]) -> tuple[Node | None, Node]:
    """n as k·x with k > 0 the same everywhere."""
    match n:
        case Apply(op="mul", operands=(a, b)):
            for k, x in ((a, b), (b, a)):
                if not k.axes and not isinstance(x, Const) and positive(k, (*facts, *_known_with(x, axes))):
                    return k, x
    return None, n


def _known_with(x: Node, axes: Mapping[str, Node]) -> list[Node]:
    """0 < E for the extents E of sums that are all of x: where E is 0, x is 0, and 0/√E is NaN on either side."""
    match x:
        case Reduce(fn="sum", bound=bound):
            return [apply("lt", const(0, axes[i].dtype), axes[i]) for i in bound]
        case Reduce(fn="max" | "min", body=inner) | Cast(operand=inner):
            return _known_with(inner, axes)
        case Apply(op="where", operands=(_, inner, Const(value=v))) if math.isinf(v):
            return _known_with(inner, axes)
        case Apply(op="mul", operands=(a, b)):
            return _known_with(a, axes) + _known_with(b, axes)
    guarded = guarded_state(x)
    return [] if guarded is None else _known_with(guarded, axes)


def _guard_like(n: Node, r: Node) -> Node:
    """The guard of n, on r."""
    condition, stand_in = n.args[0], n.args[1]
    return apply("where", apply("eq", r, condition.args[1]), stand_in, r)


def _has_reduction(n: Node) -> bool:
    return any(isinstance(x, Reduce) for x in walk([n]))


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


# ---------------------------------------------------------------- factors and selects


def _hoist(n: Reduce) -> Node:
    """sum_j k·x/d·y -> k·(sum_j x·y)/d and sum_j where(c, 0, x)·y -> where(c, 0, sum_j x·y), for k, d, c free of j

    `where` with two branches splits only where it is the whole body.
    """
    outer: list[Callable[[Node], Node]] = []
    body = n.body
    while True:
        step = _one_out(n, body)
        if step is None:
            break
        wrap, body = step
        outer.append(wrap)
    select = _whole_select(n, body)
    inner = select if select is not None else reduce("sum", n.bound, body, n.predicate, n.span)
    return _wrapped(outer, inner) if outer or select is not None else n


def _wrapped(outer: list[Callable[[Node], Node]], inner: Node) -> Node:
    for wrap in reversed(outer):
        inner = wrap(inner)
    return inner


Step = tuple[Callable[[Node], Node], Node]


def _one_out(n: Reduce, body: Node) -> Step | None:
    """The first factor or select of the body that can leave the sum, and what is left."""
    if _free(n, body):
        return None
    parts = signed_factors(body)
    for i, (x, power) in enumerate(parts):
        rest = parts[:i] + parts[i + 1 :]
        if _free(n, x):
            if isinstance(x, Const) and x.value == 1:
                continue
            op = "mul" if power > 0 else "div"
            return (lambda t, x=x, op=op: apply(op, t, x)), quotient(rest, n.dtype)
        match x:
            case Apply(op="where", operands=(c, u, v)) if (
                power > 0 and _free(n, c) and rest and (_zero(u) or _zero(v))
            ):
                first, inside = _zero(u), v if _zero(u) else u
                rest = [*parts[:i], *signed_factors(inside), *parts[i + 1 :]]
                return _selecting(c, first, n), quotient(rest, n.dtype)
            case Apply(op="neg", operands=(u,)):
                return (lambda t: apply("neg", t)), quotient(
                    [*parts[:i], (u, power), *parts[i + 1 :]], n.dtype
                )
    return None


def _selecting(c: Node, first: bool, n: Reduce) -> Callable[[Node], Node]:
    zero = const(typed(0, n.dtype), n.dtype)
    return lambda t: apply("where", c, zero, t) if first else apply("where", c, t, zero)


def _whole_select(n: Reduce, body: Node) -> Node | None:
    """sum_j where(c, a, b) -> where(c, sum_j a, sum_j b)   for c free of j"""
    match body:
        case Apply(op="where", operands=(c, a, b)) if _free(n, c) and not (_free(n, a) and _free(n, b)):
            return apply("where", c, _branch(n, a), _branch(n, b))
    return None


def _branch(n: Reduce, x: Node) -> Node:
    if _zero(x):
        return const(typed(0, n.dtype), n.dtype)
    inner = reduce("sum", n.bound, x, n.predicate, n.span)
    return _hoist(inner) if isinstance(inner, Reduce) else inner


def signed_factors(n: Node) -> list[tuple[Node, int]]:
    """A product and quotient as factors with power 1 or -1, left to right: a·b/c is a, b, 1/c."""
    out: list[tuple[Node, int]] = []
    stack: list[tuple[Node, int]] = [(n, 1)]
    while stack:
        top, power = stack.pop()
        match top:
            case Apply(op="mul", operands=(a, b)) if power > 0:
                stack += [(b, 1), (a, 1)]
            case Apply(op="div", operands=(a, b)) if power > 0:
                stack += [(b, -1), (a, 1)]
            case _:
                out.append((top, power))
    return out


def quotient(parts: list[tuple[Node, int]], dtype: DType) -> Node:
    """The product of factors; powers of -1 divide it last."""
    above, below = ([x for x, p in parts if p == sign] for sign in (1, -1))
    out: Node | None = None
    for x in above:
        out = x if out is None else apply("mul", out, x)
    out = const(typed(1, dtype), dtype) if out is None else out
    for x in below:
        out = apply("div", out, x)
    return out


def _free(n: Reduce, x: Node) -> bool:
    return not x.axes & frozenset(n.bound)


def _zero(x: Node) -> bool:
    return isinstance(x, Const) and not isinstance(x.value, bool) and x.value == 0


# ---------------------------------------------------------------- sums of sums


def _split_where_useful(n: Node, rules: Rules, remarks: Remarks) -> Node:
    """sum_j (a + b)·y -> sum_j a·y + sum_j b·y, where the whole joins no pass and the parts do, or where the parts are
    contractions and the whole is not."""
    if not isinstance(n, Reduce) or n.fn != "sum" or not n.dtype.is_float:
        return n
    terms = _terms(n)
    if len(terms) < 2 or not _worth_splitting(n, terms, rules):
        return n
    message = "a sum of sums is split: equal over the reals, not bit for bit"
    remarks.add("applied", "normalize", "sum-split", message, n.span, terms=len(terms))
    out: Node | None = None
    for sign, term in terms:
        part = _hoist(_sum_of(n, term))
        part = _split_where_useful(part, rules, remarks)
        signed = part if sign > 0 else apply("neg", part)
        out = signed if out is None else apply("add" if sign > 0 else "sub", out, part)
    assert out is not None
    return out


def _sum_of(n: Reduce, body: Node) -> Reduce:
    out = reduce("sum", n.bound, body, n.predicate, n.span)
    assert isinstance(out, Reduce)
    return out


def _terms(n: Reduce) -> list[tuple[int, Node]]:
    """The body multiplied out over its first factor that is a sum: signs and products."""
    parts = signed_factors(n.body)
    for i, (x, power) in enumerate(parts):
        if power > 0 and isinstance(x, Apply) and x.op in ("add", "sub"):
            return [
                (sign, quotient([*parts[:i], *signed_factors(t), *parts[i + 1 :]], n.dtype))
                for sign, t in summands(x)
            ]
    return []


def summands(n: Node) -> list[tuple[int, Node]]:
    """The terms of a sum with their signs, left to right."""
    out: list[tuple[int, Node]] = []
    stack = [(1, n)]
    while stack:
        sign, top = stack.pop()
        match top:
            case Apply(op="add" | "sub" as op, operands=(a, b)):
                stack += [(sign if op == "add" else -sign, b), (sign, a)]
            case Apply(op="neg", operands=(a,)):
                stack.append((-sign, a))
            case _:
                out.append((sign, top))
    return out


def _worth_splitting(n: Reduce, terms: list[tuple[int, Node]], rules: Rules) -> bool:
    over = frozenset(n.bound)
    if contraction(n.body, over) is None and all(contraction(t, over) is not None for _, t in terms):
        return True
    below = [r for r in walk([n.body]) if isinstance(r, Reduce) and r.bound == n.bound]
    if not below or joins(n, rules):
        return False
    parts = [
        r
        for _, t in terms
        for r in walk([_hoist(_sum_of(n, t))])
        if isinstance(r, Reduce) and r.bound == n.bound
    ]
    return all(joins(r, rules) for r in parts)
