"""One user must not hold up another: `make abuse` prints the worst waits of a user beside each attack.

A real server serves the shipped model. The second user asks for ten tokens again and again, while another process
attacks. It waits for each token, and for all ten. `ONLY=PART` runs the attacks with that part in their names.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from tests.abuse.attacks import ADAPTERS, ATTACKER, ATTACKS, OPERATOR, SECONDS, USER, attack
from tests.serve.running import Server, start

BODY = {"prompt": "Once upon a time", "max_tokens": 10, "ignore_eos": True, "stream": True}
QUIET_SECONDS = 5.0
BOUND = 0.2


class Waits(NamedTuple):
    """Seconds that one request for ten tokens took, and the longest wait for one of the tokens."""

    whole: float
    token: float


def waits(http: httpx.Client, goes_on: Callable[[], bool]) -> list[Waits]:
    """The waits of requests that are sent one after another while `goes_on`."""
    found = []
    while goes_on():
        begun = time.monotonic()
        times = [begun]
        with http.stream("POST", "/v1/completions", json=BODY) as response:
            response.raise_for_status()
            times += [time.monotonic() for _ in response.iter_raw()]
        found.append(Waits(times[-1] - begun, max(after - before for before, after in pairwise(times))))
        time.sleep(0.01)
    return found


def attacked(server: Server, http: httpx.Client, name: str) -> list[Waits]:
    """The waits while an attack runs, and for a second after it."""
    attacker = multiprocessing.get_context("spawn").Process(
        target=attack, args=(name, server.url), daemon=True
    )
    attacker.start()
    end = time.monotonic() + SECONDS + 5
    found = waits(http, lambda: attacker.is_alive() and time.monotonic() < end)
    attacker.kill()
    attacker.join()
    if attacker.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the attack {name!r} failed by itself")
    until = time.monotonic() + 1.0
    return found + waits(http, lambda: time.monotonic() < until)


def memory(server: Server) -> int:
    """Resident MiB of the server's processes."""
    process = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) >> 20


def row(name: str, found: list[Waits], server: Server) -> str:
    """The worst wait for a token, the worst and the median wait for ten, and the server's memory after it."""
    wholes = [wait.whole for wait in found]
    token, median = max(wait.token for wait in found), statistics.median(wholes)
    return f"{name:<28} {token:>8.3f} {max(wholes):>8.3f} {median:>8.3f} {memory(server):>6}"


def main() -> int:
    parser = argparse.ArgumentParser(description="The worst wait of one user beside the attacks of another.")
    parser.add_argument("--only", default="", help="Run the attacks whose names contain this.")
    only = parser.parse_args().only
    root = Path(tempfile.gettempdir()) / ADAPTERS
    server = start(
        maker="quire.client.start",
        model="",
        disable_uvicorn_access_log=True,
        api_key=[USER, ATTACKER],
        admin_api_key=[OPERATOR],
        max_logprobs=4096,
        enable_lora=True,
        allow_runtime_lora=True,
        lora_root=[str(root)],
    )
    headers = {"Authorization": f"Bearer {USER}"}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as http:
        end = time.monotonic() + QUIET_SECONDS
        alone = waits(http, lambda: time.monotonic() < end)
        print(f"goal: no token later than {BOUND} s")
        print(f"{'attack':<28} {'token':>8} {'ten':>8} {'median':>8} {'MiB':>6}")
        print(row("none", alone, server))
        slow = []
        for name in ATTACKS:
            if only in name:
                found = attacked(server, http, name)
                print(row(name, found, server), flush=True)
                if max(wait.token for wait in found) > BOUND:
                    slow.append(name)
        stays = [line for line in http.get("/metrics").text.splitlines() if "engine_longest_stay" in line]
    status = server.stop()
    shutil.rmtree(root, ignore_errors=True)
    print(*stays[2:], sep="\n")
    print(f"a token took longer than {BOUND} s: {', '.join(slow) or 'never'}")
    return 1 if slow or status else 0


if __name__ == "__main__":
    sys.exit(main())
