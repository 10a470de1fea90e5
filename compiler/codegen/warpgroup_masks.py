"""Partial tiles in tiers `wgmma` and `mma`: which of a row's elements a thread may see, as the bits of one word.

A thread has up to 32 elements of a row, and what bounds them is mostly how far they lie in the row: a mask's comparisons of
indices, and where the loop and the tensor end. Each such bound becomes a word with a bit for each element, once for a row;
comparisons that are combined are words that are combined, and an element asks for one bit, which the assembler moves to
predicates several at a time. Scores of elements that do not exist are -inf at once where nothing but maxima and exponentials
read them, so neither has to ask again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

from ...dsl.records import dataclass
from ...dsl.types import DType
from ..layouts import Positive, find_all
from ..tile_ir import (
    Apply,
    AxisIndex,
    Const,
    Expr,
    For,
    Let,
    Name,
    ScalarRef,
    TileType,
    subexpressions,
)
from .bounded_scores import ZERO, weights_of_tanh
from .deal import Layout, Spread
from .loop_states import exponent, only_shifted
from .scalar_cuda import Code
from .simt_source import NOWHERE, Point, Value
from .tile_types import rewrite
from .warpgroup_affine import MOST_CONSTANT, AffineRows, linear

BITS = 32
FAR = 1 << 24
"""More than tiles, and constants of comparisons, come to."""
LOWEST = Const(-math.inf, DType.F32)


@dataclass(frozen=True)
class Word:
    """Bits of a row's elements: the text of a word at a row, and the comparisons it stands for."""

    text: Callable[[Point], str]
    comparisons: tuple[Expr, ...] = ()


class RowMasks(AffineRows):
    """Masks in the steps of a loop."""

    def _give_names(self) -> None:
        super()._give_names()
        self.words: dict[Name, Word] = {}
        self.rows_of: dict[Name, Callable[[Point], str]] = {}  # words that are computed, and an element's bit
        self.existing_words: dict[tuple[str, Spread], Word] = {}
        self.gaps: dict[str, str] = {}  # how far tiles lie apart, in a step

    def with_masks(self, s: Let, loop: For) -> Let:
        """A statement of a step over a partial tile, with what it asks of a row's elements in words."""
        axis = loop.axis.name
        if len(s.type.axes) != 2 or axis not in s.type.axes:
            return s
        layout = self.deal.layout(s.type.axes)
        spread = layout.spread(axis)
        if not _fits(spread):
            return s
        value = s.value
        if self.limits.get((axis, spread)) and s.type.dtype is DType.F32:
            word = self._word(self._existing_word(axis, spread), layout)
            if only_shifted(loop, s.name):
                value = Apply("where", (word, value, LOWEST))
                self.lowest.add(s.name)
            elif s.name in weights_of_tanh(loop):
                value = Apply("where", (word, value, ZERO))
                self.zeroed.add(s.name)
        value = rewrite(value, lambda e: self._masked(e, layout, axis))
        for name in dict.fromkeys(x for x in subexpressions(value) if isinstance(x, Name)):
            if name in self.words and name not in self.by_place:
                self._compute(name, layout, axis)
        return replace(s, value=value)

    def zero_beyond(self, weights: Let, axis: str) -> None:
        """Weights of columns that do not exist are 0, so that neither their sum nor their product has to ask again."""
        registers = self.values[weights.name].registers
        if axis not in weights.type.axes or registers is None or weights.name in self.zeroed:
            return
        layout = registers.layout
        if not self.lane_checks(Point(layout, dict.fromkeys(layout.axes, "0")), axis):
            return
        self.zeroed.add(weights.name)
        if self.is_zero_beyond(weights):
            return
        for at in self.nest(layout, [], exists=[axis]):
            element = f"{registers.array}[{at.element(layout)}]"
            exists = " and ".join(self.conditions(at, [axis]))
            self.text.line(f"{element} = select_f32({exists}, {element}, f32(0.0))")

    def is_zero_beyond(self, weights: Let) -> bool:
        """Are exponentials 0 on lanes that do not exist, because they are of -inf there, times a positive factor?"""
        scale, x, _ = exponent(weights.value)
        match scale:
            case Const(value=value):
                rises = value > 0
            case ScalarRef(name=name):
                rises = name in {p.scalar for p in find_all(self.program.attributes, Positive)}
            case _:
                rises = scale is None
        return rises and isinstance(x, Name) and x.name in self.lowest

    def _word(self, word: Word, layout: Layout) -> Name:
        name = self.temporary("seen", Value(TileType(DType.BOOL, layout.axes), scalar=""))
        self.words[name] = word
        return name

    def _existing_word(self, axis: str, spread: Spread) -> Word:
        """The elements between the ends of a loop and of its axis."""
        if (axis, spread) not in self.existing_words:
            text = " & ".join(_bits(spread, sign, limit) for sign, limit in self.limits[axis, spread])
            name = self.assign(f"{axis}_bits", Code(f"i32({text})", DType.I32))
            self.existing_words[axis, spread] = Word(lambda _: name)
        return self.existing_words[axis, spread]

    def _masked(self, e: Expr, layout: Layout, axis: str) -> Expr:
        """A comparison, and(word, word), or(word, word), not(word) -> word."""
        match e:
            case Apply(op="lt" | "le") if self.sign_along(e, axis) is not None:
                return self._word(self._of_comparison(e, layout, axis), layout)
            case Apply(op="and"):
                known, rest = self._conjuncts(e)
                both = [self._word(reduce(_both, known), layout)] if known else []
                return reduce(lambda a, b: Apply("and", (a, b)), [*both, *rest])
            case Apply(op="or", args=(Name() as a, Name() as b)) if a in self.words and b in self.words:
                return self._word(_joined("({} | {})", self.words[a], self.words[b]), layout)
            case Apply(op="not", args=(Name() as a,)) if a in self.words:
                return self._word(_joined("~({})", self.words[a]), layout)
            case Apply(op="where", args=(a, x, z)):
                return self._where(a, x, z, layout)
        return e

    def _where(self, condition: Expr, x: Expr, z: Expr, layout: Layout) -> Expr:
        """where(a, where(b, x, z), z) with all words that a and b ask for in one, outside."""
        asked = [condition]
        while isinstance(x, Apply) and x.op == "where" and x.args[2] == z:
            asked.append(x.args[0])
            x = x.args[1]
        parts = [self._conjuncts(c) for c in asked]
        words = [w for found, _ in parts for w in found]
        for c in reversed([c for _, rest in parts for c in rest]):
            x = Apply("where", (c, x, z))
        return Apply("where", (self._word(reduce(_both, words), layout), x, z)) if words else x

    def _conjuncts(self, e: Expr) -> tuple[list[Word], list[Expr]]:
        """What is combined by `and`: words, and the rest."""
        words: list[Word] = []
        rest: list[Expr] = []
        for x in _parts(e):
            if isinstance(x, Name) and x in self.words:
                words.append(self.words[x])
            else:
                rest.append(x)
        return words, rest

    def _of_comparison(self, e: Apply, layout: Layout, axis: str) -> Word:
        spread = layout.spread(axis)

        def text(row: Point) -> str:
            sign, limit = self.bound(e, axis, spread, row)
            return _bits(spread, sign, self.cut(Code(limit, DType.I32), 0).text)

        return self._near_word(e, layout, axis) or Word(text, (e,))

    def _near_word(self, e: Apply, layout: Layout, axis: str) -> Word | None:
        """The word of a comparison of sums of indices, extents and a small constant: one count of elements for all rows,
        which lie whole runs apart. How far tiles lie apart is the same for all elements of a step."""
        sign, (left, right), spread = self.sign_along(e, axis), e.args, layout.spread(axis)
        terms = linear(Apply("sub", (right, left) if sign == "<=" else (left, right)))
        if terms is None or sign is None:
            return None
        constant = terms.pop(Const(1, DType.I64), 0) + (0 if e.op == "le" else 1 if sign == ">=" else -1)
        rows = [a for a in layout.axes if a != axis and terms[AxisIndex(a)]]
        each, (row, *more) = spread.run * spread.step, [*rows, ""]
        if not row:
            return None
        grows, along = terms[AxisIndex(row)], layout.spread(row)
        fits = row not in self._whole() and along.run == 1 and along.step > 1 and along.stride % each == 0
        if more != [""] or not fits or abs(grows) > 1 or abs(constant) > MOST_CONSTANT:
            return None
        own = f"{grows} * {self.coordinate(along)} + {constant} - {spread.run} * {self.coordinate(spread)}"
        gap = self._gap({x: n for x, n in terms.items() if n})
        limit = self.assign("limit", Code(f"i32({gap} + {own})", DType.I32))
        count = self.assign("count", Code(f"i32({_count(spread, limit, int(sign != '<='))})", DType.I32))
        step = grows * along.stride // each * spread.run
        invert = "" if sign == "<=" else "~"
        return Word(
            lambda at: f"{invert}first_bits_i32(max_i32(i32({count} + {step} * {at.counters[row]}), 0))"
        )

    def _gap(self, terms: dict[Expr, int]) -> str:
        """How far tiles lie apart, as a number of 32 bits that is far from all tiles where theirs is large."""
        where = {x: self._first_of(x) or self.emit(x, NOWHERE).operand for x in terms}
        apart = " + ".join(f"{n} * {where[x]}" for x, n in terms.items()) or "0"
        if apart not in self.gaps:
            between = all(isinstance(x, AxisIndex) for x in terms) and sorted(terms.values()) == [-1, 1]
            is_narrow = between and self.narrow_indices
            clamped = (
                f"clamp_i32(i32({apart}), {-FAR}, {FAR})"
                if is_narrow
                else f"i32(min(max({apart}, {-FAR}), {FAR}))"
            )
            self.gaps[apart] = self.assign("gap", Code(clamped, DType.I32))
        return self.gaps[apart]

    def _first_of(self, e: Expr) -> str:
        """The first index of a tile; "" for other terms, among them axes of the grid that have one index a task."""
        if isinstance(e, AxisIndex) and self.live[e.axis].tile is not None:
            return self.axis_names[e.axis].first
        return ""

    def _compute(self, name: Name, layout: Layout, axis: str) -> None:
        """A word for each row, in registers."""
        word, rows = self.words[name], layout.restrict(a for a in layout.axes if a != axis)
        array = self.names.fresh("seen")
        self.text.line(f"{array} = registers_i32({rows.elements})")
        for at in self.nest(rows, word.comparisons):
            self.text.line(f"{array}[{at.element(rows)}] = i32({word.text(at)})")
        self.rows_of[name] = lambda at: f"{array}[{at.element(rows)}], i32(1 << {at.counters[axis]})"
        self.by_place[name] = lambda at: Code(f"has_bit_i32({self.rows_of[name](at)})", DType.BOOL)

    def _node(self, e: Expr, args: list[Code], at: Point) -> Code:
        match e:
            case Apply(op="where", args=(Name() as word, _, _)) if word in self.rows_of and (
                args[1].dtype is args[2].dtype is DType.F32
            ):
                text = f"where_bit_f32({self.rows_of[word](at)}, {args[1].text}, {args[2].text})"
                return Code(text, DType.F32)
        return super()._node(e, args, at)


def _fits(spread: Spread) -> bool:
    """Are a thread's elements of a row runs at steps of a power of two, no more than a word has bits?"""
    each = spread.run * spread.step
    return (
        spread.run == 2
        and spread.even
        and spread.count <= BITS
        and each & (each - 1) == 0
        and not spread.between
    )


def _parts(e: Expr) -> Iterator[Expr]:
    match e:
        case Apply(op="and", args=args):
            for x in args:
                yield from _parts(x)
        case _:
            yield e


def _joined(form: str, *words: Word) -> Word:
    return Word(
        lambda row: form.format(*(w.text(row) for w in words)), tuple(x for w in words for x in w.comparisons)
    )


def _both(a: Word, b: Word) -> Word:
    return _joined("{} & {}", a, b)


def _bits(spread: Spread, sign: str, limit: str) -> str:
    """The elements of a thread whose places are no more, or no less, than a limit."""
    count = f"i32({_count(spread, limit, int(sign != '<='))})"
    return f"first_bits_i32({count})" if sign == "<=" else f"~first_bits_i32({count})"


def _count(spread: Spread, limit: str, less: int) -> str:
    """How many of a thread's elements lie at places up to limit - less: of those that are first in their run, of those
    that are second. Below the tile it is no more than 0."""
    each = spread.run * spread.step
    terms = [f"(i32({limit} + {each - i - less}) >> {each.bit_length() - 1})" for i in range(spread.run)]
    return " + ".join(terms)
