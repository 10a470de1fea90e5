"""Report everything that is wrong in files: names, ranges, types, bounds. Nothing is compiled."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from ..compiler.target import target
from ..dsl.diagnostics import Diagnostic, TileError, refuse
from ..dsl.suggest import did_you_mean
from ..dsl.syntax import Program, Verbatim
from ..programs import graph_of, kernel_named, names
from ..render import print_diagnostics
from .kernels import read_program


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="a .tile file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="diagnostics as JSON on standard output")


def run(arguments: Namespace) -> int:
    wrong: list[Diagnostic] = []
    for file in arguments.files:
        found, kernels = _findings(file)
        wrong += found
        if arguments.json:
            continue
        if found:
            print_diagnostics(found)
        else:
            print(f"{file}: ok, {', '.join(kernels) if kernels else 'no kernels'}")
    if arguments.json:
        print(json.dumps({"diagnostics": [d.as_json() for d in wrong]}, indent=2))
    return 1 if wrong else 0


def _findings(file: str) -> tuple[list[Diagnostic], list[str]]:
    """All diagnostics of a file, and the names of its kernels."""
    try:
        program = read_program(file)
    except TileError as reason:
        return reason.diagnostics, []
    compiled = names(program)
    found = [d for name in compiled for d in _kernel(program, name)]
    if not found:
        found = [d for item in program.schedules.values() for d in _schedule(program, item)]
    return found, compiled


def _schedule(program: Program, item: Verbatim) -> list[Diagnostic]:
    """What is wrong with a schedule of the file, for its kernel and target."""
    from ..compiler.passes.canonicalize import canonicalize
    from ..compiler.remarks import Remarks
    from ..compiler.schedule_check import check_schedule
    from ..compiler.schedule_text import parse_item

    try:
        stated = parse_item(item.span)
        if stated.kernel not in program.kernels:
            help = (
                did_you_mean(stated.kernel, program.kernels)
                or "a schedule is for a kernel in definition form"
            )
            message = f"there is no kernel `{stated.kernel}`"
            raise refuse("E0620", message, stated.spans.get("kernel"), help=help)
        written = graph_of(kernel_named(program, stated.kernel))
        check_schedule(stated, written, canonicalize(written, Remarks()), target(stated.target))
    except TileError as reason:
        return reason.diagnostics
    return []


def _kernel(program: Program, name: str) -> list[Diagnostic]:
    try:
        graph_of(kernel_named(program, name))
    except TileError as reason:
        return reason.diagnostics
    return []
