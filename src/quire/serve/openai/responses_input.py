"""Turns the input and tools of /v1/responses into a chat's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.serve.errors import invalid, unsupported
from quire.text.output.arguments import LARK

CUSTOM_INPUT = "input"  # the parameter that holds the text of a custom tool
_SEARCH = "web_search"
_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_KINDS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)


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
        if kind.endswith("_output"):
            messages.append(_result(item, where, names))
            turn = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
            turn = None
            continue
        if turn is None or (
            not kind.endswith("_call") and ("tool_calls" in turn or turn["content"] is not None)
        ):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        if kind == "message":
            turn["content"] = item.get("content")
        elif kind == "reasoning":
            turn["reasoning_content"] = _reasoning(item, where)
        else:
            turn.setdefault("tool_calls", []).append(_call(item, where, names))
    return messages


def _kind_of(item: Mapping[str, Any], where: str) -> str:
    kind = item.get("type", "message")
    if kind not in _KINDS:
        raise unsupported(where, f"items of type {str(kind)[:64]!r} are not, only {', '.join(_KINDS)}")
    return str(kind)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise invalid(f"{where}.content must be a list of reasoning_text parts", where, "invalid_type")
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
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({CUSTOM_INPUT: _text(item, "input", where)}, ensure_ascii=False)
    else:
        arguments = _text(item, "arguments", where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(item: Mapping[str, Any], where: str, names: Mapping[str, str]) -> dict[str, Any]:
    call_id, output = _text(item, "call_id", where), item.get("output")
    if not isinstance(output, (str, list)):
        raise invalid(
            f"{where}.output must be a string or a list of parts", f"{where}.output", "invalid_type"
        )
    message = {"role": "tool", "tool_call_id": call_id, "content": output}
    return {**message, "name": names[call_id]} if call_id in names else message


class Tools(NamedTuple):
    """The tools of a body as functions in the shape of chats.

    The functions called `custom` stand for custom tools. `dropped` are the paths of what is left out.
    """

    functions: list[dict[str, Any]]
    custom: frozenset[str]
    dropped: list[str]


def tools_of(tools: Sequence[Mapping[str, Any]], choice: Any) -> Tools:
    """400 for tools that only OpenAI's servers run, except web search, which is dropped unless it is forced."""
    functions: list[dict[str, Any]] = []
    custom: set[str] = set()
    dropped: list[str] = []
    for i, tool in enumerate(tools):
        where, kind = f"tools[{i}]", tool.get("type")
        if kind == "function":
            function = {key: tool[key] for key in _TOOL_FIELDS if tool.get(key) is not None}
        elif kind == "custom":
            function = _custom(tool, where)
            custom.add(str(function["name"]))
        elif isinstance(kind, str) and kind.startswith(_SEARCH) and not _forces(choice, kind):
            dropped.append(f"{where}.{kind}")
            continue
        else:
            why = f"{str(kind)[:64]!r} is not, only function and custom are"
            raise unsupported(f"{where}.type", why)
        functions.append({"type": "function", "function": function})
    return Tools(functions, frozenset(custom), dropped)


def _forces(choice: Any, kind: str) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == kind


def _custom(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A custom tool as a function with one text, which a regex or a Lark grammar constrains."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise invalid(f"{where}.format.type must be text or grammar", f"{where}.format", "invalid_value")
    text: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": tool.get("name")}
    description = [str(tool["description"])] if tool.get("description") else []
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            message = f"{where}.format must have a syntax (lark or regex) and a definition"
            raise invalid(message, f"{where}.format", "invalid_value")
        if syntax == "regex":
            text["pattern"], function["strict"] = f"^(?:{definition})$", True
        else:
            text[LARK], function["strict"] = definition, True
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    return {**function, "description": "\n".join(description), "parameters": parameters}


def custom_input(arguments: str) -> str:
    """The text that a call passes to a custom tool; of a call that was cut off, its arguments as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def choice_of(choice: Any) -> Any:
    """The choice of a tool in the shape of chats: custom tools are functions there."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "custom":
        return {**choice, "type": "function"}
    return choice
