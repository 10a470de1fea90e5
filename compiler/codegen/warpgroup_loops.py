"""Loops of tier `wgmma`: sums of products, and steps of which one's first products run while the last one's are finished.

A loop that only adds products keeps one step's products running while it waits for those of the step before. A loop that
computes between two products (a *cascade*) is skewed: it starts the products that depend on no state (the *leads*) of a
step together with those that are added to a state (the *trails*) of the step before, whose computed operand has waited in
registers; then come the step's elementwise work and reductions, while the trails still run. A loop that goes on where
another of the same axis ended, with its states, goes on with its trails too: nothing drains between full and partial tiles.
Computing warpgroups take turns at starting their products, so that one computes while another's products run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Unskewed, find
from ..tile_ir import (
    Apply,
    Const,
    Dot,
    Expr,
    For,
    Grid,
    Let,
    Load,
    LoopAxis,
    Name,
    Stmt,
    Store,
    expressions,
    statements,
    subexpressions,
)
from .bounded_scores import weights_of_tanh
from .deal import Spread
from .loop_states import exponent, running_maxima
from .mma import RegisterOperand, Unfit
from .scalar_cuda import Code
from .simt_source import Registers, Value
from .staging import Ring, dots
from .tile_types import leaves
from .warpgroup_form import Steps, ends_tile, scalar_values, steps_of
from .warpgroup_overlap import NEXT_TASK, OF_NOTHING, RESULTS, Overlap, TaskOverlap
from .warpgroup_products import MOST_COLUMNS, NO_OPERAND, InRing

MOST_ASKED = 64  # elements that a thread has of vectors which results need, beside its sums
TURNS = 8  # the first of the named barriers at which each warpgroup waits for its turn


@dataclass(frozen=True)
class Trail:
    """A product that a step adds to a state of its loop, which becomes `rest` before: the number of the state."""

    state: int
    rest: Expr
    dot: Dot


@dataclass(frozen=True)
class Cascade:
    """The parts of a loop that computes between products."""

    leads: tuple[Let, ...]
    others: tuple[Let, ...]
    trails: tuple[Trail, ...]


class Loops(TaskOverlap):
    """The computing role's loops."""

    def _give_names(self) -> None:
        super()._give_names()
        self.going_on: dict[int, tuple[For, ...]] = {}  # loops that go on where one ended, by its identity
        for body in _bodies(self.program.body):
            for chain in _chains(body, self.program.body):
                self.going_on[id(chain[0])] = tuple(chain[1:])
        self.skewed = find(self.program.attributes, Unskewed) is None
        self.asked: dict[Load, Registers] = {}  # for results, by the loop before them
        self.done = {id(s) for chain in self.going_on.values() for s in chain}
        self.last_readers = {  # of rings, by loop
            self.staging.ring(self.staging.names[x]): id(s)
            for s in statements(self.program.body)
            if isinstance(s, For)
            for inner in statements(s.body)
            for e in (*s.yields, *expressions(inner))
            for x in _names(e)
            if x in self.staging.names
        }

    def loop(self, s: For) -> None:
        if id(s) in self.done:
            return
        loops = (s, *self.going_on.get(id(s), ()))
        if len(loops) > 1 and any(map(self._only_sums, loops)):
            raise Unfit(f"a loop over `{s.axis.name}` that does nothing but add products goes on in another")
        if self._only_sums(s):
            self.start_carries(s)
            self.sums_loop(s)
            return
        self.start_carries(s)
        with self.sums_in_parts(tuple(way for x in loops for way in steps_of(x).ways)):
            self.cascade(loops)
            self.open_results()

    def _task_indices(self, axes: tuple[LoopAxis, ...], counts: list[str]) -> None:
        """Where tasks overlap, the next one is found while the last products of the task before run."""
        super()._task_indices(axes, counts)
        self.overlap = self._overlap()
        self.keeps_indices = self.overlap is not None

    def _overlap(self) -> Overlap | None:
        """How a task's last products run with the next one's first; None where they do not."""
        (grid,) = (s for s in self.program.body if isinstance(s, Grid))
        first = next((s for s in grid.body if isinstance(s, For)), None)
        if first is None or not self.skewed or self._only_sums(first):
            return None
        loops = (first, *self.going_on.get(id(first), ()))
        parts = [self.parts(way) for s in loops for way in steps_of(s).ways]
        if not all(p.leads and p.trails for p in parts):
            return None
        return self.overlapping(loops, frozenset(t.state for t in parts[0].trails))

    def _only_sums(self, s: For) -> bool:
        """Does a loop do nothing but add products of tiles from memory to what it carries?"""
        staged = all(isinstance(x, Let) and x.name in self.staging.names for x in s.body)
        return staged and all(
            self._product_added_to(y, Name(c.name)) is not None
            for c, y in zip(s.carries, s.yields, strict=True)
        )

    def _product_added_to(self, e: Expr, x: Expr) -> Dot | None:
        match e:
            case Apply(op="add", args=(y, Dot() as d)) | Apply(op="add", args=(Dot() as d, y)) if y == x:
                return d if all(isinstance(o, Name) for o in (d.a, d.b)) else None
        return None

    def sums_loop(self, s: For) -> None:
        """Each step issues its products and then waits for those of the step before, whose slots it gives back."""
        scalars = scalar_values(self.program.body)
        if not all(ends_tile(x, s.axis, scalars) for x in (s.axis.lo, s.axis.hi) if x is not None):
            raise Unfit(f"the bounds of `{s.axis.name}` do not lie between its tiles")
        start, stop = self.range_of(s.axis)
        self.live[s.axis.name] = s.axis
        rings = [r for r in self.staging.rings if r.looped and self._read_in(s, r)]
        name = self.axis_names[s.axis.name].first
        with self.stepping(s.axis, start, stop):
            values, types = dict(self.values), dict(self.types)
            for inner in s.body:
                self.statement(inner)
            for c, y in zip(s.carries, s.yields, strict=True):
                d = self._product_added_to(y, Name(c.name))
                registers = self.values[c.name].registers
                assert d is not None
                assert registers is not None
                left, right = self.sides(self.operand(d.a), self.operand(d.b), registers.layout)
                assert isinstance(left, InRing)
                self.start(d, left, right, registers)
            running, self.groups = self.groups, []
            self.text.line(f"{self.factory('settle', f'settled({len(running)}, ())')}()")
            for r in rings:
                now, before = self.slots[r], f"{self.ring_names[r]}_before"
                self.give_back(r, before, f" and {name} != {start}")
                self.text.line(f"{before} = {now}")
            self.values, self.types = values, types
        self.ask_for_results(s)
        if self.in_task() and not self.has_next:
            self.next_task()
        self._await(0, running)
        for r in rings:
            self.give_back(r, f"{self.ring_names[r]}_before", f" and {start} < {stop}")
        del self.live[s.axis.name]

    def ask_for_results(self, s: For) -> None:
        """Vectors that results need, such as a bias, are asked for while the last products run."""
        body = next((b for b in _bodies(self.program.body) if any(x is s for x in b)), ())
        rest = body[1 + next((i for i, x in enumerate(body) if x is s), 0) :]
        if (
            self.wide.run == 1
            or self.warpgroups == max(MOST_COLUMNS)
            or any(isinstance(x, For) for x in rest)
        ):
            return
        elements, types = 0, self.types | {x.name: x.type for x in rest if isinstance(x, Let)}
        for value in (x.value for x in rest if isinstance(x, Let | Store)):
            axes = self.facts.type_of(value, types).axes
            for e in dict.fromkeys(x for x in leaves(value) if isinstance(x, Load) and x not in self.ahead):
                own = self.facts.type_of(e, types).axes
                named = any(isinstance(x, Name) for y in e.subscripts for x in subexpressions(y))
                if len(own) != 1 or not set(own) < set(axes) or named:
                    continue
                layout = self.deal.layout(axes)
                elements += layout.restrict(own).elements
                if elements <= MOST_ASKED:
                    self.load_ahead(e, layout)
        self.asked = dict(self.ahead)

    def release(self) -> None:
        super().release()
        self.ahead |= self.asked

    def _read_in(self, s: For, r: Ring) -> bool:
        return any(
            isinstance(x, Let)
            and x.name in self.staging.names
            and self.staging.ring(self.staging.names[x.name]) is r
            for x in s.body
        )

    # ------------------------------------------------------------ cascades

    def parts(self, s: For) -> Cascade:
        """Raises `Unfit` where a loop is no cascade."""
        lets = [x for x in s.body if isinstance(x, Let)]
        if len(lets) < len(s.body):
            raise Unfit("a loop in a loop, or a store in one")
        names = self.staging.names
        leads = [
            x for x in lets if isinstance(x.value, Dot) and {x.value.a, x.value.b} <= {Name(n) for n in names}
        ]
        others = [x for x in lets if x not in leads and x.name not in names]
        trails = [t for i, y in enumerate(s.yields) if (t := self._trail(i, y)) is not None]
        rests = [t.rest for t in trails] + [
            y for i, y in enumerate(s.yields) if i not in {t.state for t in trails}
        ]
        if any(dots(e) for e in (*(x.value for x in others), *rests)):
            raise Unfit("a product that depends on another of its step and is not added to a state")
        read = [
            {self.staging.ring(names[x]) for d in group for x in _names(d) if x in names}
            for group in ([x.value for x in leads], [t.dot for t in trails])
        ]
        if any(r.looped for r in read[0] & read[1]):
            raise Unfit("one tile is read by products of two steps")
        return Cascade(tuple(leads), tuple(others), tuple(trails))

    def _trail(self, number: int, y: Expr) -> Trail | None:
        match y:
            case Apply(op="add", args=(x, Dot() as d)) if not dots(x):
                return Trail(number, x, d)
        return None

    def cascade(self, loops: tuple[For, ...]) -> None:
        """All steps of loops that go on from one to the next, and the last step's trails."""
        steps = [steps_of(s) for s in loops]
        parts = [tuple(map(self.parts, s.ways)) for s in steps]
        if not parts[0][0].leads and any(s.condition is not None for s in steps):
            raise Unfit("a sum of products of which steps may be left out")
        packed = [self._declared(t.dot) for t in parts[0][0].trails]
        self.before_loop(e for s in loops for x in statements((s,)) for e in expressions(x))
        started = self.names.fresh("started")
        if self.skewed:
            self.text.line(f"{started} = i32(0)")
        for number, (s, cascades) in enumerate(zip(steps, parts, strict=True)):
            if number:
                for c, before in zip(s.loop.carries, loops[number - 1].carries, strict=True):
                    self.bind(c.name, self.values[before.name])
            for axis, full in self.segments(s.loop):
                self.segment(s, axis, full, cascades, packed, started)
        here = {id(s) for s in statements(loops)}
        for ring in [r for r in self.slots if not r.looped and self.last_readers[r] in here]:
            if ring is not self.staging.through:  # results leave there first
                self.give_back(ring)
        if self.overlap is not None:
            self.leave_for_next(loops[-1], parts[-1][0], packed, started)
        elif parts[0][0].trails and self.skewed:
            follows = self.in_task() and not self.has_next
            self.text.line(f"if {started} != 0:")
            with self.text.indented():
                self.start_trails(loops[-1], parts[-1][0], packed)
                if follows:
                    self.next_task()
                self.finish()
            if follows:
                self.text.line("else:")
                with self.text.indented():
                    self.next_task()

    def leave_for_next(self, s: For, cascade: Cascade, packed: list[tuple[str, int]], started: str) -> None:
        """The end of a task whose trails run with the next one's first products; one that saw nothing stores now."""
        o = self.overlap
        assert o is not None
        self.text.line(f"if {started} == 0:")
        self.text.line(f"    {NEXT_TASK}")
        self.text.line(f"    {OF_NOTHING}")
        self.text.line("else:")
        with self.text.indented():
            self.keep(o)
            self.text.line(f"{o.waits} = i32(1)")
        with self.lines_of(o.next_task):
            self.next_task()
        with self.lines_of(o.last):
            self.text.line(f"if {o.waits} != 0:")
            with self.text.indented():
                before = set(self.slots)
                self.start_trails(s, cascade, packed)
                for ring in set(self.slots) - before:  # nobody waits for these slots any more
                    self.slots.pop(ring)
                self.finish()
                self.text.line(RESULTS)

    def _declared(self, d: Dot) -> tuple[str, int]:
        """Registers for the computed operand of a trail."""
        array, count = self.names.fresh("packed"), self.packed_count(d)
        self.waiting_operand(array, count)
        return array, count

    def segments(self, s: For) -> Iterator[tuple[LoopAxis, bool]]:
        """The parts of a loop that visit whole tiles, and those that do not."""
        a = s.axis
        assert a.tile is not None
        if any(x.name == "full" for x in s.attributes) or (
            a.lo is None and a.hi is None and not self.has_tail(a, a.tile)
        ):
            yield a, True
        elif a.lo is not None or a.hi is not None:
            yield a, False
        else:
            size = Const(a.tile, DType.I64)
            whole = Apply("mul", (Apply("floordiv", (a.extent, size)), size))
            yield replace(a, hi=whole), True
            yield replace(a, lo=whole, hi=a.extent), False

    def segment(
        self,
        steps: Steps,
        axis: LoopAxis,
        full: bool,
        cascades: tuple[Cascade, ...],
        packed: list[tuple[str, int]],
        started: str,
    ) -> None:
        """Steps over one range of tiles; the first of all starts no trails."""
        start, stop = self.range_of(axis)
        first = self.axis_names[axis.name].first
        own = {id(way): cascade for way, cascade in zip(steps.ways, cascades, strict=True)}
        self.live[axis.name] = axis
        self.full |= {axis.name} if full else set()

        def begin(way: For) -> None:
            self.step(replace(way, axis=axis), own[id(way)], packed, self.overlap is not None, is_first=True)
            self.text.line(f"{started} = i32(1)")

        def go_on(way: For) -> None:
            s, cascade = replace(way, axis=axis), own[id(way)]
            self.step(s, cascade, packed, starts_trails=self.skewed)
            if not self.skewed:
                self.start_trails(s, cascade, packed)
                self.finish()

        self.text.line(f"{first} = i32({start})")
        if self.skewed:
            until = "if" if steps.condition is None else "while"
            self.text.line(f"{until} {started} == 0 and {first} < {stop}:")
            with self.text.indented():
                self.decided(steps, begin)
                self.text.line(f"{first} = opaque(i32({first} + {axis.tile}))")
        self.text.line(f"while {first} < {stop}:")
        with self.text.indented():
            self.decided(steps, go_on)
            self.text.line(f"{first} = opaque(i32({first} + {axis.tile}))")
        self.full -= {axis.name} if full else set()
        del self.live[axis.name]

    def agreed(self, condition: Code) -> str:
        return f"uniform(i32({condition.operand}))"

    def step(
        self,
        s: For,
        cascade: Cascade,
        packed: list[tuple[str, int]],
        starts_trails: bool,
        is_first: bool = False,
    ) -> None:
        """One step: its leads and the last one's trails start, then all between, then the trails' operands are packed. The
        first of a task starts the trails of the task before, whose results follow."""
        values, types, ahead = dict(self.values), dict(self.types), dict(self.ahead)
        for x in s.body:
            if isinstance(x, Let) and x.name in self.staging.names:
                self.let(x)
        takes_turns = starts_trails and self.warpgroups > 1 and bool(cascade.leads) and bool(cascade.trails)
        if takes_turns:
            self.text.line(f"meet({TURNS} + warpgroup, 256)")
        ends_task = is_first and starts_trails
        if ends_task:
            self.start_last_trails(s, cascade, packed)
        for lead in cascade.leads:
            self.start_lead(lead)
        if starts_trails and not is_first:
            self.start_trails(s, cascade, packed)
        if takes_turns:
            self.text.line(f"announce({TURNS} + {self._next_warpgroup()}, 256)")
        reads = [x for x in s.body if isinstance(x, Let) and self.is_read(x)]
        for x in reads:
            self.fetch_tile(x)
        self.hand_back(reads)
        self.shifts = {}
        if s.axis.name not in self.full:
            for spread in dict.fromkeys(
                x for lead in cascade.leads for x in self._spreads(lead, s.axis.name)
            ):
                self.name_limits(s.axis.name, spread)
        for other in cascade.others:
            self.ask_ahead(other)
        if ends_task:
            self.end_task_before({array for array, _ in packed})
        for x in reads:
            self.unpack(x)
        weighing = weights_of_tanh(s)
        for other in cascade.others:
            made = other if s.axis.name in self.full else self.with_masks(other, s)
            value = self.with_affine(self.with_shifts(made.value), made.type.axes)
            self.statement(replace(made, value=value))
            self.release()
            if exponent(other.value)[1] is not None or other.name in weighing:
                self.zero_beyond(other, s.axis.name)
        factors = {f for m in running_maxima(s) for f in m.factors}
        moved = [t for t in cascade.trails if _factor(t.rest, s.carries[t.state].name) in factors]
        rests = {t.state: Name(s.carries[t.state].name) if t in moved else t.rest for t in cascade.trails}
        yields = tuple(self.with_shifts(rests.get(i, y)) for i, y in enumerate(s.yields))
        self.yields(replace(s, yields=yields))
        self.move_on(s, moved)
        for t, (array, _) in zip(cascade.trails, packed, strict=True):
            self.finish({array})
            left, _ = self.sides(self.operand(t.dot.a), self.operand(t.dot.b), self._state(s, t).layout)
            if not isinstance(left, RegisterOperand):
                raise Unfit("a sum of products of tiles from memory in a loop that computes")
            self.pack(t.dot, left, array)
        self.finish()
        self.limits, self.existing_words, self.gaps = {}, {}, {}
        self.zeroed, self.lowest = set(), set()
        self.values, self.types, self.ahead = values, types, ahead

    def start_last_trails(self, s: For, cascade: Cascade, packed: list[tuple[str, int]]) -> None:
        """Those of the task before, if there are any."""
        o = self.overlap
        assert o is not None
        self.text.line(f"if {o.waits} != 0:")
        with self.text.indented():
            before = set(self.slots)
            self.start_trails(s, cascade, packed)
            self.taken_if_waits |= set(self.slots) - before

    def end_task_before(self, waiting: set[str]) -> None:
        """The next task is found while the last products of the task before run, whose results follow."""
        assert self.overlap is not None
        self.text.line(NEXT_TASK)
        self.finish(waiting)
        self.text.line(f"if {self.overlap.waits} != 0:")
        self.text.line(f"    {RESULTS}")
        self.restart()

    def ask_ahead(self, s: Let) -> None:
        """What a step reads from memory for each element, asked for while its products run."""
        layout = self.deal.layout(s.type.axes)
        for x in dict.fromkeys(x for x in leaves(s.value) if isinstance(x, Load)):
            axes = self.facts.type_of(x, self.types).axes
            if self.wide.run > 1 and axes and set(axes) <= set(s.type.axes):
                self.load_ahead(x, layout)

    def _next_warpgroup(self) -> str:
        last = self.warpgroups - 1
        return "(warpgroup ^ 1)" if last == 1 else f"(warpgroup + 1 if warpgroup < {last} else 0)"

    def move_on(self, s: For, trails: list[Trail]) -> None:
        """Multiply states by their factors where some row of a warp has one that is not 1."""
        states = [self._state(s, t) for t in trails]
        found = [self.values[_factor(t.rest, s.carries[t.state].name)].registers for t in trails]
        if not trails:
            return
        self.finish({r.array for r in states})
        tests = dict.fromkeys(
            f"({r.array}[{i}] != f32(1.0))" for r in found if r for i in range(r.layout.elements)
        )
        self.text.line(f"if any_lane(i32({' | '.join(tests)})) != 0:")
        with self.text.indented():
            for t, registers in zip(trails, states, strict=True):
                self.map(registers, s.carries[t.state].type.dtype, t.rest)

    def _spreads(self, lead: Let, axis: str) -> list[Spread]:
        return [self.deal.layout(lead.type.axes).spread(axis)] if axis in lead.type.axes else []

    def start_lead(self, lead: Let) -> None:
        """A product of tiles from memory, in registers of its own."""
        assert isinstance(lead.value, Dot)
        registers = self.registers(lead.name, lead.type)
        left, right = self.sides(self.operand(lead.value.a), self.operand(lead.value.b), registers.layout)
        assert isinstance(left, InRing)
        self.start(lead.value, left, right, registers, fresh=True)
        self.bind(lead.name, Value(lead.type, registers=registers))

    def start_trails(self, s: For, cascade: Cascade, packed: list[tuple[str, int]]) -> None:
        for t, array in zip(cascade.trails, packed, strict=True):
            right = next((self.boxes[x] for x in _names(t.dot) if x in self.boxes), None)
            if right is None:  # where tasks overlap, nothing has said so before
                raise Unfit(NO_OPERAND)
            self.start(t.dot, array, right, self._state(s, t))

    def _state(self, s: For, t: Trail) -> Registers:
        registers = self.values[s.carries[t.state].name].registers
        assert registers is not None
        return registers


def _factor(e: Expr, state: str) -> str:
    """The name of what a state is multiplied by; empty where e is no such product."""
    match e:
        case Apply(op="mul", args=(Name(a), Name(b))) if state in (a, b):
            return b if a == state else a
    return ""


def _names(e: Expr) -> list[str]:
    return [x.name for x in subexpressions(e) if isinstance(x, Name)]


def _bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    yield body
    yield from (s.body for s in statements(body) if isinstance(s, Grid | For))


def _chains(body: tuple[Stmt, ...], program: tuple[Stmt, ...]) -> Iterator[list[For]]:
    """Loops in a row that each go on with the states of the one before, which nothing else reads."""
    reads = [x for s in statements(program) for e in expressions(s) for x in _names(e)]
    chain: list[For] = []
    for s in (*body, None):
        if isinstance(s, For) and chain and _goes_on(s, chain[-1], reads):
            chain.append(s)
            continue
        if chain:
            yield chain
        chain = [s] if isinstance(s, For) else []


def _goes_on(s: For, before: For, reads: list[str]) -> bool:
    same = s.axis.name == before.axis.name and s.axis.tile == before.axis.tile and not s.reverse
    inits = [c.init for c in s.carries]
    own = [
        x
        for e in (
            *before.domain,
            *before.yields,
            *(e for y in statements(before.body) for e in expressions(y)),
        )
        for x in _names(e)
    ]
    only = all(reads.count(c.name) == own.count(c.name) + 1 for c in before.carries)
    return same and only and inits == [Name(c.name) for c in before.carries]
