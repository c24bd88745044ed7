"""Histories as clients send them back: every template takes them, and none prints None."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.text.template.process import TemplateProcess
from quire.text.template.render import ChatTemplate
from tests.text.conftest import EVERY_TEMPLATE

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": {**FUNCTION, "description": "F.", "strict": None}}]
BARE = [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def asked(*calls: int, **fields: Any) -> dict[str, Any]:
    """An answer that consists of calls, as the official clients print it."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "audio": None, **fields}
    function = {"name": "f", "arguments": '{"a": "b"}'}
    if calls:
        message["tool_calls"] = [
            {"id": f"call0000{i}", "type": "function", "index": None, "function": function} for i in calls
        ]
    return message


def result(call: int, content: Any = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{call}", "name": None, "content": content}


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "calls alone": [USER, asked(0), result(0)],
    "content absent": [USER, without(asked(0), "content"), result(0)],
    "content empty": [USER, asked(0, content=""), result(0)],
    "no parts": [USER, asked(0, content=[]), result(0)],
    "a loop": [USER, asked(0), result(0), asked(1), result(1), {"role": "assistant", "content": "4"}, USER],
    "several results": [USER, asked(0, 1), result(0), result(1)],
    "an empty result": [USER, asked(0), result(0, "")],
    "no result": [USER, asked(0), result(0, None)],
    "calls last": [USER, asked(0)],
    "a result alone": [result(0), USER],
    "reasoning and calls": [USER, asked(0, reasoning_content="hm"), result(0)],
    "reasoning null": [USER, asked(0, reasoning_content=None), result(0)],
    "reasoning alone": [USER, asked(reasoning_content="hm"), USER],
    "reasoning last": [USER, asked(reasoning_content="hm")],
    "an empty answer": [USER, asked(content=""), USER],
    "text with nulls": [USER, asked(content="yes", tool_calls=None), USER],
    "system between": [USER, {"role": "assistant", "content": "x"}, SYSTEM, USER],
    "system after a result": [USER, asked(0), result(0), SYSTEM],
    "two systems": [SYSTEM, SYSTEM, USER],
    "system and developer": [SYSTEM, {"role": "developer", "content": "d"}, USER],
    "two questions": [USER, USER],
}
# What a template's author refuses: its model has not seen it.
REFUSALS = (
    "System role not supported",
    "Conversation roles must alternate user/assistant",  # Gemma 2 knows no tools
    "only supports single tool-calls",
    "Tool message outside of assistant",
    "no previous assistant message with a tool call",
)
STRING = "{% for m in messages %}<{{ m.role }}>{{ '\\n' + m.content }}{% if m.tool_calls %}+{% endif %}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    "{% elif m.role == 'developer' %}{{ raise_exception('role') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize("source", [STRING, PARTS, STRICT])
@pytest.mark.parametrize("name", HISTORIES)
def test_missing_content_is_empty(process: TemplateProcess, source: str, name: str) -> None:
    text = ChatTemplate(source, process=process).render(HISTORIES[name])
    assert "None" not in text


@EVERY_TEMPLATE
def test_every_template_takes_every_history(process: TemplateProcess, path: Any) -> None:
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, process=process)
    shown = template.render([USER], TOOLS)
    for name, history in HISTORIES.items():
        for tools in (TOOLS, BARE):
            error = ""
            try:
                text = template.render(history, tools)
            except RequestError as refused:
                text, error = "", str(refused)
            assert not error or any(known in error for known in REFUSALS), (name, error)
            assert "None" not in text.replace(shown, ""), name
            assert text.count("null") <= (3 if "cohere" in path.stem.lower() else 0), name


def test_strict_templates_get_one_system_message_at_the_beginning(process: TemplateProcess) -> None:
    template = ChatTemplate(STRICT, process=process)
    developer = {"role": "developer", "content": "d"}
    assert template.render([SYSTEM, USER]) == "[Be brief.][hi]"
    assert template.render([USER, USER]) == "[hi][hi]"  # it takes these
    assert template.render([SYSTEM, developer, USER]) == "[Be brief.\n\nd][hi]"
    assert template.render([USER, asked(content="a"), SYSTEM, USER]) == "[Be brief.][hi][a][hi]"


def test_an_answer_without_text_is_not_continued(process: TemplateProcess) -> None:
    template = ChatTemplate(STRING, process=process)
    with pytest.raises(RequestError, match="last message"):
        template.render([USER, asked(0)], None, False, True)
    with pytest.raises(RequestError, match="required for role user"):
        template.render([{"role": "user", "content": None}])
