"""How far a result is from the oracle, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from .arguments import Array, Scalar
from .compiler.evaluate import evaluate
from .compiler.interpreter.arithmetic import element
from .compiler.tensor_ir import Graph, Reduce, walk
from .dsl.records import dataclass
from .dsl.types import DType

EPSILON = {DType.F64: 2.0**-52, DType.F32: 2.0**-23, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}
SAFETY = 4
DERIVATION = "4 · (eps of the output's type + eps of f32 arithmetic · sqrt(longest sum)) · (largest magnitude there + 1)"


@dataclass(frozen=True)
class Comparison:
    """One output against the oracle. `error` and `tolerance` are absolute; integers and booleans must be equal.

    `largest` is the largest finite magnitude of the oracle.
    """

    name: str
    dtype: str
    error: float
    tolerance: float
    mismatches: int
    elements: int
    largest: float

    @property
    def ok(self) -> bool:
        return self.mismatches == 0 and self.error <= self.tolerance


def compare(name: str, result: Array, oracle: Array, longest_sum: int) -> Comparison:
    """A result against float64. Infinities and NaN must stand where the oracle has them; `mismatches` counts others.

    The tolerance is a model of rounding errors that add up like a random walk, times a margin; see `DERIVATION`.
    """
    dtype = element(result)
    if not dtype.is_float:
        wrong = int(np.count_nonzero(result != oracle))
        return Comparison(name, dtype.value, float(wrong > 0), 0.0, wrong, result.size, 0.0)
    got, want = result.astype(np.float64), oracle.astype(np.float64)
    finite = np.isfinite(want)
    special = ~finite & ~((got == want) | (np.isnan(got) & np.isnan(want)))
    lost = finite & ~np.isfinite(got)
    here = finite & ~lost
    errors = np.abs(np.subtract(got, want, where=here, out=np.zeros_like(want)))
    largest = float(np.abs(want[finite]).max(initial=0.0))
    return Comparison(
        name=name,
        dtype=dtype.value,
        error=float(errors.max(initial=0.0)),
        tolerance=relative_tolerance([dtype], longest_sum) * (largest + 1),
        mismatches=int(np.count_nonzero(special | lost)),
        elements=result.size,
        largest=largest,
    )


def relative_tolerance(dtypes: Iterable[DType], longest_sum: int) -> float:
    """What is allowed for outputs of these float types, over the largest magnitude plus 1."""
    found = list(dtypes) or [DType.F32]
    arithmetic = EPSILON[DType.F64 if all(t is DType.F64 for t in found) else DType.F32]
    return SAFETY * (max(EPSILON[t] for t in found) + arithmetic * math.sqrt(max(1, longest_sum)))


def longest_sum(graph: Graph, extents: Mapping[str, int], scalars: Mapping[str, Scalar]) -> int:
    """The most elements that one reduction of the graph adds."""
    values = [n for d in graph.definitions for n in (d.value, *(d.target or ()))]
    sizes = {a: max(0, int(evaluate(n, extents, scalars))) for a, n in graph.axes.items()}
    lengths = (math.prod(sizes[a] for a in r.bound) for r in walk(values) if isinstance(r, Reduce))
    return max(lengths, default=1)


def largest_tensor(graph: Graph, extents: Mapping[str, int], scalars: Mapping[str, Scalar]) -> int:
    """Elements of the largest definition: what the interpreter holds at once."""
    sizes = {a: max(0, int(evaluate(n, extents, scalars))) for a, n in graph.axes.items()}
    return max((math.prod(sizes[a] for a in d.axes) for d in graph.definitions), default=0)
