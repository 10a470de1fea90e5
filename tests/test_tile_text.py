"""Text form of the tile IR: canonical text, free layout, exact round trips, refusals with their place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileloom.compiler.layouts import KNOWN, Fragment, Packed, Range, Shared, find, meaning
from tileloom.compiler.notation import DEPTH, INFIX
from tileloom.compiler.tile_ir import (
    Apply,
    Attribute,
    AxisIndex,
    Carry,
    Cast,
    Const,
    Dot,
    Expr,
    ExtentRef,
    Fill,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Param,
    Reduce,
    Ring,
    Role,
    ScalarParam,
    ScalarRef,
    Stmt,
    Store,
    TileModule,
    TileProgram,
    TileType,
    WholeAxis,
)
from tileloom.compiler.tile_text import (
    TILE_ARITY,
    parse_module,
    parse_program,
    print_expression,
    print_module,
    print_program,
)
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.types import DType

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.tileir"))
X, Y, Z = Name("x"), Name("y"), Name("z")
ONE = Const(1.0, DType.F32)


def canonical(path: Path) -> tuple[str, str]:
    """A fixture's text without the comment above it, and its name."""
    lines = path.read_text().splitlines(keepends=True)
    return "".join(x for x in lines if not x.startswith("#")), path.name


def app(op: str, *args: Expr) -> Apply:
    return Apply(op, args)


def wrap(expression: str) -> str:
    return f"""module m {{ tile t(o: out f32[N], a: f32[N], s: f32) {{
        extents N
        x: f32 = s
        y: f32 = s
        z: f32 = s
        for n in N by 8 parallel {{ store o[n] = {expression} }} }} }}"""


START = len("for n in N by 8 parallel { store o[n] = ") + 9
"""Column at which the wrapped expression begins."""


def parse_expression(text: str) -> Expr:
    grid = parse_module(wrap(text)).programs[0].body[-1]
    assert isinstance(grid, Grid)
    store = grid.body[0]
    assert isinstance(store, Store)
    return store.value


# ---------------------------------------------------------------- fixtures


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_fixture_prints_back_byte_for_byte(path: Path) -> None:
    text, name = canonical(path)
    assert print_module(parse_module(text, name)) == text


def test_four_fixtures() -> None:
    assert {p.stem for p in FIXTURES} == {
        "gemm_sm90a",
        "attention_sm90a",
        "attention_backward_sm90a",
        "decode_split",
    }


def test_fixture_says_its_pipeline() -> None:
    text, name = canonical(next(p for p in FIXTURES if p.stem == "attention_sm90a"))
    program = parse_module(text, name).programs[0]
    assert [(r.name, r.loads, r.stages) for r in program.rings] == [
        ("qr", ("qt",), 1),
        ("kr", ("kt",), 2),
        ("vr", ("vt",), 2),
    ]
    assert program.roles == (Role("load", 1, 40), Role("compute", 2, 232))
    grid = program.body[0]
    assert isinstance(grid, Grid)
    loop = next(s for s in grid.body if isinstance(s, For))
    assert loop.reverse
    assert [a.name for a in loop.attributes] == ["skew", "pingpong"]
    lets = {s.name: s for s in loop.body if isinstance(s, Let)}
    assert find(lets["ph"].attributes, Packed) == Packed("m", "n")
    assert find(lets["s"].attributes, Range) == Range(below_log2=30)
    assert find(lets["s"].attributes, Fragment) == Fragment("m", "n", "row")


# ---------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (Const(0.1, DType.F32), "0.1"),
        (Const(1, DType.F32), "1.0"),
        (Const(1e-30, DType.F64), "1e-30f64"),
        (Const(-math.inf, DType.F32), "-inf"),
        (Const(math.inf, DType.BF16), "infbf16"),
        (Const(-3, DType.I64), "-3"),
        (Const(3, DType.U8), "3u8"),
        (Const(True, DType.BOOL), "true"),
        (app("neg", ONE), "-(1.0)"),
        (app("neg", app("neg", X)), "--x"),
        (app("sub", X, Const(-1.0, DType.F32)), "x - -1.0"),
        (app("add", app("add", X, Y), Z), "x + y + z"),
        (app("add", X, app("add", Y, Z)), "x + (y + z)"),
        (app("sub", X, app("mul", Y, Z)), "x - y * z"),
        (app("mul", app("sub", X, Y), Z), "(x - y) * z"),
        (app("floordiv", X, app("floordiv", Y, Z)), "x // (y // z)"),
        (app("mod", app("neg", X), Y), "-x % y"),
        (app("neg", app("mod", X, Y)), "-(x % y)"),
        (app("eq", app("lt", X, Y), app("le", Y, Z)), "(x < y) == (y <= z)"),
        (app("not", app("ne", X, Y)), "not x != y"),
        (app("and", app("or", X, Y), app("not", Z)), "(x or y) and not z"),
        (app("eq", app("not", X), Y), "(not x) == y"),
        (app("where", X, Y, app("fma", X, Y, Z)), "where(x, y, fma(x, y, z))"),
        (Cast(DType.F16, app("max", X, Y)), "f16(max(x, y))"),
        (Reduce("max", ("n",), AxisIndex("n")), "max[n](n)"),
        (Dot(("n",), X, Load("a", (AxisIndex("n"),))), "dot[n](x, load a[n])"),
        (Load("a", (app("mod", ExtentRef("N"), ScalarRef("s")),)), "load a[N % s]"),
        (Fill(Const(-math.inf, DType.F32)), "fill(-inf)"),
    ],
)
def test_expression(e: Expr, text: str) -> None:
    assert print_expression(e) == text
    assert parse_expression(text) == e


def test_greater_is_less_with_operands_exchanged() -> None:
    assert parse_expression("x + y >= z") == app("le", Z, app("add", X, Y))


def test_nan_is_read_back_as_the_same_object() -> None:
    assert parse_expression("nan") == Const(math.nan, DType.F32)
    assert print_expression(Const(math.nan, DType.F64)) == "nanf64"


def test_layout_is_free() -> None:
    (spread,) = parse_module(wrap("( x\n + y ) # why\n *\tz")).programs
    (tight,) = parse_module(wrap("(x+y)*z")).programs
    assert spread == tight


def test_names_of_keywords_are_names() -> None:
    text = """module m { tile t(load: f32[by], o: out f32[by], where: f32) { extents by, to
        store: f32 = load load[to] * where
        for for in by from to to by parallel { store o[for] = store } } }"""
    program = parse_module(text).programs[0]
    assert program.body == (
        Let("store", TileType(DType.F32), app("mul", Load("load", (ExtentRef("to"),)), ScalarRef("where"))),
        Grid(
            (LoopAxis("for", ExtentRef("by"), None, ExtentRef("to"), ExtentRef("by")),),
            (Store("o", (AxisIndex("for"),), Name("store")),),
        ),
    )
    assert parse_module(print_module(parse_module(text))) == parse_module(text)


def test_long_chain_needs_no_recursion() -> None:
    e: Expr = X
    for _ in range(5000):
        e = app("add", e, Y)
    text = print_expression(e)
    assert text == "x" + " + y" * 5000
    assert print_expression(parse_expression(text)) == text


def test_spans_point_at_statements() -> None:
    text = wrap("x + y")
    let = parse_module(text).programs[0].body[0]
    assert isinstance(let, Let)
    assert let.span is not None
    assert let.span.text == "x: f32 = s"
    assert let.span.line == 3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("expression", "code", "offset", "words"),
    [
        ("x +", "E0601", 4, "expected an expression, found `}`"),
        ("w", "E0603", 0, "`w` is not declared"),
        ("frob(x)", "E0605", 0, "`frob` is no operation"),
        ("exp(x, y)", "E0605", 0, "`exp` takes 1 argument, not 2"),
        ("frob[n](x)", "E0605", 0, "`frob` is no reduction"),
        ("x < y < z", "E0601", 6, "comparisons do not chain here"),
        ("x + not y", "E0601", 4, "`not` binds less"),
        ("x ? y", "E0601", 2, "unexpected character '?'"),
        ("(x, y)", "E0601", 2, "expected `)` to close the bracket of `(`, found `,`"),
        ("max[n] + 1", "E0601", 7, "expected `(` after `max[n]`"),
        ("(" * (DEPTH + 1) + "x" + ")" * (DEPTH + 1), "E0602", DEPTH, f"more than {DEPTH} deep"),
    ],
)
def test_refusal(expression: str, code: str, offset: int, words: str) -> None:
    with pytest.raises(TileError) as caught:
        parse_module(wrap(expression), "f.tileir")
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in found.message
    assert found.span is not None
    assert (found.span.line, found.span.column) == (6, START + offset)
    assert str(found.span).startswith("f.tileir:6:")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "E0601", "expected `module`"),
        ("module m {", "E0601", "expected `tile`"),
        ("module m { } x", "E0601", "expected the end of the text, found `x`"),
        ("module m { tile t(a: f31[N]) { } }", "E0601", "expected an element type, found `f31`"),
        ("module m { tile t(a: f32[N) { } }", "E0601", "expected `]`"),
        ("module m { tile t(N: f32) { extents N } }", "E0604", "`N` is a scalar of this program"),
        (
            "module m { tile t() { extents N for n in N carry (x: f32 = 0.0) { } } }",
            "E0606",
            "carries 1 values and yields 0",
        ),
        ("module m { tile t() { extents N for n in N, k in N { } } }", "E0601", "a serial loop has one axis"),
        (
            "module m { tile t() { extents N " + "for n in N { " * 65 + "}" * 67,
            "E0602",
            "loops nest more than 64 deep",
        ),
        ('module m { tile t() { attributes @a(x = "\\q") } }', "E0601", "unknown escape"),
    ],
)
def test_refusal_of_structure(text: str, code: str, words: str) -> None:
    with pytest.raises(TileError) as caught:
        parse_module(text)
    (found,) = caught.value.diagnostics
    assert (found.code, words in found.message) == (code, True), found.render()


@given(st.text(alphabet='mx:=(){}[]<+-*/@, .0123456789\n"#forinytdlae', max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for candidate in (text, wrap(text)):
        try:
            module = parse_module(candidate)
        except TileError:
            continue
        assert parse_module(print_module(module)) == module


# ---------------------------------------------------------------- layouts


def test_fragment_and_packed_cover_each_element_once() -> None:
    places = {Fragment.element(w, lane, r) for w in range(4) for lane in range(32) for r in range(32)}
    assert places == {(r, c) for r in range(64) for c in range(64)}
    halves = {
        Packed.element(w, lane, r, half)
        for w in range(4)
        for lane in range(32)
        for r in range(16)
        for half in range(2)
    }
    assert halves == places
    assert Fragment.element(1, 5, 6) == (16 + 1 + 8, 8 + 2)
    assert Packed.element(0, 5, 2, 1) == (1, 8 + 2 + 1)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_shared_offsets_are_distinct_and_spread_over_banks(swizzle: int) -> None:
    layout = Shared("r", "c", swizzle)
    offsets = {layout.offset(r, c, 64, 64, 2) for r in range(64) for c in range(64)}
    assert offsets == set(range(0, 64 * 64 * 2, 2))
    column = {layout.offset(r, 0, 64, 64, 2) // 16 % 8 for r in range(8)}
    assert len(column) == {0: 1, 32: 8, 64: 8, 128: 8}[swizzle]


def test_attributes_are_typed() -> None:
    shared = Shared("m", "d", 64)
    assert shared.attribute() == Attribute("shared", (("row", "m"), ("col", "d"), ("swizzle", 64)))
    assert meaning(shared.attribute()) == shared
    assert all(k.__doc__ and k.places for k in KNOWN.values())


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        (Attribute("sharde"), "unknown attribute @sharde"),
        (Attribute("shared", (("row", "m"),)), "@shared lacks col"),
        (Attribute("shared", (("row", "m"), ("col", "d"), ("rows", 3))), "no field rows"),
        (Attribute("shared", (("row", "m"), ("col", "d"), ("swizzle", 48))), "accepted are 0, 32, 64, 128"),
        (Attribute("inflight", (("groups", True),)), "groups is True, not of type int"),
        (Attribute("inflight", (("groups", -1),)), "must not be negative"),
        (Attribute("skew", (("dot", "s"), ("dot", "t"))), "gives a field twice"),
    ],
)
def test_attributes_are_refused(attribute: Attribute, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        meaning(attribute)


# ---------------------------------------------------------------- random modules

VALUES = ("x", "y", "acc", "load", "store", "f33")
AXES = ("m", "n", "k", "by", "yield_")
EXTENTS = ("M", "N", "to")
SCALARS = ("scale", "alpha")
dtypes = st.sampled_from(DType)
some_axes = st.lists(st.sampled_from(AXES), max_size=3, unique=True).map(tuple)


def constants() -> st.SearchStrategy[Expr]:
    floats = st.floats(allow_nan=False) | st.just(math.nan)
    kinds = [
        st.builds(Const, floats, st.sampled_from([d for d in DType if d.is_float])),
        st.builds(Const, st.integers(), st.sampled_from([d for d in DType if d.is_integer])),
        st.builds(Const, st.booleans(), st.just(DType.BOOL)),
    ]
    return st.one_of(kinds)


leaves = constants() | st.one_of(
    st.sampled_from(VALUES).map(Name),
    st.sampled_from(AXES).map(AxisIndex),
    st.sampled_from(EXTENTS).map(ExtentRef),
    st.sampled_from(SCALARS).map(ScalarRef),
)


def larger(below: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    def applied(op: str) -> st.SearchStrategy[Expr]:
        return st.tuples(*[below] * TILE_ARITY[op]).map(lambda args: Apply(op, args))

    over = st.lists(st.sampled_from(AXES), min_size=1, max_size=2, unique=True).map(tuple)
    return st.one_of(
        st.sampled_from([*sorted(TILE_ARITY), *(op for op, _ in INFIX.values()), "neg", "not"]).flatmap(
            applied
        ),
        st.builds(Load, st.sampled_from(["q", "load"]), st.lists(below, max_size=3).map(tuple)),
        st.builds(Cast, dtypes, below),
        st.builds(Dot, over, below, below),
        st.builds(Reduce, st.sampled_from(["sum", "argmax"]), over, below),
        st.builds(Fill, below),
    )


expressions = st.recursive(leaves, larger, max_leaves=12)
fields = st.tuples(
    st.sampled_from(["row", "col", "by"]),
    st.text(max_size=5) | st.sampled_from(["true", "infbf16", "℘", "m"]) | st.integers() | st.booleans(),
)
attributes = st.lists(
    st.builds(Attribute, st.sampled_from(["shared", "carry"]), st.lists(fields, max_size=2).map(tuple)),
    max_size=2,
).map(tuple)
types = st.builds(TileType, dtypes, some_axes)
loop_axes = st.builds(
    LoopAxis,
    st.sampled_from(AXES),
    expressions,
    st.none() | st.integers(1, 256),
    st.none() | expressions,
    st.none() | expressions,
)
simple: st.SearchStrategy[Stmt] = st.one_of(
    st.builds(Let, st.sampled_from(VALUES), types, expressions, attributes),
    st.builds(
        Store,
        st.sampled_from(["o", "store"]),
        st.lists(expressions, max_size=2).map(tuple),
        expressions,
        st.sampled_from(["set", "add"]),
        attributes,
    ),
)


def nested(below: st.SearchStrategy[Stmt]) -> st.SearchStrategy[Stmt]:
    body = st.lists(below, max_size=3).map(tuple)
    carry = st.builds(Carry, st.sampled_from(VALUES), types, expressions, attributes)
    pairs = st.lists(st.tuples(carry, expressions), max_size=2)
    domain = st.lists(expressions, max_size=2).map(tuple)

    def loop(
        axis: LoopAxis, p: list[tuple[Carry, Expr]], b: tuple[Stmt, ...], d: tuple[Expr, ...], r: bool
    ) -> For:
        return For(axis, tuple(c for c, _ in p), b, tuple(y for _, y in p), d, r, ())

    return st.builds(loop, loop_axes, pairs, body, domain, st.booleans()) | st.builds(
        Grid, st.lists(loop_axes, max_size=2).map(tuple), body, attributes
    )


bodies = st.lists(st.recursive(simple, nested, max_leaves=4), max_size=3).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> TileProgram:
    """Programs in which every name is declared before its use, as the text needs it."""
    zero = Const(0, DType.I64)
    declare: tuple[Stmt, ...] = tuple(Let(v, TileType(DType.F32), zero) for v in VALUES)
    sizes = st.lists(
        st.sampled_from(EXTENTS).map(ExtentRef) | st.sampled_from(SCALARS).map(ScalarRef), max_size=2
    )
    params = st.builds(
        Param,
        st.sampled_from(["q", "tile", "o"]),
        dtypes,
        sizes.map(tuple),
        st.sampled_from(["in", "out", "inout"]),
    )
    return TileProgram(
        draw(st.sampled_from(["t", "tile"])),
        tuple(draw(st.lists(params, max_size=3))),
        tuple(ScalarParam(s, draw(dtypes)) for s in SCALARS),
        EXTENTS,
        draw(st.sampled_from([(), (("N", 64),), (("N", 64), ("M", 0))])),
        tuple(WholeAxis(a, ExtentRef("N")) for a in AXES),
        declare + draw(bodies),
        draw(st.sampled_from(["loops", "wgmma"])),
        tuple(draw(st.lists(st.just(Ring("r", ("x", "y"), 2)), max_size=1))),
        tuple(draw(st.lists(st.just(Role("load", 1, 40)), max_size=2))),
        draw(attributes),
    )


@given(st.lists(programs(), max_size=2))
def test_random_modules_round_trip(found: list[TileProgram]) -> None:
    scratch = (Param("s", DType.F32, (ExtentRef("M"), app("add", ExtentRef("N"), Const(1, DType.I64)))),)
    module = TileModule("m", tuple(found), scratch)
    text = print_module(module)
    assert parse_module(text) == module
    assert print_module(parse_module(text)) == text
    for p in found:
        assert parse_program(print_program(p)) == p
