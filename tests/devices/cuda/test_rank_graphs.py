"""Graphs that hold the sums of ranks: replays have the bits of launches one by one, whichever ranks have graphs.

Ranks are threads of which one runs at a time, until it meets the others: where a part is published, and at gathers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

import msgspec
import torch

from quire.devices.cuda import peers
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels.ranks import publish
from quire.devices.cuda.launch import Launch
from quire.devices.cuda.target import INTERPRETER, Target
from quire.devices.torch.exchange import TorchPeers
from quire.model.shard import Shard
from tests.devices.cuda.test_graphs import STEPS, outputs
from tests.tiny import write_checkpoint

GRAPHS, WIDTH, SOME = (2, 4, 8, 16), 64, STEPS[1:7]
BODIES = {("body", size, None, 0) for size in (4, 8)}


class Meeting:
    """Ranks that run in turn."""

    def __init__(self, size: int) -> None:
        self.turn, self._all = threading.Lock(), threading.Barrier(size)
        self.shown: list[Any] = [None] * size

    def __call__(self) -> None:
        self.turn.release()
        try:
            self._all.wait(300)
        finally:
            self.turn.acquire()

    def leave(self) -> None:
        """End the others' waiting."""
        self._all.abort()


class Near(TorchPeers):
    """Peers that show tensors to each other."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(rank, len(meeting.shown), 60)
        self._meeting = meeting

    def parts(self, x: Any) -> Any:
        self._meeting.shown[self.rank] = x.clone()
        self._meeting()
        found = torch.stack(self._meeting.shown)
        self._meeting()
        return found

    def share(self, x: Any) -> None:
        x.copy_(self.parts(x)[0])


class Launches:
    """Meets the other ranks where a kernel would wait for them."""

    def __init__(self, meeting: Meeting, target: Target) -> None:
        self.target, self.meeting, self.published = target, meeting, 0
        self._run = InterpretedLauncher(target)

    def __call__(self, launch: Launch) -> None:
        if launch.kernel is not publish:
            return self._run(launch)
        constants = {**launch.constants, "WAITS": False}
        self._run(dataclasses.replace(launch, constants=constants))
        self.published += 1
        self.meeting()
        return None


def of_ranks(
    model: Path, size: int, sizes: tuple[int, ...], change: Callable[[int, Any], None] | None = None,
    target: Target = INTERPRETER, steps: Any = None,
) -> list[tuple[list[Any], Any]]:  # fmt: skip
    """What `outputs` gives to each rank."""
    meeting = Meeting(size)

    def work(rank: int) -> Any:
        shard = Shard(rank=rank, size=size, peers=Near(meeting, rank))
        with meeting.turn:
            try:
                return outputs(
                    model, sizes, Launches(meeting, target), steps or SOME, shard=shard,
                    change=bool if change is None else partial(change, rank),
                )  # fmt: skip
            except BaseException:
                meeting.leave()
                raise

    with ThreadPoolExecutor(size) as threads:
        return [one.result() for one in [threads.submit(work, rank) for rank in range(size)]]


def bits(found: list[tuple[list[Any], Any]]) -> list[Any]:
    return [of_rank for of_rank, _ in found]


def bodies(executable: Any) -> set[Any]:
    return {key for key in executable._graphs._replays if key[0] == "body"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_key_value_heads": 4}
    return write_checkpoint(tmp_path_factory.mktemp("rank_graphs"), "qwen3", "bfloat16", **config)


@pytest.fixture(scope="module")
def eager(model: Path) -> list[Any]:
    return bits(of_ranks(model, 2, ()))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("slices", [False, True])
def test_one_graph_holds_all_layers_with_their_sums(
    model: Path, monkeypatch: pytest.MonkeyPatch, size: int, slices: bool
) -> None:
    if slices:
        monkeypatch.setattr(peers, "ONE_SHOT", {2: 0, 4: 0})
    found, wanted = (of_ranks(model, size, sizes) for sizes in (GRAPHS, ()))
    assert bits(found) == bits(wanted)
    for (_, executable), (_, other) in zip(found, wanted, strict=True):
        assert bodies(executable) == BODIES
        run, alone = executable._graphs.run._run, other._graphs.run
        assert run.published == alone.published == len(SOME) * 4 * (1 + slices)


def test_a_rank_that_captures_nothing_computes_with_those_that_do(
    model: Path, monkeypatch: pytest.MonkeyPatch, eager: list[Any]
) -> None:
    monkeypatch.setattr(peers, "ONE_SHOT", {2: 0})  # slices are of all rows, with those of the padding

    def refuse(rank: int, executable: Any) -> None:
        if rank == 0:
            executable._graphs._capture = lambda work: work()  # and returns no graph

    found = of_ranks(model, 2, GRAPHS, refuse)
    assert bits(found) == eager
    assert [bodies(executable) for _, executable in found] == [set(), BODIES]


def test_a_rank_whose_graph_has_no_room_for_a_step_pads_it_as_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ONE_SHOT", {2: 0})
    model = write_checkpoint(tmp_path, "llama", "bfloat16", num_hidden_layers=1)
    wide, steps = msgspec.structs.replace(INTERPRETER, processors=32), [({0: 300}, [299]), *SOME]
    sizes: list[list[tuple[int, bool]]] = [[], []]

    def watch(rank: int, executable: Any) -> None:
        known = executable._filled
        if rank == 0:
            executable._closed = executable._closed[:0]

        def filled(*about: Any) -> Any:
            step = known(*about)
            sizes[rank].append((step.size, step is executable._padded.get(step.size)))
            return step

        executable._filled = filled

    found = of_ranks(model, 2, GRAPHS, watch, wide, steps)
    assert bits(found) == bits(of_ranks(model, 2, (), target=wide, steps=steps))
    assert [size for size, _ in sizes[0]] == [size for size, _ in sizes[1]]
    assert [kept for _, kept in sizes[0]] != [kept for _, kept in sizes[1]]


def test_sums_that_are_too_large_for_the_memory_cut_graphs(
    model: Path, monkeypatch: pytest.MonkeyPatch, eager: list[Any]
) -> None:
    monkeypatch.setattr(peers, "MOST", 4 * 4 * WIDTH)  # of four rows
    cut = of_ranks(model, 2, GRAPHS)
    assert bits(cut) == eager
    for _, executable in cut:
        assert {key for key in bodies(executable) if key[1] == 4} == {("body", 4, None, 0)}
        assert len([key for key in bodies(executable) if key[1] == 8]) == 5
