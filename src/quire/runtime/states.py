"""Recurrent states: the memory of their rows, and the arrays that say which rows a step uses."""

from __future__ import annotations

import numpy as np

from quire.config import CacheConfig
from quire.devices.protocol import StateInput
from quire.errors import EngineError, ResourceError
from quire.runtime.memory import MemoryNeed, MemoryPlan, check_asked, room
from quire.state_rows import StateRows
from quire.types import ScheduledSeq

USUAL_LENGTH = 2048
"""Rows of recurrent states are made for as many sequences as fit at USUAL_LENGTH tokens each."""
CHEAP = 16
"""There are more rows, for short sequences, as long as all take no more than 1 / CHEAP of the memory."""
SMALL = 4
"""A snapshot is taken in each block if it takes no more than SMALL blocks."""
GRID = 64
PREDICTED = 3  # tokens of a request's own prediction that a step verifies if nothing else drafts
MOST_DRAFT = 15
MOST_FREE_BLOCKS = 1 << 18  # of a model whose blocks take no memory


def lay_out(seqs: list[ScheduledSeq]) -> StateInput:
    """Lay out the state rows of a step's sequences."""
    uses = [seq.state for seq in seqs if seq.state is not None]
    if len(uses) != len(seqs):
        raise EngineError("a sequence of a model with recurrent states has no row for its own")
    rows_3B = np.array(
        [[use.row for use in uses], [use.open for use in uses], [use.kept for use in uses]], np.int32
    )
    marks = [(place, *mark) for place, use in enumerate(uses) for mark in use.marks]
    return StateInput(rows_3B[0], rows_3B[1], rows_3B[2], np.array(marks, np.int32).reshape(-1, 3))


def open_rows(most_draft: int) -> int:
    """Count the open rows for drafts of at most `most_draft` tokens, of which at most MOST_DRAFT are verified."""
    return 1 + min(max(most_draft, PREDICTED), MOST_DRAFT)


def plan_memory(cache: CacheConfig, need: MemoryNeed, available: int) -> MemoryPlan:
    """Divide the memory of a model with recurrent states: snapshots, rows for running sequences, then blocks."""
    size, num_open = cache.block_size, open_rows(need.most_draft)
    row = 0 if need.bytes_per_state is None else need.bytes_per_state(num_open)
    block_bytes = need.kv_bytes_per_token * size
    usual = -(-min(need.max_model_len, USUAL_LENGTH) // size)
    share = cache.state_cache_fraction if cache.enable_prefix_caching else 0.0
    rest, asked, memory = room(cache, need, available)
    given = cache.num_gpu_blocks_override
    if given is not None:
        running = max(1, min(need.max_num_seqs, given // usual))
        memory = int((given * block_bytes + running * row) / (1 - share))
    check_asked(asked, memory, rest)
    snapshots = int(memory * share) // row
    memory -= snapshots * row
    if memory < row + block_bytes:
        raise ResourceError(
            f"the recurrent state of one sequence takes {row} bytes and a block {block_bytes}, but {asked} leaves "
            f"{max(0, memory)} for them beside {snapshots} snapshots: give the KV cache more memory, or lower "
            "--state-cache-fraction"
        )
    usually, cheap = memory // (row + usual * block_bytes), memory // (CHEAP * row)
    running = max(1, min(need.max_num_seqs, max(usually, cheap)))
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
    rows = StateRows(running + snapshots, running, num_open, each, nbytes=row)
    return MemoryPlan(available, need.weights, need.workspace, block_bytes, blocks, size, length, row, rows)


def count_sequences(memory: MemoryPlan, length: int) -> int:
    """Count the sequences of `length` tokens that fit at once, beside the snapshots."""
    if memory.rows is None:
        return memory.num_tokens // length
    rows = memory.rows
    room = memory.kv_cache - rows.num_snapshots * memory.state_bytes
    each = memory.state_bytes + length * memory.block_bytes // memory.block_size
    return min(room // each, rows.num_running)
