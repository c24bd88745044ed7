"""Ranks on NUMA nodes: which cores they may use, by options and by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.config import DeviceConfig
from quire.errors import ConfigError
from quire.ranks.numa import bind, bind_rank


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores that processes were bound to. They may use cores 0 to 7."""
    seen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: seen.append(set(cores)))
    return seen


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Four nodes of two cores each, and one whose cores may not be used."""
    for number, cores in enumerate(("0,4", "1,5", "2,6", "3,7", "8-9")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    return tmp_path


def test_ranks_are_spread_over_nodes(bound: list[set[int]], nodes: Path) -> None:
    for ranks, wanted in (
        (2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (8, [{0, 4}, {0, 4}, {1, 5}, {1, 5}, {2, 6}, {2, 6}, {3, 7}, {3, 7}]),
    ):
        bound.clear()
        for rank in range(ranks):
            bind_rank(DeviceConfig(), rank, ranks, nodes)
        assert bound == wanted


def test_options_prevail(bound: list[set[int]], nodes: Path) -> None:
    bind_rank(DeviceConfig(numa_bind_nodes=("3",)), 0, 2, nodes)
    bind_rank(DeviceConfig(numa_bind_cpus=("0-1",)), 1, 2, nodes)
    bind(DeviceConfig(numa_bind=True), nodes)
    assert bound == [{3, 7}, {0, 1}, {0, 4}]
    with pytest.raises(ConfigError, match="none of the cores"):
        bind(DeviceConfig(numa_bind_nodes=("4",)), nodes)
    with pytest.raises(ConfigError, match="there is no node '9'"):
        bind(DeviceConfig(numa_bind_nodes=("9",)), nodes)


def test_one_rank_or_one_node_is_left_alone(bound: list[set[int]], nodes: Path, tmp_path: Path) -> None:
    bind_rank(DeviceConfig(), 0, 1, nodes)
    bind_rank(DeviceConfig(), 0, 2, tmp_path / "none")
    assert not bound
