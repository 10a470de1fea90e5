"""The story of one kernel: from the definition of attention to a kernel that never stores the score matrix.

It shows the text, what the compiler derived from it and why that is right, what it decided and on which numbers, the
program that came out, a check against float64, and a measured table against the same text compiled without fusing.
It ends with exit code 1 where anything is wrong.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

import tileloom as tl
from tileloom.bench import Measured, WrongResult
from tileloom.compiler.explain import Explanation
from tileloom.render import bytes_text, explanation, table

KERNEL = Path(__file__).with_name("attention.tile")
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
TOLERANCE = 1e-5
SWEEP = (512, 1024, 2048)
LONG = 65536
ALLOWED_SLOWER = 1.15
"""Two cores shared with whatever else runs: a little slower than naive is noise, more is a fault."""

Array = NDArray[np.float32]
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def say(text: str) -> None:
    console.print(Text(text))


def chapter(title: str, text: str = "") -> None:
    console.print()
    console.print(Rule(Text(title, style="bold"), align="left"))
    if text:
        say(text)


def inputs(rows: int, keys: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """q [1, H, rows, D], k and v [1, G, keys, D]"""
    random = np.random.default_rng(seed)
    q = random.standard_normal((1, HEADS, rows, WIDTH), np.float32)
    k, v = (random.standard_normal((1, KEY_HEADS, keys, WIDTH), np.float32) for _ in range(2))
    return q, k, v


def exact(q: Array, k: Array, v: Array, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention in float64 by hand, independent of tileloom: o and lse. Rows that see no key give 0 and -inf."""
    shared = q.shape[1] // k.shape[1]
    q64, k64, v64 = q.astype(np.float64), *(x.astype(np.float64).repeat(shared, axis=1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    seen = np.arange(keys) <= np.arange(rows)[:, None] + keys - rows
    scores = np.where(seen, scale * (q64 @ k64.swapaxes(-1, -2)), -np.inf)
    with np.errstate(divide="ignore"):
        largest = scores.max(axis=-1, keepdims=True)
        shifted = np.exp(scores - np.where(np.isinf(largest), 0.0, largest))
        total = shifted.sum(axis=-1, keepdims=True)
        lse = (np.where(np.isinf(largest), 0.0, largest) + np.log(total))[..., 0]
    return shifted / np.where(total == 0.0, 1.0, total) @ v64, lse


# ---------------------------------------------------------------- chapters


def tell_text() -> None:
    chapter(
        "1. What you write",
        f"The definition of attention, {KERNEL.name}. It says what to compute, and nothing about how.",
    )
    say(f"\n{KERNEL.read_text(encoding='utf-8').rstrip()}")
    say(
        "\nRead as it stands, s and p are two matrices of M by N for each head: for 64k keys they are gigabytes, written to "
        "memory once and read again. softmax is not built in; its text is max, exp, sum and a division."
    )


def tell_derivation(facts: Explanation) -> None:
    chapter(
        "2. What the compiler derived",
        "The maximum of a row is known only after all keys were seen, and the sums need it from the start. But if g is what "
        "one key adds to a sum, and g = G(key) · H(maximum), then a sum made with an old maximum is mended by one factor, "
        "H(new) / H(old). The compiler looks for that factor by itself, proves that it is right, and so needs only one pass "
        "over the keys.\n",
    )
    console.print(explanation(facts, ["derive"]))


def tell_decisions(facts: Explanation) -> None:
    chapter(
        "3. What it decided, and on which numbers",
        "Each intermediate can be stored or computed where it is used. All combinations are lowered to programs, and the "
        "one with the least predicted time is taken; the table has the numbers of each choice and of its opposite.\n",
    )
    console.print(explanation(facts, ["fusion", "memory"]))


def tell_program(kernel: tl.CompiledKernel) -> None:
    chapter(
        "4. The program",
        "A tile is a piece of a matrix that stays near the arithmetic (cache here, shared memory and registers on a GPU). "
        "One task has 64 rows of q; it walks over the keys, tile by tile, and carries three running values.\n",
    )
    say(kernel.stages["tile"].rstrip())
    say("\nFrom this comes Numba source: `tileloom show examples/attention.tile --emit source`.")


def check(kernel: tl.CompiledKernel) -> bool:
    """Compare with float64, ragged sizes and rows that see no key included."""
    chapter("5. Is it right?", "Against attention in float64, written by hand in NumPy:\n")
    rows = []
    for m, n in ((500, 500), (1, 777), (130, 97)):
        q, k, v = inputs(m, n, seed=m)
        results = kernel(q, k, v, scale=0.125)
        errors = [largest_error(a, b) for a, b in zip(results, exact(q, k, v, 0.125), strict=True)]
        rows.append((m, n, *errors))
    cells = ((str(m), str(n), f"{o:.1e}", f"{lse:.1e}") for m, n, o, lse in rows)
    console.print(table(("M", "N", "largest error of o", "of lse"), cells, left=0))
    good = all(error <= TOLERANCE for *_, o, lse in rows for error in (o, lse))
    say(f"allowed {TOLERANCE:.0e}: {'ok' if good else 'WRONG'}")
    say("The same code ran all sizes; in the last, 33 rows see no key and are 0.")
    return good


def largest_error(result: Array, reference: NDArray[np.float64]) -> float:
    """Largest absolute difference; infinite where an infinity or NaN stands in one only."""
    finite = np.isfinite(reference)
    if not np.array_equal(result[~finite], reference[~finite]):
        return float("inf")
    return float(np.abs(result[finite] - reference[finite]).max(initial=0.0))


def race(kernel: tl.CompiledKernel) -> bool:
    """Measure fused and naive over sizes; is fused not slower where it counts, and does its memory stay the same?"""
    chapter(
        "6. Does it pay?",
        "The same text twice: as compiled, and with `fuse none`, where every statement is a kernel of its own and s and p "
        "lie in memory. Both are checked against float64 first; then they are timed in turn.\n",
    )
    rows: list[Measured] = []
    for m, n in (*((n, n) for n in SWEEP), (64, LONG)):
        q, k, v = inputs(m, n)
        rows += kernel.benchmark(q, k, v, scale=0.125, against=("naive",)).rows
    console.print(race_table(rows))
    fused, naive = ([m for m in rows if m.row.variant == name] for name in ("compiled", "naive"))
    constant = len({m.row.peak_bytes for m in fused}) == 1
    last = SWEEP[-1], SWEEP[-1]
    ratio = next(
        b.row.median_ms / a.row.median_ms
        for a, b in zip(fused, naive, strict=True)
        if (a.sizes["M"], a.sizes["N"]) == last
    )
    say(f"At M = N = {last[0]} naive takes {ratio:.2f} times as long as fused.")
    say(
        f"Beyond inputs and outputs fused needs {bytes_text(fused[0].row.peak_bytes or 0)} at every size, "
        f"naive up to {bytes_text(max(m.row.peak_bytes or 0 for m in naive))}."
        if constant
        else "WRONG: the fused kernel's memory changes with the size"
    )
    return constant and ratio * ALLOWED_SLOWER >= 1


def race_table(rows: list[Measured]) -> object:
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    return table(
        ("M", "N", "fused ms", "naive ms", "naive/fused", "fused memory", "naive memory", "error"),
        (
            (
                str(a.sizes["M"]),
                str(a.sizes["N"]),
                f"{a.row.median_ms:.2f}",
                f"{b.row.median_ms:.2f}",
                f"{b.row.median_ms / a.row.median_ms:.2f}",
                bytes_text(a.row.peak_bytes or 0),
                bytes_text(b.row.peak_bytes or 0),
                f"{a.row.error:.1e}",
            )
            for a, b in pairs
        ),
        left=0,
    )


def main() -> int:
    start = time.perf_counter()
    here = KERNEL.relative_to(Path.cwd()) if KERNEL.is_relative_to(Path.cwd()) else KERNEL
    kernel = tl.compile(tl.load(here)["attention"])
    sizes = {"B": 1, "H": HEADS, "G": KEY_HEADS, "M": SWEEP[-1], "N": SWEEP[-1], "D": WIDTH, "E": WIDTH}
    facts = kernel.explain(**sizes).facts
    tell_text()
    tell_derivation(facts)
    tell_decisions(facts)
    tell_program(kernel)
    right = check(kernel)
    try:
        pays = race(kernel)
    except WrongResult as reason:
        say(f"WRONG: {reason}")
        return 1
    say(f"\nAll of this took {time.perf_counter() - start:.0f} s, compiling included.")
    return 0 if right and pays else 1


if __name__ == "__main__":
    sys.exit(main())
