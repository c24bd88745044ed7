"""Stop strings belong to the content, in every API that tells content from reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.running import Server, events_of, start

THOUGHTS = "<think>\nIt says Question: hm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "Question: x"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start(reasoning_parser="qwen3", tool_call_parser="hermes")
    yield running
    assert running.stop() == 0


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of(http.post(path, json={**body, "stream": True}).text)


@pytest.mark.parametrize(
    ("said", "content", "calls", "reason", "stopped"),
    [
        (THOUGHTS + "Four.", "Four.", [], "stop", None),
        (THOUGHTS + "Four. Question: five?", "Four. ", [], "stop", "Question:"),
        (THOUGHTS + CALL, None, ['{"a": "Question: x"}'], "tool_calls", None),
        (
            "Look.\n" + CALL + "\nDone. Question: x",
            "Look.\n\nDone. ",
            ['{"a": "Question: x"}'],
            "tool_calls",
            "Question:",
        ),
    ],
)
def test_chats(
    http: httpx.Client, said: str, content: str | None, calls: list[str], reason: str, stopped: str | None
) -> None:
    body = {
        "max_tokens": 300,
        "stop": ["Question:"],
        "tools": TOOLS,
        "messages": [{"role": "user", "content": f"!say {said}!end"}],
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"]["arguments"] for call in message.get("tool_calls", [])] == calls
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stopped)
    assert (message["reasoning_content"] or "") == (
        "It says Question: hm" if said.startswith("<think>") else ""
    )
    deltas = [c["choices"][0] for c in streamed(http, "/v1/chat/completions", body) if c["choices"]]
    assert "".join(d["delta"].get("content", "") for d in deltas) == (content or "")
    arguments = [c["function"]["arguments"] for d in deltas for c in d["delta"].get("tool_calls", [])]
    assert "".join(arguments) == "".join(calls)
    assert deltas[-1]["finish_reason"] == reason


def test_log_probabilities_end_with_the_content(http: httpx.Client) -> None:
    body = {
        "max_tokens": 300,
        "stop": ["Question:"],
        "logprobs": True,
        "messages": [{"role": "user", "content": f"!say {THOUGHTS}Four. Question: five?!end"}],
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "Four. "


def test_messages(http: httpx.Client) -> None:
    body = {
        "model": "scripted",
        "max_tokens": 300,
        "stop_sequences": ["Question:"],
        "messages": [{"role": "user", "content": f"!say {THOUGHTS}Four. Question: five?!end"}],
    }
    answer = http.post("/v1/messages", json=body).json()
    assert [block.get("text") for block in answer["content"]] == [None, "Four. "]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Question:")
    news = streamed(http, "/v1/messages", body)
    texts = [new["delta"].get("text", "") for new in news if new["type"] == "content_block_delta"]
    assert "".join(texts) == "Four. "
    signed = [i for i, new in enumerate(news) if new.get("delta", {}).get("type") == "signature_delta"]
    assert [news[i + 1] for i in signed] == [{"type": "content_block_stop", "index": 0}]


def test_responses(http: httpx.Client) -> None:
    body = {
        "max_output_tokens": 300,
        "stop": ["Question:"],
        "input": f"!say {THOUGHTS}Four. Question: five?!end",
    }
    output = http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == "Four. "


@pytest.mark.parametrize(
    ("prompt", "stop", "text"),
    [
        (f"!say {THOUGHTS}Four. Question: five?!end", "Question:", THOUGHTS + "Four. "),
        ("!say Question: hm</think>4. Question: 5?!end<think>", "Question:", "Question: hm</think>4. "),
        ("!say Four. Question: five?!end", "Question:", "Four. "),
        ("!say 4\n\nQ!end", "\n\n", "4"),
    ],
)
def test_completions(http: httpx.Client, prompt: str, stop: str, text: str) -> None:
    body = {"max_tokens": 300, "stop": [stop], "prompt": prompt}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"
    chunks = streamed(http, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == text


def test_a_required_call_is_whole_whatever_stops(http: httpx.Client) -> None:
    body = {
        "max_tokens": 300,
        "stop": ["\n", "{", "a"],
        "tools": TOOLS,
        "messages": [{"role": "user", "content": f"!say {CALL}!end"}],
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "Question: x"}
