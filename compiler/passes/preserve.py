"""preserve: what a statement reads of an updated parameter is what it held before the call.

The order of statements is free, so every read means the value from before. Launches that read stand before those that
update (`fuse`); that is not enough where an update reads other elements than the one it writes, or what another update
writes: there a copy is made first, and everybody reads the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..inline import Inliner
from ..tensor_ir import Definition, Graph, Index, Node, Read, Reduce, index, read, rewrite, walk
from .canonicalize import map_values


def preserve(graph: Graph) -> Graph:
    """The graph with a copy of each updated parameter that an update reads beside its own element."""
    updates = [d for d in graph.definitions if d.target is not None]
    inliner = Inliner(graph, frozenset())
    needing = {
        name for d in updates for name in _read_elsewhere(inliner.definition(d), {u.name for u in updates})
    }
    for name in sorted(needing):
        graph = _with_copy(graph, name)
    return graph


def copies(graph: Graph) -> frozenset[str]:
    """The definitions that are copies of updated parameters: they must be stored, or they would copy nothing."""
    updated = {d.name for d in graph.definitions if d.target is not None}
    return frozenset(
        d.name
        for d in graph.definitions
        if isinstance(d.value, Read) and d.value.tensor in updated and d.value.indices == _own(d)
    )


def always_stored(graph: Graph) -> frozenset[str]:
    """The definitions that no grouping computes in place: results, updates and copies."""
    results = {d.name for d in graph.definitions if d.name in graph.outputs or d.target is not None}
    return copies(graph) | results


def _own(d: Definition) -> tuple[Node, ...]:
    return tuple(index(a) for a in d.axes) if d.target is None else d.target


def _read_elsewhere(update: Definition, updated: set[str]) -> Iterator[str]:
    """Updated parameters of which this update reads more than the element that it writes, once, in the same place."""
    target = _own(update)
    once = all(isinstance(i, Index) for i in target) and len(set(target)) == len(target)
    values = [update.value, *target]
    rebound = {
        x
        for r in walk(values)
        if isinstance(r, Reduce) and frozenset(r.bound) & frozenset(update.axes)
        for x in walk(r.args)
    }
    for n in walk(values):
        if isinstance(n, Read) and n.tensor in updated:
            itself = n.tensor == update.name and n.indices == target
            if not (itself and once and n not in rebound):
                yield n.tensor


def _with_copy(graph: Graph, name: str) -> Graph:
    tensor = graph.tensors[name]
    taken = {
        *graph.axes,
        *graph.extents,
        *graph.scalars,
        *graph.tensors,
        *(d.name for d in graph.definitions),
    }
    own = _fresh(f"{name}_before", taken)
    axes: dict[str, Node] = {}
    for extent in tensor.shape:
        found = next((a for a, e in graph.axes.items() if e is extent and a not in axes), None)
        axes[found or _fresh(f"{name}_axis", taken | axes.keys())] = extent
    copy = Definition(
        own, tuple(axes), read(name, map(index, axes), tensor.dtype), tensor.dtype, span=tensor.span
    )

    def rule(n: Node) -> Node:
        return read(own, n.indices, n.dtype, n.span) if isinstance(n, Read) and n.tensor == name else n

    graph = map_values(graph, lambda values: rewrite(values, rule))
    return replace(graph, axes={**graph.axes, **axes}, definitions=(copy, *graph.definitions))


def _fresh(stem: str, taken: set[str]) -> str:
    return next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
