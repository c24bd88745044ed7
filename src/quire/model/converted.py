"""Converted checkpoints: weights already divided among ranks, one file for each, and a config that any machine reads.

`checkpoint.json` describes the model; `rankN.safetensors` holds the parts of weights that rank N packs, in the order
and the types in which the decoder asks for them. So a build from it equals a build from the checkpoint bit for bit.
Quantized weights keep their codes. Knows the assembly and safetensors; knows no device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from quire.devices.protocol import Backend, FloatArray, KVScales, Matrix
from quire.errors import ConfigError, EngineError, ModelError
from quire.files import read_bytes, replaced
from quire.model.families.names import TensorNames
from quire.model.info import AS_IT_IS, Asked, ModelInfo
from quire.model.kv_scales import check_kv_scales
from quire.model.load import CONVERTED
from quire.model.loaded import LoadedModel
from quire.model.pack import Packer, WeightTypes, choose_dtype, own_quantization
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.parts.source import Piece, Use
from quire.model.shard import MOST_RANKS, WHOLE, Shard
from quire.model.tensors import Tensors
from quire.weights.activations import KeptActivations, Rounding
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.safetensors import SafetensorsFile
from quire.weights.layouts import AnyLayout, Blocks, Int4
from quire.weights.layouts.blocks import KINDS
from quire.weights.parts import Part, part
from quire.weights.schemes import Quantization, Scheme
from quire.weights.tensor import Array, FloatDtype, Inputs, QuantTensor, Rows, Sparse, nothing

MANIFEST = CONVERTED
FORMAT = 2
MAX_MANIFEST = 64 << 20  # bytes
MAX_SUBLAYERS = 64
UNSOUND = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
MAX_ENTRIES = 1 << 20  # of a row's sparse part
CODES, SCALES, ZEROS, ORDER, FACTORS = ".codes", ".scales", ".zeros", ".order", ".factors"
STARTS, COLUMNS, VALUES = ".starts", ".columns", ".values"  # of a sparse part
_AGAIN = "run `quire convert` again"
_PLACES = re.compile(r"\{[ijens]\}")


class ConvertedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything in a converted checkpoint except its tensors, the same for all ranks.

    A build gives the weights `dtype` and `quantized` unless told otherwise; `layouts` names the layout of each
    quantized part, `roundings` how its inputs are rounded. `kv_scales` is as in ModelInfo. `exact` and `whole_experts`
    say how the weights are divided: see Shard.
    """

    spec: DecoderConfig
    names: TensorNames
    dtype: FloatDtype
    quantized: Quantization | None
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    activations: KeptActivations
    layouts: dict[str, AnyLayout]
    roundings: dict[str, Rounding] = msgspec.field(default_factory=dict)
    kv_scales: tuple[KVScales | None, ...] = ()
    exact: bool = False
    whole_experts: bool = False
    format: int = FORMAT


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def write_converted(directory: Path, manifest: ConvertedManifest) -> None:
    with replaced(directory / MANIFEST) as path:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_converted(directory: Path) -> ConvertedManifest:
    """Raises ModelError if the file is not such a manifest, or describes a model that cannot exist."""
    path = directory / MANIFEST
    try:
        found = msgspec.json.decode(read_bytes(path, MAX_MANIFEST), type=ConvertedManifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path}: not a converted checkpoint's manifest ({error}); {_AGAIN}") from error
    if found.format != FORMAT:
        raise ModelError(f"{path}: format {found.format}, this version of Quire reads {FORMAT}; {_AGAIN}")
    found.spec.check(str(path))
    for token in found.eos_token_ids:
        if not 0 <= token < found.spec.vocab_size:
            raise ModelError(
                f"{path}: eos_token_ids holds {token}, the vocabulary {found.spec.vocab_size} tokens"
            )
    check_kv_scales(found.kv_scales, found.spec, str(path))
    _check_names(found.names, path)
    for name, layout in found.layouts.items():
        if (
            isinstance(layout, Blocks)
            and (layout.kind not in KINDS or not 0 <= layout.entries <= MAX_ENTRIES)
        ) or (isinstance(layout, Int4) and layout.group_size not in (32, 64, 128)):
            raise ModelError(f"{path}: {name:.200}: there is no layout {layout}")
    return found


def _check_names(names: TensorNames, path: Path) -> None:
    """Names are formatted with numbers, so they may hold nothing else that format would read."""
    for field in names.__struct_fields__:
        value = getattr(names, field)
        if field != "ignored" and isinstance(value, str) and set("{}") & {*_PLACES.sub("", value)}:
            raise ModelError(f"{path}: {field} cannot be {value!r:.200}")
    if not 1 <= names.sublayers <= MAX_SUBLAYERS:
        raise ModelError(f"{path}: sublayers must be from 1 to {MAX_SUBLAYERS}, got {names.sublayers}")


def quantized_arrays(name: str, layout: AnyLayout) -> list[str]:
    """The tensors that hold a quantized part."""
    outline = layout.outline(1, 256)
    kept = [CODES] + [SCALES] * bool(outline.scales.shape[1]) + [ZEROS] * (outline.zeros is not None)
    kept += [ORDER, FACTORS] if layout.inputs else []
    kept += [STARTS, COLUMNS, VALUES] if outline.sparse is not None else []
    return [name + suffix for suffix in kept]


class RankCheckpoint:
    """A rank's file as a `Checkpoint` of parts. Quantized ones are checked when they are read. Raises ModelError."""

    def __init__(self, path: Path, manifest: ConvertedManifest) -> None:
        self._file, self._manifest, self._path = SafetensorsFile(path), manifest, path
        present = set(self._file.names())
        self._layouts = {name: lay for name, lay in manifest.layouts.items() if name + CODES in present}
        of_quantized = {own for name, lay in self._layouts.items() for own in quantized_arrays(name, lay)}
        if missing := sorted(of_quantized - present):
            raise ModelError(f"{path}: tensor {missing[0]} is missing; {_AGAIN}")
        self._names = (present - of_quantized) | self._layouts.keys()

    @property
    def activations(self) -> KeptActivations:
        return self._manifest.activations

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._layouts:
            return self._file.shape(name)
        codes = self._file.shape(name + CODES)
        return (codes[0], self._layouts[name].columns(codes[1])) if len(codes) == 2 else codes

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float32) if name in self._layouts else self._file.dtype(name)

    def path(self, name: str) -> Path:
        return self._path

    def get(self, name: str) -> Array:
        if name in self._layouts:
            return self.quantized(name, np.arange(self.shape(name)[0], dtype=np.intp)).dequantize()
        return self._file.get(name)

    def layout(self, name: str) -> AnyLayout | None:
        return self._layouts.get(name)

    def rounding(self, name: str) -> Rounding | None:
        return self._manifest.roundings.get(name)

    def quantized(self, name: str, rows: Rows) -> QuantTensor:
        layout, (count, width) = self._layouts[name], self.shape(name)
        outline = layout.outline(count, width)
        codes = self._array(name + CODES, outline.codes)[rows]
        if isinstance(layout, Int4) and codes.size and int(codes.max()) > 15:
            raise ModelError(f"{self._path}: tensor {name}{CODES} holds a code above 15; {_AGAIN}")
        scales = nothing(np.float32, len(rows), 0)
        if outline.scales.shape[1]:
            scales = self._array(name + SCALES, outline.scales)[rows]
        zeros = None if outline.zeros is None else self._array(name + ZEROS, outline.zeros)[rows]
        inputs = self._inputs(name, width) if layout.inputs else None
        sparse = None if outline.sparse is None else self._sparse(name, count, width).rows(rows)
        return QuantTensor(layout, codes, scales, zeros, inputs, sparse)

    def _sparse(self, name: str, count: int, width: int) -> Sparse:
        starts = self._array(name + STARTS, nothing(np.int32, count + 1))
        total = int(starts[-1])
        if starts[0] != 0 or total < 0 or (np.diff(starts) < 0).any():
            raise ModelError(f"{self._path}: tensor {name}{STARTS} does not ascend from 0; {_AGAIN}")
        columns = self._array(name + COLUMNS, nothing(np.int32, total))
        if total and not 0 <= columns.min() <= columns.max() < width:
            raise ModelError(
                f"{self._path}: tensor {name}{COLUMNS} holds a column outside of {width}; {_AGAIN}"
            )
        return Sparse(starts, columns, self._array(name + VALUES, nothing(np.float32, total)))

    def _inputs(self, name: str, width: int) -> Inputs:
        order = self._array(name + ORDER, nothing(np.int32, width))
        if not np.array_equal(np.sort(order), np.arange(width)):
            raise ModelError(
                f"{self._path}: tensor {name}{ORDER} is not an order of {width} columns; {_AGAIN}"
            )
        return Inputs(order, self._array(name + FACTORS, nothing(np.float32, width)))

    def _array(self, name: str, like: Array) -> Array:
        found = self._file.get(name)
        if (found.shape, found.dtype) != (like.shape, like.dtype):
            raise ModelError(
                f"{self._path}: tensor {name} is {found.dtype} {list(found.shape)}, its layout says {like.dtype} "
                f"{list(like.shape)}; {_AGAIN}"
            )
        return found


class StoredPieces:
    """A `WeightSource` that packs pieces as a rank's file holds them by their paths, already taken and cut."""

    def __init__(self, packer: Packer, checkpoint: Checkpoint, tensors: Tensors) -> None:
        self._packer, self._checkpoint, self._tensors = packer, checkpoint, tensors
        self._present = set(checkpoint.names())

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Matrix:
        return self._packer.matrix([self._stored(piece) for piece in pieces], use)

    def gated(self, path: str, gate: Piece, up: Piece) -> Matrix:
        return self._packer.gated(self._stored(gate), self._stored(up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        return self._packer.vector([self._stored(piece) for piece in pieces])

    def _stored(self, piece: Piece) -> Part:
        wanted = self._tensors.part(piece)
        if not wanted.tensors:  # computed from the config alone
            return wanted
        name, shape = piece.path, piece.own_shape
        if name not in self._present:
            raise ModelError(f"{self._checkpoint.path(name)}: tensor {name} is missing; {_AGAIN}")
        if self._checkpoint.shape(name) != shape:
            raise ModelError(
                f"{self._checkpoint.path(name)}: tensor {name} is {list(self._checkpoint.shape(name))}, the model says "
                f"{list(shape)}; {_AGAIN}"
            )
        return part(name, shape)


class ConvertedFiles:
    """`ModelFiles` of a converted checkpoint, packed in the types that are asked for."""

    def __init__(self, directory: Path, asked: Asked) -> None:
        if asked.reading != AS_IT_IS:
            raise ModelError(
                f"{directory} is a converted checkpoint: give --architecture, --hf-overrides and --load-format to "
                "`quire convert`; for --lora-extra-vocab-size serve the original"
            )
        self._directory, self._asked = directory, asked
        manifest = self._manifest = read_converted(directory)
        self.ranks = manifest.ranks
        dtype, quantized = self._types(RankCheckpoint(directory / rank_file(0), manifest))
        self.info = ModelInfo(
            directory=directory,
            spec=manifest.spec,
            dtype=dtype,
            num_parameters=manifest.num_parameters,
            weight_bytes=manifest.weight_bytes,
            eos_token_ids=manifest.eos_token_ids,
            generation=manifest.generation,
            quantized=quantized,
            kv_scales=manifest.kv_scales,
        )

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedModel:
        return self._read(backend, shard, outline=True)

    def load(self, backend: Backend, shard: Shard = WHOLE, verify: bool = True) -> LoadedModel:
        return self._read(backend, shard, outline=False)

    def _types(self, share: RankCheckpoint) -> tuple[FloatDtype, Quantization | None]:
        """The types in which a share is packed."""
        manifest, asked = self._manifest, self._asked
        dtype = manifest.dtype if asked.dtype == "auto" else choose_dtype(asked.dtype, {}, share)
        if asked.quantized is None and isinstance(manifest.quantized, Scheme):
            return dtype, manifest.quantized
        return dtype, own_quantization(asked.dtype, dict.fromkeys(share.names()), share, asked.quantized)

    def _read(self, backend: Backend, shard: Shard, outline: bool) -> LoadedModel:
        """A rank's share, or its outline.

        ConfigError: it was converted for another number of ranks. ModelError: the file is not what the manifest says.
        """
        directory, manifest = self._directory, self._manifest
        shard = shard.divided(manifest.exact, manifest.whole_experts, str(directory))
        if shard.stages > 1:
            raise ConfigError(
                f"--pipeline-parallel-size {shard.stages}: {directory} is a converted checkpoint: run `quire build` on "
                "it first"
            )
        if shard.size != manifest.ranks:
            raise ConfigError(
                f"--tensor-parallel-size {shard.size}: {directory} was converted for {manifest.ranks}: give "
                f"{manifest.ranks}, or run `quire convert` again"
            )
        manifest.spec.check_share(shard)
        share = RankCheckpoint(directory / rank_file(shard.rank), manifest)
        dtype, quantized = self._types(share)
        packer = Packer(share, backend, WeightTypes.of(dtype, quantized), outline)
        try:
            source = StoredPieces(packer, share, Tensors(manifest.spec, manifest.names))
            decoder = Decoder(manifest.spec, source, shard)
        except (ModelError, EngineError):
            raise
        except UNSOUND as error:  # a description that no conversion wrote
            where = directory / MANIFEST
            raise ModelError(f"{where}: the model cannot be read ({error}); {_AGAIN}") from error
        return LoadedModel(self.info, decoder, names=manifest.names, shard=shard)
