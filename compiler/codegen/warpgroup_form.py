"""A tile program in the form that tier `wgmma` takes: products and their operands are named, bounds need no reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Dot,
    Expr,
    For,
    Grid,
    Let,
    LoopAxis,
    Name,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    TileType,
    is_visit,
    statements,
    subexpressions,
)
from .streams import facts_of, with_named_operands, with_tiled_axes_last
from .tile_types import Facts, is_product, rewrite, tile_axes


def prepared(program: TileProgram) -> TileProgram:
    """The same program: operands from memory are named tiles, so are computed ones, and each product has a name of its own
    or is what a loop adds to one of its states. Axes cut into tiles come last, for they tell tasks' lengths (`order`)."""
    program = with_tiled_axes_last(with_named_operands(program))
    tiles = {a: x.tile or 1 for a, x in tile_axes(program, dict(program.statics)).items()}
    named = _Naming(facts_of(program, tiles)).block(program.body, {})
    return with_plain_bounds(replace(program, body=named))


class _Naming:
    def __init__(self, facts: Facts) -> None:
        self.facts, self.count = facts, 0

    def block(self, body: tuple[Stmt, ...], types: dict[str, TileType]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            match s:
                case Let():
                    out.append(replace(s, value=self.products(s.value, types, out, at_top=True)))
                    types[s.name] = s.type
                case Store():
                    out.append(replace(s, value=self.products(s.value, types, out)))
                case Grid():
                    out.append(replace(s, body=self.block(s.body, dict(types))))
                case For():
                    types.update({c.name: c.type for c in s.carries})
                    inside = dict(types)
                    inner = list(self.block(s.body, inside))
                    yields = tuple(self.added(y, inside, inner) for y in s.yields)
                    out.append(replace(s, body=tuple(inner), yields=yields))
        return tuple(out)

    def added(self, y: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        """What a loop hands on; a product added to the rest stays there."""
        match y:
            case Apply(op="add", args=(x, Dot() as d)) | Apply(op="add", args=(Dot() as d, x)):
                rest = self.products(x, types, out)
                return Apply("add", (rest, self.products(d, types, out, at_top=True)))
        return self.products(y, types, out, at_top=False)

    def products(self, e: Expr, types: dict[str, TileType], out: list[Stmt], at_top: bool = False) -> Expr:
        """Name every product of an expression but, `at_top`, itself."""

        def rule(x: Expr) -> Expr:
            if not isinstance(x, Dot):
                return x
            a, b = self.facts.type_of(x.a, types), self.facts.type_of(x.b, types)
            if not is_product(x, a, b):
                return x
            made = replace(x, a=self.operand(x.a, types, out), b=self.operand(x.b, types, out))
            return made if at_top and x == e else self.let("product", made, types, out)

        return rewrite(e, rule)

    def operand(self, e: Expr, types: dict[str, TileType], out: list[Stmt]) -> Expr:
        match e:
            case Name() | Cast(arg=Name()):
                return e
            case Cast():
                return replace(e, arg=self.let("operand", e.arg, types, out))
        return self.let("operand", e, types, out)

    def let(self, what: str, value: Expr, types: dict[str, TileType], out: list[Stmt]) -> Name:
        self.count += 1
        name = f"{what} {self.count}"
        types[name] = self.facts.type_of(value, types)
        out.append(Let(name, types[name], value))
        return Name(name)


# ---------------------------------------------------------------- bounds without reductions


def with_plain_bounds(program: TileProgram) -> TileProgram:
    """The same program: the largest and smallest value of an index expression over a tile in closed form."""
    tiles = {a: x for a, x in tile_axes(program, dict(program.statics)).items() if x.tile}

    def rule(e: Expr) -> Expr:
        match e:
            case Apply(
                op="floordiv", args=(Reduce(fn="min", over=(o,), arg=AxisIndex(axis=x)), Const(value=n))
            ):
                if o == x and x in tiles and tiles[x].tile == n:  # tiles start at multiples of their size
                    return Apply("floordiv", (AxisIndex(x), Const(n, DType.I64)))
        if not isinstance(e, Reduce) or e.fn not in ("max", "min") or len(e.over) != 1:
            return e
        (axis,) = e.over
        grows = slope(e.arg, axis)
        if (
            axis not in tiles
            or grows not in (1, -1)
            or tiles[axis].lo is not None
            or tiles[axis].hi is not None
        ):
            return e
        a = tiles[axis]
        last = Apply("min", (_plus(AxisIndex(axis), (a.tile or 1) - 1), _plus(a.extent, -1)))
        at_last = (e.fn == "max") == (grows == 1)
        return rewrite(e.arg, lambda x: last if at_last and x == AxisIndex(axis) else x)

    return replace(program, body=tuple(_bounds_rewritten(s, rule) for s in program.body))


def _plus(e: Expr, n: int) -> Expr:
    return Apply("add", (e, Const(n, DType.I64)))


def _bounds_rewritten(s: Stmt, rule: Callable[[Expr], Expr]) -> Stmt:
    match s:
        case Let() if not s.type.axes:
            return replace(s, value=rewrite(s.value, rule))
        case For(axis=a):
            lo, hi = (None if x is None else rewrite(x, rule) for x in (a.lo, a.hi))
            body = tuple(_bounds_rewritten(x, rule) for x in s.body)
            return replace(s, axis=replace(a, lo=lo, hi=hi), body=body)
        case Grid():
            return replace(s, body=tuple(_bounds_rewritten(x, rule) for x in s.body))
    return s


def slope(e: Expr, axis: str) -> int | None:
    """How an expression grows with an axis's index; None where that is no whole number."""
    match e:
        case AxisIndex(axis=a):
            return int(a == axis)
        case Apply(op="add" | "sub" as op, args=(a, b)):
            x, y = slope(a, axis), slope(b, axis)
            return None if x is None or y is None else x + y if op == "add" else x - y
    return None if any(x == AxisIndex(axis) for x in subexpressions(e)) else 0


def scalar_values(body: tuple[Stmt, ...]) -> dict[str, Expr]:
    """What the scalar names of a program stand for."""
    return {s.name: s.value for s in statements(body) if isinstance(s, Let) and not s.type.axes}


def ends_tile(e: Expr, a: LoopAxis, values: Mapping[str, Expr]) -> bool:
    """Does a bound of an axis lie between tiles, or at the axis's end? `values`: those of scalar names."""
    match e:
        case _ if e == a.extent:
            return True
        case Name(name=n) if n in values:
            return ends_tile(values[n], a, values)
        case Const(value=v):
            return int(v) % (a.tile or 1) == 0
        case Apply(op="mul", args=(x, y)):
            return any(z != a.extent and ends_tile(z, a, values) for z in (x, y))
        case Apply(op="add" | "sub", args=args):
            return all(z != a.extent and ends_tile(z, a, values) for z in args)
        case Apply(op="min" | "max", args=args):
            return all(ends_tile(z, a, values) for z in args)
    return False


# ---------------------------------------------------------------- steps that may be left out


@dataclass(frozen=True)
class Steps:
    """A loop by what one step of it computes. Where `condition` is not above 0 a step is left out, or computed as the first
    of `others` whose condition is, in which the loop has another body; `before` is computed to know that."""

    loop: For
    before: tuple[Let, ...] = ()
    condition: Expr | None = None
    others: tuple[tuple[Expr, For], ...] = ()

    @property
    def ways(self) -> tuple[For, ...]:
        """The loop with each of its bodies."""
        return (self.loop, *(loop for _, loop in self.others))


def steps_of(s: For) -> Steps:
    """A loop whose body ends with loops that each run once or never, no two of them both (`lower.visited`, `sure_steps`), as
    one whose steps have conditions."""
    visits = [x for x in s.body if isinstance(x, For)]
    before = tuple(x for x in s.body[: len(s.body) - len(visits)] if isinstance(x, Let) and not x.type.axes)
    if not visits or len(before) + len(visits) < len(s.body):
        return Steps(s)
    names: dict[str, Name] = {}
    states = tuple(Name(c.name) for c in s.carries)
    for v in visits:
        starts = tuple(
            names.get(c.init.name, c.init) if isinstance(c.init, Name) else c.init for c in v.carries
        )
        if not is_visit(v.axis) or v.axis.lo is not None or starts != states:
            return Steps(s)
        names |= {c.name: o for c, o in zip(v.carries, states, strict=True)}
    if tuple(Name(c.name) for c in visits[-1].carries) != s.yields:
        return Steps(s)

    def outer(e: Expr) -> Expr:
        return rewrite(e, lambda x: names.get(x.name, x) if isinstance(x, Name) else x)

    def way(v: For) -> For:
        body = tuple(replace(x, value=outer(x.value)) if isinstance(x, Let) else x for x in v.body)
        return replace(s, body=body, yields=tuple(outer(y) for y in v.yields))

    first, *others = ((v.axis.hi, way(v)) for v in visits if v.axis.hi is not None)
    return Steps(first[1], before, first[0], tuple(others))


def without_sure_steps(program: TileProgram) -> TileProgram:
    """The program before `sure_steps` told tiles apart that need no mask."""
    return replace(program, body=tuple(map(_masked_alone, program.body)))


def _masked_alone(s: Stmt) -> Stmt:
    match s:
        case Grid():
            return replace(s, body=tuple(map(_masked_alone, s.body)))
        case For(body=(*before, For() as masked, For() as unmasked)) if is_visit(masked.axis) and is_visit(
            unmasked.axis
        ):
            match masked.axis.hi:
                case Apply(op="min", args=(visits, Apply(op="sub", args=(_, sure)))) if (
                    sure == unmasked.axis.hi
                ):
                    axis = replace(masked.axis, hi=visits)
                    yields = tuple(Name(c.name) for c in masked.carries)
                    kept = tuple(x for x in before if not isinstance(x, Let) or Name(x.name) != sure)
                    return replace(s, body=(*kept, replace(masked, axis=axis)), yields=yields)
    return s
