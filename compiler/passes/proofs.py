"""Equations between real functions: refuted by evaluation, proved by form or by sympy, or left open in time.

A formula is refuted by evaluating both sides at random points with 40 digits before a proof is tried, so a wrong equation
costs little and comes with its counterexample. Proofs by form and by multiplying out are bounded by the size of the formula;
only what they leave open goes to `sympy.simplify`, which is stopped after `LIMIT_S`.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mpmath
import sympy as sp

from ..cascade import Obligation
from .algebra import same_product
from .formula_values import Arithmetic, function_of

LIMIT_S = 2.0
DIGITS = 40
POINTS = 8
DECIMALS = Arithmetic(mpmath.mpf, mpmath)
LARGEST = 400
"""Operations of a difference that is still multiplied out."""

_known: dict[tuple[str, Any, Any], Obligation] = {}


def equal(name: str, left: Any, right: Any, limit_s: float = LIMIT_S) -> Obligation:
    """`left == right` for all reals: proved, refuted with a point, or unknown. What was not decided is not remembered."""
    key = (name, left, right)
    if key not in _known:
        found = _decide(name, left, right, limit_s)
        if found.status == "unknown":
            return found
        _known[key] = found
    return _known[key]


def _decide(name: str, left: Any, right: Any, limit_s: float) -> Obligation:
    formula = f"{left} == {right}"
    if left == right or same_product(left, right):
        return Obligation(name, formula, "proved", "by form: both sides have the same factors")
    point = counterexample(left, right)
    if point is not None:
        return Obligation(name, formula, "refuted", point)
    if multiplied_out(left - right):
        return Obligation(name, formula, "proved", "by multiplying out: the difference is 0")
    try:
        with deadline(limit_s):
            if sp.simplify(sp.powsimp(left - right)) == 0:
                return Obligation(name, formula, "proved", "sympy: the difference simplifies to 0")
    except OutOfTime:
        return Obligation(name, formula, "unknown", f"not proved in {limit_s:g} s")
    return Obligation(name, formula, "unknown", "sympy did not decide it")


def multiplied_out(difference: Any) -> bool:
    """Is it 0 after multiplying out, also over a common denominator?"""
    if difference == 0 or sp.count_ops(difference) > LARGEST:
        return bool(difference == 0)
    if sp.expand(difference) == 0:
        return True
    numerator, _ = sp.together(difference).as_numer_denom()
    return bool(sp.expand(numerator) == 0)


def counterexample(left: Any, right: Any) -> str | None:
    """A point where the two sides differ; None if the random points agree."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    for point, (a, b) in evaluations([left, right], symbols):
        if abs(a - b) > mpmath.mpf(10) ** -30 * (abs(a) + abs(b) + 1):
            at = ", ".join(f"{s} = {float(p):.4f}" for s, p in zip(symbols, point, strict=True))
            return f"{at} gives {float(mpmath.re(a)):.6g} and {float(mpmath.re(b)):.6g}"
    return None


def evaluations(
    formulas: Sequence[Any], symbols: Sequence[Any], above: Mapping[Any, float] | None = None
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Values of `formulas` at random points, 40 digits; points where one has none are left out.

    Each coordinate is drawn between 0.2 and 1.5, plus what `above` gives for its symbol.
    """
    rng = random.Random(0)
    shift = above or {}
    with mpmath.workdps(DIGITS):
        functions = [function_of(symbols, f, DECIMALS) for f in formulas]
        for _ in range(POINTS):
            point = [mpmath.mpf(round(rng.uniform(0.2, 1.5) + shift.get(s, 0.0), 4)) for s in symbols]
            try:
                yield point, [f(*point) for f in functions]
            except (ZeroDivisionError, ValueError, OverflowError):
                continue


# ---------------------------------------------------------------- time


class OutOfTime(BaseException):
    """A deadline passed. No `Exception`, so that no handler inside a library takes it for its own."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` at a Python call more than `seconds` after entry. Works in any thread."""
    end = time.monotonic() + seconds
    before: Callable[..., Any] | None = sys.gettrace()

    def watch(frame: Any, event: str, argument: Any) -> None:
        """Called at each call of a Python function; its lines are not traced."""
        if time.monotonic() > end:
            sys.settrace(before)
            raise OutOfTime

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
