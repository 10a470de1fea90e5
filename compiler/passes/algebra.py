"""Proofs about real functions for derive: tensor IR to sympy and back, refutation by evaluation, proof by simplification.

A formula is refuted by evaluating both sides at random points with 40 digits before sympy is asked to prove it, so a wrong
equation costs microseconds and comes with its counterexample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import mpmath
import sympy as sp

from ..cascade import Obligation
from ..tensor_ir import Apply, Axes, Const, Node, apply, const, is_finite_const, walk

TO_SYMPY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "exp": sp.exp,
    "exp2": lambda a: sp.exp(a * sp.log(2)),
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


class Untranslatable(Exception):
    """An operation on an unfinished reduction that has no real formula here; the message names it."""


def guarded_state(n: Node) -> Node | None:
    """`where(r == -inf, finite, r)`, the text's own guard: the r that it guards."""
    match n:
        case Apply(
            op="where",
            operands=(Apply(op="eq", operands=(a, Const(value=v))), Const(value=f), b),
        ) if v == -math.inf and math.isfinite(f) and a is b:
            return a
    return None


class Formula:
    """A contribution as a sympy expression.

    States it depends on become symbols r_i; maximal subexpressions free of them become opaque symbols, `c_i` where they
    vary over the reduced set and `k_i` (taken as nonzero) where they do not.
    """

    def __init__(self, body: Node, states: Mapping[Node, str], bound: Axes) -> None:
        self.states = dict(states)
        self.bound = bound
        self.opaque: dict[Node, sp.Symbol] = {}
        self.guarded: list[str] = []
        self.symbols: dict[str, sp.Symbol] = {}
        self.expr = self._translate(body)

    def _translate(self, body: Node) -> Any:
        """Bottom up over the nodes that depend on a state; what they read from elsewhere is opaque."""
        order = walk([body])
        depends: set[Node] = set()
        for n in order:
            if n in self.states or any(a in depends for a in n.args):
                depends.add(n)
        out: dict[Node, Any] = {}
        for n in order:
            if n in depends:
                out[n] = self._one(n, lambda a: out[a] if a in depends else self._leaf(a))
        return out[body] if body in depends else self._leaf(body)

    def _one(self, n: Node, value: Callable[[Node], Any]) -> Any:
        if n in self.states:
            return self._state(self.states[n])
        guarded = guarded_state(n)
        if guarded is not None and guarded in self.states:
            name = self.states[guarded]
            if name not in self.guarded:
                self.guarded.append(name)
            return self._state(name)
        if not isinstance(n, Apply) or n.op not in TO_SYMPY:
            # A comparison is met only as a condition; it is refused by its user, which has no formula.
            return sp.nan if isinstance(n, Apply) and n.op == "eq" else self._refuse(n)
        args = [value(a) for a in n.operands]
        if any(a is sp.nan for a in args):
            self._refuse(n)
        return TO_SYMPY[n.op](*args)

    def _refuse(self, n: Node) -> Any:
        what = n.op if isinstance(n, Apply) else type(n).__name__.lower()
        raise Untranslatable(f"`{what}` is applied to a reduction that is not finished")

    def _state(self, name: str) -> sp.Symbol:
        return self.symbols.setdefault(name, sp.Symbol(f"r_{name}", real=True))

    def _leaf(self, n: Node) -> Any:
        if isinstance(n, Const) and is_finite_const(n) and n.value == int(n.value):
            return sp.Integer(int(n.value))
        if n not in self.opaque:
            varies = bool(n.axes & self.bound)
            letter = "c" if varies else "k"
            self.opaque[n] = sp.Symbol(
                f"{letter}_{len(self.opaque)}", real=True, **({} if varies else {"nonzero": True})
            )
        return self.opaque[n]

    @property
    def varying(self) -> list[sp.Symbol]:
        return [s for n, s in self.opaque.items() if n.axes & self.bound]


def to_node(e: Any, env: Mapping[Any, Node], like: Node) -> Node:
    """A sympy expression as tensor IR over `env`; literals take the dtype of `like`."""
    if e in env:
        return env[e]
    if e.is_Number:
        return const(float(e), like.dtype)
    if e.is_Add:
        plus = [a for a in e.args if not a.could_extract_minus_sign()]
        minus = [-a for a in e.args if a.could_extract_minus_sign()]
        out = _chain("add", [to_node(a, env, like) for a in plus]) if plus else None
        for m in minus:
            node = to_node(m, env, like)
            out = apply("neg", node) if out is None else apply("sub", out, node)
        assert out is not None
        return out
    if e.is_Mul:
        numerator, denominator = e.as_numer_denom()
        if denominator != 1:
            return apply("div", to_node(numerator, env, like), to_node(denominator, env, like))
        if e.args[0] == -1:
            return apply("neg", to_node(-e, env, like))
        return _chain("mul", [to_node(a, env, like) for a in e.args])
    if e.func is sp.exp:
        return apply("exp", to_node(e.args[0], env, like))
    if e.is_Pow and e.exp.is_Integer:
        base = to_node(e.base, env, like)
        power = _chain("mul", [base] * abs(int(e.exp)))
        return power if e.exp > 0 else apply("div", const(1.0, like.dtype), power)
    if e.is_Pow and abs(e.exp) == sp.Rational(1, 2):
        return apply("sqrt" if e.exp > 0 else "rsqrt", to_node(e.base, env, like))
    for name in ("log", "tanh", "sin", "cos"):
        if e.func is getattr(sp, name):
            return apply(name, to_node(e.args[0], env, like))
    raise Untranslatable(f"no operation for {e}")


def _chain(op: str, nodes: list[Node]) -> Node:
    out = nodes[0]
    for n in nodes[1:]:
        out = apply(op, out, n)
    return out


@lru_cache(maxsize=4096)
def equal(name: str, left: Any, right: Any) -> Obligation:
    """`left == right` for all reals: refuted with a point, proved, or unknown."""
    formula = f"{left} == {right}"
    point = _counterexample(left, right)
    if point is not None:
        return Obligation(name, formula, "refuted", point)
    if left == right:
        return Obligation(name, formula, "proved", "identical")
    if sp.simplify(sp.powsimp(sp.expand(left - right))) == 0:
        return Obligation(name, formula, "proved", "sympy: difference simplifies to 0")
    return Obligation(name, formula, "unknown", "sympy did not decide")


def _counterexample(left: Any, right: Any) -> str | None:
    """A point where the two sides differ, evaluated with 40 digits; None if 8 random points agree."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    rng = random.Random(0)
    with mpmath.workdps(40):
        f = sp.lambdify(symbols, [left, right], "mpmath")
        for _ in range(8):
            point = [mpmath.mpf(rng.uniform(0.2, 1.5)) for _ in symbols]
            a, b = f(*point)
            if abs(a - b) > mpmath.mpf(10) ** -30 * (abs(a) + abs(b) + 1):
                at = ", ".join(f"{s} = {float(p):.4f}" for s, p in zip(symbols, point, strict=True))
                return f"{at} gives {float(a):.6g} and {float(b):.6g}"
    return None
