"""The pages under docs show the tool's real output: every console block is run again and compared."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```console\n\$ tileloom ([^\n]+)\n(.*?)```", re.DOTALL)
BLOCKS = [
    pytest.param(command, shown, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, (command, shown) in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_shown_output_is_the_real_one(command: str, shown: str) -> None:
    """A line `…` leaves lines out; the parts between must follow one another in the output.

    In a process of its own, as a reader would run it: a node that other tests made first would keep their place in a text.
    """
    words = [sys.executable, "-m", "tileloom", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": "120", "PYTHONUTF8": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    output = lines(done.stdout)
    at = 0
    for part in lines(shown).split("\n…\n"):
        wanted = part.strip("\n").removeprefix("…\n").removesuffix("\n…")
        found = output.find(wanted, at)
        assert found >= 0, f"not in the output of `tileloom {command}`:\n{wanted}"
        at = found + len(wanted)


def lines(text: str) -> str:
    """Without blanks at line ends, which editors remove."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_pages_have_blocks() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([\w./-]+\.md)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:examples|tests|benchmarks|runtime|compiler|dsl)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
