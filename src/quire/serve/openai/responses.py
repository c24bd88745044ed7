"""/v1/responses: OpenAI's newer API, for text. Nothing is stored: every call sends its whole conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from quire.client.outputs import CompletionOutput
from quire.lazy import Lazy
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid, named
from quire.serve.openai.chat_protocol import ChatRequest
from quire.serve.openai.conversation import count_tokens, make_prompt
from quire.serve.openai.logprobs import AnswerLogprobs, TokenLogprob, TokenNames
from quire.serve.openai.protocol import DrawFields
from quire.serve.openai.responses_protocol import (
    RESPONSE_TOKENS,
    RESPONSES,
    InputDetails,
    InputTokens,
    OutputCall,
    OutputCustomCall,
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
from quire.serve.openai.structured import text_format
from quire.serve.output_items import Change, Item, Items
from quire.serve.service import Service
from quire.serve.stream import event

if TYPE_CHECKING:
    from quire.serve import custom_tools
    from quire.serve.openai import responses_input
    from quire.serve.openai.responses_input import Tools
else:
    custom_tools = Lazy("quire.serve.custom_tools")
    responses_input = Lazy("quire.serve.openai.responses_input")

_encode = msgspec.json.Encoder().encode
_LOGPROBS = "message.output_text.logprobs"


async def respond(service: Service, http: HttpRequest) -> ResponseAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, RESPONSES)
    model = service.check_model(body.model)
    _check(body)
    call_id = service.new_id("resp_", http, body.request_id)
    tools = responses_input.tools_of(body.tools or (), body.tool_choice, body.input)
    with named({"max_tokens": "max_output_tokens"}):
        prompt = await service.work(http, lambda: _make(service, body, tools, call_id), renders=True)
    for name in tools.dropped:
        service.notice(http, name)
    return ResponseAnswer(service, body, tools, model, await service.start(http, call_id, [prompt], model))


async def count_input(service: Service, http: HttpRequest) -> bytes:
    """/v1/responses/input_tokens: the length of an input as a prompt."""
    body = await service.read(http, RESPONSE_TOKENS)
    service.check_model(body.model)
    _check(body)
    tools = responses_input.tools_of(body.tools or (), body.tool_choice, body.input)
    count = await service.work(http, lambda: count_tokens(service, _conversation(body, tools)), renders=True)
    return _encode(InputTokens(count))


def _check(body: ResponsesRequest) -> None:
    if body.truncation not in (None, "auto", "disabled"):
        raise invalid("truncation must be auto or disabled", "truncation", "invalid_value")
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise invalid("reasoning.effort must be a text", "reasoning.effort", "invalid_type")
    text = body.text or {}
    if not isinstance(text.get("format", {}), dict):
        raise invalid("text.format must be an object", "text.format", "invalid_type")
    if not isinstance(text.get("verbosity"), str | None):
        raise invalid("text.verbosity must be a text", "text.verbosity", "invalid_type")


def _conversation(body: ResponsesRequest, tools: Tools) -> ChatRequest:
    """The input as a chat."""
    wanted = (body.text or {}).get("format")
    given = {name: getattr(body, name) for name in DrawFields.__struct_fields__}
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        given["truncate_prompt_tokens"] = -1
    return ChatRequest(
        messages=responses_input.messages_of(body.input, body.instructions, tools.dropped),
        stop=body.stop,
        tools=tools.functions,
        tool_choice=responses_input.choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=(body.reasoning or {}).get("effort"),
        verbosity=(body.text or {}).get("verbosity"),
        chat_template_kwargs=body.chat_template_kwargs,
        response_format=text_format(wanted) if wanted is not None else None,
        **given,
    )


def _make(service: Service, body: ResponsesRequest, tools: Tools, call_id: str) -> Prompt:
    chat, logprobs = _conversation(body, tools), (body.top_logprobs or 0) if _scored(body) else None
    return make_prompt(service, chat, call_id, body.max_output_tokens, logprobs, "text")


def _scored(body: ResponsesRequest) -> bool:
    return _LOGPROBS in (body.include or []) or bool(body.top_logprobs)


class ResponseAnswer:
    """Writes a call as an answer of /v1/responses; reasoning, messages and function calls are output items."""

    def __init__(
        self, service: Service, body: ResponsesRequest, tools: Tools, model: str, call: Call
    ) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._custom, self._spaces = tools.custom, tools.spaces
        self._items = Items(call.reading, call.source, _scored(body))
        self._scores: AnswerLogprobs | None = None
        if _scored(body):
            names = TokenNames(service.front.tokenizer, False, body.logprob_token_ids)
            top = body.top_logprobs or 0
            self._scores = AnswerLogprobs(call.streams[0], 0, names, top, self._items.reader)
        self._logprobs: dict[int, list[TokenLogprob]] = {}  # of each text, by its index
        self._service = service
        self._sequence = 0

    @property
    def _sampling(self) -> Any:
        return self.call.streams[0].request.sampling

    @property
    def _sample(self) -> CompletionOutput:
        return self.call.streams[0].output.outputs[0]

    def whole(self) -> bytes:
        items = self._items.whole(self._sample.text)
        self._score(self._sample.token_ids, self._sample.logprobs)
        for item in items:
            self._score_text(item, item.text)
        return _encode(self._finished(items))

    def _score(self, tokens: list[int], steps: Any) -> None:
        if self._scores is not None:
            self._scores.add(tokens, steps or [])

    def _score_text(self, item: Item, text: str) -> list[TokenLogprob]:
        """Return the log-probabilities of the next part of a text."""
        if self._scores is None or item.kind != "text":
            return []
        found = self._scores.of(len(text))
        self._logprobs.setdefault(item.index, []).extend(found)
        return found

    def _object(self, status: str, output: list[OutputItem]) -> ResponseObject:
        body = self._body
        return ResponseObject(
            self.call.id,
            self.call.created,
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
            truncation=body.truncation or "disabled",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning,
            system_fingerprint=self.call.fingerprint,
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
            OutputDetails(self._service.num_tokens(reasoning, usage.num_output)),
            usage.num_prompt + usage.num_output,
        )
        return answer

    def _item(self, item: Item, cut: bool) -> OutputItem:
        status = "incomplete" if cut else "completed"
        space, name = self._spaces.get(item.name, (UNSET, item.name))
        if item.kind == "call" and item.name in self._custom:
            return OutputCustomCall(
                f"ctc_{item.id}", item.call_id, name, custom_tools.input_of(item.text), status, space
            )
        if item.kind == "call":
            return OutputCall(f"fc_{item.id}", item.call_id, name, item.text, status, space)
        if item.kind == "reasoning":
            return OutputReasoning(f"rs_{item.id}", [ReasoningText(item.text)], status)
        text = OutputText(item.text, [], self._logprobs.get(item.index, []))
        return OutputMessage(f"msg_{item.id}", [text], status)

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
            self._score(piece.chunk.token_ids, piece.chunk.logprobs)
            chunks += self._changed(self._items.feed(piece.chunk.text))
        return b"".join(chunks)

    def _changed(self, changes: list[Change]) -> list[bytes]:
        makers = {"open": self._opened, "grow": self._grown, "close": self._closed}
        return [data for change in changes for data in makers[change.what](change.item, change.text)]

    def _place(self, item: Item) -> dict[str, Any]:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[item.kind]
        prefix = "ctc" if item.kind == "call" and item.name in self._custom else prefix
        place = {"item_id": f"{prefix}_{item.id}", "output_index": item.index}
        return place if item.kind == "call" else {**place, "content_index": 0}

    def _opened(self, item: Item, text: str) -> list[bytes]:
        shown = self._item(Item(item.kind, item.index, item.name, item.call_id, id=item.id), False)
        shown.status = "in_progress"
        part = None if isinstance(shown, OutputCall | OutputCustomCall) else shown.content.pop()
        events = [self._event("response.output_item.added", output_index=item.index, item=shown)]
        if part is not None:
            events.append(self._event("response.content_part.added", **self._place(item), part=part))
        return events

    def _grown(self, item: Item, text: str) -> list[bytes]:
        if item.kind == "call" and item.name in self._custom:
            return []  # the text of its input is known at the end
        if item.kind != "text":
            name = "function_call_arguments" if item.kind == "call" else "reasoning_text"
            return [self._event(f"response.{name}.delta", **self._place(item), delta=text)]
        fields = {**self._place(item), "delta": text, "logprobs": self._score_text(item, text)}
        return [self._event("response.output_text.delta", **fields)]

    def _closed(self, item: Item, text: str) -> list[bytes]:
        place, cut = self._place(item), self._sample.finish_reason == "length"
        shown = self._item(item, cut)
        done = self._event
        if isinstance(shown, OutputCustomCall):
            events = [done("response.custom_tool_call_input.delta", **place, delta=shown.input)]
            events.append(done("response.custom_tool_call_input.done", **place, input=shown.input))
        elif isinstance(shown, OutputCall):
            called = {"name": shown.name, "arguments": item.text}
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
