"""A settled call as one native function: from torch tensors to the driver's launch with no Python on the way.

Asking tensors for shape, strides, type, place and address is most of what a call costs in Python: five calls a tensor.
DLPack's C exchange API (dlpack.h 1.3, `DLPackExchangeAPI`; in torch since 2.10) answers all of it at once to native code.
That code is the same for every kernel, made once in a process; what a call is settled to stands in tables that it reads.

What `native_call` gives returns `NotImplemented` for a call that is not like the one it was made for: other types, shapes,
strides, alignment, device or numbers, memory that is written and shared, or another current context. Python's lock is held
while tables are filled and read, so no two threads meet in one.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..dsl.records import dataclass
from . import tensor_maps
from .native_tables import LAUNCH, MAKER, MAP, PLAN, RECORD, SLOT, VIEW, WORD_BYTES

if TYPE_CHECKING:
    from .launches import Launch

Call = Callable[[Sequence[Any], Mapping[str, Any], Any], Any]
"""Takes the arguments by place, those by name and `out`; gives the results or `NotImplemented`."""
NUMBERS = frozenset({float, int, bool})
DLPACK_MAJOR, DLPACK_CUDA = 1, 2
"""The version of the exchange API that is read here, and kDLCUDA of `DLDeviceType`."""


@dataclass(frozen=True)
class Settled:
    """A call of which addresses alone are open.

    Its values stand by place, then by name (`names`), then `outs`, what is to be written. Tensors are numbered as values
    are, and after them those that are made: by a function of one argument, None for the tensor numbered `like`. `results`
    of these are given back. `numbering` gives the number of each tensor as the launches count them, `spans` the bytes that
    it covers from its first element on, `written` which tensors are written.
    """

    values: tuple[Any, ...]
    names: tuple[str, ...]
    outs: int
    out_is_tuple: bool
    like: int
    makers: tuple[tuple[Callable[[Any], Any], Any], ...]
    results: int
    launches: tuple[Launch, ...]
    numbering: tuple[int, ...]
    spans: Mapping[int, tuple[int, int]]
    written: frozenset[int]


@dataclass(frozen=True)
class Driver:
    """Addresses of the driver's functions, the context that has to be current, the device as DLPack names it, and what
    raises an error for the number of a launch (-1: a tensor map) and the driver's answer, `number << 32 | answer`."""

    launch: int
    current_context: int
    encode_map: int
    context: int
    device: tuple[int, int]
    refused: Callable[[int], Any]


class NoWay(Exception):
    """There is no native function of a call; the message says why."""


def native_call(settled: Settled, driver: Driver) -> Call:
    """The native function of a call. Raises `NoWay` where an argument is neither a plain torch tensor that DLPack can
    describe nor a plain number, or Python or torch offers no way."""
    torch = sys.modules.get("torch")
    kinds = NUMBERS if torch is None else {torch.Tensor, torch.nn.Parameter, *NUMBERS}
    others = sorted({_named(type(x)) for x in settled.values if type(x) not in kinds})
    if torch is None or others:
        raise NoWay(
            f"{' and '.join(others)} among its arguments; it takes torch tensors and Python's numbers"
        )
    if not _python_allows():
        raise NoWay("it needs CPython with its lock, of 64 bits")
    exchange = _exchange(torch)
    if exchange is None:
        raise NoWay(f"torch {torch.__version__} has no C exchange API of DLPack, as 2.10 and later have")
    try:
        plan = _Tables().plan(settled, driver, exchange)
    except (BufferError, RuntimeError, TypeError, ValueError) as reason:
        raise NoWay(f"torch does not describe a tensor: {reason}") from reason
    return _function(plan)


def _named(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _python_allows() -> bool:
    """Has this Python a lock that holds all other threads, and a type as an object's second word?"""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    return sys.maxsize > 1 << 32 and _word(id(None) + WORD_BYTES) == id(type(None))


# ---------------------------------------------------------------- tables


def _word(address: int) -> int:
    return int(ctypes.c_int64.from_address(address).value)


API = {"version": 0, "describe": 5, "stream_of": 6}
"""Words of `DLPackExchangeAPI`; its functions to own and to make tensors stand between."""


@cache
def _exchange(torch: Any) -> tuple[int, ...] | None:
    """The words of torch's exchange API, None where it has none that is known."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dlpack_exchange_api")
    words = tuple(_word(address + i * WORD_BYTES) for i in range(1 + max(API.values())))
    is_known = words[API["version"]] & 0xFFFFFFFF == DLPACK_MAJOR
    return words if is_known and words[API["describe"]] and words[API["stream_of"]] else None


class _Tables:
    """The tables of one call, and what keeps alive all that they point to; no argument of the call is among that."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def words(self, values: Sequence[int]) -> int:
        """Their address."""
        words = (ctypes.c_int64 * max(len(values), 1))(*values)
        self.held.append(words)
        return ctypes.addressof(words)

    def rows(self, fields: Mapping[str, int], rows: Sequence[Mapping[str, Any]]) -> int:
        """The address of a table with a word for each field."""
        return self.words([int(row.get(name, 0)) for row in rows for name in fields])

    def object(self, value: Any) -> int:
        self.held.append(value)
        return id(value)

    def plan(self, s: Settled, driver: Driver, exchange: Sequence[int]) -> tuple[int, _Tables]:
        """The address of a call's table, and this."""
        describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
            exchange[API["describe"]]
        )
        slots = [slot for launch in s.launches for slot in launch.slots]
        maps = [(m, i) for m, i in slots if isinstance(m, tensor_maps.MapSlot)]
        pointers = [(p, i) for p, i in slots if not isinstance(p, tensor_maps.MapSlot)]
        self.held += [s.launches, driver, slots]
        device_type, device = driver.device
        plan = {
            "positional": len(s.values) - len(s.names) - s.outs,
            "named": len(s.names),
            "names": self.words([self.object(n) for n in s.names]),
            "outs": s.outs,
            "out_is_tuple": s.out_is_tuple,
            "arguments": len(s.values),
            "records": self.rows(RECORD, [self.record(s, i, describe) for i in range(len(s.values))]),
            "like": s.like,
            "made": len(s.makers),
            "makers": self.rows(MAKER, [self.maker(*m) for m in s.makers]),
            "results": s.results,
            "slot_count": len(pointers),
            "slots": self.rows(
                SLOT, [{"place": ctypes.addressof(p), "tensor": s.numbering[i]} for p, i in pointers]
            ),
            "map_count": len(maps),
            "maps": self.rows(MAP, [self.map(m, s.numbering[i]) for m, i in maps]),
            "launch_count": len(s.launches),
            "launches": self.rows(LAUNCH, [self.launch(x) for x in s.launches]),
            "device_type": device_type,
            "device": device,
            "describe": exchange[API["describe"]],
            "stream_of": exchange[API["stream_of"]],
            "current_context": driver.current_context,
            "context": driver.context,
            "encode_map": driver.encode_map,
            "launch": driver.launch,
            "refused": self.object(driver.refused),
            "is_negative": self.object(sys.modules["torch"].Tensor.is_neg),
            "none": id(None),
            "false": id(False),
            "tuple": id(tuple),
            "missed": id(NotImplemented),
        }
        return self.rows(PLAN, [plan]), self

    def record(self, s: Settled, number: int, describe: Callable[[Any, int], int]) -> dict[str, int]:
        value = s.values[number]
        kind = {"type": self.object(type(value))}
        if type(value) is float:
            return {**kind, "is_number": 1, "is_float": 1, "value": _bits(value)}
        if type(value) in NUMBERS:
            return {**kind, "is_number": 1, "value": self.object(value)}
        view = (ctypes.c_int64 * len(VIEW))()
        describe(value, ctypes.addressof(view))
        rank = view[VIEW["kind"]] & 0xFFFFFFFF
        sizes, strides = (
            [_word(view[VIEW[x]] + i * WORD_BYTES) for i in range(rank)] for x in ("shape", "strides")
        )
        first, end = s.spans[number]
        return {
            **kind,
            "device": view[VIEW["device"]],
            "kind": view[VIEW["kind"]],
            "shape": self.words(sizes),
            "strides": self.words(strides),
            "low_bits": (view[VIEW["data"]] + view[VIEW["offset"]]) & 15,
            "first": first,
            "end": end,
            "is_written": number in s.written,
        }

    def maker(self, function: Any, argument: Any) -> dict[str, int]:
        given = 0 if argument is None else self.object(argument)
        made = sys.modules["torch"].Tensor
        return {"function": self.object(function), "argument": given, "type": self.object(made)}

    def map(self, m: tensor_maps.MapSlot, tensor: int) -> dict[str, int]:
        sizes, steps, box, every = tensor_maps.dimensions(m.shape, m.strides, m.box)
        self.held += [sizes, steps, box, every]
        told = zip(("sizes", "steps", "box", "every"), (sizes, steps, box, every), strict=True)
        return {
            "place": m.place,
            "rank": len(m.shape),
            **{n: ctypes.addressof(x) for n, x in told},
            "tensor": tensor,
        }

    def launch(self, x: Launch) -> dict[str, int]:
        shape = ctypes.addressof(x.shape)
        return {
            "function": x.function.value,
            "shape": shape,
            "stream": shape + x.shape.stream_bytes(),
            "parameters": ctypes.addressof(x.pointers),
        }


def _bits(value: float) -> int:
    return int(ctypes.c_int64.from_buffer_copy(ctypes.c_double(value)).value)


# ---------------------------------------------------------------- a function that Python can call

METH_FASTCALL = 0x0080


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _method() -> _Method:
    from .native_entry import entry  # with llvmlite, for which a first call does not wait

    return _Method(b"call", entry(), METH_FASTCALL, None)


def _function(plan: tuple[int, _Tables]) -> Call:
    """The native function on a call's tables. It keeps these alive, and what describes it: threads that come first at the
    same time make a description each, of which `_method` remembers the last."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    method = _method()
    call: Call = make(ctypes.addressof(method), (*plan, method), None)
    return call
