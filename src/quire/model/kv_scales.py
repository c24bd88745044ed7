"""Scales of an FP8 KV cache that a checkpoint brings, and the cache that uses them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from quire.devices.protocol import FP8_MOST, KVScales, KVSpec
from quire.errors import ModelError
from quire.lazy import Lazy
from quire.model.families.names import TensorNames
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import LayerConfig
from quire.model.shard import Shard
from quire.weights.source import Source

if TYPE_CHECKING:
    from quire.weights.readers import kv_scales as reader
else:
    reader = Lazy("quire.weights.readers.kv_scales")


def kv_scales(source: Source, spec: DecoderConfig, names: TensorNames) -> tuple[KVScales | None, ...]:
    """Read an entry for each layer, if any has scales. Raises ModelError for scales of another shape."""
    heads = [_kv_heads(layer) for layer in spec.layers]
    if source.stored is None or not any(heads) or names.sublayers > 1:
        return ()
    layers = [names.layer.format(i=i) for i in range(spec.num_layers)]
    return reader.read_kv_scales(source.stored(), layers, heads)


def scaled_spec(
    kv: KVSpec, config: DecoderConfig, scales: tuple[KVScales | None, ...], shard: Shard
) -> KVSpec:
    """Make the cache spec of a rank; in FP8, with the scales of its heads."""
    if not scales or kv.dtype not in FP8_MOST:
        return kv
    layers, division = config.stage(shard), config.division(shard)
    own = tuple(
        of_layer.of(mixer.heads(division)[1])
        if (of_layer := scales[i]) is not None
        and (mixer := config.layers[i].mixer) is not None
        and kv.layer(i - layers.start).num_kv_heads
        else None
        for i in layers
    )
    return msgspec.structs.replace(kv, scales=own + (None,) * (kv.num_layers - len(own)))


def check_kv_scales(scales: tuple[KVScales | None, ...], spec: DecoderConfig, where: str) -> None:
    """Raise ModelError unless there are none, or positive scales for each head of the layers that have any."""
    if scales and len(scales) != spec.num_layers:
        raise ModelError(f"{where}: kv_scales has {len(scales)} entries for {spec.num_layers} layers")
    for i, layer in enumerate(scales):
        for values in () if layer is None else (layer.keys, layer.values):
            sound = all(0 < value < math.inf for value in values)
            if len(values) != _kv_heads(spec.layers[i]) or not sound:
                raise ModelError(f"{where}: kv_scales of layer {i} cannot be {values!r:.200}")


def _kv_heads(layer: LayerConfig) -> int:
    return 0 if layer.mixer is None else layer.mixer.scaled_heads
