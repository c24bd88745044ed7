"""Exchange between ranks over TCP: each sends its part to all others. Knows sockets and arrays."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from quire.weights.tensor import FloatArray

SPINS = 100
"""Looks at the sockets before the rank sleeps: answers come within microseconds if ranks are in step."""
LOOK = 0.2
"""Seconds of sleep between looks at whether a rank has gone."""


class SocketExchange:
    """`Exchange` over one connection per pair of ranks. Used from one thread, except `abort`."""

    def __init__(self, rank: int, size: int, patience: float) -> None:
        self._rank, self._size, self._patience = rank, size, patience
        self._links: dict[int, socket.socket] = {}
        self._gone: int | None = None

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        for link in links.values():
            link.setblocking(False)
        self._links = dict(links)

    def exchange(self, parts: FloatArray) -> None:
        own = memoryview(parts[self._rank]).cast("B")
        sending = dict.fromkeys(self._links, own)
        receiving = {rank: memoryview(parts[rank]).cast("B") for rank in self._links}
        if len(receiving) != self._size - 1:
            raise RuntimeError("the ranks are not connected yet")
        idle, began = 0, time.monotonic()
        while sending or receiving:
            if self._gone is not None:
                raise RuntimeError(f"rank {self._gone} has ended")
            if self._move(sending, receiving):
                idle, began = 0, time.monotonic()
                continue
            idle += 1
            if idle > SPINS:
                self._wait(sending, receiving)
                if time.monotonic() - began > self._patience:
                    late = next(iter(receiving or sending))
                    raise RuntimeError(f"rank {late} has not answered for {self._patience:.0f} s")

    def abort(self, rank: int) -> None:
        self._gone = rank
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _move(self, sending: dict[int, memoryview], receiving: dict[int, memoryview]) -> bool:
        """Send and receive what is possible without waiting; whether anything was."""
        moved = False
        for left, receives in ((sending, False), (receiving, True)):
            for rank, view in list(left.items()):
                link = self._links[rank]
                try:
                    count = link.recv_into(view) if receives else link.send(view)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise RuntimeError(f"rank {rank} has ended: {error}") from error
                if not count:
                    raise RuntimeError(f"rank {rank} has ended")
                moved = True
                if count < len(view):
                    left[rank] = view[count:]
                else:
                    del left[rank]
        return moved

    def _wait(self, sending: dict[int, memoryview], receiving: dict[int, memoryview]) -> None:
        poller = select.poll()
        for rank in {*sending, *receiving}:
            wanted = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
            poller.register(self._links[rank], wanted)
        poller.poll(LOOK * 1000)
