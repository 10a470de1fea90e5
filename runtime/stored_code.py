"""Machine code of generated functions in the cache folder: what an entry holds, and how it becomes a function again.

An entry needs neither the intrinsics that generated text imports nor Numba's compiler, whose tables take longer to fill than
the code to load: LLVM links the object file, and Numba's extension module makes a Python function of an address. Numba's own
cache keeps one index a function, which two processes that compile for different types overwrite for each other; here each
function and signature is an entry of its own. Names and addresses of Numba's helpers in C are those that its code generator
tells LLVM (`numba.core.base._load_global_helpers`, `numba.core.runtime.nrt`, `numba.core.externals`).
"""

from __future__ import annotations

import builtins
import ctypes
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import _helperlib
from numba.core import compiler, config, externals, serialize
from numba.core.caching import NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment
from numba.core.runtime import nrt

from ..dsl.records import dataclass
from .cache import Store, digest_of_files, store
from .cache import digest as digest_of
from .host import host
from .native_code import linked

Kernel = Callable[..., Any]

# Numba's own types for these are partial or none.
_dumped: Any = serialize.dumps
_environment: Any = Environment
_rebuilt: Any = compiler.CompileResult._rebuild
_function: Any = import_module("numba._dynfunc")
_helpers: Any = _helperlib
_memory: Any = nrt
_mathematics: Any = externals


@dataclass(frozen=True)
class Code:
    """A compiled function as an entry keeps it.

    `entry` is the symbol that Python calls, `own` the name of the function's environment. An environment holds the Python
    constants that a function refers to and the globals of its module. Compiled code reads only constants, and to load a
    pickled one imports the module, which for Numba's own takes longer than all the rest: so one without constants is kept
    by name (`empty`) and made anew, the others as they are (`environments`). `needed` are the symbols that the object file
    takes from elsewhere.
    """

    object_file: bytes
    entry: str
    own: str
    environments: tuple[Any, ...]
    empty: tuple[str, ...]
    needed: tuple[str, ...]


@dataclass(frozen=True)
class Shelf:
    """The entries of one source's functions."""

    group: str
    store: Store

    def find(self, function: str, signature: Any, module: ModuleType) -> Kernel | None:
        """The function compiled for a signature, None where there is no entry or it cannot be linked here."""
        content = self.store.get(self.group, _name(function, signature))
        if content is None:
            return None
        code: Code = pickle.loads(content)
        with global_compiler_lock:
            return _revived(code, function, module)

    def keep(self, function: str, signature: Any, compiled: Any) -> None:
        """Make the entry of what Numba has compiled, unless it is of use to this process only."""
        if compiled.library.has_dynamic_globals or compiled.lifted or compiled.reload_init:
            return
        code = _code(compiled)
        if _found(code.needed):
            self.store.put(self.group, _dumped(code), _name(function, signature))


def shelf(source: str) -> Shelf:
    return Shelf(f"code-{digest_of(source, *_facts())}", store())


class Keeper(NullCache):
    """Where Numba leaves the code of a function. It finds none there: whoever has it compile has looked before."""

    def __init__(self, shelf: Shelf, function: str) -> None:
        self.shelf, self.function = shelf, function

    @property
    def cache_path(self) -> str:
        return str(self.shelf.store.folder / self.shelf.group)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        self.shelf.keep(self.function, signature, compiled)


class WholeKeeper(Keeper):
    """The same for edited text, which may do all that Numba knows: entries are what Numba reduces a function to."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        content = self.shelf.store.get(self.shelf.group, _name(self.function, signature))
        if content is None:
            return None
        _memory.rtsys.initialize(target)
        return _rebuilt(target, *pickle.loads(content))

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if not compiled.library.has_dynamic_globals and not compiled.lifted:
            content = _dumped(compiled._reduce())
            self.shelf.store.put(self.shelf.group, content, _name(self.function, signature))


def _name(function: str, signature: Any) -> str:
    return f"{function[:80]}-{digest_of(str(signature))}"


# ---------------------------------------------------------------- entries


def _code(compiled: Any) -> Code:
    final, described = compiled.library._final_module, compiled.fndesc
    values = [*final.functions, *final.global_variables]
    environments = compiled._find_referenced_environments()
    return Code(
        object_file=compiled.library._get_compiled_object(),
        entry=described.llvm_cpython_wrapper_name,
        own=described.env_name,
        environments=tuple(e for e in environments if e.consts),
        empty=tuple(e.env_name for e in environments if not e.consts),
        needed=tuple(v.name for v in values if v.is_declaration and not v.name.startswith("llvm.")),
    )


def _revived(code: Code, function: str, module: ModuleType) -> Kernel | None:
    if not _found(code.needed):
        return None
    for name in code.needed:
        if name in _addresses():
            binding.add_symbol(name, _addresses()[name])
    _mathematics.c_math_functions.install(None)  # for what LLVM makes calls of
    engine = linked(code.object_file)
    environments = {e.env_name: e for e in (*code.environments, *map(_empty_environment, code.empty))}
    for name, held in environments.items():
        ctypes.c_void_p.from_address(engine.get_global_value_address(name)).value = id(held)
    made: Kernel = _function.make_function(
        module,
        function,
        f"compiled wrapper for {function!r}",
        engine.get_function_address(code.entry),
        environments.get(code.own) or _empty_environment(code.own),
        (engine, *environments.values()),
    )
    return made


def _empty_environment(name: str) -> Any:
    made = _environment({})
    made.env_name = name
    return made


def _found(needed: tuple[str, ...]) -> bool:
    """Can the linker be told of all of these? It would end the process for one that it does not find."""
    return all(n in _addresses() or hasattr(ctypes.pythonapi, n) for n in needed)


@cache
def _addresses() -> Mapping[str, int]:
    """Numba's helpers in C and the Python objects that compiled code refers to, by the name that it uses."""
    found = {f"numba_{n}": at for part in (_helpers, _function) for n, at in part.c_helpers.items()}
    found |= {n if n.startswith("_") else f"NRT_{n}": at for n, at in _memory._nrt.c_helpers.items()}
    kinds = {n: k for n, k in vars(builtins).items() if isinstance(k, type) and issubclass(k, BaseException)}
    found |= {f"PyExc_{k.__name__}": id(k) for k in kinds.values()}
    return found | {"_Py_NoneStruct": id(None)}


# ---------------------------------------------------------------- what they depend on

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
        digest_of_files(
            "runtime/intrinsics/*.py", "runtime/kernels.py", "runtime/generated.py", "runtime/stored_code.py"
        ),
    )
