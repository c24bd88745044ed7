"""Chat messages in OpenAI's shape, checked and copied into what chat templates read. Knows no Jinja."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError
from quire.text.partial import partial_object
from quire.text.tokenizer import check_text

MAX_MESSAGES = 100_000
MAX_DEPTH = 64
MAX_ROLE = 64
MAX_BROKEN = 16384  # characters of malformed arguments that are looked through
# Names of the reasoning in messages, in order of preference.
_REASONING = ("reasoning", "reasoning_content", "thinking")
_SYSTEM = ("system", "developer")
_ANY_OBJECT = {"type": "object", "properties": {}}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain(value: Any, param: str, depth: int = 0) -> Any:
    """Copy a value into JSON types only, so that a template can reach nothing else."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{param} is nested deeper than {MAX_DEPTH}", param)
    if value is None or type(value) in (float, bool):
        return value
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise RequestError(f"{param} holds a number of more than 64 bits", param)
        return value
    if isinstance(value, str):
        check_text(value, param)
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{param} must have strings as keys", param)
        return {plain(k, param): plain(v, param, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, param, depth + 1) for item in value]
    raise RequestError(f"{param} holds a {type(value).__name__}; only JSON values can be given", param)


def objects(values: Sequence[Mapping[str, Any]] | None, param: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, Mapping) for v in values):
        raise RequestError(f"{param} must be a list of objects", param)
    return [plain(value, f"{param}[{i}]") for i, value in enumerate(values)]


def parse_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check and copy tools, without members that are null."""
    found = objects(tools, "tools") or None
    for tool in found or ():
        if isinstance(function := tool.get("function"), dict):
            tool["function"] = _given(function)
    return found


def completed(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give functions the description and the parameters that some templates read unasked."""
    return [
        {**tool, "function": {"description": "", "parameters": _ANY_OBJECT} | tool["function"]}
        if isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]


def _given(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out members that are null, which templates would print as None."""
    return {name: member for name, member in value.items() if member is not None}


def parse_messages(
    messages: Sequence[Mapping[str, Any]], keep_parts: bool = False, wrap_text: bool = False
) -> list[dict[str, Any]]:
    """Check messages in OpenAI's shape and copy them into what templates read. Raises RequestError.

    Text parts are joined by newlines, or kept as parts with `keep_parts`; with `wrap_text` a string becomes one
    part. An answer or a result without content has an empty one. Arguments of tool calls become objects. Reasoning is
    present under every name that templates use. Members that are null are left out.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES}", "messages")
    chat: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be an object with role and content", where)
        copy = _given(plain(message, where))
        role = copy.get("role")
        if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
            raise RequestError(
                f"{where}.role must be a string of 1 to {MAX_ROLE} characters", f"{where}.role"
            )
        _put_content(copy, where, keep_parts, wrap_text)
        _put_tool_calls(copy, where)
        reasoning = next((copy[name] for name in _REASONING if name in copy), None)
        if reasoning is not None:
            copy |= {"thinking": copy.get("thinking") or reasoning, "reasoning_content": reasoning}
        chat.append(copy)
    return chat


def _put_content(message: dict[str, Any], where: str, keep_parts: bool, wrap_text: bool) -> None:
    where = f"{where}.content"
    content = message.get("content")
    if content is None:
        if message["role"] not in ("assistant", "tool", "function"):
            raise RequestError(f"{where} is required for role {message['role']}", where)
        message["content"] = [] if wrap_text else ""
        return
    if isinstance(content, str):
        if wrap_text:
            message["content"] = [{"type": "text", "text": content}]
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    keep_parts = keep_parts and (wrap_text or bool(content))
    texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    message["content"] = [{"type": "text", "text": t} for t in texts] if keep_parts else "\n".join(texts)


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(f"{where} must be a text part; {kind!r} is not supported by this model", where)
    text = part.get(_TEXT_PARTS[str(kind)])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{_TEXT_PARTS[str(kind)]} must be a string", where)
    return text


def _put_tool_calls(message: dict[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)
        return
    where = f"{where}.tool_calls"
    if not isinstance(calls, list) or message["role"] != "assistant":
        raise RequestError(f"{where} must be a list, in an assistant message", where)
    for i, call in enumerate(calls):
        custom = call.get("custom") if isinstance(call, dict) else None
        if isinstance(custom, dict) and isinstance(custom.get("input"), str):
            given = {"input": custom["input"]}
            call = {"id": call.get("id"), "function": {"name": custom.get("name"), "arguments": given}}
            call["type"] = "function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{i}].function must be an object with a name", f"{where}[{i}].function"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            param = f"{where}[{i}].function.arguments"
            arguments = plain(_arguments(arguments, param), param)
        calls[i] = _given(call) | {"function": _given(function) | {"arguments": arguments or {}}}


def _arguments(text: str, param: str) -> Any:
    """Parse the arguments of a call; an object that breaks off keeps the members before that place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("{") or len(text) > MAX_BROKEN:
            raise RequestError(f"{param} is not valid JSON: {error}", param) from error
        return partial_object(text)


def with_text_arguments(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn the arguments of tool calls into JSON text, which some templates expect."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in chat
    ]


def in_turns(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order messages as strict templates want them: one system message, at the beginning, then turns.

    What system and developer say is joined, and so is what a user says in a row; answers that are empty are left out.
    """
    turns: list[dict[str, Any]] = []
    for message in chat:
        place = len(turns)
        if message["role"] in _SYSTEM:
            message = {**message, "role": "system"}
            place = int(bool(turns) and turns[0]["role"] == "system")
        elif message["role"] == "assistant" and not message["content"] and "tool_calls" not in message:
            continue
        if place and turns[place - 1]["role"] == message["role"] in ("system", "user"):
            earlier = turns[place - 1]
            turns[place - 1] = {**earlier, "content": _joined(earlier["content"], message["content"])}
        else:
            turns.insert(place, message)
    return turns


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    lists = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second)]
    return lists[0] + lists[1]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
