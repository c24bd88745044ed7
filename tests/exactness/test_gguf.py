"""Files that llama.cpp quantized: each request alone, batched, chunked, preempted and cached, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import SCHEDULES, results

FILES = ("llama-Q8_0", "llama-Q4_K_M", "llama-Q6_K", "qwen3moe-Q4_K_M")
HARD = ("chunks of 7", "preempted, chunks, small blocks", "three threads")


def load(data: Path, name: str, **options: Any) -> LLM:
    llm = LLM(str(data / "gguf-llamacpp" / f"{name}.gguf"), **{"max_model_len": 160, **options})
    llm._front.reasoning_parser = "qwen3"  # for the bound on reasoning
    return llm


@pytest.mark.parametrize("name", FILES)
def test_any_schedule_equals_alone(name: str, data: Path) -> None:
    llm = load(data, name, threads=1, enable_prefix_caching=False, async_scheduling=False)
    wanted = []
    for prompt, params in zip(make_prompts(), PARAMS, strict=True):
        wanted += results(llm, [prompt], [params])
    for schedule in HARD:
        llm = load(data, name, **SCHEDULES[schedule])
        assert results(llm, make_prompts(), PARAMS) == wanted, schedule
        assert results(llm, make_prompts(), PARAMS) == wanted, (
            f"{schedule}: a warm prefix cache changed the result"
        )
