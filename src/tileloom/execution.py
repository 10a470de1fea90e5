"""One compilation made ready to run: on the CPU through generated source, or on an interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Array, Scalar
from .compiler.interpreter import tensor, tile
from .compiler.interpreter.tensor import Precision
from .compiler.pipeline import Compilation
from .compiler.tensor_ir import Graph

if TYPE_CHECKING:
    from .runtime.launch import Kernel


class CannotRun(ValueError):
    """There is nothing to run generated code of this target on."""


def ready(compilation: Compilation, source: str | None = None, path: str | Path | None = None) -> Kernel:
    """The kernel of a compilation, from its own source or an edited one (`path` is the file it stands in).

    Raises `CannotRun` for CUDA targets, and ValueError in words where an edited source cannot be read or lacks a function.
    """
    if compilation.target.is_cuda:
        raise CannotRun(
            f"code for {compilation.target.name} is generated and assembled, but this version drives no GPU; "
            "run with target `cpu` or `interp`"
        )
    from .runtime.kernels import build
    from .runtime.launch import Kernel

    if source is None:
        return Kernel(compilation.written, compilation.module, build(compilation.source))
    try:
        functions = build(source, path)
    except Exception as reason:  # whatever a user's edited text raises when it is run
        raise ValueError(
            f"{path or 'the source'} cannot be run: {type(reason).__name__}: {reason}"
        ) from reason
    try:
        return Kernel(compilation.written, compilation.module, functions)
    except KeyError as missing:
        raise ValueError(f"{path or 'the source'} defines no function {missing}") from None


def interpret(
    graph: Graph,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    precision: Precision = "storage",
    check_indices: bool = False,
) -> dict[str, Array]:
    """The tensor interpreter: outputs, then updated parameters. `float64` computes everything in f64: the oracle."""
    return tensor.run(graph, tensors, scalars, precision=precision, check_indices=check_indices)


def interpret_tiles(
    compilation: Compilation, tensors: Mapping[str, Array], scalars: Mapping[str, Scalar]
) -> dict[str, Array]:
    """The tile interpreter on the compiled tile program."""
    return tile.run_module(compilation.module, tensors, scalars)
