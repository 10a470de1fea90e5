"""shield: a read that is only in bounds where some condition holds takes that condition along.

The text guards such reads by what encloses them (`where(n > 0, x[n - 1], 0)`). lower names shared values and runs
reductions in loops of their own, outside the enclosing select, so the read must not depend on where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..tensor_ir import Apply, Const, Graph, Index, Node, Read, Reduce, apply, const, rewrite, walk


def shield(values: list[Node], graph: Graph) -> list[Node]:
    """`x[i]` -> `where(guard, x[i], 0)` for every read whose index is not the bare axis of that dimension and whose
    guard, the condition under which any of its users reads it, speaks of the index's axes."""
    guards = read_guards(values)

    def rule(n: Node) -> Node:
        return apply("where", guards[n], n, const(0, n.dtype)) if n in needing else n

    needing = {r for r, g in guards.items() if isinstance(r, Read) and _needs(r, g, graph)}
    return rewrite(values, rule) if needing else values


def _needs(r: Read, guard: Node, graph: Graph) -> bool:
    shape = graph.shape_of(r.tensor)
    loose = [i for i, e in zip(r.indices, shape, strict=True) if not _bare(i, e, graph)]
    return any(not guard.axes or i.axes & guard.axes for i in loose)


def _bare(i: Node, extent: Node, graph: Graph) -> bool:
    return isinstance(i, Index) and graph.axes[i.axis] is extent


def read_guards(values: list[Node]) -> dict[Node, Node]:
    """For each node, the condition under which some user needs its value; nodes needed unconditionally are left out."""
    wanted: dict[Node, list[Node | None]] = {v: [None] for v in values}
    out: dict[Node, Node] = {}
    for n in reversed(walk(values)):
        ways = wanted[n]
        guard = None if None in ways else _any(g for g in ways if g is not None)
        if guard is not None:
            out[n] = guard
        for a, condition in _edges(n):
            outer = guard
            if isinstance(n, Reduce) and guard is not None and guard.axes & frozenset(n.bound):
                outer = None  # it speaks of an index of the same name outside
            wanted.setdefault(a, []).append(_both(outer, condition))
    return out


def _edges(n: Node) -> Iterator[tuple[Node, Node | None]]:
    """The arguments of a node, each with the condition under which its value matters."""
    match n:
        case Apply(op="where", operands=(c, a, b)) if _is_mask(c):
            yield from ((c, None), (a, c), (b, apply("not", c)))
        case Apply(op="and", operands=(a, b)) if _is_mask(a):
            yield from ((a, None), (b, a))
        case Apply(op="or", operands=(a, b)) if _is_mask(a):
            yield from ((a, None), (b, apply("not", a)))
        case Reduce(body=body, predicate=p) if p is not None and _is_mask(p):
            yield from ((p, None), (body, p))
        case _:
            yield from ((a, None) for a in n.args)


def _is_mask(c: Node) -> bool:
    """A condition on integers and bools, which the bounds rule may rest on; floats say nothing about an index."""
    return not any(n.dtype.is_float and not isinstance(n, Const) for n in walk([c]))


def _both(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a or b
    return a if a is b else apply("and", a, b)


def _any(guards: Iterable[Node]) -> Node:
    distinct = list(dict.fromkeys(guards))
    out = distinct[0]
    for g in distinct[1:]:
        out = apply("or", out, g)
    return out
