"""What a generator must know of a tile program before it writes code: types, uses, and which values need no storage.

A value is *inlined* into its one consumer's loop nest where that computes nothing twice and moves no read past a write;
every other tile value is a buffer (scalars are variables). Nothing here depends on a target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import field, replace
from itertools import count
from typing import Any, TypeVar

from ...dsl.records import dataclass
from ...dsl.types import DType, promote
from ..tensor_ir import operation_type, reduction_type
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Dot,
    Expr,
    Fill,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileProgram,
    TileType,
    operands,
    statements,
    subexpressions,
)

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A recursive computation written as a generator: it yields the computations it waits for and returns its result."""


def run(steps: Steps[T]) -> T:
    """Evaluate `steps` without recursion, so that the depth of an expression is no limit."""
    stack: list[Steps[Any]] = [steps]
    value: Any = None
    while stack:
        try:
            stack.append(stack[-1].send(value))
            value = None
        except StopIteration as done:
            stack.pop()
            value = done.value
    result: T = value
    return result


def rebuild(e: Expr, args: list[Expr]) -> Expr:
    """The same operation on other operands; `e` itself where they are the same objects."""
    if all(a is b for a, b in zip(args, operands(e), strict=True)):
        return e
    match e:
        case Load():
            return replace(e, subscripts=tuple(args))
        case Apply():
            return replace(e, args=tuple(args))
        case Cast() | Reduce():
            return replace(e, arg=args[0])
        case Dot():
            return replace(e, a=args[0], b=args[1])
        case Fill():
            return replace(e, value=args[0])
    raise TypeError(f"{type(e).__name__} has no operands")


def transform(e: Expr, rule: Callable[[Expr], Expr | None]) -> Expr:
    """Outermost first: where `rule` answers, its answer stands."""

    def steps(x: Expr) -> Steps[Expr]:
        answer = rule(x)
        if answer is not None:
            return answer
        args: list[Expr] = []
        for y in operands(x):
            args.append((yield steps(y)))
        return rebuild(x, args)

    return run(steps(e))


# ---------------------------------------------------------------- types


def merge(*axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes of all lists, each once, in order of first appearance."""
    return tuple(dict.fromkeys(a for group in axes for a in group))


def apply_type(op: str, types: list[DType]) -> DType:
    """The dtype of an elementwise operation on tiles."""
    if op == "fma":
        return promote(promote(types[0], types[1]), types[2])
    return operation_type(op, tuple(types))


class Types:
    """Types of expressions of one program, given those of the names in scope. Unit axes are scalars."""

    def __init__(self, program: TileProgram) -> None:
        self.tensors = {p.name: p.dtype for p in program.params}
        self.scalars = {s.name: s.dtype for s in program.scalars}
        self.names: dict[str, TileType] = {}
        self.units: set[str] = set()
        self._declare(program)
        self._known: dict[int, tuple[Expr, TileType]] = {}

    def _declare(self, program: TileProgram) -> None:
        for s in statements(program.body):
            match s:
                case Let():
                    self.names[s.name] = s.type
                case Grid(axes=axes):
                    self.units |= {a.name for a in axes if a.tile is None}
                case For(axis=axis, carries=carries):
                    self.names |= {c.name: c.type for c in carries}
                    if axis.tile is None:
                        self.units.add(axis.name)

    def of(self, e: Expr) -> TileType:
        """Dtype and axes, those in order of first appearance."""
        return run(self._steps(e))

    def _steps(self, e: Expr) -> Steps[TileType]:
        known = self._known.get(id(e))
        if known is not None:
            return known[1]
        args: list[TileType] = []
        for x in operands(e):
            args.append((yield self._steps(x)))
        found = self._combine(e, args)
        self._known[id(e)] = (e, found)  # holding `e` keeps its id
        return found

    def _combine(self, e: Expr, args: list[TileType]) -> TileType:
        axes = merge(*(a.axes for a in args))
        match e:
            case Const(dtype=dtype) | Cast(dtype=dtype):
                return TileType(dtype, axes)
            case Name(name=n):
                return self.names[n]
            case ScalarRef(name=n):
                return TileType(self.scalars[n])
            case AxisIndex(axis=a):
                return TileType(DType.I64, () if a in self.units else (a,))
            case Load(tensor=t):
                return TileType(self.tensors[t], axes)
            case Apply(op=op):
                return TileType(apply_type(op, [a.dtype for a in args]), axes)
            case Dot(over=over):
                return TileType(promote(args[0].dtype, args[1].dtype), _without(axes, over))
            case Reduce(fn=fn, over=over):
                return TileType(reduction_type(fn, args[0].dtype), _without(axes, over))
            case Fill():
                return args[0]
        return TileType(DType.I64)


def _without(axes: tuple[str, ...], over: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if a not in over)


# ---------------------------------------------------------------- uses and inlining


@dataclass(frozen=True)
class Use:
    """One occurrence of a name: in which body, in which of all loop nests, and the axes of that."""

    body: int
    number: int
    nest: frozenset[str]
    is_operand: bool


def outer_expressions(s: Stmt) -> Iterator[tuple[Expr, tuple[str, ...] | None]]:
    """What a statement evaluates in the body it stands in, each with the axes of its nest (None: those of itself)."""
    match s:
        case Let(value=v, type=t):
            yield v, t.axes
        case Store(subscripts=ix, value=v):
            yield Load(s.tensor, (*ix, v)), None
        case Grid(axes=axes):
            yield from ((x, ()) for a in axes for x in (a.extent, a.lo, a.hi) if x is not None)
        case For(axis=a, carries=carries):
            yield from ((x, ()) for x in (a.extent, a.lo, a.hi) if x is not None)
            yield from ((c.init, c.type.axes) for c in carries)


def bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt | None, tuple[Stmt, ...]]]:
    """Every statement list of a program with the statement it belongs to."""
    yield None, body
    yield from ((s, s.body) for s in statements(body) if isinstance(s, Grid | For))


def uses_of(program: TileProgram, types: Types) -> dict[str, list[Use]]:
    """Where each name is read."""
    found: dict[str, list[Use]] = {}

    numbers = count()

    def visit(e: Expr, axes: tuple[str, ...] | None, body: int) -> None:
        stack = [(e, frozenset(types.of(e).axes if axes is None else axes), next(numbers), False)]
        while stack:
            x, nest, number, operand = stack.pop()
            if isinstance(x, Name):
                found.setdefault(x.name, []).append(Use(body, number, nest, operand))
            for y in operands(x):
                if isinstance(x, Dot | Reduce):
                    stack.append((y, frozenset(types.of(y).axes), next(numbers), isinstance(x, Dot)))
                else:
                    stack.append((y, nest, number, False))

    for owner, body in bodies(program.body):
        for s in body:
            for e, axes in outer_expressions(s):
                visit(e, axes, id(body))
        if isinstance(owner, For):
            for c, y in zip(owner.carries, owner.yields, strict=True):
                visit(y, c.type.axes, id(body))
            for d in owner.domain:
                visit(d, None, id(body))
    return found


def written(program: TileProgram) -> frozenset[str]:
    """Tensors that the program stores to."""
    return frozenset(s.tensor for s in statements(program.body) if isinstance(s, Store))


def inlined(program: TileProgram, types: Types) -> frozenset[str]:
    """Names of tile values that their one consumer computes in its own loop nest."""
    uses, stored = uses_of(program, types), written(program)
    found: set[str] = set()
    repeated: set[str] = set()
    for _, body in bodies(program.body):
        for s in body:
            if not isinstance(s, Let) or not s.type.axes:
                continue
            its = uses.get(s.name, [])
            if _may_inline(s, its, id(body), stored, types):
                reads = {x.name for x in subexpressions(s.value) if isinstance(x, Name)}
                if len(its) == 1 or not reads & repeated:
                    found.add(s.name)
                if len(its) > 1 or reads & repeated:
                    repeated.add(s.name)
    return frozenset(found)


CHEAP = frozenset({"add", "sub", "mul"})
MOST_AGAIN = 2
"""So many of these operations on what is read are done again rather than kept in memory, which takes a store and a load; in
one loop nest LLVM does them once."""


def _may_inline(s: Let, uses: list[Use], body: int, stored: frozenset[str], types: Types) -> bool:
    """Used in its own body and there by a nest over the same axes (a plain read may be repeated over more): once, or
    several times if it is cheap."""
    value = types.of(s.value)
    if (
        not uses
        or uses[0].body != body
        or value.dtype is not s.type.dtype
        or set(value.axes) != set(s.type.axes)
    ):
        return False
    if any(isinstance(x, Load) and x.tensor in stored for x in subexpressions(s.value)):
        return False
    same_nest = all(u.nest == frozenset(s.type.axes) for u in uses)
    if len(uses) > 1:
        one = len({u.number for u in uses}) == 1 and not uses[0].is_operand
        return one and same_nest and _is_cheap(s.value)
    return same_nest or _is_plain_read(s.value)


def _is_cheap(e: Expr) -> bool:
    """Is it a few sums and products of what is read?"""
    inner = [x for x in subexpressions(e) if not isinstance(x, Name | Const | ScalarRef | AxisIndex)]
    return sum(isinstance(x, Apply) for x in inner) <= MOST_AGAIN and all(
        isinstance(x, Load) or (isinstance(x, Apply) and x.op in CHEAP) for x in inner
    )


def inherited(program: TileProgram, inlined: frozenset[str]) -> dict[str, str]:
    """Tile values that may take the place of another one of their type, by name, where nothing reads that any more: those
    computed element by element from it, and carried values that begin as it. A carried value's place is free inside its
    loop for what it becomes. `inlined` values are read where their consumers stand."""
    reads = _Reads(program, inlined)
    found: dict[str, str] = {}
    for owner, body in bodies(program.body):
        own = {n: t for s in body for n, t in _made(s) if n not in inlined}
        becomes = _becomes(owner, reads)
        own |= {n: t for n, t in (_made(owner) if owner is not None else ()) if n in becomes}
        later = set() if owner is None else reads.by(_at_end(owner))
        for s in reversed(body):
            wanted = _successors(s, reads) if not {n for n, _ in _made(s)} & inlined else {}
            for name, sources in wanted.items():
                type_ = dict(_made(s))[name]
                free = [
                    n
                    for n in own
                    if n in sources - later and own[n] == type_ and becomes.get(n, name) == name
                ]
                if free:
                    found[name] = free[0]
            later |= reads.of(s)
    return found


def _made(s: Stmt) -> list[tuple[str, TileType]]:
    """The values that stand in a body after a statement."""
    match s:
        case Let():
            return [(s.name, s.type)]
        case For():
            return [(c.name, c.type) for c in s.carries]
    return []


def _at_end(s: Stmt) -> tuple[Expr, ...]:
    """What a loop evaluates at the end of its body."""
    return (*s.yields, *s.domain) if isinstance(s, For) else ()


def _becomes(s: Stmt | None, reads: _Reads) -> dict[str, str]:
    """Carried values that become, as it is, a value of the loop's body that no other one reads at the end."""
    if not isinstance(s, For):
        return {}
    ends = [reads.by([y]) for y in s.yields]
    return {
        c.name: y.name
        for c, y in zip(s.carries, s.yields, strict=True)
        if isinstance(y, Name) and sum(y.name in names for names in ends) == 1
    }


def _successors(s: Stmt, reads: _Reads) -> dict[str, set[str]]:
    """The values that a statement makes, each with those that it could be written over as it is computed."""
    match s:
        case Let():
            return {} if reads.has_product(s.value) else {s.name: reads.by([s.value])}
        case For():
            inits = [c.init.name for c in s.carries if isinstance(c.init, Name)]
            others = [c.init for c in s.carries if not isinstance(c.init, Name)]
            busy = reads.of(*s.body) | reads.by([*_at_end(s), *others])
            return {
                c.name: {c.init.name} - busy
                for c in s.carries
                if isinstance(c.init, Name) and inits.count(c.init.name) == 1
            }
    return {}


class _Reads:
    """Which names expressions and statements mention, those in inlined values included."""

    def __init__(self, program: TileProgram, inlined: frozenset[str]) -> None:
        self.values = {
            s.name: s.value for s in statements(program.body) if isinstance(s, Let) and s.name in inlined
        }

    def by(self, found: Iterable[Expr]) -> set[str]:
        names: set[str] = set()
        pending = list(found)
        while pending:
            for x in subexpressions(pending.pop()):
                if isinstance(x, Name) and x.name not in names:
                    names.add(x.name)
                    pending += [self.values[x.name]] if x.name in self.values else []
        return names

    def of(self, *body: Stmt) -> set[str]:
        inside = list(statements(body))
        return self.by(e for s in inside for e, _ in outer_expressions(s)) | self.by(
            e for s in inside for e in _at_end(s)
        )

    def has_product(self, e: Expr) -> bool:
        parts = [e, *(self.values[n] for n in self.by([e]) if n in self.values)]
        return any(isinstance(x, Dot) for p in parts for x in subexpressions(p))


def _is_plain_read(e: Expr) -> bool:
    """A read whose place no tensor decides, converted or not."""
    while isinstance(e, Cast):
        e = e.arg
    return isinstance(e, Load) and not any(
        isinstance(x, Load | Name) for i in e.subscripts for x in subexpressions(i)
    )


def data_dependent(program: TileProgram) -> frozenset[str]:
    """Names whose value depends on a tensor: what makes a subscript one that is clamped."""
    found: set[str] = set()
    while True:
        before = len(found)
        for s in statements(program.body):
            if isinstance(s, Let) and depends_on_data(s.value, found):
                found.add(s.name)
            elif isinstance(s, For):
                found |= {
                    c.name
                    for c, y in zip(s.carries, s.yields, strict=True)
                    if depends_on_data(c.init, found) or depends_on_data(y, found)
                }
        if len(found) == before:
            return frozenset(found)


def depends_on_data(e: Expr, names: set[str] | frozenset[str]) -> bool:
    return any(isinstance(x, Load) or (isinstance(x, Name) and x.name in names) for x in subexpressions(e))


# ---------------------------------------------------------------- one name, one declaration


def distinct(program: TileProgram) -> TileProgram:
    """The program with values and loop axes of sibling scopes renamed where they share a name."""
    declared = [n for s in statements(program.body) for n in _declares(s)]
    if len(set(declared)) == len(declared):
        return program
    return replace(program, body=_Renaming(set(declared) | set(program.extents)).body(program.body, {}))


def _declares(s: Stmt) -> list[str]:
    match s:
        case Let():
            return [s.name]
        case Grid(axes=axes):
            return [a.name for a in axes]
        case For():
            return [s.axis.name, *(c.name for c in s.carries)]
    return []


@dataclass
class _Renaming:
    """`names` are all names ever used; the first declaration of one keeps it."""

    names: set[str]
    kept: set[str] = field(default_factory=set)

    def fresh(self, name: str) -> str:
        if name not in self.kept:
            self.kept.add(name)
            return name
        n = next(n for n in count(2) if f"{name}_{n}" not in self.names)
        self.names.add(f"{name}_{n}")
        return f"{name}_{n}"

    def body(self, body: tuple[Stmt, ...], outer: dict[str, str]) -> tuple[Stmt, ...]:
        now = dict(outer)
        return tuple(self.statement(s, now) for s in body)

    def statement(self, s: Stmt, now: dict[str, str]) -> Stmt:
        match s:
            case Let():
                value, type_ = _renamed(s.value, now), _renamed_type(s.type, now)
                now[s.name] = self.fresh(s.name)
                return replace(s, name=now[s.name], type=type_, value=value)
            case Store():
                subscripts = tuple(_renamed(x, now) for x in s.subscripts)
                return replace(s, subscripts=subscripts, value=_renamed(s.value, now))
            case Grid():
                inner = dict(now)
                axes = tuple(self.axis(a, inner) for a in s.axes)
                return replace(s, axes=axes, body=self.body(s.body, inner))
            case For():
                return self.loop(s, now)

    def axis(self, a: LoopAxis, now: dict[str, str]) -> LoopAxis:
        extent, lo, hi = (None if x is None else _renamed(x, now) for x in (a.extent, a.lo, a.hi))
        assert extent is not None
        now[a.name] = self.fresh(a.name)
        return LoopAxis(now[a.name], extent, a.tile, lo, hi)

    def loop(self, s: For, now: dict[str, str]) -> For:
        inits = [_renamed(c.init, now) for c in s.carries]
        types = [_renamed_type(c.type, now) for c in s.carries]
        inner = dict(now)
        axis = self.axis(s.axis, inner)
        for c in s.carries:
            now[c.name] = inner[c.name] = self.fresh(c.name)
        carries = tuple(
            replace(c, name=now[c.name], type=t, init=x)
            for c, t, x in zip(s.carries, types, inits, strict=True)
        )
        domain = tuple(_renamed(x, inner) for x in s.domain)
        body = tuple(self.statement(x, inner) for x in s.body)
        yields = tuple(_renamed(y, inner) for y in s.yields)
        return replace(s, axis=axis, carries=carries, domain=domain, body=body, yields=yields)


def _renamed_type(t: TileType, now: dict[str, str]) -> TileType:
    return TileType(t.dtype, tuple(now.get(a, a) for a in t.axes))


def _renamed(e: Expr, now: dict[str, str]) -> Expr:
    def steps(x: Expr) -> Steps[Expr]:
        args: list[Expr] = []
        for y in operands(x):
            args.append((yield steps(y)))
        made = rebuild(x, args)
        match made:
            case Name(name=n):
                return Name(now.get(n, n))
            case AxisIndex(axis=a):
                return AxisIndex(now.get(a, a))
            case Dot(over=over) | Reduce(over=over):
                return replace(made, over=tuple(now.get(a, a) for a in over))
        return made

    return run(steps(e))
