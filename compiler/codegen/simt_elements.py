"""Element code of the simt tier: the loops of a thread over its elements, and the expressions in them as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...dsl.diagnostics import refuse
from ...dsl.records import dataclass
from ...dsl.types import DType
from ..target import CudaTarget
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Expr,
    ExtentRef,
    Fill,
    For,
    Load,
    LoopAxis,
    Name,
    Param,
    ScalarRef,
    TileProgram,
    operands,
    statements,
    subexpressions,
)
from .deal import Deal, Demand, Layout, Spread, deal
from .scalar_cuda import (
    Code,
    cast,
    constant,
    convert,
    loaded,
    operation,
)
from .simt_source import (
    NOWHERE,
    AxisNames,
    Names,
    Point,
    Registers,
    Staged,
    Text,
    Value,
    grouped,
    holding,
    joined,
    local_array,
    staged_home,
    starts_late,
)
from .tile_types import (
    Facts,
    Types,
    contexts,
    leaves,
    loop_axes,
    postorder,
    static_value,
    tile_axes,
)

WIDEST_LINE = 76  # a longer expression is cut into named parts
# How many instructions of a loop nest NVVM still unrolls, about; the one for sm_100 and later unrolls less.
LONGEST_UNROLLED_BEFORE_SM_100, LONGEST_UNROLLED = 3000, 1000
# Instructions of an operation, about; 1 where nothing is said.
WORK = {
    "erf": 60,
    "pow": 120,
    "tanh": 40,
    "sin": 120,
    "cos": 120,
    "exp": 20,
    "exp2": 8,
    "log": 30,
    "log2": 30,
    "div": 10,
}


@dataclass(frozen=True)
class Wide:
    """What a variant of a kernel takes for granted: each extent of `multiples` is a multiple of that number, and the last
    axis of every tensor whose rows are moved in `run` elements at once is packed and aligned. run = 1: nothing is."""

    run: int = 1
    multiples: tuple[tuple[str, int], ...] = ()
    at_most: tuple[tuple[str, int], ...] = ()
    """Extents that one tile of this size holds."""
    exact: tuple[tuple[str, int], ...] = ()
    """Extents that are no larger, so that f32 holds their indices and sums of a few."""

    def divides(self, extent: Expr, size: int) -> bool:
        """Is an extent known to be a multiple of `size`?"""
        return isinstance(extent, ExtentRef) and dict(self.multiples).get(extent.name, 1) % size == 0

    def holds(self, a: LoopAxis) -> bool:
        """Is one tile known to hold the whole axis?"""
        bounded = a.lo is not None or a.hi is not None or a.tile is None
        return (
            not bounded
            and isinstance(a.extent, ExtentRef)
            and dict(self.at_most).get(a.extent.name) == a.tile
        )


NARROW = Wide()


class Elements:
    """A program's tensors, axes and values by their names in the source, and the code for one element of a tile."""

    def __init__(self, program: TileProgram, target: CudaTarget, wide: Wide = NARROW) -> None:
        self.program, self.target, self.wide = program, target, wide
        self.statics = dict(program.statics)
        self.axes = self.tile_axes()
        self._check_one_size()
        self.tiles = {a: self._tile_size(x) for a, x in self.axes.items()}
        self.facts = Facts(
            {p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, self.tiles
        )
        self.contexts = list(contexts(program, self.facts))
        self.deal = self.dealt([Demand(c.kind, c.axes) for c in self.contexts if c.kind != "operand"])
        self.rounds = all(p.dtype in (DType.F16, DType.BF16) for p in program.params if p.mode != "in")
        self.full: set[str] = set()  # axes of open loops that visit whole tiles only
        self.wide_tensors: dict[str, None] = {}
        self.ahead: dict[Load, Registers] = {}  # loads already in registers
        self.text, self.names = Text(), Names()
        self.live: dict[str, LoopAxis] = {w.name: self.axes[w.name] for w in program.whole}
        self.values: dict[str, Value] = {}
        self.types: Types = {}
        self.from_tensors = {
            c.name for s in statements(program.body) if isinstance(s, For) for c in s.carries
        }
        self.coordinates: dict[tuple[int, int, int, int, int], str] = {}
        self._give_names()

    def dealt(self, demands: list[Demand]) -> Deal:
        return deal(demands, self.tiles, self.wide.run)

    def _give_names(self) -> None:
        """Parameters first, so that these keep their names."""
        program, fresh = self.program, self.names.fresh
        self.name = fresh(program.name)
        self.extents = {e: fresh(e) for e in program.extents}
        self.scalars = {s.name: fresh(s.name) for s in program.scalars}
        self.tensors = {p.name: fresh(p.name) for p in program.params}
        self.strides = {
            p.name: tuple(fresh(f"{p.name}_s{i}") for i in range(len(p.shape))) for p in program.params
        }
        every = dict.fromkeys([*(a.name for a in loop_axes(program)), *self.axes])
        self.axis_names = {a: self._name_axis(a) for a in every}

    def _check_one_size(self) -> None:
        """An axis name stands for one tile size in a program; its bounds may differ from loop to loop."""
        for a in loop_axes(self.program):
            if a.name in self.axes and a.tile != self.axes[a.name].tile:
                raise refuse(
                    "E0911",
                    f"`{self.program.name}` visits `{a.name}` by {a.tile or 1} and by {self.axes[a.name].tile}",
                    None,
                    help="give the axis of each loop a name of its own",
                )

    def _tile_size(self, a: LoopAxis) -> int:
        if a.tile is None:
            raise refuse(
                "E0910", f"axis `{a.name}` is whole, but its extent is not known at compile time", None,
                help=f"name its extent under `static` in the schedule, or give `tile {a.name} by …`",
            )  # fmt: skip
        return a.tile

    def _name_axis(self, axis: str) -> AxisNames:
        fresh = self.names.fresh
        return AxisNames(
            fresh(axis),
            fresh(f"{axis}_0"),
            fresh(f"{axis}_i"),
            fresh(f"{axis}_ok"),
            fresh(f"{axis}_lo"),
            fresh(f"{axis}_hi"),
        )

    def tile_axes(self) -> dict[str, LoopAxis]:
        """Every axis that tiles span, with the size of its tiles."""
        return tile_axes(self.program, self.statics)

    def _whole(self) -> set[str]:
        return {w.name for w in self.program.whole}

    def nest(self, layout: Layout, exprs: Iterable[Expr], exists: Iterable[str] = ()) -> Iterator[Point]:
        """The loops over a thread's elements, opened for each point given.

        Long bodies get several points: their outermost loops are written out, for otherwise NVVM would keep them as
        loops, and registers cannot be indexed.
        """
        depth, exprs = self.text.depth, list(exprs)
        for fixed in self._written_out(layout, exprs):
            yield self.open(layout, exprs, set(exists), replace(NOWHERE, counters=fixed))
            self.text.depth = depth

    def _written_out(self, layout: Layout, exprs: list[Expr]) -> Iterator[dict[str, str]]:
        """Counters of the loops that are written out, one set for each copy of the rest."""
        limit = LONGEST_UNROLLED_BEFORE_SM_100 if self.target.capability < (10, 0) else LONGEST_UNROLLED
        work = layout.elements * sum(_work(x) for e in exprs for x in leaves(e))
        copies: list[dict[str, str]] = [{}]
        for axis, spread in zip(layout.axes, layout.spreads, strict=True):
            if work <= limit:
                break
            copies = [{**c, axis: str(i)} for c in copies for i in range(spread.count)]
            work //= spread.count
        yield from copies

    def open(
        self, layout: Layout, exprs: list[Expr], exists: set[str], outer: Point, by_run: str | None = None
    ) -> Point:
        """Open the loops of a layout, with the index and existence of each axis that the expressions need; along the axis
        `by_run` once for each run."""
        indexed, loaded_over = self._axes_needed(exprs)
        counters = dict(outer.counters)
        for axis, spread in zip(layout.axes, layout.spreads, strict=True):
            count = spread.count // (spread.run if axis == by_run else 1)
            if axis not in counters:
                counters[axis] = self.axis_names[axis].counter if count > 1 else "0"
                if count > 1:
                    self.text.line(f"for {counters[axis]} in range({count}):")
                    self.text.depth += 1
            self._index(Point(layout, counters, by_run), axis, axis in indexed, axis in exists | loaded_over)
        return Point(joined(outer.layout, layout), counters, by_run)

    def _axes_needed(self, exprs: list[Expr]) -> tuple[set[str], set[str]]:
        """Axes whose index the expressions name, and axes that loads span."""
        every = [x for e in exprs for x in leaves(e)]
        loads = [x for x in every if isinstance(x, Load)]
        spanned = {a for x in loads for a in self.facts.type_of(x, self.types).axes}
        return {x.axis for x in every if isinstance(x, AxisIndex)}, spanned

    def _index(self, at: Point, axis: str, indexed: bool, exists: bool) -> None:
        names, parts = self.axis_names[axis], self.lane_checks(at, axis) if exists else []
        uses = any(names.index in p for p in parts)
        if indexed or uses:
            first = "" if axis in self._whole() else f"{names.first} + "
            self.text.line(f"{names.index} = {first}{self.position(at, axis)}")
        if parts:
            self.text.line(f"{names.exists} = {' and '.join(parts)}")

    def lane_checks(self, at: Point, axis: str, together: int = 1) -> list[str]:
        """What has to hold for the lane to exist; empty where it always does. Of lanes that are moved together, and of a
        point's run, one has to."""
        a, spread, names = self.live[axis], at.layout.spread(axis), self.axis_names[axis]
        checks = [] if spread.even else [f"{grouped(self.position(at, axis))} < {spread.tile}"]
        if axis in self.full:
            return checks
        if a.hi is not None:
            checks.append(f"{names.index} < {names.hi}")
        elif self.has_tail(a, spread.tile):
            end = self.emit(a.extent, NOWHERE).operand
            checks.append(f"{self._run_index(at, axis)} < {end}")
        if starts_late(a):
            after = (spread.run if at.by_run == axis else together) - 1
            checks.append(
                f"{names.index} + {after} >= {names.lo}" if after else f"{names.index} >= {names.lo}"
            )
        return checks

    def has_tail(self, a: LoopAxis, tile: int) -> bool:
        """May the last tile of an axis reach beyond its extent?"""
        extent = static_value(a.extent, self.statics)
        if extent is not None:
            return extent > 0 and extent % tile != 0
        return not self.wide.divides(a.extent, tile)

    def _run_index(self, at: Point, axis: str) -> str:
        """What a tail's check looks at: where a run exists as a whole, its first index, so that one check serves it."""
        spread, names = at.layout.spread(axis), self.axis_names[axis]
        whole = spread.run > 1 and self.wide.divides(self.live[axis].extent, spread.run)
        if not whole or at.by_run == axis:
            return names.index
        return f"{names.first} + {self.run_start(at, axis)}"

    def conditions(self, at: Point, axes: Iterable[str]) -> list[str]:
        """The existence flags of those axes that have one."""
        return [self.axis_names[a].exists for a in axes if a in at.layout.axes and self.lane_checks(at, a)]

    def inside(self, at: Point, axes: Iterable[str]) -> list[str]:
        """Positions past the tile's size, which uneven spreads have, have no place in a buffer."""
        uneven = [a for a in axes if not at.layout.spread(a).even]
        return [f"{grouped(self.position(at, a))} < {at.layout.spread(a).tile}" for a in uneven]

    def position(self, at: Point, axis: str) -> str:
        """The position within the tile."""
        spread = at.layout.spread(axis)
        if spread.step == 1:
            return at.counters[axis]
        if at.by_run == axis:
            return self._run_at(spread, at.counters[axis])
        if spread.run > 1:
            return f"{self.run_start(at, axis)} + ({at.counters[axis]} & {spread.run - 1})"
        coordinate = self.coordinate(spread)
        return coordinate if spread.count == 1 else f"{coordinate} + {spread.stride} * {at.counters[axis]}"

    def run_start(self, at: Point, axis: str) -> str:
        """The position at which the run of a point's element starts."""
        spread = at.layout.spread(axis)
        return self._run_at(spread, f"({at.counters[axis]} >> {spread.run.bit_length() - 1})")

    def _run_at(self, spread: Spread, number: str) -> str:
        own = f"{self.coordinate(spread)} * {spread.run}"
        return own if spread.count == spread.run else f"{own} + {spread.run * spread.step} * {number}"

    def coordinate(self, spread: Spread) -> str:
        key = (spread.low, spread.bits, spread.upper_low, spread.upper_bits, spread.upper_stride)
        if key not in self.coordinates:
            rows = {0: "column", self.deal.column_bits: "row"}
            side = rows.get(spread.low, f"part{spread.low}_")
            self.coordinates[key] = self.names.fresh(f"{side}{spread.step}")
        return self.coordinates[key]

    def spot(self, staged: Staged, at: Point) -> str:
        """The element of a staged tile at a point."""
        if staged.chunked:
            row, column = (self.position(at, a) for a in staged.axes)
            return f"{staged.buffer.name}[{staged.place(row, column)}]"
        terms = []
        for axis, pitch in zip(staged.axes, staged.pitches, strict=True):
            position = self.position(at, axis)
            terms.append(position if pitch == 1 else f"{grouped(position)} * {pitch}")
        return f"{staged.buffer.name}[{' + '.join(terms)}{staged.offset}]"

    def owners(self, layout: Layout) -> list[str]:
        """Of threads that hold copies one acts."""
        spare = (self.deal.threads - 1) & ~layout.mask
        if not spare:
            return []
        return ["thread == 0"] if spare == self.deal.threads - 1 else [f"thread & {spare} == 0"]

    def guarded(self, conditions: list[str], *actions: str) -> None:
        """Lines under conditions."""
        if conditions:
            self.text.line(f"if {' and '.join(conditions)}:")
        self.text.depth += bool(conditions)
        for action in actions:
            self.text.line(action)
        self.text.depth -= bool(conditions)

    def assign(self, name: str, code: Code) -> str:
        variable = self.names.fresh(name)
        self.text.line(f"{variable} = {code.text}")
        return variable

    def cut(self, code: Code, at_most: int = WIDEST_LINE) -> Code:
        """A long expression becomes a variable."""
        if len(code.text) <= at_most:
            return code
        name = self.names.fresh("t")
        self.text.line(f"{name} = {code.text}")
        return replace(code, text=name, atom=True)

    def emit(self, e: Expr, at: Point, widest: int = WIDEST_LINE) -> Code:
        """The value of an elementwise expression at a point; loads and long parts become lines before it."""
        done: list[Code] = []
        for node in postorder(e):
            arity = len(operands(node))
            args = done[len(done) - arity :]
            del done[len(done) - arity :]
            done.append(self.cut(self._node(node, args, at), widest))
        return done[0]

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        match e:
            case Const(value=value, dtype=dtype):
                return constant(value, dtype)
            case ScalarRef(name=name):
                return holding(self.scalars[name], self.facts.scalars[name])
            case ExtentRef(name=name):
                return Code(
                    str(self.statics[name]) if name in self.statics else self.extents[name], DType.I64
                )
            case AxisIndex(axis=axis):
                return Code(self._axis_index(axis, at), DType.I64)
            case Name(name=name):
                return self._read(self.values[name], at)
            case Load():
                return self._load(e, args, at)
            case Cast(dtype=dtype):
                return cast(args[0], dtype)
            case Fill():
                return args[0]
            case Apply(op=op):
                return self._near(operation(op, args))
        raise TypeError(f"{type(e).__name__} is not elementwise")

    def _near(self, x: Code) -> Code:
        """Results that are stored in 16 bits need no division and exponential that are right to the last of 24."""
        if not self.rounds or x.dtype is not DType.F32:
            return x
        left, slash, right = x.text.partition(" / ")
        if slash and not x.atom and " / " not in right:
            return Code(f"{left} * reciprocal_f32({right})", DType.F32, False)
        for name in ("exp_f32(", "exp2_f32("):
            if x.text.startswith(name):
                return replace(x, text=f"near_{x.text}")
        return x

    def _axis_index(self, axis: str, at: Point) -> str:
        """A lane's index; outside the axis's loops (in bounds) a tile's first."""
        names = self.axis_names[axis]
        is_tile = axis in self.tiles and axis not in at.layout.axes
        return ("0" if axis in self._whole() else names.first) if is_tile else names.index

    def _read(self, value: Value, at: Point) -> Code:
        if value.scalar is not None:
            text = value.scalar
        elif value.registers is not None and value.registers.layout.serves(at.layout):
            text = f"{value.registers.array}[{at.element(value.registers.layout)}]"
        else:
            staged = staged_home(value)
            text = self.spot(staged, at)
            if staged.buffer.dtype in (DType.F16, DType.BF16):
                return loaded(text, staged.buffer.dtype)
        return holding(text, value.type.dtype)

    def _load(self, e: Load, args: list[Code], at: Point) -> Code:
        """An element of a tensor, 0 on lanes that do not exist or fall outside it."""
        if e in self.ahead:
            return self._loaded_ahead(e, at)
        param = self.program.param(e.tensor)
        where = [
            self.clamped(param, i, x, a) for i, (x, a) in enumerate(zip(e.subscripts, args, strict=True))
        ]
        axes = self.facts.type_of(e, self.types).axes
        loose = [not self.depends_on_tensors(x) for x in e.subscripts]
        conditions = self.conditions(at, axes) + self.within(param, e.subscripts, where, loose)
        conditions += self.nonempty(param, e.subscripts)
        value = loaded(f"{self.tensors[e.tensor]}[{self.offset(param, where)}]", param.dtype)
        name = self.names.fresh(f"{e.tensor}_value")
        if not conditions:
            self.text.line(f"{name} = {value.text}")
        else:
            self.text.line(f"{name} = {constant(0, param.dtype).text}")
            self.guarded(conditions, f"{name} = {value.text}")
        return holding(name, param.dtype)

    def _loaded_ahead(self, e: Load, at: Point) -> Code:
        """The same from registers, which are 0 only beyond the tensor."""
        registers, dtype = self.ahead[e], self.program.param(e.tensor).dtype
        text = f"{registers.array}[{at.element(registers.layout)}]"
        bounded = [
            a for a in registers.layout.axes if self.live[a].hi is not None or self.live[a].lo is not None
        ]
        lanes = self.conditions(at, [a for a in bounded if a not in self.full])
        if lanes:
            text = f"({text} if {' and '.join(lanes)} else {constant(0, dtype).text})"
        return holding(text, dtype)

    def runs_along(self, tensor: str, subscripts: tuple[Expr, ...], layout: Layout) -> str | None:
        """The axis along which a tensor is moved a run at a time: it is the last subscript, and no other mentions it."""
        param, last = self.program.param(tensor), subscripts[-1] if subscripts else None
        if not isinstance(last, AxisIndex) or last.axis not in layout.axes:
            return None
        spread = layout.spread(last.axis)
        others = {x.axis for s in subscripts[:-1] for x in subexpressions(s) if isinstance(x, AxisIndex)}
        moved = spread.run * param.dtype.bytes
        able = param.dtype is not DType.BOOL and moved >= 4 and moved % min(moved, 16) == 0
        if spread.run == 1 or not able or last.axis in others or not self.covers(last, param.shape[-1]):
            return None
        extent = self.live[last.axis].extent
        static = static_value(extent, self.statics)
        whole = static % spread.run == 0 if static is not None else self.wide.divides(extent, spread.run)
        return last.axis if whole else None

    def load_ahead(self, e: Load, layout: Layout) -> None:
        """Bring what a thread needs of a tensor into registers, a run at a time."""
        own = layout.restrict(self.facts.type_of(e, self.types).axes)
        axis = self.runs_along(e.tensor, e.subscripts, own)
        if axis is None or e in self.ahead or any(self.depends_on_tensors(x) for x in e.subscripts):
            return
        param = self.program.param(e.tensor)
        if not all(self.covers(x, param.shape[i]) or not self._spans(x) for i, x in enumerate(e.subscripts)):
            return
        self.wide_tensors[e.tensor] = None
        own = own.with_last(axis)  # a run's elements lie side by side
        run, width = own.spread(axis).run, min(16, own.spread(axis).run * param.dtype.bytes)
        array = self.names.fresh(f"{e.tensor}_ahead")
        self.text.line(f"{array} = {local_array(param.dtype, own.elements)}")
        depth = self.text.depth
        at = self.open(own, [e], set(own.axes), NOWHERE, axis)
        where = [convert(self.cut(self.emit(x, at), 40), DType.I64) for x in e.subscripts]
        offset = self.cut(Code(self.offset(param, where, packed=True), DType.I64), 0).text
        first = self.cut(Code(at.element(own), DType.I64), 0).text
        pieces = range(0, run, width // param.dtype.bytes)
        lines = [
            f"load{width}_{param.dtype}({self.tensors[e.tensor]}, {offset} + {i}, {array}, {first} + {i})"
            for i in pieces
        ]
        inside = self.conditions(at, own.axes) + self.within(
            param, e.subscripts, where, [self._spans(x) is False for x in e.subscripts]
        )
        if inside:
            zero = constant(0, param.dtype).text
            self.text.line(f"if {' and '.join(inside)}:")
            for line in lines:
                self.text.line("    " + line)
            self.text.line("else:")
            spot = self.names.fresh("i")
            self.text.line(f"    for {spot} in range({run}):")
            self.text.line(f"        {array}[{first} + {spot}] = {zero}")
        else:
            for line in lines:
                self.text.line(line)
        self.text.depth = depth
        self.ahead[e] = Registers(array, own)

    def _spans(self, e: Expr) -> bool:
        return bool(self.facts.type_of(e, self.types).axes)

    def clamped(self, p: Param, i: int, subscript: Expr, code: Code) -> Code:
        """A subscript from a tensor's value is clamped to the extent."""
        code = convert(code, DType.I64)
        if not self.depends_on_tensors(subscript):
            return self.cut(code, 40)
        size = self.emit(p.shape[i], NOWHERE)
        return self.cut(Code(f"min(max({code.text}, 0), {size.text} - 1)", DType.I64), 0)

    def depends_on_tensors(self, subscript: Expr) -> bool:
        return any(
            isinstance(x, Load) or (isinstance(x, Name) and x.name in self.from_tensors)
            for x in subexpressions(subscript)
        )

    def nonempty(self, p: Param, subscripts: tuple[Expr, ...]) -> list[str]:
        """A clamped subscript finds nothing in an empty tensor."""
        sizes = [p.shape[i] for i, x in enumerate(subscripts) if self.depends_on_tensors(x)]
        dynamic = [s for s in sizes if not static_value(s, self.statics)]
        return [f"{self.emit(s, NOWHERE).operand} > 0" for s in dynamic]

    def within(
        self, p: Param, subscripts: tuple[Expr, ...], where: list[Code], loose: list[bool]
    ) -> list[str]:
        """Bounds checks of the loose subscripts that are not an axis over the same extent."""
        checks = []
        for i, (x, code) in enumerate(zip(subscripts, where, strict=True)):
            if not loose[i] or self.covers(x, p.shape[i]):
                continue
            size = self.emit(p.shape[i], NOWHERE)
            checks.append(f"0 <= {code.operand} < {size.operand}")
        return checks

    def covers(self, subscript: Expr, size: Expr) -> bool:
        """Is an existing lane's index always inside a dimension of this size?"""
        if not isinstance(subscript, AxisIndex):
            return False
        axis = self.live.get(subscript.axis)
        if axis is None:
            return False
        mine, its = static_value(axis.extent, self.statics), static_value(size, self.statics)
        return axis.extent == size or (mine is not None and its is not None and mine <= its)

    def offset(self, p: Param, where: list[Code], packed: bool = False) -> str:
        """The flat offset in elements, 64 bits wide; `packed`: the last axis is."""
        terms = [f"{c.operand} * {s}" for c, s in zip(where, self.strides[p.name], strict=True)]
        if packed and where:
            terms[-1] = where[-1].operand
        return " + ".join(terms) or "0"


def _work(e: Expr) -> int:
    """Instructions of one node, about."""
    if isinstance(e, Load):
        return 10
    return WORK.get(e.op, 1) if isinstance(e, Apply) else 0
