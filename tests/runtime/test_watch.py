"""The watch measures stays by cause, and shows signs of life to another process, which tells long from hung."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.client import signs
from quire.client.signs import SignsOfLife
from quire.runtime import watch
from quire.runtime.watch import Doing, Watch, shared_page
from tests.waiting import wait_until


def test_the_longest_stay_is_kept_by_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 3.5, 10.0, 11.0])
    monkeypatch.setattr(watch, "perf_counter", lambda: next(times))
    one = Watch()
    for doing in (Doing.COMMANDS, Doing.FORWARD_PASS, Doing.COMMANDS, Doing.SLOTS, Doing.IDLE):
        one.enter(doing)
    assert one.longest == {"commands": 6.5, "slots": 1.0}


def test_an_engine_reports_what_its_loop_did() -> None:
    llm = LLM(max_model_len=64, threads=1)
    llm.generate("Once", SamplingParams(max_tokens=4), use_tqdm=False)
    stays = llm.stats().longest_stays
    assert {"schedule", "slots", "results"} <= set(stays)
    assert not {"idle", "forward pass"} & set(stays)
    assert all(0 < seconds < 60 for seconds in stays.values())


@pytest.mark.parametrize(
    ("doing", "code", "hangs"),
    [
        (Doing.STEP, "while True: pass", True),
        (Doing.SLOTS, "import time; time.sleep(99)", True),
        (Doing.FORWARD_PASS, "import time; time.sleep(99)", True),
        (Doing.FORWARD_PASS, "while True: pass", False),
        (Doing.ORDERS, "while True: pass", False),
    ],
)
def test_signs_of_life(doing: Doing, code: str, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: long things are alive while they use the processor, others while they go on."""
    now = 0.0
    monkeypatch.setattr(signs.time, "monotonic", lambda: now)
    life = SignsOfLife(False)
    loop = Watch(shared_page(life.descriptor))
    with subprocess.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE
    ) as process:
        try:
            life.pid = process.pid
            for _ in range(3):
                now += 1.0
                loop.enter(doing)
                assert life.silence() == 0.0
            assert life.doing is doing
            assert process.stdout is not None
            process.stdout.readline()
            if "sleep" in code:
                wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING)
            life.silence()
            for _ in range(4):
                now += 1.0
                time.sleep(0.3)  # much longer than a tick of CPU time, also on a busy machine
                silence = life.silence()
            assert silence == 4.0 if hangs else silence < 4.0
            now += 1000.0
            loop.enter(Doing.IDLE)
            assert life.silence() == 0.0
            now += 1000.0  # this process was stopped, not that one
            assert life.silence() <= signs.LONGEST_LOOK
        finally:
            process.kill()
