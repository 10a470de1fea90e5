"""Generated source text to callable kernels. Numba is imported here, in `stored_code` and in `intrinsics` only.

A source is run as a module of its own that `linecache` knows, so that a traceback shows its lines whether or not it was
ever a file. What `build` takes is exactly what `tileloom show --emit source` prints: an edited file runs the same way.
Machine code is kept in the cache folder (see `stored_code`) under a digest of all that it depends on; where it is there,
compiled functions are never run as text, nor what they import.
"""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.np.numpy_support import from_dtype

from ..dsl.records import dataclass
from .collecting import collecting_paused
from .forks import ForkedLock, cached_property, held_over_forks
from .generated import prepare
from .stored_code import Keeper, Shelf, WholeKeeper, shelf
from .threads import UNSHARED

Kernel = Callable[..., Any]
COMPILED = "__compiled__"
"""Under this name the module of a `version` holds its compiled functions by name."""

# Numba's own types for these are partial or none.
_array: Any = types.Array
_type_of: Any = numba.typeof
_modules: dict[tuple[str, str, bool], ModuleType] = {}
_guard = ForkedLock()
held_over_forks(global_compiler_lock)


def build(source: str, path: str | Path | None = None, edited: bool = False) -> dict[str, Kernel]:
    """The functions of a generated source, by name; each compiles at its first call for the types it is given.

    `path` is the file that tracebacks name; without it the source gets a name made of its digest. The same source is one
    module to all callers, for the life of the process. Numba compiles `edited` text with all of its passes (see
    `generated`). Raises `SyntaxError` and what else the text raises when it is run.
    """
    name = str(path) if path is not None else f"<tileloom {digest(source)}>"
    with _guard:
        module = _modules.get((name, source, edited))
        if module is None:
            module = _modules[name, source, edited] = (_run_edited if edited else _run)(source, name)
    return {n: f for n, f in vars(module).items() if getattr(f, "__module__", None) == module.__name__}


def _run(source: str, name: str) -> ModuleType:
    """The module of a source with its compiled functions left out: a `Task` stands for each."""
    module = _module(source, name, "generated")
    sketch, tasks = _sketch(source)
    text = _Text(source, name, module, shelf(source))
    vars(module).update({n: Task(text, n, parameters) for n, parameters in tasks.items()})
    exec(compile(sketch, name, "exec"), module.__dict__)
    return module


def _run_edited(source: str, name: str) -> ModuleType:
    module = _module(source, name, "edited")
    exec(compile(source, name, "exec"), module.__dict__)
    kept = shelf(f"edited {source}")
    for function in _dispatchers(vars(module), module.__name__).values():
        function._cache = WholeKeeper(kept, function.py_func.__name__)
    return module


def _module(source: str, name: str, kind: str) -> ModuleType:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(f"tileloom_{kind}_{digest(source)}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # what Numba stores of a function refers to its module by name
    return module


def _dispatchers(names: dict[str, Any], module: str) -> dict[str, Any]:
    found = {n: f for n, f in names.items() if isinstance(f, Dispatcher)}
    return {n: f for n, f in found.items() if f.py_func.__module__ == module}


def load(path: str | Path) -> dict[str, Kernel]:
    """`build` from a file of source text, such as one that a user has edited."""
    return build(Path(path).read_text(encoding="utf-8"), path, edited=True)


def digest(source: str) -> str:
    """A short name for a text: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- compiled functions, of which the text is run when needed

DECORATED = re.compile(r"^@njit\(.*\)\ndef (\w+)\((.*)\):\n((?:[ ].*)?\n)*", re.M)
IMPORT = re.compile(r"^from \S+ import (\((?:[^)]*)\)|.*)$", re.M)


def _sketch(source: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """A generated source without its compiled functions and what only they import, the other lines where they were; the
    names of the compiled ones with those of their parameters."""
    tasks = {m[1]: tuple(m[2].split(", ")) for m in DECORATED.finditer(source)}
    plain = DECORATED.sub(_blank, source)
    used = set(re.findall(r"\w+", IMPORT.sub("", plain)))
    return IMPORT.sub(lambda m: m[0] if used & {*re.findall(r"\w+", m[1])} else _blank(m), plain), tasks


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


@dataclass
class _Text:
    """A generated source, the module that it is to its callers, and where its machine code is kept."""

    source: str
    name: str
    module: ModuleType
    shelf: Shelf

    @cached_property
    def dispatchers(self) -> dict[str, Any]:
        """Numba's compiled functions by name: the whole text is run."""
        names: dict[str, Any] = {"__name__": self.module.__name__}
        exec(compile(self.source, self.name, "exec"), names)
        found = _dispatchers(names, self.module.__name__)
        for name, dispatcher in found.items():
            dispatcher._cache = Keeper(self.shelf, name)
            prepare(dispatcher)
        return found


class Task:
    """A compiled function of a generated source: from the cache folder for the types it is called with, else by Numba."""

    def __init__(self, text: _Text, name: str, parameters: tuple[str, ...]) -> None:
        self.__name__, self.__module__, self.parameters = name, text.module.__name__, parameters
        self._text = text
        self._entries: dict[tuple[Any, ...], Kernel] = {}

    def __call__(self, *arguments: Any) -> Any:
        return self.entry(tuple(map(_type_of, arguments)))(*arguments)

    @property
    def signatures(self) -> list[tuple[Any, ...]]:
        """The types that it was called with."""
        return [*self._entries]

    @property
    def dispatcher(self) -> Any:
        """What Numba made of the function's text."""
        return self._text.dispatchers[self.__name__]

    def entry(self, signature: tuple[Any, ...]) -> Kernel:
        """The function for arguments of these types. Compiles, or loads, in one thread and one process at a time."""
        found = self._entries.get(signature)
        if found is None:
            kept = self._text.shelf
            with kept.store.making(kept.group), collecting_paused():
                found = kept.find(self.__name__, signature, self._text.module)
                found = found or self.dispatcher.compile(signature)
            self._entries[signature] = found
        return found


# ---------------------------------------------------------------- compiled versions


def version(function: Kernel, arguments: Sequence[Any]) -> Kernel:
    """`function` of a generated source with its tasks compiled for arguments like these: it skips Numba's look at types.

    Two versions serve all strides, one for arrays that are all C-contiguous and one for all others.
    """
    names = function.__globals__
    taken = tuple(_types(arguments))
    compiled = {
        n: _entry(names[n], taken) for n in function.__code__.co_names if isinstance(names.get(n), Task)
    }
    return FunctionType(function.__code__, {**names, **compiled, COMPILED: compiled}, function.__name__)


def launches(function: Kernel, arguments: Sequence[Any]) -> list[tuple[Kernel, tuple[Any, ...]]]:
    """What a `version` calls on one thread for these arguments: compiled functions, each with what stands before them."""
    found: list[tuple[Kernel, tuple[Any, ...]]] = []
    names = function.__globals__
    noted = {n: _Noted(entry, found) for n, entry in names[COMPILED].items()}
    FunctionType(function.__code__, {**names, **noted, "run_tasks": _note_tasks})(*arguments)
    return found


@dataclass(frozen=True)
class _Noted:
    """Stands for a compiled function while what calls it is watched."""

    entry: Kernel
    found: list[tuple[Kernel, tuple[Any, ...]]]

    def __call__(self, *arguments: Any) -> None:
        self.found.append((self.entry, ()))


def _note_tasks(noted: _Noted, tasks: int, *arguments: Any) -> None:
    if tasks > 0:
        noted.found.append((noted.entry, (0, tasks, UNSHARED)))


def _entry(task: Task, taken: tuple[Any, ...]) -> Kernel:
    """A function compiled for these types; where its grid is shared out it takes a range of tasks and their queue first."""
    shared = len(task.parameters) > len(taken)
    return task.entry((*((types.int64, types.int64, _array(types.int64, 1, "C")) if shared else ()), *taken))


def contiguous(arguments: Sequence[Any]) -> bool:
    return all(x.flags.c_contiguous for x in arguments if isinstance(x, np.ndarray))


def _types(arguments: Sequence[Any]) -> Iterator[Any]:
    layout = "C" if contiguous(arguments) else "A"
    for x in arguments:
        if isinstance(x, np.ndarray):
            yield _array(from_dtype(x.dtype), x.ndim, layout)
        else:
            yield _type_of(x)
