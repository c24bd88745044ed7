"""Families with operations that no other test here computes: a device's logits are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire.devices.protocol import Limits, ModelInput, StateInput
from quire.devices.registry import make_backend
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

FAMILIES = [
    *(
        "apertus",
        "arcee",
        "bitnet",
        "deepseek_v2",
        "deepseek_v4",
        "dots1",
        "ernie4_5_moe",
        "flint",
        "gemma3n_text",
    ),
    *("gemma4_text", "glm5_next_text", "granitemoeshared", "hunyuan_v1_moe", "hy_v4", "kolibri1", "laguna"),
    *("llama4_text", "mimo_v2_flash", "minimax_m2", "mistral_large4_text", "mpt", "olmo", "olmoe", "opt"),
    *("persimmon", "phi", "phimoe", "qwen2_moe", "qwen4", "stablelm", "xglm"),
]
COUNTS = 17, 5


def logits(model: Path, device: str) -> Any:
    """Logits of two prompts in one step."""
    backend, info = make_backend(threads=1, device=device), inspect_model(model)
    loaded, spec = load_model(model, backend), info.kv_spec("float32")
    stateful, total = bool(spec.bytes_per_state(0)), sum(COUNTS)
    cache = backend.kv_cache(spec, 4, 16, *((2, 1) if stateful else ()))
    tokens = np.random.default_rng(3).integers(0, info.spec.vocab_size, total).astype(np.int32)
    counts, order = np.array(COUNTS, np.int32), np.arange(2, dtype=np.int32)
    cu_q, table = np.array([0, COUNTS[0], total], np.int32), np.array([[1, 3], [2, 0]], np.int32)
    positions = np.concatenate([np.arange(count) for count in COUNTS]).astype(np.int32)
    states = StateInput(order, 0 * order, counts, np.zeros((0, 3), np.int32)) if stateful else None
    rows = np.array([3, COUNTS[0] - 1, total - 1], np.int32)
    step = ModelInput(tokens, positions, cu_q, counts, order, table, rows, states=states)
    return backend.compile(loaded.graph, cache, Limits(total, 2, 3)).run(step).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_cpu_s(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family)
    found, wanted = (logits(model, device) for device in ("interpreter", "cpu"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-4)
