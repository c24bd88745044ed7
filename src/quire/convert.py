"""Converts checkpoints: divides the weights among ranks and writes the share of each, for builds on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.devices.protocol import FloatArray
from quire.engine.directory import model_directory
from quire.engine.source import asked_of
from quire.engine.stages import share_of
from quire.errors import ConfigError
from quire.model.checkpoint import OpenModel
from quire.model.converted import stored
from quire.model.engine_dir import MANIFEST, WEIGHTS, Manifest, Writer, check_output, of_rank, write_share
from quire.model.load import NEUTRAL, OLD, open_checkpoint_files
from quire.model.parts.decoder import Decoder
from quire.model.parts.source import Piece, Use
from quire.model.shard import Shard
from quire.model.side_files import copy_side_files
from quire.model.tensors import Tensors
from quire.progress import Told, progress
from quire.weights.tensor import nothing

FILES = "engine*.json", "weights*.bin", OLD, "rank*.safetensors"
"""FILES matches the files of a conversion, also of older versions."""
PARTS = 16  # parts of weights.bin that have a checksum each


def convert_checkpoint(config: EngineConfig, output: Path, ranks: Sequence[int] = ()) -> Manifest:
    """Divide the configured model among the ranks of --tensor-parallel-size and write the share of each to `output`.

    `quire build`, `quire serve` and `LLM` take the result as they take a checkpoint. `ranks` names the ranks to
    write now, all by default; further calls write the others. Returns the manifest of the last that was written.
    Raises ConfigError if `output` holds something else or the model cannot be divided, ModelError if it cannot be read.
    """
    source, size = model_directory(config.model), config.parallel.tensor_parallel_size
    asked = asked_of(
        replace(config.model, max_model_len=None), source
    )  # what serves the conversion says the length
    opened = open_checkpoint_files(source, asked).opened()
    info, family = opened.info, opened.family
    if info.pooling is not None:
        raise ConfigError(f"{source} makes vectors: serve it as it is; such models are not converted")
    opened.spec.check_share(share_of(config.parallel, 0, info))
    chosen = ranks or range(size)
    if bad := [rank for rank in chosen if not 0 <= rank < size]:
        raise ConfigError(f"there is no rank {bad[0]} of {size}")
    check_output(output)
    output.mkdir(parents=True, exist_ok=True)
    kept = {output / of_rank(name, rank) for name in (MANIFEST, WEIGHTS) for rank in range(size)}
    for old in {path for pattern in FILES for path in output.glob(pattern)} - kept:
        old.unlink()
    for rank in chosen:
        shard = share_of(config.parallel, rank, info)
        with progress(f"writing rank {rank} of {size}", info.weight_bytes // size) as told:
            manifest = write_share(
                output,
                partial(_write_pieces, opened, shard, told),
                PARTS,
                info,
                shard,
                spec=opened.spec,
                fingerprint=NEUTRAL,
                names=opened.names if family is None else family(),
                activations=opened.checkpoint.activations,
            )
    copy_side_files(source, output)
    return manifest


def _write_pieces(opened: OpenModel, shard: Shard, told: Told, writer: Writer) -> None:
    Decoder(opened.spec, _Pieces(opened, writer, told), shard)


class _Pieces:
    """A `WeightSource` that writes the pieces that a rank asks for."""

    def __init__(self, opened: OpenModel, writer: Writer, told: Told) -> None:
        self._checkpoint, self._tensors = opened.checkpoint, Tensors(opened.spec, opened.names)
        self._writer, self._told = writer, told

    def matrix(self, path: str, pieces: Sequence[Piece], use: Use = "linear") -> Any:
        for piece in pieces:
            part = self._tensors.part(piece)
            if piece.fill is not None or piece.path in self._writer.tensors:
                continue
            if part.layout(self._checkpoint) is None:
                self._writer.add(piece.path, *stored(part.read(self._checkpoint)))
            else:
                rounding = self._checkpoint.rounding(part.tensors[0][0])
                self._writer.add(piece.path, *stored(part.quantized(self._checkpoint), rounding))
            self._told(self._writer.tensors[piece.path].nbytes)
        return nothing("float32", sum(piece.own_shape[0] for piece in pieces), pieces[0].own_shape[1])

    def gated(self, path: str, gate: Piece, up: Piece) -> Any:
        return self.matrix(path, (gate, up))

    def vector(self, path: str, pieces: Sequence[Piece]) -> FloatArray:
        found = []
        for piece in pieces:
            found.append(np.array(self._tensors.part(piece).read(self._checkpoint), np.float32))
            if piece.fill is None:
                self._writer.add(piece.path, *stored(found[-1]))
        return np.concatenate(found)
