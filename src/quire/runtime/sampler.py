"""Draws tokens from logits by slot: the numpy oracle and the native sampler. Knows no scheduler, model or
text.

A draw is Gumbel-max (Gumbel 1954): the token with the largest logit / temperature + noise, where the noise is
a pure function of (seed, position, token). So a token depends on its own row and slot alone, and a
speculative draft is accepted exactly when it equals the token that is drawn anyway.

Shape letters: L rows, V vocabulary, W = ceil(V / 32) words of a token mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.errors import EngineError
from quire.runtime.logits import (
    STAGES,
    BoolRow,
    Row,
    SlotSampling,
    TokenMask,
    is_greedy,
    log_softmax,
    lowest_scaled,
    truncate,
)
from quire.types import TokenLogprobs

__all__ = [
    "NativeSampler",
    "ReferenceSampler",
    "Sampler",
    "Samples",
    "SlotSampling",
    "draw",
    "gumbel",
    "philox",
]

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
Float64Array = NDArray[np.float64]

NOT_DRAWN = -1
BAD_LOGITS = "the model's logits hold NaN or +inf"
NOTHING_ALLOWED = (
    "every token is forbidden: allowed_token_ids, bad_words, min_tokens, logit_bias and masks leave none"
)


@dataclass(slots=True)
class Samples:
    """What one call drew. `tokens` [L] is NOT_DRAWN where the row failed, or follows a rejected draft or a
    failed row.

    `logprobs` has an entry for each drawn row whose slot asks for them; `errors` maps a row to what was
    wrong with it.
    """

    tokens: IntArray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler(Protocol):
    """State by slot, and draws for many rows at once."""

    def set(self, slot: int, state: SlotSampling) -> None:
        """Start or replace a slot; the sampler owns `state` from now on. EngineError: a bad token id."""

    def clear(self, slot: int) -> None:
        """Forget a slot; unknown slots are fine."""

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Append tokens to a slot's output that were not drawn. EngineError: a bad token id or slot."""

    def sample(
        self,
        logits_LV: FloatArray,
        slots_L: IntArray,
        positions_L: IntArray,
        drafts_L: IntArray | None = None,
        masks_LW: TokenMask | None = None,
        best_L: IntArray | None = None,
    ) -> Samples:
        """Draw one token per row and append it to its slot's output. `logits_LV` is only read.

        `positions_L` is the index in the sequence of the token being drawn. Rows of one slot are adjacent, at
        consecutive positions; `drafts_L[i]` is the token that row i + 1 of the slot was computed with. That
        row is drawn only if row i drew this token, so the output is the same with and without drafts.
        `masks_LW` has one bit per token, 0 forbids (token % 32 of word token // 32). `best_L` is Executable.best, which
        saves looking for it. EngineError: a shape, slot or position is wrong.
        """

    def logprobs(self, logits_LV: FloatArray, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of `targets_L`, with the `num_top` best (-1: all).

        A row with NaN or +inf gives logprob NaN, rank 0 and no best.
        """


_ROUND_0, _ROUND_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[NDArray[np.uint64]], seed: int) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), 4 x 32 bits."""
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
    """Standard Gumbel noise of each token: -ln(-ln u), u from 52 bits and never 0 or 1."""
    high, low = (_bits(seed, position, tokens, part) for part in (0, 1))
    k = ((high << _HALF) | low) >> np.uint64(12)
    u = (k.astype(np.float64) * 2.0 + 1.0) * 2.0**-53
    return -log_portable(-log_portable(u))


def draw(logits_V: Row, kept_V: BoolRow, temperature: float, seed: int, position: int) -> int:
    """The kept token with the largest scaled logit plus noise; the lowest id among equals."""
    ids = np.flatnonzero(kept_V)
    x = logits_V[ids].astype(np.float64) - float(logits_V.max())
    return int(ids[np.argmax(x * (1.0 / temperature) + gumbel(seed, position, ids))])


def top_logprobs(logits_V: Row, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of `token`, and the `num_top` best (-1: all), from unmodified logits."""
    logprobs = log_softmax(logits_V)
    best = np.argsort(-logits_V, kind="stable")[: logits_V.size if num_top < 0 else num_top]
    rank = 1 + int((logits_V > logits_V[token]).sum())
    return TokenLogprobs(token, float(logprobs[token]), rank, best.tolist(), logprobs[best].tolist())


def unsound(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, math.nan, 0, [], [])


def is_sound(logits_V: Row) -> bool:
    """No NaN and no +inf; -inf is a token that cannot come."""
    return bool((logits_V < np.inf).all())


def check_ids(state: SlotSampling, vocab_size: int) -> None:
    """EngineError where a token id of `state` is outside the vocabulary."""
    params = state.params
    groups: dict[str, Sequence[int]] = {
        "prompt": state.prompt_tokens,
        "output": state.output_tokens,
        "stop_ids": state.stop_ids,
        "bad_words": [token for word in state.bad_words for token in word],
        "logit_bias": list(params.logit_bias or ()),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
    }
    for name, tokens in groups.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise EngineError(f"{name} has token ids outside the vocabulary of {vocab_size}")
    if not all(state.bad_words):
        raise EngineError("bad_words has an empty token sequence")


class ReferenceSampler:
    """The oracle: one row at a time, as the definitions read."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._slots: dict[int, SlotSampling] = {}

    def set(self, slot: int, state: SlotSampling) -> None:
        check_ids(state, self.vocab_size)
        self._slots[slot] = state

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def extend(self, slot: int, tokens: list[int]) -> None:
        if slot not in self._slots:
            raise EngineError(f"slot {slot} was never set")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise EngineError(f"tokens outside the vocabulary of {self.vocab_size}")
        self._slots[slot].output_tokens += tokens

    def sample(
        self,
        logits_LV: FloatArray,
        slots_L: IntArray,
        positions_L: IntArray,
        drafts_L: IntArray | None = None,
        masks_LW: TokenMask | None = None,
        best_L: IntArray | None = None,
    ) -> Samples:
        drafts_L = _check_rows(logits_LV, self.vocab_size, slots_L, positions_L, drafts_L, masks_LW, best_L)
        samples = Samples(np.full(len(logits_LV), NOT_DRAWN, dtype=np.int32))
        for i, (logits_V, slot) in enumerate(zip(logits_LV, slots_L.tolist(), strict=True)):
            state = self._slots.get(slot)
            if state is None:
                raise EngineError(f"slot {slot} was never set")
            follows = i > 0 and slots_L[i - 1] == slot
            if follows:
                before = samples.tokens[i - 1]
                if before == NOT_DRAWN or before != drafts_L[i - 1]:
                    continue
            if positions_L[i] != state.position:
                raise EngineError(f"slot {slot} is at position {state.position}, not {positions_L[i]}")
            outcome = self._row(logits_V, state, None if masks_LW is None else masks_LW[i])
            if isinstance(outcome, str):
                samples.errors[i] = outcome
                continue
            samples.tokens[i] = outcome
            state.output_tokens.append(outcome)
            if state.params.logprobs is not None:
                samples.logprobs[i] = top_logprobs(logits_V, outcome, state.params.logprobs)
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

    def logprobs(self, logits_LV: FloatArray, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        _check_targets(logits_LV, self.vocab_size, targets_L)
        return [
            top_logprobs(row, target, num_top) if is_sound(row) else unsound(target)
            for row, target in zip(logits_LV, targets_L.tolist(), strict=True)
        ]


class NativeSampler:
    """The same draws, bit for bit, in one call of C++ without the GIL on the thread pool.

    `pool` is a `quire._native.ThreadPool`; `isa` a name from `quire._native.available_isas()` or "auto".
    """

    def __init__(self, vocab_size: int, pool: Any, isa: str = "auto") -> None:
        self.vocab_size = vocab_size
        self._native = _native.Sampler(pool, isa, vocab_size)

    def set(self, slot: int, state: SlotSampling) -> None:
        check_ids(state, self.vocab_size)
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
        native.wants_logprobs = params.logprobs is not None
        native.num_top = (
            self.vocab_size if params.logprobs == -1 else min(params.logprobs or 0, self.vocab_size)
        )
        native.prompt, native.output = state.prompt_tokens, state.output_tokens
        native.stop_ids = state.stop_ids
        native.bad_words = state.bad_words
        native.bias = list((params.logit_bias or {}).items())
        native.allowed = params.allowed_token_ids or ()
        self._native.set(slot, native)

    def clear(self, slot: int) -> None:
        self._native.clear(slot)

    def extend(self, slot: int, tokens: list[int]) -> None:
        try:
            self._native.extend(slot, tokens)
        except ValueError as error:
            raise EngineError(str(error)) from error

    def sample(
        self,
        logits_LV: FloatArray,
        slots_L: IntArray,
        positions_L: IntArray,
        drafts_L: IntArray | None = None,
        masks_LW: TokenMask | None = None,
        best_L: IntArray | None = None,
    ) -> Samples:
        try:  # the native side checks shapes, slots and positions, and copies what has another type or order
            drawn = self._native.sample(logits_LV, slots_L, positions_L, drafts_L, masks_LW, best_L)
        except (ValueError, TypeError) as error:
            raise EngineError(str(error)) from error
        tokens_L, faults, logprobs = drawn
        samples = Samples(tokens_L)
        for row, finite in faults:
            samples.errors[row] = NOTHING_ALLOWED if finite else BAD_LOGITS
        for row, entry in logprobs:
            samples.logprobs[row] = TokenLogprobs(*entry)
        return samples

    def logprobs(self, logits_LV: FloatArray, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        _check_targets(logits_LV, self.vocab_size, targets_L)
        num_top = self.vocab_size if num_top < 0 else min(num_top, self.vocab_size)
        if len(logits_LV) == 0:
            return []
        entries = self._native.logprobs(logits_LV, np.ascontiguousarray(targets_L, dtype=np.int32), num_top)
        return [TokenLogprobs(*entry) for entry in entries]


def _check_logits(logits_LV: FloatArray, vocab_size: int) -> None:
    if logits_LV.dtype != np.float32 or logits_LV.ndim != 2 or logits_LV.shape[1] != vocab_size:
        raise EngineError(
            f"logits must be float32 [rows, {vocab_size}], got {logits_LV.dtype} {list(logits_LV.shape)}"
        )
    if logits_LV.size and logits_LV.strides[1] != logits_LV.itemsize and vocab_size > 1:
        raise EngineError("the logits of a row must be contiguous")


def _check_rows(
    logits_LV: FloatArray,
    vocab_size: int,
    slots_L: IntArray,
    positions_L: IntArray,
    drafts_L: IntArray | None,
    masks_LW: TokenMask | None,
    best_L: IntArray | None,
) -> IntArray:
    """Raise EngineError where the shapes disagree; returns the drafts, NOT_DRAWN where there are none."""
    _check_logits(logits_LV, vocab_size)
    rows = len(logits_LV)
    for name, array in (
        ("slots", slots_L),
        ("positions", positions_L),
        ("drafts", drafts_L),
        ("best", best_L),
    ):
        if array is not None and array.shape != (rows,):
            raise EngineError(f"{name} must have one entry for each of {rows} rows, got {list(array.shape)}")
    words = (vocab_size + 31) // 32
    if masks_LW is not None and masks_LW.shape != (rows, words):
        raise EngineError(f"token masks must be [{rows}, {words}], got {list(masks_LW.shape)}")
    starts = slots_L[np.flatnonzero(np.diff(slots_L, prepend=slots_L[:1] - 1))] if rows else slots_L
    if len(np.unique(starts)) != len(starts):
        raise EngineError("rows of one slot must be adjacent")
    if drafts_L is not None:
        return drafts_L
    if len(starts) != rows:
        raise EngineError("several rows of one slot need drafts")
    return np.full(rows, NOT_DRAWN, dtype=np.int32)


def _check_targets(logits_LV: FloatArray, vocab_size: int, targets_L: IntArray) -> None:
    _check_logits(logits_LV, vocab_size)
    if targets_L.shape != (len(logits_LV),):
        raise EngineError(f"targets must have one entry for each of {len(logits_LV)} rows")
    if targets_L.size and not 0 <= int(targets_L.min()) <= int(targets_L.max()) < vocab_size:
        raise EngineError(f"targets must be token ids below {vocab_size}")
