"""Axes that run over the same elements get the same name, so that equal expressions of different statements are one node.

A definition takes the axis names of the definitions that it reads by bare indices, otherwise those of the parameters'
earlier readers, otherwise the first axis of the same extent. A bound index, whose name is nobody's business, does so on its
own where the name is free in its reduction. So renaming every index in a text changes no more than names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ..inline import Inliner
from ..tensor_ir import (
    Definition,
    Graph,
    Index,
    Node,
    Read,
    Reduce,
    index,
    reduce,
    rename_axes,
    rewrite,
    walk,
)


def unify_axes(graph: Graph) -> Graph:
    """The same graph with fewer axes. No value changes."""
    work = _Unifier(graph)
    definitions = tuple(work.definition(d) for d in graph.definitions)
    used = {a for d in definitions for a in axes_of(d)}
    return replace(graph, definitions=definitions, axes={a: e for a, e in graph.axes.items() if a in used})


def roots_of(d: Definition) -> list[Node]:
    """The expressions of a definition: its value and, for an update, its place."""
    return [d.value, *(d.target or ())]


def axes_of(d: Definition) -> dict[str, None]:
    """Every axis of a definition, bound ones included, in a fixed order."""
    found = dict.fromkeys(d.axes)
    for n in walk(roots_of(d)):
        if isinstance(n, Index):
            found[n.axis] = None
        elif isinstance(n, Reduce):
            found.update(dict.fromkeys(n.bound))
    return found


class _Unifier:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inliner = Inliner(graph, frozenset())
        self.places: dict[tuple[str, int], str] = {}
        self.order: dict[str, None] = {}

    def definition(self, d: Definition) -> Definition:
        names = self._renaming(d)
        d = self._renamed(d, names)
        self._remember(d)
        d = replace(d, value=rewrite([d.value], self._bound)[0])
        self.order.update(axes_of(d))
        return d

    def _remember(self, d: Definition) -> None:
        """Under which axis each place of a tensor is first read; a definition's own axes come before bound ones."""
        if d.target is None:
            self.places.update({(d.name, k): a for k, a in enumerate(d.axes)})
        for tensor, k, axis in sorted(bare(roots_of(d)), key=lambda use: use[2] not in d.axes):
            self.places.setdefault((tensor, k), axis)

    # ------------------------------------------------------------ whole definitions

    def _renaming(self, d: Definition) -> dict[str, str]:
        """One wish for each axis that has a better name; wishes that clash are dropped until none does."""
        own = axes_of(d)
        wishes: dict[str, str] = {}
        for axis in own:
            wanted = next(self._candidates(axis, roots_of(d)), None) or self._by_extent(axis, own, wishes)
            if wanted is not None and wanted != axis and wanted not in wishes.values():
                wishes[axis] = wanted
        while True:
            clash = next((a for a, t in wishes.items() if t in own and t not in wishes), None)
            if clash is None:
                return wishes
            del wishes[clash]

    def _candidates(self, axis: str, roots: Iterable[Node]) -> Iterator[str]:
        """The names under which the tensors that `axis` subscripts bare are known, definitions' first."""
        uses = [(t, k) for t, k, a in bare(roots) if a == axis]
        for tensor, k in sorted(uses, key=lambda u: u[0] in self.graph.tensors):
            name = self.places.get((tensor, k))
            if name is not None and self._same_extent(name, axis):
                yield name

    def _by_extent(self, axis: str, own: Iterable[str], wishes: Mapping[str, str]) -> str | None:
        taken = {*own, *wishes.values()}
        return next((o for o in self.order if o not in taken and self._same_extent(o, axis)), None)

    def _same_extent(self, a: str, b: str) -> bool:
        return self.graph.axes[a] is self.graph.axes[b]

    def _renamed(self, d: Definition, names: Mapping[str, str]) -> Definition:
        if not names:
            return d
        target = None if d.target is None else tuple(rename_axes(t, names) for t in d.target)
        axes = tuple(names.get(a, a) for a in d.axes)
        return replace(d, axes=axes, value=rename_axes(d.value, names), target=target)

    # ------------------------------------------------------------ bound axes

    def _bound(self, n: Node) -> Node:
        """R[j](x) -> R[n](x with n for j), where n is the better name and not free in x."""
        if not isinstance(n, Reduce):
            return n
        for axis in n.bound:
            for name in self._candidates(axis, n.args):
                if name == axis:
                    break
                if self._may_bind(n, axis, name):
                    n = self._rebound(n, axis, name)
                    break
        return n

    def _may_bind(self, n: Reduce, axis: str, name: str) -> bool:
        free = frozenset().union(*(a.axes for a in n.args))
        captured = any(isinstance(m, Reduce) and name in m.bound and axis in m.axes for m in walk(n.args))
        return name not in free and name not in n.bound and not captured

    def _rebound(self, n: Reduce, axis: str, name: str) -> Reduce:
        at = {axis: index(name)}
        body = self.inliner.at(n.body, at)
        predicate = None if n.predicate is None else self.inliner.at(n.predicate, at)
        new = reduce(n.fn, (name if b == axis else b for b in n.bound), body, predicate, n.span)
        assert isinstance(new, Reduce)
        return new


def bare(roots: Iterable[Node]) -> Iterator[tuple[str, int, str]]:
    """Every bare subscript as tensor, position, axis; reads with one axis twice are left out."""
    for n in walk(roots):
        if isinstance(n, Read):
            names = [i.axis for i in n.indices if isinstance(i, Index)]
            if len(set(names)) == len(names):
                yield from ((n.tensor, k, i.axis) for k, i in enumerate(n.indices) if isinstance(i, Index))
