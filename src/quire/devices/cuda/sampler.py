"""Samples on the host from a device's logits; where only the largest of a row is needed, the device finds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.devices.cpu.sampler import NativeSampler
from quire.devices.cuda.kernels.reduce import largest
from quire.devices.cuda.launch import Launcher
from quire.devices.host import HostLogits
from quire.devices.sampling import Logits
from quire.devices.torch.run import TorchLogits
from quire.errors import EngineError


@dataclass(frozen=True, slots=True)
class GreedyLogits(TorchLogits):
    """Logits of a step that needs the largest of each row alone."""


class CudaSampler(NativeSampler):
    """Copies logits to the host, which draws the tokens that the CPU draws; of greedy rows only the choice."""

    def __init__(self, vocab_size: int, pool: Any, run: Launcher) -> None:
        super().__init__(vocab_size, pool)
        self._run = run

    def _copied(self, logits: Logits, sampled: bool = False) -> HostLogits:
        if not isinstance(logits, TorchLogits):
            raise EngineError(f"a GPU's sampler got logits of {type(logits).__name__}")
        best = self._best(logits) if sampled and isinstance(logits, GreedyLogits) else None
        return best or HostLogits(logits.numpy())

    def _best(self, logits: GreedyLogits) -> HostLogits | None:
        """The largest of each row, found on the device; None if a row is not finite."""
        tensor = logits.tensor
        found = torch.empty(2, len(tensor), dtype=torch.float32, device=tensor.device)
        largest(self._run, tensor, found[0], found[1].view(torch.int32))
        values, ids = found.cpu().numpy()
        if not np.isfinite(values).all():
            return None
        best, host = ids.view(np.int32), np.empty(tensor.shape, np.float32)
        host[np.arange(len(best)), best] = values  # the only ones that are read
        return HostLogits(host, best)
