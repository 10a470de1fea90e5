"""Names that all functions of a file of Numba source see: apart from `cpu`, since running stored code needs only them."""

from __future__ import annotations

from ..tile_ir import TileModule
from .numba_text import Names


class ModuleNames:
    """Constants for static extents, by extent and value, and the programs' functions, by program name."""

    def __init__(self, module: TileModule) -> None:
        names = Names()
        pairs = dict.fromkeys(pair for p in module.programs for pair in p.statics)
        self.constants = {pair: names.new(pair[0]) for pair in pairs}
        self.functions = {p.name: names.new(p.name) for p in module.programs}
        self.names = names


def function_names(module: TileModule) -> dict[str, str]:
    """The name of each program's function in the generated source, by program name."""
    return ModuleNames(module).functions
