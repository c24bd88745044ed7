"""Attention that sees chosen keys: what is said depends on the request alone, whatever is shared or taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM
from quire.errors import ConfigError
from tests.exactness.test_recurrent import BASE, PARAMS, SCHEDULES, prompts, said
from tests.model.tiny_models import make_model
from tests.tiny import write_tokenizer

ALONE = {**BASE, "enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["glm-5.2", "mistral-large-4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Choices that layers share, and latents too."""
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, vocab_size=260, max_position_embeddings=400).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[list[int]]]:
    """What each prompt gives cold and alone."""
    llm = LLM(str(model), **ALONE)
    return [said(llm, [one], [params])[0] for one, params in zip(prompts(), PARAMS, strict=True)]


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "no snapshots"])
def test_tokens_depend_on_the_request_alone(schedule: str, model: Path, alone: list[list[list[int]]]) -> None:
    options = {**BASE, **SCHEDULES[schedule]}
    if schedule == "two stages" and model.name.startswith("mistral"):
        with pytest.raises(
            ConfigError, match="can be parted into at most 1 stages"
        ):  # latents are shared across
            LLM(str(model), **options)
        return
    if "kv_cache_dtype" in options:
        cold = LLM(str(model), **{**options, "enable_prefix_caching": False})
        alone = [said(cold, [one], [params])[0] for one, params in zip(prompts(), PARAMS, strict=True)]
    llm = LLM(str(model), **options)
    for _ in range(2):  # the second time from what the first has left
        assert said(llm, prompts(), PARAMS) == alone
    llm.shutdown()
