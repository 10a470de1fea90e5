"""Runs a tile module through generated CPU code and through the tile interpreter, and compares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from tileloom.compiler.codegen import cpu
from tileloom.compiler.codegen.cpu_names import function_names
from tileloom.compiler.interpreter.elements import NUMPY
from tileloom.compiler.interpreter.tile import bind_extents, integer, run_module
from tileloom.compiler.tile_ir import Param, TileModule
from tileloom.compiler.tile_text import parse_module
from tileloom.compiler.verify import verify_module
from tileloom.runtime import kernels
from tileloom.runtime.arrays import to_kernel
from tileloom.runtime.launch import as_held

Arrays = dict[str, np.ndarray]


@cache
def module_of(text: str) -> TileModule:
    module = parse_module(text)
    verify_module(module, "text")
    return module


@cache
def functions_of(text: str) -> dict[str, kernels.Kernel]:
    return kernels.build(cpu.generate(module_of(text)))


def compiled(text: str, tensors: Mapping[str, np.ndarray], **scalars: Any) -> Arrays:
    """Outputs and inouts by name; arguments are not changed."""
    module = module_of(text)
    extents = bind_extents(module, tensors, scalars)
    names, functions = function_names(module), functions_of(text)
    memory: Arrays = {}
    for program in module.programs:
        for p in program.params:
            if p.name not in memory:
                memory[p.name] = _memory(p, tensors, {**scalars, **extents})
        fixed = dict(program.statics)
        functions[names[program.name]](
            *(to_kernel(memory[p.name], p.dtype) for p in program.params),
            *(as_held(scalars[s.name], s.dtype) for s in program.scalars),
            *(extents[e] for e in program.extents if e not in fixed),
        )
    written = {p.name for q in module.programs for p in q.params if p.mode != "in"}
    return {n: memory[n] for n in memory if n in written and n not in {s.name for s in module.scratch}}


def _memory(p: Param, tensors: Mapping[str, np.ndarray], numbers: Mapping[str, Any]) -> np.ndarray:
    """An argument; a copy if it is changed; new memory holds a value that shows where nothing is written."""
    if p.name in tensors:
        return tensors[p.name].copy() if p.mode != "in" else tensors[p.name]
    shape = tuple(integer(e, numbers) for e in p.shape)
    dtype = NUMPY[p.dtype]
    return np.full(shape, 99, dtype) if dtype.kind in "iu" else np.full(shape, np.nan).astype(dtype)


def both(text: str, tensors: Mapping[str, np.ndarray], tolerance: float = 2e-6, **scalars: Any) -> Arrays:
    """Compiled results after comparing them with the interpreter's: integers exactly, floats within `tolerance` of
    max(1, |value|), NaN and infinities alike."""
    got = compiled(text, tensors, **scalars)
    wanted = run_module(module_of(text), tensors, scalars)
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        close(got[name], want, tolerance, name)
    return got


def close(got: np.ndarray, want: np.ndarray, tolerance: float, name: str = "") -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    a, b = got.astype(np.float64), want.astype(np.float64)
    odd = ~np.isfinite(a) | ~np.isfinite(b)
    np.testing.assert_array_equal(a[odd], b[odd], err_msg=name)
    error = np.abs(a[~odd] - b[~odd]) / np.maximum(1, np.abs(b[~odd]))
    assert error.max(initial=0) <= tolerance, f"{name}: {error.max()}"
