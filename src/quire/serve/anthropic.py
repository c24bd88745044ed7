"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, for text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.serve.anthropic_input import choice_of, messages_of, partial_object, tools_of
from quire.serve.call import Call, Piece, Prompt
from quire.serve.chat import prepare, render
from quire.serve.errors import HttpError, invalid, unsupported
from quire.serve.items import Change, Item, Items
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


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """The signature, with which Anthropic's own server knows its thinking again, is empty."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """`input` of a call that was cut off has the members that are whole."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


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
    content: list[Block]
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
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


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
    _check_thinking(service, body)
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
    _check_thinking(service, body)
    tokens = await service.work(len(str(body.messages)), lambda: _tokens(service, body)[1])
    return _encode(TokenCount(len(tokens)))


def _check_thinking(service: Service, body: CountRequest) -> None:
    if body.thinking is None:
        return
    kind = body.thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        message = f"thinking.type must be enabled, adaptive or disabled, not {str(kind)[:64]!r}"
        raise invalid(message, "thinking", "invalid_value")
    if kind != "disabled" and service.formats.reasoning is None:
        raise unsupported("thinking", "this model does not reason apart (--reasoning-parser)")


def conversation(body: CountRequest) -> ChatRequest:
    """The same as a chat. A last message of the assistant is to be continued, as in Anthropic's API."""
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
    """What chat templates are told; they know it under either name."""
    if body.thinking is None:
        return None
    on = body.thinking["type"] != "disabled"
    return {"enable_thinking": on, "thinking": on}


def _tokens(service: Service, body: CountRequest) -> tuple[str, list[int]]:
    chat = conversation(body)
    text = render(service, chat, service.offer(chat))
    return text, service.front.encode(text, add_special_tokens=False)


def _make(service: Service, body: MessagesRequest, call_id: str) -> Prompt:
    chat = msgspec.structs.replace(
        conversation(body),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        seed=body.seed,
    )
    params = sampling_params(service.front, chat, body.max_tokens, None)
    text, params, field, reading = prepare(service, chat, params)
    tokens = service.front.encode(text, add_special_tokens=False)
    return Prompt(
        service.front.request(service.next_request_id(call_id), tokens, params), text, field, reading
    )


class MessageAnswer:
    """The call as /v1/messages shows it: thinking, texts and uses of tools, each a block."""

    def __init__(self, body: MessagesRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._stop = tuple(body.stop_sequences or ())
        self._model = model
        self._items = Items(call.reading)
        self._opened = False

    def whole(self) -> bytes:
        items = self._items.whole(self.call.streams[0].output.outputs[0].text)
        reason, sequence = self._end(items)
        blocks = [_block(item, item.text) for item in items]
        usage = self._usage(self.call.usage)
        return _encode(MessageObject(self.call.id, self._model, blocks, usage, reason, sequence))

    def _end(self, items: list[Item]) -> tuple[str, str | None]:
        """Why it ended, in Anthropic's words, and at which stop sequence."""
        sample = self.call.streams[0].output.outputs[0]
        if sample.finish_reason == "length":
            return "max_tokens", None
        if isinstance(sample.stop_reason, str) and sample.stop_reason in self._stop:
            return "stop_sequence", sample.stop_reason
        return ("tool_use" if any(item.kind == "call" for item in items) else "end_turn"), None

    def _usage(self, usage: Usage) -> MessageUsage:
        return MessageUsage(usage.num_prompt - usage.num_cached, usage.num_output, usage.num_cached)

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._opened:
            self._opened = True
            usage = self.call.usage
            start = self._usage(Usage(usage.num_prompt, usage.num_cached, 0))
            message = MessageObject(self.call.id, self._model, [], start)
            chunks.append(_event("message_start", message=message))
            chunks += _changed(self._items.begin())
            chunks.append(_event("ping"))
        for piece in pieces:
            chunks += _changed(self._items.feed(piece.chunk.text))
        return b"".join(chunks)

    def end(self) -> bytes:
        events = _changed(self._items.finish())
        reason, sequence = self._end(self._items.all)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events.append(_event("message_delta", delta=delta, usage=self._usage(self.call.usage)))
        return b"".join([*events, _event("message_stop")])

    def error_event(self, error: HttpError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self.call.id) + b"\n\n"


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _block(item: Item, text: str) -> Block:
    if item.kind == "call":
        return ToolUseBlock(item.call_id, item.name, partial_object(text))
    return ThinkingBlock(text) if item.kind == "reasoning" else TextBlock(text)


def _changed(changes: list[Change]) -> list[bytes]:
    """The events of changes to the blocks."""
    events = []
    for what, item, text in changes:
        if what == "open":
            block = _block(item, "")
            events.append(_event("content_block_start", index=item.index, content_block=block))
        elif what == "close":
            events.append(_event("content_block_stop", index=item.index))
        else:
            kind, field = _DELTAS[item.kind]
            delta = {"type": kind, field: text}
            events.append(_event("content_block_delta", index=item.index, delta=delta))
    return events
