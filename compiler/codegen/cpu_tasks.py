"""The tasks of a grid as Numba text: which axes they divide, their loops, statements and carried values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Expr,
    ExtentRef,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    ScalarRef,
    Stmt,
    Store,
    TileType,
    apply,
    expressions,
    i64,
    statements,
    subexpressions,
)
from .cpu_narrow import TIER, VERBS
from .cpu_values import Product, Values, is_zero
from .cpu_vectors import recomputed
from .numba_text import (
    CALLS,
    HELD,
    LINE_BYTES,
    Axis,
    Buffer,
    Code,
    Inline,
    Signature,
    Variable,
    held,
    in_python,
)
from .placement import depends_on_data, inherited, inlined, merge
from .repeats import Repeat, repeats

ZERO = Code("0", DType.I64)


@dataclass(frozen=True)
class Function:
    """Text of one task function and what it allocates."""

    lines: tuple[str, ...]
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Update:
    """The next state of a carry: an elementwise base, products accumulated on it, and the names that the base reads."""

    name: str
    place: Buffer | Variable
    base: Expr
    products: tuple[Product, ...]
    reads: frozenset[str]


def _parallel(grid: Grid, tainted: frozenset[str]) -> tuple[tuple[LoopAxis, ...], tuple[LoopAxis, ...]]:
    """The axes that tasks divide, and those that stay serial inside a task, so that no two tasks write one element:
    where a store accumulates, or goes where a tensor's value says, an axis is parallel only if it is a subscript."""
    shared = [
        {ix.axis for ix in s.subscripts if isinstance(ix, AxisIndex)}
        for s in statements(grid.body)
        if isinstance(s, Store)
        and (s.mode == "add" or any(depends_on_data(ix, tainted) for ix in s.subscripts))
    ]
    free = tuple(a for a in grid.axes if _is_plain(a) and all(a.name in axes for axes in shared))
    return free, tuple(a for a in grid.axes if a not in free)


def _is_plain(a: LoopAxis) -> bool:
    """Do the bounds of an axis depend on extents and scalars only?"""
    bounds = [x for b in (a.extent, a.lo, a.hi) if b is not None for x in subexpressions(b)]
    return all(isinstance(x, Const | ExtentRef | ScalarRef | Apply | Cast) for x in bounds)


class Task(Values):
    """Writes the function that runs a range of a grid's tasks. `name` is its Python name, `before` the values that stand
    above the grid in its program."""

    def __init__(self, signature: Signature, name: str, grid: Grid, before: tuple[Stmt, ...]) -> None:
        super().__init__(signature)
        self.name = name
        self.grid, self.before = grid, before
        self.repeats = repeats(self.program)
        self.kept = kept = {n for r in self.repeats.values() for n in r.kept}
        self.recomputed = recomputed(self.program, self.types, kept)
        self.inlined = inlined(self.program, self.types) - kept | self.recomputed
        taken = inherited(self.program, self.inlined)
        self.inherited = {n: x for n, x in taken.items() if x not in kept}
        self.parallel, self.serial = _parallel(grid, self.tainted)
        self.tenants: dict[str, list[str]] = {}
        self._next_rows: tuple[Load, ...] = ()
        """What the next task reads along the axis of the loop at hand, which stores."""
        self._written: Function | None = None

    # -- the function and its launch

    def function(self) -> Function:
        """The task function; written once."""
        if self._written is None:
            self._write()
        assert self._written is not None
        return self._written

    def _write(self) -> None:
        if self.parallel:
            self._divide()
        self._body((*self.before, Grid(self.serial, self.grid.body)))
        if self.parallel:
            self.depth = 2
            self.line("first, last = take_next(queue, first, last)")
        bounds = ("first", "last", "queue") if self.parallel else ()
        head = ['@njit(nogil=True, error_model="numpy")']
        head.append(f"def {self.name}({', '.join(filter(None, (*bounds, self.signature.arguments)))}):")
        self._written = Function((*head, *self._allocations(), *self._on_tiles()), tuple(self.buffers))

    def _on_tiles(self) -> list[str]:
        """The body, between the lines that ready a matrix unit and leave it, where it has a product for one."""
        return ["    start_tiles()", *self.lines, "    stop_tiles()"] if self._copied else self.lines

    def _allocations(self) -> list[str]:
        """Lines that lay the buffers out, one after another in one allocation."""
        lines, end = [], 0
        for b in self.buffers:
            shape = str(b.sizes if len(b.sizes) > 1 else b.sizes[0])
            lines.append(f"    {b.name} = part(space, {end}, {HELD[b.dtype]}, {shape})  # {self._held_in(b)}")
            end += -(-math.prod(b.sizes) * b.dtype.bytes // LINE_BYTES) * LINE_BYTES
        return [f"    space = workspace({end})", *lines] if lines else []

    def _held_in(self, b: Buffer) -> str:
        """What a buffer is for: its type, and the values that lie in it after the one it is named for."""
        return ", then ".join([f"{b.dtype}[{', '.join(b.axes)}]", *self.tenants.get(b.name, ())])

    def _divide(self) -> None:
        """Open the loop over tasks and find the position on each axis, the last one fastest."""
        bound = [self._bind(a) for a in self.parallel]
        self.line("first, last = take_first(queue, first, last)")
        self.open("while first < last:")
        self.open("for task in range(first, last):")
        rest = "task"
        for i, (a, axis) in reversed(list(enumerate(zip(self.parallel, bound, strict=True)))):
            steps = self._tiles(a).within(17)
            self._start(a, axis, f"{rest} % {steps}" if i else rest)
            rest = f"{rest} // {steps}"

    def _start(self, a: LoopAxis, axis: Axis, number: str) -> None:
        first = self._first(a)
        plus = "" if first.text == "0" else f"{first.within(14)} + "
        if a.tile is None:
            self.line(f"{axis.start} = {plus}{number}")
        else:
            self.line(f"{axis.origin} = {plus}{number} * {a.tile}")
            self._lanes(a, axis)

    def launch(self) -> list[str]:
        """Lines of the program's function that run the tasks of this grid."""
        arguments = self.signature.arguments
        self.launching = True
        if not self.parallel:
            return [f"    # {self._describe(self.serial)} in order", f"    {self.name}({arguments})"]
        count = " * ".join(self._tiles(a).within(17) for a in self.parallel)
        later = f"; inside each, {self._describe(self.serial)} in order" if self.serial else ""
        return [
            f"    # {self._describe(self.parallel)} in parallel{later}",
            f"    run_tasks({', '.join(filter(None, (self.name, count, arguments)))})",
        ]

    def _describe(self, axes: Iterable[LoopAxis]) -> str:
        parts = (a.name if a.tile is None else f"{a.name} by {a.tile}" for a in axes)
        return "grid " + (", ".join(parts) or "of one point")

    # -- axes and bounds

    def _first(self, a: LoopAxis) -> Code:
        """The first visited index of a unit axis, the origin of the first tile of another."""
        if a.lo is None:
            return Code("0", DType.I64)
        lo = self._extreme("max", self.scalar(a.lo), ZERO)
        return lo if a.tile is None else Code(f"{lo.text} // {a.tile} * {a.tile}", DType.I64, 16)

    def _end(self, a: LoopAxis) -> Code:
        extent = self.scalar(a.extent)
        if isinstance(a.hi, Apply) and a.hi.op == "min" and a.extent in a.hi.args:
            return self.scalar(a.hi)
        return extent if a.hi is None else self._extreme("min", self.scalar(a.hi), extent)

    def _tiles(self, a: LoopAxis) -> Code:
        """How many steps an axis takes."""
        first, end = self._first(a), self._end(a)
        if a.tile is None:
            if first.text == "0":
                return end
            return self._extreme("max", Code(f"{end.text} - {first.within(15)}", DType.I64), ZERO)
        span_text = end.within(14) if first.text == "0" else f"{end.text} - {first.within(15)}"
        tiles = Code(f"({span_text} + {a.tile - 1}) // {a.tile}", DType.I64, 16)
        return tiles if first.text == "0" else self._extreme("max", tiles, ZERO)

    def _extreme(self, op: str, *indices: Code) -> Code:
        """The largest or the smallest of indices: Numba would compile a function for each of Python's `min` and `max`."""
        if self.launching:
            return in_python(op, list(indices))
        first, *others = (self._convert(x, DType.I64) for x in indices)
        for other in others:
            first = Code(f"{CALLS[op]}({first.text}, {other.text})", DType.I64)
        return first

    def _bind(self, a: LoopAxis) -> Axis:
        """Bring a loop axis into scope under fresh names."""
        base = self.names.new(a.name)
        if a.tile is None:
            bound = Axis(a.name, a.extent, 1, base, base, "", "1")
        else:
            origin = self.names.new(f"{a.name}_0")
            start = origin if a.lo is None else self.names.new(f"{a.name}_start")
            lane, count = self.names.new(f"{a.name}_i"), self.names.new(f"{a.name}_n")
            bound = Axis(a.name, a.extent, a.tile, start, origin, lane, count)
        self.axes[a.name] = bound
        return bound

    def _lanes(self, a: LoopAxis, axis: Axis) -> None:
        """Lines that set the lanes of a tile from its origin."""
        if a.lo is not None:
            start = self._extreme("max", Code(axis.origin, DType.I64), self.scalar(a.lo), ZERO)
            self.line(f"{axis.start} = {start.text}")
        behind = self._extreme("min", Code(f"{axis.origin} + {a.tile}", DType.I64), self._end(a))
        self.line(f"{axis.count} = {behind.text} - {axis.start}")

    def _loop(self, a: LoopAxis, reverse: bool = False, at_least_once: bool = False) -> None:
        """Open a serial loop over the steps of an axis; `at_least_once` gives an empty one a step without lanes."""
        axis = self._bind(a)
        first, end = self._first(a).text, self._end(a).text
        if at_least_once:
            end = self._extreme("max", self._end(a), Code("1", DType.I64)).text
        if reverse:
            last = f"{first} + ({self._tiles(a).text} - 1) * {a.tile or 1}"
            self.open(f"for {axis.origin} in range({last}, {first} - 1, -{a.tile or 1}):")
        elif a.tile is None:
            self.open(f"for {axis.start} in range({end if first == '0' else f'{first}, {end}'}):")
        else:
            self.open(f"for {axis.origin} in range({first}, {end}, {a.tile}):")
        if a.tile is not None:
            self._lanes(a, axis)

    # -- statements

    def _body(self, body: tuple[Stmt, ...]) -> None:
        for s, following in zip_longest(body, body[1:]):
            if isinstance(s, For) and isinstance(following, Store):
                self._find_result(s, following)
            match s:
                case Let():
                    self._let(s)
                case Store():
                    self._store(s)
                case Grid():
                    depth = self.depth
                    for a in s.axes:
                        self._loop(a)
                    self._body(s.body)
                    self.depth = depth
                case For():
                    self._repeat(s)

    def _find_result(self, s: For, after: Store) -> None:
        """Let a loop that only adds products add them in the output, where the statement behind it stores its value there
        as it is and nothing else reads it."""
        if len(s.carries) != 1 or after.value != Name(s.carries[0].name) or id(s) in self.repeats:
            return
        if self.program.tier == TIER or not s.carries[0].type.axes:
            return  # matrix units write whole blocks; a single number is a variable
        carry, param = s.carries[0], self.params[after.tensor]
        others = [x for x in statements(self.grid.body) if x is not after and x is not s]
        reads = (
            x
            for o in others
            if all(o is not inner for inner in statements(s.body))
            for e in expressions(o)
            for x in subexpressions(e)
        )
        tiled = [
            ix.axis for ix in after.subscripts if isinstance(ix, AxisIndex) and ix.axis in carry.type.axes
        ]
        if (
            after.mode != "set"
            or param.mode != "out"
            or param.dtype is not held(carry.type.dtype)
            or param.dtype not in (DType.F32, DType.F64, DType.I32)
            or sorted(tiled) != sorted(carry.type.axes)
            or after.subscripts[-1] != AxisIndex(carry.type.axes[-1])
            or not all(map(self._fits, after.subscripts, param.shape))
            or not all(isinstance(ix, AxisIndex) for ix in after.subscripts)
            or any(x == after.value for x in reads)
        ):
            return
        place = Buffer(self.tensor(after.tensor), param.dtype, carry.type.axes, ())
        self.places[carry.name] = place
        if self._first_step_overwrites(s):
            self.results[place.name] = Load(after.tensor, after.subscripts)
        else:
            del self.places[carry.name]

    def _repeat(self, s: For) -> None:
        """A loop, or where an earlier one took a single step, that step again with the values it left."""
        repeat = self.repeats.get(id(s))
        if repeat is None:
            self._for(s)
            return
        self._prefetch(repeat)
        self._next_rows = self._rows_after(repeat)
        self._again_or_anew(s, repeat)
        self._next_rows = ()

    def _again_or_anew(self, s: For, repeat: Repeat) -> None:
        if repeat.kept <= self.recomputed:
            self._for(s)
            return
        axis, depth = repeat.earlier.axis, self.depth
        self.open(f"if 0 < {self._end(axis).text} <= {axis.tile}:  # one tile, whose values are still there")
        self._body(repeat.body)
        self.depth = depth
        self.open("else:")
        self._for(s)
        self.depth = depth

    def _prefetch(self, repeat: Repeat) -> None:
        """In the last loop along a row before the one that stores it, ask for the memory, which then comes meanwhile."""
        axis = repeat.earlier.axis.name
        nest, depth = self._nest_along.get(axis), self.depth
        if nest is None or not nest.lanes:
            return
        after = self.lines[nest.end :]
        del self.lines[nest.end :]
        self.depth, self.along = nest.depth + 1, self.axes[axis]
        for s in repeat.body:
            if isinstance(s, Store) and self._runs_along(s, axis):
                index = self._lanes_from(Load(s.tensor, s.subscripts))
                self.line(f"{self._sized('prefetch')}({self.tensor(s.tensor)}, {index})")
        self.lines += after
        self._close(depth)

    def _rows_after(self, repeat: Repeat) -> tuple[Load, ...]:
        """The reads of rows that a loop starts from, one row further: those of the next task where tasks are rows. They come
        from a far cache while this one computes; a loop that only reads would wait for them."""
        axis = repeat.earlier.axis.name
        row = self.parallel[-1] if self.parallel else None
        if row is None or row.tile is not None:
            return ()
        every = (x for s in repeat.earlier.body for e in expressions(s) for x in subexpressions(e))
        rows = {
            x.tensor: x.subscripts[:-2]
            for x in every
            if isinstance(x, Load) and x.subscripts[-2:] == (AxisIndex(row.name), AxisIndex(axis))
        }
        following = apply("add", AxisIndex(row.name), i64(1))
        return tuple(
            Load(tensor, (*outer, following, AxisIndex(axis)))
            for tensor, outer in rows.items()
            if all(isinstance(ix, AxisIndex) and ix.axis not in (row.name, axis) for ix in outer)
        )

    def _ask_for_next_rows(self) -> None:
        """Lines in a loop along a row that ask for the same places of the next one."""
        for read in self._next_rows:
            index = self._lanes_from(read)
            self.line(f"{self._sized('prefetch_read')}({self.tensor(read.tensor)}, {index})")

    def _runs_along(self, s: Store, axis: str) -> bool:
        """Does a store write the last dimension of its tensor along an axis, at subscripts known before?"""
        simple = all(isinstance(ix, AxisIndex) for ix in s.subscripts)
        return (
            simple
            and s.subscripts[-1] == AxisIndex(axis)
            and self._dense(s.subscripts, axis, self.params[s.tensor])
        )

    def _let(self, s: Let) -> None:
        value = s.value if self.types.of(s.value).dtype is s.type.dtype else Cast(s.type.dtype, s.value)
        if s.name in self.inlined:
            self.places[s.name] = Inline(self._expand(value))
            return
        value = self._expand(value)
        if s.name not in self.kept and self._is_taken_from_tensor(value, s.type.axes):
            self.places[s.name] = Inline(value)
            return
        if not s.type.axes:
            code = self.value(self._prepare(value, s.name, ()))
            self.line(f"{self._declare(s.name, s.type).name} = {code.text}")
            return
        place = self._take_over(s.name) or self._declare(s.name, s.type)
        assert isinstance(place, Buffer)
        self._fill(place, value, s.name)

    def _take_over(self, name: str) -> Buffer | None:
        """The buffer of a value that this one follows (see `inherited`)."""
        place = self.places.get(self.inherited.get(name, ""))
        if not isinstance(place, Buffer):
            return None
        self.places[name] = place
        self.tenants.setdefault(place.name, []).append(name)
        return place

    def _is_taken_from_tensor(self, value: Expr, axes: tuple[str, ...]) -> bool:
        """Do the products of a matrix unit, which copies operands itself, take this value from its tensor?"""
        if self.program.tier != TIER or len(axes) < 2:
            return False
        read = self._plain_read(value, axes)
        return (
            read is not None
            and self.params[read.tensor].dtype in VERBS
            and self.params[read.tensor].mode == "in"
            and not any(isinstance(x, Name) for ix in read.subscripts for x in subexpressions(ix))
        )

    def _store(self, s: Store) -> None:
        if isinstance(s.value, Name) and self.tensor(s.tensor) in self.results:
            return  # summed there
        axes = merge(*(self.types.of(ix).axes for ix in s.subscripts))
        value = self._prepare(self._expand(s.value), s.tensor, axes)
        subscripts = tuple(self._prepare(self._expand(ix), s.tensor, ()) for ix in s.subscripts)
        if self._unpack(s, axes, value):
            return
        value = self._turned(s, axes, value)
        depth, param = self.depth, self.params[s.tensor]
        if axes and subscripts[-1] == AxisIndex(axes[-1]) and self._dense(subscripts, axes[-1], param):
            self._nest_of(axes, [value])
        else:
            self._nest(axes)
        texts = []
        for i, ix in enumerate(subscripts):
            text = self._subscript(ix)
            if not self._fits(ix, param.shape[i]):
                plain = self._named(self.value(ix)).text
                self.open(f"if 0 <= {plain} < {self.tensor(s.tensor)}.shape[{i}]:")
                text = f"at({plain})"
            texts.append(text)
        if self.along:
            self._ask_for_next_rows()
            self._store_lanes(s, param.dtype, value, self._lane_index(texts[:-1]))
        else:
            target = f"{self.tensor(s.tensor)}[{', '.join(texts) or '()'}]"
            self._store_element(target, param.dtype, value, s.mode)
        self._close(depth)

    def _unpack(self, s: Store, axes: tuple[str, ...], value: Expr) -> bool:
        """Store a value whose tiles lie with another axis last than the tensor: it is computed into a buffer in their
        order, and transposed on the way to the tensor. False where that does not apply."""
        param, order = self.params[s.tensor], self._order_of(value, axes)
        inside = all(map(self._fits, s.subscripts, param.shape))
        if order is None or not inside or s.mode != "set" or param.dtype not in (DType.F32, DType.F64):
            return False
        place = self._buffer(f"{s.tensor}_turned", param.dtype, order)
        self._elementwise(place, value)
        target = self._tensor_view(Load(s.tensor, s.subscripts))
        depth = self.depth
        row, column = order[-1], next(ix.axis for ix in reversed(s.subscripts) if isinstance(ix, AxisIndex))
        self._nest(a for a in order if a not in (row, column))
        self._copy("unpack", (target, self._stored(place)), row, column)
        self.depth = depth
        return True

    def _turned(self, s: Store, axes: tuple[str, ...], value: Expr) -> Expr:
        """A value for a tensor of 16-bit floats whose tiles lie with another axis last: computed in f32 in their order, and
        transposed. As it is where that does not apply."""
        dtype, order = self.params[s.tensor].dtype, self._order_of(value, axes)
        if order is None or dtype not in (DType.F16, DType.BF16):
            return value
        while (
            isinstance(value, Cast) and value.dtype is dtype and self.types.of(value.arg).dtype is DType.F32
        ):
            value = value.arg  # the store rounds
        place = self._buffer(f"{s.tensor}_turned", DType.F32, order)
        self._elementwise(place, value)
        rows = self._buffer(f"{s.tensor}_rows", DType.F32, axes)
        self._pack("pack", rows, self._stored(place))
        return self._bound(rows.name, TileType(DType.F32, axes), rows)

    def _order_of(self, value: Expr, axes: tuple[str, ...]) -> tuple[str, ...] | None:
        """The order in which a buffer that the value reads has all of these axes, where its last one is not theirs."""
        for x in subexpressions(value):
            place = self.places.get(x.name) if isinstance(x, Name) else None
            if isinstance(place, Buffer) and len(axes) > 1 and set(place.axes) == set(axes):
                return place.axes if place.axes[-1] != axes[-1] else None
        return None

    def _dense(self, subscripts: tuple[Expr, ...], axis: str, param: Param) -> bool:
        """Does an axis run along a tensor's last dimension and over all of it, free of the other subscripts?"""
        alone = not any(axis in self.types.of(ix).axes for ix in subscripts[:-1])
        return alone and self._fits(subscripts[-1], param.shape[-1])

    def _store_lanes(self, s: Store, dtype: DType, value: Expr, index: str) -> None:
        """The line that stores a vector along a tensor's last axis."""
        code = self._convert(self.value(value), dtype if dtype is DType.F64 else held(dtype), narrow=True)
        text, tensor = code.text, self.tensor(s.tensor)
        if s.mode == "add":
            old = self._load_lanes(Load(s.tensor, s.subscripts), self.params[s.tensor])
            text = f"{old.text} + {code.within(15)}"
        if dtype in (DType.F16, DType.BF16):
            spread = text if code.lanes else f"{self._sized('lanes_f32')}({text})"
            text = f"narrow_{dtype}({spread})"
        self.line(f"{self._sized('store_some')}({tensor}, {index}, {text}, {self._remaining})")

    def _store_element(self, target: str, dtype: DType, value: Expr, mode: str) -> None:
        code = self._convert(self.value(value), dtype if dtype is DType.F64 else held(dtype), narrow=True)
        if dtype in (DType.F16, DType.BF16):
            old = f"widen_{dtype}({target}) + " if mode == "add" else ""
            self.line(f"{target} = narrow_{dtype}({old}{code.within(15) if old else code.text})")
        else:
            self.line(f"{target} {'+=' if mode == 'add' else '='} {code.text}")

    # -- loops with carried values

    def _for(self, s: For) -> None:
        places = [
            self._result(c) or self._take_over(c.name) or self._declare(c.name, c.type) for c in s.carries
        ]
        overwrites = self._first_step_overwrites(s)
        for c, place in zip(s.carries, places, strict=True):
            init = self._expand(c.init)
            if isinstance(place, Variable):
                code = self._convert(self.value(self._prepare(init, c.name, ())), c.type.dtype)
                self.line(f"{place.name} = {code.text}")
            elif not overwrites:
                self._fill(place, init, c.name)
        depth = self.depth
        self._loop(s.axis, s.reverse, at_least_once=overwrites)
        self._body(s.body)
        fresh = f"{self.axes[s.axis.name].origin} == 0" if overwrites else "False"
        self._update(s.carries, s.yields, fresh)
        self.depth = depth

    def _result(self, c: Carry) -> Buffer | None:
        """The output in which a carried value is summed, if it is."""
        place = self.places.get(c.name)
        return place if isinstance(place, Buffer) and place.name in self.results else None

    def _first_step_overwrites(self, s: For) -> bool:
        """Does the loop only add products to one value that starts at zero? Then its first step can set it."""
        if (
            len(s.carries) != 1
            or s.reverse
            or s.axis.tile is None
            or s.axis.lo is not None
            or s.axis.hi is not None
        ):
            return False
        (c,), (y,) = s.carries, s.yields
        place = self.places[c.name]
        if not isinstance(place, Buffer) or not is_zero(self._expand(c.init)):
            return False
        base, products = self._split(place, y)
        plain = isinstance(base, Name) and base.name == c.name
        return plain and bool(products) and set(products[0].over) == {s.axis.name}

    def _update(self, carries: tuple[Carry, ...], yields: tuple[Expr, ...], fresh: str) -> None:
        """Replace all carried values at once (where `fresh` holds, they have none yet): products and reductions are taken
        first, then each carry is overwritten when no other update still reads it; in a cycle one waits in a copy."""
        pending: dict[str, Update] = {}
        for c, y in zip(carries, yields, strict=True):
            value = self._expand(y)
            if not (isinstance(value, Name) and value.name == c.name):
                pending[c.name] = self._plan(c, value, {x.name for x in carries})
        late: list[tuple[Update, str]] = []
        while pending:
            free = [
                n for n, u in pending.items() if not any(n in v.reads for m, v in pending.items() if m != n)
            ]
            update = pending.pop(free[0] if free else next(iter(pending)))
            if free:
                self._apply(update, update.place, fresh)
            else:
                late.append((update, self._postpone(update)))
        for update, temporary in late:
            self._copy_back(update.place, temporary)

    def _plan(self, c: Carry, value: Expr, carries: set[str]) -> Update:
        place = self.places[c.name]
        assert not isinstance(place, Inline)
        base, products = (value, []) if isinstance(place, Variable) else self._split(place, value)
        base = self._prepare(base, c.name, c.type.axes)
        ready = [self._operands(place, p, carries) for p in products if isinstance(place, Buffer)]
        reads = {x.name for x in subexpressions(base) if isinstance(x, Name)}
        return Update(c.name, place, base, tuple(ready), frozenset(reads))

    def _apply(self, u: Update, place: Buffer | Variable, fresh: str = "False") -> None:
        if isinstance(place, Variable):
            self.line(f"{place.name} = {self._convert(self.value(u.base), place.dtype).text}")
            return
        self._elementwise(place, u.base)
        for n, p in enumerate(u.products):
            self._multiply(replace(p, c=place, fresh="False" if n else fresh))

    def _postpone(self, u: Update) -> str:
        if isinstance(u.place, Variable):
            place: Buffer | Variable = self._variable(f"{u.name}_next", u.place.dtype)
        else:
            place = self._buffer(f"{u.name}_next", u.place.dtype, u.place.axes)
        self._apply(u, place)
        return place.name

    def _copy_back(self, place: Buffer | Variable, temporary: str) -> None:
        if isinstance(place, Variable):
            self.line(f"{place.name} = {temporary}")
            return
        depth = self.depth
        self._nest(place.axes)
        lanes = ", ".join(self.axes[a].lane for a in place.axes)
        self.line(f"{place.name}[{lanes}] = {temporary}[{lanes}]")
        self.depth = depth
