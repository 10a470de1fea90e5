"""Each pass preserves the interpreter's result, on programs drawn at random (STYLE 12)."""

from __future__ import annotations

import re

import numpy as np
import pytest
from drawn_programs import DrawnProgram, programs
from hypothesis import HealthCheck, given, settings

from tileloom.compiler import tensor_ir as t
from tileloom.compiler.elaborate import elaborate
from tileloom.compiler.interpreter import tensor as tensor_interpreter
from tileloom.compiler.interpreter import tile as tile_interpreter
from tileloom.compiler.passes.canonicalize import canonicalize
from tileloom.compiler.passes.fuse import Fused, fuse
from tileloom.compiler.remarks import Remarks
from tileloom.compiler.schedule import Schedule
from tileloom.compiler.target import CPU, SM_80
from tileloom.compiler.tensor_text import parse_graph, print_graph
from tileloom.compiler.tile_text import parse_module, print_module
from tileloom.compiler.verify import verify_graph, verify_module
from tileloom.dsl.load import parse

Arrays = dict[str, np.ndarray]
BOUND = 1e-11  # f64 rounding of sums of at most 9 terms of moderate size, reassociated


def interpret(graph: t.Graph, drawn: DrawnProgram) -> Arrays:
    return tensor_interpreter.run(graph, drawn.tensors(), drawn.scalars())


def agree(got: Arrays, wanted: Arrays, bound: float) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=bound, atol=bound, err_msg=name)


def fused(graph: t.Graph, drawn: DrawnProgram, mode: str, target=CPU, tiles=()) -> Fused:  # type: ignore[no-untyped-def]
    schedule = Schedule("drawn", "drawn", target.name, mode, tiles=tiles)
    return fuse(graph, schedule, target, drawn.sizes, Remarks())[0]


@given(programs())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_canonicalize_preserves_values(drawn: DrawnProgram) -> None:
    written = elaborate(parse(drawn.text)["drawn"])
    graph = canonicalize(written, Remarks())
    verify_graph(graph, "canonicalize")
    agree(interpret(graph, drawn), interpret(written, drawn), BOUND)
    assert parse_graph(print_graph(graph)) == graph


def used_axes(graph: t.Graph) -> set[str]:
    """Axes that some definition has or reduces."""
    found = {a for d in graph.definitions for a in d.axes}
    return found | {
        a for n in t.walk([d.value for d in graph.definitions]) if isinstance(n, t.Reduce) for a in n.bound
    }


@pytest.mark.parametrize("mode", ["all", "none", "auto"])
@given(drawn=programs())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_lowering_preserves_values(drawn: DrawnProgram, mode: str) -> None:
    graph = canonicalize(elaborate(parse(drawn.text)["drawn"]), Remarks())
    wanted = interpret(graph, drawn)
    small = tuple((a, n) for a, n in (("m", 2), ("n", 3), ("k", 2), ("e", 2)) if a in used_axes(graph))
    for target, tiles in ((CPU, ()), (CPU, small), (SM_80, ())):
        result = fused(graph, drawn, mode, target, tiles)
        verify_module(result.module, "lower")
        assert parse_module(print_module(result.module)) == result.module
        got = tile_interpreter.run_module(result.module, drawn.tensors(), {**drawn.scalars(), **drawn.sizes})
        agree({k: got[k] for k in wanted}, wanted, BOUND)


RENAMED = {
    "drawn": "d_1", "x": "alpha", "w": "beta", "u": "gamma", "a": "delta", "b": "eps", "v": "zeta", "keep": "eta",
    "len": "theta", "c": "iota", "m": "i", "n": "j", "k": "l", "e": "h", "M": "P", "N": "Q", "K": "R", "E": "S",
    "s": "t_2", "p": "weight", "o": "result", "r": "row", "z": "flat", "dotted": "inner",
}  # fmt: skip


def rename(text: str, names: dict[str, str]) -> str:
    """The text with whole names replaced."""
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found.group(), found.group()), text)


@given(programs())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_names_do_not_matter(drawn: DrawnProgram) -> None:
    """Other names give the same tile IR and schedule up to names, and the same bits."""
    plain = canonicalize(elaborate(parse(drawn.text)["drawn"]), Remarks())
    other = canonicalize(elaborate(parse(rename(drawn.text, RENAMED))["d_1"]), Remarks())
    sizes = {RENAMED[k]: v for k, v in drawn.sizes.items()}
    a, _ = fuse(plain, Schedule("drawn", "drawn", "cpu"), CPU, drawn.sizes, Remarks())
    b, _ = fuse(other, Schedule("d_1", "d_1", "cpu"), CPU, sizes, Remarks())
    assert shape(print_module(a.module)) == shape(print_module(b.module))
    one = tile_interpreter.run_module(a.module, drawn.tensors(), {**drawn.scalars(), **drawn.sizes})
    tensors = {RENAMED[k]: v for k, v in drawn.tensors().items()}
    two = tile_interpreter.run_module(b.module, tensors, {"iota": drawn.scalars()["c"], **sizes})
    for name in plain.outputs:
        assert one[name].tobytes() == two[RENAMED[name]].tobytes()


def shape(text: str) -> str:
    """A tile module's text with every name replaced by the order in which it first appears."""
    order: dict[str, int] = {}
    text = re.sub(r"[A-Za-z_]\w*", lambda f: f" n{order.setdefault(f.group(), len(order))} ", text)
    return "".join(text.split())  # long lists are broken by their width
