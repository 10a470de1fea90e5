"""Texts that a command line names: files and standard input. What cannot be read is said in words."""

from __future__ import annotations

import sys
from pathlib import Path

from .failures import CommandError


def read_text(file: str) -> str:
    """The text of a file, of standard input for `-`. Raises `CommandError`."""
    try:
        data = standard_input() if file == "-" else Path(file).read_bytes()
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the name
        raise CommandError(f"cannot read {file}: {getattr(reason, 'strerror', None) or reason}") from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        wrong = f"byte 0x{data[reason.start]:02X} on line {line}"
        raise CommandError(f"{file} is not UTF-8: {wrong}; save the file as UTF-8") from None


def standard_input() -> bytes:
    """All of standard input. Raises `CommandError` where the program was started without one."""
    if sys.stdin is None:
        raise CommandError("cannot read -: standard input is closed")
    return sys.stdin.buffer.read()
