"""The arguments of a call: names, element types, dtype parameters. Every refusal names the argument and what would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .compiler.interpreter.elements import NUMPY, element_of
from .dsl.records import dataclass
from .dsl.suggest import did_you_mean
from .dsl.syntax import Kernel, Param
from .dsl.types import NAMES, DType
from .runtime.arrays import as_numpy
from .runtime.parameters import scalar

Array = npt.NDArray[Any]
Scalar = bool | int | float


@dataclass(frozen=True)
class Arguments:
    """Tensors and scalars by name; declared extents stand among the scalars. `dtypes` are the dtype parameters, `first` is
    the first array as given, whose kind results have."""

    tensors: dict[str, Any]
    scalars: dict[str, Scalar]
    dtypes: dict[str, DType]
    first: object = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: x.shape for name, x in self.tensors.items()}


def bind(
    kernel: Kernel,
    positional: Sequence[object],
    named: Mapping[str, object],
    read: Callable[[Any, str], Any] = as_numpy,
) -> Arguments:
    """The arguments of one call by parameter; `read` makes NumPy arrays of what is given, or what has their `shape`,
    `dtype` and `flags`. Raises TypeError."""
    given = _by_name(kernel, positional, named)
    tensors: dict[str, Any] = {}
    scalars: dict[str, Scalar] = {}
    for p in kernel.params:
        name = p.name.name
        if p.shape:
            tensors[name] = _tensor(kernel, p, given[name], read)
        else:
            scalars[name] = _scalar(kernel, name, given[name])
    for name in declared_extents(kernel):
        scalars[name] = _scalar(kernel, name, given[name])
    dtypes = deduced(kernel, {name: e for name, x in tensors.items() if (e := element_of(x.dtype))})
    for p in kernel.params:
        if not p.shape:
            scalars[p.name.name] = _held(kernel, p, scalars[p.name.name], dtypes)
    return Arguments(tensors, scalars, dtypes, next((given[name] for name in tensors), None))


def declared_extents(kernel: Kernel) -> list[str]:
    return [t.name.name for t in kernel.type_params if t.kind == "extent"]


def _by_name(kernel: Kernel, positional: Sequence[object], named: Mapping[str, object]) -> dict[str, object]:
    here = kernel.name.name
    names = [p.name.name for p in kernel.params]
    if len(positional) > len(names):
        raise TypeError(
            f"{here} takes {len(names)} arguments ({', '.join(names)}), {len(positional)} are given"
        )
    given = dict(zip(names, positional, strict=False))
    wanted = [*names, *declared_extents(kernel)]
    for name, value in named.items():
        if name in given:
            raise TypeError(f"{here}: `{name}` is given twice, by place and by name")
        if name not in wanted:
            near = did_you_mean(name, wanted)
            raise TypeError(
                f"{here} has no parameter `{name}`; it takes {', '.join(wanted)}"
                + (f": {near}" if near else "")
            )
        given[name] = value
    missing = [n for n in wanted if n not in given]
    if missing:
        raise TypeError(f"{here}: argument `{missing[0]}` is missing; it takes {', '.join(wanted)}")
    return given


def _tensor(kernel: Kernel, p: Param, value: object, read: Callable[[Any, str], Any]) -> Any:
    name = p.name.name
    array = read(value, f"{kernel.name.name}: `{name}`")
    if element_of(array.dtype) is None:
        known = ", ".join(str(NUMPY[d]) for d in DType)
        raise TypeError(f"{kernel.name.name}: `{name}` holds {array.dtype}; arrays may hold {known}")
    if p.inout and not array.flags.writeable:
        raise ValueError(f"{kernel.name.name}: `{name}` is updated in place, but the array is read-only")
    return array


def _scalar(kernel: Kernel, name: str, value: object) -> Scalar:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, bool | int | float):
        kind = type(value).__name__
        raise TypeError(f"{kernel.name.name}: `{name}` is a {kind}; a number is needed")
    return value


def _held(kernel: Kernel, p: Param, value: Scalar, dtypes: Mapping[str, DType]) -> Scalar:
    """The number as its type holds it, which is what a kernel gets and what it may require something of."""
    name, dtype = p.name.name, dtypes.get(p.dtype.name) or NAMES[p.dtype.name]
    if dtype is DType.BOOL and not isinstance(value, bool):
        raise TypeError(f"{kernel.name.name}: `{name}` is {value!r}; it is bool, so True or False is needed")
    if dtype.is_integer and isinstance(value, float):
        raise TypeError(f"{kernel.name.name}: `{name}` is {value!r}; it is {dtype}, so an integer is needed")
    return value if dtype is DType.BOOL else scalar(value, f"{kernel.name.name}: `{name}`", dtype)


# ---------------------------------------------------------------- dtype parameters


def alternatives(kernel: Kernel) -> dict[str, list[DType]]:
    """The element types that each dtype parameter may stand for."""
    return {
        t.name.name: [NAMES[a.name] for a in t.alternatives] for t in kernel.type_params if t.kind == "dtype"
    }


def deduced(kernel: Kernel, elements: Mapping[str, DType]) -> dict[str, DType]:
    """The dtype parameters from the tensors' element types; the first alternative where no tensor tells.

    Raises TypeError where two arguments disagree or one is none of the alternatives.
    """
    here, allowed = kernel.name.name, alternatives(kernel)
    found: dict[str, DType] = {}
    told_by: dict[str, str] = {}
    for p in kernel.params:
        name, written = p.name.name, p.dtype.name
        if name not in elements:
            continue
        have = elements[name]
        if written not in allowed:
            if have is not NAMES[written]:
                raise TypeError(f"{here}: `{name}` holds {have}; it must hold {written}")
            continue
        if have not in allowed[written]:
            choices = ", ".join(map(str, allowed[written]))
            raise TypeError(f"{here}: `{name}` holds {have}; {written} can be {choices}")
        if found.setdefault(written, have) is not have:
            other = told_by[written]
            raise TypeError(
                f"{here}: `{other}` holds {found[written]} and `{name}` holds {have}, but both are {written}; "
                f"convert one of them"
            )
        told_by.setdefault(written, name)
    return {t: found.get(t, choices[0]) for t, choices in allowed.items()}
