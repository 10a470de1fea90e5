"""Arrays whose dimensions are named axes, always in the graph's order of axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...dsl.records import dataclass
from .arithmetic import Array

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """`data` has one dimension for each of `axes`."""

    axes: Axes
    data: Array

    def along(self, axes: Axes) -> Array:
        """The data with a dimension for each of `axes`, of size 1 where it does not vary. Order is kept."""
        if axes == self.axes:
            return self.data
        sizes = dict(zip(self.axes, self.data.shape, strict=True))
        return self.data.reshape([sizes.get(a, 1) for a in axes])


def union(values: Iterable[Named], order: dict[str, int]) -> Axes:
    """All axes of some arrays, in order."""
    return tuple(sorted({a for v in values for a in v.axes}, key=order.__getitem__))


def product_sum(factors: Sequence[Named], bound: frozenset[str], order: dict[str, int]) -> Named:
    """Σ over `bound` of a product, by matrix products; factors have one dtype.

    The two factors with the smallest product are multiplied until two are left.
    """
    work = list(factors)
    while len(work) > 2:
        a, b = min(_pairs(work), key=lambda pair: _size(pair, order))
        axes = union((a, b), order)
        work = [*(w for w in work if w is not a and w is not b), Named(axes, a.along(axes) * b.along(axes))]
    return _matmul(work[0], work[1], bound, order)


def _pairs(work: Sequence[Named]) -> list[tuple[Named, Named]]:
    return [(a, b) for i, a in enumerate(work) for b in work[i + 1 :]]


def _size(pair: tuple[Named, Named], order: dict[str, int]) -> int:
    sizes = {a: s for v in pair for a, s in zip(v.axes, v.data.shape, strict=True)}
    return int(np.prod([sizes[a] for a in union(pair, order)], dtype=np.int64))


def _matmul(a: Named, b: Named, bound: frozenset[str], order: dict[str, int]) -> Named:
    """Axes fall into four kinds: in both and kept, in a only, in b only, in both and summed."""
    a, b = _own_sum(a, b, bound), _own_sum(b, a, bound)
    shared = [x for x in a.axes if x in b.axes]
    batch = [x for x in shared if x not in bound]
    summed = [x for x in shared if x in bound]
    left = [x for x in a.axes if x not in shared]
    right = [x for x in b.axes if x not in shared]
    sizes = {x: s for v in (a, b) for x, s in zip(v.axes, v.data.shape, strict=True)}
    rows, inner, columns = (
        int(np.prod([sizes[x] for x in part], dtype=np.int64)) for part in (left, summed, right)
    )
    shape = [sizes[x] for x in batch]
    x = _arranged(a, [*batch, *left, *summed]).reshape([*shape, rows, inner])
    y = _arranged(b, [*batch, *summed, *right]).reshape([*shape, inner, columns])
    out = np.matmul(x, y).reshape([*shape, *(sizes[x] for x in left), *(sizes[x] for x in right)])
    axes = (*batch, *left, *right)
    final = tuple(sorted(axes, key=order.__getitem__))
    return Named(final, out.transpose([axes.index(x) for x in final]))


def _own_sum(a: Named, b: Named, bound: frozenset[str]) -> Named:
    """Sum what the other factor does not vary over."""
    alone = tuple(k for k, x in enumerate(a.axes) if x in bound and x not in b.axes)
    if not alone:
        return a
    kept = tuple(x for k, x in enumerate(a.axes) if k not in alone)
    return Named(kept, a.data.sum(axis=alone, dtype=a.data.dtype))


def _arranged(a: Named, axes: list[str]) -> Array:
    return a.data.transpose([a.axes.index(x) for x in axes])
