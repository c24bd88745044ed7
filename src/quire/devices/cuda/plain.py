"""Operations that have no kernel, in plain torch over a device's tensors: row by row, exact, and slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.devices.cuda.cache import CudaKVCache
from quire.devices.ops import Op, Value, resolved
from quire.devices.protocol import ModelInput
from quire.devices.step import StepAdapters
from quire.devices.torch.cache import TorchStep
from quire.devices.torch.ops import FORMULAS

if TYPE_CHECKING:
    from quire.devices.cuda.record import Call
    from quire.devices.cuda.step import CudaStep


class Side:
    """Keys or values [blocks, G, rows, H] of a layer by place, block * rows + row; int8 ones as what they stand for."""

    def __init__(self, tensor: Any, scales: Any) -> None:
        self._tensor, self._scales = tensor, scales if tensor.dtype == torch.int8 else None
        self.shape, self.dtype = tensor.shape, torch.float32 if tensor.dtype == torch.int8 else tensor.dtype

    def _at(self, places: Any) -> tuple[Any, ...]:
        rows = self._tensor.shape[2]
        return places // rows, slice(None), places % rows

    def __getitem__(self, places: Any) -> Any:
        found, at = self._tensor, self._at(places)
        return found[at] if self._scales is None else found[at].float() * self._scales[at][..., None]

    def __setitem__(self, place: Any, rounded: Any) -> None:
        at = self._at(place)
        if self._scales is not None:
            self._scales[at] = scales = rounded.abs().amax(-1) / 127
            rounded = (rounded / scales.clamp(min=1e-30)[..., None]).round().to(torch.int8)
        self._tensor[at] = rounded


class PlainCache:
    """A cache as formulas read and write it. States have kernels."""

    def __init__(self, cache: CudaKVCache) -> None:
        self.spec, self.block_size, self.device = cache.spec, cache.block_size, cache.device
        self.keys, self.values, self.key_scales, self.value_scales = [], [], [], []
        self.constants: dict[int, Any] = {}
        fixed = cache.spec.dtype.startswith("fp8")
        for index, layer in enumerate(cache.layers):
            values, scales = layer.values, layer.value_scales
            if values is None:
                values, scales = layer.keys[..., : self.spec.layer(index).value_dim], layer.key_scales
            self.keys.append(Side(layer.keys, layer.key_scales))
            self.values.append(Side(values, scales))
            self.key_scales.append(layer.key_scales[:, None] if fixed else 1.0)
            self.value_scales.append(scales[:, None] if fixed else 1.0)


def plain_step(inputs: ModelInput, cache: CudaKVCache) -> TorchStep:
    """A step as formulas read it."""
    own: Any = PlainCache(cache)
    return TorchStep(inputs, own, StepAdapters({}, None))


def encode_plain(op: Op[Value], out: Value) -> Call:
    """Compute an operation by its formula, in float32."""
    formula = FORMULAS[type(op)]

    def call(step: CudaStep) -> None:
        if step[out].is_meta:  # nothing to launch
            return
        given = resolved(op, lambda value: step[value].float())
        step[out].copy_(formula(step.plain, given))

    return call
