"""Computes scheduled steps: inputs, forward pass, and what each slot part takes out. Knows no text and no policy."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.devices.protocol import Executable, KVCache
from quire.runtime.inputs import InputBuilder, Layout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import SlotPart
from quire.types import ScheduledBatch, StepOutput


class Runner:
    """Holds what lives between steps: the KV cache, the block tables, and the state of each slot in its parts.

    `parts` act in order. `max_logit_rows` is that of the executable: more rows are computed and read in pieces.
    """

    def __init__(
        self,
        executable: Executable,
        kv: KVCache,
        inputs: InputBuilder,
        parts: Sequence[SlotPart],
        max_logit_rows: int,
    ) -> None:
        self.parts = list(parts)
        self._executable = executable
        self._kv = kv
        self._inputs = inputs
        self._max_logit_rows = max_logit_rows
        self._sampled: dict[int, tuple[int, ...]] = {}  # each slot's last sample
        self._failed: dict[int, str] = {}  # slots whose sequence failed and that are not freed yet
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
            self._inputs.clear(slot)
            self._clear(slot)
            self._failed.pop(slot, None)
        for new in batch.new:
            for part in self.parts:
                part.set(new)
        if batch.copies:
            self._kv.copy_blocks(batch.copies)
        output = StepOutput(batch.step, {})
        if batch.seqs:
            self._compute(self._inputs.lay_out(batch, self._sampled, self._failed), output)
        return output

    def _clear(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._sampled.pop(slot, None)
        for part in self.parts:
            part.clear(slot)

    def _compute(self, step: Layout, output: StepOutput) -> None:
        rows: list[int] = []
        greedy = True
        firsts = []
        for part in self.parts:
            firsts.append(len(rows))
            rows += part.rows(step)
            greedy = greedy and part.greedy
        logits = self._executable.run(self._inputs.build(step, rows, greedy))
        result = StepRows(self._executable, logits, len(rows), self._max_logit_rows)
        for part, first in zip(self.parts, firsts, strict=True):
            part.take(result, first, output)
        # Tuples, since the output's own lists belong to its reader.
        self._sampled.update(zip(output.tokens, map(tuple, output.tokens.values()), strict=True))
        if output.errors or self._failed:
            self._fail(step, output)

    def _fail(self, step: Layout, output: StepOutput) -> None:
        """Clear slots that failed. Their steps that are scheduled already end with the same error."""
        for slot in output.errors:
            output.tokens.pop(slot, None)
            self._clear(slot)
        output.errors |= {slot: self._failed[slot] for slot in step.slots if slot in self._failed}
        self._failed |= output.errors
