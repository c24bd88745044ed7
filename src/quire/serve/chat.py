"""/v1/chat/completions: conversations through the model's template, logprobs, parallel samples, streaming."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from quire.client.outputs import Chunk, CompletionOutput
from quire.params import SamplingParams
from quire.serve.call import Call, Piece, Prompt
from quire.serve.completions import usage_info
from quire.serve.errors import HttpError, invalid, unsupported
from quire.serve.params import (
    REFUSED,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
    sampling_params,
    truncated,
)
from quire.serve.protocol import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quire.serve.service import Service
from quire.serve.sse import DONE, event
from quire.serve.structured import constrained_by
from quire.serve.tools import Offer, OutputReader, Reading, reading_of, with_tools
from quire.text.events import CallArguments, CallEnd, CallStart, Parsed

decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode
_NOTHING = ChatDelta()

_OLD = "it is out of date: use tools and tool_choice"
_REFUSED = {
    **REFUSED,
    "functions": _OLD,
    "function_call": _OLD,
    "audio": "this server answers in text",
    "prediction": "predicted outputs are not used",
    "web_search_options": "this server does not search",
    "store": "answers are not stored",
    "chat_template": "templates come with the model or --chat-template, never with a request",
}
_NEUTRAL = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
}


async def chat(service: Service, http: HttpRequest) -> ChatAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, decoder)
    model = service.check_model(body.model)
    _check(service, body)
    call_id = service.new_id("chatcmpl-", http, body.request_id)
    size = sum(len(str(message.get("content", ""))) for message in body.messages)
    prompt = await service.work(size, lambda: _make(service, body, call_id))
    return ChatAnswer(service, body, model, await service.start(call_id, [prompt]))


def _check(service: Service, body: ChatRequest) -> None:
    service.refuse(body, _REFUSED)
    for name, values in _NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise unsupported(name, f"it can only be {values[0]!r}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream=true", "stream_options", "invalid_value")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens", "invalid_value")


def render(service: Service, body: ChatRequest, offer: Offer) -> str:
    """The conversation as the model's text, with the tools that may be called."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    taken = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} & set(
        variables
    )
    if taken:
        name = f"chat_template_kwargs.{min(taken)}"
        raise invalid(f"{name}: this is a field of the body itself", name, "invalid_value")
    return service.front.render(
        body.messages,
        tools=list(offer.tools) if offer.choice != "none" else None,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **variables,
    )


class Prepared(NamedTuple):
    """A conversation's text, its parameters with what its tools ask, who asks it, and how its answer is read."""

    text: str
    params: SamplingParams
    field: str | None
    reading: Reading | None


def prepare(service: Service, body: ChatRequest, params: SamplingParams) -> Prepared:
    """What the tools, the constraint and the reasoning of a chat come to. Raises HttpError or RequestError."""
    offer = service.offer(body)
    text = render(service, body, offer)
    reading = reading_of(service.formats, offer, text)
    params, field = with_tools(params, service.formats, offer, reading)
    return Prepared(text, params, field or constrained_by(body), reading)


def _make(service: Service, body: ChatRequest, call_id: str) -> Prompt:
    front = service.front
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(front, body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    text, params, field, reading = prepare(service, body, params)
    tokens = front.encode(text, add_special_tokens=bool(body.add_special_tokens))
    tokens = truncated(tokens, body.truncate_prompt_tokens, front.info.max_model_len)
    request = front.request(
        service.next_request_id(call_id), tokens, params, priority=body.priority, salt=body.cache_salt or ""
    )
    return Prompt(request, text, field, reading)


def last_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last message: what `echo` puts before the answer."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _reason(reason: str | None, calls: bool) -> str | None:
    """Why a sample ended, where it may have ended in calls."""
    return "tool_calls" if calls and reason == "stop" else reason


class ChatAnswer:
    """The call as /v1/chat/completions shows it."""

    def __init__(self, service: Service, body: ChatRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._opened = False
        self._readers: dict[int, OutputReader] = {}
        self._calling: set[int] = set()
        self._details = service.config.enable_prompt_tokens_details
        same = bool(body.messages) and body.messages[-1].get("role") == service.config.response_role
        self._role = service.config.response_role
        self._echo = last_text(body.messages) if body.echo and same else ""
        as_ids = body.return_tokens_as_token_ids
        as_ids = service.config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(service.front.tokenizer, as_ids)
        options = body.stream_options
        self._usage_in_end = service.config.enable_force_include_usage or bool(
            options and options.include_usage
        )
        self._usage_in_all = bool(options and options.continuous_usage_stats)

    def whole(self) -> bytes:
        stream, body = self.call.streams[0], self._body
        usage = usage_info(self.call.usage, self._details)
        choices = [self._choice(sample) for sample in stream.output.outputs]
        answer = ChatCompletion(self.call.id, int(self.call.began), self._model, choices, usage)
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(stream) or []
        if body.return_token_ids:
            answer.prompt_token_ids = stream.request.tokens
        return _encode(answer)

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        message = self._message(sample.text)
        choice = ChatChoice(
            sample.index,
            message,
            self._logprobs(sample.logprobs),
            _reason(sample.finish_reason, bool(message.tool_calls)),
            sample.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = sample.token_ids
        return choice

    def _message(self, text: str) -> AnswerMessage:
        reading = self.call.reading
        if reading is None:
            return AnswerMessage(self._role, self._echo + text)
        parsed = reading.whole(text)
        message = AnswerMessage(self._role, self._echo + parsed.content)
        if parsed.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if parsed.calls:
            message.content = message.content or None
            message.tool_calls = [
                ToolCall(reading.call_id(c.name, i), CalledFunction(c.name, c.arguments))
                for i, c in enumerate(parsed.calls)
            ]
        return message

    def _logprobs(self, steps: list[Any] | None) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(chat_logprobs(steps or [], self._body.top_logprobs or 0, self._names))

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._opened:
            self._opened = True
            chunks += [self._opening(i) for i in range(self._body.n or 1)]
        chunks += [self._piece(piece) for piece in pieces]
        return b"".join(chunks)

    def end(self) -> bytes:
        if not self._usage_in_end:
            return DONE
        return event(self._chunk([], usage_info(self.call.usage, self._details))) + DONE

    def _opening(self, index: int) -> bytes:
        """The chunk that says who speaks, and repeats what is echoed."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta(self._role, self._echo))], self._no_usage())
        stream = self.call.streams[0]
        if self._body.prompt_logprobs is not None and index == 0:
            chunk.prompt_logprobs = prompt_logprobs(stream) or []
        if self._body.return_token_ids and index == 0:
            chunk.prompt_token_ids = stream.request.tokens
        return event(chunk)

    def _piece(self, piece: Piece) -> bytes:
        chunk = piece.chunk
        choice = ChatChunkChoice(chunk.index, self._news(chunk))
        if self._body.logprobs:
            choice.logprobs = self._logprobs(chunk.logprobs)
        if chunk.finish_reason is not None:
            calls = chunk.index in self._calling
            choice.finish_reason, choice.stop_reason = _reason(chunk.finish_reason, calls), chunk.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = chunk.token_ids
        elif choice.delta == _NOTHING and chunk.finish_reason is None and not choice.logprobs:
            return b""  # held back until it is known what it is
        return event(self._chunk([choice], self._no_usage()))

    def _news(self, chunk: Chunk) -> ChatDelta:
        """What the chunk's text, read with what came before it, makes known."""
        reading, index = self.call.reading, chunk.index
        if reading is None:
            return ChatDelta(content=chunk.text)
        if index not in self._readers:
            self._readers[index] = reading.parser()
        events = self._readers[index].feed(chunk.text)
        if chunk.finish_reason is not None:
            events += self._readers[index].finish()
        news = Parsed()
        delta = ChatDelta()
        calls: list[ToolCallDelta] = []
        for part in events:
            if isinstance(part, CallStart):
                self._calling.add(index)
                call_id = reading.call_id(part.name, part.index)
                calls.append(ToolCallDelta(part.index, FunctionDelta("", part.name), call_id, "function"))
            elif isinstance(part, CallArguments):
                if calls and calls[-1].index == part.index:
                    calls[-1].function.arguments += part.text
                else:
                    calls.append(ToolCallDelta(part.index, FunctionDelta(part.text)))
            elif not isinstance(part, CallEnd):
                news.add([part])
        if news.content:
            delta.content = news.content
        if news.reasoning and self._body.include_reasoning:
            delta.reasoning_content = delta.reasoning = news.reasoning
        if calls:
            delta.tool_calls = calls
        return delta

    def _no_usage(self) -> Any:
        """What a chunk before the end says of usage: the running counts, null, or nothing."""
        if self._usage_in_all:
            return usage_info(self.call.usage, self._details)
        return None if self._usage_in_end else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any) -> ChatChunk:
        return ChatChunk(self.call.id, int(self.call.began), self._model, choices, usage=usage)

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
