"""Select: choose one of several texts by its probability instead of sampling. Token ids only.

Each choice is appended to the prompt in a request of its own, and its tokens' log-probabilities are averaged. The
best average wins, the first among equals. The prompt is computed once: the first request leaves it in the prefix
cache for the others, which wait for it. Few are under way at a time, so that other requests get their turns.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice

import msgspec

from quire.params import SamplingParams
from quire.program.core import Run
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage

MAX_LIVE = 4


def select(request: Request, run: Run) -> Generator[None, Delta, list[Delta]]:
    """Score the choices of `request`; returns the best as the last delta, or the error of a request that failed."""
    waiting = iter(enumerate(request.choices))
    entries: dict[str, list[TokenLogprobs]] = {}  # of the choices under way
    best: tuple[float, int, list[TokenLogprobs]] | None = None
    allowed = 1  # until the prompt is computed
    while True:
        for number, choice in islice(waiting, allowed - len(run.live)):
            reader = _reader(request, number, choice)
            entries[reader.id] = []
            run.add(reader)
        if not run.live:
            break
        delta = yield
        entries[delta.request_id] += delta.prompt_logprobs or []
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return [_last(run, [], delta.finish_reason, delta.error)]
        if delta.finish_reason is not None:
            scored, number = entries.pop(delta.request_id), int(delta.request_id.rpartition("/")[2])
            score = _mean(scored)
            if best is None or (score, -number) > (best[0], -best[1]):
                best = score, number, scored
            allowed = MAX_LIVE
    assert best is not None
    return [_last(run, best[2], FinishReason.STOP, None)]


def _reader(request: Request, number: int, choice: tuple[int, ...]) -> Request:
    top = request.sampling.logprobs or 0
    return msgspec.structs.replace(
        request,
        id=f"{request.id}/{number}",
        tokens=[*request.tokens, *choice],
        sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top, detokenize=False),
        max_tokens=1,
        choices=(),
        scored_from=len(request.tokens) - 1,
    )


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
