"""Everything about a program that is decided by names alone, before types and extents; all errors are raised together.

Functions and values have names of their own kinds: a tensor may be called `exp` or `max`, since an operation is always
followed by `(` or `[…](` and a tensor never. A `fn` may not take the name of an operation, a reduction or a dtype, since
the texts of other files, the prelude's among them, use those.
"""

from __future__ import annotations

from dataclasses import replace

from . import syntax as s
from .calls import Calls
from .check_kernel import check_kernel
from .diagnostics import Diagnostics
from .free import Leaks, free_indices, leaks_of
from .ordering import first_cycle, in_order
from .suggest import did_you_mean
from .vocabulary import BUILT_IN


def check(program: s.Program) -> s.Program:
    """The same program with the locals of each `fn` in the order of their use. Raises `TileError`."""
    found = Diagnostics()
    fns, leaks = _check_fns(program, found)
    for kernel in program.kernels.values():
        check_kernel(kernel, program.fns, leaks, found)
    for grad in program.grads.values():
        _check_grad(grad, program, found)
    found.check()
    return replace(program, fns=fns)


# ---------------------------------------------------------------- fn


def _check_fns(program: s.Program, found: Diagnostics) -> tuple[dict[str, s.Fn], Leaks]:
    fns = {name: _check_fn(fn, program, found) for name, fn in program.fns.items()}
    calls = {name: _called(fn) for name, fn in fns.items()}
    cycle = first_cycle(calls)
    if cycle is not None:
        found.error(
            "E0123",
            f"`{cycle[0]}` calls itself",
            fns[cycle[0]].name.span,
            note="a `fn` is replaced by its text where it is called, so it cannot end: " + " → ".join(cycle),
        )
    leaks: dict[str, tuple[frozenset[int], ...]] = {}
    for name in in_order(calls) or fns:
        leaks[name] = leaks_of(fns[name], leaks)
    return fns, leaks


def _called(fn: s.Fn) -> list[str]:
    bodies = [*(local.value for local in fn.locals), fn.result]
    return [e.function.name for e in s.walk(*bodies) if isinstance(e, s.Call | s.BracketCall)]


def _check_fn(fn: s.Fn, program: s.Program, found: Diagnostics) -> s.Fn:
    if fn.name.name in BUILT_IN:
        found.error(
            "E0122",
            f"`{fn.name.name}` is an operation of the language",
            fn.name.span,
            help="give the `fn` another name",
        )
    _distinct(fn, found)
    values = {p.name for p in fn.parameters} | {local.name.name for local in fn.locals}
    for body in (*(local.value for local in fn.locals), fn.result):
        _check_body(fn, body, values, program, found)
    return _ordered(fn, found)


def _distinct(fn: s.Fn, found: Diagnostics) -> None:
    seen: dict[str, s.Name] = {}
    for name in (*fn.bracket, *fn.parameters, *(local.name for local in fn.locals)):
        first = seen.setdefault(name.name, name)
        if first is not name:
            found.error(
                "E0114",
                f"`{name.name}` has two meanings in the `fn` {fn.name.name}",
                name.span,
                note=f"it is first named at {first.span}",
                help="rename one of them",
            )


def _check_body(fn: s.Fn, body: s.Expr, values: set[str], program: s.Program, found: Diagnostics) -> None:
    brackets = {b.name for b in fn.bracket}
    calls = Calls(found, program.fns, values=frozenset(values))
    for expr in s.walk(body):
        match expr:
            case s.Name() if expr.name in brackets - values:
                found.error(
                    "E0109",
                    f"`{expr.name}` stands for the indices to run over and is no value",
                    expr.span,
                    help=f"use it in the bracket of a reduction: sum[{expr.name}](…)",
                )
            case s.Subscript():
                _subscript_in_fn(expr, values, found)
            case s.Call():
                calls.check(expr)
            case s.BracketCall():
                calls.check(expr)
                _bound_in_fn(expr, brackets, values, found)
    known = {*values, *brackets, "inf"}
    reads = [part for part in s.walk(body) if isinstance(part, s.Subscript)]
    known.update(part.name for read in reads for part in s.walk(read) if isinstance(part, s.Name))
    names = free_indices(body, {}, lambda n: {} if n.name in known else {(n.name, ""): n})
    for name in names.values():
        _unknown_in_fn(name, values, fn, found)


def _subscript_in_fn(expr: s.Subscript, values: set[str], found: Diagnostics) -> None:
    name = expr.tensor.name
    what = f"`{name}` is a value here, already read" if name in values else f"a `fn` knows no tensor `{name}`"
    found.error(
        "E0135",
        f"{what}: a `fn` takes no indices",
        expr.span,
        help=f"write `{name}` alone, and the indices where the `fn` is called: f(q[m, d])",
    )


def _bound_in_fn(call: s.BracketCall, brackets: set[str], values: set[str], found: Diagnostics) -> None:
    for bound in call.bound:
        name = bound.name.name
        if name in values:
            found.error(
                "E0113",
                f"the index `{name}` has the name of a value of this `fn`",
                bound.name.span,
                help="rename the index",
            )
        elif name not in brackets and bound.extent is None:
            near = did_you_mean(name, brackets)
            found.error(
                "E0136",
                f"`{name}` is not among the indices of this `fn`, and has no range of its own",
                bound.name.span,
                help=near or f"name it in the heading, fn f[{name}](x), or give its range, `{name} in 3`",
            )


def _unknown_in_fn(name: s.Name, values: set[str], fn: s.Fn, found: Diagnostics) -> None:
    found.error(
        "E0101",
        f"the `fn` {fn.name.name} knows no `{name.name}`",
        name.span,
        note="a `fn` sees its parameters and locals only",
        help=did_you_mean(name.name, sorted(values))
        or f"make it a parameter: fn {fn.name.name}(…, {name.name})",
    )


def _ordered(fn: s.Fn, found: Diagnostics) -> s.Fn:
    """`fn` with its locals in the order of their use, which the text may leave free."""
    by_name = {local.name.name: local for local in fn.locals}
    edges = {
        name: [e.name for e in s.walk(local.value) if isinstance(e, s.Name) and e.name in by_name]
        for name, local in by_name.items()
    }
    cycle = first_cycle(edges)
    if cycle is not None:
        found.error(
            "E0120",
            f"`{cycle[0]}` is defined through itself",
            by_name[cycle[0]].name.span,
            note=" → ".join(cycle),
            help="each name is defined once and never changes; give the new value a new name",
        )
        return fn
    return replace(fn, locals=tuple(by_name[name] for name in in_order(edges) or ()))


# ---------------------------------------------------------------- grad


def _check_grad(grad: s.Grad, program: s.Program, found: Diagnostics) -> None:
    kernel = program.kernels.get(grad.kernel.name)
    if kernel is None:
        found.error(
            "E0132",
            f"there is no kernel `{grad.kernel.name}`",
            grad.kernel.span,
            help=did_you_mean(grad.kernel.name, program.kernels),
        )
        return
    params = {p.name.name: p for p in kernel.params}
    seen: set[str] = set()
    for name in grad.wrt:
        if name.name in seen:
            found.error("E0134", f"`{name.name}` stands twice after `wrt`", name.span, help="name it once")
        elif name.name not in params:
            found.error(
                "E0133",
                f"the kernel {kernel.name.name} has no parameter `{name.name}`",
                name.span,
                help=did_you_mean(name.name, params) or f"its parameters are {', '.join(params)}",
            )
        seen.add(name.name)
