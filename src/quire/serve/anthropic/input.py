"""Turns the messages and tools of /v1/messages into a chat's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.serve.errors import invalid, unsupported
from quire.serve.leftovers import Dropped, text_in

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
}
_ROLES = {"ctx": "user", "msg": "user"}  # of newer Claude Code, which vLLM reads so too
# Blocks that are only sent by one side.
_SIDES = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
# Input that no text stands for.
_MEDIA = ("image", "document", "container_upload")
# Claude Code's first line of the system prompt, which is another one in each request.
_BILLING = "x-anthropic-billing-header:"


def messages_of(messages: Sequence[Mapping[str, Any]], system: Any, dropped: Dropped) -> list[dict[str, Any]]:
    """The messages of a chat. Raises HttpError naming what is malformed."""
    chat: list[dict[str, Any]] = []
    if system is not None and (
        content := _content(_unbilled(_blocks(system, "system", "system", dropped), dropped))
    ):
        chat.append({"role": "system", "content": content})
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, content, place = message.get("role"), message.get("content"), f"{where}.content"
        role = _ROLES.get(role, role) if isinstance(role, str) else None
        if role not in ("user", "assistant", "system"):
            raise invalid(f"{where}.role must be user, assistant or system", f"{where}.role", "invalid_value")
        blocks = _blocks(content, place, role, dropped)
        if role == "system":
            chat.append({"role": role, "content": _content(blocks)})
        elif role == "assistant":
            chat.append(_answer(blocks, names))
        else:
            chat += _turn(blocks, place, names, dropped)
    return chat


def _content(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """The texts of blocks as the content of a message: a chat template shows several as its model knows them."""
    parts = [{"type": "text", "text": part["text"]} for part in blocks if part["type"] == "text"]
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)


def _unbilled(blocks: list[dict[str, Any]], dropped: Dropped) -> list[dict[str, Any]]:
    """Leave out the line that would make every prompt another one."""
    if not blocks or not blocks[0]["text"].startswith(_BILLING):
        return blocks
    dropped.note("system", _BILLING.rstrip(":"))
    rest = blocks[0]["text"].partition("\n")[2].lstrip("\n")
    return [{**blocks[0], "text": rest}, *blocks[1:]] if rest else blocks[1:]


def _blocks(content: Any, where: str, role: str, dropped: Dropped) -> list[dict[str, Any]]:
    """The blocks of a message, checked; blocks of other kinds are texts if they hold any, else they are dropped."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where} must be a string or a list of blocks", where, "invalid_type")
    found: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or _SIDES.get(kind, role) != role:
            raise unsupported(place, f"blocks of type {str(kind)[:64]!r} are not here")
        for name in _NEEDED.get(kind, ()):
            if not isinstance(part.get(name), str):
                raise invalid(f"{place}.{name} must be a string", f"{place}.{name}", "invalid_type")
        if kind == "tool_use" and not isinstance(part.get("input"), dict):
            raise invalid(f"{place}.input must be an object", f"{place}.input", "invalid_type")
        if kind == "text" or kind in _SIDES:
            found.append(part)
        elif text := part["tool_name"] if kind == "tool_reference" else text_in(part):
            found.append({"type": "text", "text": text})
        elif kind in _MEDIA:
            raise unsupported(place, f"of type {kind!r} is not, only text is")
        else:
            dropped.note(place, kind)
    return found


def _answer(blocks: list[dict[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    """An assistant message from its text, thinking and tool uses."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(blocks)}
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
    return message


def _turn(
    blocks: list[dict[str, Any]], where: str, names: Mapping[str, str], dropped: Dropped
) -> list[dict[str, Any]]:
    """The messages of a user turn: one for each tool result, then one for the text."""
    messages: list[dict[str, Any]] = []
    for i, part in enumerate(blocks):
        if part["type"] == "tool_result":
            content = _content(_blocks(part.get("content") or "", f"{where}[{i}].content", "result", dropped))
            call_id = part["tool_use_id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": content}
            messages.append({**result, "name": names[call_id]} if call_id in names else result)
    content = _content(blocks)
    if content or not messages:
        messages.append({"role": "user", "content": content})
    return messages


class Tools(NamedTuple):
    """The tools of a body as functions in the shape of chats, and what of the body is left out."""

    functions: list[dict[str, Any]]
    dropped: Dropped


def tools_of(tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None) -> Tools:
    """Leave out tools that have no schema here, as Anthropic's own have none; 400 for one that is forced."""
    functions: list[dict[str, Any]] = []
    dropped = Dropped()
    forced = (choice or {}).get("name")
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type", "custom")
        if kind != "custom":
            if not isinstance(kind, str) or tool.get("name", kind) == forced:
                raise unsupported(f"{where}.type", f"{str(kind)[:64]!r} is not, only custom is")
            dropped.note(where, kind)
            continue
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
