"""The target as its drafter sees it, which runs on the engine's own rank alone."""

from __future__ import annotations

from dataclasses import replace

from quire.devices.protocol import Backend
from quire.errors import ConfigError
from quire.model.loaded import ServedModel
from quire.model.packing import Packed, Packer, WeightTypes
from quire.model.parts.embedding import Head
from quire.model.parts.source import Given
from quire.model.shard import WHOLE
from quire.model.tensors import Tensors


def drafting_target(served: ServedModel, backend: Backend, outline: bool = False) -> ServedModel:
    """Return the model for a drafter on one rank: its head is whole, so that logits need no other rank.

    ConfigError: the head cannot be read again.
    """
    if served.shard.whole or (model := served.own("speculation")).spec.head is None:
        return served
    config = model.spec
    assert config.head is not None
    tied = config.tied and not (config.head.bias or config.embedding.spare_tokens)
    if not tied and (model.names is None or (model.open is None and not outline)):
        raise ConfigError(
            f"{model.info.directory} is a built engine: serve the checkpoint to draft on several ranks"
        )
    if tied:
        head = Head(config.head, config.embedding, Given({}), WHOLE, model.decoder.table)
    else:
        types = WeightTypes.of(model.info.dtype, model.info.quantized)
        packer = Packer(None if model.open is None else model.open(), backend, types, outline)
        assert model.names is not None
        head = Head(config.head, config.embedding, Packed(Tensors(config, model.names), packer), WHOLE)
    return replace(model, decoder=model.decoder.with_head(head), shard=WHOLE)


def own_head_bytes(target: ServedModel, model: ServedModel) -> int:
    """Return the bytes of the head that a drafter's target has beside the rank's share."""
    own = None if target is model else target.own("speculation").decoder
    if own is None or own.head is None or own.head.weight is own.table:
        return 0
    return own.head.weight.nbytes
