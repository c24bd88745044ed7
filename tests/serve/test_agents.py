"""Agents' tools and history items of kinds that this server cannot run: read where they hold text, else left out."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.serve.anthropic import input as anthropic_input
from quire.serve.leftovers import MAX_NOTICES, Dropped
from quire.serve.openai import responses_input
from tests.serve import recorded
from tests.serve.running import Server, events_of

PATHS = {
    "opencode": recorded.OPENCODE,
    "goose": recorded.GOOSE,
    "zed": recorded.ZED,
    "cline": recorded.CLINE,
}


@pytest.fixture(scope="module")
def server(shipped: Server) -> Server:
    return shipped


@pytest.mark.parametrize("name", PATHS)
def test_agents_that_use_chats(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/chat/completions", json=PATHS[name])
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("[DONE]")
    assert "x-ignored-fields" not in answer.headers


def test_codex_with_mcp_servers(http: httpx.Client) -> None:
    body = {**recorded.CODEX_MCP, "stream": False, "max_output_tokens": 60, "parallel_tool_calls": False}
    body["temperature"] = 0  # else a call may be cut off now and then
    wanted = {"type": "function", "name": "read", "namespace": "mcp__files"}
    answer = http.post("/v1/responses", json={**body, "tool_choice": wanted})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read", "mcp__files")
    assert json.loads(call["arguments"])["path"] in ("a.txt", "b.txt")
    kinds = ("web_search", "local_shell", "image_generation", "tool_search", "mcp", "apply_patch", "shell")
    ignored = answer.headers["x-ignored-fields"]
    assert [one.rpartition(".")[2] for one in ignored.split(", ")] == list(kinds)
    for forced in ({"type": "function", "name": "wait"}, "required"):
        chosen = http.post("/v1/responses", json={**body, "tool_choice": forced}).json()["output"][0]
        assert chosen["type"] in ("function_call", "custom_tool_call")
        assert forced == "required" or (chosen["name"] == "wait" and "namespace" not in chosen)
    again = http.post("/v1/responses", json={**body, "input": [*body["input"], call], "tool_choice": "none"})
    assert again.status_code == 200, again.text


def test_codex_names_the_namespace_while_it_streams(http: httpx.Client) -> None:
    wanted = {"type": "function", "name": "read", "namespace": "mcp__files"}
    body = {**recorded.CODEX_MCP, "max_output_tokens": 60, "tool_choice": wanted}
    news = events_of(http.post("/v1/responses", json=body).text)
    called = [new["item"] for new in news if new.get("item", {}).get("type") == "function_call"]
    assert {(item["name"], item["namespace"]) for item in called} == {("read", "mcp__files")}
    (done,) = [new for new in news if new["type"] == "response.function_call_arguments.done"][:1]
    assert done["name"] == "read"


def test_a_resumed_session_of_codex(http: httpx.Client) -> None:
    dropped = Dropped()
    messages = responses_input.messages_of(recorded.CODEX_RESUMED, "Be brief.", dropped)
    shown = [
        (
            message["role"],
            [(call["function"]["name"], call["id"]) for call in message.get("tool_calls", ())]
            or message.get("content"),
        )
        for message in messages
    ]
    assert shown[:4] == [
        ("system", "Be brief."),
        ("user", [{"type": "input_text", "text": "Look around."}]),
        ("assistant", [("local_shell", "call_1")]),
        ("tool", "a.txt"),
    ]
    assert shown[4:10] == [
        ("assistant", [("find", "mcp_1")]),
        ("tool", "found it"),
        ("assistant", [("mcp__files__read", "call_2")]),
        ("tool", ""),
        ("assistant", [("apply_patch", "call_3")]),
        ("tool", "patched"),
    ]
    assert shown[10] == ("tool", "out\nerr")
    assert [role for role, _ in shown[11:]] == ["assistant", "user"]
    kinds = ("web_search_call", "image_generation_call", "compaction", "item_reference")
    assert [one.partition(".")[2] for one in dropped] == list(kinds)
    arguments = json.loads(messages[2]["tool_calls"][0]["function"]["arguments"])
    assert arguments["command"] == ["ls"]
    body = {**recorded.CODEX, "input": recorded.CODEX_RESUMED, "stream": False, "max_output_tokens": 9}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "input[4].web_search_call" in answer.headers["x-ignored-fields"]


@pytest.mark.parametrize(
    "input_",
    [
        [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        ],
        [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ],
        [{"role": "user", "content": "q"}, {"type": "reasoning", "summary": [], "encrypted_content": "E"}],
        [],
    ],
)
def test_what_agents_send_back(http: httpx.Client, input_: list[dict[str, Any]]) -> None:
    body = {"model": recorded.MODEL, "input": input_, "instructions": "Be brief.", "max_output_tokens": 4}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


def test_a_resumed_session_of_claude_code(http: httpx.Client) -> None:
    body, dropped = recorded.CLAUDE_CODE_RESUMED, Dropped()
    messages = anthropic_input.messages_of(body["messages"], body["system"], dropped)
    system, question, call, result, user = messages
    texts = [part["text"] for part in system["content"]]
    assert texts == ["You are an agent for the terminal.", "Be brief."]
    assert question == {"role": "user", "content": "Look it up."}
    assert [part["text"] for part in call["content"]] == ["A page", "Found."]
    assert call["reasoning_content"] == "A search."
    assert [part["text"] for part in result["content"]] == ["row 1: 10", "20 is row 2"]
    assert user["content"][0]["text"] == "Notes\nRemember."
    assert user["content"][1]["text"].endswith("It says so.")
    assert dropped == ["system.x-anthropic-billing-header", "messages[1].content[2].server_tool_use"]
    answer = http.post("/v1/messages", json={**body, "stream": False, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    kinds = [
        one.rpartition(".")[2].partition("_2")[0] for one in answer.headers["x-ignored-fields"].split(", ")
    ]
    assert kinds[:3] == ["web_search", "bash", "text_editor"]
    assert kinds[-1] == "server_tool_use"


def test_the_line_that_changes_does_not_change_the_prompt(http: httpx.Client) -> None:
    def cached(number: str, as_text: bool) -> int:
        line, rest = recorded.BILLING.format(number), "Stay the same. " * 40
        blocks = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        body = {
            "model": recorded.MODEL,
            "max_tokens": 1,
            "system": f"{line}\n{rest}" if as_text else blocks,
            "messages": [{"role": "user", "content": "hello"}],
        }
        usage = http.post("/v1/messages", json=body).json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 100
        return int(usage["input_tokens"])

    cached("0a1b2", False)
    assert cached("ffff0", False) < 32
    assert cached("12345", True) < 32


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            "/v1/messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
            "tool",
        ),
        (
            "/v1/messages",
            {
                "tools": [{"type": "bash_20250124", "name": "bash"}],
                "tool_choice": {"type": "tool", "name": "bash"},
            },
            "tools[0].type",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "base64", "data": "x"}}],
                    }
                ]
            },
            "content[0]",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}],
                    }
                ]
            },
            "content[0]",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "local_shell"}], "tool_choice": {"type": "local_shell"}},
            "tools[0]",
        ),
        ("/v1/responses", {"tools": [{"type": "local_shell"}], "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": []}, "messages"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], where: str
) -> None:
    messages = [{"role": "user", "content": "q"}]
    base = {"max_tokens": 4, "messages": messages} if path == "/v1/messages" else {"input": messages}
    answer = http.post(path, json={"model": recorded.MODEL, **base, **body})
    assert answer.status_code == 400, answer.text
    assert where in answer.text


def test_notices_are_bounded() -> None:
    dropped = Dropped()
    responses_input.messages_of([{"type": "compaction"}] * 1000, None, dropped)
    assert len(dropped) == MAX_NOTICES
