"""Facts as text for people: diagnostics, tables, explanations, with colour where the output is a terminal."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .dsl.diagnostics import Diagnostic

if TYPE_CHECKING:
    from .accuracy import Comparison
    from .bench import Measured
    from .compiler.explain import (
        CandidateFacts,
        Explanation,
        FusionFacts,
        MemoryFacts,
        PassFacts,
        RoomFacts,
        StateFacts,
        Where,
    )
    from .runtime import bench as clockwork
    from .runtime.machine_code import Assembled

SEVERITY = {"error": "bold red", "warning": "bold yellow"}
PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""


def console(file: TextIO | None = None) -> Console:
    """A console on a stream, standard output by default; plain text where that is no terminal."""
    stream = file or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def say(*what: RenderableType) -> None:
    """Print on standard output; text is not read as markup."""
    out = console()
    for item in what:
        out.print(item, markup=False, soft_wrap=isinstance(item, str))


def plain(what: RenderableType) -> str:
    """The same without colours, as a text."""
    stream = io.StringIO()
    console(stream).print(what)
    return stream.getvalue()


# ---------------------------------------------------------------- diagnostics


def print_diagnostics(found: Iterable[Diagnostic]) -> None:
    """Diagnostics on standard error; plain text where that is no terminal."""
    err = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    for d in found:
        err.print(_coloured(d))


def _coloured(d: Diagnostic) -> Text:
    text = Text(d.render())
    text.highlight_regex(rf"^{d.severity}\[\w+\]", SEVERITY.get(d.severity, "bold"))
    text.highlight_regex(r"(?m)^ *--> .*$", "cyan")
    text.highlight_regex(r"(?m)^ *\d+ \|", "blue")
    text.highlight_regex(r"(?m)^ *\| *\^+$", "bold red")
    text.highlight_regex(r"(?m)^  (note|help):", "bold green")
    return text


# ---------------------------------------------------------------- tables


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, title: str | None = None
) -> Table:
    """A table whose first `left` columns are texts and the rest numbers."""
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for i, column in enumerate(columns):
        made.add_column(
            column, justify="left" if i < left else "right", no_wrap=i >= left, header_style="bold"
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def comparison_table(rows: Iterable[tuple[str, Comparison]]) -> Table:
    return table(
        ("result", "output", "type", "largest error", "allowed", ""),
        ((stage, r.name, r.dtype, f"{r.error:.2e}", f"{r.tolerance:.2e}", _verdict(r)) for stage, r in rows),
        left=3,
        title="against the interpreter in float64",
    )


def _verdict(r: Comparison) -> str:
    if r.mismatches:
        return f"WRONG: {r.mismatches} of {r.elements} elements have another value or another infinity or NaN"
    return "ok" if r.ok else "WRONG"


def resource_table(found: Iterable[Assembled]) -> Table:
    return table(
        ("kernel", "target", "registers", "spilled bytes", "shared bytes", "threads"),
        (
            (
                a.name,
                a.target.name,
                str(a.registers),
                str(a.spill_bytes),
                str(a.shared_bytes + a.dynamic_shared_bytes),
                str(a.threads),
            )
            for a in found
        ),
        left=2,
        title="what the assembler reports",
    )


def bytes_text(n: float) -> str:
    """`1.5 MiB`"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} TiB"


# ---------------------------------------------------------------- explanations

SECTIONS = ("derive", "fusion", "memory")


def explanation_text(facts: Explanation, sections: Sequence[str] = ()) -> str:
    return plain(explanation(facts, sections))


def explanation(facts: Explanation, sections: Sequence[str] = ()) -> Group:
    """The named sections in full, or all in short with schedule and remarks."""
    full = bool(sections)
    parts: list[RenderableType] = [_headline(facts)]
    if not full or "derive" in sections:
        parts += _derivations(facts, full)
    if not full or "fusion" in sections:
        parts += _fusion(facts.fusion, full)
    if not full or "memory" in sections:
        parts += _memory(facts.memory, full)
    if not full:
        parts += _schedule(facts)
    return Group(*parts)


def _headline(facts: Explanation) -> Text:
    sizes = ", ".join(f"{n} = {v}" for n, v in facts.sizes.items())
    fixed = ", ".join(facts.statics)
    return Text.assemble(
        (f"{facts.kernel}", "bold"), f" on {facts.target}, predicted for {sizes}",
        f"; {fixed} compiled in, other sizes run the same code" if fixed else "; every size runs the same code",
    )  # fmt: skip


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _place(where: Where | None) -> str:
    return f"{where.file}:{where.line}:{where.column}" if where else ""


def _indented(text: str, by: int = 4) -> Text:
    return Text(textwrap.indent(text, " " * by))


# -- derivations

REPAIRS = {
    "factor": "H(new) / H(old): the factor that mends the old value",
    "summand": "H(new) - H(old): the summand that mends the old value",
    "matrix": "the old value from its lower powers, by the binomial theorem",
    "restart": "when the extremum changes, nothing seen before equals it",
    "plain": "",
}


def _derivations(facts: Explanation, full: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_title("What was derived")]
    cascades = [p for p in facts.passes if any(s.upstream for s in p.states)]
    for p in cascades:
        parts += _cascade(p, full)
    for p in facts.passes:
        if p not in cascades:
            names = ", ".join(f"{s.name} = {s.reduction}({s.g})" for s in p.states)
            parts.append(
                Text(f"A loop over {', '.join(p.axes)} in `{p.launch}`: {names}; nothing to repair.")
            )
    if not facts.passes:
        parts.append(Text("No reduction runs as a loop here."))
    if facts.missed:
        parts.append(Text("\nReductions that need a pass of their own:"))
        parts += [
            Text(f"  {m.message}\n      {_place(m.where)}: {m.where.text if m.where else ''}")
            for m in facts.missed
        ]
    return parts


def _cascade(p: PassFacts, full: bool) -> list[RenderableType]:
    axes = ", ".join(p.axes)
    parts: list[RenderableType] = [
        Text(
            f"One pass over {axes} in `{p.launch}` carries {len(p.states)} running values, though some depend on others "
            "that are final only at its end. When one changes from x to x', a repair makes up for it in those that "
            "depend on it."
        )
    ]
    for s in p.states:
        parts += _state_in_full(s) if full else [Text(f"    {s.step}")]
    if full:
        parts += _guards(p)
        several = len(p.loops) > 1
        parts.append(
            Text(
                "\n  The loops, as the tile program has them; one marked @full runs over tiles that lie wholly inside "
                "the condition, and need not look at it:"
                if several
                else "\n  The loop, as the tile program has it:"
            )
        )
        parts += [_indented(loop) for loop in p.loops]
    return parts


def _state_in_full(s: StateFacts) -> list[RenderableType]:
    parts: list[RenderableType] = [Text.assemble("\n  ", (s.name, "bold"), f" is {s.reduction}({s.g})")]
    if s.where:
        parts.append(Text(f"    from  {s.where.text}\n          {_place(s.where)}"))
    parts.append(Text(f"    step  {s.step}"))
    if not s.upstream:
        return parts
    parts.append(Text(f"    g     {s.g}    one element's contribution"))
    if s.h:
        parts.append(Text(f"    H     {s.h}    the part of g that depends on {', '.join(s.upstream)} alone"))
    parts.append(Text(f"    h     {s.repair or 'the old value no longer counts'}    {REPAIRS[s.kind]}"))
    parts.append(Text("    which is right because"))
    for o in s.obligations:
        parts.append(Text(f"      {o.status:8} {o.name:10} {o.formula}"))
        parts.append(Text(f"                          ({o.how})"))
    for x in s.exponents:
        if x.never_positive:
            parts.append(Text(f"    exp({x.text}) cannot overflow: {x.why}"))
    return parts


def _guards(p: PassFacts) -> list[RenderableType]:
    """Why states are read through a guard; once, where several states say the same."""
    if not any("safe(" in s.step for s in p.states):
        return []
    parts: list[RenderableType] = [
        Text(
            "\n  safe(x) is x itself, but 0 for a maximum that is still -inf, and 1 for a divisor that is still 0."
        )
    ]
    guards = list(dict.fromkeys(g for s in p.states for g in s.guards))
    if guards:
        parts.append(Text("  Why, by what one element contributes:"))
    for guard in guards:
        number = (
            f"{guard.guarded}"
            if guard.guarded == guard.plain
            else f"{guard.guarded}, {guard.plain} without the guard"
        )
        parts.append(
            Text(
                f"    {guard.case} (x = {guard.extremum}, element {guard.element}): {number}.\n        {guard.meaning}"
            )
        )
    return parts


# -- fusion


def _fusion(f: FusionFacts, full: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_title("What is stored, and what is computed where it is used")]
    if f.candidates:
        parts.append(_ledger(f.candidates))
        parts += [Text(f"  {c.name}: {c.reason}") for c in f.candidates]
    else:
        parts.append(Text("The kernel has no intermediates: nothing to decide."))
    launches = "; ".join(", ".join(x) for x in f.launches)
    naive = "; ".join(", ".join(x) for x in f.naive_launches)
    parts.append(
        Text(
            f"{len(f.launches)} launch{'es' if len(f.launches) > 1 else ''} ({launches}), predicted {_us(f.predicted_us)}, "
            f"bound by {f.binds}; `fuse none` has {len(f.naive_launches)} ({naive}), predicted "
            f"{_us(f.naive_predicted_us)}, bound by {f.naive_binds}."
        )
    )
    if full and f.room:
        parts.append(_rooms(f.room))
    if full:
        parts.append(Text(f"{f.groupings} groupings were lowered and compared. Rates: {f.rates_origin}."))
        parts.append(
            Text("Times are predictions, good for choosing between variants; `tileloom bench` measures.")
        )
    return parts


def _ledger(candidates: Iterable[CandidateFacts]) -> Table:
    return table(
        ("intermediate", "decision", "its bytes", "traffic", "otherwise", "predicted", "otherwise", "binds"),
        (
            (
                c.name,
                c.decision,
                bytes_text(c.stored_bytes),
                bytes_text(c.chosen_traffic_bytes),
                bytes_text(c.opposite_traffic_bytes) if c.opposite_traffic_bytes is not None else "",
                _us(c.chosen_us),
                _us(c.opposite_us) if c.opposite_us is not None else "",
                c.chosen_binds,
            )
            for c in candidates
        ),
        left=2,
    )


def _rooms(room: Iterable[RoomFacts]) -> Table:
    return table(
        ("launch", "of", "threads", "registers", "spilled", "shared memory", "warps at once", "limited by"),
        (
            (
                r.launch,
                "the choice" if r.without is None else f"{r.without} decided otherwise",
                str(r.threads),
                f"about {r.registers}",
                str(r.spilled),
                bytes_text(r.shared_bytes),
                f"{r.warps} ({r.share:.0%})",
                r.limit,
            )
            for r in room
        ),
        left=2,
        title="\nWhat a block takes of a multiprocessor",
    )


def _us(us: float) -> str:
    return f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} µs"


# -- memory


def _memory(m: MemoryFacts, full: bool) -> list[RenderableType]:
    parts: list[RenderableType] = [_title("Memory beyond inputs and outputs")]
    for label, buffers, grows, task in (
        ("compiled", m.buffers, m.grows_with, m.task_bytes),
        ("fuse none", m.naive_buffers, m.naive_grows_with, m.naive_task_bytes),
    ):
        stored = ", ".join(f"{b.name} {b.dtype}[{', '.join(b.shape)}] {bytes_text(b.bytes)}" for b in buffers)
        growth = f"grows with {', '.join(grows)}" if grows else "does not grow with any run-time size"
        parts.append(
            Text(
                f"{label:9}  between launches: {stored or 'nothing'}; {m.threads} × {bytes_text(task)} of tiles; {growth}"
            )
        )
    if full and m.growth:
        parts.append(
            table(
                ("sizes", "compiled", "fuse none"),
                (
                    (
                        ", ".join(f"{k} = {v}" for k, v in g.sizes.items()),
                        bytes_text(g.bytes),
                        bytes_text(g.naive_bytes),
                    )
                    for g in m.growth
                ),
                title="predicted bytes",
            )
        )
    return parts


# -- schedule and remarks


def _schedule(facts: Explanation) -> list[RenderableType]:
    parts: list[RenderableType] = [
        _title("Schedule"),
        _indented(facts.schedule.rstrip(), 2),
        _title("Remarks"),
    ]
    for r in facts.remarks:
        given = " ".join(f"{k}={v}" for k, v in r.facts.items())
        parts.append(
            Text(
                f"  {r.kind:8}{r.stage}/{r.name} {_place(r.where)}: {r.message}{f' ({given})' if given else ''}"
            )
        )
    return parts


# ---------------------------------------------------------------- benchmarks


def bench_table(rows: Sequence[Measured]) -> Table:
    """Times relative to the first variant of each case; sizes that differ between cases name them."""
    first = {m.row.case: m.row for m in reversed(rows)}
    varied = [n for n in rows[0].sizes if len({m.sizes[n] for m in rows}) > 1] if rows else []
    return table(
        (
            *varied,
            "variant",
            "median ms",
            "p20",
            "p80",
            "times",
            "GFLOP/s",
            "beyond in/out",
            "process grew",
            "error",
        ),
        ((*(str(m.sizes[n]) for n in varied), *_bench_cells(m, first[m.row.case])) for m in rows),
        left=len(varied) + 1,
    )


def _bench_cells(m: Measured, base: clockwork.Row) -> tuple[str, ...]:
    r = m.row
    return (
        r.variant,
        f"{r.median_ms:.3f}",
        f"{r.percentile_ms(20):.3f}",
        f"{r.percentile_ms(80):.3f}",
        f"{r.median_ms / base.median_ms:.2f}",
        f"{r.flops / r.median_ms / 1e6:.1f}" if r.flops else "",
        bytes_text(r.peak_bytes or 0),
        "not told" if m.resident_bytes is None else bytes_text(m.resident_bytes),
        f"{r.error:.1e}",
    )


@contextmanager
def progress(label: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is going on, where that is a terminal."""
    err = Console(file=sys.stderr)
    if not err.is_terminal:
        yield lambda text: None
        return
    with err.status(Text(label)) as status:
        yield lambda text: status.update(Text(f"{label}: {text}"))
