"""Owns live requests and the order in which their samples wait for a slot. Does not look into blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from itertools import pairwise

from quire.sched.prefix import PrefixMatch
from quire.sched.sequence import WAITING, Group, Sequence
from quire.sched.tables import BlockTables
from quire.shares import next_to_go
from quire.types import Request


def key_of(seq: Sequence) -> tuple[int, float, int]:
    return seq.key


class WaitingQueue:
    """Waiting sequences in order of `key`, and the live samples of each request.

    A sample is *held*, outside the queue, while another one prefills the prompt that both share. A waiting fork
    may hold blocks (`Sequence.base`), and prefixes may be kept by name (`keep`); when blocks run out, they are given up
    before any sequence is preempted.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self.groups: dict[str, Group] = {}
        self.seqs: list[Sequence] = []
        self.owners: Counter[str] = Counter()  # live samples of each
        self.num_held = 0
        self.num_tokens = 0  # of queued and held sequences
        self._with_base: list[Sequence] = []
        self._kept: dict[str, tuple[str, PrefixMatch]] = {}  # with owners, oldest first

    def join(self, seq: Sequence) -> None:
        """Add a new sequence to its group and to the queue."""
        self.groups[seq.request.id] = seq.group
        self.owners[seq.request.owner] += 1
        seq.group.live.append(seq)
        if seq.base is not None:
            self._tables.hold(seq.base)
            self._with_base.append(seq)
        self.push(seq)

    def push(self, seq: Sequence) -> None:
        seq.status = WAITING
        insort(self.seqs, seq, key=key_of)
        self.num_tokens += len(seq.tokens)

    def take(self, seq: Sequence) -> None:
        """Take out a queued sequence, to run it."""
        self._unqueue(seq)
        self.num_tokens -= len(seq.tokens)

    def hold(self, seq: Sequence) -> None:
        """Hold a queued sequence until another sample of its request has the prompt."""
        self._unqueue(seq)
        seq.group.held.append(seq)
        self.num_held += 1

    def requeue_held(self, group: Group) -> None:
        for seq in group.held:
            insort(self.seqs, seq, key=key_of)
        self.num_held -= len(group.held)
        group.held = []

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting or held sequence that has ended."""
        if seq in seq.group.held:
            seq.group.held.remove(seq)
            self.num_held -= 1
        else:
            self._unqueue(seq)
        self.num_tokens -= len(seq.tokens)
        self.drop_base(seq)

    def _unqueue(self, seq: Sequence) -> None:
        del self.seqs[bisect_left(self.seqs, seq.key, key=key_of)]

    def leave(self, seq: Sequence) -> None:
        """Record that a sequence has ended: samples that wait for it look again."""
        group = seq.group
        group.live.remove(seq)
        owner = seq.request.owner
        self.owners[owner] -= 1
        if not self.owners[owner]:
            del self.owners[owner]
        if group.held:
            self.requeue_held(group)
        if not group.live:
            del self.groups[group.request.id]

    def drop_base(self, seq: Sequence) -> None:
        """Release the blocks of a fork's base: it has its own table, has ended, or must make room."""
        if seq.base is not None:
            self._with_base.remove(seq)
            self._tables.let_go(seq.base)
            seq.base = None

    def keep(self, key: str, match: PrefixMatch, owner: str) -> int:
        """Hold the blocks of a prefix until `let_go`, or until others need them; returns how many are held.

        All kept prefixes hold at most half of the pool, and of the rows of states: the oldest of the owner with most
        make room.
        """
        self.let_go(key)
        most = self._tables.num_blocks // 2
        size = self._tables.count(match.num_tokens)
        if not size or size > most:
            return 0
        states = self._tables.states
        while self.num_kept_blocks + size > most or (
            states is not None and 2 * len(self._kept) >= states.rows.num_rows
        ):
            self._give_way()
        self._kept[key] = owner, match
        self._tables.hold(match)
        return size

    def let_go(self, key: str) -> None:
        """Give up a kept prefix, if it is still there; it stays cached while there is room."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._tables.let_go(kept[1])

    def _give_way(self) -> None:
        """Give up the oldest kept prefix of the owner whose prefixes hold most."""
        count = self._tables.count
        held = ((key, owner, count(match.num_tokens)) for key, (owner, match) in self._kept.items())
        self.let_go(next_to_go(held))

    def let_go_all(self) -> None:
        for key in list(self._kept):
            self.let_go(key)

    @property
    def num_kept_blocks(self) -> int:
        """Count the blocks that kept prefixes hold; one that several hold counts for each."""
        return sum(self._tables.count(match.num_tokens) for _, match in self._kept.values())

    def drop_bases(self, spare: Sequence | None = None) -> bool:
        """Give up a kept prefix or, if there is none, the bases of waiting forks.

        The base of `spare` is given up only if there is no other. False: there are none.
        """
        if self._kept:
            self._give_way()
            return True
        found = [seq for seq in self._with_base if seq is not spare] or list(self._with_base)
        for seq in found:
            self.drop_base(seq)
        return bool(found)

    @property
    def bases(self) -> list[PrefixMatch]:
        """List the matches that are held without being in a table."""
        return [
            *(seq.base for seq in self._with_base if seq.base is not None),
            *(match for _, match in self._kept.values()),
        ]

    def request_in_use(self, request: Request) -> str | None:
        """Return the error for a request whose id is in use; None if it is new."""
        if request.id not in self.groups:
            return None
        return f"request id {request.id!r} is in use by a request that has not ended; choose another id"

    def check(self) -> list[Sequence]:
        """Assert the invariants of the queue; returns all queued and held sequences."""
        assert all(a.key < b.key for a, b in pairwise(self.seqs)), "the queue is out of order"
        held = [seq for group in self.groups.values() for seq in group.held]
        assert self.num_held == len(held)
        assert all(set(seq.group.live) - set(seq.group.held) for seq in held), "samples wait for nobody"
        idle = self.seqs + held
        assert self.owners.total() == sum(len(group.live) for group in self.groups.values())
        assert self.num_tokens == sum(len(seq.tokens) for seq in idle)
        assert all(seq.slot < 0 and not seq.blocks and seq.status is WAITING for seq in idle)
        assert all(seq in seq.group.live for seq in idle)
        assert {seq for seq in idle if seq.base is not None} == set(self._with_base)
        return idle
