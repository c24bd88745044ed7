"""Quantizes a model layer by layer and writes the checkpoint. One layer's weights are in memory at a time."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.devices.ops import Attend, GatedLinear, Normalize
from quire.devices.protocol import Backend, IntArray
from quire.errors import ConfigError, ModelError
from quire.files import read_json, replaced
from quire.model.families.names import TensorNames
from quire.model.load import open_for_reading
from quire.model.parts.layer import LayerConfig
from quire.model.split_matrices import taken_apart
from quire.progress import Told
from quire.quantize.layers import LayerRunner
from quire.quantize.methods import Method
from quire.quantize.stats import SAMPLED, InputStats
from quire.quantize.watch import Input, Noted
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.safetensors import write_safetensors
from quire.weights.tensor import Array, FloatArray


@dataclass(slots=True)
class Folding:
    """The tensors of one layer while factors are moved; `changed` has the modified ones, in float32."""

    layer: LayerConfig
    names: TensorNames
    checkpoint: Checkpoint
    prefix: str
    changed: dict[str, Array] = field(default_factory=dict)

    def read(self, name: str) -> FloatArray:
        array = self.changed[name] if name in self.changed else self.checkpoint.get(name)
        return np.asarray(array, np.float32)

    def unfit(self, name: str, method: Method) -> str:
        """Say why the method's format cannot hold a matrix; empty if it can."""
        rows, columns = self.checkpoint.shape(name)
        return method.unfit(rows, columns)

    def fold(self, inputs: list[Input], stats: dict[int, InputStats], noted: Noted, method: Method) -> None:
        """Fold each input that allows it; `stats`, by place among the inputs, then describe the divided inputs."""
        for place, found in enumerate(inputs):
            if not found.tensors or place not in stats:
                continue
            producer = self._producer(found, noted)
            fit = [name for name in found.tensors if not self.unfit(name, method)]
            if producer is None or not fit:
                continue
            factors = method.factors([self.read(name) for name in fit], stats[place])
            if (factors == 1).all():
                continue
            self._divide(producer, factors)
            for name in [*found.tensors, *found.others]:
                self.changed[name] = self.read(name) * factors
            stats[place] = stats[place].scaled(factors)

    def _producer(self, found: Input, noted: Noted) -> tuple[str, str] | None:
        """Find what makes an input, if nothing else reads it: ("norm" or "rows", module)."""
        if found.shared:
            return None
        made = found.made
        kind = made.path.rpartition(".")[2] if isinstance(made, Normalize) else ""
        if kind in ("attention_norm", "mlp_norm"):
            return ("norm", f"{self.prefix}{self.names[kind]}") if self.layer.norm.weight else None
        if isinstance(made, GatedLinear) and made.activation != "clamped_swiglu" and not made.limit:
            tensors = noted.tensors(made.path)
            return ("rows", tensors[1].removesuffix(".weight")) if tensors and len(tensors) == 2 else None
        mixer, plain = self.layer.mixer, isinstance(made, Attend) and len(found.tensors) == 1
        if plain and not self.names["attention.qkv"] and mixer is not None and mixer.heads_apart:
            return "rows", f"{self.prefix}{self.names['attention.v']}"
        return None

    def _divide(self, producer: tuple[str, str], factors: FloatArray) -> None:
        kind, module = producer
        present = set(self.checkpoint.names())
        weight, bias = f"{module}.weight", f"{module}.bias"
        if kind == "norm":
            offset = np.float32(self.names.norm_offset)
            self.changed[weight] = (self.read(weight) + offset) / factors - offset
        else:
            self.changed[weight] = self.read(weight) / factors[:, None]
        if bias in present:
            self.changed[bias] = self.read(bias) / factors


STATE, HIDDEN, INDEX = "quantize-state.json", "quantize-hidden.npy", "model.safetensors.index.json"
# Files of a model that are not its weights and not its config.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "README*")
NOT_COPIED = ("config.json", INDEX, "pytorch_model.bin.index.json")


@dataclass(slots=True)
class Output:
    """The output of a run. `settings` are all that the result depends on: a run resumes only with equal settings.

    `done` shards are written; `kept` are the modules in them that stay float.
    """

    directory: Path
    settings: Mapping[str, Any]
    shards: int
    done: int = 0
    kept: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path, settings: Mapping[str, Any], shards: int) -> Output:
        """Open a directory. ConfigError if it holds anything but an unfinished run with these settings."""
        output = cls(directory, settings, shards)
        state = directory / STATE
        if state.exists():
            found = read_json(state)
            if found.get("settings") != json.loads(json.dumps(settings)):
                raise ConfigError(
                    f"{directory} holds an unfinished run with other options: remove it, or give the same ones"
                )
            output.done, output.kept = int(found["done"]), list(found["kept"])
        elif directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: choose an empty or a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        return output

    def hidden(self) -> FloatArray | None:
        """Read the input of the next layer, if the run was interrupted after a layer."""
        path = self.directory / HIDDEN
        if not self.done or not path.exists():
            return None
        values: FloatArray = np.load(path, allow_pickle=False)
        return values

    def write(self, tensors: Mapping[str, Array], hidden: FloatArray | None) -> None:
        """Write the next shard, and the hidden states that the one after it needs."""
        write_safetensors(self.directory / self._shard(self.done), tensors)
        if hidden is not None:
            with replaced(self.directory / HIDDEN) as path, path.open("wb") as file:
                np.save(file, hidden, allow_pickle=False)
        self.done += 1
        with replaced(self.directory / STATE) as path:
            path.write_text(json.dumps({"settings": self.settings, "done": self.done, "kept": self.kept}))

    def finish(self, source: Path, config: Mapping[str, Any], beside: tuple[str, Any] | None) -> None:
        """Write the index and the config, copy what belongs to the model, and forget the state."""
        owners: dict[str, str] = {}
        total = 0
        for index in range(self.shards):
            header, size = _header(self.directory / self._shard(index))
            owners |= dict.fromkeys(header, self._shard(index))
            total += size
        index_file = {"metadata": {"total_size": total}, "weight_map": owners}
        (self.directory / INDEX).write_text(json.dumps(index_file, indent=1))
        for pattern in COPIED:
            for path in source.glob(pattern):
                if path.name not in NOT_COPIED and path.is_file():
                    shutil.copyfile(path, self.directory / path.name)
        if beside is not None:
            (self.directory / beside[0]).write_text(json.dumps(beside[1], indent=1))
        (self.directory / "config.json").write_text(json.dumps(config, indent=2))
        for name in (STATE, HIDDEN):
            (self.directory / name).unlink(missing_ok=True)

    def _shard(self, index: int) -> str:
        return f"model-{index + 1:05d}-of-{self.shards:05d}.safetensors"


def _header(path: Path) -> tuple[list[str], int]:
    """List the tensors of a file that was written here, and their size in bytes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return [name for name in header if name != "__metadata__"], path.stat().st_size - 8 - size


log = logging.getLogger("quire")

Importance = Callable[[str], FloatArray]


@dataclass(slots=True)
class Quantizer:
    """Quantizes with calibration `tokens` [N, S]; `importance`, if measured, gives the importance of each element."""

    source: Path
    method: Method
    backend: Backend
    tokens: IntArray
    importance: Importance | None = None
    _of_weights: Importance | None = field(default=None, init=False)
    _told: set[str] = field(default_factory=set, init=False)  # why matrices stay float

    @property
    def num_layers(self) -> int:
        return open_for_reading(self.source)[0].num_layers

    def run(self, directory: Path, settings: dict[str, Any], told: Told) -> list[str]:
        """Write the checkpoint; returns the modules of layers that stay float. `told` is called after each layer.

        ModelError if the model cannot be quantized, ConfigError if the directory holds something else.
        """
        spec, opened, names = open_for_reading(self.source)
        checkpoint, names = taken_apart(spec, names, opened)
        if self.importance is not None:
            self._of_weights = partial(checkpoint.piece, read=self.importance)
        count = spec.num_layers
        output = Output.open(directory, settings, count + 1)
        if output.done:
            log.warning("%s: an interrupted run goes on after layer %d of %d", directory, output.done, count)
        runner = LayerRunner(spec, names, checkpoint, self.backend, self.tokens, output.hidden())
        prefixes = [names.layer.format(i=i) for i in range(count)]
        own = [[n for n in checkpoint.names() if n.startswith(prefix)] for prefix in prefixes]
        for index in range(count):
            if index >= output.done:
                output.write(self._layer(runner, index, own[index], output.kept), runner.hidden)
            told(1)
        if output.done == count:
            of_layers = set(itertools.chain(*own))
            rest = {name: checkpoint.get(name) for name in checkpoint.names() if name not in of_layers}
            output.write(rest, None)
        section = self.method.section(output.kept)
        config = {**read_json(self.source / "config.json"), "quantization_config": section}
        output.finish(self.source, config, self.method.beside(section))
        return output.kept

    def _layer(self, runner: LayerRunner, index: int, own: list[str], kept: list[str]) -> dict[str, Array]:
        """Quantize a layer to tensors as they are written; the runner goes on to the next."""
        prefix = runner.names.layer.format(i=index)
        folding = Folding(runner.spec.layers[index], runner.names, runner.checkpoint, prefix)
        if runner.hidden is None and index and not self.method.calibrated:
            runner.hidden = np.zeros((*self.tokens.shape, runner.spec.stream_width), np.float32)
        inputs, stats = self._observe(runner, index, folding, self.method.outer and self.method.folds)
        unfit = self._unfit(inputs, folding)
        if self.method.folds:
            folding.fold(inputs, stats, runner.noted, self.method)
        floats, quantized = dict(folding.changed), set[str]()
        encoded: dict[str, Array] = {}
        for places in _stages(inputs):
            if self.method.sequential:
                _, stats = self._observe(runner, index, folding, self.method.outer, places)
            for place in places:
                names = [name for name in inputs[place].tensors if name not in unfit]
                encoded |= self._encode(names, stats.get(place), folding)
                quantized.update(names)
        if self.method.calibrated:
            runner.run(index, folding.changed, keep=True)
        for name in own:
            if name in quantized:
                continue
            array = floats[name] if name in floats else runner.checkpoint.get(name)
            encoded[name] = np.asarray(array).astype(runner.checkpoint.dtype(name), copy=False)
            if array.ndim == 2 and name.endswith(".weight"):
                kept.append(name.removesuffix(".weight"))
        return encoded

    def _observe(
        self,
        runner: LayerRunner,
        index: int,
        folding: Folding,
        outer: bool,
        places: Sequence[int] | None = None,
    ) -> tuple[list[Input], dict[int, InputStats]]:
        """Collect the inputs of a layer by place, and statistics of the inputs at `places`, or of all."""
        stats: dict[int, InputStats] = {}
        keep = max(1, SAMPLED // len(self.tokens))

        def observe(found: Input, x: FloatArray) -> None:
            if places is not None and found.tap not in places:
                return
            if found.tap not in stats:
                stats[found.tap] = InputStats.of(x.shape[1], outer)
            stats[found.tap].add(x, keep)

        inputs = runner.run(index, folding.changed, observe)
        tapped = sorted((found for found in inputs if found.tap >= 0), key=lambda found: found.tap)
        return tapped, stats

    def _unfit(self, inputs: Sequence[Input], folding: Folding) -> set[str]:
        """Find the matrices that the format cannot hold and that stay float, with a warning for each reason.

        ModelError if it can hold none.
        """
        names = [name for found in inputs for name in found.tensors]
        reasons = {name: reason for name in names if (reason := folding.unfit(name, self.method))}
        if names and len(reasons) == len(set(names)):
            name, reason = next(iter(reasons.items()))
            raise ModelError(
                f"{self.source}: tensor {name} cannot be quantized to {self.method.name}: {reason}"
            )
        for name, reason in reasons.items():
            if reason not in self._told:
                self._told.add(reason)
                log.warning("tensor %s, and others like it, stay float: %s", name, reason)
        return set(reasons)

    def _encode(self, names: Sequence[str], stats: InputStats | None, folding: Folding) -> dict[str, Array]:
        """Encode the weights of one input; their rounded values replace the original ones."""
        weights = {name: folding.read(name) for name in names}
        most = max((float(np.abs(weight).max()) for weight in weights.values()), default=0.0)
        encoded: dict[str, Array] = {}
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            if not np.isfinite(weight).all():
                raise ModelError(f"{self.source}: tensor {name} holds values that are not finite")
            importance = None if self._of_weights is None else self._of_weights(name)
            tensors, values = self.method.encode(weight, stats, importance, most)
            encoded |= {f"{module}.{suffix}": array for suffix, array in tensors.items()}
            folding.changed[name] = values
        return encoded


def _stages(inputs: Sequence[Input]) -> list[list[int]]:
    """Group places of inputs to observe together: neighbours that the same kind of operation makes."""
    grouped = itertools.groupby(range(len(inputs)), key=lambda place: type(inputs[place].made))
    return [list(places) for _, places in grouped]
