"""The input and the tools of /v1/responses as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.serve.errors import invalid, unsupported

_FIELDS = {
    "message": {"role", "content", "phase"},
    "reasoning": {"summary", "content", "encrypted_content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The input as chat messages; the reasoning, text and calls of one answer become one message.

    Raises HttpError naming an item of another kind.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    names: dict[str, str] = {}
    turn: dict[str, Any] | None = None  # the assistant message that the next items belong to
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = _kind_of(item, where)
        if kind == "function_call_output":
            messages.append(_result(item, where, names))
            turn = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
            turn = None
            continue
        if turn is None or (
            kind != "function_call" and ("tool_calls" in turn or turn["content"] is not None)
        ):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if kind == "message":
            turn["content"] = _content(item.get("content"))
        elif kind == "reasoning":
            turn["reasoning_content"] = _reasoning(item, where)
        else:
            turn.setdefault("tool_calls", []).append(_call(item, where, names))
    return messages


def _kind_of(item: Mapping[str, Any], where: str) -> str:
    kind = item.get("type", "message")
    if kind not in _FIELDS:
        kinds = ", ".join(_FIELDS)
        raise unsupported(where, f"items of type {str(kind)[:64]!r} are not, only {kinds}")
    if unknown := set(item) - {"type", "id", "status"} - _FIELDS[kind]:
        name = f"{where}.{min(unknown)}"
        raise invalid(f"Unknown field: {name}", name, "unknown_parameter")
    return str(kind)


def _content(content: Any) -> Any:
    """Content parts without the fields that this API adds to its own answers."""
    if not isinstance(content, list):
        return content
    return [
        {k: v for k, v in part.items() if k not in ("annotations", "logprobs")}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise invalid(f"{where}.content must be a list of reasoning_text parts", where, "invalid_type")
    return "\n".join(str(text) for text in texts)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name} must be a string", f"{where}.{name}", "invalid_type")
    return value


def _call(item: Mapping[str, Any], where: str, names: dict[str, str]) -> dict[str, Any]:
    call_id, name = _text(item, "call_id", where), _text(item, "name", where)
    names[call_id] = name
    function = {"name": name, "arguments": _text(item, "arguments", where)}
    return {"id": call_id, "type": "function", "function": function}


def _result(item: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    call_id, output = _text(item, "call_id", where), item.get("output")
    if not isinstance(output, (str, list)):
        raise invalid(
            f"{where}.output must be a string or a list of parts", f"{where}.output", "invalid_type"
        )
    message = {"role": "tool", "tool_call_id": call_id, "content": _content(output)}
    return {**message, "name": names[call_id]} if call_id in names else message


def tools_of(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions in the shape of chats, with their fields one level down. 400 for other kinds of tools."""
    found = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise unsupported(f"{where}.type", f"{str(tool.get('type'))[:64]!r} is not, only function is")
        if unknown := set(tool) - {"type", *_TOOL_FIELDS}:
            name = f"{where}.{min(unknown)}"
            raise invalid(f"Unknown field: {name}", name, "unknown_parameter")
        function = {key: tool[key] for key in _TOOL_FIELDS if tool.get(key) is not None}
        found.append({"type": "function", "function": function})
    return found
