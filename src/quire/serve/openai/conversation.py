"""A conversation as the model's text, and how its answer is constrained and read. Every chat-like API uses this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.lazy import Lazy
from quire.serve.call import Prompt
from quire.serve.errors import invalid, unsupported
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.sampling import sampling_params, truncated
from quire.serve.openai.structured import constrained_by
from quire.serve.service import Service
from quire.serve.tools import Offer, reading_of, with_tools
from quire.text.formats.shapes import thinking

if TYPE_CHECKING:
    from quire.serve import marks
    from quire.text.template.render import Rendered
else:
    marks = Lazy("quire.serve.marks")

# Arguments of the template that the body sets by fields of its own.
_OWN_FIELDS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def render(service: Service, body: ChatRequest, offer: Offer) -> Rendered:
    """The conversation as the model's text, with the tools that may be called."""
    variables = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None:
            variables.setdefault(name, value)
    if body.enable_thinking is not None:
        variables = thinking(body.enable_thinking) | variables
    elif body.reasoning_effort is not None:
        variables = thinking(body.reasoning_effort != "none") | variables
    if body.chat_template is not None and not service.config.trust_request_chat_template:
        raise unsupported("chat_template", "start the server with --trust-request-chat-template to allow it")
    if taken := _OWN_FIELDS & set(variables):
        name = f"chat_template_kwargs.{min(taken)}"
        raise invalid(f"{name}: set the field of the body instead", name, "invalid_value")
    shows_tools = offer.choice != "none" or not service.config.exclude_tools_when_tool_choice_none
    return service.front.render(
        body.messages,
        tools=list(offer.tools) if shows_tools else None,
        documents=body.documents,
        chat_template=body.chat_template,
        add_generation_prompt=begins_turn(body),
        continue_final_message=body.continue_final_message,
        **variables,
    )


def begins_turn(body: ChatRequest) -> bool:
    """Whether the prompt begins the answer's turn: unless the body says otherwise, or goes on with a message."""
    if body.add_generation_prompt is None:
        return not body.continue_final_message
    return body.add_generation_prompt


def count_tokens(service: Service, body: ChatRequest) -> int:
    """Count the tokens of a conversation as a prompt."""
    text = render(service, body, service.offer(body)).text
    return len(service.front.encode(text, add_special_tokens=bool(body.add_special_tokens)))


def make_prompt(
    service: Service,
    body: ChatRequest,
    call_id: str,
    max_tokens: int | None,
    logprobs: int | None,
    format_field: str = "response_format",
    marked: Iterable[Mapping[str, Any]] | None = None,
) -> Prompt:
    """Make the request of a chat. Raises HttpError or RequestError.

    `format_field` is what the caller's API calls `response_format`. `marked`: the messages with their `cache_control`,
    where those of the chat have none.
    """
    front, special = service.front, bool(body.add_special_tokens)
    params = sampling_params(front, body, max_tokens, logprobs)
    params.return_progress = body.return_progress and bool(body.stream)
    offer = service.offer(body)
    rendered = render(service, body, offer)
    reading = reading_of(service.formats, offer, rendered)
    params, field = with_tools(params, service.formats, offer, reading)
    tokens = front.encode(rendered.text, add_special_tokens=special)
    kept = truncated(tokens, body, max_tokens, front.info.max_model_len)
    places: tuple[int, ...] = ()
    if front.info.recurrent and len(kept) == len(tokens):
        places = marks.marks_of(front, body.messages if marked is None else marked, rendered.text, special)
    request = front.request(
        service.next_request_id(call_id),
        kept,
        params,
        marks=places,
        priority=body.priority,
        salt=body.cache_salt or "",
        place=reading.place if reading else None,
    )
    field = field or constrained_by(body)
    return Prompt(request, rendered.text, format_field if field == "response_format" else field, reading)
