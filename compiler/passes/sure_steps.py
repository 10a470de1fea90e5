"""sure-steps: tiles on which a comparison of what tensors hold is true for every pair need no mask (tier `wgmma`).

A loop visits a tile where the ranges of both sides do not exclude all of it. Where they also say that the comparison holds
for every lane, as in a tile within one document, a step without it is taken instead:

    for visit in 1 to visits {                       becomes      for visit in 1 to min(visits, 1 - sure) { as before }
        t = where(a == b, s, -inf)                                for visit_2 in 1 to sure { s in place of t }
        … t …
    }

A mask by indices, as `n <= m` on the diagonal, stays in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    Carry,
    Cast,
    Expr,
    For,
    Grid,
    Let,
    Name,
    Stmt,
    TileProgram,
    TileType,
    apply,
    i64,
    is_visit,
    operands,
    rebuild,
    statements,
)
from .steps_ahead import unused

Ranges = Mapping[str, tuple[str, Expr]]
"""Names of the least ("min") or greatest ("max") value of an expression over a tile, by name."""


def with_sure_steps(program: TileProgram, ranges: Ranges) -> TileProgram:
    return replace(program, body=tuple(_Sure(program, ranges).statement(s) for s in program.body))


class _Sure:
    """The loops of a program whose steps may be left out."""

    def __init__(self, program: TileProgram, ranges: Ranges) -> None:
        self.ranges = ranges
        self.values = {s.name: s.value for s in statements(program.body) if isinstance(s, Let)}
        self.inner = {  # defined in some loop, whose tiles it is about
            x.name
            for s in statements(program.body)
            if isinstance(s, For)
            for x in s.body
            if isinstance(x, Let)
        }
        self.taken = set(self.values) | {x.name for x in program.params} | {x.name for x in program.scalars}
        self.taken |= set(program.extents) | {x.name for x in program.whole}
        for s in statements(program.body):
            if isinstance(s, For):
                self.taken |= {s.axis.name, *(c.name for c in s.carries)}

    def statement(self, s: Stmt) -> Stmt:
        if isinstance(s, Grid):
            return replace(s, body=tuple(self.statement(x) for x in s.body))
        if not isinstance(s, For) or not s.body:
            return s
        *before, visit = s.body
        if not isinstance(visit, For) or not is_visit(visit.axis) or visit.axis.lo is not None:
            return s
        handed_on = s.yields == tuple(Name(c.name) for c in visit.carries)
        if not handed_on or not all(isinstance(x, Let) for x in (*before, *visit.body)):
            return s
        return self.with_choice(s, tuple(before), visit)

    def with_choice(self, s: For, before: tuple[Stmt, ...], visit: For) -> For:
        here = {x.name for x in before if isinstance(x, Let)}
        visible = {x for x in self.ranges if x in here or x not in self.inner}
        tests: dict[Expr, Expr] = {}
        for x in visit.body:
            if isinstance(x, Let):
                self._find(x.value, visible, tests)
        if not tests or visit.axis.hi is None:
            return s
        sure = Let(
            unused("sure", self.taken), TileType(DType.I64), Cast(DType.I64, _all(list(tests.values())))
        )
        masked = replace(
            visit,
            axis=replace(visit.axis, hi=apply("min", visit.axis.hi, apply("sub", i64(1), Name(sure.name)))),
        )
        unmasked = self.unmasked(visit, Name(sure.name), frozenset(tests))
        yields = tuple(Name(c.name) for c in unmasked.carries)
        return replace(s, body=(*before, sure, masked, unmasked), yields=yields)

    def _find(self, e: Expr, visible: set[str], tests: dict[Expr, Expr]) -> None:
        for x in operands(e):
            self._find(x, visible, tests)
        match e:
            case Apply(op="where", args=(Apply(op="eq" | "le" | "lt" as op, args=(a, b)) as c, _, _)):
                low_a, high_a, low_b, high_b = (
                    self._end(side, fn, visible) for side in (a, b) for fn in ("min", "max")
                )
                if high_a is None or low_b is None:
                    return
                found = apply("lt" if op == "lt" else "le", high_a, low_b)
                if op == "eq":
                    if high_b is None or low_a is None:
                        return
                    found = apply("and", found, apply("le", high_b, low_a))
                tests[c] = found

    def _end(self, side: Expr, fn: str, visible: set[str]) -> Expr | None:
        value = self.expanded(side)
        return next((Name(n) for n in sorted(visible) if self.ranges[n] == (fn, value)), None)

    def expanded(self, e: Expr) -> Expr:
        if isinstance(e, Name):
            return self.expanded(self.values[e.name]) if e.name in self.values else e
        return rebuild(e, tuple(self.expanded(x) for x in operands(e)))

    def unmasked(self, visit: For, sure: Name, known: frozenset[Expr]) -> For:
        """The loop again, under names of its own, without comparisons that are known to hold."""
        names: dict[str, Expr] = {c.name: Name(unused(c.name, self.taken)) for c in visit.carries}
        body: list[Stmt] = []

        def rule(e: Expr) -> Expr:
            match e:
                case Name(name=n):
                    return names.get(n, e)
                case Apply(op="where", args=(c, x, _)) if c in known:
                    return rule(x)
            return rebuild(e, tuple(rule(x) for x in operands(e)))

        for x in visit.body:
            assert isinstance(x, Let)
            value = rule(x.value)
            if isinstance(value, Name) and not isinstance(x.value, Name):
                names[x.name] = value  # all that it did was the mask
                continue
            names[x.name] = Name(unused(x.name, self.taken))
            body.append(replace(x, name=self.name_of(names[x.name]), value=value))
        carries = tuple(
            Carry(self.name_of(names[c.name]), c.type, Name(c.name), c.attributes) for c in visit.carries
        )
        axis = replace(visit.axis, name=unused(visit.axis.name, self.taken), hi=sure)
        return replace(
            visit, axis=axis, carries=carries, body=tuple(body), yields=tuple(map(rule, visit.yields))
        )

    def name_of(self, e: Expr) -> str:
        assert isinstance(e, Name)
        return e.name


def _all(tests: list[Expr]) -> Expr:
    found = tests[0]
    for t in tests[1:]:
        found = apply("and", found, t)
    return found
