"""Triton kernels to race against: plain ones, as its documentation teaches them, with a few configurations to choose from.

Imported by `gpu.py` where Triton is installed. Every function takes torch tensors on the device and returns a new one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl_


@triton.jit
def softmax_rows(y, x, columns, BLOCK: tl_.constexpr):  # type: ignore[no-untyped-def]
    row = tl_.program_id(0).to(tl_.int64)
    at = tl_.arange(0, BLOCK)
    values = tl_.load(x + row * columns + at, mask=at < columns, other=-float("inf")).to(tl_.float32)
    weights = tl_.exp(values - tl_.max(values, 0))
    result = weights / tl_.sum(weights, 0)
    tl_.store(y + row * columns + at, result.to(y.dtype.element_ty), mask=at < columns)


@triton.jit
def rms_rows(y, x, w, columns, eps, BLOCK: tl_.constexpr):  # type: ignore[no-untyped-def]
    row = tl_.program_id(0).to(tl_.int64)
    at = tl_.arange(0, BLOCK)
    values = tl_.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl_.float32)
    scale = tl_.load(w + at, mask=at < columns, other=0.0).to(tl_.float32)
    inverse = tl_.rsqrt(tl_.sum(values * values, 0) / columns + eps)
    tl_.store(y + row * columns + at, (values * inverse * scale).to(y.dtype.element_ty), mask=at < columns)


def warps_for(columns: int) -> int:
    return 4 if columns <= 2048 else 8 if columns <= 8192 else 16


def softmax(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    rows, columns = x.shape
    softmax_rows[(rows,)](y, x, columns, BLOCK=triton.next_power_of_2(columns), num_warps=warps_for(columns))
    return y


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    rows, columns = x.shape
    rms_rows[(rows,)](
        y, x, w, columns, eps, BLOCK=triton.next_power_of_2(columns), num_warps=warps_for(columns)
    )
    return y


PRODUCTS = [
    triton.Config({"BM": bm, "BN": bn, "BK": 64}, num_warps=warps, num_stages=stages)
    for bm, bn, warps, stages in ((128, 256, 8, 3), (128, 128, 4, 4), (64, 64, 4, 4))
]


@triton.autotune(configs=PRODUCTS, key=["m", "n", "k"])
@triton.jit
def product_tiles(
    a, b, c, m, n, k, a_m, a_k, b_k, b_n, BM: tl_.constexpr, BN: tl_.constexpr, BK: tl_.constexpr
):  # type: ignore[no-untyped-def]
    group, rows, columns = 8, tl_.cdiv(m, BM), tl_.cdiv(n, BN)
    task = tl_.program_id(0)
    first = task // (group * columns) * group
    height = min(rows - first, group)
    row = first + task % (group * columns) % height
    column = task % (group * columns) // height
    at_m, at_n, at_k = row * BM + tl_.arange(0, BM), column * BN + tl_.arange(0, BN), tl_.arange(0, BK)
    total = tl_.zeros((BM, BN), tl_.float32)
    for start in range(0, k, BK):
        inside = at_k < k - start
        x = tl_.load(
            a + at_m[:, None] * a_m + (start + at_k)[None, :] * a_k,
            mask=(at_m < m)[:, None] & inside[None, :],
            other=0.0,
        )
        y = tl_.load(
            b + (start + at_k)[:, None] * b_k + at_n[None, :] * b_n,
            mask=inside[:, None] & (at_n < n)[None, :],
            other=0.0,
        )
        total = tl_.dot(x, y, total)
    here = (at_m < m)[:, None] & (at_n < n)[None, :]
    tl_.store(c + at_m[:, None] * n + at_n[None, :], total.to(c.dtype.element_ty), mask=here)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    product_tiles[grid](a, b, c, m, n, k, *a.stride(), *b.stride())
    return c


ATTENTIONS = [
    triton.Config({"BM": 128, "BN": bn}, num_warps=warps, num_stages=stages)
    for bn, warps, stages in ((64, 4, 3), (128, 8, 3), (64, 8, 3), (32, 8, 2))
]


@triton.autotune(configs=ATTENTIONS, key=["rows", "D", "CAUSAL"])
@triton.jit
def attention_tiles(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    o,
    scale,
    rows,
    D: tl_.constexpr,
    P: tl_.constexpr,
    CAUSAL: tl_.constexpr,
    BM: tl_.constexpr,
    BN: tl_.constexpr,
):
    """Packed [B, H, rows, D]; rows a multiple of both tiles. P: the power of two from D on."""
    block, head = tl_.program_id(0), tl_.program_id(1).to(tl_.int64)
    at_m, at_n, at_d = block * BM + tl_.arange(0, BM), tl_.arange(0, BN), tl_.arange(0, P)
    here = at_d < D
    start = head * rows * D
    queries = tl_.load(q + start + at_m[:, None] * D + at_d[None, :], mask=here[None, :], other=0.0)
    highest = tl_.full((BM,), -float("inf"), tl_.float32)
    total = tl_.zeros((BM,), tl_.float32)
    result = tl_.zeros((BM, P), tl_.float32)
    factor = scale * 1.4426950408889634
    end = (block + 1) * BM if CAUSAL else rows
    for n in range(0, end, BN):
        keys = tl_.load(k + start + (n + at_n)[None, :] * D + at_d[:, None], mask=here[:, None], other=0.0)
        scores = tl_.dot(queries, keys) * factor
        if CAUSAL:
            scores = tl_.where(n + at_n[None, :] <= at_m[:, None], scores, -float("inf"))
        above = tl_.maximum(highest, tl_.max(scores, 1))
        weights = tl_.exp2(scores - above[:, None])
        repair = tl_.exp2(highest - above)
        total = total * repair + tl_.sum(weights, 1)
        values = tl_.load(v + start + (n + at_n)[:, None] * D + at_d[None, :], mask=here[None, :], other=0.0)
        result = tl_.dot(weights.to(v.dtype.element_ty), values, result * repair[:, None])
        highest = above
    result = (result / total[:, None]).to(o.dtype.element_ty)
    tl_.store(o + start + at_m[:, None] * D + at_d[None, :], result, mask=here[None, :])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    o = torch.empty_like(q)
    batch, heads, rows, d = q.shape

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(rows, meta["BM"]), batch * heads

    attention_tiles[grid](q, k, v, o, scale, rows, D=d, P=triton.next_power_of_2(d), CAUSAL=causal)
    return o
