"""Says what a path that is not served here may mean, for a 404: a switch, a package, or another path."""

from __future__ import annotations

from collections.abc import Collection

from quire.spelling import nearest

_SGLANG = "SGLang's endpoints come with the package quire-compat, which is not installed (docs/compat.md)"
_ENCODE = "texts become vectors at /v1/embeddings"
_TGI = "Hugging Face archived TGI, and its endpoints were removed: use /v1/completions"
_LORA = "adapters are loaded at run time with --allow-runtime-lora, --enable-lora and --admin-api-key"
MAX_PATH = 80  # characters of a path that is compared with others

ELSEWHERE = {
    **dict.fromkeys(("/generate", "/get_model_info", "/model_info", "/flush_cache"), _SGLANG),
    "/encode": _ENCODE,
    **dict.fromkeys(("/generate_stream", "/info"), _TGI),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _LORA),
}
_OLLAMA = {
    "chat": "/v1/chat/completions",
    "generate": "/v1/completions",
    "embed": "/v1/embeddings",
    "embeddings": "/v1/embeddings",
    "tags": "/v1/models",
    "version": "/version",
}


def hint(path: str, served: Collection[str]) -> str:
    """Say what `path` may mean where `served` are the paths that exist; empty if nothing is like it."""
    if path in ELSEWHERE:
        return f": {ELSEWHERE[path]}"
    if path.startswith("/api/"):
        return f": Ollama's API is not served: use {_OLLAMA.get(path[5:], 'the API of OpenAI under /v1')}"
    whole = "/v1/" + path.strip("/").removeprefix("v1/").removeprefix("v1/")
    if whole in served:
        return f"; did you mean {whole}?"
    return nearest(path, served) if len(path) <= MAX_PATH else ""
