"""Calls that need no more checks: recognised by their key, run in a few microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CallKey = tuple[object, ...]
NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int32, np.int64, np.bool_})


def call_key(positional: Sequence[Any], named: Mapping[str, Any]) -> CallKey | None:
    """The same for calls that need the same checks and code; None where another kind of argument is among them."""
    key: list[Any] = [*named]
    for x in (*positional, *named.values()) if named else positional:
        kind = type(x)
        if kind is np.ndarray:
            key += (x.shape, x.dtype, x.flags.num)
        elif kind in NUMBERS:
            key += (kind, x)
        else:
            return None
    return tuple(key)


@dataclass(frozen=True)
class Step:
    """One launch: `function` is called with `before`, the arrays numbered in `taken` and `numbers`."""

    function: Callable[..., object]
    before: tuple[Any, ...]
    taken: tuple[int, ...]
    numbers: tuple[Any, ...]


class Ready:
    """A call that is settled but for the arrays' addresses.

    `places` says where among the values of a call (by place, then by name) each array stands; `outputs` are shapes and
    types of what it makes; `bits` are the arrays, numbered with outputs after inputs, that are taken as their bits.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        outputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...],
        bits: tuple[int, ...],
        steps: tuple[Step, ...],
    ) -> None:
        self._places, self._outputs, self._bits = places, outputs, bits
        self._steps = [(s.function, s.before, s.taken, s.numbers) for s in steps]

    def __call__(self, values: tuple[Any, ...]) -> Any:
        made = [np.empty(shape, dtype) for shape, dtype in self._outputs]
        arrays = [values[i] for i in self._places]
        arrays += made
        for i in self._bits:
            arrays[i] = arrays[i].view(np.uint16)
        for function, before, taken, numbers in self._steps:
            function(*before, *[arrays[i] for i in taken], *numbers)
        return made[0] if len(made) == 1 else tuple(made) if made else None
