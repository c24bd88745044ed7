"""Models of several parts whose language model is one of the families: the config and tensors of that part alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelError
from quire.model.families.names import TensorNames

# Classes with a text_config whose model_type says the family. Images, audio and video are not read.
CLASSES = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "Aria",
        "Gemma3",
        "Gemma3n",
        "Gemma4",
        "KimiK25",
        "Lfm2Vl",
        "Lfm3Vl",
        "Llama4",
        "Llava",
        "Mistral3",
        "Qwen3VL",
        "Qwen3_5",
        "Qwen3_5Moe",
        "Qwen3VLMoe",
        "Step3p7",
    )
)
# Types of language models that only occur inside others, or go by another name there.
TEXT_TYPES = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
}
PREFIXES = ("model.language_model.", "language_model.model.")
OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|patch_merger|embed_vision|vit_large_projector"
    r"|audio_tower|embed_audio)\..*"
)
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
            rope = {name: value for name, value in text[key].items() if name not in POSITIONS_OF_PICTURES}
            text[key] = rope
    return text


def disagrees_on_head(values: Mapping[str, Any]) -> bool:
    """Whether only one of the two configs says that the head is the embedding: then the checkpoint's head decides."""
    inner = values.get("text_config")
    said = (values.get(TIED), inner.get(TIED) if isinstance(inner, Mapping) else None)
    return None not in said and said[0] != said[1]


def text_names(names: TensorNames) -> TensorNames:
    """Adapt the names of a language model inside another, whose other parts are left out."""
    return names.changed({"prefixes": PREFIXES, "ignored": (*names.ignored, OTHER_PARTS)})
