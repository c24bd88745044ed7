"""Hybrids with recurrent layers against what transformers computed on published tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.devices.reference.backend import ReferenceBackend
from tests.model.tiny_models import Session
from tests.models import load_model

# The limits are what float32 of transformers itself is away from float64.
MODELS = {
    "lfm2": 1e-4,
    "qwen3-next": 5e-4,
    "qwen3.5-dense": 6e-4,
    "kimi-linear": 5e-4,
    "mamba2": 1e-4,
    "granite-hybrid": 5e-4,
    "nemotron-h-moe": 5e-4,
    "falcon-h1": 1e-4,
    "jamba": 5e-4,
    "falcon-mamba": 1e-4,
    "deepseek-v4": 5e-4,
    "glm-5.3-flash": 5e-4,
    "minimax-lightning": 5e-4,
    "recurrent-gemma": 1e-4,
    "deepseek-v3.2": 5e-4,
    "minimax-m3": 5e-4,
    "qwen4-exp": 5e-4,
}


def shares(logits: Any) -> Any:
    """Log-probabilities."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize(("name", "near"), MODELS.items())
def test_logits_equal_the_recorded_ones(name: str, near: float, data: Path) -> None:
    backend: Any = ReferenceBackend()
    expected = np.load(data / "hybrid" / name / "expected.npz")
    loaded = load_model(data / "hybrid" / name, backend)
    for letter in "ab":
        prompt = expected[f"prompt_{letter}"].tolist()
        session, rows = Session(loaded, backend), len(expected[f"logits_{letter}"])
        parts = [session.feed(prompt[i : i + 60]) for i in range(0, len(prompt), 60)]
        got = np.concatenate(parts)[-rows:]
        assert np.abs(shares(got) - shares(expected[f"logits_{letter}"])).max() < near
