"""A hand-written tile program as a kernel: a heading that calls are bound by, and a graph without definitions.

What reads and checks the text is imported where there is one: kernels in index notation are asked here whether they are
one, and run without all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..dsl import syntax as s
from ..dsl.diagnostics import refuse
from ..dsl.records import dataclass
from ..dsl.source import Span
from .tensor_ir import Graph, Tensor

if TYPE_CHECKING:
    from .tile_ir import TileModule
    from .tile_source import TileText


@dataclass(frozen=True, repr=False)
class TilesKernel(s.ProgramKernel):
    """`kernel` is the heading only: the parameters in their order, tensors with as many axes as they have."""

    text: TileText
    graph: Graph

    def module(self, sizes: Mapping[str, int]) -> TileModule:
        """The module for these extents. Raises `TileError`, E0616, where a rule of tile programs is broken for them."""
        return checked(self.text.at(sizes), self.text.span)


def tiles_kernel(program: s.Program, item: s.Verbatim) -> TilesKernel:
    """Read and check a `tile` or `module` item. Raises `TileError` with everything that is wrong in it."""
    from .tile_bounds import signature
    from .tile_source import read_tiles

    text = read_tiles(item.span)
    checked(text.module, item.name.span)
    graph = signature(text)
    params = tuple(_param(item, name, graph) for name in graph.order)
    extents = tuple(
        s.TypeParam(item.name.span, s.Name(item.name.span, e), "extent", ()) for e in graph.declared
    )
    heading = s.Kernel(
        span=item.span, name=item.name, type_params=extents, params=params, outputs=(), requires=(), examples=(),
        statements=(),
    )  # fmt: skip
    return TilesKernel(program, heading, text, graph)


def checked(module: TileModule, span: Span) -> TileModule:
    """The module, if it keeps the rules of tile programs."""
    from .verify import VerifyError, verify_module

    try:
        verify_module(module, "text")
    except VerifyError as reason:
        raise refuse("E0616", reason.what, reason.span or span) from None
    return module


def _param(item: s.Verbatim, name: str, graph: Graph) -> s.Param:
    span = item.name.span
    what = graph.tensors.get(name) or graph.scalars[name]
    shape = tuple(s.Name(span, "_") for _ in what.shape) if isinstance(what, Tensor) else ()
    inout = isinstance(what, Tensor) and what.inout
    return s.Param(span, s.Name(span, name), s.Name(span, what.dtype.value), shape, inout)
