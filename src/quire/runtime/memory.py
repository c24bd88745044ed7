"""Decides the size of the KV cache before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import CacheConfig
from quire.errors import ResourceError
from quire.shapes import WHOLE_BLOCK, BlockShape, StateRows

GIB = 1 << 30
USUAL_LENGTH = 2048
"""Rows of recurrent states are made for as many sequences as fit at USUAL_LENGTH tokens each."""
SMALL = 4
"""A snapshot is taken in each block if it takes no more than SMALL blocks."""
GRID = 64
PREDICTED = 3  # tokens of a request's own prediction that a step verifies if nothing else drafts
MOST_DRAFT = 15
MOST_FREE_BLOCKS = 1 << 18  # of a model whose blocks take no memory


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
    num_running: int = 0  # rows for sequences
    num_snapshots: int = 0  # and others
    num_open: int = 0
    in_each_block: bool = False  # snapshots are taken

    @property
    def num_states(self) -> int:
        return self.num_running + self.num_snapshots

    @property
    def rows(self) -> StateRows | None:
        """The rows of states; None if the model has none."""
        if not self.num_states:
            return None
        return StateRows(self.num_states, self.num_running, self.num_open, self.in_each_block)

    @property
    def kv_cache(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_states * self.state_bytes

    def sequences(self, length: int) -> int:
        """Count the sequences of `length` tokens that fit at once, beside the snapshots."""
        if not self.num_states:
            return self.num_tokens // length
        memory = self.kv_cache - self.num_snapshots * self.state_bytes
        each = self.state_bytes + length * self.block_bytes // self.block_size
        return memory // each if each else self.num_running

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.kv_cache

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
    state_bytes: int = 0  # of a row of recurrent states with `num_open` open rows
    num_open: int = 0


def open_rows(most_draft: int) -> int:
    """Count the open rows for drafts of at most `most_draft` tokens, of which at most MOST_DRAFT are verified."""
    return 1 + min(max(most_draft, PREDICTED), MOST_DRAFT)


def plan_memory(cache: CacheConfig, need: MemoryNeed, available: int) -> MemoryPlan:
    """Size the KV cache. Raises ResourceError if the model, or one sequence of max_model_len, cannot fit."""
    if need.state_bytes:
        return _with_states(cache, need, available)
    block_bytes = need.kv_bytes_per_token * cache.block_size
    shape, size, budget = need.shape, cache.block_size, need.budget
    longest = shape.cost(-(-need.max_model_len // size), shape.most_in_sight(size, budget))
    useful = need.max_num_seqs * -(-longest // shape.slabs)
    rest = _rest(need, available)
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
        asked = f"--num-gpu-blocks-override {num_blocks}"
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // block_bytes
        asked = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
    else:
        memory = int(available * cache.gpu_memory_utilization) - need.weights - need.workspace
        num_blocks = min(useful, memory // block_bytes)
        asked = f"--gpu-memory-utilization {cache.gpu_memory_utilization}"
    if num_blocks * block_bytes > rest:
        raise ResourceError(
            f"{asked} asks for {num_blocks * block_bytes / GIB:.2f} GiB of KV cache, but only {rest / GIB:.2f} GiB "
            "are free after weights and workspace: ask for less"
        )
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


def _rest(need: MemoryNeed, available: int) -> int:
    """Bytes that are left for the KV cache. ResourceError if there are none."""
    rest = available - need.weights - need.workspace
    if rest <= 0:
        raise ResourceError(
            f"the weights ({need.weights / GIB:.2f} GiB) and workspace ({need.workspace / GIB:.2f} GiB) do not fit in "
            f"the {available / GIB:.2f} GiB of free memory: use a smaller model, --quantization int8 or int4, or lower "
            "--max-num-batched-tokens"
        )
    return rest


def _with_states(cache: CacheConfig, need: MemoryNeed, available: int) -> MemoryPlan:
    """Divide the memory of a model with recurrent states: snapshots, rows for running sequences, then blocks."""
    size, row = cache.block_size, need.state_bytes
    block_bytes = need.kv_bytes_per_token * size
    rest, usual = _rest(need, available), -(-min(need.max_model_len, USUAL_LENGTH) // size)
    share = cache.state_cache_fraction if cache.enable_prefix_caching else 0.0
    given = cache.num_gpu_blocks_override
    if given is not None:
        asked = f"--num-gpu-blocks-override {given}"
        running = max(1, min(need.max_num_seqs, given // usual))
        memory = int((given * block_bytes + running * row) / (1 - share))
    elif cache.kv_cache_memory_bytes is not None:
        asked, memory = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}", cache.kv_cache_memory_bytes
    else:
        asked = f"--gpu-memory-utilization {cache.gpu_memory_utilization}"
        memory = min(rest, int(available * cache.gpu_memory_utilization) - need.weights - need.workspace)
    if memory > rest:
        raise ResourceError(
            f"{asked} asks for {memory / GIB:.2f} GiB of KV cache, but only {rest / GIB:.2f} GiB are free after "
            "weights and workspace: ask for less"
        )
    snapshots = int(memory * share) // row
    memory -= snapshots * row
    if memory < row + block_bytes:
        raise ResourceError(
            f"the recurrent state of one sequence takes {row} bytes and a block {block_bytes}, but {asked} leaves "
            f"{max(0, memory)} for them beside {snapshots} snapshots: give the KV cache more memory, or lower "
            "--state-cache-fraction"
        )
    running = max(1, min(need.max_num_seqs, memory // (row + usual * block_bytes)))
    longest = -(-need.max_model_len // size)
    if given is not None:
        blocks = given
    elif block_bytes:
        blocks = min(need.max_num_seqs * longest, (memory - running * row) // block_bytes)
    else:
        blocks = max(longest, min((running + snapshots) * longest, MOST_FREE_BLOCKS))
    each = row <= SMALL * block_bytes
    snapshots = min(snapshots, blocks if each else -(-blocks * size // GRID))
    length = need.max_model_len
    if blocks * size < length:
        if need.max_model_len_is_given or blocks < 1:
            raise ResourceError(
                f"the KV cache holds {blocks * size} tokens with {asked}, beside {running} recurrent states of {row} "
                f"bytes and {snapshots} snapshots, but one sequence may need max_model_len = {length}: give it more "
                "memory, or lower --max-model-len or --state-cache-fraction"
            )
        length = blocks * size
    return MemoryPlan(
        available,
        need.weights,
        need.workspace,
        block_bytes,
        blocks,
        size,
        length,
        row,
        running,
        snapshots,
        need.num_open,
        each,
    )
