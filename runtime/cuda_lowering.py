"""Generated text in LLVM's form, as numba-cuda makes it but with less to say: a loop over `range` is two numbers, names are
never deleted, and each kind of call is looked for once.

numba-cuda's own form of a loop keeps a record of the range, a record of where it is and a pair of a value and whether there
is one, in a hundred instructions; an attention has a hundred and fifty loops, and NVVM reads all of it. The machine code
of the wgmma tier is the same to the letter, elsewhere the addresses of a loop may be added up in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from llvmlite import ir as llvm
from numba import types as numba_types
from numba.cuda.core import ir
from numba.cuda.core.errors import LoweringError, new_error_context

types: Any = numba_types  # not in their stubs: CPointer, RangeType, CUDALower
_Lower: Any = import_module("numba.cuda.lowering").CUDALower


@dataclass(frozen=True)
class Steps:
    """What `range` was called with, as LLVM's values."""

    start: Any
    stop: Any
    step: int

    @property
    def known(self) -> bool:
        """Does the next value alone tell whether there is one? That of a range of numbers does: it never wraps around."""
        ends = isinstance(self.start, llvm.Constant) and isinstance(self.stop, llvm.Constant)
        return ends and self.stop.constant + self.step < 1 << self.stop.type.width - 1


@dataclass(frozen=True)
class Place:
    """Where a loop is: the addresses of the next value and, if that alone does not tell it, of how many are left."""

    value: Any
    left: Any
    steps: Steps


@dataclass(frozen=True)
class Next:
    """The value that a loop goes on with, and whether there is one."""

    value: Any
    found: Any


def used(statement: Any) -> Sequence[Any]:
    """The variables that a statement uses."""
    if not isinstance(statement, ir.assign_types):
        return statement.list_vars()  # type: ignore[no-any-return]
    value = statement.value
    if isinstance(value, ir.var_types):
        return [value]
    return value.list_vars() if isinstance(value, ir.expr_types) else ()


class Lowering(_Lower):  # type: ignore[misc]
    """numba-cuda's lowering of a function whose values have no counts of references."""

    def init(self) -> None:
        super().init()
        self.places: dict[str, Place] = {}
        self.implementations: dict[tuple[Any, ...], Any] = {}

    def _find_singly_assigned_variable(self) -> None:
        """Names of one assignment that are used in its block only, behind it: they need no room."""
        assigned: dict[str, int] = {}
        self.looped_over: set[str] = set()
        elsewhere: set[str] = set()
        for block in self.blocks.values():
            here: set[str] = set()
            for statement in block.body:
                elsewhere.update(v.name for v in used(statement) if v.name not in here)
                if isinstance(statement, ir.assign_types):
                    name, value = statement.target.name, statement.value
                    assigned[name] = assigned.get(name, 0) + 1
                    here.add(name)
                    if isinstance(value, ir.expr_types) and value.op == "getiter":
                        self.looped_over.add(value.value.name)
        self._singly_assigned_vars = {n for n, times in assigned.items() if times == 1} - elsewhere
        self._blk_local_varmap: dict[str, Any] = {}

    def lower_block(self, block: Any) -> None:
        self.pre_block(block)
        for statement in block.body:
            self.loc = statement.loc
            try:
                self.lower_inst(statement)
            except Exception:
                with new_error_context(
                    'lowering "{inst}" at {loc}', inst=statement, loc=self.loc,
                    errcls_=partial(LoweringError, loc=self.loc),
                ):  # fmt: skip
                    raise
        self.post_block(block)

    def lower_inst(self, statement: Any) -> None:
        if isinstance(statement, ir.assign_types) and not isinstance(statement.value, ir.arg_types):
            kind = self.typeof(statement.target.name)
            self.storevar(self.lower_assign(kind, statement), statement.target.name)
        elif isinstance(statement, ir.staticsetitem_types) and isinstance(
            self.typeof(statement.target.name), types.CPointer
        ):
            signature = self.fndesc.calltypes[statement]
            self.lower_setitem(statement.target, statement.index_var, statement.value, signature)
        elif not isinstance(statement, ir.del_types):
            super().lower_inst(statement)

    def lower_assign(self, kind: Any, statement: Any) -> Any:
        value, name = statement.value, statement.target.name
        if isinstance(value, ir.var_types) and value.name in self.places:
            return self.places[value.name]
        steps = None
        if (
            name in self.looped_over
            and name in self._singly_assigned_vars
            and isinstance(kind, types.RangeType)
        ):
            steps = self.steps(value)
        return steps or super().lower_assign(kind, statement)

    def storevar(self, value: Any, name: str, argidx: Any = None) -> None:
        if isinstance(value, Place):
            if self.places.setdefault(name, value) is not value:
                raise LoweringError(f"{name} goes through two ranges", loc=self.loc)
        elif name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self._alloca_var(name, self.typeof(name))
            self.builder.store(value, self.varmap[name])

    def loadvar(self, name: str) -> Any:
        if name in self._blk_local_varmap:
            return self._blk_local_varmap[name]
        return self.builder.load(self.getvar(name))

    # ---------------------------------------------------------------- calls

    def implementation(self, function: Any, types_given: tuple[Any, ...]) -> Any:
        """What makes the code of an operator for operands of these types: a text has thousands of them, but few kinds."""
        key = function, types_given
        found = self.implementations.get(key)
        if found is None:
            kind = self.context.typing_context.resolve_value_type(function)
            found = self.context.get_function(
                kind, kind.get_call_type(self.context.typing_context, types_given, {})
            )
            self.implementations[key] = found
        return found

    def converted(self, name: str, kind: Any) -> Any:
        """A variable's value as one of this type."""
        value, own = self.loadvar(name), self.typeof(name)
        return value if own is kind else self.context.cast(self.builder, value, own, kind)

    def lower_binop(self, kind: Any, expr: Any, function: Any) -> Any:
        if not (expr.static_lhs is ir.UNDEFINED and expr.static_rhs is ir.UNDEFINED):
            return super().lower_binop(kind, expr, function)
        signature = self.fndesc.calltypes[expr]
        left, right = (
            self.converted(*x) for x in zip((expr.lhs.name, expr.rhs.name), signature.args, strict=True)
        )
        result = self.implementation(function, signature.args)(self.builder, (left, right))
        return self.context.cast(self.builder, result, signature.return_type, kind)

    def lower_getitem(self, kind: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        given = [self.converted(*x) for x in zip((value.name, index.name), signature.args, strict=True)]
        result = self.implementation(operator.getitem, signature.args)(self.builder, given)
        return self.context.cast(self.builder, result, signature.return_type, kind)

    def lower_setitem(self, target: Any, index: Any, value: Any, signature: Any) -> Any:
        names = target.name, index.name, value.name
        given = [self.converted(*x) for x in zip(names, signature.args, strict=True)]
        return self.implementation(operator.setitem, signature.args)(self.builder, given)

    def _lower_call_normal(self, function: Any, expr: Any, signature: Any) -> Any:
        if expr.target is not None or signature.recvr:
            return super()._lower_call_normal(function, expr, signature)
        given = self.fold_call_args(function, signature, expr.args, expr.vararg, expr.kws)
        key = function, signature.args, signature.return_type
        if key not in self.implementations:
            self.implementations[key] = self.context.get_function(function, signature)
        return self.implementations[key](self.builder, given, self.loc)

    # ---------------------------------------------------------------- loops

    def lower_expr(self, kind: Any, expr: Any) -> Any:
        match expr.op:
            case "getiter" if isinstance(steps := self._blk_local_varmap.get(expr.value.name), Steps):
                return self.begun(steps)
            case "iternext" if expr.value.name in self.places:
                return self.gone_on(self.places[expr.value.name])
            case "pair_first" if isinstance(pair := self._blk_local_varmap.get(expr.value.name), Next):
                return pair.value
            case "pair_second" if isinstance(pair := self._blk_local_varmap.get(expr.value.name), Next):
                return pair.found
            case "static_getitem" if (
                isinstance(self.typeof(expr.value.name), types.CPointer) and expr.index_var
            ):
                return self.lower_getitem(kind, expr, expr.value, expr.index_var, self.fndesc.calltypes[expr])
        return super().lower_expr(kind, expr)

    def steps(self, called: Any) -> Steps | None:
        """What a range is called with; None where it is no call or its step no number above 0."""
        if not (isinstance(called, ir.expr_types) and called.op == "call"):
            return None
        signature = self.fndesc.calltypes[called]
        given = self.fold_call_args(
            self.typeof(called.func.name), signature, called.args, called.vararg, called.kws
        )
        kind = self.context.get_value_type(signature.return_type.dtype)
        start, stop, step = {1: (kind(0), *given, kind(1)), 2: (*given, kind(1)), 3: given}[len(given)]
        if not (isinstance(step, llvm.Constant) and step.constant > 0):
            return None
        return Steps(start, stop, step.constant)

    def begun(self, steps: Steps) -> Place:
        """A loop at its first value."""
        value = self.slot(steps.start.type)
        self.builder.store(steps.start, value)
        return Place(value, None if steps.known else self.count(steps), steps)

    def count(self, steps: Steps) -> Any:
        """Where the number of values of a range is kept: numba-cuda's formula, of which NVVM makes what it made before."""
        builder, place = self.builder, self.slot(steps.start.type)
        zero, one, step = (steps.start.type(n) for n in (0, 1, steps.step))
        between = builder.sub(steps.stop, steps.start)
        with builder.if_else(builder.icmp_signed("<=", between, zero)) as (none, some):
            with none:
                builder.store(zero, place)
            with some:
                uneven = builder.icmp_signed(">", builder.srem(between, step), zero)
                whole = builder.sdiv(between, step)
                builder.store(builder.add(whole, builder.select(uneven, one, zero)), place)
        return place

    def gone_on(self, place: Place) -> Next:
        """The next value, behind which the loop is put; zero where there is none, as numba-cuda has it. How many are left is
        counted down in any case, unlike there: NVVM would keep a choice between -1 and 0 for a loop that it does not
        unroll, and compute what the loop's end depends on before it needs it, with registers for it."""
        builder, steps = self.builder, place.steps
        given = self.slot(steps.start.type)
        builder.store(steps.start.type(0), given)
        if place.left is None:
            value = builder.load(place.value)
            found = builder.icmp_signed("<", value, steps.stop)
        else:
            left = builder.load(place.left)
            found = builder.icmp_signed(">", left, left.type(0))
            builder.store(builder.sub(left, left.type(1), flags=["nsw"]), place.left)
        with builder.if_then(found):
            if place.left is not None:
                value = builder.load(place.value)
            builder.store(value, given)
            builder.store(builder.add(value, value.type(steps.step)), place.value)
        return Next(builder.load(given), found)

    def slot(self, kind: Any) -> Any:
        """Room for one value, in the entry block."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)
