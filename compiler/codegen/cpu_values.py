"""Tile values that need storage, as Numba text: loop nests into buffers, matrix products, reductions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...dsl.types import DType
from ..tile_ir import Apply, Cast, Const, Dot, Expr, Load, Name, Reduce, TileType, operands, subexpressions
from .cpu_expressions import Expressions
from .numba_text import (
    HIGHEST,
    LOWEST,
    ROWS,
    Buffer,
    Code,
    Inline,
    Place,
    Signature,
    Variable,
    constant,
    held,
)
from .placement import Steps, rebuild, run, transform


@dataclass(frozen=True)
class Product:
    """`c[…, i, j] += a[…, i, k] · b[…, k, j]` at every position of the outer axes."""

    c: Buffer
    a: Buffer
    b: Buffer
    outer: tuple[str, ...]
    i: str | None
    j: str
    k: str


class Values(Expressions):
    """Computes tile values into buffers of the task, which are listed as they are made."""

    def __init__(self, signature: Signature) -> None:
        super().__init__(signature)
        self.buffers: list[Buffer] = []
        self._last_nest: tuple[tuple[str, ...], int, int] | None = None

    def _declare(self, name: str, type_: TileType) -> Buffer | Variable:
        dtype = held(type_.dtype)
        place = self._buffer(name, dtype, type_.axes) if type_.axes else self._variable(name, type_.dtype)
        self.places[name] = place
        return place

    def _variable(self, name: str, dtype: DType) -> Variable:
        return Variable(self.names.new(name), dtype)

    def _buffer(self, name: str, dtype: DType, axes: tuple[str, ...]) -> Buffer:
        made = Buffer(self.names.new(name), dtype, axes, tuple(self.axes[a].size for a in axes))
        self.buffers.append(made)
        return made

    def _nest(self, axes: Iterable[str]) -> int:
        """Open loops over the lanes of tile axes; returns how many."""
        count = 0
        for name in axes:
            axis = self.axes[name]
            self.open(f"for {axis.lane} in range({axis.count}):")
            count += 1
        return count

    def _expand(self, e: Expr) -> Expr:
        """Put inlined values in the place of their names."""

        def rule(x: Expr) -> Expr | None:
            if isinstance(x, Name):
                place = self.places.get(x.name)
                if isinstance(place, Inline):
                    return place.value
            return None

        return transform(e, rule)

    def scalar(self, e: Expr) -> Code:
        """A bound: outside reductions, a tiled axis stands for its tile's first index."""
        return self.value(self._prepare(self._expand(e), "bound", ()), bound=True)

    # -- loop nests

    def _fill(self, place: Buffer, value: Expr, hint: str) -> None:
        """Compute a tile value into its buffer; products accumulate there directly."""
        base, products = self._split(place, value)
        ready = [self._operands(place, p, set()) for p in products]
        base = self._prepare(base if products else self._dot_in_place(place, base, hint), hint, place.axes)
        self._elementwise(place, base)
        for p in ready:
            self._multiply(p)

    def _dot_in_place(self, place: Buffer, value: Expr, hint: str) -> Expr:
        """An elementwise function of a product, with the product computed in the buffer that the function overwrites."""
        found = next(
            (x for x in subexpressions(value) if isinstance(x, Dot) and self._accumulates(place, x)), None
        )
        if found is None:
            return value
        self._fill(place, found, hint)
        name = self._bound(place.name, TileType(place.dtype, place.axes), place)
        return transform(value, lambda x: name if x is found else None)

    def _elementwise(self, place: Buffer, value: Expr) -> None:
        """Lines that set each lane of a buffer; a row joins the loop that ends just above if it runs over the same axis."""
        if isinstance(value, Name) and self.places.get(value.name) == place:
            return
        depth = self.depth
        if self._last_nest == (place.axes, depth, len(self.lines)):
            self.depth += 1
        else:
            self._nest(place.axes)
        lanes = ", ".join(self.axes[a].lane for a in place.axes)
        self.line(f"{place.name}[{lanes}] = {self._convert(self.value(value), place.dtype).text}")
        self.depth = depth
        self._last_nest = (place.axes, depth, len(self.lines)) if len(place.axes) == 1 else None

    def _prepare(self, e: Expr, hint: str, nest: tuple[str, ...]) -> Expr:
        """Compute the products and reductions inside `e`, leaving an expression that a nest over `nest` can evaluate."""
        return run(self._prepared(e, hint, frozenset(nest)))

    def _prepared(self, e: Expr, hint: str, nest: frozenset[str]) -> Steps[Expr]:
        if isinstance(e, Dot):
            return self._temporary_dot(e, hint)
        if isinstance(e, Reduce):
            return self._reduction(e, hint, nest)
        args: list[Expr] = []
        for x in operands(e):
            args.append((yield self._prepared(x, hint, nest)))
        return rebuild(e, args)

    def _bound(self, name: str, type_: TileType, place: Place) -> Name:
        """A value of our own making as an expression; `%` keeps it apart from the program's names."""
        name = f"%{name}"
        self.places[name] = place
        self.types.names[name] = type_
        return Name(name)

    # -- products

    def _split(self, place: Buffer, value: Expr) -> tuple[Expr, list[Dot]]:
        """`x + dot(…)` as x and the products that the buffer can accumulate after it."""
        products: list[Dot] = []
        while True:
            match value:
                case Apply(op="add", args=(x, Dot() as d)) if self._accumulates(place, d):
                    value = x
                case Apply(op="add", args=(Dot() as d, x)) if self._accumulates(place, d):
                    value = x
                case Dot() as d if self._accumulates(place, d):
                    products.insert(0, d)
                    return Const(0.0 if place.dtype.is_float else 0, place.dtype), products
                case _:
                    return value, products
            products.insert(0, d)

    def _accumulates(self, place: Buffer, d: Dot) -> bool:
        return self.types.of(d).dtype is place.dtype and self._roles(place.axes, d) is not None

    def _roles(self, axes: tuple[str, ...], d: Dot) -> tuple[Expr, Expr, str | None, str] | None:
        """(a, b, i, j) such that the buffer's last axis j belongs to b alone and i, if any, stands before it and belongs
        to a alone; None where its last axis is shared or there is none."""
        if not axes or not d.over:
            return None
        in_a, in_b = set(self.types.of(d.a).axes), set(self.types.of(d.b).axes)
        j = axes[-1]
        if set(axes) != (in_a | in_b) - set(d.over) or (j in in_a) == (j in in_b):
            return None
        a, b, own, other = (d.a, d.b, in_a, in_b) if j in in_b else (d.b, d.a, in_b, in_a)
        i = axes[-2] if len(axes) > 1 and axes[-2] in own and axes[-2] not in other else None
        return a, b, i, j

    def _operands(self, c: Buffer, d: Dot, carries: set[str]) -> Product:
        """Bring the operands of a product into buffers: a over (…, i, k), b over (…, k, j)."""
        roles = self._roles(c.axes, d)
        assert roles is not None
        a, b, i, j = roles
        k = d.over[-1]
        outer = (*(x for x in c.axes if x not in (i, j)), *d.over[:-1])
        return Product(
            c,
            self._packed(a, (*self._shared(a, outer), *([i] if i else []), k), c, carries),
            self._packed(b, (*self._shared(b, outer), k, j), c, carries),
            outer,
            i,
            j,
            k,
        )

    def _shared(self, e: Expr, outer: tuple[str, ...]) -> list[str]:
        own = self.types.of(e).axes
        return [x for x in outer if x in own]

    def _packed(self, e: Expr, axes: tuple[str, ...], c: Buffer, carries: set[str]) -> Buffer:
        """A buffer that holds `e` over these axes in this order: its own, or a copy."""
        value = self._expand(e)
        if isinstance(value, Name) and value.name not in carries:
            place = self.places[value.name]
            if isinstance(place, Buffer) and place.axes == axes and place.dtype is c.dtype:
                return place
        hint = f"{value.tensor}_tile" if isinstance(value, Load) else f"{c.name}_operand"
        value = self._prepare(value, hint, axes)
        made = self._buffer(hint, c.dtype, axes)
        self._elementwise(made, value)
        return made

    def _multiply(self, p: Product) -> None:
        depth = self.depth
        self._nest(p.outer)
        views = [self._view(b, p.outer) for b in (p.c, p.a, p.b)]
        count = {x: self.axes[x].count for x in (p.i, p.j, p.k) if x}
        if p.i:
            self.line(f"multiply_add({', '.join(views)}, {count[p.i]}, {count[p.j]}, {count[p.k]})")
        else:
            self.line(f"multiply_row({', '.join(views)}, {count[p.j]}, {count[p.k]})")
        self.depth = depth

    def _temporary_dot(self, d: Dot, hint: str) -> Expr:
        type_ = self.types.of(d)
        for axes in orders(type_.axes):
            if self._roles(axes, d):
                place = self._buffer(f"{hint}_dot", type_.dtype, axes)
                self._fill(place, d, hint)
                return self._bound(place.name, replace(type_, axes=axes), place)
        product = Apply("mul", (Cast(type_.dtype, d.a), Cast(type_.dtype, d.b)))
        return self._reduction(Reduce("sum", d.over, self._expand(product)), hint, frozenset())

    # -- reductions

    def _reduction(self, r: Reduce, hint: str, nest: frozenset[str]) -> Expr:
        """A reduction whose operand is ready: of a buffer's rows in place, where the nest is over just those rows."""
        type_ = self.types.of(r)
        over = tuple(a for a in self.types.of(r.arg).axes if a in r.over)
        arg = self._expand(r.arg)
        if len(over) == len(r.over) == 1 and r.fn in ROWS and self.types.of(arg).dtype is not DType.BOOL:
            place = self._rows(arg, (*type_.axes, *over), f"{hint}_{r.fn}", held(self.types.of(arg).dtype))
            name = self._bound(place.name, TileType(place.dtype, place.axes), place)
            rows = Reduce(r.fn, r.over, name)
            if frozenset(type_.axes) == nest:
                return rows
            if not type_.axes:
                total = self._variable(f"{hint}_{r.fn}", type_.dtype)
                self.line(f"{total.name} = {self.value(rows).text}")
                return self._bound(total.name, type_, total)
            result = self._buffer(f"{hint}_{r.fn}", type_.dtype, type_.axes)
            self._elementwise(result, rows)
            return self._bound(result.name, type_, result)
        return self._fold(replace(r, arg=self._prepare(arg, hint, (*type_.axes, *over))), type_, hint)

    def _rows(self, arg: Expr, axes: tuple[str, ...], hint: str, dtype: DType) -> Buffer:
        if isinstance(arg, Name):
            place = self.places[arg.name]
            if isinstance(place, Buffer) and place.axes[-1] == axes[-1] and place.dtype is dtype:
                return place
        made = self._buffer(f"{hint}_of", dtype, axes)
        self._fill(made, arg, hint)
        return made

    def _fold(self, r: Reduce, type_: TileType, hint: str) -> Expr:
        """Any reduction, element by element into a variable."""
        depth = self.depth
        result = self._buffer(f"{hint}_{r.fn}", type_.dtype, type_.axes) if type_.axes else None
        self._nest(type_.axes)
        total = self.names.new(f"{hint}_{r.fn}")
        fold = Fold(self, r, total, type_.dtype)
        fold.start()
        inner = self.depth
        self._nest(r.over)
        fold.step()
        self.depth = inner
        if result is None:
            return self._bound(total, type_, Variable(total, type_.dtype))
        self.line(f"{result.name}[{', '.join(self.axes[a].lane for a in result.axes)}] = {total}")
        self.depth = depth
        return self._bound(result.name, type_, result)


@dataclass(frozen=True)
class Fold:
    """Lines of a reduction into the variable `total`."""

    task: Values
    reduce: Reduce
    total: str
    dtype: DType

    def start(self) -> None:
        fn = self.reduce.fn
        if fn in ("argmax", "argmin"):
            table = LOWEST if fn == "argmax" else HIGHEST
            self.task.line(f"{self.total} = -1")
            self.task.line(f"{self._best} = {constant(table[self._compared], self._compared).text}")
            return
        first: int | float | bool = {"any": False, "all": True, "sum": 0, "prod": 1}.get(fn, 0)
        if fn in ("max", "min"):
            first = (LOWEST if fn == "max" else HIGHEST)[self.dtype]
        self.task.line(f"{self.total} = {constant(first, self.dtype).text}")

    @property
    def _compared(self) -> DType:
        """The type in which values are compared for argmax and argmin."""
        dtype = held(self.task.types.of(self.reduce.arg).dtype)
        return DType.I32 if dtype is DType.BOOL else dtype

    @property
    def _best(self) -> str:
        return f"{self.total}_value"

    def step(self) -> None:
        fn, task = self.reduce.fn, self.task
        code = task.value(self.reduce.arg)
        if fn in ("argmax", "argmin"):
            self._step_index(task._named(task._convert(code, self._compared)))
            return
        op = {"any": "or", "all": "and", "sum": "add", "prod": "mul"}.get(fn, fn)
        code = task._cast(code, DType.BOOL) if fn in ("any", "all") else task._convert(code, self.dtype)
        task.line(f"{self.total} = {task._apply_operation(op, [Code(self.total, self.dtype), code]).text}")

    def _step_index(self, x: Code) -> None:
        """The first index of the extreme value, or of the first NaN."""
        task, best = self.task, self._best
        sign = ">" if self.reduce.fn == "argmax" else "<"
        nan = f" or ({x.text} != {x.text} and {best} == {best})" if x.dtype.is_float else ""
        task.open(f"if {self.total} < 0 or {x.text} {sign} {best}{nan}:")
        task.line(f"{best} = {x.text}")
        task.line(f"{self.total} = {task.axes[self.reduce.over[0]].index}")
        task.depth -= 1


def orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes as they are, then with each other one last."""
    return [axes, *((*(x for x in axes if x != a), a) for a in reversed(axes[:-1]))]
