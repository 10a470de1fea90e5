"""Measure a kernel against its naive version, NumPy or any function: correct first, then time and memory."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..bench import Benchmark, Case, WrongResult, check_measured, check_names, run_case, variants
from ..render import bench_table, progress, say
from .failures import USAGE, CommandError, refusals, usage
from .problems import add_compilation, add_inputs, add_kernel, announce, compiled, problems
from .settings import parse_settings


def configure(parser: ArgumentParser) -> None:
    add_kernel(parser)
    add_compilation(parser)
    add_inputs(parser)
    parser.add_argument(
        "--vs",
        metavar="LIST",
        help="naive (fuse none), numpy, FILE.py:FUNCTION, with commas between them (naive,numpy; for tile programs none)",
    )
    parser.add_argument("--json", metavar="F", help="record everything in a file; - for standard output")


def run(arguments: Namespace) -> int:
    against = None if arguments.vs is None else [name for name in arguments.vs.split(",") if name]
    with refusals(USAGE):
        check_names(against or ())
    if arguments.json not in (None, "-"):
        _writable(arguments.json)
    found = list(problems(arguments))
    announce(found[0], {n: 0 for s in parse_settings(arguments.settings) for n in s.names})
    kernel = compiled(arguments, found[0].kernel)
    with refusals(USAGE):
        check_measured(kernel, "bench")
    result = Benchmark(kernel.name)
    if result.busy:
        print(f"warning: {result.busy}", file=sys.stderr)
    for p in found:
        case = Case(p.kernel, p.graph, p.dtypes, p.extents, p.numbers, p.tensors(arguments.seed))
        with refusals(USAGE):
            chosen = variants(kernel, kernel.naive, case, against)
        try:
            with refusals(), progress(case.words()) as tell:
                result.rows += run_case(case, chosen, tell)
        except WrongResult as reason:
            raise CommandError(f"wrong result, nothing is timed: {reason}") from None
    if arguments.json != "-":
        say(bench_table(result.rows))
    if arguments.json:
        _record(result, arguments.json)
    return 0


def _writable(where: str) -> None:
    """Measuring takes long: a place that cannot be written is refused before."""
    path = Path(where)
    if path.is_dir():
        raise usage(f"cannot write {where}: it is a folder")
    if not path.parent.is_dir():
        raise usage(f"cannot write {where}: there is no folder {path.parent}")


def _record(result: Benchmark, where: str) -> None:
    text = json.dumps(result.as_json(sys.argv), indent=2)
    if where == "-":
        print(text)
        return
    try:
        Path(where).write_text(text + "\n", encoding="utf-8")
    except OSError as reason:
        raise CommandError(f"cannot write {where}: {reason.strerror}") from None
    print(f"recorded in {where}", file=sys.stderr)
