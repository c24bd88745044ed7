"""Reads the architectures that GGUF files name; each entry adds the facts that keys and tensors leave out.

Facts are llama.cpp's (src/models/*.cpp and convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.devices.protocol import Temperature
from quire.model.gguf import granite, recurrent, unlike
from quire.model.gguf.decoder import (
    decoder,
    dense_first,
    mixture,
    read_rope,
    routed,
    shared_size,
    small_experts,
    windows,
)
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig
from quire.weights.tensor import Array


@dataclass(frozen=True, slots=True)
class Architecture:
    """A reader of one value of general.architecture.

    `names` replaces fields of the table of tensor names. `turned`: its files store rotary pairs of queries and keys as
    neighbours. `tensors` makes tensors of keys. `unused` keys change no text.
    """

    read: Callable[[Keys], DecoderConfig]
    names: Mapping[str, Any] = field(default_factory=dict)
    turned: bool = False
    tensors: Callable[[Keys], Mapping[str, Array]] | None = None
    unused: Sequence[str] = ()


def reader(architecture: str, **fields: Any) -> Callable[[Keys], DecoderConfig]:
    """Make a reader that sets only these fields."""
    return lambda keys: decoder(keys, architecture, **fields)


def llama(keys: Keys) -> DecoderConfig:
    """Read Llama, and models converted as Llama: Mistral, Mixtral, Yi, SmolLM2."""
    window = keys.count("attention.sliding_window") or None
    if keys.get("expert_count"):
        return decoder(
            keys, "MixtralForCausalLM", scores_window=window, **small_experts(keys, renormalize=True)
        )
    name = "MistralForCausalLM" if window else "LlamaForCausalLM"
    return decoder(keys, name, scores_window=window)


def smollm3(keys: Keys) -> DecoderConfig:
    """Leave every fourth layer without positions, which no key says."""
    return decoder(keys, "SmolLM3ForCausalLM", turned=[(i + 1) % 4 != 0 for i in range(keys.layers)])


def gemma(keys: Keys, name: str = "GemmaForCausalLM", **fields: Any) -> DecoderConfig:
    """Scale embeddings, and tie the head to them."""
    scale = keys.integer("embedding_length") ** 0.5
    given = {"activation": "gelu_tanh", "embedding_scale": scale, "head_tied": True, **fields}
    return decoder(keys, name, **given)


def gemma2(keys: Keys) -> DecoderConfig:
    """Scale queries by the head's size, except in the model of 46 layers (27B); no key says so."""
    return gemma(
        keys,
        "Gemma2ForCausalLM",
        placement="sandwich",
        scores_window=windows(keys, keys.slides(2), 4096),
        scores_scale=_query_size(keys, 46) ** -0.5,
        scores_cap=keys.number("attn_logit_softcapping", 50.0) or None,
        head_cap=keys.number("final_logit_softcapping", 30.0) or None,
    )


def gemma3(keys: Keys) -> DecoderConfig:
    """Scale queries by the head's size, except in the model of 62 layers (27B); no key says so."""
    slides, rope = keys.slides(6), read_rope(keys, theta=1e6)
    return gemma(
        keys,
        "Gemma3ForCausalLM",
        placement="sandwich",
        qk_norm="head",
        rope=rope,
        layer_ropes=unlike.two_ropes(keys, slides, rope),
        scores_window=windows(keys, slides, 1024),
        scores_scale=_query_size(keys, 62) ** -0.5,
        head_tied=not keys.has("output.weight"),
    )


def _query_size(keys: Keys, large: int) -> int:
    shared = shared_size(keys)
    return shared if keys.layers == large else keys.integer("attention.key_length", shared)


def olmo2(keys: Keys) -> DecoderConfig:
    """Read OLMo 2, or OLMo 3 if there is a window; only layers that see all positions then scale their rope."""
    fields: dict[str, Any] = {"placement": "post", "qk_norm": "all_heads"}
    if not keys.get("attention.sliding_window"):
        return decoder(keys, "Olmo2ForCausalLM", **fields)
    slides, rope = keys.slides(4), read_rope(keys)
    keys.expect("rope.freq_base_swa", rope.theta)
    ropes = unlike.two_ropes(keys, slides, rope, rope.theta)
    window = windows(keys, slides)
    return decoder(keys, "Olmo3ForCausalLM", rope=rope, layer_ropes=ropes, scores_window=window, **fields)


def cohere(keys: Keys, name: str = "CohereForCausalLM", **fields: Any) -> DecoderConfig:
    scale = keys.number("logit_scale")
    return decoder(keys, name, placement="parallel", norm_kind="layer", head_scale=scale, **fields)


def command_r(keys: Keys) -> DecoderConfig:
    return cohere(keys, qk_norm="own_head" if keys.has("blk.0.attn_q_norm.weight") else None)


def cohere2(keys: Keys) -> DecoderConfig:
    """Rotate only the layers that slide."""
    slides = keys.slides(4)
    return cohere(keys, "Cohere2ForCausalLM", scores_window=windows(keys, slides), turned=slides)


def sliding(keys: Keys, name: str, **fields: Any) -> DecoderConfig:
    """Rotate only the layers that slide, if any do."""
    if not keys.get("attention.sliding_window"):
        return decoder(keys, name, **fields)
    slides = keys.slides(4)
    return decoder(keys, name, scores_window=windows(keys, slides), turned=slides, **fields)


def exaone(keys: Keys) -> DecoderConfig:
    """Read Exaone 3, whose epsilon has either name."""
    eps = keys.get("attention.layer_norm_rms_epsilon")
    return decoder(keys, "ExaoneForCausalLM", norm_eps=keys.number("attention.layer_norm_epsilon", eps))


def exaone4(keys: Keys) -> DecoderConfig:
    return sliding(keys, "Exaone4ForCausalLM", placement="post", qk_norm="head")


def exaone_moe(keys: Keys) -> DecoderConfig:
    return sliding(keys, "ExaoneMoeForCausalLM", qk_norm="head", moe=routed(keys))


def mistral3(keys: Keys) -> DecoderConfig:
    """Read Ministral 3, which scales distant queries."""
    rope = read_rope(keys)
    multiplier, beta = keys.get("rope.scaling.yarn_log_multiplier"), keys.get("attention.temperature_scale")
    if beta is None or rope.kind != "yarn":
        raise keys.wrong("attention.temperature_scale", "a number, beside a rope scaled by yarn", beta)
    if multiplier:
        scale = keys.number("rope.scaling.yarn_log_multiplier")
        rope = replace(rope, mscale=1.0, mscale_all_dim=scale)
    far = Temperature(keys.number("attention.temperature_scale"), rope.original_max_position)
    return decoder(keys, "Ministral3ForCausalLM", rope=rope, attention_temperature=far)


def with_residual(keys: Keys, name: str, parallel: str, **fields: Any) -> DecoderConfig:
    """Place attention and MLP beside each other, or one after the other, as a key says."""
    placement = parallel if keys.get("use_parallel_residual") else "pre"
    return decoder(keys, name, norm_kind="layer", placement=placement, **fields)


def stablelm(keys: Keys) -> DecoderConfig:
    qk_norm = "own_head" if keys.has("blk.0.attn_q_norm.weight") else None
    return with_residual(keys, "StableLmForCausalLM", "parallel", qk_norm=qk_norm)


def gpt_neox(keys: Keys) -> DecoderConfig:
    return with_residual(keys, "GPTNeoXForCausalLM", "parallel_two", activation="gelu", mlp_gated=False)


def gpt2(keys: Keys, name: str = "GPT2LMHeadModel", **fields: Any) -> DecoderConfig:
    """Read GPT-2, which has a table of positions."""
    given: dict[str, Any] = {**LAYERED, "activation": "gelu_tanh", "rope": None, "positions_offset": 0}
    return decoder(keys, name, **given, **fields)


def starcoder(keys: Keys) -> DecoderConfig:
    """Read StarCoder 1, which has one head of keys."""
    keys.expect("attention.head_count_kv", 1)
    return gpt2(keys, "GPTBigCodeForCausalLM", num_kv_heads=1)


def alibi(keys: Keys, name: str, **fields: Any) -> DecoderConfig:
    """Bias scores by distance in place of a rope. The MLP is four times as wide as the stream."""
    keys.expect("feed_forward_length", 4 * keys.integer("embedding_length"))
    return decoder(keys, name, norm_kind="layer", mlp_gated=False, rope=None, scores_alibi=1.0, **fields)


def mpt(keys: Keys) -> DecoderConfig:
    """Read MPT, whose largest bias is 8."""
    keys.expect("attention.max_alibi_bias", 8)
    clip = keys.optional_number("attention.clamp_kqv")
    return alibi(keys, "MptForCausalLM", activation="gelu", attention_clip=clip)


def falcon(keys: Keys) -> DecoderConfig:
    """Read Falcon: 7B has one norm for attention and MLP, 40B and 180B have two."""
    placement = "parallel_two" if keys.has("blk.0.attn_norm_2.weight") else "parallel"
    return decoder(
        keys, "FalconForCausalLM", norm_kind="layer", mlp_gated=False, activation="gelu", placement=placement
    )


def nemotron(keys: Keys) -> DecoderConfig:
    keys.get("attention.layer_norm_rms_epsilon")  # written beside the other
    return decoder(keys, "NemotronForCausalLM", norm_kind="layer", mlp_gated=False, activation="relu2")


def olmo(keys: Keys) -> DecoderConfig:
    """Read OLMo 1, whose LayerNorms have no weights and a fixed epsilon."""
    keys.expect("attention.layer_norm_epsilon", 1e-5)
    clip = keys.optional_number("attention.clamp_kqv")
    return decoder(
        keys, "OlmoForCausalLM", norm_kind="layer", norm_weight=False, norm_eps=1e-5, attention_clip=clip
    )


def olmoe(keys: Keys) -> DecoderConfig:
    clip = keys.optional_number("attention.clamp_kqv")
    return decoder(keys, "OlmoeForCausalLM", qk_norm="all_heads", attention_clip=clip, **small_experts(keys))


def qwen2_moe(keys: Keys) -> DecoderConfig:
    """Read Qwen2's mixture, whose shared expert has a gate."""
    moe = mixture(keys, shared=keys.integer("expert_shared_feed_forward_length"), shared_gate=True)
    return decoder(keys, "Qwen2MoeForCausalLM", moe=moe)


def qwen3_moe(keys: Keys) -> DecoderConfig:
    return decoder(keys, "Qwen3MoeForCausalLM", qk_norm="head", moe=mixture(keys, renormalize=True))


def gpt_oss(keys: Keys) -> DecoderConfig:
    """Slide every second layer, and do not round the rope's bounds."""
    experts = small_experts(keys, bias=True, softmax_after=True)
    rope = read_rope(keys)
    if rope.kind == "yarn":
        rope = replace(rope, beta_fast=32.0, beta_slow=1.0, truncate=False)
    near = windows(keys, keys.slides(2))
    fields: dict[str, Any] = {
        "activation": "clamped_swiglu",
        "scores_sinks": True,
        "rope": rope,
        "scores_window": near,
    }
    return decoder(keys, "GptOssForCausalLM", **fields, **experts)


def llama4(keys: Keys) -> DecoderConfig:
    """Read Llama 4. All models share chunks, the scale of distant queries and the layers without positions.

    The model of 128 experts (Maverick) does not norm queries and keys.
    """
    inner, step = keys.integer("expert_feed_forward_length"), keys.integer("interleave_moe_layer_step")
    keys.expect("expert_shared_feed_forward_length", inner)
    turned = [(i + 1) % 4 != 0 for i in range(keys.layers)]
    chunk = keys.integer("attention.sliding_window", 8192)
    sparse = [(i + 1) % step == 0 for i in range(keys.layers)]
    moe = mixture(keys, layers=sparse, shared=inner, scoring="sigmoid", weigh_inputs=True)
    return decoder(
        keys,
        "Llama4ForCausalLM",
        qk_norm=["head" if moe["routing"].num_experts != 128 and turns else None for turns in turned],
        qk_norm_weight=False,
        qk_norm_after_rope=True,
        scores_chunk=[chunk if turns else None for turns in turned],
        attention_temperature=[None if turns else Temperature(0.1, 8192, 1) for turns in turned],
        turned=turned,
        moe=moe,
    )


def glm4_moe(keys: Keys) -> DecoderConfig:
    qk_norm = "head" if keys.has("blk.0.attn_q_norm.weight") else None
    return decoder(keys, "Glm4MoeForCausalLM", qk_norm=qk_norm, moe=routed(keys))


def dots1(keys: Keys) -> DecoderConfig:
    return decoder(keys, "Dots1ForCausalLM", qk_norm="head", moe=routed(keys))


def bailing(keys: Keys) -> DecoderConfig:
    """Read Ling and Ring 1, which score by softmax and have no groups."""
    keys.expect("expert_group_count", 1)
    return decoder(keys, "BailingMoeForCausalLM", moe=routed(keys, "softmax"))


def bailing2(keys: Keys) -> DecoderConfig:
    """Read Ling and Ring 2, and Sarvam's mixture, whose corrections the converter has centred."""
    return decoder(keys, "BailingMoeV2ForCausalLM", qk_norm="head", moe=routed(keys))


def ernie_moe(keys: Keys) -> DecoderConfig:
    start, step = keys.count("leading_dense_block_count"), keys.integer("interleave_moe_layer_step", 1)
    sparse = [i >= start and (i + 1) % step == 0 for i in range(keys.layers)]
    inner, shared = keys.integer("expert_feed_forward_length"), keys.count("expert_shared_count")
    keys.get("expert_shared_feed_forward_length")  # the sizes above say it
    moe = mixture(keys, layers=sparse, shared=shared * inner, correction=True, renormalize=True)
    return decoder(keys, "Ernie4_5_MoeForCausalLM", moe=moe)


def hunyuan_moe(keys: Keys) -> DecoderConfig:
    """Read Hunyuan's mixture, with one shared expert of the others' size."""
    inner = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    keys.expect("expert_shared_count", 1)
    keys.expect("expert_shared_feed_forward_length", inner)
    experts = small_experts(keys, shared=inner, renormalize=True)
    return decoder(keys, "HunYuanMoEV1ForCausalLM", qk_norm="head", qk_norm_after_rope=True, **experts)


def minimax_m2(keys: Keys) -> DecoderConfig:
    experts = small_experts(keys, correction=True, scoring="sigmoid", renormalize=True)
    return decoder(keys, "MiniMaxM2ForCausalLM", qk_norm="all_heads", **experts)


def afmoe(keys: Keys) -> DecoderConfig:
    """Read Trinity: scale embeddings, and rotate only the layers that slide."""
    slides, inner = keys.slides(4), keys.integer("expert_feed_forward_length")
    moe = mixture(
        keys,
        layers=dense_first(keys),
        shared=keys.count("expert_shared_count") * inner,
        correction=True,
        scoring="sigmoid",
        renormalize=True,
        scale=keys.number("expert_weights_scale", 1.0),
    )
    return decoder(
        keys,
        "AfmoeForCausalLM",
        qk_norm="head",
        attention_gate="elements",
        placement="sandwich",
        embedding_scale=keys.integer("embedding_length") ** 0.5,
        scores_window=windows(keys, slides),
        turned=slides,
        moe=moe,
    )


def phimoe(keys: Keys) -> DecoderConfig:
    """Read Phi-3.5-MoE: LayerNorms under the key of RMS norms, and SparseMixer, which chooses two experts."""
    keys.expect("expert_used_count", 2)
    eps = keys.number("attention.layer_norm_rms_epsilon")
    experts = small_experts(keys, sparse_mixer=0.01)
    return decoder(
        keys,
        "PhimoeForCausalLM",
        norm_kind="layer",
        norm_eps=eps,
        scores_window=keys.count("attention.sliding_window") or None,
        **experts,
    )


def phi3(keys: Keys) -> DecoderConfig:
    return decoder(keys, "Phi3ForCausalLM", scores_window=keys.count("attention.sliding_window") or None)


def xielu_parameters(keys: Keys) -> dict[str, Array]:
    """Make tensors of the parameters of Apertus' activations."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return {
        f"blk.{i}.xielu.{name}": np.array(value, np.float32).reshape(shape)
        for name, shape in shapes.items()
        for i, value in enumerate(keys.numbers(f"xielu.{name}"))
    }


LAYERED: dict[str, Any] = {"norm_kind": "layer", "mlp_gated": False}
# POST: the norm before the MLP has another name.
POST = {"mlp_norm": "post_attention_norm"}
GATE_UP = {"mlp.gate_up": "ffn_up"}
PAIRS = {"interleaved": True}
# PICTURES are keys of models that see; on texts their ropes are plain.
PICTURES = ("rope.dimension_sections", "n_deepstack_layers")
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(llama, turned=True),
    "internlm2": Architecture(reader("LlamaForCausalLM"), turned=True),
    "smollm3": Architecture(smollm3, turned=True),
    "qwen2": Architecture(reader("Qwen2ForCausalLM")),
    "qwen3": Architecture(reader("Qwen3ForCausalLM", qk_norm="head")),
    "qwen2moe": Architecture(qwen2_moe),
    "qwen3moe": Architecture(qwen3_moe),
    "qwen2vl": Architecture(reader("Qwen2ForCausalLM"), unused=PICTURES),
    "qwen3vl": Architecture(reader("Qwen3ForCausalLM", qk_norm="head"), unused=PICTURES),
    "qwen3vlmoe": Architecture(qwen3_moe, unused=PICTURES),
    "gemma": Architecture(gemma),
    "gemma2": Architecture(gemma2),
    "gemma3": Architecture(gemma3),
    "gemma3n": Architecture(unlike.gemma3n),
    "gemma4": Architecture(unlike.gemma4),
    "phi2": Architecture(reader("PhiForCausalLM", placement="parallel", activation="gelu_tanh", **LAYERED)),
    "phi3": Architecture(phi3, GATE_UP),
    "phimoe": Architecture(phimoe),
    "gpt2": Architecture(gpt2),
    "gptneox": Architecture(gpt_neox),
    "gpt-oss": Architecture(gpt_oss, POST),
    "llama4": Architecture(llama4, PAIRS),
    "mistral3": Architecture(mistral3, turned=True),
    "starcoder": Architecture(starcoder),
    "starcoder2": Architecture(reader("Starcoder2ForCausalLM", activation="gelu_tanh", **LAYERED)),
    "stablelm": Architecture(stablelm),
    "olmo": Architecture(olmo, turned=True),
    "olmo2": Architecture(olmo2),
    "olmoe": Architecture(olmoe),
    "granite": Architecture(granite.granite, turned=True),
    "granitemoe": Architecture(granite.granite_moe, turned=True),
    "command-r": Architecture(command_r, PAIRS),
    "cohere2": Architecture(cohere2, PAIRS),
    "chatglm": Architecture(reader("GlmForCausalLM"), PAIRS | GATE_UP),
    "glm4": Architecture(reader("Glm4ForCausalLM", placement="sandwich"), PAIRS | GATE_UP),
    "glm4moe": Architecture(glm4_moe, POST),
    "deepseek2": Architecture(unlike.deepseek2, PAIRS),
    "deepseek32": Architecture(partial(unlike.indexed, name="DeepseekV32ForCausalLM"), PAIRS),
    "glm-dsa": Architecture(
        partial(unlike.indexed, name="GlmMoeDsaForCausalLM"), PAIRS | {"index_interleaved": True}
    ),
    "minicpm3": Architecture(unlike.minicpm3),
    "dots1": Architecture(dots1),
    "ernie4_5": Architecture(reader("Ernie4_5ForCausalLM"), PAIRS),
    "ernie4_5-moe": Architecture(ernie_moe, PAIRS),
    "exaone": Architecture(exaone),
    "exaone4": Architecture(exaone4),
    "exaone-moe": Architecture(exaone_moe),
    "hunyuan-dense": Architecture(
        reader("HunYuanDenseV1ForCausalLM", qk_norm="head", qk_norm_after_rope=True)
    ),
    "hunyuan-moe": Architecture(hunyuan_moe),
    "minimax-m2": Architecture(minimax_m2),
    "afmoe": Architecture(afmoe),
    "seed_oss": Architecture(reader("SeedOssForCausalLM"), POST),
    "arcee": Architecture(reader("ArceeForCausalLM", mlp_gated=False, activation="relu2"), turned=True),
    "bitnet": Architecture(
        reader("BitNetForCausalLM", attention_out_norm=True, mlp_down_norm=True, activation="relu2")
    ),
    "apertus": Architecture(
        reader("ApertusForCausalLM", mlp_gated=False, qk_norm="head", activation="relu", mlp_xielu=True),
        tensors=xielu_parameters,
    ),
    "bailingmoe": Architecture(bailing, turned=True),
    "bailingmoe2": Architecture(bailing2),
    "mimo2": Architecture(unlike.mimo2),
    "qwen3next": Architecture(recurrent.qwen3next, recurrent.NEXT),
    "qwen35": Architecture(recurrent.qwen35, recurrent.TILED),
    "qwen35moe": Architecture(recurrent.qwen35moe, recurrent.TILED),
    "lfm2": Architecture(recurrent.lfm2, recurrent.CONVOLUTIONS),
    "lfm2moe": Architecture(recurrent.lfm2moe, recurrent.CONVOLUTIONS),
    "mamba": Architecture(recurrent.mamba, recurrent.SCAN),
    "mamba2": Architecture(recurrent.mamba2, recurrent.SCAN),
    "jamba": Architecture(recurrent.jamba, recurrent.SCAN),
    "falcon-h1": Architecture(recurrent.falcon_h1, recurrent.SCAN),
    "granitehybrid": Architecture(granite.granite_hybrid, recurrent.SCAN, turned=True),
    "nemotron_h": Architecture(recurrent.nemotron_h, recurrent.ALONE),
    "nemotron_h_moe": Architecture(recurrent.nemotron_h, recurrent.ALONE),
    "kimi-linear": Architecture(recurrent.kimi_linear, recurrent.KIMI),
    "deci": Architecture(unlike.deci, turned=True),
    "jais2": Architecture(reader("Jais2ForCausalLM", activation="relu2", **LAYERED)),
    "nemotron": Architecture(nemotron),
    "bloom": Architecture(
        partial(alibi, name="BloomForCausalLM", activation="gelu_tanh", embedding_norm=True)
    ),
    "falcon": Architecture(falcon),
    "mpt": Architecture(mpt),
}
