"""Opens a model's files, in whatever form they are. Knows the forms by the file that marks them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.devices.protocol import Backend, WeightPacker
from quire.errors import ModelError
from quire.lazy import Lazy
from quire.model.checkpoint import CheckpointFiles, open_with_experts
from quire.model.families import read_model
from quire.model.families.names import TensorNames
from quire.model.info import NOTHING, Asked, ModelInfo
from quire.model.loaded import LoadedModel, ServedModel
from quire.model.parts.decoder import DecoderConfig
from quire.model.shard import WHOLE, Shard
from quire.progress import Told, untold
from quire.weights.checkpoint import Checkpoint
from quire.weights.gguf import is_gguf
from quire.weights.source import open_source, quantization_method

if TYPE_CHECKING:
    from quire.model import converted, engine_dir, gguf
else:
    gguf = Lazy("quire.model.gguf")
    engine_dir, converted = Lazy("quire.model.engine_dir"), Lazy("quire.model.converted")

BUILT = "engine.json"
"""BUILT marks an engine directory: a built engine or a converted checkpoint."""
BUILT_RANKS = "engine.[0-9]*.json"
NEUTRAL = "any machine"
"""NEUTRAL is the fingerprint of converted checkpoints."""
OLD = "checkpoint.json"
"""OLD marks what older versions converted."""


class ModelFiles(Protocol):
    """A model's files, opened once: what they describe, and how their weights become a model.

    Opening reads headers only, and raises ModelError or ConfigError whenever `load` would. (A tied head that differs
    from the embedding shows only when both are read.)
    """

    @property
    def info(self) -> ModelInfo: ...
    @property
    def ranks(self) -> int:
        """The ranks that the weights are divided among in the files."""

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> ServedModel:
        """A rank's share without the values of its weights; `backend` must be an outline."""

    def load(self, backend: Backend, shard: Shard = WHOLE, told: Told = untold) -> ServedModel:
        """Load a rank's share; `told` learns the bytes of each matrix that is packed. See `wait` for checksums."""


class OwnFiles(ModelFiles, Protocol):
    """Files of Quire's own families."""

    def outline(self, backend: Backend, shard: Shard = WHOLE) -> LoadedModel: ...
    def load(self, backend: WeightPacker, shard: Shard = WHOLE, told: Told = untold) -> LoadedModel: ...


def open_files(path: Path, asked: Asked = NOTHING) -> OwnFiles:
    """Open a directory or a GGUF file. Raises ModelError, ConfigError."""
    if not is_built(path):
        return open_checkpoint_files(path, asked)
    manifest = engine_dir.read_manifest(path)
    files = converted.ConvertedFiles if manifest.fingerprint == NEUTRAL else engine_dir.BuiltFiles
    return files(path, manifest, asked)


def is_built(path: Path) -> bool:
    """Whether a directory was written by `quire build` or `quire convert`."""
    return (path / BUILT).exists() or any(path.glob(BUILT_RANKS))


def open_checkpoint_files(path: Path, asked: Asked = NOTHING) -> CheckpointFiles:
    """Open a checkpoint. ModelError: it was built or converted."""
    if is_built(path):
        raise ModelError(
            f"{path} is a built engine or a converted checkpoint: give the checkpoint that it was made of"
        )
    if (path / OLD).exists():
        raise ModelError(f"{path} was converted by an older version of Quire: run `quire convert` again")
    return gguf.GGUFFiles(path, asked) if is_gguf(path) else CheckpointFiles(path, asked)


def open_for_reading(path: Path) -> tuple[DecoderConfig, Checkpoint, TensorNames]:
    """Open the spec, the tensors and their names of a float checkpoint. Raises ModelError if it is not one."""
    if is_gguf(path):
        raise ModelError(f"{path} is a GGUF file: give the checkpoint that it was made of")
    files = open_checkpoint_files(path)
    if (method := quantization_method(path)) is not None:
        raise ModelError(f"{path} is quantized already ({method}): give the float checkpoint")
    opened = files.opened()
    return opened.spec, opened.checkpoint, opened.names


def open_tensors(path: Path) -> tuple[dict[str, Any], Checkpoint, TensorNames]:
    """Open the config, the tensors and the family's names of a model that is not built, for layers beside its own."""
    if is_built(path):
        raise ModelError(
            f"{path} is a built engine or a converted checkpoint, which keep no layers that predict further tokens: "
            "serve the checkpoint"
        )
    if is_gguf(path):
        raise ModelError(
            f"{path} is a GGUF file, whose layers that predict further tokens are not read: serve the checkpoint"
        )
    source = open_source(path)
    spec, names = read_model(source.config, source.where)
    checkpoint = open_with_experts(source, spec, names)
    return source.config, checkpoint, names
