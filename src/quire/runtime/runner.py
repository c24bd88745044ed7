"""Runs one scheduled step: inputs, forward pass, sampling. Sees arrays and slots; knows no text and no policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.protocol import Executable, FloatArray, KVCache
from quire.runtime.inputs import InputBuilder, LogitRows
from quire.runtime.sampler import Sampler, SlotSampling
from quire.types import NewSeq, ScheduledBatch, StepOutput


@dataclass(slots=True)
class Pool:
    """Sum of the hidden states [D] seen so far, row by row in float64, so that chunks do not change it."""

    count: int = 0
    total_D: NDArray[np.float64] | float = 0.0

    def add(self, hidden_RD: FloatArray) -> None:
        for row_D in hidden_RD.astype(np.float64):
            self.total_D = self.total_D + row_D
            self.count += 1

    def unit_vector(self) -> list[float]:
        """The mean, scaled to length 1."""
        mean_D = np.asarray(self.total_D) / self.count
        vector: list[float] = (mean_D / max(float(np.sqrt((mean_D * mean_D).sum())), 1e-12)).tolist()
        return vector


class Runner:
    """Holds what lives between steps: the KV cache, block tables, and the sampler's state by slot.

    `max_logit_rows` is that of the executable: more rows are computed and sampled piece by piece.
    """

    def __init__(
        self, executable: Executable, kv: KVCache, inputs: InputBuilder, sampler: Sampler, max_logit_rows: int
    ) -> None:
        self._executable = executable
        self._kv = kv
        self._inputs = inputs
        self._sampler = sampler
        self._max_logit_rows = max_logit_rows
        self._prompt_top: dict[int, int] = {}
        self._pools: dict[int, Pool] = {}

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Apply the batch's delta, compute it, and sample where it reaches the end of a sequence."""
        for slot in batch.freed:
            self._sampler.clear(slot)
            self._prompt_top.pop(slot, None)
            self._pools.pop(slot, None)
        for new in batch.new:
            self._set_up(new)
        inputs, rows = self._inputs.build(batch)
        if batch.copies:
            self._kv.copy_blocks(batch.copies)
        output = StepOutput(batch.step, {})
        if not batch.seqs:
            return output
        logits = self._executable.run(inputs)
        total = len(inputs.logit_rows_L)
        for start in range(0, total, self._max_logit_rows):
            stop = min(start + self._max_logit_rows, total)
            if start:
                logits = self._executable.logits(start, stop)
            self._sample(logits, rows, start, stop, output)
            self._score_prompt(logits, rows, start, stop, output)
        if rows.pooled:
            self._pool(rows, output)
        return output

    def _set_up(self, new: NewSeq) -> None:
        request = new.request
        if request.pooling is not None:
            self._pools[new.slot] = Pool()
            return
        if request.sampling.prompt_logprobs is not None and new.index == 0:
            self._prompt_top[new.slot] = request.sampling.prompt_logprobs
        num_prompt = len(request.tokens)
        self._sampler.set(
            new.slot,
            SlotSampling(
                seed=request.sample_seed(new.index),
                params=request.sampling,
                stop_ids=request.eos_token_ids + tuple(request.sampling.stop_token_ids or ()),
                bad_words=request.bad_words_token_ids,
                prompt_tokens=request.tokens,
                output_tokens=new.tokens[num_prompt:],
            ),
        )

    def _sample(self, logits: FloatArray, rows: LogitRows, start: int, stop: int, output: StepOutput) -> None:
        stop = min(stop, len(rows.slots))
        if stop <= start:
            return
        slots = rows.slots[start:stop]
        samples = self._sampler.sample(
            logits[: stop - start],
            np.array(slots, np.int32),
            np.array(rows.positions[start:stop], np.int64),
        )
        for row, (slot, token) in enumerate(zip(slots, samples.tokens.tolist(), strict=True)):
            if row in samples.errors:
                output.errors[slot] = samples.errors[row]
                continue
            output.tokens.setdefault(slot, []).append(token)
            if row in samples.logprobs:
                output.logprobs.setdefault(slot, []).append(samples.logprobs[row])

    def _score_prompt(
        self, logits: FloatArray, rows: LogitRows, start: int, stop: int, output: StepOutput
    ) -> None:
        for slot, first, targets in rows.prompt:
            low, high = max(first, start), min(first + len(targets), stop)
            if low < high:
                scores = self._sampler.logprobs(
                    logits[low - start : high - start],
                    np.array(targets[low - first : high - first], np.int32),
                    self._prompt_top[slot],
                )
                output.prompt_logprobs.setdefault(slot, []).extend(scores)

    def _pool(self, rows: LogitRows, output: StepOutput) -> None:
        hidden_LD = self._executable.hidden()
        for slot, first, count, ends in rows.pooled:
            pool = self._pools[slot]
            pool.add(hidden_LD[first : first + count])
            if ends:
                output.embeddings[slot] = pool.unit_vector()
