"""Numba's compiler for generated text: the passes that such text has a use for, each kind of call typed once, and LLVM's
optimiser once.

Numba runs 27 passes over a function, of which most look for what is not in generated text: closures, `with`, `raise`,
branches on literals, array expressions, overloads to inline. One gives each assignment of a name a name of its own, which
LLVM does again. It then has LLVM optimise every function, every module to prune references, and every module once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import codegen, compiler, compiler_machinery, typed_passes, untyped_passes

PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    typed_passes.NopythonTypeInference,
    typed_passes.IRLegalization,
    typed_passes.AnnotateTypes,
    typed_passes.NativeLowering,
    typed_passes.NoPythonBackend,
)
OPTIMISATION = 2
"""LLVM's level. The third unswitches loops, whose copies generated text has where they pay."""

# Numba's own types for these are partial or none.
_Compiler: Any = compiler.CompilerBase
_Library: Any = codegen.JITCodeLibrary
_PassManager: Any = compiler_machinery.PassManager


class Compiler(_Compiler):  # type: ignore[misc]
    """Compiles a generated function: `PASSES`, then `Library`."""

    def compile_extra(self, function: Any) -> Any:
        with types_asked_once(self.state.typingctx):
            return super().compile_extra(function)

    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.library = Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        manager = _PassManager("generated")
        for needed in PASSES:
            manager.add_pass(needed, needed.__name__)
        manager.finalize()
        return [manager]


@contextmanager
def types_asked_once(context: Any) -> Iterator[None]:
    """Numba's look for the type of a call, kept for calls of the same function with the same types: it goes through all
    that the function could be, raises and catches errors on the way, and a text has thousands of calls but few kinds."""
    known: dict[tuple[Any, ...], Any] = {}
    resolve, outer = context.resolve_function_type, vars(context).get("resolve_function_type")

    def resolved(function: Any, args: Any, kws: Any) -> Any:
        if function in ("static_getitem", "static_setitem"):  # their second argument is the index itself
            return resolve(function, args, kws)
        key = function, tuple(args), tuple(sorted(kws.items()))
        found = known.get(key)
        if found is None:
            found = resolve(function, args, kws)
            if found is not None:
                known[key] = found
        return found

    context.resolve_function_type = resolved
    try:
        yield
    finally:
        del context.resolve_function_type
        if outer is not None:  # a text that is compiled for another one
            context.resolve_function_type = outer


class Library(_Library):  # type: ignore[misc]
    """Machine code that LLVM optimises once, as a whole."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        manager, builder = self._codegen._module_pass_manager(opt=OPTIMISATION)
        manager.run(self._final_module, builder)


def prepare(task: Any) -> None:
    """Have a dispatcher compile this way; it is called from Python only, so nobody needs its form for C."""
    task._compiler.pipeline_class = Compiler
    task.targetoptions["no_cfunc_wrapper"] = True
