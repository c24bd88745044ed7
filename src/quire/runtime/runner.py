"""Computes scheduled steps: inputs, forward pass, and the results of each slot part. Knows no text and no policy."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from quire.devices.protocol import Executable, KVCache, ModelInput, Prepares
from quire.devices.sampling import Pending
from quire.errors import DeviceLostError, EngineError, FailedStepError, message_of
from quire.runtime.inputs import InputBuilder, StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.watch import FORWARD_PASS, RESULTS, SLOTS, Watch
from quire.types import NewSeq, ScheduledBatch, StepOutput

if TYPE_CHECKING:
    from quire.devices.adapters import Adapter
    from quire.runtime.slots.protocol import Collect, SlotPart

log = logging.getLogger("quire.engine")

Begun = tuple[StepLayout, ModelInput]


class Earlier(Protocol):
    """The pipeline stages before this one. They carry out their orders in turn, while this one goes on."""

    def begin(self, inputs: ModelInput) -> None: ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None: ...

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None: ...


class Launched(msgspec.Struct, eq=False):
    """A step that the device computes, with what collects its results; or the error of its launch."""

    collect: Callable[[Launched], StepOutput]
    output: StepOutput
    step: StepLayout | None = None  # None: it computes nothing
    parts: list[Collect] = []
    error: Exception | None = None

    def result(self) -> StepOutput:
        return self.collect(self)


class Runner:
    """Holds the state between steps: the KV cache, the block tables, and each part's state by slot.

    `parts` act in order. A sequence that a part cannot take fails alone; if a part fails in a step, FailedStepError is
    raised, and all its sequences must be set anew. The executable holds `max_logit_rows` rows of logits; more are
    computed and read in pieces. With `earlier` it is the last pipeline stage: a step begins in the earlier stages as
    soon as it is submitted. A submitted step is launched and collected by a thread; if the device `launches` alone, at
    once, and when somebody asks for the result. Results count if `intact` raises no error after them.
    """

    def __init__(
        self,
        executable: Executable,
        caches: Sequence[KVCache],
        inputs: InputBuilder,
        parts: Sequence[SlotPart],
        max_logit_rows: int,
        earlier: Earlier | None = None,
        launches: bool = False,
        intact: Callable[[], None] | None = None,
    ) -> None:
        self.parts = list(parts)
        self._active: list[SlotPart] = []  # those that act in a step
        self._greedy = True  # whether all slots need only the largest logit
        self._executable: Executable | None = executable
        self.caches = list(caches)  # the model's, and caches of features that share its block ids
        self._inputs = inputs
        self._max_logit_rows = max_logit_rows
        self._earlier, self._launches, self._intact = earlier, launches, intact
        self._flying: deque[Launched] = deque()  # submitted to a device that launches alone
        # Each slot's last sample, of batches that the thread computed.
        self._sampled: dict[int, tuple[int, ...]] = {}
        self._failed: dict[int, str] = {}  # slots of failed sequences that are not freed yet
        self._unclear: set[int] = set()  # slots that a part could not forget
        self._thread = ThreadPoolExecutor(1, "quire-step")
        self.watch = Watch()

    def add_part(self, part: SlotPart, last: bool = False) -> None:
        """Let a further part act from the next batch on, after sampling or as the `last`."""
        parts = self.parts
        self.parts = [*parts, part] if last else [parts[0], part, *parts[1:]]

    @property
    def loaded(self) -> bool:
        return self._executable is not None

    def unload(self) -> None:
        """Let go of executable and KV cache; no batch may be unfinished, and none may come before `load`."""
        if self._executable is not None:
            self._executable = None
            del self.caches[0]

    def load(self, executable: Executable, cache: KVCache) -> None:
        """Compute with this executable and cache from now on."""
        self._executable = executable
        self.caches.insert(0, cache)

    def adapt(self, slot: int, adapter: Adapter | None) -> int:
        """Put an adapter into a slot of the executable, or empty it; returns its bytes. From any thread."""
        executable = self._executable
        if executable is None:
            raise EngineError("the engine sleeps: wake it up before it loads an adapter")
        return executable.adapt(slot, adapter)

    def prepare(self) -> bool:
        """Let the device do something that later steps would wait for; False if nothing is left."""
        own = self._executable
        return isinstance(own, Prepares) and own.prepare(self._inputs.block_table_SM)

    def submit(self, batch: ScheduledBatch) -> Pending[StepOutput]:
        """Compute `batch` after earlier ones. Its result may be an exception."""
        if not self._launches:
            begun = None if self._earlier is None else self._begin(batch, self._earlier)
            return self._thread.submit(self._execute_ahead, batch, begun)
        for launched in self._flying:
            launched.output.moved.update(batch.freed)
            launched.output.ahead.update([seq.slot for seq in batch.seqs])
        try:
            launched = self._launch(batch, None)
        except Exception as error:
            launched = Launched(self._collect, StepOutput(batch.step, {}), error=error)
        self._flying.append(launched)
        return launched

    def settle(self) -> None:
        """Let no submitted batch be unfinished; results that nobody has asked for are lost."""
        self._flying.clear()
        if not self._launches:
            self._thread.submit(int).result()  # after all submitted batches

    def shutdown(self) -> None:
        """End the thread once all submitted batches are computed. May be called more than once."""
        self._thread.shutdown()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Apply the batch's delta, compute it, and sample the sequences that reach their end.

        Must not run while submitted batches are unfinished.
        """
        begun = None if self._earlier is None else self._begin(batch, self._earlier)
        return self._collect(self._launch(batch, begun))

    def _execute_ahead(self, batch: ScheduledBatch, begun: Begun | None) -> StepOutput:
        """Compute a batch whose tokens the next one may not know yet."""
        output = self._collect(self._launch(batch, begun))
        # Tuples, because the output's own lists belong to its reader.
        self._sampled.update(zip(output.tokens, map(tuple, output.tokens.values()), strict=True))
        return output

    def _begin(self, batch: ScheduledBatch, earlier: Earlier) -> Begun | None:
        """Start a batch in the earlier stages. None: it computes nothing."""
        for slot in batch.freed:
            self._inputs.clear(slot)
        for new in batch.new:
            self._inputs.set(new)
        if batch.copies:
            earlier.copy_blocks(batch.copies)
        if batch.state_copies:
            earlier.copy_states(batch.state_copies)
        if not batch.seqs:
            return None
        step = self._inputs.lay_out(batch, {}, ())  # no sequence has a token in flight (Planner)
        inputs = self._inputs.snapshot(step)
        earlier.begin(inputs)
        return step, inputs

    def _launch(self, batch: ScheduledBatch, begun: Begun | None) -> Launched:
        """Apply the batch's delta and launch it."""
        self.watch.enter(SLOTS)
        for slot in batch.freed:
            self._clear(slot)
            if self._earlier is None:
                self._inputs.clear(slot)
            self._failed.pop(slot, None)
        for new in batch.new:
            self._set(new)
        if batch.freed or batch.new:
            self._active = [part for part in self.parts if part.active]
            self._greedy = all(part.greedy for part in self._active)
        if batch.mapped:
            for cache in self.caches:
                cache.place_blocks(batch.mapped)
        if batch.copies:
            for cache in self.caches:
                cache.copy_blocks(batch.copies)
        if batch.state_copies:
            for cache in self.caches:
                cache.copy_states(batch.state_copies)
        launched = Launched(self._collect, StepOutput(batch.step, {}))
        if batch.seqs:
            self._compute(batch, launched, begun)
        return launched

    def _set(self, new: NewSeq) -> None:
        """Give a sequence its slot. If that fails, the slot has failed."""
        try:
            if new.slot in self._unclear:
                self._clear(new.slot)
                if new.slot in self._unclear:
                    raise EngineError("an earlier request cannot be forgotten: restart the engine")
            if self._earlier is None:
                self._inputs.set(new)
            for part in self.parts:
                part.set(new)
        except Exception as error:
            log.exception("request %s cannot take its slot", new.request.id)
            self._clear(new.slot)
            self._failed[new.slot] = message_of(error)

    def _clear(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._sampled.pop(slot, None)
        self._unclear.discard(slot)
        for part in self.parts:
            try:
                part.clear(slot)
            except Exception:
                log.exception("%s cannot forget a slot", type(part).__name__)
                self._unclear.add(slot)

    def _compute(self, batch: ScheduledBatch, launched: Launched, begun: Begun | None) -> None:
        executable = self._executable
        if executable is None:
            raise EngineError("the engine sleeps: wake it up before it computes")
        rows: list[int] = []
        firsts = []
        try:
            sampled = None if self._launches else self._sampled
            step = begun[0] if begun else self._inputs.lay_out(batch, sampled, self._failed)
            for part in self._active:
                firsts.append(len(rows))
                rows += part.rows(step)
            if begun is None:
                inputs = self._inputs.build(step, rows, self._greedy)
            else:
                wanted = np.array(rows, np.int32)
                inputs = msgspec.structs.replace(begun[1], logit_rows_L=wanted, greedy=self._greedy)
        except Exception as error:
            if begun is not None:
                executable.run(begun[1])  # the earlier stages have begun it
            raise _failure(error) from error
        self.watch.enter(FORWARD_PASS)
        logits = executable.run(inputs)
        self.watch.enter(RESULTS)
        result = StepRows(executable, logits, len(rows), self._max_logit_rows)
        launched.step = step
        try:
            for part, first in zip(self._active, firsts, strict=True):
                collect = part.launch(result, first)
                if collect is not None:
                    launched.parts.append(collect)
        except Exception as error:
            raise _failure(error) from error

    def _collect(self, launched: Launched) -> StepOutput:
        """Add the results of each part to the step's output, once the device is done."""
        if self._flying and self._flying[0] is launched:
            self._flying.popleft()
        if launched.error is not None:
            raise launched.error
        step, output = launched.step, launched.output
        if step is None:
            return output
        try:
            for collect in launched.parts:
                collect(output)
            if self._intact is not None:
                self._intact()
        except Exception as error:
            raise _failure(error) from error
        if output.errors or self._failed:
            self._fail(step, output)
        return output

    def _fail(self, step: StepLayout, output: StepOutput) -> None:
        """Clear failed slots. Their scheduled steps end with the same error."""
        for slot in output.errors:
            output.tokens.pop(slot, None)
            if slot not in output.moved:
                self._clear(slot)
        staying = [slot for slot in step.slots if slot not in output.moved]
        output.errors |= {slot: self._failed[slot] for slot in staying if slot in self._failed}
        self._failed |= {slot: output.errors[slot] for slot in staying if slot in output.errors}


def _failure(error: Exception) -> EngineError:
    """Make the error of a step in which a part failed, perhaps because of the device."""
    if isinstance(error, (DeviceLostError, FailedStepError)):
        return error
    return FailedStepError(message_of(error))
