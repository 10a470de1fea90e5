"""What the modules of PTX intrinsics share: one `asm` statement as a function that generated source calls.

Memory accesses do not pass a statement that has an `effect`; one without may be moved, merged and dropped. Shared memory
is addressed by 32-bit numbers (PTX ISA 9.0, 5.1.6), tensor maps by 64-bit ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ..cuda import intrinsic, types

CONSTRAINT = {"i16": "h", "i32": "r", "i64": "l", "float": "f", "double": "d"}
MEMORY = "~{memory}"


def with_arguments(names: str, implement: Callable[..., Any]) -> Any:
    """An intrinsic with these parameters: numba reads the number of arguments off the parameter list."""
    namespace: dict[str, Any] = {"implement": implement}
    parameters = f", {names}" if names else ""
    exec(f"def typed(typing_context{parameters}):\n    return implement({names})\n", namespace)
    typed: Callable[..., Any] = namespace["typed"]
    typed.__module__ = __name__
    return intrinsic(typed)


def instruction(result: Any, arguments: Sequence[Any], text: str, effect: bool = True) -> Any:
    """A statement on values; `$0` is the result where there is one (`result` is not None)."""
    names = ", ".join(f"a{i}" for i in range(len(arguments)))

    def implement(*_: Any) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, values: list[Any]) -> Any:
            outs = [] if result is None else [context.get_value_type(result)]
            found = statement(builder, text, outs, values, effect=effect)
            return found[0] if found else context.get_dummy_value()

        return (types.void if result is None else result)(*arguments), generate

    return with_arguments(names, implement)


def statement(
    builder: Any,
    text: str,
    outs: Sequence[Any],
    values: Sequence[Any],
    tied: Sequence[Any] = (),
    effect: bool = True,
) -> list[Any]:
    """One asm statement. `outs`: the types of its results, `$0` first; `tied`: values that the first results start from;
    `values`: its other operands, numbered after both."""
    constraints = ["=" + CONSTRAINT[str(t)] for t in outs]
    constraints += [str(i) for i in range(len(tied))] + [CONSTRAINT[str(v.type)] for v in values]
    constraints += [MEMORY] if effect else []
    given = [*tied, *values]
    result = ir.VoidType() if not outs else outs[0] if len(outs) == 1 else ir.LiteralStructType(outs)
    kind = ir.FunctionType(result, [v.type for v in given])
    got = builder.asm(kind, text, ",".join(constraints), given, effect)
    if not outs:
        return []
    return [got] if len(outs) == 1 else [builder.extract_value(got, i) for i in range(len(outs))]


def element(builder: Any, pointer: Any, index: int) -> Any:
    """The place of one element of an array of registers."""
    return builder.gep(pointer, [ir.Constant(ir.IntType(64), index)])
