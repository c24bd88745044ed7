"""Functions of one vector in host memory, in float64."""

from __future__ import annotations

import math

import numpy as np

from quire.devices.host import Float64Array
from quire.devices.protocol import Activation, Norm
from quire.errors import EngineError


def activate(kind: Activation, x: Float64Array) -> Float64Array:
    """Element-wise activation of one row."""
    if kind == "silu":
        return np.asarray(x / (1.0 + np.exp(-np.maximum(x, -700.0))))
    if kind == "relu":
        return np.maximum(x, 0.0)
    if kind == "relu2":
        return np.square(np.maximum(x, 0.0))
    if kind == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-np.maximum(x, -700.0))))
    if kind == "softplus":
        return np.logaddexp(0.0, x)
    if kind == "gelu":
        return 0.5 * x * (1.0 + np.array([math.erf(value) for value in (x / math.sqrt(2.0)).tolist()]))
    if kind == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    raise EngineError(f"there is no activation {kind!r} on the host")


def normalize(x: Float64Array, norm: Norm) -> Float64Array:
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm of one vector."""
    if norm.kind == "layer":
        x = x - np.mean(x)
    y: Float64Array = x / np.sqrt(np.mean(x * x) + norm.eps) * norm.weight
    return y if norm.bias is None else y + norm.bias
