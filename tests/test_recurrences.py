"""What derive emits, run: random cascades against their own text in float64, and the named ones on rows that break careless
code. Judged by numbers only, at several tile sizes and splits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from timing import cpu_seconds

from tileloom.compiler.cascade import Cascade
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import recurrence
from tileloom.compiler.interpreter import tensor as tensor_interpreter
from tileloom.compiler.interpreter import tile as tile_interpreter
from tileloom.compiler.passes import derive as derive_module
from tileloom.compiler.passes import proofs
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.passes.derive import derive
from tileloom.compiler.passes.fuse import Fused, fuse
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU
from tileloom.compiler.tensor_ir import Node, Reduce, apply, const, index, read, reduce, walk
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType

# ---------------------------------------------------------------- random cascades


@dataclass
class Draw:
    """Draws one cascade. `derivable` becomes False where a form is drawn that no repair mends."""

    rng: random.Random
    derivable: bool = True

    def __post_init__(self) -> None:
        self.row, self.axis = self.rng.choice((("m", "n"), ("a", "b"), ("row", "key")))
        names = self.rng.sample(["x", "y", "w", "score", "value", "u"], 3)
        self.x, self.y, self.w = (read(n, [index(self.row), index(self.axis)], DType.F64) for n in names)
        self.bound = self.rng.random() < 0.4
        self.predicate = None
        if self.rng.random() < 0.4:
            self.predicate = read("keep", [index(self.row), index(self.axis)], DType.BOOL)
        self.up: list[Node] = []

    def over(self, fn: str, body: Node) -> Node:
        return reduce(fn, [self.axis], body, self.predicate)

    def pick(self, *options: Callable[[], Node]) -> Node:
        return self.rng.choice(options)()

    def number(self) -> Node:
        return const(self.rng.choice((0.5, 2.0, 1.5)), DType.F64)

    def minus(self, x: Node, r: Node) -> Node:
        """x - r, written in one of several ways."""
        return self.pick(
            lambda: apply("sub", x, r),
            lambda: apply("add", x, apply("neg", r)),
            lambda: apply("neg", apply("sub", r, x)),
        )

    def upstream(self) -> None:
        """The first reductions: an extremum, and sums over it or on their own."""
        fn = self.rng.choice(("max", "max", "min"))
        self.up = [self.over(fn, self.x)]
        if self.rng.random() < 0.6:
            self.up.append(self.over("sum", self.weight(self.up[0])))
        if self.rng.random() < 0.3:
            self.up.append(self.over("sum", apply("exp", apply("mul", self.number(), self.y))))

    def weight(self, r: Node) -> Node:
        """An exponential of the distance to the extremum."""
        op = self.rng.choice(("exp", "exp2"))
        away = self.minus(self.x, r)
        if isinstance(r, Reduce) and r.fn == "min":
            away = apply("neg", away)
        return apply(op, apply("mul", self.number(), away) if self.rng.random() < 0.5 else away)

    def factor(self) -> Node:
        """A factor of the element."""
        return self.pick(lambda: self.y, lambda: self.w, lambda: apply("mul", self.y, self.w))

    def good(self) -> Node:
        r = self.up[0]
        total = self.up[-1]
        forms: list[Callable[[], Node]] = [
            lambda: self.over("sum", self.weight(r)),
            lambda: self.over("sum", apply("mul", self.weight(r), self.factor())),
            lambda: self.over("sum", apply("mul", self.factor(), self.weight(r))),
            lambda: self.over("max", self.minus(self.y, r)),
            lambda: self.over("sum", apply("mul", self.minus(self.y, r), self.w)),
            lambda: self.over("sum", apply("mul", self.minus(self.y, r), self.minus(self.w, r))),
            lambda: self.over("sum", apply("mul", self.weight(r), self.minus(self.y, r))),
        ]
        if isinstance(total, Reduce) and total.fn == "sum":
            forms += [
                lambda: self.over("sum", apply("div", apply("mul", self.weight(r), self.factor()), total)),
                lambda: self.over("sum", apply("mul", self.y, apply("rsqrt", total))),
                lambda: self.over("sum", apply("mul", self.w, apply("mul", total, total))),
                lambda: self.over(
                    "sum", apply("mul", self.weight(r), apply("sub", self.y, apply("log", total)))
                ),
                lambda: self.over("max", apply("div", self.y, total)),
            ]
        return self.rng.choice(forms)()

    def bad(self) -> Node:
        r = self.up[0]
        away = apply("sub", self.x, r)
        self.derivable = False
        return self.pick(
            lambda: self.over("sum", apply("tanh", away)),
            lambda: self.over(
                "sum", apply("div", self.y, apply("add", const(1.0, DType.F64), apply("exp", away)))
            ),
            lambda: self.over("sum", apply("abs", away)),
            lambda: self.over("sum", apply("where", apply("lt", self.y, r), self.w, self.y)),
            lambda: self.over("max", apply("mul", self.y, self.over("sum", self.w))),
            lambda: self.over("sum", apply("log", apply("add", apply("exp", away), self.w))),
        )

    def roots(self) -> list[Node]:
        self.upstream()
        last = self.bad() if self.rng.random() < 0.25 else self.good()
        roots = [*self.up, last]
        self.rng.shuffle(roots)
        return roots


def drawn(seed: int) -> tuple[Draw, Cascade, bool]:
    draw = Draw(random.Random(seed))
    reductions = [n for n in walk(draw.roots()) if isinstance(n, Reduce)]
    cascade, refused = derive(reductions, Remarks())
    return draw, cascade, not refused


@pytest.mark.parametrize("block", range(8))
def test_random_cascades_are_derived_or_refused_rightly(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        draw, cascade, derived = drawn(seed)
        assert derived == draw.derivable, seed
        check(cascade, seed)


def check(cascade: Cascade, seed: int) -> None:
    bound = frozenset(cascade.bound)
    for elements, tile, parts in ((1, 1, 1), (37, 1, 1), (37, 8, 1), (37, 5, 3), (64, 16, 2), (40, 40, 4)):
        rng = np.random.default_rng(seed)
        values = {n: recurrence.sample(n, bound, elements, rng) for n in recurrence.leaves(cascade)}
        for n, v in values.items():
            if v.dtype == np.bool_:
                v[0] = False  # a row without elements
                v[1, : elements // 2] = False  # nothing in the first tiles
            else:
                values[n] = v.astype(np.float64)
        wanted = recurrence.as_written(cascade, values)
        found = recurrence.one_pass(cascade, values, tile, parts)
        for name, value in wanted.items():
            shown, value = np.broadcast_arrays(found[name], value)  # a count may have one row or all
            rows = np.isfinite(value)  # an empty row of a text without a guard has no number
            scale = np.max(np.abs(value[rows]), initial=1.0)
            np.testing.assert_allclose(
                shown[rows], value[rows], rtol=1e-9, atol=1e-11 * scale, err_msg=f"{seed} {name}"
            )


def test_no_outcome_is_left_open() -> None:
    for seed in range(200):
        drawn(seed)
    assert all(o.status != "unknown" for o in proofs._known.values())


# ---------------------------------------------------------------- named derivations

PROGRAMS = """
kernel weighted(s: f32[M, N], v: f32[N, E], keep: bool[M, N]) -> (o: f32[M, E], lse: f32[M]) {
    o[m, e] = sum[n](softmax[n | keep[m, n]](s[m, n]) * v[n, e])
    lse[m] = logsumexp[n | keep[m, n]](s[m, n])
}
kernel capped(s: f32[M, N], v: f32[N, E], keep: bool[M, N], bias: f32[M, N]) -> o: f32[M, E] {
    o[m, e] = sum[n](softmax[n | keep[m, n]](softcap(s[m, n], 30.0) + bias[m, n]) * v[n, e])
}
kernel sinks(s: f32[M, N], v: f32[N, E], keep: bool[M, N], sink: f32[M]) -> o: f32[M, E] {
    o[m, e] = sum[n](softmax_sink[n | keep[m, n]](s[m, n], sink[m]) * v[n, e])
}
kernel difference(s: f32[M, N], y: f32[M, N], v: f32[N, E], keep: bool[M, N], c: f32) -> o: f32[M, E] {
    p[m, n] = softmax[n | keep[m, n]](s[m, n]) - c * softmax[n | keep[m, n]](y[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}
kernel scaled(s: f32[M, N], v: f32[N, E], keep: bool[M, N], c: f32) -> (o: f32[M, E], lse: f32[M]) {
    require c > 0
    t[m, n] = c * s[m, n]
    o[m, e] = sum[n](softmax[n | keep[m, n]](t[m, n]) * v[n, e])
    lse[m] = logsumexp[n | keep[m, n]](t[m, n])
}
kernel root_square(s: f32[M, N], v: f32[N, E]) -> o: f32[M, E] {
    o[m, e] = sum[n](rmsnorm[n](s[m, n], 0.00001) * v[n, e])
}
kernel normed(s: f32[M, N], v: f32[N, E]) -> o: f32[M, E] {
    o[m, e] = sum[n](layernorm[n](s[m, n], 0.00001) * v[n, e])
}
kernel length(s: f32[M, N], v: f32[N, E]) -> o: f32[M, E] {
    o[m, e] = sum[n](s[m, n] / sqrt(sum[n](s[m, n] * s[m, n]) + 1.0) * v[n, e])
}
kernel moments(s: f32[M, N], keep: bool[M, N]) -> (mu: f32[M], va: f32[M]) {
    mu[m] = mean[n | keep[m, n]](s[m, n])
    va[m] = var[n | keep[m, n]](s[m, n])
}
kernel norm(s: f32[M, N], keep: bool[M, N]) -> r: f32[M] {
    top[m] = max(max[n | keep[m, n]](abs(s[m, n])), 0.0)
    unit[m] = where(top[m] == 0, 1, top[m])
    r[m] = top[m] * sqrt(sum[n | keep[m, n]](s[m, n] / unit[m] * (s[m, n] / unit[m])))
}
kernel entropy(s: f32[M, N]) -> h: f32[M] {
    l[m] = logsumexp[n](s[m, n])
    h[m] = -sum[n](softmax[n](s[m, n]) * (s[m, n] - l[m]))
}
kernel label(s: f32[M, N], at: i64[M]) -> loss: f32[M] { loss[m] = logsumexp[n](s[m, n]) - s[m, at[m]] }
kernel pair(s: f32[M, N], keep: bool[M, N]) -> (top: f32[M], at: i64[M]) {
    top[m] = max[n | keep[m, n]](s[m, n])
    at[m] = argmax[n | keep[m, n]](s[m, n])
}
kernel plane(s: f32[M, K, N], v: f32[K, N, E]) -> o: f32[M, E] {
    o[m, e] = sum[k, n](softmax[k, n](s[m, k, n]) * v[k, n, e])
}
"""
PARSED = parse(PROGRAMS)
NAMES = [k.kernel.name.name if hasattr(k, "kernel") else k for k in PARSED.kernels]
SIZES = {"M": 8, "N": 300, "K": 3, "E": 5}
ROWS = {**recurrence.ROWS, "every element -inf": lambda x: np.full_like(x, -np.inf)}
TAKEN = {"root_square": 5, "normed": 5, "length": 5, "moments": 5, "norm": 5, "entropy": 7}
"""How many of the kinds of rows a program takes: what is squared or averaged none with infinities or whose squares are, and
entropy not the one where a weight of 0 meets a difference of infinities (DESIGN 8, "Reassociation")."""
MASKS = ("all", "some", "none of some rows")


def built(name: str, mode: str) -> tuple[object, Fused]:
    graph = canonicalize(elaborate(PARSED[name]), Remarks())
    schedule = Schedule(name, name, "cpu", mode, tiles=(("n", 32), ("m", 4)))
    return graph, fuse(graph, schedule, CPU, SIZES, Remarks())[0]


@pytest.mark.parametrize("name", NAMES)
def test_named_derivations_are_one_pass(name: str) -> None:
    _, fused = built(name, "all")
    assert len(fused.module.programs) == 1
    over_n = [c for cascades in fused.cascades for c in cascades if "n" in c.bound]
    assert len(over_n) == 1, [[s.name for s in c.states] for c in over_n]
    obligations = [o for s in over_n[0].states for o in s.obligations]
    assert all(o.status == "proved" for o in obligations)


@pytest.mark.parametrize("name", NAMES)
def test_named_derivations_on_rows_that_break_careless_code(name: str) -> None:
    (graph, fused), (_, unfused) = built(name, "all"), built(name, "none")
    for rows in list(ROWS)[: TAKEN.get(name)]:
        for mask in MASKS if "keep" in graph.tensors else MASKS[:1]:
            tensors, scalars = arguments(graph, rows, mask)
            oracle = tensor_interpreter.run(graph, tensors, scalars, precision="float64")
            naive = tile_interpreter.run_module(unfused.module, tensors, scalars)
            found = tile_interpreter.run_module(fused.module, tensors, scalars)
            for out, exact in oracle.items():
                compare(found[out], naive[out], exact, f"{rows}, mask {mask}: {out}")


def compare(found: np.ndarray, naive: np.ndarray, exact: np.ndarray, where: str) -> None:
    """At most twice naive's greatest error plus one unit in the last place; the same infinities and NaN as naive."""
    if found.dtype.kind == "i":
        np.testing.assert_array_equal(found, naive, err_msg=where)
        return
    np.testing.assert_array_equal(np.isnan(found), np.isnan(naive), err_msg=where)
    rows = np.isfinite(naive) & np.isfinite(exact)
    np.testing.assert_array_equal(found[~rows], naive[~rows], err_msg=where)
    error = np.abs(found[rows] - exact[rows])
    with np.errstate(over="ignore"):
        unit = np.spacing(np.max(np.abs(exact[rows]), initial=1e-30).astype(np.float32))
    allowed = 2 * np.max(np.abs(naive[rows] - exact[rows]), initial=0.0) + unit
    assert np.max(error, initial=0.0) <= allowed, (where, np.max(error), allowed)


def arguments(graph, rows: str, mask: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    sizes = [SIZES[a] for a in "MNKE"]
    shapes = {"s": sizes[:2], "y": sizes[:2], "bias": sizes[:2], "v": [sizes[1], sizes[3]], "sink": sizes[:1]}
    if graph.name == "plane":
        shapes = {"s": [sizes[0], sizes[2], sizes[1]], "v": [sizes[2], sizes[1], sizes[3]]}
    tensors = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in graph.tensors if n in shapes}
    flat = tensors["s"].reshape(sizes[0], -1).astype(np.float64)
    tensors["s"] = ROWS[rows](flat).astype(np.float32).reshape(tensors["s"].shape)
    keep = np.ones(sizes[:2], np.bool_)
    if mask != "all":
        keep = rng.random(sizes[:2]) < 0.6
    if mask == "none of some rows":
        keep[::3] = False
    extra = {"keep": keep, "at": rng.integers(0, sizes[1], sizes[0])}
    tensors |= {n: extra[n] for n in extra if n in graph.tensors}
    return tensors, dict.fromkeys(graph.scalars, 0.4)


def test_the_position_of_an_extremum_follows_nan_ties_and_emptiness() -> None:
    """First index; the first NaN if there is one; -1 for an empty set (DESIGN 8, "Specials"); over tiles of 32."""
    _, fused = built("pair", "all")
    s = np.tile(np.float32([1, 5, 5, 2]), (8, 75))
    keep = np.ones(s.shape, np.bool_)
    s[1, [200, 40]] = np.nan
    s[2] = -np.inf
    keep[3] = False
    keep[4, :130] = False
    s[5, 299] = np.inf
    keep[6, :2] = False
    found = tile_interpreter.run_module(fused.module, {"s": s, "keep": keep}, {})
    assert found["at"].tolist() == [1, 40, 0, -1, 130, 299, 2, 1]
    np.testing.assert_array_equal(found["top"], np.float32([5, np.nan, -np.inf, -np.inf, 5, np.inf, 5, 5]))


# ---------------------------------------------------------------- time


def test_attention_is_derived_in_a_second_and_found_again_at_once() -> None:
    name = "weighted"
    graph = canonicalize(elaborate(PARSED[name]), Remarks())
    schedule = Schedule(name, name, "cpu", "all")
    derive_module._joined.cache_clear()
    proofs._known.clear()
    times = [cpu_seconds(fuse, graph, schedule, CPU, SIZES, Remarks()) for _ in range(5)]
    assert times[0] < 1.0
    assert min(times[1:]) < 0.05
