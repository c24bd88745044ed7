"""Weights as tensors of a device, in the order in which its kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from quire.devices.cuda.blocks import PROBES, common_form, taken_apart
from quire.devices.cuda.kernels.packed import Form, PackedWeight
from quire.devices.protocol import Array, FloatArray, Matrix, WeightType
from quire.errors import ConfigError, EngineError
from quire.weights.layouts import AnyLayout, Blocks, Int8
from quire.weights.schemes import Quantized
from quire.weights.tensor import FloatDtype, QuantTensor

DTYPES: dict[FloatDtype, Any] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip


class CudaMatrix:
    """A weight [O, K] in its type, or packed. If `gated`, rows of the gate and of the up projection alternate.

    If it `rounds`, products round their inputs to int8, one scale for each row.
    """

    def __init__(
        self, values: Any, gated: bool = False, packed: PackedWeight | None = None, rounds: bool = False
    ) -> None:
        self.values, self.gated, self.packed, self.rounds = values, gated, packed, rounds

    @classmethod
    def pack(
        cls,
        parts: Sequence[Array | QuantTensor],
        dtype: WeightType,
        device: Any,
        gated: bool = False,
        packs: Callable[[AnyLayout], bool] = lambda layout: False,
    ) -> CudaMatrix:
        """Round parts to `dtype` and stack them. ConfigError for a layout that is none of those that `packs` takes."""
        if isinstance(dtype, Quantized):
            if dtype.activations not in ("int8", "float"):
                raise ConfigError(
                    "no GPU kernel rounds activations as the checkpoint says: choose --quantization-activations int8"
                )
            if not packs(dtype.layout):
                raise ConfigError(
                    f"no GPU kernel multiplies {dtype.layout.label} weights of this form: choose --quantization int8, "
                    "int4 or fp8, leave it out (quantized checkpoints are then held as floats), or choose --device cpu"
                )
            made = _packed(parts, dtype.layout, device, gated)
            rounds = (
                dtype.activations == "int8" and not isinstance(dtype.layout, Blocks) and not made.form.fine
            )
            return cls(None, gated, made, rounds)
        columns = parts[0].shape[1]
        if device.type == "meta":
            rows = sum(part.shape[0] for part in parts)
            return cls(torch.empty(rows, columns, dtype=DTYPES[dtype], device=device), gated)
        tensors = [_tensor(part).to(device).to(DTYPES[dtype]) for part in parts]
        return cls(_stacked(tensors, gated), gated)

    @property
    def dtype(self) -> Any:
        """The type of its values; None: it is packed."""
        return None if self.packed is not None else self.values.dtype

    @property
    def form(self) -> tuple[Any, ...]:
        """What products must know of it."""
        return (self.dtype if self.packed is None else self.packed.form, self.rounds)

    def dense(self, dtype: Any) -> Any:
        """Its values; those of a packed weight in a type."""
        if self.packed is None:
            return self.values
        return self.packed.values().to(dtype)

    @property
    def shape(self) -> tuple[int, int]:
        if self.packed is not None:
            return len(self.packed.codes), self.packed.columns
        rows, columns = self.values.shape
        return rows, columns

    @property
    def tensors(self) -> Sequence[Any]:
        """All that it is made of."""
        given = [self.values] if self.packed is None else self.packed.tensors
        return [tensor for tensor in given if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors)

    @property
    def greedy_nbytes(self) -> int:
        return self.nbytes

    def dequantize(self) -> FloatArray:
        values = self.dense(torch.float32).float()
        if self.gated:
            values = torch.cat([values[::2], values[1::2]])
        found: FloatArray = values.cpu().numpy()
        return found


def own_matrix(weight: Matrix) -> CudaMatrix:
    """Check that a weight is this backend's."""
    if not isinstance(weight, CudaMatrix):
        raise EngineError(f"a GPU's backend got a weight of {type(weight).__name__}; load the model with it")
    return weight


def _tensor(part: Array | QuantTensor) -> Any:
    """A part as a tensor of the host, in its own type."""
    array = part.layout.dequantize(part) if isinstance(part, QuantTensor) else np.ascontiguousarray(part)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def alternating(rows: Array) -> Array:
    """Rows of a gate, then of an up projection, in the order of rows of gated weights."""
    return rows.reshape(2, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def packs(layout: AnyLayout, e4m3: bool) -> bool:
    """Tell whether kernels multiply weights of a layout, on a target that converts `e4m3` or not."""
    if layout.inputs:
        return False
    if isinstance(layout, Blocks) and (layout.kind not in PROBES or layout.entries):
        return False
    return e4m3 or _form(layout).number != torch.float8_e4m3fn


def _form(layout: AnyLayout) -> Form:
    """The form of packed weights of a layout."""
    if isinstance(layout, Blocks):
        return PROBES[layout.kind].form
    if isinstance(layout, Int8):
        return Form(torch.int8)
    points = not layout.symmetric and layout.scales == "bfloat16"
    return Form(torch.uint8, layout.group_size, points, offsets=not layout.symmetric and not points)


def _packed(
    parts: Sequence[Array | QuantTensor], layout: AnyLayout, device: Any, gated: bool
) -> PackedWeight:
    """Pack codes as kernels read them, rounding parts that are floats."""
    layouts = [part.layout if isinstance(part, QuantTensor) else layout for part in parts]
    form = common_form([_form(own) for own in layouts])  # type: ignore[arg-type]
    if form is None:
        raise ConfigError("no GPU kernel multiplies one weight of several types: choose --dtype float32")
    if device.type == "meta":
        rows = sum(part.shape[0] for part in parts)
        return PackedWeight.outline(rows, parts[0].shape[1], form)
    found = [
        part if isinstance(part, QuantTensor) else layout.quantize(np.asarray(part, np.float32))
        for part in parts
    ]
    if any(one.sparse is not None or one.inputs is not None for one in found):
        raise ConfigError("no GPU kernel adds sparse values, or reorders inputs: choose --device cpu")

    def stacked(tensors: Sequence[Any]) -> Any:
        return _stacked([tensor.to(device) for tensor in tensors], gated)

    if isinstance(layout, Blocks):
        apart = [taken_apart(one) for one in found]
        apart = [one if one.form == form else one.alike(form) for one in apart]
        sides = ([getattr(one, side) for one in apart] for side in ("codes", "scales", "offsets"))
        codes, scales, *offsets = (stacked(side) for side in sides if side[0] is not None)
        return PackedWeight.pack(form, codes, scales, offsets=offsets[0] if offsets else None)
    codes, scales = (
        stacked([torch.from_numpy(np.array(getattr(one, side))) for one in found])
        for side in ("codes", "scales")
    )
    if isinstance(layout, Int8):
        return PackedWeight.pack(form, (codes.to(torch.int16) - 128).to(torch.int8), scales[:, :1])
    zeros = [torch.from_numpy(np.array(one.zeros)) for one in found if one.zeros is not None]
    if form.offsets:
        return PackedWeight.pack(form, codes, scales, offsets=stacked(zeros))
    return PackedWeight.pack(form, codes, scales, stacked(zeros).to(torch.uint8) if zeros else None)


def _stacked(tensors: Sequence[Any], gated: bool) -> Any:
    """Rows one after another, or of two tensors in turn."""
    return torch.stack(list(tensors), 1).flatten(0, 1) if gated else torch.cat(list(tensors))
