"""Generated text in LLVM's form, as numba-cuda makes it but with less to say: loops over `range` as two numbers each, names that
are never deleted, no values that are stored only to be stored over.

numba-cuda's own form of a loop keeps a record of a range, a record of where it is and a pair of a value and whether there
is one, in some eighty instructions; an attention has a hundred and fifty loops, and LLVM's optimiser reads all of it. The
machine code is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir as llvm
from numba.cuda import lowering, types
from numba.cuda.core import ir
from numba.cuda.core.errors import LoweringError, new_error_context

_Lower: Any = lowering.CUDALower


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


class Lowering(_Lower):  # type: ignore[misc]
    """numba-cuda's lowering of a function whose values have no counts of references."""

    def init(self) -> None:
        super().init()
        self.places: dict[str, Place] = {}
        self.looped_over = {
            s.value.value.name
            for block in self.blocks.values()
            for s in block.body
            if isinstance(s, ir.assign_types) and isinstance(s.value, ir.expr_types) and s.value.op == "getiter"
        }

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
        elif not isinstance(statement, ir.del_types):
            super().lower_inst(statement)

    def lower_assign(self, kind: Any, statement: Any) -> Any:
        value, name = statement.value, statement.target.name
        if isinstance(value, ir.var_types) and value.name in self.places:
            return self.places[value.name]
        if isinstance(kind, types.RangeType) and name in self.looped_over & self._singly_assigned_vars:
            return self.steps(value) or super().lower_assign(kind, statement)
        return super().lower_assign(kind, statement)

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
        return super().lower_expr(kind, expr)

    def steps(self, called: Any) -> Steps | None:
        """What a range is called with; None where its step is no number above 0."""
        if called.op != "call":
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
        """Where the number of values of a range is kept, by numba-cuda's formula: NVVM then makes of it what it made before."""
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
        """The next value, behind which the loop is put."""
        builder, steps = self.builder, place.steps
        value = builder.load(place.value)
        flags = ["nsw"] if place.left is None else []
        builder.store(builder.add(value, value.type(steps.step), flags=flags), place.value)
        if place.left is None:
            return Next(value, builder.icmp_signed("<", value, steps.stop))
        left = builder.load(place.left)
        builder.store(builder.sub(left, left.type(1), flags=["nsw"]), place.left)
        return Next(value, builder.icmp_signed(">", left, left.type(0)))

    def slot(self, kind: Any) -> Any:
        """Room for one value, in the entry block."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)
