"""Cascades: reductions over one index set that run as one pass, each with the repair that keeps it right while those it
depends on still change. The result of derive, read by lower and by `explain`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from ..dsl.records import dataclass
from ..dsl.source import Span
from ..dsl.types import DType
from .tensor_ir import Carried, Node, Reduce, apply, carried, replace

Status = Literal["proved", "refuted", "unknown"]
IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True, "max": -math.inf, "min": math.inf}
COMBINE = {"sum": "add", "prod": "mul", "any": "or", "all": "and", "max": "max", "min": "min"}


@dataclass(frozen=True)
class Obligation:
    """One equation a derivation rests on. `how` says by what it was proved, or gives the refuting point."""

    name: str
    formula: str
    status: Status
    how: str


@dataclass(frozen=True)
class Exponent:
    """The argument of one exponential of a step, in the names of the states. `why` says what bounds it above by 0."""

    text: str
    never_positive: bool
    why: str


@dataclass(frozen=True)
class State:
    """A reduction t = F_j g(r, c_j) carried through the pass.

    name        the carried name
    reduction   the node it stands for (its dtype and axes are the state's)
    predicate   the set: elements where it is false do not take part; over `Carried(r, "new")` where it reads a state
    g           the contribution of one element over `Carried(r, "new")`, read through the guard that an empty state needs
    upstream    names of the states g reads
    guarded     those of them that the text itself reads through a guard against -inf
    moved       h(t, r, r'): the old value t, `Carried(name, "old")`, as if it had been computed with the new states. It
                reads old values of other states too where the repair is a matrix. None where nothing it depends on changes
    repair      the factor (sum) or summand (max, min) of t in `moved`, where it is one
    kind        how it is mended: not at all, by a factor, by a summand, by a matrix, or by starting again
    absorbs     a subexpression x of g with g(x := -inf) == 0 in IEEE arithmetic for every finite state: the predicate may
                stand on x, and be shared with a maximum of x
    symbols     what the letters of `g_text`, `h_text`, `repair_text` and the obligations stand for
    """

    name: str
    reduction: Reduce
    predicate: Node | None
    g: Node
    upstream: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    moved: Node | None = None
    repair: Node | None = None
    kind: Literal["plain", "factor", "summand", "matrix", "restart"] = "plain"
    absorbs: Node | None = None
    symbols: tuple[tuple[str, Node], ...] = ()
    g_text: str = ""
    h_text: str = ""
    repair_text: str = ""
    obligations: tuple[Obligation, ...] = ()
    exponents: tuple[Exponent, ...] = ()
    span: Span | None = field(default=None, compare=False, repr=False)
    """Where the reduction stands in the text being compiled: nodes are shared between texts, and so is their place."""

    def __post_init__(self) -> None:
        if self.span is None:
            object.__setattr__(self, "span", self.reduction.span)

    @property
    def old(self) -> Carried:
        return carried(self.name, "old", self.reduction.axes, self.reduction.dtype)

    @property
    def new(self) -> Carried:
        return carried(self.name, "new", self.reduction.axes, self.reduction.dtype)


@dataclass(frozen=True)
class Cascade:
    """`states` in topological order, all reduced over the index set `bound`.

    `carries` are the names under which a tile program carries them, in the same order (empty before lowering).
    """

    bound: tuple[str, ...]
    states: tuple[State, ...]
    carries: tuple[str, ...] = ()

    def state(self, name: str) -> State:
        return next(s for s in self.states if s.name == name)


@dataclass(frozen=True)
class Refusal:
    """Why a reduction cannot join a pass: the blocking reduction, the reason in words, the counterexample if any."""

    reduction: Reduce
    reason: str
    obligation: Obligation | None = None


def merge(c: Cascade, a: Mapping[str, Node], b: Mapping[str, Node]) -> dict[str, Node]:
    """The states of a set from those of two parts of it (split reductions, shards): the same h mends both.

    `a` and `b` give each part's final states by name; argmax and argmin states cannot be merged (KeyError).
    """
    merged: dict[str, Node] = {}
    for s in c.states:
        sides = [_seen(c, s, part, merged) for part in (a, b)]
        merged[s.name] = apply(COMBINE[s.reduction.fn], *sides)
    return merged


def _seen(c: Cascade, s: State, part: Mapping[str, Node], merged: Mapping[str, Node]) -> Node:
    """A part's state as if it had been computed with the merged states."""
    if s.moved is None:
        return part[s.name]
    table: dict[Node, Node] = {x.old: part[x.name] for x in c.states}
    table |= {c.state(n).new: value for n, value in merged.items()}
    return replace([s.moved], table.get)[0]


def identity(r: Reduce) -> int | float | bool:
    """What a reduction starts from; an integer maximum starts at the lowest value of its type."""
    return typed(IDENTITY[r.fn], r.dtype)


def typed(value: float, dtype: DType) -> int | float | bool:
    """A value as a constant of `dtype`; an infinity is the end of an integer's range."""
    if dtype.is_float:
        return float(value)
    if dtype is DType.BOOL:
        return bool(value)
    if math.isinf(value):
        low = -(1 << dtype.bits - 1)
        return low if value < 0 else -low - 1
    return int(value)
