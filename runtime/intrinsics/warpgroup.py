"""What roles of warpgroups need: registers, barriers among some threads, and values that a whole warp shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..cuda import i32, i64, pointer_to, types
from .assembly import instruction, statement, with_arguments


def _shared_start() -> Any:
    """`shared_start()`: the address of the dynamic shared memory, a multiple of 1024."""

    def implement() -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            memory = builder.module.globals.get("dynamic_shared")
            if memory is None:
                memory = ir.GlobalVariable(
                    builder.module, ir.ArrayType(ir.IntType(8), 0), "dynamic_shared", addrspace=3
                )
                memory.linkage, memory.align = "external", 1024
            return builder.ptrtoint(memory, ir.IntType(32))

        return i32(), generate

    return with_arguments("", implement)


def more_registers(count: int) -> Any:
    """All warps of a warpgroup get `count` registers a thread [PTX ISA 9.0, 9.7.20.5 setmaxnreg], sm_90a."""
    return instruction(None, (), f"setmaxnreg.inc.sync.aligned.u32 {count};")


def fewer_registers(count: int) -> Any:
    """All warps of a warpgroup give up what they have beyond `count` registers a thread."""
    return instruction(None, (), f"setmaxnreg.dec.sync.aligned.u32 {count};")


shared_start = _shared_start()
meet = instruction(None, (i32, i32), "barrier.sync $0, $1;")  # [9.7.13.1 barrier]: number, threads
meet_warp = instruction(None, (), "bar.warp.sync 0xffffffff;")  # [9.7.13.2 bar.warp.sync]
announce = instruction(None, (i32, i32), "barrier.arrive $0, $1;")  # the same without waiting
# [9.7.13.4 fence]: what a thread wrote to shared memory is seen by the matrix units and by asynchronous copies
publish_shared = instruction(None, (), "fence.proxy.async.shared::cta;")
# [9.7.13.9 redux.sync]: the same value in a register that the whole warp shares
uniform = instruction(i32, (i32,), "redux.sync.or.b32 $0, $1, 0xffffffff;")
# [9.7.13.10 vote.sync]: 1 in all lanes of a warp if the value is not 0 in one of them
any_lane = instruction(
    i32,
    (i32,),
    "{.reg .pred own, some; setp.ne.b32 own, $1, 0; vote.sync.any.pred some, own, 0xffffffff; selp.b32 $0, 1, 0, some;}",
)
# hides where a counter comes from, for otherwise NVVM unrolls the loop
opaque = instruction(i32, (i32,), "mov.b32 $0, $1;", effect=False)
# [9.7.1.8 div]: of numbers below 2^31, in a fraction of the instructions that 64 bits take; by zero it is any number
quotient = instruction(i32, (i32, i32), "div.u32 $0, $1, $2;", effect=False)
quotient_here = instruction(i32, (i32, i32), "div.u32 $0, $1, $2;")
"""The same where it stands: what it gives is not kept in registers through a loop over tasks."""
# [10 special registers]: the thread's number, asked for anew
thread_here = instruction(i32, (), "mov.u32 $0, %tid.x;")
# [9.7.9.12 st]: zeros, to an address that is a multiple of 16
clear_16_bytes = instruction(
    None, (i32,), "{.reg .b32 x; mov.b32 x, 0; st.shared.v4.b32 [$0], {x, x, x, x};}"
)
# [9.7.14.5.16 stmatrix]: four 8 x 8 matrices of 16-bit elements; each lane gives the address of one row
store_matrices = instruction(
    None, (i32, i32, i32, i32, i32), "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
)


def _load_matrices() -> Any:
    """`load_matrices(address, words, at)`: four 8 x 8 matrices of 16-bit elements from shared memory; each lane gives the
    address of one row, and has two elements of each matrix in one word [9.7.14.5.15 ldmatrix]."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            address, words, at = values
            found = statement(builder, text, [ir.IntType(32)] * 4, [address])
            for i, word in enumerate(found):
                builder.store(word, builder.gep(words, [builder.add(at, ir.Constant(at.type, i))]))
            return context.get_dummy_value()

        return types.void(i32, pointer_to(i32), i64), generate

    return with_arguments("address, words, at", implement)


load_matrices = _load_matrices()
