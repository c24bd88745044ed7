"""Verifies trees of drafts: branches are further sequences of a step, with blocks of their own in the target's cache.

A branch shares the blocks before its first token. The block that it begins in is copied, and common ancestors computed
in the same step are stored there too (ModelInput.echoes_E2). So each row sees its own path at consecutive positions,
in the order of a chain, and its logits are bit for bit those of a chain. An accepted branch's blocks are copied back.
"""

from __future__ import annotations

import numpy as np

from quire.devices.protocol import IntArray, KVCache, Limits
from quire.runtime.inputs import InputBuilder, StepLayout, StepTrees, TreeRows
from quire.spec_decode.proposer import Branch
from quire.spec_decode.tree import TreeShape
from quire.types import ScheduledSeq


class DraftTrees:
    """Branches that wait for the next step of their sequence, and where they go.

    Their rows of `inputs`' table begin at `first_row`; branch i of a step has the blocks `blocks_BM[i]`. A step takes
    at most `max_rows` of their tokens.
    """

    def __init__(
        self, inputs: InputBuilder, first_row: int, blocks_BM: IntArray, max_rows: int, block_size: int
    ) -> None:
        self._inputs, self._first_row, self._blocks_BM = inputs, first_row, blocks_BM
        self._max_rows, self._size = max_rows, block_size
        self._waiting: dict[int, tuple[list[int], list[Branch]]] = {}  # by slot

    def offer(self, slot: int, chain: list[int], branches: list[Branch]) -> None:
        """The next draft of `slot` is `chain`, with `branches`."""
        self._waiting[slot] = chain, branches

    def clear(self, slot: int) -> None:
        self._waiting.pop(slot, None)

    def grow(self, step: StepLayout, cache: KVCache) -> None:
        """Add the waiting branches of the step's sequences to its layout."""
        if not self._waiting:
            return
        found: dict[int, list[TreeRows]] = {}
        echoes: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        used, left = 0, self._max_rows
        for number, seq in enumerate(step.seqs):
            chain, branches = self._waiting.pop(seq.slot, (None, []))
            if chain is None or not seq.draft or chain[: len(seq.draft)] != seq.draft:
                continue
            rows = range(step.cu_q[number], step.cu_q[number + 1])
            chains = {0: TreeRows(0, 0, 0, seq.draft, seq.slot, step.ends[number], list(rows))}
            for index, branch in enumerate(branches, 1):
                tokens = branch.tokens[: len(seq.draft) - branch.fork]  # no deeper than there are blocks
                if not tokens or branch.parent not in chains or used == len(self._blocks_BM):
                    continue
                if len(tokens) > left:
                    break
                begin = step.ends[number] - len(seq.draft) + branch.fork
                copies += self._lay_table(seq, chains[branch.parent].table_row, used, begin, len(tokens))
                row = self._first_row + used
                added = _add(step, seq.start, chains[branch.parent], branch, index, tokens, row, begin)
                edge = max(begin // self._size * self._size, seq.start)
                echoes += [(added.path[at - seq.start], len(step.slots) - 1) for at in range(edge, begin)]
                chains[index] = added
                used, left = used + 1, left - len(tokens)
            if len(chains) > 1:
                found[seq.slot] = list(chains.values())[1:]
        if found:
            cache.copy_blocks(copies)
            step.trees = StepTrees(found, np.array(echoes, np.int32).reshape(-1, 2))

    def _lay_table(
        self, seq: ScheduledSeq, parent_row: int, number: int, begin: int, count: int
    ) -> list[tuple[int, int]]:
        """The table of branch `number`, `count` tokens from position `begin` on. Returns the block to copy, if any."""
        table_SM, size = self._inputs.block_table_SM, self._size
        first, last = begin // size, (begin + count - 1) // size
        row = table_SM[self._first_row + number]
        if self._inputs.adapters_S is not None:
            self._inputs.adapters_S[self._first_row + number] = self._inputs.adapters_S[seq.slot]
        row[:first] = table_SM[parent_row, :first]
        row[first : last + 1] = self._blocks_BM[number, : last + 1 - first]
        return [(int(table_SM[seq.slot, first]), int(row[first]))] if first * size < seq.start else []

    def settle(self, step: StepLayout, cache: KVCache) -> None:
        """Copy the blocks of accepted branches back to their sequences."""
        if step.trees is None:
            return
        table_SM, copies = self._inputs.block_table_SM, []
        for slot, branch in step.trees.taken.items():
            used = (branch.end - 1) // self._size + 1
            own, theirs = table_SM[slot, :used].tolist(), table_SM[branch.table_row, :used].tolist()
            copies += [(source, own[i]) for i, source in enumerate(theirs) if source != own[i]]
        cache.copy_blocks(copies)


def with_trees(limits: Limits, shape: TreeShape | None) -> Limits:
    """The largest step if branches may be added to one that has its `limits`."""
    if shape is None:
        return limits
    return Limits(
        limits.max_tokens + shape.rows,
        limits.max_seqs + shape.branches,
        limits.max_logit_rows,
        limits.max_adapters,
    )


def tree_blocks(shape: TreeShape | None, block_size: int) -> int:
    """The blocks that all branches of a step need."""
    return 0 if shape is None else shape.branches * _blocks_each(shape, block_size)


def _blocks_each(shape: TreeShape, block_size: int) -> int:
    return (shape.depth - 1 + block_size - 1) // block_size + 1


def make_trees(
    shape: TreeShape | None, max_seqs: int, num_blocks: int, block_size: int, inputs: InputBuilder
) -> DraftTrees | None:
    """What verifies trees of that shape. Its blocks are those from `num_blocks` on."""
    if shape is None:
        return None
    count = tree_blocks(shape, block_size)
    blocks_BM = num_blocks + np.arange(count, dtype=np.int32).reshape(shape.branches, -1)
    return DraftTrees(inputs, max_seqs, blocks_BM, shape.rows, block_size)


def _add(
    step: StepLayout,
    start: int,
    parent: TreeRows,
    branch: Branch,
    number: int,
    tokens: list[int],
    table_row: int,
    begin: int,
) -> TreeRows:
    """Append a branch to the layout of a step as a sequence whose tokens begin at position `begin`."""
    first, end = len(step.tokens), begin + len(tokens)
    step.tokens += tokens
    step.positions += range(begin, end)
    step.slots.append(table_row)
    step.ends.append(end)
    step.cu_q.append(len(step.tokens))
    path = parent.path[: begin - start] + list(range(first, len(step.tokens)))
    return TreeRows(number, branch.parent, branch.fork, tokens, table_row, end, path)
