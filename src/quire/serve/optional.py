"""The APIs of other servers that options add, and the endpoints that they take the place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from quire.client.sglang import EncodeBody, GenerateBody
from quire.serve.endpoints import Endpoint, Generating, Plain
from quire.serve.errors import HttpError
from quire.serve.native import demo
from quire.serve.openai.completions_protocol import CompletionRequest
from quire.serve.options import ServerConfig
from quire.serve.service import Service
from quire.serve.sglang import generate as sglang
from quire.serve.sglang import vectors
from quire.serve.sglang.info import add_sglang
from quire.serve.tgi import generate as tgi
from quire.serve.tgi.protocol import Generated, TgiRequest

SGLANG = (
    Generating("/generate", sglang.generate, GenerateBody, dict[str, Any], "Continue prompts (SGLang)"),
    Plain("/encode", vectors.encode, EncodeBody, dict[str, Any], "Vectors of texts (SGLang)"),
    Plain("/classify", vectors.classify, EncodeBody, dict[str, Any], "Outputs of a classifier (SGLang)"),
)
TGI = (
    Generating("/generate", tgi.generate, TgiRequest, Generated, "Continue a text (TGI)"),
    Generating("/", tgi.generate_either, TgiRequest, list[Generated], "Continue or stream a text (TGI)"),
    Generating("/generate_stream", tgi.generate_stream, TgiRequest, Generated, "Stream a text (TGI)"),
)
DEMO = (
    Generating(
        "/generate", demo.generate, CompletionRequest, demo.DemoText, "Continue prompts (vLLM's demo)"
    ),
)


def optional_endpoints(config: ServerConfig) -> tuple[Endpoint, ...]:
    """The endpoints that options add. One whose path another endpoint has takes its place."""
    if config.sglang_api:
        return SGLANG
    if config.tgi_api:
        return TGI
    return DEMO if config.vllm_demo_api else ()


def add_optional(app: FastAPI, service: Service) -> None:
    """Add the routes without a body."""
    if service.config.sglang_api:
        add_sglang(app, service)
    if service.config.tgi_api:
        tgi.add_tgi(app, service)


def error_answers(config: ServerConfig) -> dict[str, Callable[[HttpError], tuple[int, bytes]]]:
    """The status and body of an error, by path, where they are not OpenAI's."""
    return {endpoint.path: tgi.error_answer for endpoint in TGI} if config.tgi_api else {}
