"""Threads that run the tasks of a kernel: ordinary Python threads, since compiled tasks hold no lock of the interpreter.

A call works on a queue of tasks, and its compiled function itself calls the threads that are idle (see `intrinsics.tasks`);
whoever comes takes the next tasks, and from a thread that comes too late the call is taken back. Workers wait in native code
and run tasks from there, without Python's lock, for some 1.5 ms looking for a call before they sleep: calls in a row are
handed over in a microsecond, and waking a worker takes some 50. This survives a fork and may be entered from several threads
at once. Which thread runs a task never changes its result.
"""

from __future__ import annotations

import _thread
import os
import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_int32, c_int64, string_at
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np

from .intrinsics.queue import ARGUMENTS, END, FIRST, GIVE, LENGTH, REASON, STATUS, STEP

PIECES_PER_THREAD = 32
"""Tasks are taken in at most this many pieces a thread, so that tasks of unequal length even out."""
LAST_LOOKS = 15_000
"""How often a caller looks whether helpers are done, some 40 ns each, before it sleeps: they end soon."""
IDLE_LOOKS = 37_500
"""How often an idle worker looks for a call before it sleeps. OpenBLAS and libgomp look for 135 and 9 ms."""

_limits: list[tuple[int]] = []
"""What `thread_limit` says, the newest last; several threads may be inside one at once."""


def threads() -> int:
    """How many threads a kernel may use: the processors this process may run on, or what `thread_limit` says."""
    stated = _stated_limit()
    return stated if stated is not None else _processors()


def _stated_limit() -> int | None:
    limits = _limits[-1:]  # at once, for another thread may end the last one
    return limits[0][0] if limits else None


def _processors() -> int:
    return len(_allowed())


def _allowed() -> frozenset[int]:
    """The processors that this thread may run on, by number."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@contextmanager
def thread_limit(n: int) -> Iterator[None]:
    """Use `n` threads inside the `with`, for the whole process; of several at once the one that began last counts. Raises
    `ValueError` unless n is at least 1."""
    if n < 1:
        raise ValueError(f"thread_limit({n}): at least 1 is needed")
    own = (n,)
    _limits.append(own)
    try:
        yield
    finally:
        _limits[:] = [x for x in _limits if x is not own]


class _Alone(threading.local):
    """`with alone:` the tasks that this thread starts run on it and no other."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *failure: object) -> None:
        self.depth -= 1


alone = _Alone()
UNSHARED: Any = np.zeros(LENGTH, np.int64)
"""The queue of a call that one thread runs: `function(0, tasks, UNSHARED, …)`. Never written."""


def run_tasks(function: Callable[..., Any], tasks: int, *arguments: Any) -> None:
    """Call `function(first, last, queue, *arguments)` on one or more threads, so that each task of [0, tasks) runs once.

    Raises what the function raises, in whichever thread.
    """
    workers = 1 if tasks <= 1 or alone.depth else min(threads(), tasks)
    if workers > 1:
        _run_shared(function, tasks, arguments, workers)
    elif tasks > 0:
        function(0, tasks, UNSHARED, *arguments)


def _run_shared(function: Callable[..., Any], tasks: int, arguments: tuple[Any, ...], workers: int) -> None:
    """Work with helpers, which `function` itself calls, and wait for what they have taken.

    An exception may come between any two steps, as from Ctrl-C. Whatever it ends, the helpers are taken back before the
    arguments are freed, and stand in the crew again: in `finally` both are calls of C functions, which run no other code
    before they begin.
    """
    stated, processors = _stated_limit(), _allowed()
    spins = stated is None or stated <= len(processors)  # else looking would keep another from working
    take_back, looks = _native().take_back(), LAST_LOOKS * spins
    put_back, helpers = _crew.waiting.extend, list[_Worker]()
    cells = _crew.free_cells()
    queue = cells[0]
    queue[END], queue[STEP] = tasks, max(1, tasks // (workers * PIECES_PER_THREAD))
    first = 0
    try:
        _crew.find(helpers, workers - 1)
        first = _stand_by(helpers, _processor() if spins else None, processors, IDLE_LOOKS * spins)
        if first:
            queue[FIRST], queue[GIVE] = first, _native().give()
        function(0, 0, queue, *arguments)
    finally:
        try:
            take_back(first, looks)
        finally:
            put_back(helpers)
        status, reason = queue[STATUS], queue[REASON]
        _crew.cells.append(cells)
    if status:
        raise _failure(int(status), int(reason))


def _stand_by(helpers: Sequence[_Worker], processor: int | None, allowed: frozenset[int], looks: int) -> int:
    """Make the helpers of a caller on this processor, or one of those allowed, ready to be called; the address of the
    first one's mailbox."""
    first = 0
    for worker in helpers:
        if (processor, allowed) != worker.kept_off:
            worker.keep_off(processor, allowed)
        worker.mailbox.stand_by(first, looks)
        first = worker.mailbox.address
    return first


def _failure(status: int, reason: int) -> BaseException:
    """The exception that a compiled function stopped with, from the numbers that it returned to a helper: the address of a
    pickled (type, arguments, place) and its length (`numba.core.callconv.excinfo_t`)."""
    if status < 1 or not reason:
        return RuntimeError(f"a task failed in another thread, with status {status}")
    address, length = c_int64.from_address(reason).value, c_int32.from_address(reason + 8).value
    kind, arguments, *_ = pickle.loads(string_at(address, length))
    failure: BaseException = kind(*(arguments or ()))
    return failure


class _Worker(threading.Thread):
    """Waits in native code for calls and helps with them, as long as the process lives (`waiting.serve`).

    A worker is kept off the caller's processor before it is woken: a scheduler may wake it there although another is idle,
    and it then waits for milliseconds until the caller's turn is over.

    Only the caller that has taken a worker from the crew gives to it. It puts the worker back when nobody works on its
    tasks any more.
    """

    def __init__(self) -> None:
        super().__init__(name="tileloom", daemon=True)
        self.mailbox, self.serve = _native().Mailbox(), _native().serve()
        self.kept_off: tuple[int | None, frozenset[int]] | None = None
        """The processor that this thread may not run on, if any, and those that its caller might."""
        self.maker = _thread.get_native_id()

    def keep_off(self, processor: int | None, allowed: frozenset[int]) -> None:
        """Let this thread run on the caller's processors but for one, which the caller takes itself."""
        if self.native_id is not None:
            if hasattr(os, "sched_setaffinity"):
                with suppress(OSError):  # where the system lets no thread move another
                    os.sched_setaffinity(self.native_id, allowed - {processor} or allowed)
            self.kept_off = processor, allowed

    def run(self) -> None:
        if _thread.get_native_id() == self.maker:
            warnings.warn(
                "kernels run on one thread: Python's threads are replaced (by gevent or eventlet) and take turns on it",
                RuntimeWarning,
                stacklevel=2,
            )
            return  # who is called and never comes is taken back
        self.serve(self.mailbox.address)


class _Crew:
    """The workers of this process; those that no call uses stand in `waiting`."""

    def __init__(self) -> None:
        self.waiting: deque[_Worker] = deque()
        self.cells: deque[tuple[Any, Any]] = deque()
        """Queues that no call uses, each with what a call finds at 0."""
        self.count = 0
        self.lock = (
            threading.RLock()
        )  # a signal's handler or the end of an object may call a kernel meanwhile

    def free_cells(self) -> tuple[Any, Any]:
        """A queue without tasks, and its part before the arguments."""
        try:
            cells = self.cells.pop()
        except IndexError:
            queue = np.zeros(LENGTH, np.int64)
            return queue, queue[:ARGUMENTS]
        cells[1].fill(0)
        return cells

    def find(self, found: list[_Worker], wanted: int) -> None:
        """Add up to so many workers that are idle, made where the process has too few. None is lost on the way: they go over
        in one step."""
        with suppress(IndexError):
            found.extend(islice(iter(self.waiting.pop, None), wanted))
        while len(found) < wanted and self._is_one_more(found):
            pass

    def _is_one_more(self, found: list[_Worker]) -> bool:
        limit = threads()
        with self.lock:
            if self.count >= limit - 1:
                return False
            worker = _Worker()
            self.count += 1
            found.append(worker)
        try:
            worker.start()
        except (RuntimeError, MemoryError) as refused:  # as where a container limits how many there may be
            found.remove(worker)
            with self.lock:
                self.count -= 1
            warnings.warn(f"kernels run on fewer threads: {refused}", RuntimeWarning, stacklevel=2)
            return False
        return True


_crew = _Crew()


def _processor() -> int | None:
    """The processor that this thread runs on; None where the system does not tell."""
    ask = _asking_processor()
    return ask() if ask is not None else None


@cache
def _asking_processor() -> Callable[[], int] | None:
    if not hasattr(os, "sched_setaffinity"):
        return None
    import ctypes

    found: Callable[[], int] | None = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    return found


@cache
def _native() -> ModuleType:
    """The native functions; whoever shares no task never makes them."""
    from . import waiting

    return waiting


def _forget() -> None:
    """In a forked child the workers do not exist."""
    global _crew
    _crew = _Crew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
