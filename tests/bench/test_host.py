"""`quire bench host`: a step's cost on the host, and what overlapped steps hide of it."""

from __future__ import annotations

import json

import pytest

from quire import cli
from quire.bench.host import HostOptions, engine, measure, run
from quire.config import ConfigError


def test_all_sequences_decode_in_each_step_and_none_ends_early() -> None:
    for depth in (1, 2):
        core = engine(5, 9, 0.0, depth)
        for _ in range(9):
            deltas = core.step()
            assert sorted(delta.request_id for delta in deltas) == list("01234")
            assert all(delta.tokens == [7] and delta.finish_reason is None for delta in deltas)


def test_overlapped_steps_take_the_device_s_time() -> None:
    figures = measure(4, 10, 20.0)
    assert figures.step_us > 0
    assert figures.overlapped_per_second < 56  # 10 steps take at least 9 times 20 ms


def test_figures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["bench", "host", "--batch", "1,2", "--steps", "3", "--device-ms", "0.1", "--json"])
    assert [figures["batch"] for figures in json.loads(capsys.readouterr().out)] == [1, 2]
    cli.main(["bench", "host", "--batch", "2", "--steps", "3", "--device-ms", "0"])
    assert "a sequence (us)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="numbers of sequences"):
        run(HostOptions(batch="1,x"))
