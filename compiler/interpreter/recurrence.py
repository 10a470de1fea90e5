"""Recurrences run on numbers: a cascade step by step over tiles, in parts that are merged, and against the text in float64.

Values are arrays over (row, element): what varies over the reduced set has a column for each element, everything else one.
The step is the one that lower emits, read from the same data, so a wrong repair, guard or merge shows here as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..cascade import COMBINE, Cascade, State, identity, merge
from ..tensor_ir import Apply, Cast, Const, Extent, Index, Node, Read, Reduce, Scalar, carried
from .arithmetic import Array, convert, elementwise, quiet
from .elements import NUMPY

UFUNC: dict[str, Callable[..., Array]] = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "max": np.maximum.reduce,
    "min": np.minimum.reduce,
    "any": np.logical_or.reduce,
    "all": np.logical_and.reduce,
}
Values = Mapping[Node, Array]


def leaves(c: Cascade) -> list[Node]:
    """What a run needs values for: reads, scalars, extents, indices and reductions over other sets, in a fixed order."""
    states = {s.reduction for s in c.states}
    found: dict[Node, None] = {}
    stack = [n for s in reversed(c.states) for n in reversed(s.reduction.args)]
    seen: set[Node] = set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if isinstance(n, Read | Scalar | Extent | Index) or (isinstance(n, Reduce) and n not in states):
            found[n] = None
        else:
            stack.extend(reversed(n.args))
    return list(found)


def as_written(c: Cascade, values: Values) -> dict[str, Array]:
    """The states by name, each reduction finished before the next begins, in the precision of `values`."""
    known, n = dict(values), _elements(c, values)
    out: dict[str, Array] = {}
    with quiet():
        for s in c.states:
            found = _part(s, s.reduction.body, s.reduction.predicate, known, n)
            known[s.reduction] = out[s.name] = found
    return out


def one_pass(c: Cascade, values: Values, tile: int, parts: int = 1) -> dict[str, Array]:
    """The states by name after one pass over tiles of `tile` elements, the set cut into `parts` that are merged."""
    n = _elements(c, values)
    step = -(-n // parts)
    with quiet():
        done = [_pass(c, _columns(c, values, k, min(k + step, n)), tile) for k in range(0, n, step)]
        total = done[0]
        for other in done[1:]:
            total = _merged(c, total, other, values)
    return total


def _pass(c: Cascade, values: Values, tile: int) -> dict[str, Array]:
    rows = max((v.shape[0] for v in values.values()), default=1)
    n = _elements(c, values)
    states = {s.name: _start(s, values, rows) for s in c.states}
    for at in range(0, n, tile):
        known = dict(_columns(c, values, at, min(at + tile, n)))
        known |= {s.old: states[s.name] for s in c.states}
        new: dict[str, Array] = {}
        for s in c.states:
            part = _part(s, s.g, s.predicate, known, min(tile, n - at))
            old = states[s.name] if s.moved is None else evaluate(s.moved, known)
            known[s.new] = new[s.name] = elementwise(COMBINE[s.reduction.fn], old, part)
        states = new
    return states


def _start(s: State, values: Values, rows: int) -> Array:
    return np.full((rows, 1), identity(s.reduction), _dtype(s.reduction.dtype, values))


def _merged(c: Cascade, a: Mapping[str, Array], b: Mapping[str, Array], values: Values) -> dict[str, Array]:
    """Two parts' states merged by the nodes that derive gives for it."""
    sides = [{s.name: _final(s, side) for s in c.states} for side in ("a", "b")]
    nodes = merge(c, sides[0], sides[1])
    known = dict(values)
    for side, part in zip(sides, (a, b), strict=True):
        known |= {side[n]: v for n, v in part.items()}
    return {name: evaluate(n, known) for name, n in nodes.items()}


def _final(s: State, side: str) -> Node:
    """A stand-in for a state of one part."""
    return carried(f"{side}:{s.name}", "final", s.reduction.axes, s.reduction.dtype)


def _columns(c: Cascade, values: Values, lo: int, hi: int) -> dict[Node, Array]:
    """Elements lo to hi of what varies."""
    bound = frozenset(c.bound)
    return {n: v[:, lo:hi] if n.axes & bound else v for n, v in values.items()}


def _elements(c: Cascade, values: Values) -> int:
    bound = frozenset(c.bound)
    return max((v.shape[1] for n, v in values.items() if n.axes & bound), default=1)


def _part(s: State, body: Node, predicate: Node | None, known: Values, width: int) -> Array:
    """F over the elements at hand."""
    value = evaluate(body, known)
    shown = np.broadcast_to(value, (value.shape[0], width))
    if predicate is not None:
        holds = evaluate(predicate, known)
        shown = np.where(holds, shown, np.asarray(identity(s.reduction), shown.dtype))
    dtype = _dtype(s.reduction.dtype, known)
    return np.asarray(UFUNC[s.reduction.fn](shown.astype(dtype), axis=1, keepdims=True), dtype)


def _dtype(dtype: DType, values: Values) -> np.dtype[np.generic]:
    """f64 where the run is in f64, whatever the text says."""
    exact = any(v.dtype == np.float64 for v in values.values())
    return np.dtype(np.float64) if exact and dtype.is_float else NUMPY[dtype]


def evaluate(root: Node, known: Values) -> Array:
    """A node's value from those of `known`, outermost first; floats of an f64 run stay f64."""
    exact = any(v.dtype == np.float64 for v in known.values())
    done = dict(known)
    for n in _needed(root, known):
        match n:
            case Const(value=v):
                done[n] = np.full((1, 1), v, _dtype(n.dtype, known))
            case Cast(operand=x):
                done[n] = (
                    done[x] if exact and n.dtype.is_float and x.dtype.is_float else convert(done[x], n.dtype)
                )
            case Apply(op=op, operands=operands):
                done[n] = elementwise(op, *(done[x] for x in operands))
            case _:
                raise ValueError(f"{type(n).__name__} has no value here")
    return done[root]


def _needed(root: Node, known: Values) -> list[Node]:
    """Nodes to compute, arguments first; nothing below a known one."""
    order: list[Node] = []
    seen: set[Node] = set(known)
    stack = [(root, False)]
    while stack:
        n, ready = stack.pop()
        if ready:
            order.append(n)
        elif n not in seen:
            seen.add(n)
            stack.append((n, True))
            stack.extend((a, False) for a in n.args)
    return order


# ---------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trial:
    """One kind of row: the greatest error, relative to the greatest magnitude, of a state in f32 against float64.

    `one_pass` is the recurrence, `as_written` one reduction after another; NaN where float64 itself has no number there.
    """

    rows: str
    state: str
    one_pass: float
    as_written: float


ROWS: dict[str, Callable[[Array], Array]] = {
    "normal": lambda x: x,
    "100 times larger": lambda x: x * 100,
    "one element far above the others": lambda x: np.where(
        np.arange(x.shape[1]) == x.shape[1] // 2, 60.0, x - 60.0
    ),
    "all equal": lambda x: np.full_like(x, 1.25),
    "offset by 1e4": lambda x: x + 1e4,
    "the lowest finite number everywhere": lambda x: np.full_like(x, np.finfo(np.float32).min),
    "first half -inf": lambda x: np.where(np.arange(x.shape[1]) < x.shape[1] // 2, -np.inf, x),
}


def trials(c: Cascade, elements: int = 512, tile: int = 64, seed: int = 0) -> list[Trial]:
    """The recurrence on rows that are known to break careless ones; the first state's first element-wise operand varies."""
    given = leaves(c)
    bound = frozenset(c.bound)
    subject = next((n for n in given if n.axes & bound and n.dtype.is_float), None)
    found: list[Trial] = []
    for rows, change in ROWS.items() if subject is not None else ():
        rng = np.random.default_rng(seed)
        values = {n: sample(n, bound, elements, rng) for n in given}
        assert subject is not None
        values[subject] = change(values[subject].astype(np.float64)).astype(np.float32)
        exact = as_written(c, {n: _exact(v) for n, v in values.items()})
        once, plain = one_pass(c, values, tile), as_written(c, values)
        for s in c.states:
            errors = (_error(x[s.name], exact[s.name]) for x in (once, plain))
            found.append(Trial(rows, s.name, *errors))
    return found


def sample(n: Node, bound: frozenset[str], elements: int, rng: np.random.Generator, rows: int = 4) -> Array:
    """Values for a leaf: normal floats, true conditions, and the number of elements for every extent."""
    shape = (rows, elements if n.axes & bound else 1)
    if n.dtype is DType.BOOL:
        return rng.random(shape) < 0.8
    if isinstance(n, Index) and n.axes & bound:
        return np.broadcast_to(np.arange(elements), shape)
    if n.dtype.is_integer:
        return np.full((1, 1) if not n.axes else shape, elements, NUMPY[n.dtype])
    return rng.standard_normal(shape).astype(np.float32)


def _exact(v: Array) -> Array:
    return v.astype(np.float64) if v.dtype.kind == "f" else v


def _error(found: Array, exact: Array) -> float:
    """Greatest difference relative to the greatest magnitude; infinities and NaN must agree."""
    found, exact = np.broadcast_arrays(found, exact)
    finite = np.isfinite(exact)
    if not np.array_equal(np.isfinite(found), finite):
        return float("inf")
    scale = float(np.max(np.abs(exact[finite]), initial=0.0)) or 1.0
    return float(np.max(np.abs(found[finite] - exact[finite]), initial=0.0)) / scale


def rescale_bound(tiles: int, dtype: DType = DType.F32) -> float:
    """Relative error that mending adds to a sum of one sign over a pass of `tiles` steps: two roundings a step, the factor's
    own (an exponential within 2 units in the last place) and the product's (Higham, Accuracy and Stability, section 3.1)."""
    unit = 2.0**-24 if dtype is not DType.F64 else 2.0**-53
    return 3 * tiles * unit / (1 - 3 * tiles * unit)
