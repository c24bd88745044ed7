"""Speculation over HTTP: predicted outputs with their usage, the switch of a request, and the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Server, start


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(
        maker="quire.client.start",
        model="",
        max_model_len=512,
        threads=1,
        speculative_config={"method": "ngram", "prompt_lookup_min": 2, "adaptive": False},
    )
    yield running
    running.stop()


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Tell a story"}], "temperature": 0, "max_tokens": 40}
    response = server.post("/v1/chat/completions", {**body, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def drafted(server: Server) -> float:
    with server.client as client:
        text = client.get("/metrics").text
    line = next(line for line in text.splitlines() if line.startswith("quire:spec_decode_num_drafts_total{"))
    return float(line.split()[-1])


def test_a_predicted_output_is_accepted(server: Server) -> None:
    plain = chat(server)
    text = plain["choices"][0]["message"]["content"]
    assert not any(plain["usage"]["completion_tokens_details"].values())
    parts = [{"type": "text", "text": text[:30]}, {"type": "text", "text": text[30:]}]
    for content in (text, parts):
        answer = chat(server, prediction={"type": "content", "content": content})
        assert answer["choices"] == plain["choices"]
        usage = answer["usage"]
        assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 20
        assert usage["completion_tokens"] == plain["usage"]["completion_tokens"]
    wrong = chat(server, prediction={"type": "content", "content": "zebra " * 20})
    assert wrong["choices"] == plain["choices"]
    assert wrong["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_a_request_turns_speculation_off(server: Server) -> None:
    prompt = {"prompt": "the cat sat. the cat sat. the cat", "max_tokens": 30, "temperature": 0}
    plain = server.post("/v1/completions", {**prompt, "speculative_decoding": False}).json()
    before = drafted(server)
    server.post("/v1/completions", {**prompt, "speculative_decoding": False})
    assert drafted(server) == before
    answer = server.post("/v1/completions", prompt).json()
    assert answer["choices"] == plain["choices"]
    assert drafted(server) > before


@pytest.mark.parametrize(
    "prediction",
    ["text", {"content": "x", "type": "other"}, {"content": [{"type": "image"}]}, {"content": 5}],
)
def test_wrong_predictions_are_refused(server: Server, prediction: object) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "prediction": prediction})
    assert response.status_code == 400
    assert "prediction" in response.text
