"""Weights in engine directories: a description, which is untrusted, and the bytes of the tensors, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from quire.devices.cuda.blocks import BYTES, PAIRS, PROBES
from quire.devices.cuda.kernels.packed import Form, PackedWeight
from quire.devices.cuda.loading import Ring
from quire.devices.cuda.pack import DTYPES, CudaMatrix
from quire.devices.protocol import Array
from quire.errors import ModelError

ALIGNED = 64  # bytes
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A matrix as in CudaMatrix, with `inputs` or not. `dtype` names the type of its values, or its packed form."""

    shape: tuple[Size, Size]
    dtype: str
    gated: bool
    rounds: bool = False
    inputs: bool = False


GROUPS = (16, 32, 64, 128)
INTEGERS = [Form(BYTES), *(Form(PAIRS, group, zeros) for group, zeros in product(GROUPS[1:], (False, True)))]
"""INTEGERS are the forms whose products may round their inputs."""
OTHERS = [
    Form(number, group, offsets=offsets)
    for number, group, offsets in product((BYTES, PAIRS), GROUPS, (False, True))
]
FLOATS: dict[str, Any] = {str(dtype)[6:]: dtype for dtype in DTYPES.values()}
FORMS = {form.name: form for form in (*INTEGERS, *OTHERS, *(probe.form for probe in PROBES.values()))}


def export(matrix: CudaMatrix) -> tuple[dict[str, Any], Array]:
    """What `restore` needs."""
    packed = matrix.packed
    dtype = str(matrix.values.dtype)[6:] if packed is None else packed.form.name
    about = Stored(matrix.shape, dtype, matrix.gated, matrix.rounds, matrix.inputs is not None)
    found = []
    for tensor in matrix.tensors:
        data = tensor.reshape(-1).view(torch.uint8).cpu().numpy()
        found += [data, np.zeros(-len(data) % ALIGNED, np.uint8)]
    return msgspec.to_builtins(about), found[0] if len(found) == 2 else np.concatenate(found[:-1])


def restore(about: dict[str, Any], data: Array, ring: Ring, e4m3: bool = True) -> CudaMatrix:
    """The matrix of a description and its bytes. ModelError if they disagree, or the target does not convert `e4m3`."""
    try:
        stored = msgspec.convert(about, Stored)
    except msgspec.ValidationError as error:
        raise ModelError(f"a weight has no description of a GPU's ({error})") from error
    (rows, columns), form = stored.shape, FORMS.get(stored.dtype)
    if form is None and stored.dtype not in FLOATS:
        raise ModelError(f"a GPU has no weights of {stored.dtype[:80]!r}")
    if form is not None and form.number == torch.float8_e4m3fn and not e4m3:
        raise ModelError(f"this GPU does not convert {stored.dtype}")
    if (
        (stored.rounds and form not in INTEGERS)
        or (stored.inputs and form is None)
        or (stored.gated and rows % 2)
        or rows * columns > 2 * data.nbytes
    ):
        raise ModelError(f"a weight of {data.nbytes} bytes cannot be {about}")
    likes: Sequence[Any] = [torch.empty(rows, columns, dtype=FLOATS.get(stored.dtype), device="meta")]
    if form is not None:
        likes = [*PackedWeight.outline(rows, columns, form).tensors]
        likes.append(torch.empty(2, columns, device="meta") if stored.inputs else None)
    places, end = list[slice](), 0
    for like in likes:
        begin = end if like is None else end + -end % ALIGNED
        end = begin if like is None else begin + like.nbytes
        places.append(slice(begin, end))
    if end != data.nbytes:
        raise ModelError(f"a weight of {data.nbytes} bytes is described as {about}")
    order = data[places[-1]].view(np.float32)[:columns] if stored.inputs else ()
    if len(order) and not np.array_equal(np.sort(order), np.arange(columns)):
        raise ModelError("a weight's inputs are no order")
    tensors = [
        like if like is None or ring.device.type == "meta" else _like(like, data[place], ring)
        for like, place in zip(likes, places, strict=True)
    ]
    if form is None:
        return CudaMatrix(tensors[0], stored.gated)
    *own, inputs = tensors
    return CudaMatrix(None, stored.gated, PackedWeight(form, columns, *own), stored.rounds, inputs)


def _like(like: Any, data: Array, ring: Ring) -> Any:
    """Bytes as a tensor of the device that is like another one."""
    return ring.sent(data).view(like.dtype).reshape(like.shape)
