"""The largest sizes that are read, so that a description which nobody trusts stays small until tensors confirm it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.errors import ModelError

MAX_POSITION = (1 << 31) - 1
MAX_LAYERS = 1024
MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 17  # of all layers
MAX_HEAD_DIM = 1 << 14
MAX_HEADS_DIM = 1 << 22  # of all heads
MAX_EXPERTS_DIM = 1 << 24  # of all experts of a layer
MAX_WIDTHS = 1 << 25  # of all layers
MAX_TABLE = 1 << 22  # rows of a table of positions
MAX_LATENT = 1 << 16
MAX_STATES = 1 << 29  # elements of recurrent states of all layers
MAX_STREAMS = 16
MAX_REACH = 1 << 15  # tokens, of scores by distance
MAX_NUMBER = 1e30  # float32 holds its square root's reciprocal, and products with what a model computes
# The smallest and the largest value of sizes, by field.
SIZES = {
    "vocab_size": (1, 1 << 23),
    "hidden_size": (1, 1 << 20),
    "width": (1, 1 << 20),
    "num_heads": (1, MAX_HEADS),
    "num_kv_heads": (1, MAX_HEADS),
    "head_dim": (1, MAX_HEAD_DIM),
    "value_dim": (1, MAX_LATENT),
    "q_rank": (1, MAX_LATENT),
    "kv_rank": (1, MAX_LATENT),
    "nope_dim": (1, MAX_LATENT),
    "rope_dim": (0, MAX_LATENT),
    "taps": (2, 64),
    "rank": (0, MAX_LATENT),
    "key_heads": (1, MAX_HEADS),
    "value_heads": (1, MAX_HEADS),
    "key_dim": (1, MAX_LATENT),
    "groups": (1, MAX_HEADS),
    "state_dim": (1, MAX_LATENT),
    "inner": (1, MAX_HEADS_DIM),
    "latent_size": (0, 1 << 20),
    "intermediate_size": (1, 1 << 20),
    "shared_intermediate_size": (0, 1 << 20),
    "num_experts": (1, 1 << 17),
    "zero_experts": (0, 1 << 17),
    "hashed": (0, 1 << 23),
    "max_position": (1, MAX_POSITION),
    "positions": (1, MAX_POSITION),
    "rows": (1, MAX_POSITION),
    "offset": (0, MAX_TABLE),
    "window": (1, MAX_POSITION),
    "chunk": (1, MAX_POSITION),
    "ahead": (0, MAX_POSITION),
    "position_buckets": (4, 256),
    "span": (2, MAX_REACH),
    "reach": (2, MAX_REACH),
    "laurel": (1, MAX_LATENT),
    "size": (1, MAX_LATENT),
    "streams": (1, MAX_STREAMS),
    "iterations": (0, 1000),
    "longest": (2, 16),
    "end": (0, (1 << 23) - 1),
    "active": (0, MAX_STREAMS - 1),
    "back": (0, MAX_LAYERS),
    "segments": (0, 1 << 10),
    "segment_rows": (0, 1 << 20),
    "spare_tokens": (0, 1 << 23),
}


def check_bounds(config: msgspec.Struct, where: str) -> None:
    """Raise ModelError, naming the field, for a size out of its bounds or a number that is none."""
    for path, value in _values(config):
        name = path.rpartition(".")[2]
        if isinstance(value, float):
            if not math.isfinite(value) or abs(value) > MAX_NUMBER:
                raise ModelError(f"{where}: {name} must be a number of at most {MAX_NUMBER}, got {value}")
        elif name in SIZES and not SIZES[name][0] <= value <= SIZES[name][1]:
            low, high = SIZES[name]
            raise ModelError(f"{where}: {name} must be from {low} to {high}, got {value}")


def _values(config: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers of a config and of the configs inside it."""
    if isinstance(config, (int, float)) and not isinstance(config, bool):
        yield path, config
    elif isinstance(config, msgspec.Struct):
        for field in config.__struct_fields__:
            yield from _values(getattr(config, field), f"{path}.{field}")
    elif isinstance(config, tuple):
        for value in config:
            yield from _values(value, path)
