"""Waiting for another thread without holding the interpreter's lock: a native function, smaller than what Numba makes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from .native_code import address

NAME = "tileloom_is_reached"
WORD, FLAG = ir.IntType(64), ir.IntType(32)


@cache
def is_reached() -> Callable[[int, int, int], int]:
    """`f(place, value, rounds)`: is the int64 at this address at least `value`, now or while looking `rounds` times (some 40
    ns each)? What was written before that value is then visible."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return kind(address(NAME, _written, "runtime/waiting.py"))


def _written(module: ir.Module) -> None:
    function = ir.Function(module, ir.FunctionType(FLAG, [WORD, WORD, WORD]), NAME)
    place, value, rounds = function.args
    before, loop, again, after = (function.append_basic_block() for _ in range(4))
    b = ir.IRBuilder(before)
    cell = b.inttoptr(place, WORD.as_pointer())
    b.branch(loop)
    b.position_at_end(loop)
    left = b.phi(WORD)
    left.add_incoming(rounds, before)
    there = b.icmp_signed(">=", b.load_atomic(cell, "acquire", 8), value)
    b.cbranch(b.or_(there, b.icmp_signed("<=", left, ir.Constant(WORD, 0))), after, again)
    b.position_at_end(again)
    _pause(b)
    left.add_incoming(b.sub(left, ir.Constant(WORD, 1)), again)
    b.branch(loop)
    b.position_at_end(after)
    b.ret(b.zext(there, FLAG))


def _pause(b: ir.IRBuilder) -> None:
    """Tell the processor that this is a loop that waits, where it has an instruction for that."""
    triple = b.module.triple
    if triple.startswith(("x86_64", "i686", "i386")):
        _call(b, "llvm.x86.sse2.pause")
    elif triple.startswith(("aarch64", "arm64")):
        _call(b, "llvm.aarch64.hint", ir.Constant(ir.IntType(32), 1))


def _call(b: ir.IRBuilder, name: str, *values: ir.Constant) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    b.call(ir.Function(b.module, kind, name), values)
