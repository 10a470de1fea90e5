"""The native function behind `native_call`, made with LLVM: every value is a word of 8 bytes, addresses too.

Python calls it by METH_FASTCALL: `self` is a tuple whose first item is the address of the call's table; then come the
arguments by place, those by name, and `out`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from llvmlite import ir

from . import tensor_maps
from .native_code import address
from .native_tables import LAUNCH, MAKER, MAP, PLAN, RECORD, SLOT, VIEW, WORD_BYTES

WORD, INT, DOUBLE = ir.IntType(64), ir.IntType(32), ir.DoubleType()
ALIGNMENT = 16
NAME = "tileloom_native_call"
EQUAL = 2
"""Py_EQ."""
TYPE, TUPLE_SIZE = 1, 2
"""Words of an object and of a tuple."""


@cache
def entry() -> int:
    """The address of the function, which lives as long as the process."""
    return address(NAME, _written, "runtime/native_*.py", "runtime/tensor_maps.py")


def _written(module: ir.Module) -> None:
    _Entry(ir.Function(module, ir.FunctionType(WORD, [WORD, WORD, WORD]), NAME)).write()


class _Body:
    """Instructions of one function, in order."""

    def __init__(self, function: ir.Function) -> None:
        self.function, self.b = function, ir.IRBuilder(function.append_basic_block("entry"))
        self.declared: dict[str, ir.Function] = {}

    def number(self, value: Any) -> Any:
        return ir.Constant(WORD, value) if isinstance(value, int) else value

    def pointer(self, address: Any, kind: ir.Type = WORD) -> Any:
        return self.b.inttoptr(address, kind.as_pointer())

    def at(self, address: Any, index: Any) -> Any:
        """The address of a word of a table."""
        return self.b.add(address, self.b.mul(self.number(index), self.number(WORD_BYTES)))

    def load(self, address: Any, index: Any = 0) -> Any:
        return self.b.load(self.pointer(self.at(address, index)))

    def store(self, value: Any, address: Any, index: Any = 0) -> None:
        self.b.store(self.number(value), self.pointer(self.at(address, index)))

    def variable(self) -> Any:
        """The address of a word on the stack."""
        with self.b.goto_entry_block():
            return self.b.ptrtoint(self.b.alloca(WORD), WORD)

    def room(self, words: Any) -> Any:
        """The address of words on the stack."""
        return self.b.ptrtoint(self.b.alloca(WORD, self.number(words)), WORD)

    def python(self, name: str, *values: Any, gives: ir.Type = WORD) -> Any:
        """Call a function of Python's C interface."""
        if name not in self.declared:
            kind = ir.FunctionType(gives, [v.type for v in values])
            self.declared[name] = ir.Function(self.function.module, kind, name)
        return self.b.call(self.declared[name], values)

    def call(self, address: Any, *values: Any) -> Any:
        """Call a function at an address; its answer is 0 where all went well."""
        kind = ir.FunctionType(INT, [v.type for v in values])
        return self.b.call(self.pointer(address, kind), values)

    def is_equal(self, a: Any, b: Any) -> Any:
        return self.b.icmp_signed("==", a, ir.Constant(a.type, b) if isinstance(b, int) else b)

    @contextmanager
    def count(self, end: Any) -> Iterator[Any]:
        """A loop over 0, 1, … below `end`."""
        place = self.variable()
        self.store(0, place)
        test, body, after = (self.function.append_basic_block() for _ in range(3))
        self.b.branch(test)
        self.b.position_at_end(test)
        index = self.load(place)
        self.b.cbranch(self.b.icmp_signed("<", index, end), body, after)
        self.b.position_at_end(body)
        yield index
        self.store(self.b.add(index, self.number(1)), place)
        self.b.branch(test)
        self.b.position_at_end(after)

    def go_on(self, condition: Any, otherwise: Any) -> None:
        """Leave for the block `otherwise` where a condition does not hold."""
        after = self.function.append_basic_block()
        self.b.cbranch(condition, after, otherwise)
        self.b.position_at_end(after)


class _Entry(_Body):
    def write(self) -> None:
        own, given, _ = self.function.args
        self.positional, self.named, self.out = (self.load(given, i) for i in range(3))
        self.plan = self.python("PyLong_AsVoidPtr", self.python("PyTuple_GetItem", own, self.number(0)))
        self.arguments, self.makers = self.field("arguments"), self.field("made")
        self.values, self.made = self.room(self.arguments), self.room(self.makers)
        self.addresses = self.room(self.b.add(self.arguments, self.makers))
        self.made_so_far, self.stream, self.view = self.variable(), self.variable(), self.room(len(VIEW))
        self.store(0, self.made_so_far)
        self.missed, self.failed = (self.function.append_basic_block(n) for n in ("missed", "failed"))
        self.gather()
        self.check()
        self.keep_apart()
        self.make()
        self.ask_stream()
        self.fill()
        self.launch()
        self.give()
        self.leave()

    def field(self, name: str) -> Any:
        return self.load(self.plan, PLAN[name])

    def row(self, table: str, fields: dict[str, int], number: Any) -> Any:
        """The address of a row of a table of the call."""
        return self.at(self.field(table), self.b.mul(number, self.number(len(fields))))

    def require(self, condition: Any) -> None:
        self.go_on(condition, self.missed)

    # -- parts, in order

    def gather(self) -> None:
        """The arguments as objects: by place, by name, then `out`."""
        by_place, by_name, outs = self.field("positional"), self.field("named"), self.field("outs")
        self.require(self.is_equal(self.python("PyTuple_Size", self.positional), by_place))
        self.require(self.is_equal(self.python("PyDict_Size", self.named), by_name))
        with self.count(by_place) as i:
            self.store(self.python("PyTuple_GetItem", self.positional, i), self.values, i)
        with self.count(by_name) as i:
            value = self.python("PyDict_GetItemWithError", self.named, self.load(self.field("names"), i))
            self.require(self.b.not_(self.is_equal(value, 0)))
            self.store(value, self.values, self.b.add(by_place, i))
        first = self.b.add(by_place, by_name)
        is_tuple = self.is_equal(self.load(self.out, TYPE), self.field("tuple"))
        self.require(self.is_equal(self.b.zext(is_tuple, WORD), self.field("out_is_tuple")))
        with self.b.if_else(is_tuple) as (several, one):
            with several:
                self.require(self.is_equal(self.load(self.out, TUPLE_SIZE), outs))
                with self.count(outs) as i:
                    item = self.python("PyTuple_GetItem", self.out, i)
                    self.store(item, self.values, self.b.add(first, i))
            with one:
                is_none = self.is_equal(self.out, self.field("none"))
                self.require(self.b.xor(is_none, self.is_equal(outs, 1)))
                with self.b.if_then(self.b.not_(is_none)):
                    self.store(self.out, self.values, first)

    def check(self) -> None:
        """Are they what the call was settled for?"""
        with self.count(self.arguments) as i:
            record, value = self.row("records", RECORD, i), self.load(self.values, i)
            self.require(self.is_equal(self.load(value, TYPE), self.load(record, RECORD["type"])))
            is_number = self.is_equal(self.load(record, RECORD["is_number"]), 1)
            with self.b.if_else(is_number) as (number, tensor):
                with number:
                    self.check_number(record, value)
                with tensor:
                    self.check_tensor(record, value, i)

    def check_number(self, record: Any, value: Any) -> None:
        want = self.load(record, RECORD["value"])
        with self.b.if_else(self.is_equal(self.load(record, RECORD["is_float"]), 1)) as (real, other):
            with real:  # by its bits: 0.0 and -0.0 are two numbers
                have = self.python("PyFloat_AsDouble", value, gives=DOUBLE)
                self.require(self.is_equal(self.b.bitcast(have, WORD), want))
            with other:
                operator = ir.Constant(INT, EQUAL)
                same = self.python("PyObject_RichCompareBool", value, want, operator, gives=INT)
                self.require(self.is_equal(same, 1))

    def check_tensor(self, record: Any, value: Any, number: Any) -> None:
        self.store(self.address_of(value, self.missed), self.addresses, number)
        for own, theirs in (("device", "device"), ("kind", "kind")):
            self.require(self.is_equal(self.load(self.view, VIEW[theirs]), self.load(record, RECORD[own])))
        rank = self.b.and_(self.load(record, RECORD["kind"]), self.number(0xFFFFFFFF))
        for what in ("shape", "strides"):
            have, want = self.load(self.view, VIEW[what]), self.load(record, RECORD[what])
            with self.count(rank) as i:
                self.require(self.is_equal(self.load(have, i), self.load(want, i)))
        low_bits = self.b.and_(self.load(self.addresses, number), self.number(ALIGNMENT - 1))
        self.require(self.is_equal(low_bits, self.load(record, RECORD["low_bits"])))
        negative = self.python("PyObject_CallOneArg", self.field("is_negative"), value)
        self.clear_error(self.is_equal(negative, 0), self.missed)
        self.release(negative)
        self.require(self.is_equal(negative, self.field("false")))

    def address_of(self, tensor: Any, otherwise: Any) -> Any:
        """Where its first element lies; `view` is then filled. Leaves for `otherwise` where there is no telling."""
        failed = self.b.not_(self.is_equal(self.call(self.field("describe"), tensor, self.view), 0))
        if otherwise is self.missed:
            self.clear_error(failed, otherwise)
        else:
            self.go_on(self.b.not_(failed), otherwise)
        return self.b.add(self.load(self.view, VIEW["data"]), self.load(self.view, VIEW["offset"]))

    def clear_error(self, condition: Any, leave_for: Any) -> None:
        """Where the condition holds, Python's error is dropped and the block left."""
        with self.b.if_then(condition):
            self.python("PyErr_Clear", gives=ir.VoidType())
            self.b.branch(leave_for)

    def keep_apart(self) -> None:
        """What is written shares no memory with any other argument."""
        with self.count(self.arguments) as i:
            one = self.row("records", RECORD, i)
            with self.b.if_then(self.is_equal(self.load(one, RECORD["is_written"]), 1)):
                first, end = self.span(one, i)
                with self.count(self.arguments) as j:
                    other = self.row("records", RECORD, j)
                    low, high = self.span(other, j)
                    excused = self.b.or_(
                        self.is_equal(i, j), self.is_equal(self.load(other, RECORD["is_number"]), 1)
                    )
                    before = self.b.icmp_unsigned("<=", end, low)
                    after = self.b.icmp_unsigned("<=", high, first)
                    self.require(self.b.or_(excused, self.b.or_(before, after)))

    def span(self, record: Any, number: Any) -> tuple[Any, Any]:
        address = self.load(self.addresses, number)
        ends = (self.load(record, RECORD[x]) for x in ("first", "end"))
        first, end = (self.b.add(address, x) for x in ends)
        return first, end

    def make(self) -> None:
        """The context is asked for last, for what follows may run Python; then results and what lies between launches."""
        now = self.variable()
        self.store(0, now)
        self.require(self.is_equal(self.call(self.field("current_context"), now), 0))
        self.require(self.is_equal(self.load(now), self.field("context")))
        like = self.load(self.values, self.field("like"))
        with self.count(self.makers) as i:
            maker = self.row("makers", MAKER, i)
            stated = self.load(maker, MAKER["argument"])
            argument = self.b.select(self.is_equal(stated, 0), like, stated)
            made = self.python("PyObject_CallOneArg", self.load(maker, MAKER["function"]), argument)
            self.go_on(self.b.not_(self.is_equal(made, 0)), self.failed)
            self.store(made, self.made, i)
            self.store(self.b.add(i, self.number(1)), self.made_so_far)
            self.require(self.is_equal(self.load(made, TYPE), self.load(maker, MAKER["type"])))
            address = self.address_of(made, self.failed)
            self.store(address, self.addresses, self.b.add(self.arguments, i))

    def ask_stream(self) -> None:
        device_type, device = (self.b.trunc(self.field(x), INT) for x in ("device_type", "device"))
        failed = self.call(self.field("stream_of"), device_type, device, self.stream)
        self.go_on(self.is_equal(failed, 0), self.failed)

    def fill(self) -> None:
        """Addresses and tensor maps go to where the driver reads them; from here to the launch no Python runs."""
        with self.count(self.field("slot_count")) as i:
            slot = self.row("slots", SLOT, i)
            self.store(self.load(self.addresses, self.load(slot, SLOT["tensor"])), self.load(slot))
        with self.count(self.field("map_count")) as i:
            row = self.row("maps", MAP, i)
            address = self.load(self.addresses, self.load(row, MAP["tensor"]))
            with self.b.if_then(self.b.not_(self.is_equal(address, self.load(row, MAP["current"])))):
                self.encode(row, address)
                self.store(address, row, MAP["current"])

    def encode(self, row: Any, address: Any) -> None:
        """cuTensorMapEncodeTiled."""
        kind, *rest = (ir.Constant(INT, x) for x in tensor_maps.OPTIONS)
        rank = self.b.trunc(self.load(row, MAP["rank"]), INT)
        tables = [self.load(row, MAP[x]) for x in ("sizes", "steps", "box", "every")]
        self.store(0, row, MAP["current"])
        place = self.load(row, MAP["place"])
        answer = self.call(self.field("encode_map"), place, kind, rank, address, *tables, *rest)
        self.driver_agrees(answer, self.number(-1))

    def launch(self) -> None:
        with self.count(self.field("launch_count")) as i:
            row = self.row("launches", LAUNCH, i)
            shape, function, parameters = (
                self.load(row, LAUNCH[x]) for x in ("shape", "function", "parameters")
            )
            self.store(self.load(self.stream), self.load(row, LAUNCH["stream"]))
            answer = self.call(self.field("launch"), shape, function, parameters, self.number(0))
            self.driver_agrees(answer, i)

    def driver_agrees(self, answer: Any, launch: Any) -> None:
        """Raise the error for the driver's answer, if it is one."""
        with self.b.if_then(self.b.not_(self.is_equal(answer, 0))):
            both = self.b.or_(self.b.shl(launch, self.number(32)), self.b.zext(answer, WORD))
            told = self.python("PyLong_FromSsize_t", both)
            self.python("PyObject_CallOneArg", self.field("refused"), told)
            self.release(told)
            self.b.branch(self.failed)

    def give(self) -> None:
        """The results that were made, or what was given as `out`."""
        results = self.field("results")
        with self.b.if_then(
            self.b.or_(self.b.not_(self.is_equal(self.out, self.field("none"))), self.is_equal(results, 0))
        ):
            self.release_made(self.number(0))
            self.acquire(self.out)
            self.b.ret(self.out)
        with self.b.if_then(self.is_equal(results, 1)):
            self.release_made(self.number(1))
            self.b.ret(self.load(self.made))
        several = self.python("PyTuple_New", results)
        self.go_on(self.b.not_(self.is_equal(several, 0)), self.failed)
        with self.count(results) as i:
            self.acquire(self.load(self.made, i))
            self.python("PyTuple_SetItem", several, i, self.load(self.made, i), gives=INT)
        self.release_made(self.number(0))
        self.b.ret(several)

    def leave(self) -> None:
        self.b.position_at_end(self.missed)
        self.release_made(self.number(0))
        missed = self.field("missed")
        self.acquire(missed)
        self.b.ret(missed)
        self.b.position_at_end(self.failed)
        self.release_made(self.number(0))
        self.b.ret(self.number(0))

    # -- references

    def acquire(self, value: Any) -> None:
        self.python("Py_IncRef", value, gives=ir.VoidType())

    def release(self, value: Any) -> None:
        self.python("Py_DecRef", value, gives=ir.VoidType())

    def release_made(self, first: Any) -> None:
        with self.count(self.b.sub(self.load(self.made_so_far), first)) as i:
            self.release(self.load(self.made, self.b.add(first, i)))
