"""Functions written in LLVM's instructions, outside any kernel: their machine code is kept in the cache folder."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite
from llvmlite import binding, ir

from .cache import digest, digest_of_files, store


def address(name: str, write: Callable[[ir.Module], None], *files: str) -> int:
    """The address of function `name` of the module that `write` fills, for the life of the process. `files` hold the text
    that decides what it writes."""
    own = digest_of_files("runtime/native_code.py", *files)
    folder, group = store(), f"native-{digest(binding.get_default_triple(), llvmlite.__version__, own)}"
    with folder.making(group):
        code = folder.get(group, name)
        if code is None:
            module = ir.Module(name)
            module.triple = binding.get_default_triple()
            write(module)
            code = _machine().emit_object(binding.parse_assembly(str(module)))
            folder.put(group, code, name)
    engine = linked(code)
    kept_for_good(engine)
    return int(engine.get_function_address(name))


def linked(object_file: bytes) -> Any:
    """What owns the machine code of an object file and knows the addresses of its symbols. Ends the process where the file
    needs a symbol that neither the process has nor LLVM was told of."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(object_file))
    engine.finalize_object()
    return engine


def _machine() -> Any:
    """What LLVM makes code for: one for each engine, which owns it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(opt=2, jit=True)


def kept_for_good(owner: object) -> None:
    """Have nobody free this, not even Python when it ends: threads in native code go on until the process is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
