"""Storage of a task's tile values: arrays that share one allocation, each at the start of a cache line."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vectors import I8, I64, array_models

LINE = 64
"""Bytes of a cache line, and the widest vector: one that crosses a line is read in two steps."""

Builder = Any
_tools: Any = cgutils
_array: Any = types.Array


@intrinsic
def workspace(typing: Any, size: Any) -> Any:
    """Memory for parts that end at byte `size`; a MemoryError where there is none.

    It is asked for directly: `numpy.empty` is four functions that Numba would compile first, for half a second.
    """
    kind = _array(types.uint8, 1, "C")

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        one = ir.Constant(I64, 1)
        length = b.add(context.cast(b, args[0], sig.args[0], types.int64), ir.Constant(I64, LINE))
        memory = context.nrt.meminfo_alloc_aligned(b, length, LINE)
        made = array_models().make_array(kind)(context, b)
        data = b.bitcast(context.nrt.meminfo_data(b, memory), made.data.type)
        array_models().populate_array(
            made, data=data, shape=[length], strides=[one], itemsize=one, meminfo=memory
        )
        return made._getvalue()

    return kind(size), emit


@intrinsic(prefer_literal=True)
def part(typing: Any, space: Any, offset: Any, dtype: Any, shape: Any) -> Any:
    """A C-contiguous array of this type and shape (a number or a tuple), `offset` bytes behind the first cache line of
    `space`, which it keeps alive."""
    rank = len(shape) if isinstance(shape, types.BaseTuple) else 1
    kind = _array(dtype.instance_type, rank, "C")

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        whole = array_models().make_array(space)(context, b, args[0])
        line = ir.Constant(I64, LINE)
        first = b.and_(b.add(b.ptrtoint(whole.data, I64), b.sub(line, ir.Constant(I64, 1))), b.neg(line))
        start = context.cast(b, args[1], sig.args[1], types.int64)
        data = b.inttoptr(b.add(first, start), I8.as_pointer())
        lengths = (
            _tools.unpack_tuple(b, args[3], rank) if isinstance(sig.args[3], types.BaseTuple) else [args[3]]
        )
        size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
        strides = [ir.Constant(I64, size)]
        for n in reversed(lengths[1:]):
            strides.insert(0, b.mul(strides[0], n))
        made = array_models().make_array(kind)(context, b)
        array_models().populate_array(
            made, data=b.bitcast(data, made.data.type), shape=lengths, strides=strides,
            itemsize=ir.Constant(I64, size), meminfo=whole.meminfo, parent=whole.parent,
        )  # fmt: skip
        context.nrt.incref(b, kind, made._getvalue())
        return made._getvalue()

    return kind(space, offset, dtype, shape), emit
