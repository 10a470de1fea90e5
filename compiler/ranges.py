"""Ranges of indices: which extent an index runs over (DESIGN 2.1, "Index notation").

The first that applies: explicit `n in E`; the declared shape of the output it indexes; the one extent of every axis that
the bare index subscripts. Extents are equal if they are the same node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set

from ..dsl import syntax
from ..dsl.diagnostics import Diagnostics
from ..dsl.records import dataclass
from ..dsl.source import Span
from .tensor_ir import REDUCTIONS, Node

Shapes = Callable[[str], "tuple[Node, ...] | None"]


def children(expr: syntax.Expr) -> tuple[syntax.Expr, ...]:
    """The direct parts of an expression, bracket predicates included, extents of bound indices not."""
    match expr:
        case syntax.Subscript():
            return expr.indices
        case syntax.Unary():
            return (expr.operand,)
        case syntax.Binary():
            return (expr.left, expr.right)
        case syntax.Compare():
            return expr.operands
        case syntax.Call():
            return expr.arguments
        case syntax.BracketCall():
            return expr.arguments if expr.predicate is None else (expr.predicate, *expr.arguments)
    return ()


def is_reduction(call: syntax.BracketCall, fns: Iterable[str]) -> bool:
    """A built-in reduction, unless the user gave the name to a `fn`."""
    return call.function.name in REDUCTIONS and call.function.name not in fns


def visible(roots: Iterable[syntax.Expr], fns: Iterable[str]) -> Iterator[tuple[syntax.Expr, frozenset[str]]]:
    """Every expression below `roots` with the names that reductions between rebind, in text order."""
    nothing: frozenset[str] = frozenset()
    stack = [(r, nothing) for r in reversed(list(roots))]
    while stack:
        expr, rebound = stack.pop()
        yield expr, rebound
        if isinstance(expr, syntax.BracketCall) and is_reduction(expr, fns):
            rebound = rebound | {b.name.name for b in expr.bound}
        stack.extend((c, rebound) for c in reversed(children(expr)))


@dataclass(frozen=True)
class Use:
    """A bare subscript: `tensor` has `extent` at the axis that the index subscripts."""

    tensor: str
    position: int
    extent: Node
    span: Span


def bare_uses(
    names: Iterable[str], roots: Iterable[syntax.Expr], fns: Iterable[str], shapes: Shapes
) -> dict[str, list[Use]]:
    """For each index name, the axes that it subscripts bare below `roots`."""
    uses: dict[str, list[Use]] = {n: [] for n in names}
    for tensor, position, index in _bare(uses.keys(), roots, fns):
        shape = shapes(tensor.tensor.name)
        if shape is not None and len(shape) == len(tensor.indices):
            uses[index.name].append(Use(tensor.tensor.name, position, shape[position], index.span))
    return uses


def mentioned(
    names: Iterable[str], roots: Iterable[syntax.Expr], fns: Iterable[str], tensors: Iterable[str]
) -> set[str]:
    """The index names that subscript one of `tensors` bare."""
    wanted = set(tensors)
    return {index.name for tensor, _, index in _bare(set(names), roots, fns) if tensor.tensor.name in wanted}


def _bare(
    names: Set[str], roots: Iterable[syntax.Expr], fns: Iterable[str]
) -> Iterator[tuple[syntax.Subscript, int, syntax.Name]]:
    for expr, rebound in visible(roots, fns):
        if isinstance(expr, syntax.Subscript):
            for position, index in enumerate(expr.indices):
                if isinstance(index, syntax.Name) and index.name in names and index.name not in rebound:
                    yield expr, position, index


def the_extent(
    name: syntax.Name, uses: list[Use], known: Iterable[str], show: Callable[[Node], str], sink: Diagnostics
) -> Node | None:
    """The one extent of `uses`, or None after an error whose help spells `n in N`."""
    extents = list(dict.fromkeys(u.extent for u in uses))
    if len(extents) == 1:
        return extents[0]
    if not extents:
        extents_known = list(known)
        example = name.name.upper() if name.name.upper() in extents_known else next(iter(extents_known), "N")
        sink.error(
            "E0201",
            f"the range of index `{name.name}` is not known",
            name.span,
            note="nothing is subscripted by the bare index, so no axis gives it an extent",
            help=f"write its range: `{name.name} in {example}`",
        )
        return None
    first, second = (next(u for u in uses if u.extent is e) for e in extents[:2])
    sink.error(
        "E0202",
        f"index `{name.name}` has two ranges: {show(first.extent)} and {show(second.extent)}",
        name.span,
        note=f"it subscripts axis {first.position + 1} of `{first.tensor}` and axis {second.position + 1} of "
        f"`{second.tensor}`",
        help=f"write the one that is meant: `{name.name} in {show(first.extent)}`",
    )
    return None
