"""What a kernel computes after each pass: the values that `run --verify-each` and `bisect` compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from .arguments import Array, Scalar
from .compiler.passes.derive import rules_of
from .compiler.passes.fuse import VALUE_PASSES, inlined
from .compiler.pipeline import Compilation
from .compiler.remarks import Remarks
from .compiler.tensor_ir import Graph
from .execution import interpret, interpret_tiles

Results = dict[str, Array]
Stage = tuple[str, Callable[[], Results]]


def stages(made: Compilation, tensors: Mapping[str, Array], scalars: Mapping[str, Scalar]) -> Iterator[Stage]:
    """Each pass with a call that gives the kernel's results after it, in the order in which the passes run.

    The tensor IR after `elaborate`, `canonicalize` and each pass over a grouping's values, then the tile IR after
    `lower`. What generated code gives is the caller's to add, as `codegen`.
    """
    for name, graph in graphs(made):
        yield name, lambda graph=graph: interpret(graph, tensors, scalars)  # type: ignore[misc]
    yield "lower", lambda: interpret_tiles(made, tensors, scalars)


def graphs(made: Compilation) -> Iterator[tuple[str, Graph]]:
    """The tensor IR after each pass. The passes over a grouping are run again, on the grouping that was chosen."""
    yield "elaborate", made.written
    yield "canonicalize", made.graph
    stored = frozenset(d.name for r in made.regions for d in r.roots)
    rules = rules_of(made.graph, made.options.named)
    expanded = inlined(made.graph, stored)
    yield "inline", expanded.graph
    for name, change in VALUE_PASSES:
        expanded = expanded.changed(change, Remarks(), rules)
        yield name, replace(expanded.graph, checks=())
