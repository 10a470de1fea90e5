"""Tile interpreter: runs a `TileModule` tile by tile in NumPy, with the meaning stated in `tile_ir`.

It is the oracle for passes and back ends, and checks what they must not do: reads outside a tensor, reads of elements that
nothing wrote, two grid iterations that write one element or of which one reads what another writes.

A tile holds only the lanes that exist, so an axis at its extent's tail is simply shorter. A read under a `where`, `and` or
`or` is checked only where that guard selects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, NamedTuple, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..tile_ir import (
    Apply,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Dot,
    Expr,
    ExtentRef,
    Fill,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    Reduce,
    ScalarRef,
    Stmt,
    Store,
    TileModule,
    TileProgram,
    TileType,
    subexpressions,
)
from .arithmetic import Array, contracted, convert, elementwise, quiet, reduced
from .elements import NUMPY

T = TypeVar("T")
Flags = npt.NDArray[np.bool_]


class TileFault(RuntimeError):
    """A program did what no program may do; the message names program, tensor, element and what is wrong."""


class Tile(NamedTuple):
    """Values over the existing lanes of named axes, one array dimension for each."""

    axes: tuple[str, ...]
    data: Array


@dataclass
class Memory:
    """A tensor at run time. `written` is None where every element has a value from the start.

    `writer` has the grid iteration that last set each element, 0 where none of this program did.
    """

    param: Param
    data: Array
    written: Flags | None
    writer: npt.NDArray[np.int64] | None = None


# ---------------------------------------------------------------- entry


def run_module(
    module: TileModule,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, int | float | bool],
    *,
    skip: bool = True,
    check_indices: bool = False,
) -> dict[str, Array]:
    """Run every program in order; returns outputs and inouts by name (inputs are not changed).

    `tensors` has the parameters that are read first, in their element types; `scalars` has scalars, and extents that no
    shape binds. `skip` leaves out tiles on which a loop's domain is false; `check_indices` raises where a subscript from
    a tensor's value would be clamped, or its store dropped. Raises `TileFault`, and `ValueError` for wrong arguments.
    """
    extents = bind_extents(module, tensors, scalars)
    scratch = {s.name for s in module.scratch}
    changed = {p.name for q in module.programs for p in q.params if p.mode != "in"}
    memory: dict[str, Memory] = {}
    with quiet():
        for program in module.programs:
            values = {s.name: _scalar(s.name, s.dtype, scalars) for s in program.scalars}
            for p in program.params:
                if p.name not in memory:
                    memory[p.name] = _allocate(p, tensors, extents, scalars, p.name in scratch)
                    if p.name in changed and memory[p.name].written is None:
                        memory[p.name].data = memory[p.name].data.copy()
                memory[p.name].writer = None
            _Run(program, memory, extents, values, skip, check_indices).body(program.body)
    return {name: _result(memory[name]) for name in memory if name in changed - scratch}


def _scalar(name: str, dtype: DType, scalars: Mapping[str, int | float | bool]) -> Tile:
    if name not in scalars:
        raise ValueError(f"scalar {name!r} ({dtype}) is missing")
    return Tile((), np.asarray(scalars[name], NUMPY[dtype]))


def _allocate(
    p: Param,
    tensors: Mapping[str, Array],
    extents: Mapping[str, int],
    scalars: Mapping[str, int | float | bool],
    is_scratch: bool,
) -> Memory:
    shape = tuple(integer(x, {**scalars, **extents}) for x in p.shape)
    if p.mode == "out" or is_scratch:
        return Memory(p, np.zeros(shape, NUMPY[p.dtype]), np.zeros(shape, np.bool_))
    if p.name not in tensors:
        raise ValueError(f"tensor {p.name!r} ({p.dtype}, shape {shape}) is missing")
    given = np.asarray(tensors[p.name])
    if given.shape != shape:
        raise ValueError(f"tensor {p.name!r} has shape {given.shape}; its declaration makes that {shape}")
    if given.dtype != NUMPY[p.dtype]:
        raise ValueError(f"tensor {p.name!r} holds {given.dtype}; it is declared {p.dtype}")
    return Memory(p, given, None)


def _result(m: Memory) -> Array:
    if m.written is not None and not m.written.all():
        at = tuple(int(i) for i in np.argwhere(~m.written)[0])
        raise TileFault(f"output {m.param.name!r}: element {at} was never written")
    return m.data


def bind_extents(
    module: TileModule, tensors: Mapping[str, Array], scalars: Mapping[str, int | float | bool]
) -> dict[str, int]:
    """Extents from statics, scalars of that name and shapes linear in one of them. Raises `ValueError` where one is left."""
    names = {e for p in module.programs for e in p.extents}
    known = {e: n for p in module.programs for e, n in p.statics}
    known.update({n: int(v) for n, v in scalars.items() if n in names and n not in known})
    params = [p for q in module.programs for p in q.params if p.name in tensors]
    waiting = [(p, i) for p in params for i in range(len(p.shape))]
    while True:
        later = [(p, i) for p, i in waiting if not _bind(p, i, tensors, known, scalars)]
        if len(later) == len(waiting):
            break
        waiting = later
    if missing := sorted(names - known.keys()):
        raise ValueError(f"no shape or scalar gives extent {', '.join(missing)}")
    return known


def _bind(
    p: Param,
    i: int,
    tensors: Mapping[str, Array],
    known: dict[str, int],
    scalars: Mapping[str, int | float | bool],
) -> bool:
    """Learn the one unknown extent of a shape entry; False while there are more."""
    unknown = {e.name for e in subexpressions(p.shape[i]) if isinstance(e, ExtentRef)} - known.keys()
    if len(unknown) > 1 or np.ndim(tensors[p.name]) != len(p.shape):
        return False
    for name in unknown:
        zero, one = (integer(p.shape[i], {**scalars, **known, name: v}) for v in (0, 1))
        if one == zero:
            return False
        known[name] = (np.shape(tensors[p.name])[i] - zero) // (one - zero)
    return True


def integer(e: Expr, names: Mapping[str, int | float | bool]) -> int:
    """The value of an integer expression over extents and scalars."""
    done: list[Array] = []
    for x in steps(e):
        match x:
            case Guard() | Unguard():
                continue
            case Const(value=v, dtype=dtype):
                done.append(np.asarray(v, NUMPY[dtype]))
            case ExtentRef(name=n) | ScalarRef(name=n):
                done.append(np.asarray(names[n]))
            case Apply(op=op, args=args):
                done.append(elementwise(op, *_pop(done, len(args))))
            case Cast(dtype=dtype):
                done.append(convert(done.pop(), dtype))
            case _:
                raise ValueError("a shape is an expression of extents and scalars")
    return int(done[0])


# ---------------------------------------------------------------- alignment


def aligned(tiles: list[Tile]) -> tuple[tuple[str, ...], list[Array]]:
    """The axes of all, in order of first appearance, and each tile's data broadcastable over them."""
    axes = tuple(dict.fromkeys(a for t in tiles for a in t.axes))
    return axes, [spread(t, axes) for t in tiles]


def spread(t: Tile, axes: tuple[str, ...]) -> Array:
    """The tile's data with one dimension for each of `axes`, of size 1 for those it lacks."""
    if t.axes == axes:
        return t.data
    order = [t.axes.index(a) for a in axes if a in t.axes]
    shape = iter(np.shape(t.data)[k] for k in order)
    return t.data.transpose(order).reshape([next(shape) if a in t.axes else 1 for a in axes])


# ---------------------------------------------------------------- expressions as steps


@dataclass(frozen=True)
class Guard:
    """From here to `Unguard`, only lanes where the value `below` the top of the stack is `wanted` matter."""

    below: int
    wanted: bool


@dataclass(frozen=True)
class Unguard:
    pass


@dataclass(frozen=True)
class First:
    """The first index of the current tile of an axis: what a bare tile axis means in a loop's bound."""

    axis: str


Step = Expr | Guard | Unguard | First


def steps(e: Expr, bound: bool = False) -> tuple[Step, ...]:
    """Postorder of `e` for a stack machine. `bound` takes tile axes, where no reduction binds them, by their first index."""
    out: list[Step] = []
    stack: list[tuple[Step, bool, frozenset[str]]] = [(e, False, frozenset())]
    while stack:
        top, ready, over = stack.pop()
        if ready or isinstance(top, Guard | Unguard | First):
            out.append(
                First(top.axis) if bound and isinstance(top, AxisIndex) and top.axis not in over else top
            )
            continue
        stack.append((top, True, over))
        inner = over | frozenset(top.over) if isinstance(top, Reduce | Dot) else over
        stack.extend((s, False, inner) for s in reversed(_parts(top)))
    return tuple(out)


def _parts(e: Expr) -> list[Step]:
    """The operands of `e`, those that it evaluates on some lanes only between guards."""
    match e:
        case Apply(op="where", args=(c, a, b)):
            return [c, Guard(0, True), a, Unguard(), Guard(1, False), b, Unguard()]
        case Apply(op="and" | "or" as op, args=(a, b)):
            return [a, Guard(0, op == "and"), b, Unguard()]
        case Apply(args=args):
            return list(args)
        case Load(subscripts=s):
            return list(s)
        case Cast(arg=x) | Reduce(arg=x) | Fill(value=x):
            return [x]
        case Dot(a=a, b=b):
            return [a, b]
        case _:
            return []


# ---------------------------------------------------------------- running a program


@dataclass
class _Run:
    """One program on one set of arguments. `lanes` has the existing indices of each axis in scope (a unit axis's is 0-d)."""

    program: TileProgram
    memory: dict[str, Memory]
    extents: Mapping[str, int]
    scalars: Mapping[str, Tile]
    skip: bool
    check_indices: bool
    values: dict[str, Tile] = field(default_factory=dict)
    lanes: dict[str, Array] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    cache: dict[tuple[int, bool], tuple[Step, ...]] = field(default_factory=dict)
    iteration: int = 0
    grid: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        self.tainted = tainted_names(self.program)
        for w in self.program.whole:
            n = integer(w.extent, self.extents)
            self.lanes[w.name], self.first[w.name] = np.arange(n), 0

    # -- statements

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case Let():
                    self.values[s.name] = self.typed(s.value, s.type)
                case Store():
                    self.store(s)
                case Grid():
                    self.run_grid(s)
                case For():
                    self.run_for(s)
                case _:
                    assert_never(s)

    def typed(self, e: Expr, t: TileType) -> Tile:
        """The value of `e` as a tile with the declared order of axes; a fill takes them all."""
        made = self.value(e)
        data = spread(made, t.axes)
        if isinstance(e, Fill):
            data = np.broadcast_to(data, tuple(self.lanes[a].size for a in t.axes))
        return Tile(t.axes, convert(data, t.dtype))

    def run_grid(self, g: Grid) -> None:
        """Independent iterations; a grid inside another belongs to the iteration it stands in."""
        self.depth += 1
        if self.depth == 1:
            self.grid = self.iteration + 1
        for _ in self.points(g.axes):
            if self.depth == 1:
                self.iteration += 1
            self.body(g.body)
        self.depth -= 1

    def points(self, axes: tuple[LoopAxis, ...]) -> Iterator[None]:
        """Every combination of tiles, the last axis fastest."""
        if not axes:
            yield
            return
        for _ in self.tiles(axes[0]):
            yield from self.points(axes[1:])

    def tiles(self, a: LoopAxis, reverse: bool = False) -> Iterator[None]:
        """Enter the tiles of an axis one after another."""
        lo = 0 if a.lo is None else self.scalar(a.lo)
        hi = self.scalar(a.extent)
        hi = hi if a.hi is None else min(hi, self.scalar(a.hi))
        lo = max(lo, 0)
        size = a.tile or 1
        starts = range(lo // size * size, hi, size) if lo < hi else range(0)
        for start in reversed(starts) if reverse else starts:
            self.first[a.name] = start
            lanes = np.arange(max(start, lo), min(start + size, hi))
            self.lanes[a.name] = lanes if a.tile is not None else np.asarray(start)
            yield
        self.lanes.pop(a.name, None)
        self.first.pop(a.name, None)

    def run_for(self, loop: For) -> None:
        for c in loop.carries:
            self.values[c.name] = self.typed(c.init, c.type)
        for _ in self.tiles(loop.axis, loop.reverse):
            domain = [self.value(d).data for d in loop.domain]
            if self.skip and any(not d.any() for d in domain):
                continue
            if any(a.name == "full" for a in loop.attributes):
                self.check_full(loop, all(bool(d.all()) for d in domain))
            self.body(loop.body)
            self.values.update(self.yields(loop.carries, loop.yields))

    def check_full(self, loop: For, holds: bool) -> None:
        """What `@full` claims of this tile."""
        size, axis = loop.axis.tile or 1, loop.axis.name
        if self.lanes[axis].size != size or not holds:
            where = f"the tile of {axis} at {self.first[axis]}"
            raise TileFault(f"{self.program.name}: {where} is partial, but its loop is marked @full")

    def yields(self, carries: tuple[Carry, ...], yields: tuple[Expr, ...]) -> dict[str, Tile]:
        return {c.name: self.typed(y, c.type) for c, y in zip(carries, yields, strict=True)}

    # -- expressions

    def scalar(self, e: Expr) -> int:
        """A bound or an extent."""
        return int(self.value(e, bound=True).data)

    def value(self, e: Expr, bound: bool = False) -> Tile:
        key = (id(e), bound)
        program = self.cache.get(key)
        if program is None:
            program = self.cache[key] = steps(e, bound)
        done: list[Tile] = []
        guards: list[Tile | None] = [None]
        for step in program:
            match step:
                case Guard(below=below, wanted=wanted):
                    guards.append(_narrow(guards[-1], done[-1 - below], wanted))
                case Unguard():
                    guards.pop()
                case First(axis=a):
                    done.append(Tile((), np.asarray(self.first[a])))
                case _:
                    done.append(self.step(step, done, guards[-1]))
        return done[0]

    def step(self, e: Expr, done: list[Tile], guard: Tile | None) -> Tile:
        """One operation; takes its operands off the stack."""
        match e:
            case Const(value=v, dtype=dtype):
                return Tile((), np.asarray(v, NUMPY[dtype]))
            case Name(name=n):
                return self.values[n]
            case ScalarRef(name=n):
                return self.scalars[n]
            case ExtentRef(name=n):
                return Tile((), np.asarray(self.extents[n], np.int64))
            case AxisIndex(axis=a):
                return Tile((a,) if self.lanes[a].ndim else (), self.lanes[a])
            case Load(subscripts=s):
                return self.load(e, _pop(done, len(s)), guard)
            case Apply(op=op, args=args):
                axes, data = aligned(_pop(done, len(args)))
                return Tile(axes, elementwise(op, *data))
            case Cast(dtype=dtype):
                (x,) = _pop(done, 1)
                return Tile(x.axes, convert(x.data, dtype))
            case Dot(over=over):
                return _dot(over, *_pop(done, 2))
            case Reduce():
                return self.reduce(e, *_pop(done, 1))
            case Fill():
                return done.pop()

    def reduce(self, e: Reduce, x: Tile) -> Tile:
        over = tuple(x.axes.index(a) for a in e.over)
        data = reduced(e.fn, x.data, over)
        if e.fn in ("argmax", "argmin") and self.lanes[e.over[0]].size:
            data = self.lanes[e.over[0]][data]
        return Tile(tuple(a for a in x.axes if a not in e.over), data)

    # -- memory

    def place(
        self, tensor: str, subscripts: tuple[Expr, ...], at: list[Tile], guard: Tile | None
    ) -> tuple[tuple[str, ...], list[Array], Array]:
        """Axes of an access, an index array for each dimension (clamped), and where the element exists.

        Raises where a subscript that no tensor's value enters, or any with `check_indices`, leaves the tensor on a lane
        that the guard selects.
        """
        memory = self.memory[tensor]
        axes, index = aligned(at)
        wanted = np.asarray(True) if guard is None else self.over(guard, axes)
        exists: Array = np.asarray(True)
        for k, (e, i, n) in enumerate(zip(subscripts, index, memory.data.shape, strict=True)):
            inside = (i >= 0) & (i < n)
            if inside.all():
                continue
            if self.check_indices or not self.is_tainted(e):
                self.check(tensor, k, i, n, ~inside & wanted)
            exists = exists & inside
            index[k] = np.clip(i, 0, max(n - 1, 0))
        return axes, index, exists

    def over(self, guard: Tile, axes: tuple[str, ...]) -> Array:
        """A guard over the axes of an access: a lane matters if it does for any index of the other axes."""
        others = tuple(k for k, a in enumerate(guard.axes) if a not in axes)
        kept = Tile(tuple(a for a in guard.axes if a in axes), np.any(guard.data, axis=others))
        return spread(kept, axes)

    def check(self, tensor: str, dimension: int, index: Array, size: int, wrong: Array) -> None:
        index, wrong = np.broadcast_arrays(index, wrong)
        if wrong.any():
            found = int(index[wrong].flat[0])
            raise self.fault(tensor, f"subscript {dimension} is {found}, outside its size {size}")

    def fault(self, tensor: str, what: str) -> TileFault:
        where = ", ".join(f"{a} = {n}" for a, n in self.first.items())
        return TileFault(f"{self.program.name}: tensor {tensor!r}: {what} (at {where or 'the start'})")

    def load(self, e: Load, at: list[Tile], guard: Tile | None) -> Tile:
        memory = self.memory[e.tensor]
        axes, index, exists = self.place(e.tensor, e.subscripts, at, guard)
        shape = np.broadcast_shapes(*(i.shape for i in index))
        if memory.data.size == 0 and 0 not in shape:
            return Tile(
                axes, np.zeros(shape, memory.data.dtype)
            )  # lanes that a guard or a clamp leaves without meaning
        where = window(index)
        matters = exists if guard is None else exists & self.over(guard, axes)
        if memory.written is not None and not (memory.written[where].reshape(shape) | ~matters).all():
            raise self.fault(e.tensor, "an element is read that nothing wrote")
        if memory.writer is not None and self.depth:
            last = memory.writer[where].reshape(shape)
            if ((last >= self.grid) & (last != self.iteration) & matters).any():
                raise self.fault(e.tensor, "an element is read that another grid iteration writes")
        return Tile(axes, memory.data[where].reshape(shape))

    def store(self, s: Store) -> None:
        memory = self.memory[s.tensor]
        at = [self.value(x) for x in s.subscripts]
        axes, index, exists = self.place(s.tensor, s.subscripts, at, None)
        shape = tuple(self.lanes[a].size for a in axes)
        data = np.broadcast_to(spread(self.value(s.value), axes), shape)
        where = window(index) if exists.all() else tuple(index)
        if 0 in shape or not exists.any():
            return
        if any(isinstance(w, np.ndarray) for w in where):
            exists = np.broadcast_to(exists, shape)
            where = tuple(np.broadcast_to(i, shape)[exists] for i in index)
            where, data = self.gathered(s, where, data[exists])
        data = data.reshape(memory.data[where].shape)
        self.owned(s, memory, where)
        if s.mode == "add":
            if memory.written is not None and not memory.written[where].all():
                raise self.fault(s.tensor, "an element is added to that nothing wrote")
            data = elementwise("add", memory.data[where], data)
        memory.data[where] = convert(data, memory.param.dtype)
        if memory.written is not None:
            memory.written[where] = True

    def gathered(self, s: Store, where: tuple[Array, ...], data: Array) -> tuple[tuple[Array, ...], Array]:
        """Targets named once each: values added to the same target are summed first, setting one twice raises."""
        shape = self.memory[s.tensor].data.shape
        offsets, back = np.unique(np.ravel_multi_index(where, shape), return_inverse=True)
        if s.mode == "set":
            if offsets.size != data.size:
                raise self.fault(s.tensor, "two lanes of one store write one element")
            return where, data
        total = elementwise("add", np.zeros(offsets.shape, data.dtype), np.zeros((), data.dtype))
        np.add.at(total, back.ravel(), data.astype(total.dtype))
        return np.unravel_index(offsets, shape), total

    def owned(self, s: Store, memory: Memory, where: tuple[Any, ...]) -> None:
        """Note this iteration as the writer; raise if another of the same grid set an element there."""
        if not self.depth:
            return
        if memory.writer is None:
            memory.writer = np.zeros(memory.data.shape, np.int64)
        last = memory.writer[where]
        if ((last >= self.grid) & (last != self.iteration)).any():
            raise self.fault(s.tensor, "two grid iterations write one element")
        if s.mode == "set":
            memory.writer[where] = self.iteration

    def is_tainted(self, e: Expr) -> bool:
        return has_tensor_value(e, self.tainted)


def _pop(done: list[T], n: int) -> list[T]:
    taken = done[len(done) - n :]
    del done[len(done) - n :]
    return taken


def _narrow(guard: Tile | None, condition: Tile, wanted: bool) -> Tile:
    """The lanes of `guard` where the condition is as wanted."""
    data = condition.data if wanted else ~condition.data
    if guard is None:
        return Tile(condition.axes, data)
    axes, (a, b) = aligned([guard, Tile(condition.axes, data)])
    return Tile(axes, a & b)


def _dot(over: tuple[str, ...], a: Tile, b: Tile) -> Tile:
    letters = {x: chr(97 + k) for k, x in enumerate(dict.fromkeys(a.axes + b.axes))}
    axes = tuple(x for x in letters if x not in over)
    spec = ",".join("".join(letters[x] for x in t.axes) for t in (a, b))
    return Tile(axes, contracted(a.data, b.data, f"{spec}->{''.join(letters[x] for x in axes)}"))


def window(index: list[Array]) -> tuple[Any, ...]:
    """Index arrays as slices where each runs along its own dimension of the access: a view, not a gather."""
    out: list[Any] = []
    last = -1
    for i in index:
        if i.size == 0:
            return tuple(index)
        long = [k for k, n in enumerate(i.shape) if n > 1]
        start = int(i.flat[0])
        if not long:
            out.append(slice(start, start + 1) if i.ndim else start)
            continue
        if len(long) > 1 or long[0] <= last or (np.diff(i.ravel()) != 1).any():
            return tuple(index)
        last = long[0]
        out.append(slice(start, start + i.size))
    return tuple(out)


# ---------------------------------------------------------------- subscripts from tensors


def has_tensor_value(e: Expr, tainted: frozenset[str]) -> bool:
    return any(isinstance(x, Load) or (isinstance(x, Name) and x.name in tainted) for x in subexpressions(e))


def tainted_names(program: TileProgram) -> frozenset[str]:
    """Names whose values come from tensors: what makes a subscript one that is clamped."""
    names: frozenset[str] = frozenset()
    while True:
        found = frozenset(_tainted(program.body, names))
        if found <= names:
            return names
        names |= found


def _tainted(body: tuple[Stmt, ...], names: frozenset[str]) -> Iterator[str]:
    for s in body:
        match s:
            case Let(name=n, value=v):
                if has_tensor_value(v, names):
                    yield n
            case Grid():
                yield from _tainted(s.body, names)
            case For():
                yield from _tainted(s.body, names)
                for c, y in zip(s.carries, s.yields, strict=True):
                    if has_tensor_value(c.init, names) or has_tensor_value(y, names):
                        yield c.name
            case Store():
                pass
