"""Tokens of drafts, drawn and kept on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.devices.cuda.copies import Fetched, sent
from quire.devices.cuda.errors import device_errors
from quire.devices.protocol import IntArray
from quire.devices.sampling import NOT_DRAWN, Logits
from quire.devices.torch.run import TorchLogits
from quire.errors import EngineError

if TYPE_CHECKING:
    from quire.devices.cuda.sampler import CudaSampler


class CudaDraws:
    """Draws with the noise and the limits of a sampler's slots, and leaves their outputs alone."""

    def __init__(
        self, sampler: CudaSampler, width: int, target_ids: IntArray | None, draft_ids: IntArray | None
    ) -> None:
        self._sampler, self._width = sampler, width
        self._target_ids, self._draft_ids = (
            None if ids is None else sent(ids, sampler.last_tokens.device) for ids in (target_ids, draft_ids)
        )

    def draws(self, slots: list[int]) -> bool:
        return self._sampler.following.isdisjoint(slots)

    @device_errors()
    def draw(self, logits: Logits, slots: list[int], positions: list[int] | None) -> Any:
        rows, last = device_rows(logits), self._sampler.last_tokens
        if positions is not None:
            drawn = self._sampler.draw_ahead(rows, slots, positions)
        else:
            drawn = rows[:, : self._width].argmax(1)
            drawn = drawn.int() if self._target_ids is None else self._target_ids[drawn]
        known = drawn.clamp(min=0)
        last[sent(np.array(slots), last.device)] = (
            known if self._draft_ids is None else self._draft_ids[known]
        )
        return drawn

    def read(self, drawn: Sequence[Any]) -> list[int]:
        tokens: list[int] = Fetched(torch.cat([*drawn]).clamp(min=NOT_DRAWN)).result().tolist()
        return tokens


def device_rows(logits: Logits) -> Any:
    """Return the rows of logits [L, V]. EngineError for another backend's."""
    if not isinstance(logits, TorchLogits):
        raise EngineError(f"a GPU's sampler got logits of {type(logits).__name__}")
    return logits.tensor
