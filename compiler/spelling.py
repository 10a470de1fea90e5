"""Nodes in the user's notation, for messages: `h // (H // G)`."""

from __future__ import annotations

from collections.abc import Mapping

from . import notation
from .notation import Piece
from .tensor_ir import Apply, Carried, Cast, Const, Extent, Index, Node, Read, Reduce, Scalar, When, walk

LONG, BRIEF = 4000, 120
"""Characters of an expression in a listing and in a message; the middle of a longer one is left out."""


def brief(node: Node) -> str:
    """`spell` for messages."""
    return spell(node, limit=BRIEF)


def spell(node: Node, names: Mapping[Node, str] | None = None, limit: int = LONG) -> str:
    """One line of text. Shared parts are repeated, so this is for index expressions, shapes and conditions.

    Nodes of `names` are written by their name, but for the root.
    """
    done: dict[Node, Piece] = {}
    for n in walk([node]):
        named = names is not None and n in names and n is not node
        piece = Piece(names[n]) if names and named else _piece(n, [done[a] for a in n.args])
        done[n] = Piece(_shortened(piece.text, limit), piece.level)
    return done[node].text


def _shortened(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def _piece(node: Node, args: list[Piece]) -> Piece:
    match node:
        case Const():
            return notation.number(node.value, node.dtype)
        case Scalar() | Extent() | Carried():
            return Piece(node.name)
        case Index():
            return Piece(node.axis)
        case Read():
            return Piece(f"{node.tensor}[{', '.join(a.text for a in args)}]" if args else node.tensor)
        case Cast():
            return notation.call(node.dtype.value, args)
        case Reduce():
            such = f" | {args[1].text}" if len(args) > 1 else ""
            return Piece(f"{node.fn}[{', '.join(node.bound)}{such}]({args[0].text})")
        case When():
            return args[0]
        case Apply(op="neg" | "not" as op):
            return notation.prefix(op, args[0], isinstance(node.args[0], Const))
        case Apply(op=op) if op in notation.SIGNS:
            return notation.infix(op, args[0], args[1])
        case Apply(op=op):
            return notation.call(op, args)
    raise TypeError(type(node).__name__)
