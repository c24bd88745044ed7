"""Builds results with text from the Deltas of a request. Knows no scheduler and no model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import msgspec

from quire.client.metrics import RequestTimes
from quire.errors import QuireError
from quire.lazy import Lazy
from quire.text.detok import Detokenizer, token_text
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage

if TYPE_CHECKING:
    from quire.client import logprobs
    from quire.client.logprobs import Logprob
    from quire.text.stop_strings import Narrow
else:
    logprobs = Lazy("quire.client.logprobs")


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `logprobs` has an entry per token: a map from token id to its Logprob."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # or FlatLogprobs, which reads like this list
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability per token, by which samples are ranked; 0.0 if none was asked for."""
        return (self.cumulative_logprob or 0.0) / max(1, len(self.token_ids))


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request; names are vLLM's. `arrival_time` is on the wall clock, all others are in seconds of
    `time.perf_counter`; 0.0 or None if not yet.
    """

    arrival_time: float
    num_generation_tokens: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_time: float | None = None

    @property
    def first_token_latency(self) -> float:
        """Seconds from the queue to the first token; 0.0 if not yet."""
        return max(0.0, self.first_token_ts - self.queued_ts)

    @property
    def first_token_time(self) -> float | None:
        return self.first_token_ts or None

    @property
    def last_token_time(self) -> float | None:
        return self.last_token_ts or None

    @property
    def first_scheduled_time(self) -> float | None:
        return self.scheduled_ts or None

    @property
    def time_in_queue(self) -> float | None:
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None


@dataclass(slots=True)
class RequestOutput:
    """The result of a request so far. Names are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # of the prompt, reported before the first token with return_progress
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_token_id_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return all(o.finished for o in self.outputs)


@dataclass(slots=True)
class Chunk:
    """The new part of one sample: text that is safe to show, and the new tokens.

    `abort` asks the caller to end the sample in the engine, which cannot see that a stop string was found.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    abort: bool = False
    error: QuireError | None = None


class OutputStream:
    """Builds the output of one request: `push` each Delta in order, read `output` at any time.

    Without a tokenizer, or with detokenize=False, texts stay empty and stop strings are not available.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, stops: Narrow | None = None
    ) -> None:
        params = request.sampling
        self.request = request
        self._stops = stops
        self._tokenizer = tokenizer if params.detokenize else None
        first = self._new_detokenizer()
        self._detok = [first if first is None or not i else first.twin() for i in range(params.n)]
        self.output = RequestOutput(
            request.id, prompt, request.tokens, [CompletionOutput(i) for i in range(params.n)]
        )
        self.failure: QuireError | None = None  # what ended it early
        self.times: RequestTimes | None = None  # the engine's, if known
        self._num_open = params.n
        self._drafted = [(0, 0)] * params.n  # tokens of drafts accepted and rejected
        self._num_accepted = self._num_rejected = 0  # of all samples
        self._shown = [(0, 0)] * params.n  # characters and tokens that new_part has returned
        self._metrics = self.output.metrics = RequestMetrics(request.arrival, queued_ts=time.perf_counter())
        if params.wants_logprobs:
            for sample in self.output.outputs:
                sample.logprobs = cast(Any, logprobs.FlatLogprobs()) if params.flat_logprobs else []
                sample.cumulative_logprob = 0.0

    def _new_detokenizer(self) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer.for_sampling(
            self._tokenizer, self.request.sampling, self.request.tokens, self._stops
        )

    @property
    def finished(self) -> bool:
        return not self._num_open

    @property
    def usage(self) -> Usage:
        """Token counts of the whole request."""
        return Usage(
            len(self.request.tokens),
            self.output.num_cached_tokens,
            self._metrics.num_generation_tokens,
            self._num_accepted,
            self._num_rejected,
        )

    def snapshot(self) -> RequestOutput:
        """Copy the output so far, so that later tokens do not change it."""
        output = self.output
        return replace(
            output, outputs=[replace(sample, token_ids=list(sample.token_ids)) for sample in output.outputs]
        )

    def new_part(self) -> RequestOutput:
        """Reduce `output` to what is new since the last call."""
        parts = []
        for i, sample in enumerate(self.output.outputs):
            text, tokens = self._shown[i]
            self._shown[i] = len(sample.text), len(sample.token_ids)
            logprobs = None if sample.logprobs is None else sample.logprobs[tokens:]
            part = replace(
                sample, text=sample.text[text:], token_ids=sample.token_ids[tokens:], logprobs=logprobs
            )
            parts.append(part)
        return replace(self.output, outputs=parts)

    def parts(self, delta: Delta) -> Iterable[Delta]:
        """Split `delta` into the parts to push: single tokens if a stop string may end the text between them."""
        return _by_token(delta) if self.request.sampling.stop else (delta,)

    def push(self, delta: Delta) -> Chunk | None:
        """Take one Delta; returns the new part, or None after the end of the sample."""
        sample = self.output.outputs[delta.index]
        if sample.finished:
            return None
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.usage.num_cached)
        self._count_drafts(delta)
        if delta.prompt_logprobs:
            self._add_prompt_logprobs(delta.prompt_logprobs)
        finish = None if delta.finish_reason is None else delta.finish_reason.value
        stop_reason: int | str | None = delta.stop_reason
        if delta.finish_reason is FinishReason.REPETITION:
            stop_reason = "repetition_detected"
        text, stopped = self._new_text(delta)
        if stopped is not None:
            finish, stop_reason = FinishReason.STOP.value, stopped
        logprobs = self._new_logprobs(sample, delta)
        sample.text += text
        sample.token_ids += delta.tokens
        sample.finish_reason, sample.stop_reason = finish, stop_reason
        if delta.error is not None:
            self.output.error, self.failure = delta.error, delta.failure
        if delta.tokens:
            self._metrics.last_token_ts = time.perf_counter()
            self._metrics.first_token_ts = self._metrics.first_token_ts or self._metrics.last_token_ts
            self._metrics.num_generation_tokens += len(delta.tokens)
        else:
            self.output.num_computed_tokens = delta.usage.num_computed
        if finish is not None:
            self._num_open -= 1
            self._metrics.finished_time = time.perf_counter()
            self._metrics.scheduled_ts = 0.0 if self.times is None else self.times.scheduled
        abort = stopped is not None and delta.finish_reason is None
        return Chunk(delta.index, text, delta.tokens, logprobs, finish, stop_reason, abort, delta.failure)

    def offsets(self, index: int, first: int, count: int) -> list[int]:
        """Return where tokens of a sample begin in its text. A token that ends it, and what follows, is not in it."""
        detok = self._detok[index]
        return [] if detok is None else detok.offsets[first : first + count]

    def shows(self, token: int) -> bool:
        """Whether texts show anything of a token."""
        return self._detok[0] is not None and self._detok[0].shows(token)

    def _count_drafts(self, delta: Delta) -> None:
        accepted, rejected = self._drafted[delta.index]
        counts = self._drafted[delta.index] = delta.usage.num_accepted, delta.usage.num_rejected
        self._num_accepted += counts[0] - accepted
        self._num_rejected += counts[1] - rejected

    def _new_text(self, delta: Delta) -> tuple[str, str | None]:
        """Return the text that is now safe to show, and the stop string that was found, if any."""
        detok = self._detok[delta.index]
        if detok is None:
            return "", None
        tokens = delta.tokens
        ended_by_token = delta.finish_reason is FinishReason.STOP and not delta.complete
        if ended_by_token and not self.request.sampling.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that ended the sample is not part of its text
        text = detok.push(tokens)
        if detok.stopped is None and delta.finish_reason is not None:
            text += detok.finish()
        return text, detok.stopped

    def _new_logprobs(self, sample: CompletionOutput, delta: Delta) -> list[dict[int, Logprob]] | None:
        if sample.logprobs is None:
            return None
        entries = [self._entry(t) for t in delta.logprobs or ()]
        sample.logprobs += entries
        total = sample.cumulative_logprob or 0.0
        for scores in delta.logprobs or ():  # one by one: the sum does not depend on how many come at once
            total += scores.logprob
        sample.cumulative_logprob = total
        return entries

    def _add_prompt_logprobs(self, scores: list[TokenLogprobs]) -> None:
        params, output = self.request.sampling, self.output
        unscored: list[dict[int, Logprob] | None] = [None] * (self.request.scored_from + 1)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = output.prompt_logprobs or unscored.copy()
            output.prompt_logprobs += [self._entry(t) for t in scores]
        if params.prompt_logprob_token_ids is not None:
            output.prompt_token_id_logprobs = output.prompt_token_id_logprobs or unscored.copy()
            output.prompt_token_id_logprobs += [self._asked(t) for t in scores]

    def _entry(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        """Enter the token itself, then the most likely ones, in vLLM's order."""
        make = logprobs.Logprob
        entry = {scores.token: make(scores.logprob, scores.rank, self.token_text(scores.token))}
        for rank, (token, logprob) in enumerate(zip(scores.top_ids, scores.top, strict=True), 1):
            entry.setdefault(token, make(logprob, rank, self.token_text(token)))
        if scores.asked and self.request.sampling.logprob_token_ids:
            for token, named in self._asked(scores).items():
                entry.setdefault(token, named)
        return entry

    def _asked(self, scores: TokenLogprobs) -> dict[int, Logprob]:
        """Enter the tokens that the request names."""
        make = logprobs.Logprob
        return {token: make(logprob, rank, self.token_text(token)) for token, logprob, rank in scores.asked}

    def token_text(self, token: int) -> str | None:
        """Decode one token on its own; None without a tokenizer."""
        return None if self._tokenizer is None else token_text(self._tokenizer, token)


def _by_token(delta: Delta) -> Iterator[Delta]:
    """Split a delta by token, so that the cut at a stop string does not depend on how deltas were merged."""
    last = len(delta.tokens) - 1
    if last < 1:
        yield delta
        return
    for i, token in enumerate(delta.tokens):
        yield msgspec.structs.replace(
            delta,
            tokens=[token],
            logprobs=None if delta.logprobs is None else delta.logprobs[i : i + 1],
            prompt_logprobs=delta.prompt_logprobs if i == 0 else None,
            finish_reason=delta.finish_reason if i == last else None,
            stop_reason=delta.stop_reason if i == last else None,
            error=delta.error if i == last else None,
            complete=delta.complete and i == last,
        )
