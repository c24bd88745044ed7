"""Paths of other servers that are not served here, and what to do instead, which a 404 says."""

from __future__ import annotations

_SGLANG = "SGLang's endpoints come with the package quire-compat, which is not installed (docs/compat.md)"
_ENCODE = "texts become vectors at /v1/embeddings"
_TGI = "Hugging Face archived TGI, and its endpoints were removed: use /v1/completions"
_LORA = "adapters are loaded at run time with --allow-runtime-lora, --enable-lora and --admin-api-key"

ELSEWHERE = {
    **dict.fromkeys(("/generate", "/get_model_info", "/model_info", "/flush_cache"), _SGLANG),
    "/encode": _ENCODE,
    **dict.fromkeys(("/generate_stream", "/info"), _TGI),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
}
