"""Values of formulas at points are those of sympy's own functions, also where they are infinite or none."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product

import mpmath
import numpy as np
import pytest
import sympy as sp

from tileloom.compiler.passes.formula_values import function_of
from tileloom.compiler.passes.proofs import DECIMALS
from tileloom.compiler.passes.repairs import FLOAT64

X, Y = sp.symbols("x y", real=True)
Z = sp.Symbol("z", positive=True)
FORMULAS = {
    "weight": sp.exp(Z * (X - Y)),
    "quotient": sp.exp(X - Y) / Z,
    "difference of quotients": X / (Y + 3) - Y / (X + 3),
    "powers": (X - Y) ** 3 * (X + 5) ** -2,
    "of two": 2 ** (X - Y) * sp.log(Z) / sp.log(2),
    "roots": sp.sqrt(Z) * X + Y / sp.sqrt(Z + 1),
    "circle": sp.sin(X) * sp.cos(Y) + sp.tanh(X * Y),
    "size": abs(X - Y) * sp.Rational(2, 3) + sp.E,
    "in no table": sp.sinh(X) + sp.atan(Y) * Z,
}
ENDS = (-math.inf, -7.25, 0.0, 1.5, math.inf)


@pytest.mark.parametrize("name", FORMULAS)
def test_float64(name: str) -> None:
    e = FORMULAS[name]
    ours, theirs = function_of([X, Y, Z], e, FLOAT64), sp.lambdify([X, Y, Z], e, "numpy")
    kinds = set()
    for point in product(ENDS, ENDS, (0.5, 2.0)):
        with np.errstate(all="ignore"):
            have, want = (f(*map(np.float64, point)) for f in (ours, theirs))
        np.testing.assert_allclose(have, want, rtol=1e-13, atol=1e-300, err_msg=str(point))
        kinds.add((bool(np.isnan(want)), bool(np.isinf(want))))
    assert len(kinds) >= 2


@pytest.mark.parametrize("name", FORMULAS)
def test_forty_digits(name: str) -> None:
    e = FORMULAS[name]
    with mpmath.workdps(40):
        ours, theirs = function_of([X, Y, Z], e, DECIMALS), sp.lambdify([X, Y, Z], e, "mpmath")
        for point in ((0.25, 1.125, 0.75), (-0.5, 0.375, 1.25)):
            have, want = (f(*map(mpmath.mpf, point)) for f in (ours, theirs))
            assert abs(have - want) <= mpmath.mpf(10) ** -38 * abs(want)
            assert (
                abs(have - want.real - mpmath.mpf(10) ** -30) > mpmath.mpf(10) ** -31
            )  # so many digits are there


def test_division_by_zero_is_said() -> None:
    with pytest.raises(ZeroDivisionError):
        function_of([X], 1 / X, DECIMALS)(mpmath.mpf(0))


ATTENTION = """
import sys
import tileloom as tl
kernel = tl.compile(tl.parse('''kernel attention(q: f32[M, D], k: f32[N, D], v: f32[N, E]) -> o: f32[M, E] {
    s[m, n] = sum[d](q[m, d] * k[n, d])
    p[m, n] = softmax[n](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}''')["attention"])
made = kernel.compilation(M=64, N=64, D=16, E=16)
assert len(made.module.programs) == 1
print(*sorted(sys.modules))
"""


def test_a_derivation_imports_no_part_of_numpy_that_it_does_not_use() -> None:
    done = subprocess.run([sys.executable, "-c", ATTENTION], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "sympy" in modules
    assert "numpy.f2py" not in modules
