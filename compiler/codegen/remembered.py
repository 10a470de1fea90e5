"""Kernels of programs that were generated a moment ago: groupings and schedules are compared by what their code takes, and
the one that is chosen is generated for good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import TypeVar

from ..target import CudaTarget
from ..tile_ir import TileProgram

Made = TypeVar("Made")
MOST = 64

Key = tuple[object, ...]


def told_apart(program: TileProgram) -> Key:
    """All that a program says, flat: expressions nest as deep as a text has terms, and `repr` and `hash` of what is nested
    recur. Constants count with their type and sign: to Python `True`, `1` and `1.0` are equal, and so are 0.0 and -0.0."""
    said: list[object] = []
    waiting: list[object] = [program]
    while waiting:
        part = waiting.pop()
        if isinstance(part, tuple):
            said.append(len(part))
            waiting.extend(part)
        elif is_dataclass(part):
            said.append(type(part))
            waiting.extend([getattr(part, f.name) for f in fields(part) if f.compare])
        else:
            said.append(repr(part) if isinstance(part, bool | int | float) else part)
    return tuple(said)


def remembered(
    generate: Callable[[TileProgram, CudaTarget], list[Made]],
) -> Callable[[TileProgram, CudaTarget], list[Made]]:
    """The same, once for each of the latest programs."""
    known: dict[tuple[Key, CudaTarget], list[Made]] = {}

    @wraps(generate)
    def found(program: TileProgram, target: CudaTarget) -> list[Made]:
        key = told_apart(program), target
        made = known.get(key)
        if made is None:
            made = generate(program, target)
            while len(known) >= MOST:
                known.pop(next(iter(known)), None)
            known[key] = made
        return [*made]

    return found
