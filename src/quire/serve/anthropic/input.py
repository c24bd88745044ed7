"""Turns the messages and tools of /v1/messages into a chat's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.serve.errors import invalid, unsupported

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
}
_ROLES = {"ctx": "user", "msg": "user"}  # of newer Claude Code, which vLLM reads so too
_SEARCH = "web_search_"


def text_of(content: Any, where: str) -> str:
    """A string, or the joined text of text blocks."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in _blocks(content, where, {"text"}))


def _result_text(content: Any, where: str) -> str:
    """The text of a tool's result; a reference to a tool is its name."""
    if isinstance(content, str):
        return content
    blocks = _blocks(content, where, {"text", "tool_reference"})
    return "".join(part["text"] if part["type"] == "text" else part["tool_name"] for part in blocks)


def messages_of(messages: Sequence[Mapping[str, Any]], system: Any) -> list[dict[str, Any]]:
    """The messages of a chat. Raises HttpError naming what is malformed."""
    chat: list[dict[str, Any]] = []
    if system is not None:
        chat.append({"role": "system", "content": text_of(system, "system")})
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, content, place = message.get("role"), message.get("content"), f"{where}.content"
        role = _ROLES.get(role, role) if isinstance(role, str) else None
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role must be user, assistant or system", f"{where}.role", "invalid_value")
        if isinstance(content, str) or role == "system":
            chat.append({"role": role, "content": text_of(content, place)})
        elif role == "assistant":
            kinds = {"text", "thinking", "redacted_thinking", "tool_use"}
            chat.append(_answer(_blocks(content, place, kinds), names))
        else:
            chat += _turn(_blocks(content, place, {"text", "tool_result"}), place, names)
    return chat


def _blocks(content: Any, where: str, kinds: set[str]) -> list[dict[str, Any]]:
    """The blocks of a message, checked: their types are in `kinds` and their required fields are present."""
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of blocks", where, "invalid_type")
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in kinds:
            known = ", ".join(sorted(kinds))
            raise unsupported(place, f"blocks of type {str(kind)[:64]!r} are not here, only {known}")
        for name in _NEEDED.get(kind, ()):
            if not isinstance(part.get(name), str):
                raise invalid(f"{place}.{name} must be a string", f"{place}.{name}", "invalid_type")
        if kind == "tool_use" and not isinstance(part.get("input"), dict):
            raise invalid(f"{place}.input must be an object", f"{place}.input", "invalid_type")
    return content


def _answer(blocks: list[dict[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """An assistant message from its text, thinking and tool uses."""
    texts = [part["text"] for part in blocks if part["type"] == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    thoughts = [part["thinking"] for part in blocks if part["type"] == "thinking"]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [part for part in blocks if part["type"] == "tool_use"]
    if calls:
        names.update({part["id"]: part["name"] for part in calls})
        message["tool_calls"] = [
            {
                "id": part["id"],
                "type": "function",
                "function": {
                    "name": part["name"],
                    "arguments": json.dumps(part["input"], ensure_ascii=False),
                },
            }
            for part in calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message


def _turn(blocks: list[dict[str, Any]], where: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages of a user turn: one for each tool result, then one for the text."""
    messages: list[dict[str, Any]] = []
    for i, part in enumerate(blocks):
        if part["type"] == "tool_result":
            text = _result_text(part.get("content") or "", f"{where}[{i}].content")
            call_id = part["tool_use_id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": text}
            messages.append({**result, "name": names[call_id]} if call_id in names else result)
    texts = [part["text"] for part in blocks if part["type"] == "text"]
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


class Tools(NamedTuple):
    """The tools of a body as functions in the shape of chats, and the paths of those that are left out."""

    functions: list[dict[str, Any]]
    dropped: list[str]


def tools_of(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None) -> Tools:
    """400 for tools that only Anthropic's servers run, except web search, which is dropped unless it is forced."""
    functions: list[dict[str, Any]] = []
    dropped: list[str] = []
    forced = (choice or {}).get("name")
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type", "custom")
        if isinstance(kind, str) and kind.startswith(_SEARCH) and tool.get("name") != forced:
            dropped.append(f"{where}.{kind}")
            continue
        if kind != "custom":
            raise unsupported(f"{where}.type", f"{str(kind)[:64]!r} is not, only custom is")
        if not isinstance(tool.get("input_schema"), dict):
            name = f"{where}.input_schema"
            raise invalid(f"{name} must be a JSON schema (an object)", name, "invalid_type")
        function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
        function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
        functions.append({"type": "function", "function": function})
    return Tools(functions, dropped)


def choice_of(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """(tool_choice, parallel_tool_calls) of a chat."""
    if choice is None:
        return None, None
    kind = choice.get("type")
    parallel = not choice.get("disable_parallel_tool_use", False)
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in ("auto", "any", "none"):
        message = f"tool_choice.type must be auto, any, none or tool, not {str(kind)[:64]!r}"
        raise invalid(message, "tool_choice", "invalid_value")
    return ("required" if kind == "any" else str(kind)), parallel
