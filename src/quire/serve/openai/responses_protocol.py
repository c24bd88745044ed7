"""The bodies and answers of /v1/responses as structs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from quire import fields
from quire.fields import says
from quire.serve.fields import common
from quire.serve.fields.common import Count, Positive
from quire.serve.fields.foreign import ANSWERS_REFUSED, LABELS, OTHERS_IGNORED
from quire.serve.fields.shapes import (
    CONTENT,
    FUNCTION,
    INNER,
    RESPONSE_FORMAT,
    STRUCTURED,
    Fields,
    Refused,
    Shape,
    names,
)
from quire.serve.openai.logprobs import TokenLogprob
from quire.serve.openai.protocol import DrawFields

Options = dict[str, Any]


class ResponsesRequest(DrawFields, kw_only=True):
    """POST /v1/responses."""

    model: common.Model | None = None
    input: Annotated[
        str | list[common.Message], says("a text, or items: messages, reasoning, calls and their results")
    ]
    instructions: Annotated[str, says("a system message before the input")] | None = None
    max_output_tokens: Annotated[Positive, says("most tokens of output")] | None = None
    stream: common.Stream = False
    stop: fields.Stop | None = None
    stream_options: Annotated[Options, says("include_obfuscation, without effect")] | None = None
    text: (
        Annotated[Options, says("format (a constraint) and verbosity (a variable of the chat template)")]
        | None
    ) = None
    reasoning: Annotated[Options, says("effort, a variable of the chat template")] | None = None
    tools: (
        Annotated[
            list[Options],
            says(
                "functions, custom tools and namespaces of them; others are dropped, and the header says so"
            ),
        ]
        | None
    ) = None
    tool_choice: Annotated[str | Options, says("auto, none, required, a tool, or allowed_tools")] | None = (
        None
    )
    parallel_tool_calls: Annotated[bool, says("false allows one call")] | None = None
    include: Annotated[list[str], says("message.output_text.logprobs; the others have no effect")] | None = (
        None
    )
    top_logprobs: Annotated[Count, says("log-probabilities of this many tokens")] | None = None
    truncation: (
        Annotated[str, says("auto cuts the front of an input that is too long; disabled refuses it")] | None
    ) = None
    metadata: Annotated[Options, says("returned with the answer")] | None = None
    user: Annotated[str, says("returned with the answer")] | None = None
    chat_template_kwargs: common.TemplateWords | None = None


KINDS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
)
_ITEMS = Shape(
    names(
        "type role content phase summary encrypted_content call_id name namespace arguments input output tool_calls "
        "reasoning reasoning_content"
    ),
    ignored=dict.fromkeys(("id", "status", "created_by"), "the answer does not depend on it"),
    inner={"content": CONTENT, "output": CONTENT, "summary": CONTENT},
    template=True,
    kinds=KINDS,
)
_FORMAT = Shape(
    RESPONSE_FORMAT.taken,
    ignored=dict.fromkeys(("name", "description", "strict"), "the answer always matches the schema"),
)
RESPONSES = Fields(
    path="/v1/responses",
    body=ResponsesRequest,
    ignored={
        **{name: why for name, why in LABELS.items() if name not in ("metadata", "user")},
        **OTHERS_IGNORED,
        "max_tool_calls": "it limits tools that servers run, and there are none",
        "enable_response_messages": "messages are in output",
    },
    refused={
        **ANSWERS_REFUSED,
        **dict.fromkeys(
            (
                "background",
                "previous_response_id",
                "conversation",
                "previous_response",
                "previous_input_messages",
            ),
            Refused("responses are not stored: send the whole conversation as input"),
        ),
        "prompt": Refused("there are no stored prompts"),
        "context_management": Refused("the conversation is taken as it is sent"),
    },
    inner={
        "structured_outputs": STRUCTURED,
        "repetition_detection": INNER["repetition_detection"],
        "stream_options": Shape({}, ignored={"include_obfuscation": "nothing is padded"}),
        "text": Shape(names("format verbosity"), inner={"format": _FORMAT}),
        "reasoning": Shape(
            names("effort"),
            ignored=dict.fromkeys(
                ("summary", "generate_summary", "context", "mode"),
                "reasoning is returned whole, without a summary",
            ),
        ),
        "input": _ITEMS,
        "tools": Shape(
            {**FUNCTION.taken, **names("type format")}, ignored=FUNCTION.ignored, kinds=("function", "custom")
        ),
    },
)
RESPONSE_TOKENS = replace(RESPONSES, path="/v1/responses/input_tokens")


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    content: list[OutputText]
    status: str = "completed"
    role: str = "assistant"


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    text: str


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: str = "completed"
    summary: list[Any] = []
    encrypted_content: str | None = None


class OutputCall(msgspec.Struct, tag="function_call"):
    """`arguments` is JSON text, incomplete if a limit cut the call off."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"
    namespace: str | UnsetType = UNSET


class OutputCustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A call of a custom tool, whose input is plain text."""

    id: str
    call_id: str
    name: str
    input: str
    status: str = "completed"
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokens(msgspec.Struct):
    """Answer of the endpoints that count tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct):
    """Answer of /v1/responses, also carried by the first and last events of its stream."""

    id: str
    created_at: int
    model: str
    output: list[OutputItem]
    status: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, Any]
    user: str | None
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    parallel_tool_calls: bool = True
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[Any] = []
    previous_response_id: str | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    top_logprobs: int = 0
    service_tier: str = "default"
    reasoning: dict[str, Any] | None = None
    system_fingerprint: str | None = None
