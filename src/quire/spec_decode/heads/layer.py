"""The config of a head's own layers, read as that of a decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.model.families import read_config
from quire.model.spec import ArchSpec
from quire.model.weights import AttentionWeights, LayerWeights, MLPWeights
from quire.spec_decode.head import HeadSource, integer

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


def layer_spec(config: dict[str, Any], path: Path) -> ArchSpec:
    """ModelError: the layers are not of a kind that drafters have."""
    kind = config.get("model_type", "llama")
    if kind not in _CLASSES:
        raise ModelError(
            f"{path}: layers of model_type {kind!r} are not supported in a drafter; supported are {', '.join(_CLASSES)}"
        )
    values = {key: value for key, value in config.items() if key not in _OTHER_KEYS}
    values["architectures"] = [_CLASSES[kind]]
    values.setdefault("max_position_embeddings", 2048)
    return read_config(values, str(path / "config.json"))[0]


def plain_layer(
    source: HeadSource, spec: ArchSpec, index: int, prefix: str, first_norm: bool = True
) -> LayerWeights:
    """A layer of a Llama or Qwen decoder; without `first_norm` attention reads what the layer gets."""
    d, h, n, g = spec.hidden_size, spec.head_dim, spec.num_heads, spec.num_kv_heads
    names = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
    rows = [n * h, g * h, g * h]
    bias = None
    if spec.qkv_bias:
        bias = source.packer.vector(
            [source.part(f"{name}.bias", (size,)) for name, size in zip(names, rows, strict=True)]
        )
    normed = spec.norms_qk(index)
    return LayerWeights(
        attention_norm=source.norm(f"{prefix}input_layernorm", d, spec.norm_eps) if first_norm else None,
        attention=AttentionWeights(
            qkv=source.matrix([f"{name}.weight" for name in names], rows, d),
            qkv_bias=bias,
            q_norm=source.norm(f"{prefix}self_attn.q_norm", h, spec.norm_eps) if normed else None,
            k_norm=source.norm(f"{prefix}self_attn.k_norm", h, spec.norm_eps) if normed else None,
            sinks=None,
            latent=None,
            gate=None,
            out_norm=None,
            out=source.matrix([f"{prefix}self_attn.o_proj.weight"], [d], n * h),
            out_bias=None,
        ),
        attention_post_norm=None,
        mlp_norm=source.norm(f"{prefix}post_attention_layernorm", d, spec.norm_eps),
        mlp=mlp(source, spec, prefix),
        moe=None,
        mlp_post_norm=None,
    )


def mlp(source: HeadSource, spec: ArchSpec, prefix: str) -> MLPWeights:
    d, inner = spec.hidden_size, spec.intermediate_size
    return MLPWeights(
        up=source.gated(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight", inner, d),
        up_bias=None,
        xielu=None,
        down_norm=None,
        down=source.matrix([f"{prefix}mlp.down_proj.weight"], [d], inner),
        down_bias=None,
    )


def published_tokens(config: dict[str, Any], default: int) -> int:
    """How many tokens the speculators library's config proposes to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return integer(methods[0], "speculative_tokens", "speculators_config", default) or default  # type: ignore[arg-type]
