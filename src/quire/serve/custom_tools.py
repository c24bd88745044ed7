"""Custom tools of OpenAI's APIs, which take free text: functions with one text as far as the model knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.serve.errors import invalid
from quire.text.output.arguments import LARK

CUSTOM_INPUT = "input"  # the parameter that holds the text


def function_of(tool: Any, where: str) -> dict[str, Any]:
    """Make a function with one text, which a regex or a Lark grammar constrains. Chats nest `grammar`."""
    if not isinstance(tool, Mapping):
        raise invalid(f"{where} must be an object with a name", where, "invalid_type")
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise invalid(f"{where}.format.type must be text or grammar", f"{where}.format", "invalid_value")
    text: dict[str, Any] = {"type": "string"}
    function: dict[str, Any] = {"name": tool.get("name")}
    description = [str(tool["description"])] if tool.get("description") else []
    if form["type"] == "grammar":
        inner = form.get("grammar", form)
        inner = inner if isinstance(inner, Mapping) else {}
        syntax, definition = inner.get("syntax"), inner.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            message = f"{where}.format must have a syntax (lark or regex) and a definition"
            raise invalid(message, f"{where}.format", "invalid_value")
        if syntax == "regex":
            text["pattern"], function["strict"] = f"^(?:{definition})$", True
        else:
            text[LARK], function["strict"] = definition, True
    parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    return {**function, "description": "\n".join(description), "parameters": parameters}


def input_of(arguments: str) -> str:
    """The text that a call passes to a custom tool; of a call that was cut off, its arguments as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
