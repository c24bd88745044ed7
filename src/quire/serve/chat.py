"""/v1/chat/completions: conversations through the model's template, logprobs, parallel samples, streaming."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from quire.engine.outputs import CompletionOutput
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
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
)
from quire.serve.service import Service
from quire.serve.sse import DONE, event
from quire.serve.structured import constrained_by

decoder = msgspec.json.Decoder(ChatRequest)
_encode = msgspec.json.Encoder().encode

_TOOLS_LATER = "tool calls come in a later version; leave it out or set tool_choice to none"
_REFUSED = {
    **REFUSED,
    "functions": _TOOLS_LATER,
    "function_call": _TOOLS_LATER,
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
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", _TOOLS_LATER)
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", _TOOLS_LATER)
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


def render(service: Service, body: ChatRequest) -> str:
    """The conversation as the model's text."""
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
        tools=body.tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **variables,
    )


def _make(service: Service, body: ChatRequest, call_id: str) -> Prompt:
    front = service.front
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(front, body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    text = render(service, body)
    tokens = front.encode(text, add_special_tokens=bool(body.add_special_tokens))
    tokens = truncated(tokens, body.truncate_prompt_tokens, front.info.max_model_len)
    request = front.request(
        service.next_request_id(call_id), tokens, params, priority=body.priority, salt=body.cache_salt or ""
    )
    return Prompt(request, text, constrained_by(body))


def last_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last message: what `echo` puts before the answer."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


class ChatAnswer:
    """The call as /v1/chat/completions shows it."""

    def __init__(self, service: Service, body: ChatRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._opened = False
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
        message = AnswerMessage(self._role, self._echo + sample.text)
        choice = ChatChoice(
            sample.index,
            message,
            self._logprobs(sample.logprobs),
            sample.finish_reason,
            sample.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = sample.token_ids
        return choice

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
        choice = ChatChunkChoice(chunk.index, ChatDelta(content=chunk.text))
        if self._body.logprobs:
            choice.logprobs = self._logprobs(chunk.logprobs)
        if chunk.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = chunk.token_ids
        return event(self._chunk([choice], self._no_usage()))

    def _no_usage(self) -> Any:
        """What a chunk before the end says of usage: the running counts, null, or nothing."""
        if self._usage_in_all:
            return usage_info(self.call.usage, self._details)
        return None if self._usage_in_end else UNSET

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any) -> ChatChunk:
        return ChatChunk(self.call.id, int(self.call.began), self._model, choices, usage=usage)

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
