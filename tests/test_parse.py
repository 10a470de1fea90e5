"""Text to tree: what the grammar accepts, how lines end, spans, and trees of any depth."""

from __future__ import annotations

import pytest
from timing import cpu_seconds

from tileloom.dsl import syntax as s
from tileloom.dsl.diagnostics import TileError
from tileloom.dsl.load import parse
from tileloom.dsl.parse import parse_expression, parse_file
from tileloom.dsl.source import Source

ATTENTION = """\
kernel attention<T: f16 | bf16 | f32, C: extent>(q: T[B, H, M, D], k: T[B, G, N, D], v: T[B, G, N, E], scale: f32)
        -> (o: T[B, H, M, E], lse: f32[B, H, M])
{                                           # a comment
    require H % G == 0, scale > 0
    example B = 1, H = 8, G = 8, M = 1024, N = 1024, D = 64, E = 64, C = 2, scale = 0.125
    s[b, h, m, n] = scale * sum[d](q[b, h, m, d] * k[b, h // (H // G), n, d])
    p[b, h, m, n] = softmax[n | n <= m + N - M](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])
    lse[b, h, m] = logsumexp[n | n <= m + N - M](s[b, h, m, n])
}
grad attention wrt q, k, v as attention_grad
"""


def expr(text: str) -> s.Expr:
    return parse_expression(Source("<text>", text))


def shape(node: s.Expr) -> str:
    """An expression with every grouping written out."""
    match node:
        case s.Binary():
            return f"({shape(node.left)} {node.op} {shape(node.right)})"
        case s.Unary():
            return f"({node.op} {shape(node.operand)})"
        case s.Compare():
            pairs = zip(node.ops, node.operands[1:], strict=True)
            return f"({shape(node.operands[0])}{''.join(f' {op} {shape(e)}' for op, e in pairs)})"
        case s.Name():
            return node.name
        case s.Number():
            return node.text
    raise AssertionError(node)


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a - b - c", "((a - b) - c)"),
        ("a / b * c // d % e", "((((a / b) * c) // d) % e)"),
        ("(a + b) * c", "((a + b) * c)"),
        ("-a * b", "((- a) * b)"),
        ("a - -b", "(a - (- b))"),
        ("a < b + 1 <= c", "(a < (b + 1) <= c)"),
        ("not a == b and c or d", "(((not (a == b)) and c) or d)"),
        ("a or b and c", "(a or (b and c))"),
        ("not not a", "(not (not a))"),
        ("a <- b", "(a < (- b))"),
    ],
)
def test_precedence(text: str, grouped: str) -> None:
    assert shape(expr(text)) == grouped


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("12", 12),
        ("0.5", 0.5),
        (".5", 0.5),
        ("2.", 2.0),
        ("1e-6", 1e-6),
        ("2E+3", 2000.0),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_numbers(text: str, value: float) -> None:
    number = expr(text)
    assert isinstance(number, s.Number)
    assert (number.value, type(number.value), number.text) == (value, type(value), text)


def test_words_that_are_values() -> None:
    assert expr("true") == s.Boolean(expr("true").span, True)
    assert expr("inf") == s.Name(expr("inf").span, "inf")


def test_kernel_parts() -> None:
    kernel = parse(ATTENTION)["attention"].kernel
    assert [(p.name.name, p.kind, [a.name for a in p.alternatives]) for p in kernel.type_params] == [
        ("T", "dtype", ["f16", "bf16", "f32"]),
        ("C", "extent", []),
    ]
    assert [(p.name.name, p.dtype.name, len(p.shape)) for p in kernel.params] == [
        ("q", "T", 4),
        ("k", "T", 4),
        ("v", "T", 4),
        ("scale", "f32", 0),
    ]
    assert [(p.name.name, len(p.shape)) for p in kernel.outputs] == [("o", 4), ("lse", 3)]
    assert len(kernel.requires[0].conditions) == 2
    assert {x.name.name: x.value.span.text for x in kernel.examples[0].settings}["scale"] == "0.125"
    assert [t.target.name for t in kernel.statements] == ["s", "p", "o", "lse"]
    softmax = kernel.statements[1].value
    assert isinstance(softmax, s.BracketCall)
    assert [b.name.name for b in softmax.bound] == ["n"]
    assert softmax.predicate is not None
    assert softmax.predicate.span.text == "n <= m + N - M"


def test_grad_is_accepted() -> None:
    grad = parse(ATTENTION).grads["attention_grad"]
    assert (grad.kernel.name, [n.name for n in grad.wrt]) == ("attention", ["q", "k", "v"])


def test_fn_short_form_is_the_block_with_only_a_result() -> None:
    short, block = "fn f[J](x, y) = sum[J](x) + y", "fn f[J](x, y) {\n    return sum[J](x) + y\n}"
    assert parse(short).fns["f"] == parse(block).fns["f"]
    assert parse("fn f(x) { return x }").fns["f"].bracket == ()


def test_lines_of_a_fn_in_any_order() -> None:
    """DESIGN 2: statement order is free; the program has the locals in the order of their use."""
    fn = parse("fn f(x) {\n    z = y * 2\n    y = x + 1\n    return z\n}").fns["f"]
    assert [local.name.name for local in fn.locals] == ["y", "z"]


def test_updates_and_ranges_on_the_left() -> None:
    text = (
        "kernel k(c: inout f32[P, N], page: i32[B], pos: i32, e: f32[B, N]) -> d: i64[N] {\n"
        "    c[page[b] + 1, n] += e[b, n]\n    d[n in N] = sum[b in B | page[b] == pos](1)\n}\n"
    )
    update, count = parse(text)["k"].kernel.statements
    assert update.op == "+="
    assert [type(i) for i in update.indices] == [s.Binary, s.BoundIndex]
    assert isinstance(count.indices[0], s.BoundIndex)
    assert count.indices[0].extent is not None


def test_a_parameter_on_the_left_of_an_update_is_a_position() -> None:
    text = "kernel k(c: inout f32[P, N], pos: i32, e: f32[N]) {\n    c[pos, n] = e[n]\n}\n"
    (statement,) = parse(text)["k"].kernel.statements
    assert [type(i) for i in statement.indices] == [s.Name, s.BoundIndex]


@pytest.mark.parametrize(
    "text",
    [
        ATTENTION.replace("\n", "\r\n"),
        ATTENTION.replace("    ", "\t"),
        "\ufeff" + ATTENTION,
        ATTENTION.replace(", ", ",\n"),
        ATTENTION.replace(" * ", " *\n\n"),
        ATTENTION.replace("= s", "=\n  s"),
        ATTENTION.replace("# a comment", ""),
        ATTENTION.replace("(", "( # a comment with (\n"),
        ATTENTION.replace(" | ", " |\n").replace(" in ", " in\n").replace(": ", ":\n"),
        ATTENTION.replace("\n", "\n\n # }\n"),
    ],
    ids=[
        "crlf",
        "tabs",
        "bom",
        "comma",
        "operator",
        "equals",
        "no comment",
        "brackets",
        "bar",
        "blank lines",
    ],
)
def test_layout_does_not_matter(text: str) -> None:
    assert parse(text) == parse(ATTENTION)


def test_spans_are_the_text() -> None:
    kernel = parse(ATTENTION)["attention"].kernel
    assert kernel.statements[3].span.text == "lse[b, h, m] = logsumexp[n | n <= m + N - M](s[b, h, m, n])"
    assert kernel.statements[0].span.line == 6
    assert expr("(a + b) * c").span.text == "(a + b) * c"
    product = expr("(a + b) * f[n](c)")
    assert isinstance(product, s.Binary)
    assert (product.left.span.text, product.right.span.text) == ("(a + b)", "f[n](c)")


def test_names_of_operations_may_name_tensors() -> None:
    """Faults B109: a name is a function only where a call follows; words such as `tile` and `grad` are plain names."""
    text = (
        "kernel exp(max: f32[N], sum: f32[N], grad: f32, schedule: f32) -> tile: f32[N] {\n"
        "    tile[_] = exp(max[_]) + max[n](sum[n]) + grad * as\n    as = schedule\n    wrt__ = as\n}\n"
    )
    kernel = parse(text)["exp"].kernel
    assert [t.target.name for t in kernel.statements] == ["tile", "as", "wrt__"]


@pytest.mark.parametrize(
    "word", ["lambda", "__import__", "numpy", "exp", "f32", "class", "None", "tile", "_", "x_", "O0"]
)
def test_any_word_may_be_a_tensor(word: str) -> None:
    program = parse(f"kernel k({word}: f32[N]) -> o: f32[N] {{\n    o[n] = 2 * {word}[n]\n}}\n")
    assert program["k"].kernel.params[0].name.name == word


def test_tile_and_schedule_items_are_kept_as_text() -> None:
    tile = "tile t(x: f16[N]) {\n    for n in N by 1.0f64 @shared(row = 1) { }\n}\n"
    items = tile + "schedule s for k on cuda:sm_90a {\n    fuse all\n}\n"
    program = parse(items + "fn f(x) = x\n")
    assert (list(program.tiles), list(program.schedules)) == (["t"], ["s"])
    assert program.schedules["s"].text == "schedule s for k on cuda:sm_90a {\n    fuse all\n}"
    assert "f" in program.fns


# ---------------------------------------------------------------- size


def chain(terms: int) -> str:
    return "kernel k(x: f32[N]) -> o: f32[N] {\n    o[n] = " + " + ".join(["x[n]"] * terms) + "\n}\n"


def test_ten_thousand_terms() -> None:
    """Trees are built, compared, hashed, shown and walked without recursion."""
    one, other, shorter = (parse(chain(n))["k"].kernel for n in (10_000, 10_000, 9_999))
    assert one == other
    assert hash(one) == hash(other)
    assert one != shorter
    assert repr(one).count("Subscript") == 10_000
    assert sum(isinstance(e, s.Binary) for e in s.walk(one.statements[0].value)) == 9_999


def test_nesting_just_inside_the_bound() -> None:
    assert expr("(" * 200 + "x" + ")" * 200) == expr("x")


def test_repr_is_that_of_a_dataclass() -> None:
    assert repr(expr("-x < 1")) == (
        "Compare(operands=(Unary(op='-', operand=Name(name='x')), Number(value=1, text='1')), ops=('<',))"
    )


@pytest.mark.parametrize("kernels", ["many", "one"])
def test_time_is_linear(kernels: str) -> None:
    """5,000 lines take about 2 s: 10 times as long as 500 lines. A quadratic step would make that 100 times, and what else
    runs on a machine up to 3 times as long or as short."""

    def text(lines: int) -> str:
        if kernels == "many":
            return "".join(ATTENTION.replace("attention", f"a{i}") for i in range(lines // 11))
        body = "".join(f"    t{i} = x[0] + {i}\n" for i in range(lines))
        return f"kernel k(x: f32[N]) -> o: f32 {{\n{body}    o = t{lines - 1}\n}}\n"

    texts = [text(500), text(5000)]
    rounds = [[cpu_seconds(parse, t) for t in texts] for _ in range(3)]
    short, long = (min(times) for times in zip(*rounds, strict=True))
    assert long < 40 * short


# ---------------------------------------------------------------- recovery


def test_an_error_costs_one_statement() -> None:
    with pytest.raises(TileError) as caught:
        parse_file(
            Source(
                "f",
                "kernel k(x: f32) -> o: f32 {\n    a = 1 1\n    b = 2\n    c = 3 +\n}\nfn f(x) = )\nfn g(x) = 1 1",
            )
        )
    assert [d.span.line for d in caught.value.diagnostics if d.span] == [2, 4, 6, 7]
