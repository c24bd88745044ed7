"""Shares of a model: they cover each weight once, and ranks that add their parts equal the whole model."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire import _native
from quire.devices.cpu.backend import NativeBackend
from quire.devices.exchanges import make_exchange, peers_over
from quire.devices.protocol import Backend, FloatArray, ModelInput, Peers
from quire.devices.reference.backend import ReferenceBackend
from quire.errors import ConfigError
from quire.model.load import open_files
from quire.model.shard import Shard, even
from tests.model.test_stages import BLOCK_SIZE, LIMITS, NUM_BLOCKS, steps, with_states
from tests.model.tiny_models import make_model
from tests.models import load_model
from tests.tiny import write_checkpoint

# Grouped heads, biases, fused tensors, ALiBi, parallel layers, sandwich norms, experts, sinks, latent attention,
# recurrences, chosen blocks and pools, compressed keys, streams.
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
    "lfm2",
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "minimax",
    "zamba2",
    "bailing_hybrid",
    "recurrent_gemma",
    "minimax_m3",
    "qwen4",
    "deepseek_v4",
    "glm5_next_text",
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


@contextmanager
def exchanging_peers(kind: Any, size: int) -> Iterator[list[Any]]:
    """Ranks that exchange messages."""
    pairs = {}
    for pair in combinations(range(size), 2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pairs[pair] = socket.create_connection(listener.getsockname()), listener.accept()[0]
    exchanges = [make_exchange(kind, rank, size, 60.0) for rank in range(size)]

    def connect(rank: int) -> None:
        own = {b: ends[0] for (a, b), ends in pairs.items() if a == rank}
        exchanges[rank].connect(own | {a: ends[1] for (a, b), ends in pairs.items() if b == rank}, 60.0)

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(connect, range(size)))
    yield [peers_over(exchange, rank, size) for rank, exchange in enumerate(exchanges)]
    for exchange in exchanges:
        exchange.close()


def run(model: Any, backend: Backend, inputs: list[ModelInput]) -> list[tuple[bytes, FloatArray, FloatArray]]:
    """The logits of each step, in pieces, and the final hidden states."""
    spec = model.spec.kv_spec("float32", model.shard)
    kv = backend.kv_cache(spec, NUM_BLOCKS, BLOCK_SIZE, 2 if spec.bytes_per_state(0) else 0)
    executable = backend.compile(model.graph, kv, LIMITS)
    found = []
    for step in inputs:
        pieces = [executable.run(with_states(step, spec)).numpy().copy()]
        for start in range(LIMITS.max_logit_rows, len(step.logit_rows_L), LIMITS.max_logit_rows):
            stop = min(start + LIMITS.max_logit_rows, len(step.logit_rows_L))
            pieces.append(executable.logits(start, stop).numpy().copy())
        logits = np.concatenate(pieces)
        found.append((logits.tobytes(), logits, executable.hidden().copy()))
    return found


def run_ranks(directory: Path, make: Callable[[], Backend], peers: list[Any], **options: Any) -> list[Any]:
    def one(rank: int) -> Any:
        backend = make()
        model = load_model(directory, backend, shard=Shard(rank, len(peers), peers[rank], **options))
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


@pytest.mark.parametrize(("kind", "size"), [("tcp", 4), ("gloo", 2)])
def test_messages_give_the_bits_of_shared_memory(directory: Path, kind: str, size: int) -> None:
    if kind == "gloo":
        pytest.importorskip("torch.distributed", reason="gloo comes with PyTorch")
    with native_peers(size) as peers:
        wanted = run_ranks(directory, lambda: NativeBackend(1), peers)
    with exchanging_peers(kind, size) as peers:
        found = run_ranks(directory, lambda: NativeBackend(1), peers)
    assert [bits for bits, _, _ in found[0]] == [bits for bits, _, _ in wanted[0]]


def test_reference_ranks_equal_the_whole(directory: Path) -> None:
    backend = ReferenceBackend()
    whole = run(load_model(directory, backend), backend, steps())
    group = ThreadPeers(2)
    check(run_ranks(directory, ReferenceBackend, [group.of(0), group.of(1)]), whole, 1e-5)


def run_stages(directory: Path, make: Callable[[], Backend], peers: list[Any], stages: int) -> list[Any]:
    """The last stage's results by rank; each stage and rank has loaded only its share."""

    def one(rank: int) -> Any:
        backend, hidden = make(), []
        for stage in range(stages):
            shard = Shard(rank, len(peers), peers[rank], stage, stages)
            model = load_model(directory, backend, shard=shard)
            if stage == stages - 1:
                return run(
                    model, backend, [replace(s, hidden_TD=h) for s, h in zip(steps(), hidden, strict=True)]
                )
            hidden = run_hidden(model, backend, hidden)
        return None

    if len(peers) == 1:
        return [one(0)]
    with ThreadPoolExecutor(len(peers)) as threads:
        return list(threads.map(one, range(len(peers))))


def run_hidden(model: Any, backend: Backend, before: list[FloatArray]) -> list[FloatArray]:
    """What a stage that does not end the model passes on."""
    spec = model.spec.kv_spec("float32", model.shard)
    kv = backend.kv_cache(spec, NUM_BLOCKS, BLOCK_SIZE, 2 if spec.bytes_per_state(0) else 0)
    executable, found = backend.compile(model.graph, kv, LIMITS), []
    for i, step in enumerate(steps()):
        hidden = before[i] if before else None
        bare = replace(step, hidden_TD=hidden, logit_rows_L=np.zeros(0, np.int32))
        executable.run(with_states(bare, spec))
        found.append(executable.hidden().copy())
    return found


def test_stages_are_bit_for_bit_the_whole(directory: Path) -> None:
    backend = NativeBackend(1)
    whole = run(load_model(directory, backend), backend, steps())
    for stages in (2, 3):
        (found,) = run_stages(directory, lambda: NativeBackend(1), [None], stages)
        for mine, theirs in zip(found, whole, strict=True):
            assert mine[0] == theirs[0]
            assert mine[2].tobytes() == theirs[2].tobytes()


def test_ranks_of_stages_equal_ranks_alone(directory: Path) -> None:
    with native_peers(2) as peers:
        alone = run_ranks(directory, lambda: NativeBackend(1), peers)
    with native_peers(2) as peers:
        staged = run_stages(directory, lambda: NativeBackend(1), peers, 2)
    for mine, theirs in zip(staged, alone, strict=True):
        assert [bits for bits, _, _ in mine] == [bits for bits, _, _ in theirs]


def test_stages_hold_their_layers_alone(tmp_path: Path) -> None:
    directory, backend = write_checkpoint(tmp_path / "model"), NativeBackend(1)
    spec = load_model(directory, backend).spec
    stages = [load_model(directory, backend, shard=Shard(stage=stage, stages=2)) for stage in (0, 1)]
    assert [spec.stage(model.shard) for model in stages] == [range(2), range(2, 3)]
    assert [model.decoder.embedding is None for model in stages] == [False, True]
    assert [model.decoder.head is None for model in stages] == [True, False]
    assert [list(model.decoder.layers) for model in stages] == [[0, 1], [2]]
    assert sum(model.weight_bytes for model in stages) == load_model(directory, backend).weight_bytes
    with pytest.raises(ConfigError, match="at most 3 stages"):
        load_model(directory, backend, shard=Shard(stages=4))


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
            shares = [spec.layers[0].mixer.heads(Shard(rank, size)) for rank in range(size)]
            assert [head for q, _ in shares for head in q] == list(range(heads))
            for q, owned in shares:
                assert len(q) % len(owned) == 0
                assert [head // (heads // kv) for head in q] == [
                    owned.start + i // (len(q) // len(owned)) for i in range(len(q))
                ]


def make_checkpoint(directory: Path, family: str, **config: Any) -> Path:
    """A tiny checkpoint of any family."""
    if family != "longcat_flash":
        return write_checkpoint(directory, family, **config)
    model = make_model(family, vocab_size=256)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(directory)
    return directory


@pytest.fixture(params=(*FAMILIES, "bitnet", "qwen2_moe", "longcat_flash", "olmo2"), scope="module")
def any_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("any") / "model", request.param)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exact_ranks_have_the_bits_of_one(any_directory: Path, size: int) -> None:
    backend = NativeBackend(1)
    model = load_model(any_directory, backend)
    if size > 2 and size not in fitting(model.spec, exact=True):
        pytest.skip("the model cannot be divided so")
    whole = run(model, backend, steps())
    with native_peers(size) as peers:
        ranks = run_ranks(any_directory, lambda: NativeBackend(1), peers, exact=True)
    for found in ranks:
        assert [bits for bits, _, _ in found] == [bits for bits, _, _ in whole]


def fitting(spec: Any, **options: Any) -> list[int]:
    sizes = []
    for size in range(1, 9):
        try:
            spec.check_share(Shard(size=size, **options))
            sizes.append(size)
        except ConfigError:
            continue
    return sizes


@pytest.mark.parametrize("family", ["olmo2", "bitnet", "longcat_flash"])
def test_what_looks_at_all_heads_or_returns_inputs_is_divided_too(family: str, tmp_path: Path) -> None:
    directory, backend = make_checkpoint(tmp_path / "model", family), NativeBackend(1)
    whole = run(load_model(directory, backend), backend, steps())
    with native_peers(2) as peers:
        check(run_ranks(directory, lambda: NativeBackend(1), peers), whole, 1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "longcat_flash"])
@pytest.mark.parametrize("size", [2, 3])
def test_whole_experts_are_spread(family: str, size: int, tmp_path: Path) -> None:
    config = (
        {"num_attention_heads": 6, "num_key_value_heads": 3} if size == 3 and family != "deepseek_v3" else {}
    )
    directory, backend = make_checkpoint(tmp_path / "model", family, **config), NativeBackend(1)
    model = load_model(directory, backend)
    whole = run(model, backend, steps())
    with native_peers(size) as peers:
        check(run_ranks(directory, lambda: NativeBackend(1), peers, whole_experts=True), whole, 1e-5)
    mixture = model.spec.layers[-1].mixture or model.spec.layers[0].mixture
    assert mixture is not None
    shares = [mixture.experts(Shard(rank, size, whole_experts=True)) for rank in range(size)]
    assert [e for own in shares for e in own] == list(range(mixture.routing.num_experts))


def test_a_model_that_cannot_be_divided_is_refused_with_what_fits(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    outline = NativeBackend(1).outline()
    with pytest.raises(ConfigError, match="can be divided among 1, 2"):
        open_files(directory).outline(outline, Shard(0, 61))
    with pytest.raises(ConfigError, match="fewer than 2 experts"):
        open_files(directory).outline(outline, Shard(0, 2, whole_experts=True))


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


def test_ranks_that_compute_different_steps_notice() -> None:
    with native_peers(2, patience=5) as peers, ThreadPoolExecutor(2) as threads:
        sums = [threads.submit(peers[r].all_reduce, np.zeros(n, np.float32)) for r, n in enumerate((4, 8))]
        with pytest.raises(RuntimeError, match="computes another step"):
            list(map(Future.result, sums))


def test_a_rank_that_is_gone_or_silent_ends_the_wait() -> None:
    x = np.zeros(4, np.float32)
    with native_peers(2, patience=0.2) as peers, pytest.raises(RuntimeError, match="rank 1 has not answered"):
        peers[0].all_reduce(x)
    with native_peers(2) as peers:
        peers[0].abort(1)
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            peers[0].all_reduce(x)
