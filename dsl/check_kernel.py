"""The names of one kernel: what declares them, what each statement may use, and which indices must be bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from . import syntax as s
from .calls import Calls
from .diagnostics import Diagnostics
from .foreign import FOREIGN_DTYPES
from .free import Free, Leaks, free_indices
from .ordering import first_cycle
from .records import dataclass
from .source import Span
from .suggest import did_you_mean
from .types import NAMES
from .vocabulary import BUILT_IN, LATER_DTYPES

Kind = Literal["dtype parameter", "extent", "scalar parameter", "tensor", "output", "intermediate"]


@dataclass(frozen=True)
class Symbol:
    """A name with one meaning in the whole kernel; `rank` is its number of axes, 0 for a single value."""

    name: s.Name
    kind: Kind
    rank: int = 0
    inout: bool = False

    @property
    def described(self) -> str:
        article = "an" if self.kind[0] in "eio" else "a"
        return f"{article} {self.kind}"


def check_kernel(kernel: s.Kernel, fns: Mapping[str, s.Fn], leaks: Leaks, found: Diagnostics) -> None:
    """Add every error in the names of `kernel` to `found`."""
    names = _Kernel(kernel, fns, leaks, found)
    names.declare()
    names.check_statements()
    names.check_outputs()
    names.check_requires()
    names.check_examples()


@dataclass
class _Kernel:
    kernel: s.Kernel
    fns: Mapping[str, s.Fn]
    leaks: Leaks
    found: Diagnostics
    symbols: dict[str, Symbol] = field(default_factory=dict)
    indices: set[str] = field(default_factory=set)
    unsized: set[str] = field(default_factory=set)
    faulty: list[Span] = field(default_factory=list)

    # ---- declarations

    def declare(self) -> None:
        for type_param in self.kernel.type_params:
            self._declare_type(type_param)
        for param in self.kernel.params:
            kind: Kind = "tensor" if param.shape else "scalar parameter"
            self._declare(Symbol(param.name, kind, len(param.shape), param.inout))
        for output in self.kernel.outputs:
            self._declare(Symbol(output.name, "output", len(output.shape)))
            if output.inout:
                self.found.error(
                    "E0138",
                    f"the output `{output.name.name}` is declared inout",
                    output.span,
                    help="an inout tensor is a parameter: write it in the first parentheses",
                )
        self._declare_extents()
        for param in (*self.kernel.params, *self.kernel.outputs):
            self._check_dtype(param.dtype)
            for extent in param.shape:
                self._check_extent(extent, "a shape")
        self._declare_intermediates()

    def _declare(self, symbol: Symbol) -> None:
        first = self.symbols.setdefault(symbol.name.name, symbol)
        if first is not symbol:
            self.found.error(
                "E0114",
                f"`{symbol.name.name}` is declared twice",
                symbol.name.span,
                note=f"it is {first.described} since {first.name.span}",
                help="rename one of them",
            )

    def _declare_type(self, param: s.TypeParam) -> None:
        if param.name.name in BUILT_IN:
            self.found.error(
                "E0122",
                f"`{param.name.name}` is a word of the language",
                param.name.span,
                help="use another name",
            )
        self._declare(Symbol(param.name, "extent" if param.kind == "extent" else "dtype parameter"))
        for name in param.alternatives:
            if name.name not in NAMES:
                self._unknown_dtype(name, NAMES)

    def _check_dtype(self, name: s.Name) -> None:
        types = [p.name.name for p in self.kernel.type_params if p.kind == "dtype"]
        if name.name not in NAMES and name.name not in types:
            self._unknown_dtype(name, [*types, *NAMES])

    def _unknown_dtype(self, name: s.Name, known: Mapping[str, object] | list[str]) -> None:
        spelled = FOREIGN_DTYPES.get(name.name)
        help = f"write {spelled}" if spelled else did_you_mean(name.name, known)
        if name.name in LATER_DTYPES:
            message = f"the dtype `{name.name}` is planned and cannot be used yet"
        elif name.name == "extent":
            message, help = (
                "`extent` is not a dtype",
                "it stands alone after a type parameter's name: <C: extent>",
            )
        else:
            message = f"there is no dtype `{name.name}`"
        self.found.error("E0104", message, name.span, help=help or f"the dtypes are {', '.join(NAMES)}")

    def _declare_extents(self) -> None:
        """Bare names in the parameters' shapes bind extents; then shapes linear in one name left over bind that."""
        shapes = [e for p in self.kernel.params for e in p.shape]
        for expr in shapes:
            if isinstance(expr, s.Name) and expr.name not in self.symbols:
                self.symbols[expr.name] = Symbol(expr, "extent")
        waiting = [e for e in shapes if not isinstance(e, s.Name)]
        while True:
            solved = [e for e in waiting if self._solve(e)]
            if not solved:
                return
            waiting = [e for e in waiting if not any(e is other for other in solved)]

    def _solve(self, expr: s.Expr) -> bool:
        unknown = {e.name: e for e in s.walk(expr) if isinstance(e, s.Name) and e.name not in self.symbols}
        if len(unknown) != 1:
            return False
        ((name, at),) = unknown.items()
        if _degree(expr, name) != 1:
            return False
        self.symbols[name] = Symbol(at, "extent")
        return True

    def _check_extent(self, expr: s.Expr, where: str) -> None:
        """A shape or a range: integers, extents and scalars, with + - * // % between them."""
        for part in s.walk(expr):
            if isinstance(part, s.Name):
                self._check_extent_name(part, where)
            elif not _is_size(part):
                self.found.error(
                    "E0127",
                    f"{where} is made of integers, extents and scalars",
                    part.span,
                    help="with + - * // % between them; an extent is a bare name such as N",
                )
                return

    def _check_extent_name(self, name: s.Name, where: str) -> None:
        symbol = self.symbols.get(name.name)
        if symbol is not None and symbol.kind in ("extent", "scalar parameter"):
            return
        if symbol is not None:
            self.found.error(
                "E0127",
                f"`{name.name}` is {symbol.described}, and {where} is made of integers, extents and scalars",
                name.span,
                help="name extents differently from tensors, such as N",
            )
        elif name.name in self.indices:
            self.found.error(
                "E0127",
                f"the range of an index cannot depend on the index `{name.name}`",
                name.span,
                help=f"give the whole range and cut it by a condition: [n in N | n <= {name.name}]",
            )
        else:
            self._unbound_extent(name)

    def _unbound_extent(self, name: s.Name) -> None:
        if name.name in self.unsized:
            return
        self.unsized.add(name.name)
        extents = [n for n, symbol in self.symbols.items() if symbol.kind == "extent"]
        near = did_you_mean(name.name, extents)
        declared = f"declare it: kernel {self.kernel.name.name}<{name.name}: extent>(…)"
        self.found.error(
            "E0108",
            f"no parameter's shape says how large `{name.name}` is",
            name.span,
            note="an extent is bound by a shape such as f32[N], or by one such as f32[N + 1] where N is new",
            help=f"{near} If not, {declared}" if near else declared,
        )

    def _declare_intermediates(self) -> None:
        for statement in self.kernel.statements:
            name = statement.target
            if name.name not in self.symbols:
                self.symbols[name.name] = Symbol(name, "intermediate", len(statement.indices))
        for statement in self.kernel.statements:
            self.indices.update(i.name.name for i in statement.indices if isinstance(i, s.BoundIndex))
            for expr in s.walk(statement.value):
                if isinstance(expr, s.BracketCall):
                    self.indices.update(b.name.name for b in expr.bound)

    # ---- statements

    def check_statements(self) -> None:
        calls = self._calls()
        defined: dict[str, s.Statement] = {}
        for statement in self.kernel.statements:
            first = defined.setdefault(statement.target.name, statement)
            if first is not statement:
                self._defined_twice(statement, first)
            self._check_target(statement)
            self._check_left(statement, calls)
            self._check_uses(statement.value, calls)
            self._check_bound(statement)
        self._check_cycles(defined)

    def _calls(self) -> Calls:
        casts = frozenset(n for n, symbol in self.symbols.items() if symbol.kind == "dtype parameter")
        return Calls(self.found, self.fns, casts, frozenset(self.symbols) - casts)

    def _defined_twice(self, statement: s.Statement, first: s.Statement) -> None:
        name = statement.target.name
        verb = "updated" if self.symbols[name].inout else "defined"
        self.found.error(
            "E0115",
            f"`{name}` is {verb} twice",
            statement.target.span,
            note=f"first at {first.target.span}; the order of statements is free, so one statement must say all",
            help="give the second value a new name, or choose between two with where(condition, a, b)",
        )

    def _check_target(self, statement: s.Statement) -> None:
        symbol = self.symbols[statement.target.name]
        name, span = symbol.name.name, statement.target.span
        if symbol.kind in ("tensor", "scalar parameter") and not symbol.inout:
            self.found.error(
                "E0116",
                f"`{name}` is an input and cannot be written",
                span,
                help=f"declare it `{name}: inout …`, or define a tensor with a name of its own",
            )
        elif symbol.kind in ("extent", "dtype parameter"):
            self.found.error(
                "E0116",
                f"`{name}` is {symbol.described} and cannot be defined",
                span,
                note=f"named at {symbol.name.span}",
                help="give the tensor another name",
            )
        elif statement.op == "+=" and not symbol.inout:
            self.found.error(
                "E0117",
                f"`+=` adds to a parameter that is declared inout; `{name}` is {symbol.described}",
                span,
                help=f"write `=`, with a reduction for a sum, or declare a parameter `{name}: inout …`",
            )
        if len(statement.indices) != symbol.rank:
            self.found.error(
                "E0106",
                f"`{name}` has {_axes(symbol.rank)}; here it is written with {_indices(len(statement.indices))}",
                span.to(statement.indices[-1].span) if statement.indices else span,
                note=f"declared at {symbol.name.span}",
            )

    def _check_left(self, statement: s.Statement, calls: Calls) -> None:
        seen: set[str] = set()
        inout = self.symbols[statement.target.name].inout
        for index in statement.indices:
            if isinstance(index, s.BoundIndex):
                self._check_left_index(index, seen)
                seen.add(index.name.name)
            elif inout:
                self._check_uses(index, calls)
            else:
                self.found.error(
                    "E0118",
                    "the left side of a definition takes index names only",
                    index.span,
                    note="expressions say where to write, which only updates of an inout parameter do",
                    help="write o[m] = … with the shift or the fixed place on the right: x[m + 1]",
                )

    def _check_left_index(self, index: s.BoundIndex, seen: set[str]) -> None:
        if index.name.name in seen:
            self.found.error(
                "E0111",
                f"the index `{index.name.name}` stands twice on the left",
                index.name.span,
                help="use two indices, and a condition where they must agree: o[m, n] = where(m == n, x[m], 0)",
            )
        self._check_new_index(index)

    def _check_new_index(self, index: s.BoundIndex) -> None:
        symbol = self.symbols.get(index.name.name)
        if symbol is not None:
            self.found.error(
                "E0113",
                f"the index `{index.name.name}` has the name of {symbol.described}",
                index.name.span,
                note=f"named at {symbol.name.span}",
                help="rename the index",
            )
        if index.extent is not None:
            self._check_extent(index.extent, "a range")

    def _check_uses(self, expr: s.Expr, calls: Calls) -> None:
        for part in s.walk(expr):
            match part:
                case s.Name():
                    self._check_bare(part)
                case s.Subscript():
                    self._check_read(part)
                case s.Call():
                    calls.check(part)
                case s.BracketCall():
                    calls.check(part)
                    for bound in part.bound:
                        self._check_new_index(bound)

    def _check_bare(self, name: s.Name) -> None:
        symbol = self.symbols.get(name.name)
        if symbol is None:
            return
        if symbol.kind == "dtype parameter":
            self.found.error(
                "E0109",
                f"`{name.name}` is a dtype and no value",
                name.span,
                help=f"a conversion is written {name.name}(x)",
            )
        elif symbol.rank:
            letters = ", ".join("ijklmn"[: symbol.rank]) if symbol.rank <= 6 else "…"
            self.found.error(
                "E0105",
                f"the tensor `{name.name}` is used without indices",
                name.span,
                note=f"it has {_axes(symbol.rank)}; a statement says what one element is",
                help=f"write {name.name}[{letters}] with indices of the left side or of a reduction",
            )

    def _check_read(self, read: s.Subscript) -> None:
        name = read.tensor.name
        symbol = self.symbols.get(name)
        if symbol is None:
            self._unknown_tensor(read)
        elif symbol.rank == 0:
            self.found.error(
                "E0107",
                f"`{name}` is {symbol.described} without axes and takes no indices",
                read.span,
                note=f"named at {symbol.name.span}",
                help=f"write `{name}` alone",
            )
        elif symbol.rank != len(read.indices):
            self.found.error(
                "E0106",
                f"`{name}` has {_axes(symbol.rank)}; here it is read with {_indices(len(read.indices))}",
                read.span,
                note=f"it comes from {symbol.name.span}",
            )

    def _unknown_tensor(self, read: s.Subscript) -> None:
        name = read.tensor.name
        if name in BUILT_IN or name in self.fns:
            self.faulty.append(read.span)
            inner = ", ".join(i.span.text for i in read.indices)
            self.found.error(
                "E0102",
                f"`{name}` is a function, and its argument is missing",
                read.span,
                help=f"write {name}[{inner}](…)" if read.span.end - read.span.start < 60 else None,
            )
            return
        if name in self.indices:
            self.found.error("E0107", f"`{name}` is an index and takes no indices", read.span)
            return
        tensors = [n for n, symbol in self.symbols.items() if symbol.rank]
        self.found.error(
            "E0102",
            f"there is no tensor `{name}`",
            read.tensor.span,
            help=did_you_mean(name, tensors) or f"define it with a statement: {name}[…] = …",
        )

    # ---- indices

    def _leaf(self, name: s.Name) -> Free:
        if name.name in self.symbols or name.name == "inf":
            return {}
        return {(name.name, ""): name}

    def _check_bound(self, statement: s.Statement) -> None:
        """Every index on the right stands on the left or is bound by the bracket around it."""
        left: set[str] = set()
        for index in statement.indices:
            if isinstance(index, s.BoundIndex):
                left.add(index.name.name)
            else:
                left.update(name for name, _ in free_indices(index, self.leaks, self._leaf))
        for (index_name, _), at in free_indices(statement.value, self.leaks, self._leaf).items():
            if index_name not in left:
                self._unbound(at, statement)

    def _unbound(self, at: s.Name, statement: s.Statement) -> None:
        name = at.name
        if any(span.start <= at.span.start < span.end for span in self.faulty):
            return
        if name in self.indices or _subscripts(statement.value, name):
            names = [i.name.name if isinstance(i, s.BoundIndex) else i.span.text for i in statement.indices]
            left = ", ".join([*names, name])
            self.found.error(
                "E0110",
                f"the index `{name}` is neither on the left nor bound by a reduction",
                at.span,
                help=f"reduce over it, as in sum[{name}](…), or define each of its elements: "
                f"{statement.target.name}[{left}] = …",
            )
        elif name[0].isupper() and not did_you_mean(name, self._values()):
            self._unbound_extent(at)
        else:
            known = sorted({i.name.name for i in statement.indices if isinstance(i, s.BoundIndex)})
            self.found.error(
                "E0101",
                f"there is no `{name}` here",
                at.span,
                note="a bare name is an index, an extent, a scalar parameter or a value defined without indices",
                help=did_you_mean(name, [*self._values(), *known]),
            )

    def _values(self) -> list[str]:
        return [
            n for n, symbol in self.symbols.items() if symbol.rank == 0 and symbol.kind != "dtype parameter"
        ]

    # ---- the kernel as a whole

    def _check_cycles(self, defined: Mapping[str, s.Statement]) -> None:
        edges = {
            name: [
                used for used in _used(statement.value) if not self.symbols[name].inout and used in defined
            ]
            for name, statement in defined.items()
        }
        cycle = first_cycle(edges)
        if cycle is None:
            return
        itself = len(cycle) == 2
        self.found.error(
            "E0120",
            f"`{cycle[0]}` is defined through itself",
            defined[cycle[0]].target.span,
            note=None if itself else " → ".join(f"{n} (line {defined[n].span.line})" for n in cycle),
            help=f"a definition says what `{cycle[0]}` is, once; to add to what a tensor holds, make it an inout "
            f"parameter and write `+=`"
            if itself
            else "one of them must be defined without the others",
        )

    def check_outputs(self) -> None:
        targets = {statement.target.name for statement in self.kernel.statements}
        params = {p.name.name for p in self.kernel.params}
        for output in self.kernel.outputs:
            name = output.name.name
            if name not in targets and name not in params:
                others = [t for t in targets if self.symbols[t].kind == "intermediate"]
                self.found.error(
                    "E0119",
                    f"the output `{name}` is never defined",
                    output.span,
                    help=did_you_mean(name, sorted(others)) or f"add a statement {name}[…] = …",
                )
        if not self.kernel.outputs and not any(p.inout for p in self.kernel.params):
            self.found.error(
                "E0121",
                f"the kernel `{self.kernel.name.name}` computes nothing",
                self.kernel.name.span,
                help="name an output, `-> o: f32[M]`, or a parameter to update, `c: inout f32[M]`",
            )
        for param in self.kernel.params:
            if param.inout and param.name.name not in targets:
                self.found.error(
                    "E0119",
                    f"the inout parameter `{param.name.name}` is never updated",
                    param.span,
                    help="add a statement that updates it, or drop `inout`",
                )

    def check_requires(self) -> None:
        calls = self._calls()
        for condition in (c for require in self.kernel.requires for c in require.conditions):
            self._check_uses(condition, calls)
            for part in s.walk(condition):
                if isinstance(part, s.Subscript | s.BracketCall):
                    self.found.error(
                        "E0131",
                        "`require` states a condition on extents and scalars; it reads no tensor",
                        part.span,
                        help="it is checked before any tensor is read",
                    )
                elif isinstance(part, s.Name):
                    self._check_require_name(part)

    def _check_require_name(self, name: s.Name) -> None:
        symbol = self.symbols.get(name.name)
        if name.name == "inf" or (symbol is not None and symbol.kind in ("extent", "scalar parameter")):
            return
        if symbol is None or symbol.rank == 0:
            self.found.error(
                "E0131",
                f"`{name.name}` is neither an extent nor a scalar parameter",
                name.span,
                help=did_you_mean(name.name, self._values()),
            )

    def check_examples(self) -> None:
        for example in self.kernel.examples:
            seen: set[str] = set()
            for setting in example.settings:
                if setting.name.name in seen:
                    self.found.error(
                        "E0130",
                        f"`{setting.name.name}` is set twice in one example",
                        setting.name.span,
                        help="start a second `example` line for other sizes",
                    )
                seen.add(setting.name.name)
                self._check_setting(setting)

    def _check_setting(self, setting: s.Setting) -> None:
        symbol = self.symbols.get(setting.name.name)
        settable = ("extent", "scalar parameter", "dtype parameter")
        if symbol is None or symbol.kind not in settable:
            names = [n for n, other in self.symbols.items() if other.kind in settable]
            what = "nothing of this kernel" if symbol is None else symbol.described
            self.found.error(
                "E0128",
                f"an example sets extents, scalars and dtypes; `{setting.name.name}` is {what}",
                setting.name.span,
                help=did_you_mean(setting.name.name, names) or f"it may set {', '.join(names)}",
            )
        elif symbol.kind == "dtype parameter":
            self._check_dtype_setting(setting)
        elif not all(_is_constant(part) for part in s.walk(setting.value)):
            self.found.error(
                "E0129",
                f"the example value of `{setting.name.name}` is not a number",
                setting.value.span,
                help=f"write a number, as in {setting.name.name} = 64",
            )

    def _check_dtype_setting(self, setting: s.Setting) -> None:
        param = next(p for p in self.kernel.type_params if p.name.name == setting.name.name)
        allowed = [a.name for a in param.alternatives]
        value = setting.value
        if not isinstance(value, s.Name) or value.name not in allowed:
            self.found.error(
                "E0129",
                f"`{setting.name.name}` is one of {', '.join(allowed)}",
                value.span,
                help=f"write {setting.name.name} = {allowed[0]}",
            )


# ---------------------------------------------------------------- small questions


def _axes(rank: int) -> str:
    return "no axes" if rank == 0 else "1 axis" if rank == 1 else f"{rank} axes"


def _indices(count: int) -> str:
    return "no indices" if count == 0 else "1 index" if count == 1 else f"{count} indices"


def _is_size(expr: s.Expr) -> bool:
    match expr:
        case s.Number():
            return isinstance(expr.value, int)
        case s.Unary():
            return expr.op == "-"
        case s.Binary():
            return expr.op in ("+", "-", "*", "//", "%")
    return False


def _is_constant(expr: s.Expr) -> bool:
    match expr:
        case s.Number() | s.Boolean() | s.Binary() | s.Unary():
            return True
        case s.Name():
            return expr.name == "inf"
    return False


def _degree(expr: s.Expr, name: str) -> int:
    """The power in which `name` stands in a polynomial; 99 where it stands under `//` or `%` or in anything else."""

    def visit(node: s.Expr, inner: list[int]) -> int:
        match node:
            case s.Name():
                return int(node.name == name)
            case s.Binary(op="+" | "-"):
                return max(inner)
            case s.Binary(op="*"):
                return sum(inner)
            case s.Unary(op="-"):
                return inner[0]
        return 99 if any(inner) else 0

    return s.fold(expr, visit)


def _subscripts(expr: s.Expr, name: str) -> bool:
    """Whether `name` alone is an index of some read."""
    reads = (part for part in s.walk(expr) if isinstance(part, s.Subscript))
    return any(isinstance(i, s.Name) and i.name == name for read in reads for i in read.indices)


def _used(expr: s.Expr) -> Iterator[str]:
    """The names of tensors and single values that an expression reads, in text order."""
    for part in s.walk(expr):
        if isinstance(part, s.Subscript):
            yield part.tensor.name
        elif isinstance(part, s.Name):
            yield part.name
