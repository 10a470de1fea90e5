"""Programs drawn by hypothesis: texts of the language with inputs, over which every pass must preserve the result.

A program is a chain of statements: scores over [m, n] (elementwise, or a product over k), row statistics, weights, and
outputs of each shape. All sizes are small and odd, so tails are always met. Computation is in f64, so that a wrong pass
stands out from rounding; values are kept moderate (exp only of bounded arguments).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

PREDICATES = ("", " | n <= m", " | n <= m + N - M", " | m - n < 3 and n <= m", " | keep[n]", " | n < len[m]")
UNARY = (
    "tanh({})",
    "exp(-abs({}))",
    "abs({})",
    "{} * {}",
    "-{}",
    "sqrt(abs({}) + 0.5)",
    "silu({})",
    "softcap({}, 2.0)",
)
BINARY = ("{} + {}", "{} - {}", "{} * {}", "min({}, {})", "max({}, {})", "where({} < {}, f64(0.5), f64(2.0))")
LEAVES = (
    "x[m, n]",
    "w[n]",
    "u[m]",
    "c",
    "0.75",
    "f64(m - n)",
    "x[m, n]",
    "where(n > 0, x[m, n - 1], x[m, N - 1])",
)
ROWS = ("sum[n{p}]({e})", "max[n{p}]({e})", "min[n{p}]({e})", "logsumexp[n{p}]({e})", "mean[n]({e})")


@dataclass(frozen=True)
class DrawnProgram:
    text: str
    sizes: dict[str, int]
    seed: int

    def tensors(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        m, n, k, e = (self.sizes[a] for a in "MNKE")
        shapes = {"x": (m, n), "w": (n,), "u": (m,), "a": (m, k), "b": (n, k), "v": (n, e)}
        out: dict[str, np.ndarray] = {name: rng.standard_normal(s) for name, s in shapes.items()}
        out["keep"] = rng.random(n) < 0.7
        out["len"] = rng.integers(0, n + 2, m).astype(np.int32)
        return out

    def scalars(self) -> dict[str, float]:
        return {"c": 0.6}


@st.composite
def expressions(draw: st.DrawFn, leaves: tuple[str, ...], depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(leaves))
    if draw(st.booleans()):
        inner = draw(expressions(leaves, depth - 1))
        return "(" + draw(st.sampled_from(UNARY)).replace("{}", f"({inner})") + ")"
    left, right = draw(expressions(leaves, depth - 1)), draw(expressions(leaves, depth - 1))
    return "(" + draw(st.sampled_from(BINARY)).format(left, right) + ")"


@st.composite
def programs(draw: st.DrawFn) -> DrawnProgram:
    """A kernel with one to three outputs."""
    predicate = draw(st.sampled_from(PREDICATES))
    leaves = LEAVES
    body: list[str] = []
    if draw(st.booleans()):
        body.append("dotted[m, n] = 0.5 * sum[k](a[m, k] * b[n, k])")
        leaves = (*leaves, "dotted[m, n]", "dotted[m, n]")
    body.append(f"s[m in M, n in N] = {draw(expressions(leaves))}")
    outputs = []
    if draw(st.booleans()):
        row = draw(st.sampled_from(ROWS)).format(p=predicate, e="s[m, n]")
        body.append(f"r[m] = {row}")
        outputs.append("r: f64[M]")
    kind = draw(st.sampled_from(("weights", "product", "flat", "both", "none")))
    if kind in ("weights", "product", "both"):
        body.append(f"p[m, n] = softmax[n{predicate}](s[m, n])")
    if kind in ("weights", "both"):
        outputs.append("p: f64[M, N]")
    if kind in ("product", "both"):
        body.append("o[m, e] = sum[n](p[m, n] * v[n, e])")
        outputs.append("o: f64[M, E]")
    if kind == "flat" or not outputs:
        body.append(f"z[m, n] = {draw(expressions(('s[m, n]', 'x[m, n]', 'u[m]')))}")
        outputs.append("z: f64[M, N]")
    draw(st.randoms(use_true_random=False)).shuffle(body)  # the order of statements is free
    lines = "\n    ".join(body)
    text = (
        "kernel drawn(x: f64[M, N], w: f64[N], u: f64[M], a: f64[M, K], b: f64[N, K], v: f64[N, E], keep: bool[N], "
        f"len: i32[M], c: f64) -> ({', '.join(outputs)}) {{\n    {lines}\n}}\n"
    )
    sizes = {a: draw(st.integers(1, 9)) for a in "MNKE"}
    return DrawnProgram(text, sizes, draw(st.integers(0, 10**6)))
