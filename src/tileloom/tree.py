"""The syntax tree as indented text, one node a line, with its place in the source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .dsl.syntax import Node


def syntax_tree(root: Node) -> str:
    """`Kernel 3:1`, then its fields, two spaces a level; plain values stand on their node's line."""
    lines: list[str] = []
    waiting: list[tuple[int, str, Any]] = [(0, "", root)]
    while waiting:
        depth, label, item = waiting.pop()
        inside: list[tuple[int, str, Any]] = []
        if isinstance(item, Node):
            lines.append("  " * depth + label + _headline(item))
            inside = [(depth + 1, f"{name}: ", value) for name, value in _fields(item) if not _plain(value)]
        else:
            lines.append("  " * depth + label.rstrip())
            inside = [(depth + 1, "", x) for x in item]
        waiting.extend(reversed(inside))
    return "\n".join(lines) + "\n"


def _fields(node: Node) -> list[tuple[str, Any]]:
    return [(f.name, getattr(node, f.name)) for f in fields(node) if f.name != "span"]


def _plain(value: Any) -> bool:
    """Shown on its node's line: a text, a number, nothing, a tuple without nodes."""
    return not isinstance(value, Node) and not (
        isinstance(value, tuple) and any(isinstance(x, Node) for x in value)
    )


def _headline(node: Node) -> str:
    shown = [
        f"{name}={value!r}" for name, value in _fields(node) if _plain(value) and value not in (None, ())
    ]
    return " ".join([type(node).__name__, *shown, f"{node.span.line}:{node.span.column}"])
