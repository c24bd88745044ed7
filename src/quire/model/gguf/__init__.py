"""Reads a GGUF file: its keys and tensors become a spec, tensor names and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.errors import ModelError, UnknownArchitectureError
from quire.model.checkpoint import CheckpointFiles, OpenModel, model_info
from quire.model.families.names import TensorNames
from quire.model.gguf.adapted import family_names
from quire.model.gguf.architectures import ARCHITECTURES
from quire.model.gguf.keys import Keys
from quire.model.gguf.names import tensor_names
from quire.model.info import Asked
from quire.model.packing import check_tensors, choose_dtype, own_quantization
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import WHOLE
from quire.weights.gguf.checkpoint import GGUFCheckpoint, GGUFParts
from quire.weights.gguf.pieces import Heads, Place, places
from quire.weights.gguf.tokenizer import read_ends

# general.sampling.* by generation_config.json's names.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class GGUFFiles(CheckpointFiles):
    """`ModelFiles` of a GGUF file, or of a file split into parts."""

    def open(self) -> OpenModel:
        return _open(self._path, self._asked)


class GGUFModel(NamedTuple):
    """A file before its tensors are read. `generation` holds its defaults under the names of generation_config.json."""

    spec: DecoderConfig
    names: TensorNames
    checkpoint: GGUFCheckpoint
    generation: dict[str, Any]


def read_gguf(
    path: Path, changes: Mapping[str, Any] | None = None, architecture: str | None = None
) -> GGUFModel:
    """Read the headers of a file. ModelError for anything that is not understood in full.

    `changes` replaces keys: by their own names or, where they have one, by config.json's. `architecture` takes the
    place of the file's own.
    """
    parts = GGUFParts(path)
    keys = Keys(parts, changes, architecture)
    reader = ARCHITECTURES.get(keys.architecture)
    if reader is None:
        error = UnknownArchitectureError if architecture is None else ModelError
        raise error(
            f"{path}: architecture {keys.architecture} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    for name in reader.unused:
        keys.get(name)
    spec = reader.read(keys)
    made = {} if reader.tensors is None else reader.tensors(keys)
    keys.finish()
    spec.check(str(path))
    rope = next((layer.mixer.rope for layer in spec.layers if layer.mixer is not None), None)
    if reader.turned and rope is not None and rope.rotary_dim != spec.head_dim:
        raise keys.wrong("rope.dimension_count", f"a head's size, {spec.head_dim}", rope.rotary_dim)
    mixers = [layer.mixer for layer in spec.layers]
    own = [(range(0), range(0)) if one is None or one.scores is None else one.heads(WHOLE) for one in mixers]
    heads = Heads([(len(q), len(kv)) for q, kv in own], reader.turned)
    tensors = places(parts.tensors, heads, str(path))
    tensors |= {name: Place("", values.shape, values=values) for name, values in made.items()}
    generation = {name: parts.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    generation["eos_token_id"] = list(read_ends(parts.first)) or None
    return GGUFModel(
        spec,
        tensor_names(keys, spec, reader.names),
        GGUFCheckpoint(parts, tensors),
        {name: value for name, value in generation.items() if value is not None},
    )


def _open(path: Path, asked: Asked) -> OpenModel:
    reading = asked.reading
    if reading.dummy:
        raise ModelError(f"{path}: --load-format dummy makes float weights, and a GGUF file has its own")
    spec, names, checkpoint, generation = read_gguf(path, reading.config, reading.architecture)
    config = asked.applied(spec)
    wanted = check_tensors(config, names, checkpoint, path)
    dtype = choose_dtype(asked.dtype, wanted, checkpoint)
    quantized = own_quantization(asked.dtype, wanted, checkpoint, asked.quantized)
    ends = tuple(token for token in generation.get("eos_token_id", ()) if token < config.vocab_size)
    info = model_info(path, config, wanted, dtype, quantized, ends, generation)
    return OpenModel(info, config, checkpoint, names, partial(family_names, spec))
