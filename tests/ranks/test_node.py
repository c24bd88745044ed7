"""Ranks on two machines, which are two processes here: found by address, the same bits, and typed ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM
from quire.errors import ConfigError, EngineError
from tests.ranks.test_ranks import DRAWN, GREEDY, PROMPTS, answers
from tests.tiny import write_checkpoint


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("nodes") / "model")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("known to both machines\n")
    return path


@contextmanager
def second_machine(model: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "quire.cli",
        "serve",
        str(model),
        "--node-rank",
        "1",
        "--headless",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.stderr is not None
        process.stderr.close()


def flags(**options: Any) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
)
def test_two_machines_give_the_bits_of_one(model: Path, secret: Path, layout: dict[str, int]) -> None:
    options = {"nnodes": 2, "master_port": free_port(), "distributed_secret_file": str(secret), **layout}
    with LLM(str(model), **layout) as alone:
        wanted = [answers(alone, PROMPTS, params) for params in (GREEDY, DRAWN)]
    with second_machine(model, *flags(**options)), LLM(str(model), **options) as spread:
        assert [answers(spread, PROMPTS, params) for params in (GREEDY, DRAWN)] == wanted


def test_gloo_gives_the_bits_of_shared_memory(model: Path) -> None:
    pytest.importorskip("torch.distributed", reason="gloo comes with PyTorch")
    with LLM(str(model), tensor_parallel_size=2) as shared:
        wanted = answers(shared, PROMPTS, DRAWN)
    with LLM(str(model), tensor_parallel_size=2, disable_custom_all_reduce=True) as gloo:
        assert answers(gloo, PROMPTS, DRAWN) == wanted


def test_a_killed_rank_of_another_machine_ends_requests_and_comes_back(model: Path, secret: Path) -> None:
    options = {
        "nnodes": 2,
        "pipeline_parallel_size": 2,
        "master_port": free_port(),
        "distributed_secret_file": str(secret),
        "distributed_timeout_seconds": 120,
    }
    with second_machine(model, *flags(**options)) as machine:
        with LLM(str(model), **options) as llm:
            wanted = answers(llm, PROMPTS, GREEDY)
            (rank,) = psutil.Process(machine.pid).children()
            os.kill(rank.pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"rank 1 at 127.0.0.1 closed its connection"):
                answers(llm, PROMPTS, GREEDY)
        with LLM(str(model), **options) as again:
            assert answers(again, PROMPTS, GREEDY) == wanted


def test_a_machine_that_would_compute_something_else_is_refused(model: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", hidden_size=32)
    options = {"nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    with (
        second_machine(other, *flags(**options)),
        pytest.raises(EngineError, match=r"rank 1 at 127\.0\.0\.1 would compute something else"),
    ):
        LLM(str(model), **options)


def test_machines_that_do_not_come_are_named(model: Path) -> None:
    began = time.monotonic()
    options = {"nnodes": 2, "tensor_parallel_size": 2, "master_port": free_port()}
    with pytest.raises(EngineError, match="rank 1 has not found the engine at 127"):
        LLM(str(model), distributed_timeout_seconds=1, **options)
    assert time.monotonic() - began < 300  # the default
    with second_machine(model, *flags(**options, distributed_timeout_seconds=1)) as machine:
        assert machine.wait(120) == 1
        assert machine.stderr is not None
        assert b"no engine answers at 127.0.0.1" in machine.stderr.read()


def test_machines_must_fit_the_ranks(model: Path) -> None:
    for options, said in (
        ({"nnodes": 2}, "nnodes 2 does not divide 1 ranks evenly"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank 2 must be below"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "the engine runs on machine 0"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "distributed_secret_file": "/no/such"},
            "distributed_secret_file",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(str(model), **options)
