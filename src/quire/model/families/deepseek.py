"""DeepSeek-V2 and V3 (Kimi-K2 too): latent attention over a compressed cache, experts chosen by group."""

from __future__ import annotations

import math
import re
from typing import Any

from msgspec.structs import replace

from quire.devices.protocol import Routing
from quire.model.families.config import ConfigReader
from quire.model.families.llama import llama_like
from quire.model.families.names import TensorNames
from quire.model.families.rope import read_rope
from quire.model.spec import ArchSpec, LatentSpec, MoESpec, RopeSpec

DEEPSEEK_NAMES = TensorNames(interleaved=True, shared="mlp.shared_experts.")


def deepseek_names(spec: ArchSpec) -> TensorNames:
    """The layer after the last predicts one token more; it has no part in the next one."""
    extra = re.escape(DEEPSEEK_NAMES.layer.format(i=spec.num_layers)) + ".*"
    return replace(DEEPSEEK_NAMES, ignored=(*DEEPSEEK_NAMES.ignored, extra))


def read_deepseek_v2(config: ConfigReader) -> ArchSpec:
    """DeepSeek-AI 2024, arXiv:2405.04434. V2 chooses among the best groups, V2-Lite among all experts."""
    config.expect("scoring_func", "softmax")
    config.expect("norm_topk_prob", False)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise config.wrong("topk_method", method, "greedy or group_limited_greedy")
    grouped, groups = method == "group_limited_greedy", _groups(config)
    return _deepseek(
        config,
        "DeepseekV2ForCausalLM",
        default_max_position=2048,
        moe=_moe(config, _routing(config, 64, None, groups if grouped else (1, 1)), (0, 1407, 2, 1.0)),
    )


def read_deepseek_v3(config: ConfigReader) -> ArchSpec:
    """DeepSeek-AI 2024, arXiv:2412.19437. A bias that balances the experts' load counts for the choice alone."""
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("rope_interleave", True)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.count(key, 0) > 1:
            raise config.wrong(key, config.get(key), "0 or 1")
    routing = replace(
        _routing(config, 256, 8, _groups(config, (8, 4))),
        scoring="sigmoid",
        group_sum=True,
        renormalize=config.boolean("norm_topk_prob", True),
    )
    return _deepseek(
        config,
        "DeepseekV3ForCausalLM",
        default_max_position=4096,
        default_kv_heads=128,
        moe=_moe(config, routing, (3, 2048, 1, 2.5)),
    )


def _groups(config: ConfigReader, default: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    return config.integer("n_group", default[0]), config.integer("topk_group", default[1])


def _routing(config: ConfigReader, experts: int, chosen: int | None, groups: tuple[int, int]) -> Routing:
    count, top = config.integer("n_routed_experts", experts), config.integer("num_experts_per_tok", chosen)
    number, kept = groups
    if count % number or kept > number or top > kept * (count // number):
        raise config.wrong("n_group", number, f"equal groups of {count} experts, {kept} of which hold {top}")
    return Routing(count, top, num_groups=number, top_groups=kept)


def _moe(config: ConfigReader, routing: Routing, default: tuple[int, int, int, float]) -> MoESpec:
    """`default`: the first layer that is a mixture, the size and number of shared experts, the weights' factor."""
    config.expect("moe_layer_freq", 1)
    config.get("ep_size")  # how training was spread
    layers = config.integer("num_hidden_layers", high=4096)
    first, inner = (
        config.count("first_k_dense_replace", default[0]),
        config.integer("moe_intermediate_size", default[1]),
    )
    null = config.has("n_shared_experts") and config.get("n_shared_experts") is None
    shared = 0 if null else config.integer("n_shared_experts", default[2])
    return MoESpec(
        replace(routing, shared=shared > 0, scale=config.number("routed_scaling_factor", default[3])),
        inner,
        tuple(i >= first for i in range(layers)),
        shared_intermediate_size=shared * inner,
        correction=routing.scoring == "sigmoid",
    )


def _deepseek(config: ConfigReader, architecture: str, **fields: Any) -> ArchSpec:
    config.get("head_dim")  # the rotated part's; the fields below say it all
    direct = config.has("q_lora_rank") and config.get("q_lora_rank") is None
    latent = LatentSpec(
        q_rank=None if direct else config.integer("q_lora_rank", 1536),
        kv_rank=config.integer("kv_lora_rank", 512),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        rope_dim=config.integer("qk_rope_head_dim", 64),
        value_dim=config.integer("v_head_dim", 128),
    )
    max_position = config.integer("max_position_embeddings", fields["default_max_position"])
    rope = read_rope(config, latent.rope_dim, max_position, 10000.0)
    head_dim = latent.nope_dim + latent.rope_dim
    config.expect("qk_head_dim", head_dim)
    return llama_like(
        config,
        architecture,
        head_dim=head_dim,
        rotated=latent.rope_dim,
        rope=rope,
        attention_scale=head_dim**-0.5 * _temperature(rope),
        latent=latent,
        **fields,
    )


def _temperature(rope: RopeSpec) -> float:
    """Yarn's factor of scores here; the angles' own is that of mscale beside mscale_all_dim."""
    if rope.kind != "yarn" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
