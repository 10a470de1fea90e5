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
