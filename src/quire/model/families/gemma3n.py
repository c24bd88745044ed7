"""Gemma 3n (text): several residual streams, inputs by layer, sparse MLPs, last layers that read earlier keys."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from quire.model.families.config import ConfigReader
from quire.model.families.family import (
    Family,
    alternate,
    biases,
    layer_kinds,
    num_layers,
    read_activation,
    read_decoder,
    read_list,
    windows_of,
)
from quire.model.families.gemma import GEMMA, NEWER, SANDWICH_NAMES, cap
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_layer_ropes
from quire.model.families.unlike import PER_LAYER_NAMES, keys_back, without_shared_keys
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.gemma3n import AltUpConfig, LayerInputsConfig


def read_gemma3n(config: ConfigReader) -> DecoderConfig:
    """Google 2025: AltUp, LAuReL, per-layer embeddings, statistical top-k in the first MLPs."""
    layers = num_layers(config)
    kinds = layer_kinds(config, alternate(layers, 5))
    back = keys_back(config, kinds)
    size, inner = config.integer("head_dim"), _inner(config, layers)
    ropes = read_layer_ropes(config, size, kinds, "rope_local_base_freq")
    config.expect("rope_scaling", None)  # the class merges it into one of the two ropes
    config.skip("altup_coef_clip")  # bounds coefficients in training
    streams = config.integer("altup_num_inputs", low=2)
    active = config.integer("altup_active_idx", low=0, high=streams - 1)
    cutoffs, activation = _cutoffs(config, layers), read_activation(config)
    if any(cutoffs) and activation != "gelu_tanh":
        raise config.wrong("hidden_act", activation, "gelu_pytorch_tanh where a layer is sparse")
    return read_decoder(
        config,
        **biases(config),
        intermediate_size=inner,
        attention_back=back,
        attention_value_norm=True,
        placement="sandwich",
        qk_norm="head",
        scores_scale=1.0,
        **ropes,
        scores_window=windows_of(config, kinds),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        head_cap=cap(config, "final_logit_softcapping"),
        added_inputs=LayerInputsConfig(
            config.integer("hidden_size_per_layer_input"), config.integer("vocab_size_per_layer_input")
        ),
        added_altup=AltUpConfig(streams, active, config.boolean("altup_correct_scale")),
        added_laurel=config.integer("laurel_rank"),
        mlp_cutoff=cutoffs,
    )


def _inner(config: ConfigReader, layers: int) -> list[int]:
    """Read the width of each layer's MLP: one for all, or a list."""
    given = config.get("intermediate_size")
    if not isinstance(given, list):
        return [config.integer("intermediate_size")] * layers
    must = "integers above 0, or one of them"
    return read_list(
        config, "intermediate_size", [1] * layers, lambda width: type(width) is int and width > 0, must
    )


def _cutoffs(config: ConfigReader, layers: int) -> list[float | None]:
    """Compute the standard deviations above the mean that a gate must reach, from the share of gates to leave out."""

    def fits(share: Any) -> bool:
        return type(share) in (int, float) and 0 <= share < 1

    sparse = 10 if layers > 10 else 0
    default = [0.95] * sparse + [0.0] * (layers - sparse)
    shares = read_list(config, "activation_sparsity_pattern", default, fits, "numbers from 0 to below 1")
    return [None if share == 0 else round(NormalDist().inv_cdf(share), 6) for share in shares]


def gemma3n_names(spec: DecoderConfig, config: ConfigReader) -> TensorNames:
    names = SANDWICH_NAMES.changed({"norm_offset": 0.0, **PER_LAYER_NAMES})
    return without_shared_keys(names, spec)


FAMILIES = {
    "Gemma3nForCausalLM": Family(
        "Gemma 3n (text: E2B, E4B)",
        read_gemma3n,
        gemma3n_names,
        {
            **GEMMA,
            "num_key_value_heads": 2,
            "vocab_size": 262400,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
        },
        NEWER,
    )
}
