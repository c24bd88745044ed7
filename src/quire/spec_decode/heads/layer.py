"""Reads the config of a head's own layers as a decoder's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.model.families import read_model
from quire.model.families.names import LLAMA_NAMES
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import Layer
from quire.model.shard import WHOLE
from quire.spec_decode.head import HeadSource, Named, integer

# What drafters' configs have beside the keys of their layers' family.
_OTHER_KEYS = {
    *(
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ),
    *("eagle_config", "eagle_aux_hidden_state_layer_ids", "bias", "qkv_bias", "auto_map"),
    *("block_size", "num_target_layers", "dflash_config"),
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def layer_spec(config: dict[str, Any], path: Path) -> DecoderConfig:
    """Read the layers. ModelError: they are not of a kind that drafters have."""
    kind = config.get("model_type", "llama")
    if kind not in _CLASSES:
        raise ModelError(
            f"{path}: layers of model_type {kind!r} are not supported in a drafter; supported are {', '.join(_CLASSES)}"
        )
    values = {key: value for key, value in config.items() if key not in _OTHER_KEYS}
    values["architectures"] = [_CLASSES[kind]]
    values.setdefault("max_position_embeddings", 2048)
    return read_model(values, str(path / "config.json"))[0]


def own_layers(
    source: HeadSource, config: DecoderConfig, prefix: str = "layers.{i}.", first: int = 0
) -> list[Layer]:
    """The layers from the `first` on; names of the tensors of layer i begin with `prefix`."""
    weights, count = Named.of(source, config, LLAMA_NAMES.changed({"layer": prefix})), config.num_layers
    return [Layer(config.layers[i], weights, f"layers.{i}", (i, count), WHOLE) for i in range(first, count)]


def published_tokens(config: dict[str, Any], default: int) -> int:
    """How many tokens the speculators library's config proposes to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return integer(methods[0], "speculative_tokens", "speculators_config", default) or default  # type: ignore[arg-type]
