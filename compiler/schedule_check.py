"""Legality of schedules: every line is checked against the kernel and the target before anything is generated.

Names are the text's: an axis, or `statement.axis` where the same name stands for several axes. Diagnostics point into the
schedule's text where it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..dsl.diagnostics import Diagnostics, TileError, refuse
from ..dsl.suggest import did_you_mean
from .passes.preserve import always_stored
from .region import AxisPlan, Region, reductions
from .schedule import Schedule, stem
from .spelling import spell
from .target import Target
from .tensor_ir import Const, Definition, Extent, Graph, Node, walk

TIERS = {False: ("loops", "matrix"), True: ("simt", "mma", "wgmma")}
"""The tiers whose code is generated, by whether the target is a GPU."""


def check_schedule(s: Schedule, written: Graph, graph: Graph, target: Target) -> Schedule:
    """The schedule with every name of the text resolved to the canonical graph's. Raises `TileError`, all that is wrong at
    once: E0607 the tier, E0610 axes, E0618 statements to fuse or keep and tensors to stage, E0619 static axes, E0620 another
    kernel's schedule.
    """
    work = _Check(s, written, graph, target)
    work.kernel()
    work.groups()
    work.tier()
    work.gpu_lines()
    work.splits()
    work.stages()
    static = tuple(dict.fromkeys(a for name in s.static for a in work.static(name)))
    tiles = tuple((work.tile(key), size) for key, size in s.tiles)
    work.sink.check()
    return replace(s, static=static, tiles=tiles)


def refuse_tiles(asked: Schedule, message: str) -> TileError:
    """Tiles that a schedule states need more registers than a thread has: E0912 at the line of the largest."""
    axis, size = max(asked.tiles, key=lambda t: t[1])
    return refuse(
        "E0912", message, asked.spans.get(f"tile {axis}"),
        note="what does not fit would be kept in memory and read again at each use",
        help=f"choose a smaller tile: tile {axis} by {max(1, size // 2)}",
    )  # fmt: skip


@contextmanager
def tiles_placed(asked: Schedule) -> Iterator[None]:
    """What does not fit registers or shared memory is refused where the schedule states its largest tile, if it does."""
    try:
        yield
    except TileError as reason:
        axis = max(asked.tiles, key=lambda t: t[1])[0] if asked.tiles else ""
        place = asked.spans.get(f"tile {axis}")
        raise TileError(
            [
                replace(d, span=place) if d.span is None and d.code in ("E0912", "E0913") else d
                for d in reason.diagnostics
            ]
        ) from reason


class _Check:
    def __init__(self, s: Schedule, written: Graph, graph: Graph, target: Target) -> None:
        self.s, self.graph, self.target = s, graph, target
        self.written = written
        self.sink = Diagnostics()
        self.stored = always_stored(graph)
        self.statements = {d.name: d for d in graph.definitions}

    def error(
        self, code: str, message: str, what: str, help: str | None = None, note: str | None = None
    ) -> None:
        self.sink.error(code, message, self.s.spans.get(what), note, help)

    def kernel(self) -> None:
        if self.s.kernel != self.graph.name:
            raise refuse(
                "E0620", f"the schedule `{self.s.name}` is for `{self.s.kernel}`, not for `{self.graph.name}`",
                self.s.spans.get("kernel"),
            )  # fmt: skip

    def tier(self) -> None:
        tiers, wanted = TIERS[self.target.is_cuda], self.s.tier
        if wanted is None or wanted in tiers:
            return
        what = f"the tier `{wanted}` does not exist on {self.target.name}"
        self.error("E0607", what, "tier", help=f"there is {', '.join(tiers)}")

    def gpu_lines(self) -> None:
        """Lines about warpgroups and copies have no meaning on a CPU."""
        given = {"warpgroups": self.s.warpgroups, "skew": self.s.skew, "order": self.s.order}
        given |= {f"stage {t}": n for t, n in self.s.stages}
        for line in (k for k, x in given.items() if x and not self.target.is_cuda):
            self.error(
                "E0607", f"`{line}` is for a GPU, not for {self.target.name}", line, help="leave the line out"
            )

    def splits(self) -> None:
        for axis, _ in self.s.splits:
            if not alike(axis, self.graph.axes) and stem(axis) not in self.graph.axes:
                self.unknown_axis(axis, f"split {axis}", tuple(self.graph.axes), f"`{self.graph.name}`")

    def stages(self) -> None:
        for name, _ in self.s.stages:
            if name not in self.graph.tensors and name not in self.statements:
                help = did_you_mean(name, self.graph.tensors) or f"tensors: {', '.join(self.graph.tensors)}"
                self.error("E0618", f"`stage {name}`: there is no tensor `{name}`", f"stage {name}", help)

    # ------------------------------------------------------------ what is fused

    def groups(self) -> None:
        for word, names in (("fuse", self.s.fused), ("keep", self.s.keep)):
            for name in names:
                self.intermediate(word, name)
        for name in self.s.fused:
            if name in self.s.keep:
                self.error(
                    "E0618",
                    f"`{name}` is both fused and kept",
                    f"keep {name}",
                    help="name it in one of the lines",
                )

    def intermediate(self, word: str, name: str) -> None:
        what = f"{word} {name}"
        if name in self.stored:
            self.error("E0618", f"`{name}` is a result of the kernel, which is stored in any case", what,
                       help="`fuse` and `keep` name intermediates")  # fmt: skip
        elif name not in self.statements:
            known = [n for n in self.statements if n not in self.stored]
            inputs = name in self.graph.tensors or name in self.graph.scalars
            message = f"`{name}` is a parameter" if inputs else f"there is no statement `{name}`"
            help = (
                did_you_mean(name, known)
                or f"intermediates of `{self.graph.name}`: {', '.join(known) or 'none'}"
            )
            note = (
                None if inputs else "a statement that no result needs is left out before schedules are read"
            )
            self.error("E0618", f"`{word} {name}`: {message}", what, help, note)

    # ------------------------------------------------------------ axes

    def static(self, name: str) -> list[str]:
        """The axes of a name; their extents must be made of extents, since only those are known when code is made."""
        axes = alike(name, self.graph.axes)
        if not axes:
            self.unknown_axis(name, f"static {name}", self.graph.axes, f"`{self.graph.name}`")
        return [a for a in axes if self.can_be_static(name, self.graph.axes[a])]

    def can_be_static(self, name: str, extent: Node) -> bool:
        leaves = [n for n in walk([extent]) if not n.args]
        if any(isinstance(n, Extent) for n in leaves) and all(isinstance(n, Extent | Const) for n in leaves):
            return True
        number = all(isinstance(n, Const) for n in leaves)
        why = "a number of the text" if number else "not known when the code is made"
        self.error("E0619", f"`{name}` cannot be static: its extent, `{spell(extent)}`, is {why}", f"static {name}",
                   help="static axes are those whose extents the shapes give")  # fmt: skip
        return False

    def tile(self, key: str) -> str:
        statement, dot, name = key.rpartition(".")
        what = f"tile {key}"
        if not dot:
            return self.axis(name, what, self.graph.axes) or key
        if statement in self.statements:
            axis = axis_of(self.written, self.graph, statement, name)
            if axis is None:
                axis = self.axis(name, what, own_axes(self.statements[statement]), statement)
            return f"{statement}.{axis or name}"
        if not _joined(statement, tuple(self.statements)):
            help = did_you_mean(statement, self.statements) or f"statements: {', '.join(self.statements)}"
            self.error("E0610", f"`{key}`: there is no statement `{statement}`", what, help)
        return key

    def axis(self, name: str, what: str, among: Iterable[str], statement: str | None = None) -> str | None:
        """The axis that a name of the text stands for; axes of one name and different extents are told apart by numbers."""
        known = tuple(among)
        found = alike(name, known)
        if statement is None and len({self.graph.axes[a] for a in found}) > 1:
            owners = [f"`{d.name}.{name}`" for d in self.statements.values() if {*found} & {*own_axes(d)}]
            self.error(
                "E0610", f"`{name}` is the name of several axes", what, help=f"say which: {', '.join(owners)}"
            )
            return None
        if found:
            return name if name in found else found[0]
        if stem(name) in self.graph.axes:
            return name  # of what is computed within: known once that is decided
        self.unknown_axis(name, what, known, f"`{statement or self.graph.name}`")
        return None

    def unknown_axis(self, name: str, what: str, known: Collection[str], owner: str) -> None:
        help = did_you_mean(name, known) or f"its axes are {', '.join(known) or 'none'}"
        self.error("E0610", f"`{name}` is no axis of {owner}", what, help)


def alike(name: str, axes: Iterable[str]) -> tuple[str, ...]:
    """The axes that a name of the text may stand for."""
    return tuple(a for a in axes if name in (a, stem(a)))


def axis_of(written: Graph, graph: Graph, statement: str, name: str) -> str | None:
    """The canonical axis that a statement's text calls `name`. Canonicalize renames: axes on the left keep their place, an
    axis of a reduction is known by its extent."""
    before, after = (next((d for d in g.definitions if d.name == statement), None) for g in (written, graph))
    if before is None or after is None:
        return None
    left = alike(name, before.axes)
    if left:
        return after.axes[before.axes.index(left[0])]
    inner = alike(name, own_axes(before))
    if not inner:
        return None
    extent = written.axes[inner[0]]
    found = [a for a in own_axes(after) if a not in after.axes and graph.axes[a] is extent]
    return name if name in found else found[0] if found else None


def key_of(written: Graph, graph: Graph, region: Region, axis: str) -> str:
    """How a schedule speaks of an axis of one launch: by a statement in whose text it has a name, if there is one."""
    for statement in region.statements:
        d = next((d for d in written.definitions if d.name == statement), None)
        for name in dict.fromkeys(stem(a) for a in own_axes(d)) if d is not None else ():
            if axis_of(written, graph, statement, name) == axis:
                return f"{statement}.{name}"
    return f"{region.name}.{axis}"


def own_axes(d: Definition) -> tuple[str, ...]:
    """The axes that a statement names: those on its left and those its reductions run over."""
    inner = (a for r in reductions([d.value]) for a in r.bound)
    return tuple(dict.fromkeys((*d.axes, *inner)))


def _joined(name: str, parts: tuple[str, ...]) -> bool:
    """Is the name made of some of `parts` with `_` between them, as a launch of several statements is called?"""
    reached, waiting = {0}, [0]
    while waiting:
        at = waiting.pop()
        for p in parts:
            end = at + len(p)
            if name.startswith(p, at) and (end == len(name) or name[end] == "_") and end + 1 not in reached:
                if end == len(name):
                    return True
                reached.add(end + 1)
                waiting.append(end + 1)
    return False


# ---------------------------------------------------------------- launches


def stated_tile(s: Schedule, region: Region, axis: str, axes: Iterable[str]) -> int | None:
    """The tile size stated for an axis of a launch whose axes are `axes`, 0 for a unit axis. A size for one of the launch's
    statements goes before a size for all. Raises `TileError`, E0609, where two statements disagree."""
    qualified, plain = _lines(s, region, axis, axes)
    if len(set(qualified.values())) > 1:
        (a, m), (b, n) = list(qualified.items())[:2]
        raise refuse(
            "E0609", f"`{a} by {m or 1}` and `{b} by {n or 1}` cut one axis of one launch", s.spans.get(f"tile {b}"),
            note=f"computed together: {', '.join(region.statements)}", help="give both the same size",
        )  # fmt: skip
    return next(iter((qualified or plain).values()), None)


def _lines(
    s: Schedule, region: Region, axis: str, axes: Iterable[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """The tile sizes that speak of an axis of a launch: those for one of its statements, and those for all."""
    here, present = {region.name, *region.statements}, set(axes)
    qualified: dict[str, int] = {}
    plain: dict[str, int] = {}
    for key, size in s.tiles:
        statement, dot, name = key.rpartition(".")
        if name == axis or (name not in present and stem(axis) == name):
            if not dot:
                plain[key] = size
            elif statement in here:
                qualified[key] = size
    return qualified, plain


def check_used(s: Schedule, regions: Iterable[Region], plans: Iterable[AxisPlan]) -> None:
    """Every tile size must have found its axis. Raises `TileError`, E0610."""
    pairs = list(zip(regions, plans, strict=True))
    used: set[str] = set()
    for region, plan in pairs:
        axes = [a for a, _ in plan.tiles]
        used.update(key for a in axes for found in _lines(s, region, a, axes) for key in found)
    for key, _ in s.tiles:
        if key not in used:
            launches = "; ".join(f"{r.name}: {', '.join(a for a, _ in p.tiles) or 'none'}" for r, p in pairs)
            raise refuse(
                "E0610", f"no launch of `{s.kernel}` has the axis `{key}`", s.spans.get(f"tile {key}"),
                help=f"launches and their axes are {launches}",
            )  # fmt: skip
