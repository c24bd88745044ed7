"""What the log advises to try."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from quire.serve.options import ServerConfig
from quire.serve.server import _curl


@pytest.mark.parametrize(
    ("generates", "scores", "template", "path", "field"),
    [
        (True, None, "a template", "/v1/chat/completions", '"messages"'),
        (True, None, None, "/v1/completions", '"prompt"'),
        (False, None, None, "/v1/embeddings", '"input"'),
        (False, "softmax", None, "/classify", '"input"'),
    ],
)
def test_the_advice_fits_the_model(
    generates: bool, scores: str | None, template: str | None, path: str, field: str
) -> None:
    front = SimpleNamespace(template=template, info=SimpleNamespace(generates=generates, scores=scores))
    service: Any = SimpleNamespace(config=ServerConfig(), front=front, name="m")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = _curl(service, listener)
    assert f"{path} " in line
    assert field in line
