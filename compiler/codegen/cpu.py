"""Tile IR to Numba source for the CPU: one file a module, one function a program, loops that LLVM vectorises.

A program becomes `NAME_tasks(first, last, queue, …)`, compiled, which runs tasks of its grid as long as there are any, and
`NAME(tensors, scalars, extents)`, which hands all of them out to threads. Tile values that need storage are small arrays
allocated once a range; everything else is computed inside the loop nest of its consumer. Matrix products go through
`multiply`, which takes one operand wherever it lies and the other packed so that rows of it are vectors. No lane beyond an
extent is ever visited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..target import Target
from ..tile_ir import Grid, Let, Stmt, TileModule, TileProgram
from .cpu_lanes import oriented
from .cpu_names import ModuleNames
from .cpu_narrow import VERBS
from .cpu_tasks import Task
from .numba_text import (
    EXPORTS,
    MATRICES,
    NARROW_PRODUCTS,
    PRODUCTS,
    STORAGE,
    TASKS,
    VECTORS,
    Buffer,
    Signature,
)
from .placement import distinct

THREADS = "tileloom.runtime.threads"
MODULES = {
    "tileloom.runtime.intrinsics.cpu": EXPORTS,
    "tileloom.runtime.intrinsics.matrices": MATRICES,
    "tileloom.runtime.intrinsics.matrix_units": NARROW_PRODUCTS,
    "tileloom.runtime.intrinsics.storage": STORAGE,
    "tileloom.runtime.intrinsics.tasks": TASKS,
    "tileloom.runtime.intrinsics.tile_products": PRODUCTS,
    "tileloom.runtime.intrinsics.vectors": VECTORS,
}
"""What generated source may import, by module."""


def generate(module: TileModule, target: Target | None = None) -> str:
    """Numba source of a module: for each program a function of its name that takes tensors (f16 and bf16 as uint16),
    scalars, then the extents that are not static, in the program's order. Deterministic; the same for every CPU."""
    written = _Module(module)
    body = [line for p in module.programs for line in written.program(p)]
    used = _words(body)
    head = [f'"""Module `{module.name}` for the CPU, written by tileloom."""', "", "from numba import njit"]
    head += [line for where, names in MODULES.items() for line in _imports(where, sorted(used & names))]
    head += [f"from {THREADS} import run_tasks"] if "run_tasks" in used else []
    constants = [f"{name} = {value}" for (_, value), name in written.constants.items() if name in used]
    return "\n".join([*head, *(["", *constants] if constants else []), *body, ""])


def workspace(module: TileModule) -> dict[str, tuple[tuple[Buffer, ...], ...]]:
    """By program name, the buffers of a task of each of its grids, which run one after another."""
    written = _Module(module)
    return {p.name: tuple(t.function().buffers for t in written.tasks(p)) for p in module.programs}


def narrow_products(module: TileModule) -> dict[str, frozenset[str]]:
    """By program name, the functions for products of narrow operands that its text calls."""
    written = _Module(module)
    return {
        p.name: frozenset(v for t in written.tasks(p) for v in _words(t.function().lines) & {*VERBS.values()})
        for p in module.programs
    }


def _words(lines: Iterable[str]) -> set[str]:
    """Names in code."""
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(line.split("#")[0] for line in lines)))


def _imports(where: str, names: list[str]) -> list[str]:
    line = f"from {where} import {', '.join(names)}"
    if not names:
        return []
    if len(line) <= 110:
        return [line]
    lines, row = [f"from {where} import ("], "   "
    for n in names:
        if len(row) + len(n) > 104:
            lines, row = [*lines, row], "   "
        row += f" {n},"
    return [*lines, row, ")"]


class _Module(ModuleNames):
    """Names that all functions of a file see: constants for static extents, and the functions."""

    def __init__(self, module: TileModule) -> None:
        super().__init__(module)
        new = self.names.new
        self.compiled = {p.name: [new(f"{p.name}_tasks") for _ in _grids(p)] for p in module.programs}

    def tasks(self, program: TileProgram) -> list[Task]:
        unique = oriented(distinct(program))
        names = self.names.inner()
        statics = dict(program.statics)
        signature = Signature(
            unique,
            names,
            {p.name: names.new(p.name) for p in program.params},
            {s.name: names.new(s.name) for s in program.scalars},
            {e: self.constants[e, statics[e]] if e in statics else names.new(e) for e in program.extents},
        )
        grids = zip(self.compiled[program.name], _grids(unique), strict=True)
        return [Task(replace(signature, names=names.inner()), name, g, before) for name, (g, before) in grids]

    def program(self, program: TileProgram) -> Iterator[str]:
        """Lines of a program: its compiled functions, then the one that launches them."""
        tasks = self.tasks(program)
        for t in tasks:
            yield from ("", "", *t.function().lines)
        yield from ("", "", f"def {self.functions[program.name]}({tasks[0].signature.arguments}):")
        for t in tasks:
            yield from t.launch()


def _grids(program: TileProgram) -> list[tuple[Grid, tuple[Stmt, ...]]]:
    """The grids at the top of a program, each with the values defined before it; any other program is one task."""
    body = program.body
    if any(not isinstance(s, Grid | Let) for s in body) or not any(isinstance(s, Grid) for s in body):
        return [(Grid((), body), ())]
    return [
        (s, tuple(x for x in body[:i] if isinstance(x, Let)))
        for i, s in enumerate(body)
        if isinstance(s, Grid)
    ]
