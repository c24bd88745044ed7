"""Builds engine directories: load a checkpoint, pack it for this machine, and write it so that it can be mapped.

Knows the model's loader and the directory's form, but no kernel.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.devices.protocol import Backend
from quire.engine.source import model_directory, quantized_weights, reading_of
from quire.engine.start import make_backend
from quire.errors import ConfigError
from quire.model import engine_dir
from quire.model.engine_dir import MANIFEST, MAX_PARTS, WEIGHTS, Checksums, EngineLimits, Manifest, Writer
from quire.model.load import LoadedModel, load_model
from quire.weights.gguf import is_gguf
from quire.weights.source import open_tokenizer

# The files that a tokenizer, a chat template and a reader of the directory need; the weights' index is not one.
KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md")
DROPPED = ("*.index.json", MANIFEST)
TOKENIZER = "tokenizer.json"


def build_engine(config: EngineConfig, output: Path, limits: EngineLimits) -> Manifest:
    """Load the configured model and write it to `output`, completely or not at all. Replaces an engine in its place.

    Raises ConfigError if `output` holds something else or the model is an engine already.
    """
    source = model_directory(config.model)
    if engine_dir.is_engine(source):
        raise ConfigError(f"{source} is a built engine: build from the checkpoint that it was made of")
    if output.exists() and not engine_dir.is_engine(output) and any(output.iterdir()):
        raise ConfigError(
            f"{output} holds something other than an engine: choose an empty or a new directory"
        )
    backend = make_backend(config.device)
    model = load_model(
        source,
        backend,
        config.model.dtype,
        quantized_weights(config.model, source),
        reading=reading_of(config.model),
    )
    if model.info.pooling is not None:
        raise ConfigError(f"{source} makes vectors: serve it as it is; such models are not built")
    _check(limits, model.spec.max_position)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
        part = Path(folder) / "engine"
        part.mkdir()
        manifest = _write(part, model, backend, limits)
        _copy_companions(source, part)
        if output.exists():
            os.rename(output, Path(folder) / "old")
        os.rename(part, output)
    return manifest


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


def _write(directory: Path, model: LoadedModel, backend: Backend, limits: EngineLimits) -> Manifest:
    info = model.info
    with (directory / WEIGHTS).open("wb") as file:
        writer = Writer(file, backend)
        tree = writer.weights(model.weights)
    written = engine_dir.map_weights(directory, writer.size)
    manifest = Manifest(
        fingerprint=backend.fingerprint,
        spec=model.spec,
        dtype=info.dtype,
        quantized=info.quantized,
        num_parameters=info.num_parameters,
        weight_bytes=info.weight_bytes,
        eos_token_ids=info.eos_token_ids,
        generation=info.generation,
        limits=limits,
        weights=tree,
        tensors=tuple(writer.tensors),
        size=writer.size,
        checksums=Checksums(written, min(backend.threads, MAX_PARTS)).result(),
        names=model.names,
    )
    engine_dir.write_manifest(directory, manifest)
    return manifest


def _copy_companions(source: Path, target: Path) -> None:
    """Copy the files beside the weights; for a GGUF file, write the files that it stands in for."""
    if is_gguf(source):
        open_tokenizer(source).save(target)
        (target / TOKENIZER).write_bytes(_compact_tokenizer((target / TOKENIZER).read_bytes()))
        return
    dropped = {path for pattern in DROPPED for path in source.glob(pattern)}
    for path in sorted({path for pattern in KEPT for path in source.glob(pattern)} - dropped):
        if path.name == TOKENIZER:
            (target / TOKENIZER).write_bytes(_compact_tokenizer(path.read_bytes()))
        elif path.is_file():
            shutil.copyfile(path, target / path.name)


def _compact_tokenizer(content: bytes) -> bytes:
    """The same tokenizer.json without spaces and with merges as "a b", the form that loads fastest.

    Reading a large vocabulary takes most of an engine's start. If the parts of any merge contain a space, merges keep
    their form.
    """
    tokenizer = msgspec.json.decode(content)
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if isinstance(merges, list) and all(_is_plain_pair(merge) for merge in merges):
        model["merges"] = [" ".join(merge) for merge in merges]
    return msgspec.json.encode(tokenizer)


def _is_plain_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and not any(" " in part for part in merge)
