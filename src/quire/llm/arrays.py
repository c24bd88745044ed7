"""Outputs as one array of token ids, for callers that compute on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.client.outputs import RequestOutput
from quire.devices.protocol import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """S sequences of each of B prompts. `ids` [B, S, L] begin with the prompt and end in the padding.

    `lengths` [B, S] count the tokens before the padding, including the prompt's. `cumulative_logprobs` [B, S] are
    zero unless log-probabilities were asked for. Sequences that a beam search could not fill have the prompt alone.
    """

    ids: IntArray
    lengths: IntArray
    cumulative_logprobs: FloatArray


def token_arrays(outputs: Sequence[RequestOutput], length: int, pad_id: int) -> TokenArrays:
    """Arrange the tokens of finished requests in rows of `length`, filled with `pad_id`."""
    count = max((len(output.outputs) for output in outputs), default=0)
    ids = np.full((len(outputs), count, length), pad_id, np.int32)
    lengths = np.zeros((len(outputs), count), np.int32)
    logprobs = np.zeros((len(outputs), count), np.float32)
    for i, output in enumerate(outputs):
        for j, sample in enumerate(output.outputs):
            tokens = [*output.prompt_token_ids, *sample.token_ids]
            ids[i, j, : len(tokens)], lengths[i, j] = tokens, len(tokens)
            logprobs[i, j] = sample.cumulative_logprob or 0.0
    return TokenArrays(ids, lengths, logprobs)
