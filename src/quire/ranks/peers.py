"""Connects the ranks that compute one stage together, to pass activations to each other."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.devices import exchanges
from quire.devices.exchanges import Connected, StageLink
from quire.devices.protocol import Peers
from quire.engine.plan import device_of
from quire.errors import EngineError
from quire.files import unnamed_file
from quire.ranks.connections import Address, Hello, Kind, Links, connect
from quire.ranks.options import ParallelConfig
from quire.ranks.residual import HostStage

PATIENCE = 10.0
"""A rank that the others of its stage wait for counts as hung after PATIENCE seconds."""


def shared_files(parallel: ParallelConfig) -> dict[int, int]:
    """Make, by rank, the file of its stage if all its ranks are on this machine; the others exchange messages."""
    files: dict[int, int] = {}
    size = parallel.tensor_parallel_size
    if size == 1 or parallel.disable_custom_all_reduce or parallel.distributed_executor_backend == "ray":
        return files
    for rank in parallel.own_ranks:
        group = parallel.group_of(rank)
        if rank not in files and group.start in parallel.own_ranks and group[-1] in parallel.own_ranks:
            files |= dict.fromkeys(group, unnamed_file(exchanges.peers_bytes(size)))
    return files


class PeerGroup:
    """A rank's connection to the others of its stage: between GPUs, through the shared file `memory`, or messages."""

    def __init__(self, config: EngineConfig, rank: int, memory: int | None) -> None:
        parallel, device = config.parallel, device_of(config, rank)
        self._rank, self._others = rank, [other for other in parallel.group_of(rank) if other != rank]
        self._first, size = parallel.group_of(rank).start, parallel.tensor_parallel_size
        self._exchange: Connected | None = None
        self.peers: Peers | None = None
        own = rank - self._first
        long = float(parallel.distributed_timeout_seconds)  # a GPU's rank may compile
        if size > 1 and exchanges.passes_tensors(device.device, device.backend):
            self.peers = self._exchange = exchanges.make_device_peers(device.device, own, size, long)
        elif memory is not None:
            self.peers = exchanges.make_peers(memory, own, size, PATIENCE)
        elif size > 1:
            kind: exchanges.ExchangeName = "gloo" if parallel.disable_custom_all_reduce else "tcp"
            self._exchange = exchange = exchanges.make_exchange(kind, own, size, PATIENCE)
            self.peers = exchanges.peers_over(exchange, own, size)

    def connect(self, reach: Callable[[Kind, int], socket.socket], seconds: float) -> None:
        """Connect to the others, over connections that `reach` makes."""
        if self._exchange is not None:
            links = {other - self._first: reach("peer", other) for other in self._others}
            self._exchange.connect(links, seconds)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    def abort(self, rank: int) -> None:
        """End all waiting, because a rank has gone."""
        if self.peers is not None:
            self.peers.abort(rank)


def stage_link(config: EngineConfig, rank: int, receives: bool, width: int, max_tokens: int) -> StageLink:
    """Return a rank's connection to the stage before if it `receives`, or else to the stage after."""
    device = device_of(config, rank)
    if exchanges.passes_tensors(device.device, device.backend):
        long = float(config.parallel.distributed_timeout_seconds)
        return exchanges.make_device_stage(device.device, receives, long)
    return HostStage(receives, width, max_tokens)


class Reach:
    """Connects this rank with others: the higher number connects to the lower one."""

    def __init__(
        self, rank: int, links: Links, addresses: Sequence[Address], secret: bytes, seconds: float
    ) -> None:
        self._rank, self._links, self._addresses = rank, links, addresses
        self._secret, self._seconds = secret, seconds

    def __call__(self, kind: Kind, other: int) -> socket.socket:
        """Connect to another rank. EngineError: it does not answer in time."""
        if other < self._rank:
            return connect(self._addresses[other], self._secret, Hello(kind, self._rank), self._seconds)
        found = self._links.take(kind, other, self._seconds)
        if found is None:
            raise EngineError(f"rank {other} did not connect to rank {self._rank}")
        return found[0]
