"""Files that llama.cpp quantized: each request alone, batched, chunked, preempted and cached, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.exactness.requests import PARAMS, make_prompts
from tests.exactness.test_schedule import SCHEDULES, results
from tests.gguf_files import write_gguf
from tests.tiny import write_checkpoint

FILES = ("llama-Q8_0", "llama-Q4_K_M", "llama-Q6_K", "qwen3moe-Q4_K_M")
HARD = ("chunks of 7", "preempted, chunks, small blocks", "three threads")


def load(path: Path, **options: Any) -> LLM:
    llm = LLM(str(path), **{"max_model_len": 160, **options})
    llm._front.reasoning_parser = "qwen3"  # for the bound on reasoning
    return llm


@pytest.mark.parametrize("name", FILES)
def test_any_schedule_equals_alone(name: str, data: Path) -> None:
    check(data / "gguf-llamacpp" / f"{name}.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_files_of_the_gguf_package_do_too(kind: str, tmp_path: Path) -> None:
    """A clone with nothing beside it runs these."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = write_checkpoint(tmp_path / "model", **sizes)
    check(write_gguf(model, tmp_path / "model.gguf", kind=kind))


def check(path: Path) -> None:
    """Each schedule gives the bits that each request gives alone."""
    llm = load(path, threads=1, enable_prefix_caching=False, async_scheduling=False)
    wanted = []
    for prompt, params in zip(make_prompts(), PARAMS, strict=True):
        wanted += results(llm, [prompt], [params])
    for schedule in HARD:
        llm = load(path, **SCHEDULES[schedule])
        assert results(llm, make_prompts(), PARAMS) == wanted, schedule
        assert results(llm, make_prompts(), PARAMS) == wanted, (
            f"{schedule}: a warm prefix cache changed the result"
        )
