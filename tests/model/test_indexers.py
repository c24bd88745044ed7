"""Latent attention that chooses its keys: which configs are refused, and where such a model can be parted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from quire.errors import ConfigError, ModelError
from quire.model.families import read_model
from quire.model.further import find_further
from quire.model.packing import wanted_tensors
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import Shard

LAYERS = 6
CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "mistral_large4_text": "MistralLarge4ForCausalLM",
}
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "index_head_dim": 14,
    "index_n_heads": 5,
    "index_topk": 7,
}
OWN, SHARED = "full", "shared"
TYPES = [OWN, SHARED, SHARED, OWN, SHARED, OWN]


OTHERS: dict[str, dict[str, Any]] = {
    "hy_v4": {"q_lora_rank": 20, "hc_mult": 2, "hc_magnitude": 2.0, "hc_eps": 1e-6, "swiglu_limit": 7.0},
    "mistral_large4_text": {"final_logit_softcapping": 30.0},
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    own = OTHERS.get(kind, {"q_lora_rank": 20})
    return {**BASE, **own, "architectures": [CLASSES[kind]], "model_type": kind, **changes}


def read(kind: str, **changes: Any) -> DecoderConfig:
    return read_model(config_of(kind, **changes), "dir/config.json")[0]


def own(spec: DecoderConfig) -> list[int]:
    """The layers that have an indexer."""
    return [
        i for i, layer in enumerate(spec.layers) if layer.mixer is not None and layer.mixer.index is not None
    ]


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek_v32", {"index_topk": 0}, "index_topk must be an integer from 1"),
        ("deepseek_v32", {"index_topk": None}, "index_topk must be an integer from 1"),
        ("deepseek_v32", {"index_topk": True}, "index_topk must be an integer from 1"),
        ("deepseek_v32", {"index_n_heads": 0}, "index_n_heads must be an integer from 1"),
        ("deepseek_v32", {"index_head_dim": 6}, r"index_head_dim must be at least qk_rope_head_dim \(8\)"),
        ("deepseek_v32", {"index_head_dim": 1 << 20}, "index_head_dim must be an integer from 1"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank must be an integer"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave must be True"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave must be False"),
        ("deepseek_v32", {"indexer_types": TYPES}, "indexer_types = .* is not understood"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * LAYERS}, "layer_types must be 6 entries"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 6 entries"),
        ("glm_moe_dsa", {"indexer_types": TYPES[:5]}, "indexer_types must be 6 entries"),
        ("glm_moe_dsa", {"indexer_types": [*TYPES[:5], "none"]}, "indexer_types must be 6 entries"),
        ("glm_moe_dsa", {"indexer_types": [*TYPES[:5], [OWN]]}, "indexer_types must be 6 entries"),
        ("glm_moe_dsa", {"indexer_types": "full"}, "indexer_types must be 6 entries"),
        ("glm_moe_dsa", {"indexer_types": [SHARED, *TYPES[1:]]}, "indexer_types must be full in the first"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSSFX"}, "index_topk_pattern must be 6 entries"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSSFSX"}, "index_topk_pattern must be 6 entries"),
        ("glm_moe_dsa", {"index_topk_pattern": "SFFFFF"}, "indexer_types must be full in the first"),
        ("glm_moe_dsa", {"index_topk_freq": -1}, "index_topk_freq must be an integer from 0"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave must be True"),
        ("hy_v4", {"swiglu_limit": 0}, "swiglu_limit must be greater than 0"),
        ("hy_v4", {"hc_mult": 0}, "hc_mult must be an integer from 1"),
        ("hy_v4", {"indexer_types": [SHARED] * LAYERS}, "indexer_types must be full in the first"),
        ("mistral_large4_text", {"q_lora_rank": 20}, "q_lora_rank must be None"),
        ("mistral_large4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 6 entries"),
        ("mistral_large4_text", {"no_rope_layers": [2] * LAYERS}, "no_rope_layers must be 6 entries"),
        ("mistral_large4_text", {"kv_source_layers": [0]}, "kv_source_layers must be"),
        ("mistral_large4_text", {"kv_source_layers": [0, 2, 2, 3, 4, 5]}, "kv_source_layers must be"),
        ("mistral_large4_text", {"kv_source_layers": [0, 0, 1, 3, 4, 5]}, "kv_source_layers must be"),
        ("mistral_large4_text", {"kv_source_layers": [0, 1, 2, 0, 4, 5]}, "kv_source_layers must be"),
        ("mistral_large4_text", {"kv_source_layers": [0, 1, 2, 3, 4, [5]]}, "kv_source_layers must be"),
        ("mistral_large4_text", {"final_logit_softcapping": 0}, "final_logit_softcapping must be greater"),
    ],
)
def test_fields_that_do_not_fit_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        read(kind, **changes)
    assert "\n" not in str(raised.value)


def test_shared_layers_are_read_from_a_list_a_pattern_or_a_distance() -> None:
    assert own(read("deepseek_v32")) == own(read("glm_moe_dsa")) == list(range(LAYERS))
    assert own(read("glm_moe_dsa", indexer_types=TYPES)) == [0, 3, 5]
    assert own(read("glm_moe_dsa", index_topk_pattern="FSSFSF")) == [0, 3, 5]
    assert own(read("glm_moe_dsa", index_topk_pattern=TYPES)) == [0, 3, 5]
    assert own(read("glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=3)) == [0, 1, 2, 4]
    assert own(read("glm_moe_dsa", indexer_types=TYPES, index_topk_freq=2)) == [0, 3, 5]
    assert own(read("hy_v4")) == [0, 1, 5]


def test_a_stage_begins_with_a_layer_that_chooses() -> None:
    spec = read("glm_moe_dsa", indexer_types=TYPES)
    assert [spec.parts_before(i) for i in range(LAYERS)] == [i in (0, 3, 5) for i in range(LAYERS)]
    assert [spec.stage(Shard(stage=i, stages=3)) for i in range(3)] == [range(3), range(3, 5), range(5, 6)]
    with pytest.raises(ConfigError, match="can be parted into at most 3 stages"):
        spec.stage(Shard(stages=4))


def test_a_model_does_not_begin_with_a_shared_choice() -> None:
    """As an engine directory could have it: no reader of a config sees its layers."""
    spec = read("glm_moe_dsa", indexer_types=TYPES)
    for first in (1, 4):
        with pytest.raises(
            ModelError, match=r"here: .* the choice of keys of an earlier one, and there is none"
        ):
            replace(spec, layers=spec.layers[first:]).check("here")
    replace(spec, layers=spec.layers[3:]).check("here")


def test_latent_attention_has_one_choice_for_all_heads() -> None:
    spec = read("deepseek_v32")
    mixer: Any = spec.layers[0].mixer
    apart = replace(mixer, indexer=replace(mixer.indexer, groups=5))
    with pytest.raises(ModelError, match="here: layer 0: an indexer chooses for 5 groups of one key"):
        replace(spec, layers=(replace(spec.layers[0], mixer=apart),)).check("here")


def test_index_keys_lie_behind_the_layers_and_are_whole_on_each_rank() -> None:
    spec = read("glm_moe_dsa", indexer_types=TYPES)
    for shard in (Shard(), Shard(rank=1, size=4)):
        kv = spec.kv_spec("float32", shard)
        assert [kv.layer(i).head_dim for i in range(kv.num_layers)] == [32] * LAYERS + [14] * 3
        assert kv.bytes_per_token == 4 * (LAYERS * 32 + 3 * 14)
    last = spec.kv_spec("float32", Shard(stage=1, stages=2))
    assert last.num_layers == 3 + 2


def test_layers_without_an_indexer_hold_no_weights_of_one() -> None:
    spec, names = read_model(config_of("glm_moe_dsa", indexer_types=TYPES), "dir/config.json")
    found = {name for name in wanted_tensors(spec, names) if "indexer" in name}
    assert {int(name.split(".")[2]) for name in found} == {0, 3, 5}
    assert len(found) == 3 * 5


def test_latents_of_an_earlier_layer_take_no_room() -> None:
    spec = read("mistral_large4_text", kv_source_layers=[0, 0, 0, 3, 4, 4])
    kv = spec.kv_spec("float32")
    assert [kv.layer(i).num_kv_heads for i in range(LAYERS)] == [1, 0, 0, 1, 1, 0]
    assert kv.bytes_per_token == 4 * (2 * 32 + 26 + LAYERS * 14)
    assert [spec.parts_before(i) for i in range(LAYERS)] == [True, False, False, True, True, False]


def test_a_layer_for_further_tokens_has_the_indexer_that_its_tensors_are_of() -> None:
    """The last layer shares a choice, and the one after it cannot."""
    types = [OWN, SHARED, SHARED, OWN, SHARED, SHARED]
    spec, names = read_model(config_of("glm_moe_dsa", indexer_types=types), "dir/config.json")
    own = f"model.layers.{LAYERS}."
    there = [name.replace("model.layers.3.", own) for name in wanted_tensors(spec, names)]
    checkpoint: Any = SimpleNamespace(names=lambda: [*there, f"{own}shared_head.norm.weight"])
    (layer,) = find_further(spec, names, checkpoint).config.layers
    assert layer == spec.layers[3]
    assert layer.mixer is not None
    assert layer.mixer.index is not None
