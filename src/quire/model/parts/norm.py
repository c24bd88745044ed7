"""Norms of hidden states, and of the heads of queries, keys and values."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from quire.devices.graph import Recorder
from quire.devices.ops import Normalize, Value
from quire.devices.protocol import FloatArray, NormKind
from quire.devices.protocol import Norm as Operand
from quire.model.parts.source import Piece, WeightSource, read_vector

# One weight shared by all heads, one per head, or statistics over all heads together.
QKNorm = Literal["head", "own_head", "all_heads"]


class NormConfig(msgspec.Struct, frozen=True):
    """A norm without a `weight` multiplies by 1."""

    kind: NormKind
    eps: float
    weight: bool = True
    bias: bool = False


class Norm:
    """y = x / rms(x) * weight, or LayerNorm. `scale` multiplies the weight."""

    def __init__(
        self, config: NormConfig, source: WeightSource, path: str, size: int, scale: float = 1.0
    ) -> None:
        weight = np.ones(size, np.float32)
        if config.weight:
            weight = read_vector(source, f"{path}.weight", size)
        if scale != 1.0:
            weight = weight * np.float32(scale)
        bias = read_vector(source, f"{path}.bias", size) if config.bias else None
        self.path, self.operand = path, Operand(config.kind, weight, bias, config.eps)

    def __call__(self, g: Recorder, x: Value) -> Value:
        return g(Normalize(x, self.operand, self.path))


class HeadNormConfig(msgspec.Struct, frozen=True):
    """The norm of queries and keys, before their rotation or after it."""

    norm: NormConfig
    over: QKNorm = "head"
    after_rope: bool = False


def head_norm(
    config: HeadNormConfig, source: WeightSource, path: str, heads: int, own: range, size: int
) -> Operand:
    """The norm of the `own` ones of `heads` heads of `size` elements."""
    norm = config.norm

    def read(kind: str) -> FloatArray:
        if config.over == "own_head":
            pieces = [Piece(f"{path}.{n}.{kind}", (size,)) for n in own]
            return source.vector(f"{path}.{kind}", pieces).reshape(-1, size)
        width = heads * size if config.over == "all_heads" else size
        return read_vector(source, f"{path}.{kind}", width)

    weight = read("weight") if norm.weight else np.ones(size, np.float32)
    bias = read("bias") if norm.bias and norm.weight else None
    return Operand(norm.kind, weight, bias, norm.eps, config.after_rope)


def plain_norm(config: NormConfig, size: int) -> Operand:
    """A norm whose weights are 1."""
    return Operand(config.kind, np.ones(size, np.float32), None, config.eps)
