"""The bodies and answers of /v1/responses as structs."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.openai.logprobs import TokenLogprob
from quire.serve.openai.protocol import Count, DrawFields, Messages, Name, Positive


class ResponsesRequest(DrawFields, kw_only=True):
    """POST /v1/responses."""

    input: str | Messages
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Count | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    truncation: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
    """`arguments` is JSON text; that of a call cut off by a limit is incomplete."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


class OutputCustomCall(msgspec.Struct, tag="custom_tool_call"):
    """A call of a custom tool, whose input is plain text."""

    id: str
    call_id: str
    name: str
    input: str
    status: str = "completed"


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
