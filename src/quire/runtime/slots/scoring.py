"""Log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from quire.devices.sampling import Logits, Sampler
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect
from quire.types import NewSeq, Request, StepOutput, TokenLogprobs


class ScoringPart:
    """Scores the prompts of requests with `prompt_logprobs`: the row of a token scores the token after it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._requests: dict[int, Request] = {}
        # Slots of the step, with the tokens that its rows score.
        self._targets: list[tuple[int, list[int]]] = []

    def set(self, new: NewSeq) -> None:
        if new.request.sampling.scores_prompt and new.request.pooling is None and new.index == 0:
            self._requests[new.slot] = new.request

    def clear(self, slot: int) -> None:
        self._requests.pop(slot, None)

    @property
    def active(self) -> bool:
        return bool(self._requests)

    @property
    def greedy(self) -> bool:
        return not self._requests

    def rows(self, step: StepLayout) -> list[int]:
        self._targets = []
        rows: list[int] = []
        for seq, begin in zip(step.seqs, step.cu_q, strict=False):
            request = self._requests.get(seq.slot)
            if request is None:
                continue
            stop = min(seq.start + len(seq.tokens), len(request.tokens) - 1)
            if stop > seq.start:
                self._targets.append((seq.slot, request.tokens[seq.start + 1 : stop + 1]))
                rows += range(begin, begin + stop - seq.start)
        return rows

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        found: list[tuple[int, list[TokenLogprobs]]] = []
        for slot, targets in self._targets:
            params = self._requests[slot].sampling
            num_top, asked = params.prompt_logprobs or 0, params.prompt_logprob_token_ids or ()
            scores: list[TokenLogprobs] = []
            for part, logits in rows.logits(range(first, first + len(targets))):
                own = self.sampler.logprobs(logits, np.array(targets[part], np.int32), num_top)
                scores += (with_asked(self.sampler, one, logits, i, asked) for i, one in enumerate(own))
            found.append((slot, scores))
            first += len(targets)
        return partial(_add, found) if found else None


def _add(found: list[tuple[int, list[TokenLogprobs]]], output: StepOutput) -> None:
    output.prompt_logprobs.update(found)


def with_asked(
    sampler: Sampler, scores: TokenLogprobs, logits: Logits, row: int, asked: Sequence[int]
) -> TokenLogprobs:
    """Add the log-probabilities of the tokens `asked` for to the `scores` of a row."""
    if not asked:
        return scores
    found = sampler.logprobs(logits[[row] * len(asked)], np.array(asked, np.int32), 0)
    return msgspec.structs.replace(scores, asked=[(one.token, one.logprob, one.rank) for one in found])
