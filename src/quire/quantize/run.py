"""Quantizes a model layer by layer and writes the checkpoint. One layer's weights are in memory at a time."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.devices.protocol import Backend, FloatArray, IntArray
from quire.errors import ModelError
from quire.files import read_json
from quire.model.load import open_for_reading
from quire.model.split_matrices import taken_apart
from quire.progress import Told
from quire.quantize.files import Output
from quire.quantize.folding import Folding
from quire.quantize.layers import LayerRunner
from quire.quantize.methods import Method
from quire.quantize.stats import SAMPLED, InputStats
from quire.quantize.watch import Input
from quire.weights.tensor import Array

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
