"""Custom tools in chats: free text as a whole and streamed at every split, and what is malformed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.client.outputs import Chunk, CompletionOutput
from quire.serve.errors import HttpError
from quire.serve.openai.chat import ChatAnswer
from quire.serve.openai.chat_protocol import ChatDelta, ChatRequest, CustomInput, FunctionDelta, ToolCall
from quire.serve.tools import Reading, offer_of
from quire.text.formats.registry import tool_format

ALARM = {"type": "custom", "custom": {"name": "alarm", "description": "Sets an alarm."}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def answer_of(reading: Reading) -> ChatAnswer:
    answer = ChatAnswer.__new__(ChatAnswer)
    answer.call = SimpleNamespace(reading=reading)  # type: ignore[assignment]
    answer._body = ChatRequest(messages=[])
    answer._readers, answer._inputs, answer._thoughts, answer._calling = {}, {}, {}, set()
    answer._role, answer._echo = "assistant", ""
    return answer


def joined(deltas: list[ChatDelta]) -> list[tuple[Any, ...]]:
    """(type, name, text) of each call."""
    found: dict[int, list[Any]] = {}
    for delta in deltas:
        for part in delta.tool_calls or ():
            one = found.setdefault(part.index, [part.type, "", ""])
            if isinstance(part.custom, CustomInput):
                one[1:] = [one[1] or part.custom.name, one[2] + part.custom.input]
            if isinstance(part.function, FunctionDelta):
                one[1:] = [one[1] or part.function.name, one[2] + part.function.arguments]
    return [tuple(one) for one in found.values()]


def whole(answer: ChatAnswer, text: str) -> list[tuple[Any, ...]]:
    message = answer._message(CompletionOutput(0, text))
    calls: list[ToolCall] = message.tool_calls or []
    return [
        (c.type, c.custom.name, c.custom.input)
        if c.custom
        else (c.type, c.function.name, c.function.arguments)
        for c in calls
    ]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (
            '<tool_call>\n{"name": "alarm", "arguments": {"input": "a \\"b\\"\\n\\u00e9"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "clock", "arguments": {"input": "x"}}\n</tool_call>',
            [("custom", "alarm", 'a "b"\né'), ("function", "clock", '{"input": "x"}')],
        ),
        (
            "<tool_call>{'name': 'alarm', 'arguments': {'input': 'it\\'s'}}</tool_call>",
            [("custom", "alarm", "it's")],
        ),
        ('<tool_call>{"name": "alarm", "arguments": {"input": "cut', [("custom", "alarm", '{"input": "cut')]),
        ('<tool_call>{"name": "alarm", "arguments": {}}</tool_call>', [("custom", "alarm", "{}")]),
    ],
)
def test_streams_say_what_a_whole_answer_says(text: str, calls: list[tuple[str, str, str]]) -> None:
    offer = offer_of([ALARM, CLOCK], None, None)
    reading = Reading(tool_format("hermes"), None, offer.functions, custom=offer.custom)
    assert whole(answer_of(reading), text) == calls
    for i in range(len(text) + 1):
        answer = answer_of(reading)
        parts = [Chunk(0, text[:i], [], None, None, None), Chunk(0, text[i:], [], None, "stop", None)]
        assert joined([answer._delta(part) for part in parts]) == calls


def test_they_are_functions_for_the_template() -> None:
    offer = offer_of([ALARM, CLOCK], {"type": "custom", "custom": {"name": "alarm"}}, None)
    shown, clock = offer.tools
    assert set(shown) == {"type", "function"}
    assert shown["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert clock == CLOCK
    assert offer.forced == ("alarm",)
    assert offer.custom == {"alarm"}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "json"}}}, "tools[0].custom.format"),
        (
            {
                "type": "custom",
                "custom": {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "gbnf"}}},
            },
            "tools[0].custom.format",
        ),
        ({"type": "web_search"}, "tools[0].type"),
    ],
)
def test_what_is_malformed_is_named(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        offer_of([tool], None, None)
    assert caught.value.info.param == param
