"""Loops that compute again what an earlier loop over the same axis computed in its last step.

Where that loop takes one step only, because one tile holds the axis, its values are still in their buffers: a second pass
over a row then computes no exponential again. Equal values are found by value numbering (A. Aho et al., "Compilers", 2nd
ed., section 6.1.2), in which a carried value after the loop is what its one step yields, and within the step what it starts
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...dsl.records import dataclass
from ..tile_ir import AxisIndex, Dot, Expr, For, Let, Load, Name, Reduce, Stmt, Store, TileProgram, operands
from .placement import Steps, bodies, rebuild, run, transform, written


@dataclass(frozen=True)
class Repeat:
    """Of a loop: an earlier loop, the statements of its one step over that loop's axis, the earlier values they read."""

    earlier: For
    body: tuple[Stmt, ...]
    kept: frozenset[str]


def repeats(program: TileProgram) -> dict[int, Repeat]:
    """By `id` of a loop of the program, whose names are distinct."""
    found: dict[int, Repeat] = {}
    changed = written(program)
    for _, body in bodies(program.body):
        for i, later in enumerate(body):
            for earlier in body[:i]:
                if isinstance(earlier, For) and isinstance(later, For) and _same_steps(earlier, later):
                    repeat = _repeat(body, earlier, later, changed)
                    if repeat.kept:
                        found[id(later)] = repeat
    return found


def _same_steps(earlier: For, later: For) -> bool:
    """Do both visit all of one extent by tiles of one size, the later keeping nothing from step to step?"""
    a, b = earlier.axis, later.axis
    whole = all(x is None for axis in (a, b) for x in (axis.lo, axis.hi))
    simple = all(isinstance(s, Let | Store) for s in later.body)
    return (
        whole
        and simple
        and a.tile is not None
        and (a.extent, a.tile) == (b.extent, b.tile)
        and not later.carries
    )


def _repeat(body: tuple[Stmt, ...], earlier: For, later: For, changed: frozenset[str]) -> Repeat:
    inside = {s.name: s.value for s in earlier.body if isinstance(s, Let)}
    outside = {s.name: s.value for s in (*body, *later.body) if isinstance(s, Let)}
    carried = {c.name: c.init for c in earlier.carries}
    yields = {c.name: y for c, y in zip(earlier.carries, earlier.yields, strict=True)}
    numbers = _Numbers(changed, earlier.axis.name, later.axis.name)
    step = _Scope(numbers, {**outside, **inside, **carried}, None)
    after = _Scope(numbers, outside, step, yields)
    axis = earlier.axis.name
    known = {
        step.number(Name(s.name)): s.name for s in earlier.body if isinstance(s, Let) and axis in s.type.axes
    }
    kept: set[str] = set()

    def again(x: Expr) -> Expr | None:
        name = known.get(after.number(x))
        if name is not None:
            kept.add(name)
            return Name(name)
        return AxisIndex(axis) if x == AxisIndex(later.axis.name) else None

    made = tuple(_rewritten(s, again, axis, later.axis.name) for s in later.body)
    return Repeat(earlier, made, frozenset(kept))


def _rewritten(s: Stmt, rule: Callable[[Expr], Expr | None], axis: str, before: str) -> Stmt:
    """The statement over `axis` instead of `before`, with the rule applied to its values."""
    match s:
        case Let():
            axes = tuple(axis if a == before else a for a in s.type.axes)
            return replace(s, value=transform(s.value, rule), type=replace(s.type, axes=axes))
        case Store():
            places = tuple(transform(ix, rule) for ix in s.subscripts)
            return replace(s, subscripts=places, value=transform(s.value, rule))
    raise TypeError(type(s).__name__)


class _Numbers:
    """One number for all expressions that have the same value. Reads of tensors that change have numbers of their own."""

    def __init__(self, changed: frozenset[str], axis: str, other: str) -> None:
        self.changed, self.axis, self.other = changed, axis, other
        self.known: dict[object, int] = {}

    def of(self, e: Expr, args: list[int]) -> int:
        renamed = self._renamed(e)
        key: object = (
            (renamed, tuple(args)) if not args else (rebuild(renamed, [Name(f"#{n}") for n in args]),)
        )
        if isinstance(e, Load) and e.tensor in self.changed:
            key = ("changed", len(self.known))
        return self.known.setdefault(key, len(self.known))

    def _renamed(self, e: Expr) -> Expr:
        """The expression with the later loop's axis called like the earlier's."""
        match e:
            case AxisIndex(axis=a) if a == self.other:
                return AxisIndex(self.axis)
            case Dot(over=over) | Reduce(over=over):
                return replace(e, over=tuple(self.axis if a == self.other else a for a in over))
        return e


class _Scope:
    """Numbers of expressions where names have these definitions; others stand for themselves. `finals` are the values of
    names that hold, here, what the loop of scope `step` leaves."""

    def __init__(
        self,
        numbers: _Numbers,
        definitions: Mapping[str, Expr],
        step: _Scope | None,
        finals: Mapping[str, Expr] | None = None,
    ) -> None:
        self.numbers, self.definitions, self.step, self.finals = numbers, definitions, step, finals or {}
        self.done: dict[str, int] = {}

    def number(self, e: Expr) -> int:
        return run(self._steps(e))

    def _steps(self, e: Expr) -> Steps[int]:
        if isinstance(e, Name):
            named: int = yield self._name(e)
            return named
        args: list[int] = []
        for x in operands(e):
            args.append((yield self._steps(x)))
        return self.numbers.of(e, args)

    def _name(self, e: Name) -> Steps[int]:
        if e.name in self.done:
            return self.done[e.name]
        if e.name in self.finals and self.step is not None:
            found: int = yield self.step._steps(self.finals[e.name])
        elif e.name in self.definitions:
            found = yield self._steps(self.definitions[e.name])
        else:
            found = self.numbers.of(e, [])
        self.done[e.name] = found
        return found
