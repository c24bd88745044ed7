"""Finds a checkpoint's layers that predict further tokens. Knows names; reads no values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice

from msgspec.structs import replace

from quire.errors import ModelError
from quire.model.families.names import TensorNames
from quire.model.packing import wanted_tensors
from quire.model.parts.decoder import DecoderConfig
from quire.model.parts.layer import LayerConfig
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class FurtherLayers:
    """The layers, from number `first` on, of the decoder `config`, which has no others.

    `join` is the module that joins a token and a hidden state, each after its norm; `norm` follows the last layer.
    """

    config: DecoderConfig
    names: TensorNames
    first: int
    join: str
    token_norm: str
    hidden_norm: str
    norm: str


def find_further(spec: DecoderConfig, names: TensorNames, checkpoint: Checkpoint) -> FurtherLayers:
    """Find them where the family says, or behind the last layer. The checkpoint may lack them.

    ModelError: the model has several residual streams, which they read.
    """
    if spec.stream_width != spec.hidden_size:
        raise ModelError(
            f"the layers that predict further tokens of {spec.architecture} read several residual streams, and are "
            "not read: choose another method"
        )
    present, first, prefix = frozenset(checkpoint.names()), 0, names["further"]
    if prefix:
        start = prefix.partition("{i}")[0]
        names = names.changed({"layer": prefix, "ignored": ()})
        names = names.fitted(name for name in present if name.startswith(start))
    else:
        names = names.fitted(present)
        first, prefix = spec.num_layers, names.layer

    def named(module: str, default: str, i: int = first) -> str:
        return (names[f"further.{module}"] or f"{prefix}{default}").format(i=i)

    ends = ((i, named("norm", "shared_head.norm", i)) for i in islice(count(first), spec.num_layers))
    found = ((i, norm) for i, norm in ends if f"{norm}.weight" in present)
    last, norm = next(found, (first, named("norm", "shared_head.norm")))
    layers = tuple(_alike(spec, names, names.layer.format(i=i), present) for i in range(first, last + 1))
    modules = named("join", "eh_proj"), named("token_norm", "enorm"), named("hidden_norm", "hnorm"), norm
    return FurtherLayers(replace(spec, layers=layers), names, first, *modules)


def _alike(spec: DecoderConfig, names: TensorNames, prefix: str, present: frozenset[str]) -> LayerConfig:
    """Find the last layer of the model all of whose tensors are there below `prefix`, too, and of these the most."""
    found, most = spec.layers[-1], 0
    for layer in dict.fromkeys(reversed(spec.layers)):
        wanted = wanted_tensors(replace(spec, layers=(layer,)), names.changed({"layer": prefix}))
        own = [name in present for name in wanted if name.startswith(prefix)]
        if all(own) and len(own) > most:
            found, most = layer, len(own)
    return found
