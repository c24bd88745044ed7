"""Lays a ScheduledBatch out as the arrays of a ModelInput. Owns the block tables; knows no text and no weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from quire.devices.protocol import IntArray, ModelInput
from quire.errors import EngineError
from quire.lazy import Lazy
from quire.types import UNSEEN, NewSeq, ScheduledBatch, ScheduledSeq

if TYPE_CHECKING:
    from quire.runtime import states
else:
    states = Lazy("quire.runtime.states")


class StepLayout(msgspec.Struct):
    """The places of a step's sequences among its T tokens.

    Sequence i has tokens cu_q[i]..cu_q[i + 1] - 1; the last len(seqs[i].draft) of them are its draft. ends[i] is the
    position after its last token. `unseen` are places of tokens that the device has, with the slots that drew them.
    """

    seqs: list[ScheduledSeq]
    tokens: list[int]
    positions: list[int]
    cu_q: list[int]
    ends: list[int]
    slots: list[int]
    unseen: list[tuple[int, int]] = []


class InputBuilder:
    """Keeps a block table and an adapter per slot, and builds each step's arrays from the batch's delta.

    `slot_of` is the slot of an adapter that is in memory. If the device has `mirrored` the block table, each step says
    what was appended to it.
    """

    def __init__(
        self, max_seqs: int, max_blocks_per_seq: int, adapters: bool = False, mirrored: bool = False
    ) -> None:
        # The block table, a row per slot as in ModelInput, and the number of blocks of each; both change in place.
        self.block_table_SM = np.zeros((max_seqs, max_blocks_per_seq), np.int32)
        self.num_blocks = [0] * max_seqs
        # What was appended since the last step that was built, by slot and column; None: nobody asks.
        self._appended: dict[tuple[int, int], int] | None = {} if mirrored else None
        # The adapter's slot of each sequence; None: there are no adapters.
        self.adapters_S = np.full(max_seqs, -1, np.int32) if adapters else None
        self.slot_of: Callable[[str], int] | None = None

    def set(self, new: NewSeq) -> None:
        """Give a sequence its slot."""
        adapter = new.request.adapter
        if adapter is not None and self.adapters_S is not None and self.slot_of is not None:
            self.adapters_S[new.slot] = self.slot_of(adapter)

    def clear(self, slot: int) -> None:
        """Forget a slot's blocks and adapter."""
        self.num_blocks[slot] = 0
        if self.adapters_S is not None:
            self.adapters_S[slot] = -1

    def lay_out(
        self, batch: ScheduledBatch, sampled: Mapping[int, Sequence[int]] | None, failed: Container[int]
    ) -> StepLayout:
        """Lay out the batch's tokens, and extend the block tables.

        `sampled` holds the last sample of each slot, which replaces UNSEEN; for `failed` slots token 0 does. None: the
        device has them, and fills them in. EngineError: the number of unseen tokens differs from the sample's.
        """
        tokens: list[int] = []
        unseen: list[tuple[int, int]] = []
        positions: list[int] = []
        cu_q, ends, slots = [0], [], []
        seqs = batch.seqs if self.adapters_S is None else self._by_adapter(batch.seqs)
        for seq in seqs:
            if seq.new_blocks:
                self._extend(seq)
            slot, start = seq.slot, seq.start
            if seq.tokens[-1] != UNSEEN:
                tokens += seq.tokens
            elif sampled is not None:
                tokens += _seen(seq, sampled, failed)
            else:
                unseen.append((len(tokens) + len(seq.tokens) - 1, slot))
                tokens += [*seq.tokens[:-1], 0]
            if seq.draft:
                tokens += seq.draft
            count = len(tokens)
            end = start + count - cu_q[-1]
            positions += range(start, end)
            slots.append(slot)
            ends.append(end)
            cu_q.append(count)
        return StepLayout(seqs, tokens, positions, cu_q, ends, slots, unseen)

    def build(self, layout: StepLayout, rows: list[int], greedy: bool) -> ModelInput:
        """Make the arrays of a step that reads the rows of the tokens `rows` (see ModelInput.logit_rows and greedy)."""
        adapters_B = None if self.adapters_S is None else self.adapters_S[layout.slots]
        t, b = len(layout.tokens), len(layout.ends)
        # One conversion for all lists, because each takes longer than the numbers of a small step.
        every = np.array(
            [*layout.tokens, *layout.positions, *layout.ends, *layout.slots, *layout.cu_q, *rows], np.int32
        )
        return ModelInput(
            every[:t],
            every[t : 2 * t],
            every[2 * (t + b) : 2 * t + 3 * b + 1],
            every[2 * t : 2 * t + b],
            every[2 * t + b : 2 * (t + b)],
            self.block_table_SM,
            every[2 * t + 3 * b + 1 :],
            greedy,
            None,
            adapters_B if adapters_B is not None and adapters_B.max() >= 0 else None,
            None if layout.seqs[0].state is None else states.lay_out(layout.seqs),
            np.array(layout.unseen, np.int32) if layout.unseen else None,
            None if self._appended is None else _taken(self._appended),
        )

    def snapshot(self, layout: StepLayout) -> ModelInput:
        """Make the arrays of a step whose rows are not known yet, with a table that later steps do not change."""
        inputs = self.build(layout, [], False)
        used = max(self.num_blocks[slot] for slot in layout.slots)
        table_BM = np.ascontiguousarray(self.block_table_SM[layout.slots, :used])
        slots_B = np.arange(len(layout.slots), dtype=np.int32)
        return msgspec.structs.replace(inputs, slots_B=slots_B, block_table_SM=table_BM)

    def _by_adapter(self, seqs: list[ScheduledSeq]) -> list[ScheduledSeq]:
        """Put the sequences of one adapter side by side, so that they share its products."""
        assert self.adapters_S is not None
        slots = self.adapters_S.tolist()
        return sorted(seqs, key=lambda seq: slots[seq.slot])

    def _extend(self, seq: ScheduledSeq) -> None:
        used = self.num_blocks[seq.slot]
        end = used + len(seq.new_blocks)
        self.block_table_SM[seq.slot, used:end] = seq.new_blocks
        self.num_blocks[seq.slot] = end
        if self._appended is not None:
            self._appended.update(((seq.slot, used + i), block) for i, block in enumerate(seq.new_blocks))


def _taken(appended: dict[tuple[int, int], int]) -> IntArray:
    """Take out what was appended, as rows of slot, column and block."""
    rows = [(*place, block) for place, block in appended.items()]
    appended.clear()
    return np.array(rows, np.int32).reshape(-1, 3)


def _seen(seq: ScheduledSeq, sampled: Mapping[int, Sequence[int]], failed: Container[int]) -> list[int]:
    """Replace UNSEEN in the tokens of `seq`."""
    known = [token for token in seq.tokens if token != UNSEEN]
    count = len(seq.tokens) - len(known)
    last = [0] * count if seq.slot in failed else sampled.get(seq.slot, ())
    if len(last) != count or seq.tokens[: len(known)] != known:
        raise EngineError(
            f"slot {seq.slot} has {count} unseen tokens at its end, and {len(last)} were sampled"
        )
    return [*known, *last]
