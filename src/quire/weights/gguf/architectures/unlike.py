"""GGUF architectures whose layers have unlike shapes: Gemma 3n and 4, MiMo-V2, Step 3.5, Nemotron-NAS."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from quire.weights.gguf.config import (
    FULL,
    SLIDING,
    Config,
    Keys,
    common,
    has_bias,
    head_dim,
    layer_types,
    named,
    rope,
)
from quire.weights.gguf.kinds import PLAIN


def gemma3n(keys: Keys) -> Config:
    config = _gemma(keys, common(keys) | head_dim(keys), 5)
    ropes = rope(keys, config["head_dim"], 1e6)
    cutoffs = keys.get("activation_sparsity_scale")
    sparsity = None
    if cutoffs is not None:
        if not isinstance(cutoffs, list) or any(type(x) is not float or x != x for x in cutoffs):
            raise keys.wrong("activation_sparsity_scale", "numbers", cutoffs)
        sparsity = [round(NormalDist().cdf(x), 6) if x > -np.inf else 0.0 for x in cutoffs]
    config |= ropes | {
        "intermediate_size": keys.by_layer("feed_forward_length"),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "altup_num_inputs": keys.integer("altup.num_inputs"),
        "altup_active_idx": keys.count("altup.active_idx"),
        "laurel_rank": _rows(keys, "blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": _rows(keys, "per_layer_token_embd.weight"),
        "activation_sparsity_pattern": sparsity,
    }
    return named("Gemma3nForCausalLM", config)


def gemma4(keys: Keys) -> Config:
    """Full layers rotate a share of each head: the frequencies of the others are divided by a huge factor."""
    found = common(keys, alike=False)
    config = _gemma(keys, found, 6)
    kinds, heads = (
        config["layer_types"],
        keys.by_layer("attention.head_count_kv", config["num_attention_heads"]),
    )
    sizes = keys.integer("attention.key_length"), keys.integer("attention.key_length_swa")
    for name, size in zip(("value_length", "value_length_swa"), sizes, strict=True):
        if keys.integer(f"attention.{name}", size) != size:
            raise keys.wrong(f"attention.{name}", f"{size}, as the keys", keys.get(f"attention.{name}"))
    rotated = (
        keys.integer("rope.dimension_count", sizes[0]),
        keys.integer("rope.dimension_count_swa", sizes[1]),
    )
    if rotated != sizes:
        raise keys.wrong("rope.dimension_count", f"{sizes}, as the keys of both kinds of layers", rotated)
    kv = dict(zip(kinds, heads, strict=True))
    if [kv[kind] for kind in kinds] != heads:
        raise keys.wrong("attention.head_count_kv", "the same in all layers of a kind", heads)
    inner = keys.by_layer("feed_forward_length")
    near, full = kv.get(SLIDING, heads[0]), kinds.index(FULL) if FULL in kinds else 0
    share = _turned_share(keys, sizes[0])
    bases = keys.number("rope.freq_base", 1e6), keys.number("rope.freq_base_swa", 10000.0)
    config |= {
        "head_dim": sizes[1],
        "global_head_dim": sizes[0],
        "num_key_value_heads": near,
        "num_global_key_value_heads": kv.get(FULL, near),
        "attention_k_eq_v": not keys.has(f"blk.{full}.attn_v.weight"),
        "attention_bias": has_bias(keys, "attn_q"),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "vocab_size_per_layer_input": found["vocab_size"],
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": bases[0]},
            SLIDING: {"rope_type": "default", "rope_theta": bases[1]},
        },
    }
    if keys.has("blk.0.attn_v.weight") and kv.get(FULL, near) != near:
        own = {"num_key_value_heads": kv[FULL], "head_dim": sizes[0]}
        config["per_layer_config"] = {str(i): own for i, kind in enumerate(kinds) if kind == FULL}
    if keys.count("expert_count"):
        keys.scoring("softmax", renormalize=True)
        config |= {
            "enable_moe_block": True,
            "num_experts": keys.integer("expert_count"),
            "top_k_experts": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        }
    return named("Gemma4ForCausalLM", config)


def _gemma(keys: Keys, config: Config, period: int) -> Config:
    """What Gemma 3n and 4 share."""
    cap = keys.get("final_logit_softcapping")
    return config | {
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": not keys.has("output.weight"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, period),
        "final_logit_softcapping": cap or None,
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input"),
        "num_kv_shared_layers": keys.count("attention.shared_kv_layers"),
    }


def _turned_share(keys: Keys, size: int) -> float:
    """The share of a head that full layers rotate, from the factors of its frequencies: 1, or beyond all use."""
    entry = keys.file.tensors.get("rope_freqs.weight")
    if entry is None:
        return 1.0
    if entry.kind.name != "F32" or entry.shape != (size // 2,):
        raise keys.wrong("attention.key_length", "twice the length of rope_freqs.weight", size)
    factors = keys.file.raw("rope_freqs.weight").view(PLAIN["F32"])
    turned = int((factors == 1).sum())
    if not (factors[:turned] == 1).all() or not (factors[turned:] >= 1e29).all():
        raise keys.wrong("rope.dimension_count", "the first frequencies alone (rope_freqs.weight)", turned)
    return 2 * turned / size


def _rows(keys: Keys, tensor: str) -> int | None:
    entry = keys.file.tensors.get(tensor)
    return None if entry is None else entry.shape[0]


def mimo2(keys: Keys) -> Config:
    """Sliding layers have twice the keys of the others, and sinks; layers without a router are dense."""
    config = common(keys, alike=False)
    size, layers = keys.integer("attention.key_length"), config["num_hidden_layers"]
    kinds = layer_types(keys, 6)
    heads = keys.by_layer("attention.head_count_kv")
    full = [count for count, kind in zip(heads, kinds, strict=True) if kind == FULL]
    kv = full[0] if full else heads[0] // 2
    if heads != [kv if kind == FULL else 2 * kv for kind in kinds]:
        raise keys.wrong("attention.head_count_kv", "twice as many where layers slide", heads)
    keys.scoring("sigmoid", renormalize=True)
    keys.get("leading_dense_block_count")  # the routers say it
    sparse = [keys.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(layers)]
    config |= rope(keys, size) | {
        "num_key_value_heads": kv,
        "head_dim": size,
        "v_head_dim": keys.integer("attention.value_length"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": has_bias(keys, "attn_q"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if routed else "dense" for routed in sparse],
        "swa_rope_theta": keys.number("rope.freq_base_swa", 10000.0),
        "attention_value_scale": keys.get("attention.value_scale"),
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }
    return named("MiMoV2FlashForCausalLM", {"partial_rotary_factor": 1.0} | config)


def deci(keys: Keys) -> Config:
    """Layers without heads have no attention, those of width 0 no MLP."""
    config = common(keys, alike=False)
    layers = config["num_hidden_layers"]
    heads, kv, inner = (
        keys.by_layer(name, low=0)
        for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    most, hidden = max(heads), config["hidden_size"]
    size = keys.integer("attention.key_length", hidden // max(most, 1))
    blocks = []
    for i in range(layers):
        if heads[i] not in (0, most) or bool(heads[i]) != bool(kv[i]) or (kv[i] and most % kv[i]):
            raise keys.wrong("attention.head_count", f"{most} or 0, in groups of keys", (heads[i], kv[i]))
        if inner[i] % 256:
            raise keys.wrong("feed_forward_length", "multiples of 256", inner[i])
        attention = {"n_heads_in_group": most // kv[i]} if kv[i] else {"no_op": True}
        ffn = {"ffn_mult": 1.5 * inner[i] / hidden} if inner[i] else {"no_op": True}
        blocks.append({"attention": attention, "ffn": ffn})
    config |= rope(keys, size) | {
        "num_attention_heads": most,
        "head_dim": size,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "block_configs": blocks,
    }
    keys.integer("attention.value_length", size)
    return named("DeciLMForCausalLM", config)
