"""Makes a tree of configs of the keys and tensors that all GGUF architectures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from quire.devices.protocol import Routing
from quire.model.families.rope import MAX_FACTOR, context_length
from quire.model.gguf.keys import Keys
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.rope import RopeSpec
from quire.model.tree import make_decoder, mixture_fields


def decoder(keys: Keys, architecture: str, **fields: Any) -> DecoderConfig:
    """Make a model; `fields` of its parts (make_decoder) add facts that keys and tensors leave out.

    Norms are RMS norms by default, a head that the file lacks is the embedding, and modules have biases where the file
    does. Sizes and `layer_ropes` may be lists, one for each layer; only layers that are `turned` have the `rope`.
    """
    hidden = keys.integer("embedding_length")
    heads = fields.pop("num_heads", None) or keys.integer("attention.head_count")
    kv_heads = fields.pop("num_kv_heads", None) or keys.integer("attention.head_count_kv", heads)
    size = fields.pop("head_dim", None) or head_dim(keys, hidden, heads)
    longest = max(size) if isinstance(size, list) else size
    rope = fields.pop("rope") if "rope" in fields else read_rope(keys, longest)
    turned, ropes = fields.pop("turned", None), fields.pop("layer_ropes", rope)
    layered = fields.get("norm_kind", "rms") == "layer"
    if "norm_eps" not in fields:
        fields["norm_eps"] = keys.number(f"attention.layer_norm_{'' if layered else 'rms_'}epsilon")
    given = {
        "norm_kind": "rms",
        "norm_bias": layered and keys.has("output_norm.bias"),
        "activation": "silu",
        "attention_num_heads": heads,
        "attention_num_kv_heads": kv_heads,
        "attention_head_dim": size,
        "attention_rope": ropes if turned is None else [rope if turns else None for turns in turned],
        "attention_qkv_bias": keys.has_bias("attn_q") or keys.has_bias("attn_qkv"),
        "attention_out_bias": keys.has_bias("attn_output"),
        "scores_scale": longest**-0.5,
        "mlp_intermediate_size": fields.pop("intermediate_size", None) or keys.integer("feed_forward_length"),
        "mlp_bias": keys.has_bias("ffn_up"),
        "head_tied": not keys.has("output.weight"),
        "head_bias": keys.has("output.bias"),
        **fields,
    }
    rows, positions = keys.rows("token_embd.weight"), keys.integer("context_length")
    return make_decoder(
        architecture,
        vocab_size=rows,  # padding included
        hidden_size=hidden,
        num_layers=keys.layers,
        max_position=context_length(rope, positions),
        **given,
    )


def head_dim(keys: Keys, hidden: int, heads: int) -> int:
    """Read the size of a head; its values are as long as its keys."""
    size = keys.integer("attention.key_length", max(1, hidden // heads))
    keys.expect("attention.value_length", size)
    return size


def windows(keys: Keys, slides: Sequence[bool], default: int | None = None) -> list[int | None]:
    """Give the layers that slide their window."""
    window = keys.integer("attention.sliding_window", default)
    return [window if slide else None for slide in slides]


def mixture(
    keys: Keys,
    *,
    inner: int | None = None,
    layers: Sequence[bool] | None = None,
    shared: int = 0,
    **fields: Any,
) -> dict[str, Any]:
    """Read a mixture in the layers where `layers` is true (None: in all); `fields` set its own and its routing's."""
    count, own = keys.integer("expert_count"), [True] * keys.layers if layers is None else list(layers)
    inner = inner or keys.integer("expert_feed_forward_length")
    made = mixture_fields(count, keys.integer("expert_used_count"), inner, own, shared, **fields)
    chosen: Routing = made["routing"]
    if chosen.softmax_after:
        keys.expect_scoring("softmax of the chosen")
    else:
        keys.expect_scoring(chosen.scoring, chosen.renormalize)
    groups, kept = chosen.num_groups, chosen.top_groups
    if count % groups or kept > groups or chosen.top_k > kept * (count // groups):
        must = f"as many equal groups of {count} experts, {kept} of which hold {chosen.top_k}"
        raise keys.wrong("expert_group_count", must, groups)
    return made


def small_experts(keys: Keys, **fields: Any) -> dict[str, Any]:
    """Read a mixture in all layers; its files may give the experts' size under the MLP's key."""
    inner = keys.integer("expert_feed_forward_length", keys.count("feed_forward_length") or None)
    return {"moe": mixture(keys, inner=inner, **fields), "intermediate_size": inner}


def routed(keys: Keys, scoring: str = "sigmoid", **routing: Any) -> dict[str, Any]:
    """Read experts by DeepSeek's keys. A sigmoid chooses as DeepSeek-V3 does: with a correction, by pairs in groups."""
    shared, inner = keys.count("expert_shared_count"), keys.integer("expert_feed_forward_length")
    keys.expect("expert_shared_feed_forward_length", 0, shared * inner)
    like_v3 = {"correction": True, "group_sum": True} if scoring == "sigmoid" else {}
    given = {
        "layers": dense_first(keys),
        "renormalize": bool(keys.get("expert_weights_norm")),
        "scale": keys.number("expert_weights_scale", 1.0) or 1.0,
        "num_groups": keys.integer("expert_group_count", 1),
        "top_groups": keys.integer("expert_group_used_count", 1),
        **like_v3,
        **routing,
    }
    return mixture(keys, inner=inner, shared=shared * inner, scoring=scoring, **given)


def dense_first(keys: Keys) -> list[bool]:
    """Tell the layers with experts, which follow some dense ones."""
    dense = keys.count("leading_dense_block_count")
    return [i >= dense for i in range(keys.layers)]


def with_router(keys: Keys) -> list[bool]:
    """Tell the layers with experts by their routers."""
    return [keys.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(keys.layers)]


def shared_size(keys: Keys) -> int:
    """Divide the stream among the heads."""
    return max(1, keys.integer("embedding_length") // keys.integer("attention.head_count"))


def read_rope(keys: Keys, size: int | None = None, theta: float = 10000.0) -> RopeSpec:
    """Read the rope of heads of `size` elements (None: as the file says), of which rope.dimension_count turn."""
    size = keys.integer("attention.key_length", shared_size(keys)) if size is None else size
    rotated, theta = keys.integer("rope.dimension_count", size), keys.number("rope.freq_base", theta)
    if rotated > size or rotated % 2:
        raise keys.wrong("rope.dimension_count", f"even, and at most {size}", rotated)
    if theta <= 1:
        raise keys.wrong("rope.freq_base", "above 1", theta)
    plain = RopeSpec("default", theta, rotated)
    scaled = _scaled(keys, plain)
    if not 1 / MAX_FACTOR <= scaled.factor <= MAX_FACTOR:
        raise keys.wrong("rope.scaling.factor", f"from {1 / MAX_FACTOR} to {MAX_FACTOR}", scaled.factor)
    return _by_frequency(keys, plain) if scaled == plain else scaled


def _scaled(keys: Keys, plain: RopeSpec) -> RopeSpec:
    context, pairs = keys.integer("context_length"), plain.rotary_dim // 2
    long, short = (keys.factors(f"rope_factors_{name}.weight", pairs) for name in ("long", "short"))
    original = keys.optional_integer("rope.scaling.original_context_length") or context
    attention = keys.get("rope.scaling.attn_factor")
    attention = None if attention is None else keys.number("rope.scaling.attn_factor")
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    linear = keys.number("rope.scale_linear", 1.0) or 1.0
    if long is not None or short is not None:
        if long is None or short is None:
            raise keys.wrong("rope.scaling.type", "another without both rope_factors_long and _short", kind)
        return replace(
            plain,
            kind="longrope",
            factor=context / original,
            original_max_position=original,
            attention_factor=attention,
            factors=long,
            short_factors=short,
        ).for_length(context)
    if kind in (None, "none", "longrope"):
        return plain if linear == 1 else replace(plain, kind="linear", factor=linear)
    if kind == "linear":
        return (
            plain if factor == 1 else replace(plain, kind="linear", factor=keys.number("rope.scaling.factor"))
        )
    if kind != "yarn":
        raise keys.wrong("rope.scaling.type", "none, linear, yarn or longrope", kind)
    return replace(
        plain,
        kind="yarn",
        factor=keys.number("rope.scaling.factor", context / original),
        original_max_position=original,
        attention_factor=attention,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 0.0) or 32.0,
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 0.0) or 1.0,
    )


def _by_frequency(keys: Keys, plain: RopeSpec) -> RopeSpec:
    """Find Llama 3.1's bands again in the factors that the converter made of them (rope_freqs.weight).

    Take factors of another form as they are.
    """
    size = plain.rotary_dim
    factors = keys.factors("rope_freqs.weight", size // 2)
    if factors is None or all(factor == 1 for factor in factors):
        return plain
    low, high, original, factor = 1.0, 4.0, 8192, max(factors)
    waves = 2 * np.pi * plain.theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if np.allclose(expected, factors, rtol=1e-5):
        return replace(plain, kind="llama3", factor=factor, original_max_position=original)
    context = keys.integer("context_length")
    return replace(
        plain, kind="longrope", original_max_position=context, attention_factor=1.0, factors=factors
    )
