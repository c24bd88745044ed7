"""Finds the pieces of tables of hashed n-grams, which are shards of one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.errors import ModelError
from quire.model.parts.ngrams import LIMB_BITS, LIMBS, NgramsConfig
from quire.model.tensors.recurrent import taps
from quire.model.tensors.stored import Shape, norm
from quire.weights.parts import Part, part
from quire.weights.tensor import Array

if TYPE_CHECKING:
    from quire.model.tensors import LayerTensors


def find(layer: LayerTensors, name: str, kind: str, shape: Shape) -> Part:
    """Find a piece by its path below the tables."""
    config, names = layer.config.additions, layer.names
    assert isinstance(config, NgramsConfig)
    name, _, number = name.partition(".")
    if kind == "multipliers":
        return _multipliers(config, layer.prefix + names["ngrams.multipliers"])
    if name == "table":
        return _table(layer, config, int(number))
    stored = layer.prefix + names[f"ngrams.{name}"]
    if name == "taps":
        return taps(names, stored, kind, shape[0] // config.taps, config.taps)
    return norm(names, stored, kind, shape) if name.endswith("norm") else part(f"{stored}.{kind}", shape)


def _table(layer: LayerTensors, config: NgramsConfig, number: int) -> Part:
    """Find the rows of a table: the shards that hold them, and the padding with the last one."""
    count, multiple = layer.names.ngram_shards
    padded, last = -(-sum(config.rows) // multiple) * multiple, number == len(config.rows) - 1
    each, start = -(-padded // count), sum(config.rows[:number])
    stop = start + config.rows[number]
    shards = range(start // each, -(-(padded if last else stop) // each))
    stored = f"{layer.prefix}{layer.names['ngrams.table']}.shard_"
    sizes = [(f"{stored}{i}.weight", (min(each, padded - i * each), config.width)) for i in shards]
    first = shards.start * each

    def take(*arrays: Array) -> Array:
        return np.concatenate(arrays)[start - first : stop - first]

    return Part(tuple(sizes), take, (stop - start, config.width))


def _multipliers(config: NgramsConfig, stored: str) -> Part:
    """Find the multipliers, each as floats that hold some of its bits. ModelError: a product could overflow."""
    shifts, mask = np.arange(LIMBS, dtype=np.int64) * LIMB_BITS, (1 << LIMB_BITS) - 1

    def take(array: Array) -> Array:
        most = ((1 << 63) - 1) // config.vocab_size
        if array.dtype.kind == "i" and not ((array >= 0) & (array <= most)).all():
            raise ModelError(f"{stored} must hold integers from 0 to {most}; the file is damaged")
        limbs = array.astype(np.int64)[:, None] >> shifts & mask
        return limbs.reshape(-1).astype(np.float32)

    return Part(((stored, (config.longest,)),), take, (LIMBS * config.longest,))
