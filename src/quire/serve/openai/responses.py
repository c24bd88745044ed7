"""/v1/responses: OpenAI's newer API, for text. Nothing is stored: every call sends its whole conversation."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from quire.client.outputs import CompletionOutput
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid, unsupported
from quire.serve.items import Change, Item, Items
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.conversation import prepare
from quire.serve.openai.logprobs import TokenLogprob, TokenNames, chat_logprobs
from quire.serve.openai.protocol import DrawFields
from quire.serve.openai.responses_input import messages_of, tools_of
from quire.serve.openai.responses_protocol import (
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from quire.serve.openai.sampling import sampling_params
from quire.serve.openai.structured import text_format
from quire.serve.service import Service
from quire.serve.stream import event

decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode
_NOT_STORED = "responses are not stored: send the whole conversation as input"
_REFUSED = {
    "max_tool_calls": "there is no such limit; parallel_tool_calls false allows one call",
    "background": _NOT_STORED,
    "store": _NOT_STORED,
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "prompt": "there are no stored prompts",
}
_LOGPROBS = "message.output_text.logprobs"


async def respond(service: Service, http: HttpRequest) -> ResponseAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, decoder)
    model = service.check_model(body.model)
    _check(service, body)
    call_id = service.new_id("resp_", http, body.request_id)
    size = len(body.input) if isinstance(body.input, str) else len(str(body.input))
    prompt = await service.work(size, lambda: _make(service, body, call_id), renders=True)
    return ResponseAnswer(service, body, model, await service.start(call_id, [prompt]))


def _check(service: Service, body: ResponsesRequest) -> None:
    service.refuse(body, _REFUSED)
    reasoning = body.reasoning or {}
    if set(reasoning) - {"effort", "summary"} or reasoning.get("summary") not in (None, "auto"):
        raise unsupported("reasoning", "only effort is; reasoning is returned whole, without a summary")
    if not isinstance(reasoning.get("effort"), str | None):
        raise invalid("reasoning.effort must be a text", "reasoning.effort", "invalid_type")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "an input that is too long is refused")
    if body.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", "only auto and default are")
    wanted = dict(body.text or {})
    if not isinstance(wanted.pop("format", {}), dict) or wanted.pop("verbosity", None) or wanted:
        raise unsupported("text", "only format is, an object")
    for name in body.include or []:
        if name != _LOGPROBS:
            raise unsupported("include", f"only {_LOGPROBS!r} is, not {name[:64]!r}")
    if set(body.stream_options or {}) - {"include_obfuscation"}:
        raise invalid("stream_options takes include_obfuscation only", "stream_options", "unknown_parameter")


def _make(service: Service, body: ResponsesRequest, call_id: str) -> Prompt:
    front = service.front
    wanted = (body.text or {}).get("format")
    conversation = ChatRequest(
        messages=messages_of(body.input, body.instructions),
        tools=tools_of(body.tools or ()),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=text_format(wanted) if wanted is not None else None,
        **{name: getattr(body, name) for name in DrawFields.__struct_fields__},
    )
    scored = _LOGPROBS in (body.include or []) or bool(body.top_logprobs)
    params = sampling_params(
        front, conversation, body.max_output_tokens, (body.top_logprobs or 0) if scored else None
    )
    text, params, field, reading = prepare(service, conversation, params)
    request = front.request(
        service.next_request_id(call_id),
        front.encode(text, add_special_tokens=False),
        params,
        priority=body.priority,
        salt=body.cache_salt or "",
    )
    return Prompt(request, text, "text" if field == "response_format" else field, reading)


class ResponseAnswer:
    """Writes a call as an answer of /v1/responses; reasoning, messages and function calls are output items."""

    def __init__(self, service: Service, body: ResponsesRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._names = TokenNames(service.front.tokenizer, False)
        self._front = service.front
        self._items = Items(call.reading)
        self._new_logprobs: list[Any] = []
        self._sequence = 0

    @property
    def _sampling(self) -> Any:
        return self.call.streams[0].request.sampling

    @property
    def _sample(self) -> CompletionOutput:
        return self.call.streams[0].output.outputs[0]

    def whole(self) -> bytes:
        return _encode(self._finished(self._items.whole(self._sample.text)))

    def _object(self, status: str, output: list[OutputItem]) -> ResponseObject:
        body = self._body
        return ResponseObject(
            self.call.id,
            int(self.call.began),
            self._model,
            output,
            status,
            body.instructions,
            body.max_output_tokens,
            self._sampling.temperature,
            self._sampling.top_p,
            body.metadata or {},
            body.user,
            text={"format": (body.text or {}).get("format") or {"type": "text"}},
            top_logprobs=body.top_logprobs or 0,
            tools=list(body.tools or ()),
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning,
        )

    def _finished(self, items: list[Item]) -> ResponseObject:
        cut = self._sample.finish_reason == "length"
        output = [self._item(item, cut and item is items[-1]) for item in items]
        answer = self._object("incomplete" if cut else "completed", output)
        if cut:
            answer.incomplete_details = {"reason": "max_output_tokens"}
        usage = self.call.usage
        reasoning = "".join(item.text for item in items if item.kind == "reasoning")
        answer.usage = ResponseUsage(
            usage.num_prompt,
            InputDetails(usage.num_cached),
            usage.num_output,
            OutputDetails(self._num_tokens(reasoning, usage.num_output)),
            usage.num_prompt + usage.num_output,
        )
        return answer

    def _num_tokens(self, text: str, most: int) -> int:
        """Number of tokens of `text` when it is tokenized again."""
        return min(most, len(self._front.encode(text, add_special_tokens=False))) if text else 0

    def _item(self, item: Item, cut: bool) -> OutputItem:
        status = "incomplete" if cut else "completed"
        if item.kind == "call":
            return OutputCall(f"fc_{item.id}", item.call_id, item.name, item.text, status)
        if item.kind == "reasoning":
            return OutputReasoning(f"rs_{item.id}", [ReasoningText(item.text)], status)
        return OutputMessage(f"msg_{item.id}", [self._text(item)], status)

    def _text(self, item: Item) -> OutputText:
        """The last text carries the logprobs of all tokens, reasoning and calls included."""
        last = [i for i in self._items.all if i.kind == "text"][-1:]
        steps = self._sample.logprobs if item in last else None
        return OutputText(item.text, [], self._logprobs(steps))

    def _logprobs(self, steps: Any) -> list[TokenLogprob]:
        return chat_logprobs(steps or [], self._body.top_logprobs or 0, self._names)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, name)

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._sequence:
            started = self._object("in_progress", [])
            chunks.append(self._event("response.created", response=started))
            chunks.append(self._event("response.in_progress", response=started))
            chunks += self._changed(self._items.begin())
        for piece in pieces:
            self._new_logprobs += piece.chunk.logprobs or []
            changes = self._items.feed(piece.chunk.text)
            if not changes and self._new_logprobs and self.call.reading is None:
                changes = [Change("grow", self._items.all[-1])]
            chunks += self._changed(changes)
        return b"".join(chunks)

    def _changed(self, changes: list[Change]) -> list[bytes]:
        makers = {"open": self._opened, "grow": self._grown, "close": self._closed}
        return [data for change in changes for data in makers[change.what](change.item, change.text)]

    def _place(self, item: Item) -> dict[str, Any]:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[item.kind]
        place = {"item_id": f"{prefix}_{item.id}", "output_index": item.index}
        return place if item.kind == "call" else {**place, "content_index": 0}

    def _opened(self, item: Item, text: str) -> list[bytes]:
        shown = self._item(Item(item.kind, item.index, item.name, item.call_id, id=item.id), False)
        shown.status = "in_progress"
        part = None if isinstance(shown, OutputCall) else shown.content.pop()
        events = [self._event("response.output_item.added", output_index=item.index, item=shown)]
        if part is not None:
            if isinstance(part, OutputText):
                part.logprobs = []
            events.append(self._event("response.content_part.added", **self._place(item), part=part))
        return events

    def _grown(self, item: Item, text: str) -> list[bytes]:
        if item.kind != "text":
            name = "function_call_arguments" if item.kind == "call" else "reasoning_text"
            return [self._event(f"response.{name}.delta", **self._place(item), delta=text)]
        logprobs, self._new_logprobs = self._logprobs(self._new_logprobs), []
        fields = {**self._place(item), "delta": text, "logprobs": logprobs}
        return [self._event("response.output_text.delta", **fields)]

    def _closed(self, item: Item, text: str) -> list[bytes]:
        place, cut = self._place(item), self._sample.finish_reason == "length"
        shown = self._item(item, cut)
        done = self._event
        if isinstance(shown, OutputCall):
            called = {"name": item.name, "arguments": item.text}
            events = [done("response.function_call_arguments.done", **place, **called)]
        elif isinstance(shown, OutputReasoning):
            events = [done("response.reasoning_text.done", **place, text=item.text)]
            events.append(done("response.content_part.done", **place, part=shown.content[0]))
        else:
            part = shown.content[0]
            fields: dict[str, Any] = {"text": part.text, "logprobs": part.logprobs}
            events = [done("response.output_text.done", **place, **fields)]
            events.append(done("response.content_part.done", **place, part=part))
        return [*events, done("response.output_item.done", output_index=item.index, item=shown)]

    def end(self) -> bytes:
        events = self._changed(self._items.finish())
        answer = self._finished(self._items.all)
        return b"".join([*events, self._event(f"response.{answer.status}", response=answer)])

    def error_event(self, error: HttpError) -> bytes:
        failed = self._object("failed", [])
        failed.error = ResponseFailure("server_error", error.info.message)
        info = error.info
        return self._event("error", code=info.code, message=info.message, param=info.param) + self._event(
            "response.failed", response=failed
        )
