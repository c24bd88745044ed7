"""What a low-rank adapter changes in a model, as a backend sees it. Knows weights; knows no checkpoint and no request.

LoRA (Hu et al. 2021, arXiv:2106.09685) adds the product of two thin matrices to a weight; DoRA (Liu et al. 2024,
arXiv:2402.09353) scales each output too. Shape letters as in protocol.py, with R the rank.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire.errors import EngineError
from quire.weights.schemes import WeightType
from quire.weights.tensor import FloatArray

if TYPE_CHECKING:
    from quire.devices.operands import Norm
    from quire.devices.protocol import ModelInput


class Up(msgspec.Struct, frozen=True):
    """Outputs start..start + O' - 1 get h[first .. first + r - 1] times weight.T, with weight [O', r]."""

    weight: FloatArray
    first: int
    start: int


class Change(msgspec.Struct, frozen=True):
    """How an adapter changes y = x W.T + bias: y = gain * (x W.T + sum of ups of h) + bias + shift, h = x down.T.

    For an embedding x is the one-hot token: down is [R, V], and outputs are hidden elements. gain and shift are [O],
    in the order of the weight's rows. `weight`, a Matrix, replaces W; `bias` [O] replaces the bias.
    """

    down: FloatArray | None = None
    ups: tuple[Up, ...] = ()
    gain: FloatArray | None = None
    shift: FloatArray | None = None
    weight: Any = None
    bias: FloatArray | None = None

    @property
    def nbytes(self) -> int:
        """Count the bytes of its values in the types that they have here."""
        given = (self.down, self.gain, self.shift, self.weight, self.bias, *(up.weight for up in self.ups))
        return sum(int(values.nbytes) for values in given if values is not None)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes of one adapter by the paths of the base's matrices and norms.

    `norms` are whole new norms. The low-rank weights of products are held in `dtype`. `path` and `digest` say which
    files it was read from. `pooling`, a PoolingHead, makes vectors in place of the base's; backends do not read it.
    """

    changes: Mapping[str, Change] = field(default_factory=dict)
    norms: Mapping[str, Norm] = field(default_factory=dict)
    dtype: WeightType = "float32"
    path: str = ""
    digest: str = ""
    pooling: Any = None


def check_slots(adapters: Container[int], inputs: ModelInput) -> None:
    """Raise EngineError if a step names a slot without an adapter."""
    for slot in [] if inputs.adapters_B is None else inputs.adapters_B.tolist():
        if slot >= 0 and slot not in adapters:
            raise EngineError(f"there is no adapter in slot {slot}")


def place_adapter(adapters: dict[int, Adapter], slot: int, adapter: Adapter | None, most: int) -> int:
    """Do `Executable.adapt` for a backend that uses adapters as they are."""
    if not 0 <= slot < most:
        raise EngineError(f"adapter slot {slot} is outside 0..{most - 1}")
    if adapter is None:
        adapters.pop(slot, None)
        return 0
    adapters[slot] = adapter
    return sum(change.nbytes for change in adapter.changes.values())


def dense(change: Change, outputs: int) -> FloatArray:
    """Return the change of the weight that `ups` and `down` make: [O, K]. For tests and plain backends."""
    assert change.down is not None
    delta = np.zeros((outputs, change.down.shape[1]), np.float64)
    for up in change.ups:
        rank = up.weight.shape[1]
        part = up.weight.astype(np.float64) @ change.down[up.first : up.first + rank].astype(np.float64)
        delta[up.start : up.start + len(up.weight)] += part
    return delta.astype(np.float32)
