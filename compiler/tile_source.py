"""Tile programs as source: `tile` and `module` items, in the free form that people write or as printed (DESIGN 2.2).

    tile softmax(x: f32[M, N], y: out f32[M, N]) {
        example M = 100, N = 1000
        for mt in M by 4 parallel {
            for nt in N by 256 carry (r = fill(-inf, [mt]), z = fill(0, [mt])) {
                x1 = load x[mt, nt]
                r1 = max(r, max[nt](x1))
                yield (r1, z * exp(r - r1) + sum[nt](exp(x1 - r1)))
            }
            for nt in N by 256 {
                store y[mt, nt] = exp(load x[mt, nt] - r) / z
            }
        }
    }

Beyond the canonical text (`tile_text`): types of values and of carried names are inferred, and a literal takes the type of
what it meets; `d = :` in a subscript takes a whole axis, and `fill(0, [mt, e = E])` a tile's axes; extents come from the
shapes, `<D: static>` marks those whose value is compiled in, `<C: extent>` those that the call gives by name; `example` and
`require` stand as in kernels. What is read is typed and checked, and every error stands at its place in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace

from ..dsl.records import dataclass
from ..dsl.source import Source, Span
from ..dsl.types import NAMES, DType, compute, promote
from .notation import Token
from .tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Const,
    Expr,
    ExtentRef,
    Fill,
    For,
    Grid,
    Let,
    LoopAxis,
    Name,
    Param,
    ScalarParam,
    ScalarRef,
    Store,
    TileModule,
    TileProgram,
    TileType,
    WholeAxis,
    operands,
    rebuild,
    subexpressions,
)
from .tile_text import ModuleReader, Signature, print_type
from .tile_types import Mistyped, Names, disagreement, fits, node_type, postorder, store_problem

PLACEHOLDER = 16
"""Stands for a static extent until a call gives it."""
MAX_INFERENCES = 10_000
"""Loops read again because a carried literal turned out to be of another type."""


@dataclass(frozen=True)
class Requirement:
    """One condition of `require`, with its text."""

    condition: Expr
    span: Span


@dataclass(frozen=True)
class TileText:
    """What an item says. `static` extents stand in the module with a placeholder; `order` has all parameters as written."""

    module: TileModule
    span: Span
    order: tuple[str, ...]
    static: tuple[str, ...]
    declared: tuple[str, ...]
    example: tuple[tuple[str, int | float], ...]
    requirements: tuple[Requirement, ...]

    def at(self, sizes: Mapping[str, int]) -> TileModule:
        """The module for these values of the static extents."""
        return replace(self.module, programs=tuple(self._program(p, sizes) for p in self.module.programs))

    def _program(self, p: TileProgram, sizes: Mapping[str, int]) -> TileProgram:
        return replace(p, statics=tuple((n, sizes[n] if n in self.static else v) for n, v in p.statics))


def read_tiles(span: Span) -> TileText:
    """Read a `tile` or `module` item. Raises `TileError` with codes E0601 to E0617, pointing into the item's text."""
    return _SourceReader(span.source, span).item()


@dataclass
class _Scope:
    """Values with their types and axes (True: spans tiles) that are visible."""

    values: dict[str, TileType] = field(default_factory=dict)
    axes: dict[str, bool] = field(default_factory=dict)

    def copy(self) -> _Scope:
        return _Scope(dict(self.values), dict(self.axes))


@dataclass(frozen=True)
class _Carried:
    """A carried name. `origin`: it starts from the carried literal there, whose type the next values decide."""

    carry: Carry
    origin: int | None


class _Again(Exception):
    """The carried literal at `start` has another type than was assumed: its loop is read once more."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class _SourceReader(ModuleReader):
    """Reads and types in one pass. Nodes are known by identity, so that each keeps its place in the text."""

    def __init__(self, source: Source, part: Span) -> None:
        super().__init__(source, part)
        self.part = part
        self.places: dict[int, Token] = {}
        self.types: dict[int, TileType] = {}
        self.literals: set[int] = set()
        self.filled: dict[int, tuple[str, ...]] = {}
        self.kept: list[Expr] = []
        self.lists: dict[int, tuple[str, ...]] = {}
        self.assumed: dict[int, DType] = {}
        self.inferences = 0
        self.scopes = [_Scope()]
        self.params: dict[str, Param] = {}
        self.whole: dict[str, WholeAxis] = {}
        self.fixed: dict[str, int] = {}
        self.order: dict[str, None] = {}
        self.static: dict[str, None] = {}
        self.declared: dict[str, None] = {}
        self.example: dict[str, int | float] = {}
        self.requirements: list[Requirement] = []
        self.loose = False
        self.scalar_types: dict[str, DType] = {}
        self.carried: list[list[_Carried]] = []
        self.origins: dict[str, int | None] = {}

    # ------------------------------------------------------------ the item

    def item(self) -> TileText:
        if self.token.text == "module":
            self.at = min(3, len(self.tokens) - 1)  # module NAME {
            self.facts()
            del self.tokens[3 : self.at]
            self.at = 0
            module = self.module()
        else:
            program = self.program()
            self.finish()
            module = TileModule(program.name, (program,))
        return TileText(
            module, self.part, tuple(self.order), tuple(self.static), tuple(self.declared),
            tuple(self.example.items()), tuple(self.requirements),
        )  # fmt: skip

    def facts(self) -> None:
        """`example` and `require` lines after an opening brace."""
        while True:
            if self.token.text == "example" and self.ahead(2).text == "=":
                self.next()
                self._settings()
            elif self.token.text == "require" and self.ahead().text not in (":", "="):
                self.next()
                self._requirements()
            else:
                return

    def _settings(self) -> None:
        while True:
            name = self.word("an extent or a scalar")
            self.expect("=", "after the name")
            token = self.token
            value = self._atom()
            if not isinstance(value, Const) or isinstance(value.value, bool):
                self.fail("an example's value is a number", token=token)
            self.example[name] = value.value
            if not self.accept(","):
                return

    def _requirements(self) -> None:
        self.loose = True
        while True:
            token = self.token
            condition = self.expression()
            self.requirements.append(Requirement(condition, self.since(token)))
            if not self.accept(","):
                self.loose = False
                return

    def program(self) -> TileProgram:
        self.kinds, self.scopes, self.params, self.whole, self.fixed = {}, [_Scope()], {}, {}, {}
        self.expect("tile", "to start a program")
        name = self.word("the program's name")
        static, declared = self._type_parameters()
        tensors, scalars = self._parameters()
        for t in (*(t[0] for t in tensors), *(s.name for _, s in scalars)):
            self.order.setdefault(t)
        self.expect("{", "after the parameters")
        self.facts()
        for token, s in scalars:
            self.declare(s.name, ScalarRef, token)
        listed = self._extents()
        params = tuple(self._shaped(t, free=not listed) for t in tensors)
        for token in (*static, *declared):
            self.declare(token.text, ExtentRef, token)
        extents = tuple(n for n, kind in self.kinds.items() if kind is ExtentRef)
        self.params = {p.name: p for p in params}
        self.scalar_types = {s.name: s.dtype for _, s in scalars}
        self.fixed = {t.text: int(self.example.get(t.text, PLACEHOLDER)) for t in static}
        self.static.update(dict.fromkeys(self.fixed))
        self.declared.update(dict.fromkeys(t.text for t in declared))
        stated = self._statics()
        self.fixed |= dict(stated)
        self.whole = {w.name: w for w in self._whole()}
        made = self._rest(name, params, tuple(s for _, s in scalars), extents)
        return replace(made, statics=tuple(self.fixed.items()), whole=tuple(self.whole.values()))

    def _shaped(self, signature: Signature, free: bool = False) -> Param:
        """A shape knows extents and scalars only."""
        scopes, whole, self.scopes, self.whole = self.scopes, self.whole, [_Scope()], {}
        made = super()._shaped(signature, free)
        self.scopes, self.whole = scopes, whole
        return made

    def _rest(
        self, name: str, params: tuple[Param, ...], scalars: tuple[ScalarParam, ...], extents: tuple[str, ...]
    ) -> TileProgram:
        tier = self.word("a tier") if self.accept("tier") else "loops"
        roles, rings = self._roles(), self._rings()
        attributes = self._attributes() if self.accept("attributes") else ()
        body = self._body()
        self.expect("}", "after the program")
        return TileProgram(name, params, scalars, extents, (), (), body, tier, rings, roles, attributes)

    def _type_parameters(self) -> tuple[list[Token], list[Token]]:
        """`<D: static, C: extent>`"""
        found: dict[str, list[Token]] = {"static": [], "extent": []}
        if self.accept("<"):
            while True:
                token = self.token
                self.word("an extent")
                self.expect(":", "after the extent")
                kind = self.token
                if self.word("`static` or `extent`") not in found:
                    help = "`D: static` is compiled in, `C: extent` is given at the call"
                    self.fail(f"an extent cannot be `{kind.text}`", "E0612", kind, help=help)
                found[kind.text].append(token)
                if not self.accept(","):
                    break
            self.expect(">", "after the extents")
        return found["static"], found["extent"]

    # ------------------------------------------------------------ places and names

    def mark(self, e: Expr, token: Token) -> Expr:
        self.kept.append(e)
        self.places[id(e)] = token
        return e

    def atom(self) -> Expr:
        token = self.token
        if self.loose:
            return self.mark(ScalarRef(self.word("an expression")), token)
        name = self.word("an expression")
        visible = self.names()
        if name in visible.values:
            return self.mark(Name(name), token)
        if name in visible.axes:
            return self.mark(AxisIndex(name), token)
        if self.kinds.get(name) in (ExtentRef, ScalarRef):
            return self.mark(ExtentRef(name) if self.kinds[name] is ExtentRef else ScalarRef(name), token)
        self.fail(f"`{name}` means nothing here", "E0603", token, help=self._suggestion(name))

    def _suggestion(self, name: str) -> str:
        if name in self.params:
            return f"`{name}` is a tensor in memory: read a tile of it with `load {name}[…]`"
        if name in self.kinds:
            what = "an axis" if self.kinds[name] is AxisIndex else "a value"
            return f"`{name}` is {what} of another loop; only names above and around are visible"
        return self._nearest(name)

    def constant(self, value: int | float | bool, dtype: DType) -> Expr:
        token = self.tokens[self.at - 1]
        made = self.mark(Const(value, dtype), token)
        if not token.text.endswith(tuple(NAMES)):
            self.literals.add(id(made))
        return made

    def operation(self, op: str, operands: tuple[Expr, ...], token: Token) -> Expr:
        return self.mark(Apply(op, operands), token)

    def opening(self) -> tuple[str, Callable[[tuple[Expr, ...]], Expr]] | None:
        token, after = self.token, self.ahead()
        if token.text == "load" and after.kind == "word" and self.ahead(2).text == "[":
            if after.text not in self.params:
                known = ", ".join(self.params) or "none"
                self.fail(
                    f"`{after.text}` is no tensor of the program", "E0603", after, help=f"it has {known}"
                )
            self._take_whole_axes(self.at + 1)
        elif token.kind == "word" and token.text == "fill" and after.text == "(":
            self._take_fill_axes()
        elif token.text in self.params and after.text == "[":
            help = f"read a tile of it with `load {token.text}[…]`"
            self.fail(f"`{token.text}` is a tensor in memory", "E0605", token, help=help)
        elif after.text == "[" and token.text in NAMES:
            self.fail(f"`{token.text}[…]` is a type, not a value", "E0605", token)
        found = super().opening()
        if found is None:
            return None
        close, build = found
        axes = self.lists.get(token.start)

        def made(arguments: tuple[Expr, ...]) -> Expr:
            e = self.mark(build(arguments), token)
            if axes is not None:
                self.filled[id(e)] = axes
            return e

        return close, made

    def names(self, scope: _Scope | None = None) -> Names:
        scope = scope or self.scopes[-1]
        axes = {**dict.fromkeys(self.whole, True), **scope.axes}
        extents = [n for n, kind in self.kinds.items() if kind is ExtentRef]
        return Names(self.params, self.scalar_types, extents, scope.values, axes)

    # ------------------------------------------------------------ whole axes

    def _take_whole_axes(self, at: int) -> None:
        """Declare the axes of `d = :` in the subscripts of the tensor named at token `at`, and leave their names there."""
        p = self.params.get(self.tokens[at].text)
        depth, position, i = 0, 0, at + 1
        while i < len(self.tokens) and self.tokens[i].kind != "end":
            token = self.tokens[i]
            depth += (token.text in ("[", "(")) - (token.text in ("]", ")"))
            if depth == 0:
                return
            position += depth == 1 and token.text == ","
            if depth == 1 and token.text == ":":
                self._take_whole_axis(i, p, position)
                i -= 2
            i += 1

    def _take_whole_axis(self, colon: int, p: Param | None, position: int) -> None:
        sign, name = self.tokens[colon - 1], self.tokens[colon - 2]
        if sign.text != "=" or name.kind != "word":
            self.fail(
                "`:` takes a whole axis, which needs a name", "E0612", self.tokens[colon], help="`d = :`"
            )
        if p is not None and position < len(p.shape):
            self._declare_whole(name, p.shape[position])
        del self.tokens[colon - 1 : colon + 1]

    def _declare_whole(self, token: Token, extent: Expr) -> None:
        name = token.text
        used = [x.name for x in subexpressions(extent) if isinstance(x, ExtentRef | ScalarRef)]
        loose = [n for n in used if n not in self.fixed]
        if loose:
            self.fail(
                f"`{name}` takes all of `{loose[0]}` at once, which is not known when the code is made", "E0612", token,
                help=f"mark it, `tile …<{loose[0]}: static>(…)`, or cut the axis into tiles with `for … by`",
            )  # fmt: skip
        before = self.whole.get(name)
        if before is not None and before.extent != extent:
            self.fail(
                f"`{name}` is a whole axis of another extent", "E0612", token, help="choose another name"
            )
        self.declare(name, AxisIndex, token)
        self.whole[name] = WholeAxis(name, extent)

    def _take_fill_axes(self) -> None:
        """Read the axes of `fill(0, [mt, e = E])` and leave `fill(0)`."""
        start, depth, comma = self.at, 0, None
        for i in range(self.at + 1, len(self.tokens) - 1):
            text = self.tokens[i].text
            depth += (text in ("[", "(")) - (text in ("]", ")"))
            if depth == 0:
                return
            if depth == 1 and text == "," and self.tokens[i + 1].text == "[":
                comma = i
                break
        if comma is None:
            return
        self.at = comma + 2
        axes: list[str] = []
        while not self.accept("]"):
            if axes:
                self.expect(",", "between the axes of a fill")
            axes.append(self._fill_axis())
        self.lists[self.tokens[start].start] = tuple(axes)
        del self.tokens[comma : self.at]
        self.at = start

    def _fill_axis(self) -> str:
        token = self.token
        name = self.word("an axis")
        if self.accept("="):
            self._declare_whole(token, self.expression())
        spans = self.names().axes.get(name)
        if not spans:
            what = "one index at a time, not an axis of tiles" if spans is False else "no axis here"
            self.fail(f"`{name}` is {what}", "E0603", token, help="a whole axis is written `e = E`")
        return name

    # ------------------------------------------------------------ types

    def value(self) -> Expr:
        return self._resolve(self.expression(), self.scopes[-1])

    def bound(self) -> Expr:
        return self._resolve(self.expression(), self.scopes[-1], bound=True)

    def _resolve(self, root: Expr, scope: _Scope, bound: bool = False) -> Expr:
        """The expression with literals adapted to what they meet, typed throughout."""
        names = self.names(scope)
        done: list[Expr] = []
        for x, over in postorder(root):
            n = len(operands(x))
            args = self._adapted(x, done[len(done) - n :])
            del done[len(done) - n :]
            made = self.mark(rebuild(x, tuple(args)), self.places[id(x)])
            if id(x) in self.literals:
                self.literals.add(id(made))
            if id(x) in self.filled:
                if x is not root:
                    self.fail("a fill with axes needs a name of its own", "E0611", self.places[id(x)])
                self.filled[id(made)] = self.filled[id(x)]
            try:
                self.types[id(made)] = node_type(
                    made, [self.types[id(a)] for a in args], names, over if bound else None
                )
            except Mistyped as reason:
                self.fail(str(reason), "E0611", self.places[id(x)])
            done.append(made)
        return done[0]

    def _adapted(self, user: Expr, args: list[Expr]) -> list[Expr]:
        """Literals among the operands of arithmetic take the type of the others."""
        types = [self.types[id(a)].dtype for a in args if id(a) not in self.literals]
        numbers = [compute(t) for t in types if t is not DType.BOOL]
        if not isinstance(user, Apply) or not numbers:
            return args
        wide = numbers[0]
        for t in numbers[1:]:
            wide = promote(wide, t)
        return [self._literal(a, wide) if id(a) in self.literals else a for a in args]

    def _literal(self, e: Expr, dtype: DType) -> Expr:
        """A literal in another type; one that does not fit stays."""
        assert isinstance(e, Const)
        if isinstance(e.value, bool) or (isinstance(e.value, float) and not dtype.is_float):
            return e
        value = float(e.value) if dtype.is_float else e.value
        if not fits(value, dtype) or dtype is DType.BOOL:
            return e
        made = self.mark(Const(value, dtype), self.places[id(e)])
        self.types[id(made)] = TileType(dtype)
        return made

    def _as(self, e: Expr, dtype: DType) -> Expr:
        """A literal, or a fill with one, in another type; anything else as it is."""
        if id(e) in self.literals and dtype is not DType.BOOL:
            return self._literal(e, dtype)
        if isinstance(e, Fill) and id(e.value) in self.literals:
            value = self._literal(e.value, dtype)
            made = self.mark(Fill(value), self.places[id(e)])
            self.types[id(made)] = TileType(value.dtype) if isinstance(value, Const) else self.types[id(e)]
            if id(e) in self.filled:
                self.filled[id(made)] = self.filled[id(e)]
            return made
        return e

    def _is_literal(self, e: Expr) -> bool:
        return id(e) in self.literals or (isinstance(e, Fill) and id(e.value) in self.literals)

    # ------------------------------------------------------------ statements

    def _statement(self) -> Let | Store | Grid | For:
        token, after = self.token, self.ahead()
        if after.text == "=" and token.kind == "word":
            return self._let(token)
        if token.text in self.params and after.text == "[":
            help = f"write it with `store {token.text}[…] = …`"
            self.fail(f"`{token.text}` is a tensor in memory", "E0605", token, help=help)
        return super()._statement()

    def _bound(self) -> tuple[str, TileType, Expr, tuple[Attribute, ...]]:
        name, declared, value = self._binding()
        return (
            name,
            self._declared(name, declared, value),
            self._as_declared(value, declared),
            self._attributes(),
        )

    def _binding(self) -> tuple[str, TileType | None, Expr]:
        name = self.word("a name")
        declared = self._type() if self.accept(":") else None
        self.expect("=", "after the name" if declared is None else "after the type")
        return name, declared, self.value()

    def _as_declared(self, value: Expr, declared: TileType | None) -> Expr:
        return value if declared is None else self._as(value, declared.dtype)

    def _declared(self, name: str, declared: TileType | None, value: Expr) -> TileType:
        found = self.types[id(value)]
        axes = self.filled.get(id(value))
        if declared is None:
            return found if axes is None else TileType(found.dtype, axes)
        value = self._as(value, declared.dtype)
        problem = disagreement(f"`{name}`", value, self.types[id(value)], declared)
        if axes is not None and set(axes) != set(declared.axes):
            problem = f"`{name}` is declared {print_type(declared)}, filled over [{', '.join(axes)}]"
        if problem:
            self.fail(problem, "E0611", self.places[id(value)])
        return declared

    def _let(self, token: Token) -> Let:
        made = super()._let(token)
        self.scopes[-1].values[made.name] = made.type
        return made

    def _store(self, token: Token) -> Store:
        if self.ahead().kind == "word" and self.ahead(2).text == "[":
            self._take_whole_axes(self.at + 1)
        target = self.ahead()
        made = super()._store(token)
        p = self.params.get(made.tensor)
        if p is None:
            known = ", ".join(n for n, x in self.params.items() if x.mode != "in") or "none"
            self.fail(f"`{made.tensor}` is no tensor", "E0603", target, help=f"written can be: {known}")
        if p.mode == "in":
            help = f"declare it `{p.name}: out {p.dtype}[…]`, or inout to read it too"
            self.fail(f"`{p.name}` is an input", "E0613", target, help=help)
        value = self._as(made.value, p.dtype)
        axes = tuple(a for x in made.subscripts for a in self.types[id(x)].axes)
        problem = store_problem(p, axes, self.types[id(value)])
        if problem:
            self.fail(problem, "E0611", self.places[id(value)])
        return replace(made, value=value)

    def _axis(self) -> LoopAxis:
        made = super()._axis()
        self.scopes[-1].axes[made.name] = made.tile is not None
        return made

    def _loop(self, token: Token) -> Grid | For:
        self.scopes.append(self.scopes[-1].copy())
        made = super()._loop(token)
        self.scopes.pop()
        if isinstance(made, For):
            self.scopes[-1].values.update({c.name: c.type for c in made.carries})
        return made

    def _for(self, axes: tuple[LoopAxis, ...], token: Token) -> For:
        """Read until the types assumed of carried literals hold; each try assumes wider ones."""
        start, scope, depth = self.at, self.scopes[-1].copy(), len(self.scopes)
        while True:
            self.carried.append([])
            try:
                return super()._for(axes, token)
            except _Again as again:
                if again.start < token.start:  # of an outer loop
                    raise
                self.inferences += 1
                if self.inferences > MAX_INFERENCES:
                    self.fail("too many carried values without a type", "E0602", token)
                self.at = start
                del self.scopes[depth:]
                self.scopes[-1] = scope.copy()
            finally:
                self.carried.pop()

    def _carries(self) -> tuple[Carry, ...]:
        """Initial values stand outside the loop: they do not know its axis."""
        inner = self.scopes[-1]
        self.scopes[-1] = self.scopes[-2]
        self.expect("(", "before the carried values")
        found = self.carried[-1]
        while not found or self.accept(","):
            found.append(self._carry())
        self.expect(")", "after the carried values")
        self.scopes[-1] = inner
        inner.values.update({c.carry.name: c.carry.type for c in found})
        return tuple(c.carry for c in found)

    def _carry(self) -> _Carried:
        token = self.token
        name, declared, value = self._binding()
        origin = self._origin(token, value) if declared is None else None
        if origin == token.start and origin in self.assumed:
            value = self._as(value, self.assumed[origin])
        type_ = self._declared(name, declared, value)
        self.declare(name, Name, token)
        made = Carry(name, type_, self._as_declared(value, declared), self._attributes())
        self.origins[name] = origin
        return _Carried(made, origin)

    def _origin(self, token: Token, value: Expr) -> int | None:
        """Where the literal stands that a carried name starts from, itself or through the name of an outer loop."""
        if self._is_literal(value):
            return token.start
        return self.origins.get(value.name) if isinstance(value, Name) else None

    def _yields(self) -> tuple[Expr, ...]:
        """`yield a, b` or `yield (a, b)`."""
        several = self._is_list()
        if several:
            self.next()
        found = self.values()
        if several:
            self.expect(")", "after the yielded values")
        return tuple(self._yielded(c, y) for c, y in zip(self.carried[-1], found, strict=False)) + tuple(
            found[len(self.carried[-1]) :]
        )

    def _is_list(self) -> bool:
        """Does a parenthesis that holds a comma of its own stand here, and the loop's end after it?"""
        depth, comma = 0, False
        for i in range(self.at, len(self.tokens)):
            text = self.tokens[i].text
            depth += (text in ("[", "(")) - (text in ("]", ")"))
            comma |= depth == 1 and text == ","
            if depth == 0:
                return comma and self.tokens[min(i + 1, len(self.tokens) - 1)].text == "}"
        return False

    def _yielded(self, c: _Carried, y: Expr) -> Expr:
        y = self._as(y, c.carry.type.dtype)
        found, wanted = self.types[id(y)], c.carry.type
        if found.dtype is not wanted.dtype:
            self._assume(c, found.dtype)
            self.fail(
                f"`{c.carry.name}` is carried as {wanted.dtype}, but its next value is {found.dtype}", "E0614",
                self.places[id(y)], help=f"convert it, `{wanted.dtype}(…)`, or start from another type",
            )  # fmt: skip
        if set(found.axes) != set(wanted.axes):
            self.fail(
                f"`{c.carry.name}` is carried as {print_type(wanted)}, but its next value is {print_type(found)}",
                "E0614", self.places[id(y)], help="state its axes where it starts: `fill(0, [mt, e = E])`",
            )  # fmt: skip
        return y

    def _assume(self, c: _Carried, found: DType) -> None:
        """Start again with the type that the next value has, while that tells anything new."""
        if c.origin is None or DType.BOOL in (found, c.carry.type.dtype):
            return
        before = self.assumed.get(c.origin)
        after = found if before is None else promote(before, found)
        if after is not before:
            self.assumed[c.origin] = after
            raise _Again(c.origin)
