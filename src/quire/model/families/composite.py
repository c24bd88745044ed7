"""Models of several parts whose language model is one of the families: the config and tensors of that part alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.model.families.names import TensorNames

# CLASSES have a language model that is one of the families. Images, audio and video are not read.
_NAMES = (
    "Apertus1p5 Aria DeepseekVL Exaone4_5_ Gemma3 Gemma3n Gemma4 Glm5Next GlmAsr GotOcr2 HyperCLOVAXVisionV2 Idefics2 "
    "Idefics3 InternVL KimiK25 Lfm2Vl Lfm3Vl LightOnOcr Llama4 HYV4VL MistralLarge4 Llava LlavaNext LlavaNextVideo "
    "LlavaOnevision MiniMaxM3Sparse Mistral3 MossTranscribeDiarize Ovis2 Qwen2Audio Qwen2VL Qwen2_5_VL Qwen3ASR "
    "Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp SmolVLM Step3p7 VideoLlama3 VipLlava Voxtral"
)
CLASSES = frozenset(f"{name}ForConditionalGeneration" for name in _NAMES.split())
# Types of language models that only occur inside others, or go by another name there.
TEXT_TYPES = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "minimax_m3_vl_text": "minimax_m3",
    "kimi_k25": "deepseek_v3",
    "exaone4_5_text": "exaone4",
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"),
}
PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
# FLAT are types whose older files have the language model's fields beside the vision_config.
FLAT = ("qwen2_vl", "qwen2_5_vl")
OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|vit|perceive|visual|multi_modal_projector|mm_projector|patch_merger|patch_merge_mlp|embed_vision|vit_large_projector"
    r"|audio_tower|embed_audio|aligner|connector|vision_encoder|vision_projection|vision_projector|projector"
    r"|visual_embeddings_table|vision_tokenizer|audio_tokenizer|mtp)\..*|(model\.)?image_newline"
)
PICTURE = ("vision_", "image_", "video_")
TIED = "tie_word_embeddings"
# POSITIONS_OF_PICTURES divide a rope among a picture's axes; a text's positions are the same on all axes.
POSITIONS_OF_PICTURES = ("mrope_section", "mrope_interleaved")


def text_part(values: Mapping[str, Any], types: Mapping[str, str], where: str) -> dict[str, Any] | None:
    """Find the language model's config, as if it were alone; None if the config has a single part. ModelError."""
    named = values.get("architectures")
    if (
        not isinstance(named, list)
        or len(named) != 1
        or not isinstance(named[0], str)
        or named[0] not in CLASSES
    ):
        return None
    inner = values.get("text_config")
    if inner is None and values.get("model_type") in FLAT:
        inner = {
            key: value
            for key, value in values.items()
            if key != "vision_config" and not key.startswith(PICTURE)
        }
    if not isinstance(inner, Mapping):
        raise ModelError(
            f"{where}: text_config is missing; {named[0]} keeps its language model's config there"
        )
    kind = inner.get("model_type")
    kind = TEXT_TYPES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in types:
        raise ModelError(f"{where}: text_config: model_type {kind!r} is not one that Quire knows")
    text = {**inner, "architectures": [types[kind]], "model_type": kind}
    for key in ("quantization_config", "torch_dtype", "dtype"):
        if values.get(key) is not None:
            text[key] = values[key]
    if text.get(TIED) is None and values.get(TIED) is not None:
        text[TIED] = values[TIED]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), Mapping):
            text[key] = {
                name: "default" if value == "mrope" else value
                for name, value in text[key].items()
                if name not in POSITIONS_OF_PICTURES
            }
    return text


def disagrees_on_head(values: Mapping[str, Any]) -> bool:
    """Whether only one of the two configs says that the head is the embedding: then the checkpoint's head decides."""
    inner = values.get("text_config")
    said = (values.get(TIED), inner.get(TIED) if isinstance(inner, Mapping) else None)
    return None not in said and said[0] != said[1]


def text_names(names: TensorNames) -> TensorNames:
    """Adapt the names of a language model inside another, whose other parts are left out."""
    return names.changed({"prefixes": PREFIXES, "ignored": (*names.ignored, OTHER_PARTS)})
