"""reciprocals: what ends in a softmax's exponential and is divided by one number everywhere is multiplied by its reciprocal.

softmax(q·kᵀ / √D), as textbooks write it, is then what softmax(scale · q·kᵀ) is: a positive factor, which normalize moves
out of the maximum, so that an element costs one fused multiply-add and no division.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ..cascade import typed
from ..remarks import Remarks
from ..tensor_ir import Apply, Cast, Const, Node, Reduce, apply, const, rebuild, walk

RECIPROCAL = "a divisor without axes, in an exponent, is a factor: equal over the reals, one rounding more"
OPEN = ("add", "sub", "neg", "max", "min", "where")
"""Through which an exponent is searched, besides products, quotients and tanh."""


def reciprocals(values: list[Node], remarks: Remarks) -> list[Node]:
    """exp(… x/k … - r) -> exp(… 1/k·x … - r) for a reduction r and a k without axes. The same x/k becomes the same product
    wherever it stands, so that r is still the maximum of what it is subtracted from. Factors of one x are gathered."""
    exponents = [n.operands[0] for n in walk(values) if isinstance(n, Apply) and n.op == "exp"]
    found = set(chain.from_iterable(map(_scaled_in, filter(_is_shifted, exponents))))
    if not any(n.op == "div" for n in found):
        return values
    done: dict[Node, Node] = {}
    for n in walk(values):
        new = rebuild(n, tuple(done[a] for a in n.args))
        done[n] = _product(new) if n in found and isinstance(new, Apply) else new
        if n in found and isinstance(n, Apply) and n.op == "div":
            remarks.add("applied", "reciprocals", "reciprocal", RECIPROCAL, n.span)
    return [done[v] for v in values]


def _is_shifted(n: Node) -> bool:
    """x - r or k·(x - r), r a maximum or what stands in for one of -inf."""
    match n:
        case Apply(op="mul", operands=(k, x)) if not k.axes:
            n = x
    return (
        isinstance(n, Apply)
        and n.op == "sub"
        and any(isinstance(x, Reduce) and x.fn in ("max", "min") for x in walk([n.operands[1]]))
    )


def _scaled_in(exponent: Node) -> Iterator[Apply]:
    """The quotients and products in an exponent with a number that is the same everywhere. A constant divisor below a tanh
    stays, for a cap's own constant meets it there."""
    stack, seen = [(exponent, False)], set()
    while stack:
        top = n, capped = stack.pop()
        if top in seen:
            continue
        seen.add(top)
        match n:
            case Apply(op="div", operands=(x, k)):
                if x.axes and not k.axes and n.dtype.is_float and not (capped and isinstance(k, Const)):
                    yield n
                stack.append((x, capped))
            case Apply(op="mul", operands=operands):
                if sum(bool(a.axes) for a in operands) == 1 and n.dtype.is_float:
                    yield n
                stack += [(a, capped) for a in operands]
            case Apply(op=op, operands=operands) if op in OPEN or op == "tanh":
                stack += [(a, capped or op == "tanh") for a in operands]
            case Cast(operand=x) | Reduce(fn="max" | "min", body=x):
                if n.dtype.is_float:  # one rounding more can make another integer
                    stack.append((x, capped))


def _product(n: Apply) -> Node:
    """x/k or k·x as one factor and the rest."""
    if n.op == "div":
        x, k = n.operands
        factor = _reciprocal(k)
    else:
        factor, x = sorted(n.operands, key=lambda a: bool(a.axes))
    match x:
        case Apply(op="mul", operands=(inner, rest)) if not inner.axes:
            return apply("mul", apply("mul", inner, factor), rest, span=n.span)
    return apply("mul", factor, x, span=n.span) if n.op == "div" else n


def _reciprocal(k: Node) -> Node:
    one = typed(1, k.dtype)
    if isinstance(k, Const) and k.value:
        return const(one / k.value, k.dtype)
    return apply("div", const(one, k.dtype), k)
