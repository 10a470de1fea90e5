"""How threads share the tasks of a grid: compiled functions take ranges of them from one queue until none is left.

The queue (see `queue`) changes atomically, so that threads need no lock.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .queue import DONE, END, NEXT, STEP
from .vectors import I64, array_item, call

Builder = Any
_pair: Any = types.UniTuple


def _address(context: Any, b: Builder, kind: Any, queue: Any, index: Any) -> Any:
    """The address of an element."""
    return array_item(context, b, kind, queue, types.int64, index)[0]


def _taken(b: Builder, at: Any) -> tuple[Any, Any]:
    """The next range of tasks; an empty one where none is left."""
    step, end = b.load(at(STEP)), b.load(at(END))
    first = b.atomic_rmw("add", at(NEXT), step, "monotonic")
    smaller = "llvm.smin.i64"
    return tuple(call(b, smaller, I64, [x, end]) for x in (first, b.add(first, step)))


def _taking(shares: Any) -> Any:
    """(first, last) of the next range: taken where `shares` says so, else what is given."""

    def taking(typing: Any, queue: Any, first: Any, last: Any) -> Any:
        pair = _pair(types.int64, 2)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            def at(place: int) -> Any:
                return _address(context, b, queue, args[0], ir.Constant(I64, place))

            given = [context.cast(b, x, t, types.int64) for x, t in zip(args[1:], sig.args[1:], strict=True)]
            condition, otherwise = shares(b, at, *given)
            before = b.block
            with b.if_then(condition):
                taken, inside = _taken(b, at), b.block
            results = []
            for x, y in zip(taken, otherwise, strict=True):
                phi = b.phi(I64)
                phi.add_incoming(x, inside)
                phi.add_incoming(y, before)
                results.append(phi)
            return context.make_tuple(b, pair, results)

        return pair(queue, types.int64, types.int64), emit

    return taking


def _first(b: Builder, at: Any, first: Any, last: Any) -> Any:
    shared = b.icmp_signed("!=", b.load(at(STEP)), ir.Constant(I64, 0))
    return b.and_(b.icmp_signed(">=", first, last), shared), (first, last)


def _next(b: Builder, at: Any, first: Any, last: Any) -> Any:
    shared = b.icmp_signed("!=", b.load(at(STEP)), ir.Constant(I64, 0))
    with b.if_then(shared):
        b.atomic_rmw("add", at(DONE), b.sub(last, first), "release")
    return shared, (last, last)


take_first = intrinsic(_taking(_first))
"""take_first(queue, first, last): the tasks to begin with, as a pair: those given, or where there are none some of the
queue."""
take_next = intrinsic(_taking(_next))
"""take_next(queue, first, last): the next tasks, after those from `first` to `last` are done; no thread sees them done
before it sees what they wrote. An empty range where none is left."""


@intrinsic
def reaches(typing: Any, cell: Any, index: Any, value: Any, rounds: Any) -> Any:
    """Is an element of an int64 array at least `value`, now or while looking `rounds` times (some 40 ns each)?"""

    def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
        place = _address(context, b, cell, args[0], args[1])
        before, loop, again, after = (b.block, *(b.append_basic_block() for _ in range(3)))
        b.branch(loop)
        b.position_at_end(loop)
        left = b.phi(I64)
        left.add_incoming(args[3], before)
        there = b.icmp_signed(">=", b.load_atomic(place, "acquire", 8), args[2])
        b.cbranch(b.or_(there, b.icmp_signed("<=", left, ir.Constant(I64, 0))), after, again)
        b.position_at_end(again)
        pause(b)
        left.add_incoming(b.sub(left, ir.Constant(I64, 1)), again)
        b.branch(loop)
        b.position_at_end(after)
        return there

    return types.boolean(cell, types.int64, types.int64, types.int64), emit


def pause(b: Builder) -> None:
    """Tell the processor that this is a loop that waits, where it has an instruction for that."""
    triple = b.module.triple
    if triple.startswith(("x86_64", "i686", "i386")):
        call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif triple.startswith(("aarch64", "arm64")):
        call(b, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(ir.IntType(32), 1)])
