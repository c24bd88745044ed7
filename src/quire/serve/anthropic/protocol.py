"""The bodies and answers of /v1/messages as structs, and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from quire.fields import says
from quire.serve.errors import HttpError, encode
from quire.serve.fields import common
from quire.serve.fields.common import Messages, Positive
from quire.serve.fields.foreign import ANSWERS_REFUSED, OTHERS_IGNORED
from quire.serve.fields.shapes import REPETITION, STRUCTURED, Fields, Refused, Shape, names
from quire.serve.openai.protocol import DrawFields

Options = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class CountRequest(DrawFields, kw_only=True):
    """POST /v1/messages/count_tokens: the body of /v1/messages, so sampling's fields are taken, without effect."""

    model: common.Model
    messages: Annotated[
        Messages, says("text, thinking, tool_use and tool_result blocks; roles user, assistant and system")
    ]
    system: Annotated[str | list[Options], says("a text or text blocks")] | None = None
    tools: common.Tools | None = None
    tool_choice: Annotated[Options, says("auto, any, none, or a tool; disable_parallel_tool_use")] | None = (
        None
    )
    thinking: (
        Annotated[
            Options, says("switches reasoning on or off, if the model has any; budget_tokens bounds it")
        ]
        | None
    ) = None
    output_config: (
        Annotated[Options, says("format (a JSON Schema) and effort (a variable of the chat template)")] | None
    ) = None
    output_format: Annotated[Options, says("the same format, under its older name")] | None = None
    chat_template_kwargs: common.TemplateWords | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages, with the fields of sampling that the other APIs take."""

    max_tokens: Annotated[Positive, says("most tokens of output")]
    stream: common.Stream = False
    stop_sequences: Annotated[list[str], says("texts that end the output")] | None = None
    temperature: Annotated[float, says("0 takes the likeliest token", ge=0, le=1)] | None = None


_CACHED = {"cache_control": "prefixes are always cached"}
_BLOCK = Shape(
    names(
        "type text thinking signature data id name input tool_use_id content is_error tool_name cache_control"
    ),
    ignored={"citations": "they are no text", "caller": "the client runs every tool"},
    kinds=("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"),
)
_BLOCKS = replace(_BLOCK, inner={"content": _BLOCK})
_FORMAT = Shape(
    names("type schema"), ignored=dict.fromkeys(names("name description strict"), "the answer always matches")
)

_IGNORED = {
    **OTHERS_IGNORED,
    **_CACHED,
    "betas": "features are known by their fields",
    "context_management": "the conversation is taken as it is sent",
    "thread": "every call sends its whole conversation",
    "user_profile_id": "has no effect on the answer",
    "inference_geo": "answers are computed here",
    "speed": "there is one speed",
    "diagnostics": "has no effect on the answer",
    "fallbacks": "`model` alone chooses",
}
_REFUSED = {
    **ANSWERS_REFUSED,
    "container": Refused("this server has none"),
    "mcp_servers": Refused("this server calls none"),
}
_INNER = {
    "messages": Shape(names("role content"), ignored=_CACHED, inner={"content": _BLOCKS}),
    "system": _BLOCK,
    "tools": Shape(
        names("type name description input_schema strict"),
        kinds=("custom",),
        ignored={
            **_CACHED,
            "eager_input_streaming": "input is always streamed",
            "defer_loading": "tools are always shown",
            "input_examples": "templates do not read it",
            "allowed_callers": "the client runs every tool",
        },
    ),
    "tool_choice": Shape(names("type name disable_parallel_tool_use")),
    "thinking": Shape(names("type budget_tokens"), ignored={"display": "reasoning is returned whole"}),
    "output_config": Shape(
        names("effort format"),
        ignored={"task_budget": "max_tokens bounds the answer"},
        inner={"format": _FORMAT},
    ),
    "output_format": _FORMAT,
    "structured_outputs": STRUCTURED,
    "repetition_detection": REPETITION,
}

COUNT_TOKENS = Fields(
    path="/v1/messages/count_tokens",
    body=CountRequest,
    ignored={
        **_IGNORED,
        **dict.fromkeys(("max_tokens", "metadata", "stream", "temperature"), "nothing is generated"),
    },
    refused=_REFUSED,
    inner=_INNER,
)

MESSAGES = Fields(
    path="/v1/messages",
    body=MessagesRequest,
    ignored={**_IGNORED, "metadata": "has no effect on the answer", "service_tier": "there is one tier"},
    refused={
        **_REFUSED,
        "response_format": Refused("use output_config.format", ({"type": "text"},)),
        "stop": Refused("use stop_sequences"),
    },
    inner=_INNER,
)


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """`signature` is empty: only Anthropic's own server can sign its thinking."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """`input` of a call cut off by a limit holds its complete members."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """`input_tokens` excludes the prompt tokens that were read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, tag="message"):
    """Answer of /v1/messages."""

    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    system_fingerprint: str | None = None


def error_body(error: HttpError, request_id: str | None = None) -> bytes:
    """An error in Anthropic's shape, and in its words where clients look for them."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.info.message
    if error.too_long is not None:
        message = f"prompt is too long: {error.too_long.num_tokens} tokens > {error.too_long.longest} maximum"
    return encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
