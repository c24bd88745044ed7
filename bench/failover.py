"""Streams of all kinds over three replicas that are killed, frozen and drained: none may be lost or changed.

    python bench/failover.py --streams 2000 --clients 16

Prints what happened, and the longest time that a client waited for the next bytes.
"""

from __future__ import annotations

import argparse
import itertools
import time

from tests.cluster.fleet import Fleet, Load
from tests.cluster.stand_in import router, wait_until

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
            began = time.monotonic()
            for number in itertools.count():
                if load.count >= options.streams:
                    break
                fleet.disturb(number % 3, HARMS[number % len(HARMS)])
                time.sleep(1)
            load.end()
            print(f"{load.count} answers in {time.monotonic() - began:.0f} s, {number} harms")
            print(f"lost or changed: {len(load.wrong)}; longest wait for bytes: {load.longest:.2f} s")
            for name, value in running.counts().items():
                if "_route_" in name and "bucket" not in name and "created" not in name:
                    print(f"{name} {value:g}")
            for line in load.wrong[:10]:
                print(line[:500])
    finally:
        fleet.kill_all()


if __name__ == "__main__":
    main()
