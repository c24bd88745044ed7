"""Reads GGUF architectures with latent attention, or with layers of unlike shapes.

DeepSeek and its kin; Gemma 3n and 4, MiMo-V2, Nemotron-NAS.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from msgspec.structs import replace

from quire.model.gguf.decoder import (
    decoder,
    head_dim,
    mixture,
    read_rope,
    routed,
    windows,
    with_router,
)
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.gemma3n import AltUpConfig, LayerInputsConfig
from quire.model.parts.indexer import IndexerConfig, KeysConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec

NOTHING: Mapping[str, Any] = {}


def two_ropes(keys: Keys, slides: Sequence[bool], rope: RopeSpec, theta: float = 10000.0) -> list[RopeSpec]:
    """Give layers that slide a plain rope with a base of its own."""
    near = RopeSpec("default", keys.number("rope.freq_base_swa", theta), rope.rotary_dim)
    return [near if slide else rope for slide in slides]


def deepseek2(keys: Keys) -> DecoderConfig:
    """Read DeepSeek-V3 and its kin, V2 if experts are chosen without a correction, Youtu if there are none."""
    if keys.count("leading_dense_block_count") >= keys.layers:
        for name in ("expert_feed_forward_length", "expert_shared_count", "expert_weights_scale"):
            keys.get(name)  # of experts that it does not have
        return latent(keys, "YoutuForCausalLM")
    if keys.get("attention.indexer.top_k"):
        return indexed(keys, "DeepseekV32ForCausalLM")
    correction = f"blk.{keys.layers - 1}.exp_probs_b"
    if keys.has(correction) or keys.has(f"{correction}.bias"):
        return latent(keys, "DeepseekV3ForCausalLM", moe=routed(keys))
    keys.expect("expert_weights_norm", False)
    return latent(keys, "DeepseekV2ForCausalLM", moe=routed(keys, "softmax"))


def indexed(keys: Keys, name: str) -> DecoderConfig:
    """Read latent attention that chooses its keys: DeepSeek-V3.2 and GLM-5.

    Layers without an indexer share the choice of the last that has one: a list says which, or their tensors do.
    """
    has = [keys.has(f"blk.{i}.indexer.attn_k.weight") for i in range(keys.layers)]
    types = "attention.indexer.types"
    given = keys.get(types)
    if given is not None and (not isinstance(given, list) or [bool(x) for x in given[: keys.layers]] != has):
        raise keys.wrong(types, "true for the layers that have an indexer's tensors", given)
    if not has[0]:
        raise keys.wrong(
            "attention.indexer.top_k", "absent from a file whose first layer has no indexer", has
        )
    rank = keys.integer("attention.q_lora_rank")
    eps = keys.number("attention.layer_norm_epsilon", 1e-6)
    indexer = IndexerConfig(
        keys.integer("embedding_length"),
        keys.integer("attention.indexer.head_count"),
        KeysConfig(keys.integer("attention.indexer.key_length"), NormConfig("layer", eps, bias=True)),
        keys.integer("attention.indexer.top_k"),
        rank,
    )
    chosen = {"indexer": [indexer if own else None for own in has], "shares": [not own for own in has]}
    return latent(keys, name, moe=routed(keys), chosen=chosen)


def minicpm3(keys: Keys) -> DecoderConfig:
    """Read MiniCPM 3 with the multipliers of its only model (4B)."""
    return latent(
        keys,
        "MiniCPM3ForCausalLM",
        embedding_scale=12.0,
        multiplier=1.4 / math.sqrt(keys.layers),
        head_scale=256 / keys.integer("embedding_length"),
    )


def latent(
    keys: Keys, name: str, still: RopeSpec | None = None, chosen: Mapping[str, Any] = NOTHING, **fields: Any
) -> DecoderConfig:
    """Read latent attention, with a rope that is `still`, or the file's. `chosen` are fields of its indexers.

    Files that split keys from values have keys of their own for a head's sizes (mla).
    """
    heads, rotated = keys.integer("attention.head_count"), keys.integer("rope.dimension_count")
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length"):
        keys.get(key)  # of the compressed form, if the others are given
    size = keys.optional_integer("attention.key_length_mla") or keys.integer("attention.key_length")
    if size <= rotated:
        raise keys.wrong("rope.dimension_count", f"less than a head's size, {size}", rotated)
    value = keys.optional_integer("attention.value_length_mla") or keys.optional_integer(
        "attention.value_length"
    )
    if value is None:  # the matrix that makes keys and values of all heads tells
        value = max(1, keys.rows("blk.0.attn_kv_b.weight") // heads - (size - rotated))
    rope = still or read_rope(keys, rotated)
    multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if multiplier and rope.kind == "yarn":  # stored as a tenth
        scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
        rope = replace(rope, mscale=scale, mscale_all_dim=scale)
    rank = keys.optional_integer("attention.q_lora_rank")
    mixer = {
        "q_rank": rank,
        "kv_rank": keys.integer("attention.kv_lora_rank"),
        "nope_dim": size - rotated,
        "rope_dim": rotated,
        "value_dim": value,
        "norm": NormConfig("rms", 1e-6),
        **chosen,
    }
    return decoder(
        keys,
        name,
        num_kv_heads=heads,
        head_dim=size,
        rope=rope,
        scores_scale=size**-0.5 * rope.temperature,
        **{"kinds": "latent", **fields, "mixers": {"latent": mixer, **fields.get("mixers", {})}},
    )


def _shares_keys(keys: Keys, slides: Sequence[bool]) -> list[int]:
    """Let the last layers read the keys of the last layer of their kind that keeps its own."""
    reused = keys.count("attention.shared_kv_layers")
    own = slides[: max(keys.layers - reused, 0)]
    for kind in set(slides):
        if kind not in own:
            must = "such that a layer of each kind keeps its own keys"
            raise keys.wrong("attention.shared_kv_layers", must, reused)
    last = {kind: len(own) - 1 - own[::-1].index(kind) for kind in set(slides)}
    return [0 if i < len(own) else i - last[kind] for i, kind in enumerate(slides)]


def _gemma(keys: Keys, slides: Sequence[bool]) -> dict[str, Any]:
    """Return the fields that Gemma 3n and 4 share."""
    return {
        "num_heads": max(keys.by_layer("attention.head_count")),
        "intermediate_size": keys.by_layer("feed_forward_length"),
        "attention_back": _shares_keys(keys, slides),
        "activation": "gelu_tanh",
        "placement": "sandwich",
        "qk_norm": "head",
        "attention_value_norm": True,
        "scores_scale": 1.0,
        "scores_window": windows(keys, slides),
        "embedding_scale": keys.integer("embedding_length") ** 0.5,
        "head_cap": keys.optional_number("final_logit_softcapping"),
    }


def gemma3n(keys: Keys) -> DecoderConfig:
    """Read Gemma 3n: AltUp, LAuReL, inputs by layer, sparse MLPs."""
    slides = keys.slides(5)
    size = head_dim(keys, keys.integer("embedding_length"), keys.integer("attention.head_count"))
    rope = read_rope(keys, size, 1e6)
    streams, active = keys.integer("altup.num_inputs"), keys.count("altup.active_idx")
    if streams < 2:
        raise keys.wrong("altup.num_inputs", "at least 2", streams)
    return decoder(
        keys,
        "Gemma3nForCausalLM",
        **_gemma(keys, slides),
        head_dim=size,
        rope=rope,
        layer_ropes=two_ropes(keys, slides, rope),
        added_inputs=LayerInputsConfig(
            keys.integer("embedding_length_per_layer_input"), keys.rows("per_layer_token_embd.weight")
        ),
        added_altup=AltUpConfig(streams, active, scaled=True),
        added_laurel=keys.rows("blk.0.laurel_l.weight"),
        mlp_cutoff=_cutoffs(keys),
    )


def _cutoffs(keys: Keys) -> list[float | None]:
    """Read each layer's cutoff of gates in standard deviations, rounded by the share that it leaves out."""
    name, layers, normal = "activation_sparsity_scale", keys.layers, NormalDist()
    given = keys.get(name)
    if given is None:
        sparse = 10 if layers > 10 else 0
        given = [normal.inv_cdf(0.95)] * sparse + [-math.inf] * (layers - sparse)
    if not isinstance(given, list) or len(given) != layers or any(type(x) is not float for x in given):
        raise keys.wrong(name, f"{layers} numbers", given)
    shares = [round(normal.cdf(x), 6) if x > -math.inf else 0.0 for x in given]
    if not all(0 <= share < 1 for share in shares):
        raise keys.wrong(name, "numbers that not all gates are below", given)
    return [round(normal.inv_cdf(share), 6) if share else None for share in shares]


def gemma4(keys: Keys) -> DecoderConfig:
    """Read Gemma 4, whose full layers have longer and fewer keys and rotate a share of each head."""
    slides = (*keys.slides(6)[:-1], False)
    sizes = _gemma4_sizes(keys)
    full, hidden = slides.index(False), keys.count("embedding_length_per_layer_input")
    far = RopeSpec(
        "proportional",
        keys.number("rope.freq_base", 1e6),
        sizes[False],
        rotated_pairs=_turned_pairs(keys, sizes[False]),
    )
    near = RopeSpec("default", keys.number("rope.freq_base_swa", 10000.0), sizes[True])
    moe = mixture(keys, renormalize=True, beside=True) if keys.count("expert_count") else None
    shared = not keys.has(f"blk.{full}.attn_v.weight") and not keys.has(f"blk.{full}.attn_qkv.weight")
    return decoder(
        keys,
        "Gemma4ForCausalLM",
        **_gemma(keys, slides),
        num_kv_heads=keys.by_layer("attention.head_count_kv", max(keys.by_layer("attention.head_count"))),
        head_dim=[sizes[slide] for slide in slides],
        rope=far,
        layer_ropes=[near if slide else far for slide in slides],
        attention_keys_as_values=[shared and not slide for slide in slides],
        scale=True,
        **({"added_inputs": LayerInputsConfig(hidden, keys.rows("token_embd.weight"))} if hidden else {}),
        moe=moe,
    )


def _gemma4_sizes(keys: Keys) -> tuple[int, int]:
    """Read the size of a head in layers that see all positions, and in layers that slide."""
    sizes = []
    for kind in ("", "_swa"):
        size = keys.integer(f"attention.key_length{kind}")
        keys.expect(f"attention.value_length{kind}", size)
        keys.expect(f"rope.dimension_count{kind}", size)
        sizes.append(size)
    return sizes[0], sizes[1]


def _turned_pairs(keys: Keys, size: int) -> int:
    """Count the pairs that full layers rotate; huge factors stop the others."""
    factors = keys.factors("rope_freqs.weight", size // 2, math.inf)
    if factors is None:
        return size // 2
    turned = factors.count(1.0)
    if any(factor != 1 for factor in factors[:turned]) or any(factor < 1e29 for factor in factors[turned:]):
        raise keys.wrong("rope.dimension_count", "the first frequencies alone (rope_freqs.weight)", turned)
    return turned


def mimo2(keys: Keys) -> DecoderConfig:
    """Read MiMo-V2: sliding layers have more keys, and sinks; layers without a router are dense."""
    slides, size = keys.slides(6), keys.integer("attention.key_length")
    heads, kv = max(keys.by_layer("attention.head_count")), keys.by_layer("attention.head_count_kv")
    rope = read_rope(keys, size)
    keys.get("leading_dense_block_count")  # the routers say it
    keys.expect("expert_weights_norm", True)
    return decoder(
        keys,
        "MiMoV2FlashForCausalLM",
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=size,
        attention_value_dim=keys.integer("attention.value_length"),
        attention_value_scale=keys.number("attention.value_scale", 1.0),
        scores_sinks=list(slides),
        rope=rope,
        layer_ropes=two_ropes(keys, slides, rope),
        scores_window=windows(keys, slides),
        moe=routed(keys, layers=with_router(keys), renormalize=True),
    )


def deci(keys: Keys) -> DecoderConfig:
    """Read Nemotron-NAS: layers without heads have no attention, layers of width 0 no MLP."""
    heads, kv, inner = (
        keys.by_layer(name, low=0)
        for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    )
    most, hidden = max(heads), keys.integer("embedding_length")
    size = keys.integer("attention.key_length", max(1, hidden // max(most, 1)))
    keys.expect("attention.value_length", size)
    for i in range(keys.layers):
        if heads[i] not in (0, most) or bool(heads[i]) != bool(kv[i]):
            raise keys.wrong(
                "attention.head_count", f"{most} or 0, as must be that of keys", (heads[i], kv[i])
            )
    return decoder(
        keys, "DeciLMForCausalLM", num_heads=heads, num_kv_heads=kv, head_dim=size, intermediate_size=inner
    )
