"""Report everything that is wrong in a file: names, ranges, types, bounds. Nothing is compiled."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from ..dsl.diagnostics import Diagnostic, TileError
from ..dsl.syntax import Program
from ..programs import graph_of, kernel_named, names
from ..render import print_diagnostics
from .kernels import read_program


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a .tile file, or - for standard input")
    parser.add_argument("--json", action="store_true", help="diagnostics as JSON on standard output")


def run(arguments: Namespace) -> int:
    found, kernels = _findings(arguments.file)
    if arguments.json:
        print(json.dumps({"diagnostics": [d.as_json() for d in found]}, indent=2))
    elif found:
        print_diagnostics(found)
    else:
        print(f"{arguments.file}: ok, {', '.join(kernels) if kernels else 'no kernels'}")
    return 1 if found else 0


def _findings(file: str) -> tuple[list[Diagnostic], list[str]]:
    """All diagnostics of a file, and the names of its kernels."""
    try:
        program = read_program(file)
    except TileError as reason:
        return reason.diagnostics, []
    compiled = names(program)
    return [d for name in compiled for d in _kernel(program, name)], compiled


def _kernel(program: Program, name: str) -> list[Diagnostic]:
    try:
        graph_of(kernel_named(program, name))
    except TileError as reason:
        return reason.diagnostics
    return []
