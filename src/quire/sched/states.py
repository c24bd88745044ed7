"""Owns the rows with the recurrent state of sequences. Knows ids and positions only, no tokens.

A running sequence has one row, which holds the state after its first `committed` tokens, and *open rows*: inputs of
tokens behind them, which may still be taken back (drafts, the last token of a constrained sequence). The next step
replays those that stay. All other rows are free or *snapshots*, from which later sequences go on: each hangs on a node
of the prefix index, at whose end it was taken, and dies with it. The row of a sequence that ends becomes one as it is.

Batches are computed in the order of scheduling. So a row may be copied before the step that writes it is done, and
given away before a copy of it is made.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import count

from msgspec.structs import replace

from quire.radix import RadixNode
from quire.sched.prefix import PrefixIndex, PrefixMatch
from quire.sched.sequence import Sequence
from quire.sched.step_plan import StepPlan
from quire.state_rows import StateRows, StateUse
from quire.types import ScheduledSeq

Node = RadixNode[int]

GUESSED = 0.25
"""A snapshot taken at regular intervals counts GUESSED of what it saves until a sequence goes on from it."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after `position` tokens: that of the row, and `open` of its open rows replayed.

    `worth` orders snapshots, least first; it grows by `share` of the tokens saved over the snapshot before it.
    """

    row: int
    position: int
    open: int = 0
    node: Node | None = None
    share: float = 1.0
    holders: int = 0  # matches that hold it
    worth: float = 0.0
    since: float = 0.0  # the clock at its last use


@dataclass(slots=True, eq=False)
class RunningState:
    """The row of a running sequence. `branch` is where its tokens leave those that others have computed."""

    row: int
    committed: int
    branch: int = 0


class StatePool:
    """The state rows: each is free, a running sequence's, or a snapshot's.

    Snapshots are evicted by GreedyDual: the one that saves the fewest tokens, counted from the clock at its last use;
    the clock is the worth of the last one evicted. Those that a waiting fork or a kept prefix holds stay.
    """

    def __init__(self, rows: StateRows, block_size: int, prefix: PrefixIndex) -> None:
        prefix.on_drop = self.forget
        self.rows, self._size = rows, block_size
        self.grid = max(block_size, rows.grid // block_size * block_size)
        self._stride = max(block_size, rows.stride // block_size * block_size)
        self._least = max(block_size, self.grid - block_size)  # tokens that a copy must save
        if rows.in_each_block:
            self.grid = self._stride = self._least = block_size
        self._free = list(range(rows.num_rows - 1, -1, -1))
        self._snapshots: dict[Node, Snapshot] = {}
        self._num_held = 0  # of those
        self._heap: list[tuple[float, int, Snapshot]] = []
        self._order = count()
        self._clock = 0.0
        self._copies: list[tuple[int, int]] = []
        self._marked: list[Snapshot] = []  # of the step that is planned: their rows must not be written twice
        self.num_taken = self.num_hits = self.num_evicted = 0

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def take_copies(self) -> list[tuple[int, int]]:
        """Take the copies (source, destination) to make before the next step computes, in order."""
        copies, self._copies = self._copies, []
        return copies

    # --- snapshots -----------------------------------------------------------------------------------

    def deepest(self, node: Node | None, limit: int) -> Snapshot | None:
        """Find the last snapshot at or above `node` after at most `limit` tokens."""
        while node is not None:
            found = self._snapshots.get(node)
            if found is not None and found.position <= limit:
                return found
            node = node.parent
        return None

    def whole(
        self,
        match: PrefixMatch,
        in_windows: Callable[[PrefixMatch], PrefixMatch],
        shorten: Callable[[PrefixMatch, int], PrefixMatch],
    ) -> PrefixMatch:
        """Cut `match` to the last place with a snapshot where windows are whole too."""
        while True:
            known = max(match.num_known, match.num_tokens)
            cut = in_windows(match)
            state = cut.state
            if state is None or state.position != cut.num_tokens:
                state = self.deepest(cut.node, cut.num_tokens)
            cut = shorten(cut, 0 if state is None else state.position)
            if cut.num_tokens == match.num_tokens:
                return changed(cut, state=state, num_known=known)
            match = changed(cut, num_known=known)

    def hold(self, snapshot: Snapshot) -> None:
        """Keep a snapshot until it is let go."""
        snapshot.holders += 1
        self._num_held += snapshot.holders == 1 and snapshot.node is not None

    def let_go(self, snapshot: Snapshot) -> None:
        snapshot.holders -= 1
        if snapshot.holders:
            return
        if snapshot.node is not None:
            self._num_held -= 1
            self._push(snapshot)
        elif snapshot.row >= 0:
            self._free.append(snapshot.row)

    def forget(self, node: Node) -> None:
        """Drop the snapshot of a node that leaves the index. One that is held is kept for its holders."""
        snapshot = self._snapshots.pop(node, None)
        if snapshot is None:
            return
        snapshot.node = None
        if snapshot.holders:
            self._num_held -= 1
        else:
            self._free.append(snapshot.row)

    def forget_after(self, node: Node | None, position: int) -> None:
        """Drop the snapshots at and above `node` that were taken behind `position`: a step failed there."""
        while node is not None and node.depth > position + 1:
            self.forget(node)
            node = node.parent

    def clear(self) -> None:
        """Drop all snapshots."""
        for node in list(self._snapshots):
            self.forget(node)

    def _add(self, snapshot: Snapshot, node: Node) -> None:
        snapshot.node = node
        self._snapshots[node] = snapshot
        self._use(snapshot)
        self.num_taken += 1

    def _use(self, snapshot: Snapshot) -> None:
        snapshot.since = self._clock
        self._push(snapshot)

    def _push(self, snapshot: Snapshot) -> None:
        snapshot.worth = self._worth(snapshot)
        if len(self._heap) > 4 * self.rows.num_rows:  # most entries are out of date
            self._heap = [entry for entry in self._heap if entry[2].node and entry[0] == entry[2].worth]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (snapshot.worth, next(self._order), snapshot))

    def _worth(self, snapshot: Snapshot) -> float:
        return snapshot.since + snapshot.share * self._saved(snapshot.node, snapshot.position)

    def _saved(self, node: Node | None, position: int) -> int:
        """Count the tokens that a snapshot at `node` saves over the one before it."""
        before = None if node is None else self.deepest(node.parent, position)
        return position - (0 if before is None else before.position)

    def _take(self, worth: float = float("inf"), spare: Snapshot | None = None) -> int:
        """Take a row: a free one, or that of the snapshot that is worth least and no more than `worth`. -1: none."""
        if self._free:
            return self._free.pop()
        spared = False
        row = -1
        while self._heap:
            least, _, snapshot = self._heap[0]
            stale = snapshot.node is None or snapshot.holders > 0 or snapshot.worth != least
            if not stale and snapshot is not spare and self._worth(snapshot) <= least:
                if least <= worth:
                    self._clock = max(self._clock, least)
                    self.num_evicted += 1
                    assert snapshot.node is not None
                    self.forget(snapshot.node)
                    row = self._free.pop()
                break
            heapq.heappop(self._heap)
            if not stale and snapshot is spare:
                spared = True
            elif not stale:
                self._push(snapshot)  # the one before it has gone meanwhile
        if spared and spare is not None:
            self._push(spare)
        return row

    # --- sequences -----------------------------------------------------------------------------------

    def has_room(self, snapshot: Snapshot | None) -> bool:
        """Tell whether there is a row for a sequence that goes on from `snapshot`."""
        own = snapshot is not None and snapshot.node is None and snapshot.holders == 1
        return own or bool(self._free) or len(self._snapshots) > self._num_held

    def start(self, snapshot: Snapshot | None, branch: int) -> RunningState:
        """Give a sequence that goes on from `snapshot` its row. There must be room."""
        if snapshot is None:
            return RunningState(self._take(), 0, branch)
        committed = snapshot.position - snapshot.open
        if snapshot.node is None and snapshot.holders == 1:  # its own fork's
            row, snapshot.row = snapshot.row, -1
            return RunningState(row, committed, branch)
        if snapshot.node is not None:
            self.num_hits += 1
            snapshot.share, snapshot.since = 1.0, self._clock
            if not snapshot.holders:
                self._push(snapshot)
        row = self._take(spare=snapshot)
        if row < 0 and snapshot.node is not None:  # only this one is left
            self.forget(snapshot.node)
            row = self._free.pop()
        else:
            self._copies.append((snapshot.row, row))
        return RunningState(row, committed, branch)

    def fork(self, own: RunningState, position: int) -> Snapshot | None:
        """Copy the row of a running sequence whose first `position` tokens are settled; the copy is to be held.

        None: it has gone beyond that, or there is no row.
        """
        row = self._take() if own.committed <= position else -1
        if row < 0:
            return None
        self._copies.append((own.row, row))
        return Snapshot(row, position, position - own.committed)

    def stop(self, own: RunningState, position: int, node: Node | None) -> None:
        """Take the row of a sequence that stops after `position` tokens, whose path in the index ends in `node`."""
        if node is None or node.value is None or node.depth != position + 1 or own.committed > position:
            self._free.append(own.row)
        elif node in self._snapshots:
            self._free.append(own.row)
            if not self._snapshots[node].holders:
                self._use(self._snapshots[node])
        else:
            self._add(Snapshot(own.row, position, position - own.committed), node)

    def commit(self, plan: StepPlan) -> None:
        """Tell each sequence of a planned step what its row takes in, and choose the snapshots."""
        takes = self.rows.num_snapshots > 0
        for i, (item, seq) in enumerate(zip(plan.seqs, plan.flight, strict=True)):
            own, start, kept = seq.state, item.start, len(item.tokens)
            assert own is not None
            if seq.constrained and item.wants_logits:
                kept -= 1  # it may have to compute the last token again
            marks: tuple[tuple[int, int], ...] = ()
            if takes and start >= seq.prefill_end:
                self._copy(seq, own, min(start, len(seq.tokens)) // self.grid * self.grid)
            elif takes:
                marks = tuple(self._marks(seq, own, item, start + kept))
            use = StateUse(own.row, start - own.committed, kept, marks)
            own.committed = start + kept
            plan.seqs[i] = replace(item, state=use)
        for snapshot in self._marked:
            self.let_go(snapshot)
        self._marked = []

    def _copy(self, seq: Sequence, own: RunningState, position: int) -> None:
        """Take a snapshot of an answer, before the step computes, if its row reaches `position`."""
        if position < max(own.committed, 1):
            return
        snapshot = self._snap(seq, position, position - own.committed, GUESSED)
        if snapshot is not None:
            self._copies.append((own.row, snapshot.row))

    def _marks(
        self, seq: Sequence, own: RunningState, item: ScheduledSeq, end: int
    ) -> Iterator[tuple[int, int]]:
        """Choose where the step takes snapshots of a prompt: (tokens of the step, row).

        At its last full block, and one grid step before, because a template may change the end of a turn; where its
        tokens leave those that others have computed, because the next one may leave there too; where its request asks
        for it; every so often.
        """
        last = (seq.prefill_end - 1) // self._size * self._size
        sure = {last, last - self.grid + self._size, own.branch}
        sure.update(mark // self._size * self._size for mark in seq.request.marks)
        first, stride = item.start + 1, self._stride
        every = range(-(-first // stride) * stride, end + 1, stride)
        for position in sorted({*every, *(at for at in sure if first <= at <= end)}):
            snapshot = self._snap(seq, position, 0, 1.0 if position in sure else GUESSED)
            if snapshot is not None:
                self.hold(snapshot)
                self._marked.append(snapshot)
                yield position - item.start, snapshot.row

    def _snap(self, seq: Sequence, position: int, open: int, share: float) -> Snapshot | None:
        """Make room for a snapshot of `seq`, if it is worth more than another one."""
        node = seq.cursor.above(position + 1)
        if node.depth != position + 1 or node.value is None or node in self._snapshots:
            return None
        saved = self._saved(node, position)
        least = self._size if share == 1.0 and position >= self._least else self._least
        row = -1 if saved < least else self._take(self._clock + share * saved)
        if row < 0:
            return None
        snapshot = Snapshot(row, position, open, share=share)
        self._add(snapshot, node)
        return snapshot

    def check(self, running: Iterable[Sequence], held: Iterable[Snapshot]) -> None:
        """Assert that each row is free, a running sequence's or a snapshot's, and that these lie where nodes end."""
        holders = Counter(held)
        rows = [snapshot.row for snapshot in {*holders, *self._snapshots.values()}]
        for seq in running:
            own = seq.state
            assert own is not None
            assert own.committed <= seq.num_computed <= own.committed + self.rows.num_open
            rows.append(own.row)
        assert sorted(rows + self._free) == list(range(self.rows.num_rows)), (
            "state rows are lost or used twice"
        )
        for node, snapshot in self._snapshots.items():
            assert snapshot.node is node
            assert node.value is not None, "a snapshot hangs on a node that has lost its block"
            assert node.depth == snapshot.position + 1 > 1
            assert snapshot.holders == holders[snapshot]
        assert self._num_held == sum(snapshot.holders > 0 for snapshot in self._snapshots.values())
