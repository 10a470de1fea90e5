"""Generated source text to callable kernels. Numba is imported here and in `intrinsics` only.

A source is run as a module of its own that `linecache` knows, so that a traceback shows its lines whether or not it was
ever a file. What `build` takes is exactly what `tileloom show --emit source` prints: an edited file runs the same way.
Machine code is kept in the cache folder (see `cache`) under a digest of all that it depends on.
"""

from __future__ import annotations

import hashlib
import linecache
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import types
from numba.core import compiler, config, serialize
from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.environment import Environment
from numba.core.runtime import nrt
from numba.np.numpy_support import from_dtype

from ..dsl.records import dataclass
from .cache import Store, digest_of_files, store
from .cache import digest as digest_of
from .collecting import collecting_paused
from .forks import ForkedLock, held_over_forks
from .generated import prepare
from .host import host
from .threads import UNSHARED

Kernel = Callable[..., Any]
COMPILED = "__compiled__"
"""Under this name the module of a `version` holds its compiled functions by name."""

# Numba's own types for these are partial or none.
_array: Any = types.Array
_type_of: Any = numba.typeof
_rebuilt: Any = compiler.CompileResult._rebuild
_dumped: Any = serialize.dumps
_environment: Any = Environment
_memory: Any = nrt
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
            module = _modules[name, source, edited] = _run(source, name, edited)
    return {n: f for n, f in vars(module).items() if getattr(f, "__module__", None) == module.__name__}


def _run(source: str, name: str, edited: bool) -> ModuleType:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType(f"tileloom_{'edited' if edited else 'generated'}_{digest(source)}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # what Numba stores of a function refers to its module by name
    exec(compile(source, name, "exec"), module.__dict__)
    for value in vars(module).values():
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module.__name__:
            task: Any = value
            task._cache = _CodeCache(value.py_func.__name__, f"edited {source}" if edited else source)
            if not edited:
                prepare(task)
    return module


def load(path: str | Path) -> dict[str, Kernel]:
    """`build` from a file of source text, such as one that a user has edited."""
    return build(Path(path).read_text(encoding="utf-8"), path, edited=True)


def digest(source: str) -> str:
    """A short name for a text: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- compiled versions


def version(function: Kernel, arguments: Sequence[Any]) -> Kernel:
    """`function` of a generated source with its tasks compiled for arguments like these: it skips Numba's look at types.

    Two versions serve all strides, one for arrays that are all C-contiguous and one for all others. Compiles, or loads,
    in one thread and one process at a time.
    """
    names = function.__globals__
    taken = tuple(_types(arguments))
    compiled = {
        n: _entry(names[n], taken) for n in function.__code__.co_names if isinstance(names.get(n), Dispatcher)
    }
    return FunctionType(function.__code__, {**names, **compiled, COMPILED: compiled}, function.__name__)


def compiled(function: Kernel, arguments: Sequence[Any]) -> Kernel:
    """A compiled function of a generated source for arguments like these."""
    return _entry(function, tuple(_types(arguments)))


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


def _entry(dispatcher: Any, taken: tuple[Any, ...]) -> Kernel:
    """A function compiled for these types; where its grid is shared out it takes a range of tasks and their queue first."""
    kept = dispatcher._cache
    shared = dispatcher.py_func.__code__.co_argcount > len(taken)
    ahead = (types.int64, types.int64, _array(types.int64, 1, "C")) if shared else ()
    with kept.store.making(kept.group), collecting_paused():
        entry: Kernel = dispatcher.compile((*ahead, *taken))
    return entry


def contiguous(arguments: Sequence[Any]) -> bool:
    return all(x.flags.c_contiguous for x in arguments if isinstance(x, np.ndarray))


def _types(arguments: Sequence[Any]) -> Iterator[Any]:
    layout = "C" if contiguous(arguments) else "A"
    for x in arguments:
        if isinstance(x, np.ndarray):
            yield _array(from_dtype(x.dtype), x.ndim, layout)
        else:
            yield _type_of(x)


# ---------------------------------------------------------------- the cache


class _CodeCache(NullCache):
    """Where Numba looks for the machine code of one function before it compiles it, and leaves it after.

    Numba's own cache keeps one index a function, which two processes that compile for different types overwrite for each
    other; here each function and signature is an entry of its own.
    """

    def __init__(self, function: str, source: str) -> None:
        self._function = function
        self.store: Store = store()
        self.group = f"code-{digest_of(source, *_facts())}"

    @property
    def cache_path(self) -> str:
        return str(self.store.folder / self.group)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function, None where the folder has none."""
        content = self.store.get(self.group, self._name(signature))
        if content is None:
            return None
        stored: _Stored = pickle.loads(content)
        # All that loading needs of `target.refresh()`, which takes a quarter of a second.
        if stored.calls_memory:
            _memory.rtsys.initialize(target)
        else:
            _name_memory()
        environments = *stored.environments, *map(_empty_environment, stored.empty)
        return _rebuilt(target, *stored.parts, environments)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if compiled.library.has_dynamic_globals or compiled.lifted:  # it holds addresses of this process
            return
        self.store.put(self.group, _dumped(_stored(compiled)), self._name(signature))

    def _name(self, signature: Any) -> str:
        return f"{self._function[:80]}-{digest_of(str(signature))}"


@dataclass(frozen=True)
class _Stored:
    """A compiled function as an entry keeps it.

    `parts` is what Numba reduces it to, without the environments of the functions that were inlined. An environment holds
    the Python constants that its function refers to and the globals of its module. Compiled code reads only constants, and
    to load a pickled one imports the module, which for Numba's own takes longer than all the rest. So one without
    constants is kept by name (`empty`) and made anew, the others as they are (`environments`).
    """

    parts: tuple[Any, ...]
    environments: tuple[Any, ...]
    empty: tuple[str, ...]
    calls_memory: bool
    """Does it call functions of Numba's memory runtime that Numba compiles, beyond the library's own in C?"""


def _stored(compiled: Any) -> _Stored:
    *parts, environments = compiled._reduce()
    declared = {f.name for f in compiled.library._final_module.functions if f.is_declaration}
    own = {f.name for f in _memory.rtsys.library._final_module.functions if not f.is_declaration}
    return _Stored(
        tuple(parts),
        tuple(e for e in environments if e.consts),
        tuple(e.env_name for e in environments if not e.consts),
        bool(declared & own),
    )


def _empty_environment(name: str) -> Any:
    made = _environment({})
    made.env_name = name
    return made


def _name_memory() -> None:
    """Tell the linker the functions in C of Numba's memory runtime, as its `initialize` does before it compiles others."""
    for name, address in _memory._nrt.c_helpers.items():
        binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


IRRELEVANT = frozenset(
    {"CACHE_DIR", "COLOR_SCHEME", "NUM_THREADS", "THREADING_LAYER", "THREADING_LAYER_PRIORITY"}
)
"""Settings of Numba that change no code that is generated here."""


@cache
def _facts() -> tuple[str, ...]:
    """All that machine code depends on besides its source: processor, versions, settings, the intrinsics' text."""
    settings = {k: v for k, v in vars(config).items() if k.isupper() and k not in IRRELEVANT}
    return (
        binding.get_process_triple(),
        binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten(),
        *host().narrow_products,
        sys.version,
        *(f"{m.__name__} {m.__version__}" for m in (numba, sys.modules["llvmlite"], np)),
        repr(sorted((k, repr(v)) for k, v in settings.items())),
        digest_of_files("runtime/intrinsics/*.py", "runtime/kernels.py", "runtime/generated.py"),
    )
