"""Rows of logits that Python reads or changes: logits processors, and log-probabilities that a sampler does not give.

Only the rows of sequences that ask for it leave the device. All other rows are sampled as if this part did not exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from quire.config import LogprobsMode
from quire.devices.processed import log_softmax, processed_row
from quire.devices.protocol import FloatArray
from quire.devices.sampling import NOT_DRAWN, Logits, Sampler, Samples, SlotSampling, TokenMask, is_greedy
from quire.logits_processor import AdapterLogitsProcessor, BatchUpdate, ProcessorClass, takes_prompt
from quire.params import SamplingParams
from quire.runtime.inputs import StepLayout
from quire.runtime.rows import StepRows
from quire.runtime.slots.protocol import Collect, slot_sampling
from quire.runtime.slots.scoring import with_asked
from quire.types import NewSeq, StepOutput, TokenLogprobs

log = logging.getLogger("quire.engine")

Change = Callable[[FloatArray], Any]  # of one row [V]


@dataclass(slots=True, eq=False)
class Instance:
    """An instance of a processor class, and the sequence that it serves."""

    kind: ProcessorClass
    processor: Any
    added: BatchUpdate | None = None

    def change(self, row_V: FloatArray) -> Any:
        update, self.added = self.added, None
        self.processor.update_state(update)
        return np.asarray(self.processor.apply(row_V[None, :]))[0]


@dataclass(slots=True, eq=False)
class Tracked:
    """A sequence whose rows are read or changed. `state` follows its tokens."""

    state: SlotSampling
    changes: list[Change] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)
    error: str | None = None

    def changed(self, row_V: FloatArray) -> FloatArray:
        """Apply all changes to the row; raises what they raise."""
        shape = row_V.shape
        for change in self.changes:
            result = change(row_V)
            if result is None:
                raise TypeError("a logits processor returned None: return the logits")
            row_V = np.asarray(result, np.float32)
            if row_V.shape != shape:
                raise ValueError(f"a logits processor returned shape {list(row_V.shape)}, not {list(shape)}")
        return row_V


class ProcessorPart:
    """Runs logits processors, and scores tokens of rows that a sampler cannot score.

    `classes` are processors of the engine, made with `config`. `mode` says which values are reported as
    log-probabilities.
    """

    def __init__(
        self, sampler: Sampler, classes: Sequence[ProcessorClass], mode: LogprobsMode, config: Any
    ) -> None:
        self._sampler, self._mode, self._config = sampler, mode, config
        self._classes = [kind for kind in classes if not issubclass(kind, AdapterLogitsProcessor)]
        self._adapters = [
            kind(config, "cpu", False) for kind in classes if issubclass(kind, AdapterLogitsProcessor)
        ]
        self._idle: list[Instance] = []
        self._slots: dict[int, Tracked] = {}

    def set(self, new: NewSeq) -> None:
        request, params = new.request, new.request.sampling
        if request.pooling is not None:
            return
        reads = params.logprob_token_ids is not None or (
            params.wants_logprobs and self._mode != "raw_logprobs"
        )
        changes = bool(params.logits_processors or self._classes or self._adapters)
        if not reads and not changes:
            return
        # A copy of the prompt, because processors may write to it.
        tracked = Tracked(replace(slot_sampling(new), prompt_tokens=list(request.tokens)))
        if changes:
            try:
                self._prepare(tracked, params)
            except Exception as error:
                tracked.error = _message(error)
        if reads or tracked.changes or tracked.error is not None:
            self._slots[new.slot] = tracked

    def clear(self, slot: int) -> None:
        tracked = self._slots.pop(slot, None)
        for instance in tracked.instances if tracked is not None else ():
            if instance.added is None:
                try:
                    instance.processor.update_state(BatchUpdate(0, removed=[0]))
                except Exception as error:
                    log.warning("%s: update_state failed: %s", instance.kind.__name__, _message(error))
                    continue
            instance.added = None
            self._idle.append(instance)

    @property
    def active(self) -> bool:
        return bool(self._slots)

    @property
    def greedy(self) -> bool:
        return not self._slots

    def rows(self, step: StepLayout) -> list[int]:
        return []

    def launch(self, rows: StepRows, first: int) -> Collect | None:
        return partial(_follow, list(self._slots.items()))  # `RowWork.finish` has followed the sampled tokens

    def begin(self, slots: list[int], logits: Logits, masks_LW: TokenMask | None) -> RowWork | None:
        """Change the rows of `slots` that have processors; None if no row needs anything."""
        if not self._slots or self._slots.keys().isdisjoint(slots):
            return None
        rows = [i for i, slot in enumerate(slots) if slot in self._slots]
        tracked = [self._slots[slots[i]] for i in rows]
        raw = logits[rows]
        changed_RV = raw.numpy().copy()
        errors: dict[int, str] = {}
        edited: list[int] = []
        for number, (row, one) in enumerate(zip(rows, tracked, strict=True)):
            if not one.changes and one.error is None:
                continue
            edited.append(number)
            try:
                if one.error is not None:
                    errors[row] = one.error
                else:
                    changed_RV[number] = one.changed(changed_RV[number].copy())
            except Exception as error:
                log.info("a logits processor failed: %s", _message(error))
                errors[row] = _message(error)
                one.instances.clear()  # their state is unknown
            if row in errors:
                changed_RV[number] = np.nan  # no sampler draws from it
        if edited:
            logits = logits.replaced([rows[number] for number in edited], changed_RV[edited])
        return RowWork(self._sampler, self._mode, logits, raw, changed_RV, rows, tracked, masks_LW, errors)

    def _prepare(self, tracked: Tracked, params: SamplingParams) -> None:
        state = tracked.state
        functions = list(params.logits_processors or ())
        for adapter in self._adapters:
            function = adapter.new_req_logits_processor(params)
            if function is not None and not (adapter.is_argmax_invariant() and is_greedy(params)):
                functions.append(function)
        for kind in self._classes:
            if not getattr(kind, "concerns", _always)(params):
                continue
            instance = self._instance(kind)
            if instance.processor.is_argmax_invariant() and is_greedy(params):
                self._idle.append(instance)
                continue
            instance.added = BatchUpdate(1, added=[(0, params, state.prompt_tokens, state.output_tokens)])
            tracked.instances.append(instance)
            tracked.changes.append(instance.change)
        tracked.changes += [_of_function(function, state) for function in functions]

    def _instance(self, kind: ProcessorClass) -> Instance:
        for i, instance in enumerate(self._idle):
            if instance.kind is kind:
                return self._idle.pop(i)
        return Instance(kind, kind(self._config, "cpu", False))


@dataclass(slots=True, eq=False)
class RowWork:
    """The rows of one draw that Python reads: `logits` are all its rows, the changed ones in place.

    `rows` are the places of the tracked sequences; `raw` and `changed_RV` hold these rows before and after the changes.
    """

    sampler: Sampler
    mode: LogprobsMode
    logits: Logits
    raw: Logits
    changed_RV: FloatArray
    rows: list[int]
    tracked: list[Tracked]
    masks_LW: TokenMask | None
    errors: dict[int, str]

    def finish(self, samples: Samples) -> None:
        """Complete the log-probabilities and errors of the samples, and follow their tokens."""
        samples.errors.update(self.errors)
        tokens = [samples.tokens[row] for row in self.rows]
        for number, (row, one) in enumerate(zip(self.rows, self.tracked, strict=True)):
            token = tokens[number]
            if token != NOT_DRAWN and one.state.params.wants_logprobs:
                mask = None if self.masks_LW is None else self.masks_LW[row]
                samples.logprobs[row] = self._scores(number, one, token, mask)
        for one, token in zip(self.tracked, tokens, strict=True):
            if token != NOT_DRAWN:
                one.state.output_tokens.append(token)

    def _scores(self, number: int, one: Tracked, token: int, mask: TokenMask | None) -> TokenLogprobs:
        params = one.state.params
        asked, top = list(params.logprob_token_ids or ()), params.logprobs or 0
        if self.mode == "raw_logprobs":
            (scores,) = self.sampler.logprobs(self.raw[[number]], np.array([token], np.int32), top)
            return with_asked(self.sampler, scores, self.raw, number, asked)
        values = self.raw[[number]].numpy()[0]
        if self.mode.startswith("processed"):
            values = processed_row(self.changed_RV[number], one.state, mask)
        scores_V = log_softmax(values) if self.mode.endswith("logprobs") else values.astype(np.float64)
        best = np.argsort(-values, kind="stable")[: values.size if top < 0 else top]
        ranks = {t: 1 + int((values > values[t]).sum()) for t in [token, *asked]}
        return TokenLogprobs(
            token,
            float(scores_V[token]),
            ranks[token],
            best.tolist(),
            scores_V[best].tolist(),
            [(t, float(scores_V[t]), ranks[t]) for t in asked],
        )


def _follow(slots: list[tuple[int, Tracked]], output: StepOutput) -> None:
    """Follow the tokens that grammars have forced."""
    for slot, tracked in slots:
        if forced := output.forced.get(slot):
            tracked.state.output_tokens += output.tokens[slot][-forced:]


def _of_function(function: Callable[..., Any], state: SlotSampling) -> Change:
    if takes_prompt(function):
        return lambda row_V: function(state.prompt_tokens, state.output_tokens, row_V)
    return lambda row_V: function(state.output_tokens, row_V)


def _always(params: SamplingParams) -> bool:
    return True


def _message(error: Exception) -> str:
    return f"a logits processor failed: {type(error).__name__}: {error}"
