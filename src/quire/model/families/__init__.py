"""The registry of model families. A Hugging Face config becomes a tree of configs and the names of its tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quire.errors import ModelError, UnknownArchitectureError
from quire.lazy import Lazy
from quire.model.families.config import ConfigReader
from quire.model.families.family import Family
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.weights.readers import KEYS, find_quantization

if TYPE_CHECKING:
    from quire import spelling
    from quire.model.families import composite
else:
    spelling, composite = Lazy("quire.spelling"), Lazy("quire.model.families.composite")

# By module, the classes of its families and their model_type. A module is imported when one of its families is asked
# for.
_DECODERS = {
    "llama": "LlamaForCausalLM:llama",
    "llama_kin": "SmolLM3ForCausalLM:smollm3 StableLmForCausalLM:stablelm CwmForCausalLM:cwm "
    "SeedOssForCausalLM:seed_oss HeliumForCausalLM:helium InternLM3ForCausalLM:internlm3 "
    "IQuestCoderForCausalLM:iquestcoder ExaoneForCausalLM:exaone Emu3ForCausalLM:emu3_text_model",
    "llama4": "Llama4ForCausalLM:llama4_text",
    "mistral": "MistralForCausalLM:mistral MinistralForCausalLM:ministral Ministral3ForCausalLM:ministral3 "
    "MixtralForCausalLM:mixtral",
    "qwen": "Qwen2ForCausalLM:qwen2 MiMoForCausalLM:mimo Qwen2MoeForCausalLM:qwen2_moe Qwen3ForCausalLM:qwen3 "
    "Qwen3MoeForCausalLM:qwen3_moe",
    "gemma": "GemmaForCausalLM:gemma Gemma2ForCausalLM:gemma2 Gemma3ForCausalLM:gemma3_text "
    "VaultGemmaForCausalLM:vaultgemma",
    "gemma3n": "Gemma3nForCausalLM:gemma3n_text",
    "gated_delta": "Qwen3NextForCausalLM:qwen3_next Qwen3_5ForCausalLM:qwen3_5_text "
    "Qwen3_5MoeForCausalLM:qwen3_5_moe_text OlmoHybridForCausalLM:olmo_hybrid",
    "qwen4": "Qwen4ExpForCausalLM:qwen4_exp_text",
    "minimax_m3": "MiniMaxM3ForCausalLM:minimax_m3 MiniMaxM3VLForCausalLM:minimax_m3_vl_text",
    "kimi_linear": "KimiLinearForCausalLM:kimi_linear",
    "hyper": "DeepseekV4ForCausalLM:deepseek_v4 Glm5NextForCausalLM:glm5_next_text",
    "lfm": "Lfm2ForCausalLM:lfm2 Lfm2MoeForCausalLM:lfm2_moe Lfm3ForCausalLM:lfm3",
    "mamba": "NemotronHForCausalLM:nemotron_h GraniteMoeHybridForCausalLM:granitemoehybrid BambaForCausalLM:bamba "
    "FalconH1ForCausalLM:falcon_h1 Mamba2ForCausalLM:mamba2",
    "minimax": "MiniMaxForCausalLM:minimax",
    "griffin": "RecurrentGemmaForCausalLM:recurrent_gemma",
    "zamba": "Zamba2ForCausalLM:zamba2",
    "jamba": "JambaForCausalLM:jamba MambaForCausalLM:mamba FalconMambaForCausalLM:falcon_mamba",
    "phi": "PhiForCausalLM:phi Phi3ForCausalLM:phi3 Starcoder2ForCausalLM:starcoder2",
    "olmo": "OlmoForCausalLM:olmo Olmo2ForCausalLM:olmo2 Olmo3ForCausalLM:olmo3 OlmoeForCausalLM:olmoe "
    "FlexOlmoForCausalLM:flex_olmo Exaone4ForCausalLM:exaone4",
    "granite": "GraniteForCausalLM:granite GraniteSWAForCausalLM:granite_swa GraniteMoeForCausalLM:granitemoe "
    "GraniteMoeSharedForCausalLM:granitemoeshared GraniteMoeSWAForCausalLM:granitemoe_swa "
    "HyperCLOVAXForCausalLM:hyperclovax",
    "relu2": "ArceeForCausalLM:arcee Jais2ForCausalLM:jais2 NemotronForCausalLM:nemotron BitNetForCausalLM:bitnet "
    "NanoChatForCausalLM:nanochat ApertusForCausalLM:apertus Apertus1p5TextForCausalLM:apertus1p5_text",
    "ernie": "Ernie4_5ForCausalLM:ernie4_5 Ernie4_5_MoeForCausalLM:ernie4_5_moe",
    "hunyuan": "HunYuanDenseV1ForCausalLM:hunyuan_v1_dense HunYuanMoEV1ForCausalLM:hunyuan_v1_moe "
    "HYV3ForCausalLM:hy_v3",
    "mixtures": "MiniMaxM2ForCausalLM:minimax_m2 Glm4MoeForCausalLM:glm4_moe SolarOpenForCausalLM:solar_open "
    "Dots1ForCausalLM:dots1 ExaoneMoeForCausalLM:exaone_moe MellumForCausalLM:mellum "
    "Kolibri1ForCausalLM:kolibri1 FlintForCausalLM:flint AfmoeForCausalLM:afmoe PhimoeForCausalLM:phimoe "
    "AriaTextForCausalLM:aria_text",
    "bailing": "BailingMoeForCausalLM:bailing_moe BailingMoeV2ForCausalLM:bailing_moe_v2 "
    "BailingHybridForCausalLM:bailing_hybrid SarvamMoEForCausalLM:sarvam_moe",
    "cohere": "CohereForCausalLM:cohere Cohere2ForCausalLM:cohere2 Cohere2MoeForCausalLM:cohere2_moe",
    "glm": "GlmForCausalLM:glm Glm4ForCausalLM:glm4",
    "gpt": "GPT2LMHeadModel:gpt2 GPTJForCausalLM:gptj GPTNeoXForCausalLM:gpt_neox "
    "GPTNeoXJapaneseForCausalLM:gpt_neox_japanese OPTForCausalLM:opt",
    "falcon": "FalconForCausalLM:falcon BloomForCausalLM:bloom",
    "gpt_oss": "GptOssForCausalLM:gpt_oss",
    "deepseek": "DeepseekV2ForCausalLM:deepseek_v2 DeepseekV3ForCausalLM:deepseek_v3 "
    "Glm4MoeLiteForCausalLM:glm4_moe_lite AXK1ForCausalLM:axk1 YoutuForCausalLM:youtu MiniCPM3ForCausalLM:minicpm3 "
    "SarvamMLAForCausalLM:sarvam_mla LongcatFlashForCausalLM:longcat_flash",
    "indexed": "DeepseekV32ForCausalLM:deepseek_v32 GlmMoeDsaForCausalLM:glm_moe_dsa "
    "HYV4ForCausalLM:hy_v4 HYV4VLTextForCausalLM:hy_v4_vl_text MistralLarge4ForCausalLM:mistral_large4_text",
    "unlike": "Gemma4ForCausalLM:gemma4_text MiMoV2FlashForCausalLM:mimo_v2_flash LagunaForCausalLM:laguna "
    "DeciLMForCausalLM:nemotron-nas",
    "step": "Step3p5ForCausalLM:step3p5",
    "older": "GPTBigCodeForCausalLM:gpt_bigcode CodeGenForCausalLM:codegen GPTNeoForCausalLM:gpt_neo "
    "OpenAIGPTLMHeadModel:openai-gpt CTRLLMHeadModel:ctrl XGLMForCausalLM:xglm BioGptForCausalLM:biogpt "
    "MptForCausalLM:mpt PersimmonForCausalLM:persimmon",
}
# _ALIASES are class names that stand for another: alone, or with the model_type that transformers writes beside the
# class whose code it shares.
_ALIASES = {
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "HF_ColBERT": "BertModel",
    "Step3p7FlashForCausalLM": "Step3p5ForCausalLM",
    "Gemma3TextModel": "Gemma3Model",
    "Gemma3TextForSequenceClassification": "Gemma3ForSequenceClassification",
    "Qwen3_5TextModel": "Qwen3_5Model",
    "Qwen3_5MoeTextModel": "Qwen3_5MoeModel",
    "Qwen3_5TextForSequenceClassification": "Qwen3_5ForSequenceClassification",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "LlamaForCausalLM exaone": "ExaoneForCausalLM",
    "Glm4MoeForCausalLM sarvam_moe": "SarvamMoEForCausalLM",
    "DeepseekV3ForCausalLM sarvam_mla": "SarvamMLAForCausalLM",
}
# _UNREAD are classes that no family can describe, with the field that asks for what Quire lacks.
_UNREAD = {"DogeForCausalLM": "keep_window_size asks for keys that each token chooses by a mask of its own"}
_ENCODERS = (
    "Bert:bert DistilBert:distilbert Roberta:roberta XLMRoberta:xlm-roberta ModernBert:modernbert EuroBert:eurobert "
    "JinaEmbeddingsV3:jina_embeddings_v3 MPNet:mpnet Deberta:deberta DebertaV2:deberta-v2"
)
ENCODER_TASKS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "Model")


def _entries(text: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, _, kind in (entry.partition(":") for entry in text.split())]


DECODERS: Mapping[str, str] = {
    name: module for module, text in _DECODERS.items() for name, _ in _entries(text)
}
ENCODERS: Mapping[str, str] = {
    f"{name}{task}": "encoders" for name, _ in _entries(_ENCODERS) for task in ENCODER_TASKS
}
# TASKS are classes of a decoder without its head: the base model, or one that ends in scores; and the headed class.
TASKS = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForRewardModel",
    "ForProcessRewardModel",
)
HEADLESS: Mapping[str, str] = {
    f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}{task}": name
    for name in DECODERS
    for task in TASKS
}
SUPPORTED: Mapping[str, str] = {
    **DECODERS,
    **ENCODERS,
    **{name: DECODERS[decoder] for name, decoder in HEADLESS.items()},
}
MODEL_TYPES: Mapping[str, str] = {
    **{kind: name for text in _DECODERS.values() for name, kind in _entries(text)},
    **{kind: f"{name}Model" for name, kind in _entries(_ENCODERS)},
}


# HEADS are tensors of a decoder without a head that the decoder does not ask for: pooling.py reads them.
HEADS = (r"(score|classifier)\..*", r"lm_head\..*")


def load_family(architecture: str) -> Family:
    """Load the family of a class in SUPPORTED."""
    module = importlib.import_module(f"{__name__}.{SUPPORTED[architecture]}")
    families: Mapping[str, Family] = module.FAMILIES
    return families[HEADLESS.get(architecture, architecture)]


def read_model(
    values: Mapping[str, Any], where: str = "config.json", architecture: str | None = None
) -> tuple[DecoderConfig, TensorNames]:
    """Read the model that a config.json describes, and the names of its tensors.

    Raises ModelError for anything not understood in full.

    `architecture` (a class or a model_type) takes the place of the config's own.
    """
    text = text_config(values, where) if architecture is None else None
    values = values if text is None else text
    architecture = _architecture(values, where) if architecture is None else _named(architecture)
    family = load_family(architecture)
    decoder = HEADLESS.get(architecture, architecture)
    named = {**values, "architectures": [decoder]}
    config = ConfigReader(named, where, family.defaults, family.spellings)
    quantization = find_quantization(values, where, None)
    if quantization is not None:
        quantization.reader()  # refuses a method that nothing reads
    config.skip(" ".join(KEYS))
    config.skip(family.unused)
    spec = family.read(config)
    names = family.tensor_names(spec, config)
    names = names if text is None else composite.text_names(names)
    if decoder != architecture:
        spec = replace(spec, architecture=architecture, head=None)
        names = names.changed({"ignored": (*names.ignored, *HEADS)})
        config.skip("classifier_from_token is_original_qwen3_reranker method token_classification_bias")
    config.finish()
    spec.check(where)
    return spec, names.changed(family.quantized.get(quantization.method, {}) if quantization else {})


def text_config(values: Mapping[str, Any], where: str = "config.json") -> dict[str, Any] | None:
    """Find the config of the language model in a model of several parts; None if it is not one. ModelError."""
    if "ForConditionalGeneration" not in str(values.get("architectures")):
        return None
    return composite.text_part(values, MODEL_TYPES, where)


def _named(architecture: str) -> str:
    """Find the class for a class or model_type that a user names."""
    name = MODEL_TYPES.get(architecture, architecture)
    if name not in SUPPORTED:
        also = spelling.nearest(name, [*SUPPORTED, *MODEL_TYPES])
        raise ModelError(f"--architecture {architecture} is not a class or model_type that Quire knows{also}")
    return name


def _architecture(values: Mapping[str, Any], where: str) -> str:
    """Read the name in `architectures`, or the class of `model_type` if that is absent."""
    names, kind = values.get("architectures"), values.get("model_type")
    if names is None and kind is None:
        raise ModelError(f"{where}: architectures and model_type are missing; not a model's config")
    if names is None:
        names = [MODEL_TYPES.get(kind, f"model_type {kind!r}")] if isinstance(kind, str) else []
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"{where}: architectures must be a list of one architecture, got {names!r:.80}")
    if not isinstance(names[0], str):
        raise ModelError(f"{where}: architectures must hold a name, got {names[0]!r:.80}")
    name = _ALIASES.get(names[0], names[0])
    name = _ALIASES.get(f"{name} {kind}", name)
    if (
        values.get("position_embedding_type") == "rotary"
    ):  # Jina's class has the name of the one that it changes
        name = name.replace("XLMRoberta", "JinaEmbeddingsV3")
    if name not in SUPPORTED:
        why = _UNREAD.get(name, "Quire has no family for it")
        raise UnknownArchitectureError(
            f"{where}: architecture {name} is not supported: {why} (`quire docs models` lists all)"
        )
    return name
