"""The command `tileloom`: finds the command's module, reads its arguments, turns refusals into exit codes.

Exit codes: 0 done, 1 the input is wrong or a check failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__

COMMANDS = {
    "check": "report everything that is wrong in a file",
    "fmt": "write a file in the canonical layout",
    "run": "run a kernel and compare it with the interpreter in float64",
    "show": "print a stage of a kernel's compilation",
    "explain": "say what the compiler derived and decided, and why",
    "bisect": "find the pass that makes a result wrong",
    "bench": "measure a kernel against its naive version and NumPy",
    "doctor": "show versions, processor, GPU and the folder of compiled kernels",
}
DONE, FAILED, USAGE = 0, 1, 2
EXIT_CODES = (
    "`tileloom COMMAND --help` says more. Exit codes: 0 done, 1 the input is wrong or a check failed,",
    "2 the command line is wrong.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _command(words)
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except MemoryError:
        print("error: not enough memory for these sizes", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _command(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        _overview().parse_args(
            words
        )  # ends the program where it says something: --help, --version, an unknown word
        _overview().print_help()
        return USAGE
    command = import_module(f".cli.{words[0]}", __package__)
    parser = argparse.ArgumentParser(f"tileloom {words[0]}", description=command.__doc__)
    command.configure(parser)
    parsed = parser.parse_args(words[1:])
    from .cli.failures import reported

    return reported(command.run, parsed)


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "tileloom",
        usage="tileloom COMMAND …",
        description="Attention from its textbook definition: derived, explained, compiled, measured.",
        epilog="\n".join(["commands:", *listed, "", *EXIT_CODES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tileloom {__version__}")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
