"""Tile values that need storage, as Numba text: loop nests into buffers, matrix products, reductions."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    Fill,
    Load,
    Name,
    Reduce,
    TileType,
    operands,
    subexpressions,
)
from .cpu_expressions import Expressions
from .cpu_narrow import FEWEST, TIER, VERBS, definitions, narrow_type, space_words
from .cpu_vectors import computes_lanes
from .numba_text import (
    ATOM,
    FOLDS,
    HELD,
    HIGHEST,
    LANES,
    LOWEST,
    NOTING,
    Axis,
    Buffer,
    Code,
    Inline,
    Place,
    Signature,
    Variable,
    constant,
    held,
    identity,
)
from .placement import Steps, depends_on_data, rebuild, run, transform

PANEL_COLUMNS = 64
"""A multiple of the columns of the panels that products copy, on every machine, and of those copied at a time."""
COPY_COLUMNS = 2 * PANEL_COLUMNS
"""So many columns are worth a copy of the rows that they are multiplied with."""
COPIED_ROWS, SLIVER = 192, 6
"""The most rows of one matrix that are copied at a time, and how many lie in a sliver: see `product_copies`."""
LONGEST_CHAIN = 512
"""Steps of a panel, all of which one copy holds."""
WHOLE_LANES = 16
"""A multiple of the number of elements that one vector holds anywhere."""


@dataclass(frozen=True)
class View:
    """Where a matrix lies: an array, what stands at each of its dimensions, and how long those are where that is known.
    `lanes`: the array is a buffer, whose dimensions count the lanes of tile axes."""

    array: str
    subscripts: tuple[Expr, ...]
    lengths: tuple[int | None, ...]
    lanes: bool

    def place(self, axis: str) -> int:
        """The dimension that runs along a tile axis."""
        return self.subscripts.index(AxisIndex(axis))


@dataclass(frozen=True)
class Product:
    """`c[…, i, j] += a[…, i, k] · b[…, k, j]` at every position of the outer axes.

    `verb` is the function that computes it; one that packs copies panels of b into `panel`, and where that pays a into
    `left`. `fresh` is Python text of when c has no value before. `copies`: where both operands are copied in the form of a
    matrix unit. A product that packs takes all of one outer axis at once: `stack`, which b lacks, with the same panels, or
    `chain`, which is summed over too, as if it were part of k."""

    c: Buffer
    a: View
    b: View
    outer: tuple[str, ...]
    i: str | None
    j: str
    k: str
    verb: str
    panel: Buffer | None
    fresh: str = "False"
    copies: Buffer | None = None
    left: Buffer | None = None
    stack: str | None = None
    chain: str | None = None

    @property
    def overwrites(self) -> bool:
        """May the product be written where nothing was? Not where it is summed over several passes."""
        return set(self.outer) <= set(self.c.axes)


class Values(Expressions):
    """Computes tile values into buffers of the task, which are listed as they are made."""

    def __init__(self, signature: Signature) -> None:
        super().__init__(signature)
        self.buffers: list[Buffer] = []
        self._panels: list[Buffer] = []
        self._copied: Buffer | None = None
        self._columns_are_defined = True
        """Have all lanes along the columns of chained products a value, up to a whole wide vector? What memory happens to
        hold may be numbers that processors take hundreds of clocks for."""
        self._definitions = definitions(self.program)
        self.results: dict[str, Load] = {}
        self._last_nest: Nest | None = None
        self._nest_along: dict[str, Nest] = {}
        """The latest loop along each axis."""

    def _declare(self, name: str, type_: TileType) -> Buffer | Variable:
        dtype = held(type_.dtype)
        place = self._buffer(name, dtype, type_.axes) if type_.axes else self._variable(name, type_.dtype)
        self.places[name] = place
        return place

    def _variable(self, name: str, dtype: DType) -> Variable:
        return Variable(self.names.new(name), dtype)

    def _buffer(self, name: str, dtype: DType, axes: tuple[str, ...]) -> Buffer:
        sizes = [self._number(self.axes[a].size) for a in axes]
        last = _padded(sizes[-1], dtype) if len(sizes) > 1 else _whole(sizes[-1])
        made = Buffer(self.names.new(name), dtype, axes, (*sizes[:-1], last))
        self.buffers.append(made)
        return made

    def _number(self, size: int | Expr) -> int:
        """The size of a tile axis: a number, or an extent that is compiled in."""
        found = self._length(size)
        assert found is not None, "axes that are taken whole are static"
        return found

    def _nest(self, axes: Iterable[str]) -> int:
        """Open loops over the lanes of tile axes; returns how many."""
        count = 0
        for name in axes:
            axis = self.axes[name]
            self.open(f"for {axis.lane} in range({axis.count}):")
            self._columns_are_defined &= name != self.columns
            count += 1
        return count

    def _nest_of(self, axes: tuple[str, ...], values: Iterable[Expr]) -> int:
        """Open loops over the lanes of tile axes, of the last one LANES at a time where the values can be so computed;
        `_close` ends them. Returns the line of the innermost loop."""
        axis = self.axes[axes[-1]] if axes else None
        if axis is None or not all(computes_lanes(self, v, axis.name) for v in values):
            self._nest(axes)
        else:
            self._nest(axes[:-1])
            self._open_lanes(axis)
        return len(self.lines) - 1

    def _open_lanes(self, axis: Axis) -> None:
        """Open a loop along an axis by vectors."""
        self.along = axis
        self.open(f"for {axis.lane} in range(0, {axis.count}, {self._sized('LANES')}):")

    def _open_columns(self, row: str) -> tuple[int, int]:
        """Open loops over the columns of chained products, by vectors, and in them over the rows of a tile; those that end
        just above are gone on with, since a column needs no other. Returns the lines of both loops."""
        assert self.columns is not None
        last, axis = self._last_nest, self.axes[self.columns]
        above = last.at(self) if last is not None else None
        if last is not None and above == ((row, self.columns), True):
            self.depth, self.along = self.depth + 2, axis
            self.before_rows = dict(last.before)
            return last.start, last.inner
        self.before_rows = {}
        if last is not None and above == ((self.columns,), True):
            self.depth, self.along, start = self.depth + 1, axis, last.start
        else:
            self._open_lanes(axis)
            start = len(self.lines) - 1
        self._nest((row,))
        return start, len(self.lines) - 1

    def _read_before(self, inner: int, known: Iterable[str] = ()) -> int:
        """Lines before a loop over rows, at line `inner`, that read what all of it needs; returns where the loop is then.
        `known`: buffers already read there."""
        assert self.before_rows is not None
        assert self.along is not None
        new = [(b, name) for b, name in self.before_rows.items() if b not in known]
        for b, name in new:
            read = f"{name} = {self._sized('load')}({b}, ({self.along.lane},))"
            self.lines.insert(inner, "    " * (self.depth - 1) + read)
        return inner + len(new)

    def _close(self, depth: int) -> None:
        """End the loops opened since this depth."""
        self.depth, self.along, self.before_rows = depth, None, None

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
        if ready and is_zero(base) and ready[0].overwrites:
            ready[0] = replace(ready[0], fresh="True")
        else:
            base = self._prepare(
                base if products else self._dot_in_place(place, base, hint), hint, place.axes
            )
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
        read = self._plain_read(value, place.axes) if len(place.axes) > 1 else None
        if read is not None and (verb := pack_verb(self.params[read.tensor].dtype, place.dtype)):
            self._pack(verb, place, self._tensor_view(read))
            return
        depth, last = self.depth, self._last_nest
        if (
            len(place.axes) == 2
            and place.axes[-1] == self.columns
            and computes_lanes(self, value, self.columns)
        ):
            start, inner = self._open_columns(place.axes[0])
            known = dict(self.before_rows or {})
            text = self._convert(self.value(value), place.dtype).text
            self.line(f"{self._sized('store')}({place.name}, {self._at(place.axes)}, {text})")
            inner = self._read_before(inner, known)
            before = tuple((self.before_rows or {}).items())
            self._close(depth)
            self._last_nest = Nest(place.axes, True, depth, start, len(self.lines), inner, before)
            return
        if last is not None and last.takes(self, place.axes, value):
            start, tail = last.start, self._reopen(last)
        else:
            start, tail = self._nest_of(place.axes, [value]), Tail()
        code, lanes = self._convert(self.value(value), place.dtype), self.along is not None
        if lanes:
            self.line(f"{self._sized('store')}({place.name}, {self._at(place.axes)}, {code.text})")
        else:
            self.line(f"{self._view(place, place.axes)} = {code.text}")
        self._close(depth)
        self._ended(place.axes, lanes, start, tail)

    def _ended(self, axes: tuple[str, ...], lanes: bool, start: int, tail: Tail | None = None) -> None:
        """A nest over one axis ends here, but for the lines of its tail: what follows may join it."""
        tail = tail or Tail()
        end = len(self.lines)
        self.lines += tail.lines
        self._last_nest = Nest(axes, lanes, self.depth, start, end, tail=tail) if len(axes) == 1 else None
        if self._last_nest is not None:
            self._nest_along[axes[0]] = self._last_nest

    def _reopen(self, nest: Nest) -> Tail:
        """Go on inside a loop that ended above; returns the lines that stand after it."""
        del self.lines[nest.end :]
        self.depth += 1
        self.along = self.axes[nest.axes[-1]] if nest.lanes else None
        return nest.tail

    def _prepare(self, e: Expr, hint: str, nest: tuple[str, ...]) -> Expr:
        """Compute the products and reductions inside `e`, leaving an expression that a nest over `nest` can evaluate."""
        return run(self._prepared(e, hint))

    def _prepared(self, e: Expr, hint: str) -> Steps[Expr]:
        if isinstance(e, Dot):
            return self._temporary_dot(e, hint)
        if isinstance(e, Reduce):
            return self._reduction(e, hint)
        args: list[Expr] = []
        for x in operands(e):
            args.append((yield self._prepared(x, hint)))
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
        """Bring the operands of a product into memory: a with its axes in any order, b with j dense."""
        roles = self._roles(c.axes, d)
        assert roles is not None
        a, b, i, j = roles
        k = d.over[-1]
        outer = (*(x for x in c.axes if x not in (i, j)), *d.over[:-1])
        narrow = self._narrow(d, i, j)
        if narrow is not None and i is not None:
            x = self._narrow_view(a, narrow, (*self._shared(a, outer), i, k), c, carries)
            y = self._narrow_view(b, narrow, (*self._shared(b, outer), k, j), c, carries)
            if x is not None and y is not None:
                copies = self._copies(i, j, k, narrow)
                return Product(c, x, y, outer, i, j, k, VERBS[narrow], None, copies=copies)
        left = self._left(a, (*self._shared(a, outer), *([i] if i else []), k), c, carries)
        axes = (*self._shared(b, outer), k, j)
        read = self._plain_read(b, axes)
        if read is not None and (verb := pack_verb(self.params[read.tensor].dtype, c.dtype)):
            verb = verb.replace("pack", "multiply_packing")
            made = Product(c, left, self._tensor_view(read), outer, i, j, k, verb, None)
            return self._with_copies(made, d)
        return Product(c, left, self._packed(b, axes, c, carries), outer, i, j, k, "multiply", None)

    def _with_copies(self, p: Product, d: Dot) -> Product:
        """A product that packs, with room for what it copies and with the outer axes that it takes at once."""
        if p.i is None or p.a.lanes or self.columns is not None:
            return replace(p, panel=self._panel(p.c.dtype, p.k, p.j, self._size(p.k), False))
        in_b = self.types.of(d.b).axes if p.j in self.types.of(d.b).axes else self.types.of(d.a).axes
        stacks = [x for x in p.outer if x in p.c.axes and x not in in_b and AxisIndex(x) in p.a.subscripts]
        stack = stacks[-1] if stacks else None
        rows, steps = self._slivers(p.i, stack), self._size(p.k)
        tall = self._size(p.i) * (self._size(stack) if stack else 1) > COPIED_ROWS
        copies = rows > WHOLE_LANES and self._size(p.j) >= COPY_COLUMNS
        chain = self._chain(p, d) if copies else None
        steps *= self._size(chain) if chain else 1
        return replace(
            p,
            panel=self._panel(p.c.dtype, p.k, p.j, steps, copies and tall),
            left=self._room(p.c.dtype, (p.i, p.k), (rows, steps)) if copies else None,
            outer=tuple(x for x in p.outer if x not in (stack, chain)),
            stack=stack,
            chain=chain,
            verb=p.verb.replace("packing", "packing_several") if stack or chain else p.verb,
        )

    def _chain(self, p: Product, d: Dot) -> str | None:
        """The axis that the product sums over as if it were part of k, if one is short enough."""
        chains = (
            x
            for x in reversed(d.over[:-1])
            if all(AxisIndex(x) in v.subscripts for v in (p.a, p.b))
            and self._size(x) * self._size(p.k) <= LONGEST_CHAIN
        )
        return next(chains, None)

    def _size(self, axis: str) -> int:
        """How long a tile is along an axis."""
        return self._number(self.axes[axis].size)

    def _narrow(self, d: Dot, i: str | None, j: str) -> DType | None:
        """The type of the operands that a matrix unit takes for a product; None where it is computed otherwise."""
        if self.program.tier != TIER or i is None:
            return None
        large = all(self._number(self.axes[x].size) >= FEWEST for x in (i, j))
        return narrow_type(d, self.types, self._definitions) if large else None

    def _narrow_view(
        self, e: Expr, narrow: DType, axes: tuple[str, ...], c: Buffer, carries: set[str]
    ) -> View | None:
        """An operand of a matrix unit, which copies it: as its tensor holds it, or as it was computed for the product."""
        read = self._plain_read(e, axes)
        if read is not None and self.params[read.tensor].dtype is narrow:
            return self._tensor_view(read)
        if narrow is not DType.BF16:
            return None
        value = self._expand(e)
        while (
            isinstance(value, Cast) and value.dtype is narrow and self.types.of(value.arg).dtype is DType.F32
        ):
            value = value.arg
        return self._left(value, axes, c, carries)

    def _copies(self, i: str, j: str, k: str, narrow: DType) -> Buffer:
        """Where a matrix unit's operands are copied; one product at a time, so all share it."""
        rows, columns, inner = (self._number(self.axes[x].size) for x in (i, j, k))
        words = space_words(rows, columns, inner, narrow)
        found = next((b for b in self.buffers if b is self._copied), None)
        if found is None:
            self._copied = Buffer(self.names.new("tiles"), DType.I32, ("words",), (words,))
            self.buffers.append(self._copied)
        elif found.sizes[0] < words:
            self._copied = replace(found, sizes=(words,))
            self.buffers[self.buffers.index(found)] = self._copied
        assert self._copied is not None
        return self._copied

    def _slivers(self, i: str, stack: str | None) -> int:
        """Rows of the slivers to which products copy so many rows at a time, of each matrix of a stack."""
        whole = -(-self._size(i) // SLIVER) * SLIVER
        return whole * self._size(stack) if stack else min(whole, COPIED_ROWS)

    def _panel(self, dtype: DType, k: str, j: str, steps: int, kept: bool) -> Buffer:
        """Where products copy panels of an operand: all of them, where they are kept for the next rows, or some at a time.
        Beside the steps a panel has room for a line, so that panels are no power of two apart."""
        columns = -(-self._size(j) // PANEL_COLUMNS) * PANEL_COLUMNS if kept else PANEL_COLUMNS
        return self._shared_buffer("panel", dtype, (k, j), (_whole(steps) + 1, columns))

    def _room(self, dtype: DType, axes: tuple[str, str], sizes: tuple[int, int]) -> Buffer:
        """Where products copy the operand whose elements are taken one at a time."""
        return self._shared_buffer("rows", dtype, axes, (sizes[0], _whole(sizes[1])))

    def _shared_buffer(
        self, name: str, dtype: DType, axes: tuple[str, str], sizes: tuple[int, int]
    ) -> Buffer:
        """Storage of copies, the same for all of these sizes."""
        found = next((b for b in self._panels if b.dtype is dtype and b.sizes == sizes), None)
        if found is None:
            found = Buffer(self.names.new(name), dtype, axes, sizes)
            self._panels.append(found)
            self.buffers.append(found)
        return replace(found, axes=axes)

    def _shared(self, e: Expr, outer: tuple[str, ...]) -> list[str]:
        own = self.types.of(e).axes
        return [x for x in outer if x in own]

    def _left(self, e: Expr, axes: tuple[str, ...], c: Buffer, carries: set[str]) -> View:
        """The operand whose elements are taken one at a time: where it lies, if it has the type to compute in; else a copy
        in the order of its tensor, or of one in which vectors compute it."""
        found = self._in_place(e, axes, c, carries)
        if found is not None:
            return found
        read = self._plain_read(e, axes)
        if read is not None:
            axes = tuple(ix.axis for ix in read.subscripts if isinstance(ix, AxisIndex) and ix.axis in axes)
        else:
            value = self._expand(e)
            axes = next((x for x in orders(axes) if computes_lanes(self, value, x[-1])), axes)
        return self._packed(e, axes, c, carries)

    def _in_place(self, e: Expr, axes: tuple[str, ...], c: Buffer, carries: set[str]) -> View | None:
        value = self._expand(e)
        if isinstance(value, Name) and value.name not in carries:
            place = self.places[value.name]
            same = isinstance(place, Buffer) and place.dtype is c.dtype and set(place.axes) == set(axes)
            return self._stored(place) if same and isinstance(place, Buffer) else None
        read = self._plain_read(e, axes)
        return (
            self._tensor_view(read)
            if read is not None and self.params[read.tensor].dtype is c.dtype
            else None
        )

    def _plain_read(self, e: Expr, axes: tuple[str, ...]) -> Load | None:
        """A read, converted or not, of a tensor with a dimension along each of these axes; what its other subscripts say
        depends on no tensor."""
        value = self._expand(e)
        while isinstance(value, Cast) and held(value.dtype) is held(self.types.of(value.arg).dtype):
            value = value.arg
        if not isinstance(value, Load):
            return None
        along = [ix.axis for ix in value.subscripts if isinstance(ix, AxisIndex) and ix.axis in axes]
        rest = [ix for ix in value.subscripts if not (isinstance(ix, AxisIndex) and ix.axis in axes)]
        plain = sorted(along) == sorted(axes) and not any(
            set(self.types.of(ix).axes) & set(axes) or depends_on_data(ix, self.tainted) for ix in rest
        )
        return value if plain else None

    def _stored(self, b: Buffer) -> View:
        if b.name in self.results:
            return self._tensor_view(self.results[b.name])
        return View(b.name, tuple(map(AxisIndex, b.axes)), b.sizes, True)

    def _tensor_view(self, e: Load) -> View:
        lengths = tuple(map(self._length, self.params[e.tensor].shape))
        return View(self.tensor(e.tensor), e.subscripts, lengths, False)

    def _packed(self, e: Expr, axes: tuple[str, ...], c: Buffer, carries: set[str]) -> View:
        """A buffer that holds `e` over these axes in this order: its own, or a copy."""
        value = self._expand(e)
        if isinstance(value, Name) and value.name not in carries:
            place = self.places[value.name]
            if isinstance(place, Buffer) and place.axes == axes and place.dtype is c.dtype:
                return self._stored(place)
        hint = f"{value.tensor}_tile" if isinstance(value, Load) else f"{c.name}_operand"
        read = self._plain_read(e, axes)
        if read is not None and (verb := pack_verb(self.params[read.tensor].dtype, c.dtype)):
            made = self._buffer(hint, c.dtype, axes)
            self._pack(verb, made, self._tensor_view(read))
            return self._stored(made)
        value = self._prepare(value, hint, axes)
        made = self._buffer(hint, c.dtype, axes)
        self._elementwise(made, value)
        return self._stored(made)

    def _pack(self, verb: str, to: Buffer, given: View) -> None:
        """Lines that copy a part of a tensor into a buffer, its last two axes as rows and columns."""
        *outer, row, column = ("", *to.axes) if len(to.axes) == 1 else to.axes
        depth = self.depth
        if column == self.columns and self._is_wide(self.axes[column]):
            self._clear(to)
        self._nest(filter(None, outer))
        self._copy(verb, (self._stored(to), given), row, column)
        self.depth = depth

    def _clear(self, to: Buffer) -> None:
        """Lines that give the lanes of a last tile that nobody has a value."""
        depth, axis = self.depth, self.axes[to.axes[-1]]
        self.open(f"if {axis.count} < {self._size(axis.name)}:")
        zero = Const(0.0 if to.dtype.is_float else 0, to.dtype)
        self._nest_of(to.axes, [zero])
        self.line(
            f"{self._sized('store')}({to.name}, {self._at(to.axes)}, {constant(zero.value, to.dtype).text})"
        )
        self._close(depth)
        self._last_nest = None

    def _copy(self, verb: str, views: tuple[View, View], row: str, column: str) -> None:
        """The line that copies one view to another."""
        rows = self.axes[row].count if row else "1"
        to, given = (self._matrix(v, row or column, column) for v in views)
        self.line(f"{verb}({to}, {given}, {rows}, {self.axes[column].count})")

    def _matrix(self, v: View, row: str, column: str, several: Iterable[str | None] = ()) -> str:
        """A view as an operand: the subscripts of its first element, which dimensions are rows and columns, and how far
        apart neighbours on the slower of the two lie. `several`: axes along which it is the first of matrices."""
        places = v.place(row), v.place(column)
        texts = []
        for n, ix in enumerate(v.subscripts):
            axis = self.axes[ix.axis] if isinstance(ix, AxisIndex) else None
            if axis is None or not axis.lane:
                texts.append(self.value(ix).text)
            elif n in places or axis.name in several:
                texts.append("0" if v.lanes else axis.start)
            else:
                texts.append(axis.lane if v.lanes else axis.index)
        after = v.lengths[min(places) + 1 :]
        distance = math.prod(x for x in after if x) if all(after) else 0
        index = f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
        return f"matrix({v.array}, {index}, {places[0]}, {places[1]}, {distance})"

    def _multiply(self, p: Product) -> None:
        p, depth = self._in_whole_panels(p), self.depth
        self._nest(p.outer)
        i = p.i or p.j
        operands = [(self._stored(p.c), i, p.j), (p.a, p.i or p.k, p.k), (p.b, p.k, p.j)]
        copied = ""
        over = p.k if p.chain is None else f"{p.chain}, {p.k}"
        if p.panel is not None:
            copied = f", panels of {p.b.array} copied on the way" + (f" for all {p.stack}" if p.stack else "")
        if p.copies is not None:
            copied = ", on the matrix unit"
        sign = "=" if p.fresh == "True" else "+="
        counts = [self.axes[p.i].count if p.i else "1", self.axes[p.j].count, self.axes[p.k].count, p.fresh]
        self.line(f"# {p.c.name} {sign} {p.a.array} · {p.b.array} over {over}{copied}")
        self.open(f"{p.verb}(")
        for view, row, column in operands:
            self.line(f"{self._matrix(view, row, column, (p.stack, p.chain))},")
        if p.copies is not None:
            self.line(f"matrix({p.copies.name}, (0,), 0, 0, 0),")
        if p.panel is not None:
            room = f"{self._matrix(self._stored(p.left), i, p.k)}" if p.left is not None else "None"
            self.line(f"{room},  # for a copy of {p.a.array}" if p.left is not None else f"{room},")
            self.line(f"{self._matrix(self._stored(p.panel), p.k, p.j)},")
        self.line(f"{', '.join(counts)},")
        for line in self._several(p):
            self.line(line)
        self.depth -= 1
        self.line(")")
        self.depth = depth

    def _in_whole_panels(self, p: Product) -> Product:
        """The product with its columns in whole panels, whether they exist or not, where tiles of a chain of products have
        room for them. Code for fewer columns would take as long to compile as all the rest."""
        if p.j != self.columns or not self._is_wide(self.axes[p.j]):
            return p
        if p.verb == "multiply" and self._columns_are_defined and self._stored(p.c).lanes:
            return replace(p, verb="multiply_whole")
        self._columns_are_defined = False
        return p

    def _several(self, p: Product) -> list[str]:
        """Of the matrices that a product takes at once, how many there are and how far apart they lie, by kind."""
        if p.stack is None and p.chain is None:
            return []
        lines = []
        for axis, views in ((p.stack, (self._stored(p.c), p.a)), (p.chain, (p.a, p.b))):
            apart = [f"{v.array}.strides[{v.place(axis)}]" for v in views] if axis else []
            lines.append(
                f"({', '.join([self.axes[axis].count, *apart])}),  # along {axis}" if axis else "None,"
            )
        return lines

    def _temporary_dot(self, d: Dot, hint: str) -> Expr:
        type_ = self.types.of(d)
        for axes in orders(type_.axes):
            if self._roles(axes, d):
                place = self._buffer(f"{hint}_dot", type_.dtype, axes)
                self._fill(place, d, hint)
                return self._bound(place.name, replace(type_, axes=axes), place)
        product = Apply("mul", (Cast(type_.dtype, d.a), Cast(type_.dtype, d.b)))
        return self._reduction(Reduce("sum", d.over, self._expand(product)), hint)

    # -- reductions

    def _reduction(self, r: Reduce, hint: str) -> Expr:
        """A reduction whose operand is ready, into a variable or a buffer: vectors of it where its operand can be so
        computed, along the reduced axis or the last of the others; else element by element."""
        type_ = self.types.of(r)
        axes = tuple(a for a in self.types.of(r.arg).axes if a in r.over) or r.over
        if counts_lanes(r):
            return self._lane_count(self.axes[r.over[0]], type_, f"{hint}_{r.fn}")
        r = replace(r, arg=self._prepare(self._expand(r.arg), hint, (*type_.axes, *axes)))
        if r.fn in FOLDS and computes_lanes(self, r.arg, axes[-1]):
            return self._fold_along(r, axes, type_, hint)
        if r.fn in FOLDS and type_.axes and computes_lanes(self, r.arg, type_.axes[-1]):
            return self._fold_across(r, type_, hint)
        return self._fold(r, type_, hint)

    def _lane_count(self, axis: Axis, type_: TileType, hint: str) -> Expr:
        """How many lanes a tile has along an axis, as a value; the line joins the tail of a loop that ends just above."""
        total, last = self._variable(hint, type_.dtype), self._last_nest
        found = self._bound(total.name, type_, total)
        ends_above = last is not None and last.ends_above(self)
        self.line(f"{total.name} = {HELD[type_.dtype]}({axis.count})")
        if last is not None and ends_above:
            self._last_nest = replace(last, tail=last.tail.then(self.lines[-1], found.name))
        return found

    def _fold_along(self, r: Reduce, over: tuple[str, ...], type_: TileType, hint: str) -> Expr:
        """One vector of partial results for each element of the result, the reduced axis along its lanes."""
        depth, total = self.depth, self._total(r, type_, hint)
        self._nest(type_.axes)
        inner, last, first = self.depth, self._last_nest, identity(r.fn, type_.dtype)
        notes = r.fn in NOTING and type_.dtype.is_float
        partial = self.names.new(f"{hint}_{r.fn}_lanes")
        empty = f"{self._sized(LANES[type_.dtype], self.axes[over[-1]])}({first.text})"
        start = f"{partial} = noting_nan({empty})" if notes else f"{partial} = {empty}"
        if last is not None and last.takes(self, over, r.arg):
            line, tail = last.start + 1, self._reopen(last)
            self.lines.insert(last.start, "    " * inner + start)
        else:
            self.line(start)
            line, tail = self._nest_of(over, [r.arg]), Tail()
        element = self._operand(r, type_.dtype)
        element = replace(
            element, text=f"within({element.text}, {self._remaining}, {first.text})", level=ATOM
        )
        if notes:
            self.line(f"{partial} = {NOTING[r.fn]}({partial}, {element.text})")
        else:
            self._take(r.fn, Code(partial, type_.dtype, lanes=True), element)
        self._close(inner)
        found = self._bound(total.name, type_, total)
        finish = f"{self._target(total)} = {r.fn}_lanes({partial})"
        self._ended(over, True, line, tail.then("    " * inner + finish, found.name))
        self._close(depth)
        return found

    def _fold_across(self, r: Reduce, type_: TileType, hint: str) -> Expr:
        """The last axis of the result along the lanes, the reduced one step by step."""
        depth, total = self.depth, self._total(r, type_, hint)
        partial = self.names.new(f"{hint}_{r.fn}_lanes")
        by_columns = type_.axes == (self.columns,) and len(r.over) == 1
        if by_columns:
            start, line = self._open_columns(r.over[0])
        else:
            start = self._nest_of(type_.axes, [r.arg])
            line = len(self.lines)
            self._nest(r.over)
        known = dict(self.before_rows or {})
        inner = depth + len(type_.axes)
        first = f"{self._sized(LANES[type_.dtype])}({identity(r.fn, type_.dtype).text})"
        self.lines.insert(line, f"{'    ' * inner}{partial} = {first}")
        self._take(r.fn, Code(partial, type_.dtype, lanes=True), self._operand(r, type_.dtype))
        if by_columns:
            self._read_before(line, known)
            self.before_rows = None
        self.depth = inner
        self.line(f"{self._sized('store')}({total.name}, {self._at(type_.axes)}, {partial})")
        self._close(depth)
        if by_columns:
            self._ended(type_.axes, True, start)
        return self._bound(total.name, type_, total)

    def _total(self, r: Reduce, type_: TileType, hint: str) -> Buffer | Variable:
        """Where the result of a reduction goes."""
        name = f"{hint}_{r.fn}"
        return (
            self._buffer(name, type_.dtype, type_.axes) if type_.axes else self._variable(name, type_.dtype)
        )

    def _target(self, place: Buffer | Variable) -> str:
        """An element as the left side of an assignment."""
        return place.name if isinstance(place, Variable) else self._view(place, place.axes)

    def _operand(self, r: Reduce, dtype: DType) -> Code:
        """The reduction's operand at the current lanes, as the type it is reduced in."""
        code = self.value(r.arg)
        if r.fn in ("any", "all"):
            return self._cast(code, DType.BOOL)
        return self._convert(code, dtype)

    def _take(self, fn: str, total: Code, element: Code) -> None:
        self.line(f"{total.text} = {self._apply_operation(FOLDS[fn], [total, element]).text}")

    def _fold(self, r: Reduce, type_: TileType, hint: str) -> Expr:
        """Any reduction, element by element into a variable."""
        depth, total = self.depth, self._total(r, type_, hint)
        self._nest(type_.axes)
        name = total.name if isinstance(total, Variable) else self.names.new(f"{total.name}_element")
        fold = Fold(self, r, name, type_.dtype)
        fold.start()
        inner = self.depth
        self._nest(r.over)
        fold.step()
        self.depth = inner
        if isinstance(total, Buffer):
            self.line(f"{self._target(total)} = {name}")
        self.depth = depth
        return self._bound(total.name, type_, total)


@dataclass(frozen=True)
class Tail:
    """Lines after a loop that make results of what it gathered in vectors, and the names of these results."""

    lines: tuple[str, ...] = ()
    results: frozenset[str] = frozenset()

    def then(self, line: str, result: str) -> Tail:
        return Tail((*self.lines, line), self.results | {result})


@dataclass(frozen=True)
class Nest:
    """A loop over one axis that ended at line `end`; its own line is `start`, at this depth; only its tail stands after it.
    `lanes`: by vectors. With two axes it runs over the last, and the loop over the other, at line `inner`, stands in it;
    `before` are the buffers read before that one, and the names of what they held."""

    axes: tuple[str, ...]
    lanes: bool
    depth: int
    start: int
    end: int
    inner: int = 0
    before: tuple[tuple[str, str], ...] = ()
    tail: Tail = Tail()

    def at(self, task: Values) -> tuple[tuple[str, ...], bool] | None:
        """The axes and the kind of the loop if it ends just above."""
        return (self.axes, self.lanes) if (self.depth, self.end) == (task.depth, len(task.lines)) else None

    def ends_above(self, task: Values) -> bool:
        """Does nothing but its tail stand between the loop and here?"""
        return (self.depth, self.end + len(self.tail.lines)) == (task.depth, len(task.lines))

    def takes(self, task: Values, axes: tuple[str, ...], value: Expr) -> bool:
        """May a value over these axes be computed in the loop too? Not where it reads what the tail makes."""
        return (
            self.ends_above(task)
            and (self.axes, self.lanes) == (axes, computes_lanes(task, value, axes[-1]))
            and not any(isinstance(x, Name) and x.name in self.tail.results for x in subexpressions(value))
        )


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
        self.task.line(f"{self.total} = {identity(fn, self.dtype).text}")

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
        if fn in ("argmax", "argmin"):
            self._step_index(task._named(task._convert(task.value(self.reduce.arg), self._compared)))
            return
        task._take(fn, Code(self.total, self.dtype), task._operand(self.reduce, self.dtype))

    def _step_index(self, x: Code) -> None:
        """The first index of the extreme value, or of the first NaN."""
        task, best = self.task, self._best
        sign = ">" if self.reduce.fn == "argmax" else "<"
        nan = f" or ({x.text} != {x.text} and {best} == {best})" if x.dtype.is_float else ""
        task.open(f"if {self.total} < 0 or {x.text} {sign} {best}{nan}:")
        task.line(f"{best} = {x.text}")
        task.line(f"{self.total} = {task.axes[self.reduce.over[0]].index}")
        task.depth -= 1


def pack_verb(given: DType, to: DType) -> str:
    """The copy that makes elements of one type from another; none where it takes more than widening."""
    if given in (DType.F16, DType.BF16):
        return f"pack_{given}" if to is DType.F32 else ""
    integers = given.is_integer and to.is_integer and given.bits <= to.bits
    return "pack" if integers or given is to or (given, to) == (DType.F32, DType.F64) else ""


def counts_lanes(r: Reduce) -> bool:
    """Is it a sum of ones over an axis? The lowering gives what lacks the reduced axis a condition that always holds."""
    match r.arg:
        case Apply(op="where", args=(Apply(op="le", args=(Const(value=0), AxisIndex(axis=a))), one, zero)):
            return (
                r.fn == "sum"
                and r.over == (a,)
                and is_zero(zero)
                and isinstance(one, Const)
                and one.value == 1
            )
    return False


def is_zero(e: Expr) -> bool:
    """Is it zero everywhere?"""
    e = e.value if isinstance(e, Fill) else e
    return isinstance(e, Const) and not isinstance(e.value, bool) and e.value == 0


def _padded(length: int, dtype: DType) -> int:
    """Elements from row to row of a buffer: whole vectors on every machine, and no multiple of 256 bytes, for then a line of
    each of 128 rows, which is what a product walks along, would take all ways of a quarter of the first cache's sets."""
    row = _whole(length)
    return row + WHOLE_LANES if row * dtype.bytes % 256 == 0 else row


def _whole(length: int) -> int:
    """A length rounded up to whole vectors on every machine."""
    return -(-length // WHOLE_LANES) * WHOLE_LANES


def orders(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The axes as they are, then with each other one last."""
    return [axes, *((*(x for x in axes if x != a), a) for a in reversed(axes[:-1]))]
