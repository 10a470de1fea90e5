"""Values of expressions without axes and tensors, in plain Python: shapes, checks, what `require` states."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping

from ..dsl.records import dataclass
from .spelling import brief
from .tensor_ir import Apply, Cast, Const, Extent, Node, Scalar, walk

Number = int | float | bool


@dataclass(frozen=True)
class Fault:
    """A value that does not exist; raised only where it is needed: `B == 0 or H // B > 1` is fine for B = 0."""

    words: str


def _rounded(x: float) -> Number:
    return float(round(x)) if math.isfinite(x) else x


_OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "not": operator.not_,
    "exp": math.exp,
    "exp2": math.exp2,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "tanh": math.tanh,
    "erf": math.erf,
    "sin": math.sin,
    "cos": math.cos,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "round": _rounded,
    "pow": operator.pow,
}


def evaluate(node: Node, extents: Mapping[str, int], scalars: Mapping[str, Number]) -> Number:
    """The value of a node without axes. Raises ValueError in words where it does not exist (division by zero, a domain)."""
    values: dict[Node, Number | Fault] = {}
    for n in walk([node]):
        values[n] = _value(n, values, extents, scalars)
    result = values[node]
    if isinstance(result, Fault):
        raise ValueError(result.words)
    return result


def _value(
    n: Node, values: Mapping[Node, Number | Fault], extents: Mapping[str, int], scalars: Mapping[str, Number]
) -> Number | Fault:
    match n:
        case Const(value=v):
            return v
        case Extent(name=name):
            return extents[name]
        case Scalar(name=name):
            return scalars[name]
        case Cast(operand=x):
            return _cast(n, values[x])
        case Apply(op="and" | "or" as op, operands=(a, b)):
            return _short_circuit(op, values[a], values[b])
        case Apply(op="where", operands=(c, a, b)):
            chosen = values[c]
            return chosen if isinstance(chosen, Fault) else values[a] if chosen else values[b]
        case Apply(op=op, operands=operands):
            return _apply(n, op, [values[o] for o in operands])
    raise TypeError(f"{brief(n)} has no value without a tensor")


def _short_circuit(op: str, a: Number | Fault, b: Number | Fault) -> Number | Fault:
    if isinstance(a, Fault):
        return a
    return bool(a) if bool(a) == (op == "or") else b


def _apply(n: Node, op: str, operands: list[Number | Fault]) -> Number | Fault:
    numbers = []
    for x in operands:
        if isinstance(x, Fault):
            return x
        numbers.append(x)
    try:
        return _OPERATIONS[op](*numbers)
    except ZeroDivisionError:
        return Fault(f"`{brief(n)}` divides by zero")
    except (ValueError, OverflowError):
        return Fault(f"`{brief(n)}` has no finite value")


def _cast(n: Node, x: Number | Fault) -> Number | Fault:
    if isinstance(x, Fault):
        return x
    if n.dtype.is_float:
        return float(x)
    if n.dtype.is_integer:
        return 0 if isinstance(x, float) and not math.isfinite(x) else int(x)
    return bool(x)
