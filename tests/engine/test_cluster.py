"""Ranks that Ray places on the nodes of a cluster: the tokens of one machine, and typed ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import LLM
from quire.errors import EngineError
from tests.engine.test_ranks import DRAWN, PROMPTS, answers
from tests.tiny import write_checkpoint

ray = pytest.importorskip("ray", reason="pip install 'quire[ray]' runs these")
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
            p for p in psutil.process_iter(["cmdline"]) if "quire.engine.rank" in (p.info["cmdline"] or ())
        ]
        os.kill(max(ranks, key=lambda p: p.create_time()).pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
            answers(llm, PROMPTS, DRAWN)


def test_a_cluster_without_room_says_so(cluster: Any, model: Path) -> None:
    options = {**RAY, "threads": 2, "distributed_timeout_seconds": 1}
    with pytest.raises(EngineError, match="Ray has no room for 2 ranks of 2 CPUs each"):
        LLM(str(model), **options, tensor_parallel_size=2)
