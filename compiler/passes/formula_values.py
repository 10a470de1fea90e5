"""Values of formulas at points, in NumPy's numbers or in mpmath's.

`sympy.lambdify` writes and compiles a function for each formula, and imports every name of NumPy for it, which takes longer
than all the rest of a derivation. It is left for what stands in no table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy as sp

from ...dsl.records import dataclass

FUNCTIONS = {sp.exp: "exp", sp.log: "log", sp.tanh: "tanh", sp.sin: "sin", sp.cos: "cos", sp.Abs: "fabs"}
"""The names that libraries of mathematics have for them."""


@dataclass(frozen=True)
class Arithmetic:
    """Numbers of one kind: how one is made, and the library with the functions on them."""

    number: Callable[[int], Any]
    library: Any


HALF = sp.Rational(1, 2)


def function_of(symbols: Sequence[Any], e: Any, kind: Arithmetic) -> Callable[..., Any]:
    """A function of numbers, in the order of the symbols. It raises what the arithmetic raises, such as
    ZeroDivisionError."""
    if not _in_tables(e):
        written: Callable[..., Any] = sp.lambdify(list(symbols), e, kind.library.__name__)
        return written
    return lambda *point: _value(e, dict(zip(symbols, point, strict=True)), kind)


def _in_tables(e: Any) -> bool:
    if e.is_Symbol or e.is_Rational or e is sp.E:
        return True
    known = e.is_Add or e.is_Mul or e.is_Pow or e.func in FUNCTIONS
    return bool(known) and all(_in_tables(a) for a in e.args)


def _value(e: Any, at: Mapping[Any, Any], kind: Arithmetic) -> Any:
    if e.is_Symbol:
        return at[e]
    if e.is_Rational:
        return kind.number(int(e.p)) / kind.number(int(e.q))
    if e is sp.E:
        return kind.library.exp(kind.number(1))
    if e.is_Pow and abs(e.exp) == HALF:
        root = kind.library.sqrt(_value(e.base, at, kind))
        return root if e.exp == HALF else kind.number(1) / root
    first, *others = (_value(a, at, kind) for a in e.args)
    if e.is_Pow:
        return first ** others[0]
    if not (e.is_Add or e.is_Mul):
        return getattr(kind.library, FUNCTIONS[e.func])(first)
    for x in others:
        first = first + x if e.is_Add else first * x
    return first
