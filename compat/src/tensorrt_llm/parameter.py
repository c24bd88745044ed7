"""Weights of layers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from quire.errors import ConfigError

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Parameter:
    """Parameter of a layer. Set `value` to an array of its shape in float32, float16 or bfloat16 before the build."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self._value: np.ndarray | None = None

    @property
    def value(self) -> np.ndarray | None:
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        array = np.asarray(value)
        if array.dtype not in FLOATS:
            raise ConfigError(
                f"a weight must be float32, float16 or bfloat16 (ml_dtypes.bfloat16), got {array.dtype}"
            )
        if array.shape != self.shape:
            raise ConfigError(f"a weight of shape {list(self.shape)} cannot hold {list(array.shape)}")
        self._value = array


__all__ = ["Parameter"]
