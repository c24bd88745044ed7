"""Weights as tensors of a device, in the order in which its kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from quire.devices.cuda.blocks import PROBES, common_form, taken_apart
from quire.devices.cuda.kernels.packed import Form, PackedWeight
from quire.devices.cuda.loading import Ring, ahead
from quire.devices.protocol import Array, FloatArray, Matrix, WeightType
from quire.errors import ConfigError, EngineError
from quire.weights.layouts import AnyLayout, Blocks, Int8
from quire.weights.schemes import Quantized
from quire.weights.tensor import FloatDtype, QuantTensor

DTYPES: dict[FloatDtype, Any] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip
AT_ONCE = 4 << 20  # elements that are packed at a time


class CudaMatrix(Matrix):
    """A weight [O, K] in its type, or packed. If `gated`, rows of the gate and of the up projection alternate.

    If it `rounds`, products round their inputs to int8, one scale for each row. `inputs` float32 [2, K] number
    the input of each column, with the factor that it is multiplied with; None: inputs are as they come.
    """

    def __init__(
        self, values: Any, gated: bool = False, packed: PackedWeight | None = None, rounds: bool = False,
        inputs: Any = None,
    ) -> None:  # fmt: skip
        self.values, self.gated, self.packed, self.rounds, self.inputs = values, gated, packed, rounds, inputs

    @classmethod
    def pack(
        cls,
        parts: Sequence[Array | QuantTensor],
        dtype: WeightType,
        ring: Ring,
        gated: bool = False,
        threads: int = 1,
        packs: Callable[[AnyLayout], bool] = lambda layout: False,
    ) -> CudaMatrix:
        """Round parts to `dtype` and stack them. ConfigError for a layout that `packs` does not take."""
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
            made = _packed(parts, dtype.layout, ring, gated, threads)
            rounds = (
                dtype.activations == "int8" and not isinstance(dtype.layout, Blocks) and not made.form.fine
            )
            return cls(None, gated, made, rounds, _inputs(parts, made.columns, ring))
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        whole = torch.empty(rows, columns, dtype=DTYPES[dtype], device=ring.device)
        if ring.device.type != "meta":
            for part, rows_of in zip(parts, _places(parts, gated), strict=True):
                values = part.layout.dequantize(part) if isinstance(part, QuantTensor) else part
                ring.send(values, rows_of(whole))
        return cls(whole, gated)

    @property
    def dtype(self) -> Any:
        """Return the type of its values; None: it is packed."""
        return None if self.packed is not None else self.values.dtype

    @property
    def form(self) -> tuple[Any, ...]:
        """Return all of its form that products depend on."""
        return (self.dtype if self.packed is None else self.packed.form, self.rounds)

    @property
    def takes_codes(self) -> bool:
        """Tell whether it multiplies the codes of its inputs as they are."""
        return self.rounds and self.inputs is None

    def dense(self, dtype: Any) -> Any:
        """Return its values; those of a packed weight in a type."""
        if self.packed is None:
            return self.values
        values = self.packed.values()
        if self.inputs is not None:
            order, factors = self.inputs
            values = torch.empty_like(values).index_copy_(1, order.long(), values * factors)
        return values.to(dtype)

    @property
    def shape(self) -> tuple[int, int]:
        if self.packed is not None:
            return len(self.packed.codes), self.packed.columns
        rows, columns = self.values.shape
        return rows, columns

    @property
    def tensors(self) -> Sequence[Any]:
        """Return all that it is made of."""
        given = [self.values] if self.packed is None else [*self.packed.tensors, self.inputs]
        return [tensor for tensor in given if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self.tensors)

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


def inputs_of(heads: Sequence[CudaMatrix]) -> Any:
    """Return the inputs of weights whose own ones lie side by side; None if none has any."""
    given = [weight.inputs for weight in heads if weight.inputs is not None]
    if not given:
        return None
    plain = torch.stack([torch.arange(given[0].shape[1]), torch.ones(given[0].shape[1])]).to(given[0])
    step = plain.new_tensor([[plain.shape[1]], [0]])
    sides = (plain if weight.inputs is None else weight.inputs for weight in heads)
    return torch.cat([side + head * step for head, side in enumerate(sides)], 1)


def alternating(rows: Array) -> Array:
    """Put rows of a gate, then of an up projection, in the order of rows of gated weights."""
    return rows.reshape(2, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def packs(layout: AnyLayout, e4m3: bool) -> bool:
    """Tell whether kernels multiply weights of a layout, on a target that converts `e4m3` or not."""
    if isinstance(layout, Blocks) and (layout.kind not in PROBES or layout.entries):
        return False
    return e4m3 or _form(layout).number != torch.float8_e4m3fn


def _form(layout: AnyLayout) -> Form:
    """Return the form of packed weights of a layout."""
    if isinstance(layout, Blocks):
        return PROBES[layout.kind].form
    if isinstance(layout, Int8):
        return Form(torch.int8)
    points = not layout.symmetric and layout.scales == "bfloat16"
    return Form(torch.uint8, layout.group_size, points, offsets=not layout.symmetric and not points)


def _packed(
    parts: Sequence[Array | QuantTensor], layout: AnyLayout, ring: Ring, gated: bool, threads: int
) -> PackedWeight:
    """Pack codes as kernels read them, rounding parts that are floats: some rows at a time."""
    layouts = [part.layout if isinstance(part, QuantTensor) else layout for part in parts]
    form = common_form([_form(own) for own in layouts])  # type: ignore[arg-type]
    if form is None:
        raise ConfigError("no GPU kernel multiplies one weight of several types: choose --dtype float32")
    if any(isinstance(part, QuantTensor) and part.sparse for part in parts):
        raise ConfigError("no GPU kernel adds sparse values: choose --device cpu")
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    whole = PackedWeight.outline(rows, columns, form, ring.device)
    if ring.device.type == "meta":
        return whole
    for part, rows_of in zip(parts, _places(parts, gated), strict=True):
        at_once = max(1, AT_ONCE // columns)
        for place, sides in ahead(partial(_sides, part, layout, form), part.shape[0], at_once, threads):
            made = PackedWeight.pack(form, *(None if side is None else ring.sent(side) for side in sides))
            for to, values in zip(whole.tensors, made.tensors, strict=True):
                if to is not None:
                    rows_of(to)[place] = values
    return whole


def _inputs(parts: Sequence[Array | QuantTensor], columns: int, ring: Ring) -> Any:
    """The inputs of parts, which all have the same."""
    first = parts[0]
    if not isinstance(first, QuantTensor) or not first.layout.inputs:
        return None
    if ring.device.type == "meta":
        return torch.empty(2, columns, device="meta")
    assert first.inputs is not None
    return ring.sent(np.stack([first.inputs.order, first.inputs.factors]).astype(np.float32))


def _sides(part: Array | QuantTensor, layout: AnyLayout, form: Form, place: slice) -> tuple[Any, ...]:
    """Codes, scales, zeros, offsets and a table of some rows, as PackedWeight.pack takes them."""
    if isinstance(part, QuantTensor):
        some = part.rows(np.arange(place.start, place.stop))
    else:
        some = layout.quantize(np.asarray(part[place], np.float32))
    if isinstance(some.layout, Blocks):
        apart = taken_apart(some)
        apart = apart if apart.form == form else apart.alike(form)
        return apart.codes, apart.scales, None, apart.offsets, apart.table
    if form.number == torch.int8:
        return (some.codes ^ 128).view(np.int8), some.scales[:, :1], None, None
    zeros = some.zeros
    return some.codes, some.scales, *((None, zeros) if form.offsets else (_bytes(zeros), None))


def _bytes(zeros: FloatArray | None) -> Array | None:
    return None if zeros is None else zeros.astype(np.uint8)


def _places(parts: Sequence[Array | QuantTensor], gated: bool) -> Iterator[Callable[[Any], Any]]:
    """Yield for each part what takes its rows from a whole: one part after another, or of two parts in turn."""
    at = 0
    for index, part in enumerate(parts):
        place = slice(index, None, 2) if gated else slice(at, at + part.shape[0])
        at += part.shape[0]
        yield itemgetter(place)
