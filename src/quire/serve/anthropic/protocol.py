"""The bodies and answers of /v1/messages as structs, and its errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.errors import HttpError, encode
from quire.serve.openai.protocol import CacheSalt, CountOrAll, Int64, Messages, Name, Positive

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


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: Name
    messages: Messages
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: CountOrAll | None = None
    seed: Int64 | None = None
    cache_salt: CacheSalt | None = None


class TextBlock(msgspec.Struct, tag="text"):
    text: str
    citations: None = None


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


def error_body(error: HttpError, request_id: str | None = None) -> bytes:
    """An error in Anthropic's shape, and in its words where clients look for them."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.info.message
    if error.too_long is not None:
        message = f"prompt is too long: {error.too_long.num_tokens} tokens > {error.too_long.longest} maximum"
    return encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})
