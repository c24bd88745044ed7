"""Anthropic's API, for text: /v1/messages, its count of tokens, and /v1/models in its shape."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.lazy import Lazy
from quire.serve.anthropic.conversation import conversation
from quire.serve.anthropic.protocol import (
    COUNT_TOKENS,
    MESSAGES,
    Block,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    error_body,
)
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, named
from quire.serve.openai.conversation import count_tokens, make_prompt
from quire.serve.openai.models import ModelList, ServedModelCard
from quire.serve.openai.protocol import DrawFields
from quire.serve.output_items import Change, Item, Items
from quire.serve.service import Service
from quire.serve.stream import event
from quire.text.partial import partial_object
from quire.types import Usage

if TYPE_CHECKING:
    from quire.serve.anthropic import input as reading
    from quire.serve.anthropic.input import Tools
else:
    reading = Lazy("quire.serve.anthropic.input")

_encode = msgspec.json.Encoder().encode
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def create(service: Service, http: HttpRequest) -> MessageAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, MESSAGES)
    model = service.check_model(body.model)
    tools = reading.tools_of(body.tools or (), body.tool_choice)
    call_id = service.new_id("msg_", http, body.request_id)
    with named({"stop": "stop_sequences"}):
        prompt = await service.work(http, lambda: _make(service, body, tools, call_id), renders=True)
    for name in tools.dropped:
        service.notice(http, name)
    call = await service.start(http, call_id, [prompt], model)
    return MessageAnswer(body, model, call, http.state.request_id)


def _make(service: Service, body: MessagesRequest, tools: Tools, call_id: str) -> Prompt:
    given = {name: getattr(body, name) for name in DrawFields.__struct_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    chat = msgspec.structs.replace(conversation(body, tools), **given, stop=body.stop_sequences)
    marked = [{"content": body.system}, *body.messages]
    return make_prompt(service, chat, call_id, body.max_tokens, None, "output_config", marked)


class MessageAnswer:
    """Writes a call as an answer of /v1/messages; thinking, texts and tool uses are blocks."""

    def __init__(self, body: MessagesRequest, model: str, call: Call, request_id: str) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._stop = tuple(body.stop_sequences or ())
        self._model = model
        self._request_id = request_id
        self._items = Items(call.reading, call.source)
        self._opened = False

    def whole(self) -> bytes:
        items = self._items.whole(self.call.streams[0].output.outputs[0].text)
        reason, sequence = self._end(items)
        blocks = [_block(item, item.text) for item in items]
        usage = self._usage(self.call.usage)
        message = MessageObject(self.call.id, self._model, blocks, usage, reason, sequence)
        message.system_fingerprint = self.call.fingerprint
        return _encode(message)

    def _end(self, items: list[Item]) -> tuple[str, str | None]:
        """The stop reason in Anthropic's terms, and the stop sequence."""
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
            message.system_fingerprint = self.call.fingerprint
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
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


def _block(item: Item, text: str) -> Block:
    if item.kind == "call":
        return ToolUseBlock(item.call_id, item.name, partial_object(text))
    return ThinkingBlock(text) if item.kind == "reasoning" else TextBlock(text)


def _changed(changes: list[Change]) -> list[bytes]:
    """The events for changes to the blocks."""
    events = []
    for what, item, text in changes:
        if what == "open":
            block = _block(item, "")
            events.append(_event("content_block_start", index=item.index, content_block=block))
        elif what == "close":
            if item.kind == "reasoning":  # only Anthropic's own server can sign its thinking
                delta = {"type": "signature_delta", "signature": ""}
                events.append(_event("content_block_delta", index=item.index, delta=delta))
            events.append(_event("content_block_stop", index=item.index))
        else:
            kind, field = _DELTAS[item.kind]
            delta = {"type": kind, field: text}
            events.append(_event("content_block_delta", index=item.index, delta=delta))
    return events


class TokenCount(msgspec.Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


async def count(service: Service, http: HttpRequest) -> bytes:
    """Read, check and count a conversation."""
    body = await service.read(http, COUNT_TOKENS)
    service.check_model(body.model)
    tools = reading.tools_of(body.tools or (), body.tool_choice)
    count = await service.work(http, lambda: count_tokens(service, conversation(body, tools)), renders=True)
    for name in tools.dropped:
        service.notice(http, name)
    return _encode(TokenCount(count))


class AnthropicModel(msgspec.Struct, tag="model"):
    id: str
    display_name: str
    created_at: str


class AnthropicModels(msgspec.Struct):
    """All models, on one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def model(card: ServedModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, timezone.utc)
    return AnthropicModel(card.id, card.id, created.strftime("%Y-%m-%dT%H:%M:%SZ"))


def models(cards: ModelList) -> AnthropicModels:
    data = [model(card) for card in cards.data]
    return AnthropicModels(data, data[0].id, data[-1].id)
