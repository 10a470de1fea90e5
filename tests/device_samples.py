"""Products and attentions drawn by a seed: text of the kernel, tensors between islands of NaN, results in float64.

A kernel serves several cases, for sizes along M and N are known at run time only. `draw(kernels, cases)` gives the same list
for the same numbers, so that a failing case can be run again by its name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MARGIN = 64
"""Elements of NaN before and after each tensor."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}
"""Half a step of the stored type near 1; for f32 what 2,000 sums in another order may be off."""
TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

PRODUCT = """
kernel product(a: {T}[{a}], b: {T}[{b}]{more}) -> c: {T}[M, N] {{
    y[m, n] = sum[k](a[{ai}] * b[{bi}])
    c[m, n] = {epilogue}
}}
"""
EPILOGUES = {
    "plain": "y[m, n]",
    "bias": "y[m, n] + bias[n]",
    "gelu": "gelu(y[m, n] + bias[n])",
    "residual": "r[m, n] + max(y[m, n] + bias[n], 0)",
}
ATTENTION = """
kernel attention(q: {T}[B, H, M, {D}], k: {T}[B, G, N, {D}], v: {T}[B, G, N, {E}], {more}scale: f32)
    -> (o: {T}[B, H, M, {E}], lse: f32[B, H, M]) {{
    require H % G == 0, scale > 0
    s[b, h, m, n] = {score}
    p[b, h, m, n] = softmax[n | {predicate}](s[b, h, m, n])
    o[b, h, m, e] = sum[n](p[b, h, m, n] * v[b, h // (H // G), n, e])
    lse[b, h, m] = logsumexp[n | {predicate}](s[b, h, m, n])
}}
"""
SCALED = "scale * sum[d](q[b, h, m, d] * k[b, h // (H // G), n, d])"
SCORES = {
    "plain": SCALED,
    "softcap": "softcap(" + SCALED + ", 5.0)",
    "alibi": SCALED + " + slope[h] * f32(n - m)",
}
PREDICATES = {
    "full": "n < N",
    "causal": "n <= m + N - M",
    "window": "n <= m + N - M and m + N - M - n < 50",
    "lengths": "n < len[b]",
}


@dataclass(frozen=True)
class Product:
    kind: str
    a: str
    b: str
    epilogue: str

    name = "product"

    def extras(self) -> dict[str, str]:
        """The epilogue's own tensors, with their shapes."""
        shapes = {"bias": "N", "r": "M, N"}
        return {n: shape for n, shape in shapes.items() if f"{n}[" in EPILOGUES[self.epilogue]}

    @property
    def text(self) -> str:
        axes = {"n": ("M, K", "m, k", "K, N", "k, n"), "t": ("K, M", "k, m", "N, K", "n, k")}
        return PRODUCT.format(
            T=TYPES[self.kind],
            a=axes[self.a][0], ai=axes[self.a][1], b=axes[self.b][2], bi=axes[self.b][3],
            epilogue=EPILOGUES[self.epilogue],
            more="".join(f", {n}: {TYPES[self.kind]}[{shape}]" for n, shape in self.extras().items()),
        )  # fmt: skip

    def sizes(self, rng: random.Random) -> dict[str, int]:
        m, n, k = (rng.choice((1, 3, 8, 17, 64, 100, 129, 256, 500, rng.randint(1, 700))) for _ in range(3))
        return {"M": m, "N": n, "K": rng.choice((k, 8 * k))}

    def run(self, case: Case, torch: Any, compiled: Any, device: str) -> Iterator[tuple[str, Any, Any]]:
        s, make = case.sizes, case.islands(torch, self.kind, device)
        a = make((s["M"], s["K"]) if self.a == "n" else (s["K"], s["M"]))
        b = make((s["K"], s["N"]) if self.b == "n" else (s["N"], s["K"]))
        bias, r = make((s["N"],)), make((s["M"], s["N"]))
        own = {"bias": bias, "r": r}
        out = Island(torch, (s["M"], s["N"]), self.kind, device, case.offset)
        compiled(a, b, **{n: own[n] for n in self.extras()}, out=out.inner)
        y = (a if self.a == "n" else a.T).double() @ (b if self.b == "n" else b.T).double()
        z = y + bias.double()
        want = {
            "plain": y,
            "bias": z,
            "gelu": torch.nn.functional.gelu(z, approximate="tanh"),
            "residual": r.double() + z.clamp(min=0),
        }[self.epilogue]
        assert out.surrounded()
        yield "c", out.inner, want


@dataclass(frozen=True)
class Attention:
    kind: str
    d: int
    e: int
    score: str
    predicate: str

    name = "attention"

    @property
    def text(self) -> str:
        more = "len: i32[B], " * (self.predicate == "lengths") + "slope: f32[H], " * (self.score == "alibi")
        return ATTENTION.format(
            T=TYPES[self.kind], D=self.d, E=self.e, score=SCORES[self.score], predicate=PREDICATES[self.predicate],
            more=more,
        )  # fmt: skip

    def sizes(self, rng: random.Random) -> dict[str, int]:
        m, n = (rng.choice((1, 2, 16, 63, 64, 65, 128, 200, rng.randint(1, 400))) for _ in range(2))
        heads, group = rng.choice(((1, 1), (2, 2), (4, 2), (3, 1)))
        return {"B": rng.choice((1, 2)), "H": heads, "G": group, "M": m, "N": n}

    def run(self, case: Case, torch: Any, compiled: Any, device: str) -> Iterator[tuple[str, Any, Any]]:
        z, make = case.sizes, case.islands(torch, self.kind, device)
        rng = random.Random(case.name)
        batch, heads, rows, columns = z["B"], z["H"], z["M"], z["N"]
        q = make((batch, heads, rows, self.d))
        k, v = make((batch, z["G"], columns, self.d)), make((batch, z["G"], columns, self.e))
        lengths = [rng.randint(0, columns) for _ in range(batch)]
        length = torch.tensor(lengths, device=device, dtype=torch.int32)
        slope = torch.tensor([rng.uniform(0.01, 0.2) for _ in range(heads)], device=device)
        scale = self.d**-0.5
        o = Island(torch, (batch, heads, rows, self.e), self.kind, device, case.offset)
        lse = Island(torch, (batch, heads, rows), "float32", device, 0)
        own = {"len": length} if self.predicate == "lengths" else {}
        own |= {"slope": slope} if self.score == "alibi" else {}
        compiled(q, k, v, **own, scale=scale, out=(o.inner, lse.inner))
        wide = [x.double().repeat_interleave(heads // z["G"], 1) for x in (k, v)]
        s = q.double() @ wide[0].transpose(-1, -2) * scale
        m, n = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
        if self.score == "softcap":
            s = 5.0 * torch.tanh(s / 5.0)
        if self.score == "alibi":
            s = s + slope.double()[:, None, None] * (n - m)
        last = m + columns - rows
        seen = {
            "full": n < columns,
            "causal": n <= last,
            "window": (n <= last) & (last - n < 50),
            "lengths": n < length[:, None, None, None],
        }[self.predicate]
        s = s.masked_fill(~seen.expand(s.shape), float("-inf"))
        assert o.surrounded()
        assert lse.surrounded()
        yield "o", o.inner, torch.softmax(s, -1).nan_to_num(0.0) @ wide[1]
        yield "lse", lse.inner, torch.logsumexp(s, -1)


class Island:
    """A tensor between NaNs, `offset` elements from alignment."""

    def __init__(
        self, torch: Any, shape: tuple[int, ...], kind: str, device: str, offset: int, turned: bool = False
    ) -> None:
        packed = (*shape[:-2], shape[-1], shape[-2]) if turned and len(shape) > 1 else shape
        size = 1
        for extent in packed:
            size *= extent
        self.start, self.end, self.torch = MARGIN + offset, MARGIN + offset + size, torch
        self.pool = torch.full(
            (size + 2 * MARGIN + offset,), float("nan"), device=device, dtype=getattr(torch, kind)
        )
        inner = self.pool[self.start : self.end].view(packed)
        self.inner = inner.transpose(-1, -2) if packed != shape else inner

    def surrounded(self) -> bool:
        """Is what lies around still untouched?"""
        return bool(self.pool[: self.start].isnan().all() and self.pool[self.end :].isnan().all())


@dataclass(frozen=True)
class Case:
    """One call of a kernel. `offset` elements from alignment; `turned` inputs have their last two axes swapped in memory."""

    name: str
    kernel: Product | Attention
    sizes: dict[str, int]
    offset: int
    turned: bool

    def islands(self, torch: Any, kind: str, device: str) -> Any:
        made = torch.Generator().manual_seed(random.Random(self.name).randrange(1 << 30))

        def make(shape: tuple[int, ...]) -> Any:
            island = Island(torch, shape, kind, device, self.offset, self.turned)
            island.inner.copy_(torch.randn(shape, generator=made))
            return island.inner

        return make

    def errors(self, torch: Any, compiled: Any, device: str) -> Iterator[str]:
        """What is wrong with the results, in words; nothing where they are right.

        The greatest error may be three roundings to the stored type of the greatest magnitude: one of the result, one of
        weights that meet a stored operand, and one for sums in another order.
        """
        for name, got, want in self.kernel.run(self, torch, compiled, device):
            finite = want.isfinite()
            if not bool((got.isfinite() == finite).all()):
                yield f"{name}: infinities or NaN stand elsewhere"
            elif bool(finite.any()):
                error = float((got.double() - want)[finite].abs().max())
                kind = self.kernel.kind if name != "lse" else "float32"
                allowed = 3 * ROUNDING[kind] * max(1.0, float(want[finite].abs().max()))
                if error > allowed:
                    yield f"{name}: off by {error:.2e}, {allowed:.2e} allowed"


def draw(kernels: int, cases: int, seed: int = 7) -> list[tuple[Product | Attention, list[Case]]]:
    """`kernels` distinct kernels, with `cases` calls of each."""
    rng = random.Random(seed)
    found: dict[Product | Attention, None] = {}
    while len(found) < kernels:
        found[_kernel(rng)] = None
    drawn = []
    for number, kernel in enumerate(found):
        calls = [
            Case(f"{number}.{i}", kernel, kernel.sizes(rng), rng.choice((0, 0, 1)), rng.random() < 0.25)
            for i in range(cases)
        ]
        drawn.append((kernel, calls))
    return drawn


def _kernel(rng: random.Random) -> Product | Attention:
    kind = rng.choice(("bfloat16", "bfloat16", "float16", "float32"))
    if rng.random() < 0.4:
        return Product(kind, rng.choice("nt"), rng.choice("nt"), rng.choice(tuple(EPILOGUES)))
    d = rng.choice((16, 32, 40, 64, 64, 80, 96, 128, 128, 256))
    e = rng.choice((d, d, 16, 64, 128))
    return Attention(kind, d, e, rng.choice(tuple(SCORES)), rng.choice(tuple(PREDICATES)))
