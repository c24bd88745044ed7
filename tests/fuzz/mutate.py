"""Seeded mutations of bytes and of JSON values."""

from __future__ import annotations

import copy
import random
from typing import Any

from quire.weights.checkpoint import Checkpoint

# Values at the edges of types and of plausibility.
HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 65537, (1 << 28) + 4, (1 << 31) - 1, 1 << 31, 1 << 63, 10**30, -(1 << 40),
    0.0, -0.0, 0.5, 1.5, -1.0, 1e308, -1e308, 1e-308, float("inf"), float("nan"), "", "x", "silu", "\ud800\0",
    "float32", "../x", "a" * 5000, [], [0], [[0]], [None], [1, "x"], {}, {"a": 1}, {"factor": 1e308}, [[]] * 300,
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """`data` with up to `most` changes: bits, bytes, numbers of 8 bytes, cuts, copies."""
    out = bytearray(data)
    for _ in range(rng.randint(1, most)):
        if not out:
            return bytes(out)
        at = int(len(out) * rng.random() ** 2)  # headers come first
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind == 2:
            number = rng.choice((0, 1, 255, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 50, (1 << 64) - 1))
            out[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 3:
            del out[at : at + rng.choice((1, 8, 64, len(out)))]
        elif kind == 4:
            out[at:at] = out[at : at + rng.choice((1, 8, 64, 512))] * rng.choice((1, 1, 2, 50))
        elif kind == 5:
            out[at:at] = rng.randbytes(rng.choice((1, 4, 16)))
        else:
            other = int(len(out) * rng.random())
            out[at : at + 4] = out[other : other + 4]
    return bytes(out)


def mutate_json(rng: random.Random, value: Any, most: int = 3) -> Any:
    """A copy of `value` with up to `most` values inside replaced, removed, doubled or moved."""
    out = copy.deepcopy(value)
    for _ in range(rng.randint(1, most)):
        places = list(_places(out))
        if not places:
            return out
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == 2:
            other, name = rng.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                holder[key] = copy.deepcopy(other[name])
        elif kind == 3 and type(holder[key]) in (int, float):
            holder[key] = rng.choice((holder[key] + 1, holder[key] - 1, holder[key] * 2, -holder[key]))
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return out


def _places(value: Any) -> Any:
    """All (dictionary, key) and (list, index) inside, breadth first and of each list the first few only."""
    waiting = [value]
    for holder in waiting:
        keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 40))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def read_all(checkpoint: Checkpoint) -> None:
    for name in checkpoint.names():
        assert checkpoint.get(name).shape == checkpoint.shape(name)
