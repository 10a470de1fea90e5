"""Waiting for another thread without holding the interpreter's lock: a native function, smaller than what Numba makes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from .native_code import address

REACHED, BEGUN = "tileloom_is_reached", "tileloom_is_begun"
WORD, FLAG = ir.IntType(64), ir.IntType(32)


@cache
def is_reached() -> Callable[[int, int, int], int]:
    """`f(place, value, rounds)`: is the int64 at this address at least `value`, now or while looking `rounds` times (some 40
    ns each)? What was written before that value is then visible."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return kind(address(REACHED, _write_reached, "runtime/waiting.py"))


@cache
def is_begun() -> Callable[[int, int], int]:
    """`f(place, rounds)`: does the int64 at this address hold the address of another one that is above 0? Looks at either so
    often."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return kind(address(BEGUN, _write_begun, "runtime/waiting.py"))


def _write_reached(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(FLAG, [WORD, WORD, WORD]), REACHED)
    place, value, rounds = function.args
    b = ir.IRBuilder(function.append_basic_block())
    there = _waited(b, place, lambda x: b.icmp_signed(">=", x, value), rounds)
    b.ret(b.zext(there, FLAG))


def _write_begun(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(FLAG, [WORD, WORD]), BEGUN)
    place, rounds = function.args
    none = ir.Constant(WORD, 0)
    b = ir.IRBuilder(function.append_basic_block())
    given = _waited(b, place, lambda x: b.icmp_signed("!=", x, none), rounds)
    look, neither = (function.append_basic_block() for _ in range(2))
    b.cbranch(given, look, neither)
    b.position_at_end(neither)
    b.ret(ir.Constant(FLAG, 0))
    b.position_at_end(look)
    counted = b.load_atomic(b.inttoptr(place, WORD.as_pointer()), "acquire", 8)
    begun = _waited(b, counted, lambda x: b.icmp_signed(">", x, none), rounds)
    b.ret(b.zext(begun, FLAG))


def _waited(b: ir.IRBuilder, place: Any, holds: Callable[[Any], Any], rounds: Any) -> Any:
    """Code that looks at an int64 until a condition holds of it, and so many times more; whether it does."""
    before, (loop, again, after) = b.block, (b.append_basic_block() for _ in range(3))
    cell = b.inttoptr(place, WORD.as_pointer())
    b.branch(loop)
    b.position_at_end(loop)
    left = b.phi(WORD)
    left.add_incoming(rounds, before)
    there = holds(b.load_atomic(cell, "acquire", 8))
    b.cbranch(b.or_(there, b.icmp_signed("<=", left, ir.Constant(WORD, 0))), after, again)
    b.position_at_end(again)
    _pause(b)
    left.add_incoming(b.sub(left, ir.Constant(WORD, 1)), again)
    b.branch(loop)
    b.position_at_end(after)
    return there


def _pause(b: ir.IRBuilder) -> None:
    """Tell the processor that this is a loop that waits, where it has an instruction for that."""
    triple = b.module.triple
    if triple.startswith(("x86_64", "i686", "i386")):
        _call(b, "llvm.x86.sse2.pause")
    elif triple.startswith(("aarch64", "arm64")):
        _call(b, "llvm.aarch64.hint", ir.Constant(ir.IntType(32), 1))


def _call(b: ir.IRBuilder, name: str, *values: ir.Constant) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    declared = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    b.call(declared, values)
