"""The language models inside tiny models of transformers that also see or hear: their text, natively."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ModelError
from quire.model.families import read_model
from quire.model.families.composite import CLASSES
from tests.model.tiny_models import Session
from tests.models import load_model
from tests.near import assert_near

_NAMED = (
    "DeepseekVL Exaone4_5_ GlmAsr GotOcr2 HyperCLOVAXVisionV2 Idefics2 Idefics3 InternVL LightOnOcr LlavaNext "
    "LlavaNextVideo LlavaOnevision MossTranscribeDiarize Ovis2 Qwen2Audio Qwen2VL Qwen2_5_VL Qwen3ASR SmolVLM "
    "VideoLlama3 VipLlava Voxtral"
)
NAMES = _NAMED.split()
PROMPT = [int(t) for t in np.random.default_rng(7).integers(3, 280, 40)]
# The sizes of all parts of a tiny model, by the names that configs give them.
SIZES = {
    **dict.fromkeys(
        ["hidden_size", "embed_dim", "d_model", "projection_dim", "out_hidden_size", "image_size"], 32
    ),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"], 64),
    **dict.fromkeys(
        ["num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"], 4
    ),
    **dict.fromkeys(
        ["num_hidden_layers", "encoder_layers", "decoder_layers", "depth", "num_key_value_heads"], 2
    ),
    **{"vocab_size": 300, "head_dim": 8, "patch_size": 8, "num_mel_bins": 16, "sliding_window": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 512},
}

LLAMA = {
    **dict.fromkeys(["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"], 8),
    **dict.fromkeys(["num_attention_heads", "num_key_value_heads", "num_hidden_layers"], 1),
    "rms_norm_eps": 1e-6,
}


def shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif name in SIZES and value is not None and not isinstance(value, (list, tuple)):
            setattr(config, name, SIZES[name])
        elif name == "layer_types" and value:
            config.layer_types = value[:2]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= 290:
            setattr(config, name, 290)
        elif name == "rope_parameters" and isinstance(value, dict):
            value["mrope_section"] = [1, 1, 2]


def composite(name: str, directory: Path) -> Any:
    """A tiny random model that sees or hears, saved by its own class."""
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = kind.config_class()
    shrink(config)
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_text_is_what_the_whole_model_makes_of_it(name: str, tmp_path: Path) -> None:
    model, backend = composite(name, tmp_path), ReferenceBackend()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    assert_near(Session(load_model(tmp_path, backend), backend).feed(PROMPT), expected)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_fields_of_the_text_may_lie_beside_the_tower(name: str, tmp_path: Path) -> None:
    """As the first files of these models have them."""
    composite(name, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = values.pop("text_config")
    flat = {
        **text,
        **values,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 1e6,
    }
    flat["rope_parameters"] = None
    values["text_config"] = {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read_model(flat, "flat")[0] == read_model(values, "nested")[0]


def test_names_that_fit_the_tensors_once_fit_them_again() -> None:
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "text_config": {"model_type": "llama", **LLAMA},
    }
    names = read_model(config)[1].fitted(["model.text_model.embed_tokens.weight"])
    assert names.layer.startswith("model.text_model.layers.")
    assert names.fitted(["model.text_model.embed_tokens.weight"]) == names


def test_a_text_that_is_no_family_is_refused_by_its_type() -> None:
    assert {f"{name}ForConditionalGeneration" for name in NAMES} <= CLASSES
    config = {"architectures": ["SmolVLMForConditionalGeneration"], "text_config": {"model_type": "nobodys"}}
    with pytest.raises(ModelError, match="model_type 'nobodys' is not one that Quire knows"):
        read_model(config, "config.json")
