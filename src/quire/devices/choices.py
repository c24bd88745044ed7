"""Values that a device decides unless options say otherwise. Plain numbers; knows no backend."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from quire.errors import ConfigError

LibraryChoice = Literal["auto", "none", "all"]


class Choices(msgspec.Struct, frozen=True):
    """The defaults of engine options on a device, and its constants; these are the CPU's.

    `logit_rows` are the rows of logits held at a time: 64 x 150k float32 are 38 MB. A device is assumed to read
    `read_gbs` gigabytes and to compute `gflops` billion operations per second, a CPU with each thread, until steps
    are measured. Ranks of a machine have `shared_memory`, or a device each. If it `launches`, executables and samplers
    return at once, and steps overlap (`async_scheduling`). `batch_invariant`: other rows change no bit of a row. Steps
    are padded to the next of `graphs` tokens, and captured, by a server while it is idle if it `prepares`.
    """

    max_num_batched_tokens: int = 1024
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.5
    block_size: int = 16
    logit_rows: int = 64
    read_gbs: float = 10.0
    gflops: float = 50.0
    shared_memory: bool = True
    launches: bool = False
    async_scheduling: bool = False
    batch_invariant: bool = True
    graphs: tuple[int, ...] = ()
    prepares: bool = False

    def with_threads(self, count: int) -> Choices:
        """Return the choices of a CPU that computes with `count` threads."""
        return msgspec.structs.replace(self, gflops=self.gflops * max(1, count))


CPU = Choices()
DECIDED = (
    "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "block_size", "async_scheduling",
    "batch_invariant",
)  # fmt: skip
"""DECIDED are the names of the engine options among them."""


def read_limits(given: str | None) -> tuple[float, float] | None:
    """Read --machine-limits: bytes and operations per second, None if it is not given or measured. ConfigError."""
    if given in (None, "measure"):
        return None
    try:
        gigabytes, gigaflops = map(float, given.split(","))
    except ValueError:
        gigabytes = gigaflops = 0.0
    if not (0 < gigabytes < math.inf and 0 < gigaflops < math.inf):
        raise ConfigError(
            f"--machine-limits must be measure, or GB/s and GFLOP/s such as 50,1000; got {given!r}"
        )
    return gigabytes * 1e9, gigaflops * 1e9
