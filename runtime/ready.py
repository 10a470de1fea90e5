"""Calls that need no more checks: recognised by their key, run in a few microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .threads import alone

CallKey = tuple[object, ...]
NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int32, np.int64, np.bool_})


def call_key(positional: Sequence[Any], named: Mapping[str, Any]) -> CallKey | None:
    """The same for calls that need the same checks and code; None where another kind of argument is among them."""
    key: list[Any] = [*named]
    for x in positional:
        if type(x) is np.ndarray:
            key += (x.shape, x.dtype, x.flags.num)
        elif type(x) in NUMBERS:
            key += (type(x), x)
        else:
            return None
    for x in named.values():
        if type(x) is np.ndarray:
            key += (x.shape, x.dtype, x.flags.num)
        elif type(x) in NUMBERS:
            key += (type(x), x)
        else:
            return None
    return tuple(key)


@dataclass(frozen=True)
class Ready:
    """A call that is settled but for the arrays' addresses. `places` says where among the values of a call (by place, then
    by name) each array stands, `bits` which of the arrays, outputs after inputs, are taken as their bits; `steps` are
    functions with the arrays and numbers they take."""

    places: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    bits: tuple[int, ...]
    steps: tuple[tuple[Callable[..., object], tuple[int, ...], tuple[Any, ...], bool], ...]

    def __call__(self, values: tuple[Any, ...]) -> Any:
        made = [np.empty(shape, dtype) for shape, dtype in self.outputs]
        arrays = [values[i] for i in self.places] + made
        for i in self.bits:
            arrays[i] = arrays[i].view(np.uint16)
        for function, taken, numbers, one_thread in self.steps:
            if one_thread:
                with alone:
                    function(*[arrays[i] for i in taken], *numbers)
            else:
                function(*[arrays[i] for i in taken], *numbers)
        return made[0] if len(made) == 1 else tuple(made) if made else None
