"""Locks that a fork does not leave locked: whoever held one in the parent does not exist in the child."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        """As Python 3.12's: Python 3.11 holds a lock over all instances of a class while it computes, and so over a fork."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            return self if instance is None else vars(instance).setdefault(self.name, self.compute(instance))


__all__ = ["ForkedLock", "cached_property", "held_over_forks"]


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
