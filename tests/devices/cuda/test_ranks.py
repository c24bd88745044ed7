"""Ranks on a device: tensors pass between them where they are, and bits do not depend on the number of ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.devices.cuda import graphs
from quire.devices.cuda.hidden import CudaRows
from quire.devices.exchanges import make_device_peers, make_device_stage, passes_tensors
from quire.devices.torch.exchange import TorchPeers, joined, summed
from quire.errors import EngineError
from tests.ranks.test_ranks import rank_processes
from tests.tiny import write_checkpoint
from tests.waiting import wait_until

PROMPTS = [list(b"Once upon a"), list(b"A dog")]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
MANY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def peers_of(rank: int, size: int) -> Any:
    return make_device_peers("interpreter", rank, size, 60)


def together(size: int, work: Callable[[Any], Any], make: Callable[[int, int], Any] = peers_of) -> list[Any]:
    """What each rank gets, in threads with connections of their own."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for a in range(size):
            for b in range(a + 1, size):
                links[b][a] = socket.create_connection(listener.getsockname())
                links[a][b] = listener.accept()[0]

    def run(rank: int) -> Any:
        peers = make(rank, size)
        peers.connect(links[rank], 60)
        found = work(peers)
        peers.close()
        return found

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 4])
def test_tensors_add_in_float32_in_the_order_of_ranks(size: int, dtype: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(size, 7, 33, generator=draw).to(dtype)
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()

    def work(peers: Any) -> Any:
        host = parts[peers.rank].float().reshape(-1).numpy().copy()
        peers.all_reduce(host)
        empty = summed(parts[peers.rank][:0], peers)
        return summed(parts[peers.rank], peers), torch.from_numpy(host), len(empty)

    for found, host, none in together(size, work):
        assert found.equal(wanted)
        assert host.equal(wanted.reshape(-1))
        assert none == 0


def test_columns_of_unequal_widths_lie_side_by_side() -> None:
    whole, widths = torch.arange(60).reshape(4, 15).to(torch.bfloat16), [6, 5, 4]
    parts = whole.split(widths, 1)
    for found in together(3, lambda peers: joined(parts[peers.rank], widths, peers)):
        assert found.equal(whole)


def test_a_rank_that_is_gone_ends_the_others() -> None:
    def work(peers: Any) -> Any:
        if peers.rank:
            return None
        peers.abort(1)
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            summed(torch.ones(1, 3), peers)
        return None

    together(2, work)
    with pytest.raises(RuntimeError, match="not connected"):
        summed(torch.ones(1, 3), make_device_peers("interpreter", 0, 2, 1))


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_stages_pass_tensors_in_the_type_that_the_next_one_keeps(sent: Any, kept: Any) -> None:
    steps = [torch.randn(count, 33, generator=torch.Generator().manual_seed(count)) for count in (1, 7, 2)]

    def stage(rank: int, size: int) -> Any:
        return make_device_stage("interpreter", bool(rank), 60)

    def work(link: Any) -> Any:
        if not link.rank:
            for rows in steps:
                link.send(CudaRows(rows.to(sent)))
            link.send(steps[0].numpy())
            return None
        found = [torch.full((len(rows) + 3, 33), -1.0).to(kept) for rows in (*steps, steps[0])]
        for rows in found:
            link.receive(len(rows) - 3).fill(rows[:-3])
        return found

    _, found = together(2, work, stage)
    for rows, wanted in zip(found, [*(rows.to(sent) for rows in steps), steps[0]], strict=True):
        assert rows[:-3].equal(wanted.to(kept))
        assert (rows[-3:] == -1).all()


def test_a_stage_that_is_gone_ends_the_next() -> None:
    link: Any = make_device_stage("interpreter", True, 1)
    rows = torch.ones(1, 3)
    with pytest.raises(RuntimeError, match="not connected"):
        link.fill(rows)
    with pytest.raises(RuntimeError, match="not connected"):
        link.send(rows.numpy())

    def work(link: Any) -> None:
        if link.rank:
            link.abort(3)
            with pytest.raises(RuntimeError, match="rank 3 has ended"):
                link.fill(rows)

    together(2, work, lambda rank, size: make_device_stage("interpreter", bool(rank), 60))


def test_ranks_of_gpus_pass_tensors_and_those_of_a_cpu_arrays() -> None:
    for device in ("cuda:1", "interpreter"):
        assert passes_tensors(device, "auto")
    for device, backend in (("cpu", "auto"), ("cpu", "torch"), ("auto", "torch"), ("mps", "auto")):
        assert not passes_tensors(device, backend)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    return write_checkpoint(tmp_path_factory.mktemp("ranks"), "qwen3", "bfloat16", **small)


def answers(model: Path, params: SamplingParams = PARAMS, **options: Any) -> Any:
    own = {"device": "interpreter", "max_model_len": 64, "num_gpu_blocks_override": 24, "block_size": 16}
    with LLM(str(model), threads=2, **{**own, **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    samples = [output.outputs[0] for output in outputs]
    return [
        ([*one.token_ids], [{t: p.logprob for t, p in place.items()} for place in one.logprobs or ()])
        for one in samples
    ]


def test_bits_do_not_depend_on_the_number_of_ranks(model: Path) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    alone = answers(model)
    for layout in (
        {"tensor_parallel_size": 2, "exact_across_ranks": True},
        {"tensor_parallel_size": 4, "exact_across_ranks": True, "max_num_batched_tokens": 7},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "exact_across_ranks": True},
    ):
        assert answers(model, **layout) == alone, layout


def test_tokens_stay_on_the_device_between_overlapping_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    drawn = SamplingParams(temperature=1, seed=3, max_tokens=5, ignore_eos=True)
    alone = answers(model, drawn, async_scheduling=False)
    shared: list[int] = []

    def share(self: Any, x: Any) -> None:
        shared.append(len(x))
        own_share(self, x)

    own_share = TorchPeers.share
    monkeypatch.setattr(TorchPeers, "share", share)
    for layout in (
        {"tensor_parallel_size": 2, "exact_across_ranks": True},
        {
            "tensor_parallel_size": 2,
            "exact_across_ranks": True,
            "enforce_eager": True,
            "max_num_batched_tokens": 7,
        },
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "exact_across_ranks": True},
    ):
        shared.clear()
        assert answers(model, drawn, **layout) == alone, layout
        assert bool(shared) == ("pipeline_parallel_size" not in layout)


def test_a_rank_that_ends_ends_requests(model: Path) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    before = rank_processes()
    own = {"device": "interpreter", "max_model_len": 64, "num_gpu_blocks_override": 24, "block_size": 16}
    for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with LLM(str(model), threads=2, **own, **layout) as llm:
            (rank,) = rank_processes() - before
            killer = threading.Timer(1, rank.kill)
            killer.start()
            long = SamplingParams(max_tokens=50, ignore_eos=True)
            with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
                llm.generate([{"prompt_token_ids": p} for p in PROMPTS * 8], long, use_tqdm=False)
            killer.join()
    assert rank_processes() == before


def test_ranks_that_add_give_the_tokens_of_one_with_graphs_and_without(model: Path) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    tokens = [ids for ids, _ in answers(model, params)]
    found = answers(model, params, tensor_parallel_size=2)
    assert [ids for ids, _ in found] == tokens
    assert answers(model, params, tensor_parallel_size=2, enforce_eager=True) == found


def test_a_rank_that_ends_ends_a_replay_that_waits_for_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the kernels of GPUs need triton")
    before, replays, known = rank_processes(), list[str](), graphs.Graphs.launch
    own = {"device": "interpreter", "max_model_len": 64, "num_gpu_blocks_override": 24, "block_size": 16}
    with LLM(str(model), threads=2, **own, tensor_parallel_size=2) as llm:
        (rank,) = rank_processes() - before

        def launch(self: Any, key: Any, work: Any) -> None:
            if key in self._replays and key[0] == "body":
                replays.append(key)
                if len(replays) == 2:
                    rank.kill()
                    wait_until(lambda: rank not in rank_processes())  # without taking its exit status
            known(self, key, work)

        monkeypatch.setattr(graphs.Graphs, "launch", launch)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            llm.generate([{"prompt_token_ids": p} for p in PROMPTS], MANY, use_tqdm=False)
    assert len(replays) >= 2
    assert rank_processes() == before


def test_ranks_of_plain_torch_give_its_tokens(model: Path) -> None:
    for way in ({}, {"batch_invariant": True, "dtype": "float32"}):
        plain = {"device": "cpu", "backend": "torch", **way}
        alone, found = answers(model, **plain), answers(model, **plain, tensor_parallel_size=2)
        assert [ids for ids, _ in found] == [ids for ids, _ in alone]
    exact = answers(model, **plain, tensor_parallel_size=2, exact_across_ranks=True)
    assert [ids for ids, _ in exact] == [ids for ids, _ in alone]
