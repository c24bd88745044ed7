"""The counts that dashboards rely on, the ones vLLM's own test asserts first."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cgroups import MemoryGroup
from quire.client import exposition
from quire.client.metrics import Histogram, Metrics, RequestTimes, buckets_125
from quire.config import CacheConfig
from quire.params import SamplingParams
from quire.types import Delta, EngineStats, FinishReason, Request, Usage


def samples(metrics: Metrics) -> dict[str, float]:
    """Sums over labels, by sample name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.text()[0].decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def run(metrics: Metrics, num_requests: int, num_prompt: int, num_output: int, n: int = 1) -> None:
    """Requests one after another, one token a step."""
    now = 0.0
    for i in range(num_requests):
        params = SamplingParams(max_tokens=num_output, n=n)
        request = Request(id=str(i), tokens=[1] * num_prompt, sampling=params, seed=0, max_tokens=num_output)
        times = RequestTimes(request, now)
        for _ in range(n):
            metrics.scheduled(times, now + 0.01)
        for step in range(num_output):
            now += 0.1
            news = [(times, Delta(request.id, k, [5], Usage(num_prompt, 2, step + 1))) for k in range(n)]
            metrics.step(news, now)
        metrics.end(times, FinishReason.LENGTH, now)


def test_counts_of_ten_requests_of_ten_tokens() -> None:
    metrics = Metrics("m", prefix="vllm")
    run(metrics, 10, 7, 10)
    found = samples(metrics)
    assert found["vllm:inter_token_latency_seconds_count"] == 90
    assert found["vllm:iteration_tokens_total_count"] == 100
    assert found["vllm:iteration_tokens_total_sum"] == 10 * (7 + 10)
    assert found["vllm:prompt_tokens_total"] == 70
    assert found["vllm:prompt_tokens_cached_total"] == 20
    assert found["vllm:generation_tokens_total"] == 100
    assert found["vllm:request_success_total"] == 10
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_params_n",
        "request_num_preemptions",
        "request_time_per_output_token_seconds",
    ):
        assert found[f"vllm:{name}_count"] == 10, name
    assert found["vllm:request_prompt_tokens_sum"] == 70
    assert found["vllm:request_generation_tokens_sum"] == 100
    assert found["vllm:request_params_max_tokens_sum"] == 100
    assert found["vllm:request_num_preemptions_sum"] == 0


def test_labels_are_the_model_and_the_engine() -> None:
    metrics = Metrics("")
    metrics.stats = EngineStats(num_blocks=10)
    metrics.name_model("some/model", CacheConfig(block_size=32), max_model_len=64)
    text = metrics.text()[0].decode()
    assert 'quire:num_requests_running{engine="0",model_name="some/model"} 0.0' in text
    assert 'finished_reason="length"' in text
    assert 'kv_cache_size_tokens="320"' in text
    assert 'kv_cache_max_concurrency="5.00"' in text


def test_parallel_samples_count_once_as_a_request_and_each_in_gaps() -> None:
    metrics = Metrics("m")
    run(metrics, 2, 4, 5, n=3)
    found = samples(metrics)
    assert found["quire:inter_token_latency_seconds_count"] == 2 * 3 * 4
    assert found["quire:time_to_first_token_seconds_count"] == 2
    assert found["quire:request_params_n_sum"] == 6
    assert found["quire:request_generation_tokens_sum"] == 2 * 3 * 5
    assert found["quire:request_max_num_generation_tokens_sum"] == 2 * 5
    assert found["quire:request_num_preemptions_sum"] == 0


def test_a_second_slot_is_a_preemption() -> None:
    request = Request(id="a", tokens=[1], sampling=SamplingParams(), seed=0, max_tokens=4)
    metrics, times = Metrics("m"), RequestTimes(request, 1.0)
    metrics.scheduled(times, 2.0)
    metrics.scheduled(times, 5.0)
    assert times.num_preemptions == 1
    assert times.scheduled == 2.0


def test_counters_never_fall_when_the_engine_starts_again() -> None:
    metrics = Metrics("m")
    metrics.stats = EngineStats(prefix_hits=5, prefix_queries=9, num_preemptions=2, num_running=3)
    metrics.ended()
    found = samples(metrics)
    assert found["quire:prefix_cache_hits_total"] == 5
    assert found["quire:num_requests_running"] == 0
    metrics.stats = EngineStats(prefix_hits=1)
    found = samples(metrics)
    assert found["quire:prefix_cache_hits_total"] == 6
    assert found["quire:num_preemptions_total"] == 2


def test_drafts_are_counted_by_position_and_over_restarts() -> None:
    metrics = Metrics("m")
    metrics.stats = EngineStats(
        spec_drafts=4, spec_draft_tokens=9, spec_accepted_tokens=5, spec_accepted_per_pos=[3, 2]
    )
    metrics.ended()
    metrics.stats = EngineStats(
        spec_drafts=1, spec_draft_tokens=3, spec_accepted_tokens=3, spec_accepted_per_pos=[1, 1, 1]
    )
    found = samples(metrics)
    assert found["quire:spec_decode_num_drafts_total"] == 5
    assert found["quire:spec_decode_num_draft_tokens_total"] == 12
    assert found["quire:spec_decode_num_accepted_tokens_total"] == 8
    family = next(f for f in metrics.families.collect() if f.name.endswith("accepted_tokens_per_pos"))
    assert [(s.labels["position"], s.value) for s in family.samples] == [("0", 4), ("1", 3), ("2", 1)]


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 99):
        histogram.observe(value)
    assert histogram.rows() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 104


def test_buckets_reach_the_model_length_and_no_further() -> None:
    assert buckets_125(100) == (1, 2, 5, 10, 20, 50, 100)
    assert buckets_125(0) == (1,)


def test_work_of_the_last_minute_is_a_share_of_the_limits() -> None:
    metrics = Metrics("m")
    read = dict[str, float]()
    for second in range(200):  # the first hundred idle, then 3 GB/s, 40 GFLOP/s, half the time in steps
        done = max(0, second - 100)
        metrics.stats = EngineStats(
            read_bytes=3e9 * done, operations=4e10 * done, step_seconds=0.5 * done, limits=(3e10, 1e11)
        )
        read = metrics.work.shares(float(second))
        if second == 130:  # half of the minute was idle
            assert abs(read["bandwidth_perc"] - 0.05) < 1e-9
    assert read == {
        "read_bytes_per_second": 3e9,
        "operations_per_second": 4e10,
        "busy_perc": 0.5,
        "bandwidth_perc": 0.1,
        "arithmetic_perc": 0.4,
        "read_limit_bytes_per_second": 3e10,
        "operations_limit_per_second": 1e11,
    }
    metrics.ended()  # the new engine's counters start at 0
    metrics.stats = EngineStats(read_bytes=0.0)
    assert metrics.work.shares(200.0)["read_bytes_per_second"] > 2.9e9
    for _ in range(1000):  # a flood of scrapes keeps no more looks
        metrics.work.look(200.1)
    assert len(metrics.work._looks) < 70
    found = samples(metrics)
    assert found["quire:step_read_bytes_total"] == 3e9 * 99
    assert "quire:engine_bandwidth_perc" not in found
    assert "quire:engine_busy_perc" in found


def test_memory_is_that_of_the_tightest_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [MemoryGroup(None, 90, 2), MemoryGroup(100, 80, 9)]
    monkeypatch.setattr(exposition, "memory_groups", lambda: groups)
    metrics = Metrics("m")
    metrics.killed("memory")
    metrics.killed(None)
    found = samples(metrics)
    assert found["quire:memory_left_bytes"] == 20
    assert found["quire:memory_limit_bytes"] == 100
    assert found["quire:memory_used_bytes"] == 80
    assert found["quire:memory_oom_kills_total"] == 2
    assert found["quire:engine_kills_total"] == 1
    del groups[1]
    assert "quire:memory_left_bytes" not in samples(metrics)
    groups.clear()
    assert samples(metrics)["quire:memory_oom_kills_total"] == 0
