"""What a kernel's parameters make of a call: arguments by name, numbers in their types, extents and shapes, all checked."""

from __future__ import annotations

import difflib
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..compiler.calls import check_call, extents_of
from ..compiler.evaluate import Number, evaluate
from ..compiler.interpreter.elements import NUMPY
from ..compiler.tensor_ir import Graph, Node
from ..compiler.tile_ir import TileModule
from ..dsl.records import dataclass
from ..dsl.types import DType

MAX_BYTES = 2**63 - 1
REMEMBERED_CALLS = 256


@dataclass(frozen=True)
class Plan:
    """What a call's shapes and scalars settle: extents, output shapes, scratch shapes, launches for one thread."""

    extents: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    scratch: dict[str, tuple[int, ...]]
    alone: tuple[bool, ...]


class Parameters:
    """The parameters of a compiled kernel, `graph.order`, given by position or by name; extents declared as parameters go by
    name."""

    def __init__(self, graph: Graph, module: TileModule) -> None:
        self.graph = graph
        self.module = module
        self._plans: dict[tuple[object, ...], Plan] = {}

    # -- arguments

    def _what(self, name: str) -> str:
        return f"{self.graph.name}: `{name}`"

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name."""
        order, declared = self.graph.order, self.graph.declared
        if len(args) > len(order):
            raise TypeError(
                f"{self.graph.name} takes {len(order)} arguments ({', '.join(order)}), {len(args)} were given"
            )
        given = dict(zip(order, args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise TypeError(f"{self._what(name)} is given twice, by position and by name")
            if name not in order and name not in declared:
                raise TypeError(f"{self.graph.name} has no parameter `{name}`{self._nearest(name)}")
            given[name] = value
        missing = [n for n in (*order, *declared) if n not in given]
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise TypeError(f"{self.graph.name} is missing argument{plural} {', '.join(missing)}")
        return given

    def _nearest(self, name: str) -> str:
        names = (*self.graph.order, *self.graph.declared, "out")
        close = difflib.get_close_matches(name, names, 1)
        return f"; did you mean `{close[0]}`?" if close else f"; it has {', '.join(names)}"

    def _scalars(self, given: Mapping[str, Any]) -> dict[str, Number]:
        kinds = {n: s.dtype for n, s in self.graph.scalars.items()} | dict.fromkeys(
            self.graph.declared, DType.I64
        )
        return {n: scalar(given[n], self._what(n), dtype) for n, dtype in kinds.items()}

    # -- shapes

    def _plan(self, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Number]) -> Plan:
        """Extents and shapes of a call, after all checks; remembered for the latest calls."""
        key = (*shapes.items(), *scalars.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._settle(shapes, scalars)
            if len(self._plans) >= REMEMBERED_CALLS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        return plan

    def _settle(self, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Number]) -> Plan:
        extents = extents_of(self.graph, shapes, scalars)
        check_call(self.graph, extents, scalars)
        self._check_statics(extents)
        outputs = {
            n: self._shape(n, t.shape, t.dtype, extents, scalars) for n, t in self.graph.outputs.items()
        }
        scratch = self._scratch({**scalars, **extents}) if self.module.scratch else {}
        known = {**extents, **{n: int(v) for n, v in scalars.items() if isinstance(v, int)}}
        return Plan(extents, outputs, scratch, self._small(known))

    def _small(self, extents: Mapping[str, int]) -> tuple[bool, ...]:
        """For each launch, whether one thread does. A device's threads need no waking."""
        return ()

    def _check_statics(self, extents: Mapping[str, int]) -> None:
        for p in self.module.programs:
            for name, value in p.statics:
                if extents.get(name, value) != value:
                    raise ValueError(
                        f"{self.graph.name}: {name} is {extents[name]}; this version is compiled for {name} = {value}"
                    )

    def _scratch(self, numbers: Mapping[str, Number]) -> dict[str, tuple[int, ...]]:
        from ..compiler.interpreter.tile import integer  # a module that most kernels run without

        return {
            s.name: self._sized(s.name, tuple(integer(x, numbers) for x in s.shape), s.dtype)
            for s in self.module.scratch
        }

    def _shape(
        self,
        name: str,
        shape: Sequence[Node],
        dtype: DType,
        extents: Mapping[str, int],
        scalars: Mapping[str, Number],
    ) -> tuple[int, ...]:
        return self._sized(name, tuple(int(evaluate(n, extents, scalars)) for n in shape), dtype)

    def _sized(self, name: str, shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
        if any(n < 0 for n in shape):
            raise ValueError(f"{self._what(name)} would have shape {shape}: no axis can be negative")
        if math.prod(n or 1 for n in shape) * dtype.bytes > MAX_BYTES:
            raise ValueError(f"{self._what(name)} would have shape {shape}: more than 2^63 - 1 bytes")
        return shape


def scalar(value: Any, what: str, dtype: DType) -> Number:
    """A scalar argument as a Python number. Raises `TypeError` for another kind, `ValueError` for one out of range."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if dtype is DType.BOOL:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{what} is {value!r}; True or False is what it takes")
        return bool(value)
    if isinstance(value, bool | np.bool_ | np.ndarray):
        raise TypeError(f"{what} is {value!r}; a number ({dtype}) is what it takes")
    return _real(value, what, dtype) if dtype.is_float else _whole(value, what, dtype)


def _real(value: Any, what: str, dtype: DType) -> float:
    """Rounded to its type, so that what is required of a scalar is asked of the number that a kernel gets."""
    try:
        given = float(value.__float__() if hasattr(value, "__float__") else operator.index(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} is {value!r}; a number ({dtype}) is what it takes") from error
    except OverflowError as error:
        raise ValueError(
            f"{what} is an integer beyond {sys.float_info.max:.3g}, the largest float"
        ) from error
    if dtype is DType.F64:
        return given
    with np.errstate(over="ignore"):
        held = float(NUMPY[dtype].type(given))
    if math.isinf(held) and not math.isinf(given):
        raise ValueError(f"{what} is {given!r}, beyond what {dtype} holds")
    return held


def _whole(value: Any, what: str, dtype: DType) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{what} is {value!r}; an integer ({dtype}) is what it takes") from error
    info = np.iinfo(NUMPY[dtype])
    if not info.min <= number <= info.max:
        raise ValueError(f"{what} is {number}; {dtype} holds {info.min} to {info.max}")
    return number
