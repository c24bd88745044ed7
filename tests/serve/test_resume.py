"""A stream that goes on at another replica, cut after any event, is the stream that was not cut."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.serve.running import Server, start
from tests.serve.test_replica import KEY, ROUTE, headers
from tests.serve.test_tools import BLOCKS, FLAT, TOOLS

GROW = {"text", "content", "reasoning_content", "reasoning", "delta", "arguments", "thinking", "partial_json"}
GROW |= {"tokens", "token_logprobs", "top_logprobs", "text_offset", "token_ids", "logprobs"}
STORY = "Once upon a time, there was a"
TALK = [{"role": "user", "content": "Tell me of a dog."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
WARM: dict[str, Any] = {"max_tokens": 14, "temperature": 1}
ANSWER: dict[str, Any] = {"messages": TALK, **WARM}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"/v1/{path}", {"stream": True, **body})
    for name, path, body in (
        ("greedy", "completions", {"prompt": STORY, "max_tokens": 14, "temperature": 0}),
        ("drawn", "completions", {"prompt": [STORY, "A"], **WARM, "top_p": 0.9, "top_k": 50, "n": 3}),
        (
            "penalties",
            "completions",
            {"prompt": STORY, **WARM, "presence_penalty": 1, "frequency_penalty": 2, "repetition_penalty": 1.2},
        ),
        ("min_tokens", "completions", {"prompt": STORY, **WARM, "min_tokens": 12, "bad_words": ["the", "a"]}),
        ("repetition", "completions", {"prompt": "a a a", **WARM, "max_tokens": 30, "temperature": 0,
                       "repetition_detection": {"max_pattern_size": 4, "min_count": 3}}),
        ("stops", "completions", {"prompt": STORY, **WARM, "n": 3, "stop": ["e", " day"], "max_tokens": 30}),
        ("logprobs", "completions", {"prompt": STORY, **WARM, "logprobs": 2, "echo": True, "n": 2}),
        ("prompt-logprobs", "completions",
         {"prompt": 3 * STORY, **WARM, "prompt_logprobs": 1, "max_tokens": 4, "n": 3}),
        ("chat-prompt-logprobs", "chat/completions", {**ANSWER, "prompt_logprobs": 1, "n": 2, "max_tokens": 4}),
        ("regex", "completions", {"prompt": STORY, **WARM, "structured_outputs": {"regex": "[a-z ]{5,30}\\."}}),
        ("choice", "completions", {"prompt": STORY, **WARM, "structured_outputs": {"choice": ["yes", "no way"]}}),
        ("ids", "completions", {"prompt": STORY, **WARM, "return_token_ids": True, "return_progress": True}),
        ("usage", "completions", {"prompt": STORY, **WARM, "stream_options": {"include_usage": True}}),
        ("prediction", "completions", {"prompt": STORY, "max_tokens": 20, "temperature": 0,
                        "prediction": {"type": "content", "content": " little girl named Lily. She loved to play"}}),
        ("chat", "chat/completions", {**ANSWER, "stream_options": {"include_usage": True}, "n": 2}),
        ("chat-logprobs", "chat/completions", {**ANSWER, "logprobs": True, "top_logprobs": 2}),
        ("schema", "chat/completions", {**ANSWER, "max_tokens": 40, "response_format":
                     {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
        ("tools", "chat/completions", {**ANSWER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60, "n": 2}),
        ("thinking", "chat/completions", {**ANSWER, "thinking_token_budget": 5, "max_tokens": 20}),
        ("responses", "responses", {"input": "Tell me of a dog.", "max_output_tokens": 14}),
        ("responses-logprobs", "responses", {"input": "A dog", "max_output_tokens": 8, "top_logprobs": 1}),
        ("responses-tools", "responses",
         {"input": "What?", "max_output_tokens": 60, "tools": FLAT, "tool_choice": "required"}),
        ("adapter", "completions", {"prompt": STORY, **WARM, "model": "tale", "n": 2}),
        ("adapter-chat", "chat/completions", {**ANSWER, "model": "tale"}),
        ("messages", "messages", {**ANSWER, "model": "m", "stop_sequences": ["dog"]}),
        ("messages-tools", "messages", {**ANSWER, "model": "m", "max_tokens": 60, "tools": BLOCKS,
                            "tool_choice": {"type": "any"}}),
    )
}  # fmt: skip


def open_shipped(**options: Any) -> Server:
    return start(
        maker="tests.serve.slowed", model="", threads=1, router_api_key=[KEY], served_model_name=["m"],
        tool_call_parser="hermes", reasoning_parser="qwen3", max_model_len=512,
        enable_lora=True, lora_modules=["tale=quire-stories-lora-oldtale"], **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = open_shipped()
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


@pytest.fixture(scope="module")
def other() -> Iterator[Server]:
    running = open_shipped(max_num_seqs=2, max_num_batched_tokens=16)
    yield running
    assert running.stop() == 0
    assert "unexpected error" not in running.log, running.log


class Read:
    """A marked stream: the lines `: t` and the text of each of its events."""

    def __init__(self, text: str) -> None:
        self.told: list[list[str]] = []
        self.events: list[str] = []
        for block in text.split("\n\n")[:-1]:
            lines = block.split("\n")
            if rest := [line for line in lines if not line.startswith(": ")]:
                self.told.append([line[4:] for line in lines if line.startswith(": t ")])
                self.events.append("\n".join(rest))

    def sent(self, count: int) -> list[str]:
        return [line for told in self.told[:count] for line in told]


def resume(
    server: Server, path: str, body: dict[str, Any], read: Read, cut: int, **changed: Any
) -> httpx.Response:
    asked = {"path": path, "body": json.dumps(body), "route": ROUTE, "sent": read.sent(cut), "events": cut}
    return going_on(server, {**asked, **changed})


def going_on(server: Server, asked: dict[str, Any]) -> httpx.Response:
    return server.post("/internal/resume", asked, headers={"authorization": f"Bearer {KEY}"})


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """The values in `value` with their places and names."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in pairs:
            if name in GROW and isinstance(part, str | list):
                yield f"{path}/{name}", str(name), part
            elif name not in ("sequence_number", "usage"):
                yield from leaves(part, f"{path}/{name}")
    elif value is not None:
        yield path, "", value


def joined(events: list[str]) -> dict[Any, list[Any]]:
    """What a stream says to each of its choices, however it was cut into events."""
    found: dict[Any, list[Any]] = {}
    known: dict[Any, dict[str, Any]] = {}
    numbers = []
    for event in events:
        line = event.rpartition("data: ")[2]
        if line == "[DONE]":
            found.setdefault("end", []).append(line)
            continue
        data = json.loads(line)
        if "sequence_number" in data:
            numbers.append(data["sequence_number"])
        choice = (data.get("choices") or [{}])[0].get("index")
        said, before = found.setdefault(choice, []), known.setdefault(choice, {})
        new = {path: value for path, name, value in leaves(data) if not name and before.get(path) != value}
        before.update(new)
        if new:
            said.append((new, {}))
        for path, name, value in leaves(data):
            if name and value:
                said[-1][1][path] = said[-1][1][path] + value if path in said[-1][1] else value
        if usage := not data.get("choices") and data.get("usage"):
            said.append(usage)
    assert numbers == list(range(len(numbers)))
    if len(found) > 3:  # samples that begin at another replica find other prefixes in its cache
        for usage in found.get(None, [])[1:]:
            usage.pop("prompt_tokens_details")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_stream_goes_on_at_another_replica(kind: str, server: Server, other: Server) -> None:
    path, body = KINDS[kind]
    answer = server.post(path, body, headers=headers())
    assert answer.status_code == 200, answer.text
    whole = Read(answer.text)
    assert '"error":{' not in whole.events[-1]
    wanted = joined(whole.events)
    for cut in sorted(
        {1, 2, 3, *range(4, len(whole.events), 5), len(whole.events) - 2, len(whole.events) - 1}
    ):
        again = resume(other, path, body, whole, cut)
        assert again.status_code == 200, (cut, again.text)
        rest = Read(again.text)
        assert joined(whole.events[:cut] + rest.events) == wanted, cut
        twice = Read("")
        twice.told, twice.events = whole.told[:cut] + rest.told, whole.events[:cut] + rest.events
        later = (cut + len(twice.events)) // 2
        third = Read(resume(server, path, body, twice, later).text)
        assert joined(twice.events[:later] + third.events) == wanted, (cut, later)


def test_no_token_is_computed_twice(server: Server, other: Server) -> None:
    path, body = "/v1/completions", {"prompt": STORY, "max_tokens": 40, "temperature": 0, "stream": True}
    whole = Read(server.post(path, body, headers=headers()).text)
    with other.client as http:

        def count() -> int:
            lines = http.get("/metrics").text.splitlines()
            return int(float(next(x for x in lines if "generation_tokens_total{" in x).rpartition(" ")[2]))

        before = count()
        resume(other, path, body, whole, 30)
        told = [msgspec.msgpack.decode(base64.b64decode(line))[2] for line in whole.sent(30)]
        assert count() - before == 40 - sum(map(len, told))
        before = count()
        assert resume(other, path, body, whole, len(whole.events) - 1).text.endswith("data: [DONE]\n\n")
        assert count() == before


def line(*told: Any) -> str:
    return base64.b64encode(msgspec.msgpack.encode(told)).decode()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sent": [line(0, 0, [1 << 20])], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [-1])], "events": 1}, "sent"),
    ({"sent": [line(0, 3, [5])], "events": 1}, "sent"),
    ({"sent": [line(0, -1, [5])], "events": 1}, "sent"),
    ({"sent": [line(1, 0, [5])], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5] * 15)], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5] * 14)], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], "stop"), line(0, 0, [5])], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], "error")], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], "what")], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], None, None, None, [99, 0, 0, 0])], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], None, None, None, None, [[5, -1.0, 1, [], []]])], "events": 1}, "sent"),
    ({"sent": [line(0, 0, [5], None, None, None, None, None, [[5, -1.0, 1, [], []]] * 99)], "events": 1}, "sent"),
    ({"sent": ["garbage!"]}, "sent"),
    ({"sent": [""]}, "sent"),
    ({"sent": [base64.b64encode(b"\xc1\xff").decode()]}, "sent"),
    ({"sent": [line(0, 0, [5])], "events": 9}, "events"),
    ({"events": -1}, "events"),
    ({"events": 1}, "events"),
    ({"path": "/v1/embeddings"}, "path"),
    ({"path": "/internal/resume"}, "path"),
    ({"path": "http://elsewhere/v1/completions"}, "path"),
    ({"path": "/v1/programs", "body": '{"steps": [{"type": "text", "text": "a"}], "stream": true}'}, "path"),
    ({"body": json.dumps({"prompt": "x", "max_tokens": 2})}, "path"),
    ({"body": "{"}, ""),
    ({"body": "[]"}, ""),
    ({"route": {**ROUTE, "id": "a b"}}, "x-quire-route"),
    ({"route": {"id": "a"}}, ""),
    ({"sent": 5}, ""),
    ({"sent": [5]}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "param"), BAD)
def test_what_no_replica_sends_is_refused(changed: dict[str, Any], param: str, other: Server) -> None:
    body = {"prompt": STORY, "stream": True, **WARM, "n": 3}
    asked = {"path": "/v1/completions", "body": json.dumps(body), "route": ROUTE, **changed}
    answer = going_on(other, asked)
    assert answer.status_code == 400, answer.text
    assert not param or answer.json()["error"]["param"] == param, answer.text


def test_tokens_that_a_grammar_forbids_end_the_request_alone(other: Server) -> None:
    body = {"prompt": STORY, "stream": True, **WARM, "structured_outputs": {"regex": "[0-9]+"}}
    answer = resume(other, "/v1/completions", body, Read(""), 0, sent=[line(0, 0, [264])], events=1)
    assert answer.status_code == 400, answer.text
    assert other.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200


def test_only_a_router_may_resume(other: Server) -> None:
    assert other.post("/internal/resume", {}).status_code == 401
    assert other.post("/internal/resume", content=b"{", headers=headers()).status_code == 400
