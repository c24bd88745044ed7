"""Mistral 7B and its kin: Llama with one sliding window on all layers, on some, or none; and Mixtral."""

from __future__ import annotations

from quire.devices.protocol import Routing
from quire.model.families.config import ConfigReader
from quire.model.families.llama import FULL, SLIDING, layer_kinds, llama_like, windows_of
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec, MoESpec

MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{e}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def read_mistral(config: ConfigReader) -> ArchSpec:
    """Jiang et al. 2023, arXiv:2310.06825. A null window (v0.2 and later) is full attention."""
    return llama_like(
        config,
        "MistralForCausalLM",
        default_max_position=131072,
        default_kv_heads=8,
        windows=one_window(config, 4096),
    )


def read_ministral(config: ConfigReader) -> ArchSpec:
    """Ministral 8B: the window is on the layers that layer_types names."""
    layers = config.integer("num_hidden_layers", high=4096)
    slides = not config.has("sliding_window") or config.get("sliding_window") is not None
    kinds = layer_kinds(config, layers, [SLIDING if slides else FULL] * layers)
    return llama_like(
        config,
        "MinistralForCausalLM",
        default_max_position=131072,
        default_kv_heads=8,
        windows=windows_of(config, kinds, 4096),
    )


def read_mixtral(config: ConfigReader) -> ArchSpec:
    """Jiang et al. 2024, arXiv:2401.04088."""
    layers, inner = config.integer("num_hidden_layers", high=4096), config.integer("intermediate_size", 14336)
    experts = config.integer("num_local_experts", 8)
    routing = Routing(experts, config.integer("num_experts_per_tok", 2, high=experts), renormalize=True)
    return llama_like(
        config,
        "MixtralForCausalLM",
        default_max_position=131072,
        default_kv_heads=8,
        default_theta=1e6,
        default_eps=1e-5,
        windows=one_window(config, None),
        moe=MoESpec(routing, inner, (True,) * layers),
    )


def one_window(config: ConfigReader, default: int | None) -> tuple[int | None, ...]:
    """The same window in all layers; null is full attention, `default` for an absent key."""
    absent = not config.has("sliding_window")
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    return (default if absent else window,) * config.integer("num_hidden_layers", high=4096)
