"""Threads that run the tasks of a kernel: ordinary Python threads, since compiled tasks hold no lock of the interpreter.

A call works on a queue of tasks, and its compiled function itself calls the threads that are idle (see `intrinsics.tasks`);
whoever comes takes the next tasks, and from a thread that comes too late the call is taken back. Workers wait in native code
and run tasks from there, without Python's lock, for some 1.5 ms looking for a call before they sleep: calls in a row are
handed over in a microsecond, and waking a worker takes some 50. This survives a fork and may be entered from several threads
at once. Which thread runs a task never changes its result.
"""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_int32, c_int64, string_at
from functools import cache
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

_limit: int | None = None


def threads() -> int:
    """How many threads a kernel may use: the processors this process may run on, or what `thread_limit` says."""
    return _limit if _limit is not None else _processors()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def thread_limit(n: int) -> Iterator[None]:
    """Use `n` threads inside the `with`, for the whole process. Raises `ValueError` unless n is at least 1."""
    global _limit
    if n < 1:
        raise ValueError(f"thread_limit({n}): at least 1 is needed")
    before, _limit = _limit, n
    try:
        yield
    finally:
        _limit = before


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
    """Work with helpers, which `function` itself calls, and wait for what they have taken."""
    spins = _limit is None or _limit <= _processors()  # else looking would keep another from working
    cells, helpers = _crew.free_cells(), _crew.idle(workers - 1)
    queue = cells[0]
    queue[END], queue[STEP] = tasks, max(1, tasks // (workers * PIECES_PER_THREAD))
    first = _stand_by(helpers, _processor() if spins else None, IDLE_LOOKS * spins)
    if first:
        queue[FIRST], queue[GIVE] = first, _native().give()
    try:
        function(0, 0, queue, *arguments)
    finally:
        if first:
            _native().take_back()(first, LAST_LOOKS * spins)
        _crew.waiting.extend(helpers)
        status, reason = queue[STATUS], queue[REASON]
        _crew.cells.append(cells)
    if status:
        raise _failure(int(status), int(reason))


def _stand_by(helpers: Sequence[_Worker], processor: int | None, looks: int) -> int:
    """Make the helpers of a caller on this processor ready to be called; the address of the first one's mailbox."""
    first = 0
    for worker in helpers:
        if processor != worker.kept_off and processor is not None:
            worker.keep_off(processor)
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
        self.kept_off: int | None = None
        """The processor that this thread may not run on."""

    def keep_off(self, processor: int) -> None:
        """Let this thread run on the caller's processors but for one, which the caller takes itself."""
        others = os.sched_getaffinity(0) - {processor}
        if others and self.native_id is not None:
            with suppress(OSError):  # where the system lets no thread move another
                os.sched_setaffinity(self.native_id, others)
            self.kept_off = processor

    def run(self) -> None:
        self.serve(self.mailbox.address)


class _Crew:
    """The workers of this process; those that no call uses stand in `waiting`."""

    def __init__(self) -> None:
        self.waiting: deque[_Worker] = deque()
        self.cells: deque[tuple[Any, Any]] = deque()
        """Queues that no call uses, each with what a call finds at 0."""
        self.count = 0
        self.lock = threading.Lock()

    def free_cells(self) -> tuple[Any, Any]:
        """A queue without tasks, and its part before the arguments."""
        try:
            cells = self.cells.pop()
        except IndexError:
            queue = np.zeros(LENGTH, np.int64)
            return queue, queue[:ARGUMENTS]
        cells[1].fill(0)
        return cells

    def idle(self, wanted: int) -> list[_Worker]:
        """Up to so many workers that are idle, made where the process has too few."""
        found: list[_Worker] = []
        while len(found) < wanted:
            try:
                found.append(self.waiting.pop())
            except IndexError:
                made = self._made()
                if made is None:
                    break
                found.append(made)
        return found

    def _made(self) -> _Worker | None:
        with self.lock:
            if self.count >= threads() - 1:
                return None
            self.count += 1
        worker = _Worker()
        try:
            worker.start()
        except RuntimeError as refused:  # as where a container limits how many there may be
            with self.lock:
                self.count -= 1
            warnings.warn(f"kernels run on fewer threads: {refused}", RuntimeWarning, stacklevel=2)
            return None
        return worker


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
