"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, for text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.serve.call import Call, Piece, Prompt
from quire.serve.chat import render
from quire.serve.errors import HttpError, invalid, unsupported
from quire.serve.params import sampling_params
from quire.serve.protocol import ChatRequest, Int64, LogprobCount, Name
from quire.serve.service import Service
from quire.serve.sse import event
from quire.types import Usage


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: LogprobCount | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: dict[str, Any] | str | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    seed: Int64 | None = None


class TextBlock(msgspec.Struct, tag="text"):
    text: str
    citations: None = None


class MessageUsage(msgspec.Struct):
    """What of the prompt was read from the cache is not in `input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageObject(msgspec.Struct, tag="message"):
    """Answer of /v1/messages."""

    id: str
    model: str
    content: list[TextBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountRequest)
_encode = msgspec.json.Encoder().encode
_REFUSED = {
    "tools": "tool calls come in a later version",
    "tool_choice": "tool calls come in a later version",
    "output_config": "there is nothing to configure",
}
_REFUSED_MESSAGES = {**_REFUSED, "container": "there are none", "mcp_servers": "there are none"}
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
_PARTS = {"type", "text", "cache_control", "citations"}


def error_body(error: HttpError, request_id: str | None = None) -> bytes:
    """An error in Anthropic's shape."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.info.message}, "request_id": request_id}
    return _encode(body)


async def create(service: Service, http: HttpRequest) -> MessageAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, decoder)
    model = service.check_model(body.model)
    service.refuse(body, _REFUSED_MESSAGES)
    _check_thinking(body)
    if body.service_tier not in (None, "auto", "standard_only"):
        raise unsupported("service_tier", "there is one")
    call_id = service.new_id("msg_", http)
    prompt = await service.work(len(str(body.messages)), lambda: _make(service, body, call_id))
    return MessageAnswer(body, model, await service.start(call_id, [prompt]))


async def count(service: Service, http: HttpRequest) -> bytes:
    """How many tokens the conversation has as a prompt."""
    body = await service.read(http, count_decoder)
    service.check_model(body.model)
    service.refuse(body, _REFUSED)
    _check_thinking(body)
    tokens = await service.work(len(str(body.messages)), lambda: _tokens(service, body)[1])
    return _encode(TokenCount(len(tokens)))


def _check_thinking(body: CountRequest) -> None:
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        raise unsupported("thinking", "it comes in a later version")


def _text(content: Any, where: str) -> str:
    """A text, or blocks of text, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} must be a text or a list of blocks", where, "invalid_type")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind != "text":
            raise unsupported(place, f"blocks of type {str(kind)[:64]!r} are not, only text")
        if unknown := set(part) - _PARTS:
            raise invalid(f"Unknown field: {place}.{min(unknown)}", place, "unknown_parameter")
        if not isinstance(part.get("text"), str):
            raise invalid(f"{place}.text must be a text", place, "invalid_type")
        texts.append(part["text"])
    return "".join(texts)


def conversation(body: CountRequest) -> ChatRequest:
    """The same as a chat. A last message of the assistant is to be continued, as in Anthropic's API."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if unknown := set(message) - {"role", "content"}:
            raise invalid(f"Unknown field: {where}.{min(unknown)}", where, "unknown_parameter")
        if message.get("role") not in ("user", "assistant"):
            raise invalid(f"{where}.role must be user or assistant", f"{where}.role", "invalid_value")
        content = _text(message.get("content"), f"{where}.content")
        messages.append({"role": message["role"], "content": content})
    continued = messages[-1]["role"] == "assistant"
    return ChatRequest(
        messages=messages, add_generation_prompt=not continued, continue_final_message=continued
    )


def _tokens(service: Service, body: CountRequest) -> tuple[str, list[int]]:
    text = render(service, conversation(body))
    return text, service.front.encode(text, add_special_tokens=False)


def _make(service: Service, body: MessagesRequest, call_id: str) -> Prompt:
    text, tokens = _tokens(service, body)
    fields = ChatRequest(
        messages=body.messages,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        seed=body.seed,
    )
    params = sampling_params(service.front, fields, body.max_tokens, None)
    return Prompt(service.front.request(service.next_request_id(call_id), tokens, params), text)


class MessageAnswer:
    """The call as /v1/messages shows it: one block of text."""

    def __init__(self, body: MessagesRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._stop = tuple(body.stop_sequences or ())
        self._model = model
        self._opened = False

    def whole(self) -> bytes:
        sample = self.call.streams[0].output.outputs[0]
        reason, sequence = self._end()
        message = MessageObject(
            self.call.id,
            self._model,
            [TextBlock(sample.text)],
            self._usage(self.call.usage),
            reason,
            sequence,
        )
        return _encode(message)

    def _end(self) -> tuple[str, str | None]:
        """Why it ended, in Anthropic's words, and at which stop sequence."""
        sample = self.call.streams[0].output.outputs[0]
        if sample.finish_reason == "length":
            return "max_tokens", None
        if isinstance(sample.stop_reason, str) and sample.stop_reason in self._stop:
            return "stop_sequence", sample.stop_reason
        return "end_turn", None

    def _usage(self, usage: Usage) -> MessageUsage:
        return MessageUsage(usage.num_prompt - usage.num_cached, usage.num_output, usage.num_cached)

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._opened:
            self._opened = True
            chunks += self._opening()
        for piece in pieces:
            if piece.chunk.text:
                delta = {"type": "text_delta", "text": piece.chunk.text}
                chunks.append(_event("content_block_delta", index=0, delta=delta))
        return b"".join(chunks)

    def _opening(self) -> list[bytes]:
        usage = self.call.usage
        start = self._usage(Usage(usage.num_prompt, usage.num_cached, 0))
        return [
            _event("message_start", message=MessageObject(self.call.id, self._model, [], start)),
            _event("content_block_start", index=0, content_block=TextBlock("")),
            _event("ping"),
        ]

    def end(self) -> bytes:
        reason, sequence = self._end()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        stop = _event("content_block_stop", index=0)
        return (
            stop
            + _event("message_delta", delta=delta, usage=self._usage(self.call.usage))
            + _event("message_stop")
        )

    def error_event(self, error: HttpError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self.call.id) + b"\n\n"


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
