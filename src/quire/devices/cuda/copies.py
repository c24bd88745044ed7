"""Copies between the host and a device, for which nobody waits before their values are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.devices.cuda.errors import device_errors
from quire.devices.protocol import Array


def sent(numbers: Array, device: Any) -> Any:
    """Copy numbers to the device. They lie in pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(numbers)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def aligned(part: Array) -> Array:
    """Pad int32 numbers to whole pieces of 16 bytes: kernels are compiled for such places."""
    return np.concatenate([part.reshape(-1), np.zeros(-part.size % 4, np.int32)])


def padded(part: Array, count: int, fill: int) -> Array:
    """Numbers, and others of one value up to a count. ValueError: there are more."""
    return np.concatenate([part, np.full(count - len(part), fill, part.dtype)])


class Fetched:
    """A tensor's values as they are now, on the host once the device has computed them."""

    def __init__(self, tensor: Any) -> None:
        self._host = tensor.to("cpu", copy=True, non_blocking=True)  # pinned memory if it is a GPU's
        gpu: Any = torch.cuda
        self._event = gpu.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    @device_errors()
    def result(self) -> Array:
        """Wait for the values."""
        if self._event is not None:
            self._event.synchronize()
        found: Array = self._host.numpy()
        return found
