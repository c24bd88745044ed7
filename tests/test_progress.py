"""How far long work is: told on a terminal and in a log, by a clock of the test's own, and by each command."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.meter import EVERY, SOON, Wait, Work, draw_bar, in_bytes, write_lines
from quire.progress import progress
from tests.hub_server import HubServer, hub_server
from tests.tiny import write_checkpoint


class Clock:
    """Time that passes when somebody waits; the work ends after `seconds`, and meanwhile does `rate` of it each."""

    def __init__(self, seconds: float, rate: int) -> None:
        self.now, self.end, self.rate, self.waits = 0.0, seconds, rate, list[float]()
        self.work: Work | None = None

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        assert self.work is not None
        self.waits.append(seconds)
        self.now = min(self.now + seconds, self.end)
        self.work.done = int(self.now * self.rate)
        return self.now >= self.end

    def worked(self, total: int | None, unit: str = "") -> tuple[Work, Wait]:
        self.work = Work("loading M", total, unit, self)
        return self.work, self.wait


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server(tmp_path, monkeypatch) as server:
        yield server


def test_a_log_has_a_line_soon_and_then_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(22.0, 300_000_000)
    with caplog.at_level(logging.INFO, "quire.progress"):
        write_lines(*clock.worked(6_600_000_000))
    assert clock.waits == [SOON, EVERY, EVERY, EVERY]
    assert [record.getMessage() for record in caplog.records] == [
        "loading M: 300.0 MB of 6.6 GB (5%), 21 s left",
        "loading M: 3.3 GB of 6.6 GB (50%), 11 s left",
        "loading M: 6.3 GB of 6.6 GB (95%), 1 s left",
    ]


def test_a_terminal_has_one_line_that_is_cleared_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    draw_bar(*Clock(3.0, 2).worked(8, "layers"))
    drawn = capsys.readouterr().err.split("\r\x1b[K")
    assert drawn[1] == f"[{'#' * 5}{'-' * 15}] loading M: 2 of 8 layers (25%), 3 s left"
    assert len(drawn) == 6
    assert drawn[-1] == ""


def test_short_work_tells_nothing(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "quire.progress"):
        write_lines(*Clock(0.5, 2).worked(8, "layers"))
        draw_bar(*Clock(0.5, 2).worked(8, "layers"))
    assert (caplog.records, capsys.readouterr().err) == ([], "")


def test_a_line_says_no_more_than_is_known() -> None:
    clock = Clock(100.0, 0)
    work, _ = clock.worked(None)
    clock.now = 12.0
    assert work.line() == "loading M: 12 s"
    work, _ = clock.worked(1000)
    assert work.line() == "loading M: 0 bytes of 1.0 kB (0%)"
    work.advance(1001)  # counted with what is not part of the total
    assert work.line() == "loading M: 1.0 kB of 1.0 kB (100%), 0 s left"
    assert [in_bytes(size) for size in (999, 1500, 2_500_000)] == ["999 bytes", "1.5 kB", "2.5 MB"]


def test_nobody_is_told_unless_somebody_watches(capfd: pytest.CaptureFixture[str]) -> None:
    """In a program that uses Quire as a library, and set up no log."""
    with progress("loading M", 10) as told:
        told(10)
    assert capfd.readouterr() == ("", "")


# Runs a command, and prints what work it tells of: label, done, total, unit.
RECORDED = """
import json, sys
from quire import cli, meter
found = []
def record(work, wait):
    wait(600)
    work.line()
    found.append((work.label, work.done, work.total, work.unit))
meter.write_lines = record
try:
    cli.main(sys.argv[1:])
finally:
    print("\\n" + json.dumps(found))
"""


def works(*args: str | Path) -> list[tuple[str, int, int, str]]:
    command = [sys.executable, "-c", RECORDED, *map(str, args)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return [
        (label, done, total, unit) for label, done, total, unit in json.loads(ran.stdout.splitlines()[-1])
    ]


def whole(label: str, works: list[tuple[str, int, int, str]], unit: str = "") -> bool:
    """Whether the work was told of from nothing to its end, in this unit."""
    (found,) = (work for work in works if work[0].startswith(label))
    return found[3] == unit and 0.8 * found[2] <= found[1] <= 1.2 * found[2]


def test_every_long_command_tells_how_far_it_is(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    assert whole(f"loading {model}", works("generate", "Once", "--model", model, "--max-tokens", "2"))
    built = works("build", model, "-o", tmp_path / "built")
    assert whole("packing", built)
    converted = works("convert", model, "-o", tmp_path / "converted", "-tp", "2")
    assert whole("writing rank 0 of 2", converted)
    assert whole("writing rank 1 of 2", converted)
    grouped = ("--method", "rtn", "--group-size", "16")
    assert whole("rtn of", works("quantize", model, "-o", tmp_path / "small", *grouped), "layers")
    works("convert", model, "-o", tmp_path / "one")
    one = tmp_path / "one"
    assert whole(f"loading {one}", works("generate", "Once", "--model", one, "--max-tokens", "2"))


def test_every_benchmark_tells_how_far_it_is(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little dog. " * 20)
    lengths = ["--input-len", "8", "--output-len", "4"]
    ran = works("bench", "throughput", *lengths, "--num-prompts", "3", "--num-iters", "2")
    assert ("throughput", 6, 6, "requests") in ran
    ran = works("bench", "latency", *lengths, "--num-iters", "1", "--num-iters-warmup", "1")
    assert ("latency", 2, 2, "runs") in ran
    assert whole("quality", works("bench", "quality", "--text", text, "--window", "32"), "tokens")


def test_fetching_tells_how_far_it_is(hub: HubServer) -> None:
    assert whole("fetching owner/real", works("pull", "owner/real"))
    assert not works("pull", "owner/real")
