"""`quire bench startup`: what is timed is the first new text, and cold means that files left the page cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from quire.bench.startup import (
    Start,
    StartupOptions,
    cached_share,
    drop_cached,
    engine_flags,
    measure_start,
    results,
    run,
)
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineError
from tests.bench import echo_command


def python(code: str) -> list[str]:
    return [sys.executable, "-c", "import sys, time\n" + code]


def test_the_prompt_is_not_the_first_token() -> None:
    show = "print('héllo', end='', flush=True); time.sleep(1); print(' you', end='', flush=True)"
    start = measure_start(python(show), len("héllo".encode()), 120)
    assert start.ready > 0
    assert start.first_token - start.ready > 0.15


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('hello'); sys.exit('no such model')", "no such model"),
        ("print('hello', end='')", "no token"),
        ("time.sleep(20)", "--timeout"),
    ],
)
def test_a_start_that_fails_says_why(code: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        measure_start(python(code), 5, 60 if "--timeout" not in reason else 0.3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "/some/where", "seed": 7, "dtype": "float32", "max_model_len": 128},
        {"enable_prefix_caching": False, "block_size": 32, "gpu_memory_utilization": 0.25, "threads": 2},
        {"kv_cache_memory_bytes": 1 << 20, "scheduling_policy": "priority", "isa": "scalar"},
    ],
)
def test_the_process_gets_the_same_configuration(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_options(**options)
    monkeypatch.setitem(
        cli.COMMANDS, "echo", cli.Entry("tests.bench.echo_command", "Keep the configuration.")
    )
    cli.main(["echo", *engine_flags(config)])
    assert echo_command.given.pop() == config


def test_files_leave_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    share = cached_share(tmp_path)
    if share is None:
        pytest.skip("this file system does not tell what is in the page cache")
    assert share == 1.0
    shares = []
    for _ in range(5):  # the kernel may hold on to pages that it is still counting as new
        drop_cached(tmp_path)
        shares.append(cached_share(tmp_path) or 0.0)
    if min(shares) == 1.0:
        pytest.skip("this file system keeps its pages: nothing can be cold here")
    assert min(shares) < 0.5


def test_results_have_vllms_keys() -> None:
    found = results([Start(1.0, 2.0), Start(2.0, 4.0)], [Start(0.5, 1.0)], {"load": 0.2})
    assert found["avg_cold_startup_time"] == 3.0
    assert found["cold_startup_times"] == [2.0, 4.0]
    assert found["cold_startup_percentiles"]["50"] == 3.0
    assert found["avg_warm_startup_time"] == 1.0
    assert found["phases"] == {"load": 0.2}
    assert "avg_cold_startup_time" not in results([], [Start(1, 2)], {})


def test_a_run_from_start_to_report(
    tiny_model: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig.from_options(model=tiny_model("llama"), num_gpu_blocks_override=16)
    path = tmp_path / "startup.json"
    run(config, StartupOptions(num_iters_cold=1, num_iters_warmup=0, num_iters_warm=1, output_json=str(path)))
    found = json.loads(path.read_text())
    assert 0 < found["avg_warm_ready_time"] <= found["avg_warm_startup_time"]
    assert found["avg_cold_startup_time"] > 0
    assert found["phases"]
    assert "first token" in capsys.readouterr().out


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError):
        StartupOptions(num_iters_warm=0)
