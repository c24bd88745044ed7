"""The block pool against a plain model of tables, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import EngineError
from quire.sched import BlockPool

SIZE = 8


class AgainstTables(RuleBasedStateMachine):
    """Tables take, share and drop blocks; an index names some and forgets the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.tables: list[list[int]] = []
        self.named: set[int] = set()
        self.cached: list[int] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.tables.append(self.pool.allocate(count))
            assert len(self.tables[-1]) == count
        else:
            with pytest.raises(EngineError, match="evict"):
                self.pool.allocate(count)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        held = {block for table in self.tables for block in table}
        if held | set(self.cached):
            block = data.draw(st.sampled_from(sorted(held | set(self.cached))))
            self.pool.acquire(block)
            self.tables.append([block])
            if block in self.cached:
                self.cached.remove(block)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            for block in table:
                self.pool.release(block)
                if block in self.named and not any(block in t for t in self.tables):
                    self.cached.append(block)

    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        held = sorted({block for table in self.tables for block in table})
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.name(block)
            self.named.add(block)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(0, SIZE - 1))
        self.pool.touch(block)
        if block in self.cached:
            self.cached.remove(block)
            self.cached.append(block)

    @rule()
    def forget_oldest(self) -> None:
        if self.cached:
            block = self.cached.pop(0)
            assert self.pool.oldest_cached() == block
            self.pool.forget(block)
            self.named.discard(block)

    @invariant()
    def agree(self) -> None:
        self.pool.check(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_available == SIZE - len(held)
        assert self.pool.count_cached(range(SIZE)) == SIZE - len(held)
        alone = [b for b in held if sum(table.count(b) for table in self.tables) == 1]
        assert self.pool.count_exclusive(range(SIZE)) == len(alone)
        assert {b for b in range(SIZE) if self.pool.is_named(b)} == self.named


AgainstTables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstTables = AgainstTables.TestCase


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(EngineError, match="at least 1 block"):
        BlockPool(0)
    with pytest.raises(EngineError, match="free"):
        pool.acquire(1 - block)
    with pytest.raises(EngineError, match="not in use"):
        pool.name(1 - block)
    pool.release(block)
    with pytest.raises(EngineError, match="more often"):
        pool.release(block)


def test_check_sees_a_leak() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.check([table])
    with pytest.raises(AssertionError, match="tables hold it"):
        pool.check([])
    with pytest.raises(AssertionError, match="tables hold it"):
        pool.check([table, table])
