"""Checkpoints that the formats' libraries quantized: each request alone, batched, chunked, preempted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.exactness.test_schedule import SCHEDULES
from tests.stand_ins import METHODS, write_quantized

# One of each layout, and of each way to round activations or caches.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 with zero points": ("awq-gemm-g128", {}),
    "int4, activations int8": ("awq-gemm-g32", {"quantization_activations": "int8"}),
    "int4, act-order": ("gptq-4bit-g32-desc-act", {}),
    "int8, activations static": ("ct-int8-w8a8-static", {"quantization_activations": "checkpoint"}),
    "int8, activations int8": ("ct-int8-w8a8-dynamic", {"quantization_activations": "checkpoint"}),
    "fp8, activations by group": ("ct-fp8-block", {"quantization_activations": "checkpoint"}),
    "fp8 with scales of the cache": (
        "modelopt-fp8-kv",
        {"quantization_activations": "checkpoint", "kv_cache_dtype": "fp8"},
    ),
    "fp8 experts": ("fp8-block-moe", {}),
    "nvfp4, activations nvfp4": ("ct-nvfp4", {"quantization_activations": "checkpoint"}),
    "mxfp4 experts": ("mxfp4-gpt-oss", {}),
    "nf4": ("bnb-nf4", {}),
    "table": ("squeezellm-4bit", {}),
    "table with outliers": ("squeezellm-4bit-sparse", {}),
    "float zero points": ("hqq-4bit-g64", {}),
    "scaled inputs": ("modelopt-w4a16-awq", {}),
}
HARD = ("batched", "chunks of 7", "preempted, chunks, small blocks", "three threads")
PARAMS = [
    SamplingParams(seed=1, max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=20, temperature=0.8, logprobs=3, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, temperature=1.2, top_k=20, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=20, repetition_penalty=1.2, top_p=0.8, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=16, temperature=0, ignore_eos=True),
]


def prompts() -> list[Any]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 160, 21).tolist()
    own = [rng.integers(0, 160, count).tolist() for count in (3, 40, 1, 17)]
    return [{"prompt_token_ids": ids} for ids in (*own, [*shared, *own[0]])]


def answers(llm: LLM, asked: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Tokens, and the exact log-probabilities, of each request."""
    found = llm.generate(asked, params, use_tqdm=False)
    return [
        (list(result.outputs[0].token_ids), repr(result.outputs[0].logprobs), repr(result.prompt_logprobs))
        for result in found
    ]


def load(folder: Path, options: dict[str, Any], **schedule: Any) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, **{"max_model_len": 160, **options, **schedule})


@pytest.mark.parametrize("case", CASES)
def test_any_schedule_equals_alone(case: str, data: Path) -> None:
    name, options = CASES[case]
    check(data / "quantized" / name, options)


@pytest.mark.parametrize("activations", ["float", "rounded"])
@pytest.mark.parametrize("method", METHODS)
def test_random_codes_give_what_they_give_alone(method: str, activations: str, tmp_path: Path) -> None:
    """Formats whose libraries are not needed to make a checkpoint: a clone with nothing beside it runs these."""
    rounded = "int8" if method in ("awq", "gptq") else "checkpoint"
    options = {"quantization_activations": "float" if activations == "float" else rounded}
    check(write_quantized(tmp_path / method, method), options)


def check(folder: Path, options: dict[str, Any]) -> None:
    """Each schedule gives the bits that each request gives alone."""
    with load(folder, options, threads=1, enable_prefix_caching=False, async_scheduling=False) as llm:
        pairs = zip(prompts(), PARAMS, strict=True)
        wanted = [answers(llm, [prompt], [params])[0] for prompt, params in pairs]
    for schedule in HARD:
        with load(folder, options, **SCHEDULES[schedule]) as llm:
            assert answers(llm, prompts(), PARAMS) == wanted, schedule
            assert answers(llm, prompts(), PARAMS) == wanted, f"{schedule}: a warm cache changed the result"
