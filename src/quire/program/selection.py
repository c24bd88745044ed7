"""Select: choose one of several texts by its probability instead of sampling. Token ids only.

Each choice is appended to the prompt in a request of its own, and its tokens' log-probabilities are averaged. The
best average wins, the first among equals. The prompt is computed once: the first request leaves it in the prefix
cache for the others, which wait for it. Few are under way at a time, so that other requests get their turns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from quire.params import SamplingParams
from quire.program.core import Run
from quire.steps import ChoicesMethod
from quire.types import Delta, FinishReason, Request, TokenLogprobs, Usage

Entry = tuple[float | None, int, str]
"""Log-probability (None: not scored), token id and text of a token."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of the chosen text, and the figures behind it."""

    index: int
    meta_info: dict[str, Any]


def kept(text: str, entries: Sequence[Entry]) -> list[Entry]:
    """Keep the entries that belong to a choice; the first given one is the last token of `text`.

    The first is that token itself, unless the choice changed how it is tokenized.
    """
    whole = len(entries) > 1 and text.endswith(entries[0][2])
    return list(entries[1:] if whole else entries)


def mean(logprobs: Sequence[float | None]) -> float:
    """Average the values that are neither None nor 0, as SGLang's endpoint does."""
    counted = [one for one in logprobs if one]
    return sum(counted) / len(counted) if counted else 0.0


def decide(
    method: ChoicesMethod,
    rows: Sequence[Sequence[Entry]],
    unconditional: Sequence[Sequence[float | None]] | None = None,
) -> Decision:
    """Choose by the kept entries of each choice; the first of equals.

    `unconditional` has the log-probabilities of the same tokens without a text before them.
    """
    logprobs = [[entry[0] for entry in row] for row in rows]
    means = [mean(row) for row in logprobs]
    meta: dict[str, Any] = {"normalized_prompt_logprobs": means, "input_token_logprobs": [*map(list, rows)]}
    if method == "token_length_normalized":
        return Decision(_first_best(means), meta)
    if method == "greedy_token_selection":
        index, matrix = _greedy([[one or 0.0 for one in row] for row in logprobs])
        return Decision(index, {**meta, "greedy_logprob_matrix": matrix})
    assert unconditional is not None
    alone = [[one or 0.0 for one in row] for row in unconditional]
    normalized = [
        sum((one or 0.0) - other for one, other in zip(row, without, strict=True)) / len(row)
        for row, without in zip(logprobs, alone, strict=True)
    ]
    meta["unconditional_token_logprobs"] = [*map(list, unconditional)]
    meta["normalized_unconditional_prompt_logprobs"] = normalized
    return Decision(_first_best(normalized), meta)


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda i: (scores[i], -i))


def _greedy(rows: Sequence[Sequence[float]]) -> tuple[int, list[list[float]]]:
    """Token by token, keep the choices with the highest log-probability; short rows go on with their own mean."""
    longest = max(map(len, rows))
    matrix = [[*row, *[sum(row) / len(row)] * (longest - len(row))] for row in rows]
    left = list(range(len(rows)))
    for column in range(longest):
        best = max(matrix[i][column] for i in left)
        left = [i for i in left if matrix[i][column] == best]
        if len(left) == 1:
            break
    return left[0], matrix


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
            score = sum(entry.logprob for entry in scored) / len(scored)
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
