"""Dependencies between names: an order in which each follows what it needs, or the circle that forbids one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def first_cycle(edges: Mapping[str, Iterable[str]]) -> list[str] | None:
    """The names along one cycle, the first repeated at the end; None where there is none."""
    order = _depth_first(edges)
    return order if isinstance(order, list) else None


def in_order(edges: Mapping[str, Iterable[str]]) -> tuple[str, ...] | None:
    """The names, each after all that it depends on; None where they go in a circle."""
    order = _depth_first(edges)
    return order if isinstance(order, tuple) else None


def _depth_first(edges: Mapping[str, Iterable[str]]) -> tuple[str, ...] | list[str]:
    done: dict[str, None] = {}
    for root in edges:
        path: dict[str, Iterator[str]] = {} if root in done else {root: iter(edges[root])}
        while path:
            name = next(reversed(path))
            following = next(path[name], None)
            if following is None:
                done[name] = None
                del path[name]
            elif following in path:
                chain = list(path)
                return [*chain[chain.index(following) :], following]
            elif following in edges and following not in done:
                path[following] = iter(edges[following])
    return tuple(done)
