"""A conversation as the model's text, and how its answer is constrained and read. Every chat-like API uses this."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.params import SamplingParams
from quire.serve.errors import invalid, unsupported
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.structured import constrained_by
from quire.serve.service import Service
from quire.serve.tools import Offer, Reading, reading_of, with_tools
from quire.text.formats.shapes import thinking

if TYPE_CHECKING:
    from quire.text.template.render import Rendered

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


class Prepared(NamedTuple):
    """A rendered conversation: `field` names the field that constrains the answer, `reading` says how to read it."""

    text: str
    params: SamplingParams
    field: str | None
    reading: Reading | None


def prepare(service: Service, body: ChatRequest, params: SamplingParams) -> Prepared:
    """Apply the tools, the constraint and the reasoning format of a chat. Raises HttpError or RequestError."""
    offer = service.offer(body)
    rendered = render(service, body, offer)
    reading = reading_of(service.formats, offer, rendered)
    params, field = with_tools(params, service.formats, offer, reading)
    return Prepared(rendered.text, params, field or constrained_by(body), reading)
