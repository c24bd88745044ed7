"""Streams of all kinds over three replicas of the shipped model that are killed, frozen and drained."""

from __future__ import annotations

import time

from tests.cluster.fleet import Fleet, Load
from tests.cluster.stand_in import router, wait_until


def test_no_answer_is_lost_or_changed() -> None:
    fleet = Fleet()
    try:
        with router(*fleet.options(), "--verify-failover", "0.3") as running:
            wait_until(lambda: running.metric('quire_route_replicas{what="up"}') == 3, 60)
            load = Load(running, 6)
            assert len(load.classes["adapter"]) == 1
            assert load.classes["adapter"] == load.classes["whole adapter"] == load.classes["adapter-chat"]
            assert load.classes["adapter"] != load.classes["greedy"]
            for place, how in enumerate(("kill", "engine", "freeze", "drain")):
                time.sleep(1)
                fleet.disturb(place % 3, how)
            load.end()
            assert load.wrong == []
            assert running.metric("quire_route_moves_total") > 0
            assert running.metric('quire_route_checks_total{result="differed"}') == 0
    finally:
        fleet.stop()
