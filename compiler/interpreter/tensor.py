"""The meaning of the language: a graph's values in NumPy, one definition after another (DESIGN 8).

`storage` computes as the language says: f32 for f16, bf16 and f32, every store rounded to its type. `float64` is the same
program with every float in f64, casts and stores included: the oracle.

An element that must not exist (an index outside its tensor, a division of integers by zero) is no error where it arises
but a *fault* that travels with the value; `where`, `and`, `or` and predicates stop it, and it is raised only if an output
depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from typing import Literal

import numpy as np

from ...dsl.records import dataclass
from ...dsl.types import DType, promote
from ..calls import check_call, extents_of
from ..evaluate import Number, evaluate
from ..passes.canonicalize import canonicalize
from ..remarks import Remarks
from ..spelling import brief
from ..tensor_ir import (
    FLOATING,
    Apply,
    Cast,
    Const,
    Definition,
    Extent,
    Graph,
    Index,
    Node,
    Read,
    Reduce,
    Scalar,
    When,
    walk,
)
from .arithmetic import Array, convert, element, elementwise, highest, lowest, quiet, reduced
from .elements import NUMPY
from .named import Axes, Named, product_sum, union

Precision = Literal["storage", "float64"]
Window = tuple[tuple[str, int, int], ...]
BLOCK_ELEMENTS = 1 << 22
"""Elements of the largest temporary array; a definition is evaluated in blocks of its leading axes to stay below."""

FACTORS = 8
"""Factors of a product that are told apart."""


def run(
    graph: Graph,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Number],
    *,
    precision: Precision = "storage",
    check_indices: bool = True,
) -> dict[str, Array]:
    """The outputs of a call in order, then the updated inout parameters. Arguments are not changed.

    Raises ValueError in words where a check fails, and with `check_indices` where an output depends on an index outside
    its tensor, on an integer divided by zero, or on an element that `=` writes twice. Without it such indices are
    clamped, such quotients are 0 and such writes are dropped.
    """
    if any(
        isinstance(n, When) for n in walk(n for d in graph.definitions for n in (d.value, *(d.target or ())))
    ):
        graph = canonicalize(graph, Remarks())
    extents = extents_of(graph, {n: np.shape(t) for n, t in tensors.items()}, scalars)
    check_call(graph, extents, scalars)
    work = _Run(graph, extents, dict(scalars), precision, check_indices)
    with quiet():
        for name, tensor in graph.tensors.items():
            work.stored[name] = work.argument(name, np.asarray(tensors[name]), tensor.dtype)
        for definition in graph.definitions:
            work.define(definition)
    updated = [d.name for d in graph.definitions if d.target is not None]
    return {n: work.results[n] for n in (*graph.outputs, *updated)}


@dataclass
class Value:
    """`value` and, where elements must not exist, `fault`: 0 or the number of a fault."""

    value: Named
    fault: Named | None = None


@dataclass
class _Run:
    graph: Graph
    extents: Mapping[str, int]
    scalars: Mapping[str, Number]
    precision: Precision
    check: bool
    stored: dict[str, Array] = field(default_factory=dict)
    results: dict[str, Array] = field(default_factory=dict)
    stored_faults: dict[str, Array] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = {a: k for k, a in enumerate(self.graph.axes)}
        self.sizes = {a: int(evaluate(e, self.extents, self.scalars)) for a, e in self.graph.axes.items()}

    def dtype(self, dtype: DType) -> DType:
        """The element type that stands for `dtype` at this precision."""
        return DType.F64 if dtype.is_float and self.precision == "float64" else dtype

    def argument(self, name: str, array: Array, dtype: DType) -> Array:
        have, want = array.dtype, NUMPY[dtype]
        floats = dtype.is_float and (have.kind == "f" or have == NUMPY[DType.BF16])
        if have != want and not floats:
            raise TypeError(f"{self.graph.name}: `{name}` has dtype {have}; it needs {dtype}")
        return convert(array, self.dtype(dtype))

    # ------------------------------------------------------------ definitions

    def define(self, d: Definition) -> None:
        shape = tuple(self.sizes[a] for a in d.axes)
        dtype = self.dtype(d.dtype)
        out = np.zeros(shape, NUMPY[dtype])
        faults = np.zeros(shape, np.int16)
        for window in self._windows(d):
            place = tuple(slice(lo, hi) for _, lo, hi in window)
            found = _Block(self, window).value(d.value)
            out[place] = convert(self._in_order(found.value, d.axes), dtype)
            if found.fault is not None:
                faults[place] = self._in_order(found.fault, d.axes)
        if d.target is not None:
            self._update(d, out, faults)
        elif d.name in self.graph.outputs:
            self._raise(d.name, d.axes, faults)
            self.results[d.name] = out
        self.stored.setdefault(d.name, out)
        if faults.any():
            self.stored_faults[d.name] = faults

    def _in_order(self, value: Named, axes: Axes) -> Array:
        inside = tuple(sorted(axes, key=self.order.__getitem__))
        return value.along(inside).transpose([inside.index(a) for a in axes])

    def _raise(self, name: str, axes: Sequence[str], faults: Array) -> None:
        if self.check and faults.any():
            point = np.argwhere(faults)[0]
            where = ", ".join(f"{a} = {k}" for a, k in zip(axes, point, strict=True))
            words = self.faults[int(faults[tuple(point)]) - 1]
            raise ValueError(
                f"{self.graph.name}: {words}, and `{name}` depends on it{' at ' if where else ''}{where}"
            )

    def _windows(self, d: Definition) -> Iterator[Window]:
        """Blocks of a definition's axes that keep temporary arrays small."""
        factor = self._largest(d.value) / BLOCK_ELEMENTS
        pieces = []
        for axis in d.axes:
            size = self.sizes[axis]
            step = size if factor <= 1 or d.target is not None else max(1, math.ceil(size / factor))
            factor /= max(1, size / max(1, step))
            pieces.append([(axis, lo, min(size, lo + step)) for lo in range(0, size, max(1, step))])
        return iter(product(*pieces))

    def _largest(self, value: Node) -> int:
        """Elements of the largest temporary; products inside contractions are never formed."""
        largest, seen, stack = 1, {value}, [value]
        while stack:
            n = stack.pop()
            largest = max(largest, math.prod(self.sizes[a] for a in n.axes))
            new = [p for p in parts(n) if p not in seen]
            seen.update(new)
            stack.extend(new)
        return largest

    def _update(self, d: Definition, values: Array, faults: Array) -> None:
        """Elements outside the tensor are dropped; `+=` sums duplicates in the computing type, then rounds once."""
        assert d.target is not None
        block = _Block(self, tuple((a, 0, self.sizes[a]) for a in d.axes))
        old = self.stored[d.name]
        inside = np.ones(values.shape, np.bool_)
        places = []
        for k, node in enumerate(d.target):
            found = block.value(node)
            place = np.broadcast_to(self._in_order(found.value, d.axes), values.shape)
            wrong = (place < 0) | (place >= old.shape[k])
            faults = np.where(wrong, self.fault(f"index {k + 1} of `{d.name}` is outside it"), faults)
            if found.fault is not None:
                faults = np.where(faults, faults, self._in_order(found.fault, d.axes))
            inside &= ~wrong
            places.append(place)
        self._raise(d.name, d.axes, faults)
        where = tuple(p[inside] for p in places)
        if d.accumulate:
            wide = convert(old, self.dtype(promote(element(old), element(old)))).copy()
            np.add.at(wide, where, convert(values[inside], element(wide)))
            self.results[d.name] = convert(wide, element(old))
            return
        self._distinct(d.name, where)
        self.results[d.name] = old.copy()
        self.results[d.name][where] = values[inside]

    def _distinct(self, name: str, where: tuple[Array, ...]) -> None:
        points = np.stack(where, axis=-1) if where else np.zeros((1, 0))
        if self.check and len(np.unique(points, axis=0)) < len(points):
            raise ValueError(
                f"{self.graph.name}: `=` writes an element of `{name}` more than once; `+=` would sum them"
            )

    def fault(self, words: str) -> int:
        """The number of a kind of fault."""
        if words not in self.faults:
            self.faults.append(words)
        return self.faults.index(words) + 1


# ---------------------------------------------------------------- one block


class _Block:
    """Evaluates nodes at the points of a window; a reduction opens the whole of its axes."""

    def __init__(self, run: _Run, window: Window) -> None:
        self.run = run
        self.window = {a: (lo, hi) for a, lo, hi in window}
        self.done: dict[tuple[Node, Window], Value] = {}

    def value(self, root: Node) -> Value:
        start = self._task(root, self.window)
        stack = [(start, self.window)]
        while stack:
            task, ranges = stack[-1]
            if task in self.done:
                stack.pop()
                continue
            node = task[0]
            inner = self._inside(node, ranges)
            needed = [(self._task(p, inner), inner) for p in parts(node)]
            missing = [n for n in needed if n[0] not in self.done]
            if missing:
                stack.extend(missing)
                continue
            self.done[task] = self._one(node, [self.done[n[0]] for n in needed], inner)
            stack.pop()
        return self.done[start]

    def _task(self, node: Node, ranges: Mapping[str, tuple[int, int]]) -> tuple[Node, Window]:
        return node, tuple((a, *ranges[a]) for a in sorted(node.axes))

    def _inside(self, node: Node, ranges: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        if not isinstance(node, Reduce):
            return ranges
        return {**ranges, **{a: (0, self.run.sizes[a]) for a in node.bound}}

    # ------------------------------------------------------------ nodes

    def _one(self, node: Node, args: list[Value], ranges: Mapping[str, tuple[int, int]]) -> Value:
        match node:
            case Const(value=v):
                return self._scalar(v, node.dtype)
            case Scalar(name=name):
                return self._scalar(self.run.scalars[name], node.dtype)
            case Extent(name=name):
                return self._scalar(self.run.extents[name], node.dtype)
            case Index(axis=axis):
                return Value(Named((axis,), np.arange(*ranges[axis], dtype=np.int64)))
            case Read():
                return self._read(node, args, ranges)
            case Cast():
                data = args[0].value
                return Value(Named(data.axes, convert(data.data, self.run.dtype(node.dtype))), args[0].fault)
            case Apply():
                return self._apply(node, args)
            case Reduce():
                return self._reduce(node, args, ranges)
        raise TypeError(f"the interpreter has no meaning for {type(node).__name__}")

    def _scalar(self, value: Number, dtype: DType) -> Value:
        return Value(Named((), np.asarray(value).astype(NUMPY[self.run.dtype(dtype)])))

    def _along(self, *values: Named) -> tuple[Axes, list[Array]]:
        axes = union(values, self.run.order)
        return axes, [v.along(axes) for v in values]

    def _read(self, node: Read, args: list[Value], ranges: Mapping[str, tuple[int, int]]) -> Value:
        data, faults = self.run.stored[node.tensor], self.run.stored_faults.get(node.tensor)
        names = [i.axis for i in node.indices if isinstance(i, Index)]
        if len(set(names)) == len(node.indices) and self._fits(names, data.shape, ranges):
            return self._slice(data, faults, names, ranges)
        axes, indices = self._along(*(a.value for a in args))
        shape = np.broadcast_shapes(*(i.shape for i in indices))
        found = [a.fault for a in args]
        for k, (i, size) in enumerate(zip(indices, data.shape, strict=True)):
            wrong = (i < 0) | (i >= size)
            if wrong.any():
                words = f"index {k + 1} of `{node.tensor}`, `{brief(node.indices[k])}`, is outside it"
                found.append(Named(axes, np.where(wrong, self.run.fault(words), 0).astype(np.int16)))
        if 0 in data.shape:
            return Value(Named(axes, np.zeros(shape, data.dtype)), self._first(found))
        place = tuple(np.clip(i, 0, size - 1) for i, size in zip(indices, data.shape, strict=True))
        if faults is not None:
            found.append(Named(axes, faults[place]))
        return Value(Named(axes, data[place]), self._first(found))

    def _fits(self, names: list[str], shape: tuple[int, ...], ranges: Mapping[str, tuple[int, int]]) -> bool:
        return all(ranges[a][1] <= size for a, size in zip(names, shape, strict=True))

    def _slice(
        self, data: Array, faults: Array | None, names: list[str], ranges: Mapping[str, tuple[int, int]]
    ) -> Value:
        axes = tuple(sorted(names, key=self.run.order.__getitem__))
        place = tuple(slice(*ranges[a]) for a in names)
        turn = [names.index(a) for a in axes]
        fault = None if faults is None else _some(Named(axes, faults[place].transpose(turn)))
        return Value(Named(axes, data[place].transpose(turn)), fault)

    # ------------------------------------------------------------ operations

    def _apply(self, node: Apply, args: list[Value]) -> Value:
        axes, operands = self._along(*(a.value for a in args))
        if node.op in FLOATING and self.run.precision == "float64":
            operands = [convert(x, DType.F64) for x in operands]
        out = Named(axes, elementwise(node.op, *operands))
        return Value(out, self._operation_fault(node, args))

    def _operation_fault(self, node: Apply, args: list[Value]) -> Named | None:
        faults = [a.fault for a in args]
        if node.op in ("floordiv", "mod") and node.dtype.is_integer:
            zero = args[1].value.data == 0
            if zero.any():
                number = self.run.fault(f"`{brief(node)}` divides by zero")
                faults.append(Named(args[1].value.axes, np.where(zero, number, 0).astype(np.int16)))
        if not any(faults):
            return None
        if node.op == "where":
            chosen = args[0].value
            return self._first(
                [faults[0], self._only(faults[1], chosen), self._only(faults[2], chosen, unless=True)]
            )
        if node.op in ("and", "or"):
            return self._first([faults[0], self._only(faults[1], args[0].value, unless=node.op == "or")])
        return self._first(faults)

    def _only(self, fault: Named | None, where: Named, unless: bool = False) -> Named | None:
        """The faults where a condition holds, or where it does not."""
        if fault is None:
            return None
        axes, (f, w) = self._along(fault, where)
        return _some(Named(axes, np.where(~w if unless else w, f, 0).astype(np.int16)))

    def _first(self, faults: Sequence[Named | None]) -> Named | None:
        """The first fault of each element."""
        out: Named | None = None
        for fault in faults:
            if out is None or fault is None:
                out = out or fault
            else:
                axes, (a, b) = self._along(out, fault)
                out = Named(axes, np.where(a, a, b))
        return out and _some(out)

    # ------------------------------------------------------------ reductions

    def _reduce(self, node: Reduce, args: list[Value], ranges: Mapping[str, tuple[int, int]]) -> Value:
        predicate = args[-1].value if node.predicate is not None else None
        bodies = args[:-1] if node.predicate is not None else args
        fault = self._first([b.fault for b in bodies])
        if predicate is not None:
            fault = self._first([args[-1].fault, self._only(fault, predicate)])
        if fault is not None:
            fault = self._any(fault, node.bound)
        if len(bodies) > 1:
            return Value(self._contract(node, [b.value for b in bodies], predicate, ranges), fault)
        return Value(self._over(node, bodies[0].value, predicate, ranges), fault)

    def _any(self, fault: Named, bound: tuple[str, ...]) -> Named | None:
        over = tuple(k for k, a in enumerate(fault.axes) if a in bound)
        kept = tuple(a for a in fault.axes if a not in bound)
        return _some(Named(kept, fault.data.max(axis=over, initial=0)))

    def _over(
        self, node: Reduce, body: Named, predicate: Named | None, ranges: Mapping[str, tuple[int, int]]
    ) -> Named:
        """A reduction of an array: excluded elements are replaced by what does not count."""
        need = set(body.axes) | set(node.bound) | set(predicate.axes if predicate else ())
        axes = tuple(sorted(need, key=self.run.order.__getitem__))
        shape = tuple(ranges[a][1] - ranges[a][0] for a in axes)
        dtype = self.run.dtype(node.dtype) if node.fn not in ("argmax", "argmin") else element(body.data)
        data = np.broadcast_to(convert(body.along(axes), dtype), shape)
        over = tuple(k for k, a in enumerate(axes) if a in node.bound)
        kept = tuple(a for a in axes if a not in node.bound)
        if predicate is None:
            return Named(kept, reduced(node.fn, data, over))
        mask = np.broadcast_to(predicate.along(axes), shape)
        if node.fn in ("argmax", "argmin"):
            return Named(kept, _position(node.fn, data, mask, over[0]))
        return Named(
            kept, reduced(node.fn, np.where(mask, data, _neutral(node.fn, dtype)).astype(data.dtype), over)
        )

    def _contract(
        self,
        node: Reduce,
        factors: list[Named],
        predicate: Named | None,
        ranges: Mapping[str, tuple[int, int]],
    ) -> Named:
        """A sum of products; with a predicate it is one more factor, unless 0 times it would not be 0."""
        dtype = self.run.dtype(node.dtype)
        factors = [Named(f.axes, convert(f.data, dtype)) for f in factors]
        if predicate is not None and all(np.isfinite(f.data).all() for f in factors):
            factors = [*factors, Named(predicate.axes, convert(predicate.data, dtype))]
            predicate = None
        bound = frozenset(node.bound)
        covered = bound <= frozenset(a for f in factors for a in f.axes)
        if predicate is None and covered:
            return product_sum(factors, bound, self.run.order)
        axes = union(factors, self.run.order)
        body = factors[0].along(axes)
        for f in factors[1:]:
            body = np.asarray(body * f.along(axes))
        return self._over(node, Named(axes, body), predicate, ranges)


def _some(fault: Named) -> Named | None:
    return fault if fault.data.any() else None


def _neutral(fn: str, dtype: DType) -> Number:
    """What a reduction of nothing gives."""
    neutral: dict[str, Number] = {"sum": 0, "prod": 1, "any": False, "all": True}
    if fn in neutral:
        return neutral[fn]
    return lowest(dtype) if fn == "max" else highest(dtype)


def _position(fn: str, data: Array, mask: Array, axis: int) -> Array:
    """argmax or argmin among the elements that take part: the first NaN, else the first extremum, -1 for none."""
    if data.shape[axis] == 0:
        return np.full(data.shape[:axis] + data.shape[axis + 1 :], -1, np.int64)
    nan = (
        np.isnan(data.astype(np.float64)) & mask
        if data.dtype.kind not in "iub"
        else np.zeros(mask.shape, np.bool_)
    )
    fill = _neutral("max" if fn == "argmax" else "min", element(data))
    kept = np.where(mask, data, np.asarray(fill).astype(data.dtype))
    best = (np.max if fn == "argmax" else np.min)(
        np.where(nan, data.dtype.type(0), kept), axis=axis, keepdims=True
    )
    hit = np.where(nan.any(axis=axis, keepdims=True), nan, (kept == best) & mask)
    return np.where(mask.any(axis=axis), np.argmax(hit, axis=axis), -1).astype(np.int64)


def parts(node: Node) -> tuple[Node, ...]:
    """What a node needs: its arguments, but the factors of a contraction instead of their product."""
    if isinstance(node, Reduce) and _contraction(node):
        return (*_factors(node), *node.args[1:])
    return node.args


def _contraction(node: Reduce) -> bool:
    """A sum of products whose factors vary over less than the product does."""
    if node.fn != "sum" or node.body.dtype is not node.dtype:
        return False
    factors = _factors(node)
    return len(factors) > 1 and all(f.axes != node.body.axes for f in factors)


def _factors(node: Reduce) -> list[Node]:
    """The factors of the body that are no products themselves, in order."""
    out: list[Node] = []
    stack = [node.body]
    while stack:
        n = stack.pop()
        if (
            isinstance(n, Apply)
            and n.op == "mul"
            and n.dtype is node.dtype
            and len(out) + len(stack) < FACTORS
        ):
            stack.extend(reversed(n.operands))
        else:
            out.append(n)
    return out
