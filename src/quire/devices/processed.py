"""Rows of logits as a sampler draws from them, for callers that report them. Plain numpy, on the host."""

from __future__ import annotations

import numpy as np

from quire.devices.reference.logits import STAGES, Row, log_softmax, truncate
from quire.devices.sampling import SlotSampling, TokenMask, is_greedy

__all__ = ["log_softmax", "processed_row"]


def processed_row(logits_V: Row, slot: SlotSampling, mask: TokenMask | None) -> Row:
    """Return the logits after masks, biases, penalties and temperature; -inf for tokens that cannot be drawn."""
    row = logits_V.copy()
    for stage in STAGES:
        stage(row, slot, mask)
    if is_greedy(slot.params) or not row.max() > -np.inf:
        return row
    kept = truncate(row, slot.params)
    row *= np.float32(1.0 / slot.params.temperature)
    row[~kept] = -np.inf
    return row
