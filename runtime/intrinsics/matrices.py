"""Matrices as operands of products and copies, and the LLVM functions of a generated module that work on them.

A `Matrix` is an address in a buffer or tensor and the distances between its rows and between its columns. Distances known
when the code is made are part of its type and become immediate offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ...dsl.records import dataclass
from .vectors import I8, I64, array_item

Builder = Any
_tools: Any = cgutils
_register: Any = register_model
_structure: Any = models.StructModel


class Matrix(types.Type):
    """Elements in memory with the distance in bytes from row to row and from column to column, None where only the value
    knows it."""

    def __init__(self, dtype: Any, row: int | None, column: int | None) -> None:
        self.dtype, self.row, self.column = dtype, row, column
        super().__init__(name=f"matrix({dtype}, {row}, {column})")


@_register(Matrix)
class _MatrixModel(_structure):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        fields = [("address", types.voidptr), ("row", types.int64), ("column", types.int64)]
        super().__init__(manager, kind, fields)


def _literal(kind: Any) -> int:
    return int(kind.literal_value)


@intrinsic(prefer_literal=True)
def matrix(typing: Any, x: Any, index: Any, row: Any, column: Any, distance: Any) -> Any:
    """The part of array `x` that starts at subscripts `index` and runs over its axes number `row` and `column`. Where x is
    C-contiguous and `distance` is not 0, that many elements lie between neighbours on the one of the two that is not x's
    last axis."""
    last, dense, size = x.ndim - 1, x.layout == "C", x.dtype.bitwidth // 8
    steps = [_literal(row), _literal(column)]
    known = {last: size} if dense else {}
    if dense and _literal(distance):
        known |= {s: _literal(distance) * size for s in steps if s != last}
    kind = Matrix(x.dtype, *(known.get(s) for s in steps))

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        pointer, stride = array_item(context, b, x, args[0], sig.args[1], args[1])
        made = _tools.create_struct_proxy(kind)(context, b)
        made.address = b.bitcast(pointer, I8.as_pointer())
        made.row, made.column = (stride(s) for s in steps)
        return made._getvalue()

    return kind(x, index, row, column, distance), emit


# ---------------------------------------------------------------- functions of a module


@dataclass(frozen=True)
class Side:
    """A matrix inside a function: its address, and its distances as i64, constants where they are known."""

    address: Any
    row: Any
    column: Any

    @property
    def turned(self) -> Side:
        """The transpose."""
        return Side(self.address, self.column, self.row)

    def at(self, b: Builder, row: Any, column: Any) -> Side:
        return Side(moved(b, self.address, row, self.row, column, self.column), self.row, self.column)


def moved(b: Builder, address: Any, *steps: Any) -> Any:
    """An address after steps, given as counts and distances in turn."""
    for count, distance in zip(steps[::2], steps[1::2], strict=True):
        address = b.gep(address, [b.mul(count, distance)], source_etype=I8)
    return address


def i64(value: int) -> Any:
    return ir.Constant(I64, value)


def call_once(
    context: Any,
    b: Builder,
    name: str,
    kinds: list[Any],
    args: list[Any],
    counts: list[Any],
    write: Callable[..., None],
) -> Any:
    """Call the module's function of this name on matrices and i64 counts; `write(builder, sides, counts)` makes its body
    where the module has none yet."""
    proxies = [_tools.create_struct_proxy(k)(context, b, value=v) for k, v in zip(kinds, args, strict=True)]
    flat = [x for p in proxies for x in (p.address, p.row, p.column)] + counts
    full = f"{name}.{'.'.join(f'{k.dtype}_{k.row}_{k.column}' for k in kinds)}"
    function = b.module.globals.get(full)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [v.type for v in flat]), full)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        sides = []
        for i, k in enumerate(kinds):
            address, row, column = function.args[3 * i : 3 * i + 3]
            sides.append(
                Side(
                    address,
                    row if k.row is None else i64(k.row),
                    column if k.column is None else i64(k.column),
                )
            )
        write(inner, sides, list(function.args[3 * len(kinds) :]))
        inner.ret_void()
    b.call(function, flat)
    return context.get_dummy_value()


def routine(b: Builder, name: str, sides: list[Side], counts: list[Any], write: Callable[..., None]) -> None:
    """Call the module's function of this name on matrices and counts; `write(builder, sides, counts)` makes its body where
    the module has none yet."""
    flat = [x for s in sides for x in (s.address, s.row, s.column)] + counts
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(ir.VoidType(), [v.type for v in flat]), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        write(
            inner,
            [Side(*function.args[3 * i : 3 * i + 3]) for i in range(len(sides))],
            list(function.args[3 * len(sides) :]),
        )
        inner.ret_void()
    b.call(function, flat)


@contextmanager
def steps(b: Builder, first: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop over first, first + step, … while a whole step fits before `end`; yields the index."""
    head, body, after = (b.append_basic_block(n) for n in ("head", "body", "after"))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(first, before)
    following = b.add(index, i64(step))
    b.cbranch(b.icmp_signed("<=", following, end), body, after)
    b.position_at_end(body)
    yield index
    index.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(after)
    b._last_index = index


def folded_steps(
    b: Builder,
    first: Any,
    end: Any,
    step: int,
    values: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
    written_out: bool = True,
) -> tuple[Any, list[Any]]:
    """A loop like `steps` that carries values: `body(index, values)` gives the next. Returns the index and the values
    behind it. LLVM may write several rounds out, unless the loop is known to be short."""
    head, inside, after = (b.append_basic_block(n) for n in ("head", "body", "after"))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    phis = [b.phi(x.type) for x in (first, *values)]
    for phi, x in zip(phis, (first, *values), strict=True):
        phi.add_incoming(x, before)
    index, *carried = phis
    following = b.add(index, i64(step))
    b.cbranch(b.icmp_signed("<=", following, end), inside, after)
    b.position_at_end(inside)
    now = body(index, carried)
    for phi, x in zip(phis, (following, *now), strict=True):
        phi.add_incoming(x, b.block)
    back = b.branch(head)
    if not written_out:
        _keep_rolled(back)
    b.position_at_end(after)
    return index, carried


def _keep_rolled(back: Any) -> None:
    """Have LLVM leave the loop of this branch as it is. What is said of a loop begins with itself."""
    module = back.parent.parent.parent
    told = ir.MDValue(module, [], str(len(module.metadata)))
    told.operands = (told, module.add_metadata(["llvm.loop.unroll.disable"]))
    back.set_metadata("llvm.loop", told)
