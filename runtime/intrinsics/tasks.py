"""How threads share the tasks of a grid: compiled functions take ranges of them from one queue until none is left.

The queue (see `queue`) changes atomically, so that threads need no lock. The function that begins leaves its arguments in
the queue and calls the helpers itself: they run machine code from the moment they wake, and never wait for Python's lock.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .queue import ARGUMENTS, END, GIVE, LENGTH, MODE, NEXT, REASON, RUN, STATUS, STEP
from .vectors import I64, array_item, call

Builder = Any
_pair: Any = types.UniTuple
NONE_RETURNED = -2
"""A status of Numba's functions that is no failure (`numba.core.callconv.RETCODE_NONE`)."""


def _address(context: Any, b: Builder, kind: Any, queue: Any, index: Any) -> Any:
    """The address of an element."""
    return array_item(context, b, kind, queue, types.int64, index)[0]


def _taken(b: Builder, at: Any) -> tuple[Any, Any]:
    """The next range of tasks; an empty one where none is left."""
    step, end = b.load(at(STEP)), b.load(at(END))
    first = b.atomic_rmw("add", at(NEXT), step, "monotonic")
    smaller = "llvm.smin.i64"
    return tuple(call(b, smaller, I64, [x, end]) for x in (first, b.add(first, step)))


def _taking(shares: Any, calls: bool) -> Any:
    """(first, last) of the next range: taken where `shares` says so, else what is given; are helpers called first?"""

    def taking(typing: Any, queue: Any, first: Any, last: Any) -> Any:
        pair = _pair(types.int64, 2)

        def emit(context: Any, b: Builder, sig: Any, args: Any) -> Any:
            def at(place: int) -> Any:
                return _address(context, b, queue, args[0], ir.Constant(I64, place))

            given = [context.cast(b, x, t, types.int64) for x, t in zip(args[1:], sig.args[1:], strict=True)]
            condition, otherwise = shares(b, at, *given)
            before = b.block
            with b.if_then(condition):
                if calls:
                    _call_helpers(context, b, at)
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
    return b.icmp_signed("!=", b.load(at(STEP)), ir.Constant(I64, 0)), (last, last)


take_first = intrinsic(_taking(_first, calls=True))
"""take_first(queue, first, last): the tasks to begin with, as a pair: those given, or where there are none some of the
queue, with which helpers are called."""
take_next = intrinsic(_taking(_next, calls=False))
"""take_next(queue, first, last): the next tasks, after those from `first` to `last` are done. An empty range where none is
left."""


# ---------------------------------------------------------------- helpers


def _call_helpers(context: Any, b: Builder, at: Any) -> None:
    """Leave this function's arguments in the queue and call those who may help, unless that is done."""
    arguments = context.call_conv.get_arguments(b.function)
    if len(arguments) > LENGTH - ARGUMENTS:
        warnings.warn(f"a kernel with {len(arguments)} words of arguments runs on one thread", stacklevel=2)
        return
    give = b.load(at(GIVE))
    none = ir.Constant(I64, 0)
    with b.if_then(b.icmp_signed("!=", give, none)):
        b.store(none, at(GIVE))
        for i, x in enumerate(_unowned(arguments)):
            b.store(x, b.bitcast(at(ARGUMENTS + i), x.type.as_pointer()))
        _mode(b, at(MODE), "kept")
        b.store(b.ptrtoint(_helping(context, b.function), I64), at(RUN))
        called = b.inttoptr(give, ir.FunctionType(ir.VoidType(), [I64]).as_pointer())
        b.call(called, [b.ptrtoint(at(0), I64)])


def _mode(b: Builder, at: Any, do: str) -> None:
    """The floating-point mode of this thread is kept at an address, or set to what is kept there: a thread begins with that
    of whoever made it, which need not be this call's. Nothing where the instructions for it are not known here."""
    triple = b.module.triple
    if triple.startswith("x86_64"):
        byte = ir.IntType(8).as_pointer()
        name = {"kept": "stmxcsr", "set": "ldmxcsr"}[do]
        call(b, f"llvm.x86.sse.{name}", ir.VoidType(), [b.bitcast(at, byte)])
    elif triple.startswith(("aarch64", "arm64")):
        if do == "kept":
            b.store(call(b, "llvm.aarch64.get.fpcr", I64, []), at)
        else:
            call(b, "llvm.aarch64.set.fpcr", ir.VoidType(), [b.load(at)])


def _unowned(arguments: Sequence[Any]) -> Iterator[Any]:
    """A function's arguments without what counts references to arrays: the caller's wrapper frees that when the caller has
    returned, sooner than helpers do. An array is passed as its counter, its Python object, two numbers, and the address of
    its elements, then numbers (`numba.core.datamodel.models.ArrayModel`); nothing else is passed as an address."""
    after = 0
    for i, x in enumerate(arguments):
        is_counter = i >= after and isinstance(x.type, ir.PointerType)
        if is_counter:
            after = i + 5
        yield ir.Constant(x.type, None) if is_counter else x


def _helping(context: Any, function: Any) -> Any:
    """What a helper runs, given the address of a queue: `function` on the arguments that are left there."""
    name = f"{function.name}.help"
    if name in function.module.globals:
        return function.module.globals[name]
    function.attributes.add("noinline")  # it would be compiled twice, in its callers
    made = ir.Function(function.module, ir.FunctionType(ir.VoidType(), [I64]), name)
    made.linkage = "internal"
    b = ir.IRBuilder(made.append_basic_block())

    def at(place: int, kind: Any = I64) -> Any:
        queue = b.inttoptr(made.args[0], I64.as_pointer())
        return b.bitcast(b.gep(queue, [ir.Constant(I64, place)]), kind.as_pointer())

    result, reason = function.args[:2]
    kinds = [x.type for x in context.call_conv.get_arguments(function)]
    places = [b.alloca(x.type.pointee) for x in (result, reason)]
    b.store(ir.Constant(reason.type.pointee, None), places[1])
    _mode(b, at(MODE), "set")
    status = b.call(function, [*places, *(b.load(at(ARGUMENTS + i, k)) for i, k in enumerate(kinds))])
    ends_well = [b.icmp_signed("==", status, ir.Constant(status.type, x)) for x in (0, NONE_RETURNED)]
    with b.if_then(b.not_(b.or_(*ends_well))):
        b.store(b.ptrtoint(b.load(places[1]), I64), at(REASON))
        b.store(b.sext(status, I64), at(STATUS))
    b.ret_void()
    return made
