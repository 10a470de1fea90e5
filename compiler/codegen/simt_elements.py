"""Element code of the simt tier: the loops of a thread over its elements, and the expressions in them as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...dsl.diagnostics import refuse
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
from .deal import Demand, Layout, Spread, deal
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
    Staged,
    Text,
    Value,
    grouped,
    holding,
    joined,
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


class Elements:
    """A program's tensors, axes and values by their names in the source, and the code for one element of a tile."""

    def __init__(self, program: TileProgram, target: CudaTarget) -> None:
        self.program, self.target = program, target
        self.statics = dict(program.statics)
        self.axes = tile_axes(program, self.statics)
        self._check_one_size()
        self.tiles = {a: self._tile_size(x) for a, x in self.axes.items()}
        self.facts = Facts(
            {p.name: p.dtype for p in program.params}, {s.name: s.dtype for s in program.scalars}, self.tiles
        )
        self.contexts = list(contexts(program, self.facts))
        self.deal = deal((Demand(c.kind, c.axes) for c in self.contexts if c.kind != "operand"), self.tiles)
        self.text, self.names = Text(), Names()
        self.live: dict[str, LoopAxis] = {w.name: self.axes[w.name] for w in program.whole}
        self.values: dict[str, Value] = {}
        self.types: Types = {}
        self.from_tensors = {
            c.name for s in statements(program.body) if isinstance(s, For) for c in s.carries
        }
        self.coordinates: dict[tuple[int, int], str] = {}
        self._give_names()

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

    def open(self, layout: Layout, exprs: list[Expr], exists: set[str], outer: Point) -> Point:
        """Open the loops of a layout, with the index and existence of each axis that the expressions need."""
        indexed, loaded_over = self._axes_needed(exprs)
        counters = dict(outer.counters)
        for axis, spread in zip(layout.axes, layout.spreads, strict=True):
            if axis not in counters:
                counters[axis] = self.axis_names[axis].counter if spread.count > 1 else "0"
                if spread.count > 1:
                    self.text.line(f"for {counters[axis]} in range({spread.count}):")
                    self.text.depth += 1
            self._index(Point(layout, counters), axis, axis in indexed, axis in exists | loaded_over)
        return Point(joined(outer.layout, layout), counters)

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

    def lane_checks(self, at: Point, axis: str) -> list[str]:
        """What has to hold for the lane to exist; empty where it always does."""
        a, spread, names = self.live[axis], at.layout.spread(axis), self.axis_names[axis]
        checks = [] if spread.even else [f"{grouped(self.position(at, axis))} < {spread.tile}"]
        if axis in self._whole():
            return checks
        extent = static_value(a.extent, self.statics)
        if a.hi is not None:
            checks.append(f"{names.index} < {names.hi}")
        elif extent is None or extent % spread.tile:
            checks.append(f"{names.index} < {self.emit(a.extent, NOWHERE).operand}")
        if starts_late(a):
            checks.append(f"{names.index} >= {names.lo}")
        return checks

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
        if not spread.bits:
            return at.counters[axis]
        coordinate = self.coordinate(spread)
        return coordinate if spread.count == 1 else f"{coordinate} + {spread.step} * {at.counters[axis]}"

    def coordinate(self, spread: Spread) -> str:
        key = (spread.low, spread.bits)
        if key not in self.coordinates:
            side = {0: "column", self.deal.column_bits: "row"}.get(spread.low, f"part{spread.low}_")
            self.coordinates[key] = self.names.fresh(f"{side}{spread.step}")
        return self.coordinates[key]

    def spot(self, staged: Staged, at: Point) -> str:
        """The element of a staged tile at a point."""
        terms = []
        for axis, pitch in zip(staged.axes, staged.pitches, strict=True):
            position = self.position(at, axis)
            terms.append(position if pitch == 1 else f"{grouped(position)} * {pitch}")
        return f"{staged.buffer.name}[{' + '.join(terms)}]"

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
                return operation(op, args)
        raise TypeError(f"{type(e).__name__} is not elementwise")

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
            text = self.spot(staged_home(value), at)
        return holding(text, value.type.dtype)

    def _load(self, e: Load, args: list[Code], at: Point) -> Code:
        """An element of a tensor, 0 on lanes that do not exist or fall outside it."""
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

    def offset(self, p: Param, where: list[Code]) -> str:
        """The flat offset in elements, 64 bits wide."""
        terms = [f"{c.operand} * {s}" for c, s in zip(where, self.strides[p.name], strict=True)]
        return " + ".join(terms) or "0"


def _work(e: Expr) -> int:
    """Instructions of one node, about."""
    if isinstance(e, Load):
        return 10
    return WORK.get(e.op, 1) if isinstance(e, Apply) else 0
