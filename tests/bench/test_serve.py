"""`quire bench serve` against a server that is known: the figures are those that were served."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from quire.bench.client import Outcome, Target
from quire.bench.datasets import Sample
from quire.bench.metrics import (
    Summary,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    spec_counters,
    spec_result,
)
from quire.bench.plot import need_matplotlib
from quire.bench.serve import COMMAND, ServeOptions, _Run, _served, run
from quire.cli import main
from quire.errors import ConfigError, EngineError
from tests.bench.fake_server import FakeServer, fake_server
from tests.tiny import write_tokenizer

KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
    "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
}  # fmt: skip


def bench(server: FakeServer, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """Run and read the saved result back."""
    given = {
        "num_prompts": 12,
        "random_input_len": 6,
        "random_output_len": 5,
        "disable_tqdm": True,
        **options,
    }
    run(
        ServeOptions(
            base_url=server.url, save_result=True, result_dir=str(tmp_path), result_filename="r.json", **given
        )
    )
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return result


def test_the_result_has_vllms_keys_and_the_counts_that_were_served(tmp_path: Path) -> None:
    with fake_server(cached_tokens=3) as server:
        result = bench(server, tmp_path, metric_percentiles="50,99.9", max_concurrency=4, save_detailed=True)
        assert result.keys() >= KEYS
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time"):
            for word in ("mean", "median", "std", "p50", "p99.9"):
                assert result[f"{word}_{name}_ms"] >= 0
        assert (result["completed"], result["failed"], result["num_prompts"]) == (12, 0, 12)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (72, 60)
        assert result["prefix_hit_rate"] == pytest.approx(36 / 72)
        assert result["request_goodput"] is None
        assert result["request_rate"] == "inf"
        assert result["max_concurrent_requests"] <= 4
        assert result["max_output_tokens_per_s"] >= result["output_throughput"]
        assert server.behaviour.most_running <= 4
        assert [len(gaps) for gaps in result["itls"]] == [4] * 12
        assert result["generated_texts"] == ["".join(f" t{i}é" for i in range(5))] * 12


def test_what_is_sent(tmp_path: Path) -> None:
    with fake_server() as server:
        bench(
            server,
            tmp_path,
            num_prompts=2,
            ignore_eos=True,
            temperature=0.5,
            top_k=3,
            extra_body='{"min_tokens": 5, "priority": 1}',
            header=("X-Trace=abc",),
            num_warmups=1,
        )
        assert len(server.behaviour.requests) == 3
        sent = server.behaviour.requests[-1]
        assert sent["path"] == "/v1/completions"
        assert sent["headers"]["x-trace"] == "abc"
        wanted = {
            "model": "fake",
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0.5,
            "top_k": 3,
            "min_tokens": 5,
            "priority": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert {k: sent[k] for k in wanted} == wanted
        assert len(sent["prompt"]) == 6
        assert all(type(t) is int for t in sent["prompt"])


def test_chat_needs_text_and_gets_it_from_a_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with fake_server() as server:
        with pytest.raises(ConfigError, match="--tokenizer"):
            bench(server, tmp_path, backend="openai-chat")
        result = bench(server, tmp_path, backend="openai-chat", tokenizer=str(tmp_path), logprobs=2)
        assert result["completed"] == 12
        sent = server.behaviour.requests[-1]
        assert sent["path"] == "/v1/chat/completions"
        assert isinstance(sent["messages"][0]["content"], str)
        assert (sent["max_completion_tokens"], sent["logprobs"], sent["top_logprobs"]) == (5, True, 2)


def test_without_usage_the_pieces_or_the_tokenizer_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path)
    with fake_server(usage=False) as server:
        assert bench(server, tmp_path)["total_output_tokens"] == 60
        assert "no usage" in capsys.readouterr().out
        assert bench(server, tmp_path, tokenizer=str(tmp_path))["total_output_tokens"] == 12 * 5 * 5
        assert bench(server, tmp_path)["total_input_tokens"] == 72


def test_failures_are_counted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(fail_every=3) as server:
        result = bench(server, tmp_path, save_detailed=True)
        assert (result["completed"], result["failed"]) == (8, 4)
        assert [bool(e) for e in result["errors"]].count(True) == 4
        assert result["total_output_tokens"] == 40
        assert "queue is full" in capsys.readouterr().out
    with fake_server(break_after=0) as server, pytest.raises(EngineError, match="all requests failed"):
        bench(server, tmp_path)


def test_a_warm_cache_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(cached_tokens=5) as server:
        bench(server, tmp_path)
        assert "pass another --seed" in capsys.readouterr().out
    with fake_server(cached_tokens=0) as server:
        bench(server, tmp_path)
        assert "pass another --seed" not in capsys.readouterr().out


def test_random_prompts_fit_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        result = bench(server, tmp_path, num_prompts=2, random_input_len=9000, save_detailed=True)
        assert max(result["input_lens"]) + 5 == 4096
        assert "takes 4096 tokens" in capsys.readouterr().err


def test_a_key_is_sent_and_never_printed_or_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("top-secret\n")
    with fake_server(key="top-secret") as server:
        result = bench(server, tmp_path, api_key_file=str(tmp_path / "key"))
        assert result["completed"] == 12
        with pytest.raises(EngineError, match="needs a key: give --api-key-file FILE"):
            bench(server, tmp_path)
        shown = capsys.readouterr()
        assert "top-secret" not in shown.out + shown.err + (tmp_path / "r.json").read_text()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(not_ready=2) as server:
        main(
            f"bench serve --backend vllm --host 127.0.0.1 --port {server.port} --num-prompts 3 --input-len 4 "
            "--output-len 2 --request-rate 200 --burstiness 2 --goodput ttft:5000 --goodput e2el:9000 "
            f"--percentile-metrics ttft,itl --result-dir {tmp_path} --append-result --metadata gpu=none "
            "--ready-check-timeout-sec 20 --ignore-eos --seed 7".split()
        )
    (path,) = tmp_path.glob("vllm-200.0qps-fake-*.json")
    result = json.loads(path.read_text())
    assert (result["completed"], result["gpu"], result["request_rate"]) == (3, "none", 200.0)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert "p99_itl_ms" in result
    assert "p99_tpot_ms" not in result
    assert "itls" not in result
    assert "Time to first token" in capsys.readouterr().out


def test_a_timed_trace_is_sent_in_time_and_compared_with_the_ideal(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 40 * i, "input_length": 600, "output_length": 3, "hash_ids": [0, i + 1]}
        for i in range(6)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with fake_server(cached_tokens=10) as server:
        result = bench(
            server,
            tmp_path,
            dataset_name="timed_trace",
            dataset_path=str(tmp_path / "t.jsonl"),
            save_detailed=True,
        )
    assert result["completed"] == 6
    starts = np.array(result["start_times"])
    assert (starts - starts[0] >= np.arange(6) * 0.04 - 0.02).all()
    assert result["ideal_prefix_hit_rate"] == pytest.approx(5 * 512 / 3600, abs=0.01)
    assert result["total_cached_tokens"] == 60


def test_a_key_may_come_through_a_pipe() -> None:
    """As in a shell's --api-key-file <(...), which can be read once."""
    reads, writes = os.pipe()
    os.write(writes, b"top-secret\n")
    os.close(writes)
    options = ServeOptions(api_key_file=f"/dev/fd/{reads}", sweep="1,2")
    os.close(reads)
    for load in (options, *options.loads()):
        assert load.target().headers["Authorization"] == "Bearer top-secret"


def test_a_sweep_is_one_result_a_load_with_prompts_of_their_own(tmp_path: Path) -> None:
    with fake_server() as server:
        run(
            ServeOptions(
                base_url=server.url, sweep="1,3", sweep_over="max-concurrency", num_prompts=4, input_len=8,
                output_len=3, save_result=True, result_dir=str(tmp_path), result_filename="s.json",
                disable_tqdm=True,
            )
        )  # fmt: skip
        results = [json.loads(line) for line in (tmp_path / "s.json").read_text().splitlines()]
        assert [r["max_concurrency"] for r in results] == [1, 3]
        prompts = [tuple(r["prompt"]) for r in server.behaviour.requests]
        assert len(set(prompts)) == 8


def test_a_sweep_that_breaks_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, loads = _Run.measure, []

    async def broken(self: _Run) -> dict[str, Any]:
        loads.append(self)
        if len(loads) == 2:
            raise KeyboardInterrupt
        return await measure(self)

    monkeypatch.setattr(_Run, "measure", broken)
    with fake_server() as server, pytest.raises(KeyboardInterrupt):
        run(
            ServeOptions(
                base_url=server.url, sweep="1,3", sweep_over="max-concurrency", num_prompts=2, input_len=8,
                output_len=3, save_result=True, result_dir=str(tmp_path), result_filename="s.json",
                disable_tqdm=True,
            )
        )  # fmt: skip
    (result,) = map(json.loads, (tmp_path / "s.json").read_text().splitlines())
    assert result["max_concurrency"] == 1


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra quire-llm[plot]")
    with fake_server() as server:
        common = {
            "base_url": server.url,
            "num_prompts": 6,
            "input_len": 8,
            "output_len": 4,
            "disable_tqdm": True,
        }
        for name, more in (("run", {}), ("sweep", {"sweep": "100,inf"})):
            run(ServeOptions(**common, plot=str(tmp_path / f"{name}.png"), **more))
            assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        need_matplotlib()


@pytest.mark.parametrize(
    "options",
    [
        {"goodput": ("ttft",)},
        {"goodput": ("itl:3",)},
        {"goodput": ("ttft:-1",)},
        {"percentile_metrics": "ttft,nope"},
        {"metric_percentiles": "101"},
        {"metric_percentiles": "a"},
        {"request_rate": -1.0},
        {"ramp_up_strategy": "sideways"},
        {"sweep": "1,x"},
        {"sweep": ","},
        {"sweep": "1,2", "dataset_name": "timed_trace"},
        {"api_key": "a", "api_key_file": "b"},
        {"backend": "grpc"},
        {"num_prompts": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeOptions(**options)


@pytest.mark.parametrize("options", [{"extra_body": "{"}, {"extra_body": "[1]"}, {"metadata": ("x",)}])
def test_options_are_refused_when_used(options: dict[str, Any], tmp_path: Path) -> None:
    with fake_server() as server, pytest.raises(ConfigError):
        bench(server, tmp_path, **options)


# --- the figures themselves, on outcomes made by hand


def outcome(start: float, ttft: float, gaps: list[float], **more: Any) -> Outcome:
    return Outcome(start=start, ttft=ttft, itls=gaps, latency=ttft + math.fsum(gaps), **more)


def test_figures_by_hand() -> None:
    outcomes = [
        outcome(10.0, 0.5, [0.1, 0.3], queue_time=1.0),
        outcome(10.2, 0.25, [], queue_time=0.0),
        Outcome(start=10.0, error="lost"),
        outcome(11.5, 1.0, [0.5], queue_time=0.0, prompt_tokens=7),
    ]
    samples = [Sample("x", 3, 9)] * 4
    summary = Summary(
        ["ttft", "tpot", "itl", "e2el", "e2el_including_client_queue"], [50, 100], {"ttft": 500, "tpot": 250}
    )
    result = summary.result(samples, outcomes, [3, 1, 0, 2], 4.0)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (13, 6)
    assert result["request_throughput"] == pytest.approx(0.75)
    assert result["output_throughput"] == pytest.approx(1.5)
    assert result["total_token_throughput"] == pytest.approx(19 / 4)
    assert result["mean_ttft_ms"] == pytest.approx(1750 / 3)
    assert result["median_tpot_ms"] == pytest.approx((200 + 500) / 2)
    assert result["p100_itl_ms"] == pytest.approx(500)
    assert result["std_itl_ms"] == pytest.approx(float(np.std([100, 300, 500])))
    assert result["p50_e2el_ms"] == pytest.approx(900)
    assert result["p100_e2el_including_client_queue_ms"] == pytest.approx(1900)
    assert result["request_goodput"] == pytest.approx(2 / 4)
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == pytest.approx(4)


def test_no_request_completed() -> None:
    result = Summary(["ttft"], [99], {}).result([Sample("x", 3, 9)], [Outcome(error="x")], [0], 1.0)
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 1, 0.0)


def test_parsing() -> None:
    assert parse_goodput(["ttft:200 tpot:50", "e2el:1e3"]) == {"ttft": 200, "tpot": 50, "e2el": 1000}
    assert parse_percentiles("50, 99.9") == [50, 99.9]
    assert parse_metrics("ttft , itl") == ["ttft", "itl"]


def test_counters_of_speculative_decoding() -> None:
    scrape = (
        "# TYPE vllm:spec_decode_num_drafts_total counter\n"
        'vllm:spec_decode_num_drafts_total{model_name="m"} 10.0\n'
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"} 40.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 30.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 9.0\n'
    )
    result = spec_result({}, spec_counters(scrape))
    assert result["spec_decode_acceptance_rate"] == 75
    assert result["spec_decode_acceptance_length"] == 4
    assert spec_result(spec_counters(scrape), spec_counters(scrape)) == {}
    assert spec_result({}, spec_counters("up 1\n")) == {}


def test_the_servers_counters_are_read_before_and_after(tmp_path: Path) -> None:
    scrape = "".join(
        f"q:spec_decode_{name}_total {{n}}\n"
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    with fake_server(metrics=scrape) as server:
        assert bench(server, tmp_path)["spec_decode_num_drafts"] == 12


def test_the_command_needs_no_engine() -> None:
    assert not COMMAND.uses


class Late:
    """A client whose server listens from the third request on."""

    target = Target.from_url("http://127.0.0.1:9", {}, False)
    tries = 0

    async def get(self, path: str) -> tuple[int, bytes]:
        self.tries += 1
        if self.tries < 3:
            raise EngineError("connection refused")
        return 200, json.dumps({"data": [{"id": "m", "max_model_len": 7}]}).encode()


def test_a_server_that_is_starting_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    late = Late()
    served = asyncio.run(_served(late, ServeOptions()))  # type: ignore[arg-type]
    assert (served.name, served.max_model_len, late.tries) == ("m", 7, 3)
    assert capsys.readouterr().err.splitlines() == ["waiting for http://127.0.0.1:9 ..."]
    with pytest.raises(EngineError):
        asyncio.run(_served(Late(), ServeOptions(ready_check_timeout_sec=0)))  # type: ignore[arg-type]


def test_help_says_what_each_parameter_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help-all"])
    shown = capsys.readouterr().out
    assert "0 takes the likeliest token" in shown
    assert "--no-oversample" in shown
    assert "--no-no-" not in shown


TALKS = [
    {"conversations": [{"from": who, "value": f"{i}{who}{n}"} for n in range(3) for who in ("human", "gpt")]}
    for i in range(4)
]
ANSWER = " t0é t1é"


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_turns_follow_what_was_said(tmp_path: Path, backend: Literal["openai", "openai-chat"]) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(TALKS))
    with fake_server() as server:
        result = bench(server, tmp_path, backend=backend, dataset_name="multi_turn", dataset_path=str(file),
                       multi_turn_num_turns=2, num_prompts=7, output_len=2, disable_shuffle=True)  # fmt: skip
        sent = [r.get("messages") or r["prompt"] for r in server.behaviour.requests if "model" in r]
    assert result["completed"] == 7
    for i in range(4):
        first, second = f"{i}human0", f"{i}human1"
        if backend == "openai":
            assert first in sent
            assert (first + ANSWER + second in sent) == (i < 3)  # seven questions in all
        else:
            begin = {"role": "user", "content": first}
            assert [begin] in sent
            said = [begin, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": second}]
            assert (said in sent) == (i < 3)


def test_turns_after_a_failed_one_fail(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(TALKS[:1]))
    with fake_server(fail_every=1) as server, pytest.raises(EngineError, match="all requests failed"):
        bench(server, tmp_path, dataset_name="multi_turn", dataset_path=str(file), num_prompts=3)


def test_random_turns_need_a_tokenizer(tmp_path: Path) -> None:
    with fake_server() as server:
        with pytest.raises(ConfigError, match="--tokenizer"):
            bench(server, tmp_path, dataset_name="multi_turn")
        write_tokenizer(tmp_path)
        result = bench(server, tmp_path, dataset_name="multi_turn", tokenizer=str(tmp_path), num_prompts=9)
        assert result["completed"] == 9
        assert result["total_output_tokens"] == 9 * 64


def test_costs_follow_the_price(tmp_path: Path) -> None:
    with fake_server() as server:
        result = bench(server, tmp_path, price_per_hour=3.6)
        assert result["cost_per_million_tokens"] == pytest.approx(1000 / result["output_throughput"])
