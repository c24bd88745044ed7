"""Choosing one of several texts by its probability, instead of sampling among them. Knows token ids only.

Every choice is read behind the prompt by a request of its own, and its tokens' log-probabilities are averaged; the
best average wins (of equals the first). The prompt is computed once: the first choice leaves it in the prefix cache for
the others, which wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.params import SamplingParams
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage


@dataclass(slots=True)
class Selection:
    """One request that selects, while its choices are read."""

    request: Request
    scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_cached: int | None = None
    waiting: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        request = self.request
        top = request.sampling.logprobs or 0
        for number, choice in enumerate(request.choices):
            reader = msgspec.structs.replace(
                request,
                id=f"{request.id}/{number}",
                tokens=[*request.tokens, *choice],
                sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False),
                max_tokens=1,
                choices=(),
                scored_from=len(request.tokens) - 1,
            )
            self.waiting.append(reader)

    def next(self) -> list[Request]:
        """What to queue now: the first reader, and all others once it has ended."""
        ready = self.waiting if self.scores else self.waiting[:1]
        self.waiting = self.waiting[len(ready) :]
        self.running |= {reader.id for reader in ready}
        return ready

    def push(self, delta: Delta) -> Delta | None:
        """Take a reader's news; the request's own once all have ended, or one has failed."""
        self.scores.setdefault(delta.request_id, []).extend(delta.prompt_logprobs or [])
        if self.num_cached is None:
            self.num_cached = delta.usage.num_cached
        if delta.finish_reason is None:
            return None
        self.running.discard(delta.request_id)
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return self._end([], delta.finish_reason, delta.error)
        if self.running or self.waiting:
            return None
        best = max(
            range(len(self.request.choices)), key=lambda i: (_mean(self.scores[f"{self.request.id}/{i}"]), -i)
        )
        return self._end(self.scores[f"{self.request.id}/{best}"], FinishReason.STOP, None)

    def aborted(self) -> Delta:
        return self._end([], FinishReason.ABORT, None)

    def _end(self, chosen: list[TokenLogprobs], reason: FinishReason, error: str | None) -> Delta:
        tokens = [entry.token for entry in chosen]
        return Delta(
            self.request.id,
            0,
            tokens,
            Usage(len(self.request.tokens), self.num_cached or 0, len(tokens)),
            logprobs=chosen if self.request.sampling.logprobs is not None else None,
            finish_reason=reason,
            error=error,
            complete=True,
        )


def _mean(entries: list[TokenLogprobs]) -> float:
    return sum(entry.logprob for entry in entries) / len(entries)
