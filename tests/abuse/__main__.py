"""One user must not hold up another: `make abuse` prints the worst wait of a user beside each attack.

A real server serves the shipped model. The second user asks for ten tokens again and again, while another process
attacks. `ONLY=PART` runs the attacks with that part in their names.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import statistics
import sys
import time
from collections.abc import Callable

import httpx
import psutil

from tests.abuse.attacks import ATTACKS, SECONDS, attack
from tests.serve.running import Server, start

BODY = {"prompt": "Once upon a time", "max_tokens": 10, "ignore_eos": True}
QUIET_SECONDS = 5.0
BOUND = 0.2


def waits(http: httpx.Client, goes_on: Callable[[], bool]) -> list[float]:
    """Seconds that each request for ten tokens took while `goes_on`."""
    found = []
    while goes_on():
        begun = time.monotonic()
        http.post("/v1/completions", json=BODY).raise_for_status()
        found.append(time.monotonic() - begun)
        time.sleep(0.01)
    return found


def attacked(server: Server, http: httpx.Client, name: str) -> list[float]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description="The worst wait of one user beside the attacks of another.")
    parser.add_argument("--only", default="", help="Run the attacks whose names contain this.")
    only = parser.parse_args().only
    server = start(maker="quire.client.start", model="", disable_uvicorn_access_log=True)
    with httpx.Client(base_url=server.url, timeout=120) as http:
        end = time.monotonic() + QUIET_SECONDS
        alone = waits(http, lambda: time.monotonic() < end)
        normal = statistics.median(alone)
        print(f"alone: {normal:.3f} s, at worst {max(alone):.3f} s, {memory(server)} MiB")
        print(f"{'attack':<28} {'worst':>8} {'median':>8} {'MiB':>6}")
        slow = []
        for name in ATTACKS:
            if only in name:
                found = attacked(server, http, name)
                print(
                    f"{name:<28} {max(found):>8.3f} {statistics.median(found):>8.3f} {memory(server):>6}",
                    flush=True,
                )
                if max(found) > normal + BOUND:
                    slow.append(name)
    status = server.stop()
    print(f"beyond {BOUND} s more than alone: {', '.join(slow) or 'none'}")
    return 1 if slow or status else 0


if __name__ == "__main__":
    sys.exit(main())
