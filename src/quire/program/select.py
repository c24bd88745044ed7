"""Select: choose one of several texts by its probability instead of sampling. Token ids only.

Each choice is appended to the prompt in a request of its own, and its tokens' log-probabilities are averaged. The
best average wins, the first among equals. The prompt is computed once: the first request leaves it in the prefix
cache for the others, which wait for it.
"""

from __future__ import annotations

from collections.abc import Generator

import msgspec

from quire.params import SamplingParams
from quire.program.core import Run
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage


def select(request: Request, run: Run) -> Generator[None, Delta, Delta]:
    """Score the choices of `request`; returns the best as the last delta, or the error of a request that failed."""
    readers = _readers(request)
    scores: dict[str, list[TokenLogprobs]] = {reader.id: [] for reader in readers}
    run.add(readers[0])
    waiting = readers[1:]
    while run.live or waiting:
        delta = yield
        scores[delta.request_id] += delta.prompt_logprobs or []
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return _last(run, [], delta.finish_reason, delta.error)
        if delta.finish_reason is not None:
            for reader in waiting:
                run.add(reader)
            waiting = []
    best = max(readers, key=lambda reader: _mean(scores[reader.id]))  # the first among equals
    return _last(run, scores[best.id], FinishReason.STOP, None)


def _readers(request: Request) -> list[Request]:
    top = request.sampling.logprobs or 0
    return [
        msgspec.structs.replace(
            request,
            id=f"{request.id}/{number}",
            tokens=[*request.tokens, *choice],
            sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False),
            max_tokens=1,
            choices=(),
            scored_from=len(request.tokens) - 1,
        )
        for number, choice in enumerate(request.choices)
    ]


def _last(run: Run, chosen: list[TokenLogprobs], reason: FinishReason, error: str | None) -> Delta:
    tokens = [entry.token for entry in chosen]
    return Delta(
        run.request.id,
        0,
        tokens,
        Usage(len(run.request.tokens), run.num_cached, len(tokens)),
        logprobs=chosen if run.request.sampling.logprobs is not None else None,
        finish_reason=reason,
        error=error,
        complete=True,
    )


def _mean(entries: list[TokenLogprobs]) -> float:
    return sum(entry.logprob for entry in entries) / len(entries)
