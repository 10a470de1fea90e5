"""Loops divided by predicates: counts against brute force, values against the text, masks only where they are needed."""

from __future__ import annotations

import numpy as np
import pytest

from tileloom.compiler import tile_ir as tile
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import tensor as tensor_interpreter
from tileloom.compiler.interpreter import tile as tile_interpreter
from tileloom.compiler.interpreter.visits import visits
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.passes.fuse import fuse
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU
from tileloom.dsl.load import parse
from tileloom.dsl.types import DType

TEXT = """
kernel {name}(s: f64[M, N], v: f64[N, E], len: i32[M], one: i32[M], a: i32[M], b: i32[N]) -> o: f64[M, E] {{
    p[m, n] = softmax[n | {predicate}](s[m, n])
    o[m, e] = sum[n](p[m, n] * v[n, e])
}}
"""
PREDICATES = {
    "causal": ("n <= m + N - M", lambda m, n, t, M, N: n <= m + N - M),
    "strict": ("n < m", lambda m, n, t, M, N: n < m),
    "future": ("m <= n", lambda m, n, t, M, N: m <= n),
    "window": ("n <= m and m - n < 20", lambda m, n, t, M, N: (n <= m) & (m - n < 20)),
    "band": ("m - 7 <= n and n < m + 9", lambda m, n, t, M, N: (m - 7 <= n) & (n < m + 9)),
    "lengths": ("n < len[m]", lambda m, n, t, M, N: n < t["len"][m]),
    "both": ("n < len[m] and n <= m", lambda m, n, t, M, N: (n < t["len"][m]) & (n <= m)),
    "documents": ("a[m] == b[n] and n <= m", lambda m, n, t, M, N: (t["a"][m] == t["b"][n]) & (n <= m)),
    "prefix": ("n <= m or n < 5", lambda m, n, t, M, N: (n <= m) | (n < 5)),
}
SHAPES = ((5, 70), (40, 40), (33, 97), (1, 1), (60, 16), (16, 0))
TILES = ((4, 8), (16, 16), (1, 5), (3, 1))


def built(name: str, sizes: dict[str, int], tiles: tuple[int, int]):  # type: ignore[no-untyped-def]
    text = TEXT.format(name=name, predicate=PREDICATES[name][0])
    graph = canonicalize(elaborate(parse(text)[name]), Remarks())
    schedule = Schedule(name, name, "cpu", "all", tiles=(("m", tiles[0]), ("n", tiles[1])))
    return graph, fuse(graph, schedule, CPU, sizes, Remarks())[0].module


def tensors(M: int, N: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(M + N)
    found = {"s": rng.standard_normal((M, N)), "v": rng.standard_normal((N, 3))}
    found["len"] = rng.integers(-1, N + 3, M).astype(np.int32)
    found["one"] = np.ones(M, np.int32)
    found["a"], found["b"] = (np.sort(rng.integers(0, 4, n)).astype(np.int32) for n in (M, N))
    return found


@pytest.mark.parametrize("name", list(PREDICATES))
def test_values_are_those_of_the_text(name: str) -> None:
    for M, N in SHAPES:
        given = tensors(M, N)
        for tiles in TILES:
            graph, module = built(name, {"M": M, "N": N, "E": 3}, tiles)
            given_here = {n: given[n] for n in graph.tensors}
            wanted = tensor_interpreter.run(graph, given_here, {})
            found = tile_interpreter.run_module(module, given_here, {})
            np.testing.assert_allclose(found["o"], wanted["o"], atol=1e-12, err_msg=f"{M}x{N} by {tiles}")


@pytest.mark.parametrize("name", [n for n in PREDICATES if n not in ("documents", "prefix")])
def test_counts_are_those_of_brute_force(name: str) -> None:
    holds = PREDICATES[name][1]
    for M, N in SHAPES[:5]:
        given = tensors(M, N)
        for tm, tn in TILES:
            _, module = built(name, {"M": M, "N": N, "E": 3}, (tm, tn))
            (found,) = visits(module, {"M": M, "N": N, "E": 3}, given)
            grid = holds(*np.indices((M, N)), given, M, N)
            empty = full = 0
            for i in range(0, M, tm):
                rows = grid[i : i + tm]
                parts = [rows[:, j : j + tn] for j in range(0, N, tn)]
                empty += sum(not p.any() for p in parts)
                full += sum(bool(p.all()) and p.shape[1] == tn for p in parts)
            where = f"{M}x{N} by {tm}x{tn}"
            assert found.total == -(-M // tm) * -(-N // tn), where
            assert found.full == full, where
            gaps = name in ("lengths", "both") or tm * tn == 1
            assert found.empty == empty or (gaps and found.empty <= empty), where


def test_full_tiles_have_no_mask_and_no_mask_is_stored() -> None:
    for name in ("causal", "window", "lengths"):
        _, module = built(name, {"M": 512, "N": 512, "E": 3}, (16, 16))
        loops = [s for s in tile.statements(module.programs[0].body) if isinstance(s, tile.For)]
        full = [s for s in loops if any(a.name == "full" for a in s.attributes)]
        assert len(full) == 1
        assert not [c for c in conditions(full[0]) if c.op != "eq"]
        assert all([c for c in conditions(s) if c.op != "eq"] for s in loops if s not in full)
        assert module.scratch == ()


def conditions(loop: tile.For) -> list[tile.Apply]:
    found = [
        e.args[0]
        for s in loop.body
        for x in tile.expressions(s)
        for e in tile.subexpressions(x)
        if isinstance(e, tile.Apply) and e.op == "where"
    ]
    return [c for c in found if isinstance(c, tile.Apply)]


def test_a_length_alike_for_all_rows_is_a_bound_and_no_mask() -> None:
    text = """kernel padded(s: f64[B, M, N], v: f64[B, N, E], len: i32[B]) -> o: f64[B, M, E] {
        p[b, m, n] = softmax[n | n < len[b]](s[b, m, n])
        o[b, m, e] = sum[n](p[b, m, n] * v[b, n, e]) }"""
    graph = canonicalize(elaborate(parse(text)["padded"]), Remarks())
    module = fuse(
        graph, Schedule("padded", "padded", "cpu", "all"), CPU, {"B": 2, "M": 9, "N": 300, "E": 3}, Remarks()
    )[0].module
    (loop,) = [s for s in tile.statements(module.programs[0].body) if isinstance(s, tile.For)]
    assert [c.op for c in conditions(loop)] == ["eq"]
    counts = visits(module, {"B": 2, "M": 9, "N": 300, "E": 3}, {"len": np.array([0, 300])})
    assert counts[0].empty > 0


def test_documents_that_do_not_meet_are_not_computed() -> None:
    """Each visited tile is asked by the ranges of what it holds; the product is inside the answer."""
    text = """kernel documents(q: f64[M, D], k: f64[N, D], v: f64[N, E], a: i32[M], b: i32[N]) -> o: f64[M, E] {
        s[m, n] = sum[d](q[m, d] * k[n, d])
        p[m, n] = softmax[n | a[m] == b[n]](s[m, n])
        o[m, e] = sum[n](p[m, n] * v[n, e]) }"""
    sizes = {"M": 64, "N": 64, "D": 8, "E": 3}
    graph = canonicalize(elaborate(parse(text)["documents"]), Remarks())
    schedule = Schedule("documents", "documents", "cpu", "all", tiles=(("m", 16), ("n", 16)))
    module = fuse(graph, schedule, CPU, sizes, Remarks())[0].module
    loops = [s for s in tile.statements(module.programs[0].body) if isinstance(s, tile.For)]
    assert [s.axis.name for s in loops] == ["n", "visit"]
    assert any(
        isinstance(e, tile.Dot)
        for s in loops[1].body
        for x in tile.expressions(s)
        for e in tile.subexpressions(x)
    )
    outside = [e for s in loops[0].body if isinstance(s, tile.Let) for e in tile.subexpressions(s.value)]
    assert not any(isinstance(e, tile.Dot) for e in outside)
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((64, sizes["DE"[n == "v"]])) for n in "qkv"}
    given["a"] = given["b"] = np.repeat(np.arange(4, dtype=np.int32), 16)
    wanted = tensor_interpreter.run(graph, given, {})
    given["k"] = given["k"].copy()
    found = tile_interpreter.run_module(module, given, {})
    np.testing.assert_allclose(found["o"], wanted["o"], atol=1e-12)


def test_a_window_in_two_axes_bounds_both_loops() -> None:
    """Neighbours of a pixel: the rows are the outer loop's bounds, alike for all columns, and need no mask inside."""
    text = """kernel local(q: f64[Y, X, D], k: f64[Y, X, D], v: f64[Y, X, E], R: i32) -> o: f64[Y, X, E] {
        s[y, x, a, b] = sum[d](q[y, x, d] * k[a, b, d])
        w[y, x, a, b] = softmax[a, b | a <= y + R and y - R <= a and b <= x + R and x - R <= b](s[y, x, a, b])
        o[y, x, e] = sum[a, b](w[y, x, a, b] * v[a, b, e]) }"""
    sizes = {"Y": 13, "X": 19, "D": 4, "E": 3}
    graph = canonicalize(elaborate(parse(text)["local"]), Remarks())
    tiles = (("x", 4), ("a", 2), ("b", 4))
    module = fuse(graph, Schedule("local", "local", "cpu", "all", tiles=tiles), CPU, sizes, Remarks())[
        0
    ].module
    loops = [s for s in tile.statements(module.programs[0].body) if isinstance(s, tile.For)]
    assert [s.axis.name for s in loops] == ["a", "b", "b", "b"]
    assert loops[0].axis.lo is not None
    assert loops[0].axis.hi is not None
    bodies = [x for s in loops for x in s.body if isinstance(x, tile.Let) and x.type.dtype is DType.BOOL]
    masked = {axis for x in bodies for axis in x.type.axes}
    assert masked == {"x", "b"}
    rng = np.random.default_rng(1)
    given = {n: rng.standard_normal((13, 19, sizes["E" if n == "v" else "D"])) for n in "qkv"}
    for radius in (0, 1, 3, 40):
        wanted = tensor_interpreter.run(graph, given, {"R": radius})
        found = tile_interpreter.run_module(module, given, {"R": radius})
        np.testing.assert_allclose(found["o"], wanted["o"], atol=1e-12)
