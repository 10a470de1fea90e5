"""What one call settles before anything runs: extents from shapes, and the checks (DESIGN 2.1).

Plain Python, shared by the interpreter and the runtime; every refusal is a ValueError that names argument and value.
"""

from __future__ import annotations

from collections.abc import Mapping

from .evaluate import Number, evaluate
from .spelling import brief
from .tensor_ir import Apply, Check, Extent, Graph, Node, Scalar, walk


def extents_of(
    graph: Graph, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Number]
) -> dict[str, int]:
    """Every extent of a call, in the graph's order, from the shapes of its tensors; declared extents stand in `scalars`.

    Raises ValueError where an argument is missing, has the wrong rank, or disagrees with another; both are named.
    """
    _complete(graph, shapes, scalars)
    found: dict[str, int] = {e: _declared(graph, e, scalars) for e in graph.declared}
    origin = {e: f"{e} = {v} as given" for e, v in found.items()}
    entries = [(t, k, n) for t in graph.tensors for k, n in enumerate(graph.tensors[t].shape)]
    for tensor, k, node in entries:
        if isinstance(node, Extent) and node.name not in found:
            found[node.name] = shapes[tensor][k]
            origin[node.name] = _place(graph, shapes, tensor, k)
    for tensor, k, node in entries:
        _solve(graph, shapes, tensor, k, node, found, scalars, origin)
    for tensor, k, node in entries:
        _agree(graph, shapes, tensor, k, node, found, scalars, origin)
    return {e: found[e] for e in graph.extents}


def _complete(graph: Graph, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Number]) -> None:
    for name, tensor in graph.tensors.items():
        if name not in shapes:
            raise ValueError(f"{graph.name}: argument `{name}` is missing")
        if len(shapes[name]) != len(tensor.shape):
            raise ValueError(
                f"{graph.name}: `{name}` has {len(shapes[name])} axes, shape {tuple(shapes[name])}; "
                f"it needs {len(tensor.shape)}: [{_entries(tensor.shape)}]"
            )
    for name in graph.scalars:
        if name not in scalars:
            raise ValueError(f"{graph.name}: argument `{name}` is missing")


def _entries(shape: tuple[Node, ...]) -> str:
    return ", ".join(brief(n) for n in shape)


def _declared(graph: Graph, name: str, scalars: Mapping[str, Number]) -> int:
    if name not in scalars:
        raise ValueError(
            f"{graph.name}: extent `{name}` is missing; no shape binds it, so give it by name: {name}=…"
        )
    value = scalars[name]
    if isinstance(value, float) or value < 0:
        raise ValueError(f"{graph.name}: extent `{name}` is {value}; it must be an integer of at least 0")
    return int(value)


def _place(graph: Graph, shapes: Mapping[str, tuple[int, ...]], tensor: str, k: int) -> str:
    return f"axis {k + 1} of `{tensor}` [{_entries(graph.tensors[tensor].shape)}] is {shapes[tensor][k]}"


def _solve(
    graph: Graph,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: str,
    k: int,
    node: Node,
    found: dict[str, int],
    scalars: Mapping[str, Number],
    origin: dict[str, str],
) -> None:
    """A shape linear in one extent not known yet binds it."""
    unknown = [n.name for n in walk([node]) if isinstance(n, Extent) and n.name not in found]
    if len(unknown) != 1:
        return
    name = unknown[0]
    at_0, at_1 = (int(evaluate(node, {**found, name: x}, scalars)) for x in (0, 1))
    if at_0 == at_1:
        return
    value, rest = divmod(shapes[tensor][k] - at_0, at_1 - at_0)
    if rest or value < 0:
        raise ValueError(
            f"{graph.name}: {_place(graph, shapes, tensor, k)}; no extent {name} of at least 0 makes `{brief(node)}` that"
        )
    found[name] = value
    origin[name] = f"{_place(graph, shapes, tensor, k)}, so {name} = {value}"


def _agree(
    graph: Graph,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: str,
    k: int,
    node: Node,
    found: Mapping[str, int],
    scalars: Mapping[str, Number],
    origin: Mapping[str, str],
) -> None:
    want = evaluate(node, found, scalars)
    if want == shapes[tensor][k]:
        return
    reasons = [origin[n.name] for n in walk([node]) if isinstance(n, Extent) and n.name in origin]
    why = f"; {' and '.join(dict.fromkeys(reasons))}" if reasons else ""
    raise ValueError(
        f"{graph.name}: {_place(graph, shapes, tensor, k)}, but `{brief(node)}` must be {want}{why}"
    )


def check_call(graph: Graph, extents: Mapping[str, int], scalars: Mapping[str, Number]) -> None:
    """Evaluate the checks: what `require` states, then shapes, then bounds. Raises ValueError on the first that fails."""
    order = {"require": 0, "shape": 1, "bounds": 2}
    for check in sorted(graph.checks, key=lambda c: order[c.kind]):
        failure = _failure(check, extents, scalars)
        if failure is not None:
            raise ValueError(f"{graph.name}: {failure}{_values(check, extents, scalars)}")


def _failure(check: Check, extents: Mapping[str, int], scalars: Mapping[str, Number]) -> str | None:
    words = f"requires {check.message}" if check.kind == "require" else check.message
    try:
        return None if evaluate(check.condition, extents, scalars) else words
    except ValueError as fault:
        return f"{words}: {fault}"


def _values(check: Check, extents: Mapping[str, int], scalars: Mapping[str, Number]) -> str:
    condition = check.condition
    while check.kind == "bounds" and isinstance(condition, Apply) and condition.op == "or":
        condition = condition.operands[1]  # the others excuse it
    used = dict.fromkeys(n.name for n in walk([condition]) if isinstance(n, Extent | Scalar))
    known = {**scalars, **extents}
    return f" ({', '.join(f'{n} = {known[n]}' for n in sorted(used))})" if used else ""
