"""The ordered stages from a row of logits to the tokens that may be sampled, in plain numpy.

Knows one row and the state of its slot; knows no batch, no model and no text. This is the definition that the
native sampler repeats bit for bit, so every step is one IEEE operation at a time (no fused multiply-add, no
library exp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.devices.sampling import SlotSampling, TokenMask, lowest_scaled
from quire.params import SamplingParams

Row = NDArray[np.float32]
BoolRow = NDArray[np.bool_]

WEIGHT_BITS = 34
EXP_FLOOR = np.float32(-80.0)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_POLYNOMIAL = tuple(map(np.float32, (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)))  # fmt: skip


def allowed_tokens(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Forbid all but `allowed_token_ids`."""
    if slot.params.allowed_token_ids is not None:
        allowed = np.zeros(logits_V.shape, dtype=np.bool_)
        allowed[list(slot.params.allowed_token_ids)] = True
        logits_V[~allowed] = -np.inf


def token_mask(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Forbid tokens whose bit (token % 32 of word token // 32) is 0; a grammar matcher fills the mask."""
    if mask is not None:
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
        logits_V[bits[: logits_V.size] == 0] = -np.inf


def bad_words(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Forbid the last token of each bad word whose other tokens end the output."""
    for word in slot.bad_words:
        output, head = slot.output_tokens, [*word[:-1]]
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            logits_V[word[-1]] = -np.inf


def min_tokens(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Forbid stop tokens until the output has `min_tokens`."""
    if len(slot.output_tokens) < slot.params.min_tokens:
        logits_V[list(slot.stop_ids)] = -np.inf


def logit_bias(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Add the given biases."""
    for token, bias in (slot.params.logit_bias or {}).items():
        logits_V[token] += np.float32(bias)


def repetition_penalty(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Divide positive and multiply other logits of tokens in prompt or output (Keskar et al. 2019, CTRL)."""
    if slot.params.repetition_penalty != 1.0:
        penalty = np.float32(slot.params.repetition_penalty)
        seen = np.unique(np.asarray(slot.prompt_tokens + slot.output_tokens, dtype=np.int64))
        x = logits_V[seen]
        with np.errstate(over="ignore"):
            logits_V[seen] = np.where(x > 0, x / penalty, x * penalty)


def frequency_and_presence(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> None:
    """Subtract frequency_penalty * count and then presence_penalty from tokens of the output."""
    if slot.params.frequency_penalty != 0.0 or slot.params.presence_penalty != 0.0:
        seen, counts = np.unique(np.asarray(slot.output_tokens, dtype=np.int64), return_counts=True)
        logits_V[seen] -= np.float32(slot.params.frequency_penalty) * counts.astype(np.float32)
        logits_V[seen] -= np.float32(slot.params.presence_penalty)


Stage = Callable[[Row, SlotSampling, TokenMask | None], None]

STAGES: tuple[Stage, ...] = (
    allowed_tokens, token_mask, bad_words, min_tokens, logit_bias, repetition_penalty, frequency_and_presence,
)  # fmt: skip
"""In order, as vLLM applies them: a bias adds and a penalty scales, so the two do not commute."""


def scaled(logits_V: Row, temperature: float) -> Row:
    """(logits - max) / temperature in float32: at most 0, -inf where forbidden."""
    with np.errstate(over="ignore"):
        result: Row = (logits_V - logits_V.max()) * np.float32(1.0 / temperature)
    return result


def exp_portable(t: Row) -> Row:
    """exp(t) for t <= 0, within 2 ulp, from float32 multiplications and additions alone (Cephes `expf`).

    Arguments under -80 count as -80. Any language and vector width gives the same bits.
    """
    t = np.maximum(t, EXP_FLOOR)
    n = np.rint(t * _LOG2_E)
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    y = np.full_like(t, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        y = y * r + coefficient
    y = (y * (r * r) + r) + np.float32(1.0)
    result: Row = np.ldexp(y, n.astype(np.int32))
    return result


def weights(t_V: Row) -> NDArray[np.int64]:
    """exp(t) as integers, in units of the largest over 2^34, so that sums are exact in any order.

    The unit is coarser above 2^19 tokens, to keep the sum below 2^53.
    """
    bits = min(WEIGHT_BITS, 53 - (t_V.size - 1).bit_length())
    return np.rint(exp_portable(t_V).astype(np.float64) * 2.0**bits).astype(np.int64)


def best_first(logits_V: Row, kept_V: BoolRow) -> NDArray[np.intp]:
    """Ids of the kept tokens, largest logit first, the lower id first among equals."""
    ids = np.flatnonzero(kept_V)
    order = np.argsort(-logits_V[ids], kind="stable")
    return ids[order]


def _only(ids: NDArray[np.intp], size: int) -> BoolRow:
    kept = np.zeros(size, dtype=np.bool_)
    kept[ids] = True
    return kept


def truncate(logits_V: Row, params: SamplingParams) -> BoolRow:
    """Return the tokens that may be sampled: min_p, then exactly top_k, then the nucleus top_p of the rest.

    top_p (Holtzman et al. 2020) keeps the fewest tokens, best first, whose weights sum to at least top_p of
    the sum over the tokens that min_p and top_k left. `best_first` is the order in both.
    """
    t_V = scaled(logits_V, params.temperature)
    kept = t_V >= lowest_scaled(params)
    if 0 < params.top_k < int(kept.sum()):
        kept = _only(best_first(logits_V, kept)[: params.top_k], logits_V.size)
    if params.top_p < 1.0:
        ids = best_first(logits_V, kept)
        cumulative = np.cumsum(weights(t_V)[ids])
        needed = int(np.searchsorted(cumulative, params.top_p * float(cumulative[-1]), side="left")) + 1
        kept = _only(ids[:needed], logits_V.size)
    return kept


def log_softmax(logits_V: Row) -> NDArray[Any]:
    """Compute the natural log of the softmax, in float64."""
    x = logits_V.astype(np.float64)
    x -= x.max()
    result: NDArray[Any] = x - np.log(np.exp(x).sum())
    return result
