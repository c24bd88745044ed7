"""Fisher information of weights: squared gradients of the loss, sample by sample, with torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quire.devices.protocol import IntArray
from quire.lazy import Lazy, need
from quire.pretrained import load_pretrained
from quire.weights.tensor import FloatArray

if TYPE_CHECKING:
    import torch
    import transformers
else:
    torch, transformers = Lazy("torch"), Lazy("transformers")


def fisher_information(directory: Path, tokens: IntArray, cache: Path) -> None:
    """Write the sums of squared gradients of all matrices over samples [N, S] to `cache`, one .npy by name.

    The whole model is in memory, with its gradients. ConfigError if torch or transformers is missing.
    """
    need("--fisher", "torch", "transformers")
    model = load_pretrained(transformers.AutoModelForCausalLM, directory, dtype=torch.float32)
    named = {name: weight for name, weight in model.named_parameters() if weight.ndim >= 2}
    sums = {name: torch.zeros_like(weight) for name, weight in named.items()}
    for sample in tokens:
        model.zero_grad()
        ids = torch.tensor(sample[None].astype(np.int64))
        model(input_ids=ids, labels=ids).loss.backward()
        for name, weight in named.items():
            if weight.grad is not None:
                sums[name] += weight.grad**2
    cache.mkdir(parents=True, exist_ok=True)
    for name, total in sums.items():
        np.save(cache / f"{name}.npy", total.numpy())


def read_fisher(cache: Path, name: str) -> FloatArray:
    """Read what `fisher_information` wrote for one tensor."""
    values: FloatArray = np.load(cache / f"{name}.npy", allow_pickle=False)
    return values
