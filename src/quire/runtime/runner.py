"""Runs one scheduled step: inputs, forward pass, sampling. Sees arrays and slots; knows no text and no policy."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.devices.protocol import Executable, FloatArray, KVCache
from quire.devices.sampling import Logits, Sampler, SlotSampling, TokenMask
from quire.errors import EngineError
from quire.model.pooling import PoolingHead
from quire.runtime.constraints import Constraints
from quire.runtime.inputs import InputBuilder, LogitRows
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

    def mean(self) -> NDArray[np.float64]:
        return np.asarray(self.total_D) / self.count

    def unit_vector(self) -> list[float]:
        """The mean, scaled to length 1."""
        mean_D = self.mean()
        vector: list[float] = (mean_D / max(float(np.sqrt((mean_D * mean_D).sum())), 1e-12)).tolist()
        return vector


class Runner:
    """Holds what lives between steps: the KV cache, block tables, and the sampler's state by slot.

    `max_logit_rows` is that of the executable: more rows are computed and sampled piece by piece. `constraints`
    may be left out where no request has a grammar. `head` makes vectors of pooled hidden states; without one they are
    scaled to length 1.
    """

    def __init__(
        self,
        executable: Executable,
        kv: KVCache,
        inputs: InputBuilder,
        sampler: Sampler,
        max_logit_rows: int,
        constraints: Constraints | None = None,
        head: PoolingHead | None = None,
    ) -> None:
        self._executable = executable
        self._kv = kv
        self._inputs = inputs
        self._sampler = sampler
        self._max_logit_rows = max_logit_rows
        self._constraints = constraints
        self._head = head
        self._prompt_top: dict[int, int] = {}
        self._pools: dict[int, Pool] = {}
        self._sampled: dict[int, tuple[int, ...]] = {}  # each slot's last sample
        self._failed: dict[int, str] = {}
        self._thread = ThreadPoolExecutor(1, "quire-step")

    def submit(self, batch: ScheduledBatch) -> Future[StepOutput]:
        """Compute `batch` on the runner's own thread, after those submitted before. The future holds exceptions."""
        return self._thread.submit(self.execute, batch)

    def shutdown(self) -> None:
        """End the thread once all submitted batches are computed. Safe to call more than once."""
        self._thread.shutdown()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Apply the batch's delta, compute it, and sample where it reaches the end of a sequence.

        Not while submitted batches are unfinished.
        """
        for slot in batch.freed:
            self._sampled.pop(slot, None)
            self._failed.pop(slot, None)
            self._sampler.clear(slot)
            self._prompt_top.pop(slot, None)
            self._pools.pop(slot, None)
            if self._constraints is not None:
                self._constraints.clear(slot)
        for new in batch.new:
            self._set_up(new)
        if self._constraints is not None:
            self._constraints.begin()
        inputs, rows = self._inputs.build(batch, self._sampled, self._failed)
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
        for slot, tokens in output.tokens.items():
            self._sampled[slot] = tuple(tokens)  # the output's own list belongs to its reader
        if self._failed:
            output.errors.update({s.slot: self._failed[s.slot] for s in batch.seqs if s.slot in self._failed})
        if output.errors:
            self._failed.update(output.errors)
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
        if request.grammar is not None:
            if self._constraints is None:
                raise EngineError("this engine was started without support for grammars")
            self._constraints.set(new)

    def _sample(self, logits: Logits, rows: LogitRows, start: int, stop: int, output: StepOutput) -> None:
        """Draw for rows start to stop, whose logits these are: first the free ones, then the constrained."""
        stop = min(stop, len(rows.slots))
        free = min(max(rows.num_free, start), stop)
        if free > start:
            self._draw(logits[: free - start], rows.slots[start:free], rows.positions[start:free], output)
        if stop > free:
            part, alone = slice(free, stop), rows.num_free == 0
            logits = logits[free - start : stop - start]
            self._draw_constrained(logits, rows.slots[part], rows.positions[part], alone, output)

    def _draw(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        output: StepOutput,
        masks: TokenMask | None = None,
    ) -> None:
        samples = self._sampler.sample(
            logits, np.array(slots, np.int32), np.array(positions, np.int64), None, masks
        )
        output.tokens.update(zip(slots, samples.tokens.reshape(-1, 1).tolist(), strict=True))
        for row, error in samples.errors.items():
            del output.tokens[slots[row]]
            output.errors[slots[row]] = error
        for row, scores in samples.logprobs.items():
            output.logprobs[slots[row]] = [scores]

    def _draw_constrained(
        self, logits: Logits, slots: list[int], positions: list[int], alone: bool, output: StepOutput
    ) -> None:
        """Draw where the masks are ready, and append what the grammars force after it."""
        constraints = self._constraints
        assert constraints is not None
        ready, masks, errors = constraints.masks(slots, alone)
        output.errors.update(errors)
        if len(ready) < len(slots):
            output.deferred.update(set(slots) - {slots[i] for i in ready} - set(errors))
            logits, slots, positions = logits[ready], [slots[i] for i in ready], [positions[i] for i in ready]
        if not slots:
            return
        self._draw(logits, slots, positions, output, masks)
        for slot in slots:
            if slot in output.errors:
                continue
            tokens = output.tokens[slot]
            news = constraints.advance(slot, tokens[0])
            if news.error is not None:
                output.errors[slot] = news.error
            if news.forced:
                tokens += news.forced
                output.forced[slot] = len(news.forced)
                self._sampler.extend(slot, news.forced)
            if news.ended:
                output.ended.add(slot)

    def _score_prompt(
        self, logits: Logits, rows: LogitRows, start: int, stop: int, output: StepOutput
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
                output.embeddings[slot] = (
                    pool.unit_vector() if self._head is None else self._head(pool.mean())
                )
