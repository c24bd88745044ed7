"""Lets requests, and the owners of requests, take turns. Knows who runs and who waits; no blocks and no slots.

Without turns, one request with many samples would fill every slot until its samples end. So the samples of a request
that has none running go before further samples of others, and likewise owners. If such a sample finds no room, it
displaces a sample of a request, or an owner, with more than one running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.sched.queue import WaitingQueue
from quire.sched.sequence import Sequence


class Turns:
    """Counts the running sequences of each request and owner, and says who is next and who gives way.

    Displacing ends: it always lowers the number of owners, then of requests, that have nothing running. It never
    takes the first sequence of an owner, so the first running sequence of all stays.
    """

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._groups: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._num_running = 0

    def started(self, seq: Sequence) -> None:
        self._num_running += 1
        self._groups[seq.request.id] += 1
        self._owners[seq.request.owner] += 1

    def stopped(self, seq: Sequence) -> None:
        self._num_running -= 1
        for counts, name in ((self._groups, seq.request.id), (self._owners, seq.request.owner)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def runs(self, request_id: str) -> bool:
        """Tell whether the request has a running sample."""
        return request_id in self._groups

    @property
    def pressing(self) -> bool:
        """Tell whether a request with nothing running waits while another one has more than one sample running."""
        waits = len(self._queue.groups) > len(self._groups)
        return waits and self._num_running > min(len(self._groups), len(self._owners))

    def next(self) -> Sequence:
        """Pick the next sequence to admit. In a priority, owners, then requests, with nothing running go first."""
        seqs = self._queue.seqs
        head = seqs[0]
        if len(self._queue.groups) == len(self._groups):
            return head  # every request runs
        alone = len(self._queue.owners) == len(self._owners)
        found: Sequence | None = None
        for seq in seqs:
            if seq.key[0] != head.key[0]:
                break
            if seq.request.owner not in self._owners:
                return seq
            if found is None and seq.request.id not in self._groups:
                found = seq
                if alone:  # every owner runs
                    break
        return found or head

    def displaced(self, seq: Sequence, running: list[Sequence]) -> Sequence | None:
        """Pick the running sequence that gives way to the waiting `seq`, if it is its turn: the last of the largest.

        None if nothing gives way: `seq` is a further sample, or nobody of its priority or below has more than one.
        """
        if seq.request.owner not in self._owners:
            sizes = [self._owners[other.request.owner] for other in running]
        elif seq.request.id not in self._groups:
            sizes = [self._groups[other.request.id] for other in running]
        else:
            return None
        best, most = None, 1
        for other, size in zip(running, sizes, strict=True):
            if size >= max(most, 2) and other.key[0] >= seq.key[0]:
                best, most = other, size
        return best

    def gain(self, running: list[Sequence], gain: Callable[[Sequence], int]) -> int:
        """Bound what displacing can free; `gain` tells what one sequence gives back."""
        several = len(self._owners) < self._num_running and len(self._queue.owners) > len(self._owners)
        return sum(gain(seq) for seq in running if several or self._groups[seq.request.id] > 1)

    def check(self, running: list[Sequence]) -> None:
        """Assert that the counts match `running`."""
        assert self._groups == Counter(seq.request.id for seq in running), "running samples are miscounted"
        assert self._owners == Counter(seq.request.owner for seq in running), "owners are miscounted"
