"""numba-cuda's way from Python to LLVM's form for generated text: the passes that such text has a use for, and no question
asked twice.

Generated text has no closures, `with`, `try`, `raise`, branches on literals, array expressions or counted references, which
most of numba-cuda's 26 passes look for, each going through all of a kernel several times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

from numba.cuda import compiler, target
from numba.cuda.core import base, byteflow
from numba.cuda.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.cuda.core.errors import WarningsFixer
from numba.cuda.core.transforms import canonicalize_cfg

from .collecting import collecting_paused
from .cuda_lowering import Lowering
from .generated import types_asked_once

numba_compiler: Any = compiler  # not in their stubs: CUDACompiler, CUDAFlags and others
numba_target: Any = target
numba_base: Any = base
numba_flow: Any = byteflow


# ---------------------------------------------------------------- passes


class _Interpreter(numba_compiler.CUDABytecodeInterpreter):  # type: ignore[misc]
    """Numba's form of bytecode, in which nothing of `with`, of long literals and of calls with a tuple is to be mended."""

    def post_process(self, peepholes: Any, function: Any) -> Any:
        names = {instruction.opname for instruction in self.bytecode}
        return super().post_process(peepholes, function) if names & MENDED else function


MENDED = frozenset(
    {
        "CALL_FUNCTION_EX",
        "DICT_UPDATE",
        "LIST_EXTEND",
        "LIST_TO_TUPLE",
        "POP_BLOCK",
        "SETUP_WITH",
        "BEFORE_WITH",
    }
)
"""Instructions whose form Numba mends."""


@register_pass(mutates_CFG=True, analysis_only=False)
class _Reading(FunctionPass):  # type: ignore[misc]
    """Bytecode in Numba's form."""

    _name = "tileloom_reading"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state["func_ir"] = _Interpreter(state["func_id"]).interpret(state["bc"])
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PlainBlocks(FunctionPass):  # type: ignore[misc]
    """Blocks that code is made of. numba-cuda's own pass for that also looks for the last use of each name, where it would
    drop references, which generated text does not count."""

    _name = "tileloom_plain_blocks"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        state.func_ir.generator_info = None
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(numba_compiler.CUDANativeLowering):  # type: ignore[misc]
    """LLVM's form, as `Lowering` makes it."""

    _name = "tileloom_lowering"
    lowering_class = Lowering


PASSES = {
    "CUDATranslateBytecode": _Reading,
    "FixupArgs": None,
    "IRProcessing": _PlainBlocks,
    "NopythonTypeInference": None,
    "AnnotateTypes": None,
    "CreateLibrary": None,
    "CUDANativeLowering": _Lowering,
    "CUDABackend": None,
}
"""Passes of numba-cuda that generated text has a use for, and what stands in for them. One of the others gives each
assignment of a name a name of its own, which LLVM does again, and takes time by names times blocks."""


class Pipeline(numba_compiler.CUDACompiler):  # type: ignore[misc]
    """numba-cuda's passes without those that find nothing to do."""

    def define_pipelines(self) -> list[Any]:
        (every,) = super().define_pipelines()
        needed: Any = PassManager("tileloom")
        named = [(getattr(p[0], "__name__", ""), p) for p in every.passes]
        needed.passes = [(PASSES[name] or p[0], p[1]) for name, p in named if name in PASSES]
        needed.finalize()
        return [needed]


class Flags(numba_compiler.CUDAFlags):  # type: ignore[misc]
    """Flags that stay as they are once they were asked for their hash, which is done for each call in a text."""

    __slots__ = ("_hash",)

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash: int = super().__hash__()
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or bool(super().__eq__(other))


# ---------------------------------------------------------------- questions

_lowering = threading.RLock()
"""Held while numba-cuda is changed for the time that it lowers a kernel."""


@contextmanager
def asked_once(typing_context: Any) -> Iterator[None]:
    """numba-cuda as it is for generated text: one thread at a time."""
    with (
        _lowering,
        replaced(numba_target.CUDATypingContext, "refresh", _one_at_a_time),
        replaced(numba_target.CUDATargetContext, "refresh", _one_at_a_time),
        replaced(numba_target.CUDATypingContext, "load_additional_registries", lambda _: _installed(TYPING)),
        replaced(numba_target.CUDATargetContext, "load_additional_registries", lambda _: _installed(CODE)),
        replaced(numba_base, "_has_loc", cache),
        replaced(numba_flow.Flow, "_run_handle_exception", _none_raised),
        replaced(WarningsFixer, "catch_warnings", _not_caught),
        types_asked_once(typing_context),
        collecting_paused(),
    ):
        yield


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute as `replacement` makes it of what it is, meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, replacement(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _one_at_a_time(refresh: Callable[[Any], None]) -> Callable[[Any], None]:
    """Reads what registries have newly, but not while it does so already: each of two hundred templates that are read asks
    for it."""
    running: list[Any] = []

    def refreshed(context: Any) -> None:
        if not running:
            running.append(context)
            try:
                refresh(context)
            finally:
                running.pop()

    return refreshed


TYPING = ("cudadecl", "libdevicedecl", "cudamath", "typing.npydecl", "typing.enumdecl")
CODE = (
    "cudaimpl", "libdeviceimpl", "cpython.mathimpl", "cpython.numbers", "core.optional", "mathimpl", "cpython.slicing",
    "cpython.iterators", "cpython.tupleobj", "cpython.rangeobj", "cpython.enumimpl", "cpython.builtins", "np.arrayobj",
)  # fmt: skip
"""Modules of numba-cuda with what generated text is made of. Whoever else compiles in this process reads the others then:
vectors, 16-bit floats, lists, text and dates, whose imports take a third of a second."""


def _installed(modules: Sequence[str]) -> Callable[[Any], None]:
    """Reads what the modules' registries have newly."""

    def install(context: Any) -> None:
        for name in modules:
            context.install_registry(import_module(f"numba.cuda.{name}").registry)

    return install


def _none_raised(_: Any) -> Callable[..., None]:
    """The next instruction is in no `try`: to look whether it is takes a tenth of reading."""
    return lambda flow, runner, state: state.advance_pc()


NOTHING = nullcontext()


def _not_caught(_: Any) -> Callable[..., Any]:
    """Types are looked for without gathering warnings of each statement."""
    return lambda fixer, filename=None, lineno=None: NOTHING
