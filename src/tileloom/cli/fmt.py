"""Write a file in the canonical layout; comments stay, and so does the meaning."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..dsl.format import format_text
from .texts import read_text


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a .tile file, rewritten in place; - for the standard streams",
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 where the layout differs"
    )


def run(arguments: Namespace) -> int:
    text = read_text(arguments.file)
    laid_out = format_text(text, arguments.file)
    if arguments.check:
        if laid_out != text:
            print(f"{arguments.file}: the layout differs", file=sys.stderr)
        return int(laid_out != text)
    if arguments.file == "-":
        sys.stdout.write(laid_out)
    elif laid_out != text:
        Path(arguments.file).write_text(laid_out, encoding="utf-8", newline="")
    return 0
