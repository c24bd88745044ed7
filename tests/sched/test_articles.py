"""The pictures of batching and of block tables in the articles are what the scheduler does."""

from __future__ import annotations

import random

from fake_executor import FakeExecutor, request

from quire.config import SchedulerConfig
from quire.sched import Scheduler
from quire.types import ScheduledBatch

SLOTS = 4
# Output tokens of each request. The pictures end at step 5, where D and E, F, G have not ended.
LENGTHS = {"A": 4, "B": 2, "C": 3, "D": 5, "E": 9, "F": 9, "G": 9}


class Steps:
    """Runs requests of one prompt token and records which slot computes whom, step by step."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=SLOTS), 64, 3, 64, False)
        self.executor = FakeExecutor(64, 3, random.Random(0))
        self.owners: dict[int, str] = {}
        self.seen: list[str] = []

    def add(self, *names: str) -> None:
        for name in names:
            self.scheduler.add(request(name, [1], LENGTHS[name]))

    def step(self) -> ScheduledBatch:
        """One step, recorded as the picture draws it: an underscore is an empty slot."""
        batch = self.scheduler.schedule()
        assert batch is not None
        for slot in batch.freed:
            self.owners.pop(slot, None)
        self.owners |= {new.slot: new.request.id for new in batch.new}
        busy = {seq.slot for seq in batch.seqs}
        self.seen.append("".join(self.owners[slot] if slot in busy else "_" for slot in range(SLOTS)))
        self.scheduler.update(batch, self.executor.step(batch))
        return batch


def test_a_static_batch_waits_for_its_longest() -> None:
    """Requests that come only when all others have ended leave slots empty: C, B and A wait for D."""
    steps = Steps()
    steps.add("A", "B", "C", "D")
    while steps.scheduler.has_work:
        steps.step()
    assert steps.seen == ["ABCD", "ABCD", "A_CD", "A__D", "___D"]


def test_a_waiting_request_takes_a_free_slot() -> None:
    steps = Steps()
    steps.add(*LENGTHS)
    for _ in range(5):
        steps.step()
    assert steps.seen == ["ABCD", "ABCD", "AECD", "AEFD", "GEFD"]


def test_six_tokens_lie_in_two_blocks_of_three() -> None:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=SLOTS), 8, 3, 24, False)
    executor = FakeExecutor(8, 3, random.Random(0))
    tables: dict[str, list[int]] = {}
    slots: dict[int, str] = {}
    scheduler.add(request("other", [1, 2, 3], 8))
    scheduler.add(request("weather", [5, 6, 7], 4))
    for _ in range(4):  # "weather" grows to six tokens while "other" takes blocks between its own
        batch = scheduler.schedule()
        assert batch is not None
        slots |= {new.slot: new.request.id for new in batch.new}
        for seq in batch.seqs:
            tables.setdefault(slots[seq.slot], []).extend(seq.new_blocks)
        scheduler.update(batch, executor.step(batch))
    table = tables["weather"]
    assert len(table) == 2
    assert len({*table, *tables["other"]}) == len(table) + len(tables["other"])
    assert table[1] != table[0] + 1, "the blocks need not be neighbours"
