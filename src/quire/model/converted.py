"""Converted checkpoints: engine directories for any machine, which hold the pieces that a rank packs as they are.

Floats keep their type and quantized pieces their codes, in the order of the rows in which they are packed. So a build
from a conversion equals a build from its checkpoint bit for bit. Knows layouts; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from quire.devices.protocol import WeightPacker
from quire.errors import ModelError
from quire.model.engine_dir import BuiltFiles, Manifest, Places, Size
from quire.model.info import AS_IT_IS, Asked
from quire.model.packing import Packed, Packer, WeightTypes, choose_dtype, own_quantization
from quire.model.parts.source import Piece, WeightSource
from quire.model.tensors import filled
from quire.progress import Told
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.layouts import AnyLayout, Blocks, Int4
from quire.weights.layouts.blocks import KINDS
from quire.weights.parts import Part, part
from quire.weights.schemes import Quantization, Scheme
from quire.weights.tensor import Array, FloatDtype, Inputs, QuantTensor, Rows, Sparse, nothing

MAX_ENTRIES = 1 << 20  # of a row's sparse part


class StoredPiece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of a piece: floats of the type `layout`, or codes, whose inputs have a `rounding`.

    `entries` counts the values of a sparse part.
    """

    shape: tuple[Size, ...]
    layout: FloatDtype | Literal["codes"]
    codes: AnyLayout | None = None
    entries: Size = 0
    rounding: Rounding | None = None

    def outline(self) -> list[Array]:
        """The arrays of a piece without their values."""
        if self.codes is None:
            return [nothing(self.layout, *self.shape)]
        (rows, columns), layout = self.shape, self.codes
        outline = layout.outline(rows, columns)
        inputs = Inputs(nothing("int32", columns), nothing("float32", columns)) if layout.inputs else None
        sparse = None
        if outline.sparse is not None:
            entries = nothing("int32", self.entries), nothing("float32", self.entries)
            sparse = Sparse(nothing("int32", rows + 1), *entries)
        return _arrays(QuantTensor(layout, outline.codes, outline.scales, outline.zeros, inputs, sparse))


def _arrays(tensor: QuantTensor) -> list[Array]:
    """The arrays of a quantized piece in the order in which they are stored: codes last, so that all are aligned."""
    found: list[Array | None] = [tensor.scales, tensor.zeros]
    if tensor.inputs is not None:
        found += [tensor.inputs.order, tensor.inputs.factors]
    if tensor.sparse is not None:
        found += [tensor.sparse.starts, tensor.sparse.columns, tensor.sparse.values]
    return [array for array in (*found, tensor.codes) if array is not None]


def stored(tensor: Array | QuantTensor, rounding: Rounding | None = None) -> tuple[dict[str, Any], Array]:
    """A piece's description and bytes."""
    if isinstance(tensor, QuantTensor):
        entries = 0 if tensor.sparse is None else len(tensor.sparse.values)
        form = {"layout": "codes", "codes": tensor.layout, "entries": entries, "rounding": rounding}
        arrays = _arrays(tensor)
    else:
        form, arrays = {"layout": tensor.dtype.name}, [tensor]
    about = msgspec.convert({"shape": tensor.shape, **msgspec.to_builtins(form)}, StoredPiece)
    data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return msgspec.to_builtins(about), np.concatenate(data)


class Pieces:
    """A `Checkpoint` of the pieces of a share by path. Their values are checked when they are read."""

    def __init__(self, places: Places, manifest: Manifest, path: Path) -> None:
        self._places, self._path, self._activations = places, path, manifest.activations
        about = {name: tensor.about for name, tensor in manifest.tensors.items()}
        try:
            self._pieces = msgspec.convert(about, dict[str, StoredPiece])
        except msgspec.ValidationError as error:
            raise ModelError(f"{path}: not the description of a piece ({error})") from error
        for name, piece in self._pieces.items():
            if _cannot_be(piece):
                raise ModelError(f"{path}: {name:.200}: there is no layout {piece}")

    def part(self, piece: Piece) -> Part:
        """A piece as it is stored. ModelError: it is missing, or of another shape or size than the model says."""
        if piece.fill is not None:
            return filled(piece)
        name, shape = piece.path, piece.own_shape
        data = self._places.data(name)
        if self.shape(name) != shape:
            raise ModelError(f"{name} is {list(self.shape(name))}, the model says {list(shape)}")
        if data.nbytes != (needed := sum(array.nbytes for array in self._pieces[name].outline())):
            raise ModelError(f"{name} has {data.nbytes} bytes, its layout says {needed}")
        return part(name, shape)

    @property
    def activations(self) -> KeptActivations:
        return self._activations

    def names(self) -> Iterable[str]:
        return self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        piece = self._pieces[name]
        return np.dtype("float32" if piece.codes else piece.layout)

    def path(self, name: str) -> Path:
        return self._path

    def layout(self, name: str) -> AnyLayout | None:
        return self._pieces[name].codes

    def rounding(self, name: str) -> Rounding | None:
        return self._pieces[name].rounding

    def get(self, name: str) -> Array:
        return self._arrays(name)[0] if self.layout(name) is None else self._quantized(name).dequantize()

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        return self._quantized(name).rows(rows)

    def _arrays(self, name: str) -> list[Array]:
        data, found = self._places.data(name), []
        for like in self._pieces[name].outline():
            found.append(data[: like.nbytes].view(like.dtype).reshape(like.shape))
            data = data[like.nbytes :]
        return found

    def _quantized(self, name: str) -> QuantTensor:
        layout, (rows, width) = self._pieces[name].codes, self.shape(name)
        assert layout is not None
        *rest, codes = self._arrays(name)
        outline, arrays = layout.outline(rows, width), iter(rest)
        scales, zeros = next(arrays), None if outline.zeros is None else next(arrays)
        inputs = Inputs(next(arrays), next(arrays)) if layout.inputs else None
        sparse = None if outline.sparse is None else Sparse(next(arrays), next(arrays), next(arrays))
        if isinstance(layout, Int4) and codes.size and codes.max() > 15:
            raise ModelError(f"{name} holds a code above 15")
        if inputs is not None and not np.array_equal(np.sort(inputs.order), np.arange(width)):
            raise ModelError(f"the inputs of {name} are not an order of {width} columns")
        if sparse is not None:
            starts, columns = sparse.starts, sparse.columns
            if starts[0] or starts[-1] != len(columns) or (np.diff(starts) < 0).any():
                raise ModelError(f"the sparse part of {name} does not ascend from 0")
            if columns.size and not 0 <= columns.min() <= columns.max() < width:
                raise ModelError(f"the sparse part of {name} holds a column outside of {width}")
        return QuantTensor(layout, codes, scales, zeros, inputs, sparse)


def _cannot_be(piece: StoredPiece) -> bool:
    """Whether no layout is like that."""
    layout = piece.codes
    if (layout is None) == (piece.layout == "codes") or (layout is not None and len(piece.shape) != 2):
        return True
    if isinstance(layout, Blocks):
        return layout.kind not in KINDS or not 0 <= layout.entries <= MAX_ENTRIES
    return isinstance(layout, Int4) and layout.group_size not in (32, 64, 128)


class ConvertedFiles(BuiltFiles):
    """`ModelFiles` of a converted checkpoint, packed in the types that are asked for."""

    def _types(self, asked: Asked) -> tuple[FloatDtype, Quantization | None]:
        if asked.reading != AS_IT_IS:
            raise ModelError(
                f"{self._directory} is a converted checkpoint: give --architecture, --hf-overrides and --load-format "
                "to `quire convert`; for --lora-extra-vocab-size serve the original"
            )
        manifest = self.manifest
        share = Pieces(Places(manifest, nothing("uint8", 0)), manifest, self._directory)
        dtype = manifest.dtype if asked.dtype == "auto" else choose_dtype(asked.dtype, {}, share)
        if asked.quantized is None and (asked.dtype == "auto" or isinstance(manifest.quantized, Scheme)):
            return dtype, manifest.quantized
        return dtype, own_quantization(asked.dtype, share.names(), share, asked.quantized)

    def _source(
        self, places: Places, manifest: Manifest, backend: WeightPacker, outline: bool, told: Told
    ) -> WeightSource:
        types = WeightTypes.of(self.info.dtype, self.info.quantized)
        share = Pieces(places, manifest, self._directory / manifest.weights_file)
        return Packed(share, Packer(share, backend, types, outline), told)
