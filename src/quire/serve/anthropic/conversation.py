"""A body of /v1/messages as a chat."""

from __future__ import annotations

from typing import Any

from quire.serve.anthropic.input import choice_of, messages_of, tools_of
from quire.serve.anthropic.protocol import CountRequest
from quire.serve.errors import invalid, unsupported
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.service import Service


def check_thinking(service: Service, body: CountRequest) -> None:
    if body.thinking is None:
        return
    kind = body.thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        message = f"thinking.type must be enabled, adaptive or disabled, not {str(kind)[:64]!r}"
        raise invalid(message, "thinking", "invalid_value")
    if kind != "disabled" and service.formats.reasoning is None:
        raise unsupported("thinking", "this model has no reasoning format (--reasoning-parser)")


def conversation(body: CountRequest) -> ChatRequest:
    """The conversation as a chat. A final assistant message is continued, as in Anthropic's API."""
    messages = messages_of(body.messages, body.system)
    continued = messages[-1]["role"] == "assistant"
    choice, parallel = choice_of(body.tool_choice)
    return ChatRequest(
        messages=messages,
        tools=tools_of(body.tools or ()),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=_thinking(body),
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _thinking(body: CountRequest) -> dict[str, Any] | None:
    """Template variables that switch reasoning on or off; templates use either name."""
    if body.thinking is None:
        return None
    on = body.thinking["type"] != "disabled"
    return {"enable_thinking": on, "thinking": on}
