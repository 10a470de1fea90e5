"""Calls that need no more checks: recognised by their key, run in a few microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..dsl.records import dataclass

CallKey = tuple[object, ...]
NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int32, np.int64, np.bool_})


def call_key(positional: Sequence[Any], named: Mapping[str, Any], outs: Sequence[Any] = ()) -> CallKey | None:
    """The same for calls that need the same checks and code, but for whether `outs`, the arrays to write, share memory with
    others; None where another kind of argument is among them."""
    key: list[Any] = [*named]
    if outs:
        key.append(len(outs))
    for x in (*positional, *named.values(), *outs) if named or outs else positional:
        kind = type(x)
        if kind is np.ndarray:
            key += (x.shape, x.dtype, x.flags.num)
        elif kind in NUMBERS:
            key += (kind, x or str(x))  # 0.0 and -0.0 are equal
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
    types of what it makes, C-contiguous; `bits` are the arrays, numbered with outputs after inputs, that are taken as their
    bits. What is left to do is written as two small functions: loops over these lists would take as long as a small kernel.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        outputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...],
        bits: tuple[int, ...],
        steps: tuple[Step, ...],
    ) -> None:
        self._places = places
        made: dict[str, Any] = {}
        exec(_text(places, outputs, bits, steps), _known(outputs, steps), made)
        self._make: Callable[[tuple[Any, ...]], Any] = made["make"]
        self._fill: Callable[[tuple[Any, ...], Sequence[Any]], None] = made["fill"]

    def __call__(self, values: tuple[Any, ...]) -> Any:
        """The results, in new arrays."""
        return self._make(values)

    def into(self, values: tuple[Any, ...], outs: Sequence[Any]) -> bool:
        """Write the results to these arrays, of the right shapes and types; False, and nothing is done, where one may share
        memory with another array of the call."""
        shares = np.may_share_memory
        for n, out in enumerate(outs):
            for i in self._places:
                if shares(out, values[i]):
                    return False
            for other in outs[:n]:
                if shares(out, other):
                    return False
        self._fill(values, outs)
        return True


def _text(places: Sequence[int], outputs: Sequence[Any], bits: Sequence[int], steps: Sequence[Step]) -> str:
    """`make` allocates the results and returns them, `fill` writes them to given arrays; both then launch each step."""
    launch = [f"    x{i} = values[{place}]" for i, place in enumerate(places)]
    launch += [f"    x{i} = x{i}.view(bits)" for i in bits]
    for n, s in enumerate(steps):
        given = [f"b{n}_{i}" for i in range(len(s.before))] + [f"x{i}" for i in s.taken]
        launch.append(f"    f{n}({', '.join([*given, *(f'n{n}_{i}' for i in range(len(s.numbers)))])})")
    results = [f"x{len(places) + i}" for i in range(len(outputs))]
    made = [f"    y{i} = {x} = empty(shape{i}, dtype{i})" for i, x in enumerate(results)]
    given = [f"    {x} = outs[{i}]" for i, x in enumerate(results)]
    back = ", ".join(f"y{i}" for i in range(len(outputs))) or "None"
    lines = [
        "def make(values):",
        *made,
        *launch,
        f"    return {back}",
        "def fill(values, outs):",
        *given,
        *launch,
    ]
    return "\n".join([*lines, "    return None"])


def _known(outputs: Sequence[Any], steps: Sequence[Step]) -> dict[str, Any]:
    """What the names in the text stand for."""
    known: dict[str, Any] = {"empty": np.empty, "bits": np.uint16}
    for i, (shape, dtype) in enumerate(outputs):
        known |= {f"shape{i}": shape, f"dtype{i}": dtype}
    for n, s in enumerate(steps):
        known[f"f{n}"] = s.function
        known |= {f"b{n}_{i}": x for i, x in enumerate(s.before)}
        known |= {f"n{n}_{i}": x for i, x in enumerate(s.numbers)}
    return known
