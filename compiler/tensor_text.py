"""Text form of the tensor IR: `print_graph` writes it, `parse_graph` reads it; `parse_graph(print_graph(g)) == g`.

    kernel rows(x, scale) {
        scalar scale: f32
        extents M, N
        axis m in M
        axis n in N
        tensor x: f16[M, N]
        output y: f32[M, N]
        check require 0.0 < scale: "scale > 0"
        %1 = scale * sum[n | n <= m](f32(x[m, n]))
        y[m, n]: f32 = %1 / (%1 + 1.0)
    }

A node that is used more than once, and long, is written once under a number, so that text stays linear in the graph. A bare
name is a scalar, an extent or an axis's index, the first that is declared; `extent(n)` and `index(n)` say which otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from typing import Literal

from ..dsl.records import dataclass
from ..dsl.source import Source
from ..dsl.types import NAMES, DType
from . import tensor_ir as t
from .notation import DEPTH, SIGNS, Piece, Reader, Token, call, infix, number, prefix, quote
from .tensor_ir import ARITY, REDUCTIONS, Check, Definition, Graph, Node, ScalarParam, Tensor

SHORT = 24
"""Characters up to which a shared node that is no reduction is written out at each use."""

# ---------------------------------------------------------------- printing


def print_graph(g: Graph) -> str:
    """The graph as canonical text."""
    return _Printer(g).text()


@dataclass
class _Printer:
    """`lines` grow in order; `names` has the nodes that were given a number, `pieces` the text of all written so far."""

    graph: Graph
    lines: list[str] = field(default_factory=list)
    uses: dict[Node, int] = field(default_factory=dict)
    depth: dict[Node, int] = field(default_factory=dict)
    pieces: dict[Node, Piece] = field(default_factory=dict)
    numbers: int = 0

    def text(self) -> str:
        g = self.graph
        self.count()
        for s in g.scalars.values():
            self.line(f"scalar {s.name}: {s.dtype}")
        if g.extents:
            self.line(f"extents {', '.join(g.extents)}")
        if g.declared:
            self.line(f"declared {', '.join(g.declared)}")
        for axis, size in g.axes.items():
            self.line(f"axis {axis} in {self.one(size)}")
        for word, table in (("tensor", g.tensors), ("output", g.outputs)):
            for p in table.values():
                mode = "inout " if p.inout else ""
                self.line(f"{word} {p.name}: {mode}{p.dtype}[{self.many(p.shape)}]")
        if g.example:
            self.line("example " + ", ".join(f"{k} = {v!r}" for k, v in g.example.items()))
        for c in g.checks:
            self.line(f"check {c.kind} {self.one(c.condition)}: {quote(c.message)}")
        for d in g.definitions:
            self.definition(d)
        return "\n".join([f"kernel {g.name}({', '.join(g.order)}) {{", *self.lines, "}", ""])

    def line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def count(self) -> None:
        """Uses of each node, those by definitions and shapes included."""
        g = self.graph
        roots = [*g.axes.values(), *(c.condition for c in g.checks)]
        roots += [x for p in (*g.tensors.values(), *g.outputs.values()) for x in p.shape]
        roots += [x for d in g.definitions for x in (d.value, *(d.target or ()))]
        for n in (*roots, *(a for x in t.walk(roots) for a in x.args)):
            self.uses[n] = self.uses.get(n, 0) + 1

    def definition(self, d: Definition) -> None:
        value = self.one(d.value)
        sign = "+=" if d.accumulate else "="
        axes = ", ".join(d.axes)
        if d.target is None:
            left = f"{d.name}[{axes}]" if axes else d.name
        else:
            left = f"update {d.name}[{self.many(d.target)}] over [{axes}]"
        self.line(f"{left}: {d.dtype} {sign} {value}")

    def many(self, nodes: Iterable[Node]) -> str:
        return ", ".join([self.one(n) for n in nodes])

    def one(self, node: Node) -> str:
        """The text of a node; lines for the shared nodes below it come before."""
        for n in t.walk([node]):
            if n not in self.pieces:
                self.pieces[n] = self.numbered(n, self.piece(n))
        return self.pieces[node].text

    def numbered(self, n: Node, piece: Piece) -> Piece:
        deep = 1 + max((self.depth[a] for a in n.args), default=0)
        shared = self.uses[n] > 1 and (len(piece.text) > SHORT or isinstance(n, t.Reduce))
        if not (shared or deep > DEPTH // 2):
            self.depth[n] = deep
            return piece
        self.depth[n] = 0
        self.numbers += 1
        self.line(f"%{self.numbers} = {piece.text}")
        return Piece(f"%{self.numbers}")

    def piece(self, n: Node) -> Piece:
        args = [self.pieces[a] for a in n.args]
        match n:
            case t.Const():
                return number(n.value, n.dtype)
            case t.Scalar():
                return Piece(n.name)
            case t.Extent():
                return Piece(f"extent({n.name})" if n.name in self.graph.scalars else n.name)
            case t.Index():
                taken = n.axis in self.graph.scalars or n.axis in self.graph.extents
                return Piece(f"index({n.axis})" if taken or n.axis not in self.graph.axes else n.axis)
            case t.Carried():
                return Piece(f"{n.moment}({n.name}[{', '.join(sorted(n.axes))}]: {n.dtype})")
            case t.Read():
                return Piece(f"{n.tensor}[{', '.join(a.text for a in args)}]")
            case t.Cast():
                return call(n.dtype.value, args)
            case t.When():
                return call("when", args)
            case t.Reduce():
                such = f" | {args[1].text}" if len(args) > 1 else ""
                return Piece(f"{n.fn}[{', '.join(n.bound)}{such}]({args[0].text})")
            case t.Apply(op="neg" | "not" as op):
                return prefix(op, args[0], isinstance(n.args[0], t.Const))
            case t.Apply(op=op) if op in SIGNS:
                return infix(op, args[0], args[1])
            case t.Apply(op=op):
                return call(op, args)
        raise TypeError(f"{type(n).__name__} has no text form")


# ---------------------------------------------------------------- parsing


def parse_graph(text: str, name: str = "<text>") -> Graph:
    """Read a graph. `name` is the path that diagnostics show. Raises `TileError` with codes E0601 to E0606."""
    return _GraphReader(Source(name, text)).graph()


MOMENTS: dict[str, t.Moment] = {"old": "old", "new": "new", "final": "final"}
CheckKind = Literal["require", "bounds", "shape"]
KINDS: dict[str, CheckKind] = {"require": "require", "bounds": "bounds", "shape": "shape"}


class _GraphReader(Reader[Node]):
    """Lines in any order that declares before use."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, shared=True)
        self.numbers: dict[str, Node] = {}
        self.tensors: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.scalars: dict[str, ScalarParam] = {}
        self.extents: tuple[str, ...] = ()
        self.declared: tuple[str, ...] = ()
        self.axes: dict[str, Node] = {}
        self.example: dict[str, int | float] = {}
        self.checks: list[Check] = []
        self.definitions: list[Definition] = []
        self.stored: dict[str, DType] = {}

    # -- expressions

    def constant(self, value: int | float | bool, dtype: DType) -> Node:
        return t.const(value, dtype)

    def operation(self, op: str, operands: tuple[Node, ...], token: Token) -> Node:
        return self._typed(token, lambda: t.apply(op, *operands, span=self.since(token)))

    def _typed(self, token: Token, make: Callable[[], Node]) -> Node:
        try:
            return make()
        except (TypeError, ValueError) as error:
            self.fail(str(error), "E0605", token)

    def atom(self) -> Node:
        token = self.token
        if token.kind == "shared":
            if token.text not in self.numbers:
                self.fail(f"`{token.text}` is not defined", "E0603", token)
            return self.numbers[self.next().text]
        if token.text in ("extent", "index", *MOMENTS) and self.ahead().text == "(":
            return self._explicit()
        name = self.word("an expression")
        if name in self.scalars:
            return t.scalar(name, self.scalars[name].dtype)
        if name in self.extents:
            return t.extent(name)
        if name in self.axes:
            return t.index(name)
        self.fail(f"`{name}` is not declared", "E0603", token, help="declare it as scalar, extent or axis")

    def _explicit(self) -> Node:
        """`extent(n)`, `index(n)`, `old(r[m]: f32)`"""
        word = self.next().text
        self.next()
        name = self.word("a name")
        if word in MOMENTS:
            made = self._carried(name, MOMENTS[word])
        else:
            made = t.extent(name) if word == "extent" else t.index(name)
        self.expect(")", f"after `{word}({name}`")
        return made

    def _carried(self, name: str, moment: t.Moment) -> Node:
        axes = frozenset(self._bracket("the axes of a state"))
        self.expect(":", "before the type of a state")
        return t.carried(name, moment, axes, self.dtype())

    def _bracket(self, what: str) -> tuple[str, ...]:
        self.expect("[", f"before {what}")
        names = () if self.token.text == "]" else self.words("an axis")
        self.expect("]", f"after {what}")
        return names

    def opening(self) -> tuple[str, Callable[[tuple[Node, ...]], Node]] | None:
        token, after = self.token, self.ahead()
        if token.kind != "word" or token.text in ("extent", "index", *MOMENTS):
            return None
        if after.text == "[":
            return self._reduction() if self._is_reduction() else self._read()
        if after.text == "(":
            self.at += 2
            return ")", self._callee(token)
        return None

    def _is_reduction(self) -> bool:
        """Do parentheses follow the brackets of a reduction's name?"""
        if self.token.text not in REDUCTIONS:
            return False
        at, depth = self.at + 2, 1
        while depth and at < len(self.tokens) - 1:
            depth += (self.tokens[at].text == "[") - (self.tokens[at].text == "]")
            at += 1
        return self.tokens[at].text == "("

    def _reduction(self) -> tuple[str, Callable[[tuple[Node, ...]], Node]]:
        token = self.next()
        self.next()
        bound = self.words("an axis")
        if self.accept("|"):
            return "](", lambda x: t.reduce(token.text, bound, x[1], x[0], self.since(token))
        self.expect("]", "after the bound axes")
        self.expect("(", "before what is reduced")
        return ")", lambda x: t.reduce(
            token.text, bound, self._count(token, x, 1)[0], None, self.since(token)
        )

    def _read(self) -> tuple[str, Callable[[tuple[Node, ...]], Node]]:
        token = self.next()
        self.next()
        if token.text not in self.stored:
            self.fail(f"`{token.text}` is no tensor", "E0603", token, help="declare or define it above")
        return "]", lambda ix: t.read(token.text, ix, self.stored[token.text], self.since(token))

    def _callee(self, token: Token) -> Callable[[tuple[Node, ...]], Node]:
        name = token.text
        if name == "when":
            return lambda x: self._when(token, *self._count(token, x, 2))
        if name in NAMES:
            return lambda x: t.cast_to(self._count(token, x, 1)[0], NAMES[name], self.since(token))
        if name not in ARITY:
            known = ", ".join(sorted(ARITY))
            self.fail(f"`{name}` is no operation", "E0605", token, help=f"one of {known}, or an element type")
        return lambda x: self.operation(name, self._count(token, x, ARITY[name]), token)

    def _when(self, token: Token, value: Node, predicate: Node) -> Node:
        return t.when(value, predicate, self.since(token))

    def _count(self, token: Token, args: tuple[Node, ...], wanted: int) -> tuple[Node, ...]:
        if len(args) != wanted:
            plural = "" if wanted == 1 else "s"
            self.fail(f"`{token.text}` takes {wanted} argument{plural}, not {len(args)}", "E0605", token)
        return args

    # -- lines

    def graph(self) -> Graph:
        self.expect("kernel", "at the start")
        name = self.word("the kernel's name")
        self.expect("(", "after the kernel's name")
        order = () if self.token.text == ")" else self.words("a parameter")
        self.expect(")", "after the parameters")
        self.expect("{", "after the parameters")
        while not self.accept("}"):
            self._line()
        if self.token.kind != "end":
            self.fail(f"expected the end of the text, found {self.describe()}")
        return Graph(
            name,
            order,
            self.tensors,
            self.scalars,
            self.extents,
            self.axes,
            tuple(self.definitions),
            self.outputs,
            tuple(self.checks),
            self.example,
            declared=self.declared,
        )

    def _line(self) -> None:
        lines: dict[str, Callable[[], None]] = {
            "scalar": self._scalar,
            "extents": self._extents,
            "declared": self._declared,
            "axis": self._axis,
            "tensor": lambda: self._tensor(self.tensors),
            "output": lambda: self._tensor(self.outputs),
            "example": self._example,
            "check": self._check,
            "update": self._update,
        }
        token = self.token
        if token.kind == "shared":
            self._number()
        elif token.text in lines and self.ahead().kind == "word":
            self.next()
            lines[token.text]()
        else:
            self._definition(token)

    def _number(self) -> None:
        key = self.next().text
        self.expect("=", f"after `{key}`")
        self.numbers[key] = self.expression()

    def _scalar(self) -> None:
        name = self.word("a scalar's name")
        self.expect(":", "after the name")
        self.scalars[name] = ScalarParam(name, self.dtype())

    def _extents(self) -> None:
        self.extents += self.words("an extent")

    def _declared(self) -> None:
        self.declared += self.words("an extent that the call gives by name")

    def _axis(self) -> None:
        name = self.word("an axis")
        self.expect("in", "after the axis")
        self.axes[name] = self.expression()

    def _tensor(self, table: dict[str, Tensor]) -> None:
        name = self.word("a tensor's name")
        self.expect(":", "after the name")
        inout = self.accept("inout")
        dtype = self.dtype()
        self.expect("[", "before the shape")
        shape = () if self.token.text == "]" else self.expressions()
        self.expect("]", "after the shape")
        table[name] = Tensor(name, dtype, shape, inout)
        if table is self.tensors:
            self.stored[name] = dtype

    def _example(self) -> None:
        while True:
            name = self.word("an extent or scalar")
            self.expect("=", "after the name")
            token = self.token
            value = self.expression()
            if not isinstance(value, t.Const):
                self.fail("an example's value is a number", token=token)
            self.example[name] = value.value
            if not self.accept(","):
                return

    def _check(self) -> None:
        token = self.next()
        if token.text not in KINDS:
            self.fail(f"expected require, bounds or shape, found `{token.text}`", token=token)
        condition = self.expression()
        self.expect(":", "after the condition")
        message = self.string("the words of the refusal")
        self.checks.append(Check(condition, KINDS[token.text], message, self.since(token)))

    def _update(self) -> None:
        token = self.token
        name = self.word("a parameter")
        self.expect("[", "before the subscripts")
        target = () if self.token.text == "]" else self.expressions()
        self.expect("]", "after the subscripts")
        self.expect("over", "after the subscripts")
        axes = self._bracket("the axes of an update")
        self._value(token, name, axes, target)

    def _definition(self, token: Token) -> None:
        name = self.word("a definition")
        axes = self._bracket("the axes") if self.token.text == "[" else ()
        self._value(token, name, axes, None)

    def _value(self, token: Token, name: str, axes: tuple[str, ...], target: tuple[Node, ...] | None) -> None:
        self.expect(":", "before the element type")
        dtype = self.dtype()
        accumulate = self.accept("+=")
        if not accumulate:
            self.expect("=", "or `+=` after the element type")
        value = self.expression()
        if target is None:
            self.stored[name] = dtype
        made = Definition(name, axes, value, dtype, target, accumulate, self.since(token))
        self.definitions.append(made)
