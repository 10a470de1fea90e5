"""The usual functions as one call. Each composes a kernel's text, compiles it and calls it; none has code of its own.

`show=True` prints the text: what to start from where an option is missing. A text is parsed once a process, compiled once
for all sizes, and kept in the cache folder like any other kernel.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .api import REMEMBERED_CALLS, CompiledKernel, compile, parse
from .arguments import Array
from .compiler.interpreter.elements import element_of
from .dsl.records import dataclass
from .dsl.types import DType
from .runtime.arrays import as_numpy, deliver
from .runtime.ready import CallKey, call_key

Causal = Literal["upper_left", "lower_right"] | bool | None
FLOATS = (DType.F16, DType.BF16, DType.F32, DType.F64)
LETTERS = "ijklmnop"
"""Indices of functions that take any number of axes."""


# ---------------------------------------------------------------- composing


@dataclass
class _Call:
    """A kernel in the making: parameters with their arguments, declarations, statements."""

    name: str
    parameters: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def take(self, declaration: str, value: Any) -> None:
        self.parameters.append(declaration)
        self.values.append(value)

    def text(self) -> str:
        outputs = ", ".join(self.outputs)
        result = f"({outputs})" if len(self.outputs) > 1 else outputs
        head = f"kernel {self.name}({', '.join(self.parameters)})\n    -> {result} {{\n"
        return head + "".join(f"    {line}\n" for line in self.lines) + "}\n"

    def run(
        self,
        like: Any,
        out: Any,
        show: bool,
        target: str | None,
        deterministic: bool = False,
        check_indices: bool = False,
    ) -> Any:
        """The results as the kind of array that `like` is; arrays of `out` as themselves."""
        text = self.text()
        if show:
            sys.stdout.write(text)
        result = _compiled(text, target, deterministic, check_indices)(*self.values, out=out)
        if out is not None or isinstance(like, np.ndarray):
            return result
        several = isinstance(result, tuple)
        return tuple(deliver(x, like) for x in result) if several else deliver(result, like)

    def settle(
        self, key: CallKey, arrays: int, target: str | None, deterministic: bool, check_indices: bool
    ) -> None:
        """Remember what a call like this one, with so many arrays, needs besides them."""
        kernel = _compiled(self.text(), target, deterministic, check_indices)
        if len(_settled) >= REMEMBERED_CALLS:
            _settled.clear()
        _settled[key] = kernel, tuple(self.values[arrays:])


_settled: dict[CallKey, tuple[CompiledKernel, tuple[Any, ...]]] = {}
"""By all that decides the text of a call on NumPy arrays: its kernel, and the numbers after the arrays. Composing a text
takes as long as a small kernel."""


def _settled_key(arrays: Sequence[Any], options: Sequence[Any]) -> CallKey | None:
    """The same for calls with the same text; None where an argument is not plain. Types count: True is not 1."""
    key = call_key(arrays, {})
    if key is None or any(isinstance(x, list | tuple) or (isinstance(x, float) and x == 0) for x in options):
        return None
    return (*key, *options, *map(type, options))


@lru_cache(maxsize=256)
def _compiled(text: str, target: str | None, deterministic: bool, check_indices: bool) -> CompiledKernel:
    program = parse(text, "<tileloom>")
    (name,) = program.kernels
    kernel = program[name]
    return compile(kernel, target=target, deterministic=deterministic, check_indices=check_indices)


def _element(array: Array, what: str, allowed: Sequence[DType] = FLOATS) -> DType:
    found = element_of(array.dtype)
    if found is None or found not in allowed:
        raise TypeError(f"{what} holds {array.dtype}; it may hold {', '.join(map(str, allowed))}")
    return found


def _arithmetic(dtype: DType) -> str:
    """The type of scalars and of what is kept beside results of this type."""
    return "f64" if dtype is DType.F64 else "f32"


def _axes(array: Array, what: str, shape: Sequence[int], names: Sequence[str]) -> tuple[Array, list[int]]:
    """An array that is broadcast to `shape`: without the axes along which it is, and the positions of the others."""
    missing = len(shape) - array.ndim
    wrong = [n for n, want in zip(array.shape, shape[max(missing, 0) :], strict=False) if n not in (1, want)]
    if missing < 0 or wrong:
        wanted = ", ".join(f"{n} = {size}" for n, size in zip(names, shape, strict=True))
        raise ValueError(f"{what} has shape {array.shape}; it must be one that is broadcast to [{wanted}]")
    kept = [k for k in range(array.ndim) if array.shape[k] == shape[k + missing]]
    index = tuple(slice(None) if k in kept else 0 for k in range(array.ndim))
    return array[index], [k + missing for k in kept]


def _real(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{what} is {value!r}; a number is what it takes")
    return float(value)


# ---------------------------------------------------------------- attention


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    mask: Any = None,
    bias: Any = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    check_indices: bool = False,
    show: bool = False,
    out: Any = None,
    target: str | None = None,
) -> Any:
    """softmax(softcap(scale · q·k) + bias, where mask) · v: o [B, H, M, E], with `return_lse` also lse [B, H, M].

    q is [B, H, M, D], k [B, G, N, D], v [B, G, N, E]; query head h reads key head h // (H // G). `scale` is 1/sqrt(D)
    unless given. A row that sees no key is 0, its lse (natural logarithm) -inf.

    causal        "upper_left": query i sees keys j <= i; "lower_right": j <= i + N - M; True where M == N, when both agree
    window        (left, right): key j is seen by query i when -left <= j - i' <= right, i' aligned as `causal` says (lower
                  right without it); -1 is unbounded
    mask          booleans that are broadcast to [B, H, M, N]; True takes part
    bias          numbers that are broadcast to [B, H, M, N], added after `softcap`
    softcap       c: a score s becomes c·tanh(s / c)
    alibi_slopes  [H] or [B, H]: a score falls by slope · |i' - j| (Press et al. 2022)
    sinks         [H]: one more score a head, which takes its share of the weight and has no value; lse includes it

    `out` takes the array for o, or (o, lse). Raises TypeError and ValueError, naming argument, value and what is accepted.
    """
    options = scale, softcap, causal, window, return_lse, deterministic, check_indices, target
    others = (x is not None for x in (mask, bias, alibi_slopes, sinks))
    key = None if show or any(others) else _settled_key((q, k, v), options)
    if key is not None and key in _settled:
        kernel, numbers = _settled[key]
        return kernel(q, k, v, *numbers, out=out)
    made = _Attention(q, k, v)
    made.scores(scale, softcap, causal)
    made.biases(bias, alibi_slopes)
    made.predicates(causal, window, mask)
    made.weights(sinks, return_lse)
    result = made.call.run(q, out, show, target, deterministic, check_indices)
    if key is not None:
        made.call.settle(key, 3, target, deterministic, check_indices)
    return result


class _Attention:
    """The text of an attention, step by step in the order in which its options apply."""

    def __init__(self, q: Any, k: Any, v: Any) -> None:
        arrays = {n: as_numpy(x, f"attention: `{n}`") for n, x in (("q", q), ("k", k), ("v", v))}
        for name, x in arrays.items():
            if x.ndim != 4:
                letters = "[B, H, M, D]" if name == "q" else "[B, G, N, D]"
                raise ValueError(f"attention: `{name}` has shape {x.shape}; it takes {letters}")
        self.dtype = _element(arrays["q"], "attention: `q`")
        self.batch, self.heads, self.rows, self.depth = arrays["q"].shape
        self.groups, self.keys = arrays["k"].shape[1:3]
        if self.groups != self.heads and (self.groups == 0 or self.heads % self.groups):
            raise ValueError(
                f"attention: `q` has {self.heads} heads and `k` {self.groups}; the first must be a multiple of the second"
            )
        grouped = self.groups != self.heads
        self.call, self.score, self.sees = _Call("attention"), "", list[str]()
        self.head = "h // (H // G)" if grouped else "h"
        t, g = self.dtype, "G" if grouped else "H"
        self.call.take(f"q: {t}[B, H, M, D]", arrays["q"])
        self.call.take(f"k: {t}[B, {g}, N, D]", arrays["k"])
        self.call.take(f"v: {t}[B, {g}, N, E]", arrays["v"])
        if grouped:
            self.call.lines.append("require H % G == 0")

    def scores(self, scale: float | None, softcap: float | None, causal: Causal) -> None:
        if scale is None and self.depth == 0:
            raise ValueError("attention: `q` has no elements a head (D = 0), so `scale` must be given")
        kind = _arithmetic(self.dtype)
        given = 1 / math.sqrt(self.depth) if scale is None else _real(scale, "attention: `scale`")
        self.call.take(f"scale: {kind}", given)
        score = f"scale * sum[d](q[b, h, m, d] * k[b, {self.head}, n, d])"
        if softcap is not None:
            cap = _real(softcap, "attention: `softcap`")
            if not 0 < cap < math.inf:
                raise ValueError(f"attention: `softcap` is {softcap!r}; a number above 0 is what it takes")
            self.call.take(f"cap: {kind}", cap)
            self.call.lines.append("require cap > 0")
            score = f"softcap({score}, cap)"
        self.score = score
        self.place = self._aligned(causal)

    def _aligned(self, causal: Causal) -> str:
        """The position of query m among the keys."""
        if causal is True and self.rows != self.keys:
            raise ValueError(
                f"attention: causal=True with {self.rows} queries and {self.keys} keys can be read in two ways; "
                'write causal="upper_left" (query i sees keys up to i) or causal="lower_right" (the last query sees all)'
            )
        if causal not in (None, False, True, "upper_left", "lower_right"):
            raise ValueError(
                f'attention: `causal` is {causal!r}; it is None, "upper_left", "lower_right" or True'
            )
        return "m" if causal == "upper_left" else "m + N - M"

    def biases(self, bias: Any, slopes: Any) -> None:
        if bias is not None:
            array = as_numpy(bias, "attention: `bias`")
            dtype = _element(array, "attention: `bias`")
            self.score += f" + {self._broadcast('bias', str(dtype), array)}"
        if slopes is not None:
            array = as_numpy(slopes, "attention: `alibi_slopes`")
            dtype = _element(array, "attention: `alibi_slopes`")
            if array.shape not in ((self.heads,), (self.batch, self.heads)):
                raise ValueError(
                    f"attention: `alibi_slopes` has shape {array.shape}; it takes [H = {self.heads}] or "
                    f"[B = {self.batch}, H = {self.heads}]"
                )
            shape, index = ("B, H", "b, h") if array.ndim == 2 else ("H", "h")
            self.call.take(f"slopes: {dtype}[{shape}]", array)
            self.score += f" - slopes[{index}] * {_arithmetic(self.dtype)}(abs({self.place} - n))"
        self.call.lines.append(f"s[b, h, m, n] = {self.score}")

    def predicates(self, causal: Causal, window: tuple[int, int] | None, mask: Any) -> None:
        left, right = self._window(window)
        if causal:
            right = 0 if right < 0 else min(right, 0)
        if right == 0:
            self.sees.append(f"n <= {self.place}")
        elif right > 0:
            self.call.take("right: i64", right)
            self.sees.append(f"n <= {self.place} + right")
        if left >= 0:
            self.call.take("left: i64", left)
            self.sees.append(f"n >= {self.place} - left")
        if mask is not None:
            array = as_numpy(mask, "attention: `mask`")
            if array.dtype != np.bool_:
                raise TypeError(
                    f"attention: `mask` holds {array.dtype}; it holds booleans, True for what takes part "
                    "(numbers to add are a `bias`)"
                )
            self.sees.append(self._broadcast("mask", "bool", array))

    def _window(self, window: Any) -> tuple[int, int]:
        if window is None:
            return -1, -1
        pair = tuple(window) if isinstance(window, tuple | list) else ()
        whole = all(isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= -1 for x in pair)
        if len(pair) != 2 or not whole:
            raise ValueError(
                f"attention: `window` is {window!r}; it is (left, right), each at least 0, or -1 for unbounded"
            )
        return int(pair[0]), int(pair[1])

    def _broadcast(self, name: str, dtype: str, array: Array) -> str:
        """Take an argument that is broadcast to the scores; how the text reads it."""
        shape = self.batch, self.heads, self.rows, self.keys
        kept, axes = _axes(array, f"attention: `{name}`", shape, "BHMN")
        if not axes:  # the language has no tensors without axes
            kept, axes = np.broadcast_to(kept, (self.keys,)), [3]
        self.call.take(f"{name}: {dtype}[{', '.join('BHMN'[k] for k in axes)}]", kept)
        return f"{name}[{', '.join('bhmn'[k] for k in axes)}]"

    def weights(self, sinks: Any, return_lse: bool) -> None:
        bound = f"n | {' and '.join(self.sees)}" if self.sees else "n"
        lines, kind = self.call.lines, _arithmetic(self.dtype)
        if sinks is None:
            lines.append(f"p[b, h, m, n] = softmax[{bound}](s[b, h, m, n])")
        else:
            self._sinks(sinks)
            lines.append(f"p[b, h, m, n] = softmax_sink[{bound}](s[b, h, m, n], sinks[h])")
        lines.append(f"o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, {self.head}, n, e])")
        self.call.outputs.append(f"o: {self.dtype}[B, H, M, E]")
        if return_lse:
            found = f"logsumexp[{bound}](s[b, h, m, n])"
            self.call.outputs.append(f"lse: {kind}[B, H, M]")
            if sinks is None:
                lines.append(f"lse[b, h, m] = {found}")
            else:
                lines.append(f"l[b, h, m] = {found}")
                lines.append("t[b, h, m] = max(l[b, h, m], sinks[h])")
                lines.append("t0[b, h, m] = where(t[b, h, m] == -inf, 0, t[b, h, m])")
                lines.append(
                    "lse[b, h, m] = t0[b, h, m] + log(exp(l[b, h, m] - t0[b, h, m]) + exp(sinks[h] - t0[b, h, m]))"
                )

    def _sinks(self, sinks: Any) -> None:
        array = as_numpy(sinks, "attention: `sinks`")
        dtype = _element(array, "attention: `sinks`")
        if array.shape != (self.heads,):
            raise ValueError(f"attention: `sinks` has shape {array.shape}; it takes [H = {self.heads}]")
        self.call.take(f"sinks: {dtype}[H]", array)


# ---------------------------------------------------------------- rows


def softmax(x: Any, axis: int = -1, *, show: bool = False, out: Any = None, target: str | None = None) -> Any:
    """exp(x) / sum(exp(x)) along an axis of x, any shape; a row that is all -inf becomes 0."""
    array, dtype, indices = _any_axes("softmax", x)
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"softmax: `axis` is {axis}; x has {array.ndim} axes, shape {array.shape}")
    call = _Call("softmax_along")
    shape = _shape(indices)
    call.take(f"x: {dtype}[{shape}]", array)
    call.outputs.append(f"y: {dtype}[{shape}]")
    at = ", ".join(indices)
    call.lines.append(f"y[{at}] = softmax[{indices[axis]}](x[{at}])")
    return call.run(x, out, show, target)


def layernorm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    show: bool = False,
    out: Any = None,
    target: str | None = None,
) -> Any:
    """(x - mean) / sqrt(variance + eps) over the last axis of x, any shape; then times `weight`, plus `bias`, if given."""
    return _normalised("layernorm", x, weight, bias, eps).run(x, out, show, target)


def rmsnorm(
    x: Any,
    weight: Any = None,
    *,
    eps: float = 1e-6,
    show: bool = False,
    out: Any = None,
    target: str | None = None,
) -> Any:
    """x / sqrt(mean(x²) + eps) over the last axis of x, any shape; then times `weight` if given."""
    return _normalised("rmsnorm", x, weight, None, eps).run(x, out, show, target)


def _normalised(name: str, x: Any, weight: Any, bias: Any, eps: float) -> _Call:
    array, dtype, indices = _any_axes(name, x)
    call, shape, at, last = _Call(f"{name}_rows"), _shape(indices), ", ".join(indices), indices[-1]
    call.take(f"x: {dtype}[{shape}]", array)
    value = f"{name}[{last}](x[{at}], eps)"
    for label, given, sign in (("weight", weight, "*"), ("bias", bias, "+")):
        if given is not None:
            part = as_numpy(given, f"{name}: `{label}`")
            call.take(f"{label}: {_element(part, f'{name}: `{label}`')}[{last.upper()}]", part)
            value += f" {sign} {label}[{last}]"
    call.take(f"eps: {_arithmetic(dtype)}", _real(eps, f"{name}: `eps`"))
    call.outputs.append(f"y: {dtype}[{shape}]")
    call.lines.append(f"y[{at}] = {value}")
    return call


def _any_axes(name: str, x: Any) -> tuple[Array, DType, str]:
    array = as_numpy(x, f"{name}: `x`")
    if not 1 <= array.ndim <= len(LETTERS):
        raise ValueError(f"{name}: `x` has {array.ndim} axes; it takes 1 to {len(LETTERS)}")
    return array, _element(array, f"{name}: `x`"), LETTERS[: array.ndim]


def _shape(indices: Iterable[str]) -> str:
    return ", ".join(i.upper() for i in indices)


# ---------------------------------------------------------------- products


def matmul(a: Any, b: Any, *, show: bool = False, out: Any = None, target: str | None = None) -> Any:
    """a [..., M, K] times b [..., K, N]: [..., M, N] in their type (i8: in i32). Leading axes are broadcast, as in NumPy."""
    arrays = as_numpy(a, "matmul: `a`"), as_numpy(b, "matmul: `b`")
    dtypes = [
        _element(x, f"matmul: `{n}`", (*FLOATS, DType.I8, DType.I32, DType.I64))
        for n, x in zip("ab", arrays, strict=True)
    ]
    for n, x in zip("ab", arrays, strict=True):
        if not 2 <= x.ndim <= len(LETTERS):
            raise ValueError(f"matmul: `{n}` has shape {x.shape}; it takes 2 to {len(LETTERS)} axes")
    try:
        lead = np.broadcast_shapes(arrays[0].shape[:-2], arrays[1].shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: the leading axes of `a` {arrays[0].shape} and `b` {arrays[1].shape} are not broadcast together"
        ) from None
    call, leading = _Call("matmul"), [f"x{i}" for i in range(len(lead))]
    read = []
    for n, x, dtype, last in zip("ab", arrays, dtypes, ("mk", "kn"), strict=True):
        kept, axes = _axes(x, f"matmul: `{n}`", (*lead, *x.shape[-2:]), [*leading, *last])
        axes = [k for k in axes if k < len(lead)]
        indices = [*(leading[k] for k in axes), *last]
        call.take(f"{n}: {dtype}[{_shape(indices)}]", kept)
        read.append(f"{n}[{', '.join(indices)}]")
    result = [*leading, "m", "n"]
    call.outputs.append(f"c: {'i32' if dtypes[0] is DType.I8 else dtypes[0]}[{_shape(result)}]")
    call.lines.append(f"c[{', '.join(result)}] = sum[k]({read[0]} * {read[1]})")
    return call.run(a, out, show, target)
