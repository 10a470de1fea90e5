"""What a user sees when something is refused: diagnostics, one sentence, an exit code; never a traceback."""

from __future__ import annotations

import json
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from ..dsl.diagnostics import TileError
from ..render import print_diagnostics

FAILED, USAGE = 1, 2


class CommandError(Exception):
    """A refusal in words; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def usage(message: str) -> CommandError:
    return CommandError(message, USAGE)


@contextmanager
def refusals(code: int = FAILED) -> Iterator[None]:
    """Around a call of the Python interface: what it refuses about its arguments is the user's to read."""
    try:
        yield
    except (ValueError, TypeError) as reason:
        raise CommandError(str(reason), code) from reason


def reported(run: Callable[[Namespace], int], arguments: Namespace) -> int:
    """Run a command; refusals become text on standard error (diagnostics as JSON on standard output with `--json`)."""
    try:
        return run(arguments)
    except TileError as reason:
        if getattr(arguments, "json", False):
            print(json.dumps({"diagnostics": [d.as_json() for d in reason.diagnostics]}, indent=2))
        else:
            print_diagnostics(reason.diagnostics)
        return FAILED
    except CommandError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return reason.code
    except (BrokenPipeError, MemoryError):
        raise
    except OSError as reason:  # of the machine: a full disk, a folder that went away
        where = f"{reason.filename}: " if reason.filename else ""
        print(f"error: {where}{reason.strerror or reason}", file=sys.stderr)
        return FAILED
    except (
        Exception
    ) as reason:  # the last resort: a user is told in a sentence, whoever mends it finds the traceback
        print(f"internal error: {type(reason).__name__}: {reason}", file=sys.stderr)
        print(f"This is a mistake in tileloom, not in your file. Its traceback: {_kept()}", file=sys.stderr)
        return FAILED


def _kept() -> Path:
    """The current traceback, written to a file of its own."""
    with NamedTemporaryFile("w", prefix="tileloom-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(traceback.format_exc())
    return Path(file.name)
