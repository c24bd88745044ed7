"""Finds the pieces of a decoder among a checkpoint's tensors. Knows configs and names; reads no file.

A family keeps a piece in a module of its own, or fused with others, stacked with other experts' pieces, transposed, or
with its rows in another order.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire.lazy import Lazy
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.embedding import EmbeddingConfig
from quire.model.parts.layer import LayerConfig
from quire.model.parts.part import Mixer, kind_of
from quire.model.parts.rope import RopeSpec
from quire.model.parts.scores import sinusoids
from quire.model.parts.source import Piece
from quire.model.tensors.stored import Shape, fused, linear, norm
from quire.weights.parts import Part, part, row_range
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import gemma3n, streams
else:
    gemma3n = Lazy("quire.model.tensors.gemma3n")
    streams = Lazy("quire.model.tensors.streams")

M = TypeVar("M", bound=Mixer)
# FINDERS find the pieces of a kind of attention, or below a path of a layer: modules, or functions of one.
FINDERS = {
    "attention": "attention",
    "latent": "latent",
    "shared_block": "attention",
    "low": "shared_block",
    "join": "shared_block",
    "convolution": "recurrent.find_convolution",
    "delta": "delta",
    "state_space": "recurrent.find_state_space",
    "selective": "recurrent.find_selective",
    "lightning": "recurrent.find_lightning",
    "gated_recurrence": "recurrent.find_gated_recurrence",
    "mixture": "mixture",
    "compressed": "compressed",
    "indexer": "indexer",
    "input": "gemma3n",
    "laurel": "gemma3n",
    "altup": "gemma3n",
    "attention_streams": "streams",
    "mlp_streams": "streams",
    "ngrams": "ngrams",
}
ADDED = ("input", "laurel", "altup", "attention_streams", "mlp_streams")
# Matrices of a layer that are as a family stores others, those that are never transposed, and vectors.
MATRICES = (
    "mlp.down",
    "input.gate",
    "input.out",
    "mixture.latent_down",
    "mixture.latent_up",
    "lightning.gate",
)
PLAIN = ("attention.q_down", "mixture.router", "mixture.shared_gate")
VECTORS = ("attention.sinks", "scale", "mixture.router_scale", "mixture.expert_scales")
# Norms that are found in a way of their own.
OTHER_NORMS = ("attention.q_norm", "attention.k_norm", "input.norm", "delta.norm")


@cache
def _finder(group: str) -> Any:
    module, _, name = FINDERS[group].partition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name or "find")


def filled(piece: Piece) -> Part:
    """A piece of one value everywhere, which no tensor holds."""
    return Part((), partial(np.full, piece.shape, piece.fill, np.float32), piece.shape).cut(
        piece.rows, piece.columns
    )


class Tensors:
    """The tensors of a model by the paths of its pieces."""

    def __init__(self, config: DecoderConfig, names: TensorNames) -> None:
        self.config, self.names = config, names
        self._layers: dict[int, LayerTensors] = {}
        ropes = (layer.mixer.rope for layer in config.layers if layer.mixer is not None)
        self._rope = next((rope for rope in ropes if rope is not None), None)

    def part(self, piece: Piece) -> Part:
        """Find the part of a piece: which tensors it reads, and which rows it takes."""
        if piece.fill is not None:
            return filled(piece)
        if piece.path.startswith("layers."):
            _, index, path = piece.path.split(".", 2)
            found = self.layer(int(index)).part(path, piece.shape)
        else:
            found = self._part(piece.path, piece.shape)
        return found.cut(piece.rows, piece.columns)

    def layer(self, index: int) -> LayerTensors:
        """Find the tensors of a layer; one after the last, which predicts further tokens, is like the last."""
        if index not in self._layers:
            config, names = self.config, self.names
            layer = config.layers[min(index, config.num_layers - 1)]
            own = names.of_sublayer(index % names.sublayers)
            if layer.mixer is not None:
                own = own.changed(own.by_mixer.get(kind_of(layer.mixer), {}))
            prefix = own.layer.format(i=index // names.sublayers)
            about = index, config.num_layers, self._rope
            self._layers[index] = LayerTensors(layer, own, prefix, *about)
        return self._layers[index]

    def _part(self, path: str, shape: Shape) -> Part:
        names, (module, _, kind) = self.names, path.rpartition(".")
        base, _, number = module.partition(".")
        if base == "embedding" or (path == "head.weight" and self.config.tied):
            return self._embedding(self.config.embedding)
        if base == "positions":
            return self._positions(shape)
        if base in ("norm", "embedding_norm"):
            return norm(names, names[base], kind, shape)
        if base in ("spread", "merge", "layer_inputs"):
            return gemma3n.find_model(self, base, number, shape)
        if base == "streams":
            return streams.find_model(self, number, kind, shape)
        return part(f"{names[base]}.{kind}", shape)

    def _embedding(self, config: EmbeddingConfig) -> Part:
        """Find the table of tokens; with segments, sums of tokens and segments, segment after segment."""
        names, width, segments = self.names, config.width, config.segments
        if not segments:
            return part(f"{names['embedding']}.weight", (config.stored_tokens, width))

        def summed(words: Array, rows: Array) -> Array:
            table = words.astype(np.float32)
            return np.concatenate([table + row for row in rows[:segments].astype(np.float32)])

        words = (f"{names['embedding']}.weight", (config.vocab_size // segments, width))
        rows = (f"{names['segments']}.weight", (config.segment_rows, width))
        return Part((words, rows), summed, (config.vocab_size, width))

    def _positions(self, shape: Shape) -> Part:
        positions = self.config.embedding.positions
        assert positions is not None
        if positions.sinusoid is None:
            return part(f"{self.names['positions']}.weight", shape)
        steps = shape[1] // 2 - (positions.sinusoid == "half_less_one")
        return Part((), partial(sinusoids, shape[0], shape[1], steps), shape)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of layer `index` of `count`, whose names begin with `prefix`. `rope` rotates the first layers."""

    config: LayerConfig
    names: TensorNames
    prefix: str
    index: int
    count: int
    rope: RopeSpec | None

    def part(self, path: str, shape: Shape) -> Part:
        """Find a piece by its path below the layer."""
        names, (module, _, kind) = self.names, path.rpartition(".")
        if path.startswith("mixture.experts."):  # there are tens of thousands
            expert: Part = _finder("mixture")(self, module[8:], kind, shape)
            return expert
        stored = self.prefix + names[path if path in VECTORS else module]
        if path in VECTORS:
            return part(stored, shape)
        if module.endswith("norm") and module in names.modules and module not in OTHER_NORMS:
            return norm(names, stored, kind, shape)
        if module in MATRICES:
            return fused(names, stored, kind, shape, None)
        if module in PLAIN:
            return part(f"{stored}.{kind}", shape)
        group, _, name = module.partition(".")
        if group == "mlp":
            return self._mlp(name, kind, shape)
        if module == "attention.out" and kind == "bias":
            return part(
                self.prefix + (names["attention.out.bias"] or f"{names['attention.out']}.bias"), shape
            )
        if name.startswith("indexer"):
            group, _, name = name.partition(".")
        elif group == "attention" and self.config.mixer is not None:  # of either kind
            group = kind_of(self.config.mixer)
        found: Part = _finder(group)(self, module if group in ADDED else name, kind, shape)
        return found

    def mixer(self, kind: type[M]) -> M:
        """The layer's mixer of this kind."""
        made = [one for one in (self.config.mixer, self.config.second) if one is not None]
        for found in (*made, *(inner for one in made for inner in one.made_of)):
            if isinstance(found, kind):
                return found
        raise AssertionError(f"the layer has no {kind.__name__}")

    def _mlp(self, name: str, kind: str, shape: Shape) -> Part:
        names = self.names
        if name == "xielu":
            scalar = kind in ("beta", "eps")
            stored = f"{self.prefix}{names['mlp.xielu']}.{kind}"
            return part(stored, () if scalar else shape, np.atleast_1d if scalar else None)
        if not names["mlp.gate_up"]:
            module = self.prefix + names[f"mlp.{name}"]
            return linear(names, module, shape) if kind == "weight" else part(f"{module}.{kind}", shape)
        inner, take = shape[0], row_range(0, shape[0])
        if name == "up":
            take = row_range(inner, 2 * inner)
        return fused(names, self.prefix + names["mlp.gate_up"], kind, (2 * inner, *shape[1:]), take)
