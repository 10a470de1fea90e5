"""FILE[:KERNEL] on a command line: the program, and the kernel that is meant."""

from __future__ import annotations

from pathlib import Path

from ..dsl.load import load, parse
from ..dsl.suggest import did_you_mean
from ..dsl.syntax import Program, ProgramKernel
from ..programs import kernel_named
from .failures import usage
from .texts import standard_input


def read_program(file: str) -> Program:
    """The program of a path or, for `-`, of standard input. Raises `TileError`."""
    if file == "-":
        return parse(standard_input().decode("utf-8-sig", errors="replace"), "-")
    return load(file)


def split(what: str) -> tuple[str, str | None]:
    """`attention.tile:causal` -> the file and the kernel. A colon that is part of an existing path stays in it."""
    file, colon, kernel = what.rpartition(":")
    if not colon or Path(what).exists() or not kernel.isidentifier():
        return what, None
    return file, kernel


def read_kernel(what: str) -> ProgramKernel:
    """The kernel named, or the only one of the file. Raises `TileError` and, for a wrong name, `CommandError`."""
    file, name = split(what)
    program = read_program(file)
    items = {**program.kernels, **program.tiles}
    own = [k for k, item in items.items() if item.span.source is program.file.source]
    if name is None:
        if len(own) != 1:
            raise usage(
                f"{file} holds several kernels; write one of " + ", ".join(f"{file}:{k}" for k in own)
                if own
                else f"{file} holds no kernel"
            )
        return kernel_named(program, own[0])
    if name not in items and name not in program.grads:
        near = did_you_mean(name, items)
        known = ", ".join(items) or "none"
        raise usage(f"{file} has no kernel `{name}`; it has: {known}" + (f" ({near})" if near else ""))
    return kernel_named(program, name)
