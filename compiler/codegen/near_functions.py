"""Functions that need not be right to the last bit of 24, where products are of 16-bit numbers or results have 16 bits.

`tanh` without a branch comes in these forms (`runtime/intrinsics/ptx.py` states their errors):

- where every use ends in exp(c · …) with a small constant c, an error that is small beside 1 does: `flat_tanh`;
- 1 + tanh(x) = 2 / (1 + exp(-2x)), which loses nothing for very negative x: `tanh_plus_one`; `logistic` is half of it;
- elsewhere one that is small beside the result, if all results have 16 bits: `near_tanh`.

`logistic` is also what 1 / (1 + exp(x)) becomes, if all results have 16 bits. All but the last take y = c · log2 e · x.
Factors of x that all elements share become one with that constant; so do those of a · x + b · x · x · x, which becomes
x · (b · x² + a), with no more roundings, where a and b have one sign.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Const,
    Expr,
    For,
    Grid,
    Let,
    Name,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileProgram,
    expressions,
    operands,
    statements,
    subexpressions,
)
from .tile_types import Facts, Types, rewrite, tile_axes

LARGEST_FACTOR = 64.0
"""Of an exponent. An error of 2^-21 beside 1 becomes one of 2^-15 there, an eighth of what f16 rounds off."""
DOUBLE_LOG2_E = 2 / math.log(2)
SIXTEEN = (DType.F16, DType.BF16)


def with_near_functions(program: TileProgram) -> TileProgram:
    """The same program with its `tanh`, and what has 1 + exp(x) for a divisor, in one of these forms."""
    every = (x for e in _all(program) for x in subexpressions(e))
    if not any(isinstance(x, Apply) and (x.op == "tanh" or _power(x) is not None) for x in every):
        return program
    stores_16 = all(p.dtype in SIXTEEN for p in program.params if p.mode != "in")
    if not stores_16 and program.tier not in ("mma", "wgmma"):
        return program
    return _Nearing(program, stores_16).program()


def _all(program: TileProgram) -> list[Expr]:
    return [e for s in statements(program.body) for e in expressions(s)]


class _Nearing:
    def __init__(self, program: TileProgram, stores_16: bool) -> None:
        self.before, self.stores_16 = program, stores_16
        tiles = {a: x.tile or 1 for a, x in tile_axes(program, dict(program.statics)).items()}
        self.facts = Facts(
            {p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, tiles
        )
        self.types: Types = {}
        for s in statements(program.body):
            if isinstance(s, Let):
                self.types[s.name] = s.type
            if isinstance(s, For):
                self.types |= {c.name: c.type for c in s.carries}
        self.flat = Exponents(program).only

    def program(self) -> TileProgram:
        return replace(self.before, body=self.block(self.before.body))

    def block(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(self.statement(s) for s in body)

    def statement(self, s: Stmt) -> Stmt:
        match s:
            case Let():
                return replace(s, value=rewrite(s.value, self.near))
            case Store():
                return replace(s, value=rewrite(s.value, self.near))
            case Grid():
                return replace(s, body=self.block(s.body))
            case For():
                yields = tuple(rewrite(y, self.near) for y in s.yields)
                return replace(s, body=self.block(s.body), yields=yields)

    def near(self, e: Expr) -> Expr:
        match e:
            case Apply(op="add", args=(Const(value=1), x)) | Apply(op="add", args=(x, Const(value=1))):
                inner = _of_tanh(x)
                if inner is not None and self.is_f32(inner):
                    return Apply("tanh_plus_one", (self.scaled(inner, -DOUBLE_LOG2_E),))
            case (
                Apply(op="mul", args=(x, Apply(op="tanh_plus_one", args=(y,))))
                | Apply(op="mul", args=(Apply(op="tanh_plus_one", args=(y,)), x))
            ):
                half = _halved(x)
                return e if half is None else Apply("mul", (half, Apply("logistic", (y,))))
            case Apply(op="div", args=(x, _)) if self.stores_16:
                power = _power(e)
                if power is not None and self.is_f32(power):
                    found = Apply("logistic", (self.scaled(power, DOUBLE_LOG2_E / 2),))
                    return found if x == Const(1, DType.F32) else Apply("mul", (x, found))
            case Apply(op="tanh", args=(x,)) if self.is_f32(x):
                if e in self.flat:
                    return Apply("flat_tanh", (self.scaled(x, DOUBLE_LOG2_E),))
                return Apply("near_tanh", (x,)) if self.stores_16 else e
        return e

    def is_f32(self, e: Expr) -> bool:
        return self.facts.type_of(e, self.types).dtype is DType.F32

    def is_shared(self, e: Expr) -> bool:
        """Is it a number of its own, the same for all elements?"""
        return (
            isinstance(e, ScalarRef | Name) and self.is_f32(e) and not self.facts.type_of(e, self.types).axes
        )

    def scaled(self, e: Expr, by: float) -> Expr:
        """e · by, with the factors of e that all elements share in one: (a · x) / 30 · by -> x · (a · (by / 30)).

        A shared factor that is no constant is multiplied by no more than 1, so that it stays finite.
        """
        shared: list[Expr] = []
        while True:
            match e:
                case Apply(op="mul", args=(x, Const(value=c))) | Apply(op="mul", args=(Const(value=c), x)):
                    e, by = x, by * c
                case Apply(op="div", args=(x, Const(value=c))) if c:
                    e, by = x, by / c
                case Apply(op="neg", args=(x,)):
                    e, by = x, -by
                case Apply(op="mul", args=(a, x)) if self.is_shared(a):
                    e, shared = x, [*shared, a]
                case _:
                    break
        if not shared and (terms := _cubic(e)) is not None:
            x, first, third = terms
            slope = Apply(
                "fma", (Apply("mul", (x, x)), Const(third * by, DType.F32), Const(first * by, DType.F32))
            )
            return Apply("mul", (x, slope))
        factor: Expr = Const(by, DType.F32)
        if len(shared) == 1 and abs(by) <= 1:
            factor = Apply("mul", (shared[0], factor))
        else:
            for x in shared:
                e = Apply("mul", (x, e))
        return Apply("mul", (e, factor))


class Exponents:
    """Which expressions of a program have no use but to end, multiplied by small constants, in an exponential."""

    def __init__(self, program: TileProgram) -> None:
        self.names = {s.name for s in statements(program.body) if isinstance(s, Let)}
        self.names |= {c.name for s in statements(program.body) if isinstance(s, For) for c in s.carries}
        self.statements = list(statements(program.body))
        self.seen: dict[Expr, bool] = {}
        count = -1
        while count != len(self.names):  # until no name is found to have another use
            count, self.seen = len(self.names), {}
            for s in self.statements:
                self.visit_statement(s)
            self.names -= {x.name for x, good in self.seen.items() if isinstance(x, Name) and not good}
        self.only = {x for x, good in self.seen.items() if good}

    def visit_statement(self, s: Stmt) -> None:
        match s:
            case Let(name=name, value=value):
                self.visit(value, name in self.names)
            case For(carries=carries, yields=yields):
                for c, y in zip(carries, yields, strict=True):
                    self.visit(c.init, c.name in self.names)
                    self.visit(y, c.name in self.names)
                for e in expressions(replace(s, carries=(), yields=())):
                    self.visit(e, False)
            case _:
                for e in expressions(s):
                    self.visit(e, False)

    def visit(self, e: Expr, good: bool) -> None:
        """`good`: nothing but an exponential will see the value."""
        stack = [(e, good)]
        while stack:
            x, good = stack.pop()
            self.seen[x] = self.seen.get(x, True) and good
            stack.extend(zip(operands(x), self.uses(x, good), strict=True))

    def uses(self, e: Expr, good: bool) -> list[bool]:
        """Of each operand, whether nothing but an exponential will see it."""
        match e:
            case Apply(op="exp" | "exp2"):
                return [True]
            case Apply(op="add" | "sub" | "neg" | "max" | "min", args=args):
                return [good] * len(args)
            case Reduce(fn="max" | "min"):
                return [good]
            case Apply(op="mul", args=(a, b)):
                return [good and _is_small(b), good and _is_small(a)]
            case Apply(op="where"):
                return [False, good, good]
            case Apply(op="eq" | "ne", args=(a, b)) if _is_infinite(a) or _is_infinite(b):
                return [True, True]
        return [False] * len(operands(e))


def _of_tanh(e: Expr) -> Expr | None:
    return e.args[0] if isinstance(e, Apply) and e.op in ("tanh", "near_tanh") else None


def _halved(e: Expr) -> Expr | None:
    """What half of which a product is: a for 0.5 · a."""
    match e:
        case Apply(op="mul", args=(Const(value=0.5), x)) | Apply(op="mul", args=(x, Const(value=0.5))):
            return x
    return None


def _cubic(e: Expr) -> tuple[Expr, float, float] | None:
    """x, a and b of a · x + b · x · x · x with a and b of one sign, in any order; None for anything else."""
    if not isinstance(e, Apply) or e.op != "add":
        return None
    (x, a, n), (y, b, m) = sorted(map(_monomial, e.args), key=lambda term: term[2])
    return (x, a, b) if x is not None and x == y and (n, m) == (1, 3) and a * b > 0 else None


def _monomial(e: Expr) -> tuple[Expr | None, float, int]:
    """x, c and n of c · xⁿ; None for a product of other things."""
    found, factor, power = None, 1.0, 0
    stack = [e]
    while stack:
        match stack.pop():
            case Apply(op="mul", args=args):
                stack += args
            case Const(value=c):
                factor *= c
            case x if found in (None, x):
                found, power = x, power + 1
            case _:
                return None, factor, 0
    return found, factor, power


def _power(e: Expr) -> Expr | None:
    """x of a / (1 + exp(x))."""
    match e:
        case Apply(op="div", args=(_, Apply(op="add", args=(Const(value=1), Apply(op="exp", args=(x,)))))):
            return x
        case Apply(op="div", args=(_, Apply(op="add", args=(Apply(op="exp", args=(x,)), Const(value=1))))):
            return x
    return None


def _is_small(e: Expr) -> bool:
    return isinstance(e, Const) and abs(e.value) <= LARGEST_FACTOR


def _is_infinite(e: Expr) -> bool:
    return isinstance(e, Const) and math.isinf(e.value)
