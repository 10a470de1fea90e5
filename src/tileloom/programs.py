"""Programs as the facade gives them out: kernels, hand-written tile programs and gradients, all by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from .compiler.elaborate import elaborate
from .compiler.tensor_ir import Graph
from .compiler.tile_kernel import TilesKernel, tiles_kernel
from .dsl import load as texts
from .dsl import syntax
from .dsl.diagnostics import refuse
from .dsl.records import dataclass
from .dsl.shelves import keep
from .dsl.types import DType
from .runtime.cache import store
from .runtime.versions import version

keep(store, version("lark"))


@dataclass(frozen=True)
class Program(syntax.Program):
    """A program whose `program["name"]` finds tile programs too."""

    def __repr__(self) -> str:
        return f"<program {self.file.source.name}: {', '.join(names(self)) or 'no kernels'}>"

    def __getitem__(self, name: str) -> syntax.ProgramKernel:
        return kernel_named(self, name)


def load(path: str | Path) -> Program:
    """The program of a `.tile` file and everything it imports. Raises `TileError`, also where no file can be read."""
    return _loaded(texts.load(path))


def parse(text: str, name: str = "<text>") -> Program:
    """The program of a text. Its imports are relative to the folder of `name`, the current one for `<text>` and `-`.

    Raises `TileError` with every error found.
    """
    return _loaded(texts.parse(text, name))


def _loaded(program: syntax.Program) -> Program:
    return Program(**{f.name: getattr(program, f.name) for f in fields(program)})


def names(program: syntax.Program) -> list[str]:
    """What can be compiled, in the order of the text."""
    return [*program.kernels, *program.tiles]


def kernel_named(program: syntax.Program, name: str) -> syntax.ProgramKernel:
    """A kernel or tile program. Raises KeyError, and `TileError` where a tile program is wrong or a gradient is meant."""
    if name in program.tiles:
        return tiles_kernel(program, program.tiles[name])
    if name in program.grads:
        grad = program.grads[name]
        raise refuse(
            "E0701",
            f"`{name}` is the gradient of `{grad.kernel.name}`, which this version does not derive yet",
            grad.span,
            note="`grad` declarations are read and checked",
            help=f"the kernel itself can be compiled: `{grad.kernel.name}`",
        )
    if name not in program.kernels:
        known = ", ".join(names(program)) or "none"
        raise KeyError(f"no kernel named {name!r}; this program has: {known}")
    return syntax.ProgramKernel(program, program.kernels[name])


def graph_of(kernel: syntax.ProgramKernel, dtypes: Mapping[str, DType] | None = None) -> Graph:
    """A kernel's tensor IR as written; of a tile program, its parameters and checks only. Raises `TileError`."""
    return kernel.graph if isinstance(kernel, TilesKernel) else elaborate(kernel, dtypes)
