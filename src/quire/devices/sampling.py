"""A backend's sampler: state per slot, and tokens sampled from logits that stay on the device.

Knows slots, token ids and sampling parameters; knows no model, scheduler or text.

Sampling is Gumbel-max (Gumbel 1954): the token with the largest logit / temperature + noise, with noise that is a pure
function of (seed, position, token). So a token depends only on its own row and slot, and a speculative draft is
accepted exactly when it equals the token that would be sampled anyway.

Shape letters: L rows, V vocabulary, W = ceil(V / 32) words of a token mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import EngineError
from quire.params import SamplingParams
from quire.types import TokenLogprobs

IntArray = NDArray[np.int32]
TokenMask = NDArray[np.uint32]
T_co = TypeVar("T_co", covariant=True)

NOT_DRAWN = -1
BAD_LOGITS = "the model's logits hold NaN or +inf"
NOTHING_ALLOWED = (
    "every token is forbidden: allowed_token_ids, bad_words, min_tokens, logit_bias and masks leave none"
)
GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: 1 / temperature would leave float32's useful range."""


@dataclass(slots=True)
class SlotSampling:
    """How to sample one sequence, and its tokens so far. Token ids must be below the vocabulary size.

    `stop_ids` (end-of-sequence and stop tokens) are masked until there are `params.min_tokens` tokens.
    `bad_words` are token sequences that must not complete within the output. The sampler that owns the slot
    appends to `output_tokens`.
    """

    seed: int
    params: SamplingParams
    prompt_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def position(self) -> int:
        """Return the index in the sequence of the next token to sample."""
        return len(self.prompt_tokens) + len(self.output_tokens)


class Pending(Protocol[T_co]):
    """A result that a device may still compute."""

    def result(self) -> T_co:
        """Wait for the result. Steps that were launched later do not change it."""


class Samples(msgspec.Struct):
    """The tokens sampled by one call, on the host: a result that is complete at once.

    `tokens` has one per row: NOT_DRAWN if the row failed, or follows a rejected draft or a failed row. `logprobs` has
    an entry for each sampled row whose slot asks for them. `errors` maps a failed row to the reason.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    errors: dict[int, str] = {}

    def result(self) -> Samples:
        return self


class Logits(Protocol):
    """Rows of logits [L, V] where the device holds them; only the sampler of the same backend reads them.

    They are valid until the executable's next `run` or `logits`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Sequence[int]) -> Logits:
        """Return some of the rows."""

    def replaced(self, rows: Sequence[int], values: NDArray[np.float32]) -> Logits:
        """Return these logits with other values [len(rows), V] in `rows`; their buffer may be overwritten."""

    def largest(self, width: int) -> IntArray:
        """Return, on the host, the lowest id among the largest of each row's first `width` logits."""

    def widened(self, columns: IntArray, ids: IntArray, width: int) -> Logits:
        """Return rows of `width` tokens, of which `ids` have the logits of `columns`, and others -inf."""

    def numpy(self) -> NDArray[np.float32]:
        """Return a host array [L, V], perhaps a view: for tools and tests, since a step samples on the device."""


class Sampler(Protocol):
    """State per slot, and sampling of many rows at once. Reads only its own backend's `Logits`."""

    def set(self, slot: int, state: SlotSampling) -> None:
        """Start or replace a slot; the sampler owns `state` from now on. EngineError for a bad token id."""

    def clear(self, slot: int) -> None:
        """Forget a slot. Unknown slots are ignored."""

    def extend(self, slot: int, tokens: list[int]) -> None:
        """Append tokens that were not sampled to a slot's output. EngineError for a bad token id or slot."""

    def retract(self, slot: int, count: int) -> None:
        """Take the last `count` tokens of a slot's output back, so that it draws as before them.

        EngineError: the slot's output is shorter, or the slot was never set.
        """

    def sample(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        drafts: list[int] | None = None,
        masks_LW: TokenMask | None = None,
    ) -> Pending[Samples]:
        """Sample one token per row of `logits` and append it to its slot's output. Does not change the logits.

        `positions` is the index in the sequence of each sampled token. Rows of one slot are adjacent, at consecutive
        positions; `drafts[i]` is the input token of row i + 1 of the slot. That row is sampled only if row i sampled
        this token, so the output is the same with and without drafts. `masks_LW` has one bit per token (token % 32 of
        word token // 32); 0 forbids it. EngineError for another backend's logits, or a wrong shape, slot or
        position.
        """

    def logprobs(self, logits: Logits, targets_L: IntArray, num_top: int) -> list[TokenLogprobs]:
        """Return the log-probability of each row's target, with the `num_top` best tokens (-1: all), on the host.

        A row with NaN or +inf gets logprob NaN, rank 0 and no best tokens.
        """


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def takes_largest(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> bool:
    """Tell whether sampling needs only the largest of the model's logits."""
    return is_greedy(params) and not params.wants_logprobs and not edits_logits(params, bad_words)


def edits_logits(params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> bool:
    """Tell whether logits may change before a token is drawn from them."""
    return (
        params.allowed_token_ids is not None
        or bool(bad_words)
        or params.min_tokens != 0
        or bool(params.logit_bias)
        or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


def lowest_scaled(params: SamplingParams) -> np.float32:
    """Return the least scaled logit that min_p keeps: tokens at least min_p times as likely as the likeliest (Nguyen et
    al. 2024).
    """
    lowest = np.float32(np.finfo(np.float32).min)
    return max(lowest, np.float32(math.log(params.min_p))) if params.min_p > 0.0 else lowest


def check_token_ids(state: SlotSampling, vocab_size: int) -> None:
    """Raise EngineError if `state` has a token id outside the vocabulary."""
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
