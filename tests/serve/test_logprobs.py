"""Log-probabilities and offsets belong to the text that is returned: in every API, streamed and whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Server, events_of, start

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
INCLUDE = ["message.output_text.logprobs"]
# Outputs and their contents: one token a byte, special ones at the end.
ANSWERS = [
    ("XY", "XY"),
    ("é🙂 ok", "é🙂 ok"),
    ("<think>\nab\n</think>\n\nXY", "XY"),
    ("<think>\nk think\n</think>\n\nthink k", "think k"),
    (f"<think>\nab\n</think>\n\nI look. \n{CALL}\n{CALL}\nDone é.", "I look. \n\n\nDone é."),
    ("a <think", "a <think"),
    ("<think>\nno end", ""),
]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    running = start(tool_call_parser="hermes", reasoning_parser="qwen3")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    running = start(maker="quire.client.start", model="", max_model_len=512, threads=1)
    yield running
    assert running.stop() == 0


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return events_of(server.post(path, {**body, "stream": True}).text)


def text_of(entries: list[dict[str, Any]]) -> str:
    return bytes(itertools.chain.from_iterable(entry["bytes"] for entry in entries)).decode()


@pytest.mark.parametrize(("output", "content"), ANSWERS)
def test_chat(scripted: Server, output: str, content: str) -> None:
    said = [{"role": "user", "content": f"!say {output}!end"}]
    body = {"messages": said, "tools": TOOLS, "logprobs": True, "top_logprobs": 1, "max_tokens": 300}
    choice = scripted.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == content
    whole = choice["logprobs"]["content"]
    assert text_of(whole).replace("\n", "") == content.replace("\n", "")
    streamed = []
    for chunk in events(scripted, "/v1/chat/completions", body):
        for part in chunk["choices"]:
            entries = (part["logprobs"] or {"content": []})["content"]
            streamed += entries
            if not part["delta"].get("content"):
                assert not entries  # they come with their text
    assert streamed == whole


@pytest.mark.parametrize(("output", "content"), ANSWERS)
def test_responses(scripted: Server, output: str, content: str) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    said = f"!say {output}!end"
    body = {"input": said, "tools": tools, "include": INCLUDE, "max_output_tokens": 300}
    items = scripted.post("/v1/responses", body).json()["output"]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    for part in parts:
        assert text_of(part["logprobs"]).replace("\n", "") == part["text"].replace("\n", "")
    assert "".join(part["text"] for part in parts).replace("\n", "") == content.replace("\n", "")
    streamed = events(scripted, "/v1/responses", body)
    deltas = [e for e in streamed if e["type"] == "response.output_text.delta"]
    assert [entry for e in deltas for entry in e["logprobs"]] == [e for p in parts for e in p["logprobs"]]
    done = [e for e in streamed if e["type"] == "response.output_text.done"]
    assert [e["logprobs"] for e in done] == [part["logprobs"] for part in parts if part["text"]]


def test_a_chat_begins_with_all_scores_of_its_prompt(scripted: Server) -> None:
    """They come in parts, before the first token."""
    body = {"messages": [{"role": "user", "content": "!say XY!end"}], "prompt_logprobs": 0}
    whole = scripted.post("/v1/chat/completions", body).json()["prompt_logprobs"]
    chunks = events(scripted, "/v1/chat/completions", body)
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [whole]
    assert None not in whole[1:]


@pytest.mark.parametrize("stop", ["abc", "🙂", "é"])
def test_a_stop_string_has_no_entries_in_a_chat(scripted: Server, stop: str) -> None:
    said = [{"role": "user", "content": f"!say XYab{stop}Z!end"}]
    body = {"messages": said, "logprobs": True, "stop": [stop], "tools": TOOLS}
    whole = scripted.post("/v1/chat/completions", body).json()["choices"][0]
    assert whole["message"]["content"] == text_of(whole["logprobs"]["content"]) == "XYab"
    chunks = [c for chunk in events(scripted, "/v1/chat/completions", body) for c in chunk["choices"]]
    streamed = [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]


def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The choice of a completion; streamed, its text and its lists are the same."""
    whole: dict[str, Any] = server.post("/v1/completions", body).json()["choices"][0]
    text, lists = "", dict[str, list[Any]]()
    for chunk in events(server, "/v1/completions", body):
        for choice in chunk["choices"]:
            text += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values)
    assert (text, lists) == (whole["text"], whole["logprobs"])
    return whole


def check_offsets(choice: dict[str, Any]) -> None:
    """Each token stands in the text at its offset, or is the part of a character, or is not shown there."""
    text, lists = choice["text"], choice["logprobs"]
    offsets = lists["text_offset"]
    assert offsets == sorted(offsets)
    shown = ""
    for name, offset, after in zip(lists["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
        piece = text[offset:after]
        if not name.startswith("bytes:"):
            assert piece == name or (piece == "" and (name.startswith("<|") or offset == len(text)))
        shown += piece
    assert shown == text


@pytest.mark.parametrize(
    "prompt",
    [[0, 495, 505, 264, 411], "Once upon a", "<|bos|>Once", "é🙂日本", "a<|bos|>b", ["x", "Once upon"], ""],
)
def test_offsets_with_echo(real: Server, prompt: Any) -> None:
    many = isinstance(prompt, list) and isinstance(prompt[0], str)
    for each in prompt if many else [prompt]:
        body = {"prompt": each, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
        choice = both(real, body)
        check_offsets(choice)
        assert not isinstance(each, str) or choice["text"].startswith(each)
        names, tops = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
        assert all(top is None or next(iter(top)) == name for name, top in zip(names, tops, strict=True))
        scores = real.post("/v1/completions", {**body, "max_tokens": 0}).json()["choices"][0]
        assert scores["logprobs"]["tokens"] == names[:-3]


@pytest.mark.parametrize(
    "extra",
    [
        {"skip_special_tokens": False},
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": 2, "truncation_side": "right"},
        {"suffix": None},
    ],
)
def test_offsets_with_other_fields(real: Server, extra: dict[str, Any]) -> None:
    for prompt in ([0, 495, 505, 264], "Once upon a time"):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0, **extra}
        check_offsets(both(real, body))


def test_parts_of_a_character_have_names_of_their_own(real: Server) -> None:
    body = {"prompt": "x", "max_tokens": 20, "guided_choice": ["é🙂日本"], "logprobs": 3}
    choice = both(real, body)
    assert choice["text"] == "é🙂日本"
    check_offsets(choice)
    names = [name for name in choice["logprobs"]["tokens"] if name.startswith("bytes:")]
    data = b"".join(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) for name in names)
    assert data.decode() in choice["text"]
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])


def test_what_ends_a_completion_keeps_its_entry(scripted: Server) -> None:
    body = {"prompt": "!say ab!end", "logprobs": 0, "max_tokens": 9, "return_token_ids": True}
    choice = both(scripted, body)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_top_logprobs_of_nothing_ask_for_nothing(scripted: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": False}
    assert scripted.post("/v1/chat/completions", {**body, "top_logprobs": 0}).status_code == 200
    assert scripted.post("/v1/chat/completions", {**body, "top_logprobs": 1}).status_code == 400
