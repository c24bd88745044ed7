"""SGLang's endpoints beside Quire's own: /generate, and the routes that its clients need to use it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from quire.engine.verbs import ResetPrefixCache
from quire.serve.endpoints import Dialect, Generating, Plain
from quire.serve.native.control import add_post, for_operators
from quire.serve.openai.chat_protocol import ChatCompletion, ChatRequest
from quire.serve.openai.protocol import Completion, CompletionRequest
from quire.serve.openapi import add_get, json_response
from quire.serve.service import Service
from quire_compat.sglang.calls import GenerateBody
from quire_compat.sglang.generate import generate
from quire_compat.sglang.matched import chat, complete
from quire_compat.sglang.scoring import ScoreBody, score
from quire_compat.sglang.tokenize import TokenizeBody, tokenize


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes without a body."""

    async def model_info() -> Response:
        return json_response(_model(service))

    async def flush() -> Response:
        await service.engine.do(ResetPrefixCache())
        return Response("The prefix cache is empty.\n", media_type="text/plain")

    for path in ("/get_model_info", "/model_info"):
        add_get(app, path, model_info, dict[str, Any], "The model (SGLang)")
    add_get(app, "/flush_cache", flush, None, "Forget all cached prefixes (SGLang)")
    add_post(app, "/flush_cache", flush)
    for_operators(app, "/flush_cache")


def _model(service: Service) -> dict[str, Any]:
    config, info = service.engine.config.model, service.front.info
    return {
        "model_path": config.model or info.name,
        "tokenizer_path": config.tokenizer or config.model or info.name,
        "is_generation": info.generates,
        "preferred_sampling_params": info.defaults or None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


DIALECT = Dialect(
    (
        Generating("/generate", generate, GenerateBody, dict[str, Any], "Continue prompts (SGLang)"),
        Generating("/v1/completions", complete, CompletionRequest, Completion, "Continue prompts"),
        Generating("/v1/chat/completions", chat, ChatRequest, ChatCompletion, "Answer a conversation"),
        Plain(
            "/v1/score", score, ScoreBody, dict[str, Any], "Scores of labels (SGLang) or of pairs of texts"
        ),
        Plain("/tokenize", tokenize, TokenizeBody, dict[str, Any], "Texts to token ids"),
    ),
    add_routes,
)
