"""Converts checkpoints: divides the weights among ranks and writes the share of each, for builds on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.devices.protocol import FloatArray
from quire.engine.directory import model_directory
from quire.engine.source import asked_of
from quire.engine.stages import share_of
from quire.errors import ConfigError
from quire.model import converted
from quire.model.checkpoint import OpenModel
from quire.model.companions import copy_companions
from quire.model.converted import (
    CODES,
    COLUMNS,
    FACTORS,
    ORDER,
    SCALES,
    STARTS,
    VALUES,
    ZEROS,
    ConvertedManifest,
    quantized_arrays,
    rank_file,
)
from quire.model.load import open_checkpoint_files
from quire.model.parts.decoder import Decoder
from quire.model.parts.source import Piece, Use
from quire.model.shard import Shard
from quire.model.tensors import Tensors
from quire.weights.activations import Rounding
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.layouts import AnyLayout
from quire.weights.tensor import Array, QuantTensor, nothing


def convert_checkpoint(
    config: EngineConfig, output: Path, ranks: Sequence[int] | None = None
) -> ConvertedManifest:
    """Divide the configured model among the ranks of --tensor-parallel-size and write the share of each to `output`.

    `quire build`, `quire serve` and `LLM` take the result as they take a checkpoint. `ranks` names the ranks to
    write now; further calls write the others.
    Raises ConfigError if `output` holds something else or the model cannot be divided, ModelError if it cannot be read.
    """
    source, size = model_directory(config.model), config.parallel.tensor_parallel_size
    opened = open_checkpoint_files(source, asked_of(config.model, source)).opened()
    if opened.info.pooling is not None:
        raise ConfigError(f"{source} makes vectors: serve it as it is; such models are not converted")
    decoder = opened.spec
    decoder.check_share(share_of(config.parallel, 0, opened.info))
    chosen = range(size) if ranks is None else ranks
    if bad := [rank for rank in chosen if not 0 <= rank < size]:
        raise ConfigError(f"there is no rank {bad[0]} of {size}")
    _check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    layouts: dict[str, AnyLayout] = {}
    roundings: dict[str, Rounding] = {}
    for rank in chosen:
        share = _Share(opened.checkpoint, Tensors(decoder, opened.names))
        Decoder(decoder, share, share_of(config.parallel, rank, opened.info))
        write_safetensors(output / rank_file(rank), share)
        layouts |= share.layouts
        roundings |= share.roundings
    manifest = _manifest(opened, share_of(config.parallel, 0, opened.info), layouts, roundings)
    converted.write_converted(output, manifest)
    for old in set(output.glob("rank*.safetensors")) - {output / rank_file(rank) for rank in range(size)}:
        old.unlink()
    copy_companions(source, output)
    return manifest


def _check_output(output: Path) -> None:
    """Raise ConfigError unless the directory is new, empty, or holds a conversion."""
    if output.exists() and not (output / converted.MANIFEST).exists():
        other = [path for path in output.iterdir() if not path.match("rank*.safetensors")]
        if other:
            raise ConfigError(
                f"{output} holds something other than a converted checkpoint: choose an empty or a new directory"
            )


def _manifest(
    opened: OpenModel, shard: Shard, layouts: dict[str, AnyLayout], roundings: dict[str, Rounding]
) -> ConvertedManifest:
    info = opened.info
    return ConvertedManifest(
        spec=opened.spec,
        names=opened.names,
        dtype=info.dtype,
        quantized=info.quantized,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        eos_token_ids=info.eos_token_ids,
        generation=info.generation,
        ranks=shard.size,
        activations=opened.checkpoint.activations,
        layouts=layouts,
        roundings=roundings,
        kv_scales=info.kv_scales,
        exact=shard.exact,
        whole_experts=shard.whole_experts,
    )


class _Share(Mapping[str, Array]):
    """A `WeightSource` that keeps what a rank asks for, as tensors that are read when they are written."""

    def __init__(self, checkpoint: Checkpoint, places: Tensors) -> None:
        self._checkpoint, self._places = checkpoint, places
        self._tensors: dict[str, Callable[[], Array]] = {}
        self.layouts: dict[str, AnyLayout] = {}
        self.roundings: dict[str, Rounding] = {}

    def __getitem__(self, name: str) -> Array:
        return self._tensors[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Any:
        for piece in pieces:
            self._keep(piece)
        return nothing("float32", sum(piece.own_shape[0] for piece in pieces), pieces[0].own_shape[1])

    def gated(self, path: str, gate: Piece, up: Piece) -> Any:
        return self.matrix(path, (gate, up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        found = []
        for piece in pieces:
            part = self._places.part(piece)
            found.append(np.array(part.read(self._checkpoint), np.float32))
            if part.tensors:
                self._tensors[piece.path] = partial(_same, found[-1])
        return np.concatenate(found)

    def _keep(self, piece: Piece) -> None:
        part, name = self._places.part(piece), piece.path
        if not part.tensors:  # computed from the config alone
            return
        layout = part.layout(self._checkpoint)
        if layout is None:
            self._tensors[name] = partial(part.read, self._checkpoint)
            return
        self.layouts[name] = layout
        rounding = self._checkpoint.rounding(part.tensors[0][0])
        if rounding is not None:
            self.roundings[name] = rounding
        read = lru_cache(1)(partial(part.quantized, self._checkpoint))
        for own in quantized_arrays(name, layout):
            self._tensors[own] = partial(_array_of, read, own.removeprefix(name))


def _same(values: FloatArray) -> Array:
    return values


def _array_of(read: Callable[[], QuantTensor], suffix: str) -> Array:
    """One of the arrays of a quantized part."""
    tensor = read()
    inputs, sparse = tensor.inputs, tensor.sparse
    found: dict[str, Array | None] = {
        CODES: tensor.codes,
        SCALES: tensor.scales,
        ZEROS: tensor.zeros,
        ORDER: None if inputs is None else inputs.order,
        FACTORS: None if inputs is None else inputs.factors,
        STARTS: None if sparse is None else sparse.starts,
        COLUMNS: None if sparse is None else sparse.columns,
        VALUES: None if sparse is None else sparse.values,
    }
    array = found[suffix]
    assert array is not None
    return array
