"""Threads that run the tasks of a kernel: ordinary Python threads, since compiled tasks hold no lock of the interpreter.

A call gives a queue to the threads that are idle and works on it itself; whoever comes takes the next tasks (see
`intrinsics.tasks`), and a thread that comes too late, or never, finds nothing to do and keeps nobody waiting. A worker looks
out for the next call for some 1.5 ms before it sleeps, so that calls in a row are handed over in a few microseconds: waking
it takes 100 and more. This survives a fork and may be entered from several threads at once. Which thread runs a task never
changes its result.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from .intrinsics.queue import DONE, END, LEFT, LENGTH, NEXT, STEP

PIECES_PER_THREAD = 32
"""Tasks are taken in at most this many pieces a thread, so that tasks of unequal length even out."""
LOOKS = 1500
"""How often a caller looks whether helpers have let go of its arguments, some 40 ns each."""
LAST_LOOKS = 10 * LOOKS
"""How often a caller looks whether the last tasks are done before it sleeps: they end soon."""
IDLE_LOOKS = 25 * LOOKS
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
        _Call(function, tasks, arguments, workers).run()
    elif tasks > 0:
        function(0, tasks, UNSHARED, *arguments)


class _Call:
    """One call's tasks and who waits for them.

    The call waits for helpers to let go of its arguments too: a result that one still held would not be freed with its
    last use, the next would lie elsewhere, and the system would take the memory back and give it anew, page by page.
    """

    def __init__(
        self, function: Callable[..., Any], tasks: int, arguments: tuple[Any, ...], workers: int
    ) -> None:
        self.function, self.tasks, self.workers = function, tasks, workers
        self.arguments: tuple[Any, ...] | None = arguments
        self.helping = 0
        self.lock = threading.Lock()
        self.cells = _crew.free_cells()
        self.queue, self.address = self.cells
        self.queue[END], self.queue[STEP] = tasks, max(1, tasks // (workers * PIECES_PER_THREAD))
        self.finished = threading.Lock()
        self.finished.acquire()
        self.failure: BaseException | None = None
        self.spins = _limit is None or _limit <= _processors()
        """Threads that share processors do not look: they would keep another from working."""
        self.processor = _processor() if self.spins else None

    def run(self) -> None:
        """Work with the others, and wait for what they have taken."""
        helpers = _crew.idle(self.workers - 1)
        try:
            for worker in helpers:
                worker.give(self)
            assert self.arguments is not None
            self.function(0, 0, self.queue, *self.arguments)
            if not _waiting()(self.address + 8 * DONE, self.tasks, LAST_LOOKS * self.spins):
                self.finished.acquire()
            self._let_go()
        finally:
            _crew.waiting.extend(helpers)
        if self.failure is not None:
            raise self.failure

    def _let_go(self) -> None:
        """Drop the arguments, and look for a while whether those who helped have."""
        with self.lock:
            self.arguments = None
            helping = self.helping
        if not helping or _waiting()(self.address + 8 * LEFT, helping, LOOKS * self.spins):
            _crew.cells.append(self.cells)

    def help(self) -> None:
        """Work in another thread than the caller's, which learns of the end and of failures."""
        if self.queue[NEXT] >= self.tasks:
            return
        with self.lock:
            arguments = self.arguments
            self.helping += arguments is not None
        if arguments is None:
            return
        try:
            self.function(0, 0, self.queue, *arguments)
        except BaseException as failure:
            self.failure = failure
        del arguments
        with self.lock:
            self.queue[LEFT] += 1
        if self.failure is not None or self.queue[DONE] >= self.tasks:
            with suppress(RuntimeError):  # another worker has said so
                self.finished.release()


class _Worker(threading.Thread):
    """Waits for a call, helps with it, waits again. `next[0]` is for compiled code that waits: where the latest call given
    counts the tasks that are taken, 0 where none is new. The worker starts when the caller has taken one and so let go of
    the interpreter's lock; sooner it would fall asleep over that.

    A worker is kept off the caller's processor before it is woken: a scheduler may wake it there although another is idle,
    and it then waits for milliseconds until the caller's turn is over.

    Only the caller that has taken a worker from the crew gives to it. It puts the worker back when all tasks are done, so
    that the worker, which may still be on its way back from them, is there for the next call.
    """

    def __init__(self) -> None:
        super().__init__(name="tileloom", daemon=True)
        self.next = np.zeros(LENGTH, np.int64)
        self.given = threading.Lock()
        self.given.acquire()
        self.calls: deque[_Call] = deque()
        self.kept_off: int | None = None
        """The processor that this thread may not run on."""

    def give(self, call: _Call) -> None:
        """Have the worker help, now or when it is back."""
        if call.processor != self.kept_off and call.processor is not None:
            self._keep_off(call.processor)
        self.next[0] = (
            call.address + 8 * NEXT
        )  # before it is in line, where it is kept until it is no longer next
        self.calls.append(call)
        with suppress(RuntimeError):  # released before, and not yet noticed
            self.given.release()

    def _keep_off(self, processor: int) -> None:
        """Let this thread run on the caller's processors but for one, which the caller takes itself."""
        others = os.sched_getaffinity(0) - {processor}
        if others and self.native_id is not None:
            with suppress(OSError):  # where the system lets no thread move another
                os.sched_setaffinity(self.native_id, others)
            self.kept_off = processor

    def run(self) -> None:
        is_begun, place = _watching(), int(self.next.ctypes.data)
        while True:
            is_begun(place, IDLE_LOOKS if threads() <= _processors() else 0)
            self.given.acquire()
            while self.calls:
                self.next[0] = 0
                self.calls.popleft().help()


class _Crew:
    """The workers of this process; those that no call uses stand in `waiting`."""

    def __init__(self) -> None:
        self.waiting: deque[_Worker] = deque()
        self.cells: deque[tuple[Any, int]] = deque()
        """Queues that no call uses, and their addresses, which take longer to ask for than the rest of a call."""
        self.count = 0
        self.lock = threading.Lock()

    def free_cells(self) -> tuple[Any, int]:
        """A queue without tasks, and its address."""
        try:
            queue, address = self.cells.pop()
        except IndexError:
            queue = np.zeros(LENGTH, np.int64)
            return queue, int(queue.ctypes.data)
        queue.fill(0)
        return queue, address

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
def _waiting() -> Callable[[int, int, int], int]:
    """The native function that waits; whoever shares no task never makes it."""
    from .waiting import is_reached

    return is_reached()


def _watching() -> Callable[[int, int], int]:
    """The native function with which a worker waits for a call."""
    from .waiting import is_begun

    return is_begun()


def _forget() -> None:
    """In a forked child the workers do not exist."""
    global _crew
    _crew = _Crew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
