"""Ranks that Ray places on the nodes of a cluster: the tokens of one machine, and typed ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM
from quire.errors import EngineError
from tests.ranks.test_ranks import DRAWN, PROMPTS, answers
from tests.serve.running import start
from tests.tiny import write_checkpoint

ray = pytest.importorskip("ray", reason="pip install ray runs these")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own
RAY: dict[str, Any] = {"distributed_executor_backend": "ray", "threads": 1, "distributed_timeout_seconds": 60}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each, so that ranks must be on different ones."""
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    made.add_node(num_cpus=1)
    made.connect()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cluster") / "model")


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_on_two_nodes_give_the_bits_of_one_machine(
    cluster: Any, model: Path, layout: dict[str, int]
) -> None:
    with LLM(str(model), **layout) as alone:
        wanted = answers(alone, PROMPTS, DRAWN)
    with LLM(str(model), **RAY, **layout) as spread:
        assert answers(spread, PROMPTS, DRAWN) == wanted


def test_a_killed_rank_is_named(cluster: Any, model: Path) -> None:
    with LLM(str(model), **RAY, tensor_parallel_size=2) as llm:
        answers(llm, PROMPTS, DRAWN)
        ranks = [
            p for p in psutil.process_iter(["cmdline"]) if "quire.ranks.worker" in (p.info["cmdline"] or ())
        ]
        os.kill(max(ranks, key=lambda p: p.create_time()).pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            answers(llm, PROMPTS, DRAWN)


def test_a_server_answers_from_two_nodes(cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    server = start(model=str(model), maker="quire.client.start", pipeline_parallel_size=2, **RAY)
    try:
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 5
    finally:
        server.stop()


def test_a_killed_node_ends_requests_and_another_takes_its_place(cluster: Any, model: Path) -> None:
    with LLM(str(model), **RAY, tensor_parallel_size=2) as llm:
        wanted = answers(llm, PROMPTS, DRAWN)
        (raylet,) = (
            p
            for p in psutil.process_iter(["cmdline"])
            if is_raylet_of(cluster.worker_nodes, p.info["cmdline"])
        )
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        began = time.monotonic()
        with pytest.raises(EngineError, match="rank 1 "):
            answers(llm, PROMPTS, DRAWN)
        assert time.monotonic() - began < 300  # distributed_timeout_seconds
    cluster.add_node(num_cpus=1)
    with LLM(str(model), **RAY, tensor_parallel_size=2) as again:
        assert answers(again, PROMPTS, DRAWN) == wanted


def is_raylet_of(nodes: Any, cmdline: list[str] | None) -> bool:
    """Whether a process is the daemon of one of the nodes."""
    words = cmdline or [""]
    return words[0].endswith("raylet") and any(
        node.node_id in word or node.unique_id in word for node in nodes for word in words
    )


def test_a_cluster_without_room_says_so(cluster: Any, model: Path) -> None:
    options = {**RAY, "threads": 2, "distributed_timeout_seconds": 1}
    with pytest.raises(EngineError, match="Ray has no room for 2 ranks of 2 CPUs each"):
        LLM(str(model), **options, tensor_parallel_size=2)
