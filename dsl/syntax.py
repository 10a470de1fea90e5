"""The syntax tree: frozen dataclasses named like the grammar's rules, a span on every node (DESIGN 2).

Spans do not take part in equality, so two texts that differ in layout only have equal trees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .source import Source, Span


@dataclass(frozen=True)
class Node:
    span: Span = field(compare=False, repr=False)


# ---------------------------------------------------------------- expressions


@dataclass(frozen=True)
class Number(Node):
    """A literal. `text` as written; `value` int for integer literals, float otherwise."""

    value: int | float
    text: str


@dataclass(frozen=True)
class Boolean(Node):
    value: bool


@dataclass(frozen=True)
class Name(Node):
    """A bare name: an index, an extent, a scalar, a local of a `fn`, `inf`, or a tensor without indices."""

    name: str


@dataclass(frozen=True)
class Subscript(Node):
    """`q[b, h, m, d]`"""

    tensor: Name
    indices: tuple[Expr, ...]


@dataclass(frozen=True)
class Unary(Node):
    """`-x`, `not x`; `op` is `-` or `not`."""

    op: str
    operand: Expr


@dataclass(frozen=True)
class Binary(Node):
    """`+ - * / // % and or`; `op` as written."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True)
class Compare(Node):
    """`a < b <= c`: operands and the operators between them."""

    operands: tuple[Expr, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Call(Node):
    """`exp(x)`, `where(c, a, b)`, `f32(x)`, `gelu(x)`: an operation, a cast or a `fn` without brackets."""

    function: Name
    arguments: tuple[Expr, ...]


@dataclass(frozen=True)
class BoundIndex(Node):
    """`n` or `n in EXTENT` in a reduction's bracket or on a left side."""

    name: Name
    extent: Expr | None


@dataclass(frozen=True)
class BracketCall(Node):
    """`sum[i, j | predicate](expr)` or a `fn` with bracket parameters: `softmax[n | n <= m](x)`."""

    function: Name
    bound: tuple[BoundIndex, ...]
    predicate: Expr | None
    arguments: tuple[Expr, ...]


Expr = Number | Boolean | Name | Subscript | Unary | Binary | Compare | Call | BracketCall

# ---------------------------------------------------------------- items


@dataclass(frozen=True)
class Import(Node):
    """`import "path.tile"`"""

    path: str


@dataclass(frozen=True)
class Local(Node):
    """`name = expr` inside a `fn`."""

    name: Name
    value: Expr


@dataclass(frozen=True)
class Fn(Node):
    """`fn f[J](x, y) { locals return expr }` or `fn f(x) = expr`."""

    name: Name
    bracket: tuple[Name, ...]
    parameters: tuple[Name, ...]
    locals: tuple[Local, ...]
    result: Expr


@dataclass(frozen=True)
class TypeParam(Node):
    """`T: f16 | bf16 | f32` (alternatives) or `C: extent` (`kind` is "dtype" or "extent")."""

    name: Name
    kind: str
    alternatives: tuple[Name, ...]


@dataclass(frozen=True)
class Param(Node):
    """`q: T[B, H, M, D]`, `scale: f32`, `c: inout f32[M]`. `shape` is empty for a scalar."""

    name: Name
    dtype: Name
    shape: tuple[Expr, ...]
    inout: bool


@dataclass(frozen=True)
class Require(Node):
    """`require H % G == 0, scale > 0`"""

    conditions: tuple[Expr, ...]


@dataclass(frozen=True)
class Setting(Node):
    """`M = 1024` in an `example` line."""

    name: Name
    value: Expr


@dataclass(frozen=True)
class Example(Node):
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Statement(Node):
    """`o[b, m] = expr`, `z = expr`, `c[m, n] += expr`. `op` is `=` or `+=`.

    A left index is a `BoundIndex` where it is a bare name (with or without `in`), an expression otherwise (updates only).
    """

    target: Name
    indices: tuple[BoundIndex | Expr, ...]
    op: str
    value: Expr


@dataclass(frozen=True)
class Kernel(Node):
    name: Name
    type_params: tuple[TypeParam, ...]
    params: tuple[Param, ...]
    outputs: tuple[Param, ...]
    requires: tuple[Require, ...]
    examples: tuple[Example, ...]
    statements: tuple[Statement, ...]


@dataclass(frozen=True)
class Grad(Node):
    """`grad attention wrt q, k, v as attention_grad`"""

    kernel: Name
    wrt: tuple[Name, ...]
    name: Name


Item = Import | Fn | Kernel | Grad


@dataclass(frozen=True)
class File:
    """One parsed file."""

    source: Source = field(compare=False)
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Program:
    """A file with everything it imports (the prelude included), names resolved: what `load` and `parse` return.

    `fns` and `kernels` are keyed by name; insertion order is text order, imports first.
    """

    file: File
    fns: dict[str, Fn] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    grads: dict[str, Grad] = field(default_factory=dict)
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
