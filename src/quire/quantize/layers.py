"""Runs a model one layer at a time over calibration tokens, and shows the inputs of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.devices.protocol import Backend, FloatArray, IntArray, Limits, ModelInput
from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.packing import Packer, WeightTypes
from quire.model.parts.decoder import Decoder, DecoderConfig
from quire.model.tensors import Tensors
from quire.quantize.watch import Input, Noted, watched
from quire.weights.checkpoint import Checkpoint
from quire.weights.checkpoint.protocol import Unquantized
from quire.weights.tensor import Array

Observe = Callable[[Input, FloatArray], None]


class Changed(Unquantized):
    """A `Checkpoint` in which some tensors have other values."""

    def __init__(self, inner: Checkpoint, arrays: Mapping[str, Array]) -> None:
        self._inner, self._arrays = inner, arrays
        self.names, self.shape, self.dtype, self.path = inner.names, inner.shape, inner.dtype, inner.path

    def get(self, name: str) -> Array:
        return self._arrays[name] if name in self._arrays else self._inner.get(name)


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
        self,
        index: int,
        changed: Mapping[str, Array],
        observe: Observe | None = None,
        keep: bool = False,
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
        spec = self.spec.kv_spec("float32")
        layers = None if spec.layers is None else (spec.layers[index],)
        spec = msgspec.structs.replace(spec, num_layers=1, layers=layers)
        executable = self.backend.compile(
            graph,
            self.backend.kv_cache(spec, 1, length),
            Limits(length, 1, 1),
        )
        out = np.empty((count, length, self.spec.stream_width), np.float32) if keep else None
        for sample in range(count):
            executable.run(self._step(sample))
            if out is not None:
                out[sample] = executable.hidden()
            if observe is not None:
                taps = executable.taps()
                for found in inputs:
                    if found.tap >= 0:
                        observe(found, taps[found.tap])
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
        return Decoder(self.spec, noted), noted

    def _step(self, sample: int) -> ModelInput:
        length = self.tokens.shape[1]
        places = np.arange(length, dtype=np.int32)
        one = np.array([length], np.int32)
        zero, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
        hidden = None if self.hidden is None else np.ascontiguousarray(self.hidden[sample])
        tokens = np.ascontiguousarray(self.tokens[sample])
        return ModelInput(
            tokens, places, np.array([0, length], np.int32), one, zero, table, zero[:0], hidden_TD=hidden
        )
