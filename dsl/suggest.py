"""Did you mean: the nearest known name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

MAX_CANDIDATES = (
    300  # difflib compares with each; a file of thousands of wrong names must still be answered soon
)


def did_you_mean(name: str, candidates: Iterable[str]) -> str | None:
    """`did you mean …?` if a candidate is near `name`, or is it in other letter case."""
    known = list(islice(candidates, MAX_CANDIDATES))
    same = [c for c in known if c.lower() == name.lower() and c != name]
    near = same or (get_close_matches(name, known, 1, 0.6) if len(name) <= 40 else [])
    return f"did you mean `{near[0]}`?" if near else None
