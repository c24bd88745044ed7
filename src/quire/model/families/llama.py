"""Llama, what all families share with it, and its nearest kin: Granite, SmolLM3, StableLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.devices.protocol import Activation
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.families.rope import context_length, read_rope, rotary_dim
from quire.model.spec import ArchSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Keys:
    """What a family calls the fields that all have."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    inner: str = "intermediate_size"
    activation: str = "hidden_act"
    eps: str = "rms_norm_eps"
    positions: str = "max_position_embeddings"


LLAMA = Keys()
STABLELM_NAMES = TensorNames(
    q_norm="self_attn.q_layernorm.norms", k_norm="self_attn.k_layernorm.norms", norm_by_head=True
)


def read_llama(config: ConfigReader) -> ArchSpec:
    """Llama 2 and 3.x, TinyLlama, SmolLM2, Yi."""
    bias = config.boolean("attention_bias", False)
    return llama_like(
        config,
        "LlamaForCausalLM",
        default_max_position=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
    )


def read_granite(config: ConfigReader) -> ArchSpec:
    """Granite 3: Llama with multipliers."""
    bias, scaling = config.boolean("attention_bias", False), config.number("logits_scaling", 1.0)
    if scaling == 0:
        raise config.wrong("logits_scaling", scaling, "greater than 0")
    return llama_like(
        config,
        "GraniteForCausalLM",
        default_max_position=2048,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / scaling,
    )


def read_smollm3(config: ConfigReader) -> ArchSpec:
    """SmolLM3: no positions in every fourth layer."""
    layers, bias = config.integer("num_hidden_layers", high=4096), config.boolean("attention_bias", False)
    interval = config.integer("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers")
    turned = [int((i + 1) % interval != 0) for i in range(layers)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) != layers or any(t not in (0, 1) for t in turned):
        raise config.wrong("no_rope_layers", turned, f"{layers} entries, each 0 or 1")
    spec = llama_like(
        config,
        "SmolLM3ForCausalLM",
        default_max_position=32768,
        default_kv_heads=4,
        default_theta=2000000.0,
        default_tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        windows=windows_of(config, layer_kinds(config, layers, [FULL] * layers), None),
    )
    config.expect("use_sliding_window", False)
    config.get("max_window_layers")  # of no meaning without a window
    return replace(spec, layer_ropes=tuple(spec.rope if t else None for t in turned))


def read_stablelm(config: ConfigReader) -> ArchSpec:
    """StableLM 2 and 3B: LayerNorm and partly rotated heads."""
    return llama_like(
        config,
        "StableLmForCausalLM",
        keys=Keys(eps="layer_norm_eps"),
        default_max_position=4096,
        default_kv_heads=32,
        default_eps=1e-5,
        rotated=rotary_dim(config, head_size(config), 0.25),
        norm="layer",
        norm_bias=True,
        qkv_bias=config.boolean("use_qkv_bias", False),
        qk_norm="own_head" if config.boolean("qk_layernorm", False) else None,
        placement="parallel" if config.boolean("use_parallel_residual", False) else "pre",
    )


def head_size(config: ConfigReader) -> int:
    """head_dim, or the hidden size's share of a head."""
    return config.integer(
        "head_dim", max(1, config.integer("hidden_size") // config.integer("num_attention_heads"))
    )


def alternate(layers: int, pattern: int) -> list[str]:
    """Every pattern-th layer sees all, the others slide."""
    return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]


def layer_kinds(config: ConfigReader, layers: int, default: list[str]) -> list[str]:
    """layer_types, or the family's own where absent."""
    kinds = config.get("layer_types")
    if kinds is None:
        return default
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in (FULL, SLIDING) for kind in kinds)
    ):
        raise config.wrong("layer_types", kinds, f"{layers} entries, each one of {FULL}, {SLIDING}")
    return kinds


def windows_of(config: ConfigReader, kinds: list[str], default: int | None) -> tuple[int | None, ...]:
    """The window of each layer by its kind; `default` is the family's where the key is absent."""
    absent = not config.has("sliding_window")
    window = config.get("sliding_window")
    window = default if absent else window
    if SLIDING in kinds and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise config.wrong("sliding_window", window, f"an integer >= 1 where layer_types has {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def llama_like(
    config: ConfigReader,
    architecture: str,
    *,
    keys: Keys = LLAMA,
    default_max_position: int | None = None,
    **fields: Any,
) -> ArchSpec:
    """The common shape; `fields` are ArchSpec's own, where the family sets them, and defaults where these differ.

    default_kv_heads is for an absent key; null means as many as query heads. `rotated` is how much of a head is (0:
    none of it, without a rope).
    """
    default = {name[8:]: fields.pop(name) for name in list(fields) if name.startswith("default_")}
    layers, heads = config.integer(keys.layers, high=4096), config.integer(keys.heads)
    hidden = config.integer(keys.hidden)
    kv_heads = fields.pop("num_kv_heads", None)
    if kv_heads is None:
        absent = default.get("kv_heads") if not config.has(keys.kv_heads) else None
        kv_heads = config.integer(keys.kv_heads, absent or heads)
    if heads % kv_heads:
        raise config.wrong(keys.kv_heads, kv_heads, f"a divisor of {keys.heads} ({heads})")
    head_dim = fields.pop("head_dim", None)
    if head_dim is None:
        head_dim = config.integer("head_dim", default.get("head_dim") or max(1, hidden // heads))
    rotated = fields.pop("rotated", head_dim)
    if rotated % 2:
        raise config.wrong("head_dim", head_dim, "even, for rotary embedding")
    max_position = config.integer(keys.positions, default_max_position)
    rope = None
    if rotated:
        rope = fields.pop("rope", None) or read_rope(
            config, rotated, max_position, default.get("theta", 10000.0)
        )
    given = {
        "norm": "rms",
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * layers,
        "tie_embeddings": config.boolean("tie_word_embeddings", default.get("tied", False)),
        **fields,
    }
    if "activation" not in given:
        given["activation"] = read_activation(config, keys.activation, default.get("activation", "silu"))
    if "intermediate_size" not in given:
        given["intermediate_size"] = config.integer(keys.inner, default.get("inner"))
    return ArchSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size", default.get("vocab")),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=context_length(rope, max_position),
        norm_eps=config.number(keys.eps, default.get("eps", 1e-6)),
        rope=rope,
        **given,
    )


def read_activation(config: ConfigReader, key: str, default: str) -> Activation:
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise config.wrong(key, name, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
