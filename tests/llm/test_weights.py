"""A model that its files do not describe as they are: keys of its config replaced, or its weights left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelError
from quire.weights.source import changed_config
from tests.serve.running import start
from tests.tiny import VOCAB_SIZE, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("by_flag", [False, True])
def test_yarn_by_override_equals_transformers_at_three_times_the_length(
    tmp_path: Path, by_flag: bool
) -> None:
    path = write_checkpoint(tmp_path / "m", "llama", max_position_embeddings=64)
    options: dict[str, Any] = {"rope_scaling": YARN} if by_flag else {"hf_overrides": {"rope_scaling": YARN}}
    with pytest.raises(ConfigError, match="more than the 64 positions"):
        LLM(str(path), max_model_len=256)
    llm = LLM(str(path), max_model_len=256, max_logprobs=-1, max_num_batched_tokens=80, **options)
    tokens = np.random.default_rng(1).integers(5, VOCAB_SIZE, 192).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, logprobs=-1)
    (output,) = llm.generate({"prompt_token_ids": tokens}, params, use_tqdm=False)

    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"] = {**YARN, "rope_theta": config.get("rope_theta", 10000.0)}
    (path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1).numpy()
    for place in (1, 63, 64, 100, 191):
        entry = (output.prompt_logprobs or ())[place]
        assert entry is not None
        found = np.array([entry[token].logprob for token in range(VOCAB_SIZE)])
        np.testing.assert_allclose(found, wanted[place - 1], atol=2e-4)


def test_ropes_replace_each_other_under_both_names() -> None:
    new = {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert changed_config(new, {"rope_scaling": YARN}) == {"rope_theta": 5e5, "rope_scaling": YARN}
    assert changed_config(new, {"rope_theta": 1e4}) == {**old, "rope_theta": 1e4}
    assert changed_config(old, {"rope_theta": 1e4}) == {**old, "rope_theta": 1e4}
    both = {"rope_parameters": {**YARN, "rope_theta": 1e4}}
    assert changed_config(old, both) == both
    nested = {"text_config": {"a": 1, "b": 2}}
    assert changed_config(nested, {"text_config": {"b": 3}}) == {"text_config": {"a": 1, "b": 3}}


@pytest.fixture(scope="module")
def config_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds a config.json and nothing else."""
    whole = write_checkpoint(tmp_path_factory.mktemp("whole") / "m", "qwen3", "bfloat16")
    path = tmp_path_factory.mktemp("alone")
    (path / "config.json").write_text((whole / "config.json").read_text())
    return path


def test_dummy_weights_need_a_config_alone(config_alone: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match="no weights found"):
        LLM(str(config_alone))
    llm = LLM(str(config_alone), load_format="dummy", max_model_len=64)
    assert "holds no tokenizer: prompts and outputs are token ids" in caplog.text
    assert llm.report.dtype == "bfloat16"
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [9, 8]}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    again = LLM(str(config_alone), load_format="dummy", max_model_len=64).generate(prompts, GREEDY)
    assert [o.outputs for o in again] == [o.outputs for o in outputs], "dummy weights are always the same"
    quantized = LLM(str(config_alone), load_format="dummy", max_model_len=64, quantization="int8")
    assert quantized.report.dtype.startswith("int8")
    with pytest.raises(ConfigError, match="load_format must be one of"):
        LLM(str(config_alone), load_format="bitsandbytes")


def test_dummy_weights_are_served(config_alone: Path) -> None:
    server = start(
        maker="quire.client.start", model=str(config_alone), load_format="dummy", max_model_len=64, threads=1
    )
    try:
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        reply = server.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
    finally:
        server.stop()


def test_default_parameters_and_window(tiny_model: Callable[..., str]) -> None:
    changes = {"temperature": 0.25, "max_new_tokens": 3}
    with LLM(tiny_model(), max_model_len=64, override_generation_config=changes) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.max_tokens) == (0.25, 3)
        assert len(llm.generate("abc")[0].outputs[0].token_ids) <= 3
    with LLM(tiny_model("mistral", sliding_window=24), disable_sliding_window=True) as llm:
        assert llm.max_model_len == 24
