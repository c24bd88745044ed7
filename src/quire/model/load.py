"""From a model directory to a graph of packed weights. Knows files, families and a backend; no sequence.

`inspect_model` reads headers only: the spec, the number of parameters and the bytes that weights will take.
`load_model` then maps the tensors and packs them one by one, so that memory peaks at the packed weights plus
one matrix.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from quire.errors import ModelError
from quire.model import engine_dir
from quire.model.checkpoint import Checkpoint, open_checkpoint
from quire.model.decoder import Decoder, DecoderWeights, LayerWeights
from quire.model.families import read_config
from quire.model.families.names import TensorNames
from quire.model.hub import find_model
from quire.model.spec import ArchSpec, ModelShape
from quire.ops.protocol import (
    Array,
    Backend,
    Executable,
    FloatArray,
    FloatDtype,
    Graph,
    KVCache,
    KVSpec,
    Limits,
    Matrix,
    Norm,
)

MAX_JSON = 16 << 20  # bytes of a config file
COMPARE = 4 << 20  # elements compared at a time
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNLIMITED = engine_dir.Limits()
WEIGHT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model before its weights are read.

    `weight_bytes` are those of the values in `dtype` (vectors in float32); packing may add some padding.
    `generation` is generation_config.json as it is, or empty. `directory` also holds the tokenizer's files.
    `limits` are those that a built engine was made for.
    """

    directory: Path
    spec: ModelShape
    dtype: FloatDtype
    num_parameters: int
    weight_bytes: int
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    limits: engine_dir.Limits = UNLIMITED


class ServedModel(Protocol):
    """A model that can be made ready to run, whoever computes it. `weight_bytes` is what its weights take."""

    @property
    def weight_bytes(self) -> int: ...
    def workspace_bytes(self, backend: Backend, kv_spec: KVSpec, limits: Limits) -> int: ...
    def kv_cache(self, backend: Backend, spec: KVSpec, num_blocks: int, block_size: int) -> KVCache: ...
    def compile(self, backend: Backend, kv: KVCache, limits: Limits) -> Executable: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model of Quire's own families: packed weights, and the graph that uses them."""

    info: ModelInfo
    spec: ArchSpec
    weights: DecoderWeights

    @property
    def dtype(self) -> FloatDtype:
        return self.info.dtype

    @property
    def graph(self) -> Graph:
        return Decoder(self.spec, self.weights).graph()

    @property
    def weight_bytes(self) -> int:
        """What the packed matrices take."""
        return self.weights.matrix_bytes

    def workspace_bytes(self, backend: Backend, kv_spec: KVSpec, limits: Limits) -> int:
        return backend.workspace_bytes(self.graph, kv_spec, limits)

    def kv_cache(self, backend: Backend, spec: KVSpec, num_blocks: int, block_size: int) -> KVCache:
        return backend.kv_cache(spec, num_blocks, block_size)

    def compile(self, backend: Backend, kv: KVCache, limits: Limits) -> Executable:
        return backend.compile(self.graph, kv, limits)


def inspect_model(
    model: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
) -> ModelInfo:
    """Check config and tensor headers, allocate nothing. Raises ModelError for whatever `load_model` would.

    (Except a tied head that differs from the embedding, which only reading both can tell.)
    """
    directory = find_model(str(model), revision, download_dir)
    if engine_dir.is_engine(directory):
        return _built(directory, engine_dir.read_manifest(directory), dtype)
    return _open(directory, dtype)[0]


def load_model(
    model: str | Path,
    backend: Backend,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
    verify: bool = True,
) -> LoadedModel:
    """Load a directory or hub id. `dtype` "auto" keeps bfloat16 matrices and makes everything else float32.

    float16 becomes float32, which holds it exactly, at twice the memory; ask for bfloat16 to round instead.
    A built engine is mapped, and its bytes are compared with their checksums where `verify` is true.
    """
    directory = find_model(str(model), revision, download_dir)
    if engine_dir.is_engine(directory):
        manifest = engine_dir.read_manifest(directory)
        info = _built(directory, manifest, dtype)
        return LoadedModel(info, manifest.spec, engine_dir.map_weights(directory, manifest, backend, verify))
    info, spec, checkpoint, names = _open(directory, dtype)
    return LoadedModel(info, spec, _Packer(spec, names, checkpoint, backend, info.dtype).pack())


def _built(directory: Path, manifest: engine_dir.Manifest, dtype: str) -> ModelInfo:
    if dtype not in ("auto", manifest.dtype):
        raise ModelError(
            f"{directory} was built in {manifest.dtype} and --dtype asks for {dtype}; leave it out, or run "
            f"`quire build --dtype {dtype}`"
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
    )


def _open(directory: Path, dtype: str) -> tuple[ModelInfo, ArchSpec, Checkpoint, TensorNames]:
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: no config.json; give the directory of a Hugging Face model")
    config = read_json(path)
    spec, names = read_config(config, str(path))
    checkpoint = open_checkpoint(directory)
    shapes = check_tensors(spec, names, checkpoint, directory)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    kept = _choose_dtype(dtype, shapes, checkpoint)
    info = ModelInfo(
        directory=directory,
        spec=spec,
        dtype=kept,
        num_parameters=sum(prod(shape) for shape in shapes.values()),
        weight_bytes=sum(prod(s) * (2 if kept == "bfloat16" and len(s) == 2 else 4) for s in shapes.values()),
        eos_token_ids=_eos(generation, config, path),
        generation=generation,
    )
    return info, spec, checkpoint, names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or ModelError naming it."""
    try:
        size = path.stat().st_size
        value = json.loads(path.read_text("utf-8")) if size <= MAX_JSON else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object of at most {MAX_JSON} bytes")
    return value


def check_tensors(
    spec: ArchSpec, names: TensorNames, checkpoint: Checkpoint, directory: Path
) -> dict[str, tuple[int, ...]]:
    """The tensors to load, with shapes. Raises ModelError where one is missing, left over or wrong."""
    expected = names.expected(spec)
    present = set(checkpoint.names())
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelError(f"{directory}: missing {_list(missing)}; the checkpoint does not match config.json")
    tied = {names.head} if spec.tie_embeddings else set()
    left = sorted(name for name in present - expected.keys() - tied if not names.is_ignored(name))
    if left:
        raise ModelError(f"{directory}: unexpected {_list(left)}; {spec.architecture} has no place for them")
    wanted = dict(expected)
    if tied & present:
        wanted[names.head] = expected[names.embedding]
    for name, shape in wanted.items():
        if checkpoint.shape(name) != shape:
            found = list(checkpoint.shape(name))
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {found}, config.json says {list(shape)}"
            )
        if checkpoint.dtype(name) not in WEIGHT_DTYPES:
            raise ModelError(
                f"{checkpoint.path(name)}: tensor {name} is {checkpoint.dtype(name)}; "
                f"supported are {', '.join(map(str, WEIGHT_DTYPES))}"
            )
    return expected


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:5])}{more}"


def _choose_dtype(dtype: str, shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> FloatDtype:
    if dtype == "bfloat16" or dtype == "float32":
        return "bfloat16" if dtype == "bfloat16" else "float32"
    if dtype != "auto":
        raise ModelError(f"dtype must be auto, float32 or bfloat16, got {dtype!r}")
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    return "bfloat16" if all(checkpoint.dtype(name) == BFLOAT16 for name in matrices) else "float32"


def _eos(generation: dict[str, Any], config: dict[str, Any], path: Path) -> tuple[int, ...]:
    """generation_config.json prevails over config.json, as in transformers."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(f"{path.parent}: eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Packer:
    """Reads tensors by role and hands them to the backend."""

    spec: ArchSpec
    names: TensorNames
    checkpoint: Checkpoint
    backend: Backend
    dtype: FloatDtype

    def pack(self) -> DecoderWeights:
        names = self.names
        embedding = self.backend.matrix([self.checkpoint.get(names.embedding)], self.dtype)
        layers = tuple(self._layer(i) for i in range(self.spec.num_layers))
        return DecoderWeights(embedding, layers, self._norm(names.norm), self._head(embedding))

    def _layer(self, i: int) -> LayerWeights:
        names, spec = self.names, self.spec

        def get(role: str) -> Array:
            return self.checkpoint.get(names.in_layer(i, role))

        def bias(wanted: bool, *roles: str) -> FloatArray | None:
            parts = [self._vector(names.in_layer(i, role, "bias")) for role in roles] if wanted else []
            return np.concatenate(parts) if parts else None

        def norm(role: str) -> Norm:
            return self._norm(names.in_layer(i, role))

        return LayerWeights(
            attention_norm=norm(names.attention_norm),
            qkv=self.backend.matrix([get(names.q), get(names.k), get(names.v)], self.dtype),
            qkv_bias=bias(spec.qkv_bias, names.q, names.k, names.v),
            q_norm=norm(names.q_norm) if spec.qk_norm else None,
            k_norm=norm(names.k_norm) if spec.qk_norm else None,
            out=self.backend.matrix([get(names.out)], self.dtype),
            out_bias=bias(spec.o_bias, names.out),
            mlp_norm=norm(names.mlp_norm),
            gate_up=self.backend.gated_matrix(get(names.gate), get(names.up), self.dtype),
            gate_up_bias=bias(spec.mlp_bias, names.gate, names.up),
            down=self.backend.matrix([get(names.down)], self.dtype),
            down_bias=bias(spec.mlp_bias, names.down),
        )

    def _head(self, embedding: Matrix) -> Matrix:
        """A tied head is the embedding; a checkpoint that also stores it must store the same values."""
        names = self.names
        if not self.spec.tie_embeddings:
            return self.backend.matrix([self.checkpoint.get(names.head)], self.dtype)
        if names.head in set(self.checkpoint.names()) and not self._equal(names.head, names.embedding):
            raise ModelError(
                f"{self.checkpoint.path(names.head)}: tie_word_embeddings is true but {names.head} differs "
                f"from {names.embedding}; set it to false in config.json if the head is meant to be used"
            )
        return embedding

    def _equal(self, first: str, second: str) -> bool:
        """Bit for bit, in pieces; tensors of two types are never equal."""
        a, b = self.checkpoint.get(first).reshape(-1), self.checkpoint.get(second).reshape(-1)
        if a.dtype != b.dtype:
            return False
        bits = f"u{a.dtype.itemsize}"
        pieces = (slice(i, i + COMPARE) for i in range(0, len(a), COMPARE))
        return all(np.array_equal(a[piece].view(bits), b[piece].view(bits)) for piece in pieces)

    def _vector(self, name: str) -> FloatArray:
        return np.array(self.checkpoint.get(name), np.float32)

    def _norm(self, name: str) -> Norm:
        return Norm(self.spec.norm, self._vector(name), None, self.spec.norm_eps)
