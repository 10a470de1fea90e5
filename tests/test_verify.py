"""Verifiers: each rule refuses a module or graph that breaks it, and names the pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tileloom.compiler import tensor_ir as t
from tileloom.compiler.tensor_ir import Check, Definition, Graph, ScalarParam, Tensor
from tileloom.compiler.tile_ir import Const, Dot, Grid, Let, Name, Store, TileModule, TileType
from tileloom.compiler.tile_text import parse_module
from tileloom.compiler.verify import VerifyError, verify_graph, verify_module
from tileloom.dsl.types import DType

F32, F16, I64, BOOL = DType.F32, DType.F16, DType.I64, DType.BOOL
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.tileir"))

# ---------------------------------------------------------------- tile IR

GOOD = """
module mod {
    scratch w: f32[B, N]
    tile first(a: f32[B, N], w: out f32[B, N]) {
        extents B, N
        for b in B, n in N by 64 parallel { store w[b, n] = load a[b, n] }
    }
    tile second(w: f32[B, N], k: f16[N, D], i: i32[B], o: out f16[B, D], c: inout f32[B], s: f32) {
        extents B, N, D
        static D = 32
        whole d = D
        role load = 1 warpgroups, 40 registers
        ring r = kt by 2
        attributes @positive(scalar = s)
        for b in B parallel @order(fast = b) {
            for n in N by 64 from 0 to N where n < N carry (
                top: f32 = -inf,
                acc: f32[d] = fill(0.0)
            ) @skew(dot = x) {
                kt: f16[n, d] = load k[n, d] @shared(row = n, col = d)
                wt: f32[n] = load w[b, n]
                x: f32[d] = dot[n](wt, kt)
                yield max(top, max[n](wt)), acc + x
            }
            store o[b, d] = f16(acc * s)
            store c[load i[b]] += top
        }
    }
}
"""


def broken(old: str, new: str) -> TileModule:
    assert GOOD.count(old) == 1, old
    return parse_module(GOOD.replace(old, new))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_fixture_verifies(path: Path) -> None:
    verify_module(parse_module(path.read_text(), path.name), "hand")


def test_good_module_verifies() -> None:
    verify_module(parse_module(GOOD), "lower")


def test_error_names_pass_program_and_statement() -> None:
    with pytest.raises(VerifyError) as caught:
        verify_module(broken("x: f32[d]", "x: f32[n, d]"), "stage")
    assert str(caught.value) == (
        "after stage: program second: `x: f32[n, d] = dot[n](wt, kt)`: "
        "x is declared f32[n, d], its value is f32[d]"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        # modules
        ("tile second", "tile first", "two programs are named first"),
        ("scratch w: f32[B, N]", "scratch w: f32[B, N] scratch w: f32[B, N]", "scratch w is declared twice"),
        ("w: out f32[B, N]", "w: out f16[B, N]", "tensor w differs from its declaration"),
        (
            "w: out f32[B, N]) {",
            "v: out f32[B, N], w: f32[B, N]) {",
            "scratch w is read before any program writes",
        ),
        # headers
        ("static D = 32", "static D = 32, D = 32", "static extent D is declared twice"),
        ("static D = 32\n", "", "whole d: D is no static extent"),
        ("by 2", "by 0", "ring r has 0 stages"),
        ("ring r = kt", "ring r = x", "a ring names x, which is no load"),
        ("ring r = kt", "ring r = kt, kt", "ring's load kt is declared twice"),
        ("40 registers", "41 registers", "41 registers; a multiple of 8"),
        ("1 warpgroups", "0 warpgroups", "role load has 0 warpgroups"),
        # names
        (
            "store c[load i[b]] += top",
            "top: f32 = s store c[load i[b]] += top",
            "top is defined where another top is visible",
        ),
        (
            "store o[b, d] = f16(acc * s)",
            "store o[b, d] = f16(acc * s + sum[n](wt))",
            "wt is not defined here",
        ),
        (
            "store c[load i[b]] += top",
            "for b in N by 8 { } store c[load i[b]] += top",
            "axis b is opened where",
        ),
        ("store o[b, d] = f16(acc * s)", "store o[b, d] = f16(acc * s + n)", "axis n is not open here"),
        # types
        ("wt: f32[n] =", "wt: f16[n] =", "wt is declared f16, is f32"),
        ("wt: f32[n] =", "wt: f32[n, b] =", "wt is declared f32[n, b], its value is f32[n]"),
        ("acc: f32[d] = fill(0.0)", "acc: f32[b] = fill(0.0)", "b is one index and cannot be an axis"),
        ("acc: f32[d] = fill(0.0)", "acc: f32[d, d] = fill(0.0)", "an axis stands twice"),
        ("acc: f32[d] = fill(0.0)", "acc: f32[d] = 0.0", "acc is declared f32[d], its value is f32"),
        ("acc: f32[d] = fill(0.0)", "acc: f32[d] = fill(d)", "a fill of a tile"),
        ("top: f32 = -inf", "top: i64 = -3", "the yield of top is declared i64, is f32"),
        ("acc + x", "acc + max[n](wt)", None),
        ("acc + x", "sum[d](acc + x)", "the yield of acc is declared f32[d], its value is f32"),
        ("where n < N", "where n + N", "a predicate of type i64"),
        ("from 0 to N", "from 0.0 to N", "the lower bound of n is f32"),
        ("from 0 to N", "from 0 to s", "the upper bound of n is f32"),
        # operations
        ("dot[n](wt, kt)", "dot[d](wt, kt)", "dot over d: its left operand f32[n] lacks it"),
        ("max[n](wt)", "max[d](wt)", "max over d: its operand f32[n] lacks it"),
        ("max[n](wt)", "any[n](wt)", "any of f32"),
        ("max(top, max[n](wt))", "max(top, max[n](wt) < top)", "max of bool"),
        ("acc * s", "where(acc, acc, s)", "the condition of where is f32"),
        ("acc * s", "acc and acc", "and of f32, f32"),
        # memory
        ("load w[b, n]", "load v[b, n]", "v is no tensor of the program"),
        ("load w[b, n]", "load w[n]", "w has rank 2, not 1"),
        ("load w[b, n]", "load w[b, s * n]", "a subscript of w is f32"),
        ("load w[b, n]", "load o[b, n]", "o is only written"),
        ("store o[b, d] = f16(acc * s)", "store k[b, d] = f16(acc * s)", "k is an input"),
        (
            "store o[b, d] = f16(acc * s)",
            "store o[b, 0] = f16(acc * s)",
            "the value has axis d, which no subscript",
        ),
        (
            "store o[b, d] = f16(acc * s)",
            "store o[0, d] = f16(acc * s)",
            "no subscript mentions the grid axis b",
        ),
        ("store o[b, d] = f16(acc * s)", "store o[b, d] = acc < s", "bool cannot be stored as f16"),
        # attributes
        ("@shared(row = n, col = d)", "@shraed(row = n, col = d)", "unknown attribute @shraed"),
        ("@shared(row = n, col = d)", "@shared(row = n)", "@shared lacks col"),
        (
            "@shared(row = n, col = d)",
            "@shared(row = b, col = d)",
            "@shared names b, which is no axis of the tile",
        ),
        ("@shared(row = n, col = d)", "@pingpong", "@pingpong has no meaning on a value"),
        ("@order(fast = b)", "@order(fast = q)", "@order names q, which is no axis of the program"),
        ("@skew(dot = x)", "@skew(dot = wt)", "@skew names wt, which is no dot of the loop's body"),
        ("@positive(scalar = s)", "@positive(scalar = D)", "@positive names D, which is no scalar"),
        ("@positive(scalar = s)", "@alignment(tensor = s, bytes = 16)", "names s, which is no tensor"),
        ("@positive(scalar = s)", "@divisible(extent = M, by = 16)", "names M, which is no extent"),
    ],
)
def test_broken_module_is_refused(old: str, new: str, words: str | None) -> None:
    module = broken(old, new)
    if words is None:  # broadcasting along the carried tile's axes is fine
        verify_module(module, "lower")
        return
    with pytest.raises(VerifyError) as caught:
        verify_module(module, "lower")
    assert str(caught.value).startswith("after lower: ")
    assert words in str(caught.value)


def program_body(text: str) -> TileModule:
    return parse_module(
        f"""module mod {{ tile p(a: f32[M, N], o: out f32[M, N], z: out f32[]) {{ extents M, N {text} }} }}"""
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "for m in M parallel { for n in N by 8 parallel { store o[m, n] = 0.0 } }",
            "a grid stands inside another",
        ),
        ("for m in M { for n in N by 8 parallel { store o[m, n] = 0.0 } }", "a grid stands inside a loop"),
        (
            "for m in M by 8 { for n in N by 8 carry (t: f32[n] = fill(0.0)) { yield t } }",
            "axis n is not open here",
        ),
        (
            """for m in M by 4, n in N by 8 parallel { for i in N carry (t: f32[m, n] = fill(0.0)) {
                u: f32[n, m] = load a[m, n] yield u } }""",
            "the yield of t is f32[n, m], carried as f32[m, n]: order of axes",
        ),
        ("for m in M by 8 { for n in N by 8 { x: i64 = argmax[m, n](load a[m, n]) } }", "argmax over 2 axes"),
        ("for n in N by 8 { } store z[] = sum[n](1.0)", "sum over n: its operand f32 lacks it"),
        (
            "for m in M by 8 parallel { x: i64[m] = m + 1 for n in N by 4 to x { } }",
            "the upper bound of n is a tile over m",
        ),
    ],
)
def test_broken_body_is_refused(text: str, words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_module(program_body(text), "fuse")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "for m in M by 8 parallel { for n in N by 4 to m + 8 { store o[m, n] = 0.0 } }",
        "for m in M by 8 parallel { for n in N by 4 to max[m](m) + 1 { store o[m, n] = 0.0 } }",
        "for m in M by 8, n in N parallel { row: i64[m] = m + 0 store o[row, n] = load a[row, n] }",
        "for m in M by 8 parallel { for n in N { x: f32[m] = load a[m, n] } for n in N { x: f32[m] = load a[m, n] } }",
        "for i in 1 parallel { for m in M by 8 { for n in N { store o[m, n] = 0.0 } } }",
    ],
)
def test_allowed(text: str) -> None:
    verify_module(program_body(text), "lower")


def edited(module: TileModule, statement: Let | Store) -> TileModule:
    """The module's first program with one statement in its grid."""
    p = module.programs[0]
    grid = p.body[0]
    assert isinstance(grid, Grid)
    return replace(
        module, programs=(replace(p, body=(replace(grid, body=(statement,)),)), *module.programs[1:])
    )


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (Let("x", TileType(F32), Const(True, F32)), "True is no f32"),
        (Let("x", TileType(DType.U8), Const(256, DType.U8)), "256 is no u8"),
        (Let("x", TileType(BOOL), Const(1, BOOL)), "1 is no bool"),
        (Let("x", TileType(F32), Dot((), Const(1.0, F32), Const(1.0, F32))), "dot over the axes ()"),
        (Let("x", TileType(F32), Name("nobody")), "nobody is not defined here"),
        (Let("b", TileType(F32), Const(1.0, F32)), "b is defined where another b is visible"),
    ],
)
def test_what_text_cannot_say_is_refused(statement: Let, words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_module(edited(parse_module(GOOD), statement), "lower")
    assert words in str(caught.value)


# ---------------------------------------------------------------- tensor IR

M, N = t.extent("M"), t.extent("N")
m, n = t.index("m"), t.index("n")
X = t.read("x", (m, n), F16)
TOTAL = t.reduce("sum", ("n",), X)
Y = Definition("y", ("m",), TOTAL, F32)


def graph(*definitions: Definition, **changes: object) -> Graph:
    g = Graph(
        name="rows",
        order=("x", "c", "scale"),
        tensors={"x": Tensor("x", F16, (M, N)), "c": Tensor("c", F32, (M,), inout=True)},
        scalars={"scale": ScalarParam("scale", F32)},
        extents=("M", "N"),
        axes={"m": M, "n": N},
        definitions=definitions or (Y,),
        outputs={"y": Tensor("y", F32, (M,))},
    )
    return replace(g, **changes)  # type: ignore[arg-type]


def update(target: tuple[t.Node, ...], name: str = "c", dtype: DType = F32) -> Definition:
    return Definition(name, ("n",), t.const(1.0), dtype, target, accumulate=True)


def test_good_graph_verifies() -> None:
    verify_graph(graph(Y, update((t.apply("mod", n, M),))), "canonicalize")
    verify_graph(graph(replace(Y, value=t.when(TOTAL, t.apply("lt", m, N)))), "front", absence=True)


@pytest.mark.parametrize(
    ("g", "words"),
    [
        (graph(order=("x", "c")), "parameter scale: is not in the order"),
        (graph(axes={"m": M, "n": t.apply("mul", N, m)}), "axis n: depends on the index m"),
        (graph(axes={"m": M, "n": t.const(1.5)}), "axis n: is f32, not an integer"),
        (graph(axes={"m": M, "n": t.extent("K")}), "unknown extent K"),
        (
            graph(tensors={"x": Tensor("x", F16, (M,))}, order=("x", "scale")),
            "reads x with 2 indices, rank 1",
        ),
        (graph(checks=(Check(M, "require", "M"),)), "check `M`: is no condition"),
        (graph(checks=(Check(t.apply("lt", m, M), "require", "m < M"),)), "depends on an index"),
        (graph(replace(Y, axes=("m", "m"))), "an axis stands twice"),
        (graph(replace(Y, axes=("q",))), "axis q has no extent"),
        (graph(replace(Y, value=X)), "its value depends on n, which its left side lacks"),
        (graph(replace(Y, dtype=I64)), "f32 stored as i64"),
        (graph(Y, Y), "definition of y: is defined twice"),
        (graph(update((m,))), "its value depends on m"),
        (graph(update((n,), name="x", dtype=F16)), "updates what is no inout parameter"),
        (graph(update((n, n))), "has 2 subscripts for rank 1"),
        (graph(update((n,), dtype=F16)), "is f16, the parameter f32"),
        (graph(update((t.scalar("scale", F32),))), "a subscript is f32"),
        (graph(update((n,))), "output y: has no definition"),
        (graph(outputs={"y": Tensor("y", F32, (M, N))}), "output y: has another rank"),
        (graph(outputs={"y": Tensor("y", F16, (M,))}), "output y: is f16, its definition f32"),
        (
            graph(replace(Y, value=t.read("z", (m,), F32))),
            "reads z, which is no parameter and not defined before",
        ),
        (graph(replace(Y, value=t.read("c", (m,), F16))), "reads c as f16, it is f32"),
        (graph(replace(Y, value=t.read("c", (t.scalar("scale", F32),), F32))), "an index of c is f32"),
        (graph(replace(Y, value=t.scalar("scale", F16))), "unknown f16 scalar scale"),
        (graph(replace(Y, value=t.when(TOTAL, t.apply("lt", m, N)))), "absence is still there"),
        (graph(replace(Y, value=t.carried("r", "old", frozenset({"m"}), F32))), "carried state r outside"),
        (graph(replace(Y, value=t.apply("exp", t.apply("lt", m, N)))), "exp of bool"),
        (graph(replace(Y, value=t.reduce("sum", ("n",), X, m))), "the predicate of sum is no bool"),
        (graph(replace(Y, value=t.reduce("sum", ("q",), X))), "axis q has no extent"),
    ],
)
def test_broken_graph_is_refused(g: Graph, words: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_graph(g, "derive")
    assert str(caught.value).startswith("after derive: kernel rows: ")
    assert words in str(caught.value)


def test_order_of_definitions() -> None:
    z = Definition("z", ("m",), t.read("y", (m,), F32), F32)
    verify_graph(graph(Y, z), "fuse")
    with pytest.raises(VerifyError, match="reads y, which is no parameter and not defined before"):
        verify_graph(graph(z, Y), "fuse")


def test_forged_node_is_refused() -> None:
    """Constructors compute axes and dtype; a node made around them is caught."""
    forged = t.Apply(frozenset({"m"}), F16, None, "exp", (TOTAL,))
    with pytest.raises(VerifyError, match=r"Apply\(exp\) claims f16, is f32"):
        verify_graph(graph(replace(Y, value=forged)), "derive")
    wide = t.Apply(frozenset(), F32, None, "exp", (TOTAL,))
    with pytest.raises(VerifyError, match=r"claims axes \[\], has \['m'\]"):
        verify_graph(graph(replace(Y, value=wide)), "derive")
