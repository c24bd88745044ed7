"""Reads a checkpoint's files: from config and tensor headers to packed weights. Knows no sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.devices.protocol import Backend, WeightPacker
from quire.errors import ModelError, UnknownArchitectureError
from quire.lazy import Lazy
from quire.model.families import DECODERS, MODEL_TYPES, read_model, text_config
from quire.model.families.names import TensorNames
from quire.model.info import NOTHING, UNLIMITED, Asked, EngineLimits, ModelInfo
from quire.model.kv_scales import kv_scales
from quire.model.loaded import LoadedModel
from quire.model.packing import (
    Packer,
    WantedTensor,
    WeightTypes,
    check_tensors,
    choose_dtype,
    own_quantization,
    pack_weights,
)
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import WHOLE, Shard
from quire.progress import Told, untold
from quire.weights.checkpoint import Checkpoint
from quire.weights.schemes import Quantization
from quire.weights.source import Source, open_source
from quire.weights.tensor import FloatDtype

if TYPE_CHECKING:
    from quire.model import dummy, packed_experts, pooling, sentences, split_matrices
    from quire.model.families import composite
    from quire.weights.readers import packed_modules as readers
else:
    dummy, pooling = Lazy("quire.model.dummy"), Lazy("quire.model.pooling")
    sentences, composite = Lazy("quire.model.sentences"), Lazy("quire.model.families.composite")
    packed_experts = Lazy("quire.model.packed_experts")
    split_matrices = Lazy("quire.model.split_matrices")
    readers = Lazy("quire.weights.readers.packed_modules")

log = logging.getLogger(__name__)


class OpenModel(NamedTuple):
    """A checkpoint's description and its tensors, before they are read.

    `family` gives the names by which adapters know the tensors, if the checkpoint has others.
    """

    info: ModelInfo
    spec: DecoderConfig
    checkpoint: Checkpoint
    names: TensorNames
    family: Callable[[], TensorNames] | None = None


class OpenedFiles:
    """`ModelFiles` of a model that is described already, with its tensors at hand."""

    ranks = 1

    def __init__(self, opened: OpenModel) -> None:
        self.info = opened.info
        self._opened: OpenModel | None = opened

    def opened(self) -> OpenModel:
        """The description, the tensors and their names."""
        assert self._opened is not None
        return self._opened

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedModel:
        return self._read(backend, shard, True, untold)

    def load(self, backend: WeightPacker, shard: Shard = WHOLE, told: Told = untold) -> LoadedModel:
        """Map the tensors and pack them one by one: memory peaks at the packed weights and one matrix."""
        return self._read(backend, shard, False, told)

    def _read(self, backend: WeightPacker, shard: Shard, outline: bool, told: Told) -> LoadedModel:
        info, spec, checkpoint, names, family = self.opened()
        spec.check_share(shard)
        packer = Packer(checkpoint, backend, WeightTypes.of(info.dtype, info.quantized), outline)
        decoder = pack_weights(spec, names, packer, shard, told)
        return LoadedModel(info, decoder, names=names, shard=shard, family=family)


class CheckpointFiles(OpenedFiles):
    """Files of a checkpoint in safetensors or torch's pickles. Opening reads headers only.

    The tensors stay mapped until they are packed. A second reading opens the files again.
    """

    def __init__(self, path: Path, asked: Asked = NOTHING) -> None:
        self._path, self._asked = path, asked
        super().__init__(self.open())

    def open(self) -> OpenModel:
        return _open(self._path, self._asked)

    def opened(self) -> OpenModel:
        if self._opened is None:
            self._opened = self.open()
        return self._opened

    def load(self, backend: WeightPacker, shard: Shard = WHOLE, told: Told = untold) -> LoadedModel:
        model = super().load(backend, shard, told)
        self._opened = None
        return replace(model, open=lambda: self.open().checkpoint)


def _open(path: Path, asked: Asked) -> OpenModel:
    reading = asked.reading
    source = open_source(path, reading.config)
    try:
        spec, names = read_model(source.config, source.where, reading.architecture)
    except UnknownArchitectureError as error:
        alike = look_alike(source)
        if alike is None:
            raise
        raise UnknownArchitectureError(
            f"{error}. Its config and tensors look like those of {alike}: `--architecture {alike}` loads it as one"
        ) from None
    spec = asked.applied(spec)
    if reading.dummy:
        checkpoint: Checkpoint = dummy.dummy_checkpoint(source, spec, names)
        names = names.fitted(checkpoint.names())
    else:
        checkpoint, names = _opened(source, spec, names)
    inside = "text_config" in source.config
    if spec.head is not None and inside and composite.disagrees_on_head(source.config):
        tied = f"{names['head']}.weight" not in set(checkpoint.names())
        spec = msgspec.structs.replace(spec, head=msgspec.structs.replace(spec.head, tied=tied))
    wanted = check_tensors(spec, names, checkpoint, path)
    kept = choose_dtype(asked.dtype, wanted, checkpoint)
    quantized = own_quantization(asked.dtype, wanted, checkpoint, asked.quantized)
    config = text_config(source.config, source.where) or source.config
    eos = eos_ids(source.generation, config, source.where, spec.vocab_size)
    info = model_info(path, spec, wanted, kept, quantized, eos, source.generation)
    info = replace(info, kv_scales=kv_scales(source, spec, names))
    if spec.architecture not in DECODERS or (path / "modules.json").is_file():
        head_of = partial(pooling.read_pooling, path, source.config, spec.architecture, names)
        head = head_of(checkpoint)
        limits = UNLIMITED if head is None else EngineLimits(max_seq_len=sentences.max_length(path))
        info = replace(info, pooling=head, limits=limits, head_of=head_of)
    return OpenModel(info, spec, checkpoint, names)


def _opened(source: Source, spec: DecoderConfig, names: TensorNames) -> tuple[Checkpoint, TensorNames]:
    """Open the weights and adapt their names. Packed matrices have outputs as rows, even in transposed families."""
    found = open_with_experts(source, spec, names)
    names = names.fitted(found.names())
    if names.transposed and isinstance(found, readers.ModuleCheckpoint):
        return split_matrices.taken_apart(spec, names, found, lambda name: not found.is_packed(name))
    return found, names


def open_with_experts(source: Source, spec: DecoderConfig, names: TensorNames) -> Checkpoint:
    """Open the weights, with packed experts taken apart."""
    if not spec.routings:
        return source.tensors()
    return source.tensors(partial(packed_experts.stacks_apart, spec, names))


def look_alike(source: Source) -> str | None:
    """Find the first decoder family that understands the whole config and finds all its tensors; None if none does."""
    for kind, architecture in MODEL_TYPES.items():
        if architecture not in DECODERS:
            continue
        try:
            checkpoint = source.tensors()
            spec, names = read_model(source.config, architecture=architecture)
            check_tensors(spec, names.fitted(checkpoint.names()), checkpoint, source.path)
        except ModelError:
            continue
        return kind
    return None


def model_info(
    directory: Path,
    spec: DecoderConfig,
    wanted: Mapping[str, WantedTensor],
    dtype: FloatDtype,
    quantized: Quantization | None,
    eos_token_ids: tuple[int, ...],
    generation: dict[str, Any],
) -> ModelInfo:
    """Describe a model by the tensors that it must have."""
    return ModelInfo(
        directory=directory,
        spec=spec,
        dtype=dtype,
        num_parameters=sum(tensor.parameters for tensor in wanted.values()),
        weight_bytes=sum(
            tensor.parameters * (4 if dtype == "float32" or tensor.exact else 2) for tensor in wanted.values()
        ),
        eos_token_ids=eos_token_ids,
        generation=generation,
        quantized=quantized,
    )


def eos_ids(
    generation: dict[str, Any], config: dict[str, Any], where: str, vocab_size: int
) -> tuple[int, ...]:
    """Read the tokens that end an answer by either file. One for which the model has no row ends nothing."""
    found: dict[int, None] = {}
    files = {str(Path(where).with_name("generation_config.json")): generation, where: config}
    for file, keys in files.items():
        value = keys.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
        for token in ids:
            if token < vocab_size:
                found[token] = None
            else:
                log.warning("%s: eos_token_id %d is beyond the model's %d tokens", file, token, vocab_size)
    return tuple(found)
