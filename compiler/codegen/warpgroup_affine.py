"""Scores that grow with indices: a product and a sum as one fused multiply-add, and indices in f32 without converting each.

f32(n - m) over a tile is f32 of its value at a thread's first element plus a number that is known when the kernel is
assembled, for the thread's other elements lie at fixed steps from the first. All of these are whole numbers, which f32
holds and adds exactly up to 2^24; so this is done where no extent is larger than `MOST_EXTENT` and no more than `MOST_TERMS`
indices and extents are added, and variants that do so are launched for such extents only. Elements at one distance share
it, and what is computed from it: of rows 8 apart and columns 8 apart nearly every second.

x · y + z is one fused multiply-add: the product's own rounding is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Expr,
    ExtentRef,
    For,
    Let,
    Name,
    TileProgram,
    TileType,
    expressions,
    statements,
    subexpressions,
)
from .deal import Layout, Spread
from .scalar_cuda import Code
from .simt_source import Point, Value
from .tile_types import loop_axes, rewrite, static_value
from .warpgroup_elements import RowElements

MOST_EXTENT = 1 << 21
MOST_TERMS = 6
"""6 · (2^21 + two tiles) + 2^20 is less than 2^24."""
MOST_CONSTANT = 1 << 20


def linear(e: Expr) -> Counter[Expr] | None:
    """The coefficients of indices and extents in an integer expression, and of 1; None where it is no such sum."""
    match e:
        case AxisIndex() | ExtentRef():
            return Counter({e: 1})
        case Const(value=value) if not isinstance(value, float):
            return Counter({Const(1, DType.I64): int(value)})
        case Apply(op="neg", args=(x,)):
            return linear(Apply("sub", (Const(0, DType.I64), x)))
        case Apply(op="add" | "sub" as op, args=(x, y)):
            a, b = linear(x), linear(y)
            if a is None or b is None:
                return None
            for atom, n in b.items():
                a[atom] += n if op == "add" else -n
            return a
    return None


def _is_small(e: Expr) -> bool:
    """Is a sum of indices exact in f32, if their extents are no larger than `MOST_EXTENT`?"""
    terms = linear(e)
    if terms is None or not any(isinstance(x, AxisIndex) and n for x, n in terms.items()):
        return False
    constant = terms.pop(Const(1, DType.I64), 0)
    return sum(map(abs, terms.values())) <= MOST_TERMS and abs(constant) <= MOST_CONSTANT


def exact_extents(program: TileProgram) -> tuple[tuple[str, int], ...]:
    """The extents that must be no larger than `MOST_EXTENT` so that indices which loops convert to f32 are exact there."""
    inside = [x for s in statements(program.body) if isinstance(s, For) for x in s.body if isinstance(x, Let)]
    sums = [
        arg
        for s in inside
        for e in expressions(s)
        for x in subexpressions(e)
        if isinstance(x, Cast) and x.dtype is DType.F32
        for arg in _parts(x.arg)
    ]
    extents = {a.name: a.extent for a in loop_axes(program)}
    found: dict[str, int] = {}
    for atom in (x for e in sums for x in subexpressions(e)):
        size = extents.get(atom.axis) if isinstance(atom, AxisIndex) else atom
        if isinstance(size, ExtentRef) and size.name not in dict(program.statics):
            found[size.name] = MOST_EXTENT
    return tuple(found.items())


def _parts(e: Expr) -> Iterator[Expr]:
    """The sums of indices that a conversion to f32 reaches through what it may be exchanged with."""
    match e:
        case _ if _is_small(e):
            yield e
        case Apply(op="abs" | "min" | "max", args=args):
            for x in args:
                yield from _parts(x)


def contracted(e: Expr, is_f32: Callable[[Expr], bool], weight: Callable[[Expr], int]) -> Expr:
    """x · y + z -> fma(x, y, z), x · y - z -> fma(x, y, -z), z - x · y -> fma(-x, y, z); of two products the one of more
    weight, the first if they are alike."""

    def rule(x: Expr) -> Expr:
        match x:
            case Apply(op="add" | "sub" as op, args=(a, b)) if is_f32(x):
                found = [y for y in (a, b) if isinstance(y, Apply) and y.op == "mul" and is_f32(y)]
                if not found:
                    return x
                product = max(found, key=weight)
                u, v = product.args
                if product == b:
                    return Apply("fma", (u if op == "add" else Apply("neg", (u,)), v, a))
                return Apply("fma", (u, v, b if op == "add" else Apply("neg", (b,))))
        return x

    return rewrite(e, rule)


class AffineRows(RowElements):
    """Scores in the steps of a loop."""

    def _give_names(self) -> None:
        super()._give_names()
        self.by_place: dict[Name, Callable[[Point], Code]] = {}  # values that a point's counters tell

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        if isinstance(e, Name) and e in self.by_place:
            return self.by_place[e](at)
        return super()._node(e, args, at)

    def with_affine(self, e: Expr, axes: tuple[str, ...]) -> Expr:
        """The same expression of a tile over `axes` with fewer instructions for what grows with its indices."""
        if len(axes) != 2:
            return e
        layout = self.deal.layout(axes)
        made: dict[Expr, Expr] = {}

        def rule(x: Expr) -> Expr:
            if isinstance(x, Cast) and x.dtype is DType.F32:
                if x.arg not in made:
                    made[x.arg] = self._in_f32(x.arg, layout)
                return made[x.arg]
            return x

        def is_f32(x: Expr) -> bool:
            return self.facts.type_of(x, self.types).dtype is DType.F32

        def values(x: Expr) -> int:
            """The axes of what it reads; what only depends on places may be shared by several elements."""
            names = [y for y in subexpressions(x) if isinstance(y, Name) and y not in self.by_place]
            return max((len(self.types[y.name].axes) for y in names), default=0)

        return contracted(rewrite(e, rule), is_f32, values)

    def _in_f32(self, e: Expr, layout: Layout) -> Expr:
        """f32(e), for an e that was converted in the text."""
        if self._is_exact(e):
            return self._at_places(e, layout)
        match e:
            case Apply(op="abs" | "min" | "max", args=args) if any(self._is_exact(p) for p in _parts(e)):
                return Apply(
                    e.op, tuple(self._in_f32(x, layout) for x in args)
                )  # rounding keeps order and sign
        return Cast(DType.F32, e)

    def _is_exact(self, e: Expr) -> bool:
        if not _is_small(e):
            return False
        atoms = [x for x in subexpressions(e) if isinstance(x, AxisIndex | ExtentRef)]
        sizes = [
            self.axes[x.axis].extent if isinstance(x, AxisIndex) and x.axis in self.axes else x for x in atoms
        ]
        return all(map(self._is_known_small, sizes))

    def _is_known_small(self, size: Expr) -> bool:
        static = static_value(size, self.statics)
        if static is not None:
            return static <= MOST_EXTENT
        return isinstance(size, ExtentRef) and size.name in dict(self.wide.exact)

    def _at_places(self, e: Expr, layout: Layout) -> Expr:
        """A sum of indices by its value at a thread's first element and what lies between that and an element."""
        terms = linear(e) or Counter()
        steps = {a: terms[AxisIndex(a)] for a in layout.axes if terms[AxisIndex(a)]}
        first = Point(layout, dict.fromkeys(layout.axes, "0"))
        for axis in steps:
            self.renew(axis)
            self.text.line(
                f"{self.axis_names[axis].index} = {self._first(axis)}{self._start(layout.spread(axis))}"
            )
        start = self.assign("_".join([*steps, "start"]), Code(f"f32({self.emit(e, first).text})", DType.F32))
        name = self.temporary("affine", Value(TileType(DType.F32, tuple(steps)), scalar=start))

        def element(at: Point) -> Code:
            places = [_times(n, _place(at.layout.spread(a), at.counters[a])) for a, n in steps.items()]
            return Code(f"{start} + f32({' + '.join(places)})", DType.F32, False)

        self.by_place[name] = element
        return name

    def _start(self, spread: Spread) -> str:
        """The place in its tile of a thread's first element."""
        own = self.coordinate(spread) if spread.step > 1 else "0"
        return own if spread.run == 1 else f"{own} * {spread.run}"


def _place(spread: Spread, counter: str) -> str:
    """How far an element lies behind the thread's first."""
    if spread.run == 1:
        return f"{spread.stride} * {counter}"
    bits = spread.run.bit_length() - 1
    return f"{spread.run * spread.step} * ({counter} >> {bits}) + ({counter} & {spread.run - 1})"


def _times(n: int, text: str) -> str:
    return text if n == 1 else f"{n} * ({text})"
