"""A body of /v1/messages as a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy
from quire.serve.anthropic.protocol import CountRequest
from quire.serve.errors import invalid
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.structured import text_format
from quire.text.formats.shapes import thinking

if TYPE_CHECKING:
    from quire.serve.anthropic import input as reading
    from quire.serve.anthropic.input import Tools
else:
    reading = Lazy("quire.serve.anthropic.input")


def conversation(body: CountRequest, tools: Tools) -> ChatRequest:
    """The conversation as a chat. A final text of the assistant is continued, as in Anthropic's API."""
    messages = reading.messages_of(body.messages, body.system, tools.dropped)
    last = messages[-1]
    choice, parallel = reading.choice_of(body.tool_choice)
    config = body.output_config or {}
    form, effort = config.get("format") or body.output_format, config.get("effort")
    if not isinstance(form, dict | None) or not isinstance(effort, str | None):
        raise invalid(
            "output_config: format must be an object and effort a text", "output_config", "invalid_type"
        )
    variables, budget = _thinking(body)
    return ChatRequest(
        messages=messages,
        tools=tools.functions,
        tool_choice=choice if tools.functions or choice not in ("auto", "none") else None,
        parallel_tool_calls=parallel,
        response_format=None if form is None else text_format(form),
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})},
        reasoning_effort=effort,
        thinking_token_budget=budget,
        continue_final_message=last["role"] == "assistant"
        and bool(last["content"])
        and "tool_calls" not in last,
    )


def _thinking(body: CountRequest) -> tuple[dict[str, Any], int | None]:
    """Template variables that switch reasoning on or off, and its bound in tokens."""
    if body.thinking is None:
        return {}, None
    kind, budget = body.thinking.get("type"), body.thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        message = f"thinking.type must be enabled, adaptive or disabled, not {str(kind)[:64]!r}"
        raise invalid(message, "thinking", "invalid_value")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise invalid(
            "thinking.budget_tokens must be an integer above 0", "thinking.budget_tokens", "invalid_type"
        )
    return thinking(kind != "disabled"), budget if kind == "enabled" else None
