"""Formulas over the reals for derive: tensor IR to sympy and back, and separating them into parts by their form.

Everything here works on the form of a product: its factors, the exponents of its powers, the terms of its exponentials.
For contributions made of sums, products, powers, exponentials and logarithms that is all a derivation needs, and takes
microseconds; `proofs` falls back on sympy for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy as sp

from ..tensor_ir import (
    Apply,
    Axes,
    Cast,
    Const,
    Extent,
    Node,
    Reduce,
    apply,
    const,
    is_finite_const,
    positive,
    walk,
)
from .guards import extremum, guarded_state

TO_SYMPY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "exp": sp.exp,
    "exp2": lambda a: sp.Integer(2) ** a,
    "log": sp.log,
    "log2": lambda a: sp.log(a) / sp.log(2),
    "sqrt": sp.sqrt,
    "rsqrt": lambda a: 1 / sp.sqrt(a),
    "tanh": sp.tanh,
    "sin": sp.sin,
    "cos": sp.cos,
    "abs": sp.Abs,
    "pow": lambda a, b: a**b,
}
ROUNDINGS = frozenset({"round", "floor", "ceil"})


class Untranslatable(Exception):
    """An operation on an unfinished reduction that has no real formula here. `op` names it."""

    def __init__(self, op: str, node: Node | None = None) -> None:
        super().__init__(op)
        self.op = op
        self.node = node


class Formula:
    """A contribution as a sympy expression.

    `joined` names the unfinished reductions that it reads: the state r becomes a symbol `r_<name>`. A subexpression of
    states only whose operation says nothing to an algebraist (a select, a maximum with a constant) becomes a symbol `u_i`,
    kept in `references`. Maximal subexpressions free of states are opaque: `c_i` where they vary over the reduced set, `k_i`
    (taken as nonzero; as positive where `facts` say so) where they do not. `texts` has the node of each formula met.
    `rounds` takes roundings as transparent.
    """

    def __init__(
        self,
        body: Node,
        joined: Mapping[Node, str],
        bound: Axes,
        facts: Iterable[Node] = (),
        rounds: bool = False,
    ) -> None:
        self.joined, self.bound, self.facts, self.rounds = dict(joined), bound, tuple(facts), rounds
        self.opaque: dict[Node, sp.Symbol] = {}
        self.references: dict[Node, sp.Symbol] = {}
        self.states: dict[str, sp.Symbol] = {}
        self.guarded: list[str] = []
        self.texts: dict[Any, Node] = {}
        self.expr = self._translate(body)

    @property
    def moving(self) -> list[sp.Symbol]:
        """The symbols that change during the pass."""
        return [*self.states.values(), *self.references.values()]

    @property
    def varying(self) -> list[sp.Symbol]:
        """The symbols that differ from element to element."""
        return [s for n, s in self.opaque.items() if n.axes & self.bound]

    def texts_of(self, n: Node) -> Any:
        """The formula of a node met below the body."""
        return next((e for e, m in self.texts.items() if m is n), None) or self._leaf(n)

    def symbols(self) -> tuple[tuple[str, Node], ...]:
        nodes = dict(self.opaque) | self.references
        nodes |= {n: self.states[name] for n, name in self.joined.items() if name in self.states}
        return tuple((str(s), n) for n, s in nodes.items())

    def _translate(self, body: Node) -> Any:
        """Bottom up over the nodes that depend on a state; what they read from elsewhere is opaque."""
        order = walk([body])
        dependent: set[Node] = set()
        for n in order:
            if n in self.joined or any(a in dependent for a in n.args):
                dependent.add(n)
        out: dict[Node, Any] = {}
        for n in order:
            if n in dependent:
                out[n] = self._one(n, lambda a: out[a] if a in dependent else self._leaf(a))
                if not isinstance(out[n], Untranslatable):
                    self.texts.setdefault(out[n], n)
        if body not in dependent:
            return self._leaf(body)
        if isinstance(out[body], Untranslatable):
            raise out[body]
        return out[body]

    def _one(self, n: Node, value: Callable[[Node], Any]) -> Any:
        """The formula of one node, or the reason that it has none, which is its users' reason as well."""
        if n in self.joined:
            return self._state(self.joined[n])
        guarded = guarded_state(n)
        if guarded is not None and extremum(guarded, self.joined) is not None:
            return self._guarded(guarded)
        if not n.axes & self.bound and not self._known(n):
            return self.references.setdefault(n, sp.Symbol(f"u_{len(self.references)}", real=True))
        args = [value(a) for a in n.args]
        reason = next((a for a in args if isinstance(a, Untranslatable)), None)
        if reason is not None:
            return reason
        if isinstance(n, Cast) and n.dtype.is_float and n.operand.dtype.is_float:
            return args[0]  # its error is relative, so it is the same for a rescaled value
        if self.rounds and (isinstance(n, Cast) or (isinstance(n, Apply) and n.op in ROUNDINGS)):
            return args[0]
        if not self._known(n):
            return Untranslatable(n.op if isinstance(n, Apply) else type(n).__name__.lower(), n)
        assert isinstance(n, Apply)
        return TO_SYMPY[n.op](*args)

    def _known(self, n: Node) -> bool:
        return isinstance(n, Apply) and n.op in TO_SYMPY

    def _guarded(self, n: Node) -> sp.Symbol:
        if n not in self.joined:
            return self.references.setdefault(n, sp.Symbol(f"u_{len(self.references)}", real=True))
        if self.joined[n] not in self.guarded:
            self.guarded.append(self.joined[n])
        return self._state(self.joined[n])

    def _state(self, name: str) -> sp.Symbol:
        return self.states.setdefault(name, sp.Symbol(f"r_{name}", real=True))

    def _leaf(self, n: Node) -> Any:
        if isinstance(n, Const) and is_finite_const(n) and n.value == int(n.value):
            return sp.Integer(int(n.value))
        if n not in self.opaque:
            if n.axes & self.bound:
                self.opaque[n] = sp.Symbol(f"c_{len(self.opaque)}", real=True)
            elif positive(n, (*self.facts, *_nonzero_extents(n))):
                self.opaque[n] = sp.Symbol(f"k_{len(self.opaque)}", positive=True)
            else:
                self.opaque[n] = sp.Symbol(f"k_{len(self.opaque)}", real=True, nonzero=True)
        return self.opaque[n]


def _nonzero_extents(n: Node) -> list[Node]:
    """0 < E for the extents below a node, which are never negative and here taken as nonzero."""
    return [apply("lt", const(0, e.dtype), e) for e in walk([n]) if isinstance(e, Extent)]


# ---------------------------------------------------------------- products and sums by their form


def factors_of(e: Any) -> list[tuple[Any, Any]]:
    """e as a product of powers (base, exponent): exp(x) is E to the x, nested products and powers are opened."""
    out: list[tuple[Any, Any]] = []
    stack = [(e, sp.Integer(1))]
    while stack:
        top, power = stack.pop()
        if top.is_Mul:
            stack.extend((a, power) for a in reversed(top.args))
        elif isinstance(top, sp.exp):
            out.append((sp.E, top.args[0] * power))
        elif top.is_Pow and (top.exp.is_integer or power.is_integer or top.base.is_positive):
            stack.append((top.base, top.exp * power))
        else:
            out.append((top, power))
    return out


def terms_of(e: Any) -> list[Any]:
    """The terms of a sum, products over sums multiplied out."""
    return list(sp.Add.make_args(sp.expand_mul(e)))


def parted_sum(e: Any, moving: set[Any], varying: set[Any]) -> tuple[Any, Any] | None:
    """e = G + H with G free of `moving` and H free of `varying`, by the form of its terms."""
    g = h = sp.Integer(0)
    for term in terms_of(e):
        if not term.free_symbols & moving:
            g += term
        elif not term.free_symbols & varying:
            h += term
        else:
            return None
    return g, h


def parted_product(e: Any, moving: set[Any], varying: set[Any]) -> tuple[Any, Any] | None:
    """e = G·H with G free of `moving` and H free of `varying`, by the form of its factors."""
    g = h = sp.Integer(1)
    for base, power in factors_of(e):
        part = parted_factor(base, power, moving, varying)
        if part is None:
            return None
        g, h = g * part[0], h * part[1]
    return g, h


def parted_factor(base: Any, power: Any, moving: set[Any], varying: set[Any]) -> tuple[Any, Any] | None:
    """One factor base^power = G·H."""
    one, e = sp.Integer(1), base**power
    if not e.free_symbols & moving:
        return e, one
    if not e.free_symbols & varying:
        return one, e
    if not base.free_symbols & (moving | varying):  # k^(c + r) = k^c · k^r
        exponents = parted_sum(power, moving, varying)
        return None if exponents is None else (base ** exponents[0], base ** exponents[1])
    if base.is_Add and power.is_integer:  # c·r + d·r = (c + d)·r
        parts = [parted_product(t, moving, varying) for t in base.args]
        if all(p is not None for p in parts):
            hs = {p[1] for p in parts if p is not None}
            if len(hs) == 1:
                total = sum((p[0] for p in parts if p is not None), sp.Integer(0))
                return total**power, hs.pop() ** power
    return None


def ratio(new: Any, old: Any) -> Any:
    """new / old with like powers cancelled: exp(a - b), never exp(a)·exp(-b); (a / b)^2, never a^2·b^-2."""
    exponents: dict[Any, Any] = {}
    grouped: dict[Any, Any] = {}
    for sign, e in ((1, new), (-1, old)):
        for base, power in factors_of(e):
            if base.is_number:
                exponents[base] = exponents.get(base, 0) + sign * power
            else:
                grouped[base] = grouped.get(base, 0) + sign * power
    out = sp.Integer(1)
    for base, power in exponents.items():
        out *= base ** sp.factor_terms(sp.expand_mul(power))
    for base, power in grouped.items():
        out *= base**power
    return out


def same_product(left: Any, right: Any) -> bool:
    """Equal by form: the same powers of the same bases."""
    counts: dict[Any, Any] = {}
    for sign, e in ((1, left), (-1, right)):
        for base, power in factors_of(e):
            counts[base] = counts.get(base, 0) + sign * power
    rest = sp.Integer(1)
    for base, power in counts.items():
        power = sp.expand_mul(power)
        if power != 0:
            if not (base.is_number and power.is_number):
                return False
            rest *= base**power
    return bool(rest == 1)


# ---------------------------------------------------------------- back to tensor IR


def to_node(e: Any, env: Mapping[Any, Node], like: Node) -> Node:
    """A sympy expression as tensor IR over `env`; literals take the dtype of `like`."""
    if e in env:
        return env[e]
    if not e.free_symbols:
        return const(float(e), like.dtype)
    if e.is_Add:
        return _sum(e, env, like)
    if e.is_Mul:
        return _product(e, env, like)
    if e.func is sp.exp:
        return apply("exp", to_node(e.args[0], env, like))
    if e.is_Pow:
        return _power(e, env, like)
    for name, op in (("log", "log"), ("tanh", "tanh"), ("sin", "sin"), ("cos", "cos"), ("Abs", "abs")):
        if e.func is getattr(sp, name):
            return apply(op, to_node(e.args[0], env, like))
    raise Untranslatable(str(e))


def _sum(e: Any, env: Mapping[Any, Node], like: Node) -> Node:
    minus = [-a for a in e.args if a.could_extract_minus_sign()]
    plus = [a for a in e.args if not a.could_extract_minus_sign()]
    out = chain("add", [to_node(a, env, like) for a in plus]) if plus else None
    for m in minus:
        node = to_node(m, env, like)
        out = apply("neg", node) if out is None else apply("sub", out, node)
    assert out is not None
    return out


def _product(e: Any, env: Mapping[Any, Node], like: Node) -> Node:
    below = [a for a in e.args if a.is_Pow and a.exp.could_extract_minus_sign() and a.exp.is_number]
    above = [a for a in e.args if a not in below]
    if below and not (not above and all(abs(a.exp) == sp.Rational(1, 2) for a in below)):
        divisor = to_node(sp.Mul(*[1 / a for a in below]), env, like)
        return apply("div", to_node(sp.Mul(*above), env, like), divisor)
    if e.args[0] == -1:
        return apply("neg", to_node(-e, env, like))
    return chain("mul", [to_node(a, env, like) for a in e.args])


def _power(e: Any, env: Mapping[Any, Node], like: Node) -> Node:
    base = to_node(e.base, env, like)
    if e.base == 2:
        return apply("exp2", to_node(e.exp, env, like))
    if e.exp.is_Integer and abs(e.exp) <= 4:
        power = chain("mul", [base] * abs(int(e.exp)))
        return power if e.exp > 0 else apply("div", const(1.0, like.dtype), power)
    if abs(e.exp) == sp.Rational(1, 2):
        return apply("sqrt" if e.exp > 0 else "rsqrt", base)
    return apply("pow", base, to_node(e.exp, env, like))


def chain(op: str, nodes: list[Node]) -> Node:
    out = nodes[0]
    for n in nodes[1:]:
        out = apply(op, out, n)
    return out


def never_negative(n: Node) -> bool:
    """Is the value >= 0 (or NaN) by its form: exponentials, squares, absolute values, and sums, products, maxima of such."""
    good: set[Node] = set()
    for m in walk([n]):
        match m:
            case Const(value=v) if not isinstance(v, bool) and v >= 0:
                good.add(m)
            case Apply(op="exp" | "exp2" | "abs" | "sqrt" | "rsqrt"):
                good.add(m)
            case Apply(op="mul", operands=(a, b)) if a is b or (a in good and b in good):
                good.add(m)
            case Apply(op="max", operands=(a, b)) if a in good or b in good:
                good.add(m)
            case Apply(op="add" | "div" | "min", operands=(a, b)) if a in good and b in good:
                good.add(m)
            case Apply(op="where", operands=(_, a, b)) if a in good and b in good:
                good.add(m)
            case Cast(operand=a) if a in good:
                good.add(m)
            case Reduce(fn="sum" | "prod" | "min", body=b) if b in good:
                good.add(m)
            case Reduce(fn="max", body=b) if b in good:
                good.add(m)  # an empty one is -inf, and read as 0
    return n in good
