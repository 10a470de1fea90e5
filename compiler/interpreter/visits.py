"""Which tiles the loops of a program visit: never (empty), whole and without a mask (full), or else (partial).

Only bounds are evaluated, so this costs little at any size; grid axes that no bound mentions are counted, not walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

import numpy as np

from ...dsl.records import dataclass
from ..tile_ir import (
    AxisIndex,
    Expr,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Stmt,
    TileModule,
    TileProgram,
    expressions,
    statements,
    subexpressions,
)
from .arithmetic import Array, quiet
from .elements import NUMPY
from .tile import Memory, Tile, _Run, bind_extents


@dataclass
class Visits:
    """Tiles of the loops over one axis, over all iterations of a program's grid. A tile is as long as the loop's step.

    `asked` counts those of the visited tiles that are asked at run time whether a condition on tensors excludes all of them.
    """

    program: str
    axis: str
    empty: int = 0
    full: int = 0
    partial: int = 0
    asked: int = 0

    @property
    def total(self) -> int:
        return self.empty + self.full + self.partial


def visits(
    module: TileModule, sizes: Mapping[str, int], tensors: Mapping[str, Array] | None = None
) -> list[Visits]:
    """The loops whose bounds cut tiles off, for given extents. `tensors` has what bounds read (lengths, say).

    Raises KeyError, naming the tensor, where a bound reads one that is not given.
    """
    extents = {**bind_extents(module, {}, dict(sizes)), **sizes}
    found: list[Visits] = []
    with quiet():
        for program in module.programs:
            counter = _Counter(program, _memory(program, tensors or {}), extents, {}, True, False)
            counter.body(program.body)
            found += counter.found.values()
    return found


def _memory(program: TileProgram, tensors: Mapping[str, Array]) -> dict[str, Memory]:
    given = {p: np.asarray(tensors[p.name]) for p in program.params if p.name in tensors}
    return {p.name: Memory(p, data.astype(NUMPY[p.dtype]), None) for p, data in given.items()}


@dataclass
class _Counter(_Run):
    """Walks grids and evaluates what bounds of their loops read."""

    found: dict[str, Visits] = field(default_factory=dict)
    weight: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.needed = _read_by_bounds(self.program)
        self.mentioned = {
            e.axis
            for s in statements(self.program.body)
            for x in (*_bounds(s), *(expressions(s) if isinstance(s, Let) and s.name in self.needed else ()))
            for e in subexpressions(x)
            if isinstance(e, AxisIndex)
        }

    def body(self, body: tuple[Stmt, ...]) -> None:
        covered: dict[str, int] = {}
        for s in body:
            match s:
                case Let() if s.name in self.needed:
                    self.values[s.name] = self.typed(s.value, s.type)
                case Grid():
                    self.run_grid(s)
                case For() if s.axis.lo is not None or s.axis.hi is not None:
                    covered[s.axis.name] = covered.get(s.axis.name, 0) + self.count(s)
        for axis, visited in covered.items():
            loop = next(s for s in body if isinstance(s, For) and s.axis.name == axis)
            all_tiles = -(-self.scalar(loop.axis.extent) // (loop.axis.tile or 1))
            self.found[axis].empty += self.weight * (all_tiles - visited)

    def run_grid(self, g: Grid) -> None:
        walked = tuple(a for a in g.axes if a.name in self.mentioned)
        for a in g.axes:
            if a not in walked:
                self.weight *= self.stand_at_first(a)
        for _ in self.points(walked):
            self.body(g.body)

    def stand_at_first(self, a: LoopAxis) -> int:
        """Open an axis at its first tile; answers how many tiles it has."""
        count = 0
        for _ in self.tiles(a):
            count += 1
        self.first[a.name], self.lanes[a.name] = 0, np.arange(a.tile or 1) if a.tile else np.asarray(0)
        return count

    def count(self, loop: For) -> int:
        """Count the tiles that one loop visits."""
        seen = self.found.setdefault(loop.axis.name, Visits(self.program.name, loop.axis.name))
        masked = bool(loop.domain) and not any(a.name == "full" for a in loop.attributes)
        lanes = [self.lanes[loop.axis.name].size for _ in self.tiles(loop.axis)]
        whole = 0 if masked else sum(n == (loop.axis.tile or 1) for n in lanes)
        visited = len(lanes)
        seen.full += self.weight * whole
        seen.partial += self.weight * (visited - whole)
        if any(isinstance(s, For) and s.carries and s.axis.hi is not None for s in loop.body):
            seen.asked += self.weight * visited
        return visited

    def load(self, e: Load, at: list[Tile], guard: Tile | None) -> Tile:
        if e.tensor not in self.memory:
            raise KeyError(e.tensor)
        return super().load(e, at, guard)


def _bounds(s: Stmt) -> tuple[Expr, ...]:
    return tuple(b for b in (s.axis.lo, s.axis.hi) if b is not None) if isinstance(s, For) else ()


def _read_by_bounds(program: TileProgram) -> set[str]:
    """The names that bounds of loops read, themselves or through other names."""
    values = {s.name: s.value for s in statements(program.body) if isinstance(s, Let)}
    needed: set[str] = set()
    waiting = list(_names(b for s in statements(program.body) for b in _bounds(s)))
    while waiting:
        name = waiting.pop()
        if name in values and name not in needed:
            needed.add(name)
            waiting += _names([values[name]])
    return needed


def _names(roots: Iterable[Expr]) -> list[str]:
    return [e.name for x in roots for e in subexpressions(x) if isinstance(e, Name)]
