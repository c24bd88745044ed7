"""/v1/completions: prompts in every form, echo, logprobs, parallel samples, streaming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest

from quire.client.outputs import CompletionOutput, OutputStream
from quire.params import SamplingParams
from quire.serve.call import Call, Piece, Prompt
from quire.serve.errors import HttpError, invalid
from quire.serve.openai.infill import infill
from quire.serve.openai.logprobs import (
    CompletionLogprobs,
    TokenNames,
    completion_logprobs,
    prompt_logprobs,
    shown_prompt,
)
from quire.serve.openai.protocol import COMPLETIONS, Completion, CompletionChoice, CompletionRequest
from quire.serve.openai.sampling import sampling_params, truncated
from quire.serve.openai.structured import constrained_by
from quire.serve.openai.texts import MAX_PROMPTS, split_prompts
from quire.serve.openai.usage import UsageReport
from quire.serve.service import Service
from quire.serve.stream import DONE, event
from quire.types import Usage

DEFAULT_MAX_TOKENS = 16
MAX_BEST_OF = 20  # OpenAI's limit
MAX_TURN = 256  # tokens at the end of a prompt that may tell whether it has begun the reasoning
_encode = msgspec.json.Encoder().encode


async def complete(service: Service, http: HttpRequest) -> CompletionAnswer:
    """Read, check and queue a call. Raises HttpError, RequestError or OverloadedError."""
    body = await service.read(http, COMPLETIONS)
    model, call = await queue(service, http, body)
    return CompletionAnswer(service, body, model, call)


async def queue(service: Service, http: HttpRequest, body: CompletionRequest) -> tuple[str, Call]:
    """Check and queue a body: the model for the answer, and the call."""
    model = service.check_model(body.model)
    if body.best_of is not None:
        if not (body.n or 1) <= body.best_of <= MAX_BEST_OF:
            raise invalid(f"best_of must be from n to {MAX_BEST_OF}", "best_of", "invalid_value")
        if body.stream and body.best_of != (body.n or 1):
            raise invalid("best_of ranks whole samples: leave stream out", "best_of", "invalid_value")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is for stream=true", "stream_options", "invalid_value")
    prompts = split_prompts(body.prompt)
    if len(prompts) * (body.best_of or body.n or 1) > MAX_PROMPTS:
        raise invalid(f"one call makes at most {MAX_PROMPTS} samples", "n", "invalid_value")
    call_id = service.new_id("cmpl-", http, body.request_id)

    def make() -> list[Prompt]:
        params = _params(service, body)
        return [_make(service, body, params, prompt, call_id) for prompt in prompts]

    made = await service.work(http, make)
    return model, await service.start(http, call_id, made, model)


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the step that scores the prompt also samples a token, which the answer omits
    params = sampling_params(service.front, body, max_tokens, body.logprobs)
    params.return_progress = body.return_progress and bool(body.stream)
    if body.best_of is not None and body.best_of > params.n:
        params = msgspec.structs.replace(params, n=body.best_of, logprobs=body.logprobs or 0)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return params


def _make(
    service: Service, body: CompletionRequest, params: SamplingParams, prompt: str | list[int], call_id: str
) -> Prompt:
    front = service.front
    special = True if body.add_special_tokens is None else body.add_special_tokens
    if body.suffix:
        if not isinstance(prompt, str):
            raise invalid("suffix needs a prompt that is text", "suffix", "invalid_value")
        tokens = infill(front, prompt, body.suffix, special)
    else:
        tokens = front.encode(prompt, special) if isinstance(prompt, str) else prompt
    kept = truncated(tokens, body, params.max_tokens, front.info.max_model_len)
    request = front.request(
        service.next_request_id(call_id), kept, params, priority=body.priority, salt=body.cache_salt or ""
    )
    text = prompt if isinstance(prompt, str) else None
    if body.echo and (text is None or len(kept) < len(tokens)):
        text = service.text_of(kept)
    reading = service.formats.thoughts(lambda: service.text_of(kept[-MAX_TURN:])) if params.stop else None
    return Prompt(request, text, constrained_by(body), reading)


class CompletionAnswer:
    """Writes a call as an answer of /v1/completions. Choice i of prompt p has index p * n + i."""

    def __init__(self, service: Service, body: CompletionRequest, model: str, call: Call) -> None:
        self.call = call
        self.streaming = bool(body.stream)
        self._body = body
        self._model = model
        self._n = body.n or 1
        self._scores_only = bool(body.echo) and body.max_tokens == 0
        as_ids = body.return_tokens_as_token_ids
        as_ids = service.config.return_tokens_as_token_ids if as_ids is None else as_ids
        self._tokenizer = service.front.tokenizer
        self._names = TokenNames(self._tokenizer, as_ids, body.logprob_token_ids)
        self._usage = UsageReport(service.config, body)
        self._num_scored: dict[int, int] = {}  # tokens of each choice
        self._unseen = set(range(len(call.streams) * self._n))

    def whole(self) -> bytes:
        choices = [
            self._choice(position, stream, sample)
            for position, stream in enumerate(self.call.streams)
            for sample in best(stream.output.outputs, self._n)
        ]
        answer = self._chunk(choices, self._usage.of(self._counts))
        answer.metrics = self._usage.metrics(self.call)
        return _encode(answer)

    def _choice(self, position: int, stream: OutputStream, sample: CompletionOutput) -> CompletionChoice:
        body, echo = self._body, bool(self._body.echo)
        tokens = [] if self._scores_only else sample.token_ids
        text = "" if self._scores_only else sample.text
        logprobs = None
        if body.logprobs is not None:
            steps: list[Any] = list(sample.logprobs or [])[: len(tokens)]
            logprobs = self._logprobs(stream, sample.index, tokens, steps, 0, echo)
        choice = CompletionChoice(
            position * self._n + sample.index,
            (stream.output.prompt or "") + text if echo else text,
            logprobs,
            "length" if self._scores_only else sample.finish_reason,
            None if self._scores_only else sample.stop_reason,
        )
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(stream) or []
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = tokens, stream.request.tokens
        return choice

    def _logprobs(
        self,
        stream: OutputStream,
        index: int,
        tokens: list[int],
        steps: list[Any],
        first: int,
        with_prompt: bool,
    ) -> CompletionLogprobs:
        """Describe the tokens of a sample from number `first` on, after those of the prompt that the text shows."""
        offsets = stream.offsets(index, first, len(tokens))
        offsets += [len(stream.output.outputs[index].text)] * (len(tokens) - len(offsets))
        prompt, text = stream.request.tokens, (stream.output.prompt or "") if self._body.echo else ""
        offsets = [offset + len(text) for offset in offsets]
        if with_prompt:
            places, shown = [0] * len(prompt), range(len(prompt))
            if self._tokenizer is not None:
                places, shown = shown_prompt(self._tokenizer, prompt, text)
            scored = stream.output.prompt_logprobs or [None] * len(prompt)
            tokens = [prompt[i] for i in shown] + tokens
            steps = [scored[i] for i in shown] + steps
            offsets = [places[i] for i in shown] + offsets
        return completion_logprobs(steps, tokens, offsets, self._body.logprobs or 0, self._names)

    def step(self, pieces: list[Piece]) -> bytes:
        chunks = []
        for piece in pieces:
            index = piece.prompt * self._n + piece.chunk.index
            choice = self._piece(piece, index, index in self._unseen)
            self._unseen.discard(index)
            if choice.finish_reason is not None and choice.text:
                # Some clients drop the text of a chunk with a finish reason.
                last = CompletionChoice(index, "", None, choice.finish_reason, choice.stop_reason)
                if self._body.return_token_ids:
                    last.token_ids = []
                if choice.logprobs is not None:
                    last.logprobs = CompletionLogprobs([], [], [], [])
                choice.finish_reason = choice.stop_reason = None
                chunks.append(event(self._chunk([choice], self._usage.in_chunk(lambda: self._counts))))
                choice = last
            chunks.append(event(self._chunk([choice], self._usage.in_chunk(lambda: self._counts))))
        if self._body.return_progress and not pieces:
            chunk = self._chunk([], self._usage.in_chunk(lambda: self._counts))
            chunk.prompt_progress = self._usage.progress(self.call)
            chunks.append(event(chunk))
        return b"".join(chunks)

    def end(self) -> bytes:
        metrics = self._usage.metrics(self.call)
        if not self._usage.in_end and metrics is None:
            return DONE
        chunk = self._chunk([], self._usage.of(self._counts) if self._usage.in_end else UNSET)
        chunk.metrics = metrics
        return event(chunk) + DONE

    def _piece(self, piece: Piece, index: int, first: bool) -> CompletionChoice:
        body, chunk = self._body, piece.chunk
        stream = self.call.streams[piece.prompt]
        echo = first and bool(body.echo)
        text = "" if self._scores_only else chunk.text
        tokens = [] if self._scores_only else chunk.token_ids
        finish = chunk.finish_reason
        choice = CompletionChoice(index, text, None, finish, chunk.stop_reason)
        if self._scores_only:
            choice.finish_reason, choice.stop_reason = "length", None
        if body.logprobs is not None:
            scored = self._num_scored.get(index, 0)
            self._num_scored[index] = scored + len(tokens)
            steps = [] if self._scores_only else list(chunk.logprobs or [])
            choice.logprobs = self._logprobs(stream, chunk.index, tokens, steps, scored, echo)
        if echo:
            choice.text = (stream.output.prompt or "") + text
        if body.return_token_ids:
            choice.token_ids = tokens
            if first:
                choice.prompt_token_ids = stream.request.tokens
        if body.prompt_logprobs is not None and first:
            choice.prompt_logprobs = prompt_logprobs(stream) or []
        return choice

    def error_event(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + DONE

    def _chunk(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        call = self.call
        return Completion(
            call.id, call.created, self._model, choices, usage=usage, system_fingerprint=call.fingerprint
        )

    @property
    def _counts(self) -> Usage:
        usage = self.call.usage
        return Usage(usage.num_prompt, usage.num_cached, 0) if self._scores_only else usage


def best(samples: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The `count` samples with the highest mean log-probability per token, best first, numbered anew."""
    if len(samples) <= count:
        return samples
    ranked = sorted(samples, key=lambda sample: sample.mean_logprob, reverse=True)
    return [replace(sample, index=index) for index, sample in enumerate(ranked[:count])]
