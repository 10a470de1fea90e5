"""Attention in float64 NumPy, written from the textbook, and made inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attention64(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    sees: Array | bool = True,
    bias: Array | float = 0.0,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """o and lse. `sees` and `bias` are broadcast to the scores; rows that see nothing are 0, their lse -inf."""
    share = q.shape[1] // max(1, k.shape[1])
    keys, values = (np.repeat(x.astype(np.float64), share, axis=1) for x in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.astype(np.float64) @ keys.swapaxes(-1, -2))
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
    s = np.where(sees, s + bias, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*s.shape[:3], 1))
        s = np.concatenate([s, sink], axis=-1)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(top == -np.inf, 0.0, top)
    e = np.exp(s - shift)
    z = e.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(z) + shift)[..., 0]
    p = e / np.where(z == 0, 1.0, z)
    return p[..., : keys.shape[2]] @ values, lse


def positions(m: int, n: int, causal: str = "lower_right") -> tuple[Array, Array]:
    """The aligned position of each query, as a column, and of each key, as a row."""
    return np.arange(m)[:, None] + (n - m if causal == "lower_right" else 0), np.arange(n)[None, :]


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
