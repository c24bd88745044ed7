"""The native sampler: C++ on the thread pool, without the GIL (csrc/sample).

Samples the same tokens as the reference sampler, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire import _native
from quire.devices.cpu.errors import native_errors
from quire.devices.host import check_targets, host_logits, on_host
from quire.devices.protocol import IntArray
from quire.devices.sampling import (
    BAD_LOGITS,
    NOTHING_ALLOWED,
    Logits,
    Pending,
    Samples,
    SlotSampling,
    TokenMask,
    has_penalties,
    is_greedy,
    lowest_scaled,
)
from quire.devices.shared import Shared
from quire.types import TokenLogprobs


class NativeSampler:
    """The reference sampler's results, bit for bit, in one C++ call without the GIL on the thread pool.

    `pool` is a `quire._native.ThreadPool`; `isa` a name from `quire._native.available_isas()` or "auto".
    """

    def __init__(self, vocab_size: int, pool: Any, isa: str = "auto") -> None:
        self.vocab_size = vocab_size
        self._native = _native.Sampler(pool, isa, vocab_size)
        self._rules: Shared[_native.SlotRules] = Shared()
        self._prompts: Shared[_native.PromptTokens] = Shared()

    def set(self, slot: int, state: SlotSampling) -> None:
        with native_errors:  # the native side checks token ids
            self._native.set(slot, self._slot(slot, state))

    def _slot(self, slot: int, state: SlotSampling) -> _native.SlotParams:
        params, native = state.params, _native.SlotParams()
        native.seed = state.seed
        native.greedy = is_greedy(params)
        native.temperature = params.temperature
        native.top_k = min(params.top_k, self.vocab_size)
        native.top_p = params.top_p
        native.low_scaled = float(lowest_scaled(params))
        native.repetition_penalty = params.repetition_penalty
        native.frequency_penalty = params.frequency_penalty
        native.presence_penalty = params.presence_penalty
        native.min_tokens = params.min_tokens
        native.wants_logprobs = params.wants_logprobs
        most = self.vocab_size
        native.num_top = most if params.logprobs == -1 else min(params.logprobs or 0, most)
        native.output = state.output_tokens
        key = id(params), id(state.bad_words), state.stop_ids
        native.rules = self._rules.take(slot, key, state, self._make_rules)
        key_of_prompt = id(state.prompt_tokens), has_penalties(params)
        native.prompt = self._prompts.take(slot, key_of_prompt, state, self._make_prompt)
        return native

    def _make_rules(self, state: SlotSampling) -> _native.SlotRules:
        params = state.params
        bias, allowed = list((params.logit_bias or {}).items()), params.allowed_token_ids or ()
        return _native.SlotRules(self.vocab_size, state.stop_ids, allowed, state.bad_words, bias)

    def _make_prompt(self, state: SlotSampling) -> _native.PromptTokens:
        return _native.PromptTokens(self.vocab_size, state.prompt_tokens, has_penalties(state.params))

    def clear(self, slot: int) -> None:
        self._rules.clear(slot)
        self._prompts.clear(slot)
        self._native.clear(slot)

    def extend(self, slot: int, tokens: list[int]) -> None:
        with native_errors:
            self._native.extend(slot, tokens)

    def retract(self, slot: int, count: int) -> None:
        with native_errors:
            self._native.retract(slot, count)

    def sample(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        drafts: list[int] | None = None,
        masks_LW: TokenMask | None = None,
    ) -> Pending[Samples]:
        own = on_host(self._copied(logits))
        with native_errors:  # the native side checks types, shapes, slots and positions
            drawn = self._native.sample(own.values, slots, positions, drafts, masks_LW, own.best)
        tokens, faults, logprobs = drawn
        samples = Samples(tokens)
        for row, finite in faults:
            samples.errors[row] = NOTHING_ALLOWED if finite else BAD_LOGITS
        for row, entry in logprobs:
            samples.logprobs[row] = TokenLogprobs(*entry)
        return samples

    def logprobs(self, logits: Logits, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        own = host_logits(self._copied(logits), self.vocab_size)
        check_targets(own, targets_L)
        num_top = self.vocab_size if num_top < 0 else min(num_top, self.vocab_size)
        if len(own) == 0:
            return []
        entries = self._native.logprobs(own.values, np.ascontiguousarray(targets_L, dtype=np.int32), num_top)
        return [TokenLogprobs(*entry) for entry in entries]

    def _copied(self, logits: Logits) -> Logits:
        """Copy logits of a device to the host."""
        return logits
