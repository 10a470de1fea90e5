"""Locks that a fork does not leave locked: whoever held one in the parent does not exist in the child."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet


class ForkedLock:
    """A lock that a forked child finds free. For what is consistent at every moment that a lock is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *failure: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, whoever held it."""
        self._lock = threading.Lock()


_locks: WeakSet[ForkedLock] = WeakSet()


def held_over_forks(lock: Any) -> None:
    """Fork only while this thread holds a lock (one that a thread may hold twice): for what another thread may have left
    half done, such as a compiler's tables."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
