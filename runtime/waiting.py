"""How a call's helpers wait for it, and it for them, without Python's lock: native functions, smaller than what Numba makes.

Each helper has a mailbox, whose STATE alone is changed by both sides. LOOKING: it looks whether a call is given, and after
LOOKS times, some 40 ns each, falls ASLEEP on its own LOCK. GIVEN: a call's queue stands in QUEUE; the caller may still take
it back. WORKING, AWAITED: it runs tasks, and in the latter case the caller sleeps on CALLER_LOCK. Helpers of one call are
chained by FOLLOWING.

    LOOKING, ASLEEP -> GIVEN -> WORKING (-> AWAITED) -> LOOKING
                       GIVEN -> LOOKING (taken back)

Locks are Python's own (`PyThread_allocate_lock`), which need no Python to be running and are there on every system.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from .intrinsics.queue import FIRST, RUN
from .native_code import address, kept_for_good

STATE, QUEUE, FOLLOWING, LOOKS, LOCK, CALLER_LOCK = range(6)
MAILBOX_LENGTH = 32
"""Words of a mailbox: what two threads change lies in no cache line of another's."""
LOOKING, ASLEEP, GIVEN, WORKING, AWAITED = range(5)

WORD, FLAG, NOTHING = ir.IntType(64), ir.IntType(32), ir.VoidType()
FILES = ("runtime/waiting.py", "runtime/intrinsics/queue.py")


@cache
def serve() -> Callable[[int], None]:
    """`f(mailbox)`: help with every call that is given to this address, as long as the process lives."""
    made: Callable[[int], None] = _callable("tileloom_serve", _write_serve, 1)
    return made


@cache
def give() -> int:
    """The address of `f(queue)`: call the helpers whose mailboxes stand in a queue, from FIRST on."""
    return address("tileloom_give", _write_give, *FILES)


@cache
def take_back() -> Callable[[int, int], None]:
    """`f(mailbox, rounds)`: have no helper from this mailbox on work on any call when this returns. Takes the call back from
    those that have not begun, looks so many times whether the others are done, then sleeps until they are. What they wrote
    is then visible."""
    made: Callable[[int, int], None] = _callable("tileloom_take_back", _write_take_back, 2)
    return made


class Mailbox:
    """The mailbox of a new helper, at `address`. It is there as long as the process."""

    def __init__(self) -> None:
        self._words: Any = np.zeros(MAILBOX_LENGTH, np.int64)
        self._words[LOCK], self._words[CALLER_LOCK] = _new_lock(), _new_lock()
        self.address = int(self._words.ctypes.data)
        kept_for_good(self._words)

    def stand_by(self, following: int, looks: int) -> None:
        """Say which mailbox follows in a call, at its address or 0, and how often to look before sleeping."""
        self._words[FOLLOWING], self._words[LOOKS] = following, looks


def _new_lock() -> int:
    """The address of a lock that is held."""
    allocate, acquire = ctypes.pythonapi.PyThread_allocate_lock, ctypes.pythonapi.PyThread_acquire_lock
    allocate.restype, acquire.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]
    made = allocate()
    if made is None:
        raise MemoryError("no lock can be made")
    acquire(made, 1)
    return int(made)


def _callable(name: str, write: Callable[[ir.Module], None], words: int) -> Any:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * words)(address(name, write, *FILES))


# ---------------------------------------------------------------- what they do


def _write_serve(module: ir.Module) -> None:
    f = _Body(module, "tileloom_serve", 1)
    b, (mailbox,) = f.b, f.function.args
    again, sleep, take, work = (f.function.append_basic_block(n) for n in ("again", "sleep", "take", "work"))
    b.branch(again)
    b.position_at_end(again)
    given = f.waited(mailbox, lambda state: f.equal(state, GIVEN), f.load(mailbox, LOOKS))
    b.cbranch(given, take, sleep)
    b.position_at_end(sleep)
    with b.if_then(f.changed(mailbox, LOOKING, ASLEEP)):
        f.acquire(mailbox, LOCK)
    b.branch(again)
    b.position_at_end(take)
    b.cbranch(f.changed(mailbox, GIVEN, WORKING), work, again)
    b.position_at_end(work)
    queue = f.load(mailbox, QUEUE)
    kind = ir.FunctionType(NOTHING, [WORD])
    b.call(b.inttoptr(f.load(queue, RUN), kind.as_pointer()), [queue])
    with b.if_then(f.equal(f.exchanged(mailbox, LOOKING), AWAITED)):
        f.release(mailbox, CALLER_LOCK)
    b.branch(again)


def _write_give(module: ir.Module) -> None:
    f = _Body(module, "tileloom_give", 1)
    queue = f.function.args[0]
    with f.each(f.load(queue, FIRST)) as mailbox:
        f.b.store(queue, f.at(mailbox, QUEUE))
        with f.b.if_then(f.equal(f.exchanged(mailbox, GIVEN), ASLEEP)):
            f.release(mailbox, LOCK)
    f.b.ret_void()


def _write_take_back(module: ir.Module) -> None:
    f = _Body(module, "tileloom_take_back", 2)
    b, (first, rounds) = f.b, f.function.args
    with f.each(first) as mailbox, b.if_then(b.not_(f.changed(mailbox, GIVEN, LOOKING))):
        done = f.waited(mailbox, lambda state: b.not_(f.equal(state, WORKING)), rounds)
        with b.if_then(b.not_(done)), b.if_then(f.changed(mailbox, WORKING, AWAITED)):
            f.acquire(mailbox, CALLER_LOCK)
    b.ret_void()


class _Body:
    """Instructions of a function whose parameters are words, most of them addresses of mailboxes."""

    def __init__(self, module: ir.Module, name: str, words: int) -> None:
        self.function = ir.Function(module, ir.FunctionType(NOTHING, [WORD] * words), name)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    def at(self, table: Any, place: int) -> Any:
        return self.b.gep(self.b.inttoptr(table, WORD.as_pointer()), [ir.Constant(WORD, place)])

    def load(self, table: Any, place: int) -> Any:
        return self.b.load(self.at(table, place))

    def equal(self, value: Any, state: int) -> Any:
        return self.b.icmp_signed("==", value, ir.Constant(WORD, state))

    def changed(self, mailbox: Any, old: int, new: int) -> Any:
        """Was the state `old`, and is it now `new`?"""
        values = (ir.Constant(WORD, x) for x in (old, new))
        found = self.b.cmpxchg(self.at(mailbox, STATE), *values, "acq_rel", "acquire")
        return self.b.extract_value(found, 1)

    def exchanged(self, mailbox: Any, new: int) -> Any:
        """The state before it is `new`."""
        return self.b.atomic_rmw("xchg", self.at(mailbox, STATE), ir.Constant(WORD, new), "acq_rel")

    def acquire(self, mailbox: Any, lock: int) -> None:
        wait = ir.Constant(FLAG, 1)
        self._call("PyThread_acquire_lock", FLAG, self.load(mailbox, lock), wait)

    def release(self, mailbox: Any, lock: int) -> None:
        self._call("PyThread_release_lock", NOTHING, self.load(mailbox, lock))

    @contextmanager
    def each(self, first: Any) -> Iterator[Any]:
        """Instructions for a mailbox and all that follow it; 0 is none."""
        b, before = self.b, self.b.block
        loop, body, after = (self.function.append_basic_block(n) for n in ("each", "body", "after"))
        b.branch(loop)
        b.position_at_end(loop)
        mailbox = b.phi(WORD)
        mailbox.add_incoming(first, before)
        b.cbranch(self.equal(mailbox, 0), after, body)
        b.position_at_end(body)
        following = self.load(mailbox, FOLLOWING)
        yield mailbox
        mailbox.add_incoming(following, b.block)
        b.branch(loop)
        b.position_at_end(after)

    def waited(self, mailbox: Any, holds: Callable[[Any], Any], rounds: Any) -> Any:
        """Looks at the state until a condition holds of it, and so many times more; whether it does."""
        b, before = self.b, self.b.block
        loop, again, after = (self.function.append_basic_block(n) for n in ("look", "pause", "seen"))
        b.branch(loop)
        b.position_at_end(loop)
        left = b.phi(WORD)
        left.add_incoming(rounds, before)
        there = holds(b.load_atomic(self.at(mailbox, STATE), "acquire", 8))
        b.cbranch(b.or_(there, b.icmp_signed("<=", left, ir.Constant(WORD, 0))), after, again)
        b.position_at_end(again)
        self._pause()
        left.add_incoming(b.sub(left, ir.Constant(WORD, 1)), again)
        b.branch(loop)
        b.position_at_end(after)
        return there

    def _pause(self) -> None:
        """Tell the processor that this is a loop that waits, where it has an instruction for that."""
        triple = self.b.module.triple
        if triple.startswith(("x86_64", "i686", "i386")):
            self._call("llvm.x86.sse2.pause", NOTHING)
        elif triple.startswith(("aarch64", "arm64")):
            self._call("llvm.aarch64.hint", NOTHING, ir.Constant(FLAG, 1))

    def _call(self, name: str, gives: ir.Type, *values: Any) -> Any:
        kind = ir.FunctionType(gives, [v.type for v in values])
        declared = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(declared, values)
