"""Streams of all kinds over three replicas that are killed, frozen and drained: none may be lost or changed.

    python bench/failover.py --streams 2000 --clients 16

Prints what happened, and the longest times that clients waited for bytes: since which harm, if there was one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where `tests` is a package

from tests.cluster.fleet import Fleet, Load
from tests.cluster.stand_in import router
from tests.waiting import wait_until

HARMS = ("kill", "engine", "freeze", "drain", "freeze engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    fleet = Fleet()
    try:
        with router(*fleet.options()) as running:
            wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 3, 60)
            load = Load(running, options.clients)
            began, harms = time.monotonic(), list[tuple[float, str]]()
            for number in itertools.count():
                if load.count >= options.streams:
                    break
                how = HARMS[number % len(HARMS)]
                harms.append((time.monotonic(), how))
                fleet.disturb(number % 3, how)
                time.sleep(1)
            load.end()
            print(f"{load.count} answers in {time.monotonic() - began:.0f} s, {len(harms)} harms")
            print(f"lost or changed: {len(load.wrong)}; longest waits for bytes:")
            for wait in load.longest[:10]:
                over = wait.at + wait.seconds
                at, how = max([harm for harm in harms if harm[0] < over], default=(began, "no harm"))
                since = f"{over - at:.2f} s after: {how}"
                print(f"  {wait.seconds:.2f} s, {wait.kind}; over {since}")
            for name, value in running.counts().items():
                if "_route_" in name and "bucket" not in name and "created" not in name:
                    print(f"{name} {value:g}")
            for line in load.wrong[:10]:
                print(line[:500])
    finally:
        fleet.kill_all()


if __name__ == "__main__":
    main()
