"""A machine other than the first: starts its ranks, which find the engine at --master-addr, and starts them again.

An engine that ends takes its ranks with it. The next one needs new ones, so this process goes on until a signal, or
until no engine answers for --distributed-timeout-seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import threading

from quire.config import EngineConfig
from quire.ranks.peers import shared_files
from quire.ranks.processes import NO_ENGINE, RankJoin, RankProcess

log = logging.getLogger("quire.engine")

LOOK = 0.2
"""Look for signals every LOOK seconds."""


def run_node(config: EngineConfig) -> int:
    """Run this machine's ranks until SIGTERM, SIGINT or SIGHUP; returns the exit status, 1 if no engine was found."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopped.set())
    while not stopped.is_set():
        if not run_once(config, stopped):
            return 1
    return 0


def run_once(config: EngineConfig, stopped: threading.Event) -> bool:
    """Run the ranks until one of them ends. False: they found no engine."""
    parallel = config.parallel
    address = parallel.master_addr, parallel.master_port
    files, ended = shared_files(parallel), threading.Event()
    log.info("ranks %s look for the engine at %s:%d", list(parallel.own_ranks), *address)
    ranks = [
        RankProcess(RankJoin(config, rank, address, parallel.secret, files.get(rank)), ended.set)
        for rank in parallel.own_ranks
    ]
    try:
        while not stopped.is_set() and not ended.wait(LOOK):
            pass
        return all(rank.status != NO_ENGINE for rank in ranks)
    finally:
        for rank in ranks:
            rank.stop()
        for file in set(files.values()):
            os.close(file)
