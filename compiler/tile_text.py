"""Text form of the tile IR: `print_module` writes it, `parse_module` reads it; `parse_module(print_module(m)) == m`.

    module attention {
        scratch s: f32[B, M]
        tile attention_0(q: f16[B, M, D], o: out f16[B, M, D], scale: f32) {
            extents B, M, D
            static D = 64
            whole d = D
            for b in B, mt in M by 128 parallel {
                qt: f16[mt, d] = load q[b, mt, d]
                store o[b, mt, d] = f16(scale * qt)
            }
        }
    }

A bare name is a tile value, an axis's index, an extent or a scalar, whichever the program declares: they share one
namespace. Line breaks and indentation are free; `#` starts a comment. Brackets: may be left out; `…`: and so on.

    module     module NAME { scratch TENSOR … program … }
    program    tile NAME(TENSOR | NAME: DTYPE, …) { header statement … }
    TENSOR     NAME: [out | inout] DTYPE[EXPR, …]
    header     [extents NAME, …] [static NAME = INT, …] [whole NAME = EXPR, …] [tier NAME]
               role NAME = INT warpgroups, INT registers …   ring NAME = NAME, … by INT …   [attributes ATTRIBUTE …]
    statement  NAME: TYPE = EXPR ATTRIBUTE …
               store NAME[EXPR, …] = EXPR ATTRIBUTE …            (`+=` accumulates)
               for AXIS, … parallel ATTRIBUTE … { statement … }
               for AXIS [reverse] [where EXPR, …] [carry (NAME: TYPE = EXPR ATTRIBUTE …, …)] ATTRIBUTE …
                   { statement … [yield EXPR, …] }
    AXIS       NAME in EXPR [by INT] [from EXPR] [to EXPR]       (no `by`: a unit axis)
    TYPE       DTYPE[NAME, …]                                    (a scalar: DTYPE)
    ATTRIBUTE  @NAME(NAME = NAME | INT | true | false | "TEXT", …)
    EXPR       or, and, not, < <= == != > >=, + -, * / // %, unary - in the language's precedence; numbers, names,
               load NAME[EXPR, …], OPERATION(EXPR, …), DTYPE(EXPR), fill(EXPR), dot[NAME, …](EXPR, EXPR),
               REDUCTION[NAME, …](EXPR)

A float is f32 and an integer i64, unless a suffix says otherwise (`1.0f64`, `3i32`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ..dsl.source import Source, Span
from ..dsl.types import NAMES, DType
from .notation import (
    SIGNS,
    Piece,
    Reader,
    Token,
    call,
    infix,
    is_word,
    number,
    prefix,
    quote,
)
from .tensor_ir import ARITY, REDUCTIONS
from .tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Dot,
    Expr,
    ExtentRef,
    Fill,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    Reduce,
    Ring,
    Role,
    ScalarParam,
    ScalarRef,
    Stmt,
    Store,
    TileModule,
    TileProgram,
    TileType,
    WholeAxis,
    operands,
)

WIDTH = 110
"""Lists that make a line longer are written one item a line."""
STATEMENT_DEPTH = 64
"""Loops inside loops."""
TILE_ARITY = {**ARITY, "fma": 3}

# ---------------------------------------------------------------- printing


def print_module(m: TileModule) -> str:
    """The module as canonical text."""
    lines = [f"module {m.name} {{"]
    lines += [f"    scratch {_param(s)}" for s in m.scratch]
    for p in m.programs:
        lines += _indent(_program(p))
    return "\n".join([*lines, "}", ""])


def print_program(p: TileProgram) -> str:
    """One program as canonical text, as it stands inside a module."""
    return "\n".join([*_program(p), ""])


def print_expression(e: Expr) -> str:
    """One expression; iterative, so depth is no limit."""
    done: list[Piece] = []
    stack: list[tuple[Expr, bool]] = [(e, False)]
    while stack:
        top, ready = stack.pop()
        below = operands(top)
        if not ready:
            stack.append((top, True))
            stack.extend((x, False) for x in reversed(below))
            continue
        pieces = done[len(done) - len(below) :]
        del done[len(done) - len(below) :]
        done.append(_piece(top, pieces))
    return done[0].text


def print_statement(s: Stmt) -> str:
    """One statement, with those nested in it."""
    return "\n".join(_statement(s))


def print_head(s: Stmt) -> str:
    """The first line of a statement, for messages."""
    match s:
        case Grid():
            return _grid_head(s)
        case For():
            return _for_head(s)[0]
        case _:
            return _statement(s)[0]


def print_type(t: TileType) -> str:
    return f"{t.dtype}[{', '.join(t.axes)}]" if t.axes else t.dtype.value


def print_attribute(a: Attribute) -> str:
    fields = ", ".join(f"{key} = {_field(value)}" for key, value in a.fields)
    return f"@{a.name}({fields})" if fields else f"@{a.name}"


def _piece(e: Expr, below: list[Piece]) -> Piece:
    match e:
        case Const(value=value, dtype=dtype):
            return number(value, dtype)
        case Name(name=n) | ScalarRef(name=n) | ExtentRef(name=n) | AxisIndex(axis=n):
            return Piece(n)
        case Load(tensor=t):
            return Piece(f"load {t}[{', '.join(b.text for b in below)}]")
        case Apply(op=op) if op in SIGNS:
            return infix(op, below[0], below[1])
        case Apply(op="neg" | "not" as op, args=args):
            return prefix(op, below[0], isinstance(args[0], Const))
        case Apply(op=op):
            return call(op, below)
        case Cast(dtype=dtype):
            return call(dtype.value, below)
        case Dot(over=over):
            return call(f"dot[{', '.join(over)}]", below)
        case Reduce(fn=fn, over=over):
            return call(f"{fn}[{', '.join(over)}]", below)
        case Fill():
            return call("fill", below)


def _field(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return value if is_word(value) else quote(value)


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _listed(before: str, items: list[str], after: str) -> list[str]:
    """`before(a, b)after` on one line, or one item a line where that is too long."""
    line = f"{before}({', '.join(items)}){after}"
    if len(line) <= WIDTH or not items:
        return [line]
    return [f"{before}(", *_indent([f"{i}," for i in items[:-1]] + items[-1:]), f"){after}"]


def _param(p: Param) -> str:
    mode = "" if p.mode == "in" else f"{p.mode} "
    return f"{p.name}: {mode}{p.dtype}[{', '.join(map(print_expression, p.shape))}]"


def _program(p: TileProgram) -> list[str]:
    params = [*map(_param, p.params), *(f"{s.name}: {s.dtype}" for s in p.scalars)]
    lines = _listed(f"tile {p.name}", params, " {")
    return [*lines, *_indent([*_header(p), *_body(p.body)]), "}"]


def _header(p: TileProgram) -> Iterator[str]:
    if p.extents:
        yield f"extents {', '.join(p.extents)}"
    if p.statics:
        yield "static " + ", ".join(f"{n} = {v}" for n, v in p.statics)
    if p.whole:
        yield "whole " + ", ".join(f"{w.name} = {print_expression(w.extent)}" for w in p.whole)
    if p.tier != "loops":
        yield f"tier {p.tier}"
    for role in p.roles:
        yield f"role {role.name} = {role.warpgroups} warpgroups, {role.registers} registers"
    for ring in p.rings:
        yield f"ring {ring.name} = {', '.join(ring.loads)} by {ring.stages}"
    yield from _program_attributes(p.attributes)


def _program_attributes(attributes: tuple[Attribute, ...]) -> list[str]:
    items = [print_attribute(a) for a in attributes]
    line = " ".join(["attributes", *items])
    if not items or len(line) <= WIDTH:
        return [line] if items else []
    return ["attributes", *_indent(items)]


def _attributes(attributes: tuple[Attribute, ...]) -> str:
    return "".join(f" {print_attribute(a)}" for a in attributes)


def _body(body: tuple[Stmt, ...]) -> list[str]:
    return [line for s in body for line in _statement(s)]


def _statement(s: Stmt) -> list[str]:
    match s:
        case Let():
            return [
                f"{s.name}: {print_type(s.type)} = {print_expression(s.value)}{_attributes(s.attributes)}"
            ]
        case Store():
            ix = ", ".join(map(print_expression, s.subscripts))
            sign = "=" if s.mode == "set" else "+="
            value = print_expression(s.value)
            return [f"store {s.tensor}[{ix}] {sign} {value}{_attributes(s.attributes)}"]
        case Grid():
            return [_grid_head(s), *_indent(_body(s.body)), "}"]
        case For():
            return [*_for_head(s), *_indent([*_body(s.body), *_yields(s.yields)]), "}"]


def _grid_head(g: Grid) -> str:
    axes = ", ".join(map(_axis, g.axes))
    return f"for {axes}{' ' if axes else ''}parallel{_attributes(g.attributes)} {{"


def _axis(a: LoopAxis) -> str:
    text = f"{a.name} in {print_expression(a.extent)}"
    if a.tile is not None:
        text += f" by {a.tile}"
    if a.lo is not None:
        text += f" from {print_expression(a.lo)}"
    if a.hi is not None:
        text += f" to {print_expression(a.hi)}"
    return text


def _for_head(s: For) -> list[str]:
    head = f"for {_axis(s.axis)}{' reverse' if s.reverse else ''}"
    if s.domain:
        head += f" where {', '.join(map(print_expression, s.domain))}"
    after = f"{_attributes(s.attributes)} {{"
    if not s.carries:
        return [head + after]
    carries = [
        f"{c.name}: {print_type(c.type)} = {print_expression(c.init)}{_attributes(c.attributes)}"
        for c in s.carries
    ]
    return _listed(f"{head} carry ", carries, after)


def _yields(yields: tuple[Expr, ...]) -> list[str]:
    if not yields:
        return []
    items = [print_expression(y) for y in yields]
    line = f"yield {', '.join(items)}"
    if len(line) <= WIDTH:
        return [line]
    return ["yield", *_indent([f"{i}," for i in items[:-1]] + items[-1:])]


# ---------------------------------------------------------------- parsing


def parse_module(text: str, name: str = "<text>") -> TileModule:
    """Read a module. `name` is the path that diagnostics show. Raises `TileError` with codes E0601 to E0606."""
    return ModuleReader(Source(name, text)).module()


def parse_program(text: str, name: str = "<text>") -> TileProgram:
    """Read one program (`tile name(…) { … }`)."""
    reader = ModuleReader(Source(name, text))
    program = reader.program()
    reader.finish()
    return program


KINDS = {Name: "a tile value", AxisIndex: "an axis", ExtentRef: "an extent", ScalarRef: "a scalar"}
Mode = Literal["in", "out", "inout"]
Signature = tuple[str, Mode, DType, int]
Kind = type[Name] | type[AxisIndex] | type[ExtentRef] | type[ScalarRef]


class ModuleReader(Reader[Expr]):
    """Recursive descent over statements; expressions are read by `Reader`."""

    def __init__(self, source: Source, part: Span | None = None) -> None:
        super().__init__(source, part=part)
        self.kinds: dict[str, Kind] = {}
        self.depth = 0

    # -- names

    def declare(self, name: str, kind: Kind, token: Token) -> str:
        before = self.kinds.setdefault(name, kind)
        if before is not kind:
            self.fail(
                f"`{name}` is {KINDS[before]} of this program and cannot be {KINDS[kind]} too",
                "E0604",
                token,
                help="values, axes, extents and scalars share one namespace: choose another name",
            )
        return name

    # -- expressions

    def atom(self) -> Expr:
        token = self.token
        name = self.word("an expression")
        kind = self.kinds.get(name)
        if kind is None:
            self.fail(f"`{name}` is not declared", "E0603", token, help=self._nearest(name))
        return kind(name)

    def _nearest(self, name: str) -> str:
        close = [k for k in self.kinds if k.lower() == name.lower() or k.rstrip("0123456789") == name]
        if close:
            return f"did you mean `{close[0]}`?"
        return (
            "declare it before its use: a value above, an axis in `for` or `whole`, or an extent in `extents`"
        )

    def constant(self, value: int | float | bool, dtype: DType) -> Expr:
        return Const(value, dtype)

    def operation(self, op: str, operands: tuple[Expr, ...], token: Token) -> Expr:
        return Apply(op, operands)

    def opening(self) -> tuple[str, Callable[[tuple[Expr, ...]], Expr]] | None:
        token, after = self.token, self.ahead()
        if token.kind != "word":
            return None
        if token.text == "load" and after.kind == "word" and self.ahead(2).text == "[":
            self.at += 3
            return "]", lambda ix: Load(after.text, ix)
        if after.text == "[":
            return self._reduction()
        if after.text == "(":
            self.at += 2
            return ")", self._callee(token)
        return None

    def _callee(self, token: Token) -> Callable[[tuple[Expr, ...]], Expr]:
        name = token.text
        if name == "fill":
            return lambda args: Fill(*self._count(token, args, 1))
        if name in NAMES:
            return lambda args: Cast(NAMES[name], *self._count(token, args, 1))
        if name not in TILE_ARITY:
            known = ", ".join(sorted(TILE_ARITY))
            self.fail(f"`{name}` is no operation", "E0605", token, help=f"one of {known}, or an element type")
        return lambda args: Apply(name, self._count(token, args, TILE_ARITY[name]))

    def _count(self, token: Token, args: tuple[Expr, ...], wanted: int) -> tuple[Expr, ...]:
        if len(args) != wanted:
            plural = "" if wanted == 1 else "s"
            self.fail(f"`{token.text}` takes {wanted} argument{plural}, not {len(args)}", "E0605", token)
        return args

    def _reduction(self) -> tuple[str, Callable[[tuple[Expr, ...]], Expr]]:
        token = self.next()
        fn = token.text
        if fn != "dot" and fn not in REDUCTIONS:
            known = ", ".join(sorted(REDUCTIONS))
            self.fail(f"`{fn}` is no reduction", "E0605", token, help=f"dot, {known}, or `load {fn}[…]`")
        self.next()
        over = () if self.token.text == "]" else self.words("an axis")
        self.expect("]", f"after the axes of `{fn}`")
        self.expect("(", f"after `{fn}[{', '.join(over)}]`")
        if fn == "dot":
            return ")", lambda args: Dot(over, *self._count(token, args, 2))
        return ")", lambda args: Reduce(fn, over, *self._count(token, args, 1))

    # -- module and programs

    def finish(self) -> None:
        if self.token.kind != "end":
            self.fail(f"expected the end of the text, found {self.describe()}")

    def module(self) -> TileModule:
        self.expect("module", "at the start")
        name = self.word("the module's name")
        self.expect("{", "after the module's name")
        scratch = []
        while self.token.text == "scratch":
            self.next()
            scratch.append(self._signature())
        programs = []
        scalars: set[str] = set()
        while not self.accept("}"):
            programs.append(self.program())
            scalars.update(s.name for s in programs[-1].scalars)
        self.finish()
        self.kinds = dict.fromkeys(scalars, ScalarRef)
        shaped = tuple(self._shaped(s, free=True) for s in scratch)
        return TileModule(name, tuple(programs), shaped)

    def program(self) -> TileProgram:
        self.kinds = {}
        self.expect("tile", "to start a program")
        name = self.word("the program's name")
        tensors, scalars = self._parameters()
        self.expect("{", "after the parameters")
        for token, s in scalars:
            self.declare(s.name, ScalarRef, token)
        extents = self._extents()
        params = tuple(self._shaped(t) for t in tensors)
        statics = self._statics()
        whole = self._whole()
        tier = self.word("a tier") if self.accept("tier") else "loops"
        roles = self._roles()
        rings = self._rings()
        attributes = self._attributes() if self.accept("attributes") else ()
        body = self._body()
        self.expect("}", "after the program")
        return TileProgram(
            name,
            params,
            tuple(s for _, s in scalars),
            extents,
            statics,
            whole,
            body,
            tier,
            rings,
            roles,
            attributes,
        )

    def _signature(self) -> Signature:
        """A tensor up to its shape, which is read again by `_shaped` once extents and scalars are known."""
        name = self.word("a tensor's name")
        self.expect(":", "after the name")
        mode: Mode = "out" if self.accept("out") else "inout" if self.accept("inout") else "in"
        dtype = self.dtype()
        start = self.at
        self.expect("[", "before the shape")
        self._skip_shape()
        return name, mode, dtype, start

    def _skip_shape(self) -> None:
        open_ = ["]"]
        while open_:
            if self.token.text in ("[", "("):
                open_.append("]" if self.token.text == "[" else ")")
            elif self.token.kind == "end" or self.token.text in ("]", ")"):
                self.expect(open_.pop(), "to close the shape")
                continue
            self.next()

    def _shaped(self, signature: Signature, free: bool = False) -> Param:
        name, mode, dtype, start = signature
        back, self.at = self.at, start + 1
        if free:
            for word in self._words_until("]"):
                self.kinds.setdefault(word, ExtentRef)
        shape = () if self.token.text == "]" else self.expressions()
        self.expect("]", "after the shape")
        self.at = back
        return Param(name, dtype, shape, mode)

    def _words_until(self, close: str) -> Iterator[str]:
        """The names up to a sign, operations left out."""
        for i in range(self.at, len(self.tokens) - 1):
            if self.tokens[i].text == close:
                return
            if self.tokens[i].kind == "word" and self.tokens[i + 1].text != "(":
                yield self.tokens[i].text

    def _parameters(self) -> tuple[list[Signature], list[tuple[Token, ScalarParam]]]:
        tensors: list[Signature] = []
        scalars: list[tuple[Token, ScalarParam]] = []
        self.expect("(", "before the parameters")
        if self.accept(")"):
            return tensors, scalars
        while True:
            token = self.token
            if self.ahead(3).text == "[" or self.ahead(2).text in ("out", "inout"):
                tensors.append(self._signature())
            else:
                name = self.word("a parameter's name")
                self.expect(":", "after the name")
                scalars.append((token, ScalarParam(name, self.dtype())))
            if not self.accept(","):
                self.expect(")", "after the parameters")
                return tensors, scalars

    def _heads(self, word: str, after: str) -> bool:
        """Does a header line `word …` start here, and not a statement about a value of that name?"""
        return self.token.text == word and self.ahead().text != ":" and self.ahead(2).text == after

    def _extents(self) -> tuple[str, ...]:
        found: list[str] = []
        if self.token.text == "extents" and self.ahead().kind == "word":
            self.next()
            while True:
                token = self.token
                found.append(self.declare(self.word("an extent"), ExtentRef, token))
                if not self.accept(","):
                    break
        return tuple(found)

    def _statics(self) -> tuple[tuple[str, int], ...]:
        found: list[tuple[str, int]] = []
        if self._heads("static", "="):
            self.next()
            while True:
                name = self.word("an extent")
                self.expect("=", "after the extent")
                found.append((name, self.integer("a size")))
                if not self.accept(","):
                    break
        return tuple(found)

    def _whole(self) -> tuple[WholeAxis, ...]:
        found: list[WholeAxis] = []
        if self._heads("whole", "="):
            self.next()
            while True:
                token = self.token
                name = self.declare(self.word("an axis"), AxisIndex, token)
                self.expect("=", "after the axis")
                found.append(WholeAxis(name, self.expression()))
                if not self.accept(","):
                    break
        return tuple(found)

    def _roles(self) -> tuple[Role, ...]:
        found: list[Role] = []
        while self._heads("role", "="):
            self.next()
            name = self.word("a role's name")
            self.expect("=", "after the role's name")
            warpgroups = self.integer("a number of warpgroups")
            self.expect("warpgroups", "after their number")
            self.expect(",", "between warpgroups and registers")
            registers = self.integer("a number of registers")
            self.expect("registers", "after their number")
            found.append(Role(name, warpgroups, registers))
        return tuple(found)

    def _rings(self) -> tuple[Ring, ...]:
        found: list[Ring] = []
        while self._heads("ring", "="):
            self.next()
            name = self.word("a ring's name")
            self.expect("=", "after the ring's name")
            loads = self.words("a load's name")
            self.expect("by", "before the number of stages")
            found.append(Ring(name, loads, self.integer("a number of stages")))
        return tuple(found)

    def _attributes(self) -> tuple[Attribute, ...]:
        found: list[Attribute] = []
        while self.accept("@"):
            name = self.word("an attribute's name")
            found.append(Attribute(name, self._fields() if self.token.text == "(" else ()))
        return tuple(found)

    def _fields(self) -> tuple[tuple[str, str | int | bool], ...]:
        self.next()
        fields: list[tuple[str, str | int | bool]] = []
        while not self.accept(")"):
            if fields:
                self.expect(",", "between an attribute's fields")
            key = self.word("a field's name")
            self.expect("=", "after the field's name")
            fields.append((key, self._field()))
        return tuple(fields)

    def _field(self) -> str | int | bool:
        token = self.token
        if token.text in ("true", "false"):
            return self.next().text == "true"
        if token.kind == "string":
            return self.string("a value")
        if token.kind == "word":
            return self.word("a value")
        sign = -1 if self.accept("-") else 1
        return sign * self.integer("a field's value: a name, an integer, true, false or a string")

    # -- statements

    def _body(self) -> tuple[Stmt, ...]:
        found: list[Stmt] = []
        while self.token.kind == "word" and (self.token.text != "yield" or self.ahead().text == ":"):
            found.append(self._statement())
        return tuple(found)

    def _statement(self) -> Stmt:
        token = self.token
        if self.ahead().text == ":":
            return self._let(token)
        if token.text == "store":
            return self._store(token)
        if token.text == "for":
            return self._loop(token)
        self.fail(f"expected a statement, found {self.describe()}", help="`name: type = …`, `store` or `for`")

    def _type(self) -> TileType:
        dtype = self.dtype()
        if not self.accept("["):
            return TileType(dtype)
        axes = () if self.token.text == "]" else self.words("an axis")
        self.expect("]", "after a tile's axes")
        return TileType(dtype, axes)

    def _let(self, token: Token) -> Let:
        name, type_, value, attributes = self._bound()
        self.declare(name, Name, token)
        return Let(name, type_, value, attributes, self.since(token))

    def _bound(self) -> tuple[str, TileType, Expr, tuple[Attribute, ...]]:
        name = self.word("a name")
        self.expect(":", "after the name")
        type_ = self._type()
        self.expect("=", "after the type")
        value = self.value()
        return name, type_, value, self._attributes()

    def value(self) -> Expr:
        """An expression that a statement evaluates."""
        return self.expression()

    def values(self) -> tuple[Expr, ...]:
        found = [self.value()]
        while self.accept(","):
            found.append(self.value())
        return tuple(found)

    def bound(self) -> Expr:
        """An expression that says where a loop runs."""
        return self.expression()

    def _store(self, token: Token) -> Store:
        self.next()
        tensor = self.word("a tensor's name")
        self.expect("[", "before the subscripts")
        subscripts = () if self.token.text == "]" else self.values()
        self.expect("]", "after the subscripts")
        if self.accept("+="):
            value = self.value()
            return Store(tensor, subscripts, value, "add", self._attributes(), self.since(token))
        self.expect("=", "or `+=` after the subscripts")
        value = self.value()
        return Store(tensor, subscripts, value, "set", self._attributes(), self.since(token))

    def _loop(self, token: Token) -> Grid | For:
        self.depth += 1
        if self.depth > STATEMENT_DEPTH:
            self.fail(f"loops nest more than {STATEMENT_DEPTH} deep", "E0602", token)
        self.next()
        empty = self.token.text == "parallel" and self.ahead().text != "in"
        axes = () if empty else self._axes()
        made = self._grid(axes) if self.accept("parallel") else self._for(axes, token)
        self.depth -= 1
        return made

    def _axes(self) -> tuple[LoopAxis, ...]:
        found = [self._axis()]
        while self.accept(","):
            found.append(self._axis())
        return tuple(found)

    def _axis(self) -> LoopAxis:
        token = self.token
        name = self.word("an axis")
        self.expect("in", "after the axis")
        extent = self.bound()
        tile = self.integer("a tile size") if self.accept("by") else None
        lo = self.bound() if self.accept("from") else None
        hi = self.bound() if self.accept("to") else None
        self.declare(name, AxisIndex, token)
        return LoopAxis(name, extent, tile, lo, hi)

    def _grid(self, axes: tuple[LoopAxis, ...]) -> Grid:
        attributes = self._attributes()
        self.expect("{", "before the grid's body")
        body = self._body()
        self.expect("}", "after the grid's body")
        return Grid(axes, body, attributes)

    def _for(self, axes: tuple[LoopAxis, ...], token: Token) -> For:
        if len(axes) != 1:
            self.fail(
                "a serial loop has one axis", token=token, help="write `parallel` for a grid, or nest loops"
            )
        reverse = self.accept("reverse")
        domain = self.values() if self.accept("where") else ()
        carries = self._carries() if self.accept("carry") else ()
        attributes = self._attributes()
        self.expect("{", "before the loop's body")
        body = self._body()
        yields = self._yields() if self.accept("yield") else ()
        if len(yields) != len(carries):
            self.fail(f"the loop carries {len(carries)} values and yields {len(yields)}", "E0606", token)
        self.expect("}", "after the loop's body")
        return For(axes[0], carries, body, yields, domain, reverse, attributes, self.since(token))

    def _yields(self) -> tuple[Expr, ...]:
        return self.values()

    def _carries(self) -> tuple[Carry, ...]:
        self.expect("(", "before the carried values")
        found: list[Carry] = []
        while not found or self.accept(","):
            token = self.token
            name, type_, init, attributes = self._bound()
            self.declare(name, Name, token)
            found.append(Carry(name, type_, init, attributes))
        self.expect(")", "after the carried values")
        return tuple(found)
