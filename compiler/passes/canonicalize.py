"""canonicalize: absence into predicates, one name per axis, exact algebra (DESIGN 4.1).

Every rule holds bit for bit, with -0.0, infinities and NaN; the one that does not, a zero weight that keeps a NaN of the
other factor out of a sum, is what DESIGN 8 asks for.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ...dsl.types import DType
from ..inline import Inliner
from ..operands import INTEGER_RANGES
from ..remarks import Remarks
from ..tensor_ir import (
    Apply,
    Cast,
    Const,
    Definition,
    Graph,
    Node,
    Read,
    Reduce,
    apply,
    cast_to,
    const,
    reduce,
    rewrite,
    walk,
)
from .absence import resolve, skip_zeros, support_of
from .unify import unify_axes

Rule = Callable[[Node], "Node | None"]


def canonicalize(graph: Graph, remarks: Remarks) -> Graph:
    """Valid IR in, valid IR out, no `When` left; the value of every output is the same."""
    graph = map_values(graph, resolve)
    graph = map_values(graph, lambda values: simplify(values, graph.axes))
    graph = unify_axes(graph)
    supports = _supports(graph)
    skipping = _Skipping(graph, supports, remarks)
    graph = map_values(graph, lambda values: rewrite(values, skipping.rule))
    return _live(map_values(graph, lambda values: simplify(values, graph.axes)))


def simplify(values: Iterable[Node], axes: Mapping[str, Node] | None = None) -> list[Node]:
    """The rules below, bottom up. `axes` (extents by axis) lets a count without predicate become its extent."""

    def rule(n: Node) -> Node:
        if isinstance(n, Reduce):
            n = skip_zeros(n, lambda read: None)
        return _count(n, axes) if axes is not None and isinstance(n, Reduce) else fixpoint(n)

    return rewrite(values, rule)


def fixpoint(n: Node) -> Node:
    """Apply `RULES` to one node until none fits; each makes the node smaller."""
    while True:
        for rule in RULES:
            out = rule(n)
            if out is not None:
                n = out
                break
        else:
            return n


def map_values(graph: Graph, change: Callable[[list[Node]], list[Node]]) -> Graph:
    """The graph with all values, places and named nodes changed at once, so that what is shared stays shared."""
    named = list(graph.names.items())
    sizes = [1 + len(d.target or ()) for d in graph.definitions]
    roots = [n for d in graph.definitions for n in (d.value, *(d.target or ()))]
    new = change([*roots, *(n for n, _ in named)])
    definitions = []
    at = 0
    for d, size in zip(graph.definitions, sizes, strict=True):
        value, *target = new[at : at + size]
        definitions.append(replace(d, value=value, target=None if d.target is None else tuple(target)))
        at += size
    names = {n: name for n, (_, name) in zip(new[at:], named, strict=True)}
    return replace(graph, definitions=tuple(definitions), names=names)


def _live(graph: Graph) -> Graph:
    """Without definitions that nothing reads any more."""
    wanted = {*graph.outputs}
    kept: list[Definition] = []
    for d in reversed(graph.definitions):
        if d.target is not None or d.name in wanted:
            kept.append(d)
            wanted |= {n.tensor for n in walk([d.value, *(d.target or ())]) if isinstance(n, Read)}
    return replace(graph, definitions=tuple(kept[::-1]))


# ---------------------------------------------------------------- sums over what is 0 outside a predicate


def _supports(graph: Graph) -> dict[str, tuple[tuple[str, ...], Node]]:
    """Axes and predicate of each definition that is 0 outside a predicate."""
    found = {d.name: (d.axes, support_of(d.value)) for d in graph.definitions if d.target is None}
    return {name: (axes, p) for name, (axes, p) in found.items() if p is not None}


class _Skipping:
    """The rule `sum_j(p[.., j] * y) -> sum_j[P](p[.., j] * y)` for definitions p that are 0 outside P, with its remark."""

    def __init__(
        self, graph: Graph, supports: Mapping[str, tuple[tuple[str, ...], Node]], remarks: Remarks
    ) -> None:
        self.supports = supports
        self.inliner = Inliner(graph, frozenset(d.name for d in graph.definitions))
        self.remarks = remarks

    def rule(self, n: Node) -> Node:
        if not isinstance(n, Reduce):
            return n
        out = skip_zeros(n, self._support)
        if out is not n:
            message = "the sum skips elements whose weight is 0 by a predicate"
            self.remarks.add("applied", "canonicalize", "zero-weights-skipped", message, n.span)
        return out

    def _support(self, read: Read) -> Node | None:
        if read.tensor not in self.supports:
            return None
        axes, predicate = self.supports[read.tensor]
        return self.inliner.at(predicate, dict(zip(axes, read.indices, strict=True)))


def _count(n: Reduce, axes: Mapping[str, Node]) -> Node:
    """sum[j](c) -> c * extent of j, for an integer constant c and no predicate"""
    if (
        n.fn != "sum"
        or n.predicate is not None
        or not isinstance(n.body, Const)
        or not n.body.dtype.is_integer
    ):
        return fixpoint(n)
    total: Node = n.body
    for axis in n.bound:
        total = fixpoint(apply("mul", total, axes[axis], span=n.span))
    return cast_to(total, n.dtype, n.span)


# ---------------------------------------------------------------- rules


def _value(n: Node, value: float) -> bool:
    """Is `n` this constant; the sign of a zero counts."""
    if not isinstance(n, Const) or isinstance(n.value, bool):
        return False
    return n.value == value and (n.dtype.is_integer or math.copysign(1, n.value) == math.copysign(1, value))


def one_factor(n: Node) -> Node | None:
    """x * 1 -> x;  1 * x -> x;  x / 1 -> x;  x // 1 -> x for integers"""
    match n:
        case Apply(op="mul" | "div", operands=(x, one)) if _value(one, 1):
            return cast_to(x, n.dtype, n.span)
        case Apply(op="mul", operands=(one, x)) if _value(one, 1):
            return cast_to(x, n.dtype, n.span)
        case Apply(op="floordiv", operands=(x, one)) if n.dtype.is_integer and _value(one, 1):
            return cast_to(x, n.dtype, n.span)
    return None


def zero_term(n: Node) -> Node | None:
    """x + -0.0 -> x;  x - 0.0 -> x;  for integers x + 0 -> x, x - 0 -> x, 0 - x -> -x"""
    match n:
        case Apply(op="add", operands=(x, z)) if _value(z, -0.0):
            return cast_to(x, n.dtype, n.span)
        case Apply(op="add", operands=(z, x)) if _value(z, -0.0):
            return cast_to(x, n.dtype, n.span)
        case Apply(op="sub", operands=(x, z)) if _value(z, 0.0):
            return cast_to(x, n.dtype, n.span)
        case Apply(op="sub", operands=(z, x)) if n.dtype.is_integer and _value(z, 0):
            return apply("neg", x, span=n.span)
    return None


def integer_zero(n: Node) -> Node | None:
    """For integers: x * 0 -> 0;  x - x -> 0;  x % 1 -> 0"""
    if not n.dtype.is_integer:
        return None
    match n:
        case Apply(op="mul", operands=(a, b)) if _value(a, 0) or _value(b, 0):
            return const(0, n.dtype, n.span)
        case Apply(op="sub", operands=(a, b)) if a is b:
            return const(0, n.dtype, n.span)
        case Apply(op="mod", operands=(_, one)) if _value(one, 1):
            return const(0, n.dtype, n.span)
    return None


def double_negation(n: Node) -> Node | None:
    """-(-x) -> x;  not not x -> x"""
    match n:
        case Apply(op="neg" | "not" as op, operands=(Apply(op=inner, operands=(x,)),)) if op == inner:
            return cast_to(x, n.dtype, n.span)
    return None


def same_operands(n: Node) -> Node | None:
    """min(x, x), max(x, x), x and x, x or x -> x;  for integers x == x, x <= x -> true, x != x, x < x -> false"""
    match n:
        case Apply(op="min" | "max" | "and" | "or", operands=(a, b)) if a is b:
            return cast_to(a, n.dtype, n.span)
        case Apply(op="eq" | "le", operands=(a, b)) if a is b and not a.dtype.is_float:
            return const(True, DType.BOOL, n.span)
        case Apply(op="ne" | "lt", operands=(a, b)) if a is b and not a.dtype.is_float:
            return const(False, DType.BOOL, n.span)
    return None


def boolean_constant(n: Node) -> Node | None:
    """x and true -> x;  x and false -> false;  x or false -> x;  x or true -> true;  either side"""
    match n:
        case Apply(op="and" | "or" as op, operands=(a, b)):
            for x, c in ((a, b), (b, a)):
                if isinstance(c, Const):
                    return x if bool(c.value) == (op == "and") else c
    return None


def negated_comparison(n: Node) -> Node | None:
    """not x == y -> x != y;  not x != y -> x == y;  for integers not x < y -> y <= x, not x <= y -> y < x"""
    match n:
        case Apply(op="not", operands=(Apply(op="eq" | "ne" as op, operands=(a, b)),)):
            return apply("ne" if op == "eq" else "eq", a, b, span=n.span)
        case Apply(op="not", operands=(Apply(op="lt" | "le" as op, operands=(a, b)),)):
            if not a.dtype.is_float and not b.dtype.is_float:
                return apply("le" if op == "lt" else "lt", b, a, span=n.span)
    return None


def constant_condition(n: Node) -> Node | None:
    """where(true, a, b) -> a;  where(false, a, b) -> b;  where(c, a, a) -> a;  where(not c, a, b) -> where(c, b, a)"""
    match n:
        case Apply(op="where", operands=(Const(value=c), a, b)):
            return cast_to(a if c else b, n.dtype, n.span)
        case Apply(op="where", operands=(_, a, b)) if a is b:
            return cast_to(a, n.dtype, n.span)
        case Apply(op="where", operands=(Apply(op="not", operands=(c,)), a, b)):
            return apply("where", c, b, a, span=n.span)
    return None


def repeated_condition(n: Node) -> Node | None:
    """where(c, where(c, a, b), d) -> where(c, a, d);  where(c, a, where(c, b, d)) -> where(c, a, d)"""
    match n:
        case Apply(op="where", operands=(c, Apply(op="where", operands=(inner, a, _)), d)) if inner is c:
            return cast_to(apply("where", c, cast_to(a, n.dtype), cast_to(d, n.dtype), span=n.span), n.dtype)
        case Apply(op="where", operands=(c, a, Apply(op="where", operands=(inner, _, d)))) if inner is c:
            return cast_to(apply("where", c, cast_to(a, n.dtype), cast_to(d, n.dtype), span=n.span), n.dtype)
    return None


def true_predicate(n: Node) -> Node | None:
    """R[j | true](x) -> R[j](x)"""
    match n:
        case Reduce(predicate=Const(value=True)):
            return reduce(n.fn, n.bound, n.body, None, n.span)
    return None


def exact_cast(n: Node) -> Node | None:
    """A cast of a constant that the type holds exactly is a constant; a widening before a cast to the same family goes"""
    match n:
        case Cast(operand=Const(value=v, dtype=have)) if have is not DType.BOOL and _holds(n.dtype, v):
            return const(v, n.dtype, n.span)
        case Cast(operand=Cast(operand=x)) if x.dtype is n.dtype and _widens(x.dtype, n.operand.dtype):
            return x
    return None


def _widens(narrow: DType, wide: DType) -> bool:
    """Does every value of `narrow` survive in `wide`."""
    if narrow.is_float:
        return wide is DType.F64 or (wide is DType.F32 and narrow is not DType.F64)
    if narrow.is_integer and wide.is_integer:
        (a, b), (c, d) = INTEGER_RANGES[narrow], INTEGER_RANGES[wide]
        return c <= a and b <= d
    return False


_FOLD: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}


def constants(n: Node) -> Node | None:
    """An operation on constants -> its value, where that is exact: integers wrap as the type does, floats must not round"""
    if not isinstance(n, Apply) or not all(isinstance(a, Const) for a in n.operands):
        return None
    values = [a.value for a in n.operands if isinstance(a, Const)]
    if n.op in _COMPARE and all(_holds(a.dtype, v) for a, v in zip(n.operands, values, strict=True)):
        return const(_COMPARE[n.op](*values), DType.BOOL, n.span)
    if n.op == "not":
        return const(not values[0], DType.BOOL, n.span)
    if n.op not in _FOLD or n.dtype is DType.BOOL:
        return None
    return _folded_integer(n, values) if n.dtype.is_integer else _folded_float(n, values)


def _folded_integer(n: Apply, values: list[int | float | bool]) -> Node | None:
    if n.op in ("floordiv", "mod") and values[1] == 0:
        return None
    lo, hi = INTEGER_RANGES[n.dtype]
    return const((int(_FOLD[n.op](*values)) - lo) % (hi - lo + 1) + lo, n.dtype, n.span)


def _folded_float(n: Apply, values: list[int | float | bool]) -> Node | None:
    """Small whole numbers, of which sums and products are exact; and the sign of anything."""
    if n.op == "neg":
        return const(-float(values[0]), n.dtype, n.span)
    small = all(math.isfinite(v) and v == int(v) and abs(v) < 2**12 and v != 0 for v in values)
    if not small or n.op in ("floordiv", "mod"):
        return None
    out = float(_FOLD[n.op](*values))
    return const(out, n.dtype, n.span) if out != 0 else None


def _holds(dtype: DType, value: int | float | bool) -> bool:
    """Is the number exact in the type."""
    if dtype is DType.BOOL:
        return isinstance(value, bool)
    if dtype.is_integer:
        lo, hi = INTEGER_RANGES[dtype]
        return not isinstance(value, float) and lo <= value <= hi
    if dtype is DType.BF16:
        return value in (0, 1, math.inf, -math.inf)
    if dtype is DType.F64 or math.isinf(value):
        return float(value) == value
    try:
        code = "<e" if dtype is DType.F16 else "<f"
        return bool(struct.unpack(code, struct.pack(code, float(value)))[0] == value)
    except OverflowError:
        return False


RULES: tuple[Rule, ...] = (
    constants,
    exact_cast,
    one_factor,
    zero_term,
    integer_zero,
    double_negation,
    same_operands,
    boolean_constant,
    negated_comparison,
    constant_condition,
    repeated_condition,
    true_predicate,
)
