"""The syntax tree: frozen dataclasses named like the grammar's rules, a span on every node (DESIGN 2).

Spans do not take part in equality, so two texts that differ in layout only have equal trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, fields
from typing import TypeVar

from .records import dataclass
from .source import Source, Span


def compared(node: Node) -> tuple[object, ...]:
    """The values of a node's fields that take part in equality: everything but the span."""
    return tuple(getattr(node, f.name) for f in fields(node) if f.compare)


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """Equality, hash and repr walk the tree with a stack: a chain of 10,000 terms meets no recursion limit."""

    span: Span = field(compare=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        pairs: list[tuple[object, object]] = [(self, other)]
        while pairs:
            a, b = pairs.pop()
            if a is b:
                continue
            if type(a) is not type(b):
                return False
            if isinstance(a, Node) and isinstance(b, Node):
                pairs.extend(zip(compared(a), compared(b), strict=True))
            elif isinstance(a, tuple) and isinstance(b, tuple):
                if len(a) != len(b):
                    return False
                pairs.extend(zip(a, b, strict=True))
            elif a != b:
                return False
        return True

    def __hash__(self) -> int:
        leaves: list[object] = []
        waiting: list[object] = [self]
        while waiting:
            item = waiting.pop()
            if isinstance(item, Node):
                leaves.append(type(item).__name__)
                waiting.extend(compared(item))
            elif isinstance(item, tuple):
                leaves.append(len(item))
                waiting.extend(item)
            else:
                leaves.append(item)
        return hash(tuple(leaves))

    def __repr__(self) -> str:
        out: list[str] = []
        waiting: list[object] = [self]
        while waiting:
            item = waiting.pop()
            if isinstance(item, _Text):
                out.append(item.text)
            elif isinstance(item, Node):
                waiting.extend(reversed(_pieces(item)))
            elif isinstance(item, tuple):
                inner = [piece for part in item for piece in (_Text(", "), part)]
                close = _Text(",)" if len(item) == 1 else ")")
                waiting.extend(reversed([_Text("("), *inner[1:], close]))
            else:
                out.append(repr(item))
        return "".join(out)


@dataclass(frozen=True)
class _Text:
    """A piece of a repr that is already text."""

    text: str


def _pieces(node: Node) -> list[object]:
    """`Name(name='x')` as texts and values still to print."""
    out: list[object] = [_Text(f"{type(node).__name__}(")]
    shown = [f.name for f in fields(node) if f.repr]
    for i, name in enumerate(shown):
        out += [_Text(f"{', ' if i else ''}{name}="), getattr(node, name)]
    return [*out, _Text(")")]


# ---------------------------------------------------------------- expressions


@dataclass(frozen=True, eq=False, repr=False)
class Number(Node):
    """A literal. `text` as written; `value` int for integer literals, float otherwise."""

    value: int | float
    text: str


@dataclass(frozen=True, eq=False, repr=False)
class Boolean(Node):
    value: bool


@dataclass(frozen=True, eq=False, repr=False)
class Name(Node):
    """A bare name: an index, an extent, a scalar, a local of a `fn`, `inf`, or a tensor without indices."""

    name: str


@dataclass(frozen=True, eq=False, repr=False)
class Subscript(Node):
    """`q[b, h, m, d]`"""

    tensor: Name
    indices: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Unary(Node):
    """`-x`, `not x`; `op` is `-` or `not`."""

    op: str
    operand: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Binary(Node):
    """`+ - * / // % and or`; `op` as written."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Compare(Node):
    """`a < b <= c`: operands and the operators between them."""

    operands: tuple[Expr, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Call(Node):
    """`exp(x)`, `where(c, a, b)`, `f32(x)`, `gelu(x)`: an operation, a cast or a `fn` without brackets."""

    function: Name
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class BoundIndex(Node):
    """`n` or `n in EXTENT` in a reduction's bracket or on a left side."""

    name: Name
    extent: Expr | None


@dataclass(frozen=True, eq=False, repr=False)
class BracketCall(Node):
    """`sum[i, j | predicate](expr)` or a `fn` with bracket parameters: `softmax[n | n <= m](x)`."""

    function: Name
    bound: tuple[BoundIndex, ...]
    predicate: Expr | None
    arguments: tuple[Expr, ...]


Expr = Number | Boolean | Name | Subscript | Unary | Binary | Compare | Call | BracketCall

T = TypeVar("T")


def operands(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly inside one, in text order: indices, ranges, predicate, arguments."""
    match expr:
        case Subscript():
            return expr.indices
        case Unary():
            return (expr.operand,)
        case Binary():
            return (expr.left, expr.right)
        case Compare():
            return expr.operands
        case Call():
            return expr.arguments
        case BracketCall():
            ranges = tuple(b.extent for b in expr.bound if b.extent is not None)
            return (*ranges, *((expr.predicate,) if expr.predicate is not None else ()), *expr.arguments)
    return ()


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every expression of the trees, an outer one before its operands, in text order."""
    waiting = list(reversed(roots))
    while waiting:
        expr = waiting.pop()
        yield expr
        waiting.extend(reversed(operands(expr)))


def fold(root: Expr, visit: Callable[[Expr, list[T]], T]) -> T:
    """The value of a tree from the inside out: `visit` gets an expression and the values of its `operands`."""
    values: list[T] = []
    waiting: list[tuple[Expr, bool]] = [(root, False)]
    while waiting:
        expr, ready = waiting.pop()
        inner = operands(expr)
        if inner and not ready:
            waiting.append((expr, True))
            waiting.extend((e, False) for e in reversed(inner))
            continue
        taken = values[len(values) - len(inner) :]
        del values[len(values) - len(inner) :]
        values.append(visit(expr, taken))
    return values[0]


# ---------------------------------------------------------------- items


@dataclass(frozen=True, eq=False, repr=False)
class Import(Node):
    """`import "path.tile"`"""

    path: str


@dataclass(frozen=True, eq=False, repr=False)
class Local(Node):
    """`name = expr` inside a `fn`."""

    name: Name
    value: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Fn(Node):
    """`fn f[J](x, y) { locals return expr }` or `fn f(x) = expr`."""

    name: Name
    bracket: tuple[Name, ...]
    parameters: tuple[Name, ...]
    locals: tuple[Local, ...]
    result: Expr


@dataclass(frozen=True, eq=False, repr=False)
class TypeParam(Node):
    """`T: f16 | bf16 | f32` (alternatives) or `C: extent` (`kind` is "dtype" or "extent")."""

    name: Name
    kind: str
    alternatives: tuple[Name, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Param(Node):
    """`q: T[B, H, M, D]`, `scale: f32`, `c: inout f32[M]`. `shape` is empty for a scalar."""

    name: Name
    dtype: Name
    shape: tuple[Expr, ...]
    inout: bool


@dataclass(frozen=True, eq=False, repr=False)
class Require(Node):
    """`require H % G == 0, scale > 0`"""

    conditions: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Setting(Node):
    """`M = 1024` in an `example` line."""

    name: Name
    value: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Example(Node):
    settings: tuple[Setting, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Statement(Node):
    """`o[b, m] = expr`, `z = expr`, `c[m, n] += expr`. `op` is `=` or `+=`.

    A left index is a `BoundIndex` where it is a bare name (with or without `in`), an expression otherwise (updates only).
    """

    target: Name
    indices: tuple[BoundIndex | Expr, ...]
    op: str
    value: Expr


@dataclass(frozen=True, eq=False, repr=False)
class Kernel(Node):
    name: Name
    type_params: tuple[TypeParam, ...]
    params: tuple[Param, ...]
    outputs: tuple[Param, ...]
    requires: tuple[Require, ...]
    examples: tuple[Example, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Grad(Node):
    """`grad attention wrt q, k, v as attention_grad`"""

    kernel: Name
    wrt: tuple[Name, ...]
    name: Name


@dataclass(frozen=True, eq=False, repr=False)
class Verbatim(Node):
    """A `tile`, `module` or `schedule` item: read by the compiler, which owns those texts. `text` is the whole item."""

    kind: str
    name: Name
    text: str


Item = Import | Fn | Kernel | Grad | Verbatim


@dataclass(frozen=True)
class File:
    """One parsed file."""

    source: Source = field(compare=False)
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Program:
    """A file with everything it imports (the prelude included), names resolved: what `load` and `parse` return.

    `fns` and `kernels` are keyed by name; insertion order is text order, imports first. `tiles` has the `tile` and
    `module` items.
    """

    file: File
    fns: dict[str, Fn] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    grads: dict[str, Grad] = field(default_factory=dict)
    tiles: dict[str, Verbatim] = field(default_factory=dict)
    schedules: dict[str, Verbatim] = field(default_factory=dict)
    sources: tuple[Source, ...] = field(default=(), compare=False)

    def __getitem__(self, name: str) -> ProgramKernel:
        if name not in self.kernels:
            known = ", ".join(self.kernels) or "none"
            raise KeyError(f"no kernel named {name!r}; this program has: {known}")
        return ProgramKernel(self, self.kernels[name])


@dataclass(frozen=True)
class ProgramKernel:
    """One kernel together with the program whose `fn`s it uses: `program["attention"]`."""

    program: Program
    kernel: Kernel

    def __repr__(self) -> str:
        return f"<kernel {self.kernel.name.name} of {self.program.file.source.name}>"
