"""The table of supported families: a Hugging Face config becomes an ArchSpec and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from quire.errors import ModelError, UnknownArchitectureError
from quire.model.families import (
    cohere,
    deepseek,
    encoders,
    falcon,
    gemma,
    glm,
    gpt,
    gpt_oss,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
)
from quire.model.families.config import ConfigReader
from quire.model.families.names import TensorNames
from quire.model.spec import ArchSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: how its config is read, where its tensors are, and which models it is that of.

    `names` may depend on the spec. `quantized`: methods of quantization that only change where tensors are, and how.
    """

    model_type: str
    models: str
    read: Callable[[ConfigReader], ArchSpec]
    names: TensorNames | Callable[[ArchSpec], TensorNames] = field(default_factory=TensorNames)
    quantized: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama, SmolLM 2, Yi", llama.read_llama
    ),
    "MistralForCausalLM": Family("mistral", "Mistral 7B (all versions), Nemo", mistral.read_mistral),
    "MinistralForCausalLM": Family("ministral", "Ministral 8B", mistral.read_ministral),
    "MixtralForCausalLM": Family(
        "mixtral", "Mixtral 8x7B, 8x22B", mistral.read_mixtral, mistral.MIXTRAL_NAMES
    ),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", qwen.read_qwen2),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", qwen.read_qwen2_moe),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3", qwen.read_qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", qwen.read_qwen3_moe),
    "GraniteForCausalLM": Family("granite", "Granite 3", llama.read_granite),
    "SmolLM3ForCausalLM": Family("smollm3", "SmolLM3", llama.read_smollm3),
    "StableLmForCausalLM": Family("stablelm", "StableLM 3B, 2", llama.read_stablelm, llama.STABLELM_NAMES),
    "GemmaForCausalLM": Family("gemma", "Gemma 1", gemma.read_gemma, gemma.GEMMA_NAMES),
    "Gemma2ForCausalLM": Family("gemma2", "Gemma 2", gemma.read_gemma2, gemma.SANDWICH_NAMES),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", "Gemma 3 (text: 270M, 1B)", gemma.read_gemma3, gemma.SANDWICH_NAMES
    ),
    "PhiForCausalLM": Family("phi", "Phi-1, 1.5, 2", phi.read_phi, phi.PHI_NAMES),
    "Phi3ForCausalLM": Family("phi3", "Phi-3, 3.5, 4 (dense, text)", phi.read_phi3, phi.PHI3_NAMES),
    "Starcoder2ForCausalLM": Family("starcoder2", "StarCoder2", phi.read_starcoder2, phi.STARCODER2_NAMES),
    "Olmo2ForCausalLM": Family("olmo2", "OLMo 2", olmo.read_olmo2, olmo.POST_NORM_NAMES),
    "Olmo3ForCausalLM": Family("olmo3", "OLMo 3", olmo.read_olmo3, olmo.POST_NORM_NAMES),
    "Exaone4ForCausalLM": Family("exaone4", "Exaone 4.0", olmo.read_exaone4, olmo.POST_NORM_NAMES),
    "CohereForCausalLM": Family(
        "cohere", "Command R, Command R+, Aya 23", cohere.read_cohere, cohere.COHERE_NAMES
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", "Command R7B, Command A", cohere.read_cohere2, cohere.COHERE_NAMES
    ),
    "GlmForCausalLM": Family("glm", "GLM-4 9B (2024)", glm.read_glm, glm.GLM_NAMES),
    "Glm4ForCausalLM": Family("glm4", "GLM-4 0414", glm.read_glm4, glm.GLM4_NAMES),
    "GPT2LMHeadModel": Family("gpt2", "GPT-2, DistilGPT2", gpt.read_gpt2, gpt.GPT2_NAMES),
    "GPTJForCausalLM": Family("gptj", "GPT-J 6B", gpt.read_gptj, gpt.GPTJ_NAMES),
    "GPTNeoXForCausalLM": Family("gpt_neox", "GPT-NeoX 20B, Pythia", gpt.read_neox, gpt.NEOX_NAMES),
    "OPTForCausalLM": Family("opt", "OPT 125M to 66B, the 350M too", gpt.read_opt, gpt.OPT_NAMES),
    "FalconForCausalLM": Family(
        "falcon", "Falcon 7B, 40B, 180B, RW", falcon.read_falcon, falcon.falcon_names
    ),
    "BloomForCausalLM": Family("bloom", "BLOOM, BLOOMZ", falcon.read_bloom, falcon.BLOOM_NAMES),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt-oss 20B, 120B",
        gpt_oss.read_gpt_oss,
        gpt_oss.GPT_OSS_NAMES,
        {"mxfp4": {"expert_stack": "mxfp4"}},
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", "DeepSeek-V2, V2-Lite", deepseek.read_deepseek_v2, deepseek.deepseek_names
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", "DeepSeek-V3, R1, Kimi-K2", deepseek.read_deepseek_v3, deepseek.deepseek_names
    ),
}
ENCODERS: Mapping[str, Family] = {
    name: Family(kind, models, read, names)
    for kind, models, read, names, classes in (
        ("bert", "BERT, MiniLM, BGE, E5", encoders.read_bert, encoders.BERT_NAMES, "Bert"),
        ("distilbert", "DistilBERT", encoders.read_distilbert, encoders.DISTILBERT_NAMES, "DistilBert"),
        ("roberta", "RoBERTa", encoders.read_roberta, encoders.ROBERTA_NAMES, "Roberta"),
        (
            "xlm-roberta",
            "XLM-R, multilingual E5, BGE-M3",
            encoders.read_roberta,
            encoders.ROBERTA_NAMES,
            "XLMRoberta",
        ),
        ("modernbert", "ModernBERT, GTE", encoders.read_modernbert, encoders.MODERNBERT_NAMES, "ModernBert"),
    )
    for name in (f"{classes}ForMaskedLM", f"{classes}ForSequenceClassification", f"{classes}Model")
}
SUPPORTED = {**FAMILIES, **ENCODERS}
MODEL_TYPES: Mapping[str, str] = {family.model_type: name for name, family in SUPPORTED.items()}


def read_config(values: Mapping[str, Any], where: str = "config.json") -> tuple[ArchSpec, TensorNames]:
    """The spec and tensor names of a config. Raises ModelError for anything not understood in full."""
    config = ConfigReader(values, where)
    family = SUPPORTED[_architecture(config)]
    stored = _quantization(config, family)
    spec = family.read(config)
    config.finish()
    names = family.names(spec) if callable(family.names) else family.names
    return spec, replace(names, **stored)


def _quantization(config: ConfigReader, family: Family) -> Mapping[str, Any]:
    """What the config's quantization changes in the names. ModelError for one that the family does not read."""
    if config.get("compression_config") is not None:
        raise ModelError(f"{config.where}: compression_config: quantized checkpoints are not supported yet")
    value = config.get("quantization_config")
    if value is None:
        return {}
    method = value.get("quant_method") if isinstance(value, dict) else None
    if not isinstance(method, str) or method not in family.quantized:
        raise ModelError(
            f"{config.where}: quantization_config: quantized checkpoints are not supported yet ({method}); "
            "use the original weights"
        )
    return family.quantized[method]


def _architecture(config: ConfigReader) -> str:
    """The name in `architectures`, or what `model_type` stands for where that is absent."""
    names = config.get("architectures")
    if names is None:
        kind = config.get("model_type")
        if kind is None:
            raise ModelError(
                f"{config.where}: architectures and model_type are missing; not a model's config"
            )
        names = [MODEL_TYPES.get(kind, f"model_type {kind!r}")] if isinstance(kind, str) else []
    if not isinstance(names, list) or len(names) != 1:
        raise config.wrong("architectures", names, "a list of one architecture")
    if names[0] not in SUPPORTED:
        raise UnknownArchitectureError(
            f"{config.where}: architecture {names[0]} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    return str(names[0])
