"""What the log advises to try."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.serve.elsewhere import hint
from quire.serve.options import ServerConfig
from quire.serve.server import _curl
from quire.types import UNKNOWN_MODEL


@pytest.mark.parametrize(
    ("card", "template", "path", "field"),
    [
        ({}, "a template", "/v1/chat/completions", '"messages"'),
        ({}, None, "/v1/completions", '"prompt"'),
        ({"generates": False}, None, "/v1/embeddings", '"input"'),
        ({"generates": False, "pooling": "all"}, "a template", "/pooling", '"input"'),
        ({"generates": False, "scores": "softmax", "labels": ("a", "b")}, None, "/classify", '"input"'),
        ({"generates": False, "scores": "sigmoid", "labels": ("a",)}, None, "/v1/rerank", '"documents"'),
    ],
)
def test_the_advice_fits_the_model(card: dict[str, Any], template: str | None, path: str, field: str) -> None:
    front = SimpleNamespace(template=template, info=replace(UNKNOWN_MODEL, **card))
    service: Any = SimpleNamespace(config=ServerConfig(), front=front, name="m")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = _curl(service, listener)
    assert f"{path} " in line
    assert field in line


SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/models", "/health")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/load_lora_adapter", "--allow-runtime-lora"),
        ("/v1/unload_lora_adapter", "--allow-runtime-lora"),
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/models", "; did you mean /v1/models?"),
        ("/v1/chat/completions/", "; did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/tokenise", "; did you mean /tokenize?"),
        ("/api/chat", "Ollama's API is not served: use /v1/chat/completions"),
        ("/api/pull", "Ollama's API is not served: use the API of OpenAI under /v1"),
        ("/generate", "quire-compat"),
        ("/favicon.ico", ""),
        ("/" + "tokenize" * 100_000, ""),
    ],
)
def test_a_path_that_is_not_served_says_what_is_meant(path: str, said: str) -> None:
    told = hint(path, SERVED)
    assert said in told
    assert bool(said) is bool(told)
