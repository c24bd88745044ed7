"""/v1/chat/completions: conversations through the model's template, logprobs, parallel samples, streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from quire.client.outputs import Chunk, CompletionOutput
from quire.lazy import Lazy
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid, named
from quire.serve.openai.chat_protocol import (
    CHAT,
    CHAT_TOKENS,
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    CustomInput,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from quire.serve.openai.conversation import count_tokens, make_prompt
from quire.serve.openai.logprobs import AnswerLogprobs, ChatLogprobs, TokenNames, prompt_logprobs
from quire.serve.openai.responses_protocol import InputTokens
from quire.serve.openai.usage import UsageReport
from quire.serve.service import Service
from quire.serve.stream import DONE, event
from quire.serve.tools import OutputReader, Reading
from quire.text.output.events import CallArguments, CallEnd, CallStart, Parsed
from quire.text.output.events import ToolCall as Called

if TYPE_CHECKING:
    from quire.serve import custom_tools
else:
    custom_tools = Lazy("quire.serve.custom_tools")

_encode = msgspec.json.Encoder().encode
_NOTHING = ChatDelta()


async def chat(service: Service, http: HttpRequest) -> ChatAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, CHAT)
    model = service.check_model(body.model)
    _check(body)
    call_id = service.new_id("chatcmpl-", http, body.request_id)
    with named({} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}):
        prompt = await service.work(
            http, lambda: _make(service, body, call_id), renders=True, slow=body.chat_template is not None
        )
    return ChatAnswer(service, body, model, await service.start(http, call_id, [prompt], model))


async def count_input(service: Service, http: HttpRequest) -> bytes:
    """/v1/chat/completions/input_tokens: the length of a conversation as a prompt."""
    body = await service.read(http, CHAT_TOKENS)
    service.check_model(body.model)
    slow = body.chat_template is not None
    count = await service.work(http, lambda: count_tokens(service, body), renders=True, slow=slow)
    return _encode(InputTokens(count, "chat.completion.input_tokens"))


def _check(body: ChatRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream=true", "stream_options", "invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise invalid("give max_completion_tokens or max_tokens, not both", "max_tokens", "invalid_value")


def _make(service: Service, body: ChatRequest, call_id: str) -> Prompt:
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return make_prompt(service, body, call_id, limit, (body.top_logprobs or 0) if body.logprobs else None)


def last_text(messages: list[dict[str, Any]]) -> str:
    """The text of the last message, which `echo` repeats before the answer."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def _reason(reason: str | None, calls: bool) -> str | None:
    """The finish reason of a sample that may have made tool calls."""
    return "tool_calls" if calls and reason == "stop" else reason


def _called(reading: Reading, sample: int, index: int, call: Called) -> ToolCall:
    call_id = reading.call_id(call.name, index, call.id, sample)
    if call.name not in reading.custom:
        return ToolCall(call_id, CalledFunction(call.name, call.arguments))
    custom = CustomInput(custom_tools.input_of(call.arguments), call.name)
    return ToolCall(call_id, type="custom", custom=custom)


class ChatAnswer:
    """Writes a call as an answer of /v1/chat/completions."""

    def __init__(self, service: Service, body: ChatRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._opened = False
        self._readers: dict[int, OutputReader] = {}
        self._scores: dict[int, AnswerLogprobs] = {}
        self._calling: set[int] = set()
        # Of each sample: the arguments of an open call of a custom tool.
        self._inputs: dict[int, list[str]] = {}
        self._thoughts: dict[int, list[str]] = {}
        self._service = service
        same = bool(body.messages) and body.messages[-1].get("role") == service.config.response_role
        self._role = service.config.response_role
        self._echo = last_text(body.messages) if body.echo and same else ""
        as_ids = body.return_tokens_as_token_ids
        as_ids = service.config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._names = TokenNames(service.front.tokenizer, as_ids, asked=body.logprob_token_ids)
        self._usage = UsageReport(service.config, body)

    def whole(self) -> bytes:
        stream, body = self.call.streams[0], self._body
        choices = [self._choice(sample) for sample in stream.output.outputs]
        usage = self._usage.of(self.call.usage, self._num_reasoning())
        answer = ChatCompletion(self.call.id, self.call.created, self._model, choices, usage)
        answer.metrics = self._usage.metrics(self.call)
        answer.system_fingerprint = self.call.fingerprint
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(stream) or []
        if body.return_token_ids:
            answer.prompt_token_ids = stream.request.tokens
        if body.return_prompt_text:
            answer.prompt_text = stream.output.prompt
        return _encode(answer)

    def _num_reasoning(self) -> int:
        """How many tokens of the output are reasoning; 0 if reasoning is not told apart."""
        most = self.call.usage.num_output
        return sum(self._service.num_tokens("".join(parts), most) for parts in self._thoughts.values())

    def _choice(self, sample: CompletionOutput) -> ChatChoice:
        message = self._message(sample)
        length = len(message.content or "") - len(self._echo)
        choice = ChatChoice(
            sample.index,
            message,
            self._logprobs(sample.index, sample.token_ids, sample.logprobs, length),
            _reason(sample.finish_reason, bool(message.tool_calls)),
            sample.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = sample.token_ids
        return choice

    def _message(self, sample: CompletionOutput) -> AnswerMessage:
        reading, text = self.call.reading, sample.text
        if reading is None:
            return AnswerMessage(self._role, self._echo + text)
        reader, parsed = self._reader(reading, sample.index), Parsed()
        parsed.add(reader.feed(text) + reader.finish())
        message = AnswerMessage(self._role, self._echo + parsed.content)
        self._thoughts[sample.index] = [parsed.reasoning]
        if parsed.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if parsed.calls:
            message.content = message.content or None
            message.tool_calls = [_called(reading, sample.index, i, c) for i, c in enumerate(parsed.calls)]
        return message

    def _logprobs(
        self, index: int, tokens: list[int], steps: list[Any] | None, length: int
    ) -> ChatLogprobs | None:
        """Take the next tokens of a sample, whose content grows by `length` characters."""
        if not self._body.logprobs:
            return None
        if index not in self._scores:
            top, reader = self._body.top_logprobs or 0, self._readers.get(index)
            self._scores[index] = AnswerLogprobs(self.call.streams[0], index, self._names, top, reader)
        self._scores[index].add(tokens, steps or [])
        return ChatLogprobs(self._scores[index].of(length))

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        if not self._opened and (pieces or self._body.prompt_logprobs is None):  # which come in parts
            self._opened = True
            chunks += [self._opening(i) for i in range(self._body.n or 1)]
        chunks += [self._piece(piece) for piece in pieces]
        if self._body.return_progress and not pieces:
            chunk = self._chunk([], self._usage.at_start(self.call.usage))
            chunk.prompt_progress = self._usage.progress(self.call)
            chunks.append(event(chunk))
        return b"".join(chunks)

    def end(self) -> bytes:
        metrics = self._usage.metrics(self.call)
        if not self._usage.in_end and metrics is None:
            return DONE
        usage = self._usage.of(self.call.usage, self._num_reasoning()) if self._usage.in_end else UNSET
        chunk = self._chunk([], usage)
        if metrics is not None:
            chunk.metrics = metrics
        return event(chunk) + DONE

    def _opening(self, index: int) -> bytes:
        """The first chunk of a sample: the role, and the echoed text."""
        chunk = self._chunk(
            [ChatChunkChoice(index, ChatDelta(self._role, self._echo))], self._usage.at_start(self.call.usage)
        )
        stream = self.call.streams[0]
        if self._body.prompt_logprobs is not None and index == 0:
            chunk.prompt_logprobs = prompt_logprobs(stream) or []
        if self._body.return_token_ids and index == 0:
            chunk.prompt_token_ids = stream.request.tokens
        if self._body.return_prompt_text and index == 0:
            chunk.prompt_text = stream.output.prompt
        return event(chunk)

    def _piece(self, piece: Piece) -> bytes:
        chunk = piece.chunk
        choice = ChatChunkChoice(chunk.index, self._delta(chunk))
        if self._body.logprobs:
            length = len(choice.delta.content or "")
            scores = self._logprobs(chunk.index, chunk.token_ids, chunk.logprobs, length)
            choice.logprobs = scores if scores and scores.content else None
        ended = chunk.finish_reason is not None
        if self._body.return_token_ids:
            choice.token_ids = chunk.token_ids
        elif choice.delta == _NOTHING and not ended and not choice.logprobs:
            return b""  # the reader holds this text back until it knows what it belongs to
        events = b""
        if ended and choice.delta != _NOTHING:  # some clients drop the text of a chunk with a finish reason
            events = event(self._chunk([choice], self._usage.in_chunk(lambda: self.call.usage)))
            choice = ChatChunkChoice(chunk.index, ChatDelta())
            if self._body.return_token_ids:
                choice.token_ids = []
        if ended:
            choice.finish_reason = _reason(chunk.finish_reason, chunk.index in self._calling)
            choice.stop_reason = chunk.stop_reason
        return events + event(self._chunk([choice], self._usage.in_chunk(lambda: self.call.usage)))

    def _reader(self, reading: Reading, index: int) -> OutputReader:
        """Return the reader of a sample, made at its first text."""
        if index not in self._readers:
            self._readers[index] = reading.parser(bool(self._body.logprobs))
        return self._readers[index]

    def _delta(self, chunk: Chunk) -> ChatDelta:
        """The content, reasoning and calls that become known with this chunk."""
        reading, index = self.call.reading, chunk.index
        if reading is None:
            return ChatDelta(content=chunk.text) if chunk.text or chunk.finish_reason is None else ChatDelta()
        reader = self._reader(reading, index)
        events = reader.feed(chunk.text)
        if chunk.finish_reason is not None:
            events += reader.finish()
        parsed = Parsed()
        delta = ChatDelta()
        calls: list[ToolCallDelta] = []
        for part in events:
            if isinstance(part, CallStart):
                self._calling.add(index)
                call = ToolCallDelta(part.index, id=reading.call_id(part.name, part.index, part.id, index))
                calls.append(call)
                if part.name in reading.custom:
                    self._inputs[index] = []
                    call.type, call.custom = "custom", CustomInput("", part.name)
                else:
                    call.type, call.function = "function", FunctionDelta("", part.name)
            elif isinstance(part, CallArguments) and index in self._inputs:
                self._inputs[index].append(part.text)
            elif isinstance(part, CallArguments):
                last = calls[-1] if calls and calls[-1].index == part.index else None
                if last is not None and isinstance(last.function, FunctionDelta):
                    last.function.arguments += part.text
                else:
                    calls.append(ToolCallDelta(part.index, FunctionDelta(part.text)))
            elif isinstance(part, CallEnd):
                if index in self._inputs:  # the text is known at the end
                    text = custom_tools.input_of("".join(self._inputs.pop(index)))
                    calls.append(ToolCallDelta(part.index, custom=CustomInput(text)))
            else:
                parsed.add([part])
        if parsed.content:
            delta.content = parsed.content
        if parsed.reasoning:
            self._thoughts.setdefault(index, []).append(parsed.reasoning)
        if parsed.reasoning and self._body.include_reasoning:
            delta.reasoning_content = delta.reasoning = parsed.reasoning
        if calls:
            delta.tool_calls = calls
        return delta

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any) -> ChatChunk:
        call = self.call
        return ChatChunk(
            call.id, call.created, self._model, choices, usage=usage, system_fingerprint=call.fingerprint
        )

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE
