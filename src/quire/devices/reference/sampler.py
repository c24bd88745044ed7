"""The sampler that defines all others: one row at a time, in plain numpy.

Gumbel-max with counter-based noise (devices/sampling.py). Knows rows of logits and slots; knows no scheduler or model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.devices.host import Float64Array, check_rows, check_targets, host_logits
from quire.devices.protocol import IntArray
from quire.devices.reference.logits import STAGES, BoolRow, Row, log_softmax, truncate
from quire.devices.sampling import (
    BAD_LOGITS,
    NOT_DRAWN,
    NOTHING_ALLOWED,
    Logits,
    Samples,
    SlotSampling,
    TokenMask,
    check_token_ids,
    is_greedy,
)
from quire.errors import EngineError
from quire.types import TokenLogprobs

_ROUND_0, _ROUND_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[NDArray[np.uint64]], seed: int) -> list[NDArray[np.uint64]]:
    """Draw by Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), 4 x 32 bits."""
    c0, c1, c2, c3 = counter
    key_0, key_1 = seed & 0xFFFFFFFF, seed >> 32
    for i in range(10):
        k0 = np.uint64((key_0 + i * _WEYL_0) & 0xFFFFFFFF)
        k1 = np.uint64((key_1 + i * _WEYL_1) & 0xFFFFFFFF)
        p0, p1 = c0 * _ROUND_0, c2 * _ROUND_1
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def _bits(seed: int, position: int, tokens: NDArray[np.int64], part: int) -> NDArray[np.uint64]:
    """32 bits per token: counter (token // 4, position low, position high, part), word token % 4."""
    ones = np.ones(tokens.shape, dtype=np.uint64)
    counter = [(tokens // 4).astype(np.uint64), ones * np.uint64(position & 0xFFFFFFFF)]
    counter += [ones * np.uint64(position >> 32), ones * np.uint64(part)]
    return np.choose(tokens % 4, philox(counter, seed))


def log_portable(x: Float64Array) -> Float64Array:
    """ln(x) = 2 artanh((m - 1) / (m + 1)) + e ln 2, x = m 2^e, in float64 that any language rounds alike."""
    m, e = np.frexp(x)
    low = m < 0.70710678118654752
    m = np.where(low, m * 2.0, m)
    e = np.where(low, e - 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = np.full_like(s, 1.0 / 23.0)
    for n in range(21, 0, -2):
        series = series * z + 1.0 / n
    result: Float64Array = e * 0.69314718055994531 + (s * series) * 2.0
    return result


def gumbel(seed: int, position: int, tokens: NDArray[np.int64]) -> Float64Array:
    """Return the standard Gumbel noise of each token: -ln(-ln u), u from 52 bits and never 0 or 1."""
    high, low = (_bits(seed, position, tokens, part) for part in (0, 1))
    k = ((high << _HALF) | low) >> np.uint64(12)
    u = (k.astype(np.float64) * 2.0 + 1.0) * 2.0**-53
    return -log_portable(-log_portable(u))


def draw(logits_V: Row, kept_V: BoolRow, temperature: float, seed: int, position: int) -> int:
    """Return the kept token with the largest scaled logit plus noise; the lowest id among equals."""
    ids = np.flatnonzero(kept_V)
    x = logits_V[ids].astype(np.float64) - float(logits_V.max())
    return int(ids[np.argmax(x * (1.0 / temperature) + gumbel(seed, position, ids))])


def top_logprobs(logits_V: Row, token: int, num_top: int) -> TokenLogprobs:
    """Compute log-probability and rank of `token`, and the `num_top` best (-1: all), from unmodified logits."""
    logprobs = log_softmax(logits_V)
    best = np.argsort(-logits_V, kind="stable")[: logits_V.size if num_top < 0 else num_top]
    rank = 1 + int((logits_V > logits_V[token]).sum())
    return TokenLogprobs(token, float(logprobs[token]), rank, best.tolist(), logprobs[best].tolist())


def unsound(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, math.nan, 0, [], [])


def is_sound(logits_V: Row) -> bool:
    """Tell whether there is no NaN and no +inf; -inf means a forbidden token."""
    return bool((logits_V < np.inf).all())


class ReferenceSampler:
    """The oracle: one row at a time, by the definitions."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._slots: dict[int, SlotSampling] = {}

    def set(self, slot: int, state: SlotSampling) -> None:
        check_token_ids(state, self.vocab_size)
        self._slots[slot] = state

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def extend(self, slot: int, tokens: list[int]) -> None:
        if slot not in self._slots:
            raise EngineError(f"slot {slot} was never set")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise EngineError(f"tokens outside the vocabulary of {self.vocab_size}")
        self._slots[slot].output_tokens += tokens

    def retract(self, slot: int, count: int) -> None:
        state = self._slots.get(slot)
        if state is None or len(state.output_tokens) < count:
            raise EngineError(f"slot {slot} does not have {count} tokens")
        del state.output_tokens[len(state.output_tokens) - count :]

    def sample(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        drafts: list[int] | None = None,
        masks_LW: TokenMask | None = None,
    ) -> Samples:
        own = host_logits(logits, self.vocab_size)
        logits_LV = own.values
        drafts = check_rows(len(own), self.vocab_size, slots, positions, drafts, masks_LW)
        samples = Samples([NOT_DRAWN] * len(logits_LV))
        for i, (logits_V, slot) in enumerate(zip(logits_LV, slots, strict=True)):
            state = self._slots.get(slot)
            if state is None:
                raise EngineError(f"slot {slot} was never set")
            follows = i > 0 and slots[i - 1] == slot
            if follows:
                before = samples.tokens[i - 1]
                if before == NOT_DRAWN or before != drafts[i - 1]:
                    continue
            if positions[i] != state.position:
                raise EngineError(f"slot {slot} is at position {state.position}, not {positions[i]}")
            outcome = self._row(logits_V, state, None if masks_LW is None else masks_LW[i])
            if isinstance(outcome, str):
                samples.errors[i] = outcome
                continue
            samples.tokens[i] = outcome
            state.output_tokens.append(outcome)
            if state.params.wants_logprobs:
                samples.logprobs[i] = top_logprobs(logits_V, outcome, state.params.logprobs or 0)
        return samples

    def _row(self, raw_V: Row, state: SlotSampling, mask: TokenMask | None) -> int | str:
        if not is_sound(raw_V):
            return BAD_LOGITS
        logits_V = raw_V.copy()
        for stage in STAGES:
            stage(logits_V, state, mask)
        if not is_sound(logits_V):
            return BAD_LOGITS
        if logits_V.max() == -np.inf:
            return NOTHING_ALLOWED
        if is_greedy(state.params):
            return int(logits_V.argmax())
        kept_V = truncate(logits_V, state.params)
        return draw(logits_V, kept_V, state.params.temperature, state.seed, state.position)

    def logprobs(self, logits: Logits, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        own = host_logits(logits, self.vocab_size)
        check_targets(own, targets_L)
        return [
            top_logprobs(row, target, num_top) if is_sound(row) else unsound(target)
            for row, target in zip(own.values, targets_L.tolist(), strict=True)
        ]
