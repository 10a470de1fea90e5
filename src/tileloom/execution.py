"""One compilation made ready to run: on the CPU or a GPU through generated source, or on an interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Array, Scalar
from .compiler.calls import extents_of
from .compiler.target import CudaTarget, Target
from .compiler.tensor_ir import Graph

if TYPE_CHECKING:
    from .compiler.interpreter.tensor import Precision
    from .compiler.pipeline import Compilation
    from .compiler.tile_ir import TileModule
    from .runtime.launch import Kernel
    from .runtime.machine_code import Assembled


Run = Callable[[Mapping[str, Array], Mapping[str, Scalar]], dict[str, Array]]
"""Tensors, and scalars and extents, by name to outputs and updated parameters by name; arguments are not changed."""


class CannotRun(ValueError):
    """There is nothing here to run generated code of this target on."""


def on_cpu(compilation: Compilation, source: str | None = None, path: str | Path | None = None) -> Kernel:
    """The kernel of a compilation for the CPU, from its own source or an edited one (`path` is the file it stands in).

    Raises ValueError in words where an edited source cannot be run or lacks a function.
    """
    from .runtime.kernels import build
    from .runtime.launch import Kernel

    if source is None:
        return Kernel(compilation.written, compilation.module, build(compilation.source))
    try:
        functions = build(source, path, edited=True)
    except Exception as reason:  # whatever a user's edited text raises when it is run
        raise ValueError(
            f"{path or 'the source'} cannot be run: {type(reason).__name__}: {reason}"
        ) from reason
    try:
        return Kernel(compilation.written, compilation.module, functions, edited=True)
    except KeyError as missing:
        raise ValueError(f"{path or 'the source'} defines no function {missing}") from None


def on_gpu(
    module: TileModule, source: str, target: Target, spills: Callable[[Assembled, bool], None] | None = None
) -> Run:
    """Code for a CUDA target on the first device that is there, on copies of NumPy arrays; `spills` is told of code that
    keeps values in memory. Raises `CannotRun`."""
    able = runnable(target)
    from .runtime.device_copies import run_module
    from .runtime.launches import Source

    return partial(run_module, module, Source(source, able, spills))


def runnable(target: Target, number: int = 0) -> CudaTarget:
    """A CUDA target, where the device of this number runs its code. Raises `CannotRun`."""
    assert isinstance(target, CudaTarget)
    from .runtime import driver, machine_code

    if not machine_code.toolkit_installed():
        raise CannotRun(machine_code.NOT_INSTALLED)
    found = driver.present(number)
    if found is None or not driver.runs_on(target, found.capability):
        which = f"device {number}" if number else "the device here"
        there = f"{which} is {found.name}" if found else "there is no CUDA device here"
        raise CannotRun(
            f"{there}, so code for {target.name} can be generated and assembled but not run; "
            "the targets `cpu` and `interp` run anywhere"
        )
    return target


def gpu_target(number: int = 0) -> CudaTarget | None:
    """The target of a device that is there, None where there is none or the extra `cuda` is not installed."""
    from .runtime import driver, machine_code

    return driver.present(number) if machine_code.toolkit_installed() else None


def why_no_gpu() -> str:
    """What `gpu_target` lacks: without a device the extra `cuda` would not help."""
    from .runtime import driver, machine_code

    if driver.present() is None:
        return "there is no CUDA device here"
    return f"the extra `cuda` is not installed: {machine_code.INSTALL}"


def interpret(
    graph: Graph,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    precision: Precision = "storage",
    check_indices: bool = False,
) -> dict[str, Array]:
    """The tensor interpreter: outputs, then updated parameters. `float64` computes everything in f64: the oracle."""
    from .compiler.interpreter import tensor

    return tensor.run(graph, tensors, scalars, precision=precision, check_indices=check_indices)


def interpret_tiles(
    compilation: Compilation, tensors: Mapping[str, Array], scalars: Mapping[str, Scalar]
) -> dict[str, Array]:
    """The tile interpreter on the compiled tile program, which need not have every parameter of the kernel; extents come
    from all of them."""
    extents = extents_of(compilation.written, {n: x.shape for n, x in tensors.items()}, scalars)
    return interpret_module(compilation.module, tensors, {**scalars, **extents})


def interpret_module(
    module: TileModule,
    tensors: Mapping[str, Array],
    scalars: Mapping[str, Scalar],
    check_indices: bool = False,
) -> dict[str, Array]:
    """The tile interpreter: outputs and updated parameters. A fault of the program is a ValueError in words."""
    from .compiler.interpreter import tile

    try:
        return tile.run_module(module, tensors, scalars, check_indices=check_indices)
    except tile.TileFault as fault:
        raise ValueError(str(fault)) from None
