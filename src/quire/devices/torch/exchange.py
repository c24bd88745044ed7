"""Exchange between ranks through torch.distributed's gloo. Knows torch; sums go in the order of `Peers`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from quire.sockets import receive_exactly
from quire.weights.tensor import FloatArray

dist: Any = torch.distributed  # its process groups are not in its type stubs
PORT = struct.Struct("<I")


class GlooExchange:
    """`Exchange` over a gloo process group of its own. Its store is at the first rank, on a port of its own."""

    def __init__(self, rank: int, size: int, patience: float) -> None:
        self._rank, self._size, self._patience = rank, size, patience
        self._links: dict[int, socket.socket] = {}
        self._group: Any = None
        self._gone: int | None = None

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        self._links = dict(links)
        limit, options = timedelta(seconds=seconds), dist.ProcessGroupGloo._Options()
        if self._rank == 0:
            host = next(iter(links.values())).getsockname()[0]
            store = dist.TCPStore(host, 0, self._size, True, limit, wait_for_workers=False)
            for link in links.values():
                link.sendall(PORT.pack(store.port))
        else:
            host = links[0].getpeername()[0]
            try:
                (port,) = PORT.unpack(receive_exactly(links[0], PORT.size))
            except EOFError:
                raise RuntimeError("rank 0 has ended") from None
            store = dist.TCPStore(host, port, self._size, False, limit)
        own = next(iter(links.values())).getsockname()[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=self._patience)
        self._group = dist.ProcessGroupGloo(store, self._rank, self._size, options)

    def exchange(self, parts: FloatArray) -> None:
        if self._group is None:
            raise RuntimeError("the ranks are not connected yet")
        rows = [torch.from_numpy(row) for row in parts]
        own = rows[self._rank]
        rows[self._rank] = torch.empty_like(own)
        try:
            self._group.allgather([rows], [own]).wait()
        except RuntimeError as error:
            if self._gone is not None:
                raise RuntimeError(f"rank {self._gone} has ended") from error
            raise

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def abort(self, rank: int) -> None:
        self._gone = rank
        with suppress(RuntimeError):
            if self._group is not None:
                self._group.abort()
