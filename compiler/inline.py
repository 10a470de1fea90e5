"""Inlining a definition into its readers: substitution of index expressions for axes, without capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as with_fields

from .tensor_ir import Definition, Graph, Index, Node, Read, Reduce, index, reduce, rename_axes, replace


class Inliner:
    """Expands reads of unstored definitions. New axes, made where a substitution would capture a bound one, are added to
    `axes`, the table of the graph being built."""

    def __init__(self, graph: Graph, stored: frozenset[str]) -> None:
        self.definitions = {d.name: d for d in graph.definitions if d.target is None}
        self.stored = stored
        self.axes: dict[str, Node] = dict(graph.axes)
        self.expanded: dict[str, Node] = {}

    def definition(self, d: Definition) -> Definition:
        target = None if d.target is None else tuple(self.value(i) for i in d.target)
        return with_fields(d, value=self.value(d.value), target=target)

    def value(self, n: Node) -> Node:
        """The node with every read of an unstored definition replaced by that definition's value."""
        return replace([n], self._expand)[0]

    def _expand(self, n: Node) -> Node | None:
        if not isinstance(n, Read) or n.tensor in self.stored or n.tensor not in self.definitions:
            return None
        d = self.definitions[n.tensor]
        if d.name not in self.expanded:
            self.expanded[d.name] = self.value(d.value)
        indices = tuple(self.value(i) for i in n.indices)
        return self.at(self.expanded[d.name], dict(zip(d.axes, indices, strict=True)))

    def at(self, n: Node, where: Mapping[str, Node]) -> Node:
        """n with index expressions in place of its free axes."""
        mapping = {a: i for a, i in where.items() if a in n.axes and i is not index(a)}
        if not mapping:
            return n

        def rule(x: Node) -> Node | None:
            if isinstance(x, Index):
                return mapping.get(x.axis)
            if isinstance(x, Reduce):
                return self._below_binder(x, mapping)
            return x if not x.axes & mapping.keys() else None

        return replace([n], rule)[0]

    def _below_binder(self, r: Reduce, mapping: Mapping[str, Node]) -> Node:
        """Substitution under a reduction: its own indices are not free there, and none may capture what comes in."""
        inner = {a: i for a, i in mapping.items() if a not in r.bound and a in r.axes}
        if not inner:
            return r
        incoming = frozenset().union(*(i.axes for i in inner.values()))
        names = {b: self._fresh(b) for b in r.bound if b in incoming}
        body = rename_axes(r.body, names)
        predicate = None if r.predicate is None else rename_axes(r.predicate, names)
        return reduce(
            r.fn,
            (names.get(b, b) for b in r.bound),
            self.at(body, inner),
            None if predicate is None else self.at(predicate, inner),
            r.span,
        )

    def _fresh(self, axis: str) -> str:
        i = 1
        while f"{axis}_{i}" in self.axes:
            i += 1
        self.axes[f"{axis}_{i}"] = self.axes[axis]
        return f"{axis}_{i}"
