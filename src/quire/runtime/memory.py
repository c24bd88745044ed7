"""Decides the size of the KV cache before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import CacheConfig
from quire.errors import ResourceError
from quire.lazy import Lazy
from quire.shapes import WHOLE_BLOCK, BlockShape

if TYPE_CHECKING:
    from quire.runtime import states
    from quire.state_rows import StateRows
else:
    states = Lazy("quire.runtime.states")

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. `available` was free before loading; `max_model_len` is what the KV cache can hold."""

    available: int
    weights: int
    workspace: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    state_bytes: int = 0  # of a row of recurrent states
    rows: StateRows | None = None

    @property
    def cache_sizes(self) -> tuple[int, ...]:
        """Blocks, tokens of each, and, if there are states, rows and open rows of each."""
        rows = self.rows
        return (self.num_blocks, self.block_size, *((rows.num_rows, rows.num_open) if rows else ()))

    @property
    def kv_cache(self) -> int:
        rows = 0 if self.rows is None else self.rows.num_rows
        return self.num_blocks * self.block_bytes + rows * self.state_bytes

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.kv_cache

    @property
    def max_blocks(self) -> int:
        """Return the most blocks of a sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The model's memory, known from its config and headers: bytes, and the longest useful sequence."""

    weights: int
    workspace: int
    kv_bytes_per_token: int
    max_model_len: int
    max_model_len_is_given: bool
    max_num_seqs: int
    shape: BlockShape = WHOLE_BLOCK
    budget: int = 0  # tokens of a step
    bytes_per_state: Callable[[int], int] | None = None  # of a row of recurrent states with as many open rows
    most_draft: int = 0


def plan_memory(cache: CacheConfig, need: MemoryNeed, available: int) -> MemoryPlan:
    """Size the KV cache. Raises ResourceError if the model, or one sequence of max_model_len, cannot fit."""
    if need.bytes_per_state is not None:
        return states.plan_memory(cache, need, available)
    block_bytes = need.kv_bytes_per_token * cache.block_size
    shape, size, budget = need.shape, cache.block_size, need.budget
    longest = shape.cost(-(-need.max_model_len // size), shape.most_in_sight(size, budget))
    useful = need.max_num_seqs * -(-longest // shape.slabs)
    rest, asked, memory = room(cache, need, available)
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = memory // block_bytes
    else:
        num_blocks = min(useful, memory // block_bytes)
    check_asked(asked, num_blocks * block_bytes, rest)
    max_model_len = need.max_model_len
    fits = shape.longest(max(0, num_blocks) * shape.slabs, size, budget)
    if fits < max_model_len:
        if need.max_model_len_is_given or fits < cache.block_size:
            raise ResourceError(
                f"the KV cache holds {fits} tokens with {asked}, but one sequence may need max_model_len = "
                f"{max_model_len} ({need.kv_bytes_per_token * max_model_len} bytes): give it more memory or lower "
                "--max-model-len"
            )
        max_model_len = fits
    return MemoryPlan(
        available, need.weights, need.workspace, block_bytes, num_blocks, cache.block_size, max_model_len
    )


def room(cache: CacheConfig, need: MemoryNeed, available: int) -> tuple[int, str, int]:
    """Return the bytes that are left for the KV cache, the option that sizes it, and its bytes; 0: it gives blocks.

    ResourceError if none are left.
    """
    rest = available - need.weights - need.workspace
    if rest <= 0:
        raise ResourceError(
            f"the weights ({need.weights / GIB:.2f} GiB) and workspace ({need.workspace / GIB:.2f} GiB) do not fit in "
            f"the {available / GIB:.2f} GiB of free memory: use a smaller model, --quantization int8 or int4, or lower "
            "--max-num-batched-tokens"
        )
    if cache.num_gpu_blocks_override is not None:
        return rest, f"--num-gpu-blocks-override {cache.num_gpu_blocks_override}", 0
    if cache.kv_cache_memory_bytes is not None:
        return rest, f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}", cache.kv_cache_memory_bytes
    memory = int(available * cache.gpu_memory_utilization) - need.weights - need.workspace
    return rest, f"--gpu-memory-utilization {cache.gpu_memory_utilization}", memory


def check_asked(asked: str, memory: int, rest: int) -> None:
    """Raise ResourceError if an option asks for more bytes of KV cache than are left."""
    if memory > rest:
        raise ResourceError(
            f"{asked} asks for {memory / GIB:.2f} GiB of KV cache, but only {rest / GIB:.2f} GiB are free after "
            "weights and workspace: ask for less"
        )
