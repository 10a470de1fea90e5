"""Everything about a program that is decided by names alone, before types and extents."""

from __future__ import annotations

from . import syntax as s
from .diagnostics import Diagnostics


def check(program: s.Program) -> None:
    """Raise `TileError` with every error of the program's names."""
    found = Diagnostics()
    for kernel in program.kernels.values():
        defined = {p.name.name for p in kernel.params} | {st.target.name for st in kernel.statements}
        for output in kernel.outputs:
            if output.name.name not in defined:
                found.error("E0120", f"the output `{output.name.name}` is never defined", output.name.span)
    found.check()
