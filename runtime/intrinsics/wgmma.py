"""Matrix products of a warpgroup, asynchronous [PTX ISA 9.0, 9.7.15 wgmma], sm_90a: 64 x n f32 += 64 x k · k x n of 16 bits.

Operands lie in shared memory (`operands.py`); the one that holds the result's rows may lie in registers instead. A product
is issued as one group; its sums, and the registers of its operand, may be touched again after a `settled` that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..cuda import f32, i32, pointer_to, types
from .assembly import element, statement, with_arguments
from .operands import Operand, places


def wgmma(
    dtype: str, columns: int, a: Operand | None, b: Operand, row: int, column: int, fresh: bool = False
) -> Any:
    """`f(sums, a, b)`: sums += a · b, sums = a · b if `fresh`. `a`: an address, or (None) packed registers, four for each
    step; `b`: an address."""
    spots = places(columns, row, column)
    first = pointer_to(i32) if a is None else i32

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            sums = [element(builder, values[0], i) for i in spots]
            held = [] if fresh else [builder.load(x) for x in sums]
            left = (
                [builder.load(element(builder, values[1], i)) for i in range(4 * len(b.offsets))]
                if a is None
                else [values[1]]
            )
            text = _text(dtype, columns, a, b, len(left), fresh)
            kinds = [x.type.pointee for x in sums]
            new = statement(builder, text, kinds, [*left, values[2]], tied=held)
            for x, place in zip(new, sums, strict=True):
                builder.store(x, place)
            return context.get_dummy_value()

        return types.void(pointer_to(f32), first, i32), generate

    return with_arguments("sums, a, b", implement)


def _text(dtype: str, columns: int, a: Operand | None, b: Operand, left: int, fresh: bool) -> str:
    """Fence, one instruction for each step, commit."""
    count = columns // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{", ".reg .pred adds;", ".reg .b32 la, lb;", ".reg .b64 da, db;", "setp.ne.b32 adds, 0, 0;"]
    lines.append("wgmma.fence.sync.aligned;")
    first = count if fresh else 2 * count
    second = first + left
    for step, offset in enumerate(b.offsets):
        if a is None:
            operand = "{" + ", ".join(f"${first + 4 * step + i}" for i in range(4)) + "}"
        else:
            operand = "da"
            lines += _descriptor("a", first, a, a.offsets[step])
        lines += _descriptor("b", second, b, offset)
        turned = f"{int(b.transposed)}" if a is None else f"{int(a.transposed)}, {int(b.transposed)}"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
            f"{sums}, {operand}, db, {'adds' if fresh and not step else 1}, 1, 1, {turned};"
        )
    return "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "}"])


def _descriptor(name: str, number: int, operand: Operand, offset: int) -> list[str]:
    """A matrix descriptor from the operand `$number`, an address in units of 16 bytes."""
    return [
        f"add.s32 l{name}, ${number}, {operand.low + (offset >> 4)};",
        f"mov.b64 d{name}, {{l{name}, {operand.high}}};",
    ]


def settled(left: int, sums: Sequence[int], packed: Sequence[int] = ()) -> Any:
    """`f(sums, …, packed, …)`: wait until at most `left` groups run. It names arrays that finished groups wrote and read, so
    that no use of them moves up past the wait [9.7.15.7.3 wgmma.wait_group]."""
    kinds = [pointer_to(f32)] * len(sums) + [pointer_to(i32)] * len(packed)

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            spots = [element(builder, p, i) for p, n in zip(values, sums, strict=False) for i in range(n)]
            held = [builder.load(x) for x in spots]
            read = [
                builder.load(element(builder, p, i))
                for p, n in zip(values[len(sums) :], packed, strict=True)
                for i in range(n)
            ]
            text = f"wgmma.wait_group.sync.aligned {left};"
            for x, place in zip(
                statement(builder, text, [x.type for x in held], read, tied=held), spots, strict=True
            ):
                builder.store(x, place)
            return context.get_dummy_value()

        return types.void(*kinds), generate

    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    return with_arguments(names, implement)


def _matrix_address() -> Any:
    """`matrix_address(address)`: the address as matrix descriptors hold it, in units of 16 bytes [9.7.15.5.1.2.2]."""

    def implement(address: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            word = ir.IntType(32)
            return builder.lshr(builder.and_(values[0], ir.Constant(word, 0x3FFFF)), ir.Constant(word, 4))

        return i32(i32), generate

    return with_arguments("address", implement)


matrix_address = _matrix_address()
