"""Codex CLI, Claude Code, Open WebUI, Cline and Continue: their requests, streamed, through loops of tool calls.

The shipped model writes stories and would not call a tool by itself, so the calls of the loops are required.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.serve import recorded
from tests.serve.running import Server, events_of

TURNS = 3


@pytest.fixture(scope="module")
def server(shipped: Server) -> Server:
    return shipped


def events(
    http: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """The events of a streamed answer, and the fields that were ignored."""
    with http.stream("POST", path, json=body, headers=headers) as answer:
        text = answer.read().decode()
        assert answer.status_code == 200, text
        assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(text), answer.headers.get("x-ignored-fields", "")


def test_codex(http: httpx.Client) -> None:
    body = {**recorded.CODEX, "input": list(recorded.CODEX["input"])}
    for turn in range(TURNS):
        wanted = {"tool_choice": {"type": "function", "name": "shell"} if turn < TURNS - 1 else "none"}
        news, ignored = events(http, "/v1/responses", {**body, **wanted}, recorded.CODEX_HEADERS)
        assert ignored == "tools[2].web_search"
        assert news[0]["type"] == "response.created"
        assert news[-1]["type"] in ("response.completed", "response.incomplete")
        output = news[-1]["response"]["output"]
        body["input"] += output
        for call in (item for item in output if item["type"] == "function_call"):
            assert set(json.loads(call["arguments"])) == {"command"}
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
            body["input"].append(result)
        assert (turn < TURNS - 1) == (body["input"][-1].get("type") == "function_call_output")


def test_codex_patches_files_with_a_custom_tool(http: httpx.Client) -> None:
    body = {
        **recorded.CODEX,
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 60,
    }
    news, _ = events(http, "/v1/responses", body, recorded.CODEX_HEADERS)
    kinds = [new["type"] for new in news]
    assert "response.custom_tool_call_input.done" in kinds
    assert "response.function_call_arguments.delta" not in kinds
    (call,) = news[-1]["response"]["output"]
    assert call["type"] == "custom_tool_call"
    assert call["id"].startswith("ctc_")
    given = [
        *body["input"],
        call,
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"},
    ]
    again, _ = events(http, "/v1/responses", {**body, "tool_choice": "auto", "input": given}, {})
    assert again[-1]["response"]["output"]


def test_custom_tools_with_a_grammar_are_held_to_it(http: httpx.Client) -> None:
    patch = (
        recorded.PATCH.replace("/(.+)/", '("a" | "b") ".txt"')
        .replace("/(.*)/", '/[x"]{0,3}/')
        .replace("hunk+", "hunk")
    )
    form = {"type": "grammar", "syntax": "lark", "definition": patch.replace("LF)+", "LF)~2")}
    tool = {"type": "custom", "name": "apply_patch", "format": form}
    body = {"model": recorded.MODEL, "input": "Add a file.", "tools": [tool], "tool_choice": "required"}
    answer = http.post("/v1/responses", json={**body, "parallel_tool_calls": False, "max_output_tokens": 200})
    assert "x-ignored-fields" not in answer.headers
    (call,) = answer.json()["output"]
    lines = call["input"].splitlines()
    assert lines[0] == "*** Begin Patch"
    assert lines[1] in ("*** Add File: a.txt", "*** Add File: b.txt")
    assert lines[-1] == "*** End Patch"
    assert [line[:1] for line in lines[2:-1]] == ["+", "+"]
    wrong = {**tool, "format": {**form, "definition": 'start: %json {"type": "string"}'}}
    refused = http.post("/v1/responses", json={**body, "tools": [wrong]})
    assert refused.status_code == 400
    assert "cannot have %json" in refused.json()["error"]["message"]


def test_custom_tools_with_a_regex_are_held_to_it(http: httpx.Client) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}:[0-9]{2}"}
    tool = {"type": "custom", "name": "alarm", "format": form}
    body = {"model": recorded.MODEL, "input": "Wake me.", "tools": [tool], "tool_choice": "required"}
    body["parallel_tool_calls"] = False
    (call,) = http.post("/v1/responses", json=body).json()["output"]
    hours, _, minutes = call["input"].partition(":")
    assert len(hours) == len(minutes) == 2
    assert (hours + minutes).isdigit()


def test_claude_code(http: httpx.Client) -> None:
    counted = {k: v for k, v in recorded.CLAUDE_CODE.items() if k not in ("max_tokens", "stream")}
    path = "/v1/messages/count_tokens?beta=true"
    size = http.post(path, json=counted, headers=recorded.CLAUDE_CODE_HEADERS).json()["input_tokens"]
    body = {**recorded.CLAUDE_CODE, "messages": list(recorded.CLAUDE_CODE["messages"])}
    for turn in range(TURNS):
        calls = turn < TURNS - 1
        wanted = {
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True} if calls else {"type": "none"}
        }
        news, ignored = events(
            http, "/v1/messages?beta=true", {**body, **wanted}, recorded.CLAUDE_CODE_HEADERS
        )
        assert ignored == "tools[2].web_search_20250305"
        assert [new["type"] for new in news][-2:] == ["message_delta", "message_stop"]
        if turn == 0:
            usage = news[0]["message"]["usage"]
            assert size == usage["input_tokens"] + usage["cache_read_input_tokens"]
        blocks = blocks_of(news)
        body["messages"].append({"role": "assistant", "content": blocks})
        uses = [block for block in blocks if block["type"] == "tool_use"]
        assert len(uses) == calls
        results = [
            {
                "type": "tool_result",
                "tool_use_id": use["id"],
                "content": [{"type": "text", "text": "ok"}],
                "cache_control": {"type": "ephemeral"},
            }
            for use in uses
        ]
        body["messages"].append({"role": "user", "content": results or "Thanks."})


def blocks_of(news: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content of a streamed message."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for new in news:
        if new["type"] == "content_block_start":
            blocks.append(dict(new["content_block"]))
        elif new["type"] == "content_block_delta":
            delta, block = new["delta"], blocks[new["index"]]
            if delta["type"] == "input_json_delta":
                inputs[new["index"]] = inputs.get(new["index"], "") + delta["partial_json"]
            else:
                block["text"] += delta["text"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


@pytest.mark.parametrize("name", ["OPEN_WEBUI", "CLINE", "CONTINUE"])
def test_chats(http: httpx.Client, name: str) -> None:
    body = {**getattr(recorded, name)}
    body["messages"] = list(body["messages"])
    for turn in range(TURNS):
        calls = turn < TURNS - 1
        wanted = {"tool_choice": "required" if calls else "none", "parallel_tool_calls": False, "seed": turn}
        news, ignored = events(http, "/v1/chat/completions", {**body, **wanted}, {})
        assert not ignored
        assert news[-1]["usage"]["completion_tokens"] > 0
        message, reason = message_of(news)
        body["messages"].append(message)
        assert reason == "tool_calls" if calls else reason in ("stop", "length")
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"])
            body["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})


def message_of(news: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message of a streamed chat, and its finish reason. No chunk has both text and a reason."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reason = ""
    for choice in (choice for new in news for choice in new["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            known = message.setdefault("tool_calls", [])
            if part["index"] == len(known):
                known.append(
                    {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                )
            known[part["index"]]["function"]["name"] += part["function"].get("name", "")
            known[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
        if choice["finish_reason"]:
            reason = choice["finish_reason"]
            assert not delta
    return message, reason


def test_what_interfaces_ask_beside_chats(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == recorded.MODEL
    title = http.post("/v1/chat/completions", json=recorded.OPEN_WEBUI_TITLE)
    assert title.status_code == 200, title.text
    assert title.json()["choices"][0]["message"]["content"]
    news, ignored = events(http, "/v1/completions", recorded.CONTINUE_EDITOR, {})
    assert "".join(choice["text"] for new in news for choice in new["choices"])
    assert not ignored


@pytest.mark.parametrize("syntax", ["regex", "lark"])
def test_custom_tools_of_chats(http: httpx.Client, syntax: str) -> None:
    definition = {"regex": "[0-9]{2}:[0-9]{2}", "lark": 'start: /[0-9]{2}/ ":" /[0-9]{2}/'}[syntax]
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "alarm", "format": form}}
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Wake me."}]
    body = {"model": recorded.MODEL, "messages": talk, "tools": [tool], "temperature": 0, "max_tokens": 200}
    body |= {"tool_choice": {"type": "custom", "custom": {"name": "alarm"}}, "parallel_tool_calls": False}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    message = answer.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert set(call) == {"id", "type", "custom"}
    assert call["type"] == "custom"
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", call["custom"]["input"])
    news, _ = events(http, "/v1/chat/completions", {**body, "stream": True}, {})
    parts = [p for one in news for c in one["choices"] for p in c["delta"].get("tool_calls", [])]
    assert parts[0]["type"] == "custom"
    assert parts[0]["custom"]["name"] == "alarm"
    assert "".join(part["custom"]["input"] for part in parts) == call["custom"]["input"]
    talk += [message, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    again = http.post("/v1/chat/completions", json={**body, "return_prompt_text": True})
    assert again.status_code == 200, again.text
    assert call["custom"]["input"] in again.json()["prompt_text"]
