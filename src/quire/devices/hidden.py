"""Hidden states that drafters read: arrays in host memory, or rows where a device has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.devices.protocol import FloatArray


class DeviceRows(Protocol):
    """Rows [n, D] on a device, which later steps do not change; `np.asarray` copies them to the host, float32."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Sequence[int]) -> DeviceRows: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> FloatArray: ...

    def join(self, parts: Sequence[Any], axis: int) -> DeviceRows:
        """Copy parts, of which this is one, side by side: rows on axis 0, columns on axis 1."""

    def normalized(self, weight: FloatArray, eps: float) -> DeviceRows:
        """RMSNorm of each row, in float32."""


HiddenRows = FloatArray | DeviceRows


def join(parts: Sequence[HiddenRows], axis: int = 0) -> HiddenRows:
    """Copy parts of one device side by side: rows on axis 0, columns on axis 1."""
    first = parts[0]
    if not isinstance(first, np.ndarray):
        return first.join(parts, axis)
    return np.concatenate([np.asarray(part) for part in parts], axis=axis, dtype=np.float32)


def normalized(x: HiddenRows, weight: FloatArray, eps: float) -> HiddenRows:
    """RMSNorm of each row."""
    if not isinstance(x, np.ndarray):
        return x.normalized(weight, eps)
    scaled: FloatArray = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps)) * weight
    return scaled
