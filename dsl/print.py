"""Syntax tree to text: the source that parses to the same tree, in the layout of `fmt` and without comments."""

from __future__ import annotations

from collections.abc import Iterable

from . import syntax as s
from .format import INDENT

# How tightly an expression holds together; an operand that holds less tightly than its place asks for gets parentheses.
_OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _SIGN, _ATOM = range(1, 9)
_LEVELS = {
    "or": _OR,
    "and": _AND,
    "+": _SUM,
    "-": _SUM,
    "*": _PRODUCT,
    "/": _PRODUCT,
    "//": _PRODUCT,
    "%": _PRODUCT,
}


def print_items(items: Iterable[s.Item]) -> str:
    """The items of a file as text, a blank line between them."""
    return "\n".join(f"{print_item(item)}\n" for item in items)


def print_item(item: s.Item) -> str:
    """One item as text, without a final line end."""
    match item:
        case s.Import():
            return f'import "{item.path}"'
        case s.Fn():
            return _fn(item)
        case s.Kernel():
            return _kernel(item)
        case s.Grad():
            return f"grad {item.kernel.name} wrt {_names(item.wrt)} as {item.name.name}"
        case s.Verbatim():
            return item.text


def print_expr(expr: s.Expr) -> str:
    """An expression as text, with the parentheses that it needs and no others."""
    return s.fold(expr, _expr)[0]


def _expr(expr: s.Expr, inner: list[tuple[str, int]]) -> tuple[str, int]:
    match expr:
        case s.Number():
            return expr.text, _ATOM
        case s.Boolean():
            return str(expr.value).lower(), _ATOM
        case s.Name():
            return expr.name, _ATOM
        case s.Subscript():
            return f"{expr.tensor.name}[{_list(inner)}]", _ATOM
        case s.Unary(op="not"):
            return f"not {_at_least(inner[0], _NOT)}", _NOT
        case s.Unary():
            return f"-{_at_least(inner[0], _SIGN)}", _SIGN
        case s.Binary():
            level = _LEVELS[expr.op]
            return f"{_at_least(inner[0], level)} {expr.op} {_at_least(inner[1], level + 1)}", level
        case s.Compare():
            first, *rest = (_at_least(operand, _SUM) for operand in inner)
            return first + "".join(f" {op} {text}" for op, text in zip(expr.ops, rest, strict=True)), _COMPARE
        case s.Call():
            return f"{expr.function.name}({_list(inner)})", _ATOM
        case s.BracketCall():
            return _bracket_call(expr, [text for text, _ in inner]), _ATOM


def _at_least(operand: tuple[str, int], level: int) -> str:
    text, own = operand
    return text if own >= level else f"({text})"


def _list(inner: list[tuple[str, int]]) -> str:
    return ", ".join(text for text, _ in inner)


def _bracket_call(call: s.BracketCall, inner: list[str]) -> str:
    ranges = iter(inner)
    bound = ", ".join(
        b.name.name if b.extent is None else f"{b.name.name} in {next(ranges)}" for b in call.bound
    )
    condition = f" | {next(ranges)}" if call.predicate is not None else ""
    return f"{call.function.name}[{bound}{condition}]({', '.join(ranges)})"


def _names(names: tuple[s.Name, ...]) -> str:
    return ", ".join(n.name for n in names)


def _fn(fn: s.Fn) -> str:
    bracket = f"[{_names(fn.bracket)}]" if fn.bracket else ""
    heading = f"fn {fn.name.name}{bracket}({_names(fn.parameters)})"
    if not fn.locals:
        return f"{heading} = {print_expr(fn.result)}"
    lines = [f"{local.name.name} = {print_expr(local.value)}" for local in fn.locals]
    return _block(heading, [*lines, f"return {print_expr(fn.result)}"])


def _kernel(kernel: s.Kernel) -> str:
    types = ", ".join(_type_param(p) for p in kernel.type_params)
    heading = f"kernel {kernel.name.name}{f'<{types}>' if types else ''}({_params(kernel.params)})"
    if kernel.outputs:
        outputs = _params(kernel.outputs)
        heading += f" -> {outputs}" if len(kernel.outputs) == 1 else f" -> ({outputs})"
    lines = [f"require {', '.join(map(print_expr, r.conditions))}" for r in kernel.requires]
    lines += [
        "example " + ", ".join(f"{x.name.name} = {print_expr(x.value)}" for x in e.settings)
        for e in kernel.examples
    ]
    return _block(heading, [*lines, *map(_statement, kernel.statements)])


def _block(heading: str, lines: list[str]) -> str:
    return "\n".join([f"{heading} {{", *(INDENT + line for line in lines), "}"])


def _type_param(param: s.TypeParam) -> str:
    return f"{param.name.name}: {' | '.join(a.name for a in param.alternatives) or param.kind}"


def _params(params: tuple[s.Param, ...]) -> str:
    return ", ".join(_param(p) for p in params)


def _param(param: s.Param) -> str:
    shape = f"[{', '.join(map(print_expr, param.shape))}]" if param.shape else ""
    return f"{param.name.name}: {'inout ' if param.inout else ''}{param.dtype.name}{shape}"


def _statement(statement: s.Statement) -> str:
    indices = ", ".join(_left(i) for i in statement.indices)
    target = statement.target.name + (f"[{indices}]" if indices else "")
    return f"{target} {statement.op} {print_expr(statement.value)}"


def _left(index: s.BoundIndex | s.Expr) -> str:
    if not isinstance(index, s.BoundIndex):
        return print_expr(index)
    return index.name.name if index.extent is None else f"{index.name.name} in {print_expr(index.extent)}"
