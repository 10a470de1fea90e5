"""thin"""
from __future__ import annotations
from ..dsl.diagnostics import Diagnostics
from .tensor_ir import Check, Graph
def bounds_checks(graph: Graph, sink: Diagnostics) -> list[Check]:
    return []
