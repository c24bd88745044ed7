"""/v1/responses: OpenAI's newer API, for text. Nothing is stored, so every call brings its whole conversation."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from quire.serve.call import Call, Piece, Prompt
from quire.serve.chat import render
from quire.serve.errors import HttpError, invalid, unsupported
from quire.serve.params import TokenNames, chat_logprobs, sampling_params
from quire.serve.protocol import ChatRequest, Int64, LogprobCount, Name, Stop, TokenId, TokenLogprob
from quire.serve.service import Service
from quire.serve.sse import event
from quire.serve.structured import text_format


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    truncation: str | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    service_tier: str | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    top_k: LogprobCount | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class OutputMessage(msgspec.Struct, tag="message"):
    id: str
    content: list[OutputText]
    status: str = "completed"
    role: str = "assistant"


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
    """Answer of /v1/responses, and what its first and last events carry."""

    id: str
    created_at: int
    model: str
    output: list[OutputMessage]
    status: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    user: str | None
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    parallel_tool_calls: bool = True
    tool_choice: str = "auto"
    tools: list[Any] = []
    previous_response_id: str | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    top_logprobs: int = 0
    service_tier: str = "default"


decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode
_NOT_STORED = "responses are not stored: send the whole conversation as input"
_REFUSED = {
    "tools": "tool calls come in a later version",
    "max_tool_calls": "tool calls come in a later version",
    "reasoning": "reasoning comes in a later version",
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
    prompt = await service.work(size, lambda: _make(service, body, call_id))
    return ResponseAnswer(service, body, model, await service.start(call_id, [prompt]))


def _check(service: Service, body: ResponsesRequest) -> None:
    service.refuse(body, _REFUSED)
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool calls come in a later version")
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "an input that is too long is refused")
    if body.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", "there is one")
    wanted = dict(body.text or {})
    if not isinstance(wanted.pop("format", {}), dict) or wanted.pop("verbosity", None) or wanted:
        raise unsupported("text", "only format is, an object")
    for name in body.include or []:
        if name != _LOGPROBS:
            raise unsupported("include", f"only {_LOGPROBS!r} can be, not {name[:64]!r}")
    if set(body.stream_options or {}) - {"include_obfuscation"}:
        raise invalid("stream_options takes include_obfuscation only", "stream_options", "unknown_parameter")


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as chat messages. Raises HttpError naming an item that is no message."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        where = f"input[{i}]"
        if item.get("type", "message") != "message":
            raise unsupported(where, f"items of type {str(item.get('type'))[:64]!r} are not, only messages")
        if unknown := set(item) - {"type", "role", "content", "id", "status", "phase"}:
            raise invalid(
                f"Unknown field: {where}.{min(unknown)}", f"{where}.{min(unknown)}", "unknown_parameter"
            )
        messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
    return messages


def _content(content: Any) -> Any:
    """Parts as the template reads them; what this API adds to its own answers is left out."""
    if not isinstance(content, list):
        return content
    return [
        {k: v for k, v in part.items() if k not in ("annotations", "logprobs")}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _make(service: Service, body: ResponsesRequest, call_id: str) -> Prompt:
    front = service.front
    names = ("temperature", "top_p", "seed", "stop", "stop_token_ids", "top_k", "min_p", "repetition_penalty")
    wanted = (body.text or {}).get("format")
    conversation = ChatRequest(
        messages=messages_of(body),
        chat_template_kwargs=body.chat_template_kwargs,
        ignore_eos=body.ignore_eos,
        response_format=text_format(wanted) if wanted is not None else None,
        **{name: getattr(body, name) for name in names},
    )
    scored = _LOGPROBS in (body.include or []) or bool(body.top_logprobs)
    params = sampling_params(
        front, conversation, body.max_output_tokens, (body.top_logprobs or 0) if scored else None
    )
    text = render(service, conversation)
    request = front.request(
        service.next_request_id(call_id),
        front.encode(text, add_special_tokens=False),
        params,
        priority=body.priority,
        salt=body.cache_salt or "",
    )
    return Prompt(request, text, "text" if wanted is not None else None)


class ResponseAnswer:
    """The call as /v1/responses shows it: one message with one text."""

    def __init__(self, service: Service, body: ResponsesRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._names = TokenNames(service.front.tokenizer, False)
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._sequence = 0

    @property
    def _sampling(self) -> Any:
        return self.call.streams[0].request.sampling

    def whole(self) -> bytes:
        return _encode(self._finished())

    def _object(self, status: str, output: list[OutputMessage]) -> ResponseObject:
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
        )

    def _finished(self) -> ResponseObject:
        sample = self.call.streams[0].output.outputs[0]
        cut = sample.finish_reason == "length"
        answer = self._object("incomplete" if cut else "completed", [self._message()])
        if cut:
            answer.incomplete_details = {"reason": "max_output_tokens"}
        usage = self.call.usage
        answer.usage = ResponseUsage(
            usage.num_prompt,
            InputDetails(usage.num_cached),
            usage.num_output,
            OutputDetails(),
            usage.num_prompt + usage.num_output,
        )
        return answer

    def _text(self) -> OutputText:
        sample = self.call.streams[0].output.outputs[0]
        return OutputText(sample.text, [], self._logprobs(sample.logprobs))

    def _message(self) -> OutputMessage:
        cut = self.call.streams[0].output.outputs[0].finish_reason == "length"
        return OutputMessage(self._message_id, [self._text()], "incomplete" if cut else "completed")

    def _logprobs(self, steps: Any) -> list[TokenLogprob]:
        return chat_logprobs(steps or [], self._body.top_logprobs or 0, self._names)

    def _event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, name)

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._sequence:
            chunks += self._opening()
        for piece in pieces:
            if piece.chunk.text or piece.chunk.logprobs:
                delta = {"delta": piece.chunk.text, "logprobs": self._logprobs(piece.chunk.logprobs)}
                chunks.append(self._event("response.output_text.delta", **self._place, **delta))
        return b"".join(chunks)

    def _opening(self) -> list[bytes]:
        started = self._object("in_progress", [])
        message = OutputMessage(self._message_id, [], "in_progress")
        return [
            self._event("response.created", response=started),
            self._event("response.in_progress", response=started),
            self._event("response.output_item.added", output_index=0, item=message),
            self._event("response.content_part.added", **self._place, part=OutputText("")),
        ]

    def end(self) -> bytes:
        text, answer, place = self._text(), self._finished(), self._place
        events = [
            self._event("response.output_text.done", **place, text=text.text, logprobs=text.logprobs),
            self._event("response.content_part.done", **place, part=text),
            self._event("response.output_item.done", output_index=0, item=self._message()),
            self._event(f"response.{answer.status}", response=answer),
        ]
        return b"".join(events)

    def error_event(self, error: HttpError) -> bytes:
        failed = self._object("failed", [])
        failed.error = ResponseFailure("server_error", error.info.message)
        info = error.info
        return self._event("error", code=info.code, message=info.message, param=info.param) + self._event(
            "response.failed", response=failed
        )
