"""Tile expressions as Numba text: the value of a tree at the current lanes of the loops around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...dsl.types import DType, promote
from ..interpreter.tile import integer
from ..tile_ir import (
    Apply,
    AxisIndex,
    Cast,
    Const,
    Expr,
    ExtentRef,
    Fill,
    Load,
    Name,
    Param,
    Reduce,
    ScalarRef,
    operands,
    subexpressions,
)
from .cpu_lanes import lane_axis
from .numba_text import (
    ATOM,
    BY_TYPE,
    CALLS,
    HELD,
    INFIX,
    LANES,
    NOT,
    UNARY,
    WHOLE_WIDE,
    Axis,
    Buffer,
    Code,
    Inline,
    Place,
    Signature,
    Variable,
    constant,
    held,
    in_python,
    operand_type,
    wrapped,
)
from .placement import Steps, Types, data_dependent, depends_on_data, run

LINE = 96
"""A longer expression is broken by naming a part of it."""


class Expressions:
    """Values of expressions over axes, tensors and places in scope, and the lines written so far."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.program = signature.program
        self.names = signature.names
        self.types = Types(self.program)
        self.tainted = data_dependent(self.program)
        self.params = {p.name: p for p in self.program.params}
        self.axes: dict[str, Axis] = {}
        self.places: dict[str, Place] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.launching = False
        self.columns = lane_axis(self.program)
        self.along: Axis | None = None
        """The axis of which LANES elements are computed at a time."""
        self.before_rows: dict[str, str] | None = None
        """In a loop over the rows of columns: variables with what only the column decides, by the buffer they were read
        from. A store to a row would keep the compiler from reading it once."""
        self._again: dict[int, Code | None] = {}
        """Parts of the expression at hand that occur in it more than once, by `id`, and their names once they have one."""
        self._guarded_reads: dict[int, tuple[Expr, bool]] = {}
        for w in self.program.whole:
            size = self.value(w.extent, bound=True).text
            self.axes[w.name] = Axis(w.name, w.extent, w.extent, "0", "0", self.names.new(w.name), size)

    # -- lines

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text)
        self.depth += 1

    def _view(self, b: Buffer, outer: tuple[str, ...]) -> str:
        """The part of a buffer at the current position of the outer axes, which come first in it."""
        lanes = [self.axes[x].lane for x in b.axes if x in outer]
        return f"{b.name}[{', '.join(lanes)}]" if lanes else b.name

    def _at(self, axes: Iterable[str]) -> str:
        """The current position in a buffer over these axes, as a tuple."""
        lanes = [self.axes[a].lane for a in axes]
        return f"({', '.join(lanes)}{',' if len(lanes) == 1 else ''})"

    def _sized(self, name: str, axis: Axis | None = None) -> str:
        """A function of vectors in the size that loops along an axis take, the one at hand; for `LANES` there is `WIDE`."""
        if not self._is_wide(axis or self.along):
            return name
        return "WIDE" if name == "LANES" else f"{name}_wide"

    def _is_wide(self, axis: Axis | None) -> bool:
        """Do loops along an axis take WIDE elements at a time? Where its tile has whole steps: then some operations wait
        while others run, and a buffer ends with a step."""
        size = self._length(axis.size) if axis is not None else None
        return size is not None and size % WHOLE_WIDE == 0

    def _length(self, size: int | Expr) -> int | None:
        """A size as a number, where statics give it."""
        if isinstance(size, int):
            return size
        known = dict(self.program.statics)
        leaves = [x for x in subexpressions(size) if not operands(x)]
        if any(
            not isinstance(x, Const) and (not isinstance(x, ExtentRef) or x.name not in known) for x in leaves
        ):
            return None
        return integer(size, known)

    @property
    def _remaining(self) -> str:
        """How many lanes of the current vector lie within the tile, or more."""
        assert self.along is not None
        return f"{self.along.count} - {self.along.lane}"

    # -- expressions

    def value(self, e: Expr, bound: bool = False) -> Code:
        """The expression at the current lanes. May first write lines that name its parts."""
        before = self._again
        self._again = dict.fromkeys(repeated(e)) if self.along is not None and not bound else {}
        code = run(self._value(e, "", bound))
        self._again = before
        return code

    def _named(self, c: Code) -> Code:
        """`c` under a name of its own."""
        if c.text.isidentifier():
            return c
        name = self.names.new("t")
        self.line(f"{name} = {c.text}")
        return replace(c, text=name, level=ATOM)

    def _value(self, e: Expr, guard: str, bound: bool) -> Steps[Code]:
        known = self._again.get(id(e))
        if known is not None:
            return known
        if isinstance(e, Apply) and e.op in ("where", "and", "or") and not bound and self._needs_guard(e):
            guarded: Code = yield self._guarded(e, guard)
            return guarded
        args: list[Code] = []
        if not isinstance(e, Load | Reduce):
            for x in operands(e):
                args.append((yield self._value(x, guard, bound)))
        code = self._code(e, args, guard, bound)
        if id(e) in self._again:
            code = self._again[id(e)] = self._named(code)
        return self._named(code) if len(code.text) > LINE and not bound else code

    def _code(self, e: Expr, args: list[Code], guard: str, bound: bool) -> Code:
        match e:
            case Const(value=v, dtype=dtype):
                return constant(v, dtype)
            case Name(name=n):
                return self._read(n)
            case ScalarRef(name=n):
                return Code(self.signature.scalars[n], self.types.scalars[n])
            case ExtentRef(name=n):
                return Code(self.signature.extents[n], DType.I64)
            case AxisIndex(axis=a):
                return self._position(self.axes[a], bound)
            case Load():
                return self._load(e, guard)
            case Cast(dtype=dtype):
                return self._cast(args[0], dtype)
            case Fill():
                return args[0]
            case Apply(op=op):
                return self._apply_operation(op, args)
        raise TypeError(f"{type(e).__name__} is no elementwise expression")

    def _position(self, axis: Axis, bound: bool) -> Code:
        if bound or not axis.lane:
            return Code(axis.origin, DType.I64)
        if self.along == axis:
            return Code(f"{self._sized('indices')}({axis.index})", DType.I64, lanes=True)
        return Code(axis.index, DType.I64, ATOM if axis.start == "0" else 14)

    def _read(self, name: str) -> Code:
        place = self.places[name]
        assert not isinstance(place, Inline)
        dtype = self.types.names[name].dtype
        if isinstance(place, Variable):
            return Code(place.name, dtype)
        if self.along and place.axes[-1] == self.along.name:
            text = f"{self._sized('load')}({place.name}, {self._at(place.axes)})"
            if self.before_rows is not None and len(place.axes) == 1:
                if place.name not in self.before_rows:
                    self.before_rows[place.name] = self.names.new(f"{place.name}_lanes")
                text = self.before_rows[place.name]
            return Code(text, dtype, lanes=True)
        return Code(f"{place.name}[{', '.join(self.axes[a].lane for a in place.axes)}]", dtype)

    # -- reads

    def tensor(self, name: str) -> str:
        return self.signature.tensors[name]

    def _load(self, e: Load, guard: str) -> Code:
        param, tensor = self.params[e.tensor], self.tensor(e.tensor)
        if self.along and e.subscripts and e.subscripts[-1] == AxisIndex(self.along.name):
            return self._load_lanes(e, param)
        texts = [self._subscript(ix, f"{tensor}.shape[{i}]") for i, ix in enumerate(e.subscripts)]
        text = f"{tensor}[{', '.join(texts) or '()'}]"
        if param.dtype in (DType.F16, DType.BF16):
            text = f"widen_{param.dtype}({text})"
        elif held(param.dtype) is not param.dtype:
            text = f"{HELD[held(param.dtype)]}({text})"
        condition = guard if guard and not self._always_inside(e, param) else ""
        if any(depends_on_data(ix, self.tainted) for ix in e.subscripts):
            condition = f"{tensor}.size and {condition}" if condition else f"{tensor}.size"
        if not condition:
            return Code(text, param.dtype)
        zero = constant(
            0.0 if param.dtype.is_float else False if param.dtype is DType.BOOL else 0, held(param.dtype)
        )
        return Code(f"({text} if {condition} else {zero.text})", param.dtype)

    def _load_lanes(self, e: Load, param: Param) -> Code:
        """Elements along a tensor's last axis."""
        load, tensor, lanes = self._sized("load_some"), self.tensor(e.tensor), self._remaining
        if any(depends_on_data(ix, self.tainted) for ix in e.subscripts):
            lanes = f"{lanes} if {tensor}.size else 0"
        code = Code(f"{load}({tensor}, {self._lanes_from(e)}, {lanes})", param.dtype)
        if param.dtype in (DType.F16, DType.BF16):
            code = replace(code, text=f"widen_{param.dtype}({code.text})")
        elif held(param.dtype) is not param.dtype:
            code = replace(code, text=f"{self._sized(LANES[held(param.dtype)])}({code.text})")
        return replace(code, lanes=True)

    def _lanes_from(self, e: Load) -> str:
        """The subscripts of the first of the lanes that follow along a tensor's last axis."""
        assert self.along is not None
        tensor = self.tensor(e.tensor)
        others = [self._subscript(ix, f"{tensor}.shape[{i}]") for i, ix in enumerate(e.subscripts[:-1])]
        return self._lane_index(others)

    def _lane_index(self, others: list[str]) -> str:
        """The place of the first lane, after the subscripts of the other axes, as a tuple."""
        assert self.along is not None
        return f"({', '.join([*others, self.along.index])}{'' if others else ','})"

    def _subscript(self, ix: Expr, extent: str = "") -> str:
        if isinstance(ix, AxisIndex):
            axis = self.axes[ix.axis]
            return f"at({axis.index})" if axis.lane and axis.start != "0" else axis.index
        code = self.value(ix)
        if extent and depends_on_data(ix, self.tainted):
            return f"at(clamp({code.text}, {extent}))"
        return code.text if isinstance(ix, Const) else f"at({code.text})"

    def _fits(self, ix: Expr, extent: Expr) -> bool:
        """Is the subscript an axis over just this extent?"""
        return isinstance(ix, AxisIndex) and self.axes[ix.axis].extent == extent

    def _always_inside(self, e: Load, param: Param) -> bool:
        return all(map(self._fits, e.subscripts, param.shape))

    def _needs_guard(self, e: Expr) -> bool:
        """Does `e` read an element that may lie outside its tensor where a condition does not hold?"""
        known = self._guarded_reads.get(id(e))
        if known is None:
            loads = (x for x in subexpressions(e) if isinstance(x, Load))
            known = e, any(not self._always_inside(x, self.params[x.tensor]) for x in loads)
            self._guarded_reads[id(e)] = known
        return known[1]

    def _guarded(self, e: Apply, guard: str) -> Steps[Code]:
        """`where`, `and`, `or` around such a read: the reads happen only where the condition selects them."""
        condition = self._named((yield self._value(e.args[0], guard, False))).text
        also = f"{guard} and " if guard else ""
        sides = (condition, f"not {condition}") if e.op == "where" else ("", condition)
        if e.op == "or":
            sides = ("", f"not {condition}")
        args = [Code(condition, DType.BOOL)]
        for x, side in zip(e.args[1:], sides[-len(e.args) + 1 :], strict=True):
            args.append((yield self._value(x, also + side, False)))
        return self._apply_operation(e.op, args)

    # -- operations

    def _apply_operation(self, op: str, args: list[Code]) -> Code:
        if op == "where" and self.launching:
            return Code(f"({args[1].text} if {args[0].text} else {args[2].text})", args[1].dtype)
        if op == "where":
            dtype = args[1].dtype if args[1].dtype is args[2].dtype else promote(args[1].dtype, args[2].dtype)
            sides = ", ".join(self._convert(a, held(dtype)).text for a in args[1:])
            return Code(f"select({args[0].text}, {sides})", dtype, lanes=any(a.lanes for a in args))
        if op == "not" and args[0].lanes:
            return Code(f"~{args[0].within(UNARY)}", DType.BOOL, UNARY, lanes=True)
        if op == "not":
            return Code(f"not {args[0].within(NOT)}", DType.BOOL, NOT)
        lanes = any(a.lanes for a in args)
        if op in ("and", "or"):
            sign, level = INFIX[op]
            text = f"{args[0].within(level)} {sign} {args[1].within(level + 1)}"
            return Code(text, DType.BOOL, level, lanes)
        return self._arithmetic(op, args, lanes)

    def _arithmetic(self, op: str, args: list[Code], lanes: bool) -> Code:
        dtype = operand_type(op, [a.dtype for a in args])
        args = [self._convert(a, dtype) for a in args]
        if op in ("lt", "le", "eq", "ne"):
            sign, level = INFIX[op]
            text = f"{args[0].within(level + 1)} {sign} {args[1].within(level + 1)}"
            return Code(text, DType.BOOL, level, lanes)
        if op in INFIX:
            sign, level = INFIX[op]
            text = f"{args[0].within(level)} {sign} {args[1].within(level + 1)}"
            return wrapped(Code(text, dtype, level, lanes))
        if op == "neg":
            return wrapped(Code(f"-{args[0].within(UNARY)}", dtype, UNARY, lanes))
        name = f"{op}_{dtype}" if op in BY_TYPE else CALLS[op]
        if dtype.is_float and op in ("floordiv", "mod"):
            name = f"{op}_float"
        if dtype.is_float and op == "abs":
            name = "fabs"
        if self.launching:
            return in_python(op, args)
        code = Code(f"{name}({', '.join(a.text for a in args)})", dtype, lanes=lanes)
        return wrapped(code) if op == "abs" else code

    def _convert(self, c: Code, dtype: DType, narrow: bool = False) -> Code:
        """The value held as `dtype` (implicit conversions only: to a wider type, or a float to a float)."""
        source = held(c.dtype)
        if source is held(dtype) or (narrow and c.dtype is DType.BOOL):
            return replace(c, dtype=dtype) if not narrow or dtype is source else c
        verb = self._sized(LANES[held(dtype)]) if c.lanes else HELD[held(dtype)]
        return Code(f"{verb}({c.text})", dtype, lanes=c.lanes)

    def _cast(self, c: Code, dtype: DType) -> Code:
        if c.dtype is dtype:
            return c
        if dtype is DType.BOOL:
            return Code(f"{c.within(7)} != {constant(0, held(c.dtype)).text}", dtype, 6, c.lanes)
        if dtype in (DType.F16, DType.BF16):
            wide = c if c.dtype.is_float else self._convert(c, DType.F64)
            return Code(f"round_{dtype}({wide.text})", dtype, lanes=c.lanes)
        if dtype.is_float or (held(c.dtype) is DType.I32 and dtype is DType.I64):
            return replace(self._convert(c, dtype), dtype=dtype)
        return Code(f"to_{dtype}({c.text})", dtype)


def repeated(e: Expr) -> set[int]:
    """The `id`s of reads and operations that are the same object in several places of an expression."""
    seen: set[int] = set()
    again: set[int] = set()
    pending = [e]
    while pending:
        x = pending.pop()
        if not isinstance(x, Load | Apply):
            pending += operands(x)
        elif id(x) in seen:
            again.add(id(x))
        else:
            seen.add(id(x))
            pending += operands(x) if isinstance(x, Apply) else ()
    return again
