"""The programs of the field, each in definition form, against NumPy oracles in float64 written from the mathematics.

Every program runs through the tensor interpreter, through the tile interpreter of its compiled module (everything fused,
nothing fused, and as the cost model chooses; also in tiles so small that every loop has a tail) from the module's printed
and re-read text, and through generated CPU code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tileloom.api import compile
from tileloom.arguments import bind
from tileloom.compiler.calls import extents_of
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import tensor as tensor_interpreter
from tileloom.compiler.interpreter import tile as tile_interpreter
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.passes.fuse import fuse
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU
from tileloom.compiler.tensor_ir import Graph
from tileloom.compiler.tile_text import parse_module, print_module
from tileloom.compiler.verify import verify_module
from tileloom.dsl.load import load
from tileloom.dsl.syntax import ProgramKernel

EXAMPLES = Path(__file__).parent.parent / "examples"
Arrays = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator], Arrays]
TINY = 3
"""A tile size that divides none of the extents below."""
BOUND = 3e-5
"""f32 rounding of sums of at most 64 terms of magnitude around 1, relative to the largest result (at least 1)."""


@dataclass(frozen=True, eq=False)
class Program:
    """`draw` makes the inputs; `oracle` computes the outputs (and updated parameters) from them in float64."""

    file: str
    kernel: str
    draw: Draw
    oracle: Callable[[Arrays, dict[str, float]], Arrays]
    scalars: dict[str, float] = field(default_factory=dict)
    bound: float = BOUND

    def __str__(self) -> str:
        return self.kernel


# ---------------------------------------------------------------- oracles


def weights(scores: np.ndarray, seen: np.ndarray | bool = True, sink: np.ndarray | None = None) -> np.ndarray:
    """exp(s_j) / (Σ exp(s_i) + exp(sink)) over the seen entries of the last axis; 0 where nothing is seen."""
    masked = np.where(seen, scores, -np.inf)
    top = masked.max(-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[..., None])
    top = np.where(np.isinf(top), 0, top)
    e = np.exp(masked - top)
    total = e.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink[..., None] - top))
    return np.divide(e, total, where=total > 0, out=np.zeros_like(e))


def causal(m: int, n: int) -> np.ndarray:
    """Query i of the last m of n places sees the places up to its own."""
    return np.arange(n)[None, :] <= np.arange(m)[:, None] + n - m


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, seen: np.ndarray | bool) -> np.ndarray:
    return weights(scale * q @ np.swapaxes(k, -1, -2), seen) @ v


def grouped_heads(x: Arrays, c: dict[str, float]) -> Arrays:
    each = x["q"].shape[1] // x["k"].shape[1]
    k, v = np.repeat(x["k"], each, 1), np.repeat(x["v"], each, 1)
    return {"o": attend(x["q"], k, v, c["scale"], causal(x["q"].shape[2], k.shape[2]))}


def packed(x: Arrays, c: dict[str, float]) -> Arrays:
    """Each document on its own; tokens before the first and after the last are documents of their own."""
    q, k, v = (np.swapaxes(x[n], 0, 1) for n in "qkv")
    edges = sorted({0, *x["cu"].astype(int), q.shape[1]})
    o = np.zeros((*q.shape[:2], v.shape[2]))
    for a, b in pairwise(edges):
        o[:, a:b] = attend(q[:, a:b], k[:, a:b], v[:, a:b], c["scale"], causal(b - a, b - a))
    return {"o": np.swapaxes(o, 0, 1)}


def paged_decode(x: Arrays, c: dict[str, float]) -> Arrays:
    """Pages gathered into one row of keys for each sequence, cut to its length."""
    q, heads = x["q"], x["q"].shape[1] // x["k"].shape[2]
    o = np.zeros((*q.shape[:2], x["v"].shape[3]))
    for b, (table, length) in enumerate(zip(x["table"].astype(int), x["length"].astype(int), strict=True)):
        k, v = (np.concatenate(list(x[n][table]))[:length] for n in "kv")
        for h in range(q.shape[1]):
            p = weights(c["scale"] * k[:, h // heads] @ q[b, h]) if length else np.zeros(0)
            o[b, h] = p @ v[:, h // heads]
    return {"o": o}


def sinks(x: Arrays, c: dict[str, float]) -> Arrays:
    s = c["scale"] * x["q"] @ np.swapaxes(x["k"], 1, 2)
    sink = np.broadcast_to(x["sink"][:, None], s.shape[:2])
    return {"o": weights(s, causal(*s.shape[1:]), sink) @ x["v"]}


def alibi(x: Arrays, c: dict[str, float]) -> Arrays:
    m, n = x["q"].shape[1], x["k"].shape[1]
    distance = np.arange(m)[:, None] - np.arange(n)[None, :]
    s = c["scale"] * x["q"] @ np.swapaxes(x["k"], 1, 2) - x["slope"][:, None, None] * distance
    return {"o": weights(s, (distance >= 0) & (distance < c["window"])) @ x["v"]}


def differential(x: Arrays, c: dict[str, float]) -> Arrays:
    seen = causal(x["q1"].shape[1], x["q1"].shape[1])
    one, two = (attend(x[f"q{i}"], x[f"k{i}"], x["v"], c["scale"], seen) for i in (1, 2))
    return {"o": one - c["lambda"] * two}


def rotated(x: np.ndarray, theta: float, interleaved: bool) -> np.ndarray:
    """Pairs of elements as complex numbers, turned by position · theta^(-2 i / D)."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turn = np.exp(1j * np.arange(x.shape[-2])[:, None] * theta ** (-np.arange(half) / half))
    z = (a + 1j * b) * turn
    if interleaved:
        return np.stack([z.real, z.imag], -1).reshape(x.shape)
    return np.concatenate([z.real, z.imag], -1)


def rotary(interleaved: bool) -> Callable[[Arrays, dict[str, float]], Arrays]:
    def oracle(x: Arrays, c: dict[str, float]) -> Arrays:
        q, k = (rotated(x[n], c["theta"], interleaved) for n in "qk")
        return {"o": attend(q, k, x["v"], c["scale"], causal(q.shape[1], k.shape[1]))}

    return oracle


def cross_entropy(x: Arrays, c: dict[str, float]) -> Arrays:
    p = weights(x["x"] @ x["w"].T)
    label = x["label"].astype(int)
    counts = label >= 0
    loss = np.where(counts, -np.log(p[np.arange(len(label)), np.maximum(label, 0)]), 0)
    return {"loss": loss, "total": np.asarray(loss.sum() / counts.sum())}


def layernorm_product(x: Arrays, c: dict[str, float]) -> Arrays:
    y = (x["x"] - x["x"].mean(1, keepdims=True)) / np.sqrt(x["x"].var(1, keepdims=True) + c["eps"])
    return {"o": (y * x["g"] + x["b"]) @ x["w"].T}


def stencil(same: bool) -> Callable[[Arrays, dict[str, float]], Arrays]:
    def oracle(x: Arrays, c: dict[str, float]) -> Arrays:
        w = x["w"]
        size = [(k // 2, k - 1 - k // 2) if same else (0, 0) for k in w.shape]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x["x"], size), w.shape)
        return {"o": (windows * w).sum(tuple(range(-w.ndim, 0)))}

    return oracle


def largest(x: Arrays, c: dict[str, float]) -> Arrays:
    return {"at": x["x"].argmax(1), "value": x["x"].max(1)}


def kmeans(x: Arrays, c: dict[str, float]) -> Arrays:
    distance = ((x["x"][:, None] - x["c"][None]) ** 2).sum(2)
    return {"nearest": distance.argmin(1), "distance": distance.min(1)}


def quantise(x: Arrays, c: dict[str, float]) -> Arrays:
    scale = np.abs(x["x"]).max(1) / 127
    divisor = np.where(scale == 0, 1, scale)
    return {"q": np.round(x["x"] / divisor[:, None]), "scale": scale}


def quantised_attention(x: Arrays, c: dict[str, float]) -> Arrays:
    k, v = x["k"] * x["k_scale"][..., None], x["v"] * x["v_scale"][..., None]
    return {"o": attend(x["q"], k, v, c["scale"], causal(x["q"].shape[1], k.shape[1]))}


def tree_mask(x: Arrays, c: dict[str, float]) -> Arrays:
    return {"o": attend(x["q"], x["k"], x["v"], c["scale"], x["sees"].astype(bool))}


def cache_append(x: Arrays, c: dict[str, float]) -> Arrays:
    cache = x["cache"].copy()
    for b, (page, slot) in enumerate(zip(x["page"].astype(int), x["slot"].astype(int), strict=True)):
        cache[page, slot] = x["new"][b]
    return {"cache": cache}


def histogram(x: Arrays, c: dict[str, float]) -> Arrays:
    inside = x["x"][(x["x"] >= 0) & (x["x"] < len(x["counts"]))]
    return {"counts": x["counts"] + np.bincount(inside.astype(int), minlength=len(x["counts"]))}


# ---------------------------------------------------------------- inputs


def normal(**shapes: tuple[int, ...]) -> Draw:
    return lambda random: {n: random.standard_normal(s, np.float32) for n, s in shapes.items()}


def also(draw: Draw, **more: Callable[[np.random.Generator], np.ndarray]) -> Draw:
    return lambda random: {**draw(random), **{n: make(random) for n, make in more.items()}}


def given(values: object, dtype: str = "int32") -> Callable[[np.random.Generator], np.ndarray]:
    return lambda random: np.array(values, dtype)


def quantised(random: np.random.Generator) -> Arrays:
    h, m, n, d, e = 2, 9, 17, 8, 7
    eight = {x: random.integers(-127, 128, (h, n, w)).astype(np.int8) for x, w in (("k", d), ("v", e))}
    scales = {f"{x}_scale": random.uniform(0.5, 2, (h, n)).astype(np.float32) / 127 for x in "kv"}
    return {"q": random.standard_normal((h, m, d), np.float32), **eight, **scales}


def tree(random: np.random.Generator) -> np.ndarray:
    """Token n leads to token m: a random parent for each; token 3 sees nothing."""
    parent = [int(random.integers(0, i)) if i else -1 for i in range(11)]
    sees = np.zeros((11, 13), bool)
    for m in range(11):
        n = m
        while n >= 0:
            sees[m, n + 2] = True
            n = parent[n]
    sees[:, :2] = True
    sees[3] = False
    return sees


def rows(random: np.random.Generator) -> np.ndarray:
    """Rows to quantise, one of them all zero."""
    x = random.standard_normal((10, 13)).astype(np.float32)
    x[4] = 0
    return x


def with_ties(random: np.random.Generator) -> np.ndarray:
    """Small integers: the greatest of a row occurs more than once."""
    return random.integers(0, 4, (11, 23)).astype(np.float32)


SCALE = {"scale": 0.3}
HEADS = {"q": (2, 11, 8), "k": (2, 13, 8), "v": (2, 13, 7)}
SQUARE = {"q": (2, 13, 8), "k": (2, 13, 8), "v": (2, 13, 7)}
PROGRAMS = (
    Program("grouped_heads", "grouped_heads",
            normal(q=(2, 6, 11, 8), k=(2, 2, 13, 8), v=(2, 2, 13, 7)), grouped_heads, SCALE),
    Program("packed", "packed",
            also(normal(q=(23, 2, 8), k=(23, 2, 8), v=(23, 2, 7)), cu=given([0, 4, 4, 15, 16, 23])), packed, SCALE),
    Program("paged_decode", "paged_decode",
            also(normal(q=(3, 4, 8), k=(9, 5, 2, 8), v=(9, 5, 2, 7)), length=given([12, 0, 20]),
                 table=given([[8, 1, 4, 0], [2, 2, 2, 2], [3, 7, 5, 6]])), paged_decode, SCALE),
    Program("sinks", "sinks", normal(**HEADS, sink=(2,)), sinks, SCALE),
    Program("alibi", "alibi", also(normal(**SQUARE), slope=given([0.5, 0.0625], "float32")), alibi,
            {"scale": 0.3, "window": 6}),
    Program("differential", "differential",
            normal(q1=(2, 13, 8), k1=(2, 13, 8), q2=(2, 13, 8), k2=(2, 13, 8), v=(2, 13, 7)), differential,
            {"scale": 0.3, "lambda": 0.4}),
    Program("rotary_half", "rotary_half", normal(**SQUARE), rotary(False), {"scale": 0.3, "theta": 100.0}),
    Program("rotary_pairs", "rotary_pairs", normal(**SQUARE), rotary(True), {"scale": 0.3, "theta": 100.0},
            ),
    Program("cross_entropy", "cross_entropy",
            also(normal(x=(9, 6), w=(17, 6)), label=given([3, 0, 16, -1, 9, 9, -7, 1, 2])), cross_entropy),
    Program("layernorm_product", "layernorm_product",
            normal(x=(9, 19), g=(19,), b=(19,), w=(10, 19)), layernorm_product, {"eps": 1e-5}),
    Program("stencils", "valid_1d", normal(x=(25,), w=(4,)), stencil(False)),
    Program("stencils", "same_1d", normal(x=(25,), w=(5,)), stencil(True)),
    Program("stencils", "valid_2d", normal(x=(9, 14), w=(3, 5)), stencil(False)),
    Program("stencils", "same_2d", normal(x=(9, 14), w=(3, 4)), stencil(True)),
    Program("transpose", "transpose", normal(x=(7, 11)), lambda x, c: {"o": x["x"].T}, bound=0),
    Program("reductions", "total", normal(x=(7, 11)), lambda x, c: {"o": np.asarray(x["x"].sum())}),
    Program("reductions", "inner", normal(x=(43,), y=(43,)), lambda x, c: {"o": np.asarray(x["x"] @ x["y"])}),
    Program("reductions", "largest", lambda random: {"x": with_ties(random)}, largest, bound=0),
    Program("kmeans", "kmeans", normal(x=(17, 5), c=(8, 5)), kmeans),
    Program("quantised_keys", "quantise", lambda random: {"x": rows(random)}, quantise),
    Program("quantised_keys", "quantised_attention", quantised, quantised_attention, SCALE),
    Program("tree_mask", "tree_mask", also(normal(**HEADS), sees=tree), tree_mask, SCALE),
    Program("cache_append", "cache_append",
            also(normal(cache=(5, 4, 2, 3), new=(4, 2, 3)), page=given([4, 0, 0, 2]), slot=given([1, 3, 2, 0])),
            cache_append, bound=0),
    Program("histogram", "histogram",
            also(lambda random: {"x": random.integers(-2, 9, 41).astype(np.int32)}, counts=given(range(7), "int64")),
            histogram, bound=0),
)  # fmt: skip
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=str)


# ---------------------------------------------------------------- the checks


@cache
def tensors_of(program: Program) -> Arrays:
    return program.draw(np.random.default_rng(len(program.kernel)))


@cache
def wanted(program: Program) -> Arrays:
    wide = {n: x.astype(np.float64) if x.dtype.kind == "f" else x for n, x in tensors_of(program).items()}
    wide |= {n: x.astype(np.float64) for n, x in wide.items() if x.dtype == np.int8}
    return program.oracle(wide, program.scalars)


@cache
def graphs_of(program: Program) -> tuple[Graph, Graph]:
    """As written and canonical, for the element types of the inputs."""
    kernel = kernel_of(program)
    call = bind(kernel.kernel, (), {**tensors_of(program), **program.scalars})
    written = elaborate(kernel, call.dtypes)
    return written, canonicalize(written, Remarks())


def kernel_of(program: Program) -> ProgramKernel:
    return load(EXAMPLES / f"{program.file}.tile")[program.kernel]


def check(program: Program, got: Arrays) -> None:
    want = wanted(program)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        if got[name].dtype.kind in "iub":
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        else:
            bound = program.bound * max(1.0, float(np.abs(value).max(initial=0)))
            np.testing.assert_allclose(got[name].astype(np.float64), value, rtol=0, atol=bound, err_msg=name)


@each_program
def test_definition(program: Program) -> None:
    """The meaning: as written and canonical, and with every index checked where none is meant to be out of range."""
    for graph in graphs_of(program):
        for checked in (False, True) if program.kernel != "histogram" else (False,):
            results = tensor_interpreter.run(
                graph, tensors_of(program), program.scalars, check_indices=checked
            )
            check(program, results)


def schedules(graph: Graph) -> Iterator[Schedule]:
    name = graph.name
    tiny = tuple((a, TINY) for a in graph.axes)
    for mode in ("all", "none"):
        yield Schedule(name, name, "cpu", mode)
        yield Schedule(name, name, "cpu", mode, tiles=tiny)
    yield Schedule(name, name, "cpu", "auto")


@each_program
def test_tiles(program: Program) -> None:
    """Every grouping and tile size, from the printed text."""
    _, graph = graphs_of(program)
    tensors = tensors_of(program)
    sizes = extents_of(graph, {n: x.shape for n, x in tensors.items()}, program.scalars)
    seen: set[str] = set()
    for schedule in schedules(graph):
        module = fuse(graph, schedule, CPU, sizes, Remarks())[0].module
        verify_module(module, "lower")
        text = print_module(module)
        assert parse_module(text) == module
        if text not in seen:
            seen.add(text)
            check(
                program,
                tile_interpreter.run_module(parse_module(text), tensors, {**program.scalars, **sizes}),
            )


@each_program
def test_cpu(program: Program) -> None:
    tensors = {n: x.copy() for n, x in tensors_of(program).items()}
    graph, _ = graphs_of(program)
    result = compile(kernel_of(program))(**tensors, **program.scalars)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    updated = {n: tensors[n] for n, t in graph.tensors.items() if t.inout}
    check(program, {**dict(zip(graph.outputs, results, strict=True)), **updated})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.tile")), ids=lambda p: p.stem)
def test_every_example_states_its_sizes(path: Path) -> None:
    """`tileloom run examples/x.tile` needs nothing else: sizes and scalars are all in the file."""
    assert path.read_text(encoding="utf-8").startswith("#")
    program = load(path)
    for name, kernel in program.kernels.items():
        if kernel.span.source is program.file.source:
            graph = elaborate(program[name])
            assert set(graph.extents) | set(graph.scalars) <= graph.example.keys(), name
