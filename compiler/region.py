"""Regions: what fuse decides. One region is one launch; its roots are the tensors it stores, everything else is inlined."""

from __future__ import annotations

from ..dsl.records import dataclass
from .product_tiles import ProductTiles
from .tensor_ir import Apply, Definition, Node, Reduce, walk


@dataclass(frozen=True)
class Region:
    """`roots` have their producers inlined up to tensors that some launch stores. `hints` names nodes after the
    statements they came from, for readable tile text only. `statements` are the roots and what is computed within them.
    """

    name: str
    roots: tuple[Definition, ...]
    hints: tuple[tuple[Node, str], ...] = ()
    statements: tuple[str, ...] = ()

    @property
    def values(self) -> list[Node]:
        return [d.value for d in self.roots]


@dataclass(frozen=True)
class AxisPlan:
    """Where each axis of a region goes: `grid` axes in order, `whole` axes in one piece, `tiles` sizes (None: one index).

    An axis of a root in neither is written by a serial loop after the reductions; a reduced axis that is not whole is a
    serial loop with carried states. `product`: what the tiles of a product of tier `wgmma` are chosen from at any sizes.
    """

    grid: tuple[str, ...]
    whole: tuple[str, ...]
    tiles: tuple[tuple[str, int | None], ...]
    product: ProductTiles | None = None

    def tile(self, axis: str) -> int | None:
        return dict(self.tiles)[axis]

    @property
    def units(self) -> frozenset[str]:
        return frozenset(a for a, t in self.tiles if t is None)


def reductions(values: list[Node]) -> list[Reduce]:
    """All reductions below `values`, those inside others first."""
    return [n for n in walk(values) if isinstance(n, Reduce)]


def conjuncts(predicate: Node | None) -> list[Node]:
    """The conditions joined by `and`, left to right."""
    if predicate is None:
        return []
    out: list[Node] = []
    stack = [predicate]
    while stack:
        match stack.pop():
            case Apply(op="and", operands=(a, b)):
                stack += [b, a]
            case p:
                out.append(p)
    return out


def factors(n: Node) -> list[Node]:
    """The factors of a product, left to right."""
    out: list[Node] = []
    stack = [n]
    while stack:
        match stack.pop():
            case Apply(op="mul", operands=(a, b)):
                stack += [b, a]
            case x:
                out.append(x)
    return out


def contraction(
    body: Node, over: frozenset[str], units: frozenset[str] = frozenset()
) -> tuple[list[Node], list[Node]] | None:
    """The two operands of a sum of products over `over`, as lists of factors, or None.

    Both operands run over all of `over` and each has an axis the other lacks (unit axes do not count).
    """
    parts = factors(body)
    groups: list[tuple[frozenset[str], list[Node]]] = []
    for p in parts:
        axes = p.axes - units
        home = next((i for i, (g, _) in enumerate(groups) if axes <= g or g <= axes), None)
        if home is None:
            groups.append((axes, [p]))
        else:
            groups[home] = (groups[home][0] | axes, [*groups[home][1], p])
    if len(groups) != 2:
        return None
    (a_axes, a), (b_axes, b) = groups
    if not (
        over - units
        and over - units <= a_axes
        and over - units <= b_axes
        and a_axes - b_axes
        and b_axes - a_axes
    ):
        return None
    return a, b
