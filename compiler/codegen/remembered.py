"""Kernels of programs that were generated a moment ago: groupings and schedules are compared by what their code takes, and
the one that is chosen is generated for good."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from ..target import CudaTarget
from ..tile_ir import TileProgram

Made = TypeVar("Made")
MOST = 64


def remembered(
    generate: Callable[[TileProgram, CudaTarget], list[Made]],
) -> Callable[[TileProgram, CudaTarget], list[Made]]:
    """The same, once for each of the latest programs, told apart by all that `repr` shows: 0.0 and -0.0 are equal."""
    known: dict[tuple[str, CudaTarget], list[Made]] = {}

    @wraps(generate)
    def found(program: TileProgram, target: CudaTarget) -> list[Made]:
        key = repr(program), target
        made = known.get(key)
        if made is None:
            made = generate(program, target)
            while len(known) >= MOST:
                known.pop(next(iter(known)), None)
            known[key] = made
        return [*made]

    return found
