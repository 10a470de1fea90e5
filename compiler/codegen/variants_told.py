"""When a call runs which variant of a kernel, and what comes ahead, in words: read from the `LAUNCHES` of generated CUDA
source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any


def told(source: str) -> Iterator[str]:
    """One sentence for each program that has several variants, the preferred first; with their tiers where these differ."""
    tiers = _tiers(source)
    programs: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, facts in _launches(source):
        programs.setdefault(facts.get("program", name), []).append((name, facts))
    for program, variants in programs.items():
        if len(variants) > 1:
            differ = len({tiers.get(n) for n, _ in variants}) > 1
            named = ((f"`{n}` of tier {tiers[n]}" if differ else f"`{n}`", facts) for n, facts in variants)
            yield f"{program}: a call runs " + "; else ".join(f"{name} {_where(f)}" for name, f in named)


def ahead_told(source: str) -> Iterator[str]:
    """One sentence for each program whose preferred variant has rows of the next task come ahead."""
    said: set[str] = set()
    for name, facts in _launches(source):
        program = facts.get("program", name)
        if facts.get("ahead") and program not in said:
            rows = ", ".join(f"`{t}`" for t in facts["ahead"])
            yield (
                f"{program}: a row leaves room for one block on a multiprocessor, which takes task after task; the next "
                f"task's row of {rows} comes to shared memory while it computes"
            )
        said.add(program)


def _tiers(source: str) -> dict[str, str]:
    """The tier of each kernel, which its first comment states."""
    return dict(
        re.findall(r"^def (\w+)\((?:(?!^def ).)*?^    # tier (\w+)", source, re.MULTILINE | re.DOTALL)
    )


def _launches(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of `LAUNCHES`, of their values those that are plain data."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "LAUNCHES":
            continue
        assert isinstance(node.value, ast.Dict)
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            assert isinstance(key, ast.Constant)
            assert isinstance(value, ast.Dict)
            pairs = zip(value.keys, value.values, strict=True)
            facts = {
                str(k.value): ast.literal_eval(v)
                for k, v in pairs
                if isinstance(k, ast.Constant) and not isinstance(v, ast.Lambda)
            }
            yield str(key.value), facts


def _where(facts: dict[str, Any]) -> str:
    """What sizes, strides and alignment a variant takes for granted."""
    parts = [f"{e} is a multiple of {n}" for e, n in facts.get("multiples", {}).items()]
    parts += [f"{e} is at most {n}" for e, n in facts.get("at_most", {}).items()]
    if wide := facts.get("wide"):
        parts.append(f"rows of {', '.join(wide)} are packed and aligned to 16 bytes")
    if maps := facts.get("maps"):
        parts.append(f"tensor maps can describe {', '.join(t for t, _ in maps)}")
    return f"where {' and '.join(parts)}" if parts else "for any sizes, strides and alignment"
