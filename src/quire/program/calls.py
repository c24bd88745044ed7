"""Gens, selects and prefixes of a program as requests of an engine core. Text becomes tokens here, and back.

Every request has the tokens of the whole text so far. So a program equals the same calls made one by one, whatever
its boundaries; the prefix cache finds what was computed before, to the token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.params import SamplingParams
from quire.program.core import Run
from quire.program.interpreter import Counts, Result
from quire.program.lane import StepError
from quire.program.selection import Decision, Entry, decide, kept
from quire.program.tasks import Signal, Tasks
from quire.program.texts import Encoder, Texts
from quire.steps import Gen, Select
from quire.text.detok import Detokenizer, token_text
from quire.text.tokenizer import Tokenizer
from quire.types import Delta, FinishReason, Request, TokenLogprobs

MAX_LIVE = 8  # choices of one select under way at a time
MAX_CHARACTERS = 8192  # of a text that is tokenized between two steps: a few ms

Show = Callable[[int, str], None]


class Calls:
    """The model as the steps of one program use it. `take` passes each delta to the request that it belongs to."""

    def __init__(
        self, run: Run, tasks: Tasks, encoder: Encoder, texts: Texts, gens: dict[int, Request]
    ) -> None:
        self.counts: Counts = (0, 0, 0)
        self._run, self._tasks, self._encoder, self._gens = run, tasks, encoder, gens
        self._texts, self._tokenizer = texts, texts.tokenizer
        self._open: dict[str, Generated | Scored] = {}
        self._numbers = itertools.count()

    def take(self, delta: Delta) -> None:
        """Take a delta of one of the requests. Raises StepError if it failed."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise StepError(delta.error or "a request was aborted")
        if delta.request_id in self._open:
            self._open[delta.request_id].take(delta)

    async def generate(self, text: str, gen: Gen, show: Show) -> Result:
        """Continue `text`."""
        template = self._gens[id(gen)]
        tokens = await self._encode(text)
        request = self._request(template, tokens, template.sampling, template.max_tokens)
        made = Generated(self._run, request, self._tokenizer, show, Signal(self._tasks))
        await self._whole(request, made)
        self._count(made.counts)
        return made.result(self._tokenizer if template.sampling.wants_logprobs else None)

    async def choose(self, text: str, select: Select, alone: bool) -> tuple[Decision, Counts]:
        """Score each choice after `text`, in a request of its own; the first one `alone`, to cache the text."""
        start = max(0, len(await self._encode(text)) - 2)
        rows = [await self._encode(text + choice) for choice in select.choices]
        scored = await self._score([(row, start) for row in rows], alone)
        entries = [kept(text, await self._entries(one)) for one in scored]
        counts = _total(one.counts for one in scored)
        bare: list[Sequence[float | None]] | None = None
        if select.choices_method == "unconditional_likelihood_normalized":
            ids = [[entry[1] for entry in row] for row in entries]
            several = [(row, 0) for row in ids if len(row) > 1]
            found = iter(await self._score(several))
            bare = [
                [None, *(e.logprob for e in next(found).entries)] if len(row) > 1 else [None] for row in ids
            ]
        return decide(select.choices_method, entries, bare), counts

    async def compute(self, text: str) -> None:
        """Compute `text`, so that requests that begin with it find it in the prefix cache."""
        if self._texts.caching:
            tokens = await self._encode(text)
            await self._score([(tokens, len(tokens) - 1)])

    # --- requests

    async def tokens(self, text: str) -> list[int]:
        """Tokenize a text, a long one beside the steps."""
        await self._tasks
        part = self._encoder.long_part(text, MAX_CHARACTERS)
        if part is not None:
            tokens: Signal[list[int]] = Signal(self._tasks)
            self._run.later(self._texts.beside(partial(self._tokenizer.encode, part)), tokens.set)
            self._encoder.learn(part, await tokens)
        return self._encoder.encode(text)

    async def _encode(self, text: str) -> list[int]:
        """Tokenize a text. Raises StepError if it has too many tokens."""
        found = await self.tokens(text)
        if not found:
            raise StepError("there is no text to continue: begin with a text step")
        if len(found) >= self._texts.max_model_len:
            raise StepError(
                f"the text has {len(found)} tokens, and this model's maximum context length is "
                f"{self._texts.max_model_len}, including at least one of output: shorten it"
            )
        return found

    def _request(
        self, template: Request, tokens: list[int], sampling: SamplingParams, max_tokens: int
    ) -> Request:
        program = self._run.request
        return msgspec.structs.replace(
            template,
            id=f"{program.id}/{next(self._numbers)}",
            tokens=tokens,
            sampling=sampling,
            max_tokens=max_tokens,
            adapter=program.adapter,
            adapter_path=program.adapter_path,
            priority=program.priority,
            salt=program.salt,
            owner=program.owner,
            arrival=program.arrival,
            program=None,
            gens=(),
        )

    async def _score(self, rows: Sequence[tuple[list[int], int]], alone: bool = False) -> list[Scored]:
        """Score the tokens of each row after its first ones, `start`; `alone`: the first row alone.

        Few rows are under way at a time, so that other requests get their turns.
        """
        found: list[Scored] = []
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        template = msgspec.structs.replace(self._run.request, eos_token_ids=())
        waiting: list[tuple[Request, Scored]] = []
        for tokens, start in rows:
            request = self._request(template, tokens, sampling, 1)
            request = msgspec.structs.replace(request, scored_from=start)
            one = Scored(Signal(self._tasks))
            found.append(one)
            waiting.append((request, one))
        ends: list[Signal[None]] = []
        for place, (request, one) in enumerate(waiting):
            if place == 1 and alone:
                await ends[0]  # it leaves the common prefix in the cache
            elif place >= MAX_LIVE:
                await ends[place - MAX_LIVE]
            ends.append(self._tasks.start(self._whole(request, one)))
        for end in ends:
            await end
        for one in found:
            self._count(one.counts)
        return found

    async def _whole(self, request: Request, reader: Generated | Scored) -> None:
        self._open[request.id] = reader
        self._run.add(request)
        await reader.done
        del self._open[request.id]

    def _count(self, counts: Counts) -> None:
        self.counts = _total((self.counts, counts))

    async def _entries(self, scored: Scored) -> list[Entry]:
        await self._tasks
        return _entries(self._tokenizer, scored.entries)


class Scored:
    """Collects the log-probabilities of a prompt."""

    def __init__(self, done: Signal[None]) -> None:
        self.done = done
        self.entries: list[TokenLogprobs] = []
        self.counts: Counts = (0, 0, 0)

    def take(self, delta: Delta) -> None:
        self.entries += delta.prompt_logprobs or ()
        if delta.finish_reason is not None:
            self.counts = (delta.usage.num_prompt, delta.usage.num_cached, 0)
            self.done.set(None)


class Generated:
    """Collects the samples of a gen; ends those whose text holds a stop string."""

    def __init__(
        self, run: Run, request: Request, tokenizer: Tokenizer, show: Show, done: Signal[None]
    ) -> None:
        self.done = done
        self._run, self._request, self._show = run, request, show
        sampling = request.sampling
        self._stops = bool(sampling.stop)
        self._detok = [
            Detokenizer.for_sampling(tokenizer, sampling, request.tokens) for _ in range(sampling.n)
        ]
        self._texts = [""] * sampling.n
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(sampling.n)]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._reasons: dict[int, tuple[str, int | str | None]] = {}
        self._num_tokens = [0] * sampling.n
        self._num_cached = 0

    @property
    def counts(self) -> Counts:
        return len(self._request.tokens), self._num_cached, sum(self._num_tokens)

    def take(self, delta: Delta) -> None:
        """Take new tokens of a sample."""
        index, detok = delta.index, self._detok[delta.index]
        if index in self._reasons:
            return
        self._num_cached = max(self._num_cached, delta.usage.num_cached)
        self._prompt_logprobs += delta.prompt_logprobs or ()
        tokens = delta.tokens
        ended = delta.finish_reason is FinishReason.STOP and not delta.complete
        if ended and not self._request.sampling.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that ended the sample is not part of its text
        text = detok.push(tokens)
        if detok.stopped is None and delta.finish_reason is not None:
            text += detok.finish()
        count = len(delta.tokens) if detok.stopped is None else detok.num_tokens - self._num_tokens[index]
        self._num_tokens[index] += count
        self._logprobs[index] += (delta.logprobs or [])[:count]
        if text:
            self._texts[index] += text
            self._show(index, text)
        if detok.stopped is not None:
            self._reasons[index] = "stop", detok.stopped
            if delta.finish_reason is None:
                self._run.end_sample(self._request.id, index)
        elif delta.finish_reason is not None:
            self._reasons[index] = delta.finish_reason.value, delta.stop_reason
        if len(self._reasons) == self._request.sampling.n:
            self.done.set(None)

    def result(self, tokenizer: Tokenizer | None) -> Result:
        """Return the gen's texts; with a tokenizer, the log-probabilities too."""
        reason, matched = self._reasons[0]
        num_prompt, num_cached, num_output = self.counts
        meta: dict[str, Any] = {
            "id": self._request.id,
            "finish_reason": {"type": reason, "matched": matched} if matched else {"type": reason},
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "completion_tokens": num_output,
        }
        if tokenizer is not None:
            meta["output_token_logprobs"] = _entries(tokenizer, self._logprobs[0])
            if self._request.sampling.logprobs:
                meta["output_top_logprobs"] = [
                    [(p, t, token_text(tokenizer, t)) for t, p in zip(e.top_ids, e.top, strict=True)]
                    for e in self._logprobs[0]
                ]
            if self._request.sampling.scores_prompt:
                meta["input_token_logprobs"] = _entries(tokenizer, self._prompt_logprobs)
        return Result(self._texts, reason, self.counts, meta)


def _entries(tokenizer: Tokenizer, scored: Iterable[TokenLogprobs]) -> list[Entry]:
    return [(e.logprob, e.token, token_text(tokenizer, e.token)) for e in scored]


def _total(counts: Iterable[Counts]) -> Counts:
    prompt, cached, output = map(sum, zip(*counts, strict=True))
    return prompt, cached, output
