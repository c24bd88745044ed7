"""Hidden states for drafters: rows on a device do what arrays of the host do, and none come to the host in a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.devices.hidden import join, normalized
from quire.devices.registry import make_backend
from tests.drafter_files import write_eagle3
from tests.models import load_model
from tests.tiny import write_checkpoint

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import torch

from quire.devices.cuda.hidden import CudaRows


def test_rows_of_a_device_equal_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((5, width)).astype(np.float32) for width in (6, 3))
    weight = rng.standard_normal(6).astype(np.float32)
    rows: Any = [CudaRows(torch.from_numpy(x.copy())) for x in (a, b)]
    for found, wanted in (
        (join(rows, axis=1), join([a, b], axis=1)),
        (join([rows[0][1:3], rows[0][[4, 0]]]), a[[1, 2, 4, 0]]),
        (rows[1][2:], b[2:]),
    ):
        np.testing.assert_array_equal(np.asarray(found), wanted)
        assert len(found) == len(wanted)
    near = normalized(rows[0], weight, 1e-5)
    np.testing.assert_allclose(np.asarray(near), normalized(a, weight, 1e-5), rtol=1e-6)  # type: ignore[arg-type]


def test_a_head_drafts_without_hidden_states_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    model = write_checkpoint(tmp_path, "llama", **shape)
    (head := tmp_path / "head").mkdir()
    write_eagle3(head, load_model(model, make_backend(threads=1, device="cpu")).spec)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3 + i, 9))} for i in range(2)]
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 12, "block_size": 16}

    def answers(**more: Any) -> tuple[list[Any], int]:
        with LLM(model=str(model), **options, **more) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            return [[*output.outputs[0].token_ids] for output in found], llm.stats().spec_drafts

    def copied(self: CudaRows, dtype: Any = None, copy: Any = None) -> Any:
        raise AssertionError("hidden states were copied to the host")

    monkeypatch.setattr(CudaRows, "__array__", copied)
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    tokens, count = answers(device="interpreter", speculative_config=drafts)
    assert count > 0
    assert tokens == answers(device="cpu")[0]
