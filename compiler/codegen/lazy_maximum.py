"""Running maxima that move only when they have to (Zadouri et al., FlashAttention-4, 2026: conditional rescaling).

Sums of exp(c · (x - m)) may be taken relative to any m that keeps them finite, if what is stored divides one by another: a
maximum m stays where it is while a new one exceeds it by no more than 8 / (c · log2 e). All factors by which sums would
move on are then 1, and the kernel leaves those products out. In exact arithmetic the results are the same.

**Range.** A weight is at most 2^8 instead of 1 (and what its shift's own rounding makes of that,
`warpgroup_exponentials.py`): f16 holds 2^16, f32 sums of 2^119 such weights. The largest weight of a row stays at least 1,
for the maximum only ever lies above m. **Which programs.** Every state of the loop is such a maximum, or a sum of degree 1
in the weights, which moves on by their factor; every value that is stored has degree 0. A log-sum-exp, c · m + log(sum), is
one such, for the logarithm falls by what c · m rises. A maximum that is stored is of no degree, and so is what two launches
merge.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Cast,
    Const,
    Dot,
    Expr,
    Fill,
    For,
    Grid,
    Let,
    Name,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileProgram,
    TileType,
    expressions,
    is_visit,
    operands,
    statements,
    subexpressions,
)
from .loop_states import RunningMaximum, exponent, running_maxima
from .tile_types import postorder

SLACK = 8 * 0.6931471805599453
"""How far c · (x - m) may rise above 0: a weight is at most 2^8."""


def with_lazy_maxima(program: TileProgram) -> TileProgram:
    """The same program, in which maxima move only when they have to; itself where that could show."""
    loops = [s for s in statements(program.body) if isinstance(s, For) and running_maxima(s)]
    early = _before_loops(program.body)
    if not loops or not all(_slack(s, m, early) for s in loops for m in running_maxima(s)):
        return program
    return replace(program, body=_rewritten(program.body, early)) if Degrees(program).all_zero else program


def _before_loops(body: tuple[Stmt, ...]) -> frozenset[str]:
    """The numbers that are known before the first loop."""
    found: set[str] = set()
    for s in body:
        match s:
            case Grid():
                found |= _before_loops(s.body)
            case For():
                break
            case Let() if not s.type.axes and s.type.dtype is DType.F32:
                found.add(s.name)
    return frozenset(found)


def rows_that_cancel(program: TileProgram) -> frozenset[str]:
    """What is subtracted in exponents and may be any number near, for no result depends on it: the running maxima (and what
    stands in for one of -inf) of a program whose results divide one sum of weights by another or are log-sum-exps. Weights
    may then be off by a factor of up to 2^32, which f16 does not hold."""
    found = Degrees(program)
    return frozenset(found.origins) if found.all_zero and not found.narrow else frozenset()


def _rewritten(body: tuple[Stmt, ...], early: frozenset[str]) -> tuple[Stmt, ...]:
    """What loops in a row need stands before the first of them, so that they stay in a row."""
    found: list[Stmt] = []
    first = next((i for i, s in enumerate(body) if isinstance(s, For)), 0)
    for s in body:
        match s:
            case Grid():
                found.append(replace(s, body=_rewritten(s.body, early)))
            case For():
                lets, loop = _lazy(s, early)
                found[first:first] = lets
                inner: list[Stmt] = []
                for (
                    x
                ) in loop.body:  # steps that may be left out: what they need stands before the loop as well
                    more, made = _lazy(x, early) if isinstance(x, For) else ([], x)
                    found[first:first] = more
                    inner.append(made)
                found.append(replace(loop, body=tuple(inner)))
            case _:
                found.append(s)
    return tuple(found)


def _lazy(s: For, early: frozenset[str]) -> tuple[list[Stmt], For]:
    """What a loop needs before it, and the loop."""
    before: list[Stmt] = []
    for m in running_maxima(s):
        slack, highest = f"{m.new}_slack", f"{m.new}_highest"
        limit = _slack(s, m, early)
        assert limit is not None
        before.append(Let(slack, TileType(DType.F32), limit))
        near = Apply("le", (Name(highest), Apply("add", (Name(m.state), Name(slack)))))
        body: list[Stmt] = []
        for x in s.body:
            if isinstance(x, Let) and x.name == m.new:
                body.append(replace(x, name=highest))
                x = replace(x, value=Apply("where", (near, Name(m.state), Name(highest))))
            body.append(x)
        s = replace(s, body=tuple(body))
    return before, s


def _slack(s: For, m: RunningMaximum, early: frozenset[str]) -> Expr | None:
    """How far a maximum may stay behind; None where its exponentials do not have one scale, known before the loop."""
    scales = {exponent(x.value)[0] for x in s.body if isinstance(x, Let) and x.name in m.factors}
    state = next(c for c in s.carries if c.name == m.state)
    scale = scales.pop() if len(scales) == 1 else Name("")
    known = (
        scale is None
        or isinstance(scale, Const | ScalarRef)
        or (isinstance(scale, Name) and scale.name in early)
    )
    if state.type.dtype is not DType.F32 or not known:
        return None
    slack: Expr = Const(SLACK, DType.F32)
    return slack if scale is None else Apply("div", (slack, Apply("abs", (scale,))))


ANY, BAD = -1, 99
"""Degrees of zero, and of what has none."""
TOP, SHIFT, LOG = 101, 102, 103
"""Not degrees: the maximum after its loop, that times the scale, and the logarithm of a sum of degree 1."""


class Degrees:
    """By which power of its weights' common factor every value of a program grows."""

    def __init__(self, program: TileProgram) -> None:
        self.degrees: dict[str, int] = {}
        self.origins: dict[str, Expr | None] = {}  # what is subtracted in exponents, with their scale
        self.weights: set[str] = set()
        self.axes: set[str] = set()  # along which maxima differ
        self.narrow = False  # are weights rounded to f16?
        self.scale: Expr | None = Name("")  # of the exponentials
        self.state = ""  # the maximum of the loop before, with which the next one goes on
        self.all_zero = all(self.is_zero(s) for s in program.body)

    def is_zero(self, s: Stmt) -> bool:
        """Do all stores have degree 0, and loops states of one degree?"""
        match s:
            case Let():
                self.degrees[s.name] = self.of(s.value)
                self.weights |= {s.name} if self.is_weight(s.value) else set()
                return True
            case Store():
                return all(self.of(e) in (ANY, 0) for e in expressions(s))
            case Grid():
                return all(self.is_zero(x) for x in s.body)
            case For():
                return self.loop(s)

    def visited(self, s: For) -> bool:
        """A loop whose steps may be left out: its states are those of the loops inside, which each run once or never."""
        visits = [x for x in s.body if isinstance(x, For)]
        maxima = {m.state for m in running_maxima(visits[0])}
        for c, inner in zip(s.carries, visits[0].carries, strict=True):
            if inner.init != Name(c.name):
                return False
            if inner.name in maxima:
                if self.state and c.init != Name(self.state):
                    return False
                self.state, self.degrees[c.name] = c.name, TOP
            else:
                self.degrees[c.name] = self.of(c.init)
        if not all(map(self.is_zero, s.body)) or s.yields != tuple(Name(c.name) for c in visits[-1].carries):
            return False
        inside = [e for x in s.body for e in expressions(x)]
        read = [x.name for e in (*inside, *s.yields) for x in subexpressions(e) if isinstance(x, Name)]
        alone = all(read.count(c.name) == 1 for c in s.carries)
        for c, inner in zip(s.carries, visits[-1].carries, strict=True):
            if c.name == self.last_state(s, visits):
                self.state = c.name
            elif self.degrees[c.name] == ANY:
                self.degrees[c.name] = self.degrees[inner.name]
            elif not self.same(self.degrees[c.name], self.degrees[inner.name]):
                return False
        return alone and all(self.of(e) in (ANY, 0) for e in s.domain)

    def last_state(self, s: For, visits: list[For]) -> str:
        """The state of a loop that is the maximum of the last of the loops inside."""
        return next(
            (c.name for c, v in zip(s.carries, visits[-1].carries, strict=True) if v.name == self.state), ""
        )

    def loop(self, s: For) -> bool:
        if any(isinstance(x, For) and is_visit(x.axis) for x in s.body) and not running_maxima(s):
            return self.visited(s)
        maxima = running_maxima(s)
        factors = {n for m in maxima for n in m.factors}
        states = {m.state for m in maxima}
        if len(maxima) > 1:
            return False
        for m in maxima:
            if self.state and Name(self.state) not in [c.init for c in s.carries if c.name == m.state]:
                return False  # sums relative to one maximum are not sums relative to another
            self.state = m.state
            scales = {exponent(x.value)[0] for x in s.body if isinstance(x, Let) and x.name in m.factors}
            if len(scales) > 1:  # sums that grow by different powers of what the maximum is off by
                return False
            scale = scales.pop()
            if self.scale not in (Name(""), scale):
                return False
            self.origins[m.origin] = self.scale = scale
            self.axes |= {a for c in s.carries if c.name == m.state for a in c.type.axes}
        for c, y in zip(s.carries, s.yields, strict=True):
            moves = any(Name(f) in subexpressions(y) for f in factors)
            self.degrees[c.name] = TOP if c.name in states else int(moves)
        for x in s.body:
            if isinstance(x, Let) and x.name in factors:
                self.degrees[x.name] = (
                    ANY  # moves a state of degree 1 on; `moved` sees that it does nothing else
                )
            elif not self.is_zero(x):
                return False
        fine = all(
            c.name in states or self.same(self.degrees[c.name], self.of(self.moved(c.name, y, factors)))
            for c, y in zip(s.carries, s.yields, strict=True)
        )
        inside = [e for x in s.body for e in expressions(x)]
        read = [x.name for e in (*inside, *s.yields) for x in subexpressions(e) if isinstance(x, Name)]
        alone = all(read.count(c.name) == 1 for c in s.carries if self.degrees[c.name] == 1)  # each by itself
        uses = [x for e in inside for x in subexpressions(e) if isinstance(x, Name) and x.name in factors]
        starts = all(c.name in states or self.same(self.degrees[c.name], self.of(c.init)) for c in s.carries)
        return fine and alone and not uses and starts and all(self.of(e) in (ANY, 0) for e in s.domain)

    def moved(self, state: str, y: Expr, factors: set[str]) -> Expr:
        """A yield without the factor that moves its state on; a factor that stands elsewhere makes it bad."""
        match y:
            case Apply(op="add", args=(Apply(op="mul", args=(Name(a), Name(b))), x)) if (
                state in (a, b) and {a, b} & factors
            ):
                rest = x
            case Apply(op="add", args=(x, Apply(op="mul", args=(Name(a), Name(b))))) if (
                state in (a, b) and {a, b} & factors
            ):
                rest = x
            case _:
                rest = y
        bad = any(isinstance(z, Name) and z.name in factors for z in subexpressions(rest))
        return Name("") if bad else rest

    def same(self, a: int, b: int) -> bool:
        return a == b < BAD or (ANY in (a, b) and max(a, b) < BAD)

    def of(self, e: Expr) -> int:
        done: dict[Expr, int] = {}
        for x in postorder(e):
            done[x] = self.node(x, [done[a] for a in operands(x)])
        return done[e]

    def node(self, e: Expr, args: list[int]) -> int:
        if any(a > BAD for a in args) or (isinstance(e, Apply) and e.op == "log" and args == [1]):
            return self.logarithm(e, args)
        match e:
            case Const(value=value):
                return ANY if value == 0 else 0
            case Name(name=name):
                return self.degrees.get(name, BAD)
            case Apply(op="exp") if self.is_weight(e):
                return 1
            case Cast(dtype=dtype) if args[0] not in (ANY, 0):
                self.narrow |= dtype is DType.F16
                return args[0] if dtype.is_float and (dtype is not DType.F16 or self.is_held(e.arg)) else BAD
            case Reduce(over=over) | Dot(over=over) if self.axes & set(over) and set(args) - {ANY, 0}:
                return BAD
            case Fill() | Cast() | Reduce(fn="sum") | Apply(op="neg"):
                return args[0]
            case Dot() | Apply(op="mul"):
                return BAD if BAD in args else ANY if ANY in args else sum(args)
            case Apply(op="div"):
                return BAD if BAD in args or args[1] == ANY else ANY if args[0] == ANY else args[0] - args[1]
            case Apply(op="add" | "sub"):
                return self.met(args)
            case Apply(op="where"):
                return self.met(args[1:]) if args[0] in (ANY, 0) else BAD
            case Apply(op="eq" | "ne", args=(_, Const(value=0))):
                return 0 if args[0] != BAD else BAD
        return 0 if all(a in (ANY, 0) for a in args) else BAD

    def logarithm(self, e: Expr, args: list[int]) -> int:
        """What becomes of a maximum after its loop, on its way into a log-sum-exp."""
        match e:
            case Apply(op="log"):
                return LOG if args == [1] else BAD
            case Apply(op="eq", args=(_, Const(value=low))) if args[0] == TOP and low == -math.inf:
                return 0
            case Apply(op="where", args=(Apply(op="eq", args=(a, Const(value=low))), Const(value=zero), b)):
                return TOP if a == b and (low, zero) == (-math.inf, 0) and args[2] == TOP else BAD
            case Apply(op="mul", args=(a, b)) if TOP in args and self.scale in (a, b):
                return SHIFT
            case Apply(op="add") if LOG in args:
                return 0 if (TOP if self.scale is None else SHIFT) in args else BAD
        return BAD

    def is_held(self, e: Expr) -> bool:
        """Is a value a weight, which f16 holds?"""
        return self.is_weight(e) or (isinstance(e, Name) and e.name in self.weights)

    def met(self, degrees: list[int]) -> int:
        known = {d for d in degrees if d != ANY}
        return ANY if not known else known.pop() if len(known) == 1 else BAD

    def is_weight(self, e: Expr) -> bool:
        """exp(c · (x - m)) with the scale of m's factors and an x of degree 0."""
        scale, x, origin = exponent(e)
        if not isinstance(origin, Name) or x is None or origin.name not in self.origins:
            return False
        return self.origins[origin.name] == scale and self.of(x) in (ANY, 0)
