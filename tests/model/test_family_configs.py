"""Configs become specs, in both spellings; whatever is not understood is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import ModelError
from quire.model.families import read_model
from quire.model.packing import wanted_tensors
from quire.model.parts.attention import AttentionConfig
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import EmbeddingConfig, HeadConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.mlp import MLPConfig
from quire.model.parts.norm import NormConfig
from quire.model.parts.rope import RopeSpec, make_rope
from quire.model.parts.scores import ScoresConfig
from tests.model.tiny_models import LLAMA3, SMALL, YARN


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SMALL, **changes}


def spec(architecture: str = "LlamaForCausalLM", **changes: Any) -> DecoderConfig:
    return read_model(config(architecture, **changes))[0]


def attentions(model: DecoderConfig) -> list[AttentionConfig]:
    found = [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionConfig)]
    assert len(found) == model.num_layers
    return found


def rope_of(model: DecoderConfig) -> RopeSpec:
    (rope,) = {one.rope for one in attentions(model)}
    assert rope is not None
    return rope


def windows(model: DecoderConfig) -> list[int | None]:
    return [one.scores.window for one in attentions(model)]


def test_minimal_llama_takes_transformers_defaults() -> None:
    norm = NormConfig("rms", 1e-6)
    attention = AttentionConfig(
        hidden_size=48,
        num_heads=4,
        num_kv_heads=4,
        head_dim=12,
        scores=ScoresConfig(4, 12**-0.5),
        positions=128,
        rope=RopeSpec("default", 10000.0, 12),
    )
    assert spec(num_key_value_heads=None) == DecoderConfig(
        architecture="LlamaForCausalLM",
        max_position=128,
        embedding=EmbeddingConfig(97, 48, 48),
        layers=(LayerConfig(48, norm, attention, MLPConfig(48, 80, "silu")),) * 3,
        norm=norm,
        head=HeadConfig(),
    )


def test_family_defaults_for_absent_keys() -> None:
    bare = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    bare |= {"num_attention_heads": 32, "hidden_size": 1024}
    for architecture, kv_heads, positions, head_dim, window in [
        ("LlamaForCausalLM", 32, 2048, 32, None),
        ("MistralForCausalLM", 8, 131072, 32, 4096),
        ("Qwen2ForCausalLM", 32, 32768, 32, None),
        ("Qwen3ForCausalLM", 32, 32768, 128, None),
    ]:
        got, _ = read_model({"architectures": [architecture], **bare})
        assert (got.num_kv_heads, got.max_position, got.head_dim) == (kv_heads, positions, head_dim)
        assert windows(got) == [window] * 3


def test_model_type_stands_in_for_architectures() -> None:
    values = config()
    values["architectures"] = None
    values["model_type"] = "qwen2"
    assert all(one.qkv_bias for one in attentions(read_model(values)[0]))
    values["model_type"] = "rwkv"
    with pytest.raises(ModelError, match=r"rwkv.*quire docs models"):
        read_model(values)


@pytest.mark.parametrize(
    "parameters", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}]
)
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_old_and_new_rope_spelling_give_one_spec(parameters: dict[str, Any], type_key: str) -> None:
    older = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")}
    older[type_key] = parameters["rope_type"]
    new = spec(rope_parameters=parameters)
    assert new == spec(rope_theta=parameters["rope_theta"], rope_scaling=older)
    assert (rope_of(new).theta, rope_of(new).kind) == (parameters["rope_theta"], parameters["rope_type"])


def test_yarn_extends_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert spec(rope_scaling=yarn).max_position == 512
    assert spec(rope_scaling=yarn, max_position_embeddings=2048).max_position == 2048


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
        {
            **YARN,
            "rope_theta": 1e6,
            "original_max_position_embeddings": 32768,
            "truncate": False,
            "beta_fast": 16.0,
        },
        {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        {
            **YARN,
            "rope_theta": 5e5,
            "original_max_position_embeddings": 4096,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
        },
    ],
)
def test_frequencies_equal_transformers_at_full_size(parameters: dict[str, Any]) -> None:
    theirs = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072, rope_parameters=parameters
    )
    rope = make_rope(rope_of(spec(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)))
    if parameters["rope_type"] == "default":
        inv_freq, scale = 1e6 ** (-np.arange(0, 128, 2) / 128), 1.0
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu")
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=2e-6)
    assert rope.scale == pytest.approx(scale, rel=1e-12)


def test_windows_of_qwen() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 6}
    assert windows(spec("Qwen2ForCausalLM", sliding_window=6, max_window_layers=1)) == [None] * 3
    assert windows(spec("Qwen2ForCausalLM", max_window_layers=1, **sliding)) == [None, 6, 6]
    assert windows(spec("Qwen3ForCausalLM", max_window_layers=3, **sliding)) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(spec("Qwen3ForCausalLM", layer_types=kinds, **sliding)) == [6, None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not understood"),
        ({"sliding_window": 128}, "sliding_window = 128 is not understood"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"num_experts": 8}, "num_experts = 8"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "rope_scaling: rope_type must be one of .*'ntk'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 3}}, "rope_scaling: extra = 3"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be from 1e-06 to"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor must be at least"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": None}},
            "low_freq_factor must be a number, got None",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention = "),
        ({"rope_parameters": LLAMA3, "rope_scaling": YARN}, "rope_parameters and rope_scaling differ"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_theta": 1.0}, "rope_theta must be greater than 1"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite"),
        ({"hidden_act": "quick_gelu"}, "hidden_act must be one of silu"),
        ({"hidden_size": None}, "hidden_size must be an integer .* got None"),
        ({"hidden_size": 0}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 1024"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"vocab_size": "97"}, "vocab_size must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads"),
        ({"head_dim": 11}, "head_dim must be even"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be finite: 0, or from"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized checkpoints are not supported"),
        ({"architectures": ["A", "B"]}, "architectures must be a list of one"),
        (
            {"architectures": ["RwkvForCausalLM"]},
            "RwkvForCausalLM is not supported: Quire has no family for it",
        ),
        (
            {"architectures": ["DogeForCausalLM"]},
            "DogeForCausalLM is not supported: keep_window_size asks for",
        ),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(config(**changes), "dir/config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be 3 entries"),
        ({"layer_types": ["full_attention", "full_attention", "chunked"]}, "layer_types must be 3 entries"),
        ({"layer_types": ["sliding_attention"] * 3}, "use_sliding_window must be true"),
        ({"max_window_layers": -1}, "max_window_layers must be"),
        ({"use_mrope": True}, "use_mrope = True"),
        ({"attention_bias": True}, "attention_bias = True is not understood"),
    ],
)
def test_what_qwen_does_not_understand_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(config("Qwen2ForCausalLM", **changes))


BARE = {
    "architectures": None,
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8, got 9"),
        ("qwen2_moe", {"num_experts": 3}, "num_experts_per_tok must be .* from 1 to 3"),
        ("qwen2_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of layers"),
        ("qwen2_moe", {"use_sliding_window": True}, "layer_types must be given"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be greater than 0"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be 4 entries"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window must be False"),
        ("stablelm", {"partial_rotary_factor": 0.25}, "such that an even part of head_dim"),
        ("ministral", {"layer_types": ["sliding"] * 4}, "layer_types must be 4 entries"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be greater than 0"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be an integer >= 1"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}},
            "chunked_attention = {} is not understood",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "full_attention must be an object"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod must be 1"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor must be 6 numbers from",
        ),
        ("starcoder2", {"norm_type": "rms"}, "norm_type must be 'layer_norm'"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern must be an integer"),
        ("cohere2", {"position_embedding_type": "none"}, "position_embedding_type must be 'rope_gptj'"),
        ("gpt_neox", {"rotary_pct": 0.0}, "rotary_pct must be such that an even part"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine must be True"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn must be 1, or 2 with"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn must be true"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
        ("deepseek_v2", {"num_experts_per_tok": 65}, "num_experts_per_tok must be an integer from 1 to 64"),
        ("deepseek_v3", {"n_group": 7}, "n_group must be equal groups of 256 experts"),
        ("deepseek_v3", {"n_group": None}, "n_group must be an integer"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy"),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
    ],
)
def test_what_a_family_does_not_understand_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    base = {**BARE, "model_type": kind, "intermediate_size": 80, "num_key_value_heads": 4}
    if kind in ("opt", "falcon", "bloom", "gpt_neox"):
        del base["num_key_value_heads"]
    with pytest.raises(ModelError, match=message):
        read_model({**base, **changes}, "dir/config.json")


def test_gpt2_refuses_what_its_attention_does_not_do() -> None:
    assert read_model(GPT2)[0].layers[0].mlp == MLPConfig(48, 192, "gelu_tanh", gated=False, bias=True)
    with pytest.raises(ModelError, match="scale_attn_by_inverse_layer_idx must be False"):
        read_model({**GPT2, "scale_attn_by_inverse_layer_idx": True})


def test_keys_at_rest_are_accepted() -> None:
    plain = spec()
    at_rest = {
        "pretraining_tp": 2,
        "temperature": 0.7,
        "rope_interleaved": False,
        "pruned_heads": {},
        "sliding_window": None,
        "unheard_of": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"a": 1},
    }
    assert spec(**at_rest) == plain


# Configs with what their authors wrote beside the fields that decide.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood_to_the_last_parameter(name: str) -> None:
    assert sizes(PUBLISHED[name]["config"])[0] == PUBLISHED[name]["parameters"]


# Parameters, and bytes of KV cache a token in bfloat16, of published models.
KNOWN = {
    "nvidia--DeepSeek-V3.2-NVFP4": (671_877_944_064, 85_888),
    "nvidia--GLM-5-NVFP4": (743_911_218_432, 109_824),
    "zai-org--GLM-5": (743_911_218_432, 109_824),
    "zai-org--GLM-5.1": (743_911_218_432, 109_824),
    "zai-org--GLM-5.2": (743_377_019_904, 95_232),
    "zai-org--GLM-5.3": (743_377_019_904, 95_232),
    "nvidia--GLM-5.3-NVFP4": (743_377_019_904, 95_232),
    "minimax": (47_373_946_880, 65_536),
    "mistral_large4": (1_050_118_202_912, 99_144),
    "Qwen--Qwen3-0.6B": (596_049_920, 114_688),
    "Qwen--Qwen3-1.7B": (1_720_574_976, 114_688),
    "Qwen--Qwen3-8B": (8_190_735_360, 147_456),
    "Qwen--Qwen3-32B": (32_762_123_264, 262_144),
    "Qwen--Qwen3-30B-A3B-Instruct-2507": (30_532_122_624, 98_304),
    "Qwen--Qwen3-235B-A22B": (235_093_634_560, 192_512),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (480_154_875_392, 253_952),
    "Qwen--Qwen3-VL-4B-Instruct": (4_022_468_096, 147_456),
    "moonshotai--Kimi-K2-Instruct": (1_026_408_232_448, 70_272),
    "openai--gpt-oss-120b": (116_829_156_672, 73_728),
    "nvidia--Qwen3-235B-A22B-NVFP4": (235_093_634_560, 192_512),
    "LiquidAI--LFM2.5-1.2B-Instruct": (1_170_340_608, 12_288),
    "LiquidAI--LFM2.5-VL-1.6B": (1_170_340_608, 12_288),
    "lfm3": (1_728_801_536, 22_528),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_940_288, 6_144),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (31_577_940_288, 6_144),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120_668_707_840, 8_192),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": (120_668_707_840, 8_192),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": (549_308_993_536, 12_288),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (31_577_940_288, 6_144),
    "nvidia--Nemotron-H-56B-Base-8K": (56_324_350_464, 40_960),
    "tiiuae--Falcon-H1-0.5B": (521_411_104, 18_432),
    "Qwen--Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 24_576),
    "Qwen--Qwen3.5-0.8B-text": (752_393_024, 12_288),
    "Qwen--Qwen3.5-122B-A10B": (122_111_526_912, 24_576),
    "Qwen--Qwen3.5-35B-A3B": (34_660_610_688, 20_480),
    "Qwen--Qwen3.5-397B-A17B": (396_346_350_336, 30_720),
    "Qwen--Qwen3.5-9B": (8_953_803_264, 32_768),
    "Qwen--Qwen3.8-27B-FP8-text": (26_895_998_464, 65_536),
    "XiaomiMiMo--MiMo-7B-Base": (7_622_619_136, 147_456),
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": (49_122_681_728, 8_064),
    "nvidia--Qwen3.5-122B-A10B-NVFP4": (122_111_526_912, 24_576),
    "nvidia--Qwen3.6-27B-NVFP4": (26_895_998_464, 65_536),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": (34_660_610_688, 20_480),
    "LGAI-EXAONE--EXAONE-4.5-33B": (32_527_504_384, 262_144),
    "Qwen--Qwen2.5-VL-7B-Instruct": (7_615_616_512, 57_344),
    "apertus1p5": (8_091_086_976, 524_288),
    "mistralai--Voxtral-Mini-3B-2507": (4_014_136_320, 122_880),
    "meta-llama--Llama-3.1-8B": (8_030_261_248, 131_072),
    "meta-llama--Llama-3.1-70B": (70_553_706_496, 327_680),
    "meta-llama--Meta-Llama-3.1-70B": (70_553_706_496, 327_680),
    "nvidia--Llama-3.1-70B-Instruct-FP8": (70_553_706_496, 327_680),
    "meta-llama--Meta-Llama-3.1-405B": (405_853_388_800, 516_096),
    "mistralai--Mixtral-8x7B-v0.1": (46_702_792_704, 131_072),
    "mistralai--Mixtral-8x22B-v0.1": (140_620_634_112, 229_376),
    "microsoft--Phi-mini-MoE-instruct": (7_647_632_704, 131_072),
    "openai--gpt-oss-20b": (20_914_757_184, 49_152),
    # Language models inside others. transformers counts as many parameters and persistent buffers.
    "google--gemma-4-26B-A4B": (25_233_141_790, 225_280),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (400_711_848_960, 196_608),
    "Qwen--Qwen3-VL-2B-Instruct": (1_720_574_976, 114_688),
    "Qwen--Qwen3-VL-8B-Instruct": (8_190_735_360, 147_456),
    "Qwen--Qwen3-VL-32B-Instruct": (32_762_123_264, 262_144),
    "Qwen--Qwen3-VL-32B-Thinking": (32_762_123_264, 262_144),
    "Qwen--Qwen3-VL-235B-A22B-Instruct": (235_093_634_560, 192_512),
    "stepfun-ai--Step-3.7-Flash": (195_844_508_736, 184_320),
    "stepfun-ai--Step-3.7-Flash-FP8": (195_844_508_736, 184_320),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (107_769_861_120, 196_608),
    # 49 layers of 80 keep keys and values, all of 8 heads.
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": (49_867_145_216, 200_704),
    "glm5_next": (313_326_828_862, 17_116),
    # transformers counts as many, without the corrections of the routers, which are its buffers.
    "MiniMaxAI--MiniMax-M3": (426_174_572_928, 137_472),
}
# Quantized; sizes are of the same config without that.
QUANTIZED = {
    "nvidia--GLM-5.1-NVFP4": (743_911_218_432, 109_824),
    "zai-org--GLM-5.1-FP8": (743_911_218_432, 109_824),
    "deepseek-ai--DeepSeek-V3": (671_026_419_200, 70_272),
    "deepseek-ai--DeepSeek-R1": (671_026_419_200, 70_272),
    "Qwen--Qwen3-30B-A3B-FP8": (30_532_122_624, 98_304),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": (32_762_123_264, 262_144),
    "XiaomiMiMo--MiMo-V2-Flash": (308_778_780_864, 267_264),
    "nvidia--Gemma-4-26B-A4B-NVFP4": (25_233_141_790, 225_280),
    "nvidia--Gemma-4-31B-IT-NVFP4": (30_697_345_340, 901_120),
    "moonshotai--Kimi-K2.5": (1_026_408_232_448, 70_272),
    "nvidia--Kimi-K2.6-NVFP4": (1_026_408_232_448, 70_272),
    "MiniMaxAI--MiniMax-M2.5": (228_689_764_864, 253_952),
    "MiniMaxAI--MiniMax-M2.7": (228_689_764_864, 253_952),
    "nvidia--MiniMax-M2.5-NVFP4": (228_689_764_864, 253_952),
    "nvidia--MiniMax-M2.7-NVFP4": (228_689_764_864, 253_952),
    # Tables of experts by token count; of tokens that a window has passed nothing but entries is kept.
    **dict.fromkeys(
        (
            "deepseek-ai--DeepSeek-V4-Flash",
            "nvidia--DeepSeek-V4-Flash-NVFP4",
            "sgl-project--DeepSeek-V4-Flash-FP8",
        ),
        (284_334_567_511, 200_512),
    ),
    "deepseek-ai--DeepSeek-V4-Pro": (1_572_999_528_803, 291_136),
}


def sizes(values: dict[str, Any]) -> tuple[int, int]:
    got, names = read_model(values)
    parameters = sum(tensor.parameters for tensor in wanted_tensors(got, names).values())
    return parameters, got.kv_spec("bfloat16").bytes_per_token


def test_public_configs_resolve_or_are_refused_by_name(data: Path) -> None:
    read, quantized = set(), set()
    for path in sorted((data / "model-configs").rglob("*.json")):
        name, values = path.stem.removesuffix("_config"), json.loads(path.read_text())
        architecture = (values.get("architectures") or [None])[0]
        if name in KNOWN:
            assert sizes(values) == KNOWN[name], name
            read.add(name)
            continue
        if name in QUANTIZED:
            assert sizes(values) == QUANTIZED[name], name
            quantized.add(name)
            continue
        named = "architectures and model_type are missing" if architecture is None else architecture
        with pytest.raises(ModelError, match=named):
            read_model(values, path.name)
    assert (read, quantized) == (KNOWN.keys(), QUANTIZED.keys())
