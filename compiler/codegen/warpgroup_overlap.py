"""Tasks of tier `wgmma` that overlap: a task's last products run with the next one's first.

A skewed loop (`warpgroup_loops.py`) ends with products whose computed operand waits in registers. Alone, they would leave
the matrix units idle while the task's results are made and while the next task's first scores are waited for. So they wait:
the next task's first step starts them and then its own first products. While they run the task after it is found, and while
its own run the results of the task before leave.

Results are emitted once and stand in several places: in the first step of each loop and after the last task. What they need
of a task, its indices and small states, is kept in variables of its own. A task that sees nothing stores what its states
start with, by code of its own: where it shared that of the others, the assembler kept all sums of heads with 256 columns in
local memory. Products are started and waited for in one piece of code without a choice between, or the assembler waits for
each by itself (C7514); started under a condition before it they may be. The next task's indices are found in several places
too, and warps agree on them again at the task's end, or the assembler takes what depends on them for different in each
thread and moves every descriptor of a product from a thread's registers to the warp's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field, replace

from ...dsl.records import dataclass
from ..layouts import Overlapping, find
from ..tile_ir import Const, Expr, Fill, For, Grid, Let, Stmt, Store, expressions, statements
from .bounded_scores import weights_of_tanh
from .simt import names_in
from .simt_source import NOWHERE, Value
from .staging import Ring
from .warpgroup_form import steps_of
from .warpgroup_reads import Reads

RESULTS = "# results of the task before"
NEXT_TASK = "# the next task"
OF_NOTHING = "# results of a task that saw nothing"
MOST_SUMS = 64
"""Registers a thread that sums of products take where tasks overlap unless a schedule states it."""
LAST_PRODUCTS = "# the last products, and results"


@dataclass
class Overlap:
    """What a kernel with tasks that overlap keeps of the task before.

    `loops`: those in a row that its products come from; `added`: the numbers of the states that products are added to;
    `rest`: the statements that make results; `lets`: scalars that these need again; `waits`: the variable that says whether
    products wait; `kept`: variables for what results need of indices, by those of the task itself; `states`: for
    what they need of small states, by number. The others are lines for the places with the marks of their names.
    """

    loops: tuple[For, ...]
    added: frozenset[int]
    rest: tuple[Stmt, ...]
    lets: tuple[Let, ...]
    waits: str
    kept: dict[str, str] = field(default_factory=dict)
    states: dict[int, Value] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    of_nothing: list[str] = field(default_factory=list)
    next_task: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)


class TaskOverlap(Reads):
    """What loops and results of the computing role have in common where tasks overlap."""

    def _give_names(self) -> None:
        super()._give_names()
        self.overlap: Overlap | None = None
        self.taken_if_waits: set[Ring] = set()
        self.outside: tuple[list[str], int] | None = None  # lines and depth while results are emitted

    def overlaps(self) -> bool:
        """May tasks of this program overlap? They come to one block after the other, and it is known early which. Threads
        that look at each index by themselves have no registers for that where they also ask whether a step is left out."""
        stated = find(self.program.attributes, Overlapping)
        asks = self.wide.run == 1 and any(steps_of(s).condition is not None for s in self._for_loops())
        able = self.order() != "longest" and self.looks_ahead() and not asks
        return able and (self._pays() if stated is None else stated.tasks == "together")

    def _pays(self) -> bool:
        """Is it faster, as far as measured (`docs/hopper.md`)? Not where registers are scarce, or a step does more than a
        softmax: where sums take more of them than those of 128 columns, tiles are read that are no operand, or tanh bounds
        the scores."""
        loops = self._for_loops()
        sums = [
            sum(self.deal.layout(c.type.axes).elements for c in s.carries if len(c.type.axes) > 1)
            for s in loops
        ]
        plain = not any(r.parts for r in self.staging.rings) and not any(map(weights_of_tanh, loops))
        return plain and max(sums, default=0) <= MOST_SUMS

    def _for_loops(self) -> list[For]:
        return [s for s in statements(self.program.body) if isinstance(s, For)]

    def overlapping(self, loops: tuple[For, ...], added: frozenset[int]) -> Overlap | None:
        """The plan for loops that end with products added to these states; None where results cannot wait."""
        (grid,) = (s for s in self.program.body if isinstance(s, Grid))
        body = grid.body
        at = next((i for i, s in enumerate(body) if s is loops[-1]), None)
        # results that leave through the slots of `q` keep one until the next task that sees something, and others between
        # would wait for it
        if at is None or not self.overlaps() or self.staging.through is not None:
            return None
        before, rest = body[:at], body[at + 1 :]
        if any(isinstance(s, For) and not any(s is x for x in loops) for s in body):
            return None
        if not added or not all(_is_constant(loops[0].carries[i].init) for i in added):
            return None
        lets = self._scalars_again(before, rest, {c.name for s in loops for c in s.carries})
        if lets is None or not all(isinstance(s, Let | Store) for s in rest):
            return None
        return Overlap(loops, added, rest, lets, self.names.fresh("waits"))

    def _scalars_again(
        self, before: Sequence[Stmt], rest: Sequence[Stmt], states: set[str]
    ) -> tuple[Let, ...] | None:
        """The scalars from before the loops that results need; None where they need a tile from there."""
        own = {s.name for s in rest if isinstance(s, Let)}
        wanted = {n for s in rest for e in expressions(s) for n in names_in(e)} - own - states
        if any(n in self.staging.names for n in own):
            return None
        found: list[Let] = []
        for s in reversed(before):
            if isinstance(s, Let) and s.name in wanted:
                if s.type.axes:
                    return None
                found.insert(0, s)
                wanted = (wanted | set(names_in(s.value))) - {s.name}
        return tuple(found) if not wanted else None

    # ------------------------------------------------------------ states

    def start_carries(self, s: For) -> None:
        """States that products are added to belong to the task before until its results are made."""
        o = self.overlap
        if o is None or s is not o.loops[0]:
            super().start_carries(s)
            return
        with self.ahead_of_tasks():
            self.text.line(f"{o.waits} = i32(0)")
            super().start_carries(
                replace(s, carries=tuple(c for i, c in enumerate(s.carries) if i in o.added))
            )
            self._declare_kept(o)
        super().start_carries(
            replace(s, carries=tuple(c for i, c in enumerate(s.carries) if i not in o.added))
        )

    def _declare_kept(self, o: Overlap) -> None:
        """Variables for what results need of the task before."""
        for a in self.grid_axes:
            name = self._index_name(a)
            o.kept[name] = self.names.fresh(f"last_{name}")
            self.text.line(f"{o.kept[name]} = i32(0)")
        read = {n for s in o.rest for e in expressions(s) for n in names_in(e)}
        for i, c in enumerate(o.loops[-1].carries):
            if i in o.added or c.name not in read:
                continue
            zero = Const(0, c.type.dtype)
            if not c.type.axes:
                o.states[i] = Value(c.type, scalar=self.assign(f"last {c.name}", self.emit(zero, NOWHERE)))
                continue
            registers = self.registers(f"last {c.name}", c.type)
            self.compute(registers, c.type.dtype, zero)
            o.states[i] = Value(c.type, registers=registers)

    def keep(self, o: Overlap) -> None:
        """Keep what results need, for the next task overwrites it."""
        for name, kept in o.kept.items():
            self.text.line(f"{kept} = i32({name})")
        for i, kept_state in o.states.items():
            now = self.values[o.loops[-1].carries[i].name]
            if kept_state.registers is None or now.registers is None:
                self.text.line(f"{kept_state.scalar} = {now.scalar}")
                continue
            element = self.names.fresh("i")
            self.text.line(f"for {element} in range({now.registers.layout.elements}):")
            self.text.line(f"    {kept_state.registers.array}[{element}] = {now.registers.array}[{element}]")

    def restart(self) -> None:
        """States that products are added to, as a task starts with them."""
        o = self.overlap
        assert o is not None
        for i in sorted(o.added):
            c = o.loops[0].carries[i]
            registers = self.values[c.name].registers
            assert registers is not None
            self.compute(registers, c.type.dtype, c.init)

    def waiting_operand(self, array: str, count: int) -> None:
        """Registers for a computed operand; where tasks overlap, it outlives one."""
        with nullcontext() if self.overlap is None else self.ahead_of_tasks():
            self.text.line(f"{array} = registers_i32({count})")

    # ------------------------------------------------------------ slots

    def give_back(self, ring: Ring, slot: str = "", condition: str = "") -> None:
        if ring in self.taken_if_waits:
            assert self.overlap is not None
            self.taken_if_waits.discard(ring)
            condition += f" and {self.overlap.waits} != 0"
        super().give_back(ring, slot, condition)

    # ------------------------------------------------------------ results

    def open_results(self) -> None:
        """What is emitted from here to the end of the task makes results of what was kept."""
        o = self.overlap
        if o is None:
            return
        with self.lines_of(o.of_nothing):
            self._results_of_nothing(o)
        self.outside = (self.text.out, self.text.depth)
        self.text.out, self.text.depth = [], 0
        self.own_names = self.axis_names
        self.axis_names = dict(self.axis_names)
        for a in self.grid_axes:
            names = self.axis_names[a.name]
            kept = f"i64({o.kept[self._index_name(a)]})"
            self.axis_names[a.name] = replace(names, **{"index" if a.tile is None else "first": kept})
        for i, value in o.states.items():
            for s in o.loops:
                self.bind(s.carries[i].name, value)
        for x in o.lets:
            self.let(x)

    def _results_of_nothing(self, o: Overlap) -> None:
        """Results of what states start with."""
        values, types = dict(self.values), dict(self.types)
        for i in sorted(o.added):
            c = o.loops[0].carries[i]
            registers = self.registers(f"{c.name} of nothing", c.type)
            self.compute(registers, c.type.dtype, c.init)
            self.bind(o.loops[-1].carries[i].name, Value(c.type, registers=registers))
        for x in o.rest:
            self.statement(x)
            self.release()
        self.after_results()
        self.values, self.types = values, types

    def after_results(self) -> None:
        """Give back what results went through."""

    @contextmanager
    def lines_of(self, lines: list[str]) -> Iterator[None]:
        """What is emitted goes there, for another place."""
        out, depth = self.text.out, self.text.depth
        self.text.out, self.text.depth = lines, 0
        yield
        self.text.out, self.text.depth = out, depth

    def close_results(self) -> None:
        """The end of the task."""
        if self.overlap is None or self.outside is None:
            return
        self.overlap.results = self.text.out
        self.text.out, self.text.depth = self.outside
        self.outside, self.axis_names = None, self.own_names

    @contextmanager
    def tasks(self, count: str) -> Iterator[None]:
        with super().tasks(count):
            yield
        o = self.overlap
        if o is not None:
            self.text.line(LAST_PRODUCTS)
            last = _placed(o.last, {RESULTS: o.results})
            texts = {
                RESULTS: o.results,
                OF_NOTHING: o.of_nothing,
                NEXT_TASK: o.next_task,
                LAST_PRODUCTS: last,
            }
            self.text.out[:] = _placed(self.text.out, texts)


def _placed(lines: Sequence[str], texts: dict[str, list[str]]) -> list[str]:
    """Lines with what belongs to the marked places after the marks."""
    out: list[str] = []
    for x in lines:
        out.append(x)
        mark = x.lstrip()
        if mark in texts:
            space = x[: len(x) - len(mark)]
            out += [space + y for y in texts[mark]]
    return out


def _is_constant(e: Expr) -> bool:
    return _is_constant(e.value) if isinstance(e, Fill) else isinstance(e, Const)
