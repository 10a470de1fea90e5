"""`-D NAME=VALUE`: extents, scalars and dtype parameters, with sweeps.

-D M=1024           one value            -D scale=0.125      a scalar            -D T=bf16    a dtype parameter
-D N=512:8192:x2    512, 1024, … 8192    -D N=64:256:+64     64, 128, 192, 256   -D N=96,128  a list
-D M=N=512:2048:x2  several names that take the same value
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..dsl.types import NAMES, DType
from .failures import CommandError, usage

Value = int | float | DType
HELP = "an extent, a scalar or a dtype parameter: M=1024, scale=0.1, T=bf16; sweeps: N=512:8192:x2, N=64:256:+64, N=96,128"
LONGEST_SWEEP = 1000
NO_TYPES: Mapping[str, Iterable[DType]] = {}

_INTEGER = re.compile(r"[+-]?\d+")
_SWEEP = re.compile(r"(\d+):(\d+):([x+])(\d+)")


@dataclass(frozen=True)
class Setting:
    """One `-D`: all `names` take the same one of `values`."""

    names: tuple[str, ...]
    values: tuple[Value, ...]


def parse_settings(
    texts: Sequence[str], types: Mapping[str, Iterable[DType]] = NO_TYPES
) -> tuple[Setting, ...]:
    """Read every `-D`. Raises a usage error for text that is none, and for a name set twice.

    `types` are the element types that each dtype parameter of the kernel can be, for what is said about other words.
    """
    settings = tuple(_setting(t, types) for t in texts)
    names = [n for s in settings for n in s.names]
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if twice is not None:
        raise usage(f"-D sets `{twice}` twice")
    return settings


def single(settings: Sequence[Setting]) -> dict[str, Value]:
    """The one value of each name. Raises a usage error for a sweep."""
    swept = next((s for s in settings if len(s.values) > 1), None)
    if swept is not None:
        raise usage(f"-D {'='.join(swept.names)} has several values; only `bench` sweeps")
    return {n: s.values[0] for s in settings for n in s.names}


def points(settings: Sequence[Setting]) -> Iterator[dict[str, Value]]:
    """Every combination of the swept values, the last sweep fastest."""
    for values in itertools.product(*(s.values for s in settings)):
        yield {n: v for s, v in zip(settings, values, strict=True) for n in s.names}


def _setting(text: str, types: Mapping[str, Iterable[DType]]) -> Setting:
    *names, value = (part.strip() for part in text.split("="))
    if not names or not all(n.isidentifier() for n in names) or not value:
        raise usage(f"-D {text} is no setting; write {HELP}")
    typed = next((n for n in names if n in types), None)
    is_none = f"is neither a number nor an element type ({', '.join(NAMES)})"
    if typed is not None:
        is_none = f"is no element type; {typed} can be {', '.join(map(str, types[typed]))}"
    return Setting(tuple(names), _values(text, value, is_none))


def _values(text: str, value: str, is_none: str) -> tuple[Value, ...]:
    sweep = _SWEEP.fullmatch(value)
    if sweep is None:
        return tuple(_value(text, v.strip(), is_none) for v in value.split(","))
    low, high, step = int(sweep[1]), int(sweep[2]), int(sweep[4])
    if low > high or step < 1 or (sweep[3] == "x" and (step < 2 or low < 1)):
        raise usage(
            f"-D {text}: a sweep goes upwards, low:high:xFACTOR (2 or more, from 1) or low:high:+STEP"
        )
    values: list[Value] = []
    at = low
    while at <= high and len(values) <= LONGEST_SWEEP:
        values.append(at)
        at = at * step if sweep[3] == "x" else at + step
    if len(values) > LONGEST_SWEEP:
        raise usage(f"-D {text} has more than {LONGEST_SWEEP} values")
    return tuple(values)


def _value(text: str, value: str, is_none: str) -> Value:
    """One value; `is_none` is said of a word that is none."""
    if value in NAMES:
        return NAMES[value]
    if _INTEGER.fullmatch(value):
        return int(value)
    try:
        return float(value)
    except ValueError:
        raise CommandError(f"-D {text}: `{value}` {is_none}", 2) from None
