"""Which indices an expression depends on, through reductions and `fn` calls: the basis of "neither on the left nor bound".

An index that `f[n](x)` runs over is gone from the result only where `f` reduces over it: softmax-like functions keep it,
sums lose it. `Leaks` says for each `fn` and each of its bracket parameters which arguments keep their indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import syntax as s

Leaks = Mapping[str, tuple[frozenset[int], ...]]
# An index, and (inside a `fn`) the parameter that brings it; with the place where it was first met.
Free = dict[tuple[str, str], s.Name]


def free_indices(expr: s.Expr, leaks: Leaks, leaf: Callable[[s.Name], Free]) -> Free:
    """The indices that `expr` depends on; `leaf` says what a bare name brings."""

    def visit(node: s.Expr, inner: list[Free]) -> Free:
        match node:
            case s.Name():
                return leaf(node)
            case s.BracketCall():
                return _through_bracket(node, inner, leaks)
        return _union(inner)

    return s.fold(expr, visit)


def _union(parts: list[Free]) -> Free:
    if len(parts) < 2:
        return parts[0] if parts else {}
    largest = max(parts, key=len)
    new = {key: at for part in parts if part is not largest for key, at in part.items() if key not in largest}
    return {**largest, **new} if new else largest


def _through_bracket(call: s.BracketCall, inner: list[Free], leaks: Leaks) -> Free:
    bound = [b.name.name for b in call.bound]
    ranges = inner[: sum(b.extent is not None for b in call.bound)]
    arguments = inner[len(inner) - len(call.arguments) :]
    rest = inner[len(ranges) : len(inner) - len(call.arguments)]
    kept = leaks.get(call.function.name, ())
    out = dict(_union(ranges))
    for part in rest:
        out.update((key, at) for key, at in part.items() if key[0] not in bound)
    for position, part in enumerate(arguments):
        for key, at in part.items():
            if key[0] not in bound or _keeps(kept, bound.index(key[0]), position):
                out.setdefault(key, at)
    return out


def _keeps(kept: tuple[frozenset[int], ...], bracket: int, position: int) -> bool:
    """Whether a `fn` lets the index in its bracket's place `bracket` through from the argument at `position`."""
    if not kept:
        return False  # a reduction
    return position in kept[min(bracket, len(kept) - 1)]


def leaks_of(fn: s.Fn, leaks: Leaks) -> tuple[frozenset[int], ...]:
    """For each bracket parameter of `fn` the positions of the arguments whose indices stay. Locals must be in order."""
    parameters = [p.name for p in fn.parameters]
    brings: dict[str, Free] = {p.name: {(b.name, p.name): p for b in fn.bracket} for p in fn.parameters}
    for local in fn.locals:
        brings[local.name.name] = free_indices(local.value, leaks, lambda name: brings.get(name.name, {}))
    result = free_indices(fn.result, leaks, lambda name: brings.get(name.name, {}))
    return tuple(
        frozenset(parameters.index(p) for index, p in result if index == b.name and p in parameters)
        for b in fn.bracket
    )
