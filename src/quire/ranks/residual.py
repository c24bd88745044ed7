"""The residual stream between pipeline stages: arrays over a connection, in the order of steps."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Mapping

import numpy as np

from quire.devices.hidden import HiddenRows
from quire.devices.protocol import FloatArray
from quire.engine.wire import LENGTH


class HostStage:
    """`StageLink` through host memory. A thread reads ahead, so that a stage need not wait until the next is ready."""

    def __init__(self, receives: bool, width: int, max_tokens: int) -> None:
        self._receives, self._width, self._most = receives, width, 4 * width * max_tokens
        self._links: dict[int, socket.socket] = {}
        self._found: queue.SimpleQueue[FloatArray | str] = queue.SimpleQueue()

    def connect(self, links: Mapping[int, socket.socket], seconds: float) -> None:
        self._links = dict(links)
        if self._receives:
            (link,) = links.values()
            threading.Thread(target=self._read, args=(link,), name="quire-stage", daemon=True).start()

    def send(self, hidden: HiddenRows) -> None:
        hidden_TD: FloatArray = np.ascontiguousarray(hidden, np.float32)
        for link in self._links.values():
            link.sendall(LENGTH.pack(hidden_TD.nbytes))
            link.sendall(hidden_TD.data)

    def receive(self, num_tokens: int) -> FloatArray:
        found = self._found.get()
        if isinstance(found, str):
            self._found.put(found)
            raise RuntimeError(found)
        return found.reshape(num_tokens, self._width)

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def abort(self, rank: int) -> None:
        self._found.put(f"rank {rank} has ended")

    def _read(self, connection: socket.socket) -> None:
        header = bytearray(LENGTH.size)
        with connection:
            while _filled(connection, memoryview(header)):
                (size,) = LENGTH.unpack(header)
                if size % (4 * self._width) or size > self._most:
                    break
                hidden = np.empty(size // 4, np.float32)
                if not _filled(connection, hidden.data.cast("B")):
                    break
                self._found.put(hidden)
        self._found.put("the previous stage has ended")


def _filled(connection: socket.socket, left: memoryview) -> bool:
    """Fill memory from the stream; False if it ends before."""
    try:
        while left:
            count = connection.recv_into(left)
            if not count:
                return False
            left = left[count:]
    except OSError:
        return False
    return True
