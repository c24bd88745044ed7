"""Shares of a model: they cover each weight once, and ranks that add their parts equal the whole model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.protocol import Backend, FloatArray, ModelInput, Peers
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ConfigError
from quire.model.load import load_model, outline_model
from quire.model.shard import Shard, even
from tests.model.test_stages import BLOCK_SIZE, LIMITS, NUM_BLOCKS, steps
from tests.tiny import write_checkpoint

# Grouped heads, biases, fused tensors, ALiBi, parallel layers, sandwich norms, experts, sinks, latent attention.
FAMILIES = (
    "llama",
    "qwen2",
    "gpt2",
    "bloom",
    "falcon",
    "gemma3",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "phi3",
)


class ThreadPeers:
    """Ranks that are threads: the plain meaning of `Peers`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int) -> Peers:
        return _ThreadPeer(self, rank)

    def abort(self) -> None:
        self._barrier.abort()

    def add(self, rank: int, x: FloatArray) -> None:
        self._parts[rank] = x.copy()
        self._barrier.wait()
        total = self._parts[0].copy()
        for part in self._parts[1:]:
            total += part
        x[:] = total
        self._barrier.wait()


class _ThreadPeer:
    def __init__(self, group: ThreadPeers, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def all_reduce(self, x: FloatArray) -> None:
        self._group.add(self.rank, x)

    def abort(self, rank: int) -> None:
        self._group.abort()


@contextmanager
def native_peers(size: int, patience: float = 60.0) -> Iterator[list[Any]]:
    fd = os.memfd_create("test-ranks")
    try:
        os.truncate(fd, _native.Peers.bytes(size))
        yield [_native.Peers(fd, rank, size, patience) for rank in range(size)]
    finally:
        os.close(fd)


def run(model: Any, backend: Backend, inputs: list[ModelInput]) -> list[tuple[bytes, FloatArray, FloatArray]]:
    """The logits of each step, in pieces, and the final hidden states."""
    kv = backend.kv_cache(model.shard.kv_spec(model.spec, "float32"), NUM_BLOCKS, BLOCK_SIZE)
    executable = backend.compile(model.graph, kv, LIMITS)
    found = []
    for step in inputs:
        pieces = [executable.run(step).numpy().copy()]
        for start in range(LIMITS.max_logit_rows, len(step.logit_rows_L), LIMITS.max_logit_rows):
            stop = min(start + LIMITS.max_logit_rows, len(step.logit_rows_L))
            pieces.append(executable.logits(start, stop).numpy().copy())
        logits = np.concatenate(pieces)
        found.append((logits.tobytes(), logits, executable.hidden().copy()))
    return found


def run_ranks(directory: Path, make: Callable[[], Backend], peers: list[Any], **options: Any) -> list[Any]:
    def one(rank: int) -> Any:
        backend = make()
        model = load_model(directory, backend, shard=Shard(rank, len(peers), peers[rank]), **options)
        return run(model, backend, steps())

    with ThreadPoolExecutor(len(peers)) as threads:
        return list(threads.map(one, range(len(peers))))


def check(ranks: list[Any], whole: list[Any], tolerance: float) -> None:
    for of_step in zip(whole, *ranks, strict=True):
        wanted, *found = of_step
        assert len({bits for bits, _, _ in found}) == 1, "ranks have different logits"
        for mine, theirs in ((found[0][1], wanted[1]), (found[0][2], wanted[2])):
            largest = float(np.abs(theirs).max(initial=0.0))
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * largest)


@pytest.fixture(params=FAMILIES, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("shards") / "model", request.param)


@pytest.mark.parametrize("size", [2, 4])
def test_native_ranks_equal_the_whole(directory: Path, size: int) -> None:
    backend = NativeBackend(1)
    whole = run(load_model(directory, backend), backend, steps())
    with native_peers(size) as peers:
        check(run_ranks(directory, lambda: NativeBackend(1), peers), whole, 1e-5)


def test_reference_ranks_equal_the_whole(directory: Path) -> None:
    backend = ReferenceBackend()
    whole = run(load_model(directory, backend), backend, steps())
    group = ThreadPeers(2)
    check(run_ranks(directory, ReferenceBackend, [group.of(0), group.of(1)]), whole, 1e-5)


@pytest.mark.parametrize("total", [1, 2, 7, 28, 71])
def test_even_runs_cover_everything_once(total: int) -> None:
    for parts in range(1, 12):
        runs = even(total, parts)
        assert [i for run in runs for i in run] == list(range(total))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_heads_are_whole_groups_or_parts_of_one(tmp_path: Path) -> None:
    for heads, kv, sizes in ((28, 4, (2, 3, 8)), (9, 3, (2, 4)), (71, 1, (2, 5)), (14, 2, (4,))):
        config = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": 4, "hidden_size": 32}
        directory = write_checkpoint(tmp_path / f"{heads}-{kv}", **config)
        spec = load_model(directory, NativeBackend(1)).spec
        for size in sizes:
            shares = [Shard(rank, size).heads(spec, 0) for rank in range(size)]
            assert [head for q, _ in shares for head in q] == list(range(heads))
            for q, owned in shares:
                assert len(q) % len(owned) == 0
                assert [head // (heads // kv) for head in q] == [
                    owned.start + i // (len(q) // len(owned)) for i in range(len(q))
                ]


def test_a_model_that_cannot_be_divided_is_refused_with_what_fits(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    outline = NativeBackend(1).outline()
    with pytest.raises(ConfigError, match="can be divided among 1, 2"):
        outline_model(directory, outline, shard=Shard(0, 61))
    olmo = write_checkpoint(tmp_path / "olmo2", "olmo2")
    with pytest.raises(ConfigError, match="a norm of the queries and keys of all heads together"):
        outline_model(olmo, outline, shard=Shard(0, 2))


def test_sums_have_the_bits_of_the_plain_order() -> None:
    size, rng = 3, np.random.default_rng(1)
    with native_peers(size) as peers:
        for length in (1, 15, 1000, (1 << 18) + 7):
            parts = rng.standard_normal((size, length)).astype(np.float32)
            wanted = parts[0].copy()
            for part in parts[1:]:
                wanted += part
            with ThreadPoolExecutor(size) as threads:
                list(threads.map(_native.Peers.all_reduce, peers, parts))
            assert all(part.tobytes() == wanted.tobytes() for part in parts)


def test_a_rank_that_is_gone_or_silent_ends_the_wait() -> None:
    x = np.zeros(4, np.float32)
    with native_peers(2, patience=0.2) as peers, pytest.raises(RuntimeError, match="rank 1 has not answered"):
        peers[0].all_reduce(x)
    with native_peers(2) as peers:
        peers[0].abort(1)
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            peers[0].all_reduce(x)
