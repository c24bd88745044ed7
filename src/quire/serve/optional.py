"""The APIs of other servers that options add, and the endpoints that they take the place of."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from quire.client.sglang import EncodeBody, GenerateBody
from quire.serve.endpoints import Endpoint, Generating, Plain
from quire.serve.native import demo
from quire.serve.openai.completions_protocol import CompletionRequest
from quire.serve.options import ServerConfig
from quire.serve.service import Service
from quire.serve.sglang import generate as sglang
from quire.serve.sglang import vectors
from quire.serve.sglang.info import add_sglang

SGLANG = (
    Generating("/generate", sglang.generate, GenerateBody, dict[str, Any], "Continue prompts (SGLang)"),
    Plain("/encode", vectors.encode, EncodeBody, dict[str, Any], "Vectors of texts (SGLang)"),
    Plain("/classify", vectors.classify, EncodeBody, dict[str, Any], "Outputs of a classifier (SGLang)"),
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
    return DEMO if config.vllm_demo_api else ()


def add_optional(app: FastAPI, service: Service) -> None:
    """Add the routes without a body."""
    if service.config.sglang_api:
        add_sglang(app, service)
