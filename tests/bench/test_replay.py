"""A trace replayed on a real server: every request completes, and the cache finds what an infinite one would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serve import ServeOptions, run
from tests.serve.running import Server, start


@pytest.fixture(scope="module")
def server(tiny_model: Callable[..., str]) -> Iterator[Server]:
    running = start(maker="quire.client.start", model=tiny_model("llama"), num_gpu_blocks_override=4096)
    yield running
    running.stop()


def replay(server: Server, tmp_path: Path, trace: Path, **options: Any) -> dict[str, Any]:
    run(
        ServeOptions(
            base_url=server.url,
            dataset_name="timed_trace",
            dataset_path=str(trace),
            trace_time_scale=0,
            ignore_eos=True,
            save_result=True,
            save_detailed=True,
            result_dir=str(tmp_path),
            result_filename="r.json",
            disable_tqdm=True,
            **options,
        )
    )
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return result


def test_one_after_the_other_the_cache_is_ideal(server: Server, tmp_path: Path) -> None:
    rows = [
        {"timestamp": i, "input_length": 30 + 7 * i, "output_length": 2 + i % 3, "hash_ids": ids}
        for i, ids in enumerate(
            ([0, 1], [0, 1, 2], [3, 4, 5], [0, 6, 7, 8], [3, 4, 9, 10], [0, 1, 2, 11, 12])
        )
    ]
    for row in rows:
        row["input_length"] = 16 * (len(row["hash_ids"]) - 1) + 5
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = replay(server, tmp_path, trace, timed_trace_chunk_hash_size=16, max_concurrency=1, seed=1)
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["output_lens"] == [row["output_length"] for row in rows]
    assert result["input_lens"] == [row["input_length"] for row in rows]
    assert result["ideal_prefix_hit_rate"] > 0.3
    assert result["prefix_hit_rate"] == pytest.approx(result["ideal_prefix_hit_rate"], abs=1e-12)


def test_a_real_trace(server: Server, tmp_path: Path, data: Path) -> None:
    trace = data / "traces-mooncake" / "arxiv_trace_first1000.jsonl"
    options = {"num_prompts": 40, "trace_length_scale": 1 / 256}
    result = replay(server, tmp_path, trace, max_concurrency=1, seed=2, **options)
    assert (result["completed"], result["failed"]) == (40, 0)
    assert result["prefix_hit_rate"] == pytest.approx(result["ideal_prefix_hit_rate"], abs=1e-12)
    together = replay(server, tmp_path, trace, seed=3, **options)
    assert (together["completed"], together["failed"]) == (40, 0)
    assert together["output_lens"] == result["output_lens"]
    assert 0 < together["prefix_hit_rate"] <= together["ideal_prefix_hit_rate"]
