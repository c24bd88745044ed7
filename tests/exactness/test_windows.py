"""Layers with a sliding window give memory back as they pass it. No token depends on that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.devices.kv import KVLayer, KVSpec

LENGTH = 700
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, n=3, max_tokens=20, ignore_eos=True),
]
MODELS = {
    "gemma3": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 2048},
    "gpt_oss": {"max_position_embeddings": 2048},
}


def converse(path: str, **options: Any) -> tuple[list[list[int]], list[int], int]:
    """Two turns of three conversations: the tokens, the cached tokens of the second turn, the blocks used at most."""
    rng = random.Random(3)
    llm = LLM(path, max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=4, **options)
    common = [rng.randrange(3, 250) for _ in range(200)]
    prompts = [
        common + [rng.randrange(3, 250) for _ in range(LENGTH - 200 + 7 * i)] for i in range(len(PARAMS))
    ]
    told, cached = [], []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
        told += [list(sample.token_ids) for output in outputs for sample in output.outputs]
        cached = [output.num_cached_tokens or 0 for output in outputs]
        prompts = [
            prompt + list(output.outputs[0].token_ids) + [9, 8, 7]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
    return told, cached, llm.stats().num_blocks


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_whole_blocks(
    family: str, tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(family, **MODELS[family])
    apart = converse(path, num_gpu_blocks_override=70)
    roomy = converse(path, num_gpu_blocks_override=600)
    monkeypatch.setattr(KVSpec, "divided", lambda spec: spec)
    whole = converse(path, num_gpu_blocks_override=600)
    assert apart[0] == roomy[0] == whole[0]
    assert min(roomy[1]) > LENGTH - 64, "a next turn goes on where the last one ended"


def test_eight_thousand_tokens_at_gemma_3s_shape_hold_a_fifth() -> None:
    layers = tuple(KVLayer(4, 256, 0 if i % 6 == 5 else 512) for i in range(48))
    shape = KVSpec(48, 4, 256, "bfloat16", layers=layers).divided().block_shape
    blocks = 8192 // 16
    held = shape.full * blocks + shape.windowed * (blocks - shape.first_in_sight(8191, 16))
    assert held / (shape.slabs * blocks) < 0.23


@pytest.mark.parametrize(("full", "windowed"), [(1, 5), (4, 22), (5, 29), (0, 8), (3, 0), (2, 1)])
def test_a_block_of_slabs_wastes_nothing(full: int, windowed: int) -> None:
    layers = (KVLayer(2, 16),) * full + (KVLayer(2, 16, 32),) * windowed
    whole = KVSpec(len(layers), 2, 16, "float32", layers=layers)
    assert whole.divided().bytes_per_token == whole.bytes_per_token
    assert whole.divided().apart == (windowed > 0)


def test_layers_of_unequal_sizes_share_slabs() -> None:
    """Gemma 4's shape: few wide heads where all positions are seen, more narrow ones in windows."""
    layers = tuple(KVLayer(2, 64) if i % 6 == 5 else KVLayer(4, 16, 64) for i in range(30))
    spec = KVSpec(30, 4, 64, "bfloat16", layers=layers)
    divided = spec.divided()
    full = {divided.columns[i] for i in range(30) if i % 6 == 5}
    assert full.isdisjoint(divided.columns[i] for i in range(30) if i % 6 != 5)
    assert divided.bytes_per_token <= 1.1 * spec.bytes_per_token
