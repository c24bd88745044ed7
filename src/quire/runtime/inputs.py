"""Turns a ScheduledBatch into the arrays of a ModelInput. Owns the block tables; knows no text, no weights."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import numpy as np

from quire.devices.protocol import IntArray, ModelInput
from quire.devices.sampling import takes_largest
from quire.errors import EngineError
from quire.types import UNSEEN, Request, ScheduledBatch, ScheduledSeq


@dataclass(slots=True)
class LogitRows:
    """Which rows a step reads: first those to sample (in order of `seqs`, constrained ones last), then prompts'.

    The first `num_free` of the sampled rows have no grammar. `slots` and `positions` have an entry a sampled
    row: the position is that of the token to be drawn.
    `prompt` has (slot, first row, target tokens): the logits of the rows score the targets.
    `pooled` has (slot, first row, number of rows, whether they end the prompt): hidden states to pool.
    """

    slots: list[int]
    positions: list[int]
    prompt: list[tuple[int, int, list[int]]]
    pooled: list[tuple[int, int, int, bool]]
    num_free: int = 0


def filled(seq: ScheduledSeq, sampled: Mapping[int, tuple[int, ...]], failed: Container[int]) -> list[int]:
    """The tokens of `seq` with UNSEEN replaced by the slot's last sample. EngineError if their numbers differ.

    A slot that failed gets token 0: its result is dropped.
    """
    known = [token for token in seq.tokens if token != UNSEEN]
    count = len(seq.tokens) - len(known)
    if seq.slot in failed:
        return known + [0] * count
    last = sampled.get(seq.slot, ())
    if len(last) != count or seq.tokens[: len(known)] != known:
        raise EngineError(
            f"slot {seq.slot} has {count} unseen tokens at its end, and {len(last)} were sampled"
        )
    return [*known, *last]


class InputBuilder:
    """Keeps a block table per slot and builds each step's arrays from the batch's delta."""

    def __init__(self, max_seqs: int, max_blocks_per_seq: int) -> None:
        self._table_SM = np.zeros((max_seqs, max_blocks_per_seq), np.int32)
        self._num_blocks = [0] * max_seqs
        self._special: dict[int, Request] = {}  # slots whose prompt rows are read: scored or pooled
        self._constrained: set[int] = set()
        self._whole: set[int] = set()  # slots of whose logits more is read than the largest

    @property
    def block_table(self) -> IntArray:
        return self._table_SM

    def build(
        self, batch: ScheduledBatch, sampled: Mapping[int, tuple[int, ...]], failed: Container[int] = ()
    ) -> tuple[ModelInput, LogitRows]:
        """`sampled` holds each slot's last sample, which replaces UNSEEN. No logits are read of `failed` slots."""
        for slot in batch.freed:
            self._num_blocks[slot] = 0
            self._special.pop(slot, None)
            self._constrained.discard(slot)
            self._whole.discard(slot)
        for new in batch.new:
            scored = new.request.sampling.prompt_logprobs is not None and new.index == 0
            if scored or new.request.pooling is not None:
                self._special[new.slot] = new.request
            if new.request.grammar is not None:
                self._constrained.add(new.slot)
            if not takes_largest(new.request.sampling, new.request.bad_words_token_ids):
                self._whole.add(new.slot)
        tokens: list[int] = []
        positions: list[int] = []
        cu_q, kv_len, slots, rows = [0], [], [], []
        read = LogitRows([], [], [], [])
        last: list[tuple[int, int, int]] = []
        special, constrained = self._special, self._constrained
        for seq in batch.seqs:
            if seq.new_blocks:
                self._extend(seq)
            slot, start = seq.slot, seq.start
            if seq.draft:
                raise EngineError("drafts cannot be verified yet")
            tokens += seq.tokens if seq.tokens[-1] != UNSEEN else filled(seq, sampled, failed)
            count = len(tokens)
            end = start + count - cu_q[-1]
            positions += range(start, end)
            slots.append(slot)
            kv_len.append(end)
            cu_q.append(count)
            if not seq.wants_logits or (special and self._is_pooled(slot)) or (failed and slot in failed):
                continue
            if slot in constrained:
                last.append((count - 1, slot, end))
            else:
                rows.append(count - 1)
                read.slots.append(slot)
                read.positions.append(end)
        read.num_free = len(rows)
        for row, slot, end in last:
            rows.append(row)
            read.slots.append(slot)
            read.positions.append(end)
        if self._special:
            self._read_prompts(batch, cu_q, rows, read)
        as_int32 = np.int32
        inputs = ModelInput(
            np.array(tokens, as_int32),
            np.array(positions, as_int32),
            np.array(cu_q, as_int32),
            np.array(kv_len, as_int32),
            np.array(slots, as_int32),
            self._table_SM,
            np.array(rows, as_int32),
            greedy=not (special or constrained or self._whole),
        )
        return inputs, read

    def _extend(self, seq: ScheduledSeq) -> None:
        used = self._num_blocks[seq.slot]
        end = used + len(seq.new_blocks)
        self._table_SM[seq.slot, used:end] = seq.new_blocks
        self._num_blocks[seq.slot] = end

    def _is_pooled(self, slot: int) -> bool:
        request = self._special.get(slot)
        return request is not None and request.pooling is not None

    def _read_prompts(self, batch: ScheduledBatch, cu_q: list[int], rows: list[int], read: LogitRows) -> None:
        """Append the rows of prompts that are scored (a row scores the next token) or pooled."""
        for i, seq in enumerate(batch.seqs):
            request = self._special.get(seq.slot)
            if request is None:
                continue
            first, row, end = len(rows), cu_q[i], seq.start + len(seq.tokens)
            if request.pooling is not None:
                begin, count = cu_q[i + 1] - 1, int(seq.wants_logits)
                if request.pooling == "mean":
                    begin, count = row, len(seq.tokens)
                elif request.pooling == "cls":
                    begin, count = row, int(seq.start == 0)
                rows.extend(range(begin, begin + count))
                read.pooled.append((seq.slot, first, count, seq.wants_logits))
                continue
            stop = min(end, len(request.tokens) - 1)
            if stop > seq.start:
                read.prompt.append((seq.slot, first, request.tokens[seq.start + 1 : stop + 1]))
                rows.extend(range(row, row + stop - seq.start))
