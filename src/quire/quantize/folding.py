"""Moves factors of a weight's inputs into their producer: a norm, an up projection, or the values of attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.devices.ops import Attend, GatedLinear, Normalize
from quire.model.families.names import TensorNames
from quire.model.parts.layer import LayerConfig
from quire.quantize.methods import Method
from quire.quantize.stats import InputStats
from quire.quantize.watch import Input, Noted
from quire.weights.checkpoint import Checkpoint
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
