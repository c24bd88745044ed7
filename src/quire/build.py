"""Builds engine directories: load a checkpoint, pack it for this machine, and write it so that it can be mapped.

Knows the model's loader and the directory's form, but no kernel.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.config import EngineConfig
from quire.devices import registry
from quire.devices.artifacts import FOLDER, Builder
from quire.devices.protocol import Backend
from quire.engine.directory import model_directory
from quire.engine.plan import make_backend, plan_files
from quire.engine.source import asked_of, for_divided
from quire.engine.stages import share_of
from quire.errors import ConfigError
from quire.model import engine_dir
from quire.model.engine_dir import MAX_PARTS, Manifest, Writer, WritingPacker, check_output, write_share
from quire.model.info import UNLIMITED, EngineLimits, ModelInfo
from quire.model.load import NEUTRAL, OwnFiles, is_built, open_files
from quire.model.shard import Shard
from quire.model.side_files import copy_side_files
from quire.progress import Told, progress

EVERYTHING = 1 << 60
"""EVERYTHING is more bytes of memory than a model needs: that of another machine is not known here."""


class Source(NamedTuple):
    """A model to build, and the path whose tokenizer it has."""

    files: OwnFiles
    beside: Path | None


def build_engine(
    config: EngineConfig,
    output: Path,
    limits: EngineLimits = UNLIMITED,
    source: Source | None = None,
    target: str = "",
) -> Manifest:
    """Write the configured model, or `source`, to `output`, completely or not at all. Replaces an engine in its place.

    For a GPU kernels are compiled too, for `target` or the one that is here.

    If the model is an engine already, only its limits change; limits that are not given stay. Returns the manifest of
    the first rank, the only one without --tensor-parallel-size.
    Raises ConfigError if `output` holds something else, or limits or options do not fit the model.
    """
    check_output(output)
    device = config.device
    named = registry.selection.target_of(device.device, device.backend, target)
    config = replace(config, device=replace(device, device=named))
    path = model_directory(config.model)
    if source is None and is_built(path) and engine_dir.read_manifest(path).fingerprint != NEUTRAL:
        return _with_limits(config, output, limits)
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "--pipeline-parallel-size: each stage of a built engine reads its layers from the same file; give it to "
            "`quire serve`"
        )
    source = source or _configured(config)
    config = for_divided(config, source.files)
    backend = make_backend(config.device)
    if source.files.info.pooling is not None:
        raise ConfigError(
            f"{source.files.info.directory} makes vectors: serve it as it is; such models are not built"
        )
    _check(limits, source.files.info.spec.max_position)
    plan = plan_files(config, source.files, EVERYTHING) if isinstance(backend, Builder) else None
    with _placed(output) as part:
        for rank in reversed(range(config.parallel.tensor_parallel_size)):
            shard = share_of(config.parallel, rank, source.files.info)
            with progress(f"packing {path}", source.files.info.weight_bytes // shard.size) as told:
                manifest = _write(part, source.files, shard, backend, limits, told)
        if source.beside is not None:
            copy_side_files(source.beside, part)
        if plan is not None and isinstance(plan.backend, Builder):
            plan.plan_ranks()
            plan.backend.write_artifacts(part / FOLDER, plan.memory.block_size)
    return manifest


def describe_model(config: EngineConfig) -> ModelInfo:
    """The configured model, from its headers alone. ModelError if it cannot be read."""
    return _configured(config).files.info


class BuiltEngine:
    """An engine directory. `build_temporary` removes its directory with the object; `save` keeps a copy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def manifest(self) -> Manifest:
        return engine_dir.read_manifest(self.directory)

    def save(self, output: str | Path) -> None:
        """Write the engine to a directory, as `build_engine` does."""
        build_engine(EngineConfig.from_options(model=str(self.directory)), Path(output))

    def check(self, **facts: Any) -> None:
        """Raise ConfigError if the engine's model has other sizes than those given by name, such as `vocab_size`."""
        spec = self.manifest.spec
        for name, value in facts.items():
            if value is not None and getattr(spec, name) != value:
                raise ConfigError(f"{name} is {value}, and the engine was built with {getattr(spec, name)}")


def build_temporary(
    config: EngineConfig, limits: EngineLimits = UNLIMITED, source: Source | None = None
) -> BuiltEngine:
    """`build_engine` into a temporary directory."""
    folder = tempfile.mkdtemp(prefix="quire-engine-")
    try:
        engine = BuiltEngine(Path(folder) / "engine")
        build_engine(config, engine.directory, limits, source)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    return engine


def _configured(config: EngineConfig) -> Source:
    path = model_directory(config.model)
    return Source(open_files(path, asked_of(config.model, path)), path)


def _with_limits(config: EngineConfig, output: Path, limits: EngineLimits) -> Manifest:
    """Write an engine again, or in its place, with other limits. Its weights are linked if the file system allows."""
    source = model_directory(config.model)
    first = engine_dir.read_manifest(source)
    manifests = [first, *(engine_dir.read_manifest(source, rank) for rank in range(1, first.ranks))]
    open_files(source, asked_of(config.model, source))  # refuses what an engine cannot change
    given = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
    limits = msgspec.structs.replace(first.limits, **given)
    _check(limits, first.spec.max_position)
    weights = {manifest.weights_file for manifest in manifests}
    with _placed(output) as part:
        for path in sorted(path for path in source.iterdir() if path.is_file()):
            _link(path, part / path.name) if path.name in weights else shutil.copyfile(path, part / path.name)
        if (source / FOLDER).exists():
            shutil.copytree(source / FOLDER, part / FOLDER, copy_function=_link)
        for manifest in manifests:
            engine_dir.write_manifest(part, msgspec.structs.replace(manifest, limits=limits))
    return msgspec.structs.replace(first, limits=limits)


def _link(path: Path | str, target: Path | str) -> None:
    with suppress(OSError):  # another file system, or one without links
        os.link(path, target)
        return
    shutil.copyfile(path, target)


class _placed:
    """A context with a directory to write, which takes the place of `output` once it is whole."""

    def __init__(self, output: Path) -> None:
        self._output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)

    def __enter__(self) -> Path:
        part = Path(self._folder.name) / "engine"
        part.mkdir()
        return part

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._folder as folder:
            if kind is not None:
                return
            if self._output.exists():
                os.rename(self._output, Path(folder) / "old")
            os.rename(Path(folder) / "engine", self._output)


def _check(limits: EngineLimits, max_position: int) -> None:
    longest = limits.max_seq_len or max_position
    if longest > max_position:
        raise ConfigError(
            f"--max-seq-len {longest} is more than the {max_position} positions the model was made for"
        )
    if limits.max_input_len is not None and limits.max_input_len >= longest:
        raise ConfigError(
            f"--max-input-len {limits.max_input_len} leaves no room for output in {longest} tokens"
        )


def _write(
    directory: Path, files: OwnFiles, shard: Shard, backend: Backend, limits: EngineLimits, told: Told
) -> Manifest:
    """Write a share; each matrix as soon as it is packed."""

    def write(writer: Writer) -> None:
        model = files.load(WritingPacker(backend, writer), shard, told)
        model.wait()
        writer.write(model.decoder.weights)

    outline = files.outline(backend.outline(), shard)
    return write_share(
        directory,
        write,
        min(backend.threads, MAX_PARTS),
        outline.info,
        outline.shard,
        spec=outline.spec,
        fingerprint=backend.fingerprint,
        names=outline.names if outline.family is None else outline.family(),
        limits=limits,
    )
