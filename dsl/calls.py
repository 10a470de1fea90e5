"""Checks of calls, the same in a `fn` and in a kernel: is there such a function, and is it called in its form."""

from __future__ import annotations

from collections.abc import Mapping

from . import syntax as s
from .diagnostics import Diagnostics
from .foreign import FOREIGN_FUNCTIONS
from .records import dataclass
from .suggest import did_you_mean
from .vocabulary import BUILT_IN, CASTS, FUNCTIONS, OUTSIDE, REDUCTIONS

AnyCall = s.Call | s.BracketCall


@dataclass(frozen=True)
class Calls:
    """`casts` are the dtype parameters in scope, `values` the names that are tensors or scalars, to say so if called."""

    found: Diagnostics
    fns: Mapping[str, s.Fn]
    casts: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()

    def check(self, call: AnyCall) -> None:
        name = call.function.name
        if isinstance(call, s.BracketCall):
            self._distinct(call)
        if name in self.fns:
            self._fn(call, self.fns[name])
        elif name in CASTS or name in self.casts:
            self._no_bracket(call, f"{name}(x)")
            self._arguments(call, 1, 1)
        elif name in REDUCTIONS and isinstance(call, s.BracketCall):
            self._arguments(call, 1, 1)
        elif name in FUNCTIONS:
            self._no_bracket(call, f"{name}(…)")
            self._function(call)
        elif name in REDUCTIONS:
            self.found.error(
                "E0125",
                f"`{name}` must say which indices it runs over",
                call.function.span,
                help=f"write {name}[n](…), with the index or indices in brackets",
            )
        else:
            self._unknown(call)

    def _distinct(self, call: s.BracketCall) -> None:
        seen: set[str] = set()
        for bound in call.bound:
            if bound.name.name in seen:
                self.found.error(
                    "E0112",
                    f"the index `{bound.name.name}` stands twice in this bracket",
                    bound.name.span,
                    help="name each index once",
                )
            seen.add(bound.name.name)

    def _function(self, call: AnyCall) -> None:
        """`min` and `max` of one argument are mostly reductions that lost their bracket."""
        name = call.function.name
        if name in REDUCTIONS and len(call.arguments) == 1 and isinstance(call, s.Call):
            self.found.error(
                "E0125",
                f"`{name}` of one value",
                call.span,
                help=f"write {name}[n](…) to run over an index, or {name}(a, b) for the {name} of two values",
            )
        else:
            self._arguments(call, *FUNCTIONS[name])

    def _arguments(self, call: AnyCall, fewest: int, most: int | None) -> None:
        count = len(call.arguments)
        if count >= fewest and (most is None or count <= most):
            return
        wanted = f"{fewest}" if most == fewest else f"at least {fewest}"
        self.found.error(
            "E0124",
            f"`{call.function.name}` takes {wanted} argument{'' if wanted == '1' else 's'}; here it has {count}",
            call.span,
        )

    def _no_bracket(self, call: AnyCall, form: str) -> None:
        if isinstance(call, s.BracketCall):
            self.found.error(
                "E0125",
                f"`{call.function.name}` works on single values and takes no indices in brackets",
                call.function.span,
                help=f"write {form}; reductions are {', '.join(sorted(REDUCTIONS))}",
            )

    def _fn(self, call: AnyCall, fn: s.Fn) -> None:
        wanted = len(fn.bracket)
        given = len(call.bound) if isinstance(call, s.BracketCall) else 0
        form = spelled(fn)
        if wanted == 0 and given:
            self._no_bracket(call, form)
        elif wanted and (given == 0 or (wanted > 1 and given != wanted)):
            number = "one or more indices" if wanted == 1 else f"{wanted} indices"
            self.found.error(
                "E0125",
                f"`{fn.name.name}` runs over {number}; here {given or 'none'} stand{'s' if given == 1 else ''} in brackets",
                call.function.span,
                help=f"it is called as {form}",
            )
        if len(call.arguments) != len(fn.parameters):
            count = len(fn.parameters)
            self.found.error(
                "E0124",
                f"`{fn.name.name}` takes {count} argument{'' if count == 1 else 's'}; here it has {len(call.arguments)}",
                call.span,
                help=f"it is called as {form}",
            )

    def _unknown(self, call: AnyCall) -> None:
        name = call.function.name
        if name in OUTSIDE:
            self.found.error(
                "E0126",
                f"`{name}` is outside the language",
                call.function.span,
                note="sort, scan, top-k and dropout depend on an order of elements or on chance; "
                "the language has maps, reductions, gathers and scatters",
            )
        elif name in self.values:
            self.found.error(
                "E0103",
                f"`{name}` is a value, not a function",
                call.function.span,
                help=f"to multiply write `{name} * (…)`; to read a tensor write its indices, {name}[i]",
            )
        else:
            self.found.error(
                "E0103",
                f"there is no function `{name}`",
                call.function.span,
                help=FOREIGN_FUNCTIONS.get(name) or did_you_mean(name, [*self.fns, *sorted(BUILT_IN)]),
            )


def spelled(fn: s.Fn) -> str:
    """How a `fn` is called: `mean[J](x)`."""
    bracket = f"[{', '.join(b.name for b in fn.bracket)}]" if fn.bracket else ""
    return f"{fn.name.name}{bracket}({', '.join(p.name for p in fn.parameters)})"
