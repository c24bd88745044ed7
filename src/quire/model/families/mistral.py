"""Mistral 7B and its kin: Llama with one sliding window on all layers, or none."""

from __future__ import annotations

from quire.model.families.config import ConfigReader
from quire.model.families.llama import llama_like
from quire.model.spec import ArchSpec


def read_mistral(config: ConfigReader) -> ArchSpec:
    """Jiang et al. 2023, arXiv:2310.06825. A null window (v0.2 and later) is full attention."""
    absent = not config.has("sliding_window")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    layers = config.integer("num_hidden_layers", high=4096)
    return llama_like(
        config,
        "MistralForCausalLM",
        default_max_position=131072,
        default_kv_heads=8,
        windows=(4096 if absent else window,) * layers,
    )
