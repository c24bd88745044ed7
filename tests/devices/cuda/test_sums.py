"""Sums over ranks: gathered or through memory of all ranks, whole or by slices, the bits are those of one rule."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="the kernels of GPUs need triton")

from quire.devices.cuda import fuse, peers
from quire.devices.cuda.aot import RecordingLauncher
from quire.devices.cuda.jit import InterpretedLauncher
from quire.devices.cuda.kernels import norm
from quire.devices.cuda.kernels.ranks import Parts, sum_parts
from quire.devices.cuda.peers import MOST, PADS, PROGRAMS, ROOM, RankSums, SharedMemory
from quire.devices.cuda.target import INTERPRETER, TARGETS
from quire.devices.registry import make_backend
from quire.model.shard import Shard
from quire.weights.schemes import scheme
from tests.devices.cuda.test_fuse import ran
from tests.models import inspect_model, load_model
from tests.tiny import write_checkpoint

RUN = InterpretedLauncher()
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, WIDTH = 5, 77  # no multiple of the ranks, of blocks, or of a slice


def drawn(ranks: int, dtype: Any, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    parts = torch.randn(ranks, ROWS, WIDTH, generator=draw)
    parts *= 10.0 ** torch.randint(-3, 4, parts.shape, generator=draw)
    parts[:, 0, 0] = -0.0
    return parts.to(dtype)


def summed(parts: Any) -> Any:
    """The rule: float32, in the order of ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def memories(ranks: int) -> list[SharedMemory]:
    own = [torch.full((ROOM,), 0xFF, dtype=torch.uint8) for _ in range(ranks)]
    bases = [memory.data_ptr() for memory in own]
    return [SharedMemory(own[rank], bases, rank, None) for rank in range(ranks)]


def bits(x: Any) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize(
    ("sent", "kept"), [*((torch.float32, kept) for kept in TYPES), *((kind, kind) for kind in TYPES[1:])]
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_ways_have_the_bits_of_one_rule(ranks: int, sent: Any, kept: Any) -> None:
    shared = memories(ranks)
    for seed in range(2):  # in both halves
        parts = drawn(ranks, sent, seed)
        wanted = bits(summed(parts).to(kept))
        out = torch.full((ROWS, WIDTH), torch.nan, dtype=kept)
        sum_parts(RUN, Parts(parts, ranks), out)
        assert bits(out) == wanted
        shown = [memory.publish(RUN, parts[rank]) for rank, memory in enumerate(shared)]
        for part in shown:
            out.fill_(torch.nan)
            sum_parts(RUN, part, out)
            assert bits(out) == wanted
        shown = [memory.publish(RUN, parts[rank]) for rank, memory in enumerate(shared)]
        sizes = [memory.add_slice(RUN, part, out) for part, memory in zip(shown, shared, strict=True)]
        for memory, size in zip(shared, sizes, strict=True):
            out.fill_(torch.nan)
            memory.collect(RUN, size, out, out)
            assert bits(out) == wanted


@pytest.mark.parametrize("kept", TYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("first", [False, True])
def test_a_norm_adds_parts_with_the_bits_of_one_by_one(first: bool, kind: str, kept: Any) -> None:
    draw = torch.Generator().manual_seed(1)
    by, inner = (
        norm.NormTensors(kind, torch.randn(WIDTH, generator=draw), torch.randn(WIDTH, generator=draw), 1e-6)
        for _ in range(2)
    )
    other, parts = torch.randn(ROWS, WIDTH, generator=draw).to(kept), drawn(4, torch.float32)

    def normalized(x: Any, given: Parts | None) -> tuple[bytes, ...]:
        out, total = (torch.full((ROWS, WIDTH), torch.nan, dtype=kept) for _ in range(2))
        codes = torch.empty(ROWS, WIDTH, dtype=torch.int8), torch.empty(ROWS)
        added = norm.Sum(other, (1.0, 0.5), total, inner if first else None)
        norm.normalize(RUN, x, out, by, summed=added, codes=codes, parts=given)
        return bits(out), bits(total), bits(codes[0]), bits(codes[1])

    wanted = normalized(summed(parts).to(kept), None)
    assert normalized(parts[0], Parts(parts, 4)) == wanted
    shared = memories(4)
    for part in [memory.publish(RUN, parts[rank]) for rank, memory in enumerate(shared)]:
        assert normalized(parts[0], part) == wanted


def test_parts_of_a_step_lie_by_turns_in_two_halves() -> None:
    """A rank that is one sum ahead does not write where others still read."""
    shared, first, second = memories(2), drawn(2, torch.float32, 1), drawn(2, torch.float32, 2)
    shown = [memory.publish(RUN, first[rank]) for rank, memory in enumerate(shared)]
    shared[0].publish(RUN, second[0])
    out = torch.empty(ROWS, WIDTH)
    sum_parts(RUN, shown[1], out)
    assert bits(out) == bits(summed(first))


class Alone:
    rank, size = 0, 1

    def all_reduce(self, x: Any) -> None:
        """Add nobody's."""

    def abort(self, rank: int) -> None:
        """End nothing."""


def test_the_size_of_a_part_chooses_the_way() -> None:
    def ways(x: Any, ranks: int) -> list[str]:
        sums = RankSums(RUN, Alone(), ranks)
        sums._memory, sums._is_new = memories(1)[0], False
        found = list(sums.ways(x))
        return ["slices" if way is None else "gathered" if way.like is None else "read" for way in found]

    small, large, huge = (torch.zeros(1, size, dtype=torch.uint8) for size in (256 << 10, 1 << 20, MOST + 16))
    assert [ways(x, 2) for x in (small, large, huge)] == [["read"], ["read"], ["gathered"]]
    assert [ways(x, 8) for x in (small, large, huge)] == [["read"], ["slices"], ["gathered"]]


def test_all_kernels_of_sums_are_recorded() -> None:
    recorded = RecordingLauncher(TARGETS["sm_90"])
    x, out = (torch.empty(3, 64, dtype=kind, device="meta") for kind in (torch.float32, torch.bfloat16))
    sums = RankSums(recorded, None, 4)
    assert [part is not None and part.like is not None for part in sums.ways(x)] == [False, True, False]
    sums.add(x, out)
    assert Counter(one.kernel.fn.__name__ for one in recorded.launches.values()) == {
        "publish": 2, "add_parts": 2, "collect": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "quantization", "sums", "left"),
    [
        ("llama", None, 4, 1),
        ("gemma2", None, 4, 0),
        ("mixtral", None, 4, 1),
        ("olmo2", None, 2, 0),
        ("qwen3", "int8", 4, 1),
    ],
)
def test_sums_join_norms_with_the_bits_of_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, quantization: Any, sums: int, left: int
) -> None:
    """A rank whose other ranks add nothing, over each way in which parts pass."""
    model = write_checkpoint(tmp_path, family, "bfloat16", num_hidden_layers=2)
    backend = make_backend(threads=1, device="interpreter")
    shard = Shard(rank=0, size=2, peers=Alone())
    given = scheme(quantization) if quantization else None
    graph = load_model(model, backend, quantized=given, shard=shard).graph
    spec = inspect_model(model).kv_spec("bfloat16", shard)
    names, found = ran(backend, graph, spec)
    assert names["add_parts"] == left
    assert ran(backend, graph, spec, adapters=1)[1] == found
    with monkeypatch.context() as patched:
        patched.setattr(RankSums, "_made", lambda self, x: memories(1)[0])
        names, other = ran(backend, graph, spec)
        assert (names["publish"], names["collect"]) == (sums, 0)
        assert other == found
        patched.setattr(peers, "ONE_SHOT", {2: 0})
        names, other = ran(backend, graph, spec)
        assert (names["publish"], names["collect"]) == (2 * sums, sums)
        assert other == found
    monkeypatch.setattr(fuse, "PATTERNS", (fuse.norms_of_sums, fuse.codes_of_products))
    names, other = ran(backend, graph, spec)
    assert names["add_parts"] == sums
    assert other == found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_signal_all_others_and_wait_for_them(ranks: int) -> None:
    """Here the others have signalled before, so that nobody has to wait: once, and once one barrier ahead."""
    own = [torch.zeros(ROOM, dtype=torch.uint8) for _ in range(ranks)]
    stop = torch.zeros(1, dtype=torch.int32)
    pads = [memory[: 4 * PROGRAMS * ranks].view(torch.int32).view(PROGRAMS, ranks) for memory in own]
    memory = SharedMemory(own[0], [one.data_ptr() for one in own], 0, stop.data_ptr())
    x, every = torch.arange(5000, dtype=torch.float32), msgspec.structs.replace(INTERPRETER, processors=99)
    launch = InterpretedLauncher(every)
    for epoch, ahead in ((1, 0), (2, 1)):
        pads[0][:] = epoch + ahead
        shown = memory.publish(launch, x)
        assert all((pad[:, 0] == epoch).all() for pad in pads)
        assert (pads[0][:, 1:] == epoch + ahead).all()
        at = PADS + (epoch & 1) * MOST
        assert own[0][at : at + x.nbytes].view(torch.float32).equal(x)
        assert shown.ranks == ranks
    if ranks > 1:  # nobody answers: a rank that has gone ends the wait
        stop.fill_(1)
        memory.publish(RUN, x)


class Near:
    """Two ranks of one machine, which always agree."""

    rank, size = 0, 2
    stop = torch.zeros(1, dtype=torch.int32)

    def parts(self, x: Any) -> Any:
        return torch.stack([x, x])

    def registered(self, device: Any) -> str:
        return "quire"


def test_ranks_that_cannot_share_memory_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near: Any = Near()
    other: Any = Near()
    other.parts = lambda x: torch.stack([x, x + 1])  # another GPU, on another machine
    cpu, reached = torch.device("cpu"), []

    def reaches(own: int, index: int) -> bool:
        reached.append((own, index))
        return False

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert peers.shared_memory(other, cpu) is None
    assert "ranks gather parts of sums by NCCL" in caplog.text
    apart: Any = Near()
    apart.parts = lambda x: torch.stack([x, x + torch.tensor([1, 0])[: len(x)]])
    assert peers.shared_memory(apart, cpu) is None
    assert reached == [(0, 1)]

    def refuse(*given: Any, **named: Any) -> Any:
        raise RuntimeError("CUDA driver error: not supported\nmore")

    monkeypatch.setattr(peers.symmetric, "empty", refuse)
    monkeypatch.setattr(peers, "_files", peers._mapped)  # as for GPUs
    caplog.clear()
    assert peers.shared_memory(near, cpu) is None
    assert caplog.messages[-1].endswith("do not read each other's memory: CUDA driver error: not supported")
    monkeypatch.setattr(peers.symmetric, "empty", torch.empty)
    monkeypatch.setattr(peers.symmetric, "rendezvous", lambda own, group: Handle(own))
    found = peers.shared_memory(near, cpu)
    assert found is not None
    assert (found.rank, found.size) == (0, 2)


class Handle:
    def __init__(self, own: Any) -> None:
        self.own = own

    def get_buffer(self, rank: int, shape: Any, dtype: Any) -> Any:
        return self.own[:1]
