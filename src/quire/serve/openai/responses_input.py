"""Turns the input and tools of /v1/responses into a chat's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.serve.custom_tools import CUSTOM_INPUT, function_of
from quire.serve.errors import invalid, unsupported
from quire.serve.leftovers import Dropped, text_in
from quire.serve.openai.responses_protocol import KINDS

_TOOL_FIELDS = ("name", "description", "parameters", "strict")
# Items that bring tools which the client found later.
_BRINGERS = ("additional_tools", "tool_search_output")
# Members of a call of another kind that say what it does.
_ACTIONS = ("arguments", "input", "action", "operation")


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None, dropped: Dropped
) -> list[dict[str, Any]]:
    """The input as chat messages; the reasoning, text and calls of one answer become one message.

    Calls of tools that other servers have, and their results, are calls and results like others. Items that hold
    nothing to show are `dropped`. Raises HttpError naming what is malformed.
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
        for kind, part in _known(item, where, dropped):
            if kind.endswith("_output"):
                messages.append(_result(part, where, names))
                turn = None
                continue
            if kind == "message" and part.get("role", "user") != "assistant":
                messages.append({"role": part.get("role"), "content": part.get("content")})
                turn = None
                continue
            thoughts = _reasoning(part, where) if kind == "reasoning" else None
            if thoughts == "":
                continue  # it is encrypted
            if turn is None or (
                not kind.endswith("_call") and ("tool_calls" in turn or turn["content"] is not None)
            ):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            if kind == "message":
                turn["content"] = part.get("content")
            elif kind == "reasoning":
                turn["reasoning_content"] = thoughts
            else:
                turn.setdefault("tool_calls", []).append(_call(part, where, names))
    return messages


def _known(item: Mapping[str, Any], where: str, dropped: Dropped) -> list[tuple[str, Mapping[str, Any]]]:
    """An item as items of the known kinds, with their kinds: itself, a call and its result, or a text."""
    kind = item.get("type", "message")
    if kind in KINDS:
        return [(kind, item)]
    if not isinstance(kind, str):
        raise invalid(f"{where}.type must be a string", f"{where}.type", "invalid_type")
    call_id = item.get("call_id") or item.get("id")
    if kind in _BRINGERS:
        return []
    if isinstance(call_id, str) and kind.endswith("_output"):
        return [(kind, {**item, "call_id": call_id, "output": text_in(item.get("output"))})]
    found: list[tuple[str, Mapping[str, Any]]] = []
    action = next((item[name] for name in _ACTIONS if isinstance(item.get(name), (str, dict))), None)
    text = text_in(item)
    if (
        isinstance(call_id, str)
        and kind.endswith("_call")
        and action is not None
        and (text or "call_id" in item)
    ):
        name = item["name"] if isinstance(item.get("name"), str) else kind.removesuffix("_call")
        arguments = action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)
        found.append(("function_call", {"call_id": call_id, "name": name, "arguments": arguments}))
        if text:
            found.append(("function_call_output", {"call_id": call_id, "output": text}))
    elif text:
        found.append(("message", {"role": item.get("role", "assistant"), "content": text}))
    else:
        dropped.note(where, kind)
    return found


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
    if isinstance(item.get("namespace"), str):
        name = _qualified(item["namespace"], name)
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

    The functions called `custom` stand for custom tools. `spaces` has the namespace, and the name in it, of functions
    that are in one. `dropped` are the paths of what is left out.
    """

    functions: list[dict[str, Any]]
    custom: set[str]
    spaces: dict[str, tuple[str, str]]
    dropped: Dropped


def tools_of(
    tools: Sequence[Mapping[str, Any]], choice: Any, given: str | Sequence[Mapping[str, Any]] = ()
) -> Tools:
    """Read the tools of a body, and those that items of its input bring.

    Tools that only OpenAI's servers run are left out; 400 for one that is forced.
    """
    found = Tools([], set(), {}, Dropped())
    _read_tools(tools, "tools", choice, found)
    for i, item in enumerate(() if isinstance(given, str) else given):
        if item.get("type") in _BRINGERS and isinstance(item.get("tools"), list):
            _read_tools(item["tools"], f"input[{i}].tools", choice, found)
    return found


def _read_tools(tools: Sequence[Any], path: str, choice: Any, found: Tools, space: str = "") -> None:
    for i, tool in enumerate(tools):
        where = f"{path}[{i}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list) and not space:
            _read_tools(tool["tools"], f"{where}.tools", choice, found, str(tool.get("name")))
            continue
        if kind == "function":
            function = {key: tool[key] for key in _TOOL_FIELDS if tool.get(key) is not None}
        elif kind == "custom":
            function = function_of(tool, where)
        elif not isinstance(kind, str) or (isinstance(choice, Mapping) and choice.get("type") == kind):
            raise unsupported(f"{where}.type", f"{str(kind)[:64]!r} is not, only function and custom are")
        else:
            found.dropped.note(where, kind)
            continue
        if space:
            name = str(function.get("name"))
            function["name"] = _qualified(space, name)
            if any(function["name"] == one["function"].get("name") for one in found.functions):
                continue  # a search found it again
            found.spaces[function["name"]] = space, name
        if kind == "custom":
            found.custom.add(str(function["name"]))
        found.functions.append({"type": "function", "function": function})


def _qualified(space: str, name: str) -> str:
    """The name under which the model knows a function of a namespace."""
    return f"{space}{name}" if space.endswith("__") else f"{space}__{name}"


def choice_of(choice: Any, tools: Tools) -> Any:
    """The choice of a tool in the shape of chats: custom tools are functions there, and tools left out are not."""
    if not isinstance(choice, Mapping):
        return choice if tools.functions or choice not in ("auto", "none") else None
    if choice.get("type") in ("function", "custom"):
        name, space = choice.get("name"), choice.get("namespace")
        return {"type": "function", "name": _qualified(space, str(name)) if isinstance(space, str) else name}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        known = [
            tool
            for tool in choice["tools"]
            if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)
        ]
        return {**choice, "tools": known}
    return choice
