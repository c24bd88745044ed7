"""Llama."""

from __future__ import annotations

from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import Family, biases, read_decoder
from quire.model.parts.decoder import DecoderConfig


def read_llama(config: ConfigReader, **fields: Any) -> DecoderConfig:
    return read_decoder(config, **biases(config), mlp_bias=config.boolean("mlp_bias", False), **fields)


LLAMA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
FAMILIES = {
    "LlamaForCausalLM": Family(
        "Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama, SmolLM 2, Yi", read_llama, defaults=LLAMA
    )
}
