"""Large answers do not make the process stop for collections of all objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quire.engine import garbage


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.mark.usefixtures("thresholds")
def test_collections_of_all_objects_are_rare() -> None:
    garbage.collect_rarely()
    before = full_collections()
    held = [[i] for i in range(500_000)]
    assert full_collections() == before, "half a million objects were visited"
    del held


@pytest.mark.usefixtures("thresholds")
def test_cycles_are_still_freed() -> None:
    garbage.collect_rarely()
    freed = 0

    class Node:
        def __del__(self) -> None:
            nonlocal freed
            freed += 1

    for _ in range(50_000):
        node = Node()
        node.self = node  # type: ignore[attr-defined]
    assert freed > 25_000
