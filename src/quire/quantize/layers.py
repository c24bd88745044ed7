"""Runs a model one layer at a time over calibration tokens, and shows the inputs of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.devices.protocol import Backend, IntArray, Limits, ModelInput, StateInput
from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.packing import Packer, WeightTypes
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.tensors import Tensors
from quire.quantize.watch import Input, Noted, watched
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.tensor import Array, FloatArray

Observe = Callable[[Input, FloatArray], None]


class Changed(Unquantized):
    """A `Checkpoint` in which some tensors have other values."""

    def __init__(self, inner: Checkpoint, arrays: Mapping[str, Array]) -> None:
        self._inner, self._arrays = inner, arrays
        self.names, self.shape, self.dtype, self.path = inner.names, inner.shape, inner.dtype, inner.path

    def get(self, name: str) -> Array:
        return self._arrays[name] if name in self._arrays else self._inner.get(name)


def _apart(spec: DecoderConfig, length: int) -> DecoderConfig:
    """Let layers that share a choice of keys see all keys: short samples have no more keys than are chosen.

    ModelError if samples are longer.
    """
    layers, most = list(spec.layers), 0
    for i, layer in enumerate(layers):
        mixer: Any = layer.mixer
        if mixer is not None and mixer.index is not None:
            most = mixer.index.most or 0
        if mixer is not None and mixer.shares:
            if length > most:
                raise ModelError(
                    f"layer {i} shares a choice of {most} keys: --sample-len can be at most {most}"
                )
            layers[i] = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(mixer, shares=False))
    return msgspec.structs.replace(spec, layers=tuple(layers))


@dataclass(slots=True)
class LayerRunner:
    """Runs layers. `tokens` [N, S] are samples; `hidden` [N, S, D] is the next layer's input, None for the first."""

    spec: DecoderConfig
    names: TensorNames
    checkpoint: Checkpoint
    backend: Backend
    tokens: IntArray
    hidden: FloatArray | None = None
    _noted: Noted | None = None

    @property
    def noted(self) -> Noted:
        """The weights of the layer that ran last."""
        assert self._noted is not None
        return self._noted

    def run(
        self, index: int, changed: Mapping[str, Array], observe: Observe | None = None, keep: bool = False
    ) -> list[Input]:
        """Run layer `index`, with the tensors in `changed` replaced, over all samples.

        `observe` gets each input of weights with its values [S, K], sample by sample. With `keep` the layer's output
        becomes `hidden`. Returns the inputs.
        """
        decoder, noted = self._decoder(index, changed)
        self._noted = noted
        graph, inputs = decoder.graph(range(index, index + 1), headless=True), list[Input]()
        if observe is not None:
            graph, inputs = watched(graph, noted)
        count, length = self.tokens.shape
        own = range(index, index + 1) if self.spec.layers[index].mixer is not None else None
        kept = self.spec.kv_spec("float32", stage=own)  # the whole model's beside a layer that keeps nothing
        states = int(kept.bytes_per_state(0) > 0)
        executable = self.backend.compile(
            graph, self.backend.kv_cache(kept, 1, length, states), Limits(length, 1, 1)
        )
        out = np.empty((count, length, self.spec.stream_width), np.float32) if keep else None
        for sample in range(count):
            executable.run(self._step(sample, states))
            if out is not None:
                out[sample] = np.asarray(executable.hidden())
            if observe is not None:
                taps = executable.taps()
                for found in inputs:
                    if found.tap >= 0:
                        observe(found, np.asarray(taps[found.tap]))
        if out is not None:
            if not np.isfinite(out).all():
                raise ModelError(
                    f"layer {index} gives values that are not finite: the weights or the text are broken"
                )
            self.hidden = out
        return inputs

    def _decoder(self, index: int, changed: Mapping[str, Array]) -> tuple[Decoder, Noted]:
        types = WeightTypes.of("float32", None)
        checkpoint = Changed(self.checkpoint, changed)
        others = tuple(self.names.layer.format(i=i) for i in range(self.spec.num_layers) if i != index)

        def wanted(name: str) -> bool:
            return not name.startswith(others) and name != f"{self.names['head']}.weight"

        noted = Noted(
            Tensors(self.spec, self.names),
            Packer(checkpoint, self.backend, types),
            Packer(None, self.backend.outline(), types, outline=True),
            wanted,
        )
        return Decoder(_apart(self.spec, self.tokens.shape[1]), noted), noted

    def _step(self, sample: int, states: int) -> ModelInput:
        length = self.tokens.shape[1]
        places = np.arange(length, dtype=np.int32)
        one = np.array([length], np.int32)
        zero, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        hidden = None if self.hidden is None else np.ascontiguousarray(self.hidden[sample])
        tokens = np.ascontiguousarray(self.tokens[sample])
        bounds, marks = np.array([0, length], np.int32), np.zeros((0, 3), np.int32)
        begun = StateInput(zero, zero, one, marks) if states else None
        return ModelInput(tokens, places, bounds, one, zero, table, zero[:0], hidden_TD=hidden, states=begun)
