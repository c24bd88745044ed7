"""From a model directory or file to a graph of packed weights. Knows files, families and a backend; no sequence.

`inspect_model` reads headers only: the spec, the number of parameters and the bytes that weights will take.
`load_model` then maps the tensors and packs them one by one, so that memory peaks at the packed weights plus
one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from quire.devices.protocol import Backend, Graph, KVDtype, KVScales, KVSpec
from quire.errors import ModelError, UnknownArchitectureError
from quire.model import converted, engine_dir
from quire.model.apart import taken_apart
from quire.model.cost import Cost, cost_of, matrices
from quire.model.decoder import Decoder
from quire.model.dummy import dummy_checkpoint
from quire.model.families import DECODERS, MODEL_TYPES, read_config, text_config
from quire.model.families.names import TensorNames
from quire.model.kv_scales import kv_scales, scaled_spec
from quire.model.pack import (
    WeightTypes,
    check_tensors,
    choose_dtype,
    outline_weights,
    own_quantization,
    pack_weights,
    wanted_tensors,
)
from quire.model.pooling import HeadReader, PoolingHead, max_length, read_pooling
from quire.model.shard import WHOLE, Shard
from quire.model.spec import ArchSpec, ModelShape
from quire.model.stacks import stacks_apart
from quire.model.weights import DecoderWeights
from quire.weights.checkpoint import Checkpoint
from quire.weights.gguf import is_gguf
from quire.weights.hub import find_model
from quire.weights.readers.module import ModuleCheckpoint
from quire.weights.schemes import Quantization, asks_for_other
from quire.weights.source import Source, open_source, quantization_method
from quire.weights.tensor import FloatDtype


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read a model that its files alone do not describe.

    `architecture` takes the place of the config's own, `config` that of the same keys. With `dummy` the weights are
    random, and no file of them is read. `spare_tokens` makes room for tokens that adapters add.
    """

    architecture: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    dummy: bool = False
    spare_tokens: int = 0


AS_IT_IS = Reading()
UNLIMITED = engine_dir.EngineLimits()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model before its weights are read.

    `dtype` is the type of its values, `quantized` the types of its matrices if they are quantized. `weight_bytes` is
    the size of the values in `dtype` (vectors in float32). `generation` is generation_config.json, or empty.
    `directory` (or a GGUF file) also holds the tokenizer. `pooling` makes vectors of hidden states if the model defines
    it, and `head_of` reads it from another checkpoint of the model. `limits` are those that an engine was built for. A
    `foreign` model runs on the backend of its own library. `kv_scales` are those of each layer's keys and values, if
    the checkpoint has any.
    """

    directory: Path
    spec: ModelShape
    dtype: FloatDtype
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    limits: engine_dir.EngineLimits = UNLIMITED
    pooling: PoolingHead | None = None
    quantized: Quantization | None = None
    foreign: bool = False
    head_of: HeadReader | None = field(default=None, compare=False)
    kv_scales: tuple[KVScales | None, ...] = ()

    def kv_spec(self, dtype: KVDtype, shard: Shard = WHOLE) -> KVSpec:
        """The KV cache of a rank; in FP8 with the scales that came along with the weights."""
        if not isinstance(self.spec, ArchSpec):
            return self.spec.kv_spec(dtype)
        return scaled_spec(shard.kv_spec(self.spec, dtype), self.spec, self.kv_scales, shard)


class OpenModel(NamedTuple):
    """A checkpoint's description and its tensors, before they are read."""

    info: ModelInfo
    spec: ArchSpec
    checkpoint: Checkpoint
    names: TensorNames


class ServedModel(Protocol):
    """A model ready to compile on its backend."""

    @property
    def graph(self) -> Graph: ...
    @property
    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take."""

    @property
    def cost(self) -> Cost: ...
    def wait(self) -> None:
        """Wait until its files are read and verified. ModelError if they are damaged."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of Quire's own families: packed weights, and the graph that uses them.

    `names` are those of its tensors, if they are known; `open` opens the checkpoint again.
    """

    info: ModelInfo
    spec: ArchSpec
    weights: DecoderWeights
    check: Callable[[], None] | None = None
    shard: Shard = WHOLE
    names: TensorNames | None = None
    open: Callable[[], Checkpoint] | None = None

    @property
    def dtype(self) -> FloatDtype:
        return self.info.dtype

    @property
    def decoder(self) -> Decoder:
        return Decoder(self.spec, self.weights, self.shard)

    @property
    def graph(self) -> Graph:
        return self.decoder.graph()

    def stage(self, layers: range | None = None, taps: Sequence[int] = ()) -> Graph:
        """The run of `layers` that a pipeline rank computes, or all of its share, with `taps` tapped (see Graph)."""
        return self.decoder.graph(layers, taps)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, counting a tied head once."""
        return sum(matrix.nbytes for matrix in matrices(self.weights).values())

    @property
    def cost(self) -> Cost:
        return cost_of(self.spec, self.weights, self.shard)

    def wait(self) -> None:
        if self.check is not None:
            self.check()


def inspect_model(
    model: str | Path,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    quantized: Quantization | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    reading: Reading = AS_IT_IS,
) -> ModelInfo:
    """Check config and tensor headers without allocating. Raises ModelError whenever `load_model` would.

    (Except for a tied head that differs from the embedding, which only reading both can show.)
    """
    directory = find_model(str(model), revision, download_dir)
    if engine_dir.is_engine(directory):
        _check_unchanged(directory, reading)
        return _built(directory, engine_dir.read_manifest(directory), dtype, quantized)
    if converted.is_converted(directory):
        return _converted(directory, dtype, quantized, reading)[0]
    return _open(directory, dtype, quantized, reading)[0]


def load_model(
    model: str | Path,
    backend: Backend,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    quantized: Quantization | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    verify: bool = True,
    reading: Reading = AS_IT_IS,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """Load a directory, a GGUF file or a hub id.

    `dtype` "auto" keeps the matrices of a model that has them all in bfloat16, or all in float16; else it makes them
    float32.
    `quantized` rounds the matrices further, one by one as they are read.
    A built engine is mapped. With `verify`, its bytes are compared with their checksums in the background; `wait`
    raises the outcome. With `shard` only that rank's share is read.
    """
    directory = find_model(str(model), revision, download_dir)
    if engine_dir.is_engine(directory):
        manifest = engine_dir.read_manifest(directory, shard=shard)
        info = _built(directory, manifest, dtype, quantized)
        shard = shard.divided(manifest.exact, manifest.whole_experts, str(directory))
        data = engine_dir.map_weights(directory / manifest.weights_file, manifest.size)
        weights = engine_dir.place_weights(directory, manifest, data, backend).of_stage(manifest.spec, shard)
        check = None
        if verify:
            check = partial(engine_dir.Checksums(data, len(manifest.checksums)).check, directory, manifest)
        return LoadedModel(info, manifest.spec, weights, check, shard, names=manifest.names)
    if converted.is_converted(directory):
        info, opened = _converted(directory, dtype, quantized, reading, shard)
        return _of_converted(info, opened, backend, outline=False)
    reopen = partial(_reopened, directory, reading)
    return pack_model(_open(directory, dtype, quantized, reading), backend, shard, reopen)


def pack_model(
    opened: OpenModel,
    backend: Backend,
    shard: Shard = WHOLE,
    reopen: Callable[[], Checkpoint] | None = None,
) -> LoadedModel:
    """Read and pack an opened model, or a rank's share of it."""
    info, spec, checkpoint, names = opened
    types = WeightTypes.of(info.dtype, info.quantized)
    shard.check(spec)
    weights = pack_weights(spec, names, checkpoint, backend, types, shard)
    return LoadedModel(info, spec, weights, names=names, open=reopen, shard=shard)


def outline_model(
    model: str | Path,
    backend: Backend,
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
    quantized: Quantization | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    reading: Reading = AS_IT_IS,
    shard: Shard = WHOLE,
) -> LoadedModel:
    """The model of `load_model` without the values of its weights; `backend` must be an outline."""
    directory = find_model(str(model), revision, download_dir)
    if engine_dir.is_engine(directory):
        return load_model(directory, backend, dtype, quantized, verify=False, shard=shard)
    if converted.is_converted(directory):
        info, opened = _converted(directory, dtype, quantized, reading, shard)
        return _of_converted(info, opened, backend, outline=True)
    info, spec, checkpoint, names = _open(directory, dtype, quantized, reading)
    types = WeightTypes.of(info.dtype, info.quantized)
    shard.check(spec)
    weights = outline_weights(spec, names, backend, types, checkpoint, shard)
    return LoadedModel(info, spec, weights, names=names, shard=shard)


def open_model(
    directory: Path,
    dtype: str = "auto",
    quantized: Quantization | None = None,
    reading: Reading = AS_IT_IS,
) -> OpenModel:
    """A checkpoint whose tensors are checked and not yet read. ModelError for one that was built or converted."""
    _refuse_built(directory)
    return _open(directory, dtype, quantized, reading)


def _refuse_built(directory: Path) -> None:
    if engine_dir.is_engine(directory) or converted.is_converted(directory):
        raise ModelError(
            f"{directory} is a built engine or a converted checkpoint: give the checkpoint that it was made of"
        )


def open_for_reading(directory: Path) -> tuple[ArchSpec, Checkpoint, TensorNames]:
    """The spec, the tensors and their names of a float checkpoint. Raises ModelError if it is not one."""
    if is_gguf(directory):
        raise ModelError(f"{directory} is a GGUF file: give the checkpoint that it was made of")
    _refuse_built(directory)
    if (method := quantization_method(directory)) is not None:
        raise ModelError(f"{directory} is quantized already ({method}): give the float checkpoint")
    _, spec, checkpoint, names = _open(directory, "auto", None, AS_IT_IS)
    return spec, checkpoint, names


def open_tensors(directory: Path) -> tuple[dict[str, Any], Checkpoint, TensorNames]:
    """The config, the tensors and their names of a model that is not built: what drafters find beside its layers."""
    if engine_dir.is_engine(directory):
        raise ModelError(
            f"{directory} is a built engine, which keeps no layers that predict further tokens: serve the checkpoint"
        )
    if converted.is_converted(directory):
        raise ModelError(
            f"{directory} was converted, which keeps no layers that predict further tokens: serve the checkpoint"
        )
    source = open_source(directory)
    spec, names = read_config(source.config, source.where)
    checkpoint = source.tensors(partial(stacks_apart, spec, names))
    return source.config, checkpoint, names.fitted(checkpoint.names())


def _built(
    directory: Path, manifest: engine_dir.Manifest, dtype: str, quantized: Quantization | None
) -> ModelInfo:
    if dtype not in ("auto", manifest.dtype):
        raise ModelError(
            f"{directory} was built in {manifest.dtype} and --dtype asks for {dtype}; leave it out, or run "
            f"`quire build --dtype {dtype}`"
        )
    if asks_for_other(quantized, manifest.quantized):
        raise ModelError(
            f"{directory} was built with other weights than --quantization asks for; leave it out, or run "
            "`quire build` with it"
        )
    return ModelInfo(
        directory=directory,
        spec=manifest.spec,
        dtype=manifest.dtype,
        num_parameters=manifest.num_parameters,
        weight_bytes=manifest.weight_bytes,
        eos_token_ids=manifest.eos_token_ids,
        generation=manifest.generation,
        limits=manifest.limits,
        quantized=manifest.quantized,
        kv_scales=manifest.kv_scales,
    )


def _converted(
    directory: Path, dtype: str, quantized: Quantization | None, reading: Reading, shard: Shard | None = None
) -> tuple[ModelInfo, converted.OpenConverted]:
    """A converted checkpoint as `dtype` and `quantized` ask for it; without `shard`, its first rank's."""
    if reading != AS_IT_IS:
        raise ModelError(
            f"{directory} is a converted checkpoint: give --architecture, --hf-overrides and --load-format to "
            "`quire convert`; for --lora-extra-vocab-size serve the original"
        )
    opened = converted.OpenConverted(directory, dtype, quantized, shard)
    manifest = opened.manifest
    info = ModelInfo(
        directory=directory,
        spec=manifest.spec,
        dtype=opened.dtype,
        num_parameters=manifest.num_parameters,
        weight_bytes=manifest.weight_bytes,
        eos_token_ids=manifest.eos_token_ids,
        generation=manifest.generation,
        quantized=opened.quantized,
        kv_scales=manifest.kv_scales,
    )
    return info, opened


def _of_converted(
    info: ModelInfo, opened: converted.OpenConverted, backend: Backend, outline: bool
) -> LoadedModel:
    spec, names = opened.manifest.spec, opened.manifest.names
    opened.shard.check(spec)
    weights = opened.weights(backend, outline)
    return LoadedModel(info, spec, weights, names=names, shard=opened.shard)


def _open(path: Path, dtype: str, quantized: Quantization | None, reading: Reading) -> OpenModel:
    source = open_source(path, reading.config)
    try:
        spec, names = read_config(source.config, source.where, reading.architecture)
    except UnknownArchitectureError as error:
        alike = look_alike(source)
        if alike is None:
            raise
        raise UnknownArchitectureError(
            f"{error}. Its config and tensors look like those of {alike}: `--architecture {alike}` loads it as one"
        ) from None
    if reading.spare_tokens:
        spec = spec.with_spare_tokens(reading.spare_tokens)
    if reading.dummy:
        checkpoint: Checkpoint = dummy_checkpoint(source, spec, names)
        names = names.fitted(checkpoint.names())
    else:
        checkpoint, names = _opened(source, spec, names)
    wanted = check_tensors(spec, names, checkpoint, path)
    kept = choose_dtype(dtype, wanted, checkpoint)
    quantized = own_quantization(dtype, wanted, checkpoint, quantized)
    config = text_config(source.config, source.where) or source.config
    eos = eos_ids(source.generation, config, source.where)
    head_of = partial(read_pooling, path, source.config, spec.architecture, names)
    head = head_of(checkpoint)
    limits = UNLIMITED if head is None else engine_dir.EngineLimits(max_seq_len=max_length(path))
    info = model_info(path, spec, names, kept, quantized, eos, source.generation)
    scales = kv_scales(source, spec, names)
    info = replace(info, pooling=head, limits=limits, head_of=head_of, kv_scales=scales)
    return OpenModel(info, spec, checkpoint, names)


def _reopened(directory: Path, reading: Reading) -> Checkpoint:
    return _open(directory, "auto", None, reading).checkpoint


def _opened(source: Source, spec: ArchSpec, names: TensorNames) -> tuple[Checkpoint, TensorNames]:
    """The weights and their names. Packed matrices always have outputs as rows, whatever the family's others have."""
    found = source.tensors(partial(stacks_apart, spec, names))
    names = names.fitted(found.names())
    if names.transposed and isinstance(found, ModuleCheckpoint):
        return taken_apart(spec, names, found, lambda name: not found.is_packed(name))
    return found, names


def _check_unchanged(directory: Path, reading: Reading) -> None:
    if reading.config or reading.dummy or reading.spare_tokens:
        raise ModelError(
            f"{directory} is a built engine: give --hf-overrides and --load-format to `quire build`; for "
            "--lora-extra-vocab-size serve the checkpoint"
        )


def look_alike(source: Source) -> str | None:
    """The first decoder family that understands the whole config and finds all its tensors; None if there is none."""
    for kind, architecture in MODEL_TYPES.items():
        if architecture not in DECODERS:
            continue
        try:
            checkpoint = source.tensors()
            spec, names = read_config(source.config, architecture=architecture)
            check_tensors(spec, names.fitted(checkpoint.names()), checkpoint, source.path)
        except ModelError:
            continue
        return kind
    return None


def model_info(
    directory: Path,
    spec: ArchSpec,
    names: TensorNames,
    dtype: FloatDtype,
    quantized: Quantization | None,
    eos_token_ids: tuple[int, ...],
    generation: dict[str, Any],
) -> ModelInfo:
    wanted = wanted_tensors(spec, names)
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


def eos_ids(generation: dict[str, Any], config: dict[str, Any], where: str) -> tuple[int, ...]:
    """The end-of-sequence tokens; generation_config.json overrides config.json, as in transformers."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)
