"""Write a file in the canonical layout; comments stay, and so does the meaning."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..dsl.format import format_text
from .failures import CommandError


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
    text = _read(arguments.file)
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


def _read(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as reason:
        raise CommandError(f"cannot read {file}: {getattr(reason, 'strerror', None) or reason}") from None
