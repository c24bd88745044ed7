"""Samples on the host from a device's logits; where only the largest of a row is needed, the device finds it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda.copies import Fetched, sent
from quire.devices.cuda.errors import device_errors
from quire.devices.cuda.kernels.reduce import largest
from quire.devices.cuda.launch import Launcher
from quire.devices.host import HostLogits
from quire.devices.sampling import (
    BAD_LOGITS,
    NOT_DRAWN,
    NOTHING_ALLOWED,
    Logits,
    Pending,
    Samples,
    SlotSampling,
    TokenMask,
)
from quire.devices.torch.run import TorchLogits
from quire.errors import EngineError


@dataclass(frozen=True, slots=True)
class GreedyLogits(TorchLogits):
    """Logits of a step that needs the largest of each row alone."""


class Chosen:
    """The largest of each row, as the device finds it. `owners` are the turns of the slots that drew."""

    def __init__(self, sampler: CudaSampler, fetched: Fetched, slots: list[int]) -> None:
        self._sampler, self._fetched, self._slots = sampler, fetched, slots
        self._owners = [sampler.turns[slot] for slot in slots]
        self._samples: Samples | None = None

    def result(self) -> Samples:
        """Wait for the tokens, and append them to the outputs of slots that were not taken anew."""
        if self._samples is None:
            values, found = self._fetched.result()
            tokens: list[int] = found.view(np.int32).tolist()
            self._samples = samples = Samples(tokens)
            for row in np.flatnonzero(~np.isfinite(values)).tolist():
                tokens[row] = NOT_DRAWN
                samples.errors[row] = NOTHING_ALLOWED if values[row] == -np.inf else BAD_LOGITS
            self._sampler.append(self._slots, self._owners, tokens)
        return self._samples


class CudaSampler(NativeSampler):
    """Copies logits to the host, which draws the tokens that the CPU draws; of greedy rows the device chooses alone.

    `last_tokens` on the device has the token drawn last for each slot.
    """

    def __init__(self, vocab_size: int, pool: Any, run: Launcher, last_tokens: Any) -> None:
        super().__init__(vocab_size, pool)
        self.turns: Counter[int] = Counter()  # how often each slot was taken
        self._run, self._last_tokens = run, last_tokens
        self._open: deque[Chosen] = deque()  # whose tokens are not in the outputs of their slots

    def set(self, slot: int, state: SlotSampling) -> None:
        self.turns[slot] += 1
        super().set(slot, state)

    def clear(self, slot: int) -> None:
        self.turns[slot] += 1
        super().clear(slot)

    @device_errors()
    def sample(
        self,
        logits: Logits,
        slots: list[int],
        positions: list[int],
        drafts: list[int] | None = None,
        masks_LW: TokenMask | None = None,
    ) -> Pending[Samples]:
        if isinstance(logits, GreedyLogits) and drafts is None and masks_LW is None:
            return self._choose(logits, slots)
        while self._open:
            self._open[0].result()
        samples = super().sample(logits, slots, positions, drafts, masks_LW).result()
        drawn = {slot: t for slot, t in zip(slots, samples.tokens, strict=True) if t != NOT_DRAWN}
        if drawn:
            places, tokens = sent(np.array([[*drawn], [*drawn.values()]]), self._last_tokens.device)
            self._last_tokens[places] = tokens.int()
        return samples

    def append(self, slots: list[int], owners: list[int], tokens: list[int]) -> None:
        """Append chosen tokens, the oldest that are open, to the outputs of their slots."""
        self._open.popleft()
        for slot, owner, token in zip(slots, owners, tokens, strict=True):
            if token != NOT_DRAWN and self.turns[slot] == owner:
                self.extend(slot, [token])

    def _choose(self, logits: GreedyLogits, slots: list[int]) -> Chosen:
        if len(slots) != len(logits):
            raise EngineError(f"slots must have one entry for each of {len(logits)} rows, got {len(slots)}")
        found = self._largest(logits)
        self._last_tokens[sent(np.array(slots), found.device)] = found[1].view(torch.int32)
        self._open.append(chosen := Chosen(self, Fetched(found), slots))
        return chosen

    def _largest(self, logits: GreedyLogits) -> Any:
        """The largest of each row, and its id in the bits of a float: [2, L] on the device."""
        tensor = logits.tensor
        found = torch.empty(2, len(tensor), dtype=torch.float32, device=tensor.device)
        largest(self._run, tensor, found[0], found[1].view(torch.int32))
        return found

    def _copied(self, logits: Logits, sampled: bool = False) -> HostLogits:
        if not isinstance(logits, TorchLogits):
            raise EngineError(f"a GPU's sampler got logits of {type(logits).__name__}")
        best = self._best(logits) if sampled and isinstance(logits, GreedyLogits) else None
        return best or HostLogits(logits.numpy())

    def _best(self, logits: GreedyLogits) -> HostLogits | None:
        """The largest of each row, found on the device; None if a row is not finite."""
        values, ids = self._largest(logits).cpu().numpy()
        if not np.isfinite(values).all():
            return None
        best, host = ids.view(np.int32), np.empty(logits.tensor.shape, np.float32)
        host[np.arange(len(best)), best] = values  # the only ones that are read
        return HostLogits(host, best)
