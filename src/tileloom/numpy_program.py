"""A kernel as the NumPy program one would write for it: statement by statement, whole arrays, products by BLAS.

It is what `--vs numpy` measures. Operations run in the element types of the language; common subexpressions are computed
once and dropped after their last use. Unlike the interpreter it tracks no faults: indices out of range are clamped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .arguments import Array, Scalar
from .compiler.calls import check_call, extents_of
from .compiler.evaluate import evaluate
from .compiler.interpreter.arithmetic import (
    convert,
    element,
    elementwise,
    highest,
    lowest,
    quiet,
    reduced,
)
from .compiler.interpreter.elements import NUMPY
from .compiler.interpreter.named import Named, product_sum, union
from .compiler.interpreter.tensor import parts
from .compiler.passes.canonicalize import canonicalize
from .compiler.remarks import Remarks
from .compiler.tensor_ir import (
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
    When,
    apply,
    const,
    walk,
)
from .compiler.tensor_ir import (
    Scalar as ScalarNode,
)
from .dsl.records import dataclass
from .dsl.types import DType


class NumpyProgram:
    """Call it with tensors and scalars by name; outputs, then updated parameters, by name."""

    def __init__(self, graph: Graph) -> None:
        plain = with_zeros(graph)
        self.graph = canonicalize(graph, Remarks()) if plain is None else plain

    def __call__(self, tensors: Mapping[str, Array], scalars: Mapping[str, Scalar]) -> dict[str, Array]:
        extents = extents_of(self.graph, {n: x.shape for n, x in tensors.items()}, scalars)
        check_call(self.graph, extents, scalars)
        stored = dict(tensors)
        work = _Statements(self.graph, extents, scalars, stored)
        last = {
            n.tensor: i
            for i, d in enumerate(self.graph.definitions)
            for n in walk(_roots(d))
            if isinstance(n, Read)
        }
        with quiet():
            for i, d in enumerate(self.graph.definitions):
                work.run(d)
                for name in [n for n, at in last.items() if at == i and n not in tensors]:
                    if name not in self.graph.outputs:
                        del stored[name]
        updated = [d.name for d in self.graph.definitions if d.target is not None]
        return {n: stored[n] for n in (*self.graph.outputs, *updated)}

    def called(self, **arguments: Any) -> tuple[Array, ...]:
        """The same, called as a kernel is: results, updated parameters among the arguments written in place."""
        tensors = {n: arguments[n] for n in self.graph.tensors}
        found = self(tensors, {n: x for n, x in arguments.items() if n not in tensors})
        for name, tensor in self.graph.tensors.items():
            if tensor.inout:
                np.copyto(tensors[name], found[name])
        return tuple(found[n] for n in self.graph.outputs)


def with_zeros(graph: Graph) -> Graph | None:
    """The graph as written, with 0 for elements that are absent where a statement stores them; None where an absent
    value is used inside an expression, whose meaning canonicalize knows."""
    definitions = []
    for d in graph.definitions:
        value = d.value
        if isinstance(value, When):
            value = apply("where", value.predicate, value.value, const(0, value.value.dtype))
        if any(isinstance(n, When) for n in walk([value, *(d.target or ())])):
            return None
        definitions.append(replace(d, value=value))
    return replace(graph, definitions=tuple(definitions))


def _roots(d: Definition) -> tuple[Node, ...]:
    return (d.value, *(d.target or ()))


@dataclass
class _Statements:
    """Runs definitions; `stored` has every tensor that is alive."""

    graph: Graph
    extents: Mapping[str, int]
    scalars: Mapping[str, Scalar]
    stored: dict[str, Array]

    def __post_init__(self) -> None:
        self.order = {a: k for k, a in enumerate(self.graph.axes)}
        self.sizes = {a: int(evaluate(n, self.extents, self.scalars)) for a, n in self.graph.axes.items()}

    def run(self, d: Definition) -> None:
        values = self._values(_roots(d))
        value = self._full(values[0], d.axes)
        if d.target is None:
            self.stored[d.name] = np.asarray(convert(value, d.dtype), order="C")
        else:
            self._update(d, convert(value, d.dtype), values[1:])

    def _full(self, value: Named, axes: tuple[str, ...]) -> Array:
        """The value with one dimension for each axis, in that order."""
        inside = tuple(sorted(axes, key=self.order.__getitem__))
        shape = [self.sizes[a] for a in inside]
        return np.broadcast_to(value.along(inside), shape).transpose([inside.index(a) for a in axes])

    def _update(self, d: Definition, value: Array, target: list[Named]) -> None:
        """`name[target] op value`; elements outside the tensor are dropped."""
        data = self.stored[d.name] = self.stored[d.name].copy()
        places = [self._full(t, d.axes) for t in target]
        inside = np.logical_and.reduce([(p >= 0) & (p < n) for p, n in zip(places, data.shape, strict=True)])
        at = tuple(p[inside] for p in places)
        if d.accumulate:
            np.add.at(data, at, value[inside])
        else:
            data[at] = value[inside]

    # ------------------------------------------------------------ expressions

    def _values(self, roots: tuple[Node, ...]) -> list[Named]:
        """Every node once, arguments first; a value goes when its last reader is done."""
        order = list(_needed(roots))
        uses = Counter(p for n in order for p in parts(n)) + Counter(roots)
        done: dict[Node, Named] = {}
        for n in order:
            done[n] = self._one(n, [done[p] for p in parts(n)])
            for p in parts(n):
                uses[p] -= 1
                if not uses[p]:
                    del done[p]
        return [done[r] for r in roots]

    def _one(self, n: Node, args: list[Named]) -> Named:
        match n:
            case Const(value=v):
                return Named((), np.asarray(v, NUMPY[n.dtype]))
            case ScalarNode(name=name):
                return Named((), np.asarray(self.scalars[name]).astype(NUMPY[n.dtype]))
            case Extent(name=name):
                return Named((), np.asarray(self.extents[name], np.int64))
            case Index(axis=axis):
                return Named((axis,), np.arange(self.sizes[axis], dtype=np.int64))
            case Read():
                return self._read(n, args)
            case Cast():
                return Named(args[0].axes, convert(args[0].data, n.dtype))
            case Apply(op=op):
                axes = union(args, self.order)
                return Named(axes, elementwise(op, *(a.along(axes) for a in args)))
            case Reduce():
                return self._reduce(n, args)
        raise TypeError(f"{type(n).__name__} has no NumPy form")

    def _read(self, n: Read, args: list[Named]) -> Named:
        """A transposed view for plain indices, `take` along single axes, indexing by arrays for the rest."""
        data = self.stored[n.tensor]
        axes = [a.axes[0] if len(a.axes) == 1 else None for a in args]
        if len(set(axes)) < len(axes) or None in axes:
            return self._gather(data, args)
        for k, (i, value) in enumerate(zip(n.indices, args, strict=True)):
            if not isinstance(i, Index) or self.sizes[i.axis] != data.shape[k]:
                data = np.take(data, value.data, axis=k, mode="clip")
        names = [a for a in axes if a is not None]
        final = tuple(sorted(names, key=self.order.__getitem__))
        return Named(final, data.transpose([names.index(a) for a in final]))

    def _gather(self, data: Array, args: list[Named]) -> Named:
        axes = union(args, self.order)
        clipped = (np.clip(a.along(axes), 0, max(0, n - 1)) for a, n in zip(args, data.shape, strict=True))
        return Named(axes, data[tuple(clipped)])

    def _reduce(self, n: Reduce, args: list[Named]) -> Named:
        mask = args.pop() if n.predicate is not None else None
        if len(args) > 1 and (mask is None or n.fn == "sum"):
            factors = [Named(a.axes, convert(a.data, n.dtype)) for a in args]
            if mask is not None:
                factors[0] = self._masked(factors[0], mask, 0)
            bound = frozenset(n.bound)
            if bound <= frozenset(a for f in factors for a in f.axes):
                return product_sum(factors, bound, self.order)
            args = [self._product(factors)]
        body = args[0] if mask is None else self._masked(args[0], mask, _neutral(n.fn, element(args[0].data)))
        axes = tuple(sorted({*body.axes, *n.bound}, key=self.order.__getitem__))
        data = np.broadcast_to(body.along(axes), self._shape(body, axes, n.bound))
        over = tuple(k for k, a in enumerate(axes) if a in n.bound)
        found = reduced(n.fn, data, over)
        if mask is not None and n.fn in ("argmax", "argmin"):
            some = np.broadcast_to(mask.along(axes), data.shape).any(axis=over)
            found = np.where(some, found, -1)
        return Named(tuple(a for a in axes if a not in n.bound), found)

    def _shape(self, body: Named, axes: tuple[str, ...], bound: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[a] if a in bound or a in body.axes else 1 for a in axes)

    def _masked(self, x: Named, mask: Named, other: float) -> Named:
        axes = union((x, mask), self.order)
        fill = np.asarray(other).astype(x.data.dtype)
        return Named(axes, np.where(mask.along(axes), x.along(axes), fill))

    def _product(self, factors: list[Named]) -> Named:
        axes = union(factors, self.order)
        out = factors[0].along(axes)
        for f in factors[1:]:
            out = np.asarray(out * f.along(axes))
        return Named(axes, out)


def _needed(roots: tuple[Node, ...]) -> Iterator[Node]:
    """What `parts` reaches from the roots, arguments first."""
    seen: set[Node] = set()
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        n, ready = stack.pop()
        if ready:
            yield n
        elif n not in seen:
            seen.add(n)
            stack.append((n, True))
            stack.extend((p, False) for p in reversed(parts(n)))


def _neutral(fn: str, dtype: DType) -> float:
    if fn in ("max", "argmax"):
        return lowest(dtype)
    if fn in ("min", "argmin"):
        return highest(dtype)
    return 1 if fn in ("prod", "all") else 0
